"""An Actor on a node: the actor loop of `pearl.actors.process`, and a Ray worker that sends its messages in pieces."""

from __future__ import annotations

import dataclasses
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from pearl.actors.child_process import ChildProcess
from pearl.actors.notices import Notice, Notices
from pearl.actors.process import run_actor
from pearl.actors.report import Report
from pearl.ipc.queues import ColumnQueue, WeightSyncQueue
from pearl.remote.node import Package, about
from pearl.spec import FieldSpec

_MOST_BYTES = 1 << 20  # of a reply, about
_LONGEST_S = 0.05  # of a call that waits for messages
_QUEUE_BYTES, _MOST_MESSAGES = 2 << 20, 32  # of messages that wait on the node


@dataclass(frozen=True)
class ActorWork:
    """What an Actor needs to start on another node.

    `setup` has its `ActorSetup` and, if it starts without the program, the environment to register. `fields` are the
    arrays of its messages; those in `by_row` hold one row after the other. With `newest_only` it begins each message
    when the previous one is used, with the newest weights.
    """

    setup: Package
    fields: tuple[FieldSpec, ...]
    by_row: frozenset[str]
    newest_only: bool
    weight_count: int
    notice_counts: tuple[int, int]


@dataclass(frozen=True)
class Newest:
    """Weights `(weight_count,)` float32 of a version, and the words of `Notices`; None: as before."""

    weights: np.ndarray | None
    version: int
    notice: Notice = (None, None)


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
    """One actor in a Ray worker: Ray calls the methods, one after the other.

    Its loop has a process of its own, as on one machine: in Ray's process it would wait for the interpreter's lock.
    """

    def __init__(self) -> None:
        self._policy = 0
        self._hosts_version = {0: 0}  # of each version of the WSQ here
        self._held = False  # whether a message was sent whose slot the host has not freed
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
        self._work = work
        size = sum(field.nbytes for field in work.fields)
        slots = 1 if work.newest_only else int(np.clip(-(-_QUEUE_BYTES // max(1, size)), 2, _MOST_MESSAGES))
        self._dcq = ColumnQueue(work.fields, slots)
        self._wsq = WeightSyncQueue(work.weight_count)
        self._notices = Notices.of_counts(work.notice_counts)
        self._adopt(newest)
        arguments = (work.setup, env_steps, restarts, self._dcq, self._wsq, self._report, self._notices)
        self._process = ChildProcess(_run, arguments, "actor", without_program=True)

    def _adopt(self, newest: Newest) -> None:
        if newest.weights is not None:
            self._hosts_version[self._wsq.write(newest.weights)] = newest.version
            self._policy = newest.version
        self._notices.write(newest.notice)

    def take(self, newest: Newest) -> Reply:
        """Hand over newer weights and notices, and get what was collected.

        Returns when there is a megabyte, or 50 ms after the call. A rollout is begun by the call after the one that
        returned the rollout before.
        """
        if self._report.failure is None:
            self._adopt(newest)
            if self._held:
                self._dcq.release()
                self._held = False
        messages = self._messages() if self._report.failure is None else []
        if self._report.failure is None and self._process.exit_code is not None:
            self._report.fail(f"Its process ended ({self._process.cause_of_death}).")
        names = messages[0][0].keys() if messages else ()
        by_row = [name for name in names if name in self._work.by_row]
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
                name: np.array(array[:rows] if name in self._work.by_row else array) for name, array in arrays.items()
            }
            if self._work.newest_only:
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


def _run(
    package: Package,
    env_steps: int,
    restarts: int,
    dcq: ColumnQueue,
    wsq: WeightSyncQueue,
    report: Report,
    notices: Notices,
) -> None:
    """Main function of the actor's process."""
    try:
        setup, environment = package.loaded()
    except BaseException:
        report.fail(traceback.format_exc(limit=-8))
        raise SystemExit(1) from None
    setup = dataclasses.replace(setup, env_steps=env_steps, restarts=restarts)
    run_actor(setup, dcq, wsq.reader(), report, environment, None, notices.reader())
