"""Between the Ray actor that runs an Actor and the run's queues: messages of it are put there as a local one would."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pearl.actors.notices import Notices
from pearl.actors.report import Report
from pearl.errors import QueueClosedError
from pearl.ipc.queues import WeightSyncQueue
from pearl.remote.actor_worker import ActorWork, Newest, RemoteActor, Reply
from pearl.remote.bridge import PLACED_S, POLL_S, Bridge, EndedError, Relay, RemoteWords
from pearl.remote.placing import on_node
from pearl.runtime.queues import DataCollectionQueue

_AHEAD = 2  # calls of one actor under way: one works while the answer of the other travels
_FRESH_S = 0.01  # the shortest time between two transfers of weights into Ray


@dataclass(frozen=True)
class ActorLine:
    """The connection of one Actor with the host. `node` is where it is to run: "" is this machine, None is any node."""

    name: str
    work: ActorWork
    dcq: DataCollectionQueue
    words: RemoteWords
    report: Report
    node: str | None = None


@dataclass(frozen=True)
class ActorLines:
    """Some Actors, and the queues whose content all of them are sent."""

    lines: Sequence[ActorLine]
    wsq: WeightSyncQueue
    notices: Notices

    def relays(self, bridge: Bridge) -> Sequence[Relay]:
        """See `Work`."""
        make = bridge.ray.remote(num_cpus=1, max_restarts=0, max_task_retries=0, scheduling_strategy="SPREAD")(
            RemoteActor
        )
        source = _Source(bridge.ray, self.wsq, self.notices)
        return [_ActorRelay(bridge, line, source, make) for line in self.lines]


class _Source:
    """The newest weights and notices of the run, each put into Ray once."""

    def __init__(self, ray: Any, wsq: WeightSyncQueue, notices: Notices) -> None:
        self._ray, self._wsq, self._notices = ray, wsq.reader(), notices.reader()
        self._lock = threading.Lock()
        self._newest = Newest(None, 0)
        self._number = 0
        self._reference: Any = None
        self._polled_at = 0.0

    def since(self, number: int, fresh_s: float = _FRESH_S) -> tuple[int, int, Any]:
        """A number, the version of the weights, and the message for an actor that was sent `number` before.

        The weights were the newest ones at most `fresh_s` seconds ago.
        """
        with self._lock:
            self._poll(fresh_s)
            if number == self._number:
                return number, self._newest.version, Newest(None, self._newest.version)
            return self._number, self._newest.version, self._reference

    def _poll(self, fresh_s: float) -> None:
        now = time.monotonic()
        if now - self._polled_at < fresh_s and self._number:
            return
        self._polled_at = now
        weights = self._wsq.poll()
        notice = self._notices.poll()
        if weights is None and all(part is None for part in notice) and self._number:
            return
        before = self._newest
        statistics, attributes = (
            old if new is None else new.copy() for old, new in zip(before.notice, notice, strict=True)
        )
        self._newest = Newest(
            before.weights if weights is None else weights.copy(), self._wsq.version, (statistics, attributes)
        )
        self._reference, self._number = self._ray.put(self._newest), self._number + 1


class _ActorRelay(Relay):
    """One Ray actor after the other fills the queue of one Actor of the run."""

    def __init__(self, bridge: Bridge, line: ActorLine, source: _Source, make: Any) -> None:
        super().__init__(bridge, line.name, line.words)
        self._line, self._source, self._make = line, source, make
        self._beats = -1  # of the present actor's, as last heard

    def run(self) -> None:
        words = self.words
        started = 0
        try:
            while not self.is_over:
                wanted = words[RemoteWords.WANTED]
                if wanted == started:
                    time.sleep(POLL_S)
                    continue
                started = wanted
                try:
                    self._serve(wanted)
                except EndedError as end:
                    if not self.is_over:
                        self._line.report.fail(str(end))
                self.say_ended(wanted)
        except QueueClosedError:
            pass
        except BaseException as error:
            self.bridge.failure = error
        self.say_ended(words[RemoteWords.WANTED])

    @property
    def is_over(self) -> bool:
        return bool(self._line.dcq.native.closed) or self.bridge.is_over

    def _serve(self, wanted: int) -> None:
        """Start a Ray actor and pass its messages on until it or the run ends."""
        words, line = self.words, self._line
        self._beats = -1
        actor = on_node(self.ray, self._make, line.node).remote()
        try:
            self.check_node(self.get(actor.about.remote(), wanted, PLACED_S))
            number, version, newest = self._newest(-1)
            arguments = (line.work, words[RemoteWords.ENV_STEPS], words[RemoteWords.RESTARTS], newest)
            self.get(actor.start.remote(*arguments), wanted)
            under_way: deque[tuple[Any, int]] = deque()
            ahead = 1 if line.work.newest_only else _AHEAD
            while True:
                while len(under_way) < ahead:
                    number, version, newest = self._newest(number)
                    under_way.append((actor.take.remote(newest), version))
                reference, version = under_way.popleft()
                reply: Reply = self.get(reference, wanted)
                self._note(reply)
                if reply.policy != version:
                    raise EndedError(f"It has the weights of version {reply.policy}; it was sent {version}.")
                self._pass_on(reply)
        finally:
            self.ray.kill(actor, no_restart=True)

    def _newest(self, number: int) -> tuple[int, int, Any]:
        """See `_Source.since`."""
        if not self._line.work.newest_only:
            return self._source.since(number)
        self._slot()  # the host frees it when the weights are published
        return self._source.since(number, 0.0)

    def _note(self, reply: Reply) -> None:
        report = self._line.report
        if reply.failure is not None:
            raise EndedError(reply.failure)
        if reply.beats != self._beats:
            self._beats = reply.beats
            report.beat()
        if reply.is_ready and not report.is_ready:
            report.ready()

    def _slot(self) -> dict[str, np.ndarray]:
        """Wait for room for a message."""
        while (slot := self._line.dcq.reserve(POLL_S)) is None:
            if self.is_over:
                raise QueueClosedError("The run is over.")
            self._line.report.beat()  # it waits for the run
        return slot

    def _pass_on(self, reply: Reply) -> None:
        first = 0
        for i, rows in enumerate(reply.rows):
            end = first + int(rows)
            slot = self._slot()
            for name, column in reply.columns.items():
                slot[name][: end - first] = column[first:end]
            for name, stacked in reply.others.items():
                slot[name][...] = stacked[i]
            # Clocks of other machines differ: the message ends now.
            begin, over = reply.others["span"][i]
            now = time.perf_counter()
            slot["span"][:] = now - (over - begin), now
            self._line.dcq.publish(int(rows))
            first = end
