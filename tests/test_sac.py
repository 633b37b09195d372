"""SAC: density, losses and temperature against float64 written out here; sampling by actors."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from references import (
    BOX,
    OBS,
    ROWS,
    State,
    assert_close,
    batch_of,
    columns_of,
    dense,
    descend,
    doubles,
    estranged,
    gradients,
    relative,
    to_unit,
    toward,
    with_plain_descent,
)
from torch import distributions, nn
from trainers import TinyDDPG, TinySAC

from composer.codegen.python_source import literal
from pearl.actors.actor import Actor, ActorSetup
from pearl.algorithms import SAC, Batch, make_trainer
from pearl.algorithms.networks import GaussianPolicy, mlp
from pearl.algorithms.trainer import modules_of
from pearl.errors import ConfigurationError, TrainerError
from pearl.exploration import PolicySampling, make_explorer
from pearl.learner.torch_learner import TorchLearner, load_policy_weights
from pearl.spec import ActorSpec, TrainSpec, TransitionSpec

LAYERS = (0, 2, 4)
BOUNDS = (-1.0, 0.5)  # of the log deviations: so narrow that some of them lie outside


def normal(actor: State, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and standard deviation before tanh; observations lie in [-5, 5]."""
    outputs = dense(actor, "network.", LAYERS, obs / 5)
    return outputs[:, :2], outputs[:, 2:].clamp(*BOUNDS).exp()


def drawn(actor: State, obs: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Actions in [-1, 1] and their log density, as torch's distributions have it."""
    mean, std = normal(actor, obs)
    squashed = distributions.TransformedDistribution(
        distributions.Normal(mean, std), [distributions.TanhTransform(cache_size=1)]
    )
    unit = squashed.transforms[0](mean + std * noise.double())
    return unit, squashed.log_prob(unit).sum(1)


def value(state: State, which: str, obs: torch.Tensor, unit: torch.Tensor) -> torch.Tensor:
    return dense(state, f"{which}.", LAYERS, torch.cat((obs / 5, unit), 1))[:, 0]


def smaller(state: State, obs: torch.Tensor, unit: torch.Tensor) -> torch.Tensor:
    first, second = (value(state, which, obs, unit) for which in ("first", "second"))
    return torch.where(first < second, first, second)


def critic_loss(
    critic: State,
    target_critic: State,
    actor: State,
    alpha: float,
    batch: Batch,
    weights: torch.Tensor,
    noise: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The weighted squares of both critics' errors, and the larger of their sizes."""
    obs, next_obs = batch.obs.double(), batch.next_obs.double()
    with torch.no_grad():
        unit, log_prob = drawn(actor, next_obs, noise)
        after = smaller(target_critic, next_obs, unit) - alpha * log_prob
        target = batch.reward.double() + batch.discount.double() * after
    errors = torch.stack(
        [value(critic, which, obs, to_unit(batch.action.double())) - target for which in ("first", "second")]
    )
    return (errors**2 * weights.double()).sum() / ROWS, errors.detach().abs().amax(0)


def actor_loss(actor: State, critic: State, alpha: float, batch: Batch, noise: torch.Tensor) -> torch.Tensor:
    obs = batch.obs.double()
    unit, log_prob = drawn(actor, obs, noise)
    return (alpha * log_prob - smaller(critic, obs, unit)).mean()


def alpha_gradient(log_alpha: float, actor: State, batch: Batch, noise: torch.Tensor) -> float:
    """Of `-log_alpha * (log density + target entropy)`, averaged; the target is minus the two actions."""
    variable = torch.tensor(log_alpha, dtype=torch.float64, requires_grad=True)
    log_prob = drawn(actor, batch.obs.double(), noise)[1].detach()
    (gradient,) = torch.autograd.grad((-variable * (log_prob - 2)).mean(), variable)
    return float(gradient)


@pytest.fixture
def noise(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """What every SAC draws here, for the critics and for the policy."""
    both = list(torch.randn(2, ROWS, 2, generator=torch.Generator().manual_seed(4)))
    monkeypatch.setattr(SAC, "draw_noise", lambda self, rows, draw: both[draw][:rows])
    return both


# --- the policy's distribution ----------------------------------------------------------------------------------------


def test_the_log_density_is_that_of_the_squashed_normal_distribution() -> None:
    trainer = estranged(SAC, BOX, log_std_bounds=BOUNDS)
    obs, noise = batch_of(BOX)[0].obs, torch.randn(ROWS, 2)
    unit, log_prob = trainer.actor.sample(obs, noise)
    expected_unit, expected = drawn(doubles(trainer.actor), obs.double(), noise)
    assert relative(unit, expected_unit) <= 1e-5
    assert relative(log_prob, expected) <= 1e-5


@pytest.mark.parametrize("mean", [-60.0, -12.0, 12.0, 60.0])
def test_the_log_density_is_right_where_tanh_is_1_to_the_last_bit(mean: float) -> None:
    network = nn.Linear(6, 4)
    with torch.no_grad():
        network.weight.zero_()
        network.bias.copy_(torch.tensor([mean, mean, 0.0, 0.0]))
    actor = GaussianPolicy(network, OBS, BOX, scale_observations=True)
    unit, log_prob = actor.sample(torch.randn(1, 6), torch.zeros(1, 2))
    assert float(unit.detach().abs().min()) == 1.0
    # 1 - tanh(x)^2 is 4 exp(-2|x|) there.
    each = -0.5 * math.log(2 * math.pi) - math.log(4) + 2 * abs(mean)
    assert float(log_prob.detach()) == pytest.approx(2 * each, rel=1e-5)
    torch.autograd.backward(log_prob.sum())
    assert network.bias.grad is not None
    assert bool(network.bias.grad.isfinite().all())


def test_the_greedy_action_is_that_of_the_mean() -> None:
    trainer = estranged(SAC, BOX, log_std_bounds=BOUNDS)
    obs = batch_of(BOX)[0].obs
    mean, _ = normal(doubles(trainer.actor), obs.double())
    with torch.no_grad():
        action = trainer.get_action(obs)
        assert torch.equal(action, trainer.get_action(obs))
        assert torch.equal(action, trainer.sample_action(obs, torch.zeros(ROWS, 2)))
    assert relative(to_unit(action), torch.tanh(mean)) <= 1e-5


def test_sampled_actions_have_the_policys_distribution_and_keep_to_the_box() -> None:
    trainer = estranged(SAC, BOX, log_std_bounds=BOUNDS)
    obs = batch_of(BOX)[0].obs
    mean, std = (x.detach() for x in normal(doubles(trainer.actor), obs.double()))
    row = int(mean.abs().sum(1).argmin())  # where tanh can be inverted
    with torch.no_grad():
        action = trainer.sample_action(obs[row].expand(20_000, 6), torch.randn(20_000, 2)).double()
        wild = trainer.sample_action(obs, 100 * torch.randn(ROWS, 2)).numpy()
    unsquashed = torch.atanh(to_unit(action))
    torch.testing.assert_close(unsquashed.mean(0), mean[row], rtol=0, atol=0.06)
    torch.testing.assert_close(unsquashed.std(0), std[row], rtol=0.03, atol=0)
    assert (wild >= BOX.low).all()
    assert (wild <= BOX.high).all()


# --- the update -------------------------------------------------------------------------------------------------------


def test_gradients_and_priorities(noise: list[torch.Tensor]) -> None:
    trainer = estranged(SAC, BOX, log_std_bounds=BOUNDS, initial_temperature=0.3)
    batch, weights = batch_of(BOX)
    with torch.no_grad():  # as high as each other: each must be the smaller one at times
        first, second = trainer.critic(batch.obs, batch.action)
        trainer.critic.second[-1].bias += (first - second).median()
        first, second = trainer.target_critic(batch.next_obs, batch.action)
        trainer.target_critic.second[-1].bias += (first - second).median()
    actor, critic = doubles(trainer.actor), doubles(trainer.critic)
    log_std = trainer.actor.normal(batch.obs)[1]
    assert 2 < int(((log_std == BOUNDS[0]) | (log_std == BOUNDS[1])).sum()) < log_std.numel() - 2, "both sides of it"
    critic_phase, actor_phase = trainer.phases
    loss, errors = critic_loss(critic, doubles(trainer.target_critic), actor, 0.3, batch, weights, noise[0])
    assert relative(critic_phase.compute(batch, weights, ROWS), errors) <= 1e-5
    critic_gradients = gradients(loss, critic)
    assert actor_phase.compute(batch, weights, ROWS) is None
    for name, gradient in gradients(actor_loss(actor, critic, 0.3, batch, noise[1]), actor).items():
        assert relative(dict(trainer.actor.named_parameters())[name].grad, gradient) <= 1e-5, name
    for name, gradient in critic_gradients.items():
        assert relative(dict(trainer.critic.named_parameters())[name].grad, gradient) <= 1e-5, name
    expected = alpha_gradient(math.log(0.3), actor, batch, noise[1])
    assert float(trainer.log_alpha.grad) == pytest.approx(expected, rel=1e-5)


def test_weights_and_temperature_follow_the_reference_over_steps(noise: list[torch.Tensor]) -> None:
    trainer = with_plain_descent(
        estranged(
            SAC,
            BOX,
            log_std_bounds=BOUNDS,
            learning_rate=0.02,
            actor_learning_rate=0.05,
            temperature_learning_rate=0.1,
            tau=0.05,
        )
    )
    actor, critic = doubles(trainer.actor), doubles(trainer.critic)
    target_critic, log_alpha = doubles(trainer.target_critic), 0.0
    for step in range(1, 7):
        batch, weights = batch_of(BOX, seed=step)
        alpha = math.exp(log_alpha)
        loss, errors = critic_loss(critic, target_critic, actor, alpha, batch, weights, noise[0])
        critic = descend(critic, gradients(loss, critic), 0.02)
        # Both from the policy before its step; the temperature before its step, too.
        log_alpha -= 0.1 * alpha_gradient(log_alpha, actor, batch, noise[1])
        actor = descend(actor, gradients(actor_loss(actor, critic, alpha, batch, noise[1]), actor), 0.05)
        target_critic = toward(target_critic, critic, 0.05)
        assert relative(trainer.update_policy(batch, weights), errors) <= 1e-5
        modules = modules_of(trainer)
        assert modules.keys() == {"actor", "critic", "target_critic"}
        for name, expected in (("actor", actor), ("critic", critic), ("target_critic", target_critic)):
            assert_close(modules[name], expected, 2e-5)
        assert float(trainer.log_alpha.detach()) == pytest.approx(log_alpha, rel=1e-5)
    assert abs(log_alpha) > 0.01


# --- the temperature --------------------------------------------------------------------------------------------------


def temperature_after(steps: int, **settings: Any) -> float:
    trainer = SAC(OBS, BOX, hidden_sizes=(8,), **settings)
    learner = TorchLearner(trainer)
    for step in range(steps):
        batch, weights = batch_of(BOX, seed=step)
        metrics = learner.step(columns_of(batch), weights.numpy()).metrics
    return metrics["temperature"]


def test_the_temperature_moves_against_the_entropys_distance_from_its_target() -> None:
    # A squashed normal distribution of two actions has an entropy of at most 2 log 2.
    assert temperature_after(5, target_entropy=3.0) > 1.0
    assert temperature_after(5, target_entropy=-9.0) < 1.0
    assert temperature_after(5, target_entropy=-9.0, initial_temperature=0.2) < 0.2
    # By default the target is minus the count of actions, far below what a new policy has.
    assert temperature_after(5) == temperature_after(5, target_entropy=-2.0) < 1.0


def test_a_given_temperature_stays() -> None:
    assert temperature_after(5, temperature=0.25) == pytest.approx(0.25, rel=1e-6)
    assert temperature_after(5, temperature=0.0) == 0.0


def test_a_higher_temperature_keeps_more_entropy() -> None:
    log_density = []
    batch, weights = batch_of(BOX)
    for temperature in (0.0, 5.0):
        trainer = SAC(OBS, BOX, hidden_sizes=(32,), temperature=temperature, actor_learning_rate=1e-2)
        for _ in range(60):
            trainer.update_policy(batch, weights)
        with torch.no_grad():
            log_density.append(float(trainer.actor.sample(batch.obs, torch.randn(ROWS, 2))[1].mean()))
    assert log_density[1] < log_density[0] - 0.5


# --- actors -----------------------------------------------------------------------------------------------------------


def collected(trainer: type = TinySAC, messages: int = 3, **options: Any) -> tuple[Actor, dict[str, np.ndarray]]:
    """What an actor on Pendulum-v1 collects, a few rows a message."""
    spec = ActorSpec("Pendulum-v1", count=2, envs_per_actor=3)
    setup = ActorSetup(trainer, options.pop("settings", {}), spec, TrainSpec(), options.pop("seed", 0), **options)
    actor = Actor(setup)
    transition = TransitionSpec.from_spaces(actor.envs.single_observation_space, actor.envs.single_action_space)
    parts = []
    for _ in range(messages):
        message = {
            **transition.empty(setup.message_rows()),
            "episode_return": np.zeros(20),
            "episode_length": np.zeros(20, np.int64),
            "counts": np.zeros(4, np.int64),
        }
        rows = actor.collect(message)
        parts.append({name: message[name][:rows] for name in ("obs", "action")})
    actor.close()
    return actor, {name: np.concatenate([p[name] for p in parts]) for name in ("obs", "action")}


SAMPLING = {"exploration": PolicySampling(random_steps=0)}


def greedy(actor: Actor, obs: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        found: np.ndarray = actor.trainer.get_action(torch.from_numpy(obs)).numpy()
    return found


def test_actors_sample_and_without_exploration_act_greedily() -> None:
    actor, found = collected(settings=SAMPLING)
    difference = np.abs(found["action"] - greedy(actor, found["obs"]))
    assert float(np.median(difference)) > 0.3  # a new policy's deviation is about 1, before tanh
    assert (np.abs(found["action"]) <= 2).all()
    assert len(np.unique(found["action"])) == len(found["action"])
    actor, found = collected(settings={"exploration": None})
    np.testing.assert_allclose(found["action"], greedy(actor, found["obs"]), rtol=1e-5, atol=1e-6)


def test_an_actors_seed_and_index_decide_its_samples() -> None:
    _, first = collected(settings=SAMPLING, seed=3)
    torch.manual_seed(99)  # torch's own random numbers have no part in it
    _, again = collected(settings=SAMPLING, seed=3)
    _, neighbour = collected(settings=SAMPLING, seed=3, index=1)
    np.testing.assert_array_equal(first["action"], again["action"])
    assert not np.isin(neighbour["action"], first["action"]).any()


def test_first_actions_are_uniform() -> None:
    narrow = {"exploration": PolicySampling(random_steps=10_000), "log_std_bounds": (-21.0, -20.0)}
    _, found = collected(settings=narrow, messages=30)
    assert np.histogram(found["action"], 4, (-2, 2))[0].min() > 0.15 * len(found["action"])
    narrow["exploration"] = PolicySampling(random_steps=0)
    actor, found = collected(settings=narrow)
    np.testing.assert_allclose(found["action"], greedy(actor, found["obs"]), rtol=1e-4, atol=1e-5)


def test_the_policys_weights_are_all_that_an_actor_needs() -> None:
    trainer, actor_side = (SAC(OBS, BOX, seed=seed, hidden_sizes=(8,)) for seed in (1, 2))
    trainer.update_policy(*batch_of(BOX))
    learner = TorchLearner(trainer)
    snapshot = np.zeros(learner.weight_count, np.float32)
    learner.write_weights(snapshot)
    load_policy_weights(actor_side, snapshot)
    obs, noise = torch.randn(20, 6), torch.randn(20, 2)
    with torch.no_grad():
        assert torch.equal(actor_side.sample_action(obs, noise), trainer.sample_action(obs, noise))


def test_sampling_from_what_cannot_sample_is_refused() -> None:
    with pytest.raises(TrainerError, match=r"TinyDDPG explores by PolicySampling but has no sample_action"):
        make_trainer(TinyDDPG, OBS, BOX, settings=SAMPLING)
    with pytest.raises(ConfigurationError, match=r"PolicySampling exploration needs a Box.*Discrete\(2\)"):
        make_explorer(PolicySampling(), spaces.Discrete(2), 1, np.random.default_rng(0))
    with pytest.raises(ConfigurationError, match="PolicySampling: random_steps must be a whole number of at least 0"):
        PolicySampling(random_steps=-1)


def test_it_can_be_written_into_a_program() -> None:
    assert literal(PolicySampling(random_steps=7)) == "PolicySampling(random_steps=7)"


# --- bad settings -----------------------------------------------------------------------------------------------------


class OneOutput(SAC):
    def build_actor(self) -> nn.Module:
        return mlp(6, (8,), 2)


def test_a_network_without_deviations_is_refused() -> None:
    with pytest.raises(TrainerError, match=r"OneOutput\.build_actor\(\) .* 4 outputs, .* found 2"):
        make_trainer(OneOutput, OBS, BOX)
