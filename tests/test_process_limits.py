"""Limits of the shell and of the machine's users: one message that names the limit and what to do, no traceback."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pearl.cache_folder import cache_folder
from pearl.errors import ConfigurationError
from pearl.ipc import shared_buffer
from pearl.process_limits import limit_reached

# What a generated program begins with.
PROGRAM = """
from pearl.runtime.entry import begin_program, run_program
begin_program()
{imports}
def main():
    {work}
    return 0
run_program(main)
"""


def under(limit: str, *command: object, folder: Path) -> str:
    """What the command says to a shell that has set `limit`; it must fail in good order."""
    words = " ".join(f"'{word}'" for word in command)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        # Under a limit of file sizes, Python 3.11 writes parts of compiled modules, which no later process can import.
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    ran = subprocess.run(
        ["bash", "-c", f"{limit}; exec {words}"],
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 1, ran.stderr
    assert "Traceback" not in ran.stderr
    last = ran.stderr.strip().splitlines()[-1]
    assert last.startswith("Error: ")
    return last


@pytest.mark.parametrize(
    ("command", "kilobytes"), [("devices", 300_000), ("compose", 600_000), ("program", 600_000)]
)  # discovering devices loads no torch, so it fits into less than the others need
def test_little_memory_that_may_be_mapped(command: str, kilobytes: int, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(imports="import torch", work="pass"))
    arguments = {"devices": ("-m", "pearl", "devices"), "compose": ("-m", "pearl", "compose", "absent.toml")}
    limit = f"ulimit -v {kilobytes}"
    said = under(limit, sys.executable, *arguments.get(command, (program,)), folder=tmp_path)
    assert f"{kilobytes * 1024 / 1e6:,.0f} MB of memory (ulimit -v" in said
    assert "ulimit -v unlimited" in said


@pytest.mark.parametrize(
    ("imports", "work"),
    [
        pytest.param("", "held = [open('/dev/null') for _ in range(100)]", id="in-main"),
        pytest.param("held = [open('/dev/null') for _ in range(100)]", "pass", id="while-importing"),
    ],
)
def test_few_files_that_may_be_open(imports: str, work: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(imports=imports, work=work))
    said = under("ulimit -n 24", sys.executable, program, folder=tmp_path)
    assert "may have 24 at once (ulimit -n)" in said
    assert "ulimit -n 1024" in said


def test_small_files_that_may_be_written(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    imports, work = "from pearl.ipc.queues import WeightSyncQueue", "WeightSyncQueue(5000)"
    program.write_text(PROGRAM.format(imports=imports, work=work))
    said = under("ulimit -f 10", sys.executable, program, folder=tmp_path)
    assert "may have 10,240 bytes in this process (ulimit -f), which are too few (OSError: [Errno 27] File" in said


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("HOME", "XDG_CACHE_HOME", "PEARL_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", unknown)
    with pytest.raises(ConfigurationError, match=r"No home folder is known: .* Set HOME .* or set PEARL_CACHE_DIR"):
        cache_folder()


def test_a_working_folder_that_was_deleted(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    said = under("cd gone && rmdir ../gone", sys.executable, "-m", "pearl", "devices", folder=tmp_path)
    assert "The working folder was deleted, so paths that begin there name nothing." in said


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.EMFILE, "Too many open files"), "ulimit -n"),
        (RuntimeError("unable to open shared memory: Too many open files"), "ulimit -n"),
        (RuntimeError("can't start new thread"), "ulimit -u"),
        (MemoryError(), "MemoryError): this process may have"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "Memory is short"),
        (ImportError("libtorch.so: failed to map segment from shared object"), "Memory is short"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to"), "Memory is short"),
        (KeyError("getpwuid(): uid not found: 54321"), "Set HOME"),
    ],
)
def test_errors_that_a_limit_makes(error: Exception, said: str) -> None:
    for found in (limit_reached(error), limit_reached(_caused_by(error))):
        assert found is not None
        assert said in found


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOENT, "No"), OSError(errno.EFBIG, "x"), ValueError("x"), RuntimeError("deadlock")]
)
def test_other_errors_are_no_limit(error: Exception) -> None:
    assert limit_reached(error) is None


def _caused_by(error: Exception) -> Exception:
    try:
        raise ValueError("what came of it") from error
    except ValueError as found:
        return found


def test_shared_memory_is_closed_although_the_interpreter_has_forgotten_the_module(monkeypatch) -> None:
    buffer = shared_buffer.SharedBuffer(64)
    descriptor = buffer.descriptor
    monkeypatch.setattr(shared_buffer, "os", None)  # as when an interpreter ends
    del buffer
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
