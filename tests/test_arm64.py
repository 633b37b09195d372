"""The native code on arm64: compiled by a cross-compiler, run by qemu."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ("aarch64-linux-gnu-g++", "qemu-aarch64")
MISSING = [tool for tool in TOOLS if shutil.which(tool) is None]


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.skipif(bool(MISSING), reason=f"{MISSING} missing: apt install g++-aarch64-linux-gnu qemu-user")
def test_the_cpp_tests_pass_on_arm64():
    programs = Path(sys.executable).parent
    env = {**os.environ, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
    configure = ("cmake", "-S", ".", "-B", "build/arm64", "-DPEARL_PYTHON=OFF", "-DPEARL_TESTS=ON")
    toolchain = "-DCMAKE_TOOLCHAIN_FILE=cmake/aarch64-linux-gnu.cmake"
    for command in (
        (*configure, toolchain),
        ("cmake", "--build", "build/arm64", "--parallel", "2"),
        ("ctest", "--test-dir", "build/arm64", "--output-on-failure"),
    ):
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=2500)
        assert done.returncode == 0, done.stdout + done.stderr
    assert "100% tests passed" in done.stdout
    binary = next((ROOT / "build" / "arm64").glob("**/sum_tree_test")).read_bytes()
    assert binary[18:20] == b"\xb7\x00"  # e_machine: EM_AARCH64


def test_a_missing_tool_is_named_with_the_package_that_has_it(tmp_path):
    for name in ("make", "sh", "find"):
        (tmp_path / name).symlink_to(shutil.which(name))
    env = {**os.environ, "PATH": str(tmp_path)}
    done = subprocess.run(["make", "arm64-tools"], cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "aarch64-linux-gnu-g++ is not in PATH" in done.stderr
    assert "apt install g++-aarch64-linux-gnu qemu-user" in done.stderr
