"""The peer of PEARL's CUDA kernels: replay and training in torch operations alone, on the same GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.workload import Case, transitions
from pearl.algorithms.batch import Batch
from pearl.backends.cuda.capturable_optimizers import CapturableOptimizers
from pearl.backends.cuda.trainer_parts import TrainerParts
from pearl.garbage import no_collection

ALPHA, BETA, EPSILON = 0.6, 0.4, 1e-6
_WARM_UP = 3


@dataclass
class TorchReplay:
    """Priorities `(slots,)`, raised to alpha, and columns `(slots, ...)`; drawn by a cumulative sum and a search."""

    priorities: torch.Tensor
    columns: Mapping[str, torch.Tensor]

    @classmethod
    def filled(cls, slots: int, device: str, columns: Mapping[str, torch.Tensor] | None = None) -> TorchReplay:
        """With random priorities."""
        generator = torch.Generator(device).manual_seed(0)
        return cls(torch.rand(slots, device=device, generator=generator) + 0.01, columns or {})

    def draw(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Slots and importance weights `(count,)`, one of each of `count` equal shares of the sum."""
        sums = self.priorities.cumsum(0)
        shares = torch.arange(count, device=sums.device) + torch.rand(count, device=sums.device)
        found = torch.searchsorted(sums, shares * (sums[-1] / count)).clamp_(max=len(sums) - 1)
        weights = self.priorities[found] ** -BETA
        return found, weights / weights.max()

    def update(self, found: torch.Tensor, priorities: torch.Tensor) -> None:
        """New priorities of slots."""
        self.priorities.index_copy_(0, found, (priorities + EPSILON) ** ALPHA)


class TorchIterations:
    """Draw, gather, train and update: the trainer's own step in torch, on replay in the GPU's memory.

    `together` iterations belong together, as a policy that moves in every second step.
    """

    def __init__(self, case: Case, slots: int, device: str, *, compiled: bool = False) -> None:
        import numpy as np

        from pearl.spec import TransitionSpec

        self.trainer: Any = case.trainer(device=device) if device != "cpu" else case.trainer()
        self.together = int(getattr(self.trainer, "policy_delay", 1))
        spec = TransitionSpec.from_spaces(self.trainer.observation_space, self.trainer.action_space)
        rows = transitions(spec, slots, np.random.default_rng(0))
        columns = {name: torch.from_numpy(column).to(device) for name, column in rows.items()}
        self._replay, self._batch, self._device = TorchReplay.filled(slots, device, columns), case.batch, device
        parts = TrainerParts(self.trainer)
        self._optimizers = CapturableOptimizers(parts.optimizers, torch.device(device))
        self._update = torch.compile(self.trainer.update_policy) if compiled else self.trainer.update_policy

    def launched(self) -> Callable[[], object]:
        """A call that runs `together` iterations: one CUDA graph of all operations."""
        inputs = [torch.as_tensor(noise).to(self._device) for noise in self.trainer.host_inputs(self._batch)]
        while inputs and len(inputs) < 2:  # a step that moves the policy draws twice
            inputs.append(inputs[0].clone())
        self.trainer.give_inputs(tuple(inputs))  # the same noise each time, which takes no time
        with contextlib.nullcontext() if self._device == "cpu" else self._optimizers.switched():
            return self._run if self._device == "cpu" else graph_of(self._run)

    def _run(self) -> None:
        for _ in range(self.together):
            found, weights = self._replay.draw(self._batch)
            batch = Batch(*(self._replay.columns[name][found] for name in Batch._fields))
            self._replay.update(found, self._update(batch, weights).detach())


def graph_of(work: Callable[[], object]) -> Callable[[], object]:
    """A call that replays what `work` does on the GPU, after it has run a few times; it waits for nothing."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(_WARM_UP):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with no_collection(), torch.cuda.graph(graph):
        work()
    return graph.replay
