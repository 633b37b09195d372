"""The native learner: gradients against float64 autograd, settings that change, what it refuses and how."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from pearl import _native
from pearl.algorithms import DQN, Batch, Trainer
from pearl.algorithms.networks import Dropout, DuelingHead, mlp
from pearl.backends.cpu.learner import NativeLearner
from pearl.errors import ConfigurationError, TrainerError
from pearl.learner.flat import FlatParameters
from pearl.learner.native_plan import read_network, weights_of
from pearl.learner.torch_learner import TorchLearner

VARIANTS = _native.learner_kernel_variants()
OBS, ACTIONS = spaces.Box(-5.0, 5.0, (6,), np.float32), spaces.Discrete(3)
sizes = st.integers(1, 70)
each_variant = pytest.mark.parametrize("variant", VARIANTS)


@pytest.fixture(autouse=True)
def one_torch_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@contextlib.contextmanager
def kernels(name: str) -> Iterator[None]:
    before = _native.selected_learner_kernels()
    _native.select_learner_kernels(name)
    try:
        yield
    finally:
        _native.select_learner_kernels(before)


def batch_of(seed: int, rows: int = 50, obs: int = 6, actions: int = 3) -> tuple[dict[str, np.ndarray], np.ndarray]:
    rng = np.random.default_rng(seed)
    columns = {
        "obs": rng.normal(size=(rows, obs)).astype(np.float32),
        "action": rng.integers(0, actions, rows),
        "reward": rng.normal(size=rows).astype(np.float32),
        "next_obs": rng.normal(size=(rows, obs)).astype(np.float32),
        "discount": np.where(rng.random(rows) < 0.2, 0, 0.99).astype(np.float32),
    }
    return columns, rng.uniform(0.1, 1.0, rows).astype(np.float32)


def random_masks(rng: np.random.Generator, rows: int, parts: tuple[int, ...]) -> np.ndarray:
    """Masks `(rows, sum of parts)` uint8 with at least one allowed choice in each part, and often no other."""
    masks = [rng.random((rows, size)) < rng.choice([0.0, 0.5, 1.0], (rows, 1)) for size in parts]
    for part in masks:
        part[np.arange(rows), rng.integers(0, part.shape[1], rows)] = True
    return np.concatenate(masks, axis=1).astype(np.uint8)


def assert_close(found: torch.Tensor, expected: torch.Tensor, whole: float, name: str, relative: float = 1e-5) -> None:
    """Relative to the tensor; what of it is the difference of larger numbers, to a tenth of the `whole` too."""
    difference, size = float((found.double() - expected).norm()), float(expected.norm())
    assert difference <= relative * (size + 0.1 * whole) + 1e-9, f"{name}: {difference} of {size}, {whole}"


def has_a_kink(module: nn.Module, x: torch.Tensor) -> bool:
    """Whether rounding may decide a ReLU: what it takes is 0 to a few of float32's digits, and its slope unknown."""
    near = []

    def look(_module: nn.Module, inputs: tuple[torch.Tensor, ...], _output: torch.Tensor) -> None:
        sizes = inputs[0].abs()
        near.append(bool(sizes.min() < 1e-6 * sizes.mean()))

    exact = copy.deepcopy(module).double()
    for part in exact.modules():
        if isinstance(part, nn.ReLU):
            part.register_forward_hook(look)
    exact(x.double() / (255 if x.dtype == torch.uint8 else 1))
    return any(near)


# --- gradients of networks --------------------------------------------------------------------------------------------


class Residual(nn.Module):
    """A value that four operations take, before and after a layer does, and operands in either order."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(width, width), nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = torch.relu(self.inner(x))
        early = x - inner
        return early - (torch.tanh(self.outer(inner)) + inner) - inner.mean(1, keepdim=True)


class CalledTwice(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layer(torch.tanh(self.layer(x)))
        return result


class Skips(nn.Module):
    """Values that an activation, a dropout, a mean or a LayerNorm takes, and another operation too."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.begin, self.norm = nn.Linear(inputs, width), nn.LayerNorm(width)
        self.dropout: nn.Module = Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        begun = self.begin(x)
        bent = self.dropout(begun) + torch.tanh(begun) - torch.relu(begun) + begun
        return bent - bent.mean(1, keepdim=True) + self.norm(bent)


class SideBySide(nn.Module):
    """Two layers that a third and a fourth one take, whose results come one after the other."""

    def __init__(self, inputs: int, width: int, outputs: int) -> None:
        super().__init__()
        self.begin = nn.ModuleList(nn.Linear(inputs, width) for _ in range(2))
        self.end = nn.ModuleList(nn.Linear(width, outputs) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = torch.relu(self.begin[0](x)), torch.relu(self.begin[1](x))
        result: torch.Tensor = self.end[0](left) - self.end[1](right)
        return result


NETWORKS: dict[str, Callable[[int, int, int], nn.Module]] = {
    "linear": lambda i, h, o: nn.Linear(i, o),
    "no bias": lambda i, h, o: nn.Sequential(nn.Linear(i, h, bias=False), nn.ReLU(), nn.Linear(h, o, bias=False)),
    "no bias, deeper": lambda i, h, o: nn.Sequential(
        nn.Linear(i, 2 * h, bias=False), nn.ReLU(), nn.Linear(2 * h, 2 * h), nn.ReLU(), nn.Linear(2 * h, o, bias=False)
    ),
    "relu": lambda i, h, o: mlp(i, (h, h), o),
    "relu, deeper": lambda i, h, o: mlp(i, (h, h, h), o),
    "narrow between": lambda i, h, o: nn.Sequential(mlp(i, (h, h), 3), nn.Tanh(), nn.Linear(3, o)),
    "tanh": lambda i, h, o: nn.Sequential(nn.Linear(i, h), nn.Tanh(), nn.Linear(h, o), nn.Tanh()),
    "activations alone": lambda i, h, o: nn.Sequential(nn.Tanh(), nn.ReLU(), nn.Linear(i, o), nn.ReLU(), nn.Tanh()),
    "layer norm": lambda i, h, o: nn.Sequential(
        nn.Linear(i, h), nn.LayerNorm(h), nn.ReLU(), nn.Identity(), nn.Linear(h, o), nn.LayerNorm(o, eps=1e-2)
    ),
    "plain layer norm": lambda i, h, o: nn.Sequential(
        nn.LayerNorm(i, eps=0.1, elementwise_affine=False), nn.Linear(i, h), nn.LayerNorm(h, bias=False, eps=0.1)
    ),
    "dueling": lambda i, h, o: nn.Sequential(nn.Linear(i, h), nn.ReLU(), DuelingHead(h, o, h)),
    "residual": lambda i, h, o: nn.Sequential(nn.Linear(i, h), nn.ReLU(), Residual(h), nn.Linear(h, o)),
    "skips": lambda i, h, o: nn.Sequential(Skips(i, h), nn.Linear(h, o)),
    "side by side": lambda i, h, o: nn.Sequential(nn.Linear(i, h), nn.ReLU(), SideBySide(h, h, o)),
    "called twice": lambda i, h, o: nn.Sequential(nn.Linear(i, h), CalledTwice(h), nn.Linear(h, o)),
}


@each_variant
@pytest.mark.parametrize("kind", NETWORKS)
@settings(max_examples=8, deadline=None)
@given(inputs=sizes, hidden=sizes, outputs=sizes, rows=sizes)
@example(inputs=4, hidden=64, outputs=2, rows=100)  # layers of 64 and enough rows run as a chain of products
@example(inputs=17, hidden=64, outputs=9, rows=130)
def test_networks_and_their_gradients_are_those_of_float64(
    kind: str, variant: str, inputs: int, hidden: int, outputs: int, rows: int
) -> None:
    torch.manual_seed(inputs * 71 + hidden)
    module = NETWORKS[kind](inputs, hidden, outputs)
    exact = copy.deepcopy(module).double()
    flat = FlatParameters(module)
    x = torch.randn(rows, inputs)
    exact_x = x.double().requires_grad_()
    expected = exact(exact_x)
    slopes = torch.randn(expected.shape)
    expected.backward(slopes.double())
    with kernels(variant):
        network = read_network("network", module, (inputs,), flat)
        found = network.forward(weights_of(flat), x.numpy())
        of_parameters, of_inputs = network.gradients(weights_of(flat), x.numpy(), slopes.numpy())
    assert_close(torch.from_numpy(found), expected, 0.0, "outputs")
    assert exact_x.grad is not None
    # LayerNorm's gradients are small differences of larger numbers.
    relative = 1e-5 if "norm" not in kind and kind != "skips" else 1e-4
    assert_close(torch.from_numpy(of_inputs), exact_x.grad, float(slopes.norm()), "inputs", relative)
    whole = float(torch.cat([p.grad.flatten() for p in exact.parameters() if p.grad is not None]).norm())
    flat.parameter.grad.copy_(torch.from_numpy(of_parameters))  # type: ignore[union-attr]
    for (name, parameter), twin in zip(module.named_parameters(), exact.parameters(), strict=True):
        assert parameter.grad is not None
        assert twin.grad is not None
        assert_close(parameter.grad, twin.grad, whole, name, relative)


@each_variant
def test_tanh_has_all_digits_of_float32(variant: str) -> None:
    flat = FlatParameters(module := nn.Sequential(nn.Tanh(), nn.Linear(1, 1, bias=False)))
    with torch.no_grad():
        module[1].weight.fill_(1.0)
    sizes = torch.cat([torch.linspace(0, 10, 3000), torch.logspace(-30, 30, 500), torch.tensor([torch.inf])])
    x = torch.cat([sizes, -sizes]).unsqueeze(1)
    with kernels(variant):
        found = read_network("network", module, (1,), flat).forward(weights_of(flat), x.numpy())
    torch.testing.assert_close(torch.from_numpy(found).double(), torch.tanh(x.double()), rtol=4e-7, atol=0)


# --- gradients of DQN -------------------------------------------------------------------------------------------------


class ShowsGradients(DQN):
    """SGD's momentum is, after one step, the gradient itself."""

    max_grad_norm = 0.0

    def build(self) -> None:
        super().build()
        self.optimizer = torch.optim.SGD([self._q_flat.parameter], lr=1e-3, momentum=0.9)
        with torch.no_grad():  # a target network of its own, so that mixing the two up shows
            self._target_flat.parameter.mul_(0.7).add_(0.01)


def values_to_choose_by(trainer: DQN, batch: dict[str, np.ndarray]) -> torch.Tensor:
    """The values `(batch, actions)` float64 of which the largest choose the next actions."""
    network = copy.deepcopy(trainer.q if trainer.double else trainer.target_q).double()
    choosing: torch.Tensor = network(torch.from_numpy(batch["next_obs"]).double()).detach()
    if trainer.action_masks:
        choosing[torch.from_numpy(batch["next_action_mask"]) == 0] = -torch.inf
    return choosing


def has_a_tie(values: torch.Tensor) -> bool:
    """Whether rounding may decide a next action: the best two of some row are equal to a few of float32's digits."""
    if values.shape[1] == 1:
        return False
    best, second = values.topk(2, dim=1).values.unbind(1)
    return bool((best - second < 1e-6 * best.abs().mean()).any())


def exact_dqn_gradients(trainer: DQN, batch: dict[str, np.ndarray], weights: np.ndarray) -> list[torch.Tensor]:
    q, target_q = copy.deepcopy(trainer.q).double(), copy.deepcopy(trainer.target_q).double()
    obs, next_obs, reward, discount = (
        torch.from_numpy(batch[name]).double() for name in ("obs", "next_obs", "reward", "discount")
    )
    action = torch.from_numpy(batch["action"])
    chosen = values_to_choose_by(trainer, batch).argmax(1)
    rows = torch.arange(len(action))
    target = (reward + discount * target_q(next_obs)[rows, chosen]).detach()
    error = q(obs)[rows, action] - target
    huber = torch.where(error.abs() < 1, error**2 / 2, error.abs() - 0.5)
    parameters = list(q.parameters())
    return list(torch.autograd.grad((huber * torch.from_numpy(weights)).sum() / len(action), parameters))


def assert_dqn_gradients(
    learner: Any, batch: dict[str, np.ndarray], weights: np.ndarray, relative: float = 1e-5
) -> Mapping[str, float]:
    """Compare the gradients of one step of a Learner of `ShowsGradients` with those of float64.

    Returns the step's metrics: none, and no step, where rounding decides the slope of a ReLU or a next action.
    """
    trainer = learner.trainer
    if has_a_kink(trainer.q, torch.from_numpy(batch["obs"])) or has_a_tie(values_to_choose_by(trainer, batch)):
        return {}
    expected = exact_dqn_gradients(trainer, batch, weights)
    metrics: Mapping[str, float] = learner.step(batch, weights).metrics
    trainer._q_flat.gradient.copy_(trainer.optimizer.state[trainer._q_flat.parameter]["momentum_buffer"])
    whole = float(torch.cat([g.flatten() for g in expected]).norm())
    for (name, parameter), gradient in zip(trainer.q.named_parameters(), expected, strict=True):
        assert parameter.grad is not None
        assert_close(parameter.grad, gradient, whole, name, relative)
    return metrics


@each_variant
@pytest.mark.parametrize("threads", [1, 3])
@settings(max_examples=15, deadline=None)
@given(
    obs=sizes, hidden=st.lists(sizes, min_size=1, max_size=3), actions=sizes, rows=st.integers(1, 300),
    double=st.booleans(), dueling=st.booleans(), masked=st.booleans(), norm=st.booleans(),
)  # fmt: skip
@example(obs=4, hidden=[64, 64], actions=2, rows=100, double=True, dueling=False, masked=False, norm=False)
@example(obs=5, hidden=[20], actions=3, rows=300, double=True, dueling=False, masked=False, norm=True)  # two groups
@example(obs=17, hidden=[64, 64, 64], actions=2, rows=300, double=False, dueling=False, masked=False, norm=False)
def test_dqn_gradients_are_those_of_float64(
    variant: str,
    threads: int,
    obs: int,
    hidden: list[int],
    actions: int,
    rows: int,
    double: bool,
    dueling: bool,
    masked: bool,
    norm: bool,
) -> None:
    norm = norm and min(hidden) > 7  # the norm of a few numbers magnifies what rounding has changed
    trainer = ShowsGradients(
        spaces.Box(-5.0, 5.0, (obs,), np.float32), spaces.Discrete(actions),
        hidden_sizes=tuple(hidden), double=double, dueling=dueling, action_masks=masked, layer_norm=norm,
    )  # fmt: skip
    batch, weights = batch_of(rows, rows, obs, actions)
    if masked:
        batch["next_action_mask"] = random_masks(np.random.default_rng(rows), rows, (actions,))
    with kernels(variant):
        learner = NativeLearner(trainer, threads=threads)
        metrics = assert_dqn_gradients(learner, batch, weights, 1e-4 if norm else 1e-5)
    if metrics:
        assert metrics["gradient_norm"] == pytest.approx(float(trainer._q_flat.gradient.norm()), rel=1e-5)


# --- training ---------------------------------------------------------------------------------------------------------


class Small(DQN):
    hidden_sizes = (24, 17)
    target_update_interval = 7
    optimizer_name: str = "Adam"
    optimizer_options: Any = ()  # pairs

    def build(self) -> None:
        super().build()
        optimizer = getattr(torch.optim, self.optimizer_name)
        self.optimizer = optimizer([self._q_flat.parameter], **{"lr": 1e-3, **dict(self.optimizer_options)})


class WithLayerNorm(Small):
    def build_q_network(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 20), nn.LayerNorm(20), nn.Tanh(), nn.Linear(20, 3))


SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "fused Adam": {"optimizer_options": (("fused", True),)},
    "plain maximum": {"double": False},
    "dueling, Polyak": {"dueling": True, "tau": 0.01},
    "Polyak beyond a half": {"tau": 0.75},
    "clipped hard": {"max_grad_norm": 0.05},
    "decay": {"optimizer_options": (("weight_decay", 0.1), ("betas", (0.8, 0.99)), ("eps", 1e-6))},
    "AMSGrad": {"optimizer_options": (("amsgrad", True),)},
    "AdamW": {"optimizer_name": "AdamW", "optimizer_options": (("weight_decay", 0.1),)},
    "SGD": {"optimizer_name": "SGD", "optimizer_options": (("lr", 0.01),)},
    "SGD, Nesterov": {
        "optimizer_name": "SGD",
        "optimizer_options": (("lr", 0.01), ("momentum", 0.9), ("nesterov", True), ("weight_decay", 0.01)),
    },
    "SGD, dampened": {
        "optimizer_name": "SGD",
        "optimizer_options": (("lr", 0.01), ("momentum", 0.8), ("dampening", 0.3)),
    },
}


def test_each_variant_and_count_of_threads_trains_alike() -> None:
    weights = {}
    for variant in VARIANTS:
        for threads in (1, 2):
            trainer = Small(OBS, ACTIONS)
            with kernels(variant):
                learner = NativeLearner(trainer, threads=threads)
            for seed in range(30):
                learner.step(*batch_of(seed, rows=77))
            weights[variant, threads] = trainer._q_flat.parameter.detach()
    for found in weights.values():
        torch.testing.assert_close(found, weights["plain", 1], rtol=0, atol=1e-5)


def test_settings_may_change_between_steps() -> None:
    ours, theirs = (Small(OBS, ACTIONS) for _ in range(2))
    native, reference = NativeLearner(ours), TorchLearner(theirs)
    for step in range(12):
        for trainer in (ours, theirs):
            trainer.optimizer.param_groups[0]["lr"] = 1e-3 * (step + 1)
            trainer.max_grad_norm = 10.0 if step < 6 else 0.1
            trainer.double = step % 2 == 0
            trainer.tau = 1.0 if step < 8 else 0.3
        native.step(*batch_of(step))
        reference.step(*batch_of(step))
    torch.testing.assert_close(ours._q_flat.parameter, theirs._q_flat.parameter, rtol=0, atol=1e-5)
    torch.testing.assert_close(ours._target_flat.parameter, theirs._target_flat.parameter, rtol=0, atol=1e-5)


@each_variant
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("options", [{}, {"double": False}, {"dueling": True, "tau": 0.05}], ids=str)
def test_native_and_torch_train_alike_on_action_masks(options: dict[str, Any], threads: int, variant: str) -> None:
    masked = {"action_masks": True, **options}
    ours, theirs, unmasked = (
        Small(OBS, ACTIONS, **masked),
        Small(OBS, ACTIONS, **masked),
        Small(OBS, ACTIONS, **options),
    )
    with kernels(variant):
        native = NativeLearner(ours, threads=threads)
    reference = TorchLearner(theirs)
    for step in range(20):
        batch, weights = batch_of(step)
        NativeLearner(unmasked).step(batch, weights)
        batch["next_action_mask"] = random_masks(np.random.default_rng(step), 50, (3,))
        found, expected = native.step(batch, weights), reference.step(batch, weights)
        np.testing.assert_allclose(found.priorities, expected.priorities, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours._q_flat.parameter, theirs._q_flat.parameter, rtol=0, atol=1e-5)
    torch.testing.assert_close(ours._target_flat.parameter, theirs._target_flat.parameter, rtol=0, atol=1e-5)
    assert (ours._q_flat.parameter - unmasked._q_flat.parameter).abs().max() > 1e-4, "masks matter"


@pytest.mark.parametrize("double", [True, False])
def test_masks_that_allow_everything_change_no_bit(double: bool) -> None:
    masked, plain = Small(OBS, ACTIONS, double=double, action_masks=True), Small(OBS, ACTIONS, double=double)
    for step in range(10):
        batch, weights = batch_of(step)
        NativeLearner(plain).step(batch, weights)
        NativeLearner(masked).step({**batch, "next_action_mask": np.ones((50, 3), np.uint8)}, weights)
    assert torch.equal(masked._q_flat.parameter, plain._q_flat.parameter)


@pytest.mark.parametrize("double", [True, False])
def test_a_mask_of_nothing_leaves_the_first_action_as_in_torch(double: bool) -> None:
    """Where a task ended nothing is asked, and a discount of 0 must not meet an infinite value."""
    ours, theirs = (Small(OBS, ACTIONS, double=double, action_masks=True) for _ in range(2))
    batch, weights = batch_of(0)
    batch["next_action_mask"] = np.zeros((50, 3), np.uint8)
    found, expected = NativeLearner(ours).step(batch, weights), TorchLearner(theirs).step(batch, weights)
    np.testing.assert_allclose(found.priorities, expected.priorities, rtol=1e-4, atol=1e-5)


def replaced_parameters(trainer: Small) -> None:
    values = {name: value.clone() for name, value in trainer.target_q.state_dict().items()}
    trainer.target_q.load_state_dict(values, assign=True)


@pytest.mark.parametrize("double", [True, False])
def test_a_value_that_is_no_number_is_the_largest_as_in_torch(double: bool) -> None:
    batch, weights = batch_of(0)
    batch["action"] %= 2
    for kind in (NativeLearner, TorchLearner):
        trainer = Small(OBS, ACTIONS, double=double)
        with torch.no_grad():
            for network in (trainer.q, trainer.target_q):
                list(network.parameters())[-1][2] = torch.nan
        with pytest.raises(TrainerError, match="diverged"):
            kind(trainer).step(batch, weights)


@pytest.mark.parametrize(
    "move",
    [
        lambda trainer: trainer.q.double(),
        lambda trainer: trainer.target_q.to(torch.float64).to(torch.float32),
        lambda trainer: trainer.q[-1].half(),
        replaced_parameters,
    ],
    ids=["double", "to and back", "one layer", "assigned"],
)
def test_weights_that_were_moved_are_not_trained_on_where_they_were(move: Callable[[Small], Any]) -> None:
    trainer = Small(OBS, ACTIONS)
    learner = NativeLearner(trainer)
    learner.step(*batch_of(0))
    trainer.q.load_state_dict(trainer.target_q.state_dict())  # values alone: in place
    learner.step(*batch_of(1))
    move(trainer)
    steps = trainer.gradient_steps
    for use in (lambda: learner.step(*batch_of(2)), lambda: learner.loops_natively):
        with pytest.raises(
            TrainerError, match=r"given other memory after the Learner was made.*load_state_dict\(\) without assign"
        ):
            use()
    assert trainer.gradient_steps == steps


def test_torch_is_not_left_to_train_parameters_that_were_replaced() -> None:
    trainer = Small(OBS, ACTIONS)
    learner = TorchLearner(trainer)
    learner.step(*batch_of(0))
    trainer.q.load_state_dict({name: value.clone() for name, value in trainer.q.state_dict().items()}, assign=True)
    with pytest.raises(TrainerError, match="given other memory"):
        learner.step(*batch_of(1))


def test_columns_may_be_tensors_or_strided_and_stay_as_they_are() -> None:
    ours, theirs = Small(OBS, ACTIONS), Small(OBS, ACTIONS)
    batch, weights = batch_of(0)
    kept = copy.deepcopy(batch)
    tensors = {name: torch.from_numpy(column) for name, column in batch.items()}
    strided = {**batch, "obs": np.asfortranarray(batch["obs"])}
    first = NativeLearner(ours).step(tensors, torch.from_numpy(weights))  # type: ignore[arg-type]
    second = NativeLearner(theirs).step(strided, weights)
    assert np.array_equal(first.priorities, second.priorities)
    assert torch.equal(ours._q_flat.parameter, theirs._q_flat.parameter)
    assert all(np.array_equal(batch[name], kept[name]) for name in kept)


def test_images_and_matrices_are_flattened_as_the_network_does() -> None:
    box = spaces.Box(-1.0, 1.0, (4, 5), np.float32)
    ours, theirs = DQN(box, ACTIONS), DQN(box, ACTIONS)
    rng = np.random.default_rng(0)
    batch, weights = batch_of(0)
    for name in ("obs", "next_obs"):
        batch[name] = rng.normal(size=(50, 4, 5)).astype(np.float32)
    found, expected = NativeLearner(ours).step(batch, weights), TorchLearner(theirs).step(batch, weights)
    np.testing.assert_allclose(found.priorities, expected.priorities, rtol=1e-4, atol=1e-5)


# --- bad input --------------------------------------------------------------------------------------------------------


def test_columns_of_another_shape_are_named_with_it() -> None:
    batch, weights = batch_of(0)
    for column, shape, message in (
        ("obs", (50, 7), r"obs must hold 50 rows of 6 numbers; found shape \(50, 7\)"),
        ("discount", (3,), r"discount must hold 50 rows of 1 numbers; found shape \(3,\)"),
    ):
        with pytest.raises(TrainerError, match=message):
            NativeLearner(Small(OBS, ACTIONS)).step({**batch, column: np.zeros(shape, np.float32)}, weights)


def test_masks_of_another_shape_or_dtype_are_named_with_it() -> None:
    batch, weights = batch_of(0)
    for masks, message in (
        (np.ones((50, 4), np.uint8), r"next_action_mask must hold 50 rows of 3 numbers; found shape \(50, 4\)"),
        (np.ones((50, 3), np.float32), "Column 'next_action_mask' must have dtype uint8; found float32"),
    ):
        with pytest.raises(TrainerError, match=message):
            NativeLearner(Small(OBS, ACTIONS, action_masks=True)).step({**batch, "next_action_mask": masks}, weights)


def test_an_empty_batch_and_no_threads_are_refused() -> None:
    batch, weights = batch_of(0, rows=0)
    with pytest.raises(TrainerError, match="at least one transition"):
        NativeLearner(Small(OBS, ACTIONS)).step(batch, weights)
    with pytest.raises(ConfigurationError, match="threads must be at least 1; found 0"):
        NativeLearner(Small(OBS, ACTIONS), threads=0)


# --- what is supported ------------------------------------------------------------------------------------------------


class NetworkOnly(DQN):
    gamma, learning_rate = 0.9, 3e-4

    def build_q_network(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3))

    def get_action(self, obs: torch.Tensor) -> torch.Tensor:
        return super().get_action(obs)


class WithNetwork(DQN):
    network: Any = None

    def build_q_network(self) -> nn.Module:
        found: nn.Module = type(self).network()
        return found


def with_network(make: Callable[[], nn.Module]) -> DQN:
    return type("Named", (WithNetwork,), {"network": staticmethod(make)})(OBS, ACTIONS)  # type: ignore[no-any-return]


def overriding(name: str) -> DQN:
    return type("Own", (DQN,), {name: lambda self, *args: getattr(DQN, name)(self, *args)})(OBS, ACTIONS)  # type: ignore[no-any-return]


def with_optimizer(make: Callable[[list[nn.Parameter]], Any]) -> DQN:
    trainer = DQN(OBS, ACTIONS)
    trainer.optimizer = make([trainer._q_flat.parameter])
    return trainer


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layer(x)
        return result if float(result.sum()) > 0 else -result


class Doubled(nn.Module):
    """A factor that the trace of layers does not hold."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.layer(x)
        return torch.add(hidden, torch.relu(hidden), alpha=2)


class OwnLinear(nn.Linear):
    pass


def frozen() -> nn.Module:
    network = mlp(6, (8,), 3)
    network[0].weight.requires_grad_(False)
    return network


def hooked() -> nn.Module:
    network = mlp(6, (8,), 3)
    network[0].register_forward_hook(lambda *_: None)
    return network


@pytest.mark.parametrize("trainer_class", [DQN, NetworkOnly, Small, WithLayerNorm])
@pytest.mark.parametrize("dueling", [False, True])
def test_networks_and_settings_of_ones_own_are_supported(trainer_class: type[Trainer], dueling: bool) -> None:
    assert NativeLearner.supports(trainer_class(OBS, ACTIONS, dueling=dueling)) is None


@pytest.mark.parametrize("name", ["update_policy", "_compute", "_apply", "finish_step", "end_of_step"])
def test_an_update_rule_of_ones_own_is_not(name: str) -> None:
    trainer = overriding(name)
    reason = NativeLearner.supports(trainer)
    assert reason == f"Own overrides {name}, a part of DQN's update rule"
    with pytest.raises(TrainerError, match=rf"cannot train Own \(unsupported: {reason}\). Use .*TorchLearner"):
        NativeLearner(trainer)


def test_a_method_replaced_on_the_object_is_an_update_rule_of_ones_own() -> None:
    trainer = DQN(OBS, ACTIONS)
    trainer.finish_step = lambda: None  # type: ignore[method-assign]
    assert NativeLearner.supports(trainer) == "DQN overrides finish_step, a part of DQN's update rule"


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: nn.Sequential(nn.Linear(6, 4), nn.GELU(), nn.Linear(4, 3)), "layer '1' of kind 'gelu'"),
        (lambda: nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.5), nn.Linear(4, 3)), "layer '1' of kind 'dropout'"),
        (lambda: nn.Sequential(OwnLinear(6, 3)), "layer '0' of kind 'ownlinear'"),
        (lambda: nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3)), "network 'q' has a buffer '1.running_mean' (3,)"),
        (Branching, "network 'Branching' cannot be traced to layers"),
        (Doubled, "network 'q' computes something else than its layers say"),
        (lambda: mlp(6, (8,), 3).double().float(), None),
        (frozen, "layer '0' has parameters that are frozen"),
        (hooked, "module '0' has hooks"),
    ],
)
def test_networks_beyond_its_layers_are_named(make: Callable[[], nn.Module], reason: str | None) -> None:
    assert NativeLearner.supports(with_network(make)) == reason


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda p: torch.optim.RMSprop(p), "optimizer 'optimizer' of class RMSprop"),
        (lambda p: torch.optim.Adam(p, maximize=True), "option 'maximize' of optimizer 'optimizer'"),
        (lambda p: torch.optim.Adam([nn.Parameter(torch.zeros(3))]), "optimizer 'optimizer' does not step the flat"),
        (lambda p: torch.optim.NAdam(p), "optimizer 'optimizer' of class NAdam"),
    ],
)
def test_optimizers_beyond_its_own_are_named(make: Callable[[Any], Any], reason: str) -> None:
    found = NativeLearner.supports(with_optimizer(make))
    assert found is not None
    assert found.startswith(reason)


class Unrelated:
    def __init__(self) -> None:
        self.policy = nn.Linear(6, 3)

    def get_action(self, obs: torch.Tensor) -> torch.Tensor:
        values: torch.Tensor = self.policy(obs)
        return values.argmax(1)

    def update_policy(self, batch: Batch, weights: torch.Tensor) -> torch.Tensor:
        return batch.reward.abs()


def test_other_trainers_are_named() -> None:
    assert (
        NativeLearner.supports(Unrelated())
        == "the update rule of Unrelated, which is not a DQN, QRDQN, RecurrentDQN, DDPG, TD3, SAC, REDQ, DroQ, CrossQ, "
        "TQC, PPO, A2C or RecurrentPPO"
    )


@pytest.mark.parametrize("threads", [1, 2])
def test_moments_that_fade_away_become_zero_and_other_arithmetic_stays_as_it_was(threads: int) -> None:
    trainer = Small(OBS, ACTIONS)
    learner = NativeLearner(trainer, threads=threads)
    batch, _ = batch_of(0, rows=64)
    idle = np.zeros(64, np.float32)  # importance weights of 0: no gradient
    learner.step(batch, idle)
    smallest = float(np.finfo(np.float32).tiny)
    (state,) = trainer.optimizer.state.values()
    state["exp_avg"].fill_(1.05 * smallest)
    learner.step(batch, idle)
    assert (state["exp_avg"] == 0).all(), "0.945 times the smallest normal number is subnormal"
    assert np.float32(smallest) * np.float32(0.5) > 0
