"""Callbacks: user code that runs at certain points of a run. All are called in the host's main thread.

A trainer class names its callbacks, `callbacks = (StopAtReturn(475.0),)`, or an edited program passes them to its
session. The names are loaded when they are asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pearl.callbacks.loggers import MLflowLogger, WandbLogger
    from pearl.callbacks.protocol import Callback, RunContext
    from pearl.callbacks.ready import KeepBest, RecordVideo, StopAtReturn, UserMetric

__all__ = [
    "Callback",
    "KeepBest",
    "MLflowLogger",
    "RecordVideo",
    "RunContext",
    "StopAtReturn",
    "UserMetric",
    "WandbLogger",
]

_MODULES = {
    "loggers": ("MLflowLogger", "WandbLogger"),
    "protocol": ("Callback", "RunContext"),
    "ready": ("KeepBest", "RecordVideo", "StopAtReturn", "UserMetric"),
}
_MODULE_OF = {name: f"pearl.callbacks.{module}" for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'pearl.callbacks' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
