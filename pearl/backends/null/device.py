"""The latencies that a null device's selector states."""

from __future__ import annotations

from dataclasses import dataclass, fields

from pearl.backends.key_values import key_values
from pearl.errors import ConfigurationError

_FORM = "must read like 'sample_us=5;insert_us=2;update_us=3;learner_us=100' (and optionally ';sharing=1.5')"


@dataclass(frozen=True)
class NullTimes:
    """Latencies of one iteration in microseconds; if RM and Learner share the device, all are times `sharing`."""

    sample_us: float
    insert_us: float
    update_us: float
    learner_us: float
    sharing: float = 1.0

    @classmethod
    def parse(cls, selector: str) -> NullTimes:
        """Read `sample_us=5;insert_us=2;update_us=3;learner_us=100`, in any order, `sharing=1.5` optional.

        Raises ConfigurationError for a key that is missing, unknown or given twice, and for a value that is not a
        plain number above 0.
        """
        known = [f.name for f in fields(cls)]
        values = key_values(selector, known, backend="null", form=_FORM, may_be_empty=False)
        if missing := [name for name in known[:4] if name not in values]:
            raise ConfigurationError(f"A null selector {_FORM}; {', '.join(missing)} missing in {selector!r}.")
        return cls(**values)

    def selector(self) -> str:
        """The text that `parse` reads back to this value."""
        return ";".join(f"{f.name}={getattr(self, f.name)!r}" for f in fields(self))
