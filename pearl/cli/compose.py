"""`pearl compose`: profile, place, and write the program."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pearl.cli.app import app, examples
from pearl.cli.explain import read_placement
from pearl.cli.output import check_writable, console, write_file
from pearl.errors import ConfigurationError
from pearl.garbage import no_collection
from pearl.process_limits import check_address_space
from pearl.runtime.composition_file import composition_file
from pearl.runtime.launch import shown


@app.command(
    name="compose",
    epilog=examples(
        "pearl compose examples/cartpole.toml",
        "pearl compose my.toml --output programs/mine.py",
        "pearl compose my.toml --implementation torch",
        "pearl compose my.toml --budget 60",
        "pearl compose my.toml --set trainer.learning_rate=1e-3 --set training.batch_size=128",
        "pearl compose my.toml --placement edited.json",
        "pearl compose --zoo hyperparams/dqn.yml --env CartPole-v1",
    ),
)
def _compose(
    spec: Annotated[Path | None, typer.Argument(help="The composition; see examples/cartpole.toml.")] = None,
    output: Annotated[
        Path | None, typer.Option(help="Where the program goes. Default: as in the file, else runs/NAME/program.py.")
    ] = None,
    placement_json: Annotated[
        Path | None,
        typer.Option("--json", help="Where the placement goes. Default: PROGRAM.placement.json next to the program."),
    ] = None,
    matrix_json: Annotated[
        Path | None,
        typer.Option("--matrix-json", help="Where the matrix goes. Default: PROGRAM.matrix.json next to the program."),
    ] = None,
    placement: Annotated[
        Path | None,
        typer.Option(help="An edited placement, whose choice the program takes. Its numbers must be as composed."),
    ] = None,
    budget: Annotated[
        float | None,
        typer.Option(
            help="Seconds for which programs of placements are tried, to place the fastest; 0: none. "
            "Default: the time of those that may be the fastest, up to 60."
        ),
    ] = None,
    implementation: Annotated[
        str | None,
        typer.Option(
            help="Of the Learner: auto (the fastest), native, torch, cuda, sycl or fpga. Default: as in the file, else "
            "auto."
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="TABLE.KEY=VALUE", help="Replace a value of the file; may be repeated."),
    ] = None,
    zoo: Annotated[
        Path | None,
        typer.Option(help="In place of a composition: a file of RL Zoo, such as its hyperparams/dqn.yml. Needs --env."),
    ] = None,
    env: Annotated[str | None, typer.Option(help="With --zoo: the environment, such as CartPole-v1.")] = None,
    algo: Annotated[
        str | None,
        typer.Option(
            help="With --zoo: dqn, qrdqn, ddpg, td3, sac, tqc, ppo, ppo_lstm or a2c. Default: the file's name."
        ),
    ] = None,
    leave_out: Annotated[
        list[str] | None, typer.Option(help="With --zoo: a setting to do without; may be repeated.")
    ] = None,
) -> None:
    """Profile the primitives, choose their devices, and write the training program.

    Prints the assignment matrix and the placement with its reasons, and writes both as JSON. Measurements are kept
    between runs. A program there that was edited is kept under another name.
    """
    check_address_space()
    with no_collection():
        from composer.description import CHOOSE_OF_ROLLOUTS
        from composer.spec_file import load_spec, load_zoo
        from composer.spec_overrides import parse_overrides

    # Faults show before anything is measured.
    edited = None if placement is None else read_placement(placement, CHOOSE_OF_ROLLOUTS)
    if zoo is None:
        if env is not None or algo is not None or leave_out:
            raise ConfigurationError("--env, --algo and --leave-out belong to --zoo FILE: name it, or leave them out.")
        if spec is None:
            raise ConfigurationError("Name a composition file, or --zoo FILE with --env ID; found neither.")
        overrides = parse_overrides(settings or ())
        composer, options = load_spec(spec, implementation=implementation, output=output, overrides=overrides)
    else:
        if spec is not None:
            raise ConfigurationError(f"Name a composition file, or --zoo FILE, not both; found {spec} and {zoo}.")
        if settings:
            raise ConfigurationError("--set replaces values of a composition file; --zoo has none. Use --leave-out.")
        if env is None:
            raise ConfigurationError("--zoo needs --env: the environment whose settings to take, such as CartPole-v1.")
        composer, options = load_zoo(zoo, env, algo, leave_out or (), implementation=implementation, output=output)
    path = options.path
    matrix_json = matrix_json or path.with_name(f"{path.stem}.matrix.json")
    placement_json = placement_json or path.with_name(f"{path.stem}.placement.json")
    for file in (path, matrix_json, placement_json):
        check_writable(file)
    _check_apart(spec or zoo, path, matrix_json, placement_json)
    if edited is not None:
        composer.set_placement(edited)
    replay, learner = composer.run(timesteps=options.timesteps, budget_s=budget)
    console().print(composer.matrix, composer.placement)
    # Before the program, since none can be written if a null device was chosen: then these files are the result.
    write_file(matrix_json, composer.matrix.to_json() + "\n")
    write_file(placement_json, composer.placement.to_json() + "\n")
    print(f"Matrix:    {shown(matrix_json)}")
    print(f"Placement: {shown(placement_json)}")
    composer.runtime_gen(replay, learner, **{**vars(options), "path": path})


def _check_apart(composition: Path | None, program: Path, matrix_json: Path, placement_json: Path) -> None:
    """Raise ConfigurationError where one of the files would be written over another."""
    files = {
        "the composition file": composition,
        "the program (--output)": program,
        "the program's composition": composition_file(program),
        "the matrix (--matrix-json)": matrix_json,
        "the placement (--json)": placement_json,
    }
    found: dict[Path, str] = {}
    for name, file in files.items():
        if file is None or (file.exists() and not file.is_file()):  # /dev/null takes everything
            continue
        if (other := found.setdefault(file.resolve(), name)) != name:
            raise ConfigurationError(f"{file} would be {other} and {name}. Give one of them another path.")
