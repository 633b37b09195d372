"""Trainers whose policies the tests save, load, evaluate and export, and run folders of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from trainers import OwnTrainer
from typer.testing import CliRunner

from pearl.algorithms import DDPG, DQN, PPO, QRDQN, SAC, TD3, TQC
from pearl.algorithms.trainer import Trainer, TrainerLike, make_trainer
from pearl.cli import app
from pearl.moments import Moments
from pearl.policy import Episode, SavedPolicy, watch_policy
from pearl.policy.description import PolicyDescription, write_description
from pearl.runtime.outcome import BEST_WEIGHTS, LAST_WEIGHTS, save_weights
from pearl.spec import OBSERVATION_STATISTICS, RETURN_STATISTICS

VECTOR = spaces.Box(-np.inf, np.inf, (5,), np.float32)
BOUNDED = spaces.Box(np.array([-1.0, 0.0, -8.0]), np.array([1.0, 4.0, 8.0]), dtype=np.float64)
IMAGE = spaces.Box(0, 255, (4, 36, 36), np.uint8)
TORQUES = spaces.Box(np.array([-2.0, 0.0], np.float32), np.array([2.0, 1.0], np.float32))


class WideDQN(DQN):
    hidden_sizes = (24, 24)


class NormedDQN(WideDQN):
    layer_norm = True


class DuelingDQN(WideDQN):
    dueling = True


class SmallQRDQN(QRDQN):
    hidden_sizes = (24, 24)
    num_quantiles = 9


class SmallTQC(TQC):
    hidden_sizes = (16,)
    num_critics = 2


class MaskedDQN(WideDQN):
    action_masks = True


class MaskedPPO(PPO):
    hidden_sizes = (16, 16)
    action_masks = True


class NormalizedPPO(PPO):
    hidden_sizes = (16, 16)
    normalize_observations = True


class ScaledSAC(SAC):
    hidden_sizes = (16,)
    scale_observations = True


class NormalizedDQN(WideDQN):
    normalize_observations = True


class NormalizedTD3(TD3):
    normalize_observations = True
    reward_standardization = "returns"


Case = tuple[type, gym.Space[Any], gym.Space[Any]]
CASES: dict[str, Case] = {
    "DQN": (WideDQN, VECTOR, spaces.Discrete(6)),
    "DQN from 3": (WideDQN, VECTOR, spaces.Discrete(6, start=3)),
    "normed DQN": (NormedDQN, VECTOR, spaces.Discrete(6)),
    "dueling DQN": (DuelingDQN, BOUNDED, spaces.Discrete(4)),
    "DQN of images": (WideDQN, IMAGE, spaces.Discrete(4)),
    "QRDQN": (SmallQRDQN, VECTOR, spaces.Discrete(6)),
    "DDPG": (DDPG, VECTOR, TORQUES),
    "TD3": (TD3, BOUNDED, spaces.Box(-1.0, 3.0, (2, 2), np.float64)),
    "SAC": (ScaledSAC, BOUNDED, TORQUES),
    "TQC": (SmallTQC, BOUNDED, TORQUES),
    "normalised DQN": (NormalizedDQN, VECTOR, spaces.Discrete(6)),
    "normalised TD3": (NormalizedTD3, BOUNDED, TORQUES),
    "PPO": (NormalizedPPO, VECTOR, spaces.Discrete(5)),
    "continuous PPO": (NormalizedPPO, BOUNDED, spaces.Box(-0.1, 0.1, (3,), np.float32)),
    "PPO of several": (NormalizedPPO, VECTOR, spaces.MultiDiscrete([3, 5], start=[0, 2])),
    "PPO of switches": (NormalizedPPO, VECTOR, spaces.MultiBinary((2, 2))),
    "PPO of images": (PPO, IMAGE, spaces.Discrete(4)),
    "own trainer": (OwnTrainer, VECTOR, spaces.Discrete(5)),
}


def trained(case: Case, seed: int = 5) -> TrainerLike:
    """A trainer with weights of its own, and with statistics of observations and returns where it normalises."""
    trainer = make_trainer(*case, seed=seed)
    if getattr(trainer, "normalize_observations", False):
        assert isinstance(trainer, Trainer)
        seen = observations(case[1], 50, seed=9)
        if isinstance(trainer, PPO):
            trainer.take_in(seen)
        else:
            moments = Moments(trainer.input_shape)
            moments.add(seen)
            trainer.write_statistics(OBSERVATION_STATISTICS, moments.flat)
            if RETURN_STATISTICS in trainer.transition_statistics:
                returns = Moments(())
                returns.add(seen.ravel())
                trainer.write_statistics(RETURN_STATISTICS, returns.flat)
    if case[1] == IMAGE:
        # Without the outputs' mean, which would decide all actions of networks that have not been trained.
        network = trainer.networks.policy if isinstance(trainer, PPO) else trainer.q  # type: ignore[attr-defined]
        with torch.no_grad():
            network[-1].bias -= network(torch.from_numpy(observations(IMAGE, 20, seed=9))).mean(dim=0)
    return trainer


def observations(space: gym.Space[Any], count: int, seed: int = 1) -> np.ndarray:
    rng = np.random.default_rng(seed)
    assert isinstance(space, spaces.Box)
    if space.dtype == np.uint8:
        brightness = rng.random((count, space.shape[0], 1, 1)) ** 3  # so that the actions differ
        return (brightness * rng.integers(0, 256, (count, *space.shape))).astype(np.uint8)
    found = np.clip(rng.normal(0.5, 2.0, (count, *space.shape)), space.low, space.high)
    return found.astype(space.dtype).astype(np.float32).astype(space.dtype)


def run_folder(
    folder: Path,
    case: Case,
    trainer: TrainerLike | None = None,
    *,
    best: TrainerLike | None = None,
    env: str = "Absent-v0",
    edit: Callable[[dict[str, Any]], object] | None = None,
    **described: Any,
) -> Path:
    """A run folder of `trainer` as a program leaves one: its policy, its last weights, and the best if there are."""
    folder.mkdir(exist_ok=True)
    trainer = trained(case) if trainer is None else trainer
    description = PolicyDescription.of(
        *(trainer, {}), environment=env, env_kwargs={}, observation_space=case[1], action_space=case[2], **described
    )
    write_description(description, folder)
    save_weights(trainer, folder / LAST_WEIGHTS)
    summary: dict[str, Any] = {"last": {"step": 200, "mean": 1.5, "episodes": 7}, "best": None}
    if best is not None:
        save_weights(best, folder / BEST_WEIGHTS)
        summary["best"] = {"step": 100, "mean": 2.5, "episodes": 7, "selected_mean": 9.0, "selected_episodes": 3}
    (folder / "summary.json").write_text(json.dumps(summary))
    if edit is not None:
        content = json.loads((folder / "policy.json").read_text())
        edit(content)
        (folder / "policy.json").write_text(json.dumps(content))
    return folder


def command(*arguments: object) -> Any:
    """What `pearl` says to these arguments, in this process."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def watch_policy_without_a_screen(policy: SavedPolicy, **options: Any) -> list[Episode]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SDL_VIDEODRIVER", "dummy")
        return list(watch_policy(policy, **options))
