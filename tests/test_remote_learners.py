"""Learners with their banks on the nodes of a Ray cluster, and what is left when one of these is lost."""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import programs
import pytest
from learner_runs import GOES_ON_S, PATIENCE_S, ROUND_S, ROUNDS, SEED, kill_rounds, make_trainer, running, until
from programs import children, make_program, run, summary
from slow_link import SlowLink
from test_learners_program import has_trained

from composer.cluster import measure_cluster
from pearl.algorithms import DQN
from pearl.errors import ClusterError, LearnerError
from pearl.local_sgd.parameters import TrainerParameters
from pearl.local_sgd.state_files import read_state
from pearl.remote.bridge import Needs
from pearl.remote.group import RayBridge

ray = pytest.importorskip("ray", reason="needs the extra ray")


STORE_BYTES = 200 << 20  # of a node


def make_large_trainer(seed: int) -> DQN:
    """Its parameters do not fit into a message of Ray, and travel through the object stores."""
    return make_trainer(seed, hidden_sizes=(256, 256))


def make_other_trainer(seed: int) -> DQN:
    """On a node, one with other networks than on the host."""
    return make_trainer(seed, hidden_sizes=(16,) if seed == 0 else (8, 8))


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

        node = {"num_cpus": 0, "object_store_memory": STORE_BYTES}
        self.cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
        self.nodes: list[Any] = []
        for _ in range(count):
            self.add()

    def add(self, **options: Any) -> None:
        self.nodes.append(self.cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES, **options))

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
    message = rf"(?s)died 3 times.*{named}"
    with pytest.raises(LearnerError, match=message), running("local", tmp_path / "states", make=make):
        pass


@pytest.mark.slow
@pytest.mark.parametrize(
    ("named", "change"),
    [
        ("NumPy", 'import numpy; numpy.__version__ = "0.1"'),
        ("Python", 'import platform; platform.python_version = lambda: "0.1"'),
        ("pearl-toolkit", 'import pearl; pearl.__version__ = "0.1"'),
        ("Ray", 'import ray; ray.__version__ = "0.1"'),
    ],
)
def test_a_node_with_another_version_is_named(
    nodes: Callable[[int], Nodes], tmp_path: Path, named: str, change: str
) -> None:
    (tmp_path / "sitecustomize.py").write_text(f"{change}\n")
    cluster = nodes(1)
    cluster.add(env_vars={"PYTHONPATH": str(tmp_path)})
    message = rf"Node .* has {named} 0\.1; the run needs .* same version on all nodes"
    with pytest.raises(ClusterError, match=message), running(cluster.address, tmp_path / "states"):
        pass


@pytest.mark.slow
def test_another_version_of_ray_than_the_clusters_is_named(
    nodes: Callable[[int], Nodes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = nodes(1).address
    (tmp_path / "sitecustomize.py").write_text('import ray\nray.__version__ = "0.1"\n')
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    message = r"(?s)There is no connection to Ray.*have different versions of Ray or Python.*Ray: 0\.1"
    with pytest.raises(ClusterError, match=message), running(address, tmp_path / "states"):
        pass


# An environment whose simulator one node does not have.
LICENSED = """
import os

from gymnasium.envs.classic_control import CartPoleEnv

if "WITHOUT_SIMULATOR" in os.environ:
    raise ModuleNotFoundError("No module named 'licensed_simulator'", name="licensed_simulator")


class Licensed(CartPoleEnv):
    pass
"""


@pytest.mark.slow
def test_an_environment_that_one_node_lacks_is_named(
    nodes: Callable[[int], Nodes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "licensed.py").write_text(LICENSED)
    monkeypatch.syspath_prepend(str(tmp_path))
    program = make_program(tmp_path, env=importlib.import_module("licensed").Licensed, actors=2)
    cluster = nodes(1)
    cluster.add(env_vars={"WITHOUT_SIMULATOR": "1"})
    shared = "--timesteps", "100000000", "--plain", "--eval-episodes", "0", "--run-dir", str(tmp_path / "run")
    code, output = run(program, "--ray", cluster.address, *shared)
    assert code != 0
    assert re.search(r"(?s)actor-\d died.* times.*No module named 'licensed_simulator'", output), output


@pytest.mark.slow
def test_messages_that_ray_loses_hang_nobody(
    nodes: Callable[[int], Nodes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray's own fault injection: of each process's calls of actors, requests and replies fail, five in all."""
    faults = {"num_failures": 5, "req_failure_prob": 5, "resp_failure_prob": 5}
    monkeypatch.setenv("RAY_testing_rpc_failure", json.dumps({"CoreWorkerService.grpc_client.PushTask": faults}))
    with running(nodes(2).address, tmp_path / "states", most_deaths=1000) as run:
        run.until(lambda: run.group.restarts >= 2)
        run.until_members(True, True)
        run.group.save()
        run.until_members(True, True)


# Fills the object store of its node, or of the first node with CPUs, and keeps it full.
HOG = """
import sys, time
import numpy as np
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy


def fill():
    held = []
    for size in (4 << 20, 1 << 17, 1 << 10):
        try:
            while True:
                held.append(ray.put(np.ones(size, np.uint8)))
        except ray.exceptions.OutOfDiskError:
            pass
    time.sleep(1000.0)


ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
if sys.argv[2] == "host":
    fill()
node = next(node["NodeID"] for node in ray.nodes() if node["Resources"].get("CPU"))
strategy = NodeAffinitySchedulingStrategy(node, soft=False)
ray.get(ray.remote(num_cpus=0, scheduling_strategy=strategy)(fill).remote())
"""


@pytest.mark.slow
@pytest.mark.parametrize("where", ["host", "node"])
def test_a_full_object_store_is_named_and_hangs_nobody(
    nodes: Callable[[int], Nodes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    where: str,
) -> None:
    monkeypatch.setenv("RAY_local_fs_capacity_threshold", "0.0001")  # as if the disk to spill to were full
    monkeypatch.setattr(sys.modules[__name__], "STORE_BYTES", 80 << 20)
    cluster = nodes(2)
    with running(cluster.address, tmp_path / "states", make=make_large_trainer, most_deaths=1000) as run:
        run.until_members(True, True)
        hog = subprocess.Popen([sys.executable, "-c", HOG, cluster.address, where])
        try:
            if where == "host":
                with pytest.raises(ClusterError, match=r"object store of this machine is full, .*OutOfDiskError"):
                    run.until(lambda: False)
                return
            assert run.longest_gap_s(lambda: run.group.restarts) < GOES_ON_S
        finally:
            hog.kill()
            hog.wait()
        assert "OutOfDiskError" in caplog.text
        run.until_members(True, True)


@pytest.mark.slow
@pytest.mark.timeout(PATIENCE_S + ROUNDS * ROUND_S)
def test_learners_that_are_killed_again_and_again_hang_nothing(nodes: Callable[[int], Nodes], tmp_path: Path) -> None:
    with running(nodes(2).address, tmp_path / "states", most_deaths=10_000) as run:
        assert ROUNDS <= kill_rounds(run, ROUNDS, SEED) == run.group.restarts


class Network:
    """A head in this network namespace, and two nodes in namespaces of their own, each on its cable to a switch.

    Cables have `latency_s` and carry `bytes_per_s` in each direction, where these are given.
    """

    SUBNET, PORT = "10.77.0", 6999

    def __init__(self, latency_s: float = 0.0, bytes_per_s: float = math.inf) -> None:
        self._name = f"pearl{os.getpid() % 10000}"
        self._slowness = latency_s, bytes_per_s
        self._links: list[SlowLink] = []
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
            if self._slowness == (0.0, math.inf):
                self._ip(f"link add {cable} type veth peer name eth0 netns {space}")
            else:
                self._links.append(SlowLink((cable, f"{cable}x"), *self._slowness))
                self._ip(f"link set {cable}x netns {space} name eth0")
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
        for link in self._links:
            link.close()
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
def network(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Network]:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    if os.geteuid() != 0 or shutil.which("ip") is None or not Path("/dev/net/tun").exists():
        pytest.skip("network namespaces need root, ip and /dev/net/tun")
    made = Network(*getattr(request, "param", ()))
    try:
        made.start()
        yield made
    finally:
        made.end()


@pytest.mark.slow
@pytest.mark.parametrize("network", [(0.002, 25e6)], ids=["2 ms, 25 MB/s"], indirect=True)
def test_learners_train_over_a_slow_network_which_is_measured(network: Network, tmp_path: Path) -> None:
    """Only what the cables cannot do is asserted: how much slower it is depends on the machine."""
    found = [node for node in measure_cluster(network.address) if not node.is_here]
    assert len(found) == 2
    for node in found:
        assert node.latency_us > 2_000
        assert 0 < node.bandwidth_gbps < 0.026
    with running(network.address, tmp_path / "states", make=make_large_trainer) as run:
        run.until_members(True, True)
        version, begin = run.version, time.monotonic()
        run.until(lambda: run.version >= version + 20)
        least_s = 2 * (4 * TrainerParameters(run.trainer).layout.count / 25e6 + 0.002)
        assert (time.monotonic() - begin) / (run.version - version) > 0.9 * least_s


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
