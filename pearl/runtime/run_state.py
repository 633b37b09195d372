"""What a checkpoint of a run holds, and how it goes back."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch

from pearl.algorithms.trainer import TrainerLike
from pearl.errors import CheckpointError
from pearl.replay.protocol import ReplayManager
from pearl.runtime.checkpoint import CheckpointState, load_checkpoint, save_checkpoint
from pearl.runtime.trainer_state import (
    RANDOM_GROUP,
    load_module_tensors,
    module_tensors,
    restore_torch_random,
    torch_random_tensors,
)

_RETURN_WINDOW = 100
_BEST = "best-"  # prefix of the best weights' tensor groups and scalars; no attribute has a hyphen
_BEST_SCALARS = ("mean", "episodes", "env_steps", "gradient_steps")
_N = TypeVar("_N", int, float)
_STORAGE_SCALARS = ("size", "cursor", "inserted")


class HostStorage(Protocol):
    """What the host needs of a Data Storage, wherever it is."""

    @property
    def capacity(self) -> int:
        """Slots."""
        ...

    @property
    def size(self) -> int:
        """Slots written so far."""
        ...

    @property
    def cursor(self) -> int:
        """The next slot to be written."""
        ...

    @property
    def inserted(self) -> int:
        """Transitions ever inserted."""
        ...

    @property
    def columns(self) -> Mapping[str, np.ndarray]:
        """All columns, `(capacity, *shape)` each."""
        ...

    def restore(self, columns: Mapping[str, np.ndarray], *, size: int, cursor: int, inserted: int) -> None:
        """Take columns back."""


@dataclass
class Counters:
    """How far a run is; `returns` are those of the last training episodes.

    `ratio_stored` and `ratio_samples` are what `stored` and `samples` were when the replay ratio was last changed.
    """

    env_steps: int = 0
    gradient_steps: int = 0
    episodes: int = 0
    collected: int = 0
    stored: int = 0
    samples: int = 0
    ratio_stored: int = 0
    ratio_samples: int = 0
    wall_s: float = 0.0
    returns: deque[float] = field(default_factory=lambda: deque(maxlen=_RETURN_WINDOW))

    @property
    def mean_return(self) -> float:
        """Mean return of the last 100 training episodes, exploration included; NaN before the first."""
        return float(np.mean(self.returns)) if self.returns else float("nan")

    def to_scalars(self) -> dict[str, bool | int | float | str]:
        """Plain scalars for a manifest."""
        plain = {k: v for k, v in vars(self).items() if k != "returns"}
        return {**plain, "returns": json.dumps(list(self.returns))}

    @classmethod
    def from_scalars(cls, scalars: Mapping[str, Any], where: Path) -> Counters:
        """The inverse; CheckpointError names what is missing or malformed."""
        try:
            # Earlier checkpoints knew no change of the ratio.
            found = {"ratio_stored": 0, "ratio_samples": 0, **scalars}
            counters = cls(**{k: type(v)(found[k]) for k, v in vars(cls()).items() if k != "returns"})
            counters.returns.extend(float(r) for r in json.loads(str(scalars["returns"])))
        except (KeyError, ValueError, TypeError) as error:
            raise CheckpointError(f"The checkpoint in {where} has no valid counter {error}.") from error
        return counters


class Best(NamedTuple):
    """The weights selected so far (as `module_tensors` gives them), after how many steps, and what selected them.

    `mean` is the mean return of the `episodes` of the evaluation that found them best: one of many, and so too high.
    """

    mean: float
    episodes: int
    env_steps: int
    gradient_steps: int
    tensors: Mapping[str, Mapping[str, torch.Tensor]]


@dataclass(frozen=True)
class RunState:
    """The parts of a run that a checkpoint covers."""

    identity: Mapping[str, str]
    trainer: TrainerLike
    replay: ReplayManager
    storage: HostStorage

    def save(self, directory: Path, counters: Counters, best: Best | None = None) -> Path:
        """Write a checkpoint into `directory`; nothing may change meanwhile."""
        arrays: dict[str, np.ndarray] = {}
        scalars = counters.to_scalars()
        for key, value in self.replay.state_dict().items():
            if isinstance(value, np.ndarray):
                arrays[f"replay/{key}"] = value
            else:
                scalars[f"replay/{key}"] = value
        for name, column in self.storage.columns.items():
            arrays[f"storage/{name}"] = column[: self.storage.size]
        scalars |= {f"storage/{name}": getattr(self.storage, name) for name in _STORAGE_SCALARS}
        tensors = {**module_tensors(self.trainer), RANDOM_GROUP: torch_random_tensors()}
        if best is not None:
            scalars |= {f"{_BEST}{name}": getattr(best, name) for name in _BEST_SCALARS}
            tensors |= {f"{_BEST}{group}": dict(content) for group, content in best.tensors.items()}
        state = CheckpointState(counters.env_steps, self.identity, scalars, tensors, arrays)
        return save_checkpoint(directory, state)

    def load(self, directory: Path) -> tuple[Counters, Best | None]:
        """Take the newest checkpoint of `directory` back; CheckpointError if it belongs to another program."""
        state = load_checkpoint(directory, self.identity)
        counters = Counters.from_scalars(state.counters, directory)
        best = _saved_best(state, counters)
        load_module_tensors(self.trainer, {k: v for k, v in state.tensors.items() if not k.startswith(_BEST)})
        restore_torch_random(state.tensors.get(RANDOM_GROUP, {}))
        if hasattr(self.trainer, "gradient_steps"):
            self.trainer.gradient_steps = counters.gradient_steps
        self.replay.load_state_dict({**_part(state.arrays, "replay/"), **_part(state.counters, "replay/")})
        scalars = {name: _saved_number(state.counters, f"storage/{name}", int) for name in _STORAGE_SCALARS}
        self.storage.restore(_part(state.arrays, "storage/"), **scalars)
        return counters, best


def _saved_best(state: CheckpointState, counters: Counters) -> Best | None:
    tensors = _part(state.tensors, _BEST)
    if not tensors:
        return None
    whole = {name: _saved_number(state.counters, f"{_BEST}{name}", int) for name in _BEST_SCALARS[1:]}
    best = Best(_saved_number(state.counters, f"{_BEST}mean", float), **whole, tensors=tensors)
    for name, most in (("env_steps", counters.env_steps), ("gradient_steps", counters.gradient_steps)):
        if not 0 <= (found := getattr(best, name)) <= most:
            raise CheckpointError(
                f"The best weights of a checkpoint at {name} {most:,} cannot be of {name} {found:,}. "
                "The checkpoint is damaged: resume from another."
            )
    return best


def _saved_number(counters: Mapping[str, Any], name: str, kind: type[_N]) -> _N:
    try:
        return kind(counters[name])
    except (KeyError, ValueError, TypeError, OverflowError) as error:
        raise CheckpointError(
            f"The checkpoint's {name} must be a number; found {counters.get(name, 'nothing')!r}."
        ) from error


def _part(values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}
