"""Sections of docs/paper.md on returns: PEARL Fig. 11, CF'22's LunarLander and the thesis's Fig. 4.8."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.fpga_model import PEARL_CARTPOLE, THESIS_HOPPER, _platform, _table
from benchmarks.paper_plots import Line, Panel, draw_lines
from benchmarks.paper_results import Results, paragraph, rate
from benchmarks.paper_systems import Case, placement

# Mean return that counts as reached: those that `make bench-solve` and Gymnasium use.
GOALS = {"CartPole DQN": 475.0, "MountainCar DDPG": 85.0, "LunarLander DQN": 200.0}
POINTS = 40  # of a curve over seconds

# --- PEARL Fig. 11 and CF'22's LunarLander ---------------------------------------------------------------------------

CURVES_TEXT = """PEARL Fig. 11 plots the rewards of its three benchmarks over wall-clock time: means of 5 runs without
numbers in the text, which says that PEARL converges faster without significantly sacrificing reward. CF'22 states
LunarLander as one of its two environments, and no returns. Here a point is the mean return of 10 greedy episodes, and
the band is the range over the seeds. Stable-Baselines3 has the settings that its RL Zoo tuned for the environment
(for DDPG its defaults with correlated noise), which are not those of the program: the figure compares what a user of
each gets. It was stopped by time, with one thread of torch, and its seconds leave its evaluations out; those of PEARL
include them. Pong was not trained for this page; [a run of its example](getting_started.md) has its own picture. The
last columns are the first evaluation that reaches the goal, in seconds of training and in environment steps: the
median over the seeds, if all reach it."""


def curves() -> str:
    """Best evaluations, and how soon the goal was reached."""
    results = Results.load("paper")
    rows: list[list[object]] = []
    for (task, side), found in _by_side(results).items():
        goal = GOALS[task]
        best = [max(curve["returns"]) for curve in found]
        reached = [at for curve in found if (at := _reached(curve, goal)) is not None]
        seconds, steps = "-", "-"
        if len(reached) == len(found):
            seconds = f"{np.median([at[0] for at in reached]):.3g}"
            steps = f"{np.median([at[1] for at in reached]):,.0f}"
        trained = f"{max(max(curve['steps']) for curve in found):,}"
        longest = f"{max(max(curve['seconds']) for curve in found):.3g}"
        values = f"{np.median(best):.4g} ({min(best):.4g} to {max(best):.4g})"
        count = f"{len(reached)}/{len(found)}"
        rows.append([task, side, len(found), trained, longest, values, f"{goal:g}", count, seconds, steps])
    head = (
        "benchmark | trained by | seeds | steps | seconds | best evaluation: median (range) | goal | seeds reach it "
        "| seconds to it | steps to it"
    )
    return f"""## PEARL Fig. 11 and CF'22's LunarLander: learning curves

{paragraph(CURVES_TEXT)}

{paragraph(f"Measured here: {results.provenance}.")}

![Mean returns against environment steps and seconds](assets/paper_curves.svg)

{_table(head, rows)}

{paragraph(RELATED)}
"""


RELATED = """[benchmarks.md](benchmarks.md) has further measurements of the same kind: `solve_time` (seconds until
solved, compared with two other frameworks), `solve` (returns of all examples) and `curves` (native and torch
Learner)."""


def _by_side(results: Results) -> dict[tuple[str, str], list[dict[str, Any]]]:
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for curve in results.document["curves"]:
        found.setdefault((curve["task"], curve["side"]), []).append(curve)
    return found


def _reached(curve: dict[str, Any], goal: float) -> tuple[float, int] | None:
    """Seconds and steps of the first evaluation at `goal` or above."""
    points = zip(curve["returns"], curve["seconds"], curve["steps"], strict=True)
    return next(((seconds, steps) for value, seconds, steps in points if value >= goal), None)


def _line(label: str, found: list[dict[str, Any]], axis: str) -> Line:
    """The median and the range over the seeds, at points that all of them span; one point if there is no such span."""
    first, last = max(curve[axis][0] for curve in found), min(curve[axis][-1] for curve in found)
    x = np.linspace(first, last, POINTS) if first < last else np.array([first])
    values = np.stack([np.interp(x, curve[axis], curve["returns"]) for curve in found])
    median, low, high = (np.round(found, 3).tolist() for found in (np.median(values, 0), values.min(0), values.max(0)))
    return Line(label, np.round(x, 3).tolist(), median, low, high)


def draw_curves(path: Path) -> None:
    """A row for each axis, a column for each task."""
    found = _by_side(Results.load("paper"))
    tasks = list(dict.fromkeys(task for task, _ in found))
    panels = []
    for axis, label in (("steps", "environment steps"), ("seconds", "seconds of training")):
        for task in tasks:
            lines = [_line(side, curves, axis) for (of, side), curves in found.items() if of == task]
            panels.append(Panel(task, label, "mean greedy return", lines, logarithmic=False))
    draw_lines(path, panels, len(tasks))


# --- thesis Fig. 4.8 -------------------------------------------------------------------------------------------------

DELAYS_TEXT = """The thesis's Fig. 4.8 shows the final reward of CartPole, Hopper and Pong with priority update delays
D of 1, 10, 50, 100 and 200, normalized to an expert's: bars without numbers. Its text says that the degradation is
almost negligible even at D = 200, and that the delay improves the throughput significantly. Measured here: DQN on
CartPole-v1 in setting 1, the Replay Manager on the CPU and the Learner on SYCL's CPU device; returns of 500 are the
most that the environment gives. "Best weights" won the evaluations during training and were scored with other
episodes. D = 0 waits for every update. Both devices are the same two cores here, so that a delay cannot gain what it
gains on two devices: the last columns have the modelled EPS of RM and Learner on different devices, GPU and FPGA, of
Server_CGF and the thesis's machine."""
DELAY = re.compile(r"delay (\d+): throughput")
MODELLED = (
    ("CartPole DQN on Server_CGF, batch 512", Case("server_cgf", PEARL_CARTPOLE, 512, 100_000, 16), "gpu", "fpga"),
    (
        "Hopper DDPG on the thesis's machine, batch 256",
        Case("titan_xp_u200", THESIS_HOPPER, 256, 1_000_000, 2),
        "fpga",
        "gpu",
    ),
)


def _delays(results: Results) -> Iterator[int]:
    for case in results.medians:
        if match := DELAY.fullmatch(case):
            yield int(match[1])


def _modelled(case: Case, delay: int, replay: str, learner: str) -> float:
    """EPS of the fastest program with RM and Learner on devices of these kinds."""
    kinds = {device.name: device.kind for device in _platform(case.platform).devices}
    candidates = placement(case, "throughput", delay).candidates
    return max(c.eps for c in candidates if (kinds[c.replay.device], kinds[c.learner.device]) == (replay, learner))


def delays() -> str:
    """Throughput and returns at each delay."""
    results = Results.load("paper")
    spread = {row["case"]: row["spread"] for row in results.document["rows"]}
    rows: list[list[object]] = []
    for delay in _delays(results):
        cells = []
        for weights in ("last", "best"):
            case = f"delay {delay}: return of the {weights} weights"
            low, high = spread[case]
            cells.append(f"{results.medians[case]:.4g} ({low:.4g} to {high:.4g})")
        throughput = rate(results.medians[f"delay {delay}: throughput"])
        model = [rate(_modelled(case, delay, *kinds)) for _, case, *kinds in MODELLED]
        rows.append([delay, throughput, *cells, *model])
    head = (
        "D | EPS, measured here | return of the last weights: median (range) | return of the best weights | "
        + " | ".join(f"{name}: EPS, modelled" for name, *_ in MODELLED)
    )
    return f"""## Thesis Fig. 4.8: priority update delay

{paragraph(DELAYS_TEXT)}

{paragraph(f"Measured here: {results.provenance}.")}

![Throughput and return against the priority update delay](assets/paper_delays.svg)

{_table(head, rows)}
"""


def draw_delays(path: Path) -> None:
    """Throughput, and the returns of last and best weights with their ranges."""
    results = Results.load("paper")
    at = list(_delays(results))
    spread = {row["case"]: row["spread"] for row in results.document["rows"]}
    places, ticks = range(len(at)), [str(delay) for delay in at]
    rates = Line("throughput", places, [results.medians[f"delay {delay}: throughput"] for delay in at])
    returns = []
    for weights in ("last", "best"):
        cases = [f"delay {delay}: return of the {weights} weights" for delay in at]
        low, high = ([spread[case][side] for case in cases] for side in (0, 1))
        returns.append(
            Line(f"return of the {weights} weights", places, [results.medians[case] for case in cases], low, high)
        )
    panels = [
        Panel("DQN CartPole-v1, setting 1", "priority update delay", label, lines, logarithmic=False, ticks=ticks)
        for label, lines in (("EPS", [rates]), ("return", returns))
    ]
    draw_lines(path, panels, 2)
