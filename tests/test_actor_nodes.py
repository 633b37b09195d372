"""Actors on the nodes of a cluster: the files, how they are shared out, programs, and raylets on this machine."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from programs import CONNECTION_HEADER, command_line, run, summary
from test_learners_program import composer_of

from composer import Composer
from composer.calibration import CalibrationStore
from composer.cluster import MeasuredNode, joined, measure_cluster
from composer.html_report.page import report_page
from composer.nodes import spread
from composer.platform import Node, Platform
from composer.problem import Problem
from composer.recompose import recompose
from composer.replay_composing import ReplayComposing
from pearl.algorithms import DQN, PPO
from pearl.devices.description import Connection, Device
from pearl.errors import ConfigurationError, DeviceFileError, MissingExtraError, PearlError, PlacementError
from pearl.spec import ActorSpec

HEADER = "name,kind,backend,cores,node"
HERE = "cpu0,cpu,cpu,2,"
OTHER = "cpu1,cpu,cpu,6,10.0.0.2"
LINK = "cpu0,cpu1,100,1"


def write_files(folder: Path, devices: tuple[str, ...], links: tuple[str, ...] = ()) -> tuple[Path, Path]:
    files = folder / "devices.csv", folder / "connections.csv"
    files[0].write_text("\n".join((HEADER, *devices)) + "\n")
    files[1].write_text("\n".join((CONNECTION_HEADER, *links)) + "\n")
    return files


@pytest.fixture(scope="module")
def problem(tmp_path_factory: pytest.TempPathFactory) -> Problem:
    composer = composer_of(DQN)
    composer.set_learners(1)
    composer.set_actors(4, "CartPole-v1", envs_per_actor=4)
    return ReplayComposing(
        composer, CalibrationStore(tmp_path_factory.mktemp("store") / "store.json")
    ).checked_problem()


def platform_of(host: int, *nodes: tuple[int, float]) -> Platform:
    """A host and nodes with so many cores, at a link of so many GB/s."""
    cpu = Device("cpu0", "cpu", "cpu", cores=host)
    others = [Device(f"cpu{i}", "cpu", "cpu", cores=cores, node=f"n{i}") for i, (cores, _) in enumerate(nodes, 1)]
    links = [Connection("cpu0", f"cpu{i}", 50.0, gbps) for i, (_, gbps) in enumerate(nodes, 1)]
    return Platform((cpu,), (), tuple(Node(device, link) for device, link in zip(others, links, strict=True)))


# --- files ----------------------------------------------------------------------------------------------------------


def test_rows_with_a_node_are_apart_from_the_machine(tmp_path: Path) -> None:
    links = (LINK, "cpu0,cpu0,0.1,20", "cpu2,cpu1,5,5", "cpu1,cpu1,0.1,20")
    files = write_files(tmp_path, (HERE, OTHER, "cpu2,cpu,cpu,,b"), links)
    platform = Platform.from_files(*files)
    assert [device.name for device in platform.devices] == ["cpu0"]
    assert [link.target for link in platform.connections] == ["cpu0"]
    first, second = platform.nodes
    assert (first.device.node, first.device.cores) == ("10.0.0.2", 6)
    assert first.link == Connection("cpu0", "cpu1", 100.0, 1.0)
    assert second.link is None
    assert platform.unused_connections == (Connection("cpu2", "cpu1", 5.0, 5.0),)


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ("gpu0,gpu,cuda,,b", "column 'node': expected nothing, as Actors cannot run on a gpu"),
        ("cpu2,cpu,cpu,2,two words", "column 'node': expected a name or an address"),
        ("cpu2,cpu,cpu,2,10.0.0.2", "one row for each node"),
    ],
)
def test_faults_of_the_column(tmp_path: Path, row: str, named: str) -> None:
    with pytest.raises(DeviceFileError, match=named):
        Platform.from_files(*write_files(tmp_path, (HERE, OTHER, row)))


@pytest.mark.parametrize("nodes", [(("a", 1),), (("a", 1), ("a", 1)), (("a", 0), ("b", 2)), (("a", True), ("", 1))])
def test_nodes_of_actors_have_all_of_them(nodes: Any) -> None:
    with pytest.raises(ConfigurationError, match="each name once, with 2 actors in all"):
        ActorSpec("CartPole-v1", count=2, nodes=nodes)


def test_each_actor_has_its_node() -> None:
    spec = ActorSpec("CartPole-v1", count=3, nodes=(("", 1), ("a", 2)))
    assert [spec.node_of(index) for index in range(3)] == ["", "a", "a"]
    assert (spec.here, ActorSpec("CartPole-v1", count=3).here) == (1, 3)
    assert ActorSpec("CartPole-v1", count=3).node_of(0) is None


# --- sharing out ----------------------------------------------------------------------------------------------------


@given(st.integers(1, 64), st.integers(1, 64), st.lists(st.integers(1, 64), min_size=1, max_size=5))
def test_actors_are_in_proportion_to_free_cores(problem: Problem, count: int, host: int, cores: list[int]) -> None:
    problem = dataclasses.replace(problem, actors=dataclasses.replace(problem.actors, count=count))
    platform = platform_of(host, *((n, 1e6) for n in cores))
    if count > host + sum(cores):
        with pytest.raises(ConfigurationError, match=rf"{count} Actors need a core each.*room for {host + sum(cores)}"):
            spread(problem, platform, 100.0)
        return
    found = spread(problem, platform, 100.0)
    assert sum(place.actors for place in found) == count
    assert all(place.actors <= place.cores for place in found)
    free = [host - 1, *cores]
    if count <= sum(free):
        for place, weight in zip(found, free, strict=True):
            # D'Hondt: nobody would have fewer for its cores by one Actor more than another has.
            assert place.actors <= weight
            others = [(p.actors + 1) / w for p, w in zip(found, free, strict=True) if w]
            assert not place.actors or place.actors / weight <= min(others) + 1e-9


def test_a_connection_carries_only_so_many(problem: Problem) -> None:
    each = problem.transition.nbytes / 100e-6 / 1e9  # GB/s of an Actor that takes 100 us for a transition
    here, near, far = spread(problem, platform_of(2, (8, 100 * each), (8, 1.5 * each)), 100.0)
    assert (here.actors, near.actors, far.actors) == (0, 3, 1)
    assert (near.carries, far.carries) == (None, 1)
    assert "which carry 1" in far.why
    with pytest.raises(ConfigurationError, match=r"room for 2 \(this machine: 1, n1: 1\)"):
        spread(problem, platform_of(1, (8, 1.5 * each)), 100.0)


def test_what_is_not_known_of_a_node_is_named(problem: Problem) -> None:
    platform = platform_of(2, (8, 1.0))
    (node,) = platform.nodes
    with pytest.raises(
        PlacementError, match=r"connection between cpu0 and cpu1, on node n1, is not known.*set_cluster"
    ):
        spread(problem, dataclasses.replace(platform, nodes=(Node(node.device),)), 100.0)
    nameless = dataclasses.replace(node, device=dataclasses.replace(node.device, cores=None))
    with pytest.raises(PlacementError, match="states no cores"):
        spread(problem, dataclasses.replace(platform, nodes=(nameless,)), 100.0)


# --- a cluster that was measured ------------------------------------------------------------------------------------

FOUND = [
    MeasuredNode(("10.0.0.1", "head"), 4, is_here=True),
    MeasuredNode(("b", "10.0.0.2", "box"), 8, False, 120.0, 1.1),
    MeasuredNode(("c", "10.0.0.2", "box"), 16, False, 90.0, 2.2),
]


def test_nodes_that_were_measured_join_those_of_the_files() -> None:
    alone = Platform((Device("cpu0", "cpu", "cpu", cores=4),))
    both = joined(alone, FOUND, None)
    assert [(n.device.node, n.device.cores) for n in both.nodes] == [("b", 8), ("c", 16)]
    assert both.nodes[0].link == Connection("cpu0", "cpu:b", 120.0, 1.1)
    assert [n.device.node for n in joined(alone, FOUND, ["c"]).nodes] == ["c"]
    assert joined(alone, FOUND, []).nodes == ()
    stated = dataclasses.replace(alone, nodes=(Node(Device("mine", "cpu", "cpu", cores=6, node="b")),))
    (node,) = joined(stated, FOUND, []).nodes
    assert (node.device.cores, node.link) == (6, Connection("cpu0", "mine", 120.0, 1.1))


@pytest.mark.parametrize(
    ("cores", "node", "nodes", "named"),
    [
        (6, "d", None, "no node 'd'; it has 10.0.0.1, b, c"),
        (6, "b", ["bb"], "no node 'bb'; it has 10.0.0.1, b, c. Did you mean 'b'"),
        (6, "head", None, "Node 'head' is this machine"),
        (9, "b", None, "has 8 CPUs; the device CSV states 9 cores of mine"),
    ],
)
def test_a_cluster_without_what_was_stated(cores: int, node: str, nodes: list[str] | None, named: str) -> None:
    device = Device("mine", "cpu", "cpu", cores=cores, node=node)
    platform = Platform((Device("cpu0", "cpu", "cpu", cores=4),), nodes=(Node(device),))
    with pytest.raises(ConfigurationError, match=re.escape(named)):
        joined(platform, FOUND, nodes)


def test_bad_clusters_are_refused_at_once() -> None:
    composer = composer_of()
    with pytest.raises(ConfigurationError, match="takes an address"):
        composer.set_cluster("")
    with pytest.raises(ConfigurationError, match="must be a list of names; found 'b'"):
        composer.set_cluster("auto", "b")


# --- programs -------------------------------------------------------------------------------------------------------


def composed(files: tuple[Path, Path], count: int = 4, cluster: str = "") -> Any:
    composer = composer_of(DQN)
    composer.set_learners(1)
    composer.set_device_file(files[0])
    composer.set_connection_file(files[1])
    composer.set_actors(count, "CartPole-v1", envs_per_actor=4)
    composer.set_train_function(DQN, hidden_sizes=(16,))
    composer.set_training(batch_size=16, replay_ratio=2.0, learning_starts=100)
    if cluster:
        composer.set_cluster(cluster)
    composer.run()
    return composer


def test_a_program_carries_the_nodes_and_runs_without_them(tmp_path: Path, quick_profiles: None) -> None:
    composer = composed(write_files(tmp_path, (HERE, OTHER), (LINK,)))
    placement = composer.placement
    assert [(place.node, place.actors) for place in placement.nodes] == [("", 0), ("10.0.0.2", 4)]
    assert "cpu1, node 10.0.0.2" in str(placement)
    assert type(placement).from_json(placement.to_json()) == placement
    saved = composer.save(tmp_path / "saved")
    again = Platform.from_files(saved / "devices.csv", saved / "connections.csv")
    assert again.nodes == Platform.from_files(tmp_path / "devices.csv", tmp_path / "connections.csv").nodes
    (tmp_path / "alone").mkdir()
    alone = composed(write_files(tmp_path / "alone", (HERE,)))
    assert alone.placement.nodes == ()
    assert "nodes=" not in alone.runtime_gen(path=tmp_path / "alone.py", timesteps=1100).read_text()
    program = composer.runtime_gen(path=tmp_path / "program.py", timesteps=1100)
    assert 'nodes=(("10.0.0.2", 4),),  # with --ray' in program.read_text()
    composer.set_actors("auto", "CartPole-v1")
    with pytest.raises(ConfigurationError, match='num_actors cannot be "auto" with Actors on other nodes'):
        composer.run()


def test_actors_of_rollouts_are_put_on_nodes_too(tmp_path: Path, quick_profiles: None) -> None:
    composer = Composer(progress=False)
    files = write_files(tmp_path, (HERE, OTHER), (LINK,))
    composer.set_device_file(files[0])
    composer.set_connection_file(files[1])
    composer.set_actors(4, "CartPole-v1", envs_per_actor=2)
    composer.set_train_function(PPO, hidden_sizes=(16,))
    composer.set_rollout(horizon=32)
    program = composer.runtime_gen(*composer.run(), tmp_path / "program.py", timesteps=512)
    placement = composer.placement
    assert [(place.node, place.actors) for place in placement.nodes] == [("", 1), ("10.0.0.2", 3)]
    assert "With --ray, 3 x 2 environments on 10.0.0.2" in str(placement)
    assert type(placement).from_json(placement.to_json()) == placement
    text = program.read_text()
    assert 'nodes=(("", 1), ("10.0.0.2", 3)),  # with --ray' in text
    assert "with --ray: 3 on 10.0.0.2" in text
    assert "all Actors on this machine" in text
    assert recompose(program, progress=False).program.read_text().count("10.0.0.2") == text.count("10.0.0.2")
    code, output = run(program, "--eval-episodes", "0", "--plain", "--run-dir", str(tmp_path / "run"))
    assert code == 0, output
    page = report_page(tmp_path / "run")
    assert "On 10.0.0.2" in page
    assert "3 Actors" in page
    composer.set_actors(40, "CartPole-v1", envs_per_actor=2)
    with pytest.raises(ConfigurationError, match="40 Actors need a core each"):
        composer.run()


def test_without_ray_a_cluster_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtraError, match=r"set_cluster.*pearl-toolkit\[ray\]"):
        measure_cluster("auto")


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    pytest.importorskip("ray", reason="needs the extra ray")
    monkeypatch.setenv("RAY_worker_niceness", "0")  # by default 15: workers starve next to other tests
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    try:
        yield made
    finally:
        made.shutdown()


def node_of(pid: int) -> str:
    """The name of the node whose raylet has started a worker."""
    status = Path(f"/proc/{pid}/status").read_text()
    parent = re.search(r"^PPid:\s+(\d+)", status, re.MULTILINE)
    assert parent
    named = re.search(rb"--node-name=([^\0]*)", command_line(int(parent[1])))
    assert named, command_line(int(parent[1]))
    return named[1].decode()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_raylets_are_measured_and_get_the_actors(tmp_path: Path, quick_profiles: None, cluster: Any) -> None:
    from test_remote_actors import Run  # needs Ray

    for name, cpus in (("b", 2), ("c", 1)):
        cluster.add_node(num_cpus=cpus, node_name=name)
    here, b, c = sorted(measure_cluster(cluster.address), key=lambda node: not node.is_here)
    assert (here.is_here, b.name, b.cores, c.name, c.cores) == (True, "b", 2, "c", 1)
    for node in (b, c):
        assert 20 < node.latency_us < 1e6
        assert 0.005 < node.bandwidth_gbps < 1000
        assert 0.1 < node.speed < 10  # the same machine, if a busy one

    made = Run(cluster.address, 3, nodes=(("c", 1), ("b", 2)))
    try:
        for actor in range(3):
            assert made.message(actor)[1] > 0
        assert [node_of(pid) for pid in made.group.pids] == ["c", "b", "b"]
    finally:
        made.group.stop(20.0)

    composer = composed(write_files(tmp_path, (HERE,)), count=4, cluster=cluster.address)
    places = {place.node: place.actors for place in composer.placement.nodes}
    assert places == {"": 1, "b": 2, "c": 1}  # the Learner has the other core of this machine
    program = composer.runtime_gen(path=tmp_path / "program.py", timesteps=2000)
    arguments = ("--eval-episodes", "0", "--plain", "--run-dir", str(tmp_path / "run"))
    code, output = run(program, "--ray", cluster.address, *arguments)
    assert code == 0, output
    assert summary(tmp_path / "run")["env_steps"] >= 2000

    code, output = run(program, "--ray", *arguments)
    assert code != 0
    assert "2 Actors for node 'b'. The Ray cluster has no node 'b'; it has" in output
    changed = program.read_text().replace('("b", 2), ("c", 1)', '("b", 1), ("c", 2)')
    program.write_text(changed)
    code, output = run(program, "--ray", cluster.address, *arguments)
    assert code != 0
    assert "2 Actors for node 'c', which has 1 CPUs in the Ray cluster" in output
    program.write_text(changed.replace('"c"', '"d"'))
    code, output = run(program, "--ray", cluster.address, *arguments)
    assert code != 0
    assert "2 Actors for node 'd'. The Ray cluster has no node 'd'; it has" in output
    with pytest.raises(PearlError, match="no Ray cluster answers there"):
        measure_cluster("127.0.0.1:1")
