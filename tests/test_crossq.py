"""CrossQ: batch renormalisation, its running statistics, and the joint pass against a reference written out here."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from programs import make_program, run
from references import BOX, ROWS, batch_of, columns_of, estranged, relative
from torch import nn
from trainers import TinyCrossQ

from pearl.actors.policy_plan import read_policy
from pearl.algorithms import CrossQ
from pearl.algorithms.networks import BatchRenorm
from pearl.algorithms.trainer import policy_snapshot
from pearl.backends import learners
from pearl.errors import ConfigurationError
from pearl.learner.native_plan import UnsupportedError
from pearl.learner.torch_learner import TorchLearner, load_policy_weights


def small(**settings: Any) -> Any:
    return estranged(CrossQ, BOX, critic_hidden_sizes=(24, 16), **settings)


# --- batch renormalisation --------------------------------------------------------------------------------------------


def test_it_is_batch_normalisation_while_it_warms_up() -> None:
    ours, theirs = BatchRenorm(5, momentum=0.9, warmup_steps=3), nn.BatchNorm1d(5, eps=1e-3, momentum=0.1)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        x = 4 + 3 * torch.randn(40, 5, generator=generator)
        torch.testing.assert_close(ours(x), theirs(x))
        torch.testing.assert_close(ours.mean, theirs.running_mean)
    ours.eval()
    running = (x - ours.mean) / (ours.variance + 1e-3).sqrt()
    torch.testing.assert_close(ours(x), running)


def test_afterwards_it_normalises_nearly_by_the_running_statistics() -> None:
    layer = BatchRenorm(2, momentum=0.5, warmup_steps=0, r_max=3.0, d_max=5.0)
    with torch.no_grad():
        layer.mean.copy_(torch.tensor([1.0, -100.0]))
        layer.variance.copy_(torch.tensor([4.0, 1e-4]))
    twin = copy.deepcopy(layer).eval()
    x = torch.randn(50, 2, generator=torch.Generator().manual_seed(2)).requires_grad_()
    found = layer(x)
    # The first column is within the bounds of r and d, so it is as in evaluation mode; the second is not.
    torch.testing.assert_close(found[:, 0], twin(x)[:, 0], rtol=1e-4, atol=1e-4)
    mean, std = x[:, 1].mean(), (x[:, 1].var(correction=0) + 1e-3).sqrt()
    torch.testing.assert_close(found[:, 1], (x[:, 1] - mean) / std * 3.0 + 5.0, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(layer.mean, 0.5 * torch.tensor([1.0, -100.0]) + 0.5 * x.detach().mean(0))
    # r and d are constants: a shift of all inputs changes nothing but them, so gradients add up to 0.
    (gradient,) = torch.autograd.grad((found * torch.arange(50.0).unsqueeze(1)).sum(), x)
    torch.testing.assert_close(gradient.sum(0), torch.zeros(2), rtol=0, atol=1e-3)


# --- the update -------------------------------------------------------------------------------------------------------


def normalized(layer: Any, x: torch.Tensor, joint: bool) -> torch.Tensor:
    variance, mean = torch.var_mean(x, 0, correction=0) if joint else (layer.variance, layer.mean)
    return (x - mean) / (variance + 1e-3).sqrt() * layer.weight + layer.bias


def through(network: Any, x: torch.Tensor, joint: bool) -> torch.Tensor:
    for layer in network:
        x = normalized(layer, x, joint) if isinstance(layer, BatchRenorm) else layer(x)
    return x


def test_critics_see_both_halves_in_one_batch() -> None:
    trainer = small(initial_temperature=0.3)
    with torch.no_grad():
        for part in trainer.actor.modules():
            if isinstance(part, BatchRenorm):
                part.mean.normal_(generator=torch.Generator().manual_seed(3))
                part.variance.fill_(2.0)
    batch, weights = batch_of(BOX)
    actor, critic = copy.deepcopy(trainer.actor).double(), copy.deepcopy(trainer.critic).double()
    obs, next_obs = batch.obs.double(), batch.next_obs.double()
    outputs = through(actor.network, actor.observation_scale(next_obs), joint=False)
    mean, log_std = outputs[:, :2], outputs[:, 2:].clamp(*trainer.log_std_bounds)
    x = mean + log_std.exp() * trainer.draw_noise(ROWS, 0).double()
    slope = 2 * (np.log(2) - x - nn.functional.softplus(-2 * x))
    log_prob = (torch.distributions.Normal(mean, log_std.exp()).log_prob(x) - slope).sum(1).detach()
    units = torch.cat((critic.action_scale(batch.action.double()), x.tanh().detach()))
    inputs = torch.cat((critic.observation_scale(torch.cat((obs, next_obs))), units), 1)
    values = torch.stack([through(part, inputs, joint=True).squeeze(1) for part in (critic.first, critic.second)])
    after = values[:, ROWS:].detach().amin(0) - 0.3 * log_prob
    errors = values[:, :ROWS] - (batch.reward.double() + batch.discount.double() * after)
    loss = (errors**2 * weights.double()).sum() / ROWS
    expected = dict(
        zip(dict(critic.named_parameters()), torch.autograd.grad(loss, list(critic.parameters())), strict=True)
    )
    priorities = trainer.phases[0].compute(batch, weights, ROWS)
    assert relative(priorities, errors.abs().amax(0)) <= 1e-4
    whole = float(torch.cat([gradient.flatten() for gradient in expected.values()]).norm())
    for name, parameter in trainer.critic.named_parameters():
        assert float((parameter.grad.double() - expected[name]).norm()) <= 1e-4 * whole, name
    # One update of the statistics of each layer, by both halves together.
    torch.testing.assert_close(trainer.critic.first[0].mean.double(), 0.01 * inputs.mean(0), rtol=1e-4, atol=1e-6)


def test_the_policy_moves_in_every_third_step_and_its_statistics_only_then() -> None:
    trainer = small()
    learner = TorchLearner(trainer)
    batch, weights = batch_of(BOX)
    seen = []
    for _ in range(4):
        learner.step(columns_of(batch), weights.numpy())
        seen.append(policy_snapshot(trainer))
    assert np.array_equal(seen[0], seen[1])
    assert not np.array_equal(seen[1], seen[2])
    assert np.array_equal(seen[2], seen[3])
    assert [int(trainer.actor.network[0].batches), int(trainer.critic.first[0].batches)] == [1, 4]
    assert trainer.actor_optimizer.param_groups[0]["betas"] == (0.5, 0.999)


# --- statistics and modes ---------------------------------------------------------------------------------------------


def test_acting_neither_moves_the_statistics_nor_depends_on_the_batch() -> None:
    trainer = small()
    for seed in range(6):
        trainer.update_policy(*batch_of(BOX, seed))
    before, obs = policy_snapshot(trainer), batch_of(BOX)[0].obs
    with torch.no_grad():
        together = trainer.get_action(obs)
        torch.testing.assert_close(trainer.get_action(obs[:1]), together[:1], rtol=1e-5, atol=1e-6)
    assert np.array_equal(policy_snapshot(trainer), before)


def test_actors_receive_the_running_statistics() -> None:
    trained, other = small(), small(seed=5)
    for seed in range(9):
        trained.update_policy(*batch_of(BOX, seed))
    learner = TorchLearner(trained)
    snapshot = np.zeros(learner.weight_count, np.float32)
    learner.write_weights(snapshot)
    load_policy_weights(other, snapshot)
    obs = batch_of(BOX, 3)[0].obs
    assert torch.equal(other.actor.network[0].mean, trained.actor.network[0].mean)
    assert float(trained.actor.network[0].mean.abs().min()) > 0
    with torch.no_grad():
        assert torch.equal(other.get_action(obs), trained.get_action(obs))


def test_engines_other_than_torch_and_split_batches_are_refused() -> None:
    trainer = small()
    refusals = {name: made.supports(trainer) for name, made in learners().items() if name != "torch"}
    assert refusals == dict.fromkeys(refusals, "the batch renormalisation of CrossQ")
    with pytest.raises(UnsupportedError, match="the batch renormalisation of CrossQ"):
        read_policy(trainer)
    with pytest.raises(ConfigurationError, match="CrossQ normalises whole batches: sub_batches must be 1; found 2"):
        TorchLearner(trainer, sub_batches=2)


@pytest.mark.slow
def test_a_program_learns_pendulum_with_one_update_per_step(tmp_path: Path, quick_profiles: None) -> None:
    settings = {"hidden_sizes": (64, 64), "critic_hidden_sizes": (64, 64), "learning_starts": 500}
    training = {"batch_size": 64, "replay_ratio": 64.0, "gamma": 0.98}
    program = make_program(
        tmp_path,
        trainer=CrossQ,
        settings=settings,
        training=training,
        env="Pendulum-v1",
        capacity=20_000,
        mode="uniform",
    )
    arguments = ("--timesteps", "4000", "--eval-episodes", "20", "--run-dir", str(tmp_path / "run"))
    code, output = run(program, *arguments)
    assert code == 0, output
    # Chance returns about -1200; a pendulum that is swung up and held, about -150.
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["best"]["mean"] > -400


@pytest.mark.slow
def test_a_program_trains_with_actor_processes(tmp_path: Path, quick_profiles: None) -> None:
    program = make_program(tmp_path, trainer=TinyCrossQ, env="Pendulum-v1")
    code, output = run(program, "--timesteps", "600", "--eval-episodes", "1", "--run-dir", str(tmp_path / "run"))
    assert code == 0, output
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["gradient_steps"] > 10
