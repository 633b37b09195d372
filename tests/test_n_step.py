"""n-step transitions, against an obvious reference that walks each environment's episodes."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from pearl.actors.n_step import NStepWindow
from pearl.spec import TransitionSpec

SPEC = TransitionSpec.from_spaces(spaces.Box(-1e6, 1e6, (2,), np.float32), spaces.Discrete(1000))
GAMMA = 0.5  # sums of whole rewards are then exact, so that transitions can be compared as they are


class Step(NamedTuple):
    obs: float
    action: int
    reward: float
    next_obs: float
    terminated: bool
    done: bool
    real: bool


class Transition(NamedTuple):
    obs: float
    action: int
    reward: float
    next_obs: float
    discount: float


def reference(steps: list[Step], n: int, gamma: float) -> Counter[Transition]:
    """Transitions of one environment: from each step of an episode to `n` steps later, or to the episode's end."""
    episodes: list[list[Step]] = [[]]
    for step in steps:
        if step.real:
            episodes[-1].append(step)
            if step.done:
                episodes.append([])
    found: Counter[Transition] = Counter()
    for episode in episodes:
        for i, first in enumerate(episode):
            part = episode[i : i + n]
            last = part[-1]
            if len(part) < n and not last.done:
                continue  # not complete yet
            total = sum(gamma**k * step.reward for k, step in enumerate(part))
            discount = 0.0 if last.terminated else gamma ** len(part)
            found[Transition(first.obs, first.action, total, last.next_obs, discount)] += 1
    return found


def window_of(environments: list[list[Step]], n: int, gamma: float) -> tuple[Counter[Transition], list[int]]:
    """The same from an NStepWindow, with the rows that each push completed."""
    envs, count = len(environments), len(environments[0])
    window = NStepWindow(SPEC, envs, n, gamma)
    out = SPEC.empty(3 + envs * count + window.most_rows)
    row, pushed = 3, []
    for t in range(count):
        at = [steps[t] for steps in environments]
        arrays = {name: np.array([getattr(step, name) for step in at]) for name in Step._fields}
        before = row
        row = window.push(
            np.repeat(arrays["obs"][:, None], 2, 1),
            arrays["action"],
            arrays["reward"],
            np.repeat(arrays["next_obs"][:, None], 2, 1),
            arrays["terminated"],
            arrays["done"],
            arrays["real"],
            out,
            row,
        )
        pushed.append(row - before)
        assert pushed[-1] <= window.most_rows
    assert np.array_equal(out["obs"][3:row, 0], out["obs"][3:row, 1])
    assert np.array_equal(out["next_obs"][3:row, 0], out["next_obs"][3:row, 1])
    columns = (out["obs"][:, 0], out["action"], out["reward"], out["next_obs"][:, 0], out["discount"])
    return Counter(Transition(*(c[i].item() for c in columns)) for i in range(3, row)), pushed


@st.composite
def vectors(draw: st.DrawFn) -> list[list[Step]]:
    """Steps of several environments, each observation and action a number of its own; autoreset of either mode."""
    envs, count = draw(st.integers(1, 4)), draw(st.integers(1, 30))
    next_step = draw(st.booleans())
    ends = st.sampled_from(["", "", "", "terminated", "truncated", "both"])
    environments = []
    for env in range(envs):
        steps: list[Step] = []
        for t in range(count):
            number = 100 * env + t
            end, reward = draw(ends), draw(st.integers(-8, 8))
            if next_step and steps and steps[-1].done and steps[-1].real:
                # The reset itself: whatever the vector says of it is nobody's transition.
                steps.append(Step(number, 999, reward, number + 0.5, False, False, False))
            else:
                steps.append(Step(number, number, reward, number + 0.5, end in ("terminated", "both"), bool(end), True))
        environments.append(steps)
    return environments


@settings(max_examples=300, deadline=None)
@given(vectors(), st.integers(1, 5))
def test_transitions_are_those_of_the_reference(environments: list[list[Step]], n: int) -> None:
    expected: Counter[Transition] = Counter()
    for steps in environments:
        expected += reference(steps, n, GAMMA)
    assert window_of(environments, n, GAMMA)[0] == expected


def steps_of(*ends: str) -> list[Step]:
    return [Step(t, t, t + 1.0, t + 0.5, end == "terminated", bool(end), True) for t, end in enumerate(ends)]


def test_one_step_is_the_transition_itself() -> None:
    found, pushed = window_of([steps_of("", "terminated", "truncated")], 1, GAMMA)
    assert pushed == [1, 1, 1]
    assert found == Counter(
        [Transition(0, 0, 1.0, 0.5, 0.5), Transition(1, 1, 2.0, 1.5, 0.0), Transition(2, 2, 3.0, 2.5, 0.5)]
    )


@pytest.mark.parametrize(("end", "discounts"), [("terminated", (0.0, 0.0, 0.0)), ("truncated", (0.125, 0.25, 0.5))])
def test_an_end_completes_the_window_and_only_termination_stops_the_bootstrap(
    end: str, discounts: tuple[float, ...]
) -> None:
    found, pushed = window_of([steps_of("", "", "", end)], 3, GAMMA)
    assert pushed == [0, 0, 1, 3]
    assert found == Counter(
        [
            Transition(0, 0, 1 + 0.5 * 2 + 0.25 * 3, 2.5, 0.125),
            Transition(1, 1, 2 + 0.5 * 3 + 0.25 * 4, 3.5, discounts[0]),
            Transition(2, 2, 3 + 0.5 * 4, 3.5, discounts[1]),
            Transition(3, 3, 4.0, 3.5, discounts[2]),
        ]
    )


def test_no_transition_spans_two_episodes() -> None:
    found, _ = window_of([steps_of("", "truncated", "", "", "")], 3, 1.0)
    assert {t.obs: t.next_obs for t in found} == {0: 1.5, 1: 1.5, 2: 4.5}
