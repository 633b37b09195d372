"""Measures and predicts counts of Learners, to choose from."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from composer.learner_nodes import LearnersModel, layouts
from composer.learners import ON_HOST_ONLY, check_host, check_learners, runs_several
from composer.learners_choice import (
    NEAR,
    Intervals,
    LearnersCandidate,
    LearnersChoice,
    PredictAt,
    choose_learners,
)
from composer.matrix import AssignmentMatrix, LearnerCell, PairCell
from composer.nodes import spread
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
        self._predicted: dict[tuple[int, int], list[LearnersCandidate]] = {}
        self._threads: dict[int, int] = {}
        self.misses = 0

    def choice(self, stated: LearnersSpec, auto: tuple[str, ...], timesteps: int | None) -> LearnersChoice:
        """The best choice of the open values, in a run of this many environment steps.

        `auto` names the open values: "count", "average_every"; the nodes are open, too, if there are some and none are
        stated. Raises PearlError where a stated count is not possible.
        """
        intervals = Intervals(self._gradient_steps(timesteps or USUAL_TIMESTEPS))
        every = None if "average_every" in auto else stated.average_every

        def predict(count: int) -> PredictAt:
            return self._predict(dataclasses.replace(stated, count=count))

        if "count" not in auto:
            return self._with_others(choose_learners((stated.count,), intervals, predict, every=every))
        platform = self._profiler.platform
        cores = (platform.host.cores or 1) + sum(node.device.cores or 0 for node in platform.nodes)
        counts = [2**power for power in range(1, cores.bit_length()) if 2**power <= cores]
        where = f"{platform.host.name} and its nodes have" if platform.nodes else f"{platform.host.name} has"
        choice = choose_learners(
            counts,
            intervals,
            predict,
            one=self._candidate(
                self._placement,
                max(self._placement.t_itr_us, _with_actors_us(self._placement, self._profiler, self._matrix)),
            ),
            every=every,
            left_out=[f"more than {max(counts, default=1)} Learner(s): {where} {cores} core(s)"],
        )
        return self._with_others(choice)

    def _with_others(self, choice: LearnersChoice) -> LearnersChoice:
        """The choice with the predictions of the same Learners on other nodes."""
        same = self._predicted.get((choice.count, choice.average_every), ())
        return dataclasses.replace(choice, elsewhere=tuple(one for one in same if one.nodes != choice.nodes))

    def threads(self, count: int) -> int:
        """Threads of each of `count` Learners, as they were predicted."""
        return self._threads.get(count, 1)

    def _gradient_steps(self, timesteps: int) -> float:
        train = self._problem.train
        return timesteps * train.replay_ratio / train.batch_size

    def _predict(self, learners: LearnersSpec) -> PredictAt:
        """Measure so many Learners; `average_every` is stated afterwards."""
        platform, most_threads = self._profiler.platform, _most_threads(learners, self._profiler.platform)
        problem = dataclasses.replace(self._problem, learners=learners, most_threads=most_threads)
        host = platform.host
        check_host(host, problem.implementation)
        check_learners(problem, self._profiler.probe, ())
        fastest = self._profiler.fastest_pair(self._matrix)
        if fastest is None or not runs_several(host, host.name):
            raise ConfigurationError(f"{learners.count} Learners: {ON_HOST_ONLY}, which {host.name} cannot be.")
        # Nothing else can take several, so nothing else is measured.
        own = tuple(link for link in platform.connections if link.source == link.target == host.name)
        problem = dataclasses.replace(problem, implementation=fastest.learner.implementation)
        profiler, matrix, decide = self._profiled(problem, Platform((host,), own, platform.nodes))
        self.misses += profiler.misses
        several, pair = profiler.side_by_side(matrix), profiler.fastest_pair(matrix)
        assert several is not None, "the matrix has the pair that was forced"
        assert pair is not None
        if platform.nodes:
            return self._on_nodes(problem, LearnersModel.of(problem, profiler, several, pair), matrix, decide)

        def at(every: int) -> LearnersCandidate:
            spec = _averaging(learners, every)
            placement = decide(
                matrix,
                profiler.platform,
                learners=spec,
                average_us=several.waited_us(spec),
                stretch=several.stretch(spec),
            )
            paced_us = max(placement.t_itr_us, _with_actors_us(placement, profiler, matrix))
            return self._candidate(placement, paced_us)

        return at

    def _on_nodes(
        self, problem: Problem, model: LearnersModel, matrix: AssignmentMatrix, decide: Callable[..., Placement]
    ) -> PredictAt:
        """Predict the Learners on each of some layouts; raises what is wrong with the last if none has room."""
        platform, threads = self._profiler.platform, model.pair.learner.threads
        count = problem.learners.count
        self._threads[count] = threads
        found, error = [], None
        for nodes in [problem.learners.nodes] if problem.learners.nodes else layouts(count, threads, platform):
            learners = dataclasses.replace(problem.learners, nodes=nodes)
            try:
                found.append((nodes, spread(problem, platform, model.transition_us, threads, learners)))
            except ConfigurationError as no_room:
                error = no_room
        if not found:
            assert error is not None
            raise error

        def at(every: int) -> LearnersCandidate:
            candidates = []
            for nodes, shares in found:
                spec = _averaging(dataclasses.replace(problem.learners, nodes=nodes), every)
                placement = decide(matrix, platform, learners=spec, **model.arguments(spec, shares))
                candidate = self._candidate(placement, max(placement.t_itr_us, model.pace_us(spec, shares)))
                candidates.append(
                    dataclasses.replace(candidate, nodes=nodes, network_us=model.network_us(shares) / every)
                )
            self._predicted[count, every] = candidates
            fastest = max(candidate.overall_eps for candidate in candidates)
            return next(candidate for candidate in candidates if candidate.overall_eps * NEAR >= fastest)

        return at

    @staticmethod
    def _candidate(placement: Placement, paced_us: float) -> LearnersCandidate:
        """`paced_us`: an iteration with the wait for transitions, and for the cores that Actors need."""
        terms = placement.terms
        return LearnersCandidate(
            placement.learner_count,
            placement.average_every,
            placement.eps,
            min(placement.eps, placement.batch_size / paced_us * 1e6),
            terms.average_us,
            terms.waiting_us,
        )


def _averaging(learners: LearnersSpec, every: int) -> LearnersSpec:
    return dataclasses.replace(learners, average_every=every, overlap=min(learners.overlap, every))


def _most_threads(learners: LearnersSpec, platform: Platform) -> int:
    """The most threads of a Learner on the nodes that are stated for them; 0: nothing is stated."""
    cores = {node.device.node: node.device.cores or 1 for node in platform.nodes} | {"": platform.host.cores or 1}
    return min((max(1, cores.get(node, 1) // count) for node, count in learners.nodes), default=0)


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
