"""The base of on-policy algorithms: a policy that draws its actions, a value network, the columns of rollouts."""

from __future__ import annotations

import abc
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from pearl.action_masks import FORBIDDEN_LOGIT
from pearl.algorithms.arrays import (
    Array,
    ArrayActivation,
    ArrayAdam,
    ArrayLinear,
    ArrayModule,
    ArrayParameters,
    ArrayParts,
    ArraySame,
    ArraySequential,
    ArrayStatistics,
    TorchRandom,
)
from pearl.algorithms.inputs import takes_cnn
from pearl.algorithms.spaces import ActionKind, check_holds_numbers, check_observations
from pearl.algorithms.suggestions import Choice, Facts, choose_gamma, choose_normalization, return_size
from pearl.algorithms.trainer import DataFlowKind, Trainer, uses_masks
from pearl.algorithms.update_frequency import FREQ, STEPS
from pearl.errors import ConfigurationError, EnvError, TrainerError
from pearl.exploration import Exploration
from pearl.lazy_torch import nn, torch
from pearl.learner.flat import FlatParameters
from pearl.rollout.columns import BEGINS, rollout_columns
from pearl.spec import ACTION, ACTION_MASK, OBS, STATE, RolloutSequences, TransitionSpec

if TYPE_CHECKING:
    from pearl.algorithms.policy_and_value import PolicyAndValue

_HALF_LOG_2_PI = 0.5 * math.log(2.0 * math.pi)
_SMALLEST = 1e-8
_ADAM_EPS = 1e-5
_LARGE_RETURN = 100.0
# Settings of every trainer that rollouts leave unused.
_OF_REPLAYS = (
    *("replay_ratio", "least_updates_per_step", "most_updates_per_step", "learning_starts", "n_step", "exploration"),
    "hindsight_goals",
)


class Minibatch(NamedTuple):
    """Rows of a rollout: `obs` `(batch, *obs)`, `action` `(batch, *action)`; all others `(batch,)` float32.

    `log_prob` and `value` are those of the policy that acted; `ret` is the return that the value network learns. With
    action masks, `action_mask` `(batch, choices)` is not 0 where an action was allowed.

    Of a recurrent policy, the rows are sequences of equal length, one after the other: `state` `(sequences, size)` is
    the recurrent state before each, `begins` `(batch,)` bool is where an episode begins, and `real` `(batch,)` bool is
    False where the environment was reset in place of a step (None: nowhere).
    """

    obs: torch.Tensor
    action: torch.Tensor
    log_prob: torch.Tensor
    value: torch.Tensor
    advantage: torch.Tensor
    ret: torch.Tensor
    action_mask: torch.Tensor | None = None
    begins: torch.Tensor | None = None
    real: torch.Tensor | None = None
    state: torch.Tensor | None = None

    def rows(self, picked: torch.Tensor) -> Minibatch:
        """The rows with the numbers `picked`, or where `picked` `(batch,)` bool is True; without `state`."""
        columns = self._replace(state=None)
        return Minibatch(*(None if column is None else column[picked] for column in columns))  # type: ignore[arg-type]


@dataclass(frozen=True)
class ActionDistribution:
    """How actions are drawn from the policy's outputs: `sizes` of its categorical parts, or a normal distribution.

    With `sizes`, the outputs are logits, of one part after the other: of a MultiBinary space two for each number (a
    Bernoulli distribution is a categorical one of two choices, whose logits differ by its log odds). The parts are
    independent. Without, they are the means of a normal distribution of `size` numbers, whose log deviations are
    parameters of their own.
    """

    sizes: tuple[int, ...]
    size: int

    @classmethod
    def of(cls, name: str, space: gym.Space[Any]) -> ActionDistribution:
        """The distribution of actions in `space`; EnvError if the class `name` cannot act there."""
        check_holds_numbers(name, space)
        if isinstance(space, spaces.Discrete):
            return cls((int(space.n),), 1)
        if isinstance(space, spaces.MultiDiscrete):
            sizes = tuple(int(n) for n in np.asarray(space.nvec).ravel())
            return cls(sizes, len(sizes))
        if isinstance(space, spaces.MultiBinary):
            numbers = math.prod(space.shape)
            return cls((2,) * numbers, numbers)
        if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating):
            if not space.shape:
                raise EnvError(
                    f"{name} needs actions of one dimension or more; the environment has {space}, of shape (). Wrap it "
                    "with a gymnasium.ActionWrapper that takes actions of shape (1,)."
                )
            return cls((), math.prod(space.shape))
        raise EnvError(
            f"{name} takes Discrete, MultiDiscrete, MultiBinary and Box actions of floating point; the environment has "
            f"{space}. Wrap it with a gymnasium.ActionWrapper that offers one of these."
        )

    @property
    def outputs(self) -> int:
        """Numbers that the policy network computes for an observation."""
        return sum(self.sizes) or self.size

    def log_prob(self, outputs: torch.Tensor, log_std: torch.Tensor | None, action: torch.Tensor) -> torch.Tensor:
        """The log probabilities, or densities, of actions `(batch, size)`: `(batch,)`."""
        if not self.sizes:
            assert log_std is not None
            distance = (action - outputs) * torch.exp(-log_std)
            return -(0.5 * distance * distance + log_std + _HALF_LOG_2_PI).sum(dim=1)
        parts = zip(_parts(outputs, self.sizes), action.unbind(dim=1), strict=True)
        picked = [part.log_softmax(dim=1).gather(1, chosen[:, None]).squeeze(1) for part, chosen in parts]
        return torch.stack(picked).sum(dim=0)

    def entropy(self, outputs: torch.Tensor, log_std: torch.Tensor | None) -> torch.Tensor:
        """Entropies `(batch,)`."""
        if not self.sizes:
            assert log_std is not None
            return (log_std + 0.5 + _HALF_LOG_2_PI).sum().expand(len(outputs))
        logs = [part.log_softmax(dim=1) for part in _parts(outputs, self.sizes)]
        return torch.stack([-(log.exp() * log).sum(dim=1) for log in logs]).sum(dim=0)

    def draw(
        self,
        outputs: torch.Tensor,
        log_std: torch.Tensor | None,
        noise: torch.Tensor,
        masks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Actions `(batch, size)` by `noise` `(batch, size)`: uniform in [0, 1) for parts, else standard normal.

        `masks` `(batch, outputs)` are those that `masked` has been given.
        """
        if not self.sizes:
            assert log_std is not None
            return outputs + log_std.exp() * noise
        chosen = []
        for part, uniform in zip(_parts(outputs, self.sizes), noise.unbind(dim=1), strict=True):
            below = part.softmax(dim=1).cumsum(dim=1)[:, :-1] <= uniform[:, None]
            chosen.append(below.sum(dim=1))
        actions = torch.stack(chosen, dim=1)
        if masks is None:
            return actions
        # Rounded sums of probabilities may end below 1: then the last allowed one.
        lasts = [len(part[0]) - 1 - part.flip(1).long().argmax(dim=1) for part in _parts(masks, self.sizes)]
        return torch.minimum(actions, torch.stack(lasts, dim=1))

    @staticmethod
    def masked(outputs: torch.Tensor, masks: torch.Tensor | None) -> torch.Tensor:
        """Outputs `(batch, outputs)` from which nothing is drawn that `masks`, of the same shape, forbids (0)."""
        return outputs if masks is None else outputs.masked_fill(masks == 0, FORBIDDEN_LOGIT)

    def mode(self, outputs: torch.Tensor) -> torch.Tensor:
        """The likeliest actions `(batch, size)`."""
        if not self.sizes:
            return outputs
        return torch.stack([part.argmax(dim=1) for part in _parts(outputs, self.sizes)], dim=1)


class OnPolicyTrainer(Trainer):
    """Base of algorithms that train on what the present policy collected, a rollout at a time.

    The settings from `horizon` to `quantization_bits` are the defaults of `RolloutSpec`. `normalize_observations`
    shifts and scales observations by mean and deviation of all that were trained on; these belong to the policy.
    `normalize_advantages` does so with the advantages of each minibatch. With `shared_layers`, policy and value network
    have their hidden layers in common; for images they always do. Weights begin orthogonal, those of the policy's last
    layer 100 times smaller (Engstrom et al. 2020 measure what that does); with `orthogonal=False`, as torch's layers
    begin.
    """

    _action_kinds: ClassVar[tuple[ActionKind, ...]] = ("Discrete", "MultiDiscrete", "MultiBinary", "Box")
    _knows_masks: ClassVar[bool] = True
    _unused: ClassVar[frozenset[str]] = frozenset((FREQ, STEPS, *_OF_REPLAYS))

    action_masks: bool = False

    batch_size: int = 64
    learning_rate: float = 3e-4
    exploration: Exploration | None = None
    horizon: int = 256
    epochs: int = 10
    gae_lambda: float = 0.95
    policy_lag: int = 0
    correction: str = "clip"
    reward_standardization: str = "none"
    value_standardization: str = "none"
    quantization_bits: int = 0
    activation: str = "tanh"
    shared_layers: bool = False
    orthogonal: bool = True
    initial_log_std: float = 0.0
    normalize_observations: bool = False
    normalize_advantages: bool = True
    max_grad_norm: float = 0.5

    def _check_settings(self) -> None:
        super()._check_settings()
        for name in (FREQ, STEPS):
            advice = "None, as it learns from rollouts: horizon and epochs say how often it trains"
            self._require(getattr(self, name) is None, name, advice)
        for name in _OF_REPLAYS:
            default = getattr(Trainer, name)
            advice = f"left as it is ({default!r}): it has no effect on an algorithm that learns from rollouts"
            self._require(getattr(self, name) == default, name, advice)

    @classmethod
    def data_flow(cls) -> DataFlowKind:
        """Rollouts."""
        return "rollout"

    @classmethod
    def rollout_sequences(
        cls, observation_space: gym.Space[Any], settings: Mapping[str, Any]
    ) -> RolloutSequences | None:
        """The sequences that a recurrent policy with `settings` is trained on; None: the policy remembers nothing."""
        return None

    def default_batch(self, transitions: int) -> int:
        """Transitions of a minibatch out of a rollout of `transitions`, where the training's settings name none."""
        return self.batch_size

    def check_batch(self, batch_size: int) -> None:
        """Raise ConfigurationError for minibatches whose normalised advantages would all be 0."""
        if batch_size == 1 and self.normalize_advantages:
            raise ConfigurationError(
                f"{type(self).__name__} normalises the advantages of each minibatch, which leaves 0 of a single one: "
                "the policy would not learn. Found batch_size=1; set it to at least 2, or normalize_advantages=False."
            )

    @classmethod
    def suggestions(cls, facts: Facts) -> tuple[Choice, ...]:
        """Discount, and the scales of observations and rewards."""
        discount = choose_gamma(facts)
        size = return_size(facts, facts.fixed.get("gamma", discount.value))
        scaled = size > _LARGE_RETURN
        rewards = Choice(
            "reward_standardization",
            "returns" if scaled else "none",
            f"returns of random actions are about {size:,.3g} in size, {'beyond' if scaled else 'at most'} "
            f"{_LARGE_RETURN:g} (Engstrom et al. 2020 measure what scaling does)",
        )
        inputs = choose_normalization(facts)
        return (discount, rewards) if inputs is None else (discount, rewards, inputs)

    def check_spaces(self) -> None:
        """Array observations; Discrete, MultiDiscrete, MultiBinary or Box actions."""
        name = type(self).__name__
        check_observations(name, self.observation_space)
        self.distribution = ActionDistribution.of(name, self.action_space)
        self._require(self.activation in ("tanh", "relu"), "activation", '"tanh" or "relu"')
        self.progress = 0.0
        self._reported: dict[str, float] = {}

    # --- networks ---------------------------------------------------------------------------------------------------

    def build_policy(self, features: nn.Module, width: int) -> nn.Module:
        """The policy network: `features` `(batch, width)`, then the distribution's outputs."""
        return nn.Sequential(features, self._begun(nn.Linear(width, self.distribution.outputs), 0.01))

    def build_value(self, features: nn.Module, width: int) -> nn.Module:
        """The value network: `features` `(batch, width)`, then one number."""
        return nn.Sequential(features, self._begun(nn.Linear(width, 1), 1.0))

    def build_features(self) -> tuple[nn.Module, int]:
        """Hidden layers from `(batch, *obs)`, and their width: the Nature CNN for images, else `hidden_sizes`."""
        from pearl.algorithms.networks import NatureCNN, ScaleBytes

        if takes_cnn(self.input_shape):
            network = NatureCNN(self.input_shape)
            for layer in network:
                if isinstance(layer, nn.Conv2d | nn.Linear):
                    self._begun(layer, math.sqrt(2.0))
            return network, network.features
        layers: list[nn.Module] = [ScaleBytes()] if self.observation_space.dtype == np.uint8 else []
        layers += [nn.Flatten()] if len(self.input_shape) != 1 else []
        width = math.prod(self.input_shape)
        for size in self.hidden_sizes:
            layers += [self._begun(nn.Linear(width, size), math.sqrt(2.0)), self._activation()]
            width = size
        return nn.Sequential(*layers), width

    def _activation(self) -> nn.Module:
        return nn.Tanh() if self.activation == "tanh" else nn.ReLU()

    def _begun(self, layer: nn.Conv2d | nn.Linear, gain: float) -> nn.Module:
        """A layer with its first weights."""
        if self.orthogonal:
            nn.init.orthogonal_(layer.weight, gain)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
        return layer

    def array_parts(self, random: TorchRandom) -> ArrayParts | None:
        """The same as `build` makes, for vectors of floating point."""
        if self.observation_space.dtype == np.uint8 or takes_cnn(self.input_shape):
            return None
        features, width = self._array_features(random)
        policy = ArraySequential(features, self._array_linear(random, width, self.distribution.outputs, 0.01))
        features = features if self.shared_layers else self._array_features(random)[0]
        value = ArraySequential(features, self._array_linear(random, width, 1, 1.0))
        normalization: dict[str, Array] = {}
        if self.normalize_observations:
            values = np.zeros(self.input_shape, np.float32), np.ones(self.input_shape, np.float32)
            names = ("observation_mean", "observation_scale")
            normalization = {name: Array(v, buffer=True) for name, v in zip(names, values, strict=True)}
        log_std = np.full(self.distribution.size, self.initial_log_std, np.float32)
        networks = ArrayModule(
            log_std=None if self.distribution.sizes else Array(log_std), **normalization, policy=policy, value=value
        )
        flat = ArrayParameters(networks)
        optimizer = ArrayAdam(flat.memory.shape, self.learning_rate, eps=_ADAM_EPS)
        parts = ArrayParts(policy=networks, networks=networks, _flat=flat, optimizer=optimizer)
        if self.normalize_observations:
            parts.observation_statistics = ArrayStatistics(self.input_shape)
        return parts

    def _array_features(self, random: TorchRandom) -> tuple[ArrayModule, int]:
        layers: list[ArrayModule] = [ArraySame()] if len(self.input_shape) != 1 else []
        width = math.prod(self.input_shape)
        for size in self.hidden_sizes:
            layers += [self._array_linear(random, width, size, math.sqrt(2.0)), ArrayActivation(self.activation, size)]
            width = size
        return ArraySequential(*layers), width

    def _array_linear(self, random: TorchRandom, inputs: int, outputs: int, gain: float) -> ArrayModule:
        weight, bias = random.linear(inputs, outputs)
        if self.orthogonal:
            weight, bias = random.orthogonal((outputs, inputs), gain), np.zeros_like(bias)
        return ArrayLinear(weight, bias)

    def build(self) -> None:
        """Policy and value network, their optimizer, and statistics of observations if these are normalised."""
        from pearl.algorithms.policy_and_value import ObservationStatistics

        features, width = self._checked_features()
        shared = self.shared_layers or takes_cnn(self.input_shape)
        policy = self.build_policy(features, width)
        value = self.build_value(*((features, width) if shared else self._checked_features()))
        first, size = float(self.initial_log_std), self.distribution.size
        log_std = None if self.distribution.sizes else torch.full((size,), first)
        normalized = self.input_shape if self.normalize_observations else None
        self.networks = self._joined(policy, value, log_std, normalized, shared).to(self.device)
        self._flat = FlatParameters(self.networks)
        self.optimizer = self.build_optimizer(self._flat.parameter)
        if self.normalize_observations:
            self.observation_statistics = ObservationStatistics(self.input_shape)

    def _checked_features(self) -> tuple[nn.Module, int]:
        found: Any = self.build_features()
        kinds = [type(one) for one in found] if isinstance(found, tuple | list) else []
        if len(kinds) != 2 or not issubclass(kinds[0], nn.Module) or kinds[1] is not int:
            raise TrainerError(
                f"{type(self).__name__}.build_features must return the network and how many features it has, such as "
                f"(network, 64); found {found!r:.100}."
            )
        return found[0], found[1]

    def _joined(
        self,
        policy: nn.Module,
        value: nn.Module,
        log_std: torch.Tensor | None,
        normalized: tuple[int, ...] | None,
        shared: bool,
    ) -> PolicyAndValue:
        from pearl.algorithms.policy_and_value import PolicyAndValue

        return PolicyAndValue(policy, value, log_std, normalized)

    def build_optimizer(self, parameter: nn.Parameter) -> torch.optim.Optimizer:
        """The optimizer of all weights, in one flat `parameter`."""
        return torch.optim.Adam([parameter], lr=self.learning_rate, eps=_ADAM_EPS, fused=True)

    def check_networks(self) -> None:
        """Check the outputs of both networks."""
        dtype = torch.uint8 if self.observation_space.dtype == np.uint8 else torch.float32
        outputs, meaning = self.distribution.outputs, f"what draws actions of {self.action_space}"
        self._check_outputs("build_policy", self.networks.policy, self.input_shape, outputs, meaning, dtype)
        self._check_outputs("build_value", self.networks.value, self.input_shape, 1, "the value", dtype)

    @property
    def policy(self) -> nn.Module:
        """Both networks: actors record the values of what they see."""
        return self.networks

    # --- acting -----------------------------------------------------------------------------------------------------

    def get_action(self, obs: torch.Tensor, action_masks: torch.Tensor | None = None) -> torch.Tensor:
        """The likeliest actions `(envs, *action)`, within the bounds of a Box.

        With `action_masks` `(envs, choices)` bool, of those that they allow.
        """
        outputs = self.networks.policy(self.networks.normalize(obs))
        return self.in_space(self.distribution.mode(self.distribution.masked(outputs, action_masks)))

    def explore(
        self, obs: torch.Tensor, noise: torch.Tensor, action_masks: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Actions `(envs, *action)` drawn by `noise` `(envs, size)`, their log probabilities and the values `(envs,)`.

        Actions of a Box are not clipped: the environment gets them within its bounds, the Learner as they were drawn.
        """
        outputs, values = self.networks(obs)
        outputs = self.distribution.masked(outputs, action_masks)
        action = self.distribution.draw(outputs, self.networks.log_std, noise, action_masks)
        log_prob = self.distribution.log_prob(outputs, self.networks.log_std, action)
        return action.reshape(len(obs), *(self.action_space.shape or ())), log_prob, values

    def values(self, obs: torch.Tensor) -> torch.Tensor:
        """Values `(envs,)`."""
        found: torch.Tensor = self.networks.value(self.networks.normalize(obs))
        return found.squeeze(1)

    def in_space(self, action: torch.Tensor) -> torch.Tensor:
        """Actions `(envs, size)` in the action's shape, and a Box's within its bounds."""
        space = self.action_space
        action = action.reshape(-1, *(space.shape or ()))  # not by the batch's size, which a trace would keep
        if not isinstance(space, spaces.Box):
            return action
        low, high = (torch.as_tensor(bound, device=action.device) for bound in (space.low, space.high))
        # A conversion to its own dtype: after an LSTM, the exporter to ONNX knows of none, which its clamp needs.
        return torch.clamp(action.to(action.dtype), low, high)

    # --- training ---------------------------------------------------------------------------------------------------

    def set_progress(self, share: float) -> None:
        """Also for schedules of the algorithm's own settings; called before each rollout is trained on."""
        self.progress = min(1.0, max(0.0, share))
        super().set_progress(self.progress)

    def evaluate_actions(
        self, obs: torch.Tensor, action: torch.Tensor, action_masks: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Log probabilities, entropies and values `(batch,)` of recorded actions by the present networks."""
        outputs, values = self.networks(obs)
        outputs = self.distribution.masked(outputs, action_masks)
        flat = action.reshape(len(action), -1)
        log_prob = self.distribution.log_prob(outputs, self.networks.log_std, flat)
        return log_prob, self.distribution.entropy(outputs, self.networks.log_std), values

    def evaluate_rollout(self, rollout: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The same `(rows,)` of the Learner's columns of a whole rollout, without gradients."""
        masks = (rollout[ACTION_MASK],) if ACTION_MASK in rollout else ()
        with torch.no_grad():
            return self.evaluate_actions(rollout[OBS], rollout[ACTION], *masks)

    @abc.abstractmethod
    def update_minibatch(self, minibatch: Minibatch) -> tuple[dict[str, float], bool]:
        """One step, counted; returns the parts of the loss. False ends the rollout's training, and no step was made."""

    def after_rollout(self, obs: torch.Tensor) -> None:
        """Take the observations `(rows, *obs)` that were trained on into the normalisation of the next rollouts."""
        if self.normalize_observations:
            statistics = self.observation_statistics
            statistics.add(obs)
            self.networks.observation_mean.copy_(statistics.mean)
            self.networks.observation_scale.copy_(statistics.scale)

    def take_in(self, obs: np.ndarray) -> None:
        """The same for an array of observations; without torch where the networks are in arrays."""
        if self.arrays is None:
            self.after_rollout(torch.from_numpy(obs))
        elif self.normalize_observations:
            networks, statistics = self.arrays.networks, self.arrays.observation_statistics
            statistics.add(obs)
            networks.observation_mean.values[...] = statistics.mean.values
            networks.observation_scale.values[...] = statistics.scale

    def present_normalization(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Mean and scale `(*obs,)` float32 of observations now; None where these are taken as they are."""
        if not self.normalize_observations:
            return None
        if self.arrays is not None:
            networks = self.arrays.networks
            return networks.observation_mean.values, networks.observation_scale.values
        return self.networks.observation_mean.numpy(), self.networks.observation_scale.numpy()

    def metrics(self) -> Mapping[str, float]:
        """The numbers of the last rollout, as the Learner reported them."""
        return self._reported

    def report(self, metrics: Mapping[str, float]) -> None:
        """Keep the Learner's numbers for `metrics`."""
        self._reported = dict(metrics)


def normalized(advantages: torch.Tensor) -> torch.Tensor:
    """Advantages with mean 0 and deviation 1; equal ones become 0."""
    if len(advantages) < 2:
        return advantages - advantages
    # In double: in float32 the mean of equal ones may differ from them by more than _SMALLEST.
    exact = advantages.double()
    return ((exact - exact.mean()) / (exact.std() + _SMALLEST)).to(advantages.dtype)


def _parts(outputs: torch.Tensor, sizes: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    """The outputs `(batch, sum of sizes)` of each categorical part."""
    return torch.split(outputs, list(sizes), dim=1)


def present_policy(trainer: OnPolicyTrainer, rollout: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Log probabilities of a rollout's actions, and values, by the trainer's present weights, `(count,)` float32."""
    names = (OBS, ACTION, ACTION_MASK, BEGINS, STATE)
    columns = {name: torch.from_numpy(rollout[name]).to(trainer.device) for name in names if name in rollout}
    log_prob, _, values = trainer.evaluate_rollout(columns)
    return log_prob.cpu().numpy(), values.cpu().numpy()


def rollout_transition(
    trainer_class: type, observation_space: gym.Space[Any], action_space: gym.Space[Any], settings: Mapping[str, Any]
) -> TransitionSpec:
    """What Actors of a trainer class with `settings` record of each step of a rollout."""
    sequences = None
    if issubclass(trainer_class, OnPolicyTrainer):
        sequences = trainer_class.rollout_sequences(observation_space, settings)
    masked = uses_masks(trainer_class, settings)
    return rollout_columns(observation_space, action_space, masked=masked, sequences=sequences)
