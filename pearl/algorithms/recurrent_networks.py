"""Networks with an LSTM or a GRU, whose state is one row of numbers for each sequence."""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import nn

from pearl.algorithms.policy_and_value import PolicyAndValue

Cell: TypeAlias = "nn.LSTM | nn.GRU"

CELLS: dict[str, type[nn.LSTM] | type[nn.GRU]] = {"lstm": nn.LSTM, "gru": nn.GRU}


def recurrent_layer(cell: str, width: int, size: int) -> Cell:
    """An LSTM ("lstm") or GRU ("gru") of `size` from features of `width`."""
    return CELLS[cell](width, size, batch_first=True)


class RecurrentNetwork(nn.Module):
    """`encoder`, a recurrent layer `cell`, and `head`, over sequences.

    `encoder` goes from `(n, *obs)` to `(n, width)`, `head` from `(n, size)` to `(n, outputs)`. The state
    `(batch, state_size)` is the GRU's hidden state, or the LSTM's hidden state followed by its cell state.
    """

    def __init__(self, encoder: nn.Module, cell: Cell, head: nn.Module) -> None:
        super().__init__()
        self.encoder, self.cell, self.head = encoder, cell, head
        self.size = cell.hidden_size
        self.state_size = (2 if isinstance(cell, nn.LSTM) else 1) * self.size

    def initial_state(self, count: int) -> torch.Tensor:
        """Zeros `(count, state_size)`."""
        return torch.zeros((count, self.state_size), device=next(self.parameters()).device)

    def unroll(self, obs: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs `(batch, steps, outputs)` for `obs` `(batch, steps, *obs)` from `state` on; the state afterwards."""
        remembered, after = self.remember(obs, state)
        return self.outputs(remembered), after

    def outputs(self, remembered: torch.Tensor) -> torch.Tensor:
        """The head's outputs `(batch, steps, outputs)` of what `remember` gave."""
        found: torch.Tensor = self.head(remembered.flatten(0, 1)).unflatten(0, remembered.shape[:2])
        return found

    def remember(self, obs: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The recurrent layer's outputs `(batch, steps, size)`, and the state afterwards, for the same arguments."""
        return self._run(self._features(obs), state)

    def remember_episodes(self, obs: torch.Tensor, state: torch.Tensor, begins: torch.Tensor) -> torch.Tensor:
        """The recurrent layer's outputs where steps with `begins` `(batch, steps)` bool have the initial state.

        The parts of sequences between these steps do not depend on each other: they are rows of one batch, as long as
        the longest of them.
        """
        features = self._features(obs)
        batch, steps, width = features.shape
        starts = begins.clone()
        starts[:, 0] = True
        first = starts.flatten().nonzero().squeeze(1)
        part = starts.flatten().cumsum(0) - 1
        step = torch.arange(batch * steps, device=obs.device) - first[part]
        parts = features.new_zeros(len(first), int(step.max()) + 1, width)
        parts = parts.index_put((part, step), features.flatten(0, 1))
        before = state[first // steps].masked_fill(begins.flatten()[first].unsqueeze(1), 0.0)
        remembered, _ = self._run(parts, before)
        return remembered[part, step].reshape(batch, steps, -1)

    def _features(self, obs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.encoder(obs.flatten(0, 1)).unflatten(0, obs.shape[:2])
        return found

    def _run(self, features: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = tuple(part.unsqueeze(0).contiguous() for part in torch.split(state, self.size, dim=1))
        if isinstance(self.cell, nn.LSTM):
            remembered, after = self.cell(features, hidden)
        else:
            remembered, last = self.cell(features, hidden[0])
            after = (last,)
        return remembered, torch.cat([part.squeeze(0) for part in after], dim=1)

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        """Outputs `(n, outputs)` for `obs` `(n, *obs)` at the beginning of an episode."""
        return self.unroll(obs.unsqueeze(1), self.initial_state(len(obs)))[0].squeeze(1)


class RecurrentPolicyAndValue(PolicyAndValue):
    """The same as `PolicyAndValue`, of two `RecurrentNetwork`s, which may have encoder and recurrent layer in common.

    The state in which rollouts are collected is the policy's, followed by the value network's where it has its own.
    """

    policy: RecurrentNetwork
    value: RecurrentNetwork

    @property
    def is_shared(self) -> bool:
        """Whether policy and value network have one recurrent layer."""
        return self.policy.cell is self.value.cell

    @property
    def state_size(self) -> int:
        """Numbers of the state in which rollouts are collected."""
        return self.policy.state_size + (0 if self.is_shared else self.value.state_size)

    def unroll(self, obs: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The distribution's outputs `(batch, steps, outputs)`, values `(batch, steps)`, and the state afterwards.

        `obs` `(batch, steps, *obs)` are raw observations.
        """
        inputs, (own, of_value) = self.normalize(obs), self._states(state)
        remembered, after = self.policy.remember(inputs, own)
        outputs = self.policy.outputs(remembered)
        if self.is_shared:
            return outputs, self.value.outputs(remembered).squeeze(2), after
        values, value_after = self.value.unroll(inputs, of_value)
        return outputs, values.squeeze(2), torch.cat([after, value_after], dim=1)

    def unroll_episodes(
        self, obs: torch.Tensor, state: torch.Tensor, begins: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same outputs and values where steps with `begins` `(batch, steps)` bool have the initial state."""
        inputs, (own, of_value) = self.normalize(obs), self._states(state)
        remembered = self.policy.remember_episodes(inputs, own, begins)
        for_value = remembered if self.is_shared else self.value.remember_episodes(inputs, of_value, begins)
        return self.policy.outputs(remembered), self.value.outputs(for_value).squeeze(2)

    def values_from(self, obs: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """Values `(batch,)` of raw observations `(batch, *obs)` in the same states."""
        values, _ = self.value.unroll(self.normalize(obs).unsqueeze(1), self._states(state)[1])
        return values.flatten()

    def _states(self, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The states of the policy and of the value network."""
        size = self.policy.state_size
        return state[:, :size], state if self.is_shared else state[:, size:]
