"""A program's record of its composition, and how a run whose iterations drifted is composed again.

The run saves a checkpoint and its process becomes `composer.recompose`, which measures again, writes a new program next
to the old one, and becomes that program: it resumes from the checkpoint. So only one of the three holds memory and
devices at a time, and whoever started the run keeps the same process.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

if TYPE_CHECKING:
    from pearl.runtime.options import Options

# Ctrl-C is answered with one line also during the imports.
_COMPOSE = (
    "from pearl.runtime import begin_program; begin_program(); import sys; "
    "from composer.recompose import main; main(sys.argv[1])"
)


@dataclass(frozen=True)
class ComposerInputs:
    """Further inputs of the composer, besides a program's ACTORS, REPLAY or ROLLOUT, TRAIN and SETTINGS.

    `trainer` is the trainer class's name in the program. `placed` says where the primitives are. `devices` and
    `connections` are the CSV files, seen from the program's folder; "" if the composer discovered the machine.
    `priority_update_delay` is the one for setting 1. `cluster` is the address of `Composer.set_cluster`, "" without
    one, and `cluster_nodes` the nodes that it was given (None: all).
    """

    trainer: str
    placed: str
    devices: str
    connections: str
    metric: str = "throughput"
    implementation: str = "auto"
    imported_from: str | None = None
    fanout: int | Literal["auto"] = 16
    priority_update_delay: int = 1
    cluster: str = ""
    cluster_nodes: tuple[str, ...] | None = None


class RecompositionDueError(Exception):
    """Not a failure: the run has stopped and is saved, to be composed again."""

    def __init__(self, request: Request) -> None:
        super().__init__(f"{request.program} is to be composed again.")
        self.request = request


@dataclass(frozen=True)
class Request:
    """A request to compose again: program, reason, defaults of the new program's options, and its command line."""

    program: str
    drift: str
    defaults: Mapping[str, Any]
    arguments: tuple[str, ...]

    @classmethod
    def of(cls, program: Path, options: Options, drift: str) -> Request:
        """The request of the running program, which goes on with the command line of this process.

        Paths of the command line are stated again, absolute: an environment may have changed the working directory.
        """
        defaults = {
            "timesteps": options.timesteps,
            "run_dir": str(options.run_dir.absolute()),
            "until_return": "none" if options.until_return is None else options.until_return,
            "seed": options.seed,
            "eval_episodes": options.eval_episodes,
            "eval_interval": options.eval_interval,
            "checkpoint_interval": options.checkpoint_interval,
        }
        paths = ["--run-dir", str(options.run_dir), "--checkpoint-dir", str(options.checkpoint_dir)]
        paths += [] if options.trace is None else ["--trace", str(options.trace)]
        return cls(str(program.absolute()), drift, defaults, (*sys.argv[1:], *paths))

    def to_json(self) -> str:
        """Text for a command line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Request:
        """The inverse of `to_json`."""
        values = json.loads(text)
        return cls(**{**values, "arguments": tuple(values["arguments"])})


def compose_again(request: Request) -> NoReturn:
    """Replace this process by the composer, which replaces itself by the new program."""
    gc.unfreeze()
    gc.collect()
    atexit._run_exitfuncs()  # the process's exit handlers: they release shared memory and helper processes
    become([sys.executable, "-c", _COMPOSE, request.to_json()], initial_environment())


def become(command: list[str], environment: Mapping[str, str]) -> NoReturn:
    """Replace this process by the command."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.execve(command[0], command, dict(environment))


def initial_environment() -> dict[str, str]:
    """The environment without what the program itself set: that must not change how the composer measures."""
    environment = dict(os.environ)
    try:
        began_with = Path("/proc/self/environ").read_bytes().split(b"\0")
    except OSError:
        return environment
    if not any(item.startswith(b"OMP_WAIT_POLICY=") for item in began_with):
        environment.pop("OMP_WAIT_POLICY", None)
    return environment
