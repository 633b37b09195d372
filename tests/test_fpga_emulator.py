"""Fetching the FPGA emulator: from wheels that are made up, and (slow) from the real ones."""

from __future__ import annotations

import ctypes.util
import hashlib
import importlib.util
import os
import shutil
import stat
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pearl.backends.fpga import emulator as fpga_emulator
from pearl.cli import app
from pearl.errors import DeviceError

DRIVER = "libintelocl_emu.so.2024.17.3.0"


def a_library() -> bytes:
    """Some shared library of this machine, which loads without others."""
    name = ctypes.util.find_library("m") or "libm.so.6"
    loaded = ctypes.CDLL(name)
    path = next(line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if name in line)
    assert loaded
    return Path(path).read_bytes()


def make_wheel(folder: Path, requirement: str, files: dict[str, bytes]) -> None:
    name, version = requirement.split("==")
    stem = f"{name.replace('-', '_')}-{version}"
    texts = {
        f"{stem}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{stem}.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: py2.py3-none-any\n",
        f"{stem}.dist-info/RECORD": "",
        f"{stem}.dist-info/LICENSE.txt": f"the license of {name}",
    }
    with zipfile.ZipFile(folder / f"{stem}-py2.py3-none-any.whl", "w") as archive:
        for path, text in texts.items():
            archive.writestr(path, text)
        for file, content in files.items():
            archive.writestr(f"{stem}.data/data/{file}", content)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes wheels from, and from nowhere else; the emulator is not set up."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    settings = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder)}
    for name, value in (settings | {"PEARL_CACHE_DIR": str(tmp_path / "cache")}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("PEARL_FPGA_EMULATOR")
    return folder


def fill(index: Path, driver: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make up wheels, and have their hashes be those that are pinned."""
    opencl, compiler, tbb = fpga_emulator._WHEELS
    make_wheel(index, opencl, {f"lib/{DRIVER}": driver, "lib/libintelocl.so": b"not needed", "lib/clbltfnz0.rtl": b"x"})
    make_wheel(index, compiler, {"lib/libsvml.so": b"s", "lib/icx-lto.so": b"not needed"})
    make_wheel(index, tbb, {"lib/libtbb.so.12": b"t", "lib/libtbb.so": b"not needed"})
    made = {wheel.name.split("-")[0].replace("_", "-"): wheel for wheel in index.iterdir()}
    wheels = [made[requirement.split("==")[0]] for requirement in fpga_emulator._WHEELS]
    hashes = tuple(hashlib.sha256(wheel.read_bytes()).hexdigest() for wheel in wheels)
    monkeypatch.setattr(fpga_emulator, "_HASHES", hashes)


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def test_what_is_needed_is_taken_out_of_the_wheels(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(index, a_library(), monkeypatch)
    said: list[str] = []
    assert (fpga_emulator.emulator_library(), fpga_emulator.emulator_kernels()) == (None, 0)
    folder = fpga_emulator.setup_emulator(said.append)
    assert folder == tmp_path / "cache" / "fpga-emulator-2024.1.0"
    assert fpga_emulator.emulator_library() == folder / "lib" / DRIVER
    configuration = folder / "lib" / "cl.fpga_emu.cfg"
    assert configuration.read_text() == "CL_CONFIG_DEVICES = fpga-emu\nCL_CONFIG_CPU_TBB_NUM_WORKERS = 160\n"
    assert left_in(folder / "lib") == sorted([DRIVER, "cl.fpga_emu.cfg", "clbltfnz0.rtl", "libsvml.so", "libtbb.so.12"])
    assert len(left_in(folder / "licenses")) == 3
    assert left_in(folder.parent) == [folder.name]
    assert any("Fetching" in line for line in said)

    shutil.rmtree(index)
    assert fpga_emulator.setup_emulator(said.append) == folder, "nothing is fetched twice"
    assert "already" in said[-1]
    assert fpga_emulator.emulator_kernels() == 160
    # Set up by others, by an earlier PEARL.
    for before, kernels in (("", 31), ("CL_CONFIG_CPU_TBB_NUM_WORKERS = 64\n", 64)):
        configuration.write_text(f"CL_CONFIG_DEVICES = fpga-emu\n{before}CL_CONFIG_USE_VTUNE = 0\n")
        assert fpga_emulator.emulator_kernels() == kernels
        shown = CliRunner().invoke(app, ["devices", "--setup-fpga-emulator"])
        assert shown.exit_code == 0
        assert configuration.read_text().splitlines()[1:] == [
            "CL_CONFIG_USE_VTUNE = 0",
            "CL_CONFIG_CPU_TBB_NUM_WORKERS = 160",
        ]
    assert str(folder) in shown.stdout


def test_a_folder_of_the_users_own_is_filled_and_found(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(index, a_library(), monkeypatch)
    monkeypatch.setenv("PEARL_FPGA_EMULATOR", str(tmp_path / "mine" / "emulator"))
    assert fpga_emulator.setup_emulator(print) == tmp_path / "mine" / "emulator"
    assert fpga_emulator.emulator_library() is not None


def test_without_a_network_the_wheels_are_named(index: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["devices", "--setup-fpga-emulator"])
    assert result.exit_code == 1
    for text in ("cannot be fetched", "intel-opencl-rt==2024.1.0", "PIP_FIND_LINKS", "No matching distribution"):
        assert text in result.stderr
    assert left_in(tmp_path / "cache") == []


def test_a_damaged_wheel_leaves_nothing_behind(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fetched(command: Sequence[str], **_: Any) -> None:
        target = Path(command[command.index("--dest") + 1])
        target.mkdir()
        (target / "intel_opencl_rt-2024.1.0-py2.py3-none-any.whl").write_bytes(b"half a wheel")

    monkeypatch.setattr(fpga_emulator.subprocess, "run", fetched)
    with pytest.raises(DeviceError, match=r"intel_opencl_rt-2024\.1\.0.* is damaged"):
        fpga_emulator.setup_emulator(print)
    assert left_in(tmp_path / "cache") == []


def test_a_wheel_with_another_content_is_refused(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(index, a_library(), monkeypatch)
    (wheel,) = index.glob("tbb-*")
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("tbb-2021.13.1.data/data/lib/libsvml.so", "an attacker's")
    with pytest.raises(DeviceError, match=r"(?is)cannot be fetched.*do not match"):
        fpga_emulator.setup_emulator(print)
    assert left_in(tmp_path / "cache") == []


def test_an_emulator_that_others_may_change_is_not_loaded(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(index, a_library(), monkeypatch)
    before = os.umask(0)
    try:
        folder = fpga_emulator.setup_emulator(print)
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.parent.stat().st_mode) == 0o700
    fpga_emulator.check_emulator()
    folder.chmod(0o775)
    with pytest.raises(DeviceError, match=r"others?.*mode 0775.*PEARL_CACHE_DIR"):
        fpga_emulator.setup_emulator(print)
    folder.chmod(0o755)
    (folder / "lib" / DRIVER).chmod(0o666)
    with pytest.raises(DeviceError, match=r"may be written to by other users \(mode 0666\)"):
        fpga_emulator.check_emulator()


def test_an_emulator_that_does_not_load_is_not_kept(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(index, b"no library", monkeypatch)
    with pytest.raises(DeviceError, match=r"does not load here: .*libintelocl_emu"):
        fpga_emulator.setup_emulator(print)
    assert left_in(tmp_path / "cache") == []


def test_a_fetch_that_takes_too_long_is_given_up(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stuck(command: Sequence[str], **_: Any) -> None:
        raise subprocess.TimeoutExpired(command, 1)

    monkeypatch.setattr(fpga_emulator.subprocess, "run", stuck)
    with pytest.raises(DeviceError, match="not fetched within 60 minutes"):
        fpga_emulator.setup_emulator(print)
    assert left_in(tmp_path / "cache") == []


def test_what_stands_in_the_way_is_named(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(index, a_library(), monkeypatch)
    find_spec = importlib.util.find_spec
    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name: None if name == "pip" else find_spec(name))
        with pytest.raises(DeviceError, match=r"with pip, which this environment lacks.*ensurepip"):
            fpga_emulator.setup_emulator(print)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9, 10**8))  # type: ignore[attr-defined]
        with pytest.raises(DeviceError, match=r"needs 800\.0 MB .*; 100\.0 MB are free"):
            fpga_emulator.setup_emulator(print)
    with monkeypatch.context() as patch:
        (tmp_path / "file").touch()
        patch.setenv("PEARL_CACHE_DIR", str(tmp_path / "file"))
        with pytest.raises(DeviceError, match="Set PEARL_CACHE_DIR to a writable folder"):
            fpga_emulator.setup_emulator(print)
    (tmp_path / "cache" / "fpga-emulator-2024.1.0").mkdir()
    with pytest.raises(DeviceError, match="exists and is not the FPGA emulator"):
        fpga_emulator.setup_emulator(print)


@pytest.mark.slow
def test_the_real_emulator_is_fetched_and_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEARL_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("PEARL_FPGA_EMULATOR")
    try:
        fpga_emulator.setup_emulator(print)
    except DeviceError as error:
        if "cannot be fetched" in str(error):
            pytest.skip("the emulator's wheels cannot be fetched here")
        raise
    code = "from pearl.backends.sycl import device as sycl; print(sycl.sycl_availability('fpga_emu'))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert "ok=True" in shown.stdout or "not installed" in shown.stdout
