"""Wheels: which Pythons get one, what is in it, and that it works where no compiler is."""

from __future__ import annotations

import importlib.util
import os
import shutil
import stat
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from tools import wheels

ROOT = Path(__file__).resolve().parent.parent
VERSION = "{}.{}".format(*sys.version_info[:2])
NATIVE = ("pearl/_native.cpython-311-x86_64-linux-gnu.so", "pearl/_cuda.cpython-311-x86_64-linux-gnu.so")
METADATA = """\
Metadata-Version: 2.2
Name: pearl-toolkit
Requires-Dist: numpy>=2.0
Requires-Dist: torch>=2.6
Requires-Dist: tomli>=2.0; python_version < "3.11"
Requires-Dist: pytest>=8; extra == "test"
"""

CMAKE = shutil.which("cmake", path=str(Path(sys.executable).parent))
FIND = f"""\
cmake_minimum_required(VERSION 3.20)
project(find LANGUAGES NONE)
include("{ROOT}/cmake/find_files.cmake")
find_files(found "${{PROJECT_SOURCE_DIR}}/kernels" *.cu *.hpp)
message(STATUS "found ${{found}}.")
"""


def wheel_with(folder: Path, *files: str, tag: str = "manylinux_2_34_x86_64") -> Path:
    wheel = folder / f"pearl_toolkit-0.1.0-cp311-cp311-{tag}.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("pearl/__init__.py", "")
        archive.writestr("composer/__init__.py", "")
        archive.writestr("pearl_toolkit-0.1.0.dist-info/METADATA", METADATA)
        for name in files:
            archive.writestr(name, "")
    return wheel


def python_that(folder: Path, version: str, script: str) -> Path:
    executable = folder / f"python{version}"
    executable.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    executable.chmod(executable.stat().st_mode | stat.S_IXUSR)
    return executable


def test_a_wheel_with_both_modules_is_accepted(tmp_path):
    wheels.check_contents(wheel_with(tmp_path, *NATIVE))


@pytest.mark.parametrize(
    ("files", "tag", "message"),
    [
        (NATIVE, "linux_x86_64", "Expected a manylinux tag"),
        (NATIVE[:1], "manylinux_2_34_x86_64", r"found \['_native'\]"),
        ((*NATIVE, "pearl/_sycl.cpython-311-x86_64-linux-gnu.so"), "manylinux_2_34_x86_64", "_sycl"),
        ((*NATIVE, "pearl_toolkit.libs/libgomp-a.so"), "manylinux_2_34_x86_64", r"pearl_toolkit\.libs"),
        ((*NATIVE, "tests/test_wheels.py"), "manylinux_2_34_x86_64", "'tests'"),
    ],
)
def test_a_wheel_with_something_else_is_refused(tmp_path, files, tag, message):
    with pytest.raises(wheels.WheelError, match=message):
        wheels.check_contents(wheel_with(tmp_path, *files, tag=tag))


def test_what_a_wheel_requires_leaves_extras_out(tmp_path):
    found = wheels.requirements(wheel_with(tmp_path))
    assert found == ["numpy>=2.0", "torch>=2.6", 'tomli>=2.0; python_version < "3.11"']


def test_no_compiler_is_found_in_the_environment_of_the_trial(tmp_path):
    (tmp_path / "bin").mkdir()
    env = wheels.without_compiler(tmp_path, tmp_path / "cache")
    assert shutil.which("cc", path=env["PATH"]) is None
    assert env["CC"] == "/bin/false"
    python_that(tmp_path / "bin", "", "exit 0").rename(tmp_path / "bin" / "gcc")
    with pytest.raises(wheels.WheelError, match="found gcc"):
        wheels.without_compiler(tmp_path, tmp_path / "cache")


def test_interpreters_are_found_in_path_and_in_pyenv_or_the_reason_is_given(tmp_path):
    shims, pyenv = tmp_path / "shims", tmp_path / "versions"
    own = pyenv / f"{VERSION}.9" / "bin"
    own.mkdir(parents=True)
    shims.mkdir()
    python_that(shims, VERSION, "exit 127")  # pyenv's shim of a version that is not selected
    python_that(shims, "3.14", "exit 127")
    python_that(own, VERSION, f'exec {sys.executable} "$@"')
    found = wheels.find_interpreter(VERSION, str(shims), pyenv)
    assert isinstance(found, wheels.Interpreter), found
    assert found.executable.parent == own
    assert wheels.find_interpreter("3.14", str(shims), pyenv) == f"{shims / 'python3.14'} does not run"
    assert "no python3.13 in PATH" in wheels.find_interpreter("3.13", str(shims), pyenv)
    (pyenv / "3.12.0" / "bin").mkdir(parents=True)
    python_that(pyenv / "3.12.0" / "bin", "3.12", f'exec {sys.executable} "$@"')
    if VERSION != "3.12":
        assert f"CPython {VERSION}" in wheels.find_interpreter("3.12", "", pyenv)


def test_a_command_that_fails_or_hangs_is_shown_with_what_it_printed():
    with pytest.raises(wheels.WheelError, match=r"Exit status 3 of: .*\nlost"):
        wheels.run(sys.executable, "-c", "print('lost'); raise SystemExit(3)")
    with pytest.raises(wheels.WheelError, match="Ran longer than 1 s"):
        wheels.run(sys.executable, "-c", "import time; time.sleep(60)", timeout_s=1)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.skipif(importlib.util.find_spec("auditwheel") is None, reason="no auditwheel: run `make wheel`")
def test_the_wheel_of_this_python_installs_and_trains_without_a_compiler(tmp_path):
    env = {**os.environ, "CXXFLAGS": "-march=an-unknown-machine"}  # must not reach the compiler
    command = (sys.executable, ".ci/tools/wheels.py", "--versions", VERSION, "--output", tmp_path)
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=2900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "trained with torch" in done.stdout
    assert [wheel.name.split("-")[2] for wheel in tmp_path.glob("*manylinux*.whl")] == [f"cp{VERSION.replace('.', '')}"]


@pytest.mark.skipif(CMAKE is None, reason="needs CMake")
def test_kernels_are_found_whatever_the_folder_is_called(tmp_path: Path) -> None:
    folder = tmp_path / "pearl [fork] *?"
    (folder / "kernels").mkdir(parents=True)
    for name in ("CMakeLists.txt", "kernels/a.hpp", "kernels/b.cu", "kernels/c.md"):
        (folder / name).write_text(FIND)
    told = subprocess.run(
        [str(CMAKE), "-S", folder, "-B", tmp_path / "build"], capture_output=True, text=True, check=True
    )
    assert f"found {folder}/kernels/a.hpp;{folder}/kernels/b.cu." in told.stdout
