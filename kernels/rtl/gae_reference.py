"""What the GAE array computes, in integers: how numbers become fixed point, the exact results, and their error.

A number is a 32-bit integer in units of `2**-fraction_bits`; 16 bits give a range of 32,768 and a resolution of
1.5e-5. The hardware does not know the unit: GAE is linear in rewards and values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from pearl.backends.fpga.gae_shape import CODE_BITS, NUMBER_BITS, SCALE_BITS, SCALE_FRACTION, GaeShape
from pearl.errors import ConfigurationError
from pearl.rollout.quantization import Codes

_Integers = TypeVar("_Integers", int, NDArray[np.int64])

LOWEST, HIGHEST = -(2 ** (NUMBER_BITS - 1)), 2 ** (NUMBER_BITS - 1) - 1


@dataclass(frozen=True)
class Rollout:
    """Steps of all rows: integers `(steps, rows)` int64, numbers or codes; `ends` `(steps, rows)` bool.

    `last_values` `(rows,)` int64 are numbers, and belong to the observations after the last step.
    """

    rewards: NDArray[np.int64]
    values: NDArray[np.int64]
    last_values: NDArray[np.int64]
    ends: NDArray[np.bool_]


@dataclass(frozen=True)
class Results:
    """Advantages and returns `(steps, rows)` int64; `saturated` `(steps, rows)` bool where one of both was limited."""

    advantages: NDArray[np.int64]
    returns: NDArray[np.int64]
    saturated: NDArray[np.bool_]


@dataclass(frozen=True)
class Coefficients:
    """gamma, C = gamma * lambda and C**k as the array gets them: in units of `2**-coefficient_fraction`, at most 1."""

    gamma: int
    decay: int
    loop_decay: int

    @classmethod
    def of(cls, shape: GaeShape, gamma: float, gae_lambda: float) -> Coefficients:
        """Round to nearest. Raises ConfigurationError for a factor outside [0, 1]."""
        for name, factor in (("gamma", gamma), ("gae_lambda", gae_lambda)):
            if not 0 <= factor <= 1:
                raise ConfigurationError(f"{name} must lie in [0, 1]; found {factor}.")
        decay = gamma * gae_lambda
        one = 1 << shape.coefficient_fraction
        return cls(round(gamma * one), round(decay * one), round(decay**shape.lookahead * one))


@dataclass(frozen=True)
class CodeScale:
    """What codes stand for: `offset` in the numbers' unit, `scale` with SCALE_FRACTION bits more."""

    offset: int
    scale: int

    @classmethod
    def of(cls, codes: Codes, fraction_bits: int) -> CodeScale:
        """Round to nearest.

        Raises ConfigurationError for codes of more than CODE_BITS bits, and where the scale or a decoded number does
        not fit.
        """
        if codes.codes.dtype != np.uint8:
            raise ConfigurationError(
                f"The array takes codes of up to {CODE_BITS} bits (uint8); found {codes.codes.dtype}. Use fewer bits."
            )
        offset, scale = codes.offset * 2.0**fraction_bits, codes.scale * 2.0 ** (fraction_bits + SCALE_FRACTION)
        if LOWEST <= offset <= HIGHEST and 0 <= scale < 2**SCALE_BITS:
            found = cls(round(offset), round(scale))
            if found.scale < 2**SCALE_BITS and found.decoded(np.array(2**CODE_BITS - 1)) <= HIGHEST:
                return found
        limit = 2.0 ** (SCALE_BITS - SCALE_FRACTION - fraction_bits)
        raise ConfigurationError(
            f"Codes of offset {codes.offset:g} and scale {codes.scale:g} do not fit {NUMBER_BITS}-bit numbers with "
            f"{fraction_bits} fraction bits and scales below {limit:g}: use fewer fraction bits."
        )

    def decoded(self, codes: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the numbers, rounded to nearest, halves up."""
        return self.offset + _rounded(self.scale * codes, SCALE_FRACTION)


def fixed(numbers: NDArray[np.floating], fraction_bits: int) -> NDArray[np.int64]:
    """Return `numbers` as 32-bit integers (int64), rounded to nearest; those beyond the range become its end."""
    return np.clip(np.rint(numbers.astype(np.float64) * 2.0**fraction_bits), LOWEST, HIGHEST).astype(np.int64)


def expected(shape: GaeShape, coefficients: Coefficients, rollout: Rollout) -> Results:
    """Return the array's results of a rollout of numbers, bit for bit. Python's integers have no overflow."""
    k, fraction = shape.lookahead, shape.coefficient_fraction
    advantages = np.zeros_like(rollout.rewards)
    returns, limited = np.zeros_like(advantages), np.zeros(advantages.shape, np.bool_)
    steps, rows = advantages.shape
    for row in range(rows):
        values = [*rollout.values[:, row].tolist(), int(rollout.last_values[row])]
        rewards, ends = rollout.rewards[:, row].tolist(), rollout.ends[:, row].tolist()
        residuals = [
            rewards[t] + (0 if ends[t] else _rounded(coefficients.gamma * values[t + 1], fraction)) - values[t]
            for t in range(steps)
        ]
        for t in range(steps - 1, -1, -1):
            window = residuals[t : t + k]
            reaches = t + k < steps
            for ahead in range(min(k, steps - t)):
                if ends[t + ahead]:
                    window, reaches = window[: ahead + 1], False
                    break
            total = window.pop()
            while window:
                total = window.pop() + _rounded(coefficients.decay * total, fraction)
            if reaches:
                total += _rounded(coefficients.loop_decay * int(advantages[t + k, row]), fraction)
            advantage = min(max(total, LOWEST), HIGHEST)
            returned = min(max(values[t] + advantage, LOWEST), HIGHEST)
            advantages[t, row], returns[t, row] = advantage, returned
            limited[t, row] = (advantage, returned) != (total, values[t] + advantage)
    return Results(advantages, returns, limited)


def error_bound(
    shape: GaeShape, gamma: float, gae_lambda: float, steps: int, largest: float, fraction_bits: int
) -> tuple[float, float]:
    """Return the largest errors of an advantage or return, the array's and `NumpyGae`'s, in the unit of the rewards.

    For rewards and values of at most M (`largest`) in magnitude, without saturation, to first order. With u the unit
    of numbers, c half a unit of the coefficients and C = gamma lambda:

        number   e_x = u/2; a code's 3 u/2: its offset, 255 times its scale, and their sum are rounded
        delta_t  e_1 = 3 e_x + u/2 + c M                                    r, V_t, V_{t+1}; gamma V_{t+1}; gamma
        D_{j+1}  e_{j+1} = e_1 + C e_j + u/2 + c |D_j|                      |D_j| <= 3 M j
        A_t      e(A_t) <= e_k + u/2 + c |A| + C^k e(A_{t+k})               |A| <= 3 M (1 + C + C^2 + ...)
        return   e(A_t) + e_x

    In float32, with e = 2^-24 for each operation and constant: a number from a code is wrong by 4 e M, a residual by
    7 e M more (gamma, its product, two sums), a step of the recursion by 3 e |A| more (C, its product, the sum), and
    the return's sum by e (|A| + M).
    """
    decay, unit, float_step = gamma * gae_lambda, 2.0**-fraction_bits, 2.0**-24
    coefficient_error = 2.0 ** -(shape.coefficient_fraction + 1)
    input_error, input_float = (1.5 * unit, 4 * float_step * largest) if shape.codes else (0.5 * unit, 0.0)
    advantage = 3 * largest * _geometric(decay, steps)

    residual = 3 * input_error + unit / 2 + coefficient_error * largest
    total = residual
    for terms in range(1, shape.lookahead):
        total = residual + decay * total + unit / 2 + coefficient_error * 3 * largest * terms
    windows = _geometric(decay**shape.lookahead, -(-steps // shape.lookahead))
    fixed_point = (total + unit / 2 + coefficient_error * advantage) * windows + input_error

    per_step = 3 * input_float + float_step * (7 * largest + 3 * advantage)
    float32 = per_step * _geometric(decay, steps) + input_float + float_step * (advantage + largest)
    return fixed_point, float32


def _geometric(ratio: float, terms: int) -> float:
    return float(terms) if ratio == 1 else (1 - ratio**terms) / (1 - ratio)


def _rounded(value: _Integers, bits: int) -> _Integers:
    return (value + (1 << (bits - 1))) >> bits
