"""QRDQN and TQC, natively and in torch: the loss, gradients against float64, what acts and what refuses."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from programs import make_program, run
from test_native_actor_critic import ACTIONS as BOX
from test_native_actor_critic import VARIANTS, assert_alike, assert_gradients, show_gradients
from test_native_actor_critic import batch_of as box_batch_of
from test_native_actor_critic import small as small_actor_critic
from test_native_learner import ACTIONS, OBS, ShowsGradients, kernels, one_torch_thread, random_masks
from test_native_learner import assert_close as assert_gradient
from test_native_learner import batch_of as choice_batch_of
from torch import distributions

from composer.fpga.learner_pipeline import pipeline_of
from composer.fpga.reported_learner import LearnerBuild
from pearl import _native
from pearl.actors.native_policy import NativePolicy
from pearl.actors.policy_plan import read_policy
from pearl.algorithms import DQN, QRDQN, TQC, Trainer
from pearl.algorithms.quantiles import quantile_losses
from pearl.backends import learners
from pearl.backends.cpu.learner import NativeLearner
from pearl.errors import TrainerError
from pearl.learner.torch_learner import TorchLearner
from pearl.runtime.trainer_state import load_module_tensors, module_tensors

pytestmark = pytest.mark.usefixtures(one_torch_thread.__name__)
BatchOf = Callable[..., tuple[dict[str, np.ndarray], np.ndarray]]

CASES: list[tuple[type[Trainer], dict[str, Any]]] = [
    (QRDQN, {"num_quantiles": 5, "target_update_interval": 7}),
    (QRDQN, {"num_quantiles": 33, "double": True, "tau": 0.05, "layer_norm": True}),
    (TQC, {"num_critics": 3, "num_quantiles": 7}),
    (TQC, {"num_critics": 1, "num_quantiles": 4, "dropped_quantiles": 0, "temperature": 0.2, "max_grad_norm": 0.5}),
    (TQC, {"num_critics": 2, "num_quantiles": 5, "dropped_quantiles": 4}),
]
IDS = ["QRDQN", "double, soft targets", "TQC", "one critic, nothing dropped", "one quantile of each kept"]
each_case = pytest.mark.parametrize(("algorithm", "settings"), CASES, ids=IDS)


def small(algorithm: type[Trainer], seed: int = 1, **settings: Any) -> Any:
    if algorithm is QRDQN:
        return algorithm(OBS, ACTIONS, seed=seed, hidden_sizes=(24, 17), **settings)
    return small_actor_critic(algorithm, seed=seed, **settings)


def batches_of(algorithm: type[Trainer]) -> BatchOf:
    return choice_batch_of if algorithm is QRDQN else box_batch_of


# --- the loss ---------------------------------------------------------------------------------------------------------


def regression(quantiles: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The losses of one transition's quantiles and their slopes, number by number, in float64."""
    losses, slopes = np.zeros(len(quantiles)), np.zeros(len(quantiles))
    for i, quantile in enumerate(quantiles):
        tau = (i + 0.5) / len(quantiles)
        for target in targets:
            u = target - quantile
            weight = abs(tau - (1.0 if u < 0 else 0.0)) / len(targets)
            losses[i] += weight * (u * u / 2 if abs(u) <= 1 else abs(u) - 0.5)
            slopes[i] -= weight * min(max(u, -1.0), 1.0)
    return losses, slopes


@hypothesis_settings(deadline=None, max_examples=40)
@given(count=st.integers(1, 9), atoms=st.integers(1, 12), seed=st.integers(0, 2**32 - 1))
def test_losses_and_slopes_are_those_of_the_definition(count: int, atoms: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    quantiles, targets = 2 * rng.normal(size=(6, count)), 2 * rng.normal(size=(6, atoms))
    targets[0] = quantiles[0, 0]  # u = 0
    variable = torch.tensor(quantiles, requires_grad=True)
    losses = quantile_losses(variable, torch.tensor(targets))
    torch.autograd.backward(losses.sum())
    expected = [regression(*row) for row in zip(quantiles, targets, strict=True)]
    np.testing.assert_allclose(losses.detach(), np.stack([loss for loss, _ in expected]), rtol=1e-12, atol=1e-12)
    assert variable.grad is not None
    np.testing.assert_allclose(variable.grad, np.stack([slopes for _, slopes in expected]), rtol=1e-12, atol=1e-12)


def test_the_loss_is_least_at_the_quantiles_of_the_targets() -> None:
    """Of numbers so far apart that Huber's square does not count: medians of the five parts of 1 to 1000."""
    targets = torch.arange(1.0, 1001.0).expand(1, -1) * 10
    quantiles = torch.zeros(1, 5, requires_grad=True)
    optimizer = torch.optim.SGD([quantiles], lr=2000.0)
    for _ in range(400):
        optimizer.zero_grad()
        torch.autograd.backward(quantile_losses(quantiles, targets).sum())
        optimizer.step()
    np.testing.assert_allclose(quantiles.detach()[0] / 10, [100, 300, 500, 700, 900], atol=2.0)


# --- gradients --------------------------------------------------------------------------------------------------------


def exact_loss(quantiles: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The sums over the quantiles `(batch, count)` of the means over the targets `(batch, atoms)`, `(batch,)`."""
    taus = (torch.arange(quantiles.shape[1]).double() + 0.5) / quantiles.shape[1]
    u = targets[:, None, :] - quantiles[:, :, None]
    size = u.abs()
    huber = torch.where(size <= 1, u * u / 2, size - 0.5)
    return (torch.where(u < 0, 1 - taus[:, None], taus[:, None]) * huber).mean(2).sum(1)


class ShowsQuantileGradients(ShowsGradients, QRDQN):
    """SGD's momentum is the gradient."""


@pytest.mark.parametrize("variant", [*VARIANTS, "torch"])
@pytest.mark.parametrize(("rows", "threads"), [(1, 1), (23, 1), (150, 3)])
@pytest.mark.parametrize(("double", "masked", "count"), [(False, False, 200), (True, True, 3)])
def test_gradients_of_qrdqn_are_those_of_float64(
    double: bool, masked: bool, count: int, rows: int, threads: int, variant: str
) -> None:
    trainer = ShowsQuantileGradients(
        OBS, ACTIONS, hidden_sizes=(33, 20), num_quantiles=count, double=double, action_masks=masked
    )
    batch, weights = choice_batch_of(rows, rows)
    batch["reward"] *= 3
    if masked:
        batch["next_action_mask"] = random_masks(np.random.default_rng(rows), rows, (3,))
    q, target_q = (copy.deepcopy(network).double() for network in (trainer.q, trainer.target_q))
    obs, next_obs, reward, discount = (
        torch.from_numpy(batch[name]).double() for name in ("obs", "next_obs", "reward", "discount")
    )
    values = (q if double else target_q)(next_obs).view(rows, 3, count).mean(2)
    if masked:
        values[torch.from_numpy(batch["next_action_mask"]) == 0] = -torch.inf
    row, action = torch.arange(rows), torch.from_numpy(batch["action"])
    judged = target_q(next_obs).view(rows, 3, count)[row, values.argmax(1)]
    target = (reward[:, None] + discount[:, None] * judged).detach()
    quantiles = q(obs).view(rows, 3, count)[row, action]
    loss = (exact_loss(quantiles, target) * torch.from_numpy(weights)).sum() / rows
    expected = torch.autograd.grad(loss, list(q.parameters()))
    if variant == "torch":
        found = TorchLearner(trainer).step(batch, weights)
    else:
        with kernels(variant):
            found = NativeLearner(trainer, threads=threads).step(batch, weights)
        assert found.metrics["loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
    errors = (quantiles.mean(1) - target.mean(1)).abs().detach()
    np.testing.assert_allclose(found.priorities, errors, rtol=1e-4, atol=1e-5)
    assert found.td_error == pytest.approx(float(errors.mean()), rel=1e-4, abs=1e-5)
    trainer._q_flat.gradient.copy_(trainer.optimizer.state[trainer._q_flat.parameter]["momentum_buffer"])
    whole = float(torch.cat([gradient.flatten() for gradient in expected]).norm())
    for (name, parameter), gradient in zip(trainer.q.named_parameters(), expected, strict=True):
        assert parameter.grad is not None
        assert_gradient(parameter.grad, gradient, whole, name, 2e-5)


@pytest.mark.parametrize("variant", [*VARIANTS, "torch"])
@pytest.mark.parametrize(("rows", "threads"), [(1, 1), (23, 1), (150, 3)])
@pytest.mark.parametrize(("critics", "count", "dropped"), [(5, 25, 2), (1, 2, 0), (3, 6, 5)])
def test_gradients_of_tqc_are_those_of_float64(
    critics: int, count: int, dropped: int, rows: int, threads: int, variant: str
) -> None:
    boxes = spaces.Box(-4.0, 5.0, (7,), np.float32), spaces.Box(-1.0, 3.0, (3,), np.float32)
    trainer: Any = TQC(
        *boxes, hidden_sizes=(33, 20), scale_observations=True, log_std_bounds=(-1.0, 0.1), num_critics=critics,
        num_quantiles=count, dropped_quantiles=dropped, initial_temperature=0.3,
    )  # fmt: skip
    show_gradients(trainer)
    batch, weights = box_batch_of(rows, rows, 7, 3)
    batch["reward"] *= 3
    actor, critic, target = (copy.deepcopy(m).double() for m in (trainer.actor, trainer.critic, trainer.target_critic))
    obs, action, reward, next_obs, discount = (torch.from_numpy(column).double() for column in batch.values())
    next_noise, noise = (trainer.draw_noise(rows, draw).double() for draw in range(2))

    def sample(normal: torch.Tensor, observations: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        outputs = actor.network(actor.observation_scale(observations))
        mean, log_std = outputs[:, :3], outputs[:, 3:].clamp(*trainer.log_std_bounds)
        x = mean + log_std.exp() * normal
        density = distributions.Normal(mean, log_std.exp()).log_prob(x)
        slope = 2 * (math.log(2) - x - torch.nn.functional.softplus(-2 * x))
        return x.tanh(), (density - slope).sum(1)

    def quantiles(ensemble: Any, observations: torch.Tensor, unit: torch.Tensor) -> list[torch.Tensor]:
        inputs = torch.cat((critic.observation_scale(observations), unit), 1)
        return [network(inputs) for network in ensemble.critics]

    with torch.no_grad():
        unit, log_prob = sample(next_noise, next_obs)
        every = np.concatenate([each.numpy() for each in quantiles(target, next_obs, unit)], axis=1)
        kept = torch.from_numpy(np.sort(every, axis=1)[:, : critics * (count - dropped)])
        goal = reward[:, None] + discount[:, None] * (kept - 0.3 * log_prob[:, None])
    own = quantiles(critic, obs, critic.action_scale(action))
    losses = sum(exact_loss(each, goal) for each in own) / (critics * count)
    loss = (torch.from_numpy(weights).double() * losses).sum() / rows
    of_critics = list(torch.autograd.grad(loss, list(critic.parameters())))
    unit, log_prob = sample(noise, obs)
    judged = torch.stack(quantiles(critic, obs, unit)).mean((0, 2))
    of_actor = list(torch.autograd.grad((0.3 * log_prob - judged).mean(), list(actor.parameters())))
    if variant == "torch":
        found = TorchLearner(trainer).step(batch, weights)
    else:
        with kernels(variant):
            found = NativeLearner(trainer, threads=threads).step(batch, weights)
        assert found.metrics["loss"] == pytest.approx(float(loss.detach()), rel=1e-4)
    errors = torch.stack([(each.mean(1) - goal.mean(1)).abs() for each in own]).amax(0).detach()
    np.testing.assert_allclose(found.priorities, errors, rtol=1e-4, atol=1e-4)
    assert_gradients(trainer.critic, trainer._critic_flat, trainer.critic_optimizer, of_critics, 5e-5)
    assert_gradients(trainer.actor, trainer._actor_flat, trainer.actor_optimizer, of_actor, 5e-5)


# --- natively as in torch ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 3])
@each_case
def test_native_steps_may_take_turns_with_torchs(
    algorithm: type[Trainer], settings: dict[str, Any], threads: int
) -> None:
    ours, theirs = (small(algorithm, **settings) for _ in range(2))
    both, reference = (NativeLearner(ours, threads=threads), TorchLearner(ours)), TorchLearner(theirs)
    batch_of = batches_of(algorithm)
    for step in range(30):
        found = both[step // 3 % 2].step(*batch_of(step, rows=30 + step))
        expected = reference.step(*batch_of(step, rows=30 + step))
        np.testing.assert_allclose(found.priorities, expected.priorities, rtol=1e-3, atol=1e-4)
    assert_alike(ours, theirs, 3e-5)
    assert ours.gradient_steps == 30


@each_case
def test_parts_of_a_batch_add_up_to_the_whole(algorithm: type[Trainer], settings: dict[str, Any]) -> None:
    whole, parts = (small(algorithm, **settings) for _ in range(2))
    learners_of = TorchLearner(whole), TorchLearner(parts, sub_batches=3)
    for seed in range(5):
        results = [learner.step(*batches_of(algorithm)(seed)) for learner in learners_of]
        np.testing.assert_allclose(results[0].priorities, results[1].priorities, rtol=1e-4, atol=1e-5)
    assert_alike(parts, whole, 1e-5)


@each_case
def test_a_checkpoint_resumes_to_the_same_bits(algorithm: type[Trainer], settings: dict[str, Any]) -> None:
    batch_of = batches_of(algorithm)
    for kind in (NativeLearner, TorchLearner):
        straight, saved, resumed = (small(algorithm, seed=seed, **settings) for seed in (1, 1, 2))
        whole, first, second = (kind(trainer) for trainer in (straight, saved, resumed))
        second.step(*batch_of(99))
        for seed in range(6):
            whole.step(*batch_of(seed))
            (first if seed < 3 else second).step(*batch_of(seed))
            if seed == 2:
                load_module_tensors(resumed, module_tensors(saved))
                resumed.gradient_steps = saved.gradient_steps
        assert_alike(resumed, straight, 0.0)


@each_case
def test_a_step_that_diverges_raises_and_changes_nothing(algorithm: type[Trainer], settings: dict[str, Any]) -> None:
    trainer = small(algorithm, **settings).in_torch()
    learner = NativeLearner(trainer)
    batch, weights = batches_of(algorithm)(0)
    learner.step(batch, weights)
    before = copy.deepcopy(module_tensors(trainer))
    batch["reward"][17] = np.nan
    with pytest.raises(TrainerError, match=r"diverged: the (critics' )?loss is -?nan.*weights were left as they were"):
        learner.step(batch, weights)
    for group, tensors in module_tensors(trainer).items():
        assert all(torch.equal(before[group][key], tensor) for key, tensor in tensors.items())


# --- acting -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("own", [False, True], ids=["arrays", "torch"])
def test_the_policy_takes_the_action_of_the_largest_mean(own: bool) -> None:
    kind = type("Own", (QRDQN,), {"own_method": lambda self: 1}) if own else QRDQN
    trainer = kind(OBS, ACTIONS, seed=5, hidden_sizes=(9,), num_quantiles=6)
    policy = NativePolicy(read_policy(trainer))
    assert (trainer.arrays is None) == own
    obs = 4 * np.random.default_rng(0).normal(size=(200, 6)).astype(np.float32)
    means = trainer.in_torch().q(torch.from_numpy(obs)).detach().numpy().reshape(200, 3, 6).mean(2)
    np.testing.assert_allclose(policy.values(obs), means, rtol=1e-4, atol=1e-5)
    expected = trainer.get_action(torch.from_numpy(obs)).numpy()
    assert len(set(expected.tolist())) > 1
    np.testing.assert_array_equal(policy.act(obs), expected)
    masks = np.array([[True, False, True]]).repeat(200, 0)
    masks[np.arange(200), expected] = False
    masks[:, 1] |= ~masks.any(1)
    allowed = trainer.get_action(torch.from_numpy(obs), torch.from_numpy(masks)).numpy()
    assert masks[np.arange(200), allowed].all()
    np.testing.assert_array_equal(policy.act(obs, masks), allowed)


# --- what is refused --------------------------------------------------------------------------------------------------


def test_what_other_engines_say() -> None:
    for algorithm, settings in CASES:
        trainer = small(algorithm, **settings)
        assert NativeLearner.supports(trainer) is None
        others = {name: made for name, made in learners().items() if name not in ("torch", "native")}
        expected = "quantiles of the return, which this Learner does not train; native and torch do"
        assert {made.supports(trainer) for made in others.values()} == {expected}
        with pytest.raises(TrainerError, match=f"{algorithm.__name__} learns quantiles of the return"):
            pipeline_of(trainer)
        assert LearnerBuild.of(trainer, 32) is None


class OwnLoss(QRDQN):
    def _quantiles_of(self, outputs: torch.Tensor) -> torch.Tensor:
        return super()._quantiles_of(outputs) * 0.5


class OwnTarget(TQC):
    def _target_of(self, next_obs: torch.Tensor, unit: torch.Tensor) -> torch.Tensor:
        return super()._target_of(next_obs, unit) * 0.5


@pytest.mark.parametrize(
    ("trainer", "reason"),
    [
        (OwnLoss(OBS, ACTIONS), "OwnLoss overrides _quantiles_of, a part of QRDQN's update rule"),
        (OwnTarget(OBS, BOX, hidden_sizes=(8,)), "OwnTarget overrides _target_of, a part of TQC's update rule"),
    ],
    ids=["QRDQN", "TQC"],
)
def test_steps_of_ones_own_train_in_torch(trainer: Trainer, reason: str) -> None:
    assert NativeLearner.supports(trainer) == reason
    TorchLearner(trainer).step(*(choice_batch_of if isinstance(trainer, DQN) else box_batch_of)(0))
    assert trainer.gradient_steps == 1


@pytest.mark.parametrize(
    ("algorithm", "settings", "message"),
    [
        (QRDQN, {"num_quantiles": 1}, r"QRDQN.num_quantiles must be a whole number of at least 2; found 1"),
        (QRDQN, {"num_quantiles": 2.0}, r"QRDQN.num_quantiles must be a whole number of at least 2; found 2\.0"),
        (QRDQN, {"dueling": True}, r"QRDQN.dueling must be left False: there is no dueling network of quantiles"),
        (TQC, {"num_quantiles": 1}, r"TQC.num_quantiles must be a whole number of at least 2; found 1"),
        (TQC, {"dropped_quantiles": 25}, r"TQC.dropped_quantiles must be a whole number from 0 to 24; found 25"),
        (TQC, {"dropped_quantiles": -1}, r"TQC.dropped_quantiles must be a whole number from 0 to 24; found -1"),
        (TQC, {"num_critics": 0}, r"TQC.num_critics must be a whole number from 1 to 255; found 0"),
    ],
)
def test_settings_that_cannot_be(algorithm: type[Trainer], settings: dict[str, Any], message: str) -> None:
    with pytest.raises(TrainerError, match=message):
        small(algorithm, **settings)


def test_whole_numbers_of_numpy_count_too() -> None:
    trainer = small(QRDQN, num_quantiles=np.int64(7))
    found = NativeLearner(trainer).step(*choice_batch_of(0))
    assert found.priorities.shape == (50,)
    assert trainer.q(torch.zeros(1, 6)).shape == (1, 21)


class OneOutput(QRDQN):
    def build_q_network(self) -> torch.nn.Module:
        return torch.nn.Linear(6, 3)


class OneValue(TQC):
    def build_critic(self) -> torch.nn.Module:
        return torch.nn.Linear(8, 1)


def test_networks_of_ones_own_without_quantiles_are_named() -> None:
    with pytest.raises(
        TrainerError, match=r"a network of 30 outputs, 10 quantiles for each action of .*; found 3 outputs"
    ):
        OneOutput(OBS, ACTIONS, num_quantiles=10)
    with pytest.raises(
        TrainerError,
        match="a network of 25 outputs, 25 quantiles of the value of an observation and an action; found 1",
    ):
        OneValue(OBS, BOX)


def test_native_learners_take_only_outputs_that_fit() -> None:
    network = _native.Network(2, [("linear", 0, -1, 3, 0, 6, 0.0)], 9)
    with pytest.raises(TrainerError, match="A network must give 2 quantiles of each action; found 3 outputs"):
        _native.DqnLearner(network, np.zeros(9, np.float32), np.zeros(9, np.float32), 1, 2)
    learner = NativeLearner(small(TQC, num_critics=2, num_quantiles=4))
    native: Any = learner._rule._native  # type: ignore[attr-defined]
    common = True, 0.0, 0.0, 0.0, -20.0, 2.0, -1.0, 0.005, 0.0
    with pytest.raises(TrainerError, match="need target_critics and must keep one or more of them; found 0 and 0"):
        native.set(*common, 0, 0)
    with pytest.raises(TrainerError, match="found 2 and 4 dropped"):
        native.set(*common, 2, 4)


# --- programs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("trainer", "env"), [(QRDQN, "CartPole-v1"), (TQC, "Pendulum-v1")])
def test_programs_train_natively(tmp_path: Path, quick_profiles: None, trainer: type[Trainer], env: str) -> None:
    settings = {"hidden_sizes": (16,), "num_quantiles": 8, "learning_starts": 100}
    program = make_program(
        tmp_path, trainer=trainer, settings=settings, training={"batch_size": 16, "replay_ratio": 4.0}, env=env
    )
    assert "learner = NativeLearner(" in program.read_text()
    arguments = ("--timesteps", "600", "--eval-episodes", "1", "--run-dir", str(tmp_path / "run"))
    code, output = run(program, *arguments)
    assert code == 0, output
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["gradient_steps"] > 50


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trainer", "env", "settings", "solved"),
    [
        (QRDQN, "CartPole-v1", {"num_quantiles": 50, "layer_norm": True, "tau": 0.01, "learning_rate": 1e-3}, 400),
        (TQC, "Pendulum-v1", {"learning_rate": 1e-3, "actor_learning_rate": 1e-3}, -300),
    ],
)
def test_it_learns(
    tmp_path: Path, quick_profiles: None, trainer: type[Trainer], env: str, settings: dict[str, Any], solved: float
) -> None:
    common = {"hidden_sizes": (64, 64), "learning_starts": 500}
    program = make_program(
        tmp_path, trainer=trainer, settings={**common, **settings}, training={"batch_size": 64, "replay_ratio": 64.0},
        env=env, capacity=20_000,
    )  # fmt: skip
    code, output = run(program, "--timesteps", "12000", "--eval-episodes", "20", "--run-dir", str(tmp_path / "run"))
    assert code == 0, output
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["best"]["mean"] > solved
