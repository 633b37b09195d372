"""Selectors that are lists of numbers, `key=value;...`: those of null and of modelled devices."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence

from pearl.errors import ConfigurationError

_NUMBER = re.compile(r"[0-9]{1,20}(\.[0-9]{1,20})?([eE][+-]?[0-9]{1,2})?")


def key_values(
    selector: str,
    known: Sequence[str],
    *,
    backend: str,
    form: str,
    may_be_empty: bool,
    most: int | None = None,
    may_be_0: Collection[str] = (),
) -> dict[str, float]:
    """Read a selector whose keys are in `known`; with `most`, values are whole numbers from 1 to `most`.

    `form` is what messages say of a correct selector. Raises ConfigurationError for a key that is unknown or given
    twice, and for a value that is not a plain number above 0, or 0 of a key that `may_be_0`.
    """
    values: dict[str, float] = {}
    for item in map(str.strip, selector.split(";")):
        if may_be_empty and not item:
            continue
        key, equals, text = (part.strip() for part in item.partition("="))
        if not equals or key not in known:
            raise ConfigurationError(
                f"A {backend} selector {form}; found {item!r}, expected one of {', '.join(known)} followed by = and a "
                "number."
            )
        if key in values:
            raise ConfigurationError(f"A {backend} selector gives {key} twice: {selector!r}. Keep one.")
        value = float(text) if _NUMBER.fullmatch(text) else math.nan
        zero = key in may_be_0
        positive = value > 0 or (zero and value == 0)
        if not (math.isfinite(value) and positive and (most is None or (value.is_integer() and value <= most))):
            real = "number of at least 0" if zero else "number above 0"
            wanted = real if most is None else f"whole number from {int(not zero)} to {most}"
            raise ConfigurationError(f"{key} of a {backend} selector must be a {wanted}; found {text!r}.")
        values[key] = value
    return values
