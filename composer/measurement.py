"""A latency that was measured, modelled, or measured on another machine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import numpy as np

from composer.wording import require

Source: TypeAlias = Literal["measured", "modelled", "imported"]
SOURCES: tuple[Source, ...] = get_args(Source)

_ROUNDING = 1e-12  # relative error of a percentile between two samples


@dataclass(frozen=True)
class Measurement:
    """A latency in microseconds: `value_us` is the median of `n` samples, `p20_us` and `p80_us` their spread.

    A modelled value has n = 0 and no spread. `note` is for the reader of the value: parts such as "extrapolated: batch
    above 256" with "; " between them. Tables show only the word before the colon.
    """

    value_us: float
    p20_us: float
    p80_us: float
    n: int
    source: Source
    samples: tuple[float, ...] | None = None
    note: str = ""

    def __post_init__(self) -> None:
        require(self.source in SOURCES, f"A measurement's source is {' or '.join(SOURCES)}; found {self.source!r}.")
        ordered = 0 <= self.p20_us <= self.value_us <= self.p80_us < math.inf
        found = f"p20 {self.p20_us!r}, p50 {self.value_us!r}, p80 {self.p80_us!r}"
        require(ordered, f"A latency must be finite and at least 0 with p20 <= p50 <= p80; found {found}.")
        require(self.n >= 0, f"A measurement's n must be at least 0; found {self.n!r}.")
        modelled = self.source == "modelled"
        require(
            not modelled or (self.n == 0 and self.p20_us == self.p80_us),
            f"A modelled value has no samples and no spread; found n={self.n!r}, {found}.",
        )
        require(
            self.samples is None or len(self.samples) == self.n,
            f"A measurement that keeps its samples must keep all {self.n}; found {len(self.samples or ())}.",
        )
        if self.samples:
            least, most = min(self.samples), max(self.samples)
            within = least <= self.p20_us * (1 + _ROUNDING) and self.p80_us <= most * (1 + _ROUNDING)
            require(least >= 0 and within, f"The spread must lie among the samples, {least!r} to {most!r}; {found}.")

    @classmethod
    def from_samples(cls, samples_us: Sequence[float], source: Source = "measured") -> Measurement:
        """Summarise `samples_us` and keep them."""
        require(len(samples_us) > 0, "A measurement needs at least one sample; found none.")
        low, median, high = (float(v) for v in np.percentile(np.asarray(samples_us, np.float64), (20, 50, 80)))
        return cls(median, low, high, len(samples_us), source, tuple(float(s) for s in samples_us))

    @classmethod
    def modelled(cls, value_us: float) -> Measurement:
        """A value by equations."""
        return cls(value_us, value_us, value_us, 0, "modelled")

    @property
    def least_us(self) -> float:
        """The fastest sample, which other programs on the machine slowed down least; without samples the p20."""
        return min(self.samples) if self.samples else self.p20_us

    @property
    def spread(self) -> float:
        """(p80 - p20) / p50; 0 for a modelled value."""
        return (self.p80_us - self.p20_us) / self.value_us if self.value_us else 0.0
