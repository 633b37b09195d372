"""CSV tables of a run: appended to, truncated when the run resumes, and of bounded length."""

from __future__ import annotations

import csv
import io
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from pearl.atomic_file import replace_file
from pearl.errors import ConfigurationError
from pearl.runtime.log_file import LogFile

Row: TypeAlias = dict[str, str]

_PATIENCE_ROWS = 100  # rows until the next try to rewrite a table, after a failure

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ResumePoint:
    """Rows beyond this step, or of this step and later than `wall_s`, were written after the checkpoint."""

    env_steps: int
    wall_s: float = float("inf")

    def covers(self, row: Mapping[str, str]) -> bool:
        """Whether the checkpoint knows of the row; ValueError or TypeError for one without numbers."""
        step, wall_s = float(row["env_steps"]), float(row["wall_s"])
        return step < self.env_steps or (step == self.env_steps and wall_s <= self.wall_s + 0.001)  # rounded


class CsvTable:
    """A CSV file to append to, which survives a truncated last line and accepts new columns.

    Rows that cannot be written are lost with one warning. With `merge`, each pair of neighbouring rows becomes one
    whenever the table reaches `most_rows`, so that older rows are coarser. An existing file is continued, without
    its rows after `resume`.
    """

    def __init__(
        self,
        path: Path,
        columns: Sequence[str],
        resume: ResumePoint | None = None,
        *,
        merge: Callable[[Row, Row], Row] | None = None,
        most_rows: int = 100_000,
    ) -> None:
        self._path = path
        self._columns = list(columns)
        self._merge, self._most_rows = merge, most_rows
        self._count = 0
        self._rewrite_from = 0  # rows; above the count after a failed rewrite
        self.last_wall_s = 0.0
        self._file = LogFile(path)
        if path.exists() and path.stat().st_size:
            self._take_over(resume)
        self._file.header = self._line(self._columns)
        self._file.append(b"")

    def append(self, row: Mapping[str, Any]) -> None:
        """Add a row; names that are new become columns."""
        if (new := [name for name in row if name not in self._columns]) and self._count >= self._rewrite_from:
            self._rewrite([*self._columns, *new], self._rows)
        self._file.append(self._line([row.get(name, "") for name in self._columns]))
        self._count += 1
        if self._merge is not None and self._count >= self._most_rows:
            self._count //= 2  # even if it fails: do not try again at every row
            self._rewrite(self._columns, self._merged)

    def close(self) -> None:
        """Close the file; a row that comes later opens what is at its path by then."""
        self._file.close()

    @staticmethod
    def _line(cells: Sequence[Any]) -> bytes:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerow(cells)
        return text.getvalue().encode()

    def _take_over(self, resume: ResumePoint | None) -> None:
        """Continue an existing file: drop a line truncated by a kill, and rows beyond the checkpoint."""
        try:
            with self._path.open(encoding="utf-8", errors="replace") as stream:
                found = stream.readline().rstrip("\n")
        except OSError as error:
            raise ConfigurationError(
                f"{self._path} cannot be resumed: {error}. Move it away, or log into another directory."
            ) from error
        found_columns = next(csv.reader([found]), [])
        if missing := [name for name in ("wall_s", "env_steps") if name not in found_columns]:
            raise ConfigurationError(
                f"{self._path} cannot be resumed: its first line lacks the columns {missing}; found {found!r}. "
                "Move it away, or log into another directory."
            )
        columns = found_columns + [name for name in self._columns if name not in found_columns]
        self._columns = found_columns
        try:
            self._rewrite(columns, lambda: self._kept(resume))
        except (ValueError, TypeError, csv.Error) as error:
            raise ConfigurationError(
                f"{self._path} cannot be resumed: a row lacks numbers in env_steps and wall_s ({error}). "
                "Correct or remove that row, or log into another directory."
            ) from error

    def _kept(self, resume: ResumePoint | None) -> Iterator[Row]:
        for row in self._rows():
            wall_s = float(row["wall_s"])
            if resume is None or resume.covers(row):
                self.last_wall_s = max(self.last_wall_s, wall_s)
                self._count += 1
                yield row

    def _merged(self) -> Iterator[Row]:
        assert self._merge is not None
        rows = self._rows()
        for first in rows:
            second = next(rows, None)
            yield first if second is None else self._merge(first, second)

    def _rows(self) -> Iterator[Row]:
        """The complete rows, one at a time: tables of long runs do not fit the memory."""
        with self._path.open(newline="", encoding="utf-8", errors="replace") as stream:
            yield from csv.DictReader(line for line in stream if line.endswith("\n"))

    def _rewrite(self, columns: Sequence[str], rows: Callable[[], Iterable[Row]]) -> None:
        """Replace the file; where the disk does not allow that, it stays as it is, with one warning."""
        self._file.close()
        try:
            with replace_file(self._path, durable=False) as file:
                stream = io.TextIOWrapper(file, encoding="utf-8", newline="")
                writer = csv.DictWriter(stream, columns, restval="", extrasaction="ignore", lineterminator="\n")
                writer.writeheader()
                writer.writerows(rows())
                stream.detach()
        except OSError as error:
            if not self._rewrite_from:
                _log.warning("%s cannot be rewritten: %s. It stays as it is.", self._path, error)
            self._rewrite_from = self._count + _PATIENCE_ROWS
            return
        self._columns = list(columns)
        self._file.header = self._line(self._columns)
