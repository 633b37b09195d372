"""Networks of images and of bytes in the native learner and in native policies, against torch in float64."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import assume, given, reject, settings
from hypothesis import strategies as st
from test_native_learner import has_a_kink, one_torch_thread, random_masks
from test_native_learner import kernels as learner_kernels
from torch import nn

from pearl import _native
from pearl.actors.native_policy import NativePolicy
from pearl.actors.policy_plan import read_policy
from pearl.algorithms import DQN, PPO
from pearl.algorithms.networks import DuelingHead, ImpalaCNN, ResidualBlock, ScaleBytes
from pearl.backends.cpu.learner import NativeLearner
from pearl.backends.cpu.rollout_learner import NativeRolloutLearner
from pearl.errors import TrainerError
from pearl.learner.flat import FlatParameters
from pearl.learner.native_plan import UnsupportedError, read_network, weights_of
from pearl.learner.torch_learner import TorchLearner

VARIANTS = _native.learner_kernel_variants()
ACTIONS = spaces.Discrete(3)
each_variant = pytest.mark.parametrize("variant", VARIANTS)
pytestmark = pytest.mark.usefixtures(one_torch_thread.__name__)


def pixels(*shape: int) -> spaces.Box:
    return spaces.Box(0, 255, shape, np.uint8)


def assert_close(found: np.ndarray | torch.Tensor, expected: torch.Tensor, name: str, whole: float = 0.0) -> None:
    """Relative to the tensor, and to a tenth of the `whole` of which it is a part."""
    difference = float((torch.as_tensor(found).double() - expected).detach().norm())
    size = float(expected.detach().norm())
    assert difference <= 1e-5 * (size + 0.1 * whole) + 1e-9, f"{name}: {difference} of {size}"


# --- gradients of networks --------------------------------------------------------------------------------------------


def assert_exact(module: nn.Module, x: torch.Tensor) -> None:
    """Outputs and gradients of `module`, which are those of float64, for `x`, floats or bytes."""
    flat = FlatParameters(module)
    exact = copy.deepcopy(module).double()
    of_bytes = x.dtype == torch.uint8
    expected = exact(x.double() / 255 if of_bytes else x.double())
    slopes = torch.randn(expected.shape)
    expected.backward(slopes.double())
    network = read_network("network", module, tuple(x.shape[1:]), flat, images=True, of_bytes=of_bytes)
    assert network.takes_bytes == of_bytes
    assert_close(network.forward(weights_of(flat), x.numpy()), expected, "outputs")
    of_parameters, _ = network.gradients(weights_of(flat), x.numpy(), slopes.numpy())
    flat.parameter.grad.copy_(torch.from_numpy(of_parameters))  # type: ignore[union-attr]
    whole = float(torch.cat([p.grad.flatten() for p in exact.parameters() if p.grad is not None]).norm())
    for (name, parameter), twin in zip(module.named_parameters(), exact.parameters(), strict=True):
        assert parameter.grad is not None
        assert twin.grad is not None
        assert_close(parameter.grad, twin.grad, name, whole)


def random_images(rows: int, shape: tuple[int, ...], of_bytes: bool) -> torch.Tensor:
    return torch.randint(0, 256, (rows, *shape), dtype=torch.uint8) if of_bytes else torch.randn(rows, *shape)


def assert_exact_with_linear(layers: list[nn.Module], x: torch.Tensor) -> None:
    """With a linear layer behind the others. Rejects examples near a kink, or with kernels larger than their input."""
    try:
        width = nn.Sequential(*layers)(torch.zeros(1, *x.shape[1:])).shape[1]
    except RuntimeError:
        reject()
    module = nn.Sequential(*layers, nn.Linear(width, 5))
    assume(not has_a_kink(module, x))
    assert_exact(module, x)


windows = st.tuples(st.integers(1, 5), st.integers(1, 3), st.integers(0, 3))  # kernel, stride, padding
channel_counts = st.sampled_from([1, 3, 4, 7, 16, 20, 33])


@each_variant
@settings(max_examples=25, deadline=None, derandomize=True)  # near ties of a pooling are rare, but not impossible
@given(
    shape=st.tuples(st.sampled_from([1, 2, 3, 4, 6]), st.integers(7, 13), st.integers(7, 13)),
    tall=windows, wide=windows, second=windows, channels=st.tuples(channel_counts, channel_counts),
    bias=st.booleans(), of_bytes=st.booleans(), rows=st.sampled_from([1, 2, 7, 33]), pools=st.booleans(),
)  # fmt: skip
def test_convolutions_and_their_gradients_are_those_of_float64(
    variant: str, shape: tuple[int, int, int], tall: tuple[int, ...], wide: tuple[int, ...], second: tuple[int, ...],
    channels: tuple[int, int], bias: bool, of_bytes: bool, rows: int, pools: bool,
) -> None:  # fmt: skip
    torch.manual_seed(rows)
    kernel, stride, padding = zip(tall, wide, strict=True)
    first = nn.Conv2d(shape[0], channels[0], kernel, stride, padding, bias=bias)
    between: list[nn.Module] = [nn.MaxPool2d((2, 3), (1, 2), (1, 0)), nn.ReLU()] if pools else [nn.ReLU()]
    layers = [ScaleBytes(), first, *between, nn.Conv2d(channels[0], channels[1], *second), nn.Flatten()]
    with learner_kernels(variant):
        assert_exact_with_linear(layers, random_images(rows, shape, of_bytes))


@pytest.mark.skipif("amx" not in VARIANTS, reason="needs AMX")
@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    run=st.sampled_from([(4, 8), (8, 4), (32, 1), (16, 4), (4, 24)]), tall=st.integers(1, 5),
    height=st.integers(5, 9), width=st.integers(24, 60), strides=st.tuples(st.integers(1, 3), st.integers(1, 4)),
    channels=st.sampled_from([16, 32, 48]), bias=st.booleans(), rows=st.sampled_from([1, 5]), size=st.floats(-8, 8),
)  # fmt: skip
def test_convolutions_of_bytes_in_amx_lose_no_digits(
    run: tuple[int, int], tall: int, height: int, width: int, strides: tuple[int, int], channels: int, bias: bool,
    rows: int, size: float,
) -> None:  # fmt: skip
    torch.manual_seed(width)
    layer = nn.Conv2d(run[0], channels, (tall, run[1]), strides, bias=bias)
    with torch.no_grad():
        layer.weight *= 10.0**size
    x = torch.randint(0, 256, (rows, run[0], height, width), dtype=torch.uint8)
    count = math.prod(layer(x.float()).shape[1:])
    last = nn.Linear(count, 30, bias=False)
    module = nn.Sequential(ScaleBytes(), layer, nn.Flatten(), last)
    assert_exact(module, x)
    flat = FlatParameters(module)
    of_one = []
    for variant in ("amx", "avx512"):
        with learner_kernels(variant):
            network = read_network("network", module, tuple(x.shape[1:]), flat, images=True, of_bytes=True)
        with torch.no_grad():  # single numbers of the convolution
            last.weight.zero_()
            last.weight[range(30), [7 * i * count // 211 for i in range(30)]] = 1.0
        of_one.append(network.forward(weights_of(flat), x.numpy()))
    exact = copy.deepcopy(module).double()(x.double() / 255).detach().numpy()
    most = float(layer.weight.detach().abs().sum(dim=(1, 2, 3)).max())
    for found in of_one:
        np.testing.assert_allclose(found, exact, rtol=0, atol=3e-7 * most + 1e-7)


@pytest.mark.skipif("amx" not in VARIANTS, reason="needs AMX")
@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    size=st.tuples(st.integers(7, 13), st.integers(7, 13)), tall=windows, wide=windows, last=windows,
    channels=st.tuples(st.sampled_from([32, 64, 96]), st.sampled_from([32, 64])), bias=st.booleans(),
    rows=st.sampled_from([12, 16, 17, 31, 32, 45]), of_bytes=st.booleans(),
)  # fmt: skip
def test_convolutions_of_a_panels_images_together_in_amx_are_exact(
    size: tuple[int, int], tall: tuple[int, ...], wide: tuple[int, ...], last: tuple[int, ...],
    channels: tuple[int, int], bias: bool, rows: int, of_bytes: bool,
) -> None:  # fmt: skip
    torch.manual_seed(rows)
    kernel, stride, padding = zip(tall, wide, strict=True)
    first = nn.Conv2d(4, 32, (2, 8) if of_bytes else 1, bias=bias)  # of bytes: in AMX too
    middle = nn.Conv2d(32, channels[0], kernel, stride, padding, bias=bias)
    layers = [ScaleBytes(), first, nn.ReLU(), middle, nn.ReLU(), nn.Conv2d(*channels, *last), nn.Flatten()]
    shape = (4, size[0], size[1] + (7 if of_bytes else 0))
    assert_exact_with_linear(layers, random_images(rows, shape, of_bytes))


def still_frames(rows: int, shape: tuple[int, ...], moving: float) -> torch.Tensor:
    """Stacked frames of which few bytes change from one to the next, on a background of its own for each image."""
    images = torch.randint(0, 256, (rows, 1, 1, 1)).expand(rows, *shape)
    return torch.where(torch.rand(images.shape) < moving, torch.randint(0, 256, images.shape), images).to(torch.uint8)


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name.startswith("avx")])
@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    first=st.sampled_from([(4, 8, 4), (4, 16, 8), (4, 4, 4), (2, 8, 8), (16, 1, 1)]), tall=windows, wide=windows,
    last=windows, size=st.tuples(st.integers(4, 9), st.integers(4, 9)),
    channels=st.tuples(st.sampled_from([32, 64]), st.sampled_from([64, 128])), bias=st.booleans(),
    rows=st.sampled_from([1, 7, 9, 33]), moving=st.sampled_from([0.0, 0.05, 0.6]),
)  # fmt: skip
def test_convolutions_that_leave_out_zeros_are_those_of_float64(
    variant: str, first: tuple[int, int, int], tall: tuple[int, ...], wide: tuple[int, ...], last: tuple[int, ...],
    size: tuple[int, int], channels: tuple[int, int], bias: bool, rows: int, moving: float,
) -> None:  # fmt: skip
    torch.manual_seed(rows)
    frames, columns, stride = first
    kernel, strides, padding = zip(tall, wide, strict=True)
    begin = nn.Conv2d(frames, channels[0], (3, columns), (2, stride), bias=bias)
    middle = nn.Conv2d(channels[0], channels[1], kernel, strides, padding, bias=bias)
    layers = [ScaleBytes(), begin, nn.ReLU(), middle, nn.ReLU(), nn.Conv2d(channels[1], 64, *last), nn.ReLU()]
    shape = (frames, 2 * size[0] + 1, (size[1] - 1) * stride + columns)
    with learner_kernels(variant):
        assert_exact_with_linear([*layers, nn.Flatten()], still_frames(rows, shape, moving))


@each_variant
def test_no_images_have_no_outputs_and_gradients_of_zero(variant: str) -> None:
    layers = nn.Conv2d(4, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 2), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5)
    module = nn.Sequential(ScaleBytes(), *layers)
    flat = FlatParameters(module)
    with learner_kernels(variant):
        network = read_network("network", module, (4, 12, 12), flat, images=True, of_bytes=True)
    none = np.empty((0, 4, 12, 12), np.uint8)
    assert network.forward(weights_of(flat), none).shape == (0, 5)
    assert not network.gradients(weights_of(flat), none, np.empty((0, 5), np.float32))[0].any()


class Branches(nn.Module):
    """A feature map used thrice, with another layout on each way."""

    def __init__(self) -> None:
        super().__init__()
        self.begin, self.left = nn.Conv2d(2, 6, 3, padding=1), nn.Conv2d(6, 6, 5, padding=2)
        self.right, self.end = nn.Conv2d(6, 6, 1), nn.Linear(6 * 4 * 5, 4)
        self.pool = nn.MaxPool2d(3, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        begun = self.begin(x)
        joined = torch.relu(self.left(begun)) - self.right(torch.relu(begun)) + begun
        result: torch.Tensor = self.end(torch.flatten(self.pool(joined), 1))
        return result


class WideBranches(nn.Module):
    """Bytes that two convolutions take, and the result of a ReLU that three operations take; channels fill vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.begin, self.left = nn.Conv2d(16, 32, 1), nn.Conv2d(32, 32, 3, padding=1)
        self.right, self.wide = nn.Conv2d(32, 32, 1), nn.Conv2d(32, 3, 7, padding=3)
        self.beside = nn.Conv2d(16, 32, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        begun = torch.relu(self.begin(x))
        early = begun - self.beside(x)
        joined = torch.relu(self.left(begun)) + early
        # The last convolution needs the widest margins, of maps that two sums lie before.
        return torch.flatten(self.wide(joined - self.right(begun)), 1)


@each_variant
@pytest.mark.parametrize("rows", [1, 9])
def test_branches_residual_blocks_and_dueling_heads_are_exact(variant: str, rows: int) -> None:
    torch.manual_seed(0)
    with learner_kernels(variant):
        assert_exact(Branches(), torch.randn(rows, 2, 8, 9))
        wide = nn.Sequential(ScaleBytes(), WideBranches(), nn.Linear(3 * 5 * 4, 3))
        assert_exact(wide, still_frames(rows, (16, 5, 4), 0.05))
        blocks = nn.Sequential(nn.Conv2d(1, 5, 3), nn.ReLU(), ResidualBlock(5), nn.Flatten(), nn.Linear(5 * 6 * 6, 3))
        assert_exact(blocks, torch.randn(rows, 1, 8, 8))
        impala = nn.Sequential(ImpalaCNN((3, 16, 11), 24), DuelingHead(24, 4, 16))
        assert_exact(impala, torch.randint(0, 256, (rows, 3, 16, 11), dtype=torch.uint8))
        vectors = nn.Sequential(ScaleBytes(), nn.Flatten(), nn.Linear(30, 9), nn.Tanh(), nn.Linear(9, 2))
        assert_exact(vectors, torch.randint(0, 256, (rows, 5, 6), dtype=torch.uint8))


@each_variant
@pytest.mark.parametrize(
    "layers",
    [
        (nn.Conv2d(16, 48, 1),),
        (nn.Conv2d(16, 16, 1, padding=(0, 1)),),
        (nn.Conv2d(16, 16, 1, padding=(1, 0)),),
        (nn.Conv2d(16, 16, (1, 5)),),
        (nn.Conv2d(16, 16, 1), nn.ReLU(), nn.Conv2d(16, 32, (1, 2)), nn.ReLU()),
    ],
    ids=["48 channels", "padded columns", "padded rows", "80 bytes at once", "steps of 16"],
)
def test_sizes_that_kernels_do_not_take_as_they_are_are_exact(variant: str, layers: tuple[nn.Module, ...]) -> None:
    torch.manual_seed(0)
    x = still_frames(9, (16, 5, 5), 0.05)
    begin = nn.Sequential(ScaleBytes(), *copy.deepcopy(layers), nn.Flatten())
    with learner_kernels(variant):
        assert_exact(nn.Sequential(*begin, nn.Linear(begin(x).shape[1], 3)), x)


def test_the_first_of_equal_numbers_takes_the_gradient_of_a_pooling() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(1, 3, 1), nn.ReLU(), nn.MaxPool2d(3, 2, 1), nn.Flatten(), nn.Linear(3 * 9, 2))
    with torch.no_grad():
        module[0].bias[0] = -9.0  # all zeros behind the ReLU
    assert_exact(module, torch.randint(0, 2, (4, 1, 6, 6)).float())


# --- training ---------------------------------------------------------------------------------------------------------


def batch_of(observations: spaces.Box, rows: int, seed: int = 0) -> tuple[dict[str, np.ndarray], np.ndarray]:
    rng = np.random.default_rng(seed)
    shape = (rows, *observations.shape)
    of_bytes = observations.dtype == np.uint8
    obs, next_obs = (
        rng.integers(0, 256, shape, np.uint8) if of_bytes else rng.random(shape, np.float32) for _ in range(2)
    )
    columns = {
        "obs": obs,
        "action": rng.integers(0, 3, rows),
        "reward": rng.normal(size=rows).astype(np.float32),
        "next_obs": next_obs,
        "discount": np.where(rng.random(rows) < 0.2, 0, 0.99).astype(np.float32),
    }
    return columns, rng.uniform(0.1, 1.0, rows).astype(np.float32)


class ShowsGradients(DQN):
    """SGD's momentum is, after one step, the gradient itself."""

    max_grad_norm = 0.0

    def build(self) -> None:
        super().build()
        self.optimizer = torch.optim.SGD([self._q_flat.parameter], lr=1e-3, momentum=0.9)
        with torch.no_grad():  # a target network of its own, so that mixing the two up shows
            self._target_flat.parameter.mul_(0.7).add_(0.01)


def exact_gradients(trainer: DQN, batch: dict[str, np.ndarray], weights: np.ndarray) -> list[torch.Tensor]:
    q, target_q = copy.deepcopy(trainer.q).double(), copy.deepcopy(trainer.target_q).double()
    obs, next_obs = (
        torch.from_numpy(batch[name]).double() / (255 if batch[name].dtype == np.uint8 else 1)
        for name in ("obs", "next_obs")
    )
    reward, discount = (torch.from_numpy(batch[name]).double() for name in ("reward", "discount"))
    action, rows = torch.from_numpy(batch["action"]), torch.arange(len(weights))
    chosen = (q if trainer.double else target_q)(next_obs).argmax(1)
    target = (reward + discount * target_q(next_obs)[rows, chosen]).detach()
    losses = nn.functional.smooth_l1_loss(q(obs)[rows, action], target, reduction="none")
    loss = (losses * torch.from_numpy(weights)).sum() / len(weights)
    return list(torch.autograd.grad(loss, list(q.parameters())))


@each_variant
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(
    ("observations", "rows", "options"),
    [
        (pixels(4, 36, 38), 1, {}),
        (pixels(2, 36, 36), 33, {"double": False, "dueling": True, "hidden_sizes": (20,)}),
        (spaces.Box(0, 1, (1, 40, 36), np.float32), 7, {}),
        (pixels(3, 12, 9), 40, {"cnn": "impala", "dueling": True, "hidden_sizes": (16,)}),
        (pixels(40), 150, {"hidden_sizes": (24,)}),
    ],
    ids=["nature", "dueling", "floats", "impala", "vectors of bytes"],
)
def test_gradients_of_dqn_from_pixels_are_those_of_float64(
    variant: str, threads: int, observations: spaces.Box, rows: int, options: dict[str, Any]
) -> None:
    trainer = ShowsGradients(observations, ACTIONS, **options)
    batch, weights = batch_of(observations, rows)
    expected = exact_gradients(trainer, batch, weights)
    with learner_kernels(variant):
        NativeLearner(trainer, threads=threads).step(batch, weights)
    trainer._q_flat.gradient.copy_(trainer.optimizer.state[trainer._q_flat.parameter]["momentum_buffer"])
    whole = float(torch.cat([g.flatten() for g in expected]).norm())
    for (name, parameter), gradient in zip(trainer.q.named_parameters(), expected, strict=True):
        assert parameter.grad is not None
        assert_close(parameter.grad, gradient, name, whole)


@pytest.mark.parametrize(
    "options", [{"cnn": "nature"}, {"cnn": "impala"}, {"action_masks": True, "double": False}], ids=str
)
def test_training_follows_torch_and_equal_threads_give_equal_bits(options: dict[str, Any]) -> None:
    box = pixels(2, 36, 36)
    made = [DQN(box, ACTIONS, target_update_interval=3, learning_rate=1e-4, **options) for _ in range(4)]
    natives = [NativeLearner(trainer, threads=threads) for trainer, threads in zip(made, (1, 3, 3), strict=False)]
    reference = TorchLearner(made[3])
    for seed in range(6):
        batch, weights = batch_of(box, 35 if seed < 4 else 13, seed)
        batch["next_action_mask"] = random_masks(np.random.default_rng(seed), len(weights), (int(ACTIONS.n),))
        found = [learner.step(batch, weights).priorities for learner in natives]
        expected = reference.step(batch, weights).priorities
        for priorities in found:
            np.testing.assert_allclose(priorities, expected, rtol=1e-3, atol=1e-4)
        assert np.array_equal(found[1], found[2])
    one, two, twin, theirs = (trainer._q_flat.parameter.detach() for trainer in made)
    assert torch.equal(two, twin)
    for weights_found in (one, two):
        torch.testing.assert_close(weights_found, theirs, rtol=0, atol=2e-4)


def test_batches_larger_than_a_group_of_transitions_add_up() -> None:
    box = pixels(1, 36, 36)
    ours, theirs = (ShowsGradients(box, ACTIONS) for _ in range(2))
    batch, weights = batch_of(box, 300)
    NativeLearner(ours).step(batch, weights)
    TorchLearner(theirs).step(batch, weights)
    found, expected = (t.optimizer.state[t._q_flat.parameter]["momentum_buffer"] for t in (ours, theirs))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * float(expected.norm()))


def test_observations_of_another_dtype_or_shape_are_named() -> None:
    box = pixels(1, 36, 36)
    batch, weights = batch_of(box, 4)
    learner = NativeLearner(DQN(box, ACTIONS))
    with pytest.raises(TrainerError, match="Column 'obs' must have dtype uint8; found float32"):
        learner.step({**batch, "obs": batch["obs"].astype(np.float32)}, weights)
    with pytest.raises(TrainerError, match=r"next_obs must hold 4 rows of 1296 numbers; found shape \(4, 1, 36, 35\)"):
        learner.step({**batch, "next_obs": batch["next_obs"][..., :-1].copy()}, weights)


# --- policies ---------------------------------------------------------------------------------------------------------


class InTorch(DQN):
    """A class with code of its own: its networks are made by torch."""

    def own_method(self) -> int:
        return 1


@pytest.mark.parametrize("kind", [DQN, InTorch])
@pytest.mark.parametrize(
    ("observations", "options"),
    [(pixels(4, 36, 38), {}), (pixels(3, 12, 9), {"cnn": "impala", "dueling": True}), (pixels(5, 6), {})],
    ids=["nature", "impala", "matrices of bytes"],
)
def test_native_policies_act_as_torch_does(kind: type[DQN], observations: spaces.Box, options: dict[str, Any]) -> None:
    trainer = kind(observations, ACTIONS, seed=2, **options)
    policy = NativePolicy(read_policy(trainer))
    for rows in (1, 3, 40, 2):
        obs = batch_of(observations, rows, seed=rows)[0]["obs"]
        with torch.no_grad():
            values = trainer.q(torch.from_numpy(obs))
        np.testing.assert_allclose(policy.values(obs), values.numpy(), rtol=1e-4, atol=1e-5)
        assert np.array_equal(policy.act(obs), policy.values(obs).argmax(1))


@each_variant
@pytest.mark.parametrize("moving", [0.05, 1.0])
def test_an_image_that_was_changed_in_place_is_read_again(variant: str, moving: float) -> None:
    torch.manual_seed(0)
    box = pixels(4, 36, 36)
    trainers = [DQN(box, ACTIONS, seed=2) for _ in range(2)]
    batches = [batch_of(box, 1, seed)[0] for seed in range(2)]
    for batch in batches:
        for name in ("obs", "next_obs"):
            batch[name] = still_frames(1, box.shape, moving).numpy()
    one = {name: column.copy() for name, column in batches[0].items()}
    weights = np.ones(1, np.float32)
    with learner_kernels(variant):
        policy, fresh = (NativePolicy(read_policy(trainer)) for trainer in trainers)
        policy.values(one["obs"])
        in_place, others = (NativeLearner(trainer) for trainer in trainers)
    for batch in batches:
        for name, column in one.items():
            column[:] = batch[name]
        assert np.array_equal(in_place.step(one, weights).priorities, others.step(batch, weights).priorities)
    assert torch.equal(*(trainer._q_flat.parameter for trainer in trainers))
    assert np.array_equal(policy.values(one["obs"]), fresh.values(batches[1]["obs"]))


# --- what is supported ------------------------------------------------------------------------------------------------


def with_layers(*layers: nn.Module, observations: spaces.Box | None = None) -> DQN:
    box = pixels(2, 12, 12) if observations is None else observations
    with torch.no_grad():
        width = nn.Sequential(*layers)(torch.zeros(1, *box.shape, dtype=torch.uint8)).flatten(1).shape[1]
    network = nn.Sequential(*layers, nn.Flatten(), nn.Linear(width, 3))
    own = type("Own", (DQN,), {"build_q_network": lambda self: copy.deepcopy(network)})
    trainer: DQN = own(box, ACTIONS)
    return trainer


class Halved(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.float() / 2


@pytest.mark.parametrize(
    ("layers", "reason"),
    [
        ([ScaleBytes(), nn.Conv2d(2, 4, 3, (2, 1), (0, 2)), nn.ReLU(), nn.MaxPool2d(2)], None),
        ([ScaleBytes(), nn.Conv2d(2, 4, 3, padding="valid")], "layer '1', Conv2d(2, 4, kernel_size=(3, 3), stride=(1"),
        ([ScaleBytes(), nn.Conv2d(2, 4, 3, dilation=2)], "layer '1', Conv2d("),
        ([ScaleBytes(), nn.Conv2d(2, 4, 3, groups=2)], "layer '1', Conv2d("),
        ([ScaleBytes(), nn.Conv2d(2, 4, 3, padding=1, padding_mode="circular")], "layer '1', Conv2d("),
        ([ScaleBytes(), nn.Conv2d(2, 4, 3), nn.MaxPool2d(3, ceil_mode=True)], "layer '2', MaxPool2d("),
        ([ScaleBytes(), nn.Conv2d(2, 4, 3), nn.AvgPool2d(3)], "layer '2' of kind 'avgpool2d' of images"),
        ([ScaleBytes(), nn.Conv2d(2, 4, 3), nn.Tanh()], "layer '2' of kind 'tanh' of images"),
        ([ScaleBytes(), nn.Conv2d(2, 4, 3), nn.Flatten(2)], "layer '2' of kind 'flatten' of images"),
        ([ScaleBytes(), nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4)], "network 'q' has a buffer '2.running_mean' (4,)"),
        ([Halved(), nn.Conv2d(2, 4, 3)], "layer 'float_1' takes bytes that ScaleBytes has not scaled"),
    ],
)
def test_layers_of_images_beyond_its_own_are_named(layers: list[nn.Module], reason: str | None) -> None:
    found = NativeLearner.supports(with_layers(*layers))
    assert found == reason if reason is None else found is not None and found.startswith(reason)


def test_other_algorithms_and_engines_go_on_refusing_images() -> None:
    box = pixels(2, 36, 36)
    assert NativeRolloutLearner.supports(PPO(box, ACTIONS)) == "observations of unsigned bytes"
    floats = spaces.Box(0, 1, (2, 36, 36), np.float32)
    assert NativeRolloutLearner.supports(PPO(floats, ACTIONS)) == "layer '0.0' of kind 'scalebytes'"
    with pytest.raises(UnsupportedError, match="observations of unsigned bytes"):
        read_policy(PPO(box, ACTIONS))


@pytest.mark.parametrize(
    ("options", "shape", "message"),
    [
        ({"cnn": "resnet"}, (4, 36, 36), r"DQN.cnn must be \"nature\" or \"impala\"; found 'resnet'"),
        ({"layer_norm": True}, (4, 36, 36), r"DQN.layer_norm is True, which normalises .* of an MLP; .* cnn='nature'"),
        ({"layer_norm": 1}, (4,), r"layer_norm.*True or False"),
        ({"cnn": "impala"}, (4,), r"DQN.cnn is 'impala', which takes images .* of at least 8 x 8 .* shape \(4,\)"),
        ({"cnn": "impala"}, (3, 7, 9), r"at least 8 x 8 pixels; the observations have shape \(3, 7, 9\)"),
        ({"cnn": "impala"}, (16, 16, 3), r"look like images \(height, width, channels\); the Impala CNN needs"),
    ],
)
def test_networks_that_do_not_fit_the_observations_are_refused(
    options: dict[str, Any], shape: tuple[int, ...], message: str
) -> None:
    with pytest.raises(TrainerError, match=message):
        DQN(pixels(*shape), ACTIONS, **options)


def test_ill_formed_operations_on_images_are_refused() -> None:
    window = (1, 6, 6, 3, 3, 1, 1, 0, 0)  # 4 x 4 positions
    conv, flatten = ("conv2d", 0, 32, 0, -1, window), ("flatten", 1, -1, 32, -1, -1, 0.0)
    linear = ("linear", 2, -1, 2, 18, -1, 0.0)
    make: Callable[..., Any] = _native.Network
    assert make(36, [conv, flatten, linear], 18 + 64, False).outputs == 2
    for size, operations, parameters, message in (
        (36, [conv, flatten], 82, "must be followed by another operation"),
        (36, [conv, ("linear", 1, -1, 2, 18, -1, 0.0)], 82, "must come before the one operation flatten"),
        (35, [conv, flatten, linear], 82, r"takes \(1, 6, 6\); the network has 35 inputs"),
        (36, [conv, flatten, linear], 81, "needs parameters beyond the vector's 81"),
        (36, [("conv2d", 0, 33, 0, -1, window), flatten, linear], 82, "16 positions for each channel; found 33"),
        (36, [("conv2d", 0, 32, 0, -1, (1, 6, 6, 7, 3, 1, 1, 0, 0)), flatten, linear], 82, "a kernel that fits"),
        (36, [("conv2d", 0, 32, 0, -1, (1, 6, 6, 3, 3, 0, 1, 0, 0)), flatten, linear], 82, "sizes from 1 to"),
        (36, [("maxpool2d", 0, 16, -1, -1, (1, 6, 6, 3, 3, 1, 1, 2, 0)), flatten, linear], 82, "at most half"),
        (36, [conv, ("conv2d", 1, 8, 0, -1, (2, 4, 4, 3, 3, 1, 1, 0, 0)), flatten], 82, "parameters of its own"),
        (36, [("relu", 0, -1, 36, -1, -1, 0.0), conv, flatten], 82, "takes the results of convolutions"),
        (36, [conv, flatten, ("linear", 1, -1, 2, 18, -1, 0.0)], 82, "takes an image that is not flattened"),
    ):
        with pytest.raises(TrainerError, match=message):
            make(size, operations, parameters, False)
