"""MountainCarContinuous-v0 with the sizes that PEARL's Table III prints: 8 state values and 4 actions, not 2 and 1."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box
from gymnasium.wrappers import TransformAction, TransformObservation

from pearl.algorithms import DDPG

ENV = "BenchmarkWideCar-v0"
COPIES = 4  # of the position and the velocity
ACTIONS = 4  # the force is their mean


class WideCarDDPG(DDPG):
    """DDPG of Table III. Importing its module registers the environment, also in actor processes."""

    hidden_sizes = (256, 128)


def make_wide_car(**options: Any) -> gym.Env[Any, Any]:
    """Observations `(8,)` float32, actions `(4,)` float32 in [-1, 1]."""
    car = gym.make("MountainCarContinuous-v0", **options)
    space = car.observation_space
    assert isinstance(space, Box)
    wide = Box(np.tile(space.low, COPIES), np.tile(space.high, COPIES), dtype=np.float32)
    observed = TransformObservation(car, lambda obs: np.tile(obs, COPIES), wide)
    return TransformAction(observed, lambda action: np.mean(action, keepdims=True), Box(-1.0, 1.0, (ACTIONS,)))


gym.register(ENV, entry_point=make_wide_car)
