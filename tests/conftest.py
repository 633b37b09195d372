from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pearl.backends.fpga.emulator import emulator_folder
from pearl.backends.sycl.device import sycl_availability
from pearl.backends.sycl.selector import EMULATOR_SELECTOR
from pearl.cache_folder import cache_folder

if TYPE_CHECKING:
    from programs import CsvPair


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--accept-golden",
        action="store_true",
        help="write what the templates render now into tests/golden instead of comparing with it",
    )
    parser.addoption("--cuda-module", help="a pearl._cuda to test in place of the one that is installed (`make races`)")


def pytest_configure(config: pytest.Config) -> None:
    """Prepare the process before a test imports anything of PEARL's."""
    # Programs that tests start keep their bytecode: without, each compiles PEARL's modules again (0.3 s).
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    if path := config.getoption("--cuda-module"):
        import pearl

        loader = importlib.machinery.ExtensionFileLoader("pearl._cuda", path)
        spec = importlib.util.spec_from_loader("pearl._cuda", loader)
        assert spec is not None
        pearl._cuda = sys.modules["pearl._cuda"] = importlib.util.module_from_spec(spec)
        loader.exec_module(pearl._cuda)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what is marked `sycl` or `fpga` where there is no such device; the marker may name another selector."""
    for name, selector in (("sycl", "cpu"), ("fpga", EMULATOR_SELECTOR)):
        marker = item.get_closest_marker(name)
        if marker is not None and not (available := sycl_availability(*(marker.args or (selector,)))).ok:
            pytest.skip(available.reason)


@pytest.fixture(autouse=True, scope="session")
def calibration_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Measurements are shared by the tests of one session and never touch the user's cache folder.

    The FPGA emulator, and what was compiled for SYCL devices, are the user's.
    """
    compiled = os.environ.get("SYCL_CACHE_DIR") or str(cache_folder() / "sycl")
    folder = tmp_path_factory.mktemp("calibration")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PEARL_FPGA_EMULATOR", str(emulator_folder()))
        patch.setenv("SYCL_CACHE_DIR", compiled)
        patch.setenv("PEARL_CACHE_DIR", str(folder))
        patch.setenv("PEARL_BUDGET_S", "0")  # no test tries programs unless it says so
        # The emulator's compiler takes three times as long if it optimizes: one test of programs lets it.
        patch.setenv("PEARL_FPGA_OPTIMIZE", os.environ.get("PEARL_FPGA_OPTIMIZE", "0"))
        patch.setenv("PEARL_PLOT", "0")  # a learning curve takes longer than most runs: only with --plot
        yield folder


@pytest.fixture(scope="module")
def quick_profiles() -> Iterator[None]:
    """Short measurements: composing takes a fraction of a second a device."""
    from composer import replay_composing
    from composer.on_policy import composing as rollout_composing
    from composer.on_policy.profiling import RolloutProfiler
    from composer.profiling import messages
    from composer.profiling.context import ProfilingContext
    from composer.profiling.profiler import Profiler
    from composer.suggestion import update_times

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replay_composing, "Profiler", functools.partial(Profiler, budget_s=0.03))
        patch.setattr(rollout_composing, "RolloutProfiler", functools.partial(RolloutProfiler, budget_s=0.03))
        patch.setattr(update_times, "ProfilingContext", functools.partial(ProfilingContext, budget_s=0.03))
        patch.setattr(messages, "_REPEATS", 2)
        yield


@pytest.fixture
def csv_pair(tmp_path: Path) -> CsvPair:
    """`csv_pair("cpu0,cpu,cpu", ..., connections=[...])` writes both files and returns their paths."""
    from programs import write_csv_pair  # brings torch, which most tests do without

    def write(*devices: str, connections: Sequence[str] = ()) -> tuple[Path, Path]:
        return write_csv_pair(tmp_path, devices, connections)

    return write
