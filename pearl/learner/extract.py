"""Read a `NetworkSpec` from torch modules, so that users need not describe their networks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from pearl.algorithms.arrays import ArrayModule
from pearl.algorithms.trainer import arrays_of, modules_of
from pearl.errors import TrainerError
from pearl.lazy_torch import nn, torch
from pearl.spec import LayerSpec, NetworkSpec, Scalar

if TYPE_CHECKING:
    from torch import fx

# Functions and methods whose kind is not their name.
_KINDS = {"cat": "concat", "layer_norm": "layernorm", "view": "reshape"}


def extract_network(
    name: str, module: nn.Module, input_shape: tuple[int, ...], dtype: torch.dtype | None = None
) -> NetworkSpec:
    """Trace `module` on a batch of `(1, *input_shape)` and describe its operations in execution order.

    A module that cannot be traced (data-dependent control flow), or that uses parameters outside its layers, becomes
    one layer of kind "opaque" with its parameter count; it then runs on the torch backends. A layer called twice has
    its parameters counted once. Raises TrainerError if it does not accept the input.
    """
    from pearl.learner.tracing import Recorder, traced_module

    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    example = torch.zeros((1, *input_shape), dtype=dtype or torch.float32, device=device)
    try:
        with torch.no_grad():
            output_shape = tuple(module(example).shape[1:])
    except Exception as error:
        raise TrainerError(
            f"Network {name!r} does not accept observations of shape {input_shape}: {type(error).__name__}: {error}"
        ) from error
    try:
        traced = traced_module(module)
        recorder = Recorder(traced)
        with torch.no_grad():
            recorder.run(example)
        layers = _layers(traced, recorder.shapes)
    except Exception:
        layers = None
    if layers is None or _uses_bare_parameters(module, traced):
        parameters = sum(p.numel() for p in module.parameters())
        layers = (LayerSpec(type(module).__name__, "opaque", input_shape, output_shape, (-1,), parameters, parameters),)
    return NetworkSpec(name, input_shape, output_shape, layers)


def _uses_bare_parameters(module: nn.Module, traced: fx.GraphModule) -> bool:
    """Whether `forward` uses parameters outside layers, which no operation would count."""
    bare = {name for name, _ in module.named_parameters()}
    return any(node.op == "get_attr" and node.target in bare for node in traced.graph.nodes)


def _layers(traced: fx.GraphModule, shapes: Mapping[fx.Node, tuple[int, ...]]) -> tuple[LayerSpec, ...]:
    layers: list[LayerSpec] = []
    index: dict[fx.Node, int] = {}
    counted: set[nn.Module] = set()
    for node in traced.graph.nodes:
        if node.op == "placeholder":
            index[node] = -1
        if node.op not in ("call_module", "call_function", "call_method") or node not in shapes:
            continue
        sources = [n for n in node.all_input_nodes if n in index]
        in_shape = shapes[sources[0]] if sources else ()
        parameters, macs = 0, 0
        options: dict[str, Scalar | tuple[int, ...]] = {}
        if node.op == "call_module":
            child = traced.get_submodule(str(node.target))
            kind = type(child).__name__.lower()
            if child not in counted:
                parameters = sum(p.numel() for p in child.parameters())
                counted.add(child)
            macs = _macs(child, shapes[node])
            options = _options(child)
        elif node.op == "call_function":
            kind = getattr(node.target, "__name__", str(node.target))
        else:
            kind = str(node.target)
        kind = _KINDS.get(kind, kind)
        index[node] = len(layers)
        layers.append(
            LayerSpec(
                str(node.target) if node.op == "call_module" else node.name,
                kind,
                in_shape,
                shapes[node],
                tuple(index[s] for s in sources),
                parameters,
                macs,
                options,
            )
        )
    return tuple(layers)


def _macs(layer: nn.Module, out_shape: tuple[int, ...]) -> int:
    if isinstance(layer, nn.Linear):
        return layer.in_features * math.prod(out_shape)
    if isinstance(layer, nn.Conv2d):
        return math.prod(out_shape) * layer.in_channels // layer.groups * math.prod(layer.kernel_size)
    return 0


def _options(layer: nn.Module) -> dict[str, Scalar | tuple[int, ...]]:
    if isinstance(layer, nn.Conv2d):
        return {
            "kernel_size": tuple(layer.kernel_size),
            "stride": tuple(layer.stride),
            "padding": layer.padding if isinstance(layer.padding, str) else tuple(layer.padding),
            "groups": layer.groups,
            "bias": layer.bias is not None,
        }
    if isinstance(layer, nn.Linear):
        return {"bias": layer.bias is not None}
    if isinstance(layer, nn.LayerNorm):
        return {"eps": layer.eps}
    return {}


def extract_networks(trainer: object, observation_shape: tuple[int, ...] | None = None) -> tuple[NetworkSpec, ...]:
    """Specs of a trainer's policy and, for actor-critic trainers, of the networks whose input is the observation.

    `observation_shape` is for trainers without `input_shape`. A network whose input is not the observation becomes one
    opaque layer.
    """
    stated = getattr(trainer, "input_shape", observation_shape)
    input_shape = () if stated is None else tuple(stated)
    policy = getattr(trainer, "policy", None)
    specs = [_traced_or_opaque("policy", policy, input_shape)] if isinstance(policy, nn.Module) else []
    for name, module in modules_of(trainer).items():
        if module is policy or name.startswith("target"):
            continue
        if isinstance(policy, nn.Module):
            specs.append(_opaque(name, module, input_shape))
        else:
            specs.append(_traced_or_opaque(name, module, input_shape))
    return tuple(specs)


def structure_of(trainer: object, observation_shape: tuple[int, ...] | None = None) -> str:
    """A short text equal for equal networks: part of calibration keys. Where they are in arrays, it needs no torch."""
    arrays = arrays_of(trainer)
    if arrays is None:
        return " ".join(spec.signature for spec in extract_networks(trainer, observation_shape))
    parts = (
        f"{name}:{key}{'x'.join(map(str, values.shape))}"
        for name, part in arrays.items()
        if isinstance(part, ArrayModule) and not name.startswith("target")
        for key, values in part.state().items()
    )
    return " ".join(parts)


def _traced_or_opaque(name: str, module: nn.Module, input_shape: tuple[int, ...]) -> NetworkSpec:
    try:
        return extract_network(name, module, input_shape)
    except TrainerError:
        return _opaque(name, module, input_shape)


def _opaque(name: str, module: nn.Module, input_shape: tuple[int, ...]) -> NetworkSpec:
    parameters = sum(p.numel() for p in module.parameters())
    layer = LayerSpec(name, "opaque", input_shape, (), (-1,), parameters, parameters)
    return NetworkSpec(name, input_shape, (), (layer,))
