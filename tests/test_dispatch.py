"""Variants of the kernels for several instruction sets: each gives the bits of NumPy, and can be chosen."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from pearl import _native
from pearl.backends.cpu.replay import NativeReplayManager
from pearl.errors import ConfigurationError, ReplayError
from pearl.replay.reference import (
    LEAF_MAX,
    ReferenceReplayManager,
    importance_weights,
    mulhi64,
    quantise,
    stratified,
)

VARIANTS = _native.kernel_variants()
EDGES = np.array(
    [0, -0.0, 1e-45, 1.1754942e-38, 1.1754944e-38, 1e-30, 0.5, 0.99999994, 1, 255.99999, 256, 3.4028235e38, np.inf],
    np.float32,
)


@pytest.fixture(params=VARIANTS)
def variant(request):
    before = _native.selected_kernels()
    _native.select_kernels(request.param)
    yield request.param
    _native.select_kernels(before)


def any_priorities(rng: np.random.Generator, count: int) -> np.ndarray:
    bits = rng.integers(0, 0x7F800001, count, dtype=np.uint32)  # every float32 from 0 to inf is as likely
    return np.concatenate([EDGES, bits.view(np.float32)])


def test_the_fastest_variant_is_the_default():
    assert VARIANTS[0] == "plain"
    code = "from pearl import _native; print(_native.selected_kernels(), _native.selected_gae_kernels())"
    environment = {name: value for name, value in os.environ.items() if name != "PEARL_ISA"}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout.split() == [VARIANTS[-1]] * 2


@pytest.mark.parametrize("name", VARIANTS)
def test_the_environment_chooses_a_variant(name):
    code = "from pearl import _native; print(_native.selected_kernels(), _native.selected_gae_kernels())"
    environment = {**os.environ, "PEARL_ISA": name}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout.split() == [name] * 2


def test_an_unknown_variant_in_the_environment_is_refused_by_name():
    code = "from pearl.backends.cpu.replay import NativeReplayManager as M; M(4).insert([0], [1.0])"
    environment = {**os.environ, "PEARL_ISA": "sse9"}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode != 0
    assert "ConfigurationError" in ran.stderr
    assert "PEARL_ISA must name kernels that this machine has (plain" in ran.stderr
    assert '"sse9"' in ran.stderr


def test_selecting_an_unknown_variant_changes_nothing():
    before = _native.selected_kernels()
    with pytest.raises(ConfigurationError, match="sse9"):
        _native.select_kernels("sse9")
    assert _native.selected_kernels() == before


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.6, 1.0, 4.0])
@pytest.mark.parametrize("scale", [20, 0, -400])
def test_leaves_have_the_bits_of_numpy(variant, alpha, scale):
    priorities = any_priorities(np.random.default_rng(1), 4001)
    np.testing.assert_array_equal(_native.quantise(priorities, alpha, scale), quantise(priorities, alpha, scale))


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0, 4.0])
@pytest.mark.parametrize("count", [1, 5, 8, 19, 4001])
def test_weights_have_the_bits_of_numpy(variant, beta, count):
    rng = np.random.default_rng(2)
    leaves = np.exp2(rng.uniform(0, 28, count)).astype(np.uint32)
    leaves[0] = LEAF_MAX
    expected = importance_weights(leaves, beta)
    np.testing.assert_array_equal(_native.importance_weights(leaves, beta).view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("count", [1, 2, 3, 15, 16, 17, 33, 1000])
@pytest.mark.parametrize("total", [1, 2**28 - 1, 2**64 - 1])
def test_targets_have_the_bits_of_numpy(variant, count, total):
    seed, call = 2**63 + 12345, 2**40 + 7
    expected = mulhi64(stratified(seed, call, count), total)
    np.testing.assert_array_equal(_native.stratified_targets(seed, call, count, total), expected)


@pytest.mark.parametrize("fanout", [2, 4, 8, 16, 32, 64, 128, 256])
def test_a_replay_has_the_bits_of_numpy(variant, fanout):
    capacity = 3001
    native = NativeReplayManager(capacity, fanout=fanout, seed=fanout)
    reference = ReferenceReplayManager(capacity, fanout=fanout, seed=fanout)
    rng = np.random.default_rng(fanout)
    for batch in (1, 15, 16, 17, 64, 65, 130, 1000):
        slots = rng.integers(0, capacity, 300)
        priorities = rng.choice(any_priorities(rng, 300)[: 13 if batch == 17 else 313], 300)
        for replay in (native, reference):
            replay.insert(slots, priorities)
        assert native.total == reference.total
        samples = [replay.sample(batch, 0.7) for replay in (native, reference)]
        for ours, expected in zip(*samples, strict=True):
            np.testing.assert_array_equal(ours, expected)
        new = rng.uniform(0, 3, batch).astype(np.float32)
        for replay in (native, reference):
            replay.update(samples[0].indices, new)
        assert native.total == reference.total
    np.testing.assert_array_equal(native.retrieve(np.arange(capacity)), reference.retrieve(np.arange(capacity)))


@pytest.mark.parametrize("mode", ["prioritized", "uniform"])
@pytest.mark.parametrize("batch", [1, 32, 1000])
def test_indices_alone_are_those_of_a_sample(variant, mode, batch):
    replays = [NativeReplayManager(500, mode=mode, seed=3) for _ in range(2)]
    for replay in replays:
        replay.insert(np.arange(400), np.linspace(0.1, 5, 400, dtype=np.float32))
    for _ in range(3):  # either way counts as a call
        np.testing.assert_array_equal(replays[0].sample_indices(batch), replays[1].sample(batch).indices)
    assert replays[0].statistics().samples == replays[1].statistics().samples == 3 * batch


def test_indices_alone_are_refused_as_a_sample_is():
    replay = NativeReplayManager(4)
    with pytest.raises(ReplayError, match="empty"):
        replay.sample_indices(2)
    replay.insert([0])
    with pytest.raises(ReplayError, match="at least 1"):
        replay.sample_indices(0)
