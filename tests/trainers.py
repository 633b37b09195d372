"""Trainer classes and environments that the system tests compose programs from.

Generated programs and their actor processes import this module, and with it the environments' names; torch only where
a class here needs it, as its import takes longer than most of these programs.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
import warnings
from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.envs.classic_control import CartPoleEnv
from gymnasium.wrappers import FrameStackObservation, NormalizeObservation, NormalizeReward

from pearl.algorithms import DDPG, DQN, PPO, SAC, TD3, Batch, CrossQ, DroQ
from pearl.exploration import EpsilonGreedy, GaussianNoise, PolicySampling
from pearl.lazy_torch import nn, torch
from pearl.schedules import Schedule
from pearl.spec import ActorStep, Column, TransitionSpec


class TinyDQN(DQN):
    hidden_sizes: tuple[int, ...] = (16,)
    batch_size = 16
    replay_ratio = 2.0
    n_step = 1
    learning_rate_schedule: Schedule = "constant"
    learning_starts = 100
    exploration = EpsilonGreedy(steps=1000)


class FailsOnSeven(TinyDQN):
    """Fails where seven environments want actions."""

    def get_action(self, obs: torch.Tensor, action_masks: torch.Tensor | None = None) -> torch.Tensor:
        if len(obs) == 7:
            raise RuntimeError("no more actions")
        return super().get_action(obs, action_masks)


def by_position(columns: Mapping[str, np.ndarray], _policy: object) -> np.ndarray:
    """A priority that the columns tell: how far the cart is from the middle, plus a half."""
    found: np.ndarray = np.abs(columns["obs"][:, 0]) + np.float32(0.5)
    return found


class Prioritizing(TinyDQN):
    """A DQN whose actors give the first priorities; its runs here end before it trains, so that these stay."""

    learning_starts = 1_000

    @classmethod
    def transition(cls, observation_space: gym.Space[Any], action_space: gym.Space[Any]) -> TransitionSpec:
        return super().transition(observation_space, action_space).with_priority(by_position)


class UnnamedColumn(TinyDQN):
    """A column by a function that no other process can import."""

    @classmethod
    def transition(cls, observation_space: gym.Space[Any], action_space: gym.Space[Any]) -> TransitionSpec:
        common = super().transition(observation_space, action_space)
        return common.with_columns(Column("speed", (), "float32", lambda step: step.obs[:, 1]))


def all_of(step: ActorStep) -> np.ndarray:
    return step.obs


class WrongColumn(TinyDQN):
    """Actors make its column with another shape than it says."""

    @classmethod
    def transition(cls, observation_space: gym.Space[Any], action_space: gym.Space[Any]) -> TransitionSpec:
        return super().transition(observation_space, action_space).with_columns(Column("all", (2,), "float32", all_of))


class CheckedDQN(TinyDQN):
    """Refuses weights that are not those of its replay's mode."""

    weights_are_one = False

    def update_policy(self, batch: Any, weights: Any) -> Any:
        assert not self.weights_are_one or bool((weights == 1).all()), weights
        assert bool((weights > 0).all())
        assert float(weights.max()) == 1.0
        return super().update_policy(batch, weights)


class PixelDQN(TinyDQN):
    """The Nature CNN, which is the default for images."""

    learning_starts = 60


class FallingDQN(TinyDQN):
    """Its learning rate falls to 0 over the run."""

    learning_rate_schedule: Schedule = "linear"


class TinyDDPG(DDPG):
    hidden_sizes = (16,)
    batch_size = 16
    replay_ratio = 1.0
    learning_starts = 100
    exploration = GaussianNoise(random_steps=50)


class TinyTD3(TD3):
    hidden_sizes = (16,)
    batch_size = 16
    replay_ratio = 1.0
    learning_starts = 100
    exploration = GaussianNoise(random_steps=50)


class TinySAC(SAC):
    hidden_sizes = (16,)
    batch_size = 16
    replay_ratio = 1.0
    learning_starts = 100
    exploration = PolicySampling(random_steps=50)


class TinyDroQ(DroQ):
    hidden_sizes = (16,)
    batch_size = 16
    replay_ratio = 4.0
    learning_starts = 100
    policy_delay = 4
    dropout = 0.1
    exploration = PolicySampling(random_steps=50)


class TinyCrossQ(CrossQ):
    hidden_sizes = (16,)
    critic_hidden_sizes = (16, 16)
    batch_size = 16
    replay_ratio = 1.0
    learning_starts = 100
    renorm_warmup_steps = 20
    exploration = PolicySampling(random_steps=50)


class TinyPPO(PPO):
    hidden_sizes = (16,)
    batch_size = 32
    horizon = 16
    epochs = 2


class ForgetsRollouts(TinyPPO):
    """Its update returns nothing."""

    def update_minibatch(self, minibatch: Any) -> Any:
        super().update_minibatch(minibatch)


class FailsInRollouts(TinyPPO):
    def update_minibatch(self, minibatch: Any) -> Any:
        return {"rows": minibatch}["columns"]


class OwnTrainer:
    """Nothing but the two members that a trainer must have, and a network."""

    def __init__(self, observation_space: spaces.Box, action_space: spaces.Discrete) -> None:
        self.network = nn.Sequential(
            nn.Linear(observation_space.shape[0], 16), nn.ReLU(), nn.Linear(16, int(action_space.n))
        )
        self.optimizer = torch.optim.SGD(self.network.parameters(), lr=1e-2)

    def get_action(self, obs: torch.Tensor) -> torch.Tensor:
        values: torch.Tensor = self.network(obs)
        return values.argmax(dim=1)

    def update_policy(self, batch: Batch, weights: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target = batch.reward + batch.discount * self.network(batch.next_obs).amax(dim=1)
        error: torch.Tensor = self.network(batch.obs).gather(1, batch.action.unsqueeze(1)).squeeze(1) - target
        self.optimizer.zero_grad()
        torch.autograd.backward((weights * error.square()).mean())
        self.optimizer.step()
        return error.detach().abs()


class Guessing(OwnTrainer):
    """Its policy is chance, by torch's own random numbers."""

    def get_action(self, obs: torch.Tensor) -> torch.Tensor:
        return torch.randint(2, (len(obs),))


class Collapsing(OwnTrainer):
    """In Counting-v0 its return is its skill, which rises to 10 with its updates and falls to 0 again."""

    updates_per_skill = 25

    def __init__(self, observation_space: spaces.Box, action_space: spaces.Discrete) -> None:
        super().__init__(observation_space, action_space)
        self.skill = nn.Linear(1, 1, bias=False)
        self.updates = nn.Buffer(torch.zeros(()))
        self.set_skill(0.0)

    def set_skill(self, skill: float) -> None:
        with torch.no_grad():
            self.skill.weight.fill_(skill)

    def get_action(self, obs: torch.Tensor) -> torch.Tensor:
        return (10 * obs[:, 0] < self.skill.weight.reshape(()) - 1e-3).long()

    def update_policy(self, batch: Batch, weights: torch.Tensor) -> torch.Tensor:
        self.updates += 1
        self.set_skill(max(0.0, 10.0 - abs(10.0 - float(self.updates) / self.updates_per_skill)))
        return super().update_policy(batch, weights)


class Sluggish(TinyDQN):
    """`pause_s` slows every update."""

    pause_s = 0.0

    def update_policy(self, batch: Batch, weights: torch.Tensor) -> torch.Tensor:
        time.sleep(self.pause_s)
        return super().update_policy(batch, weights)


class FailsInTraining(OwnTrainer):
    """Acts, and raises when it is to be trained."""

    def update_policy(self, batch: Batch, weights: torch.Tensor) -> torch.Tensor:
        return {"ops": batch.reward}["oops"]


class WithoutUpdate:
    def get_action(self, obs: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(obs), dtype=torch.int64)


class WrongInput(OwnTrainer):
    input_shape = (7,)


class WrongNetwork(OwnTrainer):
    """Built for 7 numbers whatever the environment observes, and does not say so."""

    def __init__(self) -> None:
        super().__init__(spaces.Box(-1, 1, (7,)), spaces.Discrete(2))


class Counting(gym.Env[np.ndarray, np.int64]):
    """Observes how far the episode is; action 1 earns 1; episodes last ten steps. `pause_s` slows every step."""

    def __init__(self, pause_s: float = 0.0) -> None:
        self.observation_space = spaces.Box(0.0, 1.0, (3,), np.float32)
        self.action_space = spaces.Discrete(2)
        self._pause_s = pause_s
        self._step = 0

    def _observation(self) -> np.ndarray:
        return np.array([self._step / 10, 1.0, 0.5], np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self._step = 0
        return self._observation(), {}

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        if self._pause_s:
            time.sleep(self._pause_s)
        self._step += 1
        return self._observation(), float(action == 1), self._step >= 10, False, {}


class Breaking(Counting):
    """Raises after `steps` steps."""

    def __init__(self, steps: int = 50) -> None:
        super().__init__()
        self._left = steps

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self._left -= 1
        if self._left < 0:
            self._break_down()
        return super().step(action)

    def _break_down(self) -> None:
        raise RuntimeError("the gearbox of this environment fell off")


class Vanishing(Breaking):
    """Observes NaN after `steps` steps."""

    def _observation(self) -> np.ndarray:
        return super()._observation() if self._left >= 0 else np.full(3, np.nan, np.float32)

    def _break_down(self) -> None:
        pass


class BreakingInHost(Breaking):
    """Never breaks in an actor process."""

    def _break_down(self) -> None:
        if multiprocessing.current_process().name == "MainProcess":
            super()._break_down()


class Chatty(Counting):
    """Prints at the end of every episode, as environments do that somebody debugs."""

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        print("reset", flush=True)
        print("reset", file=sys.stderr, flush=True)
        return super().reset(seed=seed, options=options)


class Telling(Counting):
    """Its observations cannot become an array."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_space: gym.Space[Any] = spaces.Sequence(spaces.Discrete(5))


class Grid(gym.Env[np.ndarray, np.int64]):
    """Observes noise of three dimensions, none of them an image's; episodes last ten steps."""

    def __init__(self) -> None:
        self.observation_space = spaces.Box(-1.0, 1.0, (3, 4, 5), np.float32)
        self.action_space = spaces.Discrete(2)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self._steps = 0
        return self._observation(), {}

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self._steps += 1
        return self._observation(), float(action), self._steps == 10, False, {}

    def _observation(self) -> np.ndarray:
        return self.np_random.uniform(-1.0, 1.0, (3, 4, 5)).astype(np.float32)


class Flash(gym.Env[np.ndarray, np.int64]):
    """One grey frame `(36, 36)`, bright or dark by chance; the action that names it earns 1; eight steps."""

    def __init__(self) -> None:
        self.observation_space = spaces.Box(0, 255, (36, 36), np.uint8)
        self.action_space = spaces.Discrete(2)

    def _frame(self) -> np.ndarray:
        self._bright = bool(self.np_random.integers(2))
        return np.full((36, 36), 255 * self._bright, np.uint8)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self._step = 0
        return self._frame(), {}

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        reward = float(bool(action) == self._bright)
        self._step += 1
        return self._frame(), reward, self._step == 8, False, {}


def make_flash(frames: int = 4) -> gym.Env[Any, Any]:
    return FrameStackObservation(Flash(), frames)


gym.register("FlashFrames-v0", make_flash)


gym.register("NormalizedCounting-v0", lambda: NormalizeReward(NormalizeObservation(Counting())))


class Walk(gym.Env[Any, Any]):
    """Rewards of 1 for the third of its actions; an episode terminates after `length` steps."""

    def __init__(self, observations: Any = None, actions: Any = None, length: int = 7, fails: str = "") -> None:
        self.observation_space = observations or spaces.Box(-1.0, 1.0, (3,), np.float32)
        self.action_space = actions or spaces.Discrete(3)
        self._length, self._fails = length, fails

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if self._fails == "reset":
            raise RuntimeError("no map was found")
        self._steps = 0
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self._fails == "step":
            raise RuntimeError("the robot fell")
        self._steps += 1
        return self.observation_space.sample(), float(np.any(action == 2)), self._steps == self._length, False, {}


class Grumbling(Counting):
    """Warns when it is made, when it starts and when it steps; its episodes have no end."""

    def __init__(self) -> None:
        super().__init__()
        warnings.warn("this gearbox is old", stacklevel=1)

    def reset(self, **options: Any) -> tuple[np.ndarray, dict[str, Any]]:
        warnings.warn("this gearbox needs oil", stacklevel=1)
        return super().reset(**options)

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        with warnings.catch_warnings():  # after which Python shows again what it has shown
            pass
        warnings.warn("this gearbox squeaks", stacklevel=1)
        obs, reward, *_, info = super().step(action)
        return np.clip(obs, 0.0, 1.0), reward, False, False, info


class Switches(gym.Env[np.ndarray, np.ndarray]):
    """Four switches in two rows; a reward for each that is as the observation shows it."""

    observation_space = spaces.MultiBinary(4)
    action_space = spaces.MultiBinary((2, 2))

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self._steps = 0
        return self._shown(), {}

    def _shown(self) -> np.ndarray:
        self._wanted = self.np_random.integers(2, size=4).astype(np.int8)
        return self._wanted

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action), f"{action!r} is no MultiBinary action"
        reward = float((action.ravel() == self._wanted).mean())
        self._steps += 1
        return self._shown(), reward, False, self._steps == 8, {}


class Gated(gym.Env[np.ndarray, Any]):
    """Raises at an action that it has not allowed; its observation shows what is allowed, and the step.

    Episodes end after six steps in turn by the task, when nothing is allowed any more, and by a limit. `by` says how
    it tells what is allowed.
    """

    def __init__(self, by: str = "info", several: bool = False) -> None:
        self._by, parts = by, (3, 2) if several else (4,)
        self._starts = np.cumsum((0, *parts))
        self.observation_space = spaces.Box(0, 1, (sum(parts) + 1,), np.float32)
        self.action_space = spaces.MultiDiscrete(parts) if several else spaces.Discrete(4, start=2)
        self._episode = 0
        if by == "method":
            self.action_masks = lambda: self._mask

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self._step, self._episode = 0, self._episode + 1
        return self._shown()

    def _shown(self, *, over: bool = False) -> tuple[np.ndarray, dict[str, Any]]:
        mask = self.np_random.integers(2, size=self._starts[-1]).astype(np.int8)
        for first, last in zip(self._starts[:-1], self._starts[1:], strict=True):
            mask[self.np_random.integers(first, last)] = 1
        self._mask = np.zeros_like(mask) if over else mask
        obs = np.concatenate((self._mask, [self._step / 6])).astype(np.float32)
        return obs, {"action_mask": self._mask} if self._by == "info" else {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        chosen = np.asarray(action).ravel() - (0 if isinstance(self.action_space, spaces.MultiDiscrete) else 2)
        if not self._mask[self._starts[:-1] + chosen].all():
            raise ValueError(f"action {action} is forbidden: {self._mask}")
        self._step += 1
        ended, terminates = self._step == 6, self._episode % 2 == 0
        obs, info = self._shown(over=ended and terminates)
        return obs, float(chosen.sum()), ended and terminates, ended and not terminates, info


def gated_vector(num_envs: int = 1, reset: str = "NextStep") -> gym.vector.SyncVectorEnv:
    """Gated as a vector of its own, which resets in the way `reset`."""
    return gym.vector.SyncVectorEnv([Gated] * num_envs, autoreset_mode=gym.vector.AutoresetMode(reset))


gym.register("GatedVector-v0", vector_entry_point=gated_vector)


for _kind in (Counting, Chatty, Breaking, BreakingInHost, Vanishing, Telling, Grid, Grumbling, Switches, Gated):
    gym.register(f"{_kind.__name__}-v0", _kind, disable_env_checker=True)  # type: ignore[arg-type]


class LearnsCartPole(TinyDQN):
    """Learns CartPole within 20,000 steps."""

    hidden_sizes = (64, 64)
    learning_rate = 2.3e-3
    batch_size = 64
    replay_ratio = 32.0
    learning_starts = 1000
    target_update_interval = 100
    exploration = EpsilonGreedy(start=1.0, end=0.04, steps=3_000)


def make_short_pole(limit: int) -> gym.Env[Any, Any]:
    """CartPole whose episodes end after `limit` steps, before the pole can fall."""
    return gym.wrappers.TimeLimit(CartPoleEnv(), limit)


gym.register("ShortPole-v0", make_short_pole)
