"""Proximal policy optimization (Schulman et al. 2017), and advantage actor-critic as its case without reuse."""

from __future__ import annotations

import math
from collections.abc import Mapping

from gymnasium import spaces

from pearl.algorithms.batch import Batch
from pearl.algorithms.on_policy import (
    ActionDistribution,
    Minibatch,
    OnPolicyTrainer,
    normalized,
)
from pearl.algorithms.spaces import is_bounded
from pearl.algorithms.suggestions import Choice, Facts
from pearl.algorithms.trainer import Phase, is_number
from pearl.algorithms.update_rule import (
    ClippedStep,
    HeadKind,
    PolicyHead,
    RuleNetwork,
    UpdateRule,
    policy_departure,
    step_departure,
)
from pearl.lazy_torch import torch
from pearl.schedules import Schedule, factor_at

_STEP = (
    *("update_minibatch", "update_policy", "loss", "clipped_loss", "after_rollout", "evaluate_actions"),
    "set_progress",
)
_POLICY = ("get_action", "explore", "values", "in_space", "policy")
_ROLLOUT_ROWS = 2048  # of Schulman et al. 2017, Table 3


class PPO(OnPolicyTrainer):
    """PPO with a clipped ratio for Discrete, MultiDiscrete, MultiBinary and Box actions.

    The ratio of new to old probability counts within `clip_range` of 1; with `value_clip_range` above 0, values count
    within that range of the old ones. The loss is the policy's, plus `value_coefficient` times the mean squared error
    of the values, minus `entropy_coefficient` times the entropy. Training on a rollout ends early when the approximate
    KL divergence from the old policy exceeds 1.5 times `target_kl` (None: never). `clip_range_schedule`
    (pearl.schedules) is the factor of the range over the run: with "linear" it falls to 0.
    """

    clip_range: float = 0.2
    clip_range_schedule: Schedule = "constant"
    value_clip_range: float = 0.0
    value_coefficient: float = 0.5
    entropy_coefficient: float = 0.0
    target_kl: float | None = None

    @classmethod
    def recommended(cls, facts: Facts) -> str:
        """For actions that no algorithm with a replay takes, and for continuous actions from images."""
        space = facts.action_space
        if isinstance(space, spaces.MultiDiscrete | spaces.MultiBinary):
            return "several discrete actions at a time: only on-policy algorithms draw those"
        if not isinstance(space, spaces.Box):
            return ""
        if not is_bounded(space):
            return "actions without bounds: those with a replay need bounds"
        return "continuous actions from images: those with a replay have no convolutions" if facts.images else ""

    @classmethod
    def suggestions(cls, facts: Facts) -> tuple[Choice, ...]:
        """Schulman et al. 2017: Table 3 for vectors, Table 5 for images."""
        return (*super().suggestions(facts), *cls._rollout_suggestions(facts))

    @classmethod
    def _rollout_suggestions(cls, facts: Facts) -> tuple[Choice, ...]:
        envs = facts.env_count
        table = "images: as Schulman et al. 2017, Table 5" if facts.images else "as Schulman et al. 2017, Table 3"
        rows, most = (1024, 256) if facts.images else (_ROLLOUT_ROWS, 64)
        horizon = facts.fixed.get("horizon", 2 ** max(5, (rows // envs).bit_length() - 1))
        collected = horizon * envs
        fitting = (size for size in range(2, min(most, collected) + 1) if collected % size == 0)
        batch = max(fitting, default=collected)
        choices = [
            Choice("horizon", horizon, f"{horizon} steps x {envs} environments: about {rows:,} a rollout, {table}"),
            Choice("epochs", 3 if facts.images else 10, table),
            Choice("batch_size", batch, f"{table}: {most}, or the next that divides a rollout of {collected:,}"),
            Choice("learning_rate", 2.5e-4 if facts.images else 3e-4, table),
        ]
        if not isinstance(facts.action_space, spaces.Box):
            choices.append(Choice("entropy_coefficient", 0.01, "discrete actions: keeps trying others, as in Table 5"))
        if facts.images:
            return (*choices, Choice("clip_range", 0.1, table))
        return (*choices, Choice("hidden_sizes", (64, 64), f"{table}, whatever the spaces"))

    def check_spaces(self) -> None:
        """Also the settings."""
        super().check_spaces()
        for name in ("value_clip_range", "max_grad_norm"):
            value = getattr(self, name)
            self._require(is_number(value) and value >= 0, name, "a number of at least 0")
        for name in ("value_coefficient", "entropy_coefficient"):
            value = getattr(self, name)
            self._require(is_number(value) and 0 <= value < math.inf, name, "a number of at least 0, and finite")
        self._require(is_number(self.clip_range) and self.clip_range > 0, "clip_range", "a number above 0")
        self._require(
            self.target_kl is None or (is_number(self.target_kl) and self.target_kl > 0),
            "target_kl",
            "a number above 0, or None",
        )

    @property
    def present_clip_range(self) -> float:
        """`clip_range` at this point of the run."""
        return self.clip_range * factor_at(self.clip_range_schedule, self.progress)

    @classmethod
    def schedule_settings(cls) -> tuple[str, ...]:
        """Also the clip range's."""
        return (*super().schedule_settings(), "clip_range_schedule")

    def scheduled_values(self, env_steps: int) -> dict[str, float]:
        """Also the clip range."""
        return {**super().scheduled_values(env_steps), "clip_range": self.present_clip_range}

    def loss(self, minibatch: Minibatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The loss, and its parts: policy_loss, value_loss, entropy, approximate_kl and clip_fraction, scalars."""
        masks = () if minibatch.action_mask is None else (minibatch.action_mask,)
        return self.clipped_loss(minibatch, *self.evaluate_actions(minibatch.obs, minibatch.action, *masks))

    def clipped_loss(
        self, minibatch: Minibatch, log_prob: torch.Tensor, entropy: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The same for log probabilities, entropies and values `(batch,)` by the present networks."""
        advantage = normalized(minibatch.advantage) if self.normalize_advantages else minibatch.advantage
        log_ratio = log_prob - minibatch.log_prob
        ratio, clip = log_ratio.exp(), self.present_clip_range
        clipped = ratio.clamp(1.0 - clip, 1.0 + clip)
        policy_loss = -torch.minimum(ratio * advantage, clipped * advantage).mean()
        squared = (value - minibatch.ret).square()
        if self.value_clip_range > 0:
            near = minibatch.value + (value - minibatch.value).clamp(-self.value_clip_range, self.value_clip_range)
            squared = torch.maximum(squared, (near - minibatch.ret).square())
        value_loss, mean_entropy = squared.mean(), entropy.mean()
        loss = policy_loss + self.value_coefficient * value_loss - self.entropy_coefficient * mean_entropy
        with torch.no_grad():
            parts = {
                "policy_loss": policy_loss.detach(),
                "value_loss": value_loss.detach(),
                "entropy": mean_entropy.detach(),
                "approximate_kl": (ratio - 1.0 - log_ratio).mean(),  # Schulman's estimator, never negative
                "clip_fraction": ((ratio - 1.0).abs() > clip).float().mean(),
            }
        return loss, parts

    def update_minibatch(self, minibatch: Minibatch) -> tuple[dict[str, float], bool]:
        """One step; returns the parts of the loss, and False if `target_kl` was exceeded and no step was made."""
        loss, tensors = self.loss(minibatch)
        parts = {name: float(part) for name, part in tensors.items()}
        if self.target_kl is not None and parts["approximate_kl"] > 1.5 * self.target_kl:
            return parts, False
        torch.autograd.backward(loss)
        if self.max_grad_norm > 0:
            parts["gradient_norm"] = float(self._flat.clip_gradient(self.max_grad_norm))
        self.optimizer.step()
        self._flat.zero_grad()
        self.gradient_steps += 1
        return parts, True

    def update_policy(self, batch: Batch, weights: torch.Tensor) -> torch.Tensor:
        """One step on a `Minibatch`; returns the sizes of its advantages. Rollouts know no importance weights."""
        assert isinstance(batch, Minibatch)
        self.update_minibatch(batch)
        return batch.advantage.abs()

    @property
    def phases(self) -> tuple[Phase, ...]:
        """None: a minibatch is not divided, as its advantages are normalised together."""
        return ()

    def update_rule(self) -> UpdateRule:
        """A policy that draws its actions, and a network of values; both in one vector of weights."""
        parts = self.parts
        networks = parts.networks
        policy = RuleNetwork("policy", networks.policy, self.input_shape)
        value = RuleNetwork("value", networks.value, self.input_shape)
        departure = policy_departure(self, PPO, _POLICY)
        kind: HeadKind = "categorical" if self.distribution.sizes else "normal"
        head = PolicyHead(kind, networks, policy, departure=departure, value=value, sizes=self.distribution.sizes)
        departure = step_departure(self, PPO, _STEP) or self._own_parts()
        step = departure or ClippedStep(self._rule_scalars, parts._flat, parts.optimizer, networks.log_std)
        return UpdateRule((value,), head, step, None, actor=policy, masked=bool(self.action_masks))

    def _own_parts(self) -> str | None:
        """One line if networks or distribution are of another class, which may compute otherwise."""
        if self.arrays is not None:
            return None
        from pearl.algorithms.policy_and_value import PolicyAndValue

        for part, known in ((self.networks, PolicyAndValue), (self.distribution, ActionDistribution)):
            if type(part) is not known:
                return f"{type(self).__name__} has a {type(part).__name__} in place of a {known.__name__}"
        return None

    def _rule_scalars(self) -> Mapping[str, float]:
        return {
            "clip_range": self.present_clip_range,
            "value_clip_range": float(self.value_clip_range),
            "value_coefficient": float(self.value_coefficient),
            "entropy_coefficient": float(self.entropy_coefficient),
            "max_grad_norm": float(self.max_grad_norm),
            "target_kl": float(self.target_kl or 0.0),
            "normalize_advantages": float(self.normalize_advantages),
        }


class A2C(PPO):
    """Advantage actor-critic (Mnih et al. 2016): PPO that trains once on each rollout, all of it at a time.

    The ratio is then 1 in every step and nothing is clipped, so that the gradient is that of A2C. A `batch_size` other
    than 0 is that of minibatches, as PPO's.
    """

    batch_size: int = 0
    horizon: int = 8
    epochs: int = 1
    gae_lambda: float = 1.0
    learning_rate: float = 7e-4
    normalize_advantages: bool = False

    @classmethod
    def recommended(cls, facts: Facts) -> str:
        """Never before PPO, which trains more on each rollout."""
        return ""

    @classmethod
    def _rollout_suggestions(cls, facts: Facts) -> tuple[Choice, ...]:
        return ()

    def default_batch(self, transitions: int) -> int:
        """The whole rollout, unless a `batch_size` is set."""
        return transitions if self.batch_size == 0 else self.batch_size
