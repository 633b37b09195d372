"""A trainer's state: what was learned comes back bit for bit, and another structure is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pearl.errors import CheckpointError
from pearl.runtime.checkpoint import CheckpointState, load_checkpoint, save_checkpoint
from pearl.runtime.trainer_state import (
    RANDOM_GROUP,
    load_module_tensors,
    module_tensors,
    restore_torch_random,
    torch_random_tensors,
)


class Trainer:
    def __init__(self, optimizer: Callable[[Any], torch.optim.Optimizer], hidden: int = 8) -> None:
        torch.manual_seed(hidden)
        self.q_network = torch.nn.Sequential(
            torch.nn.Linear(3, hidden), torch.nn.BatchNorm1d(hidden), torch.nn.Linear(hidden, 2)
        )
        self.critics = [torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)]
        self.log_alpha = torch.zeros((), requires_grad=True)
        self.optimizer = optimizer([*self.q_network.parameters(), *self.critics[0].parameters(), self.log_alpha])
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 4, 7], gamma=0.5)
        self.noise = torch.Generator().manual_seed(3)
        self.seed = torch.nn.Buffer(torch.tensor(2**61 + hidden))
        self.scratch = torch.zeros(3)  # of no further use: not saved
        self.updates = 0

    def step(self) -> torch.Tensor:
        batch = torch.randn(16, 3, generator=self.noise)
        out = self.q_network(batch) + self.critics[0](batch)
        loss: torch.Tensor = (out**2).mean() * self.log_alpha.exp()

        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.scheduler.step()
        return loss.detach()

    def weights(self) -> list[torch.Tensor]:
        return [*self.q_network.state_dict().values(), *self.critics[0].parameters(), self.log_alpha]


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True, foreach=True),
    "adam with a tensor as rate": lambda p: torch.optim.Adam(p, lr=torch.tensor(1e-2), foreach=False),
    "adamw": lambda p: torch.optim.AdamW([{"params": p[:2], "lr": 1e-3}, {"params": p[2:]}], betas=(0.8, 0.99)),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2),
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, centered=True),
    "adafactor": lambda p: torch.optim.Adafactor(p),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_resumed_trainer_goes_on_bit_for_bit(tmp_path: Path, name: str) -> None:
    uninterrupted = Trainer(OPTIMIZERS[name])
    for _ in range(3):
        uninterrupted.step()
    save_checkpoint(tmp_path, CheckpointState(3, tensors=module_tensors(uninterrupted)))
    resumed = Trainer(OPTIMIZERS[name])
    resumed.step()
    load_module_tensors(resumed, load_checkpoint(tmp_path).tensors)
    for _ in range(5):
        assert torch.equal(uninterrupted.step(), resumed.step())
    for expected, found in zip(uninterrupted.weights(), resumed.weights(), strict=True):
        assert torch.equal(expected, found)
    assert resumed.scheduler.state_dict() == uninterrupted.scheduler.state_dict()
    assert resumed.optimizer.param_groups[0]["lr"] == uninterrupted.optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize(
    "scheduler",
    [
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 10),
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda n: 0.9**n),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, 20),
        lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o),
        lambda o: torch.optim.lr_scheduler.SequentialLR(
            o,
            [torch.optim.lr_scheduler.ConstantLR(o), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)],
            milestones=[2],
        ),
    ],
)
def test_schedulers_come_back(scheduler: Callable[[torch.optim.Optimizer], Any]) -> None:
    class Scheduled:
        def __init__(self) -> None:
            self.net = torch.nn.Linear(1, 1)
            self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
            self.scheduler = scheduler(self.optimizer)

        def step(self) -> float:
            self.optimizer.step()
            plateau = isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
            self.scheduler.step(*[1.0] * plateau)
            return float(self.optimizer.param_groups[0]["lr"])

    for steps in (1, 4):
        first, second = Scheduled(), Scheduled()
        for _ in range(steps):
            first.step()
        load_module_tensors(second, module_tensors(first))
        assert [first.step() for _ in range(10)] == [second.step() for _ in range(10)]


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, torch.optim.SparseAdam])
def test_optimizers_that_take_more_than_dense_gradients_come_back(kind: Any) -> None:
    class Embedded:
        def __init__(self) -> None:
            self.net = torch.nn.Embedding(3, 2, sparse=kind is torch.optim.SparseAdam)
            self.optimizer = kind(self.net.parameters())

        def loss(self) -> torch.Tensor:
            self.optimizer.zero_grad()
            loss = (self.net(torch.tensor([0, 2])) - 1).square().sum()
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

    first, second = Embedded(), Embedded()
    for trainer in (first, first, second):
        trainer.optimizer.step(trainer.loss)
    load_module_tensors(second, module_tensors(first))
    for trainer in (first, second):
        trainer.optimizer.step(trainer.loss)
    assert torch.equal(first.net.weight, second.net.weight)


def test_groups_are_named_after_attributes_and_are_copies() -> None:
    trainer = Trainer(OPTIMIZERS["adam"])
    tensors = module_tensors(trainer)
    assert set(tensors) == {
        "q_network", "critics.0", "critics.1", "log_alpha", "optimizer", "scheduler", "noise", "seed",
    }  # fmt: skip
    before = tensors["q_network"]["0.weight"].clone()
    trainer.step()
    assert torch.equal(tensors["q_network"]["0.weight"], before)
    assert set(module_tensors(trainer)["optimizer"]) >= {"state/0/exp_avg", "state/0/step", "scalars.json"}


def test_loading_keeps_the_objects_and_does_not_share_memory_with_the_checkpoint() -> None:
    trainer = Trainer(OPTIMIZERS["adam"])
    trainer.step()
    tensors = module_tensors(trainer)
    kept = {group: {k: t.clone() for k, t in content.items()} for group, content in tensors.items()}
    weight = trainer.q_network[0].weight
    load_module_tensors(trainer, {**tensors, RANDOM_GROUP: torch_random_tensors()})
    trainer.step()
    assert trainer.q_network[0].weight is weight
    assert trainer.log_alpha.requires_grad
    torch.testing.assert_close(tensors, kept, rtol=0, atol=0)


def test_a_trainer_that_is_a_module_is_saved_as_one() -> None:
    class Whole(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(2, 2)
            self.optimizer = torch.optim.SGD(self.parameters(), lr=0.1)

    first, second = Whole(), Whole()
    tensors = module_tensors(first)
    assert set(tensors) == {"self", "optimizer"}
    load_module_tensors(second, tensors)
    assert torch.equal(first.net.weight, second.net.weight)


def test_the_trainers_own_methods_win() -> None:
    class Own:
        def __init__(self) -> None:
            self.net = torch.nn.Linear(1, 1)
            self.updates = 5

        def state_tensors(self) -> dict[str, dict[str, torch.Tensor]]:
            return {"mine": {"updates": torch.tensor(self.updates)}}

        def load_state_tensors(self, tensors: dict[str, dict[str, torch.Tensor]]) -> None:
            assert set(tensors) == {"mine"}
            self.updates = int(tensors["mine"]["updates"])

    first, second = Own(), Own()
    first.updates = 9
    load_module_tensors(second, {**module_tensors(first), RANDOM_GROUP: {}})
    assert second.updates == 9


def test_extra_state_of_a_module_comes_back(tmp_path: Path) -> None:
    class Counting(torch.nn.Linear):
        count = 0

        def get_extra_state(self) -> dict[str, Any]:
            return {"count": self.count, "mean": torch.ones(2) * self.count}

        def set_extra_state(self, state: Any) -> None:
            self.count = state["count"]
            self.mean = state["mean"]

    class Holder:
        def __init__(self) -> None:
            self.net = Counting(1, 1)

    first, second = Holder(), Holder()
    first.net.count = 4
    save_checkpoint(tmp_path, CheckpointState(1, tensors=module_tensors(first)))
    load_module_tensors(second, load_checkpoint(tmp_path).tensors)
    assert second.net.count == 4
    assert torch.equal(second.net.mean, torch.full((2,), 4.0))


def mismatch(trainer: object, tensors: Any, *parts: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        load_module_tensors(trainer, tensors)
    for part in parts:
        assert part in str(caught.value)


def test_a_trainer_of_another_structure_is_refused_and_unchanged() -> None:
    trainer = Trainer(OPTIMIZERS["adam"])
    trainer.step()
    before = [t.clone() for t in trainer.weights()]
    good = module_tensors(trainer)
    mismatch(
        trainer,
        module_tensors(Trainer(OPTIMIZERS["adam"], hidden=9)),
        "Tensor '0.weight' of 'q_network'", "(8, 3)", "(9, 3)",
    )  # fmt: skip
    mismatch(trainer, {**good, "extra": {}}, "'extra'")
    mismatch(trainer, {k: v for k, v in good.items() if k != "critics.1"}, "lacks ['critics.1']")
    mismatch(trainer, module_tensors(Trainer(OPTIMIZERS["sgd"])), "'optimizer' is a Adam; the checkpoint holds a SGD")
    doubled = {**good["q_network"], "0.bias": good["q_network"]["0.bias"].double()}
    mismatch(trainer, {**good, "q_network": doubled}, "'0.bias'", "torch.float32", "torch.float64")
    renamed = {("other" if k == "2.bias" else k): v for k, v in good["q_network"].items()}
    mismatch(trainer, {**good, "q_network": renamed}, "lacks ['2.bias'] and has ['other']")
    mismatch(trainer, {**good, "optimizer": {}}, "'optimizer'", "scalars.json")
    junk = torch.tensor([123, 34], dtype=torch.uint8)
    mismatch(trainer, {**good, "optimizer": {"scalars.json": junk}}, "'optimizer'")
    lost = {k: v for k, v in good["optimizer"].items() if k != "state/1/exp_avg"}
    mismatch(trainer, {**good, "optimizer": lost}, "state/1/exp_avg")
    for expected, found in zip(before, trainer.weights(), strict=True):
        assert torch.equal(expected, found)


def test_an_optimizer_over_other_parameters_is_refused() -> None:
    class Pair:
        def __init__(self, parts: slice) -> None:
            self.net = torch.nn.Linear(3, 2)
            self.optimizer = torch.optim.Adam(list(self.net.parameters())[parts])

    mismatch(Pair(slice(0, 2)), module_tensors(Pair(slice(0, 1))), "groups have [2] parameters", "[1]")
    mismatch(Pair(slice(0, 1)), module_tensors(Pair(slice(1, 2))), "parameter 0 has shape (2, 3)", "(2,)")


def test_a_trainer_without_networks_is_told_what_to_do() -> None:
    with pytest.raises(CheckpointError, match="state_tensors"):
        module_tensors(object.__new__(type("Empty", (), {})))


def test_an_attribute_that_takes_the_name_of_torchs_random_states_is_refused() -> None:
    trainer = Trainer(OPTIMIZERS["adam"])
    trainer.random = torch.Generator()  # type: ignore[attr-defined]
    with pytest.raises(CheckpointError, match="attribute 'random' takes a reserved name"):
        module_tensors(trainer)


def test_torchs_random_state_goes_on_where_it_stood(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, CheckpointState(1, tensors={RANDOM_GROUP: torch_random_tensors()}))
    expected = torch.rand(5)
    restore_torch_random(load_checkpoint(tmp_path).tensors[RANDOM_GROUP])
    assert torch.equal(torch.rand(5), expected)


def test_torchs_random_state_of_a_gpu_that_is_not_here_is_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    absent = f"cuda.{torch.cuda.device_count()}"
    tensors = torch_random_tensors()
    expected = torch.rand(5)
    restore_torch_random({absent: torch.zeros(16, dtype=torch.uint8), **tensors})
    assert torch.equal(torch.rand(5), expected)
    assert f"a random state of {absent}, which is absent here" in caplog.text


def test_torchs_random_state_of_the_wrong_kind_is_refused() -> None:
    with pytest.raises(CheckpointError, match="random state of cpu"):
        restore_torch_random({"cpu": torch.zeros(3)})
