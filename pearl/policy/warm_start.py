"""Starts the networks of a new run with the weights of another one."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from pearl.algorithms.trainer import Trainer, TrainerLike
from pearl.errors import PolicyError
from pearl.policy.loading import read_weights
from pearl.runtime.checkpoint_files import Stored
from pearl.runtime.outcome import flat_tensors
from pearl.runtime.trainer_state import RANDOM_GROUP, load_networks, module_tensors, network_groups, policy_groups
from pearl.spec import RETURN_STATISTICS


def load_weights_of(trainer: TrainerLike, path: Path) -> str:
    """Load the networks of the run in the folder `path`, or of a weights file, into `trainer`; return the file.

    Of a run these are the best weights if it has some, else the last ones. They include target networks and the
    statistics of normalised observations; optimizers and SAC's temperature stay as they are. Raises PolicyError if
    there are no weights, or if they are those of other networks, of other bounds or of a policy alone.
    """
    flat, file = read_weights(path)
    tensors = module_tensors(trainer)
    # Statistics of returns scale rewards: no network depends on them.
    groups = [group for group in network_groups(trainer) if group != RETURN_STATISTICS]
    others = {RANDOM_GROUP, RETURN_STATISTICS, *tensors} - {*groups}  # a checkpoint has optimizers too
    expected = flat_tensors(tensors, groups)
    found = {name: tensor for name, tensor in flat.items() if name in expected or not _is_of(name, others)}
    of_policy = flat_tensors(tensors, policy_groups(trainer))
    if found.keys() != expected.keys() and found.keys() == of_policy.keys():
        raise PolicyError(
            f"{file} has the policy alone, as `pearl export` and KeepBest write it, without the other networks of "
            f"{type(trainer).__name__}. Name the folder of the run, or its weights.safetensors."
        )
    if differences := list(_differences(expected, found)):
        raise PolicyError(
            f"The weights in {file} are those of other networks than {type(trainer).__name__}'s: "
            f"{'; '.join(differences)}. Use the trainer class, spaces and settings of the run that they come from."
        )
    if isinstance(trainer, Trainer) and (conflict := trainer.checkpoint_conflict(_by_group(found, groups))):
        raise PolicyError(
            f"The weights in {file} are of another environment. {conflict} Bring both environments to the same bounds, "
            "for example with gymnasium.wrappers.RescaleAction or RescaleObservation, or with its arguments."
        )
    load_networks(trainer, found, groups)
    return file


def _by_group(flat: Mapping[str, Stored], groups: Collection[str]) -> dict[str, dict[str, Stored]]:
    return {
        group: {name.removeprefix(f"{group}."): flat[name] for name in flat if name.startswith(f"{group}.")}
        for group in groups
    }


def _is_of(name: str, groups: Collection[str]) -> bool:
    return any(name.startswith(f"{group}.") for group in groups)


def _differences(expected: Mapping[str, Stored], found: Mapping[str, Stored]) -> Iterator[str]:
    for what, names in (("without", expected.keys() - found.keys()), ("also with", found.keys() - expected.keys())):
        if names:
            yield f"{what} {', '.join(sorted(names)[:4])}{', ...' if len(names) > 4 else ''}"
    for name in sorted(expected.keys() & found.keys()):
        shapes = tuple(found[name].shape), tuple(expected[name].shape)
        if shapes[0] != shapes[1]:
            yield f"{name} has the shape {shapes[0]}, not {shapes[1]}"
            return
