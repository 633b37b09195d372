"""How many Learners, and how often they average: the choice against what it is made from, and composed programs."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from programs import ONE_CPU, described, write_csv_pair
from test_cli import invoke
from test_learners_program import TINY, TRAINING, composer_of

from composer import learners_choice
from composer.composition import Composition
from composer.html_report.composition_view import view
from composer.learners_choice import (
    INTERVALS,
    NEAR,
    WORTH_A_LEARNER,
    Intervals,
    LearnersCandidate,
    LearnersChoice,
    PredictAt,
    choose_learners,
)
from composer.placement import Placement
from composer.profiling.side_by_side import SideBySide
from pearl.algorithms import DQN, RecurrentDQN
from pearl.errors import ConfigurationError
from pearl.spec import LearnersSpec

LONG = Intervals(1e9)
ONE = LearnersCandidate(1, 0, 1000.0, 1000.0)


class Model:
    """Iterations of `fixed_us`, and `batch_us` that L Learners share, plus the share of an average."""

    def __init__(self, fixed_us: float, batch_us: float, average_us: float, collect_us: float = 0.0) -> None:
        self.parts = fixed_us, batch_us, average_us
        self.collect_us = collect_us
        self.asked: list[int] = []

    def candidate(self, count: int, every: int) -> LearnersCandidate:
        fixed_us, batch_us, average_us = self.parts
        t_itr_us = fixed_us + batch_us / count + (average_us / every if count > 1 else 0.0)
        return LearnersCandidate(count, every, 1e6 / t_itr_us, 1e6 / max(t_itr_us, self.collect_us))

    def __call__(self, count: int) -> PredictAt:
        self.asked.append(count)
        return lambda every: self.candidate(count, every)

    def choose(self, counts: tuple[int, ...] = (2, 4, 8, 16), intervals: Intervals = LONG) -> LearnersChoice:
        return choose_learners(counts, intervals, self, one=self.candidate(1, 0))


def test_the_other_candidates_are_compared_with_the_choice() -> None:
    compared = {
        ONE: "2.00x slower",
        LearnersCandidate(2, 1, 2000.0, 2000.0): "chosen",
        LearnersCandidate(2, 4, 2060.0, 2060.0): "1.03x faster, too little for more steps",
        LearnersCandidate(2, 1, 2020.0, 2020.0, nodes=(("", 1), ("a", 1))): "1.01x faster, too little for more nodes",
        LearnersCandidate(4, 1, 2200.0, 2200.0): "1.10x faster, too little for more Learners",
    }
    choice = LearnersChoice(2, 1, tuple(compared), (), "", "")
    assert {candidate: choice.why_not(candidate) for candidate in compared} == compared


@given(st.floats(1.0, 1e4), st.floats(1.0, 1e4), st.floats(0.0, 1e5), st.floats(0.0, 1e4))
def test_more_learners_are_worth_their_cores_and_average_as_often_as_costs_little(
    fixed_us: float, batch_us: float, average_us: float, collect_us: float
) -> None:
    model = Model(fixed_us, batch_us, average_us, collect_us)
    choice = model.choose()
    one, chosen = model.candidate(1, 0), choice.chosen
    of_count = [c for c in choice.candidates if c.count == chosen.count]
    fastest = max(c.overall_eps for c in of_count)
    assert chosen.overall_eps * NEAR >= fastest
    assert all(c.overall_eps * NEAR < fastest for c in of_count if c.average_every < chosen.average_every)
    if chosen.count > 1:
        assert fastest >= WORTH_A_LEARNER * one.overall_eps
        assert all(fastest > c.overall_eps for c in choice.candidates if c.count < chosen.count)
    else:
        assert all(c.overall_eps < WORTH_A_LEARNER * one.overall_eps for c in choice.candidates if c.count == 2)
    assert [c.average_every for c in choice.candidates if c.count == 2] == list(INTERVALS)


def test_the_interval_is_no_longer_than_a_short_run_allows() -> None:
    assert Intervals(200).allowed(2) == (1, 4, 8)  # sqrt(200 / 2) = 10
    assert Intervals(200).allowed(16) == (1,)
    assert Intervals(1).allowed(4) == (1,)
    assert Intervals(float("inf")).allowed(1024) == INTERVALS
    choice = Model(1.0, 1000.0, 2000.0).choose((2,), Intervals(200))
    assert (choice.count, choice.average_every) == (2, 8)
    assert choice.bound == "H at most 32, and at most the square root of T / L for T = 200 gradient steps"
    assert Model(1.0, 1000.0, 2000.0).choose((2,)).average_every == 32
    told = "2 Learners train {} times as many experiences as one; H = {}"
    assert Model(1.0, 1000.0, 1000.0).choose((2,)).reason == told.format("1.88", "32 is the fastest")
    assert Model(1.0, 1000.0, 20.0).choose((2,)).reason == told.format("1.92", "1, as H = 32 would be only 3.9% faster")


def test_counts_rise_as_long_as_that_is_faster() -> None:
    model = Model(100.0, 10.0, 5000.0)
    choice = model.choose()
    assert (choice.count, choice.average_every) == (1, 0)
    assert model.asked == [2]
    assert choice.left_out == ("4 or 8 or 16 Learners are not measured, as 2 are no faster than fewer",)
    assert choice.reason.startswith("one Learner: 2 would train 0.")
    waiting = Model(100.0, 1000.0, 10.0, collect_us=1500.0).choose()
    assert waiting.count == 1
    assert "the Actors bring no more than one can train" in waiting.reason


def test_what_is_not_possible_ends_the_search_with_its_reason() -> None:
    def refuse(count: int) -> PredictAt:
        if count == 4:
            raise ConfigurationError("A batch of 6 cannot be divided among 4.\nMore.")
        return lambda every: LearnersCandidate(count, every, 5000.0, 5000.0)

    choice = choose_learners((2, 4, 8), LONG, refuse, one=ONE, every=8, left_out=["more than 8: cpu0 has 8 core(s)"])
    assert (choice.count, choice.average_every) == (2, 8)
    assert choice.left_out == ("A batch of 6 cannot be divided among 4.", "more than 8: cpu0 has 8 core(s)")
    assert choice.bound == "H = 8 is stated"
    with pytest.raises(ConfigurationError, match="A batch of 6"):
        choose_learners((4,), LONG, refuse)
    with pytest.raises(ConfigurationError, match="is not one of its candidates"):
        dataclasses.replace(choice, count=3)
    with pytest.raises(ConfigurationError, match="overall_eps above 0 and not above eps"):
        LearnersCandidate(2, 8, 10.0, 11.0)


def test_a_step_is_stretched_by_others_and_by_the_slowest() -> None:
    """Equal steps wait for nobody; of two exponential ones one waits, 1.5 of the mean; shared caches cost each step."""
    spec = LearnersSpec(2, 1)
    assert SideBySide(100.0, np.full(9, 100.0), 300.0).stretch(spec) == pytest.approx(1.0)
    assert SideBySide(50.0, np.full(9, 100.0), 300.0).stretch(spec) == pytest.approx(2.0)
    assert SideBySide(200.0, np.full(9, 100.0), 300.0).stretch(spec) == 1.0
    exponential = SideBySide(100.0, np.random.default_rng(0).exponential(100.0, 20_000), 300.0)
    assert exponential.stretch(spec) == pytest.approx(1.5, rel=0.1)
    assert exponential.stretch(LearnersSpec(2, 32)) < exponential.stretch(LearnersSpec(2, 4)) < 1.5


# --- composing ------------------------------------------------------------------------------------------------------

several_cores = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")


@several_cores
@pytest.mark.parametrize("gain", [0.0, 1e9], ids=["several", "one"])
def test_the_composer_chooses_and_says_why(
    tmp_path: Path, quick_profiles: None, monkeypatch: pytest.MonkeyPatch, gain: float
) -> None:
    monkeypatch.setattr(learners_choice, "WORTH_A_LEARNER", gain)
    files = write_csv_pair(tmp_path, ONE_CPU)
    composer = described(files, trainer=DQN, settings=TINY, training=TRAINING, learners={"count": "auto"})
    composer.set_learners("auto", "auto", "average")
    composer.run(timesteps=1600)  # 200 gradient steps
    placement = composer.placement
    choice = placement.learners_choice
    assert choice is not None
    assert [(c.count, c.average_every) for c in choice.candidates] == [(1, 0), (2, 1), (2, 4), (2, 8)]
    assert "T = 200 gradient steps" in choice.bound
    assert (placement.learner_count, placement.average_every) == (choice.count, choice.average_every)
    assert placement.eps == pytest.approx(choice.chosen.eps)
    shown, explained = str(placement), str(placement.explain())
    assert choice.reason in " ".join(shown.split())
    assert "Learners, and steps between averages (H)" in explained
    assert Placement.from_json(placement.to_json()) == placement
    facts = dict(view(Composition.of(composer.platform, composer.matrix, placement)).facts)
    assert choice.reason in facts["Count of Learners"]
    program = composer.runtime_gen(path=tmp_path / "program.py", timesteps=1600).read_text()
    (tmp_path / "placement.json").write_text(placement.to_json())
    found = invoke("explain", str(tmp_path / "placement.json"))
    assert found.exit_code == 0
    assert choice.bound in " ".join(found.stdout.split())
    if gain:
        assert choice.count == 1
        composer.set_learners(1)
        composer.run(timesteps=1600)
        assert composer.placement.learners_choice is None
        assert composer.runtime_gen(path=tmp_path / "program.py", timesteps=1600).read_text() == program
        return
    assert choice.count == 2
    assert placement.terms.average_us == pytest.approx(choice.chosen.average_us)
    assert placement.terms.waiting_us == pytest.approx(choice.chosen.waiting_us)
    assert f'count=2,\n    average_every={choice.average_every},\n    moments="average"' in program
    composer.set_learners(2, "auto")
    composer.run(timesteps=1600)
    assert {c.count for c in composer.placement.learners_choice.candidates} == {2}


def test_one_learner_where_several_are_not_possible(tmp_path: Path, quick_profiles: None) -> None:
    files = write_csv_pair(tmp_path, ONE_CPU)
    training = {**TRAINING, "batch_size": 15}
    composer = described(files, trainer=DQN, settings=TINY, training=training, learners={"count": "auto"})
    composer.run()
    assert composer.placement.learner_count == 1
    assert "batch of 15 cannot be divided among 2" in composer.placement.learners_choice.reason


def test_auto_is_refused_where_it_has_no_answer() -> None:
    composer = composer_of()
    composer.set_learners("auto")
    composer.set_training(insertion_rows="auto")
    with pytest.raises(ConfigurationError, match=r'count "auto", and insertion_rows is "auto" too'):
        composer.check()
    with pytest.raises(ConfigurationError, match=r"average_every .* must be a whole number, or \"auto\"; found 'many'"):
        composer.set_learners(2, "many")
    recurrent = composer_of(RecurrentDQN)
    recurrent.set_learners(2, "auto")
    with pytest.raises(ConfigurationError, match="trains on sequences, which banks do not hold"):
        recurrent.check()
    recurrent.set_learners("auto")
    recurrent.check()
