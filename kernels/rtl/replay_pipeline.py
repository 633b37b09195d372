"""The replay pipeline of PEARL Fig. 6 as synthesizable RTL: a stream of requests through one stage per tree level.

Only a level's own stage reads and writes its memory. Requests enter by one port with an operation code, keep their
order, and leave as results after `TreeShape.latency` cycles. This latency is the same for all operations: each spends
as long in a stage as a sampling would. So the distance between two requests never changes, a request sees exactly the
writes of earlier ones, and no stage ever stalls. Results cannot be refused: the sender must have room for them.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from amaranth.hdl import Array, Cat, Elaboratable, Module, Mux, Shape, Signal, Value, unsigned
from amaranth.lib import data, stream, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out
from numpy.typing import NDArray

from kernels.rtl.requests import Operation
from pearl.backends.fpga.tree_shape import TreeShape


def request_layout(shape: TreeShape) -> data.StructLayout:
    """Return the fields of a request: operation, leaf index (0 for a sampling) and operand."""
    return data.StructLayout({"operation": Operation, "index": shape.index_bits, "operand": shape.bits(0)})


def result_layout(shape: TreeShape) -> data.StructLayout:
    """Return the fields of a result: operation, leaf index and the leaf's value after the operation."""
    return data.StructLayout({"operation": Operation, "index": shape.index_bits, "value": shape.leaf_bits})


class _Token:
    """A request between two stages."""

    def __init__(self, shape: TreeShape, operand_bits: int, name: str) -> None:
        self.valid = Signal(name=f"{name}_valid")
        self.operation = Signal(Operation, name=f"{name}_operation", reset_less=True)
        self.index = Signal(shape.index_bits, name=f"{name}_index", reset_less=True)
        self.operand = Signal(operand_bits, name=f"{name}_operand", reset_less=True)

    def follow(self, other: Any, valid: Value | None = None) -> list[Value]:
        """Return the assignments of another token, or of a request's fields, to this one."""
        return [
            self.valid.eq(other.valid if valid is None else valid),
            self.operation.eq(other.operation),
            self.index.eq(other.index),
            self.operand.eq(other.operand),
        ]

    def difference(self, shape: TreeShape) -> Value:
        """Return an UPDATE's operand, signed."""
        return self.operand[: shape.leaf_bits + 1].as_signed()

    def is_valid(self, operation: Operation) -> Value:
        """Return whether this is a request of `operation`."""
        return self.valid & (self.operation == operation)


class _LeafCopy(Elaboratable):
    """Turns ASSIGN into UPDATE, with a copy of every leaf that includes all earlier requests."""

    latency = 2

    def __init__(self, shape: TreeShape, request: _Token, leaves: Sequence[int]) -> None:
        self.shape, self.request = shape, request
        self.out = _Token(shape, shape.bits(0), "copied")
        self.memory = Memory(shape=unsigned(shape.leaf_bits), depth=max(shape.slots, 2), init=leaves)

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.submodules.memory = memory = self.memory
        write = memory.write_port()
        read = memory.read_port(transparent_for=(write,) if self.shape.cycles_per_access == 1 else ())
        token = _Token(self.shape, self.shape.bits(0), "read")
        m.d.sync += token.follow(self.request)
        m.d.comb += read.addr.eq(self.request.index)

        assigns = token.is_valid(Operation.ASSIGN)
        new = Signal(self.shape.leaf_bits)
        difference = Signal(Shape(self.shape.leaf_bits + 1, signed=True))
        m.d.comb += [
            new.eq(Mux(assigns, token.operand, read.data + token.difference(self.shape))),
            difference.eq(new - read.data),
            write.addr.eq(token.index),
            write.data.eq(new),
            write.en.eq(assigns | token.is_valid(Operation.UPDATE)),
        ]
        m.d.sync += self.out.follow(token)
        with m.If(assigns):
            m.d.sync += [self.out.operation.eq(Operation.UPDATE), self.out.operand.eq(difference.as_unsigned())]
        return m


class _Root(Elaboratable):
    """The total: an update changes it first."""

    def __init__(self, shape: TreeShape, request: _Token, total: int) -> None:
        self.shape, self.request = shape, request
        self.total = Signal(shape.bits(0), init=total)
        self.out = _Token(shape, shape.bits(0), "rooted")

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.d.sync += self.out.follow(self.request)
        with m.If(self.request.is_valid(Operation.UPDATE)):
            m.d.sync += self.total.eq(self.total + self.request.difference(self.shape))
        return m


class _Level(Elaboratable):
    """The stage of one level: finds one digit of a sampling's index, adds an update's difference to one node."""

    def __init__(self, shape: TreeShape, level: int, request: _Token, nodes: NDArray[np.uint64]) -> None:
        self.shape, self.level, self.request = shape, level, request
        self.is_leaf = level == shape.depth
        self.bits = shape.bits(level)
        self.out = _Token(shape, self.bits, f"level{level}")
        memory = shape.memory(level)
        words = np.zeros(memory.rows * shape.lanes, np.uint64)
        words[: len(nodes)] = nodes
        self.memory = Memory(
            shape=data.ArrayLayout(unsigned(self.bits), shape.lanes),
            depth=max(memory.rows, 2),
            init=words.reshape(-1, shape.lanes).tolist() if len(nodes) else [],
        )

    def elaborate(self, platform: object) -> Module:
        shape, lanes, beats, pace = self.shape, self.shape.lanes, self.shape.beats, self.shape.cycles_per_access
        m = Module()
        m.submodules.memory = memory = self.memory
        write = memory.write_port()
        read = memory.read_port(transparent_for=(write,) if pace == 1 else ())

        # All requests have the same delay: delayed[c] entered c cycles ago. After the comparison of targets, only
        # differences and leaves must be carried.
        delayed = [self.request]
        for age in range(1, shape.level_latency):
            bits = shape.bits(self.level - 1) if age <= 1 + shape.lane_bits else shape.leaf_bits + 1
            delayed.append(_Token(shape, bits, f"delayed{age}"))
        for age in range(1, shape.level_latency):
            m.d.sync += delayed[age].follow(delayed[age - 1])

        # Cycle 0: read the word with the index's node; for a sampling, the first word of the node's children.
        below = (shape.depth - self.level) * shape.digit_bits
        node = Signal(self.level * shape.digit_bits)
        row = Signal(max(len(node) - shape.lane_bits, 1))
        m.d.comb += [node.eq(self.request.index >> below), row.eq(node >> shape.lane_bits), read.addr.eq(row)]
        if beats > 1:
            base = Signal.like(row, reset_less=True)
            asked, _ = self._beat(m, "ask", self.request)
            with m.If(self.request.valid):
                m.d.sync += base.eq(row)
            with m.Else():
                m.d.comb += read.addr.eq(base | asked)

        # Cycle 1: the word has arrived; an update writes it back with one lane changed.
        seen = delayed[1]
        lane = (seen.index >> below)[: shape.lane_bits] if shape.lane_bits else 0
        old, new = Signal(self.bits), Signal(self.bits)
        updates = seen.is_valid(Operation.UPDATE)
        m.d.comb += [
            old.eq(Array(read.data[k] for k in range(lanes))[lane] if lanes > 1 else read.data[0]),
            new.eq(old + seen.difference(shape)),
            write.en.eq(updates),
            write.addr.eq(seen.index >> (below + shape.lane_bits)),
        ]
        for k in range(lanes):
            m.d.comb += write.data[k].eq(Mux(lane == k, new, read.data[k]) if lanes > 1 else new)
        if self.is_leaf:
            with m.If(seen.operation != Operation.SAMPLE):
                m.d.sync += delayed[2].operand.eq(Mux(updates, new, old))

        # Next: the inclusive prefix sums of the word, one level of adders per cycle.
        sums: list[Value] = [read.data[k] for k in range(lanes)]
        for step in range(shape.lane_bits):
            registers = [Signal(self.bits + step + 1, name=f"sum{step}_{k}", reset_less=True) for k in range(lanes)]
            for k in range(lanes):
                m.d.sync += registers[k].eq(sums[k] + sums[(k >> step << step) - 1] if k >> step & 1 else sums[k])
            sums = list(registers)

        # Compare with the rest of the target: where a sum exceeds it, the child is in this word.
        compares = delayed[1 + shape.lane_bits]
        starts = compares.is_valid(Operation.SAMPLE)
        rest, held = Signal(shape.bits(self.level - 1)), Signal(shape.bits(self.level - 1), reset_less=True)
        found = Signal(reset_less=True)
        passed = Signal(lanes)
        m.d.comb += [rest.eq(Mux(starts, compares.operand, held)), passed.eq(Cat(sum_ <= rest for sum_ in sums))]
        chosen = Signal(lanes, reset_less=True)
        chosen_sums = [Signal.like(sum_, name=f"chosen_sum{k}", reset_less=True) for k, sum_ in enumerate(sums)]
        chosen_beat = Signal(range(beats), reset_less=True)
        arrives: Value = starts
        if beats > 1:
            beat, due = self._beat(m, "compare", compares)
            arrives = starts | (due & ~found)
            with m.If(arrives):
                m.d.sync += chosen_beat.eq(Mux(starts, 0, beat))
        with m.If(arrives):
            m.d.sync += [found.eq(~passed[-1]), chosen.eq(passed), held.eq(Mux(passed[-1], rest - sums[-1], rest))]
            m.d.sync += [register.eq(sum_) for register, sum_ in zip(chosen_sums, sums, strict=True)]

        # The choice: the number of passed lanes, and their sum.
        first_above = [~chosen[k] & (chosen[k - 1] if k else 1) for k in range(lanes)]
        before, through = Signal(self.bits + shape.lane_bits), Signal(self.bits + shape.lane_bits)
        position = Signal(max(shape.lane_bits, 1))
        m.d.comb += [
            before.eq(_any(Mux(first_above[k], chosen_sums[k - 1], 0) for k in range(1, lanes))),
            through.eq(_any(Mux(first_above[k], chosen_sums[k], 0) for k in range(lanes))),
            position.eq(_any(Mux(first_above[k], k, 0) for k in range(1, lanes))),
        ]
        leaves = delayed[-1]
        m.d.sync += self.out.follow(leaves)
        with m.If(leaves.operation == Operation.SAMPLE):
            digit = Cat(position[: shape.lane_bits], chosen_beat[: shape.digit_bits - shape.lane_bits])
            m.d.sync += [
                self.out.operation.eq(Mux(found, Operation.SAMPLE, Operation.MISSED)),
                self.out.index.eq(leaves.index | (digit << below)),
                self.out.operand.eq(through - before if self.is_leaf else held - before),
            ]
        return m

    def _beat(self, m: Module, name: str, token: _Token) -> tuple[Value, Value]:
        """Count a family's words from a sampling at `token` on; return the word's number, and whether it is due now."""
        pace, beats = self.shape.cycles_per_access, self.shape.beats
        count = Signal(range(pace * beats), name=f"{name}_count")
        with m.If(token.is_valid(Operation.SAMPLE)):
            m.d.sync += count.eq(1)
        with m.Elif(count != 0):
            m.d.sync += count.eq(Mux(count == pace * beats - 1, 0, count + 1))
        due = (count != 0) & (~count[0] if pace == 2 else 1)
        return count >> (pace - 1), due


def _any(values: Iterable[Value]) -> Value | int:
    """Return the bitwise or of values of which at most one is not 0."""
    return functools.reduce(operator.or_, values, 0)


class ReplayPipeline(wiring.Component):
    """All stages, for one TreeShape.

    `request` accepts one request in each cycle in which it is valid and ready. `result` returns one per request, in
    order, `TreeShape.latency` cycles later, and does not wait. `total`, the root, includes an update one cycle (three
    with `assigns`) after its acceptance: from then on targets may be drawn from it, though the update is still passing
    through the levels.

    `leaves` `(slots,)`, each below `2 ** leaf_bits`, are the tree's contents when the device is configured. A reset
    restores the root alone, not the memories, and drops updates on their way: configure the device again instead.
    """

    def __init__(self, shape: TreeShape, leaves: NDArray[np.uint64] | None = None) -> None:
        self.shape = shape
        self._leaves = np.zeros(0, np.uint64) if leaves is None else np.asarray(leaves, np.uint64)
        super().__init__(
            {
                "request": In(stream.Signature(request_layout(shape))),
                "result": Out(stream.Signature(result_layout(shape), always_ready=True)),
                "total": Out(shape.bits(0)),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """Return head, root and levels, connected."""
        shape = self.shape
        m = Module()

        # A sampling uses the stages' memories for several beats; later requests wait at the head.
        waits = Signal(range(max(shape.sample_cycles, 2)))
        accepted = _Token(shape, shape.bits(0), "accepted")
        m.d.comb += [
            self.request.ready.eq(waits == 0),
            *accepted.follow(self.request.payload, self.request.valid & self.request.ready),
        ]
        with m.If(accepted.is_valid(Operation.SAMPLE)):
            m.d.sync += waits.eq(shape.sample_cycles - 1)
        with m.Elif(accepted.valid):
            m.d.sync += waits.eq(shape.other_cycles - 1)
        with m.Elif(waits != 0):
            m.d.sync += waits.eq(waits - 1)

        token = accepted
        if shape.assigns:
            m.submodules.leaf_copy = copy = _LeafCopy(shape, token, self._leaves.tolist())
            token = copy.out
        m.submodules.root = root = _Root(shape, token, int(self._leaves.sum()))
        m.d.comb += self.total.eq(root.total)
        token = root.out
        self.levels = []
        for level, nodes in enumerate(level_sums(shape, self._leaves), 1):
            stage = _Level(shape, level, token, nodes)
            m.submodules[f"level{level}"] = stage
            self.levels.append(stage)
            token = stage.out
        m.d.comb += [
            self.result.valid.eq(token.valid),
            self.result.payload.operation.eq(token.operation),
            self.result.payload.index.eq(token.index),
            self.result.payload.value.eq(token.operand),
        ]
        return m


def level_sums(shape: TreeShape, leaves: NDArray[np.uint64]) -> list[NDArray[np.uint64]]:
    """Return the nodes of levels 1 to `depth`, each `(nodes,)` uint64, over `leaves` `(n,)`; empty for no leaves."""
    levels = [np.asarray(leaves, np.uint64)]
    while len(levels) < shape.depth:
        below = levels[0]
        families = np.zeros(-(-len(below) // shape.fanout) * shape.fanout, np.uint64)
        families[: len(below)] = below
        levels.insert(0, families.reshape(-1, shape.fanout).sum(axis=1, dtype=np.uint64))
    return levels
