"""The Data Storage of a run: where the replay's settings put it, and which row follows which."""

from __future__ import annotations

import fcntl
import math
import tempfile
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from pearl.errors import ConfigurationError
from pearl.replay.arguments import as_indices
from pearl.replay.backing import BackingKind, reserve_disk
from pearl.replay.frames import FrameStorage, frames_nbytes
from pearl.replay.storage import DataStorage, matching_rows
from pearl.spec import DISCOUNT, NEXT_OBS, OBS, ActorSpec, ReplaySpec, TrainSpec, TransitionSpec

HostDataStorage: TypeAlias = DataStorage | FrameStorage

FILE_NAME = "replay.storage"

_CHUNK = 4096  # rows gathered at a time
_STREAM = "episode/stream"  # the name under which a Data Storage saves the stream of each row
# Saved for each chain, not each row: how to continue an episode whose rows are all overwritten.
PER_CHAIN = ("episode/resumed", "episode/awaited")


def make_storage(
    transition: TransitionSpec, replay: ReplaySpec, actors: ActorSpec, train: TrainSpec, run_dir: Path
) -> HostDataStorage:
    """Make the empty Data Storage that `replay` describes; a file lies in `run_dir`, in place of an earlier run's.

    Raises ConfigurationError if another run writes to that file, CapacityError if memory or disk do not suffice.
    """
    path = run_dir / FILE_NAME if replay.storage == "memmap" else None
    if path is not None:
        _remove_earlier(path)
    if replay.share_frames:
        return FrameStorage(transition, replay.capacity, streams=actors.env_count * train.n_step)
    if not replay.share_next_obs:
        return DataStorage(transition, replay.capacity, replay.storage, path)
    # With n-step returns, an environment's rows form n interleaved chains: a row's next observation is n steps later.
    chains = actors.env_count * train.n_step
    return ChainedStorage(transition, replay.capacity, replay.storage, path, chains=chains, gamma=train.gamma)


def stored_nbytes(transition: TransitionSpec, replay: ReplaySpec) -> int:
    """Bytes of one transition in the Data Storage; ConfigurationError for `share_frames` without stacks of frames."""
    if replay.share_frames:
        return frames_nbytes(transition)
    return transition.nbytes - sum(f.nbytes for f in transition.fields if f.name == NEXT_OBS and replay.share_next_obs)


def _remove_earlier(path: Path) -> None:
    """Remove an earlier run's file: checkpoints have its rows, and those of an interrupted run may be half written."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
    except FileNotFoundError:
        return
    except BlockingIOError as error:
        raise ConfigurationError(
            f"{path} is in use by another run. Stop that one, or choose another folder with --run-dir."
        ) from error


class ChainedStorage(DataStorage):
    """A Data Storage with `share_next_obs` whose rows come from `chains` chains at a time, in any order.

    A row continues the chain whose last next_obs equals its obs, whatever process or environment it comes from. So
    actors need not name their streams, may be restarted, and may collect n-step transitions. A row that continues no
    chain (an episode begins) replaces a chain that has ended, or else the chain that was idle for longest.
    """

    def __init__(
        self,
        spec: TransitionSpec,
        capacity: int,
        backing: BackingKind = "ram",
        path: Path | None = None,
        *,
        chains: int,
        gamma: float,
    ) -> None:
        # Twice the slots, so that truncated chains, which linger, never evict live ones.
        super().__init__(spec, capacity, backing, path, streams=2 * chains, share_next_obs=True)
        self._folder = None if path is None else path.parent
        nbytes = next(field.nbytes for field in spec.fields if field.name == OBS)
        self._word = np.dtype(next(f"u{size}" for size in (8, 4, 2, 1) if nbytes % size == 0))
        factors = np.random.default_rng(0).integers(0, 2**64, nbytes // self._word.itemsize, np.uint64)
        self._factors = factors | np.uint64(1)
        # With gamma 0 every discount is 0, and does not show which episodes terminated.
        self._ends_with_discount = gamma > 0
        self._begin_chains()

    def _begin_chains(self) -> None:
        self._awaited: dict[int, list[int]] = {}  # hash of an observation -> chains that it continues
        # Chains in the order of replacement, with the hash that each awaits. If two observations share a hash, the
        # storage sees that they differ, and begins an episode.
        self._chains: OrderedDict[int, int | None] = OrderedDict.fromkeys(range(self.streams))

    def insert(
        self,
        columns: Mapping[str, np.ndarray],
        count: int | None = None,
        *,
        streams: ArrayLike | None = None,
        terminated: ArrayLike | None = None,
        truncated: ArrayLike | None = None,
    ) -> np.ndarray:
        """Store rows as DataStorage does; where `streams` is not given, find them and `terminated`."""
        if streams is None:
            count = len(columns.get(OBS, ())) if count is None else count
            names = (field.name for field in self.spec.fields)
            rows = dict(zip(names, matching_rows(self.spec, columns, count), strict=True))
            ended = (rows[DISCOUNT] == 0) & self._ends_with_discount
            streams, terminated = self._find(rows[OBS], rows[NEXT_OBS], ended), ended
        return super().insert(columns, count, streams=streams, terminated=terminated, truncated=truncated)

    def _find(self, obs: np.ndarray, next_obs: np.ndarray, terminated: np.ndarray) -> np.ndarray:
        found = np.empty(len(obs), np.int64)
        keys = zip(self._hashes(obs), self._hashes(next_obs), terminated.tolist(), strict=True)
        for row, (key, next_key, ended) in enumerate(keys):
            continued = self._awaited.get(key)
            chain = continued[-1] if continued else next(iter(self._chains))
            self._forget(chain)
            found[row] = chain
            self._chains[chain] = None if ended else next_key
            self._chains.move_to_end(chain, last=not ended)
            if not ended:
                self._awaited.setdefault(next_key, []).append(chain)
        return found

    def _hashes(self, observations: np.ndarray) -> list[int]:
        """One number for each row `(rows, *shape)`: the sum of its words, each times a factor of its own."""
        flat = np.ascontiguousarray(observations).reshape(len(observations), math.prod(observations.shape[1:]))
        words = flat.view(self._word)
        hashes: list[int] = (words.astype(np.uint64, copy=False) @ self._factors).tolist()
        return hashes

    def _forget(self, chain: int) -> None:
        key = self._chains[chain]
        if key is None:
            return
        self._awaited[key].remove(chain)
        if not self._awaited[key]:
            del self._awaited[key]

    def gather_column(self, name: str, indices: ArrayLike) -> np.ndarray:
        """Copy the rows of one column out; next observations of a file, if many, into a file without a name.

        So a checkpoint of a replay larger than memory needs no more memory than the run.
        """
        slots = as_indices(indices)
        if name != NEXT_OBS or self._folder is None or len(slots) <= _CHUNK:
            return super().gather_column(name, slots)
        field = next(field for field in self.spec.fields if field.name == name)
        with tempfile.TemporaryFile(dir=self._folder) as file:
            reserve_disk(self._folder, file.fileno(), 0, len(slots) * field.nbytes)
            target = np.memmap(file, field.dtype, "w+", shape=(len(slots), *field.shape))
        for start in range(0, len(slots), _CHUNK):
            target[start : start + _CHUNK] = super().gather_column(name, slots[start : start + _CHUNK])
        return target

    def restore(self, columns: Mapping[str, np.ndarray], *, size: int, cursor: int, inserted: int) -> None:
        """Take over saved rows, also those of a run with another number of environments."""
        saved = dict(columns)
        if _STREAM in saved:
            saved[_STREAM] = saved[_STREAM] % self.streams
        for name in PER_CHAIN:  # of another number of chains: whose they were is not known
            if name in saved and saved[name].ndim == 2 and saved[name].shape[1] != self.streams:
                saved[name] = np.zeros((len(saved[name]), self.streams), np.int64)
        super().restore(saved, size=size, cursor=cursor, inserted=inserted)
        self._begin_chains()
