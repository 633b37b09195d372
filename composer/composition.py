"""A composition as one value: the platform, the matrix and the placement. Reports are made from it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, TypeVar, cast

from composer.matrix import AssignmentMatrix
from composer.measurement import Measurement
from composer.on_policy.matrix import RolloutMatrix
from composer.on_policy.placement import RolloutPlacement
from composer.placement import Placement
from composer.platform import Platform
from composer.serialization import format_of, from_document, to_document
from pearl.devices.description import Connection, Device

if TYPE_CHECKING:
    from typing_extensions import Self

_T = TypeVar("_T")


@dataclass(frozen=True)
class ChosenSetting:
    """A setting that the user left to the composer: its name, the chosen value in Python, and why."""

    name: str
    value: str
    reason: str


@dataclass(frozen=True)
class _Composed:
    devices: tuple[Device, ...]
    connections: tuple[Connection, ...]

    FORMAT: ClassVar[str]
    VERSION: ClassVar[int] = 1

    @property
    def platform(self) -> Platform:
        """Devices and connections."""
        return Platform(self.devices, self.connections)

    def to_json(self) -> str:
        """A versioned JSON document that `from_json` reads back to an equal composition."""
        return to_document(self, self.FORMAT, self.VERSION, indent=None)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read a document of `to_json`; raises ConfigurationError or PlacementError."""
        return from_document(cls, text, cls.FORMAT, cls.VERSION)


@dataclass(frozen=True)
class Composition(_Composed):
    """Everything that led to a program. `matrix` keeps the spread of each measurement, but not its samples."""

    matrix: AssignmentMatrix
    placement: Placement
    settings: tuple[ChosenSetting, ...] = ()

    FORMAT = "pearl-composition"

    @classmethod
    def of(
        cls,
        platform: Platform,
        matrix: AssignmentMatrix,
        placement: Placement,
        settings: tuple[ChosenSetting, ...] = (),
    ) -> Composition:
        """The composition without the samples of its measurements."""
        return cls(platform.devices, platform.connections, _without_samples(matrix), placement, settings)


@dataclass(frozen=True)
class RolloutComposition(_Composed):
    """The same for a program with rollouts."""

    matrix: RolloutMatrix
    placement: RolloutPlacement
    settings: tuple[ChosenSetting, ...] = ()

    FORMAT = "pearl-rollout-composition"

    @classmethod
    def of(
        cls,
        platform: Platform,
        matrix: RolloutMatrix,
        placement: RolloutPlacement,
        settings: tuple[ChosenSetting, ...] = (),
    ) -> RolloutComposition:
        """The composition without the samples of its measurements."""
        devices, connections = platform.devices, platform.connections
        return cls(devices, connections, _without_samples(matrix), _without_samples(placement), settings)


def read_composition(text: str) -> Composition | RolloutComposition:
    """Read either document; raises ConfigurationError or PlacementError."""
    kind = RolloutComposition if format_of(text) == RolloutComposition.FORMAT else Composition
    return kind.from_json(text)


def _without_samples(value: _T) -> _T:
    if isinstance(value, Measurement):
        return cast("_T", dataclasses.replace(value, samples=None))
    if isinstance(value, tuple):
        return cast("_T", tuple(map(_without_samples, value)))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = {f.name: _without_samples(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return cast("_T", dataclasses.replace(value, **changed))
    return value
