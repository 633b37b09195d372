"""`pearl sweep`: search the settings of a composition."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pearl.cli.app import app, examples
from pearl.cli.output import console
from pearl.error_place import described
from pearl.errors import GenerationError
from pearl.extras import import_extra
from pearl.process_limits import check_address_space

if TYPE_CHECKING:
    from composer.sweep.spec import SweepSpec
    from composer.sweep.study import TrialRow


@app.command(
    name="sweep",
    epilog=examples(
        "pearl sweep my_sweep.toml --trials 50",
        "pearl sweep my_sweep.toml --trials 50 --jobs 2 --folder /data/my_sweep",
    ),
)
def _sweep(
    spec: Annotated[Path, typer.Argument(help="A composition with [sweep] and [search.TABLE]; see docs/sweeps.md.")],
    trials: Annotated[int, typer.Option(min=1, help="How many trials the sweep has in all.")] = 50,
    jobs: Annotated[int, typer.Option(min=1, help="How many of them run at a time.")] = 1,
    folder: Annotated[
        Path | None, typer.Option(help="Where the trials go. Default: sweeps/NAME next to the file.")
    ] = None,
) -> None:
    """Search the settings of a composition: each trial is a program, run with several seeds.

    Needs the extra `sweep` (Optuna). Ctrl-C lets the programs save and stop; the same command goes on, also after the
    sweep was killed, and with more --trials adds some. At the end: a table (sweep.csv) and a picture (sweep.png).
    """
    import_extra("optuna", "sweep", "A sweep")
    check_address_space()
    from composer.sweep.result import best_command, ranked, result_table, write_table
    from composer.sweep.spec import read_sweep
    from composer.sweep.sweep import run_sweep

    found = read_sweep(spec)
    place = folder or spec.parent / "sweeps" / spec.stem
    for one in found.space:
        print(f"Search: {one.name}: {one.text}")
    study, code = run_sweep(found, place, trials, jobs, lambda line: print(line, flush=True))
    rows = study.rows()
    console().print(result_table(found, rows))
    try:
        write_table(found, rows, place / "sweep.csv")
        picture = _drawn(found, rows, place / "sweep.png")
    except OSError as error:
        raise GenerationError(
            f"{place} cannot take sweep.csv and sweep.png: {error.strerror or error}. The trials are kept in study.db: "
            "the same command writes them."
        ) from error
    print(f"Table:   {place / 'sweep.csv'}\nPicture: {picture}")
    best = ranked(rows)[0] if rows else None
    if best is None or best.state != "complete":
        raise typer.Exit(code or 1)
    print(f"Best:    trial {best.number}, in {place / best.folder}\n{best_command(found, best)}")
    raise typer.Exit(code)


def _drawn(spec: SweepSpec, rows: Sequence[TrialRow], path: Path) -> Path | str:
    """Draw the picture; return its path, or why there is none. Raises OSError."""
    from composer.sweep.result import draw

    try:
        draw(spec, rows, path)
    except OSError:
        raise
    except Exception as error:  # matplotlib may raise anything, by settings of the user (MPLBACKEND, text.usetex)
        return f"none: {described(error)}"
    return path
