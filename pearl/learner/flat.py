"""One flat tensor behind all parameters of a module.

For small networks, the time of an optimizer step, a target update or the clearing of gradients depends on the number of
tensors, not on their sizes. With parameters and gradients as views of two flat tensors, each of these is one operation.
"""

from __future__ import annotations

import functools
from collections.abc import Collection

from pearl.errors import TrainerError
from pearl.lazy_torch import nn, torch

# Views start at multiples of 16 floats, so that each is aligned as a tensor of its own would be.
_ALIGNMENT = 16


class FlatParameters:
    """Re-home the float32 parameters of `module` as views of one flat tensor, and likewise their gradients.

    Give `parameter` `(size,)` to an optimizer; autograd writes `parameter.grad` through the views. The module's own
    parameters keep their names, shapes and `state_dict`.
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
        self._gradients: list[tuple[nn.Parameter, torch.Tensor]] = []
        offset = 0
        with torch.no_grad():
            for p, size in zip(parameters, sizes, strict=True):
                view = self.parameter.data[offset : offset + p.numel()].view_as(p)
                view.copy_(p)
                p.data = view
                self._views.append((p, offset))
                if self.gradient is not None:
                    p.grad = gradient = self.gradient[offset : offset + p.numel()].view_as(p)
                    self._gradients.append((p, gradient))
                else:
                    p.requires_grad_(False)
                offset += size
        # The module's own entries: `load_state_dict(assign=True)` replaces the parameters there.
        offsets = {id(p): offset for p, offset in self._views}
        self._places = [
            (part._parameters, key, 4 * offsets[id(p)])
            for part in module.modules()
            for key, p in part._parameters.items()
            if p is not None
        ]
        self._expected = [offset for _, _, offset in self._places]

    def is_of(self, parameters: Collection[int]) -> bool:
        """Whether all parameters that it re-homed are among `parameters`, by their ids."""
        return all(id(p) in parameters for p, _ in self._views)

    def require_in_place(self, address: int | None = None) -> None:
        """Raise TrainerError unless the parameters are still views of the flat tensor (at `address`, if given).

        `module.double()`, `.to()` and `load_state_dict(assign=True)` give a module other memory: a Learner would then
        train weights that the module no longer uses. Costs about 0.3 us for each parameter.
        """
        at = self.parameter.data_ptr()
        try:
            offsets = [parameters[key].data_ptr() - at for parameters, key, _ in self._places]  # type: ignore[union-attr]
        except (AttributeError, KeyError):
            offsets = []
        if offsets == self._expected and address in (None, at):
            return
        moved = [k for parts, k, offset in self._places if (p := parts.get(k)) is None or p.data_ptr() != at + offset]
        raise TrainerError(
            f"{len(moved) or 'All'} of the {len(self._places)} parameters that are trained were given other memory "
            "after the Learner was made, as by module.double(), .to() or load_state_dict(assign=True): it would train "
            "weights that the module no longer uses. Change dtype, device and parameters before, or make trainer and "
            "Learner again; to copy values, call load_state_dict() without assign=True."
        )

    def move_to(self, memory: torch.Tensor) -> None:
        """Keep the values in `memory` `(size,)` float32 from now on, for example in memory shared with a device."""
        memory.copy_(self.parameter.data)
        self.take_memory(memory)

    def take_memory(self, memory: torch.Tensor) -> None:
        """Take the values in `memory` `(size,)` float32, and keep them there from now on."""
        self.parameter.data = memory
        for p, offset in self._views:
            p.data = memory[offset : offset + p.numel()].view_as(p)

    def serve(self, optimizer: torch.optim.Optimizer) -> None:
        """Let code of a trainer clear the gradients of an `optimizer` of `parameter` in any of torch's ways.

        `optimizer.zero_grad()` then keeps the gradients' memory, since without it later ones would not reach
        `parameter`; before a step, the optimizer gathers those that are elsewhere, as after `module.zero_grad()`.
        """
        clear = functools.partial(type(optimizer).zero_grad, optimizer)
        optimizer.zero_grad = lambda set_to_none=True: clear(set_to_none=False)  # type: ignore[method-assign]
        optimizer.register_step_pre_hook(self.before_step)

    def before_step(self, *_: object) -> None:
        """Called by an optimizer that it serves."""
        self.gather_gradients()

    def gather_gradients(self) -> None:
        """Take gradients that are in other memory into the flat tensor."""
        if self.parameter.grad is not self.gradient:
            self.parameter.grad = self.gradient
        for p, view in self._gradients:
            if p.grad is not view:
                if p.grad is None:
                    view.zero_()
                else:
                    view.copy_(p.grad)
                p.grad = view

    def clip_gradient(self, most: float) -> torch.Tensor:
        """Shorten the gradient to a norm of at most `most`; returns the norm that it had."""
        self.gather_gradients()
        return nn.utils.clip_grad_norm_([self.parameter], most)

    def zero_grad(self) -> None:
        """Clear the gradients in place, so that they stay views; TrainerError if parameters no longer are views."""
        self.require_in_place()
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
