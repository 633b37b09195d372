"""Puts optimizers into a form whose steps can be recorded in a CUDA graph."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from pearl.lazy_torch import torch


class CapturableOptimizers:
    """The optimizers of a trainer on `device`; outside `switched` they are as their owner made them.

    So checkpoints, schedules and Learners on other devices find numbers as learning rates and none of the flags. Only
    the counts of steps stay on the device, until `release`.
    """

    def __init__(self, optimizers: Mapping[str, torch.optim.Optimizer], device: torch.device) -> None:
        self._optimizers = optimizers
        self._device = device
        self._rates: dict[tuple[str, int], tuple[torch.Tensor, float]] = {}

    def departure(self) -> str | None:
        """One line if an optimizer has no such form."""
        for name, optimizer in self._optimizers.items():
            if not _can_be_fused(optimizer) and not all("capturable" in group for group in optimizer.param_groups):
                return f"optimizer {name!r} is a {type(optimizer).__name__}, which has no option `capturable`"
        return None

    def fill_rates(self) -> None:
        """Bring the learning rates to the device, where they have changed, for steps that were recorded."""
        for key, group in self._groups():
            rate = group["lr"]
            if isinstance(rate, torch.Tensor):
                continue
            tensor, filled = self._rates.get(key, (None, None))
            if tensor is None:
                tensor = torch.empty((), dtype=torch.float32, device=self._device)  # fused kernels read a float32
            if filled != rate:
                tensor.fill_(rate)
                self._rates[key] = tensor, rate

    @contextlib.contextmanager
    def switched(self) -> Iterator[None]:
        """Steps inside read the learning rate from the device, and leave counts of steps there."""
        self.fill_rates()
        kept: list[tuple[dict[str, Any], dict[str, Any]]] = []
        for (name, number), group in self._groups():
            form: dict[str, Any] = {"capturable": True} if "capturable" in group else {}
            if _can_be_fused(self._optimizers[name]) and not group["differentiable"]:
                form |= {"fused": True, "foreach": False}
            if (name, number) in self._rates and not isinstance(group["lr"], torch.Tensor):
                form["lr"] = self._rates[name, number][0]
            kept.append((group, {key: group[key] for key in form}))
            group.update(form)
        self._move_counts(self._device, self._optimizers)
        try:
            yield
        finally:
            for group, values in kept:
                group.update(values)

    def release(self) -> None:
        """Put the counts of steps back where optimizers that are not fused or capturable keep them."""
        plain = {
            name: optimizer
            for name, optimizer in self._optimizers.items()
            if not any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)
        }
        self._move_counts(torch.device("cpu"), plain)

    @staticmethod
    def _move_counts(device: torch.device, optimizers: Mapping[str, torch.optim.Optimizer]) -> None:
        for optimizer in optimizers.values():
            for state in optimizer.state.values():
                if isinstance(step := state.get("step"), torch.Tensor) and step.device != device:
                    state["step"] = step.to(device)

    def _groups(self) -> Iterator[tuple[tuple[str, int], dict[str, Any]]]:
        for name, optimizer in self._optimizers.items():
            for number, group in enumerate(optimizer.param_groups):
                yield (name, number), group


def _can_be_fused(optimizer: torch.optim.Optimizer) -> bool:
    kinds = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    return type(optimizer) in kinds and all(p.is_floating_point() for p in parameters)
