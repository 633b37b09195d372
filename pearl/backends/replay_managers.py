"""Replay Managers of all backends, by the name of their implementation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from pearl.backends import backends
from pearl.backends.protocol import ReplayImplementation
from pearl.errors import ConfigurationError
from pearl.replay.banked import MODES, BankedReplayManager, Spread, bank_capacity
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
    if workers != 1 and not given:
        raise ConfigurationError(
            f"The Replay Manager's backend {backend!r} shares no batches between threads: workers must be 1; found "
            f'{workers!r}. Leave it out, or choose backend="native".'
        )
    if device is not None:
        given["device"] = device
    fanout = _DEFAULT_FANOUT if spec.fanout == "auto" else spec.fanout
    options = {name: getattr(spec, name) for name in _OPTIONS}
    replay: ReplayManager = chosen.load()(
        spec.capacity, fanout=fanout, seed=seed, alpha=spec.first_alpha, **options, **given
    )
    return replay


def bank_spec(spec: ReplaySpec, banks: int) -> ReplaySpec:
    """The spec of one of `banks` equal banks of the replay that `spec` describes.

    Raises ConfigurationError for options that banks do not have, and ReplayError if the banks do not divide its slots.
    """
    if spec.mode not in MODES:
        raise ConfigurationError(
            f"Banks draw at random: mode must be {' or '.join(map(repr, MODES))}; found {spec.mode!r}, which takes "
            "items in the order of the whole replay. Use one bank."
        )
    for name, expected in (("replacement", True), ("max_times_sampled", 0)):
        if (found := getattr(spec, name)) != expected:
            raise ConfigurationError(
                f"Banks draw with replacement and without a limit, since only then is the probability of a row known: "
                f"{name} must be {expected}; found {found}. Change it, or use one bank."
            )
    return replace(spec, capacity=bank_capacity(spec.capacity, banks))


def bank_seed(seed: int, bank: int) -> int:
    """The seed of one bank's draws, so that banks draw independently of each other."""
    return int(np.random.SeedSequence((seed % 2**64, bank)).generate_state(1, np.uint64)[0])


def make_banked_replay_manager(
    spec: ReplaySpec,
    banks: int,
    *,
    seed: int,
    spread: Spread = "round_robin",
    backend: str = "native",
    workers: int = 1,
    device: str | None = None,
) -> BankedReplayManager:
    """Make the replay of `spec` in `banks` equal banks; the other arguments are those of `make_replay_manager`.

    Raises as `make_replay_manager` and `bank_spec`.
    """
    each = bank_spec(spec, banks)
    return BankedReplayManager(
        [
            make_replay_manager(each, seed=bank_seed(seed, bank), backend=backend, workers=workers, device=device)
            for bank in range(banks)
        ],
        spread=spread,
    )
