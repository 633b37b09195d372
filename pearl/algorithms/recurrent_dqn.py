"""DQN with a recurrent network, trained on sequences: R2D2, Kapturowski et al. 2019."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import gymnasium as gym
from gymnasium import spaces

from pearl.algorithms.arrays import ArrayParts, TorchRandom
from pearl.algorithms.batch import Batch
from pearl.algorithms.dqn import DQN
from pearl.algorithms.suggestions import Choice, Facts, choose_gamma, choose_learning_rate
from pearl.algorithms.trainer import is_number
from pearl.algorithms.update_rule import PolicyHead, RuleNetwork, UpdateRule, policy_departure
from pearl.errors import TrainerError
from pearl.exploration import EpsilonGreedy, Exploration
from pearl.lazy_torch import functional, nn, torch
from pearl.schedules import Schedule
from pearl.spec import TransitionSpec

if TYPE_CHECKING:
    from pearl.algorithms.recurrent_networks import RecurrentNetwork

_CELLS = ("lstm", "gru")
_TORCH_ONLY = "recurrent networks, which train and act in torch"


class RecurrentDQN(DQN):
    """DQN that remembers what it saw: hidden layers, an LSTM or GRU (`cell`) of `recurrent_size`, and action values.

    As in R2D2 (Kapturowski et al. 2019), a row of the replay is a sequence of `sequence_length` steps of one episode
    that begins with the last `sequence_overlap` steps of the previous one. `batch_size`, `replay_ratio`,
    `train_freq`, `learning_starts` and the size of the replay count sequences.

    Each sequence is stored with the recurrent state in which its Actor was (Sec. 3, "stored state"). Training unrolls
    both networks from that state. The first `burn_in` steps only refresh the state, without a gradient through them,
    as it comes from older weights. At the beginning of an episode the state is exactly zero, so those sequences train
    on all their steps. Targets are n-step returns within the sequence, with double Q-learning. A sequence's priority is
    `priority_eta` of its largest absolute TD error and the rest of the mean (Sec. 2.3). R2D2's rescaling of values is
    left out.
    """

    _knows_masks: ClassVar[bool] = False
    _unused: ClassVar[frozenset[str]] = frozenset(("hindsight_goals",))
    _algorithm: ClassVar[str] = "RecurrentDQN"
    _streams_are_hidden: ClassVar[bool] = False  # they follow the recurrent layer

    cell: str = "lstm"
    recurrent_size: int = 64
    sequence_length: int = 20
    sequence_overlap: int = 10
    burn_in: int = 10
    priority_eta: float = 0.9

    batch_size: int = 32
    replay_ratio: float = 32.0
    learning_starts: int = 100
    hidden_sizes: tuple[int, ...] = (64,)
    learning_rate_schedule: Schedule = "constant"
    tau: float = 0.01
    exploration: Exploration | None = EpsilonGreedy()

    q: RecurrentNetwork
    target_q: RecurrentNetwork

    @classmethod
    def transition_with(
        cls, transition: TransitionSpec, settings: Mapping[str, Any], action_space: gym.Space[Any]
    ) -> TransitionSpec:
        """Sequences of transitions, with the recurrent state before the first."""
        names = ("sequence_length", "sequence_overlap", "cell", "recurrent_size")
        length, overlap, cell, size = (settings.get(name, getattr(cls, name)) for name in names)
        if type(size) is not int or size < 1:
            raise TrainerError(f"{cls.__name__}.recurrent_size must be a whole number of at least 1; found {size!r}.")
        steps = super().transition_with(transition, {**settings, "action_masks": False}, action_space)
        return steps.sequences(length, overlap, (2 if cell == "lstm" else 1) * size)

    @classmethod
    def recommended(cls, facts: Facts) -> str:
        """Never the first choice: whether an environment hides something cannot be seen from its spaces."""
        return ""

    @classmethod
    def suggestions(cls, facts: Facts) -> tuple[Choice, ...]:
        """Rates and exploration; the numbers that count sequences stay as they are."""
        steps = facts.timesteps
        return (
            choose_learning_rate(facts, cls.hidden_sizes),
            choose_gamma(facts),
            Choice("exploration", EpsilonGreedy(1.0, 0.05, steps // 5), f"a fifth of {steps:,} steps, then 5 %"),
        )

    def check_spaces(self) -> None:
        """Discrete actions and array observations; also the lengths of sequences."""
        super().check_spaces()
        self._require(self.cell in _CELLS, "cell", " or ".join(f'"{cell}"' for cell in _CELLS))
        for name, least in (("recurrent_size", 1), ("sequence_length", 1), ("sequence_overlap", 0), ("burn_in", 0)):
            value = getattr(self, name)
            self._require(type(value) is int and value >= least, name, f"a whole number of at least {least}")
        length, overlap = self.sequence_length, self.sequence_overlap
        self._require(overlap < length, "sequence_overlap", f"smaller than sequence_length, {length}")
        self._require(
            self.burn_in <= overlap,
            "burn_in",
            f"at most sequence_overlap, {overlap}, as steps of the burn-in are trained in the sequence before",
        )
        eta = self.priority_eta
        self._require(is_number(eta) and 0 <= eta <= 1, "priority_eta", "a number in [0, 1]")

    def array_parts(self, random: TorchRandom) -> ArrayParts | None:
        """None: only in torch."""
        return None

    def build_q_network(self) -> RecurrentNetwork:
        """The action-value network: DQN's hidden layers or CNN, the recurrent layer, and a linear or dueling head."""
        from pearl.algorithms.networks import DuelingHead, q_network
        from pearl.algorithms.recurrent_networks import RecurrentNetwork, recurrent_layer

        assert isinstance(self.action_space, spaces.Discrete)
        actions, size = int(self.action_space.n), self.recurrent_size
        *trunk, head = q_network(
            self.input_shape,
            actions,
            self.hidden_sizes,
            dueling=False,
            of_bytes=self._of_bytes,
            cnn=self.cnn,
            layer_norm=self.layer_norm,
        )
        assert isinstance(head, nn.Linear)
        values = DuelingHead(size, actions, size) if self.dueling else nn.Linear(size, actions)
        return RecurrentNetwork(nn.Sequential(*trunk), recurrent_layer(self.cell, head.in_features, size), values)

    def check_networks(self) -> None:
        """Check that there is one output for each action, and a state of the declared size."""
        found = getattr(self.q, "state_size", None)
        wanted = (2 if self.cell == "lstm" else 1) * self.recurrent_size
        if found != wanted:
            raise TrainerError(
                f"{type(self).__name__}.build_q_network() must make a pearl.algorithms.recurrent_networks."
                f"RecurrentNetwork whose state has {wanted} numbers, as cell={self.cell!r} and recurrent_size="
                f"{self.recurrent_size} say; found {type(self.q).__name__} with {found}."
            )
        super().check_networks()

    def checkpoint_identity(self) -> dict[str, str]:
        """The recurrent layer, and the sequences that a replay holds."""
        return {
            **super().checkpoint_identity(),
            "recurrent layer": f"{self.cell} of {self.recurrent_size}",
            "sequences": f"{self.sequence_length} steps, {self.sequence_overlap} of the previous",
        }

    def initial_state(self, count: int) -> torch.Tensor:
        """Zeros `(count, size)` float32: the recurrent state at the beginning of an episode."""
        return self.q.initial_state(count)

    def get_action(self, obs: torch.Tensor, action_masks: torch.Tensor | None = None) -> torch.Tensor:
        """The greedy actions `(envs,)` int64 at the beginning of an episode; `get_action_from` takes any state."""
        return self.get_action_from(obs, self.initial_state(len(obs)))[0]

    def get_action_from(self, obs: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The actions `(envs,)` int64 with the largest values in `state` `(envs, size)`, and the next states."""
        values, after = self.q.unroll(obs.unsqueeze(1), state)
        return values.squeeze(1).argmax(dim=1), after

    def _compute(self, batch: Batch, weights: torch.Tensor, batch_size: int) -> torch.Tensor:
        self.q.train()  # cuDNN has no gradients of recurrent layers in evaluation mode, which acting sets
        steps, begins = batch.steps, batch.position == 0  # type: ignore[attr-defined]
        length = steps.shape[1]
        values = self._values(batch.obs, batch.state, begins)  # type: ignore[attr-defined]
        place = torch.arange(length, device=steps.device)
        with torch.no_grad():
            next_values, _ = self.target_q.unroll(batch.obs, batch.state)  # type: ignore[attr-defined]
            best = (values if self.double else next_values).argmax(dim=2, keepdim=True)
            bootstrap = next_values.gather(2, best).squeeze(2).gather(1, place + steps)
            target = torch.addcmul(batch.reward, batch.discount, bootstrap)
            trained = (steps > 0) & (begins.unsqueeze(1) | (place >= self.burn_in))
        value = values[:, :length].gather(2, batch.action.unsqueeze(2)).squeeze(2)
        losses = functional.smooth_l1_loss(value, target, reduction="none") * trained
        # By the full length, so that a step counts the same in short and long sequences.
        torch.autograd.backward(torch.dot(losses.sum(dim=1), weights) / (batch_size * length))
        error = (value.detach() - target).abs_() * trained
        mean = error.sum(dim=1) / trained.sum(dim=1).clamp(min=1)
        priorities: torch.Tensor = self.priority_eta * error.amax(dim=1) + (1 - self.priority_eta) * mean
        return priorities

    def _values(self, obs: torch.Tensor, state: torch.Tensor, begins: torch.Tensor) -> torch.Tensor:
        """Action values `(batch, length + 1, actions)`; no gradient passes from later steps into the burn-in.

        But where an episode `begins` `(batch,)` bool, the first steps are trained as all others.
        """
        if not self.burn_in:
            return self.q.unroll(obs, state)[0]
        early, refreshed = self.q.unroll(obs[:, : self.burn_in], state)
        refreshed = torch.where(begins.unsqueeze(1), refreshed, refreshed.detach())
        late, _ = self.q.unroll(obs[:, self.burn_in :], refreshed)
        return torch.cat([early, late], dim=1)

    def update_rule(self) -> UpdateRule:
        """None of the engines other than torch has recurrent layers; the rule says so."""
        parts = self.parts
        network = RuleNetwork("q", parts.q, self.input_shape, parts.target_q)
        members = ("get_action", "get_action_from", "initial_state", "policy")
        departure = policy_departure(self, RecurrentDQN, members) or _TORCH_ONLY
        policy = PolicyHead("argmax", parts.q, network, departure=departure)
        return UpdateRule((network,), policy, _TORCH_ONLY, "largest_value", double=bool(self.double))
