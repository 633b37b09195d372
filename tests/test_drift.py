"""Whether iterations drift from the prediction: when it is said, and which term is named."""

from __future__ import annotations

import pytest

from pearl.runtime.drift import ITERATION, Drift, DriftWatch
from pearl.runtime.options import parse_options
from pearl.runtime.telemetry import INSERTION

PREDICTED = {ITERATION: 100.0, INSERTION: 1.0, "training": 60.0, "sampling": 30.0}


def test_the_term_that_explains_most_of_a_slowdown_is_named() -> None:
    drift = Drift(PREDICTED, {ITERATION: 250.0, "training": 65.0, "sampling": 180.0})
    assert (drift.ratio, drift.term) == (2.5, "sampling")
    text = str(drift)
    assert "iterations take 250.0 us, 2.50 times the 100.0 us" in text
    assert "sampling: 180.0 us instead of 30.0 us" in text
    assert "160.0 us, 1.60 times the 100.0 us" in str(Drift(PREDICTED, {ITERATION: 160.0}))


def test_the_term_that_explains_most_of_a_speed_up_is_named() -> None:
    drift = Drift(PREDICTED, {ITERATION: 50.0, "training": 12.0, "sampling": 29.0})
    assert (drift.factor, drift.term) == (2.0, "training")
    assert "1/2.00 of the 100.0 us" in str(drift)


@pytest.mark.parametrize("terms", [{}, {"unknown": 500.0}, {"training": 50.0}, {INSERTION: 500.0}])
def test_without_a_term_that_drifted_the_iteration_is_compared_as_a_whole(terms: dict[str, float]) -> None:
    drift = Drift(PREDICTED, {ITERATION: 250.0, **terms})
    assert drift.term == ITERATION
    assert "term" not in str(drift)


def test_a_drift_is_told_once_after_a_minute_and_again_only_after_it_was_over() -> None:
    watch = DriftWatch({ITERATION: 100.0})
    told = [at for at in range(0, 200, 10) if watch.observe(at, {ITERATION: 160.0})]
    assert told == [60]
    assert watch.observe(200, {ITERATION: 140.0}) is None
    assert [at for at in range(210, 400, 10) if watch.observe(at, {ITERATION: 50.0})] == [270]


def test_one_observation_within_the_threshold_starts_the_minute_anew() -> None:
    watch = DriftWatch({ITERATION: 100.0}, threshold=2.0, patience_s=5.0)
    times = {0: 300.0, 4: 300.0, 5: 199.0, 6: 300.0, 10: 300.0}
    assert [at for at, us in times.items() if watch.observe(at, {ITERATION: us})] == []
    assert watch.observe(11, {ITERATION: 300.0}) is not None


def options(*arguments: str) -> object:
    return parse_options(None, timesteps=10, run_dir="runs", arguments=arguments)


@pytest.mark.parametrize("factor", ["1", "0.5", "nan", "inf", "much"])
def test_a_threshold_that_nothing_can_keep_is_refused(factor: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        options("--drift-threshold", factor)
    assert f"expected a number above 1, found '{factor}'" in capsys.readouterr().err


@pytest.mark.parametrize("other", ["--serial", "--bench"])
def test_runs_that_follow_no_prediction_refuse_to_compose_again(other: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        options("--recompose", other)
    assert f"--recompose has no use with {other}" in capsys.readouterr().err
    assert options("--recompose", other, "--no-recompose")
