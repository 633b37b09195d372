"""Sections of docs/paper.md on whole systems: PEARL Fig. 10, CF'22 Fig. 10 and the thesis's Fig. 4.11."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from benchmarks.fpga_model import (
    PEARL_CAR,
    PEARL_CARTPOLE,
    PONG,
    THESIS_CARTPOLE,
    THESIS_HOPPER,
    Workload,
    _kind,
    _platform,
    _table,
    _work,
    compose,
)
from benchmarks.paper_plots import Grid, draw_bars, draw_grids
from benchmarks.paper_primitives import (
    CF22_BATCHES,
    CF22_CARTPOLE_DDPG,
    CF22_CARTPOLE_DQN,
    CF22_LUNAR_DDPG,
    CF22_LUNAR_DQN,
    THESIS_BATCHES,
    THESIS_PONG_BATCHES,
)
from benchmarks.paper_results import Results, paragraph, rate
from composer.placement import Candidate, Placement
from composer.portability import phi

ACTORS = 16


@dataclass(frozen=True)
class Case:
    """One problem on one described machine."""

    platform: str
    workload: Workload
    batch: int
    slots: int
    fanout: int


@cache
def placement(case: Case, metric: str = "throughput", delay: int = 1) -> Placement:
    """Algorithm 1 on modelled rows."""
    work = _work(case.workload, case.batch, capacity=case.slots, fanout=case.fanout, actors=ACTORS)
    return compose(_platform(case.platform), work, metric, delay=delay)


def fastest(case: Case) -> dict[tuple[str, str], Candidate]:
    """The fastest candidate of each pair of kinds of devices, Replay Manager first; impossible pairs are missing."""
    platform, found = _platform(case.platform), {}
    for candidate in placement(case).candidates:
        pair = _kind(platform, candidate.replay.device), _kind(platform, candidate.learner.device)
        known = found.setdefault(pair, candidate)
        if candidate.eps > known.eps:
            found[pair] = candidate
    return found


def _chosen(case: Case, metric: str) -> tuple[str, str]:
    platform, chosen = _platform(case.platform), placement(case, metric)
    return _kind(platform, chosen.replay_manager), _kind(platform, chosen.learner)


# --- PEARL Fig. 10 ---------------------------------------------------------------------------------------------------

GRIDS_TEXT = """Fig. 10 shows the throughput (a to d) and the power efficiency (e to h) of every choice of devices as
the colors of grids, without numbers. Its text says: with batch size 32 the Replay Manager's device matters most, with
512 the Learner's; FPGAs are best for power efficiency with small models and batches, GPUs once large models are
faster by more than their power. Here are all choices for all benchmarks: 16 Actors, 100,000 slots, fanout 16. Each
cell has EPS and EPS/W; the choice for throughput is bold, the one for power efficiency is italic. "Cannot run":
programs for FPGAs have no convolutions. The paper has no Pong on Server_CG: its GPU had no library for it."""
CASES = tuple(
    Case(platform, workload, batch, 100_000, 16)
    for platform, workloads in (
        ("server_cgf", (PEARL_CARTPOLE, PEARL_CAR, PONG)),
        ("server_cg", (PEARL_CARTPOLE, PEARL_CAR)),
    )
    for workload in workloads
    for batch in (32, 512)
)
KINDS = ("CPU", "GPU", "FPGA")
LOCAL = ("cpu0", "sycl:cpu0")  # devices of the measurements
LOCAL_PAIRS = tuple((replay, learner) for replay in LOCAL for learner in LOCAL)


def grids() -> str:
    """All choices of devices, modelled for the paper's machines and measured here."""
    rows: list[list[object]] = []
    for case in CASES:
        found = fastest(case)
        kinds = [kind for kind in KINDS if _has(case, kind)]
        best, frugal = (_chosen(case, metric) for metric in ("throughput", "power_efficiency"))
        for replay in kinds:
            cells = [
                _cell(found.get((replay, learner)), (replay, learner), best, frugal) if learner in kinds else "-"
                for learner in KINDS
            ]
            rows.append([case.platform, case.workload.name, case.batch, replay, *cells])
    modelled = _table(
        "machine | benchmark | batch | RM on | Learner on CPU: EPS, EPS/W | Learner on GPU | Learner on FPGA", rows
    )
    return f"""## PEARL Fig. 10: all choices of devices

{paragraph(GRIDS_TEXT)}

![Grids of EPS and EPS/W over all choices of devices](assets/paper_grids.svg)

Modelled:

{modelled}

{_local_grids()}
"""


def _has(case: Case, kind: str) -> bool:
    return any(device.kind.upper() == kind for device in _platform(case.platform).devices)


def _cell(candidate: Candidate | None, pair: tuple[str, str], best: tuple[str, str], frugal: tuple[str, str]) -> str:
    if candidate is None:
        return "cannot run"
    eps, efficiency = rate(candidate.eps), rate(candidate.eps_per_watt or math.nan)
    eps = f"**{eps}**" if pair == best else eps
    return f"{eps}, *{efficiency}*" if pair == frugal else f"{eps}, {efficiency}"


def _local_grids() -> str:
    """The grids that were measured here, with Phi(D) over their choices."""
    results = Results.load("paper")
    rows: list[list[object]] = []
    for (workload, batch), found in results.placements().items():
        phi_d = rate(phi([found[pair][0] if pair in found else 0.0 for pair in LOCAL_PAIRS]))
        for replay in LOCAL:
            cells = [
                f"{rate(found[replay, learner][0])} ({found[replay, learner][1]})"
                if (replay, learner) in found
                else "cannot run"
                for learner in LOCAL
            ]
            rows.append([workload, batch, replay, *cells, phi_d])
    text = paragraph(
        f"Measured here: {results.provenance}. The same networks and batches, programs that the composer wrote, "
        "with one actor of 8 environments on all cores. The CPU counts twice, by its own kernels (cpu0) and as a SYCL "
        "device (sycl:cpu0); cells name the Learner's implementation. No device here measures power, so there is no "
        "EPS/W. "
        f"{_left_out(results)}"
    )
    head = "benchmark | batch | RM on | Learner on cpu0: EPS | Learner on sycl:cpu0: EPS | Phi(D) over the four"
    return f"{text}\n\n{_table(head, rows)}"


def _left_out(results: Results) -> str:
    measured = {workload for workload, _ in results.placements()}
    missing = [name for name in dict.fromkeys(case.workload.name for case in CASES) if name not in measured]
    return f"Not measured: {', '.join(missing)}." if missing else ""


def draw_placements(path: Path) -> None:
    """EPS of all cases, then EPS/W of all; below them those measured here."""
    values: list[tuple[str, Callable[[Candidate], float]]] = [
        ("EPS", lambda candidate: candidate.eps),
        ("EPS/W", lambda candidate: candidate.eps_per_watt or math.nan),
    ]
    drawn = []
    for unit, value in values:
        for case in CASES:
            found = {pair: value(candidate) for pair, candidate in fastest(case).items()}
            kinds = [kind for kind in KINDS if _has(case, kind)]
            title = f"{case.platform}, batch {case.batch}\n{case.workload.name}, {unit}"
            drawn.append(_grid(title, kinds, found))
    for (workload, batch), measured in Results.load("paper").placements().items():
        cells = {pair: eps for pair, (eps, _) in measured.items()}
        drawn.append(_grid(f"measured here, batch {batch}\n{workload}, EPS", LOCAL, cells))
    draw_grids(path, drawn, 5)


def _grid(title: str, devices: Sequence[str], found: Mapping[tuple[str, str], float]) -> Grid:
    values = np.array([[found.get((replay, learner), math.nan) for learner in devices] for replay in devices])
    texts = [[rate(value) if not math.isnan(value) else "-" for value in row] for row in values.tolist()]
    return Grid(title, devices, values, texts)


# --- CF'22 Fig. 10 ---------------------------------------------------------------------------------------------------

CF22_TEXT = """CF'22 Fig. 10 compares gradient steps per second (GPS) of five mappings: bars without numbers in the
text. The text says that the Learner and the replay on the FPGA (L-FPGA-R-FPGA) are 1.3 to 3.7 times as fast as
CPU-GPU baselines and 1.2 to 4.3 times as fast as GPU baselines, and that GPS improve by up to 263 % from mapping the
replay to the FPGA, with the Learner there. Modelled for CF'22's machine, in its order "L" Learner, "R" replay:
1,000,000 slots, K = 64, 16 Actors, 3-layer networks of 64 (the sizes of LunarLander are Gymnasium's: 8 state values,
4 actions or 2 numbers). The text does not state the batch sizes. The ratios are far larger than printed: nothing
takes time here but the terms of Algorithm 1, and CPU and GPU pay torch's overhead for every operation of these small
networks. Both baselines sample from the papers' trees; none of them was run for this project."""
CF22_CASES = tuple(
    Case("rtx_3090_u200", workload, batch, 1_000_000, 64)
    for workload in (CF22_CARTPOLE_DQN, CF22_CARTPOLE_DDPG, CF22_LUNAR_DQN, CF22_LUNAR_DDPG)
    for batch in CF22_BATCHES
)
CF22_MAPPINGS = (("CPU", "CPU"), ("GPU", "CPU"), ("GPU", "GPU"), ("FPGA", "CPU"), ("FPGA", "FPGA"))


def _gps(case: Case, learner: str, replay: str) -> float:
    candidate = fastest(case).get((replay, learner))
    return candidate.eps / case.batch if candidate else math.nan


def cf22_systems() -> str:
    """GPS of each mapping, and the ratios that the text prints."""
    rows: list[list[object]] = []
    for case in CF22_CASES:
        found = [_gps(case, *mapping) for mapping in CF22_MAPPINGS]
        ours = found[-1]
        ratios = [f"{ours / found[position]:.1f}" for position in (1, 2, 3)]
        rows.append([case.workload.name, case.batch, *map(rate, found), *ratios])
    mappings = " | ".join(f"L-{learner}-R-{replay}" for learner, replay in CF22_MAPPINGS)
    head = (
        f"benchmark | batch | {mappings} | FPGA / CPU-GPU (paper: 1.3 to 3.7) | FPGA / GPU (paper: 1.2 to 4.3) | "
        "replay on FPGA / on CPU (paper: up to 3.6)"
    )
    return f"""## CF'22 Fig. 10: system throughput

{paragraph(CF22_TEXT)}

![GPS of the five mappings](assets/paper_cf22_systems.svg)

Modelled GPS:

{_table(head, rows)}
"""


def draw_cf22(path: Path) -> None:
    """A panel for each benchmark."""
    _draw_mappings(path, CF22_CASES, CF22_MAPPINGS, "L-{}-R-{}")


def _draw_mappings(path: Path, cases: Sequence[Case], mappings: Sequence[tuple[str, str]], label: str) -> None:
    groups: dict[str, dict[str, list[float]]] = {}
    ticks: dict[str, list[str]] = {}
    for case in cases:
        series = groups.setdefault(case.workload.name, {})
        ticks.setdefault(case.workload.name, []).append(str(case.batch))
        for mapping in mappings:
            series.setdefault(label.format(*mapping), []).append(_gps(case, *mapping))
    draw_bars(path, groups, ticks, "gradient steps per second")


# --- thesis Fig. 4.11 ------------------------------------------------------------------------------------------------

THESIS_TEXT = """The thesis's Fig. 4.11 shows GPS of all nine mappings "Learner-RM": bars without numbers, and the
theoretical optimum as a line. Its text says that the chosen mapping comes within 5 % of that optimum, which is the
fastest Learner's; that three devices reach up to 11 times the throughput of the baselines (Hopper, batch 16,384); and
up to 997.3 times over all benchmarks. Modelled for the thesis's machine: 1,000,000 slots, K = 2 (the FPGA's programs:
4), 16 Actors. The last two columns are the fastest mapping as a share of the optimum by the model, and how many times
faster it is than the slowest that runs. A dash: cannot run."""
THESIS_CASES = tuple(
    Case("titan_xp_u200", workload, batch, 1_000_000, 2)
    for workload, batches in (
        (THESIS_CARTPOLE, THESIS_BATCHES),
        (THESIS_HOPPER, THESIS_BATCHES),
        (PONG, THESIS_PONG_BATCHES),
    )
    for batch in batches
)
THESIS_MAPPINGS = tuple((learner, replay) for learner in KINDS for replay in KINDS)


def thesis_systems() -> str:
    """GPS of the nine mappings."""
    rows: list[list[object]] = []
    for case in THESIS_CASES:
        found = [_gps(case, *mapping) for mapping in THESIS_MAPPINGS]
        running = [value for value in found if not math.isnan(value)]
        optimum = max(1e6 / candidate.terms.learner_us for candidate in fastest(case).values())
        best = max(running)
        cells = [
            "-" if math.isnan(value) else f"**{rate(value)}**" if value == best else rate(value) for value in found
        ]
        share, times = f"{best / optimum:.0%}", f"{best / min(running):,.1f}"
        rows.append([case.workload.name, f"{case.batch:,}", *cells, share, times])
    mappings = " | ".join(f"{learner}-{replay}" for learner, replay in THESIS_MAPPINGS)
    head = (
        f"benchmark | batch | {mappings} | of the optimum (paper: 95 % or more) | best / slowest (paper: up to 997.3)"
    )
    return f"""## Thesis Fig. 4.11: throughput of all mappings

{paragraph(THESIS_TEXT)}

![GPS of the nine mappings](assets/paper_thesis_systems.svg)

Modelled GPS, Learner-RM:

{_table(head, rows)}
"""


def draw_thesis(path: Path) -> None:
    """A panel for each benchmark."""
    _draw_mappings(path, THESIS_CASES, THESIS_MAPPINGS, "{}-{}")
