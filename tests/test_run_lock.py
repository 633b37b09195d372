"""The lock of a run folder."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from pearl.errors import ConfigurationError
from pearl.runtime.options import parse_options
from pearl.runtime.run_folder import RunFolder
from pearl.runtime.run_lock import RunLock

HOLDER = textwrap.dedent(
    """
    import os, sys, time
    from pathlib import Path
    from pearl.runtime.run_lock import RunLock

    lock = RunLock(Path(sys.argv[1]))
    if sys.argv[2] == "fork" and os.fork() == 0:
        os.close(1)  # a worker that an environment started, and forgot
        time.sleep(600)
    print("held", flush=True)
    sys.stdin.readline()
    """
)


class Holder:
    """Another process that holds a folder."""

    def __init__(self, folder: Path, *, fork: bool = False) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(folder), "fork" if fork else "alone"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "held\n"


@pytest.fixture
def hold() -> Iterator[type[Holder]]:
    """Starts holders; whatever is left of them is killed."""
    started: list[Holder] = []

    class Kept(Holder):
        def __init__(self, folder: Path, *, fork: bool = False) -> None:
            super().__init__(folder, fork=fork)
            started.append(self)

    yield Kept
    for holder in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(holder.process.pid, signal.SIGKILL)
        holder.process.communicate(timeout=10)


def test_a_second_run_is_refused_and_told_by_whom(tmp_path: Path, hold: type[Holder]) -> None:
    holder = hold(tmp_path)
    with pytest.raises(ConfigurationError) as refused:
        RunLock(tmp_path)
    message = str(refused.value)
    assert f"process {holder.process.pid} on " in message
    assert sys.executable in message
    assert "since 20" in message
    assert "--run-dir" in message


@pytest.mark.parametrize("fork", [False, True], ids=["alone", "with a child that outlives it"])
def test_the_lock_of_a_dead_process_does_not_block(tmp_path: Path, hold: type[Holder], fork: bool) -> None:
    holder = hold(tmp_path, fork=fork)
    holder.process.kill()
    holder.process.wait(10)
    lock = RunLock(tmp_path)
    lock.release()
    assert not list(tmp_path.iterdir()), "the lock leaves nothing"


def test_a_process_does_not_take_a_folder_twice(tmp_path: Path, hold: type[Holder]) -> None:
    lock = RunLock(tmp_path)
    with pytest.raises(ConfigurationError, match="this process"):
        RunLock(tmp_path)
    blocked = subprocess.run(
        [sys.executable, "-c", HOLDER, str(tmp_path), "alone"], capture_output=True, text=True, timeout=60
    )
    assert f"process {os.getpid()}" in blocked.stderr, "the attempt must not have ended the first lock"
    lock.release()
    lock.release()
    hold(tmp_path)


def test_a_folder_that_was_moved_is_made_again(tmp_path: Path, hold: type[Holder]) -> None:
    folder = tmp_path / "run"
    lock = RunLock(folder)
    assert not lock.renew()
    folder.rename(tmp_path / "moved")
    assert lock.renew()
    with pytest.raises(ConfigurationError, match="this process"):
        RunLock(folder)
    folder.rename(tmp_path / "moved again")
    hold(folder)
    with pytest.raises(ConfigurationError, match="belongs to a run that goes on"):
        lock.renew()
    lock.release()


def test_a_run_whose_folder_was_taken_over_writes_no_more_into_it(
    tmp_path: Path, hold: type[Holder], caplog: pytest.LogCaptureFixture
) -> None:
    options = parse_options("", timesteps=1, run_dir=tmp_path / "run", arguments=[])
    folder = RunFolder(options)
    assert not folder.keep()
    (tmp_path / "run").rename(tmp_path / "moved")
    assert folder.keep()
    assert folder.error(options.run_dir) is None
    (tmp_path / "run").rename(tmp_path / "moved again")
    hold(tmp_path / "run")
    caplog.clear()
    assert folder.keep()
    assert folder.is_lost(options.run_dir)
    assert folder.error(options.checkpoint_dir) is None, "nobody has taken that one"
    assert any("another run began there" in message for message in caplog.messages)
    assert not folder.keep(), "it is told once"
    folder.release()
    assert (tmp_path / "run" / ".lock").exists(), "the other run's"


def test_a_folder_that_cannot_be_made_for_a_while_is_not_given_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    parent = tmp_path / "parent"
    options = parse_options("", timesteps=1, run_dir=parent / "run", arguments=[])
    folder = RunFolder(options)
    parent.rename(tmp_path / "moved")
    parent.touch()
    assert not folder.keep()
    assert "cannot be written" in str(folder.error(options.checkpoint_dir))
    count = len(caplog.messages)
    assert not folder.keep()
    assert len(caplog.messages) == count, "it is told once"
    parent.unlink()
    assert folder.keep()
    assert folder.error(options.run_dir) is None
    assert folder.error(options.checkpoint_dir) is None
    assert (options.checkpoint_dir / ".lock").exists()
    folder.release()


def test_a_damaged_record_is_not_shown(tmp_path: Path, hold: type[Holder]) -> None:
    hold(tmp_path)
    (tmp_path / ".lock").write_bytes(b"\xff\x00[")
    with pytest.raises(ConfigurationError, match="a process that could not be named"):
        RunLock(tmp_path)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match=r"cannot be written: .*Choose another with --checkpoint-dir"):
        RunLock(tmp_path / "file" / "folder", "--checkpoint-dir")


@pytest.mark.parametrize("option", ["--run-dir", "--checkpoint-dir"])
def test_a_folder_behind_a_link_to_itself_is_named(tmp_path: Path, option: str) -> None:
    (tmp_path / "loop").symlink_to("loop")
    options = parse_options(
        "", timesteps=1, run_dir=tmp_path / "run", arguments=[option, str(tmp_path / "loop" / "folder")]
    )
    with pytest.raises(ConfigurationError, match=rf"cannot be written: .*Choose another with {option}"):
        RunFolder(options)
