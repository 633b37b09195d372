"""Replay Managers of all backends, by the name of their implementation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pearl.backends import backends
from pearl.backends.protocol import ReplayImplementation
from pearl.errors import ConfigurationError
from pearl.replay.protocol import ReplayManager
from pearl.spec import ReplaySpec

_DEFAULT_FANOUT = 16  # sixteen leaves are one cache line
_OPTIONS = ("mode", "stratified", "replacement", "max_times_sampled", "initial_priority", "priority_epsilon")


def replay_managers() -> Mapping[str, ReplayImplementation]:
    """Every implementation of the Replay Manager, by its name."""
    return {name: found for backend in backends() for name, found in backend.replay_managers.items()}


def make_replay_manager(
    spec: ReplaySpec, *, seed: int, backend: str = "native", workers: int = 1, device: str | None = None
) -> ReplayManager:
    """Make the Replay Manager that `spec` describes; `backend` is the name of one of `replay_managers()`.

    `workers` threads share large batches on the CPU; `device` is the selector of the device. The same seed gives the
    same samples on every backend. If alpha is a schedule, the manager begins with its first value;
    `ScheduledExponents` keeps it up to date. Raises ConfigurationError for an unknown backend, and for options that the
    backend does not have.
    """
    known = replay_managers()
    if backend not in known:
        raise ConfigurationError(
            f"Unknown backend {backend!r} of the Replay Manager; known: {', '.join(sorted(known))}."
        )
    chosen = known[backend]
    if device is not None and "device" not in chosen.arguments:
        others = [f'backend="{name}"' for name, other in known.items() if "device" in other.arguments]
        raise ConfigurationError(
            f"The Replay Manager's backend {backend!r} runs on the CPU and takes no device; found {device!r}. "
            f"Leave it out, or choose {' or '.join(others)}."
        )
    given: dict[str, Any] = {"workers": workers} if "workers" in chosen.arguments else {}
    if device is not None:
        given["device"] = device
    fanout = _DEFAULT_FANOUT if spec.fanout == "auto" else spec.fanout
    options = {name: getattr(spec, name) for name in _OPTIONS}
    replay: ReplayManager = chosen.load()(
        spec.capacity, fanout=fanout, seed=seed, alpha=spec.first_alpha, **options, **given
    )
    return replay
