"""Where a generated program imports the user's trainer class from."""

from __future__ import annotations

import ast
import inspect
import keyword
import sys
from collections.abc import Collection
from pathlib import Path

from pearl.errors import GenerationError

_NO_SOURCE = (
    "{name} has no source file that a program could import it from (was it typed into a console or notebook, or made "
    "by a call?). Put it at the top level of a .py file and import it from there."
)


def trainer_import(trainer_class: type, taken: Collection[str]) -> tuple[str, str]:
    """Module to import the class from, and the folder to put on the path first ("" if none is needed).

    GenerationError if a program cannot import it, or if its name is among those `taken`.
    """
    name, module_name = trainer_class.__name__, trainer_class.__module__
    if trainer_class.__qualname__ != name:
        raise GenerationError(
            f"{trainer_class.__qualname__} is defined inside a function or class, where a program cannot import it. "
            "Move it to the top level of a module."
        )
    if not name.isidentifier() or keyword.iskeyword(name) or name in taken:
        raise GenerationError(f"The program cannot call a trainer class {name!r}. Give the class another name.")
    module = sys.modules.get(module_name)
    try:
        file = Path(inspect.getfile(trainer_class)).resolve()
    except (TypeError, OSError) as error:
        raise GenerationError(_NO_SOURCE.format(name=name)) from error
    if getattr(module, name, None) is not trainer_class and (module_name != "__main__" or not _defines(file, name)):
        raise GenerationError(_NO_SOURCE.format(name=name))
    if module_name == "__main__":
        _check_main_guard(file, name)
        return file.stem, str(file.parent)
    root = file.parents[module_name.count(".") + (1 if file.stem == "__init__" else 0)]
    packaged = {"site-packages", "dist-packages"}.intersection(root.parts)
    return module_name, "" if packaged or module_name.split(".")[0] == "pearl" else str(root)


def has_main_guard(file: Path) -> bool:
    """Whether the file may be imported without doing what it does as a program; GenerationError if it is no Python."""
    return any(_is_main_guard(node) for node in _parsed(file).body)


def _is_main_guard(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and "__name__" in ast.dump(node.test)


def _defines(file: Path, name: str) -> bool:
    """Whether importing the file defines the class."""
    statements = [node for node in _parsed(file).body if not _is_main_guard(node)]
    return any(isinstance(n, ast.ClassDef) and n.name == name for top in statements for n in ast.walk(top))


def _parsed(file: Path) -> ast.Module:
    try:
        return ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError) as error:
        raise GenerationError(
            f"{file} cannot be read as Python: {error}. Put the trainer class in a .py file."
        ) from error


def _check_main_guard(file: Path, name: str) -> None:
    if not _defines(file, name):
        raise GenerationError(_NO_SOURCE.format(name=name))
    if not has_main_guard(file):
        raise GenerationError(
            f"{name} is defined in {file.name}, which composes when it is imported: the program could not import the "
            'class without composing again. Put the composing under `if __name__ == "__main__":`.'
        )
    if not file.stem.isidentifier():
        raise GenerationError(
            f"{file.name} cannot be imported: rename it to a Python identifier such as my_trainer.py."
        )
