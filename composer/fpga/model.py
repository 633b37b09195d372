"""The performance and resource model of an FPGA: PEARL Eq. 2 to 6, and the CF'22 paper's design space exploration.

The model gives cycles; microseconds are cycles / clock_mhz. T_comm is `Link.transfer_us` of `composer.platform`, from
the connection file. Algorithm 1 adds it to the cells (Eq. 7), so the cells leave it out. Some printed equations differ
from the pipeline in the papers' drawings. Then the printed form has a name with `printed`, and the name without it
stands for the pipeline, which for the Replay Manager is the one that `kernels/rtl` generates. `docs/fpga_model.md`
compares both with the numbers in the papers.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from composer.fpga.learner_pipeline import LearnerPipeline
from composer.platform import Link
from pearl.backends import backend_of
from pearl.backends.fpga.tree_cells import estimate, memory_blocks
from pearl.backends.fpga.tree_shape import LANES_MAX, LEAF_BITS, ROOT_BITS_MAX, LevelMemory, TreeShape, eq4, eq5
from pearl.backends.model.device import FpgaParameters, model_parameters
from pearl.devices.description import Device
from pearl.errors import CapacityError, ConfigurationError

Constraint: TypeAlias = Literal[
    "DSP blocks", "on-chip memory", "LUTs", "registers", "the limit of one unit", "the work"
]

FANOUTS = tuple(1 << k for k in range(1, 9))  # 2 to 256

_WORD_BYTES = 4  # float32
_BLOCK_WORDS = 512  # float32 values in one block: an M20K (512 x 40) or half a BRAM36 (512 x 36)
# Logic per DSP block: multiplexers, addresses, FIFOs and all else in a design. From the DQN of CF'22 Table 2: 346 K
# LUTs and 459 K registers for 1,600 DSP blocks.
LUTS_PER_DSP, REGISTERS_PER_DSP = 216, 287
_REGISTERS_PER_LUT = 2  # in every part of the papers
_CONSTRAINTS: tuple[Constraint, ...] = ("DSP blocks", "on-chip memory", "LUTs", "registers")  # fields of Resources


@dataclass(frozen=True)
class Resources:
    """Resources of a design or a part; `sram_kb` in KB of 10^3 bytes. Infinity: not limited by the part."""

    dsps: float
    sram_kb: float
    luts: float = 0.0
    registers: float = 0.0

    def __add__(self, other: Resources) -> Resources:
        return Resources(*(a + b for a, b in zip(self.values, other.values, strict=True)))

    def __sub__(self, other: Resources) -> Resources:
        return Resources(*(max(0.0, a - b) for a, b in zip(self.values, other.values, strict=True)))

    def scaled(self, share: float) -> Resources:
        """A share of each resource."""
        return Resources(*(value * share for value in self.values))

    @property
    def values(self) -> tuple[float, float, float, float]:
        """The four resources in order."""
        return self.dsps, self.sram_kb, self.luts, self.registers

    def exceeding(self, available: Resources) -> tuple[Constraint, ...]:
        """The resources of which there are too few in `available`, the scarcest first."""
        over = {
            name: need / have if have else math.inf
            for name, need, have in zip(_CONSTRAINTS, self.values, available.values, strict=True)
            if need > have
        }
        return tuple(sorted(over, key=lambda name: -over[name]))


_INTEL = FpgaParameters()


@dataclass(frozen=True)
class FpgaPart:
    """An FPGA in the equations: its resources, its clock in MHz, and the parameters of its family."""

    name: str
    available: Resources
    clock_mhz: float
    parameters: FpgaParameters = _INTEL

    def __post_init__(self) -> None:
        if not (0 < self.clock_mhz < math.inf and self.available.dsps >= 1 and self.available.sram_kb > 0):
            raise ConfigurationError(
                f"The FPGA {self.name} needs DSP blocks, on-chip memory and a clock above 0; found "
                f"{self.available.dsps:g}, {self.available.sram_kb:g} KB and {self.clock_mhz:g} MHz."
            )

    @classmethod
    def from_device(cls, device: Device) -> FpgaPart:
        """The part of a device row of kind fpga; empty `luts` do not limit a design.

        Raises ConfigurationError that names the columns to fill.
        """
        missing = missing_columns(device)
        if missing:
            raise ConfigurationError(f"{device.name} states no {', '.join(missing)}: fill them in the device CSV.")
        parameters = model_parameters("fpga", backend_of(device).estimator_parameters(device))
        assert isinstance(parameters, FpgaParameters)
        luts = float(device.luts or math.inf)
        available = Resources(float(device.dsp or 0), float(device.sram_kb or 0), luts, luts * _REGISTERS_PER_LUT)
        return cls(device.name, available, float(device.clock_mhz or 0), parameters)

    def dies(self, count: int) -> FpgaPart:
        """`count` of its dies (super logic regions: CF'22 Table 2, "# SLR Constraint"), all of equal size."""
        if not 1 <= count <= self.parameters.dies:
            raise ConfigurationError(f"{self.name} has {self.parameters.dies} dies; found {count}.")
        return dataclasses.replace(self, available=self.available.scaled(count / self.parameters.dies))

    def without(self, used: Resources) -> FpgaPart | None:
        """The rest of the part after `used`; None where nothing is left."""
        left = self.available - used
        return dataclasses.replace(self, available=left) if left.dsps >= 1 and left.sram_kb > 0 else None

    def microseconds(self, cycles: float) -> float:
        """How long `cycles` take."""
        return cycles / self.clock_mhz

    def request_us(self, cycles: float, link: Link, nbytes: float) -> float:
        """All of PEARL Eq. 4 or 5: `cycles`, and T_comm of a request of `nbytes` over `link` of the connection file.

        T_comm is latency + size / bandwidth (PEARL Sec. VI-A), hop by hop. Cells leave it out, as Eq. 7 adds it.
        """
        return self.microseconds(cycles) + link.transfer_us(nbytes)

    @property
    def block_kb(self) -> float:
        """KB of one block of on-chip memory."""
        return self.parameters.block_kbit * 1024 / 8000


def missing_columns(device: Device) -> tuple[str, ...]:
    """The columns of the device CSV that the model needs and the row leaves empty or 0."""
    return tuple(column for column in ("dsp", "sram_kb", "clock_mhz") if not getattr(device, column))


# --- the Replay Manager ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReplayTree:
    """The sum tree on chip: PEARL Sec. V-A.2, CF'22 Sec. 3.1, one memory and one pipeline stage per level.

    `lanes` siblings share one word of memory and are read at once; the papers read them one by one (1 lane). With a
    `leaf_copy` before the root, which turns a new priority into a difference, an update takes one pass; without it, a
    retrieval pass comes first. Raises ConfigurationError for a fanout that is no power of two from 2 to 256, for lanes
    that are no power of two up to the fanout and 32, and for a tree whose total needs more than 64 bits.
    """

    capacity: int
    fanout: int
    lanes: int = 1
    leaf_copy: bool = False

    def __post_init__(self) -> None:
        if self.fanout not in FANOUTS:
            raise ConfigurationError(f"Fanout must be a power of two from 2 to 256; found {self.fanout!r}. Try 16.")
        if type(self.capacity) is not int or self.capacity < 1:
            raise ConfigurationError(
                f"A tree's capacity must be a whole number of at least 1; found {self.capacity!r}."
            )
        step = self.fanout.bit_length() - 1
        most = (ROOT_BITS_MAX - LEAF_BITS) // step * step
        if self.capacity > 2**most:
            raise ConfigurationError(
                f"A tree of {self.capacity:,} leaves needs more than {ROOT_BITS_MAX} bits for its total; with fanout "
                f"{self.fanout} at most 2**{most} leaves are supported."
            )
        if self.lanes < 1:
            raise ConfigurationError(f"A tree reads at least one sibling at once; found {self.lanes!r} lanes.")
        _ = self.shape  # raises for a wrong count of lanes

    @classmethod
    def choices(cls, capacity: int, fanout: int) -> tuple[ReplayTree, ...]:
        """All trees with this fanout: every count of lanes, with and without the copy of the leaves."""
        counts = [1 << k for k in range(min(fanout, LANES_MAX).bit_length())]
        return tuple(cls(capacity, fanout, lanes, copy) for lanes in counts for copy in (False, True))

    @functools.cached_property
    def shape(self) -> TreeShape:
        """The pipeline in hardware, with one memory access per cycle; it gives the cycles of requests."""
        # One leaf needs a level too, as two do.
        return TreeShape.holding(max(self.capacity, 2), self.fanout, self.lanes, assigns=self.leaf_copy)

    @property
    def depth(self) -> int:
        """D of Eq. 4 and 5: the levels below the root, at least 1."""
        return self.shape.depth

    @property
    def root_bits(self) -> int:
        """Bits of the total: log2(fanout) more than one level below (CF'22 Sec. 3.1)."""
        return self.shape.bits(0)

    @property
    def levels(self) -> tuple[LevelMemory, ...]:
        """The memories from the root's children to the leaves; groups of siblings are always whole."""
        return self.shape.memories

    def level_kb(self, part: FpgaPart) -> tuple[float, ...]:
        """KB of on-chip memory of each level, in whole blocks of `part`; 0 for levels of at most 64 words, in LUTs."""
        found = []
        for level in self.levels:
            bits = level.lanes * level.bits
            _, pairs, _ = memory_blocks(bits, level.rows, block_kbit=part.parameters.block_kbit)
            found.append(2 * pairs * part.block_kb)
        return tuple(found)

    def resources(self, part: FpgaPart) -> Resources:
        """The Replay Manager's resources on `part`. Integers need no DSP blocks; CF'22 Table 2 lists the Learner's.

        LUTs and registers are counted as on UltraScale+.
        """
        cells = estimate(self.shape, block_kbit=part.parameters.block_kbit)
        return Resources(cells.dsps, 2 * cells.block_rams * part.block_kb, cells.luts, cells.flip_flops)

    def fits(self, part: FpgaPart) -> bool:
        """Whether `part` holds it."""
        return not self.resources(part).exceeding(part.available)

    def check_fits(self, part: FpgaPart) -> None:
        """Raise CapacityError unless `part` holds the tree; the message says what is missing and what would fit."""
        needed = self.resources(part)
        over = needed.exceeding(part.available)
        if not over:
            return
        fits, too_many = 0, self.capacity
        while too_many - fits > 1:
            middle = (fits + too_many) // 2
            small = dataclasses.replace(self, capacity=middle)
            fits, too_many = (middle, too_many) if small.fits(part) else (fits, middle)
        advice = f"At most {fits:,} fit" if fits else "Not even one fits"
        raise CapacityError(
            f"A sum tree of {self.capacity:,} priorities with fanout {self.fanout} needs {kb(needed)} of on-chip "
            f"memory; {part.name} has {kb(part.available)}: {more(needed, part.available, over[0])}. {advice}."
        )

    def sampling_cycles_printed(self, batch_size: int) -> int:
        """PEARL Eq. 4 without T_comm: 2 * F * (BS + D)."""
        return eq4(batch_size, self.depth, self.fanout)

    def update_cycles_printed(self, batch_size: int) -> int:
        """PEARL Eq. 5 without T_comm: 2 * (BS + D), for updates and for insertions."""
        return eq5(batch_size, self.depth)

    def sampling_cycles(self, batch_size: int) -> int:
        """Cycles of a batch of samplings in the RTL, from the first request to the last result."""
        return self.shape.sampling_cycles(batch_size) if batch_size else 0

    def update_cycles(self, batch_size: int) -> int:
        """Cycles of a batch of updates or insertions in the RTL: one pass with the copy of the leaves, two without."""
        return self.shape.update_cycles(batch_size) if batch_size else 0


# --- the Learner -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PrintedLearner:
    """A Learner by PEARL Eq. 2, 3 and 6 as printed: `dp` pipelines, and real-valued cycles of a stage and a step."""

    dp: int
    stage_cycles: float
    cycles: float


def printed_learner(
    pipeline: LearnerPipeline, part: FpgaPart, batch_size: int, replay_sram_kb: float = 0.0
) -> PrintedLearner:
    """PEARL Eq. 2, 3 and 6 as printed.

    DP is the most pipelines that the on-chip memory holds (Eq. 2), in words, without banks or blocks. It is at most BS,
    and leaves at least one multiplier per unit. #DSPs / DP is shared so that the UF of all stages are balanced (Eq. 3):
    T_stage is the quotient of all multiply-accumulates and this share. T_Learner = T_stage * (BS + 3 * (#layers - 1))
    (Eq. 6). Raises CapacityError where not even one pipeline fits.
    """
    words = sum(
        unit.words + held * unit.reads + 2 * unit.writes
        for unit, held in zip(pipeline.units, pipeline.items_held, strict=True)
    )
    pipeline_kb = words * _WORD_BYTES / 1000
    macs = part.available.dsps / part.parameters.dsp_per_mac
    dp = min(
        int((part.available.sram_kb - replay_sram_kb) // pipeline_kb), int(macs // len(pipeline.units)), batch_size
    )
    if dp < 1:
        raise CapacityError(
            f"One pipeline of {len(pipeline.units)} units and {pipeline_kb:,.0f} KB of buffers does not fit "
            f"{part.name} beside {replay_sram_kb:,.0f} KB of the Replay Manager."
        )
    stage_cycles = pipeline.macs / (macs / dp)
    return PrintedLearner(dp, stage_cycles, stage_cycles * (batch_size + pipeline.stages_printed))


@dataclass(frozen=True)
class Exploration:
    """The choices of a search for a Learner's parameters.

    `allocation` assigns multipliers to units. "balanced" gives each unit as few as keep up with the slowest unit (PEARL
    Eq. 3, in whole multipliers). "proportional" gives r * f, where r is the unit's share of the work and f a power of
    two, so that the banks of a buffer divide it evenly (CF'22 Sec. 3.2.3). `most_per_unit` limits r * f; it is 32 in
    CF'22 Table 2. With `even_batches` DP must divide the batch: PI * DP = BS. `optimizer_words` are the words on chip
    for each trained weight: 2 for Adam, 0 for plain gradient descent, as in the papers.
    """

    allocation: Literal["balanced", "proportional"] = "balanced"
    most_per_unit: int | None = None
    even_batches: bool = False
    optimizer_words: int = 2


CF22_EXPLORATION = Exploration("proportional", most_per_unit=32, even_batches=True, optimizer_words=0)


@dataclass(frozen=True)
class LearnerDesign:
    """A Learner of `dp` pipelines with `multipliers` (UF, r * f) in each unit; `binding` is what limits its speed."""

    pipeline: LearnerPipeline
    batch_size: int
    dp: int
    multipliers: tuple[int, ...]
    resources: Resources
    binding: Constraint
    arithmetic_cycles: int = 0

    @property
    def pi(self) -> int:
        """PI of CF'22 Sec. 3.2.1: the items per pipeline."""
        return -(-self.batch_size // self.dp)

    @property
    def unit_cycles(self) -> tuple[int, ...]:
        """Cycles of each unit for one item: its multiply-accumulates in whole passes of its multipliers."""
        return tuple(-(-u.macs // m) for u, m in zip(self.pipeline.units, self.multipliers, strict=True))

    @property
    def stage_cycles(self) -> int:
        """T_max of CF'22 Sec. 3.2.3, T_stage of PEARL Eq. 6."""
        return max(self.unit_cycles)

    @property
    def weight_update_cycles_printed(self) -> float:
        """T_WU of CF'22 Sec. 3.2.3: the sum of DP * size(W), divided by the banks of the gradients, r_WU * f."""
        trained = [number for number, unit in enumerate(self.pipeline.units) if unit.kind == "GA"]
        banks = sum(self.multipliers[number] for number in trained)
        return self.dp * self.pipeline.gradient_words / banks

    @property
    def weight_update_cycles(self) -> int:
        """T_WU of the slowest tensor: all tensors run in parallel, each in whole passes over its banks."""
        units = zip(self.pipeline.units, self.multipliers, strict=True)
        return max(self.dp * -(-unit.words // banks) for unit, banks in units if unit.kind == "GA")

    @property
    def cycles_printed(self) -> float:
        """T_learner of CF'22 Sec. 3.2.3: (PI + n - 1) * T_max + T_WU."""
        stages = self.pi + self.pipeline.stages_printed - 1
        return stages * self.stage_cycles + self.weight_update_cycles_printed

    @property
    def cycles(self) -> int:
        """Cycles of a gradient step: the exact cycles of PI items through the units, then T_WU."""
        span = self.pipeline.makespan_cycles(self.unit_cycles, self.pi, self.arithmetic_cycles)
        return span + self.weight_update_cycles

    @property
    def item_interval_cycles(self) -> float:
        """Cycles from one item of the batch to the next, over all pipelines."""
        return self.stage_cycles / self.dp

    def __str__(self) -> str:
        uf = f"UF {min(self.multipliers)} to {max(self.multipliers)}"
        used = f"{self.resources.dsps:,.0f} DSP blocks, {kb(self.resources)}"
        return f"DP {self.dp}, PI {self.pi}, {uf}, {used}, bound by {self.binding}"


_Counts: TypeAlias = npt.NDArray[np.int64]


class _Space:
    """All designs of one pipeline on one part: rows with the multipliers of each unit, the fastest row first."""

    def __init__(self, pipeline: LearnerPipeline, part: FpgaPart, options: Exploration) -> None:
        self.pipeline, self.part, self.options = pipeline, part, options
        units = pipeline.units
        self.macs: _Counts = np.array([unit.macs for unit in units], np.int64)
        self.buffers: _Counts = np.array(
            [
                (unit.words, held * unit.reads, 2 * unit.writes)
                for unit, held in zip(units, pipeline.items_held, strict=True)
            ],
            np.int64,
        )
        self.state: _Counts = np.array(
            [options.optimizer_words * unit.words * (unit.kind == "GA") for unit in units], np.int64
        )
        limit = options.most_per_unit or int(self.macs.max())
        self.most: _Counts = np.minimum(self.macs, limit)
        self.rows = self._rows()

    def _rows(self) -> _Counts:
        if self.options.allocation == "proportional":
            # r of CF'22 is relative to the smallest unit but LOSS, which is too small for a meaningful ratio.
            work = np.array([unit.macs for unit in self.pipeline.units if unit.kind != "LOSS"])
            ratio = self.macs / work.min()
            limit = int(self.most.max())
            # Up to the first f with which a unit reaches the limit: a larger f does not help the slowest unit.
            last = next(k for k in range(64) if (ratio * (1 << k)).max() >= limit)
            factors = (1 << k for k in reversed(range(last + 1)))
            return np.array([np.clip((ratio * f).astype(np.int64), 1, self.most) for f in factors])
        # No unit can have more multipliers than the part.
        most = min(int(self.most.max()), int(self.part.available.dsps // self.part.parameters.dsp_per_mac) or 1)
        counts = np.arange(1, most + 1, dtype=np.int64)
        # The candidates for the cycles of a stage: the cycles of each unit with each whole number of multipliers.
        times = np.unique(-(-np.unique(self.macs)[:, None] // counts))
        rows: _Counts = -(-self.macs // times[:, None])
        return rows[(rows <= self.most).all(axis=1)]

    def resources(self, rows: _Counts, dp: int) -> tuple[npt.NDArray[np.float64], ...]:
        """DSP blocks, KB, LUTs and registers of each row with `dp` pipelines."""
        dsps = dp * rows.sum(axis=-1) * self.part.parameters.dsp_per_mac
        blocks = np.zeros(rows.shape[:-1], np.int64)
        for values, copies in (*((self.buffers[:, k], dp) for k in range(3)), (self.state, 1)):
            banks = np.minimum(rows, values)
            per_bank = -(-values // np.maximum(banks, 1))
            blocks += copies * (banks * -(-per_bank // _BLOCK_WORDS)).sum(axis=-1)
        logic = (dsps * LUTS_PER_DSP, dsps * REGISTERS_PER_DSP)
        return tuple(np.asarray(found, np.float64) for found in (dsps, blocks * self.part.block_kb, *logic))

    def used(self, row: _Counts, dp: int) -> Resources:
        return Resources(*(float(found) for found in self.resources(row, dp)))

    def designs(self, batch_size: int) -> Iterator[LearnerDesign]:
        """The fastest design that fits, for each DP that could be the best."""
        have = self.part.available
        for dp in batch_splits(batch_size, self.options.even_batches):
            found = self.resources(self.rows, dp)
            fits = np.all([need <= limit for need, limit in zip(found, have.values, strict=True)], axis=0)
            if not fits.any():
                if dp * len(self.pipeline.units) * self.part.parameters.dsp_per_mac > have.dsps:
                    return  # more pipelines do not fit either
                continue
            first = int(np.argmax(fits))
            row = self.rows[first]
            yield LearnerDesign(
                self.pipeline,
                batch_size,
                dp,
                tuple(int(count) for count in row),
                self.used(row, dp),
                self._binding(first, dp),
                self.part.parameters.arithmetic_cycles,
            )

    def _binding(self, first: int, dp: int) -> Constraint:
        if first:
            return self.used(self.rows[first - 1], dp).exceeding(self.part.available)[0]
        if (self.rows[0] == self.macs).all():
            return "the work"
        # There is no faster row: it would have more multipliers than a unit may have, or than the whole part.
        return "the limit of one unit" if self.rows[0].max() == self.most.max() else "DSP blocks"


def batch_splits(batch_size: int, even: bool = False) -> Iterator[int]:
    """The counts of pipelines to try: of counts with equal items per pipeline, the smallest."""
    last = 0
    for dp in range(1, batch_size + 1):
        items = -(-batch_size // dp)
        if items != last and not (even and batch_size % dp):
            yield dp
        last = items


def explore(
    pipeline: LearnerPipeline, part: FpgaPart, batch_size: int, options: Exploration | None = None
) -> LearnerDesign:
    """The Learner with the fewest cycles per step that fits `part`: the exploration of CF'22 Sec. 3.2.3.

    It searches all PI and DP with PI * DP = BS (or just above) and all allocations of multipliers to units. Of equally
    fast designs the one with the fewest DSP blocks wins. Raises CapacityError where no design fits; the message says
    what is missing and what would fit.
    """
    options = options or Exploration()
    if type(batch_size) is not int or batch_size < 1:
        raise ConfigurationError(f"The batch size must be a whole number of at least 1; found {batch_size!r}.")
    printed = options.allocation == "proportional"
    space = _Space(pipeline, part, options)
    designs = list(space.designs(batch_size))
    if not designs:
        _raise_too_large(space)
    return min(designs, key=lambda d: (d.cycles_printed if printed else d.cycles, d.resources.dsps, d.dp))


def _raise_too_large(space: _Space) -> None:
    part, units = space.part, space.pipeline.units
    needed = space.used(np.ones_like(space.macs), 1)
    over = needed.exceeding(part.available)
    if not over:  # one multiplier per unit fits, but the search starts with more
        needed = space.used(space.rows[-1], 1)
        over = needed.exceeding(part.available)
    share = part.available.sram_kb / needed.sram_kb
    would_fit = (
        f"A network of about {int(share * space.pipeline.gradient_words):,} weights would ({share:.0%} of this one's "
        f"{space.pipeline.gradient_words:,})"
        if over[0] == "on-chip memory"
        else f"A network of fewer layers would ({len(units)} units need a multiplier each)"
    )
    raise CapacityError(
        f"The Learner's pipeline of {len(units)} units needs at least {needed.dsps:,.0f} DSP blocks and {kb(needed)} "
        f"of on-chip memory; {part.name} has {part.available.dsps:,.0f} and {kb(part.available)}: "
        f"{more(needed, part.available, over[0])}. {would_fit}, or a larger part."
    )


def kb(resources: Resources) -> str:
    """The on-chip memory in words."""
    return f"{resources.sram_kb:,.0f} KB"


def more(needed: Resources, available: Resources, what: Constraint) -> str:
    """How much of the resource `what` is missing."""
    need, have = (dict(zip(_CONSTRAINTS, found.values, strict=True))[what] for found in (needed, available))
    unit = "KB" if what == "on-chip memory" else what
    times = f" ({need / have:.3g} times what there is)" if have else ""
    return f"{need - have:,.0f} {unit} too few{times}"


# --- both on one FPGA ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SharedDesign:
    """Replay Manager and Learner on one FPGA; items stream from the first to the second through pipes."""

    tree: ReplayTree
    learner: LearnerDesign
    replay_dies: int

    @property
    def exposed_sampling_cycles(self) -> int:
        """Cycles by which sampling delays a Learner that starts on an item as soon as it is sampled (PEARL IV-C).

        These are the cycles of the first item through the tree, and for each further item the cycles that the Learner
        waits for it. Not counted: LOSS of the kernels waits for the importance weights, which need the whole batch.
        """
        return self.exposed_cycles(self.tree.sampling_cycles(1), self.tree.shape.sample_cycles)

    def exposed_cycles(self, first_cycles: int, interval_cycles: int) -> int:
        """The same, where the first item takes `first_cycles` and each further one comes `interval_cycles` later."""
        slower = max(0.0, interval_cycles - self.learner.item_interval_cycles)
        return first_cycles + math.ceil(slower * (self.learner.batch_size - 1))


def share(
    tree: ReplayTree, pipeline: LearnerPipeline, part: FpgaPart, batch_size: int, options: Exploration | None = None
) -> SharedDesign:
    """Both on one FPGA, whose on-chip memory must hold all buffers (PEARL Sec. VI-A).

    On a part with several dies, the Replay Manager and the Learner have separate dies, as in CF'22 Table 2 ((1, 1) and
    (1, 2)). On one die the Learner gets what the Replay Manager leaves. Raises CapacityError where they do not fit.
    """
    tree.check_fits(part)
    used = tree.resources(part)
    dies = part.parameters.dies
    of_tree = next(count for count in range(1, dies + 1) if not used.exceeding(part.dies(count).available))
    left = part.dies(dies - of_tree) if of_tree < dies else part.without(used)
    if left is None:
        raise CapacityError(
            f"The Replay Manager's {kb(used)} leave nothing of {part.name}'s {kb(part.available)} for the Learner."
        )
    rest = dataclasses.replace(left, name=f"what the Replay Manager leaves of {part.name}")
    return SharedDesign(tree, explore(pipeline, rest, batch_size, options), of_tree)
