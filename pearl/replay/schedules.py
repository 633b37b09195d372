"""Schedules of a Replay Manager's exponents: numbers that depend on the run's steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from pearl.errors import ConfigurationError
from pearl.replay.arguments import check_exponent
from pearl.replay.protocol import ReplayManager

Schedule: TypeAlias = Callable[[int], float]


@dataclass(frozen=True)
class Constant:
    """The same `value` at every step."""

    value: float

    def __call__(self, step: int) -> float:
        """Return the value."""
        return self.value


@dataclass(frozen=True)
class Linear:
    """Linear from `start` at step 0 to `final` at step `steps`, then constant."""

    start: float
    final: float
    steps: int

    def __post_init__(self) -> None:
        if isinstance(self.steps, bool) or not isinstance(self.steps, int) or self.steps < 1:
            raise ConfigurationError(
                f"A linear schedule must take a whole number of steps, at least 1 step; found {self.steps!r}."
            )
        for name in ("start", "final"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ConfigurationError(f"{name} of a linear schedule must be a number; found {value!r}.")

    def __call__(self, step: int) -> float:
        """Return the value at `step`."""
        if step >= self.steps:
            return self.final
        return self.start + max(step, 0) / self.steps * (self.final - self.start)


SCHEDULES = (Constant, Linear)  # those that can be written into programs and composition files


def as_schedule(value: float | Schedule) -> Schedule:
    """Return a schedule unchanged, and a number as a Constant."""
    return value if callable(value) else Constant(value)


class ScheduledExponents:
    """alpha and beta of one Replay Manager over a run: call it once a step, and pass the beta it returns to `sample`.

    Each is a number or any callable from step to number. A new alpha requantises every slot, so alpha changes only
    every `alpha_interval` steps; None leaves it unchanged. Both depend on the step alone, so a resumed run continues in
    the same way.
    """

    def __init__(
        self,
        manager: ReplayManager,
        *,
        alpha: float | Schedule | None = None,
        beta: float | Schedule = 0.4,
        alpha_interval: int = 1000,
    ) -> None:
        if alpha_interval < 1:
            raise ConfigurationError(f"alpha_interval must be at least 1 step; found {alpha_interval!r}.")
        self._manager = manager
        self._alpha = None if alpha is None else as_schedule(alpha)
        self._beta = as_schedule(beta)
        self._alpha_interval = alpha_interval

    def __call__(self, step: int) -> float:
        """Give the manager the alpha of `step` and return the beta of `step`."""
        if self._alpha is not None:
            alpha = float(self._alpha(step - step % self._alpha_interval))
            if alpha != self._manager.alpha:
                self._manager.set_alpha(alpha)
        beta = float(self._beta(step))
        check_exponent("beta", beta)
        return beta
