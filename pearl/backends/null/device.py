"""The null device: no hardware, only the latencies its selector states. It exercises placement and its tests."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields

from pearl.errors import ConfigurationError

_NUMBER = re.compile(r"[0-9]{1,20}(\.[0-9]{1,20})?([eE][+-]?[0-9]{1,2})?")


@dataclass(frozen=True)
class NullTimes:
    """Latencies of one iteration in microseconds; with RM and Learner sharing the device all are times `sharing`."""

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
        expected = "'sample_us=5;insert_us=2;update_us=3;learner_us=100' (and optionally ';sharing=1.5')"
        values: dict[str, float] = {}
        for item in selector.split(";"):
            key, equals, text = (part.strip() for part in item.partition("="))
            if not equals or key not in known:
                raise ConfigurationError(
                    f"A null selector must read like {expected}; found {item.strip()!r}, expected one of "
                    f"{', '.join(known)} followed by = and a number."
                )
            if key in values:
                raise ConfigurationError(f"A null selector gives {key} twice: {selector!r}. Keep one.")
            value = float(text) if _NUMBER.fullmatch(text) else math.nan
            if not (math.isfinite(value) and value > 0):
                raise ConfigurationError(f"{key} of a null selector must be a number above 0; found {text!r}.")
            values[key] = value
        missing = [name for name in known[:4] if name not in values]
        if missing:
            raise ConfigurationError(
                f"A null selector must read like {expected}; {', '.join(missing)} missing in {selector!r}."
            )
        return cls(**values)

    def selector(self) -> str:
        """The text that `parse` reads back to this value."""
        return ";".join(f"{f.name}={getattr(self, f.name)!r}" for f in fields(self))
