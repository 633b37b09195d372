"""Deep Q-learning: Mnih et al. 2015, with double (van Hasselt 2016) and dueling (Wang 2016) variants."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from pearl.action_masks import next_mask_column
from pearl.algorithms.arrays import (
    ArrayAdam,
    ArrayDueling,
    ArrayLinear,
    ArrayModule,
    ArrayParameters,
    ArrayParts,
    ArraySame,
    ArraySequential,
    TorchRandom,
    array_cnn,
    array_layers,
    array_mlp,
    copy_arrays,
)
from pearl.algorithms.batch import Batch
from pearl.algorithms.inputs import SMALLEST_IMAGES, takes_cnn
from pearl.algorithms.spaces import ActionKind, check_actions, check_observations
from pearl.algorithms.suggestions import (
    Choice,
    Facts,
    choose_gamma,
    choose_hindsight,
    choose_image_learning_rate,
    choose_learning_rate,
    choose_learning_starts,
    choose_n_step,
    choose_sizes,
)
from pearl.algorithms.trainer import Phase, Trainer, uses_masks
from pearl.algorithms.update_rule import (
    PolicyHead,
    RuleNetwork,
    RuleParameters,
    RuleStep,
    Scalars,
    UpdateRule,
    policy_departure,
    step_departure,
)
from pearl.errors import TrainerError
from pearl.exploration import EpsilonGreedy, Exploration
from pearl.lazy_torch import functional, nn, torch
from pearl.learner.flat import FlatParameters
from pearl.schedules import Schedule
from pearl.spec import NEXT_ACTION_MASK, TransitionSpec

_STEP = (
    *("update_policy", "end_of_step", "phases", "finish_step", "_compute", "_apply", "_copies_target"),
    *("_values_of", "_best_next", "_quantiles_of", "_of_action"),  # the last two of QRDQN
)


class DQN(Trainer):
    """DQN for discrete actions. `tau` is the Polyak rate, or 1.0 for a hard copy every `target_update_interval` steps.

    The defaults learn LunarLander-v3 in 100,000 steps, with a learning rate that falls to 0 over the run
    (docs/stability.md). Images `(channels, height, width)` go through the convolutions of `cnn`: "nature" (Mnih et al.
    2015) or "impala" (the large network of Espeholt et al. 2018, without its LSTM). `layer_norm` normalises the hidden
    layers of an MLP (Ba et al. 2016), which keeps values from growing beyond what is possible. Override
    `build_q_network` to use your own network: any module from `(batch, *obs)` to `(batch, actions)`.

    With `action_masks`, exploration, greedy choice and the targets' maximum take place among the actions that the
    environment allows (`pearl.action_masks`).
    """

    _action_kinds: ClassVar[tuple[ActionKind, ...]] = ("Discrete",)
    _knows_masks: ClassVar[bool] = True
    _algorithm: ClassVar[str] = "DQN"
    _streams_are_hidden: ClassVar[bool] = True  # the two of a dueling head take the last of `hidden_sizes`

    action_masks: bool = False
    replay_ratio: float = 64.0
    n_step: int = 3
    hidden_sizes: tuple[int, ...] = (128, 128)
    learning_rate_schedule: Schedule = "linear"
    double: bool = True
    dueling: bool = False
    layer_norm: bool = False
    cnn: str = "nature"
    tau: float = 1.0
    target_update_interval: int = 250
    max_grad_norm: float = 10.0
    exploration: Exploration | None = EpsilonGreedy()

    @classmethod
    def transition_with(
        cls, transition: TransitionSpec, settings: Mapping[str, Any], action_space: gym.Space[Any]
    ) -> TransitionSpec:
        """With action masks, also the mask of the next observation, for the targets."""
        made = super().transition_with(transition, settings, action_space)
        return made.with_columns(next_mask_column(action_space)) if uses_masks(cls, settings) else made

    @classmethod
    def recommended(cls, facts: Facts) -> str:
        """For discrete actions."""
        if not isinstance(facts.action_space, spaces.Discrete):
            return ""
        seen = "images: Nature CNN (Mnih et al. 2015)" if facts.images else f"{facts.inputs} numbers: an MLP"
        return f"{facts.outputs} discrete actions, learned from a replay; observations are {seen}"

    @classmethod
    def suggestions(cls, facts: Facts) -> tuple[Choice, ...]:
        """Mnih et al. 2015 for images; for vectors more training on each transition, and soft target updates."""
        steps = facts.timesteps
        if facts.images:
            returns = choose_n_step(facts, 3, "usual: 3 (Hessel et al. 2018)")
            return (
                Choice("batch_size", 32, "images: as Mnih et al. 2015"),
                Choice("replay_ratio", 8.0, "images: a gradient step of 32 per 4 steps, as Mnih et al. 2015"),
                choose_image_learning_rate(),
                choose_gamma(facts),
                returns,
                *choose_hindsight(facts),
                choose_learning_starts(facts),
                Choice("target_update_interval", 2000, "images: Rainbow's 32,000 frames (Hessel et al. 2018)"),
                Choice("exploration", EpsilonGreedy(1.0, 0.01, steps // 10), f"a tenth of {steps:,} steps; then 1 %"),
            )
        sized = choose_sizes(facts, batches=(128, 64, 32), updates=(0.25, 0.5, 1.0))
        returns = choose_n_step(
            facts, 5, "errors of bootstrapped values fade sooner than with 1 or 3 (docs/stability.md)"
        )
        share, why = (5, facts.silence) if facts.silent else (10, "usual, as Stable-Baselines3")
        return (
            *sized.choices,
            choose_learning_rate(facts, sized.hidden_sizes),
            choose_gamma(facts),
            returns,
            *choose_hindsight(facts),
            choose_learning_starts(facts),
            Choice("tau", 0.01, "targets move by 1 % of the distance in each gradient step (docs/stability.md)"),
            Choice("layer_norm", True, "keeps values from growing beyond what is possible (docs/stability.md)"),
            Choice(
                "exploration",
                EpsilonGreedy(1.0, 0.05, steps // share),
                f"1/{share} of {steps:,} steps, then 5 %: {why}",
            ),
        )

    def check_spaces(self) -> None:
        """Discrete actions and array observations."""
        name = type(self).__name__
        check_actions(name, self._algorithm, "Discrete", self.action_space)
        check_observations(name, self.observation_space)
        interval = self.target_update_interval
        self._require(type(interval) is int and interval >= 1, "target_update_interval", "a whole number of at least 1")
        splits = self.dueling and self._streams_are_hidden
        self._require(not splits or bool(self.hidden_sizes), "hidden_sizes", "one size or more where dueling is True")
        self._require(type(self.layer_norm) is bool, "layer_norm", "True or False")
        if self.layer_norm and takes_cnn(self.input_shape, self.cnn):
            raise TrainerError(
                f"{name}.layer_norm is True, which normalises the hidden layers of an MLP; observations of shape "
                f"{self.input_shape} go through the convolutions of cnn={self.cnn!r}, which have none. Leave it False."
            )
        self._require(self.cnn in SMALLEST_IMAGES, "cnn", " or ".join(f'"{cnn}"' for cnn in SMALLEST_IMAGES))
        if self.cnn != DQN.cnn and not takes_cnn(self.input_shape, self.cnn):
            least = SMALLEST_IMAGES[self.cnn]
            raise TrainerError(
                f"{name}.cnn is {self.cnn!r}, which takes images (channels, height, width) of at least {least} x "
                f"{least} pixels; the observations have shape {self.input_shape}. Leave cnn as it is, or use images."
            )

    def build_q_network(self) -> nn.Module:
        """The action-value network; the CNN `cnn` for images, else an MLP of `hidden_sizes`."""
        from pearl.algorithms.networks import q_network

        assert isinstance(self.action_space, spaces.Discrete)
        return q_network(
            self.input_shape,
            int(self.action_space.n) * self._outputs_per_action[0],
            self.hidden_sizes,
            dueling=self.dueling,
            of_bytes=self._of_bytes,
            cnn=self.cnn,
            layer_norm=self.layer_norm,
        )

    def array_parts(self, random: TorchRandom) -> ArrayParts | None:
        """The same as `build` makes."""
        q, target = self._array_network(random), self._array_network(random)
        copy_arrays(q, to=target)
        flat, target_flat = ArrayParameters(q), ArrayParameters(target)
        optimizer = ArrayAdam(flat.memory.shape, self.learning_rate)
        return ArrayParts(policy=q, q=q, target_q=target, _q_flat=flat, _target_flat=target_flat, optimizer=optimizer)

    def _array_network(self, random: TorchRandom) -> ArrayModule:
        assert isinstance(self.action_space, spaces.Discrete)
        outputs, sizes = int(self.action_space.n) * self._outputs_per_action[0], self.hidden_sizes
        if takes_cnn(self.input_shape, self.cnn):
            cnn, width = array_cnn(random, self.cnn, self.input_shape)
            trunk: list[ArrayModule] = [cnn]
        else:
            trunk = [ArraySame()] if self._of_bytes else []
            trunk += [ArraySame()] if len(self.input_shape) != 1 else []
            hidden = sizes[:-1] if self.dueling else sizes
            trunk += array_layers(random, math.prod(self.input_shape), hidden, layer_norm=self.layer_norm)
            width = (math.prod(self.input_shape), *sizes)[len(sizes) - (1 if self.dueling else 0)]
        if not self.dueling:
            return ArraySequential(*trunk, ArrayLinear(*random.linear(width, outputs)))
        value, advantage = (array_mlp(random, width, sizes[-1:], size) for size in (1, outputs))
        return ArraySequential(*trunk, ArrayDueling(value, advantage, outputs))

    def build(self) -> None:
        """Online and target networks, and Adam over the flat parameters."""
        self.q = self._made_network("build_q_network").to(self.device)
        self.target_q = self._made_network("build_q_network", self.q).to(self.device)
        self.target_q.load_state_dict(self.q.state_dict())
        self._q_flat = FlatParameters(self.q)
        self._target_flat = FlatParameters(self.target_q, gradients=False)
        self.optimizer = torch.optim.Adam([self._q_flat.parameter], lr=self.learning_rate, fused=True)

    def check_networks(self) -> None:
        """Check that there are the outputs for each action."""
        assert isinstance(self.action_space, spaces.Discrete)
        of_action, what = self._outputs_per_action
        meaning = f"{what} for each action of {self.action_space}"
        outputs, dtype = int(self.action_space.n) * of_action, torch.uint8 if self._of_bytes else torch.float32
        self._check_outputs("build_q_network", self.q, self.input_shape, outputs, meaning, dtype)

    @property
    def _outputs_per_action(self) -> tuple[int, str]:
        """How many, and what they are."""
        return 1, "a value"

    @property
    def _of_bytes(self) -> bool:
        return self.observation_space.dtype == np.uint8

    @property
    def policy(self) -> nn.Module:
        """The online network."""
        return self.q

    @property
    def phases(self) -> tuple[Phase, ...]:
        """One: the TD loss."""
        return (Phase("q", self._compute, self._apply),)

    def get_action(self, obs: torch.Tensor, action_masks: torch.Tensor | None = None) -> torch.Tensor:
        """The actions `(envs,)` int64 with the largest values, counted from 0.

        With `action_masks` `(envs, actions)` bool, of those that they allow.
        """
        values = self._values_of(self.q(obs))
        if action_masks is not None:
            values = values.masked_fill(~action_masks, -math.inf)
        return values.argmax(dim=1)

    def _values_of(self, outputs: torch.Tensor) -> torch.Tensor:
        """The values `(batch, actions)` of a network's outputs."""
        return outputs

    def _best_next(self, batch: Batch, judged: torch.Tensor) -> torch.Tensor:
        """The next actions `(batch,)` to which the target network gives its outputs `judged`."""
        choosing = self._values_of(self.q(batch.next_obs) if self.double else judged)
        if self.action_masks:
            choosing = choosing.masked_fill(getattr(batch, NEXT_ACTION_MASK) == 0, -math.inf)
        return choosing.argmax(dim=1)

    def _compute(self, batch: Batch, weights: torch.Tensor, batch_size: int) -> torch.Tensor:
        with torch.no_grad():
            next_values = self.target_q(batch.next_obs)
            best = self._best_next(batch, next_values)
            next_value = next_values.gather(1, best.unsqueeze(1)).squeeze(1)
            target = torch.addcmul(batch.reward, batch.discount, next_value)
        value: torch.Tensor = self.q(batch.obs).gather(1, batch.action.unsqueeze(1)).squeeze(1)
        losses = functional.smooth_l1_loss(value, target, reduction="none")
        loss = torch.dot(losses, weights) / batch_size
        torch.autograd.backward(loss)
        return (value.detach() - target).abs_()

    def _apply(self) -> None:
        if self.max_grad_norm > 0:
            self._q_flat.clip_gradient(self.max_grad_norm)
        self.optimizer.step()
        self._q_flat.zero_grad()

    def finish_step(self) -> None:
        """Hard or Polyak target update."""
        if self.tau < 1.0:
            self._target_flat.move_toward(self._q_flat, self.tau)
        elif self._copies_target():
            self._target_flat.copy_from(self._q_flat)

    def _copies_target(self, ahead: int = 0) -> bool:
        return (self.gradient_steps + ahead) % self.target_update_interval == 0

    def step_kind(self) -> tuple[object, ...] | str:
        """Whether the step copies the network to its target."""
        return self._kind_unless_overridden((self.tau >= 1.0 and self._copies_target(1),), _STEP)

    def update_rule(self) -> UpdateRule:
        """One network of action values; the policy takes the action with the largest."""
        return self._rule_of(DQN)

    def _rule_of(self, base: type[DQN]) -> UpdateRule:
        """The rule of a trainer whose class is `base`."""
        parts = self.parts
        network = RuleNetwork("q", parts.q, self.input_shape, parts.target_q)
        departure = policy_departure(self, base, ("get_action", "policy", "_values_of"))
        policy = PolicyHead("argmax", parts.q, network, departure=departure)
        double, masked = bool(self.double), bool(self.action_masks)
        return UpdateRule((network,), policy, self._step_of(base), "largest_value", double=double, masked=masked)

    def _step_of(self, base: type[DQN]) -> RuleStep | str:
        departure = step_departure(self, base, tuple(name for name in _STEP if hasattr(base, name)))
        if departure is not None:
            return departure
        parts = self.parts
        parameters = RuleParameters(parts._q_flat, "optimizer", parts.optimizer, parts._target_flat)
        return RuleStep("huber", self._rule_scalars, parameters)

    def _rule_scalars(self) -> Scalars:
        return Scalars(float(self.max_grad_norm), float(self.tau), int(self.target_update_interval), bool(self.double))
