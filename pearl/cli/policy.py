"""`pearl evaluate`, `pearl enjoy` and `pearl export`: use the policy of a run."""

from __future__ import annotations

import importlib
import json
import sys
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from pearl.cli.app import app, examples
from pearl.cli.output import console, facts_table, output_kept_free
from pearl.error_place import described, is_missing
from pearl.errors import ConfigurationError

if TYPE_CHECKING:
    from pearl.policy import SavedPolicy


class ExportFormat(str, Enum):
    """The format of an exported policy."""

    onnx = "onnx"
    torchscript = "torchscript"
    safetensors = "safetensors"


class Which(str, Enum):
    """Which weights."""

    best = "best"
    last = "last"


_Run: TypeAlias = Annotated[Path, typer.Argument(help="The folder of a run, or a file of `pearl export`.")]
_Which: TypeAlias = Annotated[
    Which | None, typer.Option("--which", help="Which weights. Default: the best if there are some.")
]
_Env: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="Another environment, or MODULE:NAME of what makes it. Default: that of the run."
    ),
]
_NoWrappers: TypeAlias = Annotated[
    bool, typer.Option("--no-wrappers", help="Leave out the run's wrappers, and the frame preprocessing of its vector.")
]
_EnvKwargs: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--env-kwarg",
        metavar="NAME=VALUE",
        help="An argument of the environment; may be repeated. Others are those of the run.",
    ),
]
_Seed: TypeAlias = Annotated[int, typer.Option(min=0, help="Seed of episodes and stochastic actions.")]
_Stochastic: TypeAlias = Annotated[
    bool, typer.Option("--stochastic", help="Draw actions from the policy instead of the greedy ones.")
]
_Trainer: TypeAlias = Annotated[
    str | None,
    typer.Option(metavar="MODULE:CLASS", help="The trainer class, where it is not where the run's program found it."),
]
_Imports: TypeAlias = Annotated[
    list[str] | None,
    typer.Option("--import", metavar="MODULE", help="Import a module that registers environments; may be repeated."),
]


@app.command(
    name="evaluate",
    epilog=examples(
        "pearl evaluate runs/cartpole",
        "pearl evaluate runs/cartpole --which last --episodes 500 --seed 3",
        "pearl evaluate runs/cartpole --env CartPole-v0 --json",
        "pearl evaluate runs/corridor --env-kwarg length=16 --import corridor",
        "pearl evaluate runs/doors --env doors:WideDoors --no-wrappers",
    ),
)
def _evaluate(
    run: _Run,
    env: _Env = None,
    episodes: Annotated[int, typer.Option(min=1, help="How many episodes.")] = 100,
    which: _Which = None,
    seed: _Seed = 1,
    stochastic: _Stochastic = False,
    env_kwarg: _EnvKwargs = None,
    no_wrappers: _NoWrappers = False,
    trainer: _Trainer = None,
    imports: _Imports = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, with every return.")] = False,
) -> None:
    """Evaluate the policy of a run in its environment, or in another one with the same spaces.

    The environment is made and wrapped as in the run; another one is wrapped in the same way, too.
    """
    from pearl.policy import evaluate_policy

    with output_kept_free(as_json):
        policy, environment = _load(run, which, trainer, imports, seed), _environment(env)
        found = evaluate_policy(
            policy,
            environment,
            env_kwargs=_env_kwargs(env_kwarg, policy, environment, no_wrappers),
            wrappers=not no_wrappers,
            episodes=episodes,
            seed=seed,
            deterministic=not stochastic,
        )
    kept = "" if no_wrappers else policy.description.made.kept_text
    returns, lengths = found.returns, found.lengths
    if as_json:
        facts = {"environment": env or policy.env, "weights": policy.origin.which, "step": policy.origin.step}
        facts |= {"wrappers": kept} if kept else {}
        numbers = {"episodes": len(returns), "mean": found.mean, "std": found.std, "returns": returns.tolist()}
        print(json.dumps({**facts, **numbers, "lengths": lengths.tolist()}))
        return
    console().print(
        facts_table(
            f"{policy.description.trainer.name} in {env or policy.env}",
            {
                "weights": _weights_text(policy),
                **({"as in the run": kept} if kept else {}),
                "actions": "drawn from the policy" if stochastic else "greedy",
                "mean return": f"{found.mean:,.2f} +- {found.std:,.2f} ({returns.min():,.2f} to {returns.max():,.2f})",
                "mean length": f"{lengths.mean():,.1f} steps ({lengths.min():,} to {lengths.max():,})",
                "episodes": f"{len(returns):,}, seed {seed}",
            },
        )
    )


@app.command(
    name="enjoy",
    epilog=examples(
        "pearl enjoy runs/cartpole",
        "pearl enjoy runs/cartpole --video videos --episodes 1",
    ),
)
def _enjoy(
    run: _Run,
    env: _Env = None,
    episodes: Annotated[int, typer.Option(min=1, help="How many episodes.")] = 3,
    video: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Record MP4 files there instead (extra `video`).")
    ] = None,
    which: _Which = None,
    seed: _Seed = 1,
    stochastic: _Stochastic = False,
    env_kwarg: _EnvKwargs = None,
    no_wrappers: _NoWrappers = False,
    trainer: _Trainer = None,
    imports: _Imports = None,
) -> None:
    """Watch the policy of a run on the screen, or record videos of it."""
    from pearl.policy import watch_policy

    policy = _load(run, which, trainer, imports, seed)
    print(f"{policy.description.trainer.name} in {env or policy.env}: {_weights_text(policy)}")
    if not no_wrappers and (kept := policy.description.made.kept_text):
        print(f"As in the run: {kept}")
    environment = _environment(env)
    watched = watch_policy(
        policy,
        environment,
        env_kwargs=_env_kwargs(env_kwarg, policy, environment, no_wrappers),
        wrappers=not no_wrappers,
        episodes=episodes,
        seed=seed,
        deterministic=not stochastic,
        video=video,
    )
    for number, episode in enumerate(watched, start=1):
        where = "" if episode.video is None else f", {episode.video}"
        print(f"Episode {number}: return {episode.ret:,.2f} in {episode.length:,} steps{where}", flush=True)


@app.command(
    name="export",
    epilog=examples(
        "pearl export runs/cartpole",
        "pearl export runs/cartpole --format torchscript --which last --output cartpole.pt",
        "pearl export runs/cartpole --format safetensors",
    ),
)
def _export(
    run: _Run,
    format: Annotated[
        ExportFormat, typer.Option("--format", help="What to write; onnx needs the extra `export`.")
    ] = ExportFormat.onnx,
    output: Annotated[
        Path | None, typer.Option(help="The file. Default: RUN/policy.onnx, .pt or .safetensors.")
    ] = None,
    which: _Which = None,
    trainer: _Trainer = None,
) -> None:
    """Export the policy of a run: from raw observations to final actions (onnx, torchscript), or as weights.

    What is exported is compared with the policy on random observations first.
    """
    from pearl.policy import export_policy
    from pearl.policy.export import SUFFIXES

    policy = _load(run, which, trainer, None, 0)
    file = output or Path(policy.origin.run) / f"policy{SUFFIXES[format.value]}"
    export_policy(policy, file, format.value)
    print(f"{file}: {format.value}, {_weights_text(policy)}")


def _weights_text(policy: SavedPolicy) -> str:
    origin = policy.origin
    step = "" if origin.step is None else f" of step {origin.step:,}"
    score = (
        ""
        if origin.mean_return is None
        else f", mean return {origin.mean_return:,.2f} at the end of the run, over {origin.episodes} episodes"
    )
    return f"{origin.which} weights{step}{score}"


def _load(run: Path, which: Which | None, trainer: str | None, imports: list[str] | None, seed: int) -> SavedPolicy:
    from pearl.policy import load_policy

    for module in imports or ():
        _imported(module, "--import")
    chosen: Any = None if which is None else which.value
    return load_policy(run, chosen, trainer=None if trainer is None else _trainer_class(trainer), seed=seed)


def _imported(module: str, option: str) -> Any:
    """The module that the user named, also from the current folder."""
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(module)
    except Exception as error:  # whatever the user's module does at import
        if is_missing(module, error):
            raise ConfigurationError(
                f"{option}: there is no module {module!r} in {Path.cwd()} or among the installed packages. Name the "
                'module without ".py".'
            ) from error
        raise ConfigurationError(f"{option} {module} cannot be imported: {described(error)}.") from error


def _trainer_class(text: str) -> type:
    module, _, name = text.partition(":")
    if not module or not name:
        raise ConfigurationError(f"--trainer must be MODULE:CLASS, such as my_project:DQNTrainer; found {text!r}.")
    found = getattr(_imported(module, "--trainer"), name, None)
    if not isinstance(found, type):
        raise ConfigurationError(f"--trainer {text}: the module {module} has no class {name}.")
    return found


def _environment(text: str | None) -> Any:
    """A registered name as it is; for MODULE:NAME the class or function."""
    module, _, name = (text or "").partition(":")
    if not name.isidentifier() or not all(part.isidentifier() for part in module.split(".")):
        return text
    found = getattr(_imported(module, "--env"), name, None)
    if not callable(found):
        raise ConfigurationError(f"--env {text}: the module {module} has no class or function {name}.")
    return found


def _env_kwargs(
    arguments: list[str] | None, policy: SavedPolicy, environment: Any, no_wrappers: bool
) -> dict[str, Any] | None:
    """The arguments given, and the others that the environment has in the run; None if none is given."""
    from pearl.policy.playing import kwargs_of_run

    if not arguments:
        return None
    found = dict(kwargs_of_run(policy, environment, wrappers=not no_wrappers))
    for argument in arguments:
        name, equals, text = argument.partition("=")
        if not equals or not name.isidentifier():
            raise ConfigurationError(f"--env-kwarg must be NAME=VALUE, such as length=16; found {argument!r}.")
        try:
            found[name] = json.loads(text)
        except ValueError:
            found[name] = text  # a text without quotes
    return found
