"""Learners on the nodes of a cluster: the model against cases computed by hand, compositions, programs on raylets."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import programs
import pytest
from programs import children, run, summary
from test_actor_nodes import CONNECTION_HEADER, FOUND, node_of
from test_learners_program import composer_of, gradient_steps, has_trained, learner_pids

import composer.cluster
import composer.replay_composing
from composer import Composer
from composer.calibration import CalibrationStore
from composer.composition import Composition
from composer.contention import CoreSharing
from composer.html_report.composition_view import view
from composer.html_report.platform_diagram import platform_diagram
from composer.learner_nodes import LearnersModel, layouts
from composer.matrix import AssignmentMatrix, LearnerCell, MatrixRow, PairCell, ReplayCell, StorageCell
from composer.measurement import Measurement
from composer.nodes import NodeShare, spread
from composer.platform import Node, Platform
from composer.problem import Problem
from composer.profiling.profiler import Profiler
from composer.profiling.side_by_side import SideBySide
from composer.recompose import recompose
from composer.replay_composing import ReplayComposing
from composer.spec_file import load_spec
from pearl.algorithms import DQN
from pearl.devices.description import Connection, Device
from pearl.errors import ConfigurationError, DeviceFileError
from pearl.remote.bridge import Needs
from pearl.remote.placing import check_nodes
from pearl.spec import LearnersSpec

FREE = Measurement.modelled(0.0)
PARAMETERS = 2 * (4 * 16 + 16 + 16 * 2 + 2)  # of DQN with 16 hidden units on CartPole, and its target
MOVED_US = 4 * PARAMETERS / 1e3  # at 1 GB/s


class Known(Profiler):
    """Known times in place of measurements: a step takes `fixed` and `each` microseconds for every row."""

    fixed, each, average, contention = 20.0, 2.0, 10.0, 1.0

    def matrix(self) -> AssignmentMatrix:
        replay, learner = ReplayCell(FREE, FREE, FREE, 16), LearnerCell(self._step, implementation="native")
        pair, storage = PairCell(replay, learner), StorageCell(FREE, FREE)
        return AssignmentMatrix((MatrixRow(self.platform.host.name, replay, learner, pair, storage=storage),))

    @property
    def _step(self) -> Measurement:
        return Measurement.modelled(self.fixed + self.each * self.problem.train.batch_size)

    def side_by_side(self, matrix: AssignmentMatrix) -> SideBySide | None:
        if (count := self.problem.learners.count) == 1:
            return None
        step = self._step.value_us
        at_once = min(count, self.platform.host.cores or 1)
        return SideBySide(step, np.full(9, step * self.contention), self.average, at_once)

    @property
    def transition_us(self) -> float:  # type: ignore[override]
        return 1.0


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> type[Known]:
    kind = type("KnownHere", (Known,), {})
    monkeypatch.setattr(composer.replay_composing, "Profiler", kind)
    return kind


def write_files(folder: Path, host: int, *nodes: tuple[str, int, float, float], speed: str = "") -> tuple[Path, Path]:
    """A host, and nodes with name, cores, latency and bandwidth."""
    files = folder / "devices.csv", folder / "connections.csv"
    rows = [f"cpu{i},cpu,cpu,{cores},{name},{speed}" for i, (name, cores, *_) in enumerate(nodes, 1)]
    links = [f"cpu0,cpu{i},{latency_us},{gbps}" for i, (*_, latency_us, gbps) in enumerate(nodes, 1)]
    files[0].write_text("\n".join(("name,kind,backend,cores,node,speed", f"cpu0,cpu,cpu,{host},,", *rows)) + "\n")
    files[1].write_text("\n".join((CONNECTION_HEADER, *links)) + "\n")
    return files


def described(files: tuple[Path, Path] | None, actors: int = 2, batch: int = 16, **learners: Any) -> Composer:
    made = composer_of(DQN)
    if files is not None:
        made.set_device_file(files[0])
        made.set_connection_file(files[1])
    made.set_actors(actors, "CartPole-v1", envs_per_actor=4)
    made.set_train_function(DQN, hidden_sizes=(16,))
    made.set_training(batch_size=batch, replay_ratio=2.0, learning_starts=100)
    made.set_learners(**learners)
    return made


# --- the model ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def problem(tmp_path_factory: pytest.TempPathFactory) -> Problem:
    store = CalibrationStore(tmp_path_factory.mktemp("store") / "store.json")
    return ReplayComposing(described(None, count=4, average_every=8), store).checked_problem()


def model_of(problem: Problem, contention: float = 1.0) -> LearnersModel:
    """Steps of 100 us, an average of 10 us for two Learners, 1,000 numbers in it and 100 in a policy."""
    learner = LearnerCell(Measurement.modelled(100.0))
    measured = SideBySide(100.0, np.full(9, 100.0 * contention), 10.0, at_once=2)
    pair = PairCell(ReplayCell(FREE, FREE, FREE, 16), learner)
    return LearnersModel(problem, measured, pair, CoreSharing(2, 0, 1.0), 1.0, parameters=1000, weights=100)


HERE = NodeShare("", "cpu0", 2, 0, learners=2)
NEAR = NodeShare("b", "cpu1", 4, 1, 10.0, 1.0, learners=1)
FAR = NodeShare("c", "cpu2", 4, 1, 30.0, 0.5, learners=1)


def test_an_average_crosses_each_connection_and_waits_for_the_slowest_node(problem: Problem) -> None:
    model = model_of(problem)
    assert model.network_us([dataclasses.replace(HERE, learners=4)]) == 0.0
    # 4,000 bytes at 1 GB/s and at half of that, there and back, and the longer latency twice.
    assert model.network_us([HERE, NEAR, FAR]) == pytest.approx(2 * (4.0 + 8.0 + 30.0))
    assert model.average_us([HERE, NEAR, FAR]) == pytest.approx(10.0 * 4 / 2 + 84.0)
    assert model.network_us([HERE, dataclasses.replace(NEAR, learners=2)]) == pytest.approx(2 * (2 * 4.0 + 10.0))


def test_the_slowest_core_and_shared_caches_stretch_the_steps(problem: Problem) -> None:
    shares = [HERE, NEAR, dataclasses.replace(FAR, speed=0.5)]
    # Two here slow each other down; one alone on a node does not; half as fast a core takes twice as long.
    assert model_of(problem, contention=1.5).scales(shares) == pytest.approx([1.5, 1.5, 1.0, 2.0])
    spec = LearnersSpec(4, 8, nodes=(("", 2), ("b", 1), ("c", 1)))
    found = model_of(problem, contention=1.5).arguments(spec, shares)
    assert (found["core_speed"], found["sharing"]) == (0.5, None)
    assert found["stretch"] == pytest.approx(1.0), "all wait for the slow core, whose step is not stretched"
    assert found["average_us"] == pytest.approx(104.0)
    alike = model_of(problem, contention=1.5).arguments(spec, [HERE, NEAR, FAR])
    assert (alike["core_speed"], alike["stretch"]) == (1.0, pytest.approx(1.5))
    # Actors that share the host's two cores with its two Learners: 4 of 1 us each, in half of an iteration's rows.
    busy = dataclasses.replace(HERE, actors=2)
    collect_us = 1.0 / 4 * 16 / 2
    expected = (2 * 100.0 + 2 * collect_us) / 2 / 100.0
    assert model_of(problem).scales([busy, NEAR, FAR])[:2] == pytest.approx([expected] * 2)


def test_a_connection_carries_banks_averages_and_what_actors_send(problem: Problem) -> None:
    model, spec = model_of(problem), LearnersSpec(4, 8)
    row = problem.transition.nbytes
    shares = [HERE, dataclasses.replace(NEAR, bandwidth_gbps=1e-3, actors=2), dataclasses.replace(FAR, learners=0)]
    to_bank, averaged, policy = 1 / 4 * 16 / 2 * row, 4000 / 8, 400 / 8
    from_actors = 2 / 2 * 16 / 2 * row
    assert model.pace_us(spec, shares) == pytest.approx(max(to_bank + averaged + policy, from_actors + averaged))
    free = dataclasses.replace(problem, train=dataclasses.replace(problem.train, replay_ratio=np.inf))
    assert model_of(free).pace_us(spec, shares) == pytest.approx(averaged + policy)
    goals = dataclasses.replace(problem, train=dataclasses.replace(problem.train, hindsight_goals=4))
    assert model_of(goals).pace_us(spec, shares) == pytest.approx(5 * from_actors + averaged), "five for each step"


def test_layouts_fill_what_is_near_first() -> None:
    host = Device("cpu0", "cpu", "cpu", cores=2)
    nodes = tuple(
        Node(Device(f"cpu-{name}", "cpu", "cpu", cores=cores, node=name), Connection("cpu0", f"cpu-{name}", us, 1.0))
        for name, cores, us in (("far", 4, 50.0), ("near", 2, 5.0))
    )
    platform = Platform((host,), (), nodes)
    assert layouts(2, 1, platform)[0] == (("", 2),)
    assert (("near", 2),) in layouts(2, 1, platform)
    found = layouts(4, 1, platform)
    assert found[0] == (("", 2), ("near", 2))
    assert (("far", 4),) in found
    assert all(sum(count for _, count in layout) == 4 for layout in found)
    assert layouts(2, 2, platform)[0] == (("", 1), ("near", 1)), "on two cores each"
    with pytest.raises(ConfigurationError, match=r"5 Learners of 2 .* room for 4 \(this machine: 1, near: 1, far: 2\)"):
        layouts(5, 2, platform)


def test_actors_go_where_learners_leave_cores(problem: Problem, tmp_path: Path) -> None:
    platform = Platform.from_files(*write_files(tmp_path, 2, ("b", 4, 10.0, 10.0), ("c", 2, 10.0, 10.0)))
    problem = dataclasses.replace(problem, actors=dataclasses.replace(problem.actors, count=4))
    learners = LearnersSpec(4, nodes=(("", 2), ("b", 2)))
    assert [(share.learners, share.actors) for share in spread(problem, platform, 100.0, learners=learners)] == [
        (2, 0),
        (2, 2),
        (0, 2),
    ]
    fewer = Platform.from_files(*write_files(tmp_path, 2, ("b", 4, 10.0, 10.0), ("c", 1, 10.0, 10.0)))
    # Here they share cores with Learners; on nodes they do not.
    assert [share.actors for share in spread(problem, fewer, 100.0, learners=learners)] == [1, 2, 1]
    for speed, expected in (("1", [1, 3]), ("0.25", [3, 1])):  # 3 cores here against 6, or 6 / 4
        other = Platform.from_files(*write_files(tmp_path, 4, ("b", 6, 10.0, 10.0), speed=speed))
        assert [share.actors for share in spread(problem, other, 100.0)] == expected
    other = Platform.from_files(*write_files(tmp_path, 2, ("b", 6, 10.0, 10.0), speed="0.25"))
    assert [share.actors for share in spread(problem, other, 100.0)] == [1, 3], "a slow core is better than none"
    with pytest.raises(ConfigurationError, match=r"5 Learners of 1 thread\(s\) need a core for each.*node b has 4"):
        spread(problem, platform, 100.0, learners=LearnersSpec(5, nodes=(("b", 5),)))
    with pytest.raises(ConfigurationError, match=r"on node 'd' .*does not have; found b, c"):
        spread(problem, platform, 100.0, learners=LearnersSpec(2, nodes=(("d", 2),)))


# --- compositions ---------------------------------------------------------------------------------------------------


def test_the_placement_has_the_learners_of_each_node_and_the_program_runs_without_them(
    tmp_path: Path, known: type[Known]
) -> None:
    files = write_files(tmp_path, 2, ("b", 4, 100.0, 1.0), ("c", 1, 200.0, 1.0))
    made = described(files, actors=3, count=4, average_every=8)
    made.run()
    placement = made.placement
    assert [(share.node, share.learners, share.actors) for share in placement.nodes] == [
        ("", 2, 0),
        ("b", 2, 2),
        ("c", 0, 1),
    ]
    # Batches of 4 rows; two Learners' parameters to b and back; the average of two Learners takes 10 us here.
    average_us = 10.0 * 4 / 2 + 2 * (2 * MOVED_US + 100.0)
    assert placement.terms.average_us == pytest.approx(average_us / 8)
    assert placement.t_itr_us == pytest.approx(20.0 + 2.0 * 4 + average_us / 8, abs=0.5), "and transfers in memory"
    choice = placement.learners_choice
    assert choice.chosen.network_us == pytest.approx(2 * (2 * MOVED_US + 100.0) / 8)
    assert {other.where for other in choice.elsewhere} >= {"4 on b", "1 here, 3 on b"}
    shown = " ".join(str(placement).split())
    for words in ("| Learner 2, 3 | cpu1, node b |", "| 2 here, 2 on b |", "4 cores, 2 for Learners, 100 us"):
        assert words in shown
    assert "4 on b" in str(placement.explain())
    assert type(placement).from_json(placement.to_json()) == placement
    shown = view(Composition.of(made.platform, made.matrix, placement))
    assert shown.roles("cpu1") == ("2 with bank: Learner 2, 3", "2 Actors")
    assert dict(shown.facts)["On b"].startswith("Learner 2, 3, each with a bank; 2 Actors; 4 cores, 2 for Learners")
    assert "node b: 100 µs, 1 GB/s" in platform_diagram(made.platform, shown)

    program = made.runtime_gen(path=tmp_path / "program.py", timesteps=800)
    text = program.read_text()
    assert 'nodes=(("", 2), ("b", 2)),  # with --ray' in text
    assert 'nodes=(("b", 2), ("c", 1)),  # with --ray' in text
    assert "with --ray: Learner 2, 3 on b" in text
    code, output = run(program, "--eval-episodes", "0", "--plain", "--run-dir", str(tmp_path / "run"))
    assert code == 0, output
    assert len(summary(tmp_path / "run")["learners"]["gradient_steps"]) == 4


def test_ranks_follow_the_order_of_the_nodes(tmp_path: Path, known: type[Known]) -> None:
    files = write_files(tmp_path, 1, ("b", 2, 50.0, 1.0), ("c", 2, 5.0, 1.0))
    for nodes, ranks in (({"c": 1, "": 1, "b": 2}, ["0", "1, 2", "3"]), (None, ["0", "1", "2, 3"])):
        made = described(files, actors=1, count=4, average_every=8, nodes=nodes)
        made.run()
        assert [made.placement.ranks_on(node) for node in ("", "b", "c")] == ranks
        counts = [len(found.split(", ")) for found in ranks]
        assert made._composed is not None
        assert made._composed.problem.learners.nodes == tuple(zip(("", "b", "c"), counts, strict=True))


@pytest.mark.parametrize(
    ("latency_us", "gbps", "chosen"),
    [
        (5.0, 10.0, (4, 4, (("", 2), ("b", 2)))),  # 180 us + 30 / H
        (1000.0, 10.0, (4, 32, (("", 2), ("b", 2)))),  # 180 us + 2,020 / H: as few averages as possible
        (1000.0, 0.001, (2, 1, (("", 2),))),  # 180 us + 5,668 / 32 are more than 340 us + 10 / H of two here
    ],
    ids=["fast", "late", "slow"],
)
def test_the_network_decides_where_learners_are_and_how_often_they_average(
    tmp_path: Path, known: type[Known], latency_us: float, gbps: float, chosen: tuple[int, int, Any]
) -> None:
    known.each = 10.0
    files = write_files(tmp_path, 2, ("b", 4, latency_us, gbps))
    made = described(files, batch=64, count="auto", average_every="auto")
    made.run(timesteps=10_000_000, budget_s=0)
    placement, choice = made.placement, made.placement.learners_choice
    assert (choice.count, choice.average_every, choice.nodes) == chosen
    assert (placement.learner_count, placement.average_every) == chosen[:2]
    assert {share.node: share.learners for share in placement.nodes} == {"b": 0, **dict(chosen[2])}
    assert placement.eps == pytest.approx(choice.chosen.eps)
    assert "more than 4 Learner(s): cpu0 and its nodes have 6 core(s)" in choice.left_out
    assert choice.reason.startswith(f"{choice.count} Learners train")
    assert f"times as many experiences as one, {choice.chosen.where}; H = {choice.average_every}" in choice.reason


def test_slower_and_faster_nodes_are_predicted_by_their_cores(tmp_path: Path, known: type[Known]) -> None:
    average_us = 10.0 * 2 / 2 + 2 * (MOVED_US + 100.0)
    for speed, step_us in (("0.5", 72.0), ("1", 36.0)):
        files = write_files(tmp_path, 2, ("b", 4, 100.0, 1.0), speed=speed)
        made = described(files, count=2, average_every=8, nodes={"": 1, "b": 1})
        made.run()
        assert made.placement.terms.average_us == pytest.approx(average_us / 8)
        assert made.placement.t_itr_us == pytest.approx(step_us + average_us / 8, abs=0.5), speed
    made = described(
        write_files(tmp_path, 2, ("b", 4, 100.0, 1.0), speed="2"), count=2, average_every=8, nodes={"b": 2}
    )
    made.run()
    assert made.placement.t_itr_us == pytest.approx(18.0 + (10.0 + 2 * (2 * MOVED_US + 100.0)) / 8, abs=0.5)


def test_what_learners_on_nodes_cannot_be_is_named(tmp_path: Path, known: type[Known]) -> None:
    files = write_files(tmp_path, 1, ("b", 1, 10.0, 1.0))
    with pytest.raises(ConfigurationError, match=r"4 Learners of 1 .* found room for 2 \(this machine: 1, b: 1\)"):
        described(files, count=4).run()
    with pytest.raises(ConfigurationError, match=r"2 Learners .* node b has 1\. Put fewer there"):
        described(files, count=2, nodes={"b": 2}).run()
    with pytest.raises(ConfigurationError, match=r"on node 'c' .*found b\."):
        described(files, count=2, nodes={"": 1, "c": 1}).run()
    with pytest.raises(ConfigurationError, match=r"2 Actors need a core each.*room for 1 \(this machine: 1, b: 0\)"):
        described(files, count=2, nodes={"": 1, "b": 1}).run()
    with pytest.raises(ConfigurationError, match=r"on nodes \(b\), and no cluster is known. Call set_cluster"):
        described(write_files(tmp_path, 2), count=2, nodes={"": 1, "b": 1}).run()
    with pytest.raises(ConfigurationError, match="each name once, with 2 Learners in all"):
        described(None, count=2, nodes={"b": 1})
    with pytest.raises(ConfigurationError, match="how many of a stated count"):
        described(None, count="auto", nodes={"b": 1})
    with pytest.raises(ConfigurationError, match="One Learner stays with its replay"):
        described(None, count=1, nodes={"b": 1})
    files[0].write_text("name,kind,backend,speed\ncpu0,cpu,cpu,2\n")
    with pytest.raises(DeviceFileError, match="column 'speed': expected nothing, for a device of this machine"):
        Platform.from_files(*files)
    file = tmp_path / "spec.toml"
    text = '[actors]\nenv = "CartPole-v1"\n[trainer]\nclass = "DQN"\n[replay]\nsize = 2000\n[learners]\ncount = 2\n'
    file.write_text(text + 'nodes = { "" = 1, b = 1 }\n')
    assert load_spec(file, progress=False)[0].learners.nodes == (("", 1), ("b", 1))
    file.write_text(text + "nodes = 2\n")
    with pytest.raises(ConfigurationError, match="a table of nodes' names and numbers of Learners"):
        load_spec(file, progress=False)


def test_a_program_of_a_cluster_is_composed_again_for_its_nodes(
    tmp_path: Path, known: type[Known], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    found = list(FOUND)

    def measured(address: str) -> list[Any]:
        asked.append(address)
        return found

    monkeypatch.setattr(composer.cluster, "measure_cluster", measured)
    made = described(None, actors=4, count=1)
    made.set_cluster("10.0.0.1:6379", ["b"])
    made.run(budget_s=0)
    program = made.runtime_gen(path=tmp_path / "program.py", timesteps=800)
    assert 'cluster="10.0.0.1:6379"' in program.read_text()
    before = made.placement.nodes
    found[1] = dataclasses.replace(found[1], cores=2)  # the node has fewer now
    again = recompose(program, {"timesteps": 800}, progress=False).program
    assert asked == ["10.0.0.1:6379"] * 2
    assert [(share.node, share.actors) for share in before] == [("", 0), ("b", 4)]
    assert 'nodes=(("", 2), ("b", 2))' in again.read_text()
    program.write_text(re.sub(r"        cluster.*\n", "", program.read_text()))
    with pytest.raises(ConfigurationError, match="ACTORS have nodes of a cluster, and ComposerInputs name none"):
        recompose(program, progress=False)
    several = described(write_files(tmp_path, 2), count=2)
    several.run()
    with pytest.raises(ConfigurationError, match="has several Learners, and only programs of one are composed again"):
        recompose(several.runtime_gen(path=tmp_path / "several.py", timesteps=800), progress=False)


# --- at the run -----------------------------------------------------------------------------------------------------


class FakeRay:
    """What Ray says of a cluster with nodes "head" (here) of 4 CPUs and "b" of 2."""

    def nodes(self) -> list[dict[str, Any]]:
        rows = (("head", "h", 4), ("b", "i", 2))
        return [
            {"NodeName": name, "NodeID": key, "Alive": True, "Resources": {"CPU": cpus}} for name, key, cpus in rows
        ]

    def get_runtime_context(self) -> Any:
        return self

    def get_node_id(self) -> str:
        return "h"


def test_a_cluster_without_room_on_a_node_is_refused_at_the_start() -> None:
    def check(**needs: Any) -> None:
        wanted = Needs(**needs).by_node
        check_nodes(FakeRay(), {node: (str(need), need.cpus) for node, need in wanted.items()})

    check(actors=3, learners=1, actor_nodes=(("", 2), ("b", 1)), learner_nodes=(("b", 1),))
    with pytest.raises(
        ConfigurationError, match=r"has 1 Learners and 1 Actors for node 'b', which has 2 CPUs .* not 3\. Start it"
    ):
        check(actors=1, learners=1, threads=2, actor_nodes=(("b", 1),), learner_nodes=(("b", 1),))
    with pytest.raises(
        ConfigurationError, match=r"has 1 Learners for node 'c'\. The Ray cluster has no node 'c'; it has head, b\."
    ):
        check(learners=1, learner_nodes=(("c", 1),))


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    pytest.importorskip("ray", reason="needs the extra ray")
    monkeypatch.setenv("RAY_worker_niceness", "0")  # by default 15: workers starve next to other tests
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 2, "include_dashboard": False, "node_name": "head"}
    made = Cluster(initialize_head=True, head_node_args=head)
    try:
        for name, cpus in (("c", 1), ("d", 2)):
            made.add_node(num_cpus=cpus, node_name=name)
        yield made
    finally:
        made.shutdown()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_learners_run_on_the_raylets_that_the_placement_says(
    tmp_path: Path, cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(composer.replay_composing, "Profiler", functools.partial(Profiler, budget_s=0.03))
    node_b = cluster.add_node(num_cpus=2, node_name="b")
    made = described(write_files(tmp_path, 2), actors=2, count=3, batch=24, average_every=8)
    made.set_replay(6000)
    made.set_cluster(cluster.address, ["b", "c"])
    made.set_learners(3, 8, nodes={"": 1, "b": 1, "c": 1})
    made.run()
    shares = {share.node: (share.learners, share.actors) for share in made.placement.nodes}
    assert shares == {"": (1, 1), "b": (1, 1), "c": (1, 0)}
    program = made.runtime_gen(path=tmp_path / "program.py", timesteps=5_000_000)
    quiet = ("--eval-episodes", "0", "--plain")
    run_dir = tmp_path / "run"
    arguments = ("--ray", cluster.address, *quiet, "--run-dir", str(run_dir))
    with programs.running(program, *arguments) as started:
        started.until(lambda: has_trained(run_dir) and len(learner_pids(run_dir)) == 3, 300.0)
        named = dict(re.findall(r"(learner-\d) is process (\d+)\.", (run_dir / "run.log").read_text()))
        here, b, c = (int(named[f"learner-{rank}"]) for rank in range(3))
        assert here in children(started.process.pid), "a process of the run, without Ray"
        assert (node_of(b), node_of(c)) == ("b", "c")

        # While its node is gone, a Learner goes on on any other that has the CPUs.
        cluster.remove_node(node_b, allow_graceful=False)
        started.until(lambda: len(learner_pids(run_dir)) == 4, 300.0)
        assert node_of(learner_pids(run_dir)[3]) in ("d", "head")
        steps = gradient_steps(run_dir)
        started.until(lambda: gradient_steps(run_dir) > steps, 300.0)
        started.interrupt()
        assert started.wait(120.0) == 130, started.output
        assert "learner-1 died" in started.output
    found = summary(run_dir)["learners"]
    assert found["replaced"] >= 1, "the dead node may be offered once more before Ray knows"
    assert min(found["gradient_steps"]) > 0
    assert min(found["transitions"]) > 0

    # The same program, without Ray, goes on from there.
    env_steps = summary(run_dir)["env_steps"]
    timesteps = ("--timesteps", str(env_steps + 1000))
    code, output = run(program, "--resume", *timesteps, *quiet, "--run-dir", str(run_dir))
    assert code == 0, output
    assert summary(run_dir)["env_steps"] >= env_steps + 1000

    text = program.read_text()
    for nodes, named_fault in (
        ('("c", 2)', "2 Learners for node 'c', which has 1 CPUs in the Ray cluster, not 2"),
        ('("c", 1), ("b", 1)', "1 Learners and 1 Actors for node 'b'. The Ray cluster has no node 'b'; it has"),
    ):
        program.write_text(text.replace('nodes=(("", 1), ("b", 1), ("c", 1))', f'nodes=(("", 1), {nodes})'))
        code, output = run(program, "--ray", cluster.address, *quiet, "--run-dir", str(tmp_path / "refused"))
        assert code != 0
        assert named_fault in output
