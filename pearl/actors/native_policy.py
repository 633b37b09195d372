"""A policy in C++, for the whole vector of environments at once: no torch, no trainer class.

The host reads a `PolicyPlan` from its trainer (`pearl.actors.policy_plan`) and sends it to the actors as plain data.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np

from pearl import _native
from pearl.action_masks import FORBIDDEN_LOGIT

if TYPE_CHECKING:
    from pearl.exploration import Exploration

Head: TypeAlias = Literal["argmax", "tanh", "gaussian", "categorical", "normal"]
Operation: TypeAlias = tuple[str, int, int, int, int, int, float]  # as `_native.Network` takes them
# Convolutions and poolings, as it takes them.
WindowOperation: TypeAlias = tuple[str, int, int, int, int, tuple[int, ...]]


@dataclass(frozen=True)
class Scale:
    """Where the weight snapshot holds an affine map between `[low, high]` and [-1, 1]: `size` floats each."""

    center: int
    half_range: int
    size: int


@dataclass(frozen=True)
class RolloutPlan:
    """Additional parts of a policy that draws its actions: the value network and the distribution.

    `sizes` are the numbers of choices in each categorical part; empty for a normal distribution, whose log deviations
    lie at `log_std` in the weight snapshot. `size` counts the numbers of one action. `normalization` is where the
    snapshot holds mean and scale of observations; they are clipped to `clip` deviations. `bounds` are a Box's.
    """

    value_operations: tuple[Operation | WindowOperation, ...]
    sizes: tuple[int, ...]
    size: int
    log_std: int | None = None
    normalization: tuple[int, int] | None = None
    clip: float = math.inf
    bounds: tuple[np.ndarray, np.ndarray] | None = None


@dataclass(frozen=True)
class PolicyPlan:
    """A policy as plain data: `operations` on `inputs` numbers, and a `head` that makes actions of their result.

    Heads: "argmax", the index of the largest value, or of the `quantiles` in a row whose mean is largest; "tanh",
    squashed and scaled to the action's bounds; "gaussian", the same for the mean, or for samples, of a normal
    distribution whose mean and log standard deviation (clamped to `log_std_bounds`) are the result's halves;
    "categorical" and "normal", as `rollout` says. Offsets count floats of the weight snapshot; `weights`
    `(weight_count,)` float32 is the first snapshot. `action_shape` is that of one action. Observations are float32, or
    `of_bytes` uint8.
    """

    inputs: int
    operations: tuple[Operation | WindowOperation, ...]
    head: Head
    weights: np.ndarray
    exploration: Exploration | None = None
    action_shape: tuple[int, ...] = ()
    observation_scale: Scale | None = None
    action_scale: Scale | None = None
    log_std_bounds: tuple[float, float] = (-math.inf, math.inf)
    rollout: RolloutPlan | None = None
    quantiles: int = 0
    of_bytes: bool = False


class NativePolicy:
    """Acts as `plan` says. Its actions are those of the torch policy, but for the rounding of sums."""

    def __init__(self, plan: PolicyPlan) -> None:
        self.exploration = plan.exploration
        self._plan = plan
        self._network = _native.Network(plan.inputs, list(plan.operations), len(plan.weights), plan.of_bytes)
        self._evaluator = _native.Evaluator(self._network)
        self._rollout: _native.RolloutPolicy | None = None
        if (drawn := plan.rollout) is not None:
            value = _native.Network(plan.inputs, list(drawn.value_operations), len(plan.weights))
            self._rollout = _native.RolloutPolicy(
                self._network, value, drawn.sizes, drawn.size, drawn.log_std, drawn.normalization
            )
        self._weights = np.empty(len(plan.weights), np.float32)
        self.load_weights(plan.weights)

    def load_weights(self, weights: np.ndarray) -> None:
        """Copy a policy snapshot `(weight_count,)` float32."""
        self._weights[:] = weights

    def values(self, obs: np.ndarray) -> np.ndarray:
        """What the network computes of contiguous observations `(envs, *obs)`, `(envs, outputs)` float32.

        Of quantiles, their means.
        """
        if (scale := self._plan.observation_scale) is not None:
            obs = obs.reshape(len(obs), -1) - self._slice(scale.center, scale.size)
            obs /= self._slice(scale.half_range, scale.size)
        rollout = self._plan.rollout
        if rollout is not None and rollout.normalization is not None:
            mean, factor = (self._slice(offset, self._plan.inputs) for offset in rollout.normalization)
            obs = np.clip((obs.reshape(len(obs), -1) - mean) * factor, -rollout.clip, rollout.clip)
        found = self._evaluator.forward(self._weights, obs)
        return found.reshape(len(found), -1, count).mean(axis=2) if (count := self._plan.quantiles) else found

    def act(self, obs: np.ndarray, masks: np.ndarray | None = None) -> np.ndarray:
        """Greedy actions `(envs, *action)`, int64 or float32, for contiguous observations `(envs, *obs)`.

        With `masks` `(envs, choices)` bool, of those that they allow.
        """
        values = self.values(obs)
        if masks is not None:
            values = np.where(masks, values, np.float32(-np.inf))
        if self._plan.head == "argmax":
            actions: np.ndarray = values.argmax(axis=1)
            return actions
        if self._plan.rollout is not None:
            return self._mode(values, self._plan.rollout)
        return self._scaled(values[:, : values.shape[1] // 2] if self._plan.head == "gaussian" else values)

    def sample(self, obs: np.ndarray, noise: np.ndarray) -> np.ndarray:
        """Actions like those of `act`, drawn by standard normal `noise` `(envs, *action)` float32."""
        mean, log_std = np.split(self.values(obs), 2, axis=1)
        deviation = np.exp(np.clip(log_std, *self._plan.log_std_bounds))
        return self._scaled(mean + deviation * noise.reshape(mean.shape))

    def explore(self, obs: np.ndarray, noise: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Actions `(envs, *action)` drawn by `noise`, their log probabilities and the values `(envs,)` float32.

        `noise` `(envs, size)` float32 is uniform in [0, 1) for categorical parts, else standard normal. Actions are
        not clipped to a Box's bounds.
        """
        rows = len(obs)
        actions = np.empty((rows, *self._plan.action_shape), np.float32 if self._plan.head == "normal" else np.int64)
        log_probs, values = np.empty(rows, np.float32), np.empty(rows, np.float32)
        self.explore_into(obs, noise, actions, log_probs, values)
        return actions, log_probs, values

    def explore_into(
        self,
        obs: np.ndarray,
        noise: np.ndarray,
        action: np.ndarray,
        log_prob: np.ndarray,
        value: np.ndarray,
        masks: np.ndarray | None = None,
    ) -> None:
        """The same into contiguous arrays; with `masks` `(envs, choices)` bool, of what they allow."""
        assert self._rollout is not None
        assert self._plan.rollout is not None
        if masks is None:
            self._rollout.explore(self._weights, obs, noise, action, log_prob, value)
            return
        logits = np.where(masks, self.values(obs), np.float32(FORBIDDEN_LOGIT))
        _draw_allowed(logits, masks, self._plan.rollout.sizes, noise, action.reshape(len(obs), -1), log_prob)
        value[:] = self._rollout.values(self._weights, obs)

    def value(self, obs: np.ndarray) -> np.ndarray:
        """The value network's estimates `(envs,)` float32 of contiguous observations `(envs, *obs)` float32."""
        assert self._rollout is not None
        return self._rollout.values(self._weights, obs)

    def _mode(self, outputs: np.ndarray, rollout: RolloutPlan) -> np.ndarray:
        shape = (len(outputs), *self._plan.action_shape)
        if rollout.sizes:
            parts = np.split(outputs, np.cumsum(rollout.sizes)[:-1], axis=1)
            return np.stack([part.argmax(axis=1) for part in parts], axis=1).reshape(shape)
        actions = outputs.reshape(shape)
        return actions if rollout.bounds is None else np.clip(actions, *rollout.bounds)

    def _scaled(self, unsquashed: np.ndarray) -> np.ndarray:
        scale = self._plan.action_scale
        assert scale is not None
        actions: np.ndarray = np.tanh(unsquashed)
        actions *= self._slice(scale.half_range, scale.size)
        actions += self._slice(scale.center, scale.size)
        return actions.reshape(len(actions), *self._plan.action_shape)

    def _slice(self, offset: int, size: int) -> np.ndarray:
        return self._weights[offset : offset + size]


def _draw_allowed(
    logits: np.ndarray,
    masks: np.ndarray,
    sizes: tuple[int, ...],
    noise: np.ndarray,
    action: np.ndarray,
    log_prob: np.ndarray,
) -> None:
    """Draw each categorical part by its column of `noise`, uniform in [0, 1), into a column of `action`."""
    log_prob[:] = 0.0
    start, rows = 0, np.arange(len(logits))
    for part, size in enumerate(sizes):
        inside = slice(start, start + size)
        shifted = logits[:, inside] - logits[:, inside].max(axis=1, keepdims=True)
        logs = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
        chosen = (np.exp(logs).cumsum(axis=1)[:, :-1] <= noise[:, part, None]).sum(axis=1)
        # Rounded sums may end below 1: then the last allowed one.
        last = size - 1 - masks[:, inside][:, ::-1].argmax(axis=1)
        action[:, part] = np.minimum(chosen, last)
        log_prob += logs[rows, action[:, part]]
        start += size
