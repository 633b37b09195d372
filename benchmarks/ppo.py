"""PPO: environment steps collected and trained on per second, by composed programs and by other frameworks.

Ours is the program that the composer writes, run with `--bench` on all cores: collecting and training in turn, with two
Actors (one, where the environment steps all its copies at once); and with `policy_lag=1`, where the next rollout is
collected during training, in rows that say so. The peers collect and train in one process, with torch on one thread and
on all cores: the faster one is the row. Same networks, rollouts, minibatches and epochs; all take turns. Stable-
Baselines3 has no form for an environment's own vector: in those rows, too, it steps the environments one by one.
rltools takes Box actions alone; rlox has a CartPole-v1 of its own, which stands for the environment's own vector.

The rows of shares tell how much of an iteration of our program (in turn) is collecting, GAE and training, as Table I of
HEPPO-GAE does for another implementation on another machine.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.training import Case, Side
from benchmarks.programs import bench_rates
from benchmarks.record import Row, shown, write
from benchmarks.timing import options

PEERS = {
    "sb3_ppo": "stable-baselines3",
    "cleanrl_ppo": "as CleanRL does it",
    "rltools_ppo": "rltools, MKL",
    "rlox_ppo": "rlox",
}
CASES = (
    Case("ppo", "CartPole-v1", (64, 64), 256, 1024, envs=8, epochs=4),
    Case("ppo", "CartPole-v1", (64, 64), 256, 1024, envs=8, epochs=4, vector=True),
    Case("ppo", "CartPole-v1", (64, 64), 64, 2048, envs=8, epochs=10),
    Case("ppo", "HalfCheetah-v5", (64, 64), 64, 2048, envs=8, epochs=10),
)
ACTORS = 2
STEPS = 2**40  # a benchmark ends by time
ALL_CORES = os.cpu_count() or 1


def compose(case: Case, folder: Path, lag: int) -> Path:
    """Compose the program of a case."""
    from pearl import Composer
    from pearl.algorithms import PPO

    composer = Composer(progress=False, calibration=folder / "calibration.json")
    how = "vector_entry_point" if case.vector else "sync"
    actors = 1 if case.vector else ACTORS
    composer.set_actors(actors, env=case.environment, envs_per_actor=case.envs // actors, vectorization=how)
    composer.set_train_function(learner=PPO, hidden_sizes=case.hidden)
    composer.set_rollout(horizon=case.slots // case.envs, epochs=case.epochs, policy_lag=lag)
    composer.set_training(batch_size=case.batch)
    advantages, learner = composer.run()
    return composer.runtime_gen(advantages, learner, folder / f"lag{lag}.py", timesteps=STEPS)


def missing(case: Case) -> str:
    """Why the environment cannot be made here; empty if it can."""
    import gymnasium as gym

    try:
        gym.make(case.environment).close()
    except Exception as error:
        return f"{type(error).__name__}: {error}".partition("\n")[0]
    return ""


def measure(case: Case, folder: Path, turns: int, seconds: float, peers: Sequence[str]) -> Iterator[Row]:
    """Both programs and every peer, in turns."""
    programs = {lag: compose(case, folder, lag) for lag in (0, 1)}
    ours: dict[int, list[float]] = {lag: [] for lag in programs}
    shares: dict[str, list[float]] = {part: [] for part in ("collection", "advantages", "training")}
    with ExitStack() as stack:
        sides = {
            (peer, threads): stack.enter_context(Side(peer, dataclasses.replace(case, threads=threads), PEERS[peer]))
            for peer in peers
            for threads in dict.fromkeys((1, ALL_CORES))
        }
        theirs: dict[Any, list[float]] = {key: [] for key in sides}
        for _ in range(turns):
            for lag, program in programs.items():
                found = bench_rates(program, "--bench-seconds", seconds)
                ours[lag].append(float(found["measured_eps"]))
                times = found["iteration"]["measured_us"]
                for part in shares if lag == 0 else ():
                    shares[part].append(100.0 * times[part] / times["iteration"])
            for key, side in sides.items():
                if side.reason:
                    continue
                try:
                    theirs[key].append(side.train(seconds))
                except RuntimeError as error:
                    side.reason = str(error)
        for peer in peers:
            keys = [key for key in sides if key[0] == peer]
            best = max(keys, key=lambda key: float(np.median(theirs[key])) if theirs[key] else -1.0)
            side = sides[best]
            for lag, name in ((0, ""), (1, ", collecting during training")):
                values = [] if side.reason else theirs[best]
                yield Row.of(f"{case.title}{name}", "steps/s", "higher", ours[lag], side.name, values, side.reason)
        for part, found_shares in shares.items():
            yield Row.of(f"{case.title}: share of {part}", "%", "lower", found_shares)


def measure_all(
    cases: Sequence[Case], turns: int, seconds: float, peers: Sequence[str], scratch: Path
) -> Iterator[Row]:
    """Every case whose environment can be made."""
    for number, case in enumerate(cases):
        if why := missing(case):
            print(f"left out: {case.title}: {why}", file=sys.stderr)
            continue
        folder = scratch / str(number)
        folder.mkdir()
        yield from measure(case, folder, turns, seconds, peers)


def main() -> None:
    parser = options(__doc__, "two turns of a second each")
    parser.add_argument("--peers", nargs="*", default=list(PEERS), choices=PEERS, metavar="NAME", help=", ".join(PEERS))
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose names hold this; writes nothing")
    arguments = parser.parse_args()
    turns, seconds = (2, 1.0) if arguments.quick else (4, 2.0)
    cases = [case for case in CASES if arguments.only in case.title]
    with tempfile.TemporaryDirectory() as scratch:
        rows = shown(measure_all(cases, turns, seconds, arguments.peers, Path(scratch)))
    if not arguments.quick and not arguments.only and len(arguments.peers) == len(PEERS):
        write("ppo", "make bench-ppo", threads=ALL_CORES, rows=rows)


if __name__ == "__main__":
    main()
