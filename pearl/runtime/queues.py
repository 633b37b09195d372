"""What a run's queues hold (paper, Fig. 4): the DCQ's messages and the fields of a LAQ's batch.

The queues themselves, and the WSQ, are `pearl.ipc.queues`; the RRQ is `pearl.replay.requests`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from pearl.ipc.queues import Bell, ColumnQueue
from pearl.spec import FieldSpec, TransitionSpec


class DataCollectionQueue(ColumnQueue):
    """DCQ: one actor's transitions to the host, up to `rows` a message, with the episodes that ended on the way.

    Next to the transitions: their first priorities `(rows,)`, where the algorithm has actors give these;
    `episode_return` and `episode_length` `(rows,)`; `counts`, which are how many episodes ended, the environment
    steps that the message stands for, the actor's index, and the version of the policy that acted; and `span`, when the
    actor began and ended the message, in seconds of `time.perf_counter()`, which all processes share. `further` are
    fields of other messages.
    """

    def __init__(
        self,
        transition: TransitionSpec,
        rows: int,
        slots: int,
        bell: Bell | None = None,
        further: Sequence[FieldSpec] = (),
    ) -> None:
        columns = [FieldSpec(f.name, (rows, *f.shape), f.dtype) for f in transition.fields]
        if transition.priority is not None:
            columns.append(FieldSpec("priority", (rows,), "float32"))
        super().__init__(
            [
                *columns,
                FieldSpec("episode_return", (rows,), "float64"),
                FieldSpec("episode_length", (rows,), "int64"),
                FieldSpec("counts", (4,), "int64"),
                FieldSpec("span", (2,), "float64"),
                *transition.statistics,
                *further,
            ],
            slots,
            bell,
        )
        self.rows = rows

    @property
    def by_row(self) -> frozenset[str]:
        """The arrays that hold a row after the other: those before `counts`."""
        return frozenset(field.name for field in itertools.takewhile(lambda f: f.name != "counts", self.fields))

    def __getstate__(self) -> tuple[Any, ...]:
        return (*super().__getstate__(), self.rows)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        super().__setstate__(state[:-1])
        self.rows = state[-1]


def batch_fields(batch_size: int, transition: TransitionSpec | None) -> list[FieldSpec]:
    """Fields of a Learner assignment: the batch's id, the sample and, unless they stay there, its transitions."""
    sampled = [
        FieldSpec("batch", (1,), "int64"),
        FieldSpec("indices", (batch_size,), "int64"),
        FieldSpec("weights", (batch_size,), "float32"),
        FieldSpec("generations", (batch_size,), "uint32"),
    ]
    columns = transition.fields if transition is not None else ()
    return sampled + [FieldSpec(f.name, (batch_size, *f.shape), f.dtype) for f in columns]
