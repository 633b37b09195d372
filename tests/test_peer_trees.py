"""What other libraries test of their replay trees and samplers, and what their users found broken, asserted of ours.

The behaviours are those that the tests of Tianshou (segment tree, prioritized buffer), cpprb (segment tree, buffers)
and TorchRL (segment trees, prioritized sampler, sampling without replacement, slices, storages) check, and those whose
absence was reported in public trackers; each of the latter is named where it is tested.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from pearl.backends.cpu.replay import NativeReplayManager
from pearl.errors import ReplayError
from pearl.replay.reference import ReferenceReplayManager
from pearl.replay.sequences import gather_slices, gather_stacks, n_step_returns
from pearl.replay.storage import DataStorage
from pearl.spec import FieldSpec, TransitionSpec

UNIT = 2.0**-20  # of a priority at alpha 1 and the first scale
SIZES = [1, 2, 3, 5, 8, 10, 16, 17, 100, 4096, 5000]  # powers of two, and not


@pytest.fixture(params=[NativeReplayManager, ReferenceReplayManager], ids=["native", "reference"])
def manager(request):
    return request.param


def leaves_of(replay):
    return replay.state_dict()["leaves"]


# --- The tree -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("fanout", [2, 16])
def test_the_total_is_that_of_a_plain_array_after_each_write(manager, size, fanout):
    random = np.random.default_rng(size)
    replay, plain = manager(size, alpha=1.0, fanout=fanout), np.zeros(size, np.int64)
    assert replay.total == 0
    for batch in itertools.chain([1] * 50, [min(size, 64)] * 50):
        slots = random.integers(0, size, batch)  # with repetitions
        units = random.integers(0, 2**20, batch)
        replay.insert(slots, units * UNIT)
        for slot, unit in zip(slots, units, strict=True):
            plain[slot] = unit
        assert replay.total == plain.sum()
    assert np.array_equal(leaves_of(replay), plain)
    assert np.array_equal(replay.retrieve(np.arange(size)), (plain * UNIT).astype(np.float32))


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 8, 9, 10, 16, 17])
def test_each_target_finds_the_leaf_that_holds_it(size):
    # A tree over a number of leaves that is no power of two once mapped targets to other leaves (CleanRL 546); a target
    # equal to a prefix sum once went to the leaf before (Howuhh/prioritized_experience_replay 3), or to an empty one.
    for fanout in (2, 4, 16, 256):
        for seed in range(5):
            units = np.random.default_rng(seed).integers(0, 4, size)
            units[seed % size] += 1
            replay = NativeReplayManager(size, alpha=1.0, fanout=fanout)
            replay.insert(np.arange(size), units * UNIT)
            targets = np.arange(units.sum())
            expected = np.repeat(np.arange(size), units)
            assert np.array_equal(replay._tree.find(targets.astype(np.uint64)), expected)


def test_a_target_beyond_the_last_leaf_is_refused():
    replay = NativeReplayManager(10, alpha=1.0)
    replay.insert(np.arange(3), [0.125, 0.0, 0.125])
    total = replay.total
    assert replay._tree.find(np.array([0, total // 2 - 1, total // 2, total - 1], np.uint64)).tolist() == [0, 0, 2, 2]
    with pytest.raises(ReplayError, match="Target at position 1 must lie below the total"):
        replay._tree.find(np.array([0, total], np.uint64))


@pytest.mark.parametrize("order", ["at once", "one by one", "backwards", "in threes"])
def test_how_items_are_written_does_not_matter(manager, order):
    size = 50
    priorities = np.random.default_rng(1).random(size)
    groups = {
        "at once": [np.arange(size)],
        "one by one": np.arange(size).reshape(-1, 1),
        "backwards": [np.arange(size)[::-1]],
        "in threes": np.array_split(np.random.default_rng(2).permutation(size), 17),
    }
    replay, other = manager(size, seed=4), manager(size, seed=4)
    other.insert(np.arange(size), priorities)
    for slots in groups[order]:
        replay.insert(slots, priorities[slots])
    assert replay.total == other.total
    assert np.array_equal(replay.sample(200).indices, other.sample(200).indices)


def test_one_unit_counts_beside_sums_that_float32_rounds(manager):
    size = 200
    replay = manager(size, alpha=1.0)
    replay.insert(np.arange(size), np.full(size, 2.0**26 * UNIT))
    assert replay.total == size * 2**26  # 2**33.6: a float32 sum would move in steps of 1,024
    replay.update([7], [UNIT])
    assert replay.total == (size - 1) * 2**26 + 1
    replay.update([7], [2 * UNIT])
    assert replay.total == (size - 1) * 2**26 + 2


def test_updates_there_and_back_leave_no_trace(manager):
    # Trees that add differences drift with each of these.
    random = np.random.default_rng(0)
    replay = manager(300, alpha=0.6)
    before = random.random(300).astype(np.float32)
    replay.insert(np.arange(300), before)
    total = replay.total
    for _ in range(50):
        slots = random.permutation(300)[:64]
        replay.update(slots, random.random(64) * 200)
        replay.update(slots, before[slots])
        assert replay.total == total


# --- Which items are drawn ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
def test_of_equal_items_a_stratified_batch_of_all_has_each_once(manager, size):
    # The last item once was never drawn (OpenAI Baselines 171, Stable Baselines 941), a full buffer of a power of two
    # could not be sampled (Ray 7180).
    replay = manager(size)
    replay.insert(np.arange(size))
    assert replay.sample(size).indices.tolist() == list(range(size))


@pytest.mark.parametrize("filled", [1, 2, 3, 5, 10])
@pytest.mark.parametrize("stratified", [True, False])
def test_each_item_is_drawn_while_the_buffer_fills(manager, filled, stratified):
    replay = manager(10, stratified=stratified, seed=filled)
    for slot in range(filled):
        replay.insert([slot])
    assert set(replay.sample(400).indices.tolist()) == set(range(filled))  # missed by chance: 10 * 0.9**400 = 5e-18


def test_nothing_beyond_the_filled_slots_is_drawn(manager):
    # TorchRL 2230: with 100 of 500 slots filled, rounding led to slot 100 and beyond.
    random = np.random.default_rng(0)
    replay = manager(500, stratified=False)
    replay.insert(np.arange(100), random.random(100))
    for _ in range(20):
        replay.update(np.arange(100), random.random(100) + 1e-8)
        assert replay.sample(5000).indices.max() < 100


@pytest.mark.parametrize("where", ["first", "last", "all but one", "every other"])
def test_items_of_zero_priority_are_not_drawn_and_spoil_no_weight(manager, where):
    # Where one is drawn all the same, its weight is infinite, and those of the others vanish beside it
    # (ReinforcementLearningCore.jl 83, Flashbax 58).
    zero = {
        "first": np.arange(40) < 20,
        "last": np.arange(40) >= 20,
        "all but one": np.arange(40) != 11,
        "every other": np.arange(40) % 2 == 0,
    }[where]
    replay = manager(64, alpha=0.6)
    replay.insert(np.arange(40), np.where(zero, 0.0, 0.5))
    for _ in range(10):
        batch = replay.sample(1000, beta=1.0)
        assert not zero[batch.indices].any()
        assert np.all(batch.weights == 1.0)


def test_an_item_of_overwhelming_priority_is_what_is_drawn(manager):
    replay = manager(5, alpha=0.7)
    replay.insert(np.arange(5), np.full(5, 0.05))
    replay.update([3], [1e8])
    assert set(replay.sample(100).indices.tolist()) == {3}


def test_alpha_of_zero_draws_alike_whatever_the_priority(manager):
    replay = manager(64, alpha=0.0)
    replay.insert(np.arange(64), np.geomspace(1e-6, 1e6, 64))
    batch = replay.sample(64, beta=0.7)
    assert batch.indices.tolist() == list(range(64))
    assert np.all(batch.weights == 1.0)


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("alpha", [0.4, 0.7, 1.0])
def test_weights_are_powers_of_the_priorities_over_the_least(manager, alpha, beta):
    priorities = np.linspace(0.1, 2.0, 64)
    replay = manager(64, alpha=alpha, seed=2)
    replay.insert(np.arange(64), priorities)
    for _ in range(8):
        batch = replay.sample(16, beta)
        drawn = priorities[batch.indices] ** alpha
        np.testing.assert_allclose(batch.weights, (drawn / drawn.min()) ** -beta, rtol=2e-5)
        assert batch.weights.max() == 1.0
        assert batch.weights.min() > 0.0


@pytest.mark.parametrize("batch_size", [0, -1])
def test_a_batch_of_none_is_refused(manager, batch_size):
    replay = manager(5)
    replay.insert([0])
    with pytest.raises(ReplayError, match=f"batch_size must be at least 1; found {batch_size}"):
        replay.sample(batch_size)


@pytest.mark.parametrize(("size", "batch"), [(10, 5), (15, 5), (20, 9), (20, 20), (16, 1)])
def test_a_pass_without_replacement_meets_each_item_once(manager, size, batch):
    replay = manager(size, replacement=False, max_times_sampled=1, mode="uniform", seed=size)
    replay.insert(np.arange(size))
    met: list[int] = []
    for _ in range(size // batch):
        met += replay.sample(batch).indices.tolist()
    assert len(set(met)) == len(met) == size // batch * batch
    with pytest.raises(ReplayError, match=r"items (can be|were) sampled"):
        replay.sample(size % batch + 1)
    replay.insert(np.arange(size))  # new items: the next pass
    assert len(set(replay.sample(size).indices.tolist())) == size


# --- What new items get ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [0.4, 0.7])
def test_a_new_item_has_the_largest_priority_with_alpha_applied_once(manager, alpha):
    # Applied twice by TorchRL once; rounded to a whole number by Flashbax (58).
    replay = manager(10, alpha=alpha)
    replay.insert([0, 1], [2.75, 0.3])
    replay.insert([2])
    assert replay.max_priority == 2.75
    assert replay.retrieve([2])[0] == np.float32(2.75)
    leaves = leaves_of(replay)
    assert leaves[2] == leaves[0] == pytest.approx(2.75**alpha * 2**20, rel=1e-6)


def test_the_largest_priority_outlives_its_item_and_the_mean_does_not(manager):
    # TorchRL 2210: an early outlier rules all later items, unless what is new gets what the buffer holds.
    largest, mean = manager(3), manager(3, initial_priority="mean")
    for replay in (largest, mean):
        replay.insert([0, 1, 2], [100.0, 1.0, 1.0])
        replay.insert([0], [1.0])
        replay.insert([1])
    assert largest.retrieve([1])[0] == 100.0
    assert mean.retrieve([1])[0] == pytest.approx(1.0)


def test_an_overwritten_items_priority_is_gone(manager):
    replay = manager(4, alpha=1.0)
    for number in range(10):  # two and a half times around
        replay.insert([number % 4], [(number + 1) * UNIT])
    assert leaves_of(replay).tolist() == [9, 10, 7, 8]
    assert replay.total == 34


def test_an_update_meant_for_an_overwritten_item_is_dropped(manager):
    replay = manager(4, alpha=1.0)
    replay.insert(np.arange(4))
    batch = replay.sample(4)
    replay.insert([1], [0.5])
    assert replay.update(batch.indices, np.full(4, 9.0), batch.generations) == 3
    assert replay.retrieve([0, 1, 2, 3]).tolist() == [9.0, 0.5, 9.0, 9.0]


# --- Saving ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["prioritized", "top_k", "uniform", "fifo"])
def test_a_restored_replay_shares_nothing_with_the_state_it_came_from(manager, mode):
    # TorchRL lost priorities in some samplers, and kept tensors of the state in others.
    replay = manager(10, mode=mode, seed=1)
    replay.insert(np.arange(7), np.linspace(0.1, 5.0, 7))
    state = replay.state_dict()
    restored = manager(10, mode=mode)
    restored.load_state_dict(state)
    assert (restored.total, restored.max_priority, restored.filled) == (replay.total, replay.max_priority, 7)
    for value in state.values():
        if isinstance(value, np.ndarray):
            value[...] = 0
    for _ in range(3):
        assert np.array_equal(restored.sample(5).indices, replay.sample(5).indices)


# --- Around the ring, with the Data Storage -------------------------------------------------------------------------

STEPS = TransitionSpec(
    (
        FieldSpec("obs", (), "int64"),
        FieldSpec("reward", (), "float32"),
        FieldSpec("next_obs", (), "int64"),
    )
)


def episodes(storage, *lengths, first=0, ends="terminated"):
    """Insert episodes of one stream: observations count up by one, and jump by 1,000 between episodes."""
    number = first
    for length in lengths:
        columns = STEPS.empty(length)
        columns["obs"][:] = np.arange(number, number + length)
        columns["next_obs"][:] = columns["obs"] + 1
        columns["reward"][:] = columns["obs"]
        storage.insert(columns, **{ends: np.arange(length) == length - 1})
        number += 1000


def slots_of(storage):
    return {int(obs): slot for slot, obs in enumerate(storage.gather(np.arange(storage.size))["obs"])}


@pytest.mark.parametrize("steps", [1, 5, 12])
def test_what_is_sampled_after_wrapping_around_is_the_newest(manager, steps):
    storage, replay = DataStorage(STEPS, 16), manager(16, seed=steps)
    newest = 0
    while newest < 100:
        columns = STEPS.empty(steps)
        columns["obs"][:] = np.arange(newest, newest + steps)
        newest += steps
        replay.insert(storage.insert(columns))
        found = storage.gather(replay.sample(200).indices)["obs"]
        assert found.min() >= newest - 16
        assert found.max() < newest
        assert replay.filled == storage.size == min(newest, 16)
    assert set(found.tolist()) == set(range(newest - 16, newest))


@pytest.mark.parametrize("share", [False, True])
def test_next_observations_are_right_at_the_seam_and_at_ends(share):
    storage = DataStorage(STEPS, 10, streams=1, share_next_obs=share)
    for at in range(6):
        episodes(storage, 4, 3, first=at * 10_000)
        rows = storage.gather(np.arange(storage.size))
        assert np.array_equal(rows["next_obs"], rows["obs"] + 1)


@pytest.mark.parametrize("ends", ["terminated", "truncated"])
def test_n_step_returns_stop_at_the_end_of_an_episode(ends):
    storage = DataStorage(STEPS, 20, streams=1)
    episodes(storage, 4, 5, first=1, ends=ends)
    slot = slots_of(storage)
    found = n_step_returns(storage, [slot[1], slot[3], slot[4], slot[1001]], 3, 0.5)
    assert found.reward.tolist() == [1 + 2 / 2 + 3 / 4, 3 + 4 / 2, 4, 1001 + 1002 / 2 + 1003 / 4]
    assert found.steps.tolist() == [3, 2, 1, 3]
    after = 0.0 if ends == "terminated" else 1.0  # a time limit does not stop the bootstrap
    assert found.discount.tolist() == [0.125, 0.25 * after, 0.5 * after, 0.125]
    assert storage.gather(found.last)["next_obs"].tolist() == [4, 5, 5, 1004]


def test_n_step_returns_cross_the_seam_of_the_ring_but_not_into_the_oldest():
    storage = DataStorage(STEPS, 8, streams=1)
    episodes(storage, 6)
    episodes(storage, 5, first=100, ends="truncated")  # slots 6, 7, 0, 1, 2; slot 3 holds the oldest step
    slot = slots_of(storage)
    assert slot[102] == 0
    found = n_step_returns(storage, [slot[101], slot[104]], 3, 1.0)
    assert found.reward.tolist() == [101 + 102 + 103, 104]
    assert found.steps.tolist() == [3, 1]


def test_an_unfinished_episode_ends_with_its_newest_step():
    storage = DataStorage(STEPS, 8, streams=1)
    columns = STEPS.empty(5)
    columns["obs"][:], columns["reward"][:] = np.arange(5), 1.0
    columns["next_obs"][:] = columns["obs"] + 1
    storage.insert(columns)
    found = n_step_returns(storage, np.arange(5), 3, 1.0)
    assert found.steps.tolist() == [3, 3, 3, 2, 1]
    assert found.discount.tolist() == [1.0] * 5


def test_slices_never_cross_episodes_nor_the_writing_position():
    # Slices of data that does not follow, at the position where the ring is being written (Flashbax 51, TorchRL 2205).
    storage = DataStorage(STEPS, 23, streams=1, slice_length=4)
    random = np.random.default_rng(0)
    for at in range(40):
        episodes(storage, *random.integers(1, 9, 3), first=at * 10_000)
        starts = storage.draw_starts(200, random)
        slices = gather_slices(storage, starts, 4)
        assert slices.mask.all()
        assert np.all(np.diff(slices.columns["obs"], axis=1) == 1)


def test_stacks_of_an_episode_shorter_than_the_stack_hold_nothing_of_the_one_before():
    # cpprb 108 and 110.
    storage = DataStorage(STEPS, 16, streams=1, share_next_obs=True)
    episodes(storage, 5, 2, first=1)
    slot = slots_of(storage)
    stacks = gather_stacks(storage, [slot[1001], slot[1002], slot[5]], 4, padding="repeat")
    assert stacks.obs.tolist() == [[1001] * 4, [1001, 1001, 1001, 1002], [2, 3, 4, 5]]
    assert stacks.next_obs is not None
    assert stacks.next_obs.tolist() == [[1001] * 3 + [1002], [1001, 1001, 1002, 1003], [3, 4, 5, 6]]
