"""`pearl calibrate`: measure in advance, and move measurements between machines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pearl.cli.app import app, examples
from pearl.cli.output import check_writable, console, write_file
from pearl.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable

    from composer.calibrate import Calibrated, Progress
    from composer.calibration import CalibrationStore, Machine


@app.command(
    name="calibrate",
    epilog=examples(
        "pearl calibrate examples/cartpole.toml",
        "pearl calibrate my.toml --batch-sizes 32,64,128 --fanouts 4,16,64",
        "pearl calibrate my.toml other.toml --seconds 600",
        "pearl calibrate my.toml --export lab.json",
        "pearl calibrate --import lab.json --output-dir lab",
    ),
)
def _calibrate(
    specs: Annotated[
        list[Path] | None, typer.Argument(metavar="[SPEC]...", help="Compositions to measure for.")
    ] = None,
    batch_sizes: Annotated[
        str | None, typer.Option(help="Measure each composition at these batch sizes, such as 32,64,128.")
    ] = None,
    capacities: Annotated[str | None, typer.Option(help="Measure with replays of these capacities.")] = None,
    fanouts: Annotated[str | None, typer.Option(help="Measure sum trees of these fanouts; auto for all.")] = None,
    seconds: Annotated[
        float | None, typer.Option(help="Begin no measurement after this time. Default: measure everything.")
    ] = None,
    export: Annotated[
        Path | None, typer.Option("--export", help="Write all measurements of this machine to a file for another one.")
    ] = None,
    import_file: Annotated[
        Path | None, typer.Option("--import", help="Take the measurements of another machine's file.")
    ] = None,
    output_dir: Annotated[
        Path | None,
        typer.Option(help="With --import: write the device and connection CSV of that machine into this folder."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace CSV files that exist.")] = False,
) -> None:
    """Measure in advance, so that compositions need not; move measurements between machines.

    Measures each SPEC in every combination of the given sizes. Everything measured is kept at once: after Ctrl-C, the
    same command measures the rest. Imported measurements let one compose for a machine that is not here: its devices
    are rows of the device CSV whose column calibration has their fingerprints.
    """
    if not (specs or export or import_file):
        raise ConfigurationError("Give a composition to measure for, or --export FILE, or --import FILE.")
    sizes = {"--batch-sizes": batch_sizes, "--capacities": capacities, "--fanouts": fanouts}
    if not specs and (given := [name for name, value in sizes.items() if value is not None]):
        raise ConfigurationError(f"{', '.join(given)} need a composition (SPEC) to measure for.")
    if output_dir is not None and import_file is None:
        raise ConfigurationError("--output-dir needs --import FILE: it gets the CSV files of the imported machine.")
    if export is not None:
        check_writable(export)
    from composer.calibration import CalibrationStore

    if import_file is not None:
        _import(CalibrationStore(), import_file, output_dir, force=force)
    if specs:
        batches, slots = _numbers("--batch-sizes", batch_sizes), _numbers("--capacities", capacities)
        _measure(specs, batches, slots, _fanouts(fanouts), seconds)
    if export is not None:
        text, count = CalibrationStore().export()
        write_file(export, text + "\n")
        print(f"Exported {count} entries to {export}")


def _numbers(option: str, text: str | None) -> list[int]:
    """The numbers of a list such as `32,64,128`."""
    parts = [] if text is None else text.split(",")
    wrong = [part for part in parts if not part.strip().isdecimal() or int(part) < 1 or len(part) > 12]
    if wrong:
        raise ConfigurationError(f"{option} takes whole numbers of at least 1, such as 32,64; found {wrong[0]!r}.")
    return list(dict.fromkeys(int(part) for part in parts))


def _fanouts(text: str | None) -> list[int | str]:
    return ["auto"] if text == "auto" else [*_numbers("--fanouts", text)]


# --- measuring -------------------------------------------------------------------------------------------------------


def _measure(
    specs: list[Path], batch_sizes: list[int], capacities: list[int], fanouts: list[int | str], seconds: float | None
) -> None:
    from composer.calibrate import calibrate, check_budget, family
    from composer.calibration import CalibrationStore
    from composer.spec_file import load_spec
    from pearl.process_limits import check_address_space

    check_address_space()
    check_budget(seconds)
    store = CalibrationStore()
    store.require_writable()
    members = [
        member
        for spec in specs
        for member in family(spec.name, load_spec(spec, progress=False)[0], batch_sizes, capacities, fanouts)
    ]
    measured = 0
    try:
        with _bar() as draw:

            def show(progress: Progress) -> None:
                nonlocal measured
                measured = progress.done
                draw(progress)

            found = calibrate(members, seconds=seconds, show=show)
    except KeyboardInterrupt:
        print(f"Interrupted. {measured} new measurements are in {store.path}; the same command makes the others.")
        raise typer.Exit(130) from None
    _print_outcome(found, len(members), store.path, seconds)


def _print_outcome(found: Calibrated, members: int, path: Path, seconds: float | None) -> None:
    of = "1 composition" if members == 1 else f"{members} compositions"
    if found.stopped:
        print(
            f"The time of {seconds:g} s is up: {found.measured} measurements made. The same command makes the others."
        )
    elif found.measured:
        print(f"Calibrated {of}: {found.measured} measurements made, {found.known} were known.")
    else:
        print(f"Calibrated {of}: nothing to measure, all {found.known} measurements were known.")
    print(f"Store: {path}")


@contextmanager
def _bar() -> Iterator[Callable[[Progress], None]]:
    """The progress display: a bar on a terminal, a line for each measurement elsewhere.

    The bar is drawn only when a measurement begins: a thread that draws would show in what is measured.
    """
    from rich.console import Group
    from rich.live import Live
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    screen = console()
    if not screen.is_terminal or screen.is_dumb_terminal:
        yield lambda progress: print(f"{_counts(progress)}  {progress.member}  {progress.line}", flush=True)
        return
    with Live(console=screen, auto_refresh=False, transient=True) as live:

        def draw(progress: Progress) -> None:
            row = Table.grid(padding=(0, 2, 0, 0), expand=True)
            row.add_column(ratio=1)
            row.add_column(no_wrap=True)
            row.add_row(ProgressBar(progress.expected, progress.done), Text(_counts(progress), "bold"))
            line = Text(f"{progress.member}: {progress.line}", "dim", no_wrap=True, overflow="ellipsis")
            live.update(Group(row, line), refresh=True)

        yield draw


def _counts(progress: Progress) -> str:
    minutes, seconds = divmod(round(progress.left_s), 60)
    return f"{progress.done} of about {progress.expected} measured, {minutes}:{seconds:02} left"


# --- another machine -------------------------------------------------------------------------------------------------


def _import(store: CalibrationStore, file: Path, folder: Path | None, *, force: bool) -> None:
    paths = [] if folder is None else [folder / "devices.csv", folder / "connections.csv"]
    if (existing := [str(path) for path in paths if path.exists()]) and not force:
        raise ConfigurationError(
            f"{' and '.join(existing)} would be overwritten. Add --force to replace, or choose another --output-dir."
        )
    for path in paths:
        check_writable(path)
    taken = store.import_file(file)
    print(f"Imported {taken.new} of {taken.total} entries of {file} into {store.path}")
    if taken.total > taken.new:
        print(f"{taken.total - taken.new} were measured here: these stay.")
    if taken.other_versions:
        print(f"{taken.other_versions} are of another version of PEARL: only devices that are not here take them.")
    for machine in taken.machines:
        _print_devices(machine)
    if folder is None:
        return
    if not taken.machines:
        raise ConfigurationError(f"{file} names no machine, so {folder} gets no CSV files: export it again.")
    from pearl.devices import write_csv

    folder.mkdir(parents=True, exist_ok=True)
    newest = taken.machines[-1]
    write_csv(newest.devices, newest.connections, paths[0], paths[1])
    print(f"Devices:     {paths[0]}\nConnections: {paths[1]}")


def _print_devices(machine: Machine) -> None:
    """Each device with its fingerprint, and that of the hardware here which its row would select."""
    import dataclasses

    for device in machine.devices:
        if not device.calibration:
            continue
        what = f"{device.name} ({device.kind}, {device.backend}), calibration {device.calibration}"
        if device.absent:
            here = dataclasses.replace(device, calibration="")
            known = f"{here.fingerprint()} is here" if here.availability().ok else "none is here"
            print(f"  {what}: of another machine ({known}). Rows with this calibration take its times.")
        else:
            print(f"  {what}: like that of this machine, whose compositions take its times.")
