"""REDQ and DroQ, natively and in torch: which critics judge, what is dropped, gradients against float64."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from programs import make_program, run
from test_native_actor_critic import (
    ACTIONS,
    OBS,
    VARIANTS,
    assert_alike,
    assert_gradients,
    batch_of,
    show_gradients,
    small,
)
from test_native_learner import kernels, one_torch_thread
from torch import distributions

from composer.fpga.learner_pipeline import pipeline_of
from pearl import _native
from pearl.algorithms import REDQ, DroQ, Trainer
from pearl.algorithms.networks import Dropout, DropoutDraw
from pearl.backends import learners
from pearl.backends.cpu.learner import NativeLearner
from pearl.errors import TrainerError
from pearl.learner.torch_learner import TorchLearner
from pearl.replay.reference import philox4x32
from pearl.runtime.trainer_state import load_module_tensors, module_tensors

pytestmark = pytest.mark.usefixtures(one_torch_thread.__name__)

each_algorithm = pytest.mark.parametrize(
    ("algorithm", "settings"),
    [
        (REDQ, {"num_critics": 5, "policy_delay": 3}),
        (REDQ, {"num_critics": 3, "target_critics": 3, "policy_delay": 1, "max_grad_norm": 0.5}),
        (REDQ, {"num_critics": 1, "target_critics": 1, "temperature": 0.2, "policy_delay": 2}),
        (DroQ, {"dropout": 0.2, "policy_delay": 3}),
        (DroQ, {"dropout": 0.0, "num_critics": 4, "policy_delay": 1}),
    ],
    ids=["REDQ", "all judge", "one critic", "DroQ", "four critics, nothing dropped"],
)
FLATS = ("_actor_flat", "_critic_flat", "_target_critic_flat")
each_thread_count = pytest.mark.parametrize("threads", [1, 3])


# --- which critics judge ----------------------------------------------------------------------------------------------


def test_judges_are_different_critics_and_all_subsets_are_as_likely() -> None:
    counts: dict[frozenset[int], int] = {}
    for step in range(6000):
        judges = _native.chosen_critics(17, step, 5, 2).tolist()
        assert len(set(judges)) == 2
        counts[frozenset(judges)] = counts.get(frozenset(judges), 0) + 1
    assert len(counts) == 10
    assert all(abs(count - 600) < 5 * 600**0.5 for count in counts.values())
    assert sorted(_native.chosen_critics(3, 1, 9, 9).tolist()) == list(range(9))
    assert _native.chosen_critics(3, 8, 9, 4).tolist() == _native.chosen_critics(3, 8, 9, 4).tolist()


@pytest.mark.parametrize(("seed", "step"), [(3, 8), (2**63 + 5, 2**40 + 7)])
def test_judges_are_drawn_by_philox_words(seed: int, step: int) -> None:
    """As a shuffle of the critics that ends early, each word giving one place."""
    blocks = np.array([[block, 2, step % 2**32, step >> 32] for block in range(3)], np.uint64)
    expected = list(range(11))
    for k, word in enumerate(philox4x32(blocks, seed).ravel().tolist()[:11]):
        at = k + (word * (11 - k) >> 32)
        expected[k], expected[at] = expected[at], expected[k]
        assert _native.chosen_critics(seed, step, 11, k + 1).tolist() == expected[: k + 1]


def test_a_trainers_judges_change_with_the_step_and_go_by_its_seed() -> None:
    trainers = [REDQ(OBS, ACTIONS, seed=seed, hidden_sizes=(8,)) for seed in (1, 1, 2)]
    seen = []
    for trainer in trainers:
        found = []
        for step in range(8):
            trainer.gradient_steps = step
            found.append(trainer.judges().tolist())
        seen.append(found)
    assert seen[0] == seen[1] != seen[2]
    assert len({tuple(judges) for judges in seen[0]}) > 4


# --- what is dropped --------------------------------------------------------------------------------------------------


def test_masks_drop_their_share_and_keep_the_mean() -> None:
    for rate in (0.01, 0.3):
        mask = _native.dropout_mask(5, 9, 1, 0, 3000, 100, rate)
        assert set(np.unique(mask)) == {np.float32(0), np.float32(1 / (1 - rate))}
        assert abs((mask == 0).mean() - rate) < 5 * (rate / mask.size) ** 0.5
        # Neither rows nor columns drop together.
        assert abs((mask[:, 1:] == 0)[mask[:, :-1] == 0].mean() - rate) < 0.02
        assert abs((mask[1:] == 0)[mask[:-1] == 0].mean() - rate) < 0.02


def test_masks_are_philox_words_with_a_key_of_their_own() -> None:
    """A counter for four rows of sixteen, every fourth one, and a feature; noise has the same seed, but not the key."""
    seed, step, draw, rate = 2**40 + 5, 9, 3 << 16, 0.4
    places = [(row, feature) for row in range(20) for feature in range(18)]
    blocks = [[row // 16 * 4 + row % 4, feature, step, draw] for row, feature in places]
    words = philox4x32(np.array(blocks, np.uint64), seed ^ 0x9D39247E33776D41)
    kept = [words[i, row % 16 // 4] >= int(rate * 2**32) for i, (row, _) in enumerate(places)]
    found = _native.dropout_mask(seed, step, draw, 0, 20, 18, rate) > 0
    np.testing.assert_array_equal(found.ravel(), kept)


def test_a_number_of_a_mask_depends_on_its_place_alone() -> None:
    whole = _native.dropout_mask(5, 9, 1, 0, 77, 21, 0.4)
    for first, rows in ((0, 3), (5, 40), (16, 61), (76, 1)):
        np.testing.assert_array_equal(_native.dropout_mask(5, 9, 1, first, rows, 21, 0.4), whole[first : first + rows])
    np.testing.assert_array_equal(_native.dropout_mask(5, 9, 1, 0, 77, 5, 0.4), whole[:, :5])
    for other in ((6, 9, 1), (5, 10, 1), (5, 9, 2), (5, 9 + 2**32, 1)):
        assert (_native.dropout_mask(*other, 0, 77, 21, 0.4) != whole).mean() > 0.3
    with pytest.raises(TrainerError, match=r"a share from 0 to below 1; found 1\.0"):
        _native.dropout_mask(5, 9, 1, 0, 2, 2, 1.0)


def test_a_layer_drops_only_between_begin_and_end_in_training_mode() -> None:
    layer, draw, x = Dropout(0.5), DropoutDraw(), torch.ones(6, 40)
    assert torch.equal(layer(x), x)
    layer.of(draw, 3)
    assert torch.equal(layer(x), x)
    draw.begin(1, 2, 0, 0)
    assert set(layer(x).unique().tolist()) == {0.0, 2.0}
    draw.begin(1, 2, 0, 2)
    later = layer(x[2:])
    draw.begin(1, 2, 0, 0)
    assert torch.equal(layer(x)[2:], later)
    layer.eval()
    assert torch.equal(layer(x), x)
    layer.train()
    draw.end()
    assert torch.equal(layer(x), x)


# --- gradients --------------------------------------------------------------------------------------------------------


def masks_of(trainer: Any, number: int, critic: int, rows: int) -> list[torch.Tensor]:
    """The masks of all layers of a critic in a pass, in float64."""
    if not isinstance(trainer, DroQ):
        return []
    seed, step = int(trainer.noise_seed), trainer.gradient_steps
    return [
        torch.from_numpy(
            _native.dropout_mask(seed, step, number << 16 | critic << 8 | layer, 0, rows, width, trainer.dropout)
        ).double()
        for layer, width in enumerate(trainer.hidden_sizes)
    ]


def value(network: torch.nn.Module, inputs: torch.Tensor, masks: list[torch.Tensor]) -> torch.Tensor:
    left = list(masks)
    x = inputs
    for layer in network.children():
        x = x * left.pop(0) if isinstance(layer, Dropout) else layer(x)
    assert not left
    return x.squeeze(1)


def exact_gradients(trainer: Any, batch: dict[str, np.ndarray], weights: np.ndarray) -> list[list[torch.Tensor]]:
    """Of the critics' and of the actor's parameters, in float64, as the papers define the losses."""
    actor, critic, target = (copy.deepcopy(m).double() for m in (trainer.actor, trainer.critic, trainer.target_critic))
    obs, action, reward, next_obs, discount = (torch.from_numpy(column).double() for column in batch.values())
    rows, size = len(reward), trainer.action_size
    next_noise, noise = (trainer.draw_noise(rows, draw).double() for draw in range(2))
    alpha = float(trainer.log_alpha.detach().exp())

    def sample(normal: torch.Tensor, observations: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        outputs = actor.network(actor.observation_scale(observations))
        mean, log_std = outputs[:, :size], outputs[:, size:].clamp(*trainer.log_std_bounds)
        x = mean + log_std.exp() * normal
        density = distributions.Normal(mean, log_std.exp()).log_prob(x)
        # log(1 - tanh(x)^2), without cancellation.
        slope = 2 * (math.log(2) - x - torch.nn.functional.softplus(-2 * x))
        return x.tanh(), (density - slope).sum(1)

    def values(ensemble: Any, number: int, observations: torch.Tensor, unit: torch.Tensor) -> list[torch.Tensor]:
        inputs = torch.cat((critic.observation_scale(observations), unit), 1)
        return [value(net, inputs, masks_of(trainer, number, k, rows)) for k, net in enumerate(ensemble.critics)]

    with torch.no_grad():
        unit, log_prob = sample(next_noise, next_obs)
        after = torch.stack(values(target, 0, next_obs, unit))[torch.as_tensor(trainer.judges().astype(np.int64))]
        goal = reward + discount * (after.amin(0) - alpha * log_prob)
    errors = [found - goal for found in values(critic, 1, obs, critic.action_scale(action))]
    loss = torch.stack([torch.from_numpy(weights).double() @ error**2 for error in errors]).sum() / rows
    critics = list(torch.autograd.grad(loss, list(critic.parameters())))
    unit, log_prob = sample(noise, obs)
    judged = torch.stack(values(critic, 2, obs, unit)).mean(0)
    objective = (alpha * log_prob - judged).mean()
    return [critics, list(torch.autograd.grad(objective, list(actor.parameters())))]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("rows", "threads"), [(1, 1), (23, 1), (150, 3)])
@each_algorithm
def test_gradients_are_those_of_float64(
    algorithm: type[Trainer], settings: dict[str, Any], rows: int, threads: int, variant: str
) -> None:
    boxes = spaces.Box(-4.0, 5.0, (7,), np.float32), spaces.Box(-1.0, 3.0, (3,), np.float32)
    settings = {**settings, "policy_delay": 1, "max_grad_norm": 0.0, "log_std_bounds": (-1.0, 0.1)}
    trainer: Any = algorithm(*boxes, hidden_sizes=(33, 20), scale_observations=True, **settings)
    show_gradients(trainer)
    trainer.gradient_steps = 4
    batch, weights = batch_of(rows, rows, 7, 3)
    critic, actor = exact_gradients(trainer, batch, weights)
    with kernels(variant):
        NativeLearner(trainer, threads=threads).step(batch, weights)
    assert_gradients(trainer.critic, trainer._critic_flat, trainer.critic_optimizer, critic, 5e-5)
    assert_gradients(trainer.actor, trainer._actor_flat, trainer.actor_optimizer, actor, 5e-5)


@each_algorithm
def test_torch_has_the_same_gradients(algorithm: type[Trainer], settings: dict[str, Any]) -> None:
    settings = {**settings, "policy_delay": 1, "max_grad_norm": 0.0, "log_std_bounds": (-1.0, 0.1)}
    trainer: Any = algorithm(OBS, ACTIONS, hidden_sizes=(33, 20), scale_observations=True, **settings)
    show_gradients(trainer)
    trainer.gradient_steps = 4
    batch, weights = batch_of(3)
    critic, actor = exact_gradients(trainer, batch, weights)
    TorchLearner(trainer).step(batch, weights)
    assert_gradients(trainer.critic, trainer._critic_flat, trainer.critic_optimizer, critic, 5e-5)
    assert_gradients(trainer.actor, trainer._actor_flat, trainer.actor_optimizer, actor, 5e-5)


# --- natively as in torch ---------------------------------------------------------------------------------------------


@each_thread_count
@each_algorithm
def test_native_steps_may_take_turns_with_torchs(
    algorithm: type[Trainer], settings: dict[str, Any], threads: int
) -> None:
    ours, theirs = (small(algorithm, **settings) for _ in range(2))
    both, reference = (NativeLearner(ours, threads=threads), TorchLearner(ours)), TorchLearner(theirs)
    for step in range(40):
        found = both[step // 3 % 2].step(*batch_of(step, rows=30 + step))
        expected = reference.step(*batch_of(step, rows=30 + step))
        np.testing.assert_allclose(found.priorities, expected.priorities, rtol=1e-3, atol=1e-4)
    assert_alike(ours, theirs, 2e-5)
    assert ours.gradient_steps == 40
    begun = small(algorithm, **settings)
    assert all(not torch.equal(getattr(theirs, flat).parameter, getattr(begun, flat).parameter) for flat in FLATS)


@each_algorithm
def test_a_checkpoint_resumes_to_the_same_bits(algorithm: type[Trainer], settings: dict[str, Any]) -> None:
    for kind in (NativeLearner, TorchLearner):
        straight, saved, resumed = (small(algorithm, seed=seed, **settings) for seed in (1, 1, 2))
        whole, first, second = (kind(trainer) for trainer in (straight, saved, resumed))
        second.step(*batch_of(99))
        for seed in range(10):
            whole.step(*batch_of(seed))
            (first if seed < 5 else second).step(*batch_of(seed))
            if seed == 4:
                load_module_tensors(resumed, module_tensors(saved))
                resumed.gradient_steps = saved.gradient_steps
        assert_alike(resumed, straight, 0.0)


@pytest.mark.parametrize("algorithm", [REDQ, DroQ])
def test_settings_may_change_between_steps(algorithm: type[Trainer]) -> None:
    ours, theirs = (small(algorithm, num_critics=4) for _ in range(2))
    native, reference = NativeLearner(ours), TorchLearner(theirs)
    for step in range(24):
        for trainer in (ours, theirs):
            trainer.target_critics, trainer.policy_delay, trainer.tau = 1 + step // 6, 1 + step % 3, 0.1
        native.step(*batch_of(step))
        reference.step(*batch_of(step))
    assert_alike(ours, theirs, 2e-5)


@pytest.mark.parametrize("algorithm", [REDQ, DroQ])
def test_a_step_that_diverges_raises_and_changes_nothing(algorithm: type[Trainer]) -> None:
    trainer = small(algorithm, policy_delay=1)
    learner = NativeLearner(trainer)
    learner.step(*batch_of(1))
    before = copy.deepcopy(module_tensors(trainer))
    batch, weights = batch_of(0)
    batch["reward"][17] = np.nan
    with pytest.raises(TrainerError, match=r"diverged: the critics' loss is -?nan.*weights were left as they were"):
        learner.step(batch, weights)
    for group, tensors in module_tensors(trainer).items():
        assert all(torch.equal(before[group][key], tensor) for key, tensor in tensors.items())


def test_a_native_learner_without_an_ensemble_takes_at_most_two_critics() -> None:
    learner = NativeLearner(REDQ(OBS, ACTIONS, hidden_sizes=(8,)))
    native: Any = learner._rule._native  # type: ignore[attr-defined]
    with pytest.raises(TrainerError, match="Of 10 critics, 1 to 10 may judge the targets; found 0"):
        native.set(True, 0.0, 0.0, 0.0, -20.0, 2.0, -1.0, 0.005, 0.0, 0)
    with pytest.raises(TrainerError, match="found 11"):
        native.set(True, 0.0, 0.0, 0.0, -20.0, 2.0, -1.0, 0.005, 0.0, 11)


class Alone(REDQ):
    def _judged(self, obs: torch.Tensor, unit: torch.Tensor) -> torch.Tensor:
        return self.critic.of_unit(obs, unit)[0]


class Beside(torch.nn.Module):
    """What a dropout takes, and another operation after it too."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(x)  # type: ignore[no-any-return]


class Own(DroQ):
    def build_critic(self) -> torch.nn.Module:
        layers = torch.nn.Linear(8, 9), Dropout(0.5), torch.nn.Tanh(), Beside(), Dropout(0.1), torch.nn.Linear(9, 1)
        return torch.nn.Sequential(*layers)


def test_what_other_engines_say() -> None:
    assert NativeLearner.supports(Alone(OBS, ACTIONS)) == "Alone overrides _judged, a part of REDQ's update rule"
    for algorithm in (REDQ, DroQ):
        trainer = algorithm(OBS, ACTIONS, hidden_sizes=(8,))
        assert NativeLearner.supports(trainer) is None
        others = {name: made for name, made in learners().items() if name not in ("torch", "native")}
        assert {made.supports(trainer) for made in others.values()} == {"an ensemble of critics"}
        with pytest.raises(TrainerError, match=f"{algorithm.__name__} has an ensemble of critics"):
            pipeline_of(trainer)


def test_critics_of_ones_own_drop_as_in_torch() -> None:
    ours, theirs = Own(OBS, ACTIONS, policy_delay=2), Own(OBS, ACTIONS, policy_delay=2)
    native, reference = NativeLearner(ours), TorchLearner(theirs)
    for seed in range(20):
        native.step(*batch_of(seed))
        reference.step(*batch_of(seed))
    assert_alike(ours, theirs, 1e-5)


# --- learning ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("trainer", [REDQ, DroQ])
def test_it_learns_pendulum_in_few_steps(tmp_path: Path, quick_profiles: None, trainer: type[Trainer]) -> None:
    settings = {"hidden_sizes": (64, 64), "learning_rate": 1e-3, "actor_learning_rate": 1e-3, "policy_delay": 4}
    settings |= {"learning_starts": 500, "temperature_learning_rate": 3e-3}
    training = {"batch_size": 64, "replay_ratio": 8 * 64.0, "gamma": 0.98}
    program = make_program(
        tmp_path, trainer=trainer, settings=settings, training=training, env="Pendulum-v1", capacity=20_000
    )
    arguments = ("--timesteps", "4000", "--eval-episodes", "20", "--run-dir", str(tmp_path / "run"))
    code, output = run(program, *arguments)
    assert code == 0, output
    # Chance returns about -1200; a pendulum that is swung up and held, about -150.
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["best"]["mean"] > -400
