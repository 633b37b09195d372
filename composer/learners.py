"""Composing several Learners: options that they refuse, by name, and the time of their averages."""

from __future__ import annotations

from collections.abc import Sequence

from composer.problem import Problem
from pearl.actors.actor import message_rows
from pearl.backends import AUTO, backend_of, devices_of, runs_on
from pearl.devices.description import Device
from pearl.errors import ConfigurationError, PearlError
from pearl.local_sgd.local_learner import check_banks
from pearl.local_sgd.parameters import TrainerParameters
from pearl.runtime.collection import insertion_rows
from pearl.spec import LearnersSpec

ON_HOST_ONLY = "several Learners and their banks run on the CPU of the host, and of nodes of a cluster"


def refuse_two_searches(learners: Sequence[str], auto: Sequence[str]) -> None:
    """Raise ConfigurationError where `auto` settings are to be searched, for which programs are tried."""
    if auto:
        raise ConfigurationError(
            f'set_learners ([learners]) has {" and ".join(learners)} "auto", and {", ".join(auto)} is "auto" too, '
            "for which programs of one Learner are tried. State one of them: the numbers found with one Learner, say."
        )


def refuse_learners(trainer_class: type, learners: LearnersSpec) -> None:
    """Raise ConfigurationError for several Learners of a class that learns from rollouts."""
    if learners.count > 1:
        raise ConfigurationError(
            f"{trainer_class.__name__} learns from rollouts, and only algorithms with a replay have several Learners: "
            f"found set_learners({learners.count}) ([learners] count). Leave it out, or take such an algorithm."
        )


def check_learners(problem: Problem, trainer: object, auto: Sequence[str]) -> None:
    """Raise ConfigurationError, ReplayError or TrainerError, with a remedy, for what several Learners refuse."""
    spec = problem.learners
    try:
        if auto:
            raise ConfigurationError(
                f'{", ".join(auto)} cannot be "auto": the search tries programs of one Learner. State a number.'
            )
        if problem.transition.sequence is not None:
            raise ConfigurationError(
                f"{problem.trainer_class.__name__} trains on sequences, which banks do not hold. Use one Learner, or "
                "an algorithm without a recurrent policy."
            )
        check_banks(problem.replay, problem.transition, problem.train.batch_size, spec.count)
        rows = message_rows(problem.actors, problem.train)
        least = insertion_rows(problem.replay, problem.actors, problem.train, rows) + rows
        slots = problem.replay.capacity // spec.count
        if least > slots:
            raise ConfigurationError(
                f"An insertion has up to {least} transitions, and a bank {slots} slots. Raise the replay's size to "
                f"{least * spec.count} or more, or use fewer Learners, or fewer environments."
            )
        TrainerParameters(trainer, spec.moments)
    except PearlError as error:
        raise type(error)(f"{spec.count} Learners (set_learners, [learners]): {error}") from error


def check_host(host: Device, implementation: str) -> None:
    """Raise ConfigurationError where the host, or a forced implementation of the Learner, has no several Learners."""
    if host.absent:
        raise ConfigurationError(
            "Several Learners are composed on the machine that they run on, as their averages are timed there; found "
            f"the absent host {host.name}. Compose there, or use one Learner."
        )
    if implementation != AUTO and not runs_on(implementation, host):
        raise ConfigurationError(
            f"{ON_HOST_ONLY}; the {implementation} Learner runs on {devices_of(implementation)}. Leave the "
            "implementation out, or use one Learner."
        )


def runs_several(device: Device, host: str) -> bool:
    """Whether a device can run several Learners and their banks, on a machine with this host."""
    return device.name == host and backend_of(device).host_cores == "threads"
