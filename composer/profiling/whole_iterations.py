"""What the columns do not show: the host's messages, and devices on one piece of silicon that slow each other down."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

import numpy as np

from composer.contention import WholeIteration
from composer.matrix import AssignmentMatrix, Candidacy, LearnerCell, LearnerOption, PairCell, ReplayCell
from composer.placement import Candidate, Placement
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
    context.begin("messages through the host")
    delay, mode = train.priority_update_delay, context.problem.replay.mode
    key = context.key("messages", host, {"priority_update_delay": delay, "mode": mode})
    work = functools.partial(measure_messages, train.batch_size, delay, mode)
    return context.known(key, ("iteration",), lambda: {"iteration": work()}, host)["iteration"].value_us


def whole_iterations(
    context: ProfilingContext, matrix: AssignmentMatrix, placement: Placement
) -> dict[Candidacy, WholeIteration]:
    """Whole iterations of `placement`'s candidates whose devices are the host's silicon: alone, and while Actors run.

    There the devices, the host's messages and the Actors slow each other down, which the sum of their separate times
    does not show. The keys are the devices of Replay Manager and Learner and the latter's implementation.
    """
    found: dict[Candidacy, WholeIteration] = {}
    known: dict[str, float] = {}
    for candidate in placement.candidates:
        measured = _measurement(context, matrix, candidate, known)
        if measured is None:
            continue
        try:
            found[candidate.names] = WholeIteration(measured(0), measured(context.busy))
        except (CapacityError, DeviceError) as error:
            logger.warning("%s and %s were not measured together: %s", *candidate.pair, error)
    return found


def _measurement(
    context: ProfilingContext, matrix: AssignmentMatrix, candidate: Candidate, known: dict[str, float]
) -> Callable[[int], float] | None:
    """The measurement of the candidate beside so many busy processes; `known` keeps results by the digest of their key.

    None where the host's silicon is not all of it, and for setting 2 on devices that share the host's cores as its
    threads do: `CoreSharing` has their times.
    """
    platform = context.platform
    on_i, on_j = (platform.device(name) for name in candidate.pair)
    for device in (on_i, on_j):
        modelled = backend_of(device).estimator(device) is not None
        if modelled or not platform.shared_silicon(device.name, platform.host.name):
            return None
    row = matrix[on_j.name]
    option = next(o for o in row.learners if _implementation(o) == candidate.learner.implementation)
    if candidate.setting == 2:
        if backend_of(on_j).host_cores != "all":
            return None
        assert isinstance(option.pair, PairCell)
        return functools.partial(_pair_us, context, on_j, option.pair)
    replay, learner = matrix[on_i.name].replay, option.learner
    assert isinstance(replay, ReplayCell)
    assert isinstance(learner, LearnerCell)
    own = candidate.storage[0].device == on_j.name and backend_of(on_j).storage(on_j) is not None
    return functools.partial(_pipeline_us, context, known, on_i, replay, on_j, learner, own)


def _implementation(option: LearnerOption) -> str | None:
    return option.learner.implementation if isinstance(option.learner, LearnerCell) else None


def _pair_us(context: ProfilingContext, device: Device, pair: PairCell, busy: int) -> float:
    """Microseconds of an iteration of setting 2 beside `busy` processes."""
    if not busy:
        return sum(latency.value_us for name, latency in pair.measurements() if name != "insert")
    name, threads = pair.learner.implementation, pair.learner.threads
    context.begin(f"{device.name}: Replay Manager and {name} Learner together, while Actors run")

    def work() -> dict[str, list[float]]:
        with busy_processes(busy):
            parts = measure_pair(context, device, name, pair.replay, threads)
        # The mean, not the median: waits for a core are rare but long.
        return {"iteration": [sum(float(np.mean(parts[part])) for part in ("sample", "gather", "step", "update"))]}

    parameters = {**pair_parameters(context, pair.replay, threads), "busy": busy}
    key = context.key("pair", device, parameters, name)
    return context.known(key, ("iteration",), work, device)["iteration"].value_us


def _pipeline_us(
    context: ProfilingContext,
    known: dict[str, float],
    on_i: Device,
    replay: ReplayCell,
    on_j: Device,
    learner: LearnerCell,
    own_storage: bool,
    busy: int,
) -> float:
    """Microseconds of an iteration of setting 1 beside `busy` processes; `own_storage`: the Learner's device has it."""
    train = context.problem.train
    parameters = {
        **pair_parameters(context, replay, learner.threads),
        "replay_device": context.fingerprint(on_i),
        "replay_kernels": "" if on_i.absent else kernel_hash(module=backend_of(on_i).kernels),
        "priority_update_delay": train.priority_update_delay,
        "own_storage": own_storage,
        "busy": busy,
    }

    @on_own_thread
    def work() -> dict[str, list[float]]:
        full = context.full_replay(on_i, replay.fanout, replay.workers)
        samples = measure_pipeline(
            full.manager,
            context.storage_on(on_j)[0] if own_storage else context.full_storage,
            context.make_learner(learner.implementation, on_j, learner.threads, learner.sub_batches),
            context.problem.transition,
            train.batch_size,
            train.priority_update_delay,
            busy,
            learner_gathers=own_storage,
            beta=full.beta,
            weight_sync_interval=train.weight_sync_interval,
            iterations=full.batches(train.batch_size, ITERATIONS),
            renew=full.renew,
        )
        return {"iteration": samples}

    key = context.key("pipeline", on_j, parameters, learner.implementation)
    if key.digest not in known:  # the key is the same for rows that differ in name only
        beside = ", while Actors run" if busy else ""
        context.begin(f"{on_i.name}, {on_j.name}: Replay Manager and {learner.implementation} Learner{beside}")
        known[key.digest] = context.known(key, ("iteration",), work, on_j)["iteration"].value_us
    return known[key.digest]
