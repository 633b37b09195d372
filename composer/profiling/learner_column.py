"""The column "Learner only": training steps on a batch that is in the device's memory."""

from __future__ import annotations

import functools
import math

import numpy as np

from composer.absent import not_calibrated
from composer.matrix import LearnerCell
from composer.profiling.context import ProfilingContext
from composer.profiling.measuring import measure, on_own_thread
from pearl.algorithms.trainer import splits_batches
from pearl.backends import backend_of, learners
from pearl.devices.description import Device


def learner_cell(
    context: ProfilingContext, device: Device, implementation: str, fastest_us: float = math.inf
) -> LearnerCell:
    """The cell with the best of the parameters that the backend proposes.

    `fastest_us` is the least time of a step so far, of any implementation: next to it, slow ones need few samples.
    """
    backend = backend_of(device)
    sharing = context.sharing_on(device) if backend.host_cores == "threads" else None
    candidates = backend.learner_parameters(
        device,
        most_threads=1 if sharing is None else sharing.most_threads,
        most_sub_batches=context.problem.train.batch_size if splits_batches(context.problem.trainer_class) else 1,
    )
    if "sub_batches" not in learners()[implementation].arguments:
        candidates = [candidate for candidate in candidates if candidate.sub_batches == 1]
    cells: list[LearnerCell] = []
    for candidate in candidates:
        threads, parts = candidate.threads, candidate.sub_batches
        if cells and threads > cells[0].threads and parts == cells[0].sub_batches:
            least_us = cells[0].step.least_us * cells[0].threads / threads
            if context.too_slow(implementation, device, least_us, fastest_us, threads=threads):
                continue
        # A batch comes from the device's own storage or from the host's memory: a step's time differs.
        parameters = {"threads": threads, "sub_batches": parts, "own_storage": context.own_storage(device)}
        context.begin(f"{device.name}: {implementation} Learner, {threads} thread(s), {parts} sub-batch(es)")
        with context.where_calibrated(device):
            found = context.known(
                context.key("learner", device, parameters, implementation),
                ("step",),
                functools.partial(
                    measure_learner,
                    context,
                    device,
                    implementation,
                    threads,
                    parts,
                    worth_us=context.worth_us(fastest_us),
                ),
                device,
            )
            cells.append(LearnerCell(found["step"], threads, parts, implementation))
            fastest_us = min(fastest_us, found["step"].least_us)
        if sharing is not None and cells and sharing.keeps_up(cells[-1].step.value_us, cells[-1].threads):
            break  # the paper's rule: the fewest threads that keep up with the Actors
    if not cells:
        raise not_calibrated(context.store, device, f"the {implementation} Learner of this problem")
    if sharing is not None:
        return min(cells, key=lambda c: sharing.rank(c.step.value_us, c.threads))
    return min(cells, key=lambda c: c.step.value_us)


@on_own_thread
def measure_learner(
    context: ProfilingContext,
    device: Device,
    implementation: str,
    threads: int,
    parts: int,
    *,
    worth_us: float = math.inf,
) -> dict[str, list[float]]:
    """Samples of "step", in microseconds."""
    learner = context.make_learner(implementation, device, threads, parts)
    learner.prepare()
    batch = context.problem.train.batch_size
    columns = context.batch_on(device)
    weights = np.ones(batch, np.float32)
    return {"step": measure(lambda: learner.step(columns, weights), context.budget_s, worth_us=worth_us)}
