"""Reads a composition from a TOML file, whose tables hold the arguments of the `set_*` calls of a `Composer`."""

from __future__ import annotations

import dataclasses
import importlib
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from composer.codegen.python_source import EXPLORATIONS
from composer.codegen.trainer_source import check_module_name
from composer.composer import Composer
from composer.spec_overrides import override
from composer.wording import did_you_mean, shortened
from pearl.algorithms import ALGORITHMS
from pearl.algorithms.trainer import (
    Trainer,
    check_setting_names,
    check_trainer_class,
    is_trainer,
    schedule_settings_of,
)
from pearl.algorithms.update_frequency import respelled
from pearl.backends import AUTO, check_implementation, learners
from pearl.error_place import described, is_missing
from pearl.errors import ConfigurationError, GenerationError, PearlError, TrainerError
from pearl.replay.schedules import SCHEDULES
from pearl.runtime.options import check_count, check_goal
from pearl.schedules import plain_schedule
from pearl.spec import ActorSpec, LearnersSpec, ReplaySpec, RolloutSpec, TrainSpec

_EXPLORATIONS: dict[str, type] = {kind.__name__: kind for kind in EXPLORATIONS}
_SCHEDULES: dict[str, type] = {kind.__name__: kind for kind in SCHEDULES}
_TRAINER = re.compile(r"(?P<module>[^:]+):(?P<name>[A-Za-z_]\w*)")


@dataclass(frozen=True)
class ProgramOptions:
    """The table [program]: arguments of `Composer.runtime_gen`, with paths relative to the current folder."""

    path: Path
    run_dir: Path | None = None
    timesteps: int = 100_000
    until_return: float | Literal["none"] | None = None
    seed: int | None = None
    eval_episodes: int | None = None
    eval_interval: int | None = None
    checkpoint_interval: int | None = None


@dataclass(frozen=True)
class _Key:
    """One key of a table: its accepted values in words, and their TOML types."""

    expected: str
    types: tuple[type, ...]
    required: bool = False

    def accepts(self, value: object) -> bool:
        """Whether the type matches exactly: with `isinstance`, true would be a whole number."""
        return type(value) in self.types


_TEXT = _Key("text in quotes", (str,))
_WHOLE = _Key("a whole number", (int,))
_NUMBER = _Key("a number", (int, float))
_WHOLE_OR_AUTO = _Key('a whole number, or "auto"', (int, str))
_FLAG = _Key("true or false", (bool,))
_EXPONENT = _Key("a number, or a table of a schedule", (int, float, dict))
_KWARGS = _Key("a table of numbers, texts and booleans", (dict,))
_BY_TYPE = {
    bool: _FLAG,
    int: _WHOLE,
    float: _NUMBER,
    str: _TEXT,
    tuple: _Key("a list such as [64, 64]", (tuple,)),
}
_BY_ANNOTATION = {"bool": _FLAG, "int": _WHOLE, "int | None": _WHOLE, "float": _NUMBER}


def _keys_of(record: type, without: Sequence[str] = (), **special: _Key) -> dict[str, _Key]:
    """The keys of a table whose values are the fields of `record`, `without` some; fields of other types are text."""
    fields = [field for field in dataclasses.fields(record) if field.name not in without]
    return {f.name: special.get(f.name) or _BY_ANNOTATION.get(str(f.type), _TEXT) for f in fields}


_REPLAY_KEYS = _keys_of(
    ReplaySpec,
    fanout=_WHOLE_OR_AUTO,
    alpha=_EXPONENT,
    beta=_EXPONENT,
    initial_priority=_Key('a number, "max" or "mean"', (int, float, str)),
)
_OPTIONAL_COUNTS = tuple(f.name for f in dataclasses.fields(ProgramOptions) if f.type == "int | None")
TABLES: dict[str, dict[str, _Key]] = {
    "platform": {"devices": _TEXT, "connections": _TEXT, "metric": _TEXT, "cluster": _TEXT},
    "actors": _keys_of(
        ActorSpec,
        without=("nodes",),
        env=_Key(_TEXT.expected, (str,), required=True),
        count=_WHOLE_OR_AUTO,
        envs_per_actor=_WHOLE_OR_AUTO,
        env_kwargs=_KWARGS,
        eval_env_kwargs=_KWARGS,
        wrappers=_Key('a list of "module:Class", or of tables { class = "module:Class", ... }', (list,)),
    ),
    "trainer": {
        "class": _Key('"module:Class", "file.py:Class" or a built-in algorithm', (str,), required=True),
        "settings": _Key('"auto"', (str,)),
        "implementation": _Key(f"one of {', '.join((AUTO, *learners()))}, in quotes", (str,)),
    },
    "replay": {
        "size": _Key(_WHOLE.expected, (int,), required=True),
        **{name: key for name, key in _REPLAY_KEYS.items() if name != "capacity"},
    },
    "learners": _keys_of(
        LearnersSpec,
        count=_WHOLE_OR_AUTO,
        average_every=_WHOLE_OR_AUTO,
        nodes=_Key("a table of nodes' names and numbers of Learners", (dict,)),
    ),
    "rollout": _keys_of(RolloutSpec),
    "training": _keys_of(
        TrainSpec,
        replay_ratio=_Key('a number, or "auto"', (int, float, str)),
        priority_update_delay=_WHOLE_OR_AUTO,
        insertion_rows=_WHOLE_OR_AUTO,
    ),
    "program": _keys_of(
        ProgramOptions, until_return=_Key('a number, or "none" or inf for no early stop', (int, float, str))
    ),
}


# Tables that `pearl sweep` reads, and composing ignores.
SWEEP_TABLES = ("sweep", "search")


def load_spec(
    path: str | Path,
    *,
    progress: bool = True,
    implementation: str | None = None,
    output: Path | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> tuple[Composer, ProgramOptions]:
    """Read a composition file: a Composer with everything set, and the options of its program.

    Paths in the file are relative to its folder. `progress` is passed to the Composer; `implementation` of the Learner
    and `output`, the program's path, override the file's, and so do `overrides`, values by "table.key". The modules of
    the trainer class, and of an environment and wrappers that are named as "module:name", are imported, here and by the
    program; nothing else in the file is ever executed. Raises ConfigurationError (TrainerError where something cannot
    be imported) that names the file, the table and the key.
    """
    if implementation is not None:
        check_implementation(implementation, auto=True)
    return _SpecFile(Path(path), overrides).compose(progress, implementation, output)


def read_tables(path: str | Path) -> dict[str, Any]:
    """The tables of a composition file, whose names are checked; raises as `load_spec` does."""
    return _SpecFile(Path(path)).document


def load_zoo(
    file: Path,
    env: str,
    algorithm: str | None = None,
    leave_out: Sequence[str] = (),
    *,
    progress: bool = True,
    implementation: str | None = None,
    output: Path | None = None,
) -> tuple[Composer, ProgramOptions]:
    """The same from a file of RL Zoo, by `Composer.set_zoo`; without `output` the program is in the folder runs."""
    chosen = check_implementation(implementation or AUTO, auto=True)
    composer = Composer(progress=progress)
    found = composer.set_zoo(file, env, algorithm, leave_out=leave_out, implementation=chosen)
    name = re.sub(r"\W+", "_", f"{found.algorithm.__name__}_{env}").strip("_").lower()
    program = output or Path("runs") / name / "program.py"
    return composer, ProgramOptions(program, None if output else program.parent, found.timesteps)


class _SpecFile:
    """One parsed composition file; its methods check the tables and pass them to a Composer."""

    def __init__(self, path: Path, overrides: Mapping[str, Any] | None = None) -> None:
        self.path = path
        self.folder = path.resolve().parent
        self.document = self._parse()
        override(self.document, overrides or {})
        for name, table in self.document.items():
            if name not in TABLES and name not in SWEEP_TABLES:
                kind = "table" if isinstance(table, dict) else "key"
                raise self._error(
                    "", f"the tables {', '.join(TABLES)}", f"the {kind} {name!r}", did_you_mean(name, TABLES)
                )
            if not isinstance(table, dict):
                raise self._error("", f"a table [{name}]", f"{name} = {_shown(table)}")

    def _parse(self) -> dict[str, Any]:
        try:
            text = self.path.read_bytes().decode("utf-8-sig")
        except FileNotFoundError as error:
            raise ConfigurationError(
                f"There is no composition file {self.path}. Check the path; examples/cartpole.toml shows one."
            ) from error
        except OSError as error:
            raise ConfigurationError(f"{self.path} cannot be read: {error.strerror or error}.") from error
        except UnicodeDecodeError as error:
            line = error.object[: error.start].count(b"\n") + 1
            raise ConfigurationError(
                f"{self.path}, line {line}: expected UTF-8 text; found the byte 0x{error.object[error.start]:02x}. "
                "Save the file as UTF-8."
            ) from error
        try:
            return tomllib.loads(text)
        except (ValueError, RecursionError) as error:  # ValueError also for a number of thousands of digits
            raise ConfigurationError(f"{self.path} is not a TOML file: {error}.") from error

    def compose(
        self, progress: bool, implementation: str | None, output: Path | None
    ) -> tuple[Composer, ProgramOptions]:
        composer = Composer(progress=progress)
        self._set_platform(composer)
        actors = self._table("actors")
        wrappers = [self._wrapper(item) for item in actors.pop("wrappers", [])]
        for key in ("env", "eval_env"):
            # "module:Name-v0", which Gymnasium would import, is another form.
            if _TRAINER.fullmatch(actors.get(key, "")):
                with self._naming("actors", key):
                    actors[key], _ = self._imported(actors[key])
        with self._naming("actors"):
            composer.set_actors(actors.pop("count", 1), **actors)
            composer.set_wrappers(wrappers)
        self._set_trainer(composer, implementation)
        if learners := self._table("learners"):
            with self._naming("learners"):
                composer.set_learners(learners.pop("count", LearnersSpec.count), **learners)
        rollout, training = self._table("rollout"), self._table("training")
        with self._naming("rollout"):
            composer.set_rollout(**rollout)
        if "replay" in self.document or not (composer.learns_from_rollouts or composer.chooses_settings):
            self._set_replay(composer)
        with self._naming("training"):
            composer.set_training(**training)
        return composer, self._program(output)

    # --- tables -----------------------------------------------------------------------------------------------------

    def _set_platform(self, composer: Composer) -> None:
        table = self._table("platform")
        if ("devices" in table) != ("connections" in table):
            raise self._error(
                "platform",
                "both devices and connections, or neither",
                " and ".join(table),
                " `pearl devices` writes both files for this machine; without them, composing discovers the machine.",
            )
        if "devices" in table:
            composer.set_device_file(self._file("platform", "devices"))
            composer.set_connection_file(self._file("platform", "connections"))
        if "cluster" in table:
            with self._naming("platform", "cluster"):
                composer.set_cluster(table["cluster"])
        if "metric" in table:
            with self._naming("platform", "metric"):
                composer.set_opt_metric(table["metric"])

    def _set_replay(self, composer: Composer) -> None:
        replay = self._table("replay")
        for name in ("alpha", "beta"):
            if isinstance(replay.get(name), dict):
                replay[name] = self._record("replay", name, replay[name], _SCHEDULES)
        with self._naming("replay"):
            composer.set_replay(**replay)

    def _set_trainer(self, composer: Composer, forced: str | None) -> None:
        table = self.document.get("trainer", {})
        own = self._checked("trainer", {key: table[key] for key in TABLES["trainer"] if key in table})
        settings = {key: value for key, value in table.items() if key not in own}
        for key in ("learner", "imported_from"):  # given by `class`
            if key in settings:
                raise self._error("trainer", "class, implementation and settings of the class", repr(key))
        with self._naming("trainer", "class"):
            found, module = self._trainer_class(own["class"])
            trainer_class = check_trainer_class(found)
        with self._naming("trainer", "implementation"):
            implementation = check_implementation(own.get("implementation", AUTO), auto=True)
        values = {key: self._setting(trainer_class, key, value) for key, value in settings.items()}
        with self._naming("trainer"):
            composer.set_train_function(
                learner=trainer_class,
                implementation=forced or implementation,
                imported_from=module,
                settings=own.get("settings"),
                **values,
            )
            if is_trainer(trainer_class) and trainer_class.__init__ is Trainer.__init__:  # which takes settings only
                check_setting_names(trainer_class, respelled(settings))

    def _program(self, output: Path | None) -> ProgramOptions:
        table = self._table("program")
        timesteps = table.get("timesteps", ProgramOptions.timesteps)
        if timesteps < 1:
            raise self._error("program", "a whole number of at least 1", _shown(timesteps), key="timesteps")
        program = output or (self._file("program", "path") if "path" in table else None)
        run_dir = self._file("program", "run_dir") if "run_dir" in table else None
        if program is None:  # the program and its run share a folder
            run_dir = run_dir or self.folder / "runs" / self.path.stem
            program = run_dir / "program.py"
        if run_dir is not None and not Path(table.get("run_dir", "")).expanduser().is_absolute():
            run_dir = Path(os.path.relpath(run_dir))  # runtime_gen makes it relative to the program
        with self._naming("program"):
            goal = table.get("until_return")
            check_goal(goal)
            counts = {name: check_count(name, table[name]) for name in _OPTIONAL_COUNTS if name in table}
        return ProgramOptions(program, run_dir, timesteps, goal, **counts)

    def _table(self, name: str) -> dict[str, Any]:
        return self._checked(name, self.document.get(name, {}))

    def _checked(self, name: str, table: Mapping[str, Any]) -> dict[str, Any]:
        keys = TABLES[name]
        values: dict[str, Any] = {}
        for key, value in table.items():
            if key not in keys:
                raise self._error(name, f"the keys {', '.join(keys)}", repr(key), did_you_mean(key, keys))
            if not keys[key].accepts(value):
                raise self._error(name, keys[key].expected, _shown(value), key=key)
            if isinstance(value, float) and math.isnan(value):
                raise self._error(name, keys[key].expected, "nan", key=key)
            values[key] = _real(value) if keys[key].types == _NUMBER.types else value
        for key, expected in keys.items():
            if expected.required and key not in values:
                raise self._error(name, expected.expected, "nothing", f" Add the key {key} to [{name}].", key=key)
        for kwargs in ("env_kwargs", "eval_env_kwargs"):
            for key, value in values.get(kwargs, {}).items():
                if type(value) not in (bool, int, float, str):
                    raise self._error(name, "a number, a text or a boolean", _shown(value), key=f"{kwargs}.{key}")
        return values

    def _file(self, table: str, key: str) -> Path:
        text: str = self.document[table][key]
        if not text or not text.isprintable():
            raise self._error(table, "a path", _shown(text), key=key)
        try:
            return self.folder / Path(text).expanduser()
        except RuntimeError as error:
            raise self._error(table, "a path", _shown(text), f" {error} Write it in full.", key=key) from error

    # --- the trainer ------------------------------------------------------------------------------------------------

    def _wrapper(self, item: object) -> Any:
        """A wrapper, or a pair of one and its keyword arguments, that an item of the list names."""
        options = dict(item) if isinstance(item, dict) else {"class": item}
        stated = options.pop("class", None)
        if not isinstance(stated, str):
            expected = '"module:Class", or a table { class = "module:Class", ... }'
            raise self._error("actors", expected, _shown(item), key="wrappers")
        plain = {name: self._plain(f"wrappers.{name}", value, "actors") for name, value in options.items()}
        with self._naming("actors", "wrappers"):
            found, _ = self._imported(stated)
        return (found, plain) if plain else found

    def _trainer_class(self, stated: str) -> tuple[Any, str]:
        """The class that `stated` names, and the name of its module; a built-in algorithm has a name of its own."""
        if stated in ALGORITHMS:
            return ALGORITHMS[stated], "pearl.algorithms"
        if ":" not in stated:
            raise ConfigurationError(
                f'expected "module:Class", "file.py:Class" or a built-in algorithm ({", ".join(ALGORITHMS)}); found '
                f"{stated!r}.{did_you_mean(stated, ALGORITHMS)}"
            )
        return self._imported(stated)

    def _imported(self, stated: str) -> tuple[Any, str]:
        """The object that `stated` names, and the name of its module."""
        match = _TRAINER.fullmatch(stated)
        wrong = f'expected "module:Class" or "file.py:Class", such as "my_trainer.py:DQNTrainer"; found {stated!r}.'
        if match is None or not match["module"].isprintable():
            raise ConfigurationError(wrong)
        module = match["module"]
        if module.endswith(".py"):
            imported = self._import_file(self.folder / module)
        else:
            _check_importable(module, module, wrong)
            imported = import_from(module, self.folder)
        try:
            return getattr(imported, match["name"]), imported.__name__
        except AttributeError as error:
            classes = [name for name, value in vars(imported).items() if isinstance(value, type)]
            raise TrainerError(
                f"{module} has no class {match['name']!r}.{did_you_mean(match['name'], classes)}"
            ) from error

    def _import_file(self, file: Path) -> ModuleType:
        """Import a file under its stem, by which the generated program imports it again."""
        file = file.resolve()
        if not file.is_file():
            raise ConfigurationError(f"there is no file {file}. Paths count from the folder of {self.path.name}.")
        _check_importable(file.stem, file.name)
        if file.stem in sys.stdlib_module_names:
            raise ConfigurationError(
                f"{file.name} cannot be imported by that name, which belongs to Python's own library: rename it, for "
                "example to my_trainer.py."
            )
        module = import_from(file.stem, file.parent)
        found = getattr(module, "__file__", None)
        if found is None or Path(found).resolve() != file:
            raise ConfigurationError(
                f"{file.name} cannot be imported: another module {file.stem!r} comes first ({found}). Rename the file."
            )
        return module

    def _setting(self, trainer_class: type, key: str, value: object) -> object:
        default = getattr(trainer_class, key, None)
        if key == "exploration":
            if isinstance(value, dict):
                return self._record("trainer", key, value, _EXPLORATIONS)
            example = f'a table that names its kind, such as {{ kind = "{next(iter(_EXPLORATIONS))}" }}'
            raise self._error("trainer", example, _shown(value), f" The kinds are {', '.join(_EXPLORATIONS)}.", key=key)
        plain = self._plain(key, value)
        if key in schedule_settings_of(trainer_class):
            return self._schedule(key, plain)
        expected, fits = _expectation(default)
        if not fits(plain):
            raise self._error("trainer", expected, _shown(value), key=key)
        return _real(plain) if type(default) is float else plain

    def _schedule(self, key: str, plain: object) -> object:
        """A schedule of the trainer; the function that it names is imported."""
        with self._naming("trainer", key):
            if isinstance(plain, str) and ":" in plain:
                name = plain.rpartition(":")[2]
                return plain_schedule(f"{self._imported(plain)[1]}:{name}", "a schedule")
            return plain_schedule(plain, "a schedule")

    def _plain(self, key: str, value: object, table: str = "trainer") -> object:
        """`value`, which holds numbers, texts and booleans only, with tuples for lists."""
        if isinstance(value, list):
            return tuple(self._plain(key, item, table) for item in value)
        if isinstance(value, dict):
            return {name: self._plain(key, item, table) for name, item in value.items()}
        if type(value) not in (bool, int, float, str):
            raise self._error(table, "a number, a text, a boolean, or a list of them", _shown(value), key=key)
        return value

    def _record(self, table: str, key: str, values: Mapping[str, Any], kinds: Mapping[str, type]) -> object:
        """The value that a table with a `kind` describes."""
        rest = dict(values)
        kind = rest.pop("kind", None)
        if not isinstance(kind, str) or kind not in kinds:
            found = "nothing" if kind is None else _shown(kind)
            raise self._error(
                table, f"one of {', '.join(kinds)}", found, did_you_mean(str(kind), kinds), key=f"{key}.kind"
            )
        fields = {f.name: f for f in dataclasses.fields(kinds[kind])}
        for name, value in rest.items():
            where = f"{key}.{name}"
            if name not in fields:
                raise self._error(
                    table, f"the keys {', '.join(fields)}", repr(name), did_you_mean(name, fields), key=where
                )
            if name == "schedule":
                rest[name] = self._schedule(where, self._plain(where, value, table))
                continue
            expected, fits = _expectation(_example(fields[name]))
            if not fits(value):
                raise self._error(table, expected, _shown(value), key=where)
        for name, field in fields.items():
            if field.default is dataclasses.MISSING and name not in rest:
                raise self._error(table, f"the keys {', '.join(fields)}", f"no {name!r}", key=key)
        settings = {k: _real(v) if type(_example(fields[k])) is float else v for k, v in rest.items()}
        with self._naming(table, key):
            return kinds[kind](**settings)

    # --- errors -----------------------------------------------------------------------------------------------------

    def _error(self, table: str, expected: str, found: str, advice: str = "", *, key: str = "") -> ConfigurationError:
        return ConfigurationError(f"{self._where(table, key)}: expected {expected}; found {found}.{advice}")

    def _where(self, table: str, key: str) -> str:
        place = f"[{table}] {key}".strip() if table else ""
        return f"{self.path}, {place}" if place else str(self.path)

    @contextmanager
    def _naming(self, table: str, key: str = "") -> Iterator[None]:
        """Put the place in the file in front of the message of an error."""
        try:
            yield
        except PearlError as error:
            raise type(error)(f"{self._where(table, key)}: {error}") from error


def _check_importable(module: str, file: str, wrong: str = "") -> None:
    try:
        check_module_name(module, file)
    except GenerationError as error:
        raise ConfigurationError(f"{wrong} {error}".strip()) from error


def import_from(name: str, folder: Path) -> ModuleType:
    """The user's module `name`, from `folder` or installed; TrainerError if there is none, or if it fails."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    except Exception as error:  # the user's module may raise anything
        if is_missing(name, error):
            raise TrainerError(
                f"there is no module {name!r} in {folder} or among the installed packages. "
                'Name the module without ".py", or the file with it.'
            ) from error
        raise TrainerError(f"importing {name} failed: {described(error)}.") from error


def _expectation(default: object) -> tuple[str, Callable[[object], bool]]:
    """The values that may replace `default`, in words and as a check; any value may replace None."""
    if (key := _BY_TYPE.get(type(default))) is not None:
        return key.expected, key.accepts
    return "", lambda value: True


def _example(field: dataclasses.Field[Any]) -> object:
    """A value of the field's type: its default if it has one."""
    if field.default is not dataclasses.MISSING and field.default is not None:
        return field.default
    return {"int": 0, "float": 0.0}[str(field.type).removesuffix(" | None")]


def _real(value: object) -> object:
    return float(value) if type(value) is int else value


def _shown(value: object) -> str:
    return shortened(str(value).lower() if isinstance(value, bool) else repr(value))
