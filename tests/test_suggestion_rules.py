"""The rules that choose settings, over generated spaces, random steps and step times."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, get_args

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from pearl.algorithms import ALGORITHMS, DQN, PPO, SAC, TD3
from pearl.algorithms.suggestions import (
    PATIENCE,
    Choice,
    Facts,
    RandomSteps,
    Signal,
    choose_learning_rate,
    choose_normalization,
    choose_scaling,
    choose_sizes,
    signal_of,
)
from pearl.algorithms.trainer import make_trainer
from pearl.spec import ActorSpec, RolloutSpec, TrainSpec, check_minibatches

VECTORS = st.integers(1, 60).map(lambda n: spaces.Box(-1.0, 1.0, (n,), np.float32))
IMAGES = st.sampled_from([(4, 84, 84), (3, 64, 96)]).map(lambda shape: spaces.Box(0, 255, shape, np.uint8))
ACTIONS = st.one_of(
    st.integers(2, 20).map(spaces.Discrete),
    st.integers(1, 10).map(lambda n: spaces.Box(-2.0, 2.0, (n,), np.float32)),
    st.integers(1, 3).map(lambda n: spaces.Box(-np.inf, np.inf, (n,), np.float32)),
    st.lists(st.integers(2, 5), min_size=1, max_size=3).map(spaces.MultiDiscrete),
    st.integers(1, 5).map(spaces.MultiBinary),
)


@st.composite
def all_facts(draw: st.DrawFn, observations: Any = None) -> Facts:
    space = draw(VECTORS if observations is None else observations)
    episodes = draw(st.integers(0, 50))
    tried = RandomSteps(
        steps=draw(st.integers(10, 3200)),
        step_us=draw(st.floats(1.0, 1e6)),
        episodes=episodes,
        terminated=draw(st.integers(0, episodes)),
        mean_length=draw(st.floats(1.0, 1e5)) if episodes else 0.0,
        reward_size=draw(st.floats(0.0, 1e4)),
        signal=draw(st.sampled_from(get_args(Signal))),
        deviations=() if len(space.shape) > 1 else tuple(draw(st.floats(0.0, 1e3)) for _ in range(space.shape[0])),
    )
    us = draw(st.none() | st.floats(1.0, 1e4))
    return Facts(
        observation_space=space,
        action_space=draw(ACTIONS),
        tried=tried,
        time_limit=draw(st.none() | st.integers(1, 100_000)),
        env_count=draw(st.integers(1, 64)),
        fixed=draw(st.just({}) | st.fixed_dictionaries({"timesteps": st.integers(100, 100_000)})),
        update_us=lambda sizes, batch: None if us is None else us * sum(sizes) / 128 * batch / 64,
    )


def facts(observations: Any = None, actions: Any = None, **changes: Any) -> Facts:
    tried = RandomSteps(**{"steps": 3200, "step_us": 10.0, "episodes": 9, "mean_length": 200.0, **changes})
    return Facts(
        observation_space=observations or spaces.Box(-1.0, 1.0, (3,)),
        action_space=actions or spaces.Discrete(2),
        tried=tried,
        time_limit=1000,
        update_us=lambda sizes, batch: sizes[0] * batch / 64 / 64 * 10.0,
    )


def values(choices: tuple[Choice, ...]) -> dict[str, Any]:
    names = [choice.name for choice in choices]
    assert len(set(names)) == len(names), "each setting is chosen once"
    assert all(choice.reason and "\n" not in choice.reason for choice in choices)
    return {choice.name: choice.value for choice in choices}


@settings(max_examples=50, deadline=None)
@given(all_facts())
def test_an_algorithm_is_found_and_takes_its_settings(found: Facts) -> None:
    recommended = [name for name, algorithm in ALGORITHMS.items() if algorithm.recommended(found)]
    assert recommended, "some algorithm takes each of these spaces"
    chosen = ALGORITHMS[recommended[0]]
    chosen_values = values(chosen.suggestions(found))
    training = {f.name: chosen_values.pop(f.name) for f in dataclasses.fields(TrainSpec) if f.name in chosen_values}
    rollout = {f.name: chosen_values.pop(f.name) for f in dataclasses.fields(RolloutSpec) if f.name in chosen_values}
    make_trainer(chosen, found.observation_space, found.action_space, settings=chosen_values)  # raises for a wrong one
    train = TrainSpec(**training)
    if chosen.data_flow() == "rollout":
        check_minibatches(RolloutSpec(**rollout), ActorSpec("Any-v0", envs_per_actor=found.env_count), train)
    else:
        assert 1 <= train.learning_starts < found.timesteps
        assert train.replay_ratio >= train.batch_size / 4


@pytest.mark.parametrize("name", ALGORITHMS)
def test_settings_without_effect_are_not_chosen(name: str) -> None:
    assert not ALGORITHMS[name]._unused & values(ALGORITHMS[name].suggestions(facts())).keys()


@pytest.mark.parametrize("name", ["REDQ", "DroQ"])
@pytest.mark.parametrize(("ratio", "delay"), [(0.5, 1), (1.0, 1), (8.0, 8), (20.0, 20), (50.0, 20)])
def test_the_policy_of_an_ensemble_moves_once_for_an_environment_step(name: str, ratio: float, delay: int) -> None:
    fixed = {"batch_size": 64, "replay_ratio": 64 * ratio}
    chosen = values(ALGORITHMS[name].suggestions(dataclasses.replace(facts(), fixed=fixed)))
    assert chosen["policy_delay"] == delay


def test_a_rollout_that_no_minibatch_divides_is_one_minibatch() -> None:
    found = dataclasses.replace(facts(), fixed={"horizon": 67}, env_count=1)
    assert values(PPO.suggestions(found))["batch_size"] == 67


@settings(max_examples=50, deadline=None)
@given(all_facts())
def test_every_algorithm_has_settings_for_the_actions_that_it_takes(found: Facts) -> None:
    for algorithm in ALGORITHMS.values():
        if type(found.action_space).__name__ in algorithm._action_kinds:
            known = {name for base in algorithm.__mro__ for name in vars(base)}
            assert set(values(algorithm.suggestions(found))) <= known


@settings(max_examples=25, deadline=None)
@given(all_facts(IMAGES))
def test_images_get_the_nature_cnn_and_nothing_of_mlps(found: Facts) -> None:
    first = next(algorithm for algorithm in ALGORITHMS.values() if algorithm.recommended(found))
    assert first.__name__ == ("DQN" if isinstance(found.action_space, spaces.Discrete) else "PPO")
    assert "hidden_sizes" not in values(first.suggestions(found))


@settings(max_examples=50, deadline=None)
@given(all_facts(), st.sampled_from([(256, 128, 64), (128, 64, 32), (64,)]))
def test_training_takes_about_as_long_as_it_may(found: Facts, batches: tuple[int, ...]) -> None:
    updates = (0.25, 0.5, 1.0, 2.0)
    sized = choose_sizes(found, batches=batches, updates=updates)
    assert sized.batch_size in batches
    assert sized.updates in updates
    us = found.update_us(sized.hidden_sizes, sized.batch_size)
    if us is None:
        assert sized.updates == 1.0
        return
    allowed = PATIENCE * found.tried.step_us
    least = (sized.batch_size, sized.updates) == (batches[-1], updates[0])
    assert sized.updates * us <= allowed or least
    if sized.updates < updates[-1]:
        assert 2 * sized.updates * us > allowed or 2 * sized.updates * us >= found.tried.step_us


@settings(max_examples=50, deadline=None)
@given(all_facts(), st.floats(1.0, 50.0))
def test_a_slower_environment_never_gets_less_training(found: Facts, factor: float) -> None:
    slower = dataclasses.replace(found, tried=dataclasses.replace(found.tried, step_us=found.tried.step_us * factor))
    before, after = (choose_sizes(f, batches=(128, 64, 32), updates=(0.25, 0.5, 1.0)) for f in (found, slower))
    assert after.updates * after.batch_size >= before.updates * before.batch_size
    assert after.hidden_sizes >= before.hidden_sizes


def test_what_is_fixed_stays_and_the_rest_follows_it() -> None:
    fixed = {"hidden_sizes": (32,), "batch_size": 48, "replay_ratio": 96.0}
    sized = choose_sizes(dataclasses.replace(facts(), fixed=fixed), batches=(128, 64), updates=(1.0,))
    assert (sized.hidden_sizes, sized.batch_size, sized.updates) == ((32,), 48, 2.0)
    free = choose_sizes(dataclasses.replace(facts(), fixed={"replay_ratio": math.inf}), batches=(64,), updates=(1.0,))
    assert free.updates == math.inf
    short = dataclasses.replace(facts(), fixed={"timesteps": 1500})
    found = values(DQN.suggestions(short))
    assert found["learning_starts"] == 750
    assert found["exploration"].steps == 150


def test_the_learning_rate_falls_with_the_width() -> None:
    rates = [choose_learning_rate(facts(), (width, width)).value for width in (16, 64, 128, 256, 512)]
    assert rates == sorted(rates, reverse=True)
    assert rates[3] == 3e-4
    assert rates[0] == 1e-3


def test_where_random_actions_find_nothing_exploration_is_correlated_and_returns_are_longer() -> None:
    box = spaces.Box(-1.0, 1.0, (1,))
    silent = facts(actions=box, signal="action")
    assert silent.silent
    assert TD3.recommended(silent)
    found = values(TD3.suggestions(silent))
    assert type(found["exploration"]).__name__ == "OrnsteinUhlenbeck"
    assert found["n_step"] > values(TD3.suggestions(facts(actions=box)))["n_step"]
    for heard in (facts(actions=box), facts(actions=box, signal="action", terminated=1)):
        assert not heard.silent
        assert not TD3.recommended(heard)
        assert SAC.recommended(heard)


def test_the_discount_looks_as_far_as_episodes_last() -> None:
    def discount(limit: int | None, **tried: Any) -> float:
        found = dataclasses.replace(facts(**tried), time_limit=limit)
        return float(values(DQN.suggestions(found))["gamma"])

    assert discount(20) == 0.95
    assert discount(None) == discount(500) == 0.99
    assert discount(500, signal="constant") == 0.996


def test_observations_are_scaled_where_that_brings_them_closer_to_one() -> None:
    box = spaces.Box(np.float32([-1.2, -0.07]), np.float32([0.6, 0.07]))
    tiny = choose_scaling(facts(box, deviations=(0.1, 0.008)))
    assert tiny is not None
    assert tiny.value
    usual = choose_scaling(facts(spaces.Box(-8.0, 8.0, (2,)), deviations=(0.9, 1.1)))
    assert usual is not None
    assert not usual.value
    assert choose_scaling(facts(spaces.Box(-np.inf, np.inf, (2,)), deviations=(0.9, 1.1))) is None
    wide = choose_normalization(facts(deviations=(1.0, 50.0, 0.0)))
    assert wide is not None
    assert wide.value


@pytest.mark.parametrize(
    ("space", "rewards", "signal"),
    [
        (spaces.Discrete(2), lambda actions, rng: np.full(len(actions), -1.0), "constant"),
        (spaces.Discrete(2), lambda actions, rng: np.zeros(len(actions)), "constant"),
        (spaces.Discrete(3), lambda actions, rng: -0.1 * actions, "action"),
        (spaces.Box(-1, 1, (2,)), lambda actions, rng: -0.1 * (actions**2).sum(axis=1), "action"),
        (spaces.Box(-1, 1, (2,)), lambda actions, rng: rng.normal(size=len(actions)), "state"),
        (spaces.MultiDiscrete([2, 3]), lambda actions, rng: actions.sum(axis=1) * 1.0, "action"),
        (spaces.MultiDiscrete([2, 3]), lambda actions, rng: rng.normal(size=len(actions)), "state"),
    ],
)
def test_rewards_that_say_nothing_of_the_state_are_told(space: Any, rewards: Any, signal: Signal) -> None:
    rng = np.random.default_rng(0)
    space.seed(0)
    actions = np.stack([space.sample() for _ in range(200)])
    assert signal_of(rewards(actions, rng), actions, space) == signal


def test_with_goals_hindsight_is_chosen_where_it_can_be() -> None:
    silent: dict[str, Any] = {"signal": "constant", "episodes": 0}
    box = spaces.Box(-1.0, 1.0, (2,))
    for actions, algorithm in ((None, DQN), (box, SAC)):
        found = facts(actions=actions, goals=True, **silent)
        assert next(name for name, one in ALGORITHMS.items() if one.recommended(found)) == algorithm.__name__
        chosen = values(algorithm.suggestions(found))
        assert (chosen["hindsight_goals"], chosen["n_step"]) == (4, 1)
        others = {"normalize_observations": True, "reward_standardization": "returns", "action_masks": True}
        for fixed in ({"hindsight_goals": 0}, *({name: value} for name, value in others.items())):
            chosen = values(algorithm.suggestions(dataclasses.replace(found, fixed=fixed)))
            assert "hindsight_goals" not in chosen
            assert chosen["n_step"] == 5, "nothing else is a signal"
    assert "hindsight_goals" not in values(DQN.suggestions(facts()))
