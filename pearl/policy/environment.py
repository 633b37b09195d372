"""How a run's environments were made: kept by name with the policy, and made again for evaluations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, get_args

import gymnasium as gym

from pearl.actors.vectorization import VECTORIZATIONS
from pearl.errors import PolicyError
from pearl.policy.plain_values import Json, settings_from_json, settings_to_json
from pearl.policy.source import CodeSource
from pearl.spec import ActorSpec, Scalar, VectorizationName, Wrapper

_ANOTHER_MAKER = (
    "Name what makes the environment now: env=..., on the command line --env MODULE:NAME, or a registered name."
)
_NO_WRAPPERS = "Leave the wrappers out with wrappers=False, on the command line --no-wrappers."


@dataclass(frozen=True)
class WrapperSource:
    """A wrapper and its keyword arguments."""

    source: CodeSource
    arguments: Mapping[str, Scalar]

    @property
    def text(self) -> str:
        """The wrapper by name, with its arguments."""
        return f"{self.source.text}{dict(self.arguments) or ''}"


@dataclass(frozen=True)
class EnvironmentSource:
    """The source of a run's environments, besides a registered name.

    `maker` is the class or function that made them; None for a registered name. `vectorization` is the Actors': some
    kinds prepare and stack frames.
    """

    maker: CodeSource | None = None
    wrappers: tuple[WrapperSource, ...] = ()
    vectorization: VectorizationName = "sync"

    @classmethod
    def of(cls, actors: ActorSpec) -> EnvironmentSource:
        """The source of these Actors' environments."""
        maker = None if isinstance(actors.env, str) else CodeSource.of(actors.env)
        wrappers = (WrapperSource(CodeSource.of(one), dict(options)) for one, options in actors.wrapped)
        return cls(maker, tuple(wrappers), actors.vectorization)

    @property
    def kept_text(self) -> str:
        """The wrappers, or the vector that prepares frames, as evaluations keep them; empty if there are none."""
        prepares = VECTORIZATIONS[self.vectorization].prepares
        return ", ".join(
            [one.text for one in self.wrappers] or [f'frames of vectorization="{self.vectorization}"'] * prepares
        )

    def load_maker(self, run: Path) -> Callable[..., gym.Env[Any, Any]] | None:
        """The class or function that made the environments; PolicyError says why it cannot be had."""
        if self.maker is None:
            return None
        found: Callable[..., gym.Env[Any, Any]] = self.maker.load("environment", gym.Env, run, _ANOTHER_MAKER)
        return found

    def load_wrappers(self, run: Path) -> tuple[Wrapper, ...]:
        """The wrappers, as ActorSpec takes them; PolicyError names one that cannot be had."""
        return tuple(
            (one.source.load("wrapper", gym.Wrapper, run, _NO_WRAPPERS), one.arguments) for one in self.wrappers
        )

    def to_json(self) -> dict[str, Json]:
        """Plain values: names and arguments only."""
        return {
            "maker": None if self.maker is None else dict(vars(self.maker)),
            "wrappers": [{**vars(one.source), "arguments": settings_to_json(one.arguments)} for one in self.wrappers],
            "vectorization": self.vectorization,
        }

    @classmethod
    def from_json(cls, found: Any) -> EnvironmentSource:
        """The inverse; KeyError, TypeError or PolicyError for anything else."""
        maker, kind = found["maker"], found["vectorization"]
        if kind not in get_args(VectorizationName):
            raise PolicyError(
                f"it names the vectorization {kind!r:.80}; there are {', '.join(get_args(VectorizationName))}"
            )
        wrappers = [WrapperSource(_source(one), settings_from_json(one["arguments"])) for one in found["wrappers"]]
        return cls(None if maker is None else _source(maker), tuple(wrappers), cast(VectorizationName, kind))


def environment_text(actors: ActorSpec) -> str:
    """The environment of these Actors by name, with its arguments and what wraps or prepares it."""
    arguments = ", ".join(f"{name}={value!r}" for name, value in sorted(actors.env_kwargs.items()))
    kept = EnvironmentSource.of(actors).kept_text
    return f"{actors.env_name}({arguments})" + (f" in {kept}" if kept else "")


def _source(found: Any) -> CodeSource:
    texts = [found[name] for name in ("module", "name", "file")]
    if not all(isinstance(text, str) for text in texts):
        raise TypeError(f"module, name and file are texts; found {texts!r:.200}")
    return CodeSource(*texts)
