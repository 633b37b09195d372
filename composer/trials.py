"""Tries the most promising placements as the programs that they become, and takes the fastest.

A program's parts do not show how threads and processes wait for each other and share cores. Its own first second does.
"""

from __future__ import annotations

import functools
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from composer.absent import NotCalibratedError
from composer.calibration import CalibrationKey
from composer.matrix import Candidacy
from composer.measurement import Measurement
from composer.placement import Candidate, Placement, WholeIteration
from composer.profiling.context import ProfilingContext
from composer.profiling.keys import kernel_hash
from pearl.backends import backend_of
from pearl.devices.description import Device
from pearl.errors import ConfigurationError, GenerationError, PearlError

LEAST_BUDGET_S = 15.0  # a program starts, warms up and is measured
USUAL_BUDGET_S = 60.0
BUDGET_VARIABLE = "PEARL_BUDGET_S"

_MEASURED_S = 1.0  # at each pace
OPTIMISM = 2.0  # a program is hardly ever more than this many times as fast as its parts predict
DECISIVE = OPTIMISM**2  # a program predicted to be this many times as slow as another is not the fastest
CLOSE = 1.25  # two runs of one program may differ by this factor: programs that differ less are tried again
USUAL_RUNS = 2  # of those, and with a budget of the user's of all
MOST_RUNS = 3  # of those, with a budget of the user's
USUAL_RUN_S = 6.0
LONGEST_RUN_S = 120.0

_TIMES = ("paced", "free", "overall")

Decide = Callable[[Mapping[Candidacy, WholeIteration]], Placement]


@dataclass(frozen=True)
class Budget:
    """The seconds for programs to try. One that the user `stated` is used up."""

    seconds: float
    stated: bool = True

    @classmethod
    def of(cls, seconds: float | None) -> Budget:
        """A budget of so many seconds; None: that of the variable PEARL_BUDGET_S, else as much as it takes, up to 60 s.

        Raises ConfigurationError for a time in which nothing can be measured; 0 tries nothing.
        """
        if seconds is not None:
            return cls(_checked(seconds, "A time budget"))
        text = os.environ.get(BUDGET_VARIABLE, "")
        if not text:
            return cls(USUAL_BUDGET_S, stated=False)
        try:
            stated = float(text)
        except ValueError:
            raise ConfigurationError(
                f"The variable {BUDGET_VARIABLE} must be a number of seconds; found {text!r}."
            ) from None
        return cls(_checked(stated, f"The variable {BUDGET_VARIABLE}"))


def _checked(seconds: float, what: str) -> float:
    if isinstance(seconds, int | float) and (seconds == 0 or LEAST_BUDGET_S <= seconds < math.inf):
        return seconds
    raise ConfigurationError(
        f"{what} must be at least {LEAST_BUDGET_S:g} s, in which one program starts and is measured, or 0 to try none "
        f"and place by the separate measurements alone; found {seconds!r}."
    )


@dataclass(frozen=True)
class Speed:
    """EPS of a program at its replay ratio: while a batch was under way, and with all waiting included."""

    eps: float
    overall_eps: float


@dataclass
class ProgramRuns:
    """Runs programs of one problem, or takes their times from earlier compositions.

    `write` writes a placement's program to a path; they run in `folder`.
    """

    context: ProfilingContext
    write: Callable[[Placement, Path], Path]
    folder: Path

    def can_count(self, candidate: Candidate) -> bool:
        """Whether the program's speed says something: none of its devices is modelled or emulated."""
        return all(backend_of(device).estimator(device) is None for device in self._devices(candidate))

    def can_run(self, candidate: Candidate) -> bool:
        """Whether the program can be tried: its speed counts, and all of its devices are here."""
        return self.can_count(candidate) and not any(device.absent for device in self._devices(candidate))

    def _devices(self, candidate: Candidate) -> list[Device]:
        return [self.context.platform.device(name) for name in candidate.pair]

    def is_known(self, candidate: Candidate, run: int) -> bool:
        """Whether the run has been made."""
        return self.context.is_known(self._key(candidate, run), _TIMES, self._learner(candidate))

    def run(self, placement: Placement, candidate: Candidate, run: int, until: float) -> WholeIteration:
        """The run, made now if it is not known.

        Raises OutOfTimeError if `time.monotonic()` comes to `until`, GenerationError where there is no program,
        NotCalibratedError for an absent device, and FailedError.
        """
        if not self.is_known(candidate, run):
            self.context.begin(f"trying {_name(candidate)}, as a program")
        work = functools.partial(self._measure, placement, candidate, until)
        found = self.context.known(self._key(candidate, run), _TIMES, work, self._learner(candidate))
        return WholeIteration(*(found[name] for name in _TIMES))

    def speed(self, placement: Placement, run: int, until: float) -> Speed | None:
        """How fast the chosen program is; None where it cannot be tried before `until`, or fails, which is reported."""
        chosen = placement.chosen
        if not self.can_run(chosen) or (not self.is_known(chosen, run) and time.monotonic() + USUAL_RUN_S > until):
            return None
        try:
            whole = self.run(placement, chosen, run, until)
        except (GenerationError, NotCalibratedError, FailedError, OutOfTimeError) as error:
            self.context.report(f"not tried: {_name(chosen)}: {error}")
            return None
        eps, overall = (placement.batch_size / found.value_us * 1e6 for found in (whole.paced, whole.overall))
        return Speed(eps, overall)

    def _measure(self, placement: Placement, candidate: Candidate, until: float) -> dict[str, Measurement]:
        path = self.folder / f"{len(list(self.folder.iterdir()))}.py"
        return bench_until(self.write(placement.with_choice(**candidate.choice), path), placement.batch_size, until)

    def _learner(self, candidate: Candidate) -> Device:
        return self.context.platform.device(candidate.learner.device)

    def _key(self, candidate: Candidate, run: int) -> CalibrationKey:
        context, (on_i, on_j) = self.context, self._devices(candidate)
        storage = context.platform.device(candidate.storage[0].device)
        problem, replay, learner = context.problem, candidate.replay, candidate.learner
        parameters = {
            **context.replay_parameters(replay.fanout, replay.workers),
            "threads": learner.threads,
            "sub_batches": learner.sub_batches,
            "prefetch": learner.prefetch,
            "replay_device": context.fingerprint(on_i),
            "replay_kernels": "" if on_i.absent else kernel_hash(module=backend_of(on_i).kernels),
            "storage_device": context.fingerprint(storage),
            "replay_ratio": problem.train.replay_ratio,
            "priority_update_delay": problem.train.priority_update_delay,
            "weight_sync_interval": problem.train.weight_sync_interval,
            "insertion_rows": problem.train.insertion_rows,
            **context.actor_parameters,
            "actors": problem.actors.count,
            "run": run,
        }
        return context.key("program", on_j, parameters, learner.implementation)


class FailedError(PearlError):
    """A program that was tried ended with an error."""


class OutOfTimeError(Exception):
    """The budget ended while a program ran."""


def _name(candidate: Candidate) -> str:
    on_i, on_j, implementation = candidate.names
    return f"RM on {on_i}, {implementation} Learner on {on_j}"


@dataclass
class Trials:
    """Tries programs of placements, and places again with what they did.

    `decide` is Algorithm 1 with the measured times of whole programs.
    """

    programs: ProgramRuns
    decide: Decide
    budget: Budget
    report: Callable[[str], None]
    _runs: dict[Candidacy, list[WholeIteration]] = field(default_factory=dict, init=False)
    _failed: set[Candidacy] = field(default_factory=set, init=False)
    _longest_s: float = field(default=0.0, init=False)

    def placed(self) -> Placement:
        """The placement with the times of the most promising programs, and the best of these chosen.

        Known trials cost no time. A program that cannot be written, fails, or hangs is reported, and not chosen.
        """
        until = time.monotonic() + self.budget.seconds
        placement = self.decide({})
        for candidate in filter(self.programs.can_count, placement.candidates):
            while self._is_known(candidate, run := len(self._runs.get(candidate.names, []))):
                self._try(placement, candidate, run, until)
        while True:
            placement = self.decide({names: _pooled(runs) for names, runs in self._runs.items()})
            following = next(self._next(placement), None)
            if following is None or time.monotonic() + self._longest_s >= until:
                if self._is_decided(placement) and self.budget.seconds and not self.budget.stated:
                    other = f"all others are predicted to be {DECISIVE:g} times as slow"
                    self.report(
                        f"no program is tried: {other if len(placement.candidates) > 1 else 'there is no other'}"
                    )
                return self._without_failed(placement)
            try:
                self._try(placement, following, len(self._runs.get(following.names, [])), until)
            except OutOfTimeError:
                return self._without_failed(placement)

    def _next(self, placement: Placement) -> Iterator[Candidate]:
        """Candidates to try, the most urgent first."""
        candidates = [c for c in placement.candidates if c.names not in self._failed and self.programs.can_run(c)]
        tried = [c for c in candidates if c.whole is not None]
        new = [c for c in candidates if c.whole is None]
        best = max((c.score(placement.metric) for c in tried), default=0.0)
        if not self.budget.seconds or (not self.budget.stated and self._is_decided(placement)):
            return
        yield from (c for c in new if c.score(placement.metric) * OPTIMISM > best)
        if self.budget.stated:
            yield from new
        close = [c for c in tried if c.score(placement.metric) * CLOSE >= best]
        if self.budget.stated:
            yield from self._again(close, MOST_RUNS)
            yield from self._again(tried, USUAL_RUNS)
        elif len(close) > 1:
            yield from self._again(close, USUAL_RUNS)

    def _is_decided(self, placement: Placement) -> bool:
        """Whether the parts alone decide: all other programs are predicted to be far slower than the best."""
        scores = [c.score(placement.metric) for c in placement.candidates if c.names not in self._failed]
        return not self._runs and sum(score * DECISIVE >= max(scores) for score in scores) == 1

    def _again(self, candidates: list[Candidate], most: int) -> list[Candidate]:
        """Those that ran less than `most` times, the fewest first."""
        runs = {candidate.names: len(self._runs[candidate.names]) for candidate in candidates}
        return sorted((c for c in candidates if runs[c.names] < most), key=lambda c: runs[c.names])

    def _is_known(self, candidate: Candidate, run: int) -> bool:
        return run < MOST_RUNS and candidate.names not in self._failed and self.programs.is_known(candidate, run)

    def _try(self, placement: Placement, candidate: Candidate, run: int, until: float) -> None:
        began = time.monotonic()
        try:
            whole = self.programs.run(placement, candidate, run, until)
        except (GenerationError, NotCalibratedError, FailedError) as error:
            self.report(f"not tried: {_name(candidate)}: {error}")
            self._failed.add(candidate.names)
            return
        self._longest_s = max(self._longest_s, time.monotonic() - began)
        self._runs.setdefault(candidate.names, []).append(whole)
        paced, free = (placement.batch_size / found.value_us * 1e6 for found in (whole.paced, whole.free))
        pace = "" if placement.replay_ratio is None else f" at a replay ratio of {placement.replay_ratio:g}"
        expected = f"; predicted {candidate.eps:,.0f}" if candidate.whole is None else ""
        self.report(f"tried {_name(candidate)}: {paced:,.0f} EPS{pace}, {free:,.0f} with free Actors{expected}")

    def _without_failed(self, placement: Placement) -> Placement:
        """The placement with the best candidate whose program did not fail."""
        if not self._failed:
            return placement
        working = [c for c in placement.candidates if c.names not in self._failed]
        if not working:
            self.report("no program of a placement could be tried; the choice is by separate measurements")
            return placement
        return placement.with_choice(**working[0].choice)


def _pooled(runs: list[WholeIteration]) -> WholeIteration:
    """All runs of a program as one."""
    return WholeIteration(*(pooled([getattr(run, pace) for run in runs]) for pace in _TIMES))


def pooled(runs: Sequence[Measurement]) -> Measurement:
    """All runs of a program as one: the median of their means, with the spread in and between them."""
    if len(runs) == 1:
        return runs[0]
    values = [run.value_us for run in runs]
    low, high = (float(np.median([getattr(run, side) for run in runs])) for side in ("p20_us", "p80_us"))
    n = sum(run.n for run in runs)
    return Measurement(statistics.median(values), min(low, *values), max(high, *values), n, runs[0].source)


def bench_until(program: Path, batch_size: int, until: float) -> dict[str, Measurement]:
    """What `bench_program` measures, ended when `time.monotonic()` comes to `until`.

    Raises OutOfTimeError then, and FailedError for a program that fails or takes longer than LONGEST_RUN_S.
    """
    left_s = until - time.monotonic()
    try:
        return bench_program(program, batch_size, min(LONGEST_RUN_S, left_s))
    except subprocess.TimeoutExpired:
        if left_s < LONGEST_RUN_S:
            raise OutOfTimeError("the time for trials ended while it ran") from None
        raise FailedError(f"it had not ended after {LONGEST_RUN_S:g} s") from None


def bench_program(program: Path, batch_size: int, limit_s: float) -> dict[str, Measurement]:
    """Each time by its name; raises subprocess.TimeoutExpired after `limit_s`."""
    folder = program.with_suffix("")
    command = [sys.executable, str(program), "--bench", "--bench-both", "--bench-seconds", str(_MEASURED_S)]
    done = subprocess.run(
        [*command, "--run-dir", str(folder)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=limit_s,
    )
    if done.returncode:
        raise FailedError(done.stdout.strip().splitlines()[-1] if done.stdout.strip() else "it wrote nothing")
    found = json.loads((folder / "bench.json").read_text(encoding="utf-8"))
    paced, *_, free = measurements if len(measurements := found.get("measurements", [])) > 1 else (found, found)
    return {
        "paced": _mean(batch_size / paced["measured_eps"] * 1e6, paced["iteration_samples_us"]),
        "free": _mean(batch_size / free["measured_eps"] * 1e6, free["iteration_samples_us"]),
        "overall": _mean(batch_size / paced["overall_eps"] * 1e6, ()),
    }


def _mean(value_us: float, intervals_us: Sequence[float]) -> Measurement:
    """The mean of a run, with the spread of its intervals: where Actors come and go, a median would leave one out."""
    low, high = np.percentile([*intervals_us, value_us], (20, 80))
    n = max(1, len(intervals_us))
    return Measurement(value_us, min(float(low), value_us), max(float(high), value_us), n, "measured")
