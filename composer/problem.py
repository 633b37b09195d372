"""The input of a composition: the user's trainer, spaces, replay, actors and schedule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import gymnasium as gym
import numpy as np

from pearl.backends import AUTO
from pearl.replay.synthetic import random_transitions
from pearl.spec import ActorSpec, ReplaySpec, TrainSpec, TransitionSpec


class TrainingProblem(Protocol):
    """What measuring needs of a problem, with a replay or with rollouts."""

    @property
    def trainer_class(self) -> type:
        """The trainer class."""

    @property
    def settings(self) -> Mapping[str, Any]:
        """Its settings."""

    @property
    def observation_space(self) -> gym.Space[Any]:
        """Of one environment."""

    @property
    def action_space(self) -> gym.Space[Any]:
        """Of one environment."""

    @property
    def transition(self) -> TransitionSpec:
        """The columns of actors' messages."""

    @property
    def train(self) -> TrainSpec:
        """The schedule."""

    @property
    def imported_from(self) -> str | None:
        """The module from which a program imports the trainer class, if not the one that defines it."""

    @property
    def actors(self) -> ActorSpec:
        """The actors."""


@dataclass(frozen=True)
class Problem:
    """The user's trainer, spaces, replay, actors and schedule.

    `implementation` names the Learner's, or "auto" for all that can train the trainer. `imported_from` names the module
    from which a program imports the trainer class, if not the module that defines it.
    """

    trainer_class: type
    settings: Mapping[str, Any]
    observation_space: gym.Space[Any]
    action_space: gym.Space[Any]
    transition: TransitionSpec
    replay: ReplaySpec
    train: TrainSpec
    actors: ActorSpec
    implementation: str = AUTO
    imported_from: str | None = None

    @property
    def insertions(self) -> int:
        """The transitions inserted in one iteration: one per environment, as far as the replay holds them."""
        return min(self.actors.env_count, self.replay.capacity)

    def random_columns(self, rows: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """`rows` synthetic transitions."""
        return random_transitions(self.transition, self.action_space, self.train, rows, rng)
