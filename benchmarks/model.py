"""How well the composer predicts: the speed of the programs that it composes, compared with its predictions.

Each problem is composed for this machine's CPU, by its own kernels and through SYCL, with a budget in which every
placement's program is tried. Then all programs take turns with `--bench-both`: "ours" are the experiences that they
train per second at the replay ratio and with free Actors, "theirs" are the predictions that were written into them. A
ratio of 1 is exact; below 1 the prediction was too optimistic. "Regret" compares the fastest program of a problem at
its replay ratio with the chosen one: where they differ, in new runs of both, since the best of many runs is partly the
luckiest. The last rows are the errors of all predictions, of those of the chosen placements, and of predictions without
trials, from the parts alone; and how much two runs of the same program differ, which is the machine's share in these
errors.

Problems with rollouts (PPO) have one pace: collecting and training in turn, or at the same time with a lag of 1.
"""

from __future__ import annotations

import abc
import dataclasses
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.programs import bench_rates
from benchmarks.record import Row, number, write
from benchmarks.timing import options

SLOTS = 100_000
BUDGET_S = 300.0  # for each problem: as many runs as the composer makes at most


@dataclass(frozen=True)
class Question(abc.ABC):
    """A problem to compose: an algorithm with its networks' hidden layers, an environment and a batch."""

    algorithm: str
    env: str
    hidden: tuple[int, ...]
    batch: int

    actors: int = field(default=1, kw_only=True)
    envs: int = field(default=8, kw_only=True)

    @property
    def name(self) -> str:
        """In words."""
        widths = "x".join(map(str, self.hidden))
        return f"{self.algorithm} {widths} {self.env} B={self.batch}, {self.actors} x {self.envs} environments"

    def composed(self, folder: Path, devices: Path, connections: Path, budget_s: float) -> Any:
        """The composer, after its run."""
        import pearl.algorithms
        from pearl import Composer

        composer = Composer(progress=False, calibration=folder / "calibration.json")
        trainer = getattr(pearl.algorithms, self.algorithm)
        composer.set_train_function(learner=trainer, hidden_sizes=self.hidden)
        composer.set_actors(self.actors, env=self.env, envs_per_actor=self.envs)
        composer.set_device_file(devices)
        composer.set_connection_file(connections)
        self.set_data(composer)
        composer.run(budget_s=budget_s)
        return composer

    @abc.abstractmethod
    def set_data(self, composer: Any) -> None:
        """What the Learner trains on."""

    @abc.abstractmethod
    def runs(self, tried: Any, by_parts: Any, folder: Path) -> Iterator[Run]:
        """A program for each placement of the composer `tried`; `by_parts` is one that has tried none."""


@dataclass(frozen=True)
class ReplayQuestion(Question):
    """A problem with a replay, of which each transition is trained on `ratio` times."""

    ratio: float = field(default=8.0, kw_only=True)

    def set_data(self, composer: Any) -> None:
        """A replay."""
        composer.set_replay(SLOTS)
        composer.set_training(batch_size=self.batch, replay_ratio=self.ratio)

    def runs(self, tried: Any, by_parts: Any, folder: Path) -> Iterator[Run]:
        """At the replay ratio, and with free Actors."""
        paces = (f", replay ratio {self.ratio:g}", ", free Actors")
        for number_, candidate in enumerate(tried.placement.candidates):
            both = [found.placement.with_choice(**candidate.choice) for found in (tried, by_parts)]
            program = tried.runtime_gen(placement=both[0], path=folder / f"{number_}.py")
            replay, learner, implementation = candidate.names
            case = f"{self.name}: RM on {replay}, {implementation} Learner on {learner}"
            eps = [(found.eps, found.free_eps) for found in both]
            yield Run(case, program, paces, *eps, chosen=both[0] == tried.placement)


@dataclass(frozen=True)
class RolloutQuestion(Question):
    """A problem with rollouts, on which PPO trains `epochs` times."""

    horizon: int = field(kw_only=True)
    epochs: int = field(kw_only=True)
    lag: int = field(default=0, kw_only=True)

    @property
    def name(self) -> str:
        """In words, with the rollout."""
        return f"{super().name} x {self.horizon} steps, {self.epochs} epochs, lag {self.lag}"

    def set_data(self, composer: Any) -> None:
        """Rollouts."""
        composer.set_rollout(horizon=self.horizon, epochs=self.epochs, policy_lag=self.lag)
        composer.set_training(batch_size=self.batch)

    def runs(self, tried: Any, by_parts: Any, folder: Path) -> Iterator[Run]:
        """At their one pace."""
        parts = {(c.advantages, c.learner): c.terms.t_itr_us for c in by_parts.placement.candidates}
        for number_, candidate in enumerate(tried.placement.candidates):
            placed = candidate.advantages, candidate.learner
            program = tried.runtime_gen(*placed, folder / f"{number_}.py")
            eps = [(tried.placement.rows / us * 1e6,) for us in (candidate.terms.t_itr_us, parts[placed])]
            chosen = candidate is tried.placement.choice
            yield Run(f"{self.name}: {candidate.text}", program, ("",), *eps, chosen=chosen)


QUESTIONS: tuple[Question, ...] = (
    ReplayQuestion("DQN", "CartPole-v1", (64, 64), 64),
    ReplayQuestion("DQN", "CartPole-v1", (256, 256), 256),
    ReplayQuestion("DQN", "Acrobot-v1", (128, 128), 32, ratio=4.0, envs=4),
    ReplayQuestion("DDPG", "Pendulum-v1", (64, 64), 128, ratio=32.0),
    ReplayQuestion("DDPG", "MountainCarContinuous-v0", (256, 128), 256, ratio=16.0, envs=16),
    ReplayQuestion("TD3", "Pendulum-v1", (64, 64), 100, ratio=50.0),
    ReplayQuestion("TD3", "Pendulum-v1", (256, 256), 64, ratio=8.0, actors=2),
    ReplayQuestion("SAC", "Pendulum-v1", (64, 64), 100, ratio=25.0, envs=4),
    ReplayQuestion("SAC", "Pendulum-v1", (256, 256), 256, ratio=64.0),
    RolloutQuestion("PPO", "CartPole-v1", (64, 64), 256, actors=2, envs=4, horizon=128, epochs=4),
    RolloutQuestion("PPO", "CartPole-v1", (64, 64), 64, actors=1, horizon=256, epochs=10, lag=1),
    RolloutQuestion("PPO", "Pendulum-v1", (128, 128), 128, actors=2, envs=8, horizon=64, epochs=10),
    RolloutQuestion("PPO", "Acrobot-v1", (64, 64), 512, actors=1, envs=16, horizon=64, epochs=4, lag=1),
)


@dataclass
class Run:
    """A program to measure, with what it and the parts alone predict at each of its paces."""

    case: str
    program: Path
    paces: tuple[str, ...]
    predicted: tuple[float, ...]
    by_parts: tuple[float, ...]
    chosen: bool
    found: list[tuple[float, ...]] = field(default_factory=list)

    @property
    def paced(self) -> list[float]:
        """EPS of each run at the first pace."""
        return [found[0] for found in self.found]

    def measure(self, seconds: float) -> None:
        """Run the program once."""
        both = ["--bench-both"] if len(self.paces) > 1 else []
        rates = bench_rates(self.program, "--bench-seconds", seconds, *both)
        measured = rates["measurements"] if both else [rates]
        self.found.append(tuple(float(found["measured_eps"]) for found in measured))

    def rows(self) -> Iterator[Row]:
        """A row for each pace."""
        case = f"{self.case}{', chosen' if self.chosen else ''}"
        for pace, found, predicted in zip(self.paces, zip(*self.found, strict=True), self.predicted, strict=True):
            yield Row.of(f"{case}{pace}", "EPS", "higher", list(found), "predicted", predicted)

    def errors(self, predicted: tuple[float, ...]) -> list[float]:
        """|predicted / measured - 1| at each pace."""
        return [abs(p / float(np.median(m)) - 1) for p, m in zip(predicted, zip(*self.found, strict=True), strict=True)]


def runs_of(question: Question, folder: Path, devices: Path, connections: Path) -> list[Run]:
    """Compose the problem, from the parts alone and with trials; a program for each placement."""
    folder.mkdir()
    by_parts = question.composed(folder, devices, connections, 0.0)
    tried = question.composed(folder, devices, connections, BUDGET_S)
    return list(question.runs(tried, by_parts, folder))


def ask(question: Question, here: Path, repeats: int, seconds: float) -> tuple[list[Run], Row]:
    """The programs of the problem, measured in turn, and a row for the regret."""
    runs = runs_of(question, here / question.name.replace(" ", "_"), *machine_files(here))
    for turn in range(repeats):
        for run in runs if turn % 2 == 0 else reversed(runs):
            run.measure(seconds)
    chosen = next(run for run in runs if run.chosen)
    best = max(runs, key=lambda run: float(np.median(run.paced)))
    compared = [dataclasses.replace(run, found=list(run.found)) for run in (chosen, best)]
    if best is not chosen:
        for run in compared:
            run.found.clear()
        for turn in range(2 * repeats):
            for run in compared if turn % 2 == 0 else reversed(compared):
                run.measure(seconds)
    ours, theirs = (run.paced for run in compared)
    return runs, Row.of(f"regret: {question.name}", "EPS", "higher", ours, "best placement", theirs)


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
    repeats, seconds = (1, 1.0) if arguments.quick else (3, 1.5)
    asked: Sequence[Question] = QUESTIONS[:2] if arguments.quick else QUESTIONS
    if arguments.only is not None:
        asked = [QUESTIONS[k] for k in arguments.only]
    rows: list[Row] = []
    runs: list[Run] = []
    regrets: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        for question in asked:
            measured, regret = ask(question, Path(folder), repeats, seconds)
            runs += measured
            regrets.append(1 - (regret.ratio or 0.0))
            for row in (*(row for run in measured for row in run.rows()), regret):
                row.show()
                rows.append(row)
    for name, errors in (
        ("all", [error for run in runs for error in run.errors(run.predicted)]),
        ("of chosen placements", [error for run in runs if run.chosen for error in run.errors(run.predicted)]),
        ("all, from the parts alone", [error for run in runs for error in run.errors(run.by_parts)]),
    ):
        middle, high = (float(np.percentile(errors, q)) for q in (50, 90))
        print(f"{name}: {len(errors)} predictions, median error {middle:.1%}, 90th percentile {high:.1%}")
        rows.append(Row.of(f"|predicted / measured - 1|, {name}, 90th percentile {high:.1%}", "", "lower", errors))
    paces = [found for run in runs for found in zip(*run.found, strict=True)]
    again = [abs(one / other - 1) for found in paces for one, other in pairwise(found)]
    if again:
        middle, high = (float(np.percentile(again, q)) for q in (50, 90))
        case = f"|one run / the next of the same program - 1|, 90th percentile {high:.1%}"
        rows.append(Row.of(case, "", "lower", again))
        print(f"two runs of the same program, a minute or two apart: median {middle:.1%}, 90th percentile {high:.1%}")
    print(f"largest regret {number(max(regrets))}")
    if not arguments.quick and arguments.only is None:
        write("model", "make bench-model", len(os.sched_getaffinity(0)), rows)


if __name__ == "__main__":
    main()
