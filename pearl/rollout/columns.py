"""The columns that an actor records for each step of a rollout."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np

from pearl.action_masks import mask_field
from pearl.spec import ACTION, OBS, REWARD, STATE, FieldSpec, RolloutSequences, TransitionSpec

LOG_PROB, VALUE, END, BONUS = "log_prob", "value", "end", "bonus"
LAST_VALUE = "last_value"
ADVANTAGE, RETURN, BEGINS = "advantage", "ret", "begins"

GOES_ON, ENDED, NO_STEP = 0, 1, 2
"""Values of the column `end`; NO_STEP: the environment was reset in place of a step."""


def rollout_columns(
    observation_space: gym.Space[Any],
    action_space: gym.Space[Any],
    *,
    masked: bool = False,
    sequences: RolloutSequences | None = None,
) -> TransitionSpec:
    """The columns of a step of a rollout; `masked`: with the mask of the actions that were allowed.

    `sequences` are those of a recurrent policy.

    `obs`, `action` and `reward` as those of any transition; `log_prob` and `value` by the policy that acted; `end`
    uint8; `bonus`: gamma times the value of the last observation where a time limit ended the episode, else 0.
    """
    common = {f.name: f for f in TransitionSpec.from_spaces(observation_space, action_space).fields}
    return TransitionSpec(
        (
            *(common[name] for name in (OBS, ACTION, REWARD)),
            *(FieldSpec(name, (), "float32") for name in (LOG_PROB, VALUE)),
            FieldSpec(END, (), "uint8"),
            FieldSpec(BONUS, (), "float32"),
            *((mask_field(action_space),) if masked else ()),
        ),
        rollout_sequences=sequences,
    )


def last_value_field(envs: int) -> FieldSpec:
    """The field of a message with the values of the observations after the last step."""
    return FieldSpec(LAST_VALUE, (envs,), "float32")


def message_fields(transition: TransitionSpec, horizon: int, envs: int) -> tuple[FieldSpec, ...]:
    """The fields of a message with `horizon` steps of `envs` environments that are not columns of steps.

    The last values, and of a recurrent policy its states `(sequences of an environment, envs, size)`.
    """
    sequences = transition.rollout_sequences
    if sequences is None:
        return (last_value_field(envs),)
    shape = (horizon // sequences.length, envs, sequences.state_size)
    return last_value_field(envs), FieldSpec(STATE, shape, "float32")


def rows_of_sequences(rows: int, sequences: int, envs: int) -> np.ndarray:
    """The flat rows `(sequences * envs, steps)` int64 of each sequence, in the order of the states of a rollout.

    The rollout has `rows` rows `step * envs + environment`, and `sequences` of equal length for each environment.
    """
    places = np.arange(rows).reshape(sequences, rows // (sequences * envs), envs)
    return np.ascontiguousarray(places.transpose(0, 2, 1).reshape(sequences * envs, -1))
