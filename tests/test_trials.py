"""Placements whose programs are tried before one is chosen."""

from __future__ import annotations

import json
import math
import re
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest
from programs import described
from test_placement import ACTORS, BATCH, MATRIX, SERVER, TRANSITION
from trainers import TinyDQN

import composer.trials
from composer.algorithm1 import place
from composer.edited import check_edited
from composer.placement import Placement, Trial
from composer.trials import check_budget, with_trials
from pearl.errors import ConfigurationError, GenerationError

Trying: TypeAlias = Callable[..., tuple[Placement, list[str]]]

PLACEMENT = place(MATRIX, SERVER, batch_size=BATCH, transition_bytes=TRANSITION, actor_count=ACTORS, replay_ratio=8.0)
PREDICTED = {candidate.names: candidate.eps for candidate in PLACEMENT.candidates}


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Trying:
    """`tried(factors)`: programs run at these multiples of the predictions, 5 seconds each; the lines reported."""

    def of(
        factors: dict[str, float], budget_s: float = 100.0, write: Callable[[Placement, Path], Path] | None = None
    ) -> tuple[Placement, list[str]]:
        now = [0.0]
        monkeypatch.setattr(composer.trials.time, "monotonic", lambda: now[0])

        def run(program: Path, limit_s: float) -> float:
            names = tuple(json.loads(program.read_text()))
            if limit_s < 5:
                raise subprocess.TimeoutExpired("program", limit_s)
            now[0] += 5
            return PREDICTED[names] * factors.get(names[0], 1.0)  # type: ignore[index]

        def usual(placement: Placement, path: Path) -> Path:
            path.write_text(json.dumps(placement.chosen.names))
            return path

        monkeypatch.setattr(composer.trials, "_run", run)
        said: list[str] = []
        return with_trials(PLACEMENT, write or usual, tmp_path, budget_s, said.append), said

    return of


def test_the_fastest_program_is_placed_whatever_was_predicted(
    tried: Trying,
) -> None:
    confirmed, said = tried({"cpu0": 0.5})
    assert PLACEMENT.replay_manager == "cpu0"
    assert confirmed.replay_manager != "cpu0"
    assert confirmed.eps == confirmed.trial(confirmed.chosen).median_eps  # type: ignore[union-attr]
    assert "as its program did when it was tried at a replay ratio of 8" in confirmed.assumption
    assert confirmed.free_eps == pytest.approx(confirmed.eps)
    reason = next(a.reason for a in confirmed.alternatives if a.replay_manager == "cpu0" and a.learner == "gpu0")
    assert "slower when tried" in reason
    assert "tried" in str(confirmed)
    assert Placement.from_json(confirmed.to_json()) == confirmed
    assert sum(line.startswith("tried") for line in said) == sum(len(trial.eps) for trial in confirmed.trials)
    check_edited(confirmed, PLACEMENT)


def test_programs_take_turns_until_the_time_is_over(tried: Trying) -> None:
    confirmed, _ = tried({}, budget_s=32.0)
    counts = Counter({trial.names: len(trial.eps) for trial in confirmed.trials})
    assert sum(counts.values()) == 6
    assert max(counts.values()) - min(counts.values()) <= 1
    best = PLACEMENT.candidates[0].eps
    assert all(best / PREDICTED[names] <= 1.5 for names in counts), "hopeless ones are not tried"


def test_a_program_that_cannot_be_written_is_not_chosen(tried: Trying) -> None:
    def write(placement: Placement, path: Path) -> Path:
        if placement.replay_manager == "cpu0":
            raise GenerationError("no program for this one")
        path.write_text(json.dumps(placement.chosen.names))
        return path

    confirmed, said = tried({}, write=write)
    assert confirmed.replay_manager != "cpu0"
    assert any("not tried" in line and "no program for this one" in line for line in said)


def test_where_nothing_could_be_tried_the_prediction_decides(tried: Trying) -> None:
    def write(_: Placement, __: Path) -> Path:
        raise GenerationError("no")

    confirmed, said = tried({}, write=write)
    assert confirmed == PLACEMENT
    assert "no placement could be tried" in said[-1]


@pytest.mark.parametrize("budget_s", [0, 3.0, math.inf, math.nan, "60"])
def test_a_budget_in_which_nothing_can_be_measured_is_refused(budget_s: float) -> None:
    with pytest.raises(ConfigurationError, match="at least 15 s"):
        check_budget(budget_s)


def test_a_trial_without_runs_is_refused() -> None:
    for eps in ((), (0.0,), (math.inf,)):
        with pytest.raises(ConfigurationError, match="above 0"):
            Trial("cpu0", "cpu0", "native", eps)


@pytest.mark.usefixtures("quick_profiles")
def test_real_programs_are_tried(
    csv_pair: Callable[..., tuple[Path, Path]], capsys: pytest.CaptureFixture[str]
) -> None:
    composer_ = described(csv_pair("cpu0,cpu,cpu,,2,60"), trainer=TinyDQN, progress=True)
    replay, learner = composer_.run(budget_s=15.0)
    placement = composer_.placement
    said = capsys.readouterr().out
    found = re.search(r"tried RM on cpu0, (\w+) Learner on cpu0: ([\d,]+) EPS, predicted", said)
    assert found is not None, said
    assert placement.trials
    assert placement.eps > 0
    assert (replay.device, learner.device) == ("cpu0", "cpu0")
    assert "Program:" not in said
