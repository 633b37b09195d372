"""The common part of all runs of generated programs: actors, checkpoints, evaluations, signals, reports, the end.

`Session` (a replay) and `RolloutSession` (rollouts) add what their loops ask and tell. Everything here runs in the
host's main thread.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import logging
import math
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from pearl.actors.actor import ActorSetup
from pearl.actors.environment import check_evaluation_env, probe
from pearl.actors.native_policy import NativePolicy, PolicyPlan
from pearl.actors.notices import Notices
from pearl.actors.policy_plan import read_policy
from pearl.actors.report import Silence
from pearl.actors.shared_warnings import SharedWarnings
from pearl.algorithms.trainer import Trainer, TrainerLike, make_trainer, normalization_note
from pearl.backends import support_for_torch
from pearl.callbacks.protocol import Callback
from pearl.error_state import own_error_state
from pearl.errors import (
    CallbackError,
    CheckpointError,
    CheckpointWriteError,
    ConfigurationError,
    DeviceError,
    EnvError,
)
from pearl.ipc.queues import Bell, WeightSyncQueue
from pearl.lazy_torch import torch, when_imported
from pearl.learner.native_plan import UnsupportedError
from pearl.policy.description import PolicyDescription, is_own, write_description
from pearl.policy.environment import EnvironmentSource, environment_text
from pearl.runtime.backup import move_aside
from pearl.runtime.benchmark import Benchmark
from pearl.runtime.callback_calls import CallbackCalls
from pearl.runtime.checkpoint import latest_checkpoint
from pearl.runtime.checkpoint_saver import CheckpointSaver
from pearl.runtime.collection import Ring
from pearl.runtime.composition_file import keep_composition
from pearl.runtime.data_flow import DataFlow
from pearl.runtime.drift import ITERATION, DriftWatch
from pearl.runtime.env_attributes import EnvAttributes
from pearl.runtime.evaluation import Evaluation, EvaluationEnvs
from pearl.runtime.evaluation_process import EvaluationProcess, EvaluationProcessError, idle_cores
from pearl.runtime.experience import Experience
from pearl.runtime.flow_control import FlowControl
from pearl.runtime.options import Options
from pearl.runtime.outcome import BEST_WEIGHTS, LAST_WEIGHTS, Evaluator, write_summary
from pearl.runtime.policy_server import PolicyServerProcess, ServerSetup, check_served
from pearl.runtime.queues import DataCollectionQueue
from pearl.runtime.rate import StepRate
from pearl.runtime.recomposition import RecompositionDueError, Request
from pearl.runtime.reporting import Program, Reporter, Subject
from pearl.runtime.run_context import Context
from pearl.runtime.run_log import EvaluationKind, configure_logging
from pearl.runtime.run_state import Counters, RunState
from pearl.runtime.scores import best_text, decimals, last_text
from pearl.runtime.statistics import RunStatistics
from pearl.runtime.supervision import Supervisor
from pearl.runtime.telemetry import Telemetry
from pearl.runtime.trace import Trace
from pearl.runtime.workers import LearnerSide
from pearl.spec import ActorSpec, RolloutSpec, TrainSpec, TransitionSpec

if TYPE_CHECKING:
    from typing_extensions import Self

    from pearl.remote.group import RayBridge

logger = logging.getLogger("pearl.runtime")

_WAIT_S = 0.05
_LOOK_S = 0.002  # between looks at signals, failures and the display
_DRIFT_INTERVAL_S = 1.0
_LONG_STEP_S, _LONG_LAST_STEP_S = 60.0, 10.0  # of training, until it is named; the second after a signal to stop
_LONG_EVALUATION_S = 0.5  # a process of its own takes about as long to start


class Run(abc.ABC):
    """One run of a generated program: a context manager; `attach`, `launch` and the loop are those of its subclass.

    `message_rows` are the most rows of an actor's message. An iteration trains on `experiences` transitions. `ratio`
    is how often the run trains on each transition: it chooses the prediction that the rates are compared with.
    """

    def __init__(
        self,
        program: Program,
        options: Options,
        *,
        trainer_class: type,
        settings: Mapping[str, Any],
        actors: ActorSpec,
        train: TrainSpec,
        data_flow: DataFlow,
        message_rows: int,
        experiences: int,
        ratio: float,
        bench: Benchmark | None,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        self.program, self.options = program, options
        self.actors, self.train, self.message_rows = actors, train, message_rows
        self._trainer_class, self.settings = trainer_class, dict(settings)
        if actors.is_served and options.ray is not None:
            raise ConfigurationError(
                f"--ray is for Actors that run the policy themselves; these have policy_server="
                f'{actors.policy_server!r}. Set it to "none" in ACTORS, or leave --ray out.'
            )
        self._shared_warnings = SharedWarnings()
        self._shared_warnings.install()
        probed = probe(actors)
        self.observation_space, self.action_space = probed.observation_space, probed.action_space
        self._probed = probed
        check_evaluation_env(actors, self.observation_space, self.action_space)
        self.transition = self._columns()
        self.bell = Bell()
        self._bench, self._data_flow = bench, data_flow
        self._experiences, self._ratio = experiences, ratio
        self.insertion_rows = data_flow.insertion_rows
        self.counters = Counters()
        self._begun = False
        self._is_done = False  # the checkpoint, before this program began
        self.env_attributes = EnvAttributes(actors)
        self._evaluation_envs = EvaluationEnvs(actors.evaluation, options.eval_max_steps)
        self._busy_cores: float = actors.count  # by Actors and Learner
        self._evaluation_s = 0.0  # that the last short evaluation held training up
        self._may_use_process = True
        self._seen = 0
        self._look_at = 0.0
        self._saver = CheckpointSaver(options.checkpoint_dir, self._save_into)
        # Environment and gradient steps of the newest checkpoint, and where it is.
        self._saved = (-1, -1, options.checkpoint_dir)
        self._statistics: RunStatistics | None = None
        self._steps_before = 0  # gradient steps of the parts resumed from
        self._rate = StepRate()
        self._telemetry = Telemetry(
            self._rate,
            self.insertion_rows,
            devices=program.devices,
            serial=options.serial,
            trace=None if options.trace is None else Trace(options.trace),
        )
        self.report = Reporter(program, options, experiences, ratio, self._rate, self._telemetry)
        self._supervisor = Supervisor(options.run_dir, serial=options.serial, say=self.report.say)
        self._drift = self._drift_watch()
        self._drift_at = (-math.inf, 0, 0.0)  # time, steps and busy seconds of the last observation
        self._recompose_because = ""
        self._warned_of_cut_episodes = False
        self.error = ""  # what ended the run, if it failed
        own = self.settings.get("callbacks", getattr(trainer_class, "callbacks", ()))
        self._callbacks = CallbackCalls(own, callbacks, Context(self), self._callback_failed)
        self._tell_after("collected", "on_step")

    # --- set-up -----------------------------------------------------------------------------------------------------

    def _tell_after(self, method: str, hook: str) -> None:
        """Call the callbacks' `hook` after each call of `method`; without such callbacks it stays as it is."""
        if self._bench is not None or not self._callbacks.has(hook):
            return
        done = getattr(self, method)

        def told(*arguments: Any, **further: Any) -> None:
            done(*arguments, **further)
            self._callbacks.call(hook)

        setattr(self, method, told)

    def _callback_failed(self, failure: CallbackError, reason: str) -> None:
        if self._supervisor.failure is None:
            self._supervisor.fail(failure, reason)

    @abc.abstractmethod
    def _columns(self) -> TransitionSpec:
        """The columns of actors' messages."""

    @property
    def _rollout(self) -> RolloutSpec | None:
        """The rollout of which an actor's message is a part; None with a replay."""
        return None

    @property
    def schedule(self) -> Mapping[str, Any]:
        """The values of the program's TRAIN and ROLLOUT, which override the trainer's settings of the same names."""
        return {**vars(self.train), **({} if self._rollout is None else vars(self._rollout))}

    def __enter__(self) -> Self:
        self._error_state = own_error_state()
        self._error_state.__enter__()
        configure_logging(self.options.run_dir)
        if self._probed.preparation:
            logger.info(self._probed.preparation)
        for warning in self._probed.warnings:
            logger.warning(warning)
        when_imported(functools.partial(_set_up_torch, self.options.seed))  # without the run: torch may never come
        self.report.start_clock()
        self._supervisor.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if self._supervisor.stop_parties(at_once=isinstance(error, KeyboardInterrupt)):
                self._telemetry.write_trace(self.report.say)
            if self._begun:  # unless `finish` did
                self._end_callbacks(error)
        finally:
            self._close_evaluations()
            self._shared_warnings.uninstall()
            self.report.close(kind, error, traceback)
            self._supervisor.__exit__(kind, error, traceback)
            self._error_state.__exit__(None, None, None)

    def _actor_setups(self, count: int) -> list[ActorSetup]:
        steps, policy, actors = self.counters.env_steps, self._policy, self.actors.training
        return [
            ActorSetup(
                self._trainer_class,
                self.settings,
                actors,
                self.train,
                self.options.seed,
                index,
                env_steps=steps,
                restarts=steps,
                policy=policy,
                transition=self.transition,
                rollout=self._rollout,
            )
            for index in range(count)
        ]

    @functools.cached_property
    def _policy(self) -> PolicyPlan | None:
        try:
            return read_policy(self.trainer)
        except UnsupportedError as error:
            logger.info("The policy runs in torch: the native engine does not support %s.", error)
            return None

    def make_trainer(self, device: str) -> TrainerLike:
        """The user's trainer, on `device`; DeviceError if torch cannot use that here."""
        support = None if device == "cpu" else support_for_torch(device.partition(":")[0])
        if support is not None and (reason := support.why_not(torch.device(device))) is not None:
            raise DeviceError(
                f"This program trains on {device}, which cannot be used here: {reason}. Compose it again here."
            )
        self.trainer = make_trainer(
            self._trainer_class,
            self.observation_space,
            self.action_space,
            seed=self.options.seed,
            device=device,
            settings=self.settings,
        )
        if isinstance(self.trainer, Trainer) and (inputs := self.trainer.describe_inputs()):
            logger.info(inputs)
        if note := normalization_note(self.trainer):
            logger.info(note)
        if self.options.weights_from is not None and not self.options.resume:
            from pearl.policy.warm_start import load_weights_of

            file = load_weights_of(self.trainer, self.options.weights_from)
            self.report.say(f"Starting with the weights in {file}.")
        return self.trainer

    def _begin(self, experience: Experience, ring: Ring | None, identity: Mapping[str, str]) -> None:
        """Register the parts of checkpoints, load the newest one with --resume, and open the log and the display."""
        identity = {
            "trainer": self._trainer_class.__qualname__,
            "environment": self.actors.env_name,
            "transition": ", ".join(f"{f.name}{list(f.shape)}:{f.dtype}" for f in self.transition.fields),
            **identity,
        }
        if isinstance(self.trainer, Trainer):
            identity |= self.trainer.checkpoint_identity()
        if normalizes := ", ".join(f.name for f in self.transition.statistics):
            identity["normalization"] = normalizes
        folder = self.options.run_dir
        elsewhere = "" if is_own(self.options.checkpoint_dir, folder) else str(folder.resolve())
        self._state = RunState(
            identity,
            self.trainer,
            experience,
            callbacks=self._callbacks,
            env_attributes=self.env_attributes,
            evaluated_in=environment_text(self.actors.evaluation),
            trained_in=environment_text(self.actors.training),
            run_folder=elsewhere,
        )
        best = None
        if self.options.transitions_from is not None and not self.options.resume:
            # While nothing has moved: the earlier run may be the one that gives, and if this fails it is as it was.
            self._give(self.options.transitions_from)
        if self.options.resume:
            self.counters, best = self._state.load(self.options.checkpoint_dir)
            self.report.say(f"Resumed from {self.options.checkpoint_dir} at step {self.counters.env_steps:,}.")
            if not self.options.bench and self._has_ended():
                self.report.say(
                    f"--timesteps {self.options.timesteps:,} counts the steps of the whole run, which that checkpoint "
                    "has done: nothing is trained. Give more."
                )
                self._is_done = True
        elif not self.options.bench and latest_checkpoint(self.options.checkpoint_dir) is not None:
            earlier = self.options.checkpoint_dir.glob("checkpoint-*")
            try:
                aside = move_aside(earlier, self.options.checkpoint_dir)
            except OSError as error:
                raise ConfigurationError(
                    f"The checkpoints of an earlier run in {self.options.checkpoint_dir} cannot be moved aside: "
                    f"{error}. Choose another folder with --run-dir or --checkpoint-dir, or go on from them with "
                    "--resume."
                ) from error
            self.report.say(
                f"Checkpoints of an earlier run were moved to {aside}; --resume would have gone on from them."
            )
        elif self._bench is not None:
            self._fill()
        if self.transition.statistics:
            assert isinstance(self.trainer, Trainer)
            self._statistics = RunStatistics(self.transition, self.trainer)
        self._steps_before = self.counters.gradient_steps
        self._data_flow.begin(self.counters)
        trains = self._bench is not None or self._is_pretraining()
        if not trains and (warning := self._data_flow.training_absent(self.options.timesteps)):
            logger.warning("%s", warning)
        if self._bench is None and self.options.until_return is not None and not self.options.eval_episodes:
            goal = f"{self.options.until_return:g}"
            logger.warning("Without evaluations (--eval-episodes 0), the run does not stop at a return of %s.", goal)
        self._flow = FlowControl(
            self.counters,
            self._data_flow,
            ring,
            self._rate,
            batch_size=self._experiences,
            update_delay=self.train.priority_update_delay,
            serial=self.options.serial,
        )
        self._training = Silence(self._flow)
        self._named_training: tuple[int, bool] | None = None  # what was last told of a step that takes long
        self.report.observe(
            Subject(
                self.counters,
                self.trainer,
                experience,
                lambda: self._data_flow.achieved_ratio,
                self._steps_per_iteration,
            )
        )
        self._next_checkpoint = self._after(self.options.checkpoint_interval)
        # Before the first gradient step no evaluation is made: one that was due waits for it, also in a resumed run.
        has_trained = self.counters.gradient_steps > 0
        self._next_evaluation = self._after(self.options.eval_interval) if has_trained else self.options.eval_interval
        policy = None if self._policy is None else NativePolicy(self._policy)
        self._evaluator = Evaluator(
            self.trainer,
            self.actors.evaluation,
            self.options,
            self.counters,
            self._evaluated,
            self._interrupted,
            policy,
            self._evaluation_envs,
            best=best,
            say=self.report.say,
        )
        if self._bench is not None:
            self._bench.begin(self._flow)
            keep_composition(self.options.program, self.options.run_dir)
            self.report.say(f"Starting the Actors, then measuring for {self.options.bench_seconds:g} s ...")
            return
        describe = functools.partial(self._describe, self.describe_policy())
        self.report.open(describe)  # moves an earlier run's composition aside
        describe()
        self._begun = True
        self._callbacks.start()

    def _describe(self, policy: PolicyDescription) -> None:
        """Leave in the run folder what its reports and its policy need besides records and weights."""
        keep_composition(self.options.program, self.options.run_dir)
        write_description(policy, self.options.run_dir, self.options.checkpoint_dir)

    def describe_policy(self) -> PolicyDescription:
        """The run's policy but for its weights."""
        return PolicyDescription.of(
            self.trainer,
            self.settings,
            environment=self.actors.env_name,
            env_kwargs=self.actors.env_kwargs,
            observation_space=self.observation_space,
            action_space=self.action_space,
            unshared_normalization=self._probed.normalizers,
            made=EnvironmentSource.of(self.actors),
            unprepared_space=self._probed.unprepared_space,
        )

    def _steps_per_iteration(self) -> float:
        """Gradient steps of an iteration."""
        return 1.0

    def _fill(self) -> None:  # noqa: B027
        """Before a benchmark: provide the data that training needs at once, if any."""

    def _give(self, path: Path) -> None:  # noqa: B027
        """Put the transitions at `path` into the replay, if there is one."""

    def _is_pretraining(self) -> bool:
        """Whether given transitions are still to be trained on, before anything is collected."""
        return False

    def _has_ended(self) -> bool:
        """Whether all that was asked for is done."""
        return self.counters.env_steps >= self.options.timesteps and not self._is_pretraining()

    def _after(self, interval: int) -> int:
        return (self.counters.env_steps // interval + 1) * interval

    def launch(self, worker: LearnerSide) -> None:
        """Start a Learner's loop in its thread; in serial mode it runs whenever the host waits."""
        self._telemetry.watch_worker(worker)
        self._busy_cores += math.inf if worker.cores is None else worker.cores
        self._supervisor.launch(worker)

    def launch_actors(self, dcqs: Sequence[DataCollectionQueue], wsq: WeightSyncQueue) -> None:
        """Start an actor for each queue: a spawned process, or in serial mode an inline one."""
        self._telemetry.watch_actors(dcqs)
        if self._bench is not None:
            self._bench.launched(len(dcqs), self._flow)
        self._supervisor.launch_actors(
            self._served(self._actor_setups(len(dcqs)), wsq, self._timeout_s),
            dcqs,
            wsq,
            timeout_s=self._timeout_s,
            shared_warnings=self._shared_warnings,
            notices=Notices(None if self._statistics is None else self._statistics.snapshot, self.env_attributes.queue),
            ray=self._ray,
        )

    @property
    def _timeout_s(self) -> float:
        """Seconds without a step after which environments count as hung; 0: never."""
        given = self.options.actor_timeout_s
        return self.actors.timeout_s if given is None else given

    def _served(self, setups: Sequence[ActorSetup], wsq: WeightSyncQueue, timeout_s: float) -> Sequence[ActorSetup]:
        """The setups with the services of a policy server, which starts now, if there is to be one."""
        if not self.actors.is_served:
            return setups
        check_served(self.actors, self.trainer, self._rollout)
        if self.options.serial:
            logger.warning("In serial mode there is no policy server: Actors run the policy themselves, on the CPU.")
            return setups
        spaces = self.observation_space, self.action_space
        server = PolicyServerProcess(
            ServerSetup(
                self._trainer_class, self.settings, *spaces, seed=self.options.seed, device=self.actors.policy_server
            ),
            self.transition,
            [setup.spec.envs_per_actor for setup in setups],
            wsq,
            exploration=getattr(self.trainer, "exploration", None),
            timeout_s=timeout_s,
            shared_warnings=self._shared_warnings,
        )
        self._busy_cores += 1
        self._supervisor.watch_server(server)
        return [dataclasses.replace(s, service=one) for s, one in zip(setups, server.services, strict=True)]

    @property
    def _ray(self) -> str | RayBridge | None:
        """Where Actors run: the address of a Ray cluster or the connection with it; None: here."""
        return self.options.ray

    @property
    def stop_reason(self) -> str:
        """Why the run has stopped or is about to; "" while it goes on."""
        return self._supervisor.stop_reason

    def stop(self, reason: str) -> None:
        """End the run, with a checkpoint and the last evaluation; later reasons are ignored."""
        self._supervisor.stop(reason)

    def _interrupted(self) -> bool:
        """Whether a signal asked the run to stop; evaluations ask at every step, and the display goes on meanwhile."""
        self.report.show()
        return self._supervisor.interrupted()

    # --- the loop's questions ---------------------------------------------------------------------------------------

    @property
    def progress(self) -> float:
        """How much of the run is over, from 0 to 1."""
        return min(1.0, self.counters.env_steps / max(1, self.options.timesteps))

    def running(self) -> bool:
        """Do what is due (checkpoint, evaluation, log); False once the run is over and nothing is under way."""
        self._seen = self.bell.value()
        supervisor, flow = self._supervisor, self._flow
        if self._nothing_due():
            return True
        supervisor.check_workers()
        self._interrupted()
        supervisor.check_actors(self.counters.env_steps)
        if self._evaluator.is_pending and not supervisor.stop_reason:
            self._run_evaluation(self._evaluator.hear_progress)
        self._watch_training()
        self._watch_drift()
        if self._bench is not None:
            self._advance(self._bench)
        ended = not self.options.bench and self._has_ended()
        due = [] if supervisor.stop_reason else self._due(ended)
        if ended and not due:
            supervisor.stop("all steps done")
        flow.draining = bool(supervisor.stop_reason) or bool(due)
        if not flow.draining or not flow.idle or supervisor.pending_requests():
            return True
        for action in due:
            action()
        if ended:
            supervisor.stop("all steps done")
        flow.draining = bool(supervisor.stop_reason)
        return not supervisor.stop_reason

    def _advance(self, bench: Benchmark) -> None:
        """Begin the next measurement of the benchmark, or stop, if the present one is over."""
        if not bench.is_over(self._rate, self._flow):
            return
        if not bench.has_more:
            self._supervisor.stop("measured")
            return
        bench.keep(self._bench_results())
        self._data_flow.set_replay_ratio(bench.ratio)
        self.report.replay_ratio = bench.ratio
        bench.begin(self._flow)

    def _bench_results(self) -> dict[str, object]:
        return {**self.report.rates(), "iteration_samples_us": self._telemetry.iteration_samples_us()}

    def _nothing_due(self) -> bool:
        """Whether the next look around may wait: the loop of setting 1 asks several times per batch."""
        if self.options.serial or self._flow.draining:
            return False
        next_step = min(self.options.timesteps, self._next_checkpoint)
        if self.options.eval_episodes:
            next_step = min(next_step, self._next_evaluation)
        if self.counters.env_steps >= next_step and not self.options.bench:
            return False
        now = time.monotonic()
        if now < self._look_at:
            return True
        self._look_at = now + _LOOK_S
        return False

    def _watch_training(self) -> None:
        """Say that training takes long, as only a second signal ends a run whose trainer hangs."""
        flow, signalled = self._flow, self._supervisor.signalled
        if not flow.is_training:
            self._training.begin()
            return
        silent_s = self._training.look()
        if silent_s <= (_LONG_LAST_STEP_S if signalled else _LONG_STEP_S):
            self._named_training = None
            return
        if self._named_training == (flow.beats, signalled):
            return
        self._named_training = flow.beats, signalled
        then = (
            f"The run waits for its end, to save and stop. A second signal (Ctrl-C) ends the run at once, without "
            f"that checkpoint. {self._saver.good()}"
            if signalled
            else "The run goes on when it ends; Ctrl-C stops the run."
        )
        logger.warning(
            "A training step of %s has been under way for %.0f s: it is slow, or update_policy hangs. %s",
            *(self._trainer_class.__name__, silent_s, then),
        )

    def _drift_watch(self) -> DriftWatch | None:
        """None where the prediction does not hold: there is none, or the run is a benchmark or serial."""
        options, predicted = self.options, self.program.predicted(self._ratio)
        if predicted <= 0 or options.bench or options.serial:
            return None
        terms = {**self.program.predicted_us, ITERATION: self._experiences / predicted * 1e6}
        return DriftWatch(terms, options.drift_threshold, options.drift_seconds)

    def _watch_drift(self) -> None:
        """Once in a while compare the iterations with the prediction; report a drift, or stop to compose again."""
        (at, steps, busy_s), now, rate = self._drift_at, time.monotonic(), self._rate
        if self._drift is None or now - at < min(_DRIFT_INTERVAL_S, self.options.drift_seconds / 2):
            return
        self._drift_at = now, rate.timed_steps, rate.busy_s
        if rate.timed_steps <= steps or math.isinf(at):
            return
        iteration_us = (rate.busy_s - busy_s) / (rate.timed_steps - steps) * 1e6
        drift = self._drift.observe(now, {**self._telemetry.newest_us(), ITERATION: iteration_us})
        if drift is None or self._supervisor.stop_reason:
            return
        if not self.options.recompose:
            declined = self.options.recompose is not None  # also by a run that was composed again, as best placed
            possible = self.program.composer_inputs is not None and not declined
            advice = "; --recompose would measure and place again" if possible else ""
            logger.warning("For %g s, %s%s.", self.options.drift_seconds, drift, advice)
        elif self.program.composer_inputs is None or self.options.program is None:
            logger.warning(
                "For %g s, %s. This program cannot be composed again: it does not state its ComposerInputs and "
                "its file (parse_options(program=__file__)). Compose it with this version of PEARL.",
                *(self.options.drift_seconds, drift),
            )
        else:
            self._recompose_because = str(drift)
            self._supervisor.stop(f"composing again, as for {self.options.drift_seconds:g} s {drift}")

    def _due(self, ended: bool) -> list[Callable[[], None]]:
        due: list[Callable[[], None]] = []
        if self.options.bench:
            return due
        evaluates = self.options.eval_episodes and self.counters.gradient_steps
        evaluator = self._evaluator
        if ended and evaluator.is_pending:
            due.append(self._await_evaluation)
        # The last weights compete with the best so far.
        competes = ended and (evaluator.last_may_be_best or evaluator.is_pending)
        if evaluates and (competes or self.counters.env_steps >= self._next_evaluation):
            due.append(self._evaluate_last if ended else self._evaluate)
        saves = self._saver.is_due(self.counters.env_steps >= self._next_checkpoint)
        if saves and not ended and self._data_flow.checkpoint_allowed():  # finish() saves the end
            due.append(self._checkpoint)
        return due

    def wait(self) -> None:
        """Sleep until a queue has something for the host; in serial mode, let the others do one piece of work."""
        if self._flow.has_progressed():
            return
        if self.options.serial:
            self._supervisor.run_inline(self.actors.env_name, collect=not self._flow.draining)
        else:
            start = time.perf_counter()
            self.bell.wait(self._seen, _WAIT_S)
            self._telemetry.waited(start, time.perf_counter())

    # --- what happened -----------------------------------------------------------------------------------------------

    def collected(self, message: Mapping[str, np.ndarray]) -> None:
        """A DCQ message was taken into the buffer."""
        rows, steps, actor, version = (int(message[key][0]) for key in ("rows", "env_steps", "actor", "policy_version"))
        self._flow.collected(rows, steps, version)
        if self._statistics is not None:
            self._statistics.collected(message)
        if self._bench is not None:
            self._bench.heard(actor, self._flow)
        self._telemetry.collected(actor, *message["span"].tolist())
        for ret, length in zip(message["episode_return"], message["episode_length"], strict=True):
            self.counters.episodes += 1
            self.counters.returns.append(float(ret))
            self.report.episode(actor, float(ret), int(length))

    # --- checkpoints, evaluations -----------------------------------------------------------------------------------

    def _evaluate(self) -> None:
        self._next_evaluation = self._after(self.options.eval_interval)
        if self._evaluator.is_pending:  # it takes longer than the interval: this one is left out
            return
        if self._uses_process():
            self._run_evaluation(self._evaluator.begin_progress)
            return
        start = time.monotonic()
        self._run_evaluation(self._evaluator.check_progress)
        self._evaluation_s = time.monotonic() - start

    def _evaluate_last(self) -> None:
        """At the end nothing trains meanwhile."""
        if not self._supervisor.stop_reason:
            self._run_evaluation(self._evaluator.check_progress)

    def _await_evaluation(self) -> None:
        while self._evaluator.is_pending and not self._interrupted():
            self._run_evaluation(lambda: self._evaluator.hear_progress(_WAIT_S))

    def _uses_process(self) -> bool:
        """Whether a process of its own plays the short evaluations: by default where that pays."""
        if self._evaluator.process is not None:
            return True
        wanted = self.options.eval_beside
        if wanted is None:
            wanted = self._evaluation_s > _LONG_EVALUATION_S and idle_cores(self._busy_cores) >= 1
        if not wanted or self.options.serial or not self._may_use_process:
            return False
        obstacle = ""
        if self._policy is None:
            obstacle = "the policy runs in torch, in the program itself"
        elif self._callbacks.has("on_evaluation"):
            obstacle = "a callback is told of evaluations, and may read the weights that played"
        if obstacle:
            if self.options.eval_beside:
                logger.warning("--eval-beside has no effect: %s.", obstacle)
            self._may_use_process = False
            return False
        setup = dataclasses.replace(self._actor_setups(1)[0], spec=self.actors.evaluation)
        self._evaluator.process = EvaluationProcess(
            *(setup, self.trainer, self._evaluation_envs, self._shared_warnings), timeout_s=self._timeout_s or math.inf
        )
        return True

    def _run_evaluation(self, evaluate: Callable[[], Evaluation | None]) -> None:
        """Begin, play or continue an evaluation; stop the run if the environment is solved or fails."""
        try:
            found = evaluate()
        except EnvError as error:
            self._supervisor.fail(error, "the evaluation failed")
            return
        except EvaluationProcessError as error:
            logger.warning("%s: further evaluations are played in the program itself.", error)
            self._evaluator.end_process()
            self._may_use_process = False
            return
        if found is not None:
            mean = f"{found.mean:.{decimals(found.mean)}f}"
            self._supervisor.stop(
                f"solved after {self.counters.env_steps:,} steps and {self.report.wall_s():.1f} s "
                f"(mean greedy return {mean} over the {len(found.returns)} episodes that decided it)"
            )

    def _close_evaluations(self) -> None:
        self._evaluation_envs.close()
        self.env_attributes.close()
        if "_evaluator" in self.__dict__:  # the run has begun
            self._evaluator.end_process()

    def _evaluated(self, kind: EvaluationKind, weights_step: int, found: Evaluation) -> None:
        self.report.evaluation(kind, weights_step, found)
        self._callbacks.call("on_evaluation", kind, found)

    def _checkpoint(self) -> None:
        self._next_checkpoint = self._after(self.options.checkpoint_interval)
        try:
            if (path := self._saver.save()) is None:
                return
        except CheckpointError as error:  # the state can never be stored
            self._supervisor.fail(error, "the state of the run cannot be stored")
            return
        self._callbacks.call("on_checkpoint", path)
        if self.options.serial:
            self._supervisor.restart_inline(self.counters.env_steps)
            self._warn_of_cut_episodes()

    def _warn_of_cut_episodes(self) -> None:
        """Serial mode: once, if no episode has ended before a checkpoint that starts new ones."""
        if self.counters.env_steps and not self.counters.episodes and not self._warned_of_cut_episodes:
            self._warned_of_cut_episodes = True
            logger.warning(
                "No episode has ended so far, and in serial mode a checkpoint starts new ones. Those that take longer "
                "than the %s steps of all environments between two checkpoints never end: set --checkpoint-interval "
                "to more.",
                f"{self.options.checkpoint_interval:,}",
            )

    def _save_into(self, directory: Path) -> Path:
        """Write a checkpoint; called only when nothing is under way."""
        self.report.keep_folder()
        if directory == self.options.checkpoint_dir and (error := self.report.folder_error(directory)) is not None:
            raise CheckpointWriteError(f"The checkpoint of step {self.counters.env_steps} was not written. {error}")
        counters = dataclasses.replace(self.counters, wall_s=self.report.wall_s())
        path = self._state.save(directory, counters, self._evaluator.best)
        self._saved = (counters.env_steps, counters.gradient_steps, path)
        return path

    # --- the end ----------------------------------------------------------------------------------------------------

    def finish(self) -> int:
        """End the run: checkpoint, weights, curve, evaluation, summary. Returns the exit code."""
        failure = None
        try:
            code = self._finish()
        except BaseException as error:
            failure = error
            raise
        finally:
            if self._begun:
                self._end_callbacks(failure)
        if isinstance(self._supervisor.failure, CallbackError):  # in the last evaluations, or at the end
            raise self._supervisor.failure
        return code

    def _end_callbacks(self, error: BaseException | None) -> None:
        """Call `on_end` of the callbacks, unless it was; `error` ends the run."""
        error = self._supervisor.failure if error is None else error
        if error is not None and not isinstance(error, RecompositionDueError) and not self.error:
            self.error = f"{type(error).__name__}: {error}"
        self._callbacks.end()

    def _finish(self) -> int:
        supervisor, report = self._supervisor, self.report
        supervisor.stop_parties()
        self._evaluator.end_process()
        if self._bench is not None:
            if supervisor.failure is not None:
                raise supervisor.failure
            results = self._bench.record(self._bench_results())
            write_summary(self.options.run_dir / "bench.json", {"program": self.program.name, **results})
            return supervisor.exit_code
        rates = report.rates()
        report.show_last()
        unsaved = self._save_last()
        if supervisor.failure is not None:
            if unsaved is not None:  # where the state is now must not be lost behind the failure
                logger.warning("%s", unsaved)
            raise supervisor.failure
        if self._recompose_because and not supervisor.signalled:
            if unsaved is not None:
                raise unsaved
            assert self.options.program is not None
            raise RecompositionDueError(Request.of(self.options.program, self.options, self._recompose_because))
        self._warn_of_no_training()
        directory = self.options.run_dir
        summary = report.summary(
            rates,
            env=self.actors.env_name,
            eval_env=(evaluated := self.actors.evaluation).env_name,
            eval_env_kwargs=None if evaluated is self.actors else evaluated.env_kwargs,
            stopped=supervisor.stop_reason,
            update_delay=self._flow.update_delay,
            actor_restarts=supervisor.actor_restarts,
        )
        summary |= self._evaluator.summary()
        # Weights and summary first: whatever happens in the evaluation, they are there.
        unwritten = report.leave(self._evaluator, summary, self._saved[2] if self._is_saved() else None)
        if unsaved is not None:
            raise unsaved
        if self.options.eval_episodes and not self._interrupted():
            self._evaluator.finish()
            summary |= self._evaluator.summary()
            unwritten = report.leave(self._evaluator, summary, self._saved[2])
        report.say(f"Last weights:   {last_text(summary)}\n                {directory / LAST_WEIGHTS}")
        if self._evaluator.best is not None:
            report.say(f"Best weights:   {best_text(summary)}\n                {directory / BEST_WEIGHTS}")
        title = f"{self._trainer_class.__name__} on {self.actors.env_name}"
        report.say(f"Learning curve: {report.plot(title)}")
        report.say(f"Logs:           tensorboard --logdir {shlex.quote(str(directory / 'tensorboard'))}")
        if unwritten:
            raise CheckpointWriteError(f"{unwritten} The checkpoint {self._saved[2]} has the weights.")
        return supervisor.exit_code

    def _save_last(self) -> CheckpointError | None:
        """Write the last checkpoint, if it is not there; the error if it cannot be written to its folder."""
        if isinstance(self._supervisor.failure, CheckpointError):
            return None
        checkpoint = self._saved[2]
        if not self._is_saved():
            try:
                checkpoint = self._saver.save_last(hurried=self._supervisor.signalled)
            except CheckpointError as error:
                return error
            self._callbacks.call("on_checkpoint", checkpoint)
        self.report.say(f"Checkpoint:     {checkpoint}")
        return None

    def _is_saved(self) -> bool:
        """Whether the newest checkpoint, perhaps in a temporary folder, has the present state."""
        return self._saved[:2] == (self.counters.env_steps, self.counters.gradient_steps)

    def _warn_of_no_training(self) -> None:
        is_explained = self._is_done or self._supervisor.signalled
        if self.counters.gradient_steps == self._steps_before and not is_explained:
            logger.warning("No training step was done. %s", self._data_flow.why_no_training())


def _set_up_torch(seed: int) -> None:
    # The host's own inference (evaluations) is small: more threads would only compete with Actors and Learner.
    torch.set_num_threads(1)
    torch.manual_seed(seed)
