"""A Learner in a Ray worker, with its bank of the replay; without Ray it would be a process of the host's machine.

The queue of transitions, the link to the averaging and the report are those of one machine, in the worker's memory. The
bridge carries what they hold; no message is sent for a gradient step.
"""

from __future__ import annotations

import dataclasses
import shutil
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pearl.actors.report import Report
from pearl.ipc.queues import Bell
from pearl.local_sgd.averaging import Average
from pearl.local_sgd.local_learner import (
    BETA,
    PROGRESS,
    Commands,
    LearnerProgress,
    LearnerSetup,
    ProcessSetup,
    run_learner,
    transition_queue,
)
from pearl.local_sgd.parameters import ParameterLayout
from pearl.local_sgd.shared_memory import distant_link
from pearl.remote.node import Package, about
from pearl.remote.scratch import ScratchFolder

SAVED = [field.name for field in dataclasses.fields(LearnerProgress)].index("saved")  # in a report's numbers
PIECE_BYTES = 8 << 20  # of a file at once

_LONGEST_S = 0.05  # of a call that waits for news


@dataclass(frozen=True)
class LearnerWork:
    """What a Learner needs to start on another node.

    `setup` has its `LearnerSetup`. `layout` is that of the averaging, which the Learner says `facts` numbers; messages
    have at most `rows` transitions, and `slots` of them may wait for the Learner.
    """

    setup: Package
    rank: int
    layout: ParameterLayout
    facts: int
    rows: int
    slots: int


@dataclass(frozen=True)
class Orders:
    """The host's commands to a Learner; see `Commands`. `is_last`: no further transitions will come."""

    save: int = 0
    stops: bool = False
    is_last: bool = False


@dataclass(frozen=True)
class Transitions:
    """Messages for a bank: `columns` have the rows of all of them one after the other, `rows[i]` those of message i.

    `beta` and `progress` `(messages,)` hold from each message on.
    """

    rows: np.ndarray
    columns: Mapping[str, np.ndarray]
    beta: np.ndarray
    progress: np.ndarray


@dataclass(frozen=True)
class LearnerReply:
    """News of a Learner.

    `words` are those of its link; `handed_in` is its message to the averaging, if there is one. `taken` counts the
    messages of transitions that it has taken. `numbers` are its progress, None before the first.
    """

    words: np.ndarray
    handed_in: Mapping[str, np.ndarray] | None
    taken: int
    beats: int
    is_ready: bool
    numbers: Sequence[float] | None
    failure: str | None
    has_ended: bool
    has_failed: bool


class RemoteLearner:
    """One Learner in a Ray worker. Its loop runs in a thread.

    Ray calls methods in threads, at most one for `load_average`, one for `give`, and one for all others.
    """

    def __init__(self) -> None:
        self._report = Report(len(dataclasses.fields(LearnerProgress)))
        self._bell = Bell()
        self._scratch = ScratchFolder()
        self._initial: Path | None = None
        self._has_ended = self._has_failed = False
        self._given = 0
        self._told = (False, 0, 0)  # of readiness, saved state and taken messages, in the last reply

    def about(self) -> dict[str, str]:
        """Versions, node and process."""
        return about()

    # --- start ------------------------------------------------------------------------------------------------------

    def put_piece(self, name: str, piece: bytes) -> None:
        """Append to a file of the state to begin with."""
        self._initial = self._scratch.path / "initial"
        file = self._initial / name
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("ab") as stream:
            stream.write(piece)

    def start(self, work: LearnerWork, average: Average) -> None:
        """Begin to learn from `average`, the newest one."""
        try:
            self._start(work, average)
        except BaseException:
            self._report.fail(traceback.format_exc(limit=-8))
            self._has_ended = self._has_failed = True

    def _start(self, work: LearnerWork, average: Average) -> None:
        setup: LearnerSetup = work.setup.loaded()
        self._link, self._averages = distant_link(work.rank, work.layout, setup.spec.learners, work.facts, self._bell)
        self._averages.write_copy(average)
        self._transitions = transition_queue(setup.transition, work.rows, work.slots)
        self._commands = Commands()
        shared = ProcessSetup(
            work.rank,
            self._link,
            self._transitions,
            self._report,
            self._commands,
            self._bell,
            self._states,
            self._initial,
        )
        threading.Thread(target=self._run, args=(setup, shared), name="learner", daemon=True).start()

    @property
    def _states(self) -> Path:
        return self._scratch.path / "states"

    def _run(self, setup: LearnerSetup, shared: ProcessSetup) -> None:
        try:
            run_learner(setup, shared)
        except SystemExit:  # its report says why
            self._has_failed = True
        self._has_ended = True
        self._bell.ring()

    # --- while it runs ----------------------------------------------------------------------------------------------

    def load_average(self, average: Average) -> None:
        """Give the newest average."""
        self._averages.write_copy(average)

    def give(self, transitions: Transitions | None, orders: Orders) -> None:
        """Give transitions, for which there is room, and then orders, which concern these too."""
        if self._has_ended:
            return
        if transitions is not None:
            self._queue(transitions)
        self._commands.save = orders.save
        self._commands.stops = orders.stops  # after `save`: who sees it saves before the end
        if orders.is_last:
            self._transitions.close()

    def _queue(self, transitions: Transitions) -> None:
        first = 0
        for i, rows in enumerate(transitions.rows.tolist()):
            message = self._transitions.reserve()
            assert message is not None, "the bridge sent more than there is room for"
            for name, column in transitions.columns.items():
                message[name][:rows] = column[first : first + rows]
            message[BETA][0], message[PROGRESS][0] = transitions.beta[i], transitions.progress[i]
            self._transitions.publish(rows)
            self._given += 1
            first += rows

    def take(self) -> LearnerReply:
        """The Learner's news. Returns when it hands in parameters, or something else is urgent, or after 50 ms."""
        if hasattr(self, "_averages"):
            self._averages.beat()  # a caller brings averages from the server, so the server is alive
        deadline = time.monotonic() + _LONGEST_S
        while not self._has_ended:
            seen = self._bell.value()
            left = deadline - time.monotonic()
            if self._has_news() or left <= 0:
                break
            self._bell.wait(seen, left)
        has_ended, numbers = self._has_ended, self._report.result  # in this order: the last numbers come before the end
        handed_in = None if has_ended else self._handed_in()
        self._told = self._report.is_ready, self._saved, self._taken
        return LearnerReply(
            self._words(), handed_in, self._taken, self._report.beats, self._report.is_ready, numbers,
            self._report.failure, has_ended, self._has_failed,
        )  # fmt: skip

    def _has_news(self) -> bool:
        is_ready, saved, taken = self._told
        if self._report.is_ready != is_ready or self._saved != saved or self._taken > taken:
            return True
        return self._link.messages.peek() is not None

    @property
    def _saved(self) -> int:
        numbers = self._report.result
        return 0 if numbers is None else int(numbers[SAVED])

    @property
    def _taken(self) -> int:
        return self._given - len(self._transitions) if self._given else 0

    def _words(self) -> np.ndarray:
        found: np.ndarray = self._link.words.copy() if hasattr(self, "_link") else np.zeros(0, np.int64)
        return found

    def _handed_in(self) -> dict[str, np.ndarray] | None:
        if (peeked := self._link.messages.peek()) is None:
            return None
        found = {name: array.copy() for name, array in peeked[0].items()}
        self._link.messages.release()
        return found

    # --- states for checkpoints -------------------------------------------------------------------------------------

    def state_files(self) -> list[tuple[str, int]]:
        """Names and sizes in bytes of the files of the newest state."""
        folder = self._states / str(self._link.rank)
        return [
            (file.relative_to(folder).as_posix(), file.stat().st_size)
            for file in sorted(folder.rglob("*"))
            if file.is_file()
        ]

    def state_piece(self, name: str, offset: int) -> bytes:
        """A piece of one of these files, from `offset` on."""
        with (self._states / str(self._link.rank) / name).open("rb") as stream:
            stream.seek(offset)
            return stream.read(PIECE_BYTES)

    def drop_state(self) -> None:
        """Remove the state that was written."""
        shutil.rmtree(self._states, ignore_errors=True)

    def clean_up(self) -> None:
        """Remove all files."""
        self._scratch.remove()
