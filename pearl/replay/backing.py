"""Where the arrays of a Data Storage lie: this process's memory, a file, or memory that other processes see."""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import mmap
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from pearl import _native
from pearl.byte_size import readable_size
from pearl.errors import CapacityError, ConfigurationError, PearlError, ReplayError
from pearl.runtime.shared_buffer import SharedBuffer

BackingKind: TypeAlias = Literal["ram", "memmap", "shared"]
BACKINGS: tuple[BackingKind, ...] = ("ram", "memmap", "shared")

FILE_FORMAT = 1
_MAGIC = b"PEARLSTO"
_HEADER_NBYTES = 1 << 16  # magic, length of the JSON text, the text
_PAGE = 4096


@dataclass(frozen=True)
class ArraySpec:
    """One array: `shape` whole, dtype as NumPy names it."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


class Place(NamedTuple):
    """How far a ring is: `claimed` exceeds `inserted` while rows are being written."""

    size: int
    cursor: int
    inserted: int
    claimed: int


class RamBacking:
    """Arrays of this process; the system commits their memory as it is written to."""

    kind: BackingKind = "ram"
    path: Path | None = None
    writable = True

    def __init__(self, specs: Sequence[ArraySpec]) -> None:
        self.arrays: dict[str, np.ndarray] = {s.name: np.zeros(s.shape, s.dtype) for s in specs}
        self._place = Place(0, 0, 0, 0)

    def publish(self, place: Place) -> None:
        """Say how far the ring is."""
        self._place = place

    def place(self) -> Place:
        """How far the ring was said to be."""
        return self._place

    def flush(self) -> None:
        """Nothing: there is no file."""

    def close(self) -> None:
        """Let go of the arrays."""
        self.arrays = {}


class MappedBacking:
    """Arrays in one mapping, and before them the place of the ring, which other processes may read at any time."""

    def __init__(
        self,
        memory: mmap.mmap,
        specs: Sequence[ArraySpec],
        *,
        create: bool,
        writable: bool,
        path: Path | None = None,
        shared: SharedBuffer | None = None,
        lock: int = -1,
    ) -> None:
        self.kind: BackingKind = "memmap" if shared is None else "shared"
        self.path, self.shared, self.writable = path, shared, writable
        self._memory: mmap.mmap | None = memory
        self._lock = lock
        with contextlib.suppress(OSError, AttributeError):
            memory.madvise(mmap.MADV_HUGEPAGE)  # not every file system has them
        place_bytes = np.frombuffer(memory, np.uint8, _PLACE_NBYTES, _HEADER_NBYTES)
        self._snapshot = _native.Snapshot(place_bytes, _PLACE.itemsize * len(Place._fields), create)
        self.arrays: dict[str, np.ndarray] = {}
        for spec, offset in zip(specs, _offsets(specs), strict=True):
            flat = np.frombuffer(memory, spec.dtype, math.prod(spec.shape), offset)
            self.arrays[spec.name] = flat.reshape(spec.shape)
        if create:
            self.publish(Place(0, 0, 0, 0))

    def publish(self, place: Place) -> None:
        """Say how far the ring is; readers see this or the place before, never a mixture."""
        self._snapshot.write(np.array(place, _PLACE).view(np.uint8))

    def place(self) -> Place:
        """How far the ring was last said to be. Any process."""
        values = np.empty(len(Place._fields), _PLACE)
        if self._snapshot.read(values.view(np.uint8), 0) == 0:
            raise ReplayError("The Data Storage was never completed by the process that made it.")
        return Place(*values.tolist())

    def flush(self) -> None:
        """Wait until the system has written a file's pages out: what survives a loss of power."""
        if self._memory is not None and self.shared is None:
            self._memory.flush()

    def close(self) -> None:
        """Let go of the arrays; the mapping ends when the last view of it does."""
        self.arrays = {}
        self._memory = self.shared = None
        del self._snapshot
        self._release()

    def _release(self) -> None:
        lock, self._lock = self._lock, -1
        if lock >= 0:
            fcntl.flock(lock, fcntl.LOCK_UN)
            os.close(lock)

    def __del__(self) -> None:
        if hasattr(self, "_lock"):
            self._release()


Backing: TypeAlias = RamBacking | MappedBacking
_PLACE = np.dtype(np.int64)
_PLACE_NBYTES = _native.Snapshot.nbytes(_PLACE.itemsize * len(Place._fields))


def make_backing(kind: BackingKind, specs: Sequence[ArraySpec], path: str | os.PathLike[str] | None) -> Backing:
    """Make zeroed arrays, or open those of the file `path` if there is one (kind "memmap").

    Raises ConfigurationError for an unknown kind or a path that is missing or too many, ReplayError for a file that
    is not a Data Storage of these arrays, and CapacityError if the disk is too full.
    """
    if kind not in BACKINGS:
        raise ConfigurationError(f"backing must be one of {', '.join(map(repr, BACKINGS))}; found {kind!r}.")
    if (kind == "memmap") != (path is not None):
        raise ConfigurationError(
            'backing="memmap" needs the `path` of its file.'
            if path is None
            else f'`path` is for backing="memmap"; found backing={kind!r}.'
        )
    if kind == "ram":
        return RamBacking(specs)
    if kind == "shared":
        buffer = SharedBuffer(_total_nbytes(specs))
        return MappedBacking(buffer.memory, specs, create=True, writable=True, shared=buffer)
    assert path is not None
    file = Path(path)
    return open_file(file, specs, writable=True) if file.exists() else _create_file(file, specs)


def attach(buffer: SharedBuffer, specs: Sequence[ArraySpec]) -> MappedBacking:
    """Arrays of another process, for reading."""
    return MappedBacking(buffer.memory, specs, create=False, writable=False, shared=buffer)


def open_file(path: Path, specs: Sequence[ArraySpec], *, writable: bool) -> MappedBacking:
    """Open an existing file; raises ReplayError unless it is a Data Storage of exactly these arrays, and whole."""
    with path.open("r+b") as file:
        _check_header(path, file.read(_HEADER_NBYTES), _document(specs))
        found, expected = file.seek(0, os.SEEK_END), _total_nbytes(specs)
        if found != expected:
            raise ReplayError(f"{path} is truncated: a Data Storage of {expected:,} bytes; found {found:,} bytes.")
        lock = _lock(path, file.fileno()) if writable else -1
        memory = mmap.mmap(file.fileno(), expected)
    try:
        return MappedBacking(memory, specs, create=False, writable=writable, path=path, lock=lock)
    except PearlError as error:
        raise ReplayError(f"{path} was not completed by the process that made it: {error} Remove the file.") from error


def _create_file(path: Path, specs: Sequence[ArraySpec]) -> MappedBacking:
    total = _total_nbytes(specs)
    status = os.statvfs(path.parent)
    free = status.f_bavail * status.f_frsize
    if total > free:
        raise CapacityError(
            f"A Data Storage of {readable_size(total)} does not fit the disk of {path}: {readable_size(free)} are "
            "free. Lower `capacity`, or choose a path on another disk."
        )
    text = json.dumps(_document(specs)).encode()
    if len(text) > _HEADER_NBYTES - 16:
        raise ReplayError(f"The columns' names and shapes do not fit a header of {_HEADER_NBYTES} bytes.")
    # The header comes last and under the final name, so that a file left by an interrupted start is never taken up.
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("w+b") as file:
            lock = _lock(path, file.fileno())
            file.truncate(total)  # sparse: the disk's blocks are taken as they are written to
            memory = mmap.mmap(file.fileno(), total)
            backing = MappedBacking(memory, specs, create=True, writable=True, path=path, lock=lock)
            memory[: 16 + len(text)] = _MAGIC + len(text).to_bytes(8, "little") + text
        partial.rename(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    return backing


def _lock(path: Path, fd: int) -> int:
    """Take the file for writing and return a descriptor that holds it; it ends with the process, however that ends."""
    held = os.dup(fd)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(held)
        raise ReplayError(
            f"{path} is being written by another Data Storage. Close that one, or pass it to this process for reading."
        ) from error
    return held


def _document(specs: Sequence[ArraySpec]) -> dict[str, Any]:
    return {"format": FILE_FORMAT, "arrays": [asdict(s) | {"shape": list(s.shape)} for s in specs]}


def _check_header(path: Path, header: bytes, expected: Mapping[str, Any]) -> None:
    if header[:8] != _MAGIC:
        raise ReplayError(f"{path} is not a Data Storage of PEARL. Choose another path, or remove the file.")
    length = int.from_bytes(header[8:16], "little")
    try:
        found = json.loads(header[16 : 16 + length])
        version, arrays = found["format"], {a["name"]: (a["shape"], a["dtype"]) for a in found["arrays"]}
    except (ValueError, KeyError, TypeError) as error:
        raise ReplayError(f"The header of {path} is damaged or truncated ({error}). Remove the file.") from error
    if version != FILE_FORMAT:
        raise ReplayError(f"{path} has format {version!r}; this version of PEARL reads format {FILE_FORMAT}.")
    if found == expected:
        return
    for array in expected["arrays"]:
        have = arrays.pop(array["name"], None)
        want = (array["shape"], array["dtype"])
        if have != want:
            raise ReplayError(f"{path} holds another Data Storage: {array['name']!r} must be {want}; found {have}.")
    raise ReplayError(f"{path} holds another Data Storage: it also has {sorted(arrays)}, or has them in another order.")


def _offsets(specs: Sequence[ArraySpec]) -> list[int]:
    offsets, at = [], _HEADER_NBYTES + _PAGE
    for spec in specs:
        offsets.append(at)
        at += -(-spec.nbytes // _PAGE) * _PAGE
    return offsets


def _total_nbytes(specs: Sequence[ArraySpec]) -> int:
    return _offsets([*specs, ArraySpec("end", (0,), "uint8")])[-1]
