"""The Replay Manager as autorun kernels on the FPGA emulator.

Idle stages keep the cores busy: tests that make managers of their own come first.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pearl.backends.cpu.replay import NativeReplayManager
from pearl.backends.fpga.replay import FpgaReplayManager
from pearl.errors import CapacityError, ConfigurationError, DeviceError, PriorityError, ReplayError
from pearl.replay import make_replay_manager
from pearl.replay.reference import ReferenceReplayManager
from pearl.spec import ReplaySpec

# Each shape is a program of its own, which takes seconds to compile for the first time: there are few of them.
DEEP = {"capacity": 50, "fanout": 4}  # three levels below the root
FLAT = {
    "capacity": 9,
    "fanout": 16,
    "stratified": False,
    "initial_priority": 2.5,
    "priority_epsilon": 1e-3,
}  # one level


def assert_same(a, b):
    for found, wanted in zip(a, b, strict=True):
        np.testing.assert_array_equal(found, wanted)


def assert_same_state(a, b):
    left, right = a.state_dict(), b.state_dict()
    assert left.keys() == right.keys()
    for name in left:
        np.testing.assert_array_equal(left[name], right[name], err_msg=name)
    assert a.statistics() == b.statistics()


def run_python(code, *arguments):
    """What a process of its own says. It must end by itself: kernels that still run must not keep it."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.fpga
def test_two_managers_of_one_shape_are_apart_and_closing_stops_one():
    """Their pipes have the same names; a manager can be made again after another has ended."""
    first, second = (FpgaReplayManager(**DEEP, seed=seed) for seed in (1, 2))
    references = [ReferenceReplayManager(**DEEP, seed=seed) for seed in (1, 2)]
    for replay, reference, slots in ((first, references[0], [1, 2, 3]), (second, references[1], [30, 40])):
        for each in (replay, reference):
            each.insert(slots)
    found = []
    threads = [threading.Thread(target=lambda r=r: found.append((r, r.sample(8)))) for r in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    drawn = {id(replay): sample for replay, sample in found}
    assert_same(drawn[id(first)], references[0].sample(8))
    assert_same(drawn[id(second)], references[1].sample(8))
    first.close()
    first.close()
    with pytest.raises(ReplayError, match="is closed"):
        first.sample(1)
    assert_same(second.sample(8), references[1].sample(8))
    second.close()


AT_ONCE = """
import sys
import numpy as np
from pearl.backends.fpga.replay import FpgaReplayManager
from pearl.backends.cpu.replay import NativeReplayManager
seed = int(sys.argv[1])
replay, native = (kind(50, fanout=4, seed=seed) for kind in (FpgaReplayManager, NativeReplayManager))
print("made", flush=True)
input()  # until the other process has made its own
rng = np.random.default_rng(seed)
for _ in range(100):
    slots, priorities = rng.integers(0, 50, 30), rng.exponential(10.0, 30)
    for each in (replay, native):
        each.insert(slots, priorities)
    sample = native.sample(40)
    for found, wanted in zip(replay.sample(40), sample, strict=True):
        np.testing.assert_array_equal(found, wanted)
    priorities = rng.exponential(10.0, 40)
    for each in (replay, native):
        each.update(sample.indices, priorities, sample.generations)
for name, wanted in native.state_dict().items():
    np.testing.assert_array_equal(replay.state_dict()[name], wanted, err_msg=name)
print("same", native.total, flush=True)
input()  # until the other process is done; then it ends without close
"""


@pytest.mark.fpga
def test_two_processes_use_the_emulator_at_once_and_end_without_close():
    """Each has a pipeline of the same shape, other items and another seed."""
    with contextlib.ExitStack() as stack:
        processes = []
        for seed in ("1", "2"):
            process = subprocess.Popen(
                [sys.executable, "-c", AT_ONCE, seed],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            processes.append(stack.enter_context(process))
            stack.callback(process.kill)  # before it is waited for, where something here fails
        totals = []
        for expected in ("made", "same"):
            said = [process.stdout.readline().split() for process in processes]
            if [words[:1] for words in said] != [[expected]] * 2:
                pytest.fail("\n".join(process.communicate()[1] for process in processes))
            totals.append([words[1:] for words in said])
            for process in processes:
                process.stdin.write("\n")
                process.stdin.flush()
        assert totals[1][0] != totals[1][1]
        assert [process.wait(60) for process in processes] == [0, 0]


def test_trees_that_no_program_is_made_for_are_refused_with_numbers():
    with pytest.raises(CapacityError, match=r"at most 1,048,576 slots; found 1,048,577\. Lower `size`"):
        FpgaReplayManager(2**20 + 1, fanout=256)
    with pytest.raises(CapacityError, match=r"at most 16; 65,537 slots with a fanout of 2 need 17\. .* at least 4\."):
        FpgaReplayManager(2**16 + 1, fanout=2)
    with pytest.raises(ConfigurationError, match="timeout_s must be a number of seconds above 0; found 0"):
        FpgaReplayManager(10, timeout_s=0)


@pytest.mark.fpga
def test_limits_of_the_kernel_and_devices_that_are_no_fpga():
    with pytest.raises(ReplayError, match="Fanout must be a power of two from 2 to 256; found 3"):
        FpgaReplayManager(10, fanout=3)
    with pytest.raises(ReplayError, match=r"must lie in \[1, 2\*\*20\]; found 0"):
        FpgaReplayManager(0)
    with pytest.raises(DeviceError, match=r'needs an FPGA or its emulator; .* Choose backend="sycl"'):
        FpgaReplayManager(10, device="opencl:cpu")


@pytest.mark.sycl
def test_an_emulator_that_is_absent_is_named_with_the_command_that_adds_it(tmp_path, monkeypatch):
    monkeypatch.setenv("PEARL_FPGA_EMULATOR", str(tmp_path))
    monkeypatch.delenv("OCL_ICD_FILENAMES", raising=False)
    code = (
        "from pearl.backends.fpga.replay import FpgaReplayManager as F\n"
        "try: F(10)\nexcept Exception as e: print(repr(e))"
    )
    assert "DeviceError" in (said := run_python(code))
    assert "pearl devices --setup-fpga-emulator" in said


@pytest.mark.fpga
def test_the_backend_comes_from_the_registry():
    replay = make_replay_manager(ReplaySpec(9, fanout=16, stratified=False), seed=4, backend="fpga")
    reference = make_replay_manager(ReplaySpec(9, fanout=16, stratified=False), seed=4, backend="reference")
    for each in (replay, reference):
        each.insert([1, 4])
    assert_same(replay.sample(6), reference.sample(6))
    replay.close()


@pytest.fixture(scope="module")
def made():
    """`made(**options)` is a manager, the last one if it has these options: idle ones keep the cores busy."""
    last: dict[str, FpgaReplayManager] = {}

    def get(**options):
        if repr(options) not in last:
            for manager in last.values():
                manager.close()
            last.clear()
            last[repr(options)] = FpgaReplayManager(**options)
        return last[repr(options)]

    yield get
    for manager in last.values():
        manager.close()


@pytest.fixture
def both(made):
    """`both(shape, alpha, seed)` is a manager on the FPGA and the reference, both as new."""

    def start(shape, alpha=0.6, seed=0):
        reference = ReferenceReplayManager(**shape, alpha=alpha, seed=seed)
        replay = made(**shape)
        replay.load_state_dict(reference.state_dict())
        return replay, reference

    return start


priorities = st.one_of(
    st.floats(0, 300, width=32), st.sampled_from([0.0, -0.0, 1e-45, 1.0, 255.99998, 256.0, 1e9, 3.4e38, np.inf])
)


@pytest.mark.fpga
@pytest.mark.parametrize("shape", [FLAT, DEEP], ids=["flat", "deep"])
def test_equals_the_reference_bit_for_bit(both, shape):
    capacity = shape["capacity"]

    @settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def operate(data):
        replay, reference = pair = both(shape, data.draw(st.floats(0, 4)), data.draw(st.integers(0, 2**64 - 1)))
        last = None
        for _ in range(data.draw(st.integers(2, 7))):
            operation = data.draw(st.sampled_from(["insert", "insert", "sample", "update", "update", "alpha"]))
            if operation == "insert":
                slots = data.draw(st.lists(st.integers(0, capacity - 1), max_size=20))
                values = data.draw(st.none() | st.lists(priorities, min_size=len(slots), max_size=len(slots)))
                for each in pair:
                    each.insert(slots, values)
            elif operation == "sample" and reference.filled:
                last = reference.sample(data.draw(st.integers(1, 40)), beta := data.draw(st.floats(0, 4)))
                assert_same(replay.sample(len(last.indices), beta), last)
            elif operation == "update" and last is not None:
                count = len(last.indices)
                values = data.draw(st.lists(priorities, min_size=count, max_size=count))
                generations = data.draw(st.sampled_from([None, last.generations]))
                applied = replay.update(last.indices, values, generations)
                assert applied == reference.update(last.indices, values, generations)
            elif operation == "alpha":
                exponent = data.draw(st.floats(0, 4))
                for each in pair:
                    each.set_alpha(exponent)
            assert replay.total == reference.total
        assert_same_state(replay, reference)
        assert_same((replay.retrieve(np.arange(capacity)),), (reference.retrieve(np.arange(capacity)),))

    operate()


@pytest.mark.fpga
@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"capacity": 300, "fanout": 2},
        {"capacity": 10_000, "fanout": 16},
        {"capacity": 100_000, "fanout": 128},
        {"capacity": 2**20, "fanout": 256},
    ],
    ids=lambda options: "{capacity}-{fanout}".format(**options),
)
def test_trees_of_any_depth_equal_the_cpus(options):
    replay, native = FpgaReplayManager(**options, seed=9), NativeReplayManager(**options, seed=9)
    rng = np.random.default_rng(0)
    for i in range(4):
        slots = rng.integers(0, options["capacity"], 3000)  # more than fit the pipes, some twice
        for each in (replay, native):
            each.insert(slots, np.linspace(0.0, 200.0, 3000) if i else None)
        sample = native.sample(64)
        assert_same(replay.sample(64), sample)
        values = rng.exponential(100.0, 64).astype(np.float32)
        for each in (replay, native):
            each.update(sample.indices, values, sample.generations)
        assert_same(replay.sample(2000), native.sample(2000))
    assert replay.statistics() == native.statistics()
    replay.close()


@pytest.mark.fpga
def test_stages_are_launched_once_and_serve_every_request(both):
    replay, _ = both(DEEP)  # as new: what another test left in it may need more launches, to recover the scale
    assert replay.kernel.level_nodes == [1, 4, 13, 50]
    assert replay.level_bits == (34, 32, 30, 28)
    before = replay.kernel.bridge_launches
    replay.insert(np.arange(50), np.linspace(0.1, 2.0, 50))
    sample = replay.sample(20)
    replay.update(sample.indices, np.full(20, 3.0), sample.generations)
    replay.retrieve([4])
    assert replay.kernel.bridge_launches - before == 8  # one that feeds and one that collects for each
    assert replay.kernel.stage_launches == 4


@pytest.mark.fpga
def test_stale_priorities_are_dropped_and_do_not_lower_the_scale(both):
    replay, reference = pair = both(DEEP)
    for each in pair:
        each.insert(np.arange(20))
    sample = reference.sample(8)
    assert_same(replay.sample(8), sample)
    for each in pair:
        each.insert(sample.indices[:4])
        fresh = int(np.isin(sample.indices, sample.indices[:4], invert=True).sum())
        assert each.update(sample.indices, [1e20] * 4 + [2.0] * 4, sample.generations) == fresh
        assert each.statistics().rescales == 0
        each.update(sample.indices, [1e20] * 8)
        assert each.statistics().rescales == 1
    assert_same_state(replay, reference)


@pytest.mark.fpga
def test_checkpoints_go_to_the_cpu_and_back(made):
    native = NativeReplayManager(**DEEP, seed=3)
    native.insert(np.arange(40), np.geomspace(1e-3, 1e6, 40))
    native.sample(16)
    replay = made(**DEEP)
    replay.load_state_dict(native.state_dict())
    moved = NativeReplayManager(50, fanout=2)
    moved.load_state_dict(replay.state_dict())
    for _ in range(2):
        sample = native.sample(30)
        for each in (replay, moved):
            assert_same(each.sample(30), sample)
        for each in (native, replay, moved):
            each.update(sample.indices, np.arange(30), sample.generations)


@pytest.mark.fpga
def test_what_is_wrong_changes_nothing(both):
    replay, reference = pair = both(DEEP)
    for each in pair:
        with pytest.raises(ReplayError, match="The replay is empty"):
            each.sample(4)
        each.insert([3, 5, 8], [1.0, 0.5, 2.0])
        with pytest.raises(ReplayError, match=r"Index at position 1 must lie in \[0, 50\); found 50"):
            each.update([3, 50], [1.0, 1.0])
        with pytest.raises(PriorityError, match="at position 0, 2"):
            each.update([3, 5, 8], [np.nan, 1.0, -1.0])
        with pytest.raises(ReplayError, match="Index 4 at position 1 was never inserted"):
            each.update([3, 4], [1e30, 1.0])
        with pytest.raises(ReplayError, match="beta must lie in"):
            each.sample(4, beta=-1.0)
    assert_same_state(replay, reference)
