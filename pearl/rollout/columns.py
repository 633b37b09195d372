"""What an actor records of each step of a rollout."""

from __future__ import annotations

from typing import Any

import gymnasium as gym

from pearl.action_masks import mask_field
from pearl.spec import ACTION, OBS, REWARD, FieldSpec, TransitionSpec

LOG_PROB, VALUE, END, BONUS = "log_prob", "value", "end", "bonus"
LAST_VALUE = "last_value"
ADVANTAGE, RETURN = "advantage", "ret"

GOES_ON, ENDED, NO_STEP = 0, 1, 2
"""Values of the column `end`; NO_STEP: the environment was reset in place of a step."""


def rollout_columns(
    observation_space: gym.Space[Any], action_space: gym.Space[Any], *, masked: bool = False
) -> TransitionSpec:
    """The columns of a step of a rollout; `masked`: with the mask of the actions that were allowed.

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
        )
    )


def last_value_field(envs: int) -> FieldSpec:
    """The field of a message with the values of the observations after the last step."""
    return FieldSpec(LAST_VALUE, (envs,), "float32")
