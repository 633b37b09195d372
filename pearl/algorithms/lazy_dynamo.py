"""Keeps optimizers that are never compiled from loading torch's compiler.

torch marks the methods of every optimizer as not to be compiled, and ends what is compiled where an optimizer steps. It
does so at the first call and loads the compiler, `torch._dynamo`, for it, which takes about as long as loading torch
itself, and 70 MB.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

from pearl.lazy_torch import torch

_COMPILER = "torch._dynamo"
_MARKED = "__dynamo_disable"  # where torch keeps the marked form of a method; see torch/_compile.py
_METHODS = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")
_BREAKING = "_use_grad"  # the function around `step` that loads the compiler; see torch/optim/optimizer.py


def mark_optimizers_lazily() -> None:
    """Let optimizers use the compiler only after other code has loaded it.

    Does nothing if the compiler is loaded already, or if this version of torch marks them in another way. Optimizer
    classes with existing instances stay as they are.
    """
    if _COMPILER in sys.modules:
        return
    for name in _METHODS:
        wrapper = getattr(torch.optim.Optimizer, name)
        method = getattr(wrapper, "__wrapped__", None)
        if method is not None and not hasattr(method, _MARKED):
            setattr(method, _MARKED, _unmarked(method, wrapper))
    for optimizer in _subclasses(torch.optim.Optimizer):
        wrapper = vars(optimizer).get("step")
        code = getattr(wrapper, "__code__", None)
        if code is not None and code.co_name == _BREAKING and hasattr(wrapper, "__wrapped__"):
            optimizer.step = _unbroken(wrapper.__wrapped__, wrapper)


def _subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    for below in kind.__subclasses__():
        yield below
        yield from _subclasses(below)


def _unmarked(method: Callable[..., Any], wrapper: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if _COMPILER not in sys.modules:
            return method(*args, **kwargs)
        if getattr(method, _MARKED, None) is call:
            delattr(method, _MARKED)
        return wrapper(*args, **kwargs)  # which marks it

    return call


def _unbroken(method: Callable[..., Any], wrapper: Callable[..., Any]) -> Callable[..., Any]:
    """`step` as torch's `wrapper` calls it; without the compiler there is nothing to break."""

    @functools.wraps(method)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _COMPILER in sys.modules:
            return wrapper(self, *args, **kwargs)
        with torch.set_grad_enabled(self.defaults["differentiable"]):
            return method(self, *args, **kwargs)

    return step
