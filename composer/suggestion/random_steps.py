"""Steps an environment with random actions, in a process of its own, and reports what they saw."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, get_args

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode

from composer.profiling.actors import measure_apart
from pearl.actors.actor import ActorSetup
from pearl.actors.environment import close_envs, make_vector_env
from pearl.actors.hindsight import has_goals
from pearl.actors.report import Report
from pearl.actors.vectorization import autoreset_mode
from pearl.algorithms.inputs import without_wide_bounds
from pearl.algorithms.suggestions import RandomSteps, Signal, signal_of
from pearl.error_place import described
from pearl.errors import EnvError
from pearl.spec import ActorSpec, TrainSpec

BUDGET_S = 2.0  # of all steps
_MOST_STEPS, _LEAST_STEPS = 400, 10  # of a vector of environments
_LEAST_SHIFTS = 10  # steps that moved the frames of a stack, to call it one
_MOST_ELEMENTS = 4096  # of an observation whose deviations are told; images have more
_WIDEST_ACTION = float(np.finfo(np.float32).max) / 2  # beyond, bounds count as none, as for the algorithms
_NUMBERS = 9  # before the deviations


def try_randomly(actors: ActorSpec, observation_space: gym.Space[Any], seed: int = 0) -> RandomSteps:
    """What about 400 steps of `actors.envs_per_actor` environments, or two seconds of them, saw.

    Raises EnvError if the environment fails in `reset` or `step`, ends its process, or is silent for 60 s.
    """
    setup = ActorSetup(None, {}, actors, TrainSpec(), seed=seed)
    most = _NUMBERS + min(_MOST_ELEMENTS, int(np.prod(observation_space.shape or ())))
    found = measure_apart(setup, BUDGET_S, most, _step, _step)
    step_us, steps, episodes, terminated, mean_length, reward_size, signal, stack, goals = found[:_NUMBERS]
    return RandomSteps(
        step_us=step_us,
        steps=int(steps),
        episodes=int(episodes),
        terminated=int(terminated),
        mean_length=mean_length,
        reward_size=reward_size,
        signal=get_args(Signal)[int(signal)],
        deviations=tuple(found[_NUMBERS:]),
        stack=int(stack),
        goals=bool(goals),
    )


def _step(setup: ActorSetup, budget_s: float, report: Report) -> list[float]:
    """The numbers of a `RandomSteps`, in order."""
    name, count = setup.spec.env_name, setup.spec.envs_per_actor
    envs = make_vector_env(setup.spec)
    report.ready()
    try:
        rng = np.random.default_rng(setup.seed)
        drawn = without_wide_bounds(envs.action_space, _WIDEST_ACTION)
        drawn.seed(int(rng.integers(2**31)))
        observations, _ = _called(name, "reset", lambda: envs.reset(seed=setup.seed))
        seen = _Seen(count, resets_later=autoreset_mode(envs) == AutoresetMode.NEXT_STEP)
        deadline = time.monotonic() + budget_s
        while seen.steps < _MOST_STEPS and (seen.steps < _LEAST_STEPS or time.monotonic() < deadline):
            seen.observe(observations)
            actions = drawn.sample()
            start = time.perf_counter_ns()
            observations, rewards, terminated, truncated, _ = _called(name, "step", lambda: envs.step(actions))  # noqa: B023
            seen.step((time.perf_counter_ns() - start) / 1e3, actions, rewards, terminated, truncated)
            seen.compare(observations)
            report.beat()
        return seen.numbers(envs.single_action_space, goals=has_goals(setup.spec, envs))
    finally:
        close_envs(name, envs)


def _called(env: str, method: str, call: Any) -> Any:
    try:
        return call()
    except Exception as error:  # an environment may raise anything
        raise EnvError(
            f"The environment {env} failed in {method}() with random actions of its action space: "
            f"{described(error)}. Run it on its own: gymnasium.utils.env_checker.check_env says what is wrong."
        ) from error


class _Seen:
    """What the steps of `count` environments saw; with `resets_later`, the step after an episode only resets."""

    def __init__(self, count: int, *, resets_later: bool) -> None:
        self._count, self._resets_later = count, resets_later
        self.steps = 0
        self._us: list[float] = []
        self._observations: list[np.ndarray] = []
        self._actions: list[np.ndarray] = []
        self._rewards: list[np.ndarray] = []
        self._real: list[np.ndarray] = []
        self._going: list[np.ndarray] = []
        self._resetting = np.zeros(count, bool)
        self._length = np.zeros(count, np.int64)
        self._lengths: list[int] = []
        self._terminated = 0
        self._before: np.ndarray | None = None
        self._stacks, self._shifts = True, 0

    def observe(self, observations: Any) -> None:
        if isinstance(observations, np.ndarray) and observations[0].size <= _MOST_ELEMENTS:
            self._observations.append(observations.reshape(self._count, -1).astype(np.float64))
        stackable = isinstance(observations, np.ndarray) and observations.ndim > 2 and observations.shape[1] > 1
        self._before = observations.copy() if stackable and self._stacks else None

    def compare(self, observations: Any) -> None:
        """Whether the observations after the step drop the oldest frame of those before, and append one."""
        if self._before is None:
            return
        going = self._going[-1]
        before, after = self._before[going], observations[going]
        self._stacks = np.array_equal(before[:, 1:], after[:, :-1])
        self._shifts += bool((before != after).any())

    def step(self, us: float, actions: Any, rewards: np.ndarray, terminated: np.ndarray, truncated: np.ndarray) -> None:
        self.steps += 1
        self._us.append(us / self._count)
        real, done = ~self._resetting, terminated | truncated
        self._actions.append(np.array(actions))
        self._rewards.append(np.asarray(rewards, np.float64))
        self._real.append(real)
        self._going.append(real & ~done)
        self._length += real
        ended = real & done
        self._lengths += self._length[ended].tolist()
        self._terminated += int((real & terminated).sum())
        self._length[ended] = 0
        self._resetting = ended if self._resets_later else self._resetting

    @property
    def _stack(self) -> int:
        """Frames of an observation; 0 if it is no stack of frames, or they hardly changed."""
        moved = self._stacks and self._shifts >= _LEAST_SHIFTS
        return self._before.shape[1] if moved and self._before is not None else 0

    def numbers(self, action_space: gym.Space[Any], *, goals: bool) -> list[float]:
        real, going = np.concatenate(self._real), np.concatenate(self._going)
        rewards, actions = np.concatenate(self._rewards), np.concatenate(self._actions)
        signal: Signal = signal_of(rewards[going], actions[going], action_space)
        deviations: Sequence[float] = ()
        if self._observations:
            deviations = np.nan_to_num(np.std(np.concatenate(self._observations), axis=0)).tolist()
        return [
            float(np.median(self._us)),
            float(real.sum()),
            float(len(self._lengths)),
            float(self._terminated),
            float(np.mean(self._lengths)) if self._lengths else 0.0,
            float(np.abs(rewards[real]).mean()),
            float(get_args(Signal).index(signal)),
            float(self._stack),
            float(goals),
            *deviations,
        ]
