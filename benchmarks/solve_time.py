"""Time until an environment is solved, and peak memory, compared with other frameworks.

Seconds count from the start of the process to the end of the evaluation that finds the environment solved. The rule is
the same for all: 20 greedy episodes every 1,000 environment steps, and 20 others when their mean reaches the goal (475
for CartPole-v1, -200 for Pendulum-v1); solved means that both means reach it. A run that did not solve its environment
counts with the time it took: its row says so.

Ours is the committed example as a user starts it, composing without earlier measurements, and the program that it
wrote, started separately. Compositions below examples/zoo are composed by `pearl compose`; both times together are the
row with composing. Stable-Baselines3 uses the settings tuned in its RL Zoo. The CleanRL-style script uses the
hyperparameters that CleanRL publishes, for at most 60 s. rltools uses its own settings and its own Pendulum, in C++; it
compiles a program for each problem, so that its runs count twice, with that time and without it. Peers use one thread
of torch. Memory is the peak of the
resident memory of all processes together; each process counts the pages that it shares.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.solving import COMPILED, EPISODES, INTERVAL, SOLVED
from benchmarks.programs import environment
from benchmarks.record import ROOT, Document, Row, shown, with_others, write
from benchmarks.timing import options

COMPOSING, COMPOSED = "example, composing included", "composed program"
COMPILING = "compiling included"
SAMPLE_S = 0.05  # between readings of the memory


@dataclass(frozen=True)
class Peer:
    """A script of `benchmarks.peers`, its options, and how long it may take."""

    name: str
    module: str
    options: tuple[str, ...] = ()
    limit_s: float = 120.0


@dataclass(frozen=True)
class Task:
    """An environment, the mean return that solves it, our examples for it and the peers.

    `examples` are scripts, `zoo` compositions in examples/zoo. Evaluations are `interval` environment steps apart.
    """

    environment: str
    goal: float
    seeds: int
    examples: tuple[str, ...]
    peers: tuple[Peer, ...]
    zoo: tuple[str, ...] = ()
    interval: int = INTERVAL


def _sb3(algorithm: str, limit_s: float) -> Peer:
    name = f"Stable-Baselines3 {algorithm.upper()}, RL Zoo settings"
    return Peer(name, "sb3_solve", ("--algorithm", algorithm), limit_s)


TASKS = (
    Task(
        "CartPole-v1",
        475.0,
        5,
        ("dqn_cartpole", "ppo_cartpole"),
        (
            _sb3("dqn", 120.0),
            _sb3("ppo", 120.0),
            Peer("CleanRL-style DQN", "cleanrl_dqn", limit_s=60.0),
        ),
    ),
    Task(
        "Pendulum-v1",
        -200.0,
        5,
        ("td3_pendulum", "sac_pendulum"),
        (
            _sb3("td3", 120.0),
            _sb3("sac", 120.0),
            Peer("rltools TD3, MKL", "rltools_solve", ("--algorithm", "td3")),
            Peer("rltools SAC, MKL", "rltools_solve", ("--algorithm", "sac")),
        ),
    ),
    Task("Acrobot-v1", -100.0, 5, (), (_sb3("dqn", 600.0),), ("dqn-Acrobot-v1",)),
    Task("LunarLander-v3", 200.0, 5, (), (_sb3("dqn", 900.0),), ("dqn-LunarLander-v3",)),
    Task("MountainCarContinuous-v0", 90.0, 5, (), (_sb3("sac", 600.0),), ("td3-MountainCarContinuous-v0",)),
)
OUR_LIMIT_S = 300.0


@dataclass(frozen=True)
class Outcome:
    """One run: seconds until solved (until the end, if it was not solved), and its peak memory in MB.

    `reason` says why it could not run. `compiled` is the same run from the end of its compilation on.
    """

    seconds: float
    memory_mb: float
    solved: bool
    reason: str = ""
    compiled: Outcome | None = None


def resident_mb(session: int) -> float:
    """Memory resident in all processes of a session, in MB. Each process counts shared pages. 0 without /proc."""
    pages = 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.getsid(int(process.name)) == session:
                pages += int((process / "statm").read_text().split()[1])
        except (OSError, IndexError):
            continue  # the process has ended
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def run(
    command: Sequence[str], folder: Path, limit_s: float, more: Mapping[str, str] | None = None, line: str = SOLVED
) -> Outcome:
    """Run `command` in `folder` until it ends, and time the first line that contains `line`.

    By default that line reports a solved environment. `more` are further environment variables.
    """
    start = time.monotonic()
    with tempfile.TemporaryFile("w+", dir=folder) as errors:
        process = subprocess.Popen(
            command,
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
            env={**environment(), "PYTHONUNBUFFERED": "1", **(more or {})},
        )
        most, ended = [0.0], threading.Event()  # since the start; since the end of compiling

        def watch() -> None:
            while not ended.wait(SAMPLE_S):
                now = resident_mb(process.pid)
                most[:] = [max(peak, now) for peak in most]
                if time.monotonic() - start > limit_s:
                    process.send_signal(signal.SIGTERM)
                    return

        watcher = threading.Thread(target=watch)
        watcher.start()
        seconds, compiling = None, 0.0
        assert process.stdout is not None
        for printed in process.stdout:
            if line in printed and seconds is None:
                seconds = time.monotonic() - start
            if printed.startswith(COMPILED):
                compiling = float(printed.removeprefix(COMPILED).split()[0])
                most.append(0.0)
        code = process.wait()
        total = time.monotonic() - start
        ended.set()
        watcher.join()
        errors.seek(0)
        last = (errors.read().strip().splitlines() or [""])[-1]
    reason = f"ended with code {code}: {last[:160]}" if seconds is None and code > 0 and total < limit_s else ""
    took, solved = total if seconds is None else seconds, seconds is not None
    compiled = Outcome(took - compiling, most[-1], solved, reason) if compiling else None
    return Outcome(took, most[0], solved, reason, compiled)


def run_ours(example: str, task: Task, seed: int, folder: Path) -> dict[str, Outcome]:
    """The example in an empty folder, without earlier measurements; then the program that the example wrote."""
    home, arguments, cache = _prepared(example, task, seed, folder)
    script = ROOT / "examples" / f"{example}.py"
    composing = run([sys.executable, str(script), *arguments, "--run-dir", "first"], home, OUR_LIMIT_S, cache)
    found = {f"{example}, {COMPOSING}": composing}
    for program in home.glob("runs/*/program.py"):
        command = [sys.executable, str(program), *arguments, "--run-dir", "second"]
        found[f"{example}, {COMPOSED}"] = run(command, home, OUR_LIMIT_S, cache)
    return found


def run_zoo(name: str, task: Task, seed: int, folder: Path) -> dict[str, Outcome]:
    """A composition, composed in an empty folder without earlier measurements, and its program."""
    home, arguments, cache = _prepared(name, task, seed, folder)
    spec, program = ROOT / "examples" / "zoo" / f"{name}.toml", home / "program.py"
    command = [sys.executable, "-m", "pearl", "compose", str(spec), "--output", str(program)]
    composing = run(command, home, OUR_LIMIT_S, cache)
    if composing.reason:
        return {f"{name}, {COMPOSED}": composing}
    solving = run([sys.executable, str(program), *arguments, "--run-dir", "run"], home, OUR_LIMIT_S, cache)
    both = max(composing.memory_mb, solving.memory_mb)
    together = Outcome(composing.seconds + solving.seconds, both, solving.solved, solving.reason)
    return {f"{name}, {COMPOSING}": together, f"{name}, {COMPOSED}": solving}


def _prepared(name: str, task: Task, seed: int, folder: Path) -> tuple[Path, list[str], dict[str, str]]:
    """A new folder, arguments of a program, and environment variables that hide earlier measurements."""
    home = folder / f"{name}-{seed}"
    home.mkdir()
    arguments = ["--seed", str(seed), "--eval-interval", str(task.interval), "--eval-episodes", str(EPISODES)]
    arguments.append(f"--until-return={task.goal}")  # some environments register no threshold
    return home, arguments, {"PEARL_CACHE_DIR": str(home / "cache")}


def run_peer(peer: Peer, task: Task, seed: int, folder: Path) -> Outcome:
    """Run a peer's script."""
    command = [sys.executable, "-m", f"benchmarks.peers.{peer.module}", *peer.options]
    command += ["--seed", str(seed), "--environment", task.environment, f"--goal={task.goal}"]
    command += ["--interval", str(task.interval)]
    return run(command, folder, peer.limit_s)


def rows_of(task: Task, ours: Mapping[str, Sequence[Outcome]], theirs: Mapping[str, Sequence[Outcome]]) -> list[Row]:
    """Each of ours compared with each peer: medians of seconds and of memory.

    A run that did not solve its environment counts with the time it took, which is less than it would have needed;
    the row says how many did.
    """
    rows = []
    for unit, field, what in (("s", "seconds", "time to solve"), ("MB", "memory_mb", "memory")):
        for name, of_ours in ours.items():
            values = [getattr(outcome, field) for outcome in of_ours]
            case = f"{task.environment} {what}: {name}{solved_count(of_ours)}"
            for peer, of_peer in theirs.items():
                reason = next((outcome.reason for outcome in of_peer if outcome.reason), "")
                found = [] if reason else [getattr(outcome, field) for outcome in of_peer]
                label = peer if reason else f"{peer}{solved_count(of_peer)}"
                rows.append(Row.of(case, unit, "lower", values, label, found, reason))
    return rows


def solved_count(outcomes: Sequence[Outcome]) -> str:
    """How many runs solved the environment, unless all did."""
    solved = sum(outcome.solved for outcome in outcomes)
    return "" if solved == len(outcomes) else f" ({solved} of {len(outcomes)} seeds solved it)"


def measure(task: Task, seeds: int) -> tuple[list[Row], list[dict[str, object]]]:
    """All seeds of a task, ours and theirs in turns; rows and every run."""
    ours: dict[str, list[Outcome]] = {}
    theirs: dict[str, list[Outcome]] = {}
    runs: list[dict[str, object]] = []

    def note(group: dict[str, list[Outcome]], name: str, seed: int, outcome: Outcome) -> None:
        group.setdefault(name, []).append(outcome)
        run = {
            "environment": task.environment,
            "what": name,
            "seed": seed,
            "seconds": outcome.seconds,
            "memory_mb": outcome.memory_mb,
            "outcome": "solved" if outcome.solved else outcome.reason or "not solved",
        }
        runs.append(run)
        print("  ".join(f"{v:.1f}" if isinstance(v, float) else str(v) for v in run.values()), flush=True)

    with tempfile.TemporaryDirectory() as scratch:
        for seed in range(1, seeds + 1):
            for example in task.examples:
                for name, outcome in run_ours(example, task, seed, Path(scratch)).items():
                    note(ours, name, seed, outcome)
            for composition in task.zoo:
                for name, outcome in run_zoo(composition, task, seed, Path(scratch)).items():
                    note(ours, name, seed, outcome)
            for peer in task.peers:
                if not any(outcome.reason for outcome in theirs.get(peer.name, ())):
                    outcome = run_peer(peer, task, seed, Path(scratch))
                    if outcome.compiled:
                        note(theirs, f"{peer.name}, {COMPILING}", seed, outcome)
                    note(theirs, peer.name, seed, outcome.compiled or outcome)
    return rows_of(task, ours, theirs), runs


def main() -> None:
    parser = options(__doc__, "one seed of CartPole-v1")
    parser.add_argument("--seeds", type=int, help="seeds of each task, at most; writes nothing")
    parser.add_argument(
        "--only",
        choices=[task.environment for task in TASKS],
        action="append",
        help="these tasks; the record keeps the others, and says of which commit they are",
    )
    arguments = parser.parse_args()
    tasks = TASKS[:1] if arguments.quick else TASKS
    most = 1 if arguments.quick else arguments.seeds
    rows: list[Row] = []
    runs: list[Document] = []
    for task in tasks:
        if arguments.only is None or task.environment in arguments.only:
            found, noted = measure(task, min(task.seeds, most or task.seeds))
            rows += shown(found)
            runs += noted
    if most is not None:
        return
    threads = os.cpu_count() or 1
    done = [task.environment for task in tasks if arguments.only is None or task.environment in arguments.only]
    rows, runs, origins = with_others("solve_time", done, [t.environment for t in TASKS], rows, runs, "environment")
    write("solve_time", "make bench-solve", threads, rows, runs=runs, **origins)


if __name__ == "__main__":
    main()
