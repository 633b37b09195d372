"""Composes a generated program again, from its own values, with new measurements: `--recompose` of a program."""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
import os
import re
import shlex
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from composer.codegen.program import is_edited
from composer.composer import Composer
from composer.on_policy.composition import ROLLOUT_TRAINING
from pearl.error_place import described
from pearl.errors import ConfigurationError, PearlError
from pearl.runtime.launch import run_command, shown
from pearl.runtime.recomposition import ComposerInputs, Request, become
from pearl.spec import ActorSpec, ReplaySpec, RolloutSpec, TrainSpec

logger = logging.getLogger("pearl.composer")

_DATA = {"REPLAY": ReplaySpec, "ROLLOUT": RolloutSpec}
_NUMBERED = re.compile(r"_recomposed_\d+$")


@dataclasses.dataclass(frozen=True)
class Recomposed:
    """A program that was composed again: the new program, and where the primitives were and are placed, in words."""

    program: Path
    before: str
    now: str


def recompose(program: Path, defaults: Mapping[str, Any] | None = None, *, progress: bool = True) -> Recomposed:
    """Measure again for the generated `program`, place again, and write a new program next to it.

    The program is imported, not run: its trainer class, ACTORS, REPLAY or ROLLOUT, TRAIN, SETTINGS and ComposerInputs
    count, also as edited. No measurement of the calibration store is used; the new ones replace them there. `defaults`
    are arguments of `Composer.runtime_gen`. Raises ConfigurationError for a program without these values, and the
    errors of composing.
    """
    module = _imported(program)
    inputs, trainer = _composer_inputs(module, program)
    if is_edited(program):
        logger.warning(
            "%s was edited since it was composed. The new program has its ACTORS, %s, TRAIN and SETTINGS, but no "
            "other edits.",
            program.name,
            _data_of(module),
        )
    composer = Composer(progress=progress, remeasure=True)
    _describe(composer, module, inputs, trainer, program.parent)
    composer.run()
    path = _next_name(program)
    composer.runtime_gen(path=path, **(defaults or {}))
    return Recomposed(path, inputs.placed, composer.placement.text)


def _imported(program: Path) -> ModuleType:
    found = importlib.util.spec_from_file_location("_pearl_program", program)
    if found is None or found.loader is None or not program.is_file():
        raise ConfigurationError(f"There is no program {program} to compose again.")
    module = importlib.util.module_from_spec(found)
    sys.modules[found.name] = module  # dataclasses of the program look for their module
    try:
        found.loader.exec_module(module)
    except Exception as error:  # an edited program may raise anything at import
        raise ConfigurationError(f"{program} cannot be imported to be composed again: {described(error)}.") from error
    except SystemExit as error:  # the trainer class cannot be imported, as a printed message says
        raise ConfigurationError(f"{program} cannot be imported to be composed again.") from error
    return module


def _composer_inputs(module: ModuleType, program: Path) -> tuple[ComposerInputs, type]:
    if hasattr(module, "LEARNERS"):
        raise ConfigurationError(
            f"{program} has several Learners, and only programs of one are composed again. Compose it as before, with "
            "set_learners, and resume the run with the new program."
        )
    inputs = getattr(getattr(module, "PROGRAM", None), "composer_inputs", None)
    data = _data_of(module)
    expected = {"ACTORS": ActorSpec, data: _DATA[data], "TRAIN": TrainSpec, "SETTINGS": dict}
    wrong = [name for name, kind in expected.items() if not isinstance(getattr(module, name, None), kind)]
    trainer = getattr(module, inputs.trainer, None) if isinstance(inputs, ComposerInputs) else None
    if not isinstance(inputs, ComposerInputs) or not isinstance(trainer, type) or wrong:
        lacks = wrong[0] if wrong else "composer_inputs of its PROGRAM, with the name of the trainer class"
        raise ConfigurationError(
            f"{program} cannot be composed again: expected what the composer writes into programs; found no {lacks}. "
            "Compose it with this version of PEARL."
        )
    return inputs, trainer


def _data_of(module: ModuleType) -> str:
    """The program's name of its training data: REPLAY or ROLLOUT."""
    return "ROLLOUT" if hasattr(module, "ROLLOUT") else "REPLAY"


def _describe(composer: Composer, module: ModuleType, inputs: ComposerInputs, trainer: type, folder: Path) -> None:
    """Repeat the `set_*` calls with which the program was composed."""
    if inputs.devices:
        composer.set_device_file(_from(folder, inputs.devices))
        composer.set_connection_file(_from(folder, inputs.connections))
    composer.set_opt_metric(inputs.metric)
    actors, train = _values(module.ACTORS), _values(module.TRAIN)
    nodes = actors.pop("nodes")  # the composer gives Actors to the nodes again, as they are now
    if inputs.cluster:
        composer.set_cluster(inputs.cluster, inputs.cluster_nodes)
    elif nodes and not inputs.devices:
        raise ConfigurationError(
            f"{inputs.trainer}'s ACTORS have nodes of a cluster, and ComposerInputs name none. Add "
            'cluster="auto", or its address, there; or compose with set_cluster, and resume the run.'
        )
    composer.set_wrappers(actors.pop("wrappers", ()))
    composer.set_actors(actors.pop("count"), **actors)
    composer.set_train_function(
        trainer,
        implementation=inputs.implementation,
        imported_from=inputs.imported_from,
        **module.SETTINGS,
    )
    if _data_of(module) == "ROLLOUT":
        composer.set_rollout(**_values(module.ROLLOUT))
        composer.set_training(**{name: train[name] for name in ROLLOUT_TRAINING})
        return
    replay = _values(module.REPLAY)
    composer.set_replay(replay.pop("capacity"), **{**replay, "fanout": inputs.fanout})
    composer.set_training(**{**train, "priority_update_delay": inputs.priority_update_delay})


def _from(folder: Path, name: str) -> Path:
    return Path(os.path.relpath(folder / name))


def _values(record: Any) -> dict[str, Any]:
    """The fields of a frozen dataclass, not copied: a schedule stays a schedule."""
    return {f.name: getattr(record, f.name) for f in dataclasses.fields(record)}


def _next_name(program: Path) -> Path:
    stem, number = _NUMBERED.sub("", program.stem), 1
    while (path := program.with_name(f"{stem}_recomposed_{number}{program.suffix}")).exists():
        number += 1
    return path


def main(text: str) -> NoReturn:
    """Compose the program of the request again and become the new program; the old one goes on if that fails."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    environment = dict(os.environ)  # importing a program may change it
    request = Request.from_json(text)
    program = Path(request.program)
    print(f"Composing {shown(program)} again: {request.drift}.", flush=True)
    arguments = ["--resume", "--no-recompose"]
    try:
        made = recompose(program, request.defaults)
    except KeyboardInterrupt:
        command = f"{run_command(program)} {shlex.join([*request.arguments, '--resume'])}"
        print(f"Interrupted. The checkpoint is kept: {command}", file=sys.stderr)
        sys.exit(130)
    except Exception as error:  # whatever it is, the run must go on
        message = str(error) if isinstance(error, PearlError) else described(error)
        print(f"Error: {message}\nThe run goes on with {shown(program)}.", file=sys.stderr, flush=True)
    else:
        if made.before == made.now:
            print("The best placement is the same: from now on, a drift is only reported.", flush=True)
        else:
            print(f"The placement was: {made.before}.\nNow it is:         {made.now}.", flush=True)
            arguments = ["--resume", "--recompose"]
        program = made.program
    become([sys.executable, str(program), *request.arguments, *arguments], environment)
