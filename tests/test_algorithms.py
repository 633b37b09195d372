"""Losses, gradients and updates of the algorithms against float64 written out here; trainers made and checked."""

from __future__ import annotations

import copy
import math
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from references import (
    BOX,
    DISCRETE,
    OBS,
    ROWS,
    State,
    assert_close,
    batch_of,
    dense,
    descend,
    doubles,
    estranged,
    gradients,
    relative,
    to_unit,
    toward,
)
from torch import nn

from pearl.algorithms import ALGORITHMS, DDPG, DQN, PPO, SAC, TD3, Batch, Trainer, make_trainer, other_names
from pearl.algorithms.networks import NatureCNN, mlp
from pearl.algorithms.trainer import modules_of, policy_tensors, settings_of
from pearl.errors import TrainerError
from pearl.exploration import EpsilonGreedy
from pearl.learner.flat import FlatParameters
from pearl.learner.torch_learner import TorchLearner


def action_values(state: State, x: torch.Tensor, *, dueling: bool) -> torch.Tensor:
    if not dueling:
        return dense(state, "", (0, 2, 4), x)
    features = dense(state, "", (0,), x, rectify_last=True)
    advantage = dense(state, "2.advantage.", (0, 2), features)
    return dense(state, "2.value.", (0, 2), features) + advantage - advantage.sum(1, keepdim=True) / 3


def dqn_loss(
    q: State, target_q: State, batch: Batch, weights: torch.Tensor, *, double: bool, dueling: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The weighted Huber loss, and the absolute TD errors."""
    obs, next_obs = batch.obs.double(), batch.next_obs.double()
    every = torch.arange(len(obs))
    with torch.no_grad():
        after = action_values(target_q, next_obs, dueling=dueling)
        chosen = action_values(q, next_obs, dueling=dueling) if double else after
        target = batch.reward.double() + batch.discount.double() * after[every, chosen.argmax(1)]
    error = (action_values(q, obs, dueling=dueling)[every, batch.action] - target).abs()
    huber = torch.where(error < 1, error**2 / 2, error - 0.5)
    assert 5 < int((error < 1).sum()) < len(error) - 5, "the batch must try both arms"
    return (huber * weights.double()).sum() / len(obs), error.detach()


def unsquashed(state: State, obs: torch.Tensor) -> torch.Tensor:
    return dense(state, "network.", (0, 2, 4), obs / 5)  # observations lie in [-5, 5]


def act(state: State, obs: torch.Tensor) -> torch.Tensor:
    low, high = torch.as_tensor(BOX.low).double(), torch.as_tensor(BOX.high).double()
    return (low + high) / 2 + (high - low) / 2 * torch.tanh(unsquashed(state, obs))


def criticise(state: State, obs: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
    return dense(state, "network.", (0, 2, 4), torch.cat((obs / 5, to_unit(action)), 1))[:, 0]


def critic_loss(
    critic: State, target_critic: State, target_actor: State, batch: Batch, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    obs, next_obs = batch.obs.double(), batch.next_obs.double()
    with torch.no_grad():
        after = criticise(target_critic, next_obs, act(target_actor, next_obs))
        target = batch.reward.double() + batch.discount.double() * after
    error = criticise(critic, obs, batch.action.double()) - target
    return (error**2 * weights.double()).sum() / len(obs), error.detach().abs()


def actor_loss(actor: State, critic: State, batch: Batch) -> torch.Tensor:
    """Minus the mean value, and a tenth of the squares by which outputs before tanh exceed 2."""
    obs = batch.obs.double()
    outputs = unsquashed(actor, obs)
    saturated = outputs.abs() > 2
    assert 2 < int(saturated.sum()) < saturated.numel() - 2, "the batch must try both sides of the penalty"
    penalty = ((outputs.abs() - 2) ** 2 * saturated).sum()
    return (0.1 * penalty - criticise(critic, obs, act(actor, obs)).sum()) / len(obs)


class PlainDQN(DQN):
    """Gradient descent instead of Adam: the weights then tell the gradient's size."""

    def build(self) -> None:
        super().build()
        self.optimizer = torch.optim.SGD(self.optimizer.param_groups[0]["params"], self.learning_rate)  # type: ignore[assignment]


class PlainDDPG(DDPG):
    def build(self) -> None:
        super().build()
        self.critic_optimizer = torch.optim.SGD(  # type: ignore[assignment]
            self.critic_optimizer.param_groups[0]["params"], self.learning_rate
        )
        self.actor_optimizer = torch.optim.SGD(  # type: ignore[assignment]
            self.actor_optimizer.param_groups[0]["params"], self.actor_learning_rate
        )


# --- DQN --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dueling", [False, True])
@pytest.mark.parametrize("double", [False, True])
def test_dqn_gradients_and_priorities(double: bool, dueling: bool) -> None:
    trainer = estranged(DQN, DISCRETE, double=double, dueling=dueling)
    batch, weights = batch_of(DISCRETE)
    q, target = doubles(trainer.q), doubles(trainer.target_q)
    loss, errors = dqn_loss(q, target, batch, weights, double=double, dueling=dueling)
    _, other_errors = dqn_loss(q, target, batch, weights, double=not double, dueling=dueling)
    assert not torch.allclose(errors, other_errors), "the batch must tell double from plain"
    priorities = trainer.phases[0].compute(batch, weights, ROWS)
    assert relative(priorities, errors) <= 1e-5
    for name, gradient in gradients(loss, q).items():
        assert relative(dict(trainer.q.named_parameters())[name].grad, gradient) <= 1e-5, name
    assert all(p.grad is None for p in trainer.target_q.parameters())


@pytest.mark.parametrize("settings", [{"target_update_interval": 3}, {"tau": 0.1}], ids=["hard", "polyak"])
def test_dqn_follows_the_reference_over_steps(settings: dict[str, Any]) -> None:
    trainer = estranged(PlainDQN, DISCRETE, learning_rate=0.5, max_grad_norm=0.0, **settings)
    q, target = doubles(trainer.q), doubles(trainer.target_q)
    for step in range(1, 8):
        batch, weights = batch_of(DISCRETE, seed=step)
        loss, errors = dqn_loss(q, target, batch, weights, double=True, dueling=False)
        q = descend(q, gradients(loss, q), 0.5)
        if "tau" in settings:
            target = toward(target, q, 0.1)
        elif step % 3 == 0:
            target = q
        assert relative(trainer.update_policy(batch, weights), errors) <= 1e-5
        assert_close(trainer.q, q)
        assert_close(trainer.target_q, target)
    assert trainer.gradient_steps == 7


@pytest.mark.parametrize(("limit", "moved"), [(0.01, 0.01), (1e6, None), (0.0, None)])
def test_gradients_are_clipped_by_their_norm(limit: float, moved: float | None) -> None:
    trainer = estranged(PlainDQN, DISCRETE, learning_rate=1.0, max_grad_norm=limit)
    batch, weights = batch_of(DISCRETE)
    q = doubles(trainer.q)
    gradient = gradients(dqn_loss(q, doubles(trainer.target_q), batch, weights, double=True, dueling=False)[0], q)
    norm = math.sqrt(sum(float(g.square().sum()) for g in gradient.values()))
    trainer.update_policy(batch, weights)
    after = doubles(trainer.q)
    found = math.sqrt(sum(float((after[n] - q[n]).detach().square().sum()) for n in q))
    assert norm > 0.02
    assert found == pytest.approx(moved or norm, rel=1e-4)


class OwnUpdate(DQN):
    """An update as loops in torch have it: gradients are cleared before they are computed, and not after."""

    def update_policy(self, batch: Batch, weights: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        priorities = self._compute(batch, weights, len(weights))
        nn.utils.clip_grad_norm_(self.q.parameters(), self.max_grad_norm)
        self.optimizer.step()
        self.end_of_step()
        return priorities


class OwnLoss(DQN):
    """Its gradients are in new memory when the built-in step clips and uses them."""

    def _compute(self, batch: Batch, weights: torch.Tensor, batch_size: int) -> torch.Tensor:
        self.q.zero_grad()
        return super()._compute(batch, weights, batch_size)


class OwnUpdateAndLoss(OwnUpdate, OwnLoss):
    pass


@pytest.mark.parametrize("trainer", [OwnUpdate, OwnLoss, OwnUpdateAndLoss])
def test_code_of_ones_own_may_clear_gradients_as_usual_in_torch(trainer: type[DQN]) -> None:
    own, built_in = (estranged(t, DISCRETE, max_grad_norm=0.05) for t in (trainer, DQN))
    before = doubles(own.q)
    for step in range(3):
        batch, weights = batch_of(DISCRETE, seed=step)
        own.update_policy(batch, weights)
        built_in.update_policy(batch, weights)
    assert relative(own.q[0].weight, before["0.weight"]) > 1e-3
    assert_close(own.q, doubles(built_in.q))


def test_actions_are_those_of_the_largest_value() -> None:
    trainer = estranged(DQN, DISCRETE, dueling=True)
    obs = batch_of(DISCRETE)[0].obs * 20
    values = action_values(doubles(trainer.q), obs.double(), dueling=True)
    assert len(set(values.argmax(1).tolist())) > 1
    assert torch.equal(trainer.get_action(obs), values.argmax(1))


# --- DDPG -------------------------------------------------------------------------------------------------------------


def test_ddpg_gradients_and_priorities() -> None:
    trainer = estranged(DDPG, BOX)
    batch, weights = batch_of(BOX)
    actor, critic = doubles(trainer.actor), doubles(trainer.critic)
    critic_phase, actor_phase = trainer.phases
    loss, errors = critic_loss(critic, doubles(trainer.target_critic), doubles(trainer.target_actor), batch, weights)
    assert relative(critic_phase.compute(batch, weights, ROWS), errors) <= 1e-5
    for name, gradient in gradients(loss, critic).items():
        assert relative(dict(trainer.critic.named_parameters())[name].grad, gradient) <= 1e-5, name
    assert actor_phase.compute(batch, weights, ROWS) is None
    for name, gradient in gradients(actor_loss(actor, critic, batch), actor).items():
        assert relative(dict(trainer.actor.named_parameters())[name].grad, gradient) <= 1e-5, name


def test_ddpg_follows_the_reference_over_steps() -> None:
    trainer = estranged(PlainDDPG, BOX, learning_rate=0.05, actor_learning_rate=0.1, tau=0.05)
    actor, critic = doubles(trainer.actor), doubles(trainer.critic)
    target_actor, target_critic = doubles(trainer.target_actor), doubles(trainer.target_critic)
    for step in range(1, 7):
        batch, weights = batch_of(BOX, seed=step)
        loss, errors = critic_loss(critic, target_critic, target_actor, batch, weights)
        critic = descend(critic, gradients(loss, critic), 0.05)
        # The actor climbs the critic that has just moved; the critic does not move by the actor's gradient.
        actor = descend(actor, gradients(actor_loss(actor, critic, batch), actor), 0.1)
        target_actor, target_critic = toward(target_actor, actor, 0.05), toward(target_critic, critic, 0.05)
        assert relative(trainer.update_policy(batch, weights), errors) <= 1e-5
        for name, expected in (
            ("actor", actor),
            ("critic", critic),
            ("target_actor", target_actor),
            ("target_critic", target_critic),
        ):
            assert_close(modules_of(trainer)[name], expected)


def test_a_new_policy_acts_near_the_centre_of_the_box() -> None:
    with torch.no_grad():
        action = DDPG(OBS, BOX).get_action(torch.randn(500, 6)).numpy()
    half = (BOX.high - BOX.low) / 2
    assert (np.abs(action - (BOX.high + BOX.low) / 2) < 0.1 * half).all()
    assert (np.ptp(action, axis=0) > 0).all()


# --- flat parameters --------------------------------------------------------------------------------------------------


def test_adam_over_the_flat_tensor_is_adam_over_each_parameter() -> None:
    torch.manual_seed(0)
    plain = mlp(5, (17, 9), 3)
    flat_module = copy.deepcopy(plain)
    flat = FlatParameters(flat_module)
    flat_adam = torch.optim.Adam([flat.parameter], lr=3e-3, fused=True)
    adam = torch.optim.Adam(plain.parameters(), lr=3e-3)
    start = [p.detach().clone() for p in plain.parameters()]
    for _ in range(50):
        x = torch.randn(32, 5)
        for module in (plain, flat_module):
            (module(x) - x[:, :3].sin()).square().mean().backward()
        adam.step()
        adam.zero_grad()
        flat_adam.step()
        flat.zero_grad()
    for a, b, before in zip(plain.parameters(), flat_module.parameters(), start, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
        assert not torch.allclose(a, before, atol=1e-2)


def test_a_flat_module_keeps_names_shapes_and_values() -> None:
    module = mlp(5, (17,), 3)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    flat = FlatParameters(module)
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name])
    module.load_state_dict({name: value + 1 for name, value in before.items()})
    assert float(flat.parameter.detach().sum()) == pytest.approx(
        sum(float(v.sum()) + v.numel() for v in before.values()), rel=1e-5
    )
    other = mlp(5, (17,), 3)
    target = FlatParameters(other, gradients=False)
    target.copy_from(flat)
    assert all(torch.equal(value, before[name] + 1) for name, value in other.state_dict().items())
    flat.parameter.data.zero_()
    assert all(bool((p == 0).all()) for p in module.parameters())
    target.move_toward(flat, 0.25)
    for name, value in other.state_dict().items():
        torch.testing.assert_close(value, (before[name] + 1) * 0.75)


def test_a_module_without_parameters_cannot_be_flattened() -> None:
    with pytest.raises(ValueError, match="no parameters"):
        FlatParameters(nn.ReLU())


# --- settings ---------------------------------------------------------------------------------------------------------


class SmallDQN(DQN):
    hidden_sizes = (8,)
    extra: float = 0.5


def test_settings_are_class_attributes_that_arguments_override() -> None:
    trainer = SmallDQN(OBS, DISCRETE, learning_rate=0.25, extra=2.0, exploration=EpsilonGreedy(0.5, 0.5, 1))
    assert trainer.optimizer.param_groups[0]["lr"] == 0.25
    assert trainer.extra == 2.0
    assert [tuple(p.shape) for p in trainer.q.parameters()] == [(8, 6), (8,), (3, 8), (3,)]
    assert trainer.exploration == EpsilonGreedy(0.5, 0.5, 1)
    assert (SmallDQN.learning_rate, SmallDQN.extra) == (1e-3, 0.5)


@pytest.mark.parametrize(
    ("algorithm", "name", "meant"),
    [
        (DQN, "buffer_size", "the first argument of set_replay"),
        (DQN, "n_steps", "n_step"),
        (DQN, "net_arch", "hidden_sizes"),
        (DQN, "verbose", "nothing, as every run shows its progress"),
        (PPO, "n_steps", "horizon"),
        (PPO, "ent_coef", "entropy_coefficient"),
        (SAC, "ent_coef", "temperature"),
        (TD3, "action_noise", r"exploration=GaussianNoise\(sigma=\.\.\.\)"),
        (DQN, "lr", r"learning_rate\. Its"),
        (DQN, "target_network_frequency", "target_update_interval, in gradient steps"),
        (PPO, "num_envs", "envs_per_actor of set_actors"),
        (PPO, "anneal_lr", "learning_rate_schedule, as docs/schedules.md shows"),
        (SAC, "autotune", "temperature, where None is for one that adapts itself"),
        (TD3, "q_lr", r"learning_rate\. Its"),
    ],
)
def test_a_setting_of_another_library_is_named_as_it_is_here(algorithm: Any, name: str, meant: str) -> None:
    actions = DISCRETE if algorithm in (DQN, PPO) else BOX
    with pytest.raises(TrainerError, match=rf"{algorithm.__name__} has no setting '{name}'\. In PEARL: {meant}"):
        algorithm(OBS, actions, **{name: 1})


def test_other_names_lead_to_settings_that_there_are() -> None:
    ours = {name for one in ALGORITHMS.values() for name in settings_of(one)}
    meant = {name for names in other_names._SETTINGS.values() for name in names}
    assert meant <= ours
    assert not (other_names._SETTINGS.keys() | other_names._ELSEWHERE.keys()) & ours


def test_settings_that_rollouts_do_not_use_are_not_offered() -> None:
    with pytest.raises(TrainerError, match="PPO has no setting 'zzz'") as caught:
        PPO(OBS, DISCRETE, zzz=1)  # type: ignore[call-arg]
    assert "horizon" in str(caught.value)
    for name in ("n_step", "replay_ratio", "learning_starts", "exploration", "train_freq", "gradient_steps"):
        assert f" {name}," not in str(caught.value)


@pytest.mark.parametrize("name", ["learning_rate", "clip_range"])
def test_a_function_in_place_of_a_number_is_led_to_the_schedule(name: str) -> None:
    with pytest.raises(TrainerError, match=rf"A function of progress belongs into {name}_schedule"):
        PPO(OBS, DISCRETE, **{name: abs})


class NoWidth(PPO):
    def build_features(self) -> Any:
        return torch.nn.Linear(6, 4)


def test_features_without_their_width_are_named() -> None:
    with pytest.raises(TrainerError, match=r"NoWidth\.build_features must return the network and how many features"):
        NoWidth(OBS, DISCRETE)


class KeepsLayers(DQN):
    """Puts its layers on the trainer, for a loss of its own; the target's are the same then."""

    def build_q_network(self) -> nn.Module:
        if "trunk" not in vars(self):
            self.trunk = nn.Linear(6, 8)
        return nn.Sequential(self.trunk, nn.Linear(8, 3))


@pytest.mark.parametrize(
    ("base", "method", "made", "message"),
    [
        (DQN, "build_q_network", None, r"must return a network, a torch.nn.Module; found None. It may lack a `return`"),
        (DDPG, "build_actor", len, "must return a network, a torch.nn.Module; found <built-in function len>"),
        (TD3, "build_critic", nn.Identity(), "must return a network with parameters to train; found Identity"),
        (SAC, "build_actor", nn.LazyLinear(2), "returned lazy layers, whose sizes are not known yet"),
        (DQN, "build_q_network", nn.Linear(6, 3), "must make new layers each time; found layers that an earlier call"),
        (TD3, "build_actor", nn.Linear(6, 2), "must make new layers each time"),
        (SAC, "build_critic", nn.Linear(8, 1), "must make new layers each time"),
    ],
)
def test_what_is_no_network_to_train_is_named(base: type[Trainer], method: str, made: Any, message: str) -> None:
    own = type("Own", (base,), {method: lambda self: made})
    with pytest.raises(TrainerError, match=rf"Own\.{method}\(\) .*{message}"):
        own(OBS, DISCRETE if base is DQN else BOX)


def test_layers_that_a_network_shares_with_its_target_are_named() -> None:
    with pytest.raises(TrainerError, match=r"KeepsLayers\.build_q_network\(\) is called again .*must make new layers"):
        KeepsLayers(OBS, DISCRETE)


class WithoutTarget(DQN):
    def build(self) -> None:
        self.q = self.build_q_network()


class WithoutReturn(DQN):
    def _compute(self, batch: Batch, weights: torch.Tensor, batch_size: int) -> Any:
        super()._compute(batch, weights, batch_size)


def test_networks_that_the_base_class_needs_are_named() -> None:
    with pytest.raises(
        TrainerError, match=r"WithoutTarget\.build\(\) does not make .*'target_q'.*super\(\)\.build\(\)"
    ):
        make_trainer(WithoutTarget, OBS, DISCRETE)


@pytest.mark.parametrize("sub_batches", [1, 2])
def test_phases_without_priorities_are_named(sub_batches: int) -> None:
    batch, weights = batch_of(DISCRETE)
    learner = TorchLearner(WithoutReturn(OBS, DISCRETE), sub_batches=sub_batches)
    with pytest.raises(TrainerError, match="No phase of WithoutReturn returned priorities: `compute` of one"):
        learner.step({name: column.numpy() for name, column in batch._asdict().items()}, weights.numpy())


def test_an_unknown_setting_of_ones_own_class_is_named() -> None:
    with pytest.raises(TrainerError, match=r"SmallDQN has no setting 'extr'\. Did you mean 'extra'\?"):
        SmallDQN(OBS, DISCRETE, extr=1)
    with pytest.raises(TrainerError, match=r"no setting 'zzz'\. Its settings are"):
        SmallDQN(OBS, DISCRETE, zzz=1)


# --- spaces -----------------------------------------------------------------------------------------------------------


def test_images_too_small_for_the_nature_network() -> None:
    with pytest.raises(ValueError, match=r"at least 36 x 36 pixels; found \(3, 16, 16\)"):
        NatureCNN((3, 16, 16))


def test_bytes_and_floats_of_the_same_image_have_the_same_values() -> None:
    image = spaces.Box(0, 255, (1, 36, 36), np.uint8)
    trainer = make_trainer(DQN, image, DISCRETE)
    assert isinstance(trainer, DQN)
    pixels = torch.randint(0, 256, (2, 1, 36, 36), dtype=torch.uint8)
    with torch.no_grad():
        torch.testing.assert_close(trainer.q(pixels), trainer.q(pixels.float() / 255))


# --- observations' bounds ---------------------------------------------------------------------------------------------

each_actor_critic = pytest.mark.parametrize("algorithm", [DDPG, TD3, SAC])


def box_of(*bounds: float, dtype: Any = np.float32) -> spaces.Box:
    return spaces.Box(-np.array(bounds, dtype), np.array(bounds, dtype), dtype=dtype)


def steps_of(algorithm: type[Trainer], observations: spaces.Box, **settings: Any) -> torch.Tensor:
    """Priorities of three steps on the same batches, `(3, ROWS)`."""
    trainer = algorithm(observations, BOX, hidden_sizes=(16,), **settings)
    return torch.stack([trainer.update_policy(*batch_of(BOX, seed)) for seed in range(3)])


@each_actor_critic
def test_bounds_that_an_environment_declares_do_not_change_what_is_learned(algorithm: type[Trainer]) -> None:
    narrow, wide, open_ended = (steps_of(algorithm, box_of(*[bound] * 6)) for bound in (5.0, 1000.0, np.inf))
    assert torch.equal(narrow, wide)
    assert torch.equal(narrow, open_ended)


@each_actor_critic
def test_observations_are_scaled_by_their_bounds_where_the_trainer_asks(algorithm: type[Trainer]) -> None:
    asked, plain = (
        algorithm(OBS, BOX, hidden_sizes=(16,), **settings) for settings in ({"scale_observations": True}, {})
    )
    for (batch, weights), (scaled, _) in ((batch_of(BOX, seed), batch_of(BOX, seed)) for seed in range(3)):
        scaled = scaled._replace(obs=batch.obs / 5, next_obs=batch.next_obs / 5)
        torch.testing.assert_close(asked.update_policy(batch, weights), plain.update_policy(scaled, weights))
    with torch.no_grad():
        torch.testing.assert_close(asked.get_action(batch.obs), plain.get_action(batch.obs / 5))


@each_actor_critic
def test_an_action_that_has_a_single_value_is_the_same_to_the_critics_whatever_it_is(algorithm: type[Trainer]) -> None:
    def priorities(value: float) -> torch.Tensor:
        low, high = np.array([-2.0, value], np.float32), np.array([2.0, value], np.float32)
        actions = spaces.Box(low, high)
        trainer = algorithm(OBS, actions, hidden_sizes=(16,))
        return torch.stack([trainer.update_policy(*batch_of(actions, seed)) for seed in range(3)])

    zero, hundred = priorities(0.0), priorities(100.0)
    assert zero.isfinite().all()
    torch.testing.assert_close(hundred, zero, rtol=1e-3, atol=1e-3)


def test_bytes_are_scaled_always() -> None:
    pixels = spaces.Box(0, 255, (6,), np.uint8)
    trainer = DDPG(pixels, BOX, hidden_sizes=(16,))
    twin = DDPG(OBS, BOX, hidden_sizes=(16,))
    seen = torch.randint(0, 256, (9, 6), dtype=torch.uint8)
    with torch.no_grad():
        torch.testing.assert_close(trainer.get_action(seen), twin.get_action(seen / 127.5 - 1))


@pytest.mark.parametrize(
    ("observations", "asked", "said"),
    [
        (OBS, False, "taken as the environment gives them (scale_observations=True scales"),
        (box_of(np.inf, 2000.0), False, "taken as the environment gives them."),
        (OBS, True, "scaled to [-1, 1] by their bounds."),
        (box_of(np.inf, 2.0, 1.0), True, "2 of 3 elements are scaled to [-1, 1] by their bounds"),
        (spaces.Box(0, 255, (6,), np.uint8), False, "scaled to [-1, 1] from unsigned bytes."),
    ],
)
def test_a_trainer_says_what_is_done_to_observations(observations: spaces.Box, asked: bool, said: str) -> None:
    assert said in SAC(observations, BOX, hidden_sizes=(4,), scale_observations=asked).describe_inputs()


def test_scaling_by_bounds_that_are_none_is_refused() -> None:
    with pytest.raises(TrainerError, match=r"DDPG\.scale_observations needs observations with bounds of at most 1000"):
        DDPG(box_of(np.inf, 2000.0), BOX, scale_observations=True)
    with pytest.raises(TrainerError, match=r"scale_observations must be True or False; found 1\.0"):
        DDPG(OBS, BOX, scale_observations=1.0)


# --- classes that users write -----------------------------------------------------------------------------------------


class NoArguments:
    def __init__(self) -> None:
        self.policy: nn.Module = nn.Linear(6, 3)

    def get_action(self, obs: torch.Tensor) -> torch.Tensor:
        return self.values(obs).argmax(1)

    def values(self, obs: torch.Tensor) -> torch.Tensor:
        values: torch.Tensor = self.policy(obs)
        return values

    def update_policy(self, batch: Batch, weights: torch.Tensor) -> torch.Tensor:
        return weights


class Keywords(NoArguments):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__()
        self.kwargs = kwargs


class Chosen(NoArguments):
    def __init__(self, action_space: gym.Space[Any], width: int = 4) -> None:
        super().__init__()
        self.given = (action_space, width)


class Needy(NoArguments):
    def __init__(self, observation_space: gym.Space[Any], replay_path: str, *, horizon: int) -> None:
        super().__init__()


class AsModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 3)
        self.scale = nn.Parameter(torch.ones(1))

    def get_action(self, obs: torch.Tensor) -> torch.Tensor:
        values: torch.Tensor = self.body(obs) * self.scale
        return values.argmax(1)

    def update_policy(self, batch: Batch, weights: torch.Tensor) -> torch.Tensor:
        return weights


class NoModules(NoArguments):
    def __init__(self) -> None:
        self.table = np.zeros((6, 3))


class WrongInputShape(NoArguments):
    input_shape = (4,)


class WrongNetwork(NoArguments):
    def __init__(self) -> None:
        self.policy = nn.Linear(4, 3)


class WrongAction(NoArguments):
    def get_action(self, obs: torch.Tensor) -> torch.Tensor:
        return self.values(obs)


class NoTensor(NoArguments):
    def get_action(self, obs: torch.Tensor) -> torch.Tensor:
        return 1  # type: ignore[return-value]


class Failing(NoArguments):
    def __init__(self) -> None:
        raise KeyError("table")


class NoUpdate:
    def get_action(self, obs: torch.Tensor) -> torch.Tensor:
        return obs


class Neither:
    update_policy = None


def test_a_constructor_gets_what_it_takes() -> None:
    assert isinstance(make_trainer(NoArguments, OBS, DISCRETE), NoArguments)
    keywords = make_trainer(Keywords, OBS, DISCRETE, seed=4, settings={"width": 9})
    assert isinstance(keywords, Keywords)
    assert keywords.kwargs == {
        "observation_space": OBS,
        "action_space": DISCRETE,
        "seed": 4,
        "device": "cpu",
        "width": 9,
    }
    chosen = make_trainer(Chosen, OBS, DISCRETE, settings={"width": 7})
    assert isinstance(chosen, Chosen)
    assert chosen.given == (DISCRETE, 7)


def test_a_trainer_may_itself_be_a_module() -> None:
    trainer = make_trainer(AsModule, OBS, DISCRETE)
    assert sum(t.numel() for t in policy_tensors(trainer)) == 6 * 3 + 3 + 1


class ForgetfulDQN(DQN):
    def __init__(self, observation_space: gym.Space[Any], action_space: gym.Space[Any]) -> None:
        self.depth = 3


class Normalizing(NoArguments):
    def __init__(self) -> None:
        self.policy = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3))


def test_the_check_of_a_class_leaves_its_statistics_and_its_mode() -> None:
    widest = spaces.Box(-np.finfo(np.float32).max, np.finfo(np.float32).max, (6,), np.float32)
    trainer = make_trainer(Normalizing, widest, DISCRETE)
    assert isinstance(trainer, Normalizing)
    assert trainer.policy.training
    assert {float(buffer.sum()) for buffer in trainer.policy.buffers()} == {0.0, 6.0}  # means and count, variances


@pytest.mark.parametrize(
    ("trainer", "message"),
    [
        (NoUpdate, r"Trainer class NoUpdate lacks update_policy\(\)\. It needs"),
        (Neither, r"Trainer class Neither lacks get_action\(\) and update_policy\(\)"),
        (Needy, r"Needy\(\) requires replay_path, horizon, which PEARL does not supply"),
        (NoModules, "NoModules holds no torch module with parameters"),
        (WrongInputShape, r"input_shape is \(4,\), but the environment's observations have shape \(6,\)"),
        (WrongNetwork, r"get_action\(\) failed on 64 observations of shape \(6,\).*disagrees"),
        (WrongAction, r"returned shape \(64, 3\) for 64 observations; actions of Discrete\(3\) need \(64,\)"),
        (NoTensor, r"must return a tensor of shape \(64,\) for 64 observations; found a int"),
        (Failing, r"Failing\(\) failed: KeyError: 'table'"),
        (ForgetfulDQN, r"ForgetfulDQN\.__init__\(\) does not call .* super\(\)\.__init__\("),
    ],
)
def test_a_class_that_cannot_train_says_why(trainer: type, message: str) -> None:
    with pytest.raises(TrainerError, match=message):
        make_trainer(trainer, OBS, DISCRETE)


def test_an_argument_that_the_constructor_does_not_take() -> None:
    with pytest.raises(TrainerError, match=r"NoArguments\(\) takes no argument 'depth', 'width'"):
        make_trainer(NoArguments, OBS, DISCRETE, settings={"width": 9, "depth": 1})


def test_an_instance_is_not_a_class() -> None:
    with pytest.raises(TrainerError, match=r"Pass the class itself.*without parentheses"):
        make_trainer(NoArguments(), OBS, DISCRETE)  # type: ignore[arg-type]
