"""The cost of callbacks: environment steps per second of programs with and without them.

DQN on CartPole-v1 with two hidden layers of 64, eight environments, the default settings. Ours is the program without a
callback. Peers are the same program with one that overrides `on_evaluation` alone, which these runs never call, and
with one whose `on_step`, `on_rollout` and `on_checkpoint` do nothing. All take turns; a rate counts the seconds of the
run, without its start.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.programs import composer_of, run_program
from benchmarks.record import Row, shown, write
from benchmarks.timing import options
from pearl.algorithms import DQN
from pearl.callbacks import Callback

STEPS, REPEATS = 60_000, 9


class OnEvaluation(Callback):
    """Would be called after evaluations."""

    def on_evaluation(self, run: Any, kind: str, evaluation: Any) -> None:
        """Do nothing."""


class OnStep(Callback):
    """Is called at every step."""

    def on_step(self, run: Any) -> None:
        """Do nothing."""

    def on_rollout(self, run: Any) -> None:
        """Do nothing."""

    def on_checkpoint(self, run: Any, path: Path) -> None:
        """Do nothing."""


class Without(DQN):
    """No callback."""

    hidden_sizes = (64, 64)


class WithOnEvaluation(Without):
    """One that is not called."""

    callbacks = (OnEvaluation(),)


class WithOnStep(Without):
    """One that is called."""

    callbacks = (OnStep(),)


TRAINERS = {"none": Without, "on_evaluation": WithOnEvaluation, "on_step": WithOnStep}


def rates(folder: Path, steps: int, repeats: int) -> dict[str, list[float]]:
    """Environment steps per second of each kind, measured in turn."""
    programs = {}
    for name, trainer in TRAINERS.items():
        (own := folder / name).mkdir()
        composer = composer_of(own, trainer, "CartPole-v1", 8, 50_000, {})
        composer.run(budget_s=0)
        programs[name] = composer.runtime_gen(path=own / "program.py", timesteps=steps)
    found: dict[str, list[float]] = {name: [] for name in programs}
    for repeat in range(repeats):
        for name, program in programs.items():
            run_dir = program.parent / str(repeat)
            run_program(program, "--eval-episodes", 0, "--until-return", "none", "--run-dir", run_dir)
            summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
            found[name].append(summary["env_steps"] / summary["wall_s"])
    return found


def rows(found: dict[str, list[float]]) -> Iterator[Row]:
    """The rate without callbacks compared with those with one."""
    for name, peer in (
        ("on_evaluation", "one with on_evaluation alone"),
        ("on_step", "one with on_step that does nothing"),
    ):
        yield Row.of("DQN CartPole-v1, no callback", "steps/s", "higher", np.array(found["none"]), peer, found[name])


def main() -> None:
    parser = options(__doc__, "once each, 3,000 steps")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        found = rates(Path(scratch), *((3_000, 1) if arguments.quick else (STEPS, REPEATS)))
    measured = shown(rows(found))
    if not arguments.quick:
        write("callbacks", "make bench-callbacks", 2, measured)


if __name__ == "__main__":
    main()
