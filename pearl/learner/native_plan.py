"""Translates a trainer's networks for the native learner, or says in one line what is not supported."""

from __future__ import annotations

import math
from typing import Any, TypeAlias, cast

import numpy as np

from pearl import _native
from pearl.algorithms.arrays import Array, ArrayModule, ArrayParameters, ArrayValue, operations_of
from pearl.algorithms.update_rule import AnyModule, AnyNumber, AnyParameters
from pearl.errors import TrainerError
from pearl.lazy_torch import is_tensor, nn, torch
from pearl.learner.flat import FlatParameters
from pearl.spec import LayerSpec, NetworkSpec

Op: TypeAlias = tuple[str, int, int, int, int, int, float]  # kind, inputs, outputs, weight, bias, eps or rate
# Convolutions and poolings: kind, input, outputs, weight, bias, and the window: channels, height and width of the
# input, then kernel, stride and padding, each of rows and of columns.
WindowOp: TypeAlias = tuple[str, int, int, int, int, tuple[int, ...]]
NativeOp: TypeAlias = Op | WindowOp

_NONE = -1
_SAME_VALUES = ("identity", "flatten", "reshape")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class UnsupportedError(Exception):
    """Says in one line what the native learner does not support."""


def kernel_column(name: str, column: np.ndarray | torch.Tensor, dtype: np.dtype[Any]) -> np.ndarray:
    """A batch's column for a kernel: contiguous, of `dtype`; raises TrainerError for another dtype."""
    found = column.detach().numpy() if is_tensor(column) else np.asarray(column)
    if found.dtype != dtype:
        raise TrainerError(f"Column {name!r} must have dtype {dtype}; found {found.dtype}. Convert it first.")
    return found if found.flags.c_contiguous else np.ascontiguousarray(found)


def weights_of(flat: AnyParameters) -> np.ndarray:
    """The memory of the flat parameters, `(size,)` float32."""
    return flat.memory if isinstance(flat, ArrayParameters) else flat.parameter.detach().numpy()


def memory_of(number: AnyNumber) -> np.ndarray:
    """The memory of a single number, `(1,)`."""
    return number.values.reshape(1) if isinstance(number, ArrayValue) else number.detach().numpy().reshape(1)


class PinnedWeights:
    """Flat parameters, and a single `scalar`, whose memory a kernel holds."""

    def __init__(self, *flats: AnyParameters, scalar: AnyNumber | None = None) -> None:
        self._arrays = [flat for flat in flats if isinstance(flat, ArrayParameters)]
        self._flats = [(flat, flat.parameter.data_ptr()) for flat in flats if isinstance(flat, FlatParameters)]
        self._scalar = None if isinstance(scalar, ArrayValue) else scalar
        self._address = 0 if self._scalar is None else self._scalar.data_ptr()

    def require_in_place(self) -> None:
        """Raise TrainerError if a module, or the scalar, has other memory now; called before each step."""
        for flat, address in self._flats:
            flat.require_in_place(address)
        for arrays in self._arrays:
            arrays.require_in_place()
        if self._scalar is not None and self._scalar.data_ptr() != self._address:
            raise TrainerError("log_alpha was given other memory after the Learner was made. Make the Learner again.")


def read_operations(
    name: str, module: AnyModule, input_shape: tuple[int, ...], flat: AnyParameters
) -> tuple[int, list[Op]]:
    """Inputs and operations of a network of vectors, as all engines take them; parameters are offsets into `flat`.

    UnsupportedError says what these engines do not support, such as convolutions.
    """
    size, ops = read_native_operations(name, module, input_shape, flat)
    return size, cast("list[Op]", ops)


def read_native_operations(
    name: str,
    module: AnyModule,
    input_shape: tuple[int, ...],
    flat: AnyParameters,
    *,
    images: bool = False,
    of_bytes: bool = False,
) -> tuple[int, list[NativeOp]]:
    """The same as `_native.Network` takes them, which also works on `images`, and on bytes, which it scales."""
    if isinstance(module, ArrayModule):
        assert isinstance(flat, ArrayParameters)
        return math.prod(input_shape), list(operations_of(module, lambda array: array.offset))
    assert isinstance(flat, FlatParameters)
    from pearl.learner.extract import extract_network

    _check_module(name, module)
    if isinstance(module, nn.Linear):
        module = nn.Sequential(module)  # a trace records the layers inside a module, not the module itself
    spec = extract_network(name, module, input_shape, torch.uint8 if of_bytes else None)
    return math.prod(spec.input_shape), _Reader(module, flat, images, of_bytes).read(spec)


def read_network(
    name: str,
    module: AnyModule,
    input_shape: tuple[int, ...],
    flat: AnyParameters,
    *,
    images: bool = False,
    of_bytes: bool = False,
) -> _native.Network:
    """The native network of `module`, whose parameters are in `flat`; UnsupportedError says what is not supported.

    It is compared with the module on a few random inputs, in case the trace has missed something. With `images` it may
    have convolutions; inputs `of_bytes` are uint8.
    """
    size, ops = read_native_operations(name, module, input_shape, flat, images=images, of_bytes=of_bytes)
    try:
        network = _native.Network(size, ops, len(weights_of(flat)), of_bytes)
    except TrainerError as error:
        raise UnsupportedError(f"network {name!r}: {error}") from error
    if isinstance(module, ArrayModule):
        return network
    inputs = trial_inputs(4, input_shape, of_bytes=of_bytes)
    with torch.no_grad():
        expected = module(inputs).numpy().reshape(4, -1)
    found = network.forward(weights_of(flat), inputs.numpy())
    if found.shape != expected.shape or not np.allclose(found, expected, rtol=1e-3, atol=1e-4, equal_nan=True):
        raise UnsupportedError(f"network {name!r} computes something else than its layers say")
    return network


def trial_inputs(rows: int, shape: tuple[int, ...], *, of_bytes: bool) -> torch.Tensor:
    """Random inputs `(rows, *shape)`, the same each time: standard normal float32, or uint8."""
    generator = torch.Generator().manual_seed(0)
    if of_bytes:
        return torch.randint(0, 256, (rows, *shape), generator=generator, dtype=torch.uint8)
    return torch.randn((rows, *shape), generator=generator)


def check_same_structure(
    name: str, module: AnyModule, flat: AnyParameters, target: AnyModule, target_flat: AnyParameters
) -> None:
    """Raise UnsupportedError unless `target`'s parameters lie in its flat vector as `module`'s do in theirs."""
    ours = [(key, tuple(p.shape), offset_of(key, p, flat)) for key, p in module.named_parameters()]
    theirs = [(key, tuple(p.shape), offset_of(key, p, target_flat)) for key, p in target.named_parameters()]
    if ours != theirs:
        raise UnsupportedError(f"network {name!r} and its target network differ in structure")


def _check_module(name: str, module: nn.Module) -> None:
    for key, buffer in module.named_buffers():
        raise UnsupportedError(f"network {name!r} has a buffer {key!r} {tuple(buffer.shape)}")
    for key, part in module.named_modules():
        if any(getattr(part, hooks, None) for hooks in _HOOKS):
            raise UnsupportedError(f"module {key or name!r} has hooks")
    for key, p in module.named_parameters():
        if p.dtype != torch.float32:
            raise UnsupportedError(f"parameter {key!r} has dtype {p.dtype}")
        if p.device.type != "cpu":
            raise UnsupportedError(f"parameter {key!r} is on {p.device}")


def offset_of(name: str, parameter: torch.Tensor | Array | None, flat: AnyParameters) -> int:
    """Where `flat` holds the parameter of layer `name`; -1 for None, UnsupportedError if it lies elsewhere."""
    if parameter is None:
        return _NONE
    if isinstance(parameter, Array):
        return parameter.offset
    assert isinstance(flat, FlatParameters)
    bytes_in = parameter.data_ptr() - flat.parameter.data_ptr()
    inside = 0 <= bytes_in <= 4 * (flat.parameter.numel() - parameter.numel())
    if not inside or bytes_in % 4 or not parameter.is_contiguous():
        raise UnsupportedError(f"parameters of layer {name!r} lie outside the trainer's flat vector")
    return bytes_in // 4


class _Reader:
    """Turns the layers of a network into operations."""

    def __init__(self, module: nn.Module, flat: FlatParameters, images: bool, of_bytes: bool) -> None:
        self._module, self._flat, self._images = module, flat, images
        self._ops: list[NativeOp] = []
        # Of each layer's result: its number (0 is the network's input, i + 1 the result of ops[i]), whether it consists
        # of bytes, and whether it is an image.
        self._values: dict[int, int] = {-1: 0}
        self._raw = {-1} if of_bytes else set[int]()
        self._maps = set[int]()

    def read(self, spec: NetworkSpec) -> list[NativeOp]:
        """The operations of `spec`, the layers of the module."""
        for number, layer in enumerate(spec.layers):
            self._values[number] = self._add(number, layer)
        if not self._ops:
            raise UnsupportedError(f"network {spec.name!r} has no layers")
        return self._ops

    def _add(self, number: int, layer: LayerSpec) -> int:
        """Append the operation of a layer, if it has one; the number of its result."""
        same_size = math.prod(layer.in_shape) == math.prod(layer.out_shape)
        inputs = [self._values[i] for i in layer.inputs]
        of_map = any(i in self._maps for i in layer.inputs)
        if layer.kind == "scalebytes" and self._images and len(inputs) == 1:
            _submodule(layer, self._module)
            self._maps |= {number} if of_map else set()
            return inputs[0]
        if layer.kind in _SAME_VALUES and len(inputs) == 1 and same_size:
            self._raw |= {number} if layer.inputs[0] in self._raw else set()
            if not of_map:
                return inputs[0]
            if layer.in_shape == layer.out_shape:
                self._maps.add(number)
                return inputs[0]
            if len(layer.out_shape) == 1:
                return self._append(("flatten", inputs[0], _NONE, layer.out_shape[0], _NONE, _NONE, 0.0))
            raise UnsupportedError(f"layer {layer.name!r} of kind {layer.kind!r} of images")
        if any(i in self._raw for i in layer.inputs):
            raise UnsupportedError(f"layer {layer.name!r} takes bytes that ScaleBytes has not scaled")
        if self._images and layer.kind in ("conv2d", "maxpool2d") and len(layer.in_shape) == 3:
            self._maps.add(number)
            return self._append(self._window_op(layer, inputs[0]))
        if of_map:
            self._maps.add(number)
            if layer.kind not in ("relu", "add", "sub"):
                raise UnsupportedError(f"layer {layer.name!r} of kind {layer.kind!r} of images")
        return self._append(_op(layer, inputs, self._module, self._flat, of_map))

    def _append(self, op: NativeOp) -> int:
        self._ops.append(op)
        return len(self._ops)

    def _window_op(self, layer: LayerSpec, value: int) -> WindowOp:
        part = _submodule(layer, self._module)
        assert isinstance(part, nn.Conv2d | nn.MaxPool2d)
        kernel, stride, padding, dilation = (
            _pair(getattr(part, name)) for name in ("kernel_size", "stride", "padding", "dilation")
        )
        plain = dilation == (1, 1) and padding is not None and kernel is not None and stride is not None
        if isinstance(part, nn.Conv2d):
            plain = plain and part.groups == 1 and part.padding_mode == "zeros"
        else:
            plain = plain and not part.ceil_mode and not part.return_indices
        if not plain or kernel is None or stride is None or padding is None:
            raise UnsupportedError(f"layer {layer.name!r}, {part}")
        weight, bias = _parameters_of(layer, part, self._flat)
        window = (*layer.in_shape, *kernel, *stride, *padding)
        return (layer.kind, value, math.prod(layer.out_shape), weight, bias, window)


def _pair(number: Any) -> tuple[int, int] | None:
    """Of rows and of columns; None for a padding by name."""
    if isinstance(number, int):
        return number, number
    return tuple(number) if isinstance(number, tuple) and len(number) == 2 else None


def _parameters_of(layer: LayerSpec, part: nn.Module, flat: FlatParameters) -> tuple[int, int]:
    """Offsets of weight and bias."""
    parameters = dict(part.named_parameters())
    if any(not p.requires_grad for p in parameters.values()) and flat.gradient is not None:
        raise UnsupportedError(f"layer {layer.name!r} has parameters that are frozen")
    weight, bias = (offset_of(layer.name, parameters.get(key), flat) for key in ("weight", "bias"))
    return weight, bias


def _op(layer: LayerSpec, inputs: list[int], module: nn.Module, flat: FlatParameters, of_map: bool) -> Op:
    kind, width = layer.kind, math.prod(layer.out_shape)
    if kind == "opaque":
        raise UnsupportedError(f"network {layer.name!r} cannot be traced to layers")
    if kind in ("linear", "layernorm"):
        part = _submodule(layer, module)
        if len(layer.in_shape) != 1:
            raise UnsupportedError(f"layer {layer.name!r} takes items of shape {layer.in_shape}")
        eps = 0.0
        if isinstance(part, nn.LayerNorm):
            eps = part.eps
            if tuple(part.normalized_shape) != layer.in_shape or eps <= 0:
                raise UnsupportedError(f"layer {layer.name!r} (LayerNorm) normalises {tuple(part.normalized_shape)}")
        weight, bias = _parameters_of(layer, part, flat)
        return (kind, inputs[0], _NONE, width, weight, bias, eps)
    if kind == "dropout" and (rate := _shared_dropout(layer, module)) is not None:
        return (kind, inputs[0], _NONE, width, _NONE, _NONE, rate)
    if kind in ("relu", "tanh") and len(inputs) == 1:
        return (kind, inputs[0], _NONE, width, _NONE, _NONE, 0.0)
    if kind in ("add", "sub") and len(inputs) == 2 and (len(layer.out_shape) == 1 or of_map):
        return (kind, inputs[0], inputs[1], width, _NONE, _NONE, 0.0)
    if kind == "mean" and len(inputs) == 1 and len(layer.in_shape) == 1 and layer.out_shape == (1,):
        return (kind, inputs[0], _NONE, 1, _NONE, _NONE, 0.0)
    raise UnsupportedError(f"layer {layer.name!r} of kind {kind!r}")


def _shared_dropout(layer: LayerSpec, module: nn.Module) -> float | None:
    """The rate of a layer whose masks all engines share; None for any other."""
    from pearl.algorithms.networks import Dropout

    part = module.get_submodule(layer.name) if layer.name in dict(module.named_modules()) else None
    return part.rate if type(part) is Dropout else None


def _submodule(layer: LayerSpec, module: nn.Module) -> nn.Module:
    from pearl.algorithms.networks import ScaleBytes

    try:
        part = module.get_submodule(layer.name)
    except AttributeError:
        raise UnsupportedError(f"layer {layer.name!r} of kind {layer.kind!r} is not a module") from None
    if type(part) not in (nn.Linear, nn.LayerNorm, nn.Conv2d, nn.MaxPool2d, ScaleBytes):
        raise UnsupportedError(f"layer {layer.name!r} of class {type(part).__name__}")
    return part
