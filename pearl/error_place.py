"""Where an error comes from, in the words of a person who reads one line and no traceback."""

from __future__ import annotations

import sys
import sysconfig
import traceback
from pathlib import Path

_PACKAGES = Path(__file__).resolve().parent.parent


def described(error: BaseException) -> str:
    """Kind and message of `error`, file, line and function: of the user's own code if it was under way."""
    frames = traceback.extract_tb(error.__traceback__)
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    if not frames:
        return text
    own = [frame for frame in frames if _is_the_users(frame.filename)]
    place = own[-1] if own else frames[-1]
    return f"{text} ({place.filename}, line {place.lineno}, in {place.name})"


def _is_the_users(file: str) -> bool:
    """Neither Python's, nor an installed package's, nor PEARL's, nor the program's, which calls all of them."""
    if file.startswith("<"):
        return False
    path = Path(file).resolve()
    program = getattr(sys.modules.get("__main__"), "__file__", None)
    if program is not None and path == Path(program).resolve():
        return False
    foreign = [Path(folder).resolve() for folder in sysconfig.get_paths().values()]
    foreign += [_PACKAGES / "pearl", _PACKAGES / "composer"]
    return not any(path.is_relative_to(folder) for folder in foreign)
