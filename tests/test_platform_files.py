"""The device and connection CSV files: what is accepted, what every fault says, and what links cost."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from composer.calibration import CalibrationStore
from composer.platform import MOST_DEVICES, Platform, read_connections, read_devices, usable, with_cores_of_host
from composer.replay_composing import ReplayComposing
from pearl.backends.protocol import Backend
from pearl.devices import Connection, Device, describe_cpu
from pearl.errors import DeviceFileError, PlacementError

CPU_GPU = "name,kind,backend\ncpu0,cpu,cpu\ngpu0,gpu,cuda\n"
LINK = "source,target,latency_us,bandwidth_gbps\n"


def write(folder: Path, text: str | bytes, name: str = "devices.csv") -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def device_error(folder: Path, text: str | bytes) -> str:
    with pytest.raises(DeviceFileError) as caught:
        read_devices(write(folder, text))
    assert "devices.csv" in str(caught.value)
    return str(caught.value)


def connection_error(folder: Path, text: str) -> str:
    devices = read_devices(write(folder, CPU_GPU))
    with pytest.raises(DeviceFileError) as caught:
        read_connections(write(folder, text, "connections.csv"), devices)
    assert "connections.csv" in str(caught.value)
    return str(caught.value)


def test_full_row_with_bom_comments_blank_lines_and_spaces(tmp_path: Path) -> None:
    text = (
        "\ufeff# the machine under the desk\n"
        "Name, kind,backend,selector,cores,clock_mhz,memory_gb,memory_bandwidth_gbps,dsp,sram_kb,luts,"
        "idle_watts,active_watts\r\n"
        "\n"
        " fpga0 , FPGA,sycl, fpga_emu ,,400,32,76.8,4510,32000,487200,25,60\n"
        "  # a comment\n"
        "cpu0,cpu,cpu,,16,2600.5,,,,,,,\n"
    )
    fpga, cpu = read_devices(write(tmp_path, text))
    assert fpga == Device(
        "fpga0",
        "fpga",
        "sycl",
        "fpga_emu",
        clock_mhz=400,
        memory_gb=32,
        memory_bandwidth_gbps=76.8,
        dsp=4510,
        sram_kb=32000,
        luts=487200,
        idle_watts=25,
        active_watts=60,
    )
    assert cpu == Device("cpu0", "cpu", "cpu", cores=16, clock_mhz=2600.5)


def test_unit_variants_convert(tmp_path: Path) -> None:
    text = "name,kind,backend,clock_ghz,memory_mb,memory_bandwidth_mbps,sram_mb\ncpu0,cpu,cpu,2.5,16000,40000,2\n"
    (cpu,) = read_devices(write(tmp_path, text))
    assert (cpu.clock_mhz, cpu.memory_gb, cpu.memory_bandwidth_gbps, cpu.sram_kb) == (2500, 16, 40, 2000)
    for header, value in (("latency_ns", 1500), ("latency_us", 1.5), ("latency_ms", 0.0015), ("latency_s", 1.5e-6)):
        path = write(tmp_path, f"source,target,{header},bandwidth_mbps\ncpu0,cpu0,{value},12000\n", "connections.csv")
        (link,) = read_connections(path, (cpu,))
        assert link.latency_us == pytest.approx(1.5)
        assert link.bandwidth_gbps == pytest.approx(12)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "is empty"),
        ("\n\n# only a comment\n", "is empty"),
        (b"#" * (1 << 20) + b"#", "expected one row per device, 1,048,576 bytes at most"),
        ("name,kind,backend\n", "expected one row per device; found 'the header alone'"),
        (b"name,kind,backend\ncpu\xff,cpu,cpu\n", "line 2: expected UTF-8 text; found byte 0xff"),
        ("name,kind,backend\ncpu\0,cpu,cpu\n", "line 2: expected text; found a zero byte"),
        ("name;kind;backend\ncpu0;cpu;cpu\n", "line 1: expected cells separated by commas"),
        ("name,backend\ncpu0,cpu\n", "line 1, column 'kind': expected a column kind"),
        ("name,kind,backend,backend\n", "column 'backend': expected backend to be given once"),
        (
            "name,kind,backend,clock_mhz,clock_ghz\n",
            "expected clock_mhz to be given once; found 'clock_mhz, clock_ghz'",
        ),
        ("name,kind,backend,activ_watts\n", "Did you mean 'active_watts'?"),
        ("name,kind,backend,memory\n", "expected a header with its unit, one of memory_gb, memory_mb; found 'memory'"),
        ("name,kind,backend\na b,cpu,cpu\n", "line 2, column 'name': expected 1 to 64 letters"),
        ("name,kind,backend\n,cpu,cpu\n", "line 2, column 'name': expected 1 to 64 letters"),
        ("name,kind,backend\na,cpu,cpu\n\n#\na,cpu,cpu\n", "line 5, column 'name': expected each name once; found 'a'"),
        (
            "name,kind,backend\na,gpuu,cuda\n",
            "column 'kind': expected one of cpu, gpu, fpga; found 'gpuu'. Did you mean",
        ),
        (
            "name,kind,backend\na,gpu,cudnn\n",
            "column 'backend': expected one of cpu, cuda, sycl, null, model; found 'cudnn'",
        ),
        ("name,kind,backend\na,cpu,cuda\n", "column 'backend': expected a backend of a cpu: cpu, sycl, null, model"),
        ("name,kind,backend,selector\na,gpu,cuda,second\n", "an index such as 'cuda:0'"),
        ("name,kind,backend,selector\na,cpu,null,sample_us=1\n", "insert_us, update_us, learner_us missing"),
        ("name,kind,backend,cores\na,cpu,cpu,-4\n", "column 'cores': expected a whole number above 0"),
        ("name,kind,backend,cores\na,cpu,cpu,2.5\n", "found '2.5'"),
        ("name,kind,backend,cores\na,cpu,cpu," + "9" * 5000 + "\n", "column 'cores': expected a whole number"),
        ("name,kind,backend,memory_gb\na,cpu,cpu,-1\n", "expected a number above 0; found '-1'"),
        ("name,kind,backend,memory_gb\na,cpu,cpu,lots\n", "expected a number above 0; found 'lots'"),
        ("name,kind,backend,memory_gb\na,cpu,cpu,nan\n", "found 'nan'"),
        ("name,kind,backend,memory_gb\na,cpu,cpu,inf\n", "found 'inf'"),
        ("name,kind,backend,memory_gb\na,cpu,cpu,1e400\n", "found '1e400'"),
        ('name,kind,backend,memory_gb\na,cpu,cpu,"1,5"\n', "a decimal point, not a comma"),
        (
            "name,kind,backend,memory_gb\na,cpu,cpu,16 GB\n",
            "a plain number (the unit belongs in the header 'memory_gb')",
        ),
        ("name,kind,backend\na,cpu,cpu,7\n", "line 2: expected 3 cells, as in the header; found '7'"),
        ('name,kind,backend\n"a,cpu,cpu\n', "not closed"),
        ('name,kind,backend\n,"\n",cpu\n', "line 2: a quoted cell runs over several lines"),
        ("," * 300 + "\n" * 1000, "expected 256 cells at most; found 301"),
        ('name,kind,backend\n"a\nb",cpu,cpu\n', "line 2: a quoted cell runs over several lines"),
    ],
)
def test_each_device_fault_is_named(tmp_path: Path, text: str | bytes, expected: str) -> None:
    assert expected in device_error(tmp_path, text)


def test_missing_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(DeviceFileError, match=r"absent\.csv cannot be read: No such file"):
        read_devices(tmp_path / "absent.csv")
    with pytest.raises(DeviceFileError, match="is a folder"):
        read_devices(tmp_path)
    with pytest.raises(DeviceFileError, match="cannot be read"):
        read_devices("a\0b.csv")


def test_all_faults_of_a_file_come_in_one_message_the_first_ten_shown(tmp_path: Path) -> None:
    rows = "".join(f"d{i},cpu,cpu,{i - 20}\n" for i in range(12))
    message = device_error(tmp_path, f"name,kind,backend,cores\n{rows}")
    assert "12 errors" in message
    assert re.findall(r"^  line (\d+)", message, re.MULTILINE) == [str(line) for line in range(2, 12)]
    assert message.endswith("and 2 more")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("source,target,bandwidth_gbps\n", "expected a column latency_us or latency_ms or latency_ns or latency_s"),
        (
            "source,target,latency,bandwidth_gbps\n",
            "one of latency_us, latency_ms, latency_ns, latency_s; found 'latency'",
        ),
        ("source,target,latency_us,bandwidth\n", "one of bandwidth_gbps, bandwidth_mbps; found 'bandwidth'"),
        (LINK + "cpu0,gpu1,1,1\n", "line 2, column 'target': expected a device of the device CSV (cpu0, gpu0)"),
        (LINK + "cpu0,gpu0,,1\n", "column 'latency_us': expected a number; found ''"),
        (LINK + "cpu0,gpu0,-1,1\n", "column 'latency_us': expected a number of at least 0; found '-1'"),
        (LINK + "cpu0,gpu0,1,0\n", "column 'bandwidth_gbps': expected a number above 0; found '0'"),
        (LINK + "cpu0,gpu0,1,-3\n", "found '-3'"),
        (LINK + "cpu0,gpu0,1,10 GB/s\n", "a plain number (the unit belongs in the header 'bandwidth_gbps')"),
        (LINK + "cpu0,gpu0,1,1e-300\n", "a number from 1e-12 to 1e+15 gbps"),
        (LINK + "cpu0,gpu0,1,2\ncpu0,gpu0,1,3\n", "Line 2 states other values for cpu0 -> gpu0"),
    ],
)
def test_each_connection_fault_is_named(tmp_path: Path, text: str, expected: str) -> None:
    assert expected in connection_error(tmp_path, text)


def test_equal_rows_count_once_and_a_self_connection_is_fine(tmp_path: Path) -> None:
    devices = read_devices(write(tmp_path, CPU_GPU))
    text = LINK + "cpu0,gpu0,1,2\ncpu0,gpu0,1,2\ncpu0,cpu0,0.1,40\n"
    connections = read_connections(write(tmp_path, text, "connections.csv"), devices)
    assert connections == (Connection("cpu0", "gpu0", 1, 2), Connection("cpu0", "cpu0", 0.1, 40))


def test_code_in_a_cell_stays_text(tmp_path: Path) -> None:
    witness = tmp_path / "witness"
    code = f"__import__('pathlib').Path('{witness}').touch()"
    assert "column 'name'" in device_error(tmp_path, f"name,kind,backend\n{code},cpu,cpu\n")
    assert "column 'memory_gb'" in device_error(tmp_path, f"name,kind,backend,memory_gb\na,cpu,cpu,{code}\n")
    for backend in ("sycl", "null"):
        text = f'name,kind,backend,selector\na,gpu,{backend},"{code}"\n'
        assert "column 'selector'" in device_error(tmp_path, text)
    assert not witness.exists()


def test_links_are_symmetric_unless_both_directions_are_given() -> None:
    devices = (Device("cpu0", "cpu", "cpu"), Device("gpu0", "gpu", "cuda"))
    one_way = Platform(devices, (Connection("gpu0", "cpu0", 5, 10),))
    assert one_way.link("cpu0", "gpu0").transfer_us(10_000) == pytest.approx(6)
    both = Platform(devices, (Connection("gpu0", "cpu0", 5, 10), Connection("cpu0", "gpu0", 7, 20)))
    assert both.link("cpu0", "gpu0").latency_us == 7
    assert both.link("gpu0", "cpu0").latency_us == 5


def test_own_memory_is_the_row_else_the_device_else_the_default() -> None:
    stated = Device("gpu0", "gpu", "cuda", memory_bandwidth_gbps=900)
    assert Platform((stated,), (Connection("gpu0", "gpu0", 4, 800),)).link("gpu0", "gpu0").bandwidth_gbps == 800
    own = Platform((stated,)).link("gpu0", "gpu0")
    assert (own.latency_us, own.bandwidth_gbps, own.hops) == (0.1, 900, ("gpu0",))
    assert Platform((Device("cpu0", "cpu", "cpu"),)).link("cpu0", "cpu0").bandwidth_gbps == 20


def test_accelerators_without_a_link_go_through_the_host_and_pay_both_hops() -> None:
    devices = (Device("cpu0", "cpu", "cpu"), Device("gpu0", "gpu", "cuda"), Device("fpga0", "fpga", "sycl"))
    platform = Platform(devices, (Connection("cpu0", "gpu0", 5, 10), Connection("cpu0", "fpga0", 3, 2)))
    link = platform.link("gpu0", "fpga0")
    assert link.hops == ("gpu0", "cpu0", "fpga0")
    there, onwards = platform.link("gpu0", "cpu0"), platform.link("cpu0", "fpga0")
    for nbytes in (0, 64, 1_000_000):
        assert link.transfer_us(nbytes) == pytest.approx(there.transfer_us(nbytes) + onwards.transfer_us(nbytes))


def test_a_link_between_accelerators_counts_only_if_programs_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = (Device("cpu0", "cpu", "cpu"), Device("gpu0", "gpu", "cuda"), Device("fpga0", "fpga", "sycl"))
    to_host = (Connection("cpu0", "gpu0", 5, 10), Connection("cpu0", "fpga0", 3, 2))
    between = Connection("gpu0", "fpga0", 1, 100)
    platform = Platform(devices, (*to_host, between))
    assert platform.link("fpga0", "gpu0") == Platform(devices, to_host).link("fpga0", "gpu0")
    assert platform.unused_connections == (between,)
    monkeypatch.setattr(Backend, "talks_directly", lambda *_: True)
    platform = Platform(devices, (*to_host, between))
    assert platform.link("fpga0", "gpu0").hops == ("fpga0", "gpu0")
    assert platform.unused_connections == ()


def test_no_route_names_the_missing_row() -> None:
    devices = (Device("cpu0", "cpu", "cpu"), Device("gpu0", "gpu", "cuda"), Device("fpga0", "fpga", "sycl"))
    platform = Platform(devices, (Connection("cpu0", "gpu0", 5, 10),))
    with pytest.raises(PlacementError, match="'fpga0,cpu0,<latency_us>,<bandwidth_gbps>'"):
        platform.link("gpu0", "fpga0")
    with pytest.raises(PlacementError, match="'cpu0,fpga0,<latency_us>,<bandwidth_gbps>'"):
        platform.link("cpu0", "fpga0")
    with pytest.raises(PlacementError, match="Did you mean 'gpu0'"):
        platform.link("cpu0", "gpu")


def test_host_is_the_first_cpu() -> None:
    cpu = Device("second", "cpu", "cpu")
    assert Platform((Device("first", "cpu", "sycl"), cpu)).host == cpu
    with pytest.raises(PlacementError, match="No CPU among the devices"):
        _ = Platform((Device("gpu0", "gpu", "cuda"),)).host


def test_usable_gives_a_reason_for_each_device_left_out() -> None:
    far = Device("gpu7", "gpu", "sycl", "level_zero:gpu:7")
    ready, ((left_out, reason),) = usable(Platform((Device("cpu0", "cpu", "cpu"), far)))
    assert [device.name for device in ready] == ["cpu0"]
    assert left_out == far
    assert "SYCL" in reason


def test_devices_that_share_silicon(tmp_path: Path) -> None:
    text = (
        "name,kind,backend,selector,shares_with\ncpu0,cpu,cpu,,\nsycl,cpu,sycl,,cpu0\n"
        "emu,fpga,sycl,fpga_emu,sycl\ngpu0,gpu,cuda,,\n"
    )
    platform = Platform(read_devices(write(tmp_path, text)))
    assert [device.shares_with for device in platform.devices] == ["", "cpu0", "sycl", ""]
    for pair in (("cpu0", "sycl"), ("sycl", "cpu0"), ("emu", "cpu0"), ("cpu0", "emu"), ("gpu0", "gpu0")):
        assert platform.shared_silicon(*pair)
    for pair in (("cpu0", "gpu0"), ("gpu0", "emu")):
        assert not platform.shared_silicon(*pair)
    with pytest.raises(PlacementError, match="no device 'gpu9'"):
        platform.shared_silicon("cpu0", "gpu9")


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ("cpu0,cpu,cpu,cpu0\n", "line 2, column 'shares_with': expected another device; found 'cpu0'"),
        ("cpu0,cpu,cpu,\ns,cpu,sycl,cpu1\n", "line 3, column 'shares_with': expected a device of this file (cpu0, s)"),
        ("cpu0,cpu,cpu,\ns,cpu,sycl,cpu1\n", "Did you mean 'cpu0'"),
        ("cpu0,cpu,cpu,=x()\n", "expected a device of this file (cpu0); found '=x()'"),
    ],
)
def test_shares_with_names_another_device_of_the_file(tmp_path: Path, rows: str, expected: str) -> None:
    assert expected in device_error(tmp_path, f"name,kind,backend,shares_with\n{rows}")


def test_the_examples_of_the_csv_reference_are_valid(tmp_path: Path) -> None:
    text = (Path(__file__).parents[1] / "docs" / "csv_reference.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```csv\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 4
    for device_text, connection_text in zip(blocks[::2], blocks[1::2], strict=True):
        paths = write(tmp_path, device_text), write(tmp_path, connection_text, "connections.csv")
        platform = Platform.from_files(*paths)
        for source in platform.devices:
            for target in platform.devices:
                assert platform.link(source.name, target.name).hops


CELLS = st.one_of(
    st.sampled_from(
        ["cpu", "gpu", "fpga", "cuda", "sycl", "null", "cpu0", "gpu0", "1", "0", "-1", "2.5", "1e9", "nan"]
    ),
    st.sampled_from(["", " ", '"', '""', '"a"', "#", "10 GB", "sample_us=5;insert_us=2;update_us=3;learner_us=9"]),
    st.text(max_size=6),
)
HEADERS = st.one_of(
    st.sampled_from(
        [
            "name",
            "kind",
            "backend",
            "selector",
            "cores",
            "memory_gb",
            "clock_ghz",
            "sram_mb",
            "dsp",
            "memory",
            "shares_with",
        ]
    ),
    st.sampled_from(["source", "target", "latency_us", "latency_ms", "bandwidth_gbps", "latency", ""]),
    st.text(max_size=4),
)
LINES = st.lists(CELLS, max_size=8).map(",".join)
NEWLINES = st.sampled_from(["\n", "\r\n", "\r", "\n\n", "\n#\n"])


@st.composite
def csv_texts(draw: st.DrawFn, standard_header: str) -> str:
    header = draw(st.one_of(st.just(standard_header), st.lists(HEADERS, max_size=8).map(",".join)))
    return draw(NEWLINES).join([header, *draw(st.lists(LINES, max_size=5))])


FUZZ = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def check_only_device_file_errors(folder: Path, device_bytes: bytes, connection_bytes: bytes) -> None:
    device_path = write(folder, device_bytes)
    connection_path = write(folder, connection_bytes, "connections.csv")
    try:
        platform = Platform.from_files(device_path, connection_path)
    except DeviceFileError:
        return
    names = {device.name for device in platform.devices}
    assert names
    assert all({link.source, link.target} <= names for link in platform.connections)
    for device in platform.devices:
        assert platform.link(device.name, device.name).transfer_us(1000) > 0


@FUZZ
@given(
    devices=csv_texts("name,kind,backend,cores,memory_gb"),
    connections=csv_texts("source,target,latency_us,bandwidth_gbps"),
)
@example(devices="name,kind,backend\rcpu0,cpu,cpu", connections="source,target,latency_us,bandwidth_gbps")
def test_fuzzed_tables_give_a_platform_or_a_device_file_error(tmp_path: Path, devices: str, connections: str) -> None:
    encoded = [text.encode("utf-8", "surrogatepass") for text in (devices, connections)]
    check_only_device_file_errors(tmp_path, *encoded)
    check_only_device_file_errors(tmp_path, CPU_GPU.encode(), encoded[1])


@FUZZ
@given(devices=st.binary(max_size=60), prefix=st.booleans())
def test_fuzzed_bytes_give_a_platform_or_a_device_file_error(tmp_path: Path, devices: bytes, prefix: bool) -> None:
    check_only_device_file_errors(tmp_path, CPU_GPU.encode() + devices if prefix else devices, LINK.encode() + devices)


# --- machines that are larger than this one, or not sensible --------------------------------------------------------


def test_a_cpu_that_is_here_has_no_more_cores_than_may_be_used(monkeypatch):
    info = dataclasses.replace(describe_cpu(), logical_cores=2)
    monkeypatch.setattr("composer.platform.describe_cpu", lambda: info)
    stated = Platform(
        (
            Device("cpu0", "cpu", "cpu", cores=64),
            Device("cpu1", "cpu", "cpu", cores=1),
            Device("cpu2", "cpu", "cpu"),
            Device("far", "cpu", "model", cores=64),
            Device("gpu0", "gpu", "cuda", cores=82),
        )
    )
    found, warnings = with_cores_of_host(stated)
    assert [device.cores for device in found.devices] == [2, 1, None, 64, 82]
    (warning,) = warnings
    assert warning.startswith("cpu0: the device CSV states 64 cores, of which this process may use 2; 2 are taken.")


def test_composing_takes_no_more_threads_than_cores_and_says_so(csv_pair, caplog):
    from programs import described

    files = csv_pair("cpu0,cpu,cpu,,64,60")
    composer = described(files)
    platform = ReplayComposing(composer, CalibrationStore()).stated_platform()
    assert platform.host.cores == describe_cpu().logical_cores < 64
    assert "states 64 cores" in caplog.text


@pytest.mark.parametrize("count", [MOST_DEVICES, MOST_DEVICES + 1, 300])
def test_a_device_file_has_so_many_devices_that_all_pairs_can_be_costed(csv_pair, count):
    files = csv_pair(*(f"cpu{k},cpu,cpu,,2,60" for k in range(count)))
    if count <= MOST_DEVICES:
        assert len(read_devices(files[0])) == count
        return
    with pytest.raises(
        DeviceFileError, match=rf"line {MOST_DEVICES + 2}.*at most 64 devices; found '{count} rows'.*once"
    ):
        read_devices(files[0])


def test_silicon_is_shared_from_device_to_device_however_the_rows_are_ordered():
    rows = [("a", "b"), ("b", ""), ("c", "a"), ("d", "c"), ("e", "f"), ("f", ""), ("g", "")]
    for order in (rows, rows[::-1]):
        platform = Platform(tuple(Device(name, "cpu", "cpu", shares_with=other) for name, other in order))
        for first in "abcdefg":
            shared = {second for second in "abcdefg" if platform.shared_silicon(first, second)}
            assert shared == next(group for group in ({*"abcd"}, {*"ef"}, {"g"}) if first in group)
