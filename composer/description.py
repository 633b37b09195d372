"""The user's description of the machine and the problem, for a Composer."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from composer.metric import Metric, parse_metric
from composer.stated_learners import stated_learners, stated_nodes
from composer.tunables import start_of, without_auto
from composer.vectorization import first_choice
from pearl.algorithms.trainer import Trainer, check_trainer_class, is_trainer, schedule_settings_of
from pearl.algorithms.update_frequency import respelled
from pearl.backends import AUTO, check_implementation
from pearl.errors import ConfigurationError, PlacementError
from pearl.replay.schedules import SCHEDULES
from pearl.schedules import plain_schedule
from pearl.spec import (
    ONE_LEARNER,
    ActorSpec,
    Exponent,
    InitialPriority,
    LearnersSpec,
    MomentsRule,
    ReplayMode,
    ReplaySpec,
    RolloutSpec,
    Scalar,
    StorageKind,
    TrainSpec,
    Wrapper,
)

if TYPE_CHECKING:
    import gymnasium as gym

    from composer.placement import Placement
    from composer.platform import Node
    from composer.suggestion.suggestion import Suggestion
    from composer.zoo import ZooSettings

_Method = TypeVar("_Method", bound=Callable[..., None])

_OF_THE_PROGRAM = {
    "seed": "of each run (--seed of the program, or seed of runtime_gen)",
    "device": "chosen by the composer among those of set_device_file, or of this machine",
}
ACTOR_FIELDS = {"num_actors": "count", "envs_per_actor": "envs_per_actor"}  # of ActorSpec, by their argument

CHOOSE_OF_ROLLOUTS = (
    "With a trainer that learns from rollouts, choose one of composer.placement.candidates after run(): "
    "runtime_gen(placement=composer.placement.choosing(candidate))."
)


def _takes_numpy(method: _Method) -> _Method:
    """The method, given Python's numbers, texts and truth values in place of NumPy's scalars.

    A program is a text, and could not state those of NumPy.
    """

    @functools.wraps(method)
    def taken(self: Description, *arguments: Any, **named: Any) -> None:
        method(self, *map(_in_python, arguments), **_in_python(named))

    return taken  # type: ignore[return-value]


def _in_python(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    return {name: _in_python(one) for name, one in value.items()} if type(value) is dict else value


class Description:
    """The machine and the problem as `set_*` describe them, in fields.

    Composing works with a copy. Two results come back from there, so that later runs need not find them again:
    `suggested`, the settings that were left to the composer, and `cluster_nodes`. They stay until a value changes that
    they follow from. This module imports nothing that only composing needs.
    """

    def __init__(
        self, *, progress: bool = True, calibration: str | Path | None = None, remeasure: bool = False
    ) -> None:
        self.progress = progress
        self.store_path = None if calibration is None else path_of("calibration of a Composer", calibration)
        self.remeasure = remeasure
        self.device_file: Path | None = None
        self.connection_file: Path | None = None
        self.cluster: tuple[str, tuple[str, ...] | None] | None = None
        self.cluster_nodes: tuple[Node, ...] | None = None
        self.metric: Metric = "throughput"
        self.actors: ActorSpec | None = None
        self.any_vectorization = False
        self.any_policy_server = False
        self.wrappers: tuple[Wrapper, ...] = ()
        self.trainer_class: type | None = None
        self.settings: dict[str, Any] = {}
        self.chooses_settings = False
        self.suggested: Suggestion | None = None
        self.implementation = AUTO
        self.imported_from: str | None = None
        self.replay: ReplaySpec | None = None
        self.training: dict[str, Any] = {}
        self.auto: tuple[str, ...] = ()
        self.learners = ONE_LEARNER
        self.auto_learners: tuple[str, ...] = ()
        self.rollout: dict[str, Any] = {}
        self.edited: Placement | None = None
        self.timesteps: int | None = None  # of the last run, which chosen settings follow

    def set_device_file(self, path: str | Path) -> None:
        """The device CSV (docs/csv_reference.md).

        Without one, `run` discovers this machine's devices, except those that share their silicon with another device.
        """
        self.device_file = path_of("set_device_file", path)
        self.suggested = None

    def set_connection_file(self, path: str | Path) -> None:
        """The connection CSV."""
        self.connection_file = path_of("set_connection_file", path)

    def set_cluster(self, address: str, nodes: Sequence[str] | None = None) -> None:
        """A Ray cluster on whose nodes Actors and several Learners run (docs/remote_actors.md): "auto", or "host:port".

        `run` connects to it, measures latency and bandwidth between this machine and its other nodes, all or those
        that `nodes` names, and the speed of their cores. It puts Learners where they train most, and gives each node a
        part of the Actors, by its cores and by what its connection carries. Start the program with --ray and the
        address. Rows of the device CSV with a `node` need no address if the connection CSV has rows for them. Raises
        ConfigurationError for names that are no list.
        """
        if not isinstance(address, str) or not address:
            raise ConfigurationError(f'set_cluster takes an address, "auto" or "host:port"; found {address!r}.')
        listed = isinstance(nodes, list | tuple) and all(isinstance(node, str) for node in nodes)
        if nodes is not None and not listed:
            raise ConfigurationError(f"nodes of set_cluster must be a list of names; found {nodes!r}.")
        self.cluster = address, None if nodes is None else tuple(nodes)
        self.cluster_nodes = None

    def set_opt_metric(self, metric: str) -> None:
        """What to optimise: "throughput" (EPS) or "power_efficiency" (EPS per watt)."""
        self.metric = parse_metric(metric)

    @_takes_numpy
    def set_actors(
        self,
        num_actors: int | str,
        env: str | Callable[..., gym.Env[Any, Any]],
        *,
        envs_per_actor: int | str = 8,
        env_kwargs: Mapping[str, Scalar] | None = None,
        vectorization: str = "sync",
        timeout_s: float = ActorSpec.timeout_s,
        eval_env: str | Callable[..., gym.Env[Any, Any]] | None = None,
        eval_env_kwargs: Mapping[str, Scalar] | None = None,
        policy_server: str = AUTO,
    ) -> None:
        """`num_actors` processes, each stepping `envs_per_actor` copies of a Gymnasium environment.

        `env` is its registered name, or a class or function at the top level of a module, which the program imports.
        Either number may be "auto": `run` then searches the one with which the program is fastest, all waiting for data
        included. With `vectorization="auto"`, `run` measures an Actor with each kind of vector that the environment
        has here, and takes the fastest. With `policy_server="auto"`, `run` also measures the Actors with their policy
        on each GPU, in a process that serves all of them (docs/cuda.md), and takes it if they become faster; without a
        GPU it is "none". The other arguments are the fields of `ActorSpec`.
        """
        any_vectorization = isinstance(vectorization, str) and vectorization == AUTO
        any_policy_server = isinstance(policy_server, str) and policy_server == AUTO
        counts, auto = without_auto({"num_actors": num_actors, "envs_per_actor": envs_per_actor})
        sizes: dict[str, Any] = {ACTOR_FIELDS[name]: value for name, value in (start_of(auto) | counts).items()}
        actors = ActorSpec(
            env,
            **sizes,
            env_kwargs=dict(env_kwargs or {}) if env_kwargs is None or isinstance(env_kwargs, Mapping) else env_kwargs,
            vectorization="sync" if any_vectorization else vectorization,  # type: ignore[arg-type]
            timeout_s=timeout_s,
            eval_env=eval_env,
            eval_env_kwargs=dict(eval_env_kwargs) if isinstance(eval_env_kwargs, Mapping) else eval_env_kwargs,
            policy_server="none" if any_policy_server else policy_server,
        )
        self.actors = self._wrapped(actors, self.wrappers, any_vectorization)
        self.any_vectorization, self.any_policy_server = any_vectorization, any_policy_server
        self.auto = (*(name for name in self.auto if name not in ACTOR_FIELDS), *auto)
        self.suggested = None

    def set_wrappers(self, wrappers: Sequence[Wrapper]) -> None:
        """Wrappers of every environment, applied in this order, in Actors and in evaluations.

        Each is a class (or a function of one environment) at the top level of a module, or a pair of one and its
        keyword arguments: `[TimeAwareObservation, (RescaleAction, {"min_action": -1.0, "max_action": 1.0})]`.
        Gymnasium's own need no import in the module of the trainer class. Raises ConfigurationError for others.
        """
        if not isinstance(wrappers, list | tuple):
            raise ConfigurationError(
                f"set_wrappers takes a list of wrappers, such as [A, (B, {{...}})]; found {wrappers!r}."
            )
        if self.actors is not None:
            self.actors = self._wrapped(self.actors, tuple(wrappers), self.any_vectorization)
        self.wrappers = tuple(wrappers)

    @staticmethod
    def _wrapped(actors: ActorSpec, wrappers: tuple[Wrapper, ...], any_vectorization: bool) -> ActorSpec:
        wrapped = dataclasses.replace(actors, wrappers=wrappers)
        return first_choice(wrapped) if any_vectorization else wrapped

    @_takes_numpy
    def set_train_function(
        self,
        learner: type,
        *,
        implementation: str = AUTO,
        imported_from: str | None = None,
        settings: str | None = None,
        **values: Any,
    ) -> None:
        """The trainer class; other keyword arguments set its class-level settings or go to its constructor.

        The program imports the class from the module that defines it, or from the module `imported_from`, which may
        also register environments.

        `implementation` of the Learner: "auto" measures all implementations that can train the trainer and places the
        fastest; "native" (C++, on CPUs), "torch", "sycl" (on SYCL devices) or "fpga" forces one. Raises
        ConfigurationError for any other, TrainerError for a class that is no trainer; `run` raises TrainerError where
        the forced implementation cannot train the trainer.

        With `settings="auto"`, for a class of pearl.algorithms or one that derives from it, `run` chooses what neither
        the class, nor these arguments, nor `set_training` or `set_rollout` set, by the rules of `pearl suggest`; also
        the replay, without `set_replay`. `suggestion` then has the choices and their reasons.
        """
        if settings is not None and (not isinstance(settings, str) or settings != AUTO):
            raise ConfigurationError(
                f'settings must be "auto", or be left out; found {settings!r}. Give each setting as an argument of its '
                "own, such as learning_rate=1e-4."
            )
        for name in _OF_THE_PROGRAM.keys() & values:
            raise ConfigurationError(
                f"set_train_function takes settings of the trainer class; {name} is {_OF_THE_PROGRAM[name]}. Leave it "
                "out there."
            )
        if imported_from is not None and not isinstance(imported_from, str):
            raise ConfigurationError(f"imported_from must be the name of a module, a text; found {imported_from!r}.")
        check_trainer_class(learner)
        if settings == AUTO:
            from composer.suggestion.suggestion import check_can_be_suggested

            check_can_be_suggested(learner)
        check_implementation(implementation, auto=True)
        values = respelled(values) if is_trainer(learner) else values
        self.settings = {**values, **_plain_schedules(learner, values)}
        self.trainer_class, self.implementation, self.imported_from = learner, implementation, imported_from
        self.chooses_settings = settings == AUTO
        self.suggested = None

    @_takes_numpy
    def set_replay(
        self,
        size: int,
        mode: ReplayMode = "prioritized",
        fanout: int | str = 16,
        *,
        alpha: Exponent = 0.6,
        beta: Exponent = 0.4,
        beta_final: float = 1.0,
        stratified: bool = True,
        replacement: bool = True,
        max_times_sampled: int = 0,
        initial_priority: InitialPriority = "max",
        priority_epsilon: float = 1e-6,
        storage: StorageKind = "ram",
        share_next_obs: bool = False,
        share_frames: bool = False,
    ) -> None:
        """A replay buffer of `size` transitions; `fanout` of its sum tree is a power of two or "auto".

        The other arguments are the fields of `ReplaySpec`. `alpha` and `beta` may be schedules that can be written
        into a program: `pearl.replay.Constant` and `Linear`.
        """
        for name, value in (("alpha", alpha), ("beta", beta)):
            if callable(value) and not isinstance(value, SCHEDULES):
                known = " or ".join(kind.__name__ for kind in SCHEDULES)
                raise ConfigurationError(
                    f"{name} must be a number or a schedule that can be written into a program ({known} of "
                    f"pearl.replay); found {value!r}."
                )
        self.replay = ReplaySpec(
            size,
            mode,
            fanout,  # type: ignore[arg-type]
            alpha,
            beta,
            beta_final,
            stratified=stratified,
            replacement=replacement,
            max_times_sampled=max_times_sampled,
            initial_priority=initial_priority,
            priority_epsilon=priority_epsilon,
            storage=storage,
            share_next_obs=share_next_obs,
            share_frames=share_frames,
        )
        self.suggested = None

    @_takes_numpy
    def set_training(self, **schedule: Any) -> None:
        """Override fields of `TrainSpec`: batch_size, replay_ratio, learning_starts, priority_update_delay, ...

        Other fields come from the trainer class if it sets them, else from the defaults of `TrainSpec`.
        `priority_update_delay` and `insertion_rows` may be "auto": `run` then searches the value with which the program
        is fastest. `replay_ratio` may be "auto", too: `run` then takes the ratio at which neither Actors nor Learner
        wait, within `least_updates_per_step` and `most_updates_per_step` of the trainer class, times the batch. The
        placement gives the reason.
        """
        unknown = set(schedule) - set(inspect.signature(TrainSpec).parameters)
        if unknown:
            known = ", ".join(inspect.signature(TrainSpec).parameters)
            raise ConfigurationError(f"set_training knows {known}; found {', '.join(sorted(unknown))}.")
        stated, auto = without_auto(schedule)
        training: dict[str, Any] = {**stated, **start_of(auto)}
        TrainSpec(**training)
        self.training = training
        self.auto = (*(name for name in self.auto if name in ACTOR_FIELDS), *auto)
        self.suggested = None

    @_takes_numpy
    def set_learners(
        self,
        count: int | str,
        average_every: int | str = LearnersSpec.average_every,
        moments: MomentsRule = LearnersSpec.moments,
        overlap: int = LearnersSpec.overlap,
        nodes: Mapping[str, int] | None = None,
    ) -> None:
        """Train with `count` Learners in processes of their own, which average their parameters (docs/local_sgd.md).

        Each has its part of every batch, and of the replay a bank. `average_every` are the gradient steps of each
        between two averages (H). `moments` of the optimizers are each Learner's own ("keep"), averaged ("average"), or
        reset at an average ("reset"). While an average is made, each Learner makes `overlap` further steps, at most H;
        with 0 it waits. `count` 1 is the program of one Learner. `nodes` says how many of a stated `count` run on each
        node of a cluster ("": this machine); without it, the composer puts them where they train most, if it has a
        cluster (`set_cluster`, or devices with a node).

        Either number may be "auto": `run` then measures 2, 4, 8, ... Learners, as far as cores, batch and replay
        allow, and takes the fastest, with the shortest interval that is nearly as fast; one Learner, where several
        gain little or are not possible. `placement.learners_choice` has what was compared. Raises ConfigurationError
        for a value that `LearnersSpec` refuses; `run` names what a stated count of several Learners cannot do.
        """
        numbers, auto = stated_learners(count, average_every, overlap)
        places = stated_nodes(nodes, count)
        self.learners = LearnersSpec(**numbers, moments=moments, overlap=overlap, nodes=places)
        self.auto_learners = auto

    @_takes_numpy
    def set_rollout(self, **settings: Any) -> None:
        """Override fields of `RolloutSpec` for on-policy training: horizon, epochs, gae_lambda, policy_lag, ...

        Other fields come from the trainer class if it sets them, else from the defaults of `RolloutSpec`. Algorithms
        that learn from a replay have no rollouts: `run` refuses them.
        """
        known = inspect.signature(RolloutSpec).parameters
        if unknown := set(settings) - set(known):
            raise ConfigurationError(f"set_rollout knows {', '.join(known)}; found {', '.join(sorted(unknown))}.")
        RolloutSpec(**settings)
        self.rollout = settings
        self.suggested = None

    def set_zoo(
        self,
        file: str | Path,
        env: str,
        algorithm: str | None = None,
        *,
        leave_out: Sequence[str] = (),
        implementation: str = AUTO,
    ) -> ZooSettings:
        """Everything that a file of RL Zoo, such as its hyperparams/dqn.yml, states for the environment `env`.

        `algorithm` is dqn, qrdqn, ddpg, td3, sac, tqc, ppo, ppo_lstm or a2c; by default the file's name. `leave_out`
        names settings of the entry to do without. Calls the other `set_*`, which may be called again afterwards, and
        returns what it found: `timesteps` is for `run` and `runtime_gen`. Differences from Stable-Baselines3 are
        printed. Raises ConfigurationError that lists all settings without a counterpart.
        """
        from composer.zoo import zoo_settings

        found = zoo_settings(file, env, algorithm, leave_out=leave_out)
        self.set_wrappers(found.wrappers)
        self.set_actors(1, env=found.env, **found.actors)
        self.set_train_function(learner=found.algorithm, implementation=implementation, **found.trainer)
        self.replay = None
        if found.replay:
            self.set_replay(**found.replay)
        self.set_training(**found.training)
        self.set_rollout(**found.rollout)
        for note in found.notes:
            self.say(f"{found.source}: {note}")
        return found

    @property
    def learns_from_rollouts(self) -> bool:
        """Whether the trainer class learns from rollouts of its present policy, and has no replay."""
        learner = self.trainer_class
        return inspect.isclass(learner) and issubclass(learner, Trainer) and learner.data_flow() == "rollout"

    def set_placement(self, placement: Placement) -> None:
        """An edited placement of an earlier composition, whose choice `run` and `profile` take, not Algorithm 1's.

        A choice may be edited: `replay_manager`, `learner`, `storage`, `implementation`, and the parameters of a
        candidate. They raise PlacementError, which names the field, if anything else differs from what they compose.
        Without device files they compose for the platform of the placement: discovery would measure its memory again.
        Trainers that learn from rollouts have no edited placements. Raises PlacementError for one of theirs, and for a
        placement without `evidence`.
        """
        from composer.placement import Placement

        if not isinstance(placement, Placement):
            raise PlacementError(
                "set_placement takes a Placement, which trainers that learn from a replay have; found a "
                f"{type(placement).__name__}. {CHOOSE_OF_ROLLOUTS}"
            )
        if placement.evidence is None:
            raise PlacementError(
                "The edited placement has no evidence, which states the platform it was composed for: an older version "
                "wrote it, or the key was removed. Compose again and edit the new file."
            )
        self.edited = placement

    def changed_since(self, earlier: Description) -> list[str]:
        """The `set_*` whose values differ from those in an earlier copy of this description."""
        before, now = earlier._stated(), self._stated()
        return [name for name, value in now.items() if not _are_equal(value, before[name])]

    def _stated(self) -> dict[str, object]:
        """The arguments of each `set_*`, without the results of composing."""
        actors = None if self.actors is None else {**vars(self.actors), "wrappers": ()}
        if actors is not None and self.any_vectorization:
            actors["vectorization"] = AUTO  # `set_wrappers` changes the first value to try
        if actors is not None and self.any_policy_server:
            actors["policy_server"] = AUTO
        of_actors = [name for name in self.auto if name in ACTOR_FIELDS]
        of_training = [name for name in self.auto if name not in ACTOR_FIELDS]
        return {
            "set_device_file": self.device_file,
            "set_connection_file": self.connection_file,
            "set_cluster": self.cluster,
            "set_opt_metric": self.metric,
            "set_actors": (actors, of_actors),
            "set_wrappers": self.wrappers,
            "set_train_function": (
                self.trainer_class,
                self.settings,
                self.chooses_settings,
                self.implementation,
                self.imported_from,
            ),
            "set_replay": self.replay,
            "set_training": (self.training, of_training),
            "set_learners": (self.learners, self.auto_learners),
            "set_rollout": self.rollout,
            "set_placement": self.edited,
        }

    def say(self, text: str) -> None:
        """Print a line, indented, if progress is to be seen."""
        if self.progress:
            print(f"  {text}", flush=True)


def path_of(taker: str, path: object) -> Path:
    """The path; ConfigurationError names the method that takes it."""
    if not isinstance(path, str | os.PathLike) or not (text := os.fspath(path)) or not isinstance(text, str):
        raise ConfigurationError(f'{taker} takes a path, a text such as "devices.csv" or a Path; found {path!r}.')
    return Path(text)


def own_containers(value: Any) -> Any:
    """`value` with copies of the dictionaries, lists and tuples in it, and with everything else as it is."""
    if type(value) is dict:
        return {key: own_containers(one) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(own_containers, value))
    return value


def _are_equal(ours: object, theirs: object) -> bool:
    """Whether both are equal. Arrays, whose comparison has no truth value, are not: no program states any."""
    try:
        return bool(ours == theirs)
    except Exception:  # a user's value may raise anything
        return False


def _plain_schedules(learner: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """The schedules among the settings of a trainer class, functions by their names."""
    stated = [name for name in schedule_settings_of(learner) if name in values]
    return {name: plain_schedule(values[name], f"{learner.__name__}.{name}") for name in stated}
