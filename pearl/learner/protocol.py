"""The Learner's contract, equal for every backend."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

import numpy as np

from pearl.recorder import Event

if TYPE_CHECKING:
    from pearl import _native

    LoopQueues: TypeAlias = tuple[_native.SlotQueue, _native.SlotQueue, _native.Snapshot]


class StepResult(NamedTuple):
    """The result of a training step: new priorities `(batch,)` float32, their mean absolute TD error, all metrics.

    `metrics` holds at least "td_error".

    `gradients` `(count,)` float32 are those of the weights that moved, in the order of their optimizers' steps, as the
    optimizers took them; None unless the Learner was made to keep them.
    """

    priorities: np.ndarray
    td_error: float
    metrics: Mapping[str, float]
    gradients: np.ndarray | None = None


class FusedLoop(Protocol):
    """Setting 2's loop on one device, without Python."""

    def run_once(self, timeout_s: float) -> bool:
        """Run the next grant and answer it; False if none comes in time."""

    def seconds(self) -> dict[str, float]:
        """Seconds spent so far, in all, in each part: `sample`, `gather`, `train`, `update` and `publish`."""

    def keep_events(self, most: int) -> None:
        """Keep the newest `most` events of each thread, named as the parts; at first none. Only while no grant runs."""

    def events(self) -> list[Event]:
        """The events of the loop's thread, oldest first. Only while no grant runs."""

    def events_ahead(self) -> list[Event]:
        """The events of a thread that draws batches ahead; empty without one. Only while no grant runs."""

    def restart(self) -> None:
        """Publish the newest weights, and restart the count of steps between publications."""

    def open_window(self) -> None:
        """Stop sampling."""

    def close_window(self) -> None:
        """Allow sampling again; no effect unless this thread has opened the window."""

    def last_batch(self) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
        """Indices, weights and columns (or their bytes) of the last batch, whether trained or failed."""


class FusedIteration(Protocol):
    """Iterations of setting 2 on one device: sample, train, update, without a batch on the host."""

    def train(self, beta: float) -> None:
        """Run an iteration, or begin it."""

    def finish(self) -> float:
        """Wait for the iterations since the last call; the sum of their batches' mean absolute TD errors."""

    def last_batch(self) -> tuple[np.ndarray, np.ndarray]:
        """Slots and importance weights of the last batch, whether trained or failed."""


class Learner(Protocol):
    """One stochastic-gradient step on a batch: FP, LOSS, BP, GA, weight update.

    One thread calls `prepare` once, and then all other methods; other threads may call `write_weights` and
    `load_weights` while no step runs. By default, a derived class has no fused loop or iteration.
    """

    backend: str
    device: str

    @property
    def weight_count(self) -> int:
        """float32 scalars of the policy snapshot that actors need."""

    def prepare(self) -> None:
        """Set up the calling thread (core count, streams)."""

    def step(self, batch: Mapping[str, np.ndarray], weights: np.ndarray) -> StepResult:
        """Train on columns of `(batch, *shape)` with importance weights `(batch,)` float32."""

    def write_weights(self, out: np.ndarray) -> None:
        """Copy the policy snapshot to `out` `(weight_count,)` float32."""

    def load_weights(self, weights: np.ndarray) -> None:
        """Load a policy snapshot `(weight_count,)` float32, as `write_weights` gives; TrainerError for another size."""

    def refresh(self) -> None:
        """Read settings that schedules changed, such as the learning rate; called while no step runs.

        `step` reads them by itself: this is for a fused loop.
        """
        return

    def fused_loop(
        self, replay: object, storage: object, batch_size: int, queues: LoopQueues, weight_sync_interval: int
    ) -> FusedLoop | None:
        """Make setting 2's loop on the Learner's device; None if there is none, or `replay` or `storage` is elsewhere.

        `queues` are those of grants, answers and the policy, as `pearl.runtime.workers` defines them.
        """
        return None

    def fused_iteration(self, replay: object, storage: object, batch_size: int) -> FusedIteration | None:
        """Make an iteration on the Learner's device, which the host repeats; None as for `fused_loop`.

        The host asks for this before `fused_loop`.
        """
        return None


class RolloutLearner(Protocol):
    """Trains on a rollout: several epochs of minibatches. The rules for threads are those of `Learner`."""

    backend: str
    device: str

    @property
    def weight_count(self) -> int:
        """float32 scalars of the policy snapshot that actors need."""

    def prepare(self) -> None:
        """Set up the calling thread."""

    def train(self, rollout: Mapping[str, np.ndarray], rows: np.ndarray | None = None) -> Mapping[str, float]:
        """Train on the columns of a rollout, `(count, *shape)` each; returns the parts of the loss, averaged.

        The columns are `obs`, `action`, `log_prob`, `advantage` and `ret` (float32, but int64 for actions that are
        numbers, and uint8 for observations of bytes); with action masks also `action_mask` (uint8). `value`
        (float32) are the values from which value clipping counts; without it they are `ret - advantage`. `rows` `(n,)`
        int64 are those that are transitions, ascending; None: all are. Minibatches of an epoch are the rows in an order
        drawn by Philox, the same on every device; the last one may be smaller. The result also has `minibatches`, the
        steps made, and `epochs`, begun.

        Of a recurrent policy there are also `begins` `(count,)` bool, whether an episode begins with the step, and
        `state` `(sequences of an environment, envs, size)`, the states before the sequences that divide each
        environment's steps: minibatches are then whole sequences, in an order drawn in the same way.

        Raises TrainerError if a loss or gradient is not finite.
        """

    def write_weights(self, out: np.ndarray) -> None:
        """Copy the policy snapshot to `out` `(weight_count,)` float32."""

    def load_weights(self, weights: np.ndarray) -> None:
        """Load a policy snapshot `(weight_count,)` float32; TrainerError for another size."""
