"""Keeps torch's compiler out of processes that compile nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

_MARK = "__dynamo_disable"  # where torch keeps a function as its compiler shall call it
_METHODS = ("add_param_group", "load_state_dict", "state_dict", "zero_grad")


def spare_compiler() -> None:
    """Have torch make optimizers without importing `torch._dynamo` for it, which takes a second and 100 MB.

    Torch imports it to tell the compiler that these methods are not to be compiled. Here that waits until there is a
    compiler. Optimizers of torch still import it in their first step. Changes nothing where torch does otherwise.
    """
    for name in _METHODS:
        method = getattr(getattr(torch.optim.Optimizer, name, None), "__wrapped__", None)
        if method is not None and not hasattr(method, _MARK):
            setattr(method, _MARK, _without_compiler(method))


def _without_compiler(method: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return method(*arguments, **options)
        disabled: Callable[..., Any] = torch._dynamo.disable(method, wrapping=False)  # type: ignore[no-untyped-call]
        setattr(method, _MARK, disabled)
        return disabled(*arguments, **options)

    return call
