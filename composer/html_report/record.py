"""Reads everything that a run left in its folder; what is missing or damaged becomes a note of the report."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from composer.composition import Composition, RolloutComposition, read_composition
from composer.html_report.trace import Trace, read_trace
from pearl.errors import ConfigurationError, PearlError
from pearl.runtime.composition_file import COMPOSITION_OF_RUN
from pearl.runtime.learning_curve import read_episodes, read_evaluations

if TYPE_CHECKING:
    import pandas as pd

_T = TypeVar("_T")

_MOST_BYTES = 256 * 2**20  # of a file that is read whole


@dataclass(frozen=True)
class RunRecord:
    """What a run left: None, or an empty mapping, where a file is missing. `notes` say what is missing, and why."""

    folder: Path
    summary: Mapping[str, Any] = field(default_factory=dict)
    bench: Mapping[str, Any] = field(default_factory=dict)
    progress: pd.DataFrame | None = None
    episodes: pd.DataFrame | None = None
    evaluations: pd.DataFrame | None = None
    composition: Composition | RolloutComposition | None = None
    trace: Trace | None = None
    notes: tuple[str, ...] = ()


def read_run(folder: Path, composition: Path | None = None, trace: Path | None = None) -> RunRecord:
    """Read the run in `folder`. A `composition` or a `trace` that is named replaces the folder's own.

    Raises ConfigurationError for a named file that cannot be read; the same of the folder's own files is a note.
    """
    notes: list[str] = []

    def own(name: str, read: Callable[[Path], _T], absent: str = "") -> _T | None:
        path = folder / name
        if not path.is_file():
            if absent:
                notes.append(absent)
            return None
        try:
            return read(path)
        except (PearlError, OSError) as error:
            notes.append(f"{error}")
            return None

    summary = own("summary.json", _read_object, "There is no summary.json: the run goes on, or was stopped early.")
    return RunRecord(
        folder=folder,
        summary=summary or {},
        bench=own("bench.json", _read_object) or {},
        progress=own("progress.csv", _read_numbers, "There is no progress.csv, so no EPS over time."),
        episodes=own("episodes.csv", read_episodes, "There is no episodes.csv, so no training returns."),
        evaluations=own("evaluations.csv", read_evaluations),
        composition=_read_composition(composition)
        if composition is not None
        else own(
            COMPOSITION_OF_RUN,
            _read_composition,
            f"There is no {COMPOSITION_OF_RUN}, so no platform, matrix and placement. A run copies it from "
            "PROGRAM.composition.json next to its program, which this version of the composer writes. "
            "Name that file: pearl report RUN --composition PROGRAM.composition.json.",
        ),
        trace=read_trace(trace) if trace is not None else own("trace.json", read_trace),
        notes=tuple(notes),
    )


def _read_composition(path: Path) -> Composition | RolloutComposition:
    text = _text_of(path)
    try:
        return read_composition(text)
    except PearlError as error:
        raise ConfigurationError(
            f"{path} cannot be used: {error} Compose again, or name another with --composition."
        ) from error


def _read_object(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(_text_of(path))
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{path} is not JSON ({error}).") from error
    if not isinstance(found, dict):
        raise ConfigurationError(f"{path} must hold an object; found {found!r:.60}.")
    return found


def _read_numbers(path: Path) -> pd.DataFrame:
    """The columns of a table as numbers (NaN where there is none), without a last line that a kill has cut."""
    import numpy as np
    import pandas as pd

    text = _text_of(path)
    whole = text[: text.rfind("\n") + 1].replace("\0", "")
    try:
        table = pd.read_csv(io.StringIO(whole), on_bad_lines="skip", index_col=False)
    except (ValueError, csv.Error) as error:
        raise ConfigurationError(f"{path} is not a table: {error}. It is written by the run.") from error
    numbers: pd.DataFrame = table.apply(pd.to_numeric, errors="coerce").astype("float64")
    return numbers.where(np.isfinite(numbers) & (numbers.abs() <= 1e300))


def _text_of(path: Path) -> str:
    try:
        if (size := path.stat().st_size) > _MOST_BYTES:
            raise ConfigurationError(f"{path} has {size / 2**20:,.0f} MiB, which is too large for a report.")
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror or error}.") from error
