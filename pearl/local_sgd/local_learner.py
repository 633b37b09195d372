"""One of several Learners: its bank of the replay, its gradient steps, and what runs in its process."""

from __future__ import annotations

import dataclasses
import math
import shutil
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pearl.actors.report import Report
from pearl.algorithms.trainer import Trainer
from pearl.backends.replay_managers import bank_seed, bank_spec, make_replay_manager
from pearl.errors import CheckpointError, ConfigurationError, QueueClosedError
from pearl.ipc.queues import Bell, ColumnQueue
from pearl.ipc.shared_buffer import SharedBuffer
from pearl.lazy_torch import torch, when_imported
from pearl.learner.protocol import Learner
from pearl.local_sgd.averaging import Average, Averager, AveragingSpec, OverlappedAverager
from pearl.local_sgd.parameters import ParameterLayout, TrainerParameters
from pearl.local_sgd.shared_memory import Link, SharedMemoryAverager
from pearl.local_sgd.state_files import Arrays, Scalars, load_trainer, read_state, trainer_arrays, write_state
from pearl.local_sgd.steps import make_steps
from pearl.replay.banked import BankBatch, share_of_batch
from pearl.replay.storage import DataStorage
from pearl.runtime.checkpoint_files import saved_count
from pearl.runtime.experience import ReplayExperience
from pearl.runtime.trainer_state import saved_rates, stated_rates
from pearl.spec import FieldSpec, MomentsRule, ReplaySpec, TransitionSpec

BETA, PROGRESS = "beta", "progress"  # fields of each message, after the columns of the transitions

_STAGES = 1000  # of a schedule over the run
_WAIT_S = 0.02
_LONGEST_S = 0.02  # of steps without a sign of life in between
_FIRST_STEP_S = 60.0  # how long the first may take
_MASS, _LEAST = range(2)  # the facts that Learners tell each other
_SEED_OF_TRAINERS = 1 << 32  # far from the banks' numbers, so that draws and noise differ


@dataclass(frozen=True)
class LearnerSetup:
    """What every Learner's process is given; the same values for all.

    `make_trainer` and `make_learner` are functions or classes of a module, or `functools.partial` of one: processes
    import them. Each Learner calls `make_trainer(seed=...)` with a seed of its own, which decides about noise; its
    networks are those of the first average. `replay` and `batch_size` are those of all banks together, as are
    `replay_ratio` (samples trained per transition) and `learning_starts` (transitions). `moments` is explained at
    `TrainerParameters`.

    Raises ConfigurationError or ReplayError if replay or batch cannot be divided among the Learners, or the replay has
    options that banks do not have.
    """

    spec: AveragingSpec
    make_trainer: Callable[..., Any]
    make_learner: Callable[[Any], Learner]
    transition: TransitionSpec
    replay: ReplaySpec
    batch_size: int
    replay_ratio: float = 8.0
    learning_starts: int = 1000
    moments: MomentsRule = "keep"
    seed: int = 0

    def __post_init__(self) -> None:
        check_banks(self.replay, self.transition, self.batch_size, self.spec.learners)
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

    def trainer_seed(self, rank: int) -> int:
        """The seed of the trainer of Learner `rank`, below 2**62."""
        return bank_seed(self.seed, _SEED_OF_TRAINERS + rank) >> 2


def check_banks(replay: ReplaySpec, transition: TransitionSpec, batch_size: int, learners: int) -> None:
    """Raise ConfigurationError or ReplayError, with a remedy, for options that Learners with banks do not have."""
    share_of_batch(batch_size, learners)
    bank_spec(replay, learners)
    if callable(replay.alpha):
        raise ConfigurationError(
            "alpha of Learners' banks must be a number; found a schedule, which no Learner follows. Give a number."
        )
    if replay.shares or replay.storage != "ram":
        raise ConfigurationError(
            "Learners keep their banks whole in their own memory: leave out share_next_obs, share_frames and "
            f"storage; found share_next_obs={replay.share_next_obs}, share_frames={replay.share_frames} and "
            f"storage={replay.storage!r}."
        )
    if transition.priority is not None:
        raise ConfigurationError(
            "Learners' banks give new transitions their first priorities; found a transition whose Actors do. "
            "Use one Learner, or an algorithm without first priorities."
        )


@dataclass(frozen=True)
class LearnerProgress:
    """The counts of one Learner's process since it began, at its last average.

    The last five are seconds spent on the parts of gradient steps; `average_s` includes the wait for others. `saved` is
    the number of the state that was written last, negative if that failed.
    """

    steps: int = 0
    inserted: int = 0
    version: int = 0
    td_error: float = math.nan
    saved: int = 0
    sample_s: float = 0.0
    gather_s: float = 0.0
    train_s: float = 0.0
    update_s: float = 0.0
    average_s: float = 0.0

    @classmethod
    def of(cls, report: Report) -> LearnerProgress:
        """The last counts that the process wrote into its report."""
        if (found := report.result) is None:
            return cls()
        steps, inserted, version, td_error, saved, *seconds = found
        return cls(int(steps), int(inserted), int(version), td_error, int(saved), *seconds)


class LocalLearner:
    """One Learner with its bank: what runs in its process. `state` is that of a checkpoint, if the run is resumed."""

    def __init__(
        self,
        setup: LearnerSetup,
        rank: int,
        make_averager: Callable[[ParameterLayout], Averager],
        state: Path | None = None,
    ) -> None:
        self._setup = setup
        self._trainer = trainer = setup.make_trainer(seed=setup.trainer_seed(rank))
        self._stage = -1
        spec = bank_spec(setup.replay, setup.spec.learners)
        self._bank = make_replay_manager(spec, seed=bank_seed(setup.seed, rank))
        self._storage = DataStorage(setup.transition, spec.capacity)
        self._steps = self._inserted = self._version = 0
        if state is not None:
            self._load_state(state)
        self._loaded = self._steps, self._inserted
        learner = setup.make_learner(trainer)
        learner.prepare()
        self._training = make_steps(learner, self._bank, self._storage, setup.share)
        self._parameters = TrainerParameters(trainer, setup.moments)
        self._averager = averager = make_averager(self._parameters.layout)
        self._overlapped = averager if setup.spec.overlap and isinstance(averager, OverlappedAverager) else None
        if setup.spec.overlap and self._overlapped is None:
            raise ConfigurationError(
                f"{type(averager).__name__} makes Learners wait for their averages, and overlap is "
                f"{setup.spec.overlap}. Set overlap to 0."
            )
        # What was handed in last, in the averager's own memory if it has some.
        staging = getattr(averager, "staging", None)
        self._vector = np.empty(self._parameters.layout.count, np.float32) if staging is None else staging
        self._names = tuple(field.name for field in setup.transition.fields)
        self._rank, self._beta = rank, setup.replay.first_beta
        self._joined = False
        self._since = 0  # gradient steps since the last average was handed in for, or joined from
        self._awaits = False  # whether an average was handed in for and not taken
        self._td_error = math.nan
        self._step_s = 0.0  # seconds of a step, as the last ones took them
        self._average_s = 0.0

    @property
    def progress(self) -> LearnerProgress:
        """Counts up to now."""
        spent = self._training.seconds()
        return LearnerProgress(
            steps=self._steps - self._loaded[0],
            inserted=self._inserted - self._loaded[1],
            version=self._version,
            td_error=self._td_error,
            sample_s=spent["sample"],
            gather_s=spent["gather"],
            train_s=spent["train"],
            update_s=spent["update"],
            average_s=self._average_s,
        )

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
            self._training.refresh()

    @property
    def may_train(self) -> bool:
        """Whether the replay ratio allows another batch."""
        return self._batches_due >= 1

    @property
    def has_rest(self) -> bool:
        """Whether the replay ratio still asks for batches of the stored transitions; False without a replay ratio."""
        return 1 <= self._batches_due < math.inf

    @property
    def wants_data(self) -> bool:
        """Whether to take transitions: not while the stored ones allow more than H steps."""
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
        """Make the gradient steps that are due before the next average, or some of them; average after every H.

        With overlap, parameters are handed in after every H steps, and the average is taken so many steps later. Takes
        no longer than a few hundredths of a second, or one step. Returns whether it took an average.
        """
        if not self._joined:
            self._joined = True
            self._averager.expect(_FIRST_STEP_S)
            self._load(self._averager.join())
        spec = self._setup.spec
        left = (spec.overlap if self._awaits else spec.average_every) - self._since
        soon = 1 if self._step_s == 0 else max(1, int(_LONGEST_S / self._step_s))
        count = int(min(self._batches_due, left, soon))
        if self._step_s:
            self._averager.expect(2 * count * self._step_s)
        start = time.perf_counter()
        self._td_error = self._training.run(count, self._beta)
        now = time.perf_counter()
        self._step_s = (now - start) / count
        self._steps += count
        self._since += count
        version = self._version
        if self._awaits and self._since == spec.overlap:
            self._take()
        if not self._awaits and self._since == spec.average_every:
            self._hand_in(self._overlapped)
        self._average_s += time.perf_counter() - now
        return self._version != version

    def finish(self) -> None:
        """Average what was trained since the last average, and take part no longer."""
        if self._joined:
            if self._awaits:
                self._take()
            if self._since:
                self._hand_in(None)
            self._averager.leave()

    def state(self) -> tuple[Arrays, Scalars]:
        """Bank, networks, optimizers and counts, for a checkpoint."""
        arrays, scalars = ReplayExperience(self._bank, self._storage).state()
        scalars |= {"steps": self._steps, "inserted": self._inserted, **stated_rates(self._trainer)}
        if hasattr(self._trainer, "gradient_steps"):
            scalars["gradient_steps"] = int(self._trainer.gradient_steps)
        return {**arrays, **trainer_arrays(self._trainer)}, scalars

    def _load_state(self, folder: Path) -> None:
        """Take back what `state` gave; a Learner of which nothing was saved begins without transitions."""
        if (found := read_state(folder)) is None:
            return
        arrays, scalars = found
        ReplayExperience(self._bank, self._storage).load(arrays, scalars, folder)
        rates = saved_rates(self._trainer, scalars, folder)
        load_trainer(self._trainer, arrays)
        if isinstance(self._trainer, Trainer):
            self._trainer.restate_rates(rates)  # the host says what changed
        self._steps, self._inserted = (saved_count(scalars, name, folder) for name in ("steps", "inserted"))
        if hasattr(self._trainer, "gradient_steps"):
            self._trainer.gradient_steps = saved_count(scalars, "gradient_steps", folder)

    def _hand_in(self, overlapped: OverlappedAverager | None) -> None:
        """Hand in for the next average; wait for it unless it is `overlapped` with the next steps."""
        self._parameters.read(self._vector)
        least = self._training.take_least()
        facts = np.array([self._mass(), least if math.isfinite(least) else 0.0])
        self._since = 0
        if overlapped is None:
            self._load(self._averager.average(self._vector, facts))
        else:
            overlapped.hand_in(self._vector, facts)
            self._awaits = True

    def _take(self) -> None:
        """Wait for the average that was handed in for, and add what it changed to what was trained since.

        If the others went on without this Learner, its steps are lost: it goes on from the newest average.
        """
        assert self._overlapped is not None
        self._awaits = False
        average = self._overlapped.take()
        if average.version == self._version + 1 and average.members[self._rank]:
            self._parameters.correct(average.parameters, self._vector)
            if average.is_whole():
                self._follow(average)
                return
            average = self._averager.join()
        self._since = 0
        self._load(average)

    def _mass(self) -> float:
        """The sum of the bank's priorities, as `sample_bank` gives it."""
        total = float(self._bank.total)
        return total if self._bank.mode == "uniform" else math.ldexp(total, -self._bank.scale)

    def _load(self, average: Average) -> None:
        self._parameters.write(average.parameters)
        while not average.is_whole():
            average = self._averager.join()
            self._parameters.write(average.parameters)
        self._follow(average)

    def _follow(self, average: Average) -> None:
        """Set the importance weights by the facts of all banks that came with the average just loaded."""
        self._version = average.version
        others = [
            BankBatch(float(facts[_MASS]) if facts[_LEAST] > 0 else 0.0, float(facts[_LEAST]))
            for rank, (facts, is_member) in enumerate(zip(average.facts, average.members, strict=True))
            if is_member and rank != self._rank
        ]
        self._training.set_banks(others)
        if self._setup.moments != "keep":
            self._training.refresh()


class TransitionQueue(ColumnQueue):
    """Transitions from the host to a Learner, at most `rows` a message, with `BETA` and `PROGRESS`."""

    @property
    def rows(self) -> int:
        """The most transitions of a message."""
        return self._fields[0].shape[0]

    @property
    def message_bytes(self) -> int:
        """Bytes of a full message."""
        return sum(field.nbytes for field in self._fields)


def transition_queue(transition: TransitionSpec, rows: int, slots: int) -> TransitionQueue:
    """A queue of `slots` messages of at most `rows` transitions."""
    columns = [FieldSpec(field.name, (rows, *field.shape), field.dtype) for field in transition.fields]
    return TransitionQueue([*columns, *(FieldSpec(name, (1,), "float64") for name in (BETA, PROGRESS))], slots)


class Commands:
    """Commands from the host to a Learner's process: words in shared memory, which the host writes.

    `save` is the number of the state to write; `stops` ends the Learner without training on transitions that are due.
    """

    def __init__(self) -> None:
        self._attach(SharedBuffer(16))

    def _attach(self, buffer: SharedBuffer) -> None:
        self._buffer = buffer
        self._words = np.frombuffer(buffer.memory, np.int64, 2)

    def __getstate__(self) -> SharedBuffer:
        return self._buffer

    def __setstate__(self, buffer: SharedBuffer) -> None:
        self._attach(buffer)

    @property
    def save(self) -> int:
        """The number of the state to write; 0 before the first."""
        return int(self._words[0])

    @save.setter
    def save(self, number: int) -> None:
        self._words[0] = number

    @property
    def stops(self) -> bool:
        """Whether to end without training on transitions that are due."""
        return bool(self._words[1])

    @stops.setter
    def stops(self, stops: bool) -> None:
        self._words[1] = stops


@dataclass(frozen=True)
class ProcessSetup:
    """What one Learner's process shares with the host. `states` is the folder of states, by rank, to write.

    `bell` rings in the host when there is room for transitions, or progress.
    """

    rank: int
    link: Link
    transitions: TransitionQueue
    report: Report
    commands: Commands
    bell: Bell
    states: Path | None
    initial_state: Path | None


def run_learner(setup: LearnerSetup, shared: ProcessSetup) -> None:
    """Main function of a Learner's process: until its queue of transitions closes, or the averaging ends."""
    report = shared.report
    try:
        seed = setup.trainer_seed(shared.rank)
        when_imported(lambda: _seed_torch(seed))
        _LearnerProcess(setup, shared).run()
    except BaseException:
        report.fail(traceback.format_exc(limit=-8))
        shared.bell.ring()
        raise SystemExit(1) from None


def _seed_torch(seed: int) -> None:
    torch.manual_seed(seed)


class _LearnerProcess:
    def __init__(self, setup: LearnerSetup, shared: ProcessSetup) -> None:
        self._shared = shared
        self._is_open = True
        self._saved = 0
        self._local = LocalLearner(
            setup,
            shared.rank,
            lambda layout: SharedMemoryAverager(shared.link, layout, self._meanwhile),
            shared.initial_state,
        )

    def run(self) -> None:
        local, commands = self._local, self._shared.commands
        self._shared.report.ready()
        try:
            while (self._is_open or local.has_rest) and not commands.stops:
                local.beat()
                self._shared.report.beat()
                self._answer()
                for _ in range(self._shared.transitions.slots):  # a host that is fast enough could go on for ever
                    if not local.wants_data or not self._take():
                        break
                if not local.may_train:
                    self._take(_WAIT_S)
                elif local.train():
                    self._tell()
            local.finish()
        except QueueClosedError:  # of the averages: the host ends without waiting
            pass
        self._tell()
        self._answer()

    def _take(self, timeout_s: float = 0.0) -> bool:
        """Insert the next message; False if there is none."""
        if not self._is_open:
            return False
        transitions = self._shared.transitions
        try:
            message = transitions.peek(timeout_s)
        except QueueClosedError:
            self._is_open = False
            return False
        if message is None:
            return False
        columns, rows = message
        self._local.insert(columns, rows, float(columns[BETA][0]), float(columns[PROGRESS][0]))
        transitions.release()
        self._shared.bell.ring()
        return True

    def _tell(self) -> None:
        progress = dataclasses.replace(self._local.progress, saved=self._saved)
        self._shared.report.deliver([float(value) for value in dataclasses.astuple(progress)])
        self._shared.bell.ring()

    def _meanwhile(self) -> None:
        """While it waits for an average."""
        self._shared.report.beat()
        self._answer()

    def _answer(self) -> None:
        """Write the state that the host asked for, including all transitions that it has sent."""
        number, states = self._shared.commands.save, self._shared.states
        if number == abs(self._saved) or states is None:
            return
        while self._take():
            pass
        folder = states / str(self._shared.rank)
        try:
            write_state(folder, *self._local.state(), self._shared.report.beat)
        except (OSError, CheckpointError) as error:
            self._saved = -number
            shutil.rmtree(folder, ignore_errors=True)  # a full disk needs the room
            self._shared.report.fail(str(error))
        else:
            self._saved = number
        self._tell()
