"""Generalized advantage estimation: what it must be, in closed forms, and in the facts that other libraries test.

The reference and the CPU's kernels are held to it here; contracts/test_advantages.py holds all others to the reference.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pearl import _native
from pearl.backends.cpu.gae import NativeGae
from pearl.errors import ConfigurationError
from pearl.rollout import AdvantageEstimator, NumpyGae

Arrays = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]

each_class = pytest.mark.parametrize("make", [NumpyGae, NativeGae])


@pytest.fixture(params=_native.gae_kernel_variants())
def variant(request: pytest.FixtureRequest) -> Iterator[str]:
    before = _native.selected_gae_kernels()
    _native.select_gae_kernels(request.param)
    yield request.param
    _native.select_gae_kernels(before)


def random_rollout(horizon: int, envs: int, ends: float = 0.2, seed: int = 0) -> Arrays:
    rng = np.random.default_rng(seed)
    rewards, values = rng.normal(size=(2, horizon, envs)).astype(np.float32)
    last_values = rng.normal(size=envs).astype(np.float32)
    return rewards, values, last_values, (rng.random((horizon, envs)) < ends).astype(np.uint8)


def estimated(estimator: AdvantageEstimator, arrays: Arrays) -> tuple[np.ndarray, np.ndarray]:
    """Advantages and returns of copies."""
    rewards, values, last_values, ends = (array.copy() for array in arrays)
    estimator.estimate(rewards, values, last_values, ends)
    return rewards, values


def advantages_in_float64(arrays: Arrays, gamma: float, gae_lambda: float) -> np.ndarray:
    """The definition: of each step, the sum of (gamma lambda)^l delta_{t+l} up to the end of its episode (Eq. 3)."""
    rewards, values, last_values, ends = (array.astype(np.float64) for array in arrays)
    following = np.concatenate([values[1:], last_values[None]])
    deltas = rewards + gamma * following * (ends == 0) - values
    advantages = np.zeros_like(rewards)
    for t, env in np.ndindex(rewards.shape):
        weight = 1.0
        for later in range(t, len(rewards)):
            advantages[t, env] += weight * deltas[later, env]
            weight *= gamma * gae_lambda
            if ends[later, env]:
                break
    return advantages


# --- properties -------------------------------------------------------------------------------------------------------

floats = st.floats(-100, 100, width=32)


@st.composite
def rollouts(draw: st.DrawFn) -> Arrays:
    shape = draw(st.tuples(st.integers(1, 12), st.integers(1, 70)))
    rewards, values = (draw(hnp.arrays(np.float32, shape, elements=floats)) for _ in range(2))
    last_values = draw(hnp.arrays(np.float32, shape[1], elements=floats))
    return rewards, values, last_values, draw(hnp.arrays(np.uint8, shape, elements=st.sampled_from([0, 0, 0, 1, 255])))


@settings(max_examples=200, deadline=None)
@given(
    arrays=rollouts(),
    gamma=st.floats(0, 1),
    gae_lambda=st.floats(0, 1),
    name=st.sampled_from(_native.gae_kernel_variants()),
)
def test_every_variant_has_the_bits_of_numpy(arrays: Arrays, gamma: float, gae_lambda: float, name: str) -> None:
    before = _native.selected_gae_kernels()
    _native.select_gae_kernels(name)
    try:
        found = estimated(NativeGae(gamma, gae_lambda), arrays)
    finally:
        _native.select_gae_kernels(before)
    for ours, expected in zip(found, estimated(NumpyGae(gamma, gae_lambda), arrays), strict=True):
        np.testing.assert_array_equal(ours.view(np.uint32), expected.view(np.uint32))


@settings(max_examples=50, deadline=None)
@given(arrays=rollouts(), gamma=st.floats(0, 1), gae_lambda=st.floats(0, 1))
def test_advantages_are_the_sum_of_the_definition(arrays: Arrays, gamma: float, gae_lambda: float) -> None:
    expected = advantages_in_float64(arrays, gamma, gae_lambda)
    advantages, returns = estimated(NativeGae(gamma, gae_lambda), arrays)
    np.testing.assert_allclose(advantages, expected, rtol=1e-4, atol=2e-3)  # of up to 12 terms of up to 300
    np.testing.assert_allclose(returns, expected + arrays[1], rtol=1e-4, atol=2e-3)


@settings(max_examples=50, deadline=None)
@given(arrays=rollouts(), at=st.integers(0, 11))
def test_steps_before_an_end_do_not_depend_on_what_follows(arrays: Arrays, at: int) -> None:
    rewards, values, _, ends = arrays
    t = at % len(rewards)
    ends[t] = 1
    alone = rewards[: t + 1], values[: t + 1], np.zeros(rewards.shape[1], np.float32), ends[: t + 1]
    for whole, part in zip(estimated(NativeGae(0.9, 0.8), arrays), estimated(NativeGae(0.9, 0.8), alone), strict=True):
        np.testing.assert_array_equal(whole[: t + 1], part)


@settings(max_examples=50, deadline=None)
@given(arrays=rollouts(), order=st.randoms())
def test_environments_are_independent(arrays: Arrays, order: Any) -> None:
    places = list(range(arrays[0].shape[1]))
    order.shuffle(places)
    shuffled = tuple(np.ascontiguousarray(array[..., places]) for array in arrays)
    found = estimated(NativeGae(0.99, 0.95), shuffled)  # type: ignore[arg-type]
    for ours, expected in zip(found, estimated(NativeGae(0.99, 0.95), arrays), strict=True):
        np.testing.assert_array_equal(ours, expected[:, places])


def test_a_rollout_without_the_gil_has_the_same_bits(variant: str) -> None:
    """From 65,536 transitions on, the kernel runs without the GIL."""
    arrays = random_rollout(128, 515)
    for ours, expected in zip(
        estimated(NativeGae(0.99, 0.95), arrays), estimated(NumpyGae(0.99, 0.95), arrays), strict=True
    ):
        np.testing.assert_array_equal(ours, expected)


# --- closed forms -----------------------------------------------------------------------------------------------------


@each_class
def test_lambda_0_gives_the_error_of_one_step(make: Any) -> None:
    arrays = rewards, values, last_values, ends = random_rollout(20, 5)
    advantages, returns = estimated(make(0.9, 0.0), arrays)
    following = np.concatenate([values[1:], last_values[None]])
    target = rewards + 0.9 * following * (ends == 0)
    np.testing.assert_allclose(advantages, target - values, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(returns, target, rtol=1e-5, atol=1e-6)


@each_class
def test_lambda_1_gives_the_discounted_sum_of_rewards(make: Any) -> None:
    """Returns do not depend on values then, except for that of the last observation."""
    arrays = rewards, values, last_values, ends = random_rollout(20, 5)
    _, returns = estimated(make(0.9, 1.0), arrays)
    sums, following = np.zeros_like(rewards), last_values
    for t in reversed(range(20)):
        following = sums[t] = rewards[t] + 0.9 * following * (ends[t] == 0)
    np.testing.assert_allclose(returns, sums, rtol=1e-4, atol=1e-5)
    _, of_other_values = estimated(make(0.9, 1.0), (rewards, values + 3, last_values, ends))
    np.testing.assert_allclose(of_other_values, sums, rtol=1e-4, atol=2e-5)


@each_class
def test_values_that_are_right_leave_no_advantage(make: Any) -> None:
    """A reward of 1 at every step is worth 1 / (1 - gamma)."""
    values = np.full((50, 3), 10.0, np.float32)
    arrays = np.ones((50, 3), np.float32), values, values[0].copy(), np.zeros((50, 3), np.uint8)
    advantages, returns = estimated(make(0.9, 0.95), arrays)
    np.testing.assert_allclose(advantages, 0.0, atol=1e-5)
    np.testing.assert_allclose(returns, 10.0, rtol=1e-6)


@each_class
def test_gamma_0_looks_at_the_reward_alone(make: Any) -> None:
    arrays = random_rollout(9, 4)
    advantages, returns = estimated(make(0.0, 0.95), arrays)
    np.testing.assert_array_equal(advantages, arrays[0] - arrays[1])
    np.testing.assert_allclose(returns, arrays[0], rtol=1e-5, atol=1e-6)


# --- what other libraries test, or do ---------------------------------------------------------------------------------


@each_class
def test_constant_rewards_add_up_to_the_number_of_steps(make: Any) -> None:
    """As Stable-Baselines3 tests rollout buffers: rewards and both factors of 1, values of 0, several episodes."""
    ends = np.zeros((12, 2), np.uint8)
    ends[[3, 7, 11]] = 1
    zeros = np.zeros((12, 2), np.float32)
    advantages, returns = estimated(
        make(1.0, 1.0), (np.ones((12, 2), np.float32), zeros, np.full(2, 9, np.float32), ends)
    )
    steps_left = np.tile([4, 3, 2, 1], 3)[:, None].repeat(2, axis=1)
    np.testing.assert_array_equal(returns, steps_left)
    np.testing.assert_array_equal(advantages, steps_left)


@each_class
def test_an_end_after_the_last_step_leaves_the_last_value_out(make: Any) -> None:
    """CleanRL's `next_done`, Stable-Baselines3's `dones`."""
    rewards, values, last_values, ends = random_rollout(6, 4, ends=0.0)
    ends[-1, :2] = 1
    advantages, _ = estimated(make(0.99, 0.95), (rewards, values, last_values, ends))
    np.testing.assert_allclose(advantages[-1, :2], rewards[-1, :2] - values[-1, :2], rtol=1e-6)
    carried = np.float32(0.99) * last_values[2:]
    np.testing.assert_allclose(advantages[-1, 2:], rewards[-1, 2:] + carried - values[-1, 2:], rtol=1e-6)


@each_class
def test_a_time_limit_is_bootstrapped_through_the_reward(make: Any) -> None:
    """Stable-Baselines3's and Tianshou's rule: a truncated episode goes on in value, not in advantage."""
    rewards, values, last_values, ends = random_rollout(8, 1, ends=0.0)
    final_value, t = np.float32(0.7), 4
    ends[t] = 1
    rewards[t] += np.float32(0.99) * final_value
    advantages, _ = estimated(make(0.99, 0.95), (rewards, values, last_values, ends))
    # The same episode alone, whose rollout ends there and bootstraps from the last observation.
    part = (array[: t + 1].copy() for array in (rewards, values, np.zeros_like(ends)))
    alone, alone_values, no_ends = part
    alone[t] -= np.float32(0.99) * final_value
    expected, _ = estimated(make(0.99, 0.95), (alone, alone_values, np.array([final_value]), no_ends))
    np.testing.assert_allclose(advantages[: t + 1], expected, rtol=1e-5, atol=1e-6)


@each_class
@pytest.mark.parametrize(("gamma", "gae_lambda"), [(0.99, 0.95), (0.5, 0.25), (1.0, 0.9), (0.99, 1.0), (0.99, 0.0)])
def test_the_vectorised_form_and_the_loop_agree(make: Any, gamma: float, gae_lambda: float) -> None:
    """TorchRL tests its vectorised estimate against its loop; here against the definition, in float64."""
    for ends in (0.0, 0.1, 1.0):
        arrays = random_rollout(60, 6, ends)
        advantages, _ = estimated(make(gamma, gae_lambda), arrays)
        np.testing.assert_allclose(advantages, advantages_in_float64(arrays, gamma, gae_lambda), rtol=1e-4, atol=1e-4)


@each_class
def test_episodes_in_one_column_and_each_in_its_own_agree(make: Any) -> None:
    """Tianshou computes one long chain of episodes: the same as each alone."""
    rewards, values, _, ends = random_rollout(12, 1, ends=0.0)
    ends[[4, 11]] = 1
    chain = estimated(make(0.95, 0.9), (rewards, values, np.zeros(1, np.float32), ends))
    for first, last in ((0, 5), (5, 12)):
        alone = rewards[first:last], values[first:last], np.zeros(1, np.float32), ends[first:last]
        for whole, part in zip(chain, estimated(make(0.95, 0.9), alone), strict=True):
            np.testing.assert_array_equal(whole[first:last], part)


# --- variants ---------------------------------------------------------------------------------------------------------


def test_an_unknown_variant_is_refused() -> None:
    before = _native.selected_gae_kernels()
    with pytest.raises(ConfigurationError, match="sse9"):
        _native.select_gae_kernels("sse9")
    assert _native.selected_gae_kernels() == before
