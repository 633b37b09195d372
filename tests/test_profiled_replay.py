"""The replay that is profiled is the replay that runs, with every option, and measurements are kept by all of them."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from programs import ONE_CPU, CsvPair, described

import pearl.replay
from composer.calibration import CalibrationKey, CalibrationStore
from composer.composer import Composer
from composer.measurement import Measurement
from composer.profiling import full_replay
from composer.profiling.context import ProfilingContext
from composer.profiling.full_replay import TIMELESS, FullReplay
from composer.replay_composing import ReplayComposing, profiled_problem
from pearl.backends.protocol import Factory
from pearl.errors import ReplayError
from pearl.replay import DataStorage, Linear
from pearl.replay.backing import RamBacking
from pearl.replay.synthetic import _random_actions
from pearl.runtime.data_storage import ChainedStorage
from pearl.spec import ReplaySpec

# Another value of each field. A new field needs one here, and so is tested.
OTHER: dict[str, Any] = {
    "capacity": 1000,
    "mode": "top_k",
    "fanout": 8,
    "alpha": 0.7,
    "beta": Linear(0.5, 1.0, 100),
    "beta_final": 0.9,
    "stratified": False,
    "replacement": False,
    "max_times_sampled": 100,
    "initial_priority": "mean",
    "priority_epsilon": 1e-3,
    "storage": "shared",
    "share_next_obs": True,
    "share_frames": True,
}
FIELDS = [field.name for field in dataclasses.fields(ReplaySpec)]


def composer_of(spec: ReplaySpec, files: tuple[Path, Path], **problem: Any) -> Composer:
    composer = described(files, env="Grid-v0", **problem)  # whose observations may be stacks
    said = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}
    composer.set_replay(said.pop("capacity"), **said)
    return composer


class Asked:
    """A calibration store that knows every measurement, and is asked for these keys."""

    def __init__(self, _: object = None, *, remeasure: bool = False) -> None:
        Asked.keys = defaultdict(set)

    keys: dict[str, set[CalibrationKey]]

    def get(self, key: CalibrationKey) -> dict[str, Measurement]:
        Asked.keys[key.primitive].add(key)
        names = (
            "sample",
            "insert",
            "update",
            "gather",
            "store",
            "step",
            "transition",
            "iteration",
            "paced",
            "free",
            "overall",
        )
        return {name: Measurement.modelled(9.0) for name in names}

    def has_device(self, _: str) -> bool:
        return True

    def has_actor(self, _: str) -> bool:
        return True

    def record(self, _: object) -> None:
        pass


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The keys of all measurements of a replay, by primitive, where two devices are one piece of silicon."""
    monkeypatch.setattr("composer.composer.CalibrationStore", Asked)
    monkeypatch.setattr("composer.evidence._Search.break_evens", lambda _: ())  # measures nothing, and takes long
    devices, connections = tmp_path / "devices.csv", tmp_path / "connections.csv"
    devices.write_text("name,kind,backend,cores,shares_with\ncpu0,cpu,cpu,2,\ncpu1,cpu,cpu,2,cpu0\n")
    connections.write_text("source,target,latency_us,bandwidth_gbps\ncpu0,cpu1,1,10\n")

    def of(spec: ReplaySpec) -> dict[str, set[CalibrationKey]]:
        composer_of(spec, (devices, connections)).run()
        return Asked.keys

    return of


def test_every_option_of_the_replay_is_part_of_the_keys_or_cannot_change_the_time(keys: Any) -> None:
    usual = ReplaySpec(2000)
    known = keys(usual)
    assert {"replay", "pair", "program", "messages"} <= known.keys()
    assert TIMELESS.keys() <= set(FIELDS)
    assert set(OTHER) == set(FIELDS)
    for name in FIELDS:
        changed = keys(dataclasses.replace(usual, **{name: OTHER[name]}))
        for primitive in ("replay", "pair", "program"):
            if name in TIMELESS:
                assert changed[primitive] == known[primitive], TIMELESS[name]
            else:
                assert not changed[primitive] & known[primitive], (primitive, name)


@pytest.mark.parametrize("name", FIELDS)
def test_the_profiled_replay_manager_is_made_with_every_option(
    csv_pair: CsvPair, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    spec = dataclasses.replace(ReplaySpec(2000), **{name: OTHER[name]})
    steps = ReplayComposing(composer_of(spec, csv_pair(*ONE_CPU)), CalibrationStore())
    problem = profiled_problem(steps.checked_problem())
    made: list[ReplaySpec] = []
    make = pearl.replay.make_replay_manager
    monkeypatch.setattr(
        pearl.replay, "make_replay_manager", lambda spec, **options: (made.append(spec), make(spec, **options))[1]
    )
    platform = steps.stated_platform()
    assert platform is not None
    context = ProfilingContext(platform, problem, Asked())  # type: ignore[arg-type]
    full = context.full_replay(platform.host, context.fanouts()[0])
    (found,) = made
    assert found == spec
    assert full.beta == (0.5 if name == "beta" else 0.4)
    storage = context.full_storage
    assert isinstance(storage, ChainedStorage) == spec.share_next_obs
    assert storage.size == spec.capacity
    if spec.share_next_obs:  # environments' steps follow one another, as in a run
        assert storage.breaks <= 2
        arriving, count = context.arriving(full.rng), context.problem.insertions
        before = storage.breaks
        for _ in range(5):
            storage.insert(next(arriving), count)
        assert storage.breaks <= before + 1


@pytest.mark.usefixtures("quick_profiles")
@pytest.mark.parametrize(
    "options",
    [
        {"mode": "fifo", "max_times_sampled": 1},
        {"replacement": False, "stratified": False, "max_times_sampled": 2, "initial_priority": "mean"},
        {"storage": "memmap", "max_times_sampled": 3},
        {"storage": "shared", "share_next_obs": True},
    ],
)
def test_a_replay_of_any_options_is_profiled(
    csv_pair: CsvPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    storages: list[DataStorage] = []
    monkeypatch.setattr(
        "composer.profiling.context.host_storage",
        lambda *args: (storages.append(full_replay.host_storage(*args)), storages[-1])[1],
    )
    training = {"replay_ratio": 0.25, "batch_size": 16}
    composer = composer_of(
        ReplaySpec(600, **options), csv_pair(*ONE_CPU), training=training, calibration=tmp_path / "c.json"
    )
    composer.run()
    for column in ("RM only", "RM & Learner"):
        for name, latency in composer.matrix.cell("cpu0", column).measurements():
            assert latency.n >= 10, name
    (storage,) = storages
    kind = "ram" if isinstance(storage._backing, RamBacking) else "shared" if storage._backing.shared else "memmap"
    assert kind == options.get("storage", "ram")


def test_a_replay_whose_items_are_used_up_is_kept_full() -> None:
    full = FullReplay(ReplaySpec(200, max_times_sampled=1), 16, Factory("pearl.replay", "make_replay_manager"))
    assert full.batches(32, 100) == 3
    for _ in range(6):
        full.manager.sample(32, 0.4)
    with pytest.raises(ReplayError):
        full.manager.sample(32, 0.4)
    full.renew(200)
    for _ in range(200):
        full.renew(32)
        full.manager.sample(32, 0.4)


class Corners(spaces.Box):
    """Samples in a way of its own."""

    def sample(self, mask: None = None, probability: None = None) -> np.ndarray:
        return self.high.copy()


@pytest.mark.parametrize(
    "space",
    [spaces.Box(-2.0, 2.0, (3,)), spaces.Discrete(5, start=-1), spaces.MultiDiscrete([3, 4]), spaces.MultiBinary(4)],
    ids=lambda space: type(space).__name__,
)
def test_synthetic_actions_are_those_of_the_space(space: spaces.Space[Any]) -> None:
    found = _random_actions(space, 50, seed=3)
    assert len(found) == 50
    assert all(space.contains(row if row.shape else np.int64(row)) for row in found)
    assert len(np.unique(found)) > 1
    np.testing.assert_array_equal(found, _random_actions(space, 50, seed=3))


def test_a_space_that_samples_in_its_own_way_does_so() -> None:
    assert (_random_actions(Corners(-2.0, 2.0, (3,)), 50, seed=3) == 2.0).all()
