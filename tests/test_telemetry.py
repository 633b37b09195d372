"""What a run measures of itself: times of an iteration's parts, busy shares, queue levels, the trace."""

from __future__ import annotations

import dataclasses
import io
import json
import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from report_runs import server
from rich.console import Console
from test_data_flow import ACTORS, REPLAY, TRAIN, OnPolicy, Recording, options, run_setting_1

import pearl.runtime.telemetry as telemetry_module
from composer.placement import IterationTerms
from composer.predicted_parts import predicted_us
from pearl.backends.cpu.replay import NativeReplayManager
from pearl.cli.iteration import iteration_table
from pearl.errors import ConfigurationError
from pearl.recorder import Recorder
from pearl.replay.reference import ReferenceReplayManager
from pearl.replay.requests import ReplayRequestQueue
from pearl.runtime.dashboard import dashboard
from pearl.runtime.options import parse_options
from pearl.runtime.progress import ProgressDisplay
from pearl.runtime.rate import StepRate
from pearl.runtime.reporting import Program
from pearl.runtime.session import Session
from pearl.runtime.telemetry import INSERTION, PARTS, Activity, Level, Telemetry
from pearl.runtime.trace import Trace, Track

ACTIVITY = Activity({"Actors": 0.5, "Learner": 1.0}, {"DCQ": Level(1, 2), "buffer": Level(40, 32)})


# --- sums and events ------------------------------------------------------------------------------------------------


def test_a_recorder_adds_up_parts_and_keeps_the_newest_events() -> None:
    recorder = Recorder("train")
    assert recorder.spent == {"train": 0.0}
    recorder.record("train", 1.0, 3.0)
    assert recorder.events() == [], "none unless asked for"
    recorder.keep_events(2)
    for start in (4.0, 5.0, 6.0):
        recorder.record("gather", start, start + 0.5)
    recorder.begin()
    assert recorder.spent == {"train": 2.0, "gather": 1.5}
    assert recorder.events() == [("gather", 5.0, 5.5), ("gather", 6.0, 6.5)]


@pytest.mark.parametrize("executor", ["autorun", "inline"])
@pytest.mark.parametrize("manager", [NativeReplayManager, ReferenceReplayManager])
def test_the_replay_managers_queue_times_each_kind_of_request(manager: Any, executor: Any) -> None:
    rrq = ReplayRequestQueue(manager(64), executor=executor)
    assert rrq.seconds() == {"sample": 0.0, "update": 0.0, "insert": 0.0}
    rrq.keep_events(4)
    rrq.write_insert(np.arange(64))
    for _ in range(3):
        rrq.write_sample(8)
        rrq.write_update(np.arange(8), np.ones(8, np.float32))
        rrq.drain()
        assert rrq.poll() is not None
    rrq.close()
    assert all(seconds > 0 for seconds in rrq.seconds().values())
    events = rrq.events()
    assert [part for part, _, _ in events] == ["sample", "update"] * 2, "the newest four"
    times = [time for _, start, end in events for time in (start, end)]
    assert times == sorted(times)


# --- times of an iteration ------------------------------------------------------------------------------------------


class Loop:
    """Stands for a Worker and a StepRate: says what the test wants."""

    laq: tuple[()] = ()
    ldq: tuple[()] = ()
    last = 0.0
    steps = 0
    busy_s = 0.0
    since: float | None = None

    def __init__(self, host: Mapping[str, float] | None = None) -> None:
        self.spent: dict[str, float] = defaultdict(float)
        self.host = Recorder()
        self.host.spent.update(host or {})

    @property
    def timed_steps(self) -> int:
        return self.steps

    def seconds(self) -> Mapping[str, float]:
        return self.spent

    def do(self, telemetry: Telemetry, iterations: int, iteration_s: float, **parts_s: float) -> None:
        """One interval's iterations, each with these times."""
        self.last += 1.0
        self.steps += iterations
        self.busy_s += iterations * iteration_s
        for name, seconds in parts_s.items():
            self.spent[name] += iterations * seconds
        telemetry.trained()


def watched(loop: Loop) -> Telemetry:
    telemetry = Telemetry(loop, 32, devices={})  # type: ignore[arg-type]
    telemetry.watch_worker(loop)  # type: ignore[arg-type]
    loop.do(telemetry, 1, 7.0, train=5.0)  # the first iterations count for nothing
    return telemetry


def test_times_are_medians_over_intervals_and_parts_not_measured_are_absent() -> None:
    loop = Loop()
    telemetry = watched(loop)
    for train_s in (2e-6, 3e-6, 90e-6):
        loop.do(telemetry, 10, train_s + 5e-6, sample=1e-6, train=train_s, publish=1e-6)
    times = telemetry.iteration_times()
    assert times.intervals == 3
    expected = {"sampling": 1.0, "training": 4.0, "communication": 3.0, "iteration": 8.0}
    assert times.measured_us == pytest.approx(expected)
    assert times.spread_us["iteration"][0] == pytest.approx(7.4)
    assert times.spread_us["iteration"][1] > 50
    assert telemetry.newest_us()["training"] == pytest.approx(91.0)


def test_an_insertion_is_timed_per_transition_whatever_the_replay_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(telemetry_module.time, "perf_counter", lambda: now)
    loop = Loop()
    telemetry = watched(loop)
    for transitions in (0, 100, 0, 300):
        if transitions:
            telemetry.insertion_begins(SimpleNamespace(count=transitions))  # type: ignore[arg-type]
            now += transitions * 2e-6
            telemetry.inserted()
        loop.do(telemetry, 10, 5e-6, train=4e-6)
        assert telemetry.newest_us().get(INSERTION) == (pytest.approx(2.0) if transitions else None)
    times = telemetry.iteration_times()
    assert times.measured_us[INSERTION] == pytest.approx(2.0)
    assert times.spread_us[INSERTION] == pytest.approx((2.0, 2.0))


def test_a_run_without_iterations_has_no_times() -> None:
    telemetry = Telemetry(StepRate(), 32, devices={})
    assert telemetry.iteration_times() == telemetry_module.IterationTimes({}, {}, 0)
    assert telemetry.newest_us() == {}
    assert telemetry.activity().levels == {}


def test_busy_shares_may_be_asked_for_before_a_loop_of_rollouts_is_there() -> None:
    telemetry = Telemetry(StepRate(), 32, devices={})
    telemetry.scalars()
    loop = {"advantages": 1.0, "train": 1.0, "publish": 0.0}
    telemetry.watch_worker(SimpleNamespace(seconds=lambda: loop, queues={}))  # type: ignore[arg-type]
    assert telemetry.activity().busy["Advantages"] == 0.0


def test_a_long_run_joins_its_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry_module, "_MOST_INTERVALS", 8)
    loop = Loop()
    telemetry = watched(loop)
    for _ in range(1000):
        loop.do(telemetry, 4, 5e-6, train=5e-6)
    times = telemetry.iteration_times()
    assert 2 <= times.intervals <= 9
    assert times.measured_us["training"] == pytest.approx(5.0)


def test_the_warm_up_of_a_benchmark_is_left_out() -> None:
    loop = Loop()
    telemetry = watched(loop)
    loop.do(telemetry, 50, 1e-3, train=1e-3)
    loop.steps, loop.busy_s, loop.since = 0, 0.0, loop.last  # as StepRate.restart()
    loop.do(telemetry, 0, 0.0)
    for _ in range(3):
        loop.do(telemetry, 10, 5e-6, train=4e-6)
    assert telemetry.iteration_times().measured_us["training"] == pytest.approx(4.0)


def test_the_predictions_have_the_names_of_the_measurements() -> None:
    placement = server().placement
    assert (placement.actor_count, placement.envs_per_actor) == (4, 8)
    told = predicted_us(placement)
    assert tuple(told) == PARTS
    assert told[INSERTION] == pytest.approx((placement.terms.insert_us + placement.terms.store_us) / 32)
    terms = IterationTerms(3.0, 1.0, 2.0, 0.5, 9.0, 0.25, 1.5, messages_us=4.0, delay=0)
    found = terms.by_primitive()
    assert found["communication"] == pytest.approx(5.75)
    assert found["iteration"] == pytest.approx(terms.t_itr_us)
    assert {"sampling": 3.0, "insertion": 2.0, "update": 1.5, "training": 9.0}.items() <= found.items()
    alone = IterationTerms(3.0, 0.0, 0.0, 0.0, 9.0, 0.0, 1.5).by_primitive()
    assert set(alone) == {"sampling", "update", "training", "iteration"}, "a missing part is absent, not 0"


def test_the_table_shows_what_a_damaged_summary_still_has() -> None:
    assert iteration_table({}) is None
    assert iteration_table({"iteration": "x"}) is None
    assert iteration_table({"iteration": {"measured_us": {}, "predicted_us": {"training": 1.0}}}) is None
    damaged = {"measured_us": {"training": 3.0, "update": "x"}, "predicted_us": {"training": 2.0, "gather": 0}}
    table = iteration_table({"iteration": damaged})
    stream = io.StringIO()
    Console(file=stream, width=100).print(table)
    assert re.search(r"training\s*\|\s*2.00\s*\|\s*3.00\s*\|\s*1.50", stream.getvalue())
    assert re.search(r"update\s*\|\s*-\s*\|\s*-\s*\|\s*-", stream.getvalue())


# --- a whole run ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a short serial run of setting 1 with a trace."""
    folder = tmp_path_factory.mktemp("traced")
    session = Session(
        Program("traced", 0.0, predicted_us={"training": 10.0}, devices={"actors": "cpu7"}),
        dataclasses.replace(options(folder, 300), trace=folder / "trace.json"),
        trainer_class=Recording,
        settings={},
        actors=ACTORS,
        replay=REPLAY,
        train=TRAIN,
        data_flow=OnPolicy,
    )
    run_setting_1(session)
    return folder


def test_a_run_writes_measured_beside_predicted(traced: Path) -> None:
    iteration = json.loads((traced / "summary.json").read_text())["iteration"]
    assert iteration["predicted_us"] == {"training": 10.0}
    assert list(iteration["measured_us"]) == list(PARTS)
    assert all(value > 0 for value in iteration["measured_us"].values())
    assert "Iteration:" in (traced / "run.log").read_text()


def test_a_run_logs_busy_shares_and_queue_levels(traced: Path) -> None:
    columns = (traced / "progress.csv").read_text().splitlines()[0].split(",")
    assert {"busy/learner", "busy/actors", "queue/dcq", "queue/laq", "queue/ldq", "queue/rrq"} <= set(columns)


def test_a_trace_tells_threads_devices_and_queues(traced: Path) -> None:
    events = json.loads((traced / "trace.json").read_text())["traceEvents"]
    named = {(e["name"], e["args"]["name"]) for e in events if e["ph"] == "M"}
    assert ("process_name", "cpu7") in named
    assert ("thread_name", "Host Runtime, serial") in named
    parts = {"sampling", "gather", "training", "update", "insertion", "messages", "collection"}
    assert parts <= {e["name"] for e in events if e["ph"] == "X"}
    assert {"DCQ", "buffer", "RRQ", "LAQ", "LDQ"} == {e["name"] for e in events if e["ph"] == "C"}
    ends: list[float] = []
    for event in (e for e in events if e["ph"] == "X"):
        assert event["ts"] >= 0
        assert event["dur"] >= 0
        ends = [end for end in ends if end > event["ts"] + 0.01]
        assert all(event["ts"] + event["dur"] <= end + 0.01 for end in ends), "parts nest, or follow each other"
        ends.append(event["ts"] + event["dur"])


# --- the trace's file -----------------------------------------------------------------------------------------------


def test_threads_of_one_device_are_one_process_and_a_level_is_written_when_it_changes(tmp_path: Path) -> None:
    said: list[str] = []
    tracks = [Track("Learner", "gpu0", [("train", 2.0, 2.5)]), Track("Actor 0", "cpu0", []), Track("a", "gpu0", [])]
    levels = [(1.0 + n, {"LAQ": Level(n // 2, 2)}) for n in range(4)]
    Trace(tmp_path / "t.json").write(tracks, levels, said.append)
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == ["gpu0", "cpu0", "queues"]
    (training,) = [e for e in events if e["ph"] == "X"]
    assert (training["name"], training["ts"], training["dur"]) == ("training", 1e6, 5e5)
    assert [(e["ts"], e["args"]) for e in events if e["ph"] == "C"] == [(0.0, {"filled": 0}), (2e6, {"filled": 1})]
    assert said == [f"Trace:          {tmp_path / 't.json'}, which https://ui.perfetto.dev opens"]


def test_a_trace_that_cannot_be_written_is_refused_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="it is a folder"):
        Trace(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match=r"cannot be made \(.*\)\. Give --trace another path"):
        Trace(tmp_path / "file" / "t.json")
    Trace(tmp_path / "new" / "folder" / "t.json").write([], [], lambda _: None)
    assert (tmp_path / "new" / "folder" / "t.json").exists()


def test_a_trace_whose_folder_is_lost_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    trace = Trace(folder / "t.json")
    folder.rmdir()
    trace.write([], [], print)
    assert "cannot be written: No such file or directory" in caplog.text


# --- the live view --------------------------------------------------------------------------------------------------


def drawn(*, plain: bool = False, encoding: str = "utf-8", height: int = 40) -> str:
    stream = io.TextIOWrapper(io.BytesIO(), encoding)
    terminal = {"TERM": "xterm-256color"}
    console = Console(file=stream, force_terminal=True, width=100, height=height, _environ=terminal)
    numbers: dict[str, Any] = {"mean_return": 1.0, "eps": 1.0, "gps": 1.0, "replay_ratio": 1.0, "episodes": 1}
    with ProgressDisplay(10, console, plain=plain) as display:
        display.update(steps=1, **numbers, activity=lambda: ACTIVITY)
        display._show(1e9)
    stream.flush()
    return stream.buffer.getvalue().decode(encoding)  # type: ignore[attr-defined, no-any-return]


def test_a_terminal_shows_busy_shares_and_queue_levels() -> None:
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", drawn())
    assert re.search(r"Actors +━{6} +50%  DCQ +━{6} +1/2", text)
    assert re.search(r"Learner +━{12} +100%  buffer +━{12} +40/32", text)


def test_a_small_terminal_shows_the_progress_only() -> None:
    text = drawn(height=8)
    assert "Learner" not in text
    assert "1/10 steps" in text


def test_plain_lines_are_shown_on_a_terminal_that_wants_them() -> None:
    text = drawn(plain=True)
    assert "\x1b" not in text
    assert "Learner" not in text
    assert "1/10 steps" in text


def test_a_terminal_without_unicode_shows_bars() -> None:
    assert re.search(
        r"Actors +######", dashboard(ACTIVITY, Console(file=io.TextIOWrapper(io.BytesIO(), "ascii"))).plain
    )


def test_the_options_are_read() -> None:
    given = parse_options("", timesteps=1, run_dir="runs", arguments=["--trace", "t.json", "--plain"])
    assert (given.trace, given.plain) == (Path("t.json").absolute(), True)
    usual = parse_options("", timesteps=1, run_dir="runs", arguments=[])
    assert (usual.trace, usual.plain) == (None, False)
