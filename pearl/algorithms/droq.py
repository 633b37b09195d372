"""Dropout Q-functions: Hiraoka, Imagawa, Hashimoto, Onishi and Tsuruoka 2022, arXiv:2110.02034."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import ClassVar

from pearl.algorithms.arrays import ArrayModule, TorchRandom, array_dropout_mlp
from pearl.algorithms.batch import Batch
from pearl.algorithms.redq import REDQ
from pearl.algorithms.trainer import is_number, observation_size
from pearl.algorithms.update_rule import RuleStep
from pearl.errors import TrainerError
from pearl.lazy_torch import nn, torch

_TARGET, _VALUES, _JUDGED = 0, 1, 2  # the passes of a step, as the native learner numbers them


class DroQ(REDQ):
    """REDQ with two critics whose dropout takes the place of the large ensemble (paper, Algorithm 2).

    Each hidden layer of a critic is linear, dropout, layer normalisation, ReLU. Numbers are dropped with probability
    `dropout` in every pass of a training step: in the targets, the critics and the policy's loss. Targets take the
    smaller value of both critics, and the policy follows their mean.

    Settings are REDQ's, as in the authors' experiments. These drop 0.01, or, on the code of REDQ, 0.0001 in Hopper to
    0.1 in Humanoid. What differs: the policy moves by the batch of its critic step, where the authors draw another one.
    Masks are a function of `noise_seed`, the count of steps, the pass, layer, row and column alone.
    """

    _algorithm: ClassVar[str] = "DroQ"

    num_critics: int = 2
    dropout: float = 0.01

    def check_spaces(self) -> None:
        """Also the settings."""
        super().check_spaces()
        self._require(is_number(self.dropout) and 0 <= self.dropout < 1, "dropout", "a number from 0 to below 1")

    def build_critic(self) -> nn.Module:
        """A network from `(batch, observation size + action size)` to `(batch, 1)`.

        In networks of your own, use `pearl.algorithms.networks.Dropout`, whose masks all engines share.
        """
        from pearl.algorithms.networks import dropout_mlp

        inputs = observation_size(self.observation_space) + self.action_size
        return dropout_mlp(inputs, self.hidden_sizes, 1, self.dropout)

    def _array_mlp_of_critic(self, random: TorchRandom) -> ArrayModule:
        inputs = observation_size(self.observation_space) + self.action_size
        return array_dropout_mlp(random, inputs, self.hidden_sizes, 1, self.dropout)

    def build(self) -> None:
        """As REDQ's; the dropout layers of all critics draw from one source."""
        from pearl.algorithms.networks import Dropout, DropoutDraw

        super().build()
        self._dropout_draw = DropoutDraw()
        for joined in (self.critic, self.target_critic):
            for number, critic in enumerate(joined.networks):
                layers = [part for part in critic.modules() if isinstance(part, Dropout)]
                if len(layers) > 256:
                    raise TrainerError(
                        f"{type(self).__name__} draws masks for at most 256 dropout layers of a critic; found "
                        f"{len(layers)}. Build a critic with fewer."
                    )
                for layer, part in enumerate(layers):
                    part.of(self._dropout_draw, number << 8 | layer)

    @contextlib.contextmanager
    def _dropping(self, number: int) -> Iterator[None]:
        """Drop by the masks of a pass, of the rows that noise was dealt to last."""
        self._dropout_draw.begin(int(self.noise_seed.item()), self.gradient_steps, number, self._first_row)
        try:
            yield
        finally:
            self._dropout_draw.end()

    def step_kind(self) -> tuple[object, ...] | str:
        """Which phases the step has; a text with dropout, whose masks the host draws."""
        if self.dropout > 0:
            return f"{type(self).__name__} draws the masks of dropout on the host"
        return super().step_kind()

    def _target_of(self, next_obs: torch.Tensor, unit: torch.Tensor) -> torch.Tensor:
        with self._dropping(_TARGET):
            return super()._target_of(next_obs, unit)

    def _values(self, batch: Batch) -> tuple[torch.Tensor, ...]:
        with self._dropping(_VALUES):
            return super()._values(batch)

    def _judged(self, obs: torch.Tensor, unit: torch.Tensor) -> torch.Tensor:
        with self._dropping(_JUDGED):
            return super()._judged(obs, unit)

    def _rule_step(self) -> RuleStep | str:
        return self._step_of(DroQ, "EnsembleCritic")
