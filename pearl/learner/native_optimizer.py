"""A torch optimizer stepped natively: its settings are read, and its state is kept, where torch has them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from pearl import _native
from pearl.learner.native_plan import UnsupportedError

_ADAMS: tuple[type, ...] = (torch.optim.Adam, torch.optim.AdamW)
_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


class NativeOptimizer:
    """Adam, AdamW or SGD over one flat `parameter`; UnsupportedError for any other optimizer or option.

    torch's state tensors are made as torch would make them and then moved in place, so that torch may step next.
    """

    def __init__(self, name: str, optimizer: object, parameter: torch.Tensor) -> None:
        kind = type(optimizer)
        if kind not in (*_ADAMS, torch.optim.SGD):
            raise UnsupportedError(f"optimizer {name!r} of class {kind.__name__}")
        assert isinstance(optimizer, torch.optim.Optimizer)
        groups = optimizer.param_groups
        if len(groups) != 1 or len(groups[0]["params"]) != 1 or groups[0]["params"][0] is not parameter:
            raise UnsupportedError(f"optimizer {name!r} does not step the flat parameters alone")
        for option in ("maximize", "differentiable"):
            if groups[0].get(option):
                raise UnsupportedError(f"option {option!r} of optimizer {name!r}")
        if any(getattr(optimizer, hooks, None) for hooks in _HOOKS):
            raise UnsupportedError(f"optimizer {name!r} has hooks")
        self.native = _native.Optimizer()
        self._optimizer = optimizer
        self._parameter = parameter
        self._adam = kind in _ADAMS
        self._seen: tuple[Any, ...] = ()

    def refresh(self) -> None:
        """Take over settings and state, which schedules change and checkpoints replace; called before each step."""
        group = self._optimizer.param_groups[0]
        state = self._optimizer.state[self._parameter]
        if self._adam:
            self._refresh_adam(group, state)
        else:
            self._refresh_sgd(group, state)

    def _refresh_adam(self, group: dict[str, Any], state: dict[str, torch.Tensor]) -> None:
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(self._parameter.data)
            state["exp_avg_sq"] = torch.zeros_like(self._parameter.data)
            if group["amsgrad"]:
                state["max_exp_avg_sq"] = torch.zeros_like(self._parameter.data)
        largest = state["max_exp_avg_sq"] if group["amsgrad"] else None
        lr, (beta1, beta2), eps, decay = (group[key] for key in ("lr", "betas", "eps", "weight_decay"))
        settings = (float(lr), float(beta1), float(beta2), float(eps), float(decay))
        decoupled = bool(group.get("decoupled_weight_decay", isinstance(self._optimizer, torch.optim.AdamW)))
        # By address, which is not reused while the native side holds the memory.
        kept = (state["step"], state["exp_avg"], state["exp_avg_sq"], largest)
        tensors = tuple(0 if tensor is None else tensor.data_ptr() for tensor in kept)
        if self._seen == (settings, decoupled, tensors):
            return
        self.native.set_adam(
            *settings,
            decoupled,
            _memory(state["exp_avg"]),
            _memory(state["exp_avg_sq"]),
            None if largest is None else _memory(largest),
            _memory(state["step"]),
        )
        self._seen = (settings, decoupled, tensors)

    def _refresh_sgd(self, group: dict[str, Any], state: dict[str, Any]) -> None:
        momentum = group["momentum"]
        first = momentum != 0 and state.get("momentum_buffer") is None
        if first:
            state["momentum_buffer"] = torch.zeros_like(self._parameter.data)
        buffer = state["momentum_buffer"] if momentum != 0 else None
        settings = (float(group["lr"]), float(momentum), float(group["dampening"]), float(group["weight_decay"]))
        seen = (settings, group["nesterov"], 0 if buffer is None else buffer.data_ptr())
        if self._seen == seen:
            return
        self.native.set_sgd(
            self._parameter.numel(),
            *settings,
            bool(group["nesterov"]),
            None if buffer is None else _memory(buffer),
            first,
        )
        self._seen = seen


def _memory(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().numpy().reshape(-1)
