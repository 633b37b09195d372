"""Randomized ensembled double Q-learning: Chen, Wang, Zhou and Ross 2021, arXiv:2101.05982."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar

import numpy as np

from pearl import _native
from pearl.algorithms.ensemble import EnsembleSAC
from pearl.algorithms.suggestions import Choice, Facts
from pearl.algorithms.trainer import Phase
from pearl.algorithms.update_rule import RuleStep, Scalars, UpdateRule
from pearl.lazy_torch import torch


class REDQ(EnsembleSAC):
    """SAC with an ensemble of critics, which may train many times on each transition (paper, Algorithm 1).

    All `num_critics` critics (N = 10) have the same target, `r + gamma * (min over M of Q'_i(s', a') - alpha * log
    pi(a'|s'))`, where M are `target_critics` (2) of them, drawn for each step. The policy follows the mean of all
    critics and moves every `policy_delay` steps: 20, as many as there are per environment step in the paper.
    Targets move in every step. A transition's priority is the largest of all critics' absolute TD errors.

    Settings are those of the paper and of the authors' code: 20 updates of 256 samples per environment step
    (`replay_ratio` = 20 * 256), 5,000 random steps first, two hidden layers of 256, 3e-4, tau 0.005. What differs: the
    entropy target is minus the action's size, where the authors have a number for each environment (Hopper -1, not -3):
    set `target_entropy`.
    """

    _algorithm: ClassVar[str] = "REDQ"

    num_critics: int = 10
    target_critics: int = 2
    policy_delay: int = 20
    replay_ratio: float = 20 * 256.0
    least_updates_per_step: float = 1.0
    most_updates_per_step: float = 20.0
    learning_starts: int = 5000

    @classmethod
    def suggestions(cls, facts: Facts) -> tuple[Choice, ...]:
        """Also the policy's delay: in the paper, the policy moves once for the updates of an environment step."""
        choices = super().suggestions(facts)
        chosen = {choice.name: choice.value for choice in choices}
        reason = "the policy moves once for the gradient steps of an environment step (Chen et al. 2021)"
        found = cls.settings_at(chosen["replay_ratio"] / chosen["batch_size"])
        return (*choices, *(Choice(name, value, reason) for name, value in found.items()))

    @classmethod
    def settings_at(cls, updates: float) -> dict[str, Any]:
        """The policy's delay: as many gradient steps, from 1 to the delay of the class."""
        return {"policy_delay": round(min(max(1.0, updates), cls.policy_delay))}

    def check_spaces(self) -> None:
        """Also the settings."""
        super().check_spaces()
        self._require_whole("target_critics", 1, self.num_critics)
        self._require_whole("policy_delay", 1)

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Critics, and in every `policy_delay`-th step the actor (and temperature) against the updated critics."""
        return self._delayed_phases(self.policy_delay)

    def step_kind(self) -> tuple[object, ...] | str:
        """Which phases the step has; a text where the host draws the critics of each step."""
        if self.target_critics < self.num_critics:
            return f"{type(self).__name__} draws the critics that judge targets on the host"
        return super().step_kind()

    def judges(self) -> np.ndarray:
        """The numbers `(target_critics,)` of the critics that judge the next step's targets.

        They are a function of `noise_seed` and the count of steps, by one routine in C++, as the noise.
        """
        seed = int(self.parts.noise_seed.item())
        if self.target_critics == self.num_critics:
            return np.arange(self.num_critics)
        return _native.chosen_critics(seed, self.gradient_steps, self.num_critics, self.target_critics)

    def _target_of(self, next_obs: torch.Tensor, unit: torch.Tensor) -> torch.Tensor:
        values = self.target_critic.of_unit(next_obs, unit, self.judges().tolist())
        return functools.reduce(torch.minimum, values)

    def _judged(self, obs: torch.Tensor, unit: torch.Tensor) -> torch.Tensor:
        return functools.reduce(torch.add, self.critic.of_unit(obs, unit)) / self.num_critics

    def update_rule(self) -> UpdateRule:
        """All critics in the policy's gradient; targets take actions sampled from the policy."""
        return dataclasses.replace(super().update_rule(), actor_critics=self.num_critics, ensemble=True)

    def _rule_step(self) -> RuleStep | str:
        return self._step_of(REDQ, "EnsembleCritic")

    def _rule_scalars(self) -> Scalars:
        return (
            super()
            ._rule_scalars()
            ._replace(policy_delay=int(self.policy_delay), target_critics=int(self.target_critics))
        )
