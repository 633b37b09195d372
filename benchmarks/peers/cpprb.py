"""cpprb: binary trees in C++, buffers in Cython."""

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import cpprb
import numpy as np

VERSION = version("cpprb")


class _Tree:
    """Only updates work without the rest of the buffer."""

    def __init__(self, priorities: np.ndarray, alpha: float) -> None:
        self.buffer = cpprb.PrioritizedReplayBuffer(len(priorities), {"reward": {"dtype": np.float32}}, alpha=alpha)
        self.buffer.add(reward=np.zeros(len(priorities), np.float32), priorities=priorities)

    def update(self, indices: np.ndarray, priorities: np.ndarray) -> None:
        self.buffer.update_priorities(indices, priorities)


class _Replay:
    def __init__(self, buffer: Any) -> None:
        self.buffer = buffer

    def insert(self, rows: Mapping[str, np.ndarray]) -> object:
        return self.buffer.add(**rows)

    def sample(self, batch: int) -> Any:
        return self.buffer.sample(batch)

    def unpack(self, sample: Any) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None]:
        return sample["obs"], sample.get("indexes"), sample.get("weights")


class _Prioritized(_Replay):
    def __init__(self, buffer: Any, beta: float) -> None:
        super().__init__(buffer)
        self.beta = beta

    def sample(self, batch: int) -> Any:
        return self.buffer.sample(batch, self.beta)


make_tree = _Tree


def _fields(columns: Mapping[str, np.ndarray]) -> dict[str, dict[str, object]]:
    return {name: {"shape": column.shape[1:] or 1, "dtype": column.dtype} for name, column in columns.items()}


def make_replay(
    columns: Mapping[str, np.ndarray], priorities: np.ndarray, alpha: float, beta: float, batch: int
) -> _Prioritized:
    buffer = cpprb.PrioritizedReplayBuffer(len(priorities), _fields(columns), alpha=alpha, eps=0.0)
    buffer.add(**columns, priorities=priorities)
    return _Prioritized(buffer, beta)


def make_uniform(columns: Mapping[str, np.ndarray], batch: int) -> _Replay:
    buffer = cpprb.ReplayBuffer(len(columns["reward"]), _fields(columns))
    buffer.add(**columns)
    return _Replay(buffer)
