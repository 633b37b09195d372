"""The model of the FPGA: equations against numbers worked out by hand from the papers, and properties of the search."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer.fpga.learner_pipeline import (
    LayerShape,
    LearnerPipeline,
    TensorUnit,
    actor_critic_pipeline,
    dqn_pipeline,
    mlp_layers,
)
from composer.fpga.model import (
    CF22_EXPLORATION,
    FANOUTS,
    Exploration,
    FpgaPart,
    ReplayTree,
    Resources,
    explore,
    printed_learner,
    share,
)
from composer.platform import Platform
from pearl.backends.model.device import FpgaParameters
from pearl.devices import Connection, Device
from pearl.errors import CapacityError, ConfigurationError

AGILEX = FpgaPart("agilex", Resources(4510, 18202, 974_400, 1_948_800), 400)
# One die of the U200 that Xilinx's platform leaves free, for CF'22 Table 2.
SLR0 = FpgaPart("slr0", Resources(2265, 14736, 354_690, 723_308), 240, FpgaParameters(1, 5, 18))
CARTPOLE = dqn_pipeline(mlp_layers(4, 64, 2))

parts = st.builds(
    lambda dsps, sram, luts, per_mac, block: FpgaPart(
        "part", Resources(dsps, sram, luts, 2 * luts), 300, FpgaParameters(1, per_mac, block)
    ),
    st.integers(20, 3000),
    st.integers(50, 20_000),
    st.sampled_from([math.inf, 50_000.0, 400_000.0]),
    st.sampled_from([1, 5]),
    st.sampled_from([18, 20]),
)
widths = st.lists(st.integers(1, 40), min_size=2, max_size=4)
pipelines = st.one_of(
    st.builds(lambda w, double: dqn_pipeline(mlp_layers(*w), double=double), widths, st.booleans()),
    st.builds(
        lambda w, critics: actor_critic_pipeline(mlp_layers(*w), mlp_layers(*w[:-1], 1), critics=critics),
        widths,
        st.integers(1, 2),
    ),
)
explorations = st.builds(
    Exploration,
    st.sampled_from(["balanced", "proportional"]),
    st.sampled_from([None, 1, 8, 32]),
    st.booleans(),
    st.integers(0, 2),
)


# --- the Replay Manager ----------------------------------------------------------------------------------------------


def test_the_printed_equations_by_hand() -> None:
    tree = ReplayTree(1_000_000, 64)
    assert tree.depth == 4, "64**3 = 262,144 leaves are too few"
    assert tree.sampling_cycles_printed(32) == 2 * 64 * (32 + 4)
    assert tree.update_cycles_printed(32) == 2 * (32 + 4)


def test_a_request_pays_the_way_to_the_fpga() -> None:
    devices = (Device("c", "cpu", "model"), Device("g", "gpu", "model"), Device("f", "fpga", "model"))
    platform = Platform(devices, (Connection("c", "f", 5, 10), Connection("c", "g", 7, 5)))
    tree = ReplayTree(1000, 16)
    cycles = tree.update_cycles_printed(32)
    assert AGILEX.request_us(cycles, platform.link("c", "f"), 500) == pytest.approx(2 * (32 + 3) / 400 + 5 + 0.05)
    through_host = AGILEX.request_us(cycles, platform.link("g", "f"), 500)
    assert through_host == pytest.approx(2 * (32 + 3) / 400 + 5 + 0.05 + 7 + 0.1), "both hops"


def test_what_the_pipeline_takes_by_hand() -> None:
    one = ReplayTree(100_000, 16)
    assert one.depth == 5
    # 16 words a sampling, 32 of them. Filling: 15 more words, then read, compare and choose, in each of 5 levels; the
    # root, and the last result itself.
    assert one.sampling_cycles(32) == 16 * 31 + 5 * (15 + 3) + 2
    first = one.sampling_cycles(1)
    assert one.update_cycles(32) == first + 31 + first, "the differences follow the first leaf that came back"
    assert one.update_cycles(500) == 500 + 499 + first, "they wait for the last retrieval to be sent"
    wide = ReplayTree(100_000, 16, lanes=16, leaf_copy=True)
    # A word a request; 4 adder levels, and read, compare and choose, in each level; the copy, the root, the result.
    assert wide.sampling_cycles(32) == wide.update_cycles(32) == 31 + 5 * (4 + 3) + 4
    assert wide.update_cycles(0) == 0


def test_siblings_that_are_read_at_once_cost_logic_and_the_copy_of_the_leaves_memory() -> None:
    one, all_of_them = ReplayTree(100_000, 16), ReplayTree(100_000, 16, lanes=16)
    assert all_of_them.resources(SLR0).luts > 5 * one.resources(SLR0).luts
    copied = ReplayTree(100_000, 16, leaf_copy=True).resources(SLR0)
    assert copied.sram_kb - one.resources(SLR0).sram_kb >= 100_000 * 28 / 8000
    for lanes, expected in ((3, "power of two from 1 to 16 for a fanout of 16; found 3"), (0, "at least one sibling")):
        with pytest.raises(ConfigurationError, match=expected):
            ReplayTree(1000, 16, lanes=lanes)
    assert len(ReplayTree.choices(1000, 16)) == 5 * 2, "1 to 16 lanes"
    assert max(tree.lanes for tree in ReplayTree.choices(1000, 256)) == 32


def test_levels_are_as_wide_as_their_largest_sum() -> None:
    tree = ReplayTree(2**20, 16)
    assert [level.nodes for level in tree.levels] == [16, 256, 4096, 65536, 2**20]
    assert [level.bits for level in tree.levels] == [44, 40, 36, 32, 28]
    assert tree.root_bits == 48, "CF'22: log2 K fewer on each level below"
    ragged = ReplayTree(1000, 16)
    assert [level.nodes for level in ragged.levels] == [16, 64, 1008], "siblings lie in whole groups"
    assert ragged.levels[0].bits == 36


def test_memory_is_counted_in_whole_blocks() -> None:
    # 16 and 64 words in LUTs; 1,008 of 28 bits: two M20K as 512 x 40, two half BRAM36 as 512 x 36.
    small = ReplayTree(1000, 16)
    assert small.level_kb(AGILEX) == (0, 0, 5.12)
    assert small.level_kb(SLR0) == (0, 0, 4.608)
    assert small.resources(SLR0).sram_kb == 4.608
    # 2**20 leaves of 28 bits: 28 columns of 16K x 1, 64 deep, in half BRAM36s.
    assert ReplayTree(2**20, 64).level_kb(SLR0)[-1] == pytest.approx(28 * 64 * 2.304)


@given(st.integers(1, 2**24), st.sampled_from(FANOUTS), st.sampled_from([AGILEX, SLR0]))
def test_a_tree_holds_its_capacity_and_no_sum_overflows(capacity: int, fanout: int, part: FpgaPart) -> None:
    tree = ReplayTree(capacity, fanout)
    assert fanout ** (tree.depth - 1) < max(capacity, 2) <= fanout**tree.depth or tree.depth == 1
    assert tree.levels[-1].nodes >= capacity
    for height, level in enumerate(reversed(tree.levels)):
        assert min(fanout**height, capacity) * (2**28 - 1) < 2**level.bits
        assert level.nodes % fanout == 0
    bits = sum(level.nodes * level.bits for level in tree.levels if level.rows > 64)
    assert tree.resources(part).sram_kb >= bits / 8000
    assert ReplayTree(capacity + 1, fanout).resources(part).sram_kb >= tree.resources(part).sram_kb


def test_a_tree_that_does_not_fit_says_by_how_much_and_what_would() -> None:
    tree = ReplayTree(10_000_000, 16)
    with pytest.raises(
        CapacityError, match=r"needs 40,842 KB.*agilex has 18,202 KB.*2\.24 times.*At most [0-9,]+ fit"
    ) as e:
        tree.check_fits(AGILEX)
    fits = int(str(e.value).split("At most ")[1].split(" fit")[0].replace(",", ""))
    ReplayTree(fits, 16).check_fits(AGILEX)
    with pytest.raises(CapacityError):
        ReplayTree(fits + 1, 16).check_fits(AGILEX)


@pytest.mark.parametrize(
    ("capacity", "fanout", "expected"),
    [
        (1000, 3, "power of two from 2 to 256; found 3"),
        (1000, 512, "power of two from 2 to 256; found 512"),
        (1000, 1, "found 1"),
        (0, 16, "at least 1; found 0"),
        (2**37, 16, r"needs more than 64 bits for its total; with fanout 16 at most 2\*\*36 leaves"),
        (2**36, 32, r"with fanout 32 at most 2\*\*35 leaves"),
    ],
)
def test_fanout_and_depth_have_limits(capacity: int, fanout: int, expected: str) -> None:
    with pytest.raises(ConfigurationError, match=expected):
        ReplayTree(capacity, fanout)


# --- the pipeline ----------------------------------------------------------------------------------------------------


def test_the_units_of_a_network_of_two_layers() -> None:
    forward = {"FP q 1": 256, "FP q 2": 128, "FP target 1": 256, "FP target 2": 128}
    backward = {"LOSS q": 2, "BP q 2": 128, "GA q 1": 256, "GA q 2": 128}
    assert {unit.name: unit.macs for unit in CARTPOLE.units} == forward | backward
    assert CARTPOLE.stages_printed == 6
    assert CARTPOLE.depth == 5, "GA of the second layer runs beside its BP"
    assert CARTPOLE.gradient_words == 4 * 64 + 64 + 64 * 2 + 2
    # The activations of the first layer wait for LOSS: those of FP 2, LOSS, GA 2 and one coming in.
    assert dict(zip((u.name for u in CARTPOLE.units), CARTPOLE.items_held, strict=True))["GA q 2"] == 4


@pytest.mark.parametrize("layers", [1, 2, 3, 5])
def test_the_depth_of_a_pipeline(layers: int) -> None:
    network = mlp_layers(*range(2, layers + 3))
    count = layers + 1  # with the input, as the papers count
    assert dqn_pipeline(network).depth == 2 * count - 1
    assert actor_critic_pipeline(network, network).depth == 4 * count - 3


@given(pipelines, st.lists(st.integers(1, 9), min_size=40, max_size=40), st.integers(1, 12), st.integers(0, 20))
def test_the_makespan_is_that_of_items_passed_from_unit_to_unit(
    pipeline: LearnerPipeline, cycles: list[int], items: int, arithmetic: int
) -> None:
    cycles = [cycles[n % len(cycles)] for n in range(len(pipeline.units))]
    free, last = [0] * len(cycles), 0
    for _ in range(items):
        done: list[int] = []
        for number, unit in enumerate(pipeline.units):
            ready = max(done[producer] if producer >= 0 else 0 for producer in unit.after)
            free[number] = max(ready, free[number]) + cycles[number]
            done.append(free[number] + arithmetic)
        last = max(done)
    assert pipeline.makespan_cycles(cycles, items, arithmetic) == last


def test_a_unit_comes_after_its_producers() -> None:
    with pytest.raises(ConfigurationError, match="FP must come after"):
        LearnerPipeline((TensorUnit("FP", "FP", 1, 1, 1, 1, (0,)),), 2)
    with pytest.raises(ConfigurationError, match="at least one layer"):
        dqn_pipeline(())
    with pytest.raises(ConfigurationError, match="at least 1; found"):
        LayerShape(4, 0, 1, 1)


# --- the Learner -----------------------------------------------------------------------------------------------------


def test_eq_2_3_and_6_by_hand() -> None:
    part = dataclasses.replace(AGILEX, available=Resources(1282, 100.0))
    # Words: weights and gradients, LOSS none; inputs of two items (GA: four, six); outputs of two.
    inputs = 2 * (4 + 64) * 2 + 2 * 4 + 4 * 66 + 2 * 2 + 6 * 68
    outputs = 2 * (2 * (64 + 2) + 2 + 1 + 64 + 1)
    words = 450 + 450 + 130 + 450 + inputs + outputs
    dp = int(100.0 // (words * 4 / 1000))
    found = printed_learner(CARTPOLE, part, 32)
    assert found.dp == dp
    assert found.stage_cycles == pytest.approx(1282 / (1282 / dp)), "1,282 multiply-accumulates in 1282 / DP units"
    assert found.cycles == pytest.approx(dp * (32 + 6))
    assert printed_learner(CARTPOLE, part, 32, 50.0).dp == int(50.0 // (words * 4 / 1000))
    with pytest.raises(CapacityError, match=r"beside 99 KB of the Replay Manager"):
        printed_learner(CARTPOLE, part, 32, 99.0)


def test_by_the_letter_of_eq_6_more_pipelines_make_a_step_longer() -> None:
    small, large = (
        printed_learner(CARTPOLE, dataclasses.replace(AGILEX, available=Resources(4510, kb)), 512) for kb in (100, 1000)
    )
    assert large.dp > small.dp
    assert large.cycles > small.cycles


@pytest.mark.parametrize("batch_size", [32, 64, 128, 256])
def test_the_exploration_finds_table_2_of_cf22(batch_size: int) -> None:
    design = explore(CARTPOLE, SLR0, batch_size, CF22_EXPLORATION)
    assert (design.dp, design.pi, max(design.multipliers)) == (2, batch_size // 2, 32)
    # f = 16: FP 32 + 16, target 32 + 16, BP 16, GA 32 + 16, and one for LOSS, of 5 DSP blocks, twice; printed is 1600.
    assert design.resources.dsps == 2 * 5 * (160 + 1)
    assert design.stage_cycles == 8
    assert design.cycles_printed == (batch_size // 2 + 6 - 1) * 8 + 2 * 452 / 48 - 2 * 2 / 48
    assert design.binding == "the limit of one unit"


def test_without_the_limit_one_pipeline_is_better() -> None:
    free = dataclasses.replace(CF22_EXPLORATION, most_per_unit=None)
    design = explore(CARTPOLE, SLR0, 64, free)
    assert design.dp == 1
    assert design.cycles_printed < explore(CARTPOLE, SLR0, 64, CF22_EXPLORATION).cycles_printed


def test_ddpg_in_table_2_of_cf22() -> None:
    pipeline = actor_critic_pipeline(mlp_layers(4, 64, 1), mlp_layers(5, 64, 1), critics_of_actor=0)
    two_dies = dataclasses.replace(SLR0, available=SLR0.available + SLR0.available)
    design = explore(pipeline, two_dies, 64, CF22_EXPLORATION)
    assert (design.dp, design.pi, max(design.multipliers)) == (2, 32, 32)
    assert design.resources.dsps == 2 * 5 * (6 * 32 + 8 * 8 + 2), "printed is 2560, without LOSS"


@settings(deadline=None)
@given(pipelines, parts, st.integers(1, 40), explorations)
def test_no_design_exceeds_its_part(
    pipeline: LearnerPipeline, part: FpgaPart, batch_size: int, options: Exploration
) -> None:
    try:
        design = explore(pipeline, part, batch_size, options)
    except CapacityError:
        return
    assert not design.resources.exceeding(part.available)
    assert 1 <= design.dp <= batch_size
    assert design.dp * design.pi >= batch_size
    assert not options.even_batches or design.dp * design.pi == batch_size
    limit = options.most_per_unit or math.inf
    for unit, count in zip(pipeline.units, design.multipliers, strict=True):
        assert 1 <= count <= min(unit.macs, limit)
    assert design.resources.dsps == design.dp * sum(design.multipliers) * part.parameters.dsp_per_mac
    assert design.cycles >= design.pi * design.stage_cycles
    words = sum(unit.words for unit in pipeline.units)
    assert design.resources.sram_kb * 1000 >= 4 * design.dp * words


def brute_force(pipeline: LearnerPipeline, part: FpgaPart, batch_size: int, options: Exploration) -> float | None:
    """The least cycles over every DP and every stage time, without any of the search's shortcuts."""
    best = None
    for dp, stage in itertools.product(range(1, batch_size + 1), range(1, max(u.macs for u in pipeline.units) + 1)):
        counts = [-(-unit.macs // stage) for unit in pipeline.units]
        if options.most_per_unit is not None and max(counts) > options.most_per_unit:
            continue
        blocks = 0
        for unit, held, count in zip(pipeline.units, pipeline.items_held, counts, strict=True):
            state = options.optimizer_words * unit.words if unit.kind == "GA" else 0
            for values, copies in ((unit.words, dp), (held * unit.reads, dp), (2 * unit.writes, dp), (state, 1)):
                banks = min(count, values)
                blocks += copies * banks * math.ceil(math.ceil(values / banks) / 512) if banks else 0
        dsps = dp * sum(counts) * part.parameters.dsp_per_mac
        if dsps > part.available.dsps or blocks * part.parameters.block_kbit * 0.128 > part.available.sram_kb + 1e-9:
            continue
        cycles = [-(-unit.macs // count) for unit, count in zip(pipeline.units, counts, strict=True)]
        update = max(dp * -(-u.words // c) for u, c in zip(pipeline.units, counts, strict=True) if u.kind == "GA")
        found = pipeline.makespan_cycles(cycles, -(-batch_size // dp)) + update
        best = found if best is None else min(best, found)
    return best


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.integers(1, 9), min_size=2, max_size=3),
    st.integers(5, 300),
    st.integers(20, 800),
    st.integers(1, 9),
    st.sampled_from([None, 4]),
)
def test_the_search_finds_what_looking_at_everything_finds(
    sizes: list[int], dsps: int, sram_kb: int, batch_size: int, limit: int | None
) -> None:
    pipeline = dqn_pipeline(mlp_layers(*sizes))
    part = dataclasses.replace(AGILEX, available=Resources(dsps, sram_kb, math.inf, math.inf))
    options = Exploration(most_per_unit=limit)
    best = brute_force(pipeline, part, batch_size, options)
    if best is None:
        with pytest.raises(CapacityError):
            explore(pipeline, part, batch_size, options)
    else:
        assert explore(pipeline, part, batch_size, options).cycles == best


@settings(deadline=None)
@given(pipelines, parts, st.integers(1, 40), st.sampled_from(["dsps", "sram_kb", "luts", "registers"]))
def test_a_larger_part_is_never_slower_and_a_larger_batch_never_faster(
    pipeline: LearnerPipeline, part: FpgaPart, batch_size: int, resource: str
) -> None:
    try:
        design = explore(pipeline, part, batch_size)
    except CapacityError:
        return
    more = dataclasses.replace(part.available, **{resource: 2 * getattr(part.available, resource)})
    assert explore(pipeline, dataclasses.replace(part, available=more), batch_size).cycles <= design.cycles
    assert explore(pipeline, part, batch_size + 1).cycles >= design.cycles


def test_the_binding_constraint_is_the_one_that_helps() -> None:
    for part, expected in (
        (dataclasses.replace(AGILEX, available=Resources(100, 1e6, 1e9, 1e9)), "DSP blocks"),
        (dataclasses.replace(AGILEX, available=Resources(1e6, 200, 1e9, 1e9)), "on-chip memory"),
        (dataclasses.replace(AGILEX, available=Resources(1e6, 1e6, 60_000, 1e9)), "LUTs"),
        (dataclasses.replace(AGILEX, available=Resources(1e6, 1e6, 1e9, 60_000)), "registers"),
        (dataclasses.replace(AGILEX, available=Resources(1e6, 1e6, 1e9, 1e9)), "the work"),
    ):
        design = explore(CARTPOLE, part, 32)
        assert design.binding == expected
        assert expected in str(design)


def test_a_network_that_does_not_fit_says_by_how_much_and_what_would() -> None:
    large = dqn_pipeline(mlp_layers(100, 3000, 3000, 2))
    with pytest.raises(CapacityError, match=r"KB too few \([0-9.]+ times.*A network of about [0-9,]+ weights would"):
        explore(large, AGILEX, 32)
    few = dataclasses.replace(AGILEX, available=Resources(6, 18202, 1e6, 1e6))
    with pytest.raises(CapacityError, match=r"at least 8 DSP blocks.*2 DSP blocks too few.*fewer layers"):
        explore(CARTPOLE, few, 32)
    with pytest.raises(ConfigurationError, match="batch size must be a whole number of at least 1; found 0"):
        explore(CARTPOLE, AGILEX, 0)


# --- sharing, and the part -------------------------------------------------------------------------------------------


def test_both_share_an_fpga_only_if_their_buffers_fit() -> None:
    tree = ReplayTree(100_000, 16)
    shared = share(tree, CARTPOLE, AGILEX, 32)
    assert shared.replay_dies == 1
    total = shared.learner.resources + tree.resources(AGILEX)
    assert not total.exceeding(AGILEX.available)
    needed = tree.resources(AGILEX).sram_kb
    just = dataclasses.replace(AGILEX, available=dataclasses.replace(AGILEX.available, sram_kb=needed + 10))
    with pytest.raises(CapacityError, match="what the Replay Manager leaves of agilex has"):
        share(tree, CARTPOLE, just, 32)
    with pytest.raises(CapacityError, match="leave nothing"):
        share(tree, CARTPOLE, dataclasses.replace(AGILEX, available=Resources(4510, needed, 1e6, 1e6)), 32)


def test_on_several_dies_each_has_its_own() -> None:
    u200 = FpgaPart("u200", Resources(5847, 36873, 869_268, 1_738_536), 240, FpgaParameters(3, 5, 18))
    shared = share(ReplayTree(1_000_000, 64), CARTPOLE, u200, 64, CF22_EXPLORATION)
    assert shared.replay_dies == 1
    assert not shared.learner.resources.exceeding(u200.dies(2).available)
    with pytest.raises(ConfigurationError, match="has 3 dies; found 4"):
        u200.dies(4)


def test_a_learner_that_waits_for_samples_waits_for_each() -> None:
    tree = ReplayTree(4096, 16)
    shared = share(tree, CARTPOLE, AGILEX, 32)
    assert shared.learner.item_interval_cycles < 16
    assert tree.sampling_cycles(1) < shared.exposed_sampling_cycles <= tree.sampling_cycles(32)
    slow = dataclasses.replace(shared.learner, multipliers=(1,) * 8, dp=1)
    hidden = dataclasses.replace(shared, learner=slow)
    assert hidden.exposed_sampling_cycles == tree.sampling_cycles(1)


def test_a_part_comes_from_a_row_of_the_device_csv() -> None:
    row = Device("f", "fpga", "model", "dies=3;dsp_per_mac=5;block_kbit=18", clock_mhz=240, dsp=5847, sram_kb=36873)
    part = FpgaPart.from_device(row)
    assert part.available == Resources(5847, 36873, math.inf, math.inf)
    assert part.parameters == FpgaParameters(3, 5, 18)
    slow = dataclasses.replace(part, parameters=dataclasses.replace(part.parameters, arithmetic_cycles=20))
    assert explore(CARTPOLE, slow, 32).cycles >= explore(CARTPOLE, part, 32).cycles + 5 * 20 - 20, "fills five units"
    assert part.microseconds(480) == 2.0
    with pytest.raises(ConfigurationError, match="f states no sram_kb, clock_mhz: fill them"):
        FpgaPart.from_device(Device("f", "fpga", "model", dsp=10))
    with pytest.raises(ConfigurationError, match="states no dsp"):
        FpgaPart.from_device(Device("f", "fpga", "model", dsp=0, sram_kb=5, clock_mhz=5))
    with pytest.raises(ConfigurationError, match="clock above 0"):
        FpgaPart("f", Resources(1, 1), 0)
