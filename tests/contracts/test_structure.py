"""What holds the rooms apart: one-way imports, and no question about a device but to its backend."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
KINDS = {"cpu", "gpu", "fpga"}
# The composer-side table of estimators, and the room of FPGAs, may name the backends that they are written for; the
# platform asks the host's CPU for its cores.
NAMING_BACKENDS = ("composer/modelled_rows.py", "composer/fpga/", "composer/platform.py")
# The loops ask a Learner whether it brings its own; see `pearl.runtime.workers`.
ASKING_LEARNERS = ("pearl/runtime/workers.py",)

# Imports go to rooms of the same rank or a lower one.
RANKS = {
    "pearl.ipc": 0,
    "pearl.devices": 0,
    "pearl.replay": 1,
    "pearl.learner": 1,
    "pearl.algorithms": 1,
    "pearl.backends": 2,
    "pearl.actors": 3,
    "pearl.runtime": 3,
    "composer": 4,
}
# What is yet to be moved: primitives of a backend into its folder, exploration and policies out of the actors' room.
TO_MOVE = {
    *(("pearl.replay." + name, "pearl.backends") for name in ("fpga", "sycl", "sycl_storage")),
    *(("pearl.learner." + name, "pearl.backends") for name in ("fpga_learner", "sycl_learner")),
    *(("pearl.algorithms." + name, "pearl.actors") for name in ("ddpg", "dqn", "sac", "td3", "trainer")),
}


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
    assert found == [] or named(file) in ASKING_LEARNERS


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
            found.add((module, room))
    assert found <= TO_MOVE
