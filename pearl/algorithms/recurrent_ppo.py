"""PPO with a recurrent policy, trained on whole sequences of a rollout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import gymnasium as gym

from pearl.algorithms.arrays import ArrayParts, TorchRandom
from pearl.algorithms.inputs import takes_cnn
from pearl.algorithms.on_policy import Minibatch
from pearl.algorithms.ppo import PPO
from pearl.algorithms.suggestions import Choice, Facts
from pearl.algorithms.update_rule import PolicyHead, RuleNetwork, UpdateRule
from pearl.errors import TrainerError
from pearl.lazy_torch import nn, torch
from pearl.rollout.columns import BEGINS, rows_of_sequences
from pearl.spec import ACTION, OBS, STATE, RolloutSequences

if TYPE_CHECKING:
    from pearl.algorithms.policy_and_value import PolicyAndValue
    from pearl.algorithms.recurrent_networks import RecurrentNetwork, RecurrentPolicyAndValue

_CELLS = ("lstm", "gru")
_TORCH_ONLY = "recurrent networks, which train and act in torch"


class RecurrentPPO(PPO):
    """PPO that remembers what it saw: hidden layers, an LSTM or GRU (`cell`) of `recurrent_size`, and a linear layer.

    Policy and value network have a recurrent layer each; with `shared_layers`, and for images, one for both. Actors
    carry the state from step to step, also from one rollout to the next, and begin it again with each episode.

    The Learner divides the `horizon` steps of each environment into sequences of `sequence_length`, and a minibatch of
    `batch_size` transitions is `batch_size / sequence_length` of them in random order. It unrolls each from the state
    in which its Actor was, which begins again where an episode begins within the sequence; gradients stay within the
    sequence. So in the first step on a rollout every ratio is 1, as in PPO. States are not computed again between the
    epochs. Advantages are PPO's; the value after the last step of a rollout, and that of an episode's last observation
    where a time limit ended it, are those of the carried state.

    The rest is PPO (Schulman et al. 2017), with the recurrent state of Hausknecht and Stone 2015.
    """

    _knows_masks: ClassVar[bool] = False

    cell: str = "lstm"
    recurrent_size: int = 64
    sequence_length: int = 32

    batch_size: int = 128
    horizon: int = 128
    hidden_sizes: tuple[int, ...] = (64,)

    networks: RecurrentPolicyAndValue

    @classmethod
    def rollout_sequences(
        cls, observation_space: gym.Space[Any], settings: Mapping[str, Any]
    ) -> RolloutSequences | None:
        """Sequences of `sequence_length`, with the states of both networks."""
        names = ("sequence_length", "cell", "recurrent_size", "shared_layers")
        length, cell, size, shared = (settings.get(name, getattr(cls, name)) for name in names)
        layers = 1 if shared or takes_cnn(tuple(observation_space.shape or ())) else 2
        return RolloutSequences(length, layers * (2 if cell == "lstm" else 1) * size)

    @classmethod
    def recommended(cls, facts: Facts) -> str:
        """Never the first choice: whether an environment hides something cannot be seen from its spaces."""
        return ""

    @classmethod
    def _rollout_suggestions(cls, facts: Facts) -> tuple[Choice, ...]:
        return ()  # sizes that fit to each other

    def check_spaces(self) -> None:
        """Also the settings of the recurrent layer."""
        super().check_spaces()
        self._require(self.cell in _CELLS, "cell", " or ".join(f'"{cell}"' for cell in _CELLS))
        for name in ("recurrent_size", "sequence_length"):
            value = getattr(self, name)
            self._require(type(value) is int and value >= 1, name, "a whole number of at least 1")

    # --- networks ---------------------------------------------------------------------------------------------------

    def array_parts(self, random: TorchRandom) -> ArrayParts | None:
        """None: only in torch."""
        return None

    def build_policy(self, features: nn.Module, width: int) -> RecurrentNetwork:
        """The policy network: `features` `(batch, width)`, the recurrent layer, then the distribution's outputs."""
        return self._recurrent(features, width, self.distribution.outputs, 0.01)

    def build_value(self, features: nn.Module, width: int) -> RecurrentNetwork:
        """The value network: `features` `(batch, width)`, the recurrent layer, then one number."""
        return self._recurrent(features, width, 1, 1.0)

    def _recurrent(self, features: nn.Module, width: int, outputs: int, gain: float) -> RecurrentNetwork:
        from pearl.algorithms.recurrent_networks import RecurrentNetwork, recurrent_layer

        cell = recurrent_layer(self.cell, width, self.recurrent_size)
        if self.orthogonal:
            for parameter in cell.parameters():
                if parameter.dim() > 1:
                    nn.init.orthogonal_(parameter)
                else:
                    nn.init.zeros_(parameter)
        return RecurrentNetwork(features, cell, self._begun(nn.Linear(self.recurrent_size, outputs), gain))

    def _joined(
        self,
        policy: nn.Module,
        value: nn.Module,
        log_std: torch.Tensor | None,
        normalized: tuple[int, ...] | None,
        shared: bool,
    ) -> PolicyAndValue:
        from pearl.algorithms.recurrent_networks import RecurrentNetwork, RecurrentPolicyAndValue

        wanted = (2 if self.cell == "lstm" else 1) * self.recurrent_size
        for method, network in (("build_policy", policy), ("build_value", value)):
            found = getattr(network, "state_size", None)
            if not isinstance(network, RecurrentNetwork) or found != wanted:
                raise TrainerError(
                    f"{type(self).__name__}.{method}() must make a pearl.algorithms.recurrent_networks."
                    f"RecurrentNetwork whose state has {wanted} numbers, as cell={self.cell!r} and recurrent_size="
                    f"{self.recurrent_size} say; found {type(network).__name__} with {found}."
                )
        assert isinstance(policy, RecurrentNetwork)
        assert isinstance(value, RecurrentNetwork)
        if shared:
            value = RecurrentNetwork(policy.encoder, policy.cell, value.head)
        return RecurrentPolicyAndValue(policy, value, log_std, normalized)

    def checkpoint_identity(self) -> dict[str, str]:
        """The recurrent layer."""
        return {**super().checkpoint_identity(), "recurrent layer": f"{self.cell} of {self.recurrent_size}"}

    # --- acting -----------------------------------------------------------------------------------------------------

    def initial_state(self, count: int) -> torch.Tensor:
        """Zeros `(count, size)` float32: the policy's recurrent state at the beginning of an episode."""
        return self.networks.policy.initial_state(count)

    def get_action_from(self, obs: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The likeliest actions `(envs, *action)` in the policy's `state` `(envs, size)`, and the next states.

        `get_action` gives those at the beginning of an episode.
        """
        outputs, after = self._outputs(obs, state)
        return self.in_space(self.distribution.mode(outputs)), after

    def sample_action_from(
        self, obs: torch.Tensor, noise: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same, drawn from the distribution by `noise`, as that of `explore`."""
        outputs, after = self._outputs(obs, state)
        return self.in_space(self.distribution.draw(outputs, self.networks.log_std, noise)), after

    def _outputs(self, obs: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        networks = self.networks
        outputs, after = networks.policy.unroll(networks.normalize(obs).unsqueeze(1), state)
        return outputs.squeeze(1), after

    def initial_rollout_state(self, count: int) -> torch.Tensor:
        """Zeros `(count, size)` float32: the states of both networks, in which rollouts are collected."""
        return torch.zeros((count, self.networks.state_size), device=self.device)

    def explore_from(
        self, obs: torch.Tensor, noise: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """As `explore`, in the states `(envs, size)` of `initial_rollout_state`'s form; also the next states."""
        outputs, values, after = self.networks.unroll(obs.unsqueeze(1), state)
        outputs = outputs.squeeze(1)
        action = self.distribution.draw(outputs, self.networks.log_std, noise)
        log_prob = self.distribution.log_prob(outputs, self.networks.log_std, action)
        return action.reshape(len(obs), *(self.action_space.shape or ())), log_prob, values.squeeze(1), after

    def values_from(self, obs: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """Values `(envs,)` in the same states."""
        return self.networks.values_from(obs, state)

    # --- training ---------------------------------------------------------------------------------------------------

    def evaluate_actions(
        self, obs: torch.Tensor, action: torch.Tensor, action_masks: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Refused: what a recurrent policy says of an action depends on the steps before."""
        raise TrainerError(
            f"{type(self).__name__} evaluates actions in sequences. "
            "Call evaluate_sequences(obs, action, begins, state)."
        )

    def evaluate_sequences(
        self, obs: torch.Tensor, action: torch.Tensor, begins: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Log probabilities, entropies and values `(sequences * steps,)` of recorded actions, by the present networks.

        `obs` and `action` are `(sequences, steps, ...)`, `begins` `(sequences, steps)` bool is where an episode begins,
        and `state` `(sequences, size)` is that before the first step.
        """
        outputs, values = self.networks.unroll_episodes(obs, state, begins)
        outputs, log_std = outputs.flatten(0, 1), self.networks.log_std
        log_prob = self.distribution.log_prob(outputs, log_std, action.reshape(len(outputs), -1))
        return log_prob, self.distribution.entropy(outputs, log_std), values.flatten()

    def evaluate_rollout(self, rollout: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The same `(rows,)` of the Learner's columns of a whole rollout, without gradients."""
        state = rollout[STATE]
        rows = torch.from_numpy(rows_of_sequences(len(rollout[OBS]), *state.shape[:2])).to(state.device)
        obs, action, begins = (rollout[name][rows] for name in (OBS, ACTION, BEGINS))
        obs = obs.reshape(*rows.shape, *self.input_shape)
        with torch.no_grad():
            found = self.evaluate_sequences(obs, action, begins, state.flatten(0, 1))
        log_prob, entropy, values = (torch.empty_like(part).index_copy_(0, rows.flatten(), part) for part in found)
        return log_prob, entropy, values

    def loss(self, minibatch: Minibatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """PPO's loss of a minibatch of sequences; steps in place of which an environment was reset do not count."""
        state, begins = minibatch.state, minibatch.begins
        if state is None or begins is None:
            raise TrainerError(f"{type(self).__name__} trains on sequences: a Minibatch needs `begins` and `state`.")
        self.networks.train()  # cuDNN has no gradients of recurrent layers in evaluation mode, which acting sets
        shape = len(state), len(begins) // len(state)
        columns = minibatch.obs, minibatch.action, begins
        obs, action, starts = (column.reshape(*shape, *column.shape[1:]) for column in columns)
        found = self.evaluate_sequences(obs, action, starts, state)
        real = minibatch.real
        if real is None:
            return self.clipped_loss(minibatch, *found)
        log_prob, entropy, value = (part[real] for part in found)
        return self.clipped_loss(minibatch.rows(real), log_prob, entropy, value)

    def update_rule(self) -> UpdateRule:
        """None of the engines other than torch has recurrent layers; the rule says so."""
        networks = self.parts.networks
        policy = RuleNetwork("policy", networks.policy, self.input_shape)
        value = RuleNetwork("value", networks.value, self.input_shape)
        sizes = self.distribution.sizes
        head = PolicyHead(
            "categorical" if sizes else "normal", networks, policy, departure=_TORCH_ONLY, value=value, sizes=sizes
        )
        return UpdateRule((value,), head, _TORCH_ONLY, None, actor=policy)
