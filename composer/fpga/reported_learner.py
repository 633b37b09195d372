"""T_Learner in cycles by a vendor's report, of a Learner on an FPGA, alone or joined to the Replay Manager.

A step has four phases: the weights stream to the copies, the items of a sub-batch stream through the stages, the
gradients stream to WU, and WU moves the weights. The items take the longest path through the graph of stages, as in
`composer.fpga.learner_pipeline`.
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

from composer.fpga.learner_pipeline import makespan_cycles
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

# The algorithms that kernels/sycl/board generates programs for, by what their targets bootstrap from.
_ALGORITHMS: Mapping[Bootstrap | None, Algorithm] = {
    "largest_value": "dqn",
    "target_action": "ddpg",
    "disturbed_target_action": "td3",
}
_BLOCK = 16  # values in one word of a pipe: kBlock of pearl/fpga_learner.hpp
_KERNEL = re.compile(r"pearl_learner_([0-9a-z_]+?)(?:_kernel|$)")
_REPLAY_KERNEL = re.compile(r"pearl_replay_(?:level[0-9]+|feed|collect)")
_SCALING = frozenset(("flatten", "sub", "truediv", "mul", "add"))  # layers around an actor's network


@dataclass(frozen=True)
class LearnerBuild:
    """How a Learner was compiled: PEARL_ALGORITHM, PEARL_NETWORK, PEARL_BATCH, PEARL_COPIES, PEARL_ACTIVATION.

    A report does not hold these options. Raises ConfigurationError for options without a program.
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
        """The build for `trainer`; None for a trainer without a program."""
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
        if acting is None or (critic is not None and not _matches_actor(critic, *acting)):
            return None
        return cls(algorithm, acting[0], batch_size, copies, acting[1])

    @property
    def critics(self) -> int:
        """Count of critics; 0 for DQN."""
        return {"ddpg": 1, "td3": 2}.get(self.algorithm, 0)

    @property
    def networks(self) -> tuple[tuple[int, ...], ...]:
        """Widths of each trained network: of DQN's, or of the actor and then the critics."""
        critic = (self.network[0] + self.network[-1], *self.network[1:-1], 1)
        return (self.network, *(critic for _ in range(self.critics)))

    @property
    def items(self) -> int:
        """PI: the most items of one copy."""
        return -(-self.batch_size // self.copies)

    @property
    def signature(self) -> str:
        """Everything but batch and copies, as part of a calibration key."""
        return f"{self.algorithm}:{self.activation}:{'-'.join(map(str, self.network))}"

    def stages(self) -> Mapping[str, tuple[str, ...]]:
        """The producers of each stage of one copy, without WU; "" stands for the item itself."""
        return dict(_dqn(self) if not self.critics else _actor_critic(self))

    def weight_stages(self) -> Mapping[str, int]:
        """The WU stages, each with the number of blocks of its gradient."""
        return {
            f"wu_{network}_{layer}": (outputs * _padded(inputs) + _padded(outputs)) // _BLOCK
            for network, widths in enumerate(self.networks)
            for layer, (inputs, outputs) in enumerate(itertools.pairwise(widths), 1)
        }


def _padded(width: int) -> int:
    return -(-width // _BLOCK) * _BLOCK


def _chain(
    module: object, input_shape: Sequence[int], ignored: frozenset[str]
) -> tuple[tuple[int, ...], Activation] | None:
    """Widths and activation of linear layers with one activation after each but the last; None for other networks."""
    network = extract_network("policy", module, tuple(input_shape))  # type: ignore[arg-type]
    layers = [layer for layer in network.layers if layer.kind not in ignored]
    if ignored == _SCALING and layers and layers[-1].kind == "tanh":
        del layers[-1]  # LOSS applies it
    between = {layer.kind for layer in layers[1::2]} or {"relu"}
    if any(layer.kind != "linear" for layer in layers[::2]) or len(between) > 1 or not between <= {"relu", "tanh"}:
        return None
    if len(layers) % 2 == 0:
        return None
    widths = (math.prod(layers[0].in_shape), *(math.prod(layer.out_shape) for layer in layers[::2]))
    return widths, "relu" if "relu" in between else "tanh"


def _matches_actor(critic: nn.Module, widths: tuple[int, ...], activation: Activation) -> bool:
    """Whether a critic has the same hidden layers as the actor with `widths`."""
    outputs = [module.out_features for module in critic.modules() if isinstance(module, nn.Linear)]
    activations = [module for module in critic.modules() if isinstance(module, nn.ReLU | nn.Tanh)]
    wanted = nn.ReLU if activation == "relu" else nn.Tanh
    return outputs == [*widths[1:-1], 1] and all(isinstance(module, wanted) for module in activations)


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


# --- from the report -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Pass:
    """Cycles of a stage: of weights or clearing before its items, of each item, and of gradients after its items."""

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
                for what, names in (("are missing", expected - set(found)), ("are unexpected", set(found) - expected))
                if names
            ] or ["some occur twice"]
            raise VendorReportError(
                f"{report.path}: expected the kernels pearl_learner_... of {build.algorithm} on "
                f"{','.join(map(str, build.network))} in {build.copies} copies; {' and '.join(parts)}. Give the "
                "algorithm, the network and the copies that it was compiled for (PEARL_ALGORITHM, PEARL_NETWORK, "
                "PEARL_COPIES)."
            )
        self.kernels = found

    def stage(self, name: str) -> _Pass:
        """The slowest of a stage's copies, for each phase."""
        passes = [self._pass(self.kernels[f"{name}_{copy}"]) for copy in range(self.build.copies)]
        return _Pass(*(max(values) for values in zip(*map(dataclasses.astuple, passes), strict=True)))

    def _pass(self, kernel: KernelReport) -> _Pass:
        batch = loops_of(self.report, kernel, "batches")[-1]
        over_items = [n for n, block in enumerate(batch.blocks) if block.loop and not block.trips]
        if len(over_items) != 1:
            raise VendorReportError(
                f"{self.report.path}: expected one loop over items, whose trip count is not known, inside "
                f"{batch.name} of {kernel.name}; found {len(over_items)}. Its cycles for an item cannot be determined."
            )
        (place,) = over_items
        interval, latency = one_pass(batch.blocks[place], known_trips(self.report, kernel))
        before, after = (self.cycles(kernel, part) for part in (batch.blocks[:place], batch.blocks[place + 1 :]))
        return _Pass(before, interval, latency, after)

    def cycles(self, kernel: KernelReport, blocks: Sequence[BlockReport]) -> float:
        """Cycles of blocks in a row, with all iterations of loops."""
        once = BlockReport("", loop=True, ii=None, latency_cycles=0.0, trips=1, fmax_mhz=0.0, blocks=tuple(blocks))
        return one_pass(once, known_trips(self.report, kernel))[1]

    def bridge(self, name: str) -> int:
        """Cycles from one row to the next in a bridge to host memory."""
        kernel = self.kernels[name]
        return one_pass(loops_of(self.report, kernel, "rows")[0], known_trips(self.report, kernel))[0]

    def weights(self, name: str, gradient_blocks: int) -> tuple[float, float, float, float]:
        """Cycles of a WU stage: streaming the weights, receiving the gradient, its norm, and moving the weights."""
        kernel = self.kernels[name]
        batch = loops_of(self.report, kernel, "batches")[-1]
        loops = [n for n, block in enumerate(batch.blocks) if block.loop]
        place = next((n for n in loops if batch.blocks[n].trips == gradient_blocks), None)
        if place is None:
            found = ", ".join(str(batch.blocks[n].trips or "unknown") for n in loops) or "none"
            raise VendorReportError(
                f"{self.report.path}: expected a loop of {gradient_blocks} trips, over the gradient of its layer, "
                f"inside {batch.name} of {kernel.name}; found trips {found}. Either the network has other widths "
                "(PEARL_NETWORK), or the compiler unrolled the loop: then its cycles cannot be determined."
            )
        after = next((n for n in loops if n > place), len(batch.blocks))
        parts = (batch.blocks[:place], batch.blocks[place : place + 1], batch.blocks[place + 1 : after])
        stream, gradient, norm = (self.cycles(kernel, part) for part in parts)
        return stream, gradient, norm, self.cycles(kernel, batch.blocks[after:])


def _after(stages: Mapping[str, tuple[str, ...]], source: str) -> dict[str, tuple[str, ...]]:
    """The graph of stages with `source` as the producer of the items."""
    return {name: tuple(producer or source for producer in after) for name, after in stages.items()}


def _loss(build: LearnerBuild) -> str:
    """The stage that receives importance weights and sends priorities."""
    return "loss_critic" if build.critics else "loss"


@dataclass(frozen=True)
class _Step:
    """Cycles of a step before and after its items, and interval and latency of each stage."""

    around_items: float
    timing: Mapping[str, tuple[int, float]]

    @classmethod
    def of(cls, reader: _Reader) -> _Step:
        build = reader.build
        passes = {name: reader.stage(name) for name in build.stages()}
        weights = {name: reader.weights(name, blocks) for name, blocks in build.weight_stages().items()}
        stream = max(*(p.before for p in passes.values()), *(found[0] for found in weights.values()))
        gradient = max(*(p.after for p in passes.values()), *(found[1] for found in weights.values()))
        # Layers of the same gradient vector sum up its norm one after the other; then all move at once.
        norms = [
            sum(found[2] for name, found in weights.items() if name.startswith("wu_0_") == first)
            for first in (True, False)
        ]
        moves = max(found[3] for found in weights.values())
        timing = {name: (found.interval, found.latency) for name, found in passes.items()}
        return cls(stream + gradient + max(norms) + moves, timing)


@dataclass(frozen=True)
class ReportedLearner:
    """Cycles of a step by a report, of a Learner that gets its batches from the host; without T_comm."""

    build: LearnerBuild
    frequency_mhz: float
    step_cycles: int

    @classmethod
    def of(cls, report: VendorReport, build: LearnerBuild) -> ReportedLearner:
        """Read the Learner of `build`.

        Bridges to host memory count by their intervals. Raises VendorReportError for a report on another design, and
        for a report without the cycles of a loop, which it names; CapacityError where the design does not fit the part
        that it was compiled for.
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
        bridges = {name: (build.copies * reader.bridge(name), 0.0) for name in ("submit", "resolve")}
        items = makespan_cycles(graph, {**step.timing, **bridges}, build.items, source="")
        return cls(build, frequency_mhz, math.ceil(step.around_items) + items)

    def cell(self) -> LearnerCell:
        """T_Learner of one iteration, without T_comm."""
        step = imported(self.step_cycles / self.frequency_mhz)
        return LearnerCell(step, sub_batches=self.build.copies, implementation=FPGA_LEARNER)

    def measurements(self) -> Mapping[str, Measurement]:
        """What the calibration store keeps: a cycle and a step, in microseconds."""
        return {"cycle": imported(1 / self.frequency_mhz), "learner_step": self.cell().step}

    @classmethod
    def from_measurements(cls, build: LearnerBuild, found: Mapping[str, Measurement]) -> ReportedLearner | None:
        """The inverse of `measurements`; None for other measurements."""
        cycle_us = cycle_in(found)
        if cycle_us is None or "learner_step" not in found:
            return None
        return cls(build, 1 / cycle_us, round(found["learner_step"].value_us / cycle_us))

    def __str__(self) -> str:
        return f"DP {self.build.copies}, {self.step_cycles:,} cycles a step, {self.frequency_mhz:,.1f} MHz"


@dataclass(frozen=True)
class ReportedTraining:
    """Both primitives on one FPGA by a report: the Learner's step, and the cycles by which sampling delays it."""

    learner: ReportedLearner
    replay: ReportedReplay
    sample_cycles: int

    @classmethod
    def of(cls, report: VendorReport, tree: ReplayTree, build: LearnerBuild) -> ReportedTraining:
        """Read the Replay Manager of `tree` joined to the Learner of `build`.

        Raises what `ReportedReplay.of` and `ReportedLearner.of` raise.
        """
        replay = ReportedReplay.of(report, tree)
        reader = _Reader(report, build, ("finish",))
        step = _Step.of(reader)
        alone = makespan_cycles(build.stages(), step.timing, build.items, source="")
        # An item moves on as soon as it is sampled. Importance weights depend on all items: they come after the last.
        (collect,) = (kernel for kernel in report.kernels if "pearl_replay_collect" in kernel.name)
        loops = loops_of(report, collect, "requests")
        if len(loops) < 3:
            raise VendorReportError(
                f"{report.path}: expected three loops in {collect.name}, over requests, over weights, and over weights "
                f"on their way to the Learner; found {len(loops)}. The time when weights arrive cannot be determined."
            )
        passes = [one_pass(loop, known_trips(report, collect)) for loop in loops[1:]]
        weighing = sum((build.batch_size - 1) * each + once for each, once in passes[:-1])
        sampled = replay.sampling.cycles(tree.depth, build.batch_size)
        first = replay.sampling.cycles(tree.depth, 1)
        loss = _loss(build)
        graph: dict[str, tuple[str, ...]] = {"sampled": ("",), "weights": ("",), **_after(build.stages(), "sampled")}
        graph[loss] = (*graph[loss], "weights")
        timing = {
            **step.timing,
            "sampled": (build.copies * replay.sampling.interval_cycles, float(first)),
            "weights": (build.copies * passes[-1][0], sampled + weighing + passes[-1][1]),
        }
        joined = makespan_cycles(graph, timing, build.items, source="")
        learner = ReportedLearner(build, replay.frequency_mhz, math.ceil(step.around_items) + alone)
        return cls(learner, replay, joined - alone)

    def cell(self, insertions: int) -> PairCell:
        """The pair's times in one iteration; sampling costs the time by which it delays the Learner."""
        replay = self.replay.cell(self.learner.build.batch_size, insertions)
        return PairCell(dataclasses.replace(replay, sample=self._delay), self.learner.cell())

    def measurements(self) -> Mapping[str, Measurement]:
        """What the calibration store keeps: the measurements of both, and the delay by sampling in microseconds."""
        return {**self.replay.measurements(), **self.learner.measurements(), "sample_exposed": self._delay}

    @property
    def _delay(self) -> Measurement:
        return imported(self.replay.microseconds(self.sample_cycles))

    @classmethod
    def from_measurements(
        cls, tree: ReplayTree, build: LearnerBuild, found: Mapping[str, Measurement]
    ) -> ReportedTraining | None:
        """The inverse of `measurements`; None for other measurements."""
        learner = ReportedLearner.from_measurements(build, found)
        replay = ReportedReplay.from_measurements(tree, found)
        if learner is None or replay is None or "sample_exposed" not in found:
            return None
        return cls(learner, replay, round(found["sample_exposed"].value_us * replay.frequency_mhz))

    def __str__(self) -> str:
        return f"{self.learner}, sampling delays it by {self.sample_cycles:,} cycles; {self.replay}"
