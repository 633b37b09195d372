"""The Composer (paper, Listing 1): turns a short description into a runtime program for this machine."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import gymnasium as gym
import numpy as np

from composer.absent import check_absent, unlike_measured
from composer.algorithm1 import parse_metric, place, watts_missing
from composer.calibrated_machine import discovered_before, machine_of
from composer.calibration import CalibrationStore
from composer.calibration_plan import Planner
from composer.codegen.program import ProgramSource, check_problem, generate
from composer.codegen.python_source import literal
from composer.composition import ChosenSetting, Composition, RolloutComposition
from composer.edited import check_edited
from composer.evidence import MatrixAt, all_modelled, gather_evidence
from composer.learner_nodes import LearnersModel
from composer.learners import (
    check_host,
    check_learners,
    refuse_learners,
    refuse_two_searches,
    stated_learners,
    stated_nodes,
)
from composer.learners_prediction import LearnersPredictions
from composer.matrix import AssignmentMatrix, Candidacy, LearnerCell, PairCell
from composer.nodes import NodeShare, spread
from composer.on_policy.composition import (
    ComposedRollouts,
    Profiled,
    has_rollouts,
    refuse_replay_settings,
    rollout_problem,
)
from composer.on_policy.placement import (
    AdvantagesConfig,
    RolloutLearnerConfig,
    RolloutPlacement,
    place_rollouts,
)
from composer.on_policy.profiling import RolloutProfiler
from composer.on_policy.program import RolloutSource, generate_rollouts
from composer.on_policy.trials import RolloutTrials
from composer.placement import Metric, Placement, WholeIteration
from composer.platform import Node, Platform, usable, with_cores_of_host
from composer.power import power_of, power_plan, with_rates
from composer.problem import Problem, TrainingProblem
from composer.profiling.context import ProfilingContext
from composer.profiling.profiler import Profiler
from composer.report import short_number
from composer.storage_rule import StorageRule, storage_stays_on_host
from composer.suggestion.suggestion import (
    AUTO_SETTINGS,
    Suggestion,
    check_can_be_suggested,
    suggest_settings,
    values_of,
)
from composer.trials import Budget, ProgramRuns, Speed, Trials
from composer.tuning import REPLAY_RATIO, balanced_ratio, start_of, tuned, updates_per_step, without_auto
from composer.vectorization import fastest, first_choice
from pearl.actors.actor import check_messages_fit, message_rows
from pearl.actors.environment import check_evaluation_env, probe, reward_threshold
from pearl.actors.waiting import ending_waiting, start_waiting
from pearl.algorithms.trainer import (
    Trainer,
    check_trainer_class,
    flattening_note,
    is_trainer,
    make_trainer,
    normalization_note,
    schedule_settings_of,
    transition_of,
)
from pearl.algorithms.update_frequency import FREQ, STEPS, check_agreement, frequency_of, ratio_of_class, respelled
from pearl.atomic_file import write_text
from pearl.backends import AUTO, backend_of, check_implementation, devices_of, learners, runs_on
from pearl.byte_size import readable_size
from pearl.devices.description import Device
from pearl.devices.discovery import discover, write_csv
from pearl.errors import CapacityError, ConfigurationError, GenerationError, PlacementError, TrainerError
from pearl.exploration import make_explorer
from pearl.learner.extract import extract_networks
from pearl.replay.frames import check_shared
from pearl.replay.memory import check_fits, free_memory
from pearl.replay.schedules import SCHEDULES
from pearl.runtime.collection import insertion_rows
from pearl.runtime.composition_file import composition_file
from pearl.runtime.data_storage import stored_nbytes
from pearl.runtime.launch import run_command, shown
from pearl.runtime.options import check_count, check_goal
from pearl.runtime.replay_ratio import check_samples_last, check_training_begins
from pearl.schedules import plain_schedule
from pearl.spec import (
    ONE_LEARNER,
    ActorSpec,
    Exponent,
    InitialPriority,
    LearnersSpec,
    MomentsRule,
    NetworkSpec,
    ReplayMode,
    ReplaySpec,
    RolloutSpec,
    Scalar,
    StorageKind,
    TrainSpec,
    TransitionSpec,
    Wrapper,
    check_batch_fits,
)

if TYPE_CHECKING:
    from composer.zoo import ZooSettings

logger = logging.getLogger("pearl.composer")

_T = TypeVar("_T")
_Profiler = TypeVar("_Profiler", bound=Profiler)
_Problem = TypeVar("_Problem", bound=TrainingProblem)

_MEASURED_FILE_BYTES = 2**30
_TRIAL_STEPS = 2**40  # a trial ends by time
_OF_THE_PROGRAM = {
    "seed": "of each run (--seed of the program, or seed of runtime_gen)",
    "device": "chosen by the composer among those of set_device_file, or of this machine",
}
_ACTOR_FIELDS = {"num_actors": "count", "envs_per_actor": "envs_per_actor"}  # of ActorSpec, by their argument
_TRAINING_DEFAULTS = ("batch_size", "replay_ratio", "learning_starts", "gamma", "n_step")


class Composer:
    """Describe the machine and the problem with `set_*`, then call `run` and `runtime_gen`.

    `progress` prints a line for each measurement. `calibration` is the file that keeps measurements between runs
    (default: a file in the user's cache folder); with `remeasure`, it measures again what is kept there.
    """

    def __init__(
        self, *, progress: bool = True, calibration: str | Path | None = None, remeasure: bool = False
    ) -> None:
        self._progress = progress
        self._store_path, self._remeasure = calibration, remeasure
        self._device_file: Path | None = None
        self._connection_file: Path | None = None
        self._cluster: tuple[str, tuple[str, ...] | None] | None = None
        self._cluster_nodes: tuple[Node, ...] | None = None
        self._metric: Metric = "throughput"
        self._actors: ActorSpec | None = None
        self._trainer_class: type | None = None
        self._settings: dict[str, Any] = {}
        self._chooses_settings = False
        self._suggestion: Suggestion | None = None
        self._timesteps: int | None = None
        self._implementation = AUTO
        self._imported_from: str | None = None
        self._replay: ReplaySpec | None = None
        self._learners = self._stated_learners = ONE_LEARNER
        self._auto_learners: tuple[str, ...] = ()
        self._rollout: dict[str, Any] = {}
        self._training: dict[str, Any] = {}
        self._auto: tuple[str, ...] = ()
        self._wrappers: tuple[Wrapper, ...] = ()
        self._any_vectorization = False
        self._ratio_reason: str | None = None
        self._platform: Platform | None = None
        self._matrix: AssignmentMatrix | None = None
        self._placement: Placement | None = None
        self._edited: Placement | None = None
        self._nodes: tuple[NodeShare, ...] = ()
        self._learner_threads = 1  # on nodes
        self._problem: Problem | None = None
        self._extract: Callable[[], tuple[NetworkSpec, ...]] = tuple
        self._on_policy: ComposedRollouts | None = None

    # --- the user's description ------------------------------------------------------------------------------------

    def set_device_file(self, path: str | Path) -> None:
        """The device CSV (docs/csv_reference.md).

        Without one, `run` discovers this machine's devices, except those that share their silicon with another device.
        """
        self._device_file = _path("set_device_file", path)

    def set_connection_file(self, path: str | Path) -> None:
        """The connection CSV."""
        self._connection_file = _path("set_connection_file", path)

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
        if nodes is not None and (isinstance(nodes, str) or not all(isinstance(node, str) for node in nodes)):
            raise ConfigurationError(f"nodes of set_cluster must be a list of names; found {nodes!r}.")
        self._cluster = address, None if nodes is None else tuple(nodes)
        self._cluster_nodes = None

    def set_opt_metric(self, metric: str) -> None:
        """What to optimise: "throughput" (EPS) or "power_efficiency" (EPS per watt)."""
        self._metric = parse_metric(metric)

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
    ) -> None:
        """`num_actors` processes, each stepping `envs_per_actor` copies of a Gymnasium environment.

        `env` is its registered name, or a class or function at the top level of a module, which the program imports.
        Either number may be "auto": `run` then searches the one with which the program is fastest, all waiting for data
        included. With `vectorization="auto"`, `run` measures an Actor with each kind of vector that the environment
        has here, and takes the fastest. The other arguments are the fields of `ActorSpec`.
        """
        self._any_vectorization = vectorization == AUTO
        counts, auto = without_auto({"num_actors": num_actors, "envs_per_actor": envs_per_actor})
        sizes: dict[str, Any] = {_ACTOR_FIELDS[name]: value for name, value in (start_of(auto) | counts).items()}
        self._actors = ActorSpec(
            env,
            **sizes,
            env_kwargs=dict(env_kwargs) if isinstance(env_kwargs, Mapping) else env_kwargs or {},
            vectorization="sync" if self._any_vectorization else vectorization,  # type: ignore[arg-type]
            timeout_s=timeout_s,
            eval_env=eval_env,
            eval_env_kwargs=dict(eval_env_kwargs) if isinstance(eval_env_kwargs, Mapping) else eval_env_kwargs,
        )
        self._auto = (*(name for name in self._auto if name not in _ACTOR_FIELDS), *auto)
        self._suggestion = None
        self.set_wrappers(self._wrappers)

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
        self._wrappers = tuple(wrappers)
        if self._actors is not None:
            self._actors = dataclasses.replace(self._actors, wrappers=self._wrappers)
            if self._any_vectorization:
                self._actors = first_choice(self._actors)

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
        if settings not in (None, AUTO_SETTINGS):
            raise ConfigurationError(
                f'settings must be "auto", or be left out; found {settings!r}. Give each setting as an argument of its '
                "own, such as learning_rate=1e-4."
            )
        for name in _OF_THE_PROGRAM.keys() & values:
            raise ConfigurationError(
                f"set_train_function takes settings of the trainer class; {name} is {_OF_THE_PROGRAM[name]}. Leave it "
                "out there."
            )
        self._trainer_class = check_trainer_class(learner)
        if settings == AUTO_SETTINGS:
            check_can_be_suggested(learner)
        self._implementation = check_implementation(implementation, auto=True)
        self._imported_from = imported_from
        values = respelled(values) if is_trainer(learner) else values
        self._settings = {**values, **_plain_schedules(learner, values)}
        self._chooses_settings = settings == AUTO_SETTINGS
        self._suggestion = None

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
        self._replay = ReplaySpec(
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
        self._training = {**stated, **start_of(auto)}
        TrainSpec(**self._training)
        self._auto = (*(name for name in self._auto if name in _ACTOR_FIELDS), *auto)
        self._suggestion = None

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
        self._auto_learners = auto
        self._learners = self._stated_learners = LearnersSpec(**numbers, moments=moments, overlap=overlap, nodes=places)

    def set_rollout(self, **settings: Any) -> None:
        """Override fields of `RolloutSpec` for on-policy training: horizon, epochs, gae_lambda, policy_lag, ...

        Other fields come from the trainer class if it sets them, else from the defaults of `RolloutSpec`. Algorithms
        that learn from a replay have no rollouts: `run` refuses them.
        """
        known = inspect.signature(RolloutSpec).parameters
        if unknown := set(settings) - set(known):
            raise ConfigurationError(f"set_rollout knows {', '.join(known)}; found {', '.join(sorted(unknown))}.")
        RolloutSpec(**settings)
        self._rollout = settings
        self._suggestion = None

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

        `algorithm` is dqn, ddpg, td3, sac, ppo, ppo_lstm or a2c; by default the file's name. `leave_out` names settings
        of the entry to do without. Calls the other `set_*`, which may be called again afterwards, and returns what it
        found: `timesteps` is for `run` and `runtime_gen`. What is not the same here as there is printed. Raises
        ConfigurationError that lists all settings without a counterpart.
        """
        from composer.zoo import zoo_settings

        found = zoo_settings(file, env, algorithm, leave_out=leave_out)
        self.set_wrappers(found.wrappers)
        self.set_actors(1, env=found.env, **found.actors)
        self.set_train_function(learner=found.algorithm, implementation=implementation, **found.trainer)
        self._replay = None
        if found.replay:
            self.set_replay(**found.replay)
        self.set_training(**found.training)
        self.set_rollout(**found.rollout)
        for note in found.notes:
            self._say(f"{found.source}: {note}")
        return found

    @property
    def learns_from_rollouts(self) -> bool:
        """Whether the trainer class learns from rollouts of its present policy, and has no replay."""
        return self._trainer_class is not None and has_rollouts(self._trainer_class)

    @property
    def chooses_settings(self) -> bool:
        """Whether settings are left to the composer, the replay's too unless `set_replay` is called."""
        return self._chooses_settings

    def set_placement(self, placement: Placement) -> None:
        """An edited placement of an earlier composition, whose choice `run` takes in place of Algorithm 1's.

        A choice may be edited: `replay_manager`, `learner`, `storage`, `implementation`, and the parameters of a
        candidate. `run` raises PlacementError, which names the field, if anything else differs from what it composes.
        Without device files it composes for the platform of the placement, as discovery would measure its memory again.
        Raises PlacementError for a placement without `evidence`.
        """
        if placement.evidence is None:
            raise PlacementError(
                "The edited placement has no evidence, which states the platform it was composed for: an older version "
                "wrote it, or the key was removed. Compose again and edit the new file."
            )
        self._edited = placement

    # --- the steps --------------------------------------------------------------------------------------------------

    def run(self, *, timesteps: int | None = None, budget_s: float | None = None) -> tuple[Any, Any]:
        """Check the problem, read the machine, profile, place. Returns the two primitives' configurations.

        Afterwards `matrix`, `placement` and `networks` are set. `timesteps`, if known, are the environment steps of
        the program: too few for any training are refused at once. The most promising placements are tried as
        programs, a few seconds each, and the fastest is placed. `budget_s` seconds are for that: up to 60 if they are
        not given, or the variable PEARL_BUDGET_S; 0: the measurements of the primitives alone decide. For a trainer
        that learns from rollouts, the two are those of GAE (`AdvantagesConfig`) and of the Learner
        (`RolloutLearnerConfig`). Raises ConfigurationError that names what is missing or wrong, and GenerationError
        for a problem without a program, both before anything is measured.
        """
        if timesteps != self._timesteps:  # settings that are chosen follow the length of the run
            self._timesteps, self._suggestion = timesteps, None
        if self.learns_from_rollouts:
            with ending_waiting():
                return self._run_rollouts(timesteps, Budget.of(budget_s))
        self._composed(Budget.of(budget_s), timesteps)
        if self._edited is not None:
            check_edited(self._edited, self.placement)
            self._placement = self._edited
        self._say(_learners_line(self.matrix, self.placement))
        return self.placement.replay_config, self.placement.learner_config

    def check(self) -> None:
        """Check the problem as `run` does, before devices are read and anything is measured.

        Makes one environment and the trainer. Settings that are left to the composer are not chosen. Raises
        ConfigurationError that names what is missing or wrong.
        """
        if self._actors is None or self._trainer_class is None:
            raise ConfigurationError(
                "Composer.check() needs set_actors(num_actors, env=...) and set_train_function(learner=...) first."
            )
        if self._chooses_settings:
            probed = probe(self._actors)
            spaces = probed.observation_space, probed.action_space
            make_trainer(self._trainer_class, *spaces, settings=dict(self._settings))
        elif self.learns_from_rollouts:
            refuse_replay_settings(self._trainer_class, self._replay, self._training, self._auto, self._metric)
            refuse_learners(self._trainer_class, self._stated_learners)
            rollout_problem(
                *(self._trainer_class, self._settings, self._actors, self._rollout, self._training),
                *(self._implementation, self._imported_from, self._say),
            )
        else:
            self._check_problem(CalibrationStore(self._store_path))

    def profile(self, *, watch: Callable[[str], None] | None = None, budget_s: float | None = None) -> Profiled:
        """Run, with the same `budget_s`, and return how much was measured for it; later runs measure nothing.

        `watch` gets a line of text before each measurement that is made; what it raises ends profiling, and everything
        measured so far is kept. Raises as `run` does.
        """
        if self.learns_from_rollouts:
            with ending_waiting():
                self._run_rollouts(None, Budget.of(budget_s), thorough=True)
            return _made(self._on_policy, "placement").profiled
        profiler = self._composed(Budget.of(budget_s), watch=watch, thorough=True)
        return Profiled(profiler.misses, profiler.hits + profiler.imports)

    def missing_measurements(self, *, budget_s: float | None = None) -> frozenset[str]:
        """About which measurements `profile` would make, as digests of their keys; measures nothing.

        Some may turn out not to be needed, and others may be needed. Raises as `run` does.
        """
        self._refuse_rollouts()
        budget, planner = Budget.of(budget_s), self._prepare(Planner)
        matrix = planner.matrix()
        self._place(planner, self._decision(planner, matrix)[0], matrix, budget)
        return frozenset(planner.missing)

    def resized(
        self, *, batch_size: int | None = None, capacity: int | None = None, fanout: int | str | None = None
    ) -> Composer:
        """A composer of the same problem with another batch size, capacity of the replay, or fanout.

        Raises ConfigurationError for a size that `set_training` or `set_replay` would refuse, or before `set_replay`.
        """
        self._refuse_rollouts()
        sizes = {"capacity": capacity, "fanout": fanout}
        changed: dict[str, Any] = {name: value for name, value in sizes.items() if value is not None}
        if self._replay is None and (changed or not self._chooses_settings):
            raise ConfigurationError("Composer.resized() needs set_replay(size) to be called first.")
        other = copy.copy(self)
        if batch_size is not None:
            auto = {name: AUTO for name in self._auto if name not in _ACTOR_FIELDS}
            other.set_training(**{**self._training, **auto, "batch_size": batch_size})
        if self._replay is not None:
            other._replay = dataclasses.replace(self._replay, **changed)
        return other

    def _refuse_rollouts(self) -> None:
        if self.learns_from_rollouts:
            raise ConfigurationError(
                f"{_made(self._trainer_class, 'trainer').__name__} learns from rollouts. Its measurements cannot be "
                "made in advance for a family of sizes: compose it (`pearl compose`, or run()), which makes them."
            )

    def runtime_gen(
        self,
        replay: Any = None,
        learner: Any = None,
        path: str | Path = "runtime_program.py",
        *,
        placement: Placement | None = None,
        timesteps: int = 100_000,
        run_dir: str | Path | None = None,
        until_return: float | Literal["none"] | None = None,
        seed: int | None = None,
        eval_episodes: int | None = None,
        eval_interval: int | None = None,
        checkpoint_interval: int | None = None,
    ) -> Path:
        """Write the runtime program to `path`, print how to run it, and return the path.

        `replay` and `learner` are the results of `run`, which may be edited: another pair of devices, or another
        implementation of the Learner, is taken from the placement's alternatives. An edited `placement` replaces the
        composer's own for this program; `set_placement` says what can be edited. The other arguments are the defaults
        of the program's options. None keeps the default of the option; for `until_return` that is the environment's
        registered reward threshold ("none" or infinity: no early stop).

        The devices, the matrix and the placement in effect go to PROGRAM.composition.json next to the program. Each run
        keeps a copy in its folder, from which `pearl report` draws them.

        The program names paths relative to its own file, so that all can be moved together. Without `run_dir` the run
        goes to the folder `runs/<name of the program>` next to it. A relative `run_dir` counts from the current folder,
        as `path` does; an absolute one outside of the program's folder stays absolute.

        Raises ConfigurationError for a default that its option would refuse, or for too few `timesteps` for any
        training; PlacementError for a pair, or an implementation on it, that the placement does not have, and
        for a `placement` with other numbers than were composed;
        GenerationError for a program that cannot be written.
        """
        path = _path("runtime_gen", path)
        run_dir = None if run_dir is None else _path("run_dir of runtime_gen", run_dir)
        if self._on_policy is not None:
            written = self._write_rollouts(
                self._on_policy,
                replay,
                learner,
                path,
                timesteps,
                run_dir,
                until_return,
                _stated_counts(seed, eval_episodes, eval_interval, checkpoint_interval),
            )
            self._say_how_to_run(written)
            return written
        if placement is not None:
            check_edited(placement, self.placement)
        placement = placement or self.placement
        assert self._problem is not None
        placement = placement.with_choice(
            replay_manager=None if replay is None else replay.device,
            learner=None if learner is None else learner.device,
            implementation=None if learner is None else learner.implementation,
        )
        problem = self._problem
        check_training_begins(problem.train, timesteps)
        delay = self._training.get("priority_update_delay", 0)
        if delay > placement.delay_in_effect:
            self._say(
                f"priority_update_delay={delay} has no effect in setting 2: its loop samples after the last update of "
                "priorities, a delay of 0"
            )
        solved = reward_threshold(problem.actors.evaluation)
        goal = check_goal(solved if until_return is None else until_return)
        run_options = _stated_counts(seed, eval_episodes, eval_interval, checkpoint_interval)
        generate(
            ProgramSource(
                path=path,
                placement=placement,
                replay=replay or placement.replay_config,
                learner=learner or placement.learner_config,
                problem=problem,
                device_file=self._device_file,
                connection_file=self._connection_file,
                timesteps=timesteps,
                run_dir=Path("runs") / path.stem if run_dir is None else _seen_from(path, run_dir),
                until_return=goal,
                run_options=run_options,
                power=power_plan(self.platform, placement),
                cluster=self._cluster,
            ),
            {device.name: device for device in self.platform.devices},
        )
        self._write_composition(Composition.of(self.platform, self.matrix, placement, self._chosen_settings), path)
        self._say_how_to_run(path)
        return path

    def _say_how_to_run(self, path: Path) -> None:
        if self._progress:
            print(f"Program:   {shown(path)}\nRun it:    {run_command(path)}", flush=True)

    def _write_trial(self, problem: Problem, placement: Placement, path: Path) -> Path:
        """Write the program of a placement to try, as `runtime_gen` does."""
        before = self._progress, self._problem, self._placement
        self._progress, self._problem, self._placement = False, problem, placement
        try:
            return self.runtime_gen(path=path, timesteps=_TRIAL_STEPS)
        finally:
            self._progress, self._problem, self._placement = before

    # --- rollouts ---------------------------------------------------------------------------------------------------

    def _run_rollouts(
        self, timesteps: int | None, budget: Budget, *, thorough: bool = False
    ) -> tuple[AdvantagesConfig, RolloutLearnerConfig]:
        """`run` for a trainer that learns from rollouts."""
        if self._actors is None or self._trainer_class is None:
            raise ConfigurationError("Composer.run() needs set_actors(num_actors, env=...) to be called first.")
        refuse_replay_settings(self._trainer_class, self._replay, self._training, self._auto, self._metric)
        refuse_learners(self._trainer_class, self._stated_learners)
        if "count" in self._auto_learners:
            self._say(f"one Learner: {self._trainer_class.__name__} learns from rollouts, and has no banks of a replay")
        stated, store = self._read_files(), CalibrationStore(self._store_path, remeasure=self._remeasure)
        self._begin_actor(store, stated)
        chosen = None
        if self._chooses_settings:
            spaces = probe(self._actors)
            chosen = self._chosen(store, stated, spaces.observation_space, spaces.action_space)
        problem, trainer = rollout_problem(
            self._trainer_class,
            {**values_of(chosen.settings if chosen else ()), **self._settings},
            self._actors,
            {**values_of(chosen.rollout if chosen else ()), **self._rollout},
            {**values_of(chosen.training if chosen else ()), **self._training},
            self._implementation,
            self._imported_from,
            self._say,
        )
        shape = problem.observation_space.shape
        self._extract = functools.cache(functools.partial(extract_networks, trainer, shape))
        if timesteps is not None and timesteps < problem.rows:
            raise ConfigurationError(
                f"{timesteps:,} steps are less than one rollout of {problem.rollout.horizon} steps x "
                f"{problem.actors.env_count} environments: nothing would be trained. Give more, or a smaller horizon."
            )
        thorough = thorough or budget.stated
        platform = self._platform = self._with_cluster(stated or self._discover(store, thorough=thorough))
        problem = self._vectorized(
            problem, lambda p: RolloutProfiler(platform, p, store, self._say, thorough=True), platform.host
        )
        profiler = RolloutProfiler(platform, problem, store, self._say, thorough=thorough)
        placed = problem
        if platform.nodes:
            beside = ONE_LEARNER if problem.rollout.policy_lag else None
            placed = self._spread(problem, platform, profiler.transition_us, learners=beside)
        matrix = profiler.matrix()
        self._keep_machine(platform, store)
        placement = place_rollouts(matrix, platform, problem)

        def write(tried: RolloutPlacement, path: Path) -> Path:
            made = ComposedRollouts(problem, matrix, tried, Profiled(0, 0))
            return self._write_rollouts(made, None, None, path, _TRIAL_STEPS, None, "none", {})

        with _trial_folder() as folder:
            placement = RolloutTrials(profiler, write, folder, budget).placed(placement)
        if platform.nodes:
            placement = dataclasses.replace(placement, nodes=self._nodes)
        profiled = Profiled(profiler.misses, profiler.hits)
        self._on_policy = ComposedRollouts(placed, matrix, placement, profiled)
        self._say(f"profiled: {profiler.misses} measured, {profiler.hits} known from earlier runs")
        choice = self._on_policy.placement.choice
        return choice.advantages, choice.learner

    def _write_rollouts(
        self,
        made: ComposedRollouts,
        advantages: AdvantagesConfig | None,
        learner: RolloutLearnerConfig | None,
        path: Path,
        timesteps: int,
        run_dir: Path | None,
        until_return: float | Literal["none"] | None,
        run_options: Mapping[str, int],
    ) -> Path:
        """`runtime_gen` for a trainer that learns from rollouts, but for what it says."""
        choice = made.placement.choice
        advantages, learner = advantages or choice.advantages, learner or choice.learner
        chosen = (advantages.device, learner.device, learner.implementation, learner.threads)
        placement = made.placement.with_choice(*chosen)
        source = RolloutSource(
            path=path,
            placement=placement,
            advantages=advantages,
            learner=learner,
            problem=made.problem,
            device_file=self._device_file,
            connection_file=self._connection_file,
            timesteps=timesteps,
            run_dir=Path("runs") / path.stem if run_dir is None else _seen_from(path, run_dir),
            until_return=check_goal(
                reward_threshold(made.problem.actors.evaluation) if until_return is None else until_return
            ),
            run_options=run_options,
            power=power_plan(self.platform, placement),
            cluster=self._cluster,
        )
        generate_rollouts(source, {device.name: device for device in self.platform.devices})
        composition = RolloutComposition.of(self.platform, made.matrix, placement, self._chosen_settings)
        self._write_composition(composition, path)
        return path

    @staticmethod
    def _write_composition(made: Composition | RolloutComposition, program: Path) -> None:
        try:
            write_text(composition_file(program), made.to_json() + "\n")
        except OSError as error:
            raise GenerationError(f"The composition of {program} cannot be written next to it: {error}.") from error

    def save(self, folder: str | Path) -> Path:
        """Write the results of `run` to `folder`: devices.csv, connections.csv, matrix.json, placement.json."""
        folder = _path("save", folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            nodes = self.platform.nodes
            devices = (*self.platform.devices, *(node.device for node in nodes))
            links = (*self.platform.connections, *(node.link for node in nodes if node.link is not None))
            write_csv(devices, links, folder / "devices.csv", folder / "connections.csv")
            write_text(folder / "matrix.json", self.matrix.to_json() + "\n")
            write_text(folder / "placement.json", self.placement.to_json() + "\n")
        except OSError as error:
            raise GenerationError(f"The composition cannot be written to {folder}: {error}.") from error
        return folder

    RuntimeGen = runtime_gen  # the paper's spelling

    @property
    def platform(self) -> Platform:
        """Devices and connections."""
        return _made(self._platform, "platform")

    @property
    def matrix(self) -> Any:
        """The primitive-device assignment matrix: an AssignmentMatrix, or a RolloutMatrix for on-policy training."""
        if self._on_policy is not None:
            return self._on_policy.matrix
        return _made(self._matrix, "matrix")

    @property
    def placement(self) -> Any:
        """The placement, with every alternative and its cost: a Placement, or a RolloutPlacement."""
        if self._on_policy is not None:
            return self._on_policy.placement
        return _made(self._placement, "placement")

    @property
    def suggestion(self) -> Suggestion:
        """The settings that `run` chose, with reasons: those of a class set with `settings="auto"`."""
        return _made(self._suggestion, "suggestion")

    @property
    def networks(self) -> tuple[NetworkSpec, ...]:
        """The networks read from the trainer, which needs torch."""
        return self._extract()

    # --- steps of run -----------------------------------------------------------------------------------------------

    def _say(self, text: str) -> None:
        if self._progress:
            print(f"  {text}", flush=True)

    def _prepare(self, kind: type[_Profiler], timesteps: int | None = None, *, thorough: bool = True) -> _Profiler:
        """Check the problem and read the machine; a profiler for both."""
        stated, store = self._read_files(), CalibrationStore(self._store_path, remeasure=self._remeasure)
        if stated is not None:
            check_absent(stated, store)
        if self._actors is not None and kind is not Planner:
            self._begin_actor(store, stated)
        self._problem = self._check_problem(store, stated)
        if timesteps is not None:
            check_training_begins(self._problem.train, timesteps)
        self._platform = self._with_cluster(stated or self._discover(store, thorough=thorough))
        self._check_devices(self._platform)
        for line in unlike_measured(self._platform, store):
            self._say(line)
        platform = self._platform
        self._problem = self._vectorized(
            self._problem,
            lambda p: kind(platform, _profiled(p), store, self._say, thorough=thorough),
            platform.host,
        )
        self._problem = self._on_nodes(
            self._problem,
            lambda p: kind(platform, _profiled(p), store, self._say, thorough=thorough),
            platform,
        )
        problem = self._problem if platform.host.absent else _profiled(self._problem)
        return kind(platform, problem, store, self._say, thorough=thorough)

    def _composed(
        self,
        budget: Budget,
        timesteps: int | None = None,
        watch: Callable[[str], None] | None = None,
        *,
        thorough: bool = False,
    ) -> Profiler:
        """Compose, and again if a search changes settings; the last profiler."""

        def compose(budget: Budget = budget) -> Profiler:
            with ending_waiting():
                profiler = self._prepare(Profiler, timesteps, thorough=thorough or budget.stated)
                profiler.watch = watch or profiler.watch
                self._compose(profiler, budget)
            return profiler

        self._learners, self._learner_threads = self._stated_learners, 1
        self._set_found(start_of(self._auto))  # a composer that runs again searches as it did before
        self._ratio_reason = None
        if REPLAY_RATIO in self._auto:
            self._training.pop(REPLAY_RATIO, None)
        if self._auto_learners:
            return self._with_learners(compose(dataclasses.replace(budget, seconds=0.0)), compose, budget)
        profiler = compose()
        if self._learners.count > 1 and self.platform.nodes:
            return self._with_learners(profiler, compose, budget)
        if self._auto and self._tune(profiler.store, budget):
            return compose()
        return profiler

    def _with_learners(self, profiler: Profiler, compose: Callable[[Budget], Profiler], budget: Budget) -> Profiler:
        """Compose with as many Learners as are fastest, where they are, by measurements of their parts.

        `profiler` is that of the present composition. Returns the last profiler.
        """
        predictions = self._predictions(profiler)
        choice = predictions.choice(self._stated_learners, self._auto_learners, self._timesteps)
        self._say(f"Learners: {choice.reason}")
        chosen, threads = self._stated_learners, self._learner_threads
        if choice.count > 1:
            every = choice.average_every
            chosen = dataclasses.replace(
                chosen,
                count=choice.count,
                average_every=every,
                overlap=min(chosen.overlap, every),
                nodes=choice.nodes,
            )
            threads = predictions.threads(choice.count)
        misses, hits = profiler.misses + predictions.misses, profiler.hits
        has_changed = (chosen, threads) != (self._learners, self._learner_threads)
        if has_changed or (choice.count == 1 and budget.seconds):
            self._learners, self._learner_threads = chosen, threads
            profiler = compose(budget)
            profiler.misses, profiler.hits = profiler.misses + misses, hits
        else:
            profiler.misses = misses
        self._placement = dataclasses.replace(self.placement, learners_choice=choice)
        return profiler

    def _predictions(self, profiler: Profiler) -> LearnersPredictions:
        problem = _made(self._problem, "problem")

        def profiled(
            several: Problem, platform: Platform
        ) -> tuple[Profiler, AssignmentMatrix, Callable[..., Placement]]:
            other = Profiler(platform, _profiled(several), profiler.store, self._say, thorough=profiler.thorough)
            other.watch = profiler.watch
            matrix = other.matrix()
            decide = self._decision(other, matrix, several)[0]
            other.forget_storage()
            return other, matrix, decide

        return LearnersPredictions(problem, profiler, self.matrix, self.placement, profiled)

    def _compose(self, profiler: Profiler, budget: Budget) -> None:
        """Set matrix and placement, and keep the machine in the store."""
        matrix, imported = profiler.with_reports(profiler.matrix())
        matrix = with_rates(matrix, profiler.platform, profiler.problem.train.batch_size)
        self._matrix = matrix
        for line in imported:
            self._say(line)
        self._keep_machine(profiler.platform, profiler.store)
        decide, rule = self._decision(profiler, matrix)
        profiler.forget_storage()
        placement = self._place(profiler, decide, matrix, budget)
        imports = f", {profiler.imports} imported" if profiler.imports else ""
        self._say(f"profiled: {profiler.misses} measured, {profiler.hits} known from earlier runs{imports}")
        evidence = gather_evidence(decide, placement, matrix, profiler.platform, rule, self._matrix_at(profiler.store))
        reason = self._ratio_reason
        self._placement = dataclasses.replace(
            placement, evidence=evidence, replay_ratio_reason=reason, nodes=self._nodes
        )

    def _place(
        self, profiler: Profiler, decide: Callable[..., Placement], matrix: AssignmentMatrix, budget: Budget
    ) -> Placement:
        def decided(wholes: Mapping[Candidacy, WholeIteration]) -> Placement:
            return decide(matrix, profiler.platform, wholes=wholes)

        problem = profiler.problem
        if problem.learners.count > 1 or problem.actors.nodes:  # programs without --bench, or with --ray
            return decided({})
        with self._programs(profiler, _made(self._problem, "problem")) as programs:
            return Trials(programs, decided, budget, self._say).placed()

    @contextlib.contextmanager
    def _programs(self, profiler: Profiler, problem: Problem) -> Iterator[ProgramRuns]:
        with _trial_folder() as folder:
            yield ProgramRuns(profiler, functools.partial(self._write_trial, problem), folder)

    def _tune(self, store: CalibrationStore, budget: Budget) -> bool:
        """Search the settings that were left to the composer; whether to compose again with what was found."""
        until, placement = time.monotonic() + budget.seconds, self.placement

        def measure(problem: Problem, run: int) -> Speed | None:
            _check_sizes(problem.replay, problem.actors, problem.train)
            profiler = Profiler(self.platform, _profiled(problem), store, self._say)
            with self._programs(profiler, problem) as programs:
                return programs.speed(placement, run, until)

        found = tuned(_made(self._problem, "problem"), placement, self._auto, measure, self._say)
        self._set_found(found)
        if REPLAY_RATIO in self._auto:
            self._balance(store)
        return REPLAY_RATIO in self._auto or found != start_of(self._auto)

    def _balance(self, store: CalibrationStore) -> None:
        """Choose the replay ratio by the times of the Actors and of the placement's Learner."""
        assert self._actors is not None
        problem = dataclasses.replace(_made(self._problem, "problem"), actors=self._actors)
        if self.placement.host != self.platform.host.name or self.platform.host.absent:
            raise ConfigurationError('replay_ratio="auto" needs the times of Actors on this machine. State a number.')
        collection_us = Profiler(self.platform, _profiled(problem), store, self._say).collection_us
        bounds = updates_per_step(problem.trainer_class, problem.settings)
        batch = problem.train.batch_size
        ratio, self._ratio_reason = balanced_ratio(batch, collection_us, self.placement.t_itr_us, bounds)
        self._training = self._training | {REPLAY_RATIO: ratio}
        self._say(f"replay_ratio: {ratio:g}, {self._ratio_reason}")

    def _set_found(self, values: Mapping[str, int]) -> None:
        """Use these values of settings that were left to the composer."""
        actors: dict[str, Any] = {_ACTOR_FIELDS[name]: value for name, value in values.items() if name in _ACTOR_FIELDS}
        if actors:
            self._actors = dataclasses.replace(_made(self._actors, "actors"), **actors)
        self._training = self._training | {n: value for n, value in values.items() if n not in _ACTOR_FIELDS}

    def _decision(
        self, profiler: Profiler, matrix: AssignmentMatrix, problem: Problem | None = None
    ) -> tuple[Callable[..., Placement], StorageRule]:
        """`place` for this problem, or another, and the rule for the Data Storage that it follows."""
        problem, platform = problem or _made(self._problem, "problem"), profiler.platform
        devices = {device.name: device for device in platform.devices}
        rule = StorageRule(devices, platform.host.name, problem.replay, problem.transition.nbytes)
        decide = functools.partial(
            place,
            metric=self._metric,
            batch_size=problem.train.batch_size,
            transition_bytes=problem.transition.nbytes,
            actor_count=problem.actors.count,
            envs_per_actor=problem.actors.envs_per_actor,
            storage_rule=rule,
            sharing=profiler.sharing,
            messages_us=profiler.messages_us,
            replay_ratio=problem.train.replay_ratio,
            priority_update_delay=problem.train.priority_update_delay,
            learners=problem.learners,
        )
        return functools.partial(decide, **self._of_several(profiler, matrix, problem)), rule

    def _of_several(self, profiler: Profiler, matrix: AssignmentMatrix, problem: Problem) -> Mapping[str, Any]:
        """What `place` is told of several Learners: nothing of one."""
        several, pair, spec = profiler.side_by_side(matrix), profiler.fastest_pair(matrix), problem.learners
        if several is None or pair is None:
            return {}
        if spec.nodes and self._nodes:
            return LearnersModel.of(problem, profiler, several, pair).arguments(spec, self._nodes)
        return {"average_us": several.waited_us(spec), "stretch": several.stretch(spec)}

    def _discover(self, store: CalibrationStore, *, thorough: bool) -> Platform:
        """Devices and connections of this machine; bandwidths that an earlier run measured are not measured again.

        Unless `thorough`, the memory of a machine with a single device is not measured either.
        """
        if self._edited is not None and self._edited.evidence is not None:
            return self._edited.evidence.platform
        self._say("no device file given: discovering this machine")
        found: list[str] = []
        devices, _ = discover(measure=False, progress=found.append, own_silicon=True)
        if (known := discovered_before(devices, store)) is not None:
            self._say("the links and memory of this machine are known from an earlier run")
            return known
        if len(devices) == 1 and not thorough:
            for line in found:
                self._say(line)
            self._say("its memory is not measured: with a single device, no choice depends on it")
            return Platform(tuple(devices), ())
        measured, connections = discover(progress=self._say, own_silicon=True)
        return Platform(tuple(measured), tuple(connections))

    def _keep_machine(self, platform: Platform, store: CalibrationStore) -> None:
        """Keep the machine in the store; one that was discovered has connections only if these were measured."""
        discovered = self._device_file is None and bool(platform.connections)
        if (machine := machine_of(platform, discovered=discovered)) is not None:
            store.record(machine)

    def _begin_actor(self, store: CalibrationStore, stated: Platform | None) -> None:
        """Start the interpreter of the Actor to profile, unless one in this environment was; it imports meanwhile."""
        env = _made(self._actors, "actors").env_name
        absent = stated is not None and any(device.absent for device in stated.devices)
        if not absent and not store.has_actor(env):
            with contextlib.suppress(OSError):  # a limit of processes
                start_waiting(1)

    def _read_files(self) -> Platform | None:
        if self._device_file is None and self._connection_file is None:
            return None
        if self._device_file is None or self._connection_file is None:
            given, missing = ("device", "connection") if self._connection_file is None else ("connection", "device")
            raise ConfigurationError(
                f"A {given} file is set but no {missing} file: call set_{missing}_file too. "
                "`pearl devices` writes both for this machine."
            )
        platform, warnings = with_cores_of_host(Platform.from_files(self._device_file, self._connection_file))
        for line in warnings:
            logger.warning("%s", line)
        for unused in platform.unused_connections:
            logger.warning(
                "The connection from %s to %s does not count: programs send messages between them through %s.",
                *(unused.source, unused.target, platform.host.name),
            )
        return platform

    def _vectorized(self, problem: _Problem, profiler: Callable[[_Problem], Any], host: Device) -> _Problem:
        """The problem with the fastest kind of vector, if that is left to the composer."""
        if not self._any_vectorization or host.absent:
            return problem

        def with_actors(actors: ActorSpec) -> _Problem:
            return dataclasses.replace(problem, actors=actors)

        self._actors = fastest(problem.actors, lambda actors: profiler(with_actors(actors)).collection_us, self._say)
        return with_actors(self._actors)

    def _with_cluster(self, platform: Platform) -> Platform:
        """The platform with the nodes of the user's cluster, whose connections are measured once."""
        if self._cluster is None:
            return platform
        if self._cluster_nodes is None:
            from composer.cluster import with_cluster

            self._cluster_nodes = with_cluster(platform, *self._cluster, self._say).nodes
        return dataclasses.replace(platform, nodes=self._cluster_nodes)

    def _on_nodes(
        self, problem: Problem, profiler: Callable[[Problem], ProfilingContext], platform: Platform
    ) -> Problem:
        """The problem with its Actors and Learners on the nodes of the platform, if it has any."""
        spec = problem.learners
        if not platform.nodes:
            self._nodes = ()
            if spec.elsewhere:
                raise ConfigurationError(
                    f"{spec.count} Learners are to be on nodes ({', '.join(node for node, _ in spec.elsewhere)}), and "
                    "no cluster is known. Call set_cluster (cluster in [platform]), or give the device CSV rows with a "
                    "node; or leave nodes out."
                )
            return dataclasses.replace(problem, learners=dataclasses.replace(spec, nodes=()))
        if unsuited := [name for name in _ACTOR_FIELDS if name in self._auto]:
            raise ConfigurationError(
                f'{unsuited[0]} cannot be "auto" with Actors on other nodes: the search tries programs on this '
                "machine. State a number."
            )
        threads = self._learner_threads
        problem = self._spread(problem, platform, profiler(problem).transition_us, threads, spec)
        if spec.nodes:  # in the order of the placement, as ranks follow it
            places = tuple((found.node, found.learners) for found in self._nodes if found.learners)
            spec = dataclasses.replace(spec, nodes=places)
        return dataclasses.replace(problem, learners=spec, most_threads=threads if spec.nodes else 0)

    def _spread(
        self,
        problem: _Problem,
        platform: Platform,
        transition_us: float,
        threads: int = 1,
        learners: LearnersSpec | None = ONE_LEARNER,
    ) -> _Problem:
        """The problem with its Actors on the nodes of the platform; see `spread`."""
        self._nodes = spread(problem, platform, transition_us, threads, learners)
        for found in self._nodes:
            others = f"{found.learners} Learner(s) and " if learners is not None and learners.count > 1 else ""
            self._say(f"{others}{found.actors} Actor(s) on {found.node or 'this machine'}: {found.why}")
        nodes = tuple((found.node, found.actors) for found in self._nodes if found.actors)
        return dataclasses.replace(problem, actors=dataclasses.replace(problem.actors, nodes=nodes))

    def _chosen(
        self,
        store: CalibrationStore,
        platform: Platform | None,
        observation_space: gym.Space[Any],
        action_space: gym.Space[Any],
    ) -> Suggestion:
        """The settings that are left to the composer, chosen once."""
        if self._suggestion is None:
            assert self._trainer_class is not None
            assert self._actors is not None
            paced = _paced_settings(self._trainer_class, {**self._settings, **self._training})
            stated = {} if self._timesteps is None else {"timesteps": self._timesteps}
            self._suggestion = suggest_settings(
                self._trainer_class,
                self._actors,
                observation_space,
                action_space,
                {**self._settings, **paced, **self._training, **self._rollout, **stated},
                host=None if platform is None else platform.host,
                store=store,
                report=self._say,
            )
            if self._replay is not None:  # the user's
                self._suggestion = dataclasses.replace(self._suggestion, replay=())
            for setting in self._chosen_settings:
                self._say(f"{setting.name} = {setting.value}: {setting.reason}")
        return self._suggestion

    @property
    def _chosen_settings(self) -> tuple[ChosenSetting, ...]:
        """The choices of `suggestion` in words; none without `settings="auto"`."""
        if self._suggestion is None:
            return ()
        owner, named = self._suggestion.algorithm.value, (self._suggestion.trainer, self._suggestion.replay)
        choices = ((who, choice) for who, found in zip((owner, "replay"), named, strict=True) for choice in found)
        return tuple(ChosenSetting(f"{who}.{c.name}", literal(c.value), c.reason) for who, c in choices)

    def _check_problem(self, store: CalibrationStore, platform: Platform | None = None) -> Problem:
        if self._rollout:
            raise ConfigurationError(
                f"{_made(self._trainer_class, 'trainer').__name__} learns from a replay: leave set_rollout ([rollout]) "
                "out, or take an algorithm that learns from rollouts, such as pearl.algorithms.PPO."
            )
        missing = [
            call
            for call, value in (
                ("set_actors(num_actors, env=...)", self._actors),
                ("set_train_function(learner=...)", self._trainer_class),
                ("set_replay(size)", self._replay or self._chooses_settings or None),
            )
            if value is None
        ]
        if missing:
            raise ConfigurationError(f"Composer.run() needs {' and '.join(missing)} to be called first.")
        assert self._actors is not None
        assert self._trainer_class is not None
        probed = probe(self._actors)
        observation_space, action_space = probed.observation_space, probed.action_space
        if probed.preparation:
            self._say(probed.preparation)
        for warning in probed.warnings:
            logger.warning(warning)
        check_evaluation_env(self._actors, observation_space, action_space)
        settings, suggested = dict(self._settings), dict[str, Any]()
        if self._chooses_settings:
            chosen = self._chosen(store, platform, observation_space, action_space)
            settings, suggested = {**values_of(chosen.settings), **settings}, values_of(chosen.training)
            if self._replay is None:
                values = values_of(chosen.replay)
                self._replay = ReplaySpec(values.pop("size"), **values)
        assert self._replay is not None
        transition = transition_of(self._trainer_class, observation_space, action_space, settings)
        check_shared(transition, self._replay)
        trainer = make_trainer(self._trainer_class, observation_space, action_space, settings=dict(settings))
        if isinstance(trainer, Trainer) and (inputs := trainer.describe_inputs()):
            self._say(inputs)
        if normalized := normalization_note(trainer):
            self._say(normalized)
        schedule = {k: getattr(trainer, k) for k in _TRAINING_DEFAULTS if hasattr(trainer, k)}
        train = TrainSpec(**{**schedule, **suggested, **self._training})
        if REPLAY_RATIO in self._auto and REPLAY_RATIO not in self._training:
            _, most = updates_per_step(self._trainer_class, settings)
            train = dataclasses.replace(train, replay_ratio=most * train.batch_size)
        train = self._paced(train)
        make_explorer(getattr(trainer, "exploration", None), action_space, 1, np.random.default_rng(0))
        _check_sizes(self._replay, self._actors, train)
        _check_memory(self._replay, transition, platform)
        if line := _memory_line(self._replay, transition):
            self._say(line)
        self._check_supports(trainer)
        self._extract = functools.cache(functools.partial(extract_networks, trainer, observation_space.shape))
        if note := flattening_note(trainer):
            logger.info("%s.", note)
            self._say(note)
        problem = Problem(
            trainer_class=self._trainer_class,
            settings={name: value for name, value in settings.items() if name not in (FREQ, STEPS)},  # now the ratio
            observation_space=observation_space,
            action_space=action_space,
            transition=transition,
            replay=self._replay,
            train=train,
            actors=self._actors,
            implementation=self._implementation,
            imported_from=self._imported_from,
            learners=self._learners,
        )
        check_problem(problem)
        if self._auto_learners:
            refuse_two_searches(self._auto_learners, self._auto)
        if self._learners.count > 1:
            check_learners(problem, trainer, self._auto)
        return problem

    def _paced(self, train: TrainSpec) -> TrainSpec:
        """With the replay ratio that `train_freq` and `gradient_steps` mean, if the trainer or its settings have them.

        Raises TrainerError if another one is stated, too.
        """
        trainer = _made(self._trainer_class, "trainer")
        frequency = frequency_of(trainer, self._settings) if is_trainer(trainer) else None
        if frequency is None:
            if REPLAY_RATIO not in self._auto:
                self._ratio_reason = None
            return train
        stated: dict[str, object] = {}
        if (of_class := ratio_of_class(trainer)) is not None:
            stated[trainer.__name__] = of_class
        if REPLAY_RATIO in self._settings:
            stated["set_train_function"] = self._settings[REPLAY_RATIO]
        if REPLAY_RATIO in self._training or REPLAY_RATIO in self._auto:
            stated["set_training ([training])"] = self._training.get(REPLAY_RATIO, AUTO)
        check_agreement(frequency, train.batch_size, stated)
        ratio, self._ratio_reason = frequency.replay_ratio(train.batch_size), frequency.reason(train.batch_size)
        self._say(f"replay_ratio: {ratio:g}, {self._ratio_reason}")
        return dataclasses.replace(train, replay_ratio=ratio)

    def _check_devices(self, platform: Platform) -> None:
        """Raise for faults that show without a measurement: no device, no device for a forced Learner, no watts."""
        devices, unavailable = usable(platform)
        if not devices:
            reasons = "; ".join(f"{device.name}: {reason}" for device, reason in unavailable)
            raise PlacementError(f"No device of {self._device_file} can be used here. {reasons}. Add a cpu row.")
        forced = self._implementation
        if self._learners.count > 1:
            check_host(platform.host, forced)
        modelled = any(not backend_of(device).is_here for device in devices)  # for every implementation alike
        if forced != AUTO and not modelled and not any(runs_on(forced, device) for device in devices):
            raise PlacementError(
                f"The {forced} Learner runs on {devices_of(forced)}; found none among "
                f"{', '.join(device.name for device in devices)}. Add one to the device CSV, or leave "
                f"implementation={forced!r} out."
            )
        if self._metric == "power_efficiency":
            unstated = [device for device in devices if power_of(platform, (device.name,)).missing]
            missing = [device.name for device in unstated if backend_of(device).takes_primitives(device)]
            if missing:
                raise watts_missing(missing)

    def _matrix_at(self, store: CalibrationStore) -> MatrixAt | None:
        """The matrix at another batch size and fanout; None where a part of it would have to be measured."""
        platform, problem = self.platform, self._problem
        assert problem is not None
        if not all_modelled(self.matrix) or problem.learners.count > 1:
            return None
        from composer.modelled_rows import follows_work

        if not all(follows_work(device) for device in usable(platform)[0]):
            return None

        def matrix_at(batch_size: int, fanout: int) -> AssignmentMatrix:
            other = dataclasses.replace(
                problem,
                train=dataclasses.replace(problem.train, batch_size=batch_size),
                replay=dataclasses.replace(problem.replay, fanout=fanout),
            )
            return Profiler(platform, _profiled(other), store, lambda _: None).matrix()

        return matrix_at

    def _check_supports(self, trainer: object) -> None:
        """Raise TrainerError if a forced implementation of the Learner cannot train the trainer."""
        forced = self._implementation
        reason = None if forced == AUTO else learners()[forced].supports(trainer)
        if reason is not None:
            raise TrainerError(
                f"The {forced} Learner cannot train {type(trainer).__name__} (unsupported: {reason}). Change the "
                f"trainer, or leave implementation={forced!r} out: then the fastest Learner that can train it is taken."
            )


@contextlib.contextmanager
def _trial_folder() -> Iterator[Path]:
    """A temporary folder for programs to try; GenerationError if there can be none."""
    try:
        folder = tempfile.TemporaryDirectory(prefix="pearl-trials-")
    except OSError as error:
        raise GenerationError(
            f"Programs cannot be tried, as they have no temporary folder: {error}. Set TMPDIR to a folder that can "
            "be written to, or try none: --budget 0, or run(budget_s=0)."
        ) from error
    with folder:
        yield Path(folder.name)


def _stated_counts(
    seed: int | None, eval_episodes: int | None, eval_interval: int | None, checkpoint_interval: int | None
) -> dict[str, int]:
    """Defaults of a program's options, as far as they are given; ConfigurationError for a wrong one."""
    given = {
        "seed": seed,
        "eval_episodes": eval_episodes,
        "eval_interval": eval_interval,
        "checkpoint_interval": checkpoint_interval,
    }
    return {name: check_count(name, value) for name, value in given.items() if value is not None}


def _learners_line(matrix: AssignmentMatrix, placement: Placement) -> str:
    """A line with the step of each implementation of the Learner on the chosen device, and the chosen one."""
    together = placement.setting == 2
    cells = [option.pair if together else option.learner for option in matrix[placement.learner].learners]
    learners = [cell.learner if isinstance(cell, PairCell) else cell for cell in cells]
    steps = [
        f"{cell.implementation} {short_number(cell.step.value_us)} us a step"
        + (" (placed)" if cell.implementation == placement.implementation else "")
        for cell in learners
        if isinstance(cell, LearnerCell)
    ]
    return f"Learner on {placement.learner}: {', '.join(steps)}"


def _check_sizes(replay: ReplaySpec, actors: ActorSpec, train: TrainSpec) -> None:
    """Raise ConfigurationError if a batch, a message or an insertion is too large for the replay."""
    check_batch_fits(replay, train)
    check_messages_fit(replay, actors, train)
    rows = message_rows(actors, train)
    check_samples_last(replay, train, insertion_rows(replay, actors, train, rows) + rows)


def _check_memory(replay: ReplaySpec, transition: TransitionSpec, platform: Platform | None) -> None:
    """Raise CapacityError if the Data Storage does not fit the free memory, or all memory of a host that is absent.

    One in a file always fits.
    """
    if replay.storage == "memmap":
        return
    room = free_memory()
    if platform is not None and any(device.absent for device in platform.devices) and platform.host.absent:
        room = sys.maxsize if platform.host.memory_gb is None else int(platform.host.memory_gb * 1e9)
    try:
        check_fits(replay.capacity, stored_nbytes(transition, replay), room)
    except CapacityError as error:
        once = "" if replay.shares else "store next observations once (share_next_obs=True), or "
        raise CapacityError(f'{error} Or {once}keep the Data Storage on disk (storage="memmap").') from error


def _memory_line(replay: ReplaySpec, transition: TransitionSpec) -> str:
    """What the Data Storage needs with what it shares, and would need without; empty for small transitions."""
    shared, whole = (replay.capacity * n for n in (stored_nbytes(transition, replay), transition.nbytes))
    if shared == whole:
        return ""
    once = "each frame once" if replay.share_frames else "next observations once"
    return (
        f"Data Storage: {readable_size(shared)} for {replay.capacity:,} transitions, {once}; stored as they are: "
        f"{readable_size(whole)}"
    )


def _profiled(problem: Problem) -> Problem:
    """The problem that is measured, with the replay in its state at the start of a run.

    A replay that may be larger than the free memory is halved until it fits. A file is also halved until it is quick to
    write, but stays far larger than the caches.
    """
    replay, capacity = problem.replay, problem.replay.capacity
    if storage_stays_on_host(replay):
        room = free_memory() // 2
        if replay.storage == "memmap":
            room = min(room, _MEASURED_FILE_BYTES, shutil.disk_usage(tempfile.gettempdir()).free // 2)
        fits = max(problem.train.batch_size, room // stored_nbytes(problem.transition, replay))
        while capacity > fits:
            capacity = max(capacity // 2, problem.train.batch_size)
    measured = dataclasses.replace(replay, capacity=capacity, alpha=replay.first_alpha)
    return dataclasses.replace(problem, replay=measured).of_one_learner


def _path(taker: str, path: object) -> Path:
    """The path; ConfigurationError names the method that takes it."""
    if not isinstance(path, str | os.PathLike) or not (text := os.fspath(path)) or not isinstance(text, str):
        raise ConfigurationError(f'{taker} takes a path, a text such as "devices.csv" or a Path; found {path!r}.')
    return Path(text)


def _seen_from(program: Path, run_dir: Path) -> Path:
    """The run folder relative to the program's folder; an absolute one elsewhere stays as the user gave it."""
    here, place = program.resolve().parent, run_dir.resolve()
    if run_dir.is_absolute() and not place.is_relative_to(here):
        return run_dir
    return Path(os.path.relpath(place, here))


def _paced_settings(trainer_class: type, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that `train_freq` and `gradient_steps` leave no choice of: none without these."""
    frequency = frequency_of(trainer_class, settings)
    if frequency is None:
        return {}
    batch = int(settings.get("batch_size", getattr(trainer_class, "batch_size", TrainSpec.batch_size)))
    return {"batch_size": batch, REPLAY_RATIO: frequency.replay_ratio(batch)}


def _plain_schedules(learner: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """The schedules among the settings of a trainer class, functions by their names."""
    stated = [name for name in schedule_settings_of(learner) if name in values]
    return {name: plain_schedule(values[name], f"{learner.__name__}.{name}") for name in stated}


def _made(value: _T | None, name: str) -> _T:
    if value is None:
        raise ConfigurationError(f"Composer.{name} exists after Composer.run(); call that first.")
    return value
