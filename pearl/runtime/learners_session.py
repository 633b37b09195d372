"""One run of a program with several Learners: what its loop calls."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pearl.actors.child_process import Process
from pearl.algorithms.trainer import make_trainer
from pearl.callbacks.protocol import Callback
from pearl.errors import ConfigurationError
from pearl.ipc.queues import WeightSyncQueue
from pearl.learner.protocol import Learner
from pearl.local_sgd.averaging import AveragingSpec
from pearl.local_sgd.group import start_here
from pearl.local_sgd.local_learner import LearnerSetup, ProcessSetup
from pearl.replay.protocol import ReplayManager
from pearl.replay.schedules import Linear
from pearl.runtime.collection import CollectionBuffer
from pearl.runtime.experience import HostStorage
from pearl.runtime.learner_processes import BankedOffPolicy, LearnerProcesses, LearnersExperience
from pearl.runtime.options import Options
from pearl.runtime.reporting import Program
from pearl.runtime.session import Session
from pearl.spec import ActorSpec, LearnersSpec, ReplaySpec, TrainSpec

if TYPE_CHECKING:
    from pearl.remote.group import RayBridge


class _NoSlots:
    """The host's storage, which has no slots: no insertion of the host can take one that is trained on."""

    cursor = 0
    capacity = 1


class LearnersSession(Session):
    """One run of a generated program: a context manager, then `make_learners`, `attach_learners`, `launch`, the loop.

    Raises ConfigurationError for --serial, --bench, --recompose and --transitions-from, which are for programs of one
    Learner.
    """

    def __init__(
        self,
        program: Program,
        options: Options,
        *,
        trainer_class: type,
        settings: Mapping[str, Any],
        actors: ActorSpec,
        replay: ReplaySpec,
        train: TrainSpec,
        learners: LearnersSpec,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        for option in ("serial", "bench", "recompose", "transitions_from"):
            if getattr(options, option):
                raise ConfigurationError(
                    f"--{option.replace('_', '-')} is for programs of one Learner; this one has {learners.count}. "
                    "Leave it out, or compose with one Learner (set_learners(1))."
                )
        super().__init__(
            program,
            options,
            trainer_class=trainer_class,
            settings=settings,
            actors=actors,
            replay=replay,
            train=train,
            data_flow=BankedOffPolicy,
            callbacks=callbacks,
        )
        self.learners_spec = learners
        self._steps = 0  # of all Learners together
        self._busy_s = 0.0
        self._learners: LearnerProcesses | None = None
        self._bridge: RayBridge | None = None

    # --- set-up -----------------------------------------------------------------------------------------------------

    def make_learners(self, learner: Callable[..., Learner], **arguments: Any) -> LearnerProcesses:
        """The Learners' processes, which `launch` starts; each makes a `learner(trainer, **arguments)`.

        With --ray they run on the nodes of the cluster, as the Actors do; those of `LearnersSpec.nodes` that are on
        this machine run here all the same.
        """
        spec, train, threads = self.learners_spec, self.train, int(arguments.get("threads", 1))
        start: Callable[[LearnerSetup, ProcessSetup], Process] = start_here
        most_deaths = 3
        if self.options.ray is not None:
            from pearl.remote.bridge import Needs
            from pearl.remote.group import RayBridge, RemoteLearners, most_remote_deaths

            remote = sum(dict(spec.elsewhere).values()) if spec.nodes else spec.count
            needs = Needs(self.actors.count, remote, threads, self.actors.nodes, spec.elsewhere)
            self._bridge = RayBridge(self.options.ray, needs)
            self._supervisor.close_last(self._bridge)
            start = RemoteLearners(self._bridge, threads, spec.node_of)
            most_deaths = most_remote_deaths(spec.count)
        make = functools.partial(
            make_trainer,
            self._trainer_class,
            self.observation_space,
            self.action_space,
            device="cpu",
            settings=self.settings,
        )
        setup = LearnerSetup(
            AveragingSpec(spec.count, spec.average_every, overlap=spec.overlap),
            make,
            functools.partial(learner, **arguments),
            self.transition,
            self.replay_spec,
            train.batch_size,
            train.replay_ratio / train.rows_per_step,  # Learners count all transitions
            train.learning_starts * train.rows_per_step,
            spec.moments,
            self.options.seed,
        )
        self._learners = LearnerProcesses(
            setup,
            self.trainer,
            bell=self.bell,
            message_rows=self.insertion_rows + self.message_rows,
            run_dir=self.options.run_dir,
            threads=threads,
            ended=self._ended,
            interrupted=self._supervisor.interrupted,
            start=start,
            most_deaths=most_deaths,
        )
        return self._learners

    @property
    def _ray(self) -> RayBridge | None:
        return self._bridge

    def attach_learners(self, learners: LearnerProcesses) -> None:
        """Register the parts of checkpoints, load the newest one with --resume, and open the log and the display."""
        spec, replay = self.learners_spec, self.replay_spec
        identity = {
            "replay": f"{replay.mode}, {replay.capacity} slots",
            "learners": f"{spec.count}, each with a bank",
        }
        steps = max(1, self.options.timesteps)
        self._beta_at = replay.beta if callable(replay.beta) else Linear(replay.beta, replay.beta_final, steps)
        self._begin(LearnersExperience(learners, lambda: self._beta), _NoSlots(), identity)

    def attach(self, replay: ReplayManager, storage: HostStorage) -> None:
        """Refused: the Learners' processes have Replay Managers and Data Storages. Raises ConfigurationError."""
        raise ConfigurationError("A LearnersSession has no Replay Manager of its own: call attach_learners.")

    # --- the loop's questions ---------------------------------------------------------------------------------------

    def insertion_due(self, buffer: CollectionBuffer) -> bool:
        """Whether to send the buffer to the Learners now: there is enough in it, and one of them has room."""
        assert self._learners is not None
        return self._learners.wants_data and super().insertion_due(buffer)

    @property
    def beta(self) -> float:
        """Exponent of the importance weights of this step."""
        self._beta = float(self._beta_at(self.counters.env_steps))
        return self._beta

    # --- what happened ----------------------------------------------------------------------------------------------

    def averaged(self, learner: Learner, wsq: WeightSyncQueue) -> bool:
        """Load the newest average, count the steps up to it, and give its policy to the Actors; False without one.

        `learner` is the host's, which holds the parameters of `trainer`.
        """
        assert self._learners is not None
        if self._learners.group.load_newest() is None:
            return False
        self._count_steps(self._learners)
        self.publish(learner, wsq)
        return True

    def publish(self, learner: Learner, wsq: WeightSyncQueue) -> None:
        """Give the host's policy to the Actors."""
        learner.write_weights(wsq.staging)
        wsq.write(wsq.staging)

    def _count_steps(self, learners: LearnerProcesses) -> None:
        """An iteration is a gradient step of every Learner: together they train on a batch."""
        found, count = learners.progress(), self.learners_spec.count
        steps = sum(one.steps for one in found) // count
        busy_s = sum(o.sample_s + o.gather_s + o.train_s + o.update_s + o.average_s for o in found) / count
        if steps <= self._steps:
            return
        made, spent_s = steps - self._steps, busy_s - self._busy_s
        self._steps, self._busy_s = steps, busy_s
        errors = [one.td_error for one in found if not math.isnan(one.td_error)]
        if errors:  # none where all were just replaced
            self.report.td_error = float(np.mean(errors))
        self._flow.granted(made)
        self._flow.trained(made, busy_s=spent_s)
        self._telemetry.trained()

    # --- the end ----------------------------------------------------------------------------------------------------

    def _ended(self) -> None:
        """The Learners have stopped: count what they trained since the last look."""
        assert self._learners is not None
        self._learners.group.load_newest()
        self._count_steps(self._learners)

    def _save_into(self, directory: Path) -> Path:
        try:
            return super()._save_into(directory)
        finally:
            if self._learners is not None and not self._learners.keeps_states:
                self._learners.clean_up()

    def finish(self) -> int:
        """End the run: last average, checkpoint, weights, curve, evaluation, summary. Returns the exit code."""
        if self._learners is not None:
            self._learners.keeps_states = True
        try:
            return super().finish()
        finally:
            if self._learners is not None:
                self._learners.clean_up()
