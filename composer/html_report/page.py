"""Puts the report of a run together: one HTML file without scripts, which loads nothing and works offline."""

from __future__ import annotations

import base64
import functools
import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import jinja2
from markupsafe import Markup

import pearl
from composer.composition import Composition, RolloutComposition
from composer.html_report import composition_view, rollout_view, run_view, timeline
from composer.html_report.platform_diagram import platform_diagram
from composer.html_report.record import RunRecord, read_run
from composer.html_report.view import SAME, View
from composer.templates import template_folders
from pearl.errors import PearlError

_T = TypeVar("_T")

# Neither HTML nor XML may hold these; a name from a file may.
_FORBIDDEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


def report_page(folder: Path, *, composition: Path | None = None, trace: Path | None = None) -> str:
    """The report of the run in `folder` as HTML text, which is also well-formed XML.

    `composition` names a PROGRAM.composition.json in place of the run's own, `trace` the file of `--trace`; raises
    ConfigurationError where a named file cannot be read. The page says what else is missing or damaged.
    """
    return render(read_run(folder, composition, trace))


def render(record: RunRecord) -> str:
    """The page of a record."""
    notes = [note for note in (*record.notes, run_view.prediction_differs(record)) if note]

    def section(build: Callable[[], _T]) -> _T | None:
        """The section; None, with a note, where an edited composition does not fit together."""
        try:
            return build()
        except PearlError as error:
            notes.append(str(error))
            return None

    made = record.composition
    styles = _environment().get_template("report.css").render()
    name = str(record.summary.get("program") or record.folder.resolve().name or "run")
    view = None if made is None else section(lambda: _view_of(made))
    predicted = [] if view is None else view.schedule
    traced = [] if record.trace is None else timeline.traced_window(record.trace)
    text = (
        _environment()
        .get_template("report.html.j2")
        .render(
            title=name[:200],
            version=pearl.__version__,
            environment=run_view.text_of(record.summary.get("environment")),
            styles=Markup(styles),
            style_hash=base64.b64encode(hashlib.sha256(styles.encode()).digest()).decode(),
            key_numbers=run_view.key_numbers(record),
            facts=run_view.facts(record),
            curves=run_view.learning_curves(record),
            queues=run_view.queue_levels(record),
            comparisons=run_view.comparisons(record),
            view=view,
            platform=None if made is None or view is None else section(lambda: platform_diagram(made.platform, view)),
            connections=None
            if made is None
            else section(
                lambda: [
                    (c.source, c.target, f"{c.latency_us:,.4g}", f"{c.bandwidth_gbps:,.4g}") for c in made.connections
                ]
            ),
            unused_links=None
            if made is None
            else section(lambda: [f"{c.source} to {c.target}" for c in made.platform.unused_connections]),
            predicted_timeline=timeline.draw_schedule(predicted, "Predicted timeline"),
            predicted_kinds=timeline.kinds_in(predicted),
            traced_timeline=timeline.draw_schedule(traced, "Traced timeline"),
            traced_kinds=timeline.kinds_in(traced),
            settings=() if made is None else made.settings,
            same=SAME,
            notes=notes,
        )
    )
    return _FORBIDDEN.sub("\ufffd", text)


def _view_of(made: Composition | RolloutComposition) -> View:
    return rollout_view.view(made) if isinstance(made, RolloutComposition) else composition_view.view(made)


@functools.cache
def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(template_folders()),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=True,
    )
