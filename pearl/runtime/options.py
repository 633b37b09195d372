"""Command-line options of a generated program."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Options:
    """What the command line of a runtime program says; see `--help` for each."""

    timesteps: int
    seed: int
    run_dir: Path
    checkpoint_dir: Path
    checkpoint_interval: int
    resume: bool
    serial: bool
    bench: bool
    bench_seconds: float
    eval_episodes: int
    eval_interval: int
    until_return: float | None


def _whole(text: str) -> int:
    try:
        value = float(text.replace("_", ""))
    except ValueError:
        value = math.nan
    if not (value >= 0 and value.is_integer()):
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 0, found {text!r}")
    return int(value)


def _seed(text: str) -> int:
    value = _whole(text)
    if value >= 1 << 62:
        raise argparse.ArgumentTypeError(f"expected a seed below 2**62, found {text!r}")
    return value


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"expected seconds above 0, found {text!r}")
    return value


def _return(text: str) -> float | None:
    if text.lower() == "none":
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f'expected a number or "none", found {text!r}')
    return value


def parse_options(
    description: str | None,
    *,
    timesteps: int,
    run_dir: Path | str,
    until_return: float | None = None,
    seed: int = 1,
    eval_episodes: int = 100,
    arguments: Sequence[str] | None = None,
) -> Options:
    """Parse the command line (or `arguments`) of a program with these defaults; exits with a message on bad input."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--timesteps", type=_whole, default=timesteps, metavar="N", help="environment steps (default: %(default)s)")
    add(
        "--seed",
        type=_seed,
        default=seed,
        metavar="N",
        help="seed of networks, environments, noise and sampling (default: %(default)s)",
    )
    add(
        "--run-dir",
        type=Path,
        default=Path(run_dir),
        metavar="DIR",
        help="folder for logs, curve and weights (default: %(default)s)",
    )
    add("--checkpoint-dir", type=Path, metavar="DIR", help="folder for checkpoints (default: RUN_DIR/checkpoints)")
    add(
        "--checkpoint-interval",
        type=_whole,
        default=0,
        metavar="N",
        help="environment steps between checkpoints (default: a tenth of the run)",
    )
    add("--resume", action="store_true", help="go on from the newest checkpoint")
    add("--serial", action="store_true", help="one thread, deterministic to the bit for a seed")
    add(
        "--bench",
        action="store_true",
        help="train as fast as possible without waiting for data, and report the rate (after 1 s of warm-up)",
    )
    add(
        "--bench-seconds",
        type=_seconds,
        default=10.0,
        metavar="S",
        help="how long --bench measures (default: %(default)s)",
    )
    add(
        "--eval-episodes",
        type=_whole,
        default=eval_episodes,
        metavar="N",
        help="greedy episodes that score the last and the best weights at the end; 0: no evaluations at all "
        "(default: %(default)s)",
    )
    add(
        "--eval-interval",
        type=_whole,
        default=0,
        metavar="N",
        help="environment steps between short evaluations, which select the best weights "
        "(default: a twentieth of the run)",
    )
    add(
        "--until-return",
        type=_return,
        default=until_return,
        metavar="R",
        help='stop early when the mean greedy return reaches R; "none" to use all steps (default: %(default)s)',
    )
    a = parser.parse_args(arguments)
    return Options(
        timesteps=a.timesteps,
        seed=a.seed,
        run_dir=a.run_dir,
        checkpoint_dir=a.checkpoint_dir or a.run_dir / "checkpoints",
        checkpoint_interval=a.checkpoint_interval or max(1, a.timesteps // 10),
        resume=a.resume,
        serial=a.serial,
        bench=a.bench,
        bench_seconds=a.bench_seconds,
        eval_episodes=a.eval_episodes,
        eval_interval=a.eval_interval or max(1, a.timesteps // 20),
        until_return=a.until_return,
    )
