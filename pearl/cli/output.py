"""Output and files that the commands share."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pearl.atomic_file import write_text
from pearl.errors import ConfigurationError, GenerationError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_PLAIN_WIDTH = 100  # columns of output that is not shown on a terminal, as in the composer's tables


def console() -> Console:
    """A console that breaks lines like a terminal only where there is one."""
    from rich.console import Console

    terminal = sys.stdout.isatty()
    return Console(
        force_terminal=None if terminal else False, width=None if terminal else _PLAIN_WIDTH, highlight=False
    )


@contextlib.contextmanager
def output_kept_free(free: bool) -> Iterator[None]:
    """If `free`, send all that is printed inside to standard error, so that only the JSON is on standard output.

    Environments print, and so do modules that they import, C code and processes that they start.
    """
    if not free:
        yield
        return
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def facts_table(title: str, facts: Mapping[str, str]) -> Table:
    """A table of two columns."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title), title_justify="left", box=box.ASCII2, show_header=False)
    for name, value in facts.items():
        table.add_row(Text(name), Text(value))
    return table


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a run; raises ConfigurationError."""
    try:
        found = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror or error}.") from error
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{path} is not JSON ({error}). It is written at the end of a run.") from error
    if not isinstance(found, dict):
        raise ConfigurationError(f"{path} must hold an object, as written at the end of a run; found {found!r:.60}.")
    return found


def check_writable(path: Path) -> None:
    """Raise GenerationError if the file cannot be written; called before anything is measured."""
    folder = path.parent
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if path.is_dir():
        reason = "it is a folder"
    elif not folder.is_dir():
        reason = f"{folder} is not a folder"
    elif not os.access(folder, os.W_OK | os.X_OK):
        reason = f"the folder {folder} is not writable"
    else:
        return
    raise GenerationError(f"{path} cannot be written: {reason}. Choose another path.")


def write_file(path: Path, text: str) -> None:
    """Write the file whole or not at all, with its folder; raises GenerationError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text)
    except OSError as error:
        raise GenerationError(f"{path} cannot be written: {error.strerror or error}. Choose another path.") from error
