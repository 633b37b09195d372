"""`pearl calibration`: look after the calibration store."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pearl.cli.app import Group, app, examples

calibration_app = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(calibration_app, name="calibration")


@calibration_app.callback()
def _calibration() -> None:
    """Look after the calibration store, which keeps measurements between compositions."""


@calibration_app.command(name="import", epilog=examples("pearl calibration import lab/calibration-1.json"))
def _import_calibration(
    file: Annotated[Path, typer.Argument(help="The calibration file of another machine's cache folder.")],
) -> None:
    """Import measurements of another machine; compositions show them as imported.

    An entry is used if everything it depends on is equal, including the device's hardware and driver. Measurements of
    this machine stay. A file that is damaged, or of another format, is refused as a whole.
    """
    from composer.calibration import CalibrationStore

    store = CalibrationStore()
    taken = store.import_file(file)
    print(f"Imported {taken.new} of {taken.total} entries of {file} into {store.path}")
    if taken.total > taken.new:
        print(f"{taken.total - taken.new} were measured here: these stay.")
    if taken.other_versions:
        print(f"{taken.other_versions} are of another version of PEARL: compositions of this one do not take them.")
