"""The keys of the calibration store: everything that a measurement depends on."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from gymnasium.envs.registration import load_env_creator

import pearl
from composer.calibration import CalibrationKey
from composer.problem import TrainingProblem
from pearl.actors.vectorization import environment_of
from pearl.backends import backend_of, learners
from pearl.backends.protocol import compiled_kernels
from pearl.devices.description import Device
from pearl.spec import ActorSpec

# PEARL's Python files that run in a measurement, without those that an implementation of the Learner lists.
_METHOD = sorted(Path(__file__).parent.glob("*.py"))
_HOST_LOOP = ("runtime/host_iteration.py", "runtime/queues.py", "runtime/workers.py")
_SOURCES = {
    "actor": ("actors/*.py", "algorithms/*.py", "exploration.py"),
    "actors together": ("actors/*.py", "algorithms/*.py", "exploration.py", "rollout/*.py", "ipc/*.py", "runtime/*.py"),
    "policy": ("actors/*.py", "algorithms/*.py"),
    "replay": ("replay/*.py", "backends/**/*.py"),
    "storage": ("replay/*.py", "backends/**/*.py", "runtime/data_storage.py"),
    "learner": (),
    "advantages": ("rollout/*.py", "backends/**/*.py"),
    "rollout learner": ("rollout/*.py", "learner/*.py", "algorithms/*.py", "backends/**/*.py"),
    "rollout program": (
        *("actors/*.py", "algorithms/*.py", "rollout/*.py", "learner/*.py", "backends/**/*.py"),
        *("ipc/*.py", "runtime/*.py"),
    ),
    "rollout actor": ("actors/*.py", "algorithms/*.py", "rollout/*.py"),
    "messages": ("replay/requests.py", "ipc/*.py", *_HOST_LOOP),
    "program": (
        *("actors/*.py", "algorithms/*.py", "exploration.py", "replay/*.py", "backends/**/*.py"),
        *("ipc/*.py", "runtime/*.py"),
    ),
    "learners": ("local_sgd/*.py", "replay/*.py", "backends/**/*.py", "ipc/*.py", *_HOST_LOOP),
    "pair": ("replay/*.py", "backends/**/*.py", "ipc/*.py", "runtime/queues.py", "runtime/workers.py"),
}

# Variables that choose among the kernels of pearl._native when it is loaded.
_CHOOSING_KERNELS = ("PEARL_ISA", "PEARL_MATMUL")

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # of an object, which is another one in each process

_NOT_OF_USERS = {"pearl", *sys.stdlib_module_names}


@functools.cache
def kernel_hash(implementation: str | None = None, module: str = "pearl._native") -> str:
    """A hash of the compiled kernels; with an `implementation` of the Learner, of its sources instead."""
    return _file_hash([compiled_kernels(module)] if implementation is None else learners()[implementation].sources)


@functools.cache
def source_hash(primitive: str) -> str:
    """A hash of the Python files that measure the primitive or run in it, without the Learner's own."""
    package = Path(pearl.__file__).parent
    sources = (file for pattern in _SOURCES[primitive] for file in sorted(package.glob(pattern)))
    return _file_hash([*_METHOD, *sources])


def calibration_key(
    problem: TrainingProblem,
    primitive: str,
    device: Device,
    fingerprint: str,
    parameters: Mapping[str, Any],
    networks: Callable[[], str],
    implementation: str | None = None,
) -> CalibrationKey:
    """Everything that a measurement of `primitive` depends on; with `implementation` the Learner takes part in it.

    `fingerprint` is the device's; `networks()` describes the trainer's, and is not asked for where no trainer runs. The
    kernels of an absent device are not known: its key has none.
    """
    shapes = " ".join(f"{f.name}{list(f.shape)}{f.dtype}" for f in problem.transition.fields)
    everything = {
        **parameters,
        "env_count": problem.actors.env_count,
        "vectorization": problem.actors.vectorization,
    }
    if goals := problem.train.hindsight_goals:  # further rows of each step
        everything["hindsight_goals"] = goals
    if primitive not in ("actor", "rollout actor", "actors together", "policy", "advantages"):
        everything["batch_size"] = problem.train.batch_size
    if primitive not in ("replay", "storage", "advantages"):
        everything |= {
            "trainer": problem.trainer_class.__qualname__,
            "trainer_source": _source_hash(problem.trainer_class),
            "settings": repr(sorted(problem.settings.items())),
            "networks": networks(),
        }
    if "env" in everything:  # an Actor takes part
        everything["env_source"] = _environment_hash(problem.actors)
    if implementation is not None:
        everything["implementation"] = implementation
    hashes: list[str] = []
    if not device.absent:
        module = backend_of(device).kernels
        hashes = [kernel_hash(implementation, module), source_hash(primitive)]
        if implementation is not None and primitive in ("pair", "program", "learners"):
            hashes.append(kernel_hash(module=module))
        hashes += [f"{name}={value}" for name in _CHOOSING_KERNELS if (value := os.environ.get(name))]
    return CalibrationKey(
        primitive,
        fingerprint,
        tuple(everything.items()),
        shapes,
        "float32",
        pearl.__version__,
        _torch_version(),
        "-".join(hashes),
    )


@functools.cache
def _torch_version() -> str:
    """The installed version, or "" where only native primitives can run."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return ""


def _file_hash(files: Iterable[Path]) -> str:
    found = hashlib.sha256()
    for file in files:
        found.update(_digest(file))
    return found.hexdigest()[:16]


@functools.cache
def _digest(file: Path) -> bytes:
    """Of a file's content, which is read once: the hashes of most primitives have the same files."""
    return hashlib.sha256(file.read_bytes()).digest()


def _environment_hash(actors: ActorSpec) -> str:
    """A hash of the files that define the environment and its wrappers, and of how the environment is registered."""
    known = environment_of(actors)
    if known is None:
        return _source_hash(*(wrapper for wrapper, _ in actors.wrapped))
    entries = [known.entry_point or known.vector_entry_point]
    if actors.vectorization == "vector_entry_point":
        entries.append(known.vector_entry_point)
    creators = [*entries, *(wrapper.entry_point for wrapper in known.additional_wrappers)]
    made = [load_env_creator(creator) if isinstance(creator, str) else creator for creator in creators]
    registered = repr((known.kwargs, known.max_episode_steps, [w.kwargs for w in known.additional_wrappers]))
    registered = _ADDRESS.sub("", registered)
    files = _source_hash(*made, *(wrapper for wrapper, _ in actors.wrapped))
    return hashlib.sha256(f"{files} {registered}".encode()).hexdigest()[:16]


def _source_hash(*made: object) -> str:
    """A hash of the files that define classes or functions: an edit of a file makes measurements invalid.

    Of the bases of a class, those of PEARL and of Python's own library are left out.
    """
    sources: dict[str, bytes] = {}
    for one in made:
        bases = one.__mro__[1:] if isinstance(one, type) else ()
        for found in (one, *(base for base in bases if base.__module__.partition(".")[0] not in _NOT_OF_USERS)):
            with contextlib.suppress(OSError, TypeError):  # TypeError for what no file defines
                file = inspect.getfile(found)  # type: ignore[arg-type]
                sources[file] = sources.get(file) or Path(file).read_bytes()
    return hashlib.sha256(b"".join(sources.values())).hexdigest()[:16] if sources else ""
