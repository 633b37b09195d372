"""The SYCL runtime of this process: where its libraries are, whether they fit together, and how they are set up.

Its parts are wheels (the extra `sycl`), or what conda or an installed oneAPI brings. Nothing is loaded before
`sycl_runtime` is called; what is wrong is a reason and the command that mends it, never a crash.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import logging
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
from pearl.cache_folder import cache_folder, check_private, make_private
from pearl.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Mapping

log = logging.getLogger(__name__)

# Wheel -> the releases that work together. dpctl's own bounds are wider: 2026 has another library and no FPGA.
WHEELS: Mapping[str, str] = MappingProxyType(
    {
        "dpctl": "0.21",
        "intel-sycl-rt": "2025.3",
        "intel-cmplr-lib-rt": "2025.3",
        "intel-cmplr-lib-ur": "2025.3",
        "intel-opencl-rt": "2025.3",
    }
)
# A library of each wheel that may come without one, from conda or an installed oneAPI.
_LIBRARIES: Mapping[str, str] = MappingProxyType(
    {
        "intel-sycl-rt": "libsycl.so.8",
        "intel-cmplr-lib-rt": "libintlc.so.5",
        "intel-cmplr-lib-ur": "libur_loader.so.0",
        "intel-opencl-rt": "libintelocl.so",
    }
)
_MODULE = "pearl._sycl"
_DISTRIBUTION = "pearl-toolkit"


@dataclass(frozen=True)
class SyclRuntime:
    """What is loaded: the modules dpctl and pearl._sycl, and the version of the runtime, for fingerprints.

    `dpctl_was_first` says that somebody imported dpctl, and may have asked it for devices, before the set-up.
    """

    dpctl: Any
    module: Any
    version: str
    dpctl_was_first: bool


def _pip(*arguments: str) -> str:
    return shlex.join([sys.executable or "python3", "-m", "pip", "install", *arguments])


def wheels_command() -> str:
    """The command that installs the runtime's wheels, in versions that fit together, into this environment."""
    return _pip(*(f"{name}=={release}.*" for name, release in WHEELS.items()))


def rebuild_command() -> str:
    """The command that builds PEARL again as it was installed here, which adds its SYCL module beside the wheels."""
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
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _library_folders() -> list[Path]:
    """Where the libraries may be: where the wheels put them, then the environment, then an installed oneAPI."""
    folders: list[Path] = []
    for name, library in _LIBRARIES.items():
        try:
            files = importlib.metadata.files(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        folders += [Path(file.locate()).parent for file in files if file.name == library]
    folders.append(Path(sys.prefix) / "lib")
    if compiler := os.environ.get("CMPLR_ROOT"):
        folders.append(Path(compiler) / "lib")
    # Normalised: the runtime's compiler finds its own files by the path that it was loaded from.
    return list(dict.fromkeys(Path(os.path.normpath(folder)) for folder in folders))


def find_library(name: str) -> Path | None:
    """The runtime's library called `name`, such as `libintelocl.so`."""
    return next((folder / name for folder in _library_folders() if (folder / name).is_file()), None)


def _fits(version: str, release: str) -> bool:
    return version == release or version.startswith(f"{release}.")


def runtime_problem() -> str:
    """Why SYCL cannot be used in this environment and what to do about it; "" if nothing speaks against it.

    Reads what is installed and loads none of it.
    """
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64"):
        return f"Intel's SYCL runtime is for Linux on x86-64; this is {sys.platform} on {platform.machine()}"
    found = installed_wheels()
    wrong = {name: version for name, version in found.items() if not _fits(version, WHEELS[name])}
    if wrong:
        listed = ", ".join(f"{name} {version} (needed: {WHEELS[name]}.*)" for name, version in wrong.items())
        return f"parts of the SYCL runtime do not fit together: {listed}. Mend it: {wheels_command()}"
    missing = [
        name
        for name in WHEELS
        if name not in found and not (name in _LIBRARIES and find_library(_LIBRARIES[name]) is not None)
    ]
    if "dpctl" in missing and importlib.util.find_spec("dpctl") is not None:
        missing.remove("dpctl")
    built = importlib.util.find_spec(_MODULE) is not None
    if missing:
        command = wheels_command() if built else f"{wheels_command()} && {rebuild_command()}"
        return f"the SYCL runtime is not installed ({', '.join(missing)} missing). Add it: {command}"
    absent = [name for name in ("libsycl.so.8", "libsycl-jit.so") if find_library(name) is None]
    if absent:
        return f"the SYCL runtime is installed without {' and '.join(absent)}. Mend it: {wheels_command()}"
    if not built:
        return f"PEARL was built before the SYCL runtime was there. Add its module: {rebuild_command()}"
    return ""


def sycl_runtime() -> SyclRuntime:
    """Load and set up the runtime, once in a process; DeviceError, with the command that mends it, if that fails.

    Environment variables that the user has set are added to, not replaced: OCL_ICD_FILENAMES gets PEARL's drivers at
    its end, SYCL_CACHE_DIR a folder of its own. Must come before the first device is asked for, be it through dpctl.
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
        # By their normalised paths, and before dpctl loads them by another one. Not RTLD_GLOBAL: they bring Intel's
        # libm, and arithmetic elsewhere in the process would come out otherwise.
        for name in ("libsycl.so.8", "libsycl-jit.so"):
            ctypes.CDLL(str(find_library(name)))
        with warnings.catch_warnings():
            # Taking a queue from dpctl loads its array module, of which PEARL uses nothing.
            warnings.filterwarnings("ignore", r"dpctl\.tensor", DeprecationWarning)
            dpctl = importlib.import_module("dpctl")
            importlib.import_module("dpctl.tensor")
            module = importlib.import_module(_MODULE)
    except (ImportError, OSError, AttributeError) as error:
        raise DeviceError(
            f"SYCL cannot be used: the runtime does not load ({error}). "
            f"Mend it: {wheels_command()} && {rebuild_command()}"
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
    """Have what is compiled kept on disk, in a folder that other versions and other sources do not see."""
    os.environ.setdefault("SYCL_CACHE_PERSISTENT", "1")
    key = hashlib.sha256(f"{version}/{sources}".encode()).hexdigest()[:16]
    own = os.environ.get("SYCL_CACHE_DIR")
    setting = "SYCL_CACHE_DIR" if own else "PEARL_CACHE_DIR"
    folder = Path(own or cache_folder() / "sycl")
    if folder.name != key:  # else a process of this one's
        folder = folder / key
    try:
        make_private(folder)
    except OSError as error:
        log.warning(
            "Kernels are compiled anew in every process: %s cannot be made (%s). Set PEARL_CACHE_DIR to a writable "
            "folder.",
            folder,
            error.strerror or error,
        )
        os.environ["SYCL_CACHE_PERSISTENT"] = "0"
        return
    check_private(folder, setting)
    os.environ["SYCL_CACHE_DIR"] = str(folder)
