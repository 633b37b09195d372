"""The power of a machine while it runs a placement, from the cells of both CSV files.

In use count the `active_watts` of the devices, of their own memory and of the links on their routes; devices that are
one piece of silicon count once, with the highest value. The machine's other devices draw their `idle_watts`. A memory
or a link without a cell counts nothing: its power is then part of a device's, as on the board of a GPU.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from composer.matrix import AssignmentMatrix, StatedPower
from composer.platform import Platform
from pearl.devices.description import Device
from pearl.runtime.power import PoweredDevice, PowerPlan


@dataclass(frozen=True)
class PlacementPower:
    """Watts of devices, memories and links in use, and of the devices that stay idle.

    `active_watts` is None if `missing` names devices in use whose active power is not stated. `unstated` names idle
    devices whose idle power is not stated; it counts as 0.
    """

    active_watts: float | None
    idle_watts: float
    missing: tuple[str, ...] = ()
    unstated: tuple[str, ...] = ()


def power_of(platform: Platform, used: Collection[str], routes: Iterable[tuple[str, str]] = ()) -> PlacementPower:
    """The power while the devices `used` work and messages take the `routes` (source, target)."""
    active = idle = 0.0
    missing: list[str] = []
    unstated: list[str] = []
    for group in platform.silicon:
        at_work = [device for device in group if device.name in used]
        watts = _active_watts(platform, group, at_work) if at_work else _highest(group, _idle)
        if at_work:
            active += watts or 0.0
            missing += [device.name for device in at_work] if watts is None else []
        else:
            idle += watts or 0.0
            unstated += [group[0].name] if watts is None else []
    total = None if missing else active + _link_watts(platform, routes)
    return PlacementPower(total, idle, tuple(missing), tuple(unstated))


class Placed(Protocol):
    """A placement, as far as its power goes."""

    @property
    def routes(self) -> tuple[tuple[str, str], ...]:
        """The routes (source, target) of its messages; every device in use is an end of one."""


def power_plan(platform: Platform, placement: Placed) -> PowerPlan:
    """The devices of the machine with their stated power, for the program of the placement."""
    names = set(itertools.chain.from_iterable(placement.routes))
    used: list[PoweredDevice] = []
    idle: list[PoweredDevice] = []
    for group in platform.silicon:
        shown = next((device for device in group if not device.shares_with), group[0])
        plain = PoweredDevice(shown.name, shown.kind, shown.backend, shown.selector)
        if at_work := [device for device in group if device.name in names]:
            used.append(dataclasses.replace(plain, active_watts=_active_watts(platform, group, at_work)))
        else:
            idle.append(dataclasses.replace(plain, idle_watts=_highest(group, _idle)))
    return PowerPlan(tuple(used), tuple(idle), _link_watts(platform, placement.routes))


def with_rates(matrix: AssignmentMatrix, platform: Platform, batch_size: int) -> AssignmentMatrix:
    """The matrix with the batch size and the stated power of its devices, which give its cells EPS and EPS per watt."""
    watts = ((name, power_of(platform, (name,)).active_watts) for name in matrix.devices)
    power = tuple(StatedPower(name, found) for name, found in watts if found is not None)
    return dataclasses.replace(matrix, batch_size=batch_size, power=power)


def _active_watts(platform: Platform, group: Sequence[Device], at_work: Sequence[Device]) -> float | None:
    """The active power of one piece of silicon and of its memory, while the devices `at_work` of its `group` work."""
    watts = _highest(at_work, _active)
    if watts is None:
        watts = _highest(group, _active)
    memory = max(platform.link_watts(device.name, device.name) for device in at_work)
    return None if watts is None else float(watts + memory)


def _active(device: Device) -> float | None:
    return device.active_watts


def _idle(device: Device) -> float | None:
    return device.idle_watts


def _highest(devices: Iterable[Device], watts: Callable[[Device], float | None]) -> float | None:
    return max((found for device in devices if (found := watts(device)) is not None), default=None)


def _link_watts(platform: Platform, routes: Iterable[tuple[str, str]]) -> float:
    return float(sum(platform.link_watts(*pair) for pair in _hops(platform, routes)))


def _hops(platform: Platform, routes: Iterable[tuple[str, str]]) -> set[tuple[str, str]]:
    """The pairs of different devices that the routes cross, each once whatever the direction."""
    found: set[tuple[str, str]] = set()
    for source, target in routes:
        hops = platform.link(source, target).hops
        found.update((min(pair), max(pair)) for pair in itertools.pairwise(hops))
    return found
