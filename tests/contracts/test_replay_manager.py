"""The Replay Manager's contract, for every backend alike; the NumPy reference is what the others are compared with."""

from __future__ import annotations

import re
import threading
from dataclasses import asdict
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from references import CUDA

from pearl.backends.cpu.replay import NativeReplayManager
from pearl.backends.cuda.replay import CudaReplayManager
from pearl.backends.sycl.replay import SyclReplayManager
from pearl.errors import (
    CheckpointError,
    ConfigurationError,
    PriorityError,
    ReplayError,
)
from pearl.replay import make_replay_manager, replay_managers
from pearl.replay.protocol import Sample
from pearl.replay.reference import ReferenceReplayManager
from pearl.spec import ReplayMode, ReplaySpec


class EmulatedCuda(CudaReplayManager):
    """CUDA's kernels on the emulator, if nothing else is asked for."""

    def __init__(self, capacity, *, device=CUDA, **options):
        super().__init__(capacity, device=device, **options)


MANAGERS = {
    "native": NativeReplayManager,
    "reference": ReferenceReplayManager,
    "sycl": SyclReplayManager,
    "cuda": EmulatedCuda,
}
ON_DEVICE = (SyclReplayManager, EmulatedCuda)
# Each shape of an FPGA's tree is a program of its own: tests/test_fpga_replay.py holds the emulator to a few.
ELSEWHERE = {"fpga"}
DEVICE_MODES = ("prioritized", "uniform")


def require(manager, mode):
    """Skip the test where the manager does not have the mode."""
    if manager in ON_DEVICE and mode not in DEVICE_MODES:
        pytest.skip(f"mode {mode} is the CPU's")


each_backend = [
    pytest.param(name, marks=pytest.mark.sycl if name == "sycl" else ())
    for name in replay_managers()
    if name not in ELSEWHERE
]


@pytest.fixture(params=each_backend)
def manager(request):
    return MANAGERS[request.param]


def test_every_backend_is_held_to_the_contract():
    assert set(replay_managers()) == set(MANAGERS) | ELSEWHERE


def filled(manager, capacity=100, **options):
    replay = manager(capacity, **options)
    replay.insert(np.arange(capacity), np.linspace(0.1, 2.0, capacity, dtype=np.float32))
    return replay


def assert_same(a, b):
    assert all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def assert_same_state(a, b, *, last_batch=True):
    left, right = a.state_dict(), b.state_dict()
    assert left.keys() == right.keys()
    for name in left:
        if name != "fanout":
            np.testing.assert_array_equal(left[name], right[name], err_msg=name)
    statistics = [asdict(each.statistics()) for each in (a, b)]
    for each in statistics if not last_batch else ():
        for name in ("age_mean", "age_max", "effective_sample_size"):
            del each[name]
    assert statistics[0] == statistics[1]


priorities_strategy = st.one_of(
    st.floats(0, 300, width=32),
    st.floats(0, width=32, allow_nan=False, allow_infinity=False),
    st.sampled_from([0.0, 1e-45, 1.0, 255.99998, 256.0, 3.4e38, np.inf]),
)


def operate(data, manager, modes):
    """Make up operations, and hold a manager to the reference after each."""
    capacity = data.draw(st.integers(1, 12) | st.integers(1, 3000), label="capacity")
    fanout = data.draw(st.sampled_from([2, 4, 16, 256]), label="fanout")
    mode = data.draw(st.sampled_from(["prioritized", *modes]), label="mode")
    seed = data.draw(st.integers(0, 2**64 - 1), label="seed")
    alpha = data.draw(st.floats(0, 4), label="alpha")
    inserting = data.draw(st.sampled_from(["ring", "insert"]), label="inserting")
    options = {"fanout": fanout, "mode": mode, "alpha": alpha, "seed": seed}
    options["stratified"] = data.draw(st.booleans(), label="stratified")
    if manager is NativeReplayManager:
        options["replacement"] = data.draw(st.sampled_from([True, True, False]), label="replacement")
        options["max_times_sampled"] = data.draw(st.sampled_from([0, 0, 1, 2, 5]), label="max_times_sampled")
    initials = ["max", 1e-3, 7.25, 1e6] if manager in ON_DEVICE else ["max", "mean", 1e-3, 7.25, 1e6]
    options["initial_priority"] = data.draw(st.sampled_from(initials), label="initial_priority")
    options["priority_epsilon"] = data.draw(st.sampled_from([0.0, 1e-6, 1e-30, 0.01, 1.0]), label="priority_epsilon")
    replay, reference = manager(capacity, **options), ReferenceReplayManager(capacity, **options)
    written: set[int] = set()
    last: Sample | None = None
    cursor = 0
    for _ in range(data.draw(st.integers(1, 12), label="operations")):
        operation = data.draw(st.sampled_from([inserting, inserting, "sample", "update", "alpha", "reload"]))
        if operation == "ring":
            count = data.draw(st.integers(1, min(capacity, 200)))
            slots = ((cursor + np.arange(count)) % capacity).tolist()
            cursor = (cursor + count) % capacity
            bits = np.random.default_rng(data.draw(st.integers(0, 99))).integers(0, 0x7F800001, count, np.uint32)
            values = data.draw(st.sampled_from([None, bits.view(np.float32), np.linspace(0, 9, count)]))
            for each in (replay, reference):
                each.insert(slots, values)
            written.update(slots)
        elif operation == "insert":
            slots = data.draw(st.lists(st.integers(0, capacity - 1), max_size=40))
            values = data.draw(st.none() | st.lists(priorities_strategy, min_size=len(slots), max_size=len(slots)))
            for each in (replay, reference):
                each.insert(slots, values)
            written.update(slots)
        elif operation == "sample" and written:
            batch, beta = data.draw(st.integers(1, 100)), data.draw(st.floats(0, 4))
            try:
                last = replay.sample(batch, beta)
            except ReplayError as refused:
                with pytest.raises(ReplayError, match=f"^{re.escape(str(refused))}$"):
                    reference.sample(batch, beta)
            else:
                assert_same(last, reference.sample(batch, beta))
                assert written.issuperset(last.indices.tolist())
        elif operation == "update" and last is not None:
            count = len(last.indices)
            values = data.draw(st.lists(priorities_strategy, min_size=count, max_size=count))
            generations = data.draw(st.sampled_from([None, last.generations]))
            applied = replay.update(last.indices, values, generations)
            assert applied == reference.update(last.indices, values, generations)
        elif operation == "alpha":
            exponent = data.draw(st.floats(0, 4))
            for each in (replay, reference):
                each.set_alpha(exponent)
        elif operation == "reload":
            state = replay.state_dict()
            replay.load_state_dict(reference.state_dict())
            reference.load_state_dict(state)
        assert_same_state(replay, reference)
        assert replay.total == reference.total
    slots = np.arange(capacity)
    assert_same((replay.retrieve(slots),), (reference.retrieve(slots),))


def test_written_slots_stay_written_when_the_inserts_pass_32_bits(manager):
    replay = manager(8)
    replay.load_state_dict({**replay.state_dict(), "inserts": 2**32 - 3})
    replay.insert(np.arange(5))
    assert replay.state_dict()["generations"].tolist() == [2**32 - 2, 2**32 - 1, 1, 1, 2, 0, 0, 0]
    assert replay.update(np.arange(5), np.ones(5, np.float32)) == 5
    alone = manager(8)
    alone.load_state_dict({**alone.state_dict(), "inserts": 2**32 - 1})
    alone.insert([6])
    assert alone.state_dict()["generations"][6] == 1


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_native_equals_reference_bit_for_bit(data):
    operate(data, NativeReplayManager, get_args(ReplayMode))


@pytest.mark.parametrize("manager", [pytest.param(SyclReplayManager, marks=pytest.mark.sycl), EmulatedCuda])
@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_devices_equal_reference_bit_for_bit(manager, data):
    operate(data, manager, DEVICE_MODES)


def test_fanouts_give_the_same_samples():
    batches = [filled(NativeReplayManager, fanout=fanout, seed=5).sample(64) for fanout in (2, 8, 16, 32, 64, 128, 256)]
    for batch in batches[1:]:
        assert_same(batches[0], batch)


def test_workers_share_large_batches_and_change_nothing():
    alone, shared = (filled(NativeReplayManager, 20_000, seed=5, workers=workers) for workers in (1, 3))
    for _ in range(5):
        sample = alone.sample(8_192)
        assert_same(sample, shared.sample(8_192))
        for replay in (alone, shared):
            assert replay.update(sample.indices, np.sqrt(sample.indices + 0.5), sample.generations) == 8_192
        assert_same_state(alone, shared)
    for wrong in (0, 257, 1.0, True):
        with pytest.raises(ReplayError, match=r"workers must be a whole number in \[1, 256\]"):
            NativeReplayManager(10, workers=wrong)


@pytest.mark.parametrize("threads", [1, 4])
def test_the_total_stays_the_sum_of_the_leaves(threads):
    replay = NativeReplayManager(1500, fanout=16, seed=1)
    replay.insert(np.arange(1000))

    def mix(seed):
        random = np.random.default_rng(seed)
        for i in range(200):
            sample = replay.sample(64)
            replay.update(sample.indices, random.exponential(50, 64), sample.generations)
            replay.insert(random.integers(0, 1500, 5), random.exponential(1, 5) if i % 2 else None)
            if i % 50 == 49:
                replay.set_alpha(random.uniform(0.3, 1.2))

    workers = [threading.Thread(target=mix, args=(seed,)) for seed in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    state, statistics = replay.state_dict(), replay.statistics()
    assert replay.total == state["leaves"].sum(dtype=np.uint64)
    assert np.all((state["leaves"] > 0) == (state["generations"] > 0))
    assert statistics.updates + statistics.stale == threads * 200 * 64
    assert statistics.inserts == 1000 + threads * 200 * 5


def test_zero_priority_is_never_sampled(manager):
    replay = manager(64, alpha=0.6, seed=2)
    replay.insert(np.arange(40), np.where(np.arange(40) % 2, 1.0, 0.0))
    indices = np.concatenate([replay.sample(32).indices for _ in range(50)])
    assert np.all(indices % 2 == 1)


def test_all_zero_is_uniform_over_the_written_slots(manager):
    replay = manager(64, seed=2)
    replay.insert([3, 10, 60], [0.0, 0.0, 0.0])
    sample = replay.sample(300)
    assert set(sample.indices.tolist()) == {3, 10, 60}
    assert np.all(sample.weights == 1.0)
    assert np.bincount(sample.indices).max() <= 102


def test_uniform_mode_samples_written_slots_alike(manager):
    replay = manager(1000, mode="uniform", seed=4)
    replay.insert(np.arange(500))
    sample = replay.sample(1000)
    assert np.array_equal(np.unique(sample.indices), np.arange(500))
    assert np.all(sample.weights == 1.0)
    assert replay.update(sample.indices, np.ones(1000)) == 1000
    assert replay.total == replay.filled == 500


def test_stale_updates_are_dropped_and_counted(manager):
    replay = filled(manager, 20, seed=1)
    sample = replay.sample(8)
    overwritten = sample.indices[0]
    replay.insert([overwritten], [0.5])
    stale = int((sample.indices == overwritten).sum())
    assert replay.update(sample.indices, np.full(8, 1.5, np.float32), sample.generations) == 8 - stale
    assert replay.statistics().stale == stale
    assert replay.retrieve([overwritten])[0] == 0.5


def test_of_duplicates_the_last_wins(manager):
    replay = filled(manager, 10, alpha=1.0)
    replay.update([3, 3, 3], [1.0, 2.0, 0.25])
    assert replay.retrieve([3])[0] == 0.25
    replay.insert([4, 4], [1.0, 0.5])
    assert replay.retrieve([4])[0] == 0.5
    assert replay.state_dict()["generations"][4] == 12  # the items inserted so far
    assert replay.state_dict()["leaves"][3] == 2**18


def test_new_items_get_the_running_maximum(manager):
    replay = manager(10)
    assert replay.max_priority == 1.0
    replay.insert([0])
    replay.update([0], [7.5])
    replay.update([0], [0.5])
    replay.insert([1])
    assert replay.max_priority == 7.5
    assert replay.retrieve([0, 1]).tolist() == [0.5, 7.5]


def test_a_large_priority_rescales_and_keeps_small_ones_alive(manager):
    replay = manager(4, alpha=1.0)
    replay.insert([0, 1, 2], [0.0, 1e-6, 1.0])
    before = replay.state_dict()["leaves"]
    replay.update([2], [1e6])
    after = replay.state_dict()["leaves"]
    statistics = replay.statistics()
    assert before.tolist() == [0, 1, 2**20, 0]
    assert (statistics.rescales, statistics.scale) == (1, 8)
    assert after.tolist() == [0, 1, 256_000_000, 0]
    assert replay.total == 256_000_001


HUGE = 1e9


@pytest.mark.parametrize("change", ["update", "insert"])
def test_the_scale_recovers_once_a_huge_priority_is_gone(manager, change):
    replay = filled(manager, 200, alpha=1.0)
    before = replay.state_dict()["leaves"]
    getattr(replay, change)([7], [HUGE])
    replay.update([8, 9, 10], replay.retrieve([8, 9, 10]))
    statistics = replay.statistics()
    assert (statistics.scale, statistics.rescales, statistics.recoveries) == (20 - 22, 1, 0)
    getattr(replay, change)([7], [2.0 * 8 / 100])
    statistics = replay.statistics()
    assert (statistics.scale, statistics.rescales, statistics.recoveries) == (20, 1, 1)
    expected = before.copy()
    expected[7] = round(2.0 * 8 / 100 * 2**20)
    np.testing.assert_allclose(replay.state_dict()["leaves"], expected, atol=1)  # 0.16 is no float32
    assert np.array_equal(np.delete(replay.state_dict()["leaves"], 7), np.delete(before, 7))
    assert replay.total == replay.state_dict()["leaves"].sum()
    assert replay.max_priority == HUGE  # of all that was given: what new items get


def test_the_scale_recovers_as_far_as_what_is_held_allows(manager):
    replay = filled(manager, 100, alpha=1.0)
    replay.update([3, 4, 5], [HUGE, 5000.0, np.inf])
    replay.update([3], [1.0])
    assert replay.statistics().scale == 15  # 5000 has 13 bits before the point, and leaves have 28
    assert replay.state_dict()["leaves"][4] == pytest.approx(5000 * 2**15, rel=1e-6)
    assert replay.state_dict()["leaves"][5] == 2**28 - 1
    replay.update([6], [HUGE])
    replay.update([6], [1.0])
    assert replay.statistics().recoveries == 1  # not before as many writes as there are slots
    replay.update(np.arange(10, 110) % 100 % 90 + 10, np.ones(100))
    assert (replay.statistics().scale, replay.statistics().recoveries) == (15, 2)
    replay.insert([4], [3000.0])  # above a quarter of the range: not worth a look at every slot
    replay.update(np.arange(10, 110) % 100 % 90 + 10, np.ones(100))
    assert (replay.statistics().scale, replay.statistics().recoveries) == (15, 2)
    replay.insert([4], [1.0])
    assert (replay.statistics().scale, replay.statistics().recoveries) == (20, 3)


def test_alternating_priorities_do_not_requantise_all_slots_each_time(manager):
    replay = filled(manager, 50, alpha=1.0)
    for _ in range(100):
        replay.update([0], [HUGE])
        replay.update([0], [1.0])
    assert 2 <= replay.statistics().recoveries <= 1 + 200 // 50
    assert replay.statistics().rescales <= 1 + replay.statistics().recoveries
    replay = filled(manager, 50, alpha=1.0)
    for _ in range(100):  # a range that doubles and halves stays
        replay.update(np.arange(50), np.full(50, 400.0))
        replay.update(np.arange(50), np.full(50, 200.0))
    assert (replay.statistics().rescales, replay.statistics().recoveries) == (1, 0)


def test_a_saved_state_recovers_its_scale_at_the_same_write(manager):
    replay = filled(manager, 50, alpha=1.0)
    for _ in range(2):
        replay.update([0], [HUGE])
        replay.update([0], [1.0])
    twin = manager(50, alpha=1.0)
    twin.load_state_dict(replay.state_dict())
    recovered = []
    for write in range(60):
        for each in (replay, twin):
            each.update([1], [1.5])
        assert_same_state(replay, twin)
        recovered += [write] if replay.statistics().recoveries == 2 else []
    assert recovered[0] > 10


def test_an_item_of_zero_error_is_sampled_again(manager):
    replay = manager(4, alpha=0.6, priority_epsilon=1e-6)
    replay.insert([0, 1, 2])
    replay.insert([3], [0.0])
    replay.update([0, 1, 2], [0.0, -0.0, 0.0])
    assert replay.retrieve(np.arange(4)).tolist() == [float(np.float32(1e-6))] * 4
    assert set(replay.sample(100).indices.tolist()) == {0, 1, 2, 3}
    assert replay.state_dict()["leaves"].min() == round(1e-6**0.6 * 2**20)
    never = manager(4, alpha=0.6)
    never.insert([0, 1, 2])
    never.update([1, 2], [0.0, 1e-9])
    assert set(never.sample(100).indices.tolist()) == {0}


def test_epsilon_is_added_to_what_is_given_and_to_nothing_else(manager):
    replay = manager(8, priority_epsilon=0.01)
    given = np.array([0.0, 1e-45, 1e-30, 0.02, 1.0, 3e38, np.inf, 7.0], np.float32)
    replay.update([], [])
    replay.insert(np.arange(8), given)
    assert np.array_equal(replay.retrieve(np.arange(8)), given + np.float32(0.01))
    assert replay.max_priority == given[5]
    assert replay.statistics().saturated == 1
    replay.update(np.arange(8), given[::-1])
    assert np.array_equal(replay.retrieve(np.arange(8)), (given + np.float32(0.01))[::-1])
    before = replay.state_dict()
    for wrong in ([-1e-3, 1.0], [np.nan, 1.0]):  # also where epsilon would make it positive
        with pytest.raises(PriorityError, match="at position 0"):
            replay.update([0, 1], wrong)
    replay.load_state_dict(before)
    assert np.array_equal(replay.retrieve(np.arange(8)), before["priorities"])
    fresh = manager(2, priority_epsilon=0.5)
    fresh.insert([0])
    assert fresh.retrieve([0])[0] == 1.0


@pytest.mark.parametrize("backend", each_backend)
def test_by_default_no_item_that_was_trained_on_is_lost(backend):
    where = {"device": CUDA} if backend == "cuda" else {}
    replay = make_replay_manager(ReplaySpec(100, alpha=1.0), seed=0, backend=backend, **where)
    replay.insert(np.arange(100))
    replay.update(np.arange(100), np.zeros(100))
    assert replay.total == 100  # a unit each
    replay = make_replay_manager(ReplaySpec(100, priority_epsilon=0.0), seed=0, backend=backend, **where)
    replay.insert(np.arange(100))
    replay.update(np.arange(100), np.zeros(100))
    assert replay.total == 0


def test_slots_that_are_written_between_draws_are_drawn(manager):
    replay = manager(16, mode="uniform", seed=1)
    replay.insert([0, 1, 10, 11])  # with a gap: devices keep a list of written slots
    assert set(replay.sample(100).indices.tolist()) == {0, 1, 10, 11}
    replay.insert([4, 5, 6])
    assert set(replay.sample(200).indices.tolist()) == {0, 1, 4, 5, 6, 10, 11}


def test_the_order_in_a_batch_does_not_matter(manager):
    values = np.array([1.0, 1e9, 3.0, 1e5], np.float32)
    forward, backward = manager(4), manager(4)
    forward.insert(np.arange(4), values)
    backward.insert(np.arange(4)[::-1], values[::-1])
    assert np.array_equal(forward.state_dict()["leaves"], backward.state_dict()["leaves"])
    assert forward.statistics() == backward.statistics()
    assert_same(forward.sample(8)[:2], backward.sample(8)[:2])


def test_infinity_saturates_and_is_counted(manager):
    replay = manager(4)
    replay.insert([0, 1], [np.inf, 1.0])
    assert replay.statistics().saturated == 1
    assert replay.max_priority == 1.0
    assert replay.state_dict()["leaves"][0] == 2**28 - 1
    assert replay.retrieve([0])[0] == np.inf


@pytest.mark.parametrize("change", ["rescale", "alpha"])
def test_infinity_stays_the_largest(manager, change):
    replay = manager(4, alpha=1.0)
    replay.insert([0, 1, 2], [np.inf, 1.0, 0.0])
    if change == "rescale":
        replay.update([1], [1e9])
        assert replay.statistics().rescales == 1
    else:
        replay.set_alpha(0.5)
    leaves = replay.state_dict()["leaves"]
    assert leaves[0] == 2**28 - 1 >= leaves[1] > leaves[2] == 0


@pytest.mark.parametrize("method", ["insert", "update"])
def test_nan_and_negative_priorities_change_nothing(manager, method):
    replay = filled(manager, 10)
    before = replay.state_dict()
    with pytest.raises(PriorityError, match=r"found 2 that are not, at position 1, 3\."):
        getattr(replay, method)([1, 2, 3, 4], [1e9, np.nan, 1.0, -0.5])
    for name, value in replay.state_dict().items():
        np.testing.assert_array_equal(value, before[name])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda r: r.insert([0, 10]), r"position 1 must lie in \[0, 10\); found 10"),
        (lambda r: r.update([-1], [1.0]), r"position 0 must lie in \[0, 10\); found -1"),
        (lambda r: r.retrieve([11]), "found 11"),
        (lambda r: r.update([0, 9], [1.0, 1.0]), "Index 9 at position 1 was never inserted"),
        (lambda r: r.sample(0), "batch_size must be at least 1; found 0"),
        (lambda r: r.sample(-3), "batch_size must be at least 1; found -3"),
        (lambda r: r.sample(4, beta=-1.0), r"beta must lie in \[0, 4\]"),
        (lambda r: r.set_alpha(float("nan")), r"alpha must lie in \[0, 4\]"),
        (lambda r: r.insert([0.5]), "whole numbers"),
        (lambda r: r.insert([[0]]), "vector"),
        (lambda r: r.insert(np.array([2**63], np.uint64)), "fit int64"),
        (lambda r: r.update([0, 1], [1.0]), r"priorities must .*2.*found 1"),
        (lambda r: r.update(np.arange(2), np.ones(1, np.float32)), r"priorities must .*2.*found 1"),
        (lambda r: r.update(np.arange(4), np.ones((4, 1), np.float32)), r"priorities must be a vector.*shape \(4, 1\)"),
        (lambda r: r.update([0, 1], [[1.0], [1.0]]), r"priorities must be a vector; found shape \(2, 1\)"),
        (lambda r: r.insert(np.arange(4), np.ones((1, 4), np.float32)), r"priorities must be a vector.*shape \(1, 4\)"),
        (lambda r: r.update([0], ["x"]), "real numbers"),
        (lambda r: r.update([0], [1.0], [-1]), "fit uint32"),
    ],
)
def test_wrong_arguments_say_what_was_expected(manager, call, message):
    replay = manager(10)
    replay.insert(np.arange(5))
    with pytest.raises(ReplayError, match=message):
        call(replay)


def test_lossless_conversions_are_made(manager):
    replay = manager(10)
    replay.insert(np.arange(10, dtype=np.int32)[::2], np.arange(5))
    assert replay.update(range(0, 4, 2), [1, 2.5], np.array([1, 2])) == 2
    assert replay.retrieve(np.arange(10, dtype=np.uint8)[::2]).tolist() == [1.0, 2.5, 2.0, 3.0, 4.0]
    replay.insert([], [])
    assert replay.update([], []) == 0


@pytest.mark.parametrize(
    ("capacity", "options", "message"),
    [
        (0, {}, "capacity must lie in"),
        (2**36 + 1, {}, "capacity must lie in"),
        (10, {"fanout": 12}, "power of two from 2 to 256; found 12"),
        (10, {"alpha": float("nan")}, "alpha must lie in"),
        (10, {"mode": "random"}, "mode must be one of prioritized, uniform, fifo, lifo, top_k; found 'random'"),
        (10, {"max_times_sampled": -1}, "max_times_sampled must be a whole number .*found -1"),
        (10, {"max_times_sampled": 1.5}, "max_times_sampled must be a whole number .*found 1.5"),
        (10, {"max_times_sampled": 2**16}, "max_times_sampled must be a whole number"),
        (10, {"initial_priority": "most"}, "initial_priority must .*found 'most'"),
        (10, {"initial_priority": 0.0}, "initial_priority must .*found 0.0"),
        (10, {"initial_priority": float("nan")}, "initial_priority must .*found nan"),
        (10, {"priority_epsilon": -1e-6}, r"priority_epsilon must be 0, or a number in \[1e-30, 1\]; found -1e-06"),
        (10, {"priority_epsilon": 1.5}, "priority_epsilon must be .*found 1.5"),
        (10, {"priority_epsilon": 1e-40}, "priority_epsilon must be .*found 1e-40"),
        (10, {"priority_epsilon": float("nan")}, "priority_epsilon must be .*found nan"),
    ],
)
def test_a_replay_that_cannot_be_is_refused(manager, capacity, options, message):
    with pytest.raises(ReplayError, match=message):
        manager(capacity, **options)


def test_an_empty_replay_cannot_be_sampled(manager):
    with pytest.raises(ReplayError, match="empty"):
        manager(10).sample(1)


def test_closed_means_closed(manager):
    replay = filled(manager)
    replay.close()
    replay.close()
    state = filled(manager).state_dict()
    for call in (
        lambda: replay.sample(1),
        lambda: replay.insert([0]),
        lambda: replay.update([0], [1.0]),
        lambda: replay.retrieve([0]),
        lambda: replay.set_alpha(0.5),
        lambda: replay.load_state_dict(state),
        lambda: (replay.total, replay.filled, replay.alpha, replay.max_priority),
        replay.statistics,
        replay.state_dict,
    ):
        with pytest.raises(ReplayError, match="closed"):
            call()


@pytest.mark.parametrize("mode", get_args(ReplayMode))
def test_one_slot_is_enough(manager, mode):
    require(manager, mode)
    replay = manager(1, mode=mode)
    with pytest.raises(ReplayError, match="empty"):
        replay.sample(1)
    replay.insert([0], [3.0])
    replay.insert([0], [2.0])
    sample = replay.sample(1)
    assert (sample.indices[0], sample.weights[0], sample.generations[0]) == (0, 1.0, 2)
    assert replay.update([0], [0.0]) == 1
    assert replay.sample(1).indices[0] == 0
    assert replay.filled == 1


def test_strided_and_reversed_arrays_are_read_as_they_look(manager):
    replay = manager(8, alpha=1.0)
    wide = np.arange(16, dtype=np.float32).reshape(8, 2)
    replay.insert(np.arange(8)[::-1], wide[:, 1])
    assert replay.retrieve(np.arange(8)[::2]).tolist() == [15.0, 11.0, 7.0, 3.0]
    replay.update(np.arange(8)[::4], wide[::4, 0], np.arange(8, 0, -1, dtype=np.uint32)[::4])
    assert replay.retrieve(np.arange(8)[::4]).tolist() == [0.0, 8.0]


def test_out_is_filled(manager):
    replay, twin = filled(manager, seed=9), filled(manager, seed=9)
    out = Sample(np.zeros(16, np.int64), np.zeros(16, np.float32), np.zeros(16, np.uint32))
    assert replay.sample(16, out=out) is out
    assert_same(out, twin.sample(16))


def test_out_must_fit(manager):
    replay, twin = filled(manager), filled(manager)
    out = Sample(np.zeros(16, np.int32), np.zeros(16, np.float32), np.zeros(16, np.uint32))
    with pytest.raises(ReplayError, match=r"out.indices must be contiguous, writeable int64 of shape \(16,\)"):
        replay.sample(16, out=out)
    out = Sample(np.zeros(16, np.int64), np.zeros(16, np.float32), np.zeros(16, np.uint32))
    out.generations.flags.writeable = False
    with pytest.raises(ReplayError, match=r"out\.generations must be contiguous, writeable uint32"):
        replay.sample(16, out=out)
    assert_same_state(replay, twin)


@pytest.mark.parametrize("mode", ["prioritized", "uniform", "top_k", "fifo", "lifo"])
def test_a_saved_state_goes_on_with_identical_samples(manager, mode):
    require(manager, mode)
    replay = filled(manager, 100, mode=mode, seed=3)
    replay.sample(10)
    other = manager(100, mode=mode, fanout=4, seed=77)
    other.load_state_dict(replay.state_dict())
    assert_same_state(replay, other, last_batch=False)
    for _ in range(5):
        sample = replay.sample(20)
        assert_same(sample, other.sample(20))
        for each in (replay, other):
            each.update(sample.indices, np.arange(20), sample.generations)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"order": np.arange(9)}, "order is damaged"),
        ({"order": np.zeros(10, np.int64)}, "order is damaged"),
        ({"order": np.zeros((2, 5), np.int64)}, "order must be int64 of shape"),
        ({"times_sampled": np.eye(1, 11, dtype=np.uint16)[0]}, "times_sampled are damaged"),  # slot 0 was never written
    ],
)
def test_an_order_that_does_not_fit_is_refused(manager, change, message):
    require(manager, "fifo")
    replay = manager(11, mode="fifo", max_times_sampled=2)
    replay.insert(np.arange(1, 11))
    with pytest.raises(CheckpointError, match=message):
        replay.load_state_dict({**replay.state_dict(), **change})
    assert replay.sample(3).indices.tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"capacity": 7}, "capacity must be 10; found 7"),
        ({"mode": "uniform"}, "mode must be 'prioritized'; found 'uniform'"),
        ({"format": 99}, "format must be 4; found 99"),
        ({"leaves": np.zeros(9, np.uint32)}, r"leaves must be uint32 of shape \(10,\)"),
        ({"leaves": np.full(10, 2**31, np.uint32)}, "leaves are damaged"),
        ({"generations": np.zeros(10, np.uint32)}, "leaves are damaged"),
        ({"priorities": np.full(10, np.nan, np.float32)}, "priorities are damaged"),
        ({"alpha": -1.0}, "alpha"),
        ({"max_times_sampled": 3}, "max_times_sampled must be 0; found 3"),
        ({"times_sampled": np.zeros(10, np.uint32)}, r"times_sampled must be uint16 of shape \(10,\)"),
        ({"generations": np.zeros(10, np.int64)}, r"generations must be uint32 of shape \(10,\)"),
        ({"order": np.zeros(1, np.int64)}, r"order must be int64 of shape \(0,\)"),
        ({"seed": -1}, "seed must be a whole number"),
        ({"call": "x"}, "'x' where a number was expected"),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(manager, change, message):
    replay = filled(manager, 10)
    twin = filled(manager, 10)
    with pytest.raises(CheckpointError, match=message):
        replay.load_state_dict({**replay.state_dict(), **change})
    assert_same_state(replay, twin)


def test_a_state_that_lacks_something_is_refused(manager):
    state = filled(manager, 10).state_dict()
    del state["scale"]
    with pytest.raises(CheckpointError, match="lacks scale"):
        manager(10).load_state_dict(state)


def test_alpha_requantises_from_exact_priorities(manager):
    replay = filled(manager, 50, alpha=0.6)
    before = replay.state_dict()["leaves"]
    replay.set_alpha(0.9)
    assert not np.array_equal(replay.state_dict()["leaves"], before)
    replay.set_alpha(0.6)
    assert np.array_equal(replay.state_dict()["leaves"], before)


def test_backends_come_from_the_registry():
    spec = ReplaySpec(32, fanout="auto")
    for backend in sorted(set(replay_managers()) - {"cuda", "fpga", "sycl"}):
        assert make_replay_manager(spec, seed=0, backend=backend).fanout == 16
        with pytest.raises(ConfigurationError, match=rf"'{backend}' runs on the CPU and takes no device; found 'gpu'"):
            make_replay_manager(spec, seed=0, backend=backend, device="gpu")
    for backend in sorted(set(replay_managers()) - {"native"}):
        with pytest.raises(ConfigurationError, match=rf"'{backend}' shares no .*: workers must be 1; found 2\. Leave"):
            make_replay_manager(spec, seed=0, backend=backend, workers=2)
    with pytest.raises(ConfigurationError, match=r"'abacus'.*known: cuda, fpga, native, reference, sycl"):
        make_replay_manager(spec, seed=0, backend="abacus")


@pytest.mark.parametrize(
    ("backend", "lacking"),
    [
        pytest.param("sycl", {"mode": "fifo"}, marks=pytest.mark.sycl),
        ("cuda", {"mode": "lifo"}),
        ("fpga", {"mode": "uniform"}),
    ],
    ids=["sycl", "cuda", "fpga"],
)
def test_what_a_device_does_not_have_is_named(backend, lacking):
    for options, named in (
        (lacking, rf"does not have mode='{lacking['mode']}'\. The CPU's has: backend=\"native\""),
        ({"mode": "top_k", "replacement": False}, r"mode='top_k', replacement=False\."),
        ({"max_times_sampled": 3}, r"max_times_sampled=3\."),
        ({"initial_priority": "mean"}, r'initial_priority="mean"\.'),
    ):
        with pytest.raises(ConfigurationError, match=named):
            make_replay_manager(ReplaySpec(10, **options), seed=0, backend=backend)


@pytest.mark.parametrize("other", [NativeReplayManager, ReferenceReplayManager])
def test_checkpoints_go_from_one_backend_to_another(manager, other):
    replay, twin = manager(300, seed=3), other(300, seed=3)
    for each in (replay, twin):
        each.insert(np.arange(300), np.random.default_rng(1).exponential(1, 300).astype(np.float32))
        each.sample(64)
    moved, back = other(300, fanout=4), manager(300, fanout=64)
    moved.load_state_dict(replay.state_dict())
    back.load_state_dict(twin.state_dict())
    for _ in range(3):
        first, *others = [each.sample(50) for each in (replay, moved, back)]
        for sample in others:
            assert_same(sample, first)
        for each in (replay, moved, back):
            each.update(first.indices, np.arange(50), first.generations)


def test_total_is_in_units_of_the_scale(manager):
    replay = manager(4, alpha=1.0)
    assert replay.scale == replay.statistics().scale == 20
    replay.insert([0, 1], [2.0, 1e6])
    assert replay.scale == replay.statistics().scale < 20
    assert replay.total * 2.0**-replay.scale == pytest.approx(1e6 + 2, rel=1e-5)
