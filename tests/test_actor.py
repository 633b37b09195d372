"""Actors: what a transition holds at an episode's end, in both ways that Gymnasium resets; exploration; seeds."""

from __future__ import annotations

import dataclasses
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from torch import nn

from pearl.actors.actor import Actor, ActorSetup
from pearl.actors.environment import make_vector_env
from pearl.algorithms import DDPG, DQN, Batch, TrainerLike
from pearl.errors import ConfigurationError, EnvError
from pearl.exploration import (
    EpsilonGreedy,
    Exploration,
    GaussianNoise,
    OrnsteinUhlenbeck,
    make_explorer,
)
from pearl.ipc.queues import WeightSyncQueue
from pearl.learner.torch_learner import TorchLearner
from pearl.runtime.evaluation import evaluate
from pearl.runtime.queues import DataCollectionQueue
from pearl.runtime.serial import InlineActor
from pearl.spec import ActorSpec, TrainSpec, TransitionSpec

GAMMA = 0.5


class CountEnv(gym.Env[np.ndarray, Any]):
    """Observations `(episode, step, last action, copy)`; the reward of a step is `10 * episode + step`.

    Lengths are drawn per episode from `shortest` to `longest`; ends alternate between termination and truncation.
    """

    def __init__(self, actions: str = "discrete", shortest: int = 3, longest: int = 3) -> None:
        self.observation_space = spaces.Box(-1e6, 1e6, (4,), np.float64)
        self.action_space = {
            "discrete": spaces.Discrete(3),
            "from one": spaces.Discrete(3, start=1),
            "several": spaces.MultiDiscrete([3, 2]),
        }[actions]
        self._lengths = shortest, longest
        self._episode = -1

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self._episode += 1
        self._step = 0
        self._length = int(self.np_random.integers(self._lengths[0], self._lengths[1] + 1))
        return np.array([self._episode, 0, -1, 0]), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action), f"{action!r} is not in {self.action_space}"
        reward = 10.0 * self._episode + self._step
        self._step += 1
        ended = self._step >= self._length
        terminates = self._episode % 2 == 0
        obs = np.array([self._episode, self._step, np.sum(action), self._step])
        return obs, reward, ended and terminates, ended and not terminates, {}


class SharingEnv(CountEnv):
    """Returns the same array each time, with infos of any shape."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._shown = np.zeros(4)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        self._shown[:], _ = super().reset(seed=seed, options=options)
        return self._shown, {"path": np.zeros(2)}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self._shown[:], *further, _ = super().step(action)
        return self._shown, *further, {"path": np.zeros(self._length), "final_obs": None}  # type: ignore[return-value]


class ImageEnv(CountEnv):
    """The same as bytes: every pixel is the step."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_space = spaces.Box(0, 255, (1, 6, 6), np.uint8)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        return np.full((1, 6, 6), 200, np.uint8), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        _, *rest = super().step(action)
        return np.full((1, 6, 6), 200 + self._step, np.uint8), *rest  # type: ignore[return-value]


class RaisingEnv(CountEnv):
    """Numbers too small for float32, and code that makes NumPy raise; `float_bytes` instead of bytes."""

    def __init__(self, float_bytes: float = 0.0) -> None:
        super().__init__()
        self.observation_space, self._shown = spaces.Box(0, 1, (4,), np.float64), np.full(4, 1e-300)
        if float_bytes:
            self.observation_space, self._shown = spaces.Box(0, 255, (4,), np.uint8), np.full(4, float_bytes)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        np.seterr(all="raise")
        return self._shown, super().reset(seed=seed)[1]

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        assert np.geterr()["under"] == "raise", "as its own code says"
        return self._shown, 1e-310, *super().step(action)[2:]  # type: ignore[return-value]


class ControlEnv(gym.Env[np.ndarray, np.ndarray]):
    """Episodes of four steps; the observation is the last action, so that what was done can be read."""

    def __init__(self) -> None:
        self.action_space = spaces.Box(np.array([-2.0, 0.0], np.float32), np.array([2.0, 1.0], np.float32))
        self.observation_space = spaces.Box(-10, 10, (2,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self._step = 0
        return np.zeros(2, np.float32), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action), f"{action!r} is not in {self.action_space}"
        self._step += 1
        return action.astype(np.float32), 1.0, self._step == 4, False, {}


class StrictEnv(gym.Env[np.ndarray, np.ndarray]):
    """Takes nothing that is not in its space, and changes what it took in place."""

    def __init__(self, dtype: str = "float64", last: int = 2) -> None:
        self._last = last  # numbers of the last observation
        bounds = np.array([-0.1, 1.0]), np.array([0.3, 1.0])  # of float64, which float32 rounds beyond them
        self.action_space: gym.Space[Any] = spaces.MultiDiscrete([3, 2], dtype=np.int32)
        if dtype != "int32":
            self.action_space = spaces.Box(*bounds, dtype=np.dtype(dtype).type)  # type: ignore[arg-type]
        self.observation_space = spaces.Box(-10, 10, (2,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        return np.ones(2, np.float32), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action), f"{action!r} is not in {self.action_space}"
        seen = action.astype(np.float32)[: self._last]
        action *= 0
        return seen, 1.0, False, True, {}


class NextStepVector(gym.vector.VectorEnv[np.ndarray, np.ndarray, np.ndarray]):
    """CountEnv as a vector of its own that resets in the step after an episode's end."""

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012

    def __init__(self, num_envs: int = 1, **kwargs: Any) -> None:
        self.num_envs = num_envs
        self._envs = [CountEnv(**kwargs) for _ in range(num_envs)]
        self.single_observation_space = self._envs[0].observation_space
        self.single_action_space = self._envs[0].action_space
        self._done = np.zeros(num_envs, bool)

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        self._done[:] = False
        seeds = [None if seed is None else seed + i for i in range(self.num_envs)]
        return np.stack([env.reset(seed=s)[0] for env, s in zip(self._envs, seeds, strict=True)]), {}

    def step(self, actions: np.ndarray) -> Any:
        rows = [
            (env.reset()[0], 777.0, False, False) if done else env.step(action)[:4]
            for env, action, done in zip(self._envs, actions, self._done, strict=True)
        ]
        obs, reward, terminated, truncated = (np.array(column) for column in zip(*rows, strict=True))
        self._done = terminated | truncated
        return obs, reward, terminated, truncated, {}


class CarelessVector(NextStepVector):
    """Observations that are not of the space: pixels from 0 to 1, or numbers that are left out."""

    def __init__(self, num_envs: int = 1, numbers: int = 4) -> None:
        super().__init__(num_envs)
        self._numbers = numbers
        self.single_observation_space = spaces.Box(0, 255, (4,), np.uint8)

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        return np.full((self.num_envs, self._numbers), 0.7), {}


gym.register("PearlCareless-v0", vector_entry_point=CarelessVector)
gym.register("PearlCount-v0", lambda **k: CountEnv(**k), vector_entry_point=NextStepVector, disable_env_checker=True)
gym.register("PearlSharing-v0", lambda **k: SharingEnv(**k), disable_env_checker=True)
gym.register("PearlRaising-v0", lambda **k: RaisingEnv(**k), disable_env_checker=True)
gym.register("PearlImage-v0", lambda **_: ImageEnv(), disable_env_checker=True)
gym.register("PearlControl-v0", lambda **_: ControlEnv(), disable_env_checker=True)
gym.register("PearlStrict-v0", lambda **k: StrictEnv(**k), disable_env_checker=True)


class Watchful:
    """Acts by what it sees: an action tells which observation it was chosen for."""

    exploration: Exploration | None = None

    def __init__(self, action_space: gym.Space[Any], observation_space: gym.Space[Any]) -> None:
        self.net = nn.Linear(1, 1)
        self.several = isinstance(action_space, spaces.MultiDiscrete)

    def get_action(self, obs: torch.Tensor) -> torch.Tensor:
        number = obs.flatten(1)[:, -1].long()
        return torch.stack((number % 3, number % 2), 1) if self.several else number % 3

    def update_policy(self, batch: Batch, weights: torch.Tensor) -> torch.Tensor:
        return weights


class Still(Watchful):
    """Continuous actions at the centre of the box."""

    def get_action(self, obs: torch.Tensor) -> torch.Tensor:
        return torch.tensor([0.0, 0.5]).repeat(len(obs), 1)


class Extreme(Watchful):
    """The highest actions, rounded to float32, and a number that the second bounds leave no choice of."""

    def get_action(self, obs: torch.Tensor) -> torch.Tensor:
        highest = torch.tensor([2, 1]) if self.several else torch.tensor([0.3, 0.0])
        return highest.repeat(len(obs), 1)


def setup_of(env: str = "PearlCount-v0", trainer: type = Watchful, **options: Any) -> ActorSetup:
    spec = {k: options.pop(k) for k in ("count", "envs_per_actor", "env_kwargs", "vectorization") if k in options}
    train, seed = TrainSpec(gamma=GAMMA, n_step=options.pop("n_step", 1)), options.pop("seed", 0)
    return ActorSetup(
        trainer, options.pop("settings", {}), ActorSpec(env, **{"envs_per_actor": 2, **spec}), train, seed, **options
    )


def collect(setup: ActorSetup, messages: int) -> list[dict[str, np.ndarray]]:
    """The valid rows of each message, as the host would get them."""
    actor = Actor(setup)
    envs = actor.envs
    transition = TransitionSpec.from_spaces(envs.single_observation_space, envs.single_action_space)
    dcq = DataCollectionQueue(transition, setup.message_rows(), slots=1)
    found = []
    for _ in range(messages):
        message = dcq.reserve()
        assert message is not None
        for column in message.values():
            column.fill(99)  # what an actor leaves untouched must not look valid
        dcq.publish(actor.collect(message))
        taken = dcq.peek()
        assert taken is not None
        columns, rows = taken
        episodes = int(columns["counts"][0])
        copied = {f.name: columns[f.name][:rows].copy() for f in transition.fields}
        copied |= {name: columns[name][:episodes].copy() for name in ("episode_return", "episode_length")}
        found.append(copied | {"counts": columns["counts"].copy()})
        dcq.release()
    actor.close()
    return found


def joined(messages: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    return {name: np.concatenate([m[name] for m in messages]) for name in messages[0] if name != "counts"}


def sorted_rows(columns: dict[str, np.ndarray]) -> np.ndarray:
    """Transitions as sorted rows of numbers: the order in which environments finish is not promised."""
    names = ("obs", "action", "reward", "next_obs", "discount")
    table = np.concatenate([columns[n].reshape(len(columns["reward"]), -1).astype(np.float64) for n in names], 1)
    return table[np.lexsort(table.T[::-1])]


# --- transitions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vectorization", ["sync", "vector_entry_point"])
def test_transitions_at_the_ends_of_episodes(vectorization: str) -> None:
    # Episodes of three steps: 24 vector steps are 8 episodes, or 6 where a reset takes a step of its own.
    setup = setup_of(vectorization=vectorization, envs_per_actor=1)
    messages = collect(setup, 6)
    found = joined(messages)
    episodes = 8 if vectorization == "sync" else 6
    assert found["episode_length"].tolist() == [3] * episodes
    assert found["episode_return"].tolist() == [30.0 * episode + 3 for episode in range(episodes)]
    assert sum(int(m["counts"][1]) for m in messages) == 3 * episodes == len(found["reward"])
    for i in range(3 * episodes):
        episode, step = divmod(i, 3)
        assert found["obs"][i, :2].tolist() == [episode, step]
        assert found["next_obs"][i, :2].tolist() == [episode, step + 1], "the episode's own last observation"
        assert found["action"][i] == found["next_obs"][i, 2] == step % 3
        assert found["reward"][i] == 10 * episode + step
        assert found["discount"][i] == (0.0 if step == 2 and episode % 2 == 0 else GAMMA)


@pytest.mark.parametrize("env", ["PearlCount-v0", "PearlSharing-v0"])
@pytest.mark.parametrize("n", [1, 3])
def test_both_ways_of_resetting_give_the_same_transitions(n: int, env: str) -> None:
    options: dict[str, Any] = {"envs_per_actor": 3, "env_kwargs": {"shortest": 1, "longest": 7}, "seed": 3, "n_step": n}
    rows = []
    for name, vectorization in ((env, "sync"), ("PearlCount-v0", "vector_entry_point")):
        found = joined(collect(setup_of(name, vectorization=vectorization, **options), 40))
        whole = found["obs"][:, 0] < 12  # episodes that both have finished
        assert found["obs"][:, 0].max() > 13
        rows.append(sorted_rows({k: v[whole] for k, v in found.items() if not k.startswith("episode_")}))
    assert len(rows[0]) > 3 * 12
    assert np.array_equal(rows[0], rows[1])


def after_cartpole(obs: np.ndarray, action: int) -> tuple[np.ndarray, bool]:
    env = gym.make("CartPole-v1").unwrapped
    env.reset()
    env.state = obs.astype(np.float64)  # type: ignore[attr-defined]
    next_obs, _, terminated, _, _ = env.step(action)
    return next_obs, terminated


@pytest.mark.parametrize("vectorization", ["sync", "vector_entry_point"])
def test_every_transition_of_cartpole_is_one_of_its_dynamics(vectorization: str) -> None:
    setup = setup_of("CartPole-v1", DQN, vectorization=vectorization, envs_per_actor=4, seed=1)
    messages = collect(setup, 30)
    found = joined(messages)
    assert len(found["episode_return"]) > 10
    for obs, action, next_obs, discount in zip(
        found["obs"], found["action"], found["next_obs"], found["discount"], strict=True
    ):
        expected, terminated = after_cartpole(obs, int(action))
        np.testing.assert_allclose(next_obs, expected, atol=1e-5)
        assert discount == (0.0 if terminated else GAMMA)
    assert np.all(found["reward"] == 1.0)
    assert np.array_equal(found["episode_return"], found["episode_length"])
    assert int((found["discount"] == 0).sum()) == len(found["episode_return"])
    assert sum(int(m["counts"][1]) for m in messages) == len(found["reward"])


def test_returns_and_lengths_are_those_of_whole_episodes() -> None:
    found = joined(collect(setup_of(envs_per_actor=4, env_kwargs={"shortest": 1, "longest": 9}, n_step=2), 50))
    lengths, returns = found["episode_length"], found["episode_return"]
    assert set(lengths.tolist()) == set(range(1, 10))
    # The k-th end of each environment is that of its episode k: 10 k per step, and 0 + 1 + ... for the steps.
    episode = (returns - lengths * (lengths - 1) / 2) / (10 * lengths)
    assert np.array_equal(episode, np.round(episode))
    counts = np.bincount(episode.astype(int))
    assert counts[0] == 4
    assert np.all(np.diff(counts) <= 0)


def test_messages_have_room_for_ends_of_every_environment_at_once() -> None:
    setup = setup_of(env_kwargs={"shortest": 4, "longest": 4}, n_step=4, envs_per_actor=5, steps_per_message=1)
    rows = [len(m["reward"]) for m in collect(setup, 8)]
    assert rows == [0, 0, 0, 20, 0, 0, 0, 20]
    assert setup.message_rows() >= 20


def test_a_message_that_takes_long_is_sent_before_it_is_full() -> None:
    actor = Actor(setup_of(envs_per_actor=2))
    transition = TransitionSpec.from_spaces(actor.envs.single_observation_space, actor.envs.single_action_space)
    message = DataCollectionQueue(transition, actor.setup.message_rows(), slots=1).reserve()
    assert message is not None
    assert actor.collect(message, longest_s=0.0) == 2
    assert message["counts"].tolist() == [0, 2, 0, 0]
    assert actor.collect(message, longest_s=3600.0) == 8
    actor.close()


@pytest.mark.parametrize("vectorization", ["sync", "vector_entry_point"])
def test_discrete_actions_that_start_at_one(vectorization: str) -> None:
    found = joined(
        collect(setup_of(env_kwargs={"actions": "from one"}, vectorization=vectorization, envs_per_actor=1), 5)
    )
    # Learners index from 0; the environment, which checks its actions, got one more.
    assert np.array_equal(found["action"], found["obs"][:, 1] % 3)
    assert np.array_equal(found["next_obs"][:, 2], found["action"] + 1)


def test_several_discrete_actions_at_once() -> None:
    found = joined(collect(setup_of(env_kwargs={"actions": "several", "shortest": 5, "longest": 5}), 5))
    assert found["action"].shape[1:] == (2,)
    assert np.array_equal(found["action"][:, 0], found["obs"][:, 1] % 3)
    assert np.array_equal(found["action"][:, 1], found["obs"][:, 1] % 2)
    assert np.array_equal(found["next_obs"][:, 2], found["action"].sum(1))


def test_images_stay_bytes() -> None:
    found = joined(collect(setup_of("PearlImage-v0", envs_per_actor=1), 3))
    assert found["obs"].dtype == found["next_obs"].dtype == np.uint8
    assert found["obs"].shape == (12, 1, 6, 6)
    assert found["obs"][:, 0, 0, 0].tolist() == [200, 201, 202] * 4
    assert found["next_obs"][:, 0, 5, 5].tolist() == [201, 202, 203] * 4


# --- the newest weights -----------------------------------------------------------------------------------------------


class Silent(DQN):
    exploration = None
    hidden_sizes = (4,)


def test_loaded_weights_decide_the_next_actions() -> None:
    setup = setup_of(trainer=Silent, envs_per_actor=1, steps_per_message=12)
    actor = Actor(setup)
    learner = TorchLearner(actor.trainer)
    weights = np.zeros(learner.weight_count, np.float32)
    message = {
        **TransitionSpec.from_spaces(CountEnv().observation_space, CountEnv().action_space).empty(20),
        "episode_return": np.zeros(20),
        "episode_length": np.zeros(20, np.int64),
        "counts": np.zeros(4, np.int64),
    }
    for action in (1, 2, 0):
        weights[-3:] = np.eye(3)[action]  # the biases of the three action values
        actor.load_weights(weights)
        rows = actor.collect(message)
        assert rows == 12
        assert np.all(message["action"][:12] == action)
    actor.close()


def test_every_actor_of_a_serial_run_sees_the_newest_weights() -> None:
    setup = setup_of(trainer=Silent, envs_per_actor=1)
    transition = TransitionSpec.from_spaces(CountEnv().observation_space, CountEnv().action_space)
    weights = np.zeros(
        TorchLearner(Silent(CountEnv().observation_space, CountEnv().action_space)).weight_count, np.float32
    )
    wsq = WeightSyncQueue(len(weights))
    dcqs = [DataCollectionQueue(transition, setup.message_rows(), slots=1) for _ in range(2)]
    actors = [InlineActor(dataclasses.replace(setup, index=i), dcq, wsq) for i, dcq in enumerate(dcqs)]
    for action in (1, 2, 0, 2):
        weights[-3:] = np.eye(3)[action]
        wsq.write(weights)
        for actor, dcq in zip(actors, dcqs, strict=True):
            assert actor.run_once()
            assert not actor.run_once(), "the queue is not empty"
            message = dcq.peek()
            assert message is not None
            assert np.all(message[0]["action"][: message[1]] == action)
            dcq.release()
        if action == 0:  # a restarted one has seen nothing, and asks for the newest
            actors[0] = actors[0].restarted(100)
    for actor in actors:
        actor.close()


# --- seeds ------------------------------------------------------------------------------------------------------------

NOISY = {"exploration": EpsilonGreedy(0.5, 0.5, 1)}


def test_a_seed_decides_every_message() -> None:
    setup = setup_of("CartPole-v1", DQN, settings=NOISY, seed=7, envs_per_actor=3)
    first, again = collect(setup, 8), collect(setup, 8)
    for a, b in zip(first, again, strict=True):
        assert a.keys() == b.keys()
        assert all(np.array_equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("change", [{"seed": 8}, {"index": 1}, {"restarts": 1}], ids=lambda c: next(iter(c)))
def test_another_seed_actor_or_restart_collects_something_else(change: dict[str, int]) -> None:
    setup = setup_of("CartPole-v1", DQN, settings=NOISY, seed=7, envs_per_actor=3, count=2)
    other = dataclasses.replace(setup, **change)  # type: ignore[arg-type]
    first, second = joined(collect(setup, 4)), joined(collect(other, 4))
    assert not np.array_equal(first["obs"][:3], second["obs"][:3]), "the environments start elsewhere"
    assert not np.array_equal(first["action"], second["action"])


def test_environments_of_one_actor_differ() -> None:
    found = collect(setup_of("CartPole-v1", DQN, envs_per_actor=4), 1)[0]
    assert len(np.unique(found["obs"][:4], axis=0)) == 4


# --- exploration ------------------------------------------------------------------------------------------------------


def test_epsilon_falls_linearly_and_stays() -> None:
    schedule = EpsilonGreedy(1.0, 0.2, 100)
    assert [schedule.epsilon(s) for s in (0, 50, 100, 10_000)] == pytest.approx([1.0, 0.6, 0.2, 0.2])
    assert [EpsilonGreedy(1.0, 0.2, 0).epsilon(s) for s in (0, 1)] == pytest.approx([0.2, 0.2])
    beyond = EpsilonGreedy(0.9, 0.2, 100, schedule=((0.0, 2.0), (1.0, 0.0)))
    assert [beyond.epsilon(s) for s in (0, 50, 100)] == pytest.approx([1.0, 0.9, 0.2]), "a probability"


def test_random_discrete_actions_come_as_often_as_epsilon_says() -> None:
    explorer = make_explorer(EpsilonGreedy(0.6, 0.6, 1), spaces.Discrete(4), 40_000, np.random.default_rng(0))
    found = explorer.apply(np.full(40_000, 2), 0)
    shares = np.bincount(found, minlength=4) / len(found)
    assert shares == pytest.approx([0.15, 0.15, 0.55, 0.15], abs=0.01)
    for never in (EpsilonGreedy(0.0, 0.0, 1), EpsilonGreedy(1.0, 0.0, 0)):
        sure = make_explorer(never, spaces.Discrete(4), 8, np.random.default_rng(0))
        assert np.array_equal(sure.apply(np.arange(8) % 4, 0), np.arange(8) % 4)


def test_epsilon_counts_the_steps_of_all_actors_and_goes_on_where_it_was() -> None:
    settings = {"exploration": EpsilonGreedy(1.0, 0.0, 200), "hidden_sizes": (4,)}
    setup = setup_of("CartPole-v1", DQN, settings=settings, count=10, envs_per_actor=2)
    # 10 actors of 2 environments: after 10 vector steps, 200 environment steps were made, and chance ends.
    assert {Actor(setup).env_steps, setup.env_steps} == {0}
    begun = Actor(dataclasses.replace(setup, env_steps=123))
    assert begun.env_steps == 123
    actor = Actor(dataclasses.replace(setup, steps_per_message=10))
    space = actor.envs.single_observation_space
    message = {
        **TransitionSpec.from_spaces(space, spaces.Discrete(2)).empty(60),
        "episode_return": np.zeros(60),
        "episode_length": np.zeros(60, np.int64),
        "counts": np.zeros(4, np.int64),
    }
    actor.collect(message)
    assert actor.env_steps == 200
    actor.collect(message)
    greedy = actor.trainer.get_action(torch.from_numpy(message["obs"][:20]))
    assert np.array_equal(message["action"][:20], greedy.numpy())


BOX = spaces.Box(np.array([-2.0, 0.0], np.float32), np.array([2.0, 1.0], np.float32))
HALF = np.array([2.0, 0.5])


def test_gaussian_noise_is_in_units_of_half_the_range() -> None:
    explorer = make_explorer(GaussianNoise(0.1, 0), BOX, 50_000, np.random.default_rng(0))
    center = np.tile(np.array([0.0, 0.5], np.float32), (50_000, 1))
    noise = explorer.apply(center, 0) - center
    assert noise.mean(0) == pytest.approx([0, 0], abs=0.003)
    assert noise.std(0) == pytest.approx(0.1 * HALF, rel=0.02)
    assert np.corrcoef(noise[:, 0], noise[:, 1])[0, 1] == pytest.approx(0, abs=0.02)
    edge = explorer.apply(np.tile(BOX.high, (50_000, 1)), 0)
    assert edge.dtype == np.float32
    assert np.all((edge >= BOX.low) & (edge <= BOX.high))
    assert float((edge[:, 0] == 2.0).mean()) == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize("setting", [GaussianNoise(0.1, 100), OrnsteinUhlenbeck(0.05, random_steps=100)])
def test_first_steps_are_uniform_over_the_box(setting: Exploration) -> None:
    explorer = make_explorer(setting, BOX, 20_000, np.random.default_rng(0))
    greedy = np.tile(BOX.high, (20_000, 1))
    found = explorer.apply(greedy, 99)
    assert np.all((found >= BOX.low) & (found <= BOX.high))
    assert found.mean(0) == pytest.approx([0.0, 0.5], abs=0.03)
    assert found.std(0) == pytest.approx(2 * HALF / 12**0.5, rel=0.02)
    later = explorer.apply(greedy, 100)
    assert np.all(later > np.array([0.0, 0.5]))


@pytest.mark.parametrize("noise", [GaussianNoise(0.0), OrnsteinUhlenbeck(0.0)])
@pytest.mark.parametrize("steps", [None, 4])
def test_actions_are_random_until_training_starts_unless_the_exploration_says_otherwise(
    noise: GaussianNoise | OrnsteinUhlenbeck, steps: int | None
) -> None:
    setting = dataclasses.replace(noise, random_steps=steps)
    setup = setup_of("Pendulum-v1", DDPG, settings={"exploration": setting, "hidden_sizes": (4,)})
    train = dataclasses.replace(setup.train, learning_starts=8)
    (found,) = collect(dataclasses.replace(setup, train=train, steps_per_message=10), 1)
    env = gym.make("Pendulum-v1")
    trainer = DDPG(env.observation_space, env.action_space, seed=setup.seed, hidden_sizes=(4,))
    with torch.no_grad():
        greedy = trainer.get_action(torch.from_numpy(found["obs"])).numpy()
    apart = np.abs(found["action"] - greedy)[:, 0] > 1e-4
    random = 8 if steps is None else steps  # of two environments each vector step
    assert apart[:random].all()
    assert not apart[random:].any()


def test_ornstein_uhlenbeck_noise_is_correlated_in_time_and_stationary() -> None:
    theta, sigma, dt = 0.2, 0.1, 0.5
    explorer = make_explorer(OrnsteinUhlenbeck(sigma, theta, dt), BOX, 5000, np.random.default_rng(0))
    center = np.tile(np.array([0.0, 0.5], np.float32), (5000, 1))
    path = np.stack([explorer.apply(center, 0) - center for _ in range(80)]) / HALF
    assert path[0].std() == pytest.approx(sigma * dt**0.5, rel=0.05)
    decay = 1 - theta * dt
    last, before = path[-1].ravel(), path[-2].ravel()
    assert np.corrcoef(last, before)[0, 1] == pytest.approx(decay, abs=0.02)
    assert last.std() == pytest.approx(sigma * dt**0.5 / (1 - decay**2) ** 0.5, rel=0.03)
    assert np.corrcoef(path[-1][:, 0], path[-1][:, 1])[0, 1] == pytest.approx(0, abs=0.05)


def test_an_episodes_end_resets_its_environments_noise_only() -> None:
    setting = OrnsteinUhlenbeck(sigma=0.2, theta=0.0)
    explorers = [make_explorer(setting, BOX, 4, np.random.default_rng(0)) for _ in range(2)]
    center = np.tile(np.array([0.0, 0.5], np.float32), (4, 1))
    for _ in range(3):
        kept, reset = (e.apply(center, 0) - center for e in explorers)
    explorers[1].end_episodes(np.array([False, True, False, False]))
    after_kept, after_reset = (e.apply(center, 0) - center for e in explorers)
    others = [0, 2, 3]
    assert np.array_equal(after_kept[others], after_reset[others])
    np.testing.assert_allclose(after_kept[1] - after_reset[1], kept[1], atol=1e-6)
    assert np.array_equal(kept, reset)


class Recorder:
    """An explorer that notes which environments' noise begins anew before each step."""

    def __init__(self) -> None:
        self.begun: list[list[bool]] = [[True, True]]

    def apply(self, actions: np.ndarray, env_steps: int, masks: np.ndarray | None = None) -> np.ndarray:
        self.begun.append([False, False])
        return actions

    def end_episodes(self, done: np.ndarray) -> None:
        self.begun[-1] = done.tolist()


@pytest.mark.parametrize("vectorization", ["sync", "vector_entry_point"])
def test_noise_begins_anew_with_each_episode(vectorization: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    monkeypatch.setattr("pearl.actors.actor.make_explorer", lambda *_: recorder)
    setup = setup_of(vectorization=vectorization, steps_per_message=12)
    collect(setup, 1)
    # An episode of three steps, then its first step follows: at once, or after the step that was the reset.
    begins = [any(b) for b in recorder.begun]
    firsts = [0, 3, 6, 9, 12] if vectorization == "sync" else [0, 4, 8, 12]
    assert all(begins[i] for i in firsts)
    assert sum(begins) == (5 if vectorization == "sync" else 7)


def test_actors_explore_inside_the_box_and_store_what_they_did() -> None:
    settings: dict[str, Any] = {"exploration": OrnsteinUhlenbeck(sigma=3.0, random_steps=0)}
    found = joined(collect(setup_of("PearlControl-v0", DDPG, settings=settings, envs_per_actor=3), 20))
    assert np.all((found["action"] >= BOX.low) & (found["action"] <= BOX.high))
    assert np.array_equal(found["action"], found["next_obs"])
    assert float((np.abs(found["action"][:, 0]) == 2.0).mean()) > 0.2


def test_no_exploration_leaves_actions_as_they_are() -> None:
    found = joined(collect(setup_of("PearlControl-v0", Still), 3))
    assert np.all(found["action"] == [0.0, 0.5])


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "int32"])
def test_environments_get_actions_of_their_space_as_copies(dtype: str) -> None:
    setup = setup_of("PearlStrict-v0", Extreme, env_kwargs={"dtype": dtype})
    found = joined(collect(setup, 2))
    numbers = dtype == "int32"
    assert np.allclose(found["next_obs"], [2, 1] if numbers else [0.3, 1.0], atol=1e-3)
    assert np.allclose(found["action"], [2, 1] if numbers else [0.3, 0.0])  # the learner's, whatever became of them
    action_space = StrictEnv(dtype).action_space
    played = evaluate(Extreme(action_space, BOX), setup.spec, 3, seed=0)
    assert played is not None
    assert played.returns.tolist() == [1.0] * 3


class OddRewards(CountEnv):
    """Rewards that are no numbers."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self._reward = {"array": np.ones(1), "nothing": None, "element": np.array(1.5)}[kind]

    def step(self, action: Any) -> tuple[np.ndarray, Any, bool, bool, dict[str, Any]]:  # type: ignore[override]
        obs, _, *further = super().step(action)
        return obs, self._reward, *further  # type: ignore[return-value]


gym.register("PearlOddRewards-v0", lambda **k: OddRewards(**k), disable_env_checker=True)


@pytest.mark.parametrize(("kind", "found"), [("array", r"an array of shape \(1,\)"), ("nothing", "None")])
def test_rewards_that_are_no_numbers_are_refused(kind: str, found: str) -> None:
    odd = setup_of("PearlOddRewards-v0", env_kwargs={"kind": kind})
    with pytest.raises(EnvError, match=rf"PearlOddRewards-v0 returned {found} as the reward of a step, .* one number"):
        collect(odd, 1)
    assert (joined(collect(setup_of("PearlOddRewards-v0", env_kwargs={"kind": "element"}), 1))["reward"] == 1.5).all()


def test_numbers_are_converted_whatever_the_environment_makes_numpy_raise() -> None:
    setup, before = setup_of("PearlRaising-v0"), np.geterr()
    found = joined(collect(setup, 3))
    assert (found["obs"] == 0).all()
    assert (found["reward"] == 0).all()
    played = evaluate(Watchful(spaces.Box(0, 1, (4,)), spaces.Discrete(3)), setup.spec, 2, seed=0)
    assert played is not None
    assert np.geterr() == before


def test_floats_where_the_space_has_bytes() -> None:
    whole, half = ({"float_bytes": value} for value in (7.0, 7.5))
    assert (joined(collect(setup_of("PearlRaising-v0", env_kwargs=whole), 1))["obs"] == 7).all()
    with pytest.raises(EnvError, match=r"PearlRaising-v0 returned .* expected numbers of Box\(0, 255, \(4,\), uint8"):
        collect(setup_of("PearlRaising-v0", env_kwargs=half), 1)


@pytest.mark.parametrize(
    ("numbers", "message"), [(4, r"expected numbers of Box\(0, 255, \(4,\), uint8\)"), (1, r"of shape \(2, 1\)")]
)
def test_observations_of_an_environments_own_vector_are_checked(numbers: int, message: str) -> None:
    with pytest.raises(EnvError, match=rf"PearlCareless-v0 returned an observation .*{message}"):
        collect(setup_of("PearlCareless-v0", env_kwargs={"numbers": numbers}, vectorization="vector_entry_point"), 1)


def test_a_last_observation_of_another_shape_is_refused() -> None:
    message = r"PearlStrict-v0 returned an observation of shape \(1,\); its observation space says \(2,\)"
    setup = setup_of("PearlStrict-v0", Extreme, env_kwargs={"last": 1})
    with pytest.raises(EnvError, match=message):
        collect(setup, 1)
    with pytest.raises(EnvError, match=message):
        evaluate(Extreme(StrictEnv().action_space, BOX), setup.spec, 1, seed=0)


@pytest.mark.parametrize(
    ("setting", "space", "message"),
    [
        (EpsilonGreedy(), BOX, r"EpsilonGreedy exploration needs a Discrete action space; the environment has Box"),
        (EpsilonGreedy(), spaces.MultiDiscrete([2, 2]), "needs a Discrete action space; the environment has MultiD"),
        (GaussianNoise(), spaces.Discrete(2), r"GaussianNoise exploration needs a Box action space.*Discrete\(2\)"),
        (OrnsteinUhlenbeck(), spaces.Discrete(2), "OrnsteinUhlenbeck exploration needs a Box"),
    ],
)
def test_exploration_that_does_not_suit_the_actions(
    setting: Exploration, space: spaces.Space[Any], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make_explorer(setting, space, 2, np.random.default_rng(0))


# --- environments by name ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("CartPol-v1", "CartPol-v1.*cannot be made"),
        ("os:system-v0", "names a module to import"),
        ("__import__('os').system('true')", "is not the name of an environment"),
        ("", "named by its Gymnasium id"),
    ],
)
def test_names_that_are_no_environment(name: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make_vector_env(ActorSpec(name))


def test_an_environment_whose_constructor_fails_is_named() -> None:
    with pytest.raises(EnvError, match=r"'PearlCount-v0' failed in its constructor: KeyError: 'sideways'"):
        make_vector_env(ActorSpec("PearlCount-v0", env_kwargs={"actions": "sideways"}))


def test_a_trainer_given_is_the_one_that_acts() -> None:
    trainer: TrainerLike = Watchful(spaces.Discrete(3), spaces.Discrete(3))
    actor = Actor(setup_of(), trainer)
    assert actor.trainer is trainer
    actor.close()
