"""The state of one Learner on its way between its process and the host: files that hold numbers alone.

    arrays/<name>.npy   rows of the bank, its sum tree, networks and optimizers
    scalars.json        the names of the arrays, and counts

The host copies them into a checkpoint, and writes them again when a run is resumed. Nothing is ever unpickled.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from pearl.algorithms.trainer import arrays_of
from pearl.atomic_file import write_text
from pearl.errors import CheckpointError
from pearl.runtime.checkpoint_files import array_path, is_name, read_array, safetensors_of, write_array
from pearl.runtime.trainer_state import load_module_tensors, module_tensors

Arrays: TypeAlias = "dict[str, np.ndarray]"
Scalars: TypeAlias = "dict[str, bool | int | float | str]"

TRAINER = "trainer/"  # prefix of the groups of the trainer's tensors, each the bytes of a safetensors file

_SCALARS = "scalars.json"


def write_state(
    folder: Path, arrays: Mapping[str, np.ndarray], scalars: Mapping[str, Any], beat: Callable[[], None] = lambda: None
) -> None:
    """Write `arrays` and `scalars` into the new `folder`, calling `beat` after each array; OSError if that fails."""
    folder.mkdir(parents=True)
    for name, array in arrays.items():
        write_array(folder / array_path(name), array)
        beat()
    content = {"arrays": list(arrays), "scalars": {name: _plain(value) for name, value in scalars.items()}}
    # In one move: a Learner that is killed here leaves a state or none.
    write_text(folder / _SCALARS, json.dumps(content), durable=False)


def read_state(folder: Path) -> tuple[Arrays, Scalars] | None:
    """What `write_state` wrote, the arrays as read-only maps of their files; None if there is nothing.

    Raises CheckpointError for files that `write_state` does not write.
    """
    file = folder / _SCALARS
    if not file.is_file():
        return None
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        names, scalars = content["arrays"], content["scalars"]
        sound = isinstance(scalars, dict) and all(isinstance(name, str) and is_name(name) for name in names)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"The state of a Learner in {folder} cannot be read ({error}).") from error
    if not sound:
        raise CheckpointError(f"The state of a Learner in {folder} names something that no Learner has.")
    return {name: read_array(folder, array_path(name), mmap=True) for name in names}, scalars


def trainer_arrays(trainer: object) -> Arrays:
    """Networks, optimizers and other state of `trainer`, by `TRAINER` and the name of each group."""
    groups = module_tensors(trainer)
    return {f"{TRAINER}{name}": np.frombuffer(safetensors_of(group), np.uint8) for name, group in groups.items()}


def load_trainer(trainer: object, arrays: Mapping[str, np.ndarray]) -> None:
    """Load what `trainer_arrays` gave; CheckpointError if it does not fit the trainer, or is damaged.

    A trainer whose networks are in arrays stays without torch.
    """
    module = "safetensors.torch" if arrays_of(trainer) is None else "safetensors.numpy"
    load = importlib.import_module(module).load
    groups = {name.removeprefix(TRAINER): array for name, array in arrays.items() if name.startswith(TRAINER)}
    try:
        load_module_tensors(trainer, {name: load(np.asarray(array).tobytes()) for name, array in groups.items()})
    except CheckpointError:
        raise
    except Exception as error:  # SafetensorError, and what others make of a header or of values: any
        raise CheckpointError(f"The networks and optimizers of a Learner cannot be loaded: {error!r}.") from error


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value
