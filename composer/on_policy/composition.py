"""Checks a problem with rollouts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium as gym

from composer.codegen.program import check_written
from composer.on_policy.problem import RolloutProblem
from pearl.actors.environment import check_evaluation_env, probe
from pearl.actors.observations import stored_dtype
from pearl.algorithms.on_policy import OnPolicyTrainer, rollout_transition
from pearl.algorithms.trainer import make_trainer
from pearl.backends import AUTO, backends
from pearl.byte_size import readable_size
from pearl.errors import CapacityError, ConfigurationError, TrainerError
from pearl.runtime.policy_server import check_served
from pearl.spec import ActorSpec, ReplaySpec, RolloutSpec, TrainSpec, check_minibatches

ROLLOUT_TRAINING = ("batch_size", "gamma")  # fields of TrainSpec that mean something without a replay


def refuse_replay_settings(
    trainer_class: type, replay: ReplaySpec | None, training: Mapping[str, Any], auto: tuple[str, ...], metric: str
) -> None:
    """Raise ConfigurationError for settings that on-policy training does not have."""
    name = trainer_class.__name__
    if replay is not None:
        raise ConfigurationError(
            f"{name} learns from rollouts of its present policy and has no replay: leave set_replay ([replay]) out. "
            "set_rollout ([rollout]) sets the horizon, the epochs and the like."
        )
    if unused := [field for field in training if field not in ROLLOUT_TRAINING]:
        raise ConfigurationError(
            f"{name} learns from rollouts: {', '.join(unused)} of set_training ([training]) would have no effect. "
            "Leave it out; batch_size (of a minibatch) and gamma remain."
        )
    if auto:
        raise ConfigurationError(f'{", ".join(auto)} cannot be "auto" for {name}, which learns from rollouts.')
    if metric != "throughput":
        raise ConfigurationError(
            f"{name} learns from rollouts, which are placed by throughput alone; found {metric!r}."
        )


def _check_supports(trainer: OnPolicyTrainer, forced: str) -> None:
    """Raise TrainerError if a forced implementation of the Learner cannot train the trainer."""
    if forced == AUTO:
        return
    known = {name: made for backend in backends() for name, made in backend.rollout_learners.items()}
    trains = forced in known
    reason = (
        known[forced].supports(trainer) if trains else f"rollouts, which {' and '.join(sorted(known))} Learners take"
    )
    if reason is not None:
        raise TrainerError(
            f"The {forced} Learner cannot train {type(trainer).__name__} (unsupported: {reason}). Leave "
            f"implementation={forced!r} out: then the fastest Learner that can train it is taken."
        )


def _check_memory(horizon: object, actors: ActorSpec, observation_space: gym.Space[Any], room: int) -> None:
    """Raise CapacityError if the observations of a rollout do not fit `room` bytes; what is no horizon passes."""
    if not isinstance(horizon, int):
        return
    each = math.prod(observation_space.shape or ()) * stored_dtype(observation_space).itemsize
    needed = 2 * horizon * actors.env_count * each
    if needed > room:
        raise CapacityError(
            f"A rollout of {horizon} steps x {actors.env_count} environments with observations of "
            f"{readable_size(each)} each needs {readable_size(needed)}, in the Actors' queues and for the Learner; "
            f"{readable_size(room)} of memory are free. Lower horizon, num_actors or envs_per_actor, or make "
            "observations smaller (uint8 images rather than floats)."
        )


def rollout_problem(
    trainer_class: type,
    settings: Mapping[str, Any],
    actors: ActorSpec,
    rollout: Mapping[str, Any],
    training: Mapping[str, Any],
    implementation: str,
    imported_from: str | None,
    say: Callable[[str], None],
    room: int,
) -> tuple[RolloutProblem, OnPolicyTrainer]:
    """The checked problem and a trainer; CapacityError, ConfigurationError, EnvError or TrainerError say what is wrong.

    `room` is the memory in bytes that a program has.
    """
    probed = probe(actors)
    observation_space, action_space = probed.observation_space, probed.action_space
    for note in probed.notes:
        say(note)
    check_evaluation_env(actors, observation_space, action_space)
    horizon = {"horizon": getattr(trainer_class, "horizon", 0), **settings, **rollout}["horizon"]
    _check_memory(horizon, actors, observation_space, room)  # the weights of huge observations may need all memory
    trainer = make_trainer(trainer_class, observation_space, action_space, settings=dict(settings))
    if not isinstance(trainer, OnPolicyTrainer):
        raise TrainerError(
            f"{trainer_class.__name__} must derive from pearl.algorithms.on_policy.OnPolicyTrainer to learn from "
            "rollouts."
        )
    _check_supports(trainer, implementation)
    if inputs := trainer.describe_inputs():
        say(inputs)
    names = [f.name for f in dataclasses.fields(RolloutSpec)]
    spec = RolloutSpec(**{**{name: getattr(trainer, name) for name in names if hasattr(trainer, name)}, **rollout})
    batch = trainer.default_batch(spec.horizon * actors.env_count)
    train = TrainSpec(**{"batch_size": batch, "gamma": trainer.gamma, **training})
    check_minibatches(spec, actors, train)
    trainer.check_batch(train.batch_size)
    transition = rollout_transition(trainer_class, observation_space, action_space, settings)
    if transition.rollout_sequences is not None:
        transition.rollout_sequences.check(spec, train)
    problem = RolloutProblem(
        trainer_class=trainer_class,
        settings=dict(settings),
        observation_space=observation_space,
        action_space=action_space,
        transition=transition,
        rollout=spec,
        train=train,
        actors=actors,
        implementation=implementation,
        imported_from=imported_from,
    )
    check_written(problem, vars(spec))
    check_served(actors, trainer, spec)
    return problem, trainer
