"""Several Learners in a run: their processes, their part of checkpoints, and when data are collected."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pearl.actors.child_process import Process
from pearl.errors import CheckpointReadError, CheckpointWriteError, ClusterError, ConfigurationError, LearnerError
from pearl.ipc.queues import Bell, ColumnQueue
from pearl.local_sgd.group import LearnerGroup, start_here
from pearl.local_sgd.local_learner import LearnerProgress, LearnerSetup, ProcessSetup
from pearl.local_sgd.state_files import TRAINER, Arrays, Scalars, read_state, write_state
from pearl.recorder import Event
from pearl.runtime.checkpoint_files import refuse, saved_count
from pearl.runtime.data_flow import OffPolicy
from pearl.runtime.experience import check_replay, part
from pearl.runtime.trainer_state import RATE_PREFIX
from pearl.runtime.workers import LearnerSide

logger = logging.getLogger("pearl.local_sgd")

_MESSAGES = 2  # insertions that wait for a Learner: one that it takes, and one that is filled meanwhile
_COUNTS = ("steps", "inserted")  # of a Learner; "gradient_steps" too, where its trainer counts them
_FOLDER = ".learners"  # in the run folder, for states on their way to a checkpoint and back


class LearnerProcesses(LearnerSide):
    """The Learners' processes of a run; `trainer` is the host's, which gets the averages.

    `run_dir` is the run folder. `cores` are those of all Learners. `ended` is called when they have stopped, before
    their last average is lost; `interrupted` tells whether a signal asked the run to stop. `start` and `most_deaths`
    are those of `LearnerGroup`.
    """

    def __init__(
        self,
        setup: LearnerSetup,
        trainer: object,
        *,
        bell: Bell,
        message_rows: int,
        run_dir: Path,
        threads: int,
        ended: Callable[[], None],
        interrupted: Callable[[], bool],
        start: Callable[[LearnerSetup, ProcessSetup], Process] = start_here,
        most_deaths: int = 3,
    ) -> None:
        self.setup, self._trainer, self._bell = setup, trainer, bell
        self._message_rows, self._ended, self._interrupted = message_rows, ended, interrupted
        self.cores = setup.spec.learners * threads
        self._folder = run_dir / _FOLDER
        self._initial: Path | None = None
        self._group: LearnerGroup | None = None
        self._has_stopped = self._has_failed = False
        self._start, self._most_deaths = start, most_deaths
        self.make_learner = setup.make_learner
        # Whether the Learners write their states when they stop; set when the run ends without an error.
        self.keeps_states = False
        self._named_lost: list[str] = []
        self.restarts = 0

    @property
    def group(self) -> LearnerGroup:
        """The group, which exists after `launch`."""
        assert self._group is not None
        return self._group

    # --- start and end ----------------------------------------------------------------------------------------------

    def launch(self) -> None:
        """Start the processes, from the host's parameters and what was loaded."""
        if self._initial is None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._group = LearnerGroup(
            self.setup,
            self._trainer,
            message_rows=self._message_rows,
            messages=_MESSAGES,
            bell=self._bell,
            states=self._folder / "states",
            initial=self._initial,
            start=self._start,
            most_deaths=self._most_deaths,
        )
        self._group.launch()

    def wait_until_ready(self) -> None:
        """Wait until all Learners are made, so that the first transitions go to all of them; not after a signal."""
        self.group.wait_until_ready(interrupted=self._interrupted)
        if self._initial is not None and not self._interrupted():
            shutil.rmtree(self._initial, ignore_errors=True)
            self._initial = None

    def check(self) -> None:
        """Replace Learners that died; LearnerError if that happens too often, ClusterError if all are out of reach.

        After such an error, the remaining state is saved: transitions that no Learner takes are dropped.
        """
        if self._group is None or self._has_stopped or self._has_failed:
            return
        try:
            self._group.check()
        except (LearnerError, ClusterError):
            self._has_failed = True
            raise
        self.restarts = self._group.restarts

    def stop(self, timeout_s: float = 30.0) -> None:
        """End the processes: with a last average and their states if `keeps_states`, else at once."""
        if self._group is None or self._has_stopped:
            return
        self._has_stopped = True
        if not self.keeps_states:
            self._group.kill()
            self.clean_up()
            return
        self._group.stop(timeout_s, at_once=True, saves=True)
        self._ended()

    def clean_up(self) -> None:
        """Remove the states on the way."""
        shutil.rmtree(self._folder, ignore_errors=True)

    # --- the loop ---------------------------------------------------------------------------------------------------

    @property
    def wants_data(self) -> bool:
        """Whether a Learner has room for transitions, or nothing is left to wait for."""
        return self._has_failed or self.group.wants_data

    def insert(self, columns: Mapping[str, np.ndarray], beta: float, progress: float) -> None:
        """Send all rows of `columns` to the Learners, in turn; see `LearnerGroup.insert`."""
        if self.group.wants_data:
            self.group.insert(columns, len(next(iter(columns.values()))), beta, progress)

    def progress(self) -> list[LearnerProgress]:
        """What each Learner has done in this run, with those before it of the same rank."""
        return [] if self._group is None else self._group.total_progress

    @property
    def averages(self) -> int:
        """Averages made so far in this run."""
        return 0 if self._group is None else self._group.server.version

    @property
    def lost_transitions(self) -> int:
        """Transitions in the banks of Learners that died."""
        return 0 if self._group is None else self._group.lost_transitions

    # --- what is measured -------------------------------------------------------------------------------------------

    @property
    def queues(self) -> Mapping[str, Sequence[ColumnQueue]]:
        """The queues of transitions."""
        return {} if self._group is None else {"LAQ": self._group.queues}

    def seconds(self) -> Mapping[str, float]:
        """Seconds of `sample`, `gather`, `train` and `update`: the mean over the Learners, which work side by side."""
        if self._group is None:
            return {}
        found = self._group.total_progress
        parts = ("sample", "gather", "train", "update")
        return {name: sum(getattr(one, f"{name}_s") for one in found) / len(found) for name in parts}

    def keep_events(self, most: int) -> None:
        """Nothing: a trace has no events of other processes."""

    def events(self) -> dict[str, list[Event]]:
        """None: see `keep_events`."""
        return {}

    def last_batch(self) -> dict[str, np.ndarray]:
        """None: the batch of a step that failed stays in the process, whose error is shown."""
        return {}

    def run_inline(self) -> bool:
        """Never called: a serial run has one Learner."""
        return False

    def restarted(self) -> None:
        """Never called, as `run_inline`."""

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def states(self) -> list[tuple[Arrays, Scalars] | None]:
        """The state of each Learner, by rank, now or when it stopped; None for one that died or could not write it.

        Arrays are maps of files in the run folder, which stay until the next call or `clean_up`.
        """
        folder = self._folder / "states"
        if not self._has_stopped:
            try:
                folder = self.group.save()
            except (LearnerError, ClusterError) as error:  # `check` ends the run with it
                raise CheckpointWriteError(f"The Learners cannot write their states. {error}") from error
        # A Learner that has stopped cannot write again: what it could not write is lost, but not the newest average.
        try:
            found = [
                read_state(folder / str(rank)) if progress.saved >= 0 else None
                for rank, progress in enumerate(self.group.progress)
            ]
        except CheckpointReadError as error:  # such as too many open files: it may be possible later
            raise CheckpointWriteError(f"The states that the Learners wrote cannot be read. {error}") from error
        lost = [str(rank) for rank, state in enumerate(found) if state is None]
        if lost and lost != self._named_lost:  # a checkpoint may be tried several times
            logger.warning(
                "The checkpoint has the newest average, and without Learner %s: its transitions and the state of its "
                "optimizers are lost. A run that resumes it collects them again.",
                ", ".join(lost),
            )
        self._named_lost = lost
        return found

    def begin_with(self, states: Mapping[int, tuple[Mapping[str, np.ndarray], Mapping[str, Any]]]) -> None:
        """Give the Learners these states, by rank, when they start."""
        self._initial = self._folder / "initial"
        shutil.rmtree(self._folder, ignore_errors=True)
        self._initial.mkdir(parents=True)
        for rank, (arrays, scalars) in states.items():
            write_state(self._initial / str(rank), arrays, scalars)


class LearnersExperience:
    """Training data of several Learners, as checkpoints and reports see it: the bank, networks and optimizers of each.

    `beta` returns the exponent of the newest importance weights.
    """

    def __init__(self, learners: LearnerProcesses, beta: Callable[[], float]) -> None:
        self._learners, self._beta = learners, beta

    def _ranks(self) -> Sequence[int]:
        return range(self._learners.setup.spec.learners)

    def state(self) -> tuple[Arrays, Scalars]:
        """The states of all Learners, each with its prefix."""
        arrays: Arrays = {}
        scalars: Scalars = {}
        for rank, found in enumerate(self._learners.states()):
            if found is not None:
                arrays |= {f"{_prefix(rank)}{name}": array for name, array in found[0].items()}
                scalars |= {f"{_prefix(rank)}{name}": value for name, value in found[1].items()}
        return arrays, scalars

    def knows(self, kind: str, name: str) -> bool:
        """Whether `name` has the prefix of a Learner of this run, and that of a part of its state."""
        ranked, _, rest = name.partition("/")
        if f"{ranked}/" not in map(_prefix, self._ranks()):
            return False
        if kind == "arrays":
            return rest.startswith(("replay/", "storage/", TRAINER))
        return rest.startswith(("replay/", "storage/", RATE_PREFIX)) or rest in (*_COUNTS, "gradient_steps")

    def check(self, arrays: Mapping[str, np.ndarray], scalars: Mapping[str, Any], where: Path) -> None:
        """Each Learner's rows, counts and priorities fit together; a Learner that had died has none of them."""
        for rank, (own, counts) in self._parts(arrays, scalars).items():
            check_replay(own, counts, where)
            for name in _COUNTS:
                saved_count(scalars, f"{_prefix(rank)}{name}", where)
            if counts["storage/inserted"] != counts["inserted"]:
                expected = f"as many as its storage counts, {counts['storage/inserted']}"
                refuse(where, f"{_prefix(rank)}inserted", expected, counts["inserted"])

    def load(self, arrays: Mapping[str, np.ndarray], scalars: Mapping[str, Any], where: Path) -> None:
        """Keep the states for the Learners' start; CheckpointWriteError if the run folder has no room for them."""
        try:
            self._learners.begin_with(self._parts(arrays, scalars))
        except OSError as error:
            raise CheckpointWriteError(
                f"The Learners' states of the checkpoint in {where} cannot be copied into the run folder: {error}. "
                "Free space, or choose another folder with --run-dir."
            ) from error

    def _parts(
        self, arrays: Mapping[str, np.ndarray], scalars: Mapping[str, Any]
    ) -> dict[int, tuple[dict[str, Any], dict[str, Any]]]:
        """The state of each Learner of which something was saved."""
        found = {rank: (part(arrays, _prefix(rank)), part(scalars, _prefix(rank))) for rank in self._ranks()}
        return {rank: both for rank, both in found.items() if any(both)}

    def log_scalars(self) -> dict[str, float]:
        """The exponent of the weights, the number of the newest average, and what was lost with Learners that died."""
        return {
            "replay/beta": self._beta(),
            "learners/averages": float(self._learners.averages),
            "learners/replaced": float(self._learners.restarts),
            "learners/lost_transitions": float(self._learners.lost_transitions),
        }

    def summary(self) -> dict[str, object]:
        """How many Learners there are, how they average, and what each has done in this run."""
        spec, found = self._learners.setup.spec, self._learners.progress()
        return {
            "learners": {
                "count": spec.learners,
                "average_every": spec.average_every,
                "moments": self._learners.setup.moments,
                "overlap": spec.overlap,
                "averages": self._learners.averages,
                "replaced": self._learners.restarts,
                "lost_transitions": self._learners.lost_transitions,
                "gradient_steps": [one.steps for one in found],
                "transitions": [one.inserted for one in found],
            }
        }


def _prefix(rank: int) -> str:
    return f"learner-{rank}/"


class BankedOffPolicy(OffPolicy):
    """The data flow of several Learners: each keeps the replay ratio for its bank, and takes no more than that needs.

    Their full queues hold collection back, not the run's counters: what a dead Learner had is never trained on.
    """

    def collection_allowed(self) -> bool:
        """Always: a full collection buffer waits for room in the Learners' queues."""
        return True

    def batches_allowed(self) -> int:
        """One: the Learners decide for themselves."""
        return 1

    def set_replay_ratio(self, ratio: float) -> None:
        """Accept the present ratio; ConfigurationError for another."""
        if ratio != self._train.replay_ratio:
            raise ConfigurationError(
                f"Several Learners keep the replay ratio that they began with, {self._train.replay_ratio:g}; found "
                f"{ratio:g}. Use one Learner to change it during a run."
            )
