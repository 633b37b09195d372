"""Makes vectors of Gymnasium environments by name."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from typing import Any

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode

from pearl.errors import EnvError
from pearl.spec import ActorSpec


def _check_name(env: str) -> None:
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
    hint = f" Did you mean '{env}-v{newest}'?" if newest is not None else ""
    raise EnvError(f"Environment {env!r} is named without its version.{hint}")


def make_vector_env(spec: ActorSpec, envs: int | None = None) -> gym.vector.VectorEnv[Any, Any, Any]:
    """Make `envs` copies (default: `spec.envs_per_actor`), with same-step autoreset where possible.

    Raises EnvError for an unknown name (with near matches), a missing dependency or a constructor that fails.
    """
    _check_name(spec.env)
    if (known := gym.registry.get(spec.env)) is not None:
        register(known)
    count = spec.envs_per_actor if envs is None else envs
    vector_kwargs: dict[str, Any] = {}
    env_kwargs: dict[str, Any] = dict(spec.env_kwargs)
    if spec.vectorization == "sync":
        vector_kwargs["autoreset_mode"] = AutoresetMode.SAME_STEP
    try:
        return gym.make_vec(
            spec.env,
            num_envs=count,
            vectorization_mode=spec.vectorization,
            vector_kwargs=vector_kwargs,
            **env_kwargs,
        )
    except gym.error.DependencyNotInstalled as error:
        raise EnvError(f"Environment {spec.env!r} needs a package that is not installed: {error}") from error
    except gym.error.Error as error:
        raise EnvError(
            f"Environment {spec.env!r} cannot be made: {error} Known names: python -c "
            '"import gymnasium; gymnasium.pprint_registry()".'
        ) from error
    except Exception as error:
        raise EnvError(
            f"Environment {spec.env!r} failed in its constructor: {type(error).__name__}: {error}"
        ) from error


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


def autoreset_mode(envs: gym.vector.VectorEnv[Any, Any, Any]) -> AutoresetMode:
    """How the vector resets environments whose episode ended."""
    mode = envs.metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP)
    return AutoresetMode(mode)


def reward_threshold(env: str) -> float | None:
    """The mean return at which Gymnasium's registry calls the environment solved, if it says one."""
    return gym.spec(env).reward_threshold
