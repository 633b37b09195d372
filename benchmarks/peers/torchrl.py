"""TorchRL: binary tree in C++ (float32), storage in tensors; advantages by a convolution of tensors."""

from collections.abc import Mapping
from functools import partial
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torchrl._torchrl import SumSegmentTreeFp32, SumSegmentTreeFp64
from torchrl.data import LazyTensorStorage, TensorDictPrioritizedReplayBuffer, TensorDictReplayBuffer

VERSION = version("torchrl")


class _Tree:
    def __init__(self, priorities: np.ndarray, alpha: float, exact: bool = False) -> None:
        self.count = len(priorities)
        self.tree = (SumSegmentTreeFp64 if exact else SumSegmentTreeFp32)(self.count)
        self.tree[np.arange(self.count)] = (priorities.astype(np.float64) ** alpha).astype(
            np.float64 if exact else np.float32
        )

    def sample(self, batch: int) -> np.ndarray:
        # The lines of PrioritizedSampler.sample up to the indices.
        mass = np.random.uniform(0.0, self.tree.query(0, self.count), size=batch)  # noqa: NPY002
        return self.tree.scan_lower_bound(mass)

    def update(self, indices: np.ndarray, priorities: np.ndarray) -> None:
        self.tree[indices] = priorities

    def lookup(self, targets: np.ndarray) -> np.ndarray:
        return self.tree.scan_lower_bound(targets)


make_tree = _Tree


class _Replay:
    def __init__(self, buffer: Any, columns: Mapping[str, np.ndarray]) -> None:
        self.buffer = buffer
        self.buffer.extend(_transitions(columns))

    def sample(self, batch: int) -> Any:
        return self.buffer.sample(batch)

    def insert(self, rows: Mapping[str, np.ndarray]) -> object:
        return self.buffer.extend(_transitions(rows))

    def unpack(self, sample: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        weights = sample.get("priority_weight", None)
        return sample["obs"].numpy(), sample["index"].numpy(), None if weights is None else weights.numpy()


def _transitions(columns: Mapping[str, np.ndarray]) -> TensorDict:
    tensors = {name: torch.from_numpy(column) for name, column in columns.items()}
    return TensorDict(tensors, batch_size=[len(columns["reward"])])


def make_replay(
    columns: Mapping[str, np.ndarray], priorities: np.ndarray, alpha: float, beta: float, batch: int
) -> _Replay:
    rows = len(priorities)
    buffer = TensorDictPrioritizedReplayBuffer(alpha=alpha, beta=beta, storage=LazyTensorStorage(rows))
    replay = _Replay(buffer, columns)
    buffer.sampler.update_priority(torch.arange(rows), torch.from_numpy(priorities), storage=buffer.storage)
    return replay


def make_uniform(columns: Mapping[str, np.ndarray], batch: int) -> _Replay:
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(len(columns["reward"])))
    return _Replay(buffer, columns)


class _Advantages:
    """The vectorised form, which is the default of its class GAE."""

    def __init__(self, rollout: Mapping[str, np.ndarray], gamma: float, gae_lambda: float) -> None:
        from torchrl.objectives.value.functional import vec_generalized_advantage_estimate

        following = np.concatenate([rollout["values"][1:], rollout["last_values"][None]])
        values, next_values, rewards, ends = (
            torch.from_numpy(np.ascontiguousarray(array.T)[..., None])  # (envs, horizon, 1)
            for array in (rollout["values"], following, rollout["rewards"], rollout["ends"] != 0)
        )
        self.compute = partial(
            vec_generalized_advantage_estimate, gamma, gae_lambda, values, next_values, rewards, ends, ends
        )
        self()

    def __call__(self) -> None:
        self.found, self.targets = self.compute()

    def advantages(self) -> np.ndarray:
        return self.found[..., 0].numpy().T


make_advantages = _Advantages
