"""Learners in processes, each with a bank of the replay, that average their parameters (SPO, thesis ch. 5).

The host sends every transition to one Learner, in turn. A Learner inserts what it is sent into its bank, and trains on
batches of B / L as often as the replay ratio allows for its own transitions: over all Learners the ratio is kept.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from pearl.actors.child_process import ChildProcess, DeathCount
from pearl.actors.report import Report
from pearl.algorithms.trainer import Trainer
from pearl.backends.replay_managers import bank_seed, bank_spec, make_replay_manager
from pearl.errors import ConfigurationError, PearlError, QueueClosedError
from pearl.ipc.queues import ColumnQueue
from pearl.learner.protocol import Learner
from pearl.local_sgd.averaging import Average, Averager, AveragingSpec
from pearl.local_sgd.parameters import Moments, ParameterLayout, TrainerParameters
from pearl.local_sgd.shared_memory import AveragingServer, Link, SharedMemoryAverager
from pearl.replay.banked import BankBatch, sample_bank, share_of_batch, weight_factors
from pearl.replay.storage import DataStorage
from pearl.spec import FieldSpec, ReplaySpec, TransitionSpec

logger = logging.getLogger("pearl.local_sgd")

_BETA, _PROGRESS = "beta", "progress"  # fields of each message, after the columns of the transitions
_STAGES = 1000  # of a schedule over the run
_WAIT_S = 0.02
_MESSAGES = 8  # that wait for a Learner
_MASS, _LEAST = range(2)  # the facts that Learners tell each other


@dataclass(frozen=True)
class LearnerSetup:
    """What every Learner's process is given; the same values for all.

    `make_trainer` and `make_learner` are functions or classes of a module, or `functools.partial` of one: processes
    import them. `replay` and `batch_size` are those of all banks together, as are `replay_ratio` (samples trained per
    transition) and `learning_starts` (transitions). `moments` is explained at `TrainerParameters`.

    Raises ConfigurationError or ReplayError if replay or batch cannot be divided among the Learners, or the replay has
    options that banks do not have.
    """

    spec: AveragingSpec
    make_trainer: Callable[[], Any]
    make_learner: Callable[[Any], Learner]
    transition: TransitionSpec
    replay: ReplaySpec
    batch_size: int
    replay_ratio: float = 8.0
    learning_starts: int = 1000
    moments: Moments = "keep"
    seed: int = 0

    def __post_init__(self) -> None:
        share_of_batch(self.batch_size, self.spec.learners)
        bank_spec(self.replay, self.spec.learners)
        if callable(self.replay.alpha):
            raise ConfigurationError(
                "alpha of Learners' banks must be a number; found a schedule, which no Learner follows. Give a number."
            )
        if self.replay.shares or self.replay.storage != "ram":
            raise ConfigurationError(
                "Learners keep their banks whole in their own memory: leave out share_next_obs, share_frames and "
                f"storage; found share_next_obs={self.replay.share_next_obs}, "
                f"share_frames={self.replay.share_frames} and storage={self.replay.storage!r}."
            )
        if self.transition.priority is not None:
            raise ConfigurationError(
                "Learners' banks give new transitions their first priorities; found a transition whose Actors do. "
                "Use one Learner, or an algorithm without first priorities."
            )
        if not self.replay_ratio > 0:
            raise ConfigurationError(f"replay_ratio must be a number above 0, or inf; found {self.replay_ratio!r}.")

    @property
    def share(self) -> int:
        """Rows of one Learner's batch."""
        return share_of_batch(self.batch_size, self.spec.learners)

    @property
    def first_rows(self) -> int:
        """Transitions that a Learner has before it trains."""
        return max(1, math.ceil(self.learning_starts / self.spec.learners))


@dataclass(frozen=True)
class LearnerProgress:
    """What one Learner's process has done since it began: its counts at its last average."""

    steps: int = 0
    inserted: int = 0
    version: int = 0
    td_error: float = math.nan


class LocalLearner:
    """One Learner with its bank: what runs in its process."""

    def __init__(self, setup: LearnerSetup, rank: int, make_averager: Callable[[ParameterLayout], Averager]) -> None:
        self._setup = setup
        self._trainer = trainer = setup.make_trainer()
        self._stage = -1
        self._learner = setup.make_learner(trainer)
        self._learner.prepare()
        self._parameters = TrainerParameters(trainer, setup.moments)
        self._averager = make_averager(self._parameters.layout)
        self._vector = np.empty(self._parameters.layout.count, np.float32)
        spec = bank_spec(setup.replay, setup.spec.learners)
        self._bank = make_replay_manager(spec, seed=bank_seed(setup.seed, rank))
        self._storage = DataStorage(setup.transition, spec.capacity)
        self._names = tuple(field.name for field in setup.transition.fields)
        self._rank, self._beta = rank, setup.replay.first_beta
        self._others: list[BankBatch] = []
        self._least = math.inf
        self._joined = False
        self._steps = self._inserted = self._version = 0
        self._td_error = math.nan

    @property
    def progress(self) -> LearnerProgress:
        """Counts up to now."""
        return LearnerProgress(self._steps, self._inserted, self._version, self._td_error)

    def beat(self) -> None:
        """Give a sign of life."""
        self._averager.beat()

    def insert(self, columns: Mapping[str, np.ndarray], rows: int, beta: float, progress: float = 0.0) -> None:
        """Put `rows` transitions into the bank; `beta`, and schedules at `progress` of the run, hold from now on."""
        slots = self._storage.insert({name: columns[name] for name in self._names}, rows)
        self._bank.insert(slots)
        self._inserted, self._beta = self._inserted + rows, beta
        stage = int(_STAGES * progress)
        if stage != self._stage and isinstance(self._trainer, Trainer) and self._trainer.has_schedules:
            self._stage = stage
            self._trainer.set_progress(stage / _STAGES)

    @property
    def may_train(self) -> bool:
        """Whether the replay ratio allows another batch."""
        return self._batches_due >= 1

    @property
    def wants_data(self) -> bool:
        """Whether to take transitions: not while those that are here allow more than H steps."""
        return math.isinf(self._setup.replay_ratio) or self._batches_due <= self._setup.spec.average_every

    @property
    def _batches_due(self) -> float:
        """Batches that the replay ratio allows, less those that were trained."""
        since = self._inserted - self._setup.first_rows
        if since < 0:
            return 0.0
        if math.isinf(self._setup.replay_ratio):
            return math.inf
        return self._setup.replay_ratio * since / self._setup.share - self._steps

    def train(self) -> bool:
        """Make a gradient step; after every H, average, and return True."""
        if not self._joined:
            self._joined = True
            self._load(self._averager.join())
        drawn, batch = sample_bank(self._bank, self._setup.share, self._beta)
        self._least = min(self._least, batch.least)
        factor = weight_factors([batch, *self._others], self._beta)[0]
        result = self._learner.step(self._storage.gather(drawn.indices), (drawn.weights * factor).astype(np.float32))
        self._bank.update(drawn.indices, result.priorities, drawn.generations)
        self._steps, self._td_error = self._steps + 1, result.td_error
        if self._steps % self._setup.spec.average_every:
            return False
        self._average()
        return True

    def finish(self) -> None:
        """Average what was trained since the last average, and take part no longer."""
        if self._joined:
            if self._steps % self._setup.spec.average_every:
                self._average()
            self._averager.leave()

    def _average(self) -> None:
        self._parameters.read(self._vector)
        facts = np.array([self._mass(), self._least if math.isfinite(self._least) else 0.0])
        self._least = math.inf
        self._load(self._averager.average(self._vector, facts))

    def _mass(self) -> float:
        """The sum of the bank's priorities, as `sample_bank` gives it."""
        total = float(self._bank.total)
        return total if self._bank.mode == "uniform" else math.ldexp(total, -self._bank.scale)

    def _load(self, average: Average) -> None:
        self._parameters.write(average.parameters)
        self._version = average.version
        self._others = [
            BankBatch(float(facts[_MASS]) if facts[_LEAST] > 0 else 0.0, float(facts[_LEAST]))
            for rank, (facts, is_member) in enumerate(zip(average.facts, average.members, strict=True))
            if is_member and rank != self._rank
        ]


def run_learner(setup: LearnerSetup, rank: int, link: Link, transitions: ColumnQueue, report: Report) -> None:
    """Main function of a Learner's process: until its queue of transitions closes, or the averaging ends."""
    try:
        local = LocalLearner(setup, rank, lambda layout: SharedMemoryAverager(link, layout))
        is_open = True

        def take(timeout_s: float = 0.0) -> bool:
            nonlocal is_open
            if not is_open:
                return False
            try:
                message = transitions.peek(timeout_s)
            except QueueClosedError:
                is_open = False
                return False
            if message is None:
                return False
            columns, rows = message
            local.insert(columns, rows, float(columns[_BETA][0]), float(columns[_PROGRESS][0]))
            transitions.release()
            return True

        def tell() -> None:
            report.deliver([float(value) for value in dataclasses.astuple(local.progress)])

        report.ready()
        try:
            while is_open or local.may_train:
                local.beat()
                report.beat()
                while local.wants_data and take():
                    pass
                if not local.may_train:
                    take(_WAIT_S)
                elif local.train():
                    tell()
            local.finish()
        except QueueClosedError:  # of the averages: the host ends without waiting
            pass
        tell()
    except BaseException:
        report.fail(traceback.format_exc(limit=-8))
        raise SystemExit(1) from None


@dataclass
class _Running:
    process: ChildProcess
    transitions: ColumnQueue
    report: Report


class LearnerGroup:
    """The Learners' processes, and the averaging between them. `with` starts and stops them.

    `trainer` is the host's own, of the class and settings that the Learners make: they begin from its parameters, and
    `load_newest` brings averages back into it. `message_rows` are the most rows of one insertion.

    A Learner that dies is named, and replaced by one that begins from the last average with an empty bank; PearlError
    if `most_deaths` die within `window_s`. One thread calls all methods.
    """

    def __init__(
        self,
        setup: LearnerSetup,
        trainer: object,
        *,
        message_rows: int = 256,
        most_deaths: int = 3,
        window_s: float = 60.0,
    ) -> None:
        slots = setup.replay.capacity // setup.spec.learners
        if not 1 <= message_rows <= slots:
            raise ConfigurationError(
                f"message_rows must lie in [1, {slots}], the slots of one bank; found {message_rows}."
            )
        self.setup, self._message_rows = setup, message_rows
        self._parameters = TrainerParameters(trainer, setup.moments)
        vector = np.empty(self._parameters.layout.count, np.float32)
        self._parameters.read(vector)
        self.server = AveragingServer(setup.spec, self._parameters.layout, vector, facts=2)
        self._most_deaths, self._window_s = most_deaths, window_s
        self._deaths = DeathCount(window_s)
        self.restarts = 0
        self._next = 0  # the Learner that gets the next transition
        self._version = 0
        self._running: list[_Running] = []

    def __enter__(self) -> LearnerGroup:
        self._running = [self._start(rank) for rank in range(self.setup.spec.learners)]
        self.server.launch()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def _start(self, rank: int) -> _Running:
        fields = [FieldSpec(f.name, (self._message_rows, *f.shape), f.dtype) for f in self.setup.transition.fields]
        queue = ColumnQueue([*fields, *(FieldSpec(name, (1,), "float64") for name in (_BETA, _PROGRESS))], _MESSAGES)
        report = Report(len(dataclasses.fields(LearnerProgress)))
        arguments = (self.setup, rank, self.server.link(rank), queue, report)
        return _Running(ChildProcess(run_learner, arguments, f"learner-{rank}"), queue, report)

    @property
    def pids(self) -> list[int]:
        """Process ids, by rank."""
        return [running.process.pid for running in self._running]

    @property
    def progress(self) -> list[LearnerProgress]:
        """What each Learner's present process has done, by rank."""
        return [_progress_of(running.report) for running in self._running]

    def wait_until_ready(self, timeout_s: float = 120.0) -> None:
        """Wait until all Learners are made; PearlError if they are not in time."""
        deadline = time.monotonic() + timeout_s
        while not all(running.report.is_ready for running in self._running):
            self.check()
            if time.monotonic() > deadline:
                raise PearlError(f"The Learners' processes were not ready within {timeout_s:g} s.")
            time.sleep(_WAIT_S)

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
            message[_BETA][0], message[_PROGRESS][0] = beta, progress
            self._running[rank].transitions.publish(count)
        self._next = (self._next + rows) % len(messages)

    def load_newest(self, timeout_s: float = 0.0) -> Average | None:
        """Load the newest average into the host's trainer; None if it has it, and none comes within `timeout_s`."""
        found = self.server.newest(self._version, timeout_s)
        if found is not None:
            self._version = found.version
            self._parameters.write(found.parameters)
        return found

    def check(self) -> None:
        """Replace Learners that died; PearlError if that happens too often."""
        for rank, running in enumerate(self._running):
            if running.process.exit_code is None:
                continue
            self.server.remove(rank)
            cause = running.process.cause_of_death
            failure = running.report.failure
            detail = "" if failure is None else "\n" + failure.rstrip()
            deaths = self._deaths.one_more()
            if deaths >= self._most_deaths:
                raise PearlError(
                    f"Learners died {deaths} times within {self._window_s:.0f} s; the last was "
                    f"{running.process.name} ({cause}). The run stops here.{detail}"
                )
            logger.warning(
                "%s died (%s) and is replaced: its steps since average %d and its bank are lost.%s",
                *(running.process.name, cause, self.server.version, detail),
            )
            self.restarts += 1
            self._running[rank] = self._start(rank)

    def stop(self, timeout_s: float = 30.0) -> list[LearnerProgress]:
        """Let the Learners train on what they were sent, average a last time, and end; return their progress.

        `load_newest` then loads the last average. Learners that do not end within `timeout_s` are killed.
        """
        for running in self._running:
            running.transitions.close()
        deadline = time.monotonic() + timeout_s
        for rank, running in enumerate(self._running):
            if not running.process.wait(max(0.0, deadline - time.monotonic())):
                logger.warning("%s did not stop in %.0f s and is killed.", running.process.name, timeout_s)
                running.process.kill()
            elif running.report.failure is not None:
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


def _progress_of(report: Report) -> LearnerProgress:
    if (found := report.result) is None:
        return LearnerProgress()
    steps, inserted, version, td_error = found
    return LearnerProgress(int(steps), int(inserted), int(version), td_error)
