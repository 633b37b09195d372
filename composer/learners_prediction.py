"""Measures and predicts counts of Learners, to choose from."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from composer.learners import ON_HOST_ONLY, check_host, check_learners, runs_several
from composer.learners_choice import (
    Intervals,
    LearnersCandidate,
    LearnersChoice,
    PredictAt,
    choose_learners,
)
from composer.matrix import AssignmentMatrix, LearnerCell, PairCell
from composer.placement import Placement
from composer.platform import Platform
from composer.problem import Problem
from composer.profiling.profiler import Profiler
from pearl.errors import ConfigurationError
from pearl.spec import LearnersSpec

USUAL_TIMESTEPS = 100_000  # of a program, if nothing else is stated

Profiled = Callable[[Problem, Platform], tuple[Profiler, AssignmentMatrix, Callable[..., Placement]]]
"""Fills the matrix of a problem on a platform; `place` for both."""


class LearnersPredictions:
    """Predictions of several Learners for `problem`, whose composition is `profiler`, `matrix` and `placement`.

    `profiled` measures a problem. `misses` counts the measurements that were made.
    """

    def __init__(
        self,
        problem: Problem,
        profiler: Profiler,
        matrix: AssignmentMatrix,
        placement: Placement,
        profiled: Profiled,
    ) -> None:
        self._problem, self._profiler, self._matrix, self._placement = problem, profiler, matrix, placement
        self._profiled = profiled
        self.misses = 0

    def choice(self, stated: LearnersSpec, auto: tuple[str, ...], timesteps: int | None) -> LearnersChoice:
        """The best of what `auto` leaves open ("count", "average_every"), in a run of so many environment steps.

        Raises PearlError where a stated count is not possible.
        """
        intervals = Intervals(self._gradient_steps(timesteps or USUAL_TIMESTEPS))
        every = None if "average_every" in auto else stated.average_every

        def predict(count: int) -> PredictAt:
            return self._predict(dataclasses.replace(stated, count=count))

        if "count" not in auto:
            return choose_learners((stated.count,), intervals, predict, every=every)
        host = self._profiler.platform.host
        cores = host.cores or 1
        counts = [2**power for power in range(1, cores.bit_length()) if 2**power <= cores]
        return choose_learners(
            counts,
            intervals,
            predict,
            one=self._candidate(self._placement, self._profiler, self._matrix),
            every=every,
            left_out=[f"more than {max(counts, default=1)} Learner(s): {host.name} has {cores} core(s)"],
        )

    def _gradient_steps(self, timesteps: int) -> float:
        train = self._problem.train
        return timesteps * train.replay_ratio / train.batch_size

    def _predict(self, learners: LearnersSpec) -> PredictAt:
        """Measure so many Learners; `average_every` is stated afterwards."""
        platform, problem = self._profiler.platform, dataclasses.replace(self._problem, learners=learners)
        host = platform.host
        check_host(host, problem.implementation)
        check_learners(problem, self._profiler.probe, ())
        fastest = self._profiler.fastest_pair(self._matrix)
        if fastest is None or not runs_several(host, host.name):
            raise ConfigurationError(f"{learners.count} Learners: {ON_HOST_ONLY}, which {host.name} cannot be.")
        # Nothing else can take several, so nothing else is measured.
        own = tuple(link for link in platform.connections if link.source == link.target == host.name)
        problem = dataclasses.replace(problem, implementation=fastest.learner.implementation)
        profiler, matrix, decide = self._profiled(problem, Platform((host,), own))
        self.misses += profiler.misses
        several = profiler.side_by_side(matrix)
        assert several is not None, "the matrix has the pair that was forced"

        def at(every: int) -> LearnersCandidate:
            spec = dataclasses.replace(learners, average_every=every, overlap=min(learners.overlap, every))
            placement = decide(
                matrix,
                profiler.platform,
                learners=spec,
                average_us=several.waited_us(spec),
                stretch=several.stretch(spec),
            )
            return self._candidate(placement, profiler, matrix)

        return at

    def _candidate(self, placement: Placement, profiler: Profiler, matrix: AssignmentMatrix) -> LearnersCandidate:
        terms = placement.terms
        paced_us = max(placement.t_itr_us, _with_actors_us(placement, profiler, matrix))
        return LearnersCandidate(
            placement.learner_count,
            placement.average_every,
            placement.eps,
            min(placement.eps, placement.batch_size / paced_us * 1e6),
            terms.average_us,
            terms.waiting_us,
        )


def _with_actors_us(placement: Placement, profiler: Profiler, matrix: AssignmentMatrix) -> float:
    """Microseconds of an iteration with the wait for transitions, and for the cores that Actors need; 0: not known."""
    sharing, learner = profiler.sharing, placement.learner_config
    if sharing is None or math.isinf(sharing.collect_us):
        return 0.0
    if not profiler.platform.shared_silicon(profiler.platform.host.name, learner.device):
        return sharing.collect_us
    for option in matrix[learner.device].learners:
        cell = option.pair if placement.setting == 2 else option.learner
        if isinstance(cell, PairCell) and cell.learner.implementation == learner.implementation:
            return sharing.iteration_us(cell.iteration_us, learner.threads)
        if isinstance(cell, LearnerCell) and cell.implementation == learner.implementation:
            return sharing.iteration_us(cell.step.value_us, learner.threads)
    return 0.0
