"""One trial of a sweep: a program composed with the trial's settings, and run once for each seed."""

from __future__ import annotations

import csv
import json
import math
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from composer.spec_overrides import toml_text
from composer.sweep.processes import Processes, SweepStoppedError, TrialFailedError
from composer.sweep.spec import SweepSpec
from pearl.errors import FolderHeldError
from pearl.runtime.checkpoint import latest_checkpoint
from pearl.runtime.run_lock import RunLock

_POLL_S = 1.0


def compose_command(spec: SweepSpec, values: Mapping[str, Any], program: Path) -> list[str]:
    """The command that writes the trial's program."""
    command = [sys.executable, "-m", "pearl", "compose", str(spec.path), "--output", str(program)]
    return [*command, *compose_options(spec, values)]


def compose_options(spec: SweepSpec, values: Mapping[str, Any]) -> list[str]:
    """The options of `pearl compose` for the program of a trial with these values."""
    settings = [f"--set={name}={toml_text(value)}" for name, value in {**spec.fixed, **values}.items()]
    return ["--budget", "0", *settings]


class TrialRuns:
    """The runs of one trial, in `folder`. What an earlier sweep process has done there is kept.

    `report` gets (evaluation, objective so far), counted over all seeds, and may raise to end the trial.
    """

    def __init__(
        self,
        spec: SweepSpec,
        values: Mapping[str, Any],
        folder: Path,
        processes: Processes,
        report: Callable[[int, float], None],
        should_stop: Callable[[], bool],
    ) -> None:
        self._spec, self._values, self._folder, self._processes = spec, values, folder, processes
        self._report, self._should_stop = report, should_stop
        self._scores: list[float] = []
        self._reported: set[int] = set()

    def compose(self) -> None:
        """Write the trial's program, unless it is there."""
        self._folder.mkdir(parents=True, exist_ok=True)
        program = self._folder / "program.py"
        if not program.is_file():
            self._processes.run(compose_command(self._spec, self._values, program), self._folder / "compose.log")
        if not program.is_file():
            raise TrialFailedError(f"composing wrote no program ({self._folder / 'compose.log'})")

    def scores(self) -> list[float]:
        """The scores of all seeds, in order. Raises TrialFailedError, SweepStoppedError, and what `report` raises."""
        for number, seed in enumerate(self._spec.seeds):
            self._scores.append(self._score_of(number, seed))
        return self._scores

    def remove_checkpoints(self) -> None:
        """Remove those of all seeds, which hold the replay: their runs have ended, or are not continued."""
        for checkpoints in self._folder.glob("seed-*/checkpoints"):
            shutil.rmtree(checkpoints, ignore_errors=True)

    def _score_of(self, number: int, seed: int) -> float:
        run = self._folder / f"seed-{seed}"
        if self._score_in(run) is None:
            self._wait_until_free(run)
        if (found := self._score_in(run)) is None:
            command = [sys.executable, str(self._folder / "program.py"), "--plain"]
            command += ["--seed", str(seed), "--run-dir", str(run)]
            if latest_checkpoint(run / "checkpoints") is not None:
                command.append("--resume")
            log = self._folder / f"seed-{seed}.log"
            self._processes.run(command, log, lambda: self._look(number, run))
            if (found := self._score_in(run)) is None:
                raise TrialFailedError(f"the run of seed {seed} left no score of {self._spec.score} weights ({log})")
        self._look(number, run)
        self.remove_checkpoints()
        if not math.isfinite(found):
            raise TrialFailedError(f"the score of seed {seed} is {found}")
        return found

    def _wait_until_free(self, run: Path) -> None:
        """Wait for a program that a killed sweep left running: it goes on to its end."""
        while run.is_dir():
            try:
                RunLock(run).release()
                return
            except FolderHeldError:
                if self._should_stop():
                    raise SweepStoppedError from None
                time.sleep(_POLL_S)

    def _score_in(self, run: Path) -> float | None:
        """The score in the summary of a run that has ended; None if there is none."""
        try:
            summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
            return float(summary[self._spec.score]["mean"])  # an interrupted run is not evaluated
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _look(self, number: int, run: Path) -> None:
        """Report the evaluations that are new."""
        for env_steps, mean in _evaluations(run / "evaluations.csv"):
            done = min(self._spec.evaluations, max(1, round(env_steps / self._spec.eval_interval)))
            step = number * self._spec.evaluations + done
            if step not in self._reported and math.isfinite(mean):
                self._reported.add(step)
                self._report(step, self._spec.together([*self._scores, mean]))


def _evaluations(file: Path) -> Iterator[tuple[float, float]]:
    """Environment steps and mean returns of the short evaluations, without a line that is being written."""
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    except OSError:
        return
    for row in csv.DictReader(line for line in lines if line.endswith("\n")):
        if row.get("kind") == "progress":
            try:
                yield float(row["env_steps"]), float(row["mean_return"])
            except (KeyError, TypeError, ValueError):
                continue
