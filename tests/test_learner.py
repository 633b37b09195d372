"""The Learner on torch: weight snapshots, priorities; on the CPU and, where there is one, on a GPU."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from pearl.actors.torch_policy import TorchPolicy
from pearl.algorithms import DDPG, DQN, Batch, Trainer
from pearl.algorithms.trainer import make_trainer, policy_snapshot, set_evaluation_mode, splits_batches
from pearl.errors import ConfigurationError, TrainerError
from pearl.learner.torch_learner import TorchLearner, load_policy_weights
from pearl.runtime.reporting import Reporter

OBS = spaces.Box(-5.0, 5.0, (6,), np.float32)
CASES = [(DQN, spaces.Discrete(3)), (DDPG, spaces.Box(-2.0, 2.0, (2,), np.float32))]
ROWS = 50  # 3 and 4 do not divide it

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU that torch can use")
each_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.cuda, needs_cuda])])
each_algorithm = pytest.mark.parametrize(("algorithm", "actions"), CASES, ids=["dqn", "ddpg"])


def batch_of(actions: spaces.Space[Any], seed: int, rows: int = ROWS) -> tuple[dict[str, np.ndarray], np.ndarray]:
    rng = np.random.default_rng(seed)
    action = (
        rng.uniform(-2, 2, (rows, 2)).astype(np.float32)
        if isinstance(actions, spaces.Box)
        else rng.integers(0, 3, rows)
    )
    columns = {
        "obs": rng.normal(size=(rows, 6)).astype(np.float32),
        "action": action,
        "reward": rng.normal(size=rows).astype(np.float32),
        "next_obs": rng.normal(size=(rows, 6)).astype(np.float32),
        "discount": np.where(rng.random(rows) < 0.2, 0, 0.99).astype(np.float32),
    }
    return columns, rng.uniform(0.1, 1.0, rows).astype(np.float32)


@pytest.mark.parametrize("sub_batches", [2, 8])
def test_a_batch_smaller_than_the_count_of_sub_batches(sub_batches: int) -> None:
    trainer = DQN(OBS, spaces.Discrete(3))
    learner = TorchLearner(trainer, sub_batches=sub_batches)
    batch, weights = batch_of(spaces.Discrete(3), 0, rows=3)
    assert learner.step(batch, weights).priorities.shape == (3,)


@each_device
@each_algorithm
def test_priorities_are_the_absolute_td_errors_before_the_step(
    algorithm: type[Trainer], actions: spaces.Space[Any], device: str
) -> None:
    trainer = algorithm(OBS, actions, device=device)
    batch, weights = batch_of(actions, 0)
    columns = Batch(*(torch.as_tensor(batch[name]).to(device) for name in Batch._fields))
    with torch.no_grad():
        if isinstance(trainer, DQN):
            value = trainer.q(columns.obs)[torch.arange(ROWS), columns.action]
            # Targets still equal their networks: the double and the plain target are the same.
            after = trainer.q(columns.next_obs).amax(1)
        else:
            assert isinstance(trainer, DDPG)
            value = trainer.critic(columns.obs, columns.action)
            after = trainer.critic(columns.next_obs, trainer.actor(columns.next_obs))
        expected = (value - columns.reward - columns.discount * after).abs().cpu().numpy()
    learner = TorchLearner(trainer, device=device)
    learner.prepare()
    result = learner.step(batch, weights)
    assert result.priorities.dtype == np.float32
    np.testing.assert_allclose(result.priorities, expected, rtol=1e-4, atol=1e-5)
    assert result.metrics["td_error"] == pytest.approx(expected.mean(), rel=1e-4)


class Telling(DQN):
    """Its metrics are those that are set."""

    tells: Any = None

    def metrics(self) -> Any:
        return self.tells


def test_metrics_may_be_tensors_of_one_number() -> None:
    trainer = Telling(OBS, spaces.Discrete(3), tells={"a": torch.tensor(1.5), "b": np.float32(2), "c": 3, "d": True})
    metrics = TorchLearner(trainer).step(*batch_of(spaces.Discrete(3), 0)).metrics
    assert {name: value for name, value in metrics.items() if name != "td_error"} == {"a": 1.5, "b": 2, "c": 3, "d": 1}
    assert {type(value) for value in metrics.values()} == {float}


@pytest.mark.parametrize(
    ("tells", "message"),
    [
        (None, "must return a dictionary of numbers by name; found None"),
        ({"a": 1, "b": "2"}, "must return numbers; found '2' for 'b'"),
        ({"a": torch.zeros(3)}, r"must return numbers; found tensor\(\[0., 0., 0.\]\) for 'a'"),
    ],
)
def test_metrics_that_are_no_numbers_are_named(tells: Any, message: str) -> None:
    learner = TorchLearner(Telling(OBS, spaces.Discrete(3), tells=tells))
    with pytest.raises(TrainerError, match=rf"Telling\.metrics\(\) {message}"):
        learner.step(*batch_of(spaces.Discrete(3), 0))


def test_metrics_replace_no_number_of_the_run() -> None:
    reporter = Reporter.__new__(Reporter)
    reporter._subject = SimpleNamespace(trainer=Telling(OBS, spaces.Discrete(3), tells={"wall_s": 1.0}))  # type: ignore[assignment]
    with pytest.raises(TrainerError, match=r"Telling\.metrics\(\) needs names other than .*; found 'wall_s'"):
        reporter._trainer_scalars()


# --- weights ----------------------------------------------------------------------------------------------------------


class Resetting(DQN):
    """Begins anew after its first step (Nikishin et al. 2022), in the way that `reset` says."""

    reset = "build"

    def finish_step(self) -> None:
        super().finish_step()
        if self.reset == "build":
            self.build()
        elif self.reset == "network":
            self.q = self.build_q_network()


class ResettingAlone:
    """The same in a class that derives from none of PEARL's; its layers become wider if it is asked to."""

    def __init__(self, reset: str = "alone") -> None:
        self.policy = nn.Linear(6, 3)
        self.reset = reset

    def get_action(self, obs: torch.Tensor) -> torch.Tensor:
        return self.policy(obs).argmax(1)

    def update_policy(self, batch: Batch, weights: torch.Tensor) -> torch.Tensor:
        self.policy = nn.Linear(6, 3 if self.reset == "alone" else 4)
        return torch.ones_like(weights)


@pytest.mark.parametrize("trainer", [Resetting, ResettingAlone])
def test_snapshots_follow_networks_that_the_trainer_replaces(trainer: type) -> None:
    made = make_trainer(trainer, OBS, spaces.Discrete(3))
    learner = TorchLearner(made)
    learner.step(*batch_of(spaces.Discrete(3), 0))
    found = np.zeros(learner.weight_count, np.float32)
    learner.write_weights(found)
    np.testing.assert_array_equal(found, policy_snapshot(made))


class Diverging:
    """Its weights become NaN, while its priorities do not show it. Its mask is infinite, as attention's are."""

    def __init__(self) -> None:
        self.policy = nn.Linear(6, 3)
        self.policy.register_buffer("mask", torch.full((3,), -torch.inf))

    def get_action(self, obs: torch.Tensor) -> torch.Tensor:
        return self.policy(obs).argmax(1)

    def update_policy(self, batch: Batch, weights: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.policy.bias[1] /= 0.0
            self.policy.bias[1] *= 0.0
        return torch.ones_like(weights)


def test_weights_that_are_no_numbers_do_not_reach_actors() -> None:
    learner = TorchLearner(make_trainer(Diverging, OBS, spaces.Discrete(3)))
    out = np.zeros(learner.weight_count, np.float32)
    learner.write_weights(out)
    learner.step(*batch_of(spaces.Discrete(3), 0))
    with pytest.raises(TrainerError, match=r"The training diverged: 1 of the policy's 24 weights are NaN"):
        learner.write_weights(out)


@pytest.mark.parametrize(
    ("trainer", "reset", "message"),
    [
        (Resetting, "network", "Resetting replaced networks while it trained: _q_flat still trains"),
        (ResettingAlone, "wider", "ResettingAlone replaced its networks .* now has 28 weights, and had 21"),
    ],
)
def test_networks_that_cannot_be_followed_are_named(trainer: type, reset: str, message: str) -> None:
    made = make_trainer(trainer, OBS, spaces.Discrete(3), settings={"reset": reset})
    learner = TorchLearner(made)
    learner.step(*batch_of(spaces.Discrete(3), 0))
    with pytest.raises(TrainerError, match=message):
        learner.write_weights(np.zeros(learner.weight_count, np.float32))


class Normalised:
    """A policy with floating buffers, and a counter that is none."""

    def __init__(self, device: str = "cpu") -> None:
        self.policy = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).to(device)
        self.critic = nn.Linear(6, 1)

    def get_action(self, obs: torch.Tensor) -> torch.Tensor:
        values: torch.Tensor = self.policy(obs)
        return values.argmax(1)

    def update_policy(self, batch: Batch, weights: torch.Tensor) -> torch.Tensor:
        return batch.reward.abs() * weights


@each_device
def test_weights_and_buffers_reach_another_trainer(device: str) -> None:
    source, target = Normalised(device), Normalised()
    with torch.no_grad():
        source.policy(torch.randn(64, 6, device=device) * 3 + 1)  # moves the running statistics
    learner = TorchLearner(source, device=device)
    assert learner.weight_count == (6 * 4 + 4) + 4 * 4 + (4 * 2 + 2)
    snapshot = np.full(learner.weight_count, np.nan, np.float32)
    learner.write_weights(snapshot)
    critic = target.critic.weight.detach().clone()
    load_policy_weights(target, snapshot)
    for name, value in source.policy.state_dict().items():
        if value.is_floating_point():
            assert torch.equal(target.policy.state_dict()[name], value.cpu()), name
    assert float(target.policy.state_dict()["1.running_mean"].abs().sum()) > 0
    assert torch.equal(target.critic.weight, critic)
    # A copy: training on does not change what was handed over.
    before = snapshot.copy()
    with torch.no_grad():
        for p in source.policy.parameters():
            p.add_(1)
    assert np.array_equal(snapshot, before)


class Scattered:
    """Networks in a list and in a dict, and a learned tensor; none is called policy."""

    def __init__(self) -> None:
        self.encoder = nn.Linear(6, 4)
        self.heads = [nn.Linear(4, 2), nn.Linear(4, 2)]
        self.further = {"wide": nn.Sequential(nn.Linear(6, 2), nn.Dropout(0.5))}
        self.bias = torch.zeros(2, requires_grad=True)
        self.by_name = self.encoder  # the same once more

    def get_action(self, obs: torch.Tensor) -> torch.Tensor:
        features = self.encoder(obs)
        values: torch.Tensor = sum(head(features) for head in self.heads) + self.further["wide"](obs) + self.bias
        return values.argmax(1)

    def update_policy(self, batch: Batch, weights: torch.Tensor) -> torch.Tensor:
        return batch.reward.abs() * weights


def test_networks_in_containers_and_learned_tensors_reach_another_trainer() -> None:
    source, target = Scattered(), TorchPolicy(Scattered())
    source.bias.data += 1.0
    learner = TorchLearner(source)
    assert learner.weight_count == (6 * 4 + 4) + 2 * (4 * 2 + 2) + (6 * 2 + 2) + 2
    snapshot = np.zeros(learner.weight_count, np.float32)
    learner.write_weights(snapshot)
    target.load_weights(snapshot)
    obs = torch.randn(200, 6)
    set_evaluation_mode(source)
    assert target.act(obs.numpy()).tolist() == source.get_action(obs).tolist()


@each_device
@each_algorithm
def test_snapshots_follow_training(algorithm: type[Trainer], actions: spaces.Space[Any], device: str) -> None:
    trainer = algorithm(OBS, actions, device=device)
    learner = TorchLearner(trainer, device=device)
    learner.prepare()
    snapshots = np.zeros((2, learner.weight_count), np.float32)
    learner.write_weights(snapshots[0])
    learner.step(*batch_of(actions, 0))
    learner.write_weights(snapshots[1])
    assert not np.array_equal(snapshots[0], snapshots[1])
    actor_side = algorithm(OBS, actions, seed=99)
    load_policy_weights(actor_side, snapshots[1])
    obs = torch.randn(40, 6)
    with torch.no_grad():
        torch.testing.assert_close(actor_side.policy(obs), trainer.policy(obs.to(device)).cpu(), rtol=1e-4, atol=1e-5)


class Normalising(DQN):
    hidden_sizes = (8,)
    target_update_interval = 2

    def build_q_network(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))


@each_device
@pytest.mark.parametrize("tau", [1.0, 0.25], ids=["hard", "polyak"])
def test_a_target_network_takes_the_statistics_that_its_network_has(tau: float, device: str) -> None:
    trainer = Normalising(OBS, spaces.Discrete(3), device=device, tau=tau)
    learner = TorchLearner(trainer, device=device)
    learner.prepare()
    for seed in range(2):
        learner.step(*batch_of(spaces.Discrete(3), seed))
    # Online and target network see different batches; what they have learned of them must not drift apart.
    online, target = dict(trainer.q.named_buffers()), dict(trainer.target_q.named_buffers())
    assert int(online["1.num_batches_tracked"]) > 0
    for name, value in online.items():
        assert torch.equal(target[name], value), name


# --- making a trainer -------------------------------------------------------------------------------------------------


class Unseeded:
    """Draws its weights as torch does, and knows of no seed."""

    def __init__(self) -> None:
        self.policy = nn.Linear(6, 2)

    def get_action(self, obs: torch.Tensor) -> torch.Tensor:
        values: torch.Tensor = self.policy(obs)
        return values.argmax(1)

    def update_policy(self, batch: Batch, weights: torch.Tensor) -> torch.Tensor:
        return batch.reward.abs()


def test_the_seed_decides_the_weights_of_a_class_that_knows_of_none() -> None:
    def weight(seed: int) -> torch.Tensor:
        torch.rand(3)  # what else the program draws does not matter
        trainer = make_trainer(Unseeded, OBS, spaces.Discrete(2), seed=seed)
        assert isinstance(trainer, Unseeded)
        return trainer.policy.weight

    torch.manual_seed(5)
    expected = torch.rand(9)[6:]
    torch.manual_seed(5)
    first, again = weight(3), weight(3)
    assert torch.equal(first, again)
    assert torch.equal(torch.rand(3), expected), "making a trainer drew from the program's random numbers"
    assert not torch.equal(weight(4), first)


def test_an_environments_own_spaces_draw_on_as_if_no_trainer_were_made() -> None:
    observations = spaces.Box(-5.0, 5.0, (6,), np.float32, seed=8)
    actions = spaces.Discrete(1000, seed=8)
    twins = spaces.Box(-5.0, 5.0, (6,), np.float32, seed=8), spaces.Discrete(1000, seed=8)
    make_trainer(DQN, observations, actions)
    for space, twin in zip((observations, actions), twins, strict=True):
        np.testing.assert_array_equal(space.sample(), twin.sample())


class Shaped(Unseeded):
    """Gives the priorities of a batch in `shape`."""

    shape = (-1, 1)

    def update_policy(self, batch: Batch, weights: torch.Tensor) -> torch.Tensor:
        return batch.reward.abs().reshape(self.shape)


@pytest.mark.parametrize("shape", [(-1, 1), (1, -1), (2, -1)])
def test_priorities_of_another_shape_are_refused(shape: tuple[int, int]) -> None:
    trainer = Shaped()
    trainer.shape = shape
    batch, weights = batch_of(spaces.Discrete(3), 0)
    rows = len(weights)
    found = re.escape(str(tuple(np.zeros(rows).reshape(shape).shape)))
    expected = rf"Shaped\.update_policy\(\) must return a tensor of shape \({rows},\).*found shape {found}"
    with pytest.raises(TrainerError, match=expected):
        TorchLearner(trainer).step(batch, weights)


# --- settings ---------------------------------------------------------------------------------------------------------


class Halved(DQN):
    """Priorities of its own, which the phases of DQN know nothing of."""

    def update_policy(self, batch: Batch, weights: torch.Tensor) -> torch.Tensor:
        return super().update_policy(batch, weights) / 2


def test_a_trainer_with_its_own_update_takes_whole_batches_only() -> None:
    for trainer in (Normalised(), Halved(OBS, spaces.Discrete(3))):
        name = type(trainer).__name__
        with pytest.raises(ConfigurationError, match=rf"{name} defines its own update_policy.*sub_batches must be 1"):
            TorchLearner(trainer, sub_batches=2)
        assert not splits_batches(type(trainer)), "the composer asks this before it measures parts of batches"
    assert splits_batches(Telling)
    batch, weights = batch_of(spaces.Discrete(3), 0)
    np.testing.assert_allclose(
        TorchLearner(Normalised()).step(batch, weights).priorities, abs(batch["reward"]) * weights
    )


@pytest.mark.parametrize("options", [{"threads": 0}, {"sub_batches": 0}, {"threads": -1, "sub_batches": 2}])
def test_counts_below_one_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ConfigurationError, match="threads and sub_batches must be at least 1; found"):
        TorchLearner(DQN(OBS, spaces.Discrete(3)), **options)  # type: ignore[arg-type]


def test_preparing_sets_the_threads() -> None:
    before = torch.get_num_threads()
    try:
        for threads in (2, 1):
            TorchLearner(DQN(OBS, spaces.Discrete(3)), threads=threads).prepare()
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
