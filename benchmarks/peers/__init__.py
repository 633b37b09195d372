"""Primitives of other libraries behind the same few methods: one module per library, loaded if it is installed."""

from __future__ import annotations

import contextlib
import importlib
import io
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from benchmarks.peers.training import first_line

MODULES = ("tianshou", "cpprb", "torchrl", "flashbax", "stable_baselines3", "reverb")  # replay buffers
ADVANTAGE_MODULES = ("stable_baselines3", "tianshou", "pufferlib", "pufferlib_loop", "torchrl", "rllib", "cleanrl")


@dataclass(frozen=True)
class Peer:
    """A library as benchmarked: `module` is None if the library cannot be loaded, and `reason` says why.

    A module has some of these functions:

    - `make_tree(priorities, alpha)`, a tree of priorities alone: `sample(batch)` draws random numbers and indices,
      `update(indices, priorities)` sets priorities `(n,)` and waits until that is done.
    - `make_replay(columns, priorities, alpha, beta, batch)` and `make_uniform(columns, batch)`, a replay buffer:
      `sample(batch)` draws indices, importance weights (if prioritised) and transitions, `insert(rows)` stores rows
      `(n, *shape)` at the largest priority so far, and `unpack(sample)` returns the observations `(n, obs)`, indices
      and weights of a sample (None if the library does not return them).
    - `make_advantages(rollout, gamma, gae_lambda)`, an estimator of a rollout, the arguments of
      `pearl.rollout.AdvantageEstimator.estimate` by name: calling it estimates all advantages and returns, from arrays
      in the library's own layout; `advantages()` returns the last ones `(horizon, envs)`.
    """

    name: str
    module: ModuleType | None
    reason: str = ""

    def make(self, kind: str, *arguments: Any) -> Any:
        """Make a "tree", "replay", "uniform" or "advantages"; raises NotImplementedError if the library has none."""
        maker = getattr(self.module, f"make_{kind}", None)
        if maker is None:
            raise NotImplementedError(getattr(self.module, "LACKS", {}).get(kind, f"has no {kind} by itself"))
        return maker(*arguments)


def load(module: str) -> Peer:
    """Import one peer; an exception becomes the reason."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # one peer prints advice
            loaded = importlib.import_module(f"benchmarks.peers.{module}")
    except Exception as error:  # loading a foreign extension may raise anything
        return Peer(module, None, f"cannot be loaded: {first_line(error)}")
    return Peer(f"{module} {loaded.VERSION}", loaded)
