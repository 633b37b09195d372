"""Actors that start without the program: without its imports, the trainer's among them, and without torch.

A spawned process imports the program that spawned it, because something in there may be needed. An actor with a native
policy or a served one, in an environment of an installed package, needs nothing of it.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import pickle
from pathlib import Path

from gymnasium.envs.registration import EnvSpec

from pearl.actors.actor import ActorSetup
from pearl.actors.environment import entry_modules, known_environment

_INSTALLED = {"site-packages", "dist-packages"}


def standalone(setup: ActorSetup) -> tuple[ActorSetup, EnvSpec | None] | None:
    """The setup and environment for an actor that starts without the program; None if it needs the program.

    An environment from the user's own modules may depend on what the program does at import.
    """
    spec = known_environment(setup.spec)
    transition = setup.transition
    if transition is not None and (transition.further or transition.priority is not None):
        return None  # the functions that make these columns and priorities are in modules of the program
    if setup.needs_torch or (spec is None and setup.spec.vectorization != "envpool"):
        return None
    modules = [wrapper.__module__ for wrapper, _ in setup.spec.wrapped]
    if not all(map(_is_installed, (*modules, *(() if spec is None else entry_modules(spec))))):
        return None
    bare = without_trainer(setup)
    try:
        pickled = pickle.dumps((*_picklable(bare), spec))
    except Exception:  # options may fail to pickle in any way: the program then makes the actor
        return None
    return None if names_program(pickled) else (bare, spec if isinstance(setup.spec.env, str) else None)


def without_trainer(setup: ActorSetup) -> ActorSetup:
    """The setup of an actor without a trainer of its own, without what only the trainer needs."""
    return dataclasses.replace(setup, trainer_class=None, settings={})


def _picklable(setup: ActorSetup) -> tuple[object, ...]:
    """The setup without its queue, which only a process that is being spawned can get."""
    if setup.service is None:
        return (setup,)
    return dataclasses.replace(setup, service=None), setup.service.exploration


def names_program(pickled: bytes) -> bool:
    """Whether the pickle refers to the program's own module, so that loading it needs the program."""
    return b"__main__" in pickled


def _is_installed(module: str) -> bool:
    try:
        found = importlib.util.find_spec(module.partition(".")[0])
    except ValueError:  # of a module that was not found by importing it, as the program itself
        return False
    return found is not None and found.origin is not None and bool(_INSTALLED & set(Path(found.origin).parts))
