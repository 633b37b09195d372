"""What a run says of its policy at the end: the last weights and the best, each with its step and its own episodes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from safetensors.torch import load_file
from trainers import Collapsing

from pearl.algorithms import DQN
from pearl.backends.cpu.replay import NativeReplayManager
from pearl.errors import CheckpointError
from pearl.replay.storage import DataStorage
from pearl.runtime import outcome
from pearl.runtime.checkpoint_files import manifest_crc32
from pearl.runtime.evaluation import MOST_ENVS, Evaluation
from pearl.runtime.experience import ReplayExperience
from pearl.runtime.options import parse_options
from pearl.runtime.outcome import BEST_WEIGHTS, LAST_WEIGHTS, Evaluator
from pearl.runtime.run_state import Counters, RunState
from pearl.runtime.scores import best_text, last_text
from pearl.spec import ActorSpec, TransitionSpec


class Training:
    """A trainer whose return is its skill, evaluated as a run does, one step of each kind after another."""

    def __init__(self, *arguments: str, **evaluator: Any) -> None:
        self.trainer = Collapsing(spaces.Box(0.0, 1.0, (3,), np.float32), spaces.Discrete(2))
        self.counters = Counters()
        self.recorded: list[tuple[str, int, float]] = []
        options = parse_options(None, timesteps=1000, run_dir=Path("unused"), arguments=arguments)
        self.evaluator = Evaluator(
            self.trainer,
            ActorSpec("Counting-v0"),
            options,
            self.counters,
            lambda kind, step, found: self.recorded.append((kind, step, found.mean)),
            **evaluator,
        )

    def train(self, skill: float) -> None:
        self.counters.env_steps += 100
        self.counters.gradient_steps += 10
        self.trainer.set_skill(skill)

    def look(self, *skills: float) -> Evaluation | None:
        found = None
        for skill in skills:
            self.train(skill)
            found = self.evaluator.check_progress()
        return found


def skill_in(path: Path) -> float:
    return load_file(path)["skill.weight"].item()


def test_last_and_best_are_told_apart_and_both_are_kept(tmp_path: Path) -> None:
    training = Training("--eval-episodes", "3")
    training.look(3, 9, 5)
    training.train(1)
    training.evaluator.save(tmp_path)
    training.evaluator.finish()
    assert training.recorded == [
        ("progress", 100, 3.0),
        ("progress", 200, 9.0),
        ("progress", 300, 5.0),
        ("last", 400, 1.0),
        ("best", 200, 9.0),
    ]
    summary = training.evaluator.summary()
    score = {"episodes": 3, "std": 0.0}
    assert summary["last"] == {"step": 400, "mean": 1.0, "min": 1.0, "max": 1.0, **score}
    selected = {"selected_mean": 9.0, "selected_episodes": 3}
    assert summary["best"] == {"step": 200, "mean": 9.0, "min": 9.0, "max": 9.0, **score, **selected}
    assert training.trainer.skill.weight.item() == 1.0, "the trainer keeps the last weights"
    assert (skill_in(tmp_path / LAST_WEIGHTS), skill_in(tmp_path / BEST_WEIGHTS)) == (1.0, 9.0)
    assert last_text(summary).startswith("step 400, mean return 1.00 +- 0.00")
    assert best_text(summary).startswith("step 200, mean return 9.00 +- 0.00")
    assert best_text(summary).endswith("that did not select them; selected by 9.00 over 3")


def test_runs_of_other_seeds_play_other_episodes(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: dict[str, list[range]] = {}
    run = ""

    def played(trainer: Any, actors: Any, episodes: int, seed: int, *_: Any) -> Evaluation:
        begun.setdefault(run, []).append(range(seed, seed + min(episodes, MOST_ENVS)))
        return Evaluation(np.zeros(episodes), np.zeros(episodes, int))

    monkeypatch.setattr(outcome, "evaluate", played)
    for run in ("0", "1", "2", str(2**61 + 9)):
        training = Training("--seed", run, "--until-return", "0")
        training.look(1)  # a short evaluation, and as it reaches the goal the full one
        training.evaluator.finish()
    assert [first.start for first in begun["1"]] == [10_001, 20_001, 30_001], "as those that were recorded"
    seeds = [seed for ranges in begun.values() for episodes in ranges for seed in episodes]
    assert len(seeds) == len(set(seeds)) == 4 * (20 + 100 + 100)
    assert all(0 <= seed < 2**31 for seed in seeds)


def test_the_best_weights_are_scored_by_episodes_that_did_not_select_them() -> None:
    trainer = DQN(spaces.Box(-5, 5, (4,), np.float32), spaces.Discrete(2))
    options = parse_options(None, timesteps=1000, run_dir="unused", arguments=["--eval-episodes", "20"])
    played: list[Evaluation] = []
    counters = Counters(env_steps=100, gradient_steps=10)
    evaluator = Evaluator(trainer, ActorSpec("CartPole-v1"), options, counters, lambda *what: played.append(what[2]))
    evaluator.check_progress()
    counters.gradient_steps += 1
    evaluator.finish()
    progress, last, best = played
    assert not np.array_equal(best.returns, progress.returns)
    assert np.array_equal(best.returns, last.returns), "the same weights on the same episodes"


def test_solved_weights_are_last_and_best_and_play_once(tmp_path: Path) -> None:
    # 9.5 by luck of a short evaluation does not count for more than the goal reached twice.
    training = Training("--eval-episodes", "3", "--until-return", "9")
    training.evaluator.best = outcome.Best(9.5, 20, 50, 5, {})
    solved = training.look(9)
    assert solved is not None
    training.evaluator.save(tmp_path)
    training.evaluator.finish()
    assert [kind for kind, _, _ in training.recorded] == ["progress", "solved check", "last and best"]
    last, best = training.evaluator.summary().values()
    assert isinstance(best, dict)
    assert {**best, "selected_mean": 9.0, "selected_episodes": 3} == best
    assert {key: value for key, value in best.items() if not key.startswith("selected")} == last
    assert (tmp_path / LAST_WEIGHTS).read_bytes() == (tmp_path / BEST_WEIGHTS).read_bytes()


def test_without_evaluations_there_are_last_weights_alone(tmp_path: Path) -> None:
    training = Training("--eval-episodes", "0")
    assert training.look(3, 9) is None
    training.evaluator.save(tmp_path)
    summary = training.evaluator.summary()
    assert summary == {"last": {"step": 200}, "best": None}
    assert last_text(summary) == "step 200, not evaluated"
    assert best_text(summary).startswith("none")
    assert [path.name for path in tmp_path.iterdir()] == [LAST_WEIGHTS]


def test_best_weights_that_do_not_count_any_more_do_not_stay_the_best(tmp_path: Path) -> None:
    (tmp_path / BEST_WEIGHTS).write_text("evaluated in another environment")
    for _ in range(2):  # before the last evaluation and after it
        Training().evaluator.save(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {LAST_WEIGHTS, "best_weights-earlier-001.safetensors"}


def test_an_interrupted_run_names_what_was_selected_and_not_confirmed() -> None:
    stopped = False
    training = Training("--eval-episodes", "3", should_stop=lambda: stopped)
    training.look(9, 2)
    stopped = True
    training.evaluator.finish()
    summary = training.evaluator.summary()
    assert summary["last"] == {"step": 200}
    assert summary["best"] == {"step": 100, "selected_mean": 9.0, "selected_episodes": 3}
    assert best_text(summary) == "step 100, not evaluated again; selected by 9.00 over 3"
    assert training.trainer.skill.weight.item() == 2.0


@pytest.mark.parametrize("silent_s", [0.0, 60.0])
def test_a_long_evaluation_at_the_end_is_announced(silent_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pearl.runtime.outcome._SILENT_S", silent_s)
    said: list[str] = []
    training = Training("--eval-episodes", "3", say=said.append)
    training.look(9, 2)
    assert said == []  # the display of the run goes on meanwhile
    training.evaluator.finish()
    announced = "Evaluating:     3 greedy episodes of the {} weights; Ctrl-C leaves them out"
    expected = [announced.format(which) for which in ("last", "best")]
    assert said == (expected if silent_s == 0.0 else [])


def saved_run(folder: Path) -> tuple[RunState, Training]:
    """A run that has selected weights at step 200 and is at step 300, in a checkpoint."""
    training = Training("--eval-episodes", "3")
    training.look(3, 9, 5)
    storage = DataStorage(TransitionSpec.from_spaces(spaces.Box(0.0, 1.0, (3,), np.float32), spaces.Discrete(2)), 8)
    state = RunState({}, training.trainer, ReplayExperience(NativeReplayManager(8), storage))
    state.save(folder, training.counters, training.evaluator.best)
    return state, training


def test_a_checkpoint_keeps_the_best_weights_and_their_step(tmp_path: Path) -> None:
    state, training = saved_run(tmp_path)
    training.trainer.set_skill(0)
    counters, best = state.load(tmp_path)
    assert best is not None
    assert (best.mean, best.episodes, best.env_steps, best.gradient_steps) == (9.0, 3, 200, 20)
    assert best.tensors["skill"]["weight"].item() == 9.0
    assert training.trainer.skill.weight.item() == 5.0
    assert (counters.env_steps, counters.gradient_steps) == (300, 30)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("best-env_steps", 400, "best-env_steps .* at most the env_steps of the checkpoint, 300; found 400"),
        ("best-gradient_steps", -1, "best-gradient_steps .* a whole number of at least 0; found -1"),
        ("best-mean", "high", "best-mean .* a number, .*found 'high'"),
    ],
)
def test_best_weights_that_cannot_be_the_runs_are_refused(
    tmp_path: Path, name: str, value: object, expected: str
) -> None:
    state, _ = saved_run(tmp_path)
    (path,) = tmp_path.glob("*/manifest.json")
    manifest = json.loads(path.read_text())
    manifest["counters"][name] = value
    manifest["crc32"] = manifest_crc32({key: part for key, part in manifest.items() if key != "crc32"})
    path.write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=expected):
        state.load(tmp_path)


@pytest.mark.parametrize(
    ("returns", "text"),
    [
        ((0.9, 0.95), "mean return 0.925 +- 0.025 (0.900 to 0.950)"),
        ((21.0, 500.0), "mean return 260.5 +- 239.5 (21.0 to 500.0)"),
        ((0.0, 0.0), "mean return 0.0 +- 0.0 (0.0 to 0.0)"),
        ((math.nan, 1.0), "mean return nan +- nan (nan to nan)"),
    ],
)
def test_returns_are_written_with_the_digits_that_matter(returns: tuple[float, ...], text: str) -> None:
    training = Training("--eval-episodes", "2")
    training.evaluator.last = Evaluation(np.array(returns), np.array([1, 1]))
    assert text in last_text(training.evaluator.summary())


@pytest.mark.parametrize(("means", "best"), [((math.nan, 3.0), 3.0), ((3.0, math.nan, 2.0), 3.0), ((2.0, 4.0), 4.0)])
def test_a_return_that_is_no_number_never_stays_the_best(
    monkeypatch: pytest.MonkeyPatch, means: tuple[float, ...], best: float
) -> None:
    left = iter(means)
    monkeypatch.setattr(outcome, "evaluate", lambda *_: Evaluation(np.array([next(left)]), np.array([1])))
    training = Training()
    training.look(*means)
    assert training.evaluator.best is not None
    assert training.evaluator.best.mean == best
