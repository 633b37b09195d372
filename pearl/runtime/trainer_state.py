"""The state of a trainer as groups of named tensors, and back; also torch's random states.

Nothing is pickled: values of a state dict that are not tensors are stored as JSON in one more tensor of the group.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pearl.algorithms.arrays import Array, ArrayAdam, ArrayModule, ArrayParts, ArrayValue
from pearl.algorithms.trainer import Trainer, arrays_of, attributes_of, is_kept_tensor
from pearl.errors import CheckpointError
from pearl.lazy_torch import is_imported, is_tensor, torch
from pearl.runtime.checkpoint_files import JsonValue, Stored, Tensors, refuse
from pearl.runtime.state_form import check_optimizer_state, check_scheduler_state
from pearl.spec import OBSERVATION_STATISTICS

RANDOM_GROUP = "random"  # torch's random states; never part of a trainer
RATE_PREFIX = "stated-"  # of the scalars with the learning rates that were set

_RANDOM_DEVICE = re.compile(r"cpu|cuda\.[0-9]{1,3}")
_SCALARS = "scalars.json"  # the tensor that holds, as UTF-8 bytes, the part of a state dict that is not tensors

_log = logging.getLogger(__name__)


def module_tensors(trainer: object) -> dict[str, dict[str, Stored]]:
    """Copy the state of a trainer object to the CPU: one group of tensors for each stateful attribute, by its name.

    Stateful attributes are modules, optimizers, learning-rate schedulers, gradient scalers, torch generators (also in a
    list, tuple or dict: group `name.0`), leaf tensors that require a gradient, and tensors marked as `torch.nn.Buffer`.
    Values of a state dict that are not tensors are stored as JSON in one more tensor of the group. Plain Python numbers
    of the trainer are not saved: keep them in a `torch.nn.Buffer`, or define `state_tensors()` and
    `load_state_tensors(tensors)`, which replace all this. Networks in arrays give the same groups, of arrays.
    """
    if (arrays := arrays_of(trainer)) is not None:
        return {name: group for name, part in arrays.items() if (group := _group_of_arrays(name, part))}
    own = getattr(trainer, "state_tensors", None)
    if own is not None:
        return {group: {name: _copied(t) for name, t in tensors.items()} for group, tensors in own().items()}
    return {name: _group_of(name, value) for name, value in stateful_attributes(trainer).items()}


def stated_rates(trainer: object) -> dict[str, float]:
    """The learning rates that the trainer's settings state, for a checkpoint's scalars."""
    found = trainer.stated_rates if isinstance(trainer, Trainer) else {}
    return {f"{RATE_PREFIX}{name}": rate for name, rate in found.items()}


def saved_rates(trainer: object, scalars: Mapping[str, Any], where: Path) -> dict[str, float]:
    """The `stated_rates` of the checkpoint in `where`, for `Trainer.restate_rates`.

    Checkpoints of versions before this one have none. Raises CheckpointError for a value that is no rate.
    """
    rates = {}
    for name in stated_rates(trainer).keys() & scalars.keys():
        rate = scalars[name]
        if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 < rate < math.inf:
            refuse(where, name, "a number above 0", rate)
        rates[name.removeprefix(RATE_PREFIX)] = float(rate)
    return rates


def network_groups(trainer: object) -> list[str]:
    """The groups of `module_tensors` that weights files hold: networks, and no optimizers.

    Of a class that derives from no `Trainer` also single tensors that are learned. Where a class defines
    `state_tensors()`, all groups that it returns.
    """
    if (arrays := arrays_of(trainer)) is not None:
        return [name for name, part in arrays.items() if isinstance(part, ArrayModule)]
    if (own := getattr(trainer, "state_tensors", None)) is not None:
        return list(own())
    kinds = torch.nn.Module if isinstance(trainer, Trainer) else (torch.nn.Module, torch.Tensor)
    return [name for name, value in stateful_attributes(trainer).items() if isinstance(value, kinds)]


def policy_groups(trainer: object) -> list[str]:
    """Those of `network_groups` that acting needs: of `trainer.policy` if it is one of them, else all.

    Where the trainer's observations are normalised before they are stored, also those statistics.
    """
    groups = network_groups(trainer)
    arrays = arrays_of(trainer)
    policy: object
    if arrays is not None:
        policy, parts = arrays.policy, dict(arrays.items())
    elif getattr(trainer, "state_tensors", None) is None:
        policy, parts = getattr(trainer, "policy", None), stateful_attributes(trainer)
    else:
        return groups
    chosen = [name for name in groups if parts[name] is policy]
    if not isinstance(trainer, Trainer) or not chosen:
        return groups
    normalizes = OBSERVATION_STATISTICS in trainer.transition_statistics
    return [*chosen, OBSERVATION_STATISTICS] if normalizes else chosen


def load_networks(trainer: object, flat: Mapping[str, Stored], groups: Sequence[str] | None = None) -> None:
    """Load the weights `flat`, by `group.name` as a weights file has them, into `groups`: by default what acting needs.

    Other groups are left as they are. Raises CheckpointError if a tensor is missing, unknown or of another shape.
    """
    groups = policy_groups(trainer) if groups is None else groups
    tensors: dict[str, dict[str, Stored]] = {group: {} for group in groups}
    for key, value in flat.items():
        owners = [group for group in groups if key.startswith(f"{group}.")]
        if owners:
            group = max(owners, key=len)
            tensors[group][key[len(group) + 1 :]] = value
    if (arrays := arrays_of(trainer)) is not None:
        parts = dict(arrays.items())
        found = {
            group: {name: value.numpy() if is_tensor(value) else value for name, value in content.items()}
            for group, content in tensors.items()
        }
        for group in groups:
            _check_tensors(group, parts[group].state(), found[group])
        for group in groups:
            _load_arrays(parts[group], found[group])
        return
    in_torch = _in_torch(tensors)
    if (own := getattr(trainer, "load_state_tensors", None)) is not None:
        _load(trainer, "load_state_tensors", own, in_torch)
        return
    attributes = stateful_attributes(trainer)
    loads = {group: _prepared_load(group, attributes[group], in_torch[group]) for group in groups}
    for group, (load, state) in loads.items():
        _load(trainer, group, load, state)


def load_module_tensors(trainer: object, tensors: Tensors) -> None:
    """Load the result of `module_tensors` into a trainer of the same structure, in place.

    Every group is checked before any is loaded. The group "random" is ignored. Raises CheckpointError with the tensor's
    name, and the shape and dtype that were expected and found.
    """
    tensors = {group: content for group, content in tensors.items() if group != RANDOM_GROUP}
    if (arrays := arrays_of(trainer)) is not None and _fit_arrays(arrays, tensors):
        for name, part in arrays.items():
            _load_arrays(part, tensors.get(name, {}))
        return
    tensors = _in_torch(tensors)
    own = getattr(trainer, "load_state_tensors", None)
    if own is not None:
        _load(trainer, "load_state_tensors", own, tensors)
        return
    for name, (load, state) in _prepared_loads(trainer, tensors).items():
        _load(trainer, name, load, state)


def check_module_tensors(trainer: object, tensors: Tensors) -> None:
    """Raise CheckpointError if `load_module_tensors` would refuse `tensors`; load nothing.

    A trainer's own `load_state_tensors` is not asked.
    """
    if (arrays := arrays_of(trainer)) is not None and _fit_arrays(arrays, tensors):
        return
    if getattr(trainer, "load_state_tensors", None) is None:
        _prepared_loads(trainer, _in_torch(tensors))


def _fit_arrays(arrays: ArrayParts, tensors: Tensors) -> bool:
    """Whether `tensors` are arrays that networks and optimizers in arrays may take as they are.

    Anything else is left to torch, which accepts more and says what is wrong; it is not imported here.
    """
    parts = {name: part for name, part in arrays.items() if isinstance(part, ArrayAdam) or _arrays_of_part(part)}
    try:
        return tensors.keys() == parts.keys() and all(_fits(name, parts[name], tensors[name]) for name in tensors)
    except CheckpointError:
        return False


def _fits(name: str, part: object, found: Mapping[str, Stored]) -> bool:
    if not all(isinstance(value, np.ndarray) for value in found.values()):
        return False
    if not isinstance(part, ArrayAdam):
        _check_tensors(name, _arrays_of_part(part), found)
        return True
    scalars, unflattened = _json_value(name, found), _Unflattener(name, found)
    state = unflattened("", scalars.pop("state_dict", None))
    same = scalars == {"class": part.name, "parameters": part.parameter_shapes()}
    return same and unflattened.used == set(found) - {_SCALARS} and part.fits(state)


def _in_torch(tensors: Tensors) -> dict[str, dict[str, torch.Tensor]]:
    return {
        group: {k: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for k, v in content.items()}
        for group, content in tensors.items()
    }


def _arrays_of_part(part: object) -> Mapping[str, np.ndarray]:
    """The arrays of a network or a number, which are its state; empty for an optimizer, and for what is not saved."""
    if isinstance(part, ArrayModule):
        return part.state()
    return {"value": part.values} if isinstance(part, ArrayValue) and part.saved else {}


def _group_of_arrays(name: str, part: object) -> dict[str, Stored]:
    """The group of a part that is in arrays; empty for parts that have none."""
    group: dict[str, Stored] = {key: values.copy() for key, values in _arrays_of_part(part).items()}
    if isinstance(part, ArrayAdam):
        scalars: dict[str, Any] = {"class": part.name, "parameters": part.parameter_shapes()}
        scalars["state_dict"] = _flatten(name, "", part.state_dict(), group)
        group[_SCALARS] = np.frombuffer(bytearray(json.dumps(scalars).encode()), np.uint8)
    return group


def _load_arrays(part: object, group: Mapping[str, Any]) -> None:
    """The inverse, for a group that fits."""
    if isinstance(part, ArrayAdam):
        state = _Unflattener(part.name, group)("", _json_value(part.name, group)["state_dict"])
        part.load(state["state"].get(0, {}), state["param_groups"][0])
    for key, values in _arrays_of_part(part).items():
        values[...] = group[key]


def _prepared_loads(
    trainer: object, tensors: Mapping[str, Mapping[str, torch.Tensor]]
) -> dict[str, tuple[Callable[[Any], object], Any]]:
    attributes = stateful_attributes(trainer.in_torch() if isinstance(trainer, Trainer) else trainer)
    _check_names(f"{type(trainer).__name__}'s networks and optimizers", attributes, tensors)
    return {name: _prepared_load(name, value, tensors[name]) for name, value in attributes.items()}


def _load(trainer: object, name: str, load: Callable[[Any], object], state: Any) -> None:
    try:
        load(state)
    except CheckpointError:
        raise
    except Exception as error:  # torch's and users' methods may raise anything
        raise CheckpointError(
            f"{name!r} of {type(trainer).__name__} did not take the state of the checkpoint: {error!r}. "
            "The trainer is now partly loaded: resume with the classes that were saved."
        ) from error


def stateful_attributes(trainer: object) -> dict[str, Any]:
    """The attributes of a trainer in torch that `module_tensors` saves, by name, each object once."""
    stateful = (
        torch.nn.Module,
        torch.optim.Optimizer,
        torch.optim.lr_scheduler.LRScheduler,
        torch.amp.GradScaler,
        torch.Generator,
    )
    candidates: dict[str, object] = {"self": trainer} if isinstance(trainer, torch.nn.Module) else {}
    found: dict[str, Any] = {}
    for name, value in (candidates | attributes_of(trainer, stateful)).items():
        held = isinstance(value, stateful) or is_kept_tensor(value)
        if held and not any(value is other for other in found.values()):
            found[name] = value
    if RANDOM_GROUP in found:
        raise CheckpointError(f"The trainer's attribute {RANDOM_GROUP!r} takes a reserved name: call it otherwise.")
    if not found:
        raise CheckpointError(
            f"{type(trainer).__name__} has no torch module or optimizer among its attributes, so there is nothing to "
            "save. Keep the networks in attributes, or define state_tensors() and load_state_tensors(tensors)."
        )
    return found


def _group_of(name: str, value: Any) -> dict[str, Stored]:
    tensors: dict[str, Stored] = {}
    if isinstance(value, torch.Tensor):
        return {"value": _copied(value)}
    if isinstance(value, torch.Generator):
        return {"state": value.get_state()}
    if isinstance(value, torch.nn.Module):
        state = uncompiled(value).state_dict()
        extra = {k: _flatten(name, k, v, tensors) for k, v in state.items() if not isinstance(v, torch.Tensor)}
        tensors.update({k: _copied(v) for k, v in state.items() if isinstance(v, torch.Tensor)})
        if extra:
            tensors[_SCALARS] = _json_tensor(extra)
        return tensors
    scalars: dict[str, JsonValue] = {"class": type(value).__name__}
    if isinstance(value, torch.optim.Optimizer):
        scalars["parameters"] = _parameter_shapes(value)
    scalars["state_dict"] = _flatten(name, "", value.state_dict(), tensors)
    return {**tensors, _SCALARS: _json_tensor(scalars)}


def _prepared_load(name: str, value: Any, found: Mapping[str, torch.Tensor]) -> tuple[Any, Any]:
    """Check `found` against the live object; return the function that loads it and its argument."""
    if isinstance(value, torch.Tensor):
        _check_tensors(name, {"value": value}, found)
        return value.detach().copy_, found["value"]
    if isinstance(value, torch.Generator):
        _check_tensors(name, {"state": value.get_state()}, found)
        return value.set_state, found["state"]
    if isinstance(value, torch.nn.Module):
        module = uncompiled(value)
        state = module.state_dict()
        unflattened = _Unflattener(name, found)
        extra = {k: unflattened(k, v) for k, v in (_json_value(name, found) if _SCALARS in found else {}).items()}
        kept = {k: t for k, t in found.items() if k != _SCALARS and k not in unflattened.used}
        _check_tensors(name, {k: v for k, v in state.items() if isinstance(v, torch.Tensor)}, kept)
        return module.load_state_dict, {**kept, **extra}
    scalars = _json_value(name, found)
    if scalars.get("class") != type(value).__name__:
        raise CheckpointError(
            f"{name!r} is a {type(value).__name__}; the checkpoint holds a {scalars.get('class')}. "
            "Resume with the class that was saved."
        )
    expected = {"class", "state_dict"} | ({"parameters"} if isinstance(value, torch.optim.Optimizer) else set())
    _check_names(f"The parts of {name!r}", expected, scalars)
    unflattened = _Unflattener(name, found)
    state = unflattened("", scalars["state_dict"])
    _check_names(f"The tensors of {name!r}", unflattened.used, set(found) - {_SCALARS})
    if isinstance(value, torch.optim.Optimizer):
        _check_parameters(name, _parameter_shapes(value), scalars["parameters"])
        check_optimizer_state(name, value, state)
    else:
        check_scheduler_state(name, value, state)
    return value.load_state_dict, state


def uncompiled(module: Any) -> Any:
    """The module inside `torch.compile`'s wrapper, so that compiling is no difference between two runs."""
    return getattr(module, "_orig_mod", module)


def _parameter_shapes(optimizer: torch.optim.Optimizer) -> list[JsonValue]:
    return [[list(p.shape) for p in group["params"]] for group in optimizer.param_groups]


def _check_parameters(name: str, expected: Any, found: Any) -> None:
    if expected == found:
        return
    shapes = isinstance(found, list) and all(isinstance(g, list) and all(isinstance(s, list) for s in g) for g in found)
    if shapes and [len(g) for g in found] == [len(g) for g in expected]:
        flat_expected, flat_found = [s for g in expected for s in g], [s for g in found for s in g]
        at = next(i for i, (e, f) in enumerate(zip(flat_expected, flat_found, strict=True)) if e != f)
        what = f"parameter {at} has shape {tuple(flat_expected[at])}; the checkpoint's has {tuple(flat_found[at])}"
    else:
        counts = [len(g) for g in found] if shapes else found
        what = f"its groups have {[len(g) for g in expected]} parameters; the checkpoint's have {counts}"
    raise CheckpointError(f"Optimizer {name!r} differs: {what}. Resume with the networks that were saved.")


def _check_names(what: str, expected: Iterable[str], found: Iterable[str]) -> None:
    missing, unknown = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
    if missing or unknown:
        raise CheckpointError(
            f"{what} do not match the checkpoint: it lacks {missing or 'nothing'} and has {unknown or 'nothing'} "
            "besides. Resume with the trainer that was saved."
        )


def _check_tensors(group: str, expected: Mapping[str, Stored], found: Mapping[str, Stored]) -> None:
    _check_names(f"The tensors of {group!r}", expected, found)
    for name, tensor in expected.items():
        other = found[name]
        if tensor.shape != other.shape or tensor.dtype != other.dtype:
            raise CheckpointError(
                f"Tensor {name!r} of {group!r} has shape {tuple(tensor.shape)} and dtype {tensor.dtype}; the "
                f"checkpoint's has shape {tuple(other.shape)} and dtype {other.dtype}. "
                "Resume with the networks that were saved."
            )


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


def _json_tensor(value: JsonValue) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _json_value(name: str, tensors: Mapping[str, Stored]) -> dict[str, Any]:
    stored = tensors.get(_SCALARS)
    found = stored.cpu().numpy() if is_tensor(stored) else stored
    if isinstance(found, np.ndarray) and found.dtype == np.uint8 and found.ndim == 1:
        try:
            value = json.loads(found.tobytes().decode("utf-8"))
        except (ValueError, RecursionError):
            value = None
        if isinstance(value, dict):
            return value
    raise CheckpointError(f"Group {name!r} of the checkpoint lacks a readable {_SCALARS!r}: it is of another kind.")


def _flatten(group: str, path: str, value: Any, tensors: dict[str, Stored]) -> JsonValue:
    """A state dict as JSON, its tensors moved into `tensors` under their paths, such as `state/0/exp_avg`."""
    if isinstance(value, Array) or is_tensor(value):
        if path in tensors:
            raise CheckpointError(f"Two tensors of {group!r} have the path {path!r}: they cannot both be stored.")
        tensors[path] = value.values.copy() if isinstance(value, Array) else _copied(value)
        return {"tensor": path}
    if isinstance(value, np.generic):
        return _flatten(group, path, value.item(), tensors)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    prefix = f"{path}/" if path else ""
    if isinstance(value, list | tuple):
        items: list[JsonValue] = [_flatten(group, f"{prefix}{i}", v, tensors) for i, v in enumerate(value)]
        return {"tuple": items} if isinstance(value, tuple) else items
    if isinstance(value, Mapping):
        pairs: list[JsonValue] = [
            [_flatten(group, path, k, tensors), _flatten(group, f"{prefix}{k}", v, tensors)] for k, v in value.items()
        ]
        return {"counter" if isinstance(value, Counter) else "mapping": pairs}
    raise CheckpointError(
        f"{path!r} in the state dict of {group!r} is a {type(value).__name__}, which cannot be stored without pickle. "
        "Define state_tensors() and load_state_tensors(tensors) on the trainer."
    )


class _Unflattener:
    """The inverse of `_flatten`: a state dict from JSON, and from the tensors of the group under their paths.

    CheckpointError unless each tensor stands under the path of its place, so that nothing is left over or taken twice.
    """

    def __init__(self, group: str, tensors: Mapping[str, Stored]) -> None:
        self._group, self._tensors = group, tensors
        self.used: set[str] = set()

    def __call__(self, path: str, value: JsonValue) -> Any:
        try:
            return self._value(path, value)
        except (KeyError, ValueError, TypeError, RecursionError) as error:
            raise CheckpointError(
                f"The state dict of {self._group!r} in the checkpoint is malformed: {error!r}. Resume from another."
            ) from error

    def _value(self, path: str, value: JsonValue) -> Any:
        prefix = f"{path}/" if path else ""
        if isinstance(value, list):
            return [self._value(f"{prefix}{i}", item) for i, item in enumerate(value)]
        if not isinstance(value, dict):
            return value
        ((kind, content),) = value.items()
        if kind == "tensor":
            if content != path:
                raise ValueError(f"the tensor at {path!r} is said to be {content!r}")
            self.used.add(path)
            found = self._tensors[path]
            return found.copy() if isinstance(found, np.ndarray) else found.clone()
        if not isinstance(content, list):
            raise ValueError(f"a {kind} is a list; found {content!r:.60}")
        if kind == "tuple":
            return tuple(self._value(path, content))
        pairs = [self._pair(prefix, pair) for pair in content]
        mapping = dict(pairs)
        if len(mapping) < len(pairs):
            raise ValueError(f"a key stands twice at {path!r}")
        return {"mapping": dict, "counter": Counter}[kind](mapping)

    def _pair(self, prefix: str, pair: JsonValue) -> tuple[Any, Any]:
        if not isinstance(pair, list):
            raise ValueError(f"a key and its value are a list; found {pair!r:.60}")
        saved_key, value = pair
        key = self._value("", saved_key)
        return key, self._value(f"{prefix}{key}", value)


def torch_random_tensors() -> dict[str, torch.Tensor]:
    """Global random states of torch, for the tensor group "random": "cpu" and, once CUDA is in use, "cuda.0", ...

    None where torch was not imported: no random number was drawn then.
    """
    if not is_imported():
        return {}
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states.update({f"cuda.{i}": state for i, state in enumerate(torch.cuda.get_rng_state_all())})
    return states


def restore_torch_random(tensors: Mapping[str, Stored]) -> None:
    """Set torch's global random states; those of GPUs absent here are passed over with a warning.

    Empty, as `torch_random_tensors` may return them, they leave torch with the seed of the run.
    """
    if not tensors:
        return
    if "cpu" not in tensors:
        raise CheckpointError("The checkpoint holds no random state of the CPU: it is damaged. Resume from another.")
    for name, state in _in_torch({RANDOM_GROUP: tensors})[RANDOM_GROUP].items():
        if not _RANDOM_DEVICE.fullmatch(name):
            raise CheckpointError(
                f"The checkpoint holds a random state of {name!r}; expected cpu or cuda.0, cuda.1, ..."
            )
        try:
            if name == "cpu":
                if state.shape != torch.get_rng_state().shape:
                    raise ValueError(f"its shape is {tuple(state.shape)}")
                torch.set_rng_state(state)
            elif (index := int(name.removeprefix("cuda."))) < torch.cuda.device_count():
                torch.cuda.set_rng_state(state, index)
            else:
                _log.warning("The checkpoint holds a random state of %s, which is absent here.", name)
        except (RuntimeError, TypeError, ValueError) as error:
            raise CheckpointError(f"The random state of {name} does not fit this torch: {error}.") from error
