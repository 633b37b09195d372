"""Learners in processes, each with a bank of the replay, that average their parameters (SPO, thesis ch. 5).

The host sends every transition to one Learner, in turn. A Learner inserts what it is sent into its bank, and trains on
batches of B / L as often as the replay ratio allows for its own transitions: over all Learners the ratio is kept.
"""

from __future__ import annotations

import dataclasses
import logging
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pearl.actors.child_process import ChildProcess, DeathCount, Process
from pearl.actors.report import Report, Silence
from pearl.errors import CheckpointError, CheckpointWriteError, ConfigurationError, LearnerError, PearlError
from pearl.ipc.queues import Bell, ColumnQueue
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
from pearl.local_sgd.parameters import TrainerParameters
from pearl.local_sgd.shared_memory import AveragingServer
from pearl.local_sgd.state_files import read_state

logger = logging.getLogger("pearl.local_sgd")

_WAIT_S = 0.02
_SILENCE_S = 10.0  # of a Learner that the others wait for, until it is named
_MESSAGES = 8  # that wait for a Learner, by default


@dataclass
class _Running:
    process: Process
    transitions: ColumnQueue
    report: Report
    commands: Commands
    rows: int  # that its bank was given
    is_named: bool = False
    is_named_silent: bool = False

    def __post_init__(self) -> None:
        self.silence = Silence(self.report)

    @property
    def progress(self) -> LearnerProgress:
        """What the process has done."""
        return LearnerProgress.of(self.report)


def start_here(setup: LearnerSetup, shared: ProcessSetup) -> Process:
    """Start a Learner's process on this machine."""
    return ChildProcess(run_learner, (setup, shared), f"learner-{shared.rank}")


class LearnerGroup:
    """The Learners' processes, and the averaging between them. `with` starts and stops them.

    `trainer` is the host's own, of the class and settings that the Learners make: they begin from its parameters, and
    `load_newest` brings averages back into it. `message_rows` are the most rows of one insertion.

    A Learner that dies is named, and replaced by one that begins from the last average with an empty bank; LearnerError
    if `most_deaths` die within `window_s`. One that gives no sign of life for `patience_s` is killed. `start` starts a
    process, by default on this machine; `pearl.remote` has another. `messages` are
    how many insertions may wait for a Learner. `bell` rings when a Learner has room for another, or has averaged.
    `states` is the folder for `save`; Learners that are started first begin with the states `initial` by rank, which
    `save` wrote. One thread calls all methods.
    """

    def __init__(
        self,
        setup: LearnerSetup,
        trainer: object,
        *,
        message_rows: int = 256,
        messages: int = _MESSAGES,
        bell: Bell | None = None,
        states: Path | None = None,
        initial: Path | None = None,
        most_deaths: int = 3,
        window_s: float = 60.0,
        patience_s: float = 300.0,
        start: Callable[[LearnerSetup, ProcessSetup], Process] = start_here,
    ) -> None:
        slots = setup.replay.capacity // setup.spec.learners
        if not 1 <= message_rows <= slots:
            raise ConfigurationError(
                f"message_rows must lie in [1, {slots}], the slots of one bank; found {message_rows}."
            )
        self.setup, self._message_rows, self._messages, self._slots = setup, message_rows, messages, slots
        self.bell = Bell() if bell is None else bell
        self._states, self._initial = states, initial
        self._parameters = TrainerParameters(trainer, setup.moments)
        vector = np.empty(self._parameters.layout.count, np.float32)
        self._parameters.read(vector)
        self.server = AveragingServer(setup.spec, self._parameters.layout, vector, facts=2)
        self._most_deaths, self._window_s, self._patience_s = most_deaths, window_s, patience_s
        self._deaths = DeathCount(window_s)
        self._start_process = start
        self.restarts = 0
        self.lost_transitions = 0  # of banks whose Learner died
        self._next = 0  # the Learner that gets the next transition
        self._version = 0
        self._running: list[_Running] = []
        self._before = [LearnerProgress()] * setup.spec.learners  # of processes that were replaced
        self._saves = 0

    def __enter__(self) -> LearnerGroup:
        self.launch()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def launch(self) -> None:
        """Start the processes and the averaging."""
        self._running = [self._start(rank, self._initial) for rank in range(self.setup.spec.learners)]
        self.server.launch()

    def _start(self, rank: int, initial: Path | None = None) -> _Running:
        queue = transition_queue(self.setup.transition, self._message_rows, self._messages)
        report, commands = Report(len(dataclasses.fields(LearnerProgress))), Commands()
        initial = None if initial is None else initial / str(rank)
        link = self.server.link(rank)
        shared = ProcessSetup(rank, link, queue, report, commands, self.bell, self._states, initial)
        state = None if initial is None else read_state(initial)
        rows = 0 if state is None else int(state[1]["inserted"])
        running = _Running(self._start_process(self.setup, shared), queue, report, commands, rows)
        self._name_process(running)
        return running

    @staticmethod
    def _name_process(running: _Running) -> None:
        """Once it is known: elsewhere it takes a while."""
        if not running.is_named and (pid := running.process.pid):
            running.is_named = True
            logger.info("%s is process %d.", running.process.name, pid)

    @property
    def pids(self) -> list[int]:
        """Process ids, by rank."""
        return [running.process.pid for running in self._running]

    @property
    def progress(self) -> list[LearnerProgress]:
        """What each Learner's present process has done, by rank."""
        return [running.progress for running in self._running]

    @property
    def total_progress(self) -> list[LearnerProgress]:
        """The same with what processes did that were replaced: steps, insertions and seconds only ever grow."""
        return [_added(before, found) for before, found in zip(self._before, self.progress, strict=True)]

    @property
    def queues(self) -> Sequence[ColumnQueue]:
        """The queues of transitions, by rank."""
        return [running.transitions for running in self._running]

    def wait_until_ready(self, timeout_s: float = 300.0, interrupted: Callable[[], bool] = lambda: False) -> None:
        """Wait until all Learners are made, or `interrupted`; PearlError if they are not in time.

        Raises CheckpointError if one cannot take its state of `initial`.
        """
        deadline = time.monotonic() + timeout_s
        while not all(running.report.is_ready for running in self._running):
            if interrupted():
                return
            self._check_loading()
            self.check()
            if time.monotonic() > deadline:
                raise PearlError(f"The Learners' processes were not ready within {timeout_s:g} s.")
            time.sleep(_WAIT_S)

    def _check_loading(self) -> None:
        if self._initial is None:
            return
        for running in self._running:
            if running.report.failure is not None and not running.report.is_ready:
                raise CheckpointError(
                    f"{running.process.name} could not be made with its state of the checkpoint. Resume from another "
                    f"checkpoint, or start without --resume.\n{running.report.failure.rstrip()}"
                )

    @property
    def wants_data(self) -> bool:
        """Whether a Learner has room for a message: it takes no more than its part of the replay ratio needs."""
        return bool(self._with_room())

    def _with_room(self) -> dict[int, dict[str, np.ndarray]]:
        """The messages to fill, by rank. A Learner that waits for another is full, and does not hold that one up."""
        messages = {
            rank: running.transitions.reserve() for rank, running in enumerate(self._running) if running.report.is_ready
        }
        return {rank: message for rank, message in messages.items() if message is not None}

    def insert(self, columns: Mapping[str, np.ndarray], rows: int, beta: float, progress: float = 0.0) -> None:
        """Send the first `rows` transitions, in turn, to the Learners that have room.

        `beta` holds from now on, as do the trainer's schedules at `progress`, the share of the run that is over. Call
        it if `wants_data`. Raises ConfigurationError for more rows than `message_rows`.
        """
        if rows > self._message_rows:
            raise ConfigurationError(f"An insertion has at most {self._message_rows} rows; found {rows}.")
        messages = self._with_room()
        if not messages:
            raise PearlError("No Learner has room for transitions: ask wants_data before insert.")
        for position, (rank, message) in enumerate(messages.items()):
            part = slice((position - self._next) % len(messages), rows, len(messages))
            count = len(range(rows)[part])
            if count == 0:
                continue
            for field in self.setup.transition.fields:
                message[field.name][:count] = columns[field.name][part]
            message[BETA][0], message[PROGRESS][0] = beta, progress
            self._running[rank].transitions.publish(count)
            self._running[rank].rows += count
        self._next = (self._next + rows) % len(messages)

    def load_newest(self, timeout_s: float = 0.0) -> Average | None:
        """Load the newest average into the host's trainer; None if it has it, and none comes within `timeout_s`."""
        found = self.server.newest(self._version, timeout_s)
        if found is not None:
            self._version = found.version
            self._parameters.write(found.parameters)
        return found

    def check(self) -> None:
        """Replace Learners that died or hang; LearnerError if that happens too often."""
        for rank, running in enumerate(self._running):
            self._name_process(running)
            hangs = self._hangs(running)
            if running.process.exit_code is None:
                continue
            self.server.remove(rank)
            cause = f"it hung for {self._patience_s:g} s" if hangs else running.process.cause_of_death
            failure = running.report.failure
            detail = "" if failure is None else "\n" + failure.rstrip()
            deaths = self._deaths.one_more()
            if deaths >= self._most_deaths:
                raise LearnerError(
                    f"Learners died {deaths} times within {self._window_s:.0f} s; the last was "
                    f"{running.process.name} ({cause}). The run stops here.{detail}"
                )
            lost = min(running.rows, self._slots)
            logger.warning(
                "%s died (%s) and is replaced: its steps since average %d and its bank of %d transitions are lost.%s",
                *(running.process.name, cause, self.server.version, lost, detail),
            )
            self.restarts += 1
            self.lost_transitions += lost
            self._before[rank] = _added(self._before[rank], running.progress)
            self._running[rank] = self._start(rank)

    def save(self) -> Path:
        """Have every Learner write its state, including all transitions sent to it; return the folder.

        The folder of a Learner that died meanwhile is missing, and the Learner is replaced. Nobody averages until all
        have written. Raises CheckpointWriteError if one of them cannot write.
        """
        assert self._states is not None
        self._begin_saving(self._states)
        self.server.hold()
        try:
            for running in self._running:
                running.commands.save = self._saves
            self._await_saved()
        finally:
            self.server.go_on()
        return self._states

    def _begin_saving(self, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        self._saves += 1

    def _await_saved(self) -> None:
        """Wait until all that live have written the state that they were asked for."""
        waited_for = list(self._running)
        while waited_for := [one for one in waited_for if abs(one.progress.saved) != self._saves]:
            self.check()
            waited_for = [one for one in waited_for if one.process.exit_code is None]
            for one in waited_for:
                self._name_silent(one)
            time.sleep(_WAIT_S / 4)
        for running in self._running:
            if running.progress.saved == -self._saves:
                raise CheckpointWriteError(
                    f"The state of {running.process.name} cannot be written to {self._states}: "
                    f"{running.report.failure}. Free space, or choose another folder with --run-dir."
                )

    def _name_silent(self, running: _Running) -> None:
        """Say that a Learner whose state is waited for gives no sign of life."""
        if running.silence.seconds > _SILENCE_S and not running.is_named_silent:
            running.is_named_silent = True
            logger.warning(
                "%s (process %d) is to write its state, and has given no sign of life for %.0f s: its training step is "
                "slow, or hangs. It is waited for, and killed after %g s.",
                *(running.process.name, running.process.pid, running.silence.seconds, self._patience_s),
            )

    def _hangs(self, running: _Running) -> bool:
        """Whether the process was killed now, since it has given no sign of life for too long."""
        hangs = running.silence.look() > self._patience_s and running.process.exit_code is None
        if hangs:
            running.process.kill()
        return hangs

    def stop(self, timeout_s: float = 30.0, *, at_once: bool = False, saves: bool = False) -> list[LearnerProgress]:
        """Let the Learners train on what they were sent, average a last time, and end; return their progress.

        `load_newest` then loads the last average. Learners that do not end within `timeout_s` are killed. With
        `at_once` they train no more, but average what they have; with `saves` they write their states as for `save`,
        for as long as that takes, if they give signs of life.
        """
        if saves:
            assert self._states is not None
            self._begin_saving(self._states)
        for running in self._running:
            if saves:
                running.commands.save = self._saves
            running.commands.stops = at_once  # after `save`: who sees it saves before the end
            running.transitions.close()
        deadline = time.monotonic() + timeout_s
        for rank, running in enumerate(self._running):
            while not running.process.wait(_WAIT_S):
                if self._hangs(running) or (not saves and time.monotonic() > deadline):
                    logger.warning("%s did not stop in time and is killed.", running.process.name)
                    running.process.kill()
                elif saves:
                    self._name_silent(running)
            if running.report.failure is not None:
                logger.warning("%s failed at the end.\n%s", running.process.name, running.report.failure.rstrip())
            self.server.remove(rank)
        progress = self.progress
        self.server.close()
        return progress

    def kill(self) -> None:
        """End the processes at once. May be repeated."""
        self.server.close()
        for running in self._running:
            running.transitions.close()
            running.process.kill()


def _added(before: LearnerProgress, found: LearnerProgress) -> LearnerProgress:
    """The counts of a process and of those before it; other fields are those of the present process."""
    counts = {
        f.name: getattr(before, f.name) + getattr(found, f.name)
        for f in dataclasses.fields(LearnerProgress)
        if f.name in ("steps", "inserted") or f.name.endswith("_s")
    }
    return dataclasses.replace(found, **counts)
