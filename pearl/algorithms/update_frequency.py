"""How often an algorithm with a replay trains, by the settings of Stable-Baselines3: `train_freq` and `gradient_steps`.

Its `train_freq` counts steps of the vector of environments; here it counts transitions, whatever collects them. With
one environment both are the same; of a file with `n_envs` environments, `train_freq` is `n_envs` times as large.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pearl.errors import TrainerError

FREQ, STEPS, RATIO = "train_freq", "gradient_steps_each", "replay_ratio"
# The attribute `gradient_steps` of a trainer counts its steps, so the setting of this name is kept under another.
SPELLINGS = {"gradient_steps": STEPS}
_DEFAULTS = {FREQ: 1, STEPS: 1}


@dataclass(frozen=True)
class UpdateFrequency:
    """`gradient_steps` are made after every `train_freq` transitions; -1: as many as transitions."""

    train_freq: int
    gradient_steps: int

    def replay_ratio(self, batch_size: int) -> float:
        """Samples trained for each transition collected."""
        steps = self.train_freq if self.gradient_steps == -1 else self.gradient_steps
        return batch_size * steps / self.train_freq

    def reason(self, batch_size: int) -> str:
        """The same as a formula, in words of the settings."""
        steps = "-1 (as many as train_freq)" if self.gradient_steps == -1 else str(self.gradient_steps)
        return f"batch_size {batch_size} x gradient_steps {steps} / train_freq {self.train_freq}"


def respelled(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by the names that trainers keep them under; TrainerError for one that is given by both its names."""
    twice = [f"{name} and {SPELLINGS[name]}" for name in SPELLINGS if name in settings and SPELLINGS[name] in settings]
    if twice:
        raise TrainerError(f"{twice[0]} are the same setting. Leave one of them out.")
    return {SPELLINGS.get(name, name): value for name, value in settings.items()}


def frequency_of(trainer_class: type, settings: Mapping[str, Any]) -> UpdateFrequency | None:
    """The frequency that a class or its `settings` state; None if they leave it to `replay_ratio`.

    What is left out of the two is 1. Raises TrainerError for values that mean nothing here.
    """
    stated = respelled(settings)
    found = {name: stated.get(name, getattr(trainer_class, name, None)) for name in _DEFAULTS}
    if all(value is None for value in found.values()):
        return None
    values = {name: _DEFAULTS[name] if value is None else value for name, value in found.items()}
    name, frequency = trainer_class.__name__, values[FREQ]
    if isinstance(frequency, list | tuple) and len(frequency) == 2:
        if frequency[1] != "step":
            raise TrainerError(
                f'{name}.train_freq counts transitions: it must be a whole number, or (number, "step"); found '
                f"{frequency!r}. How long an episode is, is not known before: give its usual length."
            )
        frequency = frequency[0]
    if type(frequency) is not int or frequency < 1:
        raise TrainerError(
            f'{name}.train_freq must be a whole number of at least 1, (number, "step"), or None; found '
            f"{values[FREQ]!r}."
        )
    steps = values[STEPS]
    if type(steps) is not int or (steps < 1 and steps != -1):
        raise TrainerError(
            f"{name}.gradient_steps must be a whole number of at least 1, -1 for as many as transitions, or None; "
            f"found {steps!r}."
        )
    return UpdateFrequency(frequency, steps)


def ratio_of_class(trainer_class: type) -> float | None:
    """The replay ratio that a class of the user states; None if it is a default of PEARL."""
    owner = next((one for one in trainer_class.__mro__ if RATIO in vars(one)), None)
    if owner is None or owner.__module__.startswith("pearl."):
        return None
    return float(vars(owner)[RATIO])


def check_agreement(frequency: UpdateFrequency, batch_size: int, stated: Mapping[str, object]) -> None:
    """Raise TrainerError if a replay ratio that is `stated`, by who states it, is not that of the frequency."""
    ratio = frequency.replay_ratio(batch_size)
    for who, found in stated.items():
        if not (isinstance(found, int | float) and math.isclose(found, ratio, rel_tol=1e-6)):
            raise TrainerError(
                f"train_freq and gradient_steps mean a replay_ratio of {ratio:g} ({frequency.reason(batch_size)}); "
                f"{who} states replay_ratio={found!r}. Leave one of them out."
            )
