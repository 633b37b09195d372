"""Temporary folders of remote Learners: none stays behind for long, and none of a living one is taken."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from pearl.remote.scratch import ScratchFolder

HOLD = """
import pathlib, sys
from pearl.remote.scratch import ScratchFolder
folder = ScratchFolder(pathlib.Path(sys.argv[1]))
print(folder.path, flush=True)
input()
"""


def test_folders_of_killed_processes_are_removed_by_the_next(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    other = Path(process.stdout.readline().strip())
    (other / "states").mkdir()
    long_ago = time.time() - 3600
    os.utime(other, (long_ago, long_ago))
    ScratchFolder(tmp_path).remove()
    assert other.is_dir(), "its process lives"
    process.send_signal(signal.SIGKILL)
    process.wait()
    mine = ScratchFolder(tmp_path)
    assert list(tmp_path.iterdir()) == [mine.path]
    mine.remove()
    mine.remove()
    assert not list(tmp_path.iterdir())
