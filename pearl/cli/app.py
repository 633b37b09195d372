"""The application that all commands belong to, and how it shows errors."""

from __future__ import annotations

import atexit
import gc
import os
import sys
import traceback
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from pearl import __version__
from pearl.errors import PearlError
from pearl.process_limits import limit_reached
from pearl.runtime.entry import DEBUG_VARIABLE
from pearl.standard_streams import keep_standard_streams


class Group(TyperGroup):
    """Shows expected errors as one message; with --debug, their traceback too."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command; an expected error ends it with exit code 1."""
        try:
            return super().invoke(ctx)
        except Exception as error:
            message = str(error) if isinstance(error, PearlError) else limit_reached(error)
            if message is None:
                raise
            if ctx.params.get("debug"):
                traceback.print_exc()
            print(f"Error: {message}", file=sys.stderr)
            raise typer.Exit(1) from error


def examples(*commands: str) -> str:
    """The epilog of a command's help."""
    return "Examples:\n\n```text\n" + "\n".join(commands) + "\n```"


app = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=examples(
        "pearl devices",
        "pearl compose examples/cartpole.toml",
        "pearl run examples/runs/cartpole/program.py",
        "pearl report examples/runs/cartpole",
    ),
)


def main() -> None:
    """Entry point of the command."""
    keep_standard_streams()
    atexit.register(gc.freeze)  # as in `begin_program`
    app(prog_name="pearl")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"pearl {__version__}")
        raise typer.Exit


@app.callback()
def _pearl(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error too, also of a program's.")
    ] = False,
) -> None:
    """Compose deep reinforcement learning for the heterogeneous machine at hand.

    Describe the machine (devices), choose settings for an environment (suggest), measure in advance or for another
    machine (calibrate), have every primitive profiled and placed and a training program written (compose), run that
    program (run), search its settings (sweep), measure its speed (bench), summarise its results (report), and use its
    policy (evaluate, enjoy, export).
    """
    if debug:
        os.environ[DEBUG_VARIABLE] = "1"
