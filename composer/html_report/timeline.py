"""The timeline of an iteration over devices and queues: as predicted from its terms, and as a trace recorded it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from markupsafe import Markup

from composer.html_report.svg import WIDTH, drawing, element, fitting, label, markup
from composer.html_report.trace import Span, Trace
from composer.placement import IterationTerms, Placement
from composer.report import short_number

_LANE, _TEXT = 22.0, 15.0  # heights of a lane's row and of the text above it
_SHOWN_BATCHES = 3
_MOST_DELAY = 24  # that is drawn: with more batches under way, the slowest device alone decides
_MOST_LANES = 16
_MOST_SPANS = 1500
_WINDOW = 0.9  # where a trace is shown, as a share: fast threads may have kept their newest events only
_KINDS = ("sampling", "message", "gather", "training", "update", "insertion")
# The Replay Manager's work is short: its kinds differ in height, not by colour alone. Top and height, of a lane's 18.
_HEIGHTS = {"sampling": (0.0, 6.0), "update": (6.0, 6.0), "insertion": (12.0, 6.0)}
_WHOLE = (0.0, 18.0)


@dataclass(frozen=True)
class Work:
    """A piece of work on a lane; `mark` is the short text inside it."""

    lane: str
    name: str
    kind: str
    mark: str
    start_us: float
    end_us: float


@dataclass(frozen=True)
class _Task:
    lane: str
    name: str
    kind: str
    us: float
    after: tuple[tuple[int, str], ...]  # batch and name of each task that ends before
    exclusive: bool = True  # whether the lane does one task at a time


def predicted_schedule(placement: Placement) -> list[Work]:
    """The work of a few batches in the steady state, as the predicted terms imply.

    Each task starts as early as its device, the data and the priority update delay allow. Time that a trial found
    beyond the parts is not drawn.
    """
    terms, delay = placement.terms, min(placement.delay_in_effect, _MOST_DELAY)
    first = delay + 2
    last = first + _SHOWN_BATCHES
    count = last + delay + 2  # the last ones are not drawn, but they keep the devices as busy as ever
    waiting = [(batch, task) for batch in range(count) for task in _tasks(batch, terms, delay, placement)]
    ends: dict[tuple[int, str], float] = {}
    free: dict[str, float] = {}
    done: list[tuple[int, Work]] = []
    while waiting:
        startable = [
            (max([free.get(task.lane, 0.0) if task.exclusive else 0.0, *(ends[key] for key in task.after)]), order)
            for order, (_, task) in enumerate(waiting)
            if all(key in ends for key in task.after)
        ]
        start, order = min(startable)
        batch, task = waiting.pop(order)
        ends[batch, task.name] = end = start + task.us
        if task.exclusive:
            free[task.lane] = end
        done.append((batch, Work(task.lane, f"batch {batch}: {task.name}", task.kind, str(batch), start, end)))
    begin = min(work.start_us for batch, work in done if batch == first and work.kind == "training")
    end = max(work.end_us for batch, work in done if batch == last and work.kind == "training")
    return [work for _, work in done if work.end_us > begin and work.start_us < end and work.end_us > work.start_us]


def _tasks(batch: int, terms: IterationTerms, delay: int, placement: Placement) -> list[_Task]:
    """The tasks of a batch. Each lane gets the work that `IterationTerms.stages` counts for its device."""
    replay, learner = f"Replay Manager on {placement.replay_manager}", f"Learner on {placement.learner}"
    inserting = replay if delay else f"Insertion into {placement.replay_manager}"
    if placement.setting == 2:
        replay = learner = f"Replay Manager and Learner on {placement.learner}"
    host = "Host Runtime"
    messages = "Queues: RRQ, LAQ, LDQ"
    gathering = learner if terms.learner_gathers or not delay else host
    storing = host if delay else inserting
    ready: tuple[tuple[int, str], ...] = ((batch - delay - 1, "updating priorities"),) if batch > delay else ()
    if batch and not delay:
        ready += ((batch - 1, "insertion"),)
    at_replay = terms.replay_transfer_us / 2
    at_learner = max(0.0, terms.sample_transfer_us + terms.priority_transfer_us - terms.replay_transfer_us) / 2
    # Of a message's time a device spends the share of one batch; for the rest, only the batch waits.
    share = terms.messages_us / 2 / (delay + 1)
    waiting = terms.messages_us / 2 - share

    def task(lane: str, name: str, kind: str, us: float, after: str, exclusive: bool = True) -> _Task:
        return _Task(lane, name, kind, us, ((batch, after),) if after else ready, exclusive)

    return [
        task(replay, "sampling", "sampling", terms.sample_us, ""),
        task(replay, "sending the samples", "message", at_replay, "sampling"),
        task(messages, "message to the Learner", "message", waiting, "sending the samples", False),
        task(learner, "taking the samples", "message", at_learner + share, "message to the Learner"),
        task(gathering, "gather", "gather", terms.gather_us, "taking the samples"),
        task(learner, "taking the batch", "message", terms.batch_transfer_us, "gather"),
        task(learner, "training", "training", terms.learner_us, "taking the batch"),
        task(learner, "sending priorities", "message", at_learner + share, "training"),
        task(messages, "message to the RM", "message", waiting, "sending priorities", False),
        task(replay, "taking priorities", "message", at_replay, "message to the RM"),
        task(replay, "updating priorities", "update", terms.update_us, "taking priorities"),
        # Nothing waits for these.
        *(
            task(lane, f"talking, {lane}", "message", 2 * share if delay else 0.0, "sampling")
            for lane in (replay, host)
        ),
        task(storing, "storing transitions", "insertion", terms.store_us, "sampling"),
        task(inserting, "insertion", "insertion", terms.insertion_us, "storing transitions"),
    ]


def draw_schedule(work: Sequence[Work], title: str) -> Markup | None:
    """Lanes over time, in microseconds from the first piece of work; None where there is nothing to draw."""
    if not work:
        return None
    begin, end = min(w.start_us for w in work), max(w.end_us for w in work)
    lanes = list(dict.fromkeys(w.lane for w in work))
    scale = WIDTH / max(end - begin, 1e-12)
    description = "; ".join(
        f"{w.lane}: {w.name} from {short_number(w.start_us - begin)} to {short_number(w.end_us - begin)} µs"
        for w in work[:60]
    )
    bottom = len(lanes) * (_LANE + _TEXT) + 6
    root = drawing(title, description, bottom + 16)
    for row, lane in enumerate(lanes):
        top = row * (_LANE + _TEXT)
        label(root, 0, top + 11, lane, class_="lane")
        element(root, "rect", x=0.0, y=top + _TEXT, width=WIDTH, height=_LANE - 4, class_="rail")
        for piece in (w for w in work if w.lane == lane):
            x = (piece.start_us - begin) * scale
            width = max(0.7, (piece.end_us - piece.start_us) * scale)
            group = element(root, "g", class_=f"work {piece.kind}")
            times = f"{short_number(piece.end_us - piece.start_us)} µs"
            element(group, "title", f"{piece.name}, {times}")
            offset, height = _HEIGHTS.get(piece.kind, _WHOLE)
            element(group, "rect", x=x, y=top + _TEXT + offset, width=width, height=height)
            whole = (offset, height) == _WHOLE and width >= 8
            if whole and (shown := fitting(piece.mark, width - 4, 10)) == piece.mark:
                label(group, x + width / 2, top + _TEXT + 13, shown, class_="mark", anchor="middle")
    element(root, "line", x1=0.0, y1=bottom, x2=WIDTH, y2=bottom, class_="axis")
    label(root, 0, bottom + 13, "0", class_="tick")
    label(root, WIDTH, bottom + 13, f"{short_number(end - begin)} µs", class_="tick", anchor="end")
    return markup(root)


def traced_window(trace: Trace) -> list[Work]:
    """A few iterations near the end of a trace, as work over the traced threads."""
    spans = [span for span in trace.spans if span.duration_us > 0]
    if not spans:
        return []
    steps = [span for span in spans if "train" in span.name.lower()] or _longest(spans)
    lane = steps[0].lane
    steps = [span for span in steps if span.lane == lane]
    first = steps[int(_WINDOW * (len(steps) - 1))]
    # Medians, as a single gap may be long: an evaluation or a checkpoint.
    starts = [span.start_us for span in steps]
    gaps = [after - before for before, after in pairwise(starts) if after > before]
    period = statistics.median(gaps) if gaps else first.duration_us * 2
    begin, end = first.start_us - 0.6 * period, first.start_us + (_SHOWN_BATCHES - 0.4) * period
    inside = [span for span in spans if span.start_us < end and span.start_us + span.duration_us > begin]
    lanes = list(dict.fromkeys(span.lane for span in inside))[:_MOST_LANES]
    return [
        Work(
            span.lane,
            span.name,
            _kind(span.name),
            span.name,
            max(begin, span.start_us),
            min(end, span.start_us + span.duration_us),
        )
        for span in inside[:_MOST_SPANS]
        if span.lane in lanes
    ]


def _longest(spans: Iterable[Span]) -> list[Span]:
    """The spans of the name that takes the most time in all."""
    totals: dict[str, float] = {}
    found = list(spans)
    for span in found:
        totals[span.name] = totals.get(span.name, 0.0) + span.duration_us
    name = max(totals, key=lambda key: totals[key] if math.isfinite(totals[key]) else 0.0)
    return [span for span in found if span.name == name]


def _kind(name: str) -> str:
    """The kind of work that a name means, which gives its colour; `other` where it says none."""
    words = {
        "sampl": "sampling",
        "gather": "gather",
        "train": "training",
        "learn": "training",
        "updat": "update",
        "insert": "insertion",
        "commun": "message",
        "messag": "message",
    }
    return next((kind for word, kind in words.items() if word in name.lower()), "other")


def kinds_in(work: Iterable[Work]) -> list[tuple[str, float, float]]:
    """The kinds of work that are drawn, in the order of an iteration, each with its top and height in a lane."""
    found = {piece.kind for piece in work}
    return [(kind, *_HEIGHTS.get(kind, _WHOLE)) for kind in (*_KINDS, "other") if kind in found]
