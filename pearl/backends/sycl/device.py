"""SYCL devices: Intel's CPU device, Intel GPUs, FPGA boards, and the FPGA emulator.

Nothing is loaded before one of these functions is called. Selectors are those of the device CSV; see
`pearl.backends.sycl.selector.sycl_filter`.
"""

from __future__ import annotations

import functools
import os
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pearl.backends.fpga.emulator import SETUP_COMMAND, emulator_kernels, emulator_library
from pearl.backends.sycl.runtime import find_library, runtime_problem, sycl_runtime, wheels_command
from pearl.backends.sycl.selector import EMULATOR_SELECTOR, sycl_filter
from pearl.devices.description import Availability, Connection, Device, DeviceKind
from pearl.errors import DeviceError

if TYPE_CHECKING:
    from pearl import _sycl

EMULATOR = "FPGA emulator (functional only)"

_GB = 1e9
_SMALL_BYTES = 64
_COPY_BYTES = 64 << 20
_MEMORY_BYTES = 256 << 20
_KINDS: dict[str, DeviceKind] = {"cpu": "cpu", "gpu": "gpu", "accelerator": "fpga"}
_OPENCL_VENDORS = Path("/etc/OpenCL/vendors")
_RENDER_NODES = Path("/sys/class/drm")
_INTEL = "0x8086"  # the PCI vendor


@dataclass(frozen=True)
class SyclDevice:
    """Facts about one device; `selector` is dpctl's filter string, memory is in bytes, the clock in MHz."""

    selector: str
    kind: DeviceKind
    name: str
    driver: str
    cores: int
    clock_mhz: float | None
    memory_bytes: int
    emulated: bool
    has_usm: bool

    @property
    def described(self) -> str:
        """The name; for the emulator, a description."""
        return EMULATOR if self.emulated else self.name


def sycl_devices() -> tuple[SyclDevice, ...]:
    """The devices that the runtime finds; DeviceError, with the command that installs it, if there is no runtime.

    An Intel GPU is listed once, under Level Zero if possible.
    """
    found = [facts for device in sycl_runtime().dpctl.get_devices() if (facts := _facts(device)) is not None]
    level_zero = any(device.selector.startswith("level_zero:gpu") for device in found)
    return tuple(d for d in found if not (level_zero and d.selector.startswith("opencl:gpu")))


def accelerators_possible() -> bool:
    """Whether there may be a SYCL device other than the CPU; loads nothing, since loading the runtime takes 0.3 s.

    An Intel GPU has a render node, an FPGA board an installed OpenCL driver.
    """
    if any(os.environ.get(name) for name in ("OCL_ICD_FILENAMES", "OCL_ICD_VENDORS")):
        return True
    if any(_OPENCL_VENDORS.glob("*.icd")):
        return True
    vendors = _RENDER_NODES.glob("renderD*/device/vendor")
    return any(vendor.read_text(encoding="ascii").strip() == _INTEL for vendor in vendors)


def devices_on_the_cpu() -> list[str]:
    """The names of the SYCL devices that are the CPU itself; loads nothing."""
    if runtime_problem():
        return []
    drivers = {"sycl:cpu0": find_library("libintelocl.so"), "fpga_emu0": emulator_library()}
    return [name for name, driver in drivers.items() if driver is not None]


def _facts(device: Any) -> SyclDevice | None:
    kind = device.device_type.name
    if kind not in _KINDS:
        return None
    return SyclDevice(
        selector=str(device.filter_string),
        kind=_KINDS[kind],
        name=str(device.name).strip(),
        driver=str(device.driver_version),
        cores=int(device.max_compute_units),
        clock_mhz=float(device.max_clock_frequency) or None,
        memory_bytes=int(device.global_mem_size),
        emulated=kind == "accelerator" and "emulation" in str(device.name).lower(),
        has_usm=bool(device.has_aspect_usm_device_allocations),
    )


def find_sycl_device(selector: str) -> SyclDevice:
    """The device that `selector` names; DeviceError lists the devices found, or says what to install."""
    wanted = sycl_filter(selector)
    found = sycl_devices()
    device = next((d for d in found if (d.emulated if wanted == EMULATOR_SELECTOR else d.selector == wanted)), None)
    if device is None:
        advice = _advice(wanted)
        if only := os.environ.get("ONEAPI_DEVICE_SELECTOR"):
            advice += f" ONEAPI_DEVICE_SELECTOR={only} hides all others: unset it, or name the device there."
        raise DeviceError(f"There is no SYCL device {selector!r} here; {_listed(found)}. {advice.strip()}".rstrip())
    if not device.has_usm:
        raise DeviceError(
            f"The SYCL device {selector!r} ({device.name}) cannot be used: it has no memory that kernels share with "
            "PEARL (it lacks usm_device_allocations). Choose another device."
        )
    return device


def _listed(found: tuple[SyclDevice, ...]) -> str:
    if not found:
        return "the runtime finds none"
    return "there are " + ", ".join(f"{device.selector} ({device.described})" for device in found)


def _advice(wanted: str) -> str:
    """What to do if the device `wanted` is not found."""
    cpu = wanted.startswith("opencl:cpu")
    if cpu and find_library("libintelocl.so") is None:
        return f"Its driver is missing; add it: {wheels_command()}"
    emulator = wanted == EMULATOR_SELECTOR or wanted.startswith("opencl:accelerator")
    if emulator and emulator_library() is None:
        return f"The FPGA emulator is added by: {SETUP_COMMAND}"
    if (cpu or emulator) and sycl_runtime().dpctl_was_first:
        return (
            "dpctl was asked for devices before PEARL set the runtime up: call "
            "pearl.backends.sycl.device.sycl_devices() before the first use of dpctl."
        )
    if wanted.startswith("level_zero"):
        return "Intel GPUs need Intel's Level Zero driver (libze_loader.so.1) and access to /dev/dri."
    return ""


def sycl_availability(selector: str) -> Availability:
    """Whether the device can be used in this process, and if not, how to add it; loads the runtime."""
    try:
        find_sycl_device(selector)
    except DeviceError as error:
        return Availability(False, str(error).removeprefix("SYCL cannot be used: "))
    return Availability(True)


def sycl_queue(selector: str) -> _sycl.Queue:
    """The in-order queue of a device, a single one in each process; DeviceError if the device is not there."""
    device = find_sycl_device(selector)
    return _queue(device.selector, device.emulated)


@functools.cache
def _queue(selector: str, emulated: bool) -> _sycl.Queue:
    runtime = sycl_runtime()
    try:
        queue = runtime.dpctl.SyclQueue(selector, property="in_order")
    except runtime.dpctl.SyclQueueCreationError as error:
        raise DeviceError(
            f"The SYCL device {selector!r} is listed but cannot be used ({error}); {_listed(sycl_devices())}."
        ) from error
    made: _sycl.Queue = runtime.module.Queue(queue, emulator_kernels() if emulated else 0)
    return made


def sycl_identity(selector: str) -> str:
    """Facts that measurements on a device depend on; "absent: ..." if there is no such device."""
    try:
        device = find_sycl_device(selector)
    except DeviceError as error:
        return f"absent: {error}"
    facts = (device.name, device.driver, device.cores, device.memory_bytes, sycl_runtime().version)
    return "|".join(map(str, facts))


def describe_sycl(selector: str, name: str, *, measure: bool) -> Device:
    """The device CSV row of a device; `cores` counts its compute units. DeviceError if it is not there."""
    device = find_sycl_device(selector)
    bandwidth = None
    if measure and not device.emulated:
        nbytes = min(_MEMORY_BYTES, device.memory_bytes // 16)  # beyond the caches
        # Reads and writes both count, as for the other kinds.
        bandwidth = round(2 * _gbps(nbytes, sycl_queue(selector).memory_times_us(nbytes, 5)), 2)
    return Device(
        name=name,
        kind=device.kind,
        backend="sycl",
        selector=EMULATOR_SELECTOR if device.emulated else device.selector,
        cores=device.cores,
        clock_mhz=device.clock_mhz,
        memory_gb=round(device.memory_bytes / _GB, 2),
        memory_bandwidth_gbps=bandwidth,
    )


def _gbps(nbytes: int, times_us: list[float]) -> float:
    return nbytes / (statistics.median(times_us) * 1e-6) / _GB


def measure_host_links(selector: str, host: str, name: str) -> list[Connection]:
    """Host to device and back: latency of a small copy, bandwidth of a large one, each timed to its end."""
    queue = sycl_queue(selector)
    links = []
    for source, target, to_device in ((host, name, True), (name, host, False)):
        latency = statistics.median(queue.copy_times_us(_SMALL_BYTES, to_device, 200))
        bandwidth = _gbps(_COPY_BYTES, queue.copy_times_us(_COPY_BYTES, to_device, 10))
        links.append(Connection(source, target, round(latency, 3), round(bandwidth, 3)))
    return links
