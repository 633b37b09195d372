"""The cycles of a gradient step on an FPGA, as the kernels of `kernels/include/pearl/fpga_learner.hpp` go through it.

WU streams the weights to FP and BP, while GA clears its memory. Items stream through the stages. GA passes its
gradients to WU, which adds up their norm along a chain of layers, and moves the weights. The cycles of each kernel come
from one of two sources: a compiler's report (`reported_learner`), or nominal ones (`nominal_kernels`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from composer.fpga.learner_pipeline import departures
from composer.fpga.learner_program import LearnerProgram
from composer.fpga.replay_timing import ReplayTiming


@dataclass(frozen=True)
class StagePass:
    """Cycles of a stage: of weights or clearing before its items, of each item, and of gradients after its items."""

    before: float
    interval: int
    latency: float
    after: float


@dataclass(frozen=True)
class WeightPass:
    """Cycles of a WU stage: streaming the weights, receiving the gradient, its norm, and moving the weights."""

    stream: float
    gradient: float
    norm: float
    move: float


@dataclass(frozen=True)
class WeighingPass:
    """Cycles in `collect`, from the last sampled item to the first importance weight, and from weight to weight."""

    first: float
    interval: int


@dataclass(frozen=True)
class JoinedStep:
    """Cycles of an iteration of setting 2, from the first sampled item; insertions come between iterations.

    `learner` is the Learner's step with all items at hand. Sampling makes it later by `sampling`. After it, the return
    of the priorities takes `update` further cycles: less than the update itself, which BP, GA and WU hide in part.
    """

    learner: int
    sampling: int
    update: int

    @property
    def cycles(self) -> int:
        """All of it."""
        return self.learner + self.sampling + self.update


@dataclass(frozen=True)
class StepTiming:
    """The kernels' cycles of a step of `batch_size` items in `copies` copies, and what follows from them."""

    program: LearnerProgram
    batch_size: int
    copies: int
    stages: Mapping[str, StagePass]
    weights: Mapping[str, WeightPass]

    def alone(self, submit_interval: int, resolve_interval: int) -> int:
        """Cycles of a step in setting 1, whose rows `submit` reads from memory, one every `submit_interval` cycles."""
        moved, resolved = self._step({"": (0.0, submit_interval)}, resolve_interval)
        return math.ceil(max(moved, resolved))

    def joined(self, replay: ReplayTiming, depth: int, weighing: WeighingPass, return_interval: int) -> JoinedStep:
        """Cycles of an iteration of setting 2 with a tree of `depth` levels below its root.

        LOSS waits for the importance weights, which come after the last sampled item. `feed` returns the priorities
        after the last of them has come, one every `return_interval` cycles.
        """
        learner, _ = self._step({"": (0.0, 0)}, 0)
        weights = replay.sampling.cycles(depth, self.batch_size) + weighing.first
        arrivals = {
            "": (float(replay.sampling.cycles(depth, 1)), replay.sampling.interval_cycles),
            "weights": (float(weights), weighing.interval),
        }
        moved, returned = self._step(arrivals, return_interval)
        updated = returned + replay.update.cycles(depth, self.batch_size)
        learner, moved = math.ceil(learner), math.ceil(moved)
        return JoinedStep(learner, moved - learner, max(0, math.ceil(updated) - moved))

    @property
    def item_interval_cycles(self) -> float:
        """Cycles from one item of the batch to the next, over all copies, in the slowest stage."""
        return max(stage.interval for stage in self.stages.values()) / self.copies

    def _shares(self) -> Iterator[tuple[int, int]]:
        """The rows of the copies that may end last: the number of the first one, and their count."""
        rest = (self.batch_size - 1) % self.copies
        most = -(-self.batch_size // self.copies)
        yield rest, most
        if rest + 1 < self.copies and most > 1:
            yield self.copies - 1, most - 1

    def _step(self, arrivals: Mapping[str, tuple[float, int]], result_interval: int) -> tuple[float, float]:
        """Cycles until the weights have moved, and until the last result has been read from LOSS.

        `arrivals` are, for each source of items, when the first row of the batch comes, and the cycles from row to row.
        """
        graph: dict[str, tuple[str, ...]] = {name: stage.after for name, stage in self.program.stages.items()}
        if "weights" in arrivals:
            graph[self.program.loss] = (*graph[self.program.loss], "weights")
        graph["results"] = (self.program.loss,)
        timing = {name: (float(found.interval), found.latency) for name, found in self.stages.items()}
        timing["results"] = (float(self.copies * result_interval), 0.0)
        moved = returned = 0.0
        for row, items in self._shares():
            sources = {
                name: (first + row * interval, first + (row + (items - 1) * self.copies) * interval)
                for name, (first, interval) in arrivals.items()
            }
            found = departures(graph, timing, items, sources, self._ready)
            returned = max(returned, found["results"][1])
            moved = max(moved, self._moved(found))
        return moved, returned

    @property
    def _ready(self) -> dict[str, float]:
        """When each stage may take its first item: it has got its weights, or cleared its memory."""
        stream = {place: self.weights[name].stream for name, place in self.program.weight_stages.items()}
        ready = {}
        for name, stage in self.program.stages.items():
            got = stream[stage.place] if stage.kind in ("FP", "BP") else 0.0
            ready[name] = max(got, self.stages[name].before)
        return ready

    def _moved(self, found: Mapping[str, tuple[float, float]]) -> float:
        """When the last weight has moved. Layers of one vector pass on the sum of their squares, then move together."""
        arrived: dict[tuple[int, int], float] = {}
        for name, stage in self.program.stages.items():
            if stage.kind == "GA":
                wu = self.weights[f"wu_{stage.place[0]}_{stage.place[1] + 1}"]
                arrived[stage.place] = found[name][1] + max(self.stages[name].after, wu.gradient)
        chains: dict[bool, float] = {}
        moves: dict[bool, float] = {}
        for name, place in self.program.weight_stages.items():
            wu, policy = self.weights[name], place[0] == 0
            chains[policy] = max(chains.get(policy, 0.0), arrived[place]) + wu.norm
            moves[policy] = max(moves.get(policy, 0.0), wu.move)
        return max(chains[vector] + moves[vector] for vector in chains)
