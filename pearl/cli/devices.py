"""`pearl devices`: describe the machine in the two CSV files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pearl.byte_size import readable_size
from pearl.cli.app import app, examples
from pearl.cli.output import check_writable, console, facts_table
from pearl.errors import ConfigurationError

if TYPE_CHECKING:
    from rich.table import Table

    from pearl.devices import CpuInfo, Device


@app.command(
    name="devices",
    epilog=examples(
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
    for folder in (device_path.parent, connection_path.parent):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigurationError(
                f"The folder {folder} cannot be made: {error.strerror or error}. Choose another --output-dir."
            ) from error
    for path in (device_path, connection_path):  # before measuring, which takes seconds
        check_writable(path)
    with stage(console(), "Discovering devices") as shown:
        found, links = discover(measure=not no_measure, progress=shown.advance)
    write_csv(found, links, device_path, connection_path)
    absent = _absent(found)
    console().print(_cpu_table(describe_cpu()), _device_table(found, list(absent.values())))
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
    return facts_table(
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
