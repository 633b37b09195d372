"""The Learner in C++: the built-in algorithms on networks of linear layers, DQN on convolutions too, on the CPU.

It updates the weights and the optimizer's state of torch in place. So torch may make any step in between, and
checkpoints do not change.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from pearl import _native
from pearl.errors import ConfigurationError, TrainerError
from pearl.lazy_torch import torch
from pearl.learner.native_plan import UnsupportedError, kernel_column
from pearl.learner.native_rules import make_rule
from pearl.learner.protocol import StepResult
from pearl.learner.trainer_learner import TrainerLearner
from pearl.replay.storage import DataStorage
from pearl.spec import NEXT_ACTION_MASK

if TYPE_CHECKING:
    from pearl.learner.protocol import LoopQueues

_FLOAT, _BYTE = np.dtype(np.float32), np.dtype(np.uint8)


class NativeLearner(TrainerLearner[Any]):
    """Trains `trainer` with `threads` threads, each on a part of the batch.

    With `prefetch`, setting 2's loop in C++ draws the next batch in another thread during the backward pass. Samples
    and training stay the same to the bit.

    The steps are those of the trainer's own `update_policy`, except for the rounding of sums. With the same number of
    threads on one machine, they are reproducible to the bit. Raises TrainerError if `supports` gives a reason.
    """

    backend = "native"
    device = "cpu"

    def __init__(self, trainer: object, *, threads: int = 1, prefetch: bool = False) -> None:
        if threads < 1:
            raise ConfigurationError(f"threads must be at least 1; found {threads}.")
        try:
            self._rule = make_rule(trainer, threads)
        except UnsupportedError as error:
            raise TrainerError(
                f"The native learner cannot train {type(trainer).__name__} (unsupported: {error}). "
                "Use pearl.learner.torch_learner.TorchLearner, which trains any trainer."
            ) from error
        super().__init__(trainer)
        self.threads = threads
        self.prefetch = prefetch

    @staticmethod
    def supports(trainer: object) -> str | None:
        """None if the native learner can train `trainer`; else one line that says what it does not support."""
        try:
            make_rule(trainer, 1)
        except UnsupportedError as error:
            return str(error)
        return None

    def step(self, batch: Mapping[str, np.ndarray | torch.Tensor], weights: np.ndarray | torch.Tensor) -> StepResult:
        """One step; metrics are the mean absolute TD error, the loss and the gradients' norm before clipping.

        Columns are float32; actions of DQN are int64, its observations may be uint8, and with `action_masks` there is
        `next_action_mask` `(batch, actions)` uint8. Raises TrainerError for columns of another shape or dtype, for
        actions out of range, and if loss or gradients are not finite: the weights are then unchanged, unless the
        message says that the critics were updated.
        """
        names = self._rule.columns
        columns = [self._array(*each) for each in zip(names, self.columns_of(batch, names), strict=True)]
        priorities, metrics = self._rule.step(columns, self._array("weights", weights))
        return StepResult(priorities, metrics["td_error"], metrics)

    def refresh(self) -> None:
        """Read the trainer's settings and its optimizers' state."""
        self._rule.refresh()

    @property
    def loops_natively(self) -> bool:
        """Whether `fused_loop` makes a loop if Replay Manager and Data Storage are native."""
        return self._rule.algorithm() is not None and all(p.dtype == _FLOAT for p in self.policy_memory())

    def fused_loop(
        self, replay: object, storage: object, batch_size: int, queues: LoopQueues, weight_sync_interval: int
    ) -> _native.TrainingLoop | None:
        """Make setting 2's loop in C++, with the trainer's current settings; None if one of its parts is not native.

        `storage` must have exactly the columns that `step` takes. Raises TrainerError if something does not fit.
        """
        # A shared next_obs is not a column: it is gathered by the links between rows.
        columns = storage.columns if isinstance(storage, DataStorage) else {}
        if tuple(columns) != self._rule.columns:
            return None
        tree, algorithm = getattr(replay, "native", None), self._rule.algorithm()
        policy = self.policy_memory()
        if not isinstance(tree, _native.SumTree) or algorithm is None or any(p.dtype != _FLOAT for p in policy):
            return None
        held = [self._array(name, column) for name, column in columns.items()]
        return _native.TrainingLoop(
            tree, held, algorithm, batch_size, *queues, policy, weight_sync_interval, self.prefetch
        )

    def _array(self, name: str, column: np.ndarray | torch.Tensor) -> np.ndarray:
        """The column as the kernels read it."""
        rule = self._rule
        dtypes = {"action": rule.action_dtype, "obs": rule.obs_dtype, "next_obs": rule.obs_dtype}
        dtypes[NEXT_ACTION_MASK] = _BYTE
        return kernel_column(name, column, dtypes.get(name, _FLOAT))
