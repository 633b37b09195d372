"""What an import costs: torch and pandas are loaded by what needs them, and by nothing else."""

from __future__ import annotations

import importlib
import subprocess
import sys
from types import ModuleType

import pytest

import composer
import pearl
import pearl.algorithms
import pearl.replay
import pearl.runtime

HEAVY = ("torch", "pandas", "gymnasium", "matplotlib", "rich", "tensorboard", "fsspec", "jinja2")


def loaded_by(statement: str) -> set[str]:
    """Which of the heavy packages a fresh interpreter has loaded after `statement`."""
    script = f"{statement}\nimport sys\nprint(*(name for name in {HEAVY!r} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "module",
    [
        *("pearl", "pearl.errors", "pearl.devices", "pearl.replay", "pearl.actors", "pearl.runtime"),
        *("pearl.ipc.queues", "pearl.runtime.queues", "composer", "composer.profiling.measuring"),
    ],
)
def test_a_light_module_loads_no_heavy_package(module: str) -> None:
    assert loaded_by(f"import {module}") == set()


@pytest.mark.parametrize("module", ["checkpoint", "progress", "run_log", "options", "collection"])
def test_a_module_of_the_runtime_loads_no_torch(module: str) -> None:
    assert "torch" not in loaded_by(f"import pearl.runtime.{module}")


def test_writing_for_tensorboard_loads_nothing_that_only_reading_needs() -> None:
    assert loaded_by("import pearl.runtime.event_file") == {"tensorboard"}


def test_the_queues_named_through_the_package_load_no_torch() -> None:
    assert loaded_by("from pearl.runtime import DataCollectionQueue, WeightSyncQueue") == set()


@pytest.mark.parametrize("name", ["pearl", "pearl.runtime", "pearl.replay", "pearl.devices", "composer"])
def test_every_public_name_is_there_and_listed(name: str) -> None:
    module = importlib.import_module(name)
    assert set(module.__all__) <= set(dir(module))
    assert [public for public in module.__all__ if not hasattr(module, public)] == []


def test_all_of_the_algorithms_hides_no_name_of_other_packages() -> None:
    script = "from gymnasium import spaces\nfrom pearl.algorithms import *\nspaces.Discrete(2)"
    found: dict[str, object] = {}
    exec(script, found)
    public = {name: value for name, value in found.items() if not name.startswith("_") and name != "spaces"}
    assert set(pearl.algorithms.ALGORITHMS) <= set(public)
    assert [name for name, value in public.items() if isinstance(value, ModuleType)] == []


def test_the_composer_is_a_name_of_pearl() -> None:
    assert pearl.Composer is composer.Composer


@pytest.mark.parametrize("module", [pearl, pearl.replay, pearl.runtime, composer])
def test_a_name_that_is_not_there_is_an_attribute_error(module: object) -> None:
    with pytest.raises(AttributeError, match="no attribute 'Absent'"):
        module.Absent  # type: ignore[attr-defined]  # noqa: B018
