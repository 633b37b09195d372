"""Flashbax: binary tree in float32 as a JAX program, compiled; its functions for CPUs."""

from importlib.metadata import version
from typing import Any

import jax
import numpy as np
from flashbax.buffers import sum_tree

VERSION = version("flashbax")
LACKS = dict.fromkeys(("replay", "uniform"), "measured by its tree alone")


class _Tree:
    def __init__(self, priorities: np.ndarray, alpha: float) -> None:
        count = len(priorities)
        self.state = jax.jit(sum_tree.set_batch_bincount)(
            sum_tree.init(count), np.arange(count), (priorities.astype(np.float64) ** alpha).astype(np.float32)
        )
        self.key = jax.random.key(0)
        self.draws: dict[int, Any] = {}
        self.set = jax.jit(sum_tree.set_batch_scan, donate_argnums=0)

    def sample(self, batch: int) -> Any:
        if batch not in self.draws:  # compiled by the first call, which is not timed

            def draw(state: Any, key: Any) -> Any:
                key, use = jax.random.split(key)
                return sum_tree.stratified_sample(state, batch, use), key

            self.draws[batch] = jax.jit(draw)
        indices, self.key = self.draws[batch](self.state, self.key)
        return indices.block_until_ready()

    def update(self, indices: np.ndarray, priorities: np.ndarray) -> None:
        self.state = self.set(self.state, indices, priorities)
        self.state.nodes.block_until_ready()


make_tree = _Tree
