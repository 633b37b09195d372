"""Finds files of installed Python distributions, such as the libraries of a wheel."""

from __future__ import annotations

import csv
import importlib.metadata
import posixpath
from collections.abc import Callable
from pathlib import Path


def installed_files(distribution: str, matches: Callable[[str], object]) -> list[Path]:
    """Paths of the files of `distribution` whose own names match; empty if it is not installed.

    `importlib.metadata.files` makes an object of every file, which takes long for wheels of thousands.
    """
    try:
        found = importlib.metadata.distribution(distribution)
    except importlib.metadata.PackageNotFoundError:
        return []
    record = found.read_text("RECORD")
    if record is None:  # not a wheel's
        return [Path(str(found.locate_file(file))) for file in found.files or [] if matches(file.name)]
    paths = (row[0] for row in csv.reader(record.splitlines()) if row)
    return [Path(str(found.locate_file(path))) for path in paths if matches(posixpath.basename(path))]
