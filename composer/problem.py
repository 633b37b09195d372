"""The input of a composition: the user's trainer, spaces, replay, actors and schedule."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np

from pearl.backends import AUTO
from pearl.replay.synthetic import random_transitions
from pearl.spec import ONE_LEARNER, ActorSpec, LearnersSpec, ReplaySpec, TrainSpec, TransitionSpec


@dataclass(frozen=True, kw_only=True)
class TrainingProblem:
    """The user's trainer, spaces, actors and schedule, which problems with a replay and with rollouts share.

    `transition` has the columns of the actors' messages. `implementation` names the Learner's, or "auto" for all that
    can train the trainer. `imported_from` names the module from which a program imports the trainer class, if not the
    module that defines it.
    """

    trainer_class: type
    settings: Mapping[str, Any]
    observation_space: gym.Space[Any]
    action_space: gym.Space[Any]
    transition: TransitionSpec
    train: TrainSpec
    actors: ActorSpec
    implementation: str = AUTO
    imported_from: str | None = None


@dataclass(frozen=True, kw_only=True)
class Problem(TrainingProblem):
    """A problem with a replay."""

    replay: ReplaySpec
    learners: LearnersSpec = ONE_LEARNER
    most_threads: int = 0  # of a Learner, by the cores of other nodes; 0: by those of the host alone

    @property
    def of_one_learner(self) -> Problem:
        """What each of several Learners has: its bank, and its part of each batch."""
        count = self.learners.count
        return dataclasses.replace(
            self,
            replay=dataclasses.replace(self.replay, capacity=self.replay.capacity // count),
            train=dataclasses.replace(self.train, batch_size=self.train.batch_size // count),
        )

    @property
    def insertions(self) -> int:
        """The transitions inserted in one iteration: a step's of each environment, as far as the replay holds them."""
        return min(self.actors.env_count * self.train.rows_per_step, self.replay.capacity)

    def random_columns(self, rows: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """`rows` synthetic transitions."""
        return random_transitions(self.transition, self.action_space, self.train, rows, rng)
