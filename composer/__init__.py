"""Composes deep reinforcement learning systems: profile, matrix, placement, code.

The names are loaded when they are asked for: the process in which an Actor is profiled needs neither torch nor pandas.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from composer.composer import Composer
    from composer.matrix import AssignmentMatrix
    from composer.placement import LearnerConfig, Placement, ReplayConfig

__all__ = ["AssignmentMatrix", "Composer", "LearnerConfig", "Placement", "ReplayConfig"]

_MODULE_OF = {
    "AssignmentMatrix": "matrix",
    "Composer": "composer",
    "LearnerConfig": "placement",
    "Placement": "placement",
    "ReplayConfig": "placement",
}


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'composer' has no attribute {name!r}")
    return getattr(importlib.import_module(f"composer.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
