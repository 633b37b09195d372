"""Sections of docs/paper.md on single primitives: replay operations, gradient steps, and the exploration of CF'22."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from benchmarks.fpga_model import (
    NATURE_CNN,
    PEARL_CAR,
    PEARL_CARTPOLE,
    PONG,
    SLR0,
    THESIS_CARTPOLE,
    THESIS_HOPPER,
    U200,
    Workload,
    _bytes,
    _platform,
    _row,
    _table,
    _times_of,
    _work,
)
from benchmarks.paper_plots import Line, Panel, draw_lines
from benchmarks.paper_results import Results, microseconds, paragraph
from composer.fpga.learner_pipeline import LearnerPipeline, actor_critic_pipeline, dqn_pipeline, mlp_layers
from composer.fpga.learner_program import LearnerProgram, chain
from composer.fpga.model import CF22_EXPLORATION, FpgaPart, LearnerDesign, _Space, explore

Times = tuple[float, float, float]  # microseconds of sampling, an update and a gradient step

REPLAY_BATCHES = (32, 256, 2_048, 16_384)
STEP_BATCHES = (32, 64, 128, 256, 512, 1_024)
PONG_BATCHES = (32, 512)
THESIS_BATCHES = (32, 256, 2_048, 16_384)
THESIS_PONG_BATCHES = (32, 64, 256)

CF22_BATCHES = (32, 64, 128, 256)
CF22_CARTPOLE_DQN = dataclasses.replace(PEARL_CARTPOLE, name="CartPole DQN")
CF22_CARTPOLE_DDPG = Workload(
    "CartPole DDPG",
    actor_critic_pipeline(mlp_layers(4, 64, 1), mlp_layers(5, 64, 1)),
    _bytes(4, 1),
    LearnerProgram((chain(4, 64, 1), chain(5, 64, 1)), 1),
)
CF22_LUNAR_DQN = Workload(
    "LunarLander DQN", dqn_pipeline(mlp_layers(8, 64, 4)), _bytes(8, 1), LearnerProgram((chain(8, 64, 4),), 4)
)
CF22_LUNAR_DDPG = Workload(
    "LunarLander DDPG",
    actor_critic_pipeline(mlp_layers(8, 64, 2), mlp_layers(10, 64, 1)),
    _bytes(8, 2),
    LearnerProgram((chain(8, 64, 2), chain(10, 64, 1)), 2),
)

# --- Table III -------------------------------------------------------------------------------------------------------

TABLE_III_TEXT = """PEARL's Table III, and what this page takes it to mean. "3-layer" counts the layers of values:
inputs, one hidden layer, outputs. The networks have exactly these sizes wherever the page says "modelled", and in the
rows of `make bench-paper`. Gymnasium's MountainCarContinuous-v0 has 2 state values and 1 action; 8 and 4 are the
sizes of LunarLander. `benchmarks/wide_car.py` is that environment with 8 and 4: each state value four times, and the
mean of four actions. The rows of `make bench-eps` in Table IV have two hidden layers of 64 for CartPole, and 2 state
values and 1 action for MountainCar. Weights and multiplications are those of one pass through the trained networks,
one transition at a time (computed)."""


def table_iii() -> str:
    """Table III with the layers that follow from it."""
    cases: tuple[tuple[str, str, str, str, str, Sequence[Sequence[object]]], ...] = (
        ("CartPole", "DQN", "4", "1", "3-layer MLP, hidden size 64", (mlp_layers(4, 64, 2),)),
        (
            "MountainCar",
            "DDPG",
            "8",
            "4",
            "4-layer MLP, hidden sizes 256,128",
            (mlp_layers(8, 256, 128, 4), mlp_layers(12, 256, 128, 1)),
        ),
        ("Pong", "DQN", "84 x 84", "6", "CNN in [14]", (NATURE_CNN,)),
    )
    layers = (
        "Q: 4-64-2",
        "actor: 8-256-128-4; critic: 12-256-128-1",
        "Q: 4 x 84 x 84, filters 32 of 8 x 8, 64 of 4 x 4, 64 of 3 x 3, then 3136-512-6",
    )
    rows: list[list[object]] = []
    for (environment, algorithm, state, action, policy, networks), here in zip(cases, layers, strict=True):
        weights = sum(layer.weights for network in networks for layer in network)  # type: ignore[attr-defined]
        macs = sum(layer.macs for network in networks for layer in network)  # type: ignore[attr-defined]
        rows.append([environment, algorithm, state, action, policy, here, f"{weights:,}", f"{macs:,}"])
    head = (
        "environment | algorithm | state (paper) | action (paper) | policy (paper) | networks here | weights | "
        "multiplications"
    )
    return f"## Table III: benchmarks\n\n{paragraph(TABLE_III_TEXT)}\n\n{_table(head, rows)}\n"


# --- modelled times --------------------------------------------------------------------------------------------------


@cache
def times(platform: str, workload: Workload, batch: int, capacity: int, fanout: int) -> dict[str, Times]:
    """Modelled times by kind of device; infinite where the device cannot run the Learner."""
    described = _platform(platform)
    work = _work(workload, batch, capacity=capacity, fanout=fanout, actors=batch)
    return {device.kind: _times_of(_row(device, work)) for device in described.devices}


def _us(value: float) -> str:
    return microseconds(value) if value < math.inf else "cannot run"


# --- replay operations: PEARL Fig. 8, CF'22 Fig. 8, thesis Fig. 4.10 -------------------------------------------------

REPLAY_TEXT = """PEARL Fig. 8, CF'22 Fig. 8 and the thesis's Fig. 4.10 plot the time of replay operations against the
batch size: bars and lines without numbers in the text. PEARL says that GPU and FPGA scale better than the CPU, the
FPGA best. CF'22 says that the FPGA samples with up to 7.4 and 21 times less latency than CPU and GPU, inserts up to
~40 times and updates up to ~125 times faster. The thesis says that the FPGA samples between 41 times faster and 4.6
times slower than the GPU, and updates 11 to 98 times faster. Modelled times are those of the primitive alone, without
PCIe, which placements count as communication; the papers' FPGA and GPU times in PEARL Fig. 8 include it. The thesis's
K is 2; the FPGA programs here need 4 for a million slots."""

REPLAY_CASES = (  # figure, platform, slots, fanout
    ("PEARL Fig. 8", "server_cgf", 100_000, 16),
    ("PEARL Fig. 8", "server_cg", 100_000, 16),
    ("CF'22 Fig. 8", "rtx_3090_u200", 1_000_000, 64),
    ("thesis Fig. 4.10", "titan_xp_u200", 1_000_000, 2),
)


def replay_operations() -> str:
    """Modelled times on each machine, with those of this project's kernels here for as many slots."""
    results = Results.load("replay")
    rows: list[list[object]] = []
    for figure, platform, slots, fanout in REPLAY_CASES:
        for index, name in enumerate(("sample", "update")):
            for batch in REPLAY_BATCHES:
                found = times(platform, PEARL_CARTPOLE, batch, slots, fanout)
                cells = [_us(found[kind][index]) if kind in found else "-" for kind in ("cpu", "gpu", "fpga")]
                here = microseconds(results.get(f"tree {name} B={batch} N={slots}"))
                rows.append([figure, platform, name, batch, *cells, here])
    head = (
        "figure | machine | operation | batch | CPU, modelled, us | GPU, modelled, us | FPGA, modelled, us | "
        "one CPU core, measured here, us"
    )
    measured = paragraph(
        f"Measured here: {results.provenance}, one thread, trees of as many slots with the fanout that the composer "
        "chooses (16)."
    )
    picture = "![Replay operations against the batch size](assets/paper_replay.svg)"
    return f"""## PEARL Fig. 8, CF'22 Fig. 8, thesis Fig. 4.10: replay operations

{paragraph(REPLAY_TEXT)}

{measured}

{picture}

{_table(head, rows)}

{_fanouts(results)}
"""


FANOUTS = (4, 8, 16, 32, 64, 128)
SLOTS = (100_000, 1_000_000, 10_000_000)
WORKERS_BATCHES = (2_048, 16_384, 65_536)
WORKERS_TEXT = """The thesis's Fig. 4.10 also has 1, 4, 8 and 16 threads of a CPU: sampling takes less time with more
threads, an update hardly less. Measured here with the two cores there are, 1,000,000 slots:"""


def _fanouts(results: Results) -> str:
    """Times measured here against fanout and number of workers."""
    rows: list[list[object]] = []
    for name in ("sample", "update"):
        for slots in SLOTS:
            cells = [microseconds(results.get(f"tree {name} K={k} B=2048 N={slots}")) for k in FANOUTS]
            rows.append([name, f"{slots:,}", *cells])
    head = f"operation | slots | {' | '.join(f'K = {k}' for k in FANOUTS)}"
    first = "Against the fanout K of the tree, batches of 2,048, one thread (measured here, us):"
    theirs = {row["case"]: row["theirs"] for row in results.document["rows"]}
    workers: list[list[object]] = []
    for name in ("sample", "update"):
        for batch in WORKERS_BATCHES:
            case = f"tree {name} W=2 B={batch} N=1000000"
            two, one = results.get(case), theirs.get(case)
            gain = f"{one / two:.2f}" if one and two else "-"
            workers.append([name, f"{batch:,}", microseconds(one), microseconds(two), gain])
    second = _table("operation | batch | one worker, us | two workers, us | times faster", workers)
    return f"{first}\n\n{_table(head, rows)}\n\n{paragraph(WORKERS_TEXT)}\n\n{second}"


def draw_replay(path: Path) -> None:
    """Sampling and updates on Server_CGF and on the thesis's machine, with the CPU here."""
    results = Results.load("replay")
    panels = []
    for platform, slots, fanout in (("server_cgf", 100_000, 16), ("titan_xp_u200", 1_000_000, 2)):
        found = [times(platform, PEARL_CARTPOLE, batch, slots, fanout) for batch in REPLAY_BATCHES]
        for index, name in enumerate(("sample", "update")):
            lines = [
                Line(f"{kind}, modelled", REPLAY_BATCHES, [cell[kind][index] for cell in found]) for kind in found[0]
            ]
            known = {
                batch: value
                for batch in REPLAY_BATCHES
                if (value := results.get(f"tree {name} B={batch} N={slots}")) is not None
            }
            lines.append(Line("one core here, measured", list(known), list(known.values())))
            panels.append(Panel(f"{platform}\n{name}, {slots:,} slots", "batch size", "us", lines))
    draw_lines(path, panels, 2)


# --- gradient steps: PEARL Fig. 9, CF'22 Fig. 9, thesis Fig. 4.9 -----------------------------------------------------

STEP_TEXT = """PEARL Fig. 9, CF'22 Fig. 9 and the thesis's Fig. 4.9 plot the time of a gradient step against the batch
size: bars and lines without numbers in the text. PEARL says that the FPGA is faster than the GPU for small networks
and batches, and that the GPU overtakes it as the batch grows. CF'22 says that its FPGA is 1.5 to 4.3 times as fast as
the baselines. The thesis says that the FPGA is the fastest for CartPole, for Hopper below a batch of 128 and for Pong
below 16; the GPU for Hopper above 1,024 and for Pong above 16. "Cannot run": programs for FPGAs have no convolutions,
or the batch does not fit the FPGA's memory."""

STEP_CASES: tuple[tuple[str, str, int, int, tuple[tuple[Workload, tuple[int, ...]], ...]], ...] = (
    (
        "PEARL Fig. 9",
        "server_cgf",
        100_000,
        16,
        ((PEARL_CARTPOLE, STEP_BATCHES), (PEARL_CAR, STEP_BATCHES), (PONG, PONG_BATCHES)),
    ),
    ("PEARL Fig. 9", "server_cg", 100_000, 16, ((PEARL_CARTPOLE, STEP_BATCHES), (PEARL_CAR, STEP_BATCHES))),
    (
        "CF'22 Fig. 9",
        "rtx_3090_u200",
        1_000_000,
        64,
        ((CF22_CARTPOLE_DQN, CF22_BATCHES), (CF22_CARTPOLE_DDPG, CF22_BATCHES)),
    ),
    (
        "thesis Fig. 4.9",
        "titan_xp_u200",
        1_000_000,
        2,
        ((THESIS_CARTPOLE, THESIS_BATCHES), (THESIS_HOPPER, THESIS_BATCHES), (PONG, THESIS_PONG_BATCHES)),
    ),
)
HERE = ("CartPole DQN", "MountainCar DDPG", "Pong DQN")  # whose networks `make bench-paper` measures


def gradient_steps() -> str:
    """Modelled times on each machine, with those of the same network here."""
    results = Results.load("paper")
    rows: list[list[object]] = []
    for figure, platform, slots, fanout, workloads in STEP_CASES:
        for workload, batches in workloads:
            for batch in batches:
                found = times(platform, workload, batch, slots, fanout)
                cells = [_us(found[kind][2]) if kind in found else "-" for kind in ("cpu", "gpu", "fpga")]
                measured = results.get(f"{workload.name} batch {batch}: gradient step")
                rows.append([figure, platform, workload.name, f"{batch:,}", *cells, microseconds(measured)])
    head = (
        "figure | machine | Learner | batch | CPU, modelled, us | GPU, modelled, us | FPGA, modelled, us | "
        "one CPU core, measured here, us"
    )
    measured_text = paragraph(
        f"Measured here: {results.provenance}; one thread, the native Learner, for Pong torch. A dash: not measured, "
        "or the machine has no such device."
    )
    picture = "![Gradient steps against the batch size](assets/paper_steps.svg)"
    return f"""## PEARL Fig. 9, CF'22 Fig. 9, thesis Fig. 4.9: gradient steps

{paragraph(STEP_TEXT)}

{measured_text}

{picture}

{_table(head, rows)}
"""


def draw_steps(path: Path) -> None:
    """A panel for each network of PEARL's and of the thesis's machine."""
    results = Results.load("paper")
    panels = []
    for _, platform, slots, fanout, workloads in (STEP_CASES[0], STEP_CASES[3]):
        for workload, batches in workloads:
            found = {batch: times(platform, workload, batch, slots, fanout) for batch in batches}
            lines = []
            for kind in ("cpu", "gpu", "fpga"):
                known = {batch: cell[kind][2] for batch, cell in found.items() if cell[kind][2] < math.inf}
                if known:
                    lines.append(Line(f"{kind}, modelled", list(known), list(known.values())))
            here = {
                batch: value
                for batch in batches
                if (value := results.get(f"{workload.name} batch {batch}: gradient step")) is not None
            }
            if here:
                lines.append(Line("one core here, measured", list(here), list(here.values())))
            panels.append(Panel(f"{platform}, {workload.name}", "batch size", "us", lines))
    draw_lines(path, panels, 3)


# --- CF'22 Fig. 7 ----------------------------------------------------------------------------------------------------

EXPLORATION_TEXT = """CF'22 Fig. 7 is the design space of the DQN Learner with batch size 64: the latency of a
gradient step against DP and f, normalized to DP = 1, f = 1, with the best point that fits. The text prints that point
in Table 2: DP 2, r x f 32 at most. Modelled here with CF'22's own latency, (PI + n - 1) T_max + T_WU, for the network
4-64-2 on the die of the U200 that the paper gives to the Learner. A bold cell is the best that fits; "no" does not
fit the die."""
EXPLORATION_BATCH = 64
DPS = (1, 2, 4, 8, 16, 32, 64)


@cache
def exploration() -> tuple[dict[tuple[int, int], tuple[float, bool]], LearnerDesign]:
    """The normalized latency by DP and r x f of the largest unit, and whether it fits; and the best design."""
    pipeline: LearnerPipeline = CF22_CARTPOLE_DQN.pipeline
    part = FpgaPart("U200", SLR0, 240.0, U200)
    options = dataclasses.replace(CF22_EXPLORATION, most_per_unit=None)
    space = _Space(pipeline, part, options)
    cycles: dict[tuple[int, int], tuple[float, bool]] = {}
    for dp in DPS:
        for row in space.rows:
            used = space.used(row, dp)
            counts = tuple(int(count) for count in row)
            design = LearnerDesign(pipeline, EXPLORATION_BATCH, dp, counts, used, "DSP blocks")
            cycles[dp, max(counts)] = design.cycles_printed, not used.exceeding(part.available)
    first = cycles[1, min(units for _, units in cycles)][0]
    best = explore(pipeline, part, EXPLORATION_BATCH, CF22_EXPLORATION)
    return {key: (value / first, fits) for key, (value, fits) in cycles.items()}, best


def design_space() -> str:
    """Fig. 7 as a table: DP by r x f."""
    cells, best = exploration()
    units = sorted({units for _, units in cells})
    least = min(value for value, fits in cells.values() if fits)
    rows: list[list[object]] = []
    for dp in DPS:
        row: list[object] = [dp]
        for count in units:
            value, fits = cells[dp, count]
            text = f"{value:.3f}"
            row.append(f"{text}, no" if not fits else f"**{text}**" if value == least else text)
        rows.append(row)
    head = f"DP | {' | '.join(f'r x f = {count}' for count in units)}"
    limit = CF22_EXPLORATION.most_per_unit
    chosen = paragraph(
        f"With the paper's limit of r x f = {limit} the exploration chooses DP {best.dp}, r x f "
        f"{max(best.multipliers)} (paper: DP 2, r x f 32), bound by {best.binding}."
    )
    picture = "![Latency against r x f for each DP](assets/paper_exploration.svg)"
    return f"""## CF'22 Fig. 7: exploration of the Learner

{paragraph(EXPLORATION_TEXT)}

{picture}

{_table(head, rows)}

{chosen}
"""


def draw_exploration(path: Path) -> None:
    """A line for each DP over the designs that fit."""
    cells, _ = exploration()
    lines = []
    for dp in DPS:
        known = {units: value for (of, units), (value, fits) in sorted(cells.items()) if of == dp and fits}
        if known:
            lines.append(Line(f"DP {dp}", list(known), list(known.values())))
    draw_lines(path, [Panel("DQN, batch 64: designs that fit", "r x f", "latency / (DP 1, f 1)", lines)], 1)
