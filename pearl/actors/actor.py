"""An Actor: a vector of environments, one batched inference a step, transitions out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from pearl.actors.environment import autoreset_mode, make_vector_env
from pearl.actors.exploration import PolicySampling, make_explorer
from pearl.actors.n_step import NStepWindow
from pearl.algorithms.trainer import SamplesActions, TrainerLike, make_trainer, set_evaluation_mode
from pearl.errors import ConfigurationError, EnvError
from pearl.learner.torch_learner import load_policy_weights
from pearl.spec import ActorSpec, ReplaySpec, TrainSpec, TransitionSpec

STEPS_PER_MESSAGE = 4  # vector steps: few enough for fresh weights, enough that messages cost little


@dataclass(frozen=True)
class ActorSetup:
    """All that an actor needs to start, in this process or a spawned one.

    `index` counts from 0 among `spec.count` actors; `env_steps` is where the exploration schedule starts.
    """

    trainer_class: type
    settings: Mapping[str, Any]
    spec: ActorSpec
    train: TrainSpec
    seed: int
    index: int = 0
    env_steps: int = 0
    restarts: int = 0
    steps_per_message: int = STEPS_PER_MESSAGE

    def message_rows(self) -> int:
        """Rows of one DCQ message."""
        return message_rows(self.spec, self.train, self.steps_per_message)


def message_rows(actors: ActorSpec, train: TrainSpec, steps: int = STEPS_PER_MESSAGE) -> int:
    """Rows of one DCQ message: `steps` vector steps, and room for episode ends."""
    return actors.envs_per_actor * (steps + train.n_step)


def check_messages_fit(replay: ReplaySpec, actors: ActorSpec, train: TrainSpec) -> None:
    """Raise ConfigurationError if the replay cannot take one message of an actor."""
    rows = message_rows(actors, train)
    if rows >= replay.capacity:
        raise ConfigurationError(
            f"A replay of {replay.capacity} slots cannot take a message of {rows} transitions from "
            f"{actors.envs_per_actor} environments: raise its size or lower envs_per_actor."
        )


@dataclass
class _Episodes:
    """Running return and length of each environment's episode."""

    envs: int
    returns: np.ndarray = field(init=False)
    lengths: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.returns, self.lengths = np.zeros(self.envs), np.zeros(self.envs, np.int64)


class Actor:
    """Steps its environments with the newest policy and fills messages with transitions."""

    def __init__(self, setup: ActorSetup, trainer: TrainerLike | None = None) -> None:
        self.setup = setup
        self.envs: gym.vector.VectorEnv[Any, Any, Any] = make_vector_env(setup.spec)
        observation_space, action_space = self.envs.single_observation_space, self.envs.single_action_space
        self.trainer = trainer or make_trainer(
            setup.trainer_class, observation_space, action_space, seed=setup.seed, settings=dict(setup.settings)
        )
        set_evaluation_mode(self.trainer)
        transition = TransitionSpec.from_spaces(observation_space, action_space)
        self._obs_dtype = np.dtype(transition.fields[0].dtype)
        self._count = setup.spec.envs_per_actor
        self._first_action = int(action_space.start) if isinstance(action_space, spaces.Discrete) else 0
        self._window = NStepWindow(transition, self._count, setup.train.n_step, setup.train.gamma)
        seeds = np.random.SeedSequence((setup.seed, setup.index, setup.restarts))
        env_seed, noise_seed = seeds.spawn(2)
        self.rng = np.random.default_rng(noise_seed)
        exploration = getattr(self.trainer, "exploration", None)
        self._explorer = make_explorer(exploration, action_space, self._count, self.rng)
        self._samples = isinstance(exploration, PolicySampling)
        self._action_shape = (self._count, *(action_space.shape or ()))
        self._same_step = autoreset_mode(self.envs) is AutoresetMode.SAME_STEP
        self._env_seed = int(env_seed.generate_state(1)[0])
        self.env_steps = setup.env_steps
        self.reset(self._env_seed)

    def reset(self, seed: int | None) -> None:
        """Start new episodes everywhere."""
        obs, _ = self.envs.reset(seed=seed)
        self._obs = np.array(obs, self._obs_dtype)
        self._ended = np.zeros(self._count, bool)
        self._episodes = _Episodes(self._count)

    def load_weights(self, weights: np.ndarray) -> None:
        """Take a policy snapshot `(weight_count,)` float32."""
        load_policy_weights(self.trainer, weights)

    def collect(self, message: Mapping[str, np.ndarray]) -> int:
        """Run `steps_per_message` vector steps into the arrays of a DCQ message; returns the rows filled."""
        row = episodes = steps = 0
        for _ in range(self.setup.steps_per_message):
            row, episodes, real = self._step(message, row, episodes)
            steps += real
        message["counts"][:] = (episodes, steps, self.setup.index)
        return row

    def _step(self, message: Mapping[str, np.ndarray], row: int, episodes: int) -> tuple[int, int, int]:
        action = self._explorer.apply(self._policy_action(), self.env_steps)
        next_obs, reward, terminated, truncated, info = self.envs.step(
            action + self._first_action if self._first_action else action
        )
        if not np.isfinite(reward).all():
            raise EnvError(self._not_finite("reward", reward))
        if self._obs_dtype != np.uint8 and not np.isfinite(next_obs).all():
            raise EnvError(self._not_finite("observation", next_obs))
        done = terminated | truncated
        # A step after an episode's end is, under next-step autoreset, the reset itself: no transition.
        real = ~self._ended if not self._same_step else np.ones(self._count, bool)
        last_obs = np.asarray(next_obs, self._obs_dtype)
        new_obs = last_obs
        if self._same_step and done.any():
            last_obs = last_obs.copy()
            for env in np.flatnonzero(done):
                last_obs[env] = info["final_obs"][env]
        row = self._window.push(self._obs, action, reward, last_obs, terminated, done, real, message, row)
        self._episodes.returns[real] += reward[real]
        self._episodes.lengths[real] += 1
        if done.any():
            for env in np.flatnonzero(done & real):
                message["episode_return"][episodes] = self._episodes.returns[env]
                message["episode_length"][episodes] = self._episodes.lengths[env]
                episodes += 1
            self._episodes.returns[done], self._episodes.lengths[done] = 0.0, 0
        # Also after a reset: the step that it took is none of the episode's.
        if (begins := done | ~real).any():
            self._explorer.end_episodes(begins)
        self._ended = done
        self._obs = np.array(new_obs, self._obs_dtype)
        stepped = int(real.sum())
        self.env_steps += stepped * self.setup.spec.count
        return row, episodes, stepped

    def _policy_action(self) -> np.ndarray:
        obs = torch.from_numpy(self._obs)
        with torch.inference_mode():
            if not self._samples:
                return self.trainer.get_action(obs).numpy()
            assert isinstance(self.trainer, SamplesActions)
            noise = torch.from_numpy(self.rng.standard_normal(self._action_shape, np.float32))
            return self.trainer.sample_action(obs, noise).numpy()

    def _not_finite(self, what: str, values: np.ndarray) -> str:
        wrong = np.flatnonzero(~np.isfinite(values).reshape(self._count, -1).all(axis=1))
        return (
            f"{self.setup.spec.env} returned a {what} that is NaN or infinite, in environment {wrong[0]} of actor "
            f"{self.setup.index}: {values[wrong[0]]}. Training on it would destroy the weights; mend the environment, "
            "or clip what it returns with a gymnasium wrapper."
        )

    def close(self) -> None:
        """Close the environments."""
        self.envs.close()
