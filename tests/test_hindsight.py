"""Hindsight: further transitions with goals that their episode reached later, and the rewards of these goals."""

from __future__ import annotations

import json
import re
import warnings
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from goal_environments import CountUp, FlipDQN, next_step_vector  # registers PearlCountUp-v0
from gymnasium import spaces
from gymnasium.wrappers import TimeLimit
from programs import CsvPair, make_program, run, summary
from trainers import TinyDQN

import benchmarks.flip_bits
import pearl
from composer import Composer
from composer.profiling.keys import calibration_key
from composer.suggestion.suggestion import suggest, suggest_settings
from pearl.actors import hindsight
from pearl.actors.actor import Actor, ActorSetup, message_rows
from pearl.actors.environment import make_vector_env
from pearl.actors.hindsight import Goals, check_hindsight, has_goals
from pearl.algorithms import DQN, PPO, RecurrentDQN
from pearl.algorithms.trainer import make_trainer
from pearl.errors import ConfigurationError, EnvError, TrainerError
from pearl.runtime.data_flow import OffPolicy
from pearl.runtime.replay_ratio import ReplayRatio, check_samples_last, first_batch, training_absent, why_no_training
from pearl.runtime.run_state import Counters
from pearl.spec import ActorSpec, Column, ReplaySpec, TrainSpec, TransitionSpec

LENGTH, GAMMA = 5, 0.9


def actor_of(train: TrainSpec, env: str = "PearlCountUp-v0", seed: int = 3, **spec: Any) -> Actor:
    actors = ActorSpec(env, envs_per_actor=spec.pop("envs", 3), **spec)
    return Actor(ActorSetup(TinyDQN, {}, actors, train, seed))


def collect(actor: Actor, messages: int, *, relabelled_only: bool = False) -> dict[str, np.ndarray]:
    """All rows of so many messages; with `relabelled_only`, without those of the steps themselves."""
    rows = actor.setup.message_rows()
    message: dict[str, np.ndarray] = actor.transition.empty(rows)
    message |= {"counts": np.zeros(4, np.int64), "episode_return": np.zeros(rows), "episode_length": np.zeros(rows)}
    if relabelled_only:
        actor._window.push = lambda *arguments, **_: arguments[8]  # type: ignore[method-assign]
    found = []
    for _ in range(messages):
        count = actor.collect(message)
        assert count <= rows
        found.append({f.name: message[f.name][:count].copy() for f in actor.transition.fields})
    actor.close()
    return {name: np.concatenate([one[name] for one in found]) for name in found[0]}


# CountUp's observations in a row: achieved goal, desired goal, episode and step.
ACHIEVED, DESIRED, EPISODE, STEP = slice(0, 2), slice(2, 4), 4, 5


def check_rows(rows: dict[str, np.ndarray], n: int, goals: int, terminates: bool) -> Counter[tuple[int, int]]:
    """Check rows of CountUp with other goals by what they show; the pairs of steps and steps that reached the goal."""
    pairs: Counter[tuple[int, int]] = Counter()
    per_step: Counter[tuple[float, float]] = Counter()
    for obs, reward, next_obs, discount in zip(
        *(rows[name] for name in ("obs", "reward", "next_obs", "discount")), strict=True
    ):
        step, goal = int(obs[STEP]), int(obs[DESIRED][0])
        assert (obs[ACHIEVED] == [step, 2 * step]).all()
        assert (obs[DESIRED] == [goal, 2 * goal]).all()
        assert step < goal <= LENGTH, "reached by this step or a later one"
        spanned = min(n, LENGTH - step, *([goal - step] if terminates else []))
        assert reward == pytest.approx(sum(-(GAMMA**k) for k in range(spanned) if step + k + 1 != goal))
        last = step + spanned
        ends = last == (goal if terminates else LENGTH)
        assert discount == pytest.approx(0.0 if ends else GAMMA**spanned)
        expected = obs.copy()
        expected[ACHIEVED], expected[STEP] = [last, 2 * last], last
        assert (next_obs == expected).all()
        pairs[step, goal] += 1
        per_step[obs[EPISODE], step] += 1
    assert set(per_step.values()) <= {goals, *range(goals)}
    assert sum(count != goals for count in per_step.values()) <= 1, "only the last one is under way"
    return pairs


@pytest.mark.parametrize("goals", [1, 4])
@pytest.mark.parametrize(
    ("n", "kind", "spec"),
    [
        (1, "batches", {}),
        (3, "batches", {}),
        (7, "single", {}),
        (2, "reversed", {}),
        (1, "terminates", {}),
        (3, "terminates", {"envs": 1}),
        (3, "batches", {"vectorization": "vector_entry_point"}),
    ],
)
def test_each_step_comes_once_more_with_goals_of_later_steps(goals: int, n: int, kind: str, spec: Any) -> None:
    train = TrainSpec(n_step=n, gamma=GAMMA, hindsight_goals=goals)
    rows = collect(actor_of(train, env_kwargs={"kind": kind}, **spec), 60, relabelled_only=True)
    pairs = check_rows(rows, n, goals, kind == "terminates")
    assert len(rows["obs"]) >= goals * (60 * 4 - 3 * LENGTH)
    if goals == 4 and not spec:
        assert set(pairs) == {(t, g) for t in range(LENGTH) for g in range(t + 1, LENGTH + 1)}
        for t in range(LENGTH):
            counts = [pairs[t, g] for g in range(t + 1, LENGTH + 1)]
            assert min(counts) > 0.6 * np.mean(counts), "all later steps alike"


def test_processes_of_environments_are_asked_through_one_of_their_own() -> None:
    train = TrainSpec(gamma=GAMMA, hindsight_goals=2)
    actor = actor_of(train, vectorization="async", envs=2)
    assert actor._hindsight is not None
    own = actor._hindsight._own
    assert own is not None
    check_rows(collect(actor, 8, relabelled_only=True), 1, 2, terminates=False)


def test_steps_themselves_are_as_without_it() -> None:
    train = TrainSpec(n_step=2, gamma=GAMMA)
    plain = collect(actor_of(train), 12)
    with_goals = collect(actor_of(TrainSpec(n_step=2, gamma=GAMMA, hindsight_goals=3)), 12)
    own = with_goals["obs"][:, DESIRED.start] == -1
    for name, column in plain.items():
        assert (with_goals[name][own] == column).all()
    assert 2.5 * len(plain["obs"]) < (~own).sum() <= 3 * len(plain["obs"])


def test_what_waits_stays_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hindsight, "_LONGEST", 70)  # more than there is room for at first
    train = TrainSpec(gamma=GAMMA, hindsight_goals=2)
    actor = actor_of(train, env_kwargs={"length": 10_000}, envs=2)
    made = actor._hindsight
    assert made is not None
    rows = collect(actor, 50, relabelled_only=True)
    goals, steps = rows["obs"][:, DESIRED.start], rows["obs"][:, STEP]
    assert (goals > steps).all()
    assert set(steps) >= set(range(140))
    assert (rows["next_obs"][:, STEP] == steps + 1).all()
    assert ((goals - 1) // 70 == steps // 70).all(), "a goal of the same 70 steps"
    assert (rows["discount"] == np.float32(GAMMA)).all(), "the episode goes on"
    assert len(made._waiting) <= 2
    assert made._room < 200


def test_numbers_as_goals() -> None:
    actor = actor_of(TrainSpec(gamma=GAMMA, hindsight_goals=2), env_kwargs={"number": True, "kind": "single"})
    rows = collect(actor, 20, relabelled_only=True)
    count = LENGTH + 2
    achieved, desired = rows["next_obs"][:, :count].argmax(1), rows["obs"][:, count : 2 * count].argmax(1)
    assert (rows["obs"][:, count : 2 * count].sum(1) == 1).all()
    assert (rows["reward"] == np.where(achieved == desired, 0.0, -1.0)).all()
    assert 0 < (achieved == desired).sum() < len(achieved)


def test_a_reset_forgets_what_is_under_way() -> None:
    actor = actor_of(TrainSpec(gamma=GAMMA, hindsight_goals=2))
    made = actor._hindsight
    assert made is not None
    message: dict[str, np.ndarray] = actor.transition.empty(actor.setup.message_rows())
    message |= {"counts": np.zeros(4, np.int64), "episode_return": np.zeros(99), "episode_length": np.zeros(99)}
    for _ in range(3):
        actor.collect(message)
    assert made._waiting
    assert made._length.any()
    actor.reset(5)
    assert not made._waiting
    assert not made._length.any()
    actor.close()


# --- what is wrong ----------------------------------------------------------------------------------------------------


def test_an_environment_without_goals_is_named() -> None:
    for kind, words in (
        ("CartPole-v1", r"CartPole-v1 has observations of Box of shape \(4,\), float32\."),
        ("PearlCountUp-v0", "compute_reward.*of PearlCountUp-v0, which it does not have"),
    ):
        kwargs = {"kind": "no reward"} if "Count" in kind else {}
        with pytest.raises(EnvError, match=f"hindsight_goals needs .*{words}") as found:
            actor_of(TrainSpec(hindsight_goals=1), kind, env_kwargs=kwargs)
        assert "hindsight_goals to 0" in str(found.value)
    goals = {"achieved_goal": spaces.Box(0, 1, (2,)), "desired_goal": spaces.Box(0, 1, (3,))}
    with pytest.raises(EnvError, match=r"both need the same space; Odd-v0 has Box\(.*\(2,\).* and Box\(.*\(3,\)"):
        Goals.of(spaces.Dict(goals), "Odd-v0")
    with pytest.raises(EnvError, match="Odd-v0 has observations of arrays"):
        Goals.of(None, "Odd-v0")
    with pytest.raises(EnvError, match=r"Odd-v0 has observations of Dict\('a': Discrete\(2\)\)"):
        Goals.of(spaces.Dict({"a": spaces.Discrete(2)}), "Odd-v0")


def test_the_further_environment_is_closed_where_it_lacks_something(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []
    monkeypatch.setattr(CountUp, "close", lambda env: closed.append(env))
    actors = ActorSpec("PearlCountUp-v0", env_kwargs={"kind": "no reward"})
    transition = TransitionSpec.from_spaces(spaces.Box(-1, 9, (6,)), spaces.Discrete(3))
    stepped_as_one: Any = SimpleNamespace()
    with pytest.raises(EnvError, match="which it does not have"):
        hindsight.Hindsight(TrainSpec(hindsight_goals=1), transition, actors, stepped_as_one, np.random.default_rng(0))
    assert len(closed) == 1


def test_an_environment_that_is_only_a_vector_is_named() -> None:
    gym.register("PearlOnlyCounts-v0", vector_entry_point=next_step_vector)
    try:
        with pytest.raises(EnvError, match=r"and PearlOnlyCounts-v0 can be made only as a vector. Register it"):
            actor_of(TrainSpec(hindsight_goals=1), "PearlOnlyCounts-v0", vectorization="vector_entry_point")
    finally:
        del gym.registry["PearlOnlyCounts-v0"]


def test_features_that_do_not_go_together_are_named() -> None:
    space = spaces.Dict(dict.fromkeys(("achieved_goal", "desired_goal"), spaces.Box(0, 1, (2,), np.float32)))
    plain = TransitionSpec.from_spaces(spaces.flatten_space(space), spaces.Discrete(2))
    train, replay = TrainSpec(hindsight_goals=4), ReplaySpec(1000)
    check_hindsight(train, plain, replay, space, "E-v0")
    check_hindsight(TrainSpec(), plain.sequences(4, 2, 8), replay, None, "E-v0")
    for transition, other, what in (
        (plain.sequences(4, 2, 8), replay, "sequences of a recurrent policy"),
        (plain.with_columns(Column("mine", (), "float32", make=_nothing)), replay, "the further columns mine"),
        (plain.normalized(observations=True, rewards=False), replay, "normalize_observations and reward_stand"),
        (plain, ReplaySpec(1000, share_next_obs=True), "share_next_obs of the replay"),
    ):
        with pytest.raises(ConfigurationError, match=f"hindsight_goals = 4 does not go together with {what}.*: leave"):
            check_hindsight(train, transition, other, space, "E-v0")
    with pytest.raises(ConfigurationError, match="hindsight_goals must be a whole number of at least 0; found -1"):
        TrainSpec(hindsight_goals=-1)
    env = gym.make("CartPole-v1")
    with pytest.raises(TrainerError, match="hindsight_goals"):
        make_trainer(PPO, env.observation_space, env.action_space, settings={"hindsight_goals": 4})


def _nothing(step: Any) -> np.ndarray:
    return np.zeros(len(step.obs))


@pytest.mark.parametrize("env", ["CartPole-v1", "PearlCountUp-v0"])
def test_composing_says_what_is_missing(tmp_path: Path, env: str) -> None:
    wrong: tuple[type[Exception], str] = (EnvError, "needs an environment with goals")
    trainer: type = TinyDQN
    if env != "CartPole-v1":
        trainer, wrong = RecurrentDQN, (ConfigurationError, "together with sequences")
    with pytest.raises(wrong[0], match=wrong[1]):
        make_program(tmp_path, env=env, trainer=trainer, training={"hindsight_goals": 4})


def test_rewards_that_are_not_those_of_the_steps_are_told_of() -> None:
    said = "compute_reward of PearlCountUp-v0 says -1 where a step brought 3, and differs in 5 of 5 steps"
    with pytest.warns(UserWarning, match=said) as found:
        collect(actor_of(TrainSpec(hindsight_goals=1), env_kwargs={"kind": "other rewards"}), 4)
    assert len(found) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        collect(actor_of(TrainSpec(hindsight_goals=1)), 4)


def test_rewards_that_are_no_numbers_end_the_actor(monkeypatch: pytest.MonkeyPatch) -> None:
    actor = actor_of(TrainSpec(hindsight_goals=1))
    made = actor._hindsight
    assert made is not None
    for reward, words in (
        (lambda a, d, info: np.full(np.shape(a)[:-1], np.nan), "returned nan for the achieved goal"),
        (lambda a, d, info: np.full(np.shape(a)[:-1], 1e39), "returned 1e.39 for the achieved goal"),
        (lambda a, d, info: np.ones(3), "failed with goals .*it returned 3 numbers for one pair of goals"),
        (lambda a, d, info: info["distance"], "failed with goals .*an empty info: KeyError: 'distance'"),
    ):
        made._in_batches.clear()
        monkeypatch.setattr(made, "_reward", reward)
        with pytest.raises(EnvError, match=words):
            made._rewards(np.ones((6, 2), np.float32), np.ones((6, 2), np.float32))
    actor.close()


def test_sums_over_the_wrong_axes_are_no_batches() -> None:
    actor = actor_of(TrainSpec(hindsight_goals=1))
    made = actor._hindsight
    assert made is not None
    made._places = Goals(slice(0, 12), slice(12, 24), spaces.Box(-1, 1, (4, 3), np.float32))
    made._reward = lambda a, d, info: -1.0 * (np.abs(a - d).sum(axis=(0, 1)) > 0).max()
    goals = np.ones((4, 12), np.float32)
    assert made._rewards(goals, 0 * goals).tolist() == [-1, -1, -1, -1]
    # Of three goals (4, 3), a sum over the axes of one goal has three numbers, too.
    made._reward = lambda a, d, info: -1.0 * (np.abs(a - d).sum(axis=(0, 1) if np.ndim(a) > 2 else None) > 0)
    made._in_batches.clear()
    assert made._rewards(goals, 0 * goals).tolist() == [-1, -1, -1, -1]
    assert made._in_batches == {"compute_reward": False}
    made._reward, made._in_batches["compute_reward"] = lambda a, d, info: np.ones(3), True
    with pytest.raises(EnvError, match="it returned 3 numbers for 4 pairs of goals"):
        made._rewards(goals, goals)
    actor.close()


def test_a_function_may_write_to_its_arguments() -> None:
    actor = actor_of(TrainSpec(hindsight_goals=1))
    made = actor._hindsight
    assert made is not None

    def reward(achieved: np.ndarray, desired: np.ndarray, info: Any) -> Any:
        achieved -= desired
        return -np.abs(achieved).sum(-1)

    made._reward = reward
    achieved, desired = np.full((6, 2), 5, np.float32), np.full((6, 2), 2, np.float32)
    for _ in range(2):  # at the trial, and after it
        assert made._rewards(achieved, desired).tolist() == [-6] * 6
    assert (achieved == 5).all()
    assert made._in_batches == {"compute_reward": True}
    actor.close()


@pytest.mark.parametrize("said", [None, [np.nan]])
def test_an_end_that_is_neither_true_nor_false_ends_the_actor(said: Any) -> None:
    actor = actor_of(TrainSpec(hindsight_goals=1))
    made = actor._hindsight
    assert made is not None
    made._terminated = lambda a, d, info: said
    goals = np.ones((6, 2), np.float32)
    with pytest.raises(EnvError, match=r"compute_terminated of PearlCountUp-v0 returned nan .*Have it return True"):
        made._ends(goals, goals, np.zeros(6, bool))
    actor.close()


@pytest.mark.parametrize(
    ("achieved", "desired", "alike"),
    [
        (spaces.Box(0, 1, (2,), np.float64), spaces.Box(-9, 9, (2,), np.float32), True),
        (spaces.Box(0, 1, (2,), np.float32), spaces.Box(0, 9, (2,), np.int64), False),
        (spaces.Box(0, 4, (), np.int64), spaces.Discrete(5), False),
        (spaces.Dict(a=spaces.Box(0, 1, (2,))), spaces.Box(0, 1, (2,)), False),
        (spaces.Discrete(5), spaces.Discrete(5), True),
        (spaces.Discrete(5), spaces.Discrete(7), False),
        (spaces.Discrete(5), spaces.Discrete(5, start=1), False),
        (spaces.MultiDiscrete([3, 4]), spaces.MultiDiscrete([4, 3]), False),
        (spaces.MultiBinary(3), spaces.MultiBinary(3), True),
        (spaces.Tuple([spaces.Discrete(5)]), spaces.Tuple([spaces.Discrete(5, start=1)]), False),
        (spaces.Dict(a=spaces.Box(0, 1, (2,))), spaces.Dict(a=spaces.Box(0, 2, (2,))), True),
        (spaces.Dict(a=spaces.Box(0, 1, (2,))), spaces.Dict(b=spaces.Box(0, 1, (2,))), False),
    ],
)
def test_both_goals_need_the_same_values(achieved: spaces.Space[Any], desired: spaces.Space[Any], alike: bool) -> None:
    space = spaces.Dict({"achieved_goal": achieved, "desired_goal": desired})
    if alike:
        assert Goals.of(space, "Odd-v0").space == desired
    else:
        with pytest.raises(EnvError, match="both need the same space; Odd-v0 has"):
            Goals.of(space, "Odd-v0")


def test_the_goals_that_a_function_fails_with_are_named() -> None:
    actor = actor_of(TrainSpec(hindsight_goals=1))
    made = actor._hindsight
    assert made is not None

    def reward(achieved: np.ndarray, desired: np.ndarray, info: Any) -> Any:
        if np.any(achieved == 4):
            raise ValueError("no way")
        return -1.0 if achieved.ndim == 1 else -np.ones(len(achieved))

    made._reward = reward
    rows = np.repeat(np.arange(6, dtype=np.float32), 2).reshape(6, 2)
    with pytest.raises(EnvError, match=r"failed with goals \[4\. 4\.\] and \[0\. 0\.\] and an empty .*: no way"):
        made._rewards(rows, 0 * rows)
    made._in_batches["compute_reward"] = True
    with pytest.raises(EnvError, match=r"goals \[0\. 0\.\] and \[0\. 0\.\], the first of 6 pairs at once, and"):
        made._rewards(rows, 0 * rows)
    actor.close()


@pytest.mark.parametrize("cause", ["another", "its goal", "time"])
def test_an_end_of_another_cause_is_one_for_all_goals(cause: str) -> None:
    offered = {"kind": "terminates", "length": 99 if cause == "time" else LENGTH}
    limit = (TimeLimit, {"max_episode_steps": LENGTH})  # cuts an episode short, which ends it for no goal
    actor = actor_of(TrainSpec(n_step=2, gamma=GAMMA, hindsight_goals=2), env_kwargs=offered, wrappers=[limit])
    made = actor._hindsight
    assert made is not None
    # The goal of the episode itself is -1. Others never end one here.
    made._terminated = lambda a, d, info: cause == "its goal" and np.take(d, 0, axis=-1) == -1
    rows = collect(actor, 20, relabelled_only=True)
    at_end = rows["next_obs"][:, STEP] == LENGTH
    assert at_end.any()
    assert ((rows["discount"] == 0) == (at_end & (cause == "another"))).all()


def test_an_actor_that_asks_for_many_rewards_shows_that_it_lives() -> None:
    beats: list[int] = []
    actors = ActorSpec("PearlCountUp-v0", env_kwargs={"kind": "single", "length": 3})
    setup = ActorSetup(TinyDQN, {}, actors, TrainSpec(hindsight_goals=20), 3)
    actor = Actor(setup, on_step=lambda: beats.append(1))
    collect(actor, 1)
    assert len(beats) >= 4 + 20 * 3, "of each step, and of each goal of the three steps of the episode"


# --- in programs ------------------------------------------------------------------------------------------------------


def test_the_replay_ratio_counts_steps_alone() -> None:
    train = TrainSpec(batch_size=10, replay_ratio=4.0, learning_starts=100, hindsight_goals=4)
    assert first_batch(train) == 500
    assert message_rows(ActorSpec("CartPole-v1", envs_per_actor=2), train) == 2 * 5 * 5
    counters = Counters(collected=500, stored=500)
    ratio = ReplayRatio(train, counters, 50)
    assert ratio.batches_allowed() == 0
    counters.collected = counters.stored = 1000  # 100 further steps
    assert ratio.batches_allowed() == 40
    counters.samples = 400
    assert ratio.batches_allowed() == 0
    assert ratio.achieved == pytest.approx(4.0)
    assert training_absent(train, 101, Counters()) == ""
    assert "will not train" in training_absent(train, 100, Counters())
    why = why_no_training(train, Counters(stored=396, env_steps=400))
    assert "A step brings 5, 4 of them once its episode has ended" in why
    assert "A step" not in why_no_training(TrainSpec(), Counters())
    once = ReplaySpec(10_000, mode="fifo", max_times_sampled=1)
    check_samples_last(once, train, 50)
    with pytest.raises(ConfigurationError, match="Lower replay_ratio to 5"):
        check_samples_last(once, TrainSpec(batch_size=10, replay_ratio=6.0, hindsight_goals=4), 50)
    OffPolicy(once, ActorSpec("CartPole-v1"), train)


@pytest.mark.parametrize("goals", [4, pytest.param(0, marks=pytest.mark.slow)])
def test_a_program_learns_to_flip_bits(tmp_path: Path, quick_profiles: None, goals: int) -> None:
    program = make_program(
        tmp_path,
        env="FlipBits-v0",
        env_kwargs={"bits": 8},
        trainer=FlipDQN,
        settings={"hindsight_goals": goals},
        capacity=40_000,
        timesteps=8_000,
        training={"batch_size": 64, "replay_ratio": 64.0, "learning_starts": 500},
    )
    assert ("hindsight_goals=4" in program.read_text()) == bool(goals)
    common = ("--serial", "--no-plot", "--eval-episodes", "50", "--checkpoint-interval", "4000", "--run-dir")
    code, output = run(program, *common, str(tmp_path / "run"))
    assert code == 0, output
    found = summary(tmp_path / "run")
    assert found["replay_ratio"] == pytest.approx(64, rel=0.1)
    # From a random state, half of the eight bits are wrong.
    assert (found["last"]["mean"] > -4.5) == bool(goals)
    if goals:
        (half, _) = sorted((tmp_path / "run/checkpoints").iterdir())
        assert json.loads((half / "manifest.json").read_text())["counters"]["stored"] > 4.5 * 4000


def test_the_guide_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parent.parent / "docs" / "environments.md").read_text(encoding="utf-8")
    section = page.partition("\n## Goals\n")[2]
    texts = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", section, re.DOTALL))
    assert list(texts) == ["reach.py", "compose_reach.py"]
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PEARL_BUDGET_S")  # as for a user: a torch Learner that is far too slow is not measured
    code, output = run(tmp_path / "compose_reach.py")
    assert code == 0, output
    code, output = run(tmp_path / "reach_runtime.py", "--timesteps", "1000", "--eval-episodes", "2", "--no-plot")
    assert code == 0, output
    found = pearl.load_policy(tmp_path / "runs/reach_runtime")
    place = np.zeros(2, np.float32)
    assert found.predict({"achieved_goal": place, "desired_goal": place}).shape == (2,)


def test_several_learners_count_steps_alone(tmp_path: Path, quick_profiles: None) -> None:
    program = make_program(
        tmp_path,
        env="FlipBits-v0",
        trainer=FlipDQN,
        learners={"count": 2, "average_every": 4},
        timesteps=1_500,
        training={"batch_size": 64, "replay_ratio": 32.0, "learning_starts": 200},
    )
    common = ("--no-plot", "--eval-episodes", "0", "--run-dir", str(tmp_path / "run"))
    code, output = run(program, *common)
    assert code == 0, output
    assert summary(tmp_path / "run")["replay_ratio"] == pytest.approx(32, rel=0.25)


def test_it_is_suggested(quick_profiles: None) -> None:
    found = suggest("FlipBits-v0")
    values = {choice.name: choice.value for choice in (*found.trainer, *found.replay)}
    assert (values["hindsight_goals"], values["n_step"]) == (4, 1)
    assert values["size"] == 1_000_000
    (why,) = (choice.reason for choice in found.replay if choice.name == "size")
    assert why.startswith("300,000 steps, each stored 5 times, of 176 B each")


def test_the_size_follows_a_number_of_goals_that_is_stated(quick_profiles: None) -> None:
    env = gym.make("FlipBits-v0")
    spaces_of = gym.spaces.flatten_space(env.observation_space), env.action_space
    actors = ActorSpec("FlipBits-v0", envs_per_actor=2)
    cases: tuple[tuple[type, dict[str, int], str, int], ...] = (
        (DQN, {"hindsight_goals": 2}, "20,000 steps, each stored 3 times,", 60_000),
        (FlipDQN, {}, "20,000 steps, each stored 5 times,", 100_000),
        (DQN, {"hindsight_goals": 0}, "20,000 steps of", 20_000),
    )
    for trainer, fixed, stored, slots in cases:
        found = suggest_settings(trainer, actors, *spaces_of, {**fixed, "timesteps": 20_000})
        (size,) = (choice for choice in found.replay if choice.name == "size")
        assert size.reason.startswith(stored)
        assert size.value == slots
    with pytest.raises(ConfigurationError, match="hindsight_goals must be a whole number of at least 0; found '2'"):
        suggest_settings(DQN, actors, *spaces_of, {"hindsight_goals": "2"})


def test_a_silent_environment_with_goals_is_silent_to_algorithms_without_hindsight(quick_profiles: None) -> None:
    gym.register("PearlFarCount-v0", CountUp, max_episode_steps=1_000, kwargs={"length": 10_000})
    try:
        for algorithm, gamma in (("DQN", 0.99), ("PPO", 0.998), ("RecurrentDQN", 0.998)):
            found = {choice.name: choice for choice in suggest("PearlFarCount-v0", algorithm=algorithm).trainer}
            assert found["gamma"].value == gamma
            assert ("hindsight_goals" in found) == (algorithm == "DQN")
    finally:
        del gym.registry["PearlFarCount-v0"]


@pytest.mark.parametrize("shared", [False, True])
def test_no_goals_are_chosen_for_a_replay_without(csv_pair: CsvPair, quick_profiles: None, shared: bool) -> None:
    devices, connections = csv_pair("cpu0,cpu,cpu,,2,60")
    composer = Composer(progress=False)
    composer.set_device_file(devices)
    composer.set_connection_file(connections)
    composer.set_actors(1, env=benchmarks.flip_bits.FlipBits, envs_per_actor=2)
    composer.set_train_function(DQN, settings="auto", implementation="native")
    composer.set_replay(5_000, share_next_obs=shared)
    composer.run(budget_s=0)
    chosen = {choice.name: choice.value for choice in composer.suggestion.trainer}
    assert chosen.get("hindsight_goals") == (None if shared else 4)


def test_goals_are_found_however_environments_are_stepped() -> None:
    for env, kwargs, kinds, found in (
        ("PearlCountUp-v0", {}, ("sync", "async", "vector_entry_point"), True),
        ("PearlCountUp-v0", {"kind": "no reward"}, ("sync", "vector_entry_point"), False),
        ("CartPole-v1", {}, ("sync", "vector_entry_point"), False),
    ):
        for kind in kinds:
            actors = ActorSpec(env, envs_per_actor=2, env_kwargs=kwargs, vectorization=kind)
            envs = make_vector_env(actors)
            assert has_goals(actors, envs) == found
            envs.close()


def test_times_are_measured_for_the_number_of_goals() -> None:
    space = spaces.Box(0, 1, (2,), np.float32)
    transition, actors = TransitionSpec.from_spaces(space, spaces.Discrete(2)), ActorSpec("FlipBits-v0")
    keys = set()
    for goals in (0, 1, 4):
        problem: Any = SimpleNamespace(transition=transition, actors=actors, train=TrainSpec(hindsight_goals=goals))
        keys.add(calibration_key(problem, "replay", SimpleNamespace(absent=True), "f", {}, str))  # type: ignore[arg-type]
    assert len(keys) == 3
