"""A run's measurements of itself: times of an iteration's parts, busy shares of the primitives, queue levels.

Workers, the RRQ and the actors add up their own seconds; the host reads these sums a few times a second. With a
`Trace`, the newest events of each thread are kept as well.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pearl.recorder import Recorder
from pearl.replay.requests import ReplayRequestQueue
from pearl.runtime.collection import CollectionBuffer
from pearl.runtime.queues import DataCollectionQueue
from pearl.runtime.rate import StepRate
from pearl.runtime.trace import Trace, Track
from pearl.runtime.workers import LearnerSide

# Per transition: how many are inserted in an iteration depends on the Actors and on the replay ratio.
INSERTION = "insertion per transition"
# In the order of an iteration; the keys of predicted and measured times.
PARTS = ("sampling", "gather", INSERTION, "update", "training", "communication", "iteration")
ROLLOUT_PARTS = ("collection", "advantages", "training", "communication", "iteration")
ALL_PARTS = tuple(dict.fromkeys((*ROLLOUT_PARTS[:2], *PARTS)))

_INTERVAL_S = 0.25
_MOST_INTERVALS = 1024  # then neighbours are joined
_WINDOW_S = 2.0  # of the busy shares
_LEVELS_S = 0.005  # between two records of the queues in a trace


@dataclass(frozen=True)
class Level:
    """How full a queue is: `filled` of `capacity` messages, or transitions of the collection buffer."""

    filled: int
    capacity: int

    @property
    def share(self) -> float:
        """From 0 to 1, above it where the last message exceeds an insertion."""
        return self.filled / self.capacity if self.capacity else 0.0


@dataclass(frozen=True)
class Activity:
    """A moment of a run: each primitive's busy share of the last two seconds, and the fill levels of the queues."""

    busy: Mapping[str, float]
    levels: Mapping[str, Level]


@dataclass(frozen=True)
class IterationTimes:
    """Measured times of an iteration's parts in microseconds, by the names in `PARTS`; a part not measured is absent.

    Each is the median over `intervals` of the mean in an interval, and `spread_us` holds the 20th and 80th percentiles;
    only `INSERTION` is the mean of all intervals, with the spread over those that have insertions.
    """

    measured_us: Mapping[str, float]
    spread_us: Mapping[str, tuple[float, float]]
    intervals: int


@dataclass(frozen=True)
class _Moment:
    """Sums at the end of an interval: iterations, those that were timed and their seconds, seconds of each part.

    `inserted` is the number of transitions that entered the Data Storage.
    """

    iterations: int
    timed: int
    busy_s: float
    spent: Mapping[str, float]
    inserted: int


class Telemetry:
    """Measures one run; used from the host's thread alone.

    `insertion_rows` transitions fill the collection buffer. `devices` names the devices of `actors`, `replay_manager`,
    `storage` and `learner`. In a `serial` run all parts run in the host's thread.
    """

    def __init__(
        self,
        rate: StepRate,
        insertion_rows: int,
        *,
        devices: Mapping[str, str],
        serial: bool = False,
        trace: Trace | None = None,
    ) -> None:
        self._rate, self._insertion_rows = rate, insertion_rows
        self._devices, self._serial, self._trace = devices, serial, trace
        self._worker: LearnerSide | None = None
        self._rrq: ReplayRequestQueue | None = None
        self._dcqs: Sequence[DataCollectionQueue] = ()
        self._buffer: CollectionBuffer | None = None
        self._host = self._recorder()
        self._insertion_began = self._waited_s = 0.0
        self._inserting = self._inserted = 0  # transitions: in the present insertion, and in all so far
        self._actors: dict[int, Recorder] = {}
        self._moments: list[_Moment] = []
        self._since: float | None = None  # when the rates of these moments began
        self._interval_s, self._next = _INTERVAL_S, -math.inf
        self._shares: deque[tuple[float, dict[str, float]]] = deque()
        self._levels: deque[tuple[float, Mapping[str, Level]]] = deque(maxlen=trace.counter_rows if trace else 0)
        self._levels_at = -math.inf

    def _recorder(self) -> Recorder:
        recorder = Recorder()
        if self._trace is not None:
            recorder.keep_events(self._trace.events_per_thread)
        return recorder

    # --- what to measure --------------------------------------------------------------------------------------------

    def watch_worker(self, worker: LearnerSide) -> None:
        """Measure the Learner's loop; call it before the loop starts."""
        self._worker = worker
        if self._trace is not None:
            worker.keep_events(self._trace.events_per_thread)

    def watch_replay(self, rrq: ReplayRequestQueue) -> None:
        """Measure setting 1's Replay Manager; call it before the first request."""
        self._rrq = rrq
        if self._trace is not None:
            rrq.keep_events(self._trace.events_per_thread)

    def watch_actors(self, dcqs: Sequence[DataCollectionQueue]) -> None:
        """Measure the actors, one for each queue."""
        self._dcqs = dcqs
        self._actors = {actor: self._recorder() for actor in range(len(dcqs))}

    # --- what happened ----------------------------------------------------------------------------------------------

    def collected(self, actor: int, start: float, end: float) -> None:
        """`actor` made a message from `start` to `end`, in seconds of `time.perf_counter()`."""
        self._actors[actor].record("collect", start, end)

    def insertion_begins(self, buffer: CollectionBuffer) -> None:
        """The host inserts `buffer` from now on."""
        self._buffer, self._inserting, self._insertion_began = buffer, buffer.count, time.perf_counter()
        self._note_levels(self._insertion_began)

    def inserted(self) -> None:
        """The host has inserted the collection buffer."""
        now = time.perf_counter()
        self._host.record("insert", self._insertion_began, now)
        self._inserted += self._inserting
        self._note_levels(now)

    def waited(self, start: float, end: float) -> None:
        """The host slept from `start` to `end`, in seconds of `time.perf_counter()`."""
        self._waited_s += end - start

    def trained(self) -> None:
        """Iterations were done; setting 2's loop waits for its next grant."""
        now = self._rate.last  # of the same event: no further clock
        if self._trace is not None and now - self._levels_at >= _LEVELS_S:
            self._levels_at = now
            self._note_levels(time.perf_counter())
        if now >= self._next:
            self._next = now + self._interval_s
            self._end_interval()

    def _note_levels(self, now: float) -> None:
        if self._trace is not None:
            self._levels.append((now, self.levels()))

    def _end_interval(self) -> None:
        moment = _Moment(self._rate.steps, self._rate.timed_steps, self._rate.busy_s, self._spent(), self._inserted)
        if self._rate.since != self._since:  # the rates restart after a warm-up
            self._since = self._rate.since
            self._moments.clear()
        self._moments.append(moment)
        if len(self._moments) > _MOST_INTERVALS:
            self._moments = self._moments[::2]
            self._interval_s *= 2

    # --- what was measured ------------------------------------------------------------------------------------------

    def _spent(self) -> dict[str, float]:
        """Seconds so far of each part but the whole iteration."""
        loop, host = ({}, {}) if self._worker is None else (self._worker.seconds(), self._worker.host.spent)
        if "advantages" in loop:  # rollouts: actors collect side by side
            collecting = [actor.spent.get("collect", 0.0) for actor in self._actors.values()]
            return {
                "collection": max(collecting, default=0.0),
                "advantages": loop["advantages"],
                "training": loop["train"] + loop["publish"],
            }
        spent = {
            "sampling": loop.get("sample", 0.0),
            "gather": loop.get("gather", 0.0) + host.get("gather", 0.0),
            INSERTION: self._host.spent.get("insert", 0.0),
            "update": loop.get("update", 0.0),
            "training": loop.get("train", 0.0) + loop.get("publish", 0.0),
        }
        if self._rrq is None:
            return spent
        requests = self._rrq.seconds()
        spent["sampling"] += requests["sample"]
        spent["update"] += requests["update"]
        spent["communication"] = host.get("messages", 0.0) - host.get("gather", 0.0)
        if self._serial:  # requests are executed where they are written: in the host's messages and insertions
            spent["communication"] -= requests["sample"] + requests["update"]
        else:
            spent[INSERTION] += requests["insert"]
        return spent

    def newest_us(self) -> dict[str, float]:
        """Mean microseconds of an iteration's parts in the last interval; empty before there is one."""
        for before, after in zip(self._moments[-2::-1], self._moments[:0:-1], strict=False):
            if after.iterations > before.iterations:
                return _times_us(before, after)
        return {}

    def iteration_times(self) -> IterationTimes:
        """The times of an iteration's parts; call it when the loops have ended."""
        intervals = [_times_us(before, after) for before, after in self._intervals()]
        values = {name: [times[name] for times in intervals if name in times] for name in ALL_PARTS}
        values = {name: found for name, found in values.items() if any(found)}
        middle = {name: float(np.median(found)) for name, found in values.items()}
        if INSERTION in middle:  # another thread may insert in a later interval than the host counts in
            middle[INSERTION] = _times_us(self._moments[0], self._moments[-1])[INSERTION]
        spread = {name: (float(np.percentile(v, 20)), float(np.percentile(v, 80))) for name, v in values.items()}
        return IterationTimes(middle, spread, len(intervals))

    def iteration_samples_us(self) -> list[float]:
        """Mean microseconds of an iteration in each interval."""
        return [_times_us(before, after)["iteration"] for before, after in self._intervals()]

    def _intervals(self) -> list[tuple[_Moment, _Moment]]:
        """The intervals with an iteration, the last one included that has not ended."""
        if self._moments and self._rate.steps > self._moments[-1].iterations:
            self._end_interval()
        pairs = zip(self._moments, self._moments[1:], strict=False)
        return [(before, after) for before, after in pairs if after.iterations > before.iterations]

    def levels(self) -> dict[str, Level]:
        """The fill levels of the queues by name."""
        found = {}
        if self._dcqs:
            found["DCQ"] = Level(sum(map(len, self._dcqs)), sum(dcq.slots for dcq in self._dcqs))
        if self._buffer is not None:
            found["buffer"] = Level(self._buffer.count, self._insertion_rows)
        if self._rrq is not None:
            found["RRQ"] = Level(self._rrq.pending(), self._rrq.depth)
        if self._worker is not None:
            for name, queues in self._worker.queues.items():
                found[name] = Level(sum(map(len, queues)), sum(queue.slots for queue in queues))
        return found

    def activity(self) -> Activity:
        """Busy shares and fill levels now; cheap enough for ten times a second."""
        now = time.perf_counter()
        spent = {**dict.fromkeys(ALL_PARTS, 0.0), **(self._moments[-1].spent if self._moments else {})}
        collecting_s = sum(actor.spent.get("collect", 0.0) for actor in self._actors.values())
        seconds = {
            "Actors": collecting_s / max(1, len(self._actors)),
            **self._data_s(spent),
            "Learner": spent["training"],
        }
        if not self._serial:
            seconds["Host"] = now - self._waited_s
        self._shares.append((now, seconds))
        while len(self._shares) > 2 and now - self._shares[0][0] > _WINDOW_S:
            self._shares.popleft()
        since, before = self._shares[0]
        passed = max(now - since, 1e-9)
        # Before the loop of a rollout's Learner there is no "Advantages": a callback may ask for the numbers then.
        spent_s = {name: value - before.get(name, value) for name, value in seconds.items()}
        busy = {name: min(1.0, max(0.0, value / passed)) for name, value in spent_s.items()}
        return Activity(busy, self.levels())

    def _data_s(self, spent: Mapping[str, float]) -> dict[str, float]:
        """Seconds so far of the work between the actors and the Learner."""
        if self._worker is not None and "advantages" in self._worker.seconds():
            return {"Advantages": spent["advantages"]}
        return {
            "Replay Manager": spent["sampling"] + spent["update"],
            "Data Storage": spent["gather"] + spent[INSERTION],
        }

    def scalars(self) -> dict[str, float]:
        """Columns for the run's log: busy shares and fill levels, from 0 to 1."""
        now = self.activity()
        busy = {f"busy/{_column(name)}": share for name, share in now.busy.items()}
        return busy | {f"queue/{_column(name)}": level.share for name, level in now.levels.items()}

    # --- the trace --------------------------------------------------------------------------------------------------

    def write_trace(self, say: Callable[[str], None]) -> None:
        """Write the trace, if one is wanted; call it when all threads have ended. `say` tells the user."""
        if self._trace is not None:
            self._trace.write(self._tracks(), self._levels, say)

    def _tracks(self) -> list[Track]:
        def on(primitive: str) -> str:
            return self._devices.get(primitive, "host")

        tracks = [Track("Host Runtime", on("actors"), self._host.events())]
        if self._worker is not None:
            tracks.append(Track("Host Runtime", on("actors"), self._worker.host.events()))
            tracks += [Track(name, on("learner"), events) for name, events in self._worker.events().items()]
        if self._rrq is not None:
            tracks.append(Track("Replay Manager", on("replay_manager"), self._rrq.events()))
        tracks += [Track(f"Actor {index}", on("actors"), actor.events()) for index, actor in self._actors.items()]
        if self._serial:
            tracks = [Track("Host Runtime, serial", on("actors"), track.events) for track in tracks]
        return tracks


def _times_us(before: _Moment, after: _Moment) -> dict[str, float]:
    """Mean microseconds of an iteration and its parts between two moments; `INSERTION` is absent if there was none."""
    each_us = 1e6 / (after.iterations - before.iterations)
    spent = {name: seconds - before.spent.get(name, 0.0) for name, seconds in after.spent.items()}
    times = {name: seconds * each_us for name, seconds in spent.items() if name != INSERTION}
    if INSERTION in spent and (inserted := after.inserted - before.inserted):
        times[INSERTION] = spent[INSERTION] * 1e6 / inserted
    if timed := after.timed - before.timed:
        times["iteration"] = (after.busy_s - before.busy_s) * 1e6 / timed
    if timed and "communication" not in times and "collection" not in times:  # setting 2: it waits for its next grant
        parts = ("sampling", "gather", "update", "training")
        times["communication"] = max(0.0, times["iteration"] - sum(times[name] for name in parts))
    return times


def _column(name: str) -> str:
    return name.lower().replace(" ", "_")


def iteration_text(predicted_us: Mapping[str, float], measured_us: Mapping[str, float]) -> str:
    """One line: the measured time of an iteration and its parts, each with its prediction where there is one."""
    parts = []
    for name in reversed(ALL_PARTS):
        if name in measured_us:
            predicted = f" (predicted {predicted_us[name]:,.2f})" if name in predicted_us else ""
            parts.append(f"{name} {measured_us[name]:,.2f}{predicted}")
    return f"{'; '.join([parts[0], *reversed(parts[1:])])} us"
