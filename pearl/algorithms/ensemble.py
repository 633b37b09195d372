"""The base of the algorithms that are SAC with an ensemble of critics."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pearl.algorithms.arrays import ArrayModule
from pearl.algorithms.sac import SAC
from pearl.lazy_torch import nn

if TYPE_CHECKING:
    from pearl.algorithms.networks import EnsembleCritic


class EnsembleSAC(SAC):
    """SAC with `num_critics` critics."""

    num_critics: int

    critic: EnsembleCritic
    target_critic: EnsembleCritic

    def check_spaces(self) -> None:
        """Also the settings."""
        super().check_spaces()
        self._require_whole("num_critics", 1, 255)

    def _require_whole(self, name: str, least: int, most: int | None = None) -> None:
        """Require of a setting that it is a whole number from `least` to `most`."""
        value = getattr(self, name)
        whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
        bound = f"of at least {least}" if most is None else f"from {least} to {most}"
        self._require(whole and value >= least and (most is None or value <= most), name, f"a whole number {bound}")

    @property
    def _critic_count(self) -> int:
        return self.num_critics

    def _array_critics(self, networks: list[ArrayModule]) -> ArrayModule:
        return self._array_critic(critics=ArrayModule(**{str(k): network for k, network in enumerate(networks)}))

    def _join(self, networks: list[nn.Module]) -> EnsembleCritic:
        from pearl.algorithms.networks import EnsembleCritic

        return EnsembleCritic(networks, *self._boxes, self.scale_observations)
