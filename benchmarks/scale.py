"""Several Learners: measured with one, two and four, simulated beyond; and remote Actors compared with local ones.

SAC with two hidden layers, on observations of 17 numbers and actions of 6. The Learners are processes with a bank of
the replay each, and draw from full banks without waiting for transitions; "samples" are those of all batches. One
Learner has the whole batch, and L Learners have its L-th part each. Where a row states the batch of each Learner, the
one Learner that it compares with has that batch too. With more Learners than cores they take turns. With "overlap" they
make that many steps while an average is made.

The simulation (`pearl.local_sgd.simulation`) gets gradient steps without averages, of one process for each Learner, all
at the same time. It also gets the time that rounds of H = 1 between them take beyond the slowest step: a Learner's own
work, by its time on a core, and the rest, the average. Its error is that of the gradient steps a second at other H.
Where Learners share cores, the steps' time on a core is measured. Beyond this machine, Learners have machines of their
own, and the network between them is an assumption that the row states. "Corrected for cores" compares with one
Learner's rate times the number of cores.

RLlib's Learners are processes too, with the same networks, batches and count of transitions in one replay, all filled;
its SAC is timed without environment steps, and averages gradients in every step (DDP), as it has no local SGD. Its
samples are those of all Learners' batches, as ours are. One thread each.

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

from benchmarks.peers import training as peers
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
from pearl.ipc.queues import Bell, WeightSyncQueue
from pearl.local_sgd.averaging import AveragingSpec
from pearl.local_sgd.group import LearnerGroup
from pearl.local_sgd.local_learner import LearnerSetup
from pearl.local_sgd.parameters import TrainerParameters
from pearl.local_sgd.simulation import Network, Phases, Scaling, simulate
from pearl.local_sgd.steps import make_steps
from pearl.replay.storage import DataStorage
from pearl.replay.synthetic import random_transitions
from pearl.runtime.queues import DataCollectionQueue
from pearl.spec import ActorSpec, ReplaySpec, TrainSpec

SPACES = spaces.Box(-1.0, 1.0, (17,), np.float32), spaces.Box(-1.0, 1.0, (6,), np.float32)
CAPACITY, MESSAGE = 16_384, 256
INTERVALS = (4, 8, 32)
PART = 4  # steps that are timed together
FEWEST_PARTS, MOST_PARTS = 3, 20_000
OF_PROGRAMS = 8  # steps between averages, if none are stated
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


def steps_per_s(
    setup: LearnerSetup, seconds: float, actions: gym.Space[Any] = SPACES[1], *, pinned_to: int | None = None
) -> float:
    """Gradient steps of all Learners a second, averages included; see `run_learners`."""
    return run_learners(setup, seconds, actions, pinned_to=pinned_to)[0]


def run_learners(
    setup: LearnerSetup, seconds: float, actions: gym.Space[Any] = SPACES[1], *, pinned_to: int | None = None
) -> tuple[float, float]:
    """Gradient steps of all Learners a second, and microseconds on a core for each, both with averages.

    `actions` is the space of random ones. With `pinned_to`, Learners get one of so many cores each, in turn.
    """
    data = random_transitions(setup.transition, actions, TrainSpec(), MESSAGE, np.random.default_rng(0))
    with LearnerGroup(setup, setup.make_trainer(seed=0), message_rows=MESSAGE) as group:
        group.wait_until_ready(LONGEST_S)
        for rank, pid in enumerate(group.pids):
            if pinned_to is not None:
                os.sched_setaffinity(pid, {rank % pinned_to})
        for _ in range(setup.replay.capacity // MESSAGE):
            while any(len(queue) == queue.slots for queue in group.queues):  # each gets its part of each message
                group.check()
                time.sleep(1e-3)
            group.insert(data, MESSAGE, 0.4)
        for _ in range(2):  # the first average may have waited
            begin, start = _next_report(group)
        used_us = _used_us(group)
        time.sleep(seconds)  # without a look at the group: the cores are the Learners'
        end, stop = _next_report(group)
        used_us = _used_us(group) - used_us
        if group.restarts:
            raise RuntimeError("A Learner died while it was measured.")
        return (end - begin) / (stop - start), used_us / (end - begin)


def _used_us(group: LearnerGroup) -> float:
    """Microseconds that the Learners' processes have been on a core, by Linux's clocks of processes."""
    return sum(time.clock_gettime_ns(~pid << 3 | 2) for pid in group.pids) / 1e3


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


def _time_steps(
    setup: LearnerSetup, actions: gym.Space[Any], shares_cores: bool, seconds: float, go: Bell, report: Report
) -> None:
    """Deliver microseconds of parts of `PART` steps each, once `go` has rung; see `step_times`."""
    spec = bank_spec(setup.replay, setup.spec.learners)
    bank, storage = make_replay_manager(spec, seed=0), DataStorage(setup.transition, spec.capacity)
    columns = random_transitions(setup.transition, actions, TrainSpec(), MESSAGE, np.random.default_rng(0))
    for _ in range(spec.capacity // MESSAGE):
        bank.insert(storage.insert(columns, MESSAGE))
    learner = setup.make_learner(setup.make_trainer(seed=0))
    learner.prepare()
    steps = make_steps(learner, bank, storage, setup.share)
    steps.run(1, 0.4)
    clock = time.thread_time_ns if shares_cores else time.perf_counter_ns
    report.ready()
    while not go.value():
        go.wait(0, LONGEST_S)
    times: list[float] = []
    used_ns = time.thread_time_ns()
    end = time.monotonic() + seconds
    while len(times) < FEWEST_PARTS or (time.monotonic() < end and len(times) < MOST_PARTS):
        start = clock()
        steps.run(PART, 0.4)
        times.append((clock() - start) / 1e3)
    used_us = (time.thread_time_ns() - used_ns) / 1e3
    report.deliver([*times, used_us / len(times) / PART])


def step_times(
    setup: LearnerSetup, cores: int, seconds: float, actions: gym.Space[Any] = SPACES[1]
) -> tuple[np.ndarray, float]:
    """Microseconds of single steps, one Learner's after the other's, of all at the same time without averages.

    They go on for about `seconds`, of which the first fifth is not counted. `PART` steps are timed together, as
    Learners make them, and taken to be equal. Where Learners share cores, the time on a core is measured; its mean
    comes second in any case.
    """
    learners = setup.spec.learners
    go, reports = Bell(), [Report(MOST_PARTS + 1) for _ in range(learners)]
    processes = [
        ChildProcess(_time_steps, (setup, actions, learners > cores, seconds, go, report), f"measured-{i}")
        for i, report in enumerate(reports)
    ]
    while not all(report.is_ready for report in reports) and all(p.exit_code is None for p in processes):
        time.sleep(0.01)
    go.ring()
    for process in processes:
        if not process.wait(LONGEST_S) or process.exit_code != 0:
            raise RuntimeError(f"{process.name} did not end well: {process.cause_of_death}.")
    results = [np.array(report.result) for report in reports]
    parts = np.concatenate([result[len(result) // 5 : -1] for result in results])
    return np.repeat(parts / PART, PART), float(np.mean([result[-1] for result in results]))


def phases_of(
    setup_of: Callable[[int, int], LearnerSetup],
    learners: int,
    cores: int,
    seconds: float = 1.0,
    actions: gym.Space[Any] = SPACES[1],
) -> Phases:
    """Steps without averages, and the time of rounds of one step beyond the slowest of these.

    Of this, a Learner's own work is what it is on a core beyond its step. `setup_of` gives the setup of a number of
    Learners and an interval of averages.
    """
    step_us, of_step_us = step_times(setup_of(learners, 1), cores, seconds, actions)
    rate, of_round_us = run_learners(setup_of(learners, 1), seconds, actions)
    own_us = max(0.0, of_round_us - of_step_us)
    rest = simulate(Phases(step_us, round_us=own_us), learners, 1, cores=cores)
    average_us = max(0.0, learners * 1e6 * (1 / rate - 1 / rest.steps_per_s))
    return Phases(step_us, average_us, round_us=own_us)


def merged(measured: list[Phases]) -> Phases:
    """All values of repeated measurements."""
    average_us, round_us = np.mean([(phases.average_us, phases.round_us) for phases in measured], axis=0)
    return Phases(np.concatenate([phases.step_us for phases in measured]), float(average_us), round_us=float(round_us))


def learner_rows(cases: tuple[Case, ...], seconds: float, repeats: int) -> Iterator[Row]:
    """Rates of one, two and four Learners, and how well the simulation foretells them."""
    cores = os.cpu_count() or 1
    errors: dict[bool, list[float]] = {False: [], True: []}  # with overlap
    known: dict[Case, Phases] = {}
    for case in cases:
        one = [steps_per_s(case.setup(1, 200), seconds) * case.batch for _ in range(repeats)]
        for learners in (1, 2, 4):
            ways = [(every, overlap) for every in INTERVALS for overlap in ((0, every) if learners > 1 else (0,))]
            rates: dict[tuple[int, int], list[float]] = {way: [] for way in ways}
            measured: list[Phases] = []
            for _ in range(repeats):  # in turn, since the machine changes its speed
                measured.append(phases_of(case.setup, learners, cores, seconds))
                for way, found in rates.items():
                    found.append(steps_per_s(case.setup(learners, *way), seconds))
            phases = merged(measured)
            known.setdefault(case, phases)  # of one Learner
            for (every, overlap), found in rates.items():
                simulated = simulate(phases, learners, every, cores=cores, overlap=overlap)
                errors[overlap > 0].append(100 * abs(simulated.steps_per_s / float(np.median(found)) - 1))
                what = f"{case.name}, batch {case.batch}: {learners} Learner(s), H = {every}"
                how = f"{what}, overlap {overlap}" if overlap else what
                samples = np.multiply(found, case.batch // learners)
                yield Row.of(f"{how}: samples", "1/s", "higher", samples, "one Learner, H = 200", one)
                yield Row.of(f"{how}: steps", "1/s", "higher", found, "simulated", [simulated.steps_per_s])
    for has_overlap, of_points in errors.items():
        points = f"{len(of_points)} points with overlap" if has_overlap else f"{len(of_points)} points"
        yield Row.of(f"largest error of the simulation over {points}", "%", "lower", [max(of_points)])
        yield Row.of(f"median error of the simulation over {points}", "%", "lower", of_points)
        within = float(np.sum(np.array(of_points) <= 5.0))
        yield Row.of(f"of {points}, those with an error of at most 5 %", "points", "higher", [within])
    for case, phases in known.items():
        yield from beyond(case, phases)


def efficiency_rows(case: Case, seconds: float, repeats: int) -> Iterator[Row]:
    """Four Learners with a whole batch each: pinned to the cores of this machine in turn, and simulated on four.

    Efficiency is the rate, divided by the rate of one such Learner times the Learners, or times the cores if these are
    fewer.
    """
    learners, cores = 4, os.cpu_count() or 1
    used = min(learners, cores)
    of_all = Case(case.width, learners * case.batch)
    one = float(np.median([steps_per_s(case.setup(1, 200), seconds) for _ in range(repeats)]))
    phases = phases_of(of_all.setup, learners, cores, seconds)
    alone, _ = step_times(Case(case.width, used * case.batch).setup(used, 1), cores, seconds)
    with_cores = Phases(alone, phases.average_us, round_us=phases.round_us)
    for every in (8, 32):
        rates = [steps_per_s(of_all.setup(learners, every), seconds, pinned_to=cores) for _ in range(repeats)]
        shared = simulate(phases, learners, every, cores=cores).steps_per_s
        what = f"{case.name}, batch {case.batch} each: {learners} Learners, H = {every}"
        yield Row.of(
            f"{what}, pinned to {cores} cores in turn: efficiency, corrected for cores",
            "efficiency",
            "higher",
            np.divide(rates, used * one),
            "simulated",
            [shared / (used * one)],
        )
        own = simulate(with_cores, learners, every).steps_per_s
        yield Row.of(f"{what}, with a core each, simulated", "efficiency", "higher", [own / (learners * one)])


def peer_rows(cases: tuple[Case, ...], seconds: float, repeats: int) -> Iterator[Row]:
    """The same numbers of RLlib's Learners, in turn."""
    for case in cases:
        for learners in (1, 2):
            hidden = (case.width, case.width)
            theirs_case = peers.Case("sac", "HalfCheetah-v5", hidden, case.batch, CAPACITY, learners=learners)
            ours: list[float] = []
            theirs: list[float] = []
            with peers.Side("rllib_training", theirs_case, "RLlib") as side:
                for _ in range(repeats):
                    setup = case.setup(learners, OF_PROGRAMS)
                    ours.append(steps_per_s(setup, seconds) * setup.share)
                    if not side.reason:
                        try:
                            theirs.append(side.train(seconds))
                        except RuntimeError as error:
                            side.reason = str(error)
            what = f"{case.name}, batch {case.batch}: {learners} Learner(s), H = {OF_PROGRAMS}, and RLlib's: samples"
            yield Row.of(what, "1/s", "higher", ours, side.name, [] if side.reason else theirs, side.reason)


def beyond(case: Case, phases: Phases) -> Iterator[Row]:
    """Efficiency with more Learners than this machine has cores, by simulation."""
    trainer = case.setup(1, 1).make_trainer(seed=0)
    count = TrainerParameters(trainer).layout.count
    steps = Phases(phases.step_us, round_us=phases.round_us)
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
    """Remote and local Actors in turn."""
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
        shown(efficiency_rows(CASES[0], 0.5, 1))
        shown(peer_rows(CASES[:1], 0.5, 1))
        shown(actor_rows(1.0, 1))
        return
    rows = shown(learner_rows(CASES, 1.5, 2))
    rows += shown(efficiency_rows(CASES[1], 1.5, 2))
    rows += shown(peer_rows(CASES, 2.0, 2))
    rows += shown(actor_rows(2.0, 3))
    write("scale", "make bench-scale", os.cpu_count() or 1, rows)


if __name__ == "__main__":
    main()
