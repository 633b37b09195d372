"""The base of the algorithms that are SAC with an ensemble of critics."""

from __future__ import annotations

from typing import TYPE_CHECKING

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

    @property
    def _critic_count(self) -> int:
        return self.num_critics

    def _array_critics(self, networks: list[ArrayModule]) -> ArrayModule:
        return self._array_critic(critics=ArrayModule(**{str(k): network for k, network in enumerate(networks)}))

    def _join(self, networks: list[nn.Module]) -> EnsembleCritic:
        from pearl.algorithms.networks import EnsembleCritic

        return EnsembleCritic(networks, *self._boxes, self.scale_observations)
