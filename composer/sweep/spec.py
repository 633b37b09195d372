"""Reads a sweep: a composition file with the tables [sweep] and [search.TABLE]."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from composer.spec_file import load_spec, read_tables
from composer.sweep.space import Parameter, Range, parameter
from composer.wording import did_you_mean
from pearl.errors import ConfigurationError, PearlError
from pearl.runtime.options import MOST_SEED

SEARCHED = ("trainer", "training", "replay", "rollout", "actors")
_OBJECTIVES: Mapping[str, Callable[[Sequence[float]], float]] = {"mean": statistics.fmean, "median": statistics.median}
_SCORES = ("last", "best")
_PRUNERS = ("median", "none")


@dataclass(frozen=True, kw_only=True)
class SweepSpec:
    """A sweep of the composition file `path`.

    The score of a run is the mean return of its last or best weights over new episodes; the `objective` of a trial is
    the mean or median of its seeds' scores, and is maximised. The first `startup_trials` are random and never pruned;
    none is pruned in the first share `warmup` of a run. `timesteps` and `eval_interval` are those of every run, in
    environment steps.
    """

    path: Path
    space: tuple[Parameter, ...]
    fixed: Mapping[str, Any]
    identity: str
    timesteps: int
    eval_interval: int
    seeds: tuple[int, ...] = (1,)
    objective: str = "mean"
    score: str = "last"
    pruner: str = "median"
    startup_trials: int = 10
    warmup: float = 0.25
    sampler_seed: int = 0

    def together(self, scores: Sequence[float]) -> float:
        """The objective of these scores."""
        return float(_OBJECTIVES[self.objective](scores))

    @property
    def evaluations(self) -> int:
        """About how many evaluations a run has."""
        return max(1, -(-self.timesteps // self.eval_interval))


def read_sweep(path: str | Path) -> SweepSpec:
    """Read and check a sweep; imports what its composition names, and makes its environment.

    Both ends of all ranges, and each choice, are composed as far as that goes without measuring. Raises
    ConfigurationError that names the file, the table and the key.
    """
    file = Path(path)
    document = read_tables(file)
    options = _options(file, document.get("sweep", {}))
    space = _space(file, document.get("search"))
    program = document.get("program", {})
    first = {one.name: one.ends[0] for one in space}
    _check(file, first, "the lowest values and first choices")
    _, stated = load_spec(file, progress=False, overrides=first)
    for one in space:
        _check_parameter(file, document["search"], first, one)
    if stated.eval_episodes == 0:
        raise ConfigurationError(
            f"{file}, [program] eval_episodes: evaluations score the trials of a sweep; found 0. Leave it out."
        )
    interval = stated.eval_interval or max(1, stated.timesteps // 20)
    fixed: dict[str, Any] = {"program.eval_interval": interval}
    if "until_return" not in program:
        fixed["program.until_return"] = "none"  # a run that ends at the goal says nothing of better settings
    return SweepSpec(
        path=file,
        space=space,
        fixed=fixed,
        identity=json.dumps({**document, "program": {**program, **fixed}}, sort_keys=True, default=str),
        timesteps=stated.timesteps,
        eval_interval=interval,
        **options,
    )


def _options(file: Path, table: Mapping[str, Any]) -> dict[str, Any]:
    """The values of [sweep], checked."""
    checks: dict[str, tuple[Callable[[Any], bool], str]] = {
        "seeds": (_are_seeds, "a list of different whole numbers from 0, such as [1, 2, 3]"),
        "objective": (lambda v: v in _OBJECTIVES, _one_of(tuple(_OBJECTIVES))),
        "score": (lambda v: v in _SCORES, _one_of(_SCORES)),
        "pruner": (lambda v: v in _PRUNERS, _one_of(_PRUNERS)),
        "startup_trials": (lambda v: type(v) is int and v >= 0, "a whole number of at least 0"),
        "warmup": (lambda v: type(v) in (int, float) and 0 <= v <= 1, "a share of a run, from 0 to 1"),
        "sampler_seed": (lambda v: type(v) is int and 0 <= v < 2**32, "a whole number from 0, below 2**32"),
    }
    for key, value in table.items():
        if key not in checks:
            raise ConfigurationError(
                f"{file}, [sweep]: expected the keys {', '.join(checks)}; found {key!r}.{did_you_mean(key, checks)}"
            )
        fits, expected = checks[key]
        if not fits(value):
            raise ConfigurationError(f"{file}, [sweep] {key}: expected {expected}; found {value!r:.80}.")
    return {key: tuple(value) if key == "seeds" else value for key, value in table.items()}


def _are_seeds(value: object) -> bool:
    if not isinstance(value, list) or not value or any(type(seed) is not int for seed in value):
        return False
    return len(set(value)) == len(value) and all(0 <= seed <= MOST_SEED for seed in value)


def _one_of(names: tuple[str, ...]) -> str:
    return " or ".join(f'"{name}"' for name in names)


def _space(file: Path, table: object) -> tuple[Parameter, ...]:
    tables = {} if table is None else table
    if not isinstance(tables, dict) or not all(isinstance(found, dict) and found for found in tables.values()):
        raise ConfigurationError(
            f"{file}, [search]: expected tables [search.TABLE] with a range or choices for each setting; found "
            f"{table!r:.80}."
        )
    if not tables:
        raise ConfigurationError(
            f"{file}: a sweep needs settings to search, such as [search.trainer] with learning_rate = {{ low = 1e-4, "
            "high = 1e-2, log = true }."
        )
    for name in tables:
        if name not in SEARCHED:
            raise ConfigurationError(
                f"{file}, [search]: expected {', '.join(f'[search.{one}]' for one in SEARCHED)}; found "
                f"[search.{name}].{did_you_mean(name, SEARCHED)}"
            )
    return tuple(
        parameter(f"{name}.{key}", found, f"{file}, [search.{name}] {key}")
        for name, keys in tables.items()
        for key, found in keys.items()
    )


def _check_parameter(file: Path, search: Mapping[str, Any], first: Mapping[str, Any], one: Parameter) -> None:
    where = f"{file}, [search.{one.name.replace('.', '] ', 1)}"
    for value in one.ends[1:]:
        _check(file, {**first, one.name: value}, f"{one.name} = {value}")
    table, _, key = one.name.partition(".")
    is_meant = isinstance(one, Range) and search[table][key].get("kind") is not None
    if isinstance(one, Range) and one.whole and not is_meant and _takes_reals(file, first, one):
        raise ConfigurationError(
            f"{where}: the setting takes all numbers, but low = {one.low:g} and high = {one.high:g} search whole ones: "
            f'write low = {float(one.low)}, or kind = "int" to mean it.'
        )


def _takes_reals(file: Path, first: Mapping[str, Any], one: Range) -> bool:
    try:
        load_spec(file, progress=False, overrides={**first, one.name: one.low + 0.5})[0].check()
    except PearlError:
        return False
    return True


def _check(file: Path, values: Mapping[str, Any], what: str) -> None:
    """Compose with these values, as far as that goes without measuring."""
    try:
        load_spec(file, progress=False, overrides=values)[0].check()
    except PearlError as error:
        raise type(error)(f"{file}, [search] with {what}: {error}") from error
