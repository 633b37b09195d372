"""The input of a composition with rollouts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np

from pearl.backends import AUTO
from pearl.replay.synthetic import random_transitions
from pearl.rollout.columns import ADVANTAGE, LOG_PROB, RETURN
from pearl.spec import ACTION, OBS, ActorSpec, RolloutSpec, TrainSpec, TransitionSpec


@dataclass(frozen=True)
class RolloutProblem:
    """The user's trainer, spaces, rollouts, actors and schedule; fields as those of `composer.problem.Problem`."""

    trainer_class: type
    settings: Mapping[str, Any]
    observation_space: gym.Space[Any]
    action_space: gym.Space[Any]
    transition: TransitionSpec
    rollout: RolloutSpec
    train: TrainSpec
    actors: ActorSpec
    implementation: str = AUTO
    imported_from: str | None = None

    @property
    def rows(self) -> int:
        """Transitions of a rollout."""
        return self.rollout.horizon * self.actors.env_count

    def random_rollout(self, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """The Learner's columns of a synthetic rollout, `(rows, *shape)` each."""
        seen_and_done = TransitionSpec(tuple(f for f in self.transition.fields if f.name in (OBS, ACTION)))
        columns = random_transitions(seen_and_done, self.action_space, self.train, self.rows, rng)
        columns[LOG_PROB] = np.full(self.rows, -1.0, np.float32)
        for name in (ADVANTAGE, RETURN):
            columns[name] = rng.standard_normal(self.rows, np.float32)
        return columns
