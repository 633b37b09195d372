"""CUDA devices through torch: their properties, and the cost of copies to, from and within them.

No function imports torch before it is called, and none raises for an absent device.
"""

from __future__ import annotations

import csv
import functools
import importlib.metadata
import importlib.util
import re
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pearl.devices.description import Availability, Connection, Device
from pearl.errors import ConfigurationError

EMULATOR = "cuda:emulator"
"""The selector of the emulator, which runs CUDA's kernels on the host: functional only."""

_GB = 1e9
_COPY_BYTES = 64 << 20
_SMALL_BYTES = 64
_QUERY = ("uuid", "driver_version", "power.limit", "clocks.max.sm")


@dataclass(frozen=True)
class SmiFacts:
    """Facts that `nvidia-smi` knows but torch does not; the SM clock is in MHz."""

    uuid: str
    driver: str
    power_limit_watts: float | None
    clock_mhz: float | None


def cuda_index(selector: str) -> int:
    """The CUDA device index that a selector names: `cuda:1`, `1`, or nothing for 0."""
    match = re.fullmatch(r"(?:cuda:)?([0-9]{1,3})", selector)
    if match:
        return int(match[1])
    if selector in ("", "cuda"):
        return 0
    raise ConfigurationError(f"A cuda selector must be an index such as 'cuda:0', or 'emulator'; found {selector!r}.")


def cuda_name(selector: str) -> str:
    """The device that a selector names: `cuda:0`, or the emulator."""
    return EMULATOR if selector in ("emulator", EMULATOR) else f"cuda:{cuda_index(selector)}"


@functools.cache
def _built_without_cuda() -> bool:
    """Whether the installed torch says so in its `version.py`, which is read, not run."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return False
    try:
        text = (Path(found.origin).parent / "version.py").read_text(encoding="utf-8")
    except OSError:
        return False  # importing torch will say what is wrong with it
    return re.search(r"^cuda\b[^=\n]*=\s*None\s*$", text, re.MULTILINE) is not None


def _torch() -> tuple[Any, str]:
    """Torch and "", or None and why CUDA cannot be used: without an import of torch if it was built without CUDA."""
    without = "torch {} was built without CUDA"
    if "torch" not in sys.modules and _built_without_cuda():
        return None, without.format(importlib.metadata.version("torch"))
    try:
        import torch
    except ImportError as error:
        return None, f"torch cannot be imported ({error})"
    try:
        if not torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
            return None, without.format(torch.__version__)
        if not torch.cuda.is_available():
            return None, "torch finds no CUDA device (no GPU, or its driver is missing or too old)"
    except RuntimeError as error:
        return None, f"CUDA cannot be started: {error}"
    return torch, ""


def cuda_availability(index: int) -> Availability:
    """Whether torch sees CUDA device `index`."""
    torch, reason = _torch()
    if torch is None:
        return Availability(False, reason)
    count = torch.cuda.device_count()
    if index >= count:
        return Availability(False, f"CUDA device {index} does not exist: torch sees {count}, numbered from 0")
    return Availability(True)


@functools.cache
def cuda_identity(index: int) -> str:
    """Facts that measurements on CUDA device `index` depend on; "absent: ..." if there is no such device."""
    torch, reason = _torch()
    if torch is None or index >= torch.cuda.device_count():
        return f"absent: {reason}"
    properties = torch.cuda.get_device_properties(index)
    facts = _facts_of(properties, index, query_smi())
    driver = facts.driver if facts else ""
    return (
        f"{properties.name}|{properties.major}.{properties.minor}|{properties.multi_processor_count}|"
        f"{properties.total_memory}|{torch.version.cuda}|{driver}"
    )


def cuda_uuid(index: int) -> str | None:
    """The UUID of CUDA device `index`, as NVML writes it ("GPU-..."); None if torch sees no such device."""
    torch, _ = _torch()
    if torch is None or index >= torch.cuda.device_count():
        return None
    uuid = str(getattr(torch.cuda.get_device_properties(index), "uuid", ""))
    return None if not uuid else uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None  # "[N/A]": not known for this board


def query_smi(timeout_s: float = 10.0) -> list[SmiFacts]:
    """One entry per GPU in `nvidia-smi` order; empty where the tool is absent, fails or takes too long."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return []
    try:
        answer = subprocess.run(
            [command, f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    rows = csv.reader(answer.stdout.splitlines(), skipinitialspace=True)
    return [SmiFacts(row[0], row[1], _number(row[2]), _number(row[3])) for row in rows if len(row) == len(_QUERY)]


def _facts_of(properties: Any, index: int, facts: list[SmiFacts]) -> SmiFacts | None:
    """Match by UUID: with CUDA_VISIBLE_DEVICES, torch may number the devices differently from the tool."""
    uuid = str(getattr(properties, "uuid", ""))
    for fact in facts:
        if uuid and fact.uuid.removeprefix("GPU-") == uuid.removeprefix("GPU-"):
            return fact
    return facts[index] if not uuid and index < len(facts) else None


def _copy_gbps(torch: Any, target: Any, source: Any, index: int, repeats: int = 10) -> float:
    """Gigabytes per second of the median copy of `source` into `target`, by CUDA events on device `index`."""
    with torch.cuda.device(index):
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        times = []
        for _ in range(repeats):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            target.copy_(source, non_blocking=True)
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
    return float(source.numel() * source.element_size() / statistics.median(times) / _GB)


def _copy_latency_us(torch: Any, target: Any, source: Any, index: int, repeats: int = 200) -> float:
    """Microseconds from the call to the end of a small copy.

    On the host's clock: events would leave out the launch, which is part of the latency of a message.
    """
    with torch.cuda.device(index):
        times = []
        for _ in range(repeats):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
            times.append((time.perf_counter() - begin) * 1e6)
    return statistics.median(times[repeats // 10 :])


def describe_cuda(index: int, name: str, facts: list[SmiFacts], *, measure: bool) -> Device:
    """The device CSV row of CUDA device `index`; `cores` counts its multiprocessors."""
    torch, reason = _torch()
    if torch is None:
        raise RuntimeError(reason)
    properties = torch.cuda.get_device_properties(index)
    fact = _facts_of(properties, index, facts)
    clock_khz = getattr(properties, "clock_rate", 0)
    clock = fact.clock_mhz if fact and fact.clock_mhz else clock_khz / 1e3 if clock_khz else None
    bandwidth = None
    if measure:
        device = torch.device("cuda", index)
        source = torch.ones(4 * _COPY_BYTES, dtype=torch.uint8, device=device)
        # Reads and writes both count, as in the vendors' figures.
        bandwidth = round(2 * _copy_gbps(torch, torch.empty_like(source), source, index), 2)
    return Device(
        name=name,
        kind="gpu",
        backend="cuda",
        selector=f"cuda:{index}",
        cores=int(properties.multi_processor_count),
        clock_mhz=round(clock, 1) if clock else None,
        memory_gb=round(properties.total_memory / _GB, 2),
        memory_bandwidth_gbps=bandwidth,
        active_watts=fact.power_limit_watts if fact else None,
    )


def measure_host_links(index: int, host: str, name: str) -> list[Connection]:
    """Host to device and device to host, from and to pinned memory."""
    torch, reason = _torch()
    if torch is None:
        raise RuntimeError(reason)
    device = torch.device("cuda", index)
    pinned = torch.ones(_COPY_BYTES, dtype=torch.uint8).pin_memory()
    remote = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=device)
    small = slice(0, _SMALL_BYTES)
    links = []
    for source, target, into, out_of in ((host, name, remote, pinned), (name, host, pinned, remote)):
        latency = _copy_latency_us(torch, into[small], out_of[small], index)
        bandwidth = _copy_gbps(torch, into, out_of, index)
        links.append(Connection(source, target, round(latency, 3), round(bandwidth, 3)))
    return links


def measure_peer_link(first: int, second: int, source: str, target: str) -> Connection | None:
    """The link between two CUDA devices with peer access; None if copies go through the host."""
    torch, _ = _torch()
    if torch is None or not torch.cuda.can_device_access_peer(first, second):
        return None
    ours = torch.ones(_COPY_BYTES, dtype=torch.uint8, device=torch.device("cuda", first))
    theirs = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=torch.device("cuda", second))
    small = slice(0, _SMALL_BYTES)
    latency = _copy_latency_us(torch, theirs[small], ours[small], first)
    return Connection(source, target, round(latency, 3), round(_copy_gbps(torch, theirs, ours, first), 3))
