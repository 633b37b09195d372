"""Checkpoints: what a run needs to go on where it stopped, in a folder that is either complete or absent.

    checkpoint-000012345/
      manifest.json                  step, identity, counters, random states; size and CRC-32 of every other file
      tensors/<group>.safetensors    networks, optimizers, torch's random states
      arrays/<name>.npy              replay columns and priorities, streamed in chunks

The folder is written under a hidden name, flushed to the disk file by file, then renamed; older ones go only after
that. So a run killed at any moment leaves its last complete checkpoint. Nothing is ever unpickled.
"""

from __future__ import annotations

import errno
import fcntl
import importlib.metadata
import io
import json
import logging
import math
import os
import re
import shutil
import stat
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import numpy as np

from pearl.errors import CheckpointError

if TYPE_CHECKING:
    import torch

JsonValue: TypeAlias = "bool | int | float | str | list[JsonValue] | dict[str, JsonValue] | None"
Scalar: TypeAlias = "bool | int | float | str"
Tensors: TypeAlias = "Mapping[str, Mapping[str, torch.Tensor]]"
NumpyArray: TypeAlias = "np.ndarray[Any, Any]"

FORMAT_VERSION = 1
RANDOM_GROUP = "random"  # torch's random states; never part of a trainer

_MANIFEST = "manifest.json"
_MANIFEST_LIMIT = 64 * 2**20
_CHUNK_BYTES = 4 * 2**20
_SCALARS = "scalars.json"  # the tensor that holds, as UTF-8 bytes, the part of a state dict that is not tensors
_FOLDER = re.compile(r"checkpoint-(\d{9,})(?:-r(\d+))?")
_LEFTOVER = re.compile(r"\.checkpoint-\d+(?:-r\d+)?-tmp-\d+")
_NAME = re.compile(r"\w[\w.-]*(?:/\w[\w.-]*)*")
_BIT_GENERATORS = ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64")

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CheckpointState:
    """Everything one checkpoint holds.

    `step` counts environment steps. `identity` says which program the state belongs to (trainer, environment, network
    signature, transition columns): a checkpoint is loaded only into its own. `counters` are plain scalars; `tensors`
    are groups of named torch tensors on any device (loaded: on the CPU); `arrays` are NumPy arrays of any size, read
    where they lie, whose names may contain "/"; `random_states` are JSON values (see `generator_state`).
    """

    step: int
    identity: Mapping[str, str] = field(default_factory=dict)
    counters: Mapping[str, Scalar] = field(default_factory=dict)
    tensors: Tensors = field(default_factory=dict)
    arrays: Mapping[str, NumpyArray] = field(default_factory=dict)
    random_states: Mapping[str, JsonValue] = field(default_factory=dict)


# --- Saving ---------------------------------------------------------------------------------------------------------


def save_checkpoint(directory: Path, state: CheckpointState, keep: int = 2) -> Path:
    """Write `state` into a new folder of `directory` and return that folder; leave the `keep` newest.

    Memory needed beside the state: a copy of its tensors, and 4 MiB for the arrays. Nothing may write to the arrays
    until this returns. A checkpoint of the same step is replaced; those of later steps are left alone. Raises
    CheckpointError, with `directory` as it was, when the state cannot be stored, the disk is full or not writable, or
    another process is saving there.
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
            _sync_folder(directory)
            _prune(directory, folder, keep)
    except OSError as error:
        raise CheckpointError(
            f"The checkpoint of step {state.step} could not be written into {directory}: {error}. "
            "Earlier checkpoints are untouched. Free space, or choose a directory that can be written."
        ) from error
    return folder


def _check_state(state: CheckpointState) -> None:
    if not _is_count(state.step):
        raise CheckpointError(f"A checkpoint's step must be a whole number of at least 0; found {state.step!r}.")
    for kind, names in (("tensor group", state.tensors), ("array", state.arrays)):
        for name in names:
            if not _NAME.fullmatch(name):
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
    """Hold the directory's lock: with it, every leftover folder belongs to a writer that is dead."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(
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
    needed += sum(t.numel() * t.element_size() for group in state.tensors.values() for t in group.values())
    free = shutil.disk_usage(directory).free
    if needed > free:
        raise CheckpointError(
            f"The checkpoint of step {state.step} needs {needed / 1e9:.1f} GB; {free / 1e9:.1f} GB are free in "
            f"{directory}. Free space, keep fewer checkpoints, or leave the replay out."
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
    files: dict[str, JsonValue] = {}
    for group, tensors in state.tensors.items():
        path = _tensors_path(group)
        files[path] = _write_file(folder / path, [_safetensors_bytes(group, tensors)])
    for name, array in state.arrays.items():
        path = _array_path(name)
        files[path] = _write_file(folder / path, _npy_chunks(np.asarray(array)))
    _write_manifest(folder, state, files)
    for parent, _, _ in os.walk(folder, topdown=False):
        _sync_folder(Path(parent))


def _tensors_path(group: str) -> str:
    return f"tensors/{group}.safetensors"


def _array_path(name: str) -> str:
    return f"arrays/{name}.npy"


def _write_manifest(folder: Path, state: CheckpointState, files: dict[str, JsonValue]) -> None:
    counters: dict[str, JsonValue] = {
        key: value.item() if isinstance(value, np.generic) else value for key, value in state.counters.items()
    }
    manifest: dict[str, JsonValue] = {
        "format": "pearl checkpoint",
        "format_version": FORMAT_VERSION,
        "pearl_version": _pearl_version(),
        "step": int(state.step),
        "identity": dict(state.identity),
        "counters": counters,
        "random_states": dict(state.random_states),
        "files": files,
    }
    try:
        manifest = json.loads(json.dumps(manifest))  # as a reader will see it: keys are texts, tuples are lists
        manifest["crc32"] = _manifest_crc32(manifest)
        text = json.dumps(manifest, indent=1)
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"The random states of a checkpoint must be JSON values: {error}. Convert NumPy generators with "
            "`generator_state`."
        ) from error
    _write_file(folder / _MANIFEST, [text.encode()])


def _manifest_crc32(manifest: Mapping[str, JsonValue]) -> str:
    content = {key: value for key, value in manifest.items() if key != "crc32"}
    return f"{zlib.crc32(json.dumps(content, sort_keys=True).encode()):08x}"


def _pearl_version() -> str:
    try:
        return importlib.metadata.version("pearl-toolkit")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _write_file(path: Path, chunks: Iterable[bytes]) -> dict[str, JsonValue]:
    """Write `chunks` to a new file, flush it to the disk, and return its entry in the manifest."""
    path.parent.mkdir(parents=True, exist_ok=True)
    size, crc = 0, 0
    with path.open("xb") as stream:
        for chunk in chunks:
            stream.write(chunk)
            size, crc = size + len(chunk), zlib.crc32(chunk, crc)
        stream.flush()
        os.fsync(stream.fileno())
    return {"bytes": size, "crc32": f"{crc:08x}"}


def _npy_chunks(array: NumpyArray) -> Iterator[bytes]:
    """The bytes of a .npy file in C order, at most `_CHUNK_BYTES` of them at once.

    A chunk is copied before it is written and summed, so file and checksum agree even if the array were changing.
    """
    yield _npy_header(array)
    if array.size == 0:
        return
    items = max(1, _CHUNK_BYTES // max(1, array.itemsize))
    if array.flags.c_contiguous:
        flat = array.reshape(-1)
        for start in range(0, array.size, items):
            yield flat[start : start + items].tobytes()
    else:
        flags: Any = ["external_loop", "buffered", "zerosize_ok"]
        chunks: Iterable[Any] = np.nditer(array, flags=flags, buffersize=items, order="C")
        for chunk in chunks:
            yield chunk.tobytes()


def _npy_header(array: NumpyArray) -> bytes:
    stream = io.BytesIO()
    np.lib.format.write_array_header_2_0(
        stream,
        {"descr": np.lib.format.dtype_to_descr(array.dtype), "fortran_order": False, "shape": array.shape},
    )
    return stream.getvalue()


def _safetensors_bytes(group: str, tensors: Mapping[str, torch.Tensor]) -> bytes:
    import safetensors
    import safetensors.torch

    seen: set[int] = set()  # tied weights share storage, which the format has no word for: they are stored twice
    plain: dict[str, torch.Tensor] = {}
    try:
        for name, tensor in tensors.items():
            copy = tensor.detach().cpu().contiguous()
            storage = copy.untyped_storage().data_ptr()
            plain[name] = copy.clone() if storage in seen else copy
            seen.add(storage)
        return safetensors.torch.save(plain)
    except (RuntimeError, ValueError, KeyError, NotImplementedError, safetensors.SafetensorError) as error:
        raise CheckpointError(
            f"Tensor group {group!r} cannot be stored: {error}. Dense tensors of a common dtype can."
        ) from error


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _prune(directory: Path, newest: Path, keep: int) -> None:
    """Remove what `newest` made superfluous; failing to is a warning, for the new checkpoint stands."""
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
                condemned = _temporary(folder)  # out of sight in one move, so that it is never half there
                folder.rename(condemned)
                shutil.rmtree(condemned)
            except OSError as error:
                _log.warning("The old checkpoint %s could not be removed: %s", folder, error)


# --- Finding and loading --------------------------------------------------------------------------------------------


def latest_checkpoint(directory: Path) -> Path | None:
    """The complete checkpoint of the highest step in `directory`; None where there is none."""
    folders = _folders(Path(directory))
    return folders[-1] if folders else None


def load_checkpoint(path: Path, identity: Mapping[str, str] | None = None, mmap: bool = True) -> CheckpointState:
    """Read a checkpoint folder, or the latest in a directory of them, checking the size and CRC-32 of every file.

    With `identity`, a checkpoint of another program is refused. With `mmap` the arrays are read-only maps of the
    files, which cost no memory until read. Raises CheckpointError when something is missing, damaged or foreign.
    """
    folder = _resolve(Path(path))
    manifest = _read_manifest(folder)
    if identity is not None:
        _check_identity(folder, identity, manifest.identity)
    tensors: dict[str, Mapping[str, torch.Tensor]] = {}
    arrays: dict[str, NumpyArray] = {}
    for name, entry in manifest.files.items():
        file = folder / name
        _check_file(folder, file, entry)
        if name.startswith("tensors/"):
            tensors[name.removeprefix("tensors/").removesuffix(".safetensors")] = _load_tensors(folder, file)
        else:
            arrays[name.removeprefix("arrays/").removesuffix(".npy")] = _load_array(folder, file, mmap)
    return CheckpointState(manifest.step, manifest.identity, manifest.counters, tensors, arrays, manifest.random_states)


@dataclass(frozen=True)
class _FileEntry:
    bytes: int
    crc32: str


@dataclass(frozen=True)
class _Manifest:
    step: int
    identity: dict[str, str]
    counters: dict[str, Scalar]
    random_states: dict[str, JsonValue]
    files: dict[str, _FileEntry]


def _order(folder: Path) -> tuple[int, int]:
    match = _FOLDER.fullmatch(folder.name)
    assert match is not None
    return int(match[1]), int(match[2] or 1)


def _folders(directory: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    if not directory.is_dir():
        return []
    found = [p for p in directory.iterdir() if _FOLDER.fullmatch(p.name) and (p / _MANIFEST).is_file()]
    return sorted(found, key=_order)


def _resolve(path: Path) -> Path:
    if not path.exists():
        raise CheckpointError(
            f"There is no checkpoint at {path}: it does not exist. Check the path, or start without resuming."
        )
    if not path.is_dir():
        raise CheckpointError(f"A checkpoint is a folder; {path} is a file. Pass the folder that holds {_MANIFEST}.")
    if (path / _MANIFEST).is_file():
        return path
    latest = latest_checkpoint(path)
    if latest is None:
        raise CheckpointError(
            f"{path} is neither a checkpoint (it has no {_MANIFEST}) nor a directory with a complete one "
            "(checkpoint-<step>/). Check the path, or start without resuming."
        )
    return latest


def _damaged(folder: Path, what: str) -> NoReturn:
    """Raise CheckpointError saying `what` is wrong with `folder` and which checkpoint could be loaded instead."""
    others = [str(p) for p in _folders(folder.parent) if p != folder]
    advice = f"Resume from {others[-1]} instead." if others else "No other checkpoint lies beside it: start afresh."
    raise CheckpointError(f"Checkpoint {folder} cannot be loaded: {what} {advice}")


def _read_manifest(folder: Path) -> _Manifest:
    path = folder / _MANIFEST
    try:
        if path.stat().st_size > _MANIFEST_LIMIT:
            _damaged(folder, f"{_MANIFEST} is longer than {_MANIFEST_LIMIT} bytes.")
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        _damaged(folder, f"{_MANIFEST} cannot be read ({error}).")
    except (ValueError, RecursionError) as error:
        _damaged(folder, f"{_MANIFEST} is not JSON ({error}).")
    if not isinstance(content, dict) or content.get("format") != "pearl checkpoint":
        _damaged(folder, f'{_MANIFEST} does not say "format": "pearl checkpoint".')
    version = content.get("format_version")
    if version != FORMAT_VERSION:
        _damaged(
            folder,
            f"its format version is {version!r} (written by PEARL {content.get('pearl_version')!r}); "
            f"this PEARL reads version {FORMAT_VERSION}. Load it with the PEARL that wrote it.",
        )
    if content.get("crc32") != _manifest_crc32(content):
        _damaged(
            folder,
            f"{_MANIFEST} was changed or damaged (CRC-32 {_manifest_crc32(content)}; "
            f"{content.get('crc32')!r} was written).",
        )
    return _parse_manifest(folder, content)


def _parse_manifest(folder: Path, content: dict[str, Any]) -> _Manifest:
    expected = {"format", "format_version", "pearl_version", "crc32"} | set(_Manifest.__dataclass_fields__)
    if unknown := sorted(set(content) - expected):
        _damaged(folder, f"{_MANIFEST} has unknown keys {unknown}.")
    if missing := sorted(expected - set(content)):
        _damaged(folder, f"{_MANIFEST} lacks the keys {missing}.")
    if not _is_count(content["step"]):
        _damaged(folder, f"its step is {content['step']!r}; a whole number of at least 0 was expected.")
    for key, kinds in (
        ("identity", (str,)),
        ("counters", (bool, int, float, str)),
        ("random_states", (object,)),
        ("files", (dict,)),
    ):
        if not isinstance(content[key], dict) or not all(isinstance(v, kinds) for v in content[key].values()):
            _damaged(folder, f"{key!r} in {_MANIFEST} does not map names to values of the expected type.")
    files = {name: _parse_entry(folder, name, entry) for name, entry in content["files"].items()}
    return _Manifest(content["step"], content["identity"], content["counters"], content["random_states"], files)


def _parse_entry(folder: Path, name: str, entry: dict[str, Any]) -> _FileEntry:
    in_tensors = name.startswith("tensors/") and name.endswith(".safetensors")
    in_arrays = name.startswith("arrays/") and name.endswith(".npy")
    if not _NAME.fullmatch(name) or not (in_tensors or in_arrays):
        _damaged(
            folder,
            f"{_MANIFEST} names the file {name!r}; only tensors/<group>.safetensors and arrays/<name>.npy "
            "inside the checkpoint are read.",
        )
    if set(entry) != {"bytes", "crc32"} or not _is_count(entry["bytes"]) or not isinstance(entry["crc32"], str):
        _damaged(folder, f"{_MANIFEST} does not give bytes and crc32 of {name!r}; found {entry!r}.")
    return _FileEntry(entry["bytes"], entry["crc32"])


def _is_count(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and bool(value >= 0)


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


def _check_file(folder: Path, file: Path, entry: _FileEntry) -> None:
    name = file.relative_to(folder)
    try:
        status = file.lstat()
        if not stat.S_ISREG(status.st_mode):
            _damaged(folder, f"{name} is not a plain file.")
        if status.st_size != entry.bytes:
            _damaged(folder, f"{name} has {status.st_size} bytes; {entry.bytes} were written.")
        crc = 0
        with file.open("rb", buffering=0) as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                crc = zlib.crc32(chunk, crc)
    except FileNotFoundError:
        _damaged(folder, f"{name} is missing.")
    except OSError as error:
        _damaged(folder, f"{name} cannot be read ({error}).")
    if f"{crc:08x}" != entry.crc32:
        _damaged(folder, f"{name} has CRC-32 {crc:08x}; {entry.crc32} was written. Its content is damaged.")


def _load_tensors(folder: Path, file: Path) -> dict[str, torch.Tensor]:
    import safetensors
    import safetensors.torch

    try:
        # Cloned, because the tensors that safetensors returns lie in a map of the file.
        return {name: tensor.clone() for name, tensor in safetensors.torch.load_file(file).items()}
    except (OSError, ValueError, KeyError, safetensors.SafetensorError) as error:
        _damaged(folder, f"{file.relative_to(folder)} is not a safetensors file ({error}).")


def _load_array(folder: Path, file: Path, mmap: bool) -> NumpyArray:
    try:
        _check_npy(file)
        array: NumpyArray = np.load(file, mmap_mode="r" if mmap else None, allow_pickle=False)
    except (OSError, ValueError, EOFError, MemoryError) as error:
        _damaged(folder, f"{file.relative_to(folder)} is not a .npy file of plain numbers ({error}).")
    return array


def _check_npy(file: Path) -> None:
    """Raise ValueError unless the header promises what the file holds: NumPy would also open archives and pickles."""
    with file.open("rb") as stream:
        version = np.lib.format.read_magic(stream)
        if version != (2, 0):
            raise ValueError(f"its format is {version}; (2, 0) was written")
        shape, _, dtype = np.lib.format.read_array_header_2_0(stream)
        held = file.stat().st_size - stream.tell()
    promised = math.prod(shape) * dtype.itemsize
    if dtype.hasobject or min(shape, default=0) < 0 or promised != held:
        raise ValueError(f"its header promises shape {shape} of {dtype}, {promised} bytes; {held} follow")


# --- Trainers -------------------------------------------------------------------------------------------------------


def module_tensors(trainer: object) -> dict[str, dict[str, torch.Tensor]]:
    """Copy what a trainer object has learned to the CPU: one group of tensors per stateful attribute, by its name.

    Found are modules, optimizers, learning-rate schedulers, gradient scalers, torch generators (also in a list, tuple
    or dict: group `name.0`) and leaf tensors that require a gradient. What a state dict holds beside tensors travels
    as JSON in one more tensor of the group. Plain Python numbers of the trainer are not found: register them as
    buffers of a module, or define `state_tensors()` and `load_state_tensors(tensors)`, which replace all this.
    """
    own = getattr(trainer, "state_tensors", None)
    if own is not None:
        return {group: {name: _copied(t) for name, t in tensors.items()} for group, tensors in own().items()}
    return {name: _group_of(name, value) for name, value in _stateful_attributes(trainer).items()}


def load_module_tensors(trainer: object, tensors: Tensors) -> None:
    """Put what `module_tensors` returned back into a trainer of the same structure, in place.

    Every group is checked before any is loaded. The group "random" is passed over. Raises CheckpointError naming the
    tensor, the shape and dtype expected and those found.
    """
    tensors = {group: content for group, content in tensors.items() if group != RANDOM_GROUP}
    own = getattr(trainer, "load_state_tensors", None)
    if own is not None:
        own(tensors)
        return
    attributes = _stateful_attributes(trainer)
    _check_names(f"{type(trainer).__name__}'s networks and optimizers", attributes, tensors)
    loads = {name: _prepared_load(name, value, tensors[name]) for name, value in attributes.items()}
    for name, (load, state) in loads.items():
        try:
            load(state)
        except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{name!r} of {type(trainer).__name__} did not take the state of the checkpoint: {error}. "
                "The trainer is now partly loaded: resume with the classes that were saved."
            ) from error


def _stateful_attributes(trainer: object) -> dict[str, Any]:
    import torch

    stateful = (
        torch.nn.Module,
        torch.optim.Optimizer,
        torch.optim.lr_scheduler.LRScheduler,
        torch.amp.GradScaler,
        torch.Generator,
    )
    candidates: dict[str, object] = {"self": trainer} if isinstance(trainer, torch.nn.Module) else {}
    for name, value in getattr(trainer, "__dict__", {}).items():
        if isinstance(trainer, torch.nn.Module) and name in ("_modules", "_parameters", "_buffers"):
            continue
        candidates[name] = value
        members: Iterable[tuple[object, object]] = ()
        if isinstance(value, dict):
            members = value.items()
        elif isinstance(value, list | tuple):
            members = enumerate(value)
        candidates.update({f"{name}.{key}": member for key, member in members if isinstance(member, stateful)})
    found: dict[str, Any] = {}
    for name, value in candidates.items():
        learned = isinstance(value, torch.Tensor) and value.is_leaf and value.requires_grad
        if (learned or isinstance(value, stateful)) and not any(value is other for other in found.values()):
            found[name] = value
    if RANDOM_GROUP in found:
        raise CheckpointError(f"The trainer's attribute {RANDOM_GROUP!r} takes a reserved name: call it otherwise.")
    if not found:
        raise CheckpointError(
            f"{type(trainer).__name__} has no torch module or optimizer among its attributes, so there is nothing to "
            "save. Keep the networks in attributes, or define state_tensors() and load_state_tensors(tensors)."
        )
    return found


def _group_of(name: str, value: Any) -> dict[str, torch.Tensor]:
    import torch

    tensors: dict[str, torch.Tensor] = {}
    if isinstance(value, torch.Tensor):
        return {"value": _copied(value)}
    if isinstance(value, torch.Generator):
        return {"state": value.get_state()}
    if isinstance(value, torch.nn.Module):
        state = _uncompiled(value).state_dict()
        extra = {k: _flatten(name, k, v, tensors) for k, v in state.items() if not isinstance(v, torch.Tensor)}
        tensors.update({k: _copied(v) for k, v in state.items() if isinstance(v, torch.Tensor)})
        if extra:
            tensors[_SCALARS] = _json_tensor(extra)
        return tensors
    scalars: dict[str, JsonValue] = {"class": type(value).__name__}
    if isinstance(value, torch.optim.Optimizer):
        scalars["parameters"] = _parameter_shapes(value)
    scalars["state_dict"] = _flatten(name, "", value.state_dict(), tensors)
    return {**tensors, _SCALARS: _json_tensor(scalars)}


def _prepared_load(name: str, value: Any, found: Mapping[str, torch.Tensor]) -> tuple[Any, Any]:
    """Check `found` against the live object; return the function that loads it and its argument."""
    import torch

    if isinstance(value, torch.Tensor):
        _check_tensors(name, {"value": value}, found)
        return value.detach().copy_, found["value"]
    if isinstance(value, torch.Generator):
        _check_tensors(name, {"state": value.get_state()}, found)
        return value.set_state, found["state"]
    if isinstance(value, torch.nn.Module):
        module = _uncompiled(value)
        state = module.state_dict()
        extra = _json_value(name, found) if _SCALARS in found else {}
        kept = {k: t for k, t in found.items() if k in state or not any(k.startswith(f"{e}/") for e in extra)}
        kept.pop(_SCALARS, None)
        _check_tensors(name, {k: v for k, v in state.items() if isinstance(v, torch.Tensor)}, kept)
        return module.load_state_dict, {**kept, **{k: _unflatten(name, v, found) for k, v in extra.items()}}
    scalars = _json_value(name, found)
    if scalars.get("class") != type(value).__name__:
        raise CheckpointError(
            f"{name!r} is a {type(value).__name__}; the checkpoint holds a {scalars.get('class')}. "
            "Resume with the class that was saved."
        )
    if isinstance(value, torch.optim.Optimizer):
        _check_parameters(name, _parameter_shapes(value), scalars.get("parameters"))
    return value.load_state_dict, _unflatten(name, scalars.get("state_dict"), found)


def _uncompiled(module: Any) -> Any:
    """The module inside `torch.compile`'s wrapper, so that compiling is no difference between two runs."""
    return getattr(module, "_orig_mod", module)


def _parameter_shapes(optimizer: torch.optim.Optimizer) -> list[JsonValue]:
    return [[list(p.shape) for p in group["params"]] for group in optimizer.param_groups]


def _check_parameters(name: str, expected: Any, found: Any) -> None:
    if expected == found:
        return
    if isinstance(found, list) and [len(g) for g in found] == [len(g) for g in expected]:
        flat_expected, flat_found = [s for g in expected for s in g], [s for g in found for s in g]
        at = next(i for i, (e, f) in enumerate(zip(flat_expected, flat_found, strict=True)) if e != f)
        what = f"parameter {at} has shape {tuple(flat_expected[at])}; the checkpoint's has {tuple(flat_found[at])}"
    else:
        counts = [len(g) for g in found] if isinstance(found, list) else found
        what = f"its groups have {[len(g) for g in expected]} parameters; the checkpoint's have {counts}"
    raise CheckpointError(f"Optimizer {name!r} differs: {what}. Resume with the networks that were saved.")


def _check_names(what: str, expected: Iterable[str], found: Iterable[str]) -> None:
    missing, unknown = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
    if missing or unknown:
        raise CheckpointError(
            f"{what} do not match the checkpoint: it lacks {missing or 'nothing'} and has {unknown or 'nothing'} "
            "besides. Resume with the trainer that was saved."
        )


def _check_tensors(group: str, expected: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor]) -> None:
    _check_names(f"The tensors of {group!r}", expected, found)
    for name, tensor in expected.items():
        other = found[name]
        if tensor.shape != other.shape or tensor.dtype != other.dtype:
            raise CheckpointError(
                f"Tensor {name!r} of {group!r} has shape {tuple(tensor.shape)} and dtype {tensor.dtype}; the "
                f"checkpoint's has shape {tuple(other.shape)} and dtype {other.dtype}. "
                "Resume with the networks that were saved."
            )


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


def _json_tensor(value: JsonValue) -> torch.Tensor:
    import torch

    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _json_value(name: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    try:
        value = json.loads(tensors[_SCALARS].cpu().numpy().tobytes())
        if isinstance(value, dict):
            return value
    except (KeyError, ValueError, RecursionError):
        pass
    raise CheckpointError(f"Group {name!r} of the checkpoint lacks a readable {_SCALARS!r}: it is of another kind.")


def _flatten(group: str, path: str, value: Any, tensors: dict[str, torch.Tensor]) -> JsonValue:
    """A state dict as JSON, its tensors moved into `tensors` under their paths, such as `state/0/exp_avg`."""
    import torch

    if isinstance(value, torch.Tensor):
        if path in tensors:
            raise CheckpointError(f"Two tensors of {group!r} have the path {path!r}: they cannot both be stored.")
        tensors[path] = _copied(value)
        return {"tensor": path}
    if isinstance(value, np.generic):
        return _flatten(group, path, value.item(), tensors)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    prefix = f"{path}/" if path else ""
    if isinstance(value, list | tuple):
        items: list[JsonValue] = [_flatten(group, f"{prefix}{i}", v, tensors) for i, v in enumerate(value)]
        return {"tuple": items} if isinstance(value, tuple) else items
    if isinstance(value, Mapping):
        pairs: list[JsonValue] = [
            [_flatten(group, path, k, tensors), _flatten(group, f"{prefix}{k}", v, tensors)] for k, v in value.items()
        ]
        return {"counter" if isinstance(value, Counter) else "mapping": pairs}
    raise CheckpointError(
        f"{path!r} in the state dict of {group!r} is a {type(value).__name__}, which cannot be stored without pickle. "
        "Define state_tensors() and load_state_tensors(tensors) on the trainer."
    )


def _unflatten(group: str, value: JsonValue, tensors: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(value, list):
        return [_unflatten(group, item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    try:
        ((kind, content),) = value.items()
        if kind == "tensor":
            return tensors[str(content)].clone()
        items = _unflatten(group, content, tensors)
        builders: dict[str, Callable[[Any], object]] = {
            "tuple": tuple,
            "mapping": dict,
            "counter": lambda pairs: Counter(dict(pairs)),
        }
        return builders[kind](items)
    except (KeyError, ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"The state dict of {group!r} in the checkpoint is malformed: {error!r}.") from error


# --- Random states --------------------------------------------------------------------------------------------------


def generator_state(generator: np.random.Generator) -> JsonValue:
    """The state of a NumPy generator as JSON; `restored_generator` is the inverse."""
    return _state_to_json(generator.bit_generator.state)


def restored_generator(state: JsonValue) -> np.random.Generator:
    """A NumPy generator that goes on exactly where the one given to `generator_state` stood."""
    name = state.get("bit_generator") if isinstance(state, dict) else None
    if name not in _BIT_GENERATORS:
        raise CheckpointError(f"A random state names its bit generator, one of {_BIT_GENERATORS}; found {name!r}.")
    try:
        bit_generator = getattr(np.random, str(name))()
        bit_generator.state = _state_from_json(state)
    except (KeyError, ValueError, TypeError, OverflowError) as error:
        raise CheckpointError(f"The random state of a {name} is malformed: {error!r}.") from error
    return np.random.Generator(bit_generator)


def _state_to_json(value: Any) -> JsonValue:
    # Integers of 128 bits are text: other JSON readers round them to float64.
    if isinstance(value, np.ndarray):
        return {"dtype": str(value.dtype), "values": [str(v) for v in value.tolist()]}
    if isinstance(value, dict):
        return {key: _state_to_json(item) for key, item in value.items()}
    return value if isinstance(value, str) else {"int": str(int(value))}


def _state_from_json(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if "int" in value:
        return int(value["int"])
    if "dtype" in value:
        return np.array([int(v) for v in value["values"]], dtype=np.dtype(value["dtype"]))
    return {key: _state_from_json(item) for key, item in value.items()}


def torch_random_tensors() -> dict[str, torch.Tensor]:
    """Global random states of torch, for the tensor group "random": "cpu" and, once CUDA is in use, "cuda.0", ..."""
    import torch

    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states.update({f"cuda.{i}": state for i, state in enumerate(torch.cuda.get_rng_state_all())})
    return states


def restore_torch_random(tensors: Mapping[str, torch.Tensor]) -> None:
    """Set torch's global random states; those of GPUs absent here are passed over with a warning."""
    import torch

    for name, state in tensors.items():
        device, _, index = name.partition(".")
        try:
            if device == "cpu":
                torch.set_rng_state(state)
            elif device == "cuda" and index.isdecimal() and int(index) < torch.cuda.device_count():
                torch.cuda.set_rng_state(state, int(index))
            else:
                _log.warning("The checkpoint holds a random state of %s, which is absent here.", name)
        except (RuntimeError, TypeError) as error:
            raise CheckpointError(f"The random state of {name} does not fit this torch: {error}.") from error
