"""The replay pipeline in RTL, simulated cycle by cycle: the reference's answers, and the cycles that were promised."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pearl.backends.fpga.tree_shape import TreeShape, eq4, eq5
from pearl.errors import ConfigurationError
from pearl.replay.reference import ReferenceReplayManager, mulhi64, quantise, stratified

pytest.importorskip("amaranth", reason="Amaranth is not installed: `make rtl`, or `pip install amaranth`.")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # kernels/rtl is not installed

from kernels.rtl.replay_pipeline import level_sums
from kernels.rtl.replay_simulation import Simulation, run
from kernels.rtl.requests import Operation, Request

PACES = ((1, True), (1, False), (2, True), (2, False))


@st.composite
def shapes(draw):
    fanout = draw(st.sampled_from((2, 4, 8)))
    depth = draw(st.integers(1, 3 if fanout < 8 else 2))
    return TreeShape(
        depth,
        fanout,
        draw(st.sampled_from([lanes for lanes in (1, 2, 4, 8) if lanes <= fanout])),
        leaf_bits=draw(st.sampled_from((1, 5, 28))),
        cycles_per_access=draw(st.sampled_from((1, 2))),
        assigns=draw(st.booleans()),
        slots=draw(st.integers(fanout ** (depth - 1) + 1, fanout**depth)),
    )


def answer(leaves, request):
    """What the request should return, and do to `leaves`."""
    index, value = request.index, request.operand
    if request.operation is Operation.SAMPLE:
        if value >= leaves.sum():
            return Operation.MISSED, None, None
        index = int(np.searchsorted(np.cumsum(leaves), value, side="right"))
        return Operation.SAMPLE, index, int(leaves[index])
    if request.operation is Operation.RETRIEVE:
        return Operation.RETRIEVE, index, int(leaves[index])
    leaves[index] = value if request.operation is Operation.ASSIGN else leaves[index] + value
    return Operation.UPDATE, index, int(leaves[index])


@st.composite
def streams(draw):
    """A tree, what fills it, and requests that are in range when their turn comes."""
    shape = draw(shapes())
    values = st.integers(0, 2**shape.leaf_bits - 1)
    leaves = np.array(draw(st.lists(values, min_size=shape.slots, max_size=shape.slots)), np.int64)
    current, requests = leaves.copy(), []
    kinds = ["sample", "retrieve", "update"] + ["assign"] * shape.assigns
    places = st.integers(0, shape.slots - 1) | st.just(shape.slots - 1)  # some again and again
    for kind in draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=40)):
        gap = draw(st.sampled_from((0, 0, 0, 1, 5)))
        index, value = draw(places), draw(values)
        if kind == "sample":
            total = int(current.sum())
            requests.append(Request(Operation.SAMPLE, 0, draw(st.integers(0, total)), gap))
        elif kind == "retrieve":
            requests.append(Request(Operation.RETRIEVE, index, 0, gap))
        elif kind == "update":
            requests.append(Request(Operation.UPDATE, index, value - int(current[index]), gap))
        else:
            requests.append(Request(Operation.ASSIGN, index, value, gap))
        answer(current, requests[-1])
    return shape, leaves, requests


@settings(max_examples=30, deadline=None)
@given(streams())
def test_any_stream_of_requests_is_answered_as_one_after_the_other(stream):
    shape, leaves, requests = stream
    done = run(shape, requests, leaves.astype(np.uint64))
    for request, result in zip(requests, done.results, strict=True):
        operation, index, value = answer(leaves, request)
        assert result.operation is operation
        if operation is not Operation.MISSED:
            assert (result.index, result.value) == (index, value)
        assert result.cycle - result.accepted == shape.latency
    assert done.levels[0] == leaves.sum()
    for nodes, expected in zip(done.levels[1:], level_sums(shape, leaves.astype(np.uint64)), strict=True):
        np.testing.assert_array_equal(nodes[: len(expected)], expected)
        assert not nodes[len(expected) :].any()


@pytest.mark.parametrize(("pace", "assigns"), PACES)
def test_a_batch_is_sampled_and_updated_as_the_replay_manager_does(pace, assigns):
    shape = TreeShape(2, 16, 4, cycles_per_access=pace, assigns=assigns)
    rng = np.random.default_rng(3)
    manager = ReferenceReplayManager(shape.slots, fanout=16, alpha=0.6, seed=7)
    priorities = rng.gamma(0.5, size=shape.slots).astype(np.float32)
    priorities[rng.random(shape.slots) < 0.2] = 0
    manager.insert(np.arange(shape.slots), priorities)
    batch = 64
    for call in range(2):
        leaves = manager.state_dict()["leaves"].astype(np.uint64)
        targets = mulhi64(stratified(7, call, batch), int(leaves.sum()))
        drawn = manager.sample(batch)
        new = rng.gamma(0.5, size=batch).astype(np.float32)
        quantised = quantise(new, 0.6, 20)
        requests = [Request(Operation.SAMPLE, 0, int(target)) for target in targets]
        if assigns:
            # Of a slot sampled twice, the later value stays, as they come one after the other.
            requests += [
                Request(Operation.ASSIGN, int(i), int(v)) for i, v in zip(drawn.indices, quantised, strict=True)
            ]
        else:
            last = {int(i): int(v) for i, v in zip(drawn.indices, quantised, strict=True)}
            requests += [Request(Operation.UPDATE, i, v - int(leaves[i])) for i, v in last.items()]
        done = run(shape, requests, leaves)
        manager.update(drawn.indices, new)
        np.testing.assert_array_equal(done.indices[:batch], drawn.indices)
        assert [result.value for result in done.results[:batch]] == leaves[drawn.indices].tolist()
        np.testing.assert_array_equal(done.levels[-1], manager.state_dict()["leaves"])
        assert done.levels[0] == manager.total


@pytest.mark.parametrize(("pace", "assigns"), PACES)
def test_a_sampling_right_behind_an_update_sees_it(pace, assigns):
    shape = TreeShape(3, 4, 2, cycles_per_access=pace, assigns=assigns)
    leaves = np.zeros(shape.slots, np.uint64)
    leaves[5] = 10
    move = [Request(Operation.UPDATE, 5, -10), Request(Operation.UPDATE, 6, 7), Request(Operation.UPDATE, 6, 1)]
    done = run(shape, [*move, Request(Operation.SAMPLE, 0, 7), Request(Operation.RETRIEVE, 5)], leaves)
    assert [(result.index, result.value) for result in done.results[3:]] == [(6, 8), (5, 0)]
    # Back to back: only the port that a sampling holds for its beats makes anybody wait.
    gaps = np.diff([result.accepted for result in done.results])
    assert gaps.tolist() == [pace] * 3 + [shape.sample_cycles]


def test_every_level_holds_the_largest_sums():
    shape = TreeShape(3, 4, 1)
    largest = 2**28 - 1
    leaves = np.full(shape.slots, largest, np.uint64)
    done = run(shape, [Request(Operation.SAMPLE, 0, shape.slots * largest - 1), Request(Operation.RETRIEVE, 0)], leaves)
    assert done.results[0].index == shape.slots - 1
    assert done.levels[0] == shape.slots * largest
    assert [shape.bits(level) for level in range(4)] == [34, 32, 30, 28]
    assert [int(nodes.max()).bit_length() for nodes in done.levels] == [34, 32, 30, 28]


@functools.lru_cache(maxsize=1)
def counting(shape):
    """A simulation of the shape with leaves of 0, 1, 2 ..., shared by tests that follow each other."""
    return Simulation(shape, np.arange(shape.slots, dtype=np.uint64))


@pytest.mark.parametrize("batch", [1, 24])
@pytest.mark.parametrize("pace", [1, 2])
@pytest.mark.parametrize("assigns", [True, False])
@pytest.mark.parametrize(("depth", "fanout", "lanes"), [(1, 16, 16), (2, 8, 1), (2, 8, 4), (4, 2, 2), (3, 4, 1)])
def test_batches_take_the_cycles_of_the_closed_forms(depth, fanout, lanes, assigns, pace, batch):
    shape = TreeShape(depth, fanout, lanes, cycles_per_access=pace, assigns=assigns)
    simulation, total = counting(shape), shape.slots * (shape.slots - 1) // 2
    rng = np.random.default_rng(0)
    samplings = [Request(Operation.SAMPLE, 0, int(target)) for target in rng.integers(total, size=batch)]
    assert simulation.run(samplings).cycles == shape.sampling_cycles(batch)
    others = [Request(Operation.RETRIEVE, int(index)) for index in rng.integers(shape.slots, size=batch)]
    assert simulation.run(others).cycles == shape.pass_cycles(batch)
    mixed = [(samplings if rng.random() < 0.5 else others)[k] for k in range(batch)]
    expected = shape.mixed_cycles([request.operation is Operation.SAMPLE for request in mixed])
    assert simulation.run(mixed).cycles == expected


def test_a_simulation_begins_each_run_with_its_leaves():
    shape, requests = TreeShape(2, 4, 2), [Request(Operation.ASSIGN, 3, 9), Request(Operation.RETRIEVE, 3)]
    simulation = Simulation(shape, np.arange(shape.slots, dtype=np.uint64))
    first = simulation.run(requests)
    assert [result.value for result in first.results] == [9, 9]
    assert simulation.run(requests[1:]).results[0].value == 3
    again = simulation.run(requests)
    assert again.results == first.results
    for nodes, expected in zip(again.levels, first.levels, strict=True):
        np.testing.assert_array_equal(nodes, expected)


@pytest.mark.parametrize("pace", [1, 2])
@pytest.mark.parametrize("batch", [1, 5, 40])
def test_without_the_leaf_copy_an_update_is_two_passes(batch, pace):
    shape = TreeShape(2, 4, 2, assigns=False, cycles_per_access=pace)
    retrievals = [Request(Operation.RETRIEVE, index % 16) for index in range(batch)]
    first = run(shape, retrievals)
    # Each difference is known a cycle after its leaf has come back.
    sent = first.results[0].cycle + 1
    wait = max(sent - first.results[-1].accepted - 1, 0)
    updates = [Request(Operation.UPDATE, index % 16, 1, wait if index == 0 else 0) for index in range(batch)]
    assert run(shape, retrievals + updates).cycles == shape.update_cycles(batch)


def test_the_equations_as_printed():
    assert eq4(32, 4, 16) == 1152
    assert eq5(32, 4) == 72


@pytest.mark.parametrize("batch", [1, 32, 512])
@pytest.mark.parametrize(("depth", "fanout"), [(2, 256), (4, 16), (16, 2)])
def test_equation_4_is_a_memory_that_reads_and_writes_by_turns(depth, fanout, batch):
    as_printed = TreeShape(depth, fanout, 1, cycles_per_access=2, assigns=False)
    difference = eq4(batch, depth, fanout) - as_printed.sampling_cycles(batch)
    assert difference == 2 * fanout - depth - 2  # of filling; the price of one more request is Eq. 4's
    wide = TreeShape(depth, fanout)
    spacing = max(fanout // 32, 1)
    assert wide.sampling_cycles(batch) - wide.sampling_cycles(1) == spacing * (batch - 1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"depth": 2, "fanout": 12}, "power of two"),
        ({"depth": 0, "fanout": 4}, "Depth"),
        ({"depth": 2, "fanout": 4, "lanes": 8}, "Lanes"),
        ({"depth": 2, "fanout": 64, "lanes": 64}, "1 to 32"),
        ({"depth": 2, "fanout": 4, "leaf_bits": 29}, "28 bits"),
        ({"depth": 2, "fanout": 4, "cycles_per_access": 3}, "cycles"),
        ({"depth": 2, "fanout": 4, "slots": 4}, "5 to 16"),
    ],
)
def test_shapes_that_are_no_tree_are_refused(arguments, words):
    with pytest.raises(ConfigurationError, match=words):
        TreeShape(**arguments)


def test_a_tree_is_as_shallow_as_its_slots_allow():
    shape = TreeShape.holding(1_000_000, 64, 8)
    assert (shape.depth, shape.beats) == (4, 8)
    assert [shape.nodes(level) for level in range(5)] == [1, 4, 245, 15_625, 1_000_000]
    assert [memory.bits for memory in shape.memories] == [46, 40, 34, 28]
    with pytest.raises(ConfigurationError, match="at least 2"):
        TreeShape.holding(1, 64)
