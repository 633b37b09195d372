"""The run's record: rows that survive a kill, resuming, a learning curve, logging, and what the terminal shows."""

from __future__ import annotations

import io
import logging
import math
import os
import pty
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest
from rich.console import Console

from pearl.errors import ConfigurationError
from pearl.runtime.learning_curve import draw_learning_curve, plot_learning_curve
from pearl.runtime.progress import ProgressDisplay, stage
from pearl.runtime.run_log import RunLog, configure_logging


def record(directory: Path, steps: range, **options: object) -> None:
    with RunLog(directory, **options) as log:  # type: ignore[arg-type]
        for step in steps:
            log.episode(step, log.wall_s, actor=step % 2, ret=float(step), length=step)
        log.scalars(steps[-1], {"eps": 12.5, "loss": 0.25})


def events(directory: Path, tag: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(directory / "tensorboard"))
    accumulator.Reload()
    return [(event.step, event.value) for event in accumulator.Scalars(tag)]


# --- CSV and TensorBoard --------------------------------------------------------------------------------------------


def test_episodes_and_scalars_are_in_the_csv_files_and_in_tensorboard(tmp_path: Path) -> None:
    record(tmp_path, range(1, 6))
    episodes = pd.read_csv(tmp_path / "episodes.csv")
    assert list(episodes.columns) == ["env_steps", "wall_s", "actor", "return", "length", "episodes"]
    assert episodes["return"].tolist() == [1, 2, 3, 4, 5]
    assert episodes[["env_steps", "actor", "length", "episodes"]].to_numpy().tolist() == [
        [step, step % 2, step, 1] for step in range(1, 6)
    ]
    rows = pd.read_csv(tmp_path / "progress.csv")
    assert list(rows.columns)[:4] == ["wall_s", "env_steps", "gradient_steps", "episodes"]
    assert rows[["env_steps", "eps", "loss"]].to_numpy().tolist() == [[5, 12.5, 0.25]]
    assert rows["gps"].isna().all()
    assert events(tmp_path, "run/loss") == [(5, 0.25)]
    assert events(tmp_path, "episode/return") == events(tmp_path, "episode/length") == [(5, 3.0)]


def test_a_new_scalar_becomes_a_column(tmp_path: Path) -> None:
    with RunLog(tmp_path) as log:
        log.scalars(1, {"eps": 1.0, "wall_s": 7.0})
        log.scalars(2, {"td/error, mean": 0.5, "loss": math.nan})
        log.scalars(3, {"eps": 3.0})
    rows = pd.read_csv(tmp_path / "progress.csv")
    assert rows["td/error, mean"].tolist()[1] == 0.5
    assert rows["eps"].tolist()[::2] == [1.0, 3.0]
    assert rows["wall_s"].tolist()[0] == 7.0
    assert events(tmp_path, "td/error, mean") == [(2, 0.5)]
    for absent in ("run/loss", "run/wall_s"):  # not a number, and the time that TensorBoard knows anyway
        with pytest.raises(KeyError):
            events(tmp_path, absent)


def test_evaluations_are_recorded(tmp_path: Path) -> None:
    with RunLog(tmp_path) as log:
        log.evaluation(100, 1.5, "progress", 100, [1.0, 3.0])
        log.evaluation(200, 2.5, "best", 100, [2.5])
        log.evaluation(300, 3.5, "last and best", 300, [4.0])
        with pytest.raises(ConfigurationError, match="at least one episode"):
            log.evaluation(400, 4.5, "last", 400, [])
    rows = pd.read_csv(tmp_path / "evaluations.csv")
    assert list(rows.columns) == [
        "env_steps", "wall_s", "kind", "weights_step", "mean_return", "std_return", "episodes"
    ]  # fmt: skip
    assert rows.to_numpy().tolist() == [
        [100, 1.5, "progress", 100, 2.0, 1.0, 2],
        [200, 2.5, "best", 100, 2.5, 0.0, 1],
        [300, 3.5, "last and best", 300, 4.0, 0.0, 1],
    ]
    assert events(tmp_path, "evaluation/progress") == [(100, 2.0)]
    assert events(tmp_path, "evaluation/best") == [(100, 2.5), (300, 4.0)]
    assert events(tmp_path, "evaluation/last") == [(300, 4.0)]


def test_a_killed_run_keeps_its_rows(tmp_path: Path) -> None:
    script = """
        import os, signal, sys
        from pathlib import Path
        from pearl.runtime.run_log import RunLog
        log = RunLog(Path(sys.argv[1]))
        for step in range(1, 101):
            log.episode(step, 0.1, 0, 1.0, 1)
        log.scalars(100, {"eps": 1.0})
        os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script), str(tmp_path)], timeout=120)
    assert done.returncode == -signal.SIGKILL
    assert len(pd.read_csv(tmp_path / "episodes.csv")) == 100
    assert len(pd.read_csv(tmp_path / "progress.csv")) == 1


def test_a_resumed_run_appends_and_time_goes_on(tmp_path: Path) -> None:
    with RunLog(tmp_path) as log:
        log.episode(1, 500.0, 0, 1.0, 1)
        log.scalars(1, {"odd": 1.0})
    with RunLog(tmp_path, resume=True) as log:
        assert 500.0 <= log.wall_s < 510.0
        log.episode(2, log.wall_s, 0, 2.0, 1)
        log.scalars(2, {"odd": 2.0})
    assert pd.read_csv(tmp_path / "episodes.csv")["return"].tolist() == [1.0, 2.0]
    assert pd.read_csv(tmp_path / "progress.csv")["odd"].tolist() == [1.0, 2.0]


def test_what_was_written_after_the_checkpoint_is_taken_out(tmp_path: Path) -> None:
    record(tmp_path, range(1, 11))
    record(tmp_path, range(6, 9), resume=True, resume_step=5)
    assert pd.read_csv(tmp_path / "episodes.csv")["env_steps"].tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert events(tmp_path, "run/eps") == [(8, 12.5)]


def test_what_was_written_after_the_checkpoint_at_its_very_step_is_taken_out(tmp_path: Path) -> None:
    with RunLog(tmp_path) as log:
        for wall_s, gradient_steps in ((10.0, 5), (11.0, 6), (12.0, 7)):  # the checkpoint is of the second
            log.scalars(100, {"wall_s": wall_s, "gradient_steps": gradient_steps})
            log.episode(100, wall_s, 0, 1.0, 10)
    with RunLog(tmp_path, resume=True, resume_step=100, resume_wall_s=11.0004) as log:
        assert log.wall_s < 12
        log.scalars(100, {"wall_s": 11.5, "gradient_steps": 6})
    assert pd.read_csv(tmp_path / "progress.csv")["gradient_steps"].tolist() == [5, 6, 6]
    assert len(pd.read_csv(tmp_path / "episodes.csv")) == 2


def test_a_line_cut_by_a_kill_is_dropped(tmp_path: Path) -> None:
    record(tmp_path, range(1, 4))
    path = tmp_path / "episodes.csv"
    path.write_text(path.read_text() + "4,0.1")
    record(tmp_path, range(5, 6), resume=True)
    assert pd.read_csv(path)["env_steps"].tolist() == [1, 2, 3, 5]


def test_a_table_of_another_kind_is_not_resumed(tmp_path: Path) -> None:
    (tmp_path / "episodes.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ConfigurationError, match=r"episodes\.csv cannot be resumed: .* lacks .*'env_steps'"):
        RunLog(tmp_path, resume=True)


def test_a_table_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "progress.csv").mkdir()
    with pytest.raises(ConfigurationError, match=r"progress.csv cannot be resumed: .*Is a directory.*Move it away"):
        RunLog(tmp_path, resume=True)


def test_evaluations_after_the_checkpoint_are_taken_out_too(tmp_path: Path) -> None:
    with RunLog(tmp_path) as log:
        for step in (5, 10):
            log.evaluation(step, float(step), "progress", step, [1.0])
    RunLog(tmp_path, resume=True, resume_step=5).close()
    assert pd.read_csv(tmp_path / "evaluations.csv")["env_steps"].tolist() == [5]


def test_a_row_without_numbers_is_named(tmp_path: Path) -> None:
    record(tmp_path, range(1, 4))
    with (tmp_path / "episodes.csv").open("a") as stream:
        stream.write("seven,0.1,0,1.0,1\n")
    with pytest.raises(ConfigurationError, match=r"episodes\.csv cannot be resumed: a row .*'seven'"):
        RunLog(tmp_path, resume=True, resume_step=5)


def test_a_fresh_run_moves_the_earlier_record_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "notes.txt").write_text("the user's own")
    for number in range(1, 4):
        record(tmp_path, range(number, number + 1))
    assert pd.read_csv(tmp_path / "episodes.csv")["env_steps"].tolist() == [3]
    assert pd.read_csv(tmp_path / "earlier-002" / "episodes.csv")["env_steps"].tolist() == [2]
    assert (tmp_path / "earlier-001" / "tensorboard").is_dir()
    assert (tmp_path / "notes.txt").exists()
    assert "earlier-001" in caplog.text


def test_closing_twice_does_no_harm(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    log.close()
    log.close()


# --- Learning curve -------------------------------------------------------------------------------------------------


def png_size(path: Path) -> tuple[int, int]:
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    return int.from_bytes(content[16:20], "big"), int.from_bytes(content[20:24], "big")


@pytest.mark.parametrize("count", [1, 2, 30, 30_000])
def test_the_learning_curve_is_drawn_for_any_number_of_episodes(tmp_path: Path, count: int) -> None:
    with RunLog(tmp_path) as log:
        for i in range(count):
            log.episode(i * 10, i * 0.5, 0, math.sin(i / 1000), 10)
        log.evaluation(5, 1.0, "progress", 5, [1.0])
    path = plot_learning_curve(tmp_path, "DQN on CartPole-v1")
    assert path == tmp_path / "learning_curve.png"
    assert png_size(path)[0] >= 1000


def test_the_learning_curve_marks_the_kinds_of_evaluations_apart_where_their_weights_were(tmp_path: Path) -> None:
    with RunLog(tmp_path) as log:
        log.episode(50, 5.0, 0, 1.0, 10)
        for step, mean in ((100, 3.0), (200, 9.0), (300, 2.0)):
            log.evaluation(step, step / 10, "progress", step, [mean])
        log.evaluation(300, 31.0, "last", 300, [1.0])
        log.evaluation(300, 32.0, "best", 200, [8.0])
        # Resumed and trained on: what was the last then is no longer.
        log.evaluation(400, 41.0, "last", 400, [0.5])
        log.evaluation(400, 42.0, "best", 200, [8.5])
    figure = draw_learning_curve(tmp_path)
    by_steps, by_time = figure.axes
    marked = {line.get_label(): line.get_xydata().tolist() for line in by_steps.lines}  # type: ignore[union-attr]
    assert marked["greedy evaluation"] == [[100, 3.0], [200, 9.0], [300, 2.0]]
    assert marked["last weights, new episodes"] == [[400, 0.5]]
    assert marked["best weights, new episodes"] == [[200, 8.5]]
    (legend,) = figure.legends
    assert {text.get_text() for text in legend.get_texts()} >= set(marked)
    times = {line.get_label(): line.get_xydata().tolist() for line in by_time.lines}  # type: ignore[union-attr]
    assert times["best weights, new episodes"] == [[20.0, 8.5]]
    assert times["last weights, new episodes"] == [[41.0, 0.5]]


def test_the_learning_curve_of_a_running_run_leaves_out_the_line_being_written(tmp_path: Path) -> None:
    record(tmp_path, range(1, 4))
    with (tmp_path / "episodes.csv").open("a") as stream:
        stream.write("4,0.1,0,1")
    png_size(plot_learning_curve(tmp_path))


def test_a_run_without_episodes_has_no_curve(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no finished episode"):
        plot_learning_curve(tmp_path)
    RunLog(tmp_path).close()
    with pytest.raises(ConfigurationError, match="no finished episode"):
        plot_learning_curve(tmp_path)
    (tmp_path / "episodes.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ConfigurationError, match="not a table with the columns"):
        plot_learning_curve(tmp_path)


def test_drawing_leaves_the_users_matplotlib_alone(tmp_path: Path) -> None:
    record(tmp_path, range(1, 4))
    script = """
        import sys
        from pathlib import Path
        import pearl.runtime.progress
        from pearl.runtime.learning_curve import plot_learning_curve
        assert not {"torch", "matplotlib", "pandas", "tensorboard", "rich"} & set(sys.modules)
        plot_learning_curve(Path(sys.argv[1]))
        assert "matplotlib.pyplot" not in sys.modules
        assert "torch" not in sys.modules
    """
    environment = {k: v for k, v in os.environ.items() if k != "DISPLAY"} | {"MPLBACKEND": "tkagg"}
    command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)]
    subprocess.run(command, check=True, timeout=120, env=environment)


# --- Logging --------------------------------------------------------------------------------------------------------


@pytest.fixture
def pearl_logger() -> Iterator[logging.Logger]:
    logger = logging.getLogger("pearl")
    handlers, level = list(logger.handlers), logger.level
    yield logger
    for handler in [h for h in logger.handlers if h not in handlers]:
        logger.removeHandler(handler)
        handler.close()
    logger.setLevel(level)


def test_warnings_reach_stderr_and_everything_the_file(
    tmp_path: Path, pearl_logger: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        configure_logging(tmp_path)
    pearl_logger.getChild("host").debug("a [bold]detail[/bold]")
    pearl_logger.getChild("host").warning("a long [bold]warning[/bold]" + "." * 200)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == f"warning: a long [bold]warning[/bold]{'.' * 200}\n"
    lines = (tmp_path / "run.log").read_text().splitlines()
    assert len(lines) == 2
    assert lines[0].endswith("DEBUG   pearl.host: a [bold]detail[/bold]")


# --- Progress display -----------------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(f"{ProgressDisplay.__module__}.time.monotonic", lambda: now[0])
    return now


def show(display: ProgressDisplay, steps: int, **changes: object) -> None:
    values = {"mean_return": 12.0, "eps": 64e3, "gps": 1e3, "replay_ratio": 8.0, "episodes": 1234, **changes}
    display.update(steps=steps, **values)  # type: ignore[arg-type]


def test_without_a_terminal_plain_lines_come_every_few_seconds(clock: list[float]) -> None:
    stream = io.StringIO()
    with ProgressDisplay(1000, Console(file=stream, width=40)) as display:
        for step in range(0, 1001, 10):
            show(display, step, note="warm-up" if step == 0 else "")
            clock[0] += 0.125
        display.say("[red]saved[/red] " + "x" * 60)
    lines = stream.getvalue().splitlines()
    assert lines[0] == (
        "0/1,000 steps 0%  0:00:00 elapsed, -:--:-- left  return 12  episodes 1,234  EPS 64,000  GPS 1,000  "
        "env steps/s 0  replay ratio 8  warm-up"
    )
    assert lines[1].startswith("400/1,000 steps 40%  0:00:05 elapsed, 0:00:08 left")
    assert lines[-2] == "[red]saved[/red] " + "x" * 60
    assert lines[-1].startswith("1,000/1,000 steps 100%")
    assert len(lines) == 5
    assert "\x1b" not in stream.getvalue()


def test_a_resumed_run_estimates_from_its_own_speed(clock: list[float]) -> None:
    stream = io.StringIO()
    with ProgressDisplay(1000, Console(file=stream), initial_steps=900, plain_interval_s=1.0) as display:
        clock[0] += 10
        show(display, 950, mean_return=math.nan)
    assert "950/1,000 steps 95%  0:00:10 elapsed, 0:00:10 left  return -" in stream.getvalue()


def test_a_run_resumed_for_fewer_steps_than_it_had_done_is_done(clock: list[float]) -> None:
    stream = io.StringIO()
    with ProgressDisplay(1000, Console(file=stream), initial_steps=2000) as display:
        show(display, 2000)
    assert "2,000/1,000 steps 100%  0:00:00 elapsed, 0:00:00 left" in stream.getvalue()


def test_a_run_without_progress_or_without_length_is_shown(clock: list[float]) -> None:
    stream = io.StringIO()
    with ProgressDisplay(0, Console(file=stream)) as display:
        show(display, 0, mean_return=None, replay_ratio=math.inf)
    assert "return -" in stream.getvalue()
    assert "replay ratio inf" in stream.getvalue()


def test_on_a_terminal_the_bar_is_redrawn_at_most_four_times_a_second(clock: list[float]) -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=100, _environ={"TERM": "xterm-256color"})
    with ProgressDisplay(1000, console) as display:
        for step in range(1001):
            show(display, step)
            clock[0] += 0.001
        drawn = stream.getvalue().count("elapsed")
        display.say("a line above")
    assert 1 <= drawn <= 6
    assert "a line above" in stream.getvalue()
    assert "1,000/1,000" in stream.getvalue()


def on_a_terminal(script: str, *arguments: str) -> str:
    """What the script sends to a terminal that is its stdout and stderr."""
    master, terminal = pty.openpty()
    environment = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR")}
    command = [sys.executable, "-c", textwrap.dedent(script), *arguments]
    environment |= {"TERM": "xterm-256color", "COLUMNS": "100", "LINES": "30"}
    with subprocess.Popen(command, stdout=terminal, stderr=terminal, env=environment) as child:
        os.close(terminal)
        received = b""
        while True:
            try:
                chunk = os.read(master, 4096)
            except OSError:  # the terminal is closed
                break
            if not chunk:
                break
            received += chunk
    os.close(master)
    assert child.returncode == 0, received.decode()
    return received.decode()


def test_warnings_appear_above_the_bar_and_the_cursor_comes_back(tmp_path: Path) -> None:
    script = """
        import logging, sys
        from pathlib import Path
        from pearl.runtime.progress import ProgressDisplay
        from pearl.runtime.run_log import configure_logging
        configure_logging(Path(sys.argv[1]))
        with ProgressDisplay(10) as display:
            for step in range(11):
                display.update(steps=step, mean_return=1.0, eps=1, gps=1, replay_ratio=1, episodes=step)
                if step == 5:
                    logging.getLogger("pearl").warning("an actor was restarted")
    """
    text = on_a_terminal(script, str(tmp_path))
    warning = text.index("an actor was restarted")
    assert text.rindex("\x1b[2K", 0, warning) > 0  # the bar was wiped before the warning ...
    assert text.index("elapsed", warning) > warning  # ... and drawn again after it
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")
    assert text.count("an actor was restarted") == 1


def test_a_stage_says_what_it_does_and_how_it_ended() -> None:
    stream = io.StringIO()
    with stage(Console(file=stream), "Profiling the Learner on cpu") as shown:
        shown.advance("batch 64")
    with pytest.raises(ZeroDivisionError), stage(Console(file=stream), "Profiling the Learner on gpu"):
        raise ZeroDivisionError
    assert re.sub(r"\d+\.\d s", "0.1 s", stream.getvalue()).splitlines() == [
        "Profiling the Learner on cpu",
        "Profiling the Learner on cpu: batch 64",
        "Profiling the Learner on cpu: done in 0.1 s",
        "Profiling the Learner on gpu",
        "Profiling the Learner on gpu: failed after 0.1 s",
    ]


def test_a_stage_on_a_terminal_spins_and_leaves_one_line() -> None:
    script = """
        from pearl.runtime.progress import stage
        with stage(None, "Profiling the Replay Manager on cpu") as shown:
            shown.advance("batch 32")
            shown.advance("batch 64")
    """
    text = on_a_terminal(script)
    assert "batch 64" in text
    assert re.search(r"Profiling the Replay Manager on cpu: done in \d+\.\d s$", text.rstrip())
    assert "\x1b[?25h" in text


def test_a_pipe_gets_no_control_codes_even_where_colour_is_forced() -> None:
    script = """
        from pearl.runtime.progress import ProgressDisplay, stage
        with stage(None, "Profiling"), ProgressDisplay(10) as display:
            display.update(steps=10, mean_return=1.0, eps=1, gps=1, replay_ratio=1, episodes=1)
    """
    environment = {**os.environ, "FORCE_COLOR": "1", "TERM": "xterm-256color"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, check=True, env=environment, timeout=60
    )
    assert b"\x1b" not in done.stdout
    assert b"10/10 steps 100%" in done.stdout


def test_an_update_that_is_not_shown_costs_microseconds() -> None:
    with ProgressDisplay(10**9, Console(file=io.StringIO())) as display:
        show(display, 0)
        began = time.perf_counter()
        for step in range(10_000):
            show(display, step)
        assert (time.perf_counter() - began) / 10_000 < 50e-6
