"""Imports the user's code into a generated program: the trainer class, environments and wrappers."""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, NoReturn

from pearl.error_place import described, is_missing


def import_class(module: str, name: str, *, folder: str, program: str) -> type:
    """The trainer class `name` of `module`, found as `import_object` finds it."""
    found = import_object(module, name, folder=folder, program=program, what="trainer class")
    if not isinstance(found, type):
        file = Path(program).resolve()
        _stop(
            f"{name} of the module {module!r} in {sys.modules[module].__file__} is no class. "
            f'Move it there, or correct folder="{folder}" in {file}.'
        )
    return found


def import_object(module: str, name: str, *, folder: str, program: str, what: str = "class or function") -> Any:
    """The object `name` of `module`, in `folder` or next to the program; actor processes find it there too.

    `folder` counts from the folder of the file `program`. This runs while the program is imported: where the object
    cannot be had, it prints one message that says where it was looked for, and raises SystemExit.
    """
    file = Path(program).resolve()
    searched = list(dict.fromkeys([(file.parent / folder).resolve(), file.parent]))
    importlib.invalidate_caches()
    for path in map(str, reversed(searched)):
        if path not in sys.path and PathFinder.find_spec(module.partition(".")[0], [path]) is not None:
            sys.path.insert(0, path)
    edit = f'Move it there, or correct folder="{folder}" in {file}.'
    try:
        found = getattr(importlib.import_module(module), name)
    except Exception as error:  # whatever the user's module does at import
        if is_missing(module, error):
            looked = " or ".join(map(str, searched))
            _stop(f"There is no module {module!r}, which has the {what} {name}, in {looked}. {edit}")
        if isinstance(error, AttributeError) and error.name == name and module in sys.modules:
            _stop(f"The module {module!r} in {sys.modules[module].__file__} has no {what} {name}. {edit}")
        _stop(f"Importing {module}, which has the {what} {name}, failed: {described(error)}.")
    return found


def _stop(message: str) -> NoReturn:
    print(f"Error: {message}", file=sys.stderr)
    raise SystemExit(1)
