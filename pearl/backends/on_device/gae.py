"""Generalized advantage estimation on a parallel device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pearl.rollout.quantization import Codes

if TYPE_CHECKING:
    from pearl import _native


class GaeOnDevice:
    """AdvantageEstimator by a kernel on a device. Takes the host's arrays; the memory of their copies is kept.

    Quantised rewards and values are copied as codes. Both methods raise DeviceError where the device fails or its
    memory does not suffice.
    """

    backend: str

    def __init__(self, kernel: _native._Gae) -> None:
        self._kernel = kernel

    def estimate(self, rewards: np.ndarray, values: np.ndarray, last_values: np.ndarray, ends: np.ndarray) -> None:
        """As AdvantageEstimator."""
        self._kernel.estimate(rewards, values, last_values, ends)

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
        """As AdvantageEstimator."""
        self._kernel.estimate_codes(rewards, values, bonus, last_values, ends, advantages, returns)
