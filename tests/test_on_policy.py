"""On-policy training: actors' rollouts, their preparation, the session's flow, and composed programs."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import gymnasium as gym
import numpy as np
import pytest
import torch
from programs import ONE_CPU, run, summary, write_csv_pair
from test_placement import ACTORS, BATCH, MATRIX, SERVER, TRANSITION
from torch import nn
from trainers import TinyPPO
from typer.testing import CliRunner

import pearl
from composer import Composer
from composer.algorithm1 import place
from composer.composing import Profiled
from composer.composition import RolloutComposition, read_composition
from composer.html_report.page import report_page
from composer.measurement import Measurement
from composer.on_policy.matrix import RolloutMatrix
from composer.on_policy.placement import (
    AdvantagesConfig,
    RolloutCandidate,
    RolloutLearnerConfig,
    RolloutPlacement,
    RolloutTerms,
    of_each_learner,
)
from composer.on_policy.trials import is_decided
from composer.recompose import recompose
from composer.spec_file import load_spec
from composer.trials import FailedError
from pearl.actors.actor import ActorSetup
from pearl.actors.policy_plan import read_policy
from pearl.actors.rollout_actor import RolloutActor
from pearl.algorithms import A2C, DQN, PPO, RecurrentPPO, make_trainer
from pearl.backends.cpu.rollout_learner import NativeRolloutLearner
from pearl.backends.sycl.device import sycl_availability
from pearl.backends.sycl.selector import EMULATOR_SELECTOR
from pearl.cli import app
from pearl.errors import CheckpointError, ConfigurationError, EnvError, GenerationError, PlacementError, TrainerError
from pearl.ipc.queues import Bell
from pearl.policy import evaluate_policy
from pearl.rollout import NumpyGae, RunningStatistics, quantized
from pearl.rollout.buffer import RolloutBuffer
from pearl.rollout.columns import ENDED, GOES_ON, NO_STEP, last_value_field, rollout_columns
from pearl.rollout.preparation import RolloutPreparation
from pearl.rollout.vtrace import vtrace
from pearl.runtime import (
    DataCollectionQueue,
    RolloutAssignmentQueue,
    RolloutDoneQueue,
    RolloutWorker,
    WeightSyncQueue,
)
from pearl.runtime.evaluation import evaluate
from pearl.runtime.experience import RolloutExperience
from pearl.runtime.rollout_session import samples_of
from pearl.spec import ActorSpec, RolloutSpec, TrainSpec, check_minibatches

SHORT = "ShortCartPole-v0"
gym.register(SHORT, "gymnasium.envs.classic_control.cartpole:CartPoleEnv", max_episode_steps=5)
SHORT_VECTOR = "ShortVectorCartPole-v0"
gym.register(
    SHORT_VECTOR,
    vector_entry_point="gymnasium.envs.classic_control.cartpole:CartPoleVectorEnv",
    kwargs={"max_episode_steps": 5},
)
ENVS = 3
EMULATOR = sycl_availability(EMULATOR_SELECTOR)


def spaces_of(env: str) -> tuple[gym.Space[Any], gym.Space[Any]]:
    made = gym.make_vec(env, 1, vectorization_mode="vector_entry_point" if env == SHORT_VECTOR else "sync")
    return made.single_observation_space, made.single_action_space


def actor_of(env: str, horizon: int, *, trainer: Any = None, vectorization: Any = "sync", envs: int = ENVS) -> Any:
    """A torch actor with its trainer, and a message of its queue."""
    observations, actions = spaces_of(env)
    transition = rollout_columns(observations, actions)
    rollout = RolloutSpec(horizon=horizon)
    spec = ActorSpec(env, envs_per_actor=envs, vectorization=vectorization)
    trainer = trainer or make_trainer(PPO, observations, actions, seed=3)
    setup = ActorSetup(PPO, {}, spec, TrainSpec(gamma=0.9), seed=5, transition=transition, rollout=rollout)
    actor = RolloutActor(setup, trainer)
    queue = DataCollectionQueue(transition, setup.message_rows(), 1, further=(last_value_field(envs),))
    message = queue.reserve()
    assert message is not None
    return actor, trainer, message, queue


def rows(message: Any, name: str, horizon: int, envs: int = ENVS) -> np.ndarray:
    column = message[name][: horizon * envs]
    found: np.ndarray = column.reshape(horizon, envs, *column.shape[1:])
    return found


# --- first weights ---


def test_weights_begin_orthogonal_or_as_torch_makes_them() -> None:
    observations, actions = spaces_of("Pendulum-v1")
    made = {}
    for orthogonal in (True, False):
        settings = {"orthogonal": orthogonal, "initial_log_std": -1}
        trainer = make_trainer(PPO, observations, actions, settings=settings)
        assert trainer.networks.log_std.tolist() == [-1.0]
        made[orthogonal] = [module for module in trainer.networks.policy.modules() if isinstance(module, nn.Linear)]
        assert read_policy(trainer) is not None
    square = made[True][1].weight.detach()
    torch.testing.assert_close(square @ square.T, 2.0 * torch.eye(len(square)), atol=1e-4, rtol=0)
    assert float(made[True][-1].weight.detach().norm()) == pytest.approx(0.01, rel=1e-4)
    assert not any(layer.bias.any() for layer in made[True])
    assert made[False][-1].weight.norm() > 0.1
    assert all(layer.bias.any() for layer in made[False])


# --- actors ---


@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1"])
def test_an_actor_records_what_the_policy_said(env: str) -> None:
    horizon = 12
    actor, trainer, message, _queue = actor_of(env, horizon)
    assert actor.collect(message) == horizon * ENVS
    obs, action = (torch.from_numpy(message[name]) for name in ("obs", "action"))
    with torch.no_grad():
        log_prob, _, value = trainer.evaluate_actions(obs, action)
        last = trainer.values(torch.from_numpy(actor._obs))
    np.testing.assert_allclose(message["log_prob"], log_prob, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(message["value"], value, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(message["last_value"], last, rtol=1e-5, atol=1e-6)
    assert (rows(message, "end", horizon) == GOES_ON).all() or env == "CartPole-v1"
    again = np.diff(rows(message, "obs", horizon), axis=0)
    assert (np.abs(again).reshape(-1) > 0).any(), "environments were stepped"


def test_actors_draw_actions_from_the_policys_distribution() -> None:
    actor, trainer, message, _queue = actor_of("Pendulum-v1", 300)
    actor.collect(message)
    with torch.no_grad():
        mean = trainer.networks.policy(torch.from_numpy(message["obs"])).numpy()
    noise = message["action"] - mean  # the deviation is 1
    assert noise.mean() == pytest.approx(0.0, abs=0.15)
    assert noise.std() == pytest.approx(1.0, abs=0.15)
    actor, _, message, _queue = actor_of("CartPole-v1", 300)
    actor.collect(message)  # its policy begins with about equal probabilities
    assert message["action"].mean() == pytest.approx(0.5, abs=0.1)


def test_the_environment_gets_a_boxs_action_within_its_bounds() -> None:
    observations, actions = spaces_of("Pendulum-v1")
    trainer = make_trainer(PPO, observations, actions, settings={"initial_log_std": 3.0})
    actor, _, message, _queue = actor_of("Pendulum-v1", 8, trainer=trainer)
    taken: list[np.ndarray] = []
    step = actor.envs.step
    actor.envs.step = lambda action: (taken.append(action.copy()), step(action))[1]
    actor.collect(message)
    drawn = rows(message, "action", 8)
    assert np.abs(drawn).max() > 2.0, "the Learner gets actions as they were drawn"
    np.testing.assert_array_equal(np.stack(taken), np.clip(drawn, -2.0, 2.0))


def test_a_time_limit_is_not_a_termination() -> None:
    """Where it ends an episode, gamma times the value of the last observation is added; elsewhere nothing is."""
    horizon = 13
    actor, trainer, message, _queue = actor_of(SHORT, horizon)
    finals: dict[tuple[int, int], np.ndarray] = {}
    step, t = actor.envs.step, iter(range(horizon))

    def watched(action: np.ndarray) -> Any:
        found = step(action)
        at = next(t)
        for env in np.flatnonzero(found[3]):
            finals[at, int(env)] = found[4]["final_obs"][env]
        return found

    actor.envs.step = watched
    actor.collect(message)
    end, bonus = rows(message, "end", horizon), rows(message, "bonus", horizon)
    assert set(zip(*np.nonzero(end == ENDED), strict=True)) == set(finals), "five steps never topple the pole"
    assert len(finals) == 2 * ENVS
    for (at, env), final in finals.items():
        with torch.no_grad():
            value = trainer.values(torch.from_numpy(np.asarray(final, np.float32)[None]))
        assert bonus[at, env] == pytest.approx(0.9 * float(value), rel=1e-5)
    assert np.count_nonzero(bonus) == len(finals)


def test_episodes_are_counted_across_messages() -> None:
    horizon = 7
    actor, _, message, _queue = actor_of(SHORT, horizon)
    lengths: list[int] = []
    for _ in range(4):
        actor.collect(message)
        episodes, steps, _, _ = message["counts"]
        assert steps == horizon * ENVS
        lengths += message["episode_length"][:episodes].tolist()
        assert message["episode_return"][:episodes].tolist() == message["episode_length"][:episodes].tolist()
    assert lengths == [5] * (4 * horizon // 5 * ENVS)


def test_a_reset_in_place_of_a_step_is_no_step() -> None:
    """Gymnasium's own vectors reset in the step after an episode's end."""
    horizon = 13
    actor, _, message, _queue = actor_of(SHORT_VECTOR, horizon, vectorization="vector_entry_point")
    actor.collect(message)
    end, bonus = rows(message, "end", horizon), rows(message, "bonus", horizon)
    np.testing.assert_array_equal(np.flatnonzero(end[:, 0] == ENDED), [4, 10])
    np.testing.assert_array_equal(np.flatnonzero(end[:, 0] == NO_STEP), [5, 11])
    assert (rows(message, "reward", horizon)[end == NO_STEP] == 0).all()
    np.testing.assert_array_equal(bonus != 0, end == ENDED)
    assert message["counts"][1] == horizon * ENVS - 2 * ENVS
    assert message["episode_length"][:2].tolist() == [5, 5]


class Poisoned(gym.Env[np.ndarray, np.int64]):
    """Its reward is NaN at the eighth step."""

    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        self._steps = 0
        return np.zeros(2, np.float32), {}

    def step(self, _: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self._steps += 1
        return np.zeros(2, np.float32), math.nan if self._steps == 8 else 0.0, False, False, {}


gym.register("Poisoned-v0", Poisoned)


def test_a_reward_that_is_not_a_number_names_environment_and_step() -> None:
    actor, _, message, _queue = actor_of("Poisoned-v0", 10)
    with pytest.raises(EnvError, match=r"a reward that is NaN.*environment 0 of actor 0, step 7 of the rollout"):
        actor.collect(message)


def test_a_policy_that_diverged_names_environment_and_step() -> None:
    actor, trainer, message, _queue = actor_of("CartPole-v1", 4)
    with torch.no_grad():
        trainer.networks.value[-1].bias.fill_(math.nan)
    with pytest.raises(TrainerError, match=r"value is nan in environment 0 of actor 0, step 0.*diverged"):
        actor.collect(message)


def test_a_last_observation_that_is_nan_names_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    actor, _trainer, message, _queue = actor_of("CartPole-v1", 4)
    step = actor.envs.step

    def broken(actions: np.ndarray) -> tuple[Any, ...]:
        obs, reward, terminated, truncated, info = step(actions)
        truncated[2] = True
        last = obs.copy()
        last[2] = np.nan
        return obs, reward, terminated, truncated, {**info, "final_obs": last, "_final_obs": truncated}

    monkeypatch.setattr(actor.envs, "step", broken)
    with pytest.raises(EnvError, match="returned an observation that is NaN or infinite, in environment 2 of actor 0"):
        actor.collect(message)


def test_native_and_torch_actors_collect_the_same() -> None:
    horizon = 30
    actor, trainer, message, _queue = actor_of("CartPole-v1", horizon)
    setup = ActorSetup(
        None, {}, actor.setup.spec, actor.setup.train, 5,
        policy=read_policy(trainer), transition=actor.transition, rollout=actor.setup.rollout,
    )  # fmt: skip
    native = RolloutActor(setup)
    _, _, other, _other_queue = actor_of("CartPole-v1", horizon)
    actor.collect(message)
    native.collect(other)
    for name in ("obs", "action", "reward", "end"):
        np.testing.assert_array_equal(message[name], other[name], err_msg=name)
    for name in ("log_prob", "value", "last_value"):
        np.testing.assert_allclose(message[name], other[name], rtol=1e-4, atol=1e-5, err_msg=name)


class Offset(gym.Env[np.ndarray, np.ndarray]):
    """Its choices are counted from 1 and from 5; it refuses others."""

    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gym.spaces.MultiDiscrete([2, 3], start=[1, 5])

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        self._steps = 0
        return np.zeros(2, np.float32), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action)
        self._steps += 1
        return np.zeros(2, np.float32), 1.0, self._steps == 4, False, {}


gym.register("Offset-v0", Offset)


def test_choices_that_are_not_counted_from_zero_reach_the_environment() -> None:
    actor, trainer, message, _queue = actor_of("Offset-v0", 9)
    actor.collect(message)
    action = rows(message, "action", 9)
    assert action.min() == 0
    assert action.reshape(-1, 2).max(axis=0).tolist() == [1, 2], "the Learner counts from 0"
    found = evaluate(trainer, ActorSpec("Offset-v0"), 3, seed=1)
    assert found is not None
    assert found.returns.tolist() == [4.0] * 3


@pytest.mark.parametrize("algorithm", [PPO, A2C])
def test_switches_are_independent_bernoulli_choices(algorithm: type[PPO]) -> None:
    trainer = make_trainer(algorithm, gym.spaces.Box(-1, 1, (4,), np.float32), gym.spaces.MultiBinary((2, 2)))
    assert isinstance(trainer, PPO)
    distribution = trainer.distribution
    outputs = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    actions = torch.tensor([[0, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0]] * 2)
    odds = outputs.reshape(6, 4, 2).diff(dim=2).squeeze(2)
    bernoulli = torch.distributions.Bernoulli(logits=odds)
    expected = bernoulli.log_prob(actions.float()).sum(dim=1)
    torch.testing.assert_close(distribution.log_prob(outputs, None, actions), expected)
    torch.testing.assert_close(distribution.entropy(outputs, None), bernoulli.entropy().sum(dim=1))
    torch.testing.assert_close(distribution.mode(outputs), (odds > 0).long())
    noise = torch.rand(6, 4, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(distribution.draw(outputs, None, noise), (noise >= 1 - odds.sigmoid()).long())


def test_programs_train_and_load_policies_of_switches(tmp_path: Path, quick_profiles: None) -> None:
    composer = composer_of(tmp_path, horizon=64, epochs=8)
    composer.set_actors(1, env="Switches-v0", envs_per_actor=4)
    composer.set_train_function(TinyPPO, learning_rate=3e-3)
    composer.run()
    program = composer.runtime_gen(path=tmp_path / "switches.py", timesteps=4096)
    code, output = run(program, "--serial", "--eval-episodes", "20", "--run-dir", str(tmp_path / "run"))
    assert code == 0, output
    policy = pearl.load_policy(tmp_path / "run")
    found = evaluate_policy(policy, "Switches-v0", episodes=20)
    assert found.mean > 5.5, "chance gives 4 of 8"
    action = policy.predict(np.array([1, 0, 0, 1], np.int8))
    assert action.dtype == np.int8
    assert policy.action_space.contains(action)


# --- preparation ---


def test_running_statistics_are_those_of_the_papers_recursion() -> None:
    """HEPPO-GAE Eq. 6 to 9, one number after the other; blocks of any size give the same."""
    numbers = np.random.default_rng(0).normal(3.0, 2.0, 500)
    mean = squares = 0.0
    for n, number in enumerate(numbers, 1):
        before, mean = mean, mean + (number - mean) / n
        squares += (number - before) * (number - mean)
    found = RunningStatistics()
    for block in np.split(numbers, [1, 7, 8, 300]):
        found.add(block)
    assert found.count == 500
    assert found.mean == pytest.approx(mean, rel=1e-12)
    assert found.deviation == pytest.approx(math.sqrt(squares / 500), rel=1e-12)
    assert RunningStatistics().deviation == 1.0


@pytest.mark.parametrize("bits", [2, 5, 8, 16])
def test_codes_are_half_a_step_from_the_numbers(bits: int) -> None:
    numbers = np.random.default_rng(1).normal(5.0, 3.0, (40, 6)).astype(np.float32)
    mean, deviation = float(numbers.mean()), float(numbers.std())
    codes = quantized(numbers, bits, mean, deviation, restored=True)
    step = 8.0 / (2**bits - 1) * deviation
    assert np.abs(codes.decoded() - numbers).max() <= step / 2 * (1 + 1e-3) + 1e-5
    assert codes.codes.dtype == (np.uint8 if bits <= 8 else np.uint16)
    assert codes.nbytes == numbers.nbytes // (4 if bits <= 8 else 2)
    kept = quantized(numbers, bits, mean, deviation, restored=False)
    np.testing.assert_array_equal(kept.codes, codes.codes)
    np.testing.assert_allclose(kept.decoded() * deviation + mean, codes.decoded(), atol=1e-4)


def test_numbers_beyond_the_range_saturate_and_are_counted() -> None:
    codes = quantized(np.array([[-100.0, 0.0, 100.0, 3.9]], np.float32), 8, 0.0, 1.0, restored=False)
    assert codes.saturated == 2
    assert codes.codes.tolist()[0][0] == 0
    assert codes.codes.tolist()[0][2] == 255
    ends = quantized(np.array([[-4.0, 4.0]], np.float32), 8, 0.0, 1.0, restored=False)
    assert (ends.saturated, ends.codes.tolist()) == (0, [[0, 255]]), "the ends are within the range"
    spec = RolloutSpec(20, reward_standardization="block", value_standardization="block", quantization_bits=8)
    preparation, shape = RolloutPreparation(spec, 2, 0.9), (20, 2)
    for _ in range(2):
        rewards, values, bonus = (np.zeros(shape, np.float32) for _ in range(3))
        rewards[3, 0], values[7:9, 1] = 50.0, 1.0
        preparation.estimate(NumpyGae(0.9, 0.8), rewards, values, bonus, values[-1].copy(), np.zeros(shape, np.uint8))
    assert preparation.report() == {"saturated_rewards": 2, "saturated_values": 4}


def prepared(spec: RolloutSpec, seed: int = 0, rollouts: int = 1) -> tuple[Any, np.ndarray, np.ndarray]:
    """The preparation after some rollouts, and the last rollout's raw rewards and advantages."""
    rng, shape = np.random.default_rng(seed), (20, 4)
    preparation = RolloutPreparation(spec, 4, 0.9)
    for _ in range(rollouts):
        raw = rng.normal(10.0, 4.0, shape).astype(np.float32)
        rewards, values = raw.copy(), rng.normal(0, 2, shape).astype(np.float32)
        ends = np.zeros(shape, np.uint8)
        preparation.estimate(NumpyGae(0.9, 0.8), rewards, values, np.zeros(shape, np.float32), values[-1], ends)
    return preparation, raw, rewards


@pytest.mark.parametrize("kind", ["none", "returns", "dynamic", "block"])
def test_rewards_are_standardised_before_their_advantages_are_estimated(kind: Any) -> None:
    preparation, raw, advantages = prepared(RolloutSpec(reward_standardization=kind))
    if kind == "none":
        mean, deviation = 0.0, 1.0
    elif kind == "returns":
        discounted = np.zeros((20, 4))
        for t in range(20):
            discounted[t] = raw[t] + (0.9 * discounted[t - 1] if t else 0.0)
        mean, deviation = 0.0, float(discounted.std())
    else:
        mean, deviation = float(raw.mean()), float(raw.std())
    rng = np.random.default_rng(0)
    rng.normal(10.0, 4.0, (20, 4))
    values = rng.normal(0, 2, (20, 4)).astype(np.float32)
    expected = ((raw - mean) / deviation).astype(np.float32)
    NumpyGae(0.9, 0.8).estimate(expected, values, values[-1].copy(), np.zeros((20, 4), np.uint8))
    np.testing.assert_allclose(advantages, expected, rtol=1e-4, atol=1e-4)
    assert preparation.memory()["bytes"] == 2 * raw.nbytes


def test_rewards_divided_by_the_deviation_of_returns_are_clipped_before_a_bonus_is_added() -> None:
    rewards, bonus, values = (np.zeros((1000, 1), np.float32) for _ in range(3))
    ends = np.zeros((1000, 1), np.uint8)
    rewards[-1], bonus[-1], ends[-1] = 5.0, 20.0, ENDED  # the first reward: about 32 deviations
    preparation = RolloutPreparation(RolloutSpec(reward_standardization="returns"), 1, 0.9)
    preparation.estimate(NumpyGae(0.9, 0.0), rewards, values, bonus, np.zeros(1, np.float32), ends)
    assert rewards[-1] == 30.0


@pytest.mark.parametrize("kind", ["returns", "dynamic", "block"])
def test_rewards_that_are_all_equal_leave_numbers(kind: Any) -> None:
    preparation, ends = RolloutPreparation(RolloutSpec(reward_standardization=kind), 2, 0.0), np.zeros((5, 2), np.uint8)
    rewards, values, bonus = np.full((5, 2), 3.0, np.float32), *np.zeros((2, 5, 2), np.float32)
    preparation.estimate(NumpyGae(0.0, 0.0), rewards, values, bonus, np.zeros(2, np.float32), ends)
    assert (rewards == (3.0 if kind == "returns" else 0.0)).all()


def test_dynamic_standardisation_remembers_and_resumes() -> None:
    spec = RolloutSpec(reward_standardization="dynamic")
    preparation, _, _ = prepared(spec, rollouts=3)
    assert preparation.state_dict()["reward_count"] == 3 * 80
    other = RolloutPreparation(spec, 4, 0.9)
    other.load_state_dict(preparation.state_dict())
    assert other.report() == preparation.report()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("reward_count", -80, "a whole number of at least 0"),
        ("reward_count", 240.5, "a whole number of at least 0"),
        ("saturated_values", True, "a whole number of at least 0"),
        ("reward_mean", math.nan, "a finite number"),
        ("reward_mean", "0.5", "a finite number"),
        ("reward_squares", math.inf, "a finite number of at least 0"),
        ("reward_squares", -1.0, "a finite number of at least 0"),
        ("returns", np.zeros(3), r"finite numbers of shape \(4,\)"),
        ("returns", np.full(4, math.nan), r"finite numbers of shape \(4,\)"),
        ("returns", None, r"finite numbers of shape \(4,\)"),
    ],
)
def test_statistics_of_rewards_that_cannot_be_are_refused(name: str, value: Any, message: str) -> None:
    preparation, _, _ = prepared(RolloutSpec(reward_standardization="dynamic"))
    experience = RolloutExperience(preparation, lambda: 0)
    arrays, scalars = experience.state()
    experience.check(arrays, scalars, Path("here"))
    assert all(experience.knows("arrays", key) for key in arrays | scalars)
    of = arrays if f"rollout/{name}" in arrays else scalars
    of[f"rollout/{name}"] = value
    with pytest.raises(CheckpointError, match=f"rollout/{name} of the checkpoint in here must be {message}"):
        experience.check(arrays, scalars, Path("here"))


def test_eight_bits_take_a_quarter_of_the_memory() -> None:
    eight = {"value_standardization": "block", "quantization_bits": 8}
    preparation, raw, advantages = prepared(RolloutSpec(20, reward_standardization="dynamic", **eight))  # type: ignore[arg-type]
    _, _, exact = prepared(RolloutSpec(20, reward_standardization="dynamic"))
    memory = preparation.memory()
    assert memory["bytes"] * 4 == memory["float32_bytes"] == 8 * raw.size
    assert 0 < np.abs(advantages - exact).max() < 0.15
    assert "saturated_rewards" in preparation.report()


def test_vtrace_of_the_present_policy_is_its_lambda_return() -> None:
    rng, shape = np.random.default_rng(2), (15, 3)
    rewards, values = rng.normal(size=(2, *shape)).astype(np.float32)
    last, ends = rng.normal(size=3).astype(np.float32), (rng.random(shape) < 0.2).astype(np.uint8)
    advantages, returns = rewards.copy(), values.copy()
    NumpyGae(0.9, 0.7).estimate(advantages, returns, last, ends)
    corrected, targets = rewards.copy(), values.copy()
    vtrace(corrected, targets, last, ends, np.zeros(shape, np.float32), 0.9, 0.7)
    np.testing.assert_allclose(targets, returns, rtol=1e-4, atol=1e-5)


def test_vtrace_is_the_papers_sum() -> None:
    """v_s = V_s + sum over t of gamma^(t-s) (c_s ... c_{t-1}) delta_t (Espeholt et al. 2018, Eq. 1), in float64."""
    rng, horizon = np.random.default_rng(3), 9
    rewards, values, log_ratios = rng.normal(size=(3, horizon, 1))
    last = rng.normal(size=1)
    ends = np.zeros((horizon, 1), np.uint8)
    found, targets = rewards.astype(np.float32), values.astype(np.float32)
    vtrace(found, targets, last.astype(np.float32), ends, log_ratios.astype(np.float32), 0.9, 1.0)
    v, r, rho = np.append(values[:, 0], last), rewards[:, 0], np.minimum(1.0, np.exp(log_ratios[:, 0]))
    expected = [
        v[s]
        + sum(0.9 ** (t - s) * np.prod(rho[s:t]) * rho[t] * (r[t] + 0.9 * v[t + 1] - v[t]) for t in range(s, horizon))
        for s in range(horizon)
    ]
    np.testing.assert_allclose(targets[:, 0], expected, rtol=1e-4, atol=1e-5)
    following = np.append(expected[1:], last)
    np.testing.assert_allclose(found[:, 0], rho * (r + 0.9 * following - v[:-1]), rtol=1e-4, atol=1e-5)


# --- settings ---


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"horizon": 0}, "horizon must be a whole number of at least 1"),
        ({"gae_lambda": 1.5}, r"gae_lambda must lie in \[0, 1\]"),
        ({"policy_lag": 2}, "policy_lag must be 0"),
        ({"correction": "none"}, "correction must be one of clip, vtrace"),
        ({"correction": "vtrace"}, "is for policy_lag=1"),
        ({"quantization_bits": 1}, "from 2 to 16"),
        ({"quantization_bits": 17}, "from 2 to 16"),
        ({"quantization_bits": 8}, "needs numbers of a known range"),
        ({"reward_standardization": "all"}, "must be one of none, returns, dynamic, block, block_restored"),
    ],
)
def test_bad_rollout_settings_say_what_is_valid(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        RolloutSpec(**settings)


def test_minibatches_must_divide_the_rollout() -> None:
    actors = ActorSpec("CartPole-v1", count=2, envs_per_actor=3)
    assert check_minibatches(RolloutSpec(horizon=10), actors, TrainSpec(batch_size=15)) == 4
    with pytest.raises(
        ConfigurationError, match=r"10 steps x 6 environments = 60 .* minibatches of 16. .* to 15 or 20"
    ):
        check_minibatches(RolloutSpec(horizon=10), actors, TrainSpec(batch_size=16))


def test_composing_refuses_minibatches_of_one_normalised_advantage(tmp_path: Path) -> None:
    composer = composer_of(tmp_path, horizon=8)
    composer.set_training(batch_size=1)
    with pytest.raises(ConfigurationError, match="batch_size=1; set it to at least 2, or normalize_advantages=False"):
        composer.run()


# --- the Learner's loop ---


def test_a_buffer_has_the_environments_of_each_actor_next_to_each_other() -> None:
    actors, horizon = ActorSpec("CartPole-v1", count=2, envs_per_actor=3), 4
    transition = rollout_columns(gym.spaces.Box(-1, 1, (2,)), gym.spaces.Discrete(2))
    buffer = RolloutBuffer(transition, RolloutSpec(horizon), actors)
    messages = []
    for actor in range(2):
        numbers = np.arange(horizon * 3).reshape(horizon, 3) + 100 * actor
        message = transition.empty(horizon * 3)
        for column in message.values():
            column.T[:] = numbers.ravel()
        messages.append({**message, "last_value": numbers[-1] + 0.5})
    buffer.take(messages)
    expected = np.concatenate([np.arange(12).reshape(4, 3), np.arange(100, 112).reshape(4, 3)], axis=1)
    np.testing.assert_array_equal(buffer.rewards, expected)
    np.testing.assert_array_equal(buffer.last_values, expected[-1] + 0.5)
    np.testing.assert_array_equal(buffer.flat()["log_prob"], expected.ravel())
    buffer.ends[:] = GOES_ON
    assert buffer.rows() is None
    buffer.ends[1, 4] = NO_STEP
    np.testing.assert_array_equal(buffer.rows(), np.delete(np.arange(24), 1 * 6 + 4))


def through_the_loop(spec: RolloutSpec, ends: np.ndarray) -> tuple[int, float, RolloutBuffer, np.ndarray]:
    """One rollout in the Learner's loop: its minibatches and td_error, its buffer, and how the weights moved.

    `ends` is `(horizon, envs)`. Values are 5 and rewards 1, but 0 where an environment was reset in place of a step.
    """
    observations, actions = spaces_of("CartPole-v1")
    trainer = make_trainer(TinyPPO, observations, actions, seed=1)
    learner = NativeRolloutLearner(trainer, epochs=2, batch_size=4)
    actors = ActorSpec("CartPole-v1", envs_per_actor=ends.shape[1])
    buffer = RolloutBuffer(rollout_columns(observations, actions), spec, actors)
    for column in buffer.columns.values():
        column[...] = 0
    buffer.ends[...], buffer.rewards[...] = ends, ends != NO_STEP
    buffer.values[...] = buffer.last_values[...] = 5.0
    bell = Bell()
    laq, ldq, wsq = RolloutAssignmentQueue(), RolloutDoneQueue(bell), WeightSyncQueue(learner.weight_count)
    worker = RolloutWorker(
        *(laq, ldq, wsq, bell),
        buffer=buffer,
        preparation=RolloutPreparation(spec, actors.env_count, 0.9),
        advantages=NumpyGae(0.9, 0.8),
        learner=learner,
        trainer=trainer,
    )
    before, after = np.empty((2, learner.weight_count), np.float32)
    learner.write_weights(before)
    laq.assign(0.5)
    assert worker.take(0.0)
    learner.write_weights(after)
    found = ldq.peek()
    assert found is not None
    told, _ = found
    return int(told["minibatches"][0]), float(told["td_error"][0]), buffer, after - before


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("bits", [0, 8])
def test_a_rollout_of_nothing_but_resets_is_not_trained_on(bits: int) -> None:
    blocks: dict[str, Any] = {"reward_standardization": "block", "value_standardization": "block"}
    spec = RolloutSpec(horizon=1, quantization_bits=bits, **blocks)
    minibatches, _, _, moves = through_the_loop(spec, np.full((1, 4), NO_STEP, np.uint8))
    assert minibatches == 0
    assert not moves.any()


def test_resets_are_not_among_the_advantages_that_are_told() -> None:
    ends = np.array([[GOES_ON, ENDED], [ENDED, NO_STEP], [NO_STEP, GOES_ON]], np.uint8)
    minibatches, td_error, buffer, _ = through_the_loop(RolloutSpec(horizon=3), ends)
    assert minibatches == 2
    assert td_error == pytest.approx(np.abs(buffer.rewards[ends != NO_STEP]).mean())


def test_vtrace_clips_values_around_those_of_the_present_policy() -> None:
    spec = RolloutSpec(horizon=3, policy_lag=1, correction="vtrace", gae_lambda=0.5)
    _, _, buffer, _ = through_the_loop(spec, np.full((3, 2), GOES_ON, np.uint8))
    trainer = make_trainer(TinyPPO, *spaces_of("CartPole-v1"), seed=1)
    flat, value = buffer.flat(), float(trainer.values(torch.zeros(1, 4)).detach())
    np.testing.assert_allclose(flat["value"], value, atol=1e-6)
    assert np.abs(flat["ret"] - flat["advantage"] - value).max() > 0.1


@pytest.mark.parametrize(
    ("minibatches", "transitions", "samples"),
    [(20, 128, 5 * 128), (3, 128, 96), (0, 128, 0), (5, 100, 132), (20, 100, 500), (3, 0, 0)],
)
def test_samples_are_those_of_the_minibatches_that_were_made(minibatches: int, transitions: int, samples: int) -> None:
    assert samples_of(minibatches, transitions, batch_size=32, epochs=5) == samples


# --- composed programs ---


def composer_of(folder: Path, calibration: Path | None = None, **rollout: Any) -> Composer:
    composer = Composer(progress=False, calibration=calibration)
    devices, connections = write_csv_pair(folder, ONE_CPU)
    composer.set_device_file(devices)
    composer.set_connection_file(connections)
    composer.set_actors(1, env="CartPole-v1", envs_per_actor=4)
    composer.set_train_function(learner=TinyPPO)
    composer.set_rollout(**rollout)
    return composer


@pytest.mark.parametrize(
    ("trainer", "forced", "reason"),
    [
        (TinyPPO, "sycl", "rollouts, which native and torch Learners take"),
        (RecurrentPPO, "native", "recurrent networks, which train and act in torch"),
    ],
)
def test_a_forced_learner_that_cannot_train_it_is_refused(
    tmp_path: Path, trainer: type, forced: str, reason: str
) -> None:
    composer = composer_of(tmp_path, horizon=128)
    composer.set_train_function(trainer, implementation=forced)
    message = rf"The {forced} Learner cannot train {trainer.__name__} \(unsupported: {reason}\)"
    with pytest.raises(TrainerError, match=message):
        composer.check()


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory, quick_profiles: None) -> Path:
    folder = tmp_path_factory.mktemp("on_policy")
    composer = composer_of(folder, reward_standardization="returns")  # its statistics and sums go on with a run
    advantages, learner = composer.run(timesteps=1000)
    assert RolloutMatrix.from_json(composer.matrix.to_json()) == composer.matrix
    assert RolloutPlacement.from_json(composer.placement.to_json()) == composer.placement
    assert "GAE" in str(composer.matrix)
    assert {c.learner.implementation for c in composer.placement.candidates} == {"native", "torch"}
    other = composer.placement.with_choice("cpu0", "cpu0", "native", threads=2).choice.learner
    assert (other.implementation, other.threads) == ("native", 2)
    with pytest.raises(PlacementError, match="native Learner on cpu0 with"):
        composer.placement.with_choice("cpu0", "cpu0", "sycl")
    return composer.runtime_gen(advantages, learner, folder / "program.py", timesteps=1500)


def trained(program: Path, *arguments: str) -> None:
    code, output = run(program, *arguments)
    assert code == 0, output


@pytest.fixture(scope="module")
def first_run(program: Path) -> Path:
    """The folder of a run of 640 steps, which tests leave as it is."""
    run_dir = program.parent / "trained"
    # Iterations that a checkpoint or an evaluation interrupts are not timed.
    rarely = ("--checkpoint-interval", "10000", "--eval-interval", "10000")
    trained(program, "--run-dir", str(run_dir), "--eval-episodes", "4", "--timesteps", "640", *rarely)
    return run_dir


def test_a_program_trains_and_resumes(program: Path, first_run: Path, tmp_path: Path) -> None:
    first = summary(first_run)
    assert first["env_steps"] == 640
    assert first["gradient_steps"] == 640 // 64 * 2 * 2, "10 rollouts of 64 rows, 2 epochs of 2 minibatches"
    assert first["replay_ratio"] == 2.0
    assert first["rollout"]["memory"]["bytes"] == 8 * 64
    assert first["rollout"]["policy_lag"] == 0
    assert set(first["iteration"]["measured_us"]) >= {"collection", "advantages", "training", "iteration"}
    run_dir = Path(shutil.copytree(first_run, tmp_path / "resumed"))
    trained(program, "--run-dir", str(run_dir), "--eval-episodes", "0", "--timesteps", "960", "--resume")
    again = summary(run_dir)
    assert again["env_steps"] == 960
    assert again["gradient_steps"] == 960 // 64 * 4


def test_a_report_shows_the_platform_the_matrix_and_every_placement(first_run: Path) -> None:
    made = read_composition((first_run / "composition.json").read_text())
    assert isinstance(made, RolloutComposition)
    assert made.matrix.collection.samples is None
    page = ElementTree.fromstring(report_page(first_run).partition("\n")[2])
    diagram = next(svg for svg in page.iter("svg") if svg.get("aria-label", "").startswith("Platform"))
    assert "cpu0: GAE, Learner, Actors" in diagram.attrib["aria-label"]
    text = " ".join("".join(page.itertext()).split())
    for shown in (
        "Collecting and training take turns.",
        "Rollout64 transitions",
        "An iteration, which is one rollout, takes",
        "one after the other slowest",
        "GAE + Learner",
        "cpu0 + cpu0 (torch, threads 1)",
        "us longer",
        "iteration µs",
    ):
        assert shown in text, shown
    marked = [cell for cell in page.iter("td") if cell.get("class") == "chosen"]
    assert [cell.get("data-label") for cell in marked] == ["GAE", "Learner"]


def test_a_serial_run_repeats_and_resumes_to_the_bit(program: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    common = ("--serial", "--eval-episodes", "0", "--checkpoint-interval", "320", "--timesteps", "640")
    trained(program, *common, "--run-dir", str(tmp_path / "whole"))
    half, _ = sorted((tmp_path / "whole" / "checkpoints").glob("checkpoint-*"))
    shutil.copytree(half, tmp_path / "half" / "checkpoints" / half.name)
    trained(program, *common, "--run-dir", str(tmp_path / "half"), "--resume")
    whole, resumed = (load_file(tmp_path / name / "weights.safetensors") for name in ("whole", "half"))
    assert whole.keys() == resumed.keys()
    for name, tensor in whole.items():
        assert torch.equal(tensor, resumed[name]), name


def test_a_program_measures_itself(program: Path) -> None:
    run_dir = program.parent / "bench"
    trained(program, "--bench", "--bench-seconds", "1", "--run-dir", str(run_dir))
    found = json.loads((run_dir / "bench.json").read_text())
    assert found["measured_eps"] > 100
    assert found["paced_at"] == 2.0


@pytest.mark.parametrize("correction", ["clip", "vtrace"])
def test_collecting_goes_on_during_training_with_a_lag_of_one(
    tmp_path: Path, correction: str, quick_profiles: None
) -> None:
    composer = composer_of(tmp_path, policy_lag=1, correction=correction)
    composer.set_actors(2, env="CartPole-v1", envs_per_actor=2)
    path = composer.runtime_gen(*composer.run(), tmp_path / "lagging.py", timesteps=1500)
    assert "policy_lag=1" in path.read_text()
    trained(path, "--run-dir", str(tmp_path / "run"), "--eval-episodes", "0", "--timesteps", "960")
    found = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert found["gradient_steps"] == 960 // 64 * 4
    assert found["rollout"]["policy_lag"] == 1


def test_a_composition_file_has_a_table_of_rollouts(tmp_path: Path, quick_profiles: None) -> None:
    devices, connections = write_csv_pair(tmp_path, ONE_CPU)
    spec = tmp_path / "ppo.toml"
    spec.write_text(
        f"""
[platform]
devices = "{devices.name}"
connections = "{connections.name}"
[actors]
env = "CartPole-v1"
envs_per_actor = 4
[trainer]
class = "pearl.algorithms:PPO"
hidden_sizes = [8]
[rollout]
horizon = 16
epochs = 3
reward_standardization = "dynamic"
value_standardization = "block"
quantization_bits = 8
[training]
batch_size = 32
"""
    )
    composer, options = load_spec(spec, progress=False)
    composer.run()
    text = composer.runtime_gen(path=options.path, timesteps=256).read_text()
    for line in ("horizon=16", "epochs=3", 'reward_standardization="dynamic"', "quantization_bits=8", "batch_size=32"):
        assert line in text, line


@pytest.mark.sycl
@pytest.mark.skipif(not EMULATOR.ok, reason=f"no SYCL: {EMULATOR.reason}")
def test_gae_has_a_cell_on_every_device(tmp_path: Path, quick_profiles: None) -> None:
    """Measured on SYCL's device, modelled on a board; the emulator, whose times mean nothing, has none."""
    composer = composer_of(tmp_path, horizon=64)
    rows = (*ONE_CPU, "sycl0,cpu,sycl,cpu,2,60")
    devices, connections = write_csv_pair(tmp_path, rows, ["cpu0,sycl0,1,10", "cpu0,board,2,10"])
    header, *lines = devices.read_text().splitlines()
    lines = [f"{line},,," for line in lines] + ["board,fpga,sycl,fpga,,75,300,5760,229000"]
    devices.write_text("\n".join([f"{header},clock_mhz,dsp,sram_kb", *lines]) + "\n")
    composer.set_device_file(devices)
    composer.set_connection_file(connections)
    composer.run()
    board = composer.matrix["board"].advantages.estimate
    assert board.source == "modelled"
    # Two environments for each of two elements, 64 steps and the latency each, at 300 MHz; two messages of 2 us.
    assert board.value_us == pytest.approx(2 * (64 + 9) / 300 + 2 * 2 + (4 * 64 * 17 + 16) / 10e3, rel=0.01)
    assert "the kernels for fpga devices do not train on rollouts" in composer.matrix["board"].learners[0].reason
    assert all(candidate.learner.device == "cpu0" for candidate in composer.placement.candidates)


@pytest.mark.sycl
@pytest.mark.skipif(not EMULATOR.ok, reason=f"no FPGA emulator: {EMULATOR.reason}")
def test_programs_with_gae_on_any_device_train_alike(tmp_path: Path, quick_profiles: None) -> None:
    """On SYCL's CPU device to the bit as on the CPU, on the FPGA emulator but for rounding; a board has no program."""
    from safetensors.torch import load_file

    composer = composer_of(tmp_path, horizon=16)
    header = "name,kind,backend,selector,cores,clock_mhz,dsp,sram_kb,luts,active_watts,idle_watts"
    rows = ["cpu0,cpu,cpu,,2,,,,,60,", "sycl0,cpu,sycl,opencl:cpu:0,2,,,,,60,"]
    rows += [f"{name},fpga,sycl,{name},,300,5760,229000,974400,45,5" for name in ("fpga_emu", "fpga")]
    devices, connections = tmp_path / "devices.csv", tmp_path / "connections.csv"
    devices.write_text("\n".join([header, *rows]) + "\n")
    links = [f"cpu0,{name},1,10" for name in ("sycl0", "fpga_emu", "fpga")]
    connections.write_text("\n".join(["source,target,latency_us,bandwidth_gbps", *links]) + "\n")
    composer.set_device_file(devices)
    composer.set_connection_file(connections)
    composer.run(budget_s=0)
    weights = {}
    for name in ("cpu0", "sycl0", "fpga_emu"):
        chosen = composer.placement.with_choice(name, "cpu0", "native", threads=1).choice
        program = composer.runtime_gen(chosen.advantages, chosen.learner, tmp_path / f"on_{name}.py", timesteps=640)
        trained(program, "--serial", "--eval-episodes", "0", "--run-dir", str(tmp_path / name))
        weights[name] = load_file(tmp_path / name / "weights.safetensors")
        found = json.loads((tmp_path / name / "summary.json").read_text())
        assert found["gradient_steps"] == 640 // 64 * 4
        assert f'"advantages": "{name}"' in program.read_text()
    for name, tensor in weights["cpu0"].items():
        assert torch.equal(tensor, weights["sycl0"][name]), name
        # Two steps of lookahead add in another order.
        torch.testing.assert_close(weights["fpga_emu"][name], tensor, rtol=1e-4, atol=1e-5, msg=name)
    assert 'PoweredDevice(name="cpu0"' in (tmp_path / "on_sycl0.py").read_text()
    board = composer.placement.with_choice("fpga", "cpu0", "native").choice
    with pytest.raises(GenerationError, match=r"fpga is an FPGA board.*No program can run there"):
        composer.runtime_gen(board.advantages, board.learner, tmp_path / "board.py")


def test_a_program_is_composed_again_from_its_own_values(tmp_path: Path, quick_profiles: None) -> None:
    composer = composer_of(tmp_path, horizon=16, reward_standardization="dynamic")
    composer.set_train_function(learner=TinyPPO, clip_range=0.3)
    composer.set_training(batch_size=32, gamma=0.9)
    program = composer.runtime_gen(*composer.run(), tmp_path / "program.py", timesteps=20_000)
    made = recompose(program, progress=False)
    values = re.compile(r"^(?:ACTORS|ROLLOUT|TRAIN|SETTINGS).*?^[)}]", re.MULTILINE | re.DOTALL)
    assert len(values.findall(program.read_text())) == 4
    assert values.findall(program.read_text()) == values.findall(made.program.read_text())
    assert made.before.startswith("GAE on cpu0")
    # Predicted to be a hundred times as fast, and nothing to compose again with: it says so and goes on.
    text = program.read_text()
    eps = re.search(r"predicted_eps=([\d.]+)", text)
    assert eps is not None
    program.write_text(text.replace(eps[0], f"predicted_eps={float(eps[1]) * 100}"))
    (tmp_path / "devices.csv").unlink()
    code, output = run(program, "--eval-episodes", "0", "--recompose", "--drift-seconds", "0.2")
    assert code == 0, output
    assert "Stopping: composing again, as for 0.2 s iterations take" in output
    assert re.search(r"devices.csv cannot be read.*\nThe run goes on with program.py", output)
    assert "Resumed from" in output


def test_profiling_tells_of_each_measurement_before_it_is_made(tmp_path: Path, quick_profiles: None) -> None:
    composer, lines = composer_of(tmp_path, calibration=tmp_path / "calibration.json"), list[str]()
    profiled = composer.profile(watch=lines.append, budget_s=0)
    assert profiled.measured == len(lines) > 2
    assert lines[0] == "cpu0: GAE of 64 transitions"
    assert composer.profile(watch=lines.append, budget_s=0) == Profiled(0, profiled.measured + profiled.known)
    assert len(lines) == profiled.measured


def test_a_placement_is_explained(tmp_path: Path, quick_profiles: None) -> None:
    composer = composer_of(tmp_path)
    composer.run(budget_s=0)
    text = " ".join(str(composer.placement.explain()).split())
    assert "Chosen: GAE on cpu0" in text
    assert "Not chosen: GAE on cpu0, torch Learner" in text
    torch_wins = composer.placement.with_choice("cpu0", "cpu0", "torch")
    assert "the choice was edited" in " ".join(str(torch_wins.explain()).split())
    shorter = str(composer.placement.explain(pairs=0))
    assert "Not chosen" not in shorter
    assert "more are in the table" in shorter
    file = tmp_path / "mine.placement.json"
    file.write_text(composer.placement.to_json())
    refused = CliRunner().invoke(app, ["explain", str(file), str(file)])
    assert refused.exit_code == 1
    assert "explain each of rollouts on its own" in refused.output


def test_a_budget_tries_programs_and_places_the_fastest(
    tmp_path: Path, quick_profiles: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("composer.on_policy.trials.MOST_RUNS", 1)
    monkeypatch.setattr("composer.trials._MEASURED_S", 0.3)
    composer = composer_of(tmp_path)
    before = composer.run(budget_s=0)
    assert all(candidate.tried is None for candidate in composer.placement.candidates)
    composer.run(budget_s=60)
    tried = [candidate for candidate in composer.placement.candidates if candidate.tried is not None]
    assert composer.placement.choice in tried
    assert composer.placement.choice.terms.t_itr_us == min(candidate.terms.t_itr_us for candidate in tried)
    assert composer.placement.choice.tried.source == "measured"
    assert "(tried)" in str(composer.placement)
    known = composer.profile(budget_s=60)
    assert known.measured == 0, "a trial is kept as any measurement"
    assert before[0].device == "cpu0"


@pytest.mark.parametrize(
    ("budget_s", "scripted", "expected_us", "counts"),
    [
        # One number of threads of each Learner. The first was lucky in its first run.
        (None, [1000.0, 1100.0, 1250.0, 1100.0], 1100.0, [2, 2]),
        # All of them. The last two are far behind.
        (60, [1000.0, 1100.0, 1900.0, 1900.0, 1200.0, 1100.0, 1050.0, 1150.0], 1050.0, [3, 3, 1, 1]),
    ],
)
def test_close_programs_run_again(
    tmp_path: Path,
    quick_profiles: None,
    monkeypatch: pytest.MonkeyPatch,
    budget_s: float | None,
    scripted: list[float],
    expected_us: float,
    counts: list[int],
) -> None:
    ran: list[float] = []

    def bench(program: Path, batch_size: int, limit_s: float) -> dict[str, Measurement]:
        us = scripted[len(ran)]
        ran.append(us)
        program.touch()
        return dict.fromkeys(("paced", "free", "overall"), Measurement(us, us, us, 1, "measured"))

    monkeypatch.delenv("PEARL_BUDGET_S", raising=False)
    monkeypatch.setattr("composer.trials.bench_program", bench)
    monkeypatch.setattr("composer.on_policy.trials.OPTIMISM", math.inf)
    monkeypatch.setattr("composer.on_policy.trials.DECISIVE", math.inf)
    for bound in ("_SLOW_BY_BOUND", "_SLOW_BY_WARM_UP"):
        monkeypatch.setattr(f"composer.profiling.context.{bound}", math.inf)
    composer = composer_of(tmp_path, calibration=tmp_path / "calibration.json")
    composer.run(budget_s=budget_s)
    choice = composer.placement.choice
    assert len(ran) == len(scripted)
    assert choice.tried is not None
    assert choice.terms.t_itr_us == choice.tried.value_us == expected_us
    assert [c.tried.n for c in composer.placement.candidates if c.tried is not None] == counts
    assert composer.profile(budget_s=budget_s).measured == 0, "what is known does not run again"


def test_a_program_does_not_run_longer_than_the_budget(
    tmp_path: Path, quick_profiles: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    limits: list[float] = []

    def bench(program: Path, batch_size: int, limit_s: float) -> dict[str, Measurement]:
        limits.append(limit_s)
        program.touch()
        raise subprocess.TimeoutExpired([str(program)], limit_s)

    monkeypatch.setattr("composer.trials.bench_program", bench)
    composer = composer_of(tmp_path, calibration=tmp_path / "calibration.json")
    composer.progress = True
    composer.run(budget_s=20)
    assert limits
    assert all(0 < limit_s <= 20 for limit_s in limits)
    assert "thread(s): the time for trials ended while it ran" in capsys.readouterr().out
    assert all(candidate.tried is None for candidate in composer.placement.candidates)


def test_a_program_that_fails_is_not_chosen(
    tmp_path: Path, quick_profiles: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def bench(program: Path, batch_size: int, limit_s: float) -> dict[str, Measurement]:
        program.touch()
        raise FailedError("it fell over") if program.stem == "0" else subprocess.TimeoutExpired([str(program)], limit_s)

    monkeypatch.setattr("composer.trials.bench_program", bench)
    composer = composer_of(tmp_path, calibration=tmp_path / "calibration.json")
    composer.progress = True
    composer.run(budget_s=20)
    failed = re.search(r"not tried: (.*): it fell over", " ".join(capsys.readouterr().out.split()))
    assert failed is not None
    assert composer.placement.choice.text != failed[1]
    assert composer.placement.candidates[-1].text == failed[1]


def candidate_of(us: float, implementation: str, threads: int) -> RolloutCandidate:
    terms = RolloutTerms(0.0, 0.0, 0.0, us, us)
    return RolloutCandidate(AdvantagesConfig("cpu0"), RolloutLearnerConfig("cpu0", implementation, threads), terms)


@pytest.mark.parametrize(
    ("terms", "placement", "message"),
    [
        ({"t_itr_us": 0.0}, {}, "t_itr_us must be above 0; found 0.0"),
        ({"collection_us": -1.0}, {}, "collection_us must be finite and at least 0; found -1.0"),
        ({}, {"rows": 0}, "rows must be at least 1; found 0"),
        ({}, {"candidates": []}, "at least one candidate; found none"),
    ],
)
def test_a_document_of_a_placement_with_impossible_values_is_refused(
    terms: dict[str, float], placement: dict[str, Any], message: str
) -> None:
    document = json.loads(RolloutPlacement("cpu0", 32, 0, 1, 4, (candidate_of(100.0, "native", 1),)).to_json())
    document["candidates"][0]["terms"] |= terms
    with pytest.raises(ConfigurationError, match=message):
        RolloutPlacement.from_json(json.dumps(document | placement))


def test_numbers_of_threads_are_not_tried_and_other_learners_only_where_the_parts_are_close() -> None:
    found = candidate_of(100.0, "native", 2), candidate_of(105.0, "native", 1), candidate_of(430.0, "torch", 1)
    assert is_decided(RolloutPlacement("cpu0", 32, 0, 1, 4, found))
    close = (*found, candidate_of(380.0, "torch", 2))
    assert not is_decided(RolloutPlacement("cpu0", 32, 0, 1, 4, close))


def test_of_each_learner_the_fewest_threads_that_no_other_is_worth() -> None:
    four, two, one = (candidate_of(us, "native", n) for us, n in ((100.0, 4), (105.0, 2), (112.0, 1)))
    torch = candidate_of(101.0, "torch", 1)
    assert of_each_learner([two, one]) == [one]
    assert of_each_learner([four, two, one]) == [four], "worth it next to one thread, which two are not"
    assert of_each_learner([two, torch, one]) == [torch, one]


@pytest.mark.parametrize(("with_two_us", "threads"), [(91.5, 1), (90.5, 2)])
def test_more_threads_have_to_be_faster_by_a_tenth(
    with_two_us: float, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick_profiles: None
) -> None:
    found = [candidate_of(300.0, "torch", 1), candidate_of(100.0, "native", 1), candidate_of(with_two_us, "native", 2)]
    monkeypatch.setattr("composer.on_policy.placement._candidates", lambda *_: iter(found))
    composer = composer_of(tmp_path, calibration=tmp_path / "calibration.json")
    composer.run(budget_s=0)
    placement = composer.placement
    assert placement.choice.learner == RolloutLearnerConfig("cpu0", "native", threads)
    assert [c.terms.t_itr_us for c in placement.candidates][-1] == 300.0
    needless = "It needs more threads, and is not faster by a tenth than with fewer."
    assert (needless in " ".join(str(placement.explain()).split())) == (threads == 1)
    edited = placement.choosing(found[0])  # torch
    assert "the choice was edited" in " ".join(str(edited.explain()).split())


def test_a_stated_placement_of_rollouts_is_one_of_the_composers_own(tmp_path: Path, quick_profiles: None) -> None:
    composer = composer_of(tmp_path)
    composer.run(budget_s=0)
    placement = composer.placement
    other = next(c for c in placement.candidates if c.learner.implementation == "torch")
    text = composer.runtime_gen(path=tmp_path / "torch.py", placement=placement.choosing(other)).read_text()
    assert f"with {other.learner.threads} thread(s)" in text
    assert "torch Learner" in text
    unknown = replace(placement.choice, learner=replace(placement.choice.learner, threads=77))
    for wrong in (replace(placement, rows=9999), replace(placement, candidates=(unknown,)), object()):
        with pytest.raises(PlacementError, match="must be the composer's own"):
            composer.runtime_gen(path=tmp_path / "wrong.py", placement=wrong)
    with pytest.raises(ConfigurationError, match="less than one rollout"):
        composer.runtime_gen(path=tmp_path / "wrong.py", timesteps=3)
    instead = r"runtime_gen\(placement=composer\.placement\.choosing\(candidate\)\)"
    with pytest.raises(PlacementError, match=f"found a RolloutPlacement.*{instead}"):
        composer.set_placement(placement)
    composer.edited = place(MATRIX, SERVER, batch_size=BATCH, transition_bytes=TRANSITION, actor_count=ACTORS)
    with pytest.raises(ConfigurationError, match=f"TinyPPO learns from rollouts, and set_placement .*{instead}"):
        composer.run()
    assert not (tmp_path / "wrong.py").exists()


def test_a_learner_that_is_far_too_slow_by_its_calls_is_not_measured(
    tmp_path: Path, quick_profiles: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("composer.trials.bench_program", lambda *_: pytest.fail("a program was tried"))
    monkeypatch.setattr("pearl.learner.torch_learner._CALLS_US", 1e6)
    composer = composer_of(tmp_path)
    composer.run(budget_s=0)
    assert {c.learner.implementation for c in composer.placement.candidates} == {"native", "torch"}
    assert composer.matrix.unsupported == ()
    monkeypatch.delenv("PEARL_BUDGET_S", raising=False)
    composer = composer_of(tmp_path)
    composer.run()
    assert {c.learner.implementation for c in composer.placement.candidates} == {"native"}
    (left_out,) = composer.matrix.unsupported
    assert (left_out.implementation, left_out.slow) == ("torch", True)
    assert "its calls alone take" in str(composer.matrix)


def test_replay_and_rollouts_do_not_mix(tmp_path: Path, quick_profiles: None) -> None:
    composer = composer_of(tmp_path)
    composer.set_replay(1000)
    with pytest.raises(ConfigurationError, match=r"TinyPPO learns from rollouts .* leave set_replay"):
        composer.run()
    composer = composer_of(tmp_path)
    composer.set_training(replay_ratio=4.0)
    with pytest.raises(ConfigurationError, match="replay_ratio of set_training"):
        composer.run()
    composer = composer_of(tmp_path, horizon=32)
    composer.set_train_function(learner=DQN)
    composer.set_replay(1000)
    with pytest.raises(ConfigurationError, match="DQN learns from a replay: leave set_rollout"):
        composer.run()
    composer = composer_of(tmp_path)
    with pytest.raises(ConfigurationError, match="less than one rollout"):
        composer.run(timesteps=10)


def test_a2c_trains_once_on_whole_rollouts(tmp_path: Path, quick_profiles: None) -> None:
    composer = composer_of(tmp_path)
    composer.set_train_function(learner=A2C)
    composer.run()
    assert composer.runtime_gen(path=tmp_path / "a2c.py").read_text().count("batch_size=32") == 1
    composer.set_train_function(learner=A2C, batch_size=16)
    composer.run()
    assert composer.runtime_gen(path=tmp_path / "a2c.py").read_text().count("batch_size=16") == 1
