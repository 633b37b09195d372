"""Action masks say which actions an environment allows now. This module reads and checks them.

A mask has one number for each choice; 0 forbids the choice. A Discrete space has a choice for each action. A
MultiDiscrete space has the choices of its first number, then those of its second, and so on. A MultiBinary space has
two choices for each number, off and on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from pearl.errors import EnvError
from pearl.spec import ACTION_MASK, NEXT_ACTION_MASK, ActorStep, Column, FieldSpec

FORBIDDEN_LOGIT = -1e8  # of a choice that a mask forbids; not infinite, as entropies multiply by it
_METHOD = "action_masks"


def mask_parts(space: gym.Space[Any]) -> tuple[int, ...]:
    """The choices of each number of an action; EnvError for actions that are not choices."""
    if isinstance(space, spaces.Discrete):
        return (int(space.n),)
    if isinstance(space, spaces.MultiDiscrete):
        return tuple(int(n) for n in np.asarray(space.nvec).ravel())
    if isinstance(space, spaces.MultiBinary):
        return (2,) * int(np.prod(space.shape))
    raise EnvError(
        f"action_masks=True needs Discrete, MultiDiscrete or MultiBinary actions; the environment has {space}. Leave "
        "action_masks out."
    )


def mask_field(space: gym.Space[Any]) -> FieldSpec:
    """The column of a rollout with the mask of each step, `(choices,)` uint8."""
    return FieldSpec(ACTION_MASK, (sum(mask_parts(space)),), "uint8")


def next_mask_column(space: gym.Space[Any]) -> Column:
    """The column of a transition with the mask of its next observation, `(choices,)` uint8."""
    return Column(NEXT_ACTION_MASK, (sum(mask_parts(space)),), "uint8", make=_next_mask_of, n_step="last", typical=1.0)


def _next_mask_of(step: ActorStep) -> np.ndarray:
    assert step.next_action_mask is not None
    return step.next_action_mask


class MaskReader:
    """Reads and checks the masks of environments `env` with actions in `space`."""

    def __init__(self, space: gym.Space[Any], env: str) -> None:
        self.parts, self._env = mask_parts(space), env
        self.choices = sum(self.parts)
        self._starts = np.cumsum((0, *self.parts[:-1]))

    def one(self, info: Mapping[str, Any]) -> np.ndarray:
        """The mask `(choices,)` bool in the `info` of a single environment."""
        return self.checked(info.get(ACTION_MASK), info)

    def checked(self, mask: Any, info: Mapping[str, Any] | None = None) -> np.ndarray:
        """A mask as `(choices,)` bool; EnvError if it is absent, malformed, or allows nothing."""
        if mask is None:
            found = ", ".join(sorted(map(str, info or ()))) or "nothing"
            raise EnvError(
                f"{self._env} gives no action mask, which action_masks=True needs after each reset and step; its info "
                f"has {found}. Have it put info['{ACTION_MASK}'] there or define {_METHOD}(), or leave action_masks "
                "out."
            )
        values = np.asarray(mask)
        if values.shape != (self.choices,) or values.dtype.kind not in "biuf":
            raise EnvError(
                f"An action mask of {self._env} must have shape ({self.choices},), a number or bool for each choice; "
                f"found shape {values.shape} of {values.dtype}."
            )
        allowed = values.astype(bool)
        self.require_choice(allowed[None])
        return allowed

    def require_choice(self, masks: np.ndarray) -> None:
        """Raise EnvError if a mask of `(n, choices)` bool allows nothing for one of the action's numbers."""
        counts = np.add.reduceat(masks, self._starts, axis=1, dtype=np.int64)
        if counts.all():
            return
        row, part = np.argwhere(counts == 0)[0].tolist()
        where = "" if len(self.parts) == 1 else f" for number {part} of the action"
        raise EnvError(
            f"An action mask of {self._env} allows no action{where}: {masks[row].astype(int).tolist()}. Allow one, "
            "such as an action that does nothing, or end the episode before."
        )

    def batch(self, info: Mapping[str, Any], ended: np.ndarray) -> np.ndarray:
        """The masks `(envs, choices)` bool in the `info` of a vector of environments; all True where `ended`."""
        masks = np.ones((len(ended), self.choices), bool)
        given = info.get(ACTION_MASK)
        present = info.get(f"_{ACTION_MASK}")
        all_there = present is None or bool((present | ended).all())
        if isinstance(given, np.ndarray) and given.shape == masks.shape and given.dtype.kind in "biuf" and all_there:
            masks[~ended] = given[~ended].astype(bool)
            self.require_choice(masks)
            return masks
        for env in np.flatnonzero(~ended):
            there = given is not None and (present is None or bool(present[env]))
            masks[env] = self.checked(given[env] if there else None, info)  # type: ignore[index]
        return masks

    def last(self, info: Mapping[str, Any], masks: np.ndarray, done: np.ndarray, terminated: np.ndarray) -> np.ndarray:
        """The masks of a step's next observations, those of ended episodes included, after same-step autoreset.

        All True where the episode terminated, since nothing follows.
        """
        if not done.any():
            return masks
        found, final = masks.copy(), info.get("final_info", {})
        found[done] = True
        for env in np.flatnonzero(done & ~terminated):
            given = final.get(ACTION_MASK)
            found[env] = self.checked(None if given is None else given[env], final)
        return found


class _Masked(gym.Wrapper[Any, Any, Any, Any]):
    """Puts what `action_masks()` returns into info, unless the environment has put a mask there."""

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        self._masks = env.get_wrapper_attr(_METHOD)

    def _with_mask(self, info: dict[str, Any]) -> dict[str, Any]:
        return info if ACTION_MASK in info else {**info, ACTION_MASK: np.asarray(self._masks())}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset."""
        obs, info = self.env.reset(seed=seed, options=options)
        return obs, self._with_mask(info)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        return obs, reward, terminated, truncated, self._with_mask(info)


def mask_env(env: gym.Env[Any, Any]) -> gym.Env[Any, Any]:
    """Wrap an environment that defines `action_masks()` so that its info has the mask; return any other as it is."""
    return _Masked(env) if env.has_wrapper_attr(_METHOD) else env
