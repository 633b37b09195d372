"""TD3: its losses, delayed updates and noise, against float64 written out here."""

from __future__ import annotations

import pytest
import torch
from references import (
    BOX,
    OBS,
    ROWS,
    State,
    all_tensors,
    assert_close,
    batch_of,
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

from pearl.algorithms import TD3, Batch
from pearl.algorithms.trainer import modules_of

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


@pytest.mark.parametrize("target_noise", [0.0, 0.2])
def test_the_seed_matters_only_by_the_target_noise(target_noise: float) -> None:
    first, other = (
        estranged(TD3, BOX, seed=seed, target_noise=target_noise).update_policy(*batch_of(BOX)) for seed in (1, 2)
    )
    assert torch.equal(first, other) == (target_noise == 0.0)
