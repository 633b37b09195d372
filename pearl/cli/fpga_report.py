"""`pearl fpga-report`: read the report of oneAPI's compiler on an FPGA design."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pearl.cli.app import app, examples
from pearl.cli.output import console
from pearl.errors import ConfigurationError


@app.command(
    name="fpga-report",
    epilog=examples(
        "pearl fpga-report build/fpga/replay.report.prj",
        "pearl fpga-report build/fpga/replay.report.prj --import-to fpga0 --devices devices.csv",
        "pearl fpga-report replay.report.prj --import-to fpga0 --capacity 100000 --fanout 4",
    ),
)
def _fpga_report(
    report: Annotated[Path, typer.Argument(help="The folder NAME.prj that oneAPI's compiler leaves.")],
    import_to: Annotated[
        str | None,
        typer.Option(help="Import the Replay Manager's times for this FPGA of the device CSV: compositions take them."),
    ] = None,
    devices: Annotated[Path, typer.Option(help="The device CSV.")] = Path("devices.csv"),
    capacity: Annotated[int, typer.Option(help="Slots that it was compiled for (PEARL_CAPACITY).")] = 65_536,
    fanout: Annotated[int, typer.Option(help="Fanout that it was compiled for (PEARL_FANOUT).")] = 16,
) -> None:
    """Show the report of Intel's oneAPI compiler on an FPGA design, and import it.

    Shows resources, clock, initiation intervals and latencies of each kernel. Nothing in the report is executed.
    """
    from composer.calibration import CalibrationStore
    from composer.fpga.imported_replay import import_report
    from composer.fpga.model import ReplayTree
    from composer.fpga.vendor_report import read_vendor_report
    from composer.platform import read_devices

    found = read_vendor_report(report)
    console().print(found)
    if import_to is None:
        return
    device = next((device for device in read_devices(devices) if device.name == import_to), None)
    if device is None:
        raise ConfigurationError(f"{devices} has no device {import_to!r}. Name one of its rows of kind fpga.")
    store = CalibrationStore()
    imported = import_report(found, device, ReplayTree(capacity, fanout), store)
    print(f"Imported for {device.name}: {imported}")
    print(f"Compositions with this row, a replay of {capacity:,} and fanout {fanout} take it from {store.path}")
