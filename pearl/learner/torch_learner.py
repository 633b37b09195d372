"""The Learner on PyTorch: any trainer, CPU or CUDA, with sub-batches over streams (paper, Sec. V-B1)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from pearl import _native
from pearl.algorithms.arrays import ArrayModule
from pearl.algorithms.batch import Batch
from pearl.algorithms.trainer import (
    Trainer,
    TrainerLike,
    arrays_of,
    batch_type_of,
    has_own_update,
    joined_priorities,
    load_concatenated,
    policy_tensors,
    splits_batches,
)
from pearl.errors import ConfigurationError, TrainerError
from pearl.lazy_torch import torch
from pearl.learner.protocol import StepResult
from pearl.learner.trainer_learner import TrainerLearner, require_numbers

if TYPE_CHECKING:
    from pearl.backends.torch_support import Around, DeviceSteps
    from pearl.learner.protocol import FusedIteration

_CALLS_US = 40.0  # of a step, for each tensor that it trains; about 100 were measured on an AMD EPYC


def least_step_us(trainer: object) -> float:
    """Microseconds that torch's calls for a step take at least on a CPU, however small the networks; 0: not known."""
    arrays = arrays_of(trainer)
    if arrays is None:
        return 0.0
    modules = (part for name, part in arrays.items() if isinstance(part, ArrayModule) and not name.startswith("target"))
    return _CALLS_US * sum(len(module.named_parameters()) for module in modules)


class TorchLearner(TrainerLearner[TrainerLike]):
    """Trains `trainer` on `device`.

    `threads` is torch's intra-operator parallelism on the CPU. `sub_batches` splits a batch; the gradients are added
    before the weights are updated. On CUDA each sub-batch has a stream, so that transfers and computations overlap, and
    with `capture`, steps are recorded in CUDA graphs and replayed (docs/cuda.md). With `keep_gradients`, each step
    returns the gradients of all optimizers that are attributes of the trainer; such steps are not recorded.
    """

    backend = "torch"

    def __init__(
        self,
        trainer: TrainerLike,
        *,
        device: str = "cpu",
        threads: int = 1,
        sub_batches: int = 1,
        keep_gradients: bool = False,
        capture: bool = True,
    ) -> None:
        if sub_batches < 1 or threads < 1:
            raise ConfigurationError(f"threads and sub_batches must be at least 1; found {threads}, {sub_batches}.")
        if sub_batches > 1 and has_own_update(type(trainer)):
            raise ConfigurationError(
                f"{type(trainer).__name__} defines its own update_policy, which trains on whole batches: "
                "sub_batches must be 1. Derive from pearl.algorithms.Trainer and define its phases to split them."
            )
        if sub_batches > 1 and not splits_batches(type(trainer)):
            raise ConfigurationError(
                f"{type(trainer).__name__} normalises whole batches: sub_batches must be 1; found {sub_batches}."
            )
        _native.keep_freed_memory()
        super().__init__(trainer)
        self.device = device
        self.threads = threads
        self.sub_batches = sub_batches
        self._torch_device = torch.device(device)
        self._batch = batch_type_of(trainer)
        self._gradients: list[torch.Tensor] | None = [] if keep_gradients else None
        for value in vars(trainer).values() if keep_gradients else ():
            if isinstance(value, torch.optim.Optimizer):
                value.register_step_pre_hook(self._keep_gradients)
        from pearl.backends import support_for_torch  # which import this module's class

        self._support = support_for_torch(self._torch_device.type)
        self._device_steps: DeviceSteps | None = None
        if self._support is not None:
            captures = capture and not keep_gradients
            self._device_steps = self._support.steps(
                trainer, self._batch, self._torch_device, sub_batches=sub_batches, capture=captures
            )

    least_step_us = staticmethod(least_step_us)

    def prepare(self) -> None:
        """Set this thread's core count."""
        torch.set_num_threads(self.threads)

    def step(self, batch: Mapping[str, np.ndarray | torch.Tensor], weights: np.ndarray | torch.Tensor) -> StepResult:
        """One step; its metrics are the mean absolute TD error and the trainer's own.

        Raises TrainerError for a batch that is empty or lacks a column.
        """
        columns = [_tensor(column) for column in self.columns_of(batch, self._batch._fields)]
        result = self.step_on_device(columns, _tensor(weights)).to("cpu", torch.float32).numpy()
        td_error = mean_td_error(result)
        own = self.trainer.own_metrics() if isinstance(self.trainer, Trainer) else {}
        gradients = None
        if self._gradients is not None:
            gradients = torch.cat(self._gradients or [torch.empty(0)]).numpy()
            self._gradients.clear()
        return StepResult(result, td_error, {"td_error": td_error, **own}, gradients)

    def step_on_device(
        self, columns: Sequence[torch.Tensor], weights: torch.Tensor, around: Around | None = None
    ) -> torch.Tensor:
        """A step on `columns` with `weights`; the priorities `(batch,)`, for which nothing waits.

        `around` is the rest of an iteration, on a device. Raises TrainerError for priorities of another shape.
        """
        if around is not None:
            assert self._device_steps is not None, "steps on the host stand alone"
            after = around.after
            around = replace(around, after=lambda launch, found: after(launch, self._checked(found, len(weights))))
        if self._device_steps is not None:
            priorities = self._device_steps.step(columns, weights, around)
        elif self.sub_batches > 1:
            priorities = self._step_in_parts(self._batch(*columns), weights)
        else:
            priorities = self.trainer.update_policy(self._batch(*columns), weights)
        return self._checked(priorities, len(weights))

    def _checked(self, priorities: torch.Tensor, count: int) -> torch.Tensor:
        is_tensor = isinstance(priorities, torch.Tensor)
        if not is_tensor or tuple(priorities.shape) != (count,):
            found = f"shape {tuple(priorities.shape)}" if is_tensor else f"a {type(priorities).__name__}"
            column = is_tensor and priorities.numel() == count
            raise TrainerError(
                f"{type(self.trainer).__name__}.update_policy() must return a tensor of shape ({count},), a "
                f"priority for each transition; found {found}."
                # With targets of shape (batch,), values of shape (batch, 1) give errors of shape (batch, batch).
                + (" Return priorities.squeeze(1), and look for other values of that shape." if column else "")
            )
        return priorities.detach()

    def write_weights(self, out: np.ndarray) -> None:
        """The policy that the trainer has now; TrainerError if it holds NaN."""
        self._follow_trainer()
        super().write_weights(out)
        require_numbers(out)

    def fused_iteration(self, replay: object, storage: object, batch_size: int) -> FusedIteration | None:
        """Iterations whose batches stay on the device; None if `replay` or `storage` is elsewhere."""
        if self._support is None or self._device_steps is None or self._gradients is not None:
            return None
        device, fields = self._device_steps.device, self._batch._fields
        return self._support.iteration(device, self.step_on_device, fields, replay, storage, batch_size)

    def _keep_gradients(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        assert self._gradients is not None
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        self._gradients += [p.grad.detach().reshape(-1).to("cpu", torch.float32, copy=True) for p in parameters]

    def _step_in_parts(self, batch: Batch, weights: torch.Tensor) -> torch.Tensor:
        trainer = self.trainer
        assert isinstance(trainer, Trainer)
        rows = len(weights)
        parts = parts_of(rows, self.sub_batches)
        priorities: list[torch.Tensor] = []
        for phase in trainer.phases:
            computed = [phase.compute(batch.rows(a, b), weights[a:b], rows) for a, b in parts]
            phase.apply()
            priorities = [c for c in computed if c is not None] or priorities
        trainer.end_of_step()
        return joined_priorities(trainer, priorities)


def load_policy_weights(trainer: TrainerLike, weights: np.ndarray) -> None:
    """Copy a policy snapshot `(weight_count,)` float32 into the trainer's own modules."""
    load_concatenated(weights, policy_tensors(trainer))


def parts_of(rows: int, count: int) -> list[tuple[int, int]]:
    """Beginning and end of each of `count` parts of a batch of `rows`, but for those that are empty."""
    edges = [rows * k // count for k in range(count + 1)]
    return [(a, b) for a, b in itertools.pairwise(edges) if b > a]


def mean_td_error(priorities: np.ndarray) -> float:
    """The mean of priorities `(batch,)`; TrainerError if it is not finite."""
    mean = float(priorities.mean())
    if not math.isfinite(mean):
        wrong = int((~np.isfinite(priorities)).sum())
        raise TrainerError(
            f"The training step diverged: {wrong} of {len(priorities)} priorities are not finite. Look at the batch "
            "for NaN or huge observations and rewards; a smaller learning rate or max_grad_norm may help. Do not use "
            "these weights: --resume continues from the last checkpoint."
        )
    return mean


def _tensor(column: np.ndarray | torch.Tensor) -> torch.Tensor:
    return column if isinstance(column, torch.Tensor) else torch.from_numpy(column)
