"""Actors on the nodes of a Ray cluster."""

import contextlib
import math
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import programs
import pytest
from learner_runs import SEED

from composer import Composer
from pearl.actors.actor import ActorSetup
from pearl.actors.notices import NO_NOTICES, Notices, attribute_queue, write_attributes
from pearl.actors.policy_plan import read_policy
from pearl.actors.process import ActorGroup
from pearl.actors.report import Report
from pearl.algorithms import DQN, PPO
from pearl.algorithms.on_policy import rollout_transition
from pearl.algorithms.trainer import make_trainer, transition_of
from pearl.backends.cpu.learner import NativeLearner
from pearl.errors import ActorError, ConfigurationError, MissingExtraError
from pearl.ipc.queues import WeightSyncQueue
from pearl.remote.actor_relay import ActorLine, _ActorRelay, _Source
from pearl.remote.actor_worker import ActorWork, Newest, RemoteActor, Reply
from pearl.remote.bridge import Needs, RemoteWords, connected
from pearl.remote.group import RemoteProcesses
from pearl.remote.node import Package, about
from pearl.runtime.queues import DataCollectionQueue
from pearl.runtime.serial import InlineActor
from pearl.spec import ActorSpec, RolloutSpec, TrainSpec

ray = pytest.importorskip("ray", reason="needs the extra ray")

ENV = "CartPole-v1"
PATIENCE_S = 120.0  # a cluster begins within seconds on a quiet machine


def until(condition: Callable[[], object], group: ActorGroup | None = None) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        if group is not None:
            group.check(0)
        time.sleep(0.02)


def loop_of(pid: int) -> int:
    """The process of an actor's loop, which a Ray worker started."""
    (loop,) = (child for child in programs.children(pid) if b"--multiprocessing-fork" in programs.command_line(child))
    return loop


def spaces() -> tuple[gym.Space[Any], gym.Space[Any]]:
    env = gym.make(ENV)
    return env.observation_space, env.action_space


class RolloutActors:
    """What actors of PPO need: setups, a queue each, and weights."""

    def __init__(self, count: int) -> None:
        trainer = make_trainer(PPO, *spaces(), seed=3, settings={"hidden_sizes": (8,)})
        transition = rollout_transition(PPO, *spaces(), {})
        spec, policy = ActorSpec(ENV, count=count, envs_per_actor=2), read_policy(trainer)
        self.setups = [
            ActorSetup(
                PPO, {}, spec, TrainSpec(), 7, index,
                policy=policy, transition=transition, rollout=RolloutSpec(horizon=16),
            )
            for index in range(count)
        ]  # fmt: skip
        self.rows, further = self.setups[0].message_rows(), self.setups[0].further_fields
        self.dcqs = [DataCollectionQueue(transition, self.rows, 1, further=further) for _ in self.setups]
        self.weights = np.concatenate([p.detach().numpy().ravel() for p in trainer.networks.parameters()])


class Run:
    """Two remote actors, and what a host has of a run."""

    def __init__(self, address: str, count: int = 2, nodes: tuple[tuple[str, int], ...] = ()) -> None:
        self.trainer = DQN(*spaces(), seed=3, hidden_sizes=(16,))
        spec = ActorSpec(ENV, count=count, envs_per_actor=2, nodes=nodes)
        transition = transition_of(DQN, *spaces(), {})
        self.setups = [
            ActorSetup(DQN, {}, spec, TrainSpec(), 7, index, policy=read_policy(self.trainer), transition=transition)
            for index in range(count)
        ]
        rows = self.setups[0].message_rows()
        self.dcqs = [DataCollectionQueue(transition, rows, 2) for _ in self.setups]
        learner = NativeLearner(self.trainer)
        weights = np.empty(learner.weight_count, np.float32)
        learner.write_weights(weights)
        self.wsq = WeightSyncQueue(len(weights))
        self.version = self.wsq.write(weights)
        self.inline_dcq = DataCollectionQueue(transition, rows, 1)
        self.inline = InlineActor(self.setups[0], self.inline_dcq, self.wsq)
        self.processes = RemoteProcesses(address, self.setups, self.dcqs, self.wsq)
        self.group = ActorGroup(self.setups, self.dcqs, self.wsq, processes=self.processes)

    def collect_inline(self) -> tuple[dict[str, np.ndarray], int]:
        """The next message of an actor in this process, with the same seed and weights."""
        assert self.inline.run_once()
        peeked = self.inline_dcq.peek()
        assert peeked is not None
        found = {name: array.copy() for name, array in peeked[0].items()}, peeked[1]
        self.inline_dcq.release()
        return found

    def rows(self, take: Callable[[], tuple[dict[str, np.ndarray], int]], least: int = 1000) -> dict[str, np.ndarray]:
        """The first `least` transitions of messages, and the returns of the first ten episodes."""
        names = [field.name for field in self.setups[0].transition.fields]
        parts: dict[str, list[np.ndarray]] = {name: [] for name in (*names, "episode_return")}
        total = 0
        while total < least:
            message, count = take()
            total += count
            for name in names:
                parts[name].append(message[name][:count])
            parts["episode_return"].append(message["episode_return"][: message["counts"][0]])
        return {name: np.concatenate(part)[: 10 if name == "episode_return" else least] for name, part in parts.items()}

    def drained(self) -> bool:
        """Drop what waits, as a run that wants data takes it: a full queue holds an actor's messages back."""
        for dcq in self.dcqs:
            if dcq.peek() is not None:
                dcq.release()
        return True

    def message(self, actor: int) -> tuple[dict[str, np.ndarray], int]:
        """The next message of an actor."""
        dcq = self.dcqs[actor]
        until(lambda: len(dcq), self.group)
        peeked = dcq.peek()
        assert peeked is not None
        found = {name: array.copy() for name, array in peeked[0].items()}, peeked[1]
        dcq.release()
        return found


@pytest.fixture
def run() -> Iterator[Run]:
    made = Run("local")
    try:
        yield made
    finally:
        made.group.stop(20.0)


def test_remote_actors_send_what_local_ones_would_and_are_replaced(run: Run) -> None:
    # Messages may end anywhere: an actor sends what it has after a while.
    expected, found = run.rows(run.collect_inline), run.rows(lambda: run.message(0))
    for name in expected:
        np.testing.assert_array_equal(found[name], expected[name], err_msg=name)
    message, _ = run.message(0)
    assert 0 <= message["span"][1] - message["span"][0] < PATIENCE_S
    assert message["counts"][2] == 0
    assert message["counts"][3] == run.version

    # Newer weights reach it, by their version here.
    newer = run.wsq.write(np.zeros(run.wsq.weight_count, np.float32))
    until(lambda: run.message(1)[0]["counts"][3] == newer, run.group)

    # Killed: named, and replaced by one that goes on.
    pid = run.group.pids[1]
    assert pid not in (0, os.getpid())
    loop = loop_of(pid)
    os.kill(pid, signal.SIGKILL)
    until(lambda: run.group.restarts or run.message(1) is None, run.group)
    until(lambda: not programs.is_alive(loop))  # it ends with the Ray worker
    assert run.group.restarts == 1
    while run.group.pids[1] in (0, pid):
        run.group.check(0)
        time.sleep(0.02)
    for _ in range(5):
        assert run.message(1)[1] > 0

    # Without the bridge there is no Ray: the run is told once, and how to go on.
    os.kill(run.processes.bridge.pid, signal.SIGKILL)
    with pytest.raises(ActorError, match=r"connection to Ray is lost.*--resume"):
        until(lambda: False, run.group)


def test_the_note_of_a_cluster_that_was_killed_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note = tmp_path / "ray" / "ray_current_cluster"
    note.parent.mkdir()
    note.write_text("127.0.0.1:1")
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setenv("RAY_ENABLE_AUTO_CONNECT", "0")  # `connected` sets it
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("ray._private.services.find_gcs_addresses", set)  # other clusters of this machine
    with pytest.raises(ConfigurationError, match=r"127.0.0.1:1: no Ray cluster answers there.*refused"):
        connected("auto", Needs(actors=1))


def test_an_address_where_nobody_answers() -> None:
    made = Run("127.0.0.1:1", count=1)
    try:
        with pytest.raises(ActorError, match=r"127.0.0.1:1: no Ray cluster answers there.*refused"):
            until(lambda: False, made.group)
    finally:
        made.group.stop()


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtraError, match=r"pearl-toolkit\[ray\]"):
        RemoteProcesses("local", [], [], WeightSyncQueue(1))


def test_a_rollout_begins_when_the_host_has_room_for_it_and_with_the_newest_weights() -> None:
    made = RolloutActors(1)
    (setup,), (dcq,), flat = made.setups, made.dcqs, made.weights
    package, told = Package.of((setup, None), with_program=False), attribute_queue()
    write_attributes(told, {"gravity": 5.0}, {"gravity": 1})
    work = ActorWork(package, dcq.fields, dcq.by_row, True, len(flat), Notices(None, told).counts)
    actor = RemoteActor()
    try:
        actor.start(work, 0, 0, Newest(flat, 4, Notices(None, told.reader()).poll()))
        assert actor._notices.reader().newest_attributes() == {"gravity": 5.0}

        def rollout(newest: Newest) -> Reply:
            deadline = time.monotonic() + PATIENCE_S
            while not len((reply := actor.take(newest)).rows):
                assert reply.failure is None, reply.failure
                assert time.monotonic() < deadline
            assert list(reply.rows) == [32]
            return reply

        assert rollout(Newest(None, 4)).others["counts"][0, 3] == 4
        time.sleep(0.05)  # enough for another one
        newer = rollout(Newest(flat + 1, 9))
        assert newer.policy == newer.others["counts"][0, 3] == 9
    finally:
        actor._dcq.close()


class FakeRay:
    """Calls as Ray would make them elsewhere, made here: of an actor that drops the weights that it is sent."""

    exceptions = ray.exceptions

    def __init__(self, actor: object) -> None:
        self._actor, self.killed = actor, 0

    def get(self, reference: object, timeout: float) -> object:
        return reference

    def put(self, newest: object) -> object:
        return newest

    def kill(self, actor: object, no_restart: bool) -> None:
        self.killed += 1

    def make(self) -> object:
        """A Ray actor: its methods have `remote`."""
        calls = {name: SimpleNamespace(remote=getattr(self._actor, name)) for name in ("about", "start", "take")}
        return SimpleNamespace(**calls)


def test_newer_weights_leave_the_attributes_of_environments_as_they_were() -> None:
    wsq, attributes = WeightSyncQueue(3), attribute_queue()
    source = _Source(FakeRay(None), wsq, Notices(None, attributes))
    write_attributes(attributes, {"gravity": 5.0}, {"gravity": 1})
    wsq.write(np.zeros(3, np.float32))
    first, _, newest = source.since(0, 0.0)
    wsq.write(np.ones(3, np.float32))
    second, _, newer = source.since(first, 0.0)
    assert (first, second) == (1, 2)
    assert (newest.weights[0], newer.weights[0]) == (0, 1)
    for found in (newest, newer):
        received = Notices(None, attribute_queue())
        received.write(found.notice)
        assert received.reader().newest_attributes() == {"gravity": 5.0}


def test_weights_that_do_not_reach_an_actor_are_found_by_their_version() -> None:
    class Deaf:
        """It says what weights it has: those it began with."""

        def about(self) -> dict[str, str]:
            return about()

        def start(self, work: object, env_steps: int, restarts: int, newest: Newest) -> None:
            self._policy = newest.version

        def take(self, newest: Newest) -> Reply:
            return Reply(np.zeros(0, np.int64), {}, {}, self._policy, True, 0, None)

    fake = FakeRay(Deaf())
    transition = transition_of(DQN, *spaces(), {})
    wsq = WeightSyncQueue(3)
    first = wsq.write(np.zeros(3, np.float32))
    work = ActorWork(Package.of(None, with_program=False), (), frozenset(), False, 3, (0, 0))
    line = ActorLine("actor-5", work, DataCollectionQueue(transition, 4, 2), RemoteWords(), Report())
    bridge = SimpleNamespace(ray=fake, is_over=False, failure=None)
    relay = _ActorRelay(bridge, line, _Source(fake, wsq, NO_NOTICES), SimpleNamespace(remote=fake.make))
    thread = threading.Thread(target=relay.run)
    thread.start()
    try:
        line.words[RemoteWords.WANTED] = 1
        until(lambda: line.report.is_ready)
        assert line.report.failure is None  # it has the first ones
        second = wsq.write(np.ones(3, np.float32))
        until(lambda: line.words[RemoteWords.ENDED] == 1)
        assert f"It has the weights of version {first}; it was sent {second}." in (line.report.failure or "")
        assert fake.killed == 1
    finally:
        bridge.is_over = True
        thread.join(PATIENCE_S)
    assert bridge.failure is None


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_rollouts_stay_by_the_newest_policy_when_actors_are_killed() -> None:
    made = RolloutActors(2)
    setups, dcqs, rows, flat = made.setups, made.dcqs, made.rows, made.weights
    wsq = WeightSyncQueue(len(flat))
    version = wsq.write(flat)
    group = ActorGroup(setups, dcqs, wsq, most_deaths=1000, processes=RemoteProcesses("local", setups, dcqs, wsq))
    generator = random.Random(SEED)
    killed = 0
    try:
        while killed < 20:
            kill_at = time.monotonic() + generator.uniform(0.0, 0.5)
            while time.monotonic() < kill_at or not all(group.pids):
                until(lambda: all(map(len, dcqs)), group)
                for dcq in dcqs:
                    message, count = dcq.peek() or pytest.fail("It was there.")
                    assert count == rows
                    assert message["counts"][3] == version
                version = wsq.write(flat)
                for dcq in dcqs:
                    dcq.release()
                group.check(0)
            pid = generator.choice(group.pids)
            with contextlib.suppress(ValueError, ProcessLookupError):  # it has no loop yet, or was the last one killed
                os.kill(generator.choice((pid, loop_of(pid))), signal.SIGKILL)
                killed += 1
        assert group.restarts > 10
    finally:
        group.stop(20.0)


@pytest.mark.slow
def test_ppo_learns_from_remote_actors_what_it_learns_from_local_ones(tmp_path: Path) -> None:
    """Every rollout is by the newest policy, so that only the place differs."""
    composer = Composer(progress=False)
    composer.set_train_function(learner=PPO, hidden_sizes=(16,))
    composer.set_actors(2, env=ENV, envs_per_actor=4)
    composer.set_rollout(horizon=64)
    program = composer.runtime_gen(*composer.run(), tmp_path / "program.py")
    shared = ("--timesteps", "4096", "--seed", "3", "--eval-episodes", "0", "--plain")
    weights = {}
    for where in ((), ("--ray",)):
        run_dir = tmp_path / f"run{len(where)}"
        code, output = programs.run(program, *where, *shared, "--run-dir", str(run_dir))
        assert code == 0, output
        assert programs.summary(run_dir)["env_steps"] >= 4096
        weights[where] = (run_dir / "weights.safetensors").read_bytes()
    assert weights[()] == weights[("--ray",)]


@pytest.mark.slow
@pytest.mark.parametrize("stopped", ["Ray worker", "actor loop"])
def test_a_remote_actor_that_hangs_is_ended_and_replaced(run: Run, stopped: str) -> None:
    for actor in range(2):
        assert run.message(actor)[1] > 0
    pid = run.group.pids[1]
    run.group._timeout_s = 5.0
    os.kill(pid if stopped == "Ray worker" else loop_of(pid), signal.SIGSTOP)
    until(lambda: run.drained() and run.group.restarts, run.group)
    run.group._timeout_s = math.inf  # a new one takes its time
    assert run.message(0)[1] > 0
    until(lambda: run.drained() and run.group.pids[1] not in (0, pid), run.group)
    for _ in range(5):
        assert run.message(1)[1] > 0
    until(lambda: not programs.is_alive(pid))


@pytest.mark.slow
def test_a_crash_of_a_remote_actors_process_is_named(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    for actor in range(2):
        assert run.message(actor)[1] > 0
    os.kill(loop_of(run.group.pids[0]), signal.SIGSEGV)
    until(lambda: run.drained() and run.group.restarts, run.group)
    assert "Its process ended (signal SIGSEGV)." in caplog.text
    for _ in range(5):
        assert run.message(0)[1] > 0


@pytest.mark.slow
def test_actors_of_a_node_that_dies_go_on_on_another(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "5")  # without the head, not a minute

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    try:
        node = cluster.add_node(num_cpus=2)
        made = Run(cluster.address)
        try:
            for actor in range(2):
                assert made.message(actor)[1] > 0
            first = made.group.pids
            cluster.remove_node(node, allow_graceful=False)
            until(lambda: made.drained() and made.group.restarts, made.group)
            assert made.group.restarts == 1  # they were spread over the nodes
            until(lambda: made.drained() and 0 not in made.group.pids, made.group)
            assert sum(pid in first for pid in made.group.pids) == 1
            for _ in range(50):
                for actor in range(2):
                    assert made.message(actor)[1] > 0
            cluster.remove_node(cluster.head_node, allow_graceful=False)
            with pytest.raises(ActorError, match=r"connection to Ray is lost|died 3 times"):
                until(lambda: not made.drained(), made.group)
        finally:
            made.group.stop(20.0)
    finally:
        cluster.shutdown()


@pytest.mark.slow
def test_a_program_trains_with_remote_actors_and_goes_on_without_ray(tmp_path: Path) -> None:
    program = programs.make_program(tmp_path, actors=2)
    run_dir = tmp_path / "run"
    code, output = programs.run(program, "--ray", "--timesteps", "3000", "--run-dir", str(run_dir), "--plain")
    assert code == 0, output
    assert programs.summary(run_dir)["env_steps"] >= 3000
    assert programs.summary(run_dir)["gradient_steps"] > 0
    code, output = programs.run(program, "--resume", "--timesteps", "4000", "--run-dir", str(run_dir), "--plain")
    assert code == 0, output
    assert programs.summary(run_dir)["env_steps"] >= 4000
    code, output = programs.run(program, "--ray", "--serial")
    assert code == 2
    assert "--ray has no use with --serial" in output
