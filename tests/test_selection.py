"""Which items a batch is made of: orders, limits, replacement, first priorities; and what is counted on the way."""

from __future__ import annotations

import itertools
import math
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pearl.backends.cpu.replay import NativeReplayManager
from pearl.errors import ConfigurationError, ReplayError
from pearl.replay import ReplayRequestQueue, make_replay_manager, replay_managers
from pearl.replay.reference import ReferenceReplayManager
from pearl.spec import ReplaySpec

MANAGERS = [NativeReplayManager, ReferenceReplayManager]
DRAWN = ["prioritized", "uniform"]
ORDERED = ["fifo", "lifo", "top_k"]


@pytest.fixture(params=MANAGERS, ids=["native", "reference"])
def manager(request):
    return request.param


def drawn(replay, batch):
    return replay.sample(batch).indices.tolist()


# --- orders -----------------------------------------------------------------------------------------------------------


def test_fifo_gives_the_oldest_and_lifo_the_newest(manager):
    fifo, lifo = manager(10, mode="fifo"), manager(10, mode="lifo")
    for replay in (fifo, lifo):
        replay.insert([7, 2, 5])
        replay.insert([9, 7])  # 7 is written anew
    assert drawn(fifo, 3) == [2, 5, 9]
    assert drawn(fifo, 4) == [2, 5, 9, 7]
    assert drawn(lifo, 2) == [7, 9]
    assert drawn(lifo, 4) == [7, 9, 5, 2]
    assert fifo.update([2], [100.0]) == 1
    assert drawn(fifo, 1) == [2]
    assert fifo.sample(2).weights.tolist() == [1.0, 1.0]


def test_fifo_sampled_once_is_a_queue(manager):
    replay = manager(4, mode="fifo", max_times_sampled=1)
    inserted, taken = [], []
    for start in range(0, 24, 2):
        slots = [start % 4, (start + 1) % 4]
        replay.insert(slots)
        inserted += slots
        if start % 4 == 2:
            taken += drawn(replay, 4)
    assert taken == inserted
    with pytest.raises(ReplayError, match="All 4 items were sampled 1 times"):
        replay.sample(1)


def test_top_k_gives_the_largest_and_of_equal_ones_the_first(manager):
    replay = manager(300, mode="top_k", alpha=0.1)
    priorities = np.random.default_rng(1).integers(1, 40, 300).astype(np.float32)
    priorities[[50, 200]] = np.inf
    # Equal once quantised, and told apart all the same.
    priorities[10], priorities[11] = 500.0, np.nextafter(np.float32(500.0), np.float32(501.0))
    replay.insert(np.arange(300), priorities)
    assert replay.state_dict()["leaves"][10] == replay.state_dict()["leaves"][11]
    expected = sorted(range(300), key=lambda i: (-priorities[i], i))
    assert drawn(replay, 300) == expected
    assert expected[:4] == [50, 200, 11, 10]
    replay.update([50], [0.5])
    assert drawn(replay, 2) == [200, 11]


def test_top_k_gives_zero_priorities_only_where_there_is_nothing_else(manager):
    replay = manager(20, mode="top_k")
    replay.insert([3, 5, 9, 12], [0.0, 2.0, 0.0, 1.0])
    assert drawn(replay, 2) == [5, 12]
    with pytest.raises(ReplayError, match=r"A batch of 3 .* 2 items can be sampled"):
        replay.sample(3)
    replay.update([5, 12], [0.0, 0.0])
    assert drawn(replay, 4) == [3, 5, 9, 12]


@pytest.mark.parametrize("mode", ORDERED)
def test_ordered_modes_have_weights_of_one_and_repeat_nothing(manager, mode):
    replay = manager(40, mode=mode)
    replay.insert(np.arange(40), np.linspace(1, 2, 40))
    sample = replay.sample(40, beta=1.0)
    assert sorted(sample.indices.tolist()) == list(range(40))
    assert np.all(sample.weights == 1.0)
    with pytest.raises(ReplayError, match=r"A batch of 41 .* without repetition: 40 items can be sampled"):
        replay.sample(41)


@pytest.mark.parametrize("mode", ["prioritized", "uniform", *ORDERED])
def test_requests_take_every_mode(mode):
    with ReplayRequestQueue(NativeReplayManager(10, mode=mode)) as queue:
        queue.write_insert(np.arange(10))
        queue.write_sample(4)
        queue.drain()
        sample = queue.poll()
        queue.write_update(sample.indices, np.ones(4, np.float32), sample.generations)
        queue.drain()
        assert queue.poll() is None
        assert queue.manager.statistics().updates == 4


# --- draws ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", DRAWN)
@pytest.mark.parametrize("stratified", [True, False])
def test_without_replacement_nothing_comes_twice(manager, mode, stratified):
    replay = manager(50, mode=mode, replacement=False, stratified=stratified, seed=4)
    priorities = np.where(np.arange(30) % 3, np.exp2(np.arange(30) % 20), 0.0)
    replay.insert(np.arange(30), priorities)
    before = replay.state_dict()
    available = 20 if mode == "prioritized" else 30
    for batch in (1, 7, available):
        indices = drawn(replay, batch)
        assert len(set(indices)) == batch
        assert max(indices) < 30
        assert mode == "uniform" or all(priorities[indices] > 0)
    with pytest.raises(ReplayError, match=f"A batch of {available + 1} .*: {available} items can be sampled"):
        replay.sample(available + 1)
    assert np.array_equal(replay.state_dict()["leaves"], before["leaves"])
    assert replay.total == (before["leaves"].sum() if mode == "prioritized" else 30)
    assert replay.statistics().samples == 8 + available


def test_without_replacement_all_zero_is_uniform(manager):
    replay = manager(64, replacement=False)
    replay.insert([3, 10, 60], [0.0, 0.0, 0.0])
    assert sorted(drawn(replay, 3)) == [3, 10, 60]
    assert replay.total == 0


def test_weights_without_replacement_are_those_of_the_inclusion(manager):
    # A batch of 5 holds slots 6 and 7 for certain (7 * 4 / 28 and 8 * 5 / 36 are at least 1), and shares 3 draws over
    # a sum of 21 among the rest: a share of 7.
    replay = manager(8, alpha=1.0, replacement=False)
    replay.insert(np.arange(8), np.arange(1, 9))
    for _ in range(20):
        sample = replay.sample(5, beta=0.5)
        assert {6, 7} < set(sample.indices.tolist())
        expected = np.minimum(sample.indices + 1.0, 7.0) ** -0.5
        np.testing.assert_allclose(sample.weights, expected / expected.max(), rtol=1e-6)
    assert np.all(replay.sample(8, beta=1.0).weights == 1.0)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([0.0, 1.0, 2.0, 4.0, 8.0]), min_size=2, max_size=12), st.integers(0, 2**64 - 1))
def test_draws_without_replacement_are_the_references_where_shares_meet_strata(priorities, seed):
    replays = [m(12, alpha=1.0, replacement=False, seed=seed) for m in (NativeReplayManager, ReferenceReplayManager)]
    for replay in replays:
        replay.insert(np.arange(len(priorities)), priorities)
    for batch in range(1, (np.count_nonzero(priorities) or len(priorities)) + 1):
        native, reference = (replay.sample(batch, beta=0.5) for replay in replays)
        assert np.array_equal(native.indices, reference.indices)
        assert np.array_equal(native.weights, reference.weights)


def test_weights_of_draws_in_turn_are_those_of_a_single_draw(manager):
    replay = manager(8, alpha=1.0, replacement=False, stratified=False)
    replay.insert(np.arange(8), np.arange(1, 9))
    sample = replay.sample(5, beta=0.5)
    expected = (sample.indices + 1.0) ** -0.5
    np.testing.assert_allclose(sample.weights, expected / expected.max(), rtol=1e-6)


def test_sequential_draws_have_the_probabilities_of_sequential_draws():
    # Every ordered triple of five items against p_a * p_b / (1 - p_a) * p_c / (1 - p_a - p_b); false alarm 1e-5.
    priorities = np.array([1.0, 2.0, 4.0, 8.0, 16.0])
    replay = NativeReplayManager(5, alpha=1.0, replacement=False, stratified=False, seed=8)
    replay.insert(np.arange(5), priorities)
    p = priorities / priorities.sum()
    draws = 60_000
    counts = dict.fromkeys(itertools.permutations(range(5), 3), 0)
    for _ in range(draws):
        counts[tuple(drawn(replay, 3))] += 1
    statistic = 0.0
    for (a, b, c), count in counts.items():
        expected = draws * p[a] * p[b] / (1 - p[a]) * p[c] / (1 - p[a] - p[b])
        statistic += (count - expected) ** 2 / expected
    freedom = len(counts) - 1
    assert abs(statistic - freedom) < 4.5 * math.sqrt(2 * freedom)


def test_independent_draws_are_not_stratified(manager):
    spread = {}
    for stratified in (True, False):
        replay = manager(1000, mode="uniform", stratified=stratified, seed=5)
        replay.insert(np.arange(1000))
        spread[stratified] = [np.abs(np.sort(replay.sample(100).indices) - 10 * np.arange(100)).max() for _ in range(5)]
    assert max(spread[True]) < 10
    assert min(spread[False]) > 20


# --- limits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", DRAWN)
@pytest.mark.parametrize("replacement", [True, False])
def test_an_item_is_sampled_no_more_often_than_allowed(manager, mode, replacement):
    replay = manager(16, mode=mode, max_times_sampled=3, replacement=replacement, seed=2)
    replay.insert(np.arange(10), np.arange(1, 11) ** 4)
    counts = np.zeros(16, int)
    batch = 5
    for _ in range(100):
        try:
            sample = replay.sample(batch)
        except ReplayError:
            batch -= 1  # what is left is less, or all of one item
            if batch == 0:
                break
            continue
        np.add.at(counts, sample.indices, 1)
        replay.update(sample.indices, sample.indices + 1.0, sample.generations)  # revives nothing
    assert counts.tolist() == [3] * 10 + [0] * 6
    assert replay.statistics().exhausted == 10
    with pytest.raises(ReplayError, match="All 10 items were sampled 3 times: insert before sampling again"):
        replay.sample(1)
    assert replay.filled == 10
    replay.insert([4, 12])
    assert sorted(drawn(replay, 2) + drawn(replay, 1) + drawn(replay, 2) + drawn(replay, 1)) == [4] * 3 + [12] * 3


@pytest.mark.parametrize("mode", DRAWN)
def test_a_batch_beyond_what_is_left_changes_nothing(manager, mode):
    replay = manager(8, mode=mode, max_times_sampled=2, seed=1)
    replay.insert(np.arange(3))
    replay.sample(1)
    before, statistics = replay.state_dict(), replay.statistics()
    with pytest.raises(ReplayError, match="A batch of 6 cannot be sampled: 5 draws are left"):
        replay.sample(6)
    for name, value in replay.state_dict().items():
        np.testing.assert_array_equal(value, before[name])
    assert replay.statistics() == statistics
    assert len(drawn(replay, 5)) == 5


def test_an_exhausted_item_stays_out_through_updates_rescales_and_alpha(manager):
    replay = manager(4, alpha=1.0, max_times_sampled=1)
    replay.insert([0, 1, 2], [np.inf, 1.0, 1.0])
    while 0 not in drawn(replay, 1):
        replay.insert([1, 2], [1.0, 1.0])
    replay.insert([1, 2], [1.0, 1.0])
    replay.update([0], [7.0])
    replay.update([1], [1e9])
    replay.set_alpha(0.7)
    assert replay.retrieve([0])[0] == 7.0
    assert replay.state_dict()["leaves"][0] == 0
    twin = manager(4, max_times_sampled=1)
    twin.load_state_dict(replay.state_dict())
    for each in (replay, twin):
        assert sorted(drawn(each, 2)) == [1, 2]


@pytest.mark.parametrize("mode", ORDERED)
def test_orders_pass_over_what_was_sampled_often_enough(manager, mode):
    replay = manager(8, mode=mode, max_times_sampled=2)
    replay.insert(np.arange(6), np.arange(6, 0, -1))
    forward = [0, 1, 2, 3, 4, 5] if mode != "lifo" else [5, 4, 3, 2, 1, 0]
    assert [drawn(replay, 2) for _ in range(3)] == [forward[:2], forward[:2], forward[2:4]]
    twin = manager(8, mode=mode, max_times_sampled=2)
    twin.load_state_dict(replay.state_dict())
    for each in (replay, twin):
        assert drawn(each, 4) == forward[2:]
        assert drawn(each, 2) == forward[4:]
        each.insert([0], [6.0])
        assert drawn(each, 1) == [0]


# --- first priorities -------------------------------------------------------------------------------------------------


def test_the_mean_of_the_priorities_held_is_given_first(manager):
    replay = manager(10, initial_priority="mean")
    replay.insert([0])
    assert replay.retrieve([0])[0] == 1.0  # nothing to average
    replay.insert([1, 2, 3], [3.0, 0.0, np.inf])  # of these only 3 counts
    replay.insert([4])
    assert replay.retrieve([4])[0] == 2.0
    replay.update([0, 1], [7.0, 6.0])
    replay.insert([5, 6])
    assert replay.retrieve([5, 6]).tolist() == [5.0, 5.0]
    replay.insert([0], [2.0])  # what is overwritten counts no more
    twin = manager(10, initial_priority="mean")
    twin.load_state_dict(replay.state_dict())
    for each in (replay, twin):
        each.insert([7])
        assert each.retrieve([7])[0] == 4.0


def test_a_fixed_priority_is_given_first(manager):
    replay = manager(10, initial_priority=2.5)
    replay.insert([0, 1], [9.0, 1.0])
    replay.insert([2])
    assert replay.retrieve([2])[0] == 2.5
    assert replay.max_priority == 9.0


# --- statistics -------------------------------------------------------------------------------------------------------


def test_the_histogram_counts_leaves_by_their_bits(manager):
    replay = manager(10, alpha=1.0)
    assert sum(replay.statistics().histogram) == 0
    replay.insert([0, 1, 2, 3], [0.0, 1.0, 1.5, 200.0])

    def found():
        return {bits: count for bits, count in enumerate(replay.statistics().histogram) if count}

    assert found() == {0: 1, 21: 2, 28: 1}
    replay.update([1, 1, 3], [9.0, 0.0, 2.0])
    assert found() == {0: 2, 21: 1, 22: 1}
    replay.update([1], [1024.0])  # everything shifts by three bits
    assert found() == {0: 1, 18: 1, 19: 1, 28: 1}
    replay.set_alpha(0.0)
    assert found() == {0: 1, 21: 3}
    assert manager(10, mode="uniform").statistics().histogram == ()


def test_ages_and_samples_per_item_are_counted(manager):
    replay = manager(10, mode="fifo")
    replay.insert([4, 2, 0, 1])
    replay.sample(3)
    statistics = replay.statistics()
    assert (statistics.age_mean, statistics.age_max) == (2.0, 3)  # 3, 2 and 1 items came since
    assert statistics.samples_per_item == 0.75
    replay.insert([4])
    replay.sample(1)
    statistics = replay.statistics()
    assert (statistics.age_mean, statistics.age_max) == (3.0, 3)
    assert statistics.samples_per_item == 0.75  # the two samples left of those overwritten, and one more


@pytest.mark.parametrize("spread", [1.0, 100.0])
def test_the_effective_sample_size_is_that_of_the_weights(manager, spread):
    replay = manager(1000, alpha=1.0, seed=1)
    assert replay.statistics().effective_sample_size == 0.0
    replay.insert(np.arange(1000), np.linspace(1.0, spread, 1000))
    weights = replay.sample(256, beta=1.0).weights.astype(np.float64)
    expected = weights.sum() ** 2 / (weights**2).sum()
    assert replay.statistics().effective_sample_size == pytest.approx(expected, rel=1e-4)
    assert spread > 1.0 or expected == 256.0


# --- the specification ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", sorted(set(replay_managers()) - {"cuda", "fpga", "sycl"}))  # which lack some of it
def test_the_specification_reaches_the_manager(backend):
    spec = ReplaySpec(10, mode="lifo", max_times_sampled=1)
    replay = make_replay_manager(spec, seed=0, backend=backend)
    replay.insert([1, 2, 3])
    assert drawn(replay, 2) == [3, 2]
    assert drawn(replay, 1) == [1]
    first = make_replay_manager(ReplaySpec(4, initial_priority=3.0, replacement=False), seed=0, backend=backend)
    first.insert([0, 1])
    assert first.retrieve([0])[0] == 3.0
    assert sorted(drawn(first, 2)) == [0, 1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mode": "random"}, '"fifo", "lifo" or "top_k"'),
        ({"stratified": 1}, "stratified must be True or False; found 1"),
        ({"replacement": "no"}, "replacement must be True or False; found 'no'"),
        ({"max_times_sampled": -1}, "max_times_sampled must be a whole number"),
        ({"max_times_sampled": 1.0}, "max_times_sampled must be a whole number"),
        ({"max_times_sampled": True}, "max_times_sampled must be a whole number"),
        ({"initial_priority": "median"}, 'initial_priority must be "max", "mean" or a number above 0'),
        ({"initial_priority": 0}, "initial_priority must be"),
        ({"initial_priority": math.inf}, "initial_priority must be"),
        ({"priority_epsilon": -1e-6}, "priority_epsilon must be 0, or a number in [1e-30, 1]; found -1e-06"),
        ({"priority_epsilon": math.nan}, "priority_epsilon must be"),
        ({"priority_epsilon": True}, "priority_epsilon must be"),
    ],
)
def test_selections_that_cannot_be(settings, message):
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        ReplaySpec(**{"capacity": 100, **settings})
