"""Writes a suggestion as a composition file and the file of its trainer class, with the reasons as comments."""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from composer.codegen.python_source import EXPLORATIONS, laid_out
from composer.codegen.trainer_source import check_module_name
from composer.spec_file import import_from
from composer.suggestion.suggestion import Suggestion
from pearl.algorithms.suggestions import Choice
from pearl.errors import ConfigurationError, GenerationError

_WIDTH = 120


@dataclass(frozen=True)
class Registering:
    """The module that registers the environment, and the folder that it is imported from; None: it is installed."""

    module: str
    folder: Path | None

    @classmethod
    def of(cls, stated: str) -> Registering:
        """Import the module, or the file where `stated` ends in ".py"; ConfigurationError or TrainerError if not."""
        if not stated.endswith(".py"):
            found = import_from(stated, Path.cwd())
            return cls(stated, _folder_of(found, stated))
        file = Path(stated).resolve()
        if not file.is_file():
            raise ConfigurationError(f"There is no file {stated}. Name the one that registers the environment.")
        try:
            check_module_name(file.stem, file.name)
        except GenerationError as error:
            raise ConfigurationError(str(error)) from error
        import_from(file.stem, file.parent)
        return cls(file.stem, file.parent)


def _folder_of(module: ModuleType, name: str) -> Path | None:
    here, stated = Path.cwd(), getattr(module, "__file__", None)
    local = stated is not None and Path(stated).resolve().is_relative_to(here) and "site-packages" not in stated
    return here if local else None


def check_target(target: Path) -> None:
    """Raise ConfigurationError unless `target` names a folder, or a file that ends in .toml."""
    if target.suffix in (".py", ".json", ".yaml", ".yml", ".txt") or (target.is_file() and target.suffix != ".toml"):
        raise ConfigurationError(f"Name a folder, or a composition file, which ends in .toml; found {target}.")


def paths_of(env: str, target: Path) -> tuple[Path, Path]:
    """The composition file and the trainer file; `target` is a folder, or the composition file, which ends in .toml."""
    if target.suffix == ".toml":
        return target, target.with_name(f"{_stem(target.stem)}_trainer.py")
    stem = _stem(env)
    return target / f"{stem}.toml", target / f"{stem}_trainer.py"


def _stem(env: str) -> str:
    stem = re.sub(r"\W+", "_", env).strip("_").lower()
    return stem if stem[:1].isalpha() else f"env_{stem}"


def class_name(suggestion: Suggestion) -> str:
    """Of the trainer class: the environment's name without its version, and the algorithm's."""
    name = re.sub(r"-v\d+$", "", suggestion.env.rpartition("/")[2])
    words = "".join(word[:1].upper() + word[1:] for word in re.split(r"\W+|_", name))
    return f"{words}{suggestion.algorithm.value}" if words[:1].isalpha() else f"Suggested{suggestion.algorithm.value}"


def composition_text(suggestion: Suggestion, trainer: Path) -> str:
    """The TOML file, whose trainer file `trainer` is next to it."""
    lines = [
        f"# {suggestion.algorithm.value} on {suggestion.env}, with settings that `pearl suggest` chose. Edit freely.",
        "# Settings of the algorithm itself are in the class.",
        "",
        "[actors]",
        f"env = {_toml(suggestion.env)}",
        *_entries(suggestion.actors),
        "",
        "[trainer]",
        *_comment(f"{suggestion.algorithm.value}: {suggestion.algorithm.reason}"),
        f"class = {_toml(f'{trainer.name}:{class_name(suggestion)}')}",
    ]
    for table in ("replay", "rollout", "training", "program"):
        if choices := suggestion.tables[table]:
            lines += ["", f"[{table}]", *_entries(choices)]
    return "\n".join(lines) + "\n"


def _entries(choices: tuple[Choice, ...]) -> list[str]:
    return [line for c in choices for line in (*_comment(c.reason), f"{c.name} = {_toml(c.value)}")]


def _comment(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        if not escaped.isprintable():
            raise GenerationError(f"{value!r} cannot be written into a composition file.")
        return f'"{escaped}"'
    assert isinstance(value, int | float)
    return f"{value:_}" if isinstance(value, int) else repr(value)


def trainer_text(suggestion: Suggestion, path: Path, registering: Registering | None = None) -> str:
    """The Python file of the trainer class, which is going to be at `path`."""
    settings = suggestion.settings
    explorations = sorted({type(c.value).__name__ for c in settings if isinstance(c.value, EXPLORATIONS)})
    imports = [f"from pearl.algorithms import {suggestion.algorithm.value}"]
    imports += [f"from pearl.exploration import {', '.join(explorations)}"] if explorations else []
    known, before = [], []
    if registering is not None:
        known = [f"import {registering.module}  # registers the environment"]
        if registering.folder is not None and registering.folder != path.resolve().parent:
            place = os.path.relpath(registering.folder, path.resolve().parent)
            before = ["import sys", "from pathlib import Path", ""]
            known = [f"sys.path.insert(0, str(Path(__file__).resolve().parent / {_toml(place)}))", *known]
    heading = f'"""{suggestion.algorithm.value} for {suggestion.env}, with settings that `pearl suggest` chose."""'
    body = [line for choice in settings for line in _setting(choice)]
    what = f"Edit freely: other settings keep the defaults of `pearl.algorithms.{suggestion.algorithm.value}`."
    lines = [heading, "", *before, *imports, *([""] if known else []), *known, "", ""]
    lines += [f"class {class_name(suggestion)}({suggestion.algorithm.value}):", f'    """{what}"""', *body]
    return "\n".join(lines) + "\n"


def _setting(choice: Choice) -> list[str]:
    start = f"    {choice.name} = "
    return ["", *_comment(choice.reason, "    "), start + laid_out(choice.value, len(start), 4)]


def texts(suggestion: Suggestion, target: Path, registering: Registering | None = None) -> Mapping[Path, str]:
    """What to write, by path."""
    composition, trainer = paths_of(suggestion.env, target)
    return {
        composition: composition_text(suggestion, trainer),
        trainer: trainer_text(suggestion, trainer, registering),
    }
