"""One run of a program with a replay: what its loop calls, and how the parts of the run work together.

The program's own loop moves the messages; the session answers its questions (may I sample? may I collect?) and is
told what happened.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from pearl.actors.actor import ActorSetup, check_messages_fit, message_rows
from pearl.actors.hindsight import check_hindsight
from pearl.algorithms.trainer import Trainer, transition_of
from pearl.callbacks.protocol import Callback
from pearl.errors import ConfigurationError
from pearl.replay.frames import check_shared
from pearl.replay.protocol import ReplayManager
from pearl.replay.requests import ReplayRequestQueue
from pearl.replay.schedules import Linear, ScheduledExponents
from pearl.replay.synthetic import fill
from pearl.runtime.benchmark import Benchmark
from pearl.runtime.collection import CollectionBuffer
from pearl.runtime.data_flow import DataFlow, OffPolicy
from pearl.runtime.data_storage import HostDataStorage, make_storage
from pearl.runtime.experience import HostStorage, ReplayExperience
from pearl.runtime.given_transitions import given_transitions
from pearl.runtime.options import Options
from pearl.runtime.replay_ratio import first_batch
from pearl.runtime.reporting import Program
from pearl.runtime.run import Run
from pearl.runtime.workers import LearnerSide, TrainingLoop
from pearl.spec import REWARD, ActorSpec, ReplaySpec, TrainSpec, TransitionSpec

_STAGES = 1000  # of a schedule over the run: to set each costs some 10 us


class Session(Run):
    """One run of a generated program: a context manager, then `attach`, `launch`, and the loop."""

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
        data_flow: Callable[[ReplaySpec, ActorSpec, TrainSpec], DataFlow] = OffPolicy,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        bench = None
        if options.bench:
            bench = Benchmark.with_replay(options, replay, train)
            train = dataclasses.replace(train, replay_ratio=bench.ratio)
        self.replay_spec, self._beta = replay, math.nan
        self._next_share = math.inf  # batches of the pretraining, when the next tenth of it is done
        self._stage, self._loop = -1, cast("TrainingLoop | None", None)
        check_messages_fit(replay, actors, train)
        super().__init__(
            program,
            options,
            trainer_class=trainer_class,
            settings=settings,
            actors=actors,
            train=train,
            data_flow=data_flow(replay, actors, train),
            message_rows=message_rows(actors, train),
            experiences=train.batch_size,
            ratio=train.replay_ratio,
            bench=bench,
            callbacks=callbacks,
        )
        self._tell_after("inserted", "on_rollout")

    # --- set-up -----------------------------------------------------------------------------------------------------

    def _columns(self) -> TransitionSpec:
        made = transition_of(self._trainer_class, self.observation_space, self.action_space, self.settings)
        check_shared(made, self.replay_spec)
        space = self._probed.unprepared_space
        check_hindsight(self.train, made, self.replay_spec, space, self.actors.env_name)
        return made

    def make_storage(self) -> HostDataStorage:
        """The empty Data Storage that the replay's settings describe, in memory or in a file of the run folder."""
        return make_storage(self.transition, self.replay_spec, self.actors, self.train, self.options.run_dir)

    def attach(self, replay: ReplayManager, storage: HostStorage) -> None:
        """Register the parts of checkpoints, load the newest one with --resume, and open the log and the display."""
        identity = {"replay": f"{self.replay_spec.mode}, {self.replay_spec.capacity} slots"}
        if self.replay_spec.share_next_obs:
            identity["next observations"] = "stored once"
        if self.replay_spec.share_frames:
            identity["frames"] = "stored once"
        self._exponents = self._make_exponents(replay)
        self._replay, self._storage = replay, storage
        self._begin(ReplayExperience(replay, storage, lambda: self._beta), storage, identity)
        if self._is_pretraining():
            self._data_flow.pretrain(self.options.pretrain)
            self._next_share = self._share_after(self._pretrained)

    def _fill(self) -> None:
        self.report.say("Filling the replay with random transitions ...")
        rows = fill(
            *(
                self._replay,
                self._storage,
                self.transition,
                self.action_space,
                self.replay_spec,
                self.actors,
                self.train,
            )
        )
        self.counters.filled(max(rows, first_batch(self.train)))

    def _give(self, path: Path) -> None:
        spec, train = self.replay_spec, self.train
        given = given_transitions(path, self.transition, self.action_space, train.n_step, train.gamma, spec.capacity)
        for columns in given.chunks:
            self._replay.insert(self._storage.insert(columns, len(columns[REWARD])))
        self.counters.filled(given.rows)
        note = f" ({given.note})" if given.note else ""
        self.report.say(f"Starting with {given.rows:,} transitions of {path}{note}.")
        if self.options.pretrain:
            if given.rows < train.batch_size or spec.max_times_sampled:
                raise ConfigurationError(
                    f"--pretrain needs as many transitions as a batch has ({train.batch_size:,}), which may be sampled "
                    f"any number of times; found {given.rows:,}, with max_times_sampled={spec.max_times_sampled}."
                )
            self.report.say(f"Training {self.options.pretrain:,} batches of them before the Actors collect.")

    @property
    def _pretrained(self) -> int:
        return self.counters.samples // self.train.batch_size

    def _is_pretraining(self) -> bool:
        return self._pretrained < self.options.pretrain

    def _share_after(self, batches: int) -> int:
        tenth = max(1, self.options.pretrain // 10)
        return min(self.options.pretrain, (batches // tenth + 1) * tenth)

    def _follow_pretraining(self) -> None:
        """Leave it out of the replay ratio; save each tenth, as no environment steps do so; evaluate at the end."""
        self.counters.leave_out(self.options.pretrain * self.train.batch_size)
        if (done := self._pretrained) < self._next_share:
            return
        self._next_checkpoint = self.counters.env_steps
        if self._is_pretraining():
            self._next_share = self._share_after(done)
            self.report.say(f"Trained {done:,} of {self.options.pretrain:,} batches before the Actors collect.")
        else:
            self._next_share = math.inf
            self._next_evaluation = self.counters.env_steps

    def _actor_setups(self, count: int) -> list[ActorSetup]:
        """Given transitions take the place of random steps: the policy has learned something before."""
        made, train = super()._actor_setups(count), self.train
        given = self.counters.given // train.rows_per_step  # also in a run that is resumed
        if self._bench is not None or not given:
            return made
        train = dataclasses.replace(train, learning_starts=max(0, train.learning_starts - given))
        return [dataclasses.replace(setup, train=train) for setup in made]

    def _make_exponents(self, replay: ReplayManager) -> ScheduledExponents:
        spec = self.replay_spec
        alpha = spec.alpha if callable(spec.alpha) else None
        steps = max(1, self.options.timesteps)
        beta = spec.beta if callable(spec.beta) else Linear(spec.beta, spec.beta_final, steps)
        # A new alpha requantises every slot: a hundred times over a short run, every thousand steps of a long one.
        interval = min(1000, max(1, self.options.timesteps // 100))
        return ScheduledExponents(replay, alpha=alpha, beta=beta, alpha_interval=interval)

    def launch(self, worker: LearnerSide) -> None:
        """Start a Learner's loop in its thread; in serial mode it runs whenever the host waits."""
        if isinstance(worker, TrainingLoop):
            if self._flow.update_delay:
                self.report.say(
                    f"priority_update_delay={self._flow.update_delay} has no effect in setting 2: its loop samples "
                    "after the last update of priorities, a delay of 0."
                )
            self._flow.update_delay = 0
            self._loop = worker
        super().launch(worker)

    def watch(self, rrq: ReplayRequestQueue) -> None:
        """Have the RRQ's answers wake the host, and let the session tell when nothing is under way."""
        rrq.attach_bell(self.bell.native)
        self._telemetry.watch_replay(rrq)
        self._supervisor.watch(rrq)

    # --- the loop's questions ---------------------------------------------------------------------------------------

    def wants_data(self, buffer: CollectionBuffer) -> bool:
        """Whether the host may take another message from the actors."""
        return self._flow.wants_data(buffer)

    def insertion_due(self, buffer: CollectionBuffer) -> bool:
        """Whether to insert the buffer now: no slot that the insertion takes is being trained on."""
        if not self._flow.insertion_due(buffer):
            return False
        self._telemetry.insertion_begins(buffer)
        return True

    def may_sample(self) -> bool:
        """Whether to sample: the data flow allows it, at most D updates ahead, one request at a time."""
        return self._flow.may_sample()

    @property
    def beta(self) -> float:
        """Exponent of the importance weights of this step; the Replay Manager gets the alpha of this step, too."""
        self._beta = self._exponents(self.counters.env_steps)
        return self._beta

    def set_replay_ratio(self, ratio: float) -> None:
        """From now on, train `ratio` samples per transition that is collected; raises ConfigurationError.

        The host loop may call it at any time, also with the present ratio. A resumed run begins with the ratio of its
        `TrainSpec`. While --bench lets training run free, the call has no effect.
        """
        if self._bench is not None and self._bench.is_free:
            return
        self._data_flow.set_replay_ratio(ratio)

    def iterations_to_grant(self) -> int:
        """Setting 2: how many iterations the training loop may run next; 0 to wait."""
        iterations = self._flow.iterations_to_grant()
        if iterations:  # then no grant runs
            self._follow_schedules()
        return iterations

    def _follow_schedules(self) -> None:
        """Set the learning rate of this moment, before iterations are granted or a batch is sampled."""
        trainer = self.trainer
        if not isinstance(trainer, Trainer) or not trainer.has_schedules:
            return
        stage = _STAGES * self.counters.env_steps // max(1, self.options.timesteps)
        if stage != self._stage:
            self._stage = stage
            trainer.set_progress(stage / _STAGES)
            if self._loop is not None:
                self._loop.refresh()

    # --- what happened ----------------------------------------------------------------------------------------------

    def inserted(self) -> None:
        """The buffer entered the Data Storage."""
        self._flow.inserted()
        self._telemetry.inserted()

    def sampling(self) -> None:
        """A sampling is requested now: call it before the request, which may wake a thread that takes the core."""
        self._follow_schedules()
        self._flow.sampling()

    def sampled(self, batch: int, indices: np.ndarray) -> None:
        """A batch was sampled and assigned to the Learner under the id `batch`."""
        self._flow.sampled(batch, indices)

    def granted(self, iterations: int) -> None:
        """Setting 2: the training loop may run `iterations`; call it before the grant, as `sampling`."""
        self._flow.granted(iterations)

    def trained(self, td_error: float, iterations: int = 1, *, batch: int | None = None) -> None:
        """The batch with the id `batch` came back trained; None in setting 2: `iterations` that were granted did."""
        self.report.td_error = td_error
        self._flow.trained(iterations, batch)
        self._telemetry.trained()
        if self._next_share < math.inf:
            self._follow_pretraining()
