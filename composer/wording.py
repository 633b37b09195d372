"""Parts of error messages that several modules share."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence

from pearl.errors import ConfigurationError


def require(condition: bool, message: str) -> None:
    """Raise ConfigurationError with `message` unless `condition` holds."""
    if not condition:
        raise ConfigurationError(message)


def shortened(text: str) -> str:
    """`text`, cut to 60 characters."""
    return text if len(text) <= 60 else f"{text[:57]}..."


def did_you_mean(word: str, known: Collection[str]) -> str:
    """A question that names the closest of the `known` words, in either case, or nothing where none is close."""
    by_case = {name.casefold(): name for name in known}
    close = difflib.get_close_matches(word.casefold(), by_case, n=1)
    return f" Did you mean {by_case[close[0]]!r}?" if close else ""


def listed(names: Sequence[str], most: int = 8) -> str:
    """The first names, and how many more there are."""
    return ", ".join(names[:most]) + (f", and {len(names) - most} more" if len(names) > most else "")
