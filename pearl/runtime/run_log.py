"""What a run leaves behind to be read: TensorBoard events, CSV files, a learning curve and a log."""

from __future__ import annotations

import csv
import io
import logging
import math
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TextIO, cast

from pearl.atomic_file import replace_file
from pearl.errors import ConfigurationError
from pearl.runtime.earlier import move_aside

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
EPISODE_COLUMNS = ("env_steps", "wall_s", "actor", "return", "length")
EVALUATION_COLUMNS = ("env_steps", "wall_s", "kind", "weights_step", "mean_return", "std_return", "episodes")

# On the way: "progress", short, selects the best weights; "solved check", full, ends the run. At the end, on episodes
# that decided nothing: "last" weights, "best" weights, or those that are both.
EvaluationKind = Literal["progress", "solved check", "last", "best", "last and best"]

_EVENT_INTERVAL_S = 1.0

_log = logging.getLogger(__name__)


class RunLog:
    """Record of one run in `directory`; a context manager, used from one thread.

    Writes `progress.csv`, `episodes.csv`, `evaluations.csv` and `tensorboard/`. Each row is handed to the system at
    once, so a killed run keeps its record. A fresh run moves what an earlier one left into `earlier-001/`; with
    `resume`, rows are appended and wall-clock seconds go on counting where the earlier part stopped. With
    `resume_step` too, rows beyond that step (written after the checkpoint now resumed from) are taken out first.
    """

    def __init__(self, directory: Path, resume: bool = False, resume_step: int | None = None) -> None:
        self.directory = Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        if not resume:
            _move_earlier(self.directory)
        self._progress = _Table(self.directory / "progress.csv", PROGRESS_COLUMNS, resume_step)
        self._episodes = _Table(self.directory / "episodes.csv", EPISODE_COLUMNS, resume_step)
        self._evaluations: _Table | None = None
        self._resume_step = resume_step
        if (self.directory / "evaluations.csv").exists():
            self._evaluations = self._evaluation_table()
        self._earlier_s = max(self._progress.last_wall_s, self._episodes.last_wall_s)
        self._started = time.monotonic()
        self._writer: Any = None
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
            {"env_steps": env_steps, "wall_s": f"{wall_s:.3f}", "actor": actor, "return": ret, "length": length}
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
        writer = self._events()
        for name, value in values.items():
            if name not in ("wall_s", "env_steps") and _is_finite(value):
                writer.add_scalar(name if "/" in name else f"run/{name}", value, step)
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
            self._events().add_scalar(f"evaluation/{name}", mean, weights_step)

    def close(self) -> None:
        """Write what is pending and close the files; may be called twice."""
        self._send_episodes()
        for table in (self._progress, self._episodes, self._evaluations):
            if table is not None:
                table.close()
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _evaluation_table(self) -> _Table:
        return _Table(self.directory / "evaluations.csv", EVALUATION_COLUMNS, self._resume_step)

    def _events(self) -> Any:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            # purge_step hides what an interrupted part wrote beyond the step resumed from.
            self._writer = SummaryWriter(
                str(self.directory / "tensorboard"), purge_step=self._resume_step, flush_secs=10
            )
        return self._writer

    def _send_episodes(self) -> None:
        self._sent_at = time.monotonic()
        if not self._unsent:
            return
        count = len(self._unsent)
        writer = self._events()
        writer.add_scalar("episode/return", sum(ret for ret, _ in self._unsent) / count, self._latest_step)
        writer.add_scalar("episode/length", sum(length for _, length in self._unsent) / count, self._latest_step)
        self._unsent.clear()


class _Table:
    """A CSV file that is appended to, survives a cut last line, and takes on new columns."""

    def __init__(self, path: Path, columns: Sequence[str], last_step: int | None) -> None:
        self._path = path
        self._columns = list(columns)
        self.last_wall_s = 0.0
        if path.exists() and path.stat().st_size:
            self._take_over(last_step)
        else:
            self._rewrite([])
        self._stream: TextIO | None = None  # opened by the first row

    def append(self, row: Mapping[str, Any]) -> None:
        if new := [name for name in row if name not in self._columns]:
            self.close()
            rows = self._read()
            self._columns += new
            self._rewrite(rows)
        if self._stream is None:
            self._stream = self._path.open("a", newline="", encoding="utf-8")
            self._writer = csv.writer(self._stream, lineterminator="\n")
        self._writer.writerow([row.get(name, "") for name in self._columns])
        self._stream.flush()

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _take_over(self, last_step: int | None) -> None:
        """Go on with an earlier part: drop a line cut by a kill, and rows beyond `last_step`."""
        found = self._path.read_text(encoding="utf-8", errors="replace").partition("\n")[0]
        found_columns = next(csv.reader([found]), [])
        if missing := [name for name in self._columns[:2] if name not in found_columns]:
            raise ConfigurationError(
                f"{self._path} cannot be resumed: its first line lacks the columns {missing}; found {found!r}. "
                "Move it away, or log into another directory."
            )
        self._columns = found_columns + [name for name in self._columns if name not in found_columns]
        try:
            rows = [row for row in self._read() if last_step is None or float(row["env_steps"]) <= last_step]
            self.last_wall_s = max((float(row["wall_s"]) for row in rows), default=0.0)
        except (ValueError, TypeError, csv.Error) as error:
            raise ConfigurationError(
                f"{self._path} cannot be resumed: a row lacks numbers in env_steps and wall_s ({error}). "
                "Mend or remove that row, or log into another directory."
            ) from error
        self._rewrite(rows)

    def _read(self) -> list[dict[str, str]]:
        lines = self._path.read_text(encoding="utf-8").splitlines(keepends=True)
        return list(csv.DictReader(line for line in lines if line.endswith("\n")))

    def _rewrite(self, rows: list[dict[str, str]]) -> None:
        with replace_file(self._path) as file:
            stream = io.TextIOWrapper(file, encoding="utf-8", newline="")
            writer = csv.DictWriter(stream, self._columns, restval="", extrasaction="ignore", lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
            stream.detach()


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _move_earlier(directory: Path) -> None:
    """Put the record of an earlier run aside: a fresh start must not destroy it."""
    names = (
        "progress.csv",
        "episodes.csv",
        "evaluations.csv",
        "tensorboard",
        "learning_curve.png",
        "summary.json",
        "weights.safetensors",
        "best_weights.safetensors",
    )
    target = move_aside((directory / name for name in names), directory)
    if target is not None:
        _log.warning("The record of an earlier run was moved into %s.", target)


# --- Logging --------------------------------------------------------------------------------------------------------


class _TerminalHandler(logging.Handler):
    """Warnings on stderr, coloured there, and above a progress bar where one is drawn."""

    def __init__(self) -> None:
        from rich.console import Console

        super().__init__(logging.WARNING)
        self._console = Console(
            file=cast("TextIO", _CurrentStderr()), force_terminal=None if sys.stderr.isatty() else False
        )

    def emit(self, record: logging.LogRecord) -> None:
        from rich.text import Text

        try:
            style = "bold red" if record.levelno >= logging.ERROR else "yellow"
            text = Text.assemble((f"{record.levelname.lower()}: ", style), self.format(record))
            self._console.print(text, soft_wrap=True, highlight=False)
        except Exception:
            self.handleError(record)


class _CurrentStderr:
    """Whatever `sys.stderr` is when written to: a live progress display puts its own there."""

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


class RunFileHandler(logging.FileHandler):
    """All records of the `pearl` logger, in the file `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        super().__init__(path, encoding="utf-8", delay=True)
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))
