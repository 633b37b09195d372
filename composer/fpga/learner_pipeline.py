"""The Learner as a pipeline of tensor units, each with its work per item, its words on chip and its producers.

Every layer has the units FP, LOSS, BP and GA (in the CF'22 paper: FW, LOSS, BW and WA), as in Fig. 7 of PEARL, Fig. 6
of the CF'22 paper and Fig. 4.2 of the thesis. The rooflines of CPUs and GPUs count the same work.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, TypeVar

from pearl.algorithms import Trainer, one_of_algorithms
from pearl.algorithms.update_rule import update_rule_of
from pearl.errors import ConfigurationError, TrainerError
from pearl.lazy_torch import nn
from pearl.learner.extract import extract_network
from pearl.spec import NetworkSpec

UnitKind: TypeAlias = Literal["FP", "LOSS", "BP", "GA"]


@dataclass(frozen=True)
class LayerShape:
    """A layer with weights: inputs, outputs and multiply-accumulates of one item; `weights` include the biases."""

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
    """The layers with weights, in execution order; parallel branches count as if they were in a row."""
    found = (layer for layer in network.layers if layer.macs and layer.parameters)
    return tuple(
        LayerShape(math.prod(layer.in_shape), math.prod(layer.out_shape) or 1, layer.parameters, layer.macs)
        for layer in found
    )


@dataclass(frozen=True)
class TensorUnit:
    """One stage of the pipeline: a multiply-accumulate array with its buffers.

    `macs` are multiply-accumulates of one item, `reads` and `writes` values of one item. `words` counts the weights
    (FP, BP) or gradients (GA) in its memory. `after` are the indices of the units that feed it, -1 for the item itself.
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
    """The units of one gradient step; each unit comes after its producers.

    `layers` is #layers of PEARL Eq. 6: the layers of the acting network, with its input as one of them.
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
        """The n = 3 (L - 1) of CF'22 Sec. 3.2.1 and of PEARL Eq. 6: all units of one network, as if in a row."""
        return 3 * (self.layers - 1)

    @functools.cached_property
    def levels(self) -> tuple[int, ...]:
        """For each unit, the number of units on the longest path from the item to it, itself included."""
        found: list[int] = []
        for unit in self.units:
            found.append(1 + max(found[producer] if producer >= 0 else 0 for producer in unit.after))
        return tuple(found)

    @property
    def depth(self) -> int:
        """Units on the longest path. `stages_printed` is larger: it counts GA and BP in a row, not in parallel."""
        return max(self.levels)

    @functools.cached_property
    def items_held(self) -> tuple[int, ...]:
        """For each unit, the items in its input buffer: those in flight since its earliest producer."""
        levels = self.levels
        return tuple(
            level - min(levels[producer] if producer >= 0 else 0 for producer in unit.after) + 1
            for unit, level in zip(self.units, levels, strict=True)
        )

    def makespan_cycles(self, unit_cycles: Sequence[int], items: int, arithmetic_cycles: int = 0) -> int:
        """Cycles until the last of `items` leaves the last unit; `unit_cycles` are those of each unit for one item.

        A unit passes an item on `arithmetic_cycles` later than it can take the next one.
        """
        after = {number: unit.after for number, unit in enumerate(self.units)}
        timing = {number: (cycles, cycles + arithmetic_cycles) for number, cycles in enumerate(unit_cycles)}
        return makespan_cycles(after, timing, items, source=-1)


_Stage = TypeVar("_Stage", int, str)


def makespan_cycles(
    graph: Mapping[_Stage, tuple[_Stage, ...]],
    timing: Mapping[_Stage, tuple[int, float]],
    items: int,
    source: _Stage,
) -> int:
    """Cycles until the last of `items` has left the last stage of `graph`, which maps each stage to its producers.

    Each stage comes after its producers; `source` stands for the item itself. `timing` holds the interval and the
    latency of each stage in cycles. The result is exact where items stream one by one and never wait for a free buffer.
    """
    return math.ceil(max(last for _, last in departures(graph, timing, items, {source: (0.0, 0.0)}).values()))


def departures(
    graph: Mapping[_Stage, tuple[_Stage, ...]],
    timing: Mapping[_Stage, tuple[float, float]],
    items: int,
    sources: Mapping[_Stage, tuple[float, float]],
    ready: Mapping[_Stage, float] | None = None,
) -> dict[_Stage, tuple[float, float]]:
    """The cycles in which the first and the last of `items` leave each stage of `graph` and each of `sources`.

    `sources` gives these two for where items come from; in between they come evenly. A stage begins at its `ready`. The
    last item leaves a stage after it has come, or after `items` intervals since the first one was taken: no item
    between the two is later.
    """
    found = dict(sources)
    for stage, producers in graph.items():
        interval, latency = timing[stage]
        first = max(*(found[producer][0] for producer in producers), (ready or {}).get(stage, 0.0))
        last = max(*(found[producer][1] for producer in producers), first + (items - 1) * interval)
        found[stage] = first + latency, last + latency
    return found


class _Builder:
    """Collects units; each method adds one or a chain, and returns their indices."""

    def __init__(self) -> None:
        self.units: list[TensorUnit] = []

    def add(self, name: str, kind: UnitKind, layer: LayerShape, after: tuple[int, ...]) -> int:
        backward = kind == "BP"
        reads, writes = (layer.outputs, layer.inputs) if backward else (layer.inputs, layer.outputs)
        if kind == "GA":
            reads, writes = layer.inputs + layer.outputs, 1
        self.units.append(TensorUnit(name, kind, layer.macs, reads, writes, layer.weights, after))
        return len(self.units) - 1

    def forward(self, name: str, layers: Sequence[LayerShape], after: int = -1) -> list[int]:
        """Add FP of all layers."""
        if not layers:
            raise ConfigurationError("A learner's pipeline needs at least one layer with weights; found none.")
        found: list[int] = []
        for number, layer in enumerate(layers, start=1):
            after = self.add(f"FP {name} {number}", "FP", layer, (after,))
            found.append(after)
        return found

    def loss(self, name: str, layer: LayerShape, after: tuple[int, ...]) -> int:
        values = layer.outputs
        self.units.append(TensorUnit(f"LOSS {name}", "LOSS", values, 2 * values, values, 0, after))
        return len(self.units) - 1

    def backward(
        self, name: str, layers: Sequence[LayerShape], forward: Sequence[int], after: int, *, train: bool, first: int
    ) -> int:
        """Add BP from the last layer down to layer `first`, and with `train` GA of all layers; returns the last BP."""
        for number in range(len(layers), 0, -1):
            layer = layers[number - 1]
            if train:
                activations = forward[number - 2] if number > 1 else -1
                self.add(f"GA {name} {number}", "GA", layer, (after, activations))
            if number >= first:
                after = self.add(f"BP {name} {number}", "BP", layer, (after,))
        return after


def dqn_pipeline(layers: Sequence[LayerShape], *, double: bool = False) -> LearnerPipeline:
    """The pipeline of DQN: CF'22 Sec. 3.2.1, with FP of the target network in parallel (Sec. 3.2.4).

    `double` adds the FP of the network on the next observation, for double DQN.
    """
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
    """The pipeline of actor-critic algorithms such as DDPG, with the lagged critic of CF'22 Sec. 3.2.4.

    Critics learn from the target critics at the target policy's action. In parallel the actor learns from critics with
    the weights of the previous iteration; its gradient flows through FP and BP of `critics_of_actor` of them. With 0
    these units are left out, as in the DSP count of CF'22 Table 2.
    """
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


def pipeline_of(trainer: object) -> LearnerPipeline:
    """The pipeline of a trainer that derives from `pearl.algorithms`, by its update rule.

    Raises TrainerError for any other trainer.
    """
    own = type(trainer).__name__
    rule = update_rule_of(trainer)
    if rule is not None and rule.quantiles:
        raise TrainerError(f"{own} learns quantiles of the return, which the model of Learners does not count")
    if rule is not None and rule.ensemble:
        raise TrainerError(f"{own} has an ensemble of critics, which the model of Learners does not count")
    if rule is not None and rule.actor is None:
        (network,) = rule.critics
        layers = layers_of(extract_network("policy", network.in_torch, network.input_shape))
        if not layers:
            raise TrainerError(f"{own}'s network has no layers that can be traced")
        return dqn_pipeline(layers, double=rule.double)
    if rule is not None and rule.actor is not None:
        return actor_critic_pipeline(
            _linear_layers(own, "actor", rule.actor.in_torch),
            _linear_layers(own, "critic", rule.critics[0].in_torch),
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
