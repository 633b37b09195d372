"""Tianshou: binary tree in float64, loops over levels compiled by numba; so are advantages."""

from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import version
from typing import Any

import numpy as np
from tianshou.data import (
    Batch,
    PrioritizedReplayBuffer,
    PrioritizedVectorReplayBuffer,
    ReplayBuffer,
    SegmentTree,
    VectorReplayBuffer,
)

VERSION = version("tianshou")


class _Tree:
    def __init__(self, priorities: np.ndarray, alpha: float) -> None:
        self.tree = SegmentTree(len(priorities))
        self.tree[np.arange(len(priorities))] = priorities.astype(np.float64) ** alpha

    def sample(self, batch: int) -> np.ndarray:
        # The two lines of PrioritizedReplayBuffer.sample_indices.
        scalar = np.random.rand(batch) * self.tree.reduce()  # noqa: NPY002
        return self.tree.get_prefix_sum_idx(scalar)

    def update(self, indices: np.ndarray, priorities: np.ndarray) -> None:
        self.tree[indices] = priorities

    def lookup(self, targets: np.ndarray) -> np.ndarray:
        return self.tree.get_prefix_sum_idx(targets)


make_tree = _Tree


class _Replay:
    def __init__(
        self, columns: Mapping[str, np.ndarray], priorities: np.ndarray | None, alpha: float = 0.0, beta: float = 0.0
    ) -> None:
        self.capacity = len(columns["reward"])
        self.buffer: Any = ReplayBuffer(self.capacity)
        self.make_segments: Any = VectorReplayBuffer
        if priorities is not None:
            self.buffer = PrioritizedReplayBuffer(self.capacity, alpha=alpha, beta=beta)
            self.buffer.update_weight(np.arange(self.capacity), priorities)
            self.make_segments = partial(PrioritizedVectorReplayBuffer, alpha=alpha, beta=beta)
        self.buffer.set_batch(_transitions(columns))
        self.buffer._size = self.capacity
        self.segments: Any = None

    def sample(self, batch: int) -> Any:
        return self.buffer.sample(batch)

    def insert(self, rows: Mapping[str, np.ndarray]) -> object:
        count = len(rows["reward"])
        if self.segments is None or self.segments.buffer_num != count:  # made by the first call, which is not timed
            self.segments = self.make_segments(self.capacity, count)
        return self.segments.add(_transitions(rows))

    def inserted(self) -> np.ndarray:
        return self.segments.obs[self.segments.sample_indices(0)]

    def unpack(self, sample: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        batch, indices = sample
        return batch.obs, indices, batch.get("weight")


def _transitions(columns: Mapping[str, np.ndarray]) -> Batch:
    terminated = columns["discount"] == 0
    truncated = np.zeros_like(terminated)
    return Batch(
        obs=columns["obs"],
        act=columns["action"],
        rew=columns["reward"],
        terminated=terminated,
        truncated=truncated,
        done=terminated,
        obs_next=columns["next_obs"],
        info=Batch(),
    )


def make_replay(
    columns: Mapping[str, np.ndarray], priorities: np.ndarray, alpha: float, beta: float, batch: int
) -> _Replay:
    return _Replay(columns, priorities, alpha, beta)


def make_uniform(columns: Mapping[str, np.ndarray], batch: int) -> _Replay:
    return _Replay(columns, None)


class _Advantages:
    """The function compiled by numba, on one chain of all environments, without what makes the chain."""

    def __init__(self, rollout: Mapping[str, np.ndarray], gamma: float, gae_lambda: float) -> None:
        self.shape = rollout["rewards"].shape
        following = np.concatenate([rollout["values"][1:], rollout["last_values"][None]])
        ends = rollout["ends"] != 0
        following[ends] = 0.0
        ends[-1] = True  # the next environment follows in the chain
        chains = [array.T.ravel() for array in (rollout["values"], following, rollout["rewards"], ends)]
        self.compute = partial(_compiled_estimate(), *chains, gamma, gae_lambda)
        self.found = self.compute()

    def __call__(self) -> None:
        self.found = self.compute()

    def advantages(self) -> np.ndarray:
        return self.found.reshape(self.shape[::-1]).T


def _compiled_estimate() -> Callable[..., np.ndarray]:
    from tianshou.algorithm import algorithm_base

    found: Callable[..., np.ndarray] = algorithm_base._gae
    return found


make_advantages = _Advantages
