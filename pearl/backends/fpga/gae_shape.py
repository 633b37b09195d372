"""HEPPO-GAE's array of processing elements in hardware: its word widths, multipliers, latencies and cycles.

`kernels/rtl` generates this array, simulates it cycle by cycle and synthesises it; docs/rtl.md compares the cycles and
cells with the paper's.
"""

from __future__ import annotations

from dataclasses import dataclass

from pearl.errors import ConfigurationError

NUMBER_BITS = 32  # rewards, values, advantages and returns (HEPPO-GAE Sec. V-D), signed
CODE_BITS = 8  # a quantised reward or value (Sec. II-C)
SCALE_BITS = 26  # what a code is multiplied by
SCALE_FRACTION = 8  # bits of a scale below the numbers' unit: 255 roundings of a scale stay below half a unit
LOOKAHEADS = (1, 2, 3)
PRODUCT_CYCLES = 2  # of a product outside the feedback loop: the partial products, their sum

# The ports of a DSP48E2 are signed, 27 x 18 bits (AMD UG579): unsigned pieces of a factor have a bit less.
DSP_COEFFICIENT_BITS, DSP_NUMBER_BITS = 26, 17


@dataclass(frozen=True)
class GaeShape:
    """`rows` processing elements with `lookahead` steps (k), each with memories for a trajectory of `horizon` steps.

    The array takes 32-bit numbers, or 8-bit `codes` and de-quantises them. gamma, C = gamma * lambda and C**k are
    unsigned with `coefficient_bits` bits, one of them above the point, so that 1 is exact. 26 bits fit a port of the
    DSP; more double the multipliers.

    Raises ConfigurationError for invalid combinations.
    """

    lookahead: int = 2
    rows: int = 64
    horizon: int = 1024
    codes: bool = False
    coefficient_bits: int = DSP_COEFFICIENT_BITS

    def __post_init__(self) -> None:
        if self.lookahead not in LOOKAHEADS:
            raise ConfigurationError(f"Lookahead is 1, 2 or 3 steps; found {self.lookahead}.")
        if self.rows < 1 or self.horizon < 2:
            raise ConfigurationError(
                f"An array has at least one row, whose memories hold at least two steps; found {self.rows} rows of "
                f"{self.horizon} steps."
            )
        if not 8 <= self.coefficient_bits <= NUMBER_BITS:
            raise ConfigurationError(f"Coefficients have 8 to {NUMBER_BITS} bits; found {self.coefficient_bits}.")

    @property
    def coefficient_fraction(self) -> int:
        """Bits of a coefficient below the point."""
        return self.coefficient_bits - 1

    def sum_bits(self, terms: int) -> int:
        """Return the bits of a sum of `terms` discounted TD residuals, each of three numbers."""
        return NUMBER_BITS + (3 * terms).bit_length()

    @property
    def factors(self) -> tuple[int, ...]:
        """The bits of each number that is multiplied by a coefficient: V_{t+1}, the residuals' sums, A_{t+k}."""
        return NUMBER_BITS, *(self.sum_bits(terms) for terms in range(1, self.lookahead)), NUMBER_BITS

    # --- cycles -----------------------------------------------------------------------------------------------------

    @property
    def loader_latency(self) -> int:
        """Cycles from a step's address to its reward and value: the memory, and the two stages of de-quantisation."""
        return 1 + 2 * self.codes

    @property
    def element_latency(self) -> int:
        """Cycles from a reward and its value to the advantage and the return.

        V_{t+1} is chosen, gamma * V_{t+1} and the residual take 1 + 2 + 1 cycles, each step of lookahead beyond the
        first as long as a product, the advantage and the return a cycle each.
        """
        return 4 + PRODUCT_CYCLES * (self.lookahead - 1) + 2

    @property
    def latency(self) -> int:
        """Cycles from a step's address to its results at the memories' write ports."""
        return self.loader_latency + self.element_latency

    def rollout_cycles(self, steps: int) -> int:
        """Return the cycles in which the array is busy with a rollout of `steps` steps: one each, and the latency."""
        if not 1 <= steps <= self.horizon:
            raise ConfigurationError(f"A rollout has 1 to {self.horizon} steps; found {steps}.")
        return steps + self.latency

    def elements_per_cycle(self, steps: int) -> float:
        """Return the advantages per cycle of a rollout of `steps` steps, over all rows."""
        return self.rows * steps / self.rollout_cycles(steps)

    # --- multipliers ------------------------------------------------------------------------------------------------

    def product_dsps(self, bits: int) -> int:
        """Return the DSP48E2 of the product of a coefficient and a number of `bits` bits, signed."""
        # The topmost piece of the number is signed and has a bit more.
        return -(-self.coefficient_bits // DSP_COEFFICIENT_BITS) * -(-(bits - 1) // DSP_NUMBER_BITS)

    @property
    def element_dsps(self) -> int:
        """DSP48E2 of a processing element: k + 1 products, two DSPs each if the coefficients fit a port."""
        return sum(self.product_dsps(bits) for bits in self.factors)

    @property
    def dsps(self) -> int:
        """DSP48E2 of all rows; the de-quantisation of codes takes one for each reward and one for each value."""
        return self.rows * (self.element_dsps + 2 * self.codes)
