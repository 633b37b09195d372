"""RRQ: the queue of requests to the Replay Manager (paper, Fig. 4 and 6)."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Literal, Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike

from pearl import _native
from pearl.errors import ConfigurationError, QueueClosedError, QueueTimeoutError, ReplayError
from pearl.recorder import Event, Recorder
from pearl.replay.arguments import (
    PRIORITY_MODES,
    as_generations,
    as_indices,
    as_priorities,
    check_exponent,
    check_indices,
    check_priorities,
)
from pearl.replay.protocol import ReplayManager, Sample

Executor: TypeAlias = Literal["autorun", "inline"]
_Request: TypeAlias = "Callable[[], Sample | int | None]"


@runtime_checkable
class AutorunReplay(Protocol):
    """A Replay Manager that has an autorun kernel."""

    def start_autorun(self, max_batch: int, depth: int) -> _native.ReplayAutorun:
        """Start serving requests."""


class ReplayRequestQueue:
    """Requests to one Replay Manager, executed in order; `poll` returns the samples, in order.

    executor "autorun": a separate thread (native and without the GIL, if the manager has one) executes requests while
    the host continues. Arguments are checked at once as far as possible; the next `poll` raises other errors.
    "inline": each request executes when it is written, for serial runs. At most `depth` requests and `depth` unpolled
    samples are held. Arrays are copied, so the caller may reuse them. Up to batches of `max_batch`, the native thread
    never allocates.

    One thread writes and polls. Use as a context manager: leaving it finishes the queued requests.
    """

    def __init__(
        self, manager: ReplayManager, *, executor: Executor = "autorun", max_batch: int = 1024, depth: int = 8
    ) -> None:
        if executor not in ("autorun", "inline"):
            raise ConfigurationError(f'The RRQ\'s executor must be "autorun" or "inline"; found {executor!r}.')
        self.manager, self.depth = manager, depth
        self._executor: _native.ReplayAutorun | _ThreadAutorun | _Inline
        if executor == "inline":
            self._executor = _Inline(manager, depth)
        elif isinstance(manager, AutorunReplay):
            self._executor = manager.start_autorun(max_batch, depth)
        else:
            self._executor = _ThreadAutorun(manager, depth)

    def write_sample(self, batch_size: int, beta: float = 0.4, timeout_s: float = 1.0) -> None:
        """Ask for a batch, which a later `poll` returns.

        Raises QueueTimeoutError if the queue stays full, or `depth` samples wait to be polled.
        """
        if not self._executor.write_sample(batch_size, beta, timeout_s):
            raise _full(timeout_s)

    def write_update(
        self,
        indices: ArrayLike,
        priorities: ArrayLike,
        generations: ArrayLike | None = None,
        timeout_s: float = 1.0,
    ) -> None:
        """Ask for new priorities `(n,)`; raises QueueTimeoutError if the queue stays full."""
        slots = as_indices(indices)
        count = len(slots)
        versions = None if generations is None else as_generations(generations, count)
        if not self._executor.write_update(slots, as_priorities(priorities, count), versions, timeout_s):
            raise _full(timeout_s)

    def write_insert(self, indices: ArrayLike, priorities: ArrayLike | None = None, timeout_s: float = 1.0) -> None:
        """Announce new items `(n,)`; raises QueueTimeoutError if the queue stays full."""
        slots = as_indices(indices)
        values = None if priorities is None else as_priorities(priorities, len(slots))
        if not self._executor.write_insert(slots, values, timeout_s):
            raise _full(timeout_s)

    def poll(self) -> Sample | None:
        """Return the oldest sample that is ready, or None; raises the error of a request since the last poll."""
        response = self._executor.poll()
        return None if response is None else Sample(*response)

    def pending(self) -> int:
        """Requests not yet executed."""
        return self._executor.pending()

    def seconds(self) -> dict[str, float]:
        """Seconds that executing requests has taken so far: `sample`, `update` and `insert`."""
        return self._executor.seconds()

    def keep_events(self, most: int) -> None:
        """Keep the newest `most` requests as events; at first none are kept. Call it before the first request."""
        self._executor.keep_events(most)

    def events(self) -> list[Event]:
        """The events kept, oldest first; call it after `close`."""
        return self._executor.events()

    def attach_bell(self, bell: _native.Doorbell) -> None:
        """Have `bell` rung at each response. Call it before the first request."""
        self._executor.attach_bell(bell)

    def drain(self, timeout_s: float = 10.0) -> None:
        """Wait until every request is executed; raises QueueTimeoutError otherwise."""
        if not self._executor.drain(timeout_s):
            raise QueueTimeoutError(f"{self.pending()} requests to the Replay Manager were left after {timeout_s} s.")

    def close(self) -> None:
        """Finish the queued requests and end the thread; writing then raises QueueClosedError. May be repeated."""
        self._executor.stop()

    def __enter__(self) -> ReplayRequestQueue:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _PythonExecutor(ABC):
    """Turns requests into calls, with the methods of `_native.ReplayAutorun`; a subclass decides when they run."""

    def __init__(self, manager: ReplayManager, depth: int) -> None:
        self._manager = manager
        self._depth = max(depth, 1)
        self._responses: deque[Sample] = deque()
        self._bell: _native.Doorbell | None = None
        self._closed = False
        self._times = Recorder("sample", "update", "insert")

    def write_sample(self, batch_size: int, beta: float, timeout_s: float) -> bool:
        if self._unanswered() >= self._depth:
            raise QueueTimeoutError(f"{self._depth} samples wait to be polled: poll() before asking for more.")
        if batch_size < 1:
            raise ReplayError(f"batch_size must be at least 1; found {batch_size}.")
        check_exponent("beta", beta)
        return self._submit("sample", lambda: self._manager.sample(batch_size, beta), timeout_s)

    def write_update(
        self, indices: np.ndarray, priorities: np.ndarray, generations: np.ndarray | None, timeout_s: float
    ) -> bool:
        if self._manager.mode in PRIORITY_MODES:
            check_indices(indices, self._manager.capacity)
            check_priorities(priorities)
        arrays = indices.copy(), priorities.copy(), None if generations is None else generations.copy()
        return self._submit("update", lambda: self._manager.update(*arrays), timeout_s)

    def write_insert(self, indices: np.ndarray, priorities: np.ndarray | None, timeout_s: float) -> bool:
        check_indices(indices, self._manager.capacity)
        if priorities is not None:
            check_priorities(priorities)
        arrays = indices.copy(), None if priorities is None else priorities.copy()
        return self._submit("insert", lambda: self._manager.insert(*arrays), timeout_s)

    def attach_bell(self, bell: _native.Doorbell) -> None:
        self._bell = bell

    def _ring(self) -> None:
        if self._bell is not None:
            self._bell.ring()

    def seconds(self) -> dict[str, float]:
        return dict(self._times.spent)

    def keep_events(self, most: int) -> None:
        self._times.keep_events(most)

    def events(self) -> list[Event]:
        return self._times.events()

    def _timed(self, kind: str, request: _Request) -> Sample | int | None:
        self._times.begin()
        try:
            return request()
        finally:
            self._times.end(kind)

    @abstractmethod
    def _submit(self, kind: str, request: _Request, timeout_s: float) -> bool:
        """Take a request of the kind "sample", "update" or "insert"; False if the queue stays full."""

    @abstractmethod
    def _unanswered(self) -> int: ...


class _Inline(_PythonExecutor):
    """Executes each request when it is written."""

    def _submit(self, kind: str, request: _Request, timeout_s: float) -> bool:
        if self._closed:
            raise _closed()
        response = self._timed(kind, request)
        if isinstance(response, Sample):
            self._responses.append(response)
            self._ring()
        return True

    def _unanswered(self) -> int:
        return len(self._responses)

    def poll(self) -> Sample | None:
        return self._responses.popleft() if self._responses else None

    def pending(self) -> int:
        return 0

    def drain(self, timeout_s: float) -> bool:
        return True

    def stop(self) -> None:
        self._closed = True


class _ThreadAutorun(_PythonExecutor):
    """A Python thread that behaves like an autorun kernel, for managers that have none."""

    def __init__(self, manager: ReplayManager, depth: int) -> None:
        super().__init__(manager, depth)
        self._changed = threading.Condition()
        self._requests: deque[tuple[str, _Request]] = deque()  # the first is being executed
        self._samples_queued = 0
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._loop, name="pearl-replay-requests", daemon=True)
        self._thread.start()

    def _submit(self, kind: str, request: _Request, timeout_s: float) -> bool:
        with self._changed:
            if self._closed:
                raise _closed()
            if not self._changed.wait_for(lambda: len(self._requests) < self._depth, timeout_s):
                return False
            self._requests.append((kind, request))
            self._samples_queued += kind == "sample"
            self._changed.notify_all()
            return True

    def _loop(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._requests) or self._closed)
                if not self._requests:
                    return
                kind, request = self._requests[0]
            response: Sample | int | None = None
            error: Exception | None = None
            try:
                response = self._timed(kind, request)
            except Exception as raised:  # the host's next poll raises it
                error = raised
            with self._changed:
                self._requests.popleft()
                self._samples_queued -= kind == "sample"
                self._error = self._error or error
                if isinstance(response, Sample):
                    self._responses.append(response)
                self._changed.notify_all()
            if kind == "sample" or error is not None:
                self._ring()

    def _unanswered(self) -> int:
        with self._changed:
            return self._samples_queued + len(self._responses)

    def poll(self) -> Sample | None:
        with self._changed:
            error, self._error = self._error, None
            if error is not None:
                raise error
            return self._responses.popleft() if self._responses else None

    def pending(self) -> int:
        with self._changed:
            return len(self._requests)

    def drain(self, timeout_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: not self._requests, timeout_s)

    def stop(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()


def _full(timeout_s: float) -> QueueTimeoutError:
    return QueueTimeoutError(f"The Replay Manager took no request for {timeout_s} s: its queue is full.")


def _closed() -> QueueClosedError:
    return QueueClosedError("The Replay Manager's queue is closed.")
