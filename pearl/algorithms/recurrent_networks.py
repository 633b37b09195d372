"""Networks with an LSTM or a GRU, whose state is one row of numbers for each sequence."""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import nn

Cell: TypeAlias = "nn.LSTM | nn.GRU"

CELLS: dict[str, type[nn.LSTM] | type[nn.GRU]] = {"lstm": nn.LSTM, "gru": nn.GRU}


class RecurrentNetwork(nn.Module):
    """`encoder`, a recurrent layer, and `head`, over sequences.

    `encoder` goes from `(n, *obs)` to `(n, width)`, `head` from `(n, size)` to `(n, outputs)`. The state
    `(batch, state_size)` is the GRU's hidden state, or the LSTM's hidden state followed by its cell state.
    """

    def __init__(self, encoder: nn.Module, width: int, cell: str, size: int, head: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder
        self.cell: Cell = CELLS[cell](width, size, batch_first=True)
        self.head = head
        self.size = size
        self.state_size = (2 if cell == "lstm" else 1) * size

    def initial_state(self, count: int) -> torch.Tensor:
        """Zeros `(count, state_size)`."""
        return torch.zeros((count, self.state_size), device=next(self.parameters()).device)

    def unroll(self, obs: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs `(batch, steps, outputs)` for `obs` `(batch, steps, *obs)` from `state` on; the state afterwards."""
        features = self.encoder(obs.flatten(0, 1)).unflatten(0, obs.shape[:2])
        hidden = tuple(part.unsqueeze(0).contiguous() for part in torch.split(state, self.size, dim=1))
        if isinstance(self.cell, nn.LSTM):
            remembered, after = self.cell(features, hidden)
        else:
            remembered, last = self.cell(features, hidden[0])
            after = (last,)
        outputs: torch.Tensor = self.head(remembered.flatten(0, 1)).unflatten(0, obs.shape[:2])
        return outputs, torch.cat([part.squeeze(0) for part in after], dim=1)

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        """Outputs `(n, outputs)` for `obs` `(n, *obs)` at the beginning of an episode."""
        return self.unroll(obs.unsqueeze(1), self.initial_state(len(obs)))[0].squeeze(1)
