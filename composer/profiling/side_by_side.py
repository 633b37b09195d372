"""Measures several Learners at the same time: their gradient steps, and the averages of their parameters."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from composer.matrix import PairCell
from composer.measurement import Measurement
from composer.problem import Problem
from composer.profiling.averaging import measure_average, run_threads
from composer.profiling.context import ProfilingContext
from composer.profiling.measuring import WARM_UP, on_own_thread
from pearl.algorithms.trainer import make_trainer
from pearl.backends import backend_of, learners
from pearl.backends.replay_managers import make_replay_manager
from pearl.learner.protocol import Learner
from pearl.local_sgd.averaging import AveragingSpec
from pearl.local_sgd.local_learner import LearnerSetup, LocalLearner
from pearl.local_sgd.parameters import TrainerParameters
from pearl.local_sgd.shared_memory import AveragingServer, SharedMemoryAverager
from pearl.local_sgd.simulation import Phases, simulate
from pearl.local_sgd.steps import Steps, make_steps
from pearl.replay.storage import DataStorage
from pearl.spec import LearnersSpec

_ALONE, _TOGETHER, _ROUNDS = 0.25, 0.5, 0.5  # shares of the budget
_MOST_STEPS, _MOST_ROUNDS = 2000, 400
_MOST_SLOTS, _MOST_BYTES = 16_384, 64 << 20  # of a bank: too large for a core's caches, and quickly filled
_FILL_ROWS = 4096
_PATIENCE_S = 60.0  # of a Learner's thread for another
_SIMULATED_ROUNDS = 400
_FACTS = 2  # that Learners tell each other with an average
_PARTS = ("sample", "gather", "train", "update")


@dataclass(frozen=True)
class SideBySide:
    """Several Learners of a problem, as they were measured at the same time, in microseconds.

    `alone_us` is the mean gradient step of one that trains alone, sampling and all else included; `step_us` are single
    steps of all at the same time, in the order in which each made them. `average_us` is an average, from when the last
    Learner hands in. `at_once` Learners were measured: all, but for those that are on other nodes.
    """

    alone_us: float
    step_us: np.ndarray = field(repr=False)
    average_us: float
    at_once: int = 0

    def stretch(self, learners: LearnersSpec, scales: Sequence[float] | None = None) -> float:
        """How many times as long as alone a step takes, with the wait for the slowest of a round; at least 1.

        By simulation of rounds of `average_every` steps (thesis Eq. 5.5, with stragglers). `scales`: see `simulate`.
        """
        return max(1.0, self._iteration_us(learners, 0.0, scales) / self.alone_us)

    def waited_us(
        self, learners: LearnersSpec, scales: Sequence[float] | None = None, average_us: float | None = None
    ) -> float:
        """Microseconds that an average costs: all of it, less what Learners train meanwhile (`overlap`).

        `average_us` is the whole of an average, if it is not the one that was measured.
        """
        whole_us = self.average_us if average_us is None else average_us
        longer_us = self._iteration_us(learners, whole_us, scales) - self._iteration_us(learners, 0.0, scales)
        return max(0.0, longer_us * learners.average_every)

    def contention(self, learners: int) -> float:
        """How many times as long as alone a step takes next to those of so many Learners, without any wait.

        Linear between one and those that were measured at the same time; no more beyond.
        """
        if self.at_once < 2 or learners < 2:
            return 1.0
        measured = max(1.0, float(self.step_us.mean()) / self.alone_us)
        return 1.0 + (measured - 1.0) * min(1.0, (learners - 1) / (self.at_once - 1))

    def _iteration_us(self, learners: LearnersSpec, average_us: float, scales: Sequence[float] | None) -> float:
        phases, every = Phases(self.step_us, average_us), learners.average_every
        overlap = learners.overlap if average_us else 0
        found = simulate(phases, learners.count, every, overlap=overlap, scales=scales, rounds=_SIMULATED_ROUNDS)
        return learners.count / found.steps_per_s * 1e6


def side_by_side(context: ProfilingContext, pair: PairCell, at_once: int) -> SideBySide:
    """`at_once` of the problem's Learners at the same time, on the host, with implementation and parameters of `pair`.

    Learners that train in a loop in C++ are threads here and processes in a program: the loop releases the GIL. Of
    others, one is measured alone, and averages between threads that do nothing else.
    """
    spec, host, name = context.problem.learners, context.platform.host, pair.learner.implementation
    context.begin(f"{host.name}: {at_once} {name} Learner(s) at the same time, and their averages")
    parameters = {
        **context.replay_parameters(pair.replay.fanout),
        "learners": at_once,
        "moments": spec.moments,
        "threads": pair.learner.threads,
    }
    work = functools.partial(_measured, context, pair, at_once)
    found = context.known(context.key("learners", host, parameters, name), ("alone", "step", "average"), work, host)
    alone, step, average = (_samples(found[name]) for name in ("alone", "step", "average"))
    return SideBySide(float(alone.mean()), step, float(average.mean()), at_once)


def _samples(measurement: Measurement) -> np.ndarray:
    return np.array(measurement.samples or (measurement.value_us,))


@on_own_thread
def _measured(context: ProfilingContext, pair: PairCell, at_once: int) -> dict[str, list[float]]:
    """Samples of "alone", "step" and "average", in microseconds."""
    problem, name, threads = context.problem, pair.learner.implementation, pair.learner.threads
    learner = context.make_learner(name, context.platform.host, threads)
    if getattr(learner, "loops_natively", False):
        return _Group(context, pair, at_once).measured()
    learner.prepare()
    alone = _timed(_steps(problem, pair, learner, 0), context.budget_s * _TOGETHER, problem.replay.first_beta)
    count = TrainerParameters(context.probe, problem.learners.moments).layout.count
    average = measure_average(at_once, count, context.budget_s * _ROUNDS)
    return {"alone": alone, "step": alone, "average": average}


class _Group:
    """A thread for each Learner, which go through the phases of the measurement together."""

    def __init__(self, context: ProfilingContext, pair: PairCell, at_once: int) -> None:
        problem, host, spec = context.problem, context.platform.host, context.problem.learners
        self._problem, self._pair, self._budget_s = problem, pair, context.budget_s
        made = learners()[pair.learner.implementation]
        home, place = made.places(host, backend_of(host))
        make = functools.partial(
            make_trainer,
            problem.trainer_class,
            problem.observation_space,
            problem.action_space,
            device=home,
            settings=dict(problem.settings),
        )
        self._setup = LearnerSetup(
            AveragingSpec(at_once, 1, timeout_s=_PATIENCE_S),
            make,
            functools.partial(made.make, device=place, threads=pair.learner.threads),
            problem.transition,
            dataclasses.replace(problem.replay, capacity=at_once * _slots(problem), fanout=pair.replay.fanout),
            at_once * problem.train.batch_size,
            math.inf,
            learning_starts=1,
            moments=spec.moments,
        )
        parameters = TrainerParameters(context.probe, spec.moments)
        vector = np.empty(parameters.layout.count, np.float32)
        parameters.read(vector)
        self._server = AveragingServer(self._setup.spec, parameters.layout, vector, facts=_FACTS)
        self._together = threading.Barrier(at_once)
        self._making = threading.Lock()
        self._alone: list[float] = []
        self._steps: list[list[float]] = [[] for _ in range(at_once)]
        self._beyond: list[list[float]] = [[] for _ in range(at_once)]
        self._errors: list[BaseException] = []

    def measured(self) -> dict[str, list[float]]:
        """Samples of each phase; raises what a Learner raised first."""
        run_threads(self._server, self._run, self._setup.spec.learners)
        if self._errors:
            raise self._errors[0]
        rounds = min(map(len, self._beyond))
        beyond = np.array([samples[:rounds] for samples in self._beyond])
        # The last to hand in waits for nobody.
        return {
            "alone": self._alone,
            "step": list(itertools.chain(*self._steps)),
            "average": list(beyond.min(axis=0)[WARM_UP:]),
        }

    def _run(self, rank: int) -> None:
        try:
            self._train(rank)
            self._average(rank)
        except threading.BrokenBarrierError:
            pass  # another Learner says why
        except BaseException as error:
            self._errors.append(error)
            self._together.abort()
            self._server.remove(rank)

    def _train(self, rank: int) -> None:
        """One Learner alone, then all at the same time, without averages."""
        with self._making:
            learner = self._setup.make_learner(self._setup.make_trainer(seed=self._setup.trainer_seed(rank)))
            learner.prepare()
            steps = _steps(self._problem, self._pair, learner, rank)
        beta = self._problem.replay.first_beta
        self._together.wait(_PATIENCE_S)
        if rank == 0:
            self._alone = _timed(steps, self._budget_s * _ALONE, beta)
        self._together.wait(_PATIENCE_S)
        self._steps[rank] = _timed(steps, self._budget_s * _TOGETHER, beta)

    def _average(self, rank: int) -> None:
        """Rounds of one step each: the time beyond the step."""
        with self._making:
            link = self._server.link(rank)
            local = LocalLearner(self._setup, rank, lambda layout: SharedMemoryAverager(link, layout))
            for columns, rows in _transitions(self._problem, _slots(self._problem), rank):
                local.insert(columns, rows, self._problem.replay.first_beta)
        self._together.wait(_PATIENCE_S)
        samples, spent = self._beyond[rank], 0.0
        until = time.perf_counter() + self._budget_s * _ROUNDS
        while len(samples) < WARM_UP + 2 or (len(samples) < _MOST_ROUNDS and time.perf_counter() < until):
            start = time.perf_counter()
            local.train()
            taken = time.perf_counter() - start
            done = local.progress
            before, spent = spent, done.sample_s + done.gather_s + done.train_s + done.update_s
            samples.append(max(0.0, taken - (spent - before)) * 1e6)
        local.finish()


def _slots(problem: Problem) -> int:
    """The slots of a bank that is measured."""
    fitting = min(_MOST_SLOTS, _MOST_BYTES // problem.transition.nbytes)
    return min(problem.replay.capacity, max(problem.train.batch_size, fitting))


def _steps(problem: Problem, pair: PairCell, learner: Learner, rank: int) -> Steps:
    """The gradient steps of Learner `rank` on a full bank of its own."""
    slots = _slots(problem)
    spec = dataclasses.replace(problem.replay, capacity=slots, fanout=pair.replay.fanout)
    bank, storage = make_replay_manager(spec, seed=rank), DataStorage(problem.transition, slots)
    for columns, rows in _transitions(problem, slots, rank):
        bank.insert(storage.insert(columns, rows))
    return make_steps(learner, bank, storage, problem.train.batch_size)


def _transitions(problem: Problem, rows: int, seed: int) -> Iterator[tuple[dict[str, np.ndarray], int]]:
    """`rows` synthetic transitions, in parts."""
    rng = np.random.default_rng(seed)
    for start in range(0, rows, _FILL_ROWS):
        part = min(_FILL_ROWS, rows - start)
        yield problem.random_columns(part, rng), part


def _timed(steps: Steps, budget_s: float, beta: float) -> list[float]:
    """Microseconds of single steps."""
    samples: list[float] = []
    spent = sum(steps.seconds()[part] for part in _PARTS)
    until = time.perf_counter() + budget_s
    while len(samples) < WARM_UP + 2 or (len(samples) < _MOST_STEPS and time.perf_counter() < until):
        steps.run(1, beta)
        before, spent = spent, sum(steps.seconds()[part] for part in _PARTS)
        samples.append((spent - before) * 1e6)
    return samples[WARM_UP:]
