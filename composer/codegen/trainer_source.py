"""Finds the modules from which a generated program imports the user's code: trainer, environment, wrappers."""

from __future__ import annotations

import ast
import inspect
import keyword
import sys
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pearl.errors import GenerationError
from pearl.schedules import function_of

_NO_SOURCE = (
    "{name} has no source file from which a program could import it (was it typed into a console or notebook, read "
    "from standard input, or made by a call?). Put it at the top level of a .py file and import it from there."
)
_INSTALLED = {"site-packages", "dist-packages"}


@dataclass(frozen=True)
class UserImport:
    """A program imports a class or function of the user as `name` from `module`.

    The program puts `folder` at the front of the path; None for an installed module.
    """

    module: str
    name: str
    folder: Path | None = None


def trainer_import(trainer_class: type, taken: Collection[str], imported_from: str | None = None) -> UserImport:
    """How a program imports the class: from the module that defines it, or from `imported_from`.

    GenerationError if a program cannot import it, or if its name is one of `taken`.
    """
    if imported_from is not None:
        return _from_named_module(trainer_class, taken, imported_from)
    return object_import(trainer_class, taken, "trainer class")


def object_import(made: Any, taken: Collection[str], what: str) -> UserImport:
    """How a program imports a class or function; GenerationError as `trainer_import`, which calls it `what`."""
    name, module_name = made.__name__, made.__module__
    if made.__qualname__ != name:
        raise GenerationError(
            f"{made.__qualname__} is defined inside a function or class, where a program cannot import it. "
            "Move it to the top level of a module."
        )
    _check_name(name, taken, what)
    module = sys.modules.get(module_name)
    try:
        file = Path(inspect.getfile(made)).resolve()
    except (TypeError, OSError) as error:
        raise GenerationError(_NO_SOURCE.format(name=name)) from error
    in_program = module_name == "__main__"
    if not file.is_file() or not (_defines(file, name) if in_program else getattr(module, name, None) is made):
        raise GenerationError(_NO_SOURCE.format(name=name))
    if in_program:
        _check_main_guard(file, name)
        return UserImport(file.stem, name, file.parent)
    check_module_name(module_name, file.name)
    folder = _folder(module_name, file)
    return UserImport(module_name if folder is not None else _shortest(module_name, name, made), name, folder)


def schedule_import(name: str) -> UserImport:
    """How a program finds the function that a schedule names "module:function"; GenerationError if it cannot."""
    function = function_of(name)
    if getattr(function, "__module__", None) == "__main__":
        return object_import(function, (), "schedule")
    module, _, attribute = name.partition(":")
    stated = getattr(sys.modules[module], "__file__", None)
    if stated is None:
        raise GenerationError(_NO_SOURCE.format(name=attribute))
    return UserImport(module, attribute, _folder(module, Path(stated).resolve()))


def _shortest(module_name: str, name: str, made: Any) -> str:
    """The shortest package of an installed module that offers the object, which is how its users write it."""
    parts = module_name.split(".")
    packages = (".".join(parts[:length]) for length in range(1, len(parts) + 1))
    return next(one for one in packages if getattr(sys.modules.get(one), name, None) is made)


def _from_named_module(trainer_class: type, taken: Collection[str], module_name: str) -> UserImport:
    module = sys.modules.get(module_name)
    names = [name for name, value in vars(module).items() if value is trainer_class] if module is not None else []
    if not names:
        raise GenerationError(
            f"imported_from={module_name!r} must be the name of a module that has been imported and that has the "
            f"class {trainer_class.__name__}; found {'no such class' if module else 'no such module'}. Correct it, or "
            "leave it out."
        )
    name = trainer_class.__name__ if trainer_class.__name__ in names else names[0]
    _check_name(name, taken)
    stated = getattr(module, "__file__", None)
    if module_name == "__main__" or stated is None:
        raise GenerationError(_NO_SOURCE.format(name=name))
    file = Path(stated).resolve()
    check_module_name(module_name, file.name)
    return UserImport(module_name, name, _folder(module_name, file))


def _folder(module_name: str, file: Path) -> Path | None:
    root = file.parents[module_name.count(".") + (1 if file.stem == "__init__" else 0)]
    return None if _INSTALLED.intersection(root.parts) or module_name.split(".")[0] == "pearl" else root


def _check_name(name: str, taken: Collection[str], what: str = "trainer class") -> None:
    if not name.isidentifier() or keyword.iskeyword(name) or name in taken:
        raise GenerationError(
            f"A program cannot have a {what} named {name!r}. Give the {what.split()[-1]} another name."
        )


def check_module_name(module_name: str, file: str) -> None:
    """Raise GenerationError if a program cannot import the module of the file `file` by its name."""
    wrong = next((p for p in module_name.split(".") if not p.isidentifier() or keyword.iskeyword(p)), None)
    if wrong is not None:
        why = "a keyword of Python" if keyword.iskeyword(wrong) else "no Python identifier"
        raise GenerationError(
            f"{file} cannot be imported by the name {module_name!r}, because {wrong!r} is {why}: rename it, for "
            "example to my_trainer.py."
        )


def has_main_guard(file: Path) -> bool:
    """Whether the file can be imported without running as a program; GenerationError if it is not Python."""
    return any(_is_main_guard(node) for node in _parsed(file).body)


def _is_main_guard(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and "__name__" in ast.dump(node.test)


def _defines(file: Path, name: str) -> bool:
    """Whether importing the file defines the class or function, outside of its main guard."""
    statements = [node for node in _parsed(file).body if not _is_main_guard(node)]
    return any(
        isinstance(n, ast.ClassDef | ast.FunctionDef) and n.name == name for top in statements for n in ast.walk(top)
    )


def _parsed(file: Path) -> ast.Module:
    try:
        return ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError) as error:
        raise GenerationError(
            f"{file} cannot be read as Python: {error}. Put the trainer class in a .py file."
        ) from error


def _check_main_guard(file: Path, name: str) -> None:
    if not has_main_guard(file):
        raise GenerationError(
            f"{name} is defined in {file.name}, which composes when it is imported: the program could not import the "
            'class without composing again. Put the composing under `if __name__ == "__main__":`.'
        )
    check_module_name(file.stem, file.name)
