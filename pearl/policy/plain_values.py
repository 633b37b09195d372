"""Settings and spaces as JSON, and back; nothing that is read names code."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, TypeAlias

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from pearl import exploration
from pearl.errors import PolicyError
from pearl.schedules import names_code

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"

_EXPLORATIONS = {
    kind.__name__: kind
    for kind in (
        exploration.EpsilonGreedy,
        exploration.GaussianNoise,
        exploration.OrnsteinUhlenbeck,
        exploration.PolicySampling,
    )
}


def value_to_json(value: object) -> Json:
    """A setting: None, numbers, texts, tuples, lists, mappings and exploration settings; PolicyError for others."""
    if isinstance(value, np.generic):
        value = value.item()
    if type(value) is float and not math.isfinite(value):
        return {"float": str(value)}  # JSON has no word for it
    if value is None or type(value) in (bool, int, float, str):
        return value  # type: ignore[return-value]
    if isinstance(value, list):
        return [value_to_json(item) for item in value]
    if isinstance(value, tuple):
        return {"tuple": [value_to_json(item) for item in value]}
    if isinstance(value, Mapping):
        return {"mapping": [[value_to_json(key), value_to_json(item)] for key, item in value.items()]}
    value = exploration.without_code(value)
    if type(value) in _EXPLORATIONS.values():
        fields = {f.name: value_to_json(getattr(value, f.name)) for f in dataclasses.fields(value)}  # type: ignore[arg-type]
        return {"exploration": type(value).__name__, **fields}
    raise PolicyError(f"{value!r:.80} of type {type(value).__name__} cannot be kept with a policy: use plain values.")


def value_from_json(found: Json) -> Any:
    """The inverse; PolicyError for anything that `value_to_json` does not write."""
    if isinstance(found, list):
        return [value_from_json(item) for item in found]
    if not isinstance(found, dict):
        return found
    try:
        (kind, content), *fields = found.items()
        if kind == "exploration":
            made = _EXPLORATIONS[str(content)](**{name: value_from_json(value) for name, value in fields})
            if names_code(schedule := exploration.schedule_of(made)):
                raise ValueError(f"its schedule names code, {schedule!r}")
            return made
        if not fields and kind == "float":
            return float(str(content))
        if not fields and kind == "tuple" and isinstance(content, list):
            return tuple(value_from_json(item) for item in content)
        if not fields and kind == "mapping" and isinstance(content, list):
            pairs: list[Any] = content
            return {value_from_json(key): value_from_json(value) for key, value in pairs}
    except (ValueError, TypeError, KeyError) as error:
        raise PolicyError(f"the setting {found!r:.80} is malformed ({type(error).__name__}: {error})") from error
    raise PolicyError(f"the setting {found!r:.80} is malformed")


def settings_to_json(settings: Mapping[str, object]) -> dict[str, Json]:
    """Settings by name."""
    return {str(name): value_to_json(value) for name, value in settings.items()}


def settings_from_json(found: Any) -> dict[str, Any]:
    """The inverse."""
    if not isinstance(found, dict):
        raise PolicyError(f"settings map names to values; found {found!r:.80}")
    return {name: value_from_json(value) for name, value in found.items()}


def space_to_json(space: gym.Space[Any]) -> dict[str, Json]:
    """A Box, Discrete, MultiDiscrete or MultiBinary space, or a Dict or Tuple of such; PolicyError for others."""
    if isinstance(space, spaces.Box):
        bounds = {"low": _compact(space.low), "high": _compact(space.high)}
        return {"kind": "Box", "shape": list(space.shape), "dtype": str(space.dtype), **bounds}
    if isinstance(space, spaces.Discrete):
        return {"kind": "Discrete", "n": int(space.n), "start": int(space.start), "dtype": str(space.dtype)}
    if isinstance(space, spaces.MultiDiscrete):
        start = np.asarray(space.start).tolist()
        return {"kind": "MultiDiscrete", "nvec": space.nvec.tolist(), "start": start, "dtype": str(space.dtype)}
    if isinstance(space, spaces.MultiBinary):
        return {"kind": "MultiBinary", "n": space.n if isinstance(space.n, int) else list(space.n)}
    if isinstance(space, spaces.Dict):
        return {"kind": "Dict", "parts": [[str(name), space_to_json(part)] for name, part in space.items()]}
    if isinstance(space, spaces.Tuple):
        return {"kind": "Tuple", "parts": [space_to_json(part) for part in space]}
    raise PolicyError(
        f"The space {space} cannot be kept with a policy; Box, Discrete, MultiDiscrete and MultiBinary can, and Dict "
        "and Tuple of these."
    )


def space_from_json(found: Any) -> gym.Space[Any]:
    """The inverse; PolicyError for anything else."""
    try:
        kind = found["kind"]
        if kind == "Box":
            shape, dtype = tuple(found["shape"]), np.dtype(str(found["dtype"]))
            low, high = (_expanded(found[name], shape, dtype) for name in ("low", "high"))
            return spaces.Box(low, high, shape, dtype.type)
        if kind == "Discrete":
            dtype = np.dtype(str(found["dtype"]))
            # int64 is the only one before Gymnasium 1.3.
            kept: dict[str, Any] = {} if dtype == np.int64 else {"dtype": dtype.type}
            return spaces.Discrete(found["n"], start=found["start"], **kept)
        if kind == "MultiDiscrete":
            dtype = np.dtype(str(found["dtype"]))
            return spaces.MultiDiscrete(np.array(found["nvec"]), dtype.type, start=np.array(found["start"]))
        if kind == "MultiBinary":
            return spaces.MultiBinary(found["n"])
        if kind == "Dict":
            return spaces.Dict([(str(name), space_from_json(part)) for name, part in found["parts"]])
        if kind == "Tuple":
            return spaces.Tuple([space_from_json(part) for part in found["parts"]])
    except (ValueError, TypeError, KeyError, AssertionError, OverflowError) as error:
        raise PolicyError(f"the space {found!r:.80} is malformed ({type(error).__name__}: {error})") from error
    raise PolicyError(f"the space {found!r:.80} is of an unknown kind")


def _compact(bounds: np.ndarray) -> Json:
    """One number if all are equal, else a flat list; infinite ones as text."""
    flat = bounds.ravel()
    if flat.size and (flat == flat[0]).all():
        return _number(flat[0].item())
    return [_number(value) for value in flat.tolist()]


def _number(value: float) -> Json:
    return value if math.isfinite(value) else str(value)


def _expanded(found: Json, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    if isinstance(found, list):
        return np.array([float(str(v)) if isinstance(v, str) else v for v in found], dtype).reshape(shape)
    return np.full(shape, float(found) if isinstance(found, str) else found, dtype)
