"""The Learner on SYCL devices: the built-in algorithms on networks of linear layers, in a few launches per step.

Weights and the optimizer's state stay torch's own tensors, moved into memory that the host and the device share: torch
may take any step between two of its steps, and checkpoints see no difference.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
import torch

from pearl.algorithms.actor_critic import TwinCriticTrainer
from pearl.algorithms.batch import Batch
from pearl.algorithms.ddpg import DDPG
from pearl.algorithms.dqn import DQN
from pearl.algorithms.networks import TwinCritic
from pearl.algorithms.sac import SAC
from pearl.algorithms.td3 import TD3
from pearl.algorithms.trainer import concatenated, load_concatenated, policy_tensors
from pearl.devices.sycl import sycl_queue
from pearl.devices.sycl_runtime import sycl_runtime
from pearl.errors import TrainerError
from pearl.learner.flat import FlatParameters
from pearl.learner.native_optimizer import NativeOptimizer
from pearl.learner.native_plan import Op, PinnedWeights, UnsupportedError, read_operations
from pearl.learner.native_rules import make_rule, scale_arrays, settings_of
from pearl.learner.protocol import StepResult
from pearl.replay.sycl import SyclReplayManager
from pearl.replay.sycl_storage import SyclDataStorage

if TYPE_CHECKING:
    from pearl import _native, _sycl

_FLOAT = np.dtype(np.float32)
Built: TypeAlias = DQN | DDPG | TD3 | SAC


class SyclLearner:
    """Trains `trainer` on the SYCL device `device`, a selector of the device CSV.

    Sums are added up in another order than the trainer's own `update_policy` does; equal seeds give equal bits on one
    device. Raises TrainerError where `supports` says why not, DeviceError where the device cannot be used.
    """

    backend = "sycl"

    def __init__(self, trainer: object, *, device: str = "opencl:cpu") -> None:
        reason = self.supports(trainer)
        if reason is not None:
            raise TrainerError(
                f"The {self.backend} learner cannot train {type(trainer).__name__} (unsupported: {reason}). "
                "Use pearl.learner.torch_learner.TorchLearner, which trains any trainer."
            )
        assert isinstance(trainer, (DQN, DDPG, TD3, SAC))
        self.trainer = trainer
        self.device = device
        self.queue = sycl_queue(device)
        self._homes: dict[int, torch.Tensor] = {}
        self._parameters = [None if flat is None else self._moved(flat) for flat in _vectors(trainer)]
        self._policy = policy_tensors(trainer)
        self._settings: dict[str, Any] = {}
        self._kernel = self._make_kernel(trainer)
        flats = (flat for flat in _vectors(trainer) if flat is not None)
        self._weights = PinnedWeights(*flats, scalar=trainer.log_alpha if isinstance(trainer, SAC) else None)
        optimizers: list[tuple[str, object, torch.Tensor]]
        if isinstance(trainer, DQN):
            optimizers = [("optimizer", trainer.optimizer, trainer._q_flat.parameter)]
        else:
            optimizers = [
                ("critic_optimizer", trainer.critic_optimizer, trainer._critic_flat.parameter),
                ("actor_optimizer", trainer.actor_optimizer, trainer._actor_flat.parameter),
            ]
            if isinstance(trainer, SAC) and trainer.temperature is None:
                optimizers.append(("temperature_optimizer", trainer.temperature_optimizer, trainer.log_alpha))
        self._optimizers = [
            NativeOptimizer(*named, kernel=_OptimizerOnDevice(self._kernel, which), home=self._home)
            for which, named in enumerate(optimizers)
        ]

    @staticmethod
    def supports(trainer: object) -> str | None:
        """None if the sycl learner can train `trainer`; else one line that names what it cannot do."""
        try:
            make_rule(trainer, 1)
            check_more(cast("Built", trainer))
        except UnsupportedError as error:
            return str(error)
        return None

    @property
    def weight_count(self) -> int:
        """float32 scalars of the policy snapshot."""
        return sum(t.numel() for t in self._policy)

    def prepare(self) -> None:
        """Nothing: the device has its own threads."""

    def step(self, batch: Mapping[str, np.ndarray | torch.Tensor], weights: np.ndarray | torch.Tensor) -> StepResult:
        """One step; metrics are the mean absolute TD error, the loss and, where clipped, the gradients' norm.

        Columns are float32; actions of DQN are int64. Raises TrainerError for columns of another shape or dtype, for
        actions out of range, and where the loss or the gradients are not finite: then no weight has moved, unless the
        message says so. Raises DeviceError if the device fails.
        """
        columns = [self._array(name, batch[name]) for name in Batch._fields]
        importance = self._array("weights", weights)
        self.refresh()
        trainer = self.trainer
        moves_policy = not isinstance(trainer, DQN) and (trainer.gradient_steps + 1) % self._policy_delay == 0
        priorities, found = self._kernel.step(columns, importance, trainer.gradient_steps)
        trainer.gradient_steps += 1
        metrics = {"td_error": found["td_error"], "loss": found["loss"]}
        if trainer.max_grad_norm > 0:
            metrics["gradient_norm"] = found["gradient_norm"]
            if moves_policy:
                metrics["actor_gradient_norm"] = found["actor_gradient_norm"]
        if isinstance(trainer, SAC):
            metrics["temperature"] = math.exp(float(trainer.log_alpha.detach()))
        return StepResult(priorities, metrics["td_error"], metrics)

    def start_loop(
        self,
        replay: object,
        storage: object,
        batch_size: int,
        queues: tuple[_native.SlotQueue, _native.SlotQueue, _native.Snapshot],
        weight_sync_interval: int,
    ) -> _sycl.TrainingLoop | None:
        """Make setting 2's loop on the device, with the trainer's settings of now; None if a part is elsewhere.

        `queues` take grants, answers and the policy, as `pearl.runtime.workers` defines them. Raises TrainerError for
        what does not fit.
        """
        if not isinstance(replay, SyclReplayManager) or not isinstance(storage, SyclDataStorage):
            return None
        if replay.queue is not self.queue or storage.queue is not self.queue:
            return None
        if tuple(f.name for f in storage.spec.fields) != Batch._fields:
            return None
        self.refresh()
        policy = [t.detach().numpy().reshape(-1) for t in self._policy]
        loop: _sycl.TrainingLoop = sycl_runtime().module.TrainingLoop(
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

    def write_weights(self, out: np.ndarray) -> None:
        """Copy the policy snapshot to `out` `(weight_count,)` float32."""
        concatenated(self._policy, out=torch.from_numpy(out))

    def load_weights(self, weights: np.ndarray) -> None:
        """Take a policy snapshot `(weight_count,)` float32."""
        load_concatenated(weights, self._policy)

    def refresh(self) -> None:
        """Take over the trainer's settings and its optimizers' state, which schedules and checkpoints change."""
        self._weights.require_in_place()
        settings = _settings(self.trainer)
        if settings != self._settings:
            self._kernel.set(**settings)
            self._settings = settings
        for optimizer in self._optimizers:
            optimizer.refresh()

    @property
    def _policy_delay(self) -> int:
        return self.trainer.policy_delay if isinstance(self.trainer, TD3) else 1

    def _make_kernel(self, trainer: Built) -> Any:
        scales, log_alpha = np.zeros(0, np.float32), None
        actions = 1
        if not isinstance(trainer, DQN):
            critic = trainer.critic
            scales = np.concatenate([*scale_arrays(critic.observation_scale), *scale_arrays(critic.action_scale)])
            actions = trainer.action_size
        if isinstance(trainer, SAC):
            trainer.log_alpha.data = self._home(trainer.log_alpha.data)
            log_alpha = trainer.log_alpha.detach().numpy().reshape(1)
        networks = networks_of(trainer)
        return self._make(
            self.queue,
            not isinstance(trainer, DQN),
            networks,
            self._parameters,
            scales,
            networks[0][0],
            actions,
            log_alpha,
        )

    def _make(self, *arguments: Any) -> Any:
        """The kernels, of the arguments that every learner on a SYCL device takes."""
        return sycl_runtime().module.Learner(*arguments)

    def _moved(self, flat: FlatParameters) -> np.ndarray:
        memory = self.queue.shared_floats(flat.parameter.numel())
        flat.move_to(torch.from_numpy(memory))
        return memory

    def _home(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor` where the device sees it: itself, if it is there already."""
        if tensor.data_ptr() in self._homes:
            return tensor
        memory = torch.from_numpy(self.queue.shared_floats(tensor.numel()))
        memory.copy_(tensor.detach().reshape(-1))
        self._homes[memory.data_ptr()] = memory
        return memory.view(tensor.shape)

    def _array(self, name: str, column: np.ndarray | torch.Tensor) -> np.ndarray:
        """The column as the kernels read it."""
        whole = name == "action" and isinstance(self.trainer, DQN)
        wanted = np.dtype(np.int64) if whole else _FLOAT
        found = column.detach().numpy() if isinstance(column, torch.Tensor) else np.asarray(column)
        if found.dtype != wanted:
            raise TrainerError(f"Column {name!r} must have dtype {wanted}; found {found.dtype}. Convert it first.")
        return found if found.flags.c_contiguous else np.ascontiguousarray(found)


class _OptimizerOnDevice:
    """One of a learner's optimizers, as `NativeOptimizer` sets it."""

    def __init__(self, kernel: _sycl.Learner, which: int) -> None:
        self.set_adam = partial(kernel.set_adam, which)
        self._set_sgd = partial(kernel.set_sgd, which)

    def set_sgd(self, _parameters: int, *settings: Any) -> None:
        self._set_sgd(*settings)


def networks_of(trainer: Built) -> list[tuple[int, list[Op]]]:
    """Inputs and operations of each network: that of DQN, or the actor's and then the critics'."""
    if isinstance(trainer, DQN):
        return [read_operations("q", trainer.q, trainer.input_shape, trainer._q_flat)]
    actor, critic = trainer.actor, trainer.critic
    observations = actor.observation_scale.center.numel()
    inputs = observations + trainer.action_size
    critics = (critic.first, critic.second) if isinstance(critic, TwinCritic) else (critic.network,)
    return [
        read_operations("actor", actor.network, (observations,), trainer._actor_flat),
        *(read_operations("critic", c, (inputs,), trainer._critic_flat) for c in critics),
    ]


def _vectors(trainer: Built) -> tuple[FlatParameters | None, ...]:
    """The vectors of parameters: what is trained, its target, the actor, its target."""
    if isinstance(trainer, DQN):
        return trainer._q_flat, trainer._target_flat, None, None
    target_actor = None if isinstance(trainer, SAC) else trainer._target_actor_flat
    return trainer._critic_flat, trainer._target_critic_flat, trainer._actor_flat, target_actor


def _settings(trainer: Built) -> dict[str, Any]:
    if isinstance(trainer, DQN):
        return {
            "double_q": bool(trainer.double),
            "max_grad_norm": float(trainer.max_grad_norm),
            "tau": float(trainer.tau),
            "target_interval": int(trainer.target_update_interval),
        }
    names = ("stochastic", "saturation_penalty", "target_noise", "noise_clip", "log_std_low", "log_std_high")
    settings: dict[str, Any] = dict(
        zip((*names, "target_entropy", "tau", "max_grad_norm"), settings_of(trainer), strict=True)
    )
    if isinstance(trainer, TD3):
        settings["policy_delay"] = trainer.policy_delay
    if not isinstance(trainer, DDPG):
        settings["noise_seed"] = int(trainer.noise_seed)
    return settings


def check_more(trainer: Built) -> None:
    """What the device cannot do beyond what the native learner cannot."""
    for _, operations in networks_of(trainer):
        offsets = [offset for operation in operations for offset in operation[4:6] if offset >= 0]
        if len(set(offsets)) < len(offsets):
            raise UnsupportedError("layers that share their parameters")
    if isinstance(trainer, TwinCriticTrainer):
        own = inspect.getattr_static(trainer, "draw_noise")
        if own is not inspect.getattr_static(TwinCriticTrainer, "draw_noise"):
            raise UnsupportedError(f"{type(trainer).__name__} overrides draw_noise")
