"""The Learner's side of the queues: workers that are launched once and loop over their input until told to stop.

Each worker runs in a thread of its own; in serial mode the host calls `run_once` instead.
"""

from __future__ import annotations

import contextlib
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeAlias

import numpy as np

from pearl.error_place import described
from pearl.errors import PearlError, QueueClosedError
from pearl.ipc.queues import Bell, ColumnQueue, WeightSyncQueue
from pearl.lazy_torch import is_tensor
from pearl.learner.protocol import FusedIteration, FusedLoop, Learner
from pearl.recorder import Event, Recorder
from pearl.replay.protocol import ReplayManager, Sample
from pearl.runtime.queues import batch_fields
from pearl.spec import FieldSpec, TransitionSpec


class Storage(Protocol):
    """A Data Storage in the host's memory."""

    def gather(self, indices: np.ndarray, out: Mapping[str, np.ndarray] | None = None) -> Mapping[str, np.ndarray]:
        """Copy rows into `out`."""
        ...


class LearnerStorage(Protocol):
    """A Data Storage wherever the Learner is; its columns are what the Learner takes."""

    def gather(self, indices: np.ndarray) -> Mapping[str, Any]:
        """Rows as new columns."""
        ...


class LearnerSide(ABC):
    """The training side that the session starts, measures and stops: a loop in a thread, or processes.

    `cores` are those that it keeps busy; None where that is not known, as for the Learner of another device.
    """

    cores: int | None = 1

    @abstractmethod
    def launch(self) -> None:
        """Start it."""

    @abstractmethod
    def check(self) -> None:
        """Raise the error that ended it, if there is one, in this thread."""

    @abstractmethod
    def stop(self, timeout_s: float = 30.0) -> None:
        """End it, and wait for that."""

    @property
    @abstractmethod
    def queues(self) -> Mapping[str, Sequence[ColumnQueue]]:
        """Its queues, by the names of the paper's Figure 4."""

    @abstractmethod
    def run_inline(self) -> bool:
        """Serial mode: process the next message, and keep an error for `check`; False if there is no message."""

    @abstractmethod
    def last_batch(self) -> dict[str, np.ndarray]:
        """After an error: `indices`, `weights` and the columns `(batch, ...)` of the batch that was being trained."""

    @abstractmethod
    def restarted(self) -> None:
        """Serial mode, after a checkpoint: continue as a resumed run would."""

    @abstractmethod
    def seconds(self) -> Mapping[str, float]:
        """Seconds spent so far on `sample`, `gather`, `train`, `update` and `publish`, as far as the loop does these.

        A `TrainingLoop` may be asked only while no grant runs.
        """

    @property
    def host(self) -> Recorder:
        """Seconds that the host spends on batches for this loop: `messages`, and the `gather` during these."""
        return Recorder()

    @abstractmethod
    def keep_events(self, most: int) -> None:
        """Keep the newest `most` events of each thread; at first none are kept. Call it before `launch`."""

    @abstractmethod
    def events(self) -> dict[str, list[Event]]:
        """The events kept, by the name of their thread; call it after `stop`."""


class Worker(LearnerSide):
    """A loop over an input queue, in a thread, or step by step in serial mode.

    An exception inside it is kept, and raised in the host by `check`. `laq` is its input queue, `ldq` its output queue.
    """

    def __init__(self, name: str, laq: ColumnQueue, ldq: ColumnQueue, bell: Bell, prepare: Callable[[], None]) -> None:
        self._name, self.laq, self.ldq, self._bell, self._prepare = name, laq, ldq, bell, prepare
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._prepared = False

    @abstractmethod
    def take(self, timeout_s: float) -> bool:
        """Process the next message of the input queue; False if none arrived in time."""

    @property
    def queues(self) -> Mapping[str, Sequence[ColumnQueue]]:
        """The two queues."""
        return {"LAQ": (self.laq,), "LDQ": (self.ldq,)}

    def launch(self) -> None:
        """Start the thread."""
        thread = threading.Thread(target=self._loop, name=self._name, daemon=True)
        thread.start()
        self._thread = thread  # `stop` waits for it: only if no limit of threads refused it

    def run_once(self, timeout_s: float = 0.0) -> bool:
        """Take the next message, if there is one."""
        if not self._prepared:
            self._prepare()
            self._prepared = True
        return self.take(timeout_s)

    def run_inline(self) -> bool:
        """Serial mode's `run_once`: keeps an error for `check`."""
        try:
            return self.run_once()
        except Exception as error:
            self._error = error
            return True

    def _loop(self) -> None:
        try:
            while True:
                self.run_once(timeout_s=1.0)
        except QueueClosedError:
            return
        except BaseException as error:
            self._error = error
            self._bell.ring()

    def check(self) -> None:
        """Raise the error of the loop, if there is one, in this thread."""
        if self._error is not None:
            if isinstance(self._error, PearlError):
                raise self._error
            raise PearlError(f"The {self._name} stopped: {described(self._error)}.") from self._error

    def stop(self, timeout_s: float = 30.0) -> None:
        """Close the input queue and wait for the loop to end."""
        self.laq.close()
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                raise PearlError(f"The {self._name} did not stop within {timeout_s:.0f} s.")


class _WeightPublisher:
    """Writes the policy to the WSQ every `interval` gradient steps."""

    def __init__(self, learner: Learner, wsq: WeightSyncQueue, interval: int) -> None:
        self._learner, self._wsq, self._interval = learner, wsq, interval
        self._staging = np.zeros(learner.weight_count, np.float32)
        self._steps = 0

    @property
    def is_next(self) -> bool:
        """Whether the next step is followed by a publication."""
        return (self._steps + 1) % self._interval == 0

    def stepped(self, times: Recorder) -> None:
        self._steps += 1
        if self._steps % self._interval == 0:
            times.begin()
            self.publish()
            times.end("publish")

    def restart(self) -> None:
        """As after construction: publish the newest weights and restart the count."""
        self._steps = 0
        self.publish()

    def publish(self) -> None:
        self._learner.write_weights(self._staging)
        self._wsq.write(self._staging)


_OF_SAMPLE = {field.name for field in batch_fields(1, None)}


class AssignmentQueue(ColumnQueue):
    """LAQ of setting 1: sampled batches to the Learner. Without `transition`, the data stay with the Learner.

    `times` are those of the host's thread: `messages` of batches, and the `gather` during these.
    """

    def __init__(self, batch_size: int, transition: TransitionSpec | None, slots: int) -> None:
        super().__init__(batch_fields(batch_size, transition), slots)

    def _attach(self, *state: Any) -> None:
        super()._attach(*state)
        self.times = Recorder()

    def assign(self, sample: Sample, storage: Storage | None = None, *, batch: int = 0) -> None:
        """Host: hand a sampled batch to the Learner, with its transitions unless they stay with the Learner.

        The Learner answers with the batch's id, `batch`.
        """
        message = self.reserve(timeout_s=60.0)
        if message is None:
            raise PearlError("The Learner did not take its next batch for 60 s.")
        message["batch"][0] = batch
        message["indices"][:] = sample.indices
        message["weights"][:] = sample.weights
        message["generations"][:] = sample.generations
        if columns := {name: column for name, column in message.items() if name not in _OF_SAMPLE}:
            assert storage is not None
            start = time.perf_counter()
            storage.gather(sample.indices, columns)
            self.times.record("gather", start, time.perf_counter())
        self.publish()


class DoneQueue(ColumnQueue):
    """LDQ of setting 1: a trained batch's new priorities back to the host."""

    def __init__(self, batch_size: int, slots: int, bell: Bell) -> None:
        super().__init__(
            [
                FieldSpec("batch", (1,), "int64"),
                FieldSpec("indices", (batch_size,), "int64"),
                FieldSpec("priorities", (batch_size,), "float32"),
                FieldSpec("generations", (batch_size,), "uint32"),
                FieldSpec("td_error", (1,), "float64"),
            ],
            slots,
            bell,
        )


class LearnerWorker(Worker):
    """Setting 1: trains every batch of the LAQ and answers with its new priorities on the LDQ.

    `storage` is given where the Data Storage sits with the Learner: assignments then carry indices only.
    """

    def __init__(
        self,
        laq: AssignmentQueue,
        ldq: DoneQueue,
        wsq: WeightSyncQueue,
        bell: Bell,
        *,
        target: Learner,
        weight_sync_interval: int,
        storage: LearnerStorage | None = None,
    ) -> None:
        super().__init__("Learner", laq, ldq, bell, target.prepare)
        self.cores = getattr(target, "threads", None)
        self._host = laq.times
        self._learner, self._storage = target, storage
        self._gathered: Mapping[str, Any] = {}  # the columns of the batch being trained, if they are with the Learner
        self._times = Recorder()
        self._publisher = _WeightPublisher(target, wsq, weight_sync_interval)
        self._publisher.publish()

    def restarted(self) -> None:
        """Publish the newest weights."""
        self._publisher.restart()

    def last_batch(self) -> dict[str, np.ndarray]:
        """The batch of the message that is being processed, with its transitions wherever they are."""
        found = self.laq.peek()
        if found is None:
            return {}
        batch = {name: column.copy() for name, column in found[0].items() if name != "batch"}
        gathered = self._gathered.items()
        return batch | {name: (c.cpu().numpy() if is_tensor(c) else np.array(c)) for name, c in gathered}

    def take(self, timeout_s: float) -> bool:
        """Train one batch."""
        found = self.laq.peek(timeout_s)
        if found is None:
            return False
        message, times = found[0], self._times
        times.begin()
        batch: Mapping[str, Any] = message
        if self._storage is not None:
            self._gathered = {}
            batch = self._gathered = self._storage.gather(message["indices"])
            times.end("gather")
        result = self._learner.step(batch, message["weights"])
        times.end("train")
        done = self.ldq.reserve(timeout_s=60.0)
        if done is None:
            raise PearlError("The host did not read the Learner's results for 60 s.")
        done["batch"][0] = message["batch"][0]
        done["indices"][:] = message["indices"]
        done["generations"][:] = message["generations"]
        done["priorities"][:] = result.priorities
        done["td_error"][0] = result.td_error
        self._publisher.stepped(times)
        self.ldq.publish()
        self.laq.release()
        return True

    def seconds(self) -> Mapping[str, float]:
        """Seconds spent so far on `train` and `publish`, and on `gather` where the data are with the Learner."""
        return self._times.spent

    @property
    def host(self) -> Recorder:
        """Seconds that the host spends on batches for this loop: `messages`, and the `gather` during these."""
        return self._host

    def keep_events(self, most: int) -> None:
        """Keep the newest `most` events of the Learner's thread and of the host's messages."""
        self._times.keep_events(most)
        self._host.keep_events(most)

    def events(self) -> dict[str, list[Event]]:
        """The events of the Learner's thread."""
        return {self._name: self._times.events()}


class GrantQueue(ColumnQueue):
    """LAQ of setting 2: how many iterations the training loop may run, and with which beta."""

    def __init__(self, slots: int) -> None:
        super().__init__([FieldSpec("iterations", (1,), "int64"), FieldSpec("beta", (1,), "float64")], slots)

    def grant(self, iterations: int, beta: float) -> None:
        """Host: let the training loop run."""
        message = self.reserve(timeout_s=60.0)
        if message is None:
            raise PearlError("The training loop did not take its next grant for 60 s.")
        message["iterations"][0], message["beta"][0] = iterations, beta
        self.publish()


class ProgressQueue(ColumnQueue):
    """LDQ of setting 2: iterations done, with their mean absolute TD error."""

    def __init__(self, slots: int, bell: Bell) -> None:
        super().__init__([FieldSpec("iterations", (1,), "int64"), FieldSpec("td_error", (1,), "float64")], slots, bell)


_Trained: TypeAlias = tuple[np.ndarray, np.ndarray, list[np.ndarray]]  # slots, weights and columns of a batch


class _AnyIteration:
    """For any Replay Manager, Data Storage and Learner; they sample while `sampling` is held."""

    def __init__(
        self,
        replay: ReplayManager,
        storage: Storage,
        learner: Learner,
        batch: dict[str, np.ndarray],
        sampling: threading.RLock,
        clock: Recorder,
    ) -> None:
        self._replay, self._storage, self._learner, self._batch = replay, storage, learner, batch
        self._clock = clock
        self._batch_size = len(next(iter(batch.values())))
        self._sampling = sampling
        self._sample = Sample(np.empty(0, np.int64), np.empty(0, np.float32), np.empty(0, np.uint32))
        self._td_errors = 0.0

    def train(self, beta: float) -> None:
        with self._sampling:
            self._clock.begin()
            self._sample = sample = self._replay.sample(self._batch_size, beta)
            self._clock.end("sample")
            batch = self._storage.gather(sample.indices, self._batch)
            self._clock.end("gather")
        result = self._learner.step(batch, sample.weights)
        self._clock.end("train")
        self._replay.update(sample.indices, result.priorities, sample.generations)
        self._clock.end("update")
        self._td_errors += result.td_error

    def finish(self) -> float:
        found, self._td_errors = self._td_errors, 0.0
        return found

    def last_batch(self) -> _Trained:
        return self._sample.indices, self._sample.weights, list(self._batch.values())


class _FusedIteration:
    """A Learner's own iteration, which samples until its end. Its rows never leave `storage`, and are read there."""

    def __init__(
        self,
        fused: FusedIteration,
        storage: Storage,
        batch: dict[str, np.ndarray],
        sampling: threading.RLock,
        clock: Recorder,
    ) -> None:
        self._fused, self._storage, self._batch, self._sampling = fused, storage, batch, sampling
        self._clock = clock

    def train(self, beta: float) -> None:
        with self._sampling:
            self._clock.begin()
            self._fused.train(beta)
            self._clock.end("train")  # the device does not report the parts

    def finish(self) -> float:
        self._clock.begin()
        found = self._fused.finish()
        self._clock.end("train")
        return found

    def last_batch(self) -> _Trained:
        indices, weights = self._fused.last_batch()
        return indices, weights, list(self._storage.gather(indices, self._batch).values())


class _InterpretedLoop:
    """Iterations one after the other, driven from Python."""

    def __init__(
        self,
        laq: GrantQueue,
        ldq: ProgressQueue,
        replay: ReplayManager,
        storage: Storage,
        learner: Learner,
        batch: dict[str, np.ndarray],
        publisher: _WeightPublisher,
    ) -> None:
        self._laq, self._ldq = laq, ldq
        self._publisher = publisher
        self._clock = Recorder("sample", "gather", "train", "update", "publish")
        self._sampling = threading.RLock()  # it knows its owner, who may release it twice
        fused = learner.fused_iteration(replay, storage, len(next(iter(batch.values()))))
        self._iteration: _AnyIteration | _FusedIteration = (
            _AnyIteration(replay, storage, learner, batch, self._sampling, self._clock)
            if fused is None
            else _FusedIteration(fused, storage, batch, self._sampling, self._clock)
        )
        publisher.publish()

    def run_once(self, timeout_s: float) -> bool:
        found = self._laq.peek(timeout_s)
        if found is None:
            return False
        iterations, beta = int(found[0]["iterations"][0]), float(found[0]["beta"][0])
        td_error = 0.0
        for _ in range(iterations):
            self._iteration.train(beta)
            if self._publisher.is_next:  # diverged weights must not be published
                td_error += self._iteration.finish()
            self._publisher.stepped(self._clock)
        td_error += self._iteration.finish()
        done = self._ldq.reserve(timeout_s=60.0)
        if done is None:
            raise PearlError("The host did not read the training loop's progress for 60 s.")
        done["iterations"][0], done["td_error"][0] = iterations, td_error / iterations
        self._ldq.publish()
        self._laq.release()
        return True

    def time_parts(self, wanted: bool) -> None:
        """Nothing to do: each part ends before the next begins, and is timed on its own."""

    def seconds(self) -> dict[str, float]:
        return dict(self._clock.spent)

    def keep_events(self, most: int) -> None:
        self._clock.keep_events(most)

    def events(self) -> list[Event]:
        return self._clock.events()

    def events_ahead(self) -> list[Event]:
        return []

    def restart(self) -> None:
        self._publisher.restart()

    def open_window(self) -> None:
        self._sampling.acquire()

    def close_window(self) -> None:
        with contextlib.suppress(RuntimeError):  # this thread does not hold it
            self._sampling.release()

    def last_batch(self) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
        return self._iteration.last_batch()


class TrainingLoop(Worker):
    """Setting 2: Replay Manager and Learner on one device, sample -> gather -> train -> update without the host.

    Where all three are native, so is the loop (`kernel` tells), and its thread never takes the GIL. The host inserts
    inside `insertion_window`, which opens when a sampling has ended and its rows are copied: while the Learner trains
    on the copies. Where an iteration samples until its end (`Learner.fused_iteration`), it opens between iterations.
    """

    def __init__(
        self,
        laq: GrantQueue,
        ldq: ProgressQueue,
        wsq: WeightSyncQueue,
        bell: Bell,
        *,
        replay: ReplayManager,
        storage: Storage,
        learner: Learner,
        batch_size: int,
        transition: TransitionSpec,
        weight_sync_interval: int,
    ) -> None:
        super().__init__("training loop", laq, ldq, bell, learner.prepare)
        self.cores = getattr(learner, "threads", None)
        self._names = [f.name for f in transition.fields]
        self._dtypes = [(np.dtype(f.dtype), f.shape) for f in transition.fields]
        self._learner = learner
        queues = (laq.native, ldq.native, wsq.native)
        fused = learner.fused_loop(replay, storage, batch_size, queues, weight_sync_interval)
        self.kernel: FusedLoop = fused or _InterpretedLoop(
            laq,
            ldq,
            replay,
            storage,
            learner,
            transition.empty(batch_size),
            _WeightPublisher(learner, wsq, weight_sync_interval),
        )

    def restarted(self) -> None:
        """Publish the newest weights."""
        self.kernel.restart()

    def refresh(self) -> None:
        """Take settings that schedules changed; call it only while no grant runs."""
        self._learner.refresh()

    def take(self, timeout_s: float) -> bool:
        """Run the granted iterations."""
        return self.kernel.run_once(timeout_s)

    def seconds(self) -> Mapping[str, float]:
        """Seconds spent so far on `sample`, `gather`, `train`, `update` and `publish`; ask only while no grant runs.

        Where the device runs an iteration as one, all of it is `train`. Where a thread draws batches ahead, `gather` is
        the wait for it.
        """
        return self.kernel.seconds()

    def keep_events(self, most: int) -> None:
        """Keep the newest `most` events of each thread of the loop."""
        self.kernel.keep_events(most)

    def events(self) -> dict[str, list[Event]]:
        """The events of the loop's thread, and of one that draws batches ahead."""
        found = {self._name: self.kernel.events()}
        if ahead := self.kernel.events_ahead():
            found["drawing ahead"] = ahead
        return found

    def last_batch(self) -> dict[str, np.ndarray]:
        """The batch of the iteration that failed."""
        indices, weights, columns = self.kernel.last_batch()
        batch = {"indices": indices, "weights": weights}
        for name, (dtype, shape), column in zip(self._names, self._dtypes, columns, strict=True):
            batch[name] = column.view(dtype).reshape(len(column), *shape)
        return batch

    @contextmanager
    def insertion_window(self) -> Iterator[None]:
        """Hold sampling off while the host inserts."""
        try:
            self.kernel.open_window()  # inside: Ctrl-C may come as soon as it has returned
            yield
        finally:
            self.kernel.close_window()

    def stop(self, timeout_s: float = 30.0) -> None:
        """Close the input queue and wait for the loop to end."""
        self.kernel.close_window()  # Ctrl-C may have come between the window and its closing
        super().stop(timeout_s)
