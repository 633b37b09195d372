"""A replay in banks: its draws and corrected weights against one tree, its slots, its errors and its state."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pearl.backends.cpu.replay import NativeReplayManager
from pearl.backends.replay_managers import bank_seed, make_banked_replay_manager
from pearl.errors import CheckpointError, ConfigurationError, PriorityError, ReplayError
from pearl.replay.banked import BankBatch, BankedReplayManager, weight_factors
from pearl.replay.reference import ReferenceReplayManager, quantise
from pearl.spec import ReplaySpec

CAPACITY, BANKS, BATCH = 24, 3, 12
ALPHA = 0.7
SPREADS = ("round_robin", "shard")
# Bank 0 of either spread has a much larger sum than the others, and slots of bank 2 are rare.
PRIORITIES = {
    "round_robin": np.tile([5.0, 1.0, 0.1], CAPACITY // BANKS) * np.linspace(0.5, 2.0, CAPACITY),
    "shard": np.repeat([5.0, 1.0, 0.1], CAPACITY // BANKS) * np.linspace(0.5, 2.0, CAPACITY),
}


def banked(spread="round_robin", manager=NativeReplayManager, capacity=CAPACITY, banks=BANKS, seed=0, **options):
    options = {"alpha": ALPHA, **options}
    return BankedReplayManager(
        [manager(capacity // banks, seed=bank_seed(seed, bank), **options) for bank in range(banks)], spread=spread
    )


def filled(spread="round_robin", **options):
    replay = banked(spread, **options)
    replay.insert(np.arange(CAPACITY), PRIORITIES[spread])
    return replay


def masses(spread):
    """The exact leaves of all slots."""
    return quantise(PRIORITIES[spread].astype(np.float32), ALPHA, 20).astype(np.float64)


def probably_fits(chi_square, degrees):
    """Whether a chi-square of so many degrees is below its 99.99 % quantile (Wilson and Hilferty 1931)."""
    part = 2.0 / (9.0 * degrees)
    return chi_square < degrees * (1.0 - part + 3.72 * math.sqrt(part)) ** 3


@pytest.mark.parametrize("spread", SPREADS)
def test_each_bank_gives_its_part_in_proportion_to_its_own_priorities(spread):
    replay, repeats = filled(spread, stratified=False), 4000
    drawn = np.array([replay.sample(BATCH).indices for _ in range(repeats)])
    each = BATCH // BANKS
    assert (replay.bank_of(drawn) == np.repeat(np.arange(BANKS), each)).all()
    leaves, counts = masses(spread), np.bincount(drawn.ravel(), minlength=CAPACITY)
    bank = replay.bank_of(np.arange(CAPACITY))
    expected = repeats * each * leaves / np.bincount(bank, leaves)[bank]
    assert probably_fits(((counts - expected) ** 2 / expected).sum(), CAPACITY - BANKS)


@pytest.mark.parametrize("spread", SPREADS)
def test_corrected_weights_make_the_draws_those_of_one_tree(spread):
    """With beta 0, one tree weighs every draw by 1: the weighted counts of both estimate B P(i)."""
    repeats = 4000
    replay = filled(spread, stratified=False)
    one = NativeReplayManager(CAPACITY, seed=5, alpha=ALPHA, stratified=False)
    one.insert(np.arange(CAPACITY), PRIORITIES[spread])
    leaves, bank = masses(spread), replay.bank_of(np.arange(CAPACITY))
    sums = np.bincount(bank, leaves)
    factors = BANKS * sums / sums.sum()
    weighted, plain, uncorrected = np.zeros(CAPACITY), np.zeros(CAPACITY), np.zeros(CAPACITY)
    for _ in range(repeats):
        drawn = replay.sample(BATCH, beta=0.0)
        np.add.at(weighted, drawn.indices, drawn.weights * factors.max())
        np.add.at(uncorrected, drawn.indices, 1.0)
        np.add.at(plain, one.sample(BATCH, beta=0.0).indices, 1.0)
    in_bank = leaves / sums[bank]
    variance = repeats * (BATCH // BANKS) * in_bank * (1 - in_bank) * factors[bank] ** 2
    in_one = leaves / leaves.sum()
    variance += repeats * BATCH * in_one * (1 - in_one)
    assert probably_fits(((weighted - plain) ** 2 / variance).sum(), CAPACITY)
    assert not probably_fits(((uncorrected - plain) ** 2 / variance).sum(), CAPACITY)


@pytest.mark.parametrize("spread", SPREADS)
def test_with_beta_one_the_weighted_mean_of_a_batch_is_the_mean_over_all_items(spread):
    replay, values, weights = filled(spread), np.linspace(-1.0, 3.0, CAPACITY) ** 3, corrected_weights(spread, 1.0)
    means = []
    for _ in range(3000):
        drawn = replay.sample(BATCH, beta=1.0)
        largest = weights[drawn.indices].max()  # by which the batch is divided
        means.append(largest * (drawn.weights * values[drawn.indices]).mean())
    assert abs(np.mean(means) - values.mean()) < 4 * np.std(means) / math.sqrt(len(means))


def corrected_weights(spread, beta):
    """`(N P(i))**-beta L S_j / S` of every slot."""
    leaves, bank = masses(spread), filled(spread).bank_of(np.arange(CAPACITY))
    sums = np.bincount(bank, leaves)
    return (CAPACITY * leaves / leaves.sum()) ** -beta * BANKS * sums[bank] / sums.sum()


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("spread", SPREADS)
def test_weights_are_those_of_one_tree_times_the_factor_of_the_bank(spread, beta):
    replay, of_slots = filled(spread), corrected_weights(spread, beta)
    for _ in range(20):
        drawn = replay.sample(BATCH, beta)
        expected = of_slots[drawn.indices]
        np.testing.assert_allclose(drawn.weights, expected / expected.max(), rtol=2e-6)
        assert drawn.weights.dtype == np.float32
        assert drawn.weights.max() == 1.0


def test_banks_of_other_scales_are_compared_in_the_same_unit():
    """A priority that is too large for the default scale lowers that of its bank alone."""
    replay = banked(alpha=1.0)
    priorities = np.ones(CAPACITY)
    priorities[0] = 1e5
    replay.insert(np.arange(CAPACITY), priorities)
    assert [bank.scale for bank in replay._banks] == [replay.scale, 20, 20]
    assert replay.scale < 20
    drawn = replay.sample(BATCH, beta=0.0)
    np.testing.assert_allclose(drawn.weights[-1], 8 / (1e5 + 7), rtol=1e-3)
    assert replay.total == pytest.approx((1e5 + 23) * 2.0**replay.scale, rel=1e-3)


def test_the_native_banks_sample_as_those_of_the_reference():
    native, reference = (filled(manager=manager, seed=3) for manager in (NativeReplayManager, ReferenceReplayManager))
    for step in range(20):
        drawn, expected = (replay.sample(BATCH, 0.6) for replay in (native, reference))
        for ours, theirs in zip(drawn, expected, strict=True):
            np.testing.assert_array_equal(ours, theirs)
        priorities = np.abs(np.sin(np.arange(BATCH) + step)) + 0.01
        for replay in (native, reference):
            assert replay.update(drawn.indices, priorities, drawn.generations) == BATCH
    assert native.total == reference.total


def test_uniform_banks_weigh_rows_by_how_many_their_bank_has():
    replay = banked(capacity=30, mode="uniform")
    replay.insert(np.arange(4))  # two items in bank 0, one in each other
    np.testing.assert_allclose(replay.sample(6).weights, [1, 1, 0.5, 0.5, 0.5, 0.5])


def test_a_bank_without_priorities_has_no_weight():
    replay = banked()
    priorities = np.ones(CAPACITY)
    priorities[2::BANKS] = 0.0
    replay.insert(np.arange(CAPACITY), priorities)
    assert (replay.sample(BATCH, 0.5).weights[-BATCH // BANKS :] == 0).all()
    replay.update(np.arange(CAPACITY), np.zeros(CAPACITY))
    assert (replay.sample(BATCH, 0.5).weights == 1).all()


@given(
    st.lists(st.tuples(st.floats(1e-3, 1e3), st.floats(1e-3, 1e3)), min_size=1, max_size=6),
    st.floats(0.0, 1.0),
)
@settings(max_examples=50, deadline=None)
def test_factors_are_in_proportion_to_the_sums_of_banks_with_the_same_least_priority(found, beta):
    banks = [BankBatch(mass, 2.0) for mass, _ in found]
    factors = weight_factors(banks, beta)
    assert factors.sum() == pytest.approx(len(banks))
    mass = np.array([bank.mass for bank in banks])
    np.testing.assert_allclose(factors, len(banks) * mass / mass.sum())
    batches = [BankBatch(*pair) for pair in found]
    least = np.array([bank.least for bank in batches])
    np.testing.assert_allclose(weight_factors(batches, beta), factors * (least / least.min()) ** -beta)


@pytest.mark.parametrize(("spread", "expected"), [("round_robin", [0, 1, 2, 0, 1]), ("shard", [0, 0, 0, 0, 0])])
def test_slots_are_spread_as_asked(spread, expected):
    replay = banked(spread)
    replay.insert(np.arange(5), np.arange(1, 6))
    np.testing.assert_array_equal(replay.bank_of(np.arange(5)), expected)
    np.testing.assert_array_equal(replay.retrieve(np.arange(7)), [1, 2, 3, 4, 5, 0, 0])
    assert replay.filled == 5
    assert replay.statistics().inserts == 5


def test_statistics_are_those_of_all_banks():
    replay = filled()
    replay.insert([0, 3, 6, 9, 1], [1.0, 2.0, 4.0, 8.0, 16.0])  # four rows of bank 0, one of bank 1
    drawn, each = replay.sample(BATCH), CAPACITY // BANKS
    found, banks = replay.statistics(), [bank.statistics() for bank in replay._banks]
    ages = np.repeat([each + 4, each + 1, each], BATCH // BANKS) - drawn.generations.astype(np.int64)
    assert (found.age_mean, found.age_max) == (BANKS * ages.mean(), BANKS * ages.max())
    assert (found.filled, found.inserts, found.samples) == (CAPACITY, CAPACITY + 5, BATCH)
    assert found.samples_per_item == BATCH / CAPACITY
    assert found.max_priority == 16.0
    assert (found.total, found.scale) == (replay.total, replay.scale)
    assert found.histogram == tuple(np.sum([bank.histogram for bank in banks], axis=0))
    assert found.effective_sample_size == sum(bank.effective_sample_size for bank in banks) > 0


def test_an_update_of_an_overwritten_slot_is_dropped_by_its_bank():
    replay = filled()
    drawn = replay.sample(BATCH)
    replay.insert(drawn.indices[:1], [0.3])
    stale = int((drawn.indices == drawn.indices[0]).sum())
    assert replay.update(drawn.indices, np.full(BATCH, 9.0), drawn.generations) == BATCH - stale
    assert replay.retrieve(drawn.indices[:1]) == np.float32(0.3)
    assert replay.statistics().stale == stale


def test_state_goes_on_with_the_same_samples():
    replay, other = filled(), banked(seed=9)
    replay.sample(BATCH)
    other.load_state_dict(replay.state_dict())
    for ours, theirs in zip(replay.sample(BATCH), other.sample(BATCH), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"banks": 2}, "banks must be 3; found 2"),
        ({"spread": "shard"}, "spread must be 'round_robin'; found 'shard'"),
        ({"bank.7.leaves": np.zeros(8, np.uint32)}, "'bank.7.leaves', which no replay of 3 banks has"),
        ({"bank.2.leaves": np.zeros(5, np.uint32)}, "leaves must be uint32 of shape"),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(change, message):
    replay, other = filled(), banked()
    with pytest.raises(CheckpointError, match=message):
        other.load_state_dict({**replay.state_dict(), **change})
    assert other.filled == 0


def test_wrong_batches_are_refused():
    replay = filled()
    with pytest.raises(ReplayError, match="batch of 2 cannot take a row from each of 3 banks"):
        replay.sample(2)
    with pytest.raises(ReplayError, match=r"batch of 32 cannot be divided among 3 banks. Set batch_size to 30 or 33"):
        replay.sample(32)


def test_a_bank_without_items_is_named():
    replay = banked()
    replay.insert([0, 1])
    with pytest.raises(ReplayError, match=r"empty: 2\. Insert at least 3 items"):
        replay.sample(BATCH)


def test_bad_insertions_and_priorities_change_nothing():
    replay = banked()
    with pytest.raises(ReplayError, match=r"Index at position 1 must lie in \[0, 24\); found 24"):
        replay.insert([0, CAPACITY])
    with pytest.raises(PriorityError, match="at position 2"):
        replay.insert([0, 1, 2], [1.0, 1.0, np.nan])
    assert replay.filled == 0
    replay = filled()
    with pytest.raises(PriorityError, match="at position 2"):
        replay.update([0, 1, 2], [9.0, 9.0, np.nan])
    np.testing.assert_array_equal(replay.retrieve([0, 1, 2]), PRIORITIES["round_robin"][:3].astype(np.float32))


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("manager", [NativeReplayManager, ReferenceReplayManager])
def test_an_update_names_the_slot_that_was_never_inserted_by_its_index_of_the_whole_replay(spread, manager):
    replay = banked(spread, manager)
    replay.insert(np.arange(CAPACITY - 1))
    with pytest.raises(ReplayError, match="Index 23 at position 2 was never inserted: only written slots"):
        replay.update([3, 1, 23], [1.0, 1.0, 1.0])


def test_banks_that_do_not_fit_together_are_refused():
    with pytest.raises(ReplayError, match="at least one bank"):
        BankedReplayManager([])
    with pytest.raises(ReplayError, match="capacity of bank 1 is 9, that of bank 0 8"):
        BankedReplayManager([NativeReplayManager(8), NativeReplayManager(9)])
    with pytest.raises(ReplayError, match="found 'fifo', which takes items in the order of the whole replay"):
        BankedReplayManager([NativeReplayManager(8, mode="fifo")])
    with pytest.raises(ReplayError, match="spread must be one of round_robin, shard; found 'even'"):
        BankedReplayManager([NativeReplayManager(8)], spread="even")


@pytest.mark.parametrize(
    ("spec", "banks", "error", "message"),
    [
        (ReplaySpec(100), 3, ReplayError, "100 slots cannot be divided among 3 banks. Set its size to 99"),
        (ReplaySpec(100, mode="lifo"), 2, ConfigurationError, "found 'lifo'"),
        (ReplaySpec(100, replacement=False), 2, ConfigurationError, "replacement must be True; found False"),
        (ReplaySpec(100, max_times_sampled=4), 2, ConfigurationError, "max_times_sampled must be 0; found 4"),
    ],
)
def test_replays_that_cannot_be_banked_are_refused(spec, banks, error, message):
    with pytest.raises(error, match=message):
        make_banked_replay_manager(spec, banks, seed=0)


def test_a_banked_replay_is_made_from_a_spec():
    replay = make_banked_replay_manager(ReplaySpec(1000, alpha=0.5), 4, seed=1)
    assert (replay.capacity, replay.banks, replay.alpha, replay.fanout) == (1000, 4, 0.5, 16)
    replay.insert(np.arange(1000))
    drawn = replay.sample(64)
    local = drawn.indices.reshape(4, 16) // 4
    assert len(np.unique(local, axis=0)) == 4  # banks draw independently
    replay.close()
    with pytest.raises(ReplayError, match="closed"):
        replay.sample(64)
