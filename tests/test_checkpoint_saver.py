"""Checkpoints where saving fails for a while, or for good."""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from pathlib import Path

import pytest

from pearl.errors import CheckpointError, CheckpointWriteError
from pearl.runtime.checkpoint import CheckpointState, save_checkpoint
from pearl.runtime.checkpoint_saver import FIRST_PAUSE_S, LAST_PAUSES_S, LONGEST_PAUSE_S, CheckpointSaver


def save(directory: Path) -> Path:
    return save_checkpoint(directory, CheckpointState(2))


class Clock:
    """Time that only sleeping takes."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock.monotonic)
    monkeypatch.setattr(time, "sleep", clock.sleep)
    return clock


def test_a_lock_that_is_held_for_a_moment_costs_a_warning(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    saver = CheckpointSaver(tmp_path, save)
    holder = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(holder, fcntl.LOCK_EX)
    try:
        for pause in (FIRST_PAUSE_S, 2 * FIRST_PAUSE_S):
            assert saver.save() is None
            assert f"It is tried again in {pause:.0f} s; training goes on" in caplog.messages[-1]
            assert not saver.is_due(scheduled=True), "the pause counts, however often checkpoints are due"
            clock.now += pause
            assert saver.is_due(scheduled=False)
    finally:
        os.close(holder)
    path = saver.save()
    assert path is not None
    assert f"could be written again: {path}" in caplog.messages[-1]
    assert saver.is_due(scheduled=True)
    assert not saver.is_due(scheduled=False)


def test_a_run_outlives_a_disk_that_is_full_for_days(tmp_path: Path, clock: Clock) -> None:
    def full(directory: Path) -> Path:
        raise CheckpointWriteError("The disk is full.")

    saver = CheckpointSaver(tmp_path, full)
    for _ in range(1_100):
        begin = clock.now
        assert saver.save() is None
        while not saver.is_due(scheduled=False):
            clock.now += 1.0
        assert clock.now - begin <= LONGEST_PAUSE_S
    assert clock.now - begin == LONGEST_PAUSE_S


def test_the_end_is_worth_some_tries(tmp_path: Path, clock: Clock) -> None:
    tries: list[int] = []

    def third(directory: Path) -> Path:
        tries.append(1)
        if len(tries) < 3:
            raise CheckpointWriteError("The disk is full.")
        return save(directory)

    assert CheckpointSaver(tmp_path, third).save_last().parent == tmp_path
    assert clock.slept == list(LAST_PAUSES_S[:2])


@pytest.mark.parametrize("elsewhere", [True, False])
def test_a_disk_that_stays_full_loses_nothing_that_could_be_kept(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, elsewhere: bool
) -> None:
    good = save_checkpoint(tmp_path, CheckpointState(1))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def full(directory: Path) -> Path:
        if directory == tmp_path or not elsewhere:
            raise CheckpointWriteError("The disk is full.")
        return save(directory)

    with pytest.raises(CheckpointError) as error:
        CheckpointSaver(tmp_path, full).save_last()
    assert len(clock.slept) == len(LAST_PAUSES_S)
    message = str(error.value)
    assert message.startswith("The disk is full.")
    if elsewhere:
        (kept,) = tmp_path.glob("pearl-checkpoint-*/checkpoint-000000002")
        assert f"was written to {kept} instead" in message
    else:
        assert f"The last good checkpoint is {good}." in message
        assert not list(tmp_path.glob("pearl-checkpoint-*")), "no empty folder stays"


def test_a_run_that_was_told_to_stop_does_not_wait_long_for_the_disk(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def full(directory: Path) -> Path:
        raise CheckpointWriteError("The disk is full.")

    with pytest.raises(CheckpointError, match="There is no earlier checkpoint"):
        CheckpointSaver(tmp_path, full).save_last(hurried=True)
    assert sum(clock.slept) <= 3
