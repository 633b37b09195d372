"""Power: counters of RAPL and NVML, watts of the CSV files, EPS per watt in placements, programs and reports."""

from __future__ import annotations

import ast
import ctypes
import dataclasses
import json
import math
import os
import re
from pathlib import Path
from typing import Any

import pytest
from programs import described, run, write_csv_pair
from test_placement import BATCH, CPU, FPGA, GPU, MATRIX
from test_placement import run as placed
from typer.testing import CliRunner

from composer.matrix import AssignmentMatrix, MissingCell
from composer.placement import Placement
from composer.platform import Platform, read_connections, read_devices
from composer.power import power_of, power_plan, with_rates
from pearl.backends.cpu import power as cpu_power
from pearl.backends.cpu.perf_power import perf_meter
from pearl.backends.cpu.power import RaplMeter, cpu_meter, rapl_meter
from pearl.backends.cuda.power import nvml_meter
from pearl.cli import app
from pearl.devices import Connection, Device, discovery, write_csv
from pearl.errors import ConfigurationError, DeviceError, DeviceFileError
from pearl.runtime.power import PoweredDevice, PowerLog, PowerPlan
from pearl.runtime.rate import StepRate

RANGE_UJ = 262_143_328_850


# --- RAPL -----------------------------------------------------------------------------------------------------------


def zone(sys: Path, number: str, name: str, energy_uj: int | str, range_uj: int = RANGE_UJ) -> Path:
    folder = sys / "class/powercap" / f"intel-rapl:{number}"
    folder.mkdir(parents=True, exist_ok=True)
    for file, value in (("name", name), ("energy_uj", energy_uj), ("max_energy_range_uj", range_uj)):
        (folder / file).write_text(f"{value}\n")
    return folder


def test_a_machine_without_counters_has_no_meter(tmp_path: Path) -> None:
    assert rapl_meter(tmp_path) is None


def test_packages_and_memory_are_counted_once_and_parts_of_packages_not_again(tmp_path: Path) -> None:
    counted = [
        zone(tmp_path, *found)
        for found in (("0", "package-0", 5_000_000), ("1", "package-1", 0), ("0:1", "dram", 7_000_000))
    ]
    others = [
        zone(tmp_path, *found) for found in (("0:0", "core", 1), ("0:2", "uncore", 1), ("2", "psys", 1_000_000_000))
    ]
    meter = rapl_meter(tmp_path)
    assert meter is not None
    assert meter.joules() == 0
    for folder, joules in zip(counted, (30, 20, 1.5), strict=True):
        energy = folder / "energy_uj"
        energy.write_text(str(int(energy.read_text()) + int(joules * 1e6)))
    for folder in others:
        (folder / "energy_uj").write_text("900000000")
    assert meter.joules() == pytest.approx(51.5)
    assert meter.source == "RAPL"


def test_a_counter_that_wraps_around_loses_nothing(tmp_path: Path) -> None:
    folder = zone(tmp_path, "0", "package-0", RANGE_UJ - 999_999)
    meter = RaplMeter([folder])
    (folder / "energy_uj").write_text("1000000")
    assert meter.joules() == pytest.approx(2)
    (folder / "energy_uj").write_text("500000")  # a whole round later
    assert meter.joules() == pytest.approx(2 + (RANGE_UJ + 1 - 500_000) / 1e6)
    assert meter.most_seconds == pytest.approx(RANGE_UJ / 1e9)


def test_missing_rights_are_named_with_the_command_that_grants_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = zone(tmp_path, "0", "package-0", 1)
    read_text = Path.read_text

    def refuse(path: Path, *args: Any, **kwargs: Any) -> str:  # as root, who runs some tests, may read everything
        if path.name == "energy_uj":
            raise PermissionError(13, "Permission denied")
        return read_text(path, *args, **kwargs)

    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(DeviceError, match=rf"{re.escape(str(folder))}.*root only.*sudo chmod a\+r /sys/class/powercap"):
        rapl_meter(tmp_path)


@pytest.mark.parametrize("text", ["", "-5", "many", "1.5"])
def test_a_counter_with_a_strange_value_is_an_error(tmp_path: Path, text: str) -> None:
    zone(tmp_path, "0", "package-0", text)
    with pytest.raises(DeviceError, match="must hold whole microjoules"):
        rapl_meter(tmp_path)


def energy_events(sys: Path, **events: tuple[str, str]) -> None:
    folder = sys / "bus/event_source/devices/power"
    (folder / "events").mkdir(parents=True)
    (folder / "type").write_text("22\n")
    (folder / "cpumask").write_text("0,28\n")
    for name, (event, scale) in events.items():
        (folder / "events" / f"energy-{name}").write_text(f"{event}\n")
        (folder / "events" / f"energy-{name}.scale").write_text(f"{scale}\n")


def test_perf_counts_each_package_and_the_memory(tmp_path: Path) -> None:
    energy_events(tmp_path, pkg=("event=0x02", "0.5"), ram=("event=0x03", "0.25"))
    counts = {(2, 0): 100, (2, 28): 10, (3, 0): 8, (3, 28): 4}
    writers: dict[tuple[int, int], int] = {}

    def open_event(kind: int, config: int, cpu: int) -> int:
        assert kind == 22
        reader, writers[config, cpu] = os.pipe()
        os.write(writers[config, cpu], counts[config, cpu].to_bytes(8, "little"))
        return reader

    meter = perf_meter(tmp_path, open_event)
    assert meter is not None
    for which, writer in writers.items():
        os.write(writer, (counts[which] + 4).to_bytes(8, "little"))
        os.close(writer)
    assert meter.joules() == pytest.approx(4 * (0.5 + 0.5 + 0.25 + 0.25))
    assert (meter.source, meter.counter) == ("RAPL by perf", "RAPL")


def test_perf_without_events_has_no_meter_and_faults_are_named(tmp_path: Path) -> None:
    def refuse(kind: int, config: int, cpu: int) -> int:
        raise PermissionError(13, "Permission denied")

    assert perf_meter(tmp_path) is None
    energy_events(tmp_path, pkg=("event=0x02", "0.5"))
    with pytest.raises(DeviceError, match=r"may not count.*sudo sysctl kernel\.perf_event_paranoid=0"):
        perf_meter(tmp_path, refuse)
    (tmp_path / "bus/event_source/devices/power/events/energy-pkg").write_text("energy\n")
    with pytest.raises(DeviceError, match="expected an event such as event=0x02; found 'energy"):
        perf_meter(tmp_path, refuse)


def test_perf_takes_over_where_the_files_may_not_be_read_and_both_ways_are_named_where_it_may_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(which: str) -> Any:
        def refused(sys: Path) -> None:
            raise DeviceError(f"Allow {which}")

        return refused

    monkeypatch.setattr(cpu_power, "rapl_meter", refuse("files"))
    with pytest.raises(DeviceError, match="Allow files"):  # this kernel has no events
        cpu_meter(tmp_path)
    monkeypatch.setattr(cpu_power, "perf_meter", lambda sys: "perf")
    assert cpu_meter(tmp_path) == "perf"
    monkeypatch.setattr(cpu_power, "perf_meter", refuse("events"))
    with pytest.raises(DeviceError, match=r"Allow files\. Or: Allow events"):
        cpu_meter(tmp_path)


# --- NVML -----------------------------------------------------------------------------------------------------------


class FakeNvml:
    """The functions of NVML that the meter calls: one GPU, whose energy in mJ and power in mW a test sets."""

    def __init__(self, energy: int | None = 0, power: int | None = 250_000) -> None:
        self.energy, self.power = energy, power
        self.uuids: list[bytes] = []

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: Any) -> int:
        self.uuids.append(uuid)
        return 0

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: Any, energy: Any) -> int:
        return self._answer(self.energy, energy, ctypes.c_ulonglong)

    def nvmlDeviceGetPowerUsage(self, handle: Any, power: Any) -> int:
        return self._answer(self.power, power, ctypes.c_uint)

    def _answer(self, value: int | None, reference: Any, kind: Any) -> int:
        if value is None:
            return 3
        ctypes.cast(reference, ctypes.POINTER(kind))[0] = value
        return 0


def test_the_energy_of_a_gpu_is_that_of_its_counter() -> None:
    library = FakeNvml(energy=1_000_000)
    meter = nvml_meter("GPU-1", library)
    assert meter is not None
    library.energy = 1_345_000
    assert meter.joules() == pytest.approx(345)
    assert (meter.source, library.uuids) == ("NVML", [b"GPU-1"])


def test_without_an_energy_counter_power_readings_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter((10.0, 12.0))
    monkeypatch.setattr("pearl.backends.cuda.power.time.monotonic", lambda: next(clock))
    library = FakeNvml(energy=None, power=100_000)
    meter = nvml_meter("GPU-1", library)
    assert meter is not None
    library.power = 300_000
    assert meter.joules() == pytest.approx(400)  # the mean of 100 and 300 W, for 2 s
    assert meter.source == "NVML, power readings"


def test_a_gpu_without_any_reading_has_no_meter_and_a_refusal_says_what_to_do() -> None:
    assert nvml_meter("GPU-1", FakeNvml(energy=None, power=None)) is None
    library = FakeNvml()
    library.nvmlInit_v2 = lambda: 4  # type: ignore[method-assign]
    with pytest.raises(DeviceError, match=r"nvmlInit_v2 returned 4.*administrator must allow it"):
        nvml_meter("GPU-1", library)


# --- the watts of both CSV files --------------------------------------------------------------------------------------

IDLE_SERVER = Platform(
    (dataclasses.replace(CPU, idle_watts=30), dataclasses.replace(GPU, idle_watts=55), FPGA),
    (
        Connection("cpu0", "gpu0", 10, 12, 7.5),
        Connection("cpu0", "cpu0", 0.1, 20, 12),
        Connection("fpga0", "cpu0", 5, 6),
    ),
)


def test_devices_memories_and_links_in_use_count_and_what_idles_draws_its_idle_power() -> None:
    candidates = {candidate.pair: candidate for candidate in placed(MATRIX, IDLE_SERVER).candidates}
    alone, split = candidates["cpu0", "cpu0"], candidates["fpga0", "gpu0"]
    assert (alone.watts, alone.idle_watts, alone.idle_unstated) == (100 + 12, 55, ("fpga0",))
    assert (split.watts, split.idle_watts, split.idle_unstated) == (100 + 12 + 300 + 40 + 7.5, 0, ())
    assert alone.eps_per_watt == pytest.approx(alone.eps / 112)
    assert alone.eps_per_machine_watt == alone.score("power_efficiency") == pytest.approx(alone.eps / 167)


def test_idle_power_can_decide() -> None:
    """Of two placements, the one with the better EPS/W in use leaves a GPU idle that draws much."""
    matrix = AssignmentMatrix(MATRIX.rows[:2])
    link = (Connection("cpu0", "gpu0", 10, 12),)
    thrifty = (Device("cpu0", "cpu", "cpu", active_watts=30), GPU)
    assert placed(matrix, Platform(thrifty, link), "power_efficiency").learner == "cpu0"
    hungry = (thrifty[0], dataclasses.replace(GPU, idle_watts=290))
    assert placed(matrix, Platform(hungry, link), "power_efficiency").learner == "gpu0"


def test_a_device_without_watts_has_those_of_its_silicon() -> None:
    sycl = Device("sycl:cpu0", "cpu", "sycl", shares_with="cpu0")
    platform = Platform((CPU, sycl), (Connection("cpu0", "sycl:cpu0", 3, 10),))
    assert power_of(platform, ("cpu0", "sycl:cpu0")).active_watts == 100
    assert power_of(platform, ("sycl:cpu0",)).active_watts == 100
    missing = power_of(Platform((CPU, dataclasses.replace(sycl, shares_with="")), ()), ("sycl:cpu0",))
    assert (missing.active_watts, missing.missing) == (None, ("sycl:cpu0",))


def test_watts_of_connections_are_read_and_written_and_wrong_ones_are_named(tmp_path: Path) -> None:
    files = tmp_path / "devices.csv", tmp_path / "connections.csv"
    write_csv(IDLE_SERVER.devices, IDLE_SERVER.connections, *files)
    assert read_connections(files[1], read_devices(files[0])) == IDLE_SERVER.connections
    files[1].write_text("source,target,latency_us,bandwidth_gbps,active_watts\ncpu0,gpu0,1,2,-3\n")
    with pytest.raises(DeviceFileError, match="line 2, column 'active_watts': expected a number of at least 0"):
        read_connections(files[1], IDLE_SERVER.devices)
    plain = [dataclasses.replace(link, active_watts=None) for link in IDLE_SERVER.connections]
    write_csv(IDLE_SERVER.devices, plain, *files)
    assert files[1].read_text().startswith("source,target,latency_us,bandwidth_gbps\n")


def test_matrix_and_placement_show_eps_per_watt_and_where_the_watts_are_from() -> None:
    matrix = with_rates(MATRIX, IDLE_SERVER, BATCH)
    cell = matrix.cell("gpu0", "RM & Learner")
    assert matrix.eps(cell) == pytest.approx(BATCH / (24 + 240 + 12) * 1e6)
    assert matrix.eps_per_watt("gpu0", cell) == pytest.approx(BATCH / 276 * 1e6 / 300)
    assert matrix.eps(MissingCell("no")) is None
    assert AssignmentMatrix.from_json(matrix.to_json()) == matrix
    assert re.search(r"EPS/W .*\|\s+634.9 stated W", str(matrix))
    placement = placed(matrix, IDLE_SERVER, "power_efficiency")
    text = str(placement)
    for expected in (
        "EPS/W",
        "watts as stated in the device CSV",
        "idle_watts of fpga0 not stated, taken as 0",
        "112 + 55",
    ):
        assert expected in " ".join(text.split())
    assert all(len(line) <= 120 for line in text.splitlines())
    assert {"idle_watts", "eps_per_watt", "eps_per_machine_watt"} <= set(placement.to_pandas().columns)


def test_a_placement_without_idle_watts_is_read_back_and_negative_ones_are_refused() -> None:
    document = json.loads(placed(MATRIX, IDLE_SERVER).to_json())
    for candidate in document["candidates"]:
        del candidate["idle_watts"], candidate["idle_unstated"]
    assert Placement.from_json(json.dumps(document)).idle_watts == 0
    document["candidates"][0]["idle_watts"] = -1
    with pytest.raises(ConfigurationError, match="needs idle_watts of its pair of at least 0; found -1"):
        Placement.from_json(json.dumps(document))


def test_a_program_knows_one_device_for_each_piece_of_silicon() -> None:
    sycl = Device("sycl:cpu0", "cpu", "sycl", shares_with="cpu0", active_watts=130)
    platform = dataclasses.replace(IDLE_SERVER, devices=(*IDLE_SERVER.devices, sycl))
    plan = power_plan(platform, placed(MATRIX, IDLE_SERVER).with_choice(replay_manager="cpu0", learner="gpu0"))
    assert [(device.name, device.active_watts) for device in plan.used] == [("cpu0", 112), ("gpu0", 300)]
    assert [(device.name, device.idle_watts) for device in plan.idle] == [("fpga0", None)]
    assert (plan.link_watts, plan.stated_watts) == (7.5, 419.5)


# --- a run ----------------------------------------------------------------------------------------------------------


def row(device: Device) -> PoweredDevice:
    return PoweredDevice(
        device.name, device.kind, device.backend, device.selector, device.idle_watts, device.active_watts
    )


class FakeMeter:
    source, counter, most_seconds = "RAPL", "RAPL", math.inf

    def __init__(self) -> None:
        self.total: float | None = 0.0

    def joules(self) -> float:
        if self.total is None:
            raise DeviceError("The counter is gone.")
        return self.total


@pytest.fixture
def meter(monkeypatch: pytest.MonkeyPatch) -> FakeMeter:
    found = FakeMeter()
    monkeypatch.setattr("pearl.backends.cpu.CpuBackend.power_meter", lambda self, device: found)
    return found


def test_a_run_measures_what_has_a_counter_and_states_the_rest(meter: FakeMeter) -> None:
    now = 100.0
    plan = PowerPlan((row(CPU), row(FPGA)), (PoweredDevice("gpu0", "gpu", "cuda", idle_watts=55),), link_watts=2)
    log, rate = PowerLog(plan, clock=lambda: now), StepRate()
    log.follow(rate)
    assert log.read() is None  # before the first batch
    meter.total = 500.0
    rate.started()
    log.follow(rate)
    now, meter.total = 104.0, 860.0
    power = log.read()
    assert power is not None
    assert (power.seconds, power.watts, power.idle_watts, power.machine_watts) == (4, 90 + 40 + 2, 55, 187)
    assert power.sources == {
        "cpu0": "90.0 W measured by RAPL",
        "fpga0": "40.0 W stated in the device CSV",
        "gpu0": "55.0 W stated in the device CSV",
    }
    rate.restart()  # a benchmark's warm-up is over
    rate.started()
    log.follow(rate)
    now, meter.total = 106.0, 1060.0
    assert (again := log.read()) is not None
    assert again.seconds == 2
    assert again.sources["cpu0"] == "100.0 W measured by RAPL"


def test_discovery_measures_the_power_at_rest_and_says_why_it_cannot(
    meter: FakeMeter, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter((10.0, 12.0))
    monkeypatch.setattr(discovery.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(discovery.time, "sleep", lambda _: setattr(meter, "total", 43.0))
    said: list[str] = []
    cpu, sycl = discovery._with_idle_watts((CPU, Device("sycl:cpu0", "cpu", "sycl", shares_with="cpu0")), said.append)
    assert (cpu.idle_watts, sycl.idle_watts) == (21.5, None)
    assert said == ["Measuring the power of cpu0 at rest"]

    def refuse(self: object, device: Device) -> None:
        raise DeviceError("Allow it: sudo chmod ...")

    monkeypatch.setattr("pearl.backends.cpu.CpuBackend.power_meter", refuse)
    assert discovery._with_idle_watts((CPU,), said.append) == [CPU]
    assert said[-1] == "The power of cpu0 is not measured: Allow it: sudo chmod ..."


def test_two_rows_of_one_counter_count_once(meter: FakeMeter) -> None:
    now = 0.0
    log, rate = PowerLog(PowerPlan((row(CPU), PoweredDevice("cpu1", "cpu", "cpu"))), clock=lambda: now), StepRate()
    rate.started()
    log.follow(rate)
    now, meter.total = 2.0, 100.0
    assert (power := log.read()) is not None
    assert (power.watts, power.sources["cpu1"]) == (50, "measured together with cpu0")


def test_a_counter_that_fails_gives_way_to_the_stated_power_and_says_why(meter: FakeMeter) -> None:
    log, rate = PowerLog(PowerPlan((row(CPU),)), clock=lambda: 1.0), StepRate()
    rate.started()
    log.follow(rate)
    meter.total = None
    assert (power := log.read()) is not None
    assert (power.watts, power.sources["cpu0"]) == (100, "100.0 W stated in the device CSV")
    assert list(log.problems) == ["The counter is gone."]


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        (60.0, (160, "60.0 W stated in the device CSV")),
        (None, (None, "not known: no counter, and no active_watts in the device CSV")),
    ],
)
def test_a_counter_of_two_rows_that_fails_gives_way_to_the_stated_power_of_both(
    meter: FakeMeter, stated: float | None, expected: tuple[float | None, str]
) -> None:
    second = PoweredDevice("cpu1", "cpu", "cpu", active_watts=stated)
    log, rate = PowerLog(PowerPlan((row(CPU), second)), clock=lambda: 1.0), StepRate()
    rate.started()
    log.follow(rate)
    meter.total = None
    assert (power := log.read()) is not None
    assert (power.watts, power.sources["cpu1"]) == expected


def test_power_that_is_not_known_is_none_and_names_the_column() -> None:
    log, rate = PowerLog(PowerPlan((row(GPU), PoweredDevice("gpu1", "gpu", "not imported")))), StepRate()
    rate.started()
    log.follow(rate)
    assert (power := log.read()) is not None
    assert (power.watts, power.machine_watts) == (None, None)
    assert power.sources["gpu1"] == "not known: no counter, and no active_watts in the device CSV"


def test_a_program_reports_stated_power_in_progress_summary_and_bench(tmp_path: Path, quick_profiles: None) -> None:
    idle = "toy,gpu,null,sample_us=9;insert_us=9;update_us=9;learner_us=90000,,"
    composer = described(write_csv_pair(tmp_path, ("cpu0,cpu,cpu,,2,60", idle), ["cpu0,toy,1,10"]))
    composer.run()
    program = composer.runtime_gen(path=tmp_path / "program.py", timesteps=1100)
    text = program.read_text()
    ast.parse(text)
    assert 'PoweredDevice(name="cpu0", kind="cpu", backend="cpu", active_watts=60.0)' in text
    assert max(map(len, text.splitlines())) <= 120
    code, output = run(program, "--eval-episodes", "1")
    assert code == 0, output
    assert "EPS/W" in output
    found = json.loads((tmp_path / "runs/program/summary.json").read_text())
    if Path("/sys/class/powercap/intel-rapl:0").exists():
        pytest.skip("this machine may measure its power")
    assert (found["watts"], found["idle_watts"]) == (60, 0)
    assert found["eps_per_watt"] == pytest.approx(found["overall_eps"] / 60)
    assert found["power_sources"]["cpu0"] == "60.0 W stated in the device CSV"
    assert found["power_sources"]["toy"].startswith("not known")
    shown = CliRunner().invoke(app, ["report", str(tmp_path / "runs/program")])
    assert "EPS/W" in shown.output
