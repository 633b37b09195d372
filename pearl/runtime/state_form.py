"""Checks that a saved state dict fits the object that loads it: keys, types, shapes, ranges.

torch's own `load_state_dict` of optimizers and schedulers accepts nearly anything. It then fails at a later step, or a
kernel reads past the end of a tensor.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any

from pearl.errors import CheckpointError
from pearl.lazy_torch import torch

_COUNTS = ("last_epoch", "_step_count", "step")  # whole numbers, whatever their type


def check_like(path: str, expected: Any, found: Any) -> None:
    """Raise CheckpointError, with the place below `path`, unless `found` has the form of `expected`.

    Both must have the same keys, lengths, kinds of values, and shapes and dtypes of tensors; numbers must not be NaN.
    Where one is None, the other may be a number, a text or a bool: an option that was not set.
    """
    if isinstance(expected, Mapping):
        if not isinstance(found, Mapping):
            _refuse(path, "a mapping", found)
        if expected.keys() != found.keys():
            _refuse(path, f"the keys {sorted(map(str, expected))}", sorted(map(str, found)))
        for key, value in expected.items():
            if key in _COUNTS:
                _check_count(f"{path}.{key}", value, found[key])
            check_like(f"{path}.{key}", value, found[key])
    elif isinstance(expected, list | tuple):
        if type(found) is not type(expected) or len(found) != len(expected):
            _refuse(path, f"{len(expected)} values in a {type(expected).__name__}", found)
        for index, (value, other) in enumerate(zip(expected, found, strict=True)):
            check_like(f"{path}[{index}]", value, other)
    elif isinstance(expected, torch.Tensor):
        what = f"a tensor of shape {tuple(expected.shape)} and dtype {expected.dtype}"
        if not isinstance(found, torch.Tensor):
            _refuse(path, what, found)
        if found.shape != expected.shape or found.dtype != expected.dtype:
            _refuse(path, what, f"shape {tuple(found.shape)} and dtype {found.dtype}")
    else:
        _check_scalar(path, expected, found)


def _check_scalar(path: str, expected: Any, found: Any) -> None:
    if isinstance(found, float) and math.isnan(found) and not (isinstance(expected, float) and math.isnan(expected)):
        _refuse(path, "a number", found)
    if expected is None or isinstance(expected, bool):
        fits = found is None or isinstance(found, bool if isinstance(expected, bool) else bool | int | float | str)
    elif isinstance(expected, int | float):
        fits = isinstance(found, int | float) and not isinstance(found, bool)
    else:
        fits = isinstance(found, type(expected))
    if not fits:
        _refuse(path, f"a value like {expected!r}", found)


def _check_count(path: str, expected: Any, found: Any) -> None:
    # -1: a later part of a SequentialLR has not begun.
    least = -1 if isinstance(expected, int) and expected == -1 else 0
    value = found.item() if isinstance(found, torch.Tensor) and found.numel() == 1 else found
    whole = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not whole or value < least or value != int(value):
        _refuse(path, f"a whole number of at least {least}", found)


def check_optimizer_state(name: str, optimizer: torch.optim.Optimizer, found: Any) -> None:
    """Raise CheckpointError unless `found` is a state dict that `optimizer`, one of torch's own, could have now.

    The optimizer's constructor checks the settings; the state is compared with that after one step. Other optimizers,
    and those whose step needs more than dense gradients, rely on their own `load_state_dict`.
    """
    if not _is_torchs(optimizer):
        return
    live = optimizer.state_dict()
    if not isinstance(found, Mapping) or set(found) != {"state", "param_groups"}:
        _refuse(name, "the keys 'state' and 'param_groups'", found)
    groups, states = found["param_groups"], found["state"]
    if not isinstance(groups, list) or len(groups) != len(live["param_groups"]) or not isinstance(states, Mapping):
        _refuse(name, f"{len(live['param_groups'])} groups of parameters and their state", found)
    copies: list[dict[str, Any]] = []
    for at, (group, expected, own) in enumerate(zip(groups, live["param_groups"], optimizer.param_groups, strict=True)):
        path = f"{name}.param_groups[{at}]"
        _check_group(path, expected, group)
        copies.append(_copied(group, own["params"]))
    if not states:
        return
    try:
        expected_states = _state_after_a_step(type(optimizer), copies)
    except Exception as error:
        if not _can_step(optimizer):
            return
        raise CheckpointError(
            f"{type(optimizer).__name__} does not take the settings of {name!r} in the checkpoint: {error}."
        ) from error
    for key, state in states.items():
        if type(key) is not int or key not in expected_states:
            _refuse(f"{name}.state", f"numbers of parameters, 0 to {len(expected_states) - 1}", key)
        check_like(f"{name}.state[{key}]", expected_states[key], state)


def check_scheduler_state(name: str, scheduler: Any, found: Any) -> None:
    """The same for a learning-rate scheduler or a gradient scaler of torch's own."""
    if _is_torchs(scheduler):
        check_like(name, scheduler.state_dict(), found)


def _is_torchs(value: object) -> bool:
    return type(value).__module__.startswith("torch.")


def _check_group(path: str, expected: Mapping[str, Any], found: Any) -> None:
    if not isinstance(found, Mapping):
        _refuse(path, "a mapping", found)
    extra = {key: value for key, value in found.items() if key not in expected}  # such as a scheduler's initial_lr
    for key, value in extra.items():
        if not isinstance(key, str):
            _refuse(path, "settings by name", key)
        check_like(f"{path}.{key}", 0.0, value)
    check_like(path, expected, {key: value for key, value in found.items() if key in expected})
    if found["params"] != expected["params"]:
        _refuse(f"{path}.params", expected["params"], found["params"])


def _copied(group: Mapping[str, Any], params: list[torch.Tensor]) -> dict[str, Any]:
    return {**group, "params": [torch.zeros_like(p).requires_grad_() for p in params]}


def _can_step(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step with dense gradients and no closure works: not of LBFGS, nor of SparseAdam."""
    try:
        _state_after_a_step(type(optimizer), [_copied(group, group["params"]) for group in optimizer.param_groups])
    except Exception:
        return False
    return True


def _state_after_a_step(kind: Any, groups: list[dict[str, Any]]) -> dict[int, Any]:
    """The state, by number of parameter, that a step of `kind` leaves for parameters and settings of these `groups`."""
    known = inspect.signature(kind.__init__).parameters
    # Each group apart: only a constructor's own arguments are judged by it.
    for group in groups:
        kind(group["params"], **{key: value for key, value in group.items() if key in known and key != "params"})
    probe = kind(groups)
    for group in groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    with torch.no_grad():
        inspect.unwrap(kind.step)(probe)  # what torch wraps around a step loads its compiler
    found: dict[int, Any] = probe.state_dict()["state"]
    return found


def _refuse(path: str, expected: object, found: object) -> None:
    text = repr(found)
    raise CheckpointError(
        f"{path} of the checkpoint must be {expected}; found {text if len(text) <= 80 else f'{text[:77]}...'}. "
        "The checkpoint is damaged, or of another version of torch: resume from another."
    )
