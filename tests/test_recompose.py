"""Programs that are composed again: from their own values, with new measurements, without losing a transition."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from programs import ONE_CPU, described, make_program, run, running, write_csv_pair

from composer.calibrated_machine import discovered_before, machine_of
from composer.calibration import CalibrationStore
from composer.platform import Platform
from composer.profiling.context import ProfilingContext
from composer.recompose import main, recompose
from pearl.devices import Connection, Device
from pearl.errors import ConfigurationError
from pearl.runtime.checkpoint import CheckpointState, load_checkpoint
from pearl.runtime.options import Options, parse_options
from pearl.runtime.recomposition import Request, initial_environment

pytestmark = pytest.mark.usefixtures("quick_profiles")

CONSTANTS = re.compile(r"^(?:ACTORS|REPLAY|TRAIN|SETTINGS).*?^[)}]", re.MULTILINE | re.DOTALL)


def edit(program: Path, pattern: str, new: str) -> None:
    text, count = re.subn(pattern, new, program.read_text())
    assert count == 1
    program.write_text(text)


def mispredict(program: Path) -> None:
    """Iterations that are predicted to be a hundred times as fast."""
    eps = re.search(r"predicted_eps=([\d.]+)", program.read_text())
    assert eps is not None
    edit(program, r"predicted_eps=[\d.]+", f"predicted_eps={float(eps[1]) * 100}")


# --- the composer's part --------------------------------------------------------------------------------------------


def test_a_program_is_composed_again_from_its_own_values_with_new_measurements(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = {"batch_size": 32, "priority_update_delay": 2, "gamma": 0.9}
    files = write_csv_pair(tmp_path, ONE_CPU)
    composer = described(files, settings={"implementation": "torch"}, fanout="auto", training=training)
    composer.run()
    program = composer.runtime_gen(path=tmp_path / "sub" / "program.py", timesteps=500, seed=3)
    measured: list[str] = []
    known = ProfilingContext.known

    def counted(self: Any, key: Any, *args: Any) -> Any:
        before, found = self.misses, known(self, key, *args)
        measured.extend([key.primitive] * (self.misses - before))
        return found

    monkeypatch.setattr(ProfilingContext, "known", counted)
    monkeypatch.chdir(tmp_path)
    made = recompose(program, {"timesteps": 700}, progress=False)
    assert made.program == tmp_path / "sub" / "program_recomposed_1.py"
    assert {"replay", "learner", "pair"} <= set(measured)
    old, new = program.read_text(), made.program.read_text()
    fanout = re.compile(r"    fanout=\d+,\n")
    assert [fanout.sub("", found) for found in CONSTANTS.findall(old)] == [
        fanout.sub("", found) for found in CONSTANTS.findall(new)
    ]
    for kept in ('implementation="torch"', 'fanout="auto"', "priority_update_delay=2", 'devices="../devices.csv"'):
        assert kept in new
    assert "timesteps=700" in new
    assert made.before.startswith("Replay Manager on cpu0")
    assert "torch Learner on cpu0" in made.now
    assert recompose(made.program, progress=False).program.name == "program_recomposed_2.py"


def test_the_store_returns_what_is_imported_or_measured_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    composer = described(write_csv_pair(tmp_path, ONE_CPU), calibration=tmp_path / "store.json")
    composer.run()
    document = json.loads((tmp_path / "store.json").read_text())
    kept = CalibrationStore(tmp_path / "store.json")
    again = CalibrationStore(tmp_path / "store.json", remeasure=True)
    key = next(iter(kept._entries.values())).key
    found = kept.get(key)
    assert found is not None
    assert again.get(key) is None
    again.put(key, found)
    assert again.get(key) == found
    for entry in document["entries"]:
        for _, measurement in entry["measurements"]:
            measurement["source"] = "imported"
    (tmp_path / "store.json").write_text(json.dumps(document))
    assert CalibrationStore(tmp_path / "store.json", remeasure=True).get(key) is not None


def test_links_and_memory_are_measured_again_too_and_once(tmp_path: Path) -> None:
    cpu = Device("cpu0", "cpu", "cpu")
    machine = machine_of(Platform((cpu,), (Connection("cpu0", "cpu0", 0.1, 20),)), discovered=True)
    assert machine is not None
    CalibrationStore(tmp_path / "store.json").record(machine)
    assert discovered_before([cpu], CalibrationStore(tmp_path / "store.json")) is not None
    again = CalibrationStore(tmp_path / "store.json", remeasure=True)
    assert discovered_before([cpu], again) is None
    again.record(machine)
    assert discovered_before([cpu], again) is not None


def test_edits_of_the_values_count_and_other_edits_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    program = make_program(tmp_path)
    edit(program, r"capacity=2000", "capacity=1500")
    made = recompose(program, progress=False)
    assert "capacity=1500" in made.program.read_text()
    assert "program.py was edited since it was composed" in caplog.text


@pytest.mark.parametrize(
    ("pattern", "new", "words"),
    [
        (r"composer_inputs=ComposerInputs\((.|\n)*?\n    \),\n", "", "found no composer_inputs of its PROGRAM"),
        (r"trainer=\"TinyDQN\"", 'trainer="Other"', "found no composer_inputs of its PROGRAM"),
        (r"ACTORS = ActorSpec\(\n", "ACTORS = dict(\n", "found no ACTORS"),
        (r"SETTINGS: dict", "1 / 0\nSETTINGS: dict", "cannot be imported.*ZeroDivisionError"),
        (r'devices="devices.csv"', 'devices="gone.csv"', r"gone\.csv cannot be read"),
    ],
)
def test_a_program_that_cannot_be_composed_again_says_what_it_lacks(
    tmp_path: Path, pattern: str, new: str, words: str
) -> None:
    program = make_program(tmp_path)
    edit(program, pattern, new)
    with pytest.raises(ConfigurationError, match=words):
        recompose(program, progress=False)
    assert not list(tmp_path.glob("*recomposed*"))


def test_a_program_that_is_gone_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"There is no program .*gone\.py"):
        recompose(tmp_path / "gone.py")


class _Became(Exception):
    pass


def test_the_new_program_resumes_and_composes_again_only_if_the_placement_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []

    def become(command: list[str], environment: Any) -> None:
        commands.append(command)
        raise _Became

    monkeypatch.setattr("composer.recompose.become", become)
    program = make_program(tmp_path)

    def requested(arguments: tuple[str, ...]) -> list[str]:
        with pytest.raises(_Became):
            main(Request(str(program), "slow", {"timesteps": 5000}, arguments).to_json())
        return commands.pop()

    same = requested(("--recompose", "--seed", "5"))
    new = tmp_path / "program_recomposed_1.py"
    assert same == [sys.executable, str(new), "--recompose", "--seed", "5", "--resume", "--no-recompose"]
    edit(program, r"native Learner on", "torch Learner on")
    assert requested(("--recompose",))[2:] == ["--recompose", "--resume", "--recompose"]
    (tmp_path / "devices.csv").unlink()
    assert requested(("--recompose",))[1:] == [str(program), "--recompose", "--resume", "--no-recompose"]


def test_an_interrupted_composition_says_how_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("composer.recompose.recompose", interrupted)
    arguments = ("--seed", "5", "--run-dir", "/data/my run")
    with pytest.raises(SystemExit, match="130"):
        main(Request(str(tmp_path / "program.py"), "slow", {}, arguments).to_json())
    assert "program.py --seed 5 --run-dir '/data/my run' --resume\n" in capsys.readouterr().err


def test_relative_paths_of_the_command_line_stay_where_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["--run-dir", "here", "--trace", "trace.json", "--seed", "5"]
    monkeypatch.setattr(sys, "argv", ["program.py", *arguments])
    (tmp_path / "elsewhere").mkdir()

    def options() -> Options:
        return parse_options(None, timesteps=10, run_dir="runs", arguments=sys.argv[1:])

    monkeypatch.chdir(tmp_path)
    before = options()
    monkeypatch.chdir("elsewhere")  # as an environment may
    monkeypatch.setattr(sys, "argv", ["program.py", *Request.of(tmp_path / "program.py", before, "slow").arguments])
    assert options() == before


def test_what_the_program_set_in_its_environment_does_not_reach_the_composer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    began_with = b"OMP_WAIT_POLICY=" in Path("/proc/self/environ").read_bytes()
    assert ("OMP_WAIT_POLICY" in initial_environment()) == began_with
    assert initial_environment()["PATH"] == os.environ["PATH"]


# --- a run ----------------------------------------------------------------------------------------------------------

ARGUMENTS = ("--eval-episodes", "0", "--checkpoint-interval", "1000000")


def checkpoints(run_dir: Path) -> list[CheckpointState]:
    return [load_checkpoint(path) for path in sorted(run_dir.glob("checkpoints/checkpoint-*"))]


def assert_nothing_was_lost(run_dir: Path) -> None:
    """The newest two checkpoints: when the run was composed again, and at its end."""
    before, after = checkpoints(run_dir)
    counters = before.counters
    assert counters["collected"] == counters["stored"] == counters["storage/inserted"] > 0
    size = int(counters["storage/size"])  # type: ignore[arg-type]
    assert size == counters["collected"], "the test needs a storage that does not wrap around"
    for name, column in before.arrays.items():
        if name.startswith("storage/"):
            np.testing.assert_array_equal(after.arrays[name][:size], column)
    for name in ("collected", "env_steps", "gradient_steps", "episodes", "samples"):
        assert after.counters[name] >= counters[name] > 0  # type: ignore[operator]


@pytest.mark.parametrize("setting", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_drifting_run_saves_and_goes_on_also_if_it_cannot_be_composed_again(tmp_path: Path, setting: int) -> None:
    program = make_program(tmp_path, setting=setting, capacity=200_000)
    mispredict(program)
    (tmp_path / "devices.csv").unlink()
    arguments = (*ARGUMENTS, "--timesteps", "30000", "--recompose", "--drift-seconds", "0.2")
    with running(program, *arguments) as started:
        pid = started.process.pid
        assert started.wait() == 0, started.output
        output = started.output
        assert pid == started.process.pid
    assert re.search(r"Stopping: composing again, as for 0.2 s iterations take [\d,.]+ us, [\d.]+ times the", output)
    assert re.search(r"devices.csv cannot be read.*\nThe run goes on with program.py", output)
    step = re.search(r"Resumed from .* at step ([\d,]+)", output)
    assert step is not None
    assert "leaked" not in output
    saved, _ = checkpoints(tmp_path / "runs/program")
    assert saved.counters["env_steps"] == int(step[1].replace(",", ""))
    assert_nothing_was_lost(tmp_path / "runs/program")


@pytest.mark.parametrize("declined", [False, True])
def test_without_recompose_a_drift_is_a_warning_and_the_run_goes_on(tmp_path: Path, declined: bool) -> None:
    program = make_program(tmp_path)
    mispredict(program)
    further = ["--no-recompose"] if declined else []  # as the composer says where the best placement is the same
    code, output = run(program, *ARGUMENTS, "--timesteps", "30000", "--drift-seconds", "0.2", *further)
    assert code == 0, output
    assert output.count("warning: For 0.2 s, iterations take") == 1
    assert ("--recompose would measure and place again" in output) is not declined


@pytest.mark.slow
def test_a_drifting_run_goes_on_in_a_new_program_with_another_placement(tmp_path: Path) -> None:
    composer = described(write_csv_pair(tmp_path, ONE_CPU), capacity=200_000)
    composer.run()
    placement = composer.placement.with_choice(implementation="torch")
    program = composer.runtime_gen(placement=placement, path=tmp_path / "program.py", timesteps=30_000)
    mispredict(program)
    code, output = run(program, *ARGUMENTS, "--recompose", "--drift-seconds", "0.2")
    assert code == 0, output
    assert "Now it is:         Replay Manager on cpu0, native Learner on cpu0" in output
    assert (tmp_path / "program_recomposed_1.py").is_file()
    assert "Resumed from" in output
    assert_nothing_was_lost(tmp_path / "runs/program")
