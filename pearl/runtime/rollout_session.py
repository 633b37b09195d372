"""One run of a program with rollouts (on-policy): what its loop calls, and the Learner's side of its queues."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pearl.algorithms.on_policy import OnPolicyTrainer, present_policy, rollout_transition
from pearl.callbacks.protocol import Callback
from pearl.errors import ConfigurationError, PearlError
from pearl.ipc.queues import Bell, ColumnQueue, WeightSyncQueue
from pearl.learner.protocol import RolloutLearner
from pearl.recorder import Event, Recorder
from pearl.rollout.buffer import RolloutBuffer
from pearl.rollout.columns import message_fields
from pearl.rollout.gae import AdvantageEstimator
from pearl.rollout.preparation import RolloutPreparation
from pearl.runtime.benchmark import Benchmark
from pearl.runtime.collection import summary_of
from pearl.runtime.data_flow import OnPolicy
from pearl.runtime.experience import RolloutExperience
from pearl.runtime.options import Options
from pearl.runtime.queues import DataCollectionQueue
from pearl.runtime.reporting import Program
from pearl.runtime.run import Run
from pearl.runtime.workers import LearnerSide, Worker
from pearl.spec import OBS, ActorSpec, FieldSpec, RolloutSpec, TrainSpec, TransitionSpec, check_minibatches


class RolloutSession(Run):
    """One run of a generated program: a context manager, then `attach`, `launch`, and the loop."""

    def __init__(
        self,
        program: Program,
        options: Options,
        *,
        trainer_class: type,
        settings: Mapping[str, Any],
        actors: ActorSpec,
        rollout: RolloutSpec,
        train: TrainSpec,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        if options.transitions_from is not None:
            raise ConfigurationError(
                f"--transitions-from gives transitions to a replay; {trainer_class.__name__} learns from rollouts of "
                "its present policy and has none. Leave it out."
            )
        self.rollout = rollout
        check_minibatches(rollout, actors, train)
        rows = rollout.horizon * actors.env_count
        ratio = float(rollout.epochs)
        super().__init__(
            program,
            options,
            trainer_class=trainer_class,
            settings=settings,
            actors=actors,
            train=train,
            data_flow=OnPolicy(rows, rollout.epochs),
            message_rows=rollout.horizon * actors.envs_per_actor,
            experiences=rows,
            ratio=ratio,
            bench=Benchmark(options, ratio, ratio) if options.bench else None,
            callbacks=callbacks,
        )
        if self.transition.rollout_sequences is not None:
            self.transition.rollout_sequences.check(rollout, train)
        self._tell_after("trained", "on_rollout")
        self._rollouts = self._most_lag = self._transitions = 0
        self._held: Sequence[DataCollectionQueue] = ()
        self._learner: RolloutWorker | None = None

    def _columns(self) -> TransitionSpec:
        return rollout_transition(self._trainer_class, self.observation_space, self.action_space, self.settings)

    @property
    def _rollout(self) -> RolloutSpec:
        return self.rollout

    def make_queue(self) -> DataCollectionQueue:
        """An actor's DCQ. It holds a rollout, and another one if collecting goes on during training.

        The host frees a message's slot after the training on it, so that the actors wait for the new weights.
        """
        slots = 1 + self.rollout.policy_lag
        further = message_fields(self.transition, self.rollout.horizon, self.actors.envs_per_actor)
        return DataCollectionQueue(self.transition, self.message_rows, slots, self.bell, further)

    def make_buffer(self) -> RolloutBuffer:
        """The rollout's memory on the host."""
        return RolloutBuffer(self.transition, self.rollout, self.actors)

    def make_preparation(self) -> RolloutPreparation:
        """The standardisation and quantisation of rewards and values."""
        return RolloutPreparation(self.rollout, self.actors.env_count, self.train.gamma)

    def attach(self, preparation: RolloutPreparation) -> None:
        """Register the parts of checkpoints, load the newest one with --resume, and open the log and the display."""
        spec = self.rollout
        identity = {
            "rollout": f"{spec.horizon} steps of {self.actors.env_count} environments",
            "reward_standardization": spec.reward_standardization,
        }
        self._begin(RolloutExperience(preparation, lambda: self._most_lag), None, identity)

    def launch(self, worker: LearnerSide) -> None:
        """Start the Learner's loop in its thread; in serial mode it runs whenever the host waits."""
        if isinstance(worker, RolloutWorker):
            self._learner = worker
        super().launch(worker)

    def _steps_per_iteration(self) -> float:
        made = self.counters.gradient_steps - self._steps_before
        return made / self._rollouts if self._rollouts else 0.0

    # --- the loop's questions ---------------------------------------------------------------------------------------

    def collect(self, dcqs: Sequence[DataCollectionQueue], buffer: RolloutBuffer) -> bool:
        """Copy the next rollout into `buffer`, if all actors have sent their parts and nothing is being trained on."""
        if self._held or self._flow.draining:
            return False
        found = [dcq.peek() for dcq in dcqs]
        messages = [message for message in found if message is not None]
        if len(messages) < len(dcqs):
            return False
        buffer.take([message for message, _ in messages])
        self._held = dcqs
        self._transitions = 0
        for message, _ in messages:
            steps = int(message["counts"][1])  # without steps that only reset an environment
            self._transitions += steps
            self.collected(summary := summary_of(message, steps))
            if self._learner is not None:
                self._most_lag = max(self._most_lag, self._learner.version - int(summary["policy_version"][0]))
        self._flow.inserted()
        self._telemetry.inserted()
        return True

    # --- what happened ----------------------------------------------------------------------------------------------

    def training(self) -> None:
        """The rollout goes to the Learner now; call it before the assignment."""
        self._flow.granted(1, whole=False)  # it began with collecting

    def trained(self, minibatches: int, td_error: float) -> None:
        """The rollout was trained on in `minibatches` steps, and the actors' new weights are published."""
        held, self._held = self._held, ()
        for dcq in held:
            dcq.release()
        self._rollouts += 1
        self.report.td_error = td_error
        samples = samples_of(minibatches, self._transitions, self.train.batch_size, self.rollout.epochs)
        self._flow.trained(1, gradient_steps=minibatches, samples=samples)
        self._telemetry.trained()


def samples_of(minibatches: int, transitions: int, batch_size: int, epochs: int) -> int:
    """Samples in the first `minibatches` on a rollout: with target_kl there may be fewer than its `epochs` have."""
    passes, rest = divmod(minibatches, max(1, -(-transitions // batch_size)))
    return min(passes * transitions + min(rest * batch_size, transitions), epochs * transitions)


class RolloutAssignmentQueue(ColumnQueue):
    """LAQ of on-policy training: the buffer is ready, at this share of the run."""

    def __init__(self, slots: int = 1) -> None:
        super().__init__([FieldSpec("progress", (1,), "float64")], slots)

    def assign(self, progress: float) -> None:
        """Host: let the Learner train on the buffer."""
        message = self.reserve(timeout_s=60.0)
        if message is None:
            raise PearlError("The Learner did not take its next rollout for 60 s.")
        message["progress"][0] = progress
        self.publish()


class RolloutDoneQueue(ColumnQueue):
    """LDQ of on-policy training: gradient steps made, and the mean size of the advantages."""

    def __init__(self, bell: Bell, slots: int = 1) -> None:
        super().__init__([FieldSpec("minibatches", (1,), "int64"), FieldSpec("td_error", (1,), "float64")], slots, bell)


class RolloutWorker(Worker):
    """Standardises, estimates advantages, trains and publishes the weights, one rollout after the other."""

    def __init__(
        self,
        laq: RolloutAssignmentQueue,
        ldq: RolloutDoneQueue,
        wsq: WeightSyncQueue,
        bell: Bell,
        *,
        buffer: RolloutBuffer,
        preparation: RolloutPreparation,
        advantages: AdvantageEstimator,
        learner: RolloutLearner,
        trainer: OnPolicyTrainer,
    ) -> None:
        super().__init__("Learner", laq, ldq, bell, learner.prepare)
        self.cores = getattr(learner, "threads", None)
        self._buffer, self._preparation = buffer, preparation
        self._advantages, self._learner, self._trainer = advantages, learner, trainer
        self._wsq, self._staging = wsq, np.zeros(learner.weight_count, np.float32)
        self._times = Recorder("advantages", "train", "publish")
        self._td_error = math.nan  # of the newest rollout with transitions
        self._publish()

    def _publish(self) -> None:
        self._learner.write_weights(self._staging)
        self.version = self._wsq.write(self._staging)

    def restarted(self) -> None:
        """Publish the newest weights; the Actors begin new episodes."""
        self._preparation.begin_episodes()
        self._publish()

    def last_batch(self) -> dict[str, np.ndarray]:
        """The rollout that is being trained on."""
        return {name: column.copy() for name, column in self._buffer.columns.items()}

    def take(self, timeout_s: float) -> bool:
        """Train on the next rollout."""
        found = self.laq.peek(timeout_s)
        if found is None:
            return False
        buffer, times = self._buffer, self._times
        times.begin()
        self._estimate()
        rows = buffer.rows()
        advantages = buffer.rewards if rows is None else buffer.rewards.reshape(-1)[rows]
        if advantages.size:
            self._td_error = float(np.abs(advantages).mean())
        times.end("advantages")
        self._trainer.set_progress(float(found[0]["progress"][0]))
        minibatches = self._train(buffer.flat(), rows)
        times.end("train")
        self._publish()
        times.end("publish")
        done = self.ldq.reserve(timeout_s=60.0)
        if done is None:
            raise PearlError("The host did not read the Learner's results for 60 s.")
        done["minibatches"][0], done["td_error"][0] = minibatches, self._td_error
        self.ldq.publish()
        self.laq.release()
        return True

    def _train(self, rollout: Mapping[str, np.ndarray], rows: np.ndarray | None) -> int:
        """Train on the `rows` of a rollout, None: all, and return the minibatches.

        There may be none: with a horizon of 1, the only step of each environment may be a reset.
        """
        minibatches = 0
        if rows is None or len(rows):
            metrics = self._learner.train(rollout, rows)
            minibatches = int(metrics["minibatches"])
            self._trainer.report({n: value for n, value in metrics.items() if n not in ("minibatches", "epochs")})
        self._trainer.take_in(rollout[OBS])
        return minibatches

    def _estimate(self) -> None:
        """Overwrite the buffer's rewards and values by advantages and returns."""
        buffer = self._buffer
        spec, known = self._preparation.spec, (buffer.bonus, buffer.last_values, buffer.ends)
        if spec.correction != "vtrace" or not spec.policy_lag:
            self._preparation.estimate(self._advantages, buffer.rewards, buffer.values, *known)
            return
        # From here on, the present policy is the "old" policy of the clipped ratio.
        log_prob, values = present_policy(self._trainer, buffer.flat())
        log_ratios = log_prob.reshape(buffer.ends.shape) - buffer.log_probs
        buffer.log_probs += log_ratios
        assert buffer.old_values is not None
        buffer.values[:] = buffer.old_values[:] = values.reshape(buffer.ends.shape)
        self._preparation.correct(buffer.rewards, buffer.values, *known, log_ratios)

    def seconds(self) -> Mapping[str, float]:
        """Seconds spent so far on `advantages`, `train` and `publish`."""
        return self._times.spent

    def keep_events(self, most: int) -> None:
        """Keep the newest `most` events of the Learner's thread."""
        self._times.keep_events(most)

    def events(self) -> dict[str, list[Event]]:
        """The events of the Learner's thread."""
        return {self._name: self._times.events()}
