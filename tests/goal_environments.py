"""An environment with goals that shows what was made of them, and a trainer for such ones. It brings no torch."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from trainers import TinyDQN

import benchmarks.flip_bits  # noqa: F401  registers FlipBits-v0


class CountUp(gym.Env[dict[str, np.ndarray], np.int64]):
    """An episode achieves 1, 2, ... `length`, each in two numbers; observations also show which episode it is.

    `kind` says what the environment offers: rewards of "batches", of "single" goals, or "reversed" ones that sum over
    the wrong axis of a batch; whether a goal "terminates", or "no reward" at all.
    """

    def __init__(self, length: int = 5, kind: str = "batches", number: bool = False) -> None:
        goal: spaces.Space[Any] = spaces.Discrete(length + 2) if number else spaces.Box(-1.0, np.inf, (2,), np.float64)
        parts = {"shown": spaces.Box(-1.0, np.inf, (2,)), "desired_goal": goal, "achieved_goal": goal}
        self.observation_space, self.action_space = spaces.Dict(parts), spaces.Discrete(3)
        self._length, self._kind, self._number = length, kind, number
        if kind == "terminates":
            self.compute_terminated = lambda achieved, desired, info: np.all(achieved == desired, axis=-1)
        if kind == "no reward":
            self.compute_reward = None  # type: ignore[method-assign, assignment]

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        super().reset(seed=seed)
        self._episode, self._step = float(self.np_random.integers(1 << 20)), 0
        return self._seen(), {}

    def step(self, action: np.int64) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        self._step += 1
        done = self._step == self._length
        return self._seen(), -1.0 if self._kind != "other rewards" else 3.0, done, False, {}

    def compute_reward(self, achieved_goal: Any, desired_goal: Any, info: dict[str, Any]) -> Any:
        assert info == {}
        assert self._step >= 0, "as in environments whose rewards use what reset sets"
        if self._kind == "single" and not self._number:
            assert achieved_goal.shape == (2,)
        axis = 0 if self._kind == "reversed" and np.ndim(achieved_goal) > 1 else -1
        if self._number:
            return float(achieved_goal == desired_goal) - 1.0
        return -np.sign(np.abs(achieved_goal - desired_goal).sum(axis=axis))

    def _seen(self) -> dict[str, Any]:
        goals = [self._step, self._length + 1 if self._number else -1]
        made = goals if self._number else [np.array([g, 2.0 * g]) for g in goals]
        return {"shown": np.array([self._episode, self._step]), "desired_goal": made[1], "achieved_goal": made[0]}


def next_step_vector(num_envs: int = 1, **kwargs: Any) -> gym.vector.SyncVectorEnv:
    """A vector that resets in the step after an episode's end."""
    makers = [lambda: CountUp(**kwargs)] * num_envs
    return gym.vector.SyncVectorEnv(makers, autoreset_mode=gym.vector.AutoresetMode.NEXT_STEP)


gym.register("PearlCountUp-v0", CountUp, vector_entry_point=next_step_vector, disable_env_checker=True)


class FlipDQN(TinyDQN):
    hidden_sizes = (64, 64)
    hindsight_goals = 4
    gamma = 0.95
