"""Writes values, docstrings and imports as formatted Python source."""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Collection, Mapping, Sequence

from pearl import exploration
from pearl.errors import GenerationError

EXPLORATIONS = (
    exploration.EpsilonGreedy,
    exploration.GaussianNoise,
    exploration.OrnsteinUhlenbeck,
    exploration.PolicySampling,
)
_LINE_LENGTH = 120


def literal(value: object) -> str:
    """`value` as Python source on one line; only plain values and exploration settings have one."""
    if type(value) is float and not math.isfinite(value):
        return f'float("{value}")'
    if value is None or type(value) in (bool, int, float):
        return repr(value)
    if isinstance(value, str):
        return _quoted(value)
    if isinstance(value, os.PathLike):
        return _quoted(os.fspath(value))
    if isinstance(value, (tuple, list, Mapping, *EXPLORATIONS)):
        opening, items, closing = _parts(value)
        single = "," if isinstance(value, tuple) and len(items) == 1 else ""
        return opening + ", ".join(label + literal(item) for label, item in items) + single + closing
    raise GenerationError(
        f"The setting value {value!r} of type {type(value).__name__} cannot be written into a program. "
        "Use plain values (numbers, text, tuples), or set it in a subclass of the trainer."
    )


def laid_out(value: object, column: int, indent: int = 0) -> str:
    """`value` as Python source that starts at `column`, on several lines if it does not fit one.

    Further lines are indented by at least `indent`. There is room for a comma, as after an argument.
    """
    flat = literal(value)
    if column + len(flat) + 1 <= _LINE_LENGTH:
        return flat
    pad = " " * (indent + 4)
    if isinstance(value, str):
        words = re.findall(r"\S*\s*", value)
        if len(words) <= 2:  # one word, and the empty end
            return flat
        fits = len(pad) + len(flat) <= _LINE_LENGTH
        lines = [pad + flat] if fits else [pad + _quoted(t) for t in _wrapped(words, _LINE_LENGTH - len(pad) - 2)]
        return "\n".join(["(", *lines, " " * indent + ")"])
    if isinstance(value, (tuple, list, Mapping, *EXPLORATIONS)):
        opening, items, closing = _parts(value)
        lines = [f"{pad}{label}{laid_out(item, len(pad) + len(label), indent + 4)}," for label, item in items]
        return "\n".join([opening, *lines, " " * indent + closing])
    return flat


def _quoted(text: str) -> str:
    quote = "'" if text.count('"') > text.count("'") else '"'
    escaped = (("\\" + c if c == quote else c) if c in "'\"" else repr(c)[1:-1] for c in map(str, text))
    return quote + "".join(escaped) + quote


def _wrapped(words: Sequence[str], width: int) -> list[str]:
    lines = [""]
    for word in words:
        if lines[-1] and len(_quoted(lines[-1] + word)) > width:
            lines.append("")
        lines[-1] += word
    return lines


def _parts(value: object) -> tuple[str, list[tuple[str, object]], str]:
    """Opening bracket, labelled items and closing bracket of a composite value."""
    if isinstance(value, tuple):
        return "(", [("", item) for item in value], ")"
    if isinstance(value, list):
        return "[", [("", item) for item in value], "]"
    if isinstance(value, Mapping):
        return "{", [(f"{literal(k)}: ", item) for k, item in value.items()], "}"
    assert isinstance(value, EXPLORATIONS)
    fields = [(f"{f.name}=", getattr(value, f.name)) for f in dataclasses.fields(value)]
    return f"{type(value).__name__}(", fields, ")"


def settings_literal(values: Mapping[str, object]) -> str:
    """The trainer's settings as a dictionary with one setting per line."""
    if not values:
        return "{}"
    items = ((f"    {literal(k)}: ", v) for k, v in values.items())
    return "{\n" + "".join(f"{label}{laid_out(v, len(label), 4)},\n" for label, v in items) + "}"


def documented(text: str) -> str:
    """`text` as a part of one line of a docstring."""
    escaped = "".join("\\\\" if c == "\\" else c if c.isprintable() else repr(c)[1:-1] for c in text)
    return escaped.replace('"', '\\"') if '"""' in escaped or escaped.endswith('"') else escaped


def imports(modules: Mapping[str, Collection[str]], *, expanded: Collection[str]) -> str:
    """Import statements in isort's order; modules in `expanded` get one line per name."""
    statements = []
    for module, names in sorted(modules.items()):
        if not names:
            continue
        constants_classes_functions = sorted(names, key=lambda n: (n[0].islower(), n))
        if module in expanded:
            lines = "".join(f"    {name},\n" for name in constants_classes_functions)
            statements.append(f"from {module} import (\n{lines})")
        else:
            statements.append(f"from {module} import {', '.join(constants_classes_functions)}")
    return "\n".join(statements)
