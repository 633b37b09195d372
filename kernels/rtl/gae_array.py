"""HEPPO-GAE's array as synthesizable RTL: rows of memories, loaders and processing elements (Sec. III-C and IV).

Each row has a memory for rewards and one for values, which are stacks: a step of all trajectories is pushed at once,
and popped in the opposite order. Advantages and returns overwrite them. Pops and results use one port each, and never
meet in an address: results are `GaeShape.latency` steps behind. All rows work in lockstep, as rollouts are equally
long and an end of an episode costs no cycle. So there is no crossbar, and one counter addresses all memories.
"""

from __future__ import annotations

from amaranth.hdl import Cat, Elaboratable, Module, Mux, Signal, Value, signed, unsigned
from amaranth.lib import data, stream, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out

from kernels.rtl.gae_element import GaeElement, coefficient_layout, rounded_sum
from pearl.backends.fpga.gae_shape import CODE_BITS, NUMBER_BITS, SCALE_BITS, SCALE_FRACTION, GaeShape

# What a code stands for: offset + scale * code. The offset has the numbers' unit, the scale SCALE_FRACTION bits more.
CODE_LAYOUT = data.StructLayout({"offset": signed(NUMBER_BITS), "scale": SCALE_BITS})


def step_layout(shape: GaeShape) -> data.StructLayout:
    """Return what is pushed: a reward and a value for each row, and whether an episode ended after the step."""
    one = unsigned(CODE_BITS) if shape.codes else signed(NUMBER_BITS)
    each = data.ArrayLayout(one, shape.rows)
    return data.StructLayout({"rewards": each, "values": each, "ends": shape.rows})


class _Loader(Elaboratable):
    """A memory of one row and its ports; turns words into numbers (ReL and VaL of Fig. 5)."""

    def __init__(self, shape: GaeShape, kind: Value, extra_bits: int = 0) -> None:
        self.shape, self.kind = shape, kind
        self.number = Signal(signed(NUMBER_BITS))
        self.memory = Memory(shape=unsigned(NUMBER_BITS + extra_bits), depth=shape.horizon, init=[])
        self.read, self.write = self.memory.read_port(), self.memory.write_port()

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.submodules.memory = self.memory
        word = self.read.data
        if self.shape.codes:
            scaled = Signal(CODE_BITS + SCALE_BITS, reset_less=True)
            m.d.sync += scaled.eq(word[:CODE_BITS] * self.kind.scale)
            halves = scaled.shift_right(SCALE_FRACTION - 1)
            decoded = Signal(signed(NUMBER_BITS), reset_less=True)
            m.d.sync += decoded.eq(rounded_sum(self.kind.offset, Cat(halves, 0).as_signed()))
            m.d.comb += self.number.eq(decoded)
        else:
            m.d.comb += self.number.eq(word[:NUMBER_BITS])
        return m


class _Row(Elaboratable):
    """One trajectory's memories, with their loaders, and the element that they feed."""

    def __init__(self, shape: GaeShape, first: Value, reward_codes: Value, value_codes: Value) -> None:
        self.shape, self.first = shape, first
        self.rewards = _Loader(shape, reward_codes)
        self.values = _Loader(shape, value_codes, extra_bits=1)  # an episode ended after the step
        self.element = GaeElement(shape)

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.submodules.rewards, m.submodules.values, m.submodules.element = self.rewards, self.values, self.element
        ends = self.values.read.data[NUMBER_BITS]
        for stage in range(1, self.shape.loader_latency):
            register = Signal(name=f"ends{stage}", reset_less=True)
            m.d.sync += register.eq(ends)
            ends = register
        m.d.comb += [
            self.element.first.eq(self.first),
            self.element.ends.eq(ends),
            self.element.reward.eq(self.rewards.number),
            self.element.value.eq(self.values.number),
        ]
        return m


class _Control(Elaboratable):
    """Counts the steps on the stacks, and addresses all memories: pushes and pops, then results and reads."""

    def __init__(self, shape: GaeShape) -> None:
        self.shape = shape
        self.start, self.busy = Signal(), Signal()
        self.offered, self.ready, self.pushes = Signal(), Signal(), Signal()
        self.first, self.writes = Signal(), Signal()  # the last step is at the elements; a result is at the memories
        self.read_step = Signal(range(shape.horizon))
        self.read_address, self.write_address = Signal(range(shape.horizon)), Signal(range(shape.horizon))

    def elaborate(self, platform: object) -> Module:
        m = Module()
        steps = Signal(range(self.shape.horizon + 1))  # on the stacks
        results = Signal(range(self.shape.horizon + 1))  # not yet written
        waits = Signal(range(self.shape.latency + 1))  # until the first result
        m.d.comb += [
            self.ready.eq(~self.busy & ~self.start & (steps != self.shape.horizon)),
            self.pushes.eq(self.offered & self.ready),
            self.writes.eq(self.busy & (waits == 0)),
            self.read_address.eq(Mux(self.busy, steps - 1, self.read_step)),
            self.write_address.eq(Mux(self.busy, results - 1, steps)),
        ]
        with m.If(self.busy):
            with m.If(steps != 0):
                m.d.sync += steps.eq(steps - 1)
            with m.If(waits != 0):
                m.d.sync += waits.eq(waits - 1)
            with m.Else():
                m.d.sync += [results.eq(results - 1), self.busy.eq(results != 1)]
        with m.Elif(self.start):
            m.d.sync += [self.busy.eq(steps != 0), results.eq(steps), waits.eq(self.shape.latency)]
        with m.Elif(self.pushes):
            m.d.sync += steps.eq(steps + 1)

        popped = self.busy & (waits == self.shape.latency)
        for stage in range(1, self.shape.loader_latency):
            register = Signal(name=f"popped{stage}")
            m.d.sync += register.eq(popped)
            popped = register
        m.d.sync += self.first.eq(popped)
        return m


class GaeArray(wiring.Component):
    """All rows and their control, for one GaeShape.

    While it is not `busy`, the array takes a step by `push` in each cycle until `horizon` steps are there. `start`
    turns the pushed steps into results, which takes `GaeShape.rollout_cycles`; `advantages` and `returns` are those of
    step `read_step` of the cycle before. They stay until they are pushed over by the next rollout. `saturated` says
    that one of the results is beyond 32 bits and was limited to them. `coefficients`, `last_values` and the meaning of
    codes, `reward_codes` and `value_codes`, must not change while the array is busy.
    """

    def __init__(self, shape: GaeShape) -> None:
        self.shape = shape
        numbers = data.ArrayLayout(signed(NUMBER_BITS), shape.rows)
        codes = {"reward_codes": In(CODE_LAYOUT), "value_codes": In(CODE_LAYOUT)} if shape.codes else {}
        super().__init__(
            {
                "coefficients": In(coefficient_layout(shape)),
                **codes,
                "push": In(stream.Signature(step_layout(shape))),
                "last_values": In(numbers),
                "start": In(1),
                "busy": Out(1),
                "saturated": Out(1),
                "read_step": In(range(shape.horizon)),
                "advantages": Out(numbers),
                "returns": Out(numbers),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """Return the control and the rows, connected."""
        m = Module()
        m.submodules.control = control = _Control(self.shape)
        m.d.comb += [
            control.start.eq(self.start),
            control.offered.eq(self.push.valid),
            control.read_step.eq(self.read_step),
            self.push.ready.eq(control.ready),
            self.busy.eq(control.busy),
        ]
        codes = (self.reward_codes, self.value_codes) if self.shape.codes else (None, None)
        over = Signal(self.shape.rows)
        for number in range(self.shape.rows):
            m.submodules[f"row{number}"] = row = _Row(self.shape, control.first, *codes)
            pushed, element = self.push.payload, row.element
            # Numbers are sign-extended and codes zero-extended, as their layout says.
            reward = Mux(self.busy, element.advantage, pushed["rewards"][number])
            value = Mux(self.busy, element.returned, pushed["values"][number])
            m.d.comb += [
                element.coefficients.eq(self.coefficients),
                element.last_value.eq(self.last_values[number]),
                row.rewards.write.data.eq(reward),
                row.values.write.data.eq(Cat(value[:NUMBER_BITS], pushed["ends"][number])),
                self.advantages[number].eq(row.rewards.read.data),
                self.returns[number].eq(row.values.read.data[:NUMBER_BITS]),
                over[number].eq(element.saturated),
            ]
            for loader in (row.rewards, row.values):
                m.d.comb += [
                    loader.read.addr.eq(control.read_address),
                    loader.write.addr.eq(control.write_address),
                    loader.write.en.eq(control.writes | control.pushes),
                ]
        with m.If(control.writes):
            m.d.sync += self.saturated.eq(self.saturated | over.any())
        with m.Elif(self.start & ~self.busy):
            m.d.sync += self.saturated.eq(0)
        return m
