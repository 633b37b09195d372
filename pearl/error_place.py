"""The origin of an error in one line, for users who do not read tracebacks."""

from __future__ import annotations

import sys
import sysconfig
import traceback
from pathlib import Path

_PACKAGES = Path(__file__).resolve().parent.parent


def described(error: BaseException) -> str:
    """Kind and message of `error`, with file, line and function: the innermost in the user's own code, if any."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{type(error).__name__}: {error.msg} ({error.filename}, line {error.lineno})"
    frames = traceback.extract_tb(error.__traceback__)
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    if not frames:
        return text
    program = getattr(sys.modules.get("__main__"), "__file__", None)
    ours = [frame for frame in frames if not _is_a_librarys(frame.filename)]
    # Without the program itself, which is in every traceback.
    users = [f for f in ours if not _is_pearls(f.filename) and not (program and Path(f.filename) == Path(program))]
    place = (users or ours or frames)[-1]
    where = "" if place.name == "<module>" else f", in {place.name}"
    return f"{text} ({place.filename}, line {place.lineno}{where})"


def is_missing(module: str, error: BaseException) -> bool:
    """Whether importing `module` raised `error` since there is none of that name: not one that it imports itself."""
    return isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}.")


def _is_a_librarys(file: str) -> bool:
    foreign = [Path(folder).resolve() for folder in sysconfig.get_paths().values()]
    path = Path(file).resolve()
    return file.startswith("<") or (not _is_pearls(file) and any(path.is_relative_to(folder) for folder in foreign))


def _is_pearls(file: str) -> bool:
    path = Path(file).resolve()
    return path.is_relative_to(_PACKAGES / "pearl") or path.is_relative_to(_PACKAGES / "composer")
