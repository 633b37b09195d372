"""Command-line options of a generated program."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pearl.errors import ConfigurationError
from pearl.spec import ActorSpec

MOST_SEED = 2**62 - 1
PLOT_VARIABLE = "PEARL_PLOT"
_BENCH_S = 10.0


@dataclass(frozen=True)
class Options:
    """What the command line of a runtime program says; see `--help` for each.

    Its paths are absolute: an environment may change the working directory.
    """

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
    eval_max_steps: int = 30_000  # a game of Atari may take 27,000
    bench_paced: bool = False
    bench_both: bool = False
    eval_beside: bool | None = None  # None: where a core is idle
    actor_timeout_s: float | None = None  # None: as the program's ActorSpec says
    trace: Path | None = None
    plain: bool = False
    plot: bool = True
    recompose: bool | None = None  # None: the command line says nothing about it
    drift_threshold: float = 1.5
    drift_seconds: float = 60.0
    ray: str | None = None  # the address of a Ray cluster for the actors, "local" for one of this machine alone
    weights_from: Path | None = None  # a run folder or weights file with the networks to start with
    transitions_from: Path | None = None  # a run folder or file of steps to fill the replay with
    pretrain: int = 0
    program: Path | None = None  # the program's own file


def _whole(text: str) -> int:
    plain = text.replace("_", "")
    try:
        value = int(plain) if plain.isdecimal() else float(plain)  # a float has no large seeds
    except ValueError:
        value = math.nan
    if not (value >= 0 and value == value // 1):
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 0, found {text!r}")
    return int(value)


def _path(text: str) -> Path:
    if not text:  # of a variable of the shell that is not set
        raise argparse.ArgumentTypeError("expected a path, found ''")
    return Path(text)


def _seed(text: str) -> int:
    value = _whole(text)
    if value > MOST_SEED:
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


def _factor(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 1):
        raise argparse.ArgumentTypeError(f"expected a number above 1, found {text!r}")
    return value


def _patience(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not value >= 0:
        raise argparse.ArgumentTypeError(f'expected seconds of at least 0, or "inf", found {text!r}')
    return value


def _return(text: str) -> float | None:
    try:
        return check_goal(text if text.lower() == "none" else float(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f'expected a number, or "none" or "inf" to use all steps; found {text!r}'
        ) from error


def check_goal(value: object) -> float | None:
    """The mean return at which a run stops early; None, which "none" and infinity also mean, for never.

    Raises ConfigurationError for anything else.
    """
    if value is None or (isinstance(value, str) and value.lower() == "none"):
        return None
    if isinstance(value, int | float) and not isinstance(value, bool) and value > -math.inf:
        return None if value == math.inf else float(value)
    raise ConfigurationError(
        f'until_return must be a number, or "none" or inf for a run that never stops early; found {value!r}.'
    )


def check_count(name: str, value: object) -> int:
    """A seed, a count of episodes, or an interval in steps; raises ConfigurationError for anything else."""
    most = MOST_SEED if name == "seed" else math.inf
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        limit = "below 2**62" if name == "seed" else "of at least 0"
        raise ConfigurationError(f"{name} must be a whole number {limit}; found {value!r}.")
    return value


def parse_options(
    description: str | None,
    *,
    timesteps: int,
    run_dir: Path | str,
    program: Path | str | None = None,
    until_return: float | None = None,
    seed: int = 1,
    eval_episodes: int = 100,
    eval_interval: int = 0,
    checkpoint_interval: int = 0,
    arguments: Sequence[str] | None = None,
) -> Options:
    """Parse the command line (or `arguments`) of a program with these defaults; exits with a message on bad input.

    An interval of 0 is a share of the run: a twentieth for evaluations, a tenth for checkpoints. An `until_return` of
    None or infinity never stops the run early. A relative `run_dir` counts from the folder of the file `program`, where
    that is given; `--run-dir` never does.
    """
    here = Path() if program is None else Path(program).resolve().parent
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
        type=_path,
        default=here / run_dir,
        metavar="DIR",
        help="folder for logs, curve and weights (default: %(default)s)",
    )
    add("--checkpoint-dir", type=_path, metavar="DIR", help="folder for checkpoints (default: RUN_DIR/checkpoints)")
    add(
        "--checkpoint-interval",
        type=_whole,
        default=checkpoint_interval,
        metavar="N",
        help="environment steps between checkpoints; 0 for a tenth of the run (default: %(default)s)",
    )
    add("--resume", action="store_true", help="go on from the newest checkpoint")
    add(
        "--weights-from",
        type=_path,
        metavar="RUN",
        help="start with the networks of another run: its folder, for its best weights if it has some, or a file of "
        "weights; with --resume the checkpoint's count",
    )
    add(
        "--transitions-from",
        type=_path,
        metavar="DATA",
        help="start with a replay of given transitions: the folder of another run, or an .npz file of steps; with "
        "--resume the checkpoint's count",
    )
    add(
        "--pretrain",
        type=_whole,
        default=0,
        metavar="N",
        help="with --transitions-from: train N batches of them before the Actors collect; with --timesteps 0 nothing "
        "else (default: %(default)s)",
    )
    add("--serial", action="store_true", help="one thread, deterministic to the bit for a seed")
    add(
        "--bench",
        action="store_true",
        help="fill the replay with random transitions, train as fast as possible without waiting for data, and report "
        "the rate (after 1 s of warm-up)",
    )
    add(
        "--bench-seconds",
        type=_seconds,
        metavar="S",
        help=f"how long --bench measures (default: {_BENCH_S:g})",
    )
    add("--bench-paced", action="store_true", help="with --bench: keep the replay ratio, as in a run")
    add("--bench-both", action="store_true", help="with --bench: measure at the replay ratio, then without waiting")
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
        default=eval_interval,
        metavar="N",
        help="environment steps between short evaluations, which select the best weights; 0 for a twentieth of the run "
        "(default: %(default)s)",
    )
    add(
        "--eval-max-steps",
        type=_whole,
        default=Options.eval_max_steps,
        metavar="N",
        help="end an evaluation's episode after so many steps, where the environment has no time limit of its own; "
        "0 for never (default: %(default)s)",
    )
    add(
        "--eval-beside",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="play the short evaluations in a process of their own while training goes on (default: where they take "
        "more than half a second, and there are more cores than Actors and threads of the Learner)",
    )
    add(
        "--actor-timeout",
        type=_patience,
        metavar="S",
        help="restart an actor that hangs for so many seconds; 0 for never (default: the timeout_s of the actors, "
        f"{ActorSpec.timeout_s:g} unless set)",
    )
    add(
        "--recompose",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="when iterations drift from the prediction: save a checkpoint, measure and place again, and go on with "
        "the new program, which is written next to this one (default: only report that)",
    )
    add(
        "--drift-threshold",
        type=_factor,
        default=Options.drift_threshold,
        metavar="X",
        help="iterations drift if they take more than X times the predicted time, or less than 1/X of it "
        "(default: %(default)s)",
    )
    add(
        "--drift-seconds",
        type=_seconds,
        default=Options.drift_seconds,
        metavar="S",
        help="how long they must drift before it is reported (default: %(default)s)",
    )
    add(
        "--until-return",
        type=_return,
        default=check_goal(until_return),
        metavar="R",
        help='stop early when the mean greedy return reaches R; "none" or "inf": use all steps (default: %(default)s)',
    )
    add(
        "--trace",
        type=_path,
        metavar="FILE",
        help="write what each thread did when, and how full the queues were, to a file that https://ui.perfetto.dev "
        "opens: the newest 50,000 events of each thread",
    )
    add(
        "--ray",
        nargs="?",
        const="local",
        metavar="ADDRESS",
        help="run the Actors, and several Learners, on the nodes of the Ray cluster at this address, such "
        "as 10.0.0.1:6379, or auto for the one that `ray start` began here; without an address in a cluster of this "
        "machine alone",
    )
    add("--plain", action="store_true", help="plain lines instead of the live view, also on a terminal")
    add(
        "--plot",
        action=argparse.BooleanOptionalAction,
        default=os.environ.get(PLOT_VARIABLE) != "0",
        help=f"draw the learning curve at the end (default: yes, unless the variable {PLOT_VARIABLE} is 0)",
    )
    a = parser.parse_args(arguments)
    for name, given in (("seconds", a.bench_seconds is not None), ("paced", a.bench_paced), ("both", a.bench_both)):
        if given and not a.bench:
            parser.error(f"--bench-{name} belongs to --bench: give both")
    if a.bench_paced and a.bench_both:
        parser.error("--bench-both measures what --bench-paced does, and more: leave one of them out")
    if a.pretrain and a.transitions_from is None:
        parser.error("--pretrain trains on the transitions of --transitions-from: give both")
    if a.transitions_from is not None and a.bench:
        parser.error("--transitions-from has no use with --bench, whose transitions are random: leave one of them out")
    if a.eval_beside and (a.serial or a.bench):
        without = "a run in one thread" if a.serial else "--bench, which evaluates nothing"
        parser.error(f"--eval-beside has no use with {without}: leave one of them out")
    if a.ray is not None and a.serial:
        parser.error("--ray has no use with --serial, whose Actors run in the host's thread: leave one of them out")
    if a.recompose and (a.serial or a.bench):
        parser.error(f"--recompose has no use with {'--serial' if a.serial else '--bench'}: leave one of them out")
    folder = a.run_dir.absolute()
    return Options(
        timesteps=a.timesteps,
        seed=a.seed,
        run_dir=folder,
        checkpoint_dir=folder / "checkpoints" if a.checkpoint_dir is None else a.checkpoint_dir.absolute(),
        checkpoint_interval=a.checkpoint_interval or max(1, a.timesteps // 10),
        resume=a.resume,
        serial=a.serial,
        bench=a.bench,
        bench_seconds=_BENCH_S if a.bench_seconds is None else a.bench_seconds,
        bench_paced=a.bench_paced,
        bench_both=a.bench_both,
        eval_episodes=a.eval_episodes,
        eval_interval=a.eval_interval or max(1, a.timesteps // 20),
        until_return=a.until_return,
        eval_max_steps=a.eval_max_steps,
        eval_beside=a.eval_beside,
        actor_timeout_s=a.actor_timeout,
        trace=None if a.trace is None else a.trace.absolute(),
        plain=a.plain,
        plot=a.plot,
        recompose=a.recompose,
        drift_threshold=a.drift_threshold,
        drift_seconds=a.drift_seconds,
        ray=a.ray,
        weights_from=None if a.weights_from is None else a.weights_from.absolute(),
        transitions_from=None if a.transitions_from is None else a.transitions_from.absolute(),
        pretrain=a.pretrain,
        program=None if program is None else Path(program).resolve(),
    )
