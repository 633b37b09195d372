"""Reports of Intel's FPGA compiler: what is read in each of their forms, what is refused, what enters the matrix.

The reports in fixtures/fpga_report were made for these tests, in the form of recorded ones: no design of this toolkit
was compiled for them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from programs import described
from typer.testing import CliRunner

from composer.calibration import CalibrationStore, Imported
from composer.fpga.imported_replay import import_report
from composer.fpga.learner_program import LearnerProgram
from composer.fpga.model import FpgaPart, ReplayTree
from composer.fpga.reported_replay import ReportedReplay
from composer.fpga.vendor_report import VendorReport, read_vendor_report
from composer.matrix import MissingCell, PairCell, ReplayCell
from composer.modelled_rows import program_space
from pearl.algorithms.trainer import make_trainer
from pearl.cli import app
from pearl.devices import Device
from pearl.errors import CapacityError, ConfigurationError, VendorReportError

REPORTS = Path(__file__).parent / "fixtures" / "fpga_report"
TREE = ReplayTree(256, 16)
BOARD = Device("board", "fpga", "model", clock_mhz=400, dsp=4510, sram_kb=18202, luts=974_400)
FILES = [path.relative_to(REPORTS) for path in sorted(REPORTS.rglob("*.*")) if path.is_file()]
ROWS = (
    "name,kind,backend,selector,cores,clock_mhz,dsp,sram_kb,luts,active_watts\n"
    "cpu0,cpu,cpu,,2,,,,,60\n"
    "board,fpga,model,,,400,4510,18202,974400,50\n"
)


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """The report of 2023, to be changed."""
    return Path(shutil.copytree(REPORTS / "oneapi_2023.prj", tmp_path / "changed.prj"))


def change(report: Path, name: str, *path: str | int, to: Any) -> None:
    """Set one value in a JSON file of the report."""
    file = report / "reports" / "resources" / "json" / f"{name}.json"
    document = json.loads(file.read_text())
    at = document
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = to
    file.write_text(json.dumps(document))


def read_or_refusal(report: Path) -> VendorReport | str:
    try:
        return same_but_for_path(read_vendor_report(report))
    except VendorReportError as error:
        return str(error)


def same_but_for_path(report: VendorReport) -> VendorReport:
    return dataclasses.replace(report, path=Path())


# --- what is read ----------------------------------------------------------------------------------------------------


def test_a_report_says_resources_clock_and_intervals_of_each_kernel() -> None:
    report = read_vendor_report(REPORTS / "oneapi_2023.prj")
    assert (report.tool, report.version.split()[0]) == ("oneAPI", "2023.0.0")
    assert report.device == "Agilex7, AGFB014R24A3E3VR0, ofs_d5005:ofs_d5005"
    assert [kernel.name.removeprefix("pearl_replay_") for kernel in report.kernels] == [
        *(f"level{n}_kernel" for n in range(3)),
        "feed_kernel",
        "collect_kernel",
    ]
    level = report.kernels[1]
    assert (level.resources.aluts, level.resources.registers) == (4010, 6842.5)
    assert (level.resources.ram_blocks, level.resources.dsps, level.resources.mlabs) == (6, 0, 31)
    assert [(loop.ii, loop.latency_cycles, loop.trips) for loop in level.loops] == [(1, 5, 16), (3, 25, 0), (1, 8, 0)]
    assert report.kernels[2].loops[1].ii is None, "it is not pipelined"
    assert report.kernels[2].fmax_mhz == 412.5
    assert dict(report.others)["Pipe resources"].registers == 3258
    assert (report.total.aluts, report.total.ram_blocks, report.total.dsps) == (49368.5, 211, 58)
    assert (report.available.aluts, report.available.dsps, report.available.mlabs) == (974_400, 4510, None)


@pytest.mark.parametrize(
    ("name", "frequency_mhz", "frequency"),
    [("oneapi_2021", 287.5, "achieved"), ("oneapi_2023", 287.5, "achieved"), ("oneapi_2025", 349.92, "estimated")],
)
def test_the_clock_is_the_fitters_or_the_slowest_that_was_scheduled_for(
    name: str, frequency_mhz: float, frequency: str
) -> None:
    report = read_vendor_report(REPORTS / f"{name}.prj")
    assert (report.frequency_mhz, report.frequency) == (frequency_mhz, frequency)
    if frequency == "achieved":
        assert report.fitted is not None
        assert (report.fitted.alms, report.fitted.ram_blocks, report.fitted.dsps) == (44_252, 1955, 58)
        assert report.missing == ()
    else:
        assert report.fitted is None
        assert report.missing == ("achieved clock (place and route was not run)",)


@pytest.mark.parametrize("name", ["oneapi_2021", "oneapi_2025"])
def test_all_forms_of_a_report_say_the_same(name: str) -> None:
    expected, found = (read_vendor_report(REPORTS / f"{which}.prj") for which in ("oneapi_2023", name))
    assert found.kernels == expected.kernels
    assert (found.others, found.total, found.device) == (expected.others, expected.total, expected.device)


def test_a_report_is_found_from_any_of_its_folders(tmp_path: Path) -> None:
    project = REPORTS / "oneapi_2023.prj"
    whole = same_but_for_path(read_vendor_report(project))
    data = project / "reports" / "resources" / "json"
    for path in (project / "reports", project / "reports" / "resources", data, data / "summary.json"):
        assert same_but_for_path(read_vendor_report(path)) == whole
    alone = tmp_path / "copied"
    shutil.copytree(data, alone)
    assert same_but_for_path(read_vendor_report(alone)) == whole


def test_scripts_are_not_executed_nor_is_what_stands_in_their_text(tmp_path: Path) -> None:
    report = Path(shutil.copytree(REPORTS / "oneapi_2021.prj", tmp_path / "r.prj"))
    script = report / "reports" / "lib" / "report_data.js"
    text = script.read_text().replace("var summaryJSON={", "var summaryJSON=evil() || {")
    script.write_text(text)
    with pytest.raises(VendorReportError, match="summaryJSON is not JSON"):
        read_vendor_report(report)


def test_names_cannot_command_a_terminal(copied: Path) -> None:
    for name in ("info", "summary", "loop_attr"):
        file = copied / "reports" / "resources" / "json" / f"{name}.json"
        text = file.read_text().replace("Agilex7", "\\u001b[2JAgilex7")
        file.write_text(text.replace("pearl_replay_level1", "\\u001b]0;title\\u0007pearl_replay_level1"))
    shown = CliRunner().invoke(app, ["fpga-report", str(copied)])
    assert shown.exit_code == 0
    assert "?[2JAgilex7" in shown.output
    assert "| ?]0;title?" in shown.output
    assert "\x1b" not in shown.output


# --- what is refused -------------------------------------------------------------------------------------------------


def test_a_report_that_is_absent_is_said_where_and_how_to_make(tmp_path: Path) -> None:
    with pytest.raises(VendorReportError, match=r"no report in .*absent\.prj: .*\(target fpga_report"):
        read_vendor_report(tmp_path / "absent.prj")
    with pytest.raises(VendorReportError, match=r"expected reports/resources/json/summary\.json"):
        read_vendor_report(tmp_path)
    (tmp_path / "replay.report.prj").mkdir()
    with pytest.raises(VendorReportError, match=r"Give one of its projects: replay\.report\.prj"):
        read_vendor_report(tmp_path)


@pytest.mark.parametrize(
    ("product", "version"),
    [("SYCL", "2025.1.0"), ("SYCL", "2026.1"), ("SYCL", "2021.3.0"), ("SYCL", "?"), ("OpenCL", "2022.4.0 Build 94")],
)
def test_another_version_is_named_with_those_that_are_read(copied: Path, product: str, version: str) -> None:
    change(copied, "info", "compileInfo", "nodes", 0, "product", to=product)
    change(copied, "info", "compileInfo", "nodes", 0, "version", to=version)
    with pytest.raises(VendorReportError) as refused:
        read_vendor_report(copied)
    for part in ("info.json", "oneAPI 2021.4 to 2025.0", f"found {product} {version}"):
        assert part in str(refused.value)


@pytest.mark.parametrize("name", ["info", "summary"])
def test_a_file_that_is_missing_is_named(copied: Path, name: str) -> None:
    data = copied / "reports" / "resources" / "json"
    (data / f"{name}.json").unlink()
    with pytest.raises(VendorReportError, match=r"summary\.json" if name == "summary" else "holds no info.json"):
        read_vendor_report(copied)


RESOURCES = ("summary", "estimatedResources")


@pytest.mark.parametrize(
    ("where", "value", "expected"),
    [
        ((*RESOURCES, "columns"), ["Kernel Name", "ALMs"], "expected the columns ALUTs, FFs"),
        ((*RESOURCES, "children", 0, "data"), [1, 2], "expected 5 values in the row 'pearl_replay_level0_kernel'"),
        ((*RESOURCES, "children", 0, "data", 2), -1, "a number of at least 0 for ram_blocks of 'pearl_replay_level0"),
        ((*RESOURCES, "children", 0, "data", 2), "many", "found 'many'"),
        ((*RESOURCES, "children", 10, "name"), "Sum", "a row 'Total'"),
        (("summary", "performanceSummary"), [], "'performanceSummary' in the document"),
        (("loop_attr", "nodes", 0, "children", 0, "lt"), "soon", "lt of pearl_replay_level0_kernel.B0"),
        (("loop_attr", "nodes", 0, "children", 0, "af"), "0.00", "a number above 0 for af, the clock of"),
        (("loop_attr", "nodes", 1, "name"), "other", r"the kernels of the summary \(pearl_replay_level0_kernel, "),
        (
            ("quartus", "quartusFitClockSummary", "nodes", 0, "kernel clock"),
            "fast",
            "achieved clock in MHz; found 'fast'",
        ),
        (("quartus", "quartusFitResourceUsageSummary", "nodes"), [], "type aclsystem or system"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(
    copied: Path, where: tuple[str | int, ...], value: object, expected: str
) -> None:
    change(copied, str(where[0]), *where[1:], to=value)
    with pytest.raises(VendorReportError, match=expected) as refused:
        read_vendor_report(copied)
    assert f"{where[0]}.json" in str(refused.value)


def test_blocks_that_hold_each_other_are_refused(tmp_path: Path) -> None:
    report = Path(shutil.copytree(REPORTS / "oneapi_2025.prj", tmp_path / "r.prj"))
    file = report / "reports" / "resources" / "json" / "loop_attr.ndjson"
    head = '{"nodes":[1]}\n{"name":"k", "id":1, "type":"kernel", "children":[2]}\n'
    file.write_text(head + '{"name":"b", "id":2, "type":"loop", "lt":"1", "af":"1", "children":[2]}\n')
    with pytest.raises(VendorReportError, match="each block listed once; found 2"):
        read_vendor_report(report)
    deep = "".join(
        f'{{"name":"b", "id":{n}, "type":"loop", "lt":"1", "af":"1", "children":[{n + 1}]}}\n' for n in range(2, 9999)
    )
    file.write_text(head + deep)
    with pytest.raises(VendorReportError, match="nested deeper"):
        read_vendor_report(report)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(file=st.sampled_from(FILES), position=st.floats(0, 1, exclude_max=True))
def test_a_truncated_report_is_refused_or_says_the_same(tmp_path: Path, file: Path, position: float) -> None:
    project = Path(file.parts[0])
    whole = same_but_for_path(read_vendor_report(REPORTS / project))
    copy = tmp_path / project
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(REPORTS / project, copy)
    data = (REPORTS / file).read_bytes()
    (tmp_path / file).write_bytes(data[: int(position * len(data))])
    found = read_or_refusal(copy)
    assert file.name in found if isinstance(found, str) else found == whole


@pytest.mark.parametrize("file", [file for file in FILES if file.suffix == ".ndjson"], ids=str)
def test_a_report_that_lacks_lines_is_refused_or_says_the_same(tmp_path: Path, file: Path) -> None:
    whole = same_but_for_path(read_vendor_report(REPORTS / file.parts[0]))
    copy = Path(shutil.copytree(REPORTS / file.parts[0], tmp_path / file.parts[0]))
    lines = (REPORTS / file).read_text().splitlines(keepends=True)
    for count in range(len(lines)):
        (tmp_path / file).write_text("".join(lines[:count]))
        found = read_or_refusal(copy)
        assert file.name in found if isinstance(found, str) else found == whole, f"{count} lines"


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(file=st.sampled_from(FILES), position=st.floats(0, 1, exclude_max=True), junk=st.binary(min_size=1, max_size=6))
def test_a_damaged_report_never_fails_in_another_way(tmp_path: Path, file: Path, position: float, junk: bytes) -> None:
    copy = tmp_path / file.parts[0]
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(REPORTS / file.parts[0], copy)
    data = (REPORTS / file).read_bytes()
    cut = int(position * len(data))
    (tmp_path / file).write_bytes(data[:cut] + junk + data[cut + len(junk) :])
    with contextlib.suppress(VendorReportError, CapacityError):
        ReportedReplay.of(read_vendor_report(copy), TREE)


# --- into the matrix -------------------------------------------------------------------------------------------------


def test_cycles_are_those_of_the_slowest_level_and_of_the_way_through_all() -> None:
    found = ReportedReplay.of(read_vendor_report(REPORTS / "oneapi_2023.prj"), TREE)
    # Level 2 does not overlap requests: 20 + 9 cycles of its own and a search of 15 children, each 2 after the one
    # before and 10 long. Level 1: 25 + 6 and a search of 15 in 8 + 14. The root: 30 + 2.
    level2, level1, root = 29 + 14 * 2 + 10, 31 + 14 + 8, 32
    assert (level2, level1) == (67, 53)
    cell = found.cell(batch_size=32, insertions=16)
    assert cell.sample.value_us == pytest.approx((31 * level2 + level1 + level2 + root) / 287.5)
    # An update passes every level twice and searches nothing; the root then waits for the change, 12 cycles.
    for measured, count in ((cell.update, 32), (cell.insert, 16)):
        assert measured.value_us == pytest.approx(((count - 1) * 2 * 29 + 2 * (31 + 29) + 2 * (root + 12)) / 287.5)
    assert {m.source for _, m in cell.measurements()} == {"imported"}
    assert (cell.fanout, cell.workers) == (16, 1)


def test_what_is_imported_is_there_in_the_next_process(tmp_path: Path) -> None:
    report = read_vendor_report(REPORTS / "oneapi_2025.prj")
    found = import_report(report, BOARD, TREE, CalibrationStore(tmp_path / "c.json"))
    other = CalibrationStore(tmp_path / "other.json")
    assert other.import_file(tmp_path / "c.json") == Imported(new=1, total=1, other_versions=0)
    for path in ("c.json", "other.json"):
        (entry,) = CalibrationStore(tmp_path / path)._entries.values()
        read = ReportedReplay.from_measurements(TREE, dict(entry.measurements))
        assert read is not None
        assert (read.sampling, read.update) == (found.sampling, found.update)
        assert read.frequency_mhz == pytest.approx(349.92)


def test_a_kernel_of_another_design_is_not_imported(copied: Path, tmp_path: Path) -> None:
    store = CalibrationStore(tmp_path / "c.json")
    for name in ("summary", "loop_attr"):
        file = copied / "reports" / "resources" / "json" / f"{name}.json"
        file.write_text(file.read_text().replace("pearl_replay_level1_kernel", "VectorAdd"))
    report = read_vendor_report(copied)
    assert report.kernels[1].name == "VectorAdd", "it can be read and shown"
    with pytest.raises(VendorReportError, match=r"expected the Replay Manager's kernels .*; found 'VectorAdd'"):
        import_report(report, BOARD, TREE, store)
    twice = dataclasses.replace(report, kernels=(*report.kernels[2:], report.kernels[2], report.kernels[0]))
    with pytest.raises(VendorReportError, match="each once"):
        import_report(twice, BOARD, TREE, store)
    assert len(store) == 0


def test_mangled_names_are_known_too() -> None:
    report = read_vendor_report(REPORTS / "oneapi_2023.prj")
    mangled = tuple(
        dataclasses.replace(kernel, name=f"_ZTSZ13launch_stagesISt6vectorEvRT_E26{kernel.name}")
        for kernel in report.kernels
    )
    assert ReportedReplay.of(dataclasses.replace(report, kernels=mangled), TREE) == ReportedReplay.of(report, TREE)


def test_a_report_on_another_tree_or_without_intervals_is_not_imported(copied: Path) -> None:
    with pytest.raises(
        VendorReportError, match=r"expected 1 levels .* 16 slots with fanout 16; found 2\. .*PEARL_FANOUT"
    ):
        ReportedReplay.of(read_vendor_report(copied), ReplayTree(16, 16))
    data = copied / "reports" / "resources" / "json"
    (data / "loop_attr.json").unlink()
    report = read_vendor_report(copied)
    assert report.frequency_mhz == 287.5
    with pytest.raises(VendorReportError, match=r"no initiation intervals, .*\(loop_attr.json is absent\): times"):
        ReportedReplay.of(report, TREE)
    (data / "quartus.json").unlink()
    assert read_vendor_report(copied).frequency == "unknown"


def test_what_does_not_fit_is_not_imported(copied: Path, tmp_path: Path) -> None:
    store = CalibrationStore(tmp_path / "c.json")
    change(copied, *RESOURCES, "children", 10, "data", 3, to=5000)
    with pytest.raises(CapacityError, match=r"takes 5,000 DSP blocks of 4,510\. Compile it for a larger part"):
        import_report(read_vendor_report(copied), BOARD, TREE, store)
    report = read_vendor_report(REPORTS / "oneapi_2023.prj")
    for row, expected in (
        (dataclasses.replace(BOARD, luts=40_000), "49,368 ALUTs of 40,000"),
        (dataclasses.replace(BOARD, sram_kb=256), "211 RAM blocks of 100"),
        (dataclasses.replace(BOARD, dsp=57), "58 DSP blocks of 57"),
    ):
        with pytest.raises(CapacityError, match=f"than the row board has: {expected}. Correct luts, dsp or sram_kb"):
            import_report(report, row, TREE, store)
    with pytest.raises(ConfigurationError, match="cpu0 is a cpu; the report is of an FPGA"):
        import_report(report, Device("cpu0", "cpu", "cpu"), TREE, store)
    assert len(store) == 0


def composed(folder: Path, **problem: Any) -> Any:
    devices, connections = folder / "devices.csv", folder / "connections.csv"
    if not devices.exists():
        devices.write_text(ROWS)
    connections.write_text("source,target,latency_us,bandwidth_gbps\ncpu0,board,5,16\n")
    composer = described((devices, connections), calibration=folder / "calibration.json", **problem)
    composer.run()
    return composer


@pytest.mark.usefixtures("quick_profiles")
def test_imported_times_stand_in_the_matrix_and_decide(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    modelled = composed(tmp_path, capacity=256).matrix["board"]
    store = CalibrationStore(tmp_path / "calibration.json")
    device = next(d for d in composed(tmp_path, capacity=256).platform.devices if d.name == "board")
    found = import_report(read_vendor_report(REPORTS / "oneapi_2023.prj"), device, TREE, store)
    composer = composed(tmp_path, capacity=256, progress=True)
    assert "board: Replay Manager by an imported report, not modelled: 2 levels, samples every 67 cycles" in (
        capsys.readouterr().out
    )
    row = composer.matrix["board"]
    batch = composer.placement.batch_size
    assert row.replay == found.cell(batch, 4)
    assert row.learner == modelled.learner
    assert isinstance(row.pair, PairCell)
    assert row.pair.learner == modelled.pair.learner, "the report is of the Replay Manager alone"
    assert row.pair.joined
    assert row.pair.replay.insert == row.replay.insert
    assert row.pair.replay.update.value_us < row.replay.update.value_us, "gradients are added up meanwhile"
    # A sample every 67 cycles is slower than the Learner: it ends that much after the last weight.
    problem = composer._composed.problem
    trainer = make_trainer(problem.trainer_class, problem.observation_space, problem.action_space)
    part = FpgaPart.from_device(device)
    space = program_space(LearnerProgram.of(trainer), part, batch, device)
    joined = space.joined(space.with_replay(TREE).timing, TREE, found.timing)
    assert row.pair.replay.sample.value_us == pytest.approx(found.microseconds(joined.sampling))
    assert joined.sampling > found.sampling.cycles(2, batch) - joined.learner
    assert "imported" in str(composer.matrix)
    assert "imported" in composer.matrix.to_json()
    candidate = next(c for c in composer.placement.candidates if c.pair == ("board", "cpu0"))
    assert candidate.terms.sample_us == pytest.approx(row.replay.sample.value_us)
    # Another capacity, another fanout, another part: not what was compiled.
    for problem_changes in ({"capacity": 300}, {"capacity": 256, "fanout": 4}):
        cell = composed(tmp_path, **problem_changes).matrix["board"].replay
        assert {m.source for _, m in cell.measurements()} == {"modelled"}
    assert composed(tmp_path, capacity=256, fanout="auto").matrix["board"].replay == row.replay
    (tmp_path / "devices.csv").write_text(ROWS.replace("4510", "4511"))
    assert composed(tmp_path, capacity=256).matrix["board"].replay.sample.source == "modelled"


@pytest.mark.usefixtures("quick_profiles")
def test_a_row_that_states_too_little_for_the_model_takes_a_report(tmp_path: Path) -> None:
    (tmp_path / "devices.csv").write_text(ROWS.replace("400,4510,18202,974400", ",,,"))
    bare = composed(tmp_path, capacity=256).platform.device("board")
    import_report(
        read_vendor_report(REPORTS / "oneapi_2021.prj"), bare, TREE, CalibrationStore(tmp_path / "calibration.json")
    )
    row = composed(tmp_path, capacity=256).matrix["board"]
    assert isinstance(row.replay, ReplayCell)
    assert isinstance(row.learner, MissingCell)
    assert isinstance(row.pair, MissingCell)


# --- the command -----------------------------------------------------------------------------------------------------


def test_the_command_shows_a_report_and_imports_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEARL_CACHE_DIR", str(tmp_path / "cache"))
    devices = tmp_path / "devices.csv"
    devices.write_text(ROWS)
    report = str(REPORTS / "oneapi_2025.prj")
    shown = CliRunner().invoke(app, ["fpga-report", report])
    assert shown.exit_code == 0
    for part in (
        "pearl_replay_level1_kernel",
        "6,842",
        "Available",
        "Clock: 349.9 MHz, estimated",
        "no achieved clock",
    ):
        assert part in shown.output
    assert not (tmp_path / "cache").exists(), "nothing is imported that was not asked for"
    into = ["fpga-report", report, "--devices", str(devices), "--capacity", "256", "--import-to"]
    imported = CliRunner().invoke(app, [*into, "board"])
    assert imported.exit_code == 0
    assert (
        "Imported for board: 2 levels, samples every 67 cycles, updates every 58 cycles, 349.9 MHz" in imported.output
    )
    assert len(CalibrationStore(tmp_path / "cache" / "calibration-2.json")) == 1
    unknown = CliRunner().invoke(app, [*into, "card"])
    assert unknown.exit_code == 1
    refused = CliRunner().invoke(app, ["fpga-report", str(tmp_path)])
    assert refused.exit_code == 1
