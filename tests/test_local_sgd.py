"""Averaging the parameters of Learners: what is averaged, in which order, and what happens when a Learner dies."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import threading
import time

import numpy as np
import pytest
import torch
from averaging_members import count_up, stop_beating
from gymnasium import spaces
from test_arrays import batch_of
from trainers import OwnTrainer, TinyCrossQ, TinyDQN, TinySAC, TinyTD3

from pearl import _native
from pearl.actors.child_process import ChildProcess
from pearl.actors.report import Report
from pearl.algorithms import DQN
from pearl.algorithms.trainer import policy_snapshot, transition_of
from pearl.backends.cpu.learner import NativeLearner
from pearl.errors import ConfigurationError, PearlError, QueueClosedError, QueueTimeoutError, TrainerError
from pearl.learner.protocol import StepResult
from pearl.learner.torch_learner import TorchLearner
from pearl.local_sgd import shared_memory
from pearl.local_sgd.averaging import AveragingSpec
from pearl.local_sgd.local_learner import LearnerSetup, LocalLearner
from pearl.local_sgd.parameters import ParameterLayout, TrainerParameters
from pearl.local_sgd.shared_memory import AveragingServer, SharedMemoryAverager
from pearl.spec import DISCOUNT, NEXT_OBS, OBS, REWARD, ReplaySpec

LONGEST_S = 60.0
OBSERVATIONS = spaces.Box(-1.0, 1.0, (4,), np.float32)
CHOICES, FORCES = spaces.Discrete(2), spaces.Box(-1.0, 1.0, (1,), np.float32)
LAYOUT = ParameterLayout((("weight", (2, 3)), ("bias", (3,))))


def until(condition) -> None:
    deadline = time.monotonic() + LONGEST_S
    while not condition():
        assert time.monotonic() < deadline, "not met in time"
        time.sleep(0.01)


def trainer_of(algorithm, seed=0, *, in_torch=False):
    made = algorithm(OBSERVATIONS, CHOICES if algorithm is TinyDQN else FORCES, seed=seed)
    return made.in_torch() if in_torch else made


def vector_of(trainer, moments="keep"):
    parameters = TrainerParameters(trainer, moments)
    out = np.empty(parameters.layout.count, np.float32)
    parameters.read(out)
    return out


# --- parameters -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", [TinyDQN, TinyTD3, TinySAC, TinyCrossQ])
@pytest.mark.parametrize("in_torch", [False, True])
def test_parameters_travel_from_one_trainer_to_another(algorithm, in_torch):
    source, target = trainer_of(algorithm, 1, in_torch=in_torch), trainer_of(algorithm, 2, in_torch=in_torch)
    assert not np.array_equal(policy_snapshot(source), policy_snapshot(target))
    values = vector_of(source)
    TrainerParameters(target).write(values)
    np.testing.assert_array_equal(policy_snapshot(source), policy_snapshot(target))
    np.testing.assert_array_equal(vector_of(target), values)


def test_the_order_is_the_same_in_arrays_and_in_torch():
    trainer = trainer_of(TinyDQN)
    in_arrays, values = TrainerParameters(trainer).layout, vector_of(trainer)
    in_torch = TrainerParameters(trainer.in_torch()).layout
    assert in_arrays == in_torch
    np.testing.assert_array_equal(vector_of(trainer), values)
    assert [name for name, _ in in_arrays.entries][:2] == ["q.0.weight", "q.0.bias"]


def test_target_networks_are_averaged_too():
    names = {name.split(".")[0] for name, _ in TrainerParameters(trainer_of(TinyTD3)).layout.entries}
    assert {"actor", "critic", "target_actor", "target_critic"} <= names


def test_a_class_of_its_own_is_averaged():
    torch.manual_seed(0)
    source, target = (OwnTrainer(OBSERVATIONS, CHOICES) for _ in range(2))
    TrainerParameters(target).write(vector_of(source))
    for ours, theirs in zip(source.network.parameters(), target.network.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("learner", [NativeLearner, TorchLearner])
def test_a_learner_trains_on_from_an_average(learner):
    """What was written is what the next step begins from: two trainers with the same vector make the same step."""
    vectors = []
    for seed in (1, 2):
        trainer = trainer_of(TinyDQN, seed)
        made = learner(trainer)
        made.step(*batch_of(trainer, seed=seed))
        TrainerParameters(trainer, "reset").write(vector_of(trainer_of(TinyDQN, 3)))
        trainer.action_space.seed(5)
        made.step(*batch_of(trainer, seed=5))
        vectors.append(vector_of(trainer))
    np.testing.assert_array_equal(*vectors)
    assert not np.array_equal(vectors[0], vector_of(trainer_of(TinyDQN, 3)))


@pytest.mark.parametrize("in_torch", [False, True])
def test_moments_are_kept_averaged_or_reset(in_torch):
    trainer = trainer_of(TinyDQN, in_torch=in_torch)
    learner = (TorchLearner if in_torch else NativeLearner)(trainer)
    for seed in range(3):
        learner.step(*batch_of(trainer, seed=seed))
    networks = TrainerParameters(trainer).layout.count
    moments = vector_of(trainer, "average")[networks:]
    layout = TrainerParameters(trainer, "average").layout
    steps = [number for number, (name, _) in enumerate(layout.entries) if name.endswith(".step")]
    assert len(moments) > networks // 2
    assert np.abs(moments).max() == 3.0  # the count of steps
    assert len(steps) == 1
    TrainerParameters(trainer, "keep").write(vector_of(trainer))
    np.testing.assert_array_equal(vector_of(trainer, "average")[networks:], moments)
    whole = vector_of(trainer, "average")
    averaged = whole * np.float32(0.5)
    rounded = np.where(whole == 3.0, np.float32(2.0), averaged)  # checkpoints hold whole counts alone
    TrainerParameters(trainer, "average").correct(averaged, whole)
    np.testing.assert_array_equal(vector_of(trainer, "average")[whole == 3.0], [2.0])
    TrainerParameters(trainer, "average").write(averaged)
    np.testing.assert_array_equal(vector_of(trainer, "average"), rounded)
    TrainerParameters(trainer, "reset").write(vector_of(trainer))
    assert (vector_of(trainer, "average")[networks:] == 0).all()
    np.testing.assert_array_equal(vector_of(trainer), averaged[:networks])


def test_average_moments_exist_before_the_first_step():
    """So that the order is the same for a Learner that has just begun."""
    fresh, trained = trainer_of(TinyDQN, in_torch=True), trainer_of(TinyDQN, in_torch=True)
    TorchLearner(trained).step(*batch_of(trained, seed=0))
    assert TrainerParameters(fresh, "average").layout == TrainerParameters(trained, "average").layout


def test_optimizers_whose_moments_are_unknown_are_refused_by_name():
    trainer = OwnTrainer(OBSERVATIONS, CHOICES)
    trainer.optimizer = torch.optim.RMSprop(trainer.network.parameters())
    with pytest.raises(TrainerError, match="optimizer 'optimizer' is RMSprop"):
        TrainerParameters(trainer, "average")
    TrainerParameters(trainer, "keep")


def test_parameters_that_float32_cannot_hold_are_refused():
    trainer = OwnTrainer(OBSERVATIONS, CHOICES)
    trainer.network.double()
    with pytest.raises(TrainerError, match=r"'network.0.weight' of OwnTrainer must be float32 or narrower"):
        TrainerParameters(trainer)


def test_wrong_arguments_are_refused():
    trainer = trainer_of(TinyDQN)
    with pytest.raises(ConfigurationError, match="moments must be one of 'keep', 'average', 'reset'; found 'mix'"):
        TrainerParameters(trainer, "mix")
    with pytest.raises(TrainerError, match=r"float32 of shape \(\d+,\); found float64 \(3,\)"):
        TrainerParameters(trainer).write(np.zeros(3))
    with pytest.raises(ConfigurationError, match="average_every must be a whole number of at least 1; found 0"):
        AveragingSpec(2, average_every=0)
    with pytest.raises(ConfigurationError, match=r"overlap must be a whole number of at least 0; found True"):
        AveragingSpec(2, overlap=True)
    with pytest.raises(ConfigurationError, match=r"overlap must be at most average_every, 4, .* found 5"):
        AveragingSpec(2, average_every=4, overlap=5)
    with pytest.raises(ConfigurationError, match="timeout_s must be a number of seconds above 0; found 0"):
        AveragingSpec(2, timeout_s=0)
    with pytest.raises(PearlError, match=r"rank must lie in \[0, 2\); found 2"):
        server(2).link(2)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ((("bias", (3,)), ("weight", (2, 3))), "Parameter 0 must be 'weight' of shape .2, 3.; found 'bias' of shape"),
        ((("weight", (2, 3)),), r"Parameter 1 must be 'bias' of shape \(3,\); found none"),
        ((("weight", (2, 3)), ("bias", (4,))), r"Parameter 1 must be .* found 'bias' of shape \(4,\)"),
    ],
)
def test_a_learner_with_another_order_is_refused(entries, message):
    averages = server(1)
    with pytest.raises(TrainerError, match=message):
        SharedMemoryAverager(averages.link(0), ParameterLayout(entries))


# --- averaging --------------------------------------------------------------------------------------------------------


def server(learners, **options):
    return AveragingServer(AveragingSpec(learners, **options), LAYOUT, np.zeros(LAYOUT.count, np.float32))


def test_the_mean_is_added_in_order_and_rounded_once():
    rng = np.random.default_rng(0)
    vectors = [rng.normal(size=1000).astype(np.float32) * 10.0 ** rng.integers(-6, 6, 1000) for _ in range(5)]
    vectors = [vector.astype(np.float32) for vector in vectors]
    out = np.empty(1000, np.float32)
    _native.mean_of(vectors, out)
    np.testing.assert_array_equal(out, np.mean(np.array(vectors, np.float64), axis=0).astype(np.float32))
    for count in (2, 3, 7):
        _native.mean_of([vectors[0]] * count, out)
        np.testing.assert_array_equal(out, vectors[0])


def in_threads(*actions):
    """The results of actions, each run in a thread of its own."""
    results = [None] * len(actions)

    def run(number):
        results[number] = actions[number]()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(actions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONGEST_S)
    return results


def test_learners_get_the_mean_and_what_the_others_said():
    averages = server(3)
    members = [SharedMemoryAverager(averages.link(rank), LAYOUT) for rank in range(3)]
    averages.launch()
    for member in members:
        begun = member.join()
        assert begun.version == 0
        assert not begun.members.any()
    for version in (1, 2):

        def step(rank, version=version):
            values = np.arange(9, dtype=np.float32) * version + rank
            found = members[rank].average(values, np.array([10.0 * rank]))
            return found.version, found.parameters.copy(), found.facts.copy(), found.members.all()

        results = in_threads(*(lambda rank=rank: step(rank) for rank in range(3)))
        for found, parameters, facts, everyone in results:
            assert found == version
            np.testing.assert_array_equal(parameters, np.arange(9) * version + 1)
            np.testing.assert_array_equal(facts.ravel(), [0.0, 10.0, 20.0])
            assert everyone
    newest = averages.newest(seen=1)
    assert newest.version == 2
    assert averages.newest(seen=2) is None
    averages.close()


def test_nothing_is_averaged_before_all_have_handed_in():
    averages = server(2)
    members = [SharedMemoryAverager(averages.link(rank), LAYOUT) for rank in range(2)]
    for member in members:
        member.join()
    thread = threading.Thread(target=members[0].average, args=(np.ones(9, np.float32), np.zeros(1)), daemon=True)
    thread.start()
    until(lambda: averages._members[0].link.messages.peek())
    assert not averages.serve(0.0)
    assert averages.version == 0
    averages.remove(1)
    assert averages.serve(0.0)
    thread.join(LONGEST_S)
    np.testing.assert_array_equal(averages.newest().parameters, np.ones(9))
    np.testing.assert_array_equal(averages.newest().members, [True, False])
    averages.close()


def test_steps_that_come_too_late_are_lost_and_the_learner_goes_on_from_the_newest_average():
    averages = server(2)
    prompt, late = (SharedMemoryAverager(averages.link(rank), LAYOUT) for rank in range(2))
    prompt.join()
    late.join()
    averages._members[1].link.words[0] = 0  # as if it had given no sign of life
    averages.launch()
    prompt.average(np.full(9, 2, np.float32), np.zeros(1))
    averages._members[1].link.words[0] = 1
    found = late.average(np.full(9, 100, np.float32), np.zeros(1))
    assert found.version == 1
    np.testing.assert_array_equal(found.parameters, np.full(9, 2))
    results = in_threads(
        lambda: prompt.average(np.full(9, 4, np.float32), np.zeros(1)).parameters.copy(),
        lambda: late.average(np.full(9, 6, np.float32), np.zeros(1)).parameters.copy(),
    )
    for parameters in results:
        np.testing.assert_array_equal(parameters, np.full(9, 5))
    averages.close()


def test_what_came_too_late_is_dropped_while_averaging_is_held():
    """Else a Learner's next parameters would wait for room, and with them its word that it saved its state."""
    averages = server(2)
    prompt, late = (SharedMemoryAverager(averages.link(rank), LAYOUT) for rank in range(2))
    for member in (prompt, late):
        member.join()
    averages._members[1].link.words[0] = 0  # as if it had given no sign of life
    prompt.hand_in(np.full(9, 2, np.float32), np.zeros(1))
    assert averages.serve(0.0)
    averages._members[1].link.words[0] = 1
    averages.hold()
    for is_dropped in (True, False):  # the second is made of the newest average
        late.hand_in(np.full(9, 100, np.float32), np.zeros(1))
        assert not averages.serve(0.0)
        found = averages._members[1].link.messages.peek()
        assert (found is None) == is_dropped
        assert averages.version == 1
        if is_dropped:
            assert late.take().version == 1
    averages.close()


def test_closing_wakes_those_that_wait():
    averages = server(2)
    waits, other = (SharedMemoryAverager(averages.link(rank), LAYOUT) for rank in range(2))
    waits.join()
    other.join()
    averages.launch()
    errors = []

    def wait():
        try:
            waits.average(np.ones(9, np.float32), np.zeros(1))
        except QueueClosedError as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    until(lambda: averages._members[0].link.messages.peek())
    other.beat()
    averages.close()
    thread.join(LONGEST_S)
    assert [type(error) for error in errors] == [QueueClosedError]


def test_a_slow_learner_is_waited_for_but_a_server_that_is_gone_is_not(monkeypatch):
    monkeypatch.setattr(shared_memory, "_PATIENCE_S", 0.2)
    averages = server(2)
    prompt, slow = (SharedMemoryAverager(averages.link(rank), LAYOUT) for rank in range(2))
    prompt.join()
    slow.join()
    averages.launch()

    def late():
        time.sleep(0.5)
        return slow.average(np.full(9, 3, np.float32), np.zeros(1))

    found, _ = in_threads(lambda: prompt.average(np.ones(9, np.float32), np.zeros(1)), late)
    np.testing.assert_array_equal(found.parameters, np.full(9, 2))
    averages.close()
    unserved = SharedMemoryAverager(server(1).link(0), LAYOUT)
    unserved.join()
    with pytest.raises(QueueTimeoutError, match="Learner 0 has heard nothing of the averaging's server"):
        unserved.average(np.ones(9, np.float32), np.zeros(1))


def test_a_learner_waits_for_a_server_whose_process_is_stopped(monkeypatch):
    host = subprocess.Popen(["sleep", "600"])
    try:
        host.send_signal(signal.SIGSTOP)
        with monkeypatch.context() as there:
            there.setattr(os, "getpid", lambda: host.pid)
            averages = server(1)
        monkeypatch.setattr(shared_memory, "_PATIENCE_S", 0.1)
        answers_at = time.monotonic() + 0.5

        def meanwhile():
            if time.monotonic() > answers_at:
                averages.serve(0.0)

        learner = SharedMemoryAverager(averages.link(0), LAYOUT, meanwhile)
        learner.join()
        assert learner.average(np.ones(9, np.float32), np.zeros(1)).version == 1
        host.send_signal(signal.SIGCONT)
        learner = SharedMemoryAverager(averages.link(0), LAYOUT)
        learner.join()
        with pytest.raises(QueueTimeoutError):
            learner.average(np.ones(9, np.float32), np.zeros(1))
        averages.close()
    finally:
        host.kill()
        host.wait()


def test_a_learner_is_silent_for_as_long_as_its_steps_may_take():
    averages = server(2, timeout_s=0.01)
    prompt, slow = (SharedMemoryAverager(averages.link(rank), LAYOUT) for rank in range(2))
    slow.expect(LONGEST_S)
    prompt.join()
    slow.join()
    prompt.hand_in(np.ones(9, np.float32), np.zeros(1))
    assert not averages.serve(0.0)
    time.sleep(0.05)
    assert not averages.serve(0.0)
    slow.expect(0.0)
    assert averages.serve(0.0)
    np.testing.assert_array_equal(averages.newest().members, [True, False])
    averages.close()


# --- processes --------------------------------------------------------------------------------------------------------


@pytest.fixture
def start():
    """`start(target, *args)` starts a process, which ends with the test."""
    started = []

    def begin(target, *args):
        started.append(ChildProcess(target, args, target.__name__))
        return started[-1]

    yield begin
    for process in started:
        process.kill()


def test_a_killed_learner_holds_nobody_up_and_its_replacement_begins_from_the_last_average(start):
    averages, reports = server(2, timeout_s=2.0), [Report(2) for _ in range(3)]
    first = start(count_up, averages.link(0), reports[0])
    second = start(count_up, averages.link(1), reports[1])
    averages.launch()
    until(lambda: (reports[0].result or [0])[0] > 3 and (reports[1].result or [0])[0] > 3)
    second.kill()  # nobody tells the server
    at_death = averages.version
    until(lambda: averages.version > at_death + 10)
    np.testing.assert_array_equal(averages.newest().members, [True, False])
    start(count_up, averages.link(1), reports[2])
    until(lambda: reports[2].is_ready and averages.newest().members.all())
    found = averages.newest()
    # Each average adds 1, whoever took part: no step was averaged in twice, and nothing was set back.
    np.testing.assert_array_equal(found.parameters, np.full(9, found.version))
    averages.close()
    assert first.wait(LONGEST_S)
    assert first.exit_code == 0
    assert reports[0].result[0] == reports[0].result[1]


def test_a_learner_that_hangs_holds_nobody_up(start, caplog):
    averages, reports = server(2, timeout_s=0.5), [Report(2) for _ in range(2)]
    start(stop_beating, averages.link(1), reports[1])
    until(lambda: reports[1].is_ready)
    start(count_up, averages.link(0), reports[0])
    averages.launch()
    until(lambda: averages.version > 5)
    averages.close()
    assert [m for m in caplog.messages if "Learner 1 has given no sign of life for 0.5 s" in m]


# --- training ---------------------------------------------------------------------------------------------------------


def train(learners, average_every, steps, rows):
    """The parameters of SGD on a stationary target after averaging among Learners that share each batch."""
    trainers = []
    for _ in range(learners):
        torch.manual_seed(0)
        trainers.append(OwnTrainer(OBSERVATIONS, CHOICES))
    made = [TorchLearner(trainer) for trainer in trainers]
    parameters = [TrainerParameters(trainer) for trainer in trainers]
    vectors = [vector_of(trainer) for trainer in trainers]
    rng = np.random.default_rng(0)
    for step in range(steps):
        batch = {
            OBS: rng.uniform(-1, 1, (rows, 4)).astype(np.float32),
            "action": rng.integers(0, 2, rows),
            REWARD: rng.normal(size=rows).astype(np.float32),
            NEXT_OBS: np.zeros((rows, 4), np.float32),
            DISCOUNT: np.zeros(rows, np.float32),
        }
        each = rows // learners
        for rank, learner in enumerate(made):
            part = {name: column[rank * each : (rank + 1) * each] for name, column in batch.items()}
            learner.step(part, np.ones(each, np.float32))
        if (step + 1) % average_every == 0:
            for one, vector in zip(parameters, vectors, strict=True):
                one.read(vector)
            out = np.empty_like(vectors[0])
            _native.mean_of(vectors, out)
            for one in parameters:
                one.write(out)
    return vector_of(trainers[0])


def test_averaging_after_every_step_is_one_learner_with_the_whole_batch():
    """For SGD, the mean of the stepped parameters is a step along the mean gradient."""
    np.testing.assert_allclose(train(4, 1, 20, 32), train(1, 1, 20, 32), rtol=1e-4, atol=1e-6)


# --- overlap ----------------------------------------------------------------------------------------------------------


RATE = np.float32(0.125)


def target_of(rank, step):
    return np.float32(3 * rank + step % 5)


class Descent(TorchLearner):
    """SGD on half the squared distance of every parameter to a target, which moves: NumPy can follow it."""

    def __init__(self, trainer, rank):
        super().__init__(trainer)
        self.rank, self.steps = rank, 0

    def step(self, batch, weights):
        for parameter in self.trainer.network.parameters():
            values = parameter.detach().numpy()
            values -= RATE * (values - target_of(self.rank, self.steps))
        self.steps += 1
        return StepResult(np.ones(len(weights), np.float32), 1.0, {"td_error": 1.0})


def descend(ranks, average_every, overlap, steps):
    """The parameters of Learners of these `ranks` after so many steps and a last average, and how many there were."""
    learners = len(ranks)
    transition = transition_of(DQN, OBSERVATIONS, CHOICES, {})
    trainers = []

    def make_trainer(seed):
        torch.manual_seed(0)
        trainers.append(OwnTrainer(OBSERVATIONS, CHOICES))
        return trainers[-1]

    setups = [
        LearnerSetup(
            AveragingSpec(learners, average_every, LONGEST_S, overlap),
            make_trainer,
            functools.partial(Descent, rank=rank),
            transition,
            ReplaySpec(400 * learners, mode="uniform"),
            batch_size=2 * learners,
            replay_ratio=2.0,
            learning_starts=0,
        )
        for rank in ranks
    ]
    parameters = TrainerParameters(make_trainer(0))
    start = np.empty(parameters.layout.count, np.float32)
    parameters.read(start)
    averages = AveragingServer(setups[0].spec, parameters.layout, start, facts=2)
    members = []
    for rank, setup in enumerate(setups):
        averager = SharedMemoryAverager(averages.link(rank), parameters.layout)
        averager.join()  # all of them before the first hands in
        member = LocalLearner(setup, rank, lambda layout, averager=averager: averager)
        rows = np.zeros(steps + 1)
        columns = {field.name: np.zeros((len(rows), *field.shape), field.dtype) for field in transition.fields}
        member.insert(columns, len(rows), 0.5)
        members.append(member)
    averages.launch()

    def run(member):
        while member.may_train:
            member.train()
        member.finish()

    in_threads(*(functools.partial(run, member) for member in members))
    averages.close()
    return start, [vector_of(trainer) for trainer in trainers[1:]], averages.version


def mean_in_numpy(vectors):
    return np.mean(np.array(vectors, np.float64), axis=0).astype(np.float32)


def descend_in_numpy(start, ranks, average_every, overlap, steps):
    """The same as a loop: `DaSGD`, with a delay of `overlap` steps."""
    present, handed_in, since, version = [start.copy() for _ in ranks], None, 0, 0

    def take():
        nonlocal handed_in
        average = mean_in_numpy(handed_in).astype(np.float64)
        for values, own in zip(present, handed_in, strict=True):
            values[...] = values + (average - own)
        handed_in = None

    for step in range(steps):
        for rank, values in zip(ranks, present, strict=True):
            values -= RATE * (values - target_of(rank, step))
        since += 1
        if handed_in is not None and since == overlap:
            take()
        if since == average_every:
            handed_in, since, version = [values.copy() for values in present], 0, version + 1
            if overlap == 0:
                take()
    if handed_in is not None:
        take()
    if since:
        present, version = [mean_in_numpy(present)] * len(ranks), version + 1
    return present, version


@pytest.mark.parametrize(
    ("average_every", "overlap", "steps"), [(4, 0, 18), (1, 1, 9), (5, 2, 31), (4, 4, 26), (6, 5, 24)]
)
def test_an_overlapped_average_is_delayed_averaging(average_every, overlap, steps):
    """To the bit what a loop in NumPy says, whichever Learner is faster; the last average may be an early one."""
    for ranks in ([0, 1, 2], [1, 1]):
        start, found, version = descend(ranks, average_every, overlap, steps)
        expected, expected_version = descend_in_numpy(start, ranks, average_every, overlap, steps)
        assert version == expected_version
        for ours, theirs in zip(found, expected, strict=True):
            np.testing.assert_array_equal(ours, theirs)
    alone, _ = descend_in_numpy(start, [1], 1, 0, steps)  # equal Learners change nothing for each other
    np.testing.assert_array_equal(found[0], alone[0])
