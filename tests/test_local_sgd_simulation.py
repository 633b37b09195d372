"""The simulation of local SGD against what can be computed."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pearl.errors import ConfigurationError
from pearl.local_sgd.simulation import Network, Phases, _on_own_cores, _on_shared_cores, simulate


@given(
    st.integers(1, 64), st.integers(1, 64), *(st.floats(0.0, most) for most in (1e4, 100.0, 1e3)), st.floats(1.0, 1e4)
)
def test_equal_steps_cost_what_equation_5_5_says(
    learners: int, every: int, average_us: float, each_us: float, round_us: float, step_us: float
) -> None:
    found = simulate(Phases(np.full(7, step_us), average_us, each_us, round_us), learners, every, rounds=3)
    iteration_us = step_us + (average_us + each_us * learners + round_us) / every
    assert found.steps_per_s == pytest.approx(learners / iteration_us * 1e6)
    assert found.efficiency == pytest.approx(step_us / iteration_us)
    assert found.waiting == pytest.approx(0.0, abs=1e-9)
    assert found.training + found.waiting + found.averaging == pytest.approx(1.0)


def test_the_slowest_of_a_round_is_waited_for() -> None:
    """Of two Learners with exponential steps, one waits: E max = 1.5 of the mean; of many steps in a row, less."""
    steps = np.random.default_rng(0).exponential(100.0, 200_000)
    one = simulate(Phases(steps), 2, 1, rounds=40_000)
    assert one.efficiency == pytest.approx(1 / 1.5, rel=0.02)
    assert one.limit == "stragglers"
    efficiencies = [simulate(Phases(steps), 2, every, rounds=5_000).efficiency for every in (1, 8, 64)]
    assert efficiencies == sorted(efficiencies)
    # Gamma distributed sums: E max of two is H + sqrt(H / pi), for many steps.
    assert efficiencies[2] == pytest.approx(64 / (64 + np.sqrt(64 / np.pi)), rel=0.01)


def test_slow_times_last() -> None:
    """Ten slow steps in a row of a hundred are not averaged out by H = 10."""
    steps = np.where(np.arange(100) % 100 < 10, 1000.0, 100.0)
    shuffled = np.random.default_rng(0).permutation(steps)
    in_a_row = simulate(Phases(steps), 8, 10).efficiency
    assert in_a_row < 0.8 * simulate(Phases(shuffled), 8, 10).efficiency


def test_more_learners_than_cores_share_them() -> None:
    phases = Phases(np.full(4, 100.0))
    four, two = simulate(phases, 4, 8, cores=2), simulate(phases, 2, 8, cores=2)
    assert four.steps_per_s == pytest.approx(two.steps_per_s)
    assert four.efficiency == pytest.approx(1.0)
    # Of three on two cores, all go at 2/3 until the quickest has done; the others then have a core each.
    uneven = Phases(np.array([100.0, 300.0]))
    round_us = (150 + 450) / 8 + 6 / 8 * (150 + 200)
    found = simulate(uneven, 3, 1, cores=2, rounds=4_000)
    assert found.steps_per_s == pytest.approx(3 / round_us * 1e6, rel=0.02)
    # On one core, nobody waits for the slowest while nothing is done.
    assert simulate(uneven, 4, 1, cores=1, rounds=2_000).efficiency == pytest.approx(1.0, rel=0.02)


@pytest.mark.parametrize(("overlap", "average_us"), [(0, 50.0), (2, 50.0), (4, 1_000.0)])
def test_shares_of_cores_are_whole_if_there_are_enough(overlap: int, average_us: float) -> None:
    """Both ways to compute agree where nothing is shared."""
    steps = np.random.default_rng(0).exponential(100.0, (2, 50, 3))
    own, shared = (
        _on_own_cores(*steps, average_us, takes_last=not overlap),
        _on_shared_cores(*steps, average_us, 4, takes_last=not overlap),
    )
    np.testing.assert_allclose(own, shared)


def test_all_wait_for_the_slowest_core() -> None:
    """Steps of 100 us, on one core half as fast: all take 200 us, and the others wait for half of that."""
    found = simulate(Phases(np.full(4, 100.0), average_us=80.0), 4, 8, scales=(1.0, 1.0, 2.0, 1.0))
    assert 4 / found.steps_per_s * 1e6 == pytest.approx(200.0 + 80.0 / 8)
    assert found.training == pytest.approx(125.0 / 210.0)
    assert found.waiting == pytest.approx(75.0 / 210.0)
    with pytest.raises(ConfigurationError, match="scales must be 2 numbers above 0"):
        simulate(Phases(np.full(4, 100.0)), 2, 8, scales=(1.0,))


def test_an_overlapped_average_costs_only_what_is_longer_than_the_steps() -> None:
    phases = Phases(np.full(4, 100.0), average_us=300.0)
    assert simulate(phases, 2, 4, overlap=4).efficiency == pytest.approx(1.0)
    assert simulate(phases, 2, 1, overlap=1).efficiency == pytest.approx(1 / 3, rel=1e-3)
    # A Learner's own work for an average is not hidden.
    assert simulate(Phases(np.full(4, 100.0), 300.0, round_us=80.0), 2, 4, overlap=4).efficiency == pytest.approx(
        400 / 480
    )
    # On one core, it takes the time of steps.
    assert simulate(phases, 2, 4, overlap=4, cores=1).efficiency == pytest.approx(800 / 1_100, rel=1e-3)


def test_a_server_s_link_is_shared_and_a_ring_s_is_not() -> None:
    network = Network(1_000_000, gbps=10.0, latency_us=50.0)
    assert network.average_us(1) == 0.0
    assert network.average_us(8) == pytest.approx(2 * (8 * 3_200 + 50))
    ring = Network(1_000_000, gbps=10.0, latency_us=50.0, topology="ring")
    assert ring.average_us(8) == pytest.approx(14 * (400 + 50))
    phases = Phases(np.full(4, 1_000.0))
    by_server, by_ring = (simulate(phases, 64, 32, network=net).efficiency for net in (network, ring))
    assert by_server < by_ring
    assert simulate(phases, 1024, 32, network=network).limit == "averaging"


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: Phases(np.array([])), "step_us"),
        (lambda: Phases(np.array([1.0, 0.0])), "step_us"),
        (lambda: Phases(np.ones(1), average_us=-1.0), "average_us"),
        (lambda: Network(0, 1.0, 1.0), "parameters"),
        (lambda: Network(1, 1.0, 1.0, "star"), "topology"),  # type: ignore[arg-type]
        (lambda: simulate(Phases(np.ones(1)), 0, 1), "learners"),
    ],
)
def test_bad_values_are_named(make: object, what: str) -> None:
    with pytest.raises(ConfigurationError, match=what):
        make()  # type: ignore[operator]
