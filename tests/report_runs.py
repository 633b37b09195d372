"""Run folders to report on: a server with three devices, a benchmark with measured iterations, queues and a trace."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from composer.algorithm1 import place
from composer.composition import Composition
from composer.matrix import (
    AssignmentMatrix,
    LearnerCell,
    LearnerOption,
    MatrixRow,
    MissingCell,
    PairCell,
    ReplayCell,
    StorageCell,
    UnavailableDevice,
    UnsupportedLearner,
)
from composer.measurement import Measurement
from composer.platform import Platform
from pearl.devices import Connection, Device
from pearl.runtime.telemetry import PARTS

BATCH = 256


def measured(us: float, spread: float = 0.05) -> Measurement:
    return Measurement(us, us * (1 - spread), us * (1 + spread), 500, "measured")


def replay_cell(sample: float, insert: float, update: float) -> ReplayCell:
    return ReplayCell(measured(sample), measured(insert), measured(update), fanout=16, workers=2)


def modelled_cell(sample: float, insert: float, update: float) -> ReplayCell:
    cells = (Measurement.modelled(us) for us in (sample, insert, update))
    return ReplayCell(*cells, fanout=16)


def imported_step(us: float) -> Measurement:
    return Measurement(us, us * 0.97, us * 1.08, 40, "imported")


def server(metric: str = "throughput", cpu: str = "cpu0", reason: str = "SRAM too small") -> Composition:
    """A CPU with a fast Replay Manager, a GPU with a fast Learner, and an FPGA that takes the Replay Manager only."""
    devices = (
        Device(cpu, "cpu", "cpu", cores=16, memory_gb=128, idle_watts=60, active_watts=150),
        Device("gpu0", "gpu", "cuda", memory_gb=24, idle_watts=20, active_watts=250),
        Device("fpga0", "fpga", "sycl", "opencl:accelerator:0", dsp=4500, memory_gb=16, active_watts=60),
        Device("gpu1", "gpu", "cuda", "cuda:1", active_watts=250),
    )
    links = (
        Connection(cpu, "gpu0", 10, 12),
        Connection(cpu, "fpga0", 6, 8),
        Connection("fpga0", cpu, 9, 7),
        Connection("gpu0", "fpga0", 5, 8),
        Connection(cpu, "gpu1", 10, 12),
    )
    torch = LearnerCell(measured(1900), threads=8)
    native = LearnerCell(measured(1250, 0.11), threads=8, implementation="native")
    on_cpu = replay_cell(12.5, 6.2, 8.1)
    matrix = AssignmentMatrix(
        (
            MatrixRow(
                cpu,
                on_cpu,
                native,
                PairCell(replay_cell(14, 7, 9), LearnerCell(measured(1400), threads=8, implementation="native")),
                (LearnerOption(torch, PairCell(replay_cell(15, 7, 9), LearnerCell(measured(2100), threads=8))),),
                StorageCell(measured(38), measured(4)),
            ),
            MatrixRow(
                "gpu0",
                replay_cell(41, 24, 26),
                LearnerCell(imported_step(310)),
                PairCell(replay_cell(45, 25, 29), LearnerCell(measured(360))),
                storage=StorageCell(measured(21), measured(9)),
            ),
            MatrixRow("fpga0", modelled_cell(3.1, 1.2, 1.3), MissingCell(reason), MissingCell(reason)),
        ),
        (UnavailableDevice("gpu1", "torch finds no second CUDA device"),),
        (UnsupportedLearner("sycl", "convolutions"),),
    )
    platform = Platform(devices, links)
    placement = place(
        matrix,
        platform,
        metric=metric,
        batch_size=BATCH,
        transition_bytes=4 * 84 * 84 * 2,
        actor_count=4,
        envs_per_actor=8,
        messages_us=30.0,
        replay_ratio=8.0,
        priority_update_delay=1,
    )
    return Composition.of(platform, matrix, placement)


def write_run(folder: Path, composition: Composition | None = None, name: str = "dqn-Pong") -> Path:
    """A run folder with everything that a report can show."""
    composition = composition or server()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "composition.json").write_text(composition.to_json())
    terms = dict(zip(PARTS, (12.5, 40.0, 6.2, 8.1, 310.0, 55.0, 372.0), strict=True))
    factors = dict(zip(PARTS, (1.04, 1.31, 0.9, 1.0, 1.07, 1.22, 1.08), strict=True))
    measured = {key: terms[key] * factors[key] for key in PARTS}
    spread = {key: [0.95 * us, 1.08 * us] for key, us in measured.items()}
    iteration = {"predicted_us": terms, "measured_us": measured, "spread_us": spread}
    eps = composition.placement.eps
    rates = {"measured_eps": eps * 0.93, "predicted_eps": eps, "overall_eps": eps * 0.5, "iteration": iteration}
    score = {"episodes": 100, "mean": 18.4, "std": 1.9, "min": 12.0, "max": 21.0}
    summary = {
        "program": name,
        "environment": "ALE/Pong-v5",
        "composed_from": "devices.csv sha256:0123456789ab, connections.csv sha256:ba9876543210",
        "seed": 1,
        "stopped": "all steps done",
        "env_steps": 2_000_000,
        "gradient_steps": 61_200,
        "episodes": 800,
        "replay_ratio": 7.98,
        "wall_s": 2310.4,
        "actor_restarts": 0,
        "last": {"step": 2_000_000, **score},
        "best": {"step": 1_900_000, **score, "mean": 19.7, "selected_mean": 20.4, "selected_episodes": 20},
        **rates,
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "bench.json").write_text(json.dumps({"program": name, **rates, "iteration": {"measured_us": terms}}))
    _write_tables(folder)
    (folder / "trace.json").write_text(json.dumps({"traceEvents": trace_events()}))
    return folder


def _write_tables(folder: Path) -> None:
    generator = np.random.default_rng(0)
    progress = [
        "wall_s,env_steps,gradient_steps,episodes,training_return,eps,gps,queue/DCQ,queue/LAQ,busy/learner,busy/replay_manager"
    ]
    episodes = ["env_steps,wall_s,actor,return,length,episodes"]
    evaluations = ["env_steps,wall_s,kind,weights_step,mean_return,std_return,episodes"]
    for number in range(1, 801):
        step, wall = 2500 * number, 2.9 * number
        mean = -21 + 41 / (1 + np.exp(-(number - 350) / 60))
        episodes.append(f"{step},{wall:.2f},{number % 4},{mean + 2 * generator.normal():.2f},3000,1")
        eps = 1.6e5 * (1 + 0.05 * generator.normal()) if number > 20 else 0.0
        levels = generator.integers(0, 3, 2) / 2
        progress.append(f"{wall:.2f},{step},{step // 33},{number},{mean:.2f},{eps:.0f},{eps / BATCH:.1f}")
        progress[-1] += f",{levels[0]},{levels[1]},0.93,0.1"
        if number % 40 == 0:
            evaluations.append(f"{step},{wall:.2f},progress,{step},{mean + 1:.2f},1.0,20")
    evaluations.append("2000000,2320,best,1900000,19.7,1.9,100")
    evaluations.append("2000000,2320,last,2000000,18.4,1.9,100")
    for name, lines in (("progress", progress), ("episodes", episodes), ("evaluations", evaluations)):
        (folder / f"{name}.csv").write_text("\n".join(lines) + "\n")


def trace_events() -> list[dict[str, object]]:
    """Iterations of about 400 us on three threads, and the level of one queue."""
    names = ((1, 1, "Host Runtime"), (1, 2, "Replay Manager"), (2, 3, "Learner"))
    events: list[dict[str, object]] = [
        *(
            {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
            for pid, name in ((1, "cpu0"), (2, "gpu0"))
        ),
        *(
            {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}
            for pid, tid, name in names
        ),
    ]
    for batch in range(50):
        start = 400.0 * batch
        for tid, name, at, us in (
            (2, "sampling", 0, 13),
            (1, "gather", 16, 44),
            (3, "training", 62, 330),
            (2, "update", 394, 8),
            (2, "insertion", 20, 6),
        ):
            events.append({"ph": "X", "pid": 1 + tid // 3, "tid": tid, "name": name, "ts": start + at, "dur": us})
        events.append({"ph": "C", "pid": 1, "name": "LAQ", "ts": start + 60, "args": {"messages": batch % 3}})
    return events
