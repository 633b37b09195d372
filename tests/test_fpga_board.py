"""The recipe for boards: what it generates, its host checks run with threads for kernels, and what it refuses.

Intel's compiler, which the recipe is for, is not needed: fixtures/fpga_threads stands in for SYCL.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from gymnasium import spaces

from composer.fpga.reported_learner import Algorithm, LearnerBuild
from pearl.algorithms import DDPG, DQN, TD3, Trainer
from pearl.backends.fpga.learner import FpgaLearner
from pearl.backends.sycl.device import sycl_availability
from pearl.backends.sycl.runtime import sycl_runtime
from pearl.backends.sycl.selector import EMULATOR_SELECTOR

# cmake may be the one that the environment's kernels were built with.
CMAKE = shutil.which("cmake", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
    pytest.mark.skipif(CMAKE is None, reason="needs cmake"),
]

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "kernels" / "sycl" / "board"
THREADS = Path(__file__).parent / "fixtures" / "fpga_threads"
SYCL_HEADERS = Path(sys.prefix) / "include"
EMULATOR = sycl_availability(EMULATOR_SELECTOR)
TINY = ("network=4,20,2", "batch=9", "copies=2")
TREE = ("capacity=200", "fanout=4")
OPTIONS = ("DESIGN=training", "CAPACITY=200", "FANOUT=4", "NETWORK=3,9,2", "ALGORITHM=ddpg", "BATCH=12", "COPIES=2")


def compile_with_gcc(folder: Path, design: str, *options: str) -> Path:
    """The host check of the design in `folder`, compiled with `options` beside the program's headers."""
    made = folder / "check"
    subprocess.run(
        [
            *("g++", "-std=c++20", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"),
            "-Wno-unused-but-set-parameter",  # of a stage that writes to nothing
            *(f"-I{folder}", f"-I{ROOT / 'kernels' / 'include'}", *options),
            *(str(RECIPE / f"{design}_check.cpp"), "-o", str(made)),
        ],
        check=True,
    )
    return made


def build(folder: Path, target: str) -> str:
    """What cmake says."""
    command = [str(CMAKE), "--build", str(folder), "--target", target]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a build with OPTIONS, where the generator is made."""
    folder = tmp_path_factory.mktemp("board")
    configure = [str(CMAKE), "-S", str(RECIPE), "-B", str(folder), "-DCMAKE_CXX_COMPILER=g++"]
    subprocess.run([*configure, *(f"-DPEARL_{o}" for o in OPTIONS)], check=True, capture_output=True)
    build(folder, "generate")
    return folder


@pytest.fixture(scope="module")
def generator(recipe: Path) -> Path:
    return recipe / "generate"


def generate(generator: Path, *words: str) -> str:
    return subprocess.run([generator, *words], capture_output=True, text=True, check=True).stdout


# --- programs --------------------------------------------------------------------------------------------------------


@pytest.mark.sycl
def test_the_replay_managers_program_is_the_emulators(generator: Path) -> None:
    said = generate(generator, "design=replay", "capacity=300", "fanout=8")
    program = sycl_runtime().module.fpga_replay_source(300, 8, 64)
    assert program in said
    assert "300 slots, fanout 8. Bits of a node, the root's first: 37 34 31 28\n" in program
    assert "level2() { inner_stage<Shape, 2, Requests<2>, Requests<3>>(); }" in program
    assert "level3() { leaf_stage<Shape, Requests<3>, Changes, Answers>(); }" in program
    assert "queues[3].template single_task<pearl_replay_level3_kernel>" in said
    assert said.index("\nclass pearl_replay_level3_kernel;\n") < said.index("void launch_stages(")


class SmallDQN(DQN):
    hidden_sizes, double = (20, 7), False


class SmallDDPG(DDPG):
    hidden_sizes = (20, 7)


class SmallTD3(TD3):
    hidden_sizes = (20, 7)


@pytest.mark.fpga
@pytest.mark.skipif(not EMULATOR.ok, reason=f"no FPGA emulator: {EMULATOR.reason}")
@pytest.mark.parametrize(("algorithm", "trainer_class"), [("dqn", SmallDQN), ("ddpg", SmallDDPG), ("td3", SmallTD3)])
def test_the_learners_program_is_the_emulators(generator: Path, algorithm: str, trainer_class: type[Trainer]) -> None:
    """The recipe is told widths; the Learner reads layers and the places of their weights from a trainer."""
    box = spaces.Box(-1.0, 1.0, (4,), np.float32)
    actions = spaces.Discrete(2) if algorithm == "dqn" else spaces.Box(-1.0, 1.0, (2,), np.float32)
    program = FpgaLearner(trainer_class(box, actions), sub_batches=2).kernel.source(9)
    words = ("network=4,20,7,2", "batch=9", "copies=2", "pipe_items=1024")
    said = generate(generator, "design=learner", f"algorithm={algorithm}", *words)
    assert program in said
    joined = generate(generator, "design=training", f"algorithm={algorithm}", *words)
    stages = [line for line in program.splitlines() if line.startswith("PEARL_TASK") and "_stage<" in line]
    assert len(stages) > 20
    assert set(stages) <= set(joined.splitlines())


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("algorithm", ["dqn", "double_dqn", "ddpg", "td3"])
def test_kernels_are_those_that_reports_are_read_for(generator: Path, algorithm: Algorithm, copies: int) -> None:
    said = generate(
        generator, "design=learner", f"algorithm={algorithm}", "network=4,20,7,2", "batch=9", f"copies={copies}"
    )
    build = LearnerBuild(algorithm, (4, 20, 7, 2), 9, copies)
    names = {f"{stage}_{copy}" for stage in build.program.stages for copy in range(copies)}
    names |= {*build.program.weight_stages, "submit", "resolve"}
    assert set(re.findall(r"^class pearl_learner_(\w+)_kernel;$", said, re.MULTILINE)) == names


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("fanout=3",), "Fanout must be a power of two from 2 to 256; found 3."),
        (("design=learner", "capacity=0x40"), "capacity must be a whole number from 1 to 1048576; found 0x40."),
        (("capacity=0",), "capacity must be a whole number from 1 to 1048576; found 0."),
        (("design=both",), "design must be one of replay, learner, training; found both."),
        (("size=3",), "Expected NAME=VALUE, of the names activation, algorithm, batch, capacity, copies, design,"),
        (("design=learner", "algorithm=ppo"), "algorithm must be one of dqn, double_dqn, ddpg, td3; found ppo."),
        (("design=learner", "network=4"), "at least two widths, inputs and outputs, as in 4,64,64,2; found 4."),
        (("design=learner", "network=4,x,2"), "A width of network must be a whole number from 1 to 4096; found x."),
        (("design=training", "batch=2", "copies=3"), "copies must be a whole number from 1 to 2; found 3."),
        (("design=learner", "unroll=16,12,2"), "unroll must be a power of two; found 12."),
        (("design=learner", "unroll=8,8"), "unroll must be one number, or one for each of 3 layers; found 8,8."),
    ],
)
def test_what_no_program_is_generated_for_is_said(generator: Path, words: tuple[str, ...], expected: str) -> None:
    refused = subprocess.run([generator, *words], capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    assert expected in refused.stderr
    assert refused.stdout == ""


def test_a_host_check_has_the_numbers_that_its_program_has(generator: Path) -> None:
    """In C++ a number that begins with 0 is octal."""
    said = [generate(generator, "design=training", *words) for words in (TINY, ("network=4,020,2,", *TINY[1:]))]
    assert said[0] == said[1]
    assert generate(generator, "capacity=0300") == generate(generator, "capacity=300")


def test_the_recipe_generates_what_its_options_say(recipe: Path, generator: Path) -> None:
    targets = build(recipe, "help")
    assert all(f" {target}\n" in targets for target in ("program", "fpga_emu", "fpga_report", "fpga"))
    build(recipe, "program")
    words = [f"{name.lower()}={value}" for name, value in (option.split("=") for option in OPTIONS)]
    assert (recipe / "program.hpp").read_text() == generate(generator, *words)


# --- host checks -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("design", "words"),
    [
        ("replay", ("capacity=300", "fanout=8", "pipe_items=4")),
        ("learner", (*TINY, "pipe_items=1")),
        pytest.param(
            "learner", (*TINY, "algorithm=double_dqn", "activation=tanh", "optimizer=momentum"), marks=pytest.mark.slow
        ),
        pytest.param("learner", (*TINY, "algorithm=ddpg", "optimizer=sgd"), marks=pytest.mark.slow),
        pytest.param(
            "learner",
            ("network=3,17,2", "batch=33", "algorithm=td3", "optimizer=nesterov", "pipe_items=2"),
            marks=pytest.mark.slow,
        ),
        pytest.param("learner", ("network=5,33,16,3", "batch=20", "copies=3", "unroll=4,32,1"), marks=pytest.mark.slow),
        ("training", (*TINY, *TREE, "pipe_items=1")),
        pytest.param("training", (*TINY, *TREE, "algorithm=td3", "optimizer=amsgrad"), marks=pytest.mark.slow),
    ],
)
def test_programs_run_with_pipes_of_just_their_depth_and_pass_their_checks(
    generator: Path, tmp_path: Path, design: str, words: tuple[str, ...]
) -> None:
    """A pipe with another count of ends than one writing and one reading kernel, or a deadlock, ends it otherwise."""
    (tmp_path / "program.hpp").write_text(generate(generator, f"design={design}", *words))
    check = compile_with_gcc(tmp_path, design, "-pthread", f"-I{THREADS}")
    done = subprocess.run([check], capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stdout) == (0, "all as expected\n"), done.stdout + done.stderr


@pytest.mark.parametrize(
    ("before", "after", "returned", "expected"),
    [
        ("Activation::relu>", "Activation::tanh>", 1, "a priority not as expected"),
        ("resolve<", "Pipe<Learner, 0, float, 8>::write(0.0f); resolve<", 3, "is written by 1 kernels and read by 0"),
    ],
    ids=["another network", "a pipe that nothing reads"],
)
def test_a_check_sees_what_is_wrong(
    generator: Path, tmp_path: Path, before: str, after: str, returned: int, expected: str
) -> None:
    program = generate(generator, "design=learner", *TINY)
    assert before in program
    (tmp_path / "program.hpp").write_text(program.replace(before, after))
    check = compile_with_gcc(tmp_path, "learner", "-pthread", f"-I{THREADS}")
    done = subprocess.run([check], capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, expected in done.stdout + done.stderr) == (returned, True), done.stdout + done.stderr


@pytest.mark.skipif(not (SYCL_HEADERS / "sycl" / "sycl.hpp").is_file(), reason="needs the SYCL runtime's headers")
@pytest.mark.parametrize(
    "design", ["training", *(pytest.param(part, marks=pytest.mark.slow) for part in ("replay", "learner"))]
)
def test_host_checks_pass_a_syntax_check_against_the_runtimes_headers(
    generator: Path, tmp_path: Path, design: str
) -> None:
    (tmp_path / "program.hpp").write_text(generate(generator, f"design={design}", *TINY, *TREE))
    compile_with_gcc(tmp_path, design, "-fsyntax-only", "-isystem", str(SYCL_HEADERS))
