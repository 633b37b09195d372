"""Averaging over shared memory: Learners hand their parameters to a server in the host's process.

The server decides alone which Learners an average consists of, so all Learners see the same. It never waits for one
that died or hangs. Parameters are added in the order of the Learners, in float64, so the same parameters give the same
bits, and equal parameters stay what they are.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from pearl import _native
from pearl.errors import PearlError, QueueClosedError, QueueTimeoutError, TrainerError
from pearl.ipc.queues import Bell, ColumnQueue
from pearl.ipc.shared_buffer import SharedBuffer
from pearl.local_sgd.averaging import Average, AveragingSpec
from pearl.local_sgd.parameters import ParameterLayout
from pearl.spec import FieldSpec

logger = logging.getLogger("pearl.local_sgd")

_POLL_S = 0.02
_PATIENCE_S = 60.0  # of a Learner for a server that gives no sign of life
_JOINED, _BEATS, _EXPECTED_US = range(3)  # words of a link


class _Averages:
    """The newest average, with one writer and any number of readers that wait on `bell`."""

    def __init__(self, learners: int, count: int, facts: int, bell: Bell) -> None:
        buffer = SharedBuffer(_native.Snapshot.nbytes(8 * (1 + learners * facts) + 4 * count))
        self._attach(learners, count, facts, bell, buffer, SharedBuffer(8), os.getpid(), create=True)

    def _attach(
        self,
        learners: int,
        count: int,
        facts: int,
        bell: Bell,
        buffer: SharedBuffer,
        beats: SharedBuffer,
        writer: int,
        *,
        create: bool,
    ) -> None:
        self._state = learners, count, facts, bell, buffer, beats, writer
        self._writer = writer
        self._beats = np.frombuffer(beats.memory, np.int64, 1)
        numbers = 1 + learners * facts
        self._snapshot = snapshot = _native.Snapshot(buffer.memory, 8 * numbers + 4 * count, create)
        self.bell = bell
        # A payload is the version, the facts, the parameters; the snapshot's versions 0 and 1 stand for its two halves.
        starts = [snapshot.offset(half) for half in range(2)]
        self._heads = [np.frombuffer(buffer.memory, np.float64, numbers, start) for start in starts]
        self._parameters = [np.frombuffer(buffer.memory, np.float32, count, start + 8 * numbers) for start in starts]
        # What the writer publishes before the parameters.
        self._head = np.full(numbers, np.nan)
        self.facts = self._head[1:].reshape(learners, facts)

    def __getstate__(self) -> tuple[int, int, int, Bell, SharedBuffer, SharedBuffer, int]:
        return self._state

    def __setstate__(self, state: tuple[int, int, int, Bell, SharedBuffer, SharedBuffer, int]) -> None:
        self._attach(*state, create=False)

    def beat(self) -> None:
        """Writer: give a sign of life, also while there is nothing to average."""
        self._beats[0] += 1

    @property
    def beats(self) -> int:
        """How often the writer has given one. Any thread, any process."""
        return int(self._beats[0])

    @property
    def writer_is_stopped(self) -> bool:
        """Whether the writer's process is suspended, as by Ctrl-Z or SIGSTOP. Any thread, any process."""
        try:
            status = Path(f"/proc/{self._writer}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:  # it has ended, or may not be seen
            return False
        return status.rpartition(")")[2].split()[0] in ("T", "t")

    @property
    def version(self) -> int:
        """The newest version. Any thread, any process."""
        return self.read().version

    def write(self, vectors: list[np.ndarray]) -> None:
        """Writer: publish `facts` and the mean of `vectors`, as the next version."""
        self._publish(self._snapshot.version, vectors)

    def write_copy(self, average: Average) -> None:
        """Writer: publish an average that was `copied` from another process, under its own version."""
        self.facts[...] = average.facts
        self._publish(average.version, [average.parameters])

    def _publish(self, version: int, vectors: list[np.ndarray]) -> None:
        self._head[0] = version
        _native.write_mean(self._snapshot, self._head, vectors)
        self.bell.ring()

    def read(self) -> Average:
        """Reader: the newest average, in place."""
        while True:
            number = self._snapshot.version
            head = self._heads[number % 2].copy()
            if self._snapshot.holds(number):
                is_whole = functools.partial(self._snapshot.holds, number)
                return Average(int(head[0]), self._parameters[number % 2], head[1:].reshape(self.facts.shape), is_whole)

    def copied(self) -> Average:
        """Reader: the newest average, in memory of its own."""
        while True:
            found = self.read()
            parameters = found.parameters.copy()
            if found.is_whole():
                return Average(found.version, parameters, found.facts)


class Link:
    """A Learner's connection with the averaging; pass it to the Learner's process as it is spawned."""

    def __init__(self, rank: int, layout: ParameterLayout, messages: ColumnQueue, averages: _Averages) -> None:
        self._attach(rank, layout, messages, averages, SharedBuffer(24))

    def _attach(
        self,
        rank: int,
        layout: ParameterLayout,
        messages: ColumnQueue,
        averages: _Averages,
        buffer: SharedBuffer,
    ) -> None:
        self.rank, self.layout, self.messages, self.averages, self._buffer = rank, layout, messages, averages, buffer
        # Single words, each with one writer.
        self.words = np.frombuffer(buffer.memory, np.int64, 3)

    @property
    def facts(self) -> int:
        """Numbers that the Learner says with its parameters."""
        return int(self.averages.facts.shape[1])

    @property
    def has_joined(self) -> bool:
        """Whether the Learner takes part."""
        return bool(self.words[_JOINED])

    def __getstate__(self) -> tuple[int, ParameterLayout, ColumnQueue, _Averages, SharedBuffer]:
        return self.rank, self.layout, self.messages, self.averages, self._buffer

    def __setstate__(self, state: tuple[int, ParameterLayout, ColumnQueue, _Averages, SharedBuffer]) -> None:
        self._attach(*state)


def distant_link(rank: int, layout: ParameterLayout, learners: int, facts: int, bell: Bell) -> tuple[Link, _Averages]:
    """A link for a Learner far from the server, and the averages for the thread that writes what comes from there.

    Someone carries its messages, at which `bell` rings, to a link of the server, and `words` too (`pearl.remote`).
    """
    averages = _Averages(learners, layout.count, facts, Bell())
    return Link(rank, layout, _messages(layout, facts, bell), averages), averages


def _messages(layout: ParameterLayout, facts: int, bell: Bell) -> ColumnQueue:
    fields = [
        FieldSpec("parameters", (layout.count,), "float32"),
        FieldSpec("facts", (facts,), "float64"),
        FieldSpec("base", (1,), "int64"),
    ]
    return ColumnQueue(fields, 1, bell)


class SharedMemoryAverager:
    """A Learner's side; see `Averager`. Raises TrainerError if the Learner's `layout` is not that of the server.

    A wait for an average lasts as long as the server gives signs of life, or its process is stopped (Ctrl-Z): only the
    server judges other Learners, which may be slow, or make their first steps. `meanwhile` is called again and again
    during such a wait.
    """

    def __init__(self, link: Link, layout: ParameterLayout, meanwhile: Callable[[], None] = lambda: None) -> None:
        link.layout.require(layout)
        self._link, self._meanwhile = link, meanwhile
        self._server_beats, self._heard_at = -1, time.monotonic()
        self._version = -1
        # The memory of what is handed in. Nobody else reads it from the average on until the next `hand_in`, nor at all
        # if the average is made without this Learner.
        self.staging = link.messages.arrays(0)["parameters"]

    def join(self) -> Average:
        """Take part from now on; see `Averager`."""
        self.beat()
        self._link.words[_JOINED] = 1
        return self._taken(self._link.averages.read())

    def beat(self) -> None:
        """Give a sign of life."""
        self._link.words[_BEATS] += 1

    def expect(self, seconds: float) -> None:
        """Say how long the next steps may take; see `Averager`."""
        self._link.words[_EXPECTED_US] = int(seconds * 1e6)

    def average(self, parameters: np.ndarray, facts: np.ndarray) -> Average:
        """Hand in parameters and facts, and wait for the next average; see `Averager`."""
        self.hand_in(parameters, facts)
        return self.take()

    def hand_in(self, parameters: np.ndarray, facts: np.ndarray) -> None:
        """Hand in parameters and facts for the next average; see `OverlappedAverager`. `staging` is not copied."""
        self._server_beats = -1
        while (message := self._link.messages.reserve(_POLL_S)) is None:  # one that came too late is not taken yet
            self._wait_on()
        if parameters is not self.staging:
            message["parameters"][...] = parameters
        message["facts"][...] = facts
        message["base"][0] = self._version
        self._link.messages.publish()

    def take(self) -> Average:
        """Wait for the average after the last `hand_in`; see `OverlappedAverager`."""
        averages = self._link.averages
        self._server_beats = -1
        while True:
            seen = averages.bell.value()
            if averages.version > self._version:
                return self._taken(averages.read())
            self._wait_on()
            averages.bell.wait(seen, _POLL_S)

    def leave(self) -> None:
        """Take part no longer; see `Averager`."""
        self._link.words[_JOINED] = 0

    def _wait_on(self) -> None:
        """Give a sign of life; raise if the server has closed, or gives none."""
        self.beat()
        if self._link.messages.native.closed:
            raise QueueClosedError("The averaging is over: its server was closed.")
        self._meanwhile()
        now = time.monotonic()
        if (beats := self._link.averages.beats) != self._server_beats:
            self._server_beats, self._heard_at = beats, now
        elif (silent_s := now - self._heard_at) > _PATIENCE_S / 2 and self._link.averages.writer_is_stopped:
            self._heard_at = now  # it goes on later, and so do the Learners
        elif silent_s > _PATIENCE_S:
            raise QueueTimeoutError(
                f"Learner {self._link.rank} has heard nothing of the averaging's server for {_PATIENCE_S:.0f} s: it is "
                "gone or hangs. Stop the run and resume it from its checkpoint."
            )

    def _taken(self, found: Average) -> Average:
        self._version = found.version
        return found


@dataclass
class _Member:
    """A Learner as the server sees it."""

    link: Link
    beats: int = -1
    heard_at: float = field(default_factory=time.monotonic)
    is_missed: bool = False

    def is_here(self, now: float, timeout_s: float) -> bool:
        """Whether it takes part, and gave a sign of life within `timeout_s`, or what its steps may take if longer."""
        beats = int(self.link.words[_BEATS])
        if beats != self.beats:
            self.beats, self.heard_at = beats, now
        patience_s = max(timeout_s, float(self.link.words[_EXPECTED_US]) / 1e6)
        return bool(self.link.words[_JOINED]) and now - self.heard_at <= patience_s


class AveragingServer:
    """Averages the parameters of Learners, in a thread of its own after `launch`, or by `serve`.

    `parameters` `(count,)` float32 are those of version 0. Each Learner needs a `link`; a replacement gets a new one of
    the same rank and begins from the last average. Each says `facts` numbers with its parameters.
    """

    def __init__(self, spec: AveragingSpec, layout: ParameterLayout, parameters: np.ndarray, *, facts: int = 1) -> None:
        if parameters.shape != (layout.count,):
            raise TrainerError(f"The first parameters must have shape ({layout.count},); found {parameters.shape}.")
        self._spec, self._layout, self._facts = spec, layout, facts
        self._arrivals = Bell()
        self._averages = _Averages(spec.learners, layout.count, facts, Bell())
        self._members: dict[int, _Member] = {}
        self._lock = threading.Lock()
        self._newest = threading.Condition(self._lock)
        self._thread: threading.Thread | None = None
        self._awaited: list[_native.SlotQueue] = []  # of those that were here at the last look
        self._closed = self._held = False
        self._error: BaseException | None = None
        self._averages.write([np.ascontiguousarray(parameters, np.float32)])

    def link(self, rank: int) -> Link:
        """Make the link of Learner `rank`, in [0, learners); an older one of that rank takes part no longer."""
        if not 0 <= rank < self._spec.learners:
            raise PearlError(f"rank must lie in [0, {self._spec.learners}); found {rank}.")
        link = Link(rank, self._layout, _messages(self._layout, self._facts, self._arrivals), self._averages)
        self.remove(rank)
        with self._lock:
            self._members[rank] = _Member(link)
        return link

    def remove(self, rank: int) -> None:
        """Wait for Learner `rank` no longer, since its process ended; its steps since the last average are lost."""
        with self._lock:
            if (member := self._members.pop(rank, None)) is not None:
                member.link.messages.close()
        self._arrivals.ring()

    def hold(self) -> None:
        """Average nothing until `go_on`. Late parameters are still dropped."""
        with self._lock:
            self._held = True

    def go_on(self) -> None:
        """Average again. Silence since `hold` counts for nothing."""
        with self._lock:
            self._held = False
            for member in self._members.values():
                member.heard_at = time.monotonic()
        self._arrivals.ring()

    @property
    def version(self) -> int:
        """The version of the newest average."""
        return self._averages.version

    def newest(self, seen: int = -1, timeout_s: float = 0.0) -> Average | None:
        """A copy of the newest average; None if none newer than version `seen` comes within `timeout_s`.

        Raises the error that ended the thread, if there was one.
        """
        with self._newest:
            self._newest.wait_for(lambda: self.version > seen or self._error is not None, timeout_s)
            if self._error is not None:
                raise PearlError(f"The averaging of Learners failed: {self._error!r}.") from self._error
            if self.version <= seen:
                return None
            found = self._averages.read()
            return Average(found.version, found.parameters.copy(), found.facts)

    def serve(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` for a message; average if all that are waited for have handed in."""
        self._averages.beat()
        seen = self._arrivals.value()
        with self._lock:
            if self._averaged():
                return True
            awaited = [] if self._held else list(self._awaited)
        if awaited:
            # Without Python: a core that wakes for each of them is taken from one that trains.
            _native.wait_for_all(awaited, self._arrivals.native, timeout_s)
        else:
            self._arrivals.wait(seen, timeout_s)
        return False

    def _averaged(self) -> bool:
        arrived: dict[int, dict[str, np.ndarray]] = {}
        for rank, member in sorted(self._members.items()):
            message = member.link.messages.peek()
            if message is None:
                continue
            if int(message[0]["base"][0]) == self.version:
                arrived[rank] = message[0]
            else:  # it came too late for its average, and has got the newest; its next one waits for the room
                member.link.messages.release()
        if self._held:
            return False
        now = time.monotonic()
        here = {rank for rank, member in self._members.items() if member.is_here(now, self._spec.timeout_s)}
        self._awaited = [self._members[rank].link.messages.native for rank in here]
        if not arrived or here - arrived.keys():
            return False
        self._name_missed(arrived)
        facts = self._averages.facts
        facts[...] = np.nan
        for rank, handed_in in arrived.items():
            facts[rank] = handed_in["facts"]
        self._averages.write([one["parameters"] for one in arrived.values()])
        for rank in arrived:
            self._members[rank].link.messages.release()
        self._newest.notify_all()
        return True

    def _name_missed(self, arrived: dict[int, dict[str, np.ndarray]]) -> None:
        for rank, member in self._members.items():
            was_missed, member.is_missed = member.is_missed, rank not in arrived and bool(member.link.words[_JOINED])
            if member.is_missed and not was_missed:
                logger.warning(
                    "Learner %d has given no sign of life for %g s: the others go on without it, and its gradient "
                    "steps since average %d are lost.",
                    *(rank, self._spec.timeout_s, self.version),
                )

    def launch(self) -> None:
        """Serve in a thread until `close`."""
        thread = threading.Thread(target=self._run, name="averaging", daemon=True)
        thread.start()
        self._thread = thread  # `close` waits for it: only if no limit of threads refused it

    def _run(self) -> None:
        try:
            while not self._closed:
                self.serve(_POLL_S)
        except BaseException as error:
            with self._newest:
                self._error = error
                self._newest.notify_all()

    def close(self) -> None:
        """End averaging: Learners that wait get QueueClosedError. May be repeated."""
        self._closed = True
        self._arrivals.ring()
        if self._thread is not None:
            self._thread.join()
        for rank in list(self._members):
            self.remove(rank)
        self._averages.bell.ring()
