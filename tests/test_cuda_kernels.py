"""CUDA's kernels without a GPU: compiled by nvcc and by NVRTC, and run on the host by the emulator.

`pytest tests/test_cuda_kernels.py --accept-golden` records what kernels use of the hardware anew.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pearl import _cuda
from pearl.backends.cuda import runtime
from pearl.backends.cuda.device import _built_without_cuda
from pearl.backends.cuda.replay import CudaReplayManager
from pearl.backends.cuda.storage import CudaDataStorage
from pearl.errors import DeviceError, PriorityError, ReplayError
from pearl.replay.reference import ReferenceReplayManager
from pearl.spec import FieldSpec, TransitionSpec

KERNELS = Path(__file__).resolve().parents[1] / "kernels"
RESOURCES = KERNELS / "cuda" / "resources.json"
ARCHITECTURES = ("80", "90")
LEARNER = [["-DPEARL_SLICED=1", f"-DPEARL_RULE={rule}"] for rule in range(5)]
SOURCES: list[tuple[str, list[str]]] = [
    *((stem, []) for stem in ("column_store", "control", "gae", "probe", "sum_tree_replay")),
    *(("learner", options) for options in LEARNER),
]
IDS = [" ".join([stem, *options]).replace("-DPEARL_", "") for stem, options in SOURCES]
each_source = pytest.mark.parametrize(("stem", "options"), SOURCES, ids=IDS)
ORDERS = [("ascending", 0), ("descending", 0), ("shuffled", 1), ("shuffled", 2)]
USED = re.compile(
    r"Compiling entry function '(?P<name>\w+)'.*\n.*Function properties.*\n"
    r"\s+(?P<stack_bytes>\d+) bytes stack frame, (?P<spilled_bytes>\d+) bytes spill stores.*\n"
    r".*Used (?P<registers>\d+) registers(?:.*?(?P<shared_bytes>\d+) bytes smem)?"
)


# --- the driver -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fake_driver(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of processes that find fixtures/cuda_driver.c as NVIDIA's driver, and as NVRTC at $FAKE."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    folder = tmp_path_factory.mktemp("driver")
    library = folder / "libcuda.so.1"
    source = Path(__file__).parent / "fixtures" / "cuda_driver.c"
    subprocess.run([compiler, "-shared", "-fPIC", source, "-o", library], check=True, timeout=60)
    paths = os.pathsep.join(filter(None, [str(folder), os.environ.get("LD_LIBRARY_PATH")]))
    own = {"LD_LIBRARY_PATH": paths, "FAKE": str(library), "PEARL_TEST_CUDA": "cuda:0", "PEARL_CACHE_DIR": str(folder)}
    return {**os.environ, **own}


def on_fake_driver(program: str, environment: dict[str, str]) -> list[str]:
    """The lines that a program prints with that driver, which must find nothing to refuse."""
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command, env=environment, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "refused: " not in done.stderr
    return done.stdout.splitlines()


def test_memory_that_is_refused_is_named_with_the_side_that_lacks_it(fake_driver: dict[str, str]) -> None:
    program = """
import ctypes
from pearl import _cuda
from pearl.errors import DeviceError
queue, driver = _cuda.Queue(0, "", ""), ctypes.CDLL("libcuda.so.1")
pinned = lambda count: queue.copy_times_us(4 * count, True, 1, True)
for kind, make in enumerate((queue.device_floats, queue.shared_floats, pinned), 1):
    driver.fake_refuse(kind)
    try:
        make(250_000_000)
    except DeviceError as error:
        print(error)
print(driver.fake_contexts())
"""
    device, shared, pinned, entered = on_fake_driver(program, fake_driver)
    assert device.startswith("1.00 GB of memory on Fake (cuda:0) were requested; 79.0 GB of 80.0 GB are free.")
    assert shared.startswith("1.00 GB of shared memory on Fake (cuda:0) were requested; 79.0 GB of 80.0 GB are free.")
    assert pinned.startswith("1.00 GB of pinned host memory for Fake (cuda:0) were requested, which the host refuses:")
    assert entered == "0", "contexts that were entered have not been left"


@pytest.mark.skipif(not _built_without_cuda(), reason="torch would take the fake driver for NVIDIA's")
def test_a_gpus_driver_is_asked_for_nothing_that_it_refuses_and_gets_all_memory_back(
    fake_driver: dict[str, str],
) -> None:
    program = """
import ctypes, gc, os
from pathlib import Path
import pearl.backends.cuda.runtime, pearl.backends.cuda.storage
pearl.backends.cuda.runtime.find_nvrtc = lambda: Path(os.environ["FAKE"])
pearl.backends.cuda.storage._device_free = lambda place: 10**9
from test_device_loop import PLACES, OnDevice
from test_native_loop import Soft
OnDevice.place = PLACES["cuda"]
setup = OnDevice(Soft)
for iterations in (1, 1, 7, 7, 7):
    setup.run(iterations)
    with setup.loop.insertion_window():
        setup.replay.insert(setup.storage.insert({name: rows[200:240] for name, rows in setup.rows.items()}))
setup.replay.update([1, 2], [1.0, 2.0])
setup.storage.kernel.gather_there(setup.replay.sample(10).indices)
driver = ctypes.CDLL("libcuda.so.1")
print(driver.fake_recorded() > 0)
setup.replay.close()
setup.storage.close()
del setup
gc.collect()
print(driver.fake_blocks(), driver.fake_streams(), driver.fake_contexts())
"""
    assert on_fake_driver(program, fake_driver) == ["True", "0 1 0"]


# --- compilers --------------------------------------------------------------------------------------------------------


def find_nvcc() -> tuple[Path, list[str]] | None:
    """Nvcc, of PyPI's wheel or of a toolkit, and its options."""
    try:
        files = importlib.metadata.files("nvidia-cuda-nvcc") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == "nvcc":
            return Path(str(file.locate())).resolve(), []
    found = shutil.which("nvcc")
    return (Path(found), []) if found else None


NVCC = find_nvcc()
NVRTC = runtime.find_nvrtc()
needs_nvcc = pytest.mark.skipif(NVCC is None, reason="nvcc is not installed: `make cuda`")
needs_nvrtc = pytest.mark.skipif(NVRTC is None, reason="NVRTC is not installed: `make cuda`")


def nvcc(stem: str, options: list[str], architecture: str, out: Path) -> str:
    """What ptxas says of the kernels."""
    assert NVCC is not None
    # A host function called from a kernel is a warning by default, and computes nonsense.
    command = [
        NVCC[0], "--cubin", f"-arch=sm_{architecture}", "-std=c++20", "--fmad=false", "--expt-relaxed-constexpr",
        "-Xptxas", "-v", "--Werror", "cross-execution-space-call", "-Werror", "all-warnings", "-I", KERNELS / "include",
        *options, "-o", out, KERNELS / "cuda" / f"{stem}.cu",
    ]  # fmt: skip
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@needs_nvcc
@pytest.mark.parametrize(
    ("stem", "options"),
    # NVRTC, which users run, compiles all of them in less time.
    [pytest.param(*source, marks=pytest.mark.slow if source[1] in LEARNER[1:] else ()) for source in SOURCES],
    ids=IDS,
)
def test_nvcc_compiles_each_kernel_within_its_recorded_resources(
    stem: str, options: list[str], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    recorded: dict[str, Any] = json.loads(RESOURCES.read_text()) if RESOURCES.exists() else {}
    for architecture in ARCHITECTURES:
        said = nvcc(stem, options, architecture, tmp_path / "kernels.cubin")
        found = {}
        for match in USED.finditer(said):
            uses = match.groupdict(default="0")
            name = uses.pop("name")
            found[name] = {what: int(amount) for what, amount in uses.items()}
        assert len(found) == said.count("Compiling entry function"), said
        key = " ".join([f"sm_{architecture}", stem, *options])
        if request.config.getoption("--accept-golden"):
            recorded[key] = found
            RESOURCES.write_text(json.dumps(recorded, indent=1, sort_keys=True) + "\n")
            continue
        assert found.keys() == recorded[key].keys()
        for name, uses in found.items():
            more = {what: amount for what, amount in uses.items() if amount > recorded[key][name][what]}
            assert not more, f"{name} of {key} uses more than recorded: {more}, recorded {recorded[key][name]}"


@needs_nvcc
def test_a_host_function_called_from_a_kernel_is_an_error(tmp_path: Path) -> None:
    source = tmp_path / "wrong.cu"
    source.write_text('inline int host() { return 1; }\nextern "C" __global__ void kernel(int* x) { *x = host(); }\n')
    with pytest.raises(AssertionError, match="host"):
        nvcc(str(source.with_suffix("")), [], "80", tmp_path / "wrong.cubin")


@needs_nvrtc
@each_source
def test_nvrtc_compiles_each_source_without_a_standard_library(stem: str, options: list[str]) -> None:
    # What depends on the architecture is nvcc's to compile, too; but 7.5, which has no asynchronous copies.
    for architecture in ("75", "90") if options == LEARNER[0] else ("90",):
        major, minor = int(architecture[0]), int(architecture[1])
        binary = _cuda.binary(stem, major, minor, options, str(NVRTC))
        assert binary[:4] == b"\x7fELF"


@needs_nvrtc
def test_nvrtc_names_a_device_that_it_does_not_know() -> None:
    with pytest.raises(DeviceError, match=r"probe.cu.*compute capability 1\.0"):
        _cuda.binary("probe", 1, 0, [], str(NVRTC))


def test_a_missing_nvrtc_says_what_to_install() -> None:
    with pytest.raises(DeviceError, match=r"NVRTC.*cannot be loaded from /none.*pip install nvidia-cuda-nvrtc"):
        _cuda.binary("probe", 8, 0, [], "/none")
    with pytest.raises(DeviceError, match="pip install"):
        _cuda.compiler_version("")


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="there may be a GPU")
def test_without_a_driver_a_queue_says_so() -> None:
    with pytest.raises(DeviceError, match="NVIDIA's driver"):
        _cuda.Queue(0, str(NVRTC or ""), "")


# --- the emulator -----------------------------------------------------------------------------------------------------


@pytest.fixture(params=ORDERS, ids=[f"{order}{seed or ''}" for order, seed in ORDERS])
def emulator(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[_cuda.EmulatedQueue]:
    """A queue with another order of threads, which everything on the emulator uses."""
    order, seed = request.param
    queue = _cuda.EmulatedQueue(64, order, seed)
    monkeypatch.setattr(runtime, "_queue", lambda device: queue)
    return queue


@pytest.mark.parametrize("fanout", [2, 16, 256])
@pytest.mark.parametrize("capacity", [1, 7, 33, 1000])
def test_any_order_of_threads_gives_what_the_reference_gives(
    emulator: _cuda.EmulatedQueue, capacity: int, fanout: int
) -> None:
    options: dict[str, Any] = {"fanout": fanout, "alpha": 0.7, "seed": 3}
    replay = CudaReplayManager(capacity, device=runtime.EMULATOR, **options)
    reference = ReferenceReplayManager(capacity, **options)
    rng = np.random.default_rng(capacity * fanout)
    for each in (replay, reference):
        each.insert(np.arange(capacity))
    for batch in (1, 5, 64, 65, 200):
        found, expected = replay.sample(batch), reference.sample(batch)
        for ours, theirs in zip(found, expected, strict=True):
            np.testing.assert_array_equal(ours, theirs)
        slots = rng.integers(0, capacity, batch)  # with duplicates: the last wins
        values = rng.exponential(30, batch).astype(np.float32)
        assert replay.update(slots, values) == reference.update(slots, values)
        np.testing.assert_array_equal(replay.retrieve(slots), reference.retrieve(slots))
        assert replay.total == reference.total
    state, theirs = replay.state_dict(), reference.state_dict()
    for name, value in theirs.items():
        np.testing.assert_array_equal(state[name], value, err_msg=name)


def test_calls_that_return_at_once_take_effect_in_their_order(emulator: _cuda.EmulatedQueue) -> None:
    replay = CudaReplayManager(100, device=runtime.EMULATOR)
    reference = ReferenceReplayManager(100)
    rng = np.random.default_rng(1)
    for _ in range(5):
        inserted = rng.integers(0, 100, 30)
        for each in (replay, reference):
            each.insert(inserted)
        sampled = reference.sample(20)
        np.testing.assert_array_equal(replay.sample(20).indices, sampled.indices)
        for _ in range(3):
            new = rng.integers(0, 100, 5)
            values = rng.exponential(1, 20).astype(np.float32)
            applied = {each.update(sampled.indices, values, sampled.generations) for each in (replay, reference)}
            assert len(applied) == 1, "some are stale"
            for each in (replay, reference):
                each.insert(new, values[:5])
    state, theirs = replay.state_dict(), reference.state_dict()
    for name, value in theirs.items():
        np.testing.assert_array_equal(state[name], value, err_msg=name)


def test_rows_that_are_still_on_their_way_are_not_overwritten(emulator: _cuda.EmulatedQueue) -> None:
    spec = TransitionSpec((FieldSpec("obs", (3,), "float32"), FieldSpec("reward", (), "float32")))
    storage = CudaDataStorage(spec, 50, runtime.EMULATOR)
    rng = np.random.default_rng(1)
    kept = {name: np.zeros((50, *shape), np.float32) for name, shape in (("obs", (3,)), ("reward", ()))}
    for start in range(0, 100, 20):
        rows = {name: rng.random((20, *values.shape[1:]), np.float32) for name, values in kept.items()}
        storage.insert(rows)
        for name, values in rows.items():
            kept[name][np.arange(start, start + 20) % 50] = values
    found = storage.gather(np.arange(50))
    for name, values in kept.items():
        np.testing.assert_array_equal(found[name], values)


def test_a_refused_update_changes_nothing(emulator: _cuda.EmulatedQueue) -> None:
    replay = CudaReplayManager(100, device=runtime.EMULATOR)
    replay.insert(np.arange(50), np.linspace(1, 2, 50))
    before = replay.state_dict()
    with pytest.raises(PriorityError, match="position 2"):
        replay.update([0, 1, 2], [1.0, 2.0, np.nan])
    with pytest.raises(ReplayError, match="never inserted"):
        replay.update([0, 70], [1.0, 2.0])
    for name, value in replay.state_dict().items():
        np.testing.assert_array_equal(value, before[name], err_msg=name)

    # What the host has not seen is refused by the kernel.
    replay.kernel.prepare_iteration(8, 0.4)
    replay.kernel.launch_draw()
    last = replay.kernel.read_batch()[0][-1]
    before, wrong = replay.state_dict(), replay.queue.shared_floats(8)
    wrong[:] = [1, 2, 3, 1e9, np.nan, 4, -1, 5]
    replay.kernel.launch_update(wrong)
    with pytest.raises(PriorityError, match="at position 4 of a batch on the device"):
        replay.kernel.check()
    for name, value in replay.state_dict().items():
        np.testing.assert_array_equal(value, before[name], err_msg=name)
    assert replay.update([last], [9.0]) == 1, "the refused one had this slot at another position"
    assert replay.retrieve([last]) == [9.0]


RACES = [
    ("pearl_reverse", "without_barrier"),
    ("pearl_reverse_by_copies", "waiting_late"),
    ("pearl_swap", "without_waiting"),
    ("pearl_count", "without_barrier"),
    ("pearl_change_bytes", "without_waiting"),
]


@pytest.mark.skipif(not _cuda.FINDS_RACES, reason="this emulator does not find races: `make races`")
@pytest.mark.parametrize(("order", "seed"), ORDERS)
def test_races_are_errors_in_every_order_of_threads(order: str, seed: int) -> None:
    queue = _cuda.EmulatedQueue(64, order, seed)
    for kernel, mistake in RACES:
        queue.control(kernel)
        with pytest.raises(
            DeviceError, match=r"A race: .* by thread \d+ of block 0 .* and .* by thread \d+ of block 0"
        ):
            queue.control(f"{kernel}_{mistake}")
    with pytest.raises(DeviceError, match=r"written by thread \d+ .* and written by thread \d+"):
        queue.control("pearl_same_value")
    with pytest.raises(DeviceError, match=r"A race: .* of block (\d+) .* of block (?!\1 )\d+"):
        queue.control("pearl_chain_of_blocks", 64)


@pytest.mark.parametrize(
    ("kernel", "mistake"),
    RACES[:2],
)
@pytest.mark.skipif(_cuda.FINDS_RACES, reason="then it is an error")
def test_some_order_of_threads_shows_what_is_not_waited_for(kernel: str, mistake: str) -> None:
    """The control: kernels whose threads read their neighbours' values, which may not be there yet."""
    right = list(range(63, -1, -1))
    queues = [_cuda.EmulatedQueue(64, order, seed) for order, seed in ORDERS]
    assert all(queue.control(kernel) == right for queue in queues)
    assert any(queue.control(f"{kernel}_{mistake}") != right for queue in queues)


@pytest.mark.skipif(_cuda.FINDS_RACES, reason="then it is an error")
def test_some_order_shows_blocks_that_rely_on_others_and_memory_that_was_not_written() -> None:
    for kernel, blocks in (("pearl_chain_of_blocks", 64), ("pearl_unwritten_memory", 1)):
        found = {tuple(_cuda.EmulatedQueue(64, order, seed).control(kernel, blocks)) for order, seed in ORDERS}
        assert len(found) > 1


@pytest.mark.parametrize(
    ("kernel", "said"),
    [
        ("pearl_half_a_barrier", r"wait for each other forever.*32 are at a barrier and 32 have ended"),
        ("pearl_two_barriers", r"wait at different barriers: in lines \d+ and \d+"),
    ],
)
def test_a_barrier_that_not_all_threads_reach_is_an_error(kernel: str, said: str) -> None:
    with pytest.raises(DeviceError, match=said):
        _cuda.EmulatedQueue().control(kernel)


@pytest.mark.parametrize(
    ("kernel", "said"),
    [
        ("pearl_copy_beyond", "4 bytes goes beyond the block's memory"),
        ("pearl_copy_unaligned", "16 bytes is not aligned"),
        ("pearl_copy_at_the_end", "ended before its copies"),
    ],
)
def test_wrong_copies_to_a_blocks_memory_are_errors(kernel: str, said: str) -> None:
    with pytest.raises(DeviceError, match=said):
        _cuda.EmulatedQueue(64, "descending").control(kernel)


@pytest.mark.parametrize(
    ("kernel", "said"),
    [
        ("pearl_reverse_by_blocks_that_do_not_meet", "before the cluster's blocks have waited for each other"),
        ("pearl_reverse_by_blocks_that_leave", "the memory of another one that has ended"),
    ],
)
def test_another_blocks_memory_is_used_only_while_that_block_runs(kernel: str, said: str) -> None:
    for order, seed in ORDERS:
        assert _cuda.EmulatedQueue(64, order, seed).control("pearl_reverse_by_blocks", 1, 2) == list(range(63, -1, -1))
    with pytest.raises(DeviceError, match=said):
        _cuda.EmulatedQueue().control(kernel, 1, 2)


def test_arguments_that_do_not_fit_the_kernel_are_an_error() -> None:
    with pytest.raises(DeviceError, match="do not fit the kernel's parameters"):
        _cuda.EmulatedQueue().control("pearl_two_arguments")


REFUSED_MEMORY = """
import resource
from pathlib import Path
import numpy as np
from pearl.backends.cuda.gae import CudaGae
from pearl.backends.cuda.replay import CudaReplayManager
from pearl.errors import DeviceError

MB = 1 << 20

def refused(room, work):  # some of the memory that `work` takes fits the room, and more does not
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + room, before[1]))
    try:
        work()
    except DeviceError:
        return
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    raise SystemExit("the memory sufficed")

gae = CudaGae(0.99, 0.95, "cuda:emulator")
rewards, values = (np.ones((32_768, 64), np.float32) for _ in range(2))
last, ends = np.ones(64, np.float32), np.zeros(rewards.shape, np.uint8)
estimate = lambda: gae.estimate(rewards, values, last, ends)
refused(28 * MB, estimate)  # 18 MB twice
estimate()
assert (rewards > 0.9).all()

replay = CudaReplayManager(10, device="cuda:emulator")
replay.insert(np.arange(10))
slots = np.zeros(2 * MB, np.int64)
refused(28 * MB, lambda: replay.retrieve(slots))  # 8 MB for the results, 16 MB for slots, and twice 8 MB
assert (replay.retrieve(slots) == 1).all()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_what_was_refused_some_of_its_memory_can_be_called_again() -> None:
    command = [sys.executable, "-c", REFUSED_MEMORY]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, (done.returncode, done.stderr)


# --- compiled kernels on disk -----------------------------------------------------------------------------------------


def test_a_folder_that_others_can_write_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "cuda"
    folder.mkdir(mode=0o700)
    (folder / "x.cubin").write_bytes(b"")
    folder.chmod(0o777)
    monkeypatch.setenv("PEARL_CACHE_DIR", str(tmp_path))
    with pytest.raises(DeviceError, match="may be written to by other users"):
        runtime._kept_kernels()


def test_without_a_folder_nothing_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PEARL_CACHE_DIR", str(tmp_path / "file"))
    assert runtime._kept_kernels() == ""
    assert "Set PEARL_CACHE_DIR" in caplog.text


def test_nvrtc_is_searched_in_a_toolkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / "lib64" / "libnvrtc.so.99"
    library.parent.mkdir()
    library.write_bytes(b"")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(runtime, "_torch_release", lambda: 99)
    assert os.fspath(runtime.find_nvrtc() or "") == os.fspath(library)


# --- the check on a GPU -----------------------------------------------------------------------------------------------


def test_the_benchmark_runs_on_the_emulator() -> None:
    command = [sys.executable, "-m", "benchmarks.cuda", "--quick", "--device", runtime.EMULATOR]
    done = subprocess.run(command, cwd=KERNELS.parent, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith("iteration DQN 64x64 B=32")]


def test_the_check_brings_all_that_pearl_and_its_tests_need(monkeypatch: pytest.MonkeyPatch) -> None:
    tomllib = pytest.importorskip("tomllib", reason="reading pyproject.toml needs Python 3.11")
    monkeypatch.syspath_prepend(str(KERNELS.parent))
    from benchmarks import gpu_check

    project = tomllib.loads((KERNELS.parent / "pyproject.toml").read_text())
    needed = {*project["project"]["dependencies"], *project["project"]["optional-dependencies"]["test"]}
    needed |= {*project["build-system"]["requires"]}
    # Torch is the machine's; tomli is for Python 3.10, where pytest brings it.
    assert {each for each in needed - {*gpu_check.PACKAGES} if not each.startswith(("torch", "tomli"))} == set()


def test_the_check_downloads_to_the_folder_that_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(KERNELS.parent))
    from benchmarks import gpu_check

    ran: list[tuple[object, ...]] = []
    monkeypatch.setattr(gpu_check, "run", lambda *words, **_: ran.append(words))
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--download", "wheels"])
    monkeypatch.chdir(tmp_path)  # commands run in another one
    gpu_check.main()
    (words,) = ran
    assert words[words.index("--dest") + 1] == tmp_path / "wheels"


def test_the_check_finds_compute_sanitizer_in_a_toolkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(KERNELS.parent))
    from benchmarks import gpu_check

    tool = tmp_path / "bin" / "compute-sanitizer"
    tool.parent.mkdir()
    tool.touch(mode=0o755)
    ran: list[tuple[object, ...]] = []
    monkeypatch.setattr(gpu_check, "run", lambda *words, **_: ran.append(words))
    found = "Invalid __global__ write of size 4 bytes at pearl_write_out_of_bounds"
    monkeypatch.setattr(gpu_check, "ended", lambda *_: (found, 9))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    gpu_check.sanitizer(None, 60)
    assert {words[0] for words in ran} == {str(tool)}


def test_the_check_builds_nothing_where_torch_finds_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(KERNELS.parent))
    from benchmarks import gpu_check

    ran: list[object] = []
    monkeypatch.setattr(gpu_check, "run", lambda *words, **_: ran.append(words))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(SystemExit, match=r"torch \S+ finds no CUDA device"):
        gpu_check.build(None, 60)
    assert not ran


class Words(dict[str, bool]):
    """Which words are in a test's name, as `pytest -k` looks for them."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name.lower()

    def __missing__(self, word: str) -> bool:
        return word.lower() in self._name


def test_the_check_runs_all_tests_of_the_learners_blocks_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(KERNELS.parent))
    from benchmarks import gpu_check

    file = "test_device_learner.py"
    assert f"tests/{file}" in gpu_check.TESTS
    named = re.findall(r"^def (test_\w+)", (Path(__file__).parent / file).read_text(), re.MULTILINE)
    assert "test_passes_side_by_side_are_those_one_after_the_other" in named
    left_out = {name for name in named if not eval(gpu_check.CHOSEN, {}, Words(f"{file} {name}"))}
    assert not left_out


@pytest.mark.parametrize("changed", ["kernels/cuda/std/array", "runtime_templates/page.j2", "CMakeLists.txt"])
def test_the_check_sees_changes_of_all_that_is_built(
    changed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(KERNELS.parent))
    from benchmarks import gpu_check

    for name in ("CMakeLists.txt", changed):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("before")
    monkeypatch.setattr(gpu_check, "ROOT", tmp_path)
    before = gpu_check.sources_hash()
    (tmp_path / changed).write_text("after")
    assert gpu_check.sources_hash() != before


def test_a_part_of_the_check_that_has_passed_is_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(KERNELS.parent))
    from benchmarks import gpu_check

    ran: list[str] = []

    def fails(*_: object) -> None:
        raise SystemExit("no GPU")

    monkeypatch.setattr(gpu_check, "STATE", tmp_path / "state.json")
    monkeypatch.setattr(gpu_check, "PARTS", {"build": lambda *_: ran.append("build"), "tests": fails})
    for _ in range(2):
        monkeypatch.setattr(sys, "argv", ["gpu_check"])
        with pytest.raises(SystemExit, match="no GPU"):
            gpu_check.main()
    assert ran == ["build"]
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--part", "build", "--again"])
    gpu_check.main()
    assert ran == ["build", "build"]
    monkeypatch.setattr(gpu_check, "sources_hash", lambda: "changed")
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--part", "build"])
    gpu_check.main()
    assert ran == ["build", "build", "build"]
