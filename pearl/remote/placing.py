"""The nodes of a Ray cluster by their names, and Actors and Learners that are to run on one of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pearl.errors import ConfigurationError


def names_of(node: Mapping[str, Any]) -> tuple[str, ...]:
    """All names of a node of `ray.nodes()`: the one that was given to it first, then its address and its host's."""
    keys = ("NodeName", "NodeManagerAddress", "NodeManagerHostname", "NodeID")
    return tuple(dict.fromkeys(node[key] for key in keys if node.get(key)))


def node_id(ray: Any, name: str) -> str:
    """The id of the living node called `name`, "" for that of this process; ConfigurationError if there is none."""
    if not name:
        return str(ray.get_runtime_context().get_node_id())
    alive = [node for node in ray.nodes() if node["Alive"]]
    for key in range(4):  # a given name before an address, which several nodes of one machine share
        for node in alive:
            if names_of(node)[key : key + 1] == (name,):
                return str(node["NodeID"])
    known = ", ".join(names_of(node)[0] for node in alive)
    raise ConfigurationError(
        f"The Ray cluster has no node {name!r}; it has {known}. Start that node, give --ray the address of its "
        "cluster, or compose again for this one."
    )


def check_nodes(ray: Any, wanted: Mapping[str, tuple[str, int]]) -> None:
    """Raise ConfigurationError unless the cluster has each node, with so many CPUs for what the program has there."""
    cpus = {node["NodeID"]: float(node["Resources"].get("CPU", 0.0)) for node in ray.nodes() if node["Alive"]}
    for name, (what, count) in wanted.items():
        where = f"node {name!r}" if name else "this machine"
        try:
            found = cpus.get(node_id(ray, name), 0.0)
        except ConfigurationError as error:
            raise ConfigurationError(f"The program has {what} for {where}. {error}") from None
        if found < count:
            raise ConfigurationError(
                f"The program has {what} for {where}, which has {found:g} CPUs in the Ray cluster, not {count}. Start "
                "it with more (ray start --num-cpus), or compose again for this cluster."
            )


def on_node(ray: Any, make: Any, node: str | None) -> Any:
    """The class `make` of Ray actors, for one on `node`; None: as it is. While that node is gone: on any other."""
    if node is None:
        return make
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    try:
        strategy = NodeAffinitySchedulingStrategy(node_id(ray, node), soft=True)
    except ConfigurationError:  # it died since the start
        return make
    return make.options(scheduling_strategy=strategy)
