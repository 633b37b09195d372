"""GAE on devices where nothing is measured: an FPGA's array of processing elements, by its cycles in RTL."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from composer.fpga.model import FpgaPart
from composer.matrix import MissingCell
from composer.measurement import Measurement
from composer.modelled_rows import why_not_modelled
from composer.on_policy.matrix import AdvantagesCell, AdvantagesColumn
from composer.on_policy.problem import RolloutProblem
from composer.platform import Platform
from pearl.backends import backend_of, fpga
from pearl.backends.fpga.gae import LOOKAHEAD, ROWS
from pearl.backends.fpga.gae_shape import GaeShape
from pearl.devices.description import Device

_FLOAT_BYTES = 4
_KB = 1024.0


def fpga_advantages(device: Device, platform: Platform, problem: RolloutProblem) -> AdvantagesColumn:
    """The array that programs instantiate, with a rollout's numbers sent there and back through the host's link.

    Each element takes its environments one after the other, a step in each cycle (HEPPO-GAE Sec. III-C); the rollout
    must fit the on-chip memory, 8 bytes a step.
    """
    if (reason := why_not_modelled(device)) is not None:
        return MissingCell(reason)
    part, horizon, envs = FpgaPart.from_device(device), problem.rollout.horizon, problem.actors.env_count
    shape = GaeShape(LOOKAHEAD, ROWS, max(2, horizon))
    needed_kb = 2 * _FLOAT_BYTES * problem.rows / _KB
    if shape.dsps > part.available.dsps or needed_kb > part.available.sram_kb:
        return MissingCell(
            f"GAE of {problem.rows:,} transitions needs {shape.dsps} DSPs and {needed_kb:,.0f} KB on chip; "
            f"{device.name} has {part.available.dsps:g} and {part.available.sram_kb:g}"
        )
    cycles = -(-envs // ROWS) * shape.rollout_cycles(horizon)
    numbers = 2 * _FLOAT_BYTES * problem.rows
    there = platform.link(platform.host.name, device.name).transfer_us(numbers + problem.rows + _FLOAT_BYTES * envs)
    back = platform.link(device.name, platform.host.name).transfer_us(numbers)
    return AdvantagesCell(Measurement.modelled(cycles / part.clock_mhz + there + back))


_ESTIMATES: Mapping[str, Callable[[Device, Platform, RolloutProblem], AdvantagesColumn]] = MappingProxyType(
    {fpga.ESTIMATOR: fpga_advantages}
)


def estimated_advantages(device: Device, platform: Platform, problem: RolloutProblem) -> AdvantagesColumn:
    """GAE on a device whose row is not measured."""
    estimate = _ESTIMATES.get(backend_of(device).estimator(device) or "")
    if estimate is None:
        return MissingCell(f"GAE on {device.backend} devices is not modelled in this version")
    return estimate(device, platform, problem)
