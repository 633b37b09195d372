"""What the columns do not show: the host's messages, and devices on one piece of silicon that slow each other down."""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Iterator

import numpy as np

from composer.matrix import AssignmentMatrix, Candidacy, LearnerCell, PairCell, ReplayCell
from composer.platform import usable
from composer.profiling.context import ProfilingContext
from composer.profiling.keys import kernel_hash
from composer.profiling.measuring import on_own_thread
from composer.profiling.messages import ITERATIONS, busy_processes, measure_messages, measure_pipeline
from composer.profiling.pair_column import measure_pair, pair_parameters
from pearl.backends import backend_of
from pearl.devices.description import Device
from pearl.errors import CapacityError, DeviceError

logger = logging.getLogger("pearl.composer")


def messages_us(context: ProfilingContext) -> float:
    """Microseconds of the host's messages per iteration of setting 1; 0 where only the host is usable."""
    host, train = context.platform.host, context.problem.train
    if not any(backend_of(device).needs_messages for device in usable(context.platform)[0] if device != host):
        return 0.0
    if (stated := backend_of(host).messages_us(host)) is not None:
        return stated
    context.report("messages through the host")
    delay, mode = train.priority_update_delay, context.problem.replay.mode
    key = context.key("messages", host, {"priority_update_delay": delay, "mode": mode})
    work = functools.partial(measure_messages, train.batch_size, delay, mode)
    return context.known(key, ("iteration",), lambda: {"iteration": work()})["iteration"].value_us


def whole_iterations(context: ProfilingContext, matrix: AssignmentMatrix) -> dict[Candidacy, float]:
    """Microseconds of whole iterations on devices that are the host's silicon, measured next to busy processes.

    There the devices, the host's messages and the Actors slow each other down, which the sum of their separate times
    does not show. The keys are the devices of Replay Manager and Learner and the latter's implementation.
    """
    found: dict[Candidacy, float] = {}
    known: dict[str, float] = {}
    for of, work in _candidates(context, matrix, known):
        try:
            found[of] = work()
        except (CapacityError, DeviceError) as error:
            logger.warning("%s and %s were not measured together: %s", of[0], of[1], error)
    return found


def _candidates(
    context: ProfilingContext, matrix: AssignmentMatrix, known: dict[str, float]
) -> Iterator[tuple[Candidacy, Callable[[], float]]]:
    """The candidates to measure, each with its measurement; `known` keeps results by the digest of their key.

    Setting 2 counts on devices whose own runtime takes all of the host's cores, even while the Actors need them.
    """
    platform = context.platform
    on_host = [
        (row, device)
        for row in matrix.rows
        if platform.shared_silicon(row.device, platform.host.name)
        and backend_of(device := platform.device(row.device)).estimator(device) is None
    ]
    for (i, on_i), (j, on_j) in itertools.product(on_host, repeat=2):
        for option in j.learners:
            if i is j:
                if backend_of(on_j).host_cores == "all" and isinstance(pair := option.pair, PairCell):
                    of = (i.device, j.device, pair.learner.implementation)
                    yield of, functools.partial(_pair_us, context, on_j, pair)
            elif isinstance(i.replay, ReplayCell) and isinstance(learner := option.learner, LearnerCell):
                of = (i.device, j.device, learner.implementation)
                yield of, functools.partial(_pipeline_us, context, known, on_i, i.replay, on_j, learner)


def _pair_us(context: ProfilingContext, device: Device, pair: PairCell) -> float:
    """Microseconds of an iteration of setting 2 while Actors run."""
    name, fanout, threads = pair.learner.implementation, pair.replay.fanout, pair.learner.threads
    context.report(f"{device.name}: Replay Manager and {name} Learner together, while Actors run")

    def work() -> dict[str, list[float]]:
        with busy_processes(context.busy):
            parts = measure_pair(context, device, name, fanout, threads)
        # The mean, not the median: waits for a core are rare but long.
        return {"iteration": [sum(float(np.mean(parts[part])) for part in ("sample", "gather", "step", "update"))]}

    parameters = {**pair_parameters(context, fanout, threads), "busy": context.busy}
    return context.known(context.key("pair", device, parameters, name), ("iteration",), work)["iteration"].value_us


def _pipeline_us(
    context: ProfilingContext,
    known: dict[str, float],
    on_i: Device,
    replay: ReplayCell,
    on_j: Device,
    learner: LearnerCell,
) -> float:
    """Microseconds of an iteration of setting 1 while Actors run."""
    train = context.problem.train
    parameters = {
        **pair_parameters(context, replay.fanout, learner.threads),
        "replay_device": context.fingerprint(on_i),
        "replay_kernels": kernel_hash(module=backend_of(on_i).kernels),
        "priority_update_delay": train.priority_update_delay,
        "busy": context.busy,
    }

    @on_own_thread
    def work() -> dict[str, list[float]]:
        full = context.full_replay(on_i, replay.fanout)
        samples = measure_pipeline(
            full.manager,
            context.full_storage,
            context.make_learner(learner.implementation, on_j, learner.threads, learner.sub_batches),
            context.problem.transition,
            train.batch_size,
            train.priority_update_delay,
            context.busy,
            beta=full.beta,
            weight_sync_interval=train.weight_sync_interval,
            iterations=full.batches(train.batch_size, ITERATIONS),
            renew=full.renew,
        )
        return {"iteration": samples}

    key = context.key("pipeline", on_j, parameters, learner.implementation)
    if key.digest not in known:  # the key is the same for rows that differ in name only
        context.report(
            f"{on_i.name}, {on_j.name}: Replay Manager and {learner.implementation} Learner, while Actors run"
        )
        known[key.digest] = context.known(key, ("iteration",), work)["iteration"].value_us
    return known[key.digest]
