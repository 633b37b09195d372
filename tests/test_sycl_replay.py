"""The Replay Manager and the Data Storage on SYCL devices: launches, loops that stay on the device, the emulator."""

from __future__ import annotations

import numpy as np
import pytest

from pearl.backends.cpu.replay import NativeReplayManager
from pearl.backends.sycl.replay import SyclReplayManager
from pearl.backends.sycl.selector import EMULATOR_SELECTOR
from pearl.backends.sycl.storage import SyclDataStorage
from pearl.errors import CapacityError, PriorityError, ReplayError
from pearl.replay.protocol import Sample
from pearl.replay.reference import ReferenceReplayManager
from pearl.replay.storage import DataStorage
from pearl.spec import FieldSpec, TransitionSpec

pytestmark = pytest.mark.sycl
CARTPOLE = TransitionSpec(
    (
        FieldSpec("obs", (4,), "float32"),
        FieldSpec("action", (), "int64"),
        FieldSpec("reward", (), "float32"),
        FieldSpec("done", (3,), "uint8"),
    )
)
IMAGES = TransitionSpec((FieldSpec("obs", (40, 50), "uint8"), FieldSpec("reward", (), "float32")))


def transitions(spec, count, seed=0):
    rng = np.random.default_rng(seed)
    return {f.name: (rng.random((count, *f.shape)) * 200).astype(f.dtype) for f in spec.fields}


def pair(capacity, manager=NativeReplayManager, **options):
    """A replay on the device and one to compare it with, holding the same."""
    replays = SyclReplayManager(capacity, **options), manager(capacity, **options)
    priorities = np.random.default_rng(1).exponential(1, capacity).astype(np.float32)
    for replay in replays:
        replay.insert(np.arange(capacity), priorities)
    return replays


def assert_same_state(a, b):
    left, right = a.state_dict(), b.state_dict()
    for name in left:
        np.testing.assert_array_equal(left[name], right[name], err_msg=name)
    assert a.statistics() == b.statistics()


def counted(queue, work):
    before = queue.launches
    work()
    return queue.launches - before


def test_every_operation_is_one_launch():
    replay, storage = SyclReplayManager(1000, seed=1), SyclDataStorage(CARTPOLE, 1000)
    assert replay.queue is storage.queue
    rows = transitions(CARTPOLE, 600)
    assert counted(replay.queue, lambda: storage.insert(rows)) == 1
    assert counted(replay.queue, lambda: storage.insert(rows)) == 1  # around the end
    assert counted(replay.queue, lambda: replay.insert(np.arange(1000))) == 1
    sample = replay.sample(1)
    for batch in (1, 33, 1000):
        assert counted(replay.queue, lambda batch=batch: replay.sample(batch)) == 1
        assert counted(replay.queue, lambda batch=batch: storage.gather(np.arange(batch))) == 1
    assert counted(replay.queue, lambda: replay.update([0, 0, 1], [1.0, 1e9, 2.0])) == 1  # which rescales
    assert counted(replay.queue, lambda: replay.update(sample.indices, [1.0], sample.generations)) == 1
    assert counted(replay.queue, lambda: replay.retrieve(np.arange(500))) == 1
    uniform = SyclReplayManager(10, mode="uniform")
    uniform.insert([0])
    assert counted(uniform.queue, lambda: uniform.update([0], [1.0])) == 0


@pytest.mark.parametrize("stratified", [True, False])
@pytest.mark.parametrize("fanout", [2, 16, 128])
def test_large_batches_equal_the_cpus(fanout, stratified):
    replay, native = pair(50_000, fanout=fanout, stratified=stratified, seed=7)
    rng = np.random.default_rng(0)
    for batch in (17, 4096, 16_384):
        sample, expected = replay.sample(batch, 0.7), native.sample(batch, 0.7)
        for found, wanted in zip(sample, expected, strict=True):
            np.testing.assert_array_equal(found, wanted)
        priorities = rng.exponential(100, batch).astype(np.float32)
        assert replay.update(sample.indices, priorities, sample.generations) == batch
        native.update(*expected[:1], priorities, expected.generations)
        order = rng.permutation(50_000)[:batch] // 2  # some twice
        for each in (replay, native):
            each.insert(order, priorities if batch > 17 else None)
        assert_same_state(replay, native)


def test_generations_start_over_after_four_billion_items():
    replay, reference = pair(20, ReferenceReplayManager)
    state = reference.state_dict() | {"inserts": 2**32 - 5}
    for each in (replay, reference):
        each.load_state_dict(state)
        each.insert([3, 4, 3, 5, 6, 7, 7, 8])
        each.insert(np.arange(9, 15))
        each.sample(8)
    assert_same_state(replay, reference)


def test_times_sampled_stop_counting():
    replay, reference = pair(1, ReferenceReplayManager)
    for each in (replay, reference):
        for _ in range(5):
            each.sample(16_384)
    assert_same_state(replay, reference)
    assert replay.state_dict()["times_sampled"] == [65_535]


def test_more_than_the_memory_is_refused_with_numbers():
    with pytest.raises(CapacityError, match=r"68,719,476,736 slots needs 1\.4 TB; .* free on opencl:cpu"):
        SyclReplayManager(2**36)
    with pytest.raises(CapacityError, match=r"free\. Lower `size`"):
        SyclDataStorage(IMAGES, 10**12)


def test_gathered_rows_stay_the_callers():
    storage = SyclDataStorage(CARTPOLE, 100)
    rows = transitions(CARTPOLE, 100)
    storage.insert(rows)
    batches = [storage.gather(np.arange(first, first + 8)) for first in range(0, 80, 8)]
    for first, batch in enumerate(batches):
        for name, column in rows.items():
            np.testing.assert_array_equal(batch[name], column[8 * first : 8 * first + 8])
    reward = batches[0]["reward"]
    del batches, batch
    storage.close()
    np.testing.assert_array_equal(reward, rows["reward"][:8])


def test_the_columns_are_the_cpus():
    storage, other = SyclDataStorage(IMAGES, 30), DataStorage(IMAGES, 30)
    for seed in range(3):
        for each in (storage, other):
            each.insert(transitions(IMAGES, 20, seed))
    for name, column in other.columns.items():
        np.testing.assert_array_equal(storage.columns[name], column)
        assert not storage.columns[name].flags.writeable


@pytest.mark.parametrize(("spec", "launches"), [(CARTPOLE, 2), (IMAGES, 3)], ids=["small", "large"])
def test_an_iteration_stays_on_the_device(spec, launches):
    replay, native = pair(500, seed=5)
    storage, rows = SyclDataStorage(spec, 500), transitions(spec, 500)
    storage.insert(rows)
    priorities = replay.queue.shared_floats(40)
    for i in range(4):
        priorities[:] = np.linspace(0, 10**i, 40)

        def iteration():
            replay.kernel.prepare_iteration(40, 0.6)
            replay.kernel.launch_draw(storage.kernel)
            replay.kernel.launch_update(priorities)

        assert counted(replay.queue, iteration) == launches
        sample, expected = Sample(*replay.kernel.read_batch()), native.sample(40, 0.6)
        native.update(expected.indices, np.array(priorities), expected.generations)
        for found, wanted in zip(sample, expected, strict=True):
            np.testing.assert_array_equal(found, wanted)
        for column, name in zip(storage.kernel.read_batch(40), rows, strict=True):
            assert len(column) == 48
            np.testing.assert_array_equal(column[:40], rows[name][sample.indices])
            assert not column[40:].any()
    replay.kernel.check()
    assert_same_state(replay, native)


def test_an_update_that_is_refused_on_the_device_is_told_of_later():
    replay, native = pair(50)
    with pytest.raises(ReplayError, match="call prepare_iteration first"):
        replay.kernel.launch_update(replay.queue.shared_floats(8))
    replay.kernel.prepare_iteration(8, 0.4)
    replay.kernel.launch_draw()
    native.sample(8, 0.4)
    wrong = replay.queue.shared_floats(8)
    wrong[:] = [1, 2, 3, 1e9, np.nan, 4, -1, 5]
    replay.kernel.launch_update(wrong)
    with pytest.raises(PriorityError, match="at position 4 of a batch on the device"):
        replay.kernel.check()
    replay.kernel.check()
    assert_same_state(replay, native)


@pytest.mark.fpga
def test_rows_follow_a_draw_on_the_same_queue_alone():
    replay, storage = SyclReplayManager(10), SyclDataStorage(CARTPOLE, 10, EMULATOR_SELECTOR)
    replay.insert([0])
    replay.kernel.prepare_iteration(8, 0.4)
    with pytest.raises(ReplayError, match="must share a queue"):
        replay.kernel.launch_draw(storage.kernel)


@pytest.mark.fpga
@pytest.mark.parametrize("mode", ["prioritized", "uniform"])
def test_the_same_kernels_run_on_the_emulator(mode):
    replay = SyclReplayManager(40, mode=mode, seed=2, device=EMULATOR_SELECTOR)
    reference = ReferenceReplayManager(40, mode=mode, seed=2)
    storage = SyclDataStorage(CARTPOLE, 40, EMULATOR_SELECTOR)
    rows = transitions(CARTPOLE, 30)
    storage.insert(rows)
    for each in (replay, reference):
        each.insert(np.arange(30), np.linspace(0, 3, 30))
    for i in range(3):
        sample, expected = replay.sample(8), reference.sample(8)
        for found, wanted in zip(sample, expected, strict=True):
            np.testing.assert_array_equal(found, wanted)
        for name, column in storage.gather(sample.indices).items():
            np.testing.assert_array_equal(column, rows[name][sample.indices])
        for each in (replay, reference):
            each.update(sample.indices, np.linspace(0, 10 ** (3 * i), 8), sample.generations)
    np.testing.assert_array_equal(replay.retrieve(np.arange(40)), reference.retrieve(np.arange(40)))
    assert_same_state(replay, reference)
