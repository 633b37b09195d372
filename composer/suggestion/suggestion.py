"""Suggests an algorithm and settings for an environment on this machine, each with its reason."""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, get_args

import gymnasium as gym
from rich.console import Group, RenderableType
from rich.text import Text

from composer.calibration import CalibrationStore
from composer.codegen.python_source import literal
from composer.platform import this_cpu
from composer.report import ascii_table, plain
from composer.suggestion.random_steps import try_randomly
from composer.suggestion.update_times import UpdateTimes
from composer.wording import did_you_mean
from pearl.actors.environment import known_environment, probe, reward_threshold
from pearl.algorithms import ALGORITHMS, algorithms_for
from pearl.algorithms.inputs import takes_cnn
from pearl.algorithms.spaces import ActionKind, check_observations
from pearl.algorithms.suggestions import Choice, Facts, RandomSteps, choose_timesteps
from pearl.algorithms.trainer import Trainer, make_trainer, transition_of
from pearl.byte_size import readable_size
from pearl.devices.description import Device
from pearl.errors import ConfigurationError, EnvError, TrainerError
from pearl.replay.memory import free_memory
from pearl.runtime.data_storage import stored_nbytes
from pearl.spec import ActorSpec, ReplaySpec, RolloutSpec, TrainSpec

_TRAINING = {f.name for f in dataclasses.fields(TrainSpec)}
_ROLLOUT = {f.name for f in dataclasses.fields(RolloutSpec)}
_FAST_US, _SLOW_US = 100.0, 1000.0  # of an environment step
_MOST_SLOTS, _LEAST_SLOTS = 1_000_000, 10_000
_MEMORY_SHARE = 4  # a quarter
_ROLLOUT_ENVS = 8  # at least, in all


def _silent(_: str) -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class Suggestion:
    """An algorithm and settings for an environment, by the table of a composition file that they belong to.

    `trainer` has settings of the class and fields of `TrainSpec` and `RolloutSpec`. `facts` are the facts behind the
    choices, in words.
    """

    env: str
    algorithm: Choice
    actors: tuple[Choice, ...]
    trainer: tuple[Choice, ...]
    replay: tuple[Choice, ...]
    program: tuple[Choice, ...]
    facts: Mapping[str, str]
    alternatives: tuple[str, ...] = ()

    @property
    def settings(self) -> tuple[Choice, ...]:
        """Those of the trainer class."""
        return tuple(choice for choice in self.trainer if choice.name not in _TRAINING | _ROLLOUT)

    @property
    def training(self) -> tuple[Choice, ...]:
        """Those of `TrainSpec`."""
        return tuple(choice for choice in self.trainer if choice.name in _TRAINING)

    @property
    def rollout(self) -> tuple[Choice, ...]:
        """Those of `RolloutSpec`."""
        return tuple(choice for choice in self.trainer if choice.name in _ROLLOUT)

    @property
    def tables(self) -> dict[str, tuple[Choice, ...]]:
        """All choices by the table of a composition file."""
        return {
            "actors": self.actors,
            "trainer": self.settings,
            "rollout": self.rollout,
            "training": self.training,
            "replay": self.replay,
            "program": self.program,
        }

    def to_json(self) -> str:
        """A JSON document; exploration settings are tables with their `kind`, as in a composition file."""
        document = {
            "format": "pearl-suggestion",
            "version": 1,
            "env": self.env,
            "algorithm": dataclasses.asdict(self.algorithm),
            "alternatives": self.alternatives,
            "facts": self.facts,
            "settings": [
                {"table": table, "name": c.name, "value": _plain(c.value), "reason": c.reason}
                for table, choices in self.tables.items()
                for c in choices
            ],
        }
        return json.dumps(document, indent=2, allow_nan=False)

    def __rich__(self) -> RenderableType:
        facts = ascii_table(f"What was found of {self.env}", ("", ""))
        facts.show_header = False
        for name, text in self.facts.items():
            facts.add_row(Text(name), Text(text))
        table = ascii_table(f"Suggested for {self.env}", ("table", "setting", "value", "reason"))
        for column in table.columns[:2]:
            column.no_wrap = True
        table.add_row("trainer", "algorithm", Text(self.algorithm.value), Text(self.algorithm.reason))
        for name, choices in self.tables.items():
            for choice in choices:
                table.add_row(name, choice.name, Text(literal(choice.value)), Text(choice.reason))
        return Group(facts, table)

    def __str__(self) -> str:
        return plain(self)


def _plain(value: object) -> object:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return {"kind": type(value).__name__, **{name: v for name, v in fields.items() if v is not None}}
    return value


def values_of(choices: tuple[Choice, ...]) -> dict[str, Any]:
    """Values by name."""
    return {choice.name: choice.value for choice in choices}


# --- an environment alone -------------------------------------------------------------------------------------------


def suggest(
    env: str,
    *,
    algorithm: str | None = None,
    seed: int = 0,
    store: CalibrationStore | None = None,
    report: Callable[[str], None] = _silent,
) -> Suggestion:
    """An algorithm, unless it is named, and settings for the environment `env` on this machine.

    Steps the environment with random actions for up to two seconds and measures gradient steps at a few sizes. Raises
    EnvError for an environment that is unknown, that fails, or whose spaces no built-in algorithm takes;
    ConfigurationError for an unknown algorithm, TrainerError for images with the channels last.
    """
    if algorithm is not None:
        algorithm = next((name for name in ALGORITHMS if name.lower() == algorithm.lower()), algorithm.upper())
    if algorithm is not None and algorithm not in ALGORITHMS:
        raise ConfigurationError(
            f"There is no built-in algorithm {algorithm!r}.{did_you_mean(algorithm, ALGORITHMS)} "
            f"There are {', '.join(ALGORITHMS)}."
        )
    host = this_cpu()
    probed = probe(ActorSpec(env))
    observation_space, action_space = probed.observation_space, probed.action_space
    if algorithm is not None:
        make_trainer(ALGORITHMS[algorithm], observation_space, action_space)  # raises for spaces that it cannot take
    _check_spaces(observation_space, action_space)
    report(f"stepping {env} with random actions")
    tried = try_randomly(ActorSpec(env), observation_space, seed)
    actors = ActorSpec(env, envs_per_actor=int(_envs_per_actor(tried).value))
    facts = _facts(actors, observation_space, action_space, tried, host)
    chosen = _recommended(facts) if algorithm is None else Choice("algorithm", algorithm, "as stated")
    return _suggested(
        ALGORITHMS[chosen.value], chosen, facts, actors, {}, host, store or CalibrationStore(), report, actors_too=True
    )


def _check_spaces(observation_space: gym.Space[Any], action_space: gym.Space[Any]) -> None:
    """Raise EnvError for spaces of which no built-in algorithm takes both, TrainerError for images it cannot take."""
    check_observations("Every built-in algorithm", observation_space)
    takes_cnn(tuple(observation_space.shape or ()))
    kind = type(action_space).__name__
    if kind not in (known := get_args(ActionKind)):
        raise EnvError(
            f"No built-in algorithm takes the actions {action_space}: they take {', '.join(known)}. Wrap the "
            "environment with a gymnasium.ActionWrapper that offers one of these, such as a Discrete number for each "
            "combination."
        )


def _recommended(facts: Facts) -> Choice:
    for name, found in ALGORITHMS.items():
        if reason := found.recommended(facts):
            return Choice("algorithm", name, reason)
    raise EnvError(f"No built-in algorithm is meant for {facts.observation_space} and {facts.action_space}.")


# --- a composition --------------------------------------------------------------------------------------------------


def suggest_settings(
    trainer_class: type,
    actors: ActorSpec,
    observation_space: gym.Space[Any],
    action_space: gym.Space[Any],
    fixed: Mapping[str, Any],
    *,
    host: Device | None = None,
    store: CalibrationStore | None = None,
    report: Callable[[str], None] = _silent,
    seed: int = 0,
) -> Suggestion:
    """Settings for a built-in class, or for one that derives from it: then those that it does not set itself.

    `fixed` are settings that stay: the choices follow them. Nothing is measured for a `host` that is absent. Raises
    TrainerError for other classes, EnvError if the environment fails.
    """
    built_in = check_can_be_suggested(trainer_class)
    own = stated_by(trainer_class)
    report(f"stepping {actors.env_name} with random actions, to choose settings")
    tried = try_randomly(actors, observation_space, seed)
    host = host or this_cpu()
    facts = _facts(actors, observation_space, action_space, tried, host, {**own, **fixed})
    algorithm = Choice("algorithm", trainer_class.__name__, "as stated")
    return _suggested(built_in, algorithm, facts, actors, own, host, store or CalibrationStore(), report)


def check_can_be_suggested(trainer_class: type) -> type[Trainer]:
    """The class, if PEARL knows rules for its settings; TrainerError if not."""
    if not (inspect.isclass(trainer_class) and issubclass(trainer_class, Trainer)):
        raise TrainerError(
            f'settings="auto" is for the classes of pearl.algorithms ({", ".join(ALGORITHMS)}) and for classes that '
            f"derive from them; found {getattr(trainer_class, '__name__', trainer_class)}. Set its settings yourself."
        )
    return trainer_class


def stated_by(trainer_class: type[Trainer]) -> dict[str, Any]:
    """The settings that the user's class sets itself; networks of its own count as hidden sizes."""
    found: dict[str, Any] = {}
    for base in trainer_class.__mro__:
        if base.__module__.startswith("pearl."):
            break
        for name in vars(base):
            if name.startswith("build_"):
                found["hidden_sizes"] = tuple(trainer_class.hidden_sizes)
            elif not name.startswith("_") and not callable(getattr(trainer_class, name)):
                found.setdefault(name, getattr(trainer_class, name))
    return found


def _facts(
    actors: ActorSpec,
    observation_space: gym.Space[Any],
    action_space: gym.Space[Any],
    tried: RandomSteps,
    host: Device,
    fixed: Mapping[str, Any] | None = None,
) -> Facts:
    return Facts(
        observation_space=observation_space,
        action_space=action_space,
        tried=tried,
        time_limit=None if (known := known_environment(actors)) is None else known.max_episode_steps,
        cores=host.cores or 1,
        free_bytes=free_memory(),
        env_count=actors.env_count,
        fixed=fixed or {},
    )


def _suggested(
    trainer_class: type[Trainer],
    algorithm: Choice,
    facts: Facts,
    actors: ActorSpec,
    own: Mapping[str, Any],
    host: Device,
    store: CalibrationStore,
    report: Callable[[str], None],
    *,
    actors_too: bool = False,
) -> Suggestion:
    if "hindsight_goals" in trainer_class._unused:  # what other goals reach is nothing to learn from here
        facts = dataclasses.replace(facts, tried=dataclasses.replace(facts.tried, goals=False))
    settings = {name: value for name, value in facts.fixed.items() if name not in _TRAINING | _ROLLOUT | {"timesteps"}}
    settings = {name: value for name, value in settings.items() if name not in own}
    spaces = facts.observation_space, facts.action_space
    times = UpdateTimes(trainer_class, settings, *spaces, actors, host, store, report)
    facts = dataclasses.replace(facts, update_us=times)
    rollouts = trainer_class.data_flow() == "rollout"
    of_actors: tuple[Choice, ...] = ()
    if actors_too and rollouts:
        of_actors = _actors_for_rollouts(facts)
        facts = dataclasses.replace(facts, env_count=math.prod(choice.value for choice in of_actors))
    found = tuple(choice for choice in trainer_class.suggestions(facts) if choice.name not in facts.fixed)
    if actors_too and not rollouts:
        of_actors = (_actors_for_replay(facts, trainer_class, found), _envs_per_actor(facts.tried))
    threshold = reward_threshold(actors)
    kind: Any = type(facts.action_space).__name__
    return Suggestion(
        env=actors.env_name,
        algorithm=algorithm,
        actors=of_actors,
        trainer=found,
        replay=() if rollouts else _replay(facts, trainer_class, found),
        program=(choose_timesteps(facts),),
        facts={
            "observations": str(facts.observation_space)[:200],
            "actions": str(facts.action_space)[:200],
            "time limit": "none" if facts.time_limit is None else f"{facts.time_limit:,} steps",
            "solved at": "no threshold registered" if threshold is None else f"a mean return of {threshold:g}",
            "random actions": _tried_text(facts),
            "machine": f"{facts.cores} cores, {readable_size(facts.free_bytes)} of memory free",
        },
        alternatives=tuple(name for name in algorithms_for(kind) if name != algorithm.value and _able(name, facts)),
    )


def _able(algorithm: str, facts: Facts) -> bool:
    """Whether an algorithm for such actions takes these: one with a replay needs bounds, and no images."""
    box = isinstance(facts.action_space, gym.spaces.Box)
    return ALGORITHMS[algorithm].data_flow() != "replay" or not box or facts.bounded_vectors


def _tried_text(facts: Facts) -> str:
    tried = facts.tried
    ends = f"{tried.episodes} episodes ended, {tried.terminated} of them by the task"
    if tried.episodes:
        ends += f", after {tried.mean_length:,.0f} steps on average"
    depends = {
        "state": "depends on the state",
        "action": "depends on the action alone",
        "constant": "is always the same",
    }[tried.signal]
    return (
        f"{tried.steps:,} steps of {tried.step_us:,.1f} us; {ends}; the reward {depends}, "
        f"{tried.reward_size:.3g} in size on average"
    )


# --- Actors and replay ----------------------------------------------------------------------------------------------


def _envs_per_actor(tried: RandomSteps) -> Choice:
    us = tried.step_us
    step = f"an environment step takes {us:,.0f} us"
    if us <= _FAST_US:
        return Choice("envs_per_actor", 8, f"{step}: eight share the cost of a policy's call")
    if us <= _SLOW_US:
        return Choice("envs_per_actor", 4, f"{step}: four share the cost of a policy's call")
    return Choice("envs_per_actor", 1, f"{step}, far more than a policy's call: processes in parallel gain more")


def _actors_for_rollouts(facts: Facts) -> tuple[Choice, Choice]:
    us, most = facts.tried.step_us, max(1, facts.cores - 1)
    count = 1 if us <= _FAST_US else most
    why = "one process" if count == 1 else "one core for the Learner, a process on each other one"
    envs, needed = _envs_per_actor(facts.tried), math.ceil(_ROLLOUT_ENVS / count)
    if envs.value < needed:
        envs = Choice("envs_per_actor", needed, f"{_ROLLOUT_ENVS} environments in all decorrelate a rollout")
    return Choice("count", count, f"{facts.cores} cores, {us:,.0f} us a step: {why}"), envs


def _actors_for_replay(facts: Facts, trainer_class: type[Trainer], found: tuple[Choice, ...]) -> Choice:
    known = values_of(found)

    def chosen(name: str) -> Any:
        return known.get(name, facts.fixed.get(name, getattr(trainer_class, name)))

    most, batch = max(1, facts.cores - 1), chosen("batch_size")
    update_us = None if facts.images else facts.update_us(tuple(chosen("hidden_sizes")), batch)
    if update_us is None:
        return Choice("count", 1, 'one, as no gradient step was measured; "auto" searches')
    training_us = update_us * chosen("replay_ratio") / batch
    wanted = math.inf if not math.isfinite(training_us) else facts.tried.step_us / max(training_us, 1e-9)
    count = most if wanted >= most else max(1, math.ceil(wanted))
    return Choice(
        "count",
        count,
        f"a step takes {facts.tried.step_us:,.0f} us, training on it {training_us:,.0f} us; {facts.cores} cores, one "
        "for the Learner",
    )


def _replay(facts: Facts, trainer_class: type[Trainer], of_trainer: tuple[Choice, ...]) -> tuple[Choice, ...]:
    once = _stored_once(facts)
    spec = ReplaySpec(1, **{choice.name: choice.value for choice in once})
    transition = transition_of(trainer_class, facts.observation_space, facts.action_space, facts.fixed)
    row = stored_nbytes(transition, spec)
    fits = facts.free_bytes // _MEMORY_SHARE // row
    goals = values_of(of_trainer).get("hindsight_goals", facts.fixed.get("hindsight_goals", 0))
    rows = TrainSpec(hindsight_goals=goals).rows_per_step  # refuses what is no number
    wanted = min(_MOST_SLOTS, max(_LEAST_SLOTS, rows * facts.timesteps))
    size = max(1, min(wanted, fits))
    again = f", each stored {rows} times," if goals else ""
    why = f"{facts.timesteps:,} steps{again} of {readable_size(row)} each"
    if size < wanted:
        why += f", as many as fit into a quarter of {readable_size(facts.free_bytes)} of free memory"
    else:
        why += f", at most {_MOST_SLOTS:,} (Haarnoja et al. 2018)"
    mode = Choice("mode", "prioritized", "rare, surprising transitions count more (Schaul et al. 2016)")
    return (Choice("size", size, why), mode, *once)


def _stored_once(facts: Facts) -> tuple[Choice, ...]:
    """The replay's options that store shared observations once; none for vectors, which are small."""
    if not facts.images:
        return ()
    if stack := facts.tried.stack:
        why = f"stacks of {stack} frames: each frame stored once instead of {2 * stack} times"
        return (Choice("share_frames", True, why),)
    return (Choice("share_next_obs", True, "images: stored once instead of twice"),)
