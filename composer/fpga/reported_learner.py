"""What a vendor's report says of the Learner on an FPGA, alone or joined to the Replay Manager: T_Learner in cycles.

A step is, one after the other: the weights stream to the copies; the items of a sub-batch through the stages, whose
makespan is the longest way through their graph, as in `composer.fpga.learner_pipeline`; the gradients' way to WU; and
WU.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from torch import nn

from composer.fpga.model import ReplayTree
from composer.fpga.reported_replay import ReportedReplay
from composer.fpga.reported_stages import clock_of, cycle_in, imported, known_trips, loops_of, one_pass
from composer.fpga.vendor_report import BlockReport, KernelReport, VendorReport
from composer.matrix import LearnerCell, Measurement, PairCell
from composer.modelled_rows import FPGA_LEARNER
from pearl.algorithms.trainer import Trainer
from pearl.algorithms.update_rule import Bootstrap, update_rule_of
from pearl.errors import ConfigurationError, VendorReportError
from pearl.learner.extract import extract_network

Algorithm: TypeAlias = Literal["dqn", "double_dqn", "ddpg", "td3"]
Activation: TypeAlias = Literal["relu", "tanh"]

# What the recipe generates, by what the targets bootstrap from.
_ALGORITHMS: Mapping[Bootstrap | None, Algorithm] = {
    "largest_value": "dqn",
    "target_action": "ddpg",
    "disturbed_target_action": "td3",
}
_BLOCK = 16  # values that a pipe takes at once: kBlock of pearl/fpga_learner.hpp
_KERNEL = re.compile(r"pearl_learner_([0-9a-z_]+?)(?:_kernel|$)")
_REPLAY_KERNEL = re.compile(r"pearl_replay_(?:level[0-9]+|feed|collect)")
_SCALING = frozenset(("flatten", "sub", "truediv", "mul", "add"))  # of what an actor is given and gives


@dataclass(frozen=True)
class LearnerBuild:
    """What a Learner was compiled for: PEARL_ALGORITHM, PEARL_NETWORK, PEARL_BATCH, PEARL_COPIES, PEARL_ACTIVATION.

    A report holds its loops, but not these. Raises ConfigurationError for what the recipe generates no program for.
    """

    algorithm: Algorithm
    network: tuple[int, ...]  # widths: observation, hidden layers, actions
    batch_size: int
    copies: int = 1
    activation: Activation = "relu"

    def __post_init__(self) -> None:
        if self.algorithm not in get_args(Algorithm) or self.activation not in get_args(Activation):
            raise ConfigurationError(
                f"A Learner's algorithm is one of {', '.join(get_args(Algorithm))}, its activation relu or tanh; found "
                f"{self.algorithm!r} and {self.activation!r}."
            )
        counts = (*self.network, self.batch_size, self.copies)
        if len(self.network) < 2 or not all(type(count) is int and count >= 1 for count in counts):
            raise ConfigurationError(
                "A Learner's network is at least two widths, which are whole numbers of at least 1, as batch_size and "
                f"copies are; found {self.network}, {self.batch_size} and {self.copies}."
            )
        if self.copies > self.batch_size:
            raise ConfigurationError(f"A batch of {self.batch_size} has no items for {self.copies} copies.")

    @classmethod
    def of(cls, trainer: object, batch_size: int, copies: int = 1) -> LearnerBuild | None:
        """What the recipe generates for `trainer`; None where it generates nothing for one like it."""
        rule = update_rule_of(trainer)
        if rule is None or rule.bootstrap not in _ALGORITHMS:
            return None
        algorithm = "double_dqn" if rule.double else _ALGORITHMS[rule.bootstrap]
        acting, critic = None, None
        if rule.actor is None:
            (network,) = rule.critics
            acting = _chain(network.module, network.input_shape, frozenset(("flatten",)))
        elif isinstance(trainer, Trainer):
            acting = _chain(rule.policy.module, trainer.input_shape, _SCALING)
            critic = rule.critics[0].module
        if acting is None or (critic is not None and not _judges(critic, *acting)):
            return None
        return cls(algorithm, acting[0], batch_size, copies, acting[1])

    @property
    def critics(self) -> int:
        """Critics beside the actor: 0 for DQN."""
        return {"ddpg": 1, "td3": 2}.get(self.algorithm, 0)

    @property
    def networks(self) -> tuple[tuple[int, ...], ...]:
        """Widths of each network with weights of its own: DQN's, or the actor's, then the critics'."""
        critic = (self.network[0] + self.network[-1], *self.network[1:-1], 1)
        return (self.network, *(critic for _ in range(self.critics)))

    @property
    def items(self) -> int:
        """PI: of one copy, at most."""
        return -(-self.batch_size // self.copies)

    @property
    def signature(self) -> str:
        """All of it but batch and copies, as calibration keys have it."""
        return f"{self.algorithm}:{self.activation}:{'-'.join(map(str, self.network))}"

    def stages(self) -> Mapping[str, tuple[str, ...]]:
        """The stages of one copy but WU, each after those whose values it takes; "" is the item itself."""
        return dict(_dqn(self) if not self.critics else _actor_critic(self))

    def weight_stages(self) -> Mapping[str, int]:
        """The WU stages, and how many blocks of its gradient each takes."""
        return {
            f"wu_{network}_{layer}": (outputs * _padded(inputs) + _padded(outputs)) // _BLOCK
            for network, widths in enumerate(self.networks)
            for layer, (inputs, outputs) in enumerate(itertools.pairwise(widths), 1)
        }


def _padded(width: int) -> int:
    return -(-width // _BLOCK) * _BLOCK


def _chain(
    module: object, input_shape: Sequence[int], passed_over: frozenset[str]
) -> tuple[tuple[int, ...], Activation] | None:
    """Widths and activation of linear layers with the same activation behind each but the last; None for others."""
    network = extract_network("policy", module, tuple(input_shape))  # type: ignore[arg-type]
    layers = [layer for layer in network.layers if layer.kind not in passed_over]
    if passed_over == _SCALING and layers and layers[-1].kind == "tanh":
        del layers[-1]  # LOSS applies it
    between = {layer.kind for layer in layers[1::2]} or {"relu"}
    if any(layer.kind != "linear" for layer in layers[::2]) or len(between) > 1 or not between <= {"relu", "tanh"}:
        return None
    if len(layers) % 2 == 0:
        return None
    widths = (math.prod(layers[0].in_shape), *(math.prod(layer.out_shape) for layer in layers[::2]))
    return widths, "relu" if "relu" in between else "tanh"


def _judges(critic: nn.Module, widths: tuple[int, ...], activation: Activation) -> bool:
    """Whether a critic has the hidden layers of the actor of `widths`."""
    outputs = [module.out_features for module in critic.modules() if isinstance(module, nn.Linear)]
    bends = [module for module in critic.modules() if isinstance(module, nn.ReLU | nn.Tanh)]
    wanted = nn.ReLU if activation == "relu" else nn.Tanh
    return outputs == [*widths[1:-1], 1] and all(isinstance(module, wanted) for module in bends)


_Edges: TypeAlias = Iterator[tuple[str, tuple[str, ...]]]


def _forward(name: str, layers: int, after: str) -> _Edges:
    for layer in range(1, layers + 1):
        yield f"fp_{name}{layer}", (after,)
        after = f"fp_{name}{layer}"


def _backward(name: str, layers: int, after: str, *, last: int = 2, train: bool = True) -> _Edges:
    for layer in range(layers, 0, -1):
        if train:
            yield f"ga_{name}{layer}", (after, f"fp_{name}{layer - 1}" if layer > 1 else "")
        if layer >= last:
            yield f"bp_{name}{layer}", (after,)
            after = f"bp_{name}{layer}"


def _dqn(build: LearnerBuild) -> _Edges:
    layers = len(build.network) - 1
    names = ["q", "target", *(["next"] if build.algorithm == "double_dqn" else [])]
    for name in names:
        yield from _forward(name, layers, "")
    yield "loss", tuple(f"fp_{name}{layers}" for name in names)
    yield from _backward("q", layers, "loss")


def _actor_critic(build: LearnerBuild) -> _Edges:
    layers = len(build.network) - 1
    numbers = range(1, build.critics + 1)
    yield from _forward("target_actor", layers, "")
    yield "act_next", (f"fp_target_actor{layers}", "")
    for k in numbers:
        yield from _forward(f"target_critic{k}_", layers, "act_next")
        yield from _forward(f"critic{k}_", layers, "")
    yield "loss_critic", tuple(f"fp_{name}{k}_{layers}" for k in numbers for name in ("critic", "target_critic"))
    for k in numbers:
        yield from _backward(f"critic{k}_", layers, "loss_critic")
    yield from _forward("actor", layers, "")
    yield "act", (f"fp_actor{layers}", "")
    yield from _forward("lagged1_", layers, "act")
    yield "loss_value", (f"fp_lagged1_{layers}",)
    yield from _backward("lagged1_", layers, "loss_value", last=1, train=False)
    yield "loss_actor", ("bp_lagged1_1", f"fp_actor{layers}")
    yield from _backward("actor", layers, "loss_actor")


# --- out of the report -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Pass:
    """A stage: cycles of weights or clearing before its items, of one item, and of gradients after them."""

    before: float
    interval: int
    latency: float
    after: float


class _Reader:
    """The kernels of a report on one build, by the names of their stages."""

    def __init__(self, report: VendorReport, build: LearnerBuild, bridges: Sequence[str]) -> None:
        self.report, self.build = report, build
        found: dict[str, KernelReport] = {}
        count = 0
        for kernel in report.kernels:
            if match := _KERNEL.search(kernel.name):
                found[match[1]] = kernel
                count += 1
            elif not _REPLAY_KERNEL.search(kernel.name):
                raise VendorReportError(
                    f"{report.path}: expected the Learner's kernels (pearl_learner_...); found {kernel.name!r}. Import "
                    "reports of kernels/sycl/board."
                )
        copies = range(build.copies)
        expected = {f"{stage}_{copy}" for stage in build.stages() for copy in copies}
        expected |= {*build.weight_stages(), *bridges}
        if set(found) != expected or count != len(expected):
            parts = [
                f"{len(names)} kernels {what} ({', '.join(sorted(names)[:4])}{', ...' if len(names) > 4 else ''})"
                for what, names in (("are missing", expected - set(found)), ("are not its", set(found) - expected))
                if names
            ] or ["some are there twice"]
            raise VendorReportError(
                f"{report.path}: expected the kernels pearl_learner_... of {build.algorithm} on "
                f"{','.join(map(str, build.network))} in {build.copies} copies; {' and '.join(parts)}. Give the "
                "algorithm, the network and the copies that it was compiled for (PEARL_ALGORITHM, PEARL_NETWORK, "
                "PEARL_COPIES)."
            )
        self.kernels = found

    def stage(self, name: str) -> _Pass:
        """The slowest copy of a stage: of one kind they may differ."""
        passes = [self._pass(self.kernels[f"{name}_{copy}"]) for copy in range(self.build.copies)]
        return _Pass(*(max(values) for values in zip(*map(dataclasses.astuple, passes), strict=True)))

    def _pass(self, kernel: KernelReport) -> _Pass:
        batch = loops_of(self.report, kernel, "batches")[-1]
        over_items = [n for n, block in enumerate(batch.blocks) if block.loop and not block.trips]
        if len(over_items) != 1:
            raise VendorReportError(
                f"{self.report.path}: expected one loop over items, whose trip count is not known, inside "
                f"{batch.name} of {kernel.name}; found {len(over_items)}. Its cycles for an item cannot be told."
            )
        (place,) = over_items
        interval, latency = one_pass(batch.blocks[place], known_trips(self.report, kernel))
        before, after = (self.cycles(kernel, part) for part in (batch.blocks[:place], batch.blocks[place + 1 :]))
        return _Pass(before, interval, latency, after)

    def cycles(self, kernel: KernelReport, blocks: Sequence[BlockReport]) -> float:
        """Of blocks one after the other, each once but for loops, all of whose iterations count."""
        trips = known_trips(self.report, kernel)
        total = 0.0
        for block in blocks:
            if block.loop:
                each, once = one_pass(block, trips)
                total += (trips(block) - 1) * each + once
            else:
                total += block.latency_cycles
        return total

    def bridge(self, name: str) -> int:
        """Cycles from one row to the next of a bridge to host memory."""
        kernel = self.kernels[name]
        return one_pass(loops_of(self.report, kernel, "rows")[0], known_trips(self.report, kernel))[0]

    def weights(self, name: str, gradient_blocks: int) -> tuple[float, float, float, float]:
        """Of WU: cycles of streaming weights, of taking the gradient, of its norm, of moving the weights."""
        kernel = self.kernels[name]
        batch = loops_of(self.report, kernel, "batches")[-1]
        loops = [n for n, block in enumerate(batch.blocks) if block.loop]
        place = next((n for n in loops if batch.blocks[n].trips == gradient_blocks), None)
        if place is None:
            found = ", ".join(str(batch.blocks[n].trips or "unknown") for n in loops) or "none"
            raise VendorReportError(
                f"{self.report.path}: expected a loop of {gradient_blocks} trips, over the gradient of its layer, "
                f"inside {batch.name} of {kernel.name}; found trips {found}. Either the network has other widths "
                "(PEARL_NETWORK), or the compiler unrolled the loop, and then its cycles cannot be told."
            )
        after = next((n for n in loops if n > place), len(batch.blocks))
        parts = (batch.blocks[:place], batch.blocks[place : place + 1], batch.blocks[place + 1 : after])
        stream, gradient, norm = (self.cycles(kernel, part) for part in parts)
        return stream, gradient, norm, self.cycles(kernel, batch.blocks[after:])


def _makespan(graph: Mapping[str, tuple[str, ...]], cycles: Mapping[str, tuple[int, float]], items: int) -> int:
    """Cycles until the last of `items` has left the last stage; `cycles` are interval and latency of each.

    As `LearnerPipeline.makespan_cycles`, with latencies of their own.
    """
    into: dict[str, float] = {"": 0.0}
    for stage, producers in graph.items():
        into[stage] = cycles[stage][1] + max(into[producer] for producer in producers)
    onward = dict.fromkeys(into, 0.0)
    for stage, producers in reversed(list(graph.items())):
        for producer in producers:
            onward[producer] = max(onward[producer], cycles[stage][1] + onward[stage])
    return math.ceil(max(into[stage] + onward[stage] + (items - 1) * cycles[stage][0] for stage in graph))


def _after(stages: Mapping[str, tuple[str, ...]], source: str) -> dict[str, tuple[str, ...]]:
    """The graph of stages, whose items come from `source`."""
    return {name: tuple(producer or source for producer in after) for name, after in stages.items()}


def _loss(build: LearnerBuild) -> str:
    """The stage that takes importance weights and gives priorities."""
    return "loss_critic" if build.critics else "loss"


@dataclass(frozen=True)
class _Step:
    """What all of a step takes: cycles beside the items' makespan, and interval and latency of each stage."""

    beside: float
    cycles: Mapping[str, tuple[int, float]]

    @classmethod
    def of(cls, reader: _Reader) -> _Step:
        build = reader.build
        passes = {name: reader.stage(name) for name in build.stages()}
        weights = {name: reader.weights(name, blocks) for name, blocks in build.weight_stages().items()}
        stream = max(*(p.before for p in passes.values()), *(found[0] for found in weights.values()))
        gradient = max(*(p.after for p in passes.values()), *(found[1] for found in weights.values()))
        # Layers that share a vector add up its norm one after the other; then all move at once.
        norms = [
            sum(found[2] for name, found in weights.items() if name.startswith("wu_0_") == first)
            for first in (True, False)
        ]
        moves = max(found[3] for found in weights.values())
        timing = {name: (found.interval, found.latency) for name, found in passes.items()}
        return cls(stream + gradient + max(norms) + moves, timing)


@dataclass(frozen=True)
class ReportedLearner:
    """What a report says of a Learner that takes its batches from the host: cycles of a step, without T_comm."""

    build: LearnerBuild
    frequency_mhz: float
    step_cycles: int

    @classmethod
    def of(cls, report: VendorReport, build: LearnerBuild) -> ReportedLearner:
        """What `report` says of the Learner of `build`.

        The bridges to host memory count by their intervals. Raises VendorReportError for a report on another design,
        and for one that does not tell the cycles, and then says of which loop; CapacityError where the design does not
        fit the part that it was compiled for.
        """
        if any(_REPLAY_KERNEL.search(kernel.name) for kernel in report.kernels):
            raise VendorReportError(
                f"{report.path}: expected the kernels of a Learner alone (PEARL_DESIGN=learner); found a Replay "
                "Manager's. Import it with import_report, or with import_training where a Learner is joined to it."
            )
        frequency_mhz = clock_of(report, "fewer copies or a smaller network (PEARL_COPIES, PEARL_NETWORK)")
        reader = _Reader(report, build, ("submit", "resolve"))
        step = _Step.of(reader)
        graph = {"submit": ("",), **_after(build.stages(), "submit"), "resolve": (_loss(build),)}
        cycles = {name: (build.copies * reader.bridge(name), 0.0) for name in ("submit", "resolve")}
        return cls(
            build, frequency_mhz, math.ceil(step.beside) + _makespan(graph, {**step.cycles, **cycles}, build.items)
        )

    def cell(self) -> LearnerCell:
        """T_Learner of one iteration, without T_comm."""
        step = imported(self.step_cycles / self.frequency_mhz)
        return LearnerCell(step, sub_batches=self.build.copies, implementation=FPGA_LEARNER)

    def measurements(self) -> Mapping[str, Measurement]:
        """The store's form: a cycle and a step, in microseconds."""
        return {
            "cycle": imported(1 / self.frequency_mhz),
            "learner_step": imported(self.step_cycles / self.frequency_mhz),
        }

    @classmethod
    def from_measurements(cls, build: LearnerBuild, found: Mapping[str, Measurement]) -> ReportedLearner | None:
        """What `measurements` wrote; None where it is something else."""
        cycle_us = cycle_in(found)
        if cycle_us is None or "learner_step" not in found:
            return None
        return cls(build, 1 / cycle_us, round(found["learner_step"].value_us / cycle_us))

    def __str__(self) -> str:
        return f"DP {self.build.copies}, {self.step_cycles:,} cycles a step, {self.frequency_mhz:,.1f} MHz"


@dataclass(frozen=True)
class ReportedTraining:
    """What a report says of both on one FPGA: the Learner's step, and the cycles by which sampling delays it."""

    learner: ReportedLearner
    replay: ReportedReplay
    sample_cycles: int

    @classmethod
    def of(cls, report: VendorReport, tree: ReplayTree, build: LearnerBuild) -> ReportedTraining:
        """What `report` says of the Replay Manager of `tree` joined to the Learner of `build`.

        Raises what `ReportedReplay.of` and `ReportedLearner.of` raise.
        """
        replay = ReportedReplay.of(report, tree)
        reader = _Reader(report, build, ("finish",))
        step = _Step.of(reader)
        alone = _makespan(build.stages(), step.cycles, build.items)
        # Items go on as they are sampled; their weights, which depend on all of them, come when the last one is.
        (collect,) = (kernel for kernel in report.kernels if "pearl_replay_collect" in kernel.name)
        loops = loops_of(report, collect, "requests")
        if len(loops) < 3:
            raise VendorReportError(
                f"{report.path}: expected three loops in {collect.name}, over requests, over weights, and over weights "
                f"on their way to the Learner; found {len(loops)}. When weights arrive cannot be told."
            )
        passes = [one_pass(loop, known_trips(report, collect)) for loop in loops[1:]]
        weighing = sum((build.batch_size - 1) * each + once for each, once in passes[:-1])
        sampled = replay.sampling.cycles(tree.depth, build.batch_size)
        first = replay.sampling.cycles(tree.depth, 1)
        loss = _loss(build)
        graph: dict[str, tuple[str, ...]] = {"sampled": ("",), "weights": ("",), **_after(build.stages(), "sampled")}
        graph[loss] = (*graph[loss], "weights")
        cycles = {
            **step.cycles,
            "sampled": (build.copies * replay.sampling.interval_cycles, float(first)),
            "weights": (build.copies * passes[-1][0], sampled + weighing + passes[-1][1]),
        }
        joined = _makespan(graph, cycles, build.items)
        learner = ReportedLearner(build, replay.frequency_mhz, math.ceil(step.beside) + alone)
        return cls(learner, replay, joined - alone)

    def cell(self, insertions: int) -> PairCell:
        """The pair's times in one iteration: sampling by what it delays the Learner."""
        replay = self.replay.cell(self.learner.build.batch_size, insertions)
        exposed = imported(self.replay.microseconds(self.sample_cycles))
        return PairCell(dataclasses.replace(replay, sample=exposed), self.learner.cell())

    def measurements(self) -> Mapping[str, Measurement]:
        """The store's form: those of both, and what sampling delays, in microseconds."""
        exposed = imported(self.replay.microseconds(self.sample_cycles))
        return {**self.replay.measurements(), **self.learner.measurements(), "sample_exposed": exposed}

    @classmethod
    def from_measurements(
        cls, tree: ReplayTree, build: LearnerBuild, found: Mapping[str, Measurement]
    ) -> ReportedTraining | None:
        """What `measurements` wrote; None where it is something else."""
        learner = ReportedLearner.from_measurements(build, found)
        replay = ReportedReplay.from_measurements(tree, found)
        if learner is None or replay is None or "sample_exposed" not in found:
            return None
        return cls(learner, replay, round(found["sample_exposed"].value_us * replay.frequency_mhz))

    def __str__(self) -> str:
        return f"{self.learner}, sampling delays it by {self.sample_cycles:,} cycles; {self.replay}"
