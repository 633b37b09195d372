"""The command line of a generated program."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from pearl.runtime.options import Options, parse_options


def options_of(*arguments: str) -> Options:
    return parse_options("A run.", timesteps=20_000, run_dir="runs/x", until_return=475.0, arguments=arguments)


def test_options_have_the_programs_defaults() -> None:
    options = options_of()
    assert (options.timesteps, options.until_return, options.seed, options.eval_episodes) == (20_000, 475.0, 1, 100)
    assert options.checkpoint_dir == options.run_dir / "checkpoints"
    assert (options.checkpoint_interval, options.eval_interval) == (2000, 1000)
    assert (options.resume, options.serial, options.bench) == (False, False, False)
    assert options_of("--plot").plot
    assert not options_of("--no-plot").plot
    assert (options.eval_max_steps, options.actor_timeout_s) == (30_000, None)


def test_a_program_may_set_the_defaults_of_seed_evaluations_and_checkpoints(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def parsed(*arguments: str) -> Options:
        return parse_options(
            "A run.",
            timesteps=20_000,
            run_dir="runs/x",
            until_return=math.inf,
            seed=7,
            eval_episodes=5,
            eval_interval=300,
            checkpoint_interval=900,
            arguments=arguments,
        )

    options = parsed()
    assert (options.seed, options.eval_episodes, options.until_return) == (7, 5, None)
    assert (options.eval_interval, options.checkpoint_interval) == (300, 900)
    assert (parsed("--eval-interval", "0").eval_interval, parsed("--checkpoint-interval", "8").seed) == (1000, 7)
    with pytest.raises(SystemExit):
        parsed("--help")
    said = " ".join(capsys.readouterr().out.split())
    assert "which select the best weights; 0 for a twentieth of the run (default: 300)" in said
    assert "between checkpoints; 0 for a tenth of the run (default: 900)" in said


def test_paths_stay_where_they_were_when_an_environment_changes_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Path.cwd()
    options = options_of("--run-dir", "r", "--trace", "t.json")
    elsewhere = options_of("--checkpoint-dir", "c")
    monkeypatch.chdir(tmp_path)
    assert (options.run_dir, options.checkpoint_dir) == (here / "r", here / "r" / "checkpoints")
    assert (options.trace, elsewhere.checkpoint_dir) == (here / "t.json", here / "c")


def test_options_of_the_command_line() -> None:
    options = options_of("--timesteps", "1e6", "--seed", "1_000", "--checkpoint-dir", "c", "--until-return", "None")
    assert (options.timesteps, options.seed) == (1_000_000, 1000)
    assert options.until_return is None
    assert options.checkpoint_interval == 100_000
    assert options_of("--until-return", "-150").until_return == -150.0
    assert options_of("--until-return", "inf").until_return is None
    assert options_of("--timesteps", "3").eval_interval == 1
    for seed in (2**61, 2**53 + 1, 2**62 - 1):  # not all of them floats
        assert options_of("--seed", str(seed)).seed == seed
    assert options_of("--bench", "--bench-seconds", "0.5").bench_seconds == 0.5
    assert options_of("--actor-timeout", "2.5").actor_timeout_s == 2.5
    assert options_of("--actor-timeout", "inf").actor_timeout_s == math.inf
    assert options_of("--eval-max-steps", "1e3").eval_max_steps == 1000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--timesteps", "-5"), "expected a whole number of at least 0, found '-5'"),
        (("--timesteps", "2.5"), "expected a whole number of at least 0, found '2.5'"),
        (("--timesteps", "many"), "expected a whole number of at least 0, found 'many'"),
        (("--timesteps", "inf"), "expected a whole number of at least 0, found 'inf'"),
        (("--timesteps", "nan"), "expected a whole number of at least 0, found 'nan'"),
        (("--seed", "one"), "found 'one'"),
        (("--seed", str(2**62)), f"expected a seed below 2**62, found '{2**62}'"),
        (("--seed", "1e300"), "expected a seed below 2**62, found '1e300'"),
        (("--bench-seconds", "0"), "expected seconds above 0, found '0'"),
        (("--bench-seconds=-1",), "expected seconds above 0, found '-1'"),
        (("--bench-seconds", "nan"), "expected seconds above 0, found 'nan'"),
        (("--bench-seconds", "inf"), "expected seconds above 0, found 'inf'"),
        (("--actor-timeout", "-1"), "expected seconds of at least 0, or \"inf\", found '-1'"),
        (("--actor-timeout", "nan"), "expected seconds of at least 0, or \"inf\", found 'nan'"),
        (("--until-return", "nan"), 'expected a number, or "none" or "inf" to use all steps; found \'nan\''),
        (("--until-return", "high"), 'expected a number, or "none" or "inf" to use all steps; found \'high\''),
        (("--until-return=-inf",), 'expected a number, or "none" or "inf" to use all steps; found \'-inf\''),
        *(
            ((option, ""), f"{option}: expected a path, found ''")
            for option in ("--run-dir", "--checkpoint-dir", "--trace")
        ),
        (("--seeds", "3"), "unrecognized arguments: --seeds 3"),
    ],
)
def test_options_that_mean_nothing(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        options_of(*arguments)
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err
