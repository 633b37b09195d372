"""Intel's FPGA emulator: SYCL's pipes and persistent kernels on a CPU. It shows that a program works, not how fast.

Its wheels cannot share an environment with the SYCL runtime's, so what is needed of them lives in a folder of its own.
"""

from __future__ import annotations

import contextlib
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
# Of these wheels for Linux on x86-64, as PyPI has them: native code is taken out of them, whatever the index says.
_HASHES = (
    "13589917a058318a7e222731bfdd0c6b4c716be101816686e580fe13ec0327c4",
    "f66bffebb3dcbf65e18cedad90bd35c2aa5ca265ce903b20ec15f8ba4f7b3ccc",
    "d916359dc685579d09e4b344241550afc1cc034f7f5ec7234c258b6680912d70",
)
# Of 930 MB these 440 are used: the driver and the libraries it needs, its compiler, and what each kind of CPU needs.
_NEEDED = re.compile(
    r"[^/]+\.data/data/lib/(libintelocl_emu\.so\.[0-9.]+|libcommon_clang\.so\.[0-9.]+|libonnxruntime\.[0-9.]+\.so"
    r"|libtbb\.so\.12|lib(imf|svml|irng)\.so|libintlc\.so\.5"
    r"|clbltfn\w+\.rtl|cllibrary\w*\.(rtl|o)|__ocl_svml_\w+\.so)"
)
_LICENSE = re.compile(r"[^/]+\.dist-info/LICENSE[^/]*")
_NEEDED_BYTES = 800_000_000  # the wheels and what is taken out of them
_FETCH_TIMEOUT_S = 3600.0
_LOAD_TIMEOUT_S = 120.0
# Tells the driver to be the emulator; the wheel comes without it.
_CONFIGURATION = "cl.fpga_emu.cfg"
_BE_THE_EMULATOR = "CL_CONFIG_DEVICES = fpga-emu\n"
# How many kernels run at once: by default 31, fewer than a Learner of two copies has stages.
_FEWEST_WORKERS = 160
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


def check_emulator() -> None:
    """Raise DeviceError if the emulator is set up where others than this user and root may write."""
    if emulator_library() is not None:
        named = "PEARL_FPGA_EMULATOR"
        check_private(emulator_folder(), named if os.environ.get(named) else "PEARL_CACHE_DIR")


def setup_emulator(report: Callable[[str], None]) -> Path:
    """Fetch the emulator with pip into `emulator_folder()` unless it is there, and return that folder.

    Appears in one step: a set-up that is interrupted leaves no half an emulator. DeviceError says what failed, such as
    the network.
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
            report(f"Taking out what it needs (440 MB) into {folder}")
            _extract(sorted(wheels.glob("*.whl")), made)
            (made / "lib" / _CONFIGURATION).write_text(_BE_THE_EMULATOR + _MORE_WORKERS, encoding="ascii")
            _check_that_it_loads(made / "lib")
            with contextlib.suppress(FileExistsError):  # another process was quicker
                _move(made, folder)
    except OSError as error:
        raise DeviceError(
            f"The FPGA emulator cannot be set up in {folder}: {error}. Set PEARL_CACHE_DIR to a writable folder."
        ) from error
    return folder


def _add_workers(configuration: Path) -> None:
    """An emulator that was set up before, or by others, may lack the line."""
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


def _move(made: Path, folder: Path) -> None:
    try:
        made.rename(folder)
    except OSError as error:
        if folder.is_dir():
            raise FileExistsError(str(folder)) from error
        raise


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
            f"The FPGA emulator was not fetched within {_FETCH_TIMEOUT_S / 60:.0f} minutes. Try again: pip keeps what "
            "it has got."
        ) from error
    except subprocess.CalledProcessError as error:
        said = "\n".join(line for line in error.stderr.splitlines() if line.strip())[-1500:]
        raise DeviceError(
            f"The FPGA emulator cannot be fetched: pip does not get {', '.join(_WHEELS)}. Without a network, put "
            f"these wheels into a folder and set PIP_FIND_LINKS to it. What pip says:\n{said}"
        ) from error


def _extract(wheels: list[Path], target: Path) -> None:
    """Write what is needed of `wheels` to `target`/lib, and their licenses beside it."""
    for folder in (target / "lib", target / "licenses"):
        make_private(folder)
    for wheel in wheels:
        try:
            with zipfile.ZipFile(wheel) as archive:
                for name in archive.namelist():
                    if _NEEDED.fullmatch(name):
                        _copy(archive, name, target / "lib" / Path(name).name)
                    elif _LICENSE.fullmatch(name):
                        _copy(archive, name, target / "licenses" / f"{wheel.stem}.txt")
        except zipfile.BadZipFile as error:
            raise DeviceError(
                f"{wheel.name}, a wheel of the FPGA emulator, is damaged ({error}). Try again."
            ) from error


def _copy(archive: zipfile.ZipFile, name: str, target: Path) -> None:
    with archive.open(name) as source, target.open("wb") as copy:
        shutil.copyfileobj(source, copy, 1 << 20)


def _check_that_it_loads(folder: Path) -> None:
    """In a process of its own: a driver that is loaded here could not be moved away again."""
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
