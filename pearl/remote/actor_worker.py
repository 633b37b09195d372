"""An Actor in a Ray worker: the actor loop of `pearl.actors.process`, and its messages in large pieces."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from pearl.actors.process import run_actor
from pearl.actors.report import Report
from pearl.ipc.queues import WeightSyncQueue
from pearl.remote.node import Package, about
from pearl.runtime.queues import DataCollectionQueue

_MOST_BYTES = 1 << 20  # of a reply, about
_LONGEST_S = 0.05  # of a call that waits for messages
_QUEUE_BYTES, _MOST_MESSAGES = 2 << 20, 32  # of messages that wait on the node
_PER_EPISODE = ("episode_return", "episode_length")


@dataclass(frozen=True)
class ActorWork:
    """What an Actor needs to start on another node.

    `setup` has its `ActorSetup` and, if it starts without the program, the environment to register.
    """

    setup: Package
    weight_count: int
    statistics_count: int


@dataclass(frozen=True)
class Newest:
    """Weights `(weight_count,)` float32 of a version, and statistics `(count,)` float32; None: as before."""

    weights: np.ndarray | None
    version: int
    statistics: np.ndarray | None


@dataclass(frozen=True)
class Reply:
    """Some messages of an actor.

    `rows[i]` are those of message i; `columns` have the rows of all messages one after the other, `others` the fields
    that are no rows, stacked. `policy` is the version of the newest weights that the actor was given.
    """

    rows: np.ndarray
    columns: Mapping[str, np.ndarray]
    others: Mapping[str, np.ndarray]
    policy: int
    is_ready: bool
    beats: int
    failure: str | None


class RemoteActor:
    """One actor in a Ray worker. Its loop runs in a thread; Ray calls the methods, one after the other."""

    def __init__(self) -> None:
        self._policy = 0
        self._hosts_version = {0: 0}  # of each version of the WSQ here
        self._held = False  # a message was sent whose place the host has not freed
        self._report = Report()

    def about(self) -> dict[str, str]:
        """Versions, node and process."""
        return about()

    def start(self, work: ActorWork, env_steps: int, restarts: int, newest: Newest) -> None:
        """Begin to collect with the `newest` weights, from `env_steps` steps of the run on."""
        try:
            self._start(work, env_steps, restarts, newest)
        except BaseException:
            self._report.fail(traceback.format_exc(limit=-8))

    def _start(self, work: ActorWork, env_steps: int, restarts: int, newest: Newest) -> None:
        setup, environment = work.setup.loaded()
        setup = dataclasses.replace(setup, env_steps=env_steps, restarts=restarts)
        rows = setup.message_rows()
        one = DataCollectionQueue(setup.transition, rows, 1, further=setup.further_fields)
        size = sum(array.nbytes for array in (one.reserve() or {}).values())
        self._newest_only = setup.rollout is not None
        slots = 1 if self._newest_only else int(np.clip(-(-_QUEUE_BYTES // max(1, size)), 2, _MOST_MESSAGES))
        self._dcq = DataCollectionQueue(setup.transition, rows, slots, further=setup.further_fields)
        self._by_row = {field.name for field in setup.transition.fields} | {"priority"}
        self._wsq = WeightSyncQueue(work.weight_count)
        self._statistics = WeightSyncQueue(work.statistics_count) if work.statistics_count else None
        self._adopt(newest)
        arguments = (setup, self._dcq, self._wsq.reader(), self._report, environment, None)
        reader = None if self._statistics is None else self._statistics.reader()
        threading.Thread(target=_run, args=(*arguments, reader), name="actor", daemon=True).start()

    def _adopt(self, newest: Newest) -> None:
        if newest.weights is not None:
            self._hosts_version[self._wsq.write(newest.weights)] = newest.version
            self._policy = newest.version
        if newest.statistics is not None and self._statistics is not None:
            self._statistics.write(newest.statistics)

    def take(self, newest: Newest) -> Reply:
        """Hand over newer weights and statistics, and get what was collected.

        Returns when there is a megabyte, or 50 ms after the call. A rollout is begun by the call after the one that
        returned the rollout before.
        """
        if self._report.failure is None:
            self._adopt(newest)
            if self._held:
                self._dcq.release()
                self._held = False
        messages = self._messages() if self._report.failure is None else []
        names = messages[0][0].keys() if messages else ()
        by_row = [name for name in names if name in self._by_row or name in _PER_EPISODE]
        return Reply(
            np.array([rows for _, rows in messages], np.int64),
            {name: np.concatenate([message[name] for message, _ in messages]) for name in by_row},
            {name: np.stack([message[name] for message, _ in messages]) for name in names if name not in by_row},
            self._policy,
            self._report.is_ready,
            self._report.beats,
            self._report.failure,
        )

    def _messages(self) -> list[tuple[dict[str, np.ndarray], int]]:
        deadline = time.monotonic() + _LONGEST_S
        found: list[tuple[dict[str, np.ndarray], int]] = []
        size = 0
        while size < _MOST_BYTES and self._report.failure is None:
            peeked = self._dcq.peek(max(0.0, deadline - time.monotonic()))
            if peeked is None:
                break
            arrays, rows = peeked
            message = {
                name: np.array(array[:rows] if name in self._by_row or name in _PER_EPISODE else array)
                for name, array in arrays.items()
            }
            if self._newest_only:
                self._held = True
            else:
                self._dcq.release()
            acted = int(message["counts"][3])
            message["counts"][3] = self._hosts_version[acted]
            for version in [known for known in self._hosts_version if known < acted]:
                del self._hosts_version[version]
            found.append((message, rows))
            size += sum(array.nbytes for array in message.values())
            if self._held:
                break
        return found


def _run(*arguments: Any) -> None:
    with contextlib.suppress(SystemExit):  # its report says why
        run_actor(*arguments)
