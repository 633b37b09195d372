"""Exports a saved policy: ONNX and TorchScript from raw observations to final actions, or its weights in one file.

What is exported is compared with `SavedPolicy.predict` on random observations before it is left in place.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np
from gymnasium import spaces

from pearl.action_masks import mask_parts
from pearl.actors.actions import first_action
from pearl.algorithms.inputs import random_observations
from pearl.algorithms.trainer import (
    RecurrentTrainer,
    Trainer,
    attributes_of,
    is_kept_tensor,
    modules_of,
    set_evaluation_mode,
)
from pearl.atomic_file import write_bytes
from pearl.errors import PolicyError
from pearl.extras import import_extra
from pearl.moments import OBSERVATION_CLIP
from pearl.policy.loading import METADATA
from pearl.policy.saved import SavedPolicy, check_policy
from pearl.runtime.outcome import flat_tensors
from pearl.runtime.trainer_state import module_tensors, policy_groups

if TYPE_CHECKING:
    import torch

Format: TypeAlias = Literal["onnx", "torchscript", "safetensors"]

SUFFIXES: dict[Format, str] = {"onnx": ".onnx", "torchscript": ".pt", "safetensors": ".safetensors"}

_OPSET = 17
_BATCHES = (1, 2, 7, 64)  # of the comparison
_TOLERANCE = 1e-4  # relative to the width of the actions
_TIES = 0.05  # discrete actions may differ in so many observations, where two values are equal but for rounding


def export_policy(policy: SavedPolicy, path: str | Path, format: Format) -> Path:
    """Write the policy to the file `path`, which is returned.

    "onnx" and "torchscript" map `observation` `(batch, *obs)`, of `policy.observation_dtype`, to `action`
    `(batch, *action)`, as `predict` does with deterministic actions: normalisation, scaling, `tanh` and argmax are in
    the graph, and the batch may have any size. "safetensors" holds the weights that acting needs, and the policy's
    description as metadata: `pearl.load_policy` reads it.

    A policy with action masks has a second input, `action_mask` `(batch, choices)` bool. A recurrent policy also takes
    `state` `(batch, size)` float32 and `episode_start` `(batch,)` bool, and returns `action` and `next_state`, as
    `predict_with_state` does: where an episode starts, the state that was passed counts for nothing.

    Raises PolicyError if the policy cannot be traced, or acts otherwise than `predict` once exported;
    MissingExtraError if `onnx` and `onnxruntime` are missing.
    """
    check_policy(policy)
    if format not in get_args(Format):
        raise PolicyError(f"The format must be {', '.join(map(repr, get_args(Format)))}; found {format!r}.")
    file = Path(path)
    make: dict[Format, Callable[[SavedPolicy], bytes]] = {
        "onnx": _onnx,
        "torchscript": _torchscript,
        "safetensors": _safetensors,
    }
    content = make[format](policy)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(file, content)
    except OSError as error:
        raise PolicyError(f"{file} cannot be written: {error.strerror or error}. Choose another path.") from error
    return file


def _safetensors(policy: SavedPolicy) -> bytes:
    import safetensors.numpy
    import safetensors.torch

    trainer, origin = policy.trainer, policy.origin
    flat = flat_tensors(module_tensors(trainer), policy_groups(trainer))
    description = json.loads(policy.description.to_json())
    description["weights"] = {name: value for name, value in vars(origin).items() if name not in ("file", "run")}
    metadata = {METADATA: json.dumps(description)}
    arrays = {name: np.asarray(v, order="C") for name, v in flat.items() if isinstance(v, np.ndarray)}
    if len(arrays) == len(flat):
        return safetensors.numpy.save(arrays, metadata)
    tensors = {name: value for name, value in flat.items() if not isinstance(value, np.ndarray)}
    return safetensors.torch.save(tensors, metadata)


Arrays: TypeAlias = "Sequence[np.ndarray]"


class _Graph(NamedTuple):
    """The inputs and outputs of a graph, in order, and the method of the trainer that it follows."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    method: str

    @classmethod
    def of(cls, policy: SavedPolicy) -> _Graph:
        if policy.is_recurrent:
            return cls(("observation", "state", "episode_start"), ("action", "next_state"), "get_action_from")
        return cls(("observation", "action_mask") if policy.uses_masks else ("observation",), ("action",), "get_action")

    def random_inputs(self, policy: SavedPolicy, count: int, seed: int) -> list[np.ndarray]:
        """Inputs of a batch of `count`, with masks that allow something and states of any episode."""
        rng = np.random.default_rng(seed)
        found = [random_observations(policy.observation_space, count, seed).astype(policy.observation_dtype)]
        if "action_mask" in self.inputs:
            parts = []
            for choices in mask_parts(policy.action_space):
                part = rng.random((count, choices)) < 0.5
                part[np.arange(count), rng.integers(choices, size=count)] = True
                parts.append(part)
            found.append(np.concatenate(parts, axis=1))
        if "state" in self.inputs:
            size = policy.initial_state(1).shape[1]
            found += [rng.uniform(-1.0, 1.0, (count, size)).astype(np.float32), rng.random(count) < 0.3]
        return found

    def expected(self, policy: SavedPolicy, inputs: Arrays) -> list[np.ndarray]:
        """The policy's results for these inputs."""
        observation, *further = inputs
        if policy.is_recurrent:
            state, episode_start = further
            return list(policy.predict_with_state(observation, state, episode_start))
        return [policy.predict(observation, action_masks=further[0] if further else None)]


def _traced(policy: SavedPolicy, graph: _Graph) -> tuple[Any, tuple[torch.Tensor, ...]]:
    """The policy as a TorchScript module, and an example of its inputs."""
    import torch

    trainer = policy.trainer.in_torch() if isinstance(policy.trainer, Trainer) else policy.trainer
    actions, is_box = policy.action_space, isinstance(policy.action_space, spaces.Box)
    dtype = torch.from_numpy(np.zeros(0, actions.dtype)).dtype
    first = torch.from_numpy(np.asarray(first_action(actions)))
    low, high = (
        (torch.from_numpy(actions.low), torch.from_numpy(actions.high))
        if isinstance(actions, spaces.Box)
        else (first, first)
    )

    moments = trainer.observation_moments if isinstance(trainer, Trainer) else None
    if moments is not None:
        mean, scale = (torch.from_numpy(part.astype(np.float32)) for part in (moments.mean, moments.scale))

    def as_seen(observation: torch.Tensor) -> torch.Tensor:
        inputs = observation if observation.dtype == torch.uint8 else observation.float()
        if moments is not None:
            inputs = ((inputs - mean) * scale).clamp(-OBSERVATION_CLIP, OBSERVATION_CLIP)
        return inputs

    def as_taken(found: torch.Tensor) -> torch.Tensor:
        if is_box:
            return torch.minimum(torch.maximum(found.to(dtype), low), high)
        return (found + first).to(dtype)

    class Acting(torch.nn.Module):
        """From raw observations to final actions; the trainer's networks are members, so that they are saved."""

        def __init__(self) -> None:
            super().__init__()
            members = {"trainer": trainer} if isinstance(trainer, torch.nn.Module) else modules_of(trainer)
            for name, module in members.items():
                self.add_module(name.replace(".", "_"), module)
            for name, value in attributes_of(trainer, ()).items():
                if is_kept_tensor(value):
                    self.register_buffer(name, value)

        def forward(self, observation: torch.Tensor) -> torch.Tensor:
            return as_taken(trainer.get_action(as_seen(observation)))

    class Masked(Acting):
        """The same of the actions that a mask allows."""

        def forward(self, observation: torch.Tensor, action_mask: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return as_taken(trainer.get_action(as_seen(observation), action_mask))  # type: ignore[call-arg]

    class Recurrent(Acting):
        """The same from a state on, and the next one."""

        def forward(  # type: ignore[override]
            self, observation: torch.Tensor, state: torch.Tensor, episode_start: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            assert isinstance(trainer, RecurrentTrainer)
            before = torch.where(episode_start.unsqueeze(1), initial, state)
            action, after = trainer.get_action_from(as_seen(observation), before)
            return as_taken(action), after

    kind = Acting
    if policy.is_recurrent:
        kind, initial = Recurrent, torch.from_numpy(policy.initial_state(1))
    elif policy.uses_masks:
        kind = Masked
    example = tuple(torch.from_numpy(given) for given in graph.random_inputs(policy, 2, seed=0))
    training = set_evaluation_mode(trainer)
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, of constants in the trace: the comparison finds wrong ones
            module: Any = torch.jit.trace(kind().eval(), example, check_trace=False)  # type: ignore[no-untyped-call]
            return module, example
    except Exception as error:  # a trainer's own code may do anything
        raise PolicyError(
            f"The policy of {policy.description.trainer.name} cannot be traced by torch: {_first_line(error)} "
            f"{graph.method} must be made of torch operations."
        ) from error
    finally:
        for trained in training:
            trained.training = True


def _first_line(error: Exception) -> str:
    """The error without what TorchScript and onnxruntime add on further lines."""
    return f"{(str(error).strip() or type(error).__name__).splitlines()[0].rstrip('.')}."


def _torchscript(policy: SavedPolicy) -> bytes:
    import io

    import torch

    graph = _Graph.of(policy)
    module, _ = _traced(policy, graph)
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that torch.export is newer: its files need the Python that wrote them
        torch.jit.save(torch.jit.freeze(module.eval()), buffer)
        buffer.seek(0)
        loaded: Any = torch.jit.load(buffer)  # type: ignore[no-untyped-call]

    def act(inputs: Arrays) -> list[np.ndarray]:
        with torch.no_grad():
            found = loaded(*map(torch.from_numpy, inputs))
        return [made.numpy() for made in (found if isinstance(found, tuple) else (found,))]

    _compare(policy, graph, act, "TorchScript")
    return buffer.getvalue()


def _onnx(policy: SavedPolicy) -> bytes:
    import io

    onnx = import_extra("onnx", "export", "An export to ONNX")
    runtime = import_extra("onnxruntime", "export", "An export to ONNX")
    import torch

    graph = _Graph.of(policy)
    module, example = _traced(policy, graph)
    buffer = io.BytesIO()
    axes = {name: {0: "batch"} for name in (*graph.inputs, *graph.outputs)}
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that this exporter is the older one; it needs no further package
            torch.onnx.export(
                module,
                example,
                buffer,  # type: ignore[arg-type]  # the older exporter writes into it
                dynamo=False,
                opset_version=_OPSET,
                input_names=graph.inputs,
                output_names=graph.outputs,
                dynamic_axes=axes,
            )
        content = buffer.getvalue()
        onnx.checker.check_model(onnx.load_from_string(content))
        options = runtime.SessionOptions()
        options.log_severity_level = 4  # its errors are raised, too
        session = runtime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # torch's, onnx's and onnxruntime's have no common base
        raise PolicyError(
            f"The policy of {policy.description.trainer.name} cannot be exported to ONNX: {_first_line(error)} "
            "Export it as TorchScript, or use operations that ONNX has."
        ) from error
    _compare(policy, graph, lambda given: session.run(None, dict(zip(graph.inputs, given, strict=True))), "ONNX")
    return content


def _compare(policy: SavedPolicy, graph: _Graph, act: Callable[[Arrays], Arrays], what: str) -> None:
    """Raise PolicyError unless `act` acts as `policy` does, whatever the size of the batch."""
    for seed, count in enumerate(_BATCHES, start=1):
        inputs = graph.random_inputs(policy, count, seed)
        expected = graph.expected(policy, inputs)
        try:
            found = act(inputs)
        except Exception as error:
            raise PolicyError(
                f"The {what} of {policy.description.trainer.name} does not take a batch of {count}: "
                f"{_first_line(error)} {graph.method} must not depend on the number of observations."
            ) from error
        pairs = list(zip(found, expected, strict=True))
        same = all(f.dtype == e.dtype and f.shape == e.shape for f, e in pairs)
        same = same and _close(policy, *pairs[0])
        if not same or not all(np.allclose(f, e, _TOLERANCE, _TOLERANCE) for f, e in pairs[1:]):
            raise PolicyError(
                f"The {what} of {policy.description.trainer.name} acts otherwise than the policy on {count} random "
                f"observations: its {graph.method} has decisions in Python, which a trace does not follow. Write them "
                "with torch operations, such as torch.where."
            )


def _close(policy: SavedPolicy, found: np.ndarray, expected: np.ndarray) -> bool:
    space = policy.action_space
    if not isinstance(space, spaces.Box):
        return float(np.mean(found != expected)) <= _TIES
    with np.errstate(over="ignore"):
        width = space.high - space.low
    width = np.where(np.isfinite(width), width, 1.0 + np.abs(expected))
    return bool(np.all(np.abs(found - expected) <= _TOLERANCE * width))
