"""The Learner in C++: the built-in algorithms on networks of linear layers, fused, on the CPU.

It trains the torch module's own weights and the torch optimizer's own state in place: torch may take any step between
two of its steps, and checkpoints see no difference.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
import torch

from pearl import _native
from pearl.algorithms.dqn import DQN
from pearl.algorithms.trainer import policy_tensors
from pearl.errors import ConfigurationError, TrainerError
from pearl.learner.native_optimizer import NativeOptimizer
from pearl.learner.native_plan import (
    UnsupportedError,
    check_same_structure,
    check_update_rule,
    read_network,
    weights_of,
)
from pearl.learner.protocol import StepResult

_COLUMNS = {
    "obs": np.float32,
    "action": np.int64,
    "reward": np.float32,
    "next_obs": np.float32,
    "discount": np.float32,
    "weights": np.float32,
}


class _Rule(Protocol):
    """One algorithm's update rule."""

    def step(self, columns: Mapping[str, np.ndarray]) -> tuple[np.ndarray, dict[str, float]]:
        """Train on a batch; returns priorities and metrics."""


class _DqnRule:
    def __init__(self, trainer: DQN, threads: int) -> None:
        check_update_rule(trainer, DQN, ("update_policy", "end_of_step", "phases", "_compute", "_apply", "finish_step"))
        online, target = trainer._q_flat, trainer._target_flat
        network = read_network("q", trainer.q, trainer.input_shape, online)
        check_same_structure("q", trainer.q, online, trainer.target_q, target)
        self._trainer = trainer
        self._optimizer = NativeOptimizer("optimizer", trainer.optimizer, online)
        self._native = _native.DqnLearner(network, weights_of(online), weights_of(target), threads)
        self._settings: tuple[object, ...] = ()

    def step(self, columns: Mapping[str, np.ndarray]) -> tuple[np.ndarray, dict[str, float]]:
        trainer = self._trainer
        settings = (
            bool(trainer.double),
            float(trainer.max_grad_norm),
            float(trainer.tau),
            int(trainer.target_update_interval),
        )
        if settings != self._settings:
            double, max_grad_norm, tau, interval = settings
            self._native.set(double, "huber", max_grad_norm, tau, interval)
            self._settings = settings
        self._optimizer.refresh()
        priorities, loss, td_error, norm = self._native.step(
            columns["obs"],
            columns["action"],
            columns["reward"],
            columns["next_obs"],
            columns["discount"],
            columns["weights"],
            trainer.gradient_steps + 1,
            self._optimizer.native,
        )
        trainer.gradient_steps += 1
        return priorities, {"td_error": td_error, "loss": loss, "gradient_norm": norm}


def _rule(trainer: object, threads: int) -> _Rule:
    device = getattr(trainer, "device", torch.device("cpu"))
    if torch.device(device).type != "cpu":
        raise UnsupportedError(f"device {device}")
    if isinstance(trainer, DQN):
        if trainer.observation_space.dtype == np.uint8:
            raise UnsupportedError("observations of unsigned bytes")
        return _DqnRule(trainer, threads)
    raise UnsupportedError(f"the update rule of {type(trainer).__name__}, which is no DQN")


class NativeLearner:
    """Trains `trainer` with `threads` threads, each on a part of the batch.

    One rounding of sums apart, the steps are those of the trainer's own `update_policy`; for equal threads on one
    machine they have the same bits each time. Raises TrainerError where `supports` says why not.
    """

    backend = "native"
    device = "cpu"

    def __init__(self, trainer: object, *, threads: int = 1) -> None:
        if threads < 1:
            raise ConfigurationError(f"threads must be at least 1; found {threads}.")
        try:
            self._rule = _rule(trainer, threads)
        except UnsupportedError as error:
            raise TrainerError(
                f"The native learner cannot train {type(trainer).__name__}: unsupported is {error}. "
                "Use pearl.learner.torch_learner.TorchLearner, which trains any trainer."
            ) from error
        self.trainer = trainer
        self.threads = threads
        self._policy = policy_tensors(trainer)

    @staticmethod
    def supports(trainer: object) -> str | None:
        """None if the native learner can train `trainer`; else one line that names what it cannot do."""
        try:
            _rule(trainer, 1)
        except UnsupportedError as error:
            return str(error)
        return None

    @property
    def weight_count(self) -> int:
        """float32 scalars of the policy snapshot."""
        return sum(t.numel() for t in self._policy)

    def prepare(self) -> None:
        """Nothing: its threads start with it."""

    def step(self, batch: Mapping[str, np.ndarray | torch.Tensor], weights: np.ndarray | torch.Tensor) -> StepResult:
        """One step; metrics are the mean absolute TD error, the loss and the gradients' norm before clipping.

        Columns are float32, `action` int64. Raises TrainerError for columns of another shape or dtype, for actions out
        of range, and where loss or gradients are not finite; the weights then stay as they were.
        """
        columns = {name: batch[name] for name in _COLUMNS if name != "weights"} | {"weights": weights}
        try:
            priorities, metrics = self._rule.step(columns)  # type: ignore[arg-type]
        except TypeError:
            priorities, metrics = self._rule.step({name: _array(name, column) for name, column in columns.items()})
        return StepResult(priorities, metrics)

    def write_weights(self, out: np.ndarray) -> None:
        """Copy the policy snapshot to `out` `(weight_count,)` float32."""
        torch.cat([t.detach().reshape(-1).float() for t in self._policy], out=torch.from_numpy(out))


def _array(name: str, column: np.ndarray | torch.Tensor) -> np.ndarray:
    """The column as the kernels read it."""
    found = column.detach().numpy() if isinstance(column, torch.Tensor) else np.asarray(column)
    if found.dtype != _COLUMNS[name]:
        raise TrainerError(
            f"Column {name!r} must have dtype {np.dtype(_COLUMNS[name])}; found {found.dtype}. Convert it first."
        )
    return np.ascontiguousarray(found)
