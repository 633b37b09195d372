"""Counts the UltraScale+ resources of a synthesised design from the cells that Yosys reports."""

from __future__ import annotations

from pearl.backends.fpga.tree_cells import Cells
from pearl.errors import DeviceError

# LUTs per memory or shift register cell (AMD UG574, "CLB Resources"); a SLICEM has eight LUTs.
_LUTS_OF_CELL = {
    "SRL16E": 1, "SRLC32E": 1, "RAM32X1S": 1, "RAM64X1S": 1, "RAM32X1D": 2, "RAM64X1D": 2, "RAM128X1D": 4,
    "RAM256X1D": 8, "RAM32M": 4, "RAM64M": 4, "RAM32M16": 8, "RAM64M8": 8, "RAM64X8SW": 8,
}  # fmt: skip
_NO_RESOURCE = {"CARRY4", "CARRY8", "MUXF7", "MUXF8", "MUXF9", "INV", "VCC", "GND", "BUFG", "IBUF", "OBUF"}


def count_cells(cells: dict[str, int]) -> Cells:
    """Return the totals of UltraScale+ `cells` (name to number). Raises DeviceError for an unknown cell."""
    luts = memory_luts = flip_flops = dsps = ultra_rams = 0
    block_rams = 0.0
    for name, number in cells.items():
        if name in _LUTS_OF_CELL:
            memory_luts += _LUTS_OF_CELL[name] * number
        elif name.startswith("LUT"):
            luts += number
        elif name in ("FDRE", "FDSE", "FDCE", "FDPE"):
            flip_flops += number
        elif name.startswith("DSP48"):
            dsps += number
        elif name.startswith("RAMB36"):
            block_rams += number
        elif name.startswith("RAMB18"):
            block_rams += 0.5 * number
        elif name.startswith("URAM288"):
            ultra_rams += number
        elif name not in _NO_RESOURCE and not name.startswith("$"):
            raise DeviceError(f"Yosys returned {number} cells of unknown type {name!r}.")
    return Cells(luts + memory_luts, memory_luts, flip_flops, dsps, block_rams, ultra_rams)
