"""The arithmetic of the sum tree: quantisation, random numbers, the distribution of samples."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pearl.backends.cpu.replay import NativeReplayManager
from pearl.replay.reference import (
    LEAF_MAX,
    ReferenceReplayManager,
    excess_bits,
    importance_weights,
    mulhi64,
    philox4x32,
    quantise,
    stratified,
)

FANOUTS = (2, 4, 16, 256)


@pytest.mark.parametrize(
    ("counter", "seed", "words"),
    [
        ((0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((2**32 - 1,) * 4, 2**64 - 1, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ],
)
def test_philox_gives_the_published_words(counter, seed, words):
    assert tuple(philox4x32(np.array([counter], np.uint64), seed)[0]) == words


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_mulhi64_is_the_high_half_of_the_product(a, b):
    assert int(mulhi64(np.array([a], np.uint64), b)[0]) == a * b >> 64


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1), st.integers(1, 300))
def test_stratified_numbers_stay_in_their_slices(seed, call, count):
    x = stratified(seed, call, count)
    width = 2**64 // count
    assert all(k * width <= int(value) < (k + 1) * width for k, value in enumerate(x)) or count == 1


@pytest.mark.parametrize("alpha", [0.0, 0.2, 0.6, 1.0, 1.7, 4.0])
def test_quantised_powers_agree_with_math_pow(alpha):
    priorities = np.exp2(np.linspace(-18, 18, 20011)).astype(np.float32)
    exact = np.array([math.pow(float(p), alpha) for p in priorities]) * 2.0**20
    inside = (exact >= 2**8) & (exact < LEAF_MAX)
    leaves = quantise(priorities, alpha, 20).astype(np.float64)
    assert inside.sum() > 1000
    assert np.all(np.abs(leaves - exact)[inside] <= 0.5 + 1e-6 * exact[inside])
    # With the resolution out of the way: one unit is 2**-27 of the value.
    for p in priorities[::97]:
        scale = 27 - math.floor(alpha * math.log2(p))
        scale -= excess_bits(float(p), alpha, scale)
        value = int(quantise(np.array([p]), alpha, scale)[0])
        assert value == pytest.approx(math.pow(float(p), alpha) * 2.0**scale, rel=2e-7, abs=0.5)


@pytest.mark.parametrize("priority", [1e-45, 1e-38, 1e-10, 1.0, 255.0, 1e10, 3.4e38])
@pytest.mark.parametrize("alpha", [0.1, 0.6, 1.0, 4.0])
def test_extreme_priorities_are_accurate_once_scaled(priority, alpha):
    p = np.float32(priority)
    exponent = alpha * math.log2(float(p))
    scale = 27 - math.floor(exponent)
    scale -= excess_bits(float(p), alpha, scale)
    leaf = int(quantise(np.array([p]), alpha, scale)[0])
    assert math.log2(leaf) - scale == pytest.approx(exponent, abs=1e-6 / math.log(2) + 2**-26)


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0, 4.0])
def test_importance_weights_agree_with_math_pow(beta):
    leaves = np.unique(np.exp2(np.linspace(0, 28, 5001)).astype(np.uint32))
    leaves = leaves[leaves <= LEAF_MAX]
    weights = importance_weights(leaves, beta)
    assert weights.dtype == np.float32
    np.testing.assert_allclose(weights, (1.0 / leaves.astype(np.float64)) ** beta, rtol=1e-6)
    assert weights.max() == 1.0
    assert weights.min() > 0.0


@pytest.mark.parametrize("fanout", FANOUTS)
def test_sampling_follows_the_priorities(fanout):
    # Chi-square with a fixed seed; 4.5 standard deviations of the statistic would be a false alarm of about 1e-5.
    slots, draws = 50, 200_000
    priorities = np.random.default_rng(1).exponential(1.0, slots).astype(np.float32)
    priorities[::7] = 0.0
    replay = NativeReplayManager(slots, fanout=fanout, alpha=0.7, seed=11)
    replay.insert(np.arange(slots), priorities)
    counts = np.zeros(slots)
    for _ in range(draws):  # one lane a call: no stratification to flatter the counts
        counts[replay.sample(1).indices[0]] += 1
    expected = priorities.astype(np.float64) ** 0.7
    expected *= draws / expected.sum()
    positive = expected > 0
    assert counts[~positive].sum() == 0
    freedom = positive.sum() - 1
    statistic = ((counts - expected)[positive] ** 2 / expected[positive]).sum()
    assert abs(statistic - freedom) < 4.5 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("manager", [NativeReplayManager, ReferenceReplayManager])
def test_strata_spread_a_batch_evenly(manager):
    replay = manager(1000, alpha=1.0, seed=3)
    replay.insert(np.arange(1000), np.ones(1000))
    for _ in range(20):
        indices = replay.sample(100).indices
        assert np.all(np.abs(indices - (10 * np.arange(100) + 4.5)) <= 6)


@pytest.mark.parametrize("fanout", FANOUTS)
@pytest.mark.parametrize("capacity", [1, 2, 15, 16, 17, 255, 256, 257, 2999])
def test_every_leaf_can_be_reached(fanout, capacity):
    replay = NativeReplayManager(capacity, fanout=fanout, alpha=1.0, seed=0)
    replay.insert(np.arange(capacity), np.ones(capacity))
    assert np.array_equal(np.unique(replay.sample(capacity * 4).indices), np.arange(capacity))


def test_weights_are_those_of_the_probabilities():
    replay = NativeReplayManager(8, alpha=1.0, seed=0)
    priorities = np.array([1, 2, 3, 4, 5, 6, 7, 8], np.float32)
    replay.insert(np.arange(8), priorities)
    sample = replay.sample(64, beta=0.5)
    probability = priorities[sample.indices] / priorities.sum()
    weights = (8 * probability) ** -0.5
    np.testing.assert_allclose(sample.weights, weights / weights.max(), rtol=1e-6)


@pytest.mark.parametrize("manager", [NativeReplayManager, ReferenceReplayManager])
def test_seeds_are_whole_numbers_of_any_kind(manager):
    for seed in (-1, 2**64 - 1, np.int64(-1)):
        assert manager(4, seed=seed).state_dict()["seed"] == 2**64 - 1
