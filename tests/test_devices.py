"""Devices: what is discovered here, what is read from other machines' /proc and /sys, and the null device."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer.platform import Platform
from pearl import _native, control_groups
from pearl.backends.cpu import device as cpu
from pearl.backends.cpu.device import cpu_device, host_memory_latency_us, measure_memory_bandwidth
from pearl.backends.cuda import device as cuda
from pearl.backends.cuda.device import cuda_index
from pearl.backends.sycl import device as sycl
from pearl.devices import Connection, Device, NullTimes, describe_cpu, discover, write_csv
from pearl.errors import ConfigurationError, DeviceError
from pearl.replay import memory

NULL = "sample_us=5;insert_us=2;update_us=3;learner_us=100"


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def hyperthreaded_machine(folder: Path) -> tuple[Path, Path]:
    cpuinfo = "".join(
        f"processor\t: {i}\nmodel name\t: Test CPU 9000\ncpu MHz\t\t: 2000.5\nflags\t\t: avx avx2\n\n" for i in range(8)
    )
    proc = tree(
        folder / "proc",
        {
            "cpuinfo": cpuinfo,
            "meminfo": "MemTotal:       1000 kB\nMemFree:        300 kB\nMemAvailable:    500 kB\n",
            "self/cgroup": "0::/jobs/mine\n",
        },
    )
    cache = "devices/system/cpu/cpu0/cache/"
    files = {
        f"{cache}index0/level": "1",
        f"{cache}index0/type": "Data",
        f"{cache}index0/size": "48K",
        f"{cache}index1/level": "1",
        f"{cache}index1/type": "Instruction",
        f"{cache}index1/size": "32K",
        f"{cache}index2/level": "2",
        f"{cache}index2/type": "Unified",
        f"{cache}index2/size": "2M",
        f"{cache}index3/level": "3",
        f"{cache}index3/type": "Unified",
        f"{cache}index3/size": "36M",
        "devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq": "4800000",
        "devices/system/node/node0/x": "",
        "devices/system/node/node1/x": "",
        "fs/cgroup/cpu.max": "max 100000",
        "fs/cgroup/jobs/cpu.max": "350000 100000",
        "fs/cgroup/jobs/mine/cpu.max": "max 100000",
        "class/powercap/intel-rapl:0/energy_uj": "12345",
        "class/powercap/intel-rapl:0/constraint_0_max_power_uw": "125000000",
        "class/powercap/intel-rapl:0:0/energy_uj": "1",
        "class/powercap/intel-rapl:0:0/constraint_0_max_power_uw": "99000000",
    }
    siblings = {f"devices/system/cpu/cpu{i}/topology/thread_siblings_list": f"{i % 4},{i % 4 + 4}" for i in range(8)}
    return proc, tree(folder / "sys", files | siblings)


def test_cpu_facts_come_from_proc_and_sys(tmp_path: Path) -> None:
    proc, sys_root = hyperthreaded_machine(tmp_path)
    info = describe_cpu(proc, sys_root, affinity=set(range(8)))
    assert info.model == "Test CPU 9000"
    assert (info.cpu_quota, info.logical_cores, info.physical_cores) == (3.5, 3, 3)
    assert (info.l1d_bytes, info.l2_bytes, info.l3_bytes) == (48 << 10, 2 << 20, 36 << 20)
    assert (info.clock_mhz, info.numa_nodes, info.package_watts) == (4800, 2, 125)
    assert (info.memory_total, info.memory_available) == (1000 << 10, 500 << 10)


def test_instruction_sets_are_those_the_kernel_lists(tmp_path: Path) -> None:
    flags = "fpu sse4_2 avx avx2 fma avx512f avx512_vnni"
    x86 = tree(tmp_path / "x86", {"cpuinfo": f"processor\t: 0\nflags\t\t: {flags}\n"})
    arm = tree(tmp_path / "arm", {"cpuinfo": "processor\t: 0\nFeatures\t: fp asimd\n"})
    isa = describe_cpu(x86, tmp_path, affinity={0}).isa
    assert isa == ("avx", "avx2", "avx512f", "avx512vnni", "fma", "sse4.2")
    assert describe_cpu(arm, tmp_path, affinity={0}).isa == ("neon",)


def test_affinity_bounds_cores_and_siblings_share_one(tmp_path: Path) -> None:
    proc, sys_root = hyperthreaded_machine(tmp_path)
    (sys_root / "fs/cgroup/jobs/cpu.max").write_text("max 100000")
    info = describe_cpu(proc, sys_root, affinity={1, 5, 2})
    assert (info.logical_cores, info.physical_cores) == (3, 2)


def test_quota_of_version_1_control_groups(tmp_path: Path) -> None:
    proc = tree(tmp_path / "proc", {"self/cgroup": "4:cpu,cpuacct:/box\n2:memory:/other\n"})
    folder = "fs/cgroup/cpu,cpuacct/box/"
    sys_root = tree(tmp_path / "sys", {f"{folder}cpu.cfs_quota_us": "50000", f"{folder}cpu.cfs_period_us": "100000"})
    assert describe_cpu(proc, sys_root, affinity={0, 1}).logical_cores == 1


V1_UNLIMITED = "9223372036854771712"  # what version 1 says where there is no limit


@pytest.mark.parametrize(
    ("groups", "files", "limit", "free"),
    [
        # The container's own group has no limit: that of the slice around it counts, less what is no cache there.
        (
            "0::/kubepods/pod1/box",
            {
                "kubepods/pod1/memory.max": "600000",
                "kubepods/pod1/memory.current": "500000",
                "kubepods/pod1/memory.stat": "anon 1\nfile 300000\nshmem 100000\n",
                "kubepods/pod1/box/memory.max": "max",
                "kubepods/pod1/box/memory.current": "400000",
            },
            600_000,
            300_000,
        ),
        # Seen from inside, a container's group is the root.
        ("0::/", {"memory.max": "max", "memory.high": "250000", "memory.current": "50000"}, 250_000, 200_000),
        # The nearer limit is the larger one, and nearly used up.
        (
            "0::/a/b",
            {
                "a/memory.max": "300000",
                "a/memory.current": "100000",
                "a/b/memory.max": "400000",
                "a/b/memory.current": "390000",
            },
            300_000,
            10_000,
        ),
        # Version 1: the group lies outside what the container sees, whose root has the limit.
        (
            "9:memory:/docker/box\n0::/elsewhere",
            {
                "memory/memory.limit_in_bytes": "500000",
                "memory/memory.usage_in_bytes": "450000",
                "memory/memory.stat": "cache 1\ntotal_cache 50000\ntotal_shmem 10000\n",
                "memory/docker/box/memory.limit_in_bytes": V1_UNLIMITED,
                "memory/docker/box/memory.usage_in_bytes": "0",
            },
            500_000,
            90_000,
        ),
    ],
    ids=["pod", "inside", "nested", "version 1"],
)
def test_memory_limits_of_containers_count(
    groups: str, files: dict[str, str], limit: int, free: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meminfo = "MemTotal:       1000 kB\nMemFree:        300 kB\nMemAvailable:    500 kB\n"
    proc = tree(tmp_path / "proc", {"meminfo": meminfo, "self/cgroup": groups})
    sys_root = tree(tmp_path / "sys", {f"fs/cgroup/{name}": text for name, text in files.items()})
    info = describe_cpu(proc, sys_root, affinity={0})
    assert (info.memory_total, info.memory_available) == (limit, free)
    monkeypatch.setattr(memory, "group_memory", lambda: control_groups.group_memory(proc, sys_root))
    assert memory.free_memory() == free


def test_a_container_without_limits_has_the_machines_memory(tmp_path: Path) -> None:
    proc = tree(tmp_path / "proc", {"meminfo": "MemAvailable:    500 kB\n", "self/cgroup": "3:memory:/box\n0::/box\n"})
    files = {"fs/cgroup/memory/box/memory.limit_in_bytes": V1_UNLIMITED, "fs/cgroup/unified/box/memory.max": "max"}
    assert describe_cpu(proc, tree(tmp_path / "sys", files), affinity={0}).memory_available == 500 << 10


@pytest.mark.parametrize("available", [100 << 10, 10 << 20, 1 << 30, 64 << 30])
def test_bandwidth_is_measured_within_the_free_memory(available: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def measured(nbytes: int, _: int) -> float:
        sizes.append(nbytes)
        return 1.0

    monkeypatch.setattr(_native, "copy_bandwidth", measured)
    monkeypatch.setattr(_native, "random_access_ns", measured)
    info = dataclasses.replace(describe_cpu(), memory_available=available)
    measure_memory_bandwidth(info)
    host_memory_latency_us(info)
    assert len(sizes) == 2
    assert all(0 < 2 * size <= max(available // 2, 128 << 10) for size in sizes)


def test_a_machine_that_tells_nothing_is_described_without_failing(tmp_path: Path) -> None:
    info = describe_cpu(tmp_path, tmp_path, affinity={0})
    assert (info.logical_cores, info.physical_cores, info.l3_bytes, info.clock_mhz) == (1, 1, 0, None)
    assert cpu_device(info).memory_gb is None


def test_discovery_of_this_machine_writes_files_that_read_back_equal(tmp_path: Path) -> None:
    messages: list[str] = []
    devices, connections = discover(measure=False, progress=messages.append)
    assert devices[0].kind == "cpu"
    assert devices[0].availability().ok
    assert messages
    write_csv(devices, connections, tmp_path / "d.csv", tmp_path / "c.csv")
    platform = Platform.from_files(tmp_path / "d.csv", tmp_path / "c.csv")
    assert platform == Platform(tuple(devices), tuple(connections))
    with pytest.raises(ConfigurationError, match="cannot be written"):
        write_csv(devices, connections, tmp_path / "absent" / "d.csv", tmp_path / "c.csv")


def test_memory_bandwidth_is_measured() -> None:
    assert 0.1 < measure_memory_bandwidth(describe_cpu(), repeats=2) < 10_000


def test_importing_devices_loads_neither_torch_nor_pandas() -> None:
    code = "import sys, pearl.devices; assert not {'torch', 'pandas'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"name": "a b"}, "name must be"),
        ({"kind": "tpu"}, "kind must be one of"),
        ({"backend": "cuda"}, "a cpu is driven by cpu or sycl or null"),
        ({"selector": "cpu:1"}, "one selector"),
        ({"memory_gb": float("nan")}, "memory_gb must be a finite number above 0"),
        ({"active_watts": 0.0}, "active_watts must be a finite number above 0"),
        ({"dsp": -1}, "dsp must be a finite number of at least 0"),
        ({"shares_with": "cpu0"}, "shares_with must name another device; found 'cpu0'"),
        ({"shares_with": "a b"}, "shares_with must name another device; found 'a b'"),
        ({"backend": "sycl", "selector": "level_zero:gpu:0"}, "sycl selector of kind cpu must be"),
    ],
)
def test_a_device_checks_its_values(values: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigurationError, match=expected):
        Device(**({"name": "cpu0", "kind": "cpu", "backend": "cpu"} | values))


def test_availability_says_why_not() -> None:
    assert Device("n", "gpu", "null", NULL).availability().ok
    for far in (Device("g", "gpu", "cuda", "cuda:99"), Device("g", "gpu", "sycl", "level_zero:gpu:99")):
        assert not far.availability().ok
        assert far.availability().reason


def test_fingerprint_follows_the_hardware_not_the_name() -> None:
    assert Device("a", "cpu", "cpu").fingerprint() == Device("b", "cpu", "cpu", active_watts=5).fingerprint()
    fpga = Device("f", "fpga", "sycl", dsp=100)
    assert fpga.fingerprint() != Device("f", "fpga", "sycl", dsp=200).fingerprint()
    assert len(Device("g", "gpu", "cuda", "cuda:99").fingerprint()) == 16


def test_a_cpu_is_the_same_whether_or_not_the_native_kernels_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    device, info = Device("a", "cpu", "cpu"), describe_cpu()
    with_kernels = device.fingerprint()
    monkeypatch.setitem(sys.modules, "pearl._native", None)  # importing it now raises ImportError
    monkeypatch.delattr("pearl._native", raising=False)
    with pytest.raises(ImportError):
        from pearl import _native  # noqa: F401
    assert device.fingerprint() == with_kernels
    assert describe_cpu().isa == info.isa


@pytest.mark.parametrize(("selector", "index"), [("", 0), ("cuda", 0), ("cuda:3", 3), ("12", 12)])
def test_cuda_selectors(selector: str, index: int) -> None:
    assert cuda_index(selector) == index


def test_null_times_read_in_any_order() -> None:
    times = NullTimes.parse(" learner_us=100; sample_us=5;update_us=3e0 ;insert_us=2;sharing=1.5")
    assert times == NullTimes(5, 2, 3, 100, 1.5)


@pytest.mark.parametrize(
    ("selector", "expected"),
    [
        ("", "must read like"),
        ("sample_us=5", "insert_us, update_us, learner_us missing"),
        (NULL + ";sample_us=6", "gives sample_us twice"),
        (NULL + ";", "found ''"),
        (NULL + ";speed=3", "found 'speed=3'"),
        (NULL.replace("=5", "=-5"), "must be a number above 0; found '-5'"),
        (NULL.replace("=5", "=0"), "must be a number above 0; found '0'"),
        (NULL.replace("=5", "=nan"), "found 'nan'"),
        (NULL.replace("=5", "=5us"), "found '5us'"),
    ],
)
def test_null_selector_faults_are_named(selector: str, expected: str) -> None:
    with pytest.raises(ConfigurationError, match=expected):
        NullTimes.parse(selector)


@given(st.lists(st.floats(1e-9, 1e9), min_size=5, max_size=5))
def test_null_selector_round_trip(values: list[float]) -> None:
    times = NullTimes(*values)
    assert NullTimes.parse(times.selector()) == times


def test_nvidia_smi_is_optional_and_its_gaps_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda.shutil, "which", lambda _: None)
    assert cuda.query_smi() == []
    monkeypatch.setattr(cuda.shutil, "which", lambda _: "nvidia-smi")
    answer = types.SimpleNamespace(stdout="GPU-1, 550.1, 700.00, 1980\nGPU-2, 550.1, [N/A], [N/A]\n")
    monkeypatch.setattr(cuda.subprocess, "run", lambda *_, **__: answer)
    first, second = cuda.query_smi()
    assert first == cuda.SmiFacts("GPU-1", "550.1", 700, 1980)
    assert second.power_limit_watts is None

    def too_slow(*_: object, **__: object) -> None:
        raise subprocess.TimeoutExpired("nvidia-smi", 10)

    monkeypatch.setattr(cuda.subprocess, "run", too_slow)
    assert cuda.query_smi() == []


def test_gpu_facts_match_by_uuid() -> None:
    facts = [cuda.SmiFacts("GPU-a", "1", 100, None), cuda.SmiFacts("GPU-b", "1", 200, None)]
    chosen = cuda._facts_of(types.SimpleNamespace(uuid="b"), 0, facts)
    assert chosen is not None
    assert chosen.power_limit_watts == 200


def test_a_gpu_that_fails_is_reported_and_the_rest_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def describe(index: int, name: str, _facts: object, *, measure: bool) -> Device:
        if index == 0:
            raise RuntimeError("out of memory")
        return Device(name, "gpu", "cuda", f"cuda:{index}")

    available = lambda index: cuda.Availability(index < 2, "" if index < 2 else "no more")  # noqa: E731
    monkeypatch.setattr(cuda, "cuda_availability", available)
    monkeypatch.setattr(cuda, "describe_cuda", describe)
    monkeypatch.setattr(sycl, "sycl_devices", lambda: ())
    messages: list[str] = []
    devices, connections = discover(measure=False, progress=messages.append)
    assert [device.name for device in devices] == ["cpu0", "gpu1"]
    assert [(link.source, link.target) for link in connections] == [("cpu0", "gpu1")]
    assert "gpu0 is left out: out of memory" in messages


def sycl_facts(selector: str, kind: Any, name: str, *, emulated: bool = False) -> sycl.SyclDevice:
    return sycl.SyclDevice(selector, kind, name, "1.2", 8, 1500.0, 16_000_000_000, emulated, has_usm=True)


def test_sycl_devices_are_listed_by_what_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    present = (
        sycl_facts("opencl:cpu:0", "cpu", "Xeon"),
        sycl_facts("level_zero:gpu:0", "gpu", "Arc"),
        sycl_facts("level_zero:gpu:1", "gpu", "Arc"),
        sycl_facts("opencl:accelerator:0", "fpga", "Agilex board"),
        sycl_facts("opencl:accelerator:1", "fpga", "Emulation Device", emulated=True),
    )
    monkeypatch.setattr(sycl, "sycl_devices", lambda: present)
    monkeypatch.setattr(cuda, "cuda_availability", lambda _: cuda.Availability(False, "none"))
    known = dataclasses.replace(describe_cpu(), package_watts=90.0)
    monkeypatch.setattr(cpu, "describe_cpu", lambda: known)
    messages: list[str] = []
    devices, links = discover(measure=False, progress=messages.append)
    rows = [(d.name, d.kind, d.backend, d.selector, d.shares_with, d.active_watts) for d in devices]
    assert rows == [
        ("cpu0", "cpu", "cpu", "cpu", "", 90),
        ("sycl:cpu0", "cpu", "sycl", "opencl:cpu:0", "cpu0", 90),
        ("sycl:gpu0", "gpu", "sycl", "level_zero:gpu:0", "", None),
        ("sycl:gpu1", "gpu", "sycl", "level_zero:gpu:1", "", None),
        ("fpga0", "fpga", "sycl", "opencl:accelerator:0", "", None),
        ("fpga_emu0", "fpga", "sycl", "fpga_emu", "cpu0", None),
    ]
    assert any("emulator (functional only)" in message for message in messages)
    latencies = {link.target: link.latency_us for link in links}
    assert latencies["sycl:cpu0"] < latencies["sycl:gpu0"]
    platform = Platform(tuple(devices), tuple(links))
    assert platform.shared_silicon("sycl:cpu0", "fpga_emu0")
    assert not platform.shared_silicon("cpu0", "fpga0")


def test_a_sycl_device_that_fails_is_reported_and_the_rest_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    present = (sycl_facts("opencl:cpu:0", "cpu", "A"), sycl_facts("level_zero:gpu:0", "gpu", "B"))

    def describe(selector: str, name: str, *, measure: bool) -> Device:
        if selector == "opencl:cpu:0":
            raise DeviceError("its driver is broken")
        return Device(name, "gpu", "sycl", selector)

    monkeypatch.setattr(sycl, "sycl_devices", lambda: present)
    monkeypatch.setattr(sycl, "describe_sycl", describe)
    messages: list[str] = []
    devices, _ = discover(measure=False, progress=messages.append)
    assert [device.name for device in devices if device.backend == "sycl"] == ["sycl:gpu0"]
    assert "sycl:cpu0 is left out: its driver is broken" in messages


@pytest.fixture
def bare_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Neither GPU nor board nor runtime that anybody could know of; the folder of its render nodes."""
    monkeypatch.setattr(cuda, "cuda_availability", lambda _: cuda.Availability(False, "none"))
    monkeypatch.setattr(sycl, "_RENDER_NODES", tmp_path / "drm")
    monkeypatch.setattr(sycl, "_OPENCL_VENDORS", tmp_path / "vendors")
    monkeypatch.setattr(sycl, "runtime_problem", lambda: "the SYCL runtime is not installed")
    for name in ("OCL_ICD_FILENAMES", "OCL_ICD_VENDORS"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "drm"


def devices_of_their_own() -> tuple[list[str], list[str]]:
    messages: list[str] = []
    devices, _ = discover(measure=False, progress=messages.append, own_silicon=True)
    return [device.name for device in devices], [message for message in messages if "CPU:" not in message]


def test_what_computes_on_the_cpu_is_named_and_no_runtime_loaded_for_it(
    bare_machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sycl, "sycl_devices", lambda: pytest.fail("loading the runtime takes its time"))
    assert devices_of_their_own() == (["cpu0"], ["No CUDA device: none"])
    monkeypatch.setattr(sycl, "runtime_problem", lambda: "")
    monkeypatch.setattr(sycl, "find_library", Path)
    monkeypatch.setattr(sycl, "emulator_library", lambda: None)
    line = "Left out, being cpu0 itself: {} (a device file that names them has them used)"
    assert devices_of_their_own() == (["cpu0"], ["No CUDA device: none", line.format("sycl:cpu0")])
    monkeypatch.setattr(sycl, "emulator_library", lambda: Path("emulator"))
    assert devices_of_their_own()[1][-1] == line.format("sycl:cpu0, fpga_emu0")


@pytest.mark.parametrize(("vendor", "found"), [("0x8086", ["cpu0", "sycl:gpu0", "fpga0"]), ("0x10de", ["cpu0"])])
def test_silicon_of_its_own_is_discovered_beside_the_cpu(
    bare_machine: Path, monkeypatch: pytest.MonkeyPatch, vendor: str, found: list[str]
) -> None:
    (bare_machine / "renderD128" / "device").mkdir(parents=True)
    (bare_machine / "renderD128" / "device" / "vendor").write_text(f"{vendor}\n")
    present = (
        sycl_facts("opencl:cpu:0", "cpu", "Xeon"),
        sycl_facts("level_zero:gpu:0", "gpu", "Arc"),
        sycl_facts("opencl:accelerator:0", "fpga", "Agilex board"),
        sycl_facts("opencl:accelerator:1", "fpga", "Emulation Device", emulated=True),
    )
    monkeypatch.setattr(sycl, "sycl_devices", lambda: present)
    assert devices_of_their_own()[0] == found
    (bare_machine.parent / "vendors").mkdir()
    (bare_machine.parent / "vendors" / "altera.icd").touch()
    assert devices_of_their_own()[0] == ["cpu0", "sycl:gpu0", "fpga0"]


@pytest.mark.cuda
def test_cuda_devices_are_measured() -> None:
    if not cuda.cuda_availability(0).ok:
        pytest.skip(cuda.cuda_availability(0).reason)
    devices, connections = discover()
    gpu = next(device for device in devices if device.name == "gpu0")
    assert gpu.availability().ok
    assert (gpu.memory_bandwidth_gbps or 0) > 50
    links = {(link.source, link.target): link for link in connections}
    assert links["cpu0", "gpu0"].bandwidth_gbps > 1
    assert 0 < links["gpu0", "cpu0"].latency_us < 10_000
    assert isinstance(links["gpu0", "gpu0"], Connection)
