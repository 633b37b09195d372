"""`pearl explain`: the terms of a placement, what decides, and what would change it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pearl.cli.app import app, examples
from pearl.cli.output import console
from pearl.errors import ConfigurationError
from pearl.runtime.composition_file import COMPOSITION_OF_RUN, composition_file

if TYPE_CHECKING:
    from composer.on_policy.placement import RolloutPlacement
    from composer.placement import Placement


@app.command(
    name="explain",
    epilog=examples(
        "pearl explain examples/runs/cartpole",
        "pearl explain examples/runs/cartpole/program.py --pairs 10",
        "pearl explain batch64.placement.json batch512.placement.json",
    ),
)
def _explain(
    sources: Annotated[
        list[Path],
        typer.Argument(
            metavar="SOURCE...",
            help="A placement (.json), a program that was composed, or the folder of a run. Several are compared.",
        ),
    ],
    pairs: Annotated[int, typer.Option(min=0, help="How many rejected pairs are shown term by term.")] = 4,
) -> None:
    """Explain a placement: every term of each pair, which decides, and what would change the choice.

    Break-even values say at which speed of a device, or at which latency or bandwidth of a link, another pair becomes
    the choice; where all times are modelled, also at which batch size and fanout. Then comes the Data Storage: the
    traffic and the memory of each device. Several placements of one problem, such as of several batch sizes, are
    compared instead. A placement with rollouts (PPO) is explained by the parts of an iteration, each on its own.
    """
    from composer.explain import Explanation

    files = [placement_file(source) for source in sources]
    if len(files) == 1 and (rollouts := _rollout_placement(files[0])) is not None:
        console().print(rollouts.explain(pairs=pairs))
        return
    one_by_one = "Several are compared only where all are with a replay: explain each of rollouts on its own."
    placements = tuple(read_placement(file, one_by_one) for file in files)
    console().print(Explanation(placements, pairs, tuple(map(str, files))))


def placement_file(source: Path) -> Path:
    """The placement, or composition, that `source` names: itself, that of a program or of a run; ConfigurationError."""
    if source.is_dir():
        composition, run = source / COMPOSITION_OF_RUN, source.resolve()
        placements = [source / "placement.json", *sorted(source.glob("*.placement.json"))]
        placements.append(run.parent.parent / f"{run.name}.placement.json")  # the default run folder of a program
    elif source.suffix == ".py":
        composition = composition_file(source)
        placements = [source.with_name(f"{source.stem}.placement.json"), source.with_name("placement.json")]
    else:
        return source
    found = [file for file in placements if file.is_file()]
    if composition.is_file() and not any(_newer(file, composition) for file in found):
        return composition  # of the program as it is now, and as it ran here
    if not found:
        tried = dict.fromkeys(map(str, (*placements, composition)))
        raise ConfigurationError(
            f"There is no placement for {source}: looked for {', '.join(tried)}. "
            "`pearl compose` and Composer.save write one; name that file."
        )
    if source.is_dir() and found[0].name != "placement.json" and len(found) > 1:
        raise ConfigurationError(f"{source} has several placements: {', '.join(map(str, found))}. Name one of them.")
    return found[0]


def _newer(file: Path, other: Path) -> bool:
    return file.stat().st_mtime_ns > other.stat().st_mtime_ns


def _rollout_placement(file: Path) -> RolloutPlacement | None:
    """The placement with rollouts in a JSON file; None if it is of another kind."""
    from composer.on_policy.placement import RolloutPlacement

    found = _placement_in(file)
    return found if isinstance(found, RolloutPlacement) else None


def read_placement(file: Path, of_rollouts: str = "") -> Placement:
    """The placement of a trainer that learns from a replay, in a JSON file; an error names the file.

    `of_rollouts` is what to do with a placement of rollouts instead.
    """
    from composer.placement import Placement

    found = _placement_in(file)
    if not isinstance(found, Placement):
        raise ConfigurationError(
            f"{file}: expected a placement of a trainer that learns from a replay; found one of a trainer that learns "
            f"from rollouts. {of_rollouts}".rstrip()
        )
    return found


def _placement_in(file: Path) -> Placement | RolloutPlacement:
    """The placement in a JSON file: the whole of it, or a part of a composition."""
    from composer.composition import Composition, RolloutComposition, read_composition
    from composer.on_policy.placement import RolloutPlacement
    from composer.placement import Placement
    from composer.serialization import format_of

    text = read_text(file)
    kind = format_of(text)
    try:
        if kind in (Composition.FORMAT, RolloutComposition.FORMAT):
            return read_composition(text).placement
        return RolloutPlacement.from_json(text) if kind == RolloutPlacement.FORMAT else Placement.from_json(text)
    except ConfigurationError as error:
        raise type(error)(f"{file}: {error}") from error


def read_text(file: Path) -> str:
    """The text of a file that `pearl compose` writes; raises ConfigurationError."""
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(
            f"The file {file} cannot be read: {error.strerror or error}. `pearl compose` writes placements, matrices."
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(
            f"The file {file} is not UTF-8 text. `pearl compose` writes placements, matrices."
        ) from error
