"""Placements whose programs are tried before one is chosen."""

from __future__ import annotations

import dataclasses
import json
import math
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import pytest
from programs import Running, children, described, is_alive, make_program
from test_placement import ACTORS, BATCH, MATRIX, SERVER, TRANSITION
from trainers import TinyDQN

import composer.trials
from composer.algorithm1 import place
from composer.composing import trial_folder
from composer.matrix import Candidacy
from composer.measurement import Measurement
from composer.placement import Candidate, Placement
from composer.trials import Budget, FailedError, OutOfTimeError, ProgramRuns, Trials
from pearl.errors import ConfigurationError, GenerationError

PLACEMENT = place(MATRIX, SERVER, batch_size=BATCH, transition_bytes=TRANSITION, actor_count=ACTORS, replay_ratio=8.0)
PREDICTED = {candidate.names: candidate.t_itr_us for candidate in PLACEMENT.candidates}
BEST = PLACEMENT.candidates[0].names
RUN_S = 5.0

Times: TypeAlias = Mapping[Candidacy, Sequence[float]]


def of_runs(us: float) -> Measurement:
    return Measurement(us, 0.9 * us, 1.05 * us, 4, "measured")


class Machine:
    """A machine on which programs take given multiples of their predicted times: one per run, the last for the rest."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, times: Times) -> None:
        self.folder, self.times, self.now = folder, times, 0.0
        self.runs: Counter[Candidacy] = Counter()
        self.said: list[str] = []
        self.kept: dict[Any, dict[str, Measurement]] = {}
        self.counts: Callable[[Candidate], bool] = lambda _: True
        self.here: Callable[[Candidate], bool] = lambda _: True
        self.written: Callable[[Placement], None] = lambda _: None
        patch.setattr(composer.trials.time, "monotonic", lambda: self.now)
        patch.setattr(composer.trials, "bench_program", self._run)
        patch.setattr(ProgramRuns, "_key", lambda _, candidate, run: (candidate.names, run))
        patch.setattr(ProgramRuns, "can_count", lambda _, candidate: self.counts(candidate))
        patch.setattr(ProgramRuns, "can_run", lambda _, candidate: self.counts(candidate) and self.here(candidate))

    def placed(self, budget: Budget) -> Placement:
        def usual(wholes: Mapping[Candidacy, Any]) -> Placement:
            inputs: dict[str, Any] = {"batch_size": BATCH, "transition_bytes": TRANSITION, "actor_count": ACTORS}
            return place(MATRIX, SERVER, **inputs, replay_ratio=8.0, wholes=wholes)

        context: Any = SimpleNamespace(
            platform=SERVER,
            begin=self.said.append,
            report=self.said.append,
            known=self._known,
            is_known=lambda key, *_: key in self.kept,
        )
        return Trials(ProgramRuns(context, self._write, self.folder), usual, budget, self.said.append).placed()

    def _known(self, key: Any, _names: object, work: Callable[[], Any], _device: object) -> dict[str, Measurement]:
        if key not in self.kept:
            self.kept[key] = work()
        return self.kept[key]

    def _write(self, placement: Placement, path: Path) -> Path:
        self.written(placement)
        path.write_text(json.dumps(placement.chosen.names))
        return path

    def _run(self, program: Path, _batch_size: int, limit_s: float) -> dict[str, Measurement]:
        names = tuple(json.loads(program.read_text()))
        factors = self.times.get(names, [1.0])  # type: ignore[call-overload]
        factor = factors[min(self.runs[names], len(factors) - 1)]  # type: ignore[index]
        self.runs[names] += 1  # type: ignore[index]
        took_s = RUN_S if math.isfinite(factor) else math.inf
        if took_s > limit_s:
            self.now += limit_s
            raise subprocess.TimeoutExpired("program", limit_s)
        self.now += took_s
        us = PREDICTED[names] * factor  # type: ignore[index]
        return {name: of_runs(factor * us) for name, factor in (("paced", 1), ("free", 2), ("overall", 3))}


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Machine]:
    return lambda times=None: Machine(tmp_path, monkeypatch, times or {})


USUAL = Budget(60.0, stated=False)


def test_the_fastest_program_is_placed_whatever_was_predicted(machine: Callable[..., Machine]) -> None:
    here = machine({BEST: [10.0]})
    found = here.placed(USUAL)
    assert PLACEMENT.chosen.names == BEST != found.chosen.names
    assert found.chosen.whole is not None
    assert found.t_itr_us == pytest.approx(PREDICTED[found.chosen.names])
    assert found.free_eps == pytest.approx(found.eps / 2)
    assert found.overall_eps == pytest.approx(found.eps / 3)
    assert found.alternatives[0].reason.startswith("tried: ")
    assert sum(line.startswith("tried ") for line in here.said) == sum(here.runs.values())


def test_by_default_only_programs_that_may_be_the_fastest_are_tried(machine: Callable[..., Machine]) -> None:
    here = machine()
    here.placed(USUAL)
    hopeful = {names for names, us in PREDICTED.items() if us < 2 * PREDICTED[BEST]}
    assert set(here.runs) == hopeful
    assert len(hopeful) < len(PREDICTED)
    close = {names for names, us in PREDICTED.items() if us <= 1.25 * PREDICTED[BEST]}
    assert all(here.runs[names] == (2 if names in close and len(close) > 1 else 1) for names in hopeful)


@pytest.mark.parametrize(("budget", "factor", "tries"), [(USUAL, 0.99, 0), (USUAL, 1.01, 1), (Budget(60.0), 0.99, 1)])
def test_where_the_parts_decide_a_program_is_tried_only_by_a_budget_of_the_users(
    monkeypatch: pytest.MonkeyPatch, budget: Budget, factor: float, tries: int
) -> None:
    best, *_, last = PLACEMENT.candidates
    metric = PLACEMENT.metric
    monkeypatch.setattr(composer.trials, "DECISIVE", factor * best.score(metric) / last.score(metric))
    clear = dataclasses.replace(PLACEMENT, candidates=(best, last))
    tried: list[Candidacy] = []

    def run(_placement: Placement, candidate: Candidate, _run: int, _until: float) -> None:
        tried.append(candidate.names)
        raise OutOfTimeError

    programs: Any = SimpleNamespace(can_count=lambda _: False, can_run=lambda _: True, run=run)
    said: list[str] = []
    assert Trials(programs, lambda _: clear, budget, said.append).placed() == clear
    assert len(tried) == tries
    assert [line.startswith("no program is tried: all others are predicted") for line in said] == [True] * (1 - tries)


def test_a_budget_of_the_users_is_used_for_all_programs_and_then_for_the_best(machine: Callable[..., Machine]) -> None:
    here = machine()
    here.placed(Budget(1000.0))
    assert set(here.runs) == set(PREDICTED)
    assert here.runs[BEST] == 3
    assert all(here.runs[names] == 2 for names, us in PREDICTED.items() if us > 1.25 * PREDICTED[BEST])


def test_trials_end_with_the_budget(machine: Callable[..., Machine]) -> None:
    here = machine()
    found = here.placed(Budget(3.5 * RUN_S))
    assert sum(here.runs.values()) == 3
    assert here.now <= 3.5 * RUN_S
    assert found.chosen.names in PREDICTED


def test_known_trials_count_without_a_budget(machine: Callable[..., Machine]) -> None:
    here = machine({BEST: [10.0]})
    first = here.placed(USUAL)
    runs = Counter(here.runs)
    again = here.placed(Budget(0.0))
    assert here.runs == runs
    assert again == first


def test_runs_of_one_program_are_pooled(machine: Callable[..., Machine]) -> None:
    here = machine({BEST: [1.0, 1.2, 0.9]})
    found = here.placed(Budget(1000.0))
    whole = next(c for c in found.candidates if c.names == BEST).whole
    assert whole is not None
    assert whole.paced.n == 12
    assert whole.paced.value_us == pytest.approx(PREDICTED[BEST])
    assert whole.paced.p20_us == pytest.approx(0.9 * PREDICTED[BEST])
    assert whole.paced.p80_us == pytest.approx(1.2 * PREDICTED[BEST])


@pytest.mark.parametrize("how", ["not written", "fails", "hangs"])
def test_a_program_that_cannot_be_tried_is_not_chosen(
    machine: Callable[..., Machine], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    here = machine({BEST: [math.inf]} if how == "hangs" else {})
    if how == "not written":

        def refuse(placement: Placement) -> None:
            if placement.chosen.names == BEST:
                raise GenerationError("no program for this one")

        here.written = refuse
    if how == "fails":
        run = here._run

        def fail(program: Path, batch_size: int, limit_s: float) -> dict[str, Measurement]:
            if tuple(json.loads(program.read_text())) == BEST:
                raise FailedError("it broke")
            return run(program, batch_size, limit_s)

        monkeypatch.setattr(composer.trials, "bench_program", fail)
    found = here.placed(Budget(600.0))
    assert found.chosen.names != BEST
    reason = {"not written": "no program for this one", "fails": "it broke", "hangs": "had not ended after 120 s"}[how]
    assert any(line.startswith("not tried") and reason in line for line in here.said)
    assert here.runs[BEST] <= 1, "once is enough"


def test_where_no_program_can_be_tried_the_prediction_decides(machine: Callable[..., Machine]) -> None:
    here = machine({names: [math.inf] for names in PREDICTED})
    assert here.placed(Budget(10_000.0)).chosen.names == BEST
    assert "no program of a placement could be tried" in here.said[-1]


@pytest.mark.parametrize("known", [False, True])
def test_devices_that_are_modelled_or_emulated_keep_their_prediction(
    machine: Callable[..., Machine], known: bool
) -> None:
    here = machine({BEST: [10.0]})
    if known:
        here.placed(Budget(1000.0))
    here.counts = lambda candidate: candidate.names != BEST
    found = here.placed(Budget(1000.0))
    assert here.runs[BEST] == (2 if known else 0)
    assert found.chosen.names == BEST
    assert found.chosen.whole is None


@pytest.mark.parametrize("known", [False, True])
def test_absent_devices_are_not_tried_and_count_as_imported(machine: Callable[..., Machine], known: bool) -> None:
    here = machine({BEST: [10.0]})
    if known:
        here.placed(Budget(1000.0))
    before = here.runs[BEST]
    here.here = lambda candidate: candidate.names != BEST
    found = here.placed(Budget(1000.0))
    assert here.runs[BEST] == before
    assert (found.chosen.names == BEST) == (not known)


@pytest.mark.parametrize("budget_s", [-1.0, 3.0, math.inf, math.nan, "60"])
def test_a_budget_in_which_nothing_can_be_measured_is_refused(budget_s: Any) -> None:
    with pytest.raises(ConfigurationError, match="at least 15 s"):
        Budget.of(budget_s)


def test_the_variable_gives_the_budget_where_none_is_stated(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, expected in (("", USUAL), ("0", Budget(0.0)), ("90", Budget(90.0))):
        monkeypatch.setenv("PEARL_BUDGET_S", text)
        assert Budget.of(None) == expected
        assert Budget.of(20) == Budget(20)
    for text, message in (("a lot", "must be a number of seconds; found 'a lot'"), ("3", "PEARL_BUDGET_S must be at")):
        monkeypatch.setenv("PEARL_BUDGET_S", text)
        with pytest.raises(ConfigurationError, match=message):
            Budget.of(None)


@pytest.mark.usefixtures("quick_profiles")
def test_real_programs_are_tried_once(
    csv_pair: Callable[..., tuple[Path, Path]], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(composer.trials, "_MEASURED_S", 0.6)
    for most in ("USUAL_RUNS", "MOST_RUNS"):
        monkeypatch.setattr(composer.trials, most, 1)
    files = csv_pair("cpu0,cpu,cpu,,2,60")
    tried = described(files, trainer=TinyDQN, progress=True)
    tried.run(budget_s=100.0)
    said = capsys.readouterr().out
    assert "tried RM on cpu0, " in said
    assert "Program:" not in said
    whole = tried.placement.chosen.whole
    assert whole is not None
    assert whole.paced.n >= 2
    assert tried.placement.t_itr_us == pytest.approx(whole.paced.value_us)
    again = described(files, trainer=TinyDQN, progress=True)
    again.run()
    assert "0 measured" in capsys.readouterr().out
    assert again.placement == tried.placement


# --- signals --------------------------------------------------------------------------------------------------------

TRYING = """
import sys
from pathlib import Path
from composer.composing import trial_folder
from composer.trials import bench_program
with trial_folder() as folder:
    (folder / "file").touch()
    bench_program(Path(sys.argv[1]), 16, 120.0)
"""


@pytest.mark.usefixtures("quick_profiles")
def test_sigterm_ends_the_program_that_is_tried_and_removes_the_folder(tmp_path: Path) -> None:
    program, script, folder = make_program(tmp_path), tmp_path / "trying.py", tmp_path / "tmp"
    script.write_text(TRYING)
    folder.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder))
        composing = Running(script, str(program))

    def processes() -> list[int]:
        """The program and its Actor."""
        tried = children(composing.process.pid)
        actors = [pid for each in tried for pid in children(each)]
        return [*tried, *actors] if actors else []

    started = composing.until(processes)
    assert list(folder.glob("pearl-trials-*/file"))
    composing.process.terminate()
    assert composing.wait(10.0) == 128 + signal.SIGTERM
    assert list(folder.iterdir()) == []
    eventually = time.monotonic() + 5.0
    while left := [pid for pid in started if is_alive(pid)]:
        assert time.monotonic() < eventually, f"still there: {left}"
        time.sleep(0.02)


def test_handlers_of_others_stay() -> None:
    def mine(*_: object) -> None:
        pytest.fail("no signal was sent")

    before = signal.signal(signal.SIGTERM, mine)
    try:
        with trial_folder():
            assert signal.getsignal(signal.SIGTERM) is mine
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with trial_folder():
            assert signal.getsignal(signal.SIGTERM) not in (mine, signal.SIG_DFL)
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)
