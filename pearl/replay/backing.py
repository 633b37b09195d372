"""Where the arrays of a Data Storage are: in this process's memory, in a file, or in shared memory."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import json
import logging
import math
import mmap
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from pearl import _native
from pearl.byte_size import readable_size
from pearl.errors import CapacityError, ConfigurationError, PearlError, QueueError, ReplayError
from pearl.ipc.shared_buffer import SharedBuffer

BackingKind: TypeAlias = Literal["ram", "memmap", "shared"]
BACKINGS: tuple[BackingKind, ...] = ("ram", "memmap", "shared")

log = logging.getLogger(__name__)

FILE_FORMAT = 2
_MAGIC = b"PEARLSTO"
_HEADER_NBYTES = 1 << 16  # magic, length of the JSON text, the text
_PAGE = 4096
# At the end of the page with the ring's place: whether the file was closed, and the boot during which it was open.
_MARK_NBYTES = 64
_CLOSED, _IN_USE = b"closed", b"in use"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_RESERVED_AT_ONCE = 16 << 20
_PARTIAL = ".partial"
_ATTEMPTS = 10


@dataclass(frozen=True)
class ArraySpec:
    """One array: its whole shape, and the name of its NumPy dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    grows: bool = False  # takes its disk space by `reserve`, not at once

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


class Place(NamedTuple):
    """The position of a ring: `claimed` exceeds `inserted` while rows are being written."""

    size: int
    cursor: int
    inserted: int
    claimed: int


class RamBacking:
    """Arrays of this process; the system commits their memory at the first write."""

    kind: BackingKind = "ram"
    path: Path | None = None
    writable = True

    def __init__(self, specs: Sequence[ArraySpec]) -> None:
        self.arrays: dict[str, np.ndarray] = {s.name: np.zeros(s.shape, s.dtype) for s in specs}

    def reserve(self, name: str, rows: int) -> None:
        """Do nothing: the system commits memory at the first write."""

    def flush(self) -> None:
        """Do nothing: there is no file."""

    def close(self, *, complete: bool = True) -> None:
        """Drop the arrays."""
        self.arrays = {}


class MappedBacking:
    """Arrays in one mapping, preceded by the place of the ring, which other processes may read at any time."""

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
        self._mark = np.frombuffer(memory, np.uint8, _MARK_NBYTES, _HEADER_NBYTES + _PAGE - _MARK_NBYTES)
        self._reserved: dict[str, int] = {}  # rows of the arrays that grow for which disk space was taken
        self._specs = {s.name: (s, offset) for s, offset in zip(specs, _offsets(specs), strict=True) if s.grows}
        place_bytes = np.frombuffer(memory, np.uint8, _PLACE_NBYTES, _HEADER_NBYTES)
        self._snapshot = _native.Snapshot(place_bytes, _PLACE.itemsize * len(Place._fields), create)
        self.arrays: dict[str, np.ndarray] = {}
        for spec, offset in zip(specs, _offsets(specs), strict=True):
            flat = np.frombuffer(memory, spec.dtype, math.prod(spec.shape), offset)
            self.arrays[spec.name] = flat.reshape(spec.shape)
        if create:
            self.publish(Place(0, 0, 0, 0))

    def publish(self, place: Place) -> None:
        """Publish the ring's place; readers see this or the previous place, never a mixture."""
        self._snapshot.write(np.array(place, _PLACE).view(np.uint8))

    def place(self) -> Place:
        """The place published last, by any process."""
        values = np.empty(len(Place._fields), _PLACE)
        try:
            version = self._snapshot.read(values.view(np.uint8), 0)
        except QueueError as error:
            raise ReplayError(f"The place of the Data Storage's ring is damaged: {error}") from error
        if version == 0:
            raise ReplayError("The Data Storage was never completed by the process that made it.")
        return Place(*values.tolist())

    def take_over(self) -> None:
        """Mark the file as in use until `close`."""
        self._set_mark(_IN_USE)

    def check_mark(self) -> None:
        """Raise ReplayError unless the file was closed, or its writer ended and the system did not.

        After a kill of the process, the file is whole. After a crash of the system, rows may be missing that were not
        written out.
        """
        state, _, boot = self._mark.tobytes().rstrip(b"\0").partition(b":")
        if state not in (_CLOSED, _IN_USE):
            raise ReplayError(f"{self.path} is damaged: it says neither closed nor in use. Remove the file.")
        if state == _IN_USE and boot != _boot_id():
            raise ReplayError(
                f"{self.path} was in use when the system ended, and may lack rows. Remove the file, and restore a "
                "checkpoint."
            )

    def _set_mark(self, state: bytes) -> None:
        self._mark[:] = np.frombuffer((state + b":" + _boot_id()).ljust(_MARK_NBYTES, b"\0"), np.uint8)
        if self._memory is not None and self.kind == "memmap":
            self._memory.flush(_HEADER_NBYTES, _PAGE)

    def reserve(self, name: str, rows: int) -> None:
        """Take disk space for the first `rows` rows of an array that `grows`; CapacityError if the disk is full."""
        if self._lock < 0 or rows <= self._reserved.get(name, 0):
            return
        spec, offset = self._specs[name]
        row = spec.nbytes // spec.shape[0]
        ahead = min(_RESERVED_AT_ONCE, spec.nbytes // 16)  # a small part, since most of the array may stay empty
        rows = min(spec.shape[0], rows + ahead // max(row, 1))
        assert self.path is not None
        reserve_disk(self.path, self._lock, offset, rows * row)
        self._reserved[name] = rows

    def flush(self) -> None:
        """Wait until the system has written a file's pages to the disk, where they survive a power cut."""
        if self._memory is not None and self.shared is None:
            self._memory.flush()

    def close(self, *, complete: bool = True) -> None:
        """Drop the arrays; the mapping ends with the last view of it.

        If this process writes the file, it is written out and marked as closed, unless it is not `complete`.
        """
        if complete and self._lock >= 0:
            try:
                self.flush()
                self._set_mark(_CLOSED)
            except OSError as error:
                log.warning("%s could not be written out (%s); do not use the file again.", self.path, error.strerror)
        self.arrays = {}
        self._memory = self.shared = None
        del self._snapshot, self._mark
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

    Raises ConfigurationError for an unknown kind or a missing or superfluous path, ReplayError for a file that is not a
    Data Storage of these arrays, and CapacityError if the disk is too full.
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
    for _ in range(_ATTEMPTS):
        try:
            return open_file(file, specs, writable=True) if file.exists() else _create_file(file, specs)
        except (FileExistsError, FileNotFoundError):  # another process has made or removed it meanwhile
            continue
    raise ReplayError(f"{file} keeps appearing and disappearing. Choose another path.")


def attach(buffer: SharedBuffer, specs: Sequence[ArraySpec]) -> MappedBacking:
    """Arrays of another process, for reading."""
    return MappedBacking(buffer.memory, specs, create=False, writable=False, shared=buffer)


def open_file(path: Path, specs: Sequence[ArraySpec], *, writable: bool) -> MappedBacking:
    """Open an existing file; raises ReplayError unless it is a Data Storage of exactly these arrays, and whole.

    A writer takes disk space for the whole file: a copy may be sparse.
    """
    try:
        file = path.open("r+b")
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ReplayError(f"{path} cannot be opened: {error.strerror}. Choose another path.") from error
    with file:
        _check_header(path, file.read(_HEADER_NBYTES), _document(specs))
        found, expected = file.seek(0, os.SEEK_END), _total_nbytes(specs)
        if found != expected:
            raise ReplayError(f"{path} is truncated: a Data Storage of {expected:,} bytes; found {found:,} bytes.")
        lock = _lock(path, file.fileno()) if writable else -1
        try:
            if writable:
                _reserve_file(path, file.fileno(), specs)
            memory = mmap.mmap(file.fileno(), expected)
        except BaseException:
            if lock >= 0:
                os.close(lock)
            raise
    try:
        return MappedBacking(memory, specs, create=False, writable=writable, path=path, lock=lock)
    except PearlError as error:
        raise ReplayError(f"{path} was not completed by the process that made it: {error} Remove the file.") from error


def _create_file(path: Path, specs: Sequence[ArraySpec]) -> MappedBacking:
    """Make the file, locked by this process; it gets its name when it is complete, so that nobody sees a part of it.

    Only its owner may read it: observations may be confidential. Raises FileExistsError if another process was faster.
    """
    text = json.dumps(_document(specs)).encode()
    if len(text) > _HEADER_NBYTES - 16:
        raise ReplayError(f"The columns' names and shapes do not fit a header of {_HEADER_NBYTES} bytes.")
    _remove_partial(path)
    total = _total_nbytes(specs)
    try:
        descriptor, name = tempfile.mkstemp(prefix=f"{path.name}.", suffix=_PARTIAL, dir=path.parent)
    except OSError as error:
        raise ConfigurationError(
            f"The Data Storage {path} cannot be made: {error.strerror}. Choose a path in a folder that exists and that "
            "you may write to."
        ) from error
    try:
        with os.fdopen(descriptor, "w+b") as file:
            lock = _lock(path, file.fileno(), wait=True)
            try:
                try:
                    file.truncate(total)
                except OSError as error:
                    _refuse_size(path, file.fileno(), total, error)
                    raise
                _reserve_file(path, file.fileno(), specs)
                memory = mmap.mmap(file.fileno(), total)
                backing = MappedBacking(memory, specs, create=True, writable=True, path=path, lock=lock)
            except BaseException:
                os.close(lock)
                raise
            memory[: 16 + len(text)] = _MAGIC + len(text).to_bytes(8, "little") + text
            backing.take_over()
        _publish(Path(name), path)
    finally:
        Path(name).unlink(missing_ok=True)
    return backing


def _publish(partial: Path, path: Path) -> None:
    """Give the file its name, unless that name is taken: a rename would replace the other process's file."""
    try:
        os.link(partial, path)
    except (FileExistsError, FileNotFoundError):  # not found: another process removed it before it was locked
        raise
    except OSError as error:
        raise ConfigurationError(
            f"The Data Storage {path} cannot be made: its file system has no hard links ({error.strerror}). Choose a "
            "path on another disk."
        ) from error


def _remove_partial(path: Path) -> None:
    """Remove partial files of killed processes: those that nobody has locked."""
    for partial in path.parent.glob(f"{glob.escape(path.name)}.*{_PARTIAL}"):
        with contextlib.suppress(OSError), partial.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            partial.unlink()


def _reserve_file(path: Path, descriptor: int, specs: Sequence[ArraySpec]) -> None:
    """Take disk space for all arrays that do not grow: writing to a full disk would end the process by a signal."""
    start = 0
    for spec, offset in zip(specs, _offsets(specs), strict=True):
        if spec.grows:
            reserve_disk(path, descriptor, start, offset - start)
            start = offset + -(-spec.nbytes // _PAGE) * _PAGE
    reserve_disk(path, descriptor, start, _total_nbytes(specs) - start)


def reserve_disk(path: Path, descriptor: int, offset: int, nbytes: int) -> None:
    """Take disk space for a part of an open file at `path`; CapacityError if the disk is full."""
    if nbytes == 0:
        return
    try:
        os.posix_fallocate(descriptor, offset, nbytes)
    except OSError as error:
        _refuse_size(path, descriptor, nbytes, error)
        log.warning(
            "The disk of %s cannot reserve room (%s): if it fills up, this process ends by SIGBUS.",
            path,
            error.strerror,
        )


def _refuse_size(path: Path, descriptor: int, nbytes: int, error: OSError) -> None:
    """Raise CapacityError if the error means that the file is too large or the disk is full."""
    if error.errno == errno.EFBIG:
        raise CapacityError(
            f"A Data Storage that needs {readable_size(nbytes)} is larger than a file at {path} may be "
            f"({error.strerror}). Lower `capacity`, raise the limit (ulimit -f), or choose a path on another disk."
        ) from error
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        status = os.fstatvfs(descriptor)
        raise CapacityError(
            f"A Data Storage that needs {readable_size(nbytes)} does not fit the disk of {path}: "
            f"{readable_size(status.f_bavail * status.f_frsize)} are free. Lower `capacity`, or choose a path on "
            "another disk."
        ) from error


def _boot_id() -> bytes:
    """An identifier that changes at each boot of the system."""
    try:
        return _BOOT_ID.read_bytes().strip()[: _MARK_NBYTES // 2 + 8]
    except OSError:
        return b""


def _lock(path: Path, fd: int, *, wait: bool = False) -> int:
    """Lock the file for writing and return a descriptor that holds the lock, until the process ends in any way.

    `wait` is for a partial file, which others lock only for a moment, to see whether it was left behind.
    """
    held = os.dup(fd)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
        os.close(held)
        raise ReplayError(
            f"{path} is being written by another Data Storage. Close that one, or pass it to this process for reading."
        ) from error
    return held


def _document(specs: Sequence[ArraySpec]) -> dict[str, Any]:
    arrays = [{"name": s.name, "shape": list(s.shape), "dtype": s.dtype} for s in specs]
    return {"format": FILE_FORMAT, "arrays": arrays}


def _check_header(path: Path, header: bytes, expected: Mapping[str, Any]) -> None:
    if header[:8] != _MAGIC:
        raise ReplayError(f"{path} is not a Data Storage of PEARL. Choose another path, or remove the file.")
    length = int.from_bytes(header[8:16], "little")
    try:
        found = json.loads(header[16 : 16 + length])
        version, arrays = found["format"], {a["name"]: (a["shape"], a["dtype"]) for a in found["arrays"]}
    except (ValueError, KeyError, TypeError) as error:
        raise ReplayError(f"The header of {path} is damaged or truncated ({error}). Remove the file.") from error
    if type(version) is not int or version != FILE_FORMAT:
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
