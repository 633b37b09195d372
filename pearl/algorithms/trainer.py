"""The base of the built-in algorithms, and how any trainer class, also the user's own, is made and checked."""

from __future__ import annotations

import abc
import dataclasses
import difflib
import functools
import inspect
import itertools
import math
import numbers
import operator
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol, TypeAlias, TypeGuard, runtime_checkable

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from pearl.action_masks import mask_parts
from pearl.algorithms.arrays import ArrayModule, ArrayParts, ArrayStatistics, TorchRandom, has_convolutions
from pearl.algorithms.batch import Batch, batch_type
from pearl.algorithms.inputs import random_observations
from pearl.algorithms.lazy_dynamo import mark_optimizers_lazily
from pearl.algorithms.other_names import counterpart
from pearl.algorithms.spaces import ActionKind
from pearl.algorithms.suggestions import (
    Choice,
    Facts,
    choose_gamma,
    choose_learning_rate,
    choose_learning_starts,
    choose_sizes,
)
from pearl.algorithms.update_frequency import FREQ, SPELLINGS, STEPS, frequency_of, respelled
from pearl.algorithms.update_rule import UpdateRule, overridden
from pearl.error_place import described
from pearl.errors import ConfigurationError, PearlError, TrainerError
from pearl.exploration import Exploration, PolicySampling, scheduled_values
from pearl.lazy_torch import is_imported, nn, torch
from pearl.learner.flat import FlatParameters
from pearl.moments import Moments, normalized
from pearl.schedules import Schedule, check_followed, factor_at, plain_schedule
from pearl.spec import OBSERVATION_STATISTICS, RETURN_STATISTICS, RolloutSpec, TrainSpec, TransitionSpec

DataFlowKind: TypeAlias = Literal["replay", "rollout"]
# Test inputs of get_action: enough that a network with too many outputs chooses an action that does not exist.
_TRIED_OBSERVATIONS, _TRIED_NUMBERS = 64, 4096


@runtime_checkable
class TrainerLike(Protocol):
    """The two members every trainer must have (paper, Sec. III-B)."""

    def get_action(self, obs: torch.Tensor) -> torch.Tensor:
        """Greedy actions `(envs, *action)` for observations `(envs, *obs)`."""

    def update_policy(self, batch: Batch, weights: torch.Tensor) -> torch.Tensor:
        """One SGD step on `batch` with importance weights `(batch,)`; returns new priorities `(batch,)`."""


@runtime_checkable
class SamplesActions(Protocol):
    """The additional method that `PolicySampling` needs."""

    def sample_action(self, obs: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """Actions `(envs, *action)` drawn from the policy by standard normal `noise` of that shape, float32."""


@runtime_checkable
class RecurrentTrainer(Protocol):
    """Additional methods of a trainer with a recurrent policy: actions depend on a state that goes from step to step.

    The state of each environment is one row of numbers: of an LSTM, hidden and cell state one after the other. Actors,
    evaluations and saved policies begin every episode with `initial_state`. An algorithm that trains on the states in
    which its Actors were declares their sequences (`TransitionSpec.sequences`).
    """

    def initial_state(self, count: int) -> torch.Tensor:
        """The states `(count, size)` float32 at the beginning of an episode, on the trainer's device."""

    def get_action_from(self, obs: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Greedy actions `(envs, *action)` for `obs` `(envs, *obs)` in `state` `(envs, size)`, and the next states."""


@runtime_checkable
class RecurrentRolloutTrainer(RecurrentTrainer, Protocol):
    """Additional methods of an on-policy trainer with a recurrent policy.

    Rollouts are collected in states that may hold more than the policy's: the value network may be recurrent, too.
    """

    def sample_action_from(
        self, obs: torch.Tensor, noise: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `get_action_from`, drawn from the policy's distribution by `noise` `(envs, size)`."""

    def initial_rollout_state(self, count: int) -> torch.Tensor:
        """The states `(count, size)` float32 at the beginning of an episode, in which rollouts are collected."""

    def explore_from(
        self, obs: torch.Tensor, noise: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Drawn actions `(envs, *action)`, their log probabilities and the values `(envs,)`, and the next states."""

    def values_from(self, obs: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """Values `(envs,)` in such states."""


class Phase(NamedTuple):
    """One backward pass and weight update: `compute` runs for each sub-batch, then `apply` runs once.

    `compute(batch, weights, batch_size)` adds the gradients of a sub-batch of a batch of `batch_size` and returns
    priorities `(sub_batch,)` or None.
    """

    name: str
    compute: Callable[[Batch, torch.Tensor, int], torch.Tensor | None]
    apply: Callable[[], None]


class Trainer(abc.ABC):
    """Base of the built-in algorithms.

    Class attributes are settings: override them in a subclass, or pass them to `Composer.set_train_function`.
    `batch_size`, `replay_ratio` and other training settings are the defaults of `TrainSpec`. A replay ratio that is
    left to the composer ("auto") is `least_updates_per_step` to `most_updates_per_step` batches for each transition.
    `train_freq` and `gradient_steps` are Stable-Baselines3's way to state a replay ratio
    (pearl.algorithms.update_frequency). `learning_rate_schedule` (pearl.schedules) is the factor of all learning rates
    over the run's steps: with "linear" they fall to 0. `hindsight_goals`, in environments with goals, is how many
    further transitions each step brings, with goals that its episode reached later (pearl.actors.hindsight).

    With `normalize_observations`, stored observations are shifted and scaled by running mean and deviation, with
    `reward_standardization` "returns", rewards are divided by the deviation of the discounted return (both as
    Stable-Baselines3's VecNormalize does, clipped to 10 deviations): by the Actors, with the statistics of all. The
    Learner, `get_action` and the networks then see normalised observations; `as_stored` normalises an environment's.
    """

    _action_kinds: ClassVar[tuple[ActionKind, ...]] = ()  # for messages that say which algorithm takes which actions
    _knows_masks: ClassVar[bool] = False  # whether it has the setting `action_masks`
    _unused: ClassVar[frozenset[str]] = frozenset()  # settings of every trainer that this one refuses
    _rows_are_independent: ClassVar[bool] = True  # False: batches are normalised as a whole, so they cannot be split
    _learning_rates: ClassVar[Mapping[str, str]] = {"optimizer": "learning_rate"}  # settings, by optimizer

    batch_size: int = 64
    replay_ratio: float = 8.0
    train_freq: int | tuple[int, str] | None = None
    gradient_steps_each: int | None = None  # "gradient_steps" in the body of a class and among settings
    least_updates_per_step: float = 0.0
    most_updates_per_step: float = 1.0
    learning_starts: int = 1000
    gamma: float = 0.99
    n_step: int = 1
    hindsight_goals: int = 0
    hidden_sizes: tuple[int, ...] = (64, 64)
    learning_rate: float = 1e-3
    learning_rate_schedule: Schedule = "constant"
    normalize_observations: bool = False
    reward_standardization: str = "none"
    exploration: Exploration | None = None
    callbacks: Sequence[Any] = ()  # of pearl.callbacks

    _inputs: tuple[torch.Tensor, ...] | None = None  # what `give_inputs` gave

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name, kept_as in SPELLINGS.items():
            stated = vars(cls).get(name)
            if stated is not None and not isinstance(stated, property):
                delattr(cls, name)
                setattr(cls, kept_as, stated)

    def __init__(
        self,
        observation_space: gym.Space[Any],
        action_space: gym.Space[Any],
        *,
        seed: int = 0,
        device: str = "cpu",
        **settings: Any,
    ) -> None:
        apply_settings(self, respelled(settings))
        self.observation_space = observation_space
        self.action_space = action_space
        self.seed = seed
        self._device = str(device)
        self.step_count = np.zeros(1, np.int64)  # an array, since kernels increment it
        self.input_shape = tuple(observation_space.shape or ())
        self.check_spaces()
        self._check_settings()
        self._arrays = self.array_parts(TorchRandom(seed)) if self._may_be_arrays() else None
        if self._arrays is None:
            self._build()
            return
        for name in self.transition_statistics:
            setattr(self._arrays, name, ArrayStatistics(self.statistics_shape(name)))

    def _build(self, arrays: ArrayParts | None = None) -> None:
        mark_optimizers_lazily()
        # Building networks must not change the program's own random numbers, and they must learn, wherever it is asked.
        with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.enable_grad():
            torch.manual_seed(self.seed)
            self.build()
            self._build_statistics()
            self.check_networks()
            if arrays is not None:
                arrays.give_to(self)

    def left_networks(self) -> str:
        """The attribute that keeps flat parameters of a network that is no longer in the trainer; "" if none does."""
        networks = {id(p) for module in modules_of(self).values() for p in module.parameters()}
        flats = ((name, flat) for name, flat in vars(self).items() if isinstance(flat, FlatParameters))
        return next((name for name, flat in flats if not flat.is_of(networks)), "")

    # --- running statistics of stored transitions --------------------------------------------------------------------

    @property
    def transition_statistics(self) -> tuple[str, ...]:
        """Statistics by which Actors normalise transitions: attributes of the trainer, and fields of messages.

        `OBSERVATION_STATISTICS`, `RETURN_STATISTICS`, both or none, as the settings say.
        """
        if self.data_flow() != "replay":
            return ()
        chosen = self.normalize_observations, self.reward_standardization != "none"
        return tuple(name for name, on in zip((OBSERVATION_STATISTICS, RETURN_STATISTICS), chosen, strict=True) if on)

    def statistics_shape(self, name: str) -> tuple[int, ...]:
        """The shape of one item of the statistics `name`: an observation, or a number."""
        return self.input_shape if name == OBSERVATION_STATISTICS else ()

    def _build_statistics(self) -> None:
        for name in self.transition_statistics:
            from pearl.algorithms.policy_and_value import ObservationStatistics

            setattr(self, name, ObservationStatistics(self.statistics_shape(name)))

    def _statistics_memory(self, name: str) -> list[np.ndarray]:
        """Count, mean and squared distances, in place."""
        held = getattr(self.parts, name)
        if self._arrays is not None:
            return [array.values for _, array in held.named_buffers()]
        return [buffer.numpy() for _, buffer in held.named_buffers()]

    def read_statistics(self, name: str) -> np.ndarray:
        """The statistics `name` as `Moments.flat` has them, `(1 + 2 * size,)` float64."""
        return np.concatenate([part.reshape(-1) for part in self._statistics_memory(name)])

    def write_statistics(self, name: str, flat: np.ndarray) -> None:
        """The inverse; not while something reads them."""
        start = 0
        for part in self._statistics_memory(name):
            part[...] = flat[start : start + part.size].reshape(part.shape)
            start += part.size

    @property
    def observation_moments(self) -> Moments | None:
        """A copy of the statistics by which observations are normalised before they are stored; None: by none."""
        if OBSERVATION_STATISTICS not in self.transition_statistics:
            return None
        moments = Moments(self.input_shape)
        moments.merge(self.read_statistics(OBSERVATION_STATISTICS))
        return moments

    def as_stored(self, obs: np.ndarray) -> np.ndarray:
        """An environment's observations `(n, *obs)` as transitions hold them and `get_action` takes them."""
        return storing(self)(obs)

    # --- networks in arrays, until something needs torch -------------------------------------------------------------

    def _may_be_arrays(self) -> bool:
        return self._device == "cpu" and is_as_built_in(type(self))

    def array_parts(self, random: TorchRandom) -> ArrayParts | None:
        """What `build` makes, in arrays and with the same names and numbers; None: only in torch."""
        return None

    @property
    def arrays(self) -> ArrayParts | None:
        """The networks and optimizers where they are in arrays; None where they are in torch."""
        return self._arrays

    @property
    def parts(self) -> Any:
        """Networks, optimizers and parameters by their names, in torch or in arrays, wherever they are."""
        return self if self._arrays is None else self._arrays

    def in_torch(self) -> Trainer:
        """The trainer with all its networks and optimizers in torch, from now on, on the same memory."""
        arrays, self._arrays = self._arrays, None
        if arrays is not None:
            self._build(arrays)
        return self

    if not TYPE_CHECKING:  # for type checkers, only what is declared is there

        def __getattr__(self, name: str) -> Any:
            """An attribute that `build` makes: reading it moves everything to torch."""
            arrays = self.__dict__.get("_arrays")
            if arrays is None or name not in vars(arrays):
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            return getattr(self.in_torch(), name)

        def __setattr__(self, name: str, value: Any) -> None:
            arrays = self.__dict__.get("_arrays")
            if arrays is not None and name in vars(arrays):
                self.in_torch()
            super().__setattr__(name, value)
            if is_imported() and isinstance(value, torch.optim.Optimizer):
                self._serve(value)
                self._keep_rates(name, value)

    def _serve(self, optimizer: torch.optim.Optimizer) -> None:
        """Let the flat parameters that `optimizer` steps serve it."""
        stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for flat in vars(self).values():
            if isinstance(flat, FlatParameters) and any(flat.parameter is parameter for parameter in stepped):
                flat.serve(optimizer)

    def _keep_rates(self, name: str, optimizer: torch.optim.Optimizer) -> None:
        """Keep the rates that an optimizer was made with, in units of its setting if it has one, for `set_progress`."""
        unit = self._unit_of_rate(name)
        rates: dict[str, list[float]] = vars(self).setdefault("_made_rates", {})
        rates[name] = [float(group["lr"]) / unit for group in optimizer.param_groups]

    def _unit_of_rate(self, optimizer: str) -> float:
        setting = self._learning_rates.get(optimizer)
        return 1.0 if setting is None else float(getattr(self, setting))

    @property
    def device(self) -> torch.device:
        """Where the networks are."""
        return torch.device(self._device)

    @classmethod
    def data_flow(cls) -> DataFlowKind:
        """Whether it trains on samples of a replay, or on rollouts of the present policy, each dropped afterwards."""
        return "replay"

    @classmethod
    def transition(cls, observation_space: gym.Space[Any], action_space: gym.Space[Any]) -> TransitionSpec:
        """The columns of a transition. Override to add some: `super().transition(...).with_columns(Column(...))`."""
        return TransitionSpec.from_spaces(observation_space, action_space)

    @classmethod
    def transition_with(
        cls, transition: TransitionSpec, settings: Mapping[str, Any], action_space: gym.Space[Any]
    ) -> TransitionSpec:
        """What `settings` (those that are not given: the class's) add to the declared columns `transition`."""
        observations, rewards = (
            settings.get(name, getattr(cls, name)) for name in ("normalize_observations", "reward_standardization")
        )
        if cls.data_flow() != "replay":
            return transition
        return transition.normalized(observations=bool(observations), rewards=rewards != "none")

    @classmethod
    def recommended(cls, facts: Facts) -> str:
        """Why this algorithm is the one to begin with in such an environment; "" if it is not."""
        return ""

    @classmethod
    def suggestions(cls, facts: Facts) -> tuple[Choice, ...]:
        """Settings of the class, of `TrainSpec` and of `RolloutSpec` for an environment and a machine, with reasons."""
        sized = choose_sizes(facts, batches=(128, 64, 32), updates=(0.25, 0.5, 1.0))
        return (
            *sized.choices,
            choose_learning_rate(facts, sized.hidden_sizes),
            choose_gamma(facts),
            choose_learning_starts(facts),
        )

    @classmethod
    def settings_at(cls, updates: float) -> dict[str, Any]:
        """Settings that suit so many gradient steps for each environment step, where the composer chooses these."""
        return {}

    @property
    def gradient_steps(self) -> int:
        """Steps trained so far."""
        return int(self.step_count[0])

    @gradient_steps.setter
    def gradient_steps(self, steps: int) -> None:
        self.step_count[0] = steps

    @abc.abstractmethod
    def check_spaces(self) -> None:
        """Raise EnvError if the algorithm cannot handle the spaces."""

    @abc.abstractmethod
    def build(self) -> None:
        """Make the networks and optimizers on `self.device`."""

    def _check_settings(self) -> None:
        """Raise TrainerError for settings that would fail later, with a misleading error."""
        try:
            whole = all(operator.index(size) >= 1 for size in self.hidden_sizes)
        except TypeError:
            whole = False
        self._require(whole, "hidden_sizes", "whole numbers of at least 1, such as (64, 64)")
        most, least = self.most_updates_per_step, self.least_updates_per_step
        self._require(is_number(most) and 0 < most <= 1000, "most_updates_per_step", "a number above 0, at most 1000")
        self._require(is_number(least) and 0 <= least <= most, "least_updates_per_step", f"a number from 0 to {most:g}")
        self._check_schedules()
        frequency_of(type(self), {FREQ: self.train_freq, STEPS: self.gradient_steps_each})
        tau = getattr(self, "tau", 1.0)
        self._require(is_number(tau) and 0 <= tau <= 1, "tau", "a number in [0, 1]")
        norm = getattr(self, "max_grad_norm", 0.0)
        self._require(is_number(norm) and norm >= 0, "max_grad_norm", "a number of at least 0; 0 is for any norm")
        for name in ("learning_rate", *self._learning_rates.values()):
            if hasattr(type(self), name):
                rate = getattr(self, name)
                self._require(is_number(rate) and 0 < rate < math.inf, name, "a number above 0, and finite")
        self._check_normalization()
        self._check_masks()
        self._check_types()
        if self.callbacks != Trainer.callbacks:
            from pearl.runtime.callback_calls import checked_callbacks

            checked_callbacks(self.callbacks)

    def _check_types(self) -> None:
        """Raise TrainerError for a setting of another type than the algorithm's default has.

        `TrainSpec` and `RolloutSpec` check their fields themselves.
        """
        for name in sorted(settings_of(type(self)) - _CHECKED_ELSEWHERE - set(self.schedule_settings())):
            owner = next((c for c in type(self).__mro__ if c.__module__.startswith("pearl.") and name in vars(c)), None)
            kind = None if owner is None else type(vars(owner)[name])
            if kind in _TYPES:
                fits, wanted = _TYPES[kind]
                self._require(fits(getattr(self, name)), name, wanted)

    def _check_masks(self) -> None:
        masks = getattr(self, "action_masks", False)
        if not isinstance(masks, bool) or (masks and not self._knows_masks):
            from pearl.algorithms import ALGORITHMS

            known = ", ".join(name for name, found in ALGORITHMS.items() if found._knows_masks)
            raise TrainerError(
                f"{type(self).__name__}.action_masks must be False, or True for one of {known}; found {masks!r}."
            )
        if masks:
            mask_parts(self.action_space)

    def _check_normalization(self) -> None:
        asked = self.normalize_observations
        self._require(isinstance(asked, bool), "normalize_observations", "True or False")
        self._require(
            not asked or self.observation_space.dtype != np.uint8,
            "normalize_observations",
            "False for observations of unsigned bytes, which are scaled to [0, 1]",
        )
        if self.data_flow() != "replay":
            return
        self._require(
            self.reward_standardization in ("none", "returns"),
            "reward_standardization",
            '"none" or "returns" for an algorithm with a replay (other kinds are of algorithms with rollouts)',
        )
        self._require(
            not (asked and getattr(self, "scale_observations", False)),
            "scale_observations",
            "False where normalize_observations is True: observations are normalised before they would be scaled",
        )

    def _check_schedules(self) -> None:
        """Make each schedule a plain value; TrainerError for a wrong value, or for a function that fails."""
        for name in self.schedule_settings():
            setting = f"{type(self).__name__}.{name}"
            try:
                plain = plain_schedule(getattr(self, name), setting)
            except ConfigurationError as error:
                raise TrainerError(str(error)) from error
            try:
                check_followed(plain)
            except ConfigurationError as error:
                raise TrainerError(f"{setting}: {error}") from error
            setattr(self, name, plain)

    def _require(self, condition: bool, setting: str, wanted: str) -> None:
        """Raise TrainerError, naming the setting and its valid values, unless `condition`."""
        if not condition:
            shown, found = f"{type(self).__name__}.{_written(setting)}", getattr(self, setting)
            schedule = f"{setting}_schedule"
            changes = callable(found) and schedule in self.schedule_settings()
            hint = f" A function of progress belongs into {schedule}, which multiplies it." if changes else ""
            raise TrainerError(f"{shown} must be {wanted}; found {found!r}.{hint}")

    def _require_whole(self, name: str, least: int, most: int | None = None) -> None:
        """Require of a setting that it is a whole number from `least` to `most`."""
        value = getattr(self, name)
        whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
        bound = f"of at least {least}" if most is None else f"from {least} to {most}"
        self._require(whole and value >= least and (most is None or value <= most), name, f"a whole number {bound}")

    def check_networks(self) -> None:  # noqa: B027  (an algorithm need not know its networks' shapes)
        """Raise TrainerError if the outputs of a network do not fit the spaces."""

    def _made_network(self, method: str, *others: nn.Module) -> nn.Module:
        """The network that `method` makes, which shares no parameter with `others`.

        Raises TrainerError for what cannot be trained.
        """
        made, called = getattr(self, method)(), f"{type(self).__name__}.{method}()"
        if not isinstance(made, nn.Module):
            missing = " It may lack a `return`." if made is None else ""
            raise TrainerError(f"{called} must return a network, a torch.nn.Module; found {made!r:.100}.{missing}")
        parameters = list(made.parameters())
        if any(isinstance(p, nn.UninitializedParameter) for p in parameters):
            raise TrainerError(
                f"{called} returned lazy layers, whose sizes are not known yet. State their inputs (self.input_shape), "
                "or pass zeros through the network before you return it."
            )
        if not parameters:
            raise TrainerError(f"{called} must return a network with parameters to train; found {made!r:.100}.")
        known = {id(p) for other in others for p in other.parameters()}
        if any(id(p) in known for p in parameters):
            raise TrainerError(
                f"{called} is called again for each further network, such as the target: it must make new layers each "
                "time; found layers that an earlier call had returned."
            )
        return made

    def _check_outputs(
        self,
        method: str,
        network: nn.Module,
        input_shape: tuple[int, ...],
        outputs: int,
        meaning: str,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Raise TrainerError unless `network` maps `(batch, *input_shape)` of `dtype` to `(batch, outputs)`.

        `dtype` is float32 by default.
        """
        made = f"{type(self).__name__}.{method}() must make a network"
        inputs = torch.zeros((2, *input_shape), dtype=dtype or torch.float32, device=self.device)
        training = set_evaluation_mode(network)
        try:
            with torch.no_grad():
                found = network(inputs)
        except Exception as error:
            default = torch.get_default_dtype()
            other = f". PEARL trains in float32: leave torch's default dtype at that; found {default}."
            raise TrainerError(
                f"{made} from inputs of shape (batch, {', '.join(map(str, input_shape))}) to (batch, {outputs}), "
                f"{meaning}; it fails with {type(error).__name__}: {error}{other if default != torch.float32 else ''}"
            ) from error
        finally:
            for module in training:
                module.training = True
        shape = tuple(getattr(found, "shape", ()))
        if shape != (2, outputs):
            raise TrainerError(
                f"{made} of {outputs} outputs, {meaning}; found "
                + (f"{shape[1]} outputs." if len(shape) == 2 and shape[0] == 2 else f"shape {shape} for 2 inputs.")
            )

    @property
    @abc.abstractmethod
    def policy(self) -> nn.Module:
        """The network that actors need."""

    @property
    @abc.abstractmethod
    def phases(self) -> tuple[Phase, ...]:
        """Backward passes of one step, in order."""

    @abc.abstractmethod
    def get_action(self, obs: torch.Tensor) -> torch.Tensor:
        """Greedy actions `(envs, *action)` for observations `(envs, *obs)`."""

    def update_rule(self) -> UpdateRule | None:
        """The algorithm for engines other than torch; None: it trains and acts in torch only."""
        return None

    @classmethod
    def schedule_settings(cls) -> tuple[str, ...]:
        """The names of the settings that are schedules (pearl.schedules), which `set_progress` follows."""
        return ("learning_rate_schedule",)

    @property
    def has_schedules(self) -> bool:
        """Whether `set_progress` changes anything."""
        return any(getattr(self, name) != "constant" for name in self.schedule_settings())

    def set_progress(self, share: float) -> None:
        """How much of the run is over, from 0 to 1: schedules follow it. Called between steps, before the next one."""
        if self.learning_rate_schedule != "constant":
            factor = factor_at(self.learning_rate_schedule, share)
            made: dict[str, list[float]] = vars(self).get("_made_rates", {})
            for name in self._learning_rates.keys() | made.keys():
                groups = getattr(getattr(self.parts, name, None), "param_groups", ())
                for group, own in zip(groups, made.get(name, itertools.repeat(1.0)), strict=False):
                    group["lr"] = own * self._unit_of_rate(name) * factor

    @property
    def stated_rates(self) -> dict[str, float]:
        """The settings that are learning rates, by name, of the optimizers that there are."""
        return {
            setting: float(getattr(self, setting))
            for name, setting in self._learning_rates.items()
            if getattr(self.parts, name, None) is not None
        }

    def restate_rates(self, before: Mapping[str, float]) -> tuple[str, ...]:
        """After a checkpoint's optimizers were loaded, give them the rates of the present settings; what changed.

        `before` are the `stated_rates` of the checkpoint's run. A rate that other code has changed changes in
        proportion; a schedule sets its own.
        """
        changed = []
        for name, setting in self._learning_rates.items():
            stated = self.stated_rates.get(setting)
            if stated is None or before.get(setting, stated) == stated:
                continue
            for group in getattr(self.parts, name).param_groups:
                group["lr"] *= stated / before[setting]
            changed.append(f"{setting} is {stated:g}; the checkpoint's run had {before[setting]:g}")
        return tuple(changed)

    def scheduled_values(self, env_steps: int) -> dict[str, float]:
        """For the log: what schedules may change, as it is now, by name; epsilon as after `env_steps` steps.

        Learning rates are those in the optimizers, which every Learner reads.
        """
        values: dict[str, float] = {}
        for name, setting in self._learning_rates.items():
            groups = getattr(getattr(self.parts, name, None), "param_groups", ())
            if groups:
                values[setting] = float(groups[0]["lr"])
        return values | scheduled_values(self.exploration, env_steps)

    def finish_step(self) -> None:  # noqa: B027  (algorithms without targets need nothing)
        """Update target networks after a step."""

    def metrics(self) -> Mapping[str, float]:
        """The algorithm's own numbers for the log, by name; called between steps, also before the first one."""
        return {}

    def own_metrics(self) -> dict[str, float]:
        """The `metrics` as numbers; TrainerError for what is none."""
        found: object = self.metrics()
        called = f"{type(self).__name__}.metrics()"
        if not isinstance(found, Mapping):
            raise TrainerError(f"{called} must return a dictionary of numbers by name; found {found!r:.100}.")
        numbers: dict[str, float] = {}
        for name, value in found.items():
            try:
                numbers[name] = float("" if isinstance(value, str) else value)
            except (TypeError, ValueError, RuntimeError) as error:  # the last of tensors of several elements
                raise TrainerError(f"{called} must return numbers; found {value!r:.100} for {name!r}.") from error
        return numbers

    def checkpoint_identity(self) -> dict[str, str]:
        """Settings, by name, that must be equal in a checkpoint and in the run that continues from it."""
        return {}

    def checkpoint_conflict(self, tensors: Mapping[str, Mapping[str, Any]]) -> str:
        """Why the state `tensors` of a checkpoint, by attribute, does not fit the environment; "" if it does."""
        return ""

    def describe_inputs(self) -> str:
        """One line for the log on how observations are changed before they enter the networks; "" for none."""
        return ""

    def update_policy(self, batch: Batch, weights: torch.Tensor) -> torch.Tensor:
        """One step on the whole batch; returns new priorities `(batch,)`, the absolute TD errors."""
        priorities: torch.Tensor | None = None
        for phase in self.phases:
            computed = phase.compute(batch, weights, len(batch.reward))
            priorities = computed if computed is not None else priorities
            phase.apply()
        self.end_of_step()
        return joined_priorities(self, () if priorities is None else (priorities,))

    def end_of_step(self) -> None:
        """Count the step, then `finish_step`."""
        self.gradient_steps += 1
        self.finish_step()

    # --- steps that a Learner records and repeats --------------------------------------------------------------------

    def step_kind(self) -> tuple[object, ...] | str:
        """A key of the operations of the next step; settings and the shape of the batch are compared separately.

        On a GPU, a Learner records the operations of a step and repeats them in later steps of an equal kind. Repeated
        steps run no Python code of the trainer: they only count themselves. So a step must read what changes from step
        to step from tensors that are changed in place, or from `host_inputs`. A text says why steps cannot be repeated.
        """
        return f"{type(self).__name__} does not define step_kind()"

    def _kind_unless_overridden(self, kind: tuple[object, ...], names: tuple[str, ...]) -> tuple[object, ...] | str:
        """`kind`, unless the user overrides one of the members `names` of the algorithm's step."""
        own = next((name for name in names if name in vars(self)), None) or _users_override(type(self), names)
        return kind if own is None else f"{type(self).__name__} overrides {own}, but not step_kind"

    def host_inputs(self, rows: int) -> tuple[torch.Tensor, ...]:
        """What the next step, on `rows` transitions, takes from the host in addition to its batch, such as noise."""
        return ()

    def give_inputs(self, inputs: tuple[torch.Tensor, ...] | None) -> None:
        """Let the next steps take these copies of their `host_inputs`, on the device; None: they make their own."""
        self._inputs = inputs


def joined_priorities(trainer: Trainer, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The priorities that a phase returned for each part of a batch, in one; TrainerError if there are none."""
    if not parts:
        raise TrainerError(
            f"No phase of {type(trainer).__name__} returned priorities: `compute` of one phase must return a tensor "
            "(batch,), a priority for each transition. It may lack a `return`."
        )
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def splits_batches(trainer_class: type) -> bool:
    """Whether a Learner may train on a batch in parts, by the phases of a `Trainer`."""
    return not has_own_update(trainer_class) and trainer_class._rows_are_independent  # type: ignore[attr-defined]


def has_own_update(trainer_class: type) -> bool:
    """Whether `update_policy` is code of the class, which the phases of a `Trainer` would leave out."""
    return overridden(trainer_class, Trainer, ("update_policy",)) is not None


def is_as_built_in(trainer_class: type) -> bool:
    """Whether the class is one of the built-in algorithms, or derives from one and changes settings only."""
    for base in trainer_class.__mro__:
        if base.__module__.startswith("pearl."):
            return issubclass(base, Trainer)
        if any(_is_code(name, value) for name, value in vars(base).items() if name not in _OF_ANY_CLASS):
            return False
    return False


@functools.cache
def _users_override(trainer_class: type[Trainer], names: tuple[str, ...]) -> str | None:
    """The first of the members `names` of a built-in algorithm that a class derived from it overrides, if any."""
    built_in = next(base for base in trainer_class.__mro__ if base.__module__.startswith("pearl."))
    return overridden(trainer_class, built_in, tuple(name for name in names if hasattr(built_in, name)))


def _is_code(name: str, value: object) -> bool:
    return name[0] == "_" or callable(value) or isinstance(value, property | classmethod | staticmethod)


_CHECKED_ELSEWHERE = {f.name for spec in (TrainSpec, RolloutSpec) for f in dataclasses.fields(spec)}


def _written(setting: str) -> str:
    """The name by which users write a setting."""
    return next((name for name, kept_as in SPELLINGS.items() if kept_as == setting), setting)


_OF_ANY_CLASS = frozenset(vars(type("_Empty", (Trainer,), {"__doc__": "", "__annotations__": {}})))


def settings_of(trainer_class: type) -> set[str]:
    """The names of the class's settings: its public attributes that are values."""
    members = ((name, value) for base in trainer_class.__mro__[:-1] for name, value in vars(base).items())
    others = (property, classmethod)
    return {name for name, value in members if not (name[0] == "_" or callable(value) or isinstance(value, others))}


def is_trainer(trainer_class: object) -> TypeGuard[type[Trainer]]:
    """Whether a class derives from `Trainer`."""
    return inspect.isclass(trainer_class) and issubclass(trainer_class, Trainer)


def schedule_settings_of(trainer_class: object) -> tuple[str, ...]:
    """The names of the class's settings that are schedules; none for a class that does not derive from `Trainer`."""
    return trainer_class.schedule_settings() if is_trainer(trainer_class) else ()


def apply_settings(trainer: object, settings: dict[str, Any]) -> None:
    """Set class-level settings on one trainer; TrainerError as `check_setting_names` raises it."""
    check_setting_names(type(trainer), settings)
    for name, value in settings.items():
        setattr(trainer, name, value)


def check_setting_names(trainer_class: type, names: Iterable[str]) -> None:
    """Raise TrainerError for a name that is no setting of the class; it names the nearest one."""
    known = settings_of(trainer_class)
    for name in names:
        if name not in known:
            used = sorted(map(_written, known - getattr(trainer_class, "_unused", frozenset())))
            close = difflib.get_close_matches(name, used, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            if ours := counterpart(name, used):
                hint = f" In PEARL: {ours}."
            raise TrainerError(
                f"{trainer_class.__name__} has no setting {name!r}.{hint} Its settings are: {', '.join(used)}."
            )


def check_trainer_class(trainer_class: object) -> type:
    """Return the class, or raise TrainerError saying which required member is missing."""
    if not inspect.isclass(trainer_class):
        raise TrainerError(
            f"set_train_function needs a trainer class, not {trainer_class!r}. "
            "Pass the class itself, for example learner=DQNTrainer, without parentheses."
        )
    from pearl.algorithms import one_of_algorithms

    missing = [name for name in ("get_action", "update_policy") if not callable(getattr(trainer_class, name, None))]
    if missing:
        raise TrainerError(
            f"Trainer class {trainer_class.__name__} lacks {' and '.join(f'{m}()' for m in missing)}. "
            "It needs get_action(obs) -> actions and update_policy(batch, weights) -> priorities; "
            f"deriving from pearl.algorithms.{one_of_algorithms()} gives both."
        )
    return trainer_class


def make_trainer(
    trainer_class: type,
    observation_space: gym.Space[Any],
    action_space: gym.Space[Any],
    *,
    seed: int = 0,
    device: str = "cpu",
    settings: dict[str, Any] | None = None,
) -> TrainerLike:
    """Construct a trainer with the arguments that its constructor takes, and check it.

    Raises TrainerError for missing members, networks whose input disagrees with the environment, or a constructor
    that fails; EnvError for spaces that the algorithm cannot handle.
    """
    check_trainer_class(trainer_class)
    offered: dict[str, Any] = {
        "observation_space": observation_space,
        "action_space": action_space,
        "seed": seed,
        "device": device,
        **(settings or {}),
    }
    signature = inspect.signature(trainer_class)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    accepted = {k: v for k, v in offered.items() if takes_any or k in signature.parameters}
    needed = [
        name
        for name, p in signature.parameters.items()
        if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and name not in accepted
    ]
    if needed:
        raise TrainerError(
            f"{trainer_class.__name__}() requires {', '.join(needed)}, which PEARL does not supply. It supplies "
            "observation_space, action_space, seed, device and the keyword arguments given to set_train_function: "
            "give the parameter a default or pass it there."
        )
    lost = sorted(set(settings or {}) - set(accepted))
    if lost:
        raise TrainerError(f"{trainer_class.__name__}() takes no argument {', '.join(map(repr, lost))}.")
    try:
        trainer = _constructed(trainer_class, accepted, seed)
    except PearlError:
        raise
    except Exception as error:
        raise TrainerError(f"{trainer_class.__name__}() failed: {described(error)}") from error
    assert isinstance(trainer, TrainerLike)
    if isinstance(trainer, Trainer) and "_arrays" not in vars(trainer):
        raise TrainerError(
            f"{trainer_class.__name__}.__init__() does not call that of its base class, which makes the networks. "
            "Begin it with super().__init__(observation_space, action_space, seed=seed, device=device, **settings)."
        )
    check_trainer(trainer, observation_space, action_space)
    return trainer


def _constructed(trainer_class: type, arguments: dict[str, Any], seed: int) -> Any:
    if is_as_built_in(trainer_class):
        return trainer_class(**arguments)
    mark_optimizers_lazily()
    # Seeds any class's networks, without changing the program's own random numbers.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return trainer_class(**arguments)


def transition_of(
    trainer_class: type | None,
    observation_space: gym.Space[Any],
    action_space: gym.Space[Any],
    settings: Mapping[str, Any] | None = None,
) -> TransitionSpec:
    """The columns of transitions: the common ones, those that the algorithm declares, and what `settings` add.

    Raises TrainerError for a declaration that does not begin with the common columns.
    """
    common = TransitionSpec.from_spaces(observation_space, action_space)
    if not (inspect.isclass(trainer_class) and issubclass(trainer_class, Trainer)):
        return common
    declared = trainer_class.transition(observation_space, action_space)
    names, wanted = ([f.name for f in spec.fields] for spec in (declared, common))
    if declared.fields[: len(common.fields)] != common.fields:
        raise TrainerError(
            f"{trainer_class.__name__}.transition() must begin with the columns {', '.join(wanted)} of the spaces; "
            f"found {', '.join(names)}. Return super().transition(...).with_columns(Column(...))."
        )
    made_by = {f"the column {column.name!r}": column.make for column in declared.further}
    for what, make in (made_by | {"first priorities": declared.priority}).items():
        try:
            pickle.dumps(make)
        except Exception as error:
            raise TrainerError(
                f"{trainer_class.__name__}.transition() has {what} made by {make!r}, which actor processes cannot "
                "import. Write it as a function at the top level of the module, `def make(step): ...`, in place of a "
                "lambda or a function inside another one."
            ) from error
    return trainer_class.transition_with(declared, settings or {}, action_space)


def batch_type_of(trainer: object) -> type[Batch]:
    """The class of the batches that `trainer` trains on."""
    if not isinstance(trainer, Trainer):
        return Batch
    declared = trainer.transition(trainer.observation_space, trainer.action_space)
    return batch_type(
        tuple(f.name for f in trainer.transition_with(declared, vars(trainer), trainer.action_space).fields)
    )


def modules_of(trainer: object) -> dict[str, nn.Module]:
    """The trainer's torch modules by attribute name, those in a list, tuple or dict as `name.key`.

    A trainer may itself be a module.
    """
    trainer = trainer.in_torch() if isinstance(trainer, Trainer) else trainer
    found = dict(trainer.named_children()) if isinstance(trainer, nn.Module) else {}
    own = attributes_of(trainer, (nn.Module,))
    return found | {name: value for name, value in own.items() if isinstance(value, nn.Module)}


def attributes_of(trainer: object, kinds: tuple[type, ...]) -> dict[str, Any]:
    """The attributes of a trainer in torch by name, and as `name.key` what is of `kinds` in a list, tuple or dict."""
    found: dict[str, Any] = {}
    for name, value in getattr(trainer, "__dict__", {}).items():
        if isinstance(trainer, nn.Module) and name in ("_modules", "_parameters", "_buffers"):
            continue
        found[name] = value
        members: Iterable[tuple[object, object]] = ()
        if isinstance(value, dict):
            members = value.items()
        elif isinstance(value, list | tuple):
            members = enumerate(value)
        found |= {f"{name}.{key}": member for key, member in members if isinstance(member, kinds)}
    return found


def is_kept_tensor(value: object) -> bool:
    """Whether an attribute is a tensor that is learned, or marked as `torch.nn.Buffer`."""
    is_learned = isinstance(value, torch.Tensor) and value.is_leaf and value.requires_grad
    return is_learned or isinstance(value, nn.Buffer)


def set_evaluation_mode(trainer: object) -> list[nn.Module]:
    """Put the trainer and all its modules into evaluation mode; returns those that were in training mode."""
    if arrays_of(trainer) is not None:
        return []
    roots = [*([trainer] if isinstance(trainer, nn.Module) else []), *modules_of(trainer).values()]
    training = [module for root in roots for module in root.modules() if module.training]
    for root in roots:
        root.eval()
    return training


def arrays_of(trainer: object) -> ArrayParts | None:
    """The networks of a built-in algorithm where they are in arrays; None where they are in torch."""
    return trainer.arrays if isinstance(trainer, Trainer) else None


def policy_arrays(trainer: object) -> list[np.ndarray] | None:
    """What `policy_tensors` would give, flat, where the networks are in arrays."""
    arrays = arrays_of(trainer)
    return None if arrays is None else arrays.policy.snapshot()


def policy_tensors(trainer: object) -> list[torch.Tensor]:
    """Parameters and floating buffers that actors need: of `trainer.policy` if that is a module, else of all modules.

    With the latter, also single tensors that are learned.
    """
    policy = getattr(trainer, "policy", None)
    single: list[torch.Tensor] = []
    if isinstance(policy, nn.Module):
        modules = [policy]
    else:
        modules = [*([trainer] if isinstance(trainer, nn.Module) else []), *modules_of(trainer).values()]
        single = [value for value in attributes_of(trainer, ()).values() if is_kept_tensor(value)]
    held = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    each_once = {id(tensor): tensor for tensor in (*held, *single)}.values()
    return [t.data for t in each_once if isinstance(t, nn.Parameter) or t.is_floating_point()]


def policy_snapshot(trainer: object) -> np.ndarray:
    """All `policy_tensors` in one array `(weight_count,)` float32, as actors receive them."""
    if (arrays := policy_arrays(trainer)) is not None:
        return np.concatenate(arrays)
    return concatenated(policy_tensors(trainer)).cpu().numpy()


def concatenated(tensors: Iterable[torch.Tensor], out: torch.Tensor | None = None) -> torch.Tensor:
    """All elements `(count,)` float32, one tensor after the other, on their device."""
    return torch.cat([t.detach().reshape(-1).float() for t in tensors], out=out)


def load_concatenated(weights: np.ndarray, tensors: Iterable[torch.Tensor]) -> None:
    """Copy `weights` `(count,)` float32 back into the tensors of `concatenated`; TrainerError where sizes differ."""
    targets = list(tensors)
    count = sum(t.numel() for t in targets)
    if weights.shape != (count,):
        raise TrainerError(f"A snapshot of these weights has shape ({count},); found {weights.shape}.")
    offset = 0
    with torch.no_grad():
        for target in targets:
            target.copy_(torch.from_numpy(weights[offset : offset + target.numel()]).view_as(target))
            offset += target.numel()


def check_trainer(trainer: TrainerLike, observation_space: gym.Space[Any], action_space: gym.Space[Any]) -> None:
    """Raise TrainerError unless the trainer has modules and its get_action fits the environment's spaces."""
    name = type(trainer).__name__
    in_arrays = arrays_of(trainer) is not None  # then the networks are made as the spaces want them
    if not in_arrays and not policy_tensors(trainer):
        raise TrainerError(
            f"{name} holds no torch module with parameters. Assign the policy network to an attribute in __init__ "
            "(self.policy = nn.Sequential(...)), so that its layers can be read and its weights synchronised."
        )
    if isinstance(getattr(trainer, "exploration", None), PolicySampling) and not isinstance(trainer, SamplesActions):
        raise TrainerError(
            f"{name} explores by PolicySampling but has no sample_action(obs, noise) -> actions. Define it, derive "
            "from pearl.algorithms.SAC, or set `exploration` to a noise such as GaussianNoise()."
        )
    if in_arrays:
        return
    expected = tuple(observation_space.shape or ())
    stated = getattr(trainer, "input_shape", None)
    if stated is not None and tuple(stated) != expected:
        raise TrainerError(
            f"{name}.input_shape is {tuple(stated)}, but the environment's observations have shape {expected}. "
            "Build the network for the environment's observation_space, or wrap the environment."
        )
    tried = min(_TRIED_OBSERVATIONS, max(2, _TRIED_NUMBERS // max(1, observation_size(observation_space))))
    sample = random_observations(observation_space, tried, seed=0)
    obs = torch.as_tensor(sample if sample.dtype == np.uint8 else sample.astype(np.float32))
    obs = obs.to(getattr(trainer, "device", "cpu"))
    training = set_evaluation_mode(trainer)  # layers that keep statistics must not take these for observations
    try:
        with torch.no_grad():
            action = trainer.get_action(obs)
    except Exception as error:
        raise TrainerError(
            f"{name}.get_action() failed on {len(obs)} observations of shape {expected} from the environment: "
            f"{described(error)}. If it names shapes, the network's input disagrees with the environment."
        ) from error
    finally:
        for module in training:
            module.training = True
    wanted = (len(obs), *(action_space.shape or ()))
    if not isinstance(action, torch.Tensor):
        raise TrainerError(
            f"{name}.get_action() must return a tensor of shape {wanted} for {len(obs)} observations; found a "
            f"{type(action).__name__}. Return the tensor itself, without .numpy(), .item() or .tolist()."
        )
    found = tuple(action.shape)
    if found != wanted:
        raise TrainerError(
            f"{name}.get_action() returned shape {found} for {len(obs)} observations; actions of {action_space} need "
            f"{wanted}."
        )
    if isinstance(trainer, Trainer):
        _check_schedulers(trainer)
        try:
            trainer.update_rule()
        except AttributeError as error:
            raise TrainerError(
                f"{name}.build() does not make what its base class needs: {error}. Begin it with super().build(), or "
                "derive from pearl.algorithms.Trainer, which leaves all networks to you."
            ) from error
    if isinstance(action_space, spaces.Discrete):
        _check_discrete(name, action, int(action_space.n), action_space)


def _check_schedulers(trainer: Trainer) -> None:
    """Raise TrainerError where a scheduler of torch would change rates that a setting sets again."""
    scheduler = torch.optim.lr_scheduler.LRScheduler
    held = attributes_of(trainer, (scheduler,))
    name = next((name for name, value in held.items() if isinstance(value, scheduler)), None)
    if name is not None and trainer.learning_rate_schedule != "constant":
        shown = f"{type(trainer).__name__}.{name}"
        raise TrainerError(
            f"{shown} is a {type(held[name]).__name__}, but learning_rate_schedule={trainer.learning_rate_schedule!r} "
            'sets the same rates as the run goes on. Set learning_rate_schedule = "constant" in the class, or leave '
            "the scheduler out."
        )


def _check_discrete(name: str, actions: torch.Tensor, count: int, space: gym.Space[Any]) -> None:
    """Raise TrainerError unless `actions` are whole numbers from 0 to below `count`."""
    if actions.is_floating_point() or actions.is_complex():
        raise TrainerError(
            f"{name}.get_action() returned {actions.dtype}; actions of {space} are whole numbers, counted from 0. "
            "Return for example values.argmax(dim=1)."
        )
    low, high = int(actions.min()), int(actions.max())
    if low < 0 or high >= count:
        raise TrainerError(
            f"{name}.get_action() returned the action {low if low < 0 else high}; {space} has the {count} actions "
            f"0 to {count - 1}, counted from 0. Give the network one output for each action."
        )


def uses_masks(trainer: object, settings: Mapping[str, Any] | None = None) -> bool:
    """Whether a trainer, or a trainer class with `settings`, chooses among the actions that a mask allows."""
    return bool((settings or {}).get("action_masks", getattr(trainer, "action_masks", False)))


def storing(trainer: object) -> Callable[[np.ndarray], np.ndarray]:
    """From an environment's observations `(n, *obs)` to what the `trainer` of any class takes.

    For many calls: its statistics are read once.
    """
    moments = trainer.observation_moments if isinstance(trainer, Trainer) else None
    if moments is None:
        return lambda obs: obs
    mean, scale = moments.mean.astype(np.float32), moments.scale.astype(np.float32)
    return lambda obs: normalized(obs, mean, scale)


def normalization_note(trainer: object) -> str:
    """A line for the log on how stored transitions are normalised; "" where they are not."""
    if not isinstance(trainer, Trainer) or not trainer.transition_statistics:
        return ""
    says = {
        OBSERVATION_STATISTICS: "observations by running mean and deviation",
        RETURN_STATISTICS: "rewards by the running deviation of the discounted return",
    }
    return f"Actors normalise {' and '.join(says[name] for name in trainer.transition_statistics)}."


def flattening_note(trainer: object) -> str | None:
    """A note for the user if a built-in algorithm without convolutions gets observations that are not vectors."""
    if not isinstance(trainer, Trainer) or len(trainer.input_shape) < 2:
        return None
    if trainer.arrays is not None:
        convolves = any(isinstance(part, ArrayModule) and has_convolutions(part) for _, part in trainer.arrays.items())
    else:
        modules = modules_of(trainer).values()
        convolves = any(isinstance(part, nn.Conv2d) for module in modules for part in module.modules())
    if convolves:
        return None
    numbers = math.prod(trainer.input_shape)
    return (
        f"{type(trainer).__name__} has no convolutions: it takes observations of shape {trainer.input_shape} as "
        f"{numbers:,} numbers in a row"
    )


def is_number(value: object) -> bool:
    """Whether a setting is a number, and not a bool."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


_TYPES: dict[type, tuple[Callable[[object], bool], str]] = {
    bool: (lambda value: isinstance(value, bool | np.bool_), "True or False"),
    int: (lambda value: isinstance(value, numbers.Integral) and not isinstance(value, bool), "a whole number"),
    float: (lambda value: is_number(value) and value == value, "a number, and not NaN"),
    str: (lambda value: isinstance(value, str), "a text"),
}


def observation_size(space: gym.Space[Any]) -> int:
    """Scalars of one observation."""
    return math.prod(space.shape or ())
