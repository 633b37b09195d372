"""Times an Actor in a separate process, so that an environment that crashes does not end the composer."""

from __future__ import annotations

import json
import logging
import pickle
import shlex
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from composer.codegen.trainer_source import has_main_guard
from composer.profiling.measuring import MOST_SAMPLES, measure, on_own_thread
from pearl.actors.actor import ActorSetup, VectorActor
from pearl.actors.child_process import ChildProcess
from pearl.actors.environment import known_environment, register
from pearl.actors.process import settle_torch
from pearl.actors.report import Report, Silence
from pearl.actors.rollout_actor import make_actor
from pearl.actors.standalone import names_program, without_trainer
from pearl.errors import EnvError, GenerationError, PearlError
from pearl.runtime.queues import DataCollectionQueue
from pearl.spec import ActorSpec

logger = logging.getLogger("pearl.composer")

_SILENCE_S = 60.0
_LISTEN_INTERVAL_S = 0.005


Work: TypeAlias = Callable[[ActorSetup, float, Report], "list[float]"]
"""Makes an Actor's environments and measures for about so many seconds, with signs of life."""


def measure_actor(setup: ActorSetup, budget_s: float) -> list[float]:
    """Microseconds of one message of an Actor that is started as in a run; the samples of `measure`.

    Raises as `measure_apart` does.
    """
    return measure_apart(setup, budget_s, MOST_SAMPLES, _time_in_own_process, _time_in_this_process)


def measure_apart(setup: ActorSetup, budget_s: float, most_numbers: int, apart: Work, here: Work) -> list[float]:
    """What `apart` measures in the environments of an Actor, at most `most_numbers` numbers, in its own process.

    An Actor that needs objects of the composing program, or does not start without it, is measured in this process, by
    `here`. Raises EnvError if the environment or the policy fails, ends its process, or is silent for 60 s; another
    PearlError that says all may keep its kind.
    """
    pickled = pickled_setup(setup)
    if pickled is not None:
        try:
            return _in_own_process(setup, pickled, apart, budget_s, Report(most_numbers))
        except _NotStartedError as error:
            logger.info("The Actor does not start in a process of its own, and is profiled in this one.\n%s", error)
    if setup.spec.vectorization == "async":
        raise EnvError(
            'vectorization="async" starts processes that import the program, which composes when it is imported. Put '
            'the composing under `if __name__ == "__main__":`, and everything that the environment needs at the top '
            "level of a module."
        )
    try:
        return here(setup, budget_s, Report())
    except Exception as error:
        if _says_all(error):
            raise
        raise EnvError(_failed(setup, traceback.format_exc(limit=-8))) from error


class _NotStartedError(Exception):
    """The Actor could not be created in its process; the message is the traceback."""


def pickled_setup(setup: ActorSetup) -> bytes | None:
    """The setup and its environment for another process; None if they cannot be loaded there."""
    bare = setup if setup.policy is None else without_trainer(setup)
    try:
        pickled = pickle.dumps((bare, known_environment(setup.spec) if isinstance(setup.spec.env, str) else None))
    except Exception as error:  # an option's own pickling may raise anything
        logger.info("The Actor is profiled in this process: it cannot be sent to another (%s).", error)
        return None
    if names_program(pickled) and not program_is_guarded():
        logger.info("The Actor is profiled in this process: another would have to import the program, which composes.")
        return None
    return pickled


def program_is_guarded() -> bool:
    """Whether the composing program may be imported by a process that it starts."""
    file = getattr(sys.modules["__main__"], "__file__", None)  # a console has none
    try:
        return file is not None and has_main_guard(Path(file))
    except GenerationError:
        return False


@on_own_thread
def _time_in_this_process(setup: ActorSetup, budget_s: float, report: Report) -> list[float]:
    if setup.policy is None or "torch" in sys.modules:
        import torch

        torch.set_num_threads(1)  # nothing else: the random state belongs to the program
    return _time_actor(make_actor(setup), budget_s)


def _in_own_process(setup: ActorSetup, pickled: bytes, work: Work, budget_s: float, report: Report) -> list[float]:
    process = ChildProcess(
        _run, (pickled, work, budget_s, report), "profiled-actor", without_program=not names_program(pickled)
    )
    try:
        return _samples(setup, process, report)
    finally:
        process.kill()


def _samples(setup: ActorSetup, process: ChildProcess, report: Report) -> list[float]:
    silence = Silence(report)
    while silence.look() < _SILENCE_S:
        ended = process.wait(_LISTEN_INTERVAL_S)  # before the report is read, as it does not change afterwards
        if (samples := report.result) is not None:
            return samples
        if ended:
            raise _end_of(setup, process, report)
    spec = setup.spec
    raise EnvError(
        f"An actor in {spec.env_name} gave no sign of life for {_SILENCE_S:g} s while it was profiled, and was ended: "
        "the environment hangs, or needs longer than that to start or for a step of "
        f"{spec.envs_per_actor} environments. Run the environment on its own; if it is that slow, lower envs_per_actor."
    )


def _end_of(setup: ActorSetup, process: ChildProcess, report: Report) -> Exception:
    """The error for a process that ended without samples."""
    if (failure := report.failure) is not None:
        return EnvError(failure) if report.is_ready else _NotStartedError(failure)
    if not report.is_ready and process.exit_code == 1:  # Python's own exit code: importing the program failed
        return _NotStartedError("The program cannot be imported without running it.")
    env = setup.spec.env_name
    return EnvError(
        f"The environment {env} ended the process in which an actor was profiled ({process.cause_of_death}), as it "
        f"would end the actors of a run. Run it on its own to see where: {_command_alone(setup.spec)}"
    )


def _command_alone(spec: ActorSpec) -> str:
    """A command that makes the environment and steps it with random actions."""
    # In JSON texts have double quotes, which the shell's single ones may hold.
    values = {
        name: json.dumps(value) if isinstance(value, str) else repr(value) for name, value in spec.env_kwargs.items()
    }
    arguments = [f"{name}={value}" for name, value in values.items()]
    if isinstance(spec.env, str):
        made = f"import gymnasium as gym; env = gym.make({', '.join([json.dumps(spec.env), *arguments])})"
    else:
        made = f"from {spec.env.__module__} import {spec.env.__name__} as make; env = make({', '.join(arguments)})"
    code = f"{made}; env.reset(); [env.step(env.action_space.sample()) for _ in range(1000)]"
    return f"python -X faulthandler -c {shlex.quote(code)}"


def _run(pickled: bytes, work: Work, budget_s: float, report: Report) -> None:
    """Main function of the process: reports signs of life, then the samples or the reason for their absence."""
    setup, environment = pickle.loads(pickled)
    try:
        if environment is not None:
            register(environment)
        report.deliver(work(setup, budget_s, report))
    except BaseException as error:
        report.fail(str(error) if _says_all(error) else _failed(setup, traceback.format_exc(limit=-8)))
        raise SystemExit(1) from None


def _time_in_own_process(setup: ActorSetup, budget_s: float, report: Report) -> list[float]:
    if setup.policy is None:
        settle_torch(setup)
    actor = make_actor(setup, on_step=report.beat)
    if "torch" in sys.modules:  # the environment's
        settle_torch(setup)
    report.ready()
    return _time_actor(actor, budget_s)


def _time_actor(actor: VectorActor, budget_s: float) -> list[float]:
    setup = actor.setup
    queue = DataCollectionQueue(actor.transition, setup.message_rows(), slots=1, further=setup.further_fields)
    message = queue.reserve()
    assert message is not None

    try:
        return measure(lambda: actor.collect(message), budget_s)
    finally:
        actor.close()


def _says_all(error: BaseException) -> bool:
    """Whether the message of an error is complete without its traceback."""
    return isinstance(error, EnvError) or (isinstance(error, PearlError) and error.__cause__ is None)


def _failed(setup: ActorSetup, found: str) -> str:
    return (
        f"The environment {setup.spec.env_name} or the policy failed while an actor was profiled. Run the environment "
        f"on its own; the line is named here:\n{found.rstrip()}"
    )
