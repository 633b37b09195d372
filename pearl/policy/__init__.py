"""Trained policies: loaded from the folder of a run, without the composer or a training session, and exported.

The names are loaded when they are asked for: `import pearl.policy` loads neither torch nor Gymnasium.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pearl.policy.export import export_policy
    from pearl.policy.loading import load_policy
    from pearl.policy.playing import Episode, evaluate_policy, watch_policy
    from pearl.policy.saved import SavedPolicy

__all__ = ["Episode", "SavedPolicy", "evaluate_policy", "export_policy", "load_policy", "watch_policy"]

_MODULE_OF = {
    "Episode": "pearl.policy.playing",
    "SavedPolicy": "pearl.policy.saved",
    "evaluate_policy": "pearl.policy.playing",
    "export_policy": "pearl.policy.export",
    "load_policy": "pearl.policy.loading",
    "watch_policy": "pearl.policy.playing",
}


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'pearl.policy' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
