"""What holds the rooms apart: one-way imports, and no question about a device but to its backend."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
KINDS = {"cpu", "gpu", "fpga"}
# The composer-side tables of estimators, and the room of FPGAs, may name the backends that they are written for; the
# platform asks the host's CPU for its cores.
NAMING_BACKENDS = (
    *("composer/modelled_rows.py", "composer/on_policy/estimates.py", "composer/fpga/", "composer/platform.py"),
)

# Imports go to rooms of the same rank or a lower one.
RANKS = {
    "pearl.ipc": 0,
    "pearl.exploration": 0,
    "pearl.schedules": 0,
    "pearl.devices": 0,
    "pearl.replay": 1,
    "pearl.rollout": 1,
    "pearl.learner": 1,
    "pearl.algorithms": 1,
    "pearl.backends": 2,
    "pearl.actors": 3,
    "pearl.policy": 3,
    "pearl.runtime": 3,
    "pearl.local_sgd": 3,
    "composer": 4,
}
# The former places of what moved into the backends' folders; older programs and scripts import from them.
FORMER = (
    *("pearl/replay/" + name for name in ("fpga.py", "native.py", "sycl.py", "sycl_storage.py", "torch_storage.py")),
    *("pearl/learner/" + name for name in ("fpga_learner.py", "native_learner.py", "sycl_learner.py")),
)


def sources(*places: str) -> list[Path]:
    return [file for place in places for file in sorted((ROOT / place).rglob("*.py"))]


def named(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


def at(file: Path, node: ast.AST) -> str:
    return f"{named(file)}:{getattr(node, 'lineno', 0)}: {ast.unparse(node)}"


def compared(tree: ast.AST) -> Iterator[tuple[ast.Compare, list[ast.expr]]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            yield node, [node.left, *node.comparators]


def strings(expression: ast.expr) -> set[str]:
    return {n.value for n in ast.walk(expression) if isinstance(n, ast.Constant) and isinstance(n.value, str)}


@pytest.mark.parametrize("file", sources("composer", "pearl/runtime", "pearl/actors"), ids=named)
def test_nothing_asks_for_the_name_or_kind_of_a_device(file: Path) -> None:
    found = []
    for node, sides in compared(ast.parse(file.read_text())):
        attributes = {n.attr for side in sides for n in ast.walk(side) if isinstance(n, ast.Attribute)}
        values = set().union(*map(strings, sides))
        if "backend" in attributes or ("kind" in attributes and values & KINDS):
            found.append(at(file, node))
    assert found == []


@pytest.mark.parametrize("file", sources("composer", "pearl/runtime"), ids=named)
def test_nothing_asks_a_primitive_what_it_is(file: Path) -> None:
    primitive = re.compile(r"\b(\w+\.)*_?(learner|target|replay|storage|manager)\b")
    of_one = re.compile(r"(Learner|ReplayManager|Storage)\b")
    found = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("hasattr", "isinstance"):
            subject, what = map(ast.unparse, node.args)
            if (primitive.fullmatch(subject) and not what.endswith("Cell")) or of_one.search(what):
                found.append(at(file, node))
    assert found == []


def imported(tree: ast.Module) -> Iterator[str]:
    """Modules that are imported when the file is; those of functions and for type checkers do not count."""
    for node in tree.body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("file", sources("composer"), ids=named)
def test_the_composer_knows_no_backend_by_name(file: Path) -> None:
    folders = {f"pearl.backends.{folder.name}" for folder in (ROOT / "pearl/backends").iterdir() if folder.is_dir()}
    found = {name for name in imported(ast.parse(file.read_text())) if ".".join(name.split(".")[:3]) in folders}
    assert not found or named(file).startswith(NAMING_BACKENDS)


@pytest.mark.parametrize("file", sources(*(room.replace(".", "/") for room in RANKS)), ids=named)
def test_imports_run_one_way(file: Path) -> None:
    module = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    own = next(room for room in RANKS if f"{module}.".startswith(f"{room}."))
    found = set()
    for name in imported(ast.parse(file.read_text())):
        room = next((room for room in RANKS if f"{name}.".startswith(f"{room}.")), None)
        if room is not None and RANKS[room] > RANKS[own]:
            found.add(room)
    assert not found or named(file) in FORMER


@pytest.mark.parametrize("place", [*FORMER, "pearl/actors/exploration.py"])
def test_what_moved_is_found_in_its_former_place_and_nothing_else_is_there(place: str) -> None:
    docstring, *imports = ast.parse((ROOT / place).read_text()).body
    assert isinstance(docstring, ast.Expr)
    assert imports
    assert all(isinstance(node, ast.ImportFrom) for node in imports)
    module = importlib.import_module(place.removesuffix(".py").replace("/", "."))
    names = [alias.name for node in imports if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert all(getattr(module, name).__module__ != module.__name__ for name in names)


def test_pipelines_in_rtl_know_no_composer() -> None:
    found = {name for file in sources("kernels/rtl") for name in imported(ast.parse(file.read_text()))}
    assert found
    assert not [name for name in found if name.split(".")[0] == "composer"]
