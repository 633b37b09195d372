"""How many experiences a second does a composed program train, beside other frameworks? The paper's Table IV.

Ours is the program as the composer writes it, run with `--bench`: prioritized sampling, gathering, training and the
update of priorities, free-running. Actors, which nothing else here has, are left out of the program for the
comparison, and measured after it as a variant. Programs and peers take turns on one core with one thread each, all
with a full replay. `--quick` is a look at three cases, and writes nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks import pong
from benchmarks.peers.training import Case, Side, environment
from benchmarks.record import Row, write
from benchmarks.replay import ONE_THREAD

PEERS = {"sb3_training": "stable-baselines3", "rllib_training": "RLlib"}
CASES = (
    Case("dqn", "CartPole-v1", (64, 64), 32, 100_000),
    Case("dqn", "CartPole-v1", (64, 64), 512, 100_000),
    Case("ddpg", "MountainCarContinuous-v0", (256, 128), 32, 100_000),
    Case("ddpg", "MountainCarContinuous-v0", (256, 128), 512, 100_000),
    Case("sac", "Pendulum-v1", (256, 256), 256, 100_000),
    Case("dqn", pong.ENV, (), 32, 5_000),
)
QUICK = (0, 2, 4)
ENVS = 8  # of the one actor
LAUNCH = "session.launch_actors(dcqs, wsq)"
LIMIT_S = 600.0  # of a program's run
FILLING_RATIO = 1e-3  # samples per transition while the replay is filled: next to none


@dataclass(frozen=True)
class Plan:
    """How often and how long: `with_actors` of the alternations measure the whole program too."""

    alternations: int = 5
    with_actors: int = 3
    ours_s: float = 2.0
    theirs_s: float = 1.0

    @classmethod
    def quick(cls) -> Plan:
        """A look."""
        return cls(alternations=2, with_actors=1, ours_s=1.0, theirs_s=0.5)


@dataclass(frozen=True)
class Composed:
    """A composed program, the same without its actors, and the learner that the composer placed ("torch", ...)."""

    whole: Path
    alone: Path
    learner: str


def compose(case: Case, folder: Path) -> Composed:
    """Compose the program of a case, for one thread of this machine's CPU."""
    from pearl import Composer
    from pearl.algorithms import DDPG, DQN, SAC

    if case.hidden:
        trainer: type = {"dqn": DQN, "ddpg": DDPG, "sac": SAC}[case.algorithm]
        settings: dict[str, object] = {"hidden_sizes": case.hidden}
        if trainer is DQN:
            settings["double"] = False  # as its peers
    else:
        trainer, settings = pong.PongDQN, {}
    composer = Composer(progress=False, calibration=folder / "calibration.json")
    composer.set_actors(1, env=case.environment, envs_per_actor=ENVS)
    composer.set_train_function(learner=trainer, **settings)
    composer.set_replay(case.slots)
    composer.set_training(batch_size=case.batch, learning_starts=case.slots, replay_ratio=FILLING_RATIO)
    replay, learner = composer.run()
    learner = dataclasses.replace(learner, threads=1)
    whole = composer.runtime_gen(
        replay=replay, learner=learner, path=folder / f"batch_{case.batch}.py", timesteps=2 * case.slots
    )
    return split(whole)


def split(whole: Path) -> Composed:
    """Write the program without its actors beside it."""
    text = whole.read_text(encoding="utf-8")
    if text.count(LAUNCH) != 1:
        raise RuntimeError(f"{whole} was expected to start its actors by `{LAUNCH}`, once; adapt benchmarks/eps.py.")
    alone = whole.with_name(f"{whole.stem}_alone.py")
    alone.write_text(text.replace(LAUNCH, "pass"), encoding="utf-8")
    found = re.search(r"\blearner = (\w+?)Learner\(", text)
    return Composed(whole, alone, found.group(1).lower() if found else "composed")


def run(program: Path, *options: object, all_cores: bool = False) -> None:
    """Run a program to its end, on this process's core or on all."""
    everywhere: Callable[[], None] | None = None
    if all_cores and hasattr(os, "sched_setaffinity"):

        def everywhere() -> None:
            os.sched_setaffinity(0, range(os.cpu_count() or 1))

    done = subprocess.run(
        [sys.executable, str(program), *map(str, options)],
        env=environment(),
        cwd=program.parent,
        preexec_fn=everywhere,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
    )
    if done.returncode:
        raise RuntimeError(f"{program.name} ended with code {done.returncode}:\n{done.stdout[-2000:]}")


def fill(program: Path, case: Case, checkpoints: Path) -> None:
    """Collect until the replay is full and write a checkpoint, from which measurements start."""
    steps = case.slots + 2 * ENVS * 100  # what is still on its way at the end is not stored
    folder = program.parent / "filling"
    options = ("--run-dir", folder, "--checkpoint-dir", checkpoints, "--eval-episodes", 0, "--until-return", "none")
    run(program, "--timesteps", steps, "--checkpoint-interval", 10 * steps, *options, all_cores=True)


def bench(program: Path, checkpoints: Path, seconds: float, *, all_cores: bool = False) -> float:
    """Experiences trained per second by a program with `--bench`, from the filled replay on."""
    folder = program.parent / "bench"
    options = ("--bench-seconds", seconds, "--resume", "--checkpoint-dir", checkpoints, "--run-dir", folder)
    run(program, "--bench", *options, all_cores=all_cores)
    return float(json.loads((folder / "bench.json").read_text(encoding="utf-8"))["measured_eps"])


def measure(case: Case, composed: Composed, checkpoints: Path, plan: Plan, peers: Sequence[str]) -> Iterator[Row]:
    """Ours and every peer in turns, then ours with its actors."""
    alone: list[float] = []
    beside: list[float] = []
    with ExitStack() as stack:
        sides = [stack.enter_context(Side(peer, case, PEERS[peer])) for peer in peers]
        theirs: dict[str, list[float]] = {side.module: [] for side in sides}
        for turn in range(plan.alternations):
            alone.append(bench(composed.alone, checkpoints, plan.ours_s))
            for side in sides:
                if side.reason:
                    continue
                try:
                    theirs[side.module].append(side.train(plan.theirs_s))
                except RuntimeError as error:
                    side.reason = str(error)
            if turn < plan.with_actors:
                beside.append(bench(composed.whole, checkpoints, plan.ours_s, all_cores=True))
    for side in sides:
        values = [] if side.reason else theirs[side.module]
        yield eps_row(f"{case.title}, {composed.learner} learner", alone, side.name, values, side.reason)
    yield eps_row(f"{case.title}, {composed.learner} learner beside its actors", beside, "without them", alone, "")


def eps_row(case: str, ours: Sequence[float], peer: str, theirs: Sequence[float], reason: str) -> Row:
    """Medians of both sides, and the spread of ours."""
    middle = statistics.median(theirs) if theirs else None
    return Row(case, statistics.median(ours), "EPS", "higher", (min(ours), max(ours)), len(ours), peer, middle, reason)


def measure_all(cases: Sequence[Case], plan: Plan, peers: Sequence[str], scratch: Path) -> Iterator[Row]:
    """Every case; those of one algorithm share what they have collected."""
    for case in cases:
        if case.environment == pong.ENV and (why := pong.missing()):
            print(f"left out: {case.title}: {why}", file=sys.stderr)
            continue
        folder = scratch / f"{case.algorithm}-{case.environment}"
        folder.mkdir(exist_ok=True)
        composed, checkpoints = compose(case, folder), folder / "checkpoints"
        if not checkpoints.exists():
            fill(composed.whole, case, checkpoints)
        yield from measure(case, composed, checkpoints, plan, peers)


def pinned(module: str) -> None:
    """Start over on one core with every library told to use one thread, unless that has been done."""
    if all(os.environ.get(name) == value for name, value in ONE_THREAD.items()):
        return
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    os.execve(sys.executable, [sys.executable, "-m", module, *sys.argv[1:]], {**os.environ, **ONE_THREAD})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three cases, two alternations; writes nothing")
    parser.add_argument("--peers", nargs="*", default=list(PEERS), choices=PEERS, metavar="NAME", help=", ".join(PEERS))
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose names hold this; writes nothing")
    arguments = parser.parse_args()
    pinned("benchmarks.eps")
    plan = Plan.quick() if arguments.quick else Plan()
    cases = [c for i, c in enumerate(CASES) if arguments.only in c.title and (i in QUICK or not arguments.quick)]
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for row in measure_all(cases, plan, arguments.peers, Path(scratch)):
            rows.append(row)
            against = row.reason if row.theirs is None else f"{row.theirs:9,.0f}  {row.ratio:.2f}x"
            print(f"{row.case:66} {row.ours:9,.0f} EPS   {row.peer:42} {against}", flush=True)
    if not arguments.quick and not arguments.only and len(arguments.peers) == len(PEERS):
        write("eps", "make bench-eps", threads=1, rows=rows)


if __name__ == "__main__":
    main()
