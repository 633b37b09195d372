"""`pearl suggest`: an algorithm and settings for an environment, with reasons."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from pearl.cli.app import app, examples
from pearl.cli.output import check_writable, console, output_kept_free, write_file
from pearl.errors import ConfigurationError
from pearl.process_limits import check_address_space
from pearl.runtime.launch import shown


@app.command(
    name="suggest",
    epilog=examples(
        "pearl suggest CartPole-v1",
        "pearl suggest Pendulum-v1 --algorithm TD3 --json",
        "pearl suggest LunarLander-v3 --write lander",
        "pearl suggest Corridor-v0 --module corridor.py --write corridor.toml",
    ),
)
def _suggest(
    env: Annotated[str, typer.Argument(help="The environment's Gymnasium name, such as CartPole-v1.")],
    algorithm: Annotated[
        str | None,
        typer.Option(help="One of pearl.algorithms, such as TD3. Default: the one that fits the environment."),
    ] = None,
    module: Annotated[
        str | None, typer.Option(help="The module, or file.py, that registers the environment. It is imported.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    write: Annotated[
        Path | None,
        typer.Option(help="Write a composition and its trainer class, for `pearl compose`: a folder or a .toml file."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace files that exist.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random actions and of the environment.")] = 0,
) -> None:
    """Suggest an algorithm and settings for an environment on this machine, each with the fact it follows from.

    Reads the spaces, steps the environment with random actions for up to two seconds, and measures gradient steps of a
    few sizes. Nothing is trained.
    """
    check_address_space()
    if ":" in env:
        raise ConfigurationError(
            f"pearl suggest takes a registered name; found {env!r}. Register the class in its module "
            f'(gymnasium.register) and give --module; or compose with settings="auto" (docs/choosing_settings.md).'
        )
    from composer.suggestion.files import Registering, check_target, paths_of, texts
    from composer.suggestion.suggestion import suggest

    if write is not None:  # faults show before anything is measured
        check_target(write)
        paths = paths_of(env, write)
        if (existing := [str(path) for path in paths if path.exists()]) and not force:
            raise ConfigurationError(
                f"{' and '.join(existing)} would be overwritten. Add --force to replace, or choose another --write."
            )
        for path in paths:
            check_writable(path)
    with output_kept_free(json):
        registering = None if module is None else Registering.of(module)
        suggestion = suggest(env, algorithm=algorithm, seed=seed)
    if json:
        print(suggestion.to_json())
    else:
        console().print(suggestion)
        if suggestion.alternatives:
            print(f"Also for such actions (--algorithm): {', '.join(suggestion.alternatives)}")
    if write is None:
        return
    files = texts(suggestion, write, registering)
    for path, text in files.items():
        write_file(path, text)
    if not json:
        composition, trainer = files
        print(f"Composition: {shown(composition)}\nTrainer:     {shown(trainer)}")
        print(f"Next:        pearl compose {shlex.quote(shown(composition))}")
