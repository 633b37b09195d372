"""Predicts several Learners on the nodes of a cluster: the cost of averages, banks and Actors over their connections.

The host averages, as it does on one machine: the parameters of each Learner elsewhere cross its connection in both
directions for every average, and the transitions for its bank cross it once.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from composer.contention import CoreSharing
from composer.matrix import PairCell
from composer.nodes import NodeShare, shared_out
from composer.platform import Platform
from composer.problem import Problem
from composer.profiling.profiler import Profiler
from composer.profiling.side_by_side import SideBySide
from pearl.errors import ConfigurationError
from pearl.local_sgd.parameters import TrainerParameters
from pearl.spec import LearnersSpec, Nodes

_FLOAT_BYTES = 4
_BYTES_PER_US_PER_GBPS = 1e3
_ALONE = 3  # nodes that are tried with all Learners on one of them


@dataclass(frozen=True)
class LearnersModel:
    """Measurements of several Learners on the host, to predict them on nodes.

    An average has `parameters` numbers, the policy `weights`. `transition_us` is that of one Actor on the host. The
    `problem` is that of all Learners together.
    """

    problem: Problem
    measured: SideBySide
    pair: PairCell
    sharing: CoreSharing
    transition_us: float
    parameters: int
    weights: int

    @classmethod
    def of(cls, problem: Problem, profiler: Profiler, measured: SideBySide, pair: PairCell) -> LearnersModel:
        """The model from the measurements that `profiler` has for the problem."""
        assert profiler.sharing is not None, "several Learners are on CPUs"
        learner = profiler.make_learner(pair.learner.implementation, profiler.platform.host, 1)
        count = TrainerParameters(profiler.probe, problem.learners.moments).layout.count
        return cls(problem, measured, pair, profiler.sharing, profiler.transition_us, count, learner.weight_count)

    def network_us(self, shares: Sequence[NodeShare]) -> float:
        """Microseconds that an average takes on the connections, there and back.

        The host's link carries one Learner's parameters after another's, and the slowest node answers last.
        """
        remote = [share for share in shares if share.node and share.learners]
        if not remote:
            return 0.0
        moving = (share.learners * self._moved_us(self.parameters * _FLOAT_BYTES, share) for share in remote)
        return 2 * (sum(moving) + max(share.latency_us for share in remote))

    def average_us(self, shares: Sequence[NodeShare]) -> float:
        """Microseconds of an average: on the host, for all Learners, and on the connections."""
        count = sum(share.learners for share in shares)
        return self.measured.average_us * count / max(1, self.measured.at_once) + self.network_us(shares)

    def scales(self, shares: Sequence[NodeShare]) -> list[float]:
        """How many times as long as alone on the host a step of each Learner takes, by rank; without any wait."""
        found: list[float] = []
        for share in shares:
            scale = self.measured.contention(share.learners) / share.speed
            if not share.node and share.learners:
                alone_us, learner_us = self.measured.alone_us, self.pair.learner.step.value_us
                shared_us = self._sharing(share, shares).step_us(learner_us, share.threads)
                scale *= 1.0 + max(0.0, shared_us - learner_us) / alone_us
            found += [scale] * share.learners
        return found

    def arguments(self, spec: LearnersSpec, shares: Sequence[NodeShare]) -> dict[str, Any]:
        """The arguments of `place` for Learners as in `spec` on these nodes."""
        if all(not share.node or not share.learners for share in shares):
            return {
                "sharing": self._sharing(shares[0], shares),
                "core_speed": 1.0,
                "stretch": self.measured.stretch(spec),
                "average_us": self.measured.waited_us(spec),
            }
        slowest = min(share.speed for share in shares if share.learners)
        step = float(self.measured.step_us.mean()) / self.measured.alone_us
        scales = [scale * slowest / step for scale in self.scales(shares)]
        return {
            "sharing": None,
            "core_speed": slowest,
            "stretch": self.measured.stretch(spec, scales),
            "average_us": self.measured.waited_us(spec, scales, self.average_us(shares) * slowest) / slowest,
        }

    def pace_us(self, spec: LearnersSpec, shares: Sequence[NodeShare]) -> float:
        """The least microseconds of an iteration, by the pace of the Actors and by the load of each connection."""
        here = self._sharing(shares[0], shares)
        own_us = 0.0 if math.isinf(here.collect_us) else here.collect_us
        if shares[0].learners and not math.isinf(here.collect_us):
            own_us = here.iteration_us(self.pair.iteration_us, shares[0].threads)
        return max(own_us, *(self._link_us(spec, share) for share in shares))

    def _link_us(self, spec: LearnersSpec, share: NodeShare) -> float:
        """Microseconds in which a node's connection carries an iteration, in its busier direction."""
        if not share.node:
            return 0.0
        problem, every = self.problem, spec.average_every
        batch, ratio = problem.train.batch_size, problem.train.replay_ratio
        step_nbytes = problem.train.rows_per_step * problem.transition.nbytes  # the ratio counts steps
        collected = 0.0 if math.isinf(ratio) else batch / ratio * step_nbytes
        averaged = share.learners * self.parameters * _FLOAT_BYTES / every
        policy = self.weights * _FLOAT_BYTES / every if share.actors else 0.0
        there = share.learners / spec.count * collected + averaged + policy
        back = share.actors / problem.actors.count * collected + averaged
        return self._moved_us(max(there, back), share)

    def _sharing(self, here: NodeShare, shares: Sequence[NodeShare]) -> CoreSharing:
        """How the Learners and Actors of the host share its cores."""
        collect_us, train = math.inf, self.problem.train
        if not math.isinf(train.replay_ratio):
            at_once = sum(
                share.actors * share.speed if share.node else min(share.actors, share.cores) for share in shares
            )
            collect_us = self.transition_us / at_once * train.batch_size / train.replay_ratio
        return dataclasses.replace(
            self.sharing, actors=here.actors, collect_us=collect_us, learners=max(1, here.learners)
        )

    @staticmethod
    def _moved_us(nbytes: float, share: NodeShare) -> float:
        return nbytes / (share.bandwidth_gbps * _BYTES_PER_US_PER_GBPS)


def layouts(count: int, threads: int, platform: Platform) -> list[Nodes]:
    """Ways to put `count` Learners of so many threads on the host and on nodes, the fewest elsewhere first.

    The nearest nodes come first: of the lowest latency and the highest bandwidth. Learners are packed into the host and
    them, or evenly spread over the host and the first 0, 1, 2, 4, ... of them, or all on one of them. Raises
    ConfigurationError if there are too few cores.
    """
    near = sorted(
        (node for node in platform.nodes if node.link is not None),
        key=lambda node: (node.link.latency_us, -node.link.bandwidth_gbps, -node.speed) if node.link else (),
    )
    room = {"": (platform.host.cores or 1) // threads}
    room |= {node.device.node: (node.device.cores or 0) // threads for node in near}
    if sum(room.values()) < count:
        listed = ", ".join(f"{node or 'this machine'}: {cores}" for node, cores in room.items())
        raise ConfigurationError(
            f"{count} Learners of {threads} thread(s) need a core for each thread; found room for {sum(room.values())} "
            f"({listed}). Add nodes, or compose with fewer Learners (set_learners, [learners] count)."
        )
    names = list(room)
    sizes = sorted({0, len(near), *(2**power for power in range(len(near).bit_length()))})
    found: list[Nodes | None] = [_packed(count, names, room)]
    found += [_even(count, names[: 1 + size], room) for size in sizes]
    found += [((name, count),) for name in names[1 : 1 + _ALONE] if room[name] >= count]
    fitting: dict[Nodes, None] = {layout: None for layout in found if layout is not None}
    return sorted(fitting, key=lambda layout: sum(count for node, count in layout if node))


def _packed(count: int, names: Sequence[str], room: dict[str, int]) -> Nodes:
    found: dict[str, int] = {}
    for name in names:
        found[name] = min(room[name], count - sum(found.values()))
    return tuple((name, learners) for name, learners in found.items() if learners)


def _even(count: int, names: Sequence[str], room: dict[str, int]) -> Nodes | None:
    """In proportion to the cores of each place; None if they do not fit."""
    most = [room[name] for name in names]
    if sum(most) < count:
        return None
    given = shared_out(count, most, most, most)
    return tuple((name, learners) for name, learners in zip(names, given, strict=True) if learners)
