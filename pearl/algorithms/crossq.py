"""CrossQ: Bhatt, Palenicek, Belousov, Argus, Amiranashvili, Brox and Peters 2024, arXiv:1902.05605v4."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import ClassVar

from pearl.algorithms.arrays import ArrayParts, TorchRandom
from pearl.algorithms.batch import Batch
from pearl.algorithms.sac import SAC
from pearl.algorithms.suggestions import Choice, Facts
from pearl.algorithms.trainer import Phase, is_number, observation_size
from pearl.algorithms.update_rule import PolicyHead
from pearl.lazy_torch import nn, torch


class CrossQ(SAC):
    """SAC with batch renormalisation and wide critics, without target networks (paper, Sec. 3).

    Critics see `(s, a)` and `(s', a')` in one batch, so that both are normalised by the same statistics:
    `Q(s, a), Q(s', a') = critic(concatenate((s, a), (s', a')))`; the loss is that of SAC, with the target
    `r + gamma * (min of both Q(s', a') - alpha * log pi(a'|s'))`, which has no gradient. The policy moves every
    `policy_delay` (3) steps, by critics that normalise with their running statistics. It is normalised too: by its
    batch in its own loss, else by its running statistics, which are a part of the weights that actors receive.

    Settings are those of the authors' code: one update per environment step, critics of `critic_hidden_sizes`
    (2048, 2048), 1e-3 for all, Adam's beta1 0.5 (the temperature's is 0.9), momentum 0.99, batch renormalisation after
    100,000 steps of plain batch normalisation, 5,000 random steps first. What differs: the squared error has no factor
    1/2, which Adam divides out. Rows of a batch depend on each other, so that a batch cannot be split. It trains and
    acts in torch only.
    """

    _algorithm: ClassVar[str] = "CrossQ"
    _rows_are_independent: ClassVar[bool] = False
    _unused: ClassVar[frozenset[str]] = frozenset(("tau",))

    learning_rate: float = 1e-3
    actor_learning_rate: float = 1e-3
    temperature_learning_rate: float = 1e-3
    learning_starts: int = 5000
    least_updates_per_step: float = 1.0
    policy_delay: int = 3
    critic_hidden_sizes: tuple[int, ...] = (2048, 2048)
    adam_beta1: float = 0.5
    batch_norm_momentum: float = 0.99
    renorm_warmup_steps: int = 100_000

    @classmethod
    def suggestions(cls, facts: Facts) -> tuple[Choice, ...]:
        """SAC's, but for the targets'."""
        return tuple(choice for choice in super().suggestions(facts) if choice.name not in cls._unused)

    def check_spaces(self) -> None:
        """Also the settings."""
        super().check_spaces()
        self._require(
            self.tau == SAC.tau, "tau", f"left as it is ({SAC.tau!r}): it has no effect without target networks"
        )
        self._require_whole("policy_delay", 1)
        self._require_whole("renorm_warmup_steps", 0)
        for name in ("adam_beta1", "batch_norm_momentum"):
            value = getattr(self, name)
            self._require(is_number(value) and 0 <= value < 1, name, "a number from 0 to below 1")
        sizes = self.critic_hidden_sizes
        whole = isinstance(sizes, tuple | list) and all(isinstance(size, int) and size >= 1 for size in sizes)
        self._require(whole, "critic_hidden_sizes", "whole numbers of at least 1, such as (2048, 2048)")

    def array_parts(self, random: TorchRandom) -> ArrayParts | None:
        """None: only in torch."""
        return None

    def build_actor(self) -> nn.Module:
        """A network from `(batch, observation size)` to `(batch, 2 * action size)`."""
        return self._network(observation_size(self.observation_space), self.hidden_sizes, self._actor_outputs[0])

    def build_critic(self) -> nn.Module:
        """A network from `(batch, observation size + action size)` to `(batch, 1)`."""
        return self._network(observation_size(self.observation_space) + self.action_size, self.critic_hidden_sizes, 1)

    def _network(self, inputs: int, sizes: tuple[int, ...], outputs: int) -> nn.Module:
        from pearl.algorithms.networks import renormalized_mlp

        momentum, warmup = self.batch_norm_momentum, self.renorm_warmup_steps
        return renormalized_mlp(inputs, sizes, outputs, momentum=momentum, warmup_steps=warmup)

    def build(self) -> None:
        """Actor, critics, Adam over the flat parameters of each, the noise's seed, the temperature."""
        super().build()
        # Training mode is for the passes that a step learns from: elsewhere, statistics must not move.
        self.actor.eval()
        self.critic.eval()

    def _build_critics(self) -> None:
        self.critic = self._joined_critics()

    def _make_optimizers(self) -> None:
        super()._make_optimizers()
        for optimizer in (self.actor_optimizer, self.critic_optimizer):
            (group,) = optimizer.param_groups
            group["betas"] = (self.adam_beta1, group["betas"][1])

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Critics, and in every `policy_delay`-th step the actor (and temperature) against the updated critics."""
        return self._delayed_phases(self.policy_delay)

    def _compute_critic(self, batch: Batch, weights: torch.Tensor, batch_size: int) -> torch.Tensor:
        rows = len(weights)
        with torch.no_grad():
            next_unit, log_prob = self.actor.sample(batch.next_obs, self._deal_noise(rows, batch_size, draw=0))
        unit = self.critic.action_scale(batch.action.flatten(1))
        with _training(self.critic):
            joined = self.critic.of_unit(torch.cat((batch.obs, batch.next_obs)), torch.cat((unit, next_unit)))
        with torch.no_grad():
            smaller = torch.minimum(*(values[rows:] for values in joined))
            next_value = smaller - self.log_alpha.exp() * log_prob
            target = torch.addcmul(batch.reward, batch.discount, next_value)
        return self._descend_critics(tuple(values[:rows] for values in joined), target, weights, batch_size)

    def _compute_actor(self, batch: Batch, weights: torch.Tensor, batch_size: int) -> None:
        with _training(self.actor):
            super()._compute_actor(batch, weights, batch_size)

    def finish_step(self) -> None:
        """There are no targets."""

    def _policy_head(self) -> PolicyHead:
        departure = super()._policy_head().departure
        return self._head("gaussian", departure or self._rule_step())

    def _rule_step(self) -> str:
        return f"the batch renormalisation of {type(self).__name__}"


@contextlib.contextmanager
def _training(module: nn.Module) -> Iterator[None]:
    """Normalise by the batch, and let the running statistics move."""
    module.train()
    try:
        yield
    finally:
        module.eval()
