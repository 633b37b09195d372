"""Simulates stages joined by buffers of given depth, cycle by cycle, to check the closed forms.

It uses no formulas. In each cycle a stage may pass on its oldest item, if that is done and every output buffer has
room, and may accept one item from each input buffer, if its interval has passed. An item can enter and leave a buffer
in the same cycle, and freed room can be filled at once; a buffer's own delay counts as its source's latency.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numba import njit
from numpy.typing import NDArray

from kernels.rtl.learner_stages import Learner
from pearl.errors import ConfigurationError, DeviceError


@dataclass(frozen=True)
class Simulated:
    """Cycles of a gradient step, the most items in each buffer (source, stage), and the busy share of each stage."""

    cycles: int
    held: dict[tuple[str, str], int]
    busy: dict[str, float]


def simulate(
    learner: Learner, batch: int, depths: Mapping[tuple[str, str], int] | int, *, cycle_limit: int = 2**31
) -> Simulated:
    """Run `batch` items through the learner, with buffers of `depths` items (one number is for all of them).

    The copies get equal shares; the first ones get the remainder. The update begins when the last copy is done. Raises
    ConfigurationError for a buffer without room, DeviceError for a deadlock or beyond `cycle_limit`.
    """
    if batch < 1:
        raise ConfigurationError(f"A batch has at least one item; found {batch}.")
    names = [stage.name for stage in learner.stages]
    edges = [(source, stage.name) for stage in learner.stages for source in stage.sources]
    rooms = {edge: depths if isinstance(depths, int) else depths[edge] for edge in edges}
    for edge, room in rooms.items():
        if room < 1:
            raise ConfigurationError(f"The buffer from {edge[0]} to {edge[1]} holds at least one item; found {room}.")
    sources = np.array([names.index(source) for source, _ in edges], np.int64)
    targets = np.array([names.index(target) for _, target in edges], np.int64)
    room_of = np.array([rooms[edge] for edge in edges], np.int64)
    intervals = np.array([stage.interval for stage in learner.stages], np.int64)
    latencies = np.array([stage.latency for stage in learner.stages], np.int64)

    shares = {-(-batch // learner.pipelines), batch // learner.pipelines} - {0}
    cycles, most = 0, np.zeros(len(edges), np.int64)
    for share in shares:  # copies of equal share behave equally
        taken, held = _step(share, sources, targets, room_of, intervals, latencies, cycle_limit)
        if taken < 0:
            raise DeviceError(
                f"The learner pipeline was not done after {cycle_limit} cycles, with room for "
                f"{min(rooms.values())} items in its smallest buffer: it is stalled, or the limit is too low."
            )
        cycles, most = max(cycles, int(taken)), np.maximum(most, held)
    largest = max(shares)
    return Simulated(
        cycles + learner.update_cycles,
        {edge: int(held) for edge, held in zip(edges, most, strict=True)},
        {stage.name: largest * stage.interval / cycles for stage in learner.stages},
    )


@njit(cache=False)
def _step(
    items: int,
    sources: NDArray[np.int64],
    targets: NDArray[np.int64],
    rooms: NDArray[np.int64],
    intervals: NDArray[np.int64],
    latencies: NDArray[np.int64],
    cycle_limit: int,
) -> tuple[int, NDArray[np.int64]]:
    """Return the cycles until every stage has passed on `items` items (-1: over the limit), and the buffers' peaks."""
    stages, buffers = len(intervals), len(sources)
    inside = -(-latencies // intervals)  # the most items in a stage at once
    slots = int(inside.max())
    done_at = np.zeros((stages, slots), np.int64)  # a ring for the items in each stage
    entered, left, next_entry = np.zeros(stages, np.int64), np.zeros(stages, np.int64), np.zeros(stages, np.int64)
    held, most = np.zeros(buffers, np.int64), np.zeros(buffers, np.int64)
    cycle = 0
    while True:
        moved = True
        while moved:  # until nothing more can move in this cycle
            moved = False
            for stage in range(stages - 1, -1, -1):
                ready = entered[stage] < items and next_entry[stage] <= cycle
                ready = ready and entered[stage] - left[stage] < inside[stage]
                for k in range(buffers):
                    ready = ready and (targets[k] != stage or held[k] > 0)
                if ready:
                    for k in range(buffers):
                        if targets[k] == stage:
                            held[k] -= 1
                    done_at[stage, entered[stage] % slots] = cycle + latencies[stage]
                    next_entry[stage] = cycle + intervals[stage]
                    entered[stage] += 1
                    moved = True
                ready = entered[stage] > left[stage] and done_at[stage, left[stage] % slots] <= cycle
                for k in range(buffers):
                    ready = ready and (sources[k] != stage or held[k] < rooms[k])
                if ready:
                    for k in range(buffers):
                        if sources[k] == stage:
                            held[k] += 1
                            most[k] = max(most[k], held[k])
                    left[stage] += 1
                    moved = True
        if left.min() == items:
            return cycle, most
        # Skip the cycles in which nothing can move: to the next finished item or the end of an interval.
        following = cycle_limit + 1
        for stage in range(stages):
            if entered[stage] > left[stage] and done_at[stage, left[stage] % slots] > cycle:
                following = min(following, done_at[stage, left[stage] % slots])
            if next_entry[stage] > cycle:
                following = min(following, next_entry[stage])
        if following > cycle_limit:
            return -1, most
        cycle = following
