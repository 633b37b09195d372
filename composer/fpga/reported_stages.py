"""Cycles of a kernel by a vendor's report, for the Replay Manager's kernels and the Learner's."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from composer.fpga.vendor_report import BlockReport, KernelReport, VendorReport
from composer.measurement import Measurement
from pearl.errors import CapacityError, VendorReportError


def imported(value_us: float) -> Measurement:
    """A time from a report, for a cell of the matrix."""
    return Measurement(value_us, value_us, value_us, 0, "imported")


def clock_of(report: VendorReport, smaller: str) -> float:
    """The clock of the report in MHz.

    Raises VendorReportError where the clock or the initiation intervals are absent; CapacityError, which advises to
    compile for `smaller`, where the design does not fit the part that it was compiled for.
    """
    if report.frequency_mhz is None or any(kernel.blocks is None for kernel in report.kernels):
        raise VendorReportError(
            f"{report.path} has no {' and no '.join(report.missing)}: times cannot be determined. Copy the whole "
            "folder of the report, or create it again."
        )
    if over := report.total.exceeding(report.available):
        raise CapacityError(
            f"The design in {report.path} does not fit {report.device}: it takes {', '.join(over)}. Compile it for "
            f"a larger part (PEARL_FPGA_DEVICE) or for {smaller}."
        )
    return report.frequency_mhz


def loops_of(report: VendorReport, kernel: KernelReport, over: str) -> list[BlockReport]:
    """The outermost loops of a kernel, at least one.

    The last loop of a stage takes the items; earlier loops clear its memory.
    """
    loops = [block for block in kernel.blocks or () if block.loop]
    if not loops:
        raise VendorReportError(
            f"{report.path}: expected a loop over {over} in {kernel.name}; found none. The report is "
            "of another version or not complete: create it again."
        )
    return loops


def known_trips(report: VendorReport, kernel: KernelReport) -> Callable[[BlockReport], int]:
    """For `one_pass`: the trip count of a loop; VendorReportError where the report does not state it."""

    def trips(block: BlockReport) -> int:
        if not block.trips:
            raise VendorReportError(
                f"{report.path}: expected the trip count of every loop for one item; found none of {block.name} in "
                f"{kernel.name}, so its cycles cannot be determined."
            )
        return block.trips

    return trips


def one_pass(loop: BlockReport, trips: Callable[[BlockReport], int | None]) -> tuple[int, float]:
    """Interval and latency of `loop`: cycles from one iteration to the next, and cycles of one iteration.

    Blocks run in a row, and each is a pipeline of its own: an inner loop delays the next iteration until its own last
    iteration has begun. Without overlap, the next iteration waits for the whole of this one. `trips` returns the trip
    count of an inner loop, or None for an inner loop that is skipped.
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
    """Microseconds of a cycle from a calibration file; None where it is absent, or no clock could have it."""
    cycle = found.get("cycle")
    return cycle.value_us if cycle is not None and 1e-6 <= cycle.value_us <= 1e6 else None
