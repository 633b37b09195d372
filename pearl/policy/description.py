"""The file `policy.json` of a run folder: a policy without its weights, that is spaces, algorithm and settings.

A trainer class that only changes settings of a built-in algorithm is described by the algorithm's name and those
settings: loading its policy runs no code of the user. Of a class with code of its own the file says where it was
imported from.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gymnasium as gym

import pearl
from pearl.algorithms import ALGORITHMS
from pearl.algorithms.trainer import TrainerLike, is_as_built_in, schedule_settings_of, settings_of
from pearl.atomic_file import write_text
from pearl.errors import PolicyError
from pearl.policy.environment import EnvironmentSource
from pearl.policy.plain_values import Json, settings_from_json, settings_to_json, space_from_json, space_to_json
from pearl.policy.source import module_of

POLICY_FILE = "policy.json"
CHECKPOINTS = "checkpoints"
FORMAT, FORMAT_VERSION = "pearl policy", 2
_LONGEST = 64 * 2**20

logger = logging.getLogger("pearl.runtime")


@dataclass(frozen=True)
class TrainerSource:
    """A trainer class: its name, and the module and absolute path of the file that it was imported from.

    `algorithm` names the built-in algorithm of which it changes nothing but settings; None if it has code of its own.
    """

    name: str
    algorithm: str | None
    module: str
    file: str


@dataclass(frozen=True)
class PolicyDescription:
    """A policy but for its weights. `settings` are the trainer's; None if they are not plain values.

    `unshared_normalization` names the wrappers that normalised observations by running statistics of their own, which
    no file holds. `made` says what made the environments, beyond a registered name. `unprepared_space` is that of the
    environment's own observations where the policy takes prepared ones (`pearl.actors.observations`), else None.
    """

    environment: str
    env_kwargs: Mapping[str, Any]
    observation_space: gym.Space[Any]
    action_space: gym.Space[Any]
    trainer: TrainerSource
    settings: Mapping[str, Any] | None = field(default_factory=dict)
    unshared_normalization: tuple[str, ...] = ()
    made: EnvironmentSource = field(default_factory=EnvironmentSource)
    unprepared_space: gym.Space[Any] | None = None

    @classmethod
    def of(
        cls,
        trainer: TrainerLike,
        settings: Mapping[str, Any],
        *,
        environment: str,
        env_kwargs: Mapping[str, Any],
        observation_space: gym.Space[Any],
        action_space: gym.Space[Any],
        unshared_normalization: tuple[str, ...] = (),
        made: EnvironmentSource | None = None,
        unprepared_space: gym.Space[Any] | None = None,
    ) -> PolicyDescription:
        """The description of a run's policy, whose trainer was made with `settings`."""
        source = _source(type(trainer))
        stated = dict(settings)
        if source.algorithm is not None:
            names = settings_of(ALGORITHMS[source.algorithm]) - {"callbacks"}
            stated = {name: getattr(trainer, name) for name in sorted(names)}
        # Schedules are for training alone, and may name code.
        schedules = schedule_settings_of(type(trainer))
        plain: dict[str, Any] | None = {name: value for name, value in stated.items() if name not in schedules}
        try:
            settings_to_json(plain or {})
        except PolicyError:
            plain = None
        return cls(
            *(environment, dict(env_kwargs), observation_space, action_space, source, plain),
            *(unshared_normalization, made or EnvironmentSource(), unprepared_space),
        )

    def to_json(self, checkpoints: Path | None = None) -> str:
        """The text of `policy.json`; PolicyError if the spaces or the environment's arguments have none.

        `checkpoints` is the folder of the run's checkpoints where that is not the run folder's own.
        """
        content: dict[str, Json] = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "pearl_version": pearl.__version__,
            "environment": self.environment,
            "env_kwargs": settings_to_json(self.env_kwargs),
            "observation_space": space_to_json(self.observation_space),
            "action_space": space_to_json(self.action_space),
            "trainer": dict(vars(self.trainer)),
            "settings": None if self.settings is None else settings_to_json(self.settings),
            "unshared_normalization": list(self.unshared_normalization),
            "made": self.made.to_json(),
            "unprepared_space": None if self.unprepared_space is None else space_to_json(self.unprepared_space),
        }
        if checkpoints is not None:
            content["checkpoints"] = str(checkpoints)
        return json.dumps(content, indent=1, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str, where: str) -> PolicyDescription:
        """Read what `to_json` wrote; PolicyError, naming `where`, for another version or anything else."""
        try:
            content = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise PolicyError(f"{where} is not JSON ({error}). Take it from the run folder again.") from error
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise PolicyError(f'{where} does not say "format": "{FORMAT}": it describes no policy of PEARL.')
        version = content.get("format_version")
        if type(version) is not int or version != FORMAT_VERSION:
            raise PolicyError(
                f"{where} has the format version {version!r} (written by PEARL {content.get('pearl_version')!r}); this "
                f"PEARL, {pearl.__version__}, reads version {FORMAT_VERSION}. Load the policy with the PEARL that "
                "wrote it, or train again."
            )
        try:
            return cls._parsed(content)
        except PolicyError as error:
            raise PolicyError(f"{where} cannot be read: {error}. Take it from the run folder again.") from error
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise PolicyError(
                f"{where} is damaged ({type(error).__name__}: {error}). Take it from the run folder again."
            ) from error

    @classmethod
    def _parsed(cls, content: Mapping[str, Any]) -> PolicyDescription:
        trainer = TrainerSource(**content["trainer"])
        texts = (content["environment"], trainer.name, trainer.module, trainer.file)
        if not all(isinstance(text, str) for text in texts):
            raise TypeError(f"environment and trainer are texts; found {texts!r:.200}")
        if trainer.algorithm is not None and trainer.algorithm not in ALGORITHMS:
            raise PolicyError(f"it names the algorithm {trainer.algorithm!r}; there are {', '.join(ALGORITHMS)}")
        settings, unprepared = content["settings"], content.get("unprepared_space")
        return cls(
            content["environment"],
            settings_from_json(content["env_kwargs"]),
            space_from_json(content["observation_space"]),
            space_from_json(content["action_space"]),
            trainer,
            None if settings is None else settings_from_json(settings),
            tuple(map(str, content["unshared_normalization"])),
            EnvironmentSource.from_json(content["made"]),
            None if unprepared is None else space_from_json(unprepared),
        )


def _source(trainer_class: type) -> TrainerSource:
    base = next((c for c in trainer_class.__mro__ if ALGORITHMS.get(c.__name__) is c), None)
    algorithm = base.__name__ if base is not None and is_as_built_in(trainer_class) else None
    module, file = module_of(trainer_class)
    return TrainerSource(trainer_class.__qualname__, algorithm, module, "" if file is None else str(file))


def write_description(description: PolicyDescription, folder: Path, checkpoints: Path | None = None) -> None:
    """Write `policy.json` into a run's folder; where that fails, one warning says that no policy can be loaded."""
    try:
        elsewhere = None if checkpoints is None or is_own(checkpoints, folder) else checkpoints
        write_text(folder / POLICY_FILE, description.to_json(elsewhere), durable=False)
    except (OSError, PolicyError) as error:
        logger.warning(
            "%s cannot be written: %s pearl.load_policy will not load this run.", folder / POLICY_FILE, error
        )


def is_own(checkpoints: Path, folder: Path) -> bool:
    """Whether `checkpoints`, however it is spelled, is the folder of checkpoints inside the run folder `folder`."""
    return os.path.realpath(checkpoints) == os.path.realpath(folder / CHECKPOINTS)  # Path.resolve fails for loops


def checkpoints_of(folder: Path) -> Path:
    """Where the checkpoints of the run in `folder` are."""
    try:
        content = json.loads(_read(folder / POLICY_FILE))
    except (OSError, ValueError, RecursionError):
        content = None
    stated = content.get("checkpoints") if isinstance(content, dict) else None
    return Path(stated) if isinstance(stated, str) else folder / CHECKPOINTS


def read_description(file: Path) -> PolicyDescription:
    """The description in `file`; PolicyError if it is missing, damaged or of another version."""
    try:
        content = _read(file)
    except FileNotFoundError:
        raise PolicyError(
            f"There is no {file.name} in {file.parent}: it is no folder of a run, or the run is of a version of "
            "PEARL before policies could be loaded. A program's --run-dir says where its run goes."
        ) from None
    except OSError as error:
        raise PolicyError(f"{file} cannot be read: {error.strerror or error}.") from error
    if len(content) > _LONGEST:
        raise PolicyError(f"{file} is longer than {_LONGEST} bytes: it is no description of a policy.")
    return PolicyDescription.from_json(content.decode("utf-8", errors="replace"), str(file))


def _read(file: Path) -> bytes:
    with file.open("rb") as stream:
        return stream.read(_LONGEST + 1)
