"""The learner's matrix products, for each instruction set, against NumPy in float64; how a variant is chosen."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pearl import _native
from pearl.errors import ConfigurationError, TrainerError

VARIANTS = _native.learner_kernel_variants()
CHOICE = "from pearl import _native; print(_native.selected_learner_kernels())"
sizes = st.integers(1, 70) | st.integers(64, 260)  # AMX takes the larger ones


@contextlib.contextmanager
def using(name: str, precision: str = "highest") -> Iterator[None]:
    before = _native.selected_learner_kernels()
    _native.select_learner_kernels(name)
    _native.select_matmul_precision(precision)
    try:
        yield
    finally:
        _native.select_matmul_precision("highest")
        _native.select_learner_kernels(before)


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest) -> Iterator[str]:
    with using(request.param):
        yield request.param


def chosen(isa: str | None, code: str = CHOICE) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PEARL_ISA"}
    environment |= {} if isa is None else {"PEARL_ISA": isa}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)


# What each element may differ by, for the sum of its products' sizes: of float32, and of products of 16 bits.
PRECISIONS = {"highest": 1e-6, "high": 2e-5}


@pytest.mark.parametrize(("name", "precision"), [*((name, "highest") for name in VARIANTS), (VARIANTS[-1], "high")])
@pytest.mark.parametrize("by_columns", [False, True])
@settings(max_examples=60, deadline=None)
@given(m=sizes, n=sizes, depth=sizes, relu=st.booleans(), accumulate=st.booleans(), gated=st.booleans())
def test_products_are_those_of_numpy(
    by_columns: bool, name: str, precision: str, m: int, n: int, depth: int, relu: bool, accumulate: bool, gated: bool
) -> None:
    rng = np.random.default_rng(m * 5000 + n * 71 + depth)
    a, b, c, gate = (rng.normal(size=s).astype(np.float32) for s in ((m, depth), (depth, n), (m, n), (m, n)))
    bias = rng.normal(size=m).astype(np.float32)
    expected = a.astype(np.float64) @ b + bias[:, None] + (c if accumulate else 0)
    # What rounding may do to each element, whatever the order of the sum.
    sizes_of_sums = np.abs(a).astype(np.float64) @ np.abs(b) + np.abs(bias)[:, None] + np.abs(c)
    bound = PRECISIONS[precision] * sizes_of_sums + 1e-6
    expected = np.maximum(expected, 0) if relu else expected
    expected = np.where(gate > 0, expected, 0) if gated else expected
    left, found = np.asfortranarray(a) if by_columns else a, c.copy()
    with using(name, precision):
        _native.gemm(left, b, found, bias, gate if gated else None, relu=relu, accumulate=accumulate)
    assert (np.abs(found - expected) <= bound).all()


def test_nan_and_infinity_pass_through(variant: str) -> None:
    a, b = np.ones((3, 2), np.float32), np.ones((2, 5), np.float32)
    a[1, 0], a[2, 1] = np.nan, np.inf
    c = np.zeros((3, 5), np.float32)
    _native.gemm(a, b, c, relu=True)
    np.testing.assert_array_equal(c, np.array([2, np.nan, np.inf], np.float32)[:, None].repeat(5, axis=1))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_numbers_next_to_zero_leave_others_alone(variant: str, precision: str) -> None:
    rng = np.random.default_rng(5)
    a, b = rng.normal(size=(128, 128)).astype(np.float32), rng.normal(size=(128, 128)).astype(np.float32)
    expected, c = a.copy(), np.zeros((128, 128), np.float32)
    a[:, 64:] = rng.integers(0, 1 << 25, (128, 64), dtype=np.uint32).view(np.float32)  # all below 1e-36
    a[::2, 65::2] = np.uint32(0x7F80).view(np.float32)  # whose lower half has the bits of an infinite bfloat16
    expected[:, 64:] = 0
    with using(variant, precision):
        _native.gemm(a, b, c)
    np.testing.assert_allclose(c, expected.astype(np.float64) @ b, rtol=0, atol=2e-3)


def test_matrices_that_do_not_fit_are_refused(variant: str) -> None:
    a, b, c = (np.zeros(shape, np.float32) for shape in ((3, 4), (5, 6), (3, 6)))
    with pytest.raises(TrainerError, match=r"\(3, 4\), \(5, 6\) and \(3, 6\)"):
        _native.gemm(a, b, c)
    with pytest.raises(TrainerError, match="bias must hold 3 numbers; found 2"):
        _native.gemm(a, b[:4], c, bias=np.zeros(2, np.float32))


def test_tanh_is_exact_to_rounding(variant: str) -> None:
    network = _native.Network(1, [("tanh", 0, -1, 1, -1, -1, 0.0)], 0)
    ends = np.array([0, -0.0, 1e-30, -1e-30, 0.625, -0.625, 9.02, -30, 1e30, -np.inf, np.inf], np.float32)
    x = np.concatenate([ends, np.linspace(-12, 12, 20_001, dtype=np.float32)])
    found = network.forward(np.zeros(0, np.float32), x[:, None])[:, 0]
    expected = np.tanh(x.astype(np.float64))
    assert (np.abs(found - expected) <= 3e-7 * np.abs(expected)).all()
    assert (np.abs(found) <= 1).all()
    assert (np.sign(found) == np.sign(x)).all()
    assert np.isnan(network.forward(np.zeros(0, np.float32), np.full((1, 1), np.nan, np.float32))).all()


def test_the_fastest_variant_is_the_default() -> None:
    assert VARIANTS[0] == "plain"
    assert chosen(None).stdout.strip() == VARIANTS[-1]


@pytest.mark.parametrize("name", VARIANTS)
def test_the_environment_chooses_a_variant(name: str) -> None:
    assert chosen(name).stdout.strip() == name


@pytest.mark.skipif("amx" not in VARIANTS, reason="needs AMX")
def test_a_precision_is_chosen_by_name() -> None:
    rng = np.random.default_rng(3)
    a, b = (rng.normal(size=(200, 200)).astype(np.float32) for _ in range(2))
    exact, differences = a.astype(np.float64) @ b, {}
    for precision in PRECISIONS:
        c = np.zeros((200, 200), np.float32)
        with using("amx", precision):
            _native.gemm(a, b, c)
        differences[precision] = float(np.abs(c - exact).max())
    # Thirty products' last digits apart: both are in use, and the better one is float32's.
    assert differences["highest"] < 2e-5 < differences["high"] < 2e-3
    with pytest.raises(ConfigurationError, match=r'must be "highest" \(float32\) or "high"'):
        _native.select_matmul_precision("medium")


def test_an_unknown_variant_is_refused_by_name() -> None:
    ran = chosen("sse9")
    assert ran.returncode != 0
    assert "ConfigurationError: PEARL_ISA must name kernels that this machine has (plain" in ran.stderr
    before = _native.selected_learner_kernels()
    with pytest.raises(ConfigurationError, match="sse9"):
        _native.select_learner_kernels("sse9")
    assert _native.selected_learner_kernels() == before


def test_an_unknown_variant_is_no_reason_to_take_a_slower_policy() -> None:
    code = (
        "from gymnasium import spaces; from pearl.actors.policy_plan import read_policy; from pearl.algorithms import "
        "DQN; print(read_policy(DQN(spaces.Box(-1, 1, (4,)), spaces.Discrete(2))))"
    )
    ran = chosen("sse9", code)
    assert "ConfigurationError: PEARL_ISA must name kernels" in ran.stderr.splitlines()[-1]
