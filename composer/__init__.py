"""Composes deep reinforcement learning systems: profile, matrix, placement, code.

The names are loaded when they are asked for: the process in which an Actor is profiled needs neither torch nor pandas.
A generated program imports the user's script for its trainer class only: there, Composer is loaded when it is used.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from pearl.garbage import no_collection

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
    entry = sys.modules.get("pearl.runtime.entry")
    if name == "Composer" and entry is not None and entry.is_program():
        return _Deferred()
    with no_collection():
        return getattr(importlib.import_module(f"composer.{_MODULE_OF[name]}"), name)


class _Deferred:
    """Composer, imported when it is called, derived from or asked for anything."""

    def __call__(self, *arguments: Any, **settings: Any) -> Composer:
        return self._found(*arguments, **settings)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._found, name)

    def __mro_entries__(self, bases: tuple[object, ...]) -> tuple[type, ...]:
        return (self._found,)

    def __instancecheck__(self, value: object) -> bool:
        return isinstance(value, self._found)

    @property
    def _found(self) -> type[Composer]:
        from composer.composer import Composer

        return Composer


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
