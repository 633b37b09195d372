"""What was composed, as one value: the platform, the matrix and the placement, from which a report is made."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TypeVar, cast

from composer.matrix import AssignmentMatrix, Measurement
from composer.placement import Placement
from composer.platform import Platform
from composer.serialization import from_document, to_document
from pearl.devices.description import Connection, Device

_T = TypeVar("_T")


@dataclass(frozen=True)
class Composition:
    """Everything that led to a program. `matrix` keeps the spread of each measurement, but not its samples."""

    devices: tuple[Device, ...]
    connections: tuple[Connection, ...]
    matrix: AssignmentMatrix
    placement: Placement

    FORMAT = "pearl-composition"
    VERSION = 1

    @classmethod
    def of(cls, platform: Platform, matrix: AssignmentMatrix, placement: Placement) -> Composition:
        """The composition without the samples of its measurements."""
        return cls(platform.devices, platform.connections, _without_samples(matrix), placement)

    @property
    def platform(self) -> Platform:
        """Devices and connections."""
        return Platform(self.devices, self.connections)

    def to_json(self) -> str:
        """A versioned JSON document that `from_json` reads back to an equal composition."""
        return to_document(self, self.FORMAT, self.VERSION, indent=None)

    @classmethod
    def from_json(cls, text: str) -> Composition:
        """Read a document of `to_json`; raises ConfigurationError or PlacementError."""
        return from_document(cls, text, cls.FORMAT, cls.VERSION)


def _without_samples(value: _T) -> _T:
    if isinstance(value, Measurement):
        return cast("_T", dataclasses.replace(value, samples=None))
    if isinstance(value, tuple):
        return cast("_T", tuple(map(_without_samples, value)))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = {f.name: _without_samples(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return cast("_T", dataclasses.replace(value, **changed))
    return value
