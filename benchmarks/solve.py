"""Returns that the committed examples reach, and how long they train.

Each seed is one run of the example as a user starts it. Goals for the mean return of the best weights: 475 for
CartPole-v1 and -200 for Pendulum-v1 (all seeds), 85 for MountainCarContinuous-v0 (two of three seeds). The mean is over
100 greedy episodes that did not select the best weights; the last weights play the same episodes. `best_selected_mean`
is the mean over the 20 episodes that selected the best weights. Training ends early when 100 greedy episodes reach the
example's goal: 490 for CartPole-v1, the registered threshold for MountainCarContinuous-v0; Pendulum-v1 has none.
`train_s` counts from the start of the program, including evaluations during training; `total_s` is the whole command,
including composing. EPS is experiences trained per second while a batch is being trained; the prediction is the
composer's.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.record import ROOT, Row, number, write


@dataclass(frozen=True)
class Goal:
    """An example, and the mean return that its best weights must reach for `seeds_needed` of the seeds.

    The mean is over 100 greedy episodes that did not select the weights.
    """

    example: str
    environment: str
    least: float
    seeds_needed: int

    @property
    def case(self) -> str:
        """Environment and algorithm, for a row of the results."""
        return f"{self.environment}, {self.example.partition('_')[0].upper()}"


GOALS = (
    Goal("dqn_cartpole", "CartPole-v1", 475.0, 3),
    Goal("ddpg_pendulum", "Pendulum-v1", -200.0, 3),
    Goal("td3_pendulum", "Pendulum-v1", -200.0, 3),
    Goal("sac_pendulum", "Pendulum-v1", -200.0, 3),
    Goal("ddpg_mountain_car", "MountainCarContinuous-v0", 85.0, 2),
)


def train(goal: Goal, seed: int, folder: Path) -> dict[str, float]:
    """Run the example; return numbers of its summary and the wall-clock time of the whole command."""
    run_dir = folder / f"{goal.example}-{seed}"
    script = ROOT / "examples" / f"{goal.example}.py"
    start = time.monotonic()
    command = [sys.executable, str(script), "--seed", str(seed), "--run-dir", str(run_dir)]
    subprocess.run(command, check=True, cwd=folder, stdout=subprocess.DEVNULL)
    total_s = time.monotonic() - start
    summary = json.loads((run_dir / "summary.json").read_text())
    best, last = summary["best"], summary["last"]
    return {
        "best_mean": best["mean"],
        "best_std": best["std"],
        "best_step": best["step"],
        "best_selected_mean": best["selected_mean"],
        "last_mean": last["mean"],
        "last_std": last["std"],
        "env_steps": summary["env_steps"],
        "train_s": summary["wall_s"],
        "total_s": total_s,
        "measured_eps": summary["measured_eps"],
        "predicted_eps": summary["predicted_eps"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", choices=[goal.example for goal in GOALS])
    arguments = parser.parse_args()
    rows: list[Row] = []
    runs: list[dict[str, object]] = []
    failed = []
    with tempfile.TemporaryDirectory() as scratch:
        for goal in GOALS:
            if arguments.only not in (None, goal.example):
                continue
            results = []
            for seed in range(1, arguments.seeds + 1):
                result = train(goal, seed, Path(scratch))
                results.append(result)
                runs.append({"example": goal.example, "seed": seed, **result})
                print(
                    f"{goal.case}, seed {seed}: ", "  ".join(f"{k} {number(v)}" for k, v in result.items()), flush=True
                )
            best, last, times = ([r[key] for r in results] for key in ("best_mean", "last_mean", "train_s"))
            if sum(mean >= goal.least for mean in best) < min(goal.seeds_needed, arguments.seeds):
                failed.append(goal.case)
            rows += [
                Row.of(f"{goal.case}: mean return of the best weights", "return", "higher", best),
                Row.of(f"{goal.case}: mean return of the last weights", "return", "higher", last),
                Row.of(f"{goal.case}: training", "s", "lower", times),
            ]
    if arguments.only is None:
        write("solve", "make bench-solve", threads=2, rows=rows, runs=runs)
    if failed:
        sys.exit(f"Did not reach its goal: {', '.join(failed)}")


if __name__ == "__main__":
    main()
