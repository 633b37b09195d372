"""Frozen dataclasses as versioned JSON documents, and back with errors that say where a document departs."""

from __future__ import annotations

import dataclasses
import difflib
import json
import types
import typing
from typing import Any, Literal, TypeVar, get_args, get_origin

from pearl.errors import ConfigurationError

_T = TypeVar("_T")


def to_document(value: Any, name: str, version: int) -> str:
    """The frozen dataclass `value` as JSON, headed by the document's name and version."""
    document = {"format": name, "version": version, **dataclasses.asdict(value)}
    return json.dumps(document, indent=2, allow_nan=False)


def from_document(cls: type[_T], text: str, name: str, version: int) -> _T:
    """Read the JSON document of a frozen dataclass; ConfigurationError says where it departs from its types."""
    document = parse_document(text, name, version)
    return typing.cast("_T", decode(cls, {k: v for k, v in document.items() if k not in ("format", "version")}, name))


def parse_document(text: str, name: str, version: int) -> dict[str, Any]:
    """The JSON object in `text`, if it is a document of that name and version; else ConfigurationError."""

    def refuse(constant: str) -> None:
        raise ConfigurationError(f"A {name} document holds finite numbers only; found {constant}.")

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise ConfigurationError(f"A {name} document has each key once; found {_short(key)} twice.")
            found[key] = value
        return found

    try:
        document = json.loads(text, parse_constant=refuse, object_pairs_hook=once)
    except ConfigurationError:
        raise
    except (ValueError, RecursionError) as error:  # ValueError: also a number of thousands of digits
        raise ConfigurationError(f"Expected a {name} document; found text that is not JSON ({error}).") from error
    found = document.get("format") if isinstance(document, dict) else type(document).__name__
    _require(found == name, f"Expected a JSON document of format {name!r}; found {found!r}.")
    _require(
        type(document.get("version")) is int and document["version"] == version,
        f"This version reads {name} version {version}; found {document.get('version')!r}. Write the file anew.",
    )
    return typing.cast("dict[str, Any]", document)


def decode(expected: Any, data: object, where: str) -> Any:
    """Build a value of the type `expected` from JSON data.

    Handles frozen dataclasses, tuples, literals, unions of dataclasses or with None, and the four scalars.
    `where` is the path named by the ConfigurationError.
    """
    if dataclasses.is_dataclass(expected) and isinstance(expected, type):
        return _decode_dataclass(expected, data, where)
    origin = get_origin(expected)
    if origin in (typing.Union, types.UnionType):
        return _decode_union(get_args(expected), data, where)
    if origin is Literal:
        accepted = get_args(expected)
        chosen = any(type(data) is type(value) and data == value for value in accepted)  # True == 1
        _require(chosen, f"{where}: expected one of {', '.join(map(repr, accepted))}; found {_short(data)}.")
        return data
    if origin is tuple:
        kinds = get_args(expected)
        if not isinstance(data, list):
            raise ConfigurationError(f"{where}: expected a list; found {_short(data)}.")
        if kinds[-1] is Ellipsis:
            return tuple(decode(kinds[0], item, f"{where}[{i}]") for i, item in enumerate(data))
        _require(len(data) == len(kinds), f"{where}: expected {len(kinds)} items; found {_short(data)}.")
        return tuple(
            decode(kind, item, f"{where}[{i}]") for i, (kind, item) in enumerate(zip(kinds, data, strict=True))
        )
    return _decode_scalar(expected, data, where)


def _decode_scalar(expected: Any, data: object, where: str) -> object:
    if expected is float and isinstance(data, (int, float)) and not isinstance(data, bool):
        _require(abs(data) <= 1e300, f"{where}: expected a finite number; found {_short(data)}.")
        return float(data)
    if expected in (str, bool, int) and type(data) is expected:
        _require(not isinstance(data, int) or abs(data) < 2**63, f"{where}: expected a whole number that fits 64 bits.")
        return data
    name = getattr(expected, "__name__", str(expected))
    raise ConfigurationError(f"{where}: expected {name}; found {_short(data)}.")


def _decode_union(kinds: tuple[Any, ...], data: object, where: str) -> Any:
    if data is None and types.NoneType in kinds:
        return None
    rest = [kind for kind in kinds if kind is not types.NoneType]
    if isinstance(data, dict):
        records = [kind for kind in rest if dataclasses.is_dataclass(kind)]
        # The record that shares the most keys: its own error then names the key that is wrong.
        rest = sorted(records, key=lambda kind: -len(data.keys() & {f.name for f in dataclasses.fields(kind)}))
    elif len(rest) > 1:
        rest = [kind for kind in rest if type(data) is kind] or rest
    _require(bool(rest), f"{where}: expected another kind of value; found {_short(data)}.")
    return decode(rest[0], data, where)


def _decode_dataclass(cls: type[Any], data: object, where: str) -> Any:
    if not isinstance(data, dict):
        raise ConfigurationError(f"{where}: expected an object; found {_short(data)}.")
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}
    for key in data:
        if key not in fields:
            close = difflib.get_close_matches(str(key), list(fields), n=1)
            advice = f" Did you mean {close[0]!r}?" if close else ""
            raise ConfigurationError(f"{where}: expected the keys {', '.join(fields)}; found {key!r}.{advice}")
    missing = [name for name, f in fields.items() if name not in data and f.default is dataclasses.MISSING]
    _require(not missing, f"{where}: expected the keys {', '.join(fields)}; {', '.join(missing)} missing.")
    values = {name: decode(hints[name], value, f"{where}.{name}") for name, value in data.items()}
    try:
        return cls(**values)
    except ConfigurationError as error:
        raise type(error)(f"{where}: {error}") from error


def _short(data: object) -> str:
    text = repr(data)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigurationError(message)
