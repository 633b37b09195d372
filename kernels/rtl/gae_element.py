"""HEPPO-GAE's processing element (Sec. III-B, Fig. 4) as synthesizable RTL: an advantage and a return in each cycle.

    delta_t = r_t + gamma V_{t+1} - V_t                                                                     (Eq. 2)
    A_t = sum over i < k of C^i delta_{t+i} + C^k A_{t+k}        C = gamma lambda              (Table II, Eq. 10, 11)
    return_t = V_t + A_t                                                                                    (Eq. 5)

Steps arrive last first, one in each cycle. The sum is built by Horner's rule, one step of lookahead after the other:
D_1 = delta, D_{j+1}(t) = delta_t + C D_j(t+1). An end of an episode only has to cut this one product, wherever it lies
in the window. The loop A_{t+k} to A_t has k registers: A alone (k = 1: product, sum and saturation in one cycle), the
partial products of the multiplier too (k = 2), and their sum (k = 3).

Numbers are 32-bit integers in a unit of the host's choice, as GAE is linear in rewards and values. Products round to
nearest, halves up. Sums have as many bits as they need; only advantages and returns saturate, and say so.
"""

from __future__ import annotations

import functools
import operator

from amaranth.hdl import Cat, Module, Mux, Signal, Value, signed
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from pearl.backends.fpga.gae_shape import (
    DSP_COEFFICIENT_BITS,
    DSP_NUMBER_BITS,
    NUMBER_BITS,
    PRODUCT_CYCLES,
    GaeShape,
)


def coefficient_layout(shape: GaeShape) -> data.StructLayout:
    """Return gamma, C (`decay`) and C**k (`loop_decay`), each at most 1."""
    return data.StructLayout(dict.fromkeys(("gamma", "decay", "loop_decay"), shape.coefficient_bits))


class GaeElement(wiring.Component):
    """One processing element. The steps of a rollout come in consecutive cycles, last first; rollouts at any distance.

    `first` marks a rollout's last step, whose V_{t+1} is `last_value`; after a step that `ends` an episode there is
    neither V_{t+1} nor A_{t+1}. Results follow `GaeShape.element_latency` cycles later.
    """

    def __init__(self, shape: GaeShape) -> None:
        self.shape = shape
        number = signed(NUMBER_BITS)
        super().__init__(
            {
                "coefficients": In(coefficient_layout(shape)),
                "first": In(1),
                "ends": In(1),
                "reward": In(number),
                "value": In(number),
                "last_value": In(number),
                "advantage": Out(number),
                "returned": Out(number),
                "saturated": Out(1),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """Return residual, lookahead, feedback loop and return, one after the other."""
        k = self.shape.lookahead
        m = Module()

        # The residual. V_{t+1} arrived one cycle before V_t.
        value = _register(m, "value", self.value)
        following = _register(m, "following", Mux(self.ends, 0, Mux(self.first, self.last_value, value)))
        step = _register(m, "step", self.reward - self.value)
        gain = product(m, "gain", following, self.coefficients.gamma, PRODUCT_CYCLES)
        residual = _register(m, "residual", rounded_sum(_delayed(m, "step", step, PRODUCT_CYCLES), gain))
        goes_on = _delayed(m, "goes_on", ~(self.first | self.ends), 2 + PRODUCT_CYCLES)

        # The lookahead. The product of step t + 1 is there one cycle before that of step t.
        total, reaches = residual, goes_on
        for term in range(1, k):
            ahead = product(m, f"ahead{term}", total, self.coefficients.decay, PRODUCT_CYCLES)
            residual = _delayed(m, f"residual{term}", residual, PRODUCT_CYCLES - 1)
            goes_on = _delayed(m, f"goes_on{term}", goes_on, PRODUCT_CYCLES - 1)
            total = _register(m, f"total{term}", rounded_sum(residual, Mux(goes_on, ahead, 0)))
            reaches = _register(m, f"reaches{term}", goes_on & _delayed(m, f"reach{term}", reaches, PRODUCT_CYCLES))
            residual = _register(m, f"passed{term}", residual)
            goes_on = _register(m, f"went_on{term}", goes_on)

        # The loop. `reaches`: no episode ended within the window, so A_{t+k} counts.
        advantage = Signal(signed(NUMBER_BITS), reset_less=True)
        rest = product(m, "rest", advantage, self.coefficients.loop_decay, k - 1)
        clipped, over = saturated(m, "total", rounded_sum(total, Mux(reaches, rest, 0)))
        m.d.sync += advantage.eq(clipped)
        over = _register(m, "advantage_over", over)

        value = _delayed(m, "kept_value", value, self.shape.element_latency - 2)
        returned, too = saturated(m, "return", value + advantage)
        m.d.sync += [self.advantage.eq(advantage), self.returned.eq(returned), self.saturated.eq(over | too)]
        return m


def product(m: Module, name: str, number: Value, coefficient: Value, registers: int) -> Value:
    """Return `number * coefficient` in halves of the number's unit, `registers` (0 to 2) cycles later.

    One DSP multiplies a piece of the coefficient by a piece of the number. The coefficient is at most 1, so that the
    result has one bit more than the number.
    """
    parts = []
    for low in range(0, len(coefficient), DSP_COEFFICIENT_BITS):
        piece = coefficient[low : low + DSP_COEFFICIENT_BITS]
        parts.append((number[:DSP_NUMBER_BITS] * piece, low))
        parts.append((number[DSP_NUMBER_BITS:].as_signed() * piece, low + DSP_NUMBER_BITS))
    if registers:
        parts = [(_register(m, f"{name}_part{low}", part), low) for part, low in parts]
    total = functools.reduce(operator.add, (part.shift_left(low) for part, low in parts))
    result = total[len(coefficient) - 2 :][: len(number) + 1].as_signed()
    return _register(m, f"{name}_product", result) if registers > 1 else result


def rounded_sum(number: Value, halves: Value) -> Value:
    """Return the sum of a number and one in halves of the unit, rounded up from a half, by a single adder."""
    return (Cat(1, number).as_signed() + halves).shift_right(1)


def saturated(m: Module, name: str, total: Value) -> tuple[Value, Value]:
    """Return `total` limited to 32 bits, and whether it was beyond them."""
    wide = Signal(total.shape(), name=f"{name}_wide")
    over = Signal(name=f"{name}_over")
    top = wide[NUMBER_BITS - 1 :]
    limit = Cat((~wide[-1]).replicate(NUMBER_BITS - 1), wide[-1])
    m.d.comb += [wide.eq(total), over.eq(top.any() & ~top.all())]
    return Mux(over, limit, wide[:NUMBER_BITS]).as_signed(), over


def _register(m: Module, name: str, value: Value) -> Value:
    register = Signal(value.shape(), name=name, reset_less=True)
    m.d.sync += register.eq(value)
    return register


def _delayed(m: Module, name: str, value: Value, cycles: int) -> Value:
    for age in range(1, cycles + 1):
        value = _register(m, f"{name}_{age}", value)
    return value
