"""The model of the FPGA held against what it models: the emulated kernels, the RTL cycle by cycle, Yosys's counts."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer.fpga.learner_pipeline import LearnerPipeline, actor_critic_pipeline, dqn_pipeline, mlp_layers
from composer.fpga.model import FANOUTS, Exploration, FpgaPart, LearnerDesign, ReplayTree, Resources, explore
from composer.matrix import ReplayCell
from composer.modelled_rows import ModelledWork
from pearl.backends.fpga.replay import FpgaReplayManager, tree_levels
from pearl.backends.fpga.tree_cells import estimate
from pearl.backends.model.device import FpgaParameters
from pearl.backends.sycl.runtime import sycl_runtime
from pearl.devices import Device
from pearl.errors import CapacityError

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # neither kernels/rtl nor benchmarks are installed

from benchmarks.fpga_papers import papers_row  # noqa: E402

ULTRASCALE = FpgaPart("u200", Resources(5847, 36873, 869_268, 1_738_536), 240, FpgaParameters(1, 5, 18))

fanouts = st.sampled_from(FANOUTS)
small_trees = st.integers(2, 70).flatmap(
    lambda capacity: st.sampled_from(
        [tree for fanout in (2, 4, 8, 16) for tree in ReplayTree.choices(capacity, fanout)]
    )
)


# --- levels ----------------------------------------------------------------------------------------------------------


@given(st.integers(1, 2**24), fanouts)
def test_levels_have_whole_families_and_log2_of_the_fanout_fewer_bits_each(capacity: int, fanout: int) -> None:
    tree = ReplayTree(capacity, fanout)
    assert tree.depth == tree_levels(capacity, fanout)
    bits, nodes = 28, capacity
    for level in reversed(tree.levels):
        families = -(-nodes // fanout)
        assert (level.bits, level.nodes) == (bits, families * fanout)
        bits, nodes = bits + fanout.bit_length() - 1, families
    assert (tree.root_bits, nodes) == (bits, 1)


@pytest.mark.sycl
def test_levels_are_those_of_the_generated_kernels() -> None:
    rng = np.random.default_rng(0)
    for capacity in (*rng.integers(1, 2**20, 10).tolist(), 1, 2, 16, 17, 2**20):
        for fanout in (fanout for fanout in FANOUTS if tree_levels(capacity, fanout) <= 16):
            program = sycl_runtime().module.fpga_replay_source(capacity, fanout)
            described = re.search(r"Bits of a node, the root's first:([\d ]+)\n", program)
            assert described is not None
            tree = ReplayTree(capacity, fanout)
            assert [int(bits) for bits in described[1].split()] == [
                tree.root_bits,
                *(level.bits for level in tree.levels),
            ]
            assert f"using Shape = Tree<{capacity}, {fanout.bit_length() - 1}, {tree.depth}>;" in program


@pytest.mark.fpga
def test_levels_are_those_of_the_emulated_pipeline() -> None:
    replay, tree = FpgaReplayManager(50, fanout=4), ReplayTree(50, 4)
    assert replay.level_bits == (tree.root_bits, *(level.bits for level in tree.levels))
    assert replay.kernel.level_nodes == [tree.shape.nodes(level) for level in range(tree.depth + 1)]
    replay.close()


# --- the replay pipeline in RTL --------------------------------------------------------------------------------------


@settings(max_examples=12, deadline=None)
@given(small_trees, st.integers(1, 20), st.integers(0, 2**32))
def test_the_rtl_has_these_memories_and_takes_these_cycles(tree: ReplayTree, batch: int, seed: int) -> None:
    simulation = pytest.importorskip(
        "kernels.rtl.replay_simulation", reason="Amaranth is not installed: `make rtl`, or `pip install amaranth`."
    )
    from kernels.rtl.requests import Operation, Request

    rng = np.random.default_rng(seed)
    leaves = rng.integers(2**28, size=tree.capacity).astype(np.uint64)
    targets = [Request(Operation.SAMPLE, 0, int(target)) for target in rng.integers(int(leaves.sum()), size=batch)]
    sampled = simulation.run(tree.shape, targets, leaves)
    found = np.searchsorted(np.cumsum(leaves), [target.operand for target in targets], side="right")
    np.testing.assert_array_equal(sampled.indices, found)
    assert sampled.cycles == tree.sampling_cycles(batch)
    assert [len(nodes) for nodes in sampled.levels[1:]] == [level.nodes for level in tree.levels]

    indices = [int(index) for index in rng.integers(tree.capacity, size=batch)]
    if tree.leaf_copy:
        requests = [Request(Operation.ASSIGN, index, 1) for index in indices]
    else:
        requests = [Request(Operation.RETRIEVE, index) for index in indices]
        first = simulation.run(tree.shape, requests, leaves).results[0]
        # Each difference follows its old leaf by a cycle, and the last retrieval.
        wait = max(first.cycle + 1 - (first.accepted + batch), 0)
        requests += [Request(Operation.UPDATE, index, 0, 0 if number else wait) for number, index in enumerate(indices)]
    assert simulation.run(tree.shape, requests, leaves).cycles == tree.update_cycles(batch)


@pytest.mark.parametrize(("capacity", "fanout", "batch"), [(40, 4, 9), (9, 16, 30), (23, 2, 5)])
def test_the_cell_of_an_fpga_is_what_the_fastest_rtl_takes(capacity: int, fanout: int, batch: int) -> None:
    simulation = pytest.importorskip(
        "kernels.rtl.replay_simulation", reason="Amaranth is not installed: `make rtl`, or `pip install amaranth`."
    )
    from kernels.rtl.requests import Operation, Request

    board = Device("f", "fpga", "model", clock_mhz=400, dsp=4510, sram_kb=18202)
    work = ModelledWork(batch, batch, 44, capacity, (fanout,), "none")
    cell = papers_row(board, work).row.replay
    assert isinstance(cell, ReplayCell)
    leaves = np.ones(capacity, np.uint64)
    samplings = [Request(Operation.SAMPLE, 0, k % capacity) for k in range(batch)]
    assigned = [Request(Operation.ASSIGN, k % capacity, 2) for k in range(batch)]
    trees = [tree for tree in ReplayTree.choices(capacity, fanout) if tree.leaf_copy]  # which are faster, and fit
    taken = [[simulation.run(tree.shape, each, leaves).cycles for each in (samplings, assigned)] for tree in trees]
    fastest = min(taken, key=sum)
    assert [cell.sample.value_us * 400, cell.update.value_us * 400] == pytest.approx(fastest)
    assert cell.insert == cell.update


def test_cells_are_those_that_yosys_counted() -> None:
    """The record of `make bench-rtl`, whose trees this model was partly written for; docs/rtl.md says which."""
    pytest.importorskip("amaranth", reason="Amaranth is not installed: `make rtl`, or `pip install amaranth`.")
    from benchmarks import rtl

    record = json.loads((ROOT / "benchmarks" / "results" / "rtl.json").read_text(encoding="utf-8"))
    counted = {(row["case"], row["unit"]): row["ours"] for row in record["rows"]}
    for shape in rtl.SYNTHESISED:
        model, case = estimate(shape), rtl.name(shape)
        assert model.block_rams == counted[case, "BRAM36"]
        assert model.dsps == counted[case, "DSP48E2"] == 0
        assert model.luts == pytest.approx(counted[case, "LUT"], rel=0.12)
        assert model.flip_flops == pytest.approx(counted[case, "FF"], rel=0.05)


@given(st.integers(1, 2**22), fanouts, st.integers(0, 5), st.booleans())
def test_a_trees_memory_is_that_of_its_levels_and_copy(capacity: int, fanout: int, lanes: int, copy: bool) -> None:
    tree = ReplayTree(capacity, fanout, min(1 << lanes, fanout), copy)
    without = ReplayTree(capacity, fanout, tree.lanes)
    levels = sum(tree.level_kb(ULTRASCALE))
    assert without.resources(ULTRASCALE).sram_kb == pytest.approx(levels)
    assert levels == pytest.approx(sum(without.level_kb(ULTRASCALE)))
    bits = 28 * capacity * copy * (capacity > 64)
    assert tree.resources(ULTRASCALE).sram_kb >= levels + bits / 8000 - 1e-9
    assert tree.resources(ULTRASCALE).dsps == 0


# --- the learner pipeline, stepped -----------------------------------------------------------------------------------

widths = st.lists(st.integers(1, 40), min_size=2, max_size=4)
pipelines = st.one_of(
    st.builds(lambda w, double: dqn_pipeline(mlp_layers(*w), double=double), widths, st.booleans()),
    st.builds(
        lambda w, critics: actor_critic_pipeline(mlp_layers(*w), mlp_layers(*w[:-1], 1), critics=critics),
        widths,
        st.integers(1, 2),
    ),
)


@settings(max_examples=60, deadline=None)
@given(pipelines, st.integers(1, 40), st.integers(40, 3000), st.sampled_from(["balanced", "proportional"]))
def test_a_design_takes_what_its_units_take_stepped_cycle_by_cycle(
    pipeline: LearnerPipeline, batch: int, dsps: int, allocation: str
) -> None:
    pytest.importorskip("numba", reason="numba is not installed: `make rtl`, or `pip install numba`.")
    from kernels.rtl import cycles, learner_stages, stage_simulator

    part = FpgaPart("part", Resources(dsps, 1e6), 300)
    try:
        design: LearnerDesign = explore(pipeline, part, batch, Exploration(allocation))  # type: ignore[arg-type]
    except CapacityError:
        return
    names = [f"{number} {unit.name}" for number, unit in enumerate(pipeline.units)]
    stages = tuple(
        learner_stages.Stage(
            name, tuple(names[k] for k in dict.fromkeys(unit.after) if k >= 0), unit.macs, count, taken, taken
        )
        for name, unit, count, taken in zip(names, pipeline.units, design.multipliers, design.unit_cycles, strict=True)
    )
    learner = learner_stages.Learner(stages, design.dp, design.weight_update_cycles)
    assert stage_simulator.simulate(learner, batch, depths=batch).cycles == design.cycles
    printed = cycles.cf22_pipeline(design.pi, pipeline.layers, design.stage_cycles)
    assert printed + design.weight_update_cycles_printed == pytest.approx(design.cycles_printed)
    assert cycles.eq6(batch, pipeline.layers, 7) == 7 * (batch + pipeline.stages_printed)
