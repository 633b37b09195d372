"""Simulates the replay pipeline cycle by cycle, in Amaranth's simulator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from amaranth.sim import Simulator
from numpy.typing import NDArray

from kernels.rtl.replay_pipeline import ReplayPipeline
from kernels.rtl.requests import Operation, Request, Result, Run
from pearl.backends.fpga.tree_shape import TreeShape


class Simulation:
    """A pipeline filled with `leaves`: building it takes longer than many a run, each of which begins with them."""

    def __init__(self, shape: TreeShape, leaves: NDArray[np.uint64] | None = None) -> None:
        self._shape, self._has_run = shape, False
        self._pipeline = ReplayPipeline(shape, leaves)
        self._simulator = Simulator(self._pipeline)
        self._simulator.add_clock(1e-9)
        self._simulator.add_testbench(self._bench)

    def run(self, requests: Sequence[Request]) -> Run:
        """Send `requests` (at least one), each as early as its gap allows."""
        shape = self._shape
        self._requests = requests
        self._limit = (
            sum(request.gap for request in requests) + (len(requests) + 1) * shape.sample_cycles + shape.latency
        )
        self._results: list[Result] = []
        self._levels: list[NDArray[np.uint64]] = []
        if self._has_run:
            self._simulator.reset()
        self._has_run = True
        self._simulator.run()
        if len(self._results) != len(requests):
            raise RuntimeError(f"{len(requests)} requests had {len(self._results)} results after {self._limit} cycles.")
        return Run(tuple(self._results), tuple(self._levels))

    async def _bench(self, context: Any) -> None:
        pipeline, results = self._pipeline, self._results
        accepted: list[int] = []
        waiting = iter(self._requests)
        request = next(waiting, None)
        gap = request.gap if request else 0
        payload, result = pipeline.request.payload, pipeline.result
        for cycle in range(self._limit + 1):
            offers = request is not None and gap == 0
            context.set(pipeline.request.valid, int(offers))
            if offers and request is not None:
                operand = request.operand % 2 ** self._shape.bits(0)
                context.set(payload, {"operation": request.operation, "index": request.index, "operand": operand})
                if context.get(pipeline.request.ready):
                    accepted.append(cycle)
                    request = next(waiting, None)
                    gap = request.gap if request else 0
            elif gap:
                gap -= 1
            if context.get(result.valid):
                answer = context.get(result.payload)
                operation, taken = Operation(answer.operation), accepted[len(results)]
                results.append(Result(operation, answer.index, answer.value, taken, cycle))
            if len(results) == len(self._requests):
                break
            await context.tick()
        self._levels.append(np.array([context.get(pipeline.total)], np.uint64))
        for stage in pipeline.levels:
            nodes = [
                context.get(stage.memory.data[row])[lane]
                for row in range(self._shape.memory(stage.level).rows)
                for lane in range(self._shape.lanes)
            ]
            self._levels.append(np.array(nodes, np.uint64))


def run(shape: TreeShape, requests: Sequence[Request], leaves: NDArray[np.uint64] | None = None) -> Run:
    """Send `requests` (at least one) through a pipeline filled with `leaves`, each as early as its gap allows."""
    return Simulation(shape, leaves).run(requests)
