"""torch, imported when something of it is first used.

Its import takes a second, longer than everything else at the start of a program, and a program whose Learner and
policy are native may never need it. Modules of this package that a program imports get torch from here, so
`from pearl.lazy_torch import nn, torch` in place of `import torch`.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeGuard

if TYPE_CHECKING:
    import torch as torch
    from torch import nn as nn
    from torch.nn import functional as functional
else:

    class _Lazy:
        """A module that is imported when an attribute of it is first asked for."""

        def __init__(self, name: str) -> None:
            self._name = name
            self._module = None

        def __getattr__(self, attribute: str) -> Any:
            if self._module is None:
                self._module = importlib.import_module(self._name)
                _call_waiting()
            return getattr(self._module, attribute)

    torch, nn, functional = (_Lazy(name) for name in ("torch", "torch.nn", "torch.nn.functional"))

_waiting: list[Callable[[], None]] = []


def is_imported() -> bool:
    """Whether torch is imported: only then can there be a tensor or a module."""
    return "torch" in sys.modules


def is_tensor(value: object) -> TypeGuard[torch.Tensor]:
    """Whether `value` is a tensor; asking does not import torch."""
    return is_imported() and isinstance(value, torch.Tensor)


def when_imported(action: Callable[[], None]) -> None:
    """Call `action` once: now if torch is imported, else when torch is first used through this module."""
    _waiting.append(action)
    if is_imported():
        _call_waiting()


def _call_waiting() -> None:
    while _waiting:
        _waiting.pop(0)()
