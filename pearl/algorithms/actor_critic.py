"""The base of the algorithms for bounded continuous actions: spaces, networks, optimizers, twin critics, noise."""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from gymnasium import spaces

from pearl import _native
from pearl.algorithms.arrays import (
    ArrayAdam,
    ArrayModule,
    ArrayParameters,
    ArrayParts,
    ArrayScale,
    ArrayValue,
    TorchRandom,
    array_mlp,
    copy_arrays,
)
from pearl.algorithms.batch import Batch
from pearl.algorithms.inputs import scaled_observations, unit_scale
from pearl.algorithms.spaces import ActionKind, check_actions, check_observations
from pearl.algorithms.suggestions import (
    Choice,
    Facts,
    choose_gamma,
    choose_hindsight,
    choose_learning_rate,
    choose_learning_starts,
    choose_n_step,
    choose_scaling,
    choose_sizes,
)
from pearl.algorithms.trainer import Phase, Trainer, observation_size
from pearl.algorithms.update_rule import (
    AnyModule,
    HeadKind,
    PolicyHead,
    RuleNetwork,
    RuleNoise,
    RuleParameters,
    UpdateRule,
    overridden,
    policy_departure,
    step_departure,
    unknown_rule,
)
from pearl.errors import TrainerError
from pearl.exploration import OrnsteinUhlenbeck
from pearl.lazy_torch import nn, torch
from pearl.learner.flat import FlatParameters

if TYPE_CHECKING:
    from pearl.algorithms.networks import EnsembleCritic, TwinCritic

_STEP = (
    *("update_policy", "end_of_step", "phases", "finish_step"),
    *("_critic_phase", "_actor_phase", "_compute_critic", "_apply_critic", "_compute_actor", "_apply_actor"),
    *("_descend_actor", "_step", "_next_value", "_deal_noise", "_delayed_phases"),
    *("_descend_critics", "_noise", "_values", "_target_of", "_judged", "judges", "_dropping"),
)
_STEP_AND_INPUTS = (*_STEP, "host_inputs", "_draws")


class ActorCritic(Trainer):
    """A policy and its critic for a bounded `Box` of actions.

    The networks take and return actions scaled to [-1, 1] by their bounds. They take observations as the environment
    returns them; with `scale_observations`, elements with bounds of at most 1000 are scaled to [-1, 1] too, which helps
    if the bounds are about as wide as the values. Unsigned bytes are always scaled. Override `build_actor` or
    `build_critic` to use your own networks.
    """

    _algorithm: ClassVar[str]
    _action_kinds: ClassVar[tuple[ActionKind, ...]] = ("Box",)
    _learning_rates: ClassVar[Mapping[str, str]] = {
        "critic_optimizer": "learning_rate",
        "actor_optimizer": "actor_learning_rate",
        "temperature_optimizer": "temperature_learning_rate",  # of SAC that learns it
    }

    learning_rate: float = 1e-3
    actor_learning_rate: float = 1e-3
    tau: float = 0.005
    max_grad_norm: float = 0.0
    scale_observations: bool = False

    actor: nn.Module
    critic: nn.Module
    _target_critic_flat: FlatParameters

    @classmethod
    def suggestions(cls, facts: Facts) -> tuple[Choice, ...]:
        """One gradient step per environment step or about that; correlated noise where random actions find nothing."""
        sized = choose_sizes(facts, batches=(256, 128, 64), updates=(0.5, 1.0, 2.0))
        scaling = choose_scaling(facts)
        choices = [
            *sized.choices,
            choose_learning_rate(facts, sized.hidden_sizes),
            choose_learning_rate(facts, sized.hidden_sizes, "actor_learning_rate"),
            choose_gamma(facts),
            choose_n_step(facts, 1, "usual: 1 (Fujimoto et al. 2018; Haarnoja et al. 2018)"),
            *choose_hindsight(facts),
            choose_learning_starts(facts),
            Choice("tau", 0.005, "targets follow by 0.5 % a gradient step (Fujimoto et al. 2018)"),
        ]
        if facts.silent:
            noise = OrnsteinUhlenbeck(sigma=0.5, random_steps=0)
            choices.append(Choice("exploration", noise, f"{facts.silence}: correlated noise gets farther"))
        elif cls.exploration is not None:
            choices.append(Choice("exploration", cls.exploration, "the algorithm's own: random actions saw rewards"))
        return (*choices, scaling) if scaling is not None else tuple(choices)

    def check_spaces(self) -> None:
        """A bounded Box of actions and array observations."""
        name = type(self).__name__
        check_actions(name, self._algorithm, "Box", self.action_space)
        check_observations(name, self.observation_space)
        self._require(isinstance(self.scale_observations, bool), "scale_observations", "True or False")
        if self.scale_observations and not scaled_observations(self._boxes[0], asked=True).any():
            raise TrainerError(
                f"{type(self).__name__}.scale_observations needs observations with bounds of at most 1000; the "
                f"environment has {self.observation_space}. Set it to False, or wrap the environment, for example with "
                "gymnasium.wrappers.TransformObservation and a scale of your own."
            )

    def checkpoint_identity(self) -> dict[str, str]:
        """The scaling of observations, for which the networks were trained."""
        return {"scale_observations": str(self.scale_observations)}

    def checkpoint_conflict(self, tensors: Mapping[str, Mapping[str, Any]]) -> str:
        """The bounds by which the checkpoint's actor scales observations and actions, if they are not those of now."""
        saved, (observations, actions) = tensors.get("actor", {}), self._boxes
        scaled = scaled_observations(observations, self.scale_observations)
        for kind, space, scale in (
            ("observation", observations, unit_scale(observations, scaled)),
            ("action", actions, unit_scale(actions)),
        ):
            names = [f"{kind}_scale.{part}" for part in ("center", "half_range")]
            if any(name not in saved for name in names):  # an actor of the user's
                continue
            center, half_range = (np.asarray(saved[name]) for name in names)
            if center.shape == scale[0].shape and not np.array_equal((center, half_range), scale):
                return (
                    f"Its networks scale {kind}s from bounds of {center - half_range} and {center + half_range}; here "
                    f"they are {space}."
                )
        return ""

    def describe_inputs(self) -> str:
        """How observations are scaled for the networks."""
        box = self._boxes[0]
        scaled = scaled_observations(box, self.scale_observations)
        if scaled.all():
            why = "by their bounds" if self.scale_observations else "from unsigned bytes"
            return f"Observations: scaled to [-1, 1] {why}."
        if scaled.any():
            return (
                f"Observations: {scaled.sum()} of {scaled.size} elements are scaled to [-1, 1] by their bounds; the "
                "bounds of the others are equal or beyond 1000."
            )
        could = scaled_observations(box, asked=True).any()
        hint = " (scale_observations=True scales those with bounds of at most 1000 to [-1, 1])" if could else ""
        return f"Observations: taken as the environment gives them{hint}."

    @property
    def action_size(self) -> int:
        """Scalars of one action."""
        return math.prod(self.action_space.shape or ())

    @property
    def _boxes(self) -> tuple[spaces.Box, spaces.Box]:
        observations, actions = self.observation_space, self.action_space
        assert isinstance(observations, spaces.Box)
        assert isinstance(actions, spaces.Box)
        return observations, actions

    def build_actor(self) -> nn.Module:
        """A network from `(batch, observation size)` to `(batch, action size)`; the policy applies `tanh` to it."""
        from pearl.algorithms.networks import mlp

        return mlp(observation_size(self.observation_space), self.hidden_sizes, self._actor_outputs[0])

    def build_critic(self) -> nn.Module:
        """A network from `(batch, observation size + action size)` to `(batch, 1)`."""
        from pearl.algorithms.networks import mlp

        inputs = observation_size(self.observation_space) + self.action_size
        return mlp(inputs, self.hidden_sizes, self._critic_outputs[0])

    def check_networks(self) -> None:
        """Check the outputs of the policy and of each critic."""
        from pearl.algorithms.networks import Policy

        observation = observation_size(self.observation_space)
        if isinstance(self.actor, Policy):
            outputs, meaning = self._actor_outputs
            meaning = f"{meaning} for each of the {self.action_size} numbers of {self.action_space}"
            self._check_outputs("build_actor", self.actor.network, (observation,), outputs, meaning)
        critics = [getattr(self.critic, name, None) for name in ("network", "first", "second")]
        for critic in (*critics, *getattr(self.critic, "critics", ())):
            if isinstance(critic, nn.Module):
                inputs, (outputs, meaning) = (observation + self.action_size,), self._critic_outputs
                self._check_outputs("build_critic", critic, inputs, outputs, meaning)

    @property
    def _actor_outputs(self) -> tuple[int, str]:
        """The number of outputs of `build_actor`'s network, and the outputs for each number of an action, in words."""
        return self.action_size, "one"

    @property
    def _critic_outputs(self) -> tuple[int, str]:
        """The number of outputs of `build_critic`'s network, and what they are, in words."""
        return 1, "the value of an observation and an action"

    @property
    def policy(self) -> nn.Module:
        """The actor."""
        return self.actor

    def get_action(self, obs: torch.Tensor) -> torch.Tensor:
        """The policy's greedy actions `(envs, *action)` float32, in the environment's units."""
        actions: torch.Tensor = self.actor(obs)
        return actions

    # --- networks in arrays ---

    def _array_mlp_of_actor(self, random: TorchRandom) -> ArrayModule:
        return array_mlp(random, observation_size(self.observation_space), self.hidden_sizes, self._actor_outputs[0])

    def _array_mlp_of_critic(self, random: TorchRandom) -> ArrayModule:
        inputs = observation_size(self.observation_space) + self.action_size
        return array_mlp(random, inputs, self.hidden_sizes, self._critic_outputs[0])

    def _array_actor(self, network: ArrayModule) -> ArrayModule:
        """`Policy` around a network."""
        observations, actions = self._array_scales()
        return ArrayModule(observation_scale=observations, network=network, action_scale=actions)

    def _array_critic(self, **networks: ArrayModule) -> ArrayModule:
        """`Critic` or `TwinCritic` around its networks."""
        observations, actions = self._array_scales()
        return ArrayModule(observation_scale=observations, action_scale=actions, **networks)

    def _array_scales(self) -> tuple[ArrayScale, ArrayScale]:
        observations, actions = self._boxes
        scaled = scaled_observations(observations, self.scale_observations)
        return ArrayScale(*unit_scale(observations, scaled)), ArrayScale(*unit_scale(actions))

    def _array_parts(self, actor: ArrayModule, critic: ArrayModule, target_critic: ArrayModule) -> ArrayParts:
        """What all actor-critics have in common: networks, flat parameters and optimizers."""
        actor_flat, critic_flat, target_flat = (ArrayParameters(m) for m in (actor, critic, target_critic))
        return ArrayParts(
            policy=actor,
            actor=actor,
            critic=critic,
            target_critic=target_critic,
            _actor_flat=actor_flat,
            _critic_flat=critic_flat,
            _target_critic_flat=target_flat,
            actor_optimizer=ArrayAdam(actor_flat.memory.shape, self.actor_learning_rate),
            critic_optimizer=ArrayAdam(critic_flat.memory.shape, self.learning_rate),
        )

    @staticmethod
    def _add_target_actor(parts: ArrayParts, target_actor: ArrayModule) -> None:
        copy_arrays(parts.actor, to=target_actor)
        parts.target_actor, parts._target_actor_flat = target_actor, ArrayParameters(target_actor)

    def _make_optimizers(self) -> None:
        """Adam over the flat parameters of `actor` and of `critic`."""
        self._actor_flat, self._critic_flat = FlatParameters(self.actor), FlatParameters(self.critic)
        self.actor_optimizer = torch.optim.Adam([self._actor_flat.parameter], lr=self.actor_learning_rate, fused=True)
        self.critic_optimizer = torch.optim.Adam([self._critic_flat.parameter], lr=self.learning_rate, fused=True)

    def update_rule(self) -> UpdateRule:
        """The networks and their policy; an algorithm adds the training step."""
        return UpdateRule(
            self._rule_critics(),
            self._policy_head(),
            unknown_rule(self),
            None,
            actor=self._rule_actor(),
            actor_critics=1,
        )

    def _policy_head(self) -> PolicyHead:
        departure = policy_departure(self, ActorCritic, ("get_action", "policy"))
        return self._head("tanh", departure or self._other_policy("Policy"))

    def _other_policy(self, known: str) -> str | None:
        """One line if the policy is of another class than `known` of `pearl.algorithms.networks`."""
        if self.arrays is not None or _is_of(self.policy, known):
            return None
        return f"the policy of class {type(self.policy).__name__}"

    def _head(self, kind: HeadKind, departure: str | None) -> PolicyHead:
        actor = self.parts.actor
        head = PolicyHead(kind, actor, self._rule_actor(), departure=departure)
        if not hasattr(actor, "observation_scale"):
            return head
        return dataclasses.replace(head, observation_scale=actor.observation_scale, action_scale=actor.action_scale)

    def _rule_actor(self) -> RuleNetwork:
        parts, shape = self.parts, (observation_size(self.observation_space),)
        target = getattr(parts, "target_actor", None)
        return RuleNetwork("actor", _network_of(parts.actor), shape, None if target is None else _network_of(target))

    def _rule_critics(self) -> tuple[RuleNetwork, ...]:
        shape = (observation_size(self.observation_space) + self.action_size,)
        critics = _networks_of(self.parts.critic)
        targets = [*_networks_of(getattr(self.parts, "target_critic", None)), *(None for _ in critics)]
        return tuple(
            RuleNetwork(f"critic {number}", network, shape, target)
            for number, (network, target) in enumerate(zip(critics, targets, strict=False), start=1)
        )

    def _step_departure(self, base: type[ActorCritic], actor: str, critic: str) -> str | None:
        """Why a step of the trainer may differ from that of its class `base` with modules of these classes, if it may.

        The classes are of `pearl.algorithms.networks`.
        """
        departure = step_departure(self, base, tuple(name for name in _STEP if hasattr(base, name)))
        if departure is not None:
            return departure
        if self.arrays is not None:
            return None
        for module, wrapper in ((self.actor, actor), (self.critic, critic)):
            if not _is_of(module, wrapper):
                return f"a {type(module).__name__} in place of a {wrapper}"
        return None

    def _rule_parameters(self) -> tuple[RuleParameters, RuleParameters]:
        """The critics' and the actor's."""
        parts = self.parts
        target_actor = getattr(parts, "_target_actor_flat", None)
        return (
            RuleParameters(parts._critic_flat, "critic_optimizer", parts.critic_optimizer, parts._target_critic_flat),
            RuleParameters(parts._actor_flat, "actor_optimizer", parts.actor_optimizer, target_actor),
        )

    def step_kind(self) -> tuple[object, ...] | str:
        """Which phases the step has."""
        return self._kind_unless_overridden(tuple(phase.name for phase in self.phases), _STEP_AND_INPUTS)

    @property
    def _critic_phase(self) -> Phase:
        return Phase("critic", self._compute_critic, self._apply_critic)

    @property
    def _actor_phase(self) -> Phase:
        return Phase("actor", self._compute_actor, self._apply_actor)

    @abc.abstractmethod
    def _compute_critic(self, batch: Batch, weights: torch.Tensor, batch_size: int) -> torch.Tensor:
        """Add the critic's gradient; returns priorities `(sub_batch,)`."""

    @abc.abstractmethod
    def _compute_actor(self, batch: Batch, weights: torch.Tensor, batch_size: int) -> None:
        """Add the policy's gradient, by `_descend_actor`."""

    def _apply_critic(self) -> None:
        self._step(self._critic_flat, self.critic_optimizer)

    def _descend_actor(self, loss: torch.Tensor) -> None:
        # Gradients for the policy's parameters only: the loss depends on the critic, which must not be updated.
        torch.autograd.backward(loss, inputs=[p for p in self.actor.parameters() if p.requires_grad])

    def _apply_actor(self) -> None:
        self._step(self._actor_flat, self.actor_optimizer)

    def _step(self, flat: FlatParameters, optimizer: torch.optim.Optimizer) -> None:
        if self.max_grad_norm > 0:
            flat.clip_gradient(self.max_grad_norm)
        optimizer.step()
        flat.zero_grad()


def _is_of(module: object, name: str) -> bool:
    """Whether the module is of the class `name` of `pearl.algorithms.networks` itself."""
    from pearl.algorithms import networks

    return type(module) is getattr(networks, name)


def _network_of(module: AnyModule) -> AnyModule:
    """The network inside a policy, or the module itself."""
    if isinstance(module, ArrayModule):
        found: AnyModule = module.network
        return found
    from pearl.algorithms.networks import Policy

    return module.network if isinstance(module, Policy) else module


def _networks_of(module: AnyModule | None) -> tuple[AnyModule, ...]:
    """The networks inside a critic, or the module itself."""
    if isinstance(module, ArrayModule):
        named = {**module.members, **getattr(module.members.get("critics"), "members", {})}
        return tuple(m for name, m in named.items() if name in ("network", "first", "second") or name.isdigit())
    from pearl.algorithms.networks import Critic, EnsembleCritic, TwinCritic

    if isinstance(module, TwinCritic | EnsembleCritic):
        return tuple(module.networks)
    if isinstance(module, Critic):
        return (module.network,)
    return () if module is None else (module,)


class TwinCriticTrainer(ActorCritic):
    """An actor-critic whose targets take the smaller of two critics and need random numbers: TD3 and SAC.

    A transition's priority is the larger of both critics' absolute TD errors (Fujimoto, Meger and Precup 2020, LAP):
    it is worth training on as long as either critic is wrong; with a mean, one critic could hide the other.

    All random numbers come from `draw_noise`; given these, a step is deterministic. They depend on `noise_seed` and the
    count of gradient steps only, so checkpoints need no other state.
    """

    batch_size: int = 256
    replay_ratio: float = 256.0
    hidden_sizes: tuple[int, ...] = (256, 256)
    learning_rate: float = 3e-4
    actor_learning_rate: float = 3e-4

    critic: TwinCritic | EnsembleCritic
    target_critic: TwinCritic | EnsembleCritic
    noise_seed: torch.Tensor
    _undealt: torch.Tensor | None = None  # noise of a batch for the sub-batches that are still to come
    _first_row: int = 0  # of the rows that noise was dealt to last, in their batch

    @abc.abstractmethod
    def _wrap_actor(self, network: nn.Module) -> nn.Module:
        """The policy around `build_actor`'s network."""

    @property
    def _critic_count(self) -> int:
        return 2

    def _delayed_phases(self, policy_delay: int) -> tuple[Phase, ...]:
        """Critics, and in every `policy_delay`-th step the actor."""
        moves = (self.gradient_steps + 1) % policy_delay == 0
        return (self._critic_phase, self._actor_phase) if moves else (self._critic_phase,)

    def array_parts(self, random: TorchRandom) -> ArrayParts | None:
        """The same as `build` makes, for observations of floating point."""
        if self.observation_space.dtype == np.uint8:
            return None
        actor = self._array_actor(self._array_mlp_of_actor(random))
        critic, target = (
            self._array_critics([self._array_mlp_of_critic(random) for _ in range(self._critic_count)])
            for _ in range(2)
        )
        copy_arrays(critic, to=target)
        parts = self._array_parts(actor, critic, target)
        parts.noise_seed = ArrayValue(np.array(random.integer(2**62)))
        return parts

    def _array_critics(self, networks: list[ArrayModule]) -> ArrayModule:
        first, second = networks
        return self._array_critic(first=first, second=second)

    def build(self) -> None:
        """Actor, critics, the critics' target, Adam over the flat parameters of each, the noise's seed."""
        self.actor = self._wrap_actor(self._made_network("build_actor")).to(self.device)
        self._build_critics()
        self._make_optimizers()
        # On the CPU, where noise is made.
        self.noise_seed = nn.Buffer(torch.randint(2**62, ()))

    def _build_critics(self) -> None:
        self.critic = self._joined_critics()
        self.target_critic = self._joined_critics(self.critic)
        self.target_critic.load_state_dict(self.critic.state_dict())
        self._target_critic_flat = FlatParameters(self.target_critic, gradients=False)

    def _joined_critics(self, *others: nn.Module) -> TwinCritic | EnsembleCritic:
        networks = [self._made_network("build_critic", *others) for _ in range(self._critic_count)]
        return self._join(networks).to(self.device)

    def _join(self, networks: list[nn.Module]) -> TwinCritic | EnsembleCritic:
        from pearl.algorithms.networks import TwinCritic

        first, second = networks
        return TwinCritic(first, second, *self._boxes, self.scale_observations)

    def draw_noise(self, rows: int, draw: int) -> torch.Tensor:
        """Standard normal numbers `(rows, action size)` float32 on the trainer's device, for the next step.

        Each number is a function of `noise_seed`, the count of steps trained so far, `draw` (0 for the targets'
        actions, 1 for those of SAC's policy), its row and its column. One routine in C++ makes them all, so that the
        torch learner on any device and the native learner train on the same noise.
        """
        return torch.from_numpy(self._noise(rows, draw)).to(self.device)

    def _noise(self, rows: int, draw: int) -> np.ndarray:
        seed = int(self.parts.noise_seed.item())
        return _native.normal_noise(seed, self.gradient_steps, draw, rows, self.action_size)

    @property
    def _draws(self) -> int:
        """How often the next step calls `draw_noise` for a batch."""
        return 1

    def host_inputs(self, rows: int) -> tuple[torch.Tensor, ...]:
        """The noise `(rows, action size)` of each draw."""
        draws = range(self._draws)
        if overridden(self, TwinCriticTrainer, ("draw_noise",)):
            return tuple(self.draw_noise(rows, draw) for draw in draws)
        return tuple(torch.from_numpy(self._noise(rows, draw)) for draw in draws)

    def end_of_step(self) -> None:
        """Count the step, then `finish_step`."""
        super().end_of_step()
        self._undealt, self._first_row = None, 0

    def _deal_noise(self, rows: int, batch_size: int, draw: int) -> torch.Tensor:
        """The noise of the next `rows` of a batch: sub-batches get the same noise as the whole batch."""
        if self._undealt is None or len(self._undealt) == 0:
            self._undealt = self.draw_noise(batch_size, draw) if self._inputs is None else self._inputs[draw]
        self._first_row = batch_size - len(self._undealt)
        dealt, self._undealt = self._undealt[:rows], self._undealt[rows:]
        return dealt

    def _rule_noise(self, *, of_policy: bool) -> RuleNoise:
        name = overridden(self, TwinCriticTrainer, ("draw_noise",))
        departure = name and f"{type(self).__name__} overrides {name}"
        draw = self.draw_noise if self.arrays is None else self._noise
        return RuleNoise(self.parts.noise_seed, draw, of_policy, departure)

    @abc.abstractmethod
    def _next_value(self, next_obs: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """The values `(batch,)` that the targets bootstrap from; called without gradients."""

    def _values(self, batch: Batch) -> tuple[torch.Tensor, ...]:
        """Each critic's values `(batch,)` of the actions taken."""
        return self.critic(batch.obs, batch.action)  # type: ignore[no-any-return]

    def _compute_critic(self, batch: Batch, weights: torch.Tensor, batch_size: int) -> torch.Tensor:
        with torch.no_grad():
            noise = self._deal_noise(len(weights), batch_size, draw=0)
            target = torch.addcmul(batch.reward, batch.discount, self._next_value(batch.next_obs, noise))
        return self._descend_critics(self._values(batch), target, weights, batch_size)

    @staticmethod
    def _descend_critics(
        values: tuple[torch.Tensor, ...], target: torch.Tensor, weights: torch.Tensor, batch_size: int
    ) -> torch.Tensor:
        """Add the gradients of the weighted squares of all errors; returns the largest errors `(batch,)`."""
        errors = [value - target for value in values]
        squares = functools.reduce(torch.add, (error * error for error in errors))
        torch.autograd.backward(torch.dot(squares, weights) / batch_size)
        return functools.reduce(torch.maximum, (error.detach().abs() for error in errors))
