"""Values that replace those of a composition file: "TABLE.KEY=VALUE", with VALUE as TOML writes it."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from pearl.errors import ConfigurationError

_KEY = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+", re.ASCII)


def parse_overrides(texts: Iterable[str]) -> dict[str, Any]:
    """Values by "TABLE.KEY"; anything that is no TOML value is a text. ConfigurationError for a text without key."""
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not _KEY.fullmatch(name):
            raise ConfigurationError(
                f"--set must be TABLE.KEY=VALUE, such as trainer.learning_rate=1e-3 or "
                f"'trainer.hidden_sizes=[64, 64]'; found {text!r:.100}."
            )
        found[name] = parse_value(value)
    return found


def parse_value(text: str) -> Any:
    """The value that TOML reads from `text`; the text itself if it reads none."""
    try:
        document = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    return document["value"] if len(document) == 1 else text


def override(document: dict[str, Any], overrides: Mapping[str, Any]) -> None:
    """Set the values in a parsed composition file; ConfigurationError where a table would replace a value."""
    for name, value in overrides.items():
        *tables, key = name.split(".")
        place: Any = document
        for table in tables:
            place = place.setdefault(table, {})
            if not isinstance(place, dict):
                raise ConfigurationError(f"{name} cannot be set: the file has a value at {table}, not a table.")
        place[key] = value


def short_text(value: object) -> str:
    """A value as tables and progress lines show it: numbers of floating point with four digits."""
    return f"{value:.4g}" if isinstance(value, float) else toml_text(value)


def toml_text(value: object) -> str:
    """A number, text, boolean, list or table as TOML writes it, in one line."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_text, value))}]"
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{_key(key)} = {toml_text(one)}' for key, one in value.items())} }}"
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return '"' + "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in escaped) + '"'
    return repr(value)


def _key(name: str) -> str:
    return name if _BARE_KEY.fullmatch(name) else toml_text(name)
