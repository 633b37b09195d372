"""`pearl sweep`: settings are searched by programs that run as processes; what was ended goes on."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from policies import command

from composer.spec_overrides import parse_overrides, parse_value, toml_text
from composer.sweep import trial
from composer.sweep.result import _draw_setting
from composer.sweep.space import Range
from composer.sweep.spec import SweepSpec, read_sweep
from composer.sweep.sweep import run_sweep
from pearl.errors import ConfigurationError, FolderHeldError, PearlError, TrainerError
from pearl.runtime.run_lock import RunLock

optuna = pytest.importorskip("optuna", reason="needs pearl-toolkit[sweep]")
from composer.sweep.study import Study  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "sweeps.md").read_text(encoding="utf-8")

SPEC = """
[actors]
env = "CartPole-v1"
[trainer]
class = "DQN"
[replay]
size = 1000
[program]
timesteps = 2000
[sweep]
seeds = [1, 2]
startup_trials = 1
warmup = 0
[search.trainer]
learning_rate = { low = 0.001, high = 0.1, log = true }
[search.training]
batch_size = { choices = [32, 64] }
"""

# A program that scores 1000 times its learning rate plus its seed. It fails with a batch of 64, and waits, once it has
# been evaluated, while there is a file `wait` in its folder.
PROGRAM = """
import json, pathlib, signal, sys, time
values, arguments = json.loads({values!r}), sys.argv
seed, run = int(arguments[arguments.index("--seed") + 1]), pathlib.Path(arguments[arguments.index("--run-dir") + 1])
run.mkdir(exist_ok=True)
with (run / "starts").open("a") as file:
    file.write("started\\n")
if values["training.batch_size"] == 64:
    sys.exit("some output\\nError: the robot fell\\nat last")
score = 1000 * values["trainer.learning_rate"] + seed
rows = "".join(f"{{step}},0.1,progress,{{step}},{{score}},0,20\\n" for step in (100, 208, 304))
(run / "evaluations.csv").write_text("env_steps,wall_s,kind,weights_step,mean_return,std_return,episodes\\n" + rows)
(run / "checkpoints").mkdir(exist_ok=True)
def stop(*_):
    (run / "saved").touch()
    sys.exit(130)
signal.signal(signal.SIGINT, stop)
while (pathlib.Path(__file__).parent.parent / "wait").exists():
    time.sleep(0.02)
(run / "summary.json").write_text(json.dumps({{"last": {{"mean": score}}, "best": {{"mean": 2 * score}}}}))
"""


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SweepSpec:
    """A sweep whose programs are stand-ins, which take no time to compose."""

    def compose(spec: SweepSpec, values: Mapping[str, Any], program: Path) -> list[str]:
        text = PROGRAM.format(values=json.dumps(dict(values)))
        return [sys.executable, "-c", f"import pathlib; pathlib.Path({str(program)!r}).write_text({text!r})"]

    monkeypatch.setattr(trial, "compose_command", compose)
    return read_sweep(write(tmp_path))


def write(folder: Path, text: str = SPEC) -> Path:
    file = folder / "my_sweep.toml"
    file.write_text(text, encoding="utf-8")
    return file


def queue(spec: SweepSpec, folder: Path, *values: tuple[float, int]) -> None:
    """The values of the first trials."""
    folder.mkdir(exist_ok=True)
    study = Study(spec, folder)._study
    for rate, batch in values:
        study.enqueue_trial({"trainer.learning_rate": rate, "training.batch_size": str(batch)})


def table(folder: Path) -> list[dict[str, str]]:
    with (folder / "sweep.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def when(condition: Any, then: Any) -> threading.Thread:
    """Do `then` once `condition` holds."""

    def watch() -> None:
        deadline = time.monotonic() + 60
        while not condition() and time.monotonic() < deadline:
            time.sleep(0.02)
        then()

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


# --- trials -----------------------------------------------------------------------------------------------------------


def test_a_sweep_leaves_a_table_and_a_picture_and_goes_on(spec: SweepSpec, tmp_path: Path) -> None:
    folder = tmp_path / "sweeps" / "my_sweep"
    folder.mkdir(parents=True)
    queue(spec, folder, (0.01, 32), (0.02, 64), (0.05, 32))
    done = command("sweep", spec.path, "--trials", 3, "--jobs", 2)
    assert done.exit_code == 0, done.output
    assert "Search: trainer.learning_rate: 0.001 to 0.1, logarithmic\n" in done.output
    assert "Trial 1 failed: the robot fell (exit code 1; " in done.output
    rows = table(folder)
    assert [row["state"] for row in rows] == ["complete", "failed", "complete"]
    assert [row["objective"] for row in rows] == ["11.5", "", "51.5"]
    assert (rows[2]["seed_1"], rows[2]["seed_2"], rows[2]["training.batch_size"]) == ("51.0", "52.0", "32")
    assert rows[1]["reason"].startswith("the robot fell (exit code 1; ")
    assert (folder / "sweep.png").read_bytes().startswith(b"\x89PNG")
    assert "Best:    trial 2" in done.output
    again = done.output.rpartition("Best:")[2]
    assert "--budget 0 --set=program.eval_interval=100 '--set=program.until_return=\"none\"'" in again
    assert "--set=trainer.learning_rate=0.05 --set=training.batch_size=32" in again
    assert not list(folder.glob("*/*/checkpoints"))
    assert command("sweep", spec.path, "--trials", 3).exit_code == 0
    assert len(table(folder)) == 3
    queue(spec, folder, (0.03, 32))
    assert command("sweep", spec.path, "--trials", 4).exit_code == 0
    assert table(folder)[3]["objective"] == "31.5"
    assert (folder / "trial-0000" / "seed-1" / "starts").read_text() == "started\n"


@pytest.mark.parametrize(("score", "objective", "expected"), [("best", "median", 26.0), ("last", "mean", 14.0)])
def test_scores_of_seeds_are_grouped(
    spec: SweepSpec, tmp_path: Path, score: str, objective: str, expected: float
) -> None:
    stated = f'[sweep]\nseeds = [1, 3, 8]\nscore = "{score}"\nobjective = "{objective}"\n'
    found = read_sweep(write(tmp_path, re.sub(r"\[sweep\].*?(?=\[search)", stated, SPEC, flags=re.DOTALL)))
    queue(found, tmp_path / "s", (0.01, 32))
    study, code = run_sweep(found, tmp_path / "s", 1, 1, lambda line: None)
    assert code == 0
    assert study.rows()[0].objective == expected


def test_a_trial_behind_the_median_is_ended_early(spec: SweepSpec, tmp_path: Path) -> None:
    folder = tmp_path / "s"
    queue(spec, folder, (0.05, 32), (0.001, 32))
    said: list[str] = []
    wait = when(lambda: any("Trial 0: mean" in line for line in said), (folder / "wait").touch)
    study, _ = run_sweep(spec, folder, 1, 1, said.append)
    wait.join()
    study, code = run_sweep(spec, folder, 2, 1, said.append)  # the program would wait for ever
    assert code == 0
    assert [row.state for row in study.rows()] == ["complete", "pruned"]
    assert "Trial 1 pruned: behind the median of the others" in said
    assert not (folder / "trial-0001" / "seed-2").exists()
    assert not list(folder.glob("*/*/checkpoints"))


def test_a_sweep_stops_at_an_interruption_and_goes_on_with_the_same_trials(spec: SweepSpec, tmp_path: Path) -> None:
    spec = replace(spec, pruner="none")  # the better trial, if it ends first, would prune the other
    folder = tmp_path / "s"
    queue(spec, folder, (0.01, 32), (0.02, 32))
    (folder / "wait").touch()
    said: list[str] = []
    began = when(
        lambda: len(list(folder.glob("*/seed-1/evaluations.csv"))) == 2, lambda: os.kill(os.getpid(), signal.SIGINT)
    )
    study, code = run_sweep(spec, folder, 2, 2, said.append)
    began.join()
    assert code == 130
    assert said[-1] == "Stopping: programs save and end; Ctrl-C again ends them at once."
    assert [row.state for row in study.rows()] == ["interrupted"] * 2
    assert len(list(folder.glob("*/seed-1/saved"))) == 2
    (folder / "wait").unlink()
    study, code = run_sweep(spec, folder, 2, 2, said.append)
    assert code == 0
    rows = study.rows()
    assert sorted((row.state, row.objective, row.folder) for row in rows) == [
        ("complete", 11.5, "trial-0000"),
        ("complete", 21.5, "trial-0001"),
    ]


def test_a_killed_sweep_goes_on_with_what_was_done(spec: SweepSpec, tmp_path: Path) -> None:
    """One seed has ended; the program of the other one still runs, as it does not end with the sweep."""
    folder = tmp_path / "s"
    queue(spec, folder, (0.01, 32))
    _, values, name = Study(spec, folder).ask()
    assert (values, name) == ({"trainer.learning_rate": 0.01, "training.batch_size": 32}, "trial-0000")
    for seed in (1, 2):
        (folder / name / f"seed-{seed}").mkdir(parents=True)
    (folder / name / "seed-1" / "summary.json").write_text('{"last": {"mean": 7.0}}')
    (folder / name / "program.py").write_text("raise SystemExit('not to be run')")
    running = RunLock(folder / name / "seed-2")

    def end() -> None:
        (folder / name / "seed-2" / "summary.json").write_text('{"last": {"mean": 9.0}}')
        running.release()

    said: list[str] = []
    ending = when(lambda: said, end)
    study, _ = run_sweep(spec, folder, 1, 1, said.append)
    ending.join()
    assert [(row.number, row.state, row.objective) for row in study.rows()] == [(0, "complete", 8.0)]
    assert said[0].startswith("Trial 0 goes on: learning_rate = 0.01")


def test_a_folder_belongs_to_one_sweep(spec: SweepSpec, tmp_path: Path) -> None:
    folder = tmp_path / "s"
    lock = RunLock(folder)
    with pytest.raises(FolderHeldError, match="--folder"):
        run_sweep(spec, folder, 1, 1, print)
    lock.release()
    Study(spec, folder)
    other = read_sweep(write(tmp_path, SPEC.replace("high = 0.1", "high = 0.2")))
    with pytest.raises(ConfigurationError, match=r"holds a sweep of another specification.*--folder"):
        run_sweep(other, folder, 1, 1, print)
    (folder / "study.db").write_text("no database" * 100)
    with pytest.raises(ConfigurationError, match=r"study\.db cannot be opened as the study of a sweep: .*remove"):
        run_sweep(spec, folder, 1, 1, print)


def test_trials_of_a_lost_study_are_not_taken_for_new_ones(spec: SweepSpec, tmp_path: Path) -> None:
    folder = tmp_path / "s"
    (folder / "trial-0000").mkdir(parents=True)
    for _ in range(2):
        with pytest.raises(ConfigurationError, match=r"trial-0000 is of a sweep that .*study\.db knows nothing of"):
            run_sweep(spec, folder, 1, 1, print)


def test_a_study_that_fails_ends_the_sweep_with_a_message(spec: SweepSpec, tmp_path: Path) -> None:
    folder = tmp_path / "s"
    queue(spec, folder, (0.01, 32))
    with contextlib.closing(sqlite3.connect(folder / "study.db")) as file:  # stands for a full disk
        file.execute("CREATE TRIGGER full BEFORE UPDATE ON trials BEGIN SELECT RAISE(FAIL, 'the disk is full'); END")
    done = command("sweep", spec.path, "--trials", 1, "--folder", folder)
    assert done.exit_code == 1
    assert re.search(r"Error: .*study\.db cannot be read or written: .*full.*the same command goes on", done.stderr)


def test_a_table_that_cannot_be_written_is_named(spec: SweepSpec, tmp_path: Path) -> None:
    queue(spec, tmp_path / "s", (0.02, 64))
    (tmp_path / "s" / "sweep.csv" / "below").mkdir(parents=True)
    done = command("sweep", spec.path, "--trials", 1, "--folder", tmp_path / "s")
    assert done.exit_code == 1
    assert "cannot take sweep.csv and sweep.png: Is a directory" in done.stderr


def test_a_picture_that_matplotlib_cannot_draw_leaves_the_table(
    spec: SweepSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue(spec, tmp_path / "s", (0.01, 32))
    monkeypatch.setattr(Figure, "savefig", lambda *args, **kwargs: 1 / 0)  # stands for text.usetex without LaTeX
    done = command("sweep", spec.path, "--trials", 1, "--folder", tmp_path / "s")
    assert done.exit_code == 0, done.output
    assert len(table(tmp_path / "s")) == 1
    assert re.search(r"Picture: none: ZeroDivisionError.*\nBest: ", done.output)


def test_a_logarithmic_axis_without_a_power_of_ten_has_labels() -> None:
    figure = Figure()
    _draw_setting(figure.subplots(), Range("trainer.learning_rate", 2e-4, 8e-4, log=True, step=0, whole=False), [])
    figure.canvas.draw()
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == ["0.0002", "0.00032", "0.0005", "0.0008"]


def test_a_sweep_of_failures_says_so(spec: SweepSpec, tmp_path: Path) -> None:
    queue(spec, tmp_path / "s", (0.02, 64))
    done = command("sweep", spec.path, "--trials", 1, "--folder", tmp_path / "s")
    assert done.exit_code == 1
    assert "failed: the robot fell" in done.output
    assert "Best:" not in done.output


def test_a_missing_extra_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    done = command("sweep", write(tmp_path))
    assert done.exit_code == 1
    assert "pip install 'pearl-toolkit[sweep]'" in done.output


# --- the file ---------------------------------------------------------------------------------------------------------


def test_a_run_of_a_sweep_has_evaluations_and_no_goal_unless_stated(tmp_path: Path) -> None:
    found = read_sweep(write(tmp_path))
    assert found.fixed == {"program.eval_interval": 100, "program.until_return": "none"}
    assert (found.timesteps, found.evaluations, found.seeds) == (2000, 20, (1, 2))
    stated = read_sweep(
        write(tmp_path, SPEC.replace("timesteps = 2000", "timesteps = 2000\nuntil_return = 90\neval_interval = 300"))
    )
    assert stated.fixed == {"program.eval_interval": 300}
    assert stated.evaluations == 7


SEARCH = "[search.trainer]\n{}\n"


@pytest.mark.parametrize(
    ("search", "kind", "message"),
    [
        ("", ConfigurationError, r"a sweep needs settings to search, such as \[search\.trainer\]"),
        (SEARCH.format("gamma = 0.9"), ConfigurationError, r"\[search\.trainer\] gamma: expected \{ low.*found 0\.9"),
        (SEARCH.format("gamma = { low = 0.9 }"), ConfigurationError, r"gamma: .*found no 'high'"),
        (SEARCH.format("gamma = { low = 0.9, hihg = 1.0 }"), ConfigurationError, r"'hihg'\. Did you mean 'high'"),
        (SEARCH.format("gamma = { low = 0.99, high = 0.9 }"), ConfigurationError, r"low must be less than high"),
        (SEARCH.format("gamma = { low = 0.0, high = 1.0, log = true }"), ConfigurationError, r"low above 0.*low = 0"),
        (SEARCH.format("gamma = { low = nan, high = 1.0 }"), ConfigurationError, r"gamma\.low: expected a number"),
        (
            SEARCH.format("gamma = { low = 0, high = 1 }"),
            ConfigurationError,
            r"takes all numbers.*write low = 0\.0, or",
        ),
        (
            SEARCH.format("gamma = { low = 0.5, high = 1.5 }"),
            ConfigurationError,
            r"with trainer\.gamma = 1\.5: .*gamma",
        ),
        (SEARCH.format("n_step = { low = 1.5, high = 3, kind = 'int' }"), ConfigurationError, r"are whole"),
        (SEARCH.format("n_step = { low = 1, high = 10, step = 0 }"), ConfigurationError, r"step: .*above 0.*found 0"),
        (
            SEARCH.format("n_step = { low = 1, high = 10, step = 2 }"),
            ConfigurationError,
            r"n_step\.step: steps of 2 from 1 end at 9: .* Set high to 9 or 11",
        ),
        (
            SEARCH.format("gamma = { low = 0.9, high = 0.99, step = 0.02 }"),
            ConfigurationError,
            r"end at 0\.98: high = 0\.99 would never be tried",
        ),
        (SEARCH.format("gamma = { choices = [0.9] }"), ConfigurationError, r"at least two values"),
        (SEARCH.format("gamma = { choices = [0.9, 0.9] }"), ConfigurationError, r"found 0\.9 twice"),
        (SEARCH.format("gamm = { low = 0.5, high = 0.9 }"), TrainerError, r"no setting 'gamm'\. Did you mean 'gamma'"),
        (SEARCH.format("double = { choices = [true, 'yes'] }"), ConfigurationError, r"double: expected true or false"),
        ("[search.trainer]\n", ConfigurationError, r"\[search\]: expected tables"),
        ("[search.trainr]\ngamma = { low = 0.5, high = 0.9 }", ConfigurationError, r"Did you mean 'trainer'"),
        ("[search.training]\nbatch = { choices = [1, 2] }", ConfigurationError, r"'batch'\. Did you mean 'batch_size'"),
    ],
)
def test_a_space_that_cannot_be_searched_is_refused(
    tmp_path: Path, search: str, kind: type[PearlError], message: str
) -> None:
    with pytest.raises(kind, match=message):
        read_sweep(write(tmp_path, SPEC[: SPEC.index("[search.trainer]")] + search))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("seeds = []", r"seeds: expected a list of different whole numbers.*found \[\]"),
        ("seeds = [1, 1]", r"seeds: expected"),
        ("seed = [1]", r"found 'seed'\. Did you mean 'seeds'"),
        ('objective = "max"', r'objective: expected "mean" or "median"; found \'max\''),
        ('score = "first"', r'score: expected "last" or "best"'),
        ('pruner = "halving"', r'pruner: expected "median" or "none"'),
        ("startup_trials = true", r"startup_trials: expected a whole number"),
        ("warmup = 2", r"warmup: expected a share"),
    ],
)
def test_options_of_a_sweep_are_checked(tmp_path: Path, line: str, message: str) -> None:
    text = re.sub(r"\[sweep\].*?(?=\[search)", f"[sweep]\n{line}\n", SPEC, flags=re.DOTALL)
    with pytest.raises(ConfigurationError, match=message):
        read_sweep(write(tmp_path, text))


def test_evaluations_and_a_trainer_are_needed(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"eval_episodes: evaluations score the trials.*found 0"):
        read_sweep(write(tmp_path, SPEC.replace("[program]", "[program]\neval_episodes = 0")))
    with pytest.raises(ConfigurationError, match=r'"file\.py:Class" or a built-in algorithm.*Did you mean \'DQN\''):
        read_sweep(write(tmp_path, SPEC.replace('"DQN"', '"DQNN"')))


@pytest.mark.parametrize(
    "value",
    [
        True,
        3,
        1e-05,
        0.1,
        'a "b" \\ \n',
        [64, [1.5, "x"]],
        {"kind": "Linear", "end": 0.5},
        {"größe": 1, "a.b": {"": 2}},
    ],
)
def test_values_are_written_as_toml_reads_them(value: object) -> None:
    assert parse_value(toml_text(value)) == value


def test_settings_of_a_composition_are_replaced() -> None:
    texts = ["trainer.learning_rate=1e-3", "trainer.hidden_sizes=[64, 64]", "replay.mode=uniform", "a.b.c=x = 1"]
    assert parse_overrides(texts) == {
        "trainer.learning_rate": 1e-3,
        "trainer.hidden_sizes": [64, 64],
        "replay.mode": "uniform",
        "a.b.c": "x = 1",
    }
    for text in ("gamma=1", "trainer.gamma", "trainer..gamma=1", "=3"):
        with pytest.raises(ConfigurationError, match=r"--set must be TABLE\.KEY=VALUE"):
            parse_overrides([text])


# --- the documentation ------------------------------------------------------------------------------------------------


def test_what_the_documentation_shows_is_what_there_is(spec: SweepSpec, tmp_path: Path) -> None:
    (shown,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "shown").mkdir()
    found = read_sweep(write(tmp_path / "shown", shown))
    assert shown == (ROOT / "examples" / "cartpole_sweep.toml").read_text(encoding="utf-8")
    assert [one.name for one in found.space][:2] == ["trainer.learning_rate", "trainer.hidden_sizes"]
    for name in SweepSpec.__dataclass_fields__:
        if name not in ("path", "space", "fixed", "identity", "timesteps", "eval_interval"):
            assert f"| `{name}` |" in PAGE
    folder = tmp_path / "sweeps" / "cartpole_sweep"
    folder.mkdir(parents=True)
    queue(spec, folder, (0.01, 32), (0.05, 32))
    assert command("sweep", spec.path, "--trials", 2, "--folder", folder).exit_code == 0
    (snippet,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    done = subprocess.run([sys.executable, "-c", snippet], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "51.5" in done.stdout


@pytest.mark.slow
def test_programs_are_composed_run_and_scored(tmp_path: Path) -> None:
    text = SPEC.replace("choices = [32, 64]", "choices = [16, 32]").replace("seeds = [1, 2]", "seeds = [1]")
    text = text.replace("warmup = 0", 'pruner = "none"')  # which trial is behind depends on which ends first
    file = write(tmp_path, text.replace("[program]", "[program]\neval_episodes = 5"))
    done = command("sweep", file, "--trials", 2, "--jobs", 2)
    assert done.exit_code == 0, done.output
    rows = table(tmp_path / "sweeps" / "my_sweep")
    assert [row["state"] for row in rows] == ["complete"] * 2
    for row in rows:
        program = (tmp_path / "sweeps" / "my_sweep" / row["folder"] / "program.py").read_text()
        assert f'"learning_rate": {row["trainer.learning_rate"]}' in program
        assert f"batch_size={row['training.batch_size']},\n" in program
        assert 5 < float(row["objective"]) <= 500
