"""Selectors that are lists of numbers, `key=value;...`: those of null and of modelled devices."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from pearl.errors import ConfigurationError

_NUMBER = re.compile(r"[0-9]{1,20}(\.[0-9]{1,20})?([eE][+-]?[0-9]{1,2})?")


def key_values(
    selector: str, known: Sequence[str], *, backend: str, form: str, may_be_empty: bool, most: int | None = None
) -> dict[str, float]:
    """Read a selector whose keys are in `known`; with `most`, values are whole numbers from 1 to `most`.

    `form` is what messages say of a correct selector. Raises ConfigurationError for a key that is unknown or given
    twice, and for a value that is not a plain number above 0.
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
        if not (math.isfinite(value) and value > 0 and (most is None or (value.is_integer() and value <= most))):
            wanted = "number above 0" if most is None else f"whole number from 1 to {most}"
            raise ConfigurationError(f"{key} of a {backend} selector must be a {wanted}; found {text!r}.")
        values[key] = value
    return values
