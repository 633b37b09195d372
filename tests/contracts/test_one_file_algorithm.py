"""An algorithm is one file: categorical DQN, which the project does not have, with a column of its own.

Nothing but this module knows it. CONTRIBUTING points here: a new algorithm of the project is such a class in a file of
`pearl/algorithms` and one line in the table of `pearl/algorithms/__init__.py`. Generated programs import this module,
so that it imports nothing of the tests at its top.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from pearl.algorithms import Batch, Phase, Trainer
from pearl.algorithms.networks import mlp
from pearl.algorithms.trainer import batch_type_of, transition_of
from pearl.backends.cpu.learner import NativeLearner
from pearl.errors import ConfigurationError, TrainerError
from pearl.exploration import EpsilonGreedy, Exploration
from pearl.learner.flat import FlatParameters
from pearl.learner.torch_learner import TorchLearner
from pearl.spec import ActorStep, Column, TransitionSpec

# Where CartPole ends an episode: position and angle.
LIMITS = np.array([2.4, 0.2095], np.float32)
CHECKED = "PEARL_TEST_CHECKED_COLUMN"  # an environment variable: batches must hold the column as the actor made it


def closeness(step: ActorStep) -> np.ndarray:
    """How close position and angle are to the limits that end an episode, `(envs, 2)`."""
    found: np.ndarray = np.abs(step.obs[:, [0, 2]]) / LIMITS
    return found


class C51(Trainer):
    """Categorical DQN (Bellemare, Dabney and Munos 2017): a distribution of returns over fixed atoms for each action.

    Transitions close to the end of an episode count more, by the column `closeness` that the actor makes.
    """

    hidden_sizes: tuple[int, ...] = (32,)
    batch_size: int = 16
    replay_ratio: float = 2.0
    learning_starts: int = 100
    exploration: Exploration | None = EpsilonGreedy(steps=1000)
    atoms: int = 21
    highest_return: float = 100.0
    tau: float = 0.05

    @classmethod
    def transition(cls, observation_space: gym.Space[Any], action_space: gym.Space[Any]) -> TransitionSpec:
        common = super().transition(observation_space, action_space)
        return common.with_columns(Column("closeness", (2,), "float32", closeness))

    def check_spaces(self) -> None:
        if not isinstance(self.action_space, spaces.Discrete):
            raise TrainerError(f"C51 needs a Discrete action space; found {self.action_space}.")

    def build(self) -> None:
        assert isinstance(self.action_space, spaces.Discrete)
        self.actions = int(self.action_space.n)
        sizes = self.input_shape[0], self.hidden_sizes, self.actions * self.atoms
        self.q, self.target_q = mlp(*sizes), mlp(*sizes)
        self.target_q.load_state_dict(self.q.state_dict())
        self._flat, self._target_flat = FlatParameters(self.q), FlatParameters(self.target_q, gradients=False)
        self.optimizer = torch.optim.Adam([self._flat.parameter], lr=self.learning_rate)
        self.support = torch.linspace(0.0, self.highest_return, self.atoms)
        self._loss = 0.0

    @property
    def policy(self) -> nn.Module:
        return self.q

    @property
    def phases(self) -> tuple[Phase, ...]:
        return (Phase("q", self._compute, self._apply),)

    def get_action(self, obs: torch.Tensor) -> torch.Tensor:
        return self._values(self._log_probabilities(self.q, obs)).argmax(dim=1)

    def metrics(self) -> Mapping[str, float]:
        return {"cross_entropy": self._loss}

    def _log_probabilities(self, network: nn.Module, obs: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = network(obs)
        return logits.view(-1, self.actions, self.atoms).log_softmax(dim=2)

    def _values(self, log_probabilities: torch.Tensor) -> torch.Tensor:
        return (log_probabilities.exp() * self.support).sum(dim=2)

    def _target(self, batch: Batch) -> torch.Tensor:
        """The target's distribution `(batch, atoms)`, projected onto the atoms."""
        log_next = self._log_probabilities(self.target_q, batch.next_obs)
        best = self._values(log_next).argmax(dim=1)
        probabilities = log_next.exp()[torch.arange(len(best)), best]
        returns = batch.reward[:, None] + batch.discount[:, None] * self.support
        place = returns.clamp(0.0, self.highest_return) / self.highest_return * (self.atoms - 1)
        low = place.floor().long().clamp(0, self.atoms - 2)
        share = place - low
        target = torch.zeros_like(probabilities)
        target.scatter_add_(1, low, probabilities * (1 - share))
        target.scatter_add_(1, low + 1, probabilities * share)
        return target

    def _compute(self, batch: Batch, weights: torch.Tensor, batch_size: int) -> torch.Tensor:
        close: torch.Tensor = batch.closeness  # type: ignore[attr-defined]
        # Not while composing, which measures on noise.
        if CHECKED in os.environ and not torch.equal(close, batch.obs[:, [0, 2]].abs() / torch.from_numpy(LIMITS)):
            raise TrainerError("The column is not as the actor made it.")
        with torch.no_grad():
            target = self._target(batch)
        chosen = self._log_probabilities(self.q, batch.obs)[torch.arange(len(weights)), batch.action]
        losses = -(target * chosen).sum(dim=1) * (1.0 + close.amax(dim=1))
        loss = torch.dot(losses, weights) / batch_size
        torch.autograd.backward(loss)
        self._loss = loss.item()
        return losses.detach()

    def _apply(self) -> None:
        self.optimizer.step()
        self._flat.zero_grad()

    def finish_step(self) -> None:
        self._target_flat.move_toward(self._flat, self.tau)


OBS = spaces.Box(-5, 5, (4,), np.float32)
CHOICE = spaces.Discrete(2)


def batch_of(rows: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    columns = transition_of(C51, OBS, CHOICE).empty(rows)
    for column in columns.values():
        column[:] = rng.standard_normal(column.shape) if column.dtype == np.float32 else rng.integers(0, 2, rows)
    columns["reward"][:] = rng.uniform(0, 100, rows)
    columns["discount"][:] = 0.0  # each target is then the reward itself
    step = ActorStep(columns["obs"], *[np.empty(0)] * 6, policy=None)
    columns["closeness"][:] = closeness(step)
    return columns


@pytest.mark.parametrize("sub_batches", [1, 3])
def test_its_loss_falls_on_a_fixed_batch(sub_batches: int) -> None:
    batch, weights = batch_of(64), np.ones(64, np.float32)
    learner = TorchLearner(C51(OBS, CHOICE, tau=0.0, learning_rate=1e-2), sub_batches=sub_batches)
    losses = [learner.step(batch, weights).metrics["td_error"] for _ in range(100)]
    assert losses[-1] < 0.8 * losses[0]


def test_its_batches_have_its_column() -> None:
    trainer = C51(OBS, CHOICE)
    kind = batch_type_of(trainer)
    assert kind._fields == (*Batch._fields, "closeness")
    columns = [torch.from_numpy(column) for column in batch_of(8).values()]
    part = kind(*columns).rows(2, 5)
    assert type(part) is kind
    assert torch.equal(part.closeness, columns[-1][2:5])  # type: ignore[attr-defined]
    assert part.terminated.shape == (3,)


def test_engines_without_its_update_rule_say_so() -> None:
    trainer = C51(OBS, CHOICE)
    assert trainer.update_rule() is None
    assert (
        NativeLearner.supports(trainer)
        == "the update rule of C51, which is not a DQN, QRDQN, RecurrentDQN, DDPG, TD3, SAC, REDQ, DroQ, CrossQ, "
        "TQC, PPO, A2C or RecurrentPPO"
    )


@pytest.mark.parametrize(
    ("setting", "n_step", "options"), [(1, 3, ()), pytest.param(2, 1, ("--serial",), marks=pytest.mark.slow)]
)
def test_it_trains_cartpole_through_composer_and_program(
    tmp_path: Path,
    quick_profiles: None,
    monkeypatch: pytest.MonkeyPatch,
    setting: int,
    n_step: int,
    options: tuple[str, ...],
) -> None:
    from programs import make_program, run

    program = make_program(tmp_path, setting=setting, trainer=C51, training={"n_step": n_step})
    monkeypatch.setenv(CHECKED, "1")
    arguments = ("--timesteps", "600", "--eval-episodes", "0", "--run-dir", str(tmp_path / "run"))
    code, output = run(program, *options, *arguments)
    assert code == 0, output
    found = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert found["gradient_steps"] > 20


# --- declarations -----------------------------------------------------------------------------------------------------


def last_reward(step: ActorStep) -> np.ndarray:
    return step.reward


def test_an_n_step_transition_takes_the_value_of_its_first_or_last_step() -> None:
    from pearl.actors.n_step import NStepWindow

    first, last = Column("first", (), "float64", last_reward), Column("last", (), "float64", last_reward, "last")
    spec = TransitionSpec.from_spaces(OBS, CHOICE).with_columns(first, last)
    window, out, row = NStepWindow(spec, 1, 3, 0.5), spec.empty(20), 0
    for number in range(5):
        done = np.array([number == 4])
        obs, reward = np.full((1, 4), number, np.float32), np.array([float(number)])
        further = {"first": reward, "last": reward}
        row = window.push(obs, np.zeros(1, int), reward, obs, done, done, np.ones(1, bool), out, row, further)
    assert row == 5
    assert sorted(zip(out["first"][:row], out["last"][:row], strict=True)) == [(0, 2), (1, 3), (2, 4), (3, 4), (4, 4)]
    assert np.array_equal(out["obs"][:row, 0], out["first"][:row])


@pytest.mark.parametrize("name", ["generations", "rows", "_own", "two words", "class"])
def test_names_that_cannot_be_columns(name: str) -> None:
    with pytest.raises(ConfigurationError, match="column"):
        Column(name, (), "float32", last_reward)


def test_a_declaration_without_the_common_columns_is_named() -> None:
    class Bare(C51):
        @classmethod
        def transition(cls, observation_space: gym.Space[Any], action_space: gym.Space[Any]) -> TransitionSpec:
            return TransitionSpec((Column("closeness", (2,), "float32", closeness),))

    with pytest.raises(TrainerError, match=r"Bare.transition\(\) must begin with the columns obs, action, reward"):
        transition_of(Bare, OBS, CHOICE)


def flat(step: ActorStep) -> np.ndarray:
    return np.zeros(1)


def test_a_column_of_another_shape_is_named() -> None:
    from pearl.actors.actor import Actor, ActorSetup
    from pearl.spec import ActorSpec, TrainSpec

    spec = TransitionSpec.from_spaces(OBS, CHOICE).with_columns(Column("wrong", (), "float32", flat))
    setup = ActorSetup(C51, {}, ActorSpec("CartPole-v1", envs_per_actor=3), TrainSpec(), seed=0, transition=spec)
    actor = Actor(setup)
    rows = setup.message_rows()
    message = {**spec.empty(rows), "episode_return": np.empty(rows), "episode_length": np.empty(rows)}
    try:
        with pytest.raises(TrainerError, match=r"Column 'wrong' must be made with shape \(3,\).*found \(1,\)"):
            actor.collect({**message, "counts": np.empty(4)})
    finally:
        actor.close()
