"""The primitive-device assignment matrix (PEARL Table I): the time of each primitive per iteration on each device."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

from rich.console import RenderableType

from composer.measurement import Measurement
from composer.report import learner_tuning, matrix_report, plain
from composer.serialization import from_document, to_document
from composer.wording import require
from pearl.errors import ConfigurationError

if TYPE_CHECKING:
    import pandas as pd

Candidacy: TypeAlias = tuple[
    str, str, str
]  # device of the Replay Manager, of the Learner, the Learner's implementation
Column: TypeAlias = Literal["RM only", "Learner only", "RM & Learner", "Data Storage"]

COLUMNS: tuple[Column, ...] = get_args(Column)


def _require_counts(what: str, **counts: int) -> None:
    for name, value in counts.items():
        require(value >= 1, f"A {what}'s {name} must be at least 1; found {value!r}.")


@dataclass(frozen=True)
class ReplayCell:
    """T_RM of one iteration on a device, and the parameters for which it holds; the Data Storage's part is apart."""

    sample: Measurement
    insert: Measurement
    update: Measurement
    fanout: int
    workers: int = 1

    def __post_init__(self) -> None:
        _require_counts("Replay Manager", fanout=self.fanout, workers=self.workers)

    def measurements(self) -> tuple[tuple[str, Measurement], ...]:
        """The latencies by name."""
        return (("sample", self.sample), ("insert", self.insert), ("update", self.update))

    @property
    def parameters(self) -> str:
        """The parameters in words."""
        return f"fanout {self.fanout}, workers {self.workers}"


@dataclass(frozen=True)
class LearnerCell:
    """T_Learner of one iteration on a device, and the implementation and parameters for which it holds.

    The batch is in the device's memory when a step begins: bringing it there is the Data Storage's work. On an FPGA
    `sub_batches` is DP, the number of pipelines, and `unroll` UF of each layer of each network (empty elsewhere). With
    `prefetch` another thread draws the next batch during a step.
    """

    step: Measurement
    threads: int = 1
    sub_batches: int = 1
    implementation: str = "torch"
    prefetch: bool = False
    unroll: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        _require_counts("Learner", threads=self.threads, sub_batches=self.sub_batches)

    def measurements(self) -> tuple[tuple[str, Measurement], ...]:
        """The latency by name."""
        return (("step", self.step),)

    @property
    def parameters(self) -> str:
        """The parameters in words."""
        return f"{self.implementation}, {learner_tuning(self)}"


@dataclass(frozen=True)
class StorageCell:
    """The Data Storage of one iteration on a device: reading a batch, and storing the transitions that arrived.

    The batch is then in the same device's memory; its way to another device counts as communication.
    """

    gather: Measurement
    store: Measurement

    def measurements(self) -> tuple[tuple[str, Measurement], ...]:
        """The latencies by name."""
        return (("gather", self.gather), ("store", self.store))

    @property
    def parameters(self) -> str:
        """It has none."""
        return ""


@dataclass(frozen=True)
class PairCell:
    """Both primitives while they share a device.

    `gather` is the gather between them, where it differs from that of the column "Data Storage": caches are warm in a
    loop, and on an FPGA rows stream from the Replay Manager through the storage to the Learner. `joined` primitives are
    one program on the device: their messages cost nothing, and transitions are inserted between iterations.
    """

    replay: ReplayCell
    learner: LearnerCell
    gather: Measurement | None = None
    joined: bool = False

    def measurements(self) -> tuple[tuple[str, Measurement], ...]:
        """The latencies by name."""
        gather = () if self.gather is None else (("gather", self.gather),)
        return (*self.replay.measurements(), *gather, *self.learner.measurements())

    @property
    def iteration_us(self) -> float:
        """Microseconds of sample, gather, step and update, one after the other; a missing `gather` counts as 0.

        The insertion is not part of it: programs insert while the Learner trains, unless both are `joined`.
        """
        return sum(latency.value_us for name, latency in self.measurements() if name != "insert")

    @property
    def parameters(self) -> str:
        """The parameters in words."""
        return f"{self.replay.parameters}, {self.learner.parameters}"


@dataclass(frozen=True)
class MissingCell:
    """Why the device cannot run the primitive."""

    reason: str

    def measurements(self) -> tuple[tuple[str, Measurement], ...]:
        """No latencies."""
        return ()

    @property
    def parameters(self) -> str:
        """The reason in words."""
        return f"not possible: {self.reason}"


NOT_MEASURED = MissingCell("not measured")

Cell: TypeAlias = "ReplayCell | LearnerCell | PairCell | StorageCell | MissingCell"


@dataclass(frozen=True)
class LearnerOption:
    """One implementation of the Learner on a device: the columns "Learner only" and "RM & Learner"."""

    learner: LearnerCell | MissingCell
    pair: PairCell | MissingCell

    def cells(self) -> Iterator[tuple[Column, Cell]]:
        """The two columns in order."""
        return zip(COLUMNS[1:3], (self.learner, self.pair), strict=True)


@dataclass(frozen=True)
class MatrixRow:
    """One device: the columns "RM only", "Learner only" and "RM & Learner" of the paper, and "Data Storage".

    `learner` and `pair` belong to the implementation of the Learner with the fastest step, `others` to all other
    measured implementations.
    """

    device: str
    replay: ReplayCell | MissingCell
    learner: LearnerCell | MissingCell
    pair: PairCell | MissingCell
    others: tuple[LearnerOption, ...] = ()
    storage: StorageCell | MissingCell = NOT_MEASURED

    @property
    def learners(self) -> tuple[LearnerOption, ...]:
        """Every implementation of the Learner; the one with the fastest step is first."""
        return (LearnerOption(self.learner, self.pair), *self.others)

    def cells(self) -> Iterator[tuple[Column, Cell]]:
        """The columns in order."""
        return zip(COLUMNS, (self.replay, self.learner, self.pair, self.storage), strict=True)


@dataclass(frozen=True)
class UnavailableDevice:
    """A device of the CSV that is not used, and why."""

    device: str
    reason: str


@dataclass(frozen=True)
class UnsupportedLearner:
    """An implementation of the Learner that is left out: it cannot train the trainer, or is `slow`; and why.

    `threads`: only with so many threads; 0: with any number.
    """

    implementation: str
    reason: str
    slow: bool = False
    threads: int = 0

    @property
    def cause(self) -> str:
        """The reason, and of which kind it is."""
        return f"{'not measured' if self.slow else 'unsupported'}: {self.reason}"


@dataclass(frozen=True)
class StatedPower:
    """The active power of a device, as the device CSV states it."""

    device: str
    active_watts: float


@dataclass(frozen=True)
class AssignmentMatrix:
    """A row per usable device; and the devices and the implementations of the Learner that are left out.

    `batch_size` (0: not known) and `power` of the devices give the cells' EPS and EPS per watt.
    """

    rows: tuple[MatrixRow, ...]
    unavailable: tuple[UnavailableDevice, ...] = ()
    unsupported: tuple[UnsupportedLearner, ...] = ()
    batch_size: int = 0
    power: tuple[StatedPower, ...] = ()

    FORMAT = "pearl-assignment-matrix"
    VERSION = 2

    def __post_init__(self) -> None:
        names = self.devices
        require(len(set(names)) == len(names), f"A matrix has one row per device; found {', '.join(names)}.")

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices that have a row."""
        return tuple(row.device for row in self.rows)

    @property
    def columns(self) -> tuple[Column, ...]:
        """The columns of every row."""
        return COLUMNS

    def __getitem__(self, device: str) -> MatrixRow:
        for row in self.rows:
            if row.device == device:
                return row
        raise ConfigurationError(f"The matrix has no row {device!r}; it has {', '.join(self.devices) or 'none'}.")

    def cell(self, device: str, column: Column) -> Cell:
        """The cell of `device` in one of the columns."""
        for name, cell in self[device].cells():
            if name == column:
                return cell
        raise ConfigurationError(f"The matrix has the columns {', '.join(COLUMNS)}; found {column!r}.")

    def eps(self, cell: Cell) -> float | None:
        """Experiences per second if an iteration has the cell's latencies alone, by Eq. 7 without transfers.

        None for a missing cell, or if the batch size or all of the latencies are not known.
        """
        us = {name: measurement.value_us for name, measurement in cell.measurements()}
        collecting = us.get("store", 0.0) + us.get("insert", 0.0)
        training = us.get("step", 0.0) + us.get("update", 0.0)
        t_itr_us = us.get("sample", 0.0) + us.get("gather", 0.0) + max(collecting, training)
        return self.batch_size / t_itr_us * 1e6 if self.batch_size and t_itr_us else None

    def eps_per_watt(self, device: str, cell: Cell) -> float | None:
        """The cell's EPS per watt of `device` alone; None where its power is not stated."""
        watts = next((found.active_watts for found in self.power if found.device == device), None)
        eps = self.eps(cell)
        return None if eps is None or watts is None else eps / watts

    def to_pandas(self) -> pd.DataFrame:
        """One line per latency: device, column, latency, p50_us, p20_us, p80_us, n, source, parameters, note.

        A missing cell is one line with the reason in `parameters`. The lines of the fastest implementation of the
        Learner come first; `parameters` name the implementation.
        """
        import pandas as pd  # here, because loading pandas takes 0.2 s

        lines: list[tuple[object, ...]] = []
        for row in self.rows:
            for column, cell in (*row.cells(), *(pair for other in row.others for pair in other.cells())):
                if isinstance(cell, MissingCell):
                    lines.append((row.device, column, None, math.nan, math.nan, math.nan, 0, None, cell.reason, ""))
                    continue
                for name, m in cell.measurements():
                    values = (m.value_us, m.p20_us, m.p80_us, m.n, m.source)
                    lines.append((row.device, column, name, *values, cell.parameters, m.note))
        names = ["device", "column", "latency", "p50_us", "p20_us", "p80_us", "n", "source", "parameters", "note"]
        return pd.DataFrame(lines, columns=names)

    def to_json(self) -> str:
        """A versioned JSON document that `from_json` reads back to an equal matrix."""
        return to_document(self, self.FORMAT, self.VERSION)

    @classmethod
    def from_json(cls, text: str) -> AssignmentMatrix:
        """Read `to_json`'s document; ConfigurationError says where it is not one."""
        return from_document(cls, text, cls.FORMAT, cls.VERSION)

    def __rich__(self) -> RenderableType:
        return matrix_report(self)

    def __str__(self) -> str:
        return plain(self)
