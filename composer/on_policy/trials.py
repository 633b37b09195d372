"""Tries the programs of the most promising placements with rollouts, and places by their measured times.

The sum of separately measured parts leaves out how processes and threads wake each other and share cores.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from composer.measurement import Measurement
from composer.on_policy.placement import RolloutCandidate, RolloutPlacement, of_each_learner
from composer.on_policy.profiling import RolloutProfiler
from composer.trials import (
    CLOSE,
    DECISIVE,
    MOST_RUNS,
    OPTIMISM,
    USUAL_RUN_S,
    USUAL_RUNS,
    Budget,
    FailedError,
    OutOfTimeError,
    bench_until,
    pooled,
)
from pearl.backends import backend_of
from pearl.errors import GenerationError

_TIMES = ("paced", "free", "overall")


@dataclass(frozen=True)
class RolloutTrials:
    """Runs programs of one problem, or takes their times from earlier compositions.

    `write` writes the program of a placement's choice to a path; they run in `folder`.
    """

    profiler: RolloutProfiler
    write: Callable[[RolloutPlacement, Path], Path]
    folder: Path
    budget: Budget

    def placed(self, placement: RolloutPlacement) -> RolloutPlacement:
        """The placement with the times of the programs that were tried, the fastest of these first.

        Programs about as fast as the fastest run again while time is left: of several single runs, the fastest had
        luck too, and its time would be too good a prediction.
        """
        decided = not self.budget.stated and is_decided(placement)
        until = 0.0 if decided else time.monotonic() + self.budget.seconds
        runs: dict[str, list[Measurement]] = {}
        failed: set[str] = set()
        most = MOST_RUNS if self.budget.stated else USUAL_RUNS
        for candidate in placement.candidates if self.budget.stated else of_each_learner(placement.candidates):
            if candidate.terms.t_itr_us < _best_us(runs) * OPTIMISM:
                self._try(placement, candidate, runs, failed, until)
        while True:
            limit_us = _best_us(runs) * CLOSE
            close = [c for c in placement.candidates if c.text in runs and pooled(runs[c.text]).value_us <= limit_us]
            again = [c for c in close if len(runs[c.text]) < most]
            if not again or (len(close) < 2 and not self.budget.stated):
                break
            if not self._try(placement, min(again, key=lambda c: len(runs[c.text])), runs, failed, until):
                break
        if decided and not runs:
            self.profiler.report("no program is tried: others are clearly slower by their parts, or differ in threads")
        found = [_measured(candidate, runs.get(candidate.text)) for candidate in placement.candidates]
        ranked = sorted(found, key=lambda c: (c.text in failed, math.inf if c.tried is None else c.terms.t_itr_us))
        return replace(placement, candidates=tuple(ranked))

    def _try(
        self,
        placement: RolloutPlacement,
        candidate: RolloutCandidate,
        runs: dict[str, list[Measurement]],
        failed: set[str],
        until: float,
    ) -> bool:
        """Add a run of the candidate's program to `runs`; False where it cannot be run, or not in time.

        A program that fails is added to `failed`.
        """
        run = len(runs.get(candidate.text, ()))
        context, platform = self.profiler, self.profiler.platform
        devices = [platform.device(name) for name in (candidate.advantages.device, candidate.learner.device)]
        if any(backend_of(device).estimator(device) is not None or device.absent for device in devices):
            return False
        problem, on_gae, on_learner = context.problem, *devices
        rollout = {name: value for name, value in vars(problem.rollout).items() if value is not None}
        parameters = {
            **rollout,
            "gae_device": context.fingerprint(on_gae),
            "implementation": candidate.learner.implementation,
            "threads": candidate.learner.threads,
            "actors": problem.actors.count,
            "env": problem.actors.env_name,
            "env_kwargs": repr(dict(problem.actors.env_kwargs)),
            "wrappers": problem.actors.wrappers_text,
            **({"run": run} if run else {}),
        }
        key, name = context.key("rollout program", on_learner, parameters), candidate.text
        if not context.is_known(key, _TIMES, on_learner):
            if not self.budget.seconds or time.monotonic() + USUAL_RUN_S > until:
                return False
            context.begin(f"trying {name}, as a program")
        try:
            times = context.known(key, _TIMES, lambda: self._run(placement, candidate, until), on_learner)
        except (GenerationError, FailedError, OutOfTimeError) as error:
            context.report(f"not tried: {name}: {error}")
            if not isinstance(error, OutOfTimeError):
                failed.add(name)
            return False
        us = times["paced"].value_us
        context.report(f"tried {name}: {placement.rows / us * 1e6:,.0f} steps/s")
        runs.setdefault(name, []).append(times["paced"])
        return True

    def _run(self, placement: RolloutPlacement, candidate: RolloutCandidate, until: float) -> dict[str, Measurement]:
        path = self.folder / f"{len(list(self.folder.iterdir()))}.py"
        return bench_until(self.write(placement.choosing(candidate), path), placement.rows, until)


def is_decided(placement: RolloutPlacement) -> bool:
    """Whether the parts alone decide: all others are far slower, or differ in the number of threads alone.

    The steps of one Learner with different numbers of threads were measured in the same way, and the placement takes
    the fewest that are fast enough.
    """
    best, *others = of_each_learner(placement.candidates)
    return all(other.terms.t_itr_us >= DECISIVE * best.terms.t_itr_us for other in others)


def _best_us(runs: Mapping[str, Sequence[Measurement]]) -> float:
    return min((pooled(of_one).value_us for of_one in runs.values()), default=math.inf)


def _measured(candidate: RolloutCandidate, runs: Sequence[Measurement] | None) -> RolloutCandidate:
    if runs is None:
        return candidate
    tried = pooled(runs)
    return replace(candidate, terms=replace(candidate.terms, t_itr_us=tried.value_us), tried=tried)
