"""The primitive-device assignment matrix of on-policy training: GAE and the Learner, microseconds of one rollout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from rich.console import Group, RenderableType
from rich.text import Text

from composer.matrix import LearnerCell, MissingCell, UnavailableDevice, UnsupportedLearner
from composer.measurement import Measurement
from composer.report import ascii_table, left_out_line, plain, short_number
from composer.serialization import from_document, to_document
from pearl.errors import ConfigurationError


@dataclass(frozen=True)
class AdvantagesCell:
    """GAE of one rollout on a device, its standardisation and quantisation included, with the rollout on the host."""

    estimate: Measurement


AdvantagesColumn: TypeAlias = AdvantagesCell | MissingCell
LearnerColumn: TypeAlias = LearnerCell | MissingCell


@dataclass(frozen=True)
class RolloutRow:
    """One device: GAE, and every implementation and number of threads of the Learner, the fastest first.

    The step of a LearnerCell is all training on one rollout: all epochs of minibatches.
    """

    device: str
    advantages: AdvantagesColumn
    learners: tuple[LearnerColumn, ...]


@dataclass(frozen=True)
class RolloutMatrix:
    """A row per usable device, and the host's time for its actors to collect a rollout and for its messages."""

    rows: tuple[RolloutRow, ...]
    collection: Measurement
    rollout_rows: int
    unavailable: tuple[UnavailableDevice, ...] = ()
    unsupported: tuple[UnsupportedLearner, ...] = ()

    FORMAT = "pearl-rollout-matrix"
    VERSION = 1

    def __getitem__(self, device: str) -> RolloutRow:
        for row in self.rows:
            if row.device == device:
                return row
        raise ConfigurationError(f"The matrix has no row {device!r}; it has {', '.join(r.device for r in self.rows)}.")

    def to_json(self) -> str:
        """A versioned JSON document that `from_json` reads back to an equal matrix."""
        return to_document(self, self.FORMAT, self.VERSION)

    @classmethod
    def from_json(cls, text: str) -> RolloutMatrix:
        """Read `to_json`'s document; ConfigurationError says where it is not one."""
        return from_document(cls, text, cls.FORMAT, cls.VERSION)

    def __rich__(self) -> RenderableType:
        table = ascii_table("Primitive-device assignment matrix, microseconds of one rollout", _HEADINGS)
        for row in self.rows:
            learners = [_learner_text(cell) for cell in row.learners] or [("", "")]
            table.add_row(row.device, _advantages_text(row.advantages), *learners[0])
            for step, how in learners[1:]:
                table.add_row("", "", step, how)
        us = short_number(self.collection.value_us)
        lines = [Text(f"The actors collect a rollout of {self.rollout_rows:,} transitions in {us} us.")]
        lines += [Text(f"{u.device} is left out: {u.reason}") for u in self.unavailable]
        lines += [Text(left_out_line(u)) for u in self.unsupported]
        return Group(table, *lines)

    def __str__(self) -> str:
        return plain(self)


_HEADINGS = ("device", "GAE", "Learner", "with")


def _advantages_text(cell: AdvantagesColumn) -> str:
    return f"not possible: {cell.reason}" if isinstance(cell, MissingCell) else short_number(cell.estimate.value_us)


def _learner_text(cell: LearnerColumn) -> tuple[str, str]:
    if isinstance(cell, MissingCell):
        return f"not possible: {cell.reason}", ""
    return short_number(cell.step.value_us), cell.parameters
