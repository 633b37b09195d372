"""The HTML report of a run: what it shows, that it is safe and self-contained, and what it says where files lack."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import math
import re
import xml.etree.ElementTree as ET
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from report_runs import server, trace_events, write_run
from typer.testing import CliRunner

from composer.composition import Composition
from composer.html_report.composition_view import heat_rows, pairs, stages
from composer.html_report.page import report_page
from composer.html_report.svg import Series, chart
from composer.html_report.timeline import predicted_schedule, traced_window
from composer.html_report.trace import read_trace
from composer.html_report.view import LEVELS
from pearl.cli import app
from pearl.errors import ConfigurationError
from pearl.runtime.composition_file import composition_file, keep_composition
from pearl.runtime.run_log import RunLog
from pearl.runtime.telemetry import PARTS

HOSTILE = "<script>window.owned=1</script>\"'><img src=x onerror=window.owned=1>&amp;\x00\x1b[31m\ud800"


def parsed(page: str) -> ET.Element:
    """The page as XML, which it is too: an unescaped character would not parse."""
    return ET.fromstring(page.encode())


def text_of(page: str) -> str:
    return " ".join("".join(parsed(page).itertext()).split())


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "server")


@pytest.fixture(scope="module")
def page(run: Path) -> str:
    return report_page(run)


# --- content --------------------------------------------------------------------------------------------------------


def test_the_page_shows_every_section(page: str) -> None:
    headings = [node.text for node in parsed(page).iter("h2")]
    assert headings == [
        "Run",
        "Learning",
        "Platform and placement",
        "Prediction and measurement",
        "Timeline of iterations",
        "Queues and busy shares",
        "Primitive-device assignment matrix",
        "Every placement",
    ]


def test_the_platform_names_primitives_bandwidths_and_latencies(page: str) -> None:
    diagram = next(node for node in parsed(page).iter("svg") if node.get("aria-label", "").startswith("Platform"))
    shown = " ".join(diagram.itertext())
    for text in (
        "Replay Manager",
        "Learner",
        "Data Storage",
        "Actors",
        "10 µs, 12 GB/s",
        "6 µs, 8 GB/s to it; 9 µs, 7",
    ):
        assert text in shown
    assert "gpu0: Learner, Data Storage, connected to cpu0 with 10 µs, 12 GB/s" in diagram.attrib["aria-label"]
    assert "Programs do not use the connection gpu0 to fpga0" in text_of(page)


def test_each_cell_of_the_matrix_shows_source_and_spread_without_a_pointer(page: str) -> None:
    text = text_of(page)
    assert "1,250 µsmeasured, 1,112 to 1,388" in text
    assert "modelled · fastest" in text
    assert "imported, 300.7 to 334.8" in text
    hover = [node.attrib["title"] for node in parsed(page).iter("li") if "title" in node.attrib]
    assert "step, measured: p20 1,112, p50 1,250, p80 1,388 µs of 500 samples" in hover


def test_slower_cells_have_a_stronger_shade() -> None:
    made = server()
    found: dict[str, list[tuple[float, int]]] = {}
    for row in heat_rows(made.matrix, made.placement):
        for cell in row.cells:
            for value in cell.values:
                found.setdefault(value.name, []).append((float(value.us.replace(",", "")), value.level))
    assert set(found) == {"sample", "insert", "update", "step", "gather", "store"}
    for values in found.values():
        levels = [level for _, level in sorted(values)]
        assert levels == sorted(levels)
        assert (levels[0], levels[-1]) == (0, LEVELS - 1)


def test_the_chosen_cells_and_placement_are_marked_in_words() -> None:
    made = server()
    chosen = [
        (row.device, cell.column) for row in heat_rows(made.matrix, made.placement) for cell in row.cells if cell.chosen
    ]
    assert chosen == [("cpu0", "RM only"), ("gpu0", "Learner only"), ("gpu0", "Data Storage")]
    shown, left_out = pairs(made.placement)
    assert [pair.chosen for pair in shown] == [True] + [False] * 8
    assert not left_out
    assert all(pair.reason for pair in shown[1:])
    assert all("x slower" in pair.reason for pair in shown[2:])


def test_each_placement_has_eps_and_eps_per_watt(page: str) -> None:
    for candidate in server().placement.candidates:
        assert candidate.watts is not None
        assert f"{candidate.eps:,.0f} EPS" in text_of(page)
        assert re.search(rf"{candidate.eps / candidate.watts:,.1f}|{candidate.eps / candidate.watts:,.0f} EPS/W", page)


def test_terms_are_compared_with_their_measurement(page: str) -> None:
    rows = [" ".join("".join(row.itertext()).split()) for row in parsed(page).iter("tr")]
    assert "gather 40.00 µs predicted 52.40 µs measured 1.31x, longerp20 to p80: 49.78 to 56.59 µs" in rows
    assert "iteration 372.0 µs predicted 401.8 µs measured 1.08x, agreesp20 to p80: 381.7 to 433.9 µs" in rows
    assert all(any(row.startswith(term) for row in rows) for term in PARTS)


def test_without_measured_terms_the_prediction_stands_alone(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    (run / "summary.json").write_text('{"program": "dqn"}')
    (run / "bench.json").unlink()
    page = text_of(report_page(run))
    assert "The run measured no terms of its iterations" in page
    assert "not measured" in page


def test_the_drawn_batches_take_the_predicted_time() -> None:
    placement = server().placement
    for candidate in placement.candidates:
        choice = placement.with_choice(
            replay_manager=candidate.pair[0],
            learner=candidate.pair[1],
            implementation=candidate.learner.implementation,
        )
        starts = [work.start_us for work in predicted_schedule(choice) if work.kind == "training"]
        assert len(starts) >= 3
        for before, after in pairwise(starts):
            assert after - before == pytest.approx(candidate.t_itr_us, rel=0.01)
        assert [stage.slowest for stage in stages(choice)].count(True) == 1


def test_a_huge_delay_is_drawn_as_well() -> None:
    placement = dataclasses.replace(server().placement, priority_update_delay=100_000)
    assert 0 < len(predicted_schedule(placement)) < 100


def test_a_trace_shows_a_few_iterations_from_near_its_end(run: Path) -> None:
    window = traced_window(read_trace(run / "trace.json"))
    assert {work.lane for work in window} == {"Host Runtime on cpu0", "Replay Manager on cpu0", "Learner on gpu0"}
    assert 3 <= sum(work.kind == "training" for work in window) <= 5
    assert min(work.start_us for work in window) > 17_000
    assert max(work.end_us for work in window) < 20_000


def test_events_of_a_trace_that_are_not_understood_are_left_out(tmp_path: Path) -> None:
    strange: list[object] = [None, 3, {}, {"ph": "X"}, {"ph": "X", "ts": "soon", "dur": 1}, {"ph": "C", "ts": 1}]
    strange += [
        {"ph": "X", "ts": 10**400, "dur": 1},
        {"ph": "X", "ts": 1, "dur": -1},
        {"ph": "X", "ts": math.nan, "dur": 1},
    ]
    (tmp_path / "trace.json").write_text(json.dumps([*strange, *trace_events()]))
    assert len(read_trace(tmp_path / "trace.json").spans) == 250


def test_queue_levels_come_from_the_table_and_the_trace(page: str) -> None:
    text = text_of(page)
    for caption in ("DCQ: share filled over seconds", "LAQ: fill level over traced", "Busy share of each primitive"):
        assert caption in text


def test_an_energy_placement_says_so(tmp_path: Path) -> None:
    assert "for energy (EPS per watt)" in text_of(report_page(write_run(tmp_path, server("power_efficiency"))))


# --- safety ---------------------------------------------------------------------------------------------------------


def check_is_harmless(page: str) -> None:
    tags = {node.tag for node in parsed(page).iter()}
    assert not tags & {"script", "img", "iframe", "object", "embed", "link", "form", "base", "use", "image"}
    for node in parsed(page).iter():
        for name, value in node.attrib.items():
            assert not name.startswith("on")
            assert name not in ("src", "style")
            assert name != "href" or value.startswith("#")
    assert "url(" not in page
    assert "@import" not in page


def test_the_page_has_no_scripts_and_loads_nothing(page: str) -> None:
    check_is_harmless(page)
    policy = next(node for node in parsed(page).iter("meta") if node.get("http-equiv") == "Content-Security-Policy")
    style = next(parsed(page).iter("style")).text or ""
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert policy.attrib["content"].startswith(f"default-src 'none'; style-src 'sha256-{digest}';")


def hostile_run(folder: Path) -> Path:
    run = write_run(folder, server(reason=HOSTILE.replace("\ud800", "")), name=HOSTILE)
    summary = json.loads((run / "summary.json").read_text())
    summary |= {"evaluation_environment": HOSTILE * 2, "evaluation_env_kwargs": {HOSTILE: HOSTILE}}
    summary |= {"environment": HOSTILE, "stopped": HOSTILE, "composed_from": HOSTILE, "seed": HOSTILE}
    (run / "summary.json").write_text(json.dumps(summary))
    name = HOSTILE.replace('"', "").replace("\ud800", "").replace("\x00", "")
    table = (run / "progress.csv").read_text().replace("queue/DCQ", f'"queue/{name}"')
    (run / "progress.csv").write_text(table)
    trace = [
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": 1, "args": {"name": HOSTILE}},
        *({"ph": "X", "pid": 1, "tid": 1, "name": HOSTILE, "ts": 10 * n, "dur": 8} for n in range(9)),
        {"ph": "C", "pid": 1, "name": HOSTILE, "ts": 1, "args": {HOSTILE: 2}},
    ]
    (run / "trace.json").write_text(json.dumps(trace))
    return run


def test_whatever_files_say_is_text(tmp_path: Path) -> None:
    page = report_page(hostile_run(tmp_path))
    check_is_harmless(page)
    assert "<script>window.owned=1</script>" in text_of(page)
    assert page.count("&lt;script&gt;window.owned=1") >= 10
    page.encode()  # no lone surrogate is left


# --- what is missing or damaged -------------------------------------------------------------------------------------


def test_a_run_without_its_composition_says_what_to_do(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    (run / "composition.json").unlink()
    page = text_of(report_page(run))
    assert "There is no composition.json" in page
    assert "--composition PROGRAM.composition.json" in page
    assert "Every placement" not in page
    assert "Return over environment steps" in page


def test_a_run_that_goes_on_is_reported(tmp_path: Path) -> None:
    (tmp_path / "progress.csv").write_text("wall_s,env_steps,training_return,eps\n1,10,nan,5\n2,20,7.5,inf\n3,3")
    page = text_of(report_page(tmp_path))
    assert "There is no summary.json" in page
    assert "Return over environment steps" in page


@pytest.mark.parametrize("content", ["\0", "null", "[" * 100_000])
@pytest.mark.parametrize(
    "name",
    ["summary.json", "bench.json", "composition.json", "trace.json", "progress.csv", "episodes.csv", "evaluations.csv"],
)
def test_a_damaged_file_costs_its_own_section_only(run: Path, tmp_path: Path, name: str, content: str) -> None:
    for file in run.iterdir():
        if file.is_file() and file.name != "trace.json":
            (tmp_path / file.name).symlink_to(file)
    (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / name).write_text(content)
    page = report_page(tmp_path)
    check_is_harmless(page)
    if name.endswith(".json"):
        assert name in text_of(page)
    assert ("Every placement" in text_of(page)) == (name != "composition.json")


def test_a_composition_of_another_program_is_noticed(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps({**summary, "predicted_eps": 17.0}))
    assert "predicted 17 EPS, its composition" in text_of(report_page(run))


def test_a_composition_that_does_not_fit_together_is_a_note(tmp_path: Path) -> None:
    document = json.loads(server().to_json())
    document["placement"]["host"] = "cpu9"
    run = write_run(tmp_path)
    (run / "composition.json").write_text(json.dumps(document))
    assert "There is no device 'cpu9'" in text_of(report_page(run))


def test_a_named_composition_that_cannot_be_read_is_an_error(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"absent\.json cannot be read"):
        report_page(run, composition=tmp_path / "absent.json")
    with pytest.raises(ConfigurationError, match=r"absent\.json cannot be read"):
        report_page(run, trace=tmp_path / "absent.json")
    with pytest.raises(ConfigurationError, match="is not a trace"):
        report_page(run, trace=run / "summary.json")


# --- drawing --------------------------------------------------------------------------------------------------------

values = st.lists(
    st.floats(allow_nan=True, allow_infinity=True) | st.integers(-5, 5).map(float), min_size=1, max_size=30
)


@settings(max_examples=200, deadline=None)
@given(values, values, st.booleans())
def test_a_chart_draws_any_numbers(x: list[float], y: list[float], from_zero: bool) -> None:
    count = min(len(x), len(y))
    kinds = ("line", "steps", "dots", "marks")
    points = np.array(x[:count]), np.array(y[:count])
    series = [Series(kind, *points, kind, style) for style, kind in enumerate(kinds)]  # type: ignore[arg-type]
    drawn = chart("A chart", "x", "y", series, from_zero)
    visible = any(abs(a) <= 1e300 and abs(b) <= 1e300 for a, b in zip(*points, strict=True))
    assert (drawn is not None) == visible
    if drawn is None:
        return
    root = ET.fromstring(drawn)
    assert "nan" not in drawn.replace("A chart", "")
    height = float(root.attrib["viewBox"].split()[3])
    for circle in root.iter("circle"):
        assert -1 <= float(circle.attrib["cx"]) <= 361
        assert -1 <= float(circle.attrib["cy"]) <= height


def test_long_series_are_thinned() -> None:
    x = np.arange(100_000.0)
    drawn = chart("A chart", "x", "y", [Series("line", x, x), Series("dots", x, x, "dots")])
    assert drawn is not None
    assert len(drawn) < 100_000


# --- where the composition comes from -------------------------------------------------------------------------------


def test_a_composition_is_read_back_without_its_samples() -> None:
    made = server()
    assert Composition.from_json(made.to_json()) == made


def test_a_run_keeps_the_composition_of_its_program(tmp_path: Path) -> None:
    program, run = tmp_path / "program.py", tmp_path / "run"
    run.mkdir()
    keep_composition(program, run)
    assert not list(run.iterdir())
    composition_file(program).write_text("{}")
    keep_composition(program, run)
    assert (run / "composition.json").read_text() == "{}"


def test_a_composition_that_cannot_be_copied_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    program = tmp_path / "program.py"
    composition_file(program).write_text("{}")
    keep_composition(program, tmp_path / "absent")
    assert "Reports of this run lack it" in caplog.text


def test_a_new_run_moves_what_a_report_reads_of_an_earlier_one_aside(tmp_path: Path) -> None:
    names = ["bench.json", "composition.json", "report.html", "trace.json"]
    for name in names:
        (tmp_path / name).write_text("earlier")
    with RunLog(tmp_path):
        pass
    assert sorted(path.name for path in (tmp_path / "earlier-001").iterdir()) == names


# --- the command ----------------------------------------------------------------------------------------------------


def invoke(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["report", *map(str, arguments)])
    return result.exit_code, result.output


def test_the_command_writes_the_report_into_the_run(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    code, output = invoke(run)
    assert code == 0, output
    assert f"Report:         {run / 'report.html'}" in output
    parsed((run / "report.html").read_text(encoding="utf-8"))


def test_the_report_goes_elsewhere_or_nowhere(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    assert invoke(run, "--output", tmp_path / "new" / "a.html")[0] == 0
    assert invoke(run, "--no-html")[0] == 0
    assert (tmp_path / "new" / "a.html").is_file()
    assert not (run / "report.html").exists()


def test_a_report_that_cannot_be_written_says_what_to_do(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    code, output = invoke(run, "--output", run / "summary.json" / "report.html")
    assert code == 1
    assert "--no-html" in output
    assert "all steps done" in output  # the summary comes first
    assert invoke(run, "--no-html", "--open")[0] == 1
