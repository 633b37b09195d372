"""Keeps optimizers that are never compiled from loading torch's compiler.

torch marks the methods of every optimizer as not to be compiled. It does so at their first call and loads the compiler,
`torch._dynamo`, for it, which takes about as long as loading torch itself, and 70 MB.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from pearl.lazy_torch import torch

_COMPILER = "torch._dynamo"
_MARKED = "__dynamo_disable"  # where torch keeps the marked form of a method; see torch/_compile.py
_METHODS = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")


def mark_optimizers_lazily() -> None:
    """Let methods of optimizers be marked only after other code has loaded the compiler.

    Does nothing if the compiler is loaded already, or if this version of torch marks methods in another way.
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
