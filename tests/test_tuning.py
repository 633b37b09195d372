"""Settings that are left to the composer ("auto")."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gymnasium import spaces
from programs import CsvPair, described
from test_placement import ACTORS, BATCH, MATRIX, SERVER, TRANSITION
from trainers import TinyDQN

from composer.algorithm1 import place
from composer.measurement import Measurement
from composer.placement import Placement
from composer.problem import Problem
from composer.spec_file import load_spec
from composer.trials import Speed
from composer.tunables import TUNABLES, without_auto
from composer.tuning import balanced_ratio, tuned, updates_per_step
from pearl.algorithms import REDQ
from pearl.errors import ConfigurationError
from pearl.runtime.collection import insertion_rows
from pearl.spec import ActorSpec, ReplaySpec, TrainSpec, TransitionSpec

OBS, ACTIONS = spaces.Box(-1, 1, (3,)), spaces.Discrete(2)
PROBLEM = Problem(
    trainer_class=TinyDQN,
    settings={},
    observation_space=OBS,
    action_space=ACTIONS,
    transition=TransitionSpec.from_spaces(OBS, ACTIONS),
    replay=ReplaySpec(1000),
    train=TrainSpec(),
    actors=ActorSpec("CartPole-v1", envs_per_actor=8),
)
PLACEMENT = place(MATRIX, SERVER, batch_size=BATCH, transition_bytes=TRANSITION, actor_count=ACTORS)


def searched(
    *names: str, overall: Callable[[Problem, int], float | None], eps: float = 1e9, placement: Any = PLACEMENT
) -> tuple[dict[str, int], Counter[tuple[int, ...]], list[str]]:
    """The values found where a program's speed is `overall(problem, run)`; how often each was run; what was said."""
    runs: Counter[tuple[int, ...]] = Counter()
    said: list[str] = []

    def measure(problem: Problem, run: int) -> Speed | None:
        key = (problem.actors.count, problem.actors.envs_per_actor, problem.train.priority_update_delay)
        runs[key] = max(runs[key], run + 1)  # a run that was made is known
        found = overall(problem, run)
        return None if found is None else Speed(eps, found)

    return tuned(PROBLEM, placement, names, measure, said.append), runs, said


@pytest.mark.parametrize("best", [1, 2, 4, 8, 16, 32, 64])
def test_a_setting_climbs_to_the_fastest_value(best: int) -> None:
    def overall(problem: Problem, _: int) -> float:
        envs = problem.actors.envs_per_actor
        return 100.0 * min(envs / best, best / envs)

    found, runs, said = searched("envs_per_actor", overall=overall)
    assert found == {"envs_per_actor": best}
    assert runs[1, 8, 1] == runs[1, best, 1] == (1 if best == 8 else 2), "what won wins a second time"
    assert said[0].startswith(f"envs_per_actor: {best}, by EPS with all waiting included (")


def test_a_gain_that_does_not_last_counts_for_nothing() -> None:
    def overall(problem: Problem, run: int) -> float:
        return (120.0, 80.0)[run] if problem.actors.envs_per_actor == 16 else 100.0

    found, runs, _ = searched("envs_per_actor", overall=overall)
    assert found == {"envs_per_actor": 8}
    assert runs[1, 16, 1] == 2
    found, _, _ = searched("envs_per_actor", overall=lambda problem, _: 100.0 + problem.actors.envs_per_actor / 4)
    assert found == {"envs_per_actor": 8}, "less than 5 % is noise"


def test_a_learner_that_never_waits_is_not_fed_more() -> None:
    found, runs, _ = searched("num_actors", overall=lambda *_: 99.0, eps=100.0)
    assert found == {"num_actors": 1}
    assert set(runs) == {(1, 8, 1)}


def test_settings_are_searched_one_after_the_other() -> None:
    found, runs, _ = searched(
        *("num_actors", "envs_per_actor"),
        overall=lambda problem, _: 100.0 * problem.actors.count * min(16, problem.actors.envs_per_actor),
    )
    assert found == {"envs_per_actor": 16, "num_actors": 64}
    assert (64, 16, 1) in runs


def test_the_delay_is_searched_in_setting_1_only() -> None:
    for learner, expected in (("gpu0", {0, 1, 2, 4, 8}), ("cpu0", set())):
        placement = PLACEMENT.with_choice(replay_manager="cpu0", learner=learner)
        found, runs, said = searched(
            "priority_update_delay",
            overall=lambda problem, _: 100.0 * 2**problem.train.priority_update_delay,
            placement=placement,
        )
        assert {delay for _, _, delay in runs} == expected - {0}
        assert found == {"priority_update_delay": 8 if expected else 1}
        assert ("no effect" in said[0]) == (not expected)


def test_what_cannot_be_tried_keeps_the_first_value() -> None:
    def refuse(problem: Problem, _: int) -> float:
        if problem.actors.envs_per_actor > 8:
            raise ConfigurationError("too many")
        return 100.0

    assert searched("envs_per_actor", overall=refuse)[0] == {"envs_per_actor": 8}
    found, _, said = searched("envs_per_actor", overall=lambda *_: None)
    assert found == {"envs_per_actor": 8}
    assert "no program could be tried" in said[0]


def test_only_some_settings_can_be_left_to_the_composer() -> None:
    assert without_auto({"num_actors": "auto", "envs_per_actor": 4}) == ({"envs_per_actor": 4}, ("num_actors",))
    with pytest.raises(ConfigurationError, match='batch_size cannot be "auto"; envs_per_actor, num_actors'):
        without_auto({"batch_size": "auto"})


def test_the_replay_ratio_keeps_both_sides_busy_within_the_algorithms_bound() -> None:
    ratio, why = balanced_ratio(256, collection_us=600.0, training_us=200.0, bounds=(1.0, 20.0))
    assert ratio == 3 * 256
    assert why == "3 updates of 256 samples for each transition: collecting one takes 600 us, an update 200 us"
    ratio, why = balanced_ratio(256, collection_us=600.0, training_us=20.0, bounds=(1.0, 20.0))
    assert ratio == 20 * 256
    assert why.endswith("the Learner could make 30, but the algorithm's most_updates_per_step is 20")
    ratio, _ = balanced_ratio(64, collection_us=5.0, training_us=1000.0, bounds=(0.0, 1.0))
    assert ratio == 0.005 * 64
    ratio, why = balanced_ratio(64, collection_us=5.0, training_us=1000.0, bounds=(1.0, 20.0))
    assert ratio == 64
    assert why.endswith("the Actors wait, as the algorithm's least_updates_per_step is 1")
    assert [updates_per_step(found, {}) for found in (TinyDQN, REDQ, object)] == [(0.0, 1.0), (1.0, 20.0), (0.0, 1.0)]
    assert updates_per_step(REDQ, {"most_updates_per_step": 4}) == (1.0, 4.0)


@pytest.mark.usefixtures("quick_profiles")
@pytest.mark.parametrize("most", [1e-3, 1000.0])
def test_a_replay_ratio_of_the_composer_is_placed_with_its_reason_and_generated(
    csv_pair: CsvPair, tmp_path: Path, capsys: pytest.CaptureFixture[str], most: float
) -> None:
    composer = described(
        csv_pair("cpu0,cpu,cpu,,2,60"),
        trainer=TinyDQN,
        settings={"most_updates_per_step": most},
        calibration=tmp_path / "store.json",
        progress=True,
    )
    composer.set_training(replay_ratio="auto")
    composer.run(budget_s=0)
    found = composer.placement
    batch = TinyDQN.batch_size
    assert found.replay_ratio is not None
    assert found.replay_ratio == pytest.approx(most * batch) if most < 1 else found.replay_ratio < most * batch
    assert found.replay_ratio_reason is not None
    assert f"updates of {batch} samples for each transition: collecting one takes" in found.replay_ratio_reason
    assert ("most_updates_per_step is 0.001" in found.replay_ratio_reason) == (most < 1)
    assert f"replay_ratio: {found.replay_ratio:g}, {found.replay_ratio_reason}" in capsys.readouterr().out
    assert f"replay ratio {found.replay_ratio:g}:" in str(found)
    assert Placement.from_json(found.to_json()) == found
    program = composer.runtime_gen(path=tmp_path / "program.py")
    assert f"    replay_ratio={found.replay_ratio!r},\n" in program.read_text()
    composer.run(budget_s=0)
    assert composer.placement == found, "a second run begins as the first"
    composer.set_training(replay_ratio=16.0)
    composer.run(budget_s=0)
    assert (composer.placement.replay_ratio, composer.placement.replay_ratio_reason) == (16.0, None)


@pytest.mark.usefixtures("quick_profiles")
@pytest.mark.parametrize("stated", [{}, {"policy_delay": 7}])
def test_the_policy_of_redq_moves_once_for_the_updates_that_were_chosen(
    csv_pair: CsvPair, tmp_path: Path, stated: dict[str, Any]
) -> None:
    settings = {"num_critics": 2, "hidden_sizes": (8,), "most_updates_per_step": 2.0, "least_updates_per_step": 2.0}
    composer = described(
        csv_pair("cpu0,cpu,cpu,,2,60"), trainer=REDQ, settings={**settings, **stated}, env="Pendulum-v1"
    )
    composer.set_training(replay_ratio="auto", batch_size=16, learning_starts=100)
    composer.run(budget_s=0)
    program = composer.runtime_gen(path=tmp_path / "program.py").read_text()
    assert "    replay_ratio=32.0,\n" in program
    assert re.search(r"policy_delay\W+(\d+)", program).group(1) == str(stated.get("policy_delay", 2))  # type: ignore[union-attr]


def test_insertion_rows_are_those_of_the_settings_or_of_the_rule() -> None:
    def rows(wanted: int, capacity: int = 10_000) -> int:
        train = dataclasses.replace(TrainSpec(), insertion_rows=wanted)
        return insertion_rows(ReplaySpec(capacity), PROBLEM.actors, train, message_rows=100)

    assert (rows(0), rows(500), rows(500, capacity=300)) == (128, 500, 200)


def test_auto_in_a_composition_file_begins_with_the_usual_values(tmp_path: Path) -> None:
    (tmp_path / "auto.toml").write_text(
        '[actors]\nenv = "CartPole-v1"\ncount = "auto"\nenvs_per_actor = "auto"\n'
        '[trainer]\nclass = "pearl.algorithms:DQN"\n[replay]\nsize = 1000\n'
        '[training]\npriority_update_delay = "auto"\ninsertion_rows = "auto"\nreplay_ratio = "auto"\n'
    )
    composer, _ = load_spec(tmp_path / "auto.toml", progress=False)
    assert set(composer.auto) == {*TUNABLES, "replay_ratio"}
    assert composer.actors is not None
    assert (composer.actors.count, composer.actors.envs_per_actor) == (1, 8)
    composer.set_actors(2, "CartPole-v1")
    composer.set_training(insertion_rows="auto")
    assert composer.auto == ("insertion_rows",)


@pytest.mark.usefixtures("quick_profiles")
def test_without_time_for_trials_the_usual_values_stay(csv_pair: CsvPair, capsys: pytest.CaptureFixture[str]) -> None:
    composer = described(csv_pair("cpu0,cpu,cpu,,2,60"), trainer=TinyDQN, progress=True)
    composer.set_actors("auto", "CartPole-v1")
    composer.run()
    assert "num_actors: 1, as no program could be tried" in capsys.readouterr().out
    assert composer.placement.actor_count == 1


def no_run(*_: object) -> dict[str, Measurement]:
    raise AssertionError("no program may run again")


@pytest.mark.usefixtures("quick_profiles")
def test_what_was_found_is_composed_and_generated(
    csv_pair: CsvPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(program: Path, _: int, __: float) -> dict[str, Measurement]:
        us = 50.0 if "insertion_rows=512" in program.read_text() else 100.0
        return dict.fromkeys(("paced", "free", "overall"), Measurement.from_samples([us]))

    monkeypatch.setattr("composer.trials.bench_program", run)
    composer = described(csv_pair("cpu0,cpu,cpu,,2,60"), trainer=TinyDQN, calibration=tmp_path / "store.json")
    composer.set_training(**{**composer.training, "insertion_rows": "auto"})
    composer.run(budget_s=60.0)
    program = composer.runtime_gen(path=tmp_path / "program.py")
    assert "    insertion_rows=512,\n" in program.read_text()
    assert composer.placement.t_itr_us == pytest.approx(50.0)
    found = composer.placement
    monkeypatch.setattr("composer.trials.bench_program", no_run)
    composer.run()
    assert composer.placement == found, "a second run searches the same, and knows all"
    composer.set_placement(found)
    composer.run()
    assert composer.placement == found, "an edited placement of a search is taken back"
