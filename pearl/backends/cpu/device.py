"""The CPU of this machine: usable cores, caches, instruction sets, memory and its measured bandwidth.

Everything is read from `/proc` and `/sys`. A fact that is absent there becomes 0, empty or None, never a guess.
"""

from __future__ import annotations

import logging
import os
import platform
import re
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pearl.backends.links import MEMORY_LATENCY_US
from pearl.control_groups import PROC, SYS, cpu_quota, group_memory
from pearl.devices.description import Device

log = logging.getLogger(__name__)

_GB = 1e9
_CACHE_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
# The flags of /proc/cpuinfo and the compilers' names for them.
_ISA_FLAGS = {
    "sse4_2": "sse4.2",
    "avx": "avx",
    "avx2": "avx2",
    "fma": "fma",
    "avx512f": "avx512f",
    "avx512bw": "avx512bw",
    "avx512dq": "avx512dq",
    "avx512vl": "avx512vl",
    "avx512_vnni": "avx512vnni",
    "asimd": "neon",
}
# A bandwidth buffer is far larger than most caches, but takes little of a small machine's memory. A core of a shared
# machine reports caches of hundreds of megabytes, of which it has a small part.
_LARGEST_BUFFER = 128 << 20
_LEAST_WANTED = 64 << 20
_UNKNOWN_CACHES = 128 << 20
_SMALLEST_BUFFER = 8 << 20
_LEAST_BUFFER = 64 << 10  # if almost no memory is free: a wrong result is better than a killed process


@dataclass(frozen=True)
class CpuInfo:
    """Facts about the CPU. Caches in bytes (0: unknown), `cpu_quota` in cores (None: no limit).

    Memory in bytes, as far as a container's limits allow (0: unknown).
    """

    model: str
    logical_cores: int
    physical_cores: int
    cpu_quota: float | None
    l1d_bytes: int
    l2_bytes: int
    l3_bytes: int
    isa: tuple[str, ...]
    clock_mhz: float | None
    numa_nodes: int
    memory_total: int
    memory_available: int
    package_watts: float | None

    def identity(self) -> str:
        """The facts that measurements depend on: without the free memory and the current clock."""
        caches = f"{self.l1d_bytes}/{self.l2_bytes}/{self.l3_bytes}"
        cores = f"{self.logical_cores}/{self.physical_cores}/{self.numa_nodes}"
        return f"{platform.machine()}|{self.model}|{cores}|{caches}|{' '.join(self.isa)}"


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _read_number(path: Path) -> float | None:
    text = _read(path)
    return float(text) if re.fullmatch(r"-?[0-9]+(\.[0-9]+)?", text) else None


def _cpuinfo_value(cpuinfo: str, *keys: str) -> str:
    for key in keys:
        match = re.search(rf"^{re.escape(key)}\s*:[ \t]*(.*)$", cpuinfo, re.MULTILINE)
        if match and match[1].strip():
            return match[1].strip()
    return ""


def _size(text: str) -> int:
    """Bytes of a cache size as Linux writes it: `48K`, `1024 KB`, `32M`."""
    match = re.fullmatch(r"([0-9]+)\s*([KMG]?)B?", text)
    return int(match[1]) * _CACHE_UNITS[match[2]] if match else 0


def _parse_cpu_list(text: str) -> set[int]:
    """CPU numbers of a list such as `0-3,8`."""
    cpus: set[int] = set()
    for low, high in re.findall(r"([0-9]+)(?:-([0-9]+))?", text):
        cpus.update(range(int(low), int(high or low) + 1))
    return cpus


def _caches(sys: Path, cpuinfo: str, cpu: int) -> tuple[int, int, int]:
    found: dict[str, int] = {}
    for index in sorted((sys / "devices/system/cpu" / f"cpu{cpu}" / "cache").glob("index*")):
        kind = _read(index / "type")
        if kind in ("Data", "Unified"):
            found.setdefault(_read(index / "level"), _size(_read(index / "size")))
    if not found:
        # /proc/cpuinfo has a single number, the size of one of the last two levels.
        found["2"] = _size(_cpuinfo_value(cpuinfo, "cache size").upper())
    return found.get("1", 0), found.get("2", 0), found.get("3", 0)


def _physical_cores(sys: Path, cpus: set[int]) -> int:
    cores = set()
    for cpu in cpus:
        topology = sys / "devices/system/cpu" / f"cpu{cpu}" / "topology"
        siblings = _read(topology / "core_cpus_list") or _read(topology / "thread_siblings_list")
        cores.add(min(_parse_cpu_list(siblings), default=cpu))
    return len(cores)


def _isa(cpuinfo: str) -> tuple[str, ...]:
    """The instruction sets that matter to PEARL's kernels, as Linux reports them, whatever libraries are installed."""
    flags = set(_cpuinfo_value(cpuinfo, "flags", "Features").split())
    return tuple(sorted(name for flag, name in _ISA_FLAGS.items() if flag in flags))


def _package_watts(sys: Path) -> float | None:
    """Power limit of all packages, if the RAPL energy counters can be read."""
    watts = 0.0
    for package in sorted((sys / "class/powercap").glob("intel-rapl:*")):
        if package.name.count(":") != 1 or not _read(package / "energy_uj"):
            continue
        limit = _read_number(package / "constraint_0_max_power_uw") or _read_number(
            package / "constraint_0_power_limit_uw"
        )
        watts += (limit or 0.0) / 1e6
    return round(watts, 1) or None


def describe_cpu(proc: Path = PROC, sys: Path = SYS, affinity: set[int] | None = None) -> CpuInfo:
    """Describe the part of the CPU that this process may use; `proc`, `sys` and `affinity` are for tests."""
    cpus = affinity or (
        set(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    )
    cpuinfo = _read(proc / "cpuinfo")
    meminfo = _read(proc / "meminfo")
    quota, group = cpu_quota(proc, sys), group_memory(proc, sys)
    logical = len(cpus) if quota is None else max(1, min(len(cpus), int(quota)))
    l1d, l2, l3 = _caches(sys, cpuinfo, min(cpus))
    max_khz = _read_number(sys / "devices/system/cpu" / f"cpu{min(cpus)}" / "cpufreq/cpuinfo_max_freq")
    shown_mhz = re.search(r"^cpu MHz\s*:\s*([0-9.]+)$", cpuinfo, re.MULTILINE)
    clock = max_khz / 1e3 if max_khz else float(shown_mhz[1]) if shown_mhz else None
    memory = {name: int(kb) << 10 for name, kb in re.findall(r"^(\w+):\s+([0-9]+) kB$", meminfo, re.MULTILINE)}
    total, available = memory.get("MemTotal", 0), memory.get("MemAvailable", memory.get("MemFree", 0))
    if group is not None:
        total, available = min(total or group.limit, group.limit), min(available or group.free, group.free)
    return CpuInfo(
        model=_cpuinfo_value(cpuinfo, "model name", "Hardware", "cpu model") or platform.machine() or "unknown",
        logical_cores=logical,
        physical_cores=min(logical, _physical_cores(sys, cpus)),
        cpu_quota=quota,
        l1d_bytes=l1d,
        l2_bytes=l2,
        l3_bytes=l3,
        isa=_isa(cpuinfo),
        clock_mhz=clock,
        numa_nodes=max(1, len(list((sys / "devices/system/node").glob("node[0-9]*")))),
        memory_total=total,
        memory_available=available,
        package_watts=_package_watts(sys),
    )


def _buffer_bytes(info: CpuInfo) -> int:
    """Bytes of each of the two buffers of a measurement; both together take at most a quarter of the free memory."""
    wanted = min(max(_LEAST_WANTED, 4 * info.l3_bytes) if info.l3_bytes else _UNKNOWN_CACHES, _LARGEST_BUFFER)
    if not info.memory_available:
        return wanted
    return max(
        _LEAST_BUFFER, min(wanted, max(_SMALLEST_BUFFER, info.memory_available // 8), info.memory_available // 4)
    )


def measure_memory_bandwidth(info: CpuInfo, repeats: int = 5) -> float:
    """Gigabytes per second that one thread reads plus writes when it copies a buffer larger than the caches.

    Returns the best of `repeats`, the least disturbed one.
    """
    nbytes = _buffer_bytes(info)
    try:
        from pearl import _native

        return float(_native.copy_bandwidth(nbytes, repeats))
    except ImportError:
        source, target = np.ones(nbytes // 8, np.uint64), np.empty(nbytes // 8, np.uint64)
        np.copyto(target, source)  # the first copy commits the pages
        best = float("inf")
        for _ in range(repeats):
            begin = time.perf_counter()
            np.copyto(target, source)
            best = min(best, time.perf_counter() - begin)
        return 2 * source.nbytes / best / _GB


def host_memory_latency_us(info: CpuInfo) -> float:
    """Microseconds of one dependent load from memory; without the native kernels a default, with a warning."""
    try:
        from pearl import _native
    except ImportError:
        log.warning("The native kernels are not built: the latency of the CPU's memory is taken as 0.1 us.")
        return MEMORY_LATENCY_US
    return round(float(_native.random_access_ns(_buffer_bytes(info), 200_000)) / 1e3, 4)


def cpu_device(info: CpuInfo, name: str = "cpu0", memory_bandwidth_gbps: float | None = None) -> Device:
    """The device CSV row of this machine's CPU."""
    return Device(
        name=name,
        kind="cpu",
        backend="cpu",
        selector="cpu",
        cores=info.logical_cores,
        clock_mhz=round(info.clock_mhz, 1) if info.clock_mhz else None,
        memory_gb=round(info.memory_total / _GB, 2) or None,
        memory_bandwidth_gbps=memory_bandwidth_gbps,
        active_watts=info.package_watts,
    )
