"""PPO in C++: losses, gradients and training against float64 autograd, what it refuses, and policies that draw."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_native_learner import VARIANTS, assert_close, each_variant, kernels, one_torch_thread, random_masks
from torch import nn

from pearl import _native
from pearl.actors.native_policy import NativePolicy
from pearl.actors.policy_plan import read_policy
from pearl.actors.torch_policy import TorchPolicy
from pearl.algorithms import A2C, DQN, PPO
from pearl.algorithms.on_policy import ActionDistribution, Minibatch, OnPolicyTrainer, normalized
from pearl.algorithms.policy_and_value import PolicyAndValue
from pearl.algorithms.trainer import policy_snapshot
from pearl.backends.cpu.rollout_learner import NativeRolloutLearner
from pearl.errors import ConfigurationError, TrainerError
from pearl.learner.native_plan import UnsupportedError
from pearl.learner.torch_rollout_learner import TorchRolloutLearner
from pearl.learner.trainer_learner import TrainerRolloutLearner
from pearl.replay.reference import philox4x32

pytestmark = pytest.mark.usefixtures(one_torch_thread.__name__)

OBS = spaces.Box(-5.0, 5.0, (6,), np.float32)
SPACES: dict[str, spaces.Space[Any]] = {
    "Discrete": spaces.Discrete(3),
    "MultiDiscrete": spaces.MultiDiscrete([3, 1, 4]),
    "MultiBinary": spaces.MultiBinary((2, 2)),
    "Box": spaces.Box(np.array([-2.0, 0.0], np.float32), np.array([2.0, 1.0], np.float32)),
}
Rollout = dict[str, np.ndarray]

CHOICES = {name: space for name, space in SPACES.items() if name != "Box"}

each_space = pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)
each_space_of_choices = pytest.mark.parametrize("space", CHOICES.values(), ids=CHOICES)
each_learner = pytest.mark.parametrize("learner", [NativeRolloutLearner, TorchRolloutLearner])


class Small(PPO):
    hidden_sizes = (24, 17)
    initial_log_std = -0.3


class ShowsGradients(Small):
    """SGD's momentum is, after one step, the gradient itself."""

    max_grad_norm = 0.0

    def build_optimizer(self, parameter: nn.Parameter) -> torch.optim.Optimizer:
        return torch.optim.SGD([parameter], lr=1e-3, momentum=0.9)


class OwnSteps(Small):
    """Networks of the user's own that share weights but no bias, with LayerNorm, and AdamW."""

    def build_policy(self, features: nn.Module, width: int) -> nn.Module:
        self.begin = nn.Linear(6, 20, bias=False)
        return nn.Sequential(self.begin, nn.LayerNorm(20), nn.ReLU(), nn.Linear(20, self.distribution.outputs))

    def build_value(self, features: nn.Module, width: int) -> nn.Module:
        return nn.Sequential(self.begin, nn.LayerNorm(20), nn.ReLU(), nn.Linear(20, 1))

    def build_optimizer(self, parameter: nn.Parameter) -> torch.optim.Optimizer:
        return torch.optim.AdamW([parameter], lr=1e-3, weight_decay=0.1)


def made(space: spaces.Space[Any], kind: type[PPO] = Small, **options: Any) -> PPO:
    """A trainer whose outputs and log deviations differ enough for the terms of the loss to show."""
    trainer = kind(OBS, space, seed=1, **options)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in trainer.networks.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return trainer


def rollout_of(trainer: PPO, rows: int, seed: int = 0) -> Rollout:
    """A rollout whose ratios, and distances from the old values, lie within the clip ranges and beyond."""
    rng = np.random.default_rng(seed)
    obs = rng.normal(size=(rows, *trainer.input_shape)).astype(np.float32)
    sizes = trainer.distribution.sizes
    if sizes:
        action = np.stack([rng.integers(0, n, rows) for n in sizes], axis=1)
    else:
        action = rng.normal(size=(rows, trainer.distribution.size)).astype(np.float32)
    masks = {}
    if trainer.action_masks:
        masks["action_mask"] = random_masks(rng, rows, sizes)
        for part, start in enumerate(np.cumsum((0, *sizes[:-1]))):
            masks["action_mask"][np.arange(rows), start + action[:, part]] = 1
    action = action.reshape(rows, *(trainer.action_space.shape or ()))
    with torch.no_grad():
        inputs = [torch.from_numpy(column) for column in (obs, action, *masks.values())]
        log_prob, _, value = trainer.evaluate_actions(*inputs)
    ret = value.numpy() + rng.normal(size=rows).astype(np.float32)
    old_value = value.numpy() + 0.3 * rng.normal(size=rows).astype(np.float32)
    return {
        "obs": obs,
        "action": action,
        "log_prob": log_prob.numpy() + 0.3 * rng.normal(size=rows).astype(np.float32),
        "advantage": (ret - old_value).astype(np.float32),
        "ret": ret,
        **masks,
    }


# --- PPO written out in float64 ---------------------------------------------------------------------------------------


def shuffled_by_hand(count: int, seed: int, call: int) -> list[int]:
    order = list(range(count))
    for i in range(count - 1, 0, -1):
        lane = i // 2
        words = philox4x32(np.array([[lane % 2**32, lane >> 32, call % 2**32, call >> 32]], np.uint64), seed)[0]
        low, high = (int(word) for word in (words[2:] if i % 2 else words[:2]))
        j = ((high << 32 | low) * (i + 1)) >> 64
        order[i], order[j] = order[j], order[i]
    return order


def in_float64(columns: Rollout) -> dict[str, torch.Tensor]:
    """The columns, with whole numbers as they are."""
    tensors = {name: torch.from_numpy(column) for name, column in columns.items()}
    return {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}


def exact_parts(networks: PolicyAndValue, trainer: PPO, rows: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The parts of the loss on columns in float64, and `loss`."""
    obs = rows["obs"]
    if trainer.normalize_observations:
        obs = ((obs - networks.observation_mean) * networks.observation_scale).clamp(-10.0, 10.0)
    outputs, value = networks.policy(obs), networks.value(obs)[:, 0]
    action = rows["action"].reshape(len(obs), -1)
    distributions: list[Any]
    if trainer.distribution.sizes:
        if trainer.action_masks:
            outputs = outputs.masked_fill(rows["action_mask"] == 0, -torch.inf)
        logits = outputs.split(trainer.distribution.sizes, dim=1)
        distributions = [torch.distributions.Categorical(logits=part) for part in logits]
    else:
        assert networks.log_std is not None
        deviations = networks.log_std.exp()
        distributions = [torch.distributions.Normal(outputs[:, j], deviations[j]) for j in range(action.shape[1])]
    log_prob = sum(d.log_prob(action[:, j]) for j, d in enumerate(distributions))
    entropy = sum(d.entropy() for d in distributions)
    advantage = rows["advantage"]
    if trainer.normalize_advantages:
        deviation = advantage.std() if len(advantage) > 1 else torch.tensor(1.0)
        advantage = (advantage - advantage.mean()) / (deviation + 1e-8)
    clip, log_ratio = trainer.clip_range, log_prob - rows["log_prob"]
    ratio = log_ratio.exp()
    surrogate = torch.min(ratio * advantage, torch.clamp(ratio, 1 - clip, 1 + clip) * advantage)
    error = (value - rows["ret"]) ** 2
    if trainer.value_clip_range > 0:
        old = rows["value"] if "value" in rows else rows["ret"] - rows["advantage"]
        clipped = old + torch.clamp(value - old, -trainer.value_clip_range, trainer.value_clip_range)
        error = torch.max(error, (clipped - rows["ret"]) ** 2)
    parts = {
        "policy_loss": -surrogate.mean(),
        "value_loss": error.mean(),
        "entropy": entropy.mean(),
        "approximate_kl": (ratio - 1 - log_ratio).mean(),
        "clip_fraction": ((ratio - 1).abs() > clip).double().mean(),
    }
    by_value, by_entropy = trainer.value_coefficient, trainer.entropy_coefficient
    parts["loss"] = parts["policy_loss"] + by_value * parts["value_loss"] - by_entropy * parts["entropy"]
    return parts


class Trained(NamedTuple):
    weights: dict[str, torch.Tensor]
    metrics: dict[str, float]


def exact_training(
    trainer: PPO, rollout: Rollout, epochs: int, batch_size: int, rows: np.ndarray | None = None
) -> Trained:
    """Epochs of minibatches in float64, with Adam and the clipping of gradients written out."""
    networks = copy.deepcopy(trainer.networks).double()
    parameters = list(networks.parameters())
    columns = in_float64(rollout)
    chosen = np.arange(len(rollout["ret"])) if rows is None else rows
    moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in parameters]
    found: dict[str, list[float]] = {}
    steps, begun, stopped = 0, 0, False
    while begun < epochs and not stopped:
        order = chosen[shuffled_by_hand(len(chosen), trainer.seed, trainer.gradient_steps + steps)]
        begun += 1
        for first in range(0, len(order), batch_size):
            picked = torch.from_numpy(order[first : first + batch_size])
            parts = exact_parts(networks, trainer, {name: column[picked] for name, column in columns.items()})
            loss = parts.pop("loss")
            for name, part in parts.items():
                found.setdefault(name, []).append(float(part.detach()))
            if trainer.target_kl is not None and found["approximate_kl"][-1] > 1.5 * trainer.target_kl:
                stopped = True
                break
            gradients = torch.autograd.grad(loss, parameters)
            norm = torch.cat([g.flatten() for g in gradients]).norm()
            if trainer.max_grad_norm > 0:
                found.setdefault("gradient_norm", []).append(float(norm))
                gradients = tuple(g * min(1.0, trainer.max_grad_norm / (float(norm) + 1e-6)) for g in gradients)
            steps += 1
            with torch.no_grad():
                for p, g, (m, v) in zip(parameters, gradients, moments, strict=True):
                    m.mul_(0.9).add_(0.1 * g)
                    v.mul_(0.999).add_(0.001 * g * g)
                    size = (v / (1 - 0.999**steps)).sqrt() + 1e-5
                    p -= trainer.learning_rate * (m / (1 - 0.9**steps)) / size
    metrics = {name: float(np.mean(values)) for name, values in found.items()}
    weights = {name: p.detach() for name, p in networks.named_parameters()}
    return Trained(weights, {**metrics, "minibatches": steps, "epochs": begun})


def assert_trained(trainer: PPO, metrics: Any, exact: Trained, tolerance: float = 2e-5) -> None:
    assert metrics == pytest.approx(exact.metrics, rel=2e-4, abs=2e-5)
    for name, parameter in trainer.networks.named_parameters():
        torch.testing.assert_close(parameter.detach().double(), exact.weights[name], rtol=0, atol=tolerance, msg=name)


# --- the order of rows ------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(count=st.integers(0, 70), seed=st.integers(0, 2**64 - 1), call=st.integers(0, 2**64 - 1))
@example(count=600, seed=1, call=2)  # numbers are drawn 256 at a time
def test_rows_are_shuffled_as_the_reference_does(count: int, seed: int, call: int) -> None:
    found = _native.shuffled(count, seed, call)
    assert found.dtype == np.int64
    assert found.tolist() == shuffled_by_hand(count, seed, call)


def test_every_order_is_equally_likely() -> None:
    draws = 24_000
    seen = dict.fromkeys(itertools.permutations(range(4)), 0)
    for call in range(draws):
        seen[tuple(_native.shuffled(4, 3, call).tolist())] += 1
    expected = draws / len(seen)
    chi_square = sum((count - expected) ** 2 / expected for count in seen.values())
    assert chi_square < 49.7  # 23 degrees of freedom: exceeded in one of a thousand draws
    rows = np.stack([_native.shuffled(100, 5, call) for call in range(2000)])
    assert np.abs(rows.mean(axis=0) - 49.5).max() < 5 * 28.9 / np.sqrt(2000)  # at every place, every row


# --- gradients --------------------------------------------------------------------------------------------------------


@each_variant
@pytest.mark.parametrize("threads", [1, 3])
@each_space
@settings(max_examples=8, deadline=None)
@given(
    rows=st.integers(1, 300),
    value_clip_range=st.sampled_from([0.0, 0.2]),
    entropy_coefficient=st.sampled_from([0.0, 0.3]),
    normalize_advantages=st.booleans(),
    shared_layers=st.booleans(),
    masked=st.booleans(),
)
def test_losses_and_gradients_are_those_of_float64(
    space: spaces.Space[Any], threads: int, variant: str, rows: int, shared_layers: bool, masked: bool, **options: Any
) -> None:
    masked = masked and not isinstance(space, spaces.Box)
    trainer = made(space, ShowsGradients, shared_layers=shared_layers, action_masks=masked, **options)
    rollout = rollout_of(trainer, rows, seed=rows)
    networks = copy.deepcopy(trainer.networks).double()
    parts = exact_parts(networks, trainer, in_float64(rollout))
    expected = torch.autograd.grad(parts.pop("loss"), list(networks.parameters()))
    with kernels(variant):
        learner = NativeRolloutLearner(trainer, epochs=1, batch_size=rows, threads=threads)
    found = learner.train(rollout)

    wanted = {name: float(part.detach()) for name, part in parts.items()}
    assert dict(found) == pytest.approx({**wanted, "minibatches": 1, "epochs": 1}, rel=1e-4, abs=1e-5)
    flat = trainer._flat
    assert flat.gradient is not None
    flat.gradient.copy_(trainer.optimizer.state[flat.parameter]["momentum_buffer"])
    whole = float(torch.cat([g.flatten() for g in expected]).norm())
    for (name, parameter), gradient in zip(trainer.networks.named_parameters(), expected, strict=True):
        assert parameter.grad is not None
        assert_close(parameter.grad, gradient, whole, name, relative=1e-4)


# --- training ---------------------------------------------------------------------------------------------------------

SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "all terms": {"value_clip_range": 0.2, "entropy_coefficient": 0.05, "value_coefficient": 0.8},
    "raw advantages": {"normalize_advantages": False, "entropy_coefficient": 0.01},
    "clipped hard": {"clip_range": 0.02, "max_grad_norm": 0.05},
    "gradients as they are": {"max_grad_norm": 0.0},
    "shared, ReLU": {"shared_layers": True, "activation": "relu", "value_clip_range": 0.1},
}


@pytest.mark.parametrize("options", SETTINGS.values(), ids=SETTINGS)
@each_space
def test_training_is_that_of_float64(space: spaces.Space[Any], options: dict[str, Any]) -> None:
    trainers = [made(space, **options) for _ in range(2)]
    rollout = rollout_of(trainers[0], 107)
    exact = exact_training(trainers[0], rollout, epochs=2, batch_size=50)
    assert exact.metrics["minibatches"] == 6  # the last of an epoch has 7 rows
    assert 0.0 < exact.metrics["clip_fraction"] < 1.0
    for threads, trainer in enumerate(trainers, start=1):
        learner = NativeRolloutLearner(trainer, epochs=2, batch_size=50, threads=threads)
        assert_trained(trainer, learner.train(rollout), exact)
        assert trainer.gradient_steps == 6


@each_learner
def test_values_are_clipped_around_those_that_a_rollout_states(learner: Any) -> None:
    trainer = made(SPACES["Box"], value_clip_range=0.1)
    rollout = rollout_of(trainer, 40)
    rollout["value"] = rollout["ret"] + np.random.default_rng(4).normal(0.0, 0.5, 40).astype(np.float32)
    exact = exact_training(trainer, rollout, 2, 16)
    trained = learner(trainer, epochs=2, batch_size=16)
    assert_trained(trainer, trained.train(rollout), exact)
    with pytest.raises(TrainerError, match=r"Column 'value' of a rollout of 40 rows has shape \(40,\); found \(39,\)"):
        trained.train({**rollout, "value": rollout["value"][1:]})


@each_variant
@pytest.mark.parametrize("threads", [1, 2])
@each_space_of_choices
def test_training_on_action_masks_is_that_of_float64(space: spaces.Space[Any], threads: int, variant: str) -> None:
    trainer = made(space, action_masks=True, entropy_coefficient=0.05)
    rollout = rollout_of(trainer, 157)
    rows = np.flatnonzero(np.random.default_rng(1).random(157) < 0.8)
    exact = exact_training(trainer, rollout, epochs=3, batch_size=50, rows=rows)
    with kernels(variant):
        learner = NativeRolloutLearner(trainer, epochs=3, batch_size=50, threads=threads)
    assert_trained(trainer, learner.train(rollout, rows), exact)


@each_space_of_choices
def test_masks_that_allow_everything_change_no_bit(space: spaces.Space[Any]) -> None:
    masked, plain = (made(space, action_masks=masks, entropy_coefficient=0.05) for masks in (True, False))
    rollout = rollout_of(plain, 90)
    everything = np.ones((90, plain.distribution.outputs), np.uint8)
    found = NativeRolloutLearner(masked, epochs=2, batch_size=40).train({**rollout, "action_mask": everything})
    assert found == NativeRolloutLearner(plain, epochs=2, batch_size=40).train(rollout)
    assert np.array_equal(policy_snapshot(masked), policy_snapshot(plain))


@each_learner
@each_space_of_choices
def test_single_choices_teach_the_policy_nothing(space: spaces.Space[Any], learner: Any) -> None:
    trainer = made(space, action_masks=True, entropy_coefficient=0.05)
    rollout = rollout_of(trainer, 90)
    single = np.zeros_like(rollout["action_mask"])
    for part, start in enumerate(np.cumsum((0, *trainer.distribution.sizes[:-1]))):
        single[np.arange(90), start + rollout["action"].reshape(90, -1)[:, part]] = 1
    rollout |= {"action_mask": single, "log_prob": np.zeros(90, np.float32)}
    before = {name: p.detach().clone() for name, p in trainer.networks.named_parameters()}
    found = learner(trainer, epochs=2, batch_size=40).train(rollout)
    assert (found["entropy"], found["approximate_kl"], found["clip_fraction"]) == (0.0, 0.0, 0.0)
    for name, parameter in trainer.networks.named_parameters():
        assert torch.equal(parameter, before[name]) == name.startswith("policy."), name


@each_learner
@each_space
def test_only_the_rows_asked_for_are_trained_on(space: spaces.Space[Any], learner: Any) -> None:
    trainer = made(space)
    rollout = rollout_of(trainer, 90)
    rows = np.flatnonzero(np.random.default_rng(1).random(90) < 0.6)
    for name in ("obs", "log_prob", "advantage", "ret"):  # of no others, or the loss is not finite
        rollout[name][np.setdiff1d(np.arange(90), rows)] = np.nan
    exact = exact_training(trainer, rollout, 2, 16, rows)
    assert_trained(trainer, learner(trainer, epochs=2, batch_size=16).train(rollout, rows), exact)


@each_learner
@pytest.mark.parametrize("threads", [1, 2])
def test_training_ends_when_the_divergence_exceeds_its_target(learner: Any, threads: int) -> None:
    trainer = made(SPACES["Discrete"], learning_rate=5e-4)
    rollout = rollout_of(trainer, 128)
    rollout["log_prob"] = present_log_prob(trainer, rollout)
    trainer.target_kl = 0.002
    exact = exact_training(trainer, rollout, 10, 32)
    assert 4 < exact.metrics["minibatches"] < 40, "it ends, but not at once"
    found = learner(trainer, epochs=10, batch_size=32, threads=threads).train(rollout)
    assert_trained(trainer, found, exact)
    assert found["epochs"] == exact.metrics["epochs"] < 10
    assert trainer.gradient_steps == found["minibatches"]


def present_log_prob(trainer: PPO, rollout: Rollout) -> np.ndarray:
    with torch.no_grad():
        return trainer.evaluate_actions(*(torch.from_numpy(rollout[name]) for name in ("obs", "action")))[0].numpy()


@each_learner
def test_no_step_at_all_leaves_everything_as_it_was(learner: Any) -> None:
    trainer = made(SPACES["Box"], target_kl=1e-6)
    before = policy_snapshot(trainer)
    found = learner(trainer, epochs=4, batch_size=20).train(rollout_of(trainer, 60))
    assert np.array_equal(policy_snapshot(trainer), before)
    assert (found["minibatches"], found["epochs"], trainer.gradient_steps) == (0, 1, 0)
    assert found["approximate_kl"] > 1.5e-6
    assert "gradient_norm" not in found


@pytest.mark.parametrize("kind", [Small, OwnSteps, A2C])
@pytest.mark.parametrize(
    ("space", "masked"),
    [*((space, False) for space in SPACES.values()), *((space, True) for space in CHOICES.values())],
    ids=[*SPACES, *(f"{name}, masked" for name in CHOICES)],
)
def test_native_and_torch_train_alike_over_several_rollouts(
    space: spaces.Space[Any], masked: bool, kind: type[PPO]
) -> None:
    options = {"normalize_observations": True, "learning_rate_schedule": "linear", "action_masks": masked}
    if kind is not A2C:
        options |= {"clip_range_schedule": "linear", "entropy_coefficient": 0.01, "value_clip_range": 0.3}
    ours, theirs = made(space, kind, **options), made(space, kind, **options)
    shape = {"epochs": ours.epochs if kind is A2C else 3, "batch_size": 120 if kind is A2C else 50}
    native, reference = NativeRolloutLearner(ours, **shape), TorchRolloutLearner(theirs, **shape)
    for seed in range(4):
        rollout = rollout_of(ours, 120, seed)
        rollout["obs"] = rollout["obs"] * np.float32(3.0) + np.float32(seed)
        for trainer in (ours, theirs):
            trainer.set_progress(seed / 5)
        found, expected = native.train(rollout), reference.train(rollout)
        assert found == pytest.approx(expected, rel=1e-3, abs=1e-4)
        for trainer in (ours, theirs):
            trainer.after_rollout(torch.from_numpy(rollout["obs"]))
        np.testing.assert_allclose(policy_snapshot(ours), policy_snapshot(theirs), rtol=1e-5, atol=5e-5)
    assert ours.gradient_steps == theirs.gradient_steps


def test_torch_may_train_every_other_rollout() -> None:
    ours, theirs = made(SPACES["Box"]), made(SPACES["Box"])
    mixed = [kind(ours, epochs=2, batch_size=32) for kind in (NativeRolloutLearner, TorchRolloutLearner)]
    reference = TorchRolloutLearner(theirs, epochs=2, batch_size=32)
    for seed in range(6):
        rollout = rollout_of(ours, 100, seed)
        mixed[seed % 2].train(rollout)
        reference.train(rollout)
    np.testing.assert_allclose(policy_snapshot(ours), policy_snapshot(theirs), rtol=0, atol=2e-5)


@each_space
def test_variants_and_threads_train_alike_and_each_is_reproducible(space: spaces.Space[Any]) -> None:
    found: dict[tuple[str, int], np.ndarray] = {}
    for variant, threads in itertools.product(VARIANTS, (1, 2, 3)):
        for again in (False, True):
            trainer = made(space, entropy_coefficient=0.01)
            with kernels(variant):
                learner = NativeRolloutLearner(trainer, epochs=3, batch_size=150, threads=threads)
            learner.train(rollout_of(trainer, 310))
            if again:
                assert np.array_equal(found[variant, threads], policy_snapshot(trainer))
            found[variant, threads] = policy_snapshot(trainer)
    for weights in found.values():
        np.testing.assert_allclose(weights, found["plain", 1], rtol=0, atol=2e-5)


@each_learner
@pytest.mark.parametrize("rows", [1, 7, 77])
def test_equal_advantages_do_not_move_the_policy(learner: Any, rows: int) -> None:
    trainer = made(SPACES["MultiDiscrete"], value_coefficient=0.0)
    rollout = rollout_of(trainer, rows)
    rollout["advantage"][:] = 0.1
    before = policy_snapshot(trainer)
    found = learner(trainer, epochs=2, batch_size=77).train(rollout)
    assert found["policy_loss"] == 0.0
    assert np.array_equal(policy_snapshot(trainer), before)


def test_advantages_are_normalised_by_the_unbiased_deviation() -> None:
    found = normalized(torch.tensor([1.0, 2.0, 6.0]))
    torch.testing.assert_close(found, torch.tensor([-2.0, -1.0, 3.0]) / np.sqrt(7.0, dtype=np.float32))
    assert found.dtype == torch.float32


class CountsMinibatches(Small):
    """An update of the user's own."""

    seen: Any = ()

    def update_minibatch(self, minibatch: Minibatch) -> tuple[dict[str, float], bool]:
        self.seen = (*self.seen, minibatch)
        self.gradient_steps += 1
        return {"own": float(len(self.seen))}, True


def test_torch_trains_by_the_trainers_own_update() -> None:
    trainer = made(SPACES["Box"], CountsMinibatches)
    rollout = rollout_of(trainer, 10)
    found = TorchRolloutLearner(trainer, epochs=2, batch_size=4).train(rollout)
    assert found == {"own": 3.5, "minibatches": 6, "epochs": 2}
    for epoch in range(2):
        order = shuffled_by_hand(10, trainer.seed, 3 * epoch)
        for name in set(Minibatch._fields) - {"action_mask", "begins", "real", "state"}:
            seen = np.concatenate([getattr(m, name).numpy() for m in trainer.seen[3 * epoch : 3 * epoch + 3]])
            column = rollout["ret"] - rollout["advantage"] if name == "value" else rollout[name]
            assert np.array_equal(seen, column[order])


# --- bad input --------------------------------------------------------------------------------------------------------


@each_learner
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("column", ["obs", "log_prob", "advantage", "ret"])
def test_numbers_that_are_not_finite_are_refused(learner: Any, threads: int, column: str) -> None:
    trainer = made(SPACES["Discrete"])
    rollout = rollout_of(trainer, 40)
    rollout[column][13] = np.nan
    before = policy_snapshot(trainer)
    with pytest.raises(TrainerError, match=r"diverged.* is (-?nan|inf).*Look at the"):
        learner(trainer, epochs=1, batch_size=40, threads=threads).train(rollout)
    if learner is NativeRolloutLearner:
        assert np.array_equal(policy_snapshot(trainer), before)
        assert trainer.gradient_steps == 0


def test_steps_before_a_diverging_one_stay() -> None:
    trainer, twin = made(SPACES["Discrete"]), made(SPACES["Discrete"])
    rollout = rollout_of(trainer, 40)
    order = shuffled_by_hand(40, trainer.seed, 0)
    NativeRolloutLearner(twin, epochs=1, batch_size=10).train(rollout, np.array(sorted(order), np.int64))
    rollout["ret"][order[25]] = np.inf
    with pytest.raises(TrainerError, match="diverged"):
        NativeRolloutLearner(trainer, epochs=1, batch_size=10).train(rollout)
    assert (trainer.gradient_steps, twin.gradient_steps) == (2, 4)
    (state,) = trainer.optimizer.state.values()
    assert state["step"] == 2
    assert np.isfinite(policy_snapshot(trainer)).all()


def changed(rollout: Rollout, name: str, change: Callable[[np.ndarray], np.ndarray]) -> Rollout:
    return {**rollout, name: change(rollout[name])}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: {k: v for k, v in r.items() if k != "ret"}, "missing: ret"),
        (lambda r: changed(r, "log_prob", lambda c: c[:-1]), r"'log_prob' of a rollout of 20 rows .* found \(19,\)"),
        (
            lambda r: changed(r, "obs", lambda c: c[:, 1:]),
            r"'obs' of a rollout .* has shape \(20, 6\); found \(20, 5\)",
        ),
        (lambda r: changed(r, "ret", lambda c: c.astype(np.float64)), "'ret' must have dtype float32; found float64"),
        (lambda r: changed(r, "action", lambda c: c.astype(np.int32)), "'action' must have dtype int64; found int32"),
        (lambda r: changed(r, "action", lambda c: c + 3), r"Actions must lie in \[0, \d\); found"),
        (lambda r: changed(r, "action", lambda c: c - 9), r"Actions must lie in \[0, \d\); found -"),
    ],
)
def test_rollouts_that_do_not_fit_are_refused_before_the_first_step(change: Any, message: str) -> None:
    trainer = made(SPACES["MultiDiscrete"])
    learner = NativeRolloutLearner(trainer, epochs=1, batch_size=5)
    with pytest.raises(TrainerError, match=message):
        learner.train(change(rollout_of(trainer, 20)))
    assert trainer.gradient_steps == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: {k: v for k, v in r.items() if k != "action_mask"}, "missing: action_mask"),
        (lambda r: changed(r, "action_mask", lambda c: c[:, 1:]), r"'action_mask' .* shape \(20, 8\); found \(20, 7\)"),
        (lambda r: changed(r, "action_mask", lambda c: c == 1), "'action_mask' must have dtype uint8; found bool"),
    ],
)
def test_masks_that_do_not_fit_are_refused_before_the_first_step(change: Any, message: str) -> None:
    trainer = made(SPACES["MultiDiscrete"], action_masks=True)
    learner = NativeRolloutLearner(trainer, epochs=1, batch_size=5)
    with pytest.raises(TrainerError, match=message):
        learner.train(change(rollout_of(trainer, 20)))
    assert trainer.gradient_steps == 0


@pytest.mark.parametrize("row", [-1, 20])
def test_rows_beyond_the_rollout_are_refused(row: int) -> None:
    trainer = made(SPACES["Box"])
    learner = NativeRolloutLearner(trainer, epochs=1, batch_size=5)
    with pytest.raises(TrainerError, match=rf"Rows must lie in \[0, 20\); found {row} at position 1"):
        learner.train(rollout_of(trainer, 20), np.array([3, row]))


@each_learner
def test_no_rows_and_no_epochs_are_refused(learner: Any) -> None:
    trainer = made(SPACES["Box"])
    with pytest.raises(TrainerError, match="at least one row"):
        learner(trainer, epochs=1, batch_size=5).train(rollout_of(trainer, 20), np.zeros(0, np.int64))
    for wrong in ({"epochs": 0}, {"batch_size": 0}, {"threads": 0}):
        with pytest.raises(ConfigurationError, match="at least 1; found"):
            learner(trainer, **{"epochs": 1, "batch_size": 5, **wrong})


def test_strided_columns_are_trained_on_as_contiguous_ones() -> None:
    ours, theirs = made(SPACES["Box"]), made(SPACES["Box"])
    rollout = rollout_of(ours, 30)
    strided = {name: np.repeat(column, 2, axis=0)[::2] for name, column in rollout.items()}
    for trainer, columns in ((ours, strided), (theirs, rollout)):
        NativeRolloutLearner(trainer, epochs=1, batch_size=10).train(columns)
    assert np.array_equal(policy_snapshot(ours), policy_snapshot(theirs))


def test_weights_that_were_moved_are_not_trained_on() -> None:
    trainer = made(SPACES["Box"])
    learner = NativeRolloutLearner(trainer, epochs=1, batch_size=10)
    trainer.networks.double().float()
    with pytest.raises(TrainerError, match="given other memory"):
        learner.train(rollout_of(made(SPACES["Box"]), 30))


class OwnDistribution(ActionDistribution):
    pass


class Squashed(Small):
    def check_spaces(self) -> None:
        super().check_spaces()
        self.distribution = OwnDistribution(self.distribution.sizes, self.distribution.size)


class FrozenDeviations(Small):
    def build(self) -> None:
        super().build()
        assert self.networks.log_std is not None
        self.networks.log_std.requires_grad_(False)


class WithGelu(Small):
    def build_value(self, features: nn.Module, width: int) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 1))


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Small, None),
        (OwnSteps, None),
        (A2C, None),
        (CountsMinibatches, "CountsMinibatches overrides update_minibatch, a part of PPO's update rule"),
        (Squashed, "Squashed has a OwnDistribution in place of a ActionDistribution"),
        (FrozenDeviations, "log deviations that are frozen"),
        (WithGelu, "layer '1' of kind 'gelu'"),
    ],
)
def test_what_it_does_not_support_is_named(kind: type[PPO], reason: str | None) -> None:
    trainer = kind(OBS, SPACES["Box"])
    assert NativeRolloutLearner.supports(trainer) == reason
    if reason is not None:
        with pytest.raises(TrainerError, match=rf"cannot train {kind.__name__} \(unsupported: .*TorchRolloutLearner"):
            NativeRolloutLearner(trainer, epochs=1, batch_size=8)


def test_other_algorithms_and_bytes_are_named() -> None:
    assert NativeRolloutLearner.supports(DQN(OBS, SPACES["Discrete"])) == (
        "DQN, which trains on samples of a replay, not on rollouts"
    )
    assert TorchRolloutLearner.supports(PPO(OBS, SPACES["Discrete"])) is None
    with pytest.raises(TrainerError, match="Rollouts cannot train DQN, which is not an on-policy trainer"):
        TorchRolloutLearner(DQN(OBS, SPACES["Discrete"]), epochs=1, batch_size=8)
    pixels = spaces.Box(0, 255, (12,), np.uint8)
    assert NativeRolloutLearner.supports(PPO(pixels, SPACES["Discrete"])) == "observations of unsigned bytes"


@each_learner
def test_snapshots_go_out_and_come_back(learner: Any) -> None:
    trainer = made(SPACES["Box"], normalize_observations=True)
    made_one: TrainerRolloutLearner = learner(trainer, epochs=1, batch_size=8)
    out = np.empty(made_one.weight_count, np.float32)
    made_one.write_weights(out)
    assert np.array_equal(out, policy_snapshot(trainer))
    made_one.load_weights(2 * out)
    assert np.array_equal(policy_snapshot(trainer), 2 * out)


# --- policies that draw -----------------------------------------------------------------------------------------------


def noise_for(trainer: PPO, envs: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    shape = (envs, trainer.distribution.size)
    return (rng.random(shape) if trainer.distribution.sizes else rng.normal(size=shape)).astype(np.float32)


@pytest.mark.parametrize("options", [{}, {"shared_layers": True}, {"normalize_observations": True}])
@each_space
def test_native_policies_draw_as_torch_does(space: spaces.Space[Any], options: dict[str, Any]) -> None:
    trainer = made(space, **options)
    if trainer.normalize_observations:
        trainer.after_rollout(torch.randn((50, 6), generator=torch.Generator().manual_seed(2)) * 3 + 1)
    plan = pickle.loads(pickle.dumps(read_policy(trainer)))
    native, in_torch = NativePolicy(plan), TorchPolicy(trainer)
    for envs in (1, 8, 300):
        obs = np.random.default_rng(envs).normal(size=(envs, 6)).astype(np.float32) * 4
        noise = noise_for(trainer, envs, envs)
        found, expected = native.explore(obs, noise), in_torch.explore(obs, noise)
        for ours, theirs in zip(found, expected, strict=True):
            assert ours.dtype == theirs.dtype
            assert ours.shape == theirs.shape
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
        assert native.value(obs).dtype == np.float32
        np.testing.assert_allclose(native.value(obs), in_torch.value(obs), rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(native.value(obs), found[2])
        greedy, wanted = native.act(obs), in_torch.act(obs)
        assert greedy.dtype == wanted.dtype
        np.testing.assert_allclose(greedy, wanted, atol=1e-5)
        if isinstance(space, spaces.Box):
            assert all(space.contains(action) for action in greedy)
            assert envs < 300 or not all(space.contains(action) for action in found[0]), "as they were drawn"


@each_space
def test_log_probabilities_are_those_of_float64(space: spaces.Space[Any]) -> None:
    trainer = made(space)
    obs, noise = np.random.default_rng(0).normal(size=(200, 6)).astype(np.float32), noise_for(trainer, 200)
    action, log_prob, value = NativePolicy(read_policy(trainer)).explore(obs, noise)
    columns = {"obs": obs, "action": action, "log_prob": log_prob, "advantage": value, "ret": value}
    exact = in_float64(columns)
    with torch.no_grad():
        parts = exact_parts(copy.deepcopy(trainer.networks).double(), trainer, exact)
    assert float(parts["approximate_kl"]) < 1e-11, "the ratio of the policy to itself is 1"
    assert float(parts["value_loss"]) < 1e-11


def test_choices_are_drawn_by_their_probabilities() -> None:
    trainer = made(spaces.MultiDiscrete([3, 4]))
    policy, draws = NativePolicy(read_policy(trainer)), 4000
    obs = np.tile(np.random.default_rng(3).normal(size=6).astype(np.float32), (draws, 1))
    grid = ((np.arange(draws) + 0.5) / draws).astype(np.float32)
    action, log_prob, _ = policy.explore(obs, np.stack([grid, grid[::-1]], axis=1))
    logits = torch.from_numpy(policy.values(obs[:1])).double()
    exact = [part.softmax(dim=1)[0].numpy() for part in logits.split([3, 4], dim=1)]
    for part, probabilities in enumerate(exact):
        shares = np.bincount(action[:, part], minlength=len(probabilities)) / draws
        np.testing.assert_allclose(shares, probabilities, atol=1.5 / draws)
    expected = np.log(exact[0][action[:, 0]]) + np.log(exact[1][action[:, 1]])
    np.testing.assert_allclose(log_prob, expected, atol=1e-5)
    most = np.full((1, 2), np.nextafter(np.float32(1), np.float32(0)))
    assert policy.explore(obs[:1], most)[0].tolist() == [[2, 3]]


def test_new_weights_reach_policy_deviations_and_normalisation() -> None:
    trainer, other = (made(SPACES["Box"], normalize_observations=True) for _ in range(2))
    policy = NativePolicy(read_policy(trainer))
    NativeRolloutLearner(other, epochs=2, batch_size=20).train(rollout_of(other, 60))
    other.after_rollout(torch.randn((50, 6), generator=torch.Generator().manual_seed(2)) * 3 + 1)
    policy.load_weights(policy_snapshot(other))
    obs, noise = np.random.default_rng(0).normal(size=(9, 6)).astype(np.float32), noise_for(other, 9)
    for found, expected in zip(policy.explore(obs, noise), TorchPolicy(other).explore(obs, noise), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


class Doubling(Small):
    """Draws otherwise than its distribution says."""

    def build(self) -> None:
        super().build()
        self.networks = Doubled(self.networks)


class Doubled(PolicyAndValue):
    def __init__(self, networks: PolicyAndValue) -> None:
        super().__init__(networks.policy, networks.value, networks.log_std, None)

    def forward(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        outputs, values = super().forward(obs)
        return 2 * outputs, values


class OwnAction(Small):
    def get_action(self, obs: torch.Tensor) -> torch.Tensor:
        return -super().get_action(obs)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Doubling, "the policy of Doubling, which acts otherwise than its layers say"),
        (OwnAction, "OwnAction overrides get_action"),
        (WithGelu, "layer '1' of kind 'gelu'"),
    ],
)
def test_policies_beyond_it_are_named(kind: type[OnPolicyTrainer], reason: str) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        read_policy(made(SPACES["Box"], kind))  # type: ignore[arg-type]


def test_arrays_that_do_not_fit_a_policy_are_refused() -> None:
    trainer = made(SPACES["Discrete"])
    policy = NativePolicy(read_policy(trainer))
    obs, noise = np.zeros((4, 6), np.float32), noise_for(trainer, 4)
    for wrong_obs, wrong_noise in ((obs[:, :5].copy(), noise), (obs, noise[:3])):
        with pytest.raises(TrainerError, match="must hold 4 rows of"):
            policy.explore(wrong_obs, wrong_noise)
    assert policy._rollout is not None
    with pytest.raises(TrainerError, match="action must be contiguous, of int64; found float32"):
        policy._rollout.explore(policy._weights, obs, noise, *np.zeros((3, 4), np.float32))
