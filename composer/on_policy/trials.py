"""Tries the programs of the most promising placements with rollouts, and places by what they did.

The sum of separately measured parts leaves out how processes and threads wake each other and share cores.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from composer.matrix import Measurement
from composer.on_policy.placement import RolloutCandidate, RolloutPlacement
from composer.on_policy.profiling import RolloutProfiler
from composer.trials import LONGEST_RUN_S, OPTIMISM, USUAL_RUN_S, Budget, FailedError, bench_program
from pearl.backends import backend_of
from pearl.errors import GenerationError

_TIMES = ("paced", "free", "overall")


@dataclass(frozen=True)
class RolloutTrials:
    """Runs programs of one problem, or knows what they did in earlier compositions.

    `write` writes the program of a placement's choice to a path; they run in `folder`.
    """

    profiler: RolloutProfiler
    write: Callable[[RolloutPlacement, Path], Path]
    folder: Path
    budget: Budget

    def placed(self, placement: RolloutPlacement) -> RolloutPlacement:
        """The placement with the times of the programs that were tried, the fastest of these first."""
        until = time.monotonic() + self.budget.seconds
        found: list[RolloutCandidate] = []
        for candidate in placement.candidates:
            best_us = min((c.terms.t_itr_us for c in found if c.tried is not None), default=float("inf"))
            hopeful = candidate.terms.t_itr_us < best_us * OPTIMISM
            found.append(self._tried(placement, candidate, until) if hopeful else candidate)
        ranked = sorted(found, key=lambda candidate: (candidate.tried is None, candidate.terms.t_itr_us))
        return replace(placement, candidates=tuple(ranked))

    def _tried(self, placement: RolloutPlacement, candidate: RolloutCandidate, until: float) -> RolloutCandidate:
        """The candidate with what its program did; as it is where that cannot be known."""
        context, platform = self.profiler, self.profiler.platform
        devices = [platform.device(name) for name in (candidate.advantages.device, candidate.learner.device)]
        if any(backend_of(device).estimator(device) is not None or device.absent for device in devices):
            return candidate
        problem, on_gae, on_learner = context.problem, *devices
        rollout = {name: value for name, value in vars(problem.rollout).items() if value is not None}
        parameters = {
            **rollout,
            "gae_device": context.fingerprint(on_gae),
            "implementation": candidate.learner.implementation,
            "threads": candidate.learner.threads,
            "actors": problem.actors.count,
            "env": problem.actors.env,
            "env_kwargs": repr(dict(problem.actors.env_kwargs)),
        }
        key, name = context.key("rollout program", on_learner, parameters), candidate.text
        if not context.is_known(key, _TIMES, on_learner):
            if not self.budget.seconds or time.monotonic() + USUAL_RUN_S > until:
                return candidate
            context.begin(f"trying {name}, as a program")
        try:
            times = context.known(key, _TIMES, lambda: self._run(placement, candidate), on_learner)
        except (GenerationError, FailedError, subprocess.TimeoutExpired) as error:
            context.report(f"not tried: {name}: {error}")
            return candidate
        us = times["paced"].value_us
        context.report(f"tried {name}: {placement.rows / us * 1e6:,.0f} steps/s")
        return replace(candidate, terms=replace(candidate.terms, t_itr_us=us), tried=times["paced"])

    def _run(self, placement: RolloutPlacement, candidate: RolloutCandidate) -> dict[str, Measurement]:
        path = self.folder / f"{len(list(self.folder.iterdir()))}.py"
        return bench_program(self.write(placement.choosing(candidate), path), placement.rows, LONGEST_RUN_S)
