"""Transitions that a run is given before its first step: the steps of a data set, or the replay of another run.

GEAR (ICML 2023, Sec. 3.1) stores trajectories of data sets and of simulators alike; so does this.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from pearl.actors.actions import first_action
from pearl.errors import CheckpointError, ConfigurationError
from pearl.policy.description import checkpoints_of
from pearl.replay.frames import FRAMES
from pearl.runtime.checkpoint import latest_checkpoint, load_checkpoint
from pearl.runtime.experience import check_replay, part
from pearl.spec import ACTION, DISCOUNT, NEXT_OBS, OBS, REWARD, TransitionSpec

logger = logging.getLogger("pearl.runtime")

_TERMINATED, _TRUNCATED = "terminated", "truncated"
# Gymnasium's and Minari's names, and D4RL's.
_NAMES = {
    OBS: ("observations",),
    ACTION: ("actions",),
    REWARD: ("rewards",),
    _TERMINATED: ("terminations", "terminals"),
    _TRUNCATED: ("truncations", "timeouts"),
    NEXT_OBS: ("next_observations",),
}
_OPTIONAL = {_TRUNCATED, NEXT_OBS}
_CHUNK = 4096  # rows
_TOLERANCE = 1e-4  # of an action's range: float32 rounds


class Given(NamedTuple):
    """The columns of `rows` transitions, the oldest first, some at a time; `note` says more about them."""

    rows: int
    chunks: Iterator[Mapping[str, np.ndarray]]
    note: str = ""


def given_transitions(
    path: Path, transition: TransitionSpec, action_space: gym.Space[Any], n_step: int, gamma: float, most: int
) -> Given:
    """The newest `most` transitions of a run's folder, or of a file of steps (.npz), with the columns of `transition`.

    Those of a run are as they were stored. Those of steps have `n_step` returns discounted by `gamma`. Raises
    ConfigurationError for a file that cannot be read, arrays of other shapes or types, numbers that are not finite,
    and trainers whose transitions hold more than that; CheckpointError for a damaged checkpoint.
    """
    if transition.sequence is not None or transition.statistics:
        what = "sequences" if transition.sequence is not None else "normalised observations or rewards"
        raise ConfigurationError(f"--transitions-from does not give {what}, which this program's replay stores.")
    if path.is_dir():
        return _of_run(path, transition, action_space, n_step, gamma, most)
    if further := [field.name for field in transition.further]:
        raise ConfigurationError(
            f"{path} has steps alone, and this program's replay also stores {', '.join(further)}. Name the folder of a "
            "run that stored these."
        )
    return n_step_transitions(read_steps(path, transition, action_space), transition, n_step, gamma, most)


# --- another run ------------------------------------------------------------------------------------------------------


def _of_run(
    folder: Path, transition: TransitionSpec, space: gym.Space[Any], n_step: int, gamma: float, most: int
) -> Given:
    where = checkpoints_of(folder)
    if latest_checkpoint(where) is None:
        raise ConfigurationError(f"There is no checkpoint of a run, which holds its replay, in {where}.")
    state = load_checkpoint(where)
    try:
        check_replay(state.arrays, state.counters, where)
    except CheckpointError as error:
        raise ConfigurationError(f"The checkpoint in {where} has no replay of transitions: {error}") from error
    columns = part(state.arrays, "storage/")
    if FRAMES in columns:
        raise ConfigurationError(f"The run in {folder} stored each frame once (share_frames). Take one without.")
    if "normalization" in state.identity:
        raise ConfigurationError(
            f"The run in {folder} stored normalised observations or rewards, by running statistics that this program "
            "does not have. Take a run without normalize_observations and reward_standardization."
        )
    for field in transition.fields:
        found = columns.get(field.name)
        if found is None or found.shape[1:] != field.shape or found.dtype != field.dtype:
            has = "none" if found is None else f"{found.dtype} of shape {found.shape[1:]}"
            raise ConfigurationError(
                f"The transitions of the run in {folder} are of another kind: {field.name} must be {field.dtype} of "
                f"shape {field.shape}; found {has}. Take a run in the same environment."
            )
    _check_choices(columns[ACTION], space, folder)
    size, cursor = int(state.counters["storage/size"]), int(state.counters["storage/cursor"])
    order = np.roll(np.arange(size), -cursor if cursor < size else 0)[-most:]
    names = [field.name for field in transition.fields]
    _warn_of_other_returns(columns[DISCOUNT], n_step, gamma, folder)
    chunks = ({name: columns[name][some] for name in names} for some in _cut(order))
    notes = [f"in {state.identity.get('environment', 'an environment without a name')}"]
    if len(order) < size:
        notes.append(f"the newest {len(order):,} of {size:,}")
    return Given(len(order), chunks, "; ".join(notes))


def _check_choices(actions: np.ndarray, space: gym.Space[Any], folder: Path) -> None:
    """Refuse choices that this program's policies do not have: networks have no output for them."""
    if actions.dtype != np.int64 or not len(actions):
        return
    low, high = (bound - first_action(space) for bound in _bounds(space))
    if not ((low <= actions.min(axis=0)) & (actions.max(axis=0) <= high)).all():
        raise ConfigurationError(
            f"The transitions of the run in {folder} have actions that {space} lacks: policies number them from {low} "
            f"to {high}; found {actions.min(axis=0)} to {actions.max(axis=0)}. Take a run in the same environment."
        )


def _warn_of_other_returns(discounts: np.ndarray, n_step: int, gamma: float, folder: Path) -> None:
    """Returns of another number of steps or discount are right for their rows, but not what this program collects."""
    own = gamma ** np.arange(1, n_step + 1)
    found = np.unique(discounts[discounts > 0])
    other = [float(one) for one in found if not np.isclose(own, one, rtol=1e-5).any()]
    if not other and len(found) and not np.isclose(found, own[-1], rtol=1e-5).any():
        other = [float(one) for one in found]  # its own ones, but of fewer steps
    if other:
        logger.warning(
            "The transitions of %s are discounted by %s, among others; this program discounts its own by gamma = %g, "
            "with returns of up to %d steps. They are trained on as they are.",
            *(folder, ", ".join(f"{one:.4g}" for one in other[:4]), gamma, n_step),
        )


def _cut(indices: np.ndarray) -> Iterator[np.ndarray]:
    return (indices[start : start + _CHUNK] for start in range(0, len(indices), _CHUNK))


# --- steps ------------------------------------------------------------------------------------------------------------


class Steps(NamedTuple):
    """Steps of one episode after the other, `(steps, ...)`; without `next_obs`, that is the next step's `obs`."""

    obs: np.ndarray
    action: np.ndarray
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    next_obs: np.ndarray | None


def read_steps(path: Path, transition: TransitionSpec, action_space: gym.Space[Any]) -> Steps:
    """The steps in an .npz file, checked against the program's spaces; ConfigurationError names what is wrong."""
    found = _read_arrays(path)
    steps = next(len(array) if array.ndim else 0 for array in found.values() if array is not None)
    for name, array in found.items():
        if array is not None and array.shape[:1] != (steps,):
            raise ConfigurationError(
                f"{_called(name)} in {path} must have a row for each of the {steps:,} steps; found the shape "
                f"{array.shape}."
            )
    if not steps:
        raise ConfigurationError(f"{path} has no steps.")
    fields = {field.name: field for field in transition.fields}
    obs, next_obs = (
        None if (array := found[name]) is None else _numbers(array, fields[name].shape, fields[name].dtype, name, path)
        for name in (OBS, NEXT_OBS)
    )
    reward = _numbers(found[REWARD], (), "float32", REWARD, path)
    action = _actions(found[ACTION], fields[ACTION].dtype, action_space, path)
    terminated, truncated = (_booleans(found[name], steps, name, path) for name in (_TERMINATED, _TRUNCATED))
    assert obs is not None
    return Steps(obs, action, reward, terminated, truncated, next_obs)


def _read_arrays(path: Path) -> dict[str, np.ndarray | None]:
    """The arrays of `_NAMES` in the file, and no others: data sets may have many, or Python objects among them."""
    try:
        file = np.load(path, allow_pickle=False)
        if isinstance(file, np.lib.npyio.NpzFile):
            with file:
                found = {name: _named(file.files, name, path) for name in _NAMES}
                return {name: None if key is None else _array(file, key) for name, key in found.items()}
    except ConfigurationError:
        raise
    except FileNotFoundError:
        raise ConfigurationError(f"--transitions-from: there is no file and no folder of a run at {path}.") from None
    except Exception as error:  # NumPy, zipfile and zlib have many for damaged files
        raise ConfigurationError(f"{path} cannot be read as an .npz file: {error}.") from error
    raise ConfigurationError(f"{path} is one array. An .npz file with {_listed()} is expected.")


def _array(file: Mapping[str, Any], name: str) -> np.ndarray:
    found = file[name]
    if not isinstance(found, np.ndarray):  # NumPy returns the bytes of a member that is no array
        raise ValueError(f"{name} is not an array of NumPy")
    return found


def _called(name: str) -> str:
    return " or ".join(_NAMES[name])


def _listed() -> str:
    return ", ".join(names[0] + (" (optional)" if name in _OPTIONAL else "") for name, names in _NAMES.items())


def _named(present: Sequence[str], name: str, path: Path) -> str | None:
    found = next((one for one in _NAMES[name] if one in present), None)
    if found is None and name not in _OPTIONAL:
        raise ConfigurationError(
            f"{path} has no {_called(name)}; it has {', '.join(present) or 'nothing'}. Expected are {_listed()}."
        )
    return found


def _numbers(array: np.ndarray | None, shape: tuple[int, ...], dtype: str, name: str, path: Path) -> np.ndarray:
    assert array is not None
    wanted = "bytes (uint8)" if dtype == "uint8" else "numbers"
    is_right = array.dtype == np.uint8 if dtype == "uint8" else array.dtype.kind in "fiub"
    if array.shape[1:] != shape or not is_right:
        raise ConfigurationError(
            f"{_called(name)} in {path} must be {wanted} of shape {('steps', *shape)}, as the program stores them; "
            f"found {array.dtype} of shape {array.shape}."
        )
    with np.errstate(over="ignore"):
        converted = array.astype(dtype, copy=False)
    finite = np.isfinite(converted).reshape(len(array), -1).all(axis=1)
    if not finite.all():
        raise ConfigurationError(
            f"{_called(name)} in {path} must be finite as float32; step {int(np.argmin(finite)):,} is not."
        )
    return converted


def _booleans(array: np.ndarray | None, steps: int, name: str, path: Path) -> np.ndarray:
    if array is None:
        return np.zeros(steps, bool)
    is_right = array.shape == (steps,) and array.dtype.kind in "fiub"
    if not is_right or not ((array == 0) | (array == 1)).all():
        raise ConfigurationError(
            f"{_called(name)} in {path} must be 0 or 1 for each step; found {array.dtype} of shape {array.shape}."
        )
    return array.astype(bool)


def _actions(array: np.ndarray | None, dtype: str, space: gym.Space[Any], path: Path) -> np.ndarray:
    """The actions as policies number them."""
    assert array is not None
    whole = dtype == "int64"
    if array.dtype.kind not in ("iu" if whole else "fiu") or array.shape[1:] != space.shape:
        raise ConfigurationError(
            f"actions in {path} must be actions of {space}, one for each step; found {array.dtype} of shape "
            f"{array.shape}."
        )
    low, high = _bounds(space)
    slack: Any = 0
    if not whole:
        between = high.astype(np.float64) - low
        slack = _TOLERANCE * np.where(np.isfinite(between), between, 1.0)
        largest = np.finfo(np.float32).max
        low, high = (np.clip(bound.astype(np.float64), -largest, largest) for bound in (low, high))
    inside = ((array >= low - slack) & (array <= high + slack)).reshape(len(array), -1).all(axis=1)
    if not inside.all():
        step = int(np.argmin(inside))
        raise ConfigurationError(
            f"actions in {path} must be within {space}; step {step:,} has {array[step]}, one of "
            f"{len(inside) - np.count_nonzero(inside):,} outside."
        )
    # Whole numbers in 64 bits, since the file's type need not hold the difference.
    found: np.ndarray = array.astype(np.int64) - first_action(space) if whole else np.clip(array, low, high)
    return found.astype(dtype, copy=False)


def _bounds(space: gym.Space[Any]) -> tuple[np.ndarray, np.ndarray]:
    """The least and the largest action, as the environment numbers them."""
    if isinstance(space, spaces.Box):
        return space.low, space.high
    counts = {spaces.Discrete: "n", spaces.MultiDiscrete: "nvec"}
    counted = next((getattr(space, name) for kind, name in counts.items() if isinstance(space, kind)), 2)  # MultiBinary
    first = np.asarray(first_action(space), np.int64)
    return first, first + counted - 1


def n_step_transitions(steps: Steps, transition: TransitionSpec, n: int, gamma: float, most: int) -> Given:
    """The newest `most` transitions of `steps`, as an Actor's `NStepWindow` makes them.

    Here whole arrays are at hand: the window, which takes a step at a time, needs 33 us for each (n = 3), this 0.06.
    Where the observation after the last step of an episode that did not terminate is not known, that step gives no
    transition; nor does the last one of all.
    """
    count = len(steps.reward)
    ended = steps.terminated | steps.truncated
    unknown = np.zeros(count, bool)
    if steps.next_obs is None:
        unknown = ended & ~steps.terminated
        unknown[-1] = not steps.terminated[-1]
    ended[-1] = True
    ended[:-1] |= unknown[1:]  # the step before is the last one whose next observation is known
    last = np.where(ended, np.arange(count), count - 1)
    last = np.minimum(np.minimum.accumulate(last[::-1])[::-1], np.arange(count) + n - 1)
    kept = np.flatnonzero(~unknown)[-most:]
    discounts = gamma ** np.arange(n + 1)
    dtypes = {field.name: field.dtype for field in transition.fields}

    def chunk(some: np.ndarray) -> dict[str, np.ndarray]:
        final = last[some]
        total = np.zeros(len(some))
        for k in range(n):
            total += np.where(some + k <= final, discounts[k] * steps.reward[np.minimum(some + k, count - 1)], 0.0)
        discount = np.where(steps.terminated[final], 0.0, discounts[final - some + 1])
        after = steps.obs[np.minimum(final + 1, count - 1)] if steps.next_obs is None else steps.next_obs[final]
        return {
            OBS: steps.obs[some],
            ACTION: steps.action[some],
            REWARD: total.astype(dtypes[REWARD]),
            NEXT_OBS: after,
            DISCOUNT: discount.astype(dtypes[DISCOUNT]),
        }

    left_out = int(np.count_nonzero(unknown))
    notes = [f"the newest {len(kept):,} of {count - left_out:,}"] if len(kept) < count - left_out else []
    if left_out:
        notes.append(f"without {left_out:,} steps before an observation that is not known")
    return Given(len(kept), map(chunk, _cut(kept)), "; ".join(notes))
