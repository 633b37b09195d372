"""Experiences trained per second by composed programs and by the training loops of other frameworks (Table IV).

Ours is the program that the composer writes, run with `--bench`: prioritized sampling, gathering, training, update of
the priorities. Stable-Baselines3's `train()` samples uniformly, as it has no prioritized replay. RLlib's DQN samples by
priority; its own training loop is timed without environment steps. RLlib has no DDPG, and only its DQN with linear
layers is compared. rltools (with MKL) has SAC, but neither DQN nor DDPG in its Python package: it takes part in SAC
alone. It trains only within a step of its loop, over its own Pendulum in C++: its rate counts the time of such a step
less that of steps that only act; compilation (a quarter of a minute) is left out. rlox samples by priority for DQN and
uniformly for SAC; it has no DDPG, and no convolutional networks for Pong. Same networks and batches, plain targets (no
double DQN), one thread each, all on one core, taking turns; replays of 100,000 transitions (Pong: 5,000), all filled.

Without AMX, ours takes less time where a ReLU makes more numbers zero and where less moves between an image's frames
(docs/concepts.md), so its transitions come from its actors. The transitions of Stable-Baselines3, RLlib and rlox are
random numbers; the time of their products does not depend on the numbers.

No peer has actors here, so the comparison removes them from the program. Rows "beside its actors" compare the whole
program on all cores with the same program without its actors on one core.
"""

from __future__ import annotations

import dataclasses
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks import pong
from benchmarks.peers.training import Case, Side, compared
from benchmarks.programs import bench, composer_of, run_program
from benchmarks.record import Row, by_kernels, shown, with_others, write
from benchmarks.timing import one_thread, options

PEERS = {
    "sb3_training": "stable-baselines3",
    "rllib_training": "RLlib",
    "rltools_training": "rltools, MKL",
    "rlox_training": "rlox",
}
CASES = (
    Case("dqn", "CartPole-v1", (64, 64), 32, 100_000),
    Case("dqn", "CartPole-v1", (64, 64), 512, 100_000),
    Case("ddpg", "MountainCarContinuous-v0", (256, 128), 32, 100_000),
    Case("ddpg", "MountainCarContinuous-v0", (256, 128), 512, 100_000),
    Case("sac", "Pendulum-v1", (256, 256), 256, 100_000),
    Case("dqn", pong.ENV, (), 32, 5_000),
    Case("dqn", pong.ENV, (), 256, 5_000),
)
QUICK = (0, 2, 4)
ENVS = 8  # of the single actor
LAUNCH = "session.launch_actors(dcqs, wsq)"
LIMIT_S = 600.0  # time limit of a program's run
FILLING_RATIO = 1e-3  # samples per transition while the replay is filled: almost none
ALL_CORES = range(os.cpu_count() or 1)


@dataclass(frozen=True)
class Plan:
    """How often and how long to measure; `with_actors` of the alternations measure the whole program too."""

    alternations: int = 5
    with_actors: int = 3
    ours_s: float = 2.0
    theirs_s: float = 1.0


QUICK_PLAN = Plan(alternations=2, with_actors=1, ours_s=1.0, theirs_s=0.5)


@dataclass(frozen=True)
class Composed:
    """A composed program, the same without its actors, and the implementation of its learner ("torch", ...)."""

    whole: Path
    alone: Path
    learner: str


def compose(case: Case, folder: Path) -> Composed:
    """Compose the program of a case, for one thread of this machine's CPU."""
    from pearl.algorithms import DDPG, DQN, SAC

    if case.hidden:
        trainer: type = {"dqn": DQN, "ddpg": DDPG, "sac": SAC}[case.algorithm]
        settings: dict[str, object] = {"hidden_sizes": case.hidden}
        if trainer is DQN:
            settings |= {"double": False, "n_step": 1, "learning_rate_schedule": "constant"}  # like the peers
    else:
        trainer, settings = pong.PongDQN, {}
    training = {"batch_size": case.batch, "learning_starts": case.slots, "replay_ratio": FILLING_RATIO}
    composer = composer_of(folder, trainer, case.environment, ENVS, case.slots, training, **settings)
    replay, learner = composer.run(budget_s=0)  # a tried program would hardly train at this ratio
    learner = dataclasses.replace(learner, threads=1)
    whole = composer.runtime_gen(
        replay=replay, learner=learner, path=folder / f"batch_{case.batch}.py", timesteps=2 * case.slots
    )
    return split(whole)


def split(whole: Path) -> Composed:
    """Write a copy of the program without its actors next to it."""
    text = whole.read_text(encoding="utf-8")
    if text.count(LAUNCH) != 1:
        raise RuntimeError(f"{whole} must contain `{LAUNCH}` exactly once; adapt benchmarks/eps.py.")
    alone = whole.with_name(f"{whole.stem}_alone.py")
    alone.write_text(text.replace(LAUNCH, "pass"), encoding="utf-8")
    found = re.search(r"\blearner = (\w+?)Learner\(", text)
    return Composed(whole, alone, found.group(1).lower() if found else "composed")


def fill(program: Path, case: Case, checkpoints: Path) -> None:
    """Collect until the replay is full, then write the checkpoint from which measurements start."""
    steps = case.slots + 2 * ENVS * 100  # transitions still in queues at the end are not stored
    folder = program.parent / "filling"
    arguments = ("--run-dir", folder, "--checkpoint-dir", checkpoints, "--eval-episodes", 0, "--until-return", "none")
    run_program(
        program, "--timesteps", steps, "--checkpoint-interval", 10 * steps, *arguments, cores=ALL_CORES, limit_s=LIMIT_S
    )


def measure(case: Case, composed: Composed, checkpoints: Path, plan: Plan, peers: Sequence[str]) -> Iterator[Row]:
    """Ours alone, every peer, and ours with its actors, in turns."""
    resumed = ("--resume", "--checkpoint-dir", checkpoints, "--bench-seconds", plan.ours_s)
    alone: list[float] = []
    with_actors: list[float] = []
    with ExitStack() as stack:
        sides = [stack.enter_context(Side(peer, case, PEERS[peer])) for peer in compared(peers, case)]
        theirs: dict[str, list[float]] = {side.module: [] for side in sides}
        for turn in range(plan.alternations):
            alone.append(bench(composed.alone, *resumed, limit_s=LIMIT_S))
            for side in sides:
                if side.reason:
                    continue
                try:
                    theirs[side.module].append(side.train(plan.theirs_s))
                except RuntimeError as error:
                    side.reason = str(error)
            if turn < plan.with_actors:
                with_actors.append(bench(composed.whole, *resumed, cores=ALL_CORES, limit_s=LIMIT_S))
    case_name = f"{case.title}, {composed.learner} learner"
    for side in sides:
        values = [] if side.reason else theirs[side.module]
        yield Row.of(case_name, "EPS", "higher", alone, side.name, values, side.reason)
    yield Row.of(f"{case_name} beside its actors", "EPS", "higher", with_actors, "without them", alone)


def measure_all(cases: Sequence[Case], plan: Plan, peers: Sequence[str], scratch: Path) -> Iterator[Row]:
    """Every case; cases of one algorithm and environment share the collected transitions."""
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


def main() -> None:
    parser = options(__doc__, "three cases, two alternations")
    parser.add_argument("--peers", nargs="*", default=list(PEERS), choices=PEERS, metavar="NAME", help=", ".join(PEERS))
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose names hold this")
    arguments = parser.parse_args()
    one_thread("benchmarks.eps")
    plan = QUICK_PLAN if arguments.quick else Plan()
    cases = [c for i, c in enumerate(CASES) if arguments.only in c.title and (i in QUICK or not arguments.quick)]
    with tempfile.TemporaryDirectory() as scratch:
        rows = shown(measure_all(cases, plan, arguments.peers, Path(scratch)))
    if not arguments.quick and len(arguments.peers) == len(PEERS) and (name := by_kernels("eps")):
        rows, _, origins = with_others(name, [case.title for case in cases], [case.title for case in CASES], rows)
        write(name, "make bench-eps", threads=1, rows=rows, **origins)


if __name__ == "__main__":
    main()
