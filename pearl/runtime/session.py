"""What a running program keeps count of: steps, schedules, logs, checkpoints, evaluations, and when to stop.

The program's own loop moves the messages; the session answers its questions (may I sample? may I collect?) and is
told what happened. Everything here runs in the host's main thread.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import logging
import math
import shlex
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch

from pearl.actors.actor import ActorSetup, check_messages_fit, message_rows
from pearl.actors.environment import make_vector_env
from pearl.actors.native_policy import NativePolicy, PolicyPlan
from pearl.actors.normalization import normalization_warnings
from pearl.actors.policy_plan import read_policy
from pearl.actors.process import ActorGroup
from pearl.actors.shared_warnings import SharedWarnings
from pearl.algorithms.actor_critic import ActorCritic
from pearl.algorithms.trainer import Trainer, TrainerLike, make_trainer, transition_of
from pearl.atomic_file import replace_file
from pearl.errors import (
    ActorError,
    CheckpointError,
    CheckpointWriteError,
    ConfigurationError,
    EnvError,
    PearlError,
    TrainerError,
)
from pearl.ipc.queues import Bell, WeightSyncQueue
from pearl.learner.native_plan import UnsupportedError
from pearl.replay.protocol import ReplayManager
from pearl.replay.requests import ReplayRequestQueue
from pearl.replay.schedules import Linear, ScheduledExponents
from pearl.replay.storage import DataStorage
from pearl.runtime.checkpoint import latest_checkpoint
from pearl.runtime.checkpoint_saver import CheckpointSaver
from pearl.runtime.collection import CollectionBuffer, collides, insertion_rows
from pearl.runtime.data_storage import make_storage
from pearl.runtime.earlier import move_aside
from pearl.runtime.entry import run_log_file
from pearl.runtime.evaluation import Evaluation, EvaluationEnvs
from pearl.runtime.interruption import Interruption
from pearl.runtime.learning_curve import plot_learning_curve
from pearl.runtime.options import Options
from pearl.runtime.outcome import BEST_WEIGHTS, LAST_WEIGHTS, Evaluator, write_summary
from pearl.runtime.progress import ProgressDisplay
from pearl.runtime.queues import DataCollectionQueue
from pearl.runtime.rate import StepRate
from pearl.runtime.replay_ratio import ReplayRatio, check_samples_last, training_absent, why_no_training
from pearl.runtime.run_folder import RunFolder
from pearl.runtime.run_log import EvaluationKind, RunLog, configure_logging, end_log_file, run_file_handler
from pearl.runtime.run_state import Counters, HostStorage, RunState
from pearl.runtime.scores import best_text, decimals, last_text
from pearl.runtime.serial import InlineActor
from pearl.runtime.workers import TrainingLoop, Worker
from pearl.spec import ActorSpec, ReplaySpec, TrainSpec

logger = logging.getLogger("pearl.runtime")

_GRANT_S = 0.02  # setting 2's grants: long enough to cost nothing, short enough to stop soon
_SHOW_INTERVAL_S = 0.1
_LOG_INTERVAL_S = 1.0
_LOGGED_ROWS = 50_000  # of progress.csv: after 14 hours they come more rarely
_BENCH_WARM_UP_S = 1.0  # first steps choose their kernels and fill caches
_REPLAY_STATISTICS = (
    "filled",
    "samples_per_item",
    "exhausted",
    "age_mean",
    "age_max",
    "effective_sample_size",
    "max_priority",
    "stale",
    "saturated",
)
_WAIT_S = 0.05
_INSERTION_S = 0.05


@dataclass(frozen=True)
class Program:
    """What the composer knew when it wrote the program."""

    name: str
    predicted_eps: float
    composed_from: str = ""


class Session:
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
    ) -> None:
        # Items that may be sampled so many times only would not last for training without data.
        if options.bench and not replay.max_times_sampled:
            train = dataclasses.replace(train, replay_ratio=math.inf)
        self.program, self.options = program, options
        self.actors, self.replay_spec, self.train = actors, replay, train
        self._trainer_class, self._settings = trainer_class, dict(settings)
        self._shared_warnings = SharedWarnings()
        self._shared_warnings.install()
        probe = make_vector_env(actors, 1)
        self.observation_space, self.action_space = probe.single_observation_space, probe.single_action_space
        self._warnings = normalization_warnings(probe, actors.env)
        probe.close()
        self.transition = transition_of(trainer_class, self.observation_space, self.action_space)
        self.bell = Bell()
        check_messages_fit(replay, actors, train)
        self.message_rows = message_rows(actors, train)
        self.insertion_rows = insertion_rows(replay, actors, self.message_rows)
        check_samples_last(replay, train, self.insertion_rows + self.message_rows)
        self.counters = Counters()
        self._interruption = Interruption()
        self._draining = False
        self._stop_reason = ""
        self._failure: PearlError | None = None
        self._interruption_told = False
        self._workers: list[Worker] = []
        self._inline: list[InlineActor] = []
        self._evaluation_envs = EvaluationEnvs(actors, options.eval_max_steps)
        self._group: ActorGroup | None = None
        self._restarts = 0
        self._rrq: ReplayRequestQueue | None = None
        self._in_flight: deque[np.ndarray] = deque()
        self._requested = self._granted = self._buffered = 0
        self._update_delay = train.priority_update_delay  # in effect
        self._insertion_waits = False
        self._seen = 0
        self._progressed = False
        self._td_error = self._beta = math.nan
        self._greedy_note = ""  # the last greedy evaluation, as the display shows it
        self._shown_at = self._logged_at = self._folder_checked_at = -math.inf
        self._saver = CheckpointSaver(options.checkpoint_dir, self._save_into)
        # Environment and gradient steps of the newest checkpoint, and where it is.
        self._saved = (-1, -1, options.checkpoint_dir)
        self._steps_before = 0  # gradient steps of the parts resumed from
        self._unwritten = ""  # what of the results could not be written
        self._rate = StepRate()
        self._warming_up = options.bench
        self._log: RunLog | None = None
        self._display: ProgressDisplay | None = None
        self._folder = RunFolder(options)

    # --- set-up -----------------------------------------------------------------------------------------------------

    def __enter__(self) -> Session:
        configure_logging(self.options.run_dir)
        for warning in self._warnings:
            logger.warning(warning)
        # The host's own inference (evaluations) is small: more threads would only compete with Actors and Learner.
        torch.set_num_threads(1)
        torch.manual_seed(self.options.seed)
        self._started = time.monotonic()
        self._interruption.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self._stop_parties()
        finally:
            self._evaluation_envs.close()
            self._shared_warnings.uninstall()
            if self._display is not None:
                self._display.__exit__(kind, error, traceback)
            if self._log is not None:
                self._log.close()
            self._folder.release()
            self._interruption.__exit__(kind, error, traceback)

    def _actor_setups(self, count: int) -> list[ActorSetup]:
        steps, policy = self.counters.env_steps, self._policy
        return [
            ActorSetup(
                self._trainer_class,
                self._settings,
                self.actors,
                self.train,
                self.options.seed,
                index,
                env_steps=steps,
                restarts=steps,
                policy=policy,
                transition=self.transition,
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
        """The user's trainer, on `device`."""
        self.trainer = make_trainer(
            self._trainer_class,
            self.observation_space,
            self.action_space,
            seed=self.options.seed,
            device=device,
            settings=self._settings,
        )
        if isinstance(self.trainer, Trainer) and (inputs := self.trainer.describe_inputs()):
            logger.info(inputs)
        return self.trainer

    def make_storage(self) -> DataStorage:
        """The empty Data Storage that the replay's settings describe, in memory or in a file of the run folder."""
        return make_storage(self.transition, self.replay_spec, self.actors, self.train, self.options.run_dir)

    def attach(self, replay: ReplayManager, storage: HostStorage) -> None:
        """Name what checkpoints hold, with --resume load the newest, and open the log and the display."""
        identity = {
            "trainer": self._trainer_class.__qualname__,
            "environment": self.actors.env,
            "transition": ", ".join(f"{f.name}{list(f.shape)}:{f.dtype}" for f in self.transition.fields),
            "replay": f"{self.replay_spec.mode}, {self.replay_spec.capacity} slots",
        }
        if self.replay_spec.share_next_obs:
            identity["next observations"] = "stored once"
        if isinstance(self.trainer, ActorCritic):
            identity["scale_observations"] = str(self.trainer.scale_observations)
        self._storage = storage
        self._exponents = self._make_exponents(replay)
        self._state = RunState(identity, self.trainer, replay, storage)
        best = None
        if self.options.resume:
            self.counters, best = self._state.load(self.options.checkpoint_dir)
            self._say(f"Resumed from {self.options.checkpoint_dir} at step {self.counters.env_steps:,}.")
            if not self.options.bench and self.counters.env_steps >= self.options.timesteps:
                self._say(
                    f"--timesteps {self.options.timesteps:,} counts the steps of the whole run, which that checkpoint "
                    "has done: nothing is trained. Give more."
                )
        elif not self.options.bench and latest_checkpoint(self.options.checkpoint_dir) is not None:
            earlier = self.options.checkpoint_dir.glob("checkpoint-*")
            aside = move_aside(earlier, self.options.checkpoint_dir)
            self._say(f"Checkpoints of an earlier run were moved to {aside}; --resume would have gone on from them.")
        self._steps_before = self.counters.gradient_steps
        if warning := training_absent(self.train, self.options.timesteps, self.counters):
            logger.warning("%s", warning)
        lead = self.insertion_rows + self.message_rows
        self._ratio = ReplayRatio(self.train, self.counters, lead)
        self._next_checkpoint = self._after(self.options.checkpoint_interval)
        self._next_evaluation = self._after(self.options.eval_interval)
        step = self.counters.env_steps
        policy = None if self._policy is None else NativePolicy(self._policy)
        self._evaluator = Evaluator(
            self.trainer,
            self.actors,
            self.options,
            self.counters,
            self._log_evaluation,
            self._interrupted,
            policy,
            self._evaluation_envs,
            best,
        )
        if self.options.bench:
            self._say(f"Collecting the first data, then measuring for {self.options.bench_seconds:g} s ...")
            return
        self._log = RunLog(
            self.options.run_dir,
            resume=self.options.resume,
            resume_step=step if step else None,
            resume_wall_s=self.counters.wall_s,
        )
        self._display = ProgressDisplay(self.options.timesteps, initial_steps=step)
        self._display.__enter__()

    def _make_exponents(self, replay: ReplayManager) -> ScheduledExponents:
        spec = self.replay_spec
        alpha = spec.alpha if callable(spec.alpha) else None
        steps = max(1, self.options.timesteps)
        beta = spec.beta if callable(spec.beta) else Linear(spec.beta, spec.beta_final, steps)
        # A new alpha requantises every slot: a hundred times over a short run, every thousand steps of a long one.
        interval = min(1000, max(1, self.options.timesteps // 100))
        return ScheduledExponents(replay, alpha=alpha, beta=beta, alpha_interval=interval)

    def _after(self, interval: int) -> int:
        return (self.counters.env_steps // interval + 1) * interval

    def launch(self, worker: Worker) -> None:
        """Start a Learner's loop in its thread; in serial mode it runs whenever the host waits."""
        if isinstance(worker, TrainingLoop):
            if self._update_delay:
                self._say(
                    f"priority_update_delay={self._update_delay} has no effect in setting 2: its loop samples after "
                    "the last update of priorities, a delay of 0."
                )
            self._update_delay = 0
        self._workers.append(worker)
        # Freeze live objects: torch steps trigger frequent GC.
        gc.freeze()
        if not self.options.serial:
            worker.launch()

    def launch_actors(self, dcqs: Sequence[DataCollectionQueue], wsq: WeightSyncQueue) -> None:
        """Start an actor for each queue: a spawned process, or in serial mode an inline one."""
        setups = self._actor_setups(len(dcqs))
        if self.options.serial:
            self._inline = [InlineActor(s, q, wsq) for s, q in zip(setups, dcqs, strict=True)]
        else:
            timeout_s = self.options.actor_timeout_s
            self._group = ActorGroup(
                setups,
                dcqs,
                wsq,
                timeout_s=(self.actors.timeout_s if timeout_s is None else timeout_s) or math.inf,
                shared_warnings=self._shared_warnings,
            )

    def watch(self, rrq: ReplayRequestQueue) -> None:
        """Have the RRQ's answers wake the host, and let the session tell when nothing is under way."""
        rrq.attach_bell(self.bell.native)
        self._rrq = rrq

    def _stop_parties(self) -> None:
        with contextlib.ExitStack() as stack:
            for worker in self._workers:
                stack.callback(worker.stop)
            for actor in self._inline:
                stack.callback(actor.close)
            if self._group is not None:
                self._restarts = self._group.restarts
                stack.callback(self._group.stop)
            if self._rrq is not None:
                stack.callback(self._rrq.close)
        self._workers, self._inline, self._group, self._rrq = [], [], None, None

    def _interrupted(self) -> bool:
        """Tell whether a signal asked the run to stop, and say so to the user, once."""
        self._show()  # evaluations ask at every step: the display goes on meanwhile
        if self._interruption.signal is None:
            return False
        name = self._interruption.signal.name
        if not self._stop_reason:
            self._stop(f"{name} received")
        elif not self._interruption_told:
            self._say(f"{name} received: what is left of the run is skipped.")
        self._interruption_told = True
        return True

    def _stop(self, reason: str) -> None:
        if not self._stop_reason:
            self._stop_reason = reason
            self._say(f"Stopping: {reason}.")

    # --- the loop's questions ---------------------------------------------------------------------------------------

    def running(self) -> bool:
        """Do what is due (checkpoint, evaluation, log); False once the run is over and nothing is under way."""
        self._seen = self.bell.value()
        for worker in self._workers:
            self._check_worker(worker)
        self._interrupted()
        self._check_actors()
        if self.options.bench and self._rate.total_s >= self.options.bench_seconds and not self._warming_up:
            self._stop("measured")
        ended = not self.options.bench and self.counters.env_steps >= self.options.timesteps
        due = [] if self._stop_reason else self._due(ended)
        if ended and not due:
            self._stop("all steps done")
        self._draining = bool(self._stop_reason) or bool(due)
        if not self._draining or not self._quiet():
            return True
        for action in due:
            action()
        if ended:
            self._stop("all steps done")
        self._draining = bool(self._stop_reason)
        return not self._stop_reason

    def _check_worker(self, worker: Worker) -> None:
        """Raise what went wrong in the worker; a training step that failed leaves its batch in the run folder."""
        try:
            worker.check()
        except TrainerError as error:
            path = self.options.run_dir / "failed_batch.npz"
            try:
                with replace_file(path) as stream:
                    np.savez(stream, **worker.last_batch())  # type: ignore[arg-type]
            except OSError as failure:
                raise TrainerError(f"{error} The batch could not be saved as {path}: {failure}.") from error
            raise TrainerError(f"{error} The batch was saved as {path}: numpy.load() shows it.") from error
        except PearlError as error:
            raise type(error)(f"{error} The full traceback is in {run_log_file()}.") from error

    def _check_actors(self) -> None:
        # Once the run stops, actors may end as they like: whoever stopped it may have stopped them too.
        if self._group is None or self._stop_reason or self._interruption.signal is not None:
            return
        try:
            self._group.check(self.counters.env_steps)
        except ActorError as error:
            self._failure = error
            self._stop("actors failed")

    def _due(self, ended: bool) -> list[Callable[[], None]]:
        due: list[Callable[[], None]] = []
        if self.options.bench:
            return due
        evaluates = self.options.eval_episodes and self.counters.gradient_steps
        # The last weights compete with the best so far.
        competes = ended and self._evaluator.last_may_be_best
        if evaluates and (competes or self.counters.env_steps >= self._next_evaluation):
            due.append(self._evaluate)
        saves = self._saver.is_due(self.counters.env_steps >= self._next_checkpoint)
        if saves and not ended:  # finish() saves the end
            due.append(self._checkpoint)
        return due

    def _quiet(self) -> bool:
        """Nothing sampled awaits training, nothing collected awaits insertion."""
        pending = self._rrq.pending() if self._rrq is not None else 0
        return not (self._requested or self._granted or self._buffered or pending)

    def wait(self) -> None:
        """Sleep until a queue has something for the host; in serial mode, let the others do one piece of work."""
        if self._progressed:
            self._progressed = False
        elif not self.options.serial:
            self.bell.wait(self._seen, _WAIT_S)
        elif not any([worker.run_inline() for worker in self._workers]) and not self._draining:  # noqa: C419 (all run)
            self._run_inline_actors()

    def _run_inline_actors(self) -> None:
        for actor in self._inline:
            try:
                actor.run_once()
            except PearlError:
                raise
            except Exception as error:
                detail = "".join(traceback.format_exception(error, limit=-8)).rstrip()
                self._failure = ActorError(
                    f"The environment {self.actors.env} or the policy failed in an actor. The run stops here; its "
                    f"checkpoint can be resumed with --resume once the cause is fixed.\n{detail}"
                )
                self._stop("actors failed")
                return

    def wants_data(self, buffer: CollectionBuffer) -> bool:
        """Whether the host may take another message from the actors."""
        return not self._draining and not buffer.full and self._ratio.collection_allowed()

    def insertion_due(self, buffer: CollectionBuffer) -> bool:
        """Insert now: the buffer is full, or its data have waited, or the run drains.

        In setting 1 no slot that the insertion takes may be trained on. In setting 2 the host knows
        no slots: there the Learner trains on copies, and the Replay Manager drops the priorities of slots that were
        overwritten meanwhile.
        """
        self._buffered = buffer.count
        # What slow environments bring does not wait for a full buffer. Time must not show in a serial run.
        late = not self.options.serial and buffer.age_s > _INSERTION_S
        wanted = buffer.full or late or (self._draining and buffer.count > 0)
        # A sampling that is still under way may return any slot: insertion waits for its end.
        sampled = self._requested == len(self._in_flight)
        ready = wanted and sampled and not collides(self._storage, buffer.count, self._in_flight)
        self._insertion_waits = buffer.full and not ready
        return ready

    def may_sample(self) -> bool:
        """Whether to sample: enough data, the replay ratio, at most D updates ahead, one request at a time."""
        return (
            not self._draining
            # A full buffer waits for the batches under way to end: a further one would delay it without end.
            and not self._insertion_waits
            and self._requested == len(self._in_flight)
            and self._requested <= self._update_delay
            and self._ratio.batches_allowed() > self._requested
        )

    @property
    def beta(self) -> float:
        """Exponent of the importance weights of this step; the Replay Manager gets the alpha of this step, too."""
        self._beta = self._exponents(self.counters.env_steps)
        return self._beta

    def set_replay_ratio(self, ratio: float) -> None:
        """From now on, train `ratio` samples per transition that is collected; raises ConfigurationError.

        The host loop may call it at any time, also with the ratio that holds. A resumed run begins with that of its
        `TrainSpec`; --bench, which lets training run free, with no other.
        """
        if self.options.bench:
            return
        check_samples_last(
            self.replay_spec,
            dataclasses.replace(self.train, replay_ratio=ratio),
            self.insertion_rows + self.message_rows,
        )
        self._ratio.set(ratio)

    def iterations_to_grant(self) -> int:
        """Setting 2: how many iterations the training loop may run next; 0 to wait."""
        if self._draining or self._granted:
            return 0
        # How fast this run happens to be must not show in a serial run's order of work.
        aim = 1 if self.options.serial else max(1, int(_GRANT_S * self._rate.busy))
        return min(self._ratio.batches_allowed(), aim)

    # --- what happened ----------------------------------------------------------------------------------------------

    def collected(self, message: Mapping[str, np.ndarray]) -> None:
        """A DCQ message was taken into the buffer."""
        counters = self.counters
        rows, steps, actor = (int(message[key][0]) for key in ("rows", "env_steps", "actor"))
        counters.env_steps += steps
        counters.collected += rows
        self._buffered += rows
        for ret, length in zip(message["episode_return"], message["episode_length"], strict=True):
            counters.episodes += 1
            counters.returns.append(float(ret))
            if self._log is not None:
                self._log.episode(counters.env_steps, self._wall_s(), actor, float(ret), int(length))
        self._progressed = True

    def inserted(self) -> None:
        """The buffer entered the Data Storage."""
        self.counters.stored += self._buffered
        self._buffered = 0
        self._progressed = True

    def sampling(self) -> None:
        """A sampling was requested."""
        self._requested += 1
        self._rate.started()
        self._progressed = True

    def sampled(self, indices: np.ndarray) -> None:
        """A batch was sampled and assigned to the Learner."""
        self._in_flight.append(indices)
        self._progressed = True

    def granted(self, iterations: int) -> None:
        """Setting 2: the training loop may run `iterations`."""
        self._granted = iterations
        self._rate.started()
        self._progressed = True

    def trained(self, td_error: float, iterations: int = 1) -> None:
        """A batch (setting 2: what was granted) came back trained."""
        if self._granted:
            self._granted = 0
        else:
            self._in_flight.popleft()
            self._requested -= 1
        self.counters.gradient_steps += iterations
        self.counters.samples += iterations * self.train.batch_size
        self._td_error = td_error
        self._rate.trained(
            iterations, idle=not self._requested and (self._draining or not self._ratio.batches_allowed())
        )
        if self._warming_up and self._rate.total_s >= min(_BENCH_WARM_UP_S, self.options.bench_seconds):
            self._warming_up = False
            self._rate = StepRate()
            if self._requested:
                self._rate.started()
        self._progressed = True

    # --- log, checkpoints, evaluations ------------------------------------------------------------------------------

    def _wall_s(self) -> float:
        return self.counters.wall_s + time.monotonic() - self._started

    def _say(self, text: str) -> None:
        logger.info(text)
        if self._display is not None:
            self._display.say(text)
        else:
            print(text, flush=True)

    def _show(self) -> None:
        now = time.monotonic()
        if self._display is None or now - self._shown_at < _SHOW_INTERVAL_S:
            return
        self._shown_at = now
        counters, gps = self.counters, self._rate.recent
        self._display.update(
            steps=counters.env_steps,
            mean_return=counters.mean_return,
            eps=gps * self.train.batch_size,
            gps=gps,
            replay_ratio=self._ratio.achieved,
            episodes=counters.episodes,
            note=self._greedy_note,
        )
        if now - self._logged_at >= max(_LOG_INTERVAL_S, self._wall_s() / _LOGGED_ROWS):
            self._logged_at = now
            self._log_scalars()
        if now - self._folder_checked_at >= _LOG_INTERVAL_S:
            self._folder_checked_at = now
            self._keep_folder()

    def _keep_folder(self) -> None:
        """Go on in a new run folder where the run's own was moved or deleted."""
        if not self._folder.keep():
            return
        if self._log is not None:
            self._log.reopen()
        if (handler := run_file_handler()) is not None:
            handler.reopen()
        if self._folder.is_lost(self.options.run_dir):
            self._log = None
            end_log_file()

    def _log_scalars(self) -> None:
        if self._log is None:
            return
        counters, gps = self.counters, self._rate.recent
        self._log.scalars(
            counters.env_steps,
            {
                "wall_s": self._wall_s(),
                "gradient_steps": counters.gradient_steps,
                "episodes": counters.episodes,
                "training_return": counters.mean_return,
                "eps": gps * self.train.batch_size,
                "gps": gps,
                "replay_ratio": self._ratio.achieved,
                "td_error": self._td_error,
                **(self.trainer.metrics() if isinstance(self.trainer, Trainer) else {}),
                **self._replay_scalars(),
            },
        )

    def _replay_scalars(self) -> dict[str, float]:
        replay = self._state.replay
        found = replay.statistics()
        scalars = {name: float(getattr(found, name)) for name in _REPLAY_STATISTICS}
        scalars |= {"alpha": replay.alpha, "beta": self._beta}
        return {f"replay/{name}": value for name, value in scalars.items()}

    def _log_evaluation(self, kind: EvaluationKind, weights_step: int, found: Evaluation) -> None:
        if self._log is not None:
            self._log.evaluation(self.counters.env_steps, self._wall_s(), kind, weights_step, found.returns.tolist())
        self._greedy_note = f"greedy {found.mean:.4g} at {weights_step:,}"

    def _evaluate(self) -> None:
        self._next_evaluation = self._after(self.options.eval_interval)
        try:
            found = self._evaluator.check_progress()
        except EnvError as error:
            self._failure = error
            self._stop("the evaluation failed")
            return
        if found is not None:
            mean = f"{found.mean:.{decimals(found.mean)}f}"
            self._stop(
                f"solved after {self.counters.env_steps:,} steps and {self._wall_s():.1f} s "
                f"(mean greedy return {mean} over the {len(found.returns)} episodes that decided it)"
            )

    def _checkpoint(self) -> None:
        self._next_checkpoint = self._after(self.options.checkpoint_interval)
        try:
            if self._saver.save() is None:
                return
        except CheckpointError as error:  # the state can never be stored
            self._failure = error
            self._stop("the state of the run cannot be stored")
            return
        if self.options.serial:
            # A resumed run starts new episodes with the newest weights; so does this one, and both stay the same to
            # the bit.
            for worker in self._workers:
                worker.restarted()
            self._inline = [actor.restarted(self.counters.env_steps) for actor in self._inline]

    def _save_into(self, directory: Path) -> Path:
        """Write a checkpoint; called only when nothing is under way."""
        self._keep_folder()
        if directory == self.options.checkpoint_dir and (error := self._folder.error(directory)) is not None:
            raise CheckpointWriteError(f"The checkpoint of step {self.counters.env_steps} was not written. {error}")
        counters = dataclasses.replace(self.counters, wall_s=self._wall_s())
        path = self._state.save(directory, counters, self._evaluator.best)
        self._saved = (counters.env_steps, counters.gradient_steps, path)
        return path

    # --- the end ----------------------------------------------------------------------------------------------------

    def finish(self) -> int:
        """End the run: checkpoint, weights, curve, evaluation, summary. Returns the exit code."""
        self._stop_parties()
        if self.options.bench:
            if self._failure is not None:
                raise self._failure
            rates = self._report_rates()
            write_summary(self.options.run_dir / "bench.json", {"program": self.program.name, **rates})
            return self._interruption.exit_code
        rates = self._report_rates()
        self._shown_at = -math.inf
        self._show()  # the last counts
        self._log_scalars()
        unsaved = self._save_last()
        if self._failure is not None:
            if unsaved is not None:  # where the state is now must not be lost behind the failure
                logger.warning("%s", unsaved)
            raise self._failure
        self._warn_of_no_training()
        directory = self.options.run_dir
        summary = {**self._summary(rates), **self._evaluator.summary()}
        # Weights and summary first: whatever happens in the evaluation, they are there.
        self._leave(summary)
        if unsaved is not None:
            raise unsaved
        if self.options.eval_episodes and not self._interrupted():
            self._evaluator.finish()
            summary |= self._evaluator.summary()
            self._leave(summary)
        self._say(f"Last weights:   {last_text(summary)}\n                {directory / LAST_WEIGHTS}")
        if self._evaluator.best is not None:
            self._say(f"Best weights:   {best_text(summary)}\n                {directory / BEST_WEIGHTS}")
        self._say(f"Learning curve: {self._plot()}")
        self._say(f"Logs:           tensorboard --logdir {shlex.quote(str(directory / 'tensorboard'))}")
        if self._unwritten:
            raise CheckpointWriteError(f"{self._unwritten} The checkpoint {self._saved[2]} has the weights.")
        return self._interruption.exit_code

    def _save_last(self) -> CheckpointError | None:
        """Write the last checkpoint, if it is not there; the error if it cannot be written to its folder."""
        if isinstance(self._failure, CheckpointError):
            return None
        *saved, checkpoint = self._saved
        if saved != [self.counters.env_steps, self.counters.gradient_steps]:
            try:
                checkpoint = self._saver.save_last(hurried=self._interruption.signal is not None)
            except CheckpointError as error:
                return error
        self._say(f"Checkpoint:     {checkpoint}")
        return None

    def _warn_of_no_training(self) -> None:
        if self.counters.gradient_steps == self._steps_before and self._interruption.signal is None:
            logger.warning("No training step was done. %s", why_no_training(self.train, self.counters))

    def _leave(self, summary: Mapping[str, object]) -> None:
        """Write weights and summary, as well as the disk allows."""
        directory, self._unwritten = self.options.run_dir, ""
        try:
            if (refused := self._folder.error(directory)) is not None:
                raise refused
            self._evaluator.save(directory)
            write_summary(directory / "summary.json", summary)
        except (OSError, ConfigurationError) as error:
            self._unwritten = f"Weights and summary cannot be written to {directory}: {str(error).rstrip('.')}."
            logger.warning("%s The checkpoint %s has the weights.", self._unwritten, self._saved[2])

    def _summary(self, rates: Mapping[str, float]) -> dict[str, object]:
        counters, replay = self.counters, self._state.replay.statistics()
        return {
            "program": self.program.name,
            "composed_from": self.program.composed_from,
            "environment": self.actors.env,
            "seed": self.options.seed,
            "stopped": self._stop_reason,
            "env_steps": counters.env_steps,
            "gradient_steps": counters.gradient_steps,
            "episodes": counters.episodes,
            "replay_ratio": self._ratio.achieved,
            "priority_update_delay": self._update_delay,
            "stale_updates": replay.stale,
            "saturated_priorities": replay.saturated,
            "priority_rescales": replay.rescales,
            "priority_recoveries": replay.recoveries,
            "wall_s": self._wall_s(),
            "actor_restarts": self._restarts,
            **rates,
        }

    def _plot(self) -> Path | str:
        if not self.counters.episodes:
            return "none, no episode has ended yet"
        if self._folder.error(self.options.run_dir) is not None:
            return "none, the run folder was lost"
        title = f"{self._trainer_class.__name__} on {self.actors.env}"
        try:
            return plot_learning_curve(self.options.run_dir, title=title)
        except (OSError, ConfigurationError) as error:
            return f"none: {error}"

    def _report_rates(self) -> dict[str, float]:
        batch, predicted = self.train.batch_size, self.program.predicted_eps
        busy, overall = self._rate.busy * batch, self._rate.overall * batch
        against = (
            f", {busy / predicted:.2f} of the {predicted:,.0f} EPS that the composer predicted" if predicted else ""
        )
        self._say(
            f"Trained:        {busy:,.0f} EPS while a batch was under way{against}; "
            f"{overall:,.0f} EPS overall, waiting for data included"
        )
        return {
            "measured_eps": busy,
            "predicted_eps": predicted,
            "overall_eps": overall,
            "overall_gps": self._rate.overall,
        }
