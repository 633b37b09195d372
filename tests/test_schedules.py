"""Schedules of alpha and beta."""

from __future__ import annotations

import numpy as np
import pytest

from pearl.backends.cpu.replay import NativeReplayManager
from pearl.errors import ConfigurationError, ReplayError
from pearl.replay.reference import ReferenceReplayManager
from pearl.replay.schedules import Constant, Linear, ScheduledExponents


def test_a_line_ends_where_it_is_said_to():
    line = Linear(0.4, 1.0, 1000)
    assert [line(step) for step in (-5, 0, 500, 1000, 10**9)] == pytest.approx([0.4, 0.4, 0.7, 1.0, 1.0])
    assert Linear(0.9, 0.1, 4)(1) == pytest.approx(0.7)
    assert line(1000) == 1.0
    assert Constant(0.5)(7) == 0.5
    with pytest.raises(ConfigurationError, match="at least 1 step; found 0"):
        Linear(0.0, 1.0, 0)


def test_exponents_follow_the_steps():
    replay = NativeReplayManager(8, alpha=1.0)
    replay.insert(np.arange(8), np.full(8, 4.0))
    exponents = ScheduledExponents(replay, alpha=Linear(1.0, 0.0, 100), beta=lambda step: step / 20, alpha_interval=50)
    assert exponents(7) == 0.35
    assert replay.alpha == 1.0
    assert exponents(0) == 0.0
    exponents(49 + 1)
    assert replay.alpha == 0.5
    assert replay.state_dict()["leaves"][0] == 2 * 2**20
    exponents(20)  # a run that goes back goes on as it did then
    assert replay.alpha == 1.0


def test_alpha_is_set_only_where_it_changes(monkeypatch):
    """Each time, all slots are requantised."""
    replay, given = ReferenceReplayManager(8, alpha=0.5), []
    monkeypatch.setattr(replay, "set_alpha", lambda alpha: given.append(alpha))
    exponents = ScheduledExponents(replay, alpha=lambda step: 0.5 + (step >= 4), alpha_interval=2)
    for step in range(5):
        exponents(step)
    assert given == [1.5]


def test_numbers_serve_as_schedules_and_alpha_may_be_left_alone():
    replay = NativeReplayManager(8, alpha=0.3)
    exponents = ScheduledExponents(replay, beta=0.5)
    assert exponents(12345) == 0.5
    assert replay.alpha == 0.3
    ScheduledExponents(replay, alpha=0.8)(0)
    assert replay.alpha == 0.8


def test_exponents_out_of_range_are_refused():
    replay = NativeReplayManager(8)
    with pytest.raises(ReplayError, match=r"beta must lie in \[0, 4\]; found 5"):
        ScheduledExponents(replay, beta=lambda step: 5)(0)
    with pytest.raises(ReplayError, match=r"alpha must lie in \[0, 4\]"):
        ScheduledExponents(replay, alpha=-1.0)(0)
    with pytest.raises(ConfigurationError, match="alpha_interval must be at least 1"):
        ScheduledExponents(replay, alpha_interval=0)
