"""SPO's experiments (thesis, Sec. 5.3.2) in sizes that fit here: the returns of several Learners, and how they scale.

Learning (Figures 5.10 to 5.13): compositions of examples/zoo, with one, two and four Learners and averages after every
1, 8 and 32 gradient steps of each; for CartPole and Pendulum also two Learners whose averages overlap with the next 8
steps. The replay ratio, the batch and the replay are those of all Learners together. Runs make all their steps; returns
are those of the last weights over 100 greedy episodes that selected nothing. Rows compare interquartile means over the
seeds, with bootstrap intervals of 95 %, and say whether these overlap with one Learner's. Runs are kept in
benchmarks/results/spo/runs.json, and a later call makes only those that are missing.

Scaling (Figures 5.14 and 5.15): the scaling factor of Eq. 5.6, the rate of steps on whole batches by L Learners over L
times that of one, for TD3 with two hidden layers of 256 and for DQN with the Nature CNN. Two Learners are measured;
four and six are simulated from the steps and averages of this machine, as if each had a core.
"""

from __future__ import annotations

import functools
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from benchmarks.intervals import interquartile_mean, interval
from benchmarks.record import RESULTS, Row, row_of, shown, write
from benchmarks.scale import phases_of, steps_per_s
from benchmarks.timing import ONE_THREAD, options
from benchmarks.zoo import train
from pearl.algorithms import DQN, TD3
from pearl.algorithms.trainer import transition_of
from pearl.atomic_file import write_text
from pearl.backends.cpu.learner import NativeLearner
from pearl.local_sgd.averaging import AveragingSpec
from pearl.local_sgd.local_learner import LearnerSetup
from pearl.local_sgd.simulation import simulate
from pearl.spec import ReplaySpec

FILE = RESULTS / "spo" / "runs.json"
FIRST_SEED = 5001
INTERVALS, OF_THESIS = (1, 8, 32), (5, 10, 25)
OVERLAPPED = 8  # steps between averages, all of which overlap
VECTORS = spaces.Box(-1.0, 1.0, (17,), np.float32), spaces.Box(-1.0, 1.0, (6,), np.float32)
IMAGES = spaces.Box(0, 255, (4, 84, 84), np.uint8), spaces.Discrete(6)


@dataclass(frozen=True)
class Learning:
    """A composition, how many seeds it gets, and its steps if they are not the composition's.

    With `overlaps`, two Learners also go on while an average is made.
    """

    composition: str
    seeds: int
    timesteps: int | None = None
    overlaps: bool = False

    def overrides(self, how: Averaging) -> dict[str, int]:
        """What the composition gets besides."""
        steps = {} if self.timesteps is None else {"program.timesteps": self.timesteps}
        overlap = {"learners.overlap": how.overlap} if how.overlap else {}
        return {**steps, "learners.count": how.learners, "learners.average_every": how.every, **overlap}

    def ways(self) -> Iterator[Averaging]:
        """How the runs average; one Learner, which never does, comes first."""
        yield ALONE
        for learners in (2, 4):
            for every in INTERVALS:
                yield Averaging(learners, every)
        if self.overlaps:
            yield Averaging(2, OVERLAPPED, OVERLAPPED)


class Averaging(NamedTuple):
    """How many Learners average, after how many steps of each, and how many of these overlap with the next average."""

    learners: int
    every: int
    overlap: int = 0

    @classmethod
    def of(cls, run: dict[str, Any]) -> Averaging:
        """That of a recorded run."""
        return cls(run["learners"], run["average_every"], run.get("overlap", 0))

    @property
    def recorded(self) -> dict[str, int]:
        """The same in the record of a run."""
        overlap = {"overlap": self.overlap} if self.overlap else {}
        return {"learners": self.learners, "average_every": self.every, **overlap}

    def __str__(self) -> str:
        overlap = f", overlap {self.overlap}" if self.overlap else ""
        return f"{self.learners} Learners, H = {self.every}{overlap}"


ALONE = Averaging(1, 1)
LEARNING = (
    Learning("dqn-CartPole-v1", 5, overlaps=True),
    Learning("sac-Pendulum-v1", 5, overlaps=True),
    Learning("sac-Hopper-v5", 3, 60_000),
)


@dataclass(frozen=True)
class Network:
    """An algorithm of the thesis's figures of scaling, its spaces, and its batches."""

    name: str
    trainer: Any
    observations: gym.Space[Any]
    actions: gym.Space[Any]
    settings: dict[str, Any]
    batches: tuple[int, ...]

    def setup(self, learners: int, every: int, batch: int) -> LearnerSetup:
        """Learners that train without waiting for transitions, with batches of `batch` together, or little less."""
        capacity = max(4096, batch) * learners
        found = self.observations, self.actions
        return LearnerSetup(
            AveragingSpec(learners, every, timeout_s=60.0),
            functools.partial(self.trainer, *found, **self.settings),
            NativeLearner,
            transition=transition_of(self.trainer, *found, self.settings),
            replay=ReplaySpec(capacity),
            batch_size=batch - batch % learners,
            replay_ratio=float("inf"),
            learning_starts=capacity,
        )


MLP = Network("TD3 256x256", TD3, *VECTORS, {"hidden_sizes": (256, 256)}, (2048, 4096, 8192))
CNN = Network("DQN Nature CNN", DQN, *IMAGES, {}, (256, 1024))


# --- learning -------------------------------------------------------------------------------------------------------


def learned(case: Learning, seeds: int, runs: list[dict[str, Any]], file: Path | None) -> None:
    """Make the runs of a case that are missing in `runs`."""
    with tempfile.TemporaryDirectory() as scratch:
        for how in case.ways():
            made = {run["seed"] for run in runs if run["composition"] == case.composition and Averaging.of(run) == how}
            missing = [seed for seed in range(FIRST_SEED, FIRST_SEED + seeds) if seed not in made]
            if not missing:
                continue
            folder = Path(scratch) / "-".join(map(str, how))
            folder.mkdir()
            found = train(case.composition, missing, folder, case.overrides(how))
            runs += [{**run, **how.recorded} for run in found]
            if file is not None:
                file.parent.mkdir(exist_ok=True)
                write_text(file, json.dumps(runs, indent=1) + "\n")


def learning_rows(case: Learning, runs: Sequence[dict[str, Any]]) -> Iterator[Row]:
    """Returns with several Learners compared with those with one."""
    of_case = [run for run in runs if run["composition"] == case.composition]
    returns = {how: np.array([run["last"] for run in of_case if Averaging.of(run) == how]) for how in case.ways()}
    alone = returns.pop(ALONE)
    low, high = interval(alone)
    for how, found in returns.items():
        if not len(found):
            continue
        bounds = interval(found)
        verdict = "overlapping" if bounds[0] <= high and low <= bounds[1] else "apart"
        middle, theirs = float(interquartile_mean(found)), float(interquartile_mean(alone))
        peer = f"one Learner, {low:,.1f} to {high:,.1f}"
        what = f"{case.composition}, {how}: return, {verdict}"
        yield Row(what, middle, "return", "higher", bounds, len(found), peer, theirs)


# --- scaling --------------------------------------------------------------------------------------------------------


def scaling_rows(network: Network, batches: Sequence[int], seconds: float, repeats: int) -> Iterator[Row]:
    """Scaling factors of Eq. 5.6."""
    for batch in batches:

        def setup(learners: int, every: int, batch: int = batch) -> LearnerSetup:
            return network.setup(learners, every, batch)

        alone = [steps_per_s(setup(1, 1), seconds, network.actions) for _ in range(repeats)]
        one_per_s = float(np.median(alone))
        for every in OF_THESIS:
            rates = [steps_per_s(setup(2, every), seconds, network.actions) for _ in range(repeats)]
            case = f"{network.name}, batch {batch}, H = {every}"
            yield Row.of(f"{case}: 2 Learners", "scaling factor", "higher", np.array(rates) / 4 / one_per_s)
        for learners in (4, 6):
            phases = phases_of(setup, learners, os.cpu_count() or 1, seconds, network.actions)
            for every in OF_THESIS:
                found = simulate(phases, learners, every, cores=learners).steps_per_s / learners**2 / one_per_s
                case = f"{network.name}, batch {batch}, H = {every}"
                yield Row.of(f"{case}: {learners} Learners, simulated", "scaling factor", "higher", [found])


def main() -> None:
    parser = options(__doc__, "one seed of the first composition in 2,000 steps, and one batch")
    parser.add_argument(
        "--part", choices=("learning", "scaling"), help="this part alone; the record keeps the other's rows"
    )
    arguments = parser.parse_args()
    os.environ.update(ONE_THREAD)  # of the processes that it starts
    if arguments.quick:
        case, runs = Learning(LEARNING[0].composition, 1, 2_000), list[dict[str, Any]]()
        learned(case, case.seeds, runs, None)
        shown(learning_rows(case, runs))
        shown(scaling_rows(MLP, MLP.batches[:1], 0.5, 1))
        return
    runs = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else []
    rows = kept(arguments.part)

    def keep(found: Iterable[Row]) -> None:
        rows.extend(shown(found))
        of_learning = ", ".join(sorted({run["commit"] for run in runs}))
        note = f"Returns are of runs of commit {of_learning}."
        write("spo", "make bench-spo", os.cpu_count() or 1, rows, note=note)  # what fails later loses nothing

    if arguments.part != "scaling":
        for case in LEARNING:
            learned(case, case.seeds, runs, FILE)
            keep(learning_rows(case, runs))
    if arguments.part != "learning":
        for network in (MLP, CNN):
            keep(scaling_rows(network, network.batches, 2.0, 2))


def kept(part: str | None) -> list[Row]:
    """The rows of the record that are not of `part`."""
    record = RESULTS / "spo.json"
    if part is None or not record.exists():
        return []
    recorded = [row_of(row) for row in json.loads(record.read_text(encoding="utf-8"))["rows"]]
    return [row for row in recorded if (row.unit == "return") != (part == "learning")]


if __name__ == "__main__":
    main()
