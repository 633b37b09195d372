"""What a person sees while a run works: a progress bar on a terminal, plain lines anywhere else."""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live

    from pearl.runtime.telemetry import Activity

_REFRESH_S, _SLOWEST_REFRESH_S = 0.25, 2.0
_DRAWING_SHARE = 0.005  # of the host's time
_RATE_WINDOW_S = 30.0


class _Shown(NamedTuple):
    steps: int
    mean_return: float | None
    eps: float
    gps: float
    replay_ratio: float
    episodes: int
    note: str
    activity: Callable[[], Activity] | None = None
    eps_per_watt: float | None = None


class ProgressDisplay:
    """Steps, speeds and returns of a training run; a context manager, used from one thread.

    On a terminal, lines stay at the bottom and are redrawn at most four times a second. They are redrawn less often,
    down to every two seconds, where drawing would take more than half a percent of the time. Elsewhere, or if `plain`,
    one plain line every `plain_interval_s` seconds, without control codes. A resumed run gives the steps it starts at
    as `initial_steps`, so that the time left is estimated from the steps done now. Nothing is drawn between calls: no
    thread competes with the host loop.
    """

    def __init__(
        self,
        total_steps: int,
        console: Console | None = None,
        *,
        initial_steps: int = 0,
        plain_interval_s: float = 5.0,
        plain: bool = False,
    ) -> None:
        self._total = total_steps
        if console is None and not plain and sys.stdout.isatty():
            console = _stdout_console()
        self._console = console
        self._redraws = not plain and console is not None and _can_redraw(console)
        self._interval_s = _REFRESH_S if self._redraws else plain_interval_s
        self._latest = _Shown(initial_steps, None, 0.0, 0.0, 0.0, 0, "")
        self._live: Live | None = None
        self._start_clock()

    def _start_clock(self) -> None:
        self._started = time.monotonic()
        self._shown_at = -math.inf
        self._history = deque([(self._started, self._latest.steps)])

    def __enter__(self) -> ProgressDisplay:
        self._start_clock()
        if self._redraws:
            from rich.live import Live

            self._live = Live(self._bar(self._started), console=self._console, auto_refresh=False)
            self._live.start(refresh=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._latest = self._latest._replace(activity=None)  # nothing runs any more
        self._show(time.monotonic())
        if self._live is not None:
            self._live.stop()
            self._live = None

    def update(
        self,
        *,
        steps: int,
        mean_return: float | None,
        eps: float,
        gps: float,
        replay_ratio: float,
        episodes: int,
        note: str = "",
        activity: Callable[[], Activity] | None = None,
        eps_per_watt: float | None = None,
    ) -> None:
        """Show the state of the run, unless it was shown a moment ago: cheap enough for every iteration.

        `steps` counts environment steps; `eps` and `gps` are trained experiences and gradient steps per second. An
        unknown `mean_return` (None or NaN) shows as a dash, an unknown `eps_per_watt` not at all. `activity` is asked
        when a terminal is redrawn.
        """
        self._latest = _Shown(steps, mean_return, eps, gps, replay_ratio, episodes, note, activity, eps_per_watt)
        now = time.monotonic()
        if now - self._shown_at >= self._interval_s:
            self._show(now)

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        _print_line(self._console, text)

    def _show(self, now: float) -> None:
        self._shown_at = now
        self._history.append((now, self._latest.steps))
        while len(self._history) > 2 and now - self._history[0][0] > _RATE_WINDOW_S:
            self._history.popleft()
        if self._live is not None:
            began = time.thread_time()
            self._live.update(self._bar(now), refresh=True)
            wanted_s = (time.thread_time() - began) / _DRAWING_SHARE
            self._interval_s = min(max(wanted_s, _REFRESH_S), _SLOWEST_REFRESH_S)
        else:
            _print_line(self._console, f"{self._steps_text()}  {self._clock_text(now)}  {self._stats_text(now)}")

    def _bar(self, now: float) -> RenderableType:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        row = Table.grid(padding=(0, 2, 0, 0), expand=True)
        row.add_column(ratio=1)
        row.add_column(no_wrap=True)
        row.add_column(no_wrap=True)
        bar = ProgressBar(total=max(1, self._total), completed=min(self._latest.steps, self._total))
        row.add_row(bar, Text(self._steps_text(), "bold"), Text(self._clock_text(now), "cyan"))
        lines: list[RenderableType] = [row, Text(self._stats_text(now), "dim", no_wrap=True, overflow="ellipsis")]
        if self._latest.activity is not None and self._console is not None:
            from pearl.runtime.dashboard import dashboard, fits

            if fits(activity := self._latest.activity(), self._console):
                lines.append(dashboard(activity, self._console))
        return Group(*lines)

    def _steps_text(self) -> str:
        # Whole percents round down: 100 % means done. A run may be resumed for fewer steps than it had done.
        percent = min(100, 100 * self._latest.steps // max(1, self._total))
        return f"{self._latest.steps:,}/{self._total:,} steps {percent}%"

    def _clock_text(self, now: float) -> str:
        steps, left = self._latest.steps, math.inf
        if steps >= self._total:
            left = 0.0
        elif (speed := self._speed(now)) > 0:
            left = (self._total - steps) / speed
        return f"{_duration(now - self._started)} elapsed, {_duration(left)} left"

    def _speed(self, now: float) -> float:
        """Environment steps per second, lately."""
        since, before = self._history[0]
        return (self._latest.steps - before) / (now - since) if now > since else 0.0

    def _stats_text(self, now: float) -> str:
        shown = self._latest
        unknown = shown.mean_return is None or math.isnan(shown.mean_return)
        parts = [
            "return -" if unknown else f"return {shown.mean_return:.4g}",
            f"episodes {shown.episodes:,}",
            f"EPS {shown.eps:,.0f}",
            *([] if shown.eps_per_watt is None else [f"EPS/W {shown.eps_per_watt:,.1f}"]),
            f"GPS {shown.gps:,.0f}",
            f"env steps/s {self._speed(now):,.0f}",
            f"replay ratio {shown.replay_ratio:.3g}",
        ]
        return "  ".join(parts + [shown.note] * bool(shown.note))


class Stage:
    """One long stage of work whose parts are announced as they begin."""

    def __init__(self, console: Console, title: str) -> None:
        self._console = console
        self._title = title
        self._live: Live | None = None
        self._started = time.monotonic()

    def advance(self, part: str) -> None:
        """Say which part of the stage begins now."""
        if self._live is not None:
            self._live.update(self._spinner(part), refresh=True)
        else:
            _print_line(self._console, f"{self._title}: {part}")

    def _spinner(self, part: str) -> RenderableType:
        from rich.spinner import Spinner
        from rich.text import Text

        text = Text.assemble((self._title, "bold"), ("  " + part if part else "", "dim"))
        if self._live is None:
            self._drawn = Spinner("dots", text)
        else:
            self._drawn.update(text=text)
        return self._drawn

    def _begin(self) -> None:
        if _can_redraw(self._console):
            from rich.live import Live

            # The spinner turns when a part begins, not by a thread: a thread would show in the latencies profiled.
            live = Live(self._spinner(""), console=self._console, auto_refresh=False, transient=True)
            live.start(refresh=True)
            self._live = live
        else:
            _print_line(self._console, self._title)

    def _end(self, outcome: str) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
        _print_line(self._console, f"{self._title}: {outcome} {time.monotonic() - self._started:.1f} s")


@contextmanager
def stage(console: Console | None, title: str) -> Iterator[Stage]:
    """Show `title` while the block works, the parts it announces, and how long it took or after how long it failed."""
    shown = Stage(console or _stdout_console(), title)
    shown._begin()
    try:
        yield shown
    except BaseException:
        shown._end("failed after")
        raise
    shown._end("done in")


def _stdout_console() -> Console:
    """A console that never takes a file or a pipe for a terminal, whatever FORCE_COLOR says."""
    from rich.console import Console

    return Console(force_terminal=None if sys.stdout.isatty() else False)


def _can_redraw(console: Console) -> bool:
    return console.is_terminal and not console.is_dumb_terminal


def _print_line(console: Console | None, text: str) -> None:
    if console is None:  # plain lines do not need rich, which takes a while to import
        print(text, flush=True)
        return
    console.print(text, markup=False, highlight=False, soft_wrap=True)
    console.file.flush()


def _duration(seconds: float) -> str:
    if not math.isfinite(seconds):
        return "-:--:--"
    minutes, whole = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{whole:02}"
