"""rltools' training loops, which its Python package compiles for each problem with the C++ compiler of the machine."""

from __future__ import annotations

import atexit
import contextlib
import importlib.metadata
import sys
import tempfile
import time
from typing import Any

NAME = "rltools"


def version() -> str:
    """Name and version."""
    return f"{NAME} {importlib.metadata.version(NAME)}"


def compile_loop(algorithm: str, environment: Any, *, mkl: bool, **settings: Any) -> tuple[Any, float]:
    """A module with a loop's `State`, and the seconds that its compilation took.

    `environment` makes a Gymnasium environment with actions in [-1, 1], or names the folder of one in C++. With `mkl`,
    matrix products are those of MKL, else loops of rltools' own. What is compiled is removed when the process ends.
    """
    if mkl:
        importlib.metadata.version("mkl")  # rltools would quietly do without
        importlib.metadata.version("mkl-include")
    folder = tempfile.TemporaryDirectory(prefix="rltools-")
    atexit.register(folder.cleanup)
    tempfile.tempdir = folder.name  # where rltools keeps what it compiles, for good
    with contextlib.redirect_stdout(sys.stderr):  # rltools reports its compilation
        import rltools

        start = time.perf_counter()
        loop = getattr(rltools, algorithm.upper())(
            environment, enable_evaluation=False, enable_blas=mkl, force_blas=mkl, **settings
        )
        return loop, time.perf_counter() - start
