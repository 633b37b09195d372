"""The process between a run and Ray: it is Ray's driver, so that the run outlives whatever happens to Ray.

A thread for each actor asks its Ray actor for messages and puts them into the run's queues, as a local actor would.
"""

from __future__ import annotations

import math
import os
import socket
import threading
import time
import traceback
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pearl.actors.report import Report, shortened
from pearl.errors import ConfigurationError, QueueClosedError
from pearl.extras import import_extra
from pearl.ipc.queues import WeightSyncQueue
from pearl.ipc.shared_buffer import SharedBuffer
from pearl.remote.worker import Newest, RemoteActor, Reply, Work, versions
from pearl.runtime.queues import DataCollectionQueue

_POLL_S = 0.1
_AHEAD = 2  # calls of one actor under way: one works while the answer of the other travels
_PLACED_S = 60.0  # until a node must have taken an actor, and its process must have begun
_FRESH_S = 0.01  # weights are put into Ray at most so often
_CONNECT_S = 10.0
_PATIENCE_S = 60.0  # for a cluster that listens; Ray would try on
_QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "configure_logging": False}

LOCAL = "local"


class ActorWords:
    """Numbers of one remote actor in shared memory: the host writes what it wants, the bridge how it stands."""

    WANTED, ENV_STEPS, RESTARTS, KILLED, ENDED, PID = range(6)

    def __init__(self) -> None:
        self._attach(SharedBuffer(8 * 6))

    def _attach(self, buffer: SharedBuffer) -> None:
        self._buffer = buffer
        self._words = np.frombuffer(buffer.memory, np.int64, 6)

    def __getstate__(self) -> SharedBuffer:
        return self._buffer

    def __setstate__(self, buffer: SharedBuffer) -> None:
        self._attach(buffer)

    def __getitem__(self, word: int) -> int:
        return int(self._words[word])

    def __setitem__(self, word: int, value: int) -> None:
        self._words[word] = value


@dataclass(frozen=True)
class Line:
    """What connects one actor with the host."""

    name: str
    work: Work
    dcq: DataCollectionQueue
    words: ActorWords
    report: Report


def run_bridge(
    address: str,
    lines: Sequence[Line],
    wsq: WeightSyncQueue,
    statistics: WeightSyncQueue | None,
    report: Report,
) -> None:
    """Main function of the bridge's process: until all queues are closed."""
    watchdog = threading.Timer(_PATIENCE_S, _give_up, (address, report))
    watchdog.daemon = True
    try:
        if address != LOCAL:
            watchdog.start()
        ray = connected(address, len(lines))
        watchdog.cancel()
        _Bridge(ray, lines, wsq, statistics, report).run()
    except BaseException as error:
        text = str(error) if isinstance(error, ConfigurationError) else traceback.format_exc(limit=-8)
        report.fail(text)
        raise SystemExit(1) from None


def _give_up(address: str, report: Report) -> None:
    report.fail(no_cluster(address, f"it did not let this process in within {_PATIENCE_S:g} s"))
    os._exit(1)  # the thread that connects cannot be ended


def connected(address: str, count: int) -> Any:
    """The module `ray`, connected with the cluster at `address` ("local": a new one here) that can take `count` actors.

    ConfigurationError says what is wrong with the address or the cluster.
    """
    ray = import_extra("ray", "ray", "--ray")
    if address == LOCAL:
        os.environ.setdefault("RAY_worker_niceness", "0")  # by default 15: the Learner would starve them
        ray.init(address="local", num_cpus=count, include_dashboard=False, **_QUIET)
    else:
        answers(address)
        try:
            ray.init(address=address, **_QUIET)
        except Exception as error:
            raise ConfigurationError(no_cluster(address, f"{type(error).__name__}: {error}")) from None
    cpus = float(ray.cluster_resources().get("CPU", 0.0))
    if cpus < count:
        raise ConfigurationError(
            f"{count} Actors need as many CPUs in the Ray cluster, one each; found {cpus:g}. Add nodes, or compose "
            "with fewer Actors."
        )
    return ray


def answers(address: str) -> None:
    """Raise ConfigurationError if nobody listens at an address "host:port", where Ray would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
    except OSError as error:
        raise ConfigurationError(no_cluster(address, str(error))) from None


def no_cluster(address: str, reason: str) -> str:
    """The message that no cluster is at `address`."""
    return (
        f"--ray {address}: no Ray cluster answers there ({shortened(reason, 400)}). Start one with `ray start --head`, "
        "give the address that it prints, or leave the address out for a cluster of this machine alone."
    )


class _Bridge:
    def __init__(
        self,
        ray: Any,
        lines: Sequence[Line],
        wsq: WeightSyncQueue,
        statistics: WeightSyncQueue | None,
        report: Report,
    ) -> None:
        self.ray, self._lines, self.report = ray, lines, report
        self.make = ray.remote(num_cpus=1, max_restarts=0, max_task_retries=0, scheduling_strategy="SPREAD")(
            RemoteActor
        )
        self._source = _Source(ray, wsq, statistics)
        self.failure: BaseException | None = None

    def run(self) -> None:
        relays = [_Relay(self, line, self._source) for line in self._lines]
        threads = [threading.Thread(target=relay.run, name=relay.line.name, daemon=True) for relay in relays]
        for thread in threads:
            thread.start()
        self.report.ready()
        while self.failure is None and any(thread.is_alive() for thread in threads):
            time.sleep(_POLL_S)
        if self.failure is not None:
            raise self.failure
        self.ray.shutdown()


class _Source:
    """The newest weights and statistics of the run, each put into Ray once."""

    def __init__(self, ray: Any, wsq: WeightSyncQueue, statistics: WeightSyncQueue | None) -> None:
        self._ray, self._wsq, self._statistics = ray, wsq.reader(), statistics and statistics.reader()
        self._lock = threading.Lock()
        self._newest = Newest(None, 0, None)
        self._number = 0
        self._reference: Any = None
        self._polled_at = 0.0

    def since(self, number: int) -> tuple[int, int, Any]:
        """Number, version of the weights, and what to send to an actor that was sent `number` before."""
        with self._lock:
            self._poll()
            if number == self._number:
                return number, self._newest.version, Newest(None, self._newest.version, None)
            return self._number, self._newest.version, self._reference

    def _poll(self) -> None:
        now = time.monotonic()
        if now - self._polled_at < _FRESH_S and self._number:
            return
        self._polled_at = now
        weights = self._wsq.poll()
        statistics = None if self._statistics is None else self._statistics.poll()
        if weights is None and statistics is None and self._number:
            return
        before = self._newest
        self._newest = Newest(
            before.weights if weights is None else weights.copy(),
            self._wsq.version,
            before.statistics if statistics is None else statistics.copy(),
        )
        self._reference, self._number = self._ray.put(self._newest), self._number + 1


class _EndedError(Exception):
    """The actor is gone."""


class _Relay:
    """Between one Ray actor after the other, and the queue of one actor of the run."""

    def __init__(self, bridge: _Bridge, line: Line, source: _Source) -> None:
        self._bridge, self.line, self._source = bridge, line, source
        self._ray = bridge.ray
        self._beats = -1  # of the present actor's, as last heard

    def run(self) -> None:
        words = self.line.words
        started = 0
        try:
            while not self._closed:
                wanted = words[ActorWords.WANTED]
                if wanted == started:
                    time.sleep(_POLL_S)
                    continue
                started = wanted
                try:
                    self._serve(wanted)
                except _EndedError as end:
                    if not self._closed:
                        self.line.report.fail(str(end))
                words[ActorWords.ENDED] = wanted
        except QueueClosedError:
            pass
        except BaseException as error:
            self._bridge.failure = error
        words[ActorWords.ENDED] = words[ActorWords.WANTED]

    @property
    def _closed(self) -> bool:
        return bool(self.line.dcq.native.closed) or self._bridge.failure is not None

    def _serve(self, wanted: int) -> None:
        """Start a Ray actor and pass its messages on until it or the run ends."""
        words, line = self.line.words, self.line
        self._beats = -1
        actor = self._bridge.make.remote()
        try:
            self._check_versions(self._get(actor.about.remote(), wanted, _PLACED_S))
            number, version, newest = self._source.since(-1)
            arguments = (line.work, words[ActorWords.ENV_STEPS], words[ActorWords.RESTARTS], newest)
            self._get(actor.start.remote(*arguments), wanted)
            under_way: deque[tuple[Any, int]] = deque()
            while True:
                while len(under_way) < _AHEAD:
                    number, version, newest = self._source.since(number)
                    under_way.append((actor.take.remote(newest), version))
                reference, version = under_way.popleft()
                reply: Reply = self._get(reference, wanted)
                self._note(reply)
                if reply.policy != version:
                    raise _EndedError(f"It has the weights of version {reply.policy}; it was sent {version}.")
                self._pass_on(reply)
        finally:
            self._ray.kill(actor, no_restart=True)

    def _get(self, reference: Any, wanted: int, longest_s: float = math.inf) -> Any:
        """The result of a call; _EndedError if the actor is gone or is to end, QueueClosedError at the run's end."""
        errors = self._ray.exceptions
        deadline = time.monotonic() + longest_s
        while True:
            if self._closed:
                raise QueueClosedError("The run is over.")
            if self.line.words[ActorWords.KILLED] >= wanted:
                raise _EndedError("It was ended, since it hung.")
            try:
                return self._ray.get(reference, timeout=_POLL_S)
            except errors.GetTimeoutError:
                if time.monotonic() > deadline:
                    raise _EndedError(
                        f"No node of the Ray cluster started it within {longest_s:g} s: `ray status` shows what the "
                        "cluster has and what waits."
                    ) from None
            except (errors.RayActorError, errors.RayTaskError, errors.ObjectLostError) as error:
                raise _EndedError(shortened(str(error), 2000)) from None

    def _check_versions(self, about: Mapping[str, str]) -> None:
        self.line.words[ActorWords.PID] = int(about["pid"])
        for what, here in versions().items():
            if about[what] != here:
                raise ConfigurationError(
                    f"Node {about['node']} has {what} {about[what]}; the run needs {here}, as it has itself. Install "
                    "the same version on all nodes."
                )

    def _note(self, reply: Reply) -> None:
        report = self.line.report
        if reply.failure is not None:
            raise _EndedError(reply.failure)
        if reply.beats != self._beats:
            self._beats = reply.beats
            report.beat()
        if reply.is_ready and not report.is_ready:
            report.ready()

    def _pass_on(self, reply: Reply) -> None:
        first = 0
        for i, rows in enumerate(reply.rows):
            end = first + int(rows)
            while (slot := self.line.dcq.reserve(_POLL_S)) is None:
                if self._closed:
                    raise QueueClosedError("The run is over.")
                self.line.report.beat()  # it waits for the run
            for name, column in reply.columns.items():
                slot[name][: end - first] = column[first:end]
            for name, stacked in reply.others.items():
                slot[name][...] = stacked[i]
            # Clocks of other machines differ: the message ends now.
            begin, over = reply.others["span"][i]
            now = time.perf_counter()
            slot["span"][:] = now - (over - begin), now
            self.line.dcq.publish(int(rows))
            first = end
