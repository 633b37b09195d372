"""Learners with their banks on the nodes of a Ray cluster, and what is left when one of these is lost."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import programs
import pytest
from programs import children, make_program, run, summary
from test_learners_program import has_trained

from pearl.algorithms import DQN
from pearl.algorithms.trainer import transition_of
from pearl.backends.cpu.learner import NativeLearner
from pearl.errors import ClusterError, LearnerError
from pearl.local_sgd.averaging import Average, AveragingSpec
from pearl.local_sgd.group import LearnerGroup
from pearl.local_sgd.local_learner import LearnerSetup
from pearl.local_sgd.state_files import read_state
from pearl.remote.bridge import Needs
from pearl.remote.group import RayBridge, RemoteLearners
from pearl.spec import ReplaySpec

ray = pytest.importorskip("ray", reason="needs the extra ray")

PATIENCE_S = 300.0  # a cluster begins within seconds on a quiet machine, and a worker after a minute on a busy one
GOES_ON_S = 2.0  # the others without a Learner that is lost
ROWS = 32
ROUNDS = int(os.environ.get("PEARL_KILLS", "10"))


def make_trainer(seed: int, **settings: Any) -> DQN:
    env = gym.make("CartPole-v1")
    return DQN(env.observation_space, env.action_space, seed=seed, **{"hidden_sizes": (16,), **settings})


def make_other_trainer(seed: int) -> DQN:
    """On a node, one with other networks than on the host."""
    return make_trainer(seed, hidden_sizes=(16,) if seed == 0 else (8, 8))


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "not met in time"
        time.sleep(0.02)


class Run:
    """Two remote Learners, and what a host has of a run."""

    def __init__(self, address: str, states: Path, learners: int = 2, make: Any = make_trainer, **options: Any) -> None:
        env = gym.make("CartPole-v1")
        setup = LearnerSetup(
            AveragingSpec(learners, average_every=4),
            make,
            NativeLearner,
            transition_of(DQN, env.observation_space, env.action_space, {}),
            ReplaySpec(1000 * learners),
            batch_size=16 * learners,
            replay_ratio=np.inf,
            learning_starts=ROWS * learners,
        )
        self.rng = np.random.default_rng(0)
        self.trainer = make(seed=0)
        self.bridge = RayBridge(address, Needs(learners=learners))
        start = RemoteLearners(self.bridge)
        self.group = LearnerGroup(setup, self.trainer, message_rows=ROWS, states=states, start=start, **options)
        self.group.launch()
        self.columns = {
            field.name: self.rng.standard_normal((ROWS, *field.shape)).astype(field.dtype)
            for field in setup.transition.fields
        }
        self.columns["action"][...] = self.rng.integers(2, size=self.columns["action"].shape)
        self.sent = 0

    def step(self) -> None:
        """What a host's loop does."""
        self.group.check()
        if self.group.wants_data:
            self.group.insert(self.columns, ROWS, 0.4)
            self.sent += ROWS
        time.sleep(0.005)

    def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, f"not met in time: {self.group.pids}, {self.group.progress}"
            self.step()

    @property
    def version(self) -> int:
        return self.group.server.version

    def newest(self) -> Average:
        found = self.group.server.newest()
        assert found is not None
        return found

    def until_members(self, *members: bool) -> None:
        """Until an average is one of these Learners, and 20 more were made."""
        self.until(lambda: tuple(self.newest().members) == members)
        version = self.version
        self.until(lambda: self.version >= version + 20)

    def longest_gap_s(self, condition: Callable[[], object]) -> float:
        """The longest time between two averages until `condition()`, and the first average after it."""
        longest, version, at, is_met = 0.0, self.version, time.monotonic(), False
        deadline = at + PATIENCE_S
        while not is_met or self.version == version:
            now = time.monotonic()
            assert now < deadline, "not met in time"
            if self.version > version:
                version, at = self.version, now
            longest, is_met = max(longest, now - at), is_met or bool(condition())
            self.step()
        return longest

    def close(self) -> None:
        self.group.kill()
        self.bridge.close()


@contextlib.contextmanager
def running(address: str, states: Path, **options: Any) -> Iterator[Run]:
    made = Run(address, states, **options)
    try:
        made.group.wait_until_ready()
        yield made
    finally:
        made.close()


def test_remote_learners_average_save_and_are_replaced(tmp_path: Path) -> None:
    with running("local", tmp_path / "states") as run:
        assert run.bridge.pid != os.getpid()
        run.until_members(True, True)
        assert run.newest().version == run.version

        # All that was sent is in the states.
        folder = run.group.save()
        states = [read_state(folder / str(rank)) for rank in range(2)]
        assert all(state is not None for state in states)
        assert sum(int(scalars["inserted"]) for _, scalars in states) == run.sent  # type: ignore[misc]
        rows = np.concatenate([arrays["storage/obs"] for arrays, _ in states])  # type: ignore[misc]
        assert {row.tobytes() for row in rows} <= {row.tobytes() for row in run.columns["obs"]}

        # Killed: the other goes on from the last average, and a replacement joins.
        run.until_members(True, True)
        pid = run.group.pids[1]
        assert pid not in (0, os.getpid())
        os.kill(pid, signal.SIGKILL)
        assert run.longest_gap_s(lambda: run.group.restarts) < GOES_ON_S
        assert run.group.lost_transitions > 0
        run.until_members(True, True)
        assert run.group.pids[1] not in (0, pid)

        run.group.stop()
        versions = [progress.version for progress in run.group.progress]
        assert max(versions) == run.version
        assert run.group.load_newest() is not None
    with pytest.raises(ClusterError, match="connection to Ray is lost"):
        run.bridge.check()


# --- clusters of several nodes --------------------------------------------------------------------------------------


class Nodes:
    """A head without room for Learners, and nodes with room for one each."""

    def __init__(self, count: int) -> None:
        from ray.cluster_utils import Cluster

        self.cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        self.nodes = [self.cluster.add_node(num_cpus=1) for _ in range(count)]

    def add(self) -> None:
        self.nodes.append(self.cluster.add_node(num_cpus=1))

    @property
    def address(self) -> str:
        return str(self.cluster.address)

    def of(self, pid: int) -> Any:
        """The node on which a worker runs."""
        return next(node for node in self.nodes if pid in self.tree(node))

    def raylet(self, node: Any) -> int:
        return int(node.all_processes["raylet"][0].process.pid)

    def tree(self, node: Any) -> list[int]:
        """The raylet of a node, and the processes that it started."""
        found, first = [], [self.raylet(node)]
        while first:
            found += first
            first = [child for parent in first for child in children(parent)]
        return found

    def signal(self, node: Any, number: int) -> None:
        for pid in self.tree(node):
            os.kill(pid, number)

    def kill(self, node: Any) -> None:
        self.cluster.remove_node(node, allow_graceful=False)


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], Nodes]]:
    monkeypatch.setenv("RAY_worker_niceness", "0")  # by default 15: other work would starve them
    monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "5")  # without the head, not a minute
    monkeypatch.setenv("RAY_health_check_period_ms", "1000")
    monkeypatch.setenv("RAY_health_check_timeout_ms", "3000")
    made: list[Nodes] = []

    def make(count: int) -> Nodes:
        made.append(Nodes(count))
        return made[-1]

    try:
        yield make
    finally:
        for one in made:
            one.cluster.shutdown()


@pytest.mark.slow
def test_a_learner_of_a_node_that_dies_goes_on_on_another(nodes: Callable[[int], Nodes], tmp_path: Path) -> None:
    cluster = nodes(3)
    with running(cluster.address, tmp_path / "states") as run:
        run.until_members(True, True)
        dead = cluster.of(run.group.pids[0])
        assert dead is not cluster.of(run.group.pids[1]), "they are spread over the nodes"
        cluster.kill(dead)
        assert run.longest_gap_s(lambda: run.group.restarts) < GOES_ON_S
        run.until_members(True, True)
        assert run.group.restarts == 1

        # Without the head there is no cluster: said once, and how to go on.
        cluster.kill(cluster.cluster.head_node)
        with pytest.raises((ClusterError, LearnerError), match=r"connection to Ray is lost|died 3 times"):
            run.until(lambda: False)


@pytest.mark.slow
@pytest.mark.parametrize("lasts", [False, True])
def test_nobody_waits_for_a_node_that_is_frozen(nodes: Callable[[int], Nodes], tmp_path: Path, lasts: bool) -> None:
    cluster = nodes(3)
    with running(cluster.address, tmp_path / "states") as run:
        run.until_members(True, True)
        frozen = cluster.of(run.group.pids[1])
        cluster.signal(frozen, signal.SIGSTOP)
        try:
            # In the end the cluster takes it for dead, and the Learner is replaced on the third node.
            until = time.monotonic() + 4.0
            gap_s = run.longest_gap_s(lambda: run.group.restarts if lasts else time.monotonic() > until)
            assert gap_s < GOES_ON_S
            assert run.group.restarts == lasts
        finally:
            cluster.signal(frozen, signal.SIGCONT)
        run.until_members(True, True)
        assert run.group.restarts == lasts, "one that wakes in time goes on"


@pytest.mark.slow
def test_a_cluster_that_shrinks_goes_on_and_takes_a_new_node(nodes: Callable[[int], Nodes], tmp_path: Path) -> None:
    cluster = nodes(1)
    bridge = RayBridge(cluster.address, Needs(learners=2))
    with pytest.raises(ClusterError, match="2 Learners need 2 CPUs in the Ray cluster, one each; found 1"):
        until(lambda: bridge.check())
    bridge.close()
    cluster.add()
    with running(cluster.address, tmp_path / "states") as run:
        run.until_members(True, True)
        cluster.kill(cluster.of(run.group.pids[1]))
        run.until(lambda: run.group.restarts)
        version = run.version
        run.until(lambda: run.version > version + 100)
        assert run.group.pids[1] == 0, "no node has room for it"
        cluster.add()
        run.until_members(True, True)  # the dead node may be offered once more before Ray knows


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "named"),
    [
        ("test_remote_learners", r"Parameter 0 must be 'q.0.weight' of shape \(16, 4\); found .* of shape \(8, 4\)"),
        ("module_of_the_host", r"does not have the module 'module_of_the_host' of the program: have the nodes share"),
    ],
)
def test_learners_that_nodes_cannot_make_are_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, named: str
) -> None:
    file = tmp_path / "module_of_the_host.py"
    file.write_text(
        "from test_remote_learners import make_trainer\n\n\ndef make_other_trainer(seed):\n"
        "    return make_trainer(seed)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    make = importlib.import_module(module).make_other_trainer
    shutil.rmtree(tmp_path)  # as if it were not on the nodes
    tmp_path.mkdir()
    made = Run("local", tmp_path / "states", make=make)
    try:
        with pytest.raises(LearnerError, match=rf"(?s)died 3 times.*{named}"):
            made.group.wait_until_ready()
    finally:
        made.close()


@pytest.mark.slow
def test_learners_that_are_killed_again_and_again_hang_nothing(nodes: Callable[[int], Nodes], tmp_path: Path) -> None:
    cluster, rng = nodes(2), random.Random(0)
    with running(cluster.address, tmp_path / "states", most_deaths=1000) as run:
        for _ in range(ROUNDS):
            run.until(lambda: run.newest().members.all())
            rank, pause = rng.randrange(2), time.monotonic() + rng.uniform(0.0, 0.3)
            run.until(lambda pause=pause: time.monotonic() > pause)
            restarts = run.group.restarts
            os.kill(run.group.pids[rank], signal.SIGKILL)
            if rng.random() < 0.5:  # while a state is asked for
                run.group.save()
            assert run.longest_gap_s(lambda restarts=restarts: run.group.restarts > restarts) < GOES_ON_S
        run.until_members(True, True)
        assert run.group.restarts == ROUNDS
        run.group.stop()


class Network:
    """A head in this network namespace, and two nodes in namespaces of their own, each on its cable to a switch."""

    SUBNET, PORT = "10.77.0", 6999

    def __init__(self) -> None:
        self._name = f"pearl{os.getpid() % 10000}"
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        self._ip(f"link add {self._name} type bridge")
        self._ip(f"addr add {self.SUBNET}.1/24 dev {self._name}")
        self._ip(f"link set {self._name} up")
        self._ray([], "--head", f"--port={self.PORT}", "--num-cpus=0", "--include-dashboard=false", node=1)
        until(self._head_answers)
        for node in (2, 3):
            space, cable = self._space(node), self._cable(node)
            self._ip(f"netns add {space}")
            self._ip(f"link add {cable} type veth peer name eth0 netns {space}")
            self._ip(f"link set {cable} master {self._name} up")
            self._ip(f"-n {space} addr add {self.SUBNET}.{node}/24 dev eth0")
            self._ip(f"-n {space} link set eth0 up")
            self._ip(f"-n {space} link set lo up")
            self._ray(["ip", "netns", "exec", space], f"--address={self.address}", "--num-cpus=1", node=node)
            # One after the other: their sockets are in one folder.
            until(lambda node=node: f"/{node - 1}.0 CPU".encode() in self._status())

    def end(self) -> None:
        for process in reversed(self._started):
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20.0)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for command in (*(f"netns del {self._space(node)}" for node in (2, 3)), f"link del {self._name}"):
            subprocess.run(["ip", *command.split()], check=False, capture_output=True)

    @property
    def address(self) -> str:
        return f"{self.SUBNET}.1:{self.PORT}"

    def set_cables(self, state: str, *nodes: int) -> None:
        for node in nodes:
            self._ip(f"link set {self._cable(node)} {state}")

    def _space(self, node: int) -> str:
        return f"{self._name}n{node}"

    def _cable(self, node: int) -> str:
        return f"{self._name}c{node}"

    def _ip(self, command: str) -> None:
        subprocess.run(["ip", *command.split()], check=True, capture_output=True)

    def _ray(self, prefix: list[str], *options: str, node: int) -> None:
        script = str(Path(sys.executable).with_name("ray"))
        command = [*prefix, script, "start", "--block", f"--node-ip-address={self.SUBNET}.{node}", *options]
        quiet = subprocess.DEVNULL
        self._started.append(subprocess.Popen(command, stdout=quiet, stderr=quiet, start_new_session=True))

    def _status(self) -> bytes:
        script = str(Path(sys.executable).with_name("ray"))
        return subprocess.run([script, "status", "--address", self.address], capture_output=True, check=False).stdout

    def _head_answers(self) -> bool:
        with contextlib.suppress(OSError):
            socket.create_connection((f"{self.SUBNET}.1", self.PORT), timeout=1.0).close()
            return True
        return False


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Iterator[Network]:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and ip")
    made = Network()
    try:
        made.start()
        yield made
    finally:
        made.end()


@pytest.mark.slow
def test_a_network_that_is_cut_for_ten_seconds_costs_only_the_steps_meanwhile(network: Network, tmp_path: Path) -> None:
    with running(network.address, tmp_path / "states") as run:
        run.until_members(True, True)
        for cut in ((2,), (2, 3)):
            network.set_cables("down", *cut)
            end = time.monotonic() + 10.0
            if len(cut) == 1:
                assert run.longest_gap_s(lambda end=end: time.monotonic() > end) < GOES_ON_S
            else:
                run.until(lambda end=end: time.monotonic() > end)
            network.set_cables("up", *cut)
            run.until_members(True, True)
        assert run.group.restarts == 0


# --- programs -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory, quick_profiles: None) -> Path:
    return make_program(
        tmp_path_factory.mktemp("programs"),
        trainer=DQN,
        settings={"hidden_sizes": (16,), "n_step": 1},
        training={"batch_size": 16, "replay_ratio": 2.0, "learning_starts": 100},
        learners={"count": 2, "average_every": 4},
    )


QUIET = ("--eval-episodes", "0", "--plain")


def newest_counters(run_dir: Path) -> dict[str, Any]:
    newest = max((run_dir / "checkpoints").glob("checkpoint-*"))
    found: dict[str, Any] = json.loads((newest / "manifest.json").read_text())["counters"]
    return found


@pytest.mark.slow
def test_a_program_trains_on_ray_saves_the_banks_and_goes_on_without(program: Path, tmp_path: Path) -> None:
    arguments = (*QUIET, "--run-dir", str(tmp_path))
    code, output = run(program, "--ray", "--timesteps", "3000", "--checkpoint-interval", "1500", *arguments)
    assert code == 0, output
    found = summary(tmp_path)
    assert (found["learners"]["replaced"], found["learners"]["lost_transitions"]) == (0, 0), output
    assert found["gradient_steps"] > 100
    assert found["replay_ratio"] == pytest.approx(2.0, rel=0.25)
    counters = newest_counters(tmp_path)
    rows = [counters[f"learner-{rank}/storage/inserted"] for rank in range(2)]
    assert sum(rows) == counters["stored"] == counters["env_steps"]
    code, output = run(program, "--resume", "--timesteps", "4000", *arguments)
    assert code == 0, output
    code, output = run(program, "--resume", "--ray", "--timesteps", "5000", *arguments)
    assert code == 0, output
    resumed = newest_counters(tmp_path)
    assert sum(resumed[f"learner-{rank}/storage/inserted"] for rank in range(2)) == resumed["env_steps"] >= 5000
    code, output = run(program, "--ray", "127.0.0.1:1", *arguments)
    assert code == 1
    assert "no Ray cluster answers there" in output


@pytest.mark.slow
def test_a_program_that_loses_its_cluster_saves_the_average_and_goes_on_elsewhere(
    nodes: Callable[[int], Nodes], program: Path, tmp_path: Path
) -> None:
    cluster = nodes(3)
    arguments = (*QUIET, "--run-dir", str(tmp_path))
    with programs.running(program, "--ray", cluster.address, "--timesteps", "5000000", *arguments) as started:
        started.until(lambda: has_trained(tmp_path), PATIENCE_S)
        cluster.kill(cluster.cluster.head_node)
        assert started.wait(PATIENCE_S) == 1, started.output
        assert "Traceback" not in started.output, started.output
        assert "--resume" in started.output
        assert "without Learner 0, 1: its transitions" in started.output
    counters = newest_counters(tmp_path)
    assert counters["gradient_steps"] > 0
    assert not any(name.startswith("learner-") for name in counters)
    code, output = run(program, "--resume", "--ray", cluster.address, *arguments)
    assert code == 1
    assert "no Ray cluster answers there" in output
    timesteps = str(counters["env_steps"] + 2000)
    code, output = run(program, "--resume", "--ray", "--timesteps", timesteps, *arguments)
    assert code == 0, output
    assert newest_counters(tmp_path)["gradient_steps"] > counters["gradient_steps"]
