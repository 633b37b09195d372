"""Algorithms with a replay normalise observations and rewards by statistics that all actors of a run share."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from policies import CASES, run_folder
from programs import make_program, run, running, summary
from safetensors.numpy import load_file, save_file
from trainers import TinyDQN, TinySAC

import pearl
from pearl.actors.actor import Actor, ActorSetup
from pearl.actors.running_statistics import ActorStatistics
from pearl.algorithms import DQN, SAC
from pearl.algorithms.arrays import ArrayStatistics
from pearl.algorithms.policy_and_value import ObservationStatistics
from pearl.algorithms.trainer import make_trainer, transition_of
from pearl.errors import ConfigurationError, PolicyError, TrainerError
from pearl.moments import Moments
from pearl.replay.frames import check_shared
from pearl.runtime.evaluation import EvaluationEnvs, play
from pearl.runtime.queues import DataCollectionQueue
from pearl.runtime.statistics import RunStatistics
from pearl.runtime.trainer_state import load_module_tensors, module_tensors
from pearl.spec import OBSERVATION_STATISTICS, RETURN_STATISTICS, ActorSpec, ReplaySpec, TrainSpec

BOTH = {"normalize_observations": True, "reward_standardization": "returns"}
VECTOR = spaces.Box(-np.inf, np.inf, (4,), np.float32)
GAMMA, EPISODE = 0.9, 5


class Drifting(gym.Env[np.ndarray, np.int64]):
    """Observations and rewards that follow from the count of steps alone, far from 0 and from 1 in size."""

    def __init__(self) -> None:
        self.observation_space, self.action_space = VECTOR, spaces.Discrete(2)
        self.count = 0

    def _seen(self) -> np.ndarray:
        self.count += 1
        return np.array([self.count, 1000 - self.count**2, 7, np.sin(self.count)], np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps = 0
        return self._seen(), {}

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        return self._seen(), 10.0 * self.count, self.steps == EPISODE, False, {}


gym.register("Drifting-v0", lambda: Drifting(), disable_env_checker=True)


@given(st.lists(st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=6), min_size=1, max_size=5))
def test_moments_do_not_depend_on_the_blocks(blocks: list[list[float]]) -> None:
    whole, merged = Moments(()), Moments(())
    numbers = np.concatenate([np.array(block) for block in blocks])
    whole.add(numbers)
    for block in blocks:
        part = Moments(())
        part.add(np.array(block))
        merged.merge(part.flat)
    assert merged.count == len(numbers)
    np.testing.assert_allclose(merged.mean, numbers.mean(), rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(merged.squares, numbers.var() * len(numbers), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(merged.flat, whole.flat, rtol=1e-6, atol=1e-6)
    before = merged.flat.copy()
    merged.add(np.empty(0))  # of a message of nothing but resets
    merged.merge(Moments(()).flat)
    np.testing.assert_array_equal(merged.flat, before)


def test_numbers_that_change_little_are_scaled_as_by_vecnormalize() -> None:
    deviations = np.array([100.0, 1.0, 1e-3, 1e-5, 1e-6, 0.0])
    numbers = 0.1 + deviations * np.array([[-1.0], [1.0]])
    moments, of_ppo, of_ppo_in_torch = Moments((6,)), ArrayStatistics((6,)), ObservationStatistics((6,))
    for repeats in (3, 11, 100):  # the mean of so many times 0.1 is rounded
        block = np.repeat(numbers, repeats, axis=0)
        moments.add(block)
        of_ppo.add(block)
        of_ppo_in_torch.add(torch.from_numpy(block))
    assert moments.squares[-1] > 0.0
    expected = np.where(deviations == 0.0, 1.0, 1.0 / np.sqrt(deviations**2 + 1e-8))  # its epsilon
    for found in (moments.scale, of_ppo.scale, of_ppo_in_torch.scale.numpy()):
        np.testing.assert_allclose(found, expected, rtol=1e-9)


def messages_of(trainer_class: type, settings: dict[str, Any], count: int, n_step: int = 1) -> list[dict[str, Any]]:
    """Messages of a single actor of one environment, each of four steps, between which the host publishes."""
    transition = transition_of(trainer_class, VECTOR, spaces.Discrete(2), settings)
    train = TrainSpec(gamma=GAMMA, n_step=n_step)
    trainer = make_trainer(trainer_class, VECTOR, spaces.Discrete(2), settings=settings)
    spec = ActorSpec("Drifting-v0", envs_per_actor=1)
    setup = ActorSetup(trainer_class, settings, spec, train, 0, transition=transition)
    actor, host = Actor(setup), RunStatistics(transition, trainer) if transition.statistics else None
    queue, found = DataCollectionQueue(transition, setup.message_rows(), 1), []
    for _ in range(count):
        message = queue.reserve()
        assert message is not None
        rows = actor.collect(message)
        columns = {f.name: message[f.name][:rows].copy() for f in transition.fields}
        episodes = int(message["counts"][0])
        found.append({**columns, "returns": message["episode_return"][:episodes].copy()})
        if host is not None:
            host.collected(message)
            flat = host.snapshot.poll()
            assert flat is not None
            actor.load_statistics(flat.view(np.float64))
    actor.close()
    return found


def test_transitions_are_normalised_as_vecnormalize_does_with_the_statistics_of_their_message() -> None:
    raw, stored = (messages_of(TinyDQN, settings, 12) for settings in ({}, BOTH))
    obs, reward = (np.concatenate([m[name] for m in raw]).astype(np.float64) for name in ("obs", "reward"))
    # Every observation that was returned: those that begin a step, and after the last message the newest.
    returns, running = [], 0.0
    for step, value in enumerate(reward):
        running = running * GAMMA + value
        returns.append(running)
        running = 0.0 if (step + 1) % EPISODE == 0 else running
    for number, (before, after) in enumerate(zip(raw, stored, strict=True)):
        counted = obs[: 4 * number + 1] if number else obs[:1]
        mean, deviation = counted.mean(axis=0), counted.std(axis=0)
        deviation[deviation < 1e-4] = 1.0
        for name in ("obs", "next_obs"):
            expected = np.clip((before[name] - mean) / deviation, -10, 10)
            if name == "obs" and number:  # its first observation is the last of the message before
                expected[0] = stored[number - 1]["next_obs"][-1] if (4 * number) % EPISODE else expected[0]
                np.testing.assert_allclose(after[name][1:], expected[1:], rtol=1e-4, atol=1e-4)
                continue
            np.testing.assert_allclose(after[name], expected, rtol=1e-4, atol=1e-4)
        scale = np.std(returns[: 4 * number]) if number else 1.0
        np.testing.assert_allclose(after["reward"], np.clip(before["reward"] / scale, -10, 10), rtol=1e-4)
        np.testing.assert_array_equal(after["returns"], before["returns"])  # episodes report the task's rewards
        np.testing.assert_array_equal(after["discount"], before["discount"])
    for first, second in itertools.pairwise(stored):
        if first["discount"][-1] > 0:  # one observation is stored as one and the same, whatever the statistics
            np.testing.assert_array_equal(first["next_obs"][-1], second["obs"][0])


@pytest.mark.parametrize("setting", BOTH)
def test_one_of_both_leaves_the_other_as_it_is(setting: str) -> None:
    raw, stored = (messages_of(TinyDQN, settings, 3) for settings in ({}, {setting: BOTH[setting]}))
    changed = {"obs", "next_obs"} if setting == "normalize_observations" else {"reward"}
    for before, after in zip(raw, stored, strict=True):
        assert {name for name in before if not np.array_equal(before[name], after[name])} == changed


def test_an_actor_uses_what_it_has_seen_before_the_run_publishes_it() -> None:
    transition = transition_of(TinyDQN, VECTOR, spaces.Discrete(2), BOTH)
    statistics = ActorStatistics(transition, 2, GAMMA)
    obs = np.random.default_rng(0).normal(5.0, 3.0, (6, 2, 4)).astype(np.float32)
    statistics.begin(obs[0])
    for seen in obs[1:]:
        statistics.observed(seen)
    statistics.write({f.name: np.zeros(f.shape) for f in transition.statistics})
    rows = obs.reshape(-1, 4)
    expected = (rows - rows.mean(axis=0)) / rows.std(axis=0)
    np.testing.assert_allclose(statistics.normalized(rows), expected, rtol=1e-4, atol=1e-5)


def test_an_actor_keeps_no_observations_that_nobody_counts() -> None:
    transition = transition_of(TinyDQN, VECTOR, spaces.Discrete(2), {"reward_standardization": "returns"})
    statistics = ActorStatistics(transition, 2, GAMMA)
    obs = np.ones((2, 4), np.float32)
    assert statistics.observed(statistics.begin(obs)) is obs
    assert not statistics._seen


def test_n_step_returns_are_of_scaled_rewards() -> None:
    (raw,), (stored,) = (messages_of(TinyDQN, settings, 1, n_step=3) for settings in ({}, BOTH))
    assert raw["reward"].max() > 10.0  # the first message has no statistics yet: only the clip applies
    np.testing.assert_allclose(stored["reward"], 10.0 * (1 + GAMMA + GAMMA**2), rtol=1e-5)


@pytest.mark.parametrize(
    ("trainer", "env", "setting", "settings"),
    [
        (TinyDQN, "CartPole-v1", 2, BOTH),
        pytest.param(TinySAC, "Pendulum-v1", 1, {"normalize_observations": True}, marks=pytest.mark.slow),
    ],
)
def test_a_run_keeps_its_statistics_and_resumes_to_the_bit(
    tmp_path: Path, quick_profiles: None, trainer: type, env: str, setting: int, settings: dict[str, Any]
) -> None:
    program = make_program(tmp_path, setting=setting, trainer=trainer, env=env, settings=settings)
    common: tuple[str, ...] = ("--serial", "--timesteps", "600", "--checkpoint-interval", "300", "--seed", "7")
    common += ("--eval-interval", "256", "--eval-episodes", "2")
    with running(program, *common, "--run-dir", str(tmp_path / "whole")) as whole:
        assert whole.wait() == 0, whole.output
    assert "Actors normalise observations by running mean and" in (tmp_path / "whole" / "run.log").read_text()
    half = min((tmp_path / "whole" / "checkpoints").iterdir())
    shutil.copytree(half, tmp_path / "half" / half.name)
    resume = ("--resume", "--checkpoint-dir", str(tmp_path / "half"), "--run-dir", str(tmp_path / "resumed"))
    with running(program, *common, *resume) as resumed:
        assert resumed.wait() == 0, resumed.output
    weights = [tmp_path / name / "weights.safetensors" for name in ("whole", "resumed")]
    assert weights[0].read_bytes() == weights[1].read_bytes()

    saved = load_file(weights[0])
    assert saved[f"{OBSERVATION_STATISTICS}.count"] >= 600
    assert np.ptp(saved[f"{OBSERVATION_STATISTICS}.mean"]) > 0
    assert (f"{RETURN_STATISTICS}.mean" in saved) == (settings is BOTH)
    # Loaded, the policy plays the evaluation of the run again: the statistics are in use.
    policy = pearl.load_policy(tmp_path / "whole", "last")
    said = summary(tmp_path / "whole")["last"]
    own = 30_001 + 50_000 * (7 - 1)  # the seed of the run's own episodes
    played = play(policy.act, EvaluationEnvs(ActorSpec(env)), episodes=2, seed=own)
    assert played is not None
    np.testing.assert_allclose(played.mean, said["mean"], rtol=1e-4)


def test_actors_in_processes_share_statistics(tmp_path: Path, quick_profiles: None) -> None:
    program, trace = make_program(tmp_path, settings=BOTH, actors=2), tmp_path / "trace.json"
    arguments = ("--timesteps", "600", "--eval-episodes", "0", "--run-dir", str(tmp_path / "run"))
    code, output = run(program, *arguments, "--trace", str(trace))
    assert code == 0, output
    saved, steps = load_file(tmp_path / "run" / "weights.safetensors"), summary(tmp_path / "run")["env_steps"]
    events = json.loads(trace.read_text())["traceEvents"]
    # The first Actor can have collected everything before the second has started.
    started = {event["tid"] for event in events if event["name"] == "collection"}
    assert 1 <= len(started) <= 2
    # Every step's observation, and the first observation of each environment.
    assert saved[f"{OBSERVATION_STATISTICS}.count"] == steps + 4 * len(started)
    assert saved[f"{RETURN_STATISTICS}.count"] == steps


def test_best_weights_keep_the_statistics_they_were_selected_with(tmp_path: Path) -> None:
    for in_torch in (False, True):
        trainer: Any = make_trainer(DQN, VECTOR, spaces.Discrete(2), settings=BOTH)
        if in_torch:
            trainer.in_torch()
        flat = np.concatenate([[3.0], np.arange(4.0), 3 * np.arange(1.0, 5.0) ** 2])
        trainer.write_statistics(OBSERVATION_STATISTICS, flat)
        best = module_tensors(trainer)
        seen = trainer.as_stored(np.ones((1, 4), np.float32))
        np.testing.assert_allclose(seen[0], (1 - np.arange(4)) / np.arange(1, 5), rtol=1e-6)
        trainer.write_statistics(OBSERVATION_STATISTICS, 2 * flat)
        assert not np.allclose(trainer.as_stored(np.ones((1, 4), np.float32)), seen)
        load_module_tensors(trainer, best)
        np.testing.assert_array_equal(trainer.as_stored(np.ones((1, 4), np.float32)), seen)


def test_a_policy_without_its_statistics_is_refused(tmp_path: Path) -> None:
    run_folder(tmp_path, CASES["normalised DQN"])
    kept = {n: v for n, v in load_file(tmp_path / "weights.safetensors").items() if OBSERVATION_STATISTICS not in n}
    save_file(kept, tmp_path / "weights.safetensors")
    with pytest.raises(PolicyError, match=r"normalises observations, but .* lacks observation_statistics\.mean"):
        pearl.load_policy(tmp_path)


def test_settings_that_do_not_fit_are_named() -> None:
    bytes_, two = spaces.Box(0, 255, (4,), np.uint8), spaces.Discrete(2)
    with pytest.raises(TrainerError, match=r"DQN\.normalize_observations must be False for observations of unsigned"):
        make_trainer(DQN, bytes_, two, settings={"normalize_observations": True})
    with pytest.raises(TrainerError, match=r'reward_standardization must be "none" or "returns".*\'block\''):
        make_trainer(DQN, VECTOR, two, settings={"reward_standardization": "block"})
    bounded = spaces.Box(-1, 1, (4,), np.float32)
    scaled = {"normalize_observations": True, "scale_observations": True}
    with pytest.raises(TrainerError, match="scale_observations must be False where normalize_observations is True"):
        make_trainer(SAC, bounded, spaces.Box(-1, 1, (2,), np.float32), settings=scaled)
    with pytest.raises(TrainerError, match="normalize_observations must be True or False; found 1"):
        make_trainer(DQN, VECTOR, two, settings={"normalize_observations": 1})
    transition = transition_of(DQN, VECTOR, two, {"normalize_observations": True})
    with pytest.raises(ConfigurationError, match="share_frames=True needs stacks whose frames stay the same"):
        check_shared(transition, ReplaySpec(100, share_frames=True))


def test_a_checkpoint_without_normalisation_is_refused_by_a_run_with_it(tmp_path: Path, quick_profiles: None) -> None:
    arguments = ("--serial", "--timesteps", "200", "--eval-episodes", "0", "--run-dir", str(tmp_path / "run"))
    assert run(make_program(tmp_path, name="plain"), *arguments)[0] == 0
    program = make_program(tmp_path, name="normalising", settings={"normalize_observations": True})
    code, output = run(program, *arguments[:2], "400", *arguments[3:], "--resume")
    assert code != 0
    assert "normalization: this program has observation_statistics; the checkpoint has (absent)" in output


def test_the_guide_trains(tmp_path: Path, quick_profiles: None, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parent.parent / "docs" / "environments.md").read_text(encoding="utf-8")
    (text,) = [s for s in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "normalize_observations" in s]
    assert "reward_standardization" in text
    monkeypatch.chdir(tmp_path)
    exec(compile(text, "normalised.py", "exec"), {"__name__": "__main__"})
    program = next(tmp_path.glob("*_runtime.py"))
    code, output = run(program, "--serial", "--timesteps", "300", "--eval-episodes", "0", "--run-dir", "run")
    assert code == 0, output
    assert "rewards by the running deviation of the discounted return" in (tmp_path / "run" / "run.log").read_text()
