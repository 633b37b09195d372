"""Compares the times of iterations with the composer's prediction, and names the part that drifted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pearl.runtime.telemetry import INSERTION

ITERATION = "iteration"


@dataclass(frozen=True)
class Drift:
    """Microseconds of an iteration and of its terms, by name: predicted and measured.

    Both have the whole iteration under `ITERATION`. A term is compared if both have it.
    """

    predicted_us: Mapping[str, float]
    measured_us: Mapping[str, float]

    @property
    def ratio(self) -> float:
        """Measured / predicted time of the iteration; infinity if nothing was predicted."""
        predicted = self.predicted_us[ITERATION]
        return self.measured_us[ITERATION] / predicted if predicted > 0 else float("inf")

    @property
    def factor(self) -> float:
        """How many times longer, or shorter, an iteration takes; at least 1."""
        return max(self.ratio, 1 / self.ratio) if self.ratio > 0 else float("inf")

    @property
    def term(self) -> str:
        """The term that explains most of the difference; the iteration itself where no term is known.

        Insertion is not compared: its times are per transition.
        """
        terms = [name for name in self.predicted_us if name in self.measured_us and name not in (ITERATION, INSERTION)]
        longer = 1 if self.ratio >= 1 else -1
        found = max(terms, key=lambda name: longer * self._difference(name), default=ITERATION)
        return found if longer * self._difference(found) > 0 else ITERATION

    def _difference(self, name: str) -> float:
        return self.measured_us[name] - self.predicted_us[name]

    def __str__(self) -> str:
        ratio = self.ratio
        times = f"{ratio:.2f} times" if ratio >= 1 else f"1/{1 / ratio:.2f} of" if ratio > 0 else "none of"
        text = (
            f"iterations take {self.measured_us[ITERATION]:,.1f} us, {times} the {self.predicted_us[ITERATION]:,.1f} us"
            " that the composer predicted"
        )
        if (term := self.term) != ITERATION:
            text += (
                f"; the term that drifted most is {term}: {self.measured_us[term]:,.1f} us instead of "
                f"{self.predicted_us[term]:,.1f} us"
            )
        return text


@dataclass
class DriftWatch:
    """Reports a drift once all observations of `patience_s` seconds are beyond `threshold` times the prediction.

    A drift is reported once, and again only if iterations kept to the prediction meanwhile.
    """

    predicted_us: Mapping[str, float]
    threshold: float = 1.5
    patience_s: float = 60.0
    _since: float | None = field(default=None, init=False)
    _told: bool = field(default=False, init=False)

    def observe(self, now: float, measured_us: Mapping[str, float]) -> Drift | None:
        """The drift, if it is to be reported; `measured_us` are means since the last observation, at time `now`."""
        drift = Drift(self.predicted_us, measured_us)
        if drift.factor <= self.threshold:
            self._since, self._told = None, False
            return None
        if self._since is None:
            self._since = now
        if self._told or now - self._since < self.patience_s:
            return None
        self._told = True
        return drift
