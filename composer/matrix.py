"""The primitive-device assignment matrix (PEARL Table I): what one iteration of each primitive takes on each device."""

from __future__ import annotations

import dataclasses
import difflib
import io
import json
import math
import types
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar, get_args, get_origin

import numpy as np
import pandas as pd
from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from pearl.errors import ConfigurationError

Source: TypeAlias = Literal["measured", "modelled", "imported"]
Column: TypeAlias = Literal["RM only", "Learner only", "RM & Learner"]

SOURCES: tuple[Source, ...] = get_args(Source)
COLUMNS: tuple[Column, ...] = get_args(Column)

_WIDTH = 100
_T = TypeVar("_T")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigurationError(message)


@dataclass(frozen=True)
class Measurement:
    """A latency in microseconds: `value_us` is the median, `p20_us` and `p80_us` its spread over `n` samples.

    A modelled value has n = 0 and no spread.
    """

    value_us: float
    p20_us: float
    p80_us: float
    n: int
    source: Source
    samples: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        _require(self.source in SOURCES, f"A measurement's source is {' or '.join(SOURCES)}; found {self.source!r}.")
        ordered = 0 <= self.p20_us <= self.value_us <= self.p80_us < math.inf
        found = f"p20 {self.p20_us!r}, p50 {self.value_us!r}, p80 {self.p80_us!r}"
        _require(ordered, f"A latency must be finite and at least 0 with p20 <= p50 <= p80; found {found}.")
        _require(self.n >= 0, f"A measurement's n must be at least 0; found {self.n!r}.")
        _require(
            self.samples is None or len(self.samples) == self.n,
            f"A measurement that keeps its samples must keep all {self.n}; found {len(self.samples or ())}.",
        )

    @classmethod
    def from_samples(cls, samples_us: Sequence[float], source: Source = "measured") -> Measurement:
        """Summarise `samples_us` and keep them."""
        _require(len(samples_us) > 0, "A measurement needs at least one sample; found none.")
        low, median, high = (float(v) for v in np.percentile(np.asarray(samples_us, np.float64), (20, 50, 80)))
        return cls(median, low, high, len(samples_us), source, tuple(float(s) for s in samples_us))

    @classmethod
    def modelled(cls, value_us: float) -> Measurement:
        """A value that comes from equations."""
        return cls(value_us, value_us, value_us, 0, "modelled")

    @property
    def spread(self) -> float:
        """(p80 - p20) / p50; 0 for a modelled value."""
        return (self.p80_us - self.p20_us) / self.value_us if self.value_us else 0.0


@dataclass(frozen=True)
class ReplayCell:
    """T_RM of one iteration on a device, and the parameters it was obtained with."""

    sample: Measurement
    insert: Measurement
    update: Measurement
    fanout: int
    workers: int = 1

    def measurements(self) -> tuple[tuple[str, Measurement], ...]:
        """The latencies by name."""
        return (("sample", self.sample), ("insert", self.insert), ("update", self.update))

    @property
    def parameters(self) -> str:
        """The parameters in words."""
        return f"fanout {self.fanout}, workers {self.workers}"


@dataclass(frozen=True)
class LearnerCell:
    """T_Learner of one iteration on a device, and the parameters it was obtained with."""

    step: Measurement
    threads: int = 1
    sub_batches: int = 1
    streams: int = 1

    def measurements(self) -> tuple[tuple[str, Measurement], ...]:
        """The latency by name."""
        return (("step", self.step),)

    @property
    def parameters(self) -> str:
        """The parameters in words."""
        return f"threads {self.threads}, sub-batches {self.sub_batches}, streams {self.streams}"


@dataclass(frozen=True)
class PairCell:
    """Both primitives while they share a device."""

    replay: ReplayCell
    learner: LearnerCell

    def measurements(self) -> tuple[tuple[str, Measurement], ...]:
        """The four latencies by name."""
        return (*self.replay.measurements(), *self.learner.measurements())

    @property
    def parameters(self) -> str:
        """The parameters in words."""
        return f"{self.replay.parameters}, {self.learner.parameters}"


@dataclass(frozen=True)
class MissingCell:
    """The device cannot take the primitive, and why."""

    reason: str


Cell: TypeAlias = "ReplayCell | LearnerCell | PairCell | MissingCell"


@dataclass(frozen=True)
class MatrixRow:
    """One device: the columns "RM only", "Learner only" and "RM & Learner"."""

    device: str
    replay: ReplayCell | MissingCell
    learner: LearnerCell | MissingCell
    pair: PairCell | MissingCell

    def cells(self) -> Iterator[tuple[Column, Cell]]:
        """The three columns in order."""
        return zip(COLUMNS, (self.replay, self.learner, self.pair), strict=True)


@dataclass(frozen=True)
class UnavailableDevice:
    """A device of the CSV that is not used, and why."""

    device: str
    reason: str


@dataclass(frozen=True)
class AssignmentMatrix:
    """A row per usable device, and the devices left out."""

    rows: tuple[MatrixRow, ...]
    unavailable: tuple[UnavailableDevice, ...] = ()

    FORMAT = "pearl-assignment-matrix"
    VERSION = 1

    def __post_init__(self) -> None:
        names = self.devices
        _require(len(set(names)) == len(names), f"A matrix has one row per device; found {', '.join(names)}.")

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices that have a row."""
        return tuple(row.device for row in self.rows)

    def __getitem__(self, device: str) -> MatrixRow:
        for row in self.rows:
            if row.device == device:
                return row
        raise ConfigurationError(f"The matrix has no row {device!r}; it has {', '.join(self.devices) or 'none'}.")

    def cell(self, device: str, column: Column) -> Cell:
        """The cell of `device` in the column "RM only", "Learner only" or "RM & Learner"."""
        for name, cell in self[device].cells():
            if name == column:
                return cell
        raise ConfigurationError(f"The matrix has the columns {', '.join(COLUMNS)}; found {column!r}.")

    def to_pandas(self) -> pd.DataFrame:
        """One line per latency: device, column, latency, p50_us, p20_us, p80_us, n, source, parameters.

        A missing cell is one line whose `parameters` hold the reason.
        """
        lines: list[tuple[object, ...]] = []
        for row in self.rows:
            for column, cell in row.cells():
                if isinstance(cell, MissingCell):
                    lines.append((row.device, column, None, math.nan, math.nan, math.nan, 0, None, cell.reason))
                    continue
                for name, m in cell.measurements():
                    values = (m.value_us, m.p20_us, m.p80_us, m.n, m.source)
                    lines.append((row.device, column, name, *values, cell.parameters))
        names = ["device", "column", "latency", "p50_us", "p20_us", "p80_us", "n", "source", "parameters"]
        return pd.DataFrame(lines, columns=names)

    def to_json(self) -> str:
        """A versioned JSON document that `from_json` reads back to an equal matrix."""
        return to_document(self, self.FORMAT, self.VERSION)

    @classmethod
    def from_json(cls, text: str) -> AssignmentMatrix:
        """Read `to_json`'s document; ConfigurationError says where it is not one."""
        return from_document(cls, text, cls.FORMAT, cls.VERSION)

    def __rich__(self) -> RenderableType:
        table = Table(title="Primitive-device assignment matrix, microseconds of one iteration", box=box.ASCII2)
        for heading in ("device", *COLUMNS):
            table.add_column(heading)
        for row in self.rows:
            table.add_row(Text(row.device), *(Text(_cell_text(cell)) for _, cell in row.cells()), end_section=True)
        return Group(table, *unavailable_lines(self.unavailable))

    def __str__(self) -> str:
        return plain(self)


def _cell_text(cell: Cell) -> str:
    if isinstance(cell, MissingCell):
        return f"not possible: {cell.reason}"
    lines = [f"{name:<7}{microseconds(m.value_us):>8}  {source_text(m)}" for name, m in cell.measurements()]
    return "\n".join([*lines, cell.parameters])


def source_text(measurement: Measurement) -> str:
    """Where a value comes from: `measured n=50 +-4%`, `modelled`."""
    if measurement.n == 0:
        return measurement.source
    return f"{measurement.source} n={measurement.n} +-{measurement.spread / 2:.0%}"


def microseconds(value: float) -> str:
    """A latency for reading: two decimals below 100, one below 1,000, none above."""
    return f"{value:,.{2 if value < 100 else 1 if value < 1000 else 0}f}"


def unavailable_lines(unavailable: Sequence[UnavailableDevice]) -> list[Text]:
    """One line per device that is left out, with its reason."""
    return [Text(f"{device.device} is left out: {device.reason}") for device in unavailable]


def plain(renderable: RenderableType, width: int = _WIDTH) -> str:
    """What rich shows of `renderable`, without colours, lines at most `width` long."""
    file = io.StringIO()
    console = Console(file=file, width=width, force_terminal=False, color_system=None, highlight=False)
    console.print(renderable)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def to_document(value: Any, name: str, version: int) -> str:
    """The frozen dataclass `value` as JSON, headed by the document's name and version."""
    document = {"format": name, "version": version, **dataclasses.asdict(value)}
    return json.dumps(document, indent=2, allow_nan=False)


def from_document(cls: type[_T], text: str, name: str, version: int) -> _T:
    """Read the JSON document of a frozen dataclass; ConfigurationError says where it departs from its types."""
    document = parse_document(text, name, version)
    return typing.cast("_T", decode(cls, {k: v for k, v in document.items() if k not in ("format", "version")}, name))


def parse_document(text: str, name: str, version: int) -> dict[str, Any]:
    """The JSON object in `text`, if it is a document of that name and version; else ConfigurationError."""

    def refuse(constant: str) -> None:
        raise ConfigurationError(f"A {name} document holds finite numbers only; found {constant}.")

    try:
        document = json.loads(text, parse_constant=refuse)
    except ConfigurationError:
        raise
    except (ValueError, RecursionError) as error:  # ValueError: also a number of thousands of digits
        raise ConfigurationError(f"Expected a {name} document; found text that is not JSON ({error}).") from error
    found = document.get("format") if isinstance(document, dict) else type(document).__name__
    _require(found == name, f"Expected a JSON document of format {name!r}; found {found!r}.")
    _require(
        type(document.get("version")) is int and document["version"] == version,
        f"This version reads {name} version {version}; found {document.get('version')!r}. Write the file anew.",
    )
    return typing.cast("dict[str, Any]", document)


def decode(expected: Any, data: object, where: str) -> Any:
    """Build a value of the type `expected` from JSON data.

    Handles frozen dataclasses, tuples, literals, unions of dataclasses or with None, and the four scalars.
    `where` is the path named by the ConfigurationError.
    """
    if dataclasses.is_dataclass(expected) and isinstance(expected, type):
        return _decode_dataclass(expected, data, where)
    origin = get_origin(expected)
    if origin in (typing.Union, types.UnionType):
        return _decode_union(get_args(expected), data, where)
    if origin is Literal:
        accepted = get_args(expected)
        _require(data in accepted, f"{where}: expected one of {', '.join(map(repr, accepted))}; found {_short(data)}.")
        return data
    if origin is tuple:
        kinds = get_args(expected)
        if not isinstance(data, list):
            raise ConfigurationError(f"{where}: expected a list; found {_short(data)}.")
        if kinds[-1] is Ellipsis:
            return tuple(decode(kinds[0], item, f"{where}[{i}]") for i, item in enumerate(data))
        _require(len(data) == len(kinds), f"{where}: expected {len(kinds)} items; found {_short(data)}.")
        return tuple(
            decode(kind, item, f"{where}[{i}]") for i, (kind, item) in enumerate(zip(kinds, data, strict=True))
        )
    return _decode_scalar(expected, data, where)


def _decode_scalar(expected: Any, data: object, where: str) -> object:
    if expected is float and isinstance(data, (int, float)) and not isinstance(data, bool):
        _require(abs(data) <= 1e300, f"{where}: expected a finite number; found {_short(data)}.")
        return float(data)
    if expected in (str, bool, int) and type(data) is expected:
        return data
    name = getattr(expected, "__name__", str(expected))
    raise ConfigurationError(f"{where}: expected {name}; found {_short(data)}.")


def _decode_union(kinds: tuple[Any, ...], data: object, where: str) -> Any:
    if data is None and types.NoneType in kinds:
        return None
    rest = [kind for kind in kinds if kind is not types.NoneType]
    if isinstance(data, dict):
        records = [kind for kind in rest if dataclasses.is_dataclass(kind)]
        # The record that shares the most keys: its own error then names the key that is wrong.
        rest = sorted(records, key=lambda kind: -len(data.keys() & {f.name for f in dataclasses.fields(kind)}))
    elif len(rest) > 1:
        rest = [kind for kind in rest if type(data) is kind] or rest
    _require(bool(rest), f"{where}: expected another kind of value; found {_short(data)}.")
    return decode(rest[0], data, where)


def _decode_dataclass(cls: type[Any], data: object, where: str) -> Any:
    if not isinstance(data, dict):
        raise ConfigurationError(f"{where}: expected an object; found {_short(data)}.")
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}
    for key in data:
        if key not in fields:
            close = difflib.get_close_matches(str(key), list(fields), n=1)
            advice = f" Did you mean {close[0]!r}?" if close else ""
            raise ConfigurationError(f"{where}: expected the keys {', '.join(fields)}; found {key!r}.{advice}")
    missing = [name for name, f in fields.items() if name not in data and f.default is dataclasses.MISSING]
    _require(not missing, f"{where}: expected the keys {', '.join(fields)}; {', '.join(missing)} missing.")
    values = {name: decode(hints[name], value, f"{where}.{name}") for name, value in data.items()}
    try:
        return cls(**values)
    except ConfigurationError as error:
        raise type(error)(f"{where}: {error}") from error


def _short(data: object) -> str:
    text = repr(data)
    return text if len(text) <= 60 else f"{text[:57]}..."
