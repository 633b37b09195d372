"""Compares the FPGA model with the papers, in docs/fpga_model.md: `python -m benchmarks.fpga_model`.

The text of the page is written by hand; this module fills the tables, each between two comments that name it.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from benchmarks.fpga_papers import papers_row
from benchmarks.record import ROOT
from composer.algorithm1 import place
from composer.fpga.learner_pipeline import LayerShape, LearnerPipeline, actor_critic_pipeline, dqn_pipeline, mlp_layers
from composer.fpga.learner_program import LearnerProgram, chain
from composer.fpga.model import (
    CF22_EXPLORATION,
    FANOUTS,
    FpgaPart,
    ReplayTree,
    Resources,
    explore,
    printed_learner,
)
from composer.fpga.program_design import program_tree, replay_resources
from composer.matrix import AssignmentMatrix, LearnerCell, MatrixRow, ReplayCell
from composer.modelled_rows import ModelledWork, fpga_row, processor_row, program_space
from composer.placement import Placement
from composer.platform import Platform
from pearl.backends.fpga.replay import LEVELS_MAX, tree_levels
from pearl.backends.fpga.tree_shape import LANES_MAX, TreeShape, eq4, eq5
from pearl.backends.model.device import FpgaParameters
from pearl.devices.description import Device
from pearl.errors import CapacityError

TARGET = ROOT / "docs" / "fpga_model.md"
PLATFORMS = ROOT / "examples" / "platforms"

MIB = 1.048576  # in MB: the papers count on-chip memory in MiB


@dataclass(frozen=True)
class Workload:
    """A benchmark of a paper: its Learner's pipeline, the bytes of a transition, and its Learner in a program."""

    name: str
    pipeline: LearnerPipeline
    transition_bytes: int
    program: LearnerProgram | str


def _conv(channels: int, kernel: int, filters: int, side: int, in_side: int) -> LayerShape:
    weights = filters * (channels * kernel * kernel + 1)
    return LayerShape(channels * in_side**2, filters * side**2, weights, side**2 * filters * channels * kernel**2)


NATURE_CNN = (
    _conv(4, 8, 32, 20, 84),
    _conv(32, 4, 64, 9, 20),
    _conv(64, 3, 64, 7, 9),
    LayerShape.linear(3136, 512),
    LayerShape.linear(512, 6),
)


def _bytes(observations: int, actions: int) -> int:
    return 4 * (2 * observations + actions + 2)


# PEARL Table III, where "3-layer" counts the layers of values: inputs, 64, outputs.
PEARL_CARTPOLE = Workload(
    "CartPole DQN", dqn_pipeline(mlp_layers(4, 64, 2)), _bytes(4, 1), LearnerProgram((chain(4, 64, 2),), 2)
)
PEARL_CAR = Workload(
    "MountainCar DDPG",
    actor_critic_pipeline(mlp_layers(8, 256, 128, 4), mlp_layers(12, 256, 128, 1)),
    _bytes(8, 4),
    LearnerProgram((chain(8, 256, 128, 4), chain(12, 256, 128, 1)), 4),
)
PONG = Workload("Pong DQN", dqn_pipeline(NATURE_CNN), 2 * 4 * 84 * 84 + 16, "programs for FPGAs have no convolutions")
# Thesis Table 4.2, where "3-layer" counts the layers of weights: its MACs, 137 and 70.1 K, are the weights and biases
# of a critic of two hidden layers with |S| + |A| + 1 inputs.
# Programs have no further input.
THESIS_CARTPOLE = Workload(
    "CartPole DDPG",
    actor_critic_pipeline(mlp_layers(4, 8, 8, 1), mlp_layers(6, 8, 8, 1)),
    44,
    LearnerProgram((chain(4, 8, 8, 1), chain(5, 8, 8, 1)), 1),
)
THESIS_HOPPER = Workload(
    "Hopper DDPG",
    actor_critic_pipeline(mlp_layers(11, 256, 256, 3), mlp_layers(15, 256, 256, 1)),
    _bytes(11, 3),
    LearnerProgram((chain(11, 256, 256, 3), chain(14, 256, 256, 1)), 3),
)

# The resources that Xilinx's platform leaves free on the dies of the U200 (UG1393, "Resource Availability"; BRAM36 and
# URAM).
SLR0 = Resources(2265, (638 * 36 + 320 * 288) * 1024 / 8000, 354_690, 723_308)
SLR1 = Resources(1317, (326 * 36 + 160 * 288) * 1024 / 8000, 159_739, 331_654)
U200 = FpgaParameters(dies=1, dsp_per_mac=5, block_kbit=18)
CLOCK_MHZ = 240.0


def _table(head: str, rows: Sequence[Sequence[object]]) -> str:
    titles = head.split(" | ")
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(str(cell) for cell in line)} |" for line in lines)


def _times(ours: float, theirs: float) -> str:
    ratio = ours / theirs
    return f"{ratio:,.0f}" if ratio >= 10 else f"{ratio:.2g}"


def _off(model: float, printed: float) -> str:
    return f"{model / printed - 1:+.0%}"


def _amounts(used: Resources) -> tuple[float, float, float, float]:
    """MiB of SRAM, thousands of LUTs and registers, and DSPs."""
    return used.sram_kb / 1000 / MIB, used.luts / 1e3, used.registers / 1e3, used.dsps


def _beside_printed(used: Resources, printed: Sequence[float]) -> list[str]:
    """Each amount, with the printed one and the difference in parentheses."""
    return [
        f"{found:,.{digits}f} ({want:,}, {_off(found, want)})"
        for found, want, digits in zip(_amounts(used), printed, (1, 0, 0, 0), strict=True)
    ]


# --- CF'22 Table 2 and thesis Table 4.4 ------------------------------------------------------------------------------


def cf22_table2() -> str:
    """PI, DP, r x f and resources of the exploration, with the printed ones in parentheses."""
    tree = ReplayTree(1_000_000, 64)
    cases = (
        ("DQN", dqn_pipeline(mlp_layers(4, 64, 2)), SLR0, (6.6, 346, 459, 1600)),
        (
            "DDPG, no units for the actor's way through the critic",
            actor_critic_pipeline(mlp_layers(4, 64, 1), mlp_layers(5, 64, 1), critics_of_actor=0),
            SLR0 + SLR0,
            (9.2, 708, 1035, 2560),
        ),
        (
            "DDPG, all units",
            actor_critic_pipeline(mlp_layers(4, 64, 1), mlp_layers(5, 64, 1)),
            SLR0 + SLR0,
            (9.2, 708, 1035, 2560),
        ),
    )
    rows: list[list[object]] = []
    for name, pipeline, available, printed in cases:
        part = FpgaPart("U200", available, CLOCK_MHZ, U200)
        for batch in (32, 64, 128, 256):
            design = explore(pipeline, part, batch, CF22_EXPLORATION)
            sram, luts, registers, dsps = _beside_printed(design.resources + tree.resources(part), printed)
            sizes = [f"{design.dp} (2)", f"{design.pi} ({batch // 2})", f"{max(design.multipliers)} (32)"]
            rows.append([name, batch, *sizes, dsps, sram, luts, registers, design.binding])
    return _table("Learner | BS | DP | PI | r x f | DSP | SRAM MiB | K LUT | K REG | bound by", rows)


def free_exploration() -> str:
    """The choice of the same equations without a limit of r x f."""
    pipeline = dqn_pipeline(mlp_layers(4, 64, 2))
    part = FpgaPart("U200", SLR0, CLOCK_MHZ, U200)
    options = dataclasses.replace(CF22_EXPLORATION, most_per_unit=None)
    rows: list[list[object]] = []
    for batch in (32, 64, 256):
        designs = (explore(pipeline, part, batch, chosen) for chosen in (CF22_EXPLORATION, options, None))
        cells = (f"DP {d.dp}, r x f {max(d.multipliers)}: {d.cycles_printed:,.0f} cycles" for d in designs)
        rows.append([batch, *cells])
    return _table("BS | r x f at most 32 | r x f free | whole multipliers, Eq. 3", rows)


def thesis_table44() -> str:
    """Resources of the model, with those that the thesis prints in parentheses."""
    part = FpgaPart("U200", SLR0 + SLR1 + SLR0, CLOCK_MHZ, U200)
    rows: list[list[object]] = []
    for fanout in (2, 64):
        tree = ReplayTree(1_000_000, fanout)
        sram, luts, registers, dsps = _amounts(tree.resources(part))
        rows.append(
            [
                f"RMM, K = {fanout}, 1,000,000 leaves, one pipeline",
                f"{sram:.1f} (4.5)",
                f"{luts:,.1f} (181)",
                f"{registers:,.1f} (263)",
                f"{dsps:,.0f} (1,280)",
                f"{tree.depth} levels, {tree.root_bits} bits at the root",
            ]
        )
    options = dataclasses.replace(CF22_EXPLORATION, most_per_unit=32)
    for workload, printed in ((PONG, (17.6, 615, 994, 4315)), (THESIS_HOPPER, (12.3, 721, 782, 2557))):
        for pipeline, note in _tallies(workload):
            try:
                design = explore(pipeline, part, 256, options)
            except CapacityError as error:
                rows.append([f"{workload.name} Learner{note}", f"does not fit: {error}", "", "", "", ""])
                continue
            cells = _beside_printed(design.resources, printed)
            summary = f"DP {design.dp} (2), r x f {max(design.multipliers)}, {design.binding}"
            rows.append([f"{workload.name} Learner{note}", *cells, summary])
    return _table("design | SRAM MiB | K LUT | K REG | DSP | notes", rows)


def _tallies(workload: Workload) -> Iterator[tuple[LearnerPipeline, str]]:
    yield workload.pipeline, ""
    if workload is THESIS_HOPPER:
        without = actor_critic_pipeline(mlp_layers(11, 256, 256, 3), mlp_layers(15, 256, 256, 1), critics_of_actor=0)
        yield without, ", no units for the actor's way through the critic"


# --- the equations, printed and corrected ----------------------------------------------------------------------------


def replay_equations() -> str:
    """Eq. 4 and 5 compared with the RTL: one sibling at a time, as in the equations, and with the most lanes."""
    rows: list[list[object]] = []
    for fanout, capacity in ((2, 1 << 20), (16, 1 << 20), (64, 1 << 20), (256, 1 << 16)):
        slow = TreeShape.holding(capacity, fanout, 1, cycles_per_access=2, assigns=False)
        wide = TreeShape.holding(capacity, fanout)
        for batch in (1, 32, 512):
            cells: list[str] = []
            for printed, exact, fast in (
                (eq4(batch, slow.depth, fanout), slow.sampling_cycles(batch), wide.sampling_cycles(batch)),
                (eq5(batch, slow.depth), slow.update_cycles(batch), wide.update_cycles(batch)),
            ):
                cells += [f"{printed:,}", f"{exact:,} ({_off(printed, exact)})", f"{fast:,}"]
            rows.append([f"F {fanout}, D {slow.depth}", batch, *cells])
    head = (
        f"tree | BS | Eq. 4 | RTL, 1 lane, 2 cycles an access | RTL, up to {LANES_MAX} lanes | "
        f"Eq. 5 | RTL, 1 lane, 2 cycles an access, two passes | RTL, up to {LANES_MAX} lanes, one pass"
    )
    return _table(head, rows)


def learner_equations() -> str:
    """Eq. 2, 3 and 6 compared with the exploration, on the paper's FPGA."""
    part = FpgaPart.from_device(_fpga(_platform("server_cgf")))
    replay_kb = ReplayTree(100_000, 16).resources(part).sram_kb
    rows: list[list[object]] = []
    for workload in (PEARL_CARTPOLE, PEARL_CAR):
        for batch in (32, 512):
            letter = printed_learner(workload.pipeline, part, batch, replay_kb)
            left = part.without(Resources(0, replay_kb))
            assert left is not None
            design = explore(workload.pipeline, left, batch)
            rows.append(
                [
                    workload.name,
                    batch,
                    f"DP {letter.dp}, {letter.stage_cycles:,.1f} a stage, {letter.cycles:,.0f}",
                    f"DP {design.dp}, {design.stage_cycles:,} a stage, {design.cycles:,}",
                    f"{letter.cycles / design.cycles:.1f}",
                    f"{workload.pipeline.stages_printed} / {workload.pipeline.depth}",
                    design.binding,
                ]
            )
    return _table(
        "Learner | BS | Eq. 2, 3, 6: cycles | explored: cycles | ratio | n: 3(L-1) / longest way | bound by", rows
    )


# --- placements ------------------------------------------------------------------------------------------------------


def _platform(name: str) -> Platform:
    return Platform.from_files(PLATFORMS / f"{name}_devices.csv", PLATFORMS / f"{name}_connections.csv")


def _fpga(platform: Platform) -> Device:
    (device,) = [d for d in platform.devices if d.kind == "fpga"]
    return device


# Of the FPGA: what programs run, the pipelines of the papers' drawings, or PEARL Eq. 2 to 6 as printed.
Design: TypeAlias = Literal["program", "drawn", "printed"]


def _row(device: Device, work: ModelledWork, design: Design = "program") -> MatrixRow:
    if device.kind != "fpga":
        return processor_row(device, work).row
    if design == "program":
        # The kernels have at most 16 levels, so a million slots take a fanout of at least 4.
        least = next(f for f in FANOUTS if tree_levels(work.capacity, f) <= LEVELS_MAX)
        return fpga_row(device, dataclasses.replace(work, fanouts=(max(least, *work.fanouts),))).row
    return papers_row(device, work, printed=design == "printed").row


def _work(workload: Workload, batch: int, *, capacity: int, fanout: int, actors: int) -> ModelledWork:
    return ModelledWork(
        batch, actors, workload.transition_bytes, capacity, (fanout,), workload.pipeline, workload.program
    )


def compose(
    platform: Platform, work: ModelledWork, metric: str = "throughput", *, design: Design = "program", delay: int = 1
) -> Placement:
    """Algorithm 1 on modelled rows only, with this design of the FPGA; `delay` 0 is the order of Eq. 7."""
    return place(
        AssignmentMatrix(tuple(_row(device, work, design) for device in platform.devices)),
        platform,
        metric=metric,
        batch_size=work.batch_size,
        transition_bytes=work.transition_bytes,
        actor_count=work.insertions,
        messages_us=33.0,
        priority_update_delay=delay,
    )


def _kind(platform: Platform, device: str) -> str:
    return platform.device(device).kind.upper()


THESIS_43: tuple[tuple[Workload, tuple[tuple[int, str, str, str], ...]], ...] = (
    (
        THESIS_CARTPOLE,
        tuple((batch, "FPGA", "FPGA", "FPGA") for batch in (32, 256, 2048, 16384)),
    ),
    (
        THESIS_HOPPER,
        (
            (32, "FPGA", "FPGA", "FPGA"),
            (256, "CPU", "GPU", "GPU"),
            (2048, "CPU", "GPU", "GPU"),
            (16384, "FPGA", "GPU", "GPU"),
        ),
    ),
    (PONG, ((32, "CPU", "GPU", "GPU"), (64, "CPU", "GPU", "GPU"), (256, "CPU", "GPU", "CPU"))),
)


def thesis_mapping(platform: Platform, work: ModelledWork, design: Design) -> tuple[str, str, str]:
    """The thesis's own rule (Sec. 4.4.2 and 4.5.4): the RM runs while the Learner trains.

    The Learner goes to the device where it is fastest. The RM goes where the slower of the two takes least; on the
    Learner's GPU their times add up, so the RM goes there only if no other device is as fast as the Learner. Of costs
    within 5 %, the rule prefers fewer devices, then the Learner's own. The Data Storage goes where the fewest words
    move.
    """
    rows = {device.name: _row(device, work, design) for device in platform.devices}
    steps = {name: row.learner.step.value_us for name, row in rows.items() if isinstance(row.learner, LearnerCell)}
    learner = min(steps, key=lambda name: steps[name])
    alone = {
        name: row.replay.sample.value_us + row.replay.update.value_us
        for name, row in rows.items()
        if isinstance(row.replay, ReplayCell)
    }
    if platform.device(learner).kind == "gpu" and any(
        time <= steps[learner] for name, time in alone.items() if name != learner
    ):
        del alone[learner]
    times = {
        name: steps[learner] + time
        if name == learner and platform.device(name).kind == "gpu"
        else max(steps[learner], time)
        for name, time in alone.items()
    }
    host, least = platform.host.name, min(times.values())
    near = [name for name, time in times.items() if time <= 1.05 * least]
    replay = min(near, key=lambda name: (len({name, learner, host}), name != learner))
    words = {
        name: (name != replay) * 1 + (name != learner) * work.batch_size + (name != host) * work.insertions
        for name in dict.fromkeys((learner, host, replay))
    }
    return replay, learner, min(words, key=lambda name: words[name])


def thesis_table43() -> str:
    """Every cell of thesis Table 4.3: RM, Learner, Data Storage."""
    platform = _platform("titan_xp_u200")
    rows: list[list[object]] = []
    hits, total = [0, 0, 0, 0], 0
    for workload, cells in THESIS_43:
        for batch, *printed in cells:
            work = _work(workload, batch, capacity=1_000_000, fanout=2, actors=16)
            placement = compose(platform, work)
            found = [
                [_kind(platform, d) for d in (p.replay_manager, p.learner, p.storage)]
                for p in (placement, compose(platform, work, delay=0), compose(platform, work, design="drawn"))
            ]
            found.append([_kind(platform, d) for d in thesis_mapping(platform, work, "drawn")])
            for which, devices in enumerate(found):
                hits[which] += sum(ours == theirs for ours, theirs in zip(devices, printed, strict=True))
            total += 3
            theirs = next(
                (c for c in placement.candidates if [_kind(platform, d) for d in c.pair] == printed[:2]), None
            )
            slower = "-" if theirs is None else f"{theirs.t_itr_us / placement.t_itr_us:.2f}"
            marks = (_marked(devices, printed) for devices in found)
            rows.append([workload.name, batch, ", ".join(printed), *marks, slower])
    head = (
        "benchmark | BS | printed | programs | programs, in the order of Eq. 7 | the papers' pipelines | "
        "the thesis's rule | printed pair, times as long"
    )
    agree = (
        f"Of {total} cells {hits[0]} agree for programs, {hits[1]} in the order of Eq. 7, {hits[2]} with the papers' "
        f"pipelines, {hits[3]} with these under the thesis's rule. Misses are bold."
    )
    return f"{agree}\n\n{_table(head, rows)}"


def _marked(found: Sequence[str], printed: Sequence[str]) -> str:
    return ", ".join(ours if ours == theirs else f"**{ours}**" for ours, theirs in zip(found, printed, strict=True))


def fig10() -> str:
    """The pairs that are chosen on Server_CGF and Server_CG, and how much each device matters."""
    rows: list[list[object]] = []
    for name in ("server_cgf", "server_cg"):
        platform = _platform(name)
        for workload in (PEARL_CARTPOLE, PEARL_CAR, PONG)[: 3 if name == "server_cgf" else 2]:
            for batch in (32, 512):
                work = _work(workload, batch, capacity=100_000, fanout=16, actors=16)
                fastest = compose(platform, work)
                placements = (
                    fastest,
                    compose(platform, work, "power_efficiency"),
                    compose(platform, work, delay=0),
                    compose(platform, work, design="drawn"),
                    compose(platform, work, delay=0, design="printed"),
                )
                chosen = [f"{_kind(platform, p.replay_manager)} + {_kind(platform, p.learner)}" for p in placements]
                rm, learner = _gradients(fastest)
                rows.append([name, workload.name, batch, *chosen, f"{rm:.1f}", f"{learner:.1f}"])
    head = (
        "platform | benchmark | BS | for throughput | for EPS/W | in the order of Eq. 7 | the papers' pipelines | "
        "Eq. 2 to 7 as printed | "
        "RM matters | Learner matters"
    )
    return _table(head, rows)


def _gradients(placement: Placement) -> tuple[float, float]:
    """The largest ratio of EPS over the devices of the RM, and over those of the Learner, with the other one fixed."""

    def worst(index: int) -> float:
        other = placement.chosen.pair[1 - index]
        times = [c.t_itr_us for c in placement.candidates if c.pair[1 - index] == other]
        return max(times) / min(times)

    return worst(0), worst(1)


def latencies() -> str:
    """Times of RM and Learner on each device, as in CF'22 Fig. 8 and PEARL Fig. 8 and 9."""
    rows: list[list[object]] = []
    for name, fanout, capacity, workload in (
        ("titan_xp_u200", 64, 1_000_000, PEARL_CARTPOLE),
        ("server_cgf", 16, 100_000, PEARL_CARTPOLE),
        ("server_cgf", 16, 100_000, PEARL_CAR),
    ):
        platform = _platform(name)
        for batch in (32, 128, 512, 2048):
            work = _work(workload, batch, capacity=capacity, fanout=fanout, actors=batch)
            found: dict[str, tuple[float, float, float]] = {}
            drawn, printed = (_times_of(_row(_fpga(platform), work, design)) for design in ("drawn", "printed"))
            for device in platform.devices:
                found[device.kind] = _times_of(_row(device, work))
            cells: list[str] = []
            for which, papers in enumerate(((drawn, printed), (drawn,), (drawn,))):
                times = [found["fpga"], *papers]
                for of_fpga in times:
                    if of_fpga[which] == math.inf:
                        cells.append("does not fit")
                        continue
                    cpu, gpu = (_times(found[kind][which], of_fpga[which]) for kind in ("cpu", "gpu"))
                    cells.append(f"{of_fpga[which]:,.1f} us; {cpu}, {gpu}")
            rows.append([name, f"F {fanout}", workload.name, batch, *cells])
    head = (
        "platform | tree | Learner | BS | sampling: FPGA; CPU, GPU times as long | in RTL | by Eq. 4 | update | "
        "in RTL | gradient step | all weights on chip"
    )
    return _table(head, rows)


def _times_of(row: MatrixRow) -> tuple[float, float, float]:
    """Microseconds of sampling, an update and a gradient step, each alone; infinite if it does not fit."""
    assert isinstance(row.replay, ReplayCell)
    step = row.learner.step.value_us if isinstance(row.learner, LearnerCell) else math.inf
    return row.replay.sample.value_us, row.replay.update.value_us, step


def program_designs() -> str:
    """The designs that programs run on the papers' boards."""
    rows: list[list[object]] = []
    for name, workload, fanout, capacity in (
        ("server_cgf", PEARL_CARTPOLE, 16, 100_000),
        ("server_cgf", PEARL_CAR, 16, 100_000),
        ("titan_xp_u200", THESIS_HOPPER, 4, 1_000_000),
    ):
        device = _fpga(_platform(name))
        part = FpgaPart.from_device(device)
        tree = program_tree(capacity, fanout, part)
        assert isinstance(workload.program, LearnerProgram)
        for batch in (32, 512):
            space = program_space(workload.program, part, batch, device)
            alone, both = space.alone(), space.with_replay(tree)
            assert both.joined is not None
            weights = both.timing.weights.values()
            stream, move = max(found.stream for found in weights), max(found.move for found in weights)
            uf = ", ".join("-".join(map(str, network)) for network in both.unroll)
            cycles = f"{both.joined.learner:,} + {both.joined.sampling:,} + {both.joined.update:,}"
            used = f"{both.resources.dsps:,.0f} DSP, {both.resources.sram_kb:,.0f} KB"
            rows.append(
                [
                    workload.name,
                    batch,
                    f"{alone.cycles:,}",
                    cycles,
                    f"{stream:,.0f}",
                    f"{move:,.0f}",
                    both.copies,
                    uf,
                    used,
                    f"{replay_resources(tree, part).sram_kb:,.0f} KB",
                    both.binding,
                ]
            )
    head = (
        "Learner | BS | cycles alone | joined: step + sampling + update | of which streaming | moving | DP | UF | "
        "resources | tree | bound by"
    )
    return _table(head, rows)


TABLES = {
    "cf22-table2": cf22_table2,
    "free-exploration": free_exploration,
    "thesis-table44": thesis_table44,
    "program-designs": program_designs,
    "replay-equations": replay_equations,
    "learner-equations": learner_equations,
    "latencies": latencies,
    "fig10": fig10,
    "thesis-table43": thesis_table43,
}


def render(text: str) -> str:
    """The page with every table filled from the current model."""
    for name, table in TABLES.items():
        block = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        if not block.search(text):
            raise ValueError(f"docs/fpga_model.md has no place for the table {name}.")
        content = f"\n{table()}\n\n"
        text = block.sub(lambda found, content=content: f"{found[1]}{content}{found[2]}", text)  # type: ignore[misc]
    return text


def main() -> None:
    """Fill the tables of the page."""
    TARGET.write_text(render(TARGET.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"wrote {TARGET}")


if __name__ == "__main__":
    main()
