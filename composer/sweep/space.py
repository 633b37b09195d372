"""The settings that a sweep searches: ranges of numbers, and choices."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from composer.spec_overrides import parse_value, toml_text
from composer.wording import did_you_mean
from pearl.errors import ConfigurationError

if TYPE_CHECKING:
    import optuna

_RANGE_KEYS = ("low", "high", "log", "step", "kind")
_KINDS = ("int", "float")
_FORMS = (
    "{ low = 1e-4, high = 1e-2, log = true }, { low = 1, high = 8 } (whole numbers), or { choices = [32, 64, 128] }"
)


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`, both included; `step` 0: all of them. `name` is "table.key"."""

    name: str
    low: float
    high: float
    log: bool
    step: float
    whole: bool

    def suggest(self, trial: optuna.Trial) -> Any:
        """The trial's value."""
        if self.whole:
            return trial.suggest_int(self.name, int(self.low), int(self.high), step=int(self.step or 1), log=self.log)
        return trial.suggest_float(self.name, self.low, self.high, step=self.step or None, log=self.log)

    def value(self, stored: Any) -> Any:
        """The value of what a study stores."""
        return stored

    @property
    def ends(self) -> tuple[Any, ...]:
        """Values that must be possible, if all are."""
        return self.low, self.high

    @property
    def text(self) -> str:
        """The range in words."""
        how = f"{', whole numbers' if self.whole else ''}{', logarithmic' if self.log else ''}"
        return f"{self.low:g} to {self.high:g}{how}{f', in steps of {self.step:g}' if self.step else ''}"


@dataclass(frozen=True)
class Choices:
    """One of `values`, which may be lists and tables. A study stores them as TOML writes them."""

    name: str
    values: tuple[Any, ...]

    def suggest(self, trial: optuna.Trial) -> Any:
        """The trial's value."""
        return self.value(trial.suggest_categorical(self.name, [toml_text(value) for value in self.values]))

    def value(self, stored: Any) -> Any:
        """The value of what a study stores."""
        return parse_value(stored)

    @property
    def ends(self) -> tuple[Any, ...]:
        """Values that must be possible: all."""
        return self.values

    @property
    def text(self) -> str:
        """The choices in words."""
        return f"one of {', '.join(map(toml_text, self.values))}"


Parameter: TypeAlias = "Range | Choices"


def parameter(name: str, found: object, where: str) -> Parameter:
    """The parameter that a table describes; ConfigurationError, beginning with `where`, says what is wrong."""
    if not isinstance(found, Mapping):
        raise ConfigurationError(f"{where}: expected {_FORMS}; found {found!r:.80}.")
    if "choices" in found:
        return _choices(name, found, where)
    for key in found:
        if key not in _RANGE_KEYS:
            hint = did_you_mean(key, (*_RANGE_KEYS, "choices"))
            raise ConfigurationError(f"{where}: expected {_FORMS}; found the key {key!r}.{hint}")
    for key in ("low", "high"):
        if key not in found:
            raise ConfigurationError(f"{where}: expected {_FORMS}; found no {key!r}.")
    return _range(name, found, where)


def _choices(name: str, found: Mapping[str, Any], where: str) -> Choices:
    values = found["choices"]
    if len(found) > 1 or not isinstance(values, list) or len(values) < 2:
        raise ConfigurationError(
            f"{where}: choices are a list of at least two values, and the only key; found {dict(found)!r:.100}."
        )
    texts = [toml_text(value) for value in values]
    if twice := next((text for text in texts if texts.count(text) > 1), None):
        raise ConfigurationError(f"{where}: each choice must differ from the others; found {twice} twice.")
    return Choices(name, tuple(values))


def _range(name: str, found: Mapping[str, Any], where: str) -> Range:
    low, high, step, log = found["low"], found["high"], found.get("step", 0), found.get("log", False)
    for key, value in (("low", low), ("high", high), ("step", step)):
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ConfigurationError(f"{where}.{key}: expected a number; found {value!r:.80}.")
    if not isinstance(log, bool):
        raise ConfigurationError(f"{where}.log: expected true or false; found {log!r:.80}.")
    kind = found.get("kind", "int" if isinstance(low, int) and isinstance(high, int) else "float")
    if kind not in _KINDS:
        raise ConfigurationError(f'{where}.kind: expected "int" or "float"; found {kind!r:.80}.')
    whole = kind == "int"
    if whole and any(value != int(value) for value in (low, high, step)):
        raise ConfigurationError(f"{where}: low, high and step of whole numbers are whole; found {dict(found)!r:.100}.")
    if not low < high:
        raise ConfigurationError(f"{where}: low must be less than high; found low = {low:g}, high = {high:g}.")
    if not 0 <= step <= high - low or ("step" in found and not step):
        raise ConfigurationError(f"{where}.step: expected a number above 0, at most high - low; found {step:g}.")
    if step and not math.isclose(round((high - low) / step) * step, high - low, rel_tol=1e-9):
        last = low + math.floor((high - low) / step) * step
        raise ConfigurationError(
            f"{where}.step: steps of {step:g} from {low:g} end at {last:g}: high = {high:g} would never be tried. "
            f"Set high to {last:g} or {last + step:g}, or choose a step that divides high - low."
        )
    if log and (low <= 0 or step):
        what = f"low = {low:g}" if low <= 0 else f"step = {step:g}"
        raise ConfigurationError(f"{where}: a logarithmic range has a low above 0, and no step; found {what}.")
    return Range(name, low, high, log, step, whole) if whole else Range(name, float(low), float(high), log, step, whole)
