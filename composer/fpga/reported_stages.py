"""Cycles of kernels by a vendor's report: what the Replay Manager's and the Learner's have in common."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from composer.fpga.vendor_report import BlockReport, KernelReport, VendorReport
from composer.matrix import Measurement
from pearl.errors import CapacityError, VendorReportError


def imported(value_us: float) -> Measurement:
    """A time of a cell of the matrix that a report tells."""
    return Measurement(value_us, value_us, value_us, 0, "imported")


def clock_of(report: VendorReport, smaller: str) -> float:
    """The clock in MHz of a report that tells times, of a design that fits.

    Raises VendorReportError where clock or initiation intervals are absent, CapacityError, which advises to compile for
    `smaller`, where the design does not fit the part that it was compiled for.
    """
    if report.frequency_mhz is None or any(kernel.blocks is None for kernel in report.kernels):
        raise VendorReportError(
            f"{report.path} has no {' and no '.join(report.missing)}: times cannot be told from it. Copy the whole "
            "folder of the report, or make it anew."
        )
    if over := report.total.exceeding(report.available):
        raise CapacityError(
            f"The design in {report.path} does not fit {report.device}: it takes {', '.join(over)}. Compile it for "
            f"a larger part (PEARL_FPGA_DEVICE) or for {smaller}."
        )
    return report.frequency_mhz


def loops_of(report: VendorReport, kernel: KernelReport, over: str) -> list[BlockReport]:
    """The outermost loops of a kernel, at least one.

    Of a stage the last takes what passes through it, after those that clear its memory.
    """
    loops = [block for block in kernel.blocks or () if block.loop]
    if not loops:
        raise VendorReportError(
            f"{report.path}: expected a loop over {over} in {kernel.name}; found none. A report of another version, "
            "or one that is not complete: make it anew."
        )
    return loops


def known_trips(report: VendorReport, kernel: KernelReport) -> Callable[[BlockReport], int]:
    """For `one_pass`: how often a loop runs by the report; VendorReportError where that does not say."""

    def trips(block: BlockReport) -> int:
        if not block.trips:
            raise VendorReportError(
                f"{report.path}: expected the trip count of every loop for one item; of {block.name} in {kernel.name} "
                "the report states none, so that its cycles cannot be told."
            )
        return block.trips

    return trips


def one_pass(loop: BlockReport, trips: Callable[[BlockReport], int | None]) -> tuple[int, float]:
    """Cycles from one iteration of `loop` to the next, and those that one is under way.

    Blocks follow one another, and each is a pipeline of its own: a loop inside holds up the next iteration until its
    own last one has begun. Where iterations do not overlap, the next one waits for all of it. `trips` says how often a
    loop inside runs; None: it is passed by.
    """
    interval, latency = float(loop.ii or 0), loop.latency_cycles
    for block in loop.blocks:
        if not block.loop:
            latency += block.latency_cycles
        elif (count := trips(block)) is not None:
            each, once = one_pass(block, trips)
            latency += (count - 1) * each + once
            interval = max(interval, count * each)
    return math.ceil(max(1.0, interval) if loop.ii is not None else latency), latency


def cycle_in(found: Mapping[str, Measurement]) -> float | None:
    """Microseconds of a cycle among what a calibration file says; None where it has none, or none that a clock has."""
    cycle = found.get("cycle")
    return cycle.value_us if cycle is not None and 1e-6 <= cycle.value_us <= 1e6 else None
