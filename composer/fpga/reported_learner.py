"""T_Learner in cycles by a vendor's report, of a Learner on an FPGA, alone or joined to the Replay Manager.

The report states the cycles of each kernel; those of a step follow from them as in `composer.fpga.step_timing`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from composer.fpga.learner_program import BLOCK, LearnerProgram, chain
from composer.fpga.model import ReplayTree
from composer.fpga.reported_replay import ReportedReplay
from composer.fpga.reported_stages import clock_of, cycle_in, imported, known_trips, loops_of, one_pass
from composer.fpga.step_timing import JoinedStep, StagePass, StepTiming, WeighingPass, WeightPass
from composer.fpga.vendor_report import BlockReport, KernelReport, VendorReport
from composer.matrix import LearnerCell, PairCell
from composer.measurement import Measurement
from composer.modelled_rows import FPGA_LEARNER
from pearl.algorithms.trainer import Trainer
from pearl.algorithms.update_rule import Bootstrap, update_rule_of
from pearl.errors import ConfigurationError, VendorReportError
from pearl.lazy_torch import nn
from pearl.learner.extract import extract_network

Algorithm: TypeAlias = Literal["dqn", "double_dqn", "ddpg", "td3"]
Activation: TypeAlias = Literal["relu", "tanh"]

# The algorithms that kernels/sycl/board generates programs for, by what their targets bootstrap from.
_ALGORITHMS: Mapping[Bootstrap | None, Algorithm] = {
    "largest_value": "dqn",
    "target_action": "ddpg",
    "disturbed_target_action": "td3",
}
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
        if rule is None or rule.quantiles or rule.bootstrap not in _ALGORITHMS:
            return None
        algorithm = "double_dqn" if rule.double else _ALGORITHMS[rule.bootstrap]
        acting, critic = None, None
        if rule.actor is None:
            (network,) = rule.critics
            acting = _chain(network.in_torch, network.input_shape, frozenset(("flatten",)))
        elif isinstance(trainer, Trainer):
            acting = _chain(rule.policy.module, trainer.input_shape, _SCALING)
            critic = rule.critics[0].in_torch
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
    def signature(self) -> str:
        """Everything but batch and copies, as part of a calibration key."""
        return f"{self.algorithm}:{self.activation}:{'-'.join(map(str, self.network))}"

    @functools.cached_property
    def program(self) -> LearnerProgram:
        """The stages that the recipe generates."""
        return LearnerProgram(
            tuple(chain(*widths) for widths in self.networks), self.network[-1], self.algorithm == "double_dqn"
        )


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


# --- from the report -------------------------------------------------------------------------------------------------


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
        expected = {f"{stage}_{copy}" for stage in build.program.stages for copy in copies}
        expected |= {*build.program.weight_stages, *bridges}
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

    def step(self) -> StepTiming:
        """The cycles of all stages and WUs."""
        build, program = self.build, self.build.program
        weights = {
            name: self.weights(name, program.networks[network][layer].words // BLOCK)
            for name, (network, layer) in program.weight_stages.items()
        }
        stages = {name: self.stage(name) for name in program.stages}
        return StepTiming(program, build.batch_size, build.copies, stages, weights)

    def stage(self, name: str) -> StagePass:
        """The slowest of a stage's copies, for each phase."""
        passes = [self._pass(self.kernels[f"{name}_{copy}"]) for copy in range(self.build.copies)]
        return StagePass(*(max(values) for values in zip(*map(dataclasses.astuple, passes), strict=True)))

    def _pass(self, kernel: KernelReport) -> StagePass:
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
        return StagePass(before, interval, latency, after)

    def cycles(self, kernel: KernelReport, blocks: Sequence[BlockReport]) -> float:
        """Cycles of blocks in a row, with all iterations of loops."""
        once = BlockReport("", loop=True, ii=None, latency_cycles=0.0, trips=1, fmax_mhz=0.0, blocks=tuple(blocks))
        return one_pass(once, known_trips(self.report, kernel))[1]

    def bridge(self, name: str) -> int:
        """Cycles from one row to the next in a bridge to host memory."""
        kernel = self.kernels[name]
        return one_pass(loops_of(self.report, kernel, "rows")[0], known_trips(self.report, kernel))[0]

    def weights(self, name: str, gradient_blocks: int) -> WeightPass:
        """The phases of a WU stage, whose gradient has `gradient_blocks` blocks."""
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
        return WeightPass(stream, gradient, norm, self.cycles(kernel, batch.blocks[after:]))


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
        return cls(build, frequency_mhz, reader.step().alone(reader.bridge("submit"), reader.bridge("resolve")))

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
    """Both primitives on one FPGA by a report: an iteration's cycles."""

    build: LearnerBuild
    replay: ReportedReplay
    joined: JoinedStep

    @classmethod
    def of(cls, report: VendorReport, tree: ReplayTree, build: LearnerBuild) -> ReportedTraining:
        """Read the Replay Manager of `tree` joined to the Learner of `build`.

        Raises what `ReportedReplay.of` and `ReportedLearner.of` raise.
        """
        replay = ReportedReplay.of(report, tree)
        reader = _Reader(report, build, ("finish",))
        collect, feed = (
            next(kernel for kernel in report.kernels if f"pearl_replay_{name}" in kernel.name)
            for name in ("collect", "feed")
        )
        loops = loops_of(report, collect, "requests")
        if len(loops) < 3:
            raise VendorReportError(
                f"{report.path}: expected three loops in {collect.name}, over requests, over weights, and over weights "
                f"on their way to the Learner; found {len(loops)}. The time when weights arrive cannot be determined."
            )
        passes = [one_pass(loop, known_trips(report, collect)) for loop in loops[1:]]
        weighing = sum((build.batch_size - 1) * each + once for each, once in passes[:-1])
        interval, latency = passes[-1]
        returns, _ = one_pass(loops_of(report, feed, "results")[0], known_trips(report, feed))
        joined = reader.step().joined(replay.timing, tree.depth, WeighingPass(weighing + latency, interval), returns)
        return cls(build, replay, joined)

    def cell(self, insertions: int) -> PairCell:
        """The pair's times in one iteration; sampling and the update cost what they add to the Learner's step."""
        replay = self.replay.cell(self.build.batch_size, insertions)
        sample, step, update = self._times.values()
        return PairCell(
            dataclasses.replace(replay, sample=sample, update=update),
            LearnerCell(step, sub_batches=self.build.copies, implementation=FPGA_LEARNER),
            joined=True,
        )

    def measurements(self) -> Mapping[str, Measurement]:
        """What the calibration store keeps: the Replay Manager's times, and those of an iteration in microseconds."""
        return {**self.replay.measurements(), **self._times}

    @property
    def _times(self) -> dict[str, Measurement]:
        cycles = {
            "sample_exposed": self.joined.sampling,
            "learner_step": self.joined.learner,
            "update_exposed": self.joined.update,
        }
        return {name: imported(self.replay.microseconds(count)) for name, count in cycles.items()}

    @classmethod
    def from_measurements(
        cls, tree: ReplayTree, build: LearnerBuild, found: Mapping[str, Measurement]
    ) -> ReportedTraining | None:
        """The inverse of `measurements`; None for other measurements."""
        replay = ReportedReplay.from_measurements(tree, found)
        names = ("learner_step", "sample_exposed", "update_exposed")
        if replay is None or not set(names) <= set(found):
            return None
        return cls(build, replay, JoinedStep(*(round(found[n].value_us * replay.frequency_mhz) for n in names)))

    def __str__(self) -> str:
        return (
            f"DP {self.build.copies}, {self.joined.learner:,} cycles a step, sampling delays it by "
            f"{self.joined.sampling:,} cycles; {self.replay}"
        )
