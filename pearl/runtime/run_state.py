"""Saves the state of a run into checkpoints and restores it."""

from __future__ import annotations

import json
import logging
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pearl.algorithms.trainer import Trainer, TrainerLike
from pearl.errors import CheckpointError, ConfigurationError
from pearl.runtime.callback_calls import CallbackCalls
from pearl.runtime.checkpoint import CheckpointState, load_checkpoint, save_checkpoint
from pearl.runtime.checkpoint_files import Tensors, is_count, refuse, saved_count
from pearl.runtime.env_attributes import EnvAttributes
from pearl.runtime.experience import Experience, part
from pearl.runtime.trainer_state import (
    RANDOM_GROUP,
    check_module_tensors,
    load_module_tensors,
    module_tensors,
    restore_torch_random,
    saved_rates,
    stated_rates,
    torch_random_tensors,
)

logger = logging.getLogger("pearl.runtime")

_RETURN_WINDOW = 100
BEST_PREFIX = "best-"  # prefix of the best weights' tensor groups and scalars; no attribute has a hyphen
_CALLBACKS = "callbacks"  # the scalar with their states, as JSON
_ATTRIBUTES = "env_attributes"  # the scalar with what callbacks set in the environments, as JSON
_BEST_SCALARS = ("mean", "episodes", "env_steps", "gradient_steps")
_EVALUATED_IN = f"{BEST_PREFIX}evaluated_in"
_TRAINED_IN = "trained_in"
RUN_FOLDER = "run_folder"


@dataclass
class Counters:
    """Progress of a run; `returns` are those of the last training episodes.

    `ratio_stored` and `ratio_samples` are what `stored` and `samples` were when the replay ratio began to count anew;
    `given` are the transitions that no Actor of the run collected, which checkpoints of earlier versions do not have.
    """

    env_steps: int = 0
    gradient_steps: int = 0
    episodes: int = 0
    collected: int = 0
    stored: int = 0
    samples: int = 0
    ratio_stored: int = 0
    ratio_samples: int = 0
    given: int = 0
    wall_s: float = 0.0
    returns: deque[float] = field(default_factory=lambda: deque(maxlen=_RETURN_WINDOW))

    @property
    def mean_return(self) -> float:
        """Mean return of the last 100 training episodes, exploration included; NaN before the first."""
        return float(np.mean(self.returns)) if self.returns else float("nan")

    def filled(self, rows: int) -> None:
        """The replay got `rows` transitions that no Actor collected: as if a run had just come so far."""
        self.collected = self.stored = self.ratio_stored = self.given = rows

    def leave_out(self, samples: int) -> None:
        """The replay ratio does not count the first `samples` of the run, as far as they were trained."""
        self.ratio_samples = max(self.ratio_samples, min(self.samples, samples))

    def to_scalars(self) -> dict[str, bool | int | float | str]:
        """Plain scalars for a manifest."""
        plain = {k: v for k, v in vars(self).items() if k != "returns"}
        return {**plain, "returns": json.dumps(list(self.returns))}

    @classmethod
    def from_scalars(cls, scalars: Mapping[str, Any], where: Path) -> Counters:
        """The inverse of `to_scalars`; CheckpointError names a counter that is missing, malformed or contradictory."""
        scalars = {"given": 0, **scalars}
        counts = [name for name, value in vars(cls()).items() if type(value) is int]
        for name in counts:
            if not is_count(scalars.get(name)):
                refuse(where, name, "a whole number of at least 0", scalars.get(name))
        wall_s = scalars.get("wall_s")
        if isinstance(wall_s, bool) or not isinstance(wall_s, int | float) or not 0 <= wall_s < math.inf:
            refuse(where, "wall_s", "seconds, at least 0", wall_s)
        counters = cls(**{name: scalars[name] for name in counts}, wall_s=float(wall_s))
        counters.returns.extend(_saved_returns(scalars.get("returns"), counters.episodes, where))
        limits = {"stored": "collected", "given": "stored", "ratio_stored": "stored", "ratio_samples": "samples"}
        for name, most in limits.items():
            if getattr(counters, name) > getattr(counters, most):
                refuse(where, name, f"at most {most}, {getattr(counters, most)}", getattr(counters, name))
        return counters


def _saved_returns(text: object, episodes: int, where: Path) -> list[float]:
    """The saved returns: of the last `_RETURN_WINDOW` of `episodes` episodes."""
    count = min(episodes, _RETURN_WINDOW)
    try:
        found: Any = json.loads(text) if isinstance(text, str) else None
        returns = [float(value) for value in found if type(value) in (int, float)]
    except (ValueError, TypeError, OverflowError, RecursionError):
        found, returns = None, []
    if not isinstance(found, list) or not len(found) == len(returns) == count:
        refuse(where, "returns", f"a list of {count} numbers, for {episodes} episodes", text)
    return returns


def _saved_object(text: object) -> dict[str, Any] | None:
    """The JSON object that was saved as a text; None if it is none."""
    try:
        found: Any = json.loads(text) if isinstance(text, str) else None
    except (ValueError, RecursionError):
        found = None
    return found if isinstance(found, dict) else None


def _saved_states(text: object, where: Path) -> dict[str, Any]:
    """The saved states of callbacks, by name."""
    found = _saved_object(text)
    if found is None or not all(isinstance(state, dict) for state in found.values()):
        refuse(where, _CALLBACKS, "JSON with the state of each callback", text)
    return found


def _saved_place(state: CheckpointState, name: str, now: str, where: Path) -> str:
    """The environment that the checkpoint states as `name`; `now` for checkpoints of versions that stated none."""
    before = state.counters.get(name, now)
    if not isinstance(before, str):
        refuse(where, name, "a text", before)
    return before


class Best(NamedTuple):
    """The best weights so far (as `module_tensors` returns them), their step, and the evaluation that selected them.

    `mean` is the mean return over the `episodes` of that evaluation. It is biased upwards: it was selected from many.
    """

    mean: float
    episodes: int
    env_steps: int
    gradient_steps: int
    tensors: Tensors


@dataclass(frozen=True)
class RunState:
    """The parts of a run that a checkpoint covers.

    `evaluated_in` says in which environment evaluations play: best weights from another one are dropped. `trained_in`
    is the environment of the Actors; a warning says if it changed. "": not known. `run_folder` is the run's folder if
    its checkpoints are elsewhere, where another run may save its own later.
    """

    identity: Mapping[str, str]
    trainer: TrainerLike
    experience: Experience
    callbacks: CallbackCalls | None = None
    env_attributes: EnvAttributes | None = None
    evaluated_in: str = ""
    trained_in: str = ""
    run_folder: str = ""

    def save(self, directory: Path, counters: Counters, best: Best | None = None) -> Path:
        """Write a checkpoint into `directory`; nothing may change meanwhile."""
        arrays, own = self.experience.state()
        scalars = {**counters.to_scalars(), **own}
        if self.callbacks is not None:
            scalars[_CALLBACKS] = self.callbacks.states()
        if self.env_attributes is not None and (attributes := self.env_attributes.values):
            scalars[_ATTRIBUTES] = json.dumps(attributes)
        scalars |= stated_rates(self.trainer)
        scalars |= {_TRAINED_IN: self.trained_in} if self.trained_in else {}
        scalars |= {RUN_FOLDER: self.run_folder} if self.run_folder else {}
        tensors = module_tensors(self.trainer)
        if random := torch_random_tensors():
            tensors[RANDOM_GROUP] = {**random}
        if best is not None:
            scalars |= {f"{BEST_PREFIX}{name}": getattr(best, name) for name in _BEST_SCALARS}
            scalars |= {_EVALUATED_IN: self.evaluated_in} if self.evaluated_in else {}
            tensors |= {f"{BEST_PREFIX}{group}": dict(content) for group, content in best.tensors.items()}
        state = CheckpointState(counters.env_steps, self.identity, scalars, tensors, arrays)
        return save_checkpoint(directory, state)

    def load(self, directory: Path) -> tuple[Counters, Best | None]:
        """Restore the newest checkpoint of `directory`.

        CheckpointError if it belongs to another program, or if any of its parts is malformed or contradicts another;
        CallbackError if a callback cannot take its state.
        """
        state = load_checkpoint(directory, self.identity)
        counters = Counters.from_scalars(state.counters, directory)
        if counters.env_steps != state.step:
            refuse(directory, "env_steps", f"its step, {state.step}", counters.env_steps)
        best = self._saved_best(state, counters, directory)
        rates = saved_rates(self.trainer, state.counters, directory)
        self._check_names(state, directory)
        self._check_conflict(state, directory)
        self._warn_of_another_environment(state, directory)
        self.experience.check(state.arrays, state.counters, directory)
        load_module_tensors(self.trainer, {k: v for k, v in state.tensors.items() if not k.startswith(BEST_PREFIX)})
        if isinstance(self.trainer, Trainer):
            for change in self.trainer.restate_rates(rates):
                logger.info("%s.", change)
        restore_torch_random(state.tensors.get(RANDOM_GROUP, {}))
        if hasattr(self.trainer, "gradient_steps"):
            self.trainer.gradient_steps = counters.gradient_steps
        self.experience.load(state.arrays, state.counters, directory)
        if self.env_attributes is not None and (saved := state.counters.get(_ATTRIBUTES)) is not None:
            if (attributes := _saved_object(saved)) is None:
                refuse(directory, _ATTRIBUTES, "a JSON object", saved)
            self._set_attributes(self.env_attributes, attributes, directory)
        if self.callbacks is not None:
            self.callbacks.load_states(_saved_states(state.counters.get(_CALLBACKS, "{}"), directory))
        return counters, best

    @staticmethod
    def _set_attributes(actors: EnvAttributes, saved: Mapping[str, Any], where: Path) -> None:
        try:
            actors.set(saved)
        except ConfigurationError as error:
            raise CheckpointError(
                f"The checkpoint in {where} is of a run whose callbacks set attributes of its environments, which "
                f"cannot be set in these: {error} Resume with the environment that it was trained in, or start "
                "without --resume."
            ) from error

    def _saved_best(self, state: CheckpointState, counters: Counters, where: Path) -> Best | None:
        tensors, scalars = part(state.tensors, BEST_PREFIX), part(state.counters, BEST_PREFIX)
        if not tensors and not scalars:
            return None
        mean = scalars.get("mean")
        if isinstance(mean, bool) or not isinstance(mean, int | float) or math.isnan(mean) or not tensors:
            refuse(where, f"{BEST_PREFIX}mean", f"a number, together with weights in {BEST_PREFIX}...", mean)
        counts = {name: saved_count(state.counters, f"{BEST_PREFIX}{name}", where) for name in _BEST_SCALARS[1:]}
        for name in ("env_steps", "gradient_steps"):
            if counts[name] > (most := getattr(counters, name)):
                refuse(where, f"{BEST_PREFIX}{name}", f"at most the {name} of the checkpoint, {most}", counts[name])
        check_module_tensors(self.trainer, tensors)
        if (before := _saved_place(state, _EVALUATED_IN, self.evaluated_in, where)) != self.evaluated_in:
            logger.warning(
                "The best weights of the checkpoint were evaluated in %s, and this run evaluates in %s: their mean "
                "return of %.6g does not count, and the next evaluations select the best again.",
                *(before, self.evaluated_in, mean),
            )
            return None
        return Best(float(mean), **counts, tensors=tensors)

    def _warn_of_another_environment(self, state: CheckpointState, where: Path) -> None:
        if (before := _saved_place(state, _TRAINED_IN, self.trained_in, where)) != self.trained_in:
            logger.warning(
                "The checkpoint's run trained in %s, and this run trains in %s: the weights and the replay come from "
                "the first one.",
                *(before, self.trained_in),
            )

    def _check_conflict(self, state: CheckpointState, where: Path) -> None:
        found = self.trainer.checkpoint_conflict(state.tensors) if isinstance(self.trainer, Trainer) else ""
        if found:
            raise CheckpointError(
                f"The checkpoint in {where} is of another environment. {found} Resume with the environment and the "
                "env_kwargs that it was trained with, or start without --resume."
            )

    def _check_names(self, state: CheckpointState, where: Path) -> None:
        """Refuse unknown names: their values would be missing from the next checkpoint."""
        known = {
            *vars(Counters()),
            _CALLBACKS,
            _ATTRIBUTES,
            _EVALUATED_IN,
            _TRAINED_IN,
            RUN_FOLDER,
            *(f"{BEST_PREFIX}{name}" for name in _BEST_SCALARS),
        }
        known |= stated_rates(self.trainer).keys()
        for kind, names in (("counters", state.counters), ("arrays", state.arrays)):
            if unknown := [n for n in names if n not in known and not self.experience.knows(kind, n)]:
                refuse(where, f"each of the {kind}", "one that a run has", unknown[0])
