"""The column "RM only": sampling, insertion and priority update on a full replay."""

from __future__ import annotations

import functools
import itertools

import numpy as np

from composer.absent import not_calibrated
from composer.matrix import MissingCell, ReplayCell
from composer.profiling.context import ProfilingContext
from composer.profiling.measuring import measure, on_own_thread
from pearl.backends import backend_of
from pearl.devices.description import Device
from pearl.replay.protocol import Sample


def replay_cell(context: ProfilingContext, device: Device) -> ReplayCell | MissingCell:
    """The cell with the fastest fanout and number of threads."""
    if (lacking := backend_of(device).replay_lacks(device, context.problem.replay)) is not None:
        return MissingCell(lacking)
    cells = []
    # The paper's W: the threads that Actors and Learner leave.
    most = max(1, (device.cores or 1) - context.problem.actors.count)
    if context.problem.learners.count > 1:  # whose own thread does the work of its bank
        most = 1
    counts = backend_of(device).replay_workers(device, context.problem.train.batch_size, most)
    for fanout, workers in itertools.product(context.fanouts(), counts):
        context.begin(f"{device.name}: Replay Manager, fanout {fanout}, {workers} thread(s)")
        with context.where_calibrated(device):
            found = context.known(
                context.key("replay", device, context.replay_parameters(fanout, workers)),
                ("sample", "insert", "update"),
                functools.partial(measure_replay, context, device, fanout, workers),
                device,
            )
            cells.append(ReplayCell(found["sample"], found["insert"], found["update"], fanout, workers))
    if not cells:
        raise not_calibrated(context.store, device, "the Replay Manager of this problem")
    return min(cells, key=lambda c: c.sample.value_us + c.update.value_us)


@on_own_thread
def measure_replay(context: ProfilingContext, device: Device, fanout: int, workers: int = 1) -> dict[str, list[float]]:
    """Samples, in microseconds, of "sample", "update" and "insert"."""
    full = context.full_replay(device, fanout, workers)
    replay, batch, budget_s = full.manager, context.problem.train.batch_size, context.budget_s / 3
    priorities = full.rng.random(batch, np.float32) + 0.01
    sample: Sample = replay.sample(batch, full.beta)

    def sampling() -> None:
        nonlocal sample
        sample = replay.sample(batch, full.beta)

    count = context.problem.insertions
    slots = itertools.cycle(np.arange(full.spec.capacity // count * count).reshape(-1, count))
    return {
        "sample": measure(sampling, budget_s, before=lambda: full.renew(batch)),
        "update": measure(lambda: replay.update(sample.indices, priorities, sample.generations), budget_s),
        "insert": measure(lambda: replay.insert(next(slots)), budget_s),
    }
