"""The learner's pipeline stepped cycle by cycle, and the closed forms of what it takes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pearl.errors import ConfigurationError, DeviceError

pytest.importorskip("numba", reason="numba is not installed: `make rtl`, or `pip install numba`.")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # kernels/rtl is not installed

from kernels.rtl import cycles
from kernels.rtl.learner_stages import (
    Learner,
    Stage,
    balanced_unrolls,
    exact_depths,
    learner_of,
    operations_of,
    proportional_unrolls,
)
from kernels.rtl.stage_simulator import simulate

WIDTHS = st.lists(st.integers(1, 300), min_size=2, max_size=6)


def chain(*stages):
    """Stages (interval, latency) in a row."""
    names = [f"S{k}" for k in range(len(stages))]
    return Learner(
        tuple(
            Stage(names[k], (names[k - 1],) if k else (), 1, 1, interval, latency)
            for k, (interval, latency) in enumerate(stages)
        ),
        1,
        0,
    )


def test_stages_by_hand():
    # 3, 5 and 2 cycles an item, nothing overlapping within a stage: the first item after 10, then one every 5.
    assert simulate(chain((3, 3), (5, 5), (2, 2)), 4, 1).cycles == 10 + 3 * 5
    # A stage that takes an item every cycle and gives it on after 7.
    assert simulate(chain((1, 7), (1, 1)), 5, 1).cycles == 8 + 4


def test_a_buffer_too_shallow_slows_a_pipeline_down_and_never_stops_it():
    fork = Learner(
        (
            Stage("A", (), 1, 1, 2, 2),
            Stage("B", ("A",), 1, 1, 2, 2),
            Stage("C", ("B",), 1, 1, 2, 2),
            Stage("D", ("C", "A"), 1, 1, 2, 2),
        ),
        1,
        0,
    )
    # With room for one item, A waits until D has taken the item before.
    assert simulate(fork, 3, 1).cycles > simulate(fork, 3, exact_depths(fork)).cycles == 8 + 2 * 2
    assert exact_depths(fork)["A", "D"] == 2


@settings(max_examples=150, deadline=None)
@given(WIDTHS, st.integers(20, 4000), st.integers(1, 5), st.integers(1, 200), st.integers(0, 9), st.integers(0, 40))
def test_the_closed_form_is_what_the_stages_take(widths, multipliers, pipelines, batch, latency, update):
    unrolls = balanced_unrolls(widths, multipliers)
    learner = learner_of(widths, unrolls, pipelines=pipelines, update_unroll=update, arithmetic_latency=latency)
    depths = exact_depths(learner)
    done = simulate(learner, batch, depths)
    assert done.cycles == cycles.learner_cycles(learner, batch)
    assert max(done.busy.values()) <= 1
    assert all(done.held[edge] <= depths[edge] for edge in depths)


@given(WIDTHS, st.integers(16, 4000))
def test_no_other_unrolling_with_as_many_multipliers_is_faster(widths, multipliers):
    unrolls = balanced_unrolls(widths, multipliers)
    operations = {name: count for name, (count, _) in operations_of(widths).items()}
    slowest = max(-(-operations[name] // unroll) for name, unroll in unrolls.items())
    assert sum(unrolls.values()) <= multipliers
    if slowest > 1:
        assert sum(-(-count // (slowest - 1)) for count in operations.values()) > multipliers


def test_stages_and_ratios_of_the_papers_network():
    operations = operations_of((4, 64, 2))
    assert len(operations) == 6  # 3 (L - 1), the input counted as a layer
    assert proportional_unrolls((4, 64, 2), 16) == {"FP1": 32, "FP2": 16, "LOSS": 16, "GA2": 16, "BP2": 16, "GA1": 32}
    assert operations["GA1"] == (256, ("BP2",))
    assert operations["BP2"][1] == ("LOSS", "FP1")


def test_the_equations_as_printed():
    assert cycles.eq6(64, 3, 10) == 700
    assert cycles.cf22_pipeline(32, 3, 8) == 296


def test_what_cannot_be_built_is_refused():
    with pytest.raises(ConfigurationError, match="a multiplier each"):
        balanced_unrolls((4, 64, 2), 5)
    with pytest.raises(ConfigurationError, match="input and an output"):
        operations_of((4,))
    learner = learner_of((4, 64, 2), balanced_unrolls((4, 64, 2), 6))
    with pytest.raises(ConfigurationError, match="at least one item"):
        simulate(learner, 8, 0)
    with pytest.raises(DeviceError, match="not done after"):
        simulate(learner, 8, 4, cycle_limit=100)


def test_the_exploration_finds_the_papers_design_point():
    pytest.importorskip("amaranth", reason="Amaranth is not installed: `make rtl`, or `pip install amaranth`.")
    from benchmarks.rtl import exploration

    # CF'22 Table 2 for DQN: PI = BS / 2, DP = 2, 32 units in the largest stage, 1600 DSPs; 5 DSPs an fp32 multiply-add.
    points = exploration((4, 64, 2), 64, 1600 // 5)
    best = min(points, key=lambda point: point["CF'22 cycles"])
    assert (best["PI"], best["DP"], best["largest unroll"]) == (32, 2, 32)
    assert best == min(points, key=lambda point: point["simulated cycles"])
