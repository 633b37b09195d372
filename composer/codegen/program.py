"""Writes the runtime program from Jinja2 templates, which get validated values only."""

from __future__ import annotations

import ast
import builtins
import dataclasses
import functools
import hashlib
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gymnasium as gym
import jinja2

import pearl
from composer.codegen.python_source import EXPLORATIONS, documented, imports, laid_out, literal, settings_literal
from composer.codegen.trainer_source import UserImport, object_import, schedule_import, trainer_import
from composer.nodes import NodeShare
from composer.placement import LearnerConfig, Placement, ReplayConfig
from composer.predicted_parts import predicted_us
from composer.problem import Problem, TrainingProblem
from composer.storage_rule import StorageRule, storage_stays_on_host
from composer.templates import template_folders
from pearl.algorithms.trainer import schedule_settings_of
from pearl.atomic_file import write_text
from pearl.backends import backend_of, backends, check_implementation, devices_of, learners, runs_on
from pearl.backends.protocol import Factory, LearnerImplementation
from pearl.devices.description import Device
from pearl.errors import ConfigurationError, GenerationError
from pearl.exploration import schedule_of
from pearl.replay.schedules import SCHEDULES
from pearl.runtime.backup import put_aside
from pearl.runtime.power import PoweredDevice, PowerPlan
from pearl.runtime.recomposition import ComposerInputs
from pearl.schedules import names_code
from pearl.spec import ActorSpec, Exponent, ReplaySpec

# The names that a program imports where it uses them, by module.
_IMPORTABLE: dict[str, set[str]] = {
    "pearl.exploration": {kind.__name__ for kind in EXPLORATIONS},
    "pearl.replay": {"ReplayRequestQueue", *(kind.__name__ for kind in SCHEDULES)},
    "pearl.runtime": {
        *("AssignmentQueue", "CollectionBuffer", "ComposerInputs", "DataCollectionQueue", "DoneQueue", "GrantQueue"),
        *(
            "HostIteration",
            "LearnerWorker",
            "LearnersSession",
            "PowerPlan",
            "PoweredDevice",
            "Program",
            "ProgressQueue",
            "RolloutAssignmentQueue",
            "RolloutDoneQueue",
            "RolloutSession",
            "RolloutWorker",
            "Session",
            "TrainingLoop",
        ),
        *("WeightSyncQueue", "import_class", "import_object", "parse_options", "run_program"),
    },
    "pearl.spec": {"ActorSpec", "LearnersSpec", "ReplaySpec", "RolloutSpec", "TrainSpec"},
}

logger = logging.getLogger("pearl.composer")

_SEAL = "\n# As composed: sha256 "  # the last line of a program, which shows whether it was edited


@dataclass(frozen=True, kw_only=True)
class Source:
    """The input of any program. `path` is the program's own; a relative `run_dir` counts from its folder."""

    path: Path
    problem: TrainingProblem
    device_file: Path | None
    connection_file: Path | None
    timesteps: int
    run_dir: Path
    until_return: float | None
    run_options: Mapping[str, int] = field(default_factory=dict)  # defaults of further options of the program
    power: PowerPlan = field(default_factory=PowerPlan)
    cluster: tuple[str, tuple[str, ...] | None] | None = None  # as given to `Composer.set_cluster`


@dataclass(frozen=True, kw_only=True)
class ProgramSource(Source):
    """The input of a program with a replay."""

    placement: Placement
    replay: ReplayConfig
    learner: LearnerConfig
    problem: Problem


def origin(*device_files: Path | None) -> str:
    """The names and hashes of the device files, which distinguish programs of different files."""
    files = [path for path in device_files if path is not None]
    digests = [f"{path.name} sha256:{hashlib.sha256(path.read_bytes()).hexdigest()[:12]}" for path in files]
    return ", ".join(digests) or "the devices found on the machine that composed it"


def check_backends(replay: Device, learner: Device) -> None:
    """Raise GenerationError if no program can run on one of the devices."""
    for device, primitive in ((replay, "Replay Manager"), (learner, "Learner")):
        if (why := backend_of(device).no_program(device)) is not None:
            raise GenerationError(
                f"The {primitive} is placed on {device.name}, {why.reason}. No program can run there. Take "
                f"{why.remedy} out of the device CSV, or choose another pair of the placement."
            )


def _check_parameters(source: ProgramSource) -> None:
    """Check configurations, which may have been edited by hand."""
    for name, value in (
        ("threads", source.learner.threads),
        ("sub_batches", source.learner.sub_batches),
        ("workers", source.replay.workers),
        ("timesteps", source.timesteps),
    ):
        if type(value) is not int or value < 1:
            raise GenerationError(f"{name} must be a whole number of at least 1; found {value!r}. Correct it.")
    for factor in (factor for network in source.learner.unroll for factor in network):
        if type(factor) is not int or factor < 1 or factor & (factor - 1):
            raise GenerationError(f"unroll takes powers of two; found {factor!r}. Correct it.")
    dataclasses.replace(source.problem.replay, fanout=source.replay.fanout)  # ConfigurationError if it is no fanout


def check_problem(problem: Problem) -> None:
    """Raise GenerationError for a problem that has no program in any placement."""
    _exponents(problem.replay)
    check_written(problem, _replay_options(problem.replay))


def check_written(problem: TrainingProblem, options: Mapping[str, object]) -> None:
    """Raise GenerationError for a trainer, an environment, settings or `options` that no program can name."""
    trainer = trainer_import(problem.trainer_class, taken_names(), problem.imported_from)
    for actors in (problem.actors, problem.actors.evaluation):
        _check_environment_is_known(actors, trainer)
    actors_imports(problem.actors, trainer)
    schedule_imports(problem, trainer)
    settings_literal(problem.settings)
    written = {k: v for k, v in vars(problem.actors).items() if k not in ("env", "eval_env", "wrappers")}
    wrapping = [options for _, options in problem.actors.wrapped]
    for said in (options, written, *wrapping, vars(problem.train)):
        for value in said.values():
            literal(value)


def taken_names() -> set[str]:
    """Names of the program's own lines, and of primitives: a trainer class must not have one of them."""
    return {
        *("PROGRAM", "ACTORS", "REPLAY", "LEARNERS", "ROLLOUT", "TRAIN", "SETTINGS", "begin_program", "main"),
        *set[str]().union(*_IMPORTABLE.values()),
        *dir(builtins),
        *(implementation.name for implementation in learners().values()),
        *(made.name for backend in backends() for made in backend.rollout_learners.values()),
        *(name for backend in backends() for name in backend.factory_names),
    }


def actors_imports(actors: ActorSpec, trainer: UserImport) -> list[UserImport]:
    """How a program imports the environment, if it is a class or function, and the wrappers, each once."""
    made = [("environment", one) for one in (actors.env, actors.eval_env) if callable(one)]
    made += [("wrapper", wrapper) for wrapper, _ in actors.wrapped]
    found: dict[str, UserImport] = {}
    for what, one in made:
        imported = object_import(one, {*taken_names(), trainer.name}, what)
        if found.setdefault(imported.name, imported) != imported:
            raise GenerationError(
                f"Two of the wrappers and environments are called {imported.name}, in {found[imported.name].module} "
                f"and {imported.module}. Give one of them another name."
            )
    return list(found.values())


def schedule_imports(problem: TrainingProblem, trainer: UserImport) -> list[UserImport]:
    """How a program finds the functions that schedules of the trainer and of its exploration name."""
    held = {name: getattr(problem.trainer_class, name, None) for name in schedule_settings_of(problem.trainer_class)}
    exploration = problem.settings.get("exploration", getattr(problem.trainer_class, "exploration", None))
    schedules = [*{**held, **problem.settings}.values(), schedule_of(exploration)]
    names = dict.fromkeys(str(schedule) for schedule in schedules if names_code(schedule))
    return [one for one in map(schedule_import, names) if one.module != trainer.module]


def _env_literal(env: str | Callable[..., object]) -> str:
    return literal(env) if isinstance(env, str) else env.__name__


def _wrappers_literal(actors: ActorSpec) -> str:
    items = [f"({one.__name__}, {literal(options)})" if options else one.__name__ for one, options in actors.wrapped]
    return "(\n" + "".join(f"        {item},\n" for item in items) + "    )"


def _check_environment_is_known(actors: ActorSpec, trainer: UserImport) -> None:
    """Check that the trainer's module registers the environment: the program imports no other module of the user."""
    env = actors.env
    if not isinstance(env, str) or actors.vectorization in ("atari", "envpool"):  # whose packages the Actors import
        return
    spec = gym.registry.get(env)
    entry = None if spec is None else spec.entry_point or spec.vector_entry_point
    if entry is None or trainer.module.partition(".")[0] != "pearl":
        return
    module = entry.partition(":")[0] if isinstance(entry, str) else entry.__module__
    if module.partition(".")[0] != "gymnasium" or not _gymnasium_registers(env):
        raise GenerationError(
            f"The program would not know the environment {env!r}, made by {module}: the program imports only "
            f"{trainer.name} from {trainer.module}. Derive a class from {trainer.name} in the module that registers "
            "the environment, and compose with that class; or give the class or function that makes it, in place of "
            "its name."
        )


def _gymnasium_registers(env: str) -> bool:
    """Whether Gymnasium registers the name itself: a class of Gymnasium may be registered by others, too."""
    if f'"{env}"' in Path(gym.envs.__file__).read_text(encoding="utf-8"):  # a new process would take a second
        return True
    ask = "import gymnasium, sys; sys.exit(sys.argv[1] not in gymnasium.registry)"
    return subprocess.run([sys.executable, "-c", ask, env], timeout=60, capture_output=True).returncode == 0


def _implementation(learner: LearnerConfig, device: Device) -> LearnerImplementation:
    """The Learner of the program; GenerationError where it does not support the configuration."""
    try:
        found = learners()[check_implementation(learner.implementation)]
    except ConfigurationError as error:
        raise GenerationError(str(error)) from error
    if not runs_on(learner.implementation, device):
        others = list(backend_of(device).learners)
        raise GenerationError(
            f"The {learner.implementation} Learner runs on {devices_of(learner.implementation)}; found "
            f"{device.name}, a {device.kind} of the backend {device.backend}. Choose another device"
            + (f", or the implementation {' or '.join(others)}." if others else ".")
        )
    if learner.sub_batches > 1 and "sub_batches" not in found.arguments:
        raise GenerationError(
            f"The {learner.implementation} Learner splits batches over its threads: sub_batches must be 1; found "
            f"{learner.sub_batches}. Correct it."
        )
    if learner.unroll and "unroll" not in found.arguments:
        raise GenerationError(f"The {learner.implementation} Learner has no unroll: it must be empty. Correct it.")
    if learner.prefetch and "prefetch" not in found.arguments:
        raise GenerationError(
            f"The {learner.implementation} Learner draws no batches ahead: prefetch must be False. Correct it."
        )
    return found


def _learner_arguments(found: LearnerImplementation, learner: LearnerConfig, device: str) -> dict[str, object]:
    values: dict[str, object] = {"device": device, "threads": learner.threads, "sub_batches": learner.sub_batches}
    if learner.unroll:
        values["unroll"] = learner.unroll
    if learner.prefetch:
        values["prefetch"] = True
    return {name: values[name] for name in found.arguments if name in values}


def _imports_of(program: str, primitives_and_trainer: Iterable[tuple[str, str]]) -> str:
    """The imports of a program without imports; the modules and names of its primitives and trainer are given."""
    used = {node.id for node in ast.walk(ast.parse(program)) if isinstance(node, ast.Name)}
    modules = {module: names & used for module, names in _IMPORTABLE.items()}
    for module, name in primitives_and_trainer:
        modules.setdefault(module, set()).add(name)
    return imports(modules, expanded=("pearl.runtime",))


def render(source: ProgramSource, devices: Mapping[str, Device]) -> str:
    """The program's text."""
    problem, placement = source.problem, source.placement
    on_replay, on_learner = devices[source.replay.device], devices[source.learner.device]
    check_backends(on_replay, on_learner)
    _check_parameters(source)
    implementation = _implementation(source.learner, on_learner)
    setting = 2 if source.replay.device == source.learner.device else 1
    backend = backend_of(on_learner)
    replay_factory = _replay_factory(source, on_replay)
    storage_factory = _storage_factory(source, devices)
    trainer_place, learner_place = implementation.places(on_learner, backend)
    trainer = trainer_import(problem.trainer_class, taken_names(), problem.imported_from)
    here = source.path.resolve().parent
    values = {
        "version": pearl.__version__,
        "name": Path(os.path.normpath(here / source.run_dir)).name,
        **user_values(source, trainer),
        "placement_note": _placement_note(source, setting, (on_replay, on_learner)),
        "composed_from": origin(source.device_file, source.connection_file),
        "power": powered(source.power),
        "composer_inputs": composer_inputs(
            source,
            trainer.name,
            placement.text,
            metric=placement.metric,
            fanout=problem.replay.fanout,
            priority_update_delay=problem.train.priority_update_delay,
        ),
        "setting": setting,
        "predicted_eps": round(placement.eps, 1),
        "predicted_free_eps": round(placement.free_eps, 1),
        "predicted_spread": None if placement.eps_spread is None else round(placement.eps_spread, 3),
        "predicted_us": {name: round(value, 3) for name, value in predicted_us(placement).items()},
        "devices": {
            "actors": placement.host,
            "replay_manager": source.replay.device,
            "storage": placement.storage,
            "learner": source.learner.device,
        },
        "assumption": placement.assumption,
        "session_class": "Session",
        "data_argument": "replay=REPLAY",
        "default_timeout_s": ActorSpec.timeout_s,
        "exponents": _exponents(problem.replay),
        "replay_options": _replay_options(problem.replay),
        "learner_class": implementation.name,
        "learner_arguments": _learner_arguments(implementation, source.learner, learner_place),
        "learner_device": backend.device_string(on_learner),
        "trainer_device": trainer_place,
        "make_replay": replay_factory.name,
        "replay_arguments": replay_factory.arguments,
        "storage_class": "" if storage_factory is None else storage_factory.name,
        "storage_arguments": {} if storage_factory is None else storage_factory.arguments,
        "waits_asleep": implementation.spins and source.learner.threads > 1 and on_learner.name == placement.host,
    }
    made = [(made.module, made.name) for made in (implementation, replay_factory, storage_factory) if made is not None]
    made += installed(source, trainer)
    template = "program.py.j2"
    if (several := problem.learners.count) > 1:
        template = "learners.py.j2"
        values |= {
            "processes": problem.actors.count + several,
            "session_class": "LearnersSession",
            "data_argument": "replay=REPLAY,\n        learners=LEARNERS",
            "composer_inputs": {},  # --recompose is for programs of one Learner
        }
        made = [(implementation.module, implementation.name), *installed(source, trainer)]
    return rendered(template, {**values, "source": source, "problem": problem}, made)


def rendered(template: str, values: Mapping[str, object], primitives_and_trainer: Iterable[tuple[str, str]]) -> str:
    """The text of a program with its imports; the modules and names of its primitives and trainer are given."""
    write = functools.partial(_environment().get_template(template).render, values)
    text = write(imports=_imports_of(write(imports=""), primitives_and_trainer))
    ast.parse(text)
    return text


def user_values(source: Source, trainer: UserImport) -> dict[str, object]:
    """The imports and names of the user's code in the program."""
    here, actors = source.path.resolve().parent, source.problem.actors

    def folder(one: UserImport) -> str:
        return "" if one.folder is None else os.path.relpath(one.folder, here)

    made = [{"name": one.name, "module": one.module, "folder": folder(one)} for one in actors_imports(actors, trainer)]
    schedules = [one for one in schedule_imports(source.problem, trainer) if one.folder is not None]
    return {
        "trainer_name": trainer.name,
        "trainer_module": trainer.module,
        "trainer_folder": folder(trainer),
        "made_by_user": [one for one in made if one["folder"]],
        "schedules": [{"name": one.name, "module": one.module, "folder": folder(one)} for one in schedules],
        "env": documented(actors.env_name),
        "env_source": _env_literal(actors.env),
        "eval_env_source": "" if actors.eval_env is None else _env_literal(actors.eval_env),
        "wrappers": _wrappers_literal(actors) if actors.wrappers else "",
    }


def installed(source: Source, trainer: UserImport) -> list[tuple[str, str]]:
    """The module and name of each object of the user that a program imports like any package's."""
    found = [trainer, *actors_imports(source.problem.actors, trainer)]
    return [(one.module, one.name) for one in found if one.folder is None]


def _replay_factory(source: ProgramSource, device: Device) -> Factory:
    """The factory of the Replay Manager."""
    backend, workers = backend_of(device), source.replay.workers
    factory = backend.replay(device)
    if factory is None:
        raise GenerationError(f"{device.name} has no Replay Manager in this version. Choose another device.")
    if workers not in (possible := backend.replay_workers(device, source.problem.train.batch_size, workers)):
        raise GenerationError(
            f"The Replay Manager on {device.name} runs batches of {source.problem.train.batch_size} with "
            f"{' or '.join(map(str, possible))} worker(s); found {workers}. Correct workers."
        )
    return factory.with_workers(workers)


def _storage_factory(source: ProgramSource, devices: Mapping[str, Device]) -> Factory | None:
    """The factory of a Data Storage on a device; None for a Data Storage of the host."""
    placement, problem, learner = source.placement, source.problem, source.learner.device
    rule = StorageRule(devices, placement.host, problem.replay, problem.transition.nbytes)
    if (reason := rule.refusal(placement.storage, learner)) is not None:
        raise GenerationError(
            f"The Data Storage is placed on {placement.storage}, which cannot keep it: {reason}. Place it on "
            f"{placement.host}, with Placement.with_choice(storage={placement.host!r})."
        )
    if placement.storage != learner or storage_stays_on_host(problem.replay):
        return None
    return backend_of(devices[learner]).storage(devices[learner])


def composer_inputs(source: Source, trainer: str, placed: str, **further: Any) -> dict[str, object]:
    """The arguments of the program's ComposerInputs; the last are left out where they have their default values."""
    problem, here = source.problem, source.path.resolve().parent

    def seen(file: Path | None) -> str:
        return "" if file is None else os.path.relpath(file.resolve(), here)

    cluster, nodes = source.cluster or ("", None)
    value = ComposerInputs(
        trainer,
        placed,
        devices=seen(source.device_file),
        connections=seen(source.connection_file),
        implementation=problem.implementation,
        imported_from=problem.imported_from,
        cluster=cluster,
        cluster_nodes=nodes,
        **further,
    )
    fields = dataclasses.fields(value)
    return {f.name: found for f in fields if (found := getattr(value, f.name)) != f.default}


def powered(power: PowerPlan) -> dict[str, list[str]]:
    """The devices of a PowerPlan, as items of its tuples in a program."""
    return {"used": _devices(power.used), "idle": _devices(power.idle)}


def _devices(devices: Iterable[PoweredDevice]) -> list[str]:
    names = ("name", "kind", "backend", "selector", "idle_watts", "active_watts")
    found = []
    for device in devices:
        stated = [(name, value) for name in names if (value := getattr(device, name)) not in (None, "")]
        arguments = [f"{name}={literal(value)}" for name, value in stated]
        flat = f"PoweredDevice({', '.join(arguments)})"
        lines = "".join(f"                {argument},\n" for argument in arguments)
        found.append(flat if len(flat) < 108 else f"PoweredDevice(\n{lines}            )")
    return found


def _exponents(replay: ReplaySpec) -> dict[str, str]:
    """alpha, beta and beta_final as arguments; a schedule for beta has no beta_final."""
    values = {"alpha": _exponent(replay.alpha), "beta": _exponent(replay.beta)}
    return values if callable(replay.beta) else {**values, "beta_final": literal(replay.beta_final)}


def _exponent(value: Exponent) -> str:
    if not callable(value):
        return literal(value)
    if not isinstance(value, SCHEDULES):
        raise GenerationError(
            f"The schedule {value!r} cannot be written into a program. Use one of pearl.replay: "
            f"{', '.join(kind.__name__ for kind in SCHEDULES)}."
        )
    arguments = (f"{f.name}={literal(getattr(value, f.name))}" for f in dataclasses.fields(value))
    return f"{type(value).__name__}({', '.join(arguments)})"


def _replay_options(replay: ReplaySpec) -> dict[str, object]:
    """The fields that are not always in the program and differ from their defaults."""
    always = {"capacity", "mode", "fanout", "alpha", "beta", "beta_final"}
    fields = (f for f in dataclasses.fields(replay) if f.name not in always)
    return {f.name: getattr(replay, f.name) for f in fields if getattr(replay, f.name) != f.default}


def _placement_note(source: ProgramSource, setting: int, on: tuple[Device, Device]) -> str:
    placement, replay, learner = source.placement, source.replay, source.learner
    how = (
        "the Replay Manager and the Learner share a device and talk directly"
        if setting == 2
        else "the Replay Manager and the Learner talk through the host"
    )
    if source.problem.learners.count > 1:
        how = "each Learner has a bank of the replay in its process"
    lines = [
        f"Placement for {placement.metric} (setting {setting}: {how}):",
        f"    Replay Manager  {replay.device} ({replay.backend}), fanout {replay.fanout}"
        + (f", {replay.workers} workers" if replay.workers > 1 else ""),
        f"    Learner         {learner.device} ({learner.backend}), {learner.implementation}, "
        f"{learner.threads} thread(s), {learner.sub_batches} sub-batch(es)"
        + (", prefetching" if learner.prefetch else ""),
        *_learners_note(source),
        f"    Data Storage    {placement.storage}",
        f"    Actors          {placement.host}, {placement.actor_count} x {placement.envs_per_actor} environments"
        + policy_note(source.problem.actors),
        *actors_on_nodes(placement.nodes),
        f"Predicted: {placement.eps_text} experiences trained per second,",
        f"    {placement.assumption}.",
    ]
    lines += sorted({note for device in on if (note := backend_of(device).note(device))})
    return "\n".join(map(documented, lines))


def policy_note(actors: ActorSpec) -> str:
    """A note on where the policy of Actors runs, if not in them."""
    return f", policy served on {actors.policy_server}" if actors.is_served else ""


def actors_on_nodes(nodes: Iterable[NodeShare]) -> list[str]:
    """Lines of a program's placement: where its Actors are with --ray."""
    return [
        f"                    with --ray: {share.actors} on {share.node or 'this machine'}, {share.why}"
        for share in nodes
    ]


def _learners_note(source: ProgramSource) -> list[str]:
    """A note on several Learners; empty for one."""
    spec = source.problem.learners
    if spec.count == 1:
        return []
    rows = source.problem.train.batch_size // spec.count
    lines = [
        f"    Learners        {spec.count}, each with a bank of the replay and batches of {rows}; averaged every "
        f"{spec.average_every} steps"
    ]
    lines += [
        f"                    with --ray: Learner {ranks} on {share.node or 'this machine'}"
        for share in source.placement.nodes
        if (ranks := source.placement.ranks_on(share.node))
    ]
    if spec.overlap:
        lines.append(f"                    an average is loaded {spec.overlap} steps after what it was made of")
    return lines


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(template_folders()),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # Python source, not HTML; every value goes through `literal` or `documented`
    )
    environment.filters |= {"literal": literal, "laid_out": laid_out, "settings": settings_literal}
    return environment


def _seal(text: str) -> str:
    return f"{_SEAL}{hashlib.sha256(text.encode()).hexdigest()}\n"


def is_edited(path: Path) -> bool:
    """Whether the program at `path`, if any, was edited since it was composed."""
    if not path.exists():
        return False
    found = path.read_text(encoding="utf-8")
    text, mark, _ = found.rpartition(_SEAL)
    return not mark or found != text + _seal(text)


def generate(source: ProgramSource, devices: Mapping[str, Device]) -> Path:
    """Write the program to its path and return the path; GenerationError if it cannot be written."""
    return write_program(source.path, render(source, devices))


def write_program(path: Path, text: str) -> Path:
    """Write a program's text to `path` and return the path; GenerationError if it cannot be written.

    A program there that was edited since it was composed is kept under another name, which a warning states.
    """
    text += _seal(text)
    try:
        if is_edited(path):
            logger.warning("%s was edited since it was composed; it is kept as %s.", path, put_aside(path).name)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text, executable=True)
    except (OSError, UnicodeDecodeError) as error:
        raise GenerationError(f"The program cannot be written to {path}: {error}. Choose another path.") from error
    return path
