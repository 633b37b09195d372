"""Explanations of placements: terms, stages, break-even values that Algorithm 1 confirms, and the command."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import shutil
from pathlib import Path

import pytest
from programs import ONE_CPU, CsvPair, described
from test_cli import invoke
from test_placement import BATCH, CPU, FPGA, GPU, MATRIX, SERVER, TRANSITION, modelled_row, whole

from composer import explain
from composer.algorithm1 import place
from composer.evidence import BreakEven, Evidence, all_modelled, gather_evidence
from composer.explain import Explanation, dominant, term_values
from composer.matrix import AssignmentMatrix, LearnerCell, LearnerOption, MatrixRow, PairCell, ReplayCell
from composer.measurement import Measurement
from composer.placement import IterationTerms, Placement
from composer.platform import Platform
from composer.storage_rule import StorageRule
from pearl.devices import Connection
from pearl.errors import ConfigurationError
from pearl.spec import ReplaySpec

CAPACITY = 10_000
decide = functools.partial(
    place, batch_size=BATCH, transition_bytes=TRANSITION, actor_count=4, envs_per_actor=8, messages_us=20.0
)


def rule(platform: Platform) -> StorageRule:
    devices = {device.name: device for device in platform.devices}
    return StorageRule(devices, platform.host.name, ReplaySpec(CAPACITY), TRANSITION)


def evidence(matrix: AssignmentMatrix = MATRIX, platform: Platform = SERVER, **more: object) -> Evidence:
    placement = functools.partial(decide, **more)(matrix, platform)
    parts = functools.partial(decide, **{name: value for name, value in more.items() if name != "wholes"})
    return gather_evidence(parts, placement, matrix, platform, rule(platform))


def placed(**more: object) -> Placement:
    chosen = functools.partial(decide, **more)(MATRIX, SERVER)
    return dataclasses.replace(chosen, evidence=evidence(**more))


def found(entries: tuple[BreakEven, ...], quantity: str) -> list[BreakEven]:
    return [entry for entry in entries if entry.quantity.startswith(quantity) and entry.at is not None]


def names(entry: BreakEven) -> tuple[str, str, str]:
    return entry.replay_manager, entry.learner, entry.implementation


# --- break-even values -----------------------------------------------------------------------------------------------


def with_speed(matrix: AssignmentMatrix, device: str, times: float) -> AssignmentMatrix:
    """The matrix with one device faster, written out by hand."""

    def scaled(m: Measurement) -> Measurement:
        return Measurement.modelled(m.value_us / times)

    def replay(cell: ReplayCell) -> ReplayCell:
        return dataclasses.replace(
            cell, sample=scaled(cell.sample), insert=scaled(cell.insert), update=scaled(cell.update)
        )

    def learner(cell: LearnerCell) -> LearnerCell:
        return dataclasses.replace(cell, step=scaled(cell.step))

    rows = []
    for row in matrix.rows:
        if row.device == device:
            assert isinstance(row.replay, ReplayCell)
            assert isinstance(row.learner, LearnerCell)
            assert isinstance(row.pair, PairCell)
            pair = PairCell(replay(row.pair.replay), learner(row.pair.learner))
            row = MatrixRow(device, replay(row.replay), learner(row.learner), pair)
        rows.append(row)
    return AssignmentMatrix(tuple(rows))


@pytest.mark.parametrize("device", ["cpu0", "gpu0"])
def test_at_the_break_even_speed_algorithm_1_chooses_the_pair_that_is_named_and_before_it_does_not(device: str) -> None:
    chosen = decide(MATRIX, SERVER).chosen.names
    entries = found(evidence().break_evens, f"speed of {device},")
    assert entries
    for entry in entries:
        assert entry.at is not None
        assert decide(with_speed(MATRIX, device, entry.at), SERVER).chosen.names == names(entry) != chosen
        nearer = entry.at**0.98
        assert decide(with_speed(MATRIX, device, nearer), SERVER).chosen.names == chosen


def test_a_device_outside_the_best_pairs_is_what_a_slower_device_is_replaced_by() -> None:
    others = [dataclasses.replace(GPU, name=f"gpu{n}") for n in (1, 2)]
    links = (Connection("cpu0", gpu.name, 10, 12) for gpu in others)
    platform = Platform((CPU, GPU, *others), (SERVER.connections[0], *links))
    rows = (modelled_row("gpu1", (200, 12, 200, 320)), modelled_row("gpu2", (2, 1, 1, 900)))
    matrix = AssignmentMatrix((*MATRIX.rows[:2], *rows))
    best = decide(matrix, platform).candidates[:3]
    assert not any("gpu1" in candidate.pair for candidate in best)
    (slower,) = (e for e in found(evidence(matrix, platform).break_evens, "speed of gpu0,") if (e.at or 1) < 1)
    assert slower.at is not None
    assert slower.learner == "gpu1"
    assert decide(with_speed(matrix, "gpu0", slower.at), platform).chosen.names == names(slower)
    assert decide(with_speed(matrix, "gpu0", slower.at**0.98), platform).chosen.learner.device == "gpu0"


@pytest.mark.parametrize("column", ["bandwidth_gbps", "latency_us"])
def test_at_the_break_even_of_a_link_algorithm_1_chooses_otherwise(column: str) -> None:
    kind = column.partition("_")[0]
    chosen = decide(MATRIX, SERVER).chosen.names
    entries = found(evidence().break_evens, f"{kind} between cpu0 and gpu0")
    assert entries
    for entry in entries:
        assert entry.at is not None

        def links(value: float) -> Platform:
            changed = dataclasses.replace(SERVER.connections[0], **{column: value})
            return dataclasses.replace(SERVER, connections=(changed, *SERVER.connections[1:]))

        assert decide(MATRIX, links(entry.at)).chosen.names == names(entry) != chosen
        assert decide(MATRIX, links(entry.at + 0.02 * (entry.now - entry.at))).chosen.names == chosen


def test_a_slower_implementation_says_how_much_faster_it_must_be() -> None:
    row = modelled_row("cpu0", (5, 4, 4, 300))
    assert isinstance(row.learner, LearnerCell)
    assert isinstance(row.pair, PairCell)
    slow = dataclasses.replace(row.learner, step=Measurement.modelled(900), implementation="native")
    matrix = AssignmentMatrix(
        (dataclasses.replace(row, others=(LearnerOption(slow, dataclasses.replace(row.pair, learner=slow)),)),)
    )
    (entry,) = found(evidence(matrix, Platform((CPU,))).break_evens, "speed of the native Learner on cpu0")
    assert entry.at == pytest.approx(3.0, rel=0.01)
    assert names(entry) == ("cpu0", "cpu0", "native")


def test_at_the_break_even_of_the_hosts_messages_algorithm_1_chooses_otherwise() -> None:
    chosen = decide(MATRIX, SERVER).chosen
    assert chosen.setting == 1
    (entry,) = found(evidence().break_evens, "messages through the host")
    assert entry.now == 20.0
    assert entry.at is not None
    assert decide(MATRIX, SERVER, messages_us=entry.at).chosen.names == names(entry) != chosen.names
    assert decide(MATRIX, SERVER, messages_us=entry.at * 0.98).chosen.names == chosen.names


def test_a_quantity_that_changes_nothing_says_so_and_how_far_it_was_varied() -> None:
    alone = evidence(AssignmentMatrix((MATRIX.rows[0],)), Platform((CPU,)))
    speed = next(entry for entry in alone.break_evens if entry.quantity == "speed of cpu0, times")
    assert speed.at is None
    assert speed.reason == "no change within a factor of 1,000"


def test_how_measured_times_scale_with_batch_and_fanout_is_not_claimed() -> None:
    for quantity in ("batch size", "fanout of the tree"):
        (entry,) = [entry for entry in evidence().break_evens if entry.quantity == quantity]
        assert entry.at is None
        assert entry.reason.startswith("not known")


def test_modelled_times_give_the_batch_size_at_which_the_choice_changes() -> None:
    def matrix_at(batch: int, fanout: int) -> AssignmentMatrix:
        rows = (modelled_row("cpu0", (5, 4, 4, 4.0 * batch)), modelled_row("gpu0", (20, 12, 12, 200 + 0.1 * batch)))
        return AssignmentMatrix(rows)

    platform = Platform((CPU, GPU), SERVER.connections[:1])
    entries = gather_evidence(
        decide, decide(matrix_at(BATCH, 16), platform), matrix_at(BATCH, 16), platform, rule(platform), matrix_at
    ).break_evens
    (entry,) = found(entries, "batch size")
    assert (entry.now, entry.at) == (64, 32)
    for batch in (64, 32):
        at = decide(matrix_at(batch, 16), platform, batch_size=batch)
        assert (at.chosen.names == names(entry)) == (batch == 32)


def test_what_a_trial_found_stays_while_another_input_varies() -> None:
    wholes = {("cpu0", "gpu0", "torch"): whole(5000.0, 5000.0)}
    crowded = decide(MATRIX, SERVER, wholes=wholes)
    entries = evidence(wholes=wholes).break_evens
    assert crowded.chosen.pair != ("cpu0", "gpu0")
    for entry in entries:
        assert names(entry) != crowded.chosen.names
        assert entry.at is None or names(entry) != ("cpu0", "gpu0", "torch") or entry.quantity.startswith("speed")


def test_a_large_machine_is_varied_in_the_devices_of_its_best_pairs_only() -> None:
    gpus = [dataclasses.replace(GPU, name=f"gpu{n}") for n in range(30)]
    links = tuple(Connection("cpu0", gpu.name, 10, 12) for gpu in gpus)
    rows = (MATRIX.rows[0], *(dataclasses.replace(MATRIX.rows[1], device=gpu.name) for gpu in gpus))
    entries = evidence(AssignmentMatrix(rows), Platform((CPU, *gpus), links)).break_evens
    assert len(entries) < 40


def test_modelled_and_measured_rows_are_told_apart() -> None:
    assert all_modelled(MATRIX)
    measured = dataclasses.replace(MATRIX.rows[0].replay, sample=Measurement.from_samples([1.0, 2.0]))  # type: ignore[type-var]
    assert not all_modelled(AssignmentMatrix((dataclasses.replace(MATRIX.rows[0], replay=measured),)))


# --- the text --------------------------------------------------------------------------------------------------------


def test_every_term_of_every_shown_pair_is_printed_with_eq7_and_the_dominant_one() -> None:
    placement = placed()
    text = str(placement.explain(pairs=2))
    for field in dataclasses.fields(IterationTerms):
        if field.name.endswith("_us"):
            assert f"| {explain.term_name(field.name)} " in text
    assert "Eq. 7 as printed" in text
    name, share = dominant(placement.terms)
    assert f"({share:.0%})" in text
    assert name in placement.terms.critical()
    assert text.count("batches under way") + text.count("strict order") == 3
    assert f"and {len(placement.candidates) - 3} more possible pairs" in text
    assert "not possible: SRAM too small" in text
    assert "gpu1 is left out" in text
    assert all(len(line) <= 120 for line in text.splitlines())


def test_a_term_that_a_later_version_adds_is_shown_without_a_change_here() -> None:
    @dataclasses.dataclass(frozen=True)
    class More(IterationTerms):
        gathering_elsewhere_us: float = 7.0

    terms = More(1, 1, 1, 1, 1, 1, 1)
    assert term_values(terms)["gathering_elsewhere_us"] == 7.0
    assert "delay" not in term_values(terms)


def test_the_slowest_stage_is_marked_and_its_sum_is_the_iteration() -> None:
    placement = placed()
    lines = str(placement.explain(pairs=0)).splitlines()
    (marked,) = [line for line in lines if line.lstrip().startswith("> ")]
    assert marked.split()[1] == explain.short_number(placement.t_itr_us)


@pytest.mark.parametrize(("us", "sign"), [(5000.0, "+"), (1.0, "-")])
def test_what_a_trial_found_beyond_the_parts_is_shown_beside_the_stages(us: float, sign: str) -> None:
    placement = placed(wholes={("cpu0", "gpu0", "torch"): whole(us, us)})
    beyond = placement.with_choice(replay_manager="cpu0", learner="gpu0")
    amount = explain.short_number(abs(beyond.terms.beyond_parts_us))
    assert f"{sign} {amount} us what its parts do not explain" in str(beyond.explain())


def test_the_data_storage_shows_traffic_memory_and_why_a_device_cannot_hold_it() -> None:
    cpu, gpu = dataclasses.replace(CPU, memory_gb=64.0), dataclasses.replace(GPU, memory_gb=1e-4)
    platform = Platform((cpu, gpu, FPGA), SERVER.connections)
    stored = functools.partial(decide, storage_rule=rule(platform))
    chosen = stored(MATRIX, platform)
    placement = dataclasses.replace(
        chosen, evidence=gather_evidence(stored, chosen, MATRIX, platform, rule(platform))
    ).with_choice(replay_manager="cpu0", learner="gpu0")
    text = str(placement.explain())
    assert f"{CAPACITY:,} transitions need {CAPACITY * TRANSITION / 1e9:.3g} GB" in text
    assert " 64 |" in text
    assert placement.evidence is not None
    site = placement.evidence.site("fpga0")
    assert site is not None
    assert site.without_learner == "it keeps one for no Learner but its own"


def test_an_edited_choice_is_named_as_such() -> None:
    text = str(placed().with_choice(replay_manager="gpu0", learner="gpu0").explain())
    assert "This choice was edited. Algorithm 1 chose RM cpu0, Learner gpu0" in " ".join(text.split())


def test_a_placement_without_evidence_is_explained_without_break_even_values() -> None:
    text = " ".join(str(decide(MATRIX, SERVER).explain()).split())
    assert "not known. This placement was written without break-even values" in text
    assert "Data Storage (Algorithm 1, Step 2)" in text


def test_evidence_goes_through_json() -> None:
    placement = placed()
    assert Placement.from_json(placement.to_json()) == placement


def test_several_placements_say_where_the_choice_changes() -> None:
    small, large = decide(MATRIX, SERVER), decide(MATRIX, SERVER, batch_size=512).with_choice(learner="cpu0")
    text = " ".join(str(Explanation((large, small), names=("large", "small"))).split())
    assert "Between batch 64, fanout 16 and batch 512, fanout 16 the choice changes" in text
    same = str(Explanation((small, small)))
    assert "The choice is the same in all of them." in same


def test_long_names_of_several_placements_are_told_apart() -> None:
    small = decide(MATRIX, SERVER)
    names = [f"a_long_name_of_an_experiment_with_many_words_and_a_batch_of_{batch}.json" for batch in (64, 512)]
    rows = [line for line in str(Explanation((small, small), names=tuple(names))).splitlines() if "|" in line]
    assert "".join(row.rsplit("|", 2)[1].strip() for row in rows[1:]) == "".join(names)


def test_placements_of_other_problems_are_not_compared() -> None:
    other = decide(MATRIX, SERVER, metric="power_efficiency")
    with pytest.raises(ConfigurationError, match="found metric throughput and power_efficiency"):
        Explanation((decide(MATRIX, SERVER), other))


def test_the_terms_are_those_of_the_data_storage_that_was_chosen() -> None:
    placement = placed()
    elsewhere = placement.with_choice(storage=placement.chosen.storage[-1].device)
    assert elsewhere.t_itr_us != placement.t_itr_us
    for one in (placement, elsewhere):
        (line,) = [line for line in str(one.explain(pairs=0)).splitlines() if "T_itr, steady state" in line]
        assert f" {explain.short_number(one.t_itr_us)} " in line


def test_power_efficiency_shows_experiences_per_watt() -> None:
    assert "EPS per watt" in str(placed(metric="power_efficiency").explain())


# --- composer and command --------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("quick_profiles")
def test_the_composer_keeps_evidence_and_a_modelled_machine_varies_batch_and_fanout() -> None:
    folder = Path(__file__).parent.parent / "examples" / "platforms"
    composer = described((folder / "server_cgf_devices.csv", folder / "server_cgf_connections.csv"))
    composer.run()
    kept = composer.placement.evidence
    assert kept is not None
    assert kept.platform == composer.platform
    assert kept.replay_capacity == 2000
    assert not [entry for entry in kept.break_evens if entry.reason.startswith("not known")]


@pytest.mark.usefixtures("quick_profiles")
def test_explain_finds_the_placement_of_a_file_a_program_and_a_run(csv_pair: CsvPair, tmp_path: Path) -> None:
    composer = described(csv_pair(*ONE_CPU))
    composer.run()
    program = composer.runtime_gen(path=tmp_path / "mine.py")
    composer.save(tmp_path / "saved")
    shutil.copy(tmp_path / "saved" / "placement.json", tmp_path / "mine.placement.json")
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    for source in (tmp_path / "mine.placement.json", program, tmp_path / "saved", tmp_path / "runs" / "mine"):
        shown = invoke("explain", source)
        assert shown.exit_code == 0, shown.output
        assert "Chosen for throughput" in shown.output
    compared = invoke("explain", program, program)
    assert "The choice is the same" in compared.output


@pytest.mark.usefixtures("quick_profiles")
def test_explain_and_portability_take_the_composition_of_a_program_or_of_a_run(
    csv_pair: CsvPair, tmp_path: Path
) -> None:
    composer = described(csv_pair(*ONE_CPU))
    composer.run()
    program = composer.runtime_gen(path=tmp_path / "mine.py")
    run = tmp_path / "elsewhere" / "run"
    run.mkdir(parents=True)
    shutil.copy(tmp_path / "mine.composition.json", run / "composition.json")
    for source in (program, run):
        shown = invoke("explain", source)
        assert shown.exit_code == 0, shown.output
        assert "Chosen for throughput" in shown.output
        assert invoke("portability", source).exit_code == 0

    # An older placement is one of an earlier composing; a newer one may be edited, and counts.
    for source, composition in ((program, tmp_path / "mine.composition.json"), (run, run / "composition.json")):
        placement = composition.with_name("mine.placement.json")
        placement.write_text("{}", encoding="utf-8")
        for age_s, code in ((60, 0), (-60, 1)):
            at = composition.stat().st_mtime - age_s
            os.utime(placement, (at, at))
            assert invoke("explain", source).exit_code == code


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read"),
        (b"\xff\xfe", "not UTF-8"),
        (b"", "not JSON"),
        (b"[]", "pearl-placement"),
        (b'{"format": "pearl-assignment-matrix", "version": 1}', "'pearl-assignment-matrix'"),
        (b'{"format": "pearl-placement", "version": 99}', f"version {Placement.VERSION}; found 99"),
        (f'{{"format": "pearl-placement", "version": {Placement.VERSION}}}'.encode(), "missing"),
    ],
)
def test_explain_refuses_what_is_no_placement_by_name(tmp_path: Path, content: bytes | None, said: str) -> None:
    file = tmp_path / "a.json"
    if content is not None:
        file.write_bytes(content)
    shown = invoke("explain", file)
    assert shown.exit_code == 1
    assert said in shown.output
    assert "a.json" in shown.output


def test_explain_names_where_it_looked(tmp_path: Path) -> None:
    for source in (tmp_path, tmp_path / "program.py"):
        shown = invoke("explain", source)
        assert shown.exit_code == 1
        assert "looked for" in shown.output
    for name in "ab":
        (tmp_path / f"{name}.placement.json").write_text(json.dumps({}))
    assert "has several placements" in invoke("explain", tmp_path).output
