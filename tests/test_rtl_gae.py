"""HEPPO-GAE's element and array in RTL, simulated cycle by cycle: exact results, the promised cycles and errors."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pearl.backends.fpga.gae_shape import LOOKAHEADS, GaeShape
from pearl.errors import ConfigurationError
from pearl.rollout import Codes, NumpyGae, quantized

pytest.importorskip("amaranth", reason="Amaranth is not installed: `make rtl`, or `pip install amaranth`.")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # kernels/rtl is not installed

from kernels.rtl.gae_reference import HIGHEST, LOWEST, CodeScale, Coefficients, Rollout, error_bound, expected, fixed
from kernels.rtl.gae_simulation import run_array, run_element

FRACTION_BITS = 16


def random_rollout(rng, steps, rows=1, *, codes=False, largest=2**31, ends=0.2):
    low, high = (0, 256) if codes else (-largest, largest)
    rewards, values = rng.integers(low, high, (2, steps, rows))
    return Rollout(rewards, values, rng.integers(-largest, largest, rows), rng.random((steps, rows)) < ends)


def after_latency(shape, results):
    """The results of the steps, first step first."""
    return [
        column[shape.element_latency :][::-1] for column in (results.advantages, results.returns, results.saturated)
    ]


def assert_results(shape, coefficients, rollout, advantages, returns, saturated=None):
    wanted = expected(shape, coefficients, rollout)
    np.testing.assert_array_equal(advantages, wanted.advantages)
    np.testing.assert_array_equal(returns, wanted.returns)
    if saturated is not None:
        np.testing.assert_array_equal(saturated, wanted.saturated)


@pytest.mark.parametrize("lookahead", LOOKAHEADS)
def test_rollouts_of_any_length_follow_each_other_without_a_gap(lookahead):
    """Lengths 1 to 9, so T = 1, shorter than the window, and every remainder; numbers up to the limits saturate."""
    shape = GaeShape(lookahead)
    rng = np.random.default_rng(lookahead)
    coefficients = Coefficients.of(shape, 0.99, 0.95)
    sizes = itertools.cycle((2**31, 2**29, 2**20, 2**4))
    rollouts = [random_rollout(rng, steps, largest=next(sizes)) for steps in [*range(1, 10)] * 8]
    advantages, returns, saturated = after_latency(shape, run_element(shape, coefficients, rollouts))
    end = len(advantages)
    for rollout in rollouts:
        start = end - len(rollout.rewards)
        assert_results(shape, coefficients, rollout, advantages[start:end], returns[start:end], saturated[start:end])
        end = start
    assert end == 0
    assert 0 < saturated.mean() < 0.5


@pytest.mark.parametrize("lookahead", LOOKAHEADS)
def test_every_pattern_of_ends_in_and_around_the_window(lookahead):
    shape = GaeShape(lookahead)
    rng = np.random.default_rng(7)
    coefficients = Coefficients.of(shape, 0.9, 0.9)
    steps = 6
    rollouts = []
    for pattern in itertools.product((False, True), repeat=steps):
        rollout = random_rollout(rng, steps, largest=2**24)
        rollouts.append(Rollout(rollout.rewards, rollout.values, rollout.last_values, np.array(pattern)[:, None]))
    advantages, returns, _ = after_latency(shape, run_element(shape, coefficients, rollouts))
    for number, rollout in enumerate(reversed(rollouts)):
        part = slice(number * steps, (number + 1) * steps)
        assert_results(shape, coefficients, rollout, advantages[part], returns[part])


@settings(max_examples=15, deadline=None)
@given(
    st.sampled_from(LOOKAHEADS),
    st.sampled_from((8, 17, 26, 27, 32)),
    st.tuples(st.sampled_from((0.0, 0.5, 0.99, 1.0)), st.sampled_from((0.0, 0.95, 1.0))),
    st.lists(st.integers(1, 7), min_size=1, max_size=5),
    st.integers(0, 4),
    st.integers(0, 2**32 - 1),
)
def test_any_coefficients_and_any_distance_between_rollouts(lookahead, bits, factors, lengths, gap, seed):
    shape = GaeShape(lookahead, coefficient_bits=bits)
    rng = np.random.default_rng(seed)
    coefficients = Coefficients.of(shape, *factors)
    rollouts = [random_rollout(rng, steps) for steps in lengths]
    results = run_element(shape, coefficients, rollouts, gap=gap)
    start = shape.element_latency
    for rollout in rollouts:
        part = slice(start, start + len(rollout.rewards))
        assert_results(
            shape,
            coefficients,
            rollout,
            *(column[part][::-1] for column in (results.advantages, results.returns, results.saturated)),
        )
        start += len(rollout.rewards) + gap


@pytest.mark.parametrize("lookahead", LOOKAHEADS)
def test_a_reward_is_seen_after_the_latency_and_then_in_every_cycle(lookahead):
    shape = GaeShape(lookahead)
    steps = 12
    rewards, nothing = np.zeros((steps, 1), np.int64), np.zeros((steps, 1), np.int64)
    rewards[-1] = 1000
    rollout = Rollout(rewards, nothing, nothing[0], nothing != 0)
    results = run_element(shape, Coefficients.of(shape, 1.0, 1.0), [rollout], cycles=steps + shape.element_latency)
    seen = np.flatnonzero(results.advantages)
    assert seen.tolist() == list(range(shape.element_latency, shape.element_latency + steps))
    assert set(results.advantages[seen, 0]) == {1000}


@pytest.mark.parametrize("codes", [False, True])
@pytest.mark.parametrize(("lookahead", "rows"), [(1, 2), (2, 3), (3, 1)])
def test_the_array_replaces_rollouts_by_results_in_the_cycles_of_the_closed_form(lookahead, rows, codes):
    shape = GaeShape(lookahead, rows, 16, codes=codes)
    rng = np.random.default_rng(rows)
    coefficients = Coefficients.of(shape, 0.99, 0.95)
    scales = CodeScale(-(2**18), 525_123), CodeScale(12_345, 2**26 - 1)
    # Back to back: full, one step, shorter than the pipeline, full again over what the others left.
    rollouts = [random_rollout(rng, steps, rows, codes=codes, largest=2**26) for steps in (16, 1, 5, 16)]
    runs = run_array(shape, coefficients, rollouts, scales if codes else None)
    for rollout, done in zip(rollouts, runs, strict=True):
        numbers = rollout
        if codes:
            rewards, values = (s.decoded(n) for s, n in zip(scales, (rollout.rewards, rollout.values), strict=True))
            numbers = Rollout(rewards, values, rollout.last_values, rollout.ends)
        assert_results(shape, coefficients, numbers, done.advantages, done.returns)
        assert done.busy_cycles == shape.rollout_cycles(len(rollout.rewards))
        assert not done.saturated


def test_the_papers_64_rows_work_side_by_side():
    shape = GaeShape(2, 64, 4)
    rollout = random_rollout(np.random.default_rng(64), 3, 64, largest=2**28)
    coefficients = Coefficients.of(shape, 0.99, 0.95)
    done = run_array(shape, coefficients, [rollout])[0]
    assert_results(shape, coefficients, rollout, done.advantages, done.returns)
    assert done.busy_cycles == shape.rollout_cycles(3)


def test_saturation_is_said_until_the_next_rollout():
    shape = GaeShape(2, 2, 4)
    largest = np.full((3, 2), HIGHEST, np.int64)
    small, none = np.ones((3, 2), np.int64), np.zeros((3, 2), np.bool_)
    mixed = largest.copy()
    mixed[:, 0] = 1
    coefficients = Coefficients.of(shape, 1.0, 1.0)
    rollouts = [Rollout(rewards, small * 0, small[0] * 0, none) for rewards in (largest, small, mixed)]
    runs = run_array(shape, coefficients, rollouts)
    assert [done.saturated for done in runs] == [True, False, True]
    assert runs[2].advantages.tolist() == [[3, HIGHEST], [2, HIGHEST], [1, HIGHEST]]


def test_full_stacks_take_no_step_and_empty_ones_do_not_start():
    shape = GaeShape(2, 1, 4)
    rng = np.random.default_rng(0)
    coefficients = Coefficients.of(shape, 0.99, 0.95)
    runs = run_array(shape, coefficients, [random_rollout(rng, steps) for steps in (0, 4, 0)])
    assert [done.busy_cycles for done in runs] == [0, shape.rollout_cycles(4), 0]
    with pytest.raises(RuntimeError, match="did not take 5 steps"):
        run_array(shape, coefficients, [random_rollout(rng, 5)])


def test_returns_saturate_downwards_too():
    shape = GaeShape(1)
    low = np.array([[LOWEST]])
    rollout = Rollout(low, np.array([[-5]]), np.array([0]), np.array([[True]]))
    results = run_element(shape, Coefficients.of(shape, 0.99, 0.95), [rollout])
    assert (results.advantages[-1, 0], results.returns[-1, 0]) == (LOWEST + 5, LOWEST)
    rollout = Rollout(low, np.array([[5]]), np.array([0]), np.array([[True]]))
    results = run_element(shape, Coefficients.of(shape, 0.99, 0.95), [rollout])
    assert (results.advantages[-1, 0], results.returns[-1, 0], results.saturated[-1, 0]) == (LOWEST, LOWEST + 5, True)


@pytest.mark.parametrize("codes", [False, True])
@pytest.mark.parametrize("lookahead", LOOKAHEADS)
def test_results_are_those_of_floating_point_within_the_derived_bound(lookahead, codes):
    steps, rows, gamma, gae_lambda = 48, 2, 0.99, 0.95
    shape = GaeShape(lookahead, rows, steps, codes=codes)
    rng = np.random.default_rng(11)
    rewards, values = rng.normal(size=(2, steps, rows)).astype(np.float32) * np.float32([[[1]], [[3]]])
    last_values = rng.normal(size=rows).astype(np.float32)
    ends = rng.random((steps, rows)) < 0.05
    coefficients, reference = Coefficients.of(shape, gamma, gae_lambda), NumpyGae(gamma, gae_lambda)
    if codes:
        coded = quantized(rewards, 8, 0.1, 1.1, restored=False), quantized(values, 8, 0.2, 3.0, restored=True)
        largest = max(float(np.abs(code.decoded()).max()) for code in coded)
        scales = CodeScale.of(coded[0], FRACTION_BITS), CodeScale.of(coded[1], FRACTION_BITS)
        sent = [code.codes.astype(np.int64) for code in coded]
        advantages, returns = np.empty_like(rewards), np.empty_like(values)
        reference.estimate_codes(*coded, None, last_values, ends.astype(np.uint8), advantages, returns)
    else:
        largest, scales = float(max(np.abs(rewards).max(), np.abs(values).max())), None
        sent = [fixed(rewards, FRACTION_BITS), fixed(values, FRACTION_BITS)]
        advantages, returns = rewards.copy(), values.copy()
        reference.estimate(advantages, returns, last_values, ends.astype(np.uint8))
    largest = max(largest, float(np.abs(last_values).max()))
    done = run_array(shape, coefficients, [Rollout(*sent, fixed(last_values, FRACTION_BITS), ends)], scales)[0]
    ours, theirs = error_bound(shape, gamma, gae_lambda, steps, largest, FRACTION_BITS)
    worst = max(
        np.abs(done.advantages * 2.0**-FRACTION_BITS - advantages).max(),
        np.abs(done.returns * 2.0**-FRACTION_BITS - returns).max(),
    )
    assert worst <= ours + theirs
    assert ours + theirs < 5e-3  # a bound that says something: numbers reach 10, the unit is 1.5e-5
    assert worst > 2.0**-FRACTION_BITS / 4  # the simulation is no copy of the reference


def test_the_error_bound_holds_without_discount_and_with_coarse_coefficients():
    steps = 64
    for lookahead, bits, gamma in itertools.product(LOOKAHEADS, (12, 26), (1.0, 0.97)):
        shape = GaeShape(lookahead, coefficient_bits=bits)
        rng = np.random.default_rng(bits)
        rewards, values = rng.uniform(-4, 4, (2, steps, 8)).astype(np.float32)
        last_values, none = values[0].copy(), np.zeros((steps, 8), np.bool_)
        numbers = fixed(rewards, FRACTION_BITS), fixed(values, FRACTION_BITS), fixed(last_values, FRACTION_BITS)
        found = expected(shape, Coefficients.of(shape, gamma, 1.0), Rollout(*numbers, none))
        NumpyGae(gamma, 1.0).estimate(rewards, values, last_values, none.astype(np.uint8))
        bound = sum(error_bound(shape, gamma, 1.0, steps, 4.0, FRACTION_BITS))
        worst = np.abs(found.advantages * 2.0**-FRACTION_BITS - rewards).max()
        assert 0 < worst <= bound


def test_closed_forms():
    shape = GaeShape(2, 64, 1024)
    assert [GaeShape(k).element_latency for k in LOOKAHEADS] == [6, 8, 10]
    assert shape.rollout_cycles(1024) == 1033
    assert shape.elements_per_cycle(1024) == pytest.approx(63.4, abs=0.05)
    assert GaeShape(2, codes=True).latency == shape.latency + 2
    assert [GaeShape(k).element_dsps for k in LOOKAHEADS] == [4, 6, 8]
    # With 32-bit coefficients, as many as HEPPO-GAE's Table IV has: 768 for 64 elements.
    assert GaeShape(2, 64, coefficient_bits=32).dsps == 768
    assert GaeShape(2, 64, codes=True).dsps == 64 * 8


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"lookahead": 0}, "1, 2 or 3"),
        ({"lookahead": 4}, "1, 2 or 3"),
        ({"rows": 0}, "one row"),
        ({"horizon": 1}, "two steps"),
        ({"coefficient_bits": 33}, "8 to 32"),
    ],
)
def test_shapes_that_are_no_array_are_refused(arguments, words):
    with pytest.raises(ConfigurationError, match=words):
        GaeShape(**arguments)


def test_coefficients_and_codes_are_rounded_to_nearest():
    shape = GaeShape(3, coefficient_bits=12)
    assert Coefficients.of(shape, 0.99, 0.95) == Coefficients(2028, 1926, 1704)  # times 2048: 2027.5, 1926.1, 1703.7
    assert Coefficients.of(shape, 1.0, 1.0) == Coefficients(2048, 2048, 2048)
    scale = CodeScale.of(Codes(np.zeros((1, 1), np.uint8), -4.0, 8 / 255), 16)
    assert scale == CodeScale(-(2**18), 526_344)  # 8 / 255 * 2**24 = 526344.03
    assert scale.decoded(np.array([0, 255])).tolist() == [-(2**18), 2**18]


def test_what_does_not_fit_is_refused():
    with pytest.raises(ConfigurationError, match="1 to 1024"):
        GaeShape(2).rollout_cycles(1025)
    with pytest.raises(ConfigurationError, match="gamma must lie"):
        Coefficients.of(GaeShape(2), 1.01, 0.95)
    for offset, scale in ((-800.0, 5.0), (np.nan, 1.0), (0.0, np.inf)):
        with pytest.raises(ConfigurationError, match="fewer fraction bits"):
            CodeScale.of(Codes(np.zeros((1, 1), np.uint8), offset, scale), FRACTION_BITS)
    with pytest.raises(ConfigurationError, match=r"codes of up to 8 bits \(uint8\); found uint16"):
        CodeScale.of(quantized(np.zeros((1, 1)), 9, 0.0, 1.0, restored=False), FRACTION_BITS)
    assert fixed(np.array([1e9, -1e9, 0.25]), FRACTION_BITS).tolist() == [HIGHEST, LOWEST, 2**14]
