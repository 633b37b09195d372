"""Build, repair and try manylinux wheels: `make wheel`, or `python .ci/tools/wheels.py --help`.

A wheel is built for the running Python, and for every other supported version of CPython that is found. It contains the
kernels for all instruction sets, chosen at run time, and no SYCL module. auditwheel gives it the oldest manylinux tag
that it satisfies. Then it is tried: a fresh environment, no compiler, a folder outside the sources.
"""

from __future__ import annotations

import argparse
import email
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pearl.errors import PearlError

ROOT = Path(__file__).resolve().parents[2]
CONSTRAINTS = ROOT / "constraints.txt"
VERSIONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
BUILD_TOOLS = ("scikit-build-core", "pybind11", "cmake", "ninja")
COMPILERS = ("gcc", "g++", "cc", "c++", "clang", "clang++")
# A user's flags, such as -march=native, must not get into a wheel for other machines.
FLAGS = ("CFLAGS", "CXXFLAGS", "CPPFLAGS", "LDFLAGS", "CMAKE_ARGS", "SKBUILD_CMAKE_ARGS", "SKBUILD_CMAKE_DEFINE")

COMPOSITION = """\
[actors]
env = "CartPole-v1"
envs_per_actor = 4
[trainer]
class = "pearl.algorithms:DQN"
hidden_sizes = [32, 32]
[replay]
size = 10_000
[training]
batch_size = 32
learning_starts = 200
[program]
timesteps = 2_000
"""

# What a kernel computes must not depend on the instruction set that is chosen.
DISPATCH = """\
import numpy as np
from pearl import _cuda, _native
from pearl.backends.cpu.replay import NativeReplayManager
replay = NativeReplayManager(1000, seed=1)
replay.insert(np.arange(1000), np.linspace(0, 9, 1000, dtype=np.float32))
print(_native.selected_kernels(), *replay.sample(64).indices.tolist())
"""


class WheelError(PearlError):
    """A wheel could not be built or repaired, or failed when it was tried."""


@dataclass(frozen=True)
class Interpreter:
    """A CPython that can build extension modules: its version, such as "3.11", and its executable."""

    version: str
    executable: Path


def run(*command: str | Path, env: Mapping[str, str] | None = None, cwd: Path = ROOT, timeout_s: float = 3600) -> str:
    """Return the output of a command.

    Raises WheelError, with the end of what it printed, if it failed or took longer than `timeout_s`.
    """
    words = [str(word) for word in command]
    try:
        done = subprocess.run(
            words, cwd=cwd, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=timeout_s
        )
    except subprocess.TimeoutExpired as error:
        raise WheelError(f"Ran longer than {timeout_s:.0f} s: {' '.join(words)}") from error
    if done.returncode != 0:
        end = "\n".join(done.stdout.splitlines()[-30:])
        raise WheelError(f"Exit status {done.returncode} of: {' '.join(words)}\n{end}")
    return done.stdout


def usable(executable: Path, version: str) -> str | None:
    """Return why `executable` cannot build a wheel for `version`, or None if it can."""
    code = (
        "import json, pathlib, platform, sys, sysconfig\n"
        "header = pathlib.Path(sysconfig.get_path('include'), 'Python.h')\n"
        "print(json.dumps([platform.python_implementation(), '%d.%d' % sys.version_info[:2],"
        " bool(sysconfig.get_config_var('Py_GIL_DISABLED')), str(header), header.exists()]))"
    )
    try:
        done = subprocess.run([executable, "-c", code], capture_output=True, text=True, timeout=60)
        implementation, found, free_threaded, header, has_header = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return f"{executable} does not run"
    if implementation != "CPython" or found != version or free_threaded:
        return f"{executable} is {implementation} {found}{' without GIL' if free_threaded else ''}"
    return None if has_header else f"{header} is missing: install the headers of Python {version}"


def find_interpreter(version: str, path: str, pyenv: Path) -> Interpreter | str:
    """Return CPython `version` from `path` or from `pyenv`'s versions, or the reason why there is none."""
    reasons = []
    in_path = [Path(folder, f"python{version}") for folder in path.split(os.pathsep) if folder]
    for executable in [*in_path, *sorted(pyenv.glob(f"{version}.*/bin/python{version}"))]:
        if executable.exists():
            reason = usable(executable, version)
            if reason is None:
                return Interpreter(version, executable)
            reasons.append(reason)
    return "; ".join(reasons) or f"no python{version} in PATH or in {pyenv}"


def make_environment(interpreter: Interpreter, folder: Path) -> Path:
    """Make a virtual environment in `folder`; return its Python."""
    run(interpreter.executable, "-m", "venv", folder)
    return folder / "bin" / "python"


def build(interpreter: Interpreter, scratch: Path) -> Path:
    """Build the wheel for `interpreter` in `scratch`; return it, with a tag that names no manylinux policy yet."""
    # Kept: with the same paths, another build compiles only what changed.
    python = make_environment(interpreter, ROOT / "build" / "wheel" / f"environment-{interpreter.version}")
    run(python, "-m", "pip", "install", "--constraint", CONSTRAINTS, *BUILD_TOOLS)
    raw = scratch / f"raw-{interpreter.version}"
    settings = {"build-dir": "build/wheel/{wheel_tag}", "cmake.define.PEARL_SYCL": "OFF"}
    options = [f"--config-settings={name}={value}" for name, value in settings.items()]
    env = {name: value for name, value in os.environ.items() if name not in FLAGS}
    env["PATH"] = f"{python.parent}{os.pathsep}{env['PATH']}"
    command = ("-m", "pip", "wheel", "--no-deps", "--no-build-isolation", *options, "--wheel-dir")
    run(python, *command, raw, ROOT, env=env)
    return next(raw.glob("*.whl"))


def repair(raw: Path, output: Path, scratch: Path) -> Path:
    """Give the wheel the oldest manylinux tag that it satisfies; return the new wheel in `output`.

    Raises WheelError if it satisfies none, or if auditwheel had to copy a library into it.
    """
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    repaired = scratch / f"repaired-{raw.stem}"
    run(sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", repaired, raw, env=env)
    wheel = next(repaired.glob("*.whl"))
    check_contents(wheel)
    output.mkdir(parents=True, exist_ok=True)
    target = output / wheel.name
    shutil.copyfile(wheel, target)
    return target


def check_contents(wheel: Path) -> None:
    """Check tag and contents of a repaired wheel.

    Raises WheelError if it has no manylinux tag, lacks a native module, or contains the SYCL module, a copied library
    or a folder that is not PEARL's.
    """
    if "manylinux" not in wheel.name:
        raise WheelError(f"Expected a manylinux tag; found {wheel.name}.")
    names = zipfile.ZipFile(wheel).namelist()
    modules = {match[1] for name in names if (match := re.match(r"pearl/(_\w+)\..*so$", name))}
    if modules != {"_cuda", "_native"}:
        raise WheelError(f"Expected the native modules _cuda and _native in {wheel.name}; found {sorted(modules)}.")
    folders = {name.split("/")[0] for name in names}
    strange = {name for name in folders if name not in {"pearl", "composer"} and not name.endswith(".dist-info")}
    if strange:
        raise WheelError(f"Expected only pearl and composer in {wheel.name}; found {sorted(strange)} too.")


def requirements(wheel: Path) -> list[str]:
    """Return what the wheel requires without extras, as its metadata says it."""
    archive = zipfile.ZipFile(wheel)
    metadata = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    message = email.message_from_bytes(archive.read(metadata))
    return [line for line in message.get_all("Requires-Dist", []) if "extra ==" not in line]


def without_compiler(environment: Path, cache: Path) -> dict[str, str]:
    """Return environment variables with which no compiler is found: PATH is the environment's own folder."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PEARL_", "VIRTUAL_"))}
    env |= {"PATH": str(environment / "bin"), "CC": "/bin/false", "CXX": "/bin/false", "PEARL_CACHE_DIR": str(cache)}
    found = [name for name in COMPILERS if shutil.which(name, path=env["PATH"])]
    if found:
        raise WheelError(f"Expected no compiler in {env['PATH']}; found {', '.join(found)}.")
    return env


def try_wheel(wheel: Path, interpreter: Interpreter, scratch: Path, *, torch: bool) -> str:
    """Install the wheel in a fresh environment without compiler, compose CartPole-v1 and train; return what it found.

    Without `torch`, everything else is installed: programs of built-in algorithms need none.

    Raises WheelError if a command failed, if an instruction set changes what a kernel computes, or if no weights were
    written.
    """
    folder = scratch / f"try-{interpreter.version}"
    python = make_environment(interpreter, folder / "venv")
    env = without_compiler(folder / "venv", folder / "cache")
    install = (python, "-m", "pip", "install", "--only-binary", ":all:", "--constraint", CONSTRAINTS)
    if torch:
        run(*install, wheel, env=env, cwd=folder)
    else:
        rest = [line for line in requirements(wheel) if not re.match(r"torch\b", line)]
        run(*install, *rest, env=env, cwd=folder)
        run(*install, "--no-deps", wheel, env=env, cwd=folder)

    variants = run(python, "-c", "from pearl import _native; print(*_native.kernel_variants())", env=env, cwd=folder)
    draws = set()
    for name in variants.split():
        selected, *indices = run(python, "-c", DISPATCH, env={**env, "PEARL_ISA": name}, cwd=folder).split()
        if selected != name:
            raise WheelError(f"Expected the kernels {name}; found {selected}.")
        draws.add(tuple(indices))
    if len(draws) != 1:
        raise WheelError(f"Expected the same draws from the kernels {variants.split()}; they differ.")

    pearl = folder / "venv" / "bin" / "pearl"
    run(pearl, "devices", "--no-measure", env=env, cwd=folder)
    (folder / "cartpole.toml").write_text(COMPOSITION, encoding="utf-8")
    run(pearl, "compose", "cartpole.toml", env=env, cwd=folder)
    program = folder / "runs" / "cartpole" / "program.py"
    run(pearl, "run", program, "--until-return", "none", "--eval-episodes", "2", env=env, cwd=folder)
    if not (program.parent / "weights.safetensors").exists():
        raise WheelError(f"Expected weights.safetensors after the training; found none in {program.parent}.")
    return f"trained {'with' if torch else 'without'} torch installed; kernels {', '.join(variants.split())}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Build the wheels that the command line asks for."""
    parser = argparse.ArgumentParser(prog="python .ci/tools/wheels.py", description=__doc__)
    parser.add_argument("--output", type=Path, default=ROOT / "dist", help="folder for the wheels (dist)")
    parser.add_argument(
        "--versions", nargs="+", default=VERSIONS, choices=VERSIONS, metavar="3.x", help="instead of all supported ones"
    )
    parser.add_argument("--skip-try", action="store_true", help="do not install the wheels")
    parser.add_argument(
        "--torch-everywhere",
        action="store_true",
        help="try wheels for other Pythons with torch too, for which pip may download 5 GB each",
    )
    options = parser.parse_args(arguments)
    running = Interpreter("{}.{}".format(*sys.version_info[:2]), Path(sys.executable))
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for version in sorted(options.versions, key=lambda version: version != running.version):
        found = running if version == running.version else find_interpreter(version, os.environ["PATH"], pyenv)
        if isinstance(found, str):
            print(f"CPython {version}: skipped ({found})", flush=True)
            continue
        with tempfile.TemporaryDirectory(prefix="pearl-wheel-") as name:
            scratch = Path(name)
            wheel = repair(build(found, scratch), options.output, scratch)
            print(f"CPython {version}: {wheel}", flush=True)
            if not options.skip_try:
                torch = options.torch_everywhere or version == running.version
                print(f"CPython {version}: {try_wheel(wheel, found, scratch, torch=torch)}", flush=True)


if __name__ == "__main__":
    try:
        main()
    except WheelError as error:
        sys.exit(f"Error: {error}")
