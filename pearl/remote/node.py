"""Shared by all Ray workers of a run: the versions that must agree, and the user's code."""

from __future__ import annotations

import multiprocessing.spawn
import os
import pickle
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import pearl

_PROGRAM = ("init_main_from_name", "init_main_from_path")


def versions() -> dict[str, str]:
    """The versions that must agree on all nodes; Ray's only where it is imported, as in its driver and its workers."""
    found = {"Python": platform.python_version(), "pearl-toolkit": pearl.__version__, "NumPy": np.__version__}
    ray = sys.modules.get("ray")
    return found if ray is None else {**found, "Ray": ray.__version__}


def about() -> dict[str, str]:
    """Versions, node and process."""
    return {**versions(), "node": platform.node(), "pid": str(os.getpid())}


@dataclass(frozen=True)
class Package:
    """Something pickled for another node.

    `program` is how `multiprocessing` imports the program first, empty if that is not needed; `paths` is where its
    modules are found.
    """

    pickled: bytes
    program: Mapping[str, Any]
    paths: Sequence[str]

    @classmethod
    def of(cls, content: object, *, with_program: bool) -> Package:
        """Pack `content`; `with_program` if it can only be loaded in the program."""
        preparation = multiprocessing.spawn.get_preparation_data("remote")
        program = {name: preparation[name] for name in _PROGRAM if name in preparation} if with_program else {}
        return cls(pickle.dumps(content), program, tuple(path for path in sys.path if path))

    def loaded(self) -> Any:
        """The content, in a worker. Raises FileNotFoundError or ModuleNotFoundError for code that its node lacks."""
        sys.path.extend(path for path in self.paths if path not in sys.path)
        remedy = "have the nodes share its folder, or install what it imports as a package"
        if self.program:
            file = self.program.get("init_main_from_path")
            if file is not None and not Path(file).exists():
                raise FileNotFoundError(
                    f"The program {file} is not on node {platform.node()}, and what runs there needs its modules: "
                    f"{remedy}."
                )
            multiprocessing.spawn.prepare(dict(self.program))
        try:
            return pickle.loads(self.pickled)
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"Node {platform.node()} does not have the module {error.name!r} of the program: {remedy}."
            ) from error
