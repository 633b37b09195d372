"""The batch a Learner trains on."""

from __future__ import annotations

import functools
from collections import namedtuple
from typing import NamedTuple, cast

from pearl.lazy_torch import torch


class Batch(NamedTuple):
    """Transitions as tensors on the Learner's device.

    `obs` and `next_obs` `(batch, *obs)` float32 or uint8, `action` `(batch, *action)` int64 or float32,
    `reward` and `discount` `(batch,)` float32. Targets are `reward + discount * value(next_obs)`: `discount` is
    `gamma**m` after m steps and 0 where the episode terminated. Columns that an algorithm declares
    (`Trainer.transition`) follow as further attributes.
    """

    obs: torch.Tensor
    action: torch.Tensor
    reward: torch.Tensor
    next_obs: torch.Tensor
    discount: torch.Tensor

    @property
    def terminated(self) -> torch.Tensor:
        """`(batch,)` bool: the episode ended by the task, not by its time limit."""
        return self.discount == 0

    def rows(self, start: int, stop: int) -> Batch:
        """A view of the transitions `start` to `stop`."""
        return type(self)(*(column[start:stop] for column in self))


@functools.cache
def batch_type(names: tuple[str, ...]) -> type[Batch]:
    """The class of batches with the columns `names`: `Batch`, or a similar class for an algorithm with more columns."""
    if names == Batch._fields:
        return Batch
    members = {"__slots__": (), "__doc__": Batch.__doc__, "terminated": Batch.terminated, "rows": Batch.rows}
    return cast("type[Batch]", type("Batch", (namedtuple("Batch", names),), members))
