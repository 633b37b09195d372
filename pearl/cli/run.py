"""`pearl run` and `pearl bench`: run a composed program, or measure its speed."""

from __future__ import annotations

import math
import shlex
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from pearl.cli.app import app, examples
from pearl.cli.iteration import iteration_table
from pearl.cli.output import console, facts_table, read_json
from pearl.errors import ConfigurationError
from pearl.runtime.launch import run_generated
from pearl.runtime.power import power_text
from pearl.runtime.scores import number

if TYPE_CHECKING:
    from rich.table import Table

_Program: TypeAlias = Annotated[Path, typer.Argument(help="A program that was composed.")]
_Options: TypeAlias = Annotated[list[str] | None, typer.Argument(help="Options of the program itself; see its --help.")]


@app.command(
    name="run",
    context_settings={"allow_interspersed_args": False},
    epilog=examples(
        "pearl run runs/cartpole/program.py",
        "pearl run runs/cartpole/program.py --seed 2 --timesteps 20_000",
        "pearl run runs/cartpole/program.py --help",
    ),
)
def _run(program: _Program, options: _Options = None) -> None:
    """Run a composed program; the arguments after its name go to the program.

    Its exit code is returned. Ctrl-C lets it write a checkpoint and stop; a second one stops it at once.
    """
    raise typer.Exit(run_generated(program, _passed_on(options)))


@app.command(
    name="bench",
    epilog=examples(
        "pearl bench runs/cartpole/program.py --seconds 30",
        "pearl bench runs/cartpole/program.py --paced",
        "pearl bench runs/cartpole/program.py -- --seed 2",
    ),
)
def _bench(
    program: _Program,
    options: _Options = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="How long to measure, from the first batch on.")] = 10.0,
    paced: Annotated[bool, typer.Option("--paced", help="Keep the program's replay ratio, as in a run.")] = False,
) -> None:
    """Measure how fast a composed program trains, compared with the composer's prediction.

    The program trains free-running, without waiting for data, in a temporary folder: nothing of its runs changes. The
    prediction is the one for such a run; with --paced, both are at the program's replay ratio.
    """
    own = _passed_on(options)
    if any(len(name := option.partition("=")[0]) > 3 and "--run-dir".startswith(name) for option in own):
        raise ConfigurationError(
            f"pearl bench measures in a temporary folder: leave --run-dir out, or run `pearl run "
            f"{shlex.quote(str(program))} --bench --run-dir DIR`."
        )
    with tempfile.TemporaryDirectory(prefix="pearl-bench-") as folder:
        measuring = ["--bench", "--bench-seconds", str(seconds), "--run-dir", folder]
        measuring += ["--bench-paced"] if paced else []
        code = run_generated(program, [*measuring, *own])
        result = Path(folder) / "bench.json"
        rates = read_json(result) if result.exists() else None
    if rates is None:
        if not code:
            raise ConfigurationError(
                f"{program} ended without a measurement: it is not a composed program, or one of its options, such as "
                "--help, kept it from measuring."
            )
        raise typer.Exit(code)
    out = console()
    out.print(rates_table(rates))
    if table := iteration_table(rates):
        out.print(table)
    raise typer.Exit(code)


def _passed_on(options: Sequence[str] | None) -> Sequence[str]:
    """The options without a leading `--`."""
    options = options or []
    return options[1:] if options[:1] == ["--"] else options


def rates_table(rates: Mapping[str, Any]) -> Table:
    """A benchmark's rates next to the prediction."""
    predicted, measured, overall = (number(rates, key) for key in ("predicted_eps", "measured_eps", "overall_eps"))
    pace = number(rates, "paced_at")
    how = f"at a replay ratio of {pace:g}" if math.isfinite(pace) else "with Actors that run free"
    share = f"{measured / predicted:.2f} of the prediction" if predicted else "no prediction"
    power = {"power": power_text(rates)} if number(rates, "watts") > 0 else {}
    return facts_table(
        f"Experiences trained per second (EPS) of {rates.get('program', 'the program')}",
        {
            f"predicted by the composer, {how}": f"{predicted:,.0f}",
            "measured, while a batch was under way": f"{measured:,.0f} ({share})",
            "measured, waiting for data included": f"{overall:,.0f}",
            "gradient steps per second (GPS), waiting included": f"{number(rates, 'overall_gps'):,.1f}",
            **power,
        },
    )
