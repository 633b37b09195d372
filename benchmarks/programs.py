"""Composed programs, as several benchmarks write and run them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.record import ROOT


def environment() -> dict[str, str]:
    """Environment variables with which a child process finds the project from any folder."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path}


def limit_to(cores: Iterable[int] | None) -> Callable[[], None] | None:
    """A `preexec_fn` by which a child process runs on `cores` alone; None keeps this process's cores."""
    if cores is None or not hasattr(os, "sched_setaffinity"):
        return None
    return lambda: os.sched_setaffinity(0, cores)


def composer_of(
    folder: Path, trainer: type, env: str, envs: int, slots: int, training: Mapping[str, Any], **settings: Any
) -> Any:
    """A composer of one actor with `envs` environments, not yet run; it measures again in each `folder`."""
    from pearl import Composer

    composer = Composer(progress=False, calibration=folder / "calibration.json")
    composer.set_actors(1, env=env, envs_per_actor=envs)
    composer.set_train_function(learner=trainer, **settings)
    composer.set_replay(slots)
    composer.set_training(**training)
    return composer


def run_program(
    program: Path, *options: object, cores: Iterable[int] | None = None, limit_s: float | None = None
) -> None:
    """Run a program to its end, in its folder; raise RuntimeError with the end of its output if it fails."""
    done = subprocess.run(
        [sys.executable, str(program), *map(str, options)],
        env=environment(),
        cwd=program.parent,
        preexec_fn=limit_to(cores),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=limit_s,
    )
    if done.returncode:
        raise RuntimeError(f"{program.name} ended with code {done.returncode}:\n{done.stdout[-2000:]}")


def bench_rates(
    program: Path, *options: object, cores: Iterable[int] | None = None, limit_s: float | None = None
) -> dict[str, Any]:
    """The bench.json of a program that is run with `--bench`."""
    folder = program.parent / "bench"
    run_program(program, "--bench", "--run-dir", folder, *options, cores=cores, limit_s=limit_s)
    rates: dict[str, Any] = json.loads((folder / "bench.json").read_text(encoding="utf-8"))
    return rates


def bench(program: Path, *options: object, cores: Iterable[int] | None = None, limit_s: float | None = None) -> float:
    """Experiences trained per second by a program that is run with `--bench`."""
    return float(bench_rates(program, *options, cores=cores, limit_s=limit_s)["measured_eps"])
