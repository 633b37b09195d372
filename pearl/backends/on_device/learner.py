"""The Learner on parallel devices: the built-in algorithms on networks of linear layers, in a few launches per step.

Weights and the optimizer's state remain torch's tensors, moved into memory that host and device share. So torch may
make any step in between, and checkpoints do not change.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from pearl.algorithms.batch import Batch
from pearl.algorithms.update_rule import AnyParameters, RuleStep, Scalars, UpdateRule
from pearl.backends.on_device.replay import ReplayManagerOnDevice
from pearl.backends.on_device.storage import DataStorageOnDevice
from pearl.errors import TrainerError
from pearl.lazy_torch import torch
from pearl.learner.flat import FlatParameters
from pearl.learner.native_optimizer import NativeOptimizer
from pearl.learner.native_plan import Op, UnsupportedError, kernel_column, read_operations
from pearl.learner.native_rules import known_step, make_rule, pinned, scale_arrays
from pearl.learner.protocol import StepResult
from pearl.learner.trainer_learner import TrainerLearner

if TYPE_CHECKING:
    from pearl import _device
    from pearl.backends.on_device import OpenDevice
    from pearl.learner.protocol import LoopQueues

_FLOAT = np.dtype(np.float32)


class SharedMemoryLearner(TrainerLearner[Any]):
    """Trains `trainer` by kernels on the device `device`: by launches, or by a pipeline.

    The order of summation differs from the trainer's own `update_policy`; on one device, equal seeds give equal bits.
    Raises TrainerError if `supports` gives a reason, DeviceError if the device cannot be used.
    """

    def __init__(self, trainer: object, *, device: str) -> None:
        reason = self.supports(trainer)
        if reason is not None:
            raise TrainerError(
                f"The {self.backend} learner cannot train {type(trainer).__name__} (unsupported: {reason}). "
                "Use pearl.learner.torch_learner.TorchLearner, which trains any trainer."
            )
        _, rule, self._step = known_step(trainer)
        self.device = device
        self.queue, self._module = self._open(device)
        self._homes: dict[int, torch.Tensor] = {}
        self._parameters = [None if flat is None else self._moved(flat) for flat in self._step.vectors]
        super().__init__(trainer)  # after the move: it keeps the policy's tensors
        self._settings: dict[str, Any] = {}
        self._scalars = self._step.scalars()
        self._kernel = self._make_kernel(rule)
        self._weights = pinned(self._step)
        self._optimizers = [
            NativeOptimizer(*named, kernel=OptimizerOnDevice(self._kernel, which), home=self._home)
            for which, named in enumerate(self._step.optimizers)
        ]

    @staticmethod
    def supports(trainer: object) -> str | None:
        """None if the kernels can train `trainer`; else one line that says what they do not support."""
        try:
            make_rule(trainer, 1)
            _check_more(*known_step(trainer)[1:])
        except UnsupportedError as error:
            return str(error)
        return None

    def step(self, batch: Mapping[str, np.ndarray | torch.Tensor], weights: np.ndarray | torch.Tensor) -> StepResult:
        """One step; metrics are the mean absolute TD error, the loss and, if clipped, the norm of the gradients.

        Columns are float32; actions of DQN are int64. Raises TrainerError for columns of another shape or dtype, for
        actions out of range, and if the loss or the gradients are not finite: then no weight has moved, unless the
        message says so. Raises DeviceError if the device fails.
        """
        names = Batch._fields
        columns = [self._array(*each) for each in zip(names, self.columns_of(batch, names), strict=True)]
        importance = self._array("weights", weights)
        self.refresh()
        trainer = self.trainer
        scalars, step = self._scalars, self._step
        moves_policy = step.actor is not None and (trainer.gradient_steps + 1) % scalars.policy_delay == 0
        priorities, found = self._kernel.step(columns, importance, trainer.gradient_steps)
        trainer.gradient_steps += 1
        metrics = {"td_error": found["td_error"], "loss": found["loss"]}
        if scalars.max_grad_norm > 0:
            metrics["gradient_norm"] = found["gradient_norm"]
            if moves_policy:
                metrics["actor_gradient_norm"] = found["actor_gradient_norm"]
        if step.temperature is not None:
            metrics["temperature"] = math.exp(step.temperature.log_alpha.item())
        return StepResult(priorities, metrics["td_error"], metrics)

    def refresh(self) -> None:
        """Read the trainer's settings and its optimizers' state, which schedules and checkpoints change."""
        self._weights.require_in_place()
        self._scalars = self._step.scalars()
        settings = _settings(self._scalars, self._step)
        if settings != self._settings:
            self._kernel.set(**settings)
            self._settings = settings
        for optimizer in self._optimizers:
            optimizer.refresh()

    def _make_kernel(self, rule: UpdateRule) -> Any:
        step = self._step
        scales, log_alpha = np.zeros(0, np.float32), None
        actions = 1
        if step.observation_scale is not None and step.action_scale is not None:
            scales = np.concatenate([*scale_arrays(step.observation_scale), *scale_arrays(step.action_scale)])
            actions = step.action_scale.center.numel()
        if step.temperature is not None:
            alpha = step.temperature.log_alpha
            assert isinstance(alpha, torch.Tensor)
            alpha.data = self._home(alpha.data)
            log_alpha = alpha.detach().numpy().reshape(1)
        networks = networks_of(rule, step)
        return self._make(
            self.queue,
            rule.actor is not None,
            networks,
            self._parameters,
            scales,
            networks[0][0],
            actions,
            log_alpha,
        )

    @abc.abstractmethod
    def _open(self, device: str) -> OpenDevice:
        """The device with this name; DeviceError if it cannot be used."""

    @abc.abstractmethod
    def _make(self, *arguments: Any) -> Any:
        """Make the kernels; all learners on parallel devices take the same arguments."""

    def _moved(self, flat: AnyParameters) -> np.ndarray:
        assert isinstance(flat, FlatParameters)
        memory = self.queue.shared_floats(flat.parameter.numel())
        flat.move_to(torch.from_numpy(memory))
        return memory

    def _home(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor` in shared memory: a copy, unless it is there already."""
        if tensor.data_ptr() in self._homes:
            return tensor
        memory = torch.from_numpy(self.queue.shared_floats(tensor.numel()))
        memory.copy_(tensor.detach().reshape(-1))
        self._homes[memory.data_ptr()] = memory
        return memory.view(tensor.shape)

    def _array(self, name: str, column: np.ndarray | torch.Tensor) -> np.ndarray:
        """The column as the kernels read it."""
        whole = name == "action" and self._step.actor is None
        if isinstance(column, torch.Tensor):
            column = column.cpu()
        return kernel_column(name, column, np.dtype(np.int64) if whole else _FLOAT)


class LearnerOnDevice(SharedMemoryLearner):
    """Trains `trainer` in a few launches a step."""

    def fused_loop(
        self, replay: object, storage: object, batch_size: int, queues: LoopQueues, weight_sync_interval: int
    ) -> _device.TrainingLoop | None:
        """Make the loop with the trainer's current settings; TrainerError if something does not fit."""
        if not isinstance(replay, ReplayManagerOnDevice) or not isinstance(storage, DataStorageOnDevice):
            return None
        if replay.queue is not self.queue or storage.queue is not self.queue:
            return None
        if tuple(f.name for f in storage.spec.fields) != Batch._fields:
            return None
        for field in storage.spec.fields:
            self._array(field.name, np.empty(0, field.dtype))  # the kernels know bytes only
        self.refresh()
        policy = [t.detach().numpy().reshape(-1) for t in self._policy]
        loop: _device.TrainingLoop = self._module.TrainingLoop(
            self._kernel,
            replay.kernel,
            storage.kernel,
            batch_size,
            *queues,
            policy,
            weight_sync_interval,
            self.trainer.step_count,
        )
        return loop

    def _make(self, *arguments: Any) -> Any:
        return self._module.Learner(*arguments)


class OptimizerOnDevice:
    """One of a learner's optimizers, with the methods of `_native.Optimizer` that `NativeOptimizer` calls."""

    def __init__(self, kernel: _device.Learner, which: int) -> None:
        self.set_adam = partial(kernel.set_adam, which)
        self._set_sgd = partial(kernel.set_sgd, which)

    def set_sgd(self, _parameters: int, *settings: Any) -> None:
        """Drop the number of parameters, which the device knows."""
        self._set_sgd(*settings)


def networks_of(rule: UpdateRule, step: RuleStep) -> list[tuple[int, list[Op]]]:
    """Inputs and operations of each network: the actor (if there is one), then the critics."""
    found = []
    for network in rule.networks:
        moved = step.actor if network is rule.actor and step.actor is not None else step.critics
        found.append(read_operations(network.name, network.in_torch, network.input_shape, moved.parameters))
    return found


def _settings(scalars: Scalars, step: RuleStep) -> dict[str, Any]:
    common = {"max_grad_norm": scalars.max_grad_norm, "tau": scalars.tau}
    if step.actor is None:
        return {**common, "double_q": scalars.double, "target_interval": scalars.target_interval}
    low, high = scalars.log_std_bounds
    return {
        **common,
        "stochastic": step.temperature is not None,
        "saturation_penalty": scalars.saturation_penalty,
        "target_noise": scalars.target_noise,
        "noise_clip": scalars.noise_clip,
        "log_std_low": low,
        "log_std_high": high,
        "target_entropy": scalars.target_entropy,
        "policy_delay": scalars.policy_delay,
        "noise_seed": 0 if step.noise is None else int(step.noise.seed.item()),
    }


def _check_more(rule: UpdateRule, step: RuleStep) -> None:
    """Raise UnsupportedError for what the native learner can do but the device cannot."""
    if rule.ensemble:
        raise UnsupportedError("an ensemble of critics")
    for _, operations in networks_of(rule, step):
        offsets = [offset for operation in operations for offset in operation[4:6] if offset >= 0]
        if len(set(offsets)) < len(offsets):
            raise UnsupportedError("layers that share their parameters")
    if step.noise is not None and step.noise.departure is not None:
        raise UnsupportedError(step.noise.departure)
