"""One flat tensor behind all parameters of a module.

A small network's optimizer step, target update and gradient clearing are bound by the count of tensors, not by their
sizes: with parameters and gradients as views of two flat tensors, each of these is one operation.
"""

from __future__ import annotations

import torch
from torch import nn

# Views start at multiples of 16 floats, so that each is aligned as a tensor of its own would be.
_ALIGNMENT = 16


class FlatParameters:
    """Re-home the float32 parameters of `module` as views of one flat tensor, and likewise their gradients.

    `parameter` `(size,)` is what an optimizer takes; `parameter.grad` is written by autograd through the views.
    The module's own parameters stay what they are to everybody else: names, shapes, `state_dict` are unchanged.
    """

    def __init__(self, module: nn.Module, *, gradients: bool = True) -> None:
        parameters = list(module.parameters())
        if not parameters:
            raise ValueError("The module has no parameters to flatten.")
        sizes = [-(-p.numel() // _ALIGNMENT) * _ALIGNMENT for p in parameters]
        device = parameters[0].device
        self.parameter = nn.Parameter(torch.zeros(sum(sizes), device=device), requires_grad=gradients)
        self._buffers = list(module.buffers())
        self.gradient = torch.zeros_like(self.parameter) if gradients else None
        if gradients:
            self.parameter.grad = self.gradient
        self._views: list[tuple[nn.Parameter, int]] = []
        offset = 0
        with torch.no_grad():
            for p, size in zip(parameters, sizes, strict=True):
                view = self.parameter.data[offset : offset + p.numel()].view_as(p)
                view.copy_(p)
                p.data = view
                self._views.append((p, offset))
                if self.gradient is not None:
                    p.grad = self.gradient[offset : offset + p.numel()].view_as(p)
                else:
                    p.requires_grad_(False)
                offset += size

    def move_to(self, memory: torch.Tensor) -> None:
        """Keep the values in `memory` `(size,)` float32 from now on, such as memory that a device sees too."""
        memory.copy_(self.parameter.data)
        self.parameter.data = memory
        for p, offset in self._views:
            p.data = memory[offset : offset + p.numel()].view_as(p)

    def zero_grad(self) -> None:
        """Clear the gradients, in place, so that they stay views."""
        if self.gradient is not None:
            self.gradient.zero_()

    def copy_from(self, other: FlatParameters) -> None:
        """Hard update: take all values of `other`, a module of the same structure."""
        self.parameter.data.copy_(other.parameter.data)
        self._copy_buffers(other)

    def move_toward(self, other: FlatParameters, tau: float) -> None:
        """Polyak update: `self += tau * (other - self)`."""
        self.parameter.data.lerp_(other.parameter.data, tau)
        self._copy_buffers(other)

    def _copy_buffers(self, other: FlatParameters) -> None:
        for mine, theirs in zip(self._buffers, other._buffers, strict=True):
            mine.copy_(theirs)
