"""The file with a program's composition (devices, matrix, placement): next to the program, and in each run's folder."""

from __future__ import annotations

import logging
from pathlib import Path

from pearl.atomic_file import write_bytes

COMPOSITION_OF_RUN = "composition.json"

logger = logging.getLogger("pearl.runtime")


def composition_file(program: Path) -> Path:
    """The file next to `program` in which the composer leaves its composition."""
    return program.with_name(f"{program.stem}.composition.json")


def keep_composition(program: Path | None, run_dir: Path) -> None:
    """Copy the program's composition into the folder of its run, so that a report needs nothing but that folder.

    A program that was moved without its composition runs as well; a copy that fails is one warning.
    """
    if program is None or not (source := composition_file(program)).is_file():
        logger.debug("no composition next to the program: reports of this run lack the matrix and the placement")
        return
    try:
        write_bytes(run_dir / COMPOSITION_OF_RUN, source.read_bytes(), durable=False)
    except OSError as error:
        logger.warning("%s cannot be copied into %s: %s. Reports of this run lack it.", source, run_dir, error)
