"""The power of a run: measured by the counters of its devices, else as the device CSV stated it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pearl.backends import backend_of
from pearl.devices.description import Device, DeviceKind
from pearl.devices.power import PowerMeter
from pearl.errors import ConfigurationError, DeviceError
from pearl.runtime.rate import StepRate
from pearl.runtime.scores import number

_POLL_S = 1.0


@dataclass(frozen=True)
class PoweredDevice:
    """A row of the device CSV, as far as power is concerned; the program need not know its backend."""

    name: str
    kind: DeviceKind
    backend: str
    selector: str = ""
    idle_watts: float | None = None
    active_watts: float | None = None

    def meter(self) -> PowerMeter | None:
        """The device's energy counter; None if it has none. DeviceError if it cannot be read."""
        try:
            device = Device(self.name, self.kind, self.backend, self.selector)
        except ConfigurationError:  # its backend is a module that this program does not import
            return None
        return backend_of(device).power_meter(device)


@dataclass(frozen=True)
class PowerPlan:
    """The devices of the machine: those that the program uses, and those that stay idle; one for each piece of silicon.

    `active_watts` of the devices used include their own memory. `link_watts` is the power of the links in use.
    """

    used: tuple[PoweredDevice, ...] = ()
    idle: tuple[PoweredDevice, ...] = ()
    link_watts: float = 0.0

    @property
    def stated_watts(self) -> float | None:
        """The active power of the devices and links in use, as stated; None if it is not stated for each device."""
        stated = [device.active_watts for device in self.used]
        known = [watts for watts in stated if watts is not None]
        return sum(known) + self.link_watts if known and len(known) == len(stated) else None


@dataclass(frozen=True)
class Power:
    """Mean watts over `seconds`: of the devices and links in use, and of the idle devices whose power is known.

    `watts` is None if the power of a device in use is not known. `sources` says for each device how it is known.
    """

    seconds: float
    watts: float | None
    idle_watts: float
    sources: dict[str, str]

    @property
    def machine_watts(self) -> float | None:
        """The watts of all devices."""
        return None if self.watts is None else self.watts + self.idle_watts


@dataclass
class _Silicon:
    """One device: its meter if it has one, else its stated power."""

    device: PoweredDevice
    used: bool
    meter: PowerMeter | None = None
    problem: str = ""  # why its counter cannot be read
    together_with: _Silicon | None = None  # the device whose counter includes it
    began_at: float = 0.0
    joules: float = 0.0  # of the meter, at the newest poll

    @property
    def stated_watts(self) -> float | None:
        return self.device.active_watts if self.used else self.device.idle_watts

    def poll(self) -> None:
        if self.meter is None:
            return
        try:
            self.joules = self.meter.joules()
        except DeviceError as error:
            self.meter, self.problem = None, str(error)

    def watts(self, seconds: float) -> tuple[float | None, str]:
        """Mean watts over the last `seconds`, and their source in words."""
        if self.together_with is not None and self.together_with.meter is not None:
            return 0.0, f"measured together with {self.together_with.device.name}"
        if self.meter is not None and seconds > 0:
            watts = (self.joules - self.began_at) / seconds
            return watts, f"{watts:,.1f} W measured by {self.meter.source}"
        if (stated := self.stated_watts) is not None:
            return stated, f"{stated:,.1f} W stated in the device CSV"
        column = "active_watts" if self.used else "idle_watts"
        return None, f"not known: no counter, and no {column} in the device CSV"


@dataclass
class PowerLog:
    """The mean power of a run from its first batch on.

    Call `follow` often: it reads the counters once a second, which also keeps count of counters that wrap around.
    """

    plan: PowerPlan
    clock: Callable[[], float] = time.monotonic
    _parts: list[_Silicon] = field(default_factory=list, init=False)
    _began: float | None = field(default=None, init=False)
    _batch: float | None = field(default=None, init=False)
    _polled: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        counted: dict[str, _Silicon] = {}
        devices = [(device, True) for device in self.plan.used] + [(device, False) for device in self.plan.idle]
        for device, used in devices:
            part = _Silicon(device, used)
            self._parts.append(part)
            try:
                meter = device.meter()
            except DeviceError as error:
                part.problem = str(error)
                continue
            if meter is not None and (first := counted.setdefault(meter.counter, part)) is not part:
                part.together_with = first
            else:
                part.meter = meter

    def follow(self, rate: StepRate) -> None:
        """Read the counters if that is due; begin again where `rate` did."""
        if rate.since is None:
            return
        now = self.clock()
        if rate.since != self._batch:
            self._batch = rate.since
            self._poll(now)
            self._began = now
            for part in self._parts:
                part.began_at = part.joules
        elif now - self._polled >= _POLL_S:
            self._poll(now)

    def read(self) -> Power | None:
        """The mean power from the first batch until now; None before the first batch."""
        if self._began is None:
            return None
        self._poll(self.clock())
        return self.newest()

    def newest(self) -> Power | None:
        """The mean power from the first batch until the counters were last read."""
        if self._began is None:
            return None
        seconds = self._polled - self._began
        found = [(part, *part.watts(seconds)) for part in self._parts]
        used = [watts for part, watts, _ in found if part.used]
        known = [watts for watts in used if watts is not None]
        total = sum(known) + self.plan.link_watts if known and len(known) == len(used) else None
        idle = sum(watts or 0.0 for part, watts, _ in found if not part.used)
        return Power(seconds, total, idle, {part.device.name: source for part, _, source in found})

    @property
    def problems(self) -> Iterator[str]:
        """Why counters that exist cannot be read."""
        return (part.problem for part in self._parts if part.problem)

    def _poll(self, now: float) -> None:
        self._polled = now
        for part in self._parts:
            part.poll()


def power_text(rates: Mapping[str, Any]) -> str:
    """Watts, EPS per watt and their sources in words, from the values that a run leaves in its summary."""
    watts, idle, per_watt = (number(rates, key) for key in ("watts", "idle_watts", "eps_per_watt"))
    text = f"{watts:,.1f} W, {per_watt:,.2f} EPS/W"
    if idle:
        text += f"; with idle devices {watts + idle:,.1f} W, {number(rates, 'eps_per_machine_watt'):,.2f} EPS/W"
    sources = rates.get("power_sources")
    if isinstance(sources, dict) and sources:
        text += f" ({', '.join(f'{device}: {source}' for device, source in sources.items())})"
    return text
