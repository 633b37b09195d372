"""The Learner that programs run on an FPGA: its stages, the wires between them, and the loops of each stage.

It describes what `kernels/sycl/fpga_learner_program.cpp` generates, with the same names. A stage processes the items of
its copy's sub-batch one after the other. Vectors move between stages in blocks of 16 values.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from pearl.algorithms.update_rule import RuleStep, UpdateRule
from pearl.backends.fpga.learner import FpgaLearner
from pearl.backends.on_device.learner import networks_of
from pearl.errors import ConfigurationError, TrainerError
from pearl.learner.native_plan import Op
from pearl.learner.native_rules import known_step

BLOCK = 16  # values in a block: kBlock of pearl/fpga_learner.hpp
MOST_STAGES, MOST_ROWS = 100, 1 << 16  # of one Learner and of a batch: as in kernels/sycl/fpga_learner.cpp

StageKind: TypeAlias = Literal["FP", "LOSS", "BP", "GA"]
Unroll: TypeAlias = "tuple[tuple[int, ...], ...]"
"""UF of each layer of each trained network; a power of two."""


def blocks(width: int) -> int:
    """Blocks that a vector of `width` values takes."""
    return -(-width // BLOCK)


def padded(width: int) -> int:
    """Values of these blocks."""
    return blocks(width) * BLOCK


@dataclass(frozen=True)
class ProgramLayer:
    """A linear layer; `activated` if ReLU or tanh follows it."""

    inputs: int
    outputs: int
    activated: bool = False

    @property
    def row(self) -> int:
        """Values of a row of its matrix in a stage's memory."""
        return padded(self.inputs)

    @property
    def words(self) -> int:
        """Values of its matrix and biases in a stage's memory."""
        return self.outputs * self.row + padded(self.outputs)

    @property
    def weights(self) -> int:
        """Its weights and biases in device memory."""
        return self.outputs * (self.inputs + 1)


def chain(*widths: int) -> tuple[ProgramLayer, ...]:
    """The layers between `widths` values, with an activation after each but the last."""
    pairs = list(itertools.pairwise(widths))
    return tuple(ProgramLayer(*pair, activated=n + 1 < len(pairs)) for n, pair in enumerate(pairs))


@dataclass(frozen=True)
class Stage:
    """A kernel of one copy. `after` are the stages that send it items, "" stands for the item itself.

    FP, BP and GA have a layer: `place` is (network, layer). LOSS has none; `trips` are the trip counts of its loops for
    one item. It writes each item to `wires` wires, one after the other.
    """

    kind: StageKind
    after: tuple[str, ...]
    wires: int
    place: tuple[int, int] = (-1, -1)
    activated: bool = False  # BP: whether an activation is below
    trips: tuple[int, ...] = ()


@dataclass
class _Copy:
    """The stages and the widths of the wires of one copy, as far as they are known."""

    networks: tuple[tuple[ProgramLayer, ...], ...]
    stages: dict[str, Stage] = field(default_factory=dict)
    wires: list[int] = field(default_factory=list)

    def wire(self, *widths: int) -> None:
        self.wires += widths

    def forward(self, name: str, network: int, after: str, out: int, *, trained: bool = False, first: int = -1) -> str:
        """Add FP of a network, whose last layer writes to `out` wires; `first` is the lowest layer with BP, if any."""
        layers = self.networks[network]
        for number, layer in enumerate(layers):
            wires = out
            if number + 1 < len(layers):
                wires = 1 + trained + (0 <= first <= number + 1 and layer.activated)
                self.wire(*(layer.outputs,) * wires)
            stage = f"fp_{name}{number + 1}"
            self.stages[stage] = Stage("FP", (after,), wires, (network, number))
            after = stage
        return after

    def backward(self, name: str, network: int, after: str, first: int, *, trained: bool) -> str:
        """Add BP down to layer `first`, and with `trained` GA of all layers; the last BP."""
        layers = self.networks[network]
        for number in reversed(range(len(layers))):
            layer = layers[number]
            if trained:
                below = f"fp_{name}{number}" if number else ""
                self.stages[f"ga_{name}{number + 1}"] = Stage("GA", (after, below), 1, (network, number))
                self.wire(layer.outputs)
            if number >= first:
                activated = number > 0 and layers[number - 1].activated
                wires = (number - 1 >= first) + trained if number else 1
                stage = f"bp_{name}{number + 1}"
                self.stages[stage] = Stage("BP", (after,), wires, (network, number), activated)
                self.wire(layer.outputs)
                after = stage
        return after

    def loss(self, name: str, after: Sequence[str], trips: Sequence[int], wires: int) -> str:
        self.stages[name] = Stage("LOSS", tuple(after), wires, trips=tuple(trips))
        return name


@dataclass(frozen=True)
class LearnerProgram:
    """One gradient step of DQN (one network), or of an actor and its critics, in this order.

    `stochastic`: the policy is SAC's, whose critics all judge it. `state_words` is how many values the optimizer keeps
    for each weight in device memory: 2 for Adam.
    """

    networks: tuple[tuple[ProgramLayer, ...], ...]
    actions: int
    double: bool = False
    stochastic: bool = False
    learns_temperature: bool = False
    state_words: int = 2

    def __post_init__(self) -> None:
        if not self.networks or not all(self.networks) or self.actions < 1:
            raise ConfigurationError(
                f"A Learner has at least one network of at least one layer, and an action; found {self.networks} and "
                f"{self.actions}."
            )

    @classmethod
    def of(cls, trainer: object) -> LearnerProgram:
        """The program's Learner for `trainer`; TrainerError with the reason if programs have none."""
        if (reason := FpgaLearner.supports(trainer)) is not None:
            raise TrainerError(f"programs for FPGAs cannot train {type(trainer).__name__} (unsupported: {reason})")
        _, rule, step = known_step(trainer)
        networks = tuple(_chain_of(size, operations) for size, operations in networks_of(rule, step))
        actions = networks[0][-1].outputs if rule.actor is None else networks[1][0].inputs - networks[0][0].inputs
        return cls(
            networks,
            actions,
            rule.double,
            step.temperature is not None,
            step.temperature is not None and step.temperature.optimizer is not None,
            _state_words(rule),
        )

    @property
    def observations(self) -> int:
        """Values of an observation."""
        return self.networks[0][0].inputs

    @property
    def acts(self) -> bool:
        """Whether it has an actor."""
        return len(self.networks) > 1

    @property
    def loss(self) -> str:
        """The stage that takes importance weights and sends priorities."""
        return "loss_critic" if self.acts else "loss"

    @property
    def weights(self) -> int:
        """Trained weights."""
        return sum(layer.weights for network in self.networks for layer in network)

    @functools.cached_property
    def _copy(self) -> _Copy:
        copy = _Copy(self.networks)
        (_actor_critic if self.acts else _dqn)(self, copy)
        return copy

    @property
    def stages(self) -> Mapping[str, Stage]:
        """The stages of one copy by their names, without WU; each comes after those that send it items."""
        return self._copy.stages

    @property
    def wires(self) -> Sequence[int]:
        """The widths of the wires of one copy."""
        return self._copy.wires

    @functools.cached_property
    def weight_stages(self) -> Mapping[str, tuple[int, int]]:
        """The WU stages by their names, each with its network and layer; layers of one vector are neighbours."""
        return {
            f"wu_{network}_{layer + 1}": (network, layer)
            for network in (*range(1, len(self.networks)), 0)
            for layer in range(len(self.networks[network]))
        }

    def has_target(self, network: int) -> bool:
        """Whether the network has a target network; SAC's actor has none."""
        return not (self.stochastic and network == 0)

    @functools.cached_property
    def most_copies(self) -> int:
        """The most copies whose stages run at once; the kernels count as if DQN were double, and SAC learned its alpha.

        0 if there are too many stages for a single copy.
        """
        others = len(self.weight_stages) + self.stochastic
        extra = 0 if self.acts or self.double else len(self.networks[0])
        return max(0, (MOST_STAGES - others) // (len(self.stages) + extra))

    @property
    def row_trips(self) -> tuple[int, ...]:
        """Trip counts of the loops that read a row from the Data Storage and send it to one copy."""
        seen = self.observations
        if not self.acts:
            return (seen, blocks(seen), blocks(seen), seen, *(blocks(seen),) * (1 + self.double))
        judged = blocks(seen + self.actions)
        critics = len(self.networks) - 1
        return (
            *(seen, seen, *(blocks(seen),) * 3),
            *(self.actions, *(judged,) * (2 * critics)),
            *(seen, *(blocks(seen),) * 2),
        )


def _chain_of(size: int, operations: Sequence[Op]) -> tuple[ProgramLayer, ...]:
    layers: list[ProgramLayer] = []
    for kind, _, _, width, *_ in operations:
        if kind == "linear":
            layers.append(ProgramLayer(size, width))
            size = width
        else:
            layers[-1] = ProgramLayer(layers[-1].inputs, layers[-1].outputs, activated=True)
    return tuple(layers)


def _state_words(rule: UpdateRule) -> int:
    assert isinstance(rule.step, RuleStep)
    group = rule.step.critics.optimizer.param_groups[0]
    if "betas" in group:
        return 3 if group.get("amsgrad") else 2
    return int(bool(group.get("momentum")))


def _dqn(program: LearnerProgram, copy: _Copy) -> None:
    layers, seen, actions = len(program.networks[0]), program.observations, program.actions
    copy.wire(seen, seen, seen, actions, actions)
    after = [copy.forward("target", 0, "", 1)]
    if program.double:
        copy.wire(seen, actions)
        after.append(copy.forward("next", 0, "", 1))
    after.append(copy.forward("q", 0, "", 1, trained=True, first=1))
    wires = 1 + (layers > 1)
    trips = (*(blocks(actions),) * len(after), max(1, actions - 1), *(blocks(actions),) * wires)
    copy.backward("q", 0, copy.loss("loss", after, trips, wires), 1, trained=True)


def _actor_critic(program: LearnerProgram, copy: _Copy) -> None:
    seen, actions = program.observations, program.actions
    inputs, says = seen + actions, program.networks[0][-1].outputs
    critics = range(1, len(program.networks))
    judges = critics if program.stochastic else critics[:1]
    copy.wire(seen, seen, says)
    copy.wire(*(inputs, 1, 1, inputs, inputs) * len(critics))
    copy.wire(seen, seen, seen, says, says)
    copy.wire(*(inputs, 1, inputs) * len(judges))

    def act(name: str, after: str, wires: int) -> str:
        trips = (blocks(says), blocks(seen), seen, actions, *(blocks(inputs),) * wires)
        return copy.loss(name, (after, ""), trips, wires)

    policy = copy.forward("next_actor" if program.stochastic else "target_actor", 0, "", 1)
    chosen = act("act_next", policy, len(critics))
    values = []
    for k in critics:
        values.append(copy.forward(f"target_critic{k}_", k, chosen, 1))
        values.append(copy.forward(f"critic{k}_", k, "", 1, trained=True, first=1))
    tops = sum(1 + (len(program.networks[k]) > 1) for k in critics)
    loss = copy.loss("loss_critic", values, (1,) * (2 * len(critics) + tops), tops)
    for k in critics:
        copy.backward(f"critic{k}_", k, loss, 1, trained=True)
    acting = copy.forward("actor", 0, "", 2, trained=True, first=1)
    chosen = act("act", acting, len(judges))
    judged = [copy.forward(f"lagged{k}_", k, chosen, 1, first=0) for k in judges]
    loss = copy.loss("loss_value", judged, (1,) * (2 * len(judges)), len(judges))
    slopes = [copy.backward(f"lagged{k}_", k, loss, 0, trained=False) for k in judges]
    wires = 1 + (len(program.networks[0]) > 1)
    trips = (*(blocks(inputs),) * len(judges), blocks(says), actions, *(blocks(says),) * wires)
    loss = copy.loss("loss_actor", (*slopes, acting), trips, wires)
    copy.backward("actor", 0, loss, 1, trained=True)


def most_unroll(layer: ProgramLayer) -> int:
    """The largest UF that helps a layer: all its rows at once, each block by block."""
    return BLOCK << math.ceil(math.log2(layer.outputs))
