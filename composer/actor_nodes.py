"""Chooses how many Actors each node of a cluster has, by its cores and by what its connection carries."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from composer.platform import Node, Platform
from composer.problem import Problem
from pearl.errors import ConfigurationError, PlacementError

_BYTES_PER_GB = 1e9


@dataclass(frozen=True)
class ActorNode:
    """A node with the number of its Actors; `node` is "" for the machine of the host, whose connection is its memory.

    `carries` is how many Actors its connection has room for; None: it is not the limit.
    """

    node: str
    device: str
    cores: int
    actors: int
    latency_us: float = 0.0
    bandwidth_gbps: float = 0.0
    carries: int | None = None

    def __post_init__(self) -> None:
        if min(self.cores, self.actors, self.latency_us, self.bandwidth_gbps) < 0:
            raise ConfigurationError(f"Cores, Actors and connection of a node must be at least 0; found {self!r}.")

    @property
    def why(self) -> str:
        """Its cores and its connection, in words."""
        if not self.node:
            return f"{self.cores} cores, less those of Learners"
        text = f"{self.cores} cores, {self.latency_us:,.0f} us and {self.bandwidth_gbps:.3g} GB/s from the host"
        return text if self.carries is None else f"{text}, which carry {self.carries}"


def spread(problem: Problem, platform: Platform, transition_us: float) -> tuple[ActorNode, ...]:
    """Give the Actors of the problem to the host and to the nodes of the platform, in proportion to their free cores.

    Learners have a core each on the host. No node gets more Actors than it has cores, or than its connection carries if
    each makes a transition in `transition_us`. Raises ConfigurationError if there is no room for all, and
    PlacementError for a node without cores or without a connection.
    """
    host = platform.host
    size = problem.transition.nbytes / (transition_us * 1e-6)  # bytes a second of one Actor
    places = [ActorNode("", host.name, host.cores or 1, 0), *(_place(node, host.name, size) for node in platform.nodes)]
    weights = [max(0, places[0].cores - problem.learners.count), *(place.cores for place in places[1:])]
    most = [place.cores if place.carries is None else min(place.cores, place.carries) for place in places]
    count = problem.actors.count
    if sum(most) < count:
        room = ", ".join(f"{place.node or 'this machine'}: {n}" for place, n in zip(places, most, strict=True))
        raise ConfigurationError(
            f"{count} Actors need a core each, and connections that carry their transitions; found room for "
            f"{sum(most)} ({room}). Add nodes, or compose with fewer Actors (set_actors, [actors] count)."
        )
    return _shared_out(places, weights, most, count)


def _shared_out(
    places: Sequence[ActorNode], weights: Sequence[int], most: Sequence[int], count: int
) -> tuple[ActorNode, ...]:
    """One Actor after the other to the place that has the fewest for its weight then (D'Hondt); the first of equals."""
    given = [0] * len(places)

    def load(place: int) -> float:
        if given[place] >= most[place]:
            return math.inf
        return (given[place] + 1) / weights[place] if weights[place] else 1e9 + given[place]

    for _ in range(count):
        given[min(range(len(places)), key=load)] += 1
    return tuple(
        ActorNode(p.node, p.device, p.cores, n, p.latency_us, p.bandwidth_gbps, p.carries)
        for p, n in zip(places, given, strict=True)
    )


def _place(node: Node, host: str, bytes_per_s: float) -> ActorNode:
    device, link = node.device, node.link
    if link is None:
        raise PlacementError(
            f"The connection between {host} and {device.name}, on node {device.node}, is not known. Add a row to the "
            "connection CSV, or have it measured: set_cluster(ADDRESS), or cluster in [platform]."
        )
    if device.cores is None:
        raise PlacementError(
            f"Device {device.name!r} on node {device.node} states no cores, by which Actors are shared out. Fill its "
            "cell 'cores' in the device CSV."
        )
    carries = int(link.bandwidth_gbps * _BYTES_PER_GB / bytes_per_s)
    limit = carries if carries < device.cores else None
    return ActorNode(device.node, device.name, device.cores, 0, link.latency_us, link.bandwidth_gbps, limit)
