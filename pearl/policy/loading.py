"""Loads a policy from the folder of a run, or from a file that `pearl export` wrote.

Nothing that is read is unpickled, and nothing in a run folder is executed. Of a trainer class with code of its own the
file is imported from which the run's program imported it, unless it is inside the run folder: whoever sends a run
folder must not have his code run.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from pearl.actors.actor import Policy
from pearl.actors.native_policy import NativePolicy
from pearl.actors.policy_plan import read_policy
from pearl.actors.torch_policy import torch_policy
from pearl.algorithms import ALGORITHMS
from pearl.algorithms.trainer import Trainer, TrainerLike, make_trainer, schedule_settings_of
from pearl.errors import CheckpointError, PearlError, PolicyError
from pearl.learner.native_plan import UnsupportedError
from pearl.policy.description import POLICY_FILE, PolicyDescription, checkpoints_of, is_own, read_description
from pearl.policy.saved import SavedPolicy, WeightsOrigin, check_seed
from pearl.policy.source import import_from_file
from pearl.runtime.checkpoint import latest_checkpoint, step_of
from pearl.runtime.checkpoint_files import Stored, check_file, read_manifest, read_tensors
from pearl.runtime.outcome import BEST_WEIGHTS, LAST_WEIGHTS
from pearl.runtime.run_state import BEST_PREFIX, RUN_FOLDER
from pearl.runtime.trainer_state import load_networks
from pearl.schedules import names_code
from pearl.spec import OBSERVATION_STATISTICS

Which: TypeAlias = Literal["best", "last"]

METADATA = "pearl.policy"  # the key of the description in a file of `pearl export`

_NORMALIZATION = ("observation_mean", "observation_scale")

logger = logging.getLogger("pearl.policy")


def load_policy(
    run: str | Path, which: Which | None = None, *, trainer: type | None = None, seed: int = 0
) -> SavedPolicy:
    """The policy of the run in the folder `run`, or of a safetensors file that `pearl export` wrote.

    `which` chooses the "best" weights, which the short evaluations selected, or the "last"; None: the best if there are
    some. Before the run has ended, also after --resume, they come from its newest checkpoint. `trainer` is the trainer
    class, if it has code of its own: without it, the class is taken from its module if that is imported already, else
    from the file from which the program imported it, with a warning that names the file. `seed` is that of stochastic
    actions.

    Raises PolicyError if the policy is missing, damaged, of another version, or lacks its normalisation, or if its
    class cannot be had.
    """
    if which is not None and which not in get_args(Which):
        raise PolicyError(f'which must be "best", "last" or None for the best if there is one; found {which!r}.')
    if not isinstance(run, str | os.PathLike):
        raise PolicyError(f"run must be the folder of a run, or a file of `pearl export`; found {run!r}.")
    check_seed(seed)
    path = Path(run)
    if path.is_file():
        if which is not None:
            raise PolicyError(f"{path} holds one set of weights: leave out which={which!r}, or pass the run's folder.")
        description, flat, origin = _read_file(path)
    elif path.is_dir():
        description = read_description(path / POLICY_FILE)
        flat, origin = _read_weights(path, which)
    else:
        raise PolicyError(f"There is no run at {path}. A program's --run-dir says where its run goes.")
    _check_normalization(description, origin)
    made = _make_trainer(description, trainer, path)
    _check_saved_normalization(made, flat, origin)
    try:
        load_networks(made, flat)
    except CheckpointError as error:
        raise PolicyError(
            f"The weights in {origin.file} are not those of {type(made).__name__} as it is now: {error} If the class "
            "was changed since the run, load the policy with the class as it was."
        ) from error
    return SavedPolicy(description, made, acting_of(made), origin, seed)


def read_weights(path: Path) -> tuple[Mapping[str, Stored], str]:
    """All weights of the run in the folder `path`, by `group.name`: the best if there are some, else the last.

    `path` may also be one weights file. Before the run has ended, they come from its newest checkpoint, which holds its
    optimizers too. The second result is the file or the checkpoint. Raises PolicyError if there are none.
    """
    if path.is_dir():
        flat, origin = _read_weights(path, None)
        return flat, origin.file
    if not path.is_file():
        raise PolicyError(
            f"There is no run and no weights file at {path}. A program's --run-dir says where its run goes."
        )
    return _read_tensors(path), str(path)


def acting_of(trainer: TrainerLike) -> Policy:
    """A policy with the trainer's present weights: in C++ if the native engine knows its layers, else in torch."""
    try:
        return NativePolicy(read_policy(trainer))
    except UnsupportedError as error:
        logger.debug("The policy runs in torch: the native engine does not support %s.", error)
        return torch_policy(trainer)


# --- weights ----------------------------------------------------------------------------------------------------------


def _read_file(path: Path) -> tuple[PolicyDescription, Mapping[str, Stored], WeightsOrigin]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "numpy") as file:
            content = (file.metadata() or {}).get(METADATA)
    except (SafetensorError, OSError) as error:
        raise PolicyError(f"{path} is not a safetensors file ({error}). `pearl export` writes one.") from error
    if content is None:
        raise PolicyError(
            f"{path} holds weights, but does not describe their policy. Pass the folder of the run, or a file of "
            "`pearl export RUN --format safetensors`."
        )
    description = PolicyDescription.from_json(content, str(path))
    kept = json.loads(content).get("weights")
    kept = kept if isinstance(kept, dict) else {}
    step, mean, episodes = kept.get("step"), kept.get("mean_return"), kept.get("episodes")
    which = str(kept.get("which", "exported"))
    origin = WeightsOrigin(which, str(path), str(path.parent), _count(step), _real(mean), _count(episodes))
    return description, _read_tensors(path), origin


def _read_weights(run: Path, which: Which | None) -> tuple[Mapping[str, Stored], WeightsOrigin]:
    files = {"best": run / BEST_WEIGHTS, "last": run / LAST_WEIGHTS}
    chosen: Which = which or ("best" if files["best"].is_file() or not files["last"].is_file() else "last")
    file, checkpoints = files[chosen], checkpoints_of(run)
    checkpoint, has_ended = _latest_checkpoint(checkpoints), files["last"].is_file()
    ended = _origin_of(run, "last", files["last"]).step
    is_resumed = checkpoint is not None and ended is not None and step_of(checkpoint) > ended
    is_needed = is_resumed or not (file.is_file() or has_ended)
    if checkpoint is not None and is_needed and _is_of(run, checkpoint):
        return _read_checkpoint(run, checkpoint, which)
    if file.is_file():
        return _read_tensors(file), _origin_of(run, chosen, file)
    if has_ended:
        raise PolicyError(
            f"{run} has no best weights: nothing was evaluated on the way (--eval-episodes, --eval-interval). "
            'Load the last ones, with which="last".'
        )
    owner = None if checkpoint is None else read_manifest(checkpoint).counters.get(RUN_FOLDER)
    if owner is not None and not Path(str(owner)).exists():
        raise PolicyError(
            f"{run} has no {LAST_WEIGHTS}, and the checkpoints in {checkpoints} are of a run in {owner}, which is not "
            "there any more. If that is this run, move its folder back: checkpoints outside of it know it by its path."
        )
    raise PolicyError(
        f"{run} has neither {LAST_WEIGHTS} nor a checkpoint of its own in {checkpoints}: the run has saved nothing "
        "yet, or that folder cannot be read, was moved, or is now another run's."
    )


def _latest_checkpoint(checkpoints: Path) -> Path | None:
    """The newest checkpoint there; None where there is none to be read."""
    try:
        return latest_checkpoint(checkpoints)
    except OSError as error:  # a folder elsewhere may be another user's: an ended run has its weights without it
        logger.debug("%s cannot be read: %s.", checkpoints, error)
        return None


def _is_of(run: Path, checkpoint: Path) -> bool:
    """Whether the checkpoint is the run's, and not that of another run which has used its folder since."""
    # Checkpoints in the run's own folder name no run, so that it may be moved, unless it is another one's.
    owner = read_manifest(checkpoint).counters.get(RUN_FOLDER)
    return owner == str(run.resolve()) or (owner is None and is_own(checkpoint.parent, run))


def _origin_of(run: Path, which: Which, file: Path) -> WeightsOrigin:
    """The step and the unselected score of the weights, from the run's summary."""
    try:
        summary = json.loads((run / "summary.json").read_text(encoding="utf-8", errors="replace"))
        found = summary[which]
        step, mean, episodes = found.get("step"), found.get("mean"), found.get("episodes")
        return WeightsOrigin(which, str(file), str(run), _count(step), _real(mean), _count(episodes))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return WeightsOrigin(which, str(file), str(run))  # only the report needs it


def _count(value: object) -> int | None:
    return value if type(value) is int else None


def _real(value: object) -> float | None:
    return float(value) if type(value) in (int, float) else None  # type: ignore[arg-type]


def _read_tensors(file: Path) -> Mapping[str, Stored]:
    try:
        return read_tensors(file.parent, file.name)
    except CheckpointError as error:
        raise PolicyError(f"{file.parent}: {error} Take it from the run again.") from error


def _read_checkpoint(run: Path, folder: Path, which: Which | None) -> tuple[Mapping[str, Stored], WeightsOrigin]:
    """The weights of a checkpoint: without its replay, which may be large."""
    manifest = read_manifest(folder)
    has_best = f"{BEST_PREFIX}env_steps" in manifest.counters
    chosen: Which = which or ("best" if has_best else "last")
    if chosen == "best" and not has_best:
        raise PolicyError(
            f'{folder} has no best weights: nothing was evaluated before it. Load the last ones, with which="last".'
        )
    flat: dict[str, Stored] = {}
    for name, entry in manifest.files.items():
        group = name.removeprefix("tensors/").removesuffix(".safetensors")
        if not name.startswith("tensors/") or group.startswith(BEST_PREFIX) != (chosen == "best"):
            continue
        check_file(folder, name, entry)
        group = group.removeprefix(BEST_PREFIX)
        flat |= {f"{group}.{key}": tensor for key, tensor in read_tensors(folder, name).items()}
    step = manifest.counters[f"{BEST_PREFIX}env_steps"] if chosen == "best" else manifest.step
    return flat, WeightsOrigin(chosen, str(folder), str(run), _count(step))


# --- normalisation ----------------------------------------------------------------------------------------------------


def _check_normalization(description: PolicyDescription, origin: WeightsOrigin) -> None:
    if wrappers := description.unshared_normalization:
        raise PolicyError(
            f"The policy in {origin.file} was trained on observations that {', '.join(wrappers)} normalised by running "
            "statistics, which no run keeps: it would see other numbers now. Train without the wrapper, and scale "
            "observations by constants, by the trainer's scale_observations, or by its normalize_observations, whose "
            "statistics belong to the policy."
        )


def _check_saved_normalization(trainer: TrainerLike, flat: Mapping[str, Stored], origin: WeightsOrigin) -> None:
    if not getattr(trainer, "normalize_observations", False):
        return
    before_storing = isinstance(trainer, Trainer) and OBSERVATION_STATISTICS in trainer.transition_statistics
    needed = [f"{OBSERVATION_STATISTICS}.mean"] if before_storing else _NORMALIZATION
    missing = [name for name in needed if not any(key == name or key.endswith(f".{name}") for key in flat)]
    if missing:
        raise PolicyError(
            f"{type(trainer).__name__} normalises observations, but {origin.file} lacks {' and '.join(missing)}: its "
            "policy would see other numbers than in training. Take the weights from the run again."
        )


# --- the trainer ------------------------------------------------------------------------------------------------------


def _make_trainer(description: PolicyDescription, given: type | None, run: Path) -> TrainerLike:
    source = description.trainer
    settings = description.settings
    if given is None and source.algorithm is not None:
        found: type = ALGORITHMS[source.algorithm]
    else:
        found = _given_class(given, source.name) if given is not None else _import_trainer(description, run)
    if settings is None:
        raise PolicyError(
            f"The settings of {source.name} in {run} are no plain values: its policy cannot be made again from them. "
            "Set them in the class instead of passing them to set_train_function."
        )
    # Schedules are for training alone, and what the file of a policy says must not be imported.
    schedules = schedule_settings_of(found)
    settings = {name: value for name, value in settings.items() if name not in schedules}
    settings |= {name: "constant" for name in schedules if names_code(getattr(found, name))}
    try:
        return make_trainer(found, description.observation_space, description.action_space, settings=settings)
    except PearlError as error:
        raise PolicyError(f"The policy in {run} cannot be made again: {error}") from error


def _given_class(given: object, name: str) -> type:
    if not isinstance(given, type):
        raise PolicyError(f"trainer must be the run's trainer class, {name}; found {given!r:.80}.")
    return given


def _import_trainer(description: PolicyDescription, run: Path) -> type:
    """The class, from its module; PolicyError says where it was looked for."""
    source = description.trainer
    advice = (
        f"Pass the class: load_policy(run, trainer={source.name}), or on the command line --trainer "
        f"MODULE:{source.name}."
    )
    module = import_module_of(description, run, advice)
    found = getattr(module, source.name, None)
    if not isinstance(found, type):
        raise PolicyError(f"{getattr(module, '__file__', module)} has no class {source.name} any more. {advice}")
    return found


def import_module_of(description: PolicyDescription, run: Path, advice: str) -> Any:
    """The module of the run's trainer class; PolicyError, ending with `advice`, if it cannot be imported."""
    source = description.trainer
    return import_from_file(source.module, source.file, f"trainer class {source.name}", run, advice)
