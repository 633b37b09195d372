"""Simulates the GAE processing element and the array cycle by cycle, in Amaranth's simulator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from amaranth.sim import Simulator
from numpy.typing import NDArray

from kernels.rtl.gae_array import GaeArray
from kernels.rtl.gae_element import GaeElement
from kernels.rtl.gae_reference import CodeScale, Coefficients, Results, Rollout
from pearl.backends.fpga.gae_shape import GaeShape


@dataclass(frozen=True)
class ArrayRun:
    """A rollout's results, the cycles in which the array was busy with it, and what its `saturated` said."""

    advantages: NDArray[np.int64]
    returns: NDArray[np.int64]
    busy_cycles: int
    saturated: bool


def run_element(
    shape: GaeShape, coefficients: Coefficients, rollouts: Sequence[Rollout], *, gap: int = 0, cycles: int = 0
) -> Results:
    """Send rollouts of one row through an element, `gap` cycles apart, and return its outputs of each cycle.

    The outputs are `(cycles, 1)`, the first of the cycle in which the first step arrives; by default they end with the
    results of the last step. Between rollouts the inputs are random.
    """
    element = GaeElement(shape)
    rng = np.random.default_rng(0)
    inputs: list[tuple[int, int, int, int, int]] = []
    for rollout in rollouts:
        inputs += [
            (int(t == len(rollout.rewards) - 1), int(rollout.ends[t, 0]), *_row(rollout, t))
            for t in range(len(rollout.rewards) - 1, -1, -1)
        ]
        noise = rng.integers(-(2**31), 2**31, (gap, 3)).tolist()
        inputs += [(int(rng.integers(2)), int(rng.integers(2)), *numbers) for numbers in noise]
    ports = (element.first, element.ends, element.reward, element.value, element.last_value)
    outputs: list[tuple[int, int, int]] = []

    async def bench(context: Any) -> None:
        context.set(element.coefficients, asdict(coefficients))
        for cycle in range(cycles or len(inputs) - gap + shape.element_latency):
            for port, value in zip(ports, inputs[min(cycle, len(inputs) - 1)], strict=True):
                context.set(port, value)
            outputs.append(
                (context.get(element.advantage), context.get(element.returned), context.get(element.saturated))
            )
            await context.tick()

    _simulate(element, bench)
    columns = np.array(outputs, np.int64)
    return Results(columns[:, :1], columns[:, 1:2], columns[:, 2:] != 0)


def run_array(
    shape: GaeShape,
    coefficients: Coefficients,
    rollouts: Sequence[Rollout],
    scales: tuple[CodeScale, CodeScale] | None = None,
) -> list[ArrayRun]:
    """Push, start and read one rollout after the other; `scales` are those of the rewards' and the values' codes."""
    array = GaeArray(shape)
    done: list[ArrayRun] = []

    async def bench(context: Any) -> None:
        context.set(array.coefficients, asdict(coefficients))
        if scales:
            context.set(array.reward_codes, asdict(scales[0]))
            context.set(array.value_codes, asdict(scales[1]))
        for rollout in rollouts:
            context.set(array.last_values, rollout.last_values.tolist())
            context.set(array.push.valid, 1)
            for rewards, values, ends in zip(rollout.rewards, rollout.values, rollout.ends, strict=True):
                bits = sum(int(end) << row for row, end in enumerate(ends))
                context.set(array.push.payload, {"rewards": rewards.tolist(), "values": values.tolist(), "ends": bits})
                if not context.get(array.push.ready):
                    raise RuntimeError(f"The array did not take {len(rollout.rewards)} steps, one per cycle.")
                await context.tick()
            context.set(array.push.valid, 0)
            context.set(array.start, 1)
            await context.tick()
            context.set(array.start, 0)
            busy = 0
            while context.get(array.busy):
                busy += 1
                if busy > 2 * shape.rollout_cycles(shape.horizon):
                    raise RuntimeError(f"The array was busy for more than {busy} cycles.")
                await context.tick()
            results = np.zeros((2, *rollout.rewards.shape), np.int64)
            for step in range(len(rollout.rewards)):
                context.set(array.read_step, step)
                await context.tick()
                for row in range(shape.rows):
                    results[:, step, row] = context.get(array.advantages[row]), context.get(array.returns[row])
            done.append(ArrayRun(results[0], results[1], busy, bool(context.get(array.saturated))))

    _simulate(array, bench)
    return done


def _row(rollout: Rollout, t: int) -> tuple[int, int, int]:
    return int(rollout.rewards[t, 0]), int(rollout.values[t, 0]), int(rollout.last_values[0])


def _simulate(design: Any, bench: Any) -> None:
    simulator = Simulator(design)
    simulator.add_clock(1e-9)
    simulator.add_testbench(bench)
    simulator.run()
