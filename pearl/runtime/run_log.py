"""The record of a run: TensorBoard events, CSV files and a log."""

from __future__ import annotations

import functools
import logging
import math
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TextIO, cast

from pearl.errors import ConfigurationError
from pearl.runtime.backup import move_aside
from pearl.runtime.composition_file import COMPOSITION_OF_RUN
from pearl.runtime.csv_table import CsvTable, ResumePoint, Row
from pearl.runtime.log_file import LogFile

if TYPE_CHECKING:
    from rich.console import Console

    from pearl.runtime.event_file import EventFile
PROGRESS_COLUMNS = (
    "wall_s",
    "env_steps",
    "gradient_steps",
    "episodes",
    "training_return",
    "eps",
    "gps",
    "replay_ratio",
    "td_error",
)
EPISODE_COLUMNS = ("env_steps", "wall_s", "actor", "return", "length", "episodes")
EVALUATION_COLUMNS = ("env_steps", "wall_s", "kind", "weights_step", "mean_return", "std_return", "episodes")

# During the run, the short "progress" selects the best weights, and the full "solved check" may end the run. At the
# end, new episodes score the "last" weights, the "best" weights, or weights that are both.
EvaluationKind = Literal["progress", "solved check", "last", "best", "last and best"]

_EVENT_INTERVAL_S = 1.0
_FIRST_EVENTS_S = 5.0  # from then on there are event files: to load their library takes as long as the start of a run

_log = logging.getLogger(__name__)


class RunLog:
    """Record of one run in `directory`; a context manager, used from one thread.

    Writes `progress.csv`, `episodes.csv`, `evaluations.csv` and `tensorboard/`. Each row is handed to the system at
    once, so a killed run keeps its record. What cannot be written is lost with one warning per file: a log never ends
    a run. A fresh run moves what an earlier one left into `earlier-001/`; with `resume`, rows are appended and
    wall-clock seconds go on counting where the earlier part stopped. With `resume_step` too, rows beyond that step, and
    rows of that step later than `resume_wall_s`, are taken out first: they were written after the checkpoint.

    A row of `episodes.csv` is one episode until there are 100,000 rows; then neighbours are merged into means, with
    their number in the column `episodes`, so that the file stays small and its end fine.
    """

    def __init__(
        self,
        directory: Path,
        resume: bool = False,
        resume_step: int | None = None,
        resume_wall_s: float = math.inf,
    ) -> None:
        self.directory = Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        if not resume:
            _move_earlier(self.directory)
        point = None if resume_step is None else ResumePoint(resume_step, resume_wall_s)
        self._progress = CsvTable(self.directory / "progress.csv", PROGRESS_COLUMNS, point)
        self._episodes = CsvTable(self.directory / "episodes.csv", EPISODE_COLUMNS, point, merge=merged_episodes)
        self._evaluations: CsvTable | None = None
        self._resume_step = resume_step
        if (self.directory / "evaluations.csv").exists():
            self._evaluations = self._evaluation_table()
        self._earlier_s = max(self._progress.last_wall_s, self._episodes.last_wall_s)
        self._started = time.monotonic()
        self._writer: EventFile | None = None
        self._events: list[tuple[str, float, int, float]] = []  # name, value, step and time
        self._unsent: list[tuple[float, int]] = []
        self._sent_at = self._started
        self._latest_step = resume_step or 0

    def __enter__(self) -> RunLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def wall_s(self) -> float:
        """Seconds since this log was opened, after those of the parts resumed from."""
        return self._earlier_s + time.monotonic() - self._started

    def episode(self, env_steps: int, wall_s: float, actor: int, ret: float, length: int) -> None:
        """Record a finished episode: `env_steps` of the whole run, its undiscounted return and its length."""
        self._episodes.append(
            {"env_steps": env_steps, "wall_s": f"{wall_s:.3f}", "actor": actor, "return": ret}
            | {"length": length, "episodes": 1}
        )
        # TensorBoard gets the mean over a second: thousands of events a second would slow the host loop.
        self._unsent.append((ret, length))
        self._latest_step = env_steps
        if time.monotonic() - self._sent_at >= _EVENT_INTERVAL_S:
            self._send_episodes()

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Record numbers at `step` (environment steps); names beyond `PROGRESS_COLUMNS` become columns of their own.

        `wall_s` is filled in. In TensorBoard a name without "/" appears under "run/".
        """
        row: dict[str, Any] = {"wall_s": self.wall_s, **values, "env_steps": step}
        self._progress.append({**row, "wall_s": f"{row['wall_s']:.3f}"})
        for name, value in values.items():
            if name not in ("wall_s", "env_steps") and _is_finite(value):
                self._scalar(name if "/" in name else f"run/{name}", value, step)
        self._latest_step = step
        self._send_episodes()

    def evaluation(
        self, env_steps: int, wall_s: float, kind: EvaluationKind, weights_step: int, returns: Sequence[float]
    ) -> None:
        """Record a greedy evaluation, made at `env_steps` with the weights of `weights_step`: undiscounted returns.

        In TensorBoard it appears at the step of its weights.
        """
        if not returns:
            raise ConfigurationError("An evaluation needs at least one episode; found none.")
        mean = math.fsum(returns) / len(returns)
        deviation = math.sqrt(math.fsum((r - mean) ** 2 for r in returns) / len(returns))
        if self._evaluations is None:
            self._evaluations = self._evaluation_table()
        self._evaluations.append(
            {
                "env_steps": env_steps,
                "wall_s": f"{wall_s:.3f}",
                "kind": kind,
                "weights_step": weights_step,
                "mean_return": mean,
                "std_return": deviation,
                "episodes": len(returns),
            }
        )
        for name in kind.replace(" ", "_").split("_and_"):
            self._scalar(f"evaluation/{name}", mean, weights_step)

    def close(self) -> None:
        """Write what is pending and close the files; may be called twice."""
        self._send_episodes()
        self._send_events()
        self.reopen()

    def reopen(self) -> None:
        """Go on in new files where the folder was moved or deleted."""
        for table in (self._progress, self._episodes, self._evaluations):
            if table is not None:
                table.close()
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _evaluation_table(self) -> CsvTable:
        # Those at the very step of the checkpoint are of the weights that it holds, also if they were made after it.
        point = None if self._resume_step is None else ResumePoint(self._resume_step)
        return CsvTable(self.directory / "evaluations.csv", EVALUATION_COLUMNS, point)

    def _scalar(self, name: str, value: float, step: int) -> None:
        self._events.append((name, value, step, time.time()))
        if self._writer is not None or time.monotonic() - self._started >= _FIRST_EVENTS_S:
            self._send_events()

    def _send_events(self) -> None:
        """Write the events that are waiting."""
        if self._events and self._writer is None:
            from pearl.runtime.event_file import EventFile

            # purge_step hides what an interrupted part wrote beyond the step resumed from.
            self._writer = EventFile(self.directory / "tensorboard", self._resume_step)
        events, self._events = self._events, []
        for event in events:
            assert self._writer is not None
            self._writer.scalar(*event)

    def _send_episodes(self) -> None:
        self._sent_at = time.monotonic()
        if not self._unsent:
            return
        count = len(self._unsent)
        self._scalar("episode/return", sum(ret for ret, _ in self._unsent) / count, self._latest_step)
        self._scalar("episode/length", sum(length for _, length in self._unsent) / count, self._latest_step)
        self._unsent.clear()


def merged_episodes(first: Row, second: Row) -> Row:
    """Two rows of `episodes.csv` as one, at the place of the second."""
    counts = [int(row["episodes"] or 1) for row in (first, second)]
    merged = {**second, "episodes": str(sum(counts))}
    for name in ("return", "length"):
        total = sum(float(row[name]) * count for row, count in zip((first, second), counts, strict=True))
        merged[name] = f"{total / sum(counts):.6g}"
    return merged


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _move_earlier(directory: Path) -> None:
    """Move the record of an earlier run into a folder of its own, so that a fresh start keeps it."""
    names = (
        "progress.csv",
        "episodes.csv",
        "evaluations.csv",
        "tensorboard",
        "learning_curve.png",
        "report.html",
        "trace.json",  # which the report takes for this run's
        "summary.json",
        "bench.json",  # perhaps of another program
        COMPOSITION_OF_RUN,
        "policy.json",
        "weights.safetensors",
        "best_weights.safetensors",
    )
    try:
        target = move_aside((directory / name for name in names), directory)
    except OSError as error:
        raise ConfigurationError(
            f"The record of an earlier run in {directory} cannot be moved aside: {error}. Choose another --run-dir."
        ) from error
    if target is not None:
        _log.warning("The record of an earlier run was moved into %s.", target)


# --- Logging --------------------------------------------------------------------------------------------------------


class _TerminalHandler(logging.Handler):
    """Warnings on stderr, coloured there, and above a progress bar where one is drawn."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)

    def emit(self, record: logging.LogRecord) -> None:
        from rich.text import Text

        try:
            style = "bold red" if record.levelno >= logging.ERROR else "yellow"
            text = Text.assemble((f"{record.levelname.lower()}: ", style), self.format(record))
            self._console.print(text, soft_wrap=True, highlight=False)
        except Exception:
            self.handleError(record)

    @functools.cached_property
    def _console(self) -> Console:
        """Made for the first warning: most runs have none."""
        from rich.console import Console

        return Console(file=cast("TextIO", _CurrentStderr()), force_terminal=None if sys.stderr.isatty() else False)


class _CurrentStderr:
    """The `sys.stderr` of the moment: a live progress display replaces it."""

    def write(self, text: str) -> int:
        return sys.stderr.write(text)

    def flush(self) -> None:
        sys.stderr.flush()

    def isatty(self) -> bool:
        return sys.stderr.isatty()


def configure_logging(directory: Path) -> None:
    """Send warnings of the `pearl` logger to stderr and all its records to `run.log` in `directory`.

    Called again, it replaces what it set before. To be called by the program of a run, never by the library.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    logger = logging.getLogger("pearl")
    for handler in list(logger.handlers):
        if isinstance(handler, _TerminalHandler | RunFileHandler):
            logger.removeHandler(handler)
            handler.close()
    logger.setLevel(logging.DEBUG)
    logger.addHandler(_TerminalHandler())
    logger.addHandler(RunFileHandler(directory / "run.log"))


def end_log_file() -> None:
    """Stop writing records of the `pearl` logger to a file."""
    if (handler := run_file_handler()) is not None:
        logging.getLogger("pearl").removeHandler(handler)
        handler.close()


class RunFileHandler(logging.Handler):
    """All records of the `pearl` logger, in the file `path`, as well as the disk allows."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self._file = LogFile(path)
        self._file.append(b"")  # opened now: the folder may belong to another run by the first record
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        """Append the record."""
        try:
            line = f"{self.format(record)}\n".encode(errors="backslashreplace")
        except Exception:  # the message and its arguments do not fit
            self.handleError(record)
            return
        self._file.append(line)

    def reopen(self) -> None:
        """Go on in a new file where the folder was moved or deleted."""
        self._file.close()

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        super().close()


def run_file_handler() -> RunFileHandler | None:
    """The handler that writes `run.log`; None where no run has begun."""
    handlers = logging.getLogger("pearl").handlers
    return next((handler for handler in handlers if isinstance(handler, RunFileHandler)), None)
