"""Update rules: the description of a built-in algorithm that all engines read, instead of testing its class."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

import numpy as np

from pearl.algorithms.arrays import Array, ArrayAdam, ArrayModule, ArrayParameters, ArrayScale, ArrayValue
from pearl.lazy_torch import nn, torch

if TYPE_CHECKING:
    from pearl.algorithms.networks import ToUnit
from pearl.learner.flat import FlatParameters

# Targets bootstrap from the largest action value, or from the critics' value of an action: the target policy's, the
# same with noise added, or one sampled from the policy.
Bootstrap: TypeAlias = Literal["largest_value", "target_action", "disturbed_target_action", "sampled_action"]
Loss: TypeAlias = Literal["huber", "squared"]
# Of torch, or in arrays as long as the trainer's networks are.
AnyModule: TypeAlias = "nn.Module | ArrayModule"
AnyScale: TypeAlias = "ToUnit | ArrayScale"
AnyParameters: TypeAlias = "FlatParameters | ArrayParameters"
AnyOptimizer: TypeAlias = "torch.optim.Optimizer | ArrayAdam"
AnyNumber: TypeAlias = "torch.Tensor | ArrayValue"
HeadKind: TypeAlias = Literal["argmax", "tanh", "gaussian", "categorical", "normal"]


class Scalars(NamedTuple):
    """The numbers of a rule; those that an algorithm does not have keep their defaults.

    Target networks move toward their networks by `tau`; if `tau` is 1, they copy them every `target_interval` steps.
    Actor and targets move every `policy_delay` steps. Of an ensemble, `target_critics` critics, drawn for each step,
    judge the targets; of their quantiles, the largest `dropped_quantiles` for each critic do not count.
    """

    max_grad_norm: float
    tau: float
    target_interval: int = 1
    double: bool = False
    saturation_penalty: float = 0.0
    target_noise: float = 0.0
    noise_clip: float = 0.0
    log_std_bounds: tuple[float, float] = (-math.inf, math.inf)
    target_entropy: float = 0.0
    policy_delay: int = 1
    target_critics: int = 0
    dropped_quantiles: int = 0


@dataclass(frozen=True, eq=False)
class RuleNetwork:
    """A network of layers without the scaling around it, and its target network, if it has one."""

    name: str
    module: AnyModule
    input_shape: tuple[int, ...]
    target: AnyModule | None = None

    @property
    def in_torch(self) -> nn.Module:
        """The module of a rule that `update_rule_of` gives."""
        assert not isinstance(self.module, ArrayModule)
        return self.module


@dataclass(frozen=True, eq=False)
class RuleParameters:
    """The flat parameters of one or more networks, the optimizer `optimizer_name` that steps them, and their target."""

    parameters: AnyParameters
    optimizer_name: str
    optimizer: AnyOptimizer
    target: AnyParameters | None = None


@dataclass(frozen=True, eq=False)
class RuleNoise:
    """Normal noise of a step: `draw(rows, 0)` for the targets' actions.

    With `of_policy`, `draw(rows, 1)` is for the policy's actions. `seed` is the scalar seed of the built-in noise.
    `departure` says, in one line, that the trainer makes its own noise.
    """

    seed: AnyNumber
    draw: Callable[[int, int], torch.Tensor | np.ndarray]
    of_policy: bool = False
    departure: str | None = None


@dataclass(frozen=True, eq=False)
class RuleTemperature:
    """The logarithm of the entropy's weight, a scalar, and its optimizer, if it is learned."""

    log_alpha: AnyNumber
    optimizer: AnyOptimizer | None


@dataclass(frozen=True, eq=False)
class RuleStep:
    """What one step reads and updates: the parameters of the critics and, if there is one, of the actor.

    `scalars` returns the trainer's current settings, which may change between steps. The scales map observations and
    actions to the networks' inputs.
    """

    loss: Loss
    scalars: Callable[[], Scalars]
    critics: RuleParameters
    actor: RuleParameters | None = None
    observation_scale: AnyScale | None = None
    action_scale: AnyScale | None = None
    noise: RuleNoise | None = None
    temperature: RuleTemperature | None = None

    @property
    def optimizers(self) -> list[tuple[str, AnyOptimizer, AnyParameters | AnyNumber]]:
        """Name, optimizer and what it steps: the critics', the actor's, the temperature's, as far as there are any."""
        parts = [part for part in (self.critics, self.actor) if part is not None]
        found: list[tuple[str, AnyOptimizer, AnyParameters | AnyNumber]] = [
            (part.optimizer_name, part.optimizer, part.parameters) for part in parts
        ]
        if self.temperature is None or self.temperature.optimizer is None:
            return found
        return [*found, ("temperature_optimizer", self.temperature.optimizer, self.temperature.log_alpha)]

    @property
    def vectors(self) -> tuple[AnyParameters | None, ...]:
        """The critics' parameters, their target, the actor's parameters, their target."""
        actor = (None, None) if self.actor is None else (self.actor.parameters, self.actor.target)
        return (self.critics.parameters, self.critics.target, *actor)


@dataclass(frozen=True, eq=False)
class ClippedStep:
    """One step of PPO on a minibatch: policy and value network, in one vector `parameters`, by the clipped loss.

    `scalars` returns the trainer's current settings by name. `log_std` are the log deviations of a normal distribution.
    """

    scalars: Callable[[], Mapping[str, float]]
    parameters: AnyParameters
    optimizer: AnyOptimizer
    log_std: nn.Parameter | Array | None = None


@dataclass(frozen=True, eq=False)
class PolicyHead:
    """How the policy `module` acts: `network`, then a head that turns its outputs into actions.

    "argmax" chooses the largest output; "tanh" bounds the outputs and scales them to the action space; "gaussian" does
    the same with the mean, or with samples, of a normal distribution. "categorical" draws a number from each part of
    the outputs, whose lengths are `sizes`; "normal" draws from a normal distribution around the outputs. Actors of the
    last two record `value` of what they see. `departure` says, in one line, why the trainer may act differently.
    """

    kind: HeadKind
    module: AnyModule
    network: RuleNetwork
    observation_scale: AnyScale | None = None
    action_scale: AnyScale | None = None
    log_std_bounds: tuple[float, float] = (-math.inf, math.inf)
    departure: str | None = None
    value: RuleNetwork | None = None
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class UpdateRule:
    """An algorithm's networks, its policy, and `step`: what a step trains, or one line why that is not known.

    Without an `actor`, the only critic gives the value of each action; with `double`, it also chooses the action that
    its target network evaluates. The first `actor_critics` critics take part in the actor's gradient. The critics of an
    `ensemble` judge as REDQ's: targets take the smallest value of some of them, the actor follows the mean of all, and
    targets move in every step. With `masked`, action masks say what counts: in the largest next value, or in the parts
    of a categorical policy. In place of each value, critics may give `quantiles` of the return, in a row, which are
    trained by quantile regression; then targets take the smallest of all. If an algorithm only derives from the base
    classes, `bootstrap` is None and `step` is a line.
    """

    critics: tuple[RuleNetwork, ...]
    policy: PolicyHead
    step: RuleStep | ClippedStep | str
    bootstrap: Bootstrap | None
    actor: RuleNetwork | None = None
    actor_critics: int = 0
    double: bool = False
    ensemble: bool = False
    masked: bool = False
    quantiles: int = 0

    @property
    def networks(self) -> tuple[RuleNetwork, ...]:
        """The actor, if there is one, then the critics."""
        return self.critics if self.actor is None else (self.actor, *self.critics)


def overridden(trainer: object, base: type, names: tuple[str, ...]) -> str | None:
    """The first of the members `names` of `base` that the trainer overrides, if any."""
    for name in names:
        if inspect.getattr_static(trainer, name) is not inspect.getattr_static(base, name):
            return name
    return None


def policy_departure(trainer: object, base: type, names: tuple[str, ...]) -> str | None:
    """One line if the trainer overrides one of the members `names`, by which `base` acts."""
    name = overridden(trainer, base, names)
    return None if name is None else f"{type(trainer).__name__} overrides {name}"


def step_departure(trainer: object, base: type, names: tuple[str, ...]) -> str | None:
    """One line if the trainer overrides one of the members `names` of `base`'s update rule."""
    departure = policy_departure(trainer, base, names)
    return None if departure is None else f"{departure}, a part of {base.__name__}'s update rule"


def update_rule_of(trainer: object, *, arrays: bool = False) -> UpdateRule | None:
    """The rule of `trainer`, if it is of an algorithm that has one.

    Its networks are in torch, or with `arrays` where the trainer has them, which may be in arrays.
    """
    from pearl.algorithms.trainer import Trainer

    if not isinstance(trainer, Trainer):
        return None
    return trainer.update_rule() if arrays else trainer.in_torch().update_rule()


def unknown_rule(trainer: object) -> str:
    """One line on a trainer whose class is not, and does not derive from, one of the algorithms."""
    from pearl.algorithms import one_of_algorithms

    return f"the update rule of {type(trainer).__name__}, which is not a {one_of_algorithms()}"
