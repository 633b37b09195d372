"""`pearl portability`: PEARL Eq. 8 over the devices of each machine, and over machines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pearl.cli.app import app, examples
from pearl.cli.explain import placement_file, read_placement, read_text
from pearl.cli.output import console
from pearl.errors import ConfigurationError

if TYPE_CHECKING:
    from composer.portability import PlatformPortability


@app.command(
    name="portability",
    epilog=examples(
        "pearl portability lab.placement.json laptop.placement.json",
        "pearl portability lab.matrix.json laptop.matrix.json",
        "pearl portability --code train_lab.py --code train_laptop.py",
    ),
)
def _portability(
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[FILE]...", help="One for each machine: a placement, a program, a run's folder, or a matrix."
        ),
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="The batch size of matrices that do not state it.")
    ] = None,
    code: Annotated[
        list[Path] | None,
        typer.Option(help="The user code of a machine. Given twice: the code divergence of the two files."),
    ] = None,
) -> None:
    """Compute how portable a problem is over devices and machines (PEARL Eq. 8).

    Phi(D) is the harmonic mean of the experiences per second over all choices of devices of a machine, Phi(P) that of
    the best choice over machines; both are 0 if one cannot run. Each choice says whether Stable-Baselines3 and RLlib
    could run it. Of a matrix, only choices with all primitives on one device count, without transfers: it states no
    links.
    """
    from composer.portability import Portability

    if not files and not code:
        raise ConfigurationError("Portability needs files: placements or matrices of machines, or two times --code.")
    if files:
        platforms = tuple(_platform(file, batch_size) for file in files)
        console().print(Portability(platforms))
    if code:
        _print_divergence(code)


def _platform(file: Path, batch_size: int | None) -> PlatformPortability:
    from composer.calibration import FORMAT as CALIBRATION
    from composer.matrix import AssignmentMatrix
    from composer.portability import of_matrix, of_placement

    source = placement_file(file)
    text = read_text(source)
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        document = None  # reading it as a placement says what is wrong
    kind = document.get("format") if isinstance(document, dict) else None
    if kind == CALIBRATION:
        raise ConfigurationError(
            f"{source} is a calibration file, which states times of primitives but no machine. Import it (`pearl "
            "calibrate --import FILE`), compose with that machine's device and connection CSV, and name the placement."
        )
    if kind != AssignmentMatrix.FORMAT:
        return of_placement(str(file), read_placement(source))
    try:
        matrix = AssignmentMatrix.from_json(text)
    except ConfigurationError as error:
        raise ConfigurationError(f"{source}: {error}") from error
    return of_matrix(str(file), matrix, batch_size)


def _print_divergence(code: list[Path]) -> None:
    from composer.portability import code_divergence, user_lines

    if len(code) != 2:
        raise ConfigurationError(f"Code divergence compares two files; found {len(code)}. Give --code twice.")
    texts = []
    for file in code:
        try:
            texts.append(file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"The user code {file} cannot be read: {error}.") from error
    lines = " and ".join(f"{user_lines(text).total():,}" for text in texts)
    print(f"Code divergence of {code[0]} and {code[1]}: {code_divergence(*texts):.3f} ({lines} lines of user code)")
