"""The input of a composition with rollouts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from composer.problem import TrainingProblem
from pearl.replay.synthetic import random_transitions
from pearl.rollout.columns import ADVANTAGE, BEGINS, LOG_PROB, RETURN, message_fields
from pearl.spec import ACTION, ACTION_MASK, OBS, STATE, RolloutSpec, TransitionSpec


@dataclass(frozen=True, kw_only=True)
class RolloutProblem(TrainingProblem):
    """A problem with rollouts."""

    rollout: RolloutSpec

    @property
    def rows(self) -> int:
        """Transitions of a rollout."""
        return self.rollout.horizon * self.actors.env_count

    def random_rollout(self, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """The Learner's columns of a synthetic rollout, `(rows, *shape)` each."""
        seen_and_done = TransitionSpec(tuple(f for f in self.transition.fields if f.name in (OBS, ACTION)))
        columns = random_transitions(seen_and_done, self.action_space, self.train, self.rows, rng)
        columns[LOG_PROB] = np.full(self.rows, -1.0, np.float32)
        columns |= {
            f.name: np.ones((self.rows, *f.shape), np.uint8) for f in self.transition.fields if f.name == ACTION_MASK
        }
        for name in (ADVANTAGE, RETURN):
            columns[name] = rng.standard_normal(self.rows, np.float32)
        if self.transition.rollout_sequences is not None:
            columns[BEGINS] = np.zeros(self.rows, bool)
            fields = message_fields(self.transition, self.rollout.horizon, self.actors.env_count)
            columns |= {f.name: np.zeros(f.shape, np.float32) for f in fields if f.name == STATE}
        return columns
