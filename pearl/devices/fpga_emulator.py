"""Intel's FPGA emulator: SYCL's pipes and persistent kernels on a CPU. It shows that a program works, not how fast.

Its wheels cannot share an environment with the SYCL runtime's, so they live in a folder of their own.
"""

from __future__ import annotations

import os
from pathlib import Path

from pearl.cache_folder import cache_folder

VERSION = "2024.1.0"
SETUP_COMMAND = "pearl devices --setup-fpga-emulator"
# Tells the driver to be the emulator; the wheel comes without it.
_CONFIGURATION = "cl.fpga_emu.cfg"


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
