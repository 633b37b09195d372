"""Attributes that callbacks set in the environments of the Actors, for a curriculum."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from typing import Any

import gymnasium as gym

from pearl.actors.environment import close_envs, make_single_envs
from pearl.actors.notices import MOST_ATTRIBUTE_BYTES, attribute_queue, attribute_text, write_attributes
from pearl.actors.vectorization import VECTORIZATIONS
from pearl.error_place import described
from pearl.errors import ConfigurationError, EnvError
from pearl.spec import ActorSpec


class EnvAttributes:
    """What callbacks have set so far. An environment of the host's own tries each change before the Actors get it."""

    def __init__(self, actors: ActorSpec) -> None:
        self._actors = actors
        self._trial: gym.Env[Any, Any] | None = None
        self._values: dict[str, Any] = {}  # in the order in which they were set last
        self._changes: dict[str, int] = {}  # how often each was set
        self.queue = attribute_queue()

    @property
    def values(self) -> Mapping[str, Any]:
        """The attributes by name; a copy."""
        return copy.deepcopy(self._values)

    def set(self, values: Mapping[str, Any]) -> None:
        """Publish these, and those set before.

        ConfigurationError for a value that JSON has not, for too much of them, and for environments that cannot be
        reached; EnvError for an attribute that the environment lacks or refuses.
        """
        values = _plain(values)
        together = {name: value for name, value in self._values.items() if name not in values} | values
        changes = self._changes | {name: self._changes.get(name, 0) + 1 for name in values}
        if (size := len(attribute_text(together, changes))) > MOST_ATTRIBUTE_BYTES:
            raise ConfigurationError(
                f"Attributes of environments may take {MOST_ATTRIBUTE_BYTES:,} bytes as JSON; {', '.join(together)} "
                f"take {size:,}."
            )
        self._try(values)
        self._values, self._changes = together, changes
        write_attributes(self.queue, together, changes)

    def _try(self, values: Mapping[str, Any]) -> None:
        actors = self._actors
        if not VECTORIZATIONS[actors.vectorization].steps_singles:
            raise ConfigurationError(
                f'The Actors step {actors.env_name} as one vector (vectorization="{actors.vectorization}"), in which '
                'no attributes can be set. Choose "sync" or "async".'
            )
        if self._trial is None:
            (self._trial,) = make_single_envs(actors, 1)
        for name, value in values.items():
            if not _may_be_set(self._trial, name):
                raise EnvError(
                    f"{actors.env_name} has no attribute {name!r} that can be set: neither the environment nor one of "
                    "its wrappers has a number, a text or the like of that name. Define it in the constructor, or as a "
                    "property with a setter."
                )
            try:
                self._trial.set_wrapper_attr(name, value)
            except Exception as error:
                raise EnvError(f"{actors.env_name} does not take {name}={value!r:.100}: {described(error)}.") from error

    def close(self) -> None:
        """Close the environment for trials."""
        if self._trial is not None:
            close_envs(self._actors.env_name, self._trial)
            self._trial = None


def _may_be_set(env: gym.Env[Any, Any], name: str) -> bool:
    """Whether the environment or a wrapper has such an attribute, and Gymnasium does not need it as it is."""
    try:
        present = env.get_wrapper_attr(name)
    except AttributeError:
        return False
    return not (name.startswith("_") or callable(present) or isinstance(present, gym.Space | gym.Env))


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values as Actors will get them."""
    for name, value in values.items():
        try:
            json.dumps(value)
            _check_keys(value)
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigurationError(
                f"An attribute of environments must be a value that JSON has (numbers, texts, booleans, lists, "
                f"dictionaries); found {name}={value!r:.100} ({error})."
            ) from error
    found: dict[str, Any] = json.loads(json.dumps(dict(values)))
    return found


def _check_keys(value: Any) -> None:
    """TypeError for keys that JSON would turn into texts, under which no environment would look."""
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"keys of dictionaries must be texts, not {type(key).__name__}")
    if isinstance(value, dict | list | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            _check_keys(part)
