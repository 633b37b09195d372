"""Requests to the replay pipeline and its results: one format for all operations, as in PEARL Fig. 6."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


class Operation(enum.IntEnum):
    """The operation of a request and of its result."""

    SAMPLE = 0  # operand: a target below the total; result: the first leaf whose inclusive prefix sum exceeds it
    RETRIEVE = 1  # result: the leaf at the index
    UPDATE = 2  # operand: what to add to the leaf at the index, signed; result: the new leaf
    ASSIGN = 3  # operand: the new leaf; only where the tree `assigns`; its result is an UPDATE
    MISSED = 4  # only in results: the target was not below the total


@dataclass(frozen=True)
class Request:
    """One request, offered after `gap` cycles."""

    operation: Operation
    index: int = 0
    operand: int = 0
    gap: int = 0


@dataclass(frozen=True)
class Result:
    """One result, with the cycles of its request's acceptance and of its arrival."""

    operation: Operation
    index: int
    value: int
    accepted: int
    cycle: int


@dataclass(frozen=True)
class Run:
    """All results in order, and the final tree: `levels[l]` are the nodes of level l, `(nodes,)` uint64."""

    results: tuple[Result, ...]
    levels: tuple[NDArray[np.uint64], ...]

    @property
    def cycles(self) -> int:
        """Cycles from the first request's acceptance to the last result, both included."""
        return self.results[-1].cycle - self.results[0].accepted + 1

    @property
    def indices(self) -> NDArray[np.int64]:
        """The leaf index of each result `(n,)`."""
        return np.array([result.index for result in self.results], np.int64)
