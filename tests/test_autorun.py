"""Programs of autorun kernels: launched once, joined by pipes, stopped when told, and an error where they stall."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from pearl.backends.sycl.device import sycl_queue, sycl_runtime
from pearl.backends.sycl.selector import EMULATOR_SELECTOR
from pearl.errors import DeviceError

pytestmark = pytest.mark.fpga
PROGRAM = """
#include <sycl/sycl.hpp>
#include <sycl/ext/intel/fpga_extensions.hpp>
#include "pearl/fpga_pipes.hpp"
#define TASK extern "C" SYCL_EXT_ONEAPI_FUNCTION_PROPERTY((sycl::ext::oneapi::experimental::single_task_kernel)) void
struct Test;
using In = pearl::fpga::Pipe<Test, 0, std::uint64_t, 16>;
using Out = pearl::fpga::Pipe<Test, 1, std::uint64_t, 16>;
TASK middle() {  // loses sevens, ends at zero
  for (std::uint64_t count = 1;; ++count) {
    const std::uint64_t word = In::read();
    if (word == 7) continue;
    Out::write(word == 0 ? count : word + 1);
    if (word == 0) return;
  }
}
TASK feed(const std::uint64_t* words, std::uint64_t count) {
  for (std::uint64_t i = 0; i < count; ++i) In::write(words[i]);
}
TASK collect(std::uint64_t* words, std::uint64_t count) {
  for (std::uint64_t i = 0; i < count; ++i) words[i] = Out::read();
}
"""


@pytest.fixture
def pipeline():
    def make(timeout_s, text=PROGRAM):
        queue = sycl_queue(EMULATOR_SELECTOR)
        return sycl_runtime().module.Autorun(queue, "test", text, ["middle"], ["feed", "collect"], timeout_s)

    return make


def test_a_pipeline_runs_until_it_is_told_to_stop(pipeline):
    made = pipeline(60.0)
    assert made.run([1, 2, 3]) == [2, 3, 4]
    assert made.run(list(range(1, 7))) == list(range(2, 8))
    assert (made.stage_launches, made.bridge_launches) == (1, 4)
    assert made.run([0]) == [10]
    made.join()
    made.join()


def test_a_program_that_does_not_compile_says_why(pipeline):
    with pytest.raises(DeviceError, match=r"(?s)kernels of test do not compile.*undeclared identifier 'nothing'"):
        pipeline(1.0, PROGRAM.replace("word + 1", "nothing"))


STALL = """
import sys
from pearl.backends.sycl.selector import EMULATOR_SELECTOR
from pearl.backends.sycl.device import sycl_queue, sycl_runtime
from pearl.errors import DeviceError
queue = sycl_queue(EMULATOR_SELECTOR)
pipeline = sycl_runtime().module.Autorun(queue, "test", sys.argv[1], ["middle"], ["feed", "collect"], 3.0)
pipeline.run([1, 2])
for _ in range(2):
    try:
        pipeline.run([1, 7, 3])
    except DeviceError as error:
        print(error)
"""


def test_a_stalled_pipe_is_an_error_and_the_process_ends():
    done = subprocess.run(
        [sys.executable, "-c", STALL, PROGRAM], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr  # what still runs did not keep the process
    said = done.stdout.splitlines()
    assert said[0] == said[1]
    assert said[0].startswith("The pipeline test on Intel(R) FPGA Emulation Device stalled")
    assert "feed has ended, collect runs; middle runs" in said[0]
    assert "Create it again, with a longer timeout" in said[0]


TOO_MANY = """
import sys
from pearl.backends.sycl.selector import EMULATOR_SELECTOR
from pearl.backends.sycl.device import sycl_queue, sycl_runtime
from pearl.errors import DeviceError
queue, stages = sycl_queue(EMULATOR_SELECTOR), [f"stage{i}" for i in range(70)]
try:
    sycl_runtime().module.Autorun(queue, "long", sys.argv[1], stages, ["feed", "collect"], 5.0)
except DeviceError as error:
    print(error)
"""


@pytest.mark.slow
def test_more_stages_than_run_at_once_are_an_error_and_the_process_ends():
    head, _, bridges = PROGRAM.partition("TASK middle()")
    lines = (
        f"TASK stage{i}() {{ pearl::fpga::Pipe<Test, {i + 2}, int, 16>::read(); }}  // nobody writes" for i in range(70)
    )
    done = subprocess.run(
        [sys.executable, "-c", TOO_MANY, "\n".join([head, *lines, bridges[bridges.index("TASK feed") :]])],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env={**os.environ, "CL_CONFIG_CPU_TBB_NUM_WORKERS": "32"},  # fewer than the stages, whatever the set-up has
    )
    assert done.returncode == 0, done.stderr
    assert "The pipeline long on Intel(R) FPGA Emulation Device did not start within 5 s" in done.stdout
    assert "has not begun" in done.stdout
    assert "All stages must run at once. Close other pipelines" in done.stdout
