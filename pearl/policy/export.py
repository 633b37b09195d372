"""Exports a saved policy: ONNX and TorchScript from raw observations to final actions, or its weights in one file.

What is exported is compared with `SavedPolicy.predict` on random observations before it is left in place.
"""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import numpy as np
from gymnasium import spaces

from pearl.actors.actor import first_action
from pearl.algorithms.trainer import Trainer, modules_of, set_evaluation_mode
from pearl.atomic_file import write_bytes
from pearl.errors import PolicyError
from pearl.extras import import_extra
from pearl.moments import OBSERVATION_CLIP
from pearl.policy.loading import METADATA
from pearl.policy.saved import SavedPolicy
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

    "onnx" and "torchscript" map `observation` `(batch, *obs)`, in the environment's dtype, to `action`
    `(batch, *action)`, as `predict` does with deterministic actions: normalisation, scaling, `tanh` and argmax are in
    the graph, and the batch may have any size. "safetensors" holds the weights that acting needs, and the policy's
    description as metadata: `pearl.load_policy` reads it.

    Raises PolicyError if the policy cannot be traced, or acts otherwise than `predict` once exported;
    MissingExtraError if `onnx` and `onnxruntime` are missing.
    """
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


def _traced(policy: SavedPolicy) -> tuple[Any, torch.Tensor]:
    """The policy as a TorchScript module, and an example of its input."""
    import torch

    if policy.uses_masks:
        raise PolicyError(
            f"The policy of {policy.env} chooses by action masks, which graphs of ONNX and TorchScript do not take. "
            "Export it as safetensors, and pass the masks to predict."
        )

    if policy.is_recurrent:
        raise PolicyError(
            f"The policy of {policy.env} is recurrent; graphs of ONNX and TorchScript without a state are all that is "
            "exported. Export it as safetensors, and call predict_with_state."
        )

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

    class Acting(torch.nn.Module):
        """From raw observations to final actions; the trainer's networks are members, so that they are saved."""

        def __init__(self) -> None:
            super().__init__()
            for name, module in modules_of(trainer).items():
                self.add_module(name, module)

        def forward(self, observation: torch.Tensor) -> torch.Tensor:
            inputs = observation if observation.dtype == torch.uint8 else observation.float()
            if moments is not None:
                inputs = ((inputs - mean) * scale).clamp(-OBSERVATION_CLIP, OBSERVATION_CLIP)
            found = trainer.get_action(inputs)
            if is_box:
                return torch.minimum(torch.maximum(found.to(dtype), low), high)
            return (found + first).to(dtype)

    example = torch.from_numpy(_random_observations(policy, 2, seed=0))
    training = set_evaluation_mode(trainer)
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, of constants in the trace: the comparison finds wrong ones
            module: Any = torch.jit.trace(Acting().eval(), (example,), check_trace=False)  # type: ignore[no-untyped-call]
            return module, example
    except Exception as error:  # a trainer's own code may do anything
        raise PolicyError(
            f"The policy of {policy.description.trainer.name} cannot be traced by torch: {_first_line(error)} "
            "get_action must be made of torch operations."
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

    module, _ = _traced(policy)
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that torch.export is newer: its files need the Python that wrote them
        torch.jit.save(torch.jit.freeze(module.eval()), buffer)
        buffer.seek(0)
        loaded: Any = torch.jit.load(buffer)  # type: ignore[no-untyped-call]

    def act(obs: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            found: np.ndarray = loaded(torch.from_numpy(obs)).numpy()
            return found

    _compare(policy, act, "TorchScript")
    return buffer.getvalue()


def _onnx(policy: SavedPolicy) -> bytes:
    import io

    onnx = import_extra("onnx", "export", "An export to ONNX")
    runtime = import_extra("onnxruntime", "export", "An export to ONNX")
    import torch

    module, example = _traced(policy)
    buffer = io.BytesIO()
    axes = {"observation": {0: "batch"}, "action": {0: "batch"}}
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that this exporter is the older one; it needs no further package
            torch.onnx.export(
                module,
                (example,),
                buffer,  # type: ignore[arg-type]  # the older exporter writes into it
                dynamo=False,
                opset_version=_OPSET,
                input_names=["observation"],
                output_names=["action"],
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
    _compare(policy, lambda obs: session.run(None, {"observation": obs})[0], "ONNX")
    return content


def _random_observations(policy: SavedPolicy, count: int, seed: int) -> np.ndarray:
    """Observations of the space; unbounded elements are normal, so that normalised networks see common values."""
    space = copy.deepcopy(policy.observation_space)
    space.seed(seed)
    return np.stack([np.asarray(space.sample()) for _ in range(count)]).astype(space.dtype)


def _compare(policy: SavedPolicy, act: Callable[[np.ndarray], np.ndarray], what: str) -> None:
    """Raise PolicyError unless `act` acts as `policy` does, whatever the size of the batch."""
    for seed, count in enumerate(_BATCHES, start=1):
        obs = _random_observations(policy, count, seed)
        expected = policy.predict(obs)
        try:
            found = act(obs)
        except Exception as error:
            raise PolicyError(
                f"The {what} of {policy.description.trainer.name} does not take a batch of {count}: "
                f"{_first_line(error)} get_action must not depend on the number of observations."
            ) from error
        same = found.dtype == expected.dtype and found.shape == expected.shape and _close(policy, found, expected)
        if not same:
            raise PolicyError(
                f"The {what} of {policy.description.trainer.name} acts otherwise than the policy on {count} random "
                "observations: its get_action has decisions in Python, which a trace does not follow. Write them with "
                "torch operations, such as torch.where."
            )


def _close(policy: SavedPolicy, found: np.ndarray, expected: np.ndarray) -> bool:
    space = policy.action_space
    if not isinstance(space, spaces.Box):
        return float(np.mean(found != expected)) <= _TIES
    width = np.where(np.isfinite(space.high - space.low), space.high - space.low, 1.0 + np.abs(expected))
    return bool(np.all(np.abs(found - expected) <= _TOLERANCE * width))
