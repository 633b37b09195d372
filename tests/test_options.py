"""The command line of a generated program."""

from __future__ import annotations

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


def test_options_of_the_command_line() -> None:
    options = options_of("--timesteps", "1e6", "--seed", "1_000", "--checkpoint-dir", "c", "--until-return", "None")
    assert (options.timesteps, options.seed, str(options.checkpoint_dir)) == (1_000_000, 1000, "c")
    assert options.until_return is None
    assert options.checkpoint_interval == 100_000
    assert options_of("--until-return", "-150").until_return == -150.0
    assert options_of("--timesteps", "3").eval_interval == 1
    assert options_of("--seed", str(2**61)).seed == 2**61
    assert options_of("--bench-seconds", "0.5").bench_seconds == 0.5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--timesteps", "-5"), "expected a whole number of at least 0, found '-5'"),
        (("--timesteps", "2.5"), "expected a whole number of at least 0, found '2.5'"),
        (("--timesteps", "many"), "expected a whole number of at least 0, found 'many'"),
        (("--timesteps", "inf"), "expected a whole number of at least 0, found 'inf'"),
        (("--timesteps", "nan"), "expected a whole number of at least 0, found 'nan'"),
        (("--seed", str(2**62)), f"expected a seed below 2**62, found '{2**62}'"),
        (("--seed", "1e300"), "expected a seed below 2**62, found '1e300'"),
        (("--bench-seconds", "0"), "expected seconds above 0, found '0'"),
        (("--bench-seconds=-1",), "expected seconds above 0, found '-1'"),
        (("--bench-seconds", "nan"), "expected seconds above 0, found 'nan'"),
        (("--bench-seconds", "inf"), "expected seconds above 0, found 'inf'"),
        (("--until-return", "nan"), "expected a number or \"none\", found 'nan'"),
        (("--until-return", "high"), "expected a number or \"none\", found 'high'"),
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
