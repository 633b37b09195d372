"""Logs where the disk is full, where the run folder goes, and of very long runs."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from pearl.runtime.csv_table import CsvTable
from pearl.runtime.learning_curve import moving_mean, plot_learning_curve, read_episodes
from pearl.runtime.run_log import (
    EPISODE_COLUMNS,
    RunLog,
    configure_logging,
    merged_episodes,
    run_file_handler,
)

# --- logs that cannot be written ------------------------------------------------------------------------------------


def test_a_full_disk_is_one_warning_per_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("progress.csv", "run.log"):
        (tmp_path / name).symlink_to("/dev/full")
    (tmp_path / "tensorboard").write_text("no folder")
    configure_logging(tmp_path)
    with RunLog(tmp_path, resume=True) as log:
        for step in range(1, 6):
            log.episode(step, float(step), 0, float(step), 1)
            log.scalars(step, {"eps": 1.0})
    named = [message.split()[0].rpartition("/")[2] for message in caplog.messages if "cannot be" in message]
    assert named.count("run.log") == 1
    assert named.count("progress.csv") == 1
    assert sum(name.startswith("events.out") for name in named) == 1
    assert len(named) == 3
    assert pd.read_csv(tmp_path / "episodes.csv")["return"].tolist() == [1, 2, 3, 4, 5]


def test_a_row_that_does_not_fit_leaves_no_part(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write

    def half(descriptor: int, data: memoryview) -> int:
        if len(data) < 10:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data[: len(data) // 2])

    with RunLog(tmp_path) as log:
        log.episode(1, 1.0, 0, 1.0, 1)
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", half)
            log.episode(2, 2.0, 0, 2.0, 1)
            log.episode(3, 3.0, 0, 3.0, 1)
        log.episode(4, 4.0, 0, 4.0, 1)
    assert pd.read_csv(tmp_path / "episodes.csv")["return"].tolist() == [1, 4]
    assert sum("episodes.csv cannot be written: [Errno 28]" in message for message in caplog.messages) == 1
    assert any("2 entries are missing" in message for message in caplog.messages)


def test_a_folder_that_went_is_gone_on_with_once_it_is_there_again(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    configure_logging(folder)
    handler = run_file_handler()
    assert handler is not None
    logger = logging.getLogger("pearl.test")
    with RunLog(folder) as log:
        log.episode(1, 1.0, 0, 1.0, 1)
        logger.info("before")
        folder.rename(tmp_path / "moved")
        log.episode(2, 2.0, 0, 2.0, 1)
        log.reopen()
        log.episode(3, 3.0, 0, 3.0, 1)
        folder.mkdir()
        log.episode(4, 4.0, 0, 4.0, 1)
        handler.reopen()
        logger.info("after")
    assert pd.read_csv(tmp_path / "moved" / "episodes.csv")["return"].tolist() == [1, 2]
    assert pd.read_csv(folder / "episodes.csv")["return"].tolist() == [4]
    assert list((folder / "tensorboard").glob("events.*"))
    assert "after" in (folder / "run.log").read_text()


# --- tables of long runs --------------------------------------------------------------------------------------------


def test_a_long_table_becomes_coarse_at_its_beginning(tmp_path: Path) -> None:
    path = tmp_path / "episodes.csv"
    table = CsvTable(path, EPISODE_COLUMNS, merge=merged_episodes, most_rows=100)
    for i in range(1, 1011):
        table.append({"env_steps": i, "wall_s": i / 10, "actor": 0, "return": i, "length": 3, "episodes": 1})
        assert i % 25 or path.read_text().count("\n") <= 101
    rows = pd.read_csv(path)
    assert rows["episodes"].sum() == 1010
    assert (rows["return"] * rows["episodes"]).sum() == pytest.approx(sum(range(1011)))
    assert rows["episodes"].is_monotonic_decreasing
    assert rows["episodes"].iloc[0] > 10
    assert rows["episodes"].iloc[-1] == 1
    assert rows["env_steps"].is_monotonic_increasing
    assert rows["env_steps"].iloc[-1] == 1010


def test_a_long_table_is_read_in_pieces_for_the_curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("_MOST_BINS", 100), ("_PIECE_ROWS", 300)):
        monkeypatch.setattr(f"pearl.runtime.learning_curve.{name}", value)
    lines = [f"{i},{i / 10},0,{i % 7},5,1" for i in range(5000)]
    (tmp_path / "episodes.csv").write_text("\n".join([",".join(EPISODE_COLUMNS), *lines, ""]))
    found = read_episodes(tmp_path / "episodes.csv")
    assert found is not None
    assert len(found) <= 100
    assert found["episodes"].sum() == 5000
    assert np.average(found["return"], weights=found["episodes"]) == pytest.approx(
        np.mean([i % 7 for i in range(5000)])
    )
    assert found["env_steps"].max() == 4999
    assert plot_learning_curve(tmp_path).read_bytes().startswith(b"\x89PNG")


def test_themoving_mean_is_over_episodes_whatever_a_row_stands_for() -> None:
    ones = moving_mean(np.arange(10.0), np.ones(10), 4)
    assert ones.tolist()[3:] == pd.Series(range(10)).rolling(4).mean().tolist()[3:]
    pairs = moving_mean(np.arange(0.5, 10, 2), np.full(5, 2.0), 4)
    assert pairs.tolist()[1:] == ones.tolist()[3::2]
