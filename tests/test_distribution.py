"""What is sampled, how often: adversarial priorities, many draws, large trees, long runs of mixed operations.

Every random number is seeded, and hypothesis draws the same examples each time. Chi-square bounds are set for a false
alarm in 100,000 such tests, or in 100,000 times all examples that hypothesis draws.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pearl.backends.cpu.replay import NativeReplayManager
from pearl.replay.reference import ReferenceReplayManager, mulhi64

LEAF_MAX = 2**28 - 1


RARE, RAREST = 4.265, 5.731  # what a normal deviate exceeds with a probability of 1e-5, and of 5e-9
MANY = 50.0  # draws that a cell must expect for its share of chi-square to have that tail
EXAMPLES = 120  # of each of the properties below, of which nine are left to chance: 1,080 times 5e-9 is 5.4e-6


def chi_square_bound(freedom: int, z: float = RARE) -> float:
    """Return what chi-square exceeds as seldom as a normal deviate exceeds `z` (Wilson and Hilferty)."""
    ninth = 2.0 / (9.0 * freedom)
    return freedom * (1.0 - ninth + z * math.sqrt(ninth)) ** 3


def chi_square(counts: np.ndarray, expected: np.ndarray, least: float = 5.0) -> tuple[float, int]:
    """Return the statistic and its degrees of freedom; cells that expect fewer than `least` count as one."""
    small = expected < least
    counts = np.append(counts[~small], counts[small].sum())
    expected = np.append(expected[~small], expected[small].sum())
    if expected[-1] < least and len(expected) > 1:  # still too few: they join the smallest of the others
        smallest = np.argmin(expected[:-1])
        counts[smallest] += counts[-1]
        expected[smallest] += expected[-1]
        counts, expected = counts[:-1], expected[:-1]
    return float(((counts - expected) ** 2 / expected).sum()), max(len(counts) - 1, 1)


def leaves_of(name: str, slots: int) -> np.ndarray:
    random = np.random.default_rng(20)
    if name == "zeros":
        return np.where(random.random(slots) < 0.97, 0, random.integers(1, 1000, slots))
    if name == "one huge":
        return np.where(np.arange(slots) == slots // 3, LEAF_MAX, 40_000)
    if name == "one huge, the rest tiny":
        return np.where(np.arange(slots) == slots - 1, LEAF_MAX, 1)
    if name == "28 bits":
        return np.exp2(random.uniform(0, 28, slots)).astype(np.int64)
    if name == "powers of two":
        return 2 ** (np.arange(slots) % 28)
    if name == "power law":
        return np.maximum(LEAF_MAX // np.arange(1, slots + 1) ** 2, 1)
    return np.ones(slots, np.int64)


ADVERSARIES = ["zeros", "one huge", "one huge, the rest tiny", "28 bits", "powers of two", "power law", "ones"]


def with_leaves(leaves: np.ndarray, **options):
    """A manager whose leaves are just these: priorities in units of 2**-20, alpha 1."""
    replay = NativeReplayManager(len(leaves), alpha=1.0, **options)
    replay.insert(np.arange(len(leaves)), (leaves * 2.0**-20).astype(np.float32))
    return replay


@pytest.mark.parametrize("fanout", [4, 16, 128])
@pytest.mark.parametrize("name", ADVERSARIES)
def test_draws_follow_the_leaves(name, fanout):
    leaves = leaves_of(name, 1500)
    replay = with_leaves(leaves, fanout=fanout, stratified=False, seed=fanout)
    leaves = replay.state_dict()["leaves"]
    counts, draws = np.zeros(len(leaves), np.int64), 0
    for _ in range(40):
        counts += np.bincount(replay.sample(10_000).indices, minlength=len(leaves))
        draws += 10_000
    assert counts[leaves == 0].sum() == 0
    statistic, freedom = chi_square(counts, leaves / leaves.sum(dtype=np.float64) * draws)
    assert statistic < chi_square_bound(freedom)


@pytest.mark.parametrize("name", ADVERSARIES)
def test_strata_hold_each_count_near_its_share(name):
    # In a stratified batch of B an item of share p is drawn from the strata it meets: B p, give or take two.
    leaves = leaves_of(name, 1500)
    replay = with_leaves(leaves, seed=5)
    share = replay.state_dict()["leaves"] / replay.total * 8192
    for _ in range(10):
        counts = np.bincount(replay.sample(8192).indices, minlength=len(leaves))
        assert np.all(np.abs(counts - share) <= 2.0)


@pytest.mark.parametrize("stratified", [True, False])
def test_uniform_draws_are_uniform_over_what_was_written(stratified):
    replay = NativeReplayManager(2000, mode="uniform", stratified=stratified, seed=2)
    written = np.random.default_rng(1).permutation(2000)[:700]
    replay.insert(written)
    counts = np.zeros(2000, np.int64)
    for _ in range(40):
        counts += np.bincount(replay.sample(7000).indices, minlength=2000)
    assert counts.sum() == counts[written].sum()
    statistic, freedom = chi_square(counts[written], np.full(700, 400.0))
    assert statistic < chi_square_bound(freedom)


INCLUSION = {
    "equal": np.full(10, 1000),
    "across every border": np.full(13, 1000),
    "unequal": np.array([5, 1, 8, 8, 2, 13, 3, 1, 9, 6, 4, 11, 7, 2, 10, 12]),
    "some for certain": np.array([1, 90, 2, 3, 4, 300, 5, 6, 7, 8, 40, 9]),
    "all but one for certain": np.array([1000, 1000, 1, 1, 1000, 1000]),
}


def inclusion(masses: np.ndarray, batch: int) -> np.ndarray:
    """Return the probability that a batch holds each: in proportion to its mass, those at 1 or more for certain."""
    certain = np.zeros(len(masses), bool)
    while True:
        left = np.where(certain, 0.0, masses)
        share = (batch - certain.sum()) * left / max(left.sum(), 1.0)
        if not (share >= 1.0).any():
            return np.where(certain, 1.0, share)
        certain |= share >= 1.0


def worst_deviate(held: np.ndarray, batches: int, probability: np.ndarray) -> float:
    """Return the largest deviation of binomial counts, in standard deviations; certainties must hold exactly."""
    certain, never = probability == 1.0, probability == 0.0
    assert (held[certain] == batches).all()
    assert (held[never] == 0).all()
    p = probability[~certain & ~never]
    return float(np.abs((held[~certain & ~never] - batches * p) / np.sqrt(batches * p * (1.0 - p))).max(initial=0.0))


@pytest.mark.parametrize("name", INCLUSION)
def test_batches_without_replacement_hold_each_item_with_its_probability(name):
    leaves = INCLUSION[name]
    replay = with_leaves(leaves, replacement=False, seed=12)
    held, batches = np.zeros(len(leaves), np.int64), 20_000
    for _ in range(batches):
        held[replay.sample(5).indices] += 1
    assert held.sum() == 5 * batches
    assert worst_deviate(held, batches, inclusion(leaves, 5)) < 5.0  # of 16 at most: a false alarm in 100,000


@pytest.mark.parametrize("options", [{"replacement": False}, {"max_times_sampled": 1}])
@pytest.mark.parametrize("batch", [16, 37])
def test_uniform_batches_without_replacement_hold_each_slot_at_its_rate(options, batch):
    capacity = 100
    written = np.random.default_rng(3).permutation(128)[:capacity]
    held, batches = np.zeros(128, np.int64), 15_000
    replay = NativeReplayManager(128, mode="uniform", seed=7, **options)
    replay.insert(written)
    for _ in range(batches):
        indices = replay.sample(batch).indices
        held[indices] += 1
        if "max_times_sampled" in options:
            replay.insert(indices)
    assert held.sum() == held[written].sum() == batch * batches
    assert worst_deviate(held[written], batches, np.full(capacity, batch / capacity)) < 5.2


def test_strata_do_not_follow_the_streams_of_a_ring():
    # One random start for the whole batch would give each batch items of one of 8 interleaved environments.
    replay = NativeReplayManager(1024, mode="uniform", replacement=False, seed=1)
    replay.insert(np.arange(1024))
    assert len(set((replay.sample(64).indices % 8).tolist())) == 8


@pytest.mark.parametrize("stratified", [True, False])
def test_draws_up_to_a_limit_are_in_proportion(stratified):
    # Each draw of a fresh replay, by its place in the batch: the first by share alone.
    leaves = INCLUSION["unequal"]
    first, count = np.zeros(len(leaves), np.int64), np.zeros(len(leaves), np.int64)
    for seed in range(8000):
        replay = with_leaves(leaves, max_times_sampled=3, stratified=stratified, seed=seed)
        indices = replay.sample(8).indices
        first[indices[0]] += 1
        np.add.at(count, indices, 1)
    assert count.max() <= 3 * 8000
    statistic, freedom = chi_square(first, leaves / leaves.sum() * 8000)
    assert statistic < chi_square_bound(freedom)


def test_the_chi_square_test_finds_a_small_bias():
    # The test of the test: a twentieth of the leaves drawn a quarter too often is an alarm.
    leaves = np.full(1500, 1000)
    leaves[:75] = 1250
    replay = with_leaves(leaves, stratified=False, seed=3)
    counts = sum(np.bincount(replay.sample(10_000).indices, minlength=1500) for _ in range(40))
    statistic, freedom = chi_square(counts, np.full(1500, 400_000 / 1500))
    assert statistic > chi_square_bound(freedom)


def draw_many(draws: int) -> None:
    capacity, batch = 100_000, 16_384
    random = np.random.default_rng(6)
    written = random.permutation(capacity)[: capacity // 2]
    priorities = np.where(random.random(len(written)) < 0.5, 0.0, np.exp(random.uniform(-20, 20, len(written))))
    replay = NativeReplayManager(capacity, alpha=0.6, seed=9)
    replay.insert(written, priorities)
    allowed = np.zeros(capacity, bool)
    allowed[written[priorities > 0]] = True
    for _ in range(-(-draws // batch)):
        indices = replay.sample(batch).indices
        assert allowed[indices].all()
        changed = indices[:16]  # some fall to zero, and rise again
        replay.update(changed, np.zeros(len(changed)))
        assert not np.isin(replay.sample(1024).indices, changed).any()
        replay.update(changed, np.exp(random.uniform(-20, 20, len(changed))))


def test_nothing_unwritten_or_of_zero_priority_in_many_draws():
    draw_many(1_000_000)


@pytest.mark.slow
def test_nothing_unwritten_or_of_zero_priority_in_very_many_draws():
    draw_many(100_000_000)


@pytest.mark.parametrize("spread", [False, True])
def test_every_leaf_of_a_large_tree_can_be_reached(spread):
    # By the first and the last target of each, not by luck.
    slots = 2**23
    leaves = np.random.default_rng(3).integers(1, 2**23, slots) if spread else np.full(slots, LEAF_MAX)
    replay = with_leaves(leaves)
    # 24 bits of a float32 hold the first kind exactly; the second are what the manager makes of them.
    ends = np.cumsum(replay.state_dict()["leaves"], dtype=np.uint64)
    assert int(ends[-1]) == replay.total
    expected = np.arange(slots)
    assert np.array_equal(replay._tree.find(ends - np.uint64(1)), expected)
    assert np.array_equal(replay._tree.find(np.concatenate([[np.uint64(0)], ends[:-1]])), expected)
    # And every target is what some 64-bit random number gives.
    targets = [int(t) for t in ends[::997]]
    numbers = np.array([-((-t << 64) // replay.total) for t in targets if t < replay.total], np.uint64)
    assert mulhi64(numbers, replay.total).tolist() == [t for t in targets if t < replay.total]


def mix(replay: NativeReplayManager, seed: int, items: int) -> None:
    random = np.random.default_rng(seed)
    done = 0
    while done < items:
        sample = replay.sample(400)
        priorities = np.exp(random.uniform(-15, 8, 400))
        priorities[random.random(400) < 0.05] = 0.0
        priorities[:1] = np.inf
        replay.update(sample.indices, priorities, sample.generations)
        replay.insert(random.integers(0, replay.capacity, 200), None if done % 3 else priorities[:200])
        done += 1000
        if done % 100_000 == 0:
            replay.set_alpha(random.uniform(0.3, 1.2))


def total_stays_exact(threads: int, items: int, **options) -> None:
    replay = NativeReplayManager(6000, seed=1, **options)
    replay.insert(np.arange(5000))
    workers = [threading.Thread(target=mix, args=(replay, seed, items // threads)) for seed in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    leaves, statistics = replay.state_dict()["leaves"], replay.statistics()
    ends = np.cumsum(leaves, dtype=np.uint64)
    assert replay.total == int(ends[-1])
    assert statistics.samples == items * 2 // 5
    assert statistics.updates + statistics.stale == statistics.samples
    held = replay.state_dict()["generations"] > 0
    bits = np.frexp(leaves[held].astype(np.float64))[1]
    assert statistics.histogram == tuple(np.bincount(bits, minlength=29).tolist())
    # Inner nodes are sums too: each target finds its leaf.
    positive = np.flatnonzero(leaves)
    assert np.array_equal(replay._tree.find(ends[positive] - np.uint64(1)), positive)


@pytest.mark.parametrize(
    "options", [{}, {"replacement": False}, {"mode": "top_k"}], ids=["default", "without", "top_k"]
)
@pytest.mark.parametrize("threads", [1, 4])
def test_the_total_is_exact_after_many_mixed_operations(threads, options):
    total_stays_exact(threads, 1_000_000 if not options else 200_000, **options)


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 4])
def test_the_total_is_exact_after_very_many_mixed_operations(threads):
    total_stays_exact(threads, 10_000_000)


def test_the_reference_draws_as_the_kernel_does():
    leaves = leaves_of("28 bits", 3000)
    for options in ({"stratified": False}, {"replacement": False}, {"max_times_sampled": 3}):
        native = with_leaves(leaves, seed=4, **options)
        reference = ReferenceReplayManager(3000, alpha=1.0, seed=4, **options)
        reference.insert(np.arange(3000), (leaves * 2.0**-20).astype(np.float32))
        for batch in (1, 2, 255, 1000):
            for mine, theirs in zip(native.sample(batch), reference.sample(batch), strict=True):
                assert np.array_equal(mine, theirs)


# --- Distributions nobody announced: hypothesis draws the leaves ----------------------------------------------------

drawn = settings(
    max_examples=EXAMPLES, deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)


@st.composite
def leaf_vectors(draw, longest: int) -> np.ndarray:
    """Leaves of any shape: a family of distributions with drawn parameters, then drawn dents."""
    slots = draw(st.integers(1, longest), label="slots")
    random = np.random.default_rng(draw(st.integers(0, 2**32), label="seed"))
    spread = draw(st.floats(0.0, 28.0), label="spread in bits")
    position = np.arange(slots)
    exponents = {
        "level": np.zeros(slots),
        "scattered": random.uniform(0, 1, slots),
        "bell": 1 / (1 + random.normal(0, 1, slots) ** 2),
        "ramp": position / slots,
        "decay": 1 - np.log1p(position) / np.log1p(slots),
        "steps": (position * draw(st.integers(1, 8)) // slots) / 8,
        "alternating": position % 2.0,
        "one high": (position == random.integers(slots)) * 1.0,
        "one low": (position != random.integers(slots)) * 1.0,
    }
    leaves = np.exp2(spread * exponents[draw(st.sampled_from(sorted(exponents)), label="family")])
    leaves *= random.uniform(1, 1 + draw(st.floats(0, 3), label="noise"), slots)
    zeros = draw(st.sampled_from(["none", "some", "run", "most"]), label="zeros")
    start = random.integers(slots)
    leaves[
        {
            "none": np.zeros(slots, bool),
            "some": random.random(slots) < 0.3,
            "run": (position >= start) & (position < start + slots // 2),
            "most": random.random(slots) < 0.95,
        }[zeros]
    ] = 0
    if not leaves.any():
        leaves[start] = 1
    return np.minimum(leaves, LEAF_MAX).astype(np.int64)


def held(replay) -> np.ndarray:
    """The leaves as the manager holds them: 24 bits of a float32, quantised."""
    return replay.state_dict()["leaves"].astype(np.int64)


@drawn
@given(leaves=leaf_vectors(2000), fanout=st.sampled_from([2, 4, 16, 64, 256]), seed=st.integers(0, 2**63))
def test_independent_draws_follow_any_leaves(leaves, fanout, seed):
    replay = with_leaves(leaves, fanout=fanout, stratified=False, seed=seed)
    leaves, draws = held(replay), 100_000
    counts = np.bincount(replay.sample(draws).indices, minlength=len(leaves))
    assert counts[leaves == 0].sum() == 0
    statistic, freedom = chi_square(counts, leaves / leaves.sum() * draws, MANY)
    assert statistic < chi_square_bound(freedom, RAREST)


@drawn
@given(
    leaves=leaf_vectors(2000),
    fanout=st.sampled_from([2, 4, 16, 64, 256]),
    seed=st.integers(0, 2**63),
    batch=st.integers(1, 5000),
)
def test_each_draw_of_a_stratified_batch_stays_in_its_stratum(leaves, fanout, seed, batch):
    # No chance in it: the k-th draw is a leaf that meets the k-th of equal slices of the total.
    replay = with_leaves(leaves, fanout=fanout, seed=seed)
    ends = np.cumsum(held(replay))
    total = int(ends[-1])
    for _ in range(3):
        indices = replay.sample(batch).indices
        k = np.arange(batch, dtype=object)  # exact, however large the total
        starts = np.where(indices > 0, ends[indices - 1], 0)
        assert np.all(starts.astype(object) * batch < (k + 1) * total)
        assert np.all(ends[indices].astype(object) * batch > k * total)


def batch_law(
    leaves: list[int], batch: int, *, stratified: bool, replacement: bool
) -> Iterator[tuple[tuple[int, ...], float]]:
    """Every batch that can be drawn, in order, and its probability: draw after draw, from the definition."""

    def go_on(left: list[int], k: int) -> Iterator[tuple[tuple[int, ...], float]]:
        if k == batch:
            yield (), 1.0
            return
        total = sum(left)
        low, high = (total * k / batch, total * (k + 1) / batch) if stratified else (0.0, float(total))
        start = 0
        for item, leaf in enumerate(left):
            chance = max(0.0, min(start + leaf, high) - max(start, low)) / (high - low)
            start += leaf
            if chance <= 0.0:
                continue
            after = left if replacement else [0 if other == item else value for other, value in enumerate(left)]
            for rest, probability in go_on(after, k + 1):
                yield (item, *rest), chance * probability

    return go_on(leaves, 0)


def systematic_law(leaves: list[int], batch: int) -> Iterator[tuple[tuple[int, ...], float]]:
    """Yield every batch without replacement that can be drawn stratum by stratum, and its probability."""
    certain: list[int] = []
    while whole := [item for item, leaf in enumerate(leaves) if leaf * (batch - len(certain)) >= sum(leaves) > 0]:
        certain += whole
        leaves = [0 if item in whole else leaf for item, leaf in enumerate(leaves)]
    left, total = batch - len(certain), sum(leaves)
    ends = np.cumsum([leaf * left for leaf in leaves]).tolist()
    starts = [end - leaf * left for leaf, end in zip(leaves, ends, strict=True)]

    def go_on(k: int, last: int) -> Iterator[tuple[tuple[int, ...], float]]:
        if k == left:
            yield (), 1.0
            return
        low, high, chances = k * total, (k + 1) * total, dict[int, float]()
        across = [item for item in range(len(leaves)) if starts[item] < low < ends[item]]
        behind = ends[across[0]] - low if across else 0
        again = behind / (total - (low - starts[across[0]])) if across and across[0] != last else 0.0
        for item in range(len(leaves)):
            overlap = min(ends[item], high) - max(starts[item], low + behind)
            if overlap > 0:
                chances[item] = (1.0 - again) * overlap / (total - behind)
        if again > 0.0:
            chances[across[0]] = again
        for item, chance in chances.items():
            for rest, probability in go_on(k + 1, item):
                yield (item, *rest), chance * probability

    for rest, probability in go_on(0, -1):
        yield (*certain, *rest), probability


@given(leaves=leaf_vectors(7), batch=st.integers(1, 4))
@settings(max_examples=100, deadline=None, derandomize=True, database=None)
def test_the_law_of_systematic_batches_holds_each_item_with_its_probability(leaves, batch):
    batch = min(batch, int(np.count_nonzero(leaves)))
    held_with = np.zeros(len(leaves))
    for items, probability in systematic_law(leaves.tolist(), batch):
        assert len(set(items)) == batch
        held_with[list(items)] += probability
    np.testing.assert_allclose(held_with, inclusion(leaves, batch), atol=1e-9)


@pytest.mark.parametrize("replacement", [True, False], ids=["with", "without"])
@pytest.mark.parametrize("stratified", [True, False], ids=["stratified", "independent"])
@pytest.mark.parametrize("mode", ["prioritized", "uniform"])
@drawn
@given(leaves=leaf_vectors(6), batch=st.integers(1, 3), seed=st.integers(0, 2**63))
def test_whole_batches_have_the_probabilities_of_their_definition(mode, stratified, replacement, leaves, batch, seed):
    replay = with_leaves(leaves, mode=mode, stratified=stratified, replacement=replacement, seed=seed)
    leaves = held(replay) if mode == "prioritized" else np.ones(len(leaves), np.int64)
    if not replacement:
        batch = min(batch, int(np.count_nonzero(leaves)))
    if stratified and not replacement:
        law = dict(systematic_law(leaves.tolist(), batch))
    else:
        law = dict(batch_law(leaves.tolist(), batch, stratified=stratified, replacement=replacement))
    assert math.isclose(sum(law.values()), 1.0)
    draws, found = 1500, dict.fromkeys(law, 0)
    for _ in range(draws):
        drawn_batch = tuple(replay.sample_indices(batch).tolist())
        found[drawn_batch] += 1  # KeyError: a batch that cannot be drawn
    counts = np.array(list(found.values()), np.float64)
    statistic, freedom = chi_square(counts, np.array(list(law.values())) * draws, MANY)
    assert statistic < chi_square_bound(freedom, RAREST)


def test_the_law_of_a_batch_is_not_met_by_another_way_of_drawing():
    # The test of the test: what is drawn independently is no stratified sample.
    replay = with_leaves(np.array([3, 1, 4, 2]), stratified=False, seed=1)
    law = dict(batch_law([3, 1, 4, 2], 2, stratified=True, replacement=True))
    counts = dict.fromkeys(law, 0)
    for _ in range(1500):
        batch = tuple(replay.sample_indices(2).tolist())
        counts[batch] = counts.get(batch, 0) + 1
    assert counts.keys() > law.keys()
    common = np.array([counts[batch] for batch in law], np.float64)
    statistic, freedom = chi_square(common, np.array(list(law.values())) * common.sum())
    assert statistic > chi_square_bound(freedom, RAREST)
