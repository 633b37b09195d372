"""The design of programs on an FPGA: its cycles, walked loop by loop; its stages and memory, as in the kernels."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import described
from trainers import TinyDQN

from composer.codegen.program import check_backends
from composer.fpga.learner_program import LearnerProgram, ProgramLayer, Unroll, chain
from composer.fpga.model import FpgaPart, ReplayTree, Resources
from composer.fpga.nominal_kernels import Memory, nominal_replay, nominal_step, nominal_weighing, submit_interval
from composer.fpga.program_design import (
    ProgramSpace,
    learner_resources,
    program_tree,
    replay_bits,
    replay_resources,
)
from composer.matrix import LearnerCell, PairCell
from composer.modelled_rows import ModelledWork, fpga_row
from pearl.algorithms import DDPG, DQN, SAC, TD3, Trainer
from pearl.backends.fpga.learner import FpgaLearner
from pearl.backends.sycl.device import sycl_availability
from pearl.backends.sycl.runtime import sycl_runtime
from pearl.backends.sycl.selector import EMULATOR_SELECTOR
from pearl.devices import Device
from pearl.errors import CapacityError, GenerationError, TrainerError

AGILEX = FpgaPart("agilex", Resources(4510, 18202, 974_400, 1_948_800), 400)
BOARD = Device("f", "fpga", "model", clock_mhz=400, dsp=4510, sram_kb=18202)
UNLIMITED = Memory(1e12)
EMULATOR = sycl_availability(EMULATOR_SELECTOR)


def of16(width: int) -> int:
    return (width + 15) // 16


# --- a walk through the kernels' loops -------------------------------------------------------------------------------


class Kernel:
    """A kernel that takes items one by one. Each of its loops takes one item at a time, `trips` cycles for each."""

    def __init__(self, *trips: int, ready: float = 0.0) -> None:
        self.trips, self.ready, self.free = trips, ready, [0.0] * len(trips)

    def take(self, *arrivals: float) -> float:
        """When the item has left that came at the last of `arrivals`."""
        at = max(self.ready, *arrivals)
        for number, trips in enumerate(self.trips):
            at = max(at, self.free[number]) + trips
            self.free[number] = at
        return at


def dot_cycles(layer: ProgramLayer, unroll: int) -> int:
    """The loop over rows, and the loop over a row's values inside it."""
    rows, lanes = (unroll // 16, 16) if unroll > 16 else (1, unroll)
    return -(-layer.outputs // rows) * (16 * of16(layer.inputs) // lanes)


class WalkedDqn:
    """A step of DQN on two layers, in `copies` copies, item by item."""

    def __init__(self, widths: tuple[int, int, int], unroll: tuple[int, int], copies: int) -> None:
        seen, hidden, actions = widths
        one, two = chain(*widths)
        blocks = [layer.outputs * of16(layer.inputs) + of16(layer.outputs) for layer in (one, two)]
        got = [2 * count for count in blocks]  # the weights, then the targets'
        x, h, y = of16(seen), of16(hidden), of16(actions)
        first, second = dot_cycles(one, unroll[0]), dot_cycles(two, unroll[1])
        self.copies = [
            {
                "q1": Kernel(x, first, h, h, h, ready=got[0]),  # to FP 2, to GA 2, and to BP 2 for ReLU's slope
                "q2": Kernel(h, second, y, ready=got[1]),
                "t1": Kernel(x, first, h, ready=got[0]),
                "t2": Kernel(h, second, y, ready=got[1]),
                "loss": Kernel(y, y, max(1, actions - 1), y, y),
                "ga2": Kernel(y, h, second, ready=blocks[1]),
                "bp2": Kernel(y, second, h, 16 * h // min(16, unroll[1]), h, ready=got[1]),
                "ga1": Kernel(h, x, first, ready=blocks[0]),
            }
            for _ in range(copies)
        ]
        self.blocks, self.layers = blocks, (one, two)
        self.last = {"ga1": 0.0, "ga2": 0.0}
        self.results: list[float] = []

    def item(self, row: int, arrival: float, weight: float = 0.0) -> None:
        k = self.copies[row % len(self.copies)]
        hidden = k["q1"].take(arrival)
        values = k["q2"].take(hidden)
        target = k["t2"].take(k["t1"].take(arrival))
        slopes = k["loss"].take(values, target, weight)
        self.results.append(slopes)
        self.last["ga2"] = max(self.last["ga2"], k["ga2"].take(slopes, hidden))
        self.last["ga1"] = max(self.last["ga1"], k["ga1"].take(k["bp2"].take(slopes)))

    def moved(self) -> float:
        """When WU 2, at the end of the chain of norms, and WU 1 have moved their weights."""
        norm = self.last["ga1"] + self.blocks[0] + 1
        norm = max(norm, self.last["ga2"] + self.blocks[1]) + 1
        fours = [layer.outputs * -(-layer.inputs // 4) + -(-layer.outputs // 4) for layer in self.layers]
        return norm + max(fours)


designs = st.tuples(
    st.tuples(st.integers(1, 40), st.integers(1, 40), st.integers(1, 20)),
    st.tuples(*(st.sampled_from([1, 4, 16, 64]),) * 2),
    st.integers(1, 4),
    st.integers(1, 20),
)


def timed(widths: tuple[int, int, int], unroll: tuple[int, int], copies: int, batch: int):  # type: ignore[no-untyped-def]
    program = LearnerProgram((chain(*widths),), widths[-1])
    return program, nominal_step(program, batch, copies, (unroll,), UNLIMITED)


@settings(deadline=None)
@given(designs)
def test_a_step_takes_the_cycles_of_its_loops_walked_item_by_item(design: tuple) -> None:  # type: ignore[type-arg]
    widths, unroll, copies, batch = design
    copies = min(copies, batch)
    program, timing = timed(widths, unroll, copies, batch)
    walk, submit, resolve = WalkedDqn(widths, unroll, copies), submit_interval(program), Kernel(1)
    assert submit == max(widths[0], of16(widths[0]))
    for row in range(batch):
        walk.item(row, row * submit)
    resolved = max(resolve.take(result) for result in walk.results)
    cycles = timing.alone(submit, 1)
    assert cycles == pytest.approx(max(walk.moved(), resolved), abs=copies), "copies take turns in the bridges"


@settings(deadline=None)
@given(designs, st.sampled_from([2, 16, 64]), st.integers(1, 4))
def test_joined_loss_waits_for_the_last_weight_and_the_tree_for_the_last_loss(
    design: tuple,  # type: ignore[type-arg]
    fanout: int,
    depth: int,
) -> None:
    widths, unroll, copies, batch = design
    copies = min(copies, batch)
    program, timing = timed(widths, unroll, copies, batch)
    levels = [Kernel(1), *(Kernel(1, max(1, fanout // 16)) for _ in range(depth))]
    collect = Kernel(submit_interval(program))
    sampled = []
    for _ in range(batch):
        at = 0.0
        for level in levels:
            at = level.take(at)
        sampled.append(at)
        collect.take(at)
    paced = nominal_replay(fanout, depth, submit_interval(program))
    assert paced.sampling.cycles(depth, 1) == sampled[0]
    interval = max(fanout // 16, submit_interval(program))
    walk = WalkedDqn(widths, unroll, copies)
    items = [sampled[0] + row * interval for row in range(batch)]
    for row in range(batch):  # all weights are computed after the last item, then sent
        walk.item(row, items[row], items[-1] + batch + 1 + row)
    joined = timing.joined(paced, depth, nominal_weighing(batch), 1)
    assert joined.learner + joined.sampling == pytest.approx(walk.moved(), abs=copies)
    updated = max(walk.results) + walked_update(batch, depth)
    assert joined.cycles >= max(walk.moved(), updated) - copies
    assert joined.cycles <= max(walk.moved(), updated) + 2 * depth + 2 + batch + copies


def walked_kernels(program: LearnerProgram, unroll: Unroll) -> dict[str, Kernel]:
    """The kernels of one copy of any program, with the loops of their stages."""
    made = {}
    for name, stage in program.stages.items():
        if stage.kind == "LOSS":
            made[name] = Kernel(*stage.trips)
            continue
        network, number = stage.place
        layer, factor = program.networks[network][number], unroll[network][number]
        x, y = of16(layer.inputs), of16(layer.outputs)
        got, work = layer.outputs * x + y, dot_cycles(layer, factor)
        streamed = got * (2 if program.has_target(network) else 1)
        if stage.kind == "FP":
            made[name] = Kernel(x, work, *(y,) * stage.wires, ready=streamed)
        elif stage.kind == "BP":
            slope = [x, 16 * x // min(16, factor)] * stage.activated
            made[name] = Kernel(y, work, *slope, *(x,) * stage.wires, ready=streamed)
        else:
            made[name] = Kernel(y, x, work, ready=got)
    return made


@pytest.mark.parametrize("algorithm", ["ddpg", "td3", "sac"])
@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_a_step_of_actor_and_critics_takes_the_cycles_of_its_loops(algorithm: str, data: st.DataObject) -> None:
    seen, actions, hidden = (data.draw(st.integers(1, 40)) for _ in range(3))
    stochastic = algorithm == "sac"
    critic = chain(seen + actions, hidden, 1)
    actor = chain(seen, hidden, actions * (2 if stochastic else 1))
    critics = 1 if algorithm == "ddpg" else 2
    program = LearnerProgram((actor, *(critic,) * critics), actions, stochastic=stochastic)
    unroll = tuple(tuple(data.draw(st.sampled_from([1, 16, 64])) for _ in range(2)) for _ in program.networks)
    batch = data.draw(st.integers(1, 12))
    copies = min(batch, data.draw(st.integers(1, 3)))
    timing = nominal_step(program, batch, copies, unroll, UNLIMITED)
    walked = [walked_kernels(program, unroll) for _ in range(copies)]
    last: dict[str, float] = {}
    for row in range(batch):
        left = {"": float(row * submit_interval(program))}
        for name, stage in program.stages.items():
            left[name] = walked[row % copies][name].take(*(left[producer] for producer in stage.after))
            last[name] = max(last.get(name, 0.0), left[name])
    moved = 0.0
    for vector in (range(1, 1 + critics), range(1)):
        norm, longest = 0.0, 0
        for network in vector:
            name = "actor" if network == 0 else f"critic{network}_"
            for number, layer in enumerate(program.networks[network]):
                blocks = layer.outputs * of16(layer.inputs) + of16(layer.outputs)
                norm = max(norm, last[f"ga_{name}{number + 1}"] + blocks) + 1
                longest = max(longest, layer.outputs * -(-layer.inputs // 4) + -(-layer.outputs // 4))
        moved = max(moved, norm + longest)
    results = last[program.loss] + (batch - 1) % copies
    assert timing.alone(submit_interval(program), 1) == pytest.approx(max(moved, results), abs=copies)


def walked_update(batch: int, depth: int) -> int:
    """Cycles of root_stage: all first passes, then a second pass for each change that has come back."""
    sent = [k + 1 for k in range(batch)]
    changes = [at + depth for at in sent]
    at = sent[-1]
    for change in changes:
        at = max(at, change) + 1
    return at + depth - 1  # the leaf level has its value already


@given(st.integers(1, 64), st.integers(1, 16))
def test_an_update_is_two_passes_through_the_tree(batch: int, depth: int) -> None:
    cycles = nominal_replay(2, depth).update.cycles(depth, batch)
    walked = walked_update(batch, depth)
    assert walked <= cycles <= walked + min(batch, depth) + depth


def test_weights_come_at_the_memorys_pace() -> None:
    program = LearnerProgram((chain(64, 64, 4),), 4)
    fast, slow = (nominal_step(program, 32, 1, ((16, 16),), Memory(bandwidth)).weights for bandwidth in (1e12, 8.0))
    assert fast["wu_0_1"].stream == 2 * (64 * 4 + 4)
    assert fast["wu_0_1"].move == 64 * 16 + 16
    words = [64 * 65, 4 * 65]
    # Both layers and their targets; then weight, two moments of Adam and target, read and written.
    assert slow["wu_0_1"].stream == sum(words) * 2 * 4 / 8
    assert slow["wu_0_1"].move == sum(words) * 8 * 4 / 8
    assert slow["wu_0_2"].stream == 2 * words[1] * 2 * 4 / 8, "the smaller one has half of the bandwidth to its end"
    plain = dataclasses.replace(program, state_words=0)
    assert nominal_step(plain, 32, 1, ((16, 16),), Memory(8.0)).weights["wu_0_1"].move == sum(words) * 4 * 4 / 8


# --- what the kernels have -------------------------------------------------------------------------------------------

BOX, DISCRETE = spaces.Box(-1.0, 1.0, (5,), np.float32), spaces.Discrete(3)
TORQUES = spaces.Box(-1.0, 1.0, (2,), np.float32)
HIDDEN = {"hidden_sizes": (20, 7)}


def trainers() -> Sequence[Trainer]:
    return (
        DQN(BOX, DISCRETE, **HIDDEN),
        DQN(BOX, DISCRETE, **HIDDEN, double=False),
        *(made(BOX, TORQUES, **HIDDEN) for made in (DDPG, TD3, SAC)),
    )


@pytest.mark.parametrize("number", range(5))
@pytest.mark.parametrize("copies", [1, 2], ids=["one copy", "two"])
@pytest.mark.fpga
@pytest.mark.skipif(not EMULATOR.ok, reason=f"no FPGA emulator: {EMULATOR.reason}")
def test_stages_wires_and_weights_are_those_of_the_generated_program(number: int, copies: int) -> None:
    trainer = trainers()[number]
    program = LearnerProgram.of(trainer)
    learner = FpgaLearner(trainer, sub_batches=copies)
    learner.refresh()
    copies = learner.sub_batches  # not all stages of two copies of SAC run at once
    text = learner.kernel.source(9)
    learner.close()
    kernels = re.findall(r"PEARL_TASK pearl_learner_(\w+)\(\)", text)
    expected = [f"{name}_{copy}" for copy in range(copies) for name in program.stages]
    # The emulator gets the weights from the trainer, SAC's temperature too.
    temperature = ["wu_temperature"] * ("wu_temperature" in kernels)
    assert sorted(kernels) == sorted([*expected, *program.weight_stages, *temperature])
    wires = [(int(width), int(items)) for width, items in re.findall(r"= Wire<Learner, \d+, (\d+), (\d+)>;", text)]
    items = -(-9 // copies)
    assert sorted(wires) == sorted((width, items) for width in program.wires for _ in range(copies))
    layers = {
        name: 16 * of16(int(i)) * int(o) + 16 * of16(int(o))
        for name, i, o in re.findall(r"using (Network\d+Layer\d+) = Layer<(\d+), (\d+),", text)
    }
    held = re.findall(r"(?:forward|backward|gradient|weight)_stage<(Network\d+Layer\d+)", text)
    stages = [program.networks[k][n] for k, n in (s.place for s in program.stages.values() if s.kind != "LOSS")]
    words = copies * sum(layer.words for layer in stages) + sum(layer.words for layer in sum(program.networks, ()))
    assert words == sum(layers[name] for name in held)


@pytest.mark.fpga
@pytest.mark.skipif(not EMULATOR.ok, reason=f"no FPGA emulator: {EMULATOR.reason}")
@pytest.mark.parametrize("number", range(5))
def test_a_program_has_as_many_copies_as_the_kernels_allow(number: int) -> None:
    trainer = trainers()[number]
    most = LearnerProgram.of(trainer).most_copies
    learner = FpgaLearner(trainer, sub_batches=50)
    assert learner.sub_batches == most
    learner.close()


@pytest.mark.sycl
def test_slots_have_the_leaf_and_80_bits_and_families_are_whole() -> None:
    for capacity, fanout in ((300, 8), (1000, 16), (5, 2)):
        tree = ReplayTree(capacity, fanout)
        text = sycl_runtime().module.fpga_replay_source(capacity, fanout)
        bits = [int(word) for word in re.search(r"the root's first:([\d ]+)\n", text)[1].split()]  # type: ignore[index]
        nodes, expected = capacity, 0
        for level in reversed(range(1, len(bits))):
            nodes = -(-nodes // fanout) * fanout
            expected += nodes * (bits[level] + (80 if level + 1 == len(bits) else 0))
            nodes //= fanout
        assert replay_bits(tree) == expected
        assert replay_bits(tree) / tree.levels[-1].nodes >= 28 + 80


def test_a_tree_takes_its_bits_in_whole_blocks_and_says_what_would_fit() -> None:
    tree = program_tree(100_000, 16, AGILEX)
    assert replay_resources(tree, AGILEX).sram_kb >= replay_bits(tree) / 8000
    small = dataclasses.replace(AGILEX, available=Resources(4510, 300, 1e6, 1e6))
    with pytest.raises(CapacityError, match=r"110 bits for each slot; agilex has 300 KB.*At most [0-9,]+ fit") as found:
        program_tree(100_000, 16, small)
    fits = int(str(found.value).split("At most ")[1].split(" fit")[0].replace(",", ""))
    program_tree(fits, 16, small)
    with pytest.raises(CapacityError):
        program_tree(fits + 1, 16, small)
    with pytest.raises(CapacityError, match="at most 16; 1,000,000 slots with a fanout of 2 need 20"):
        program_tree(1_000_000, 2, AGILEX)


# --- the search ------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.integers(1, 40), min_size=2, max_size=4),
    st.integers(1, 64),
    st.integers(100, 3000),
    st.integers(50, 5000),
)
def test_no_design_exceeds_its_part_and_none_that_fits_is_much_faster(
    widths: list[int], batch: int, dsps: int, sram: int
) -> None:
    program = LearnerProgram((chain(*widths),), widths[-1])
    part = dataclasses.replace(AGILEX, available=Resources(dsps, sram, 500_000, 1_000_000))
    space = ProgramSpace(program, part, batch, 100.0)
    try:
        design = space.alone()
    except CapacityError:
        return
    assert not design.resources.exceeding(part.available)
    assert 1 <= design.copies <= min(batch, program.most_copies)
    assert all(factor & (factor - 1) == 0 for network in design.unroll for factor in network)
    for copies in range(1, min(batch, program.most_copies) + 1):
        for factor in (1, 8, 16, 64, 256):
            unroll: Unroll = ((factor,) * (len(widths) - 1),)
            if learner_resources(program, batch, copies, unroll, part).exceeding(part.available):
                continue
            timing = nominal_step(program, batch, copies, unroll, Memory(100.0))
            assert design.cycles <= 1.05 * timing.alone(submit_interval(program), 1) + 2


def test_what_the_kernels_cannot_have_is_said() -> None:
    deep = LearnerProgram((chain(*(4,) * 40),), 4)
    with pytest.raises(CapacityError, match=r"has 195 stages; at most 100 run at once. Use networks of fewer layers"):
        ProgramSpace(deep, AGILEX, 32, 100.0).alone()
    with pytest.raises(CapacityError, match=r"has 1 to 65,536 transitions; found 65,537. Lower the batch size"):
        ProgramSpace(LearnerProgram((chain(4, 2),), 2), AGILEX, 65_537, 100.0).alone()
    tiny = dataclasses.replace(AGILEX, available=Resources(1, 1, 10, 10))
    with pytest.raises(CapacityError, match=r"needs at least .* agilex has 1 and 1 KB: too few .*"):
        ProgramSpace(LearnerProgram((chain(4, 2),), 2), tiny, 32, 100.0).alone()


def test_a_pair_inserts_between_iterations_and_counts_what_it_does_not_hide() -> None:
    work = ModelledWork(32, 16, 44, 100_000, (4, 16, 64), "none", LearnerProgram((chain(4, 64, 2),), 2))
    row = fpga_row(BOARD, work).row
    assert isinstance(row.pair, PairCell)
    assert isinstance(row.learner, LearnerCell)
    assert row.pair.joined
    tree = ReplayTree(100_000, row.pair.replay.fanout)
    timing = nominal_replay(tree.fanout, tree.depth)
    assert row.pair.replay.insert.value_us == pytest.approx(timing.update.cycles(tree.depth, 16) / 400)
    assert row.pair.replay.update.value_us < timing.update.cycles(tree.depth, 32) / 400
    assert row.pair.learner.unroll
    assert row.pair.learner.sub_batches >= 1


def test_networks_without_a_program_have_no_cell_and_say_why() -> None:
    with pytest.raises(TrainerError, match="programs for FPGAs cannot train object"):
        LearnerProgram.of(object())
    dueling = DQN(BOX, DISCRETE, dueling=True)
    with pytest.raises(TrainerError, match=r"cannot train DQN \(unsupported: "):
        LearnerProgram.of(dueling)
    row = fpga_row(BOARD, ModelledWork(32, 16, 44, 1000, (16,), "none", "it has convolutions")).row
    assert "cannot be modelled: it has convolutions" in str(row.learner)
    assert "cannot be modelled: it has convolutions" in str(row.pair)


# --- into the program ------------------------------------------------------------------------------------------------

HEADER = "name,kind,backend,selector,cores,clock_mhz,memory_bandwidth_gbps,dsp,sram_kb,luts,active_watts\n"


@pytest.mark.fpga
@pytest.mark.usefixtures("quick_profiles")
@pytest.mark.parametrize("pair", [("emu", "emu"), ("cpu0", "emu")], ids=["joined", "apart"])
def test_a_program_instantiates_the_design_that_was_priced(tmp_path: Path, pair: tuple[str, str]) -> None:
    devices, connections = tmp_path / "d.csv", tmp_path / "c.csv"
    devices.write_text(HEADER + "cpu0,cpu,cpu,,2,,,,,,60\nemu,fpga,sycl,fpga_emu,,400,76,4510,18202,974400,50\n")
    connections.write_text("source,target,latency_us,bandwidth_gbps\ncpu0,emu,5,16\n")
    composer = described((devices, connections), trainer=TinyDQN)
    composer.run()
    row = composer.matrix["emu"]
    assert isinstance(row.pair, PairCell)
    assert isinstance(row.learner, LearnerCell)
    cell = row.pair.learner if pair[0] == "emu" else row.learner
    chosen = composer.placement.with_choice(replay_manager=pair[0], learner=pair[1])
    assert type(chosen).from_json(chosen.to_json()).learner_config.unroll == cell.unroll
    text = composer.runtime_gen(chosen.replay_config, chosen.learner_config, tmp_path / "program.py").read_text()
    calls = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call))
    made = next(call for call in calls if ast.unparse(call.func) == "FpgaLearner")
    arguments = {word.arg: ast.literal_eval(word.value) for word in made.keywords}
    assert arguments == {"device": "fpga_emu", "sub_batches": cell.sub_batches, "unroll": cell.unroll}
    if pair[0] == "emu":
        assert f"fanout={row.pair.replay.fanout}" in text
    wrong = dataclasses.replace(chosen.learner_config, unroll=((3, 3),))
    with pytest.raises(GenerationError, match="unroll"):
        composer.runtime_gen(chosen.replay_config, wrong, tmp_path / "wrong.py")
    check_backends(*(composer.platform.device(name) for name in pair))
