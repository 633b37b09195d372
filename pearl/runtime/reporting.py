"""Output of a run: display, logs, rates, weights, summary, learning curve."""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from pearl.algorithms.trainer import Trainer, TrainerLike
from pearl.error_place import described
from pearl.errors import ConfigurationError, TrainerError
from pearl.runtime.evaluation import Evaluation
from pearl.runtime.experience import Experience
from pearl.runtime.learning_curve import plot_learning_curve
from pearl.runtime.options import Options
from pearl.runtime.outcome import Evaluator, write_summary
from pearl.runtime.power import PowerLog, PowerPlan, power_text
from pearl.runtime.process_start import process_started
from pearl.runtime.progress import ProgressDisplay
from pearl.runtime.rate import StepRate
from pearl.runtime.recomposition import ComposerInputs
from pearl.runtime.run_folder import RunFolder
from pearl.runtime.run_log import PROGRESS_COLUMNS, EvaluationKind, RunLog, end_log_file, run_file_handler
from pearl.runtime.run_state import Counters
from pearl.runtime.telemetry import Telemetry, iteration_text

logger = logging.getLogger("pearl.runtime")

_SHOW_INTERVAL_S = 0.1
_LOG_INTERVAL_S = 1.0
_LOGGED_ROWS = 50_000  # of progress.csv: runs of more than 14 hours log less often


@dataclass(frozen=True)
class Program:
    """The composer's knowledge when it wrote the program.

    `predicted_eps` are experiences trained per second at the program's replay ratio; `predicted_free_eps` while
    training and Actors run free, as --bench lets them; `predicted_spread` is the share by which these vary, if the
    program was tried. `predicted_us` are the microseconds of an iteration's parts, by the names in
    `pearl.runtime.telemetry.PARTS`; `devices` names the devices of `actors`, `replay_manager`, `storage` and `learner`.
    Programs of earlier versions have none of the last four.
    """

    name: str
    predicted_eps: float
    composed_from: str = ""
    predicted_free_eps: float | None = None
    predicted_spread: float | None = None
    predicted_us: Mapping[str, float] = field(default_factory=dict)
    devices: Mapping[str, str] = field(default_factory=dict)
    power: PowerPlan = field(default_factory=PowerPlan)
    composer_inputs: ComposerInputs | None = None

    def predicted(self, replay_ratio: float) -> float:
        """The prediction for a run that keeps this ratio, the program's own or infinity."""
        free = self.predicted_free_eps
        return free if free is not None and math.isinf(replay_ratio) else self.predicted_eps


@dataclass(frozen=True)
class Subject:
    """The subject of a run's reports. `achieved_ratio` returns the samples trained per transition collected.

    `steps_per_iteration` returns the gradient steps of an iteration.
    """

    counters: Counters
    trainer: TrainerLike
    experience: Experience
    achieved_ratio: Callable[[], float]
    steps_per_iteration: Callable[[], float] = lambda: 1.0


class Reporter:
    """Holds the run's folders, and reports to the user and to the log files.

    `td_error` is that of the newest batch, `replay_ratio` the one that the rates are measured at; an iteration trains
    on `experiences` transitions. Call `observe` first; `open` starts display and logs. Without `open`, as in a
    benchmark, `say` prints and `show` does nothing.
    """

    def __init__(
        self,
        program: Program,
        options: Options,
        experiences: int,
        replay_ratio: float,
        rate: StepRate,
        telemetry: Telemetry,
    ) -> None:
        self._program, self._options, self._rate = program, options, rate
        self._experiences, self.replay_ratio = experiences, replay_ratio
        self._telemetry = telemetry
        self._folder = RunFolder(options)
        self._log: RunLog | None = None
        self._display: ProgressDisplay | None = None
        self._greedy_note = ""  # the last greedy evaluation, as the display shows it
        self._shown_at = self._logged_at = self._folder_checked_at = -math.inf
        self._power = PowerLog(program.power)
        self._started = time.monotonic()
        self.td_error = math.nan
        self.further: dict[str, float] = {}  # numbers of callbacks, logged with the run's own
        self._logged: dict[str, float] = {}  # the newest row
        self._describe: Callable[[], None] = lambda: None
        self._subject: Subject

    def start_clock(self) -> None:
        """The run begins now."""
        self._started = time.monotonic()

    def observe(self, subject: Subject) -> None:
        """Report on `subject` from now on."""
        self._subject = subject

    def open(self, describe: Callable[[], None]) -> None:
        """Start the log files and the display; `describe` writes the other files of a run folder that is made again."""
        self._describe = describe
        counters = self._subject.counters
        step = counters.env_steps
        self._log = RunLog(
            self._options.run_dir,
            resume=self._options.resume,
            resume_step=step if step else None,
            resume_wall_s=counters.wall_s,
        )
        self._display = ProgressDisplay(self._options.timesteps, initial_steps=step, plain=self._options.plain)
        self._display.__enter__()

    def close(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End display and logs, and let go of the folders."""
        if self._display is not None:
            self._display.__exit__(kind, error, traceback)
        if self._log is not None:
            if (row := {**self._logged, **self.further}) != self._logged:  # of the last evaluations, and of `on_end`
                self._log.scalars(self._subject.counters.env_steps, row)
            self._log.close()
        self._folder.release()

    # --- while the run goes on --------------------------------------------------------------------------------------

    def wall_s(self) -> float:
        """Seconds that the run has taken, those before a resumption included."""
        return self._subject.counters.wall_s + time.monotonic() - self._started

    def say(self, text: str) -> None:
        """Tell the user, and the log file."""
        logger.info(text)
        if self._display is not None:
            self._display.say(text)
        else:
            print(text, flush=True)

    def show(self) -> None:
        """Update display, log files and run folder, if that is due."""
        self._power.follow(self._rate)
        now = time.monotonic()
        if self._display is None or now - self._shown_at < _SHOW_INTERVAL_S:
            return
        self._shown_at = now
        counters, iterations = self._subject.counters, self._rate.recent
        gps = iterations * self._subject.steps_per_iteration()
        self._display.update(
            steps=counters.env_steps,
            mean_return=counters.mean_return,
            eps=iterations * self._experiences,
            gps=gps,
            replay_ratio=self._subject.achieved_ratio(),
            episodes=counters.episodes,
            note=self._greedy_note,
            activity=self._telemetry.activity,
            eps_per_watt=self._eps_per_watt(),
        )
        if now - self._logged_at >= max(_LOG_INTERVAL_S, self.wall_s() / _LOGGED_ROWS):
            self._logged_at = now
            self._log_scalars()
        if now - self._folder_checked_at >= _LOG_INTERVAL_S:
            self._folder_checked_at = now
            self.keep_folder()

    def _eps_per_watt(self) -> float | None:
        """EPS per watt of the devices in use since the first batch; None where their power is not known."""
        power = self._power.newest()
        return None if power is None or not power.watts else self._rate.overall * self._experiences / power.watts

    def show_last(self) -> None:
        """Show and log the final counts."""
        self._shown_at = -math.inf
        self.show()
        self._log_scalars()

    def keep_folder(self) -> None:
        """If the run folder was moved or deleted, continue in a new one."""
        if not self._folder.keep():
            return
        if self._log is not None:
            self._log.reopen()
        if (handler := run_file_handler()) is not None:
            handler.reopen()
        if self._folder.is_lost(self._options.run_dir):
            self._log = None
            end_log_file()
        elif self._folder.error(self._options.run_dir) is None:
            self._describe()

    def folder_error(self, directory: Path) -> ConfigurationError | None:
        """Why the run must not write into its folder `directory`; None if it may."""
        return self._folder.error(directory)

    def _log_scalars(self) -> None:
        if self._log is not None:
            self._logged = self.scalars()
            self._log.scalars(self._subject.counters.env_steps, self._logged)

    def scalars(self) -> dict[str, float]:
        """The numbers of a row of `progress.csv`, without the environment steps."""
        subject, iterations = self._subject, self._rate.recent
        counters = subject.counters
        return {
            "wall_s": self.wall_s(),
            "gradient_steps": counters.gradient_steps,
            "episodes": counters.episodes,
            "training_return": counters.mean_return,
            "eps": iterations * self._experiences,
            "gps": iterations * subject.steps_per_iteration(),
            "replay_ratio": subject.achieved_ratio(),
            "td_error": self.td_error,
            **self._power_scalars(),
            **self._trainer_scalars(),
            **subject.experience.log_scalars(),
            **self._telemetry.scalars(),
            **self.further,
        }

    def _trainer_scalars(self) -> dict[str, float]:
        trainer = self._subject.trainer
        if not isinstance(trainer, Trainer):
            return {}
        own = trainer.own_metrics()
        if taken := own.keys() & set(PROGRESS_COLUMNS):
            raise TrainerError(
                f"{type(trainer).__name__}.metrics() needs names other than those of the run, such as "
                f"{', '.join(PROGRESS_COLUMNS)}; found {min(taken)!r}."
            )
        return {**trainer.scheduled_values(self._subject.counters.env_steps), **own}

    def _power_scalars(self) -> dict[str, float]:
        power = self._power.newest()
        watts = None if power is None else power.watts
        return {} if watts is None else {"power/watts": watts, "power/eps_per_watt": self._eps_per_watt() or math.nan}

    def episode(self, actor: int, ret: float, length: int) -> None:
        """An episode of `length` steps ended in an environment of `actor`, with the return `ret`."""
        if self._log is not None:
            self._log.episode(self._subject.counters.env_steps, self.wall_s(), actor, ret, length)

    def evaluation(self, kind: EvaluationKind, weights_step: int, found: Evaluation) -> None:
        """The weights of `weights_step` were evaluated."""
        if self._log is not None:
            env_steps = self._subject.counters.env_steps
            self._log.evaluation(env_steps, self.wall_s(), kind, weights_step, found.returns.tolist())
        self._greedy_note = f"greedy {found.mean:.4g} at {weights_step:,}"

    # --- the end ----------------------------------------------------------------------------------------------------

    def rates(self) -> dict[str, object]:
        """Print and return the rates and the power of the run."""
        batch, ratio = self._experiences, self.replay_ratio
        predicted = self._program.predicted(ratio)
        pace = "with Actors that run free" if math.isinf(ratio) else f"at a replay ratio of {ratio:g}"
        busy, overall = self._rate.busy * batch, self._rate.overall * batch
        against = (
            f" {pace}, {busy / predicted:.2f} of the {predicted:,.0f} EPS{self._spread()} that the composer predicted"
            if predicted
            else f" {pace}"
        )
        self.say(
            f"Trained:        {busy:,.0f} EPS while a batch was under way{against}; "
            f"{overall:,.0f} EPS overall, waiting for data included"
        )
        times = self._telemetry.iteration_times()
        iteration = {"predicted_us": dict(self._program.predicted_us), **dataclasses.asdict(times)}
        if times.measured_us:
            self.say(f"Iteration:      {iteration_text(self._program.predicted_us, times.measured_us)}")
        return {
            "measured_eps": busy,
            "predicted_eps": predicted,
            "overall_eps": overall,
            "overall_gps": self._rate.overall * self._subject.steps_per_iteration(),
            "paced_at": None if math.isinf(ratio) else ratio,
            "iteration": iteration,
            **self._power_rates(overall, predicted),
        }

    def _spread(self) -> str:
        spread = self._program.predicted_spread
        return "" if spread is None else f" +-{spread:.0%}"

    def _power_rates(self, eps: float, predicted: float) -> dict[str, object]:
        """Print and return the mean power, and `eps`, which was `predicted`, per watt."""
        for problem in self._power.problems:
            logger.warning("%s", problem)
        power = self._power.read()
        if power is None or power.machine_watts is None or not power.watts:
            sources = {} if power is None else power.sources
            return {"watts": None, "power_sources": sources}
        stated = self._program.power.stated_watts
        rates: dict[str, object] = {
            "watts": power.watts,
            "idle_watts": power.idle_watts,
            "eps_per_watt": eps / power.watts,
            "eps_per_machine_watt": eps / power.machine_watts,
            "predicted_eps_per_watt": predicted / stated if stated else None,
            "power_sources": power.sources,
        }
        self.say(f"Power:          {power_text(rates)}")
        return rates

    def summary(
        self,
        rates: Mapping[str, object],
        *,
        env: str,
        eval_env: str,
        eval_env_kwargs: Mapping[str, object] | None,
        stopped: str,
        update_delay: int,
        actor_restarts: int,
    ) -> dict[str, object]:
        """The content of summary.json, without the evaluations."""
        counters = self._subject.counters
        return {
            "program": self._program.name,
            "composed_from": self._program.composed_from,
            "environment": env,
            "evaluation_environment": eval_env,
            "evaluation_env_kwargs": None if eval_env_kwargs is None else dict(eval_env_kwargs),
            "seed": self._options.seed,
            "stopped": stopped,
            "env_steps": counters.env_steps,
            "gradient_steps": counters.gradient_steps,
            "episodes": counters.episodes,
            "replay_ratio": self._subject.achieved_ratio(),
            "priority_update_delay": update_delay,
            **self._subject.experience.summary(),
            "wall_s": self.wall_s(),
            "first_step_s": self._first_step_s(),
            "actor_restarts": actor_restarts,
            **rates,
        }

    def _first_step_s(self) -> float | None:
        """Seconds from the start of the process until the first training step was done; None: unknown, or none was."""
        began, done = process_started(), self._rate.first_end
        return None if began is None or done is None else done - began

    def leave(self, evaluator: Evaluator, summary: Mapping[str, object], checkpoint: Path | None) -> str:
        """Write weights and summary; return an error text, after a warning, or "" on success.

        `checkpoint` is the one that has these weights, too; None if it could not be written.
        """
        directory = self._options.run_dir
        try:
            if (refused := self._folder.error(directory)) is not None:
                raise refused
            evaluator.save(directory)
            write_summary(directory / "summary.json", summary)
        except (OSError, ConfigurationError) as error:
            unwritten = f"Weights and summary cannot be written to {directory}: {str(error).rstrip('.')}."
            kept = "No checkpoint has them." if checkpoint is None else f"The checkpoint {checkpoint} has the weights."
            logger.warning("%s %s", unwritten, kept)
            return unwritten
        return ""

    def plot(self, title: str) -> Path | str:
        """Draw the learning curve; return its path, or why there is none."""
        if not self._options.plot:
            return "none, by --no-plot or PEARL_PLOT=0; `pearl report` shows it"
        if not self._subject.counters.episodes:
            return "none, no episode has ended yet"
        if self._folder.error(self._options.run_dir) is not None:
            return "none, the run folder was lost"
        try:
            return plot_learning_curve(self._options.run_dir, title=title)
        except (OSError, ConfigurationError) as error:
            return f"none: {error}"
        except Exception as error:  # matplotlib may raise anything, by settings of the user (MPLBACKEND, text.usetex)
            return f"none: {described(error)}"
