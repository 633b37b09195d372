"""The compositions of examples/zoo, trained to their end: the returns of their last weights, and the time.

Each is composed once, as `pearl compose` does it, and its program runs with several seeds, on which no setting was
chosen, until all steps are done: it does not stop where its environment is solved. Returns are means over 100 greedy
episodes that selected nothing. Next to them are the returns that Stable-Baselines3's RL Zoo publishes for the same
algorithm (benchmark.md; one run, after the steps named there, partly in an older version of the environment).

Runs are kept in benchmarks/results/zoo/runs.json, and a later call makes only those that are missing: delete that file
to begin again. Writes docs/zoo.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.programs import environment, run_program
from benchmarks.record import RESULTS, ROOT, commit, machine
from pearl.atomic_file import write_text

ZOO = ROOT / "examples" / "zoo"
FILE, PAGE = RESULTS / "zoo" / "runs.json", ROOT / "docs" / "zoo.md"
FIRST_SEED = 4001
EPISODES = 100
# Mean and deviation of RL Zoo's benchmark.md, and after how many steps, by composition; None where it has none.
PUBLISHED: dict[str, tuple[float, float, str] | None] = {
    "a2c-CartPole-v1": (500.0, 0.0, "500k"),
    "ddpg-MountainCarContinuous-v0": (93.5, 0.0, "300k"),
    "ddpg-Pendulum-v1": (-152.1, 94.3, "20k"),
    "dqn-Acrobot-v1": (-76.6, 11.8, "100k"),
    "dqn-CartPole-v1": (500.0, 0.0, "50k"),
    "dqn-LunarLander-v3": (154.4, 79.2, "100k"),
    "dqn-MountainCar-v0": (-100.8, 9.9, "120k"),
    "dqn-PongFrames-v0": (20.6, 0.6, "10M"),
    "ppo-Acrobot-v1": (-73.5, 18.2, "1M"),
    "ppo-CartPole-v1": (500.0, 0.0, "100k"),
    "ppo-LunarLander-v3": (242.1, 31.8, "1M"),
    "sac-BipedalWalker-v3": (297.7, 33.1, "500k"),
    "sac-HalfCheetah-v5": (9535.5, 100.5, "1M"),
    "sac-Hopper-v5": (2325.5, 1129.7, "1M"),
    "sac-InvertedDoublePendulum-v5": None,
    "sac-InvertedPendulum-v5": None,
    "sac-LunarLanderContinuous-v3": (260.4, 65.5, "500k"),
    "sac-Pendulum-v1": (-157.0, 88.7, "20k"),
    "sac-Reacher-v5": None,
    "sac-Walker2d-v5": (3863.2, 254.3, "1M"),
    "td3-MountainCarContinuous-v0": (93.5, 0.1, "300k"),
    "td3-Pendulum-v1": (-151.9, 90.2, "20k"),
}
HEAD = """# Compositions that were trained

Made by `make zoo` from `benchmarks/results/zoo/runs.json`; do not edit by hand. The compositions of `examples/zoo` were
composed and trained to their end with the seeds {seeds}, on which no setting was chosen. "Last weights" are those of
the last step, over {episodes} greedy episodes that selected nothing: the median of the seeds, and the worst. "RL Zoo"
is what Stable-Baselines3's [RL Zoo](https://github.com/DLR-RM/rl-baselines3-zoo/blob/master/benchmark.md) publishes for
the algorithm: one run, with the deviation of its episodes, after the steps named there, partly in an older version of
the environment.

```bash
pearl compose examples/zoo/dqn-LunarLander-v3.toml
pearl run examples/zoo/runs/dqn-LunarLander-v3/program.py
```

| composition | steps | last weights: median | worst | best weights: median | training | RL Zoo | after steps |
|---|--:|--:|--:|--:|--:|--:|--:|
"""


def names() -> tuple[str, ...]:
    """All compositions."""
    return tuple(sorted(path.stem for path in ZOO.glob("*.toml")))


def here() -> str:
    """The machine in words, with the cores that this process may use."""
    return f"{machine()['cpu']}, {len(os.sched_getaffinity(0))} core(s)"


def train(
    name: str, seeds: Sequence[int], folder: Path, overrides: Mapping[str, object] | None = None
) -> list[dict[str, Any]]:
    """Compose, with `overrides` by "table.key", and run the program with each seed; numbers of the summaries."""
    program = folder / f"{name}.py"
    command = [sys.executable, "-m", "pearl", "compose", str(ZOO / f"{name}.toml"), "--output", str(program)]
    for key, value in (overrides or {}).items():
        command += ["--set", f"{key}={value}"]
    subprocess.run(command, check=True, cwd=folder, env=environment(), stdout=subprocess.DEVNULL)
    found = []
    for seed in seeds:
        run_dir = folder / name / str(seed)
        run_program(
            *(program, "--seed", seed, "--until-return", "none", "--eval-episodes", EPISODES, "--run-dir", run_dir)
        )
        summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
        found.append(
            {
                "composition": name,
                "seed": seed,
                "steps": summary["env_steps"],
                "last": summary["last"]["mean"],
                "last_std": summary["last"]["std"],
                "best": summary["best"]["mean"],
                "best_step": summary["best"]["step"],
                "train_s": summary["wall_s"],
                "commit": commit(),
                "machine": here(),
            }
        )
        print("  ".join(str(value) for value in list(found[-1].values())[:-2]), flush=True)
    return found


def page(runs: Sequence[Mapping[str, Any]]) -> str:
    """The text of docs/zoo.md."""
    seeds = sorted({run["seed"] for run in runs})
    text = HEAD.format(seeds=f"{seeds[0]} to {seeds[-1]}", episodes=EPISODES)
    for name in names():
        of_name = [run for run in runs if run["composition"] == name]
        if not of_name:
            continue
        last, best, seconds = ([run[key] for run in of_name] for key in ("last", "best", "train_s"))
        theirs = PUBLISHED.get(name)
        published = f"{theirs[0]:,.1f} +- {theirs[1]:,.1f} | {theirs[2]}" if theirs else " | "
        text += (
            f"| [{name}](../examples/zoo/{name}.toml) | {of_name[0]['steps']:,} | {np.median(last):,.1f} | "
            f"{min(last):,.1f} | {np.median(best):,.1f} | {np.median(seconds):,.0f} s | {published} |\n"
        )
    if missing := sorted(set(names()) - {run["composition"] for run in runs}):
        text += f"\nNot run yet: {', '.join(missing)}.\n"
    machines = sorted({f"{run['machine']}, commit `{run['commit']}`" for run in runs})
    notes = sorted({run["note"] for run in runs if "note" in run})  # added by hand
    return text + "\nRuns on " + "; ".join([*machines, *notes]) + ".\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="seeds of each composition (default: 3)")
    parser.add_argument("--only", choices=names(), action="append", help="these compositions alone")
    arguments = parser.parse_args()
    runs: list[dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else []
    with tempfile.TemporaryDirectory() as scratch:
        for name in arguments.only or names():
            done = {run["seed"] for run in runs if run["composition"] == name}
            missing = [seed for seed in range(FIRST_SEED, FIRST_SEED + arguments.seeds) if seed not in done]
            if missing:
                runs += train(name, missing, Path(scratch))
                FILE.parent.mkdir(exist_ok=True)
                write_text(FILE, json.dumps(runs, indent=1) + "\n")
    write_text(PAGE, page(runs))
    print(f"written: {PAGE}")


if __name__ == "__main__":
    main()
