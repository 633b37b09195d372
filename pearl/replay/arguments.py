"""Arguments of Replay Managers: checked, and converted to what kernels take (contiguous vectors of fixed dtype)."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypedDict, get_args

import numpy as np
from numpy.typing import ArrayLike

from pearl.errors import CheckpointError, PriorityError, ReplayError
from pearl.replay.protocol import ReplayStateDict, Sample
from pearl.spec import EPSILON_MIN, InitialPriority, ReplayMode

STATE_FORMAT = 4
PRIORITY_MODES = ("prioritized", "top_k")  # these keep priorities
TIME_MODES = ("fifo", "lifo")  # these keep the order of writing
TIMES_MAX = 2**16 - 1  # counting the samples of one item stops here
LEAF_MAX = 2**28 - 1
LEAF_LARGE = 2**26 - 1  # if all leaves are smaller, they fit a scale two bits higher
EXPONENT_MAX = 4.0
_FLOAT32_MAX = float(np.finfo(np.float32).max)
_INT64, _UINT32, _UINT16, _FLOAT32 = map(np.dtype, (np.int64, np.uint32, np.uint16, np.float32))
COUNTERS = ("inserts", "updates", "samples", "stale", "saturated", "rescales", "recoveries", "exhausted")
_COUNTS = ("seed", "call", "looked_at", *COUNTERS)
_SCALARS = (*_COUNTS, "alpha", "scale", "max_priority")


def _is_ready(array: object, dtype: np.dtype) -> bool:
    return isinstance(array, np.ndarray) and array.dtype == dtype and array.ndim == 1 and array.flags.c_contiguous


def _whole_numbers(name: str, values: ArrayLike, dtype: np.dtype) -> np.ndarray:
    array = np.asarray(values)
    if array.ndim != 1:
        raise ReplayError(f"{name} must be a vector; found shape {array.shape}.")
    if array.size == 0:
        return np.empty(0, dtype)
    if array.dtype.kind not in "iu":
        raise ReplayError(f"{name} must be whole numbers ({dtype}); found dtype {array.dtype}.")
    if array.dtype != dtype:
        limits = np.iinfo(dtype)
        if int(array.min()) < limits.min or int(array.max()) > limits.max:
            raise ReplayError(f"{name} must fit {dtype}; found values from {array.min()} to {array.max()}.")
    return np.ascontiguousarray(array, dtype)


def as_indices(values: ArrayLike, name: str = "indices") -> np.ndarray:
    """Return `(n,)` int64; raises ReplayError, with `name`, for anything but a vector of whole numbers."""
    if _is_ready(values, _INT64):
        return values  # type: ignore[return-value]
    return _whole_numbers(name, values, _INT64)


def as_generations(values: ArrayLike, count: int) -> np.ndarray:
    """Return `(count,)` uint32; raises ReplayError otherwise."""
    generations: np.ndarray = (
        values if _is_ready(values, _UINT32) else _whole_numbers("generations", values, _UINT32)  # type: ignore[assignment]
    )
    return _of_length("generations", generations, count)


def as_priorities(values: ArrayLike, count: int) -> np.ndarray:
    """Return `(count,)` float32; raises ReplayError for another length or anything but real numbers."""
    if _is_ready(values, _FLOAT32):
        return _of_length("priorities", values, count)  # type: ignore[arg-type]
    array = np.asarray(values)
    if array.ndim != 1:
        raise ReplayError(f"priorities must be a vector; found shape {array.shape}.")
    if array.size and array.dtype.kind not in "iuf":
        raise ReplayError(f"priorities must be real numbers (float32); found dtype {array.dtype}.")
    with np.errstate(over="ignore"):  # beyond float32 is +inf, which saturates and is counted
        return _of_length("priorities", np.ascontiguousarray(array, _FLOAT32), count)


def _of_length(name: str, array: np.ndarray, count: int) -> np.ndarray:
    if len(array) != count:
        raise ReplayError(f"{name} must have one item per index ({count}); found {len(array)}.")
    return array


def check_out(out: Sample, batch_size: int) -> None:
    """Raise ReplayError unless the arrays of `out` can take a batch of `batch_size`."""
    for name, array, dtype in zip(Sample._fields, out, ("int64", "float32", "uint32"), strict=True):
        flags = array.flags
        if array.dtype != dtype or array.shape != (batch_size,) or not (flags.c_contiguous and flags.writeable):
            raise ReplayError(
                f"out.{name} must be contiguous, writeable {dtype} of shape ({batch_size},); found {array.dtype} "
                f"{array.shape}."
            )


def check_indices(indices: np.ndarray, stop: int, meaning: str = "") -> None:
    """Raise ReplayError naming the first index outside [0, stop); `meaning` says what `stop` is."""
    for position in np.flatnonzero((indices < 0) | (indices >= stop))[:1]:
        found = indices[position]
        raise ReplayError(f"Index at position {position} must lie in [0, {stop}){meaning}; found {found}.")


def check_priorities(priorities: np.ndarray) -> None:
    """Raise PriorityError naming the first positions that are NaN or negative."""
    wrong = np.flatnonzero(~(priorities >= 0))
    if len(wrong):
        named = ", ".join(map(str, wrong[:5])) + (", ..." if len(wrong) > 5 else "")
        raise PriorityError(
            f"Priorities must be at least 0 and not NaN; found {len(wrong)} that are not, at position {named}. "
            "Nothing was changed."
        )


def check_exponent(name: str, exponent: float) -> None:
    """Raise ReplayError unless `exponent` (alpha or beta) lies in [0, 4]."""
    if not 0.0 <= exponent <= EXPONENT_MAX:
        raise ReplayError(f"{name} must lie in [0, 4]; found {exponent}.")


def check_selection(mode: object, max_times_sampled: object, initial_priority: object) -> None:
    """Raise ReplayError for a mode, a limit or an initial priority that no Replay Manager has."""
    if mode not in get_args(ReplayMode):
        raise ReplayError(f"Replay mode must be one of {', '.join(get_args(ReplayMode))}; found {mode!r}.")
    whole = isinstance(max_times_sampled, int | np.integer) and not isinstance(max_times_sampled, bool)
    if not whole or not 0 <= max_times_sampled <= TIMES_MAX:  # type: ignore[operator]
        raise ReplayError(
            f"max_times_sampled must be a whole number in [0, {TIMES_MAX}], 0 for no limit; "
            f"found {max_times_sampled!r}."
        )
    if initial_priority in ("max", "mean"):
        return
    number = isinstance(initial_priority, int | float | np.number) and not isinstance(initial_priority, bool)
    if not number or not 0 < np.float32(initial_priority) < np.inf:  # type: ignore[arg-type]
        raise ReplayError(
            f'initial_priority must be "max", "mean" or a finite number above 0 (float32); found {initial_priority!r}.'
        )


class SelectionOptions(TypedDict, total=False):
    """The keyword arguments that all Replay Managers take; see `Selection`."""

    fanout: int
    mode: ReplayMode
    alpha: float
    seed: int
    stratified: bool
    replacement: bool
    max_times_sampled: int
    initial_priority: InitialPriority
    priority_epsilon: float


@dataclass(frozen=True)
class Selection:
    """The options of a Replay Manager; see `ReplaySpec`. Raises ReplayError for values that no Replay Manager has."""

    fanout: int = 16
    mode: ReplayMode = "prioritized"
    alpha: float = 0.6
    seed: int = 0
    stratified: bool = True
    replacement: bool = True
    max_times_sampled: int = 0
    initial_priority: InitialPriority = "max"
    priority_epsilon: float = 0.0

    def __post_init__(self) -> None:
        check_selection(self.mode, self.max_times_sampled, self.initial_priority)
        check_epsilon(self.priority_epsilon)

    @property
    def seed64(self) -> int:
        """The seed as 64 bits without a sign."""
        return operator.index(self.seed) % 2**64

    @property
    def initial_number(self) -> float:
        """The initial priority where it is a number, else 0."""
        return 0.0 if isinstance(self.initial_priority, str) else self.initial_priority


def check_epsilon(epsilon: object) -> None:
    """Raise ReplayError unless `epsilon`, which is added to each priority given, is 0 or a number in [1e-30, 1]."""
    number = isinstance(epsilon, int | float | np.number) and not isinstance(epsilon, bool)
    if not number or not (epsilon == 0 or EPSILON_MIN <= epsilon <= 1):  # type: ignore[operator]
        raise ReplayError(f"priority_epsilon must be 0, or a number in [{EPSILON_MIN}, 1]; found {epsilon!r}.")


def checked_state(
    state: Mapping[str, np.ndarray | int | float | str], *, capacity: int, mode: str, max_times_sampled: int
) -> ReplayStateDict:
    """Return a saved state with its arrays in kernel form; raises CheckpointError unless it fits this replay."""
    for name in ("format", "mode", "capacity", "max_times_sampled"):
        if isinstance(state.get(name), np.ndarray):
            raise CheckpointError(f"The saved replay's {name} must be a number or a text; found an array.")
    if type(state.get("format")) is not int or state["format"] != STATE_FORMAT:
        raise CheckpointError(
            f"The saved replay's format must be {STATE_FORMAT}; found {state.get('format')!r}, of another version."
        )
    for name, expected in (("mode", mode), ("capacity", capacity), ("max_times_sampled", max_times_sampled)):
        found = state.get(name)
        if type(found) is not type(expected) or found != expected:  # True == 1
            raise CheckpointError(f"The saved replay's {name} must be {expected!r}; found {found!r}.")
    rows = capacity if mode in PRIORITY_MODES else 0
    lengths: dict[str, tuple[int, np.dtype[Any]]] = {"priorities": (rows, _FLOAT32), "leaves": (rows, _UINT32)}
    lengths |= {"generations": (capacity, _UINT32), "times_sampled": (capacity, _UINT16)}
    lengths["order"] = (len(np.atleast_1d(state.get("order", ()))) if mode in TIME_MODES else 0, _INT64)
    expected_names = {"format", "mode", "capacity", "max_times_sampled", "fanout", *_SCALARS, *lengths}
    if missing := sorted(expected_names - set(state)):
        raise CheckpointError(f"The saved replay lacks {', '.join(missing)}.")
    if unknown := sorted(set(state) - expected_names):
        raise CheckpointError(f"The saved replay holds {', '.join(map(repr, unknown))}, which no replay has.")
    fanout = _number(state["fanout"])
    if not isinstance(fanout, int) or not 1 <= fanout <= 256:
        raise CheckpointError(f"The saved replay's fanout must be a whole number up to 256; found {fanout!r}.")
    checked: ReplayStateDict = {name: _number(state[name]) for name in _SCALARS}
    for name, (length, dtype) in lengths.items():
        array = np.asarray(state[name])
        if array.shape != (length,) or array.dtype != dtype:
            raise CheckpointError(
                f"The saved replay's {name} must be {dtype} of shape ({length},); found {array.dtype} {array.shape}."
            )
        checked[name] = np.ascontiguousarray(array)
    _check_values(checked, max_times_sampled)
    if mode in TIME_MODES:
        expected_slots = np.flatnonzero(_may_be_sampled(checked, max_times_sampled))
        order = np.asarray(checked["order"])
        if not np.array_equal(np.sort(order), expected_slots):
            raise CheckpointError("The saved replay's order is damaged: it must name each slot to be sampled once.")
        if (np.diff(_ages(checked)[order]) > 0).any():
            raise CheckpointError("The saved replay's order is damaged: it must go from the oldest to the newest.")
    return checked


def _may_be_sampled(state: ReplayStateDict, max_times_sampled: int) -> np.ndarray:
    written = np.asarray(state["generations"]) > 0
    return written & (np.asarray(state["times_sampled"]) < (max_times_sampled or 2**16))


def _ages(state: ReplayStateDict) -> np.ndarray:
    """Insertions since each slot was written, `(capacity,)` int64: generations are counts of insertions mod 2**32."""
    newest = np.uint32(int(state["inserts"]) % 2**32)
    return np.asarray(newest - np.asarray(state["generations"])).astype(np.int64)


def _check_counts(state: ReplayStateDict) -> None:
    """Raise CheckpointError for counts that contradict each other or the slots."""
    inserts, samples, generations = int(state["inserts"]), int(state["samples"]), np.asarray(state["generations"])
    written = np.unique(generations[generations > 0])
    if len(written) > inserts or (inserts < 2**32 and len(written) and written[-1] > inserts):
        raise CheckpointError(f"The saved replay's generations are damaged: only {inserts} items were inserted.")
    if inserts < 2**32 and len(written) < np.count_nonzero(generations):
        raise CheckpointError("The saved replay's generations are damaged: two slots have the same.")
    if int(np.asarray(state["times_sampled"]).sum(dtype=np.int64)) > samples:
        raise CheckpointError(f"The saved replay's times_sampled are damaged: only {samples} items were sampled.")


def _check_values(state: ReplayStateDict, max_times_sampled: int) -> None:
    alpha, max_priority = state["alpha"], state["max_priority"]
    leaves, times = np.asarray(state["leaves"]), np.asarray(state["times_sampled"])
    sampleable = _may_be_sampled(state, max_times_sampled)[: len(leaves)]
    limits = dict.fromkeys(_COUNTS, (0, 2**64)) | {"scale": (-(2**30), 64)}
    for name, (low, high) in limits.items():
        value = state[name]
        if not isinstance(value, int) or not low <= value < high:
            raise CheckpointError(f"The saved replay's {name} must be a whole number that fits; found {value!r}.")
    if state["looked_at"] > state["inserts"] + state["updates"]:  # type: ignore[operator]
        raise CheckpointError(
            "The saved replay's looked_at must be at most its inserts and updates together, "
            f"{state['inserts']} and {state['updates']}; found {state['looked_at']}."
        )
    if not isinstance(alpha, int | float) or not 0 <= alpha <= EXPONENT_MAX:
        raise CheckpointError(f"The saved replay's alpha must lie in [0, 4]; found {alpha!r}.")
    if not isinstance(max_priority, int | float) or not 1 <= max_priority <= _FLOAT32_MAX:
        raise CheckpointError(f"The saved replay's max_priority must be a float32 from 1 on; found {max_priority!r}.")
    priorities = np.asarray(state["priorities"])
    if not (priorities >= 0).all():
        raise CheckpointError("The saved replay's priorities are damaged: some are NaN or negative.")
    if (leaves > LEAF_MAX).any() or (leaves[~sampleable] > 0).any():
        raise CheckpointError("The saved replay's leaves are damaged: some are too large, or of unwritten slots.")
    unwritten = np.asarray(state["generations"]) == 0
    if (priorities[unwritten[: len(leaves)]] > 0).any():
        raise CheckpointError("The saved replay's priorities are damaged: some are of unwritten slots.")
    if ((leaves > 0) != (priorities > 0))[sampleable].any():
        raise CheckpointError("The saved replay's leaves are damaged: some are not those of their priorities.")
    if (times > (max_times_sampled or TIMES_MAX)).any() or (times[unwritten] > 0).any():
        raise CheckpointError("The saved replay's times_sampled are damaged: too many, or of unwritten slots.")
    _check_counts(state)


def _number(value: np.ndarray | int | float | str) -> int | float:
    number = value.item() if isinstance(value, np.generic) else value
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise CheckpointError(f"The saved replay holds {value!r} where a number was expected.")
    return number
