"""A policy in torch for the observations of many actors at once; on a GPU, from CUDA graphs."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from pearl.actors.served_policy import RESULTS, Inference, inputs_of
from pearl.algorithms.on_policy import OnPolicyTrainer
from pearl.algorithms.trainer import SamplesActions, TrainerLike, modules_of, policy_tensors, set_evaluation_mode
from pearl.backends import support_for_torch
from pearl.error_place import described
from pearl.errors import TrainerError
from pearl.lazy_torch import torch
from pearl.learner.torch_learner import load_policy_weights
from pearl.spec import FieldSpec

if TYPE_CHECKING:
    from pearl.backends.torch_support import Graph, Graphs

logger = logging.getLogger("pearl.runtime")

Arrays: TypeAlias = Mapping[str, np.ndarray]

_INPUTS, _RESULTS = ("obs", "noise", "mask"), RESULTS[Inference.EXPLORE]


class PolicyInference:
    """Runs the policy of `trainer`, which is on `device`, for up to `rows` observations at once.

    `arrays` `(rows, *shape)` are those that `fields` describe, the fields of an `InferenceQueue` with rows: write the
    inputs, `run`, and read the results. On a GPU they are in pinned memory. Batches are filled up to a power of two,
    and the second of each size is recorded in a CUDA graph, with its copies. A policy that cannot be recorded, or whose
    methods are the user's, runs as it is written, which is logged once. `graphs` are those of `device`.
    """

    def __init__(
        self,
        trainer: TrainerLike,
        device: torch.device,
        fields: Sequence[FieldSpec],
        rows: int,
        graphs: Graphs | None = None,
    ) -> None:
        modules_of(trainer)  # in torch, where the networks of a built-in algorithm may be in arrays so far
        set_evaluation_mode(trainer)
        if wrong := {str(tensor.device) for tensor in policy_tensors(trainer) if tensor.device.type != device.type}:
            raise TrainerError(
                f"A policy server on {device} needs the policy's modules there; {type(trainer).__name__}(device="
                f"{str(device)!r}) has some on {', '.join(sorted(wrong))}. Have its constructor move them to `device`, "
                'or set policy_server="none".'
            )
        if graphs is None and (support := support_for_torch(device.type)) is not None:
            graphs = support.graphs(device)
        self._trainer, self._graphs, self._rows = trainer, graphs, rows
        self._shapes = {f.name: f.shape[1:] for f in fields}
        self._host = {f.name: self._on_host(f) for f in fields if f.name in (*_INPUTS, *_RESULTS)}
        self._inputs = {name: tensor for name, tensor in self._host.items() if name in _INPUTS}
        if graphs is not None:
            self._inputs = {name: torch.empty_like(t, device=graphs.device) for name, t in self._inputs.items()}
        self.arrays: Arrays = {name: tensor.numpy() for name, tensor in self._host.items()}
        self._weights: tuple[torch.Tensor, torch.Tensor] | None = None  # pinned, and on the device
        self._seen: set[object] = set()
        self._recorded: dict[object, Graph] = {}
        self._why_written = ""  # why nothing more is recorded

    def _on_host(self, field: FieldSpec) -> torch.Tensor:
        dtype, shape = torch.from_numpy(np.empty(0, field.dtype)).dtype, (self._rows, *field.shape[1:])
        if self._graphs is None:
            return torch.zeros(shape, dtype=dtype)
        pinned = self._graphs.pinned(math.prod(shape) * dtype.itemsize)
        return pinned.zero_().view(dtype).view(shape)

    def load_weights(self, weights: np.ndarray) -> None:
        """Copy a policy snapshot `(weight_count,)` float32."""
        if self._graphs is None:
            load_policy_weights(self._trainer, weights)
            return
        targets = policy_tensors(self._trainer)
        sizes = [target.numel() for target in targets]
        if weights.shape != (sum(sizes),):
            raise TrainerError(f"A snapshot of these weights has shape ({sum(sizes)},); found {weights.shape}.")
        if self._weights is None:
            pinned = self._graphs.pinned(weights.nbytes).view(torch.float32)
            self._weights = pinned, torch.empty_like(pinned, device=self._graphs.device)
        pinned, there = self._weights
        pinned.numpy()[:] = weights

        def copy() -> None:
            there.copy_(pinned, non_blocking=True)
            for target, part in zip(targets, torch.split(there, sizes), strict=True):
                target.copy_(part.view_as(target))

        self._do("weights", copy)

    def run(self, inference: Inference, rows: int, *, masked: bool = False) -> None:
        """Compute the results of the first `rows` rows of `arrays`; with `masked`, of the actions that they allow."""
        if self._graphs is None:
            with torch.inference_mode():
                self._compute(inference, rows, masked=masked)
            return
        method = self._method(inference)
        # The user's own code may draw numbers in Python, which a recording would repeat.
        if not str(method.__module__).startswith("pearl."):
            self._run_as_written(f"its {method.__name__} is its own")
        filled = rows if self._why_written else min(1 << (rows - 1).bit_length(), self._rows)
        self._do((inference, filled, masked), lambda: self._compute(inference, filled, masked=masked))

    def _compute(self, inference: Inference, rows: int, *, masked: bool) -> None:
        inputs = {name: self._input(name, rows) for name in inputs_of(inference, masked=masked)}
        if inference is Inference.SAMPLE:  # as the actions are shaped
            inputs["noise"] = inputs["noise"].view(rows, *self._shapes["action"])
        if masked:
            inputs["mask"] = inputs["mask"] != 0
        found = self._method(inference)(*inputs.values())
        for name, result in zip(RESULTS[inference], found if isinstance(found, tuple) else (found,), strict=True):
            self._host[name][:rows].copy_(result, non_blocking=True)

    def _input(self, name: str, rows: int) -> torch.Tensor:
        if self._graphs is not None:
            self._inputs[name][:rows].copy_(self._host[name][:rows], non_blocking=True)
        return self._inputs[name][:rows]

    def _method(self, inference: Inference) -> Callable[..., Any]:
        trainer = self._trainer
        if inference is Inference.ACT:
            return trainer.get_action
        if inference is Inference.SAMPLE:
            assert isinstance(trainer, SamplesActions)
            return trainer.sample_action
        assert isinstance(trainer, OnPolicyTrainer)
        return trainer.explore if inference is Inference.EXPLORE else trainer.values

    def _do(self, key: object, work: Callable[[], None]) -> None:
        """Do `work` on the GPU and wait for it: as it is written the first time, then recorded if it can be."""
        assert self._graphs is not None
        with self._graphs.main():
            with torch.no_grad():
                if key in self._seen and key not in self._recorded and not self._why_written:
                    self._record(key, work)
                self._seen.add(key)
                if key in self._recorded:
                    self._recorded[key].replay()
                else:
                    work()
            done = self._graphs.record()
        done.synchronize()

    def _record(self, key: object, work: Callable[[], None]) -> None:
        assert self._graphs is not None
        try:
            self._recorded[key], _ = self._graphs.capture(work)
        except Exception as error:  # a policy may do anything
            self._run_as_written(described(error))

    def _run_as_written(self, why: str) -> None:
        """Record nothing more."""
        if not self._why_written:
            self._why_written = why
            logger.warning("The policy of %s is served without CUDA graphs: %s.", type(self._trainer).__name__, why)
