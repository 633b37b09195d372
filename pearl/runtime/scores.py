"""The scores of a run's last and best weights in words, from its summary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def last_text(summary: Mapping[str, Any]) -> str:
    """Step and mean return of the last weights."""
    last = summary.get("last")
    if not isinstance(last, dict):
        return "none"
    return f"step {number(last, 'step'):,.0f}, " + (_score(last) if "mean" in last else "not evaluated")


def best_text(summary: Mapping[str, Any]) -> str:
    """Step and mean return of the best weights: on new episodes, and apart from that on those that selected them."""
    best = summary.get("best")
    if not isinstance(best, dict):
        return "none: nothing was evaluated on the way"
    again = f"{_score(best)} that did not select them" if "mean" in best else "not evaluated again"
    selected = number(best, "selected_mean")
    return (
        f"step {number(best, 'step'):,.0f}, {again}; selected by {selected:.{decimals(selected)}f} "
        f"over {number(best, 'selected_episodes'):.0f}"
    )


def evaluated_in_text(summary: Mapping[str, Any]) -> str:
    """The environment of evaluations and its arguments; empty if it is the training's."""
    environment = summary.get("environment")
    name, kwargs = summary.get("evaluation_environment", environment), summary.get("evaluation_env_kwargs")
    if name == environment and not isinstance(kwargs, dict):
        return ""
    arguments = ", ".join(f"{key}={value!r}" for key, value in kwargs.items()) if isinstance(kwargs, dict) else ""
    return f"{name} with {arguments}" if arguments else str(name)


def _score(found: Mapping[str, Any]) -> str:
    mean, std, least, most = (number(found, key) for key in ("mean", "std", "min", "max"))
    places, episodes = decimals(least, most), number(found, "episodes")
    return (
        f"mean return {mean:.{places}f} +- {std:.{places}f} ({least:.{places}f} to {most:.{places}f}) "
        f"over {episodes:.0f} greedy episodes"
    )


def decimals(*returns: float) -> int:
    """Decimal places that tell such returns apart: some environments' are within 1, others' in the thousands."""
    largest = max(abs(value) for value in returns)
    return 1 if largest >= 10 or largest == 0 else 2 if largest >= 1 else 3


def number(values: Mapping[str, Any], key: str) -> float:
    """The number `key` of a JSON object; NaN if it is missing or no number."""
    value = values.get(key)
    try:
        return float(value) if isinstance(value, int | float) else float("nan")
    except OverflowError:  # a whole number of hundreds of digits
        return float("nan")
