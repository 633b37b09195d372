"""Synthetic transitions, and a replay full of them, for measurements that must not wait for environments."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Protocol

import gymnasium as gym
import numpy as np
from gymnasium.vector.utils import batch_space

from pearl.replay.protocol import ReplayManager
from pearl.spec import (
    ACTION,
    DISCOUNT,
    NEXT_OBS,
    OBS,
    POSITION,
    STEPS,
    ActorSpec,
    ReplaySpec,
    TrainSpec,
    TransitionSpec,
)

_FILL_ROWS = 4096
_MOST_BYTES = 2**30  # far more than any cache holds, and written in about a second


class FillableStorage(Protocol):
    """The part of a Data Storage, in any memory, that filling needs."""

    @property
    def capacity(self) -> int:
        """The number of rows."""

    def insert(self, columns: Mapping[str, np.ndarray], count: int | None = None) -> np.ndarray:
        """Store the first `count` rows; return their slots."""


def random_transitions(
    transition: TransitionSpec, action_space: gym.Space[Any], train: TrainSpec, rows: int, rng: np.random.Generator
) -> dict[str, np.ndarray]:
    """`rows` transitions: valid actions and discounts, and noise for everything else."""
    columns = transition.empty(rows)
    seed = int(rng.integers(1 << 30))
    typical = {column.name: column.typical for column in transition.further}
    for name, column in columns.items():
        if name in typical:
            column[:] = typical[name]
        elif name == ACTION:
            count = rows * (1 if transition.sequence is None else transition.sequence.length)
            column[:] = _random_actions(action_space, count, seed).reshape(column.shape)
        elif name in (STEPS, POSITION) and transition.sequence is not None:
            column[:] = 1
        elif name == DISCOUNT:
            column[:] = train.gamma**train.n_step  # a larger discount would let values grow without bound
        elif column.dtype == np.uint8:
            column[:] = rng.integers(0, 256, column.shape, np.uint8)
        else:
            column[:] = rng.standard_normal(column.shape)
    if isinstance(action_space, gym.spaces.Discrete | gym.spaces.MultiDiscrete):
        columns[ACTION] -= action_space.start
    return columns


def _random_actions(space: gym.Space[Any], count: int, seed: int) -> np.ndarray:
    """All at once, which is up to 300 times faster, unless the space is not one of Gymnasium's."""
    if type(space).__module__.partition(".")[0] == "gymnasium":
        actions = batch_space(space, count)
        actions.seed(seed)
        return np.asarray(actions.sample())
    own = copy.deepcopy(space)
    own.seed(seed)
    return np.stack([np.asarray(own.sample()) for _ in range(count)])


def chained(columns: dict[str, np.ndarray], streams: int) -> dict[str, np.ndarray]:
    """`columns` as consecutive steps of `streams` environments: each next observation is that of the following step.

    The last step leads to the first, so that the rows may be repeated.
    """
    obs = columns[OBS]
    whole = len(obs) // streams * streams
    columns[NEXT_OBS][:whole] = np.roll(obs[:whole], -streams, axis=0)
    return columns


def stacked(columns: dict[str, np.ndarray], streams: int) -> dict[str, np.ndarray]:
    """`columns` as consecutive steps, as `chained` does, whose observations show the newest frames of the steps."""
    obs = columns[OBS]
    whole, stack = len(obs) // streams * streams, obs.shape[1]
    newest = obs[:whole, -1].copy()
    for age in range(stack):
        obs[:whole, stack - 1 - age] = np.roll(newest, age * streams, axis=0)
    return chained(columns, streams)


def as_steps(columns: dict[str, np.ndarray], replay: ReplaySpec, streams: int) -> dict[str, np.ndarray]:
    """`columns` as consecutive steps of `streams` environments if the replay's storage needs that, else unchanged."""
    if replay.share_frames:
        return stacked(columns, streams)
    return chained(columns, streams) if replay.share_next_obs else columns


def filling_rows(streams: int, capacity: int) -> int:
    """The rows with which to fill a storage: whole steps of `streams` environments, at least two steps."""
    return min(capacity, streams * max(2, _FILL_ROWS // streams))


def random_priorities(count: int, rng: np.random.Generator) -> np.ndarray:
    """`count` priorities from 0.01 to 1.01, float32."""
    return rng.random(count, np.float32) + np.float32(0.01)


def fill(
    manager: ReplayManager,
    storage: FillableStorage,
    transition: TransitionSpec,
    action_space: gym.Space[Any],
    replay: ReplaySpec,
    actors: ActorSpec,
    train: TrainSpec,
) -> int:
    """Fill an empty replay with random transitions of random priorities, up to 1 GiB of them; return their number."""
    rng, streams = np.random.default_rng(0), actors.env_count
    capacity = min(storage.capacity, max(train.batch_size, _MOST_BYTES // transition.nbytes))
    columns = random_transitions(transition, action_space, train, filling_rows(streams, capacity), rng)
    columns = as_steps(columns, replay, streams)
    rows = len(columns[OBS])
    for start in range(0, capacity, rows):
        slots = storage.insert(columns, min(rows, capacity - start))
        manager.insert(slots, random_priorities(len(slots), rng))
    return capacity
