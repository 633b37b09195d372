"""The command `pearl`: describe the machine, compose, run, measure, report.

Commands import what they need when they run, so that help and errors of usage appear at once.
"""

from __future__ import annotations

import csv
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer
from typer.core import TyperGroup

from pearl import __version__
from pearl.atomic_file import write_text
from pearl.byte_size import readable_size
from pearl.errors import ConfigurationError, GenerationError, PearlError
from pearl.process_limits import check_address_space, limit_reached
from pearl.runtime.entry import DEBUG_VARIABLE
from pearl.runtime.launch import run_generated, shown
from pearl.runtime.scores import best_text, last_text, number
from pearl.standard_streams import keep_standard_streams

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from pearl.devices import CpuInfo, Device

_TAIL_BYTES = 65_536  # the end of a table, which contains its last row
_PLAIN_WIDTH = 100  # columns of output that is not shown on a terminal, as in the composer's tables


class _Group(TyperGroup):
    """Shows expected errors as one message; with --debug, their traceback too."""

    def invoke(self, ctx: Any) -> Any:
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


def _examples(*commands: str) -> str:
    return "Examples:\n\n```text\n" + "\n".join(commands) + "\n```"


app = typer.Typer(
    cls=_Group,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=_examples(
        "pearl devices",
        "pearl compose examples/cartpole.toml",
        "pearl run examples/runs/cartpole/program.py",
        "pearl report examples/runs/cartpole",
    ),
)


def main() -> None:
    """Entry point of the command."""
    keep_standard_streams()
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

    Describe the machine (devices), have every primitive profiled and placed and a training program written
    (compose), run that program (run), measure its speed (bench), and summarise its results (report).
    """
    if debug:
        os.environ[DEBUG_VARIABLE] = "1"


# --- pearl devices --------------------------------------------------------------------------------------------------


@app.command(
    name="devices",
    epilog=_examples(
        "pearl devices",
        "pearl devices --output-dir machines/lab --force",
        "pearl devices --no-measure --devices cpu.csv --connections links.csv",
        "pearl devices --setup-fpga-emulator",
    ),
)
def _devices(
    output_dir: Annotated[Path, typer.Option(help="Folder for both files; made if it is absent.")] = Path(),
    devices: Annotated[str, typer.Option(help="Name of the device CSV.")] = "devices.csv",
    connections: Annotated[str, typer.Option(help="Name of the connection CSV.")] = "connections.csv",
    no_measure: Annotated[
        bool, typer.Option("--no-measure", help="Measure no bandwidth: quick, but the cells stay empty.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace files that exist.")] = False,
    setup_fpga_emulator: Annotated[
        bool,
        typer.Option(
            "--setup-fpga-emulator",
            help="Fetch Intel's FPGA emulator into PEARL's cache folder (280 MB; 440 MB there), and do nothing else.",
        ),
    ] = False,
) -> None:
    """Find the devices of this machine, measure their memory and links, and write both CSV files.

    Devices that cannot be used are not written; they are shown with the reason and how to add them.
    """
    from pearl.devices import describe_cpu, discover, write_csv
    from pearl.runtime.progress import stage

    if setup_fpga_emulator:
        _setup_fpga_emulator()
        return
    device_path, connection_path = output_dir / devices, output_dir / connections
    if device_path.resolve() == connection_path.resolve():
        raise ConfigurationError(f"Both files would be {device_path}: give --devices and --connections other names.")
    existing = [str(path) for path in (device_path, connection_path) if path.exists()]
    if existing and not force:
        raise ConfigurationError(
            f"{' and '.join(existing)} would be overwritten. Add --force to replace, or choose another --output-dir."
        )
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(
            f"The folder {output_dir} cannot be made: {error.strerror or error}. Choose another --output-dir."
        ) from error
    with stage(_console(), "Discovering devices") as shown:
        found, links = discover(measure=not no_measure, progress=shown.advance)
    write_csv(found, links, device_path, connection_path)
    absent = _absent(found)
    _console().print(_cpu_table(describe_cpu()), _device_table(found, list(absent.values())))
    for name, device in absent.items():
        # Not in the table, which would break lines: the reason may contain a command to copy.
        print(f"No {name}: {device.availability().reason}")
    print(f"Devices:     {device_path} ({len(found)} of this machine)")
    print(f"Connections: {connection_path} ({len(links)})")
    if missing := [device.name for device in found if device.active_watts is None]:
        print(f"Fill active_watts of {', '.join(missing)} to optimise power_efficiency: no meter was found.")


def _setup_fpga_emulator() -> None:
    from pearl.backends.fpga.emulator import setup_emulator
    from pearl.backends.sycl.runtime import runtime_problem

    problem = runtime_problem()
    folder = setup_emulator(print)
    print(f"FPGA emulator: {folder}")
    print(f"It needs more: {problem}" if problem else "`pearl devices` lists it as fpga_emu0.")


def _cpu_table(info: CpuInfo) -> Table:
    quota = "" if info.cpu_quota is None else f", limited to {info.cpu_quota:g} by a control group"
    caches = (("L1d", info.l1d_bytes), ("L2", info.l2_bytes), ("L3", info.l3_bytes))
    known = ", ".join(f"{name} {_binary(size)}" for name, size in caches if size)
    return _facts(
        "Host CPU",
        {
            "model": info.model,
            "cores": f"{info.logical_cores} logical, {info.physical_cores} physical{quota}",
            "caches": known or "not known",
            "ISA": " ".join(info.isa) or "not known",
            "memory": f"{readable_size(info.memory_total)}, {readable_size(info.memory_available)} free",
            "NUMA nodes": str(info.numa_nodes),
        },
    )


def _device_table(found: Sequence[Device], absent: Sequence[Device]) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(title="Devices", title_justify="left", box=box.ASCII2)
    quantities = ("cores", "clock MHz", "memory GB", "GB/s", "W")
    for heading in ("name", "kind", "backend", *quantities, "state"):
        table.add_column(heading, justify="right" if heading in quantities else "left")
    for device in found:
        numbers = (device.cores, device.clock_mhz, device.memory_gb, device.memory_bandwidth_gbps, device.active_watts)
        cells = ("-" if number is None else f"{number:,.10g}" for number in numbers)
        table.add_row(Text(device.name), device.kind, device.backend, *cells, _state(device))
    for device in absent:
        table.add_row("-", device.kind, device.backend, *"-----", "unavailable, see below")
    return table


def _absent(found: Sequence[Device]) -> dict[str, Device]:
    """Devices that PEARL could drive but did not find; a single SYCL device if the SYCL runtime is missing."""
    from pearl.backends import backends

    candidates = {name: device for backend in backends() for name, device in backend.candidates().items()}
    known = {(device.kind, device.backend) for device in found}
    return {name: device for name, device in candidates.items() if (device.kind, device.backend) not in known}


def _state(device: Device) -> str:
    from pearl.backends import backend_of

    available = device.availability()
    if not available.ok:
        return f"unavailable: {available.reason}"
    if backend_of(device).emulated(device):
        return "usable (emulator)"
    return f"usable (is {device.shares_with})" if device.shares_with else "usable"


def _binary(size: int) -> str:
    return f"{size / 2**20:g} MiB" if size >= 2**20 else f"{size / 2**10:g} KiB"


# --- pearl compose --------------------------------------------------------------------------------------------------


@app.command(
    name="compose",
    epilog=_examples(
        "pearl compose examples/cartpole.toml",
        "pearl compose my.toml --output programs/mine.py",
        "pearl compose my.toml --implementation torch",
    ),
)
def _compose(
    spec: Annotated[Path, typer.Argument(help="The composition; see examples/cartpole.toml.")],
    output: Annotated[
        Path | None, typer.Option(help="Where the program goes. Default: as in the file, else runs/NAME/program.py.")
    ] = None,
    placement_json: Annotated[
        Path | None,
        typer.Option("--json", help="Where the placement goes. Default: PROGRAM.placement.json next to the program."),
    ] = None,
    matrix_json: Annotated[
        Path | None,
        typer.Option("--matrix-json", help="Where the matrix goes. Default: PROGRAM.matrix.json next to the program."),
    ] = None,
    implementation: Annotated[
        str | None,
        typer.Option(
            help="Of the Learner: auto (the fastest), native, torch or sycl. Default: as in the file, else auto."
        ),
    ] = None,
) -> None:
    """Profile the primitives, choose their devices, and write the training program.

    Prints the assignment matrix and the placement with its reasons, and writes both as JSON. Measurements are kept
    between runs. A program there that was edited is kept under another name.
    """
    check_address_space()
    from composer.spec_file import load_spec

    composer, options = load_spec(spec, implementation=implementation, output=output)
    path = options.path
    matrix_json = matrix_json or path.with_name(f"{path.stem}.matrix.json")
    placement_json = placement_json or path.with_name(f"{path.stem}.placement.json")
    for file in (path, matrix_json, placement_json):
        _check_writable(file)
    replay, learner = composer.run(timesteps=options.timesteps)
    _console().print(composer.matrix, composer.placement)
    # Before the program, since none can be written if a null device was chosen: then these files are the result.
    _write_text(matrix_json, composer.matrix.to_json() + "\n")
    _write_text(placement_json, composer.placement.to_json() + "\n")
    print(f"Matrix:    {shown(matrix_json)}")
    print(f"Placement: {shown(placement_json)}")
    composer.runtime_gen(replay, learner, **{**vars(options), "path": path})


def _check_writable(path: Path) -> None:
    """Raise GenerationError if the file cannot be written; called before anything is measured."""
    folder = path.parent
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if path.is_dir():
        reason = "it is a folder"
    elif not folder.is_dir():
        reason = f"{folder} is not a folder"
    elif not os.access(folder, os.W_OK | os.X_OK):
        reason = f"the folder {folder} is not writable"
    else:
        return
    raise GenerationError(f"{path} cannot be written: {reason}. Choose another path.")


def _write_text(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text)
    except OSError as error:
        raise GenerationError(f"{path} cannot be written: {error.strerror or error}. Choose another path.") from error


# --- pearl calibration ----------------------------------------------------------------------------------------------

calibration_app = typer.Typer(
    cls=_Group,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(calibration_app, name="calibration")


@calibration_app.callback()
def _calibration() -> None:
    """Look after the calibration store, which keeps measurements between compositions."""


@calibration_app.command(name="import", epilog=_examples("pearl calibration import lab/calibration-1.json"))
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


# --- pearl fpga-report ----------------------------------------------------------------------------------------------


@app.command(
    name="fpga-report",
    epilog=_examples(
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
    _console().print(found)
    if import_to is None:
        return
    device = next((device for device in read_devices(devices) if device.name == import_to), None)
    if device is None:
        raise ConfigurationError(f"{devices} has no device {import_to!r}. Name one of its rows of kind fpga.")
    store = CalibrationStore()
    imported = import_report(found, device, ReplayTree(capacity, fanout), store)
    print(f"Imported for {device.name}: {imported}")
    print(f"Compositions with this row, a replay of {capacity:,} and fanout {fanout} take it from {store.path}")


# --- pearl run, pearl bench -----------------------------------------------------------------------------------------


_Program: TypeAlias = Annotated[Path, typer.Argument(help="A program that was composed.")]
_Options: TypeAlias = Annotated[list[str] | None, typer.Argument(help="Options of the program itself; see its --help.")]


@app.command(
    name="run",
    context_settings={"allow_interspersed_args": False},
    epilog=_examples(
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
    epilog=_examples(
        "pearl bench runs/cartpole/program.py --seconds 30",
        "pearl bench runs/cartpole/program.py -- --seed 2",
    ),
)
def _bench(
    program: _Program,
    options: _Options = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="How long to measure, from the first batch on.")] = 10.0,
) -> None:
    """Measure how fast a composed program trains, compared with the composer's prediction.

    The program trains free-running, without waiting for data, in a temporary folder: nothing of its runs changes.
    """
    with tempfile.TemporaryDirectory(prefix="pearl-bench-") as folder:
        measuring = ["--bench", "--bench-seconds", str(seconds), "--run-dir", folder]
        code = run_generated(program, [*measuring, *_passed_on(options)])
        result = Path(folder) / "bench.json"
        rates = _read_json(result) if result.exists() else None
    if rates is None:
        if not code:
            raise ConfigurationError(f"{program} ended without a measurement: it is not a composed program.")
        raise typer.Exit(code)
    _console().print(_rates_table(rates))
    raise typer.Exit(code)


def _passed_on(options: Sequence[str] | None) -> Sequence[str]:
    """The options without a leading `--`."""
    options = options or []
    return options[1:] if options[:1] == ["--"] else options


def _rates_table(rates: Mapping[str, Any]) -> Table:
    predicted, measured, overall = (number(rates, key) for key in ("predicted_eps", "measured_eps", "overall_eps"))
    share = f"{measured / predicted:.2f} of the prediction" if predicted else "no prediction"
    return _facts(
        f"Experiences trained per second (EPS) of {rates.get('program', 'the program')}",
        {
            "predicted by the composer": f"{predicted:,.0f}",
            "measured, while a batch was under way": f"{measured:,.0f} ({share})",
            "measured, waiting for data included": f"{overall:,.0f}",
            "gradient steps per second (GPS), waiting included": f"{number(rates, 'overall_gps'):,.1f}",
        },
    )


# --- pearl report ---------------------------------------------------------------------------------------------------


@app.command(name="report", epilog=_examples("pearl report runs/dqn_cartpole"))
def _report(run_dir: Annotated[Path, typer.Argument(help="The folder of a run.")]) -> None:
    """Summarise the results of a run: summary, evaluation, progress, learning curve and checkpoints."""
    summary_path, progress_path, bench_path = (
        run_dir / name for name in ("summary.json", "progress.csv", "bench.json")
    )
    checkpoints = sorted(path.parent for path in run_dir.glob("checkpoints/checkpoint-*/manifest.json"))
    if not run_dir.is_dir():
        raise ConfigurationError(f"There is no folder {run_dir}. A program's --run-dir says where its run goes.")
    if not (checkpoints or any(path.is_file() for path in (summary_path, progress_path, bench_path))):
        raise ConfigurationError(
            f"{run_dir} is not the folder of a run: it has no summary.json, no progress.csv and no checkpoints. "
            "A program's --run-dir says where its run goes."
        )
    console = _console()
    if summary_path.is_file():
        summary = _read_json(summary_path)
        console.print(_summary_table(summary))
        if progress_path.is_file() and progress_path.stat().st_mtime > summary_path.stat().st_mtime:
            print("progress.csv is newer than this summary: a later run goes on, or was stopped before its end.")
    else:
        print(f"{run_dir} has no summary.json: the run goes on, or was stopped before its end.")
    for title, name in (
        ("Newest progress (training_return: last 100 training episodes, exploration included)", "progress.csv"),
        ("Newest evaluation (greedy)", "evaluations.csv"),
    ):
        if row := _last_row(run_dir / name):
            console.print(_facts(title, {key: _rounded(value) for key, value in row.items() if value}))
    if bench_path.is_file():
        console.print(_rates_table(_read_json(bench_path)))
    _print_files(run_dir, checkpoints)


def _summary_table(summary: Mapping[str, Any]) -> Table:
    facts = {"environment": str(summary.get("environment", "-")), "seed": str(summary.get("seed", "-"))}
    facts["stopped"] = str(summary.get("stopped", "-"))
    for name, key in (
        ("environment steps", "env_steps"),
        ("gradient steps", "gradient_steps"),
        ("training episodes", "episodes"),
        ("actor restarts", "actor_restarts"),
    ):
        facts[name] = f"{number(summary, key):,.0f}"
    facts["replay ratio"] = f"{number(summary, 'replay_ratio'):.2f}"
    facts["wall-clock time"] = f"{number(summary, 'wall_s'):,.1f} s, to the end of training"
    measured, predicted, overall = (number(summary, f"{key}_eps") for key in ("measured", "predicted", "overall"))
    facts["EPS"] = (
        f"{measured:,.0f} while a batch was under way (predicted {predicted:,.0f}), "
        f"{overall:,.0f} since the first batch, waiting included"
    )
    facts["last weights"], facts["best weights"] = last_text(summary), best_text(summary)
    return _facts(f"Run of {summary.get('program', 'a program')}", facts)


def _print_files(run_dir: Path, checkpoints: Sequence[Path]) -> None:
    """Lines, not a table, which would break paths."""
    for what, name in (
        ("Learning curve:", "learning_curve.png"),
        ("Last weights:", "weights.safetensors"),
        ("Best weights:", "best_weights.safetensors"),
        ("Log:", "run.log"),
        ("TensorBoard:", "tensorboard"),
    ):
        print(f"{what:<16}{run_dir / name if (run_dir / name).exists() else 'none'}")
    for folder in checkpoints:
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        print(f"{'Checkpoint:':<16}{folder} ({readable_size(size)})")
    if not checkpoints:
        print(f"{'Checkpoint:':<16}none in {run_dir / 'checkpoints'}")


def _last_row(path: Path) -> dict[str, str] | None:
    """The last complete row of a CSV file of the run, without a row that a kill has cut short."""
    if not path.is_file():
        return None
    try:
        with path.open("rb") as file:
            first = file.readline()
            file.seek(max(len(first), file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            ends = (first + file.read()).decode(errors="replace").splitlines(keepends=True)
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror or error}.") from error
    lines = [line for line in ends if line.endswith("\n")]
    try:
        rows = list(csv.DictReader([lines[0], lines[-1]])) if len(lines) > 1 else []
    except csv.Error as error:
        raise ConfigurationError(f"{path} is not a CSV file of a run: {error}.") from error
    return {key: value or "" for key, value in rows[0].items() if key} if rows else None


def _rounded(text: str) -> str:
    try:
        return f"{float(text):,.10g}" if text.lstrip("-").isdigit() else f"{float(text):,.2f}"
    except ValueError:
        return text


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror or error}.") from error
    except ValueError as error:
        raise ConfigurationError(f"{path} is not JSON ({error}). It is written at the end of a run.") from error
    if not isinstance(found, dict):
        raise ConfigurationError(f"{path} must hold an object, as written at the end of a run; found {found!r:.60}.")
    return found


# --- output ---------------------------------------------------------------------------------------------------------


def _console() -> Console:
    from rich.console import Console

    terminal = sys.stdout.isatty()
    return Console(
        force_terminal=None if terminal else False, width=None if terminal else _PLAIN_WIDTH, highlight=False
    )


def _facts(title: str, facts: Mapping[str, str]) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title), title_justify="left", box=box.ASCII2, show_header=False)
    for name, value in facts.items():
        table.add_row(Text(name), Text(value))
    return table
