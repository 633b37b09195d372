"""Schedules of settings over a run, in one vocabulary for learning rates, PPO's clip range and exploration.

A schedule turns progress, from 0 to 1, into a factor of the setting's value:

- "constant": 1;
- "linear" or "cosine": from 1 to 0, or to `end` as the pair ("linear", end); the cosine is half a period
  (Loshchilov & Hutter 2017, Eq. 5, without restarts);
- ((share, factor), ...): straight lines between the factors at these shares, constant before the first and after the
  last; two pairs of the same share make a jump;
- a function of a module, from progress to the factor, or its name as "module:function".

All but the function itself are plain values, which programs, composition files and run folders can hold. A name is
imported, and nothing is evaluated.
"""

from __future__ import annotations

import bisect
import importlib
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

from pearl.error_place import described
from pearl.errors import ConfigurationError

PlainSchedule: TypeAlias = "str | tuple[str, float] | tuple[tuple[float, float], ...]"
Schedule: TypeAlias = "PlainSchedule | Callable[[float], float]"

EXPECTED = (
    '"constant", "linear" or "cosine", ("linear", end factor) or ("cosine", end factor), pairs of share and factor '
    'such as ((0.0, 1.0), (0.5, 0.1)), a function of a module, or its name as "module:function"'
)
_FALLING = ("linear", "cosine")
_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
_TRIED = (0.0, 0.5, 1.0)


def plain_schedule(schedule: object, setting: str = "schedule") -> PlainSchedule:
    """The same schedule as a plain value; ConfigurationError, naming `setting`, for a value that is no schedule."""
    advice = ""
    if isinstance(schedule, str):
        if schedule in ("constant", *_FALLING) or _NAME.fullmatch(schedule):
            return schedule
    elif isinstance(schedule, list | tuple):
        advice, plain = _of_numbers(schedule)
        if plain is not None:
            return plain
    elif callable(schedule):
        name = _name_of(getattr(schedule, "__func__", schedule))  # a function in the body of a class is a method
        if name is not None:
            return name
        advice = " Programs import a function by its name: write it with `def` at the top level of a .py file."
    raise ConfigurationError(f"{setting} must be {EXPECTED}; found {schedule!r}.{advice}")


def names_code(schedule: object) -> bool:
    """Whether a plain schedule names a function, which is imported when it is followed."""
    return isinstance(schedule, str) and ":" in schedule


def factor_at(schedule: Schedule, progress: float) -> float:
    """The factor of a schedule at the share `progress` of its way, which counts as at least 0 and at most 1.

    Raises ConfigurationError for a function that cannot be imported, fails, or returns no number of at least 0.
    """
    progress = min(1.0, max(0.0, progress))
    if isinstance(schedule, str):
        if schedule == "constant":
            return 1.0
        return _called(schedule, progress) if names_code(schedule) else _falling(schedule, 0.0, progress)
    if callable(schedule):
        return _called(schedule, progress)
    if isinstance(schedule[0], str):
        kind, end = schedule
        return _falling(str(kind), float(end), progress)
    return _between(schedule, progress)


def check_followed(schedule: Schedule) -> None:
    """Raise ConfigurationError if a function cannot be imported, or fails at the begin, the middle or the end."""
    if names_code(schedule):
        for progress in _TRIED:
            factor_at(schedule, progress)


def function_of(name: str) -> Any:
    """The function that "module:function" names; ConfigurationError if it cannot be imported."""
    module, _, function = name.partition(":")
    try:
        found = getattr(_module(module), function)
    except Exception as error:  # the user's module may raise anything
        raise ConfigurationError(
            f"The schedule {name!r} cannot be imported: {described(error)}. Its module must be next to the program or "
            "the script, or installed."
        ) from error
    if not callable(found):
        raise ConfigurationError(f"The schedule {name!r} must be a function of progress; found {found!r}.")
    return found


def _module(name: str) -> Any:
    # A script is not imported a second time under the name that programs will know it by.
    main = sys.modules.get("__main__")
    is_main = Path(getattr(main, "__file__", None) or "").stem == name and name not in sys.modules
    return main if is_main else importlib.import_module(name)


def _name_of(function: Any) -> str | None:
    """How a program names a function; None if it cannot."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    holder = sys.modules.get(module or "")
    if getattr(holder, name, None) is not function:  # also for names with dots: nested, and methods
        return None
    if module == "__main__":
        module = Path(getattr(holder, "__file__", None) or "").stem
    text = f"{module}:{name}"
    return text if _NAME.fullmatch(text) else None


def _of_numbers(found: list[Any] | tuple[Any, ...]) -> tuple[str, PlainSchedule | None]:
    """What is wrong, or the schedule."""
    if len(found) == 2 and found[0] in _FALLING:
        return "", (found[0], float(found[1])) if _is_factor(found[1]) else None
    if not found or not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in found):
        return "", None
    if not all(_is_factor(number) for pair in found for number in pair):
        return " Shares are from 0 to 1, factors at least 0.", None
    pairs = tuple((float(share), float(factor)) for share, factor in found)
    shares = [share for share, _ in pairs]
    if shares != sorted(shares) or shares[-1] > 1.0:
        return " Shares are of the run: from 0 to 1, and none below the one before.", None
    return "", pairs


def _is_factor(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0.0 <= value < math.inf


def _falling(kind: str, end: float, progress: float) -> float:
    if kind == "linear":
        return 1.0 + progress * (end - 1.0)
    return end + (1.0 - end) * 0.5 * (1.0 + math.cos(math.pi * progress))


def _between(pairs: tuple[tuple[float, float], ...], progress: float) -> float:
    after = bisect.bisect_right(pairs, progress, key=lambda pair: pair[0])
    if after == 0 or after == len(pairs):
        return pairs[0][1] if after == 0 else pairs[-1][1]
    (begin, first), (end, last) = pairs[after - 1], pairs[after]
    return first + (last - first) * (progress - begin) / (end - begin)


def _called(schedule: str | Callable[[float], float], progress: float) -> float:
    function = function_of(schedule) if isinstance(schedule, str) else schedule
    name = schedule if isinstance(schedule, str) else getattr(schedule, "__name__", schedule)
    try:
        found = function(progress)
        number = float(found)
    except Exception as error:  # the user's function may raise anything
        raise ConfigurationError(
            f"The schedule {name} must return a number of at least 0; at progress {progress:g} it failed: "
            f"{described(error)}."
        ) from error
    if not 0.0 <= number < math.inf:
        raise ConfigurationError(
            f"The schedule {name} must return a number of at least 0; at progress {progress:g} it returned {found!r}."
        )
    return number
