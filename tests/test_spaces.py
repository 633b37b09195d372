"""Spaces and networks that do not fit each other are named when the trainer is made, with what to do about it."""

from __future__ import annotations

from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from programs import ONE_CPU, CsvPair, described
from torch import nn
from trainers import OwnTrainer

from pearl.algorithms import DDPG, DQN, SAC, TD3
from pearl.algorithms.inputs import random_observations
from pearl.algorithms.networks import NatureCNN
from pearl.algorithms.trainer import flattening_note, make_trainer
from pearl.errors import ConfigurationError, TrainerError
from pearl.exploration import make_explorer

VECTOR = spaces.Box(-1.0, 1.0, (4,), np.float32)
THREE = spaces.Discrete(3)
ARM = spaces.Box(-2.0, 2.0, (2,), np.float32)


def made(trainer: type, observations: gym.Space[Any] = VECTOR, actions: gym.Space[Any] = THREE, **settings: Any) -> Any:
    return make_trainer(trainer, observations, actions, settings=settings)


# --- networks whose outputs do not fit the actions ------------------------------------------------------------------


class Outputs(DQN):
    count: int = 2

    def build_q_network(self) -> nn.Module:
        return nn.Linear(4, self.count)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_q_network_has_one_output_for_each_action(count: int) -> None:
    expected = rf"Outputs\.build_q_network\(\) must make a network of 3 outputs.*Discrete\(3\); found {count} outputs"
    with pytest.raises(TrainerError, match=expected):
        made(Outputs, count=count)
    made(Outputs, count=3)


def test_another_default_dtype_of_torch_is_named() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.raises(TrainerError, match=r"leave torch's default dtype at that; found torch\.float64\."):
            made(Outputs, count=3)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(("base", "outputs"), [(DDPG, 2), (TD3, 2), (SAC, 4)])
def test_an_actor_has_the_outputs_that_its_actions_need(base: Any, outputs: int) -> None:
    class Actor(base):  # type: ignore[misc]
        count = 1

        def build_actor(self) -> nn.Module:
            return nn.Linear(4, self.count)

    for count in (1, 3):
        with pytest.raises(
            TrainerError, match=rf"build_actor\(\) must make a network of {outputs} .*found {count} out"
        ):
            made(Actor, actions=ARM, count=count)
    made(Actor, actions=ARM, count=outputs)


@pytest.mark.parametrize("base", [DDPG, TD3, SAC])
def test_a_critic_takes_observation_and_action_and_makes_one_value(base: Any) -> None:
    class Critic(base):  # type: ignore[misc]
        widths: ClassVar[tuple[int, int]] = (6, 1)

        def build_critic(self) -> nn.Module:
            return nn.Linear(*self.widths)

    with pytest.raises(TrainerError, match=r"build_critic\(\) must make a network of 1 outputs.*found 2 outputs"):
        made(Critic, actions=ARM, widths=(6, 2))
    with pytest.raises(TrainerError, match=r"build_critic\(\) .* from inputs of shape \(batch, 6\) to \(batch, 1\)"):
        made(Critic, actions=ARM, widths=(4, 1))
    made(Critic, actions=ARM)


def test_a_trainer_of_ones_own_that_chooses_actions_that_are_not_there() -> None:
    class TooMany(OwnTrainer):
        def __init__(self, observation_space: spaces.Box) -> None:
            super().__init__(observation_space, spaces.Discrete(9))

    with pytest.raises(
        TrainerError, match=r"TooMany\.get_action\(\) returned the action \d; Discrete\(3\) has the 3 a"
    ):
        made(TooMany)


def test_a_trainer_of_ones_own_that_chooses_fractions() -> None:
    class Fractions(OwnTrainer):
        def get_action(self, obs: torch.Tensor) -> torch.Tensor:
            return super().get_action(obs).float()

    with pytest.raises(TrainerError, match=r"returned torch\.float32; .* whole numbers.*argmax"):
        made(Fractions)


def test_a_trainer_of_ones_own_that_returns_arrays() -> None:
    class Arrays(OwnTrainer):
        def get_action(self, obs: torch.Tensor) -> Any:
            return super().get_action(obs).numpy()

    with pytest.raises(TrainerError, match=r"Arrays\.get_action\(\) must return a tensor .*found a ndarray"):
        made(Arrays)


# --- actions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("exploration", ["EpsilonGreedy", 0.1, np.random.default_rng])
def test_exploration_that_is_none_of_the_kinds(exploration: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"`exploration` must be one of EpsilonGreedy\(\), .*, or None; found"):
        make_explorer(exploration, ARM, 1, np.random.default_rng(0))


def test_a_dueling_network_has_a_hidden_layer() -> None:
    with pytest.raises(TrainerError, match=r"DQN\.hidden_sizes must be one size or more where dueling is True"):
        made(DQN, hidden_sizes=(), dueling=True)


# --- observations ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(3, 4, 5), (8, 8, 3), (3, 20, 40), (2, 3), (2, 3, 4, 5)])
@pytest.mark.parametrize(("trainer", "actions"), [(DQN, THREE), (SAC, ARM)])
@pytest.mark.parametrize("dtype", [np.float32, np.uint8])
def test_what_the_nature_cnn_does_not_take_goes_through_an_mlp_and_is_said(
    shape: tuple[int, ...], trainer: type, actions: gym.Space[Any], dtype: Any
) -> None:
    found = made(trainer, spaces.Box(0, 255, shape, dtype), actions)
    note = flattening_note(found)
    assert note is not None
    assert f"observations of shape {shape} as {np.prod(shape):,} numbers in a row" in note


def test_images_that_the_nature_cnn_takes_go_through_it() -> None:
    found = made(DQN, spaces.Box(0, 255, (3, 40, 36), np.uint8))
    assert any(isinstance(module, NatureCNN) for module in found.q.modules())
    assert flattening_note(found) is None


def test_images_with_their_channels_last_are_refused() -> None:
    with pytest.raises(TrainerError, match=r"\(210, 160, 3\) look like images \(height, width, channels\).*Grayscale"):
        made(DQN, spaces.Box(0, 255, (210, 160, 3), np.uint8))


def test_the_largest_numbers_may_be_the_bounds_of_observations() -> None:
    largest = float(np.finfo(np.float64).max)
    assert isinstance(made(OwnTrainer, spaces.Box(-largest, largest, (4,), np.float64)), OwnTrainer)


def test_random_observations_lie_within_their_space_and_are_no_huge_numbers() -> None:
    low, high = np.array([-1e38, 0.0, -1e38, 2e3, -1.0, 1e9]), np.array([1e38, 1e38, -5e3, 1e38, 1.0, 1e9 + 1.0])
    box = spaces.Box(low, high, dtype=np.float64)
    drawn = random_observations(box, 500, seed=1)
    np.testing.assert_array_equal(drawn, random_observations(box, 500, seed=1))
    assert all(box.contains(one) for one in drawn)
    assert np.abs(drawn[:, :5]).max() < 1e4
    assert drawn[:, 4].max() - drawn[:, 4].min() > 1.9


def test_a_vector_of_bytes_is_scaled() -> None:
    found = made(DQN, spaces.Box(0, 255, (128,), np.uint8))
    obs = torch.full((2, 128), 255, dtype=torch.uint8)
    assert torch.allclose(found.q(obs), found.q(torch.ones(2, 128)))
    assert flattening_note(found) is None


def test_composing_says_that_a_trainer_has_no_convolutions(
    csv_pair: CsvPair, capsys: pytest.CaptureFixture[str], quick_profiles: None
) -> None:
    described(csv_pair(*ONE_CPU), env="Grid-v0", progress=True).run()
    assert (
        "TinyDQN has no convolutions: it takes observations of shape (3, 4, 5) as 60 numbers" in capsys.readouterr().out
    )
