"""The SYCL runtime of this process: finds its libraries, checks that they fit together, and sets them up.

Its parts come from wheels (the extra `sycl`), from conda, or from an installed oneAPI. Nothing is loaded before
`sycl_runtime` is called. A problem is reported as a reason with the command that fixes it, never as a crash.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import shlex
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlparse

from pearl.backends.fpga.emulator import check_emulator, emulator_library
from pearl.backends.installed_files import installed_files
from pearl.cache_folder import cache_folder, keeps_kernels
from pearl.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Mapping

# Wheel -> the releases that work together. dpctl also allows 2026, which has another library and no FPGA.
WHEELS: Mapping[str, str] = MappingProxyType(
    {
        "dpctl": "0.21",
        "intel-sycl-rt": "2025.3",
        "intel-cmplr-lib-rt": "2025.3",
        "intel-cmplr-lib-ur": "2025.3",
        "intel-opencl-rt": "2025.3",
    }
)
# A library of each wheel whose files may instead come from conda or an installed oneAPI.
_LIBRARIES: Mapping[str, str] = MappingProxyType(
    {
        "intel-sycl-rt": "libsycl.so.8",
        "intel-cmplr-lib-rt": "libintlc.so.5",
        "intel-cmplr-lib-ur": "libur_loader.so.0",
        "intel-opencl-rt": "libintelocl.so",
    }
)
_MODULE = "pearl._sycl"
_CPU_INFO = Path("/proc/cpuinfo")
_DISTRIBUTION = "pearl-toolkit"


@dataclass(frozen=True)
class SyclRuntime:
    """The loaded modules dpctl and pearl._sycl, and the version of the runtime, for fingerprints.

    `dpctl_was_first` says that dpctl was imported, and may have listed devices, before the set-up.
    """

    dpctl: Any
    module: Any
    version: str
    dpctl_was_first: bool


def _pip(*arguments: str) -> str:
    return shlex.join([sys.executable or "python3", "-m", "pip", "install", *arguments])


def wheels_command() -> str:
    """The command that installs the runtime's wheels, in matching versions, into this environment."""
    return _pip(*(f"{name}=={release}.*" for name, release in WHEELS.items()))


def rebuild_command() -> str:
    """The command that reinstalls PEARL in the same way, which builds its SYCL module where the wheels are present."""
    try:
        origin = importlib.metadata.distribution(_DISTRIBUTION).read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        return _pip("--no-deps", "--force-reinstall", str(Path(__file__).parents[2]))
    facts = json.loads(origin) if origin else {}
    url = urlparse(str(facts.get("url", "")))
    if url.scheme == "file":
        editable = ["--editable"] if facts.get("dir_info", {}).get("editable") else []
        return _pip("--no-deps", "--force-reinstall", *editable, unquote(url.path))
    return _pip("--no-deps", "--force-reinstall", "--no-cache-dir", "--no-binary", _DISTRIBUTION, _DISTRIBUTION)


def installed_wheels() -> dict[str, str]:
    """Version of each of WHEELS that is installed as a Python distribution."""
    found = {}
    for name in WHEELS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _library_folders() -> list[Path]:
    """Folders of the libraries: first those of the wheels, then the environment, then an installed oneAPI."""
    folders: list[Path] = []
    for name, library in _LIBRARIES.items():
        folders += [file.parent for file in installed_files(name, library.__eq__)]
    folders.append(Path(sys.prefix) / "lib")
    if compiler := os.environ.get("CMPLR_ROOT"):
        folders.append(Path(compiler) / "lib")
    # Normalised, since the runtime's compiler finds its files by the path from which it was loaded.
    return list(dict.fromkeys(Path(os.path.normpath(folder)) for folder in folders))


def find_library(name: str) -> Path | None:
    """The runtime's library called `name`, such as `libintelocl.so`."""
    return next((folder / name for folder in _library_folders() if (folder / name).is_file()), None)


def runtime_problem() -> str:
    """Why SYCL cannot be used in this environment, and how to fix it; "" if no problem is found.

    Loads nothing.
    """
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64"):
        return f"Intel's SYCL runtime is for Linux on x86-64; this is {sys.platform} on {platform.machine()}"
    if not _CPU_INFO.is_file():
        return f"Intel's SYCL runtime hangs where there is no {_CPU_INFO}, as in some sandboxes. Mount /proc"
    found = installed_wheels()
    wrong = {name: version for name, version in found.items() if not f"{version}.".startswith(f"{WHEELS[name]}.")}
    if wrong:
        listed = ", ".join(f"{name} {version} (needed: {WHEELS[name]}.*)" for name, version in wrong.items())
        return f"parts of the SYCL runtime do not fit together: {listed}. Fix it: {wheels_command()}"
    missing = [
        name
        for name in WHEELS
        if name not in found
        and (find_library(_LIBRARIES[name]) if name in _LIBRARIES else importlib.util.find_spec(name)) is None
    ]
    built = importlib.util.find_spec(_MODULE) is not None
    if missing:
        command = wheels_command() if built else f"{wheels_command()} && {rebuild_command()}"
        return f"the SYCL runtime is not installed ({', '.join(missing)} missing). Add it: {command}"
    absent = [name for name in ("libsycl.so.8", "libsycl-jit.so") if find_library(name) is None]
    if absent:
        return f"the SYCL runtime is installed without {' and '.join(absent)}. Fix it: {wheels_command()}"
    if not built:
        return f"PEARL was built before the SYCL runtime was there. Add its module: {rebuild_command()}"
    return ""


def sycl_runtime() -> SyclRuntime:
    """Load and set up the runtime, once in each process; DeviceError, with the command that fixes it, if that fails.

    Environment variables of the user are extended, not replaced: PEARL's drivers are appended to OCL_ICD_FILENAMES, and
    SYCL_CACHE_DIR gets a subfolder. Call this before any device is listed, also through dpctl.
    """
    problem = runtime_problem()
    if problem:
        raise DeviceError(f"SYCL cannot be used: {problem}")
    return _load()


@functools.cache
def _load() -> SyclRuntime:
    dpctl_was_first = "dpctl" in sys.modules
    _add_drivers()
    try:
        # By their normalised paths, and before dpctl loads them by other paths. Not RTLD_GLOBAL: with Intel's libm,
        # arithmetic elsewhere in the process would give other results.
        for name in ("libsycl.so.8", "libsycl-jit.so"):
            ctypes.CDLL(str(find_library(name)))
        with warnings.catch_warnings():
            # Taking a queue from dpctl loads its array module, which PEARL does not use.
            warnings.filterwarnings("ignore", r"dpctl\.tensor", DeprecationWarning)
            dpctl = importlib.import_module("dpctl")
            importlib.import_module("dpctl.tensor")
            module = importlib.import_module(_MODULE)
    except (ImportError, OSError, AttributeError) as error:
        raise DeviceError(
            f"SYCL cannot be used: the runtime does not load ({error}). "
            f"Fix it: {wheels_command()} && {rebuild_command()}"
        ) from error
    version = "/".join(f"{name} {number}" for name, number in installed_wheels().items())
    _set_cache(version, module.SOURCES_HASH)
    return SyclRuntime(dpctl, module, version, dpctl_was_first)


def _add_drivers() -> None:
    """Name the OpenCL drivers of the CPU and of the FPGA emulator to the loader."""
    listed = [name for name in os.environ.get("OCL_ICD_FILENAMES", "").split(os.pathsep) if name]
    present = {os.path.realpath(name) for name in listed}
    drivers = (find_library("libintelocl.so"), emulator_library())
    check_emulator()
    listed += [str(driver) for driver in drivers if driver and os.path.realpath(driver) not in present]
    if listed:
        os.environ["OCL_ICD_FILENAMES"] = os.pathsep.join(listed)


def _set_cache(version: str, sources: str) -> None:
    """Keep compiled kernels on disk, in a folder for this version and these sources."""
    os.environ.setdefault("SYCL_CACHE_PERSISTENT", "1")
    key = hashlib.sha256(f"{version}/{sources}".encode()).hexdigest()[:16]
    own = os.environ.get("SYCL_CACHE_DIR")
    setting = "SYCL_CACHE_DIR" if own else "PEARL_CACHE_DIR"
    folder = Path(own or cache_folder() / "sycl")
    if folder.name != key:  # a parent process may have set it already
        folder = folder / key
    if keeps_kernels(folder, setting):
        os.environ["SYCL_CACHE_DIR"] = str(folder)
    else:
        os.environ["SYCL_CACHE_PERSISTENT"] = "0"
