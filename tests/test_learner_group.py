"""Learners in processes: what they train on and how often, and what happens when one dies."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import signal
import threading
import time
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import pytest
from averaging_members import raise_error
from gymnasium import spaces
from learner_runs import PATIENCE_S, ROUND_S, ROUNDS, SEED, kill_rounds, running
from trainers import FallingDQN

from pearl.actors.report import Report
from pearl.algorithms import DQN
from pearl.algorithms.trainer import transition_of
from pearl.backends.cpu.learner import NativeLearner
from pearl.errors import CheckpointError, ConfigurationError, PearlError, QueueClosedError, ReplayError
from pearl.ipc.queues import Bell
from pearl.local_sgd.averaging import Average, AveragingSpec
from pearl.local_sgd.group import LearnerGroup
from pearl.local_sgd.local_learner import (
    BETA,
    PROGRESS,
    Commands,
    LearnerProgress,
    LearnerSetup,
    LocalLearner,
    ProcessSetup,
    run_learner,
)
from pearl.local_sgd.parameters import TrainerParameters
from pearl.local_sgd.shared_memory import AveragingServer
from pearl.local_sgd.state_files import read_state, write_state
from pearl.remote.bridge import EndedError
from pearl.remote.learner_relay import _LearnerRelay
from pearl.replay.schedules import Linear
from pearl.spec import ReplaySpec

LONGEST_S = 60.0
SPACES = spaces.Box(-1.0, 1.0, (4,), np.float32), spaces.Discrete(2)
TRANSITION = transition_of(DQN, *SPACES, {})


def setup_of(learners=2, average_every=4, overlap=0, **options):
    defaults = {"replay": ReplaySpec(1000), "batch_size": 16, "replay_ratio": 2.0, "learning_starts": 40}
    return LearnerSetup(
        AveragingSpec(learners, average_every, overlap=overlap),
        functools.partial(DQN, *SPACES, seed=0, hidden_sizes=(16,), target_update_interval=10),  # needs no torch
        NativeLearner,
        **{"transition": TRANSITION, **defaults, **options},
    )


def transitions(rows, seed=0):
    random = np.random.default_rng(seed)
    return {
        "obs": random.standard_normal((rows, 4)).astype(np.float32),
        "action": random.integers(0, 2, rows),
        "reward": random.standard_normal(rows).astype(np.float32),
        "next_obs": random.standard_normal((rows, 4)).astype(np.float32),
        "discount": np.full(rows, 0.99, np.float32),
    }


def feed(group, rows, seed=0):
    deadline = time.monotonic() + LONGEST_S
    while not group.wants_data:
        assert time.monotonic() < deadline, "no room in time"
        group.check()
        time.sleep(0.005)
    group.insert(transitions(rows, seed), rows, 0.5)


def until(condition) -> None:
    deadline = time.monotonic() + LONGEST_S
    while not condition():
        assert time.monotonic() < deadline, "not met in time"
        time.sleep(0.01)


class Alone:
    """Averages of one Learner, among others that are only told of."""

    def __init__(self, facts):
        self.facts, self.version, self.asked = np.array(facts, np.float64), 0, []
        self.expected = []

    def join(self):
        return Average(0, self.first, np.full_like(self.facts, np.nan))

    def beat(self):
        pass

    def expect(self, seconds):
        self.expected.append(seconds)

    def leave(self):
        pass

    def average(self, parameters, facts):
        self.asked.append((parameters.copy(), facts.copy()))
        self.version += 1
        self.facts[0] = facts
        return Average(self.version, parameters, self.facts)


class Hurried(Alone):
    """Others that go on without a Learner after its first average: the third is made while it awaits the second."""

    def __init__(self, facts):
        super().__init__(facts)
        self.torn = False

    def hand_in(self, parameters, facts):
        self.handed_in = parameters.copy(), facts.copy()

    def take(self):
        parameters, facts = self.handed_in
        self.average(parameters, facts)
        if self.version == 1:
            return Average(1, parameters + 1, self.facts)
        if self.torn:
            return Average(2, parameters, self.facts, lambda: False)
        return self.join()

    def join(self):
        facts = np.array([[np.nan, np.nan], *self.facts[1:]])
        return Average(self.version + 1, np.full_like(self.first, 7.0), facts) if self.version else super().join()


def local_learner(setup, facts, make_averager=Alone):
    averager = make_averager(facts)
    parameters = TrainerParameters(setup.make_trainer(), setup.moments)
    averager.first = np.empty(parameters.layout.count, np.float32)
    parameters.read(averager.first)
    return LocalLearner(setup, 0, lambda layout: averager), averager


class Endless:
    """A queue whose host sends faster than a Learner takes."""

    slots, closed = 4, False

    def peek(self, timeout_s=0.0):
        if self.closed:
            raise QueueClosedError
        return {**transitions(40), BETA: np.array([0.5]), PROGRESS: np.array([0.0])}, 40

    def release(self):
        pass


def test_a_learner_trains_however_fast_transitions_come():
    setup, queue = setup_of(1, replay_ratio=float("inf")), Endless()
    report, commands = Report(len(dataclasses.fields(LearnerProgress))), Commands()
    parameters = TrainerParameters(setup.make_trainer())
    server = AveragingServer(setup.spec, parameters.layout, np.zeros(parameters.layout.count, np.float32), facts=2)
    shared = ProcessSetup(0, server.link(0), queue, report, commands, Bell(), None, None)
    server.launch()
    thread = threading.Thread(target=run_learner, args=(setup, shared), daemon=True)
    thread.start()
    try:
        until(lambda: LearnerProgress.of(report).steps >= 8)
    finally:
        queue.closed = commands.stops = True
        thread.join(LONGEST_S)
        server.close()
    assert LearnerProgress.of(report).inserted <= 40 * 4 * (LearnerProgress.of(report).steps + 1)


def test_a_learner_trains_as_often_as_the_ratio_allows_and_averages_every_h_steps():
    local, averager = local_learner(setup_of(), [[0, 0], [1, 1]])
    local.insert(transitions(19), 19, 0.5)
    assert not local.may_train
    local.insert(transitions(41), 41, 0.5)  # 40 more than its part of learning_starts: 80 samples, of 8 a batch
    averages = 0
    while local.may_train:
        averages += local.train()
    assert averages == 2
    assert (local.progress.steps, local.progress.inserted, local.progress.version) == (10, 60, 2)
    first, *others = averager.expected  # the first step may take long
    assert first == 60
    assert all(0 < seconds < LONGEST_S for seconds in others)
    local.finish()
    assert len(averager.asked) == 3
    assert local.wants_data
    local.insert(transitions(40), 40, 0.5)  # for ten steps, more than the four until the next average
    assert not local.wants_data


def test_weights_say_how_the_bank_compares_with_those_of_the_others():
    """The bank of the other has three times the mass: this one's weights get the factor 2 / 4."""
    weights = []

    class Watching(NativeLearner):
        def step(self, batch, importance):
            weights.append(importance)
            return super().step(batch, importance)

        def fused_loop(self, *_):
            return None

    setup = setup_of(average_every=1, replay=ReplaySpec(1000, alpha=0.0), replay_ratio=1000.0)
    setup = LearnerSetup(**{**vars(setup), "make_learner": Watching})
    local, averager = local_learner(setup, [[0, 0], [300, 1]])
    local.insert(transitions(100), 100, 0.5)
    local.train()
    np.testing.assert_allclose(averager.asked[0][1], [100, 1])
    local.train()
    np.testing.assert_array_equal(weights[0], 1.0)  # nothing is known of the others yet
    np.testing.assert_allclose(weights[1], 2 * 100 / 400)


@pytest.mark.parametrize("torn", [False, True])
def test_a_learner_that_others_did_not_wait_for_goes_on_from_the_newest_average(torn):
    """Whether that is clear at once, or only from an average that was overwritten while it was loaded."""
    local, averager = local_learner(setup_of(overlap=2), [[0, 0], [1, 1]], Hurried)
    averager.torn = torn
    parameters = TrainerParameters(local._trainer)
    values = np.empty(parameters.layout.count, np.float32)
    local.insert(transitions(80), 80, 0.5)
    while not local.train():
        pass
    parameters.read(values)
    since = values - averager.asked[0][0]
    assert (np.abs(since - 1) < 0.1).all(), "the average adds 1 to what was handed in, and two steps were made since"
    while not local.train():
        pass
    assert local.progress.version == 3
    parameters.read(values)
    np.testing.assert_array_equal(values, 7.0)
    assert local.progress.steps == 10


def test_averagers_that_make_learners_wait_do_not_overlap():
    with pytest.raises(ConfigurationError, match=r"Alone makes Learners wait .* overlap is 2. Set overlap to 0"):
        local_learner(setup_of(overlap=2), [[0, 0], [1, 1]])


class StepByStep(NativeLearner):
    """Without the loop in C++."""

    def fused_loop(self, *_):
        return None


@pytest.mark.parametrize("moments", ["keep", "average", "reset"])
@pytest.mark.parametrize(
    "replay", [ReplaySpec(400), ReplaySpec(400, mode="uniform"), ReplaySpec(400, stratified=False, alpha=1.0)]
)
def test_the_loop_in_cpp_trains_as_single_steps_do(replay, moments):
    """Other banks are heavier and lighter, and one is empty: the weights of batches differ from those of one bank."""
    found = []
    for make_learner in (NativeLearner, StepByStep):
        changes = {"make_learner": make_learner, "moments": moments}
        setup = LearnerSetup(**{**vars(setup_of(learners=4, replay=replay)), **changes})
        local, averager = local_learner(setup, [[0, 0], [250.0, 0.01], [3.0, 2.0], [0.0, 0.0]])
        local.insert(transitions(60), 60, 0.7)
        while local.may_train:
            local.train()
        found.append(averager.asked)
    assert len(found[0]) == 6
    for (parameters, facts), (of_steps, facts_of_steps) in zip(*found, strict=True):
        np.testing.assert_allclose(parameters, of_steps, rtol=1e-6, atol=1e-7)
        np.testing.assert_allclose(facts, facts_of_steps, rtol=1e-6)


def test_schedules_follow_the_progress_of_the_run():
    made = []

    def keep(trainer):
        made.append(trainer)
        return NativeLearner(trainer)

    changes = {"make_trainer": functools.partial(FallingDQN, *SPACES, seed=0), "make_learner": keep}
    local, _ = local_learner(LearnerSetup(**{**vars(setup_of()), **changes}), [[0, 0], [1, 1]])
    local.insert(transitions(10), 10, 0.5, 0.75)
    optimizer = made[0].in_torch().optimizer
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.25 * FallingDQN.learning_rate)


@pytest.mark.parametrize("overlap", [0, 3])
def test_learners_share_the_transitions_and_keep_the_ratio_together(overlap):
    setup = setup_of(overlap=overlap)
    trainer = setup.make_trainer()
    before = np.empty(TrainerParameters(trainer).layout.count, np.float32)
    TrainerParameters(trainer).read(before)
    with LearnerGroup(setup, trainer, message_rows=50) as group:
        group.wait_until_ready()
        for number in range(20):
            feed(group, 33, number)
        progress = group.stop()
        newest = group.load_newest()
        assert sum(one.inserted for one in progress) == 20 * 33
        for one in progress:  # those since its part of learning_starts are trained on twice, in batches of 8
            assert one.steps == 2 * (one.inserted - 20) // 8
        assert sum(one.steps for one in progress) > 100  # how they share them depends on who has room
        assert newest.version == max(one.version for one in progress) >= max(one.steps for one in progress) // 4
        assert np.isfinite(progress[0].td_error)
    after = np.empty_like(before)
    TrainerParameters(trainer).read(after)
    np.testing.assert_array_equal(after, newest.parameters)
    entries, first = TrainerParameters(trainer).layout.entries, 0
    assert any("target" in name for name, _ in entries)
    for name, shape in entries:
        part = slice(first, first + math.prod(shape))
        assert not np.array_equal(before[part], after[part]), f"{name} never moved"
        first = part.stop


def test_a_killed_learner_is_replaced_and_the_others_go_on(caplog):
    setup = setup_of()
    with LearnerGroup(setup, setup.make_trainer(), message_rows=64) as group:
        group.wait_until_ready()
        for number in range(10):
            feed(group, 40, number)
        until(lambda: group.server.version >= 5)
        group._running[1].process.kill()
        group.check()
        assert group.restarts == 1
        at_death = group.server.version
        number = 10
        while group.server.version < at_death + 5 or not group._running[1].report.is_ready:
            number += 1
            feed(group, 40, number)
        for further in range(20):
            feed(group, 40, further)
        until(lambda: group.progress[1].steps >= 8)
        progress = group.stop()
        assert group.load_newest().version == group.server.version
        assert not [m for m in caplog.messages if "did not stop" in m]
    assert progress[1].version > at_death
    assert [m for m in caplog.messages if m.startswith("learner-1 died (signal SIGKILL) and is replaced")]


def send_to(group, rank, rows, seed=0):
    """Send transitions to one Learner alone."""
    queue, columns = group.queues[rank], transitions(rows, seed)
    message = queue.reserve(LONGEST_S)
    for name, column in columns.items():
        message[name][:rows] = column
    message["beta"][0], message["progress"][0] = 0.5, 0.0
    queue.publish(rows)


def test_states_are_saved_while_one_learner_waits_for_another_and_loaded_again(tmp_path):
    setup = setup_of()
    with LearnerGroup(setup, setup.make_trainer(), message_rows=64, states=tmp_path / "states") as group:
        group.wait_until_ready()
        send_to(group, 1, 60, 1)
        until(lambda: group.server.version >= 1)  # Learner 1 takes part before Learner 0, which would else train alone
        send_to(group, 0, 60, 0)
        until(lambda: group.server.version >= 2)
        send_to(group, 0, 64, 2)  # for sixteen steps: it trains four, and then waits for the other, which has no data
        folder = group.save()
        first = [read_state(folder / str(rank)) for rank in range(2)]
        assert [scalars["storage/inserted"] for _, scalars in first] == [124, 60]
        np.testing.assert_array_equal(first[0][0]["storage/obs"][60:], transitions(64, 2)["obs"])
        send_to(group, 1, 64, 3)
        version = group.server.version
        until(lambda: group.server.version >= version + 2)
    copied = [({name: np.array(array) for name, array in arrays.items()}, scalars) for arrays, scalars in first]
    for rank, (arrays, scalars) in enumerate(copied):
        write_state(tmp_path / "initial" / str(rank), arrays, scalars)

    again = LearnerGroup(
        setup, setup.make_trainer(), message_rows=64, states=tmp_path / "states", initial=tmp_path / "initial"
    )
    with again as group:
        group.wait_until_ready()
        until(lambda: group.server.version >= 1)  # what Learner 0 had not trained is due
        assert group.total_progress[0].inserted == 0, "what the process itself did"
        group.stop(at_once=True, saves=True)
        for rank, (arrays, scalars) in enumerate(copied):
            found, counts = read_state(tmp_path / "states" / str(rank))
            for name in ("storage/obs", "storage/action", "replay/generations"):
                np.testing.assert_array_equal(found[name], arrays[name])
            assert counts["inserted"] == scalars["inserted"]
            assert counts["steps"] >= scalars["steps"]
        due = setup.replay_ratio * (60 - setup.first_rows) / setup.share
        assert counts["steps"] <= due, "the other got nothing new to train on"


def test_a_learner_that_hangs_is_killed_and_replaced(caplog, monkeypatch):
    setup = setup_of()
    with LearnerGroup(setup, setup.make_trainer(), message_rows=64) as group:
        group.wait_until_ready()
        os.kill(group.pids[0], signal.SIGSTOP)
        group.check()
        group.check()
        monotonic = time.monotonic
        monkeypatch.setattr(time, "monotonic", lambda: monotonic() + 3600.0)  # the host was stopped, too
        group.check()
        assert group.restarts == 0
        group._patience_s = 5.0

        def is_replaced():
            group.check()
            return group.restarts == 1

        until(is_replaced)
        group._patience_s = 300.0  # a new process takes its time
        until(lambda: group._running[0].report.is_ready)
    assert [m for m in caplog.messages if m.startswith("learner-0 died (it hung for 5 s) and is replaced")]


def test_a_learner_that_hangs_at_the_end_is_named(caplog, monkeypatch, tmp_path):
    monkeypatch.setattr("pearl.local_sgd.group._SILENCE_S", 0.3)
    setup = setup_of()
    with LearnerGroup(setup, setup.make_trainer(), message_rows=64, states=tmp_path / "states") as group:
        group.wait_until_ready()
        group._patience_s = 3.0
        os.kill(group.pids[0], signal.SIGSTOP)
        group.stop(at_once=True, saves=True)
    told = [message for message in caplog.messages if message.startswith("learner-0")]
    assert "is to write its state, and has given no sign of life" in told[-2]
    assert told[-1] == "learner-0 did not stop in time and is killed."
    assert (tmp_path / "states" / "1").exists()


@pytest.mark.slow
@pytest.mark.timeout(PATIENCE_S + ROUNDS * ROUND_S)
def test_learners_that_are_killed_again_and_again_hang_nothing(tmp_path):
    with running(None, tmp_path / "states", most_deaths=10_000) as run:
        assert ROUNDS <= kill_rounds(run, ROUNDS, SEED) == run.group.restarts


def test_each_learner_draws_noise_with_a_seed_of_its_own():
    made = []

    def keep(trainer):
        made.append(trainer)
        return NativeLearner(trainer)

    setup = LearnerSetup(**{**vars(setup_of()), "make_learner": keep})
    for rank in range(2):
        first = np.zeros(TrainerParameters(setup.make_trainer()).layout.count, np.float32)
        averager = Alone([[0, 0], [0, 0]])
        averager.first = first
        LocalLearner(setup, rank, lambda layout: averager)  # noqa: B023
    assert made[0].seed != made[1].seed
    assert [trainer.seed for trainer in made] == [setup.trainer_seed(rank) for rank in range(2)]


def test_loaded_states_have_the_learning_rates_of_the_settings(tmp_path):
    setup = setup_of()
    local, averager = local_learner(setup, [[0, 0], [1, 1]])
    write_state(tmp_path / "state", *local.state())
    slower = functools.partial(setup.make_trainer, learning_rate=1e-5)
    again = LearnerSetup(**{**vars(setup), "make_trainer": slower})
    resumed = LocalLearner(again, 0, lambda layout: averager, tmp_path / "state")
    assert resumed.state()[1]["stated-learning_rate"] == 1e-5
    assert resumed._trainer.parts.optimizer.param_groups[0]["lr"] == pytest.approx(1e-5)


def test_damaged_states_are_refused(tmp_path):
    setup = setup_of()
    local, _ = local_learner(setup, [[0, 0], [1, 1]])
    local.insert(transitions(30), 30, 0.5)
    arrays, scalars = local.state()
    assert read_state(tmp_path / "nothing") is None
    write_state(tmp_path / "outside", arrays, scalars)
    (tmp_path / "outside" / "scalars.json").write_text('{"arrays": ["../secret"], "scalars": {}}')
    with pytest.raises(CheckpointError, match="names something that no Learner has"):
        read_state(tmp_path / "outside")
    network = next(name for name in arrays if name.startswith("trainer/"))
    arrays[network] = np.zeros(8, np.uint8)
    write_state(tmp_path / "damaged", arrays, scalars)
    with pytest.raises(CheckpointError, match="networks and optimizers of a Learner cannot be loaded"):
        LocalLearner(setup, 0, lambda layout: Alone([[0, 0], [1, 1]]), tmp_path / "damaged")


def test_a_learner_that_dies_while_its_state_is_written_leaves_none(tmp_path, monkeypatch):
    # On this machine: as if it was killed before the last file was in its place.
    with monkeypatch.context() as killed:
        killed.setattr(Path, "replace", interrupt)
        killed.setattr(Path, "write_text", lambda path, text, **_: path.touch() or interrupt())
        with pytest.raises(KeyboardInterrupt):
            write_state(tmp_path / "here", {"rows": np.zeros(3)}, {"steps": 1})
    assert read_state(tmp_path / "here") is None

    # On a node that dies after the first piece of a file.
    class Lost(_LearnerRelay):
        def __init__(self):
            self.pieces = [b"{"]

        def _call(self, method, *arguments, group=None):
            if not self.pieces:
                raise EndedError("The node died.")
            return self.pieces.pop()

        _line = _shared = MagicMock()

    with pytest.raises(EndedError):
        Lost()._fetch_file(tmp_path / "there", "scalars.json", 100)
    assert read_state(tmp_path / "there") is None


def interrupt(*_):
    raise KeyboardInterrupt


def test_learners_that_die_too_often_end_the_run_with_their_error():
    setup = LearnerSetup(**{**vars(setup_of()), "make_learner": raise_error})
    with LearnerGroup(setup, setup.make_trainer()) as group, pytest.raises(PearlError) as caught:
        group.wait_until_ready()
    assert "Learners died 3 times within 60 s" in str(caught.value)
    assert "no learner here" in str(caught.value)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"batch_size": 15}, ReplayError, "batch of 15 cannot be divided among 2 banks. Set batch_size to 14 or 16"),
        ({"learners": 32}, ReplayError, "batch of 16 cannot take a row from each of 32 banks"),
        ({"replay": ReplaySpec(1001)}, ReplayError, "1001 slots cannot be divided among 2 banks"),
        ({"replay": ReplaySpec(1000, mode="fifo")}, ConfigurationError, "found 'fifo'"),
        ({"replay": ReplaySpec(1000, alpha=Linear(0.6, 0.0, 100))}, ConfigurationError, "alpha .* found a schedule"),
        ({"replay": ReplaySpec(1000, share_next_obs=True)}, ConfigurationError, "share_next_obs=True"),
        ({"replay": ReplaySpec(1000, storage="shared")}, ConfigurationError, "storage='shared'"),
        ({"replay_ratio": 0.0}, ConfigurationError, "replay_ratio must be a number above 0, or inf; found 0"),
    ],
)
def test_settings_that_do_not_fit_several_learners_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        setup_of(**options)


def test_insertions_that_do_not_fit_are_refused():
    setup = setup_of()
    with pytest.raises(ConfigurationError, match=r"message_rows must lie in \[1, 500\], .* found 501"):
        LearnerGroup(setup, setup.make_trainer(), message_rows=501)
    group = LearnerGroup(setup, setup.make_trainer(), message_rows=8)
    assert not group.wants_data
    with pytest.raises(ConfigurationError, match="at most 8 rows; found 9"):
        group.insert(transitions(9), 9, 0.5)
    with pytest.raises(PearlError, match="No Learner has room"):
        group.insert(transitions(8), 8, 0.5)
