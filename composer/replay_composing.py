"""Composes for trainers that learn from a replay."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from composer.absent import check_absent, unlike_measured
from composer.algorithm1 import place, watts_missing
from composer.calibration import CalibrationStore
from composer.calibration_plan import Planner
from composer.codegen.program import ProgramSource, check_problem, generate
from composer.composing import (
    TRIAL_STEPS,
    Composing,
    Profiled,
    check_configurations,
    memory_of_host,
    trial_folder,
)
from composer.composition import Composition
from composer.description import ACTOR_FIELDS, Description
from composer.edited import check_edited
from composer.evidence import MatrixAt, all_modelled, gather_evidence
from composer.learner_nodes import LearnersModel
from composer.learners import check_host, check_learners, refuse_two_searches
from composer.learners_prediction import LearnersPredictions
from composer.matrix import AssignmentMatrix, Candidacy, LearnerCell, PairCell
from composer.placement import LearnerConfig, Placement, ReplayConfig, WholeIteration
from composer.platform import Platform, usable
from composer.power import power_of, power_plan, with_rates
from composer.problem import Problem
from composer.profiling.context import ProfilingContext
from composer.profiling.profiler import Profiler
from composer.program_defaults import ProgramDefaults
from composer.report import short_number
from composer.storage_rule import StorageRule, storage_stays_on_host
from composer.suggestion.suggestion import values_of
from composer.trials import Budget, ProgramRuns, Speed, Trials
from composer.tunables import REPLAY_RATIO, start_of
from composer.tuning import balanced_ratio, tuned, updates_per_step
from pearl.actors.actor import check_messages_fit, message_rows
from pearl.actors.environment import check_evaluation_env, probe
from pearl.actors.hindsight import check_hindsight
from pearl.actors.waiting import end_waiting
from pearl.algorithms.trainer import (
    Trainer,
    flattening_note,
    is_trainer,
    make_trainer,
    normalization_note,
    transition_of,
)
from pearl.algorithms.update_frequency import FREQ, STEPS, check_agreement, frequency_of, ratio_of_class
from pearl.backends import AUTO, backend_of, devices_of, learners, runs_on
from pearl.byte_size import readable_size
from pearl.errors import CapacityError, ConfigurationError, PlacementError, TrainerError
from pearl.exploration import make_explorer
from pearl.learner.extract import extract_networks
from pearl.replay.frames import check_shared
from pearl.replay.memory import check_fits, free_memory
from pearl.runtime.collection import insertion_rows
from pearl.runtime.data_storage import stored_nbytes
from pearl.runtime.policy_server import check_served, why_not_served
from pearl.runtime.replay_ratio import check_samples_last, check_training_begins
from pearl.spec import ActorSpec, ReplaySpec, TrainSpec, TransitionSpec, check_batch_fits

logger = logging.getLogger("pearl.composer")

_MEASURED_FILE_BYTES = 2**30
_TRAINING_DEFAULTS = ("batch_size", "replay_ratio", "learning_starts", "gamma", "n_step", "hindsight_goals")

_Profiler = TypeVar("_Profiler", bound=Profiler)


class ReplayComposing(Composing):
    """The steps of `Composer.run` for a trainer that learns from a replay."""

    matrix: AssignmentMatrix
    placement: Placement
    problem: Problem

    def __init__(self, description: Description, store: CalibrationStore) -> None:
        super().__init__(description, store)
        self.learners = description.learners
        self.learner_threads = 1  # on nodes
        self.ratio_reason: str | None = None
        self.ratio_settings: dict[str, Any] = {}  # that suit the ratio that was chosen

    def _check_stated(self) -> None:
        self.checked_problem()

    def run(self, budget_s: float | None, timesteps: int | None) -> tuple[ReplayConfig, LearnerConfig]:
        """See `Composer.run`."""
        self.timesteps = timesteps
        self._composed(Budget.of(budget_s))
        self._take_edited()
        self.say(_learners_line(self.matrix, self.placement))
        return self.placement.replay_config, self.placement.learner_config

    def profile(self, watch: Callable[[str], None] | None, budget_s: float | None) -> Profiled:
        """See `Composer.profile`."""
        self.watch = watch or self.watch
        profiler = self._composed(Budget.of(budget_s), thorough=True)
        self._take_edited()
        return Profiled(profiler.misses, profiler.hits + profiler.imports)

    def _take_edited(self) -> None:
        """Take the user's edited placement, if there is one, in place of the composed one."""
        if (edited := self.description.edited) is not None:
            check_edited(edited, self.placement)
            self.placement = edited

    def missing_measurements(self, budget_s: float | None) -> frozenset[str]:
        """See `Composer.missing_measurements`."""
        budget, planner = Budget.of(budget_s), self.prepare(Planner)
        matrix = planner.matrix()
        self._place(planner, self._decision(planner, matrix)[0], matrix, budget)
        return frozenset(planner.missing)

    def write(
        self,
        first: ReplayConfig | None,
        learner: LearnerConfig | None,
        placement: Placement | None,
        path: Path,
        defaults: ProgramDefaults,
    ) -> None:
        """See `Composing.write`."""
        check_configurations((first, learner), (ReplayConfig, LearnerConfig))
        if placement is not None:
            if not isinstance(placement, Placement):
                raise PlacementError(f"runtime_gen takes a Placement; found a {type(placement).__name__}.")
            check_edited(placement, self.placement)
        placement = (placement or self.placement).with_choice(
            replay_manager=None if first is None else first.device,
            learner=None if learner is None else learner.device,
            implementation=None if learner is None else learner.implementation,
        )
        problem = self.problem
        check_training_begins(problem.train, defaults.timesteps)
        delay = self.training.get("priority_update_delay", 0)
        if delay > placement.delay_in_effect:
            self.say(
                f"priority_update_delay={delay} has no effect in setting 2: its loop samples after the last update of "
                "priorities, a delay of 0"
            )
        self._write(problem, placement, path, defaults, first, learner)

    def _write(
        self,
        problem: Problem,
        placement: Placement,
        path: Path,
        defaults: ProgramDefaults,
        replay: ReplayConfig | None = None,
        learner: LearnerConfig | None = None,
    ) -> None:
        source = ProgramSource(
            path=path,
            placement=placement,
            replay=replay or placement.replay_config,
            learner=learner or placement.learner_config,
            problem=problem,
            device_file=self.description.device_file,
            connection_file=self.description.connection_file,
            timesteps=defaults.timesteps,
            run_dir=defaults.folder(path),
            until_return=defaults.goal(problem.actors),
            run_options=defaults.options,
            power=power_plan(self.platform, placement),
            cluster=self.description.cluster,
        )
        generate(source, {device.name: device for device in self.platform.devices})
        self._write_composition(Composition.of(self.platform, self.matrix, placement, self._chosen_settings), path)

    # --- the problem ------------------------------------------------------------------------------------------------

    def prepare(self, kind: type[_Profiler], *, thorough: bool = True) -> _Profiler:
        """Check the problem and read the machine; a profiler for both."""
        stated = self.stated_platform()
        if stated is not None:
            check_absent(stated, self.store)
        problem = self.checked_problem(stated)
        if self.timesteps is not None:
            check_training_begins(problem.train, self.timesteps)
        platform = self.platform = self._with_cluster(stated or self._discover(thorough=thorough))
        self._check_devices(platform)
        for line in unlike_measured(platform, self.store):
            self.say(line)

        def profiler(problem: Problem) -> _Profiler:
            profiled = profiled_problem(problem)
            return kind(platform, profiled, self.store, self.say, watch=self.watch, thorough=thorough)

        problem = self._vectorized(problem, profiler, platform.host)
        problem = self._with_policy_server(problem, profiler, platform, lambda: why_not_served(profiler(problem).probe))
        self.problem = self._on_nodes(problem, profiler, platform)
        if platform.host.absent:
            return kind(platform, self.problem, self.store, self.say, watch=self.watch, thorough=thorough)
        return profiler(self.problem)

    def checked_problem(self, platform: Platform | None = None) -> Problem:
        """The problem; ConfigurationError, EnvError, GenerationError or TrainerError for what is wrong with it."""
        said = self.description
        if said.rollout:
            raise ConfigurationError(
                f"{self.trainer_class.__name__} learns from a replay: leave set_rollout ([rollout]) "
                "out, or take an algorithm that learns from rollouts, such as pearl.algorithms.PPO."
            )
        probed = probe(self.actors)
        observation_space, action_space = probed.observation_space, probed.action_space
        if probed.preparation:
            self.say(probed.preparation)
        for warning in probed.warnings:
            logger.warning(warning)
        check_evaluation_env(self.actors, observation_space, action_space)
        settings, suggested, replay = dict(said.settings), dict[str, Any](), said.replay
        if said.chooses_settings:
            chosen = self._chosen(platform, observation_space, action_space)
            settings, suggested = {**values_of(chosen.settings), **settings}, values_of(chosen.training)
            if replay is None:
                values = values_of(chosen.replay)
                replay = ReplaySpec(values.pop("size"), **values)
        settings = {**settings, **{n: v for n, v in self.ratio_settings.items() if n not in said.settings}}
        assert replay is not None, "Composing looks for it"
        transition = transition_of(self.trainer_class, observation_space, action_space, settings)
        check_shared(transition, replay)
        _check_memory(replay, transition, platform)  # the weights of huge observations may need all memory
        trainer = make_trainer(self.trainer_class, observation_space, action_space, settings=dict(settings))
        if isinstance(trainer, Trainer) and (inputs := trainer.describe_inputs()):
            self.say(inputs)
        if normalized := normalization_note(trainer):
            self.say(normalized)
        schedule = {k: getattr(trainer, k) for k in _TRAINING_DEFAULTS if hasattr(trainer, k)}
        train = TrainSpec(**{**schedule, **suggested, **self.training})
        if REPLAY_RATIO in said.auto and REPLAY_RATIO not in self.training:
            _, most = updates_per_step(self.trainer_class, settings)
            train = dataclasses.replace(train, replay_ratio=most * train.batch_size)
        train = self._paced(train)
        check_hindsight(train, transition, replay, probed.unprepared_space, self.actors.env_name)
        make_explorer(getattr(trainer, "exploration", None), action_space, 1, np.random.default_rng(0))
        _check_sizes(replay, self.actors, train)
        if line := memory_line(replay, transition):
            self.say(line)
        self._check_supports(trainer)
        self.networks = functools.partial(extract_networks, trainer, observation_space.shape)
        if note := flattening_note(trainer):
            logger.info("%s.", note)
            self.say(note)
        problem = Problem(
            trainer_class=self.trainer_class,
            settings={name: value for name, value in settings.items() if name not in (FREQ, STEPS)},  # now the ratio
            observation_space=observation_space,
            action_space=action_space,
            transition=transition,
            replay=replay,
            train=train,
            actors=self.actors,
            implementation=said.implementation,
            imported_from=said.imported_from,
            learners=self.learners,
        )
        check_problem(problem)
        check_served(self.actors, trainer)
        if said.auto_learners:
            refuse_two_searches(said.auto_learners, said.auto)
        if self.learners.count > 1:
            check_learners(problem, trainer, said.auto)
        return problem

    def _paced(self, train: TrainSpec) -> TrainSpec:
        """With the replay ratio that `train_freq` and `gradient_steps` mean, if the trainer or its settings have them.

        Raises TrainerError if another one is stated, too.
        """
        trainer, said = self.trainer_class, self.description
        frequency = frequency_of(trainer, said.settings) if is_trainer(trainer) else None
        if frequency is None:
            if REPLAY_RATIO not in said.auto:
                self.ratio_reason = None
            return train
        stated: dict[str, object] = {}
        if (of_class := ratio_of_class(trainer)) is not None:
            stated[trainer.__name__] = of_class
        if REPLAY_RATIO in said.settings:
            stated["set_train_function"] = said.settings[REPLAY_RATIO]
        if REPLAY_RATIO in self.training or REPLAY_RATIO in said.auto:
            stated["set_training ([training])"] = self.training.get(REPLAY_RATIO, AUTO)
        check_agreement(frequency, train.batch_size, stated)
        ratio, self.ratio_reason = frequency.replay_ratio(train.batch_size), frequency.reason(train.batch_size)
        self.say(f"replay_ratio: {ratio:g}, {self.ratio_reason}")
        return dataclasses.replace(train, replay_ratio=ratio)

    def _check_supports(self, trainer: object) -> None:
        """Raise TrainerError if a forced implementation of the Learner cannot train the trainer."""
        forced = self.description.implementation
        reason = None if forced == AUTO else learners()[forced].supports(trainer)
        if reason is not None:
            raise TrainerError(
                f"The {forced} Learner cannot train {type(trainer).__name__} (unsupported: {reason}). Change the "
                f"trainer, or leave implementation={forced!r} out: then the fastest Learner that can train it is taken."
            )

    def _check_devices(self, platform: Platform) -> None:
        """Raise for faults that show without a measurement: no device, no device for a forced Learner, no watts."""
        devices, unavailable = usable(platform)
        if not devices:
            reasons = "; ".join(f"{device.name}: {reason}" for device, reason in unavailable)
            raise PlacementError(
                f"No device of {self.description.device_file} can be used here. {reasons}. Add a cpu row."
            )
        forced = self.description.implementation
        if self.learners.count > 1:
            check_host(platform.host, forced)
        modelled = any(not backend_of(device).is_here for device in devices)  # for every implementation alike
        if forced != AUTO and not modelled and not any(runs_on(forced, device) for device in devices):
            raise PlacementError(
                f"The {forced} Learner runs on {devices_of(forced)}; found none among "
                f"{', '.join(device.name for device in devices)}. Add one to the device CSV, or leave "
                f"implementation={forced!r} out."
            )
        if self.description.metric == "power_efficiency":
            unstated = [device for device in devices if power_of(platform, (device.name,)).missing]
            missing = [device.name for device in unstated if backend_of(device).takes_primitives(device)]
            if missing:
                raise watts_missing(missing)

    def _on_nodes(
        self, problem: Problem, profiler: Callable[[Problem], ProfilingContext], platform: Platform
    ) -> Problem:
        """The problem with its Actors and Learners on the nodes of the platform, if it has any."""
        spec = problem.learners
        if not platform.nodes:
            self.nodes = ()
            if spec.elsewhere:
                raise ConfigurationError(
                    f"{spec.count} Learners are to be on nodes ({', '.join(node for node, _ in spec.elsewhere)}), and "
                    "no cluster is known. Call set_cluster (cluster in [platform]), or give the device CSV rows with a "
                    "node; or leave nodes out."
                )
            return dataclasses.replace(problem, learners=dataclasses.replace(spec, nodes=()))
        if unsuited := [name for name in ACTOR_FIELDS if name in self.description.auto]:
            raise ConfigurationError(
                f'{unsuited[0]} cannot be "auto" with Actors on other nodes: the search tries programs on this '
                "machine. State a number."
            )
        threads = self.learner_threads
        problem = self._spread(problem, platform, profiler(problem).transition_us, threads, spec)
        if spec.nodes:  # in the order of the placement, as ranks follow it
            places = tuple((found.node, found.learners) for found in self.nodes if found.learners)
            spec = dataclasses.replace(spec, nodes=places)
        return dataclasses.replace(problem, learners=spec, most_threads=threads if spec.nodes else 0)

    # --- the placement ----------------------------------------------------------------------------------------------

    def _composed(self, budget: Budget, *, thorough: bool = False) -> Profiler:
        """Compose, and again if a search changes settings; the last profiler."""

        def compose(budget: Budget = budget) -> Profiler:
            profiler = self.prepare(Profiler, thorough=thorough or budget.stated)
            self._compose(profiler, budget)
            return profiler

        if self.description.auto_learners:
            return self._with_learners(compose(dataclasses.replace(budget, seconds=0.0)), compose, budget)
        profiler = compose()
        if self.learners.count > 1 and self.platform.nodes:
            return self._with_learners(profiler, compose, budget)
        if self.description.auto and self._tune(budget):
            return compose()
        return profiler

    def _compose(self, profiler: Profiler, budget: Budget) -> None:
        """Set matrix and placement, and keep the machine in the store."""
        matrix, imported = profiler.with_reports(profiler.matrix())
        end_waiting()
        matrix = with_rates(matrix, profiler.platform, profiler.problem.train.batch_size)
        self.matrix = matrix
        for line in imported:
            self.say(line)
        self._keep_machine(profiler.platform)
        decide, rule = self._decision(profiler, matrix)
        profiler.forget_storage()
        placement = self._place(profiler, decide, matrix, budget)
        imports = f", {profiler.imports} imported" if profiler.imports else ""
        self.say(f"profiled: {profiler.misses} measured, {profiler.hits} known from earlier runs{imports}")
        evidence = gather_evidence(decide, placement, matrix, profiler.platform, rule, self._matrix_at())
        reason = self.ratio_reason
        self.placement = dataclasses.replace(placement, evidence=evidence, replay_ratio_reason=reason, nodes=self.nodes)

    def _place(
        self, profiler: Profiler, decide: Callable[..., Placement], matrix: AssignmentMatrix, budget: Budget
    ) -> Placement:
        def decided(wholes: Mapping[Candidacy, WholeIteration]) -> Placement:
            return decide(matrix, profiler.platform, wholes=wholes)

        problem = profiler.problem
        if problem.learners.count > 1 or problem.actors.nodes:  # programs without --bench, or with --ray
            return decided({})
        with self._programs(profiler, self.problem) as programs:
            return Trials(programs, decided, budget, self.say).placed()

    def _decision(
        self, profiler: Profiler, matrix: AssignmentMatrix, problem: Problem | None = None
    ) -> tuple[Callable[..., Placement], StorageRule]:
        """`place` for this problem, or another, and the rule for the Data Storage that it follows."""
        problem, platform = problem or self.problem, profiler.platform
        devices = {device.name: device for device in platform.devices}
        rule = StorageRule(devices, platform.host.name, problem.replay, problem.transition.nbytes)
        decide = functools.partial(
            place,
            metric=self.description.metric,
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
        """The arguments of `place` for several Learners; empty for one."""
        several, pair, spec = profiler.side_by_side(matrix), profiler.fastest_pair(matrix), problem.learners
        if several is None or pair is None:
            return {}
        if spec.nodes and self.nodes:
            return LearnersModel.of(problem, profiler, several, pair).arguments(spec, self.nodes)
        return {"average_us": several.waited_us(spec), "stretch": several.stretch(spec)}

    def _matrix_at(self) -> MatrixAt | None:
        """The matrix at another batch size and fanout; None where a part of it would have to be measured."""
        platform, problem = self.platform, self.problem
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
            return Profiler(platform, profiled_problem(other), self.store, lambda _: None).matrix()

        return matrix_at

    @contextlib.contextmanager
    def _programs(self, profiler: Profiler, problem: Problem) -> Iterator[ProgramRuns]:
        with trial_folder() as folder:
            yield ProgramRuns(profiler, functools.partial(self._write_trial, problem), folder)

    def _write_trial(self, problem: Problem, placement: Placement, path: Path) -> Path:
        """Write the program of a placement to try."""
        self._write(problem, placement, path, ProgramDefaults(timesteps=TRIAL_STEPS))
        return path

    def _profiler(self, platform: Platform, problem: Problem, *, thorough: bool = True) -> Profiler:
        """A profiler for another problem than the one that is composed."""
        profiled = profiled_problem(problem)
        return Profiler(platform, profiled, self.store, self.say, watch=self.watch, thorough=thorough)

    # --- what the user left to the composer -------------------------------------------------------------------------

    def _tune(self, budget: Budget) -> bool:
        """Search the settings that were left to the composer; returns whether to compose again with new values."""
        until, placement = time.monotonic() + budget.seconds, self.placement

        def measure(problem: Problem, run: int) -> Speed | None:
            _check_sizes(problem.replay, problem.actors, problem.train)
            profiler = self._profiler(self.platform, problem)
            with self._programs(profiler, problem) as programs:
                return programs.speed(placement, run, until)

        found = tuned(self.problem, placement, self.description.auto, measure, self.say)
        self._set_found(found)
        if REPLAY_RATIO in self.description.auto:
            self._balance()
        return REPLAY_RATIO in self.description.auto or found != start_of(self.description.auto)

    def _balance(self) -> None:
        """Choose the replay ratio by the times of the Actors and of the placement's Learner."""
        problem = dataclasses.replace(self.problem, actors=self.actors)
        if self.placement.host != self.platform.host.name or self.platform.host.absent:
            raise ConfigurationError('replay_ratio="auto" needs the times of Actors on this machine. State a number.')
        collection_us = self._profiler(self.platform, problem).collection_us
        bounds = updates_per_step(problem.trainer_class, problem.settings)
        batch = problem.train.batch_size
        ratio, self.ratio_reason = balanced_ratio(batch, collection_us, self.placement.t_itr_us, bounds)
        self.training = self.training | {REPLAY_RATIO: ratio}
        self.say(f"replay_ratio: {ratio:g}, {self.ratio_reason}")
        if issubclass(problem.trainer_class, Trainer):
            self.ratio_settings = problem.trainer_class.settings_at(ratio / batch)

    def _set_found(self, values: Mapping[str, int]) -> None:
        """Use these values of settings that were left to the composer."""
        actors: dict[str, Any] = {ACTOR_FIELDS[name]: value for name, value in values.items() if name in ACTOR_FIELDS}
        if actors:
            self.actors = dataclasses.replace(self.actors, **actors)
        self.training = self.training | {n: value for n, value in values.items() if n not in ACTOR_FIELDS}

    def _with_learners(self, profiler: Profiler, compose: Callable[[Budget], Profiler], budget: Budget) -> Profiler:
        """Compose with as many Learners as are fastest, where they are, by measurements of their parts.

        `profiler` is that of the present composition. Returns the last profiler.
        """
        predictions, said = self._predictions(profiler), self.description
        choice = predictions.choice(said.learners, said.auto_learners, said.timesteps)
        self.say(f"Learners: {choice.reason}")
        chosen, threads = said.learners, self.learner_threads
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
        has_changed = (chosen, threads) != (self.learners, self.learner_threads)
        if has_changed or (choice.count == 1 and budget.seconds):
            self.learners, self.learner_threads = chosen, threads
            profiler = compose(budget)
            profiler.misses, profiler.hits = profiler.misses + misses, hits
        else:
            profiler.misses = misses
        self.placement = dataclasses.replace(self.placement, learners_choice=choice)
        return profiler

    def _predictions(self, profiler: Profiler) -> LearnersPredictions:
        def profiled(
            several: Problem, platform: Platform
        ) -> tuple[Profiler, AssignmentMatrix, Callable[..., Placement]]:
            other = self._profiler(platform, several, thorough=profiler.thorough)
            matrix = other.matrix()
            decide = self._decision(other, matrix, several)[0]
            other.forget_storage()
            return other, matrix, decide

        return LearnersPredictions(self.problem, profiler, self.matrix, self.placement, profiled)


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
    """Raise CapacityError if the Data Storage does not fit the memory of the host; one in a file always fits."""
    if replay.storage == "memmap":
        return
    try:
        check_fits(replay.capacity, stored_nbytes(transition, replay), memory_of_host(platform))
    except CapacityError as error:
        once = "" if replay.shares else "store next observations once (share_next_obs=True), or "
        raise CapacityError(f'{error} Or {once}keep the Data Storage on disk (storage="memmap").') from error


def memory_line(replay: ReplaySpec, transition: TransitionSpec) -> str:
    """A line on the memory of the Data Storage with and without sharing; empty for small transitions."""
    shared, whole = (replay.capacity * n for n in (stored_nbytes(transition, replay), transition.nbytes))
    if shared == whole:
        return ""
    once = "each frame once" if replay.share_frames else "next observations once"
    return (
        f"Data Storage: {readable_size(shared)} for {replay.capacity:,} transitions, {once}; stored as they are: "
        f"{readable_size(whole)}"
    )


def profiled_problem(problem: Problem) -> Problem:
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
