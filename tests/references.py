"""What the algorithms' tests share: random transitions, and networks and gradient descent written out in float64."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from pearl.algorithms import Batch, Trainer
from pearl.algorithms.actor_critic import ActorCritic
from pearl.algorithms.on_policy import OnPolicyTrainer
from pearl.algorithms.trainer import modules_of
from pearl.backends.cuda.device import EMULATOR

OBS = spaces.Box(-5.0, 5.0, (6,), np.float32)
DISCRETE = spaces.Discrete(3)
BOX = spaces.Box(np.array([-2.0, 0.0], np.float32), np.array([2.0, 1.0], np.float32))
ROWS = 64

CUDA = os.environ.get("PEARL_TEST_CUDA", EMULATOR)
"""The CUDA device that tests of PEARL's kernels use: `make gpu-check` sets it to a GPU."""

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU that torch can use")
each_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.cuda, needs_cuda])])

State = dict[str, torch.Tensor]


def on_host(column: Any) -> np.ndarray:
    """An array, or the values of a tensor on any device."""
    return column.detach().cpu().numpy() if isinstance(column, torch.Tensor) else np.asarray(column)


def without_biases(algorithm: type[Any], layers: Sequence[int]) -> type[Any]:
    """`algorithm` on the networks that it builds, whose linear layers at the places `layers` have no biases."""

    def bare(build: Callable[[Any], nn.Module]) -> Callable[[Any], nn.Module]:
        def built(trainer: Any) -> nn.Module:
            network = build(trainer)
            linear = [part for part in network.modules() if isinstance(part, nn.Linear)]
            for place in layers:
                linear[place].register_parameter("bias", None)
            return network

        return built

    names = ("build_q_network", "build_actor", "build_critic")
    built = {name: bare(getattr(algorithm, name)) for name in names if hasattr(algorithm, name)}
    return type(f"{algorithm.__name__}WithoutBiases", (algorithm,), built)


def batch_of(actions: spaces.Space[Any], seed: int = 0, rows: int = ROWS) -> tuple[Batch, torch.Tensor]:
    """Random transitions, some of which terminate, with rewards large enough for both arms of the Huber loss."""
    rng = np.random.default_rng(seed)
    if isinstance(actions, spaces.Box):
        action = torch.as_tensor(rng.uniform(actions.low, actions.high, (rows, *actions.shape)), dtype=torch.float32)
    else:
        action = torch.as_tensor(rng.integers(0, 3, rows))
    discount = np.where(rng.random(rows) < 0.25, 0.0, 0.97)
    columns = (3 * rng.normal(size=(rows, 6)), rng.normal(size=rows) * 2, 3 * rng.normal(size=(rows, 6)), discount)
    obs, reward, next_obs, discounts = (torch.as_tensor(c, dtype=torch.float32) for c in columns)
    return Batch(obs, action, reward, next_obs, discounts), torch.as_tensor(rng.uniform(0.1, 1, rows)).float()


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.detach().double() - expected.detach()).norm() / expected.detach().norm())


def doubles(module: nn.Module) -> State:
    return {name: value.detach().double().requires_grad_() for name, value in module.named_parameters()}


def dense(
    state: State, prefix: str, layers: tuple[int, ...], x: torch.Tensor, *, rectify_last: bool = False
) -> torch.Tensor:
    """Linear layers by index, with a rectifier after each but the last."""
    for i, index in enumerate(layers):
        x = x @ state[f"{prefix}{index}.weight"].T + state[f"{prefix}{index}.bias"]
        if i < len(layers) - 1 or rectify_last:
            x = x.clamp(min=0)
    return x


def to_unit(action: torch.Tensor) -> torch.Tensor:
    """Actions in `BOX` to [-1, 1]."""
    low, high = torch.as_tensor(BOX.low).double(), torch.as_tensor(BOX.high).double()
    return (action - (low + high) / 2) / ((high - low) / 2)


def gradients(loss: torch.Tensor, state: State) -> State:
    return dict(zip(state, torch.autograd.grad(loss, list(state.values())), strict=True))


def descend(state: State, gradient: State, rate: float) -> State:
    return {n: (p - rate * gradient[n]).detach().requires_grad_() for n, p in state.items()}


def toward(target: State, online: State, tau: float) -> State:
    return {n: (p + tau * (online[n] - p)).detach().requires_grad_() for n, p in target.items()}


def assert_close(module: nn.Module, expected: State, tolerance: float = 1e-5) -> None:
    found = dict(module.named_parameters())
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert relative(found[name].detach(), value) <= tolerance, name


def estranged(trainer_class: type[Trainer], actions: spaces.Space[Any], **settings: Any) -> Any:
    """A trainer whose targets differ from its networks, as in the middle of a run; actor-critics scale observations."""
    if issubclass(trainer_class, ActorCritic):
        settings = {"scale_observations": True, **settings}
    trainer = trainer_class(OBS, actions, hidden_sizes=(32, 16), **settings)
    gain = 1.5 if issubclass(trainer_class, (ActorCritic, OnPolicyTrainer)) else 0.6
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for module in modules_of(trainer).values():
            for p in module.parameters():
                p.copy_(torch.randn(p.shape, generator=generator) * gain / p.shape[-1] ** 0.5)
    return trainer


def with_plain_descent(trainer: Any) -> Any:
    """The trainer with gradient descent instead of Adam: its weights then tell the gradients' sizes."""
    for name, value in list(vars(trainer).items()):
        if isinstance(value, torch.optim.Optimizer):
            (group,) = value.param_groups
            setattr(trainer, name, torch.optim.SGD(group["params"], group["lr"]))
    return trainer


def all_tensors(trainer: object) -> State:
    """Copies of the trainer's weights, of all its networks."""
    return {
        f"{name}.{key}": value.clone()
        for name, module in modules_of(trainer).items()
        for key, value in module.state_dict().items()
    }


def columns_of(batch: Batch) -> dict[str, np.ndarray]:
    """The batch as a Learner takes it."""
    return {name: column.numpy() for name, column in batch._asdict().items()}
