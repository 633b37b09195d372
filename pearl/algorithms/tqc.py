"""Truncated quantile critics: Kuznetsov, Shvechikov, Grishin and Vetrov 2020, arXiv:2005.04269."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from pearl.algorithms.ensemble import EnsembleSAC
from pearl.algorithms.quantiles import quantile_losses
from pearl.algorithms.update_rule import RuleStep, Scalars, UpdateRule
from pearl.lazy_torch import torch


class TQC(EnsembleSAC):
    """SAC whose critics learn the distribution of the return, and leave out its largest quantiles (paper, Sec. 3).

    Each of `num_critics` critics (N = 5) gives `num_quantiles` quantiles (M = 25). The targets of all of them are the
    `N * (M - dropped_quantiles)` smallest of all N * M quantiles of the next action: the more are dropped, the less are
    values overestimated. The loss is quantile regression with Huber's loss, as a mean over all quantiles. The policy
    follows the mean of all N * M quantiles. A transition's priority is the largest absolute difference between the mean
    of a critic and that of the targets.

    The paper drops 2 quantiles of each critic, but 5 in Hopper and 0 in HalfCheetah (appendix). All other settings are
    SAC's; the paper's critics have three hidden layers of 512. `build_critic` makes a module from `(batch, observation
    size + action size)` to `(batch, num_quantiles)`.
    """

    _algorithm: ClassVar[str] = "TQC"

    num_critics: int = 5
    num_quantiles: int = 25
    dropped_quantiles: int = 2

    def check_spaces(self) -> None:
        """Also the settings."""
        super().check_spaces()
        self._require_whole("num_quantiles", 2)
        self._require_whole("dropped_quantiles", 0, self.num_quantiles - 1)

    @property
    def _critic_outputs(self) -> tuple[int, str]:
        return self.num_quantiles, f"{self.num_quantiles} quantiles of the value of an observation and an action"

    def _target_of(self, next_obs: torch.Tensor, unit: torch.Tensor) -> torch.Tensor:
        """The smallest quantiles `(N * (M - dropped_quantiles), batch)` of unit-scale actions by all targets.

        Each is a row: SAC makes a target of each as it does of a value.
        """
        quantiles = torch.cat(self.target_critic.of_unit(next_obs, unit), dim=1)
        kept = self.num_critics * (self.num_quantiles - self.dropped_quantiles)
        return quantiles.sort(dim=1).values[:, :kept].T

    @staticmethod
    def _descend_critics(
        values: tuple[torch.Tensor, ...], target: torch.Tensor, weights: torch.Tensor, batch_size: int
    ) -> torch.Tensor:
        """Add the gradients of the weighted losses; returns the largest differences of means `(batch,)`."""
        losses = torch.stack([quantile_losses(quantiles, target.T).mean(dim=1) for quantiles in values])
        torch.autograd.backward(torch.dot(losses.mean(dim=0), weights) / batch_size)
        means = torch.stack([quantiles.detach().mean(dim=1) for quantiles in values])
        return (means - target.mean(dim=0)).abs_().amax(dim=0)

    def _judged(self, obs: torch.Tensor, unit: torch.Tensor) -> torch.Tensor:
        return torch.cat(self.critic.of_unit(obs, unit), dim=1).mean(dim=1)

    def update_rule(self) -> UpdateRule:
        """Quantiles of all critics in the targets, truncated, and in the policy's gradient."""
        count, quantiles = int(self.num_critics), int(self.num_quantiles)
        return dataclasses.replace(super().update_rule(), actor_critics=count, ensemble=True, quantiles=quantiles)

    def _rule_step(self) -> RuleStep | str:
        found = self._step_of(TQC, "EnsembleCritic")
        return found if isinstance(found, str) else dataclasses.replace(found, loss="huber")

    def _rule_scalars(self) -> Scalars:
        return (
            super()
            ._rule_scalars()
            ._replace(target_critics=int(self.num_critics), dropped_quantiles=int(self.dropped_quantiles))
        )
