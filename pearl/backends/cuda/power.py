"""The energy of an NVIDIA GPU, by NVML, the library of its driver.

NVML reports the whole board: the GPU, its memory and its links.
"""

from __future__ import annotations

import ctypes
import functools
import math
import time
from typing import Any

from pearl.devices.power import PowerMeter
from pearl.errors import DeviceError

_LIBRARY = "libnvidia-ml.so.1"
_NOT_SUPPORTED = 3
_NO_PERMISSION = 4


class NvmlMeter:
    """Joules of the GPU with the NVML handle `handle`, since the meter was made.

    A GPU without an energy counter (before Volta) has its power read at each call instead, and the mean of two readings
    counts for the time between them: call `joules` often.
    """

    most_seconds = math.inf

    def __init__(self, library: Any, handle: Any, uuid: str) -> None:
        self._library, self._handle, self.counter = library, handle, f"NVML {uuid}"
        try:
            self._first = self._millijoules()
            self._counts = True
        except _NotSupportedError:
            self._counts = False
            self._joules, self._watts, self._at = 0.0, self._power(), time.monotonic()

    @property
    def source(self) -> str:
        """How the energy is known."""
        return "NVML" if self._counts else "NVML, power readings"

    def joules(self) -> float:
        """Joules since the meter was made."""
        if self._counts:
            return (self._millijoules() - self._first) / 1e3
        watts, now = self._power(), time.monotonic()
        self._joules += (watts + self._watts) / 2 * (now - self._at)
        self._watts, self._at = watts, now
        return self._joules

    def _millijoules(self) -> int:
        energy = ctypes.c_ulonglong()
        _call(self._library, "nvmlDeviceGetTotalEnergyConsumption", self._handle, ctypes.byref(energy))
        return energy.value

    def _power(self) -> float:
        milliwatts = ctypes.c_uint()
        _call(self._library, "nvmlDeviceGetPowerUsage", self._handle, ctypes.byref(milliwatts))
        return milliwatts.value / 1e3


def nvml_meter(uuid: str, library: Any = None) -> PowerMeter | None:
    """A meter of the GPU with the UUID `uuid` ("GPU-..."); None where NVML is absent, or does not know its energy.

    `library` replaces NVML in tests. Raises DeviceError if NVML refuses to tell.
    """
    library = _nvml() if library is None else library
    if library is None:
        return None
    handle = ctypes.c_void_p()
    try:
        _call(library, "nvmlInit_v2")
        _call(library, "nvmlDeviceGetHandleByUUID", uuid.encode(), ctypes.byref(handle))
        return NvmlMeter(library, handle, uuid)
    except _NotSupportedError:
        return None


@functools.cache
def _nvml() -> Any:
    try:
        return ctypes.CDLL(_LIBRARY)
    except OSError:
        return None


class _NotSupportedError(Exception):
    """The GPU does not have what was asked for."""


def _call(library: Any, name: str, *arguments: Any) -> None:
    try:
        code = getattr(library, name)(*arguments)
    except AttributeError as error:  # a driver older than the function
        raise _NotSupportedError(name) from error
    if code == _NOT_SUPPORTED:
        raise _NotSupportedError(name)
    if code:
        advice = " Its administrator must allow it for this user or container." if code == _NO_PERMISSION else ""
        raise DeviceError(f"NVML, which measures the power of NVIDIA GPUs, failed: {name} returned {code}.{advice}")
