"""Keeps torch's compiler from being loaded by optimizers that nobody compiles.

Methods of every torch optimizer are marked as not to be compiled, and load the compiler, `torch._dynamo`, to be marked
when they are first called. That takes about as long as loading torch itself, and 70 MB.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

_COMPILER = "torch._dynamo"
_MARKED = "__dynamo_disable"  # where torch keeps the marked form of a method; see torch/_compile.py
_METHODS = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")


def mark_optimizers_lazily() -> None:
    """From now on, methods of optimizers are marked when the compiler is there, which somebody else has loaded.

    Does nothing if it is there already, or if this version of torch marks them otherwise.
    """
    if _COMPILER in sys.modules:
        return
    for name in _METHODS:
        wrapper = getattr(torch.optim.Optimizer, name)
        method = getattr(wrapper, "__wrapped__", None)
        if method is not None and not hasattr(method, _MARKED):
            setattr(method, _MARKED, _unmarked(method, wrapper))


def _unmarked(method: Callable[..., Any], wrapper: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if _COMPILER not in sys.modules:
            return method(*args, **kwargs)
        if getattr(method, _MARKED, None) is call:
            delattr(method, _MARKED)
        return wrapper(*args, **kwargs)  # which marks it

    return call
