"""How well the composer predicts: programs as it composes them, beside its predictions of their speed.

Each problem is composed for this machine's CPU, by its own kernels and through SYCL. Every placement's program is run
with `--bench`, by turns: "ours" are the experiences that it trains per second, "theirs" is the prediction that was
written into it. A ratio of 1 is exact; below 1 the prediction was too optimistic. The placement that the composer chose
also runs at its replay ratio (`--bench-paced`). "Regret" compares the fastest program of a problem with the chosen one.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.programs import bench, composer_of
from benchmarks.record import Row, number, write
from benchmarks.timing import options

SLOTS = 100_000


@dataclass(frozen=True)
class Question:
    """A problem to compose: an algorithm with its networks' hidden layers, an environment, a batch and a ratio."""

    algorithm: str
    env: str
    hidden: tuple[int, ...]
    batch: int
    ratio: float = 8.0
    actors: int = 1
    envs: int = 8

    @property
    def name(self) -> str:
        """In words."""
        widths = "x".join(map(str, self.hidden))
        return f"{self.algorithm} {widths} {self.env} B={self.batch}, {self.actors} x {self.envs} environments"

    def composed(self, folder: Path, devices: Path, connections: Path) -> Any:
        """The composer, after its run."""
        import pearl.algorithms

        training = {"batch_size": self.batch, "replay_ratio": self.ratio}
        trainer = getattr(pearl.algorithms, self.algorithm)
        composer = composer_of(folder, trainer, self.env, self.envs, SLOTS, training, hidden_sizes=self.hidden)
        composer.set_actors(self.actors, env=self.env, envs_per_actor=self.envs)
        composer.set_device_file(devices)
        composer.set_connection_file(connections)
        composer.run()
        return composer


QUESTIONS = (
    Question("DQN", "CartPole-v1", (64, 64), 64),
    Question("DQN", "CartPole-v1", (256, 256), 256),
    Question("DQN", "Acrobot-v1", (128, 128), 32, ratio=4.0, envs=4),
    Question("DDPG", "Pendulum-v1", (64, 64), 128, ratio=32.0),
    Question("DDPG", "MountainCarContinuous-v0", (256, 128), 256, ratio=16.0, envs=16),
    Question("TD3", "Pendulum-v1", (64, 64), 100, ratio=50.0),
    Question("TD3", "Pendulum-v1", (256, 256), 64, ratio=8.0, actors=2),
    Question("SAC", "Pendulum-v1", (64, 64), 100, ratio=25.0, envs=4),
    Question("SAC", "Pendulum-v1", (256, 256), 256, ratio=64.0),
)


@dataclass
class Run:
    """A program to measure: with its prediction, and the options with which it runs."""

    case: str
    program: Path
    options: tuple[object, ...]
    predicted: float
    chosen: bool = False
    found: list[float] = field(default_factory=list)

    def row(self) -> Row:
        """The result."""
        return Row.of(self.case, "EPS", "higher", self.found, "predicted", self.predicted)

    @property
    def error(self) -> float:
        """|predicted / measured - 1|."""
        return abs(self.predicted / float(np.median(self.found)) - 1)


def runs_of(question: Question, folder: Path, devices: Path, connections: Path, seconds: float) -> list[Run]:
    """Compose the problem; a program for each placement whose devices were measured."""
    folder.mkdir()
    composer = question.composed(folder, devices, connections)
    runs = []
    for number_, candidate in enumerate(composer.placement.candidates):
        replay, learner, implementation = candidate.names
        placement = composer.placement.with_choice(
            replay_manager=replay, learner=learner, implementation=implementation
        )
        program = composer.runtime_gen(placement=placement, path=folder / f"{number_}.py")
        chosen = placement == composer.placement
        case = f"{question.name}: RM on {replay}, {implementation} Learner on {learner}{', chosen' if chosen else ''}"
        measuring = ("--bench-seconds", seconds)
        runs.append(Run(case, program, measuring, placement.free_eps, chosen))
        if chosen:
            paced = f"{case}, replay ratio {question.ratio:g}"
            runs.append(Run(paced, program, (*measuring, "--bench-paced"), placement.eps))
    return runs


def ask(question: Question, here: Path, repeats: int, seconds: float) -> Iterator[tuple[Row, float | None]]:
    """A row for each program with its error, and one for the regret; the programs run by turns."""
    runs = runs_of(question, here / question.name.replace(" ", "_"), *machine_files(here), seconds)
    for turn in range(repeats):
        for run in runs if turn % 2 == 0 else reversed(runs):
            run.found.append(bench(run.program, *run.options))
    for run in runs:
        yield run.row(), run.error
    free = [run for run in runs if "--bench-paced" not in run.options]
    chosen = next(run for run in free if run.chosen)
    best = max(free, key=lambda run: float(np.median(run.found)))
    yield Row.of(f"regret: {question.name}", "EPS", "higher", chosen.found, "best placement", best.found), None


def machine_files(here: Path) -> tuple[Path, Path]:
    """The device and connection files of this machine's CPU, in the folder `here`, measured once."""
    from pearl.devices import discover, write_csv

    devices, connections = here / "devices.csv", here / "connections.csv"
    if not devices.exists():
        found, links = discover()
        kept = [device for device in found if device.kind == "cpu"]
        names = {device.name for device in kept}
        write_csv(kept, [link for link in links if {link.source, link.target} <= names], devices, connections)
    return devices, connections


def main() -> None:
    parser = options(__doc__, "two problems, one run of each program")
    parser.add_argument("--only", type=int, nargs="*", help="positions of the problems to ask, from 0")
    arguments = parser.parse_args()
    repeats, seconds = (1, 1.0) if arguments.quick else (3, 2.0)
    asked: Sequence[Question] = QUESTIONS[:2] if arguments.quick else QUESTIONS
    if arguments.only is not None:
        asked = [QUESTIONS[k] for k in arguments.only]
    rows, errors = [], []
    with tempfile.TemporaryDirectory() as folder:
        for question in asked:
            for row, error in ask(question, Path(folder), repeats, seconds):
                row.show()
                rows.append(row)
                errors += [] if error is None else [error]
    regrets = [1 - (row.ratio or 0.0) for row in rows if row.case.startswith("regret")]
    middle, high = (float(np.percentile(errors, q)) for q in (50, 90))
    print(
        f"{len(errors)} programs: median error {middle:.1%}, 90th percentile {high:.1%}; regret {number(max(regrets))}"
    )
    rows.append(Row.of(f"|predicted / measured - 1|, 90th percentile {high:.1%}", "", "lower", errors))
    if not arguments.quick and arguments.only is None:
        write("model", "make bench-model", len(os.sched_getaffinity(0)), rows)


if __name__ == "__main__":
    main()
