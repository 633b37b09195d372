"""The Replay Manager (sum tree of priorities), the Data Storage (the transitions themselves), and related tools.

Most names are loaded at first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from pearl.replay.protocol import ReplayManager, ReplayStatistics, Sample

if TYPE_CHECKING:
    from pearl.backends.replay_managers import make_banked_replay_manager, make_replay_manager, replay_managers
    from pearl.replay.banked import BankedReplayManager
    from pearl.replay.rate_limiter import RateLimiter, RateLimiterStatistics
    from pearl.replay.requests import ReplayRequestQueue
    from pearl.replay.schedules import Constant, Linear, Schedule, ScheduledExponents
    from pearl.replay.sequences import FrameStacks, NStepReturns, Slices, gather_slices, gather_stacks, n_step_returns
    from pearl.replay.storage import DataStorage

__all__ = [
    "BankedReplayManager",
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
    "make_banked_replay_manager",
    "make_replay_manager",
    "n_step_returns",
    "replay_managers",
]

_MODULES = {
    "pearl.backends.replay_managers": ("make_banked_replay_manager", "make_replay_manager", "replay_managers"),
    "pearl.replay.banked": ("BankedReplayManager",),
    "pearl.replay.rate_limiter": ("RateLimiter", "RateLimiterStatistics"),
    "pearl.replay.requests": ("ReplayRequestQueue",),
    "pearl.replay.schedules": ("Constant", "Linear", "Schedule", "ScheduledExponents"),
    "pearl.replay.sequences": (
        "FrameStacks",
        "NStepReturns",
        "Slices",
        "gather_slices",
        "gather_stacks",
        "n_step_returns",
    ),
    "pearl.replay.storage": ("DataStorage",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'pearl.replay' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
