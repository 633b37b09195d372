"""Writes frozen dataclasses as versioned JSON documents, and reads them back; an error names the place of a fault."""

from __future__ import annotations

import dataclasses
import functools
import json
import types
import typing
from typing import Any, Literal, TypeVar, get_args, get_origin

from composer.wording import did_you_mean, require, shortened
from pearl.errors import ConfigurationError

_T = TypeVar("_T")

_LARGEST = 1e300  # of a number


def to_document(value: Any, name: str, version: int, indent: int | None = 2) -> str:
    """The frozen dataclass `value` as JSON, after the name and the version of the document's format."""
    document = {"format": name, "version": version, **_fields_of(value)}
    return json.dumps(document, indent=indent, allow_nan=False, default=_fields_of)


def json_of(value: Any) -> str:
    """The value, in which there may be frozen dataclasses, as JSON on one line."""
    return json.dumps(value, allow_nan=False, default=_fields_of)


def document_of(name: str, version: int, **parts: str) -> str:
    """The document on one line that `to_document` makes of a value whose fields are `parts`, each as JSON already."""
    texts = {"format": json_of(name), "version": json_of(version), **parts}
    return f"{{{', '.join(f'{json_of(key)}: {text}' for key, text in texts.items())}}}"


def _fields_of(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def from_document(cls: type[_T], text: str, name: str, version: int) -> _T:
    """Read the JSON document of a frozen dataclass; ConfigurationError says which value has the wrong type."""
    document = _parse(text, name, version)
    return typing.cast("_T", decode(cls, {k: v for k, v in document.items() if k not in ("format", "version")}, name))


def format_of(text: str) -> object:
    """The name of the format of a JSON document; None if it has none, or is not JSON."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return document.get("format") if isinstance(document, dict) else None


def _parse(text: str, name: str, version: int) -> dict[str, Any]:
    """The JSON object in `text`, which must be a document of this format and version."""

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
    except (ValueError, RecursionError) as error:  # ValueError also for a number of thousands of digits
        raise ConfigurationError(f"Expected a {name} document; found text that is not JSON ({error}).") from error
    found = document.get("format") if isinstance(document, dict) else type(document).__name__
    require(found == name, f"Expected a JSON document of format {name!r}; found {found!r}.")
    require(
        type(document.get("version")) is int and document["version"] == version,
        f"This version reads {name} version {version}; found {document.get('version')!r}. Write the file again.",
    )
    return typing.cast("dict[str, Any]", document)


def decode(expected: Any, data: object, where: str) -> Any:
    """Build a value of the type `expected` from JSON data.

    Handles frozen dataclasses, tuples, literals, unions of dataclasses or with None, and the four scalars. An alias in
    a tuple must not be a text, which Python 3.10 leaves as it is. A ConfigurationError names `where`, the path of the
    value in the document.
    """
    if dataclasses.is_dataclass(expected) and isinstance(expected, type):
        return _decode_dataclass(expected, data, where)
    origin = get_origin(expected)
    if origin in (typing.Union, types.UnionType):
        return _decode_union(get_args(expected), data, where)
    if origin is Literal:
        accepted = get_args(expected)
        if any(type(data) is type(value) and data == value for value in accepted):  # True == 1
            return data
        raise ConfigurationError(f"{where}: expected one of {', '.join(map(repr, accepted))}; found {_short(data)}.")
    if origin is tuple:
        kinds = get_args(expected)
        if not isinstance(data, list):
            raise ConfigurationError(f"{where}: expected a list; found {_short(data)}.")
        if kinds == (float, Ellipsis) and all(type(item) is float and abs(item) <= _LARGEST for item in data):
            return tuple(data)  # samples: most of a calibration store
        if kinds[-1] is Ellipsis:
            kinds = (kinds[0],) * len(data)
        if len(data) != len(kinds):
            raise ConfigurationError(f"{where}: expected {len(kinds)} items; found {_short(data)}.")
        return tuple(decode(kind, data[i], f"{where}[{i}]") for i, kind in enumerate(kinds))
    return _decode_scalar(expected, data, where)


def _decode_scalar(expected: Any, data: object, where: str) -> object:
    if expected is float and isinstance(data, (int, float)) and not isinstance(data, bool):
        if abs(data) <= _LARGEST:
            return float(data)
        raise ConfigurationError(f"{where}: expected a finite number; found {_short(data)}.")
    if expected in (str, bool, int) and type(data) is expected:
        require(not isinstance(data, int) or abs(data) < 2**63, f"{where}: expected a whole number that fits 64 bits.")
        return data
    name = getattr(expected, "__name__", str(expected))
    raise ConfigurationError(f"{where}: expected {name}; found {_short(data)}.")


def _decode_union(kinds: tuple[Any, ...], data: object, where: str) -> Any:
    if data is None and types.NoneType in kinds:
        return None
    rest = [kind for kind in kinds if kind is not types.NoneType]
    if isinstance(data, dict):
        records = [kind for kind in rest if dataclasses.is_dataclass(kind)]
        # Take the record that shares the most keys, so that its error names the wrong key.
        rest = sorted(records, key=lambda kind: -len(data.keys() & {f.name for f in dataclasses.fields(kind)}))
    elif len(rest) > 1:
        rest = [kind for kind in rest if type(data) is kind] or rest
    if not rest:
        raise ConfigurationError(f"{where}: expected another kind of value; found {_short(data)}.")
    return decode(rest[0], data, where)


def _decode_dataclass(cls: type[Any], data: object, where: str) -> Any:
    if not isinstance(data, dict):
        raise ConfigurationError(f"{where}: expected an object; found {_short(data)}.")
    hints = _hints(cls)  # type: ignore[arg-type]  # classes are hashable
    fields = {f.name: f for f in dataclasses.fields(cls)}
    for key in data:
        if key not in fields:
            advice = did_you_mean(key, fields)
            raise ConfigurationError(f"{where}: expected the keys {', '.join(fields)}; found {key!r}.{advice}")
    if missing := [name for name, f in fields.items() if name not in data and f.default is dataclasses.MISSING]:
        raise ConfigurationError(f"{where}: expected the keys {', '.join(fields)}; {', '.join(missing)} missing.")
    values = {name: decode(hints[name], value, f"{where}.{name}") for name, value in data.items()}
    try:
        return cls(**values)
    except ConfigurationError as error:
        raise type(error)(f"{where}: {error}") from error


@functools.cache
def _hints(cls: Any) -> dict[str, Any]:
    return typing.get_type_hints(cls)  # compiles each annotation


def _short(data: object) -> str:
    return shortened(repr(data))
