"""Pipelines on an FPGA where something fails: an error that names it, again at every call, and an end."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.fpga
EMULATOR = "Intel(R) FPGA Emulation Device"

# What a process of its own does: `refused` prints the error of a call, or that there was none.
USE = """
import ctypes
import os
from pearl.errors import DeviceError
from pearl.backends.fpga.replay import FpgaReplayManager
def refused(call):
    try:
        print("no error:", call())
    except DeviceError as error:
        print(error)
def refused_from_now_on(replay):
    refused(lambda: replay.sample(8))
    refused(lambda: replay.sample(8))
    refused(lambda: replay.insert([5] * 200))  # more than the kernels have memory for, which they still hold
    replay.close()
"""


def said_by(code: str, **environment: str) -> list[str]:
    """The lines of a process, which must end by itself: kernels that still run must not keep it."""
    done = subprocess.run(
        [sys.executable, "-c", USE + code],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


STALL = """
replay = FpgaReplayManager(50, fanout=4, timeout_s=1.5)
refused(lambda: replay.insert(range(50)))
refused_from_now_on(replay)
"""


def test_a_request_that_is_not_answered_is_an_error_that_names_what_stands_still() -> None:
    """The emulator has room for the four stages and not for all that brings them work."""
    first, *others = said_by(STALL, CL_CONFIG_CPU_TBB_NUM_WORKERS="5")
    assert first.startswith(f"The pipeline replay on {EMULATOR} stalled: it did not answer within 1.55 s: ")
    assert "has not begun; level0 runs, level1 runs, level2 runs, level3 runs. Its data is lost." in first
    assert "Create it again, with a longer timeout if the machine is busy" in first
    assert others == [first] * 3


NO_ROOM = "refused(lambda: FpgaReplayManager(50, fanout=4, timeout_s=1.5))"


def test_stages_that_have_no_room_are_an_error_that_names_them() -> None:
    (said,) = said_by(NO_ROOM, CL_CONFIG_CPU_TBB_NUM_WORKERS="3")
    assert f"The pipeline replay on {EMULATOR} did not start within 1.5 s: " in said
    assert "has not begun" in said
    assert "All stages must run at once. Close other pipelines, or use fewer stages (a larger fanout)." in said


# The first pipeline has 4 stages and 2 kernels that move data; next to its stages, the second needs 5 or more kernels.
TOO_MANY = """
from pearl.backends.sycl import device
device.emulator_kernels = lambda: 8
first = FpgaReplayManager(50, fanout=4, timeout_s=60)
refused(lambda: FpgaReplayManager(50, fanout=8, timeout_s=60))
first.insert(range(50))
print(len(first.sample(8).indices))
first.close()
second = FpgaReplayManager(50, fanout=8, timeout_s=60)
second.insert(range(50))
print(len(second.sample(8).indices))
second.close()
"""


def test_a_pipeline_with_too_few_kernels_left_is_refused_and_the_others_go_on() -> None:
    said, *works = said_by(TOO_MANY)
    assert (
        f"The pipeline replay does not fit on {EMULATOR}, which runs 8 kernels of a process at once: it needs" in said
    )
    assert "stages of other pipelines take 4. All stages must run at once. Close other pipelines" in said
    assert works == ["8", "8"]


LEARN = """
import numpy as np
from gymnasium import spaces
from pearl.algorithms import DQN
from pearl.backends.fpga.learner import FpgaLearner
trainer = DQN(spaces.Box(-1.0, 1.0, (3,), np.float32), spaces.Discrete(2), hidden_sizes=(4,))
learner = FpgaLearner(trainer, sub_batches=1, timeout_s=1.5)
def batch(rows):
    obs = np.zeros((rows, 3), np.float32)
    ones = np.ones(rows, np.float32)
    columns = {"obs": obs, "action": np.zeros(rows, np.int64), "reward": ones, "next_obs": obs, "discount": ones}
    return columns, ones
before = trainer._q_flat.parameter.detach().clone()
refused(lambda: learner.step(*batch(8)))
refused(lambda: learner.step(*batch(8)))
refused(lambda: learner.step(*batch(200)))
print(trainer.gradient_steps, bool((before == trainer._q_flat.parameter).all()))
learner.close()
"""


def test_a_step_that_is_not_answered_is_an_error_and_no_step() -> None:
    """Room for the twelve stages, and for one of the two kernels that bring and take."""
    first, *others, steps = said_by(LEARN, CL_CONFIG_CPU_TBB_NUM_WORKERS="13")
    assert first.startswith(f"The pipeline Learner on {EMULATOR} stalled: it did not answer within 1.5")
    assert "has not begun; fp_target1_0 runs, fp_target2_0 runs" in first
    assert "wu_0_1 runs, wu_0_2 runs. Its data is lost." in first
    assert others == [first] * 2
    assert steps == "0 True"


@pytest.mark.slow
def test_a_learner_whose_stages_have_no_room_says_so() -> None:
    first, *_ = said_by(LEARN, CL_CONFIG_CPU_TBB_NUM_WORKERS="7")
    assert f"The pipeline Learner on {EMULATOR} did not start within 1.5 s: " in first
    assert "All stages must run at once." in first


# Stands between the runtime and the driver.
FAULTY_DRIVER = """
#include <dlfcn.h>
#include <cstddef>
extern "C" {
int fault = 0;  // from now on: 1 no state of a kernel can be had, 2 kernels have failed, 3 no kernel can be launched
}
namespace {
constexpr int kDeviceNotAvailable = -2, kFailed = -14;
constexpr unsigned kExecutionStatus = 0x11D3;
void* of_the_driver(const char* name) { return dlsym(dlopen("libOpenCL.so.1", RTLD_LAZY | RTLD_NOLOAD), name); }
}
extern "C" int clGetEventInfo(void* event, unsigned name, std::size_t size, void* value, std::size_t* written) {
  static const auto get = reinterpret_cast<decltype(&clGetEventInfo)>(of_the_driver("clGetEventInfo"));
  if (fault == 1) return kDeviceNotAvailable;
  const int result = get(event, name, size, value, written);
  if (fault == 2 && name == kExecutionStatus && value != nullptr) *static_cast<int*>(value) = kFailed;
  return result;
}
extern "C" int clEnqueueNDRangeKernel(void* queue, void* kernel, unsigned dimensions, const std::size_t* offset,
                                      const std::size_t* global, const std::size_t* local, unsigned count,
                                      void* const* after, void** event) {
  static const auto enqueue =
      reinterpret_cast<decltype(&clEnqueueNDRangeKernel)>(of_the_driver("clEnqueueNDRangeKernel"));
  if (fault == 3) return kDeviceNotAvailable;
  return enqueue(queue, kernel, dimensions, offset, global, local, count, after, event);
}
"""
VANISH = """
replay = FpgaReplayManager(50, fanout=4, timeout_s=60.0)
replay.insert(range(50))
print(len(replay.sample(8).indices))
ctypes.c_int.in_dll(ctypes.CDLL(os.environ["LD_PRELOAD"]), "fault").value = int(os.environ["FAULT"])
refused_from_now_on(replay)
"""


@pytest.fixture(scope="module")
def faulty_driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    folder = tmp_path_factory.mktemp("driver")
    (folder / "driver.cpp").write_text(FAULTY_DRIVER)
    library = folder / "driver.so"
    subprocess.run(["g++", "-shared", "-fPIC", str(folder / "driver.cpp"), "-o", str(library), "-ldl"], check=True)
    return library


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        (1, f"The pipeline replay on {EMULATOR} failed (opencl backend failed with error"),
        (2, f"The pipeline replay on {EMULATOR} failed: feed has failed, collect has failed; level0 has failed"),
        (3, f"The device {EMULATOR} failed: opencl backend failed with error"),
    ],
    ids=["no state", "failed kernels", "no launch"],
)
def test_a_device_that_vanishes_is_named_at_every_call(faulty_driver: Path, fault: int, named: str) -> None:
    before, first, *others = said_by(VANISH, LD_PRELOAD=str(faulty_driver), FAULT=str(fault))
    assert before == "8"
    assert first.startswith(named)
    assert "disappeared or was reset, start again; `pearl devices` lists the usable devices." in first
    assert others == [first] * 2
