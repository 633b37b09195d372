"""TD3: its losses and delayed updates against float64 written out here; its noise; whole runs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import make_program, run
from references import (
    BOX,
    OBS,
    ROWS,
    State,
    all_tensors,
    assert_close,
    batch_of,
    columns_of,
    dense,
    descend,
    doubles,
    each_device,
    estranged,
    gradients,
    relative,
    to_unit,
    toward,
    with_plain_descent,
)
from trainers import TinyTD3

from pearl.algorithms import TD3, Batch
from pearl.algorithms.trainer import modules_of
from pearl.errors import TrainerError
from pearl.learner.torch_learner import TorchLearner
from pearl.runtime.trainer_state import load_module_tensors, module_tensors

LAYERS = (0, 2, 4)


def policy(state: State, obs: torch.Tensor) -> torch.Tensor:
    """Actions in [-1, 1]; observations lie in [-5, 5]."""
    return torch.tanh(dense(state, "network.", LAYERS, obs / 5))


def value(state: State, which: str, obs: torch.Tensor, unit: torch.Tensor) -> torch.Tensor:
    return dense(state, f"{which}.", LAYERS, torch.cat((obs / 5, unit), 1))[:, 0]


def smoothed(target_actor: State, next_obs: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """The target policy's actions, disturbed by 0.2 of `noise`, clipped at 0.5, and to the bounds."""
    disturbance = 0.2 * noise.double()
    unit = policy(target_actor, next_obs) + disturbance.clamp(-0.5, 0.5)
    assert int((disturbance.abs() > 0.5).sum()) > 0, "the batch must try the clipping of the noise"
    assert 2 < int((unit.abs() > 1).sum()) < unit.numel() - 2, "the batch must try the action's bounds"
    return unit.clamp(-1, 1)


def critic_loss(
    critic: State, target_critic: State, target_actor: State, batch: Batch, weights: torch.Tensor, noise: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The weighted squares of both critics' errors, and the larger of their sizes."""
    obs, next_obs = batch.obs.double(), batch.next_obs.double()
    with torch.no_grad():
        unit = smoothed(target_actor, next_obs, noise)
        after = torch.stack([value(target_critic, which, next_obs, unit) for which in ("first", "second")])
        assert 5 < int((after[0] < after[1]).sum()) < ROWS - 5, "each critic must be the smaller one at times"
        target = batch.reward.double() + batch.discount.double() * after.amin(0)
    errors = torch.stack(
        [value(critic, which, obs, to_unit(batch.action.double())) - target for which in ("first", "second")]
    )
    return (errors**2 * weights.double()).sum() / ROWS, errors.detach().abs().amax(0)


def actor_loss(actor: State, critic: State, batch: Batch) -> torch.Tensor:
    obs = batch.obs.double()
    return -value(critic, "first", obs, policy(actor, obs)).mean()


@pytest.fixture
def noise(monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """What every TD3 draws here; wide enough that some of it is clipped."""
    drawn = 2 * torch.randn(ROWS, 2, generator=torch.Generator().manual_seed(4))
    monkeypatch.setattr(TD3, "draw_noise", lambda self, rows, draw: drawn[:rows])
    return drawn


# --- the update -------------------------------------------------------------------------------------------------------


def test_gradients_and_priorities(noise: torch.Tensor) -> None:
    trainer = estranged(TD3, BOX, policy_delay=1)
    batch, weights = batch_of(BOX)
    actor, critic = doubles(trainer.actor), doubles(trainer.critic)
    target_critic, target_actor = doubles(trainer.target_critic), doubles(trainer.target_actor)
    critic_phase, actor_phase = trainer.phases
    loss, errors = critic_loss(critic, target_critic, target_actor, batch, weights, noise)
    assert relative(critic_phase.compute(batch, weights, ROWS), errors) <= 1e-5
    critic_gradients = gradients(loss, critic)
    for name, gradient in critic_gradients.items():
        assert relative(dict(trainer.critic.named_parameters())[name].grad, gradient) <= 1e-5, name
    assert actor_phase.compute(batch, weights, ROWS) is None
    for name, gradient in gradients(actor_loss(actor, critic, batch), actor).items():
        assert relative(dict(trainer.actor.named_parameters())[name].grad, gradient) <= 1e-5, name
    for name, gradient in critic_gradients.items():
        assert relative(dict(trainer.critic.named_parameters())[name].grad, gradient) <= 1e-5, "the policy's loss shows"


def test_policy_and_targets_follow_the_reference_with_their_delay(noise: torch.Tensor) -> None:
    trainer = with_plain_descent(
        estranged(TD3, BOX, learning_rate=0.05, actor_learning_rate=0.1, tau=0.05, policy_delay=3)
    )
    actor, critic = doubles(trainer.actor), doubles(trainer.critic)
    target_actor, target_critic = doubles(trainer.target_actor), doubles(trainer.target_critic)
    for step in range(1, 8):
        batch, weights = batch_of(BOX, seed=step)
        loss, errors = critic_loss(critic, target_critic, target_actor, batch, weights, noise)
        critic = descend(critic, gradients(loss, critic), 0.05)
        if step in (3, 6):
            # The policy climbs the first critic, which has just moved.
            actor = descend(actor, gradients(actor_loss(actor, critic, batch), actor), 0.1)
            target_actor, target_critic = toward(target_actor, actor, 0.05), toward(target_critic, critic, 0.05)
        assert relative(trainer.update_policy(batch, weights), errors) <= 1e-5
        modules = modules_of(trainer)
        for name, expected in (
            ("actor", actor),
            ("critic", critic),
            ("target_actor", target_actor),
            ("target_critic", target_critic),
        ):
            assert_close(modules[name], expected)


def test_by_default_policy_and_targets_move_in_every_second_step() -> None:
    trainer = TD3(OBS, BOX, hidden_sizes=(8,))
    before = all_tensors(trainer)
    moved = []
    for step in range(4):
        trainer.update_policy(*batch_of(BOX, seed=step))
        after = all_tensors(trainer)
        moved.append({name.partition(".")[0] for name in after if not torch.equal(after[name], before[name])})
        before = after
    every = {"actor", "critic", "target_actor", "target_critic"}
    assert moved == [{"critic"}, every, {"critic"}, every]


def test_gradients_are_clipped_by_their_norm(noise: torch.Tensor) -> None:
    trainer = with_plain_descent(estranged(TD3, BOX, learning_rate=1.0, max_grad_norm=0.01))
    critic = doubles(trainer.critic)
    trainer.update_policy(*batch_of(BOX))
    after = doubles(trainer.critic)
    moved = sum(float((after[n] - critic[n]).detach().square().sum()) for n in critic)
    assert moved**0.5 == pytest.approx(0.01, rel=1e-4)


# --- random numbers ---------------------------------------------------------------------------------------------------


def priorities(trainer: Any, steps: int = 3) -> list[torch.Tensor]:
    return [trainer.update_policy(*batch_of(BOX, seed=step)) for step in range(steps)]


def test_the_seed_decides_the_noise_and_the_programs_random_numbers_do_not() -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    first = priorities(TD3(OBS, BOX, seed=3, hidden_sizes=(8,)))
    assert torch.equal(torch.rand(3), expected), "training drew from the program's random numbers"
    again = priorities(TD3(OBS, BOX, seed=3, hidden_sizes=(8,)))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    other = estranged(TD3, BOX, seed=4)
    assert not torch.equal(priorities(estranged(TD3, BOX, seed=3), 1)[0], priorities(other, 1)[0])


@each_device
def test_noise_is_that_of_seed_step_and_draw(device: str) -> None:
    trainer = TD3(OBS, BOX, seed=1, device=device, hidden_sizes=(8,))
    first, again, second = (trainer.draw_noise(20, draw) for draw in (0, 0, 1))
    assert first.shape == (20, 2)
    assert first.device.type == device
    assert torch.equal(first, again)
    trainer.gradient_steps += 1
    third, other = trainer.draw_noise(20, 0), TD3(OBS, BOX, seed=2, hidden_sizes=(8,)).draw_noise(20, 0)
    drawn = [noise.cpu() for noise in (first, second, third, other)]
    assert len(torch.cat(drawn).unique()) == 4 * 40
    assert torch.equal(TD3(OBS, BOX, seed=1, hidden_sizes=(8,)).draw_noise(20, 0), drawn[0])


def test_without_target_noise_nothing_is_left_to_chance() -> None:
    a, b = (estranged(TD3, BOX, seed=seed, target_noise=0.0) for seed in (1, 2))
    assert all(torch.equal(x, y) for x, y in zip(priorities(a), priorities(b), strict=True))


@each_device
@pytest.mark.parametrize("sub_batches", [2, 3])
def test_sub_batches_train_as_the_whole_batch(sub_batches: int, device: str) -> None:
    trainers = [TD3(OBS, BOX, seed=1, device=device, hidden_sizes=(32, 16)) for _ in range(2)]
    learners = [TorchLearner(t, device=device, sub_batches=n) for t, n in zip(trainers, (1, sub_batches), strict=True)]
    for learner in learners:
        learner.prepare()
    for step in range(4):
        batch, weights = batch_of(BOX, seed=step, rows=50)
        whole, parts = (learner.step(columns_of(batch), weights.numpy()).priorities for learner in learners)
        torch.testing.assert_close(torch.from_numpy(parts), torch.from_numpy(whole), rtol=1e-4, atol=1e-5)
    expected, found = (all_tensors(trainer) for trainer in trainers)
    for name, tensor in expected.items():
        assert float((found[name] - tensor).norm() / tensor.norm().clamp(min=1e-12)) <= (
            1e-6 if device == "cpu" else 1e-4
        ), name


# --- checkpoints ------------------------------------------------------------------------------------------------------


def test_a_restored_trainer_goes_on_to_the_bit() -> None:
    trainer, twin = (TD3(OBS, BOX, seed=seed, hidden_sizes=(8,)) for seed in (1, 2))
    priorities(trainer, 3)
    load_module_tensors(twin, module_tensors(trainer))
    twin.gradient_steps = trainer.gradient_steps
    assert all(torch.equal(a, b) for a, b in zip(priorities(trainer), priorities(twin), strict=True))
    expected, found = all_tensors(trainer), all_tensors(twin)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


# --- bad settings -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "wrong", "wanted"),
    [("policy_delay", 0, "at least 1"), ("target_noise", -0.1, "at least 0"), ("noise_clip", -1.0, "at least 0")],
)
def test_settings_that_cannot_be(setting: str, wrong: float, wanted: str) -> None:
    with pytest.raises(TrainerError, match=rf"TD3\.{setting} must be {wanted}; found {wrong}"):
        TD3(OBS, BOX, **{setting: wrong})  # type: ignore[arg-type]


# --- whole runs -------------------------------------------------------------------------------------------------------


def test_a_program_trains_with_actor_processes(tmp_path: Path, quick_profiles: None) -> None:
    program = make_program(tmp_path, trainer=TinyTD3, env="Pendulum-v1", actors=2)
    code, output = run(program, "--timesteps", "1500", "--eval-episodes", "2", "--run-dir", str(tmp_path / "run"))
    assert code == 0, output
    found = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert found["gradient_steps"] > 20
    assert found["last"]["episodes"] == 2


def test_a_serial_run_resumes_to_the_bit(tmp_path: Path, quick_profiles: None) -> None:
    program = make_program(tmp_path, trainer=TinyTD3, env="Pendulum-v1")
    common = ("--serial", "--timesteps", "1000", "--checkpoint-interval", "512", "--eval-episodes", "0")
    whole, half = tmp_path / "whole", tmp_path / "half"
    code, output = run(program, *common, "--run-dir", str(whole))
    assert code == 0, output
    saved = sorted((whole / "checkpoints").glob("checkpoint-*"))[0]
    shutil.copytree(saved, half / "checkpoints" / saved.name)
    code, output = run(program, *common, "--run-dir", str(half), "--resume")
    assert code == 0, output
    assert "Resumed from" in output
    assert (half / "weights.safetensors").read_bytes() == (whole / "weights.safetensors").read_bytes()


@pytest.mark.slow
def test_it_learns_pendulum(tmp_path: Path, quick_profiles: None) -> None:
    settings = {"hidden_sizes": (64, 64), "learning_rate": 2e-3, "actor_learning_rate": 2e-3, "learning_starts": 500}
    training = {"batch_size": 64, "replay_ratio": 64.0, "gamma": 0.98}
    program = make_program(
        tmp_path, trainer=TD3, settings=settings, training=training, env="Pendulum-v1", capacity=20_000
    )
    arguments = ("--timesteps", "8000", "--eval-episodes", "20", "--run-dir", str(tmp_path / "run"))
    code, output = run(program, *arguments)
    assert code == 0, output
    # Chance returns about -1200; a pendulum that is swung up and held, about -150.
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["best"]["mean"] > -400
