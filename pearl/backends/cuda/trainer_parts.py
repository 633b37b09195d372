"""The parts of a trainer in torch, and the Python values and memory that are baked into a recording of its steps."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from pearl.algorithms.trainer import Trainer, settings_of
from pearl.lazy_torch import nn, torch

AN_OPTIMIZER = "an optimizer"  # among the names of changed values
_PLAIN = (bool, int, float, str, type(None))


class TrainerParts:
    """The modules, optimizers and learned tensors of a trainer, also those in its lists, tuples and dictionaries.

    `learned` are the leaves that gradients are computed for; `single` are those of them in no module.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer.in_torch()
        self.modules: dict[str, nn.Module] = {}
        self.optimizers: dict[str, torch.optim.Optimizer] = {}
        self.single: list[torch.Tensor] = []
        leaves: list[torch.Tensor] = []
        for name, value in _held(vars(trainer)):
            if isinstance(value, nn.Module):
                self.modules |= {f"{name}.{path}".rstrip("."): module for path, module in value.named_modules()}
                leaves += value.parameters()
            elif isinstance(value, torch.optim.Optimizer):
                self.optimizers[name] = value
                leaves += (p for group in value.param_groups for p in group["params"])
            elif isinstance(value, torch.Tensor) and value.is_leaf and value.requires_grad:
                self.single.append(value)
        self.learned = [p for p in {id(p): p for p in (*leaves, *self.single)}.values() if p.requires_grad]

    def tensor_attributes(self) -> dict[str, torch.Tensor]:
        """The trainer's own attributes that are tensors, by name."""
        return {name: value for name, value in vars(self.trainer).items() if isinstance(value, torch.Tensor)}

    def replaced(self, before: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The `tensor_attributes` that are other tensors than `before`."""
        return {name: value for name, value in self.tensor_attributes().items() if value is not before.get(name)}


class BakedValues:
    """The Python values and the memory that are baked into a recorded step, to see whether they have changed since.

    These are the trainer's settings and attributes, but for `ignored`, as far as they are numbers, texts, tuples of
    these, tensors, modules or optimizers; the values of its modules; the settings of optimizers but for the learning
    rate; and the memory of parameters, buffers and optimizers' states.
    """

    def __init__(self, parts: TrainerParts, ignored: Collection[str]) -> None:
        self._trainer = trainer = parts.trainer
        self._optimizers = list(parts.optimizers.values())
        names = sorted((settings_of(type(trainer)) | set(vars(trainer))) - set(ignored))
        self._settings = [name for name in names if _is_plain(getattr(trainer, name))]
        tensors = [name for name in parts.tensor_attributes() if name not in ignored]
        objects = [n for n, value in vars(trainer).items() if isinstance(value, nn.Module | torch.optim.Optimizer)]
        self._values: list[tuple[Mapping[str, Any], str]] = [(vars(trainer), name) for name in objects]
        self._memory: list[tuple[Mapping[str, Any], str]] = [(vars(trainer), name) for name in tensors]
        value_names, memory_names = self._settings + objects, tensors
        for path, module in parts.modules.items():
            plain = [key for key, value in vars(module).items() if _is_plain(value)]
            self._values += [(vars(module), key) for key in plain]
            value_names += [f"{path}.{key}" for key in plain]
            for held in (module._parameters, module._buffers):
                there = [key for key, tensor in held.items() if tensor is not None]
                self._memory += [(held, key) for key in there]
                memory_names += [f"{path}.{key}" for key in there]
        self._names = value_names + memory_names
        self._kept = self._read()
        # Memory that a recording writes must not be given to others, even if the trainer has left it.
        self._alive = [holder[key].detach() for holder, key in self._memory]
        for optimizer in self._optimizers:
            self._alive += (p.detach() for group in optimizer.param_groups for p in group["params"])
            self._alive += (value for state in optimizer.state.values() for value in state.values())
        self._alive += (leaf.grad for leaf in parts.learned)

    def _read(self) -> list[object]:
        """All values, in the order of the names; then those of the optimizers."""
        trainer = self._trainer
        found: list[object] = [getattr(trainer, name) for name in self._settings]
        found += [holder[key] for holder, key in self._values]
        found += [holder[key].data_ptr() for holder, key in self._memory]
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                number = type(group["lr"]) in (float, int)
                found += [_identity(value) for key, value in group.items() if not (key == "lr" and number)]
                for parameter in group["params"]:
                    found.append(parameter.data_ptr())
                    found += map(id, optimizer.state.get(parameter, {}).values())
        return found

    def changed(self) -> list[str]:
        """The names of the values that differ from the recorded ones."""
        try:
            found = self._read()
            if found == self._kept:
                return []
        except (AttributeError, KeyError, RuntimeError, ValueError) as error:  # something is gone, or an array now
            return [f"something ({error})"]
        names = [name for name, *values in zip(self._names, self._kept, found, strict=False) if values[0] != values[1]]
        return names or [AN_OPTIMIZER]


class PythonState:
    """Python state that a step's code changes even if its operations do not run, kept to be restored."""

    def __init__(self, parts: TrainerParts) -> None:
        self._parts = parts
        self._steps = parts.trainer.gradient_steps
        self._gradients = [leaf.grad for leaf in parts.learned]
        held: list[dict[Any, Any]] = [vars(parts.trainer)]
        for module in parts.modules.values():
            held += [vars(module), module._parameters, module._buffers]
        for optimizer in parts.optimizers.values():
            held += [optimizer.state, *optimizer.state.values(), *optimizer.param_groups]
        self._held = [(holder, dict(holder)) for holder in held]

    def restore(self) -> None:
        """Make it as it was."""
        for holder, kept in self._held:
            holder.update(kept)
            for key in holder.keys() - kept.keys():
                del holder[key]
        for leaf, gradient in zip(self._parts.learned, self._gradients, strict=True):
            leaf.grad = gradient
        self._parts.trainer.gradient_steps = self._steps


def _held(attributes: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    for name, value in attributes.items():
        yield name, value
        if isinstance(value, list | tuple):
            yield from ((f"{name}.{number}", member) for number, member in enumerate(value))
        elif isinstance(value, Mapping):
            yield from ((f"{name}.{key}", member) for key, member in value.items())


def _is_plain(value: object) -> bool:
    return isinstance(value, _PLAIN) or (isinstance(value, tuple) and all(map(_is_plain, value)))


def _identity(value: object) -> object:
    """Something that is equal as long as a recording need not be made again."""
    return value if _is_plain(value) else id(value)
