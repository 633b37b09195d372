"""Networks read from torch modules: operations, shapes, parameters and multiply-accumulates, counted by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from pearl.algorithms import DDPG, DQN
from pearl.algorithms.networks import mlp, q_network
from pearl.errors import TrainerError
from pearl.learner.extract import extract_network, extract_networks
from pearl.spec import NetworkSpec


def kinds(network: NetworkSpec) -> list[str]:
    return [layer.kind for layer in network.layers]


def linear(inputs: int, outputs: int) -> int:
    """Parameters of a layer with bias; its MACs are `inputs * outputs`."""
    return inputs * outputs + outputs


def test_an_mlp() -> None:
    network = extract_network("policy", nn.Sequential(*mlp(4, (64, 32), 2), nn.Tanh()), (4,))
    assert kinds(network) == ["linear", "relu", "linear", "relu", "linear", "tanh"]
    assert [layer.in_shape for layer in network.layers] == [(4,), (64,), (64,), (32,), (32,), (2,)]
    assert [layer.out_shape for layer in network.layers] == [(64,), (64,), (32,), (32,), (2,), (2,)]
    assert [layer.inputs for layer in network.layers] == [(-1,), (0,), (1,), (2,), (3,), (4,)]
    assert network.macs == 4 * 64 + 64 * 32 + 32 * 2
    assert network.parameters == linear(4, 64) + linear(64, 32) + linear(32, 2)
    assert network.input_shape == (4,)
    assert network.output_shape == (2,)


def test_a_dueling_network_keeps_its_graph() -> None:
    network = extract_network("q", q_network((4,), 3, (64, 32), dueling=True), (4,))
    assert network.macs == 4 * 64 + (64 * 32 + 32 * 1) + (64 * 32 + 32 * 3)
    assert network.parameters == linear(4, 64) + linear(64, 32) + linear(32, 1) + linear(64, 32) + linear(32, 3)
    by_kind = {layer.kind: layer for layer in network.layers}
    layers = network.layers
    advantage = by_kind["mean"].inputs[0]
    assert layers[advantage].out_shape == (3,)
    assert [layers[i].out_shape for i in by_kind["add"].inputs] == [(1,), (3,)]
    assert [layers[i].kind for i in by_kind["sub"].inputs] == ["add", "mean"]
    assert network.output_shape == (3,)


@pytest.mark.parametrize("dueling", [False, True])
def test_the_nature_network(dueling: bool) -> None:
    network = extract_network("q", q_network((4, 84, 84), 6, (64, 128), dueling=dueling), (4, 84, 84))
    convolutions = [layer for layer in network.layers if layer.kind == "conv2d"]
    assert [c.out_shape for c in convolutions] == [(32, 20, 20), (64, 9, 9), (64, 7, 7)]
    assert [c.macs for c in convolutions] == [32 * 20 * 20 * 4 * 64, 64 * 81 * 32 * 16, 64 * 49 * 64 * 9]
    assert [c.parameters for c in convolutions] == [4 * 64 * 32 + 32, 32 * 16 * 64 + 64, 64 * 9 * 64 + 64]
    assert convolutions[0].options == {
        "kernel_size": (8, 8),
        "stride": (4, 4),
        "padding": (0, 0),
        "groups": 1,
        "bias": True,
    }
    head = [(3136, 512), *([(512, 128), (128, 1), (512, 128), (128, 6)] if dueling else [(512, 6)])]
    assert network.macs == sum(c.macs for c in convolutions) + sum(a * b for a, b in head)
    assert network.parameters == sum(c.parameters for c in convolutions) + sum(linear(a, b) for a, b in head)


def test_groups_divide_the_work_of_a_convolution() -> None:
    network = extract_network("c", nn.Sequential(nn.Conv2d(8, 16, 3, padding=1, groups=4, bias=False)), (8, 10, 10))
    assert network.layers[0].out_shape == (16, 10, 10)
    assert network.macs == 16 * 100 * (8 // 4) * 9
    assert network.layers[0].options["bias"] is False
    assert network.layers[0].options["groups"] == 4


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 7)
        self.outer = nn.Linear(7, 3, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.outer(nn.functional.relu(self.inner(x)).relu()))


def test_activations_as_functions_and_methods_are_operations_too() -> None:
    network = extract_network("f", Functional(), (5,))
    assert kinds(network) == ["linear", "relu", "relu", "linear", "tanh"]
    assert network.layers[0].name == "inner"
    assert network.macs == 5 * 7 + 7 * 3
    assert network.parameters == 5 * 7 + 7 + 7 * 3


class Branching(Functional):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(-x if float(x.sum()) > 0 else x)


def test_a_module_that_cannot_be_traced_is_one_opaque_layer() -> None:
    network = extract_network("b", Branching(), (5,))
    assert kinds(network) == ["opaque"]
    assert network.layers[0].name == "Branching"
    assert network.layers[0].in_shape == (5,)
    assert network.output_shape == network.layers[0].out_shape == (3,)
    assert network.parameters == 5 * 7 + 7 + 7 * 3


class OwnLinear(nn.Linear):
    pass


class RawParameters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.table = nn.Parameter(torch.zeros(3, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(self.first(x), self.table)


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(torch.relu(self.layer(x)))
        return y


@pytest.mark.parametrize(
    "module", [nn.Sequential(OwnLinear(4, 6), nn.ReLU()), RawParameters(), Shared()], ids=lambda m: type(m).__name__
)
def test_no_parameter_is_lost_or_counted_twice(module: nn.Module) -> None:
    network = extract_network("n", module, (4,))
    assert network.parameters == sum(p.numel() for p in module.parameters())
    assert network.macs > 0


def test_a_shared_layer_works_twice() -> None:
    assert extract_network("n", Shared(), (4,)).macs == 2 * 4 * 4


def test_a_network_that_does_not_take_the_observations() -> None:
    with pytest.raises(TrainerError, match=r"Network 'policy' does not accept observations of shape \(3,\): RuntimeE"):
        extract_network("policy", mlp(4, (8,), 2), (3,))


def test_reading_a_network_changes_nothing() -> None:
    module = mlp(4, (8,), 2)
    before = [p.clone() for p in module.parameters()]
    extract_network("policy", module, (4,))
    assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))
    assert all(p.grad is None for p in module.parameters())


# --- of trainers ------------------------------------------------------------------------------------------------------


def test_the_networks_of_the_algorithms() -> None:
    box = spaces.Box(-1.0, 1.0, (3,), np.float32)
    (q,) = extract_networks(DQN(box, spaces.Discrete(2), hidden_sizes=(8,)))
    assert q.name == "policy"
    assert q.parameters == linear(3, 8) + linear(8, 2)
    policy, critic = extract_networks(DDPG(box, box, hidden_sizes=(16,)))
    assert policy.parameters == linear(3, 16) + linear(16, 3)
    assert policy.macs == 3 * 16 + 16 * 3
    assert critic.name == "critic"
    assert critic.parameters == linear(6, 16) + linear(16, 1)


class WideCritic(DDPG):
    def build_critic(self) -> nn.Module:
        return mlp(6, (64,), 1)


def test_networks_of_different_sizes_have_different_signatures() -> None:
    box = spaces.Box(-1.0, 1.0, (3,), np.float32)
    trainers = [DDPG(box, box, hidden_sizes=sizes) for sizes in ((16,), (32,), (16, 16))]
    trainers.append(WideCritic(box, box, hidden_sizes=(16,)))
    signatures = [" ".join(n.signature for n in extract_networks(trainer)) for trainer in trainers]
    assert len(set(signatures)) == 4
