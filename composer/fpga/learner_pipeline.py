"""The Learner as a pipeline of tensor units: what each computes for one item, keeps on chip, and waits for.

FP, LOSS, BP and GA (the CF'22 paper calls them FW, LOSS, BW and WA) of every layer, as in Fig. 7 of PEARL, Fig. 6 of
the CF'22 paper and Fig. 4.2 of the thesis. Rooflines of CPUs and GPUs count the same work.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from torch import nn

from pearl.algorithms import Trainer, one_of_algorithms
from pearl.algorithms.update_rule import update_rule_of
from pearl.errors import ConfigurationError, TrainerError
from pearl.learner.extract import extract_network
from pearl.spec import NetworkSpec

UnitKind: TypeAlias = Literal["FP", "LOSS", "BP", "GA"]


@dataclass(frozen=True)
class LayerShape:
    """One layer with weights: values in and out of one item, weights (biases too), multiply-accumulates of one item."""

    inputs: int
    outputs: int
    weights: int
    macs: int

    def __post_init__(self) -> None:
        counts = (self.inputs, self.outputs, self.weights, self.macs)
        if not all(type(count) is int and count >= 1 for count in counts):
            raise ConfigurationError(
                f"A layer's inputs, outputs, weights and macs must be whole numbers of at least 1; found {counts}."
            )

    @classmethod
    def linear(cls, inputs: int, outputs: int, *, biases: bool = True) -> LayerShape:
        """A fully connected layer."""
        return cls(inputs, outputs, inputs * outputs + outputs * biases, inputs * outputs)


def mlp_layers(*widths: int) -> tuple[LayerShape, ...]:
    """The fully connected layers between `widths` values: inputs, hidden sizes, outputs."""
    return tuple(LayerShape.linear(inputs, outputs) for inputs, outputs in itertools.pairwise(widths))


def layers_of(network: NetworkSpec) -> tuple[LayerShape, ...]:
    """The layers with weights, in execution order; branches count as if one followed the other."""
    found = (layer for layer in network.layers if layer.macs and layer.parameters)
    return tuple(
        LayerShape(math.prod(layer.in_shape), math.prod(layer.out_shape) or 1, layer.parameters, layer.macs)
        for layer in found
    )


@dataclass(frozen=True)
class TensorUnit:
    """One stage of the pipeline: a multiply-accumulate array with its buffers.

    `macs`, `reads` and `writes` are of one item, the latter in values; `words` is how many weights (FP, BP) or
    gradients (GA) it keeps. `after` are the units that it takes its inputs from, -1 for the item itself.
    """

    name: str
    kind: UnitKind
    macs: int
    reads: int
    writes: int
    words: int
    after: tuple[int, ...]


@dataclass(frozen=True)
class LearnerPipeline:
    """The units of one gradient step, in an order in which each comes after those that it waits for.

    `layers` is #layers of PEARL Eq. 6: of the network that acts, its input counted as one.
    """

    units: tuple[TensorUnit, ...]
    layers: int

    def __post_init__(self) -> None:
        for number, unit in enumerate(self.units):
            if not unit.after or not all(-1 <= producer < number for producer in unit.after):
                raise ConfigurationError(f"The unit {unit.name} must come after its producers; found {unit.after}.")

    @property
    def macs(self) -> int:
        """Multiply-accumulates of one item in one gradient step."""
        return sum(unit.macs for unit in self.units)

    @property
    def gradient_words(self) -> int:
        """Trained weights."""
        return sum(unit.words for unit in self.units if unit.kind == "GA")

    @property
    def stages_printed(self) -> int:
        """The n = 3 (L - 1) of CF'22 Sec. 3.2.1 and of PEARL Eq. 6: one network's units, as if they were in a row."""
        return 3 * (self.layers - 1)

    @functools.cached_property
    def levels(self) -> tuple[int, ...]:
        """Of each unit, how many units the longest way from the item to it has, itself included."""
        found: list[int] = []
        for unit in self.units:
            found.append(1 + max(found[producer] if producer >= 0 else 0 for producer in unit.after))
        return tuple(found)

    @property
    def depth(self) -> int:
        """Units on the longest way: what `stages_printed` would be if GA did not run beside BP."""
        return max(self.levels)

    @functools.cached_property
    def items_held(self) -> tuple[int, ...]:
        """Of each unit, how many items its input buffer holds: those under way since the earliest of its producers."""
        levels = self.levels
        return tuple(
            level - min(levels[producer] if producer >= 0 else 0 for producer in unit.after) + 1
            for unit, level in zip(self.units, levels, strict=True)
        )

    def makespan_cycles(self, unit_cycles: Sequence[int], items: int, arithmetic_cycles: int = 0) -> int:
        """Cycles until the last of `items` leaves the last unit, each of which takes `unit_cycles` for one item.

        A unit gives an item on `arithmetic_cycles` later than it can take the next.

        Exact where items stream through units one by one without waiting for room: the longest over all ways of the sum
        of their cycles plus (items - 1) times the slowest unit's.
        """
        into = [0] * len(self.units)  # the longest way to each unit, itself included
        for number, unit in enumerate(self.units):
            into[number] = unit_cycles[number] + arithmetic_cycles + max(into[p] if p >= 0 else 0 for p in unit.after)
        onward = [0] * len(self.units)  # the longest way from each unit's end to the end
        for number in reversed(range(len(self.units))):
            for producer in self.units[number].after:
                if producer >= 0:
                    onward[producer] = max(onward[producer], unit_cycles[number] + arithmetic_cycles + onward[number])
        ways = (into[n] + onward[n] + (items - 1) * unit_cycles[n] for n in range(len(self.units)))
        return max(ways)


class _Builder:
    """Adds chains of units and remembers where they are."""

    def __init__(self) -> None:
        self.units: list[TensorUnit] = []

    def add(self, name: str, kind: UnitKind, layer: LayerShape, words: int, after: tuple[int, ...]) -> int:
        backward = kind == "BP"
        reads, writes = (layer.outputs, layer.inputs) if backward else (layer.inputs, layer.outputs)
        if kind == "GA":
            reads, writes = layer.inputs + layer.outputs, 1
        self.units.append(TensorUnit(name, kind, layer.macs, reads, writes, words, after))
        return len(self.units) - 1

    def forward(self, name: str, layers: Sequence[LayerShape], after: int = -1) -> list[int]:
        """FP through all layers; the units."""
        found: list[int] = []
        for number, layer in enumerate(layers, start=1):
            after = self.add(f"FP {name} {number}", "FP", layer, layer.weights, (after,))
            found.append(after)
        return found

    def loss(self, name: str, layer: LayerShape, after: tuple[int, ...]) -> int:
        values = layer.outputs
        self.units.append(TensorUnit(f"LOSS {name}", "LOSS", values, 2 * values, values, 0, after))
        return len(self.units) - 1

    def backward(
        self, name: str, layers: Sequence[LayerShape], forward: Sequence[int], after: int, *, train: bool, first: int
    ) -> int:
        """BP from the last layer down to layer `first`, and GA of all layers where `train`; the last BP unit."""
        for number in range(len(layers), 0, -1):
            layer = layers[number - 1]
            if train:
                activations = forward[number - 2] if number > 1 else -1
                self.add(f"GA {name} {number}", "GA", layer, layer.weights, (after, activations))
            if number >= first:
                after = self.add(f"BP {name} {number}", "BP", layer, layer.weights, (after,))
        return after


def dqn_pipeline(layers: Sequence[LayerShape], *, double: bool = False) -> LearnerPipeline:
    """The pipeline of DQN: CF'22 Sec. 3.2.1, with the target network's FP beside the network's (Sec. 3.2.4).

    `double` adds the FP of the network on the next observation, which double DQN needs.
    """
    _require_layers(layers)
    build = _Builder()
    online = build.forward("q", layers)
    after = [online[-1], build.forward("target", layers)[-1]]
    if double:
        after.append(build.forward("next", layers)[-1])
    loss = build.loss("q", layers[-1], tuple(after))
    build.backward("q", layers, online, loss, train=True, first=2)
    return LearnerPipeline(tuple(build.units), len(layers) + 1)


def actor_critic_pipeline(
    actor: Sequence[LayerShape],
    critic: Sequence[LayerShape],
    *,
    critics: int = 1,
    critics_of_actor: int = 1,
) -> LearnerPipeline:
    """The pipeline of DDPG and its like, with the lagged critic of CF'22 Sec. 3.2.4.

    Critics learn from the target critics at the target policy's action; the actor, beside them, from the critics'
    weights of the iteration before, through which its gradient flows: FP and BP of `critics_of_actor` critics. With 0
    those units are left out, as the DSP count of CF'22 Table 2 has it.
    """
    _require_layers(actor)
    _require_layers(critic)
    build = _Builder()
    next_action = build.forward("target actor", actor)[-1]
    targets = [build.forward(f"target critic {k}", critic, next_action)[-1] for k in range(1, critics + 1)]
    for k in range(1, critics + 1):
        online = build.forward(f"critic {k}", critic)
        loss = build.loss(f"critic {k}", critic[-1], (online[-1], *targets))
        build.backward(f"critic {k}", critic, online, loss, train=True, first=2)
    acting = build.forward("actor", actor)
    gradients = []
    for k in range(1, critics_of_actor + 1):
        lagged = build.forward(f"lagged critic {k}", critic, acting[-1])
        gradients.append(build.backward(f"lagged critic {k}", critic, lagged, lagged[-1], train=False, first=1))
    loss = build.loss("actor", actor[-1], tuple(gradients) or (acting[-1],))
    build.backward("actor", actor, acting, loss, train=True, first=2)
    return LearnerPipeline(tuple(build.units), len(actor) + 1)


def _require_layers(layers: Sequence[LayerShape]) -> None:
    if not layers:
        raise ConfigurationError("A learner's pipeline needs at least one layer with weights; found none.")


def pipeline_of(trainer: object) -> LearnerPipeline:
    """The pipeline of a trainer that derives from `pearl.algorithms`: its update rule is known.

    Raises TrainerError that says what of another trainer is not known.
    """
    own = type(trainer).__name__
    rule = update_rule_of(trainer)
    if rule is not None and rule.actor is None:
        (network,) = rule.critics
        layers = layers_of(extract_network("policy", network.module, network.input_shape))
        if not layers:
            raise TrainerError(f"{own}'s network has no layers that can be traced")
        return dqn_pipeline(layers, double=rule.double)
    if rule is not None and rule.actor is not None:
        return actor_critic_pipeline(
            _linear_layers(own, "actor", rule.actor.module),
            _linear_layers(own, "critic", rule.critics[0].module),
            critics=len(rule.critics),
            critics_of_actor=rule.actor_critics,
        )
    known = "the update rule of" if isinstance(trainer, Trainer) else "what a step computes in"
    raise TrainerError(f"{known} {own} is not known: it does not derive from {one_of_algorithms()}")


def _linear_layers(trainer: str, name: str, module: nn.Module) -> tuple[LayerShape, ...]:
    parts = [part for part in module.modules() if next(part.parameters(recurse=False), None) is not None]
    others = {type(part).__name__ for part in parts if not isinstance(part, nn.Linear)}
    if others or not parts:
        raise TrainerError(f"{trainer}'s {name} has {', '.join(sorted(others)) or 'no layers'}, not only nn.Linear")
    return tuple(
        LayerShape.linear(part.in_features, part.out_features, biases=part.bias is not None)
        for part in parts
        if isinstance(part, nn.Linear)
    )
