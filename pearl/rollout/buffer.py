"""One rollout on the host: first as the actors collected it, then as the Learner trains on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from pearl.rollout.columns import (
    ADVANTAGE,
    BEGINS,
    BONUS,
    END,
    GOES_ON,
    LAST_VALUE,
    LOG_PROB,
    NO_STEP,
    RETURN,
    VALUE,
    message_fields,
)
from pearl.spec import ACTION, ACTION_MASK, OBS, REWARD, STATE, ActorSpec, RolloutSpec, TransitionSpec


class RolloutBuffer:
    """Columns `(horizon, envs, *shape)`, one row for each step; actors have neighbouring environments.

    `rewards` become advantages and `values` become returns, in place, before the Learner sees them. Of a recurrent
    policy, `states` `(sequences of an environment, envs, size)` are those before the sequences.
    """

    def __init__(self, transition: TransitionSpec, rollout: RolloutSpec, actors: ActorSpec) -> None:
        self.horizon, self.envs = rollout.horizon, actors.env_count
        self._per_actor = actors.envs_per_actor
        shape = (self.horizon, self.envs)
        self.columns = {f.name: np.empty((*shape, *f.shape), f.dtype) for f in transition.fields}
        self.last_values = np.empty(self.envs, np.float32)
        # V-trace: the present policy's values, since returns minus advantages do not give them.
        self.old_values = np.empty(shape, np.float32) if rollout.correction == "vtrace" else None
        self.states: np.ndarray | None = None
        for field in message_fields(transition, self.horizon, self.envs):
            if field.name == STATE:
                self.states = np.empty(field.shape, np.float32)
        self.rewards, self.values, self.bonus, self.ends = (self.columns[n] for n in (REWARD, VALUE, BONUS, END))
        self.log_probs = self.columns[LOG_PROB]

    def take(self, parts: Sequence[Mapping[str, np.ndarray]]) -> None:
        """Copy the messages of all actors in, in the order of the actors."""
        for actor, message in enumerate(parts):
            first = actor * self._per_actor
            mine = slice(first, first + self._per_actor)
            for name, column in self.columns.items():
                shape = (self.horizon, self._per_actor, *column.shape[2:])
                column[:, mine] = message[name][: self.horizon * self._per_actor].reshape(shape)
            self.last_values[mine] = message[LAST_VALUE]
            if self.states is not None:
                self.states[:, mine] = message[STATE]

    def flat(self) -> dict[str, np.ndarray]:
        """The Learner's columns, `(horizon * envs, *shape)` views; advantages must have been estimated.

        With V-trace also `value`. Of a recurrent policy also `begins` `(horizon * envs,)` bool, whether an episode
        begins with the step, and `state`, which is `states`. A rollout's first steps never begin an episode here: their
        states hold the past.
        """
        named = {OBS: OBS, ACTION: ACTION, LOG_PROB: LOG_PROB, ADVANTAGE: REWARD, RETURN: VALUE}
        named |= {name: name for name in (ACTION_MASK,) if name in self.columns}
        rows = self.horizon * self.envs
        found = {name: self.columns[of].reshape(rows, *self.columns[of].shape[2:]) for name, of in named.items()}
        if self.old_values is not None:
            found[VALUE] = self.old_values.reshape(rows)
        if self.states is not None:
            begins = np.zeros((self.horizon, self.envs), bool)
            begins[1:] = self.ends[:-1] != GOES_ON
            found |= {BEGINS: begins.reshape(rows), STATE: self.states}
        return found

    def rows(self) -> np.ndarray | None:
        """The flat rows that are transitions; None: all are."""
        no_step = self.ends.reshape(-1) == NO_STEP
        return np.flatnonzero(~no_step) if no_step.any() else None
