"""Other replay buffers, each behind the same few methods: one module a library, loaded if it can be."""

from __future__ import annotations

import contextlib
import importlib
import io
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

import numpy as np

MODULES = ("tianshou", "cpprb", "torchrl", "flashbax", "stable_baselines3", "reverb")


class Tree(Protocol):
    """A tree of priorities alone."""

    def sample(self, batch: int) -> Any:
        """Draw `batch` indices by priority, random numbers included."""

    def update(self, indices: np.ndarray, priorities: np.ndarray) -> object:
        """Set priorities `(n,)`; waits until it is done."""


class Replay(Protocol):
    """A replay buffer with its transitions."""

    def sample(self, batch: int) -> Any:
        """Draw a batch: indices, importance weights (if prioritised) and the gathered transitions."""

    def insert(self, rows: Mapping[str, np.ndarray]) -> object:
        """Store rows `(n, *shape)`, at the largest priority so far."""

    def unpack(self, sample: Any) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None]:
        """Return observations `(n, obs)` of a sample, its indices and its weights, None where not given."""


@dataclass(frozen=True)
class Peer:
    """A library as benchmarked: `module` is None where `reason` says why.

    A module has `make_tree(priorities, alpha)`, `make_replay(columns, priorities, alpha, beta, batch)` and
    `make_uniform(columns, batch)`, or those of them that the library has.
    """

    name: str
    module: ModuleType | None
    reason: str = ""

    def make(self, kind: str, *arguments: Any) -> Any:
        """Make a "tree", "replay" or "uniform"; raises NotImplementedError if the library has none."""
        maker = getattr(self.module, f"make_{kind}", None)
        if maker is None:
            raise NotImplementedError(getattr(self.module, "LACKS", {}).get(kind, f"has no {kind} by itself"))
        return maker(*arguments)


def load(module: str) -> Peer:
    """Import one peer; whatever it raises becomes the reason."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # one of them prints advice
            loaded = importlib.import_module(f"benchmarks.peers.{module}")
    except Exception as error:  # a foreign extension may raise anything when it loads
        lines = str(error).strip().splitlines() or [""]
        return Peer(module, None, f"cannot be loaded: {type(error).__name__}: {lines[0][:160]}")
    return Peer(f"{module} {loaded.VERSION}", loaded)
