"""Writes the runtime program: Jinja2 templates filled with validated values only."""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import inspect
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from composer.placement import LearnerConfig, Placement, ReplayConfig
from composer.profiling import Problem, torch_device
from pearl.actors import exploration
from pearl.devices.description import Device
from pearl.errors import GenerationError

_EXPLORATIONS = (exploration.EpsilonGreedy, exploration.GaussianNoise, exploration.OrnsteinUhlenbeck)
_COMMON_NAMES = {"CollectionBuffer", "DataCollectionQueue", "Program", "Session", "WeightSyncQueue"}
_SETTING_NAMES = {
    1: {"AssignmentQueue", "DoneQueue", "LearnerWorker"},
    2: {"GrantQueue", "ProgressQueue", "TrainingLoop"},
}


@dataclass(frozen=True)
class ProgramSource:
    """All that a program is made from."""

    placement: Placement
    replay: ReplayConfig
    learner: LearnerConfig
    problem: Problem
    device_file: Path | None
    connection_file: Path | None
    timesteps: int
    run_dir: Path
    until_return: float | None


def literal(value: object) -> str:
    """`value` as Python source; only plain values and exploration settings have one."""
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    if value is None or type(value) in (bool, int, float):
        return repr(value)
    if isinstance(value, str):
        text = repr(value)
        return text if '"' in value else '"' + text[1:-1].replace("\\'", "'") + '"'
    if isinstance(value, os.PathLike):
        return literal(str(value))
    if isinstance(value, tuple):
        items = ", ".join(map(literal, value))
        return f"({items},)" if len(value) == 1 else f"({items})"
    if isinstance(value, list):
        return "[" + ", ".join(map(literal, value)) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{literal(k)}: {literal(v)}" for k, v in value.items()) + "}"
    if isinstance(value, _EXPLORATIONS):
        fields = ", ".join(f"{f.name}={literal(getattr(value, f.name))}" for f in dataclasses.fields(value))
        return f"{type(value).__name__}({fields})"
    raise GenerationError(
        f"The setting value {value!r} of type {type(value).__name__} cannot be written into a program. "
        "Use plain values (numbers, text, tuples), or set it in a subclass of the trainer."
    )


def _literal_dict(values: Mapping[str, object]) -> str:
    if not values:
        return "{}"
    return "{\n" + "".join(f"    {literal(k)}: {literal(v)},\n" for k, v in values.items()) + "}"


def _trainer_import(trainer_class: type) -> tuple[str, str]:
    """Module to import the class from, and the folder to put on the path first ("" if none is needed)."""
    name, module_name = trainer_class.__name__, trainer_class.__module__
    if trainer_class.__qualname__ != name:
        raise GenerationError(
            f"{trainer_class.__qualname__} is defined inside a function or class, where a program cannot import it. "
            "Move it to the top level of a module."
        )
    try:
        file = Path(inspect.getfile(trainer_class)).resolve()
    except (TypeError, OSError) as error:
        raise GenerationError(
            f"{name} has no source file that a program could import it from (was it typed into a console or notebook?). "
            "Put it in a .py file and import it from there."
        ) from error
    if module_name == "__main__":
        _check_main_guard(file, name)
        return file.stem, str(file.parent)
    root = file.parents[module_name.count(".") + (1 if file.stem == "__init__" else 0)]
    installed = any("site-packages" in part for part in root.parts) or module_name.split(".")[0] in ("pearl",)
    return module_name, "" if installed else str(root)


def _check_main_guard(file: Path, name: str) -> None:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    guarded = any(isinstance(node, ast.If) and "__name__" in ast.dump(node.test) for node in tree.body)
    if not guarded:
        raise GenerationError(
            f"{name} is defined in {file.name}, which composes when it is imported: the program could not import the "
            'class without composing again. Put the composing under `if __name__ == "__main__":`.'
        )
    if not file.stem.isidentifier():
        raise GenerationError(f"{file.name} cannot be imported: rename it to a Python identifier such as my_trainer.py.")


def _digest(path: Path | None) -> str:
    return f"{path.name} sha256:{hashlib.sha256(path.read_bytes()).hexdigest()[:12]}" if path else "discovered"


def _check_backends(replay: Device, learner: Device) -> None:
    for device, primitive in ((replay, "Replay Manager"), (learner, "Learner")):
        if device.backend == "null":
            raise GenerationError(
                f"The {primitive} is placed on {device.name}, a null device, which only pretends: no program can run "
                "there. Take null devices out of the device CSV, or choose another pair of the placement."
            )


def render(source: ProgramSource, devices: Mapping[str, Device]) -> str:
    """The program's text."""
    from pearl import __version__

    problem, placement = source.problem, source.placement
    replay_device, learner_device = devices[source.replay.device], devices[source.learner.device]
    _check_backends(replay_device, learner_device)
    setting = 2 if source.replay.device == source.learner.device else 1
    module, folder = _trainer_import(problem.trainer_class)
    text = _environment().get_template("program.py.j2").render(
        version=__version__,
        name=source.run_dir.name,
        trainer_name=problem.trainer_class.__name__,
        trainer_module=module,
        trainer_path=folder,
        explorations=sorted({type(v).__name__ for v in problem.settings.values() if isinstance(v, _EXPLORATIONS)}),
        env=problem.actors.env,
        placement_note=_placement_note(source, setting),
        composed_from=f"{_digest(source.device_file)}, {_digest(source.connection_file)}",
        setting=setting,
        runtime_names=[
            *sorted(_COMMON_NAMES | _SETTING_NAMES[setting]),
            *(["import_class"] if folder else []),
            "parse_options",
            "run_program",
        ],
        predicted_eps=round(placement.eps, 1),
        actors=problem.actors,
        replay=problem.replay,
        fanout=source.replay.fanout,
        train=problem.train,
        settings=problem.settings,
        timesteps=source.timesteps,
        run_dir=str(source.run_dir),
        until_return=source.until_return,
        learner=source.learner,
        learner_device=torch_device(learner_device),
        storage_on_learner=learner_device.backend == "cuda" and placement.storage == learner_device.name,
    )
    ast.parse(text)
    return text


def _placement_note(source: ProgramSource, setting: int) -> str:
    placement, replay, learner = source.placement, source.replay, source.learner
    how = (
        "the Replay Manager and the Learner share a device and talk directly"
        if setting == 2
        else "the Replay Manager and the Learner talk through the host"
    )
    return "\n".join(
        [
            f"Placement for {placement.metric} (setting {setting}: {how}):",
            f"    Replay Manager  {replay.device} ({replay.backend}), fanout {replay.fanout}",
            f"    Learner         {learner.device} ({learner.backend}), {learner.threads} thread(s), "
            f"{learner.sub_batches} sub-batch(es)",
            f"    Data Storage    {placement.storage}",
            f"    Actors          {placement.host}, {placement.actor_count} x {placement.envs_per_actor} environments",
            f"Predicted: {placement.eps:,.0f} experiences trained per second.",
        ]
    )


def _environment() -> jinja2.Environment:
    here = Path(__file__).resolve().parent
    folders = [here / "runtime_templates", here.parent / "runtime_templates"]
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([f for f in folders if f.is_dir()]),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # noqa: S701  (Python source, not HTML; every value goes through `literal`)
    )
    environment.filters["literal"] = literal
    environment.filters["literal_dict"] = _literal_dict
    return environment


def generate(path: Path, source: ProgramSource, devices: Mapping[str, Device]) -> Path:
    """Write the program to `path`; GenerationError if it cannot be written."""
    text = render(source, devices)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        temporary.write_text(text, encoding="utf-8")
        temporary.chmod(0o755)
        temporary.replace(path)
    except OSError as error:
        raise GenerationError(f"The program cannot be written to {path}: {error}. Choose another path.") from error
    return path


