"""Quantile regression DQN: Dabney, Rowland, Bellemare and Munos 2018, arXiv:1710.10044."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from pearl.algorithms.batch import Batch
from pearl.algorithms.dqn import DQN
from pearl.algorithms.quantiles import quantile_losses
from pearl.algorithms.update_rule import UpdateRule
from pearl.lazy_torch import torch


class QRDQN(DQN):
    """DQN that learns the distribution of each action's return, as `num_quantiles` quantiles of it (paper, Sec. 4).

    The target of each quantile is the reward and the discounted quantiles of the best next action, whose quantiles have
    the largest mean (Algorithm 1). The loss is quantile regression with Huber's loss, summed over the quantiles. A
    transition's priority is the absolute difference of both means.

    `num_quantiles` is the paper's, `double` is False as there. Everything else is set as in DQN, whose options apply
    but for `dueling`. `build_q_network` makes a module from `(batch, *obs)` to `(batch, actions * num_quantiles)`, with
    the quantiles of an action in a row.
    """

    _algorithm: ClassVar[str] = "QRDQN"
    _unused: ClassVar[frozenset[str]] = frozenset(("dueling",))

    num_quantiles: int = 200
    double: bool = False

    def check_spaces(self) -> None:
        """Also the settings."""
        super().check_spaces()
        self._require_whole("num_quantiles", 2)
        self._require(not self.dueling, "dueling", "left False: there is no dueling network of quantiles")

    @property
    def _outputs_per_action(self) -> tuple[int, str]:
        return self.num_quantiles, f"{self.num_quantiles} quantiles"

    def _quantiles_of(self, outputs: torch.Tensor) -> torch.Tensor:
        """A network's outputs as `(batch, actions, quantiles)`."""
        return outputs.view(outputs.shape[0], -1, self.num_quantiles)

    def _values_of(self, outputs: torch.Tensor) -> torch.Tensor:
        return self._quantiles_of(outputs).mean(dim=2)

    def _compute(self, batch: Batch, weights: torch.Tensor, batch_size: int) -> torch.Tensor:
        with torch.no_grad():
            judged = self.target_q(batch.next_obs)
            target = self._of_action(self._quantiles_of(judged), self._best_next(batch, judged))
            target = torch.addcmul(batch.reward.unsqueeze(1), batch.discount.unsqueeze(1), target)
        quantiles = self._of_action(self._quantiles_of(self.q(batch.obs)), batch.action)
        losses = quantile_losses(quantiles, target).sum(dim=1)
        torch.autograd.backward(torch.dot(losses, weights) / batch_size)
        return (quantiles.detach().mean(dim=1) - target.mean(dim=1)).abs_()

    @staticmethod
    def _of_action(quantiles: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        """Of quantiles `(batch, actions, count)`, those of one action of each row, `(batch, count)`."""
        place = action[:, None, None].expand(-1, 1, quantiles.shape[2])
        return quantiles.gather(1, place).squeeze(1)

    def update_rule(self) -> UpdateRule:
        """The network of DQN's rule gives quantiles of each action."""
        return dataclasses.replace(self._rule_of(QRDQN), quantiles=int(self.num_quantiles))
