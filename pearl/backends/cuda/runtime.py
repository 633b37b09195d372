"""CUDA's libraries for PEARL's kernels: NVRTC, which compiles them, and the folder that keeps what it compiled.

The driver is found by its name. Nothing is loaded before a queue is opened.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pearl.backends.cuda.device import EMULATOR, cuda_index, cuda_name
from pearl.backends.installed_files import installed_files
from pearl.backends.on_device import OpenDevice
from pearl.cache_folder import cache_folder, keeps_kernels
from pearl.errors import DeviceError

if TYPE_CHECKING:
    from pearl import _cuda

logger = logging.getLogger("pearl.cuda")

_WHEELS = ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12")
_LIBRARY = re.compile(r"libnvrtc\.so\.(\d+)")
_TOOLKITS = ("CUDA_HOME", "CUDA_PATH")
_opening = threading.Lock()  # threads that open a device first share its queue


def open_cuda(device: str) -> OpenDevice:
    """The CUDA device of a selector, or the emulator; DeviceError if it cannot be used.

    Each process has one queue for each device.
    """
    with _opening:
        return OpenDevice(_queue(cuda_name(device)), _module())


@functools.cache
def _module() -> Any:
    return importlib.import_module("pearl._cuda")


@functools.cache
def _queue(device: str) -> _cuda.Queue | _cuda.EmulatedQueue:
    module = _module()
    if device == EMULATOR:
        emulated: _cuda.EmulatedQueue = module.EmulatedQueue()
        return emulated
    compiler = find_nvrtc()
    queue: _cuda.Queue = module.Queue(cuda_index(device), str(compiler or ""), _kept_kernels())
    if not queue.shares_memory:
        logger.warning(
            "%s cannot share managed memory with the host while kernels run: weights stay in the host's memory, and "
            "training is slow. Take implementation='torch' of the Learner there.",
            queue.name,
        )
    return queue


def find_nvrtc() -> Path | None:
    """The library of NVRTC; None if there is none.

    Of several, that of torch's CUDA release, else the newest whose code the driver can run, else the newest.
    """
    found: dict[int, Path] = {}
    for path in _candidates():
        match = _LIBRARY.fullmatch(path.name)
        if match and path.is_file():
            found.setdefault(int(match[1]), path)
    if not found:
        return None
    if (release := _torch_release()) in found:
        return found[release]
    usable = [release for release in found if release <= _driver_release()]
    return found[max(usable or found)]


def _candidates() -> Iterator[Path]:
    for name in _WHEELS:
        yield from installed_files(name, _LIBRARY.match)
    folders = [Path(sys.prefix) / "lib"]
    folders += [Path(home) / part for name in _TOOLKITS if (home := os.environ.get(name)) for part in ("lib64", "lib")]
    folders.append(Path("/usr/local/cuda/lib64"))
    for folder in folders:
        with contextlib.suppress(OSError):
            yield from sorted(folder.glob("libnvrtc.so.*"))


def _torch_release() -> int:
    """The major release of CUDA that torch is for; 0 if it is not loaded, or for none."""
    torch = sys.modules.get("torch")
    version = getattr(getattr(torch, "version", None), "cuda", None) or "0"
    return int(str(version).split(".")[0])


def _driver_release() -> int:
    """The major release of CUDA that the driver is for; 0 without a driver."""
    try:
        return int(_module().driver_release())
    except DeviceError:
        return 0


def _kept_kernels() -> str:
    """The folder of compiled kernels; "" if it cannot be made. DeviceError if others may write there."""
    folder = cache_folder() / "cuda"
    return str(folder) if keeps_kernels(folder) else ""
