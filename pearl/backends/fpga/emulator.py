"""Intel's FPGA emulator: SYCL's pipes and persistent kernels on a CPU. It tests programs, not their speed.

Its wheels conflict with those of the SYCL runtime, so the files needed from them are kept in a separate folder.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from pearl.atomic_file import write_text
from pearl.byte_size import readable_size
from pearl.cache_folder import cache_folder, check_private, make_private
from pearl.errors import DeviceError

VERSION = "2024.1.0"
SETUP_COMMAND = "pearl devices --setup-fpga-emulator"

_WHEELS = (f"intel-opencl-rt=={VERSION}", f"intel-cmplr-lib-rt=={VERSION}", "tbb==2021.13.1")
# SHA-256 of these wheels for Linux on x86-64 on PyPI: native code from any index must match them.
_HASHES = (
    "13589917a058318a7e222731bfdd0c6b4c716be101816686e580fe13ec0327c4",
    "f66bffebb3dcbf65e18cedad90bd35c2aa5ca265ce903b20ec15f8ba4f7b3ccc",
    "d916359dc685579d09e4b344241550afc1cc034f7f5ec7234c258b6680912d70",
)
# These files are used, 440 of 930 MB: the driver and its libraries, its compiler, and support of each kind of CPU.
_NEEDED = re.compile(
    r"[^/]+\.data/data/lib/(libintelocl_emu\.so\.[0-9.]+|libcommon_clang\.so\.[0-9.]+|libonnxruntime\.[0-9.]+\.so"
    r"|libtbb\.so\.12|lib(imf|svml|irng)\.so|libintlc\.so\.5"
    r"|clbltfn\w+\.rtl|cllibrary\w*\.(rtl|o)|__ocl_svml_\w+\.so)"
)
_LICENSE = re.compile(r"[^/]+\.dist-info/LICENSE[^/]*")
_NEEDED_BYTES = 800_000_000  # the wheels and the files extracted from them
_FETCH_TIMEOUT_S = 3600.0
_LOAD_TIMEOUT_S = 120.0
# Makes the driver the emulator; the wheel does not contain this file.
_CONFIGURATION = "cl.fpga_emu.cfg"
_BE_THE_EMULATOR = "CL_CONFIG_DEVICES = fpga-emu\n"
# Kernels that can run at the same time. The default of 31 is less than the stages of a Learner of two copies.
_DEFAULT_WORKERS, _FEWEST_WORKERS = 31, 160
_MORE_WORKERS = f"CL_CONFIG_CPU_TBB_NUM_WORKERS = {_FEWEST_WORKERS}\n"
_WORKERS = re.compile(r"^\s*CL_CONFIG_CPU_TBB_NUM_WORKERS\s*=\s*([0-9]*).*\n?", re.MULTILINE)


def emulator_folder() -> Path:
    """$PEARL_FPGA_EMULATOR, else `fpga-emulator-VERSION` in PEARL's cache folder; it may not exist."""
    if folder := os.environ.get("PEARL_FPGA_EMULATOR"):
        return Path(folder)
    return cache_folder() / f"fpga-emulator-{VERSION}"


def emulator_library() -> Path | None:
    """The emulator's OpenCL driver, or None where the emulator is not set up."""
    folder = emulator_folder() / "lib"
    drivers = sorted(folder.glob("libintelocl_emu.so.*"))
    return drivers[-1] if drivers and (folder / _CONFIGURATION).is_file() else None


def emulator_kernels() -> int:
    """How many kernels of a process run on the emulator at once, by its configuration; 0 if there is none."""
    try:
        found = _WORKERS.search((emulator_folder() / "lib" / _CONFIGURATION).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return 0
    return int(found[1] or 0) if found else _DEFAULT_WORKERS


def check_emulator() -> None:
    """Raise DeviceError if users other than this one and root may write to the emulator's folder."""
    if emulator_library() is not None:
        named = "PEARL_FPGA_EMULATOR"
        check_private(emulator_folder(), named if os.environ.get(named) else "PEARL_CACHE_DIR")


def setup_emulator(report: Callable[[str], None]) -> Path:
    """Fetch the emulator with pip into `emulator_folder()` unless it is there, and return that folder.

    The folder appears in one step: an interrupted set-up leaves no partial emulator. DeviceError says what failed, for
    example the network.
    """
    folder = emulator_folder()
    check_emulator()
    if emulator_library() is not None:
        _add_workers(folder / "lib" / _CONFIGURATION)
        report(f"The FPGA emulator is already in {folder}")
        return folder
    if folder.exists():
        raise DeviceError(
            f"{folder} exists and is not the FPGA emulator: lib/libintelocl_emu.so.* or lib/{_CONFIGURATION} is "
            "missing. Move it away, then try again."
        )
    try:
        make_private(folder.parent)
        free = shutil.disk_usage(folder.parent).free
        if free < _NEEDED_BYTES:
            raise DeviceError(
                f"The FPGA emulator needs {readable_size(_NEEDED_BYTES)} in {folder.parent} while it is set up; "
                f"{readable_size(free)} are free. Free some, or set PEARL_CACHE_DIR to a folder elsewhere."
            )
        with tempfile.TemporaryDirectory(prefix=f"{folder.name}.", dir=folder.parent) as scratch:
            wheels, made = Path(scratch) / "wheels", Path(scratch) / "emulator"
            report(f"Fetching the FPGA emulator (280 MB): {', '.join(_WHEELS)}")
            _fetch(wheels, Path(scratch) / "requirements.txt")
            report(f"Extracting the needed files (440 MB) into {folder}")
            _extract(sorted(wheels.glob("*.whl")), made)
            (made / "lib" / _CONFIGURATION).write_text(_BE_THE_EMULATOR + _MORE_WORKERS, encoding="ascii")
            _check_that_it_loads(made / "lib")
            try:
                made.rename(folder)
            except OSError:
                if not folder.is_dir():  # else another process was faster
                    raise
    except OSError as error:
        raise DeviceError(
            f"The FPGA emulator cannot be set up in {folder}: {error}. Set PEARL_CACHE_DIR to a writable folder."
        ) from error
    return folder


def _add_workers(configuration: Path) -> None:
    """Add the line to an emulator that was set up without it, by an older version or by the user."""
    try:
        said = configuration.read_text(encoding="utf-8")
        found = _WORKERS.search(said)
        if found is None or int(found[1] or 0) < _FEWEST_WORKERS:
            write_text(configuration, f"{_WORKERS.sub('', said).rstrip()}\n{_MORE_WORKERS}")
    except OSError as error:
        raise DeviceError(
            f"{configuration} should say {_MORE_WORKERS.strip()!r}, for pipelines of many kernels, and cannot be "
            f"written: {error.strerror or error}."
        ) from error


def _fetch(target: Path, requirements: Path) -> None:
    if importlib.util.find_spec("pip") is None:
        raise DeviceError(
            f"The FPGA emulator is fetched with pip, which this environment lacks. Add it with '{sys.executable} -m "
            "ensurepip' (or 'uv pip install pip'), then try again."
        )
    pinned = (f"{wheel} --hash=sha256:{digest}\n" for wheel, digest in zip(_WHEELS, _HASHES, strict=True))
    requirements.write_text("".join(pinned), encoding="ascii")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--require-hashes"]
    command += ["--disable-pip-version-check", "--dest", str(target), "--requirement", str(requirements)]
    try:
        subprocess.run(command, check=True, stderr=subprocess.PIPE, text=True, timeout=_FETCH_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise DeviceError(
            f"The FPGA emulator was not fetched within {_FETCH_TIMEOUT_S / 60:.0f} minutes. Try again: pip keeps the "
            "wheels that it has fetched."
        ) from error
    except subprocess.CalledProcessError as error:
        said = "\n".join(line for line in error.stderr.splitlines() if line.strip())[-1500:]
        raise DeviceError(
            f"The FPGA emulator cannot be fetched: pip does not get {', '.join(_WHEELS)}. Without a network, put "
            f"these wheels into a folder and set PIP_FIND_LINKS to it. The output of pip:\n{said}"
        ) from error


def _extract(wheels: list[Path], target: Path) -> None:
    """Extract the needed files of `wheels` to `target`/lib, and their licenses to `target`/licenses."""
    for folder in (target / "lib", target / "licenses"):
        make_private(folder)
    for wheel in wheels:
        try:
            with zipfile.ZipFile(wheel) as archive:
                for name in archive.namelist():
                    if _NEEDED.fullmatch(name):
                        copied = target / "lib" / Path(name).name
                    elif _LICENSE.fullmatch(name):
                        copied = target / "licenses" / f"{wheel.stem}.txt"
                    else:
                        continue
                    with archive.open(name) as source, copied.open("wb") as copy:
                        shutil.copyfileobj(source, copy, 1 << 20)
        except zipfile.BadZipFile as error:
            raise DeviceError(
                f"{wheel.name}, a wheel of the FPGA emulator, is damaged ({error}). Try again."
            ) from error


def _check_that_it_loads(folder: Path) -> None:
    """Load the driver in a separate process: a driver loaded in this one could not be moved."""
    drivers = sorted(folder.glob("libintelocl_emu.so.*"))
    if not drivers:
        raise DeviceError(f"The wheels {', '.join(_WHEELS)} hold no FPGA emulator: libintelocl_emu.so is missing.")
    load = "import ctypes, sys; ctypes.CDLL(sys.argv[1])"
    answer = subprocess.run(
        [sys.executable, "-c", load, str(drivers[-1])], capture_output=True, text=True, timeout=_LOAD_TIMEOUT_S
    )
    if answer.returncode != 0:
        said = (answer.stderr.strip().splitlines() or [f"it ended with code {answer.returncode}"])[-1]
        raise DeviceError(f"The FPGA emulator was fetched and does not load here: {said}")
