"""Times an Actor in a process of its own: an environment that crashes there does not take the composer with it."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing.connection
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

import gymnasium as gym

from composer.measuring import measure, on_own_thread
from composer.trainer_source import has_main_guard
from pearl.actors.actor import Actor, ActorSetup
from pearl.actors.process import cause_of_death, settle_torch, start_process
from pearl.actors.standalone import names_program, without_trainer
from pearl.errors import EnvError, GenerationError
from pearl.runtime.queues import DataCollectionQueue
from pearl.spec import TransitionSpec

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

logger = logging.getLogger("pearl.composer")

_SILENCE_S = 60.0
_SIGN_OF_LIFE_S = 1.0


def measure_actor(setup: ActorSetup, budget_s: float) -> list[float]:
    """Microseconds of one message of an Actor, started as a run starts it; the list of `measure`.

    An Actor that needs something of the program that composes, or that does not start without it, is timed in this
    process. Raises EnvError if the environment or the policy fails, ends its process, or is silent for 60 s.
    """
    pickled = _pickled(setup)
    if pickled is not None:
        try:
            return _in_own_process(setup, pickled, budget_s)
        except _NotStartedError as error:
            logger.info("The Actor does not start in a process of its own, and is profiled in this one.\n%s", error)
    try:
        return _in_this_process(setup, budget_s)
    except EnvError:
        raise
    except Exception as error:
        raise EnvError(_failed(setup, traceback.format_exc(limit=-8))) from error


class _NotStartedError(Exception):
    """The Actor could not be made in its process; the message is the traceback."""


def _pickled(setup: ActorSetup) -> bytes | None:
    """What the process is sent: the setup and its environment, or None if these cannot be loaded there."""
    bare = setup if setup.policy is None else without_trainer(setup)
    try:
        pickled = pickle.dumps((bare, gym.registry.get(setup.spec.env)))
    except Exception as error:  # whatever an option's own way of pickling raises
        logger.info("The Actor is profiled in this process: it cannot be sent to another (%s).", error)
        return None
    if names_program(pickled) and not _program_is_guarded():
        logger.info("The Actor is profiled in this process: another would have to import the program, which composes.")
        return None
    return pickled


def _program_is_guarded() -> bool:
    file = getattr(sys.modules["__main__"], "__file__", None)  # a console has none
    try:
        return file is not None and has_main_guard(Path(file))
    except GenerationError:
        return False


@on_own_thread
def _in_this_process(setup: ActorSetup, budget_s: float) -> list[float]:
    if setup.policy is None or "torch" in sys.modules:
        import torch

        torch.set_num_threads(1)  # and no more: random numbers are the program's
    return _time_actor(Actor(setup), budget_s, lambda: None)


def _in_own_process(setup: ActorSetup, pickled: bytes, budget_s: float) -> list[float]:
    receive, send = multiprocessing.connection.Pipe(duplex=False)
    process = start_process(
        _run, (pickled, budget_s, send), "profiled-actor", without_program=not names_program(pickled)
    )
    send.close()
    try:
        return _samples(setup, process, receive)
    finally:
        process.kill()
        process.join()
        receive.close()


def _samples(setup: ActorSetup, process: BaseProcess, receive: Connection) -> list[float]:
    started = False
    while receive.poll(_SILENCE_S):
        try:
            found: list[float] | str | None = receive.recv()
        except (EOFError, OSError):
            process.join()
            if not started and process.exitcode == 1:  # Python's own: the program, which it imports, failed
                raise _NotStartedError("The program cannot be imported without running it.") from None
            raise EnvError(_died(setup, cause_of_death(process))) from None
        if isinstance(found, list):
            return found
        if isinstance(found, str):
            raise EnvError(_failed(setup, found)) if started else _NotStartedError(found)
        started = True
    raise EnvError(_silent(setup))


def _run(pickled: bytes, budget_s: float, report: Connection) -> None:
    """Main function of the process: sends None as long as it lives, then the samples, or a traceback."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the composer's to handle
    composer = os.getppid()
    told_at = 0.0

    def live() -> None:
        nonlocal told_at
        if (now := time.monotonic()) - told_at > _SIGN_OF_LIFE_S:
            told_at = now
            if os.getppid() != composer:
                raise SystemExit("The composer is gone.")
            report.send(None)

    try:
        setup, environment = pickle.loads(pickled)
        if environment is not None:
            gym.registry[environment.id] = environment
        if setup.policy is None:
            settle_torch(setup)
        actor = Actor(setup)
        if "torch" in sys.modules:  # the environment's
            settle_torch(setup)
        live()
        report.send(_time_actor(actor, budget_s, live))
    except BaseException:
        with contextlib.suppress(OSError):
            report.send(traceback.format_exc(limit=-8))
        raise SystemExit(1) from None


def _time_actor(actor: Actor, budget_s: float, live: Callable[[], None]) -> list[float]:
    envs = actor.envs
    transition = TransitionSpec.from_spaces(envs.single_observation_space, envs.single_action_space)
    queue = DataCollectionQueue(transition, actor.setup.message_rows(), slots=1)
    message = queue.reserve()
    assert message is not None

    def collect() -> None:
        actor.collect(message)
        live()

    try:
        return measure(collect, budget_s)
    finally:
        actor.close()


def _failed(setup: ActorSetup, found: str) -> str:
    return (
        f"The environment {setup.spec.env} or the policy failed while an actor was profiled: "
        f"{found.rstrip().splitlines()[-1]}. Run the environment on its own; the line is named here:\n{found.rstrip()}"
    )


def _died(setup: ActorSetup, cause: str) -> str:
    env = setup.spec.env
    return (
        f"The environment {env} ended the process in which an actor was profiled ({cause}), as it would end the actors "
        'of a run. Run it on its own to see where: python -X faulthandler -c "import gymnasium as gym; env = '
        f"gym.make('{env}'); env.reset(); [env.step(env.action_space.sample()) for _ in range(1000)]\"."
    )


def _silent(setup: ActorSetup) -> str:
    spec, steps = setup.spec, setup.steps_per_message
    return (
        f"An actor in {spec.env} gave no sign of life for {_SILENCE_S:g} s while it was profiled, and was ended: the "
        f"environment hangs, or needs longer than that to start or for {steps} steps of {spec.envs_per_actor} "
        "environments. Run the environment on its own; if it is that slow, lower envs_per_actor."
    )
