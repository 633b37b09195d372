"""Networks and optimizers in NumPy arrays. A built-in algorithm consists of these until something needs torch.

A native Learner and a native policy work on the arrays. Names, order and initial values are those of the torch modules
that `Trainer.in_torch` puts on the same memory, so nothing tells the two apart but the time to import torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from pearl.errors import TrainerError
from pearl.lazy_torch import torch
from pearl.moments import scale_of

if TYPE_CHECKING:
    from pearl.learner.flat import FlatParameters

# kind, inputs, width, weight, bias, eps or rate. Convolutions and poolings: kind, input, width, weight, bias, window.
Operation: TypeAlias = tuple[str, int, int, int, int, int, float] | tuple[str, int, int, int, int, tuple[int, ...]]
Place: TypeAlias = "Callable[[Array], int]"

_ALIGNMENT = 16  # floats; `FlatParameters` also begins each parameter at a multiple of this
_NONE = -1
_FULL = 16  # torch draws this many normal numbers at a time


class TorchRandom:
    """The random numbers that torch's generator of the CPU gives after `torch.manual_seed(seed)`.

    Uniform numbers are the same to the bit where torch's build fuses multiplication and addition, as on x86 with AVX2;
    normal ones are to a few units of the last place.
    """

    def __init__(self, seed: int) -> None:
        self._state = np.random.RandomState(seed & 0xFFFFFFFF)
        self._spare: float | None = None

    def _bits(self, count: int) -> np.ndarray:
        return self._state.randint(0, 2**32, size=count, dtype=np.uint32)

    def _long(self) -> int:
        high, low = (int(bits) for bits in self._bits(2))
        return high << 32 | low

    def uniform(self, shape: tuple[int, ...], low: float, high: float) -> np.ndarray:
        """`shape` float32 in `[low, high)`."""
        begin = np.float32(low)
        share = (self._bits(math.prod(shape)) & np.uint32(0xFFFFFF)).astype(np.float64) * 2.0**-24
        # The exact product and sum of floats, rounded once.
        return (share * float(np.float32(high) - begin) + float(begin)).astype(np.float32).reshape(shape)

    def normal(self, shape: tuple[int, ...]) -> np.ndarray:
        """`shape` float32, standard normal."""
        count = math.prod(shape)
        if count < _FULL:
            return np.array([self._one_normal() for _ in range(count)], np.float32).reshape(shape)
        drawn = self.uniform((count,), 0.0, 1.0)
        whole = count // _FULL * _FULL
        drawn[:whole] = _box_muller(drawn[:whole])
        if whole < count:
            drawn[-_FULL:] = _box_muller(self.uniform((_FULL,), 0.0, 1.0))
        return drawn.reshape(shape)

    def _one_normal(self) -> float:
        if self._spare is not None:
            found, self._spare = self._spare, None
            return found
        angle, size = ((self._long() & (2**53 - 1)) * 2.0**-53 for _ in range(2))
        radius, turn = math.sqrt(-2.0 * math.log1p(-size)), 2.0 * math.pi * angle
        self._spare = radius * math.sin(turn)
        return radius * math.cos(turn)

    def integer(self, below: int) -> int:
        """A whole number from 0 to `below`, of 2^32 at least, as `torch.randint(below, ())`."""
        return self._long() % below

    def linear(self, inputs: int, outputs: int) -> tuple[np.ndarray, np.ndarray]:
        """Weights `(outputs, inputs)` and biases `(outputs,)` as those of a new `nn.Linear`."""
        # As torch computes the bound, whose last bit depends on it.
        bound = math.sqrt(3.0) * (math.sqrt(2.0 / (1.0 + math.sqrt(5.0) ** 2)) / math.sqrt(inputs))
        weight = self.uniform((outputs, inputs), -bound, bound)
        bound = 1.0 / math.sqrt(inputs)
        return weight, self.uniform((outputs,), -bound, bound)

    def convolution(self, inputs: int, outputs: int, kernel: int) -> tuple[np.ndarray, np.ndarray]:
        """Weights `(outputs, inputs, kernel, kernel)` and biases `(outputs,)` as those of a new `nn.Conv2d`."""
        weight, bias = self.linear(inputs * kernel * kernel, outputs)
        return weight.reshape(outputs, inputs, kernel, kernel), bias

    def orthogonal(self, shape: tuple[int, int], gain: float) -> np.ndarray:
        """A matrix with orthogonal rows or columns (Saxe et al. 2013), scaled, as `nn.init.orthogonal_`."""
        drawn = self.normal(shape)
        tall = shape[0] >= shape[1]
        q, r = np.linalg.qr(drawn if tall else drawn.T)
        q *= np.sign(np.diag(r))
        return (q if tall else q.T) * np.float32(gain)


def _box_muller(uniform: np.ndarray) -> np.ndarray:
    groups = uniform.reshape(-1, 2, _FULL // 2)
    radius = np.sqrt(np.float32(-2.0) * np.log(np.float32(1.0) - groups[:, 0]))
    turn = np.float32(2.0 * math.pi) * groups[:, 1]
    return np.stack((radius * np.cos(turn), radius * np.sin(turn)), axis=1).reshape(-1)


class Array:
    """A parameter, or with `buffer` a buffer, of a module: `values` of any shape."""

    def __init__(self, values: np.ndarray, *, buffer: bool = False) -> None:
        self.shape: tuple[int, ...] = values.shape
        self.buffer = buffer
        self._values: np.ndarray | None = values
        self._vector: np.ndarray | None = None
        self.offset = 0

    @property
    def values(self) -> np.ndarray:
        """The numbers, in place."""
        if self._values is not None:
            return self._values
        assert self._vector is not None
        return self._vector[self.offset : self.offset + self.numel()].reshape(self.shape)

    def move_into(self, vector: np.ndarray, offset: int) -> None:
        """Copy the values to `offset` in `vector` `(size,)`, and keep them there from now on."""
        begun = self.values
        self._values, self._vector, self.offset = None, vector, offset  # a view of its own would not survive a copy
        self.values[...] = begun

    def numel(self) -> int:
        """The count of numbers."""
        return math.prod(self.shape)

    def is_floating_point(self) -> bool:
        """Whether the dtype is floating point."""
        return bool(np.issubdtype(self.values.dtype, np.floating))


class ArrayModule:
    """Arrays and further modules by the names that they have in torch; None for a name that is there but empty."""

    def __init__(self, **members: Array | ArrayModule | None) -> None:
        self.members = members

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["members"][name]
        except KeyError:
            raise AttributeError(f"{type(self).__name__} has no {name!r}") from None

    def _arrays(self, prefix: str = "") -> Iterator[tuple[str, Array]]:
        own = [(name, member) for name, member in self.members.items() if isinstance(member, Array)]
        for name, array in sorted(own, key=lambda item: item[1].buffer):
            yield prefix + name, array
        for name, member in self.members.items():
            if isinstance(member, ArrayModule):
                yield from member._arrays(f"{prefix}{name}.")

    def state(self) -> dict[str, np.ndarray]:
        """The arrays by their names in torch's `state_dict`, where shared ones stand under each of their names."""
        return {name: array.values for name, array in self._arrays()}

    def named_parameters(self) -> list[tuple[str, Array]]:
        """Parameters by their first names, in torch's order."""
        return self._once(buffer=False)

    def named_buffers(self) -> list[tuple[str, Array]]:
        """The same for buffers."""
        return self._once(buffer=True)

    def _once(self, *, buffer: bool) -> list[tuple[str, Array]]:
        found: dict[int, tuple[str, Array]] = {}
        for name, array in self._arrays():
            if array.buffer == buffer:
                found.setdefault(id(array), (name, array))
        return list(found.values())

    def snapshot(self) -> list[np.ndarray]:
        """What actors receive, flat: parameters, then floating buffers."""
        kept = [*self.named_parameters(), *((n, b) for n, b in self.named_buffers() if b.is_floating_point())]
        return [array.values.reshape(-1) for _, array in kept]

    def add_operations(self, operations: list[Operation], value: int, place: Place) -> int:
        """Append what the module does to the result number `value`, as `_native.Network` takes it; its own result.

        `place` tells where the weights hold an array.
        """
        raise TypeError(f"{type(self).__name__} has no operations")


class ArrayLinear(ArrayModule):
    """`nn.Linear`."""

    def __init__(self, weight: np.ndarray, bias: np.ndarray) -> None:
        super().__init__(weight=Array(weight), bias=Array(bias))

    def add_operations(self, operations: list[Operation], value: int, place: Place) -> int:
        """Append one operation."""
        weight, bias = self.weight, self.bias
        operations.append(("linear", value, _NONE, weight.shape[0], place(weight), place(bias), 0.0))
        return len(operations)


class ArrayActivation(ArrayModule):
    """`kind`, "relu" or "tanh", of `width` numbers."""

    def __init__(self, kind: str, width: int) -> None:
        super().__init__()
        self._kind, self._width = kind, width

    def add_operations(self, operations: list[Operation], value: int, place: Place) -> int:
        """Append one operation."""
        operations.append((self._kind, value, _NONE, self._width, _NONE, _NONE, 0.0))
        return len(operations)


class ArrayLayerNorm(ArrayModule):
    """`nn.LayerNorm` of `width` numbers."""

    def __init__(self, width: int, eps: float = 1e-5) -> None:
        super().__init__(weight=Array(np.ones(width, np.float32)), bias=Array(np.zeros(width, np.float32)))
        self._eps = eps

    def add_operations(self, operations: list[Operation], value: int, place: Place) -> int:
        """Append one operation."""
        weight, bias = self.weight, self.bias
        operations.append(("layernorm", value, _NONE, weight.shape[0], place(weight), place(bias), self._eps))
        return len(operations)


class ArrayDropout(ArrayModule):
    """`networks.Dropout` of `width` numbers."""

    def __init__(self, rate: float, width: int) -> None:
        super().__init__()
        self._rate, self._width = rate, width

    def add_operations(self, operations: list[Operation], value: int, place: Place) -> int:
        """Append one operation."""
        operations.append(("dropout", value, _NONE, self._width, _NONE, _NONE, self._rate))
        return len(operations)


class ArrayScale(ArrayModule):
    """`ToUnit` or `FromUnit`: `center` and `half_range`, `(size,)` each."""

    def __init__(self, center: np.ndarray, half_range: np.ndarray) -> None:
        super().__init__(center=Array(center, buffer=True), half_range=Array(half_range, buffer=True))


class ArraySame(ArrayModule):
    """`nn.Flatten` of vectors, and `ScaleBytes`: arrays of observations are flat already, and bytes are scaled."""

    def add_operations(self, operations: list[Operation], value: int, place: Place) -> int:
        """Append none."""
        return value


class ArrayFlatten(ArrayModule):
    """`nn.Flatten` of images, to `width` numbers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self._width = width

    def add_operations(self, operations: list[Operation], value: int, place: Place) -> int:
        """Append one operation."""
        operations.append(("flatten", value, _NONE, self._width, _NONE, _NONE, 0.0))
        return len(operations)


@dataclass(frozen=True)
class ArrayWindow:
    """A kernel that moves over images of `in_shape`, `(channels, height, width)`; equal in rows and columns."""

    in_shape: tuple[int, int, int]
    kernel: int
    stride: int
    padding: int = 0

    def out_shape(self, channels: int) -> tuple[int, int, int]:
        """The shape of what comes out of it."""
        height, width = ((size + 2 * self.padding - self.kernel) // self.stride + 1 for size in self.in_shape[1:])
        return channels, height, width

    @property
    def numbers(self) -> tuple[int, ...]:
        """As `_native.Network` takes them."""
        return *self.in_shape, *(each for each in (self.kernel, self.stride, self.padding) for _ in range(2))


class ArrayConv(ArrayModule):
    """`nn.Conv2d`."""

    def __init__(self, weight: np.ndarray, bias: np.ndarray, window: ArrayWindow) -> None:
        super().__init__(weight=Array(weight), bias=Array(bias))
        self.out_shape = window.out_shape(len(weight))
        self._window = window

    def add_operations(self, operations: list[Operation], value: int, place: Place) -> int:
        """Append one operation."""
        offsets = place(self.weight), place(self.bias)
        operations.append(("conv2d", value, math.prod(self.out_shape), *offsets, self._window.numbers))
        return len(operations)


class ArrayMaxPool(ArrayModule):
    """`nn.MaxPool2d`."""

    def __init__(self, window: ArrayWindow) -> None:
        super().__init__()
        self.out_shape = window.out_shape(window.in_shape[0])
        self._window = window

    def add_operations(self, operations: list[Operation], value: int, place: Place) -> int:
        """Append one operation."""
        operations.append(("maxpool2d", value, math.prod(self.out_shape), _NONE, _NONE, self._window.numbers))
        return len(operations)


class ArrayResidual(ArrayModule):
    """`networks.ResidualBlock` of images of `width` numbers."""

    def __init__(self, block: ArrayModule, width: int) -> None:
        super().__init__(block=block)
        self._width = width

    def add_operations(self, operations: list[Operation], value: int, place: Place) -> int:
        """Those of the block, and the sum."""
        changed = self.block.add_operations(operations, value, place)
        operations.append(("add", value, changed, self._width, _NONE, _NONE, 0.0))
        return len(operations)


class ArraySequential(ArrayModule):
    """`nn.Sequential`."""

    def __init__(self, *modules: ArrayModule) -> None:
        super().__init__(**{str(number): module for number, module in enumerate(modules)})

    def add_operations(self, operations: list[Operation], value: int, place: Place) -> int:
        """Those of each module in turn."""
        for module in self.members.values():
            assert isinstance(module, ArrayModule)
            value = module.add_operations(operations, value, place)
        return value


class ArrayDueling(ArrayModule):
    """`DuelingHead`."""

    def __init__(self, value: ArrayModule, advantage: ArrayModule, actions: int) -> None:
        super().__init__(value=value, advantage=advantage)
        self._actions = actions

    def add_operations(self, operations: list[Operation], value: int, place: Place) -> int:
        """Value plus advantage, minus the mean advantage."""
        of_state = self.value.add_operations(operations, value, place)
        advantage = self.advantage.add_operations(operations, value, place)
        operations.append(("add", of_state, advantage, self._actions, _NONE, _NONE, 0.0))
        operations.append(("mean", advantage, _NONE, 1, _NONE, _NONE, 0.0))
        operations.append(("sub", len(operations) - 1, len(operations), self._actions, _NONE, _NONE, 0.0))
        return len(operations)


def array_mlp(
    random: TorchRandom, inputs: int, hidden_sizes: Sequence[int], outputs: int, *before: ArrayModule
) -> ArraySequential:
    """`networks.mlp`, after the modules `before`."""
    layers = array_layers(random, inputs, hidden_sizes)
    width = hidden_sizes[-1] if hidden_sizes else inputs
    return ArraySequential(*before, *layers, ArrayLinear(*random.linear(width, outputs)))


def array_dropout_mlp(
    random: TorchRandom, inputs: int, hidden_sizes: Sequence[int], outputs: int, rate: float
) -> ArraySequential:
    """`networks.dropout_mlp`."""
    layers: list[ArrayModule] = []
    for width, size in zip([inputs, *hidden_sizes], hidden_sizes, strict=False):
        layers += [ArrayLinear(*random.linear(width, size)), ArrayDropout(rate, size)]
        layers += [ArrayLayerNorm(size), ArrayActivation("relu", size)]
    width = hidden_sizes[-1] if hidden_sizes else inputs
    return ArraySequential(*layers, ArrayLinear(*random.linear(width, outputs)))


def array_layers(
    random: TorchRandom, inputs: int, sizes: Sequence[int], *, layer_norm: bool = False
) -> list[ArrayModule]:
    """Linear layers of `sizes`, each with a ReLU, before which `layer_norm` normalises."""
    layers: list[ArrayModule] = []
    for width, size in zip([inputs, *sizes], sizes, strict=False):
        layers += [ArrayLinear(*random.linear(width, size)), *([ArrayLayerNorm(size)] if layer_norm else [])]
        layers.append(ArrayActivation("relu", size))
    return layers


def array_cnn(random: TorchRandom, cnn: str, in_shape: tuple[int, ...]) -> tuple[ArrayModule, int]:
    """`networks.CNNS[cnn]` for images of `in_shape`, and the count of its features."""
    channels, height, width = in_shape
    return (_nature if cnn == "nature" else _impala)(random, (channels, height, width))


def _convolution(random: TorchRandom, outputs: int, window: ArrayWindow) -> ArrayConv:
    return ArrayConv(*random.convolution(window.in_shape[0], outputs, window.kernel), window)


def _features(random: TorchRandom, shape: tuple[int, int, int], features: int) -> list[ArrayModule]:
    width = math.prod(shape)
    linear = ArrayLinear(*random.linear(width, features))
    return [ArrayFlatten(width), linear, ArrayActivation("relu", features)]


def _nature(random: TorchRandom, shape: tuple[int, int, int]) -> tuple[ArrayModule, int]:
    layers: list[ArrayModule] = [ArraySame()]
    for outputs, kernel, stride in ((32, 8, 4), (64, 4, 2), (64, 3, 1)):
        layer = _convolution(random, outputs, ArrayWindow(shape, kernel, stride))
        shape = layer.out_shape
        layers += [layer, ArrayActivation("relu", math.prod(shape))]
    return ArraySequential(*layers, *_features(random, shape, 512)), 512


def _impala(random: TorchRandom, shape: tuple[int, int, int]) -> tuple[ArrayModule, int]:
    layers: list[ArrayModule] = [ArraySame()]
    for outputs in (16, 32, 32):
        first = _convolution(random, outputs, ArrayWindow(shape, 3, 1, 1))
        pool = ArrayMaxPool(ArrayWindow(first.out_shape, 3, 2, 1))
        shape = pool.out_shape
        layers += [first, pool]
        width, window = math.prod(shape), ArrayWindow(shape, 3, 1, 1)
        for _ in range(2):
            block: list[ArrayModule] = []
            for _ in range(2):
                block += [ArrayActivation("relu", width), _convolution(random, outputs, window)]
            layers.append(ArrayResidual(ArraySequential(*block), width))
    layers.append(ArrayActivation("relu", math.prod(shape)))
    return ArraySequential(*layers, *_features(random, shape, 256)), 256


def has_convolutions(module: ArrayModule) -> bool:
    """Whether a module is or contains one."""
    parts = (part for part in module.members.values() if isinstance(part, ArrayModule))
    return isinstance(module, ArrayConv) or any(has_convolutions(part) for part in parts)


def copy_arrays(module: ArrayModule, to: ArrayModule) -> None:
    """Copy the values of a module into another of the same structure."""
    for ours, theirs in zip(module.state().values(), to.state().values(), strict=True):
        theirs[...] = ours


def operations_of(module: ArrayModule, place: Place) -> list[Operation]:
    """All operations of a network."""
    operations: list[Operation] = []
    module.add_operations(operations, 0, place)
    return operations


class ArrayParameters:
    """All parameters of `module` in one vector, `memory` `(size,)` float32, as `FlatParameters` lays them out."""

    def __init__(self, module: ArrayModule) -> None:
        arrays = [array for _, array in module.named_parameters()]
        sizes = [-(-array.numel() // _ALIGNMENT) * _ALIGNMENT for array in arrays]
        self.memory = aligned_zeros(sum(sizes))
        self._in_torch: FlatParameters | None = None
        offset = 0
        for array, size in zip(arrays, sizes, strict=True):
            array.move_into(self.memory, offset)
            offset += size

    def require_in_place(self) -> None:
        """Once the weights are in torch: raise TrainerError if a module has been given other memory since."""
        if self._in_torch is not None:
            self._in_torch.require_in_place(self.memory.ctypes.data)

    def give_to(self, flat: FlatParameters) -> None:
        """Put the parameters of the same module in torch on this memory."""
        flat.take_memory(torch.from_numpy(self.memory))
        self._in_torch = flat


def aligned_zeros(count: int) -> np.ndarray:
    """`(count,)` float32 zeros that begin at a multiple of 64 bytes, as torch's tensors do."""
    room = np.zeros(count + _ALIGNMENT, np.float32)
    begin = -room.ctypes.data // 4 % _ALIGNMENT
    return room[begin : begin + count]


class ArrayAdam:
    """The settings and the state of `torch.optim.Adam` for one parameter of `shape`.

    `state` is empty before the first step, as torch's.
    """

    name = "Adam"

    def __init__(self, shape: tuple[int, ...], lr: float, eps: float = 1e-8) -> None:
        self._shape = shape
        group = {"lr": lr, "betas": (0.9, 0.999), "eps": eps, "weight_decay": 0, "amsgrad": False, "maximize": False}
        group |= {"foreach": None, "capturable": False, "differentiable": False, "fused": True}
        self.param_groups: list[dict[str, Any]] = [{**group, "decoupled_weight_decay": False, "params": [0]}]
        self.state: dict[str, np.ndarray] = {}
        self._in_torch: torch.optim.Optimizer | None = None

    def present_state(self) -> Mapping[str, np.ndarray]:
        """The state, made if it is not there; in torch, a checkpoint may have replaced it."""
        if self._in_torch is None:
            self._begin()
            return self.state
        (parameter,) = self._in_torch.param_groups[0]["params"]
        if not (found := self._in_torch.state[parameter]):
            self._begin()
            found.update({name: torch.from_numpy(array) for name, array in self.state.items()})
        return {name: tensor.detach().numpy() for name, tensor in found.items()}

    def _begin(self) -> None:
        if not self.state:
            averages = ((name, aligned_zeros(math.prod(self._shape))) for name in ("exp_avg", "exp_avg_sq"))
            self.state = {"step": np.zeros((), np.float32), **{name: a.reshape(self._shape) for name, a in averages}}

    @property
    def settings(self) -> dict[str, Any]:
        """The present settings; in torch, other code may change them."""
        return self.param_groups[0] if self._in_torch is None else self._in_torch.param_groups[0]

    def parameter_shapes(self) -> list[list[list[int]]]:
        """The shape of each parameter of each group."""
        return [[list(self._shape)]]

    def state_dict(self) -> dict[str, Any]:
        """As torch's, with an `Array` for each tensor."""
        arrays = {name: Array(values) for name, values in self.state.items()}
        return {"state": {0: arrays} if arrays else {}, "param_groups": self.param_groups}

    def fits(self, found: object) -> bool:
        """Whether `found` is a state dict that this one could have: a rate may differ, other settings are the same."""
        if not isinstance(found, dict) or found.keys() != {"state", "param_groups"}:
            return False
        states, groups = found["state"], found["param_groups"]
        if not isinstance(groups, list) or len(groups) != 1 or not isinstance(groups[0], dict):
            return False
        rate, own = groups[0].get("lr"), self.param_groups[0]
        if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0.0 <= rate < math.inf:
            return False
        if groups[0] != {**own, "lr": rate}:
            return False
        if states == {}:
            return True
        if not isinstance(states, dict) or states.keys() != {0} or not isinstance(states[0], dict):
            return False
        shapes = {"step": (), "exp_avg": self._shape, "exp_avg_sq": self._shape}
        if {name: getattr(array, "shape", None) for name, array in states[0].items()} != shapes:
            return False
        if any(array.dtype != np.float32 for array in states[0].values()):
            return False
        step = float(states[0]["step"])
        return math.isfinite(step) and step >= 0.0 and step == int(step)

    def load(self, state: Mapping[str, np.ndarray], group: Mapping[str, Any]) -> None:
        """Take the values of a state, which may be empty, and the settings of a group."""
        self.param_groups[0].update(group)
        if state:
            self._begin()
        for name, values in self.state.items():
            values[...] = state.get(name, 0.0)

    def give_to(self, optimizer: torch.optim.Optimizer) -> None:
        """Put the state of the same optimizer in torch on this memory."""
        (group,) = optimizer.param_groups
        group["lr"] = self.param_groups[0]["lr"]
        if self.state:
            optimizer.state[group["params"][0]] = {name: torch.from_numpy(a) for name, a in self.state.items()}
        self._in_torch = optimizer


@dataclass
class ArrayValue:
    """A single number, `values` `()`, that is part of a trainer's state if it is `saved`."""

    values: np.ndarray
    saved: bool = True

    def item(self) -> Any:
        """The number."""
        return self.values.item()


class ArrayStatistics(ArrayModule):
    """`ObservationStatistics`."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__(
            count=Array(np.zeros(()), buffer=True),
            mean=Array(np.zeros(shape), buffer=True),
            squares=Array(np.zeros(shape), buffer=True),
        )

    def add(self, obs: np.ndarray) -> None:
        """Take `(rows, *obs)` in."""
        count, mean, squares = (self.members[name].values for name in ("count", "mean", "squares"))  # type: ignore[union-attr]
        block = obs.astype(np.float64).reshape(-1, *mean.shape)
        rows, block_mean = len(block), block.mean(axis=0)
        total, distance = float(count) + rows, block_mean - mean
        squares += np.square(block - block_mean).sum(axis=0) + np.square(distance) * (float(count) * rows / total)
        mean += distance * (rows / total)
        count[...] = total

    @property
    def scale(self) -> np.ndarray:
        """One over the deviation; of elements that never changed, 1."""
        return scale_of(self.squares.values / max(float(self.count.values), 1.0))


class ArrayParts(SimpleNamespace):
    """What `build` would make, in arrays, under the same names as attributes of the trainer.

    `policy` is the module that actors need; it is one of the others, or a part of one.
    """

    policy: ArrayModule

    def items(self) -> list[tuple[str, Any]]:
        """The parts by name, `policy` left out."""
        return [(name, part) for name, part in vars(self).items() if name != "policy"]

    def give_to(self, trainer: object) -> None:
        """Put everything that `trainer.build()` has made in torch on the memory of the parts."""
        for name, part in self.items():
            made = getattr(trainer, name)
            if isinstance(part, ArrayParameters | ArrayAdam):
                part.give_to(made)
            elif isinstance(part, ArrayModule):
                _give_module(name, part, made)
            else:
                made.data = torch.from_numpy(part.values)


def _give_module(name: str, part: ArrayModule, module: Any) -> None:
    state, made = part.state(), module.state_dict()
    shapes = [{key: tuple(value.shape) for key, value in found.items()} for found in (state, made)]
    if shapes[0] != shapes[1]:
        raise TrainerError(f"{name!r} has arrays of the shapes {shapes[0]}, and in torch {shapes[1]}.")
    for key, array in part.named_buffers():
        *path, last = key.split(".")
        owner = module.get_submodule(".".join(path))
        owner._buffers[last] = torch.from_numpy(array.values)
