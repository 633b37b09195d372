"""A native step of a torch optimizer, with the settings and on the state that torch keeps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from pearl import _native
from pearl.algorithms.arrays import ArrayAdam
from pearl.algorithms.update_rule import AnyNumber, AnyParameters
from pearl.lazy_torch import torch
from pearl.learner.flat import FlatParameters
from pearl.learner.native_plan import UnsupportedError

if TYPE_CHECKING:
    from pearl.backends.on_device.learner import OptimizerOnDevice

_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


class NativeOptimizer:
    """Adam, AdamW or SGD over one flat `parameter`; UnsupportedError for any other optimizer or option.

    torch's state tensors are made as torch would make them and then updated in place, so that torch may make the next
    step. `home` moves them to memory that the device sees; by default they stay where torch makes them. `kernel` makes
    the steps, by default on the CPU.
    """

    def __init__(
        self,
        name: str,
        optimizer: object,
        parameter: AnyParameters | AnyNumber,
        *,
        kernel: OptimizerOnDevice | None = None,
        home: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        self.native = _native.Optimizer()
        self._kernel = self.native if kernel is None else kernel
        self._home = home
        self._seen: tuple[Any, ...] = ()
        self._arrays = optimizer if isinstance(optimizer, ArrayAdam) else None
        if self._arrays is not None:
            return
        parameter = parameter.parameter if isinstance(parameter, FlatParameters) else parameter
        assert isinstance(parameter, torch.Tensor)
        kind, adams = type(optimizer), (torch.optim.Adam, torch.optim.AdamW)
        if kind not in (*adams, torch.optim.SGD):
            raise UnsupportedError(f"optimizer {name!r} of class {kind.__name__}")
        assert isinstance(optimizer, torch.optim.Optimizer)
        groups = optimizer.param_groups
        if len(groups) != 1 or len(groups[0]["params"]) != 1 or groups[0]["params"][0] is not parameter:
            raise UnsupportedError(f"optimizer {name!r} does not step the flat parameters alone")
        for option in ("maximize", "differentiable"):
            if groups[0].get(option):
                raise UnsupportedError(f"option {option!r} of optimizer {name!r}")
        if any(_is_users(hook) for hooks in _HOOKS for hook in getattr(optimizer, hooks, {}).values()):
            raise UnsupportedError(f"optimizer {name!r} has hooks")
        self._optimizer = optimizer
        self._parameter = parameter
        self._adam = kind in adams

    def refresh(self) -> None:
        """Read settings and state, which schedules change and checkpoints replace; called before each step."""
        if self._arrays is not None:
            self._refresh_arrays(self._arrays)
            return
        group = self._optimizer.param_groups[0]
        state = self._optimizer.state[self._parameter]
        if self._adam:
            self._refresh_adam(group, state)
        else:
            self._refresh_sgd(group, state)

    def _refresh_arrays(self, adam: ArrayAdam) -> None:
        settings, state = _adam_settings(adam.settings), adam.present_state()
        averages, average_squares, step = (state[name].reshape(-1) for name in ("exp_avg", "exp_avg_sq", "step"))
        seen = (settings, *(array.ctypes.data for array in (averages, average_squares, step)))
        if self._seen == seen:
            return
        self._kernel.set_adam(*settings, False, averages, average_squares, None, step)
        self._seen = seen

    def _refresh_adam(self, group: dict[str, Any], state: dict[str, torch.Tensor]) -> None:
        averages = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            for name in averages if group["amsgrad"] else averages[:2]:
                state[name] = torch.zeros_like(self._parameter.data)
        self._bring_home(state, averages)
        largest = state["max_exp_avg_sq"] if group["amsgrad"] else None
        settings = _adam_settings(group)
        decoupled = bool(group.get("decoupled_weight_decay", isinstance(self._optimizer, torch.optim.AdamW)))
        # Tensors are compared by address, which is not reused while the native side holds the memory.
        kept = (state["step"], state["exp_avg"], state["exp_avg_sq"], largest)
        tensors = tuple(0 if tensor is None else tensor.data_ptr() for tensor in kept)
        if self._seen == (settings, decoupled, tensors):
            return
        self._kernel.set_adam(
            *settings,
            decoupled,
            _memory(state["exp_avg"]),
            _memory(state["exp_avg_sq"]),
            None if largest is None else _memory(largest),
            _memory(state["step"]),
        )
        self._seen = (settings, decoupled, tensors)

    def _bring_home(self, state: dict[str, Any], names: tuple[str, ...]) -> None:
        """Move the tensors that torch or a checkpoint has made."""
        if self._home is not None:
            for name in names:
                if state.get(name) is not None:
                    state[name] = self._home(state[name])

    def _refresh_sgd(self, group: dict[str, Any], state: dict[str, Any]) -> None:
        momentum = group["momentum"]
        first = momentum != 0 and state.get("momentum_buffer") is None
        if first:
            state["momentum_buffer"] = torch.zeros_like(self._parameter.data)
        self._bring_home(state, ("momentum_buffer",))
        buffer = state["momentum_buffer"] if momentum != 0 else None
        settings = (float(group["lr"]), float(momentum), float(group["dampening"]), float(group["weight_decay"]))
        seen = (settings, group["nesterov"], 0 if buffer is None else buffer.data_ptr())
        if self._seen == seen:
            return
        self._kernel.set_sgd(
            self._parameter.numel(),
            *settings,
            bool(group["nesterov"]),
            None if buffer is None else _memory(buffer),
            first,
        )
        self._seen = seen


def _is_users(hook: object) -> bool:
    return getattr(hook, "__func__", None) is not FlatParameters.before_step


def _adam_settings(group: Mapping[str, Any]) -> tuple[float, float, float, float, float]:
    lr, (beta1, beta2), eps, decay = (group[key] for key in ("lr", "betas", "eps", "weight_decay"))
    return float(lr), float(beta1), float(beta2), float(eps), float(decay)


def _memory(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().numpy().reshape(-1)
