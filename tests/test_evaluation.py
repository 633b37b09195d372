"""Greedy evaluation: how many episodes, whose, and which actions."""

from __future__ import annotations

import logging
import math
import threading
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from pearl.actors.actor import Actor, ActorSetup
from pearl.actors.environment import close_envs, probe
from pearl.actors.native_policy import NativePolicy
from pearl.actors.policy_plan import read_policy
from pearl.algorithms import DDPG, DQN, Batch
from pearl.algorithms.trainer import Trainer
from pearl.errors import EnvError
from pearl.exploration import EpsilonGreedy
from pearl.runtime.evaluation import Evaluation, EvaluationEnvs, evaluate
from pearl.runtime.queues import DataCollectionQueue
from pearl.spec import ActorSpec, TrainSpec, TransitionSpec


class LongOrShort(gym.Env[np.ndarray, Any]):
    """Chance decides per environment whether all its episodes take 1 step or `longest`.

    A step is worth the action taken.
    """

    made = 0
    closed = 0

    def __init__(self, first_action: int = 0, longest: int = 40) -> None:
        LongOrShort.made += 1
        self._longest = longest
        self.observation_space = spaces.Box(0, 1 << 40, (2,), np.float64)
        self.action_space = spaces.Discrete(4, start=first_action)
        self._length = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self._length = self._length or (1 if self.np_random.random() < 0.5 else self._longest)
        self._step = 0
        return np.array([self._length, 0.0]), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action), f"{action!r} is not in {self.action_space}"
        self._step += 1
        ended = self._step == self._length
        return np.array([self._length, self._step]), float(action), ended and self._length == 1, ended, {}

    def close(self) -> None:
        LongOrShort.closed += 1


gym.register("PearlLongOrShort-v0", lambda **k: LongOrShort(**k), disable_env_checker=True)


class Always:
    exploration = EpsilonGreedy(1.0, 1.0, 1)

    def __init__(self, action: int) -> None:
        self.net: nn.Module = nn.Linear(1, 1)
        self.action = action
        self.batches: set[int] = set()

    def get_action(self, obs: torch.Tensor) -> torch.Tensor:
        assert obs.dtype == torch.float32
        self.batches.add(len(obs))
        return torch.full((len(obs),), self.action)

    def update_policy(self, batch: Batch, weights: torch.Tensor) -> torch.Tensor:
        raise AssertionError("evaluation does not train")


def played(*arguments: Any, **options: Any) -> Evaluation:
    """An evaluation that nobody stops."""
    result = evaluate(*arguments, **options)
    assert result is not None
    return result


@pytest.mark.parametrize("episodes", [1, 7, 100, 130, 200])
def test_exactly_as_many_episodes_as_asked_for(episodes: int) -> None:
    result = played(Always(1), ActorSpec("PearlLongOrShort-v0"), episodes, seed=0)
    assert result.returns.shape == result.lengths.shape == (episodes,)
    assert set(result.lengths.tolist()) <= {1, 40}
    assert np.array_equal(result.returns, result.lengths)


def test_short_episodes_are_not_over_represented() -> None:
    # 100 environments, half of which could play 40 episodes while the others play one: each plays two.
    result = played(Always(1), ActorSpec("PearlLongOrShort-v0"), 200, seed=0)
    of_each_kind = {length: int((result.lengths == length).sum()) for length in (1, 40)}
    once = played(Always(1), ActorSpec("PearlLongOrShort-v0"), 100, seed=0)
    assert of_each_kind == {length: 2 * int((once.lengths == length).sum()) for length in (1, 40)}
    assert 50 < of_each_kind[1] < 150


@pytest.mark.parametrize("first_action", [0, 2])
def test_actions_are_greedy_and_in_the_environments_numbers(first_action: int) -> None:
    spec = ActorSpec("PearlLongOrShort-v0", env_kwargs={"first_action": first_action})
    result = played(Always(1), spec, 20, seed=1)
    assert np.array_equal(result.returns, result.lengths * (1 + first_action))


def test_a_seed_decides_the_result() -> None:
    trainer = DQN(spaces.Box(-5, 5, (4,), np.float32), spaces.Discrete(2))
    first, again, other = (played(trainer, ActorSpec("CartPole-v1"), 12, seed=seed) for seed in (3, 3, 4))
    assert np.array_equal(first.returns, again.returns)
    assert np.array_equal(first.lengths, again.lengths)
    assert not np.array_equal(first.returns, other.returns)
    assert np.array_equal(first.returns, first.lengths)


@pytest.mark.parametrize(
    ("trainer", "env"),
    [
        (DQN(spaces.Box(-5, 5, (4,), np.float32), spaces.Discrete(2)), "CartPole-v1"),
        (DDPG(spaces.Box(-8, 8, (3,), np.float32), spaces.Box(-2, 2, (1,), np.float32)), "Pendulum-v1"),
    ],
)
def test_the_native_policy_plays_the_same_episodes_with_the_weights_of_now(trainer: Trainer, env: str) -> None:
    policy = NativePolicy(read_policy(trainer))
    before = played(trainer, ActorSpec(env), 5, seed=3)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in trainer.policy.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    after = played(trainer, ActorSpec(env), 5, seed=3)
    native = played(trainer, ActorSpec(env), 5, seed=3, policy=policy)
    assert not np.array_equal(before.returns, after.returns)
    assert np.array_equal(native.lengths, after.lengths)
    assert np.allclose(native.returns, after.returns, rtol=1e-3)


def test_an_environments_own_vector_is_not_used() -> None:
    trainer = DQN(spaces.Box(-5, 5, (4,), np.float32), spaces.Discrete(2))
    plain = played(trainer, ActorSpec("CartPole-v1"), 5, seed=3)
    vector = played(trainer, ActorSpec("CartPole-v1", vectorization="vector_entry_point"), 5, seed=3)
    assert np.array_equal(plain.returns, vector.returns)


@pytest.mark.parametrize("error", [RuntimeError("no action"), SystemExit("no action")], ids=lambda e: type(e).__name__)
def test_environments_are_closed_even_if_the_policy_fails(error: BaseException) -> None:
    class Fails(Always):
        def get_action(self, obs: torch.Tensor) -> torch.Tensor:
            raise error

    LongOrShort.made = LongOrShort.closed = 0
    trainer = Fails(0)
    with pytest.raises(EnvError, match=r"PearlLongOrShort-v0 or the policy failed in the evaluation") as raised:
        evaluate(trainer, ActorSpec("PearlLongOrShort-v0"), 3, seed=0)
    assert "in get_action" in str(raised.value), "the line that failed"
    assert f"{type(error).__name__}: no action" in str(raised.value)
    assert LongOrShort.made == LongOrShort.closed == 3
    assert trainer.net.training


def test_environments_are_kept_for_all_evaluations() -> None:
    LongOrShort.made = LongOrShort.closed = 0
    spec, trainer = ActorSpec("PearlLongOrShort-v0"), Always(1)
    envs = EvaluationEnvs(spec)
    for episodes, made in ((3, 3), (2, 3), (5, 5), (5, 5)):
        played(trainer, spec, episodes, seed=episodes, envs=envs)
        assert (LongOrShort.made, LongOrShort.closed) == (made, 0)
    envs.close()
    assert (LongOrShort.made, LongOrShort.closed) == (5, 5)


class Unclosable(LongOrShort):
    """Is closed with an error."""

    def __init__(self, exits: bool) -> None:
        super().__init__()
        self._error = SystemExit(3) if exits else RuntimeError("no window")

    def close(self) -> None:
        super().close()
        raise self._error


gym.register("PearlUnclosable-v0", lambda **k: Unclosable(**k), disable_env_checker=True)


@pytest.mark.parametrize(("exits", "said"), [(False, "RuntimeError: no window"), (True, "SystemExit: 3")])
def test_environments_that_cannot_be_closed_are_named_once(
    exits: bool, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    spec = ActorSpec("PearlUnclosable-v0", envs_per_actor=2, env_kwargs={"exits": exits})
    LongOrShort.closed = 0
    played(Always(1), spec, 3, seed=0)
    assert LongOrShort.closed == 3
    Actor(ActorSetup(Always, {}, spec, TrainSpec(), seed=0), Always(1)).close()
    probe(spec)
    assert caplog.messages == [f"PearlUnclosable-v0 failed in close(): {said}"] * 3


def test_kept_environments_play_as_new_ones() -> None:
    trainer = DQN(spaces.Box(-5, 5, (4,), np.float32), spaces.Discrete(2))
    spec, envs = ActorSpec("CartPole-v1"), EvaluationEnvs(ActorSpec("CartPole-v1"))
    for seed in (3, 4, 3):
        kept, fresh = played(trainer, spec, 12, seed=seed, envs=envs), played(trainer, spec, 12, seed=seed)
        assert np.array_equal(kept.returns, fresh.returns)
    envs.close()


def test_episodes_without_end_are_ended_and_count(caplog: pytest.LogCaptureFixture) -> None:
    gym.register("PearlEndless-v0", lambda: LongOrShort(longest=1 << 40), disable_env_checker=True)
    gym.register("PearlLimited-v0", lambda: LongOrShort(longest=1 << 40), max_episode_steps=60)
    for env, most, expected in (("PearlEndless-v0", 50, 50), ("PearlLimited-v0", 50, 60), ("PearlLimited-v0", 0, 60)):
        envs = EvaluationEnvs(ActorSpec(env), most)
        for _ in range(2):
            result = played(Always(1), envs.spec, 8, seed=0, envs=envs)
            assert len(result.lengths) == 8
            assert set(result.lengths.tolist()) == {1, expected}
            assert np.array_equal(result.returns, result.lengths)
        envs.close()
    (warning,) = caplog.messages
    assert "An episode of PearlEndless-v0 did not end within 50 steps" in warning
    assert "--eval-max-steps" in warning


class Infinite(gym.Env[np.ndarray, Any]):
    """Episodes of two steps, of which the first returns the given numbers."""

    def __init__(self, obs: float, reward: float) -> None:
        self.observation_space, self.action_space = spaces.Box(-5, 5, (1,), np.float32), spaces.Discrete(2)
        self._first = obs, reward

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self._over = False
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        over, self._over = self._over, True
        obs, reward = (0.0, 1.0) if over else self._first
        return np.full(1, obs, np.float32), reward, over, False, {}


@pytest.mark.parametrize(
    ("obs", "reward", "what"),
    [(math.nan, 1.0, "an observation"), (math.inf, 1.0, "an observation"), (0.0, math.nan, "a reward")],
)
def test_numbers_that_are_not_finite_make_no_score(obs: float, reward: float, what: str) -> None:
    spec = ActorSpec(Infinite, env_kwargs={"obs": obs, "reward": reward})
    with pytest.raises(EnvError, match=rf"Infinite returned {what} that is NaN or infinite in an evaluation"):
        played(Always(1), spec, 2, seed=0)


class Lingering(LongOrShort):
    def close(self) -> None:
        assert Lingering.warned.wait(30)

    warned: ClassVar[threading.Event] = threading.Event()


def test_an_environment_that_does_not_return_from_close_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    class Heard(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())
            Lingering.warned.set()

    handler = Heard()
    monkeypatch.setattr("pearl.actors.environment._LONG_CLOSE_S", 0.0)
    logging.getLogger("pearl.actors").addHandler(handler)
    try:
        close_envs("Lingering-v0", Lingering())
    finally:
        logging.getLogger("pearl.actors").removeHandler(handler)
    assert said == ["Lingering-v0 does not return from close(): waiting for it."]


class Counted(LongOrShort):
    steps = 0
    steps_seen: ClassVar[list[int]] = []

    def step(self, action: Any) -> Any:
        Counted.steps += 1
        return super().step(action)


def test_an_evaluation_that_is_stopped_has_no_result() -> None:
    asked = 0

    def should_stop() -> bool:
        nonlocal asked
        asked += 1
        return asked > 5

    LongOrShort.made = LongOrShort.closed = 0
    trainer = Always(1)
    assert evaluate(trainer, ActorSpec("PearlLongOrShort-v0"), 3, seed=0, should_stop=should_stop) is None
    assert asked == 6
    assert LongOrShort.made == LongOrShort.closed == 3
    assert trainer.net.training


def test_an_evaluation_stops_between_the_steps_of_its_environments() -> None:
    asked = 0

    def should_stop() -> bool:
        nonlocal asked
        asked += 1
        Counted.steps_seen.append(Counted.steps)
        return asked > 2

    Counted.steps, Counted.steps_seen = 0, []
    assert evaluate(Always(1), ActorSpec(Counted), 30, seed=0, should_stop=should_stop) is None
    assert Counted.steps_seen == [0, 7, 15]  # not 30, each of which may take a second


# --- networks that act otherwise while they train --------------------------------------------------------------------


class Dropping(Always):
    """Notes in which mode it acts; dropout in a module of its own, and a part that is frozen in evaluation mode."""

    def __init__(self) -> None:
        super().__init__(1)
        self.net = nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.5), nn.Sequential(nn.BatchNorm1d(8).eval()))
        self.outputs: list[torch.Tensor] = []

    def get_action(self, obs: torch.Tensor) -> torch.Tensor:
        self.outputs.append(self.net(torch.ones(1, 2)))
        return super().get_action(obs)


class DroppingModule(nn.Module):
    """A trainer that is a module itself, with dropout by its own flag."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 8)
        self.outputs: list[torch.Tensor] = []

    def get_action(self, obs: torch.Tensor) -> torch.Tensor:
        self.outputs.append(nn.functional.dropout(self.net(torch.ones(1, 2)), 0.5, self.training))
        return torch.ones(len(obs), dtype=torch.int64)

    def update_policy(self, batch: Batch, weights: torch.Tensor) -> torch.Tensor:
        raise AssertionError("evaluation does not train")


def modes(trainer: Dropping | DroppingModule) -> list[bool]:
    root = trainer if isinstance(trainer, nn.Module) else trainer.net
    return [module.training for module in root.modules()]


@pytest.mark.parametrize("kind", [Dropping, DroppingModule])
def test_nothing_is_dropped_in_an_evaluation_and_training_goes_on_as_before(
    kind: type[Dropping | DroppingModule],
) -> None:
    trainer = kind()
    before = modes(trainer)
    assert True in before
    evaluate(trainer, ActorSpec("PearlLongOrShort-v0"), 3, seed=0)
    assert len(trainer.outputs) == 40
    assert all(torch.equal(output, trainer.outputs[0]) for output in trainer.outputs)
    assert torch.count_nonzero(trainer.outputs[0]) == 8
    assert modes(trainer) == before


@pytest.mark.parametrize("kind", [Dropping, DroppingModule])
def test_nothing_is_dropped_where_an_actor_acts(kind: type[Dropping | DroppingModule]) -> None:
    spec, train = ActorSpec("PearlLongOrShort-v0", envs_per_actor=2), TrainSpec(batch_size=4)
    setup = ActorSetup(kind, {}, spec, train, seed=0, steps_per_message=10)
    actor = Actor(setup)
    trainer = actor.trainer
    assert isinstance(trainer, (Dropping, DroppingModule))
    trainer.outputs.clear()  # those of the checks
    transition = TransitionSpec.from_spaces(actor.envs.single_observation_space, actor.envs.single_action_space)
    message = DataCollectionQueue(transition, setup.message_rows(), 1).reserve()
    assert message is not None
    actor.collect(message)
    actor.close()
    assert len(trainer.outputs) == 10
    assert all(torch.equal(output, trainer.outputs[0]) for output in trainer.outputs)
    assert torch.count_nonzero(trainer.outputs[0]) == 8


def test_mean_and_spread() -> None:
    result = Evaluation(np.array([1.0, 3.0]), np.array([1, 1]))
    assert (result.mean, result.std) == (2.0, 1.0)
