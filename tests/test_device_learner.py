"""The Learner on SYCL devices and on the emulator of CUDA: gradients against float64, launches, what it refuses."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from references import CUDA
from test_native_actor_critic import (
    assert_alike,
    assert_gradients,
    each_algorithm,
    exact_gradients,
    show_gradients,
)
from test_native_actor_critic import batch_of as actions_batch
from test_native_actor_critic import small as small_actor_critic
from test_native_learner import (
    ACTIONS,
    OBS,
    Residual,
    ShowsGradients,
    SideBySide,
    Skips,
    Small,
    WithLayerNorm,
    assert_dqn_gradients,
    batch_of,
    one_torch_thread,
)
from torch import nn

from pearl import _cuda
from pearl.algorithms import DDPG, DQN, SAC, TD3, Trainer
from pearl.backends.cuda import runtime
from pearl.backends.cuda.device import EMULATOR as EMULATED
from pearl.backends.cuda.learner import CudaLearner
from pearl.backends.sycl.device import sycl_availability, sycl_queue
from pearl.backends.sycl.learner import SyclLearner
from pearl.backends.sycl.runtime import sycl_runtime
from pearl.errors import TrainerError
from pearl.learner.torch_learner import TorchLearner

CPU = sycl_availability("opencl:cpu")
on_sycl = [pytest.mark.sycl, pytest.mark.skipif(not CPU.ok, reason=f"no SYCL CPU device: {CPU.reason}")]
EMULATOR = sycl_availability("fpga_emu")

RELATIVE = 1e-4  # OpenCL's tanh and exp may be some units in the last place off

__all__ = ["one_torch_thread"]  # a fixture that every test here uses
sizes = st.integers(1, 70)
CudaEmulatedLearner = partial(CudaLearner, device=CUDA)
each_learner = pytest.mark.parametrize(
    "make", [pytest.param(SyclLearner, marks=on_sycl), CudaEmulatedLearner], ids=["sycl", "cuda"]
)


# --- gradients --------------------------------------------------------------------------------------------------------


class UsesValuesOften(ShowsGradients):
    """A network of the user's own, whose values several operations take."""

    def build_q_network(self) -> nn.Module:
        skips = Skips(6, 20)
        skips.dropout = nn.Identity()
        return nn.Sequential(nn.LayerNorm(6), skips, nn.ReLU(), Residual(20), SideBySide(20, 20, 3))


@each_learner
def test_gradients_of_values_that_several_operations_take_are_those_of_float64(make: Any) -> None:
    assert_dqn_gradients(make(UsesValuesOften(OBS, ACTIONS)), *batch_of(3), RELATIVE)


@each_learner
@settings(max_examples=30, deadline=None)
@given(
    obs=sizes, hidden=st.lists(sizes, min_size=1, max_size=3), actions=sizes, rows=st.integers(1, 200),
    double=st.booleans(), dueling=st.booleans(), clipped=st.booleans(),
)  # fmt: skip
def test_dqn_gradients_are_those_of_float64(
    make: Any, obs: int, hidden: list[int], actions: int, rows: int, double: bool, dueling: bool, clipped: bool
) -> None:
    trainer = ShowsGradients(
        spaces.Box(-5.0, 5.0, (obs,), np.float32), spaces.Discrete(actions),
        hidden_sizes=tuple(hidden), double=double, dueling=dueling, max_grad_norm=1e6 if clipped else 0.0,
    )  # fmt: skip
    assert_dqn_gradients(make(trainer), *batch_of(rows, rows, obs, actions), RELATIVE)


@each_learner
@each_algorithm
@settings(max_examples=10, deadline=None, derandomize=True)
@given(
    obs=st.integers(1, 40), size=st.integers(1, 9), hidden=st.lists(st.integers(1, 70), min_size=1, max_size=2),
    rows=st.integers(1, 150),
)  # fmt: skip
def test_actor_critic_gradients_are_those_of_float64(
    make: Any, algorithm: type[Trainer], obs: int, size: int, hidden: list[int], rows: int
) -> None:
    boxes = spaces.Box(-4.0, 5.0, (obs,), np.float32), spaces.Box(-1.0, 3.0, (size,), np.float32)
    narrow: dict[str, Any] = {"log_std_bounds": (-1.0, 0.1)} if algorithm is SAC else {}
    trainer: Any = algorithm(*boxes, hidden_sizes=tuple(hidden), scale_observations=True, **narrow)
    trainer.gradient_steps = 1  # TD3 moves its policy in the second step
    show_gradients(trainer)
    batch, weights = actions_batch(rows, rows, obs, size)
    critic, actor = exact_gradients(trainer, batch, weights)
    make(trainer).step(batch, weights)
    assert_gradients(trainer.critic, trainer._critic_flat, trainer.critic_optimizer, critic, RELATIVE)
    assert_gradients(trainer.actor, trainer._actor_flat, trainer.actor_optimizer, actor, RELATIVE)


# --- as a GPU would run it --------------------------------------------------------------------------------------------


def assert_steps_alike(ours: Any, theirs: Any, obs: int, steps: int) -> None:
    """Two Learners of an actor-critic give the same priorities in every step."""
    for seed in range(steps):
        found, expected = (learner.step(*actions_batch(seed, 50, obs, 3)) for learner in (ours, theirs))
        np.testing.assert_allclose(found.priorities, expected.priorities, rtol=1e-4, atol=1e-4)


@contextmanager
def cut_as_on_a_gpu() -> Iterator[None]:
    """Learners share neurons among eight slices of a work-group, and wide matrices among work-groups."""
    module = sycl_runtime().module
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "Learner", partial(module.Learner, slices=8, columns_per_tile=64))
        yield


@pytest.mark.sycl
@pytest.mark.slow
@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    obs=st.integers(1, 200), hidden=st.lists(st.integers(1, 140), min_size=1, max_size=2), rows=st.integers(1, 100),
    dueling=st.booleans(), clipped=st.booleans(),
)  # fmt: skip
def test_dqn_gradients_are_the_same_as_a_gpu_would_share_the_work(
    obs: int, hidden: list[int], rows: int, dueling: bool, clipped: bool
) -> None:
    trainer = ShowsGradients(
        spaces.Box(-5.0, 5.0, (obs,), np.float32), spaces.Discrete(7),
        hidden_sizes=tuple(hidden), dueling=dueling, max_grad_norm=1e6 if clipped else 0.0,
    )  # fmt: skip
    with cut_as_on_a_gpu():
        assert_dqn_gradients(SyclLearner(trainer), *batch_of(rows, rows, obs, 7), RELATIVE)


@pytest.mark.sycl
@each_algorithm
def test_training_is_the_same_as_a_gpu_would_share_the_work(algorithm: type[Trainer]) -> None:
    boxes = spaces.Box(-4.0, 4.0, (100,), np.float32), spaces.Box(-1.0, 3.0, (3,), np.float32)
    ours, theirs = (
        algorithm(*boxes, hidden_sizes=(90, 20), max_grad_norm=5.0, scale_observations=True) for _ in range(2)
    )
    with cut_as_on_a_gpu():
        shared = SyclLearner(ours)
    alone = SyclLearner(theirs)
    assert_steps_alike(shared, alone, obs=100, steps=6)
    assert_alike(ours, theirs, 1e-4)


@pytest.mark.sycl
def test_layers_of_every_kind_are_the_same_as_a_gpu_would_share_the_work() -> None:
    ours, theirs = (WithLayerNorm(OBS, ACTIONS) for _ in range(2))
    with cut_as_on_a_gpu():
        shared = SyclLearner(ours)
    alone = SyclLearner(theirs)
    for seed in range(8):
        found, expected = (learner.step(*batch_of(seed, 40)) for learner in (shared, alone))
        np.testing.assert_allclose(found.priorities, expected.priorities, rtol=1e-4, atol=1e-4)


@pytest.mark.sycl
@pytest.mark.parametrize("cut", [{"slices": -1}, {"slices": 33}, {"columns_per_tile": 40}, {"columns_per_tile": -16}])
def test_a_cut_that_the_kernels_cannot_take_is_refused(cut: dict[str, int]) -> None:
    networks = [(2, [("linear", 0, -1, 3, 0, 6, 0.0)])]
    queue = sycl_queue("cpu")
    parameters = [queue.shared_floats(9), queue.shared_floats(9), None, None]
    with pytest.raises(TrainerError, match="1 to 32 slices and tiles of a multiple of 16 columns; found"):
        sycl_runtime().module.Learner(queue, False, networks, parameters, np.zeros(0, np.float32), 2, 1, None, **cut)


# --- as blocks of threads share the work ------------------------------------------------------------------------------


@contextmanager
def cut_for_threads(slices: int, block_bytes: int = -1, branches: bool = True, columns: int = 32) -> Iterator[None]:
    """Learners on CUDA share features among so many rows of 16 threads, beyond 16 rows in several blocks.

    Blocks use so much memory of their own at most; -1: all that there is. `branches`: DQN's passes run side by side
    where they can. A block moves so many `columns` of weights.
    """
    if slices > 16 and CUDA != EMULATED and torch.cuda.get_device_capability(CUDA)[0] < 9:
        pytest.skip("blocks of this GPU cannot wait for each other")
    cut = partial(_cuda.Learner, slices=slices, block_bytes=block_bytes, branches=branches, columns_per_tile=columns)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_cuda, "Learner", cut)
        yield


@pytest.mark.parametrize("slices", [2, 8, 16, 64, 128])
@pytest.mark.parametrize("hidden", [(37, 256, 150), (260, 181), (4, 300, 5)], ids=str)
def test_gradients_are_those_of_float64_however_blocks_share_the_work(slices: int, hidden: tuple[int, ...]) -> None:
    dueling = hidden[0] != 4
    trainer = ShowsGradients(
        spaces.Box(-5.0, 5.0, (19,), np.float32), spaces.Discrete(7), hidden_sizes=hidden, dueling=dueling,
        double=True, max_grad_norm=1e6 if dueling else 0.0,
    )  # fmt: skip
    with cut_for_threads(slices, columns=96 if slices == 8 else 32):
        assert_dqn_gradients(CudaEmulatedLearner(trainer), *batch_of(slices, 21, 19, 7), RELATIVE)


@pytest.fixture(params=["ascending", "descending", "shuffled"])
def copies(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies to blocks' memory arrive at once, when they are waited for, or one or the other."""
    if CUDA == EMULATED:
        queue = _cuda.EmulatedQueue(256, request.param, 1)
        monkeypatch.setattr(runtime, "_queue", lambda _: queue)


@pytest.mark.usefixtures("copies")
@pytest.mark.parametrize("slices", [8, 16, 32, 128])
@pytest.mark.parametrize("block_bytes", [0, 20_000, 60_000, 110_000, 200_000])
def test_gradients_are_those_of_float64_wherever_weights_and_values_lie(slices: int, block_bytes: int) -> None:
    trainer = ShowsGradients(
        spaces.Box(-5.0, 5.0, (12,), np.float32), spaces.Discrete(6), hidden_sizes=(64, 100, 32), double=True,
        dueling=block_bytes != 60_000,
    )  # fmt: skip
    with cut_for_threads(slices, block_bytes):
        assert_dqn_gradients(CudaEmulatedLearner(trainer), *batch_of(slices, 21, 12, 6), RELATIVE)


@pytest.mark.usefixtures("copies")
@pytest.mark.parametrize("block_bytes", [40_000, 200_000])
@pytest.mark.parametrize("algorithm", [TD3, SAC])
def test_critics_and_actors_train_alike_wherever_weights_and_values_lie(
    algorithm: type[Trainer], block_bytes: int
) -> None:
    boxes = spaces.Box(-4.0, 4.0, (11,), np.float32), spaces.Box(-1.0, 3.0, (5,), np.float32)
    ours, theirs = (algorithm(*boxes, hidden_sizes=(64, 36)) for _ in range(2))
    with cut_for_threads(32 if block_bytes < 200_000 else 16, block_bytes):
        held = CudaEmulatedLearner(ours)
    with cut_for_threads(16, 0):
        in_place = CudaEmulatedLearner(theirs)
    for seed in range(2):  # TD3's actor moves in the second
        found, expected = (learner.step(*actions_batch(seed, 21, 11, 5)) for learner in (held, in_place))
        np.testing.assert_allclose(found.priorities, expected.priorities, rtol=1e-4, atol=1e-4)
    assert_alike(ours, theirs, 1e-4)


@pytest.mark.usefixtures("copies")
@pytest.mark.parametrize(("double", "branches"), [(False, 2), (True, 4)])
def test_passes_side_by_side_are_those_one_after_the_other(double: bool, branches: int) -> None:
    options: dict[str, Any] = {"hidden_sizes": (64, 100, 32), "double": double, "dueling": double}
    spaces_of = spaces.Box(-5.0, 5.0, (12,), np.float32), spaces.Discrete(6)
    torch.manual_seed(3)
    ours = DQN(*spaces_of, **options)
    theirs = copy.deepcopy(ours)
    with cut_for_threads(16):
        side_by_side = CudaEmulatedLearner(ours)
    with cut_for_threads(16, branches=False):
        in_a_row = CudaEmulatedLearner(theirs)
    for seed, batch, expected in ((0, 21, branches), (1, 16, branches), (2, 150, 1), (3, 21, branches)):
        steps = [learner.step(*batch_of(seed, batch, 12, 6)) for learner in (side_by_side, in_a_row)]
        np.testing.assert_array_equal(steps[0].priorities, steps[1].priorities)
        assert in_a_row._kernel.branches == 1
        if CUDA == EMULATED:  # a GPU has room for more blocks
            assert side_by_side._kernel.branches == expected
    assert_alike(ours, theirs, 0.0)


@pytest.mark.usefixtures("copies")
def test_layers_of_every_kind_are_the_same_wherever_values_lie() -> None:
    ours, theirs = (WithLayerNorm(OBS, ACTIONS) for _ in range(2))
    with cut_for_threads(16, 0):
        in_place = CudaEmulatedLearner(theirs)
    held = CudaEmulatedLearner(ours)
    for seed in range(10):
        found, expected = (learner.step(*batch_of(seed, 40)) for learner in (held, in_place))
        np.testing.assert_allclose(found.priorities, expected.priorities, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("slices", [16, 64])
@pytest.mark.parametrize("algorithm", [TD3, SAC])
def test_critics_and_actors_train_alike_however_blocks_share_the_work(algorithm: type[Trainer], slices: int) -> None:
    boxes = spaces.Box(-4.0, 4.0, (11,), np.float32), spaces.Box(-1.0, 3.0, (3,), np.float32)
    ours, theirs = (algorithm(*boxes, hidden_sizes=(190, 200), max_grad_norm=5.0) for _ in range(2))
    with cut_for_threads(slices):
        shared = CudaEmulatedLearner(ours)
    alone = CudaEmulatedLearner(theirs)
    assert_steps_alike(shared, alone, obs=11, steps=2)  # TD3's actor moves in the second
    assert_alike(ours, theirs, 1e-4)


@pytest.mark.parametrize("slices", [1, 7, 24, 144])
def test_slices_that_threads_cannot_take_are_refused(slices: int) -> None:
    trainer = DQN(OBS, ACTIONS, hidden_sizes=(8,))
    with cut_for_threads(slices), pytest.raises(TrainerError, match=r"[Ss]lices.*found"):
        CudaEmulatedLearner(trainer)


# --- settings ---------------------------------------------------------------------------------------------------------


@each_learner
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_temperature_moves_by_any_optimizer(make: Any, momentum: float) -> None:
    trainers = [small_actor_critic(SAC) for _ in range(2)]
    for trainer in trainers:
        trainer.temperature_optimizer = torch.optim.SGD([trainer.log_alpha], lr=0.1, momentum=momentum)
    learners = make(trainers[0]), TorchLearner(trainers[1])
    for seed in range(10):
        for learner in learners:
            learner.step(*actions_batch(seed, rows=75))
    assert abs(float(trainers[1].log_alpha)) > 0.01
    assert float(trainers[0].log_alpha) == pytest.approx(float(trainers[1].log_alpha), rel=1e-3)


# --- launches ---------------------------------------------------------------------------------------------------------


@each_learner
@pytest.mark.parametrize(
    ("algorithm", "changed", "launches"),
    [
        (DQN, {"max_grad_norm": 0.0}, 2),
        (DQN, {"max_grad_norm": 10.0}, 3),
        (DDPG, {"max_grad_norm": 0.0}, 4),
        (TD3, {"max_grad_norm": 0.0, "policy_delay": 1}, 4),
        (SAC, {"max_grad_norm": 0.0, "temperature": 0.2}, 4),
        (SAC, {"max_grad_norm": 0.0}, 5),
    ],
)
def test_a_step_is_few_launches_whatever_the_network(
    make: Any, algorithm: type[Trainer], changed: dict[str, Any], launches: int
) -> None:
    for hidden in ((8,), (32, 32, 32)):
        if algorithm is DQN:
            learner = make(DQN(OBS, ACTIONS, hidden_sizes=hidden, **changed))
            batch = batch_of(0)
        else:
            space = spaces.Box(-1.0, 2.0, (2,), np.float32)
            learner = make(algorithm(OBS, space, hidden_sizes=hidden, **changed))
            batch = actions_batch(0)
        learner.step(*batch)
        before = learner.queue.launches
        learner.step(*batch)
        assert learner.queue.launches - before == launches


# --- what it refuses --------------------------------------------------------------------------------------------------


class SharesALayer(Small):
    def build_q_network(self) -> nn.Module:
        layer = nn.Linear(6, 6)
        return nn.Sequential(layer, nn.ReLU(), layer, nn.Linear(6, 3))


class OwnNoise(TD3):
    def draw_noise(self, rows: int, draw: int) -> torch.Tensor:
        return torch.zeros(rows, self.action_size)


@pytest.mark.sycl
def test_what_is_unsupported_is_named() -> None:
    assert SyclLearner.supports(Small(OBS, ACTIONS)) is None
    assert "share their parameters" in str(SyclLearner.supports(SharesALayer(OBS, ACTIONS)))
    space = spaces.Box(-1.0, 2.0, (2,), np.float32)
    assert SyclLearner.supports(OwnNoise(OBS, space)) == "OwnNoise overrides draw_noise"
    with pytest.raises(TrainerError, match="unsupported: OwnNoise overrides draw_noise"):
        SyclLearner(OwnNoise(OBS, space))


# --- the same kernels on the emulator ---------------------------------------------------------------------------------


@pytest.mark.sycl
@pytest.mark.slow
@pytest.mark.fpga
@pytest.mark.skipif(not EMULATOR.ok, reason=f"no FPGA emulator: {EMULATOR.reason}")
def test_the_same_kernels_run_on_the_emulator() -> None:
    trainer = ShowsGradients(OBS, ACTIONS, hidden_sizes=(20, 9), dueling=True)
    assert_dqn_gradients(SyclLearner(trainer, device="fpga_emu"), *batch_of(3, 20), RELATIVE)
