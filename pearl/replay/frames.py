"""A Data Storage of stacks of frames that keeps each frame once, however many stacks show it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
from numpy.typing import ArrayLike

from pearl.errors import CapacityError, ConfigurationError, ReplayError
from pearl.replay.arguments import as_indices
from pearl.replay.memory import check_fits
from pearl.replay.storage import DataStorage, count_rows, field_of, matching_rows
from pearl.spec import NEXT_OBS, OBS, OBSERVATION_STATISTICS, FieldSpec, ReplaySpec, TransitionSpec

FRAMES = "frames"  # the name under which the frames are saved; `obs` and `next_obs` are then their places
_PLACE = "int32"
_NOWHERE = np.empty(0, _PLACE)
_WORD_SIZES = (8, 4, 2, 1)
# An episode has one frame more than steps. This is room for episodes of two steps; unused room costs no memory, since
# the system commits it at the first write.
_ROOM = 1.5


def stack_of(spec: TransitionSpec) -> FieldSpec:
    """One frame of the observations, which are stacks `(k, *frame)`; ConfigurationError if they cannot be."""
    obs = field_of(spec, OBS)
    if len(obs.shape) < 2 or obs.shape[0] < 2:
        raise ConfigurationError(
            f"share_frames stores each frame of stacked observations (k, *frame) once; found observations of shape "
            f"{obs.shape}. Stack frames (gymnasium.wrappers.FrameStackObservation), or leave share_frames out."
        )
    return FieldSpec(FRAMES, obs.shape[1:], obs.dtype)


def check_shared(transition: TransitionSpec, replay: ReplaySpec) -> None:
    """Raise ConfigurationError for a storage that shares observations which `transition` changes or does not have.

    These are frames stored once while observations are normalised as they arrive, and anything shared with sequences.
    """
    if replay.shares and transition.sequence is not None:
        raise ConfigurationError(
            "share_next_obs and share_frames are for single transitions; this algorithm stores sequences, which hold "
            "each observation once already. Leave both out."
        )
    if replay.share_frames and transition.statistics and transition.statistics[0].name == OBSERVATION_STATISTICS:
        raise ConfigurationError(
            "share_frames=True needs stacks whose frames stay the same; normalize_observations=True changes them with "
            "the running statistics. Leave one of the two out."
        )


def frames_nbytes(spec: TransitionSpec) -> int:
    """Bytes of a transition whose frames are stored once: one frame, the places of all, and the other columns."""
    return _placed(spec).nbytes + stack_of(spec).nbytes + _FRAME_NBYTES


_FRAME_NBYTES = 168  # its entry of the index (two Python integers in a dict: 105 to 152), its hash and count


def _placed(spec: TransitionSpec) -> TransitionSpec:
    """The columns with places of frames in the place of frames."""
    fields = (
        FieldSpec(field.name, field.shape[:1], _PLACE) if field.name in (OBS, NEXT_OBS) else field
        for field in spec.fields
    )
    return TransitionSpec(tuple(fields))


class FrameStorage:
    """Ring of `capacity` transitions whose observations are stacks `(k, *frame)`: a DataStorage with `share_frames`.

    A frame is found again by its content, so rows may come in any order, of n steps, from any number of environments
    and restarted Actors; `streams` is how many rows come side by side. Gathered rows are the same to the bit. A frame
    is dropped with the last row that shows it. One thread inserts; another may gather at the same time, from slots
    other than those being inserted. `insert` raises CapacityError, and changes nothing, if the rows of a full storage
    show more than 1.5 frames each.
    """

    def __init__(self, spec: TransitionSpec, capacity: int, *, streams: int = 1) -> None:
        frame = stack_of(spec)
        check_fits(capacity, frames_nbytes(spec))
        self.spec, self._names = spec, tuple(field.name for field in spec.fields)
        self._rows = DataStorage(_placed(spec), capacity)
        self._stack = field_of(spec, OBS).shape[0]
        room = math.ceil(_ROOM * capacity) + 4 * self._stack * streams  # where episodes are cut by the ring
        self._frames = np.zeros((room, *frame.shape), frame.dtype)  # committed where it is written
        word = np.dtype(next(f"u{size}" for size in _WORD_SIZES if frame.nbytes % size == 0))
        self._words = self._frames.reshape(room, math.prod(frame.shape)).view(word)
        factors = np.random.default_rng(0).integers(0, 2**64, self._words.shape[1], np.uint64)
        self._factors = factors | np.uint64(1)
        self._clear()

    def _clear(self) -> None:
        room = len(self._frames)
        self._shown = np.zeros(room, np.int32)  # how many stacks show each frame
        self._hashes = np.zeros(room, np.uint64)
        self._found: dict[int, int] = {}  # hash -> place
        self._free: list[int] = []  # places that were in use, before those that never were
        self._used = 0

    @property
    def capacity(self) -> int:
        """Slots."""
        return self._rows.capacity

    @property
    def size(self) -> int:
        """Slots that hold a transition."""
        return self._rows.size

    @property
    def cursor(self) -> int:
        """The slot that the next transition takes."""
        return self._rows.cursor

    @property
    def inserted(self) -> int:
        """Transitions inserted since creation."""
        return self._rows.inserted

    @property
    def frames(self) -> int:
        """Frames stored."""
        return self._used - len(self._free)

    @property
    def nbytes(self) -> int:
        """Bytes in use: all columns, and the frames stored so far."""
        return self._rows.nbytes + self._used * (int(self._frames[0].nbytes) + _FRAME_NBYTES)

    @property
    def columns(self) -> Mapping[str, np.ndarray]:
        """Copies of what `restore` takes: `size` rows with places in the place of observations, and the frames."""
        saved = {name: column[: self.size] for name, column in self._rows.columns.items()}
        used = np.flatnonzero(self._shown)
        place = np.zeros(len(self._frames), np.int32)
        place[used] = np.arange(len(used))
        saved |= {name: place[saved[name]] for name in (OBS, NEXT_OBS)}
        saved[FRAMES] = self._frames[used]
        return MappingProxyType(saved)

    def next_indices(self, count: int) -> np.ndarray:
        """Return the slots `(count,)` int64 that the next insertion takes."""
        return self._rows.next_indices(count)

    def insert(self, columns: Mapping[str, np.ndarray], count: int | None = None) -> np.ndarray:
        """Store the first `count` rows (all, if None) of each column `(rows, *shape)`; return their slots.

        Raises ReplayError as DataStorage does.
        """
        if count is None:
            count = count_rows(columns)
        rows = dict(zip(self._names, matching_rows(self.spec, columns, count), strict=True))
        slots = self._rows.next_indices(count)
        if not count:
            return slots
        stacks = np.concatenate([rows[OBS], rows[NEXT_OBS]]).reshape(2 * count * self._stack, *self._frames.shape[1:])
        replaced = slots[slots < self.size]
        before = np.concatenate([self._rows.gather_column(name, replaced) for name in (OBS, NEXT_OBS)])
        np.subtract.at(self._shown, before, 1)
        try:
            places = self._places(stacks, np.unique(before)).reshape(2, count, self._stack)
        except (CapacityError, ReplayError):
            np.add.at(self._shown, before, 1)
            raise
        np.add.at(self._shown, places, 1)
        self._rows.insert({**rows, OBS: places[0], NEXT_OBS: places[1]}, count)
        return slots

    def _places(self, frames: np.ndarray, left: np.ndarray = _NOWHERE) -> np.ndarray:
        """The places of the frames `(n, *frame)`; new frames are stored first.

        Places in `left`, whose rows are being overwritten, are free for new frames if no other row shows them.
        """
        numbers = np.ascontiguousarray(frames).reshape(len(frames), math.prod(frames.shape[1:]))
        words = numbers.view(self._words.dtype)
        hashes = words.astype(np.uint64, copy=False) @ self._factors
        different, first, which = np.unique(hashes, return_index=True, return_inverse=True)
        if not np.array_equal(words, words[first][which]):  # two frames of one hash
            raise ReplayError("Two different frames have the same 64-bit hash: leave share_frames out.")
        found = [self._found.get(key, -1) for key in different.tolist()]
        new = sum(place < 0 for place in found)
        unshown = np.setdiff1d(left[self._shown[left] == 0], found)
        if new > len(self._free) + len(unshown) + len(self._frames) - self._used:
            raise CapacityError(
                f"The observations are no stacks that share their frames: {self.size:,} transitions show "
                f"{self.frames:,} frames, and {new:,} more do not fit. Leave share_frames out (share_next_obs may do)."
            )
        known = np.array(found)[which]
        if not np.array_equal(words[known >= 0], self._words[known[known >= 0]]):
            raise ReplayError("Two different frames have the same 64-bit hash: leave share_frames out.")
        self._release(unshown)
        for number, place in enumerate(found):
            if place < 0:
                if self._free:
                    place = self._free.pop()
                else:
                    place, self._used = self._used, self._used + 1
                found[number] = place
                self._words[place] = words[first[number]]
                key = int(different[number])
                self._found[key], self._hashes[place] = place, key
        return np.array(found, _PLACE)[which]

    def _release(self, places: np.ndarray) -> None:
        for key, place in zip(self._hashes[places].tolist(), places.tolist(), strict=True):
            del self._found[key]
            self._free.append(place)

    def gather(self, indices: ArrayLike, out: Mapping[str, np.ndarray] | None = None) -> dict[str, np.ndarray]:
        """Copy the rows at `indices` `(n,)` out, into the caller's arrays `(n, *shape)` if given.

        Raises ReplayError for a slot not yet written, or arrays that do not fit.
        """
        slots = as_indices(indices)
        if out is None:
            targets = self.spec.empty(len(slots))
        else:
            rows = matching_rows(self.spec, out, len(slots), exact=True)
            targets = dict(zip(self._names, rows, strict=True))
        places = {name: np.empty((len(slots), self._stack), _PLACE) for name in (OBS, NEXT_OBS)}
        self._rows.gather(slots, {**targets, **places})
        for name, stacks in places.items():
            # Without a mode, take would fill a buffer first. Places are valid.
            np.take(self._frames, stacks, axis=0, out=targets[name], mode="clip")
        return targets

    def gather_column(self, name: str, indices: ArrayLike) -> np.ndarray:
        """Copy the rows of one column at `indices` `(n,)` out."""
        found = self._rows.gather_column(name, indices)
        return self._frames[found] if name in (OBS, NEXT_OBS) else found

    def stored_column(self, name: str) -> np.ndarray | None:
        """The column itself, for reading only; None if it is unknown or not stored as a column."""
        return None if name in (OBS, NEXT_OBS) else self._rows.stored_column(name)

    def restore(self, columns: Mapping[str, np.ndarray], *, size: int, cursor: int, inserted: int) -> None:
        """Replace all rows by the first `size` saved rows; raises ReplayError if they do not fit."""
        saved = dict(columns)
        frames = saved.pop(FRAMES, None)
        if frames is None or frames.shape[1:] != self._frames.shape[1:] or frames.dtype != self._frames.dtype:
            raise ReplayError(
                f"{FRAMES!r} must hold frames of shape {self._frames.shape[1:]} and dtype {self._frames.dtype}; found "
                + ("none." if frames is None else f"{frames.dtype} {frames.shape[1:]}.")
            )
        if len(frames) > len(self._frames):
            raise ReplayError(f"{len(frames)} frames do not fit a storage of {self.capacity} transitions.")
        for name in (OBS, NEXT_OBS):
            places = saved.get(name)
            if places is not None and places.size and not 0 <= int(places.min()) <= int(places.max()) < len(frames):
                raise ReplayError(f"{name!r} must hold places of {len(frames)} frames; found one outside of them.")
        self._rows.restore(saved, size=size, cursor=cursor, inserted=inserted)
        self._clear()
        if len(frames):
            moved = self._places(np.ascontiguousarray(frames))
            stored = self._rows.stored_column
            for name in (OBS, NEXT_OBS):
                column = stored(name)
                assert column is not None
                column[:size] = moved[column[:size]]
                np.add.at(self._shown, column[:size], 1)
            stored_at = np.unique(moved)
            self._release(stored_at[self._shown[stored_at] == 0])

    def close(self) -> None:
        """Free the memory."""
        self._rows.close()
        self._frames = self._words = np.zeros((0, *self._frames.shape[1:]), self._frames.dtype)
