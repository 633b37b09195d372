"""A training step on the parts of a batch, each on a stream of its own."""

from __future__ import annotations

from collections.abc import Sequence

from pearl.algorithms.batch import Batch
from pearl.algorithms.trainer import joined_priorities
from pearl.backends.cuda.graphs import CudaGraphs
from pearl.backends.cuda.trainer_parts import TrainerParts
from pearl.lazy_torch import torch

Gradients = list["torch.Tensor | None"]


def step_in_parts(
    parts: TrainerParts, graphs: CudaGraphs, batches: Sequence[tuple[Batch, torch.Tensor]], rows: int
) -> torch.Tensor:
    """The priorities `(rows,)` of one step on batches with their weights.

    No stream waits for another from the beginning of a phase until all parts have their gradients: each part has
    gradients of its own, which are added on the main stream. Memory that a part's stream gives back is used again by
    that stream only, after it has waited for the main one.
    """
    trainer = parts.trainer
    priorities: list[torch.Tensor] = []
    for phase in trainer.phases:
        computed: list[torch.Tensor | None] = []
        gradients: list[Gradients] = []
        shared = [leaf.grad for leaf in parts.learned]
        try:
            for number, (batch, weights) in enumerate(batches):
                with graphs.part(number):
                    _give_own_gradients(parts, shared)
                    computed.append(phase.compute(batch, weights, rows))
                    gradients.append([leaf.grad for leaf in parts.learned])
        finally:
            for leaf, gradient in zip(parts.learned, shared, strict=True):
                leaf.grad = gradient
        graphs.join(len(batches))
        for found in gradients:
            _add_gradients(parts.learned, found)
        phase.apply()
        priorities = [c for c in computed if c is not None] or priorities
    trainer.end_of_step()
    return joined_priorities(trainer, priorities)


def _give_own_gradients(parts: TrainerParts, shared: Gradients) -> None:
    # Without a gradient, autograd hands over what it computed. Single tensors get zeros: an algorithm may add their
    # gradients itself, as SAC does for its temperature.
    single = {id(tensor) for tensor in parts.single}
    for leaf, gradient in zip(parts.learned, shared, strict=True):
        leaf.grad = torch.zeros_like(gradient) if gradient is not None and id(leaf) in single else None


def _add_gradients(leaves: Sequence[torch.Tensor], found: Gradients) -> None:
    sums: list[torch.Tensor] = []
    summands: list[torch.Tensor] = []
    for leaf, gradient in zip(leaves, found, strict=True):
        if gradient is None:
            continue
        if leaf.grad is None:
            leaf.grad = gradient
        else:
            sums.append(leaf.grad)
            summands.append(gradient)
    if sums:
        with torch.no_grad():
            torch._foreach_add_(sums, summands)
