"""Makes environments, alone or as vectors, with errors that name them."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import logging
import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec

from pearl.actors.normalization import normalization_warnings, observation_normalizers
from pearl.actors.observations import is_prepared, preparation, space_text, unprepared_space
from pearl.actors.vectorization import VECTORIZATIONS, AnyVector, check_singles, make_vector
from pearl.actors.vectorization import make_single_envs as single_envs
from pearl.errors import EnvError
from pearl.spec import ActorSpec

logger = logging.getLogger("pearl.actors")

_LONG_CLOSE_S = 5.0


def check_env_name(env: str) -> None:
    """Raise EnvError unless `env` is a bare name with its version, where it needs one."""
    # "module:Name-v0" makes Gymnasium import a module: a value here must not run code.
    try:
        gym.envs.registration.parse_env_id(env)
    except gym.error.Error as error:
        raise EnvError(f"{env!r} is not the name of an environment, such as 'CartPole-v1': {error}") from error
    if ":" not in env:
        _check_version(env)
    if ":" in env:
        raise EnvError(
            f"{env!r} names a module to import. Import the module that registers the environment in your own program "
            "(or next to your trainer class), and give the bare name."
        )


def _check_version(env: str) -> None:
    """Require a version: Gymnasium resolves a name without one only in some places, with a warning."""
    namespace, name, version = gym.envs.registration.parse_env_id(env)
    if version is not None or env in gym.registry:
        return
    newest = gym.envs.registration.find_highest_version(namespace, name)
    if newest is not None:  # else Gymnasium says that there is none of that name
        raise EnvError(f"Environment {env!r} is named without its version. Did you mean '{env}-v{newest}'?")


@dataclass(frozen=True)
class Probe:
    """An environment as a trainer sees it: its spaces, with prepared observations.

    `preparation` says what is done to observations, `warnings` what is wrong with the environment; both may be empty.
    `normalizers` are the wrappers that normalise observations by running statistics of their own. `unprepared_space`
    is that of the environment's own observations; None where they stay as they are.
    """

    observation_space: gym.Space[Any]
    action_space: gym.Space[Any]
    preparation: str
    warnings: tuple[str, ...]
    normalizers: tuple[str, ...]
    unprepared_space: gym.Space[Any] | None

    @property
    def notes(self) -> tuple[str, ...]:
        """All of that as lines of a log."""
        return (*((self.preparation,) if self.preparation else ()), *self.warnings)


def probe(spec: ActorSpec) -> Probe:
    """Make one environment, look at it and close it. Raises as `make_vector_env` does.

    The working directory stays, also if the environment changes it: relative paths of the user are opened afterwards.
    """
    # The same environment, without a process of its own.
    spec = dataclasses.replace(spec, vectorization="sync") if spec.vectorization == "async" else spec
    with _working_directory_kept():
        envs = make_vector_env(spec, 1)
        own = unprepared_space(envs)
        found = Probe(
            envs.single_observation_space,
            envs.single_action_space,
            preparation(own),
            normalization_warnings(envs, spec.env_name),
            observation_normalizers(envs),
            own if is_prepared(own) else None,
        )
        close_envs(spec.env_name, envs)
    return found


@contextlib.contextmanager
def _working_directory_kept() -> Iterator[None]:
    before = os.open(".", os.O_PATH)  # not its name: a folder that was deleted has none
    try:
        yield
    finally:
        os.fchdir(before)
        os.close(before)


def make_vector_env(spec: ActorSpec, envs: int | None = None) -> AnyVector:
    """Make `envs` copies (default: `spec.envs_per_actor`), with same-step autoreset where possible.

    Observations are prepared (`pearl.actors.observations`). Raises EnvError for an unknown name (with near matches), a
    missing dependency or a constructor that fails.
    """
    check_singles(spec)  # before the kind's package is asked for
    with _naming(spec):
        return make_vector(spec, spec.envs_per_actor if envs is None else envs)


def close_envs(name: str, *envs: AnyVector | gym.Env[Any, Any]) -> None:
    """Close environments, or vectors, that are not needed any more; one warning says where that fails or takes long."""
    failed = ""
    patience = threading.Timer(
        _LONG_CLOSE_S, logger.warning, ("%s does not return from close(): waiting for it.", name)
    )
    patience.daemon = True
    patience.start()
    try:
        for env in envs:
            try:
                env.close()
            except (Exception, SystemExit) as error:
                failed = failed or f"{type(error).__name__}: {error}"
    finally:
        patience.cancel()
    if failed:
        logger.warning("%s failed in close(): %s", name, failed)


def make_single_envs(spec: ActorSpec, count: int) -> list[gym.Env[Any, Any]]:
    """Make `count` of the same environments to be stepped one by one, without autoreset. Raises as make_vector_env."""
    with _naming(spec):
        return single_envs(spec, count)


@contextlib.contextmanager
def _naming(spec: ActorSpec) -> Iterator[None]:
    """Register the environment, and name it in errors."""
    name = spec.env_name
    if isinstance(spec.env, str):
        known = known_environment(spec)
        if spec.vectorization != "envpool":  # EnvPool has names of its own
            check_env_name(name)
        if known is not None:
            register(known)
    try:
        yield
    except EnvError:
        raise
    except gym.error.DependencyNotInstalled as error:
        raise EnvError(f"Environment {name!r} needs a package that is not installed: {error}") from error
    except gym.error.Error as error:
        raise EnvError(
            f"Environment {name!r} cannot be made: {error} Known names: python -c "
            '"import gymnasium; gymnasium.pprint_registry()".'
        ) from error
    except Exception as error:
        raise EnvError(f"Environment {name!r} failed in its constructor: {type(error).__name__}: {error}") from error


def known_environment(spec: ActorSpec) -> EnvSpec | None:
    """Gymnasium's description of the environment; None for a name that only EnvPool knows, or nobody."""
    return VECTORIZATIONS[spec.vectorization].find(spec)


def check_evaluation_env(spec: ActorSpec, observation_space: gym.Space[Any], action_space: gym.Space[Any]) -> None:
    """Raise EnvError unless the environment of evaluations, if it is another, has the spaces of the training's."""
    if (evaluated := spec.evaluation) is spec:
        return
    found = probe(evaluated)
    observations, actions = found.observation_space, found.action_space
    for what, expected, seen in (
        ("observations", (observation_space.shape, observation_space.dtype), (observations.shape, observations.dtype)),
        ("actions", action_space, actions),
    ):
        if expected != seen:
            raise EnvError(
                f"Evaluations need an environment with the spaces of {spec.env_name}, with "
                f"{space_text(observation_space)} and {action_space}; the {what} of eval_env {evaluated.env_name} "
                f"differ: it has {space_text(observations)} and "
                f"{actions}."
            )


def entry_modules(environment: EnvSpec) -> Iterator[str]:
    """The modules that making an environment imports."""
    wrappers = (wrapper.entry_point for wrapper in environment.additional_wrappers)
    for entry in (environment.entry_point, environment.vector_entry_point, *wrappers):
        if entry is not None:
            yield entry.partition(":")[0] if isinstance(entry, str) else entry.__module__


def register(environment: EnvSpec) -> None:
    """Register `environment` with Gymnasium, and import its modules.

    A module may register its environments when it is imported, although they are registered already: by the program, or
    because another process sent the environment here. Gymnasium would warn of each override, so the entries of such
    modules are taken out during the import and put back.
    """
    modules = {name for name in entry_modules(environment) if name not in sys.modules and not _is_gymnasium(name)}
    known = {name: spec for name, spec in gym.registry.items() if not modules.isdisjoint(entry_modules(spec))}
    for name in known:
        del gym.registry[name]
    for name in modules:
        with contextlib.suppress(Exception):  # making the environment reports it
            importlib.import_module(name)
    gym.registry.update(known)
    gym.registry[environment.id] = environment


def _is_gymnasium(module: str) -> bool:
    return module.partition(".")[0] == "gymnasium"


def reward_threshold(spec: ActorSpec) -> float | None:
    """The mean return at which Gymnasium's registry calls the environment solved, if it says one."""
    known = known_environment(spec)
    return None if known is None else known.reward_threshold
