"""The Replay Manager (sum tree of priorities) and the Data Storage (the transitions themselves)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pearl.errors import ConfigurationError
from pearl.replay.protocol import ReplayManager, ReplayStatistics, Sample
from pearl.replay.requests import ReplayRequestQueue
from pearl.replay.storage import DataStorage
from pearl.spec import ReplaySpec

__all__ = [
    "REPLAY_BACKENDS",
    "DataStorage",
    "ReplayManager",
    "ReplayRequestQueue",
    "ReplayStatistics",
    "Sample",
    "make_replay_manager",
]

_DEFAULT_FANOUT = 16  # sixteen leaves are one cache line


def _options(spec: ReplaySpec) -> dict[str, Any]:
    names = ("mode", "alpha", "stratified", "replacement", "max_times_sampled", "initial_priority")
    return {name: getattr(spec, name) for name in names}


def _native(spec: ReplaySpec, seed: int, fanout: int, workers: int) -> ReplayManager:
    from pearl.replay.native import NativeReplayManager

    return NativeReplayManager(spec.capacity, fanout=fanout, seed=seed, workers=workers, **_options(spec))


def _reference(spec: ReplaySpec, seed: int, fanout: int, workers: int) -> ReplayManager:
    from pearl.replay.reference import ReferenceReplayManager

    return ReferenceReplayManager(spec.capacity, fanout=fanout, seed=seed, **_options(spec))


REPLAY_BACKENDS: dict[str, Callable[[ReplaySpec, int, int, int], ReplayManager]] = {
    "native": _native,
    "reference": _reference,
}


def make_replay_manager(spec: ReplaySpec, *, seed: int, backend: str = "native", workers: int = 1) -> ReplayManager:
    """Make the Replay Manager that `spec` describes, on one of `REPLAY_BACKENDS`, with `workers` for large batches.

    The same seed gives the same samples on every backend. Raises ConfigurationError for an unknown backend.
    """
    if backend not in REPLAY_BACKENDS:
        known = ", ".join(sorted(REPLAY_BACKENDS))
        raise ConfigurationError(f"Unknown backend {backend!r} of the Replay Manager; known: {known}.")
    fanout = _DEFAULT_FANOUT if spec.fanout == "auto" else spec.fanout
    return REPLAY_BACKENDS[backend](spec, seed, fanout, workers)
