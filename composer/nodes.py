"""The share of each node of a cluster: Learners with their banks, and Actors by its cores and its connection."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from composer.platform import Node, Platform
from composer.problem import TrainingProblem
from pearl.errors import ConfigurationError, PlacementError
from pearl.spec import ONE_LEARNER, LearnersSpec

_BYTES_PER_GB = 1e9


@dataclass(frozen=True)
class NodeShare:
    """A node with the number of its Actors and Learners, each of these on `threads` cores and with its bank.

    `node` is "" for the machine of the host, whose connection is its memory. `carries` is how many Actors its
    connection has room for; None: it is not the limit. `speed` is how fast a core is, compared with one of the host.
    """

    node: str
    device: str
    cores: int
    actors: int
    latency_us: float = 0.0
    bandwidth_gbps: float = 0.0
    carries: int | None = None
    learners: int = 0
    threads: int = 1
    speed: float = 1.0

    def __post_init__(self) -> None:
        counts = (self.cores, self.actors, self.learners, self.latency_us, self.bandwidth_gbps)
        if min(counts) < 0 or self.threads < 1 or not 0 < self.speed < math.inf:
            raise ConfigurationError(
                "Cores, Actors, Learners and connection of a node must be at least 0, threads at least 1 and speed "
                f"above 0; found {self!r}."
            )

    @property
    def free_cores(self) -> int:
        """Those without a Learner."""
        return max(0, self.cores - self.learners * self.threads)

    @property
    def most_actors(self) -> int:
        """Actors that have a core each: those of other nodes share none with Learners, as Ray counts CPUs."""
        cores = self.free_cores if self.node else self.cores
        return cores if self.carries is None else min(cores, self.carries)

    @property
    def why(self) -> str:
        """Its cores and its connection, in words."""
        speed = "" if self.speed == 1 else f" of {self.speed:.2g} times the speed of the host's"
        taken = f", {self.learners * self.threads} for Learners" if self.learners else ""
        cores = f"{self.cores} cores{speed}{taken}"
        if not self.node:
            return cores
        text = f"{cores}, {self.latency_us:,.0f} us and {self.bandwidth_gbps:.3g} GB/s from the host"
        return text if self.carries is None else f"{text}, which carry {self.carries} Actors"


def spread(
    problem: TrainingProblem,
    platform: Platform,
    transition_us: float,
    threads: int = 1,
    learners: LearnersSpec | None = ONE_LEARNER,
) -> tuple[NodeShare, ...]:
    """Give the Actors of the problem to the host and to the nodes of the platform, in proportion to their free cores.

    Faster cores count for more. The `learners`, on `threads` cores each, are on the nodes that they state, else all on
    the host; None: none trains while Actors collect. No node gets more Actors than it has cores (but for the host:
    without a Learner), or than its connection carries if each makes a transition in `transition_us` on a core of the
    host. Raises ConfigurationError if there is no room for all, and PlacementError for a node without cores or without
    a connection.
    """
    host = platform.host
    size = problem.transition.nbytes / (transition_us * 1e-6)  # bytes a second of one Actor
    stated, count = ({}, 0) if learners is None else (dict(learners.nodes), learners.count)
    places = [NodeShare("", host.name, host.cores or 1, 0), *(_place(node, host.name, size) for node in platform.nodes)]
    _check_learners(stated, places, threads)
    places = [
        replace(place, learners=stated.get(place.node, 0) if stated else 0 if place.node else count, threads=threads)
        for place in places
    ]
    actors = problem.actors.count
    most = [place.most_actors for place in places]
    if sum(most) < actors:
        room = ", ".join(f"{place.node or 'this machine'}: {n}" for place, n in zip(places, most, strict=True))
        raise ConfigurationError(
            f"{actors} Actors need a core each, and connections that carry their transitions; found room for "
            f"{sum(most)} ({room}). Add nodes, or compose with fewer Actors (set_actors, [actors] count)."
        )
    free = [place.free_cores for place in places]
    given = shared_out(actors, [place.free_cores * place.speed for place in places], most, free)
    return tuple(replace(place, actors=n) for place, n in zip(places, given, strict=True))


def _check_learners(stated: dict[str, int], places: Sequence[NodeShare], threads: int) -> None:
    """Raise ConfigurationError for Learners on a node that is not there, or that has too few cores for them."""
    known = {place.node: place for place in places}
    for node, count in stated.items():
        if node not in known:
            raise ConfigurationError(
                f"Learners are to be on node {node!r} (nodes of set_learners, [learners]), which the cluster or the "
                f"device CSV does not have; found {', '.join(name for name in known if name) or 'no nodes'}. The name "
                '"" is this machine.'
            )
        if count * threads > known[node].cores:
            raise ConfigurationError(
                f"{count} Learners of {threads} thread(s) need a core for each thread; node {node or 'here'} has "
                f"{known[node].cores}. Put fewer there, or more on other nodes."
            )


def shared_out(count: int, weights: Sequence[float], most: Sequence[int], free: Sequence[int]) -> list[int]:
    """How many of `count` parties each place gets, in proportion to `weights`, and never more than `most`.

    One after the other goes to the place that then has the fewest for its weight (D'Hondt); the first of equals. Only
    when all places have as many as they have `free` cores, a place gets more.
    """
    given = [0] * len(weights)

    def load(place: int) -> float:
        if given[place] >= most[place]:
            return math.inf
        return (given[place] + 1) / weights[place] if given[place] < free[place] else 1e9 + given[place]

    for _ in range(count):
        given[min(range(len(weights)), key=load)] += 1
    return given


def _place(node: Node, host: str, bytes_per_s: float) -> NodeShare:
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
    speed = node.speed
    carries = int(link.bandwidth_gbps * _BYTES_PER_GB / (bytes_per_s * speed))
    limit = carries if carries < device.cores else None
    return NodeShare(
        device.node, device.name, device.cores, 0, link.latency_us, link.bandwidth_gbps, limit, speed=speed
    )
