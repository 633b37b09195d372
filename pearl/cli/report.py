"""`pearl report`: summarise the results of a run."""

from __future__ import annotations

import csv
import os
import webbrowser
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from pearl.byte_size import readable_size
from pearl.cli.app import app, examples
from pearl.cli.iteration import iteration_table
from pearl.cli.output import check_writable, console, facts_table, read_json, write_file
from pearl.cli.run import rates_table
from pearl.errors import ConfigurationError, GenerationError
from pearl.runtime.power import power_text
from pearl.runtime.scores import best_text, evaluated_in_text, last_text, number

if TYPE_CHECKING:
    from rich.table import Table

_T = TypeVar("_T")

_TAIL_BYTES = 65_536  # the end of a table, which contains its last row


@app.command(
    name="report",
    epilog=examples(
        "pearl report runs/dqn_cartpole",
        "pearl report runs/dqn_cartpole --output report.html --open",
        "pearl report runs/dqn_cartpole --trace trace.json",
    ),
)
def _report(
    run_dir: Annotated[Path, typer.Argument(help="The folder of a run.")],
    output: Annotated[
        Path | None, typer.Option(help="Where the HTML report goes. Default: RUN_DIR/report.html.")
    ] = None,
    html: Annotated[bool, typer.Option("--html/--no-html", help="Whether to write the HTML report.")] = True,
    show: Annotated[bool, typer.Option("--open", help="Open the HTML report in the browser.")] = False,
    trace: Annotated[
        Path | None, typer.Option(help="The trace of the run. Default: RUN_DIR/trace.json, if it is there.")
    ] = None,
    composition: Annotated[
        Path | None,
        typer.Option(help="PROGRAM.composition.json, for a run folder without a copy of it."),
    ] = None,
) -> None:
    """Summarise the results of a run here, and write an HTML report.

    The report shows the platform and the placement, the matrix, the cost of every placement, the prediction and the
    measurement of an iteration, queues and learning curves. It is one file, which loads nothing and works offline.
    """
    if not html and (output is not None or show or trace is not None or composition is not None):
        raise ConfigurationError("--no-html writes no HTML report: leave out the other options, or --no-html.")
    summary_path, progress_path, bench_path = (
        run_dir / name for name in ("summary.json", "progress.csv", "bench.json")
    )
    checkpoints = sorted(path.parent for path in run_dir.glob("checkpoints/checkpoint-*/manifest.json"))
    if not run_dir.is_dir():
        raise ConfigurationError(f"There is no folder {run_dir}. A program's --run-dir says where its run goes.")
    if not (checkpoints or any(path.is_file() for path in (summary_path, progress_path, bench_path))):
        raise ConfigurationError(
            f"{run_dir} is not the folder of a run: it has no summary.json, no progress.csv and no checkpoints. "
            "A program's --run-dir says where its run goes."
        )
    out = console()
    damaged: list[ConfigurationError] = []

    def read(path: Path, reader: Callable[[Path], _T]) -> _T | None:
        """The content of a file; None if it is damaged, which is reported at the end, after the other files."""
        try:
            return reader(path)
        except ConfigurationError as error:
            damaged.append(error)
            return None

    if not summary_path.is_file():
        print(f"{run_dir} has no summary.json: the run goes on, or was stopped before its end.")
    elif (summary := read(summary_path, read_json)) is not None:
        out.print(_summary_table(summary))
        if table := iteration_table(summary):
            out.print(table)
        if progress_path.is_file() and progress_path.stat().st_mtime > summary_path.stat().st_mtime:
            print("progress.csv is newer than this summary: a later run goes on, or was stopped before its end.")
    for title, name in (
        ("Newest progress (training_return: last 100 training episodes, exploration included)", "progress.csv"),
        ("Newest evaluation (greedy)", "evaluations.csv"),
    ):
        if row := read(run_dir / name, _last_row):
            known = {key: _rounded(value) for key, value in row.items() if value not in ("", "nan")}
            out.print(facts_table(title, known))
    if bench_path.is_file() and (rates := read(bench_path, read_json)) is not None:
        out.print(rates_table(rates))
        if table := iteration_table(rates):
            out.print(table)
    _print_files(run_dir, checkpoints)
    if html:
        _write_html(run_dir, output or run_dir / "report.html", show=show, trace=trace, composition=composition)
    if damaged:
        raise damaged[0]


def _write_html(run_dir: Path, path: Path, *, show: bool, trace: Path | None, composition: Path | None) -> None:
    from composer.html_report.page import report_page

    try:
        check_writable(path)
        write_file(path, report_page(run_dir, composition=composition, trace=trace))
    except GenerationError as error:
        raise GenerationError(f"{error} --output says where the HTML report goes, --no-html writes none.") from error
    print(f"{'Report:':<16}{path}")
    if show and not webbrowser.open(path.resolve().as_uri()):
        raise ConfigurationError(f"No browser was found to open {path}. Open it by hand.")


def _summary_table(summary: Mapping[str, Any]) -> Table:
    facts = {"environment": str(summary.get("environment", "-")), "seed": str(summary.get("seed", "-"))}
    if evaluated := evaluated_in_text(summary):
        facts["evaluated in"] = evaluated
    facts["stopped"] = str(summary.get("stopped", "-"))
    for name, key in (
        ("environment steps", "env_steps"),
        ("gradient steps", "gradient_steps"),
        ("training episodes", "episodes"),
        ("actor restarts", "actor_restarts"),
    ):
        facts[name] = f"{number(summary, key):,.0f}"
    facts["replay ratio"] = f"{number(summary, 'replay_ratio'):.2f}"
    facts["wall-clock time"] = f"{number(summary, 'wall_s'):,.1f} s, to the end of training"
    measured, predicted, overall = (number(summary, f"{key}_eps") for key in ("measured", "predicted", "overall"))
    facts["EPS"] = (
        f"{measured:,.0f} while a batch was under way (predicted {predicted:,.0f}), "
        f"{overall:,.0f} since the first batch, waiting included"
    )
    if number(summary, "watts") > 0:
        facts["power"] = power_text(summary)
    facts["last weights"], facts["best weights"] = last_text(summary), best_text(summary)
    return facts_table(f"Run of {summary.get('program', 'a program')}", facts)


def _print_files(run_dir: Path, checkpoints: Sequence[Path]) -> None:
    """Lines, not a table, which would break paths."""
    for what, name in (
        ("Learning curve:", "learning_curve.png"),
        ("Last weights:", "weights.safetensors"),
        ("Best weights:", "best_weights.safetensors"),
        ("Log:", "run.log"),
        ("TensorBoard:", "tensorboard"),
    ):
        print(f"{what:<16}{run_dir / name if (run_dir / name).exists() else 'none'}")
    for folder in checkpoints:
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        print(f"{'Checkpoint:':<16}{folder} ({readable_size(size)})")
    if not checkpoints:
        print(f"{'Checkpoint:':<16}none in {run_dir / 'checkpoints'}")


def _last_row(path: Path) -> dict[str, str] | None:
    """The last complete row of a CSV file of the run, without a row that a kill has cut short."""
    if not path.is_file():
        return None
    try:
        with path.open("rb") as file:
            first = file.readline()
            file.seek(max(len(first), file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            ends = (first + file.read()).decode(errors="replace").splitlines(keepends=True)
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror or error}.") from error
    lines = [line for line in ends if line.endswith("\n")]
    try:
        rows = list(csv.DictReader([lines[0], lines[-1]])) if len(lines) > 1 else []
    except csv.Error as error:
        raise ConfigurationError(f"{path} is not a CSV file of a run: {error}.") from error
    return {key: value or "" for key, value in rows[0].items() if key} if rows else None


def _rounded(text: str) -> str:
    try:
        value = float(text)
    except ValueError:
        return text
    if text.lstrip("-").isdigit():
        return f"{value:,.10g}"
    return f"{value:.3g}" if 0 < abs(value) < 0.1 else f"{value:,.2f}"  # such as learning rates
