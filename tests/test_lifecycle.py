"""How a run begins, is disturbed and ends: its folder, signals, its output, errors of the user's code."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from programs import Running, make_program, run, running, summary
from trainers import Sluggish

from pearl import load_policy
from pearl.errors import ConfigurationError
from pearl.runtime.checkpoint import CheckpointState, save_checkpoint
from pearl.runtime.entry import run_program
from pearl.runtime.interruption import Interruption, stop_signals
from pearl.runtime.run_lock import RunLock


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory, quick_profiles: None) -> Path:
    """Its environment prints on both standard streams, in the host and in the actors."""
    return make_program(tmp_path_factory.mktemp("program"), env="Chatty-v0")


@pytest.fixture(scope="module")
def own_trainer(tmp_path_factory: pytest.TempPathFactory, quick_profiles: None) -> Path:
    """A program whose trainer runs in Python."""
    return make_program(tmp_path_factory.mktemp("own"), env="Counting-v0", trainer=Sluggish, settings={"pause_s": 0.0})


def edited(program: Path, folder: Path, old: str, new: str) -> Path:
    """A copy of the program with `new` in the place of `old`."""
    text = program.read_text()
    assert text.count(old) == 1
    copy = Path(shutil.copy(program, folder))
    copy.write_text(text.replace(old, new))
    return copy


def under_way(started: Running, run_dir: Path) -> None:
    """Wait until data arrive."""
    episodes = run_dir / "episodes.csv"
    started.until(lambda: episodes.exists() and episodes.read_text().count("\n") > 5)


# --- one run per folder, and signals --------------------------------------------------------------------------------


def test_a_second_run_leaves_the_first_alone_and_a_closed_terminal_saves_it(program: Path, tmp_path: Path) -> None:
    arguments = ("--timesteps", "500000", "--eval-episodes", "0", "--run-dir", str(tmp_path))
    with running(program, *arguments) as first:
        under_way(first, tmp_path)
        code, output = run(program, *arguments)
        assert code == 1
        assert f"process {first.process.pid} on " in output
        assert "--run-dir" in output
        assert "Traceback" not in output
        assert not list(tmp_path.rglob("earlier-*")), "the first run's files were moved away"
        code, output = run(program, "--run-dir", str(tmp_path / "b"), "--checkpoint-dir", str(tmp_path / "checkpoints"))
        assert code == 1
        assert "--checkpoint-dir" in output
        os.killpg(first.process.pid, signal.SIGHUP)  # to every process of the terminal, the actors too
        assert first.wait(60) == 129, first.output
        assert "SIGHUP received" in first.output
        for wrong in ("died", "Error", "Traceback"):
            assert wrong not in first.output
    assert summary(tmp_path)["actor_restarts"] == 0
    assert list((tmp_path / "checkpoints").glob("checkpoint-*"))


@pytest.fixture
def hangup() -> Iterator[Any]:
    """Restores what SIGHUP does."""
    before = signal.getsignal(signal.SIGHUP)
    yield
    signal.signal(signal.SIGHUP, before)


def test_nohup_stays(hangup: None) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert signal.SIGHUP not in stop_signals()
    with Interruption() as interruption:
        signal.raise_signal(signal.SIGHUP)
        assert interruption.signal is None
        signal.raise_signal(signal.SIGTERM)
        assert interruption.exit_code == 143
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_a_program_runs_in_any_thread(program: Path, tmp_path: Path) -> None:
    """Only the main thread may handle signals."""
    driver = program.with_name("in_a_thread.py")
    driver.write_text(
        """\
import threading

import program

if __name__ == "__main__":
    codes = []
    thread = threading.Thread(target=lambda: codes.append(program.main()))
    thread.start()
    thread.join()
    raise SystemExit(codes != [0])
"""
    )
    arguments = ("--timesteps", "200", "--eval-episodes", "0", "--run-dir", str(tmp_path / "run"))
    code, output = run(driver, *arguments)
    assert code == 0, output
    assert summary(tmp_path / "run")["env_steps"] >= 200


def test_only_a_second_request_of_a_person_stops_at_once(hangup: None, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with Interruption() as interruption:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)  # from the terminal and from a parent process
        now[0] += 2
        signal.raise_signal(signal.SIGHUP)
        with pytest.raises(SystemExit) as ended:
            run_program(lambda: signal.raise_signal(signal.SIGTERM) or 0)
        assert ended.value.code == 143
    assert interruption.exit_code == 130


def test_what_a_program_imports_is_no_garbage() -> None:
    code = """
import atexit, gc
atexit.register(lambda: print(gc.get_freeze_count() > frozen[0]))  # runs last
from pearl.runtime.entry import begin_program, run_program
begin_program()
assert not gc.isenabled()
import numpy
frozen, kept = [], []
def main():
    assert gc.isenabled()
    frozen.append(gc.get_freeze_count())
    kept.extend([] for _ in range(10_000))
    assert frozen[0] > 10_000, frozen
    return 7
run_program(main)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (7, "True\n", "")


def test_ctrl_c_during_pearls_first_imports_is_one_line() -> None:
    code = """
import signal, sys
class Interrupting:
    def find_spec(self, name, path, target=None):
        if name in ("pearl.runtime.entry", "logging"):
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Interrupting())
from pearl.runtime import begin_program
begin_program()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (130, "Interrupted.\n")


def test_ctrl_c_during_imports_is_one_line(program: Path, tmp_path: Path) -> None:
    first = "    begin_program(actors=1)  # before the imports\n"
    slow = edited(
        program, tmp_path, first, f"{first}    print('importing', flush=True)\n    __import__('time').sleep(60)\n"
    )
    with running(slow) as started:
        started.until(lambda: "importing" in started.output)
        started.interrupt()
        assert started.wait(30) == 130
        assert started.output == "importing\nInterrupted.\n"


@pytest.mark.parametrize(
    ("left", "name"),
    [
        ('threading.Thread(target=time.sleep, args=(600,), name="feed").start()', "feed"),
        ('multiprocessing.Process(target=time.sleep, args=(600,), name="game").start()', r"game \(process \d+\)"),
    ],
)
def test_what_an_environment_left_is_named(left: str, name: str) -> None:
    code = f"""
import concurrent.futures, multiprocessing, threading, time
from pearl.runtime.entry import begin_program, run_program

begin_program()
def main():
    {left}
    concurrent.futures.ThreadPoolExecutor(1).submit(abs, -1).result()  # Python ends its thread
    return 0
run_program(main)
"""
    options: Any = {"stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    with subprocess.Popen([sys.executable, "-c", code], **options) as program:
        assert program.stderr is not None
        assert re.fullmatch(
            f"The run is over. Python waits for what an environment or a callback started: {name}. "
            "Ctrl-C ends the wait.\n",
            program.stderr.readline(),
        )
        program.send_signal(signal.SIGINT)
        assert program.wait(30) == 130
        with contextlib.suppress(ProcessLookupError):
            os.killpg(program.pid, signal.SIGKILL)


# --- output that nobody reads ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shell",
    [
        pytest.param("{} 2>&1 | head -1", id="a reader that leaves", marks=pytest.mark.slow),
        pytest.param("{} >/dev/full 2>&1", id="a full disk"),
        pytest.param("{} 0<&- 1>&- 2>&-", id="closed", marks=pytest.mark.slow),
    ],
)
def test_a_run_without_readers_trains_to_its_end(program: Path, tmp_path: Path, shell: str) -> None:
    arguments = ("--timesteps", "1000", "--eval-episodes", "2", "--plot", "--run-dir", str(tmp_path / "run"))
    command = shlex.join([sys.executable, str(program), *arguments])
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", shell.format(command)], capture_output=True, timeout=120, cwd=tmp_path
    )
    assert done.returncode == 0, (tmp_path / "run" / "run.log").read_text()
    found = summary(tmp_path / "run")
    assert found["env_steps"] >= 1000
    assert found["actor_restarts"] == 0
    assert found["last"]["episodes"] == 2
    assert "Last weights:" in (tmp_path / "run" / "run.log").read_text()


@pytest.mark.parametrize(
    ("encoding", "written"),
    [
        ("ascii", rb"\xe9 \u65e5 \udcff ~*"),
        ("ascii:surrogateescape", rb"\xe9 \u65e5 \udcff ~*"),
        ("latin-1", b"\xe9 \\u65e5 \\udcff ~*"),
        ("utf-8:strict", "é 日 ".encode() + rb"\udcff " + "…⠋".encode()),
        ("utf-8:surrogateescape", "é 日 ".encode() + b"\xff " + "…⠋".encode()),
        ("ascii:replace", b"? ? ? ??"),
    ],
)
def test_characters_that_standard_output_cannot_encode_are_escaped(encoding: str, written: bytes) -> None:
    code = (
        "from pearl.standard_streams import keep_standard_streams; keep_standard_streams(); "
        "print('\\xe9 \\u65e5 \\udcff \\u2026\\u280b', end='')"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        capture_output=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONIOENCODING": encoding, "PYTHONPATH": str(Path(__file__).parents[1])},
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, written, b"")


# --- errors of the user's code --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "debug"), [((), False), (("--serial",), True)], ids=["parallel", "serial and debug"])
def test_a_trainer_that_raises_is_told_with_file_line_and_log(
    own_trainer: Path, tmp_path: Path, mode: tuple[str, ...], debug: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = edited(own_trainer, tmp_path, '"pause_s": 0.0', '"pause_s": "oops"')
    if debug:
        monkeypatch.setenv("PEARL_DEBUG", "1")
    code, output = run(program, "--run-dir", str(tmp_path / "run"), *mode)
    assert code == 1
    message = next(line for line in output.splitlines() if line.startswith("Error:"))
    assert "TypeError" in message
    assert "trainers.py, line " in message
    assert ", in update_policy)" in message
    log = tmp_path / "run" / "run.log"
    assert str(log) in message
    assert "Traceback (most recent call last)" in log.read_text()
    assert "time.sleep(self.pause_s)" in log.read_text()
    assert ("time.sleep(self.pause_s)" in output) == debug


def test_a_training_step_that_does_not_end_is_named_and_holds_no_second_ctrl_c_up(
    own_trainer: Path, tmp_path: Path
) -> None:
    program = edited(own_trainer, tmp_path, '"pause_s": 0.0', '"pause_s": 1_000_000')
    start = 'if __name__ == "__main__":'
    patience = "import pearl.runtime.run as its\n\nits._LONG_STEP_S = its._LONG_LAST_STEP_S = 0.2\n\n\n"
    program.write_text(program.read_text().replace(start, f"{patience}{start}"))
    with running(program, "--run-dir", str(tmp_path / "run")) as started:
        started.until(lambda: "Ctrl-C stops the run" in started.output)
        started.interrupt()
        started.until(lambda: "A second signal (Ctrl-C) ends the run at once" in started.output)
        time.sleep(1.1)  # sooner it would count as the same one
        started.interrupt()
        assert started.wait(60) == 130, started.output
    assert started.output.count("A training step of Sluggish has been under way for") == 2
    assert "good checkpoint is" in started.output
    assert started.output.endswith("\nInterrupted.\n")


# --- disks and folders that fail ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_outlives_a_locked_checkpoint_folder_and_a_run_folder_that_goes(program: Path, tmp_path: Path) -> None:
    results, saved = tmp_path / "results", tmp_path / "saved"
    saved.mkdir()
    options = ("--timesteps", "5_000_000", "--checkpoint-interval", "2000", "--eval-episodes", "0", "--plot")
    holder = os.open(saved, os.O_RDONLY)
    fcntl.flock(holder, fcntl.LOCK_EX)
    with running(program, *options, "--run-dir", str(results), "--checkpoint-dir", str(saved)) as started:
        log = results / "run.log"
        started.until(lambda: log.exists() and "It is tried again in" in log.read_text())
        os.close(holder)
        started.until(lambda: "could be written again" in log.read_text())
        assert list(saved.glob("checkpoint-*"))
        results.rename(tmp_path / "moved")
        under_way(started, results)
        shutil.rmtree(results)
        under_way(started, results)
        started.interrupt()
        assert started.wait(60) == 130, started.output
        assert started.output.count("was moved or deleted. The run goes on") == 2
        assert "Traceback" not in started.output
    assert "SIGINT" in summary(results)["stopped"]
    assert (results / "weights.safetensors").exists()
    assert (tmp_path / "moved" / "episodes.csv").exists()


def test_a_run_whose_folder_was_deleted_leaves_a_policy_all_the_same(program: Path, tmp_path: Path) -> None:
    results = tmp_path / "results"
    options = ("--timesteps", "5_000_000", "--eval-episodes", "0", "--run-dir", str(results))
    with running(program, *options) as started:
        under_way(started, results)
        before = {name: (results / name).read_bytes() for name in ("policy.json", "composition.json")}
        results.rename(tmp_path / "moved")
        started.until(lambda: all((results / name).exists() for name in before))
        started.interrupt()
        assert started.wait(60) == 130, started.output
    assert {name: (results / name).read_bytes() for name in before} == before
    load_policy(results)


def test_a_run_that_can_save_nothing_names_no_checkpoint(program: Path, tmp_path: Path) -> None:
    end = "        return session.finish()\n"
    full = edited(
        program,
        tmp_path,
        end,
        f"""        from pearl.errors import CheckpointError

        def save_last(**options):
            raise CheckpointError("The disk is full.")

        session._saver.save_last = save_last
        (options.run_dir / "summary.json").mkdir()
{end}""",
    )
    code, output = run(full, "--timesteps", "150", "--eval-episodes", "0", "--run-dir", str(tmp_path / "run"))
    assert code == 1
    assert "Weights and summary cannot be written" in output
    assert "No checkpoint has them." in output
    assert output.endswith("Error: The disk is full.\n")


def test_checkpoints_that_cannot_be_moved_aside_are_named_and_left(program: Path, tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    checkpoint = save_checkpoint(checkpoints, CheckpointState(1))
    (checkpoints / "earlier-001").symlink_to("nowhere")
    code, output = run(program, "--run-dir", str(tmp_path))
    assert code == 1
    assert f"The checkpoints of an earlier run in {checkpoints} cannot be moved aside: [Errno 17]" in output
    assert "with --resume.\n" in output
    assert (checkpoint / "manifest.json").exists()


@pytest.mark.slow
def test_a_run_whose_folder_another_took_keeps_its_state_elsewhere(
    program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    results = tmp_path / "results"
    options = ("--timesteps", "5_000_000", "--eval-interval", "3000", "--eval-episodes", "1", "--plot")
    with running(program, *options, "--run-dir", str(results)) as started:
        under_way(started, results)
        os.kill(started.process.pid, signal.SIGSTOP)  # it must not make its folder again first
        results.rename(tmp_path / "moved")
        locks = [RunLock(results), RunLock(results / "checkpoints")]
        os.kill(started.process.pid, signal.SIGCONT)
        started.until(lambda: started.output.count("another run began there") == 2)
        started.until(lambda: "greedy" in started.output)
        killed: set[int] = set()
        while len(killed) < 3:
            victim = started.until(lambda: [pid for pid in started.actor_pids() if pid not in killed])[0]
            os.kill(victim, signal.SIGKILL)
            killed.add(victim)
        assert started.wait(60) == 1, started.output
        output = started.output
    assert "Error: Actors died 3 times" in output
    assert "Traceback" not in output
    (kept,) = tmp_path.glob("pearl-checkpoint-*/checkpoint-*")
    assert f"was written to {kept} instead" in output
    found = {path.name for path in results.rglob("*")}
    assert found.isdisjoint({"run.log", "summary.json", "weights.safetensors", "learning_curve.png", kept.name})
    for lock in locks:
        lock.release()


# --- runs that cannot train -----------------------------------------------------------------------------------------


def test_a_run_without_a_training_step_says_why(program: Path, tmp_path: Path) -> None:
    goal = ("--eval-episodes", "0", "--until-return", "9.5")
    code, output = run(program, "--serial", "--timesteps", "50", *goal, "--run-dir", str(tmp_path))
    assert code == 0, output
    assert "Without evaluations (--eval-episodes 0), the run does not stop at a return of 9.5." in output
    assert "warning: This run will not train: it ends after 50 environment steps" in output
    assert "No training step was done. It begins once 100 transitions are stored (learning_starts 100" in output
    code, output = run(program, "--resume", "--timesteps", "50", "--eval-episodes", "0", "--run-dir", str(tmp_path))
    assert code == 0, output
    assert "Nothing is left to train" in output


def test_a_program_that_could_not_train_is_not_written(tmp_path: Path, quick_profiles: None) -> None:
    with pytest.raises(ConfigurationError, match=r"A run of 100 .* would not train: learning_starts is 100 .*Raise"):
        make_program(tmp_path, env="Chatty-v0", timesteps=100)
    assert not list(tmp_path.glob("*.py"))
