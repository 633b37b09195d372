"""A policy in C++, for the whole vector of environments at once: no torch, no trainer class.

The host reads a `PolicyPlan` from its trainer (`pearl.actors.policy_plan`) and sends it to the actors as plain data.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np

from pearl import _native

if TYPE_CHECKING:
    from pearl.exploration import Exploration

Head: TypeAlias = Literal["argmax", "tanh", "gaussian"]
Operation: TypeAlias = tuple[str, int, int, int, int, int, float]  # as `_native.Network` takes them


@dataclass(frozen=True)
class Scale:
    """Where the weight snapshot holds an affine map between `[low, high]` and [-1, 1]: `size` floats each."""

    center: int
    half_range: int
    size: int


@dataclass(frozen=True)
class PolicyPlan:
    """A policy as plain data: `operations` on `inputs` numbers, and a `head` that makes actions of their result.

    Heads: "argmax", the index of the largest value; "tanh", squashed and scaled to the action's bounds; "gaussian",
    likewise of the mean, or of samples, of a normal distribution whose mean and log standard deviation (clamped to
    `log_std_bounds`) are the result's halves. Offsets count floats of the weight snapshot, of which `weights`
    `(weight_count,)` float32 is the first. `action_shape` is that of one action.
    """

    inputs: int
    operations: tuple[Operation, ...]
    head: Head
    weights: np.ndarray
    exploration: Exploration | None = None
    action_shape: tuple[int, ...] = ()
    observation_scale: Scale | None = None
    action_scale: Scale | None = None
    log_std_bounds: tuple[float, float] = (-math.inf, math.inf)


class NativePolicy:
    """Acts as `plan` says. Its actions are those of the torch policy, but for the rounding of sums."""

    def __init__(self, plan: PolicyPlan) -> None:
        self.exploration = plan.exploration
        self._plan = plan
        self._network = _native.Network(plan.inputs, list(plan.operations), len(plan.weights))
        self._weights = np.empty(len(plan.weights), np.float32)
        self.load_weights(plan.weights)

    def load_weights(self, weights: np.ndarray) -> None:
        """Copy a policy snapshot `(weight_count,)` float32."""
        self._weights[:] = weights

    def values(self, obs: np.ndarray) -> np.ndarray:
        """What the network computes, `(envs, outputs)` float32, of contiguous observations `(envs, *obs)` float32."""
        if (scale := self._plan.observation_scale) is not None:
            obs = obs.reshape(len(obs), -1) - self._slice(scale.center, scale.size)
            obs /= self._slice(scale.half_range, scale.size)
        return self._network.forward(self._weights, obs)

    def act(self, obs: np.ndarray) -> np.ndarray:
        """Greedy actions `(envs, *action)`, int64 or float32, for contiguous observations `(envs, *obs)` float32."""
        values = self.values(obs)
        if self._plan.head == "argmax":
            actions: np.ndarray = values.argmax(axis=1)
            return actions
        return self._scaled(values[:, : values.shape[1] // 2] if self._plan.head == "gaussian" else values)

    def sample(self, obs: np.ndarray, noise: np.ndarray) -> np.ndarray:
        """Actions like those of `act`, drawn by standard normal `noise` `(envs, *action)` float32."""
        mean, log_std = np.split(self.values(obs), 2, axis=1)
        deviation = np.exp(np.clip(log_std, *self._plan.log_std_bounds))
        return self._scaled(mean + deviation * noise.reshape(mean.shape))

    def _scaled(self, unsquashed: np.ndarray) -> np.ndarray:
        scale = self._plan.action_scale
        assert scale is not None
        actions: np.ndarray = np.tanh(unsquashed)
        actions *= self._slice(scale.half_range, scale.size)
        actions += self._slice(scale.center, scale.size)
        return actions.reshape(len(actions), *self._plan.action_shape)

    def _slice(self, offset: int, size: int) -> np.ndarray:
        return self._weights[offset : offset + size]
