"""What --bench does: a full replay, Actors that have started, one measurement after another."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from pearl.replay import make_replay_manager
from pearl.replay.storage import DataStorage
from pearl.replay.synthetic import fill, random_transitions
from pearl.runtime.benchmark import Benchmark
from pearl.runtime.collection import CollectionBuffer
from pearl.runtime.data_flow import OffPolicy
from pearl.runtime.data_storage import make_storage
from pearl.runtime.flow_control import FlowControl
from pearl.runtime.options import parse_options
from pearl.runtime.rate import StepRate
from pearl.runtime.replay_ratio import first_batch
from pearl.runtime.run_state import Counters
from pearl.spec import ActorSpec, ReplaySpec, TrainSpec, TransitionSpec

OBS, ACTIONS = spaces.Box(-1, 1, (3,), np.float32), spaces.Discrete(5, start=2)
TRANSITION = TransitionSpec.from_spaces(OBS, ACTIONS)
ACTORS, TRAIN = ActorSpec("CartPole-v1", envs_per_actor=6), TrainSpec(batch_size=8, replay_ratio=4.0)


def benchmark(*arguments: str, replay: ReplaySpec | None = None) -> Benchmark:
    options = parse_options(
        None, timesteps=10, run_dir="run", arguments=("--bench", "--bench-seconds", "2", *arguments)
    )
    return Benchmark.with_replay(options, replay or ReplaySpec(100), TRAIN)


# --- what is measured -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "limit", "ratios"),
    [
        ((), 0, [math.inf]),
        (("--bench-paced",), 0, [4.0]),
        (("--bench-both",), 0, [4.0, math.inf]),
        ((), 100, [4.0]),
        (("--bench-both",), 100, [4.0]),
    ],
)
def test_the_replay_ratios_to_measure_at(arguments: tuple[str, ...], limit: int, ratios: list[float]) -> None:
    bench = benchmark(*arguments, replay=ReplaySpec(100, max_times_sampled=limit))
    found = [bench.ratio]
    while bench.has_more:
        bench.keep({"ratio": bench.ratio})
        found.append(bench.ratio)
        assert bench.is_free
    assert found == ratios
    last = {"ratio": found[-1]}
    both = {"measurements": [{"ratio": ratio} for ratio in found]} if len(found) > 1 else {}
    assert bench.record(last) == last | both


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--bench-both",), "--bench-both belongs to --bench"),
        (("--bench-seconds", "3"), "--bench-seconds belongs to --bench"),
        (("--bench", "--bench-both", "--bench-paced"), "leave one of them out"),
    ],
)
def test_options_that_contradict_each_other(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse_options(None, timesteps=10, run_dir="run", arguments=arguments)
    assert message in capsys.readouterr().err


class Run:
    """The flow control of a run that trains on its own, by a clock of the test's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ratio: float = math.inf) -> None:
        self.now = 0.0
        monkeypatch.setattr("pearl.runtime.rate.time.monotonic", lambda: self.now)
        self.counters, self.rate = Counters(), StepRate()
        self.counters.filled(first_batch(TRAIN))
        flow = OffPolicy(ReplaySpec(100), ACTORS, dataclasses.replace(TRAIN, replay_ratio=ratio))
        flow.begin(self.counters)
        options: dict[str, Any] = {"batch_size": 8, "update_delay": 0, "serial": False}
        self.flow = FlowControl(self.counters, flow, DataStorage(TRANSITION, 100), self.rate, **options)

    def train(self, seconds: float, steps: int = 10) -> None:
        self.flow.granted(steps)
        self.now += seconds
        self.flow.trained(steps)


def test_a_program_without_actors_trains_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    run, bench = Run(monkeypatch), benchmark()
    bench.begin(run.flow)
    assert run.flow.iterations_to_grant() > 0


def test_training_waits_for_every_actor(monkeypatch: pytest.MonkeyPatch) -> None:
    run, bench = Run(monkeypatch), benchmark()
    bench.launched(2, run.flow)
    bench.begin(run.flow)
    assert run.flow.iterations_to_grant() == 0
    assert not run.flow.may_sample()
    bench.heard(1, run.flow)
    bench.heard(1, run.flow)
    assert run.flow.iterations_to_grant() == 0
    bench.heard(0, run.flow)
    assert run.flow.iterations_to_grant() > 0
    assert run.flow.may_sample()


def test_a_fast_actor_does_not_keep_a_slow_one_from_being_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    run, bench = Run(monkeypatch, ratio=4.0), benchmark("--bench-paced")
    bench.launched(2, run.flow)
    buffer = CollectionBuffer(TRANSITION, 64, 64)
    bench.begin(run.flow)
    run.flow.collected(1000, 1000, 0)
    run.flow.inserted()
    bench.heard(0, run.flow)
    assert run.flow.wants_data(buffer)
    bench.heard(1, run.flow)
    assert not run.flow.wants_data(buffer), "now the replay ratio holds"


def test_each_measurement_has_its_own_warm_up_and_its_full_time(monkeypatch: pytest.MonkeyPatch) -> None:
    run, bench = Run(monkeypatch), benchmark("--bench-both")
    bench.begin(run.flow)
    bench.heard(0, run.flow)
    times = []
    for _ in range(2):
        began = run.now
        while not bench.is_over(run.rate, run.flow):
            run.train(0.125)
        times.append(run.now - began)
        if bench.has_more:
            bench.keep({})
            bench.begin(run.flow)
    assert times == [3.0, 2.25]


# --- the full replay ------------------------------------------------------------------------------------------------


def test_random_transitions_are_valid() -> None:
    columns = random_transitions(TRANSITION, ACTIONS, TRAIN, 500, np.random.default_rng(0))
    assert set(np.unique(columns["action"])) == set(range(5)), "counted from 0, as the Learner does"
    assert np.all(columns["discount"] == np.float32(TRAIN.gamma))
    assert columns["obs"].std() == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize("share_next_obs", [False, True])
def test_filling_leaves_no_slot_empty(tmp_path: Path, share_next_obs: bool) -> None:
    replay = ReplaySpec(1001, share_next_obs=share_next_obs)
    manager, storage = make_replay_manager(replay, seed=0), make_storage(TRANSITION, replay, ACTORS, TRAIN, tmp_path)
    rows = fill(manager, storage, TRANSITION, ACTIONS, replay, ACTORS, TRAIN)
    assert rows == storage.size == 1001
    assert manager.statistics().filled == 1001
    assert len(np.unique(manager.retrieve(np.arange(1001)))) > 500, "priorities differ"
    assert np.abs(storage.gather(np.arange(1001))["next_obs"]).sum(axis=-1).min() > 0
    counters = Counters()
    counters.filled(max(rows, first_batch(TRAIN)))
    flow = OffPolicy(replay, ACTORS, TRAIN)
    flow.begin(counters)
    assert flow.collection_allowed()
    assert flow.batches_allowed() == 0, "the replay ratio counts what is collected from now on"


def test_filling_a_huge_replay_stops_where_no_cache_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pearl.replay.synthetic._MOST_BYTES", 50 * TRANSITION.nbytes)
    replay = ReplaySpec(1000)
    manager, storage = make_replay_manager(replay, seed=0), DataStorage(TRANSITION, 1000)
    assert fill(manager, storage, TRANSITION, ACTIONS, replay, ACTORS, TRAIN) == 50 == storage.size
