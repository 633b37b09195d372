"""Reads the nodes of a Ray cluster, and measures their cores and the connections between them and the host."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from composer.platform import Node, Platform
from composer.wording import did_you_mean, listed
from pearl.actors.child_process import ChildProcess
from pearl.actors.report import Report
from pearl.devices.description import Connection, Device
from pearl.errors import ConfigurationError, PearlError
from pearl.extras import require_extra
from pearl.remote.bridge import Needs, connected_in_time, no_cluster
from pearl.remote.placing import names_of

_PATIENCE_S = 60.0  # for a node to answer
_LONGEST_S = 300.0  # of everything
_ROUND_TRIPS, _TRANSFERS = 100, 5
_NBYTES = 8 << 20  # of a transfer
_WARM_UP = 2
_REPEATS, _LOOP, _PRODUCTS, _SIZE = 15, 20_000, 50, 48  # of the work that compares cores; one thread multiplies so few


@dataclasses.dataclass(frozen=True)
class MeasuredNode:
    """A node of a cluster by all its names: its cores, and its connection with this process.

    `latency_us` is half of a round trip of an empty message, `bandwidth_gbps` that of arrays from the node to here.
    `is_here`: it is the node of this process, without a connection. `speed` is how fast a core is compared with one
    here: the geometric mean of the ratios for a loop in Python and for small products of NumPy.
    """

    names: tuple[str, ...]
    cores: int
    is_here: bool
    latency_us: float = 0.0
    bandwidth_gbps: float = 0.0
    speed: float = 1.0

    @property
    def name(self) -> str:
        """The name that was given to it, else its address."""
        return self.names[0]


def with_cluster(
    platform: Platform, address: str, nodes: Sequence[str] | None, report: Callable[[str], None]
) -> Platform:
    """The platform with the nodes of the cluster at `address`, all or those in `nodes`, and their connections.

    Nodes that the device CSV names must be in the cluster; their cores and connections stay as the files state them.
    Raises ConfigurationError for a cluster that cannot be reached, and for nodes that it does not have.
    """
    report(f"measuring the connections to the nodes of the Ray cluster at {address}")
    found = measure_cluster(address)
    return joined(platform, found, nodes, report)


def joined(
    platform: Platform,
    found: Sequence[MeasuredNode],
    nodes: Sequence[str] | None,
    report: Callable[[str], None] = lambda _: None,
) -> Platform:
    """The platform with the nodes that were `found`; see `with_cluster`."""
    others = [node for node in found if not node.is_here]
    aliases = {name: node for node in found for name in node.names}
    named = aliases | {node.name: node for node in reversed(found)}  # nodes of one machine share its address
    stated = [node.device.node for node in platform.nodes]
    for name in dict.fromkeys((*stated, *(nodes or ()))):
        if name not in named:
            raise ConfigurationError(
                f"The Ray cluster has no node {name!r}; it has {listed([node.name for node in found])}."
                f"{did_you_mean(name, list(named))} Correct the device CSV or set_cluster, or start the node."
            )
        if named[name].is_here:
            raise ConfigurationError(
                f"Node {name!r} is this machine, whose devices have no node. Leave it out; its cores are used."
            )
    known = {named[node.device.node]: node for node in platform.nodes}
    wanted = others if nodes is None else list(dict.fromkeys(named[name] for name in nodes))
    joined_nodes = []
    for measured in dict.fromkeys((*known, *wanted)):
        here = known.get(measured)
        link = None if here is None else here.link
        device = _device(measured, platform) if here is None else here.device
        if device.cores is None:
            device = dataclasses.replace(device, cores=measured.cores)
        elif device.cores > measured.cores:
            raise ConfigurationError(
                f"Node {device.node} of the Ray cluster has {measured.cores} CPUs; the device CSV states "
                f"{device.cores} cores of {device.name}. Correct the cell, or start the node with more (--num-cpus)."
            )
        if device.speed is None:
            device = dataclasses.replace(device, speed=float(f"{measured.speed:.3g}"))
        if link is None:
            link = Connection(platform.host.name, device.name, measured.latency_us, measured.bandwidth_gbps)
        report(
            f"node {device.node}: {device.cores} cores of {device.speed:g} times the speed of these, "
            f"{link.latency_us:,.0f} us and {link.bandwidth_gbps:.3g} GB/s from here"
        )
        joined_nodes.append(Node(device, link))
    return dataclasses.replace(platform, nodes=tuple(joined_nodes))


def _device(measured: MeasuredNode, platform: Platform) -> Device:
    taken = {device.name for device in (*platform.devices, *(node.device for node in platform.nodes))}
    name = f"cpu:{measured.name}"[:58]
    if name in taken:
        name = next(other for number in itertools.count(2) if (other := f"{name}-{number}") not in taken)
    return Device(name, "cpu", "cpu", cores=measured.cores, node=measured.name)


def measure_cluster(address: str) -> list[MeasuredNode]:
    """The nodes of the cluster at `address`, in the order of their names, with measured connections.

    In a process of its own, which is Ray's driver meanwhile. Raises ConfigurationError or MissingExtraError.
    """
    require_extra("ray", "ray", "set_cluster")
    report = Report()
    with tempfile.TemporaryDirectory(prefix="pearl-cluster-") as folder:
        result = Path(folder) / "nodes.json"
        process = ChildProcess(_measure, (address, str(result), report), "cluster", without_program=True)
        if not process.wait(_LONGEST_S):
            process.kill()
            raise ConfigurationError(no_cluster(address, f"its nodes were not measured within {_LONGEST_S:g} s"))
        if not result.is_file():
            reason = report.failure or f"the process that measures ended: {process.cause_of_death}"
            raise ConfigurationError(reason.rstrip())
        rows = json.loads(result.read_text(encoding="utf-8"))
    return [MeasuredNode(**{**row, "names": tuple(row["names"])}) for row in rows]


def _measure(address: str, result: str, report: Report) -> None:
    """Main function of the process: write the nodes to the file `result`."""
    try:
        ray = connected_in_time(address, Needs(), report)
        rows = [dataclasses.asdict(node) for node in _nodes(ray)]
        Path(result).write_text(json.dumps(rows), encoding="utf-8")
        ray.shutdown()
    except BaseException as error:
        report.fail(str(error) if isinstance(error, PearlError) else traceback.format_exc(limit=-8))
        raise SystemExit(1) from None


def _nodes(ray: Any) -> list[MeasuredNode]:
    here, echo = ray.get_runtime_context().get_node_id(), _echo()
    own_s = echo(0).work_s()
    found = []
    for row in ray.nodes():
        if not row["Alive"]:
            continue
        cores = int(row["Resources"].get("CPU", 0))
        measured = (0.0, 0.0, 1.0) if row["NodeID"] == here or not cores else _measured(ray, row, echo, own_s)
        found.append(MeasuredNode(names_of(row), cores, row["NodeID"] == here, *measured))
    return sorted(found, key=lambda node: node.names)


def _echo() -> Any:
    """The class of the actors that are measured; pickled by value: the node need not have this module."""

    class Echo:
        def __init__(self, nbytes: int) -> None:
            self._array = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)

        def nothing(self) -> None:
            pass

        def array(self) -> np.ndarray:
            return self._array

        def work_s(self) -> tuple[float, float]:
            """Seconds of some work in Python, and of some in NumPy: medians."""
            x = np.full((_SIZE, _SIZE), 1 / _SIZE, np.float32)
            found: list[tuple[float, float]] = []
            for _ in range(_REPEATS):
                start = time.perf_counter()
                sum(i * i for i in range(_LOOP))
                between = time.perf_counter()
                for _ in range(_PRODUCTS):
                    np.matmul(x, x)
                found.append((between - start, time.perf_counter() - between))
            loop_s, products_s = np.median(found, axis=0)
            return float(loop_s), float(products_s)

    return Echo


def _measured(ray: Any, row: Any, echo: Any, own_s: tuple[float, float]) -> tuple[float, float, float]:
    """Latency in microseconds and bandwidth in GB/s of messages of an actor on the node, and the speed of its core."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    strategy = NodeAffinitySchedulingStrategy(row["NodeID"], soft=False)
    actor = ray.remote(num_cpus=0, max_restarts=0, scheduling_strategy=strategy)(echo).remote(_NBYTES)
    try:
        round_trips = [_seconds(ray, actor.nothing) for _ in range(_ROUND_TRIPS)][_WARM_UP:]
        transfers = [_seconds(ray, actor.array) for _ in range(_WARM_UP + _TRANSFERS)][_WARM_UP:]
        work_s = ray.get(actor.work_s.remote(), timeout=_PATIENCE_S)
    except ray.exceptions.RayError as error:
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise ConfigurationError(f"Node {names_of(row)[0]} of the Ray cluster does not answer: {reason}.") from None
    finally:
        ray.kill(actor, no_restart=True)
    round_trip_s = float(np.median(round_trips))
    transfer_s = max(float(np.median(transfers)) - round_trip_s, 1e-6)
    speed = math.sqrt(own_s[0] / work_s[0] * own_s[1] / work_s[1])
    return round_trip_s / 2 * 1e6, _NBYTES / transfer_s / 1e9, speed


def _seconds(ray: Any, call: Any) -> float:
    start = time.perf_counter()
    ray.get(call.remote(), timeout=_PATIENCE_S)
    return time.perf_counter() - start
