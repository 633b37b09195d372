"""The input of a composition: the user's trainer, spaces, replay, actors and schedule."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np

from pearl.backends import AUTO
from pearl.spec import ACTION, DISCOUNT, ActorSpec, ReplaySpec, TrainSpec, TransitionSpec


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

    def random_columns(self, rows: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Synthetic transitions: valid actions and discounts, and noise for everything else."""
        columns = self.transition.empty(rows)
        actions = copy.deepcopy(self.action_space)
        actions.seed(int(rng.integers(1 << 30)))
        typical = {column.name: column.typical for column in self.transition.further}
        for name, column in columns.items():
            if name in typical:
                column[:] = typical[name]
            elif name == ACTION:
                column[:] = np.stack([np.asarray(actions.sample()) for _ in range(rows)])
            elif name == DISCOUNT:
                column[:] = self.train.gamma**self.train.n_step  # a larger discount would let values grow without bound
            elif column.dtype == np.uint8:
                column[:] = rng.integers(0, 256, column.shape, np.uint8)
            else:
                column[:] = rng.standard_normal(column.shape)
        if isinstance(self.action_space, gym.spaces.Discrete):
            columns[ACTION] -= self.action_space.start
        return columns
