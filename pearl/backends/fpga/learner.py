"""The Learner on an FPGA: autorun kernels for FP, LOSS, BP, GA and WU of each layer, joined by pipes."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pearl.algorithms.batch import Batch
from pearl.backends.fpga.replay import TIMEOUT_S, FpgaReplayManager, check_fpga, stop_at_exit
from pearl.backends.on_device.learner import SharedMemoryLearner, networks_of
from pearl.backends.sycl.replay import open_sycl
from pearl.backends.sycl.selector import EMULATOR_SELECTOR
from pearl.backends.sycl.storage import SyclDataStorage
from pearl.errors import ConfigurationError
from pearl.learner.native_plan import Op
from pearl.learner.native_rules import known_step

if TYPE_CHECKING:
    from pearl import _sycl
    from pearl.backends.on_device import OpenDevice

logger = logging.getLogger("pearl.learner")

_MOST_UNROLL = 1 << 20  # more than any layer has multiply-accumulates to run in parallel


class FpgaLearner(SharedMemoryLearner):
    """Trains `trainer` by a pipeline with a stage for each layer (PEARL Sec. V-B, Fig. 7; CF'22 Sec. 3.2).

    It takes DQN (double too), DDPG, TD3 and SAC on chains of linear layers, each followed by ReLU, tanh or nothing.
    Actors learn from the critics' weights before the step (the lagged critic of CF'22 Sec. 3.2.4); all else is as in
    the trainer. `sub_batches` is DP, the number of copies of the pipeline that share a batch (0: 2). There are fewer,
    with a warning, if not all stages would run at the same time. `unroll` is UF, how many multiply-accumulates of a
    layer's FP, BP and GA run in parallel: one power of two, or one for each layer of each network (DQN's; the actor's,
    then the critics').

    The stages are generated for the networks and the batch size, compiled at the first step (seconds; kept on disk),
    launched once, and run until `close` or the end of the interpreter. Raises TrainerError if `supports` gives a reason
    or the factors are those of other networks, ConfigurationError for an invalid factor, and DeviceError if the device
    cannot be used or the pipeline does not answer within `timeout_s` seconds.
    """

    backend = "fpga"
    _kernel: _sycl.FpgaLearner

    def __init__(
        self,
        trainer: object,
        *,
        device: str = EMULATOR_SELECTOR,
        sub_batches: int = 0,
        unroll: int | Sequence[Sequence[int]] = 16,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        if type(sub_batches) is not int or sub_batches < 0:
            raise ConfigurationError(
                f"sub_batches, the copies of the pipeline, must be at least 1, or 0; found {sub_batches!r}."
            )
        check_fpga(device, "Learner", timeout_s)
        self._cut = {"copies": sub_batches, "unroll": _factors(unroll), "timeout_s": timeout_s}
        super().__init__(trainer, device=device)
        if self.sub_batches < sub_batches:
            logger.warning(
                "The pipeline has %d copies, not %d: with more, not all stages would run at the same time on %s.",
                self.sub_batches,
                sub_batches,
                device,
            )
        self._stop = stop_at_exit(self, self._kernel)

    @staticmethod
    def supports(trainer: object) -> str | None:
        """None if the FPGA's Learner can train `trainer`; else one line that says what it does not support."""
        if (reason := SharedMemoryLearner.supports(trainer)) is not None:
            return reason
        networks = networks_of(*known_step(trainer)[1:])
        return next(filter(None, (_no_chain(size, operations) for size, operations in networks)), None)

    @property
    def kernel(self) -> _sycl.FpgaLearner:
        """The pipeline itself."""
        return self._kernel

    @property
    def sub_batches(self) -> int:
        """DP, the copies of the pipeline."""
        return self._kernel.copies

    def fused_iteration(self, replay: object, storage: object, batch_size: int) -> JoinedTraining | None:
        """Make `replay` and this learner one program, in which batches and priorities stream through pipes.

        None if Replay Manager and Data Storage are not on this learner's FPGA. Afterwards `step` raises TrainerError,
        and the Replay Manager's `close` stops both. Raises DeviceError if not all stages run at the same time.
        """
        if not isinstance(replay, FpgaReplayManager) or not isinstance(storage, SyclDataStorage):
            return None
        if replay.device != self.device or storage.device != self.device:
            return None
        if tuple(f.name for f in storage.spec.fields) != Batch._fields:
            return None
        return JoinedTraining(self, replay, storage, batch_size)

    def close(self) -> None:
        """Stop the stages. May be repeated; a later step starts them again."""
        self._kernel.close()

    def _open(self, device: str) -> OpenDevice:
        return open_sycl(device)

    def _make(self, *arguments: Any) -> Any:
        return self._module.FpgaLearner(*arguments, **self._cut)


class JoinedTraining:
    """Iterations of setting 2 on one FPGA: sample, train and update without a batch on the host.

    Made by `FpgaLearner.fused_iteration`.
    """

    def __init__(
        self, learner: FpgaLearner, replay: FpgaReplayManager, storage: SyclDataStorage, batch_size: int
    ) -> None:
        self._learner, self._replay = learner, replay
        self._td_errors = 0.0
        learner.refresh()
        learner.kernel.join(replay.kernel, storage.kernel, batch_size)

    def train(self, beta: float) -> None:
        """One iteration with importance weights of exponent `beta`.

        Raises TrainerError if loss or gradients are not finite, or an action is not one of the environment's: then no
        weight has moved, unless the message says so. Raises DeviceError if the pipeline stalls.
        """
        trainer = self._learner.trainer
        self._learner.refresh()
        metrics = self._learner.kernel.train(trainer.gradient_steps, beta)
        trainer.gradient_steps += 1
        self._td_errors += metrics["td_error"]

    def finish(self) -> float:
        """The sum of the mean absolute TD errors since the last call."""
        found, self._td_errors = self._td_errors, 0.0
        return found

    def last_batch(self) -> tuple[np.ndarray, np.ndarray]:
        """Slots `(batch,)` int64 and importance weights `(batch,)` float32 of the last iteration."""
        return self._replay.kernel.last_batch()


def _factors(unroll: int | Sequence[Sequence[int]]) -> list[list[int]]:
    """One list for each network, or a single list with the factor for all layers."""
    try:
        networks = [[unroll]] if isinstance(unroll, int) else [list(layers) for layers in unroll]
    except TypeError:
        raise ConfigurationError(
            "unroll must be a power of two, or a list for each network with one for each of its layers, as in "
            f"((256, 32),); found {unroll!r}."
        ) from None
    for factor in (factor for layers in networks for factor in layers):
        if type(factor) is not int or not 1 <= factor <= _MOST_UNROLL or factor & (factor - 1):
            raise ConfigurationError(f"unroll must be a power of two up to {_MOST_UNROLL:,}; found {factor!r}.")
    return networks


def _no_chain(size: int, operations: list[Op]) -> str | None:
    """The first operation that breaks a chain of linear layers, each followed by at most one activation; or None."""
    open_layer = False
    for number, (kind, first, second, width, *_) in enumerate(operations):
        follows = first == number and second < 0
        if follows and kind == "linear":
            open_layer = True
        elif follows and open_layer and kind in ("relu", "tanh"):
            open_layer = False
        else:
            return (
                f"an operation {kind!r} of {width} values in a network of {size} inputs: the pipeline takes chains of "
                "linear layers, each followed by at most one ReLU or tanh"
            )
    return None
