"""Data Storage: the transitions, one column per field, in a ring."""

from __future__ import annotations

import abc
import operator
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from pearl import _native
from pearl.errors import ReplayError
from pearl.ipc.shared_buffer import SharedBuffer
from pearl.replay.arguments import as_indices, check_indices
from pearl.replay.backing import ArraySpec, Backing, BackingKind, Place, RamBacking, attach, make_backing, open_file
from pearl.replay.memory import check_fits
from pearl.spec import NEXT_OBS, OBS, REWARD, FieldSpec, TransitionSpec

_T = TypeVar("_T")


class Ring:
    """The slots of the next rows, taken in turn: the oldest rows are overwritten."""

    def __init__(self, capacity: int) -> None:
        try:
            self.capacity = operator.index(capacity)
        except TypeError as error:
            raise ReplayError(f"The capacity of a Data Storage must be a whole number; found {capacity!r}.") from error
        if self.capacity < 1:
            raise ReplayError(f"The capacity of a Data Storage must be at least 1; found {capacity}.")
        self.size = self.cursor = self.inserted = 0

    def next_indices(self, count: int) -> np.ndarray:
        """Return the slots `(count,)` int64 that the next insertion takes."""
        if not 0 <= count <= self.capacity:
            raise ReplayError(f"An insertion must have 0 to {self.capacity} rows, the capacity; found {count}.")
        indices = np.arange(self.cursor, self.cursor + count, dtype=np.int64)
        if self.cursor + count > self.capacity:
            indices %= self.capacity
        return indices

    def advance(self, count: int) -> None:
        """Take the next `count` slots."""
        self.cursor = (self.cursor + count) % self.capacity
        self.size = min(self.size + count, self.capacity)
        self.inserted += count

    def go_to(self, *, size: int, cursor: int, inserted: int) -> None:
        """Go to a saved place; raises ReplayError unless the numbers fit together."""
        full = size == self.capacity
        if not (0 <= size <= self.capacity and inserted >= size and 0 <= cursor < self.capacity) or (
            not full and cursor != size
        ):
            raise ReplayError(
                f"A Data Storage of {self.capacity} slots cannot have size={size}, cursor={cursor}, "
                f"inserted={inserted}."
            )
        self.size, self.cursor, self.inserted = size, cursor, inserted


class StorageOnDevice(Ring, abc.ABC):
    """A Data Storage in an accelerator's memory: a ring of whole rows, which a subclass writes and gathers."""

    def __init__(self, spec: TransitionSpec, capacity: int) -> None:
        super().__init__(capacity)
        self.spec = spec
        self._closed = False

    @property
    def nbytes(self) -> int:
        """Bytes of all columns."""
        return self.capacity * self.spec.nbytes

    def insert(self, columns: Mapping[str, Any], count: int | None = None) -> np.ndarray:
        """Store the first `count` rows (all, if None) of each column; return their slots."""
        self._require_open()
        if count is None:
            count = count_rows(columns)
        indices = self.next_indices(count)
        self._write(self.cursor, count, self._rows(columns, count))
        self.advance(count)
        return indices

    def restore(self, columns: Mapping[str, Any], *, size: int, cursor: int, inserted: int) -> None:
        """Replace all rows by the first `size` saved rows; raises ReplayError if they do not fit."""
        self._require_open()
        rows = self._rows(columns, size)
        self.go_to(size=size, cursor=cursor, inserted=inserted)
        self._write(0, size, rows)

    def close(self) -> None:
        """Free the memory. May be repeated; anything else then raises ReplayError."""
        if not self._closed:
            self._closed = True
            self._free()

    def _require_open(self) -> None:
        if self._closed:
            raise ReplayError("The Data Storage is closed.")

    def _checked_slots(self, indices: ArrayLike) -> np.ndarray:
        slots = as_indices(indices)
        check_indices(slots, self.size, _STORED)
        return slots

    @property
    @abc.abstractmethod
    def columns(self) -> Mapping[str, np.ndarray]:
        """Copies of all columns on the host, `(capacity, *shape)` each, for checkpoints."""

    @abc.abstractmethod
    def gather(self, indices: ArrayLike, out: Any = None) -> Mapping[str, Any]:
        """Copy the rows at `indices` `(n,)`, into the columns `(n, *shape)` of `out` if given.

        Raises ReplayError for a slot that is not written yet, for columns that do not fit, and after `close`.
        """

    @abc.abstractmethod
    def _rows(self, columns: Mapping[str, Any], count: int) -> list[Any]:
        """The first `count` rows of each column in storage order, checked."""

    @abc.abstractmethod
    def _write(self, start: int, count: int, rows: list[Any]) -> None:
        """Write `count` checked rows to the slots from `start` on."""

    @abc.abstractmethod
    def _free(self) -> None:
        """Free the memory."""


_LINKS = ("next", "prev", "episode", "position", "last", "stream", "tail", "free_episodes")
_COUNTERS = 6
_SAVED = ("stream", "ending", "position")  # of each item: its links are rebuilt from these
_SAVED_STREAMS = ("resumed", "awaited")  # of each stream: where an episode continues that has no item stored yet
_PREFIX = "episode/"
_KEPT = "kept/next_obs"
_STORED = ", the rows stored"
_CHUNK = 4096  # rows linked at a time when restoring
_RETRY_S = 5.0


@dataclass(frozen=True)
class StorageOptions:
    """What a Data Storage keeps in addition to its columns; see DataStorage."""

    streams: int = 0
    share_next_obs: bool = False
    slice_length: int = 0


class DataStorage:
    """Ring of `capacity` transitions in NumPy columns; the system commits memory at the first write.

    One thread inserts. Another may gather at the same time, from slots other than those being inserted. Raises
    CapacityError if the free memory does not suffice.

    `backing` says where the columns are. "ram": this process's memory. "shared": memory that a spawned process shares
    if the storage is passed to it. "memmap": the file `path`, readable by its owner only. It takes its disk space at
    once; a file that exists is opened again with its rows, if its links are sound. It may also be passed to other
    processes. Other processes only read; they read rows again that were overwritten meanwhile, so that every gathered
    row is whole.

    With `streams` (environments), the storage knows which item follows which: `insert` takes each row's stream and
    whether its episode ends there, in any interleaving. `pearl.replay.sequences`, `steps_after`, `steps_before` and
    `remaining` need this. If a row's obs is not the next_obs of the previous row of its stream, a step is missing: the
    row begins a new episode, and `breaks` counts it. For `draw_starts`, `slice_length` keeps the set of items that
    begin that many steps of one episode.

    With `share_next_obs`, next_obs is stored only if no stored item has it as obs: for the last item of each episode
    and of each stream. Gathered rows are the same to the bit. The rows stored separately take at most `capacity`
    observations, and memory or disk space only when needed: `insert` raises CapacityError, and changes nothing, if the
    disk is then full.
    """

    def __init__(
        self,
        spec: TransitionSpec,
        capacity: int,
        backing: BackingKind = "ram",
        path: str | os.PathLike[str] | None = None,
        *,
        streams: int | None = None,
        share_next_obs: bool = False,
        slice_length: int | None = None,
    ) -> None:
        tracked = share_next_obs or slice_length is not None
        options = StorageOptions(
            (1 if tracked else 0) if streams is None else streams, share_next_obs, slice_length or 0
        )
        _check_options(spec, options, streams, slice_length)
        ring = Ring(capacity)
        specs = _array_specs(spec, ring.capacity, options)
        if backing != "memmap":
            needed = sum(array.nbytes for array in specs if array.name != _KEPT)
            check_fits(ring.capacity, needed // ring.capacity)
        self._take(spec, ring, options, make_backing(backing, specs, path))
        if backing == "memmap":
            self._resume()

    def _take(self, spec: TransitionSpec, ring: Ring, options: StorageOptions, backing: Backing) -> None:
        self.spec, self._ring, self._options, self._backing = spec, ring, options, backing
        self._names = tuple(f.name for f in spec.fields)
        self._columns = {name: backing.arrays[name] for name in self._names if name in backing.arrays}
        self._native: _native.ColumnStore | None = _native.ColumnStore(self._columns)
        self._compared = _compares(spec)
        self._links = (
            _make_links(self._columns, backing.arrays, options, compared=self._compared) if options.streams else None
        )
        self._lost = 0
        self._apart = options.share_next_obs
        self._unwatched = self._links is None and isinstance(backing, RamBacking)  # no reader to tell of insertions
        self._steady = backing.writable and not self._apart  # all rows are in the columns, and no other process writes

    def _resume(self) -> None:
        """Continue where the file's last writer stopped; ReplayError, and an unchanged file, if that is unsafe."""
        backing = self._backing
        assert not isinstance(backing, RamBacking)
        try:
            backing.check_mark()
            try:
                place = backing.place()
                self._ring.go_to(size=place.size, cursor=place.cursor, inserted=place.inserted)
                self._lost = place.claimed - place.inserted
                if not 0 <= self._lost <= self.capacity:
                    raise ReplayError(f"{self._lost} rows cannot be unfinished.")
            except ReplayError as error:
                raise ReplayError(
                    f"{backing.path} is damaged: {error} Remove the file, restore a checkpoint."
                ) from error
            if self._links is not None:
                damage = self._links.damage(place.size, place.cursor)
                if self._lost:
                    damage = damage or "its last writer was interrupted while it inserted"
                if damage:
                    raise ReplayError(
                        f"The links between the steps in {backing.path} cannot be relied on: {damage}. Remove the "
                        "file, and restore a checkpoint."
                    )
                self._reserve(0)
        except BaseException:
            self._let_go()
            backing.close(complete=False)
            raise
        backing.take_over()

    def __reduce__(self) -> tuple[Any, ...]:
        self._open()
        backing = self._backing
        if isinstance(backing, RamBacking):
            raise ReplayError(
                'A Data Storage in this process\'s memory cannot be passed to another; make it with backing="shared".'
            )
        return _attached, (self.spec, self.capacity, self._options, backing.path or backing.shared)

    @property
    def capacity(self) -> int:
        """Slots."""
        return self._ring.capacity

    @property
    def size(self) -> int:
        """Slots that hold a transition."""
        return self._place().size

    @property
    def cursor(self) -> int:
        """The slot that the next transition takes."""
        return self._place().cursor

    @property
    def inserted(self) -> int:
        """Transitions inserted since creation."""
        return self._place().inserted

    @property
    def nbytes(self) -> int:
        """Bytes of all columns when full, without the next observations that are stored separately."""
        stored = sum(f.nbytes for f in self.spec.fields if not (self._options.share_next_obs and f.name == NEXT_OBS))
        return self.capacity * stored

    @property
    def streams(self) -> int:
        """Number of streams; 0 if the storage does not know which item follows which."""
        return self._options.streams

    @property
    def slice_length(self) -> int:
        """Steps of a slice whose start `draw_starts` draws; 0 for none."""
        return self._options.slice_length

    @property
    def breaks(self) -> int:
        """Rows whose obs was not the next_obs of their stream's previous row, though its episode had not ended."""
        self._tracked()
        return int(self._backing.arrays[_PREFIX + "counters"][5])

    @property
    def unfinished(self) -> np.ndarray:
        """Slots `(n,)` of a reopened file that an interrupted insertion may have damaged.

        They are the next ones to be inserted into; until then, gathering them raises ReplayError. Give them priority 0
        (in a Replay Manager whose `priority_epsilon` is 0).
        """
        slots = (self._ring.cursor + np.arange(self._lost)) % self.capacity
        return slots[slots < self._ring.size]

    @property
    def columns(self) -> Mapping[str, np.ndarray]:
        """Read-only views `(capacity, *shape)`; rows from `size` on are not written yet.

        With streams, there are also the columns from which `restore` rebuilds the links. These, and a shared next_obs,
        are copies of `size` rows, or of one row `(1, streams)`.
        """
        self._open()
        views = {name: column.view() for name, column in self._columns.items()}
        if self._links is not None:
            stored = np.arange(self.size)
            arrays = self._backing.arrays
            if self._options.share_next_obs:
                views[NEXT_OBS] = self.gather_column(NEXT_OBS, stored)
            views = {name: views[name] for name in self._names}
            views[_PREFIX + "stream"] = arrays[_PREFIX + "stream"][arrays[_PREFIX + "episode"][stored]]
            views |= {_PREFIX + name: arrays[_PREFIX + name][stored] for name in ("ending", "position")}
            views |= {_PREFIX + name: arrays[_PREFIX + name].copy().reshape(1, -1) for name in _SAVED_STREAMS}
        for view in views.values():
            view.flags.writeable = False
        return MappingProxyType(views)

    def stored_column(self, name: str) -> np.ndarray | None:
        """The column itself, for reading only; None if it is unknown or not stored as a column."""
        self._open()
        return self._columns.get(name)

    def next_indices(self, count: int) -> np.ndarray:
        """Return the slots `(count,)` int64 that the next insertion takes."""
        return self._ring.next_indices(count)

    def insert(
        self,
        columns: Mapping[str, np.ndarray],
        count: int | None = None,
        *,
        streams: ArrayLike | None = None,
        terminated: ArrayLike | None = None,
        truncated: ArrayLike | None = None,
    ) -> np.ndarray:
        """Store the first `count` rows (all, if None) of each column `(rows, *shape)`; return their slots.

        With streams: `streams` `(count,)` is the stream of each row (optional if there is only one), `terminated` and
        `truncated` `(count,)` bool say whether its episode ended there (default: none did).

        Raises ReplayError for a column that is missing, unknown, or of another shape or dtype, and for more rows
        than the capacity.
        """
        store = self._open()
        self._require_writer()
        if count is None:
            count = count_rows(columns)
        if self._unwatched and streams is terminated is truncated is None and type(columns) is dict:
            taken = store.insert(self._ring.cursor, count, columns)
            if taken is not None:
                self._ring.advance(count)
                return taken
        indices = self._ring.next_indices(count)
        rows = self._contiguous(columns, count)
        if self._links is None and not (streams is terminated is truncated is None):
            raise ReplayError("This Data Storage does not distinguish streams; make it with `streams`.")
        if self._links is not None:
            whose = self._streams(streams, count)
            endings = _flags("terminated", terminated, count) | _flags("truncated", truncated, count) << 1
            endings[endings == 3] = 1  # both: terminated wins
        self._reserve(count)
        self._claim(count)
        if self._links is None:
            store.insert(self._ring.cursor, count, self._stored(rows))
        else:
            self._link(self._links, self.cursor, self.size, whose, endings, None, rows, store)
        self._ring.advance(count)
        self._lost = max(0, self._lost - count)
        self._claim(0)
        return indices

    def gather(self, indices: ArrayLike, out: Mapping[str, np.ndarray] | None = None) -> dict[str, np.ndarray]:
        """Copy the rows at `indices` `(n,)` out, into the caller's arrays `(n, *shape)` if given.

        Raises ReplayError for a slot not yet written, or arrays that do not fit.
        """
        store = self._open()
        if self._steady and (out is None or type(out) is dict):
            try:
                found = store.gather(indices, self._ring.size, out)
            except TypeError:  # the arrays must be converted; the kernel finds that out faster than Python
                found = None
            if found is not None:
                if self._lost:
                    self._refuse_lost(as_indices(indices))
                return found
        slots = as_indices(indices)
        if out is None:
            targets = self.spec.empty(len(slots))
        else:
            rows = matching_rows(self.spec, out, len(slots), exact=True)
            targets = dict(zip(self._names, rows, strict=True))

        def copy() -> None:
            store.gather(slots, self.size, self._stored(targets))
            if self._apart and self._links is not None:
                self._links.gather_next(slots, self.size, targets[NEXT_OBS])

        # With share_next_obs, any insertion may move next observations between rows.
        self.consistently(copy, None if self._apart else slots)
        return targets

    def gather_steps(
        self,
        indices: ArrayLike,
        out: Mapping[str, np.ndarray],
        slots: np.ndarray,
        mask: np.ndarray,
        *,
        back: bool,
        repeat: bool = False,
    ) -> np.ndarray:
        """Copy each item with the following steps of its episode (`back`: the preceding), consistently; return counts.

        Fills the caller's columns of `out` `(n, length, *shape)`, any of the spec's; `slots` `(n, length)` int64, as
        `steps_after` and `steps_before` do; and `mask` `(n, length)` bool, True where a step exists. Where none does,
        the columns are zero, or with `repeat` those of the slot. Raises ReplayError unless all arrays are contiguous
        and have these shapes and dtypes.
        """
        store, links, starts = self._open(), self._tracked(), as_indices(indices)
        stored = {name: array for name, array in out.items() if name in self._columns}
        apart = out.get(NEXT_OBS) if self._apart else None
        # Links may lead to any row, so any insertion disturbs them.
        return self.consistently(
            lambda: links.gather_steps(store, starts, self.size, back, repeat, slots, mask, stored, apart)
        )

    def n_step(
        self, indices: ArrayLike, discounts: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Sum the discounted rewards from each item on; see `pearl.replay.n_step_returns`.

        `discounts` `(n + 1,)` float64 are the powers of gamma. Returns the sums, the last items, the steps, and the
        discounts after the last items, each `(batch,)`.
        """
        links, slots = self._tracked(), as_indices(indices)
        reward = self.stored_column(REWARD)
        if reward is None:
            raise unknown_column(self.spec, REWARD)
        return self.consistently(lambda: links.n_step(slots, self.size, reward, discounts))

    def gather_column(self, name: str, indices: ArrayLike) -> np.ndarray:
        """Copy the rows of one column at `indices` `(n,)` out."""
        slots = as_indices(indices)
        field = field_of(self.spec, name)
        if name in self._columns:
            check_indices(slots, self.size, _STORED)
            return self.consistently(lambda: self._columns[name][slots], slots)
        links, target = self._tracked(), np.empty((len(slots), *field.shape), field.dtype)
        self.consistently(lambda: links.gather_next(slots, self.size, target))
        return target

    def remaining(self, indices: ArrayLike) -> np.ndarray:
        """Return the steps `(n,)` int64 from each item to the newest of its episode, including both."""
        links, slots = self._tracked(), as_indices(indices)
        return self.consistently(lambda: links.remaining(slots, self.size))

    def steps_after(self, indices: ArrayLike, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the slots `(n, length)` of each item and the following steps of its episode, and their counts `(n,)`.

        After the episode's end the last slot is repeated.
        """
        return self._walk(indices, length, back=False)

    def steps_before(self, indices: ArrayLike, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the slots `(n, length)` of the preceding steps of each item's episode and the item, and their counts.

        Before the oldest stored step, its slot is repeated.
        """
        return self._walk(indices, length, back=True)

    def _walk(self, indices: ArrayLike, length: int, *, back: bool) -> tuple[np.ndarray, np.ndarray]:
        links, slots = self._tracked(), as_indices(indices)
        return self.consistently(lambda: links.walk(slots, self.size, length, back))

    def terminated(self, indices: ArrayLike) -> np.ndarray:
        """Return `(n,)` bool: whether the episode terminated with each item."""
        return np.asarray(self._endings(indices) == 1)

    def truncated(self, indices: ArrayLike) -> np.ndarray:
        """Return `(n,)` bool: whether the episode was truncated with each item."""
        return np.asarray(self._endings(indices) == 2)

    def _endings(self, indices: ArrayLike) -> np.ndarray:
        links, slots = self._tracked(), as_indices(indices)
        return self.consistently(lambda: links.endings(slots, self.size))

    def positions(self, indices: ArrayLike) -> np.ndarray:
        """Return `(n,)` int64: the steps from the beginning of its episode to each item; 0 for the first."""
        self._tracked()
        slots = as_indices(indices)
        check_indices(slots, self.size, _STORED)
        return self.consistently(lambda: self._backing.arrays[_PREFIX + "position"][slots])

    def begins_episode(self, indices: ArrayLike) -> np.ndarray:
        """Return `(n,)` bool: whether each item is the first step of its episode."""
        return np.asarray(self.positions(indices) == 0)

    def draw_starts(self, batch_size: int, rng: np.random.Generator) -> np.ndarray:
        """Draw `(batch_size,)` int64 items that begin `slice_length` steps of one episode, each equally likely.

        The time does not depend on the storage's size. Raises ReplayError if there is no such item.
        """
        links = self._tracked()
        if not self.slice_length:
            raise ReplayError("Make the Data Storage with `slice_length` to draw starts of slices.")
        random = rng.integers(0, 2**64, batch_size, np.uint64)
        return self.consistently(lambda: links.draw(random))

    def consistently(self, read: Callable[[], _T], slots: np.ndarray | None = None) -> _T:
        """Return `read()`, repeated while the writing process overwrites rows (`slots` only, if given).

        Raises ReplayError if that lasts longer than five seconds. The writer itself reads once.
        """
        if self._backing.writable:
            if self._lost and slots is not None:
                self._refuse_lost(slots)
            return read()
        deadline = time.monotonic() + _RETRY_S
        while True:
            before = self._place()
            result = read()
            after = self._place()
            written = after.claimed - before.inserted
            if not written or (slots is not None and not ((slots - before.cursor) % self.capacity < written).any()):
                return result
            if time.monotonic() > deadline:
                raise ReplayError(
                    f"The rows wanted were being overwritten for {_RETRY_S:g} s. Sample items further from the "
                    "writer's cursor, or insert less often."
                )
            time.sleep(1e-5)

    def restore(self, columns: Mapping[str, np.ndarray], *, size: int, cursor: int, inserted: int) -> None:
        """Replace all rows by the first `size` saved rows; raises ReplayError if they do not fit."""
        store = self._open()
        self._require_writer()
        saved = dict(columns)
        names = (*_SAVED, *_SAVED_STREAMS) if self._links is not None else ()
        episodes = {name: saved.pop(_PREFIX + name, None) for name in names}
        rows = self._contiguous(saved, size)
        numbers = {name: _saved_numbers(name, array, size, self.streams) for name, array in episodes.items()}
        limits = ("stream", self.streams - 1), ("ending", 2), ("position", inserted), ("resumed", inserted)
        for name, most in limits:
            if name in numbers:
                _check_range(name, numbers[name].ravel(), most)
        self._ring.go_to(size=size, cursor=cursor, inserted=inserted)
        self._lost = size
        self._claim(size)
        store.insert(0, size, self._stored(rows))
        if self._links is not None:
            self._relink(self._links, rows, numbers)
        self._lost = 0
        self._claim(0)

    def flush(self) -> None:
        """Wait until a file's rows are on the disk, where they survive a power cut."""
        self._open()
        self._backing.flush()

    def close(self) -> None:
        """Free the memory. May be repeated; anything else then raises ReplayError."""
        if self._native is None:
            return
        if not self._backing.writable:
            place = self._place()
            self._ring.go_to(size=place.size, cursor=place.cursor, inserted=place.inserted)
        self._let_go()
        self._backing.close()

    def _let_go(self) -> None:
        self._native = self._links = None
        self._columns = {}

    def _open(self) -> _native.ColumnStore:
        if self._native is None:
            raise ReplayError("The Data Storage is closed.")
        return self._native

    def _tracked(self) -> _native.EpisodeLinks:
        self._open()
        if self._links is None:
            raise ReplayError(
                "This Data Storage does not know which item follows which; make it with `streams`, the number of "
                "environments whose steps are inserted."
            )
        return self._links

    def _require_writer(self) -> None:
        if not self._backing.writable:
            raise ReplayError("Only the process that made the Data Storage inserts into it; this one reads.")

    def _place(self) -> Place:
        ring = self._ring
        if self._native is None or self._backing.writable:
            return Place(ring.size, ring.cursor, ring.inserted, ring.inserted + self._lost)
        return self._backing.place()  # type: ignore[union-attr]  # readers have a MappedBacking

    def _claim(self, count: int) -> None:
        """Tell readers that the next `count` rows are being written (0: they are written)."""
        ring = self._ring
        if not isinstance(self._backing, RamBacking):
            self._backing.publish(Place(ring.size, ring.cursor, ring.inserted, ring.inserted + max(count, self._lost)))

    def _reserve(self, count: int) -> None:
        """Take disk space for the next observations that `count` more rows may store separately."""
        if self._apart:
            used = int(self._backing.arrays[_PREFIX + "counters"][2])
            self._backing.reserve(_KEPT, min(used + count, self.capacity))

    def _stored(self, rows: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The arrays whose columns are stored."""
        return {name: rows[name] for name in self._columns}

    def _contiguous(self, columns: Mapping[str, np.ndarray], count: int) -> dict[str, np.ndarray]:
        """The first `count` rows of each column by name, checked."""
        rows = zip(self._names, matching_rows(self.spec, columns, count), strict=True)
        return {name: np.ascontiguousarray(array) for name, array in rows}

    def _refuse_lost(self, slots: np.ndarray) -> None:
        for position in np.flatnonzero((slots - self._ring.cursor) % self.capacity < self._lost)[:1]:
            raise ReplayError(
                f"Slot {slots[position]}, at position {position}, may have been damaged when the file's last writer "
                "was interrupted. Give the slots in `unfinished` priority 0 until they are inserted into."
            )

    def _streams(self, streams: ArrayLike | None, count: int) -> np.ndarray:
        if streams is None:
            if self.streams != 1:
                raise ReplayError(f"Rows of {self.streams} streams need `streams`, the stream of each row.")
            return np.zeros(count, np.int64)
        whose = as_indices(streams, "streams")
        if len(whose) != count:
            raise ReplayError(f"streams must have one item per row ({count}); found {len(whose)}.")
        unknown = whose.view(np.uint64) >= self.streams  # negative ones are very large
        if unknown.any():
            position = int(unknown.argmax())
            raise ReplayError(
                f"Stream at position {position} must lie in [0, {self.streams}); found {whose[position]}."
            )
        return whose

    def _link(
        self,
        links: _native.EpisodeLinks,
        start: int,
        filled: int,
        streams: np.ndarray,
        endings: np.ndarray,
        positions: np.ndarray | None,
        rows: Mapping[str, np.ndarray],
        store: _native.ColumnStore | None = None,
    ) -> None:
        """Link rows, and write them if `store` is given."""
        obs, next_obs = (rows[OBS], rows[NEXT_OBS]) if self._compared else (None, None)
        stored = None if store is None else self._stored(rows)
        links.insert(start, filled, streams, endings, positions, obs, next_obs, store, stored)

    def _relink(
        self, links: _native.EpisodeLinks, rows: Mapping[str, np.ndarray], saved: Mapping[str, np.ndarray]
    ) -> None:
        """Rebuild the links of all items, oldest first."""
        for name in ("counters", "open", "start_place"):
            if _PREFIX + name in self._backing.arrays:
                self._backing.arrays[_PREFIX + name][...] = 0
        oldest = self._ring.cursor if self._ring.size == self.capacity else 0
        endings = saved["ending"].astype(np.uint8)
        for first in range(0, self._ring.size, _CHUNK):
            slots = (oldest + np.arange(first, min(first + _CHUNK, self._ring.size))) % self.capacity
            self._reserve(len(slots))
            part = {name: np.ascontiguousarray(rows[name][slots]) for name in (OBS, NEXT_OBS) if name in rows}
            self._link(links, int(slots[0]), 0, saved["stream"][slots], endings[slots], saved["position"][slots], part)
        for name in _SAVED_STREAMS:
            self._backing.arrays[_PREFIX + name][:] = saved[name] if len(saved[name]) else 0


def count_rows(columns: Mapping[str, Any]) -> int:
    """Rows of the first column; raises ReplayError for a number where there should be rows."""
    for name, column in columns.items():
        try:
            return len(column)
        except TypeError as error:
            raise ReplayError(
                f"Column {name!r} must be an array (rows, *shape), also of a single row; found {column!r}."
            ) from error
    return 0


def unknown_column(spec: TransitionSpec, name: str) -> ReplayError:
    """The error that `spec` has no column `name`."""
    return ReplayError(f"Transitions have no column {name!r}; they have {[f.name for f in spec.fields]}.")


def field_of(spec: TransitionSpec, name: str) -> FieldSpec:
    """The field of the column `name`; raises ReplayError if there is none."""
    for field in spec.fields:
        if field.name == name:
            return field
    raise unknown_column(spec, name)


def _attached(spec: TransitionSpec, capacity: int, options: StorageOptions, where: Path | SharedBuffer) -> DataStorage:
    """The Data Storage of another process, for reading."""
    specs = _array_specs(spec, capacity, options)
    backing = attach(where, specs) if isinstance(where, SharedBuffer) else open_file(where, specs, writable=False)
    storage = DataStorage.__new__(DataStorage)
    storage._take(spec, Ring(capacity), options, backing)
    return storage


def _compares(spec: TransitionSpec) -> bool:
    """Whether obs and next_obs have one shape and dtype, so that comparing them tells which row follows which."""
    columns = {f.name: f for f in spec.fields}
    obs, next_obs = columns.get(OBS), columns.get(NEXT_OBS)
    return obs is not None and next_obs is not None and (obs.shape, obs.dtype) == (next_obs.shape, next_obs.dtype)


def _check_options(
    spec: TransitionSpec, options: StorageOptions, streams: int | None, slice_length: int | None
) -> None:
    for name, value in (("streams", streams), ("slice_length", slice_length)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ReplayError(f"{name} must be a whole number of at least 1; found {value!r}.")
    if options.share_next_obs and not _compares(spec):
        raise ReplayError(
            f"share_next_obs needs columns {OBS!r} and {NEXT_OBS!r} of one shape and dtype; found "
            f"{[(f.name, f.shape, f.dtype) for f in spec.fields if f.name in (OBS, NEXT_OBS)]}."
        )


def _array_specs(spec: TransitionSpec, capacity: int, options: StorageOptions) -> list[ArraySpec]:
    """Everything a Data Storage keeps."""
    shared = options.share_next_obs
    arrays = [
        ArraySpec(f.name, (capacity, *f.shape), np.dtype(f.dtype).str)
        for f in spec.fields
        if not (shared and f.name == NEXT_OBS)
    ]
    if not options.streams:
        return arrays
    names = [
        *_LINKS,
        *(["kept", "free_kept"] if shared else []),
        *(["starts", "start_place"] if options.slice_length else []),
    ]
    arrays += [ArraySpec(_PREFIX + name, (capacity,), "<i8") for name in names]
    arrays.append(ArraySpec(_PREFIX + "ending", (capacity,), "|u1"))
    arrays += [ArraySpec(_PREFIX + name, (options.streams,), "<i8") for name in ("open", *_SAVED_STREAMS)]
    arrays.append(ArraySpec(_PREFIX + "counters", (_COUNTERS,), "<i8"))
    if shared:
        field = next(f for f in spec.fields if f.name == NEXT_OBS)
        arrays.append(ArraySpec(_KEPT, (capacity, *field.shape), np.dtype(field.dtype).str, grows=True))
    return arrays


def _make_links(
    columns: Mapping[str, np.ndarray], arrays: Mapping[str, np.ndarray], options: StorageOptions, *, compared: bool
) -> _native.EpisodeLinks:
    own = {name.removeprefix(_PREFIX): array for name, array in arrays.items() if name.startswith(_PREFIX)}
    obs, next_obs, kept = columns.get(OBS), columns.get(NEXT_OBS), arrays.get(_KEPT)
    if not compared:
        obs = next_obs = None
    return _native.EpisodeLinks(own, options.slice_length, obs, next_obs, kept)


def _flags(name: str, values: ArrayLike | None, count: int) -> np.ndarray:
    """`(count,)` uint8 of 0 and 1."""
    if values is None:
        return np.zeros(count, np.uint8)
    array = np.asarray(values)
    if array.shape != (count,) or array.dtype != np.bool_:
        raise ReplayError(f"{name} must be bool of shape ({count},); found {array.dtype} {array.shape}.")
    return array.astype(np.uint8)


def _saved_numbers(name: str, array: np.ndarray | None, size: int, streams: int) -> np.ndarray:
    """The saved numbers of each item `(size,)`, or of each stream `(1, streams)`, checked, as int64."""
    if array is None:
        raise ReplayError(f"The saved rows lack {_PREFIX + name!r}: they were saved without streams.")
    shape = (min(size, 1), streams) if name in _SAVED_STREAMS else (size,)
    dtype = np.dtype(np.uint8 if name == "ending" else np.int64)
    fits = array.ndim == len(shape) and array.shape[1:] == shape[1:] and len(array) >= shape[0]
    if not fits or array.dtype != dtype:
        raise ReplayError(f"The saved {_PREFIX + name!r} must be {dtype} {shape}; found {array.dtype} {array.shape}.")
    return np.ascontiguousarray(array[: shape[0]], np.int64)


def _check_range(name: str, values: np.ndarray, most: int) -> None:
    for position in np.flatnonzero((values < 0) | (values > most))[:1]:
        raise ReplayError(
            f"The saved {_PREFIX + name!r} must lie in [0, {most}]; found {values[position]} at position {position}."
        )


def matching_rows(
    spec: TransitionSpec, columns: Mapping[str, np.ndarray], count: int, *, exact: bool = False
) -> list[np.ndarray]:
    """Return the first `count` rows of each column in storage order; raises ReplayError for one that does not fit.

    With `exact`, columns must have exactly `count` rows, be contiguous and writeable: the caller fills them.
    """
    if len(columns) != len(spec.fields):
        unknown = sorted(set(columns) - {f.name for f in spec.fields})
        if unknown:
            raise unknown_column(spec, unknown[0])
    return [_matching(field, columns.get(field.name), count, exact) for field in spec.fields]


def _matching(field: FieldSpec, array: np.ndarray | None, count: int, exact: bool) -> np.ndarray:
    if array is None:
        raise ReplayError(f"Column {field.name!r} is missing.")
    if not hasattr(array, "ndim"):
        raise ReplayError(f"Column {field.name!r} must be an array; found {type(array).__name__}.")
    rows = len(array) if array.ndim else -1
    if array.shape[1:] != field.shape or array.dtype != field.dtype or rows < count or (exact and rows != count):
        more = "" if exact else " or more"
        raise ReplayError(
            f"Column {field.name!r} must be {field.dtype} of shape {(count, *field.shape)}{more} rows; "
            f"found {array.dtype} {array.shape}."
        )
    if exact and not (array.flags.c_contiguous and array.flags.writeable):
        raise ReplayError(f"Column {field.name!r} to gather into must be contiguous and writeable.")
    return array if rows == count else array[:count]
