"""Several Learners: measured with one, two and four, simulated beyond; and remote Actors beside local ones.

SAC with two hidden layers, on observations of 17 numbers and actions of 6. The Learners are processes with a bank of
the replay each, and draw from full banks without waiting for transitions; "samples" are those of all batches. One
Learner has the whole batch, L Learners have its L-th part each, and so has the one that they are compared with where
the batch is stated to be of each. With more Learners than cores they take turns. With "overlap" they make so many steps
while an average is made.

The simulation (`pearl.local_sgd.simulation`) is fed with single gradient steps, measured in as many processes as there
are Learners, and with what rounds of H = 1 between so many take beyond the slowest step. Its error is that of the
gradient steps a second at other H. Beyond this machine, Learners have machines of their own, and the network between
them is an assumption that the row states.

Remote Actors are on a Ray cluster of this machine, so that both sides use the same cores; their environments take 100
us a step by busy waiting, and the rate is that of transitions which the host takes from the queues.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from benchmarks.record import Row, shown, write
from benchmarks.timing import ONE_THREAD, options
from pearl.actors.actor import ActorSetup
from pearl.actors.child_process import ChildProcess
from pearl.actors.policy_plan import read_policy
from pearl.actors.process import ActorGroup, ActorProcesses
from pearl.actors.report import Report
from pearl.algorithms import DQN, SAC
from pearl.algorithms.trainer import transition_of
from pearl.backends.cpu.learner import NativeLearner
from pearl.backends.replay_managers import bank_spec, make_replay_manager
from pearl.ipc.queues import WeightSyncQueue
from pearl.local_sgd.averaging import Averager, AveragingSpec
from pearl.local_sgd.group import LearnerGroup
from pearl.local_sgd.local_learner import LearnerSetup, LocalLearner
from pearl.local_sgd.parameters import TrainerParameters
from pearl.local_sgd.shared_memory import AveragingServer, Link, SharedMemoryAverager
from pearl.local_sgd.simulation import Network, Phases, Scaling, simulate
from pearl.local_sgd.steps import make_steps
from pearl.replay.storage import DataStorage
from pearl.replay.synthetic import random_transitions
from pearl.runtime.queues import DataCollectionQueue
from pearl.spec import ActorSpec, ReplaySpec, TrainSpec

SPACES = spaces.Box(-1.0, 1.0, (17,), np.float32), spaces.Box(-1.0, 1.0, (6,), np.float32)
CAPACITY, MESSAGE = 16_384, 256
INTERVALS = (4, 8, 32)
LONGEST_S = 300.0
STEP_S = 100e-6  # of the environment of the Actors


@dataclass(frozen=True)
class Case:
    """Two hidden layers of `width`, and the batch of all Learners together."""

    width: int
    batch: int

    @property
    def name(self) -> str:
        """In a row."""
        return f"SAC {self.width}x{self.width}"

    def setup(self, learners: int, average_every: int, overlap: int = 0) -> LearnerSetup:
        """Learners that train without waiting for transitions."""
        return LearnerSetup(
            AveragingSpec(learners, average_every, overlap=overlap),
            functools.partial(SAC, *SPACES, hidden_sizes=(self.width, self.width)),
            NativeLearner,
            transition=transition_of(SAC, *SPACES, {}),
            replay=ReplaySpec(CAPACITY),
            batch_size=self.batch,
            replay_ratio=float("inf"),
            learning_starts=CAPACITY,
        )


CASES = (Case(64, 128), Case(256, 256))


def steps_per_s(setup: LearnerSetup, seconds: float, actions: gym.Space[Any] = SPACES[1]) -> float:
    """Gradient steps of all Learners a second, averages included; `actions` is the space of random ones."""
    data = random_transitions(setup.transition, actions, TrainSpec(), MESSAGE, np.random.default_rng(0))
    with LearnerGroup(setup, setup.make_trainer(seed=0), message_rows=MESSAGE) as group:
        group.wait_until_ready(LONGEST_S)
        for _ in range(setup.replay.capacity // MESSAGE):
            while any(len(queue) == queue.slots for queue in group.queues):  # each gets its part of each message
                group.check()
                time.sleep(1e-3)
            group.insert(data, MESSAGE, 0.4)
        for _ in range(2):  # the first average may have waited
            begin, start = _next_report(group)
        while True:
            end, stop = _next_report(group)
            if stop - start > seconds:
                return (end - begin) / (stop - start)


def _next_report(group: LearnerGroup) -> tuple[int, float]:
    """Gradient steps of all Learners, and when: they tell after an average, all at the same time."""
    before = [progress.steps for progress in group.progress]
    deadline = time.monotonic() + LONGEST_S
    while any(progress.steps == old for progress, old in zip(group.progress, before, strict=True)):
        if time.monotonic() > deadline:
            raise RuntimeError("A Learner does not train.")
        group.check()
        time.sleep(1e-3)
    return sum(progress.steps for progress in group.progress), time.perf_counter()


def _filled(setup: LearnerSetup, rank: int, averager: Averager, actions: gym.Space[Any]) -> LocalLearner:
    local = LocalLearner(setup, rank, lambda layout: averager)
    columns = random_transitions(setup.transition, actions, TrainSpec(), MESSAGE, np.random.default_rng(rank))
    for _ in range(setup.replay.capacity // setup.spec.learners // MESSAGE):
        local.insert(columns, MESSAGE, 0.4)
    return local


def _time_steps(setup: LearnerSetup, actions: gym.Space[Any], count: int, report: Report) -> None:
    spec = bank_spec(setup.replay, setup.spec.learners)
    bank, storage = make_replay_manager(spec, seed=0), DataStorage(setup.transition, spec.capacity)
    columns = random_transitions(setup.transition, actions, TrainSpec(), MESSAGE, np.random.default_rng(0))
    for _ in range(spec.capacity // MESSAGE):
        bank.insert(storage.insert(columns, MESSAGE))
    learner = setup.make_learner(setup.make_trainer(seed=0))
    learner.prepare()
    steps = make_steps(learner, bank, storage, setup.share)
    _deliver(lambda: steps.run(1, 0.4), count, report)


def _time_rounds(setup: LearnerSetup, actions: gym.Space[Any], link: Link, count: int, report: Report) -> None:
    local = _filled(setup, link.rank, SharedMemoryAverager(link, link.layout), actions)
    _deliver(local.train, count, report)
    local.finish()


def _deliver(call: Callable[[], object], count: int, report: Report) -> None:
    times = []
    for _ in range(count):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e6)
    report.deliver(times)


def together(target: Any, arguments: list[tuple[Any, ...]], numbers: int) -> np.ndarray:
    """What processes deliver that run at the same time, `(processes, numbers)`."""
    reports = [Report(numbers) for _ in arguments]
    processes = [
        ChildProcess(target, (*given, report), f"measured-{i}")
        for i, (given, report) in enumerate(zip(arguments, reports, strict=True))
    ]
    for process in processes:
        if not process.wait(LONGEST_S) or process.exit_code != 0:
            raise RuntimeError(f"{process.name} did not end well: {process.cause_of_death}.")
    return np.array([report.result for report in reports])


def phases_of(
    setup_of: Callable[[int, int], LearnerSetup],
    learners: int,
    cores: int,
    *,
    actions: gym.Space[Any] = SPACES[1],
    count: int = 600,
    rounds: int = 300,
) -> Phases:
    """Steps of as many Learners as have a core each, and what rounds of one step take beyond the slowest of these.

    `setup_of` gives the setup of a number of Learners and an interval of averages. Each makes `count` steps, and then
    `rounds` rounds; the first are not counted.
    """
    setup = setup_of(learners, 1)
    step_us = together(_time_steps, [(setup, actions, count)] * min(learners, cores), count)[:, count // 5 :].ravel()
    parameters = TrainerParameters(setup.make_trainer(seed=0))
    vector = np.empty(parameters.layout.count, np.float32)
    parameters.read(vector)
    server = AveragingServer(AveragingSpec(learners, 1, timeout_s=60.0), parameters.layout, vector, facts=2)
    links = [server.link(rank) for rank in range(learners)]
    server.launch()
    try:
        round_us = together(_time_rounds, [(setup, actions, link, rounds) for link in links], rounds)[:, rounds // 15 :]
    finally:
        server.close()
    steps = simulate(Phases(step_us), learners, 1, cores=cores)
    return Phases(step_us, max(0.0, float(np.mean(round_us)) - learners / steps.steps_per_s * 1e6))


def learner_rows(cases: tuple[Case, ...], seconds: float, repeats: int) -> Iterator[Row]:
    """Rates of one, two and four Learners, and how well the simulation foretells them."""
    cores = os.cpu_count() or 1
    errors: list[float] = []
    known: dict[Case, Phases] = {}
    for case in cases:
        one = [steps_per_s(case.setup(1, 200), seconds) * case.batch for _ in range(repeats)]
        for learners in (1, 2, 4):
            share = case.batch // learners
            phases = phases_of(case.setup, learners, cores)
            known[case] = phases if learners == 1 else known[case]
            for every in INTERVALS:
                rates = {
                    overlap: [steps_per_s(case.setup(learners, every, overlap), seconds) for _ in range(repeats)]
                    for overlap in ((0,) if learners == 1 else (0, every))
                }
                simulated = simulate(phases, learners, every, cores=cores)
                errors.append(simulated.steps_per_s / float(np.median(rates[0])) - 1)
                what = f"{case.name}, batch {case.batch}: {learners} Learner(s), H = {every}"
                for overlap, found in rates.items():
                    how = f"{what}, overlap {overlap}" if overlap else what
                    samples = np.multiply(found, share)
                    yield Row.of(f"{how}: samples", "1/s", "higher", samples, "one Learner, H = 200", one)
                yield Row.of(f"{what}: steps", "1/s", "higher", rates[0], "simulated", [simulated.steps_per_s])
    worst = 100 * float(np.max(np.abs(errors)))
    yield Row.of(f"largest error of the simulation over {len(errors)} points", "%", "lower", [worst])
    yield Row.of(f"median error of the simulation over {len(errors)} points", "%", "lower", 100 * np.abs(errors))
    for case, phases in known.items():
        yield from beyond(case, phases)


def beyond(case: Case, phases: Phases) -> Iterator[Row]:
    """Efficiency with more Learners than this machine has cores, by simulation."""
    trainer = case.setup(1, 1).make_trainer(seed=0)
    count = TrainerParameters(trainer).layout.count
    steps = Phases(phases.step_us)
    for learners in (4, 16, 64, 256, 1024):
        for network in (Network(count, 10.0, 50.0), Network(count, 100.0, 5.0, "ring")):
            found: Scaling = simulate(steps, learners, 32, network=network, rounds=300)
            how = f"{network.topology} of {network.gbps:g} Gbit/s and {network.latency_us:g} us"
            case_name = f"{case.name}, batch {case.batch} each, H = 32, {how}: {learners} Learners, simulated"
            yield Row.of(f"{case_name}; limit: {found.limit}", "efficiency", "higher", [found.efficiency])


class BusyEnvironment(gym.Env[np.ndarray, np.int64]):
    """Four numbers, two actions, and a step that keeps a core busy for 100 us."""

    observation_space, action_space = spaces.Box(-1.0, 1.0, (4,), np.float32), spaces.Discrete(2)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Begin again."""
        super().reset(seed=seed)
        self._steps = 0
        return np.zeros(4, np.float32), {}

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Work for 100 us."""
        end = time.perf_counter() + STEP_S
        while time.perf_counter() < end:
            pass
        self._steps += 1
        return np.full(4, self._steps / 200, np.float32), 1.0, False, self._steps == 200, {}


@contextlib.contextmanager
def collecting(remote: bool, count: int) -> Iterator[list[DataCollectionQueue]]:
    """The queues of `count` Actors, which have begun."""
    trainer = DQN(BusyEnvironment.observation_space, BusyEnvironment.action_space, seed=0, hidden_sizes=(64, 64))
    transition = transition_of(DQN, BusyEnvironment.observation_space, BusyEnvironment.action_space, {})
    spec = ActorSpec(BusyEnvironment, count=count)
    setups = [
        ActorSetup(DQN, {}, spec, TrainSpec(), 0, index, policy=read_policy(trainer), transition=transition)
        for index in range(count)
    ]
    learner = NativeLearner(trainer)
    wsq = WeightSyncQueue(learner.weight_count)
    weights = np.empty(learner.weight_count, np.float32)
    learner.write_weights(weights)
    wsq.write(weights)
    dcqs = [DataCollectionQueue(transition, setups[0].message_rows(), 2) for _ in setups]
    processes: ActorProcesses | None = None
    if remote:
        from pearl.remote.group import RemoteProcesses

        processes = RemoteProcesses("local", setups, dcqs, wsq)
    group = ActorGroup(setups, dcqs, wsq, processes=processes)
    try:
        while not all(len(dcq) for dcq in dcqs):
            group.check(0)
            time.sleep(0.01)
        yield dcqs
    finally:
        group.stop(20.0)


def collection_per_s(remote: bool, count: int, seconds: float) -> float:
    """Transitions that the host takes a second."""
    with collecting(remote, count) as dcqs:
        rows = [0, 0]
        for part, length in enumerate((1.0, seconds)):
            end = time.perf_counter() + length
            while time.perf_counter() < end:
                taken = 0
                for dcq in dcqs:
                    if (message := dcq.peek()) is not None:
                        taken += message[1]
                        dcq.release()
                rows[part] += taken
                if not taken:
                    time.sleep(1e-4)
        return rows[1] / seconds


def actor_rows(seconds: float, repeats: int) -> Iterator[Row]:
    """Remote and local Actors by turns."""
    for count in (1, 2):
        rates: dict[bool, list[float]] = {True: [], False: []}
        for _ in range(repeats):
            for remote in rates:
                rates[remote].append(collection_per_s(remote, count, seconds))
        case = f"{count} remote Actor(s), 100 us a step: transitions"
        yield Row.of(case, "1/s", "higher", rates[True], "local", rates[False])


def main() -> None:
    parser = options(__doc__, "one case, once, and remote Actors once")
    arguments = parser.parse_args()
    os.environ.update(ONE_THREAD)  # of the processes that it starts
    if arguments.quick:
        shown(learner_rows(CASES[:1], 0.5, 1))
        shown(actor_rows(1.0, 1))
        return
    rows = shown(learner_rows(CASES, 2.0, 2))
    rows += shown(actor_rows(3.0, 3))
    write("scale", "make bench-scale", os.cpu_count() or 1, rows)


if __name__ == "__main__":
    main()
