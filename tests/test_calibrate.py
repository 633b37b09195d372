"""`pearl calibrate`: filling the store in advance, and composing for a machine that is not here."""

from __future__ import annotations

import dataclasses
import logging
import re
import types
from pathlib import Path
from typing import Any

import pytest
from programs import described, write_csv_pair
from trainers import TinyDQN
from typer.testing import CliRunner, Result

from composer import Composer, composing
from composer.calibrate import Progress, calibrate, family
from composer.calibration import CalibrationStore
from composer.matrix import AssignmentMatrix, MissingCell
from composer.platform import Platform
from composer.profiling import context, learner_column, pair_column, replay_column
from pearl.backends import backend_of
from pearl.cli import app
from pearl.devices.description import Connection, Device
from pearl.errors import ConfigurationError, DeviceError, PlacementError

pytestmark = pytest.mark.usefixtures("quick_profiles")

HERE = Device("cpu0", "cpu", "cpu", cores=1)
THERE = "00112233445566aa"  # the fingerprint of a CPU that nobody has
SPEC = """
[platform]
devices = "{folder}devices.csv"
connections = "{folder}connections.csv"
[actors]
env = "CartPole-v1"
envs_per_actor = 4
[trainer]
class = "pearl.algorithms:DQN"
hidden_sizes = [16]
implementation = "native"
[replay]
size = {capacity}
[training]
batch_size = {batch}
learning_starts = 100
"""


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["calibrate", *map(str, arguments)])


def spec(folder: Path, name: str = "small.toml", *, batch: int = 16, capacity: int = 1000, devices: str = "") -> Path:
    path = folder / name
    path.write_text(SPEC.format(folder=f"{devices}/" if devices else "", batch=batch, capacity=capacity))
    return path


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, and the CSV files of one CPU of this machine beside it."""
    monkeypatch.setenv("PEARL_CACHE_DIR", str(tmp_path / "cache"))
    write_csv_pair(tmp_path, ("cpu0,cpu,cpu,,1,60",))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory, quick_profiles: None) -> Path:
    """The file that another machine would export: this machine's measurements under another fingerprint."""
    folder = tmp_path_factory.mktemp("lab")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PEARL_CACHE_DIR", str(folder / "cache"))
        write_csv_pair(folder, ("cpu0,cpu,cpu,,1,60",))
        result = invoke(spec(folder), "--batch-sizes", "16,64", "--export", folder / "lab.json")
    assert result.exit_code == 0, result.output
    text = (folder / "lab.json").read_text()
    assert HERE.fingerprint() in text
    (folder / "lab.json").write_text(text.replace(HERE.fingerprint(), THERE))
    return folder / "lab.json"


@pytest.fixture
def no_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> Any:
        raise AssertionError("something was measured")

    for module, name in (
        (learner_column, "measure_learner"),
        (replay_column, "measure_replay"),
        (pair_column, "measure_pair"),
        (context, "measure_actor"),
    ):
        monkeypatch.setattr(module, name, refuse)


# --- filling the store -----------------------------------------------------------------------------------------------


def counts(result: Result) -> tuple[int, ...]:
    """The measurements that were made, and those that were known."""
    assert result.exit_code == 0, result.output
    found = re.search(r"(\d+) measurements made, (\d+) were known", result.stdout)
    assert found is not None, result.stdout
    return tuple(map(int, found.groups()))


def test_a_family_is_measured_once_and_a_rerun_measures_only_what_is_missing(tmp_path: Path, cache: Path) -> None:
    first = invoke(spec(tmp_path), "--batch-sizes", "16,32")
    made, known = counts(first)
    assert made == len(CalibrationStore())
    assert known == 1, "both batch sizes have the same Actor"
    lines = first.stdout.splitlines()
    assert lines[0].startswith(f"0 of about {made} measured, 0:0{made} left  small.toml, batch 16  cpu0: ")
    assert f"Store: {cache / 'calibration-2.json'}" in lines
    product = ("--batch-sizes", "16,32", "--capacities", "1000,500")
    more, known = counts(invoke(spec(tmp_path), *product))
    assert 0 < more < made
    assert len(CalibrationStore()) == made + more
    again = invoke(spec(tmp_path), *product).stdout
    assert f"Calibrated 4 compositions: nothing to measure, all {more + known} measurements were known." in again


def test_an_interrupted_calibration_keeps_what_it_measured(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:

        def interrupt(*_: object, **__: object) -> Any:
            raise KeyboardInterrupt

        patch.setattr(learner_column, "measure_learner", interrupt)
        result = invoke(spec(tmp_path))
    assert result.exit_code == 130
    kept = len(CalibrationStore())
    assert kept > 0
    assert f"Interrupted. {kept} new measurements are in" in result.stdout
    assert counts(invoke(spec(tmp_path)))[1] == kept


def test_no_measurement_begins_after_the_time_budget(tmp_path: Path, cache: Path) -> None:
    [member] = family("small", described(write_csv_pair(tmp_path, ("cpu0,cpu,cpu,,1,60",))))
    seen: list[Progress] = []
    clock = iter([0.0, 0.5, 0.9, 1.5])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("composer.calibrate.time", types.SimpleNamespace(monotonic=lambda: next(clock)))
        found = calibrate([member], seconds=1.0, show=seen.append)
    assert found.stopped
    assert found.measured == len(seen) == len(CalibrationStore()) == 3
    assert [progress.done for progress in seen] == [0, 1, 2]
    each = [progress.left_s / (progress.expected - progress.done) for progress in seen]
    assert each == pytest.approx([1.0, 0.5, 0.45]), "the mean so far"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--seconds", "0.5"], "at least 1 s, the time of one measurement; found 0.5 s"),
        (["--seconds", "nan"], "found nan s"),
        (["--batch-sizes", "32,x"], "--batch-sizes takes whole numbers of at least 1, such as 32,64; found 'x'"),
        (["--batch-sizes", ""], "found ''"),
        (["--capacities", "0"], "found '0'"),
        (["--fanouts", "3"], "small.toml, fanout 3: Fanout must be a power of two"),
        (
            ["--batch-sizes", "16,5000"],
            "small.toml, batch 5,000: A batch of 5000 cannot be drawn from",
        ),
        (["--output-dir", "x"], "--output-dir needs --import FILE"),
        (["--export", "."], "it is a folder"),
    ],
)
@pytest.mark.usefixtures("no_measuring")
def test_what_cannot_be_measured_is_refused_before_anything_is(
    tmp_path: Path, cache: Path, options: list[str], expected: str
) -> None:
    result = invoke(spec(tmp_path), *options)
    assert result.exit_code == 1
    assert expected in result.stderr
    assert not CalibrationStore().machines


@pytest.mark.usefixtures("cache")
def test_a_command_without_work_says_what_to_give() -> None:
    assert "Give a composition to measure for" in invoke().stderr
    assert "--fanouts need a composition" in invoke("--fanouts", "4", "--export", "x").stderr


@pytest.mark.usefixtures("no_measuring")
def test_a_store_that_cannot_be_written_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PEARL_CACHE_DIR", str(tmp_path / "file" / "cache"))
    write_csv_pair(tmp_path, ("cpu0,cpu,cpu,,1,60",))
    result = invoke(spec(tmp_path))
    assert result.exit_code == 1
    assert "cannot be written" in result.stderr


def test_resizing_leaves_the_original_as_it_is(tmp_path: Path) -> None:
    composer = described(write_csv_pair(tmp_path, ("cpu0,cpu,cpu,,1,60",)), training={"n_step": 2})
    other = composer.resized(batch_size=64, capacity=500, fanout=4)
    assert other.training == {"n_step": 2, "batch_size": 64}
    assert composer.training == {"n_step": 2}
    assert (other.replay.capacity, other.replay.fanout) == (500, 4)  # type: ignore[union-attr]
    assert composer.replay.capacity == 2000  # type: ignore[union-attr]
    with pytest.raises(ConfigurationError, match="batch_size"):
        composer.resized(batch_size=0)
    with pytest.raises(ConfigurationError, match="set_replay"):
        Composer().resized(batch_size=1)


# --- a machine that is not here ---------------------------------------------------------------------------------------


def composed(path: Path) -> Composer:
    from composer.spec_file import load_spec

    composer, _ = load_spec(path, progress=False)
    composer.run()
    return composer


@pytest.mark.usefixtures("no_measuring")
def test_an_exported_store_composes_for_its_machine_on_another(tmp_path: Path, cache: Path, exported: Path) -> None:
    result = invoke("--import", exported, "--output-dir", tmp_path / "lab")
    assert result.exit_code == 0, result.output
    count = len(CalibrationStore(exported))
    assert f"Imported {count} of {count} entries" in result.stdout
    assert f"calibration {THERE}: of another machine ({HERE.fingerprint()} is here)" in result.stdout
    composer = composed(spec(tmp_path, batch=64, devices="lab"))
    sources = composer.matrix.to_pandas().dropna(subset=["latency"])
    assert set(sources["source"]) == {"imported"}
    assert set(sources["note"]) == {""}
    assert (composer.placement.replay_manager, composer.placement.learner) == ("cpu0", "cpu0")
    program = composer.runtime_gen(path=tmp_path / "program.py")
    compile(program.read_text(), str(program), "exec")
    assert AssignmentMatrix.from_json(composer.matrix.to_json()) == composer.matrix
    assert not any(not machine.imported for machine in CalibrationStore().machines), "an absent machine is not ours"


@pytest.mark.usefixtures("no_measuring")
def test_sizes_that_were_not_measured_are_interpolated_or_extrapolated_and_say_so(
    tmp_path: Path, cache: Path, exported: Path, caplog: pytest.LogCaptureFixture
) -> None:
    invoke("--import", exported, "--output-dir", tmp_path / "lab")
    measured = {batch: composed(spec(tmp_path, batch=batch, devices="lab")).matrix for batch in (16, 64)}
    assert caplog.text == ""
    between = composed(spec(tmp_path, batch=32, devices="lab"))
    learners = [matrix["cpu0"].learner for matrix in (measured[16], between.matrix, measured[64])]
    steps = [cell.step for cell in learners if not isinstance(cell, MissingCell)]
    low, high = sorted((steps[0].value_us, steps[2].value_us))
    assert low <= steps[1].value_us <= high
    assert steps[1].note == "interpolated: batch 16 to 64"
    assert "imported, interpolated" in " ".join(str(between.matrix).split())
    assert caplog.text == "", "what lies between measurements is no warning"
    with caplog.at_level(logging.WARNING):
        beyond = composed(spec(tmp_path, batch=128, capacity=4000, devices="lab"))
    notes = beyond.matrix.to_pandas()["note"]
    assert "extrapolated: batch above 64; extrapolated: capacity above 1,000" in set(notes)
    assert "cpu0: imported times of the primitive 'replay': extrapolated: batch above 64" in caplog.text


def test_another_version_of_the_software_is_taken_with_a_note(tmp_path: Path, cache: Path, exported: Path) -> None:
    from pearl import __version__

    (tmp_path / "old.json").write_text(exported.read_text().replace(f'"{__version__}"', '"0.0.7"'))
    result = invoke("--import", tmp_path / "old.json", "--output-dir", tmp_path / "lab")
    count = len(CalibrationStore(exported))
    assert f"{count} are of another version of PEARL: only devices that are not here take them" in result.stdout
    matrix = composed(spec(tmp_path, devices="lab")).matrix
    assert set(matrix.to_pandas()["note"]) == {"other software: PEARL 0.0.7"}


def test_an_accelerator_that_is_not_here_takes_imported_times_beside_a_measured_host(
    tmp_path: Path, cache: Path, exported: Path
) -> None:
    text = exported.read_text().replace('"kind": "cpu", "backend": "cpu"', '"kind": "gpu", "backend": "cuda"')
    for measured, on_gpu in (
        ('"implementation", "native"', '"implementation", "torch"'),
        ('_storage", false', '_storage", true'),
    ):
        assert measured in text
        text = text.replace(measured, on_gpu)
    (tmp_path / "gpu.json").write_text(text)
    assert invoke("--import", tmp_path / "gpu.json").exit_code == 0
    path = spec(tmp_path)
    path.write_text(path.read_text().replace('implementation = "native"', ""))
    rows = ["name,kind,backend,selector,cores,calibration", "cpu0,cpu,cpu,,1,", f"gpu0,gpu,cuda,cuda:0,80,{THERE}"]
    (tmp_path / "devices.csv").write_text("\n".join(rows))
    (tmp_path / "connections.csv").write_text("source,target,latency_us,bandwidth_gbps\ncpu0,gpu0,10,12")
    composer = composed(path)
    frame = composer.matrix.to_pandas().dropna(subset=["latency"])
    assert set(frame[frame.device == "cpu0"]["source"]) == {"measured"}
    assert set(frame[frame.device == "gpu0"]["source"]) == {"imported"}
    assert ("cpu0", "gpu0") in {(c.replay.device, c.learner.device) for c in composer.placement.candidates}


@pytest.mark.usefixtures("no_measuring")
def test_sizes_of_an_imported_file_that_are_none_do_no_harm(tmp_path: Path, cache: Path, exported: Path) -> None:
    text = exported.read_text().replace('["batch_size", 16]', '["batch_size", "x"]')
    (tmp_path / "odd.json").write_text(text.replace('["batch_size", 64]', '["batch_size", -1]'))
    invoke("--import", tmp_path / "odd.json", "--output-dir", tmp_path / "lab")
    notes = composed(spec(tmp_path, devices="lab")).matrix.to_pandas()["note"]
    assert "extrapolated: batch above 1" in set(notes)


def with_calibration(folder: Path, row: str) -> Path:
    (folder / "devices.csv").write_text(f"name,kind,backend,cores,shares_with,calibration\n{row}\n")
    return spec(folder)


@pytest.mark.usefixtures("no_measuring")
def test_a_calibration_that_was_not_imported_is_refused_with_both_fingerprints(
    tmp_path: Path, cache: Path, exported: Path
) -> None:
    invoke("--import", exported)
    path = with_calibration(tmp_path, "cpu0,cpu,cpu,1,,ffffffffffffffff")
    with pytest.raises(PlacementError) as failed:
        composed(path)
    for part in ("ffffffffffffffff", HERE.fingerprint(), f"Measured for a cpu of backend cpu: {THERE} (cpu0)"):
        assert part in str(failed.value)


@pytest.mark.usefixtures("no_measuring")
def test_a_calibration_of_another_kind_of_device_is_refused(tmp_path: Path, cache: Path, exported: Path) -> None:
    invoke("--import", exported)
    path = with_calibration(tmp_path, f"cpu0,cpu,cpu,1,,\ngpu0,gpu,cuda,80,,{THERE}")
    with pytest.raises(ConfigurationError, match=f"its calibration {THERE} is of cpu0, a cpu of backend cpu"):
        composed(path)


@pytest.mark.usefixtures("no_measuring")
def test_silicon_that_is_half_here_is_refused(tmp_path: Path, cache: Path, exported: Path) -> None:
    invoke("--import", exported)
    path = with_calibration(tmp_path, f"cpu0,cpu,cpu,1,,{THERE}\nsycl0,cpu,sycl,1,cpu0,")
    with pytest.raises(ConfigurationError, match="State both, or neither"):
        composed(path)


@pytest.mark.usefixtures("no_measuring")
def test_a_problem_that_was_not_measured_there_says_what_to_do(tmp_path: Path, cache: Path, exported: Path) -> None:
    invoke("--import", exported, "--output-dir", tmp_path / "lab")
    path = spec(tmp_path, devices="lab")
    path.write_text(path.read_text().replace("hidden_sizes = [16]", "hidden_sizes = [24]"))
    with pytest.raises(DeviceError, match="On its machine: pearl calibrate SPEC --export FILE"):
        composed(path)


def test_times_of_other_hardware_never_serve_a_device_that_is_here(
    tmp_path: Path, cache: Path, exported: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    invoke("--import", exported)
    composer = described(write_csv_pair(tmp_path, ("cpu0,cpu,cpu,,1,60",)), progress=True)
    composer.run()
    assert set(composer.matrix.to_pandas().dropna(subset=["latency"])["source"]) == {"measured"}
    said = capsys.readouterr().out
    assert f"cpu0 has the fingerprint {HERE.fingerprint()}; measurements of other hardware" in said
    assert THERE in said


def test_a_row_with_the_fingerprint_of_this_machine_is_measured_here(tmp_path: Path, cache: Path) -> None:
    composer = composed(with_calibration(tmp_path, f"cpu0,cpu,cpu,1,,{HERE.fingerprint()}"))
    assert set(composer.matrix.to_pandas().dropna(subset=["latency"])["source"]) == {"measured"}


def test_an_absent_host_may_have_more_cores_and_memory_than_this_machine(tmp_path: Path, exported: Path) -> None:
    absent = dataclasses.replace(HERE, cores=512, memory_gb=1e6, calibration=THERE)
    assert absent.absent
    assert absent.availability().ok
    assert absent.fingerprint() == THERE
    from composer.platform import with_cores_of_host

    assert with_cores_of_host(Platform((absent,))) == (Platform((absent,)), ())


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ("cpu0,cpu,cpu,xyz", "expected the fingerprint of a device that was measured, or nothing; found 'xyz'"),
        (f"cpu0,cpu,model,{THERE}", "A device of backend model is never measured: leave its calibration empty"),
    ],
)
def test_a_wrong_calibration_cell_is_named(tmp_path: Path, row: str, expected: str) -> None:
    (tmp_path / "devices.csv").write_text(f"name,kind,backend,calibration\n{row}\n")
    (tmp_path / "connections.csv").write_text("source,target,latency_us,bandwidth_gbps\n")
    with pytest.raises(ConfigurationError, match="line 2, column 'calibration'") as failed:
        Platform.from_files(tmp_path / "devices.csv", tmp_path / "connections.csv")
    assert expected in str(failed.value)


@pytest.mark.usefixtures("cache", "exported")
def test_csv_files_are_not_replaced_unless_asked(tmp_path: Path, exported: Path) -> None:
    result = invoke("--import", exported, "--output-dir", tmp_path)
    assert result.exit_code == 1
    assert "would be overwritten" in result.stderr
    assert len(CalibrationStore()) == 0
    assert invoke("--import", exported, "--output-dir", tmp_path, "--force").exit_code == 0
    assert THERE in (tmp_path / "devices.csv").read_text()


# --- a repeated run --------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("cache")
def test_a_repeated_run_measures_neither_primitives_nor_links(monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> Composer:
        composer = Composer(progress=False)
        composer.set_actors(1, env="CartPole-v1", envs_per_actor=4)
        composer.set_train_function(TinyDQN, implementation="native")
        composer.set_replay(1000)
        composer.run()
        return composer

    discover, measured = composing.discover, []

    def watched(measure: bool = True, **options: Any) -> Any:
        measured.append(measure)
        devices, links = discover(measure=False, **options)
        if not measure:
            return devices, links
        memory = Connection("cpu0", "cpu0", 0.1, 12.5)
        return [dataclasses.replace(d, memory_bandwidth_gbps=12.5) for d in devices], [memory]

    monkeypatch.setattr(composing, "discover", watched)
    first = run()
    assert measured == [False, True]
    store = CalibrationStore().path.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(composing, "unwatched", lambda *_: pytest.fail("something was measured"))
        second = run()
    assert measured == [False, True, False]
    assert second.platform == first.platform
    assert second.matrix == first.matrix
    assert CalibrationStore().path.read_bytes() == store


def test_the_fingerprint_leaves_the_calibration_out() -> None:
    assert dataclasses.replace(HERE, calibration=HERE.fingerprint()).absent is False
    assert backend_of(HERE).is_here
