"""The parameters of a trainer as one vector in a fixed order, for averaging between Learners."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np

from pearl import _native
from pearl.algorithms.arrays import ArrayAdam, ArrayModule, ArrayValue
from pearl.algorithms.trainer import Trainer, arrays_of
from pearl.errors import ConfigurationError, TrainerError
from pearl.lazy_torch import is_imported, is_tensor, torch
from pearl.runtime.trainer_state import stateful_attributes, uncompiled
from pearl.spec import MomentsRule

_WIDEST = 4  # bytes of a float32


@dataclass(frozen=True)
class ParameterLayout:
    """Names and shapes of the averaged parameters, in the order of the vector."""

    entries: tuple[tuple[str, tuple[int, ...]], ...]

    @functools.cached_property
    def count(self) -> int:
        """float32 scalars of the vector."""
        return sum(math.prod(shape) for _, shape in self.entries)

    def require(self, found: ParameterLayout) -> None:
        """Raise TrainerError, naming the first difference, unless `found` is the same."""
        for number, (ours, theirs) in enumerate(itertools.zip_longest(self.entries, found.entries)):
            if ours != theirs:
                raise TrainerError(
                    "Learners that are averaged must have the same parameters in the same order. Parameter "
                    f"{number} must be {_shown(ours)}; found {_shown(theirs)}. Make every Learner's trainer from the "
                    "same class and settings."
                )


def _shown(entry: tuple[str, tuple[int, ...]] | None) -> str:
    return "none" if entry is None else f"{entry[0]!r} of shape {entry[1]}"


@dataclass(frozen=True)
class _Part:
    """A piece of the vector: a tensor or an array, which is `trained` or a statistic (a buffer, or moments).

    `counts`: it is an optimizer's count of steps, which stays a whole number.
    """

    name: str
    values: Any
    trained: bool
    counts: bool = False


class TrainerParameters:
    """The parameters of a trainer as a vector `(layout.count,)` float32, which `read` copies out and `write` copies in.

    They are the trained tensors and the floating buffers of all networks, target networks included, and single learned
    tensors. Buffers wider than float32, such as statistics of observations, and whole numbers stay each Learner's own.

    `moments` says what becomes of the optimizers' states when an average is loaded. "keep": they stay the Learner's
    own. "average": they are part of the vector, with the count of steps, which is rounded when it is loaded, since
    Learners may have made different numbers of steps; the optimizers are Adam, AdamW or SGD.
    "reset": they become zeros, as before the first step.

    Raises TrainerError for parameters wider than float32, and for optimizers whose states "average" does not know.
    """

    def __init__(self, trainer: object, moments: MomentsRule = "keep") -> None:
        if moments not in get_args(MomentsRule):
            raise ConfigurationError(
                f"moments must be one of {', '.join(map(repr, get_args(MomentsRule)))}; found {moments!r}."
            )
        self._trainer, self._moments = trainer, moments
        self._known: tuple[object, _native.ParameterArrays, list[np.ndarray]] | None = None
        parts = self._found()
        self.layout = ParameterLayout(tuple((part.name, tuple(part.values.shape)) for part in parts))
        self._bounded = [not part.trained for part in parts]
        self._counts = [part.counts for part in parts]

    def read(self, out: np.ndarray) -> None:
        """Copy the parameters to `out` `(count,)` float32."""
        self._check(out)
        if (arrays := self._arrays()) is not None:
            arrays.gather(out)
            return
        for tensor, numbers in zip(self._tensors(), self._split(out), strict=True):
            numbers[...] = tensor.detach().reshape(-1).to("cpu", torch.float32).numpy()

    def write(self, values: np.ndarray) -> None:
        """Load `(count,)` float32, in place, and treat the optimizers' states as `moments` says."""
        self._check(values)
        self._load(values)
        if self._moments == "reset":
            self._reset()

    def correct(self, average: np.ndarray, handed_in: np.ndarray) -> None:
        """Load an average late: `handed_in` is what `read` gave for it, and the trainer has trained on since.

        Both are `(count,)` float32. Every trained number `p` becomes `p + (average - handed_in)`, computed in float64
        and rounded once (delayed averaging: Zhou et al. 2020, "DaSGD", arXiv:2006.00441). Buffers and moments do too,
        but stay between `p` and the average, so that a variance is never negative. The optimizers' states are treated
        as `moments` says.
        """
        self._check(average)
        self._check(handed_in)
        if (arrays := self._arrays()) is not None:
            arrays.correct(average, handed_in)
            self._round_counts()
        else:
            present = np.empty(self.layout.count, np.float32)
            self.read(present)
            _native.ParameterArrays(self._split(present), self._bounded).correct(average, handed_in)
            self._load(present)
        if self._moments == "reset":
            self._reset()

    def _load(self, values: np.ndarray) -> None:
        if (arrays := self._arrays()) is not None:
            arrays.scatter(values)
            self._round_counts()
            return
        for tensor, numbers, counts in zip(self._tensors(), self._split(values), self._counts, strict=True):
            loaded = np.rint(numbers) if counts else numbers
            with torch.no_grad():
                tensor.data.copy_(torch.from_numpy(loaded).view_as(tensor))

    def _round_counts(self) -> None:
        """In place, of what is in arrays."""
        assert self._known is not None
        for steps in self._known[2]:
            np.rint(steps, out=steps)

    def _check(self, vector: np.ndarray) -> None:
        if vector.shape != (self.layout.count,) or vector.dtype != np.float32:
            raise TrainerError(
                f"The parameters of this trainer are float32 of shape ({self.layout.count},); found {vector.dtype} "
                f"{vector.shape}."
            )

    def _split(self, vector: np.ndarray) -> list[np.ndarray]:
        """The part of a vector that belongs to each entry of the layout."""
        ends = np.cumsum([math.prod(shape) for _, shape in self.layout.entries])
        return [vector[end - math.prod(shape) : end] for end, (_, shape) in zip(ends, self.layout.entries, strict=True)]

    def _arrays(self) -> _native.ParameterArrays | None:
        """Everything averaged, if it is in arrays, whose memory stays the same; None if it is in torch."""
        arrays = arrays_of(self._trainer)
        if arrays is None:
            return None
        if self._known is None or self._known[0] is not arrays:
            found = self._found()
            native = _native.ParameterArrays([part.values for part in found], self._bounded)
            self._known = arrays, native, [part.values for part in found if part.counts]
        return self._known[1]

    def _tensors(self) -> list[torch.Tensor]:
        """Everything averaged, in torch, where it lies now: tensors may have been replaced."""
        return [part.values for part in self._found()]

    def _found(self) -> list[_Part]:
        found = list(self._networks())
        if self._moments == "average":
            moments = self._averaged_moments()
            found += [_Part(name, value, False, counts=name.endswith(".step")) for name, value in moments]
        return found

    def _networks(self) -> Iterator[_Part]:
        seen: set[int] = set()
        for name, value, is_parameter in self._candidates():
            dtype = value.values.dtype if not is_tensor(value) else None
            floating = value.is_floating_point()
            width = dtype.itemsize if dtype is not None else value.element_size()
            if id(value) in seen or not floating:
                continue
            seen.add(id(value))
            if width > _WIDEST:
                if is_parameter:
                    raise TrainerError(
                        f"Parameter {name!r} of {type(self._trainer).__name__} must be float32 or narrower to be "
                        f"averaged; found {8 * width} bits. Use float32, or one Learner."
                    )
                continue
            yield _Part(name, value if dtype is None else value.values, is_parameter)

    def _candidates(self) -> Iterator[tuple[str, Any, bool]]:
        """Name, tensor or `Array`, and whether it is trained."""
        if (arrays := arrays_of(self._trainer)) is not None:
            for name, part in arrays.items():
                if isinstance(part, ArrayModule):
                    yield from ((f"{name}.{key}", array, True) for key, array in part.named_parameters())
                    yield from ((f"{name}.{key}", array, False) for key, array in part.named_buffers())
                elif isinstance(part, ArrayValue) and part.saved:
                    yield name, _Value(part.values), True
            return
        for name, value in stateful_attributes(self._in_torch()).items():
            if is_tensor(value):
                yield name, value, True
            elif isinstance(value, torch.nn.Module):
                module = uncompiled(value)
                yield from ((f"{name}.{key}", tensor, True) for key, tensor in module.named_parameters())
                yield from ((f"{name}.{key}", tensor, False) for key, tensor in module.named_buffers())

    def _in_torch(self) -> object:
        return self._trainer.in_torch() if isinstance(self._trainer, Trainer) else self._trainer

    def _averaged_moments(self) -> Iterator[tuple[str, Any]]:
        if (arrays := arrays_of(self._trainer)) is not None:
            for name, part in arrays.items():
                if isinstance(part, ArrayAdam):
                    yield from ((f"{name}.{key}", values) for key, values in part.present_state().items())
            return
        for name, optimizer in self._torch_optimizers():
            for number, state in enumerate(_present_states(name, optimizer)):
                yield from ((f"{name}.{number}.{key}", value) for key, value in state.items() if is_tensor(value))

    def _torch_optimizers(self) -> Iterator[tuple[str, torch.optim.Optimizer]]:
        for name, value in stateful_attributes(self._in_torch()).items():
            if isinstance(value, torch.optim.Optimizer):
                yield name, value

    def _reset(self) -> None:
        """In place, since native optimizers know the memory."""
        if (arrays := arrays_of(self._trainer)) is not None:
            states: list[dict[str, Any]] = [
                dict(part.present_state()) for _, part in arrays.items() if isinstance(part, ArrayAdam)
            ]
        else:
            states = [state for _, optimizer in self._torch_optimizers() for state in optimizer.state.values()]
        for state in states:
            for key, value in state.items():
                if is_tensor(value):
                    value.zero_()
                elif isinstance(value, np.ndarray):
                    value[...] = 0
                elif isinstance(value, int | float):
                    state[key] = type(value)(0)


@dataclass(frozen=True, eq=False)
class _Value:
    """A single number in an array, as an `Array` is asked."""

    values: np.ndarray

    def is_floating_point(self) -> bool:
        return bool(np.issubdtype(self.values.dtype, np.floating))


def _present_states(name: str, optimizer: torch.optim.Optimizer) -> Iterator[dict[str, Any]]:
    """The state of each parameter, made as torch would if the first step has not been."""
    assert is_imported()
    adams = (torch.optim.Adam, torch.optim.AdamW)
    if type(optimizer) not in (*adams, torch.optim.SGD):
        raise TrainerError(
            f'moments="average" knows the states of Adam, AdamW and SGD; optimizer {name!r} is '
            f'{type(optimizer).__name__}. Use moments="keep" or "reset".'
        )
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            if not state and isinstance(optimizer, adams):
                state["step"] = torch.zeros((), dtype=torch.float32)
                averages = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
                for key in averages if group["amsgrad"] else averages[:2]:
                    state[key] = torch.zeros_like(parameter.data)
            elif group.get("momentum") and state.get("momentum_buffer") is None:
                state["momentum_buffer"] = torch.zeros_like(parameter.data)
            yield state
