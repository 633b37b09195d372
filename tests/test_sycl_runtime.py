"""The SYCL runtime: found and set up where it is, a reason and a command where it is not; its devices and queues."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import stat
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from composer.platform import Platform
from pearl.backends.sycl import device as sycl
from pearl.backends.sycl import runtime as sycl_runtime
from pearl.backends.sycl.selector import sycl_filter
from pearl.cache_folder import keeps_kernels
from pearl.devices import Device, discover
from pearl.errors import ConfigurationError, DeviceError

ROOT = Path(__file__).parents[1]
RIGHT = {name: f"{release}.1" for name, release in sycl_runtime.WHEELS.items()}
KERNELS = sorted((ROOT / "kernels" / "sycl").glob("*.sycl.cpp"))


def run_python(code: str, **environment: str | Path) -> str:
    """What `code` prints in a process of its own, whose environment has `environment` too."""
    answer = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {name: str(value) for name, value in environment.items()},
    )
    assert answer.returncode == 0, answer.stderr
    return answer.stdout


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`installed({"dpctl": "0.21.1"}, built=False)` makes those the wheels, and the libraries, of this environment."""

    def pretend(wheels: dict[str, str], *, built: bool = True) -> None:
        version, find_spec = importlib.metadata.version, importlib.util.find_spec

        def pretended_version(name: str) -> str:
            if name in sycl_runtime.WHEELS and name not in wheels:
                raise importlib.metadata.PackageNotFoundError(name)
            return wheels.get(name) or version(name)

        def pretended_spec(name: str, package: str | None = None) -> Any:
            there = {"pearl._sycl": built, "dpctl": "dpctl" in wheels}
            if name in there:
                return types.SimpleNamespace(name=name) if there[name] else None
            return find_spec(name, package)

        monkeypatch.setattr(importlib.metadata, "version", pretended_version)
        monkeypatch.setattr(importlib.util, "find_spec", pretended_spec)
        monkeypatch.setattr(sycl_runtime, "find_library", lambda name: Path(name) if wheels else None)

    return pretend


# --- what is not there ----------------------------------------------------------------------------------------------


def test_pearl_loads_nothing_of_sycl_until_it_is_asked_for() -> None:
    run_python(
        "import sys, pearl, pearl.devices, composer, composer.replay_composing, pearl.runtime.session\n"
        "assert not {'dpctl', 'pearl._sycl'} & set(sys.modules)\n"
        "assert 'libsycl' not in open('/proc/self/maps').read()\n"
    )


def test_a_missing_runtime_is_a_reason_with_the_command_that_adds_it(installed: Any) -> None:
    installed({}, built=False)
    for device in (Device("s", "cpu", "sycl"), Device("g", "gpu", "sycl"), Device("f", "fpga", "sycl")):
        available = device.availability()
        assert not available.ok
        for text in ("not installed", "pip install", "'dpctl==0.21.*'", "'intel-opencl-rt==2025.3.*'", "--no-deps"):
            assert text in available.reason
        assert len(device.fingerprint()) == 16
    with pytest.raises(DeviceError, match=r"SYCL cannot be used: .* not installed"):
        sycl.sycl_queue("cpu")
    messages: list[str] = []
    devices, _ = discover(measure=False, progress=messages.append)
    assert all(device.backend != "sycl" for device in devices)
    assert any("No SYCL device" in message and "pip install" in message for message in messages)


def test_one_missing_wheel_is_named(installed: Any) -> None:
    installed({name: version for name, version in RIGHT.items() if name != "dpctl"})
    reason = Device("s", "cpu", "sycl").availability().reason
    assert "not installed (dpctl missing)" in reason
    assert "&&" not in reason, "the module is there: nothing has to be built again"


@pytest.mark.parametrize(
    ("wheels", "named"),
    [
        ({"intel-opencl-rt": "2024.1.0"}, "intel-opencl-rt 2024.1.0 (needed: 2025.3.*)"),
        ({"intel-sycl-rt": "2026.0.0"}, "intel-sycl-rt 2026.0.0 (needed: 2025.3.*)"),
        ({"dpctl": "0.22.0", "intel-cmplr-lib-ur": "2025.30"}, "dpctl 0.22.0 (needed: 0.21.*), intel-cmplr-lib-ur"),
    ],
)
def test_wheels_that_do_not_fit_together_are_named_and_not_loaded(
    installed: Any, monkeypatch: pytest.MonkeyPatch, wheels: dict[str, str], named: str
) -> None:
    installed(RIGHT | wheels)
    monkeypatch.setattr(sycl_runtime, "_load", lambda: pytest.fail("a runtime of mixed versions is not to be loaded"))
    reason = Device("s", "cpu", "sycl").availability().reason
    for text in ("do not fit together", named, "Fix it:", "pip install", "'intel-sycl-rt==2025.3.*'"):
        assert text in reason


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        ({"url": "file:///src/my%20pearl", "dir_info": {"editable": True}}, "--editable '/src/my pearl'"),
        ({"url": "file:///src/pearl", "dir_info": {}}, "--force-reinstall /src/pearl"),
        (None, "--no-cache-dir --no-binary pearl-toolkit pearl-toolkit"),
    ],
)
def test_a_pearl_that_was_built_without_sycl_says_how_to_build_it_again(
    installed: Any, monkeypatch: pytest.MonkeyPatch, origin: dict[str, Any] | None, command: str
) -> None:
    installed(RIGHT, built=False)
    distribution = types.SimpleNamespace(read_text=lambda _: origin and json.dumps(origin))
    monkeypatch.setattr(importlib.metadata, "distribution", lambda _: distribution)
    reason = Device("s", "cpu", "sycl").availability().reason
    assert "built before the SYCL runtime was there" in reason
    assert reason.endswith(command)


def test_another_kind_of_machine_is_told_so(installed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    installed({}, built=False)
    monkeypatch.setattr(sycl_runtime.platform, "machine", lambda: "aarch64")
    assert "Linux on x86-64; this is linux on aarch64" in sycl.sycl_availability("cpu").reason


def test_a_sandbox_without_proc_is_told_so(installed: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    installed({name: f"{release}.1" for name, release in sycl_runtime.WHEELS.items()})
    monkeypatch.setattr(sycl_runtime, "_CPU_INFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(sycl_runtime, "_load", lambda: pytest.fail("it would hang"))
    with pytest.raises(DeviceError, match=r"hangs where there is no .*cpuinfo, as in some sandboxes\. Mount /proc"):
        sycl_runtime.sycl_runtime()


def test_a_runtime_that_does_not_load_is_a_reason(
    installed: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    installed(RIGHT)
    monkeypatch.setenv("OCL_ICD_FILENAMES", "")
    broken = tmp_path / "libsycl.so.8"
    broken.write_text("no library")
    monkeypatch.setattr(sycl_runtime, "find_library", lambda _: broken)
    monkeypatch.setattr(sycl_runtime, "_load", sycl_runtime._load.__wrapped__)
    available = sycl.sycl_availability("cpu")
    assert not available.ok
    for text in ("does not load", str(broken), "Fix it:", "pip install"):
        assert text in available.reason


def test_the_versions_that_are_installed_are_those_that_are_checked() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    extra = dict(re.findall(r'^  "([\w-]+)==([\d.]+)\.\*; platform_system', project, re.MULTILINE))
    assert extra == dict(sycl_runtime.WHEELS)
    for name, release in sycl_runtime.WHEELS.items():
        assert re.search(rf"^{name}=={re.escape(release)}\.\d+$", constraints, re.MULTILINE)
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    listed = re.search(r"^SYCL_WHEELS := (.*)$", makefile, re.MULTILINE)
    assert listed is not None
    assert set(listed[1].split()) == set(sycl_runtime.WHEELS)


# --- selectors ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("selector", "kind", "meant"),
    [
        ("opencl:cpu:0", None, "opencl:cpu:0"),
        ("opencl:cpu", "cpu", "opencl:cpu:0"),
        ("cpu", "cpu", "opencl:cpu:0"),
        ("sycl:cpu:1", "cpu", "opencl:cpu:1"),
        ("", "cpu", "opencl:cpu:0"),
        ("", "gpu", "level_zero:gpu:0"),
        ("gpu:1", "gpu", "level_zero:gpu:1"),
        ("opencl:gpu:0", "gpu", "opencl:gpu:0"),
        ("", "fpga", "opencl:accelerator:0"),
        ("sycl:fpga", None, "opencl:accelerator:0"),
        ("opencl:accelerator:1", "fpga", "opencl:accelerator:1"),
        ("fpga_emu", "fpga", "fpga_emu"),
        ("sycl:fpga_emu", None, "fpga_emu"),
    ],
)
def test_selectors(selector: str, kind: Any, meant: str) -> None:
    assert sycl_filter(selector, kind) == meant
    assert sycl_filter(meant, kind) == meant


@pytest.mark.parametrize("selector", ["opencl:cpu:0", "fpga_emu", "gpu:1234", "cuda:gpu:0", "GPU", "gpu:-1", "gpu\n"])
def test_a_selector_that_means_nothing_is_an_error(selector: str) -> None:
    with pytest.raises(
        ConfigurationError, match=r"of kind gpu must be one of .*'level_zero:gpu:0'.*; found "
    ) as caught:
        sycl_filter(selector, "gpu")
    assert repr(selector) in str(caught.value)


# --- devices that are pretended -------------------------------------------------------------------------------------


def pretended(filter_string: str, name: str, *, usm: bool = True) -> Any:
    backend, kind, _ = filter_string.split(":")
    return types.SimpleNamespace(
        filter_string=filter_string,
        backend=types.SimpleNamespace(name=backend),
        device_type=types.SimpleNamespace(name=kind),
        name=name,
        driver_version="1",
        max_compute_units=4,
        max_clock_frequency=0,
        global_mem_size=10**9,
        has_aspect_usm_device_allocations=usm,
    )


class CreationError(Exception):
    pass


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The devices that the runtime finds; a queue can be made of none of them."""
    devices: list[Any] = []

    def no_queue(*_: object, **__: object) -> None:
        raise CreationError("could not be created")

    dpctl = types.SimpleNamespace(get_devices=lambda: devices, SyclQueue=no_queue, SyclQueueCreationError=CreationError)
    runtime = sycl_runtime.SyclRuntime(dpctl, types.SimpleNamespace(), "1", dpctl_was_first=False)
    monkeypatch.setattr(sycl, "sycl_runtime", lambda: runtime)
    monkeypatch.setattr(sycl, "_queue", sycl._queue.__wrapped__)
    return devices


def test_boards_the_emulator_and_gpus_are_told_apart(machine: list[Any]) -> None:
    machine += [
        pretended("opencl:cpu:0", "Xeon"),
        pretended("opencl:gpu:0", "Arc"),
        pretended("level_zero:gpu:0", "Arc"),
        pretended("opencl:accelerator:0", "Agilex 7 board"),
        pretended("opencl:accelerator:1", "Intel(R) FPGA Emulation Device"),
    ]
    found = {device.selector: device for device in sycl.sycl_devices()}
    assert set(found) == {"opencl:cpu:0", "level_zero:gpu:0", "opencl:accelerator:0", "opencl:accelerator:1"}
    assert [found[selector].kind for selector in sorted(found)] == ["gpu", "fpga", "fpga", "cpu"]
    assert sycl.find_sycl_device("fpga_emu").selector == "opencl:accelerator:1"
    assert sycl.find_sycl_device("fpga").name == "Agilex 7 board"
    assert found["opencl:accelerator:1"].described == "FPGA emulator (functional only)"


def test_a_device_that_is_gone_is_an_error_that_lists_those_there_are(machine: list[Any]) -> None:
    machine += [pretended("opencl:cpu:0", "Xeon"), pretended("level_zero:gpu:0", "Arc")]
    assert sycl.sycl_availability("gpu").ok
    machine.pop()
    with pytest.raises(DeviceError, match=r"no SYCL device 'gpu' here; there are opencl:cpu:0 \(Xeon\)\. .*Level Zero"):
        sycl.sycl_queue("gpu")
    with pytest.raises(
        DeviceError, match=r"listed but cannot be used \(could not be created\); there are opencl:cpu:0"
    ):
        sycl.sycl_queue("cpu")
    assert "absent" in sycl.sycl_identity("gpu")
    assert sycl.sycl_identity("cpu") == "Xeon|1|4|1000000000|1"


def test_a_device_without_shared_memory_is_unavailable(machine: list[Any]) -> None:
    machine.append(pretended("opencl:cpu:0", "Portable CPU", usm=False))
    assert "lacks usm_device_allocations" in sycl.sycl_availability("cpu").reason


def test_the_absent_emulator_is_added_by_a_command(
    machine: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PEARL_FPGA_EMULATOR", str(tmp_path))
    for selector in ("fpga_emu", "fpga"):
        assert "pearl devices --setup-fpga-emulator" in sycl.sycl_availability(selector).reason


# --- the runtime that is here ---------------------------------------------------------------------------------------


@pytest.mark.sycl
def test_the_cpu_device_is_found_described_and_measured() -> None:
    devices, links = discover()
    device = next(device for device in devices if device.name == "sycl:cpu0")
    assert device.availability().ok
    assert device.shares_with == "cpu0"
    assert device.cores
    assert device.memory_bandwidth_gbps
    assert device.fingerprint() == Device("other", "cpu", "sycl").fingerprint() != devices[0].fingerprint()
    platform = Platform(tuple(devices), tuple(links))
    assert platform.shared_silicon("cpu0", "sycl:cpu0")
    for pair in (("cpu0", "sycl:cpu0"), ("sycl:cpu0", "cpu0"), ("sycl:cpu0", "sycl:cpu0")):
        assert platform.link(*pair).hops
    assert {("cpu0", "sycl:cpu0"), ("sycl:cpu0", "cpu0")} <= {(link.source, link.target) for link in links}


@pytest.mark.sycl
def test_a_device_has_one_queue_whatever_it_is_called() -> None:
    queue = sycl.sycl_queue("opencl:cpu:0")
    assert queue is sycl.sycl_queue("sycl:cpu") is sycl.sycl_queue("cpu")
    before = queue.launches
    queue.launch_times_us(3, 1)
    assert queue.launches == before + 2 * 3, "a run to warm up and one that is timed"


@pytest.mark.sycl
def test_a_kernel_that_does_not_compile_shows_its_log_and_is_tried_again() -> None:
    queue = sycl.sycl_queue("cpu")
    for _ in range(2):
        with pytest.raises(DeviceError, match=r"(?s)kernels of wrong\.cpp do not compile for .*undeclared_thing"):
            queue.compile("wrong.cpp", "int x = undeclared_thing;", [])


@pytest.mark.sycl
def test_a_log_of_thousands_of_lines_is_cut() -> None:
    candidates = "\n".join(f"struct T{n} {{}}; void f(T{n}, T{n});" for n in range(300))
    text = candidates + "\nvoid g() { f(1, 2); }"
    with pytest.raises(DeviceError, match=r"\.\.\. and \d{3,} more lines$") as caught:
        sycl.sycl_queue("cpu").compile("wrong.cpp", text, [])
    lines = str(caught.value).splitlines()
    assert len(lines) == 62
    assert any("error: no matching function" in line for line in lines)


def compile_all(source: Path, selector: str, **macros: int) -> None:
    text = source.read_text(encoding="utf-8")
    text = "".join(f"#define {name} {value}\n" for name, value in macros.items()) + text
    included = [ROOT / "kernels" / "include" / name for name in re.findall(r'#include "(\S+)"', text)]
    entries = text + "".join(path.read_text(encoding="utf-8") for path in included)
    if macros.get("PEARL_RULE", 0) != 0:  # the tape's kernels have no rule: they come with the first
        entries = re.sub(r"#if PEARL_HAS_TAPE.*#endif  // PEARL_HAS_TAPE", "", entries, flags=re.DOTALL)
    kernels = re.findall(r"PEARL_KERNEL\s+(pearl_\w+)\(", entries)
    assert kernels, f"no kernel was found in {source.name}"
    sycl.sycl_queue(selector).compile(source.name, text, kernels)


@pytest.mark.sycl
@pytest.mark.parametrize("source", KERNELS, ids=lambda path: path.name)
def test_kernels_compile_for_the_cpu(source: Path) -> None:
    compile_all(source, "cpu")


@pytest.mark.fpga
@pytest.mark.parametrize("source", KERNELS, ids=lambda path: path.name)
def test_kernels_compile_for_the_emulator(source: Path) -> None:
    compile_all(source, "fpga_emu")


LEARNER_VARIANTS = pytest.mark.parametrize(
    "macros", [{"PEARL_RULE": rule, "PEARL_SLICED": sliced} for rule in range(5) for sliced in (0, 1)], ids=str
)
LEARNER = ROOT / "kernels" / "sycl" / "learner.sycl.cpp"


@pytest.mark.sycl
@pytest.mark.slow
@LEARNER_VARIANTS
def test_the_learner_compiles_for_the_cpu_in_every_variant(macros: dict[str, int]) -> None:
    compile_all(LEARNER, "cpu", **macros)


@pytest.mark.fpga
@pytest.mark.slow
@LEARNER_VARIANTS
def test_the_learner_compiles_for_the_emulator_in_every_variant(macros: dict[str, int]) -> None:
    compile_all(LEARNER, "fpga_emu", **macros)


@pytest.mark.fpga
def test_the_emulator_is_an_fpga_that_is_called_one() -> None:
    device = sycl.describe_sycl("fpga_emu", "f", measure=True)
    assert (device.kind, device.selector, device.memory_bandwidth_gbps) == ("fpga", "fpga_emu", None)
    assert sycl.find_sycl_device("fpga_emu").described == "FPGA emulator (functional only)"
    assert len(sycl.sycl_queue("fpga_emu").launch_times_us(2, 3)) == 3


DOUBLE_ATOMICS = """#include <sycl/sycl.hpp>
namespace experimental = sycl::ext::oneapi::experimental;
extern "C" SYCL_EXT_ONEAPI_FUNCTION_PROPERTY((experimental::nd_range_kernel<2>)) void pearl_add(double* x) {
  sycl::atomic_ref<double, sycl::memory_order::relaxed, sycl::memory_scope::device>(*x) += 1.0;
}
"""


@pytest.mark.fpga
def test_a_kernel_that_a_device_cannot_run_is_named() -> None:
    with pytest.raises(DeviceError, match=r"kernel pearl_add of add\.cpp cannot run on .*FPGA Emulation Device"):
        sycl.sycl_queue("fpga_emu").compile("add.cpp", DOUBLE_ATOMICS, ["pearl_add"])
    sycl.sycl_queue("cpu").compile("add.cpp", DOUBLE_ATOMICS, ["pearl_add"])


SHOW = (
    "import os, warnings; warnings.simplefilter('error')\n"
    "from pearl.backends.sycl import device as sycl, runtime as sycl_runtime\n"
    "{before}\n"
    "sycl.sycl_queue('cpu').launch_times_us(1, 1)\n"
    "print(os.environ['OCL_ICD_FILENAMES'], os.environ.get('SYCL_CACHE_DIR'), os.environ['SYCL_CACHE_PERSISTENT'])\n"
)


@pytest.mark.sycl
def test_drivers_that_the_user_named_stay_first(tmp_path: Path) -> None:
    mine = tmp_path / "libmine.so"
    drivers = run_python(SHOW.format(before=""), OCL_ICD_FILENAMES=mine).split()[0].split(":")
    assert drivers[0] == str(mine)
    assert Path(drivers[1]).name == "libintelocl.so"
    again = run_python(SHOW.format(before=""), OCL_ICD_FILENAMES=":".join(drivers)).split()[0].split(":")
    assert again == drivers, "a process of a process adds nothing"


@pytest.mark.sycl
def test_a_device_that_the_user_hid_is_told_so() -> None:
    code = "from pearl.backends.sycl import device as sycl; print(sycl.sycl_availability('cpu').reason)"
    reason = run_python(code, ONEAPI_DEVICE_SELECTOR="level_zero:*")
    assert "There is no SYCL device 'cpu' here; the runtime finds none." in reason
    assert "ONEAPI_DEVICE_SELECTOR=level_zero:* hides all others: unset it" in reason


@pytest.mark.sycl
def test_memory_beyond_the_limit_is_refused_with_both_numbers() -> None:
    queue = sycl.sycl_queue("cpu")
    with pytest.raises(DeviceError, match=r"4000 GB of shared memory on .* at most [\d.]+ GB in one piece\. Lower"):
        queue.shared_floats(10**12)
    assert len(queue.shared_floats(10)) == 10


@pytest.mark.slow
@pytest.mark.sycl
def test_what_is_compiled_is_kept_apart_by_version_and_source(tmp_path: Path) -> None:
    another_version = "sycl_runtime.installed_wheels = lambda: dict(dpctl='0.21.9')"
    folders = []
    for before in ("", "", another_version):
        folder = Path(run_python(SHOW.format(before=before), PEARL_CACHE_DIR=tmp_path, SYCL_CACHE_DIR="").split()[1])
        assert folder.parent == tmp_path / "sycl"
        assert any(path.is_file() for path in folder.rglob("*")), "what was compiled is on the disk"
        folders.append(folder)
    assert folders[0] == folders[1] != folders[2]
    own = Path(run_python(SHOW.format(before=""), SYCL_CACHE_DIR=tmp_path / "own").split()[1])
    assert own == tmp_path / "own" / folders[0].name
    assert Path(run_python(SHOW.format(before=""), SYCL_CACHE_DIR=own).split()[1]) == own


@pytest.mark.parametrize("setting", ["PEARL_CACHE_DIR", "SYCL_CACHE_DIR"])
def test_a_cache_that_cannot_be_made_names_the_setting_that_chose_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, setting: str
) -> None:
    (tmp_path / "file").touch()
    assert not keeps_kernels(tmp_path / "file" / "sycl", setting)
    assert f"Set {setting} to a writable folder." in caplog.text


@pytest.mark.sycl
def test_native_code_is_not_taken_from_a_folder_that_others_may_write_to(tmp_path: Path) -> None:
    folder = Path(run_python(SHOW.format(before="import os; os.umask(0)"), SYCL_CACHE_DIR=tmp_path / "own").split()[1])
    assert [stat.S_IMODE(path.stat().st_mode) for path in (folder, folder.parent)] == [0o700, 0o700]
    code = "from pearl.backends.sycl import device as sycl; print(sycl.sycl_availability('cpu').reason)"
    assert "Native code" not in run_python(code, SYCL_CACHE_DIR=tmp_path / "own")
    folder.chmod(0o777)
    shown = run_python(code, SYCL_CACHE_DIR=tmp_path / "own")
    for text in (str(folder), "0777", "chmod -R go-w", "SYCL_CACHE_DIR"):
        assert text in shown
    if os.geteuid() == 0:
        folder.chmod(0o700)
        os.chown(folder, 12345, -1)
        assert "belongs to user 12345" in run_python(code, SYCL_CACHE_DIR=tmp_path / "own")


LOOPS = """#include "pearl/device/sycl.hpp"
namespace experimental = sycl::ext::oneapi::experimental;
extern "C" SYCL_EXT_ONEAPI_FUNCTION_PROPERTY((experimental::nd_range_kernel<2>)) void pearl_loops(float* x, int n) {
  for (int i = 0; i < n; ++i)
    for (int j = i; j < n; ++j)
      if (x[j] > x[i]) x[i] += x[j];
}
"""


@pytest.mark.sycl
def test_what_one_process_has_compiled_the_next_one_need_not(tmp_path: Path) -> None:
    compiled = f"sycl.sycl_queue('cpu').compile('loops.cpp', {LOOPS!r}, ['pearl_loops'])"
    code = f"from pearl.backends.sycl import device as sycl; {compiled}"
    kept = []
    for _ in range(2):
        run_python(code, SYCL_CACHE_DIR=tmp_path)
        kept.append(set(tmp_path.rglob("*.bin")))
    assert len(kept[0]) == 2, "what the runtime's compiler made of it, and what the device's made of that"
    assert kept[0] == kept[1]


@pytest.mark.sycl
def test_a_cache_folder_that_cannot_be_made_costs_time_only(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    shown = run_python(SHOW.format(before=""), PEARL_CACHE_DIR=tmp_path / "file", SYCL_CACHE_DIR="")
    assert shown.split()[-1] == "0"


@pytest.mark.sycl
def test_dpctl_may_come_first_but_not_ask_for_devices_first() -> None:
    run_python(SHOW.format(before="import dpctl"), OCL_ICD_FILENAMES="")
    code = "import dpctl; dpctl.get_devices()\nfrom pearl.backends.sycl import device\n"
    code += "print(device.sycl_availability('cpu'))"
    shown = run_python(code, OCL_ICD_FILENAMES="")
    assert "ok=True" in shown or "dpctl was asked for devices before PEARL" in shown


@pytest.mark.sycl
def test_arithmetic_of_the_process_stays_what_it_is() -> None:
    """The runtime brings a libm of its own, which must not come before the system's. In one thread: in several, torch's
    own exp differs in its last bits from run to run.
    """
    code = (
        "{before}\n"
        "import hashlib, math, numpy, torch\n"
        "x = numpy.linspace(-5, 5, 10_001)\n"
        "parts = [torch.exp(torch.from_numpy(x)).numpy(), numpy.tanh(x), numpy.array([math.exp(v) for v in x])]\n"
        "print(hashlib.sha256(b''.join(part.tobytes() for part in parts)).hexdigest())"
    )
    loaded = "from pearl.backends.sycl import device as sycl; sycl.sycl_queue('cpu').launch_times_us(1, 1)"
    with_runtime, without = (run_python(code.format(before=line), OMP_NUM_THREADS="1") for line in (loaded, ""))
    assert with_runtime == without
