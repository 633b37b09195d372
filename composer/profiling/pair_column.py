"""The column "RM & Learner": whole iterations of setting 2, in the same loop as in a run."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from composer.matrix import LearnerCell, MissingCell, PairCell, ReplayCell
from composer.profiling.context import ProfilingContext
from composer.profiling.full_replay import FullReplay
from composer.profiling.measuring import WARM_UP, measure, on_own_thread
from pearl.backends import backend_of, learners
from pearl.devices.description import Device
from pearl.ipc.queues import Bell, WeightSyncQueue
from pearl.runtime.workers import GrantQueue, ProgressQueue, TrainingLoop

# One sample of the native training loop is the mean over as many iterations as fit this time. It is long enough to hide
# Python's work between samples, and so far below a scheduler's time slice that few samples are interrupted.
_GRANT_US = 500.0
_WORTH_A_CORE = 1.05  # the least speedup for which prefetching may take a core
_TIMED_ITERATIONS = 100  # of a device's loop that waits after each part, to time the parts


def pair_cell(
    context: ProfilingContext, device: Device, replay: ReplayCell | MissingCell, learner: LearnerCell
) -> PairCell | MissingCell:
    """The cell of both primitives with the parameters of their own columns; prefetching if that is worth a core."""
    if isinstance(replay, MissingCell):
        return replay
    plain = _measured(context, device, replay, learner, prefetch=False)
    if not _may_prefetch(context, device, learner):
        return plain
    with context.where_calibrated(device):
        ahead = _measured(context, device, replay, learner, prefetch=True)
        return ahead if ahead.iteration_us * _WORTH_A_CORE <= plain.iteration_us else plain
    return plain


def pair_parameters(context: ProfilingContext, replay: ReplayCell, threads: int) -> dict[str, Any]:
    """Everything of the pair that a measurement depends on, for its key."""
    return {
        **context.replay_parameters(replay.fanout, replay.workers),
        "threads": threads,
        "weight_sync_interval": context.problem.train.weight_sync_interval,
    }


def _measured(
    context: ProfilingContext, device: Device, replay: ReplayCell, learner: LearnerCell, *, prefetch: bool
) -> PairCell:
    name, threads = learner.implementation, learner.threads
    ahead = ", prefetching" if prefetch else ""
    context.begin(f"{device.name}: Replay Manager and {name} Learner together{ahead}")
    found = context.known(
        context.key("pair", device, {**pair_parameters(context, replay, threads), "prefetch": prefetch}, name),
        ("sample", "gather", "insert", "update", "step"),
        functools.partial(measure_pair, context, device, name, replay, threads, prefetch=prefetch),
        device,
    )
    return PairCell(
        dataclasses.replace(replay, sample=found["sample"], insert=found["insert"], update=found["update"]),
        LearnerCell(found["step"], threads, implementation=name, prefetch=prefetch),
        found["gather"],
    )


def _may_prefetch(context: ProfilingContext, device: Device, learner: LearnerCell) -> bool:
    """Whether a core is free to draw the next batch, and the Actors wait for the Learner."""
    arguments = learners()[learner.implementation].arguments
    if backend_of(device).host_cores != "threads" or "prefetch" not in arguments:
        return False
    if context.problem.learners.count > 1:
        return False
    sharing = context.sharing_on(device)
    if context.problem.replay.shares or not sharing.has_idle_core(learner.threads):
        return False
    if sharing.keeps_up(learner.step.value_us, learner.threads):
        return False
    if device.absent:
        return True  # if it was worth measuring there
    # A loop in Python draws nothing ahead, so a difference would be noise.
    made: Any = context.make_learner(learner.implementation, device, learner.threads)
    return bool(made.loops_natively)


@on_own_thread
def measure_pair(
    context: ProfilingContext,
    device: Device,
    implementation: str,
    replay: ReplayCell,
    threads: int,
    *,
    prefetch: bool = False,
) -> dict[str, list[float]]:
    """Samples, in microseconds, of the parts of an iteration: "sample", "gather", "step", "update", "insert"."""
    problem, backend = context.problem, backend_of(device)
    full = context.full_replay(device, replay.fanout, replay.workers)
    learner = context.make_learner(implementation, device, threads, prefetch=prefetch)
    storage, _ = context.storage_on(device)
    arriving, count = context.arriving(full.rng), context.problem.insertions
    bell = Bell()
    laq, ldq, wsq = GrantQueue(1), ProgressQueue(1, bell), WeightSyncQueue(learner.weight_count)
    loop = TrainingLoop(
        laq,
        ldq,
        wsq,
        bell,
        replay=full.manager,
        storage=storage,
        learner=learner,
        batch_size=problem.train.batch_size,
        transition=problem.transition,
        weight_sync_interval=problem.train.weight_sync_interval,
    )
    learner.prepare()

    def insert() -> float:
        """Store what arrives in an iteration; the microseconds of the Replay Manager's part."""
        with loop.insertion_window():
            slots = storage.insert(next(arriving), count)
            start = time.perf_counter_ns()
            full.manager.insert(slots)
            return (time.perf_counter_ns() - start) / 1e3

    return measure_loop(context, loop.kernel, laq, ldq, insert, full, apart=backend.times_parts_apart)


def measure_loop(
    context: ProfilingContext,
    loop: Any,
    laq: GrantQueue,
    ldq: ProgressQueue,
    insertion: Callable[[], float],
    full: FullReplay,
    *,
    apart: bool,
) -> dict[str, list[float]]:
    """Grant iterations in groups and insert between the groups; a sample is the mean of a group.

    `insertion` returns the microseconds of the Replay Manager's part of it.

    `apart`: the device runs all parts without the host, so their shares are measured once, by waiting after each part.
    """
    train = context.problem.train
    parts: dict[str, list[float]] = {"sample": [], "gather": [], "step": [], "update": [], "insert": []}

    def grant(iterations: int) -> dict[str, float]:
        """Microseconds of each part of an iteration."""
        full.renew(iterations * train.batch_size)
        before = loop.seconds()
        laq.grant(iterations, full.beta)
        loop.run_once(0.0)
        ldq.peek()
        ldq.release()
        return {name: (end - before[name]) * 1e6 / iterations for name, end in loop.seconds().items()}

    usual = float(np.median([sum(grant(1).values()) for _ in range(WARM_UP)]))
    iterations = full.batches(train.batch_size, max(1, round(_GRANT_US / usual)))
    published: list[float] = []
    shares: dict[str, float] = {}
    if apart:
        loop.time_parts(True)
        alone = grant(max(iterations, _TIMED_ITERATIONS))
        loop.time_parts(False)
        iterations = max(iterations, train.weight_sync_interval)
        shares = {name: part / sum(alone.values()) for name, part in alone.items()}

    def iterate() -> None:
        spent = grant(iterations)
        if shares:
            whole = sum(spent.values())
            spent = {name: whole * share for name, share in shares.items()}
        parts["insert"].append(insertion())
        parts["sample"].append(spent["sample"])
        parts["gather"].append(spent["gather"])
        parts["step"].append(spent["train"])
        parts["update"].append(spent["update"])
        published.append(spent["publish"])

    measure(iterate, context.budget_s)
    # Weights are published after some steps only; their cost is spread over all steps.
    share = sum(published) / len(published)
    parts["step"] = [step + share for step in parts["step"]]
    return {name: samples[WARM_UP:] for name, samples in parts.items()}
