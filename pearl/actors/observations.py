"""How observations are prepared for trainers and policies: each is one array of float32, or of bytes.

Actors, evaluations and whoever loads a policy prepare observations here and nowhere else. `Dict`, `Tuple` and
`MultiBinary` observations are flattened, `Discrete` and `MultiDiscrete` ones become one-hot vectors, both by
Gymnasium's own `flatten`; arrays stay as they are. Bytes stay bytes; all other numbers become float32 when they are
stored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec

from pearl.errors import EnvError

if TYPE_CHECKING:
    AnyVectorWrapper = gym.vector.VectorWrapper[Any, Any, Any, Any, Any]
else:  # before Gymnasium 1.4, the class is not generic
    AnyVectorWrapper = gym.vector.VectorWrapper

_ONE_HOT = (spaces.Discrete, spaces.MultiDiscrete)
_NESTED = (spaces.Dict, spaces.Tuple)


def prepared_space(space: gym.Space[Any]) -> gym.Space[Any]:
    """The space of prepared observations; EnvError for a space that has no array of fixed size."""
    if not is_prepared(space):
        return space
    if (strange := _strange_part(space)) is not None:
        inside = "" if strange is space else f" in {space}"
        raise EnvError(
            f"Observations may be Box, MultiBinary, Discrete, MultiDiscrete, and Dict or Tuple of these; found "
            f"{strange}{inside}. Give a wrapper that makes arrays of them with set_wrappers([...]), such as a class of "
            "yours derived from gymnasium.ObservationWrapper."
        )
    return spaces.flatten_space(space)


def space_text(space: gym.Space[Any]) -> str:
    """The space in a line: bounds that differ from number to number are left out."""
    if isinstance(space, spaces.Box) and any((one != one.flat[0]).any() for one in (space.low, space.high) if one.size):
        return f"Box of shape {space.shape}, {space.dtype}"
    if isinstance(space, spaces.Dict):
        return f"Dict({', '.join(f'{name!r}: {space_text(part)}' for name, part in space.items())})"
    if isinstance(space, spaces.Tuple):
        return f"Tuple({', '.join(map(space_text, space))})"
    return " ".join(str(space).split())  # NumPy's arrays have several lines


def prepare(space: gym.Space[Any], obs: Any) -> np.ndarray:
    """One observation of the environment's own `space` as the array `prepared_space(space).shape` that policies take.

    The dtype is uint8 where the space's is, else float32. Raises EnvError, which names the part, for a value outside of
    the space, by its shape or by numbers that the space does not have.
    """
    if is_prepared(space):
        return np.asarray(_flat(space, obs), stored_dtype(prepared_space(space)))
    _check(space, obs, _UNNAMED, ())
    return np.asarray(obs, stored_dtype(space))


def are_unprepared(space: gym.Space[Any], obs: Any) -> bool:
    """Whether `obs` looks like one observation of the environment's own `space`, or a batch, rather than prepared ones.

    Numbers of `Discrete` and `MultiDiscrete` observations are integers; one-hot vectors that look alike must be floats.
    """
    if isinstance(space, spaces.Dict):
        return isinstance(obs, Mapping)
    if isinstance(space, spaces.Tuple):
        return isinstance(obs, tuple)
    if isinstance(obs, dict | tuple):
        return False
    try:
        found = np.asarray(obs)
    except ValueError:  # lists of different lengths
        return False
    shape = space.shape or ()
    return found.dtype.kind in "iub" and shape in (found.shape, found.shape[1:])


def prepare_batch(space: gym.Space[Any], obs: Any) -> tuple[np.ndarray, bool]:
    """Observations of the environment's own `space` as `prepare` makes them, `(batch, numbers)`; whether it was one.

    A batch is as a vector of environments returns it: of `Dict` and `Tuple` observations, one of each part. Raises
    EnvError, which names the part, for anything else.
    """
    parts: list[tuple[np.ndarray, bool]] = []
    _collect(space, obs, "the observation", parts)
    rows = {(len(part), single) for part, single in parts}
    if len(rows) != 1:
        sizes = ", ".join("1 observation" if single else f"a batch of {count}" for count, single in sorted(rows))
        raise EnvError(f"The parts of the observation must belong to one observation, or to one batch; found {sizes}.")
    arrays, dtype = [part for part, _ in parts], stored_dtype(prepared_space(space))
    with np.errstate(over="ignore"):
        return np.concatenate(arrays, axis=1, dtype=dtype, casting="unsafe"), rows.pop()[1]


def _collect(space: gym.Space[Any], obs: Any, where: str, parts: list[tuple[np.ndarray, bool]]) -> None:
    """Add the rows of each part, in the order of `spaces.flatten`."""
    if isinstance(space, spaces.Dict):
        if not isinstance(obs, Mapping) or set(obs) != set(space):
            found = f"the parts {', '.join(map(str, obs))}" if isinstance(obs, Mapping) else f"{type(obs).__name__}"
            raise EnvError(f"Expected a dictionary with the parts {', '.join(space)} as {where}; found {found}.")
        for name, part in space.items():
            _collect(part, obs[name], f"part {name!r} of {where}", parts)
    elif isinstance(space, spaces.Tuple):
        if not isinstance(obs, tuple | list) or len(obs) != len(space):
            raise EnvError(f"Expected a tuple of {len(space)} parts as {where}; found {obs!r:.80}.")
        for number, part in enumerate(space):
            _collect(part, obs[number], f"part {number} of {where}", parts)
    else:
        parts.append(_rows(space, obs, where))


def _rows(space: gym.Space[Any], obs: Any, where: str) -> tuple[np.ndarray, bool]:
    shape = space.shape or ()
    try:
        found = np.asarray(obs)
    except ValueError as error:
        raise EnvError(f"Expected {space}, or a batch of it, as {where}; found no array: {error}") from error
    if shape not in (found.shape, found.shape[1:]) or found.dtype.kind not in "iufb":
        raise EnvError(
            f"Expected {space}, or a batch of it, as {where}; found shape {found.shape} with dtype {found.dtype}."
        )
    single = found.shape == shape
    flat = found.reshape(1 if single else len(found), math.prod(shape))
    if not isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        if not _holds(space, flat):
            raise EnvError(f"Expected numbers of {space} as {where}; found {found!r:.80}.")
        return flat, single
    counts, start = np.ravel(space.n if isinstance(space, spaces.Discrete) else space.nvec), np.ravel(space.start)
    chosen = flat - start
    if found.dtype.kind == "f" or not ((chosen >= 0) & (chosen < counts)).all():
        raise EnvError(f"Expected whole numbers of {space} as {where}; found {found!r:.80}.")
    one_hot = np.zeros((len(flat), int(counts.sum())), np.float32)
    first = np.cumsum(counts) - counts  # of each number's choices
    one_hot[np.arange(len(flat))[:, None], chosen + first] = 1.0
    return one_hot, single


def stored_dtype(space: gym.Space[Any]) -> np.dtype[Any]:
    """The dtype in which observations of a prepared space are stored and given to policies."""
    return np.dtype(np.uint8 if space.dtype == np.uint8 else np.float32)


def preparation(space: gym.Space[Any]) -> str:
    """What is done to observations of `space`, as a sentence for the log; empty if nothing is."""
    if is_prepared(space):
        done = "encoded as one-hot vectors" if isinstance(space, _ONE_HOT) else "flattened"
        inside = " (numbers of Discrete parts as one-hot vectors)" if _has_numbers(space) else ""
        size = 0 if _strange_part(space) is not None else spaces.flatdim(space)
        return f"Observations {space_text(space)} are {done}{inside}: {size:,} numbers in a row."
    if space.dtype is not None and space.dtype not in (np.float32, np.uint8) and isinstance(space, spaces.Box):
        return f"Observations of {space.dtype} are converted to float32 once, in the Actors."
    return ""


def unprepared_space(vector: gym.vector.VectorEnv[Any, Any, Any]) -> gym.Space[Any]:
    """The space of the environments' own observations."""
    layer: Any = vector
    if isinstance(layer, _FlattenedVector):
        return layer.env.single_observation_space
    while (inner := getattr(layer, "envs", None)) is None and isinstance(layer, gym.vector.VectorWrapper):
        layer = layer.env
    return own_space(inner[0]) if inner else vector.single_observation_space


def own_space(env: gym.Env[Any, Any]) -> gym.Space[Any]:
    """The space of the own observations of a single environment with prepared ones."""
    return env.env.observation_space if isinstance(env, _Flattened) else env.observation_space


def prepare_env(env: gym.Env[Any, Any]) -> gym.Env[Any, Any]:
    """A single environment with prepared observations."""
    if not is_prepared(env.observation_space):
        return env
    prepared_space(env.observation_space)
    return _Flattened(env)


class _Flattened(gym.wrappers.FlattenObservation[Any, Any, Any]):
    """A class of its own, to be told from wrappers of the user."""

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        self._named = name_of(env.unwrapped.spec)

    def observation(self, observation: Any) -> np.ndarray:
        """The observation in a row."""
        return _flat(self.env.observation_space, observation, self._named)


def check_env(env: gym.Env[Any, Any]) -> gym.Env[Any, Any]:
    """An environment with prepared observations that raises EnvError for one that is not of its space.

    For vectors whose environments write into shared memory: there NumPy stretches and converts without a word.
    """
    return _Checked(env)


def check_whole_numbers(env: gym.Env[Any, Any]) -> gym.Env[Any, Any]:
    """`check_env` where observations are arrays of whole numbers: NumPy refuses floats there, but names nothing.

    A space of floats takes all numbers, and checks of each step would take time.
    """
    dtype = env.observation_space.dtype
    if isinstance(env, _Flattened) or dtype is None or dtype.kind == "f":
        return env
    return check_env(env)


class _Checked(gym.ObservationWrapper[Any, Any, Any]):
    """Refuses observations of another shape, and numbers that the space's dtype cannot hold."""

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        self._shape, self._named = env.observation_space.shape or (), name_of(env.unwrapped.spec)

    def observation(self, observation: Any) -> Any:
        """The same numbers, in the dtype of the space: Gymnasium's vectors refuse whole numbers in floats."""
        space = self.env.observation_space
        return np.asarray(check_observations(space, observation, self._shape, self._named), space.dtype)


def prepare_vector(vector: gym.vector.VectorEnv[Any, Any, Any]) -> gym.vector.VectorEnv[Any, Any, Any]:
    """A vector of environments with prepared observations."""
    if not is_prepared(vector.single_observation_space):
        return vector
    return _FlattenedVector(vector)


class _FlattenedVector(AnyVectorWrapper):
    """Flattens the observations of a vector, last ones (`final_obs`) too, which Gymnasium's own wrapper refuses."""

    def __init__(self, vector: gym.vector.VectorEnv[Any, Any, Any]) -> None:
        super().__init__(vector)
        self._space, self._named = vector.single_observation_space, name_of(vector.spec)
        self.single_observation_space = prepared_space(self._space)
        self.observation_space = gym.vector.utils.batch_space(self.single_observation_space, vector.num_envs)

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        obs, info = self.env.reset(seed=seed, options=options)
        return self._flattened(obs), info

    def step(self, actions: Any) -> Any:
        obs, reward, terminated, truncated, info = self.env.step(actions)
        if "final_obs" in info:
            final = np.zeros(self.observation_space.shape or (), self.single_observation_space.dtype)
            for env in np.flatnonzero(np.logical_or(terminated, truncated)).tolist():
                final[env] = _flat(self._space, one_of(info["final_obs"], env), self._named)
            info = {**info, "final_obs": final}
        return self._flattened(obs), reward, terminated, truncated, info

    def _flattened(self, obs: Any) -> np.ndarray:
        rows: list[Any] = [_flat(self._space, one_of(obs, env), self._named) for env in range(self.num_envs)]
        return np.stack(rows)


_UNNAMED = "The environment"


def name_of(known: EnvSpec | None) -> str:
    """The environment in messages, by its description."""
    return _UNNAMED if known is None else known.id


def _flat(space: gym.Space[Any], obs: Any, env: str = _UNNAMED) -> np.ndarray:
    """Gymnasium's `flatten`, which takes numbers that are not of the space for other ones: those raise EnvError."""
    _check(space, obs, env, ())
    return np.asarray(spaces.flatten(space, obs))


def _check(space: gym.Space[Any], obs: Any, env: str, path: tuple[str | int, ...]) -> None:
    """Raise EnvError for a missing part, another size, or a number that `space` has not; `path` leads to the part.

    Of a Box, only numbers that its dtype cannot hold are refused: bounds are often stated carelessly.
    """
    if isinstance(space, spaces.Dict):
        for name, part in space.spaces.items():
            if not isinstance(obs, Mapping) or name not in obs:
                found = f"{', '.join(map(str, obs))}" if isinstance(obs, Mapping) else repr(obs)
                raise _strange(env, path, f"a dictionary with the parts {', '.join(map(str, space))}", found)
            _check(part, obs[name], env, (*path, name))
    elif isinstance(space, spaces.Tuple):
        if not isinstance(obs, tuple | list) or len(obs) != len(space.spaces):
            raise _strange(env, path, f"a tuple of {len(space.spaces)} parts", repr(obs))
        for number, part in enumerate(space.spaces):
            _check(part, obs[number], env, (*path, number))
    elif isinstance(space, spaces.Discrete):
        one: Any = obs if isinstance(obs, int) else np.asarray(obs)
        if np.size(one) != 1 or _is_fraction(one) or not space.start <= one < space.start + space.n:
            raise _strange(env, path, f"a number of {space}", repr(obs))
    elif np.size(obs) != math.prod(space.shape or ()):
        raise _strange(env, path, f"an array of shape {space.shape}", f"shape {np.shape(obs)}")
    elif isinstance(space, spaces.MultiDiscrete):
        numbers = np.asarray(obs) - space.start
        if _is_fraction(numbers) or (numbers < 0).any() or (numbers >= space.nvec).any():
            raise _strange(env, path, f"numbers of {space}", repr(obs))
    elif not _holds(space, obs):
        raise _strange(env, path, f"numbers of {space}", repr(obs))


def _is_fraction(number: Any) -> bool:
    return not isinstance(number, int) and number.dtype.kind == "f"


def _holds(space: gym.Space[Any], obs: Any) -> bool:
    """Whether a Box or MultiBinary has a dtype that holds these numbers: NumPy makes others of 0.7, or 256 in bytes."""
    dtype, found = np.dtype(bool) if isinstance(space, spaces.MultiBinary) else space.dtype, np.asarray(obs)
    if dtype is None or dtype.kind == "f" or dtype == found.dtype:
        return True
    with np.errstate(invalid="ignore"):  # of NaN
        return bool((found.astype(dtype) == found).all())


def _strange(env: str, path: tuple[str | int, ...], expected: str, found: str) -> EnvError:
    where = f"part {'/'.join(map(str, path))} of an observation" if path else "an observation"
    return EnvError(
        f"{env} returned {where} that is not of its observation space: expected {expected}, found "
        f"{found:.200}. Correct the environment, or the space that it states."
    )


def require_shape(obs: Any, shape: tuple[int, ...], env: str) -> Any:
    """The observation of the environment named `env`; EnvError unless it has `shape`: NumPy would stretch it."""
    if np.shape(obs) != shape:
        raise EnvError(
            f"{env} returned an observation of shape {np.shape(obs)}; its observation space says {shape}. Return that "
            "shape from reset() and step(), also at the end of an episode."
        )
    return obs


def check_observations(space: gym.Space[Any], obs: Any, shape: tuple[int, ...], env: str) -> Any:
    """One or several prepared observations of `env`; EnvError unless they have `shape`, and numbers of the Box `space`.

    Numbers that the dtype of `space` can hold will do.
    """
    require_shape(obs, shape, env)
    if not _holds(space, obs):
        raise _strange(env, (), f"numbers of {space_text(space)}", repr(obs))
    return obs


def one_of(obs: Any, env: int) -> Any:
    """One environment's part of batched observations."""
    if isinstance(obs, dict):
        return {name: one_of(part, env) for name, part in obs.items()}
    return tuple(one_of(part, env) for part in obs) if isinstance(obs, tuple) else obs[env]


def is_prepared(space: gym.Space[Any]) -> bool:
    """Whether observations of `space` become other arrays: flattened, or one-hot vectors."""
    return space.shape is None or isinstance(space, (spaces.MultiBinary, *_ONE_HOT, *_NESTED))


def _strange_part(space: gym.Space[Any]) -> gym.Space[Any] | None:
    """A part, or the space itself, that has no array of fixed size whose numbers mean something; None if all have."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        inside = space.values() if isinstance(space, spaces.Dict) else space
        return next((found for part in inside if (found := _strange_part(part)) is not None), None)
    return (
        None if isinstance(space, spaces.Box | spaces.MultiBinary | spaces.Discrete | spaces.MultiDiscrete) else space
    )


def _has_numbers(space: gym.Space[Any]) -> bool:
    if isinstance(space, spaces.Dict | spaces.Tuple):
        inside = space.values() if isinstance(space, spaces.Dict) else space
        return any(isinstance(part, _ONE_HOT) or _has_numbers(part) for part in inside)
    return False
