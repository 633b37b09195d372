"""Checks PEARL on a machine with an NVIDIA GPU, which may have no network: build, tests, benchmarks, compute-sanitizer.

    python benchmarks/gpu_check.py --wheels wheels                # all parts that have not passed yet
    python benchmarks/gpu_check.py --part tests --limit-s 540     # one part, ended after 540 s

`--wheels` is a folder with the packages that the machine lacks, made where there is a network:

    python benchmarks/gpu_check.py --download wheels --python-version 3.12

A part that has passed is not repeated with the same sources (`--again` does). Results: build/gpu_check.json, and
benchmarks/results/cuda.json from the benchmarks. Only Python's own modules are needed to start it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STATE = ROOT / "build" / "gpu_check.json"
DEVICE = "cuda:0"
# What PEARL and its tests import; torch is taken from the machine.
PACKAGES = (
    "cmake>=3.20", "gymnasium>=1.1", "hypothesis>=6.100", "jinja2>=3.1", "markupsafe>=2.1", "matplotlib>=3.8.4",
    "ninja", "numpy>=2.0", "pandas>=2.2.2", "pybind11>=3.0", "pytest>=8.3", "pytest-timeout>=2.3.1",
    "pytest-xdist>=3.6", "pyyaml>=6.0", "rich>=13.7", "safetensors>=0.5", "scikit-build-core>=0.11",
    "tensorboard>=2.17.1", "typer>=0.18",
)  # fmt: skip
TESTS = (
    "tests/contracts", "tests/test_cuda_kernels.py", "tests/test_device_loop.py", "tests/test_device_learner.py",
    "tests/test_captured_learner.py", "tests/test_torch_iteration.py", "tests/test_served_policy.py",
)  # fmt: skip
# Those of them that use the GPU, for pytest's -k: these words are looked for in the names of tests and files. What nvcc
# says of resources depends on its release: that is compared where the release is pinned.
CHOSEN = "(cuda or gpu or nvrtc or device_learner) and not nvcc"


def run(*command: object, limit_s: float, env: Mapping[str, str] | None = None) -> None:
    """Run the command and show the end of what it prints; SystemExit if it fails or takes too long."""
    words = [str(word) for word in command]
    print("$", *words, flush=True)
    output, code = ended(words, limit_s, env)
    print(output[-4000:], flush=True)
    if code:
        raise SystemExit(f"It ended with code {code}.")


def ended(words: Sequence[str], limit_s: float, env: Mapping[str, str] | None = None) -> tuple[str, int]:
    """What the command printed, and its exit code. If it takes too long, all of its processes are ended: SystemExit."""
    process = subprocess.Popen(
        words,
        cwd=ROOT,
        env={**os.environ, **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired as error:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        print(output[-4000:], flush=True)
        raise SystemExit(f"It had not ended after {limit_s:.0f} s; run this part alone: --part.") from error
    return output, process.returncode


def build(wheels: Path | None, limit_s: float) -> None:
    """Install what is missing, and PEARL in place with its kernels; nothing if torch finds no GPU."""
    said, code = ended([sys.executable, "-c", _FINDS_GPU], limit_s)
    if code:
        raise SystemExit(said.strip())
    print(said, end="", flush=True)
    offline = ["--no-index", "--find-links", wheels] if wheels else []
    pip = (sys.executable, "-m", "pip", "install", "--quiet")
    run(*pip, *offline, *PACKAGES, limit_s=limit_s)
    run(*pip, "--no-deps", "--no-build-isolation", "--no-index", "--editable", ".", limit_s=limit_s)


_FINDS_GPU = f"""
try:
    import torch
except ImportError as error:
    raise SystemExit(f"PyTorch, which is taken from the machine, cannot be imported: {{error}}.")
if not torch.cuda.is_available():
    raise SystemExit(f"torch {{torch.__version__}} finds no CUDA device. It needs a GPU and PyTorch's CUDA build.")
print(f"torch {{torch.__version__}}, {{torch.cuda.get_device_name({DEVICE!r})}}")
"""


def tests(_: Path | None, limit_s: float) -> None:
    """The contracts and the CUDA tests on the GPU, then the tests that need one."""
    on_gpu = {"PEARL_TEST_CUDA": DEVICE}
    # A test that hangs on the GPU cannot be interrupted: its process is ended, and the others go on.
    hangs = ("--timeout", "120", "--timeout-method", "thread")
    processes = str(max(1, min(14, (os.cpu_count() or 1) - 1)))
    pytest = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", processes, *hangs)
    run(*pytest, *TESTS, "-k", CHOSEN, limit_s=limit_s, env=on_gpu)
    run(*pytest, "-m", "cuda", "tests", limit_s=limit_s, env=on_gpu)


def find_sanitizer() -> str | None:
    """compute-sanitizer on the PATH or in a toolkit, which often is not on it."""
    homes = [home for name in ("CUDA_HOME", "CUDA_PATH") if (home := os.environ.get(name))]
    folders = [os.environ.get("PATH", ""), *(f"{home}/bin" for home in (*homes, "/usr/local/cuda"))]
    return shutil.which("compute-sanitizer", path=os.pathsep.join(folders))


def sanitizer(_: Path | None, limit_s: float) -> None:
    """Memcheck, synccheck and racecheck; a kernel that is wrong on purpose must be found."""
    tool = find_sanitizer()
    if tool is None:
        raise SystemExit("compute-sanitizer is not installed: it is part of the CUDA toolkit.")
    # Torch's kernels and its calls that may fail are not what is checked.
    checked = (tool, "--error-exitcode", "9", "--report-api-errors", "no", "--kernel-name", "kns=pearl_")
    script = (sys.executable, "-m", "benchmarks.cuda", "--quick", "--alone", "--device", DEVICE)
    for check in ("memcheck", "synccheck", "racecheck"):
        run(*checked, "--tool", check, *script, limit_s=limit_s)
    # Other algorithms, odd widths and clipping.
    pytest = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_device_loop.py")
    loops = (*pytest, "-k", "cuda and agree_to_the_bit")
    run(*checked, "--tool", "memcheck", *loops, limit_s=limit_s, env={"PEARL_TEST_CUDA": DEVICE})
    said, _ = ended([*checked, "--tool", "memcheck", sys.executable, "-c", _OUT_OF_BOUNDS], limit_s)
    if "Invalid __global__ write" not in said or "pearl_write_out_of_bounds" not in said:
        raise SystemExit(f"The control, a write out of bounds, was not found:\n{said[-2000:]}")


_OUT_OF_BOUNDS = f"""
from pearl.backends.cuda.runtime import open_cuda
from pearl.errors import DeviceError
try:
    open_cuda({DEVICE!r}).queue.write_out_of_bounds()
except DeviceError as error:
    print(error)
"""


def benchmarks(_: Path | None, limit_s: float) -> None:
    """benchmarks/results/cuda.json."""
    run(sys.executable, "-m", "benchmarks.cuda", limit_s=limit_s)


PARTS: dict[str, Callable[[Path | None, float], None]] = {
    "build": build,
    "tests": tests,
    "benchmarks": benchmarks,
    "sanitizer": sanitizer,
}


def sources_hash() -> str:
    """A hash of the files that the results depend on."""
    digest = hashlib.sha256((ROOT / "CMakeLists.txt").read_bytes())
    for folder in ("pearl", "composer", "kernels", "runtime_templates", "tests", "benchmarks"):
        for path in sorted((ROOT / folder).rglob("*")):
            has_text = path.suffix in (".py", ".cpp", ".hpp", ".cu", ".j2") or path.parent.name == "std"
            if has_text and "results" not in path.parts:
                digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def main() -> None:
    """Run the parts, and keep what passed in build/gpu_check.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, action="append", help="only this part; may be repeated")
    parser.add_argument("--wheels", type=Path, help="a folder of wheels, used instead of a network")
    parser.add_argument("--limit-s", type=float, default=540.0, help="seconds for each command (540)")
    parser.add_argument("--again", action="store_true", help="also parts that have passed")
    parser.add_argument("--download", type=Path, metavar="FOLDER", help="only fill FOLDER with wheels for --wheels")
    parser.add_argument("--only", nargs="*", metavar="PACKAGE", help="only download these, without what they need")
    own = f"{sys.version_info[0]}.{sys.version_info[1]}"
    parser.add_argument("--python-version", default=own, help=f"of the GPU's machine ({own})")
    arguments = parser.parse_args()
    if arguments.download:
        for_it = ("--python-version", arguments.python_version, "--only-binary", ":all:")
        wanted = arguments.only or PACKAGES
        for_it = (*for_it, "--no-deps") if arguments.only else for_it
        folder = arguments.download.resolve()  # commands run in the repository's
        run(sys.executable, "-m", "pip", "download", *for_it, "--dest", folder, *wanted, limit_s=3600)
        return
    sources = sources_hash()
    state = json.loads(STATE.read_text()) if STATE.exists() else {}
    if state.get("sources") != sources:
        state = {"sources": sources, "passed": {}}
    try:
        for part in arguments.part or PARTS:
            if part in state["passed"] and not arguments.again:
                print(f"{part}: passed before")
                continue
            start = time.monotonic()
            PARTS[part](arguments.wheels and arguments.wheels.resolve(), arguments.limit_s)
            state["passed"][part] = {"seconds": round(time.monotonic() - start, 1)}
            STATE.parent.mkdir(exist_ok=True)
            STATE.write_text(json.dumps(state, indent=1) + "\n")
            print(f"{part}: passed")
    finally:  # also what a part measured that was ended
        _bring_back()


def _bring_back() -> None:
    """Copy the results to the folder $OUT, from which they come back from a lent machine."""
    if folder := os.environ.get("OUT"):
        for found in (STATE, ROOT / "benchmarks" / "results" / "cuda.json"):
            if found.exists():
                shutil.copy(found, folder)


if __name__ == "__main__":
    main()
