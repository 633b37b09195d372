"""The CPU's energy, by the RAPL counters of Intel and AMD in `/sys/class/powercap`.

Counted are all packages, and the memory (zone "dram") where the CPU has a counter for it. The zone "psys" is left out:
it includes the packages. So are "core" and "uncore", which are parts of a package.
"""

from __future__ import annotations

from pathlib import Path

from pearl.backends.cpu.perf_power import perf_meter
from pearl.control_groups import SYS
from pearl.devices.power import PowerMeter, WrappingCounter
from pearl.errors import DeviceError

_GRANT = "sudo chmod a+r /sys/class/powercap/intel-rapl:*/energy_uj"
_SAFE_WATTS = 1000.0  # of one zone: no package draws more


class RaplMeter:
    """Joules of all packages and of the memory, since the meter was made.

    Raises DeviceError if a counter cannot be read.
    """

    source = counter = "RAPL"

    def __init__(self, zones: list[Path]) -> None:
        self._zones = [(zone, WrappingCounter(_counted(zone), _largest(zone) + 1)) for zone in zones]
        self.most_seconds = min(_largest(zone) for zone in zones) / 1e6 / _SAFE_WATTS

    def joules(self) -> float:
        """Joules since the meter was made."""
        for zone, counter in self._zones:
            counter.update(_counted(zone))
        return sum(counter.total for _, counter in self._zones) / 1e6


def rapl_meter(sys: Path = SYS) -> PowerMeter | None:
    """A meter of this machine's CPU; None if it has no RAPL counters.

    Raises DeviceError if there are counters that this user may not read; it says how to get the right.
    """
    zones = [zone for zone in sorted((sys / "class/powercap").glob("intel-rapl:*")) if _counts(zone)]
    return RaplMeter(zones) if zones else None


def cpu_meter(sys: Path = SYS) -> PowerMeter | None:
    """A meter of this machine's CPU: RAPL by its files, else by perf's events; None if there is neither.

    Raises DeviceError if this user may use neither, with both ways to get the right.
    """
    try:
        meter = rapl_meter(sys)
    except DeviceError as refused:
        try:
            meter = perf_meter(sys)
        except DeviceError as also_refused:
            raise DeviceError(f"{refused}. Or: {also_refused}") from also_refused
        if meter is None:
            raise
        return meter
    return perf_meter(sys) if meter is None else meter


def _counts(zone: Path) -> bool:
    """Whether the zone is a package or memory."""
    name = _text(zone / "name")
    return (zone.name.count(":") == 1 and name.startswith("package")) or name == "dram"


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _counted(zone: Path) -> int:
    return _microjoules(zone / "energy_uj")


def _largest(zone: Path) -> int:
    return _microjoules(zone / "max_energy_range_uj")


def _microjoules(file: Path) -> int:
    try:
        text = file.read_text(encoding="utf-8", errors="replace").strip()
    except PermissionError as error:
        raise DeviceError(
            f"The CPU's energy counter {file} may be read by root only. To measure power, allow it until the next "
            f"reboot: {_GRANT}"
        ) from error
    except OSError as error:
        raise DeviceError(f"The CPU's energy counter {file} cannot be read: {error.strerror or error}.") from error
    if not text.isdigit():
        raise DeviceError(f"The CPU's energy counter {file} must hold whole microjoules; found {text[:40]!r}.")
    return int(text)
