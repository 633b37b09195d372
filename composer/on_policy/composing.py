"""Composes for trainers that learn from rollouts of their present policy."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path

from composer.composing import (
    TRIAL_STEPS,
    Composing,
    Profiled,
    check_configurations,
    memory_of_host,
    trial_folder,
)
from composer.composition import RolloutComposition
from composer.description import CHOOSE_OF_ROLLOUTS
from composer.learners import refuse_learners
from composer.on_policy.composition import refuse_replay_settings, rollout_problem
from composer.on_policy.matrix import RolloutMatrix
from composer.on_policy.placement import (
    AdvantagesConfig,
    RolloutLearnerConfig,
    RolloutPlacement,
    place_rollouts,
)
from composer.on_policy.problem import RolloutProblem
from composer.on_policy.profiling import RolloutProfiler
from composer.on_policy.program import RolloutSource, generate_rollouts
from composer.on_policy.trials import RolloutTrials
from composer.platform import Platform
from composer.power import power_plan
from composer.program_defaults import ProgramDefaults
from composer.suggestion.suggestion import values_of
from composer.trials import Budget
from pearl.actors.environment import probe
from pearl.actors.waiting import end_waiting
from pearl.algorithms.on_policy import OnPolicyTrainer
from pearl.errors import ConfigurationError, PlacementError
from pearl.learner.extract import extract_networks
from pearl.runtime.policy_server import why_not_served
from pearl.spec import ONE_LEARNER


class RolloutComposing(Composing):
    """The steps of `Composer.run` for a trainer that learns from rollouts."""

    matrix: RolloutMatrix
    placement: RolloutPlacement
    problem: RolloutProblem

    def run(self, budget_s: float | None, timesteps: int | None) -> tuple[AdvantagesConfig, RolloutLearnerConfig]:
        """See `Composer.run`."""
        self.timesteps = timesteps
        self._composed(Budget.of(budget_s))
        return self.placement.choice.advantages, self.placement.choice.learner

    def profile(self, watch: Callable[[str], None] | None, budget_s: float | None) -> Profiled:
        """See `Composer.profile`."""
        self.watch = watch or self.watch
        return self._composed(Budget.of(budget_s), thorough=True)

    def write(
        self,
        first: AdvantagesConfig | None,
        learner: RolloutLearnerConfig | None,
        placement: RolloutPlacement | None,
        path: Path,
        defaults: ProgramDefaults,
    ) -> None:
        """See `Composing.write`."""
        check_configurations((first, learner), (AdvantagesConfig, RolloutLearnerConfig))
        self._check_length(self.problem, defaults.timesteps)
        if placement is not None and not self._has_composed(placement):
            raise PlacementError(
                "A placement of runtime_gen must be the composer's own, with one of its candidates as choice "
                "(composer.placement.choosing(candidate)): other numbers were never measured."
            )
        self._write(placement or self.placement, path, defaults, first, learner)

    def _has_composed(self, placement: object) -> bool:
        """Whether it is this one but for the order of the candidates."""
        if not isinstance(placement, RolloutPlacement):
            return False
        mine, its = self.placement.candidates, placement.candidates
        same = len(mine) == len(its) and all(candidate in mine for candidate in its)
        return same and dataclasses.replace(placement, candidates=mine) == self.placement

    @staticmethod
    def _check_length(problem: RolloutProblem, timesteps: int) -> None:
        if timesteps < problem.rows:
            raise ConfigurationError(
                f"{timesteps:,} steps are less than one rollout of {problem.rollout.horizon} steps x "
                f"{problem.actors.env_count} environments: nothing would be trained. Give more, or a smaller horizon."
            )

    def _write(
        self,
        placement: RolloutPlacement,
        path: Path,
        defaults: ProgramDefaults,
        advantages: AdvantagesConfig | None = None,
        learner: RolloutLearnerConfig | None = None,
    ) -> None:
        advantages, learner = advantages or placement.choice.advantages, learner or placement.choice.learner
        placement = placement.with_choice(advantages.device, learner.device, learner.implementation, learner.threads)
        source = RolloutSource(
            path=path,
            placement=placement,
            advantages=advantages,
            learner=learner,
            problem=self.problem,
            device_file=self.description.device_file,
            connection_file=self.description.connection_file,
            timesteps=defaults.timesteps,
            run_dir=defaults.folder(path),
            until_return=defaults.goal(self.problem.actors),
            run_options=defaults.options,
            power=power_plan(self.platform, placement),
            cluster=self.description.cluster,
        )
        generate_rollouts(source, {device.name: device for device in self.platform.devices})
        made = RolloutComposition.of(self.platform, self.matrix, placement, self._chosen_settings)
        self._write_composition(made, path)

    def _check_stated(self) -> None:
        self._refuse()
        self._checked_problem()

    def _refuse(self) -> None:
        """Raise ConfigurationError for settings that only a trainer with a replay has."""
        said = self.description
        refuse_replay_settings(self.trainer_class, said.replay, self.training, said.auto, said.metric)
        refuse_learners(self.trainer_class, said.learners)
        if said.edited is not None:
            raise ConfigurationError(
                f"{self.trainer_class.__name__} learns from rollouts, and set_placement (--placement) gave a placement "
                f"of a trainer that learns from a replay: leave it out. {CHOOSE_OF_ROLLOUTS}"
            )

    def _checked_problem(self, platform: Platform | None = None) -> tuple[RolloutProblem, OnPolicyTrainer]:
        """The checked problem and a trainer."""
        said, chosen = self.description, None
        if said.chooses_settings:
            spaces = probe(self.actors)
            chosen = self._chosen(platform, spaces.observation_space, spaces.action_space)
        return rollout_problem(
            self.trainer_class,
            {**values_of(chosen.settings if chosen else ()), **said.settings},
            self.actors,
            {**values_of(chosen.rollout if chosen else ()), **said.rollout},
            {**values_of(chosen.training if chosen else ()), **self.training},
            said.implementation,
            said.imported_from,
            self.say,
            memory_of_host(platform),
        )

    def _composed(self, budget: Budget, *, thorough: bool = False) -> Profiled:
        """Set problem, platform, matrix and placement; return the measurements behind them."""
        self._refuse()
        said, thorough = self.description, thorough or budget.stated
        if "count" in said.auto_learners:
            self.say(f"one Learner: {self.trainer_class.__name__} learns from rollouts, and has no banks of a replay")
        stated = self.stated_platform()
        problem, trainer = self._checked_problem(stated)
        shape = problem.observation_space.shape
        self.networks = functools.partial(extract_networks, trainer, shape)
        if self.timesteps is not None:
            self._check_length(problem, self.timesteps)
        platform = self.platform = self._with_cluster(stated or self._discover(thorough=thorough))

        def measuring(problem: RolloutProblem) -> RolloutProfiler:
            return RolloutProfiler(platform, problem, self.store, self.say, watch=self.watch)

        problem = self._vectorized(problem, measuring, platform.host)
        rollout = problem.rollout
        problem = self._with_policy_server(problem, measuring, platform, lambda: why_not_served(trainer, rollout))
        profiler = RolloutProfiler(platform, problem, self.store, self.say, watch=self.watch, thorough=thorough)
        self.problem = placed = problem
        if platform.nodes:
            learners = ONE_LEARNER if problem.rollout.policy_lag else None  # that train while Actors collect
            placed = self._spread(problem, platform, profiler.transition_us, learners=learners)
        self.matrix = profiler.matrix()
        end_waiting()
        self._keep_machine(platform)
        placement = place_rollouts(self.matrix, platform, problem)
        with trial_folder() as folder:
            placement = RolloutTrials(profiler, self._write_trial, folder, budget).placed(placement)
        self.problem = placed  # programs were tried with all Actors here
        self.placement = dataclasses.replace(placement, nodes=self.nodes) if platform.nodes else placement
        self.say(f"profiled: {profiler.misses} measured, {profiler.hits} known from earlier runs")
        return Profiled(profiler.misses, profiler.hits)

    def _write_trial(self, placement: RolloutPlacement, path: Path) -> Path:
        """Write the program of a placement to try."""
        self._write(placement, path, ProgramDefaults(timesteps=TRIAL_STEPS, until_return="none"))
        return path
