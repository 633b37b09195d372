"""The Replay Manager (sum tree of priorities), the Data Storage (the transitions themselves), and what goes with them.

Names beyond the first few are loaded when they are asked for.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pearl.errors import ConfigurationError
from pearl.replay.protocol import ReplayManager, ReplayStatistics, Sample
from pearl.spec import ReplaySpec

if TYPE_CHECKING:
    from pearl.replay.rate_limiter import RateLimiter, RateLimiterStatistics
    from pearl.replay.requests import ReplayRequestQueue
    from pearl.replay.schedules import Constant, Linear, Schedule, ScheduledExponents
    from pearl.replay.sequences import FrameStacks, NStepReturns, Slices, gather_slices, gather_stacks, n_step_returns
    from pearl.replay.storage import DataStorage

__all__ = [
    "REPLAY_BACKENDS",
    "Constant",
    "DataStorage",
    "FrameStacks",
    "Linear",
    "NStepReturns",
    "RateLimiter",
    "RateLimiterStatistics",
    "ReplayManager",
    "ReplayRequestQueue",
    "ReplayStatistics",
    "Sample",
    "Schedule",
    "ScheduledExponents",
    "Slices",
    "gather_slices",
    "gather_stacks",
    "make_replay_manager",
    "n_step_returns",
]

_MODULES = {
    "rate_limiter": ("RateLimiter", "RateLimiterStatistics"),
    "requests": ("ReplayRequestQueue",),
    "schedules": ("Constant", "Linear", "Schedule", "ScheduledExponents"),
    "sequences": ("FrameStacks", "NStepReturns", "Slices", "gather_slices", "gather_stacks", "n_step_returns"),
    "storage": ("DataStorage",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

_DEFAULT_FANOUT = 16  # sixteen leaves are one cache line


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'pearl.replay' has no attribute {name!r}")
    return getattr(importlib.import_module(f"pearl.replay.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _options(spec: ReplaySpec) -> dict[str, Any]:
    names = ("mode", "stratified", "replacement", "max_times_sampled", "initial_priority", "priority_epsilon")
    return {"alpha": spec.first_alpha, **{name: getattr(spec, name) for name in names}}


def _native(spec: ReplaySpec, seed: int, fanout: int, workers: int, device: str | None) -> ReplayManager:
    from pearl.replay.native import NativeReplayManager

    return NativeReplayManager(spec.capacity, fanout=fanout, seed=seed, workers=workers, **_options(spec))


def _reference(spec: ReplaySpec, seed: int, fanout: int, workers: int, device: str | None) -> ReplayManager:
    from pearl.replay.reference import ReferenceReplayManager

    return ReferenceReplayManager(spec.capacity, fanout=fanout, seed=seed, **_options(spec))


def _sycl(spec: ReplaySpec, seed: int, fanout: int, workers: int, device: str | None) -> ReplayManager:
    from pearl.replay.sycl import DEFAULT_DEVICE, SyclReplayManager

    return SyclReplayManager(spec.capacity, fanout=fanout, seed=seed, device=device or DEFAULT_DEVICE, **_options(spec))


def _fpga(spec: ReplaySpec, seed: int, fanout: int, workers: int, device: str | None) -> ReplayManager:
    from pearl.backends.sycl.selector import EMULATOR_SELECTOR
    from pearl.replay.fpga import FpgaReplayManager

    return FpgaReplayManager(
        spec.capacity, fanout=fanout, seed=seed, device=device or EMULATOR_SELECTOR, **_options(spec)
    )


_ON_DEVICES = ("sycl", "fpga")  # take the selector of one
REPLAY_BACKENDS: dict[str, Callable[[ReplaySpec, int, int, int, str | None], ReplayManager]] = {
    "native": _native,
    "reference": _reference,
    "sycl": _sycl,
    "fpga": _fpga,
}


def make_replay_manager(
    spec: ReplaySpec, *, seed: int, backend: str = "native", workers: int = 1, device: str | None = None
) -> ReplayManager:
    """Make the Replay Manager that `spec` describes, on one of `REPLAY_BACKENDS`.

    `workers` threads share large batches on the CPU; `device` is the selector of the SYCL device. The same seed gives
    the same samples on every backend. Where alpha is a schedule, the manager begins with its first value;
    `ScheduledExponents` keeps it up to date. Raises ConfigurationError for an unknown backend, and for what a backend
    lacks.
    """
    if backend not in REPLAY_BACKENDS:
        known = ", ".join(sorted(REPLAY_BACKENDS))
        raise ConfigurationError(f"Unknown backend {backend!r} of the Replay Manager; known: {known}.")
    if device is not None and backend not in _ON_DEVICES:
        raise ConfigurationError(
            f"The Replay Manager's backend {backend!r} runs on the CPU and takes no device; found {device!r}. "
            'Leave it out, or choose backend="sycl" (or "fpga").'
        )
    fanout = _DEFAULT_FANOUT if spec.fanout == "auto" else spec.fanout
    return REPLAY_BACKENDS[backend](spec, seed, fanout, workers, device)
