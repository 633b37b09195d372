"""Generalized advantage estimation (GAE, Schulman et al. 2016): its contract, and the reference in NumPy.

    delta_t = r_t + gamma * V_{t+1} - V_t        A_t = delta_t + gamma * lambda * A_{t+1}        (HEPPO-GAE, Eq. 2, 4)
    return_t = V_t + A_t                                                                                    (Eq. 5)

Arrays are `(horizon, envs)`, one row for each step. As in HEPPO's memory (Sec. IV), advantages overwrite the rewards,
and returns overwrite the values. An episode that ends after step t has no V_{t+1} and no A_{t+1}; if its time limit
ended it, its caller adds gamma times the value of its last observation to the reward first.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from pearl.errors import ConfigurationError
from pearl.rollout.quantization import Codes


class AdvantageEstimator(Protocol):
    """GAE on some device. One thread calls it, once for each rollout.

    Arrays are contiguous. Those of another dtype or shape raise ConfigurationError, as `check_arrays` and `check_codes`
    say.
    """

    backend: str

    def estimate(self, rewards: np.ndarray, values: np.ndarray, last_values: np.ndarray, ends: np.ndarray) -> None:
        """Overwrite `rewards` by advantages and `values` by returns, `(horizon, envs)` float32 each.

        `last_values` `(envs,)` float32 are those of the observations after the last step; `ends` `(horizon, envs)`
        uint8 is not 0 where an episode ended after the step.
        """

    def estimate_codes(
        self,
        rewards: Codes,
        values: Codes,
        bonus: np.ndarray | None,
        last_values: np.ndarray,
        ends: np.ndarray,
        advantages: np.ndarray,
        returns: np.ndarray,
    ) -> None:
        """The same of quantised rewards and values, whose codes stay as they are, into `advantages` and `returns`.

        The codes of both have one dtype. `bonus` `(horizon, envs)` float32 is added to the rewards; None: nothing is.
        """


class NumpyGae:
    """The reference, in float32. The CPU's kernels give its bits: the same operations, in the same order, none fused.

    Other devices may differ in the last bits.
    """

    backend = "numpy"

    def __init__(self, gamma: float, gae_lambda: float) -> None:
        self._gamma, self._decay = np.float32(gamma), np.float32(gamma * gae_lambda)

    def estimate(self, rewards: np.ndarray, values: np.ndarray, last_values: np.ndarray, ends: np.ndarray) -> None:
        """Scan backwards in time, all environments at once."""
        check_arrays(rewards, values, last_values, ends)
        next_value, advantage = last_values.astype(np.float32), np.zeros_like(last_values, np.float32)
        for t in range(len(rewards) - 1, -1, -1):
            goes_on = ends[t] == 0
            value = values[t].copy()
            delta = rewards[t] + self._gamma * np.where(goes_on, next_value, np.float32(0)) - value
            advantage = delta + self._decay * np.where(goes_on, advantage, np.float32(0))
            rewards[t], values[t] = advantage, value + advantage
            next_value = value

    def estimate_codes(
        self,
        rewards: Codes,
        values: Codes,
        bonus: np.ndarray | None,
        last_values: np.ndarray,
        ends: np.ndarray,
        advantages: np.ndarray,
        returns: np.ndarray,
    ) -> None:
        """Decode, then `estimate`."""
        check_codes(rewards, values, bonus, last_values, ends, advantages, returns)
        advantages[:], returns[:] = rewards.decoded(), values.decoded()
        if bonus is not None:
            advantages += bonus
        self.estimate(advantages, returns, last_values, ends)


def check_arrays(rewards: np.ndarray, values: np.ndarray, last_values: np.ndarray, ends: np.ndarray) -> None:
    """Raise ConfigurationError unless `AdvantageEstimator.estimate` takes these arrays."""
    shape = _shape_of("rewards", rewards, (np.float32,), written=True)
    _check("values", values, (np.float32,), shape, written=True)
    _check_rest(last_values, ends, shape)
    _check_apart("rewards", rewards, "values", values)


def check_codes(
    rewards: Codes,
    values: Codes,
    bonus: np.ndarray | None,
    last_values: np.ndarray,
    ends: np.ndarray,
    advantages: np.ndarray,
    returns: np.ndarray,
) -> None:
    """Raise ConfigurationError unless `AdvantageEstimator.estimate_codes` takes these arrays."""
    shape = _shape_of("rewards.codes", rewards.codes, (np.uint8, np.uint16))
    _check("values.codes", values.codes, (rewards.codes.dtype.type,), shape)
    if bonus is not None:
        _check("bonus", bonus, (np.float32,), shape)
    _check_rest(last_values, ends, shape)
    _check("advantages", advantages, (np.float32,), shape, written=True)
    _check("returns", returns, (np.float32,), shape, written=True)
    _check_apart("advantages", advantages, "returns", returns)


def _check_rest(last_values: np.ndarray, ends: np.ndarray, shape: tuple[int, ...]) -> None:
    _check("last_values", last_values, (np.float32,), shape[1:])
    _check("ends", ends, (np.uint8,), shape)


def _check_apart(name: str, array: np.ndarray, other_name: str, other: np.ndarray) -> None:
    if np.may_share_memory(array, other):
        raise ConfigurationError(f"{name} and {other_name} must not overlap: both are written.")


def _shape_of(name: str, array: object, types: tuple[type, ...], *, written: bool = False) -> tuple[int, ...]:
    """The shape of the first array, which the others must have."""
    shape = np.shape(array) if isinstance(array, np.ndarray) and array.ndim == 2 else ("horizon", "envs")
    _check(name, array, types, shape, written=written)
    assert isinstance(array, np.ndarray)
    found: tuple[int, ...] = array.shape
    return found


def _check(
    name: str, array: object, types: tuple[type, ...], shape: tuple[object, ...], *, written: bool = False
) -> None:
    dtypes, wanted = [np.dtype(each) for each in types], str(shape).replace("'", "")
    form = f"{' or '.join(map(str, dtypes))} of shape {wanted}"
    if not isinstance(array, np.ndarray):
        raise ConfigurationError(f"{name} must be an array, {form}; found {type(array).__name__}.")
    if array.dtype not in dtypes or array.shape != shape:
        raise ConfigurationError(f"{name} must be {form}; found {array.dtype} of shape {array.shape}.")
    flags = array.flags
    if not (flags.c_contiguous and flags.aligned and (flags.writeable or not written)):
        needed = "contiguous and writeable" if written else "contiguous"
        found = "read-only" if flags.c_contiguous and flags.aligned else "gaps between its rows or numbers"
        raise ConfigurationError(f"{name} must be {needed}; found {found}. Copy it first.")
