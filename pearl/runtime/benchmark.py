"""The measurements of a benchmark (--bench): their replay ratios, when each is over, and their results."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pearl.runtime.flow_control import FlowControl
from pearl.runtime.options import Options
from pearl.runtime.rate import StepRate
from pearl.spec import ReplaySpec, TrainSpec

_WARM_UP_S = 1.0  # first steps choose their kernels and fill caches
_LATER_WARM_UP_S = 0.25  # Actors and queues settle at another pace


class Benchmark:
    """Measures at one replay ratio or two: `free`, where Actors do not hold training back, and the program's `own`.

    Training begins once each Actor that was launched has sent a message, so that none is still starting.
    """

    def __init__(self, options: Options, own: float, free: float) -> None:
        ratios = [own, free] if options.bench_both else [own if options.bench_paced else free]
        self._ratios = list(dict.fromkeys(ratios))
        self._own, self._seconds = own, options.bench_seconds
        self._silent: set[int] = set()
        self._found: list[Mapping[str, object]] = []

    @classmethod
    def with_replay(cls, options: Options, replay: ReplaySpec, train: TrainSpec) -> Benchmark:
        """One of training by samples of a replay: free, its replay ratio is infinity."""
        own = train.replay_ratio
        # Without new data, items with a limit on samples would soon be used up.
        return cls(options, own, own if replay.max_times_sampled else math.inf)

    @property
    def ratio(self) -> float:
        """The replay ratio of the present measurement."""
        return self._ratios[0]

    @property
    def is_free(self) -> bool:
        """Whether training does not keep the program's replay ratio."""
        return self.ratio != self._own

    @property
    def has_more(self) -> bool:
        """Whether another measurement follows the present one."""
        return len(self._ratios) > 1

    def launched(self, actors: int, flow: FlowControl) -> None:
        """So many Actors were started: training waits for their first messages."""
        self._silent = set(range(actors))
        flow.held = bool(actors)

    def begin(self, flow: FlowControl) -> None:
        """Begin the present measurement with a warm-up; the first one waits for all Actors."""
        flow.held = bool(self._silent)
        flow.warm_up(min(_LATER_WARM_UP_S if self._found else _WARM_UP_S, self._seconds))

    def heard(self, actor: int, flow: FlowControl) -> None:
        """A message of the actor came."""
        if self._silent:
            self._silent.discard(actor)
            flow.held = bool(self._silent)

    def is_over(self, rate: StepRate, flow: FlowControl) -> bool:
        """Whether the present measurement took its time."""
        return not flow.warming_up and rate.total_s >= self._seconds

    def keep(self, results: Mapping[str, object]) -> None:
        """Keep the result of the present measurement, and turn to the next one."""
        self._found.append(results)
        del self._ratios[0]

    def record(self, last: Mapping[str, object]) -> dict[str, Any]:
        """The results: those of the last measurement, and where there were several, a list of all."""
        return {**last, **({"measurements": [*self._found, last]} if self._found else {})}
