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


def run(shape: TreeShape, requests: Sequence[Request], leaves: NDArray[np.uint64] | None = None) -> Run:
    """Send `requests` (at least one) through a pipeline filled with `leaves`, each as early as its gap allows."""
    pipeline = ReplayPipeline(shape, leaves)
    simulator = Simulator(pipeline)
    simulator.add_clock(1e-9)
    results: list[Result] = []
    accepted: list[int] = []
    levels: list[NDArray[np.uint64]] = []
    limit = sum(request.gap for request in requests) + (len(requests) + 1) * shape.sample_cycles + shape.latency

    async def bench(context: Any) -> None:
        waiting = iter(requests)
        request = next(waiting, None)
        gap = request.gap if request else 0
        payload, result = pipeline.request.payload, pipeline.result
        for cycle in range(limit + 1):
            offers = request is not None and gap == 0
            context.set(pipeline.request.valid, int(offers))
            if offers and request is not None:
                operand = request.operand % 2 ** shape.bits(0)
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
            if len(results) == len(requests):
                break
            await context.tick()
        levels.append(np.array([context.get(pipeline.total)], np.uint64))
        for stage in pipeline.levels:
            nodes = [
                context.get(stage.memory.data[row])[lane]
                for row in range(shape.memory(stage.level).rows)
                for lane in range(shape.lanes)
            ]
            levels.append(np.array(nodes, np.uint64))

    simulator.add_testbench(bench)
    simulator.run()
    if len(results) != len(requests):
        raise RuntimeError(f"{len(requests)} requests had {len(results)} results after {limit} cycles.")
    return Run(tuple(results), tuple(levels))
