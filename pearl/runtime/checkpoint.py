"""Checkpoints: the state that a run needs to resume, in a folder that is either complete or absent.

    checkpoint-000012345/
      manifest.json                  step, identity, counters; size and CRC-32 of every other file
      tensors/<group>.safetensors    networks, optimizers, torch's random states
      arrays/<name>.npy              replay columns and priorities, streamed in chunks

The folder is written under a hidden name, flushed to the disk file by file, then renamed; older ones are removed only
after that. So a run killed at any moment leaves its last complete checkpoint. Nothing is ever unpickled.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from pearl.byte_size import readable_size
from pearl.errors import CheckpointError, CheckpointReadError, CheckpointWriteError
from pearl.runtime.checkpoint_files import (
    MANIFEST,
    FileEntry,
    Manifest,
    NumpyArray,
    Scalar,
    Stored,
    Tensors,
    array_path,
    check_file,
    is_count,
    is_name,
    read_array,
    read_manifest,
    read_tensors,
    sync_folder,
    tensors_path,
    write_array,
    write_manifest,
    write_tensors,
)

_FOLDER = re.compile(r"checkpoint-(\d{9,})(?:-r(\d+))?")
_LEFTOVER = re.compile(r"\.checkpoint-\d+(?:-r\d+)?-tmp-\d+")

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CheckpointState:
    """Everything one checkpoint holds.

    `step` counts environment steps. `identity` says which program the state belongs to (trainer, environment, network
    signature, transition columns): a checkpoint is loaded only into its own. `counters` are plain scalars; `tensors`
    are groups of named torch tensors on any device, or of arrays (loaded: arrays, where NumPy has the dtypes); `arrays`
    are NumPy arrays of any size, read where they lie, whose names may contain "/".
    """

    step: int
    identity: Mapping[str, str] = field(default_factory=dict)
    counters: Mapping[str, Scalar] = field(default_factory=dict)
    tensors: Tensors = field(default_factory=dict)
    arrays: Mapping[str, NumpyArray] = field(default_factory=dict)


# --- Saving ---------------------------------------------------------------------------------------------------------


def save_checkpoint(directory: Path, state: CheckpointState, keep: int = 2) -> Path:
    """Write `state` into a new folder of `directory` and return that folder; leave the `keep` newest.

    Extra memory: a copy of the tensors, and 4 MiB for the arrays. Nothing may write to the arrays
    until this returns. A checkpoint of the same step is replaced; those of later steps are left alone. Raises
    CheckpointError, with `directory` as it was, when the state cannot be stored; CheckpointWriteError when the disk is
    full or not writable, or another process is saving there.
    """
    directory = Path(directory)
    if keep < 1:
        raise CheckpointError(f"The count of checkpoints to keep must be at least 1; found {keep}.")
    _check_state(state)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with _only_writer(directory):
            _remove_leftovers(directory)
            _check_free_space(directory, state)
            folder = _new_folder(directory, state.step)
            temporary = _temporary(folder)
            try:
                _write_folder(temporary, state)
                temporary.rename(folder)
            except BaseException:
                shutil.rmtree(temporary, ignore_errors=True)
                raise
            sync_folder(directory)
            _prune(directory, folder, keep)
    except OSError as error:
        raise CheckpointWriteError(
            f"The checkpoint of step {state.step} could not be written into {directory}: {error}. "
            "Earlier checkpoints are untouched. Free space, or choose a directory that can be written."
        ) from error
    return folder


def _check_state(state: CheckpointState) -> None:
    if not is_count(state.step):
        raise CheckpointError(f"A checkpoint's step must be a whole number in [0, 2**63); found {state.step!r}.")
    for kind, names in (("tensor group", state.tensors), ("array", state.arrays)):
        for name in names:
            if not is_name(name):
                raise CheckpointError(
                    f"{name!r} cannot name a {kind} of a checkpoint. Use letters, digits, '_', '-' and '.', "
                    "with '/' between parts that start with a letter, digit or '_'."
                )
    for key, value in state.identity.items():
        if not isinstance(value, str):
            raise CheckpointError(f"A checkpoint's identity holds texts; {key!r} is {value!r}.")
    for key, counter in state.counters.items():
        if not isinstance(counter, bool | int | float | str | np.generic):
            raise CheckpointError(f"A checkpoint's counters are numbers, texts or booleans; {key!r} is {counter!r}.")
    for name, array in state.arrays.items():
        if array.dtype.hasobject:
            raise CheckpointError(
                f"Array {name!r} has dtype {array.dtype}: Python objects cannot be stored without pickle. "
                "Store it as numbers or fixed-length text."
            )


@contextmanager
def _only_writer(directory: Path) -> Iterator[None]:
    """Hold the directory's lock: whoever holds it knows that leftover folders belong to dead writers."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointWriteError(
                f"Another process or thread is saving a checkpoint into {directory}. Give each run its own directory."
            ) from None
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK):
                raise
            _log.warning("The file system of %s has no locks: two runs must not save there.", directory)
        yield
    finally:
        os.close(descriptor)


def _remove_leftovers(directory: Path) -> None:
    for path in directory.iterdir():
        if _LEFTOVER.fullmatch(path.name):
            _log.info("Removing %s: an interrupted save left it.", path)
            shutil.rmtree(path, ignore_errors=True)


def _check_free_space(directory: Path, state: CheckpointState) -> None:
    needed = sum(array.nbytes for array in state.arrays.values())
    needed += sum(math.prod(t.shape) * t.dtype.itemsize for group in state.tensors.values() for t in group.values())
    free = shutil.disk_usage(directory).free
    if needed > free:
        raise CheckpointWriteError(
            f"The checkpoint of step {state.step} needs {readable_size(needed)}; {readable_size(free)} are free in "
            f"{directory}. Free space, or choose another folder with --checkpoint-dir."
        )


def _new_folder(directory: Path, step: int) -> Path:
    """`checkpoint-<step>`, or with a revision where that step is there: a folder cannot be replaced in one move."""
    folder = directory / f"checkpoint-{step:09d}"
    revision = 1
    while folder.exists():
        revision += 1
        folder = directory / f"checkpoint-{step:09d}-r{revision}"
    return folder


def _temporary(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}-tmp-{os.getpid()}")


def _write_folder(folder: Path, state: CheckpointState) -> None:
    folder.mkdir()
    files: dict[str, FileEntry] = {}
    for group, tensors in state.tensors.items():
        path = tensors_path(group)
        files[path] = write_tensors(folder / path, group, tensors)
    for name, array in state.arrays.items():
        path = array_path(name)
        files[path] = write_array(folder / path, array)
    write_manifest(folder, Manifest(state.step, state.identity, state.counters, files))
    for parent, _, _ in os.walk(folder, topdown=False):
        sync_folder(Path(parent))


def _prune(directory: Path, newest: Path, keep: int) -> None:
    """Remove checkpoints that `newest` replaces; a failure is a warning, as the new checkpoint is complete."""
    step = _order(newest)[0]
    kept_steps = {step}
    for folder in reversed(_folders(directory)):
        if folder == newest:
            continue
        other = _order(folder)[0]
        if other > step:
            _log.warning("%s is of a later step than the checkpoint just written, and stays the latest.", folder)
        elif other not in kept_steps and len(kept_steps) < keep:
            kept_steps.add(other)
        else:
            try:
                condemned = _temporary(folder)  # renamed first, so that no half-removed checkpoint is ever visible
                folder.rename(condemned)
                shutil.rmtree(condemned)
            except OSError as error:
                _log.warning("The old checkpoint %s could not be removed: %s", folder, error)


# --- Finding and loading --------------------------------------------------------------------------------------------


def latest_checkpoint(directory: Path) -> Path | None:
    """The complete checkpoint of the highest step in `directory`; None where there is none."""
    folders = _folders(Path(directory))
    return folders[-1] if folders else None


def step_of(folder: Path) -> int:
    """The environment step of a checkpoint, which its folder is named after."""
    return _order(folder)[0]


def load_checkpoint(path: Path, identity: Mapping[str, str] | None = None, mmap: bool = True) -> CheckpointState:
    """Read a checkpoint folder, or the latest in a directory of them, checking the size and CRC-32 of every file.

    With `identity`, a checkpoint of another program is refused. With `mmap` the arrays are read-only maps of the
    files, which cost no memory until read. Raises CheckpointError when something is missing, damaged or foreign.
    """
    folder = _resolve(Path(path))
    with _damage_named(folder):
        manifest = read_manifest(folder)
    if identity is not None:
        _check_identity(folder, identity, manifest.identity)
    tensors: dict[str, Mapping[str, Stored]] = {}
    arrays: dict[str, NumpyArray] = {}
    with _damage_named(folder):
        for name, entry in manifest.files.items():
            check_file(folder, name, entry)
            if name.startswith("tensors/"):
                tensors[name.removeprefix("tensors/").removesuffix(".safetensors")] = read_tensors(folder, name)
            else:
                arrays[name.removeprefix("arrays/").removesuffix(".npy")] = read_array(folder, name, mmap)
    return CheckpointState(manifest.step, manifest.identity, manifest.counters, tensors, arrays)


def _order(folder: Path) -> tuple[int, int]:
    match = _FOLDER.fullmatch(folder.name)
    assert match is not None
    return int(match[1]), int(match[2] or 1)


def _folders(directory: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    if not directory.is_dir():
        return []
    found = [p for p in directory.iterdir() if _FOLDER.fullmatch(p.name) and (p / MANIFEST).is_file()]
    return sorted(found, key=_order)


def _resolve(path: Path) -> Path:
    if not path.exists():
        raise CheckpointError(
            f"There is no checkpoint at {path}: it does not exist. Check the path, or start without resuming."
        )
    if not path.is_dir():
        raise CheckpointError(f"A checkpoint is a folder; {path} is a file. Pass the folder that holds {MANIFEST}.")
    if (path / MANIFEST).is_file():
        return path
    latest = latest_checkpoint(path)
    if latest is None:
        raise CheckpointError(
            f"{path} is neither a checkpoint (it has no {MANIFEST}) nor a directory with a complete one "
            "(checkpoint-<step>/). Check the path, or start without resuming."
        )
    return latest


@contextmanager
def _damage_named(folder: Path) -> Iterator[None]:
    """Add to a CheckpointError the checkpoint that cannot be loaded, and one to use instead of a damaged one."""
    try:
        yield
    except CheckpointReadError as error:
        raise CheckpointReadError(
            f"Checkpoint {folder} cannot be loaded: {error} It may be sound: resume again once its files can be read."
        ) from error
    except CheckpointError as error:
        others = [str(p) for p in _folders(folder.parent) if p != folder]
        advice = (
            f"Move it away, and --resume goes on from {others[-1]}."
            if others
            else "Its folder has no other checkpoint: start without --resume."
        )
        raise CheckpointError(f"Checkpoint {folder} cannot be loaded: {error} {advice}") from error


def _check_identity(folder: Path, expected: Mapping[str, str], found: Mapping[str, str]) -> None:
    absent = "(absent)"
    differing = [
        f"{key}: this program has {expected.get(key, absent)}; the checkpoint has {found.get(key, absent)}"
        for key in sorted({*expected, *found})
        if expected.get(key) != found.get(key)
    ]
    if differing:
        raise CheckpointError(
            f"Checkpoint {folder} belongs to another program:\n  "
            + "\n  ".join(differing)
            + "\nResume with the program that wrote it, or start this one in a directory of its own."
        )
