"""Algorithm 1: the optimum over all pairs, the place of the Data Storage, reasons, and editing a placement."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer.algorithm1 import place
from composer.contention import CoreSharing
from composer.matrix import (
    NOT_MEASURED,
    AssignmentMatrix,
    LearnerCell,
    MatrixRow,
    MissingCell,
    PairCell,
    ReplayCell,
    StorageCell,
    UnavailableDevice,
)
from composer.measurement import Measurement
from composer.metric import parse_metric
from composer.placement import Placement, WholeIteration
from composer.platform import Platform
from pearl.devices import Connection, Device
from pearl.errors import ConfigurationError, PlacementError
from pearl.spec import LearnersSpec

BATCH, TRANSITION, ACTORS, ENVS = 64, 52, 4, 8
Times = tuple[float, float, float, float]


FREE = StorageCell(Measurement.modelled(0.0), Measurement.modelled(0.0))


def modelled_row(device: str, alone: Times, together: Times | None = None, storage: StorageCell = FREE) -> MatrixRow:
    def cells(times: Times) -> tuple[ReplayCell, LearnerCell]:
        sample, insert, update, step = (Measurement.modelled(time) for time in times)
        return ReplayCell(sample, insert, update, fanout=16, workers=2), LearnerCell(step, threads=3)

    return MatrixRow(device, *cells(alone), PairCell(*cells(together or alone)), storage=storage)


def run(
    matrix: AssignmentMatrix, platform: Platform, metric: str = "throughput", storage: str | None = None, delay: int = 0
) -> Placement:
    """A placement; in the strict order of Eq. 7 unless there is a delay."""
    return place(
        matrix,
        platform,
        metric=metric,
        batch_size=BATCH,
        transition_bytes=TRANSITION,
        actor_count=ACTORS,
        envs_per_actor=ENVS,
        storage_forced=storage,
        priority_update_delay=delay,
    )


CPU = Device("cpu0", "cpu", "cpu", active_watts=100)
GPU = Device("gpu0", "gpu", "cuda", active_watts=300)
FPGA = Device("fpga0", "fpga", "sycl", active_watts=40)
SERVER = Platform((CPU, GPU, FPGA), (Connection("cpu0", "gpu0", 10, 12), Connection("fpga0", "cpu0", 5, 6)))
MATRIX = AssignmentMatrix(
    (
        modelled_row("cpu0", (5, 4, 4, 900), (6, 4, 4, 1080)),
        modelled_row("gpu0", (20, 12, 12, 200), (24, 12, 12, 240)),
        MatrixRow(
            "fpga0",
            modelled_row("fpga0", (2, 1, 1, 1)).replay,
            MissingCell("SRAM too small"),
            MissingCell("SRAM too small"),
        ),
    ),
    (UnavailableDevice("gpu1", "torch finds no CUDA device"),),
)


def storage_traffic(platform: Platform, replay: str, learner: str) -> dict[str, float]:
    """Step 2's sum of C_x / bandwidth for each device that may hold the Data Storage."""
    flows = [(learner, BATCH * (TRANSITION + 8)), ("cpu0", ACTORS * ENVS * TRANSITION), (replay, BATCH * 8)]
    return {
        name: sum(nbytes / (platform.link(name, user).bandwidth_gbps * 1e3) for user, nbytes in flows)
        for name, _ in flows
    }


def brute_force(matrix: AssignmentMatrix, platform: Platform, metric: str, delay: int) -> dict[tuple[str, str], float]:
    """The score of each pair: straight from Eq. 7, or with batches that overlap, in setting 1 with a delay."""
    scores = {}
    for i in matrix.rows:
        for j in matrix.rows:
            replay, learner = (i.pair.replay, i.pair.learner) if i is j else (i.replay, j.learner)  # type: ignore[union-attr]
            message = BATCH * 16
            sampling = replay.sample.value_us + platform.link(i.device, j.device).transfer_us(message)  # type: ignore[union-attr]
            traffic = storage_traffic(platform, i.device, j.device)
            storage = min(traffic, key=lambda name: traffic[name])
            batch_us = platform.link(storage, j.device).transfer_us(BATCH * TRANSITION) if storage != j.device else 0.0
            sampling += batch_us
            insertion = replay.insert.value_us + platform.link("cpu0", i.device).transfer_us(ACTORS * ENVS * 16)  # type: ignore[union-attr]
            training = (
                learner.step.value_us  # type: ignore[union-attr]
                + platform.link(j.device, i.device).transfer_us(message)
                + replay.update.value_us  # type: ignore[union-attr]
            )
            t_itr_us = sampling + max(insertion, training)
            if delay and i is not j:
                at_replay = at_learner = 0.0
                for source, target in ((i.device, "cpu0"), ("cpu0", i.device)):
                    at_replay += platform.link(source, target).transfer_us(message) if i.device != "cpu0" else 0
                for source, target in ((j.device, "cpu0"), ("cpu0", j.device)):
                    at_learner += platform.link(source, target).transfer_us(message) if j.device != "cpu0" else 0
                t_itr_us = max(
                    (sampling + training) / (delay + 1),
                    learner.step.value_us + at_learner + batch_us,  # type: ignore[union-attr]
                    replay.sample.value_us + replay.update.value_us + insertion + at_replay,  # type: ignore[union-attr]
                )
            eps = BATCH / t_itr_us * 1e6
            watts = sum(platform.device(name).active_watts or 0 for name in {"cpu0", i.device, j.device})
            scores[i.device, j.device] = eps if metric == "throughput" else eps / watts
    return scores


latencies = st.floats(0.1, 1e4)
times = st.tuples(latencies, latencies, latencies, latencies)


@st.composite
def servers(draw: st.DrawFn) -> tuple[AssignmentMatrix, Platform]:
    count = draw(st.integers(1, 4))
    devices = [CPU] + [
        Device(f"gpu{n}", "gpu", "cuda", f"cuda:{n}", active_watts=draw(st.floats(1, 700))) for n in range(1, count)
    ]
    links = [Connection("cpu0", d.name, draw(st.floats(0, 100)), draw(st.floats(0.1, 100))) for d in devices[1:]]
    if count > 2 and draw(st.booleans()):
        links.append(Connection("gpu1", "gpu2", 1, 50))
    rows = tuple(modelled_row(device.name, draw(times), draw(times)) for device in devices)
    return AssignmentMatrix(rows), Platform(tuple(devices), tuple(links))


@settings(max_examples=150, deadline=None)
@given(servers(), st.sampled_from(["throughput", "power_efficiency"]), st.integers(0, 3))
def test_the_choice_is_the_brute_force_optimum(
    server: tuple[AssignmentMatrix, Platform], metric: str, delay: int
) -> None:
    matrix, platform = server
    placement = run(matrix, platform, metric, delay=delay)
    scores = brute_force(matrix, platform, metric, delay)
    assert placement.chosen.score(placement.metric) == pytest.approx(max(scores.values()))
    assert (placement.setting == 2) == (placement.replay_manager == placement.learner)
    assert len(placement.candidates) == len(matrix.rows) ** 2
    for candidate in placement.candidates:
        assert candidate.score(placement.metric) == pytest.approx(scores[candidate.pair])
        assert candidate.t_itr_us == candidate.terms.t_itr_us
    assert all(alternative.times_worse >= 1 - 1e-9 for alternative in placement.alternatives)
    assert Placement.from_json(placement.to_json()) == placement
    str(placement)


@settings(max_examples=100, deadline=None)
@given(servers())
def test_the_data_storage_has_the_least_traffic_of_the_three(server: tuple[AssignmentMatrix, Platform]) -> None:
    matrix, platform = server
    placement = run(matrix, platform)
    traffic = storage_traffic(platform, placement.replay_manager, placement.learner)
    assert placement.storage_option.traffic_us == pytest.approx(min(traffic.values()))
    assert {option.device for option in placement.chosen.storage} == set(traffic)


def test_traffic_counts_what_crosses_between_devices() -> None:
    messages, inserted = BATCH * 16, ACTORS * ENVS * 16
    collected, indices = ACTORS * ENVS * TRANSITION, BATCH * 8
    placement = run(MATRIX, SERVER)
    for pair, storage, expected in (
        (("cpu0", "cpu0"), "cpu0", 0),
        (("gpu0", "gpu0"), "gpu0", inserted + collected),
        (("cpu0", "gpu0"), "gpu0", 2 * messages + collected + indices),
        (("fpga0", "cpu0"), "cpu0", 2 * messages + inserted + indices),
        (("fpga0", "gpu0"), "gpu0", 2 * messages + inserted + collected + indices),
    ):
        (found,) = (candidate for candidate in placement.candidates if candidate.pair == pair)
        assert found.storage[0].device == storage
        assert found.traffic_bytes == expected


def test_terms_of_the_choice_and_the_prediction() -> None:
    placement = run(MATRIX, SERVER)
    assert (placement.replay_manager, placement.learner, placement.storage) == ("cpu0", "gpu0", "gpu0")
    assert placement.setting == 1
    message = 10 + BATCH * 16 / 12e3
    assert placement.t_itr_us == pytest.approx(5 + message + 200 + message + 4)
    assert placement.eps == pytest.approx(BATCH / placement.t_itr_us * 1e6)
    assert placement.gps == pytest.approx(1e6 / placement.t_itr_us)
    assert placement.watts == 400
    assert placement.data_transfer_us == 0, "the Data Storage is in the Learner's memory"
    assert (placement.replay_config.workers, placement.learner_config.threads) == (2, 3)


def test_every_alternative_says_why() -> None:
    placement = run(MATRIX, SERVER)
    reasons = {(a.replay_manager, a.learner): a.reason for a in placement.alternatives}
    assert reasons["fpga0", "gpu0"] == "1.02x slower: moving samples to the Learner through cpu0 costs 5.17 us more"
    assert reasons["gpu0", "gpu0"] == "1.21x slower: training costs 40.00 us more"
    assert {(i.replay_manager, i.learner, i.reason) for i in placement.impossible} == {
        (name, "fpga0", "SRAM too small") for name in ("cpu0", "gpu0", "fpga0")
    }
    text = str(placement)
    for expected in ("setting 1", "Data Storage", "1.21x slower", "not possible: SRAM too small", "gpu1 is left out"):
        assert expected in text
    assert all(len(line) <= 120 for line in text.splitlines())


def test_power_efficiency_may_choose_otherwise_and_compares_energy() -> None:
    rows = (modelled_row("cpu0", (5, 4, 4, 300)), modelled_row("gpu0", (20, 12, 12, 200)))
    matrix = AssignmentMatrix(rows)
    assert run(matrix, SERVER, "Throughput").learner == "gpu0"
    frugal = run(matrix, SERVER, "PowerEfficiency")
    assert (frugal.replay_manager, frugal.learner, frugal.metric) == ("cpu0", "cpu0", "power_efficiency")
    assert "experiences per joule" in frugal.alternatives[0].reason


def test_missing_watts_are_named_where_power_counts() -> None:
    platform = Platform((CPU, Device("gpu0", "gpu", "cuda")), (Connection("cpu0", "gpu0", 10, 12),))
    matrix = AssignmentMatrix(MATRIX.rows[:2])
    assert run(matrix, platform).watts is None
    with pytest.raises(ConfigurationError, match="device 'gpu0', column 'active_watts'"):
        run(matrix, platform, "power_efficiency")


SYCL_CPU = Device("sycl:cpu0", "cpu", "sycl", active_watts=90, shares_with="cpu0")
TWO_BACKENDS = AssignmentMatrix((modelled_row("cpu0", (5, 4, 4, 300)), modelled_row("sycl:cpu0", (5, 4, 4, 100))))
LINK = (Connection("cpu0", "sycl:cpu0", 3, 10),)


def test_one_piece_of_silicon_draws_its_power_once() -> None:
    shared = run(TWO_BACKENDS, Platform((CPU, SYCL_CPU), LINK))
    apart = run(TWO_BACKENDS, Platform((CPU, dataclasses.replace(SYCL_CPU, shares_with="")), LINK))
    assert {candidate.watts for candidate in shared.candidates} == {100}
    assert {candidate.pair: candidate.watts for candidate in apart.candidates} == {
        ("cpu0", "cpu0"): 100, ("cpu0", "sycl:cpu0"): 190, ("sycl:cpu0", "cpu0"): 190, ("sycl:cpu0", "sycl:cpu0"): 190,
    }  # fmt: skip


def test_a_learner_on_the_actors_silicon_is_slower_beside_them() -> None:
    sharing = CoreSharing(cores=2, actors=2, collect_us=80.0)
    shared, apart = (
        place(
            TWO_BACKENDS,
            Platform((CPU, dataclasses.replace(SYCL_CPU, shares_with=name)), LINK),
            batch_size=BATCH,
            transition_bytes=TRANSITION,
            actor_count=2,
            sharing=sharing,
        )
        for name in ("cpu0", "")
    )
    # Of three threads on two cores, one of which has to wait for an Actor of 80 us.
    assert shared.with_choice(learner="sycl:cpu0").terms.learner_us == 100 + 80
    assert apart.with_choice(learner="sycl:cpu0").terms.learner_us == 100
    for placement in (shared, apart):
        assert placement.with_choice(learner="cpu0").terms.learner_us == 300 + 80


@pytest.mark.parametrize(
    ("sharing", "step_us", "iteration_us"),
    [  # of a step of 100 us on 1, 2 and 4 threads
        (CoreSharing(4, 2, 30.0), (100, 100, 130), (100, 100, 130)),
        (CoreSharing(4, 2, 300.0), (100, 100, 200), (300, 300, 400)),
        (CoreSharing(4, 2, math.inf), (100, 100, 200), (100, 100, 100)),
        (CoreSharing(4, 3, 30.0), (100, 130, 130), (100, 130, 130)),
        (CoreSharing(4, 0, 30.0), (100, 100, 100), (100, 100, 100)),
        (CoreSharing(2, 3, 80.0), (130, 180, 180), (130, 180, 180)),
        (CoreSharing(1, 3, 30.0), (130, 130, 130), (130, 130, 130)),
        (CoreSharing(1, 3, math.inf), (400, 200, 200), (100, 100, 100)),
        (CoreSharing(4, 2, 30.0, learners=2), (100, 130, 130), (100, 130, 130)),
        (CoreSharing(2, 2, 30.0, learners=3), (180, 130, 130), (180, 130, 130)),
    ],
    ids=repr,
)
def test_actors_and_learners_share_cores(
    sharing: CoreSharing, step_us: tuple[int, ...], iteration_us: tuple[int, ...]
) -> None:
    assert tuple(sharing.step_us(100.0, threads) for threads in (1, 2, 4)) == step_us
    assert tuple(sharing.iteration_us(100.0, threads) for threads in (1, 2, 4)) == iteration_us
    for threads, paced in zip((1, 2, 4), iteration_us, strict=True):
        fits = threads * sharing.learners + min(sharing.actors, sharing.cores) <= sharing.cores
        assert sharing.rank(100.0, threads) == pytest.approx(paced * (1.0 if fits else 1.1))
        assert sharing.keeps_up(100.0, threads) == (paced == sharing.collect_us)
        assert sharing.has_idle_core(threads) == (threads * sharing.learners + sharing.actors < sharing.cores)


def test_the_most_threads_leave_cores_to_actors_that_never_wait() -> None:
    assert CoreSharing(8, 3, 30.0).most_threads == 8
    assert CoreSharing(8, 3, math.inf).most_threads == 5
    assert CoreSharing(8, 3, math.inf, learners=2).most_threads == 2
    assert CoreSharing(8, 3, 30.0, learners=2, limit=3).most_threads == 3
    assert CoreSharing(8, 3, 30.0, learners=4, limit=3).most_threads == 2
    assert CoreSharing(2, 3, math.inf, learners=4).most_threads == 1


def test_messages_through_the_host_are_part_of_setting_1_alone() -> None:
    inputs = {"batch_size": BATCH, "transition_bytes": TRANSITION, "actor_count": ACTORS, "priority_update_delay": 0}
    quiet, talking = (place(MATRIX, SERVER, **inputs, messages_us=messages_us) for messages_us in (0.0, 5000.0))
    assert (quiet.setting, talking.setting) == (1, 2)
    by_pair = {candidate.pair: candidate for candidate in quiet.candidates}
    for candidate in talking.candidates:
        more = candidate.t_itr_us - by_pair[candidate.pair].t_itr_us
        assert more == pytest.approx(0 if candidate.setting == 2 else 5000)
    assert any("talking through the host costs 5,000 us more" in a.reason for a in talking.alternatives)
    messages = [0.0 if c.setting == 2 else 5000.0 for c in talking.candidates]
    assert talking.to_pandas()["messages_us"].tolist() == messages
    assert Placement.from_json(talking.to_json()) == talking


def test_with_a_delay_the_slowest_stage_decides() -> None:
    inputs = {"batch_size": BATCH, "transition_bytes": TRANSITION, "actor_count": ACTORS, "messages_us": 30.0}
    terms = {
        delay: place(MATRIX, SERVER, **inputs, priority_update_delay=delay).with_choice(
            replay_manager="fpga0", learner="gpu0"
        )
        for delay in (0, 1, 2)
    }
    to_fpga, to_gpu = 5 + BATCH * 16 / 6e3, 10 + BATCH * 16 / 12e3
    eq7 = 2 + 200 + 1 + 2 * (to_fpga + to_gpu)
    assert terms[0].t_itr_us == pytest.approx(eq7 + 30)
    assert {placement.storage for placement in terms.values()} == {"gpu0"}
    assert terms[1].t_itr_us == pytest.approx(200 + 2 * to_gpu + 30 / 2)
    assert terms[2].t_itr_us == pytest.approx(200 + 2 * to_gpu + 30 / 3)
    assert [t.terms.eq7_us for t in terms.values()] == pytest.approx([eq7] * 3)
    assert "Eq. 7 us" in str(terms[1])
    busy = place(MATRIX, SERVER, **{**inputs, "messages_us": 300.0}).with_choice(replay_manager="cpu0", learner="gpu0")
    assert busy.t_itr_us == pytest.approx(300 + (5 + 200 + 4 + 2 * to_gpu) / 2), "messages wait for one another"
    slow = AssignmentMatrix((modelled_row("cpu0", (500, 40, 60, 9e9)), MATRIX.rows[1]))
    replay = place(slow, SERVER, **inputs).with_choice(replay_manager="cpu0", learner="gpu0")
    assert replay.t_itr_us == pytest.approx(500 + 40 + 60 + 0.1 + ACTORS * 16 / 20e3 + 30 / 2)
    assert "insertion" in replay.terms.critical()
    assert Placement.from_json(replay.to_json()) == replay


@pytest.mark.parametrize("delay", [0, 1])
def test_the_gather_is_counted_once_wherever_the_data_storage_is(delay: int) -> None:
    gather, store = {"cpu0": 70.0, "gpu0": 30.0}, {"cpu0": 7.0, "gpu0": 3.0}
    rows = [
        modelled_row(
            name,
            (5, 4, 4, 100),
            storage=StorageCell(Measurement.modelled(gather[name]), Measurement.modelled(store[name])),
        )
        for name in gather
    ]
    warm = dataclasses.replace(rows[1].pair, gather=Measurement.modelled(11.0))
    matrix = AssignmentMatrix((rows[0], dataclasses.replace(rows[1], pair=warm)))
    moving = 10 + BATCH * TRANSITION / 12e3
    for pair in (("cpu0", "cpu0"), ("cpu0", "gpu0"), ("gpu0", "gpu0")):
        for storage in {"cpu0", pair[1]}:
            placement = run(matrix, SERVER, storage=storage, delay=delay)
            placement = placement.with_choice(replay_manager=pair[0], learner=pair[1], storage=storage)
            terms = placement.terms
            assert terms.gather_us == (11.0 if pair == ("gpu0", "gpu0") and storage == "gpu0" else gather[storage])
            assert terms.store_us == store[storage]
            assert terms.batch_transfer_us == pytest.approx(moving if storage != pair[1] else 0.0)
            assert terms.learner_gathers == (storage == pair[1])
            stages = terms.stages()
            assert sum("gathering the batch" in stage for stage in stages) == 2
            assert placement.t_itr_us == pytest.approx(max(sum(stage.values()) for stage in stages))
            assert Placement.from_json(placement.to_json()).t_itr_us == placement.t_itr_us


def test_the_data_storage_can_be_where_it_was_not_measured_but_not_where_it_failed() -> None:
    unmeasured, failed = (
        dataclasses.replace(MATRIX.rows[1], storage=cell) for cell in (NOT_MEASURED, MissingCell("no room"))
    )
    for row, expected in ((unmeasured, {"gpu0", "cpu0"}), (failed, {"cpu0"})):
        placement = run(AssignmentMatrix((MATRIX.rows[0], row)), SERVER)
        chosen = placement.with_choice(replay_manager="cpu0", learner="gpu0").chosen
        assert {option.device for option in chosen.storage} == expected


def test_a_step_of_several_learners_is_stretched_as_a_whole_and_has_its_share_of_an_average() -> None:
    storage = StorageCell(Measurement.modelled(8.0), Measurement.modelled(2.0))
    placement = place(
        AssignmentMatrix((modelled_row("cpu0", (6, 4, 10, 100), storage=storage),)),
        Platform((CPU,), ()),
        batch_size=BATCH,
        transition_bytes=TRANSITION,
        actor_count=ACTORS,
        learners=LearnersSpec(2, average_every=4),
        average_us=60.0,
        stretch=1.25,
        core_speed=0.5,
    )
    terms = placement.terms
    found = (terms.sample_us, terms.insert_us, terms.update_us, terms.learner_us, terms.gather_us, terms.store_us)
    assert found == (12.0, 8.0, 20.0, 200.0, 16.0, 4.0)
    assert terms.average_us == 60.0 / 4
    assert terms.waiting_us == 0.25 * (12 + 16 + 200 + 20)
    assert (placement.learner_count, placement.average_every) == (2, 4)


def test_a_joined_pair_has_no_messages_and_pays_insertion_in_full() -> None:
    row = modelled_row("gpu0", (5, 4, 3, 100))
    assert isinstance(row.pair, PairCell)
    between = dataclasses.replace(row, pair=dataclasses.replace(row.pair, joined=True))
    beside, after = (
        run(AssignmentMatrix((MATRIX.rows[0], found)), SERVER).with_choice(replay_manager="gpu0", learner="gpu0")
        for found in (row, between)
    )
    pipes = dataclasses.replace(beside.terms, sample_transfer_us=0.0, priority_transfer_us=0.0)
    assert after.terms == dataclasses.replace(pipes, inserts_between=True), "messages stay in pipes"
    (only,) = after.terms.stages()
    assert after.t_itr_us == pytest.approx(sum(only.values()))
    assert after.t_itr_us == pytest.approx(pipes.t_itr_us + after.terms.insertion_us + after.terms.store_us)
    assert after.terms.eq7_us == pipes.eq7_us, "Eq. 7 as printed hides insertion"
    assert Placement.from_json(after.to_json()) == after


def whole(paced_us: float, free_us: float) -> WholeIteration:
    return WholeIteration(*(Measurement.from_samples([us]) for us in (paced_us, free_us, 2 * paced_us)))


def test_a_program_that_was_tried_takes_the_time_that_it_took() -> None:
    wholes = {("cpu0", "gpu0", "torch"): whole(5000.0, 6000.0), ("cpu0", "cpu0", "torch"): whole(1.0, 2.0)}
    placement = place(
        MATRIX,
        SERVER,
        batch_size=BATCH,
        transition_bytes=TRANSITION,
        actor_count=ACTORS,
        envs_per_actor=ENVS,
        wholes=wholes,
    )
    by_pair = {candidate.pair: candidate for candidate in placement.candidates}
    slower, faster = by_pair["cpu0", "gpu0"], by_pair["cpu0", "cpu0"]
    assert slower.t_itr_us == pytest.approx(5000)
    assert slower.terms.beyond_parts_us == pytest.approx(5000 - run(MATRIX, SERVER, delay=1).t_itr_us)
    assert placement.chosen is faster
    assert faster.t_itr_us == pytest.approx(1.0)
    assert faster.terms.beyond_parts_us < 0
    assert (placement.eps, placement.free_eps) == (pytest.approx(BATCH * 1e6), pytest.approx(BATCH * 0.5e6))
    assert "as its program did when it was tried with free Actors" in placement.assumption
    assert placement.why_not(slower).startswith("tried: 5000.00x slower: ")
    assert placement.to_pandas()["tried"].sum() == 2
    assert Placement.from_json(placement.to_json()) == placement


def test_a_prediction_carries_the_spread_of_its_trial() -> None:
    inputs: dict[str, Any] = {"batch_size": BATCH, "transition_bytes": TRANSITION, "actor_count": ACTORS}
    spread = dataclasses.replace(whole(100.0, 100.0), paced=Measurement.from_samples([90.0, 100.0, 110.0]))
    placement = place(MATRIX, SERVER, **inputs, wholes={("cpu0", "gpu0", "torch"): spread})
    tried = placement.with_choice(replay_manager="cpu0", learner="gpu0")
    assert tried.eps_spread == pytest.approx(0.06)
    assert "+-6% EPS" in str(tried)
    assert f"with all waiting for data included: {tried.eps / 2:,.0f} EPS" in str(tried)
    assert place(MATRIX, SERVER, **inputs).eps_spread is None


def test_a_placement_predicts_a_run_at_its_ratio_and_one_without() -> None:
    platform = Platform((CPU, dataclasses.replace(SYCL_CPU, shares_with="cpu0")), LINK)
    inputs = {"batch_size": BATCH, "transition_bytes": TRANSITION, "actor_count": 2, "replay_ratio": 8.0}
    sharing = CoreSharing(cores=2, actors=2, collect_us=80.0)
    wholes = {("sycl:cpu0", "sycl:cpu0", "torch"): whole(110.0, 300.0)}
    placement = place(TWO_BACKENDS, platform, **inputs, sharing=sharing, wholes=wholes)
    paced = placement.with_choice(replay_manager="sycl:cpu0", learner="sycl:cpu0")
    assert paced.t_itr_us == pytest.approx(110.0)
    assert paced.free_eps == pytest.approx(BATCH / 300e-6)
    cpu = placement.with_choice(replay_manager="cpu0", learner="cpu0")
    assert cpu.terms.learner_us == 300 + 80
    assert cpu.free_eps == pytest.approx(BATCH / (cpu.t_itr_us - 80 + 300) * 1e6), "an Actor on a core of the Learner"
    assert Placement.from_json(paced.to_json()).free_eps == paced.free_eps


@pytest.mark.parametrize("metric", ["throughput", "Throughput", "THROUGHPUT"])
def test_spellings_of_throughput(metric: str) -> None:
    assert parse_metric(metric) == "throughput"


@pytest.mark.parametrize("metric", ["power_efficiency", "PowerEfficiency", "powerefficiency"])
def test_spellings_of_power_efficiency(metric: str) -> None:
    assert parse_metric(metric) == "power_efficiency"


def test_unknown_metric_names_the_known_ones() -> None:
    with pytest.raises(ConfigurationError, match=r"'throughput' or 'power_efficiency'.*found 'latency'"):
        run(MATRIX, SERVER, "latency")


def test_ties_go_to_the_least_traffic_then_to_fewer_devices() -> None:
    # A link as good as the CPU's own memory makes every pair cost the same.
    same = (5.0, 4.0, 4.0, 100.0)
    devices = tuple(
        Device(name, kind, "null", "sample_us=5;insert_us=4;update_us=4;learner_us=9", memory_bandwidth_gbps=20)
        for name, kind in (("gpu0", "gpu"), ("cpu0", "cpu"))
    )  # type: ignore[arg-type]
    platform = Platform(devices, (Connection("cpu0", "gpu0", 0.1, 20),))
    placement = run(AssignmentMatrix((modelled_row("gpu0", same), modelled_row("cpu0", same))), platform)
    assert {candidate.t_itr_us for candidate in placement.candidates} == {placement.t_itr_us}
    assert (placement.replay_manager, placement.learner, placement.storage) == ("cpu0", "cpu0", "cpu0")
    assert placement.alternatives[0].reason.startswith("equal: ")


def test_what_ties_in_all_keeps_the_order_of_the_matrix_however_small_the_difference() -> None:
    almost = 1 + 1e-12  # the later device is the better one, by less than what counts
    gpus = [Device(name, "gpu", "cuda", active_watts=300) for name in ("gpu0", "gpu1")]
    links = tuple(Connection("cpu0", gpu.name, 10, 12) for gpu in gpus)
    rows = (
        modelled_row("cpu0", (5, 4, 4, 900)),
        modelled_row("gpu0", (20, 12, 12, 200 * almost)),
        modelled_row("gpu1", (20, 12, 12, 200)),
    )
    for order in (rows, (rows[2], rows[0], rows[1])):
        placement = run(AssignmentMatrix(order), Platform((CPU, *gpus), links))
        first = next(row.device for row in order if row.device != "cpu0")
        assert (placement.replay_manager, placement.learner) == ("cpu0", first)
        assert placement.alternatives[0].reason == "equal"


def test_data_storage_of_equal_traffic_goes_to_the_learner_then_to_the_actors() -> None:
    almost = 20 * (1 + 1e-12)  # less traffic in the last of the three by less than what counts
    cpu, gpu = (
        dataclasses.replace(device, memory_bandwidth_gbps=gbps) for device, gbps in ((CPU, almost), (GPU, 20.0))
    )
    placement = run(AssignmentMatrix(MATRIX.rows[:2]), Platform((cpu, gpu), (Connection("cpu0", "gpu0", 0, 20.0),)))
    assert [o.device for o in placement.with_choice(replay_manager="cpu0", learner="gpu0").chosen.storage] == [
        "gpu0",
        "cpu0",
    ]


def test_a_learner_that_no_weights_could_leave_is_impossible() -> None:
    # RM and Learner have a route to each other; the Learner has none to the Actors' host.
    platform = Platform((CPU, GPU, FPGA), (Connection("gpu0", "fpga0", 1, 10),))
    placement = run(MATRIX, platform)
    assert placement.chosen.pair == ("cpu0", "cpu0")
    (reason,) = (i.reason for i in placement.impossible if (i.replay_manager, i.learner) == ("fpga0", "gpu0"))
    assert "No route" in reason


@pytest.mark.parametrize(("ratio", "said"), [(8.0, "at a replay ratio of 8"), (math.inf, "Actors that run free")])
def test_a_placement_says_what_its_prediction_assumes(ratio: float, said: str) -> None:
    placement = place(
        MATRIX, SERVER, batch_size=BATCH, transition_bytes=TRANSITION, actor_count=ACTORS, replay_ratio=ratio
    )
    assert said in placement.assumption
    assert said in " ".join(str(placement).split())
    assert Placement.from_json(placement.to_json()) == placement


def test_insertion_can_be_the_critical_branch() -> None:
    slow_insert = AssignmentMatrix((modelled_row("cpu0", (5, 500, 4, 100)),))
    placement = run(slow_insert, SERVER)
    assert placement.t_itr_us == pytest.approx(
        placement.terms.sample_us + placement.terms.sample_transfer_us + placement.terms.insertion_us
    )
    assert "insertion" in placement.terms.critical()


def test_a_device_without_a_route_is_impossible_not_fatal() -> None:
    platform = Platform((CPU, GPU), ())
    placement = run(AssignmentMatrix(MATRIX.rows[:2]), platform)
    assert (placement.replay_manager, placement.learner) == ("cpu0", "cpu0")
    assert all("No route" in pair.reason for pair in placement.impossible)
    assert len(placement.impossible) == 3


def test_no_pair_at_all_is_an_error_with_every_reason() -> None:
    none = MissingCell("too small")
    with pytest.raises(PlacementError, match=r"too small.*gpu1 is left out: no driver"):
        run(AssignmentMatrix((MatrixRow("cpu0", none, none, none),), (UnavailableDevice("gpu1", "no driver"),)), SERVER)
    with pytest.raises(PlacementError, match="no device 'tpu'"):
        run(AssignmentMatrix((modelled_row("tpu", (1, 1, 1, 1)),)), SERVER)
    with pytest.raises(ConfigurationError, match="batch_size must be at least 1; found 0"):
        place(MATRIX, SERVER, batch_size=0, transition_bytes=1, actor_count=1)


def test_storage_can_be_forced() -> None:
    placement = run(MATRIX, SERVER, storage="fpga0")
    assert (placement.storage, placement.replay_manager, placement.learner) == ("fpga0", "cpu0", "gpu0")
    assert placement.with_choice(storage="cpu0").storage == "cpu0"
    with pytest.raises(PlacementError, match="no device 'tpu'"):
        run(MATRIX, SERVER, storage="tpu")


def test_another_pair_can_be_chosen_from_the_alternatives() -> None:
    placement = run(MATRIX, SERVER)
    forced = placement.with_choice(replay_manager="gpu0")
    assert (forced.setting, forced.storage, forced.replay_config.device) == (2, "gpu0", "gpu0")
    assert forced.t_itr_us > placement.t_itr_us
    assert "faster" in forced.alternatives[0].reason
    assert forced.with_choice(replay_manager="cpu0") == placement
    assert placement.with_choice(learner="cpu0").storage == "cpu0"
    with pytest.raises(PlacementError, match=r"SRAM too small.*cpu0 \+ gpu0 \(torch\), fpga0 \+ gpu0 \(torch\)"):
        placement.with_choice(learner="fpga0")
    with pytest.raises(PlacementError, match="gpu0, cpu0; found 'fpga0'"):
        placement.with_choice(storage="fpga0")


def test_a_placement_edited_as_json_is_accepted_back_or_refused_with_the_choices() -> None:
    placement = run(MATRIX, SERVER)
    document = json.loads(placement.to_json())
    document["replay_manager"] = "gpu0"
    assert Placement.from_json(json.dumps(document)) == placement.with_choice(replay_manager="gpu0", storage="gpu0")
    document["replay_manager"] = "gpu7"
    with pytest.raises(PlacementError, match=r"'gpu7'.*The pairs are"):
        Placement.from_json(json.dumps(document))
    document["replay_manager"] = "cpu0"
    document["candidates"][0]["eps"] = 0
    with pytest.raises(ConfigurationError, match=r"candidates\[0\]"):
        Placement.from_json(json.dumps(document))


def test_a_placement_says_the_priority_update_delay_that_is_in_effect() -> None:
    asked = dataclasses.replace(run(MATRIX, SERVER), priority_update_delay=3)
    apart = asked.with_choice(replay_manager="fpga0", learner="gpu0")
    together = asked.with_choice(replay_manager="gpu0", learner="gpu0")
    assert (apart.delay_in_effect, together.delay_in_effect) == (3, 0)
    assert "setting 1, priority update delay 3" in str(apart)
    assert "setting 2, priority update delay 0" in str(together)
    assert Placement.from_json(together.to_json()) == together


def test_table_lists_every_pair_best_first() -> None:
    table = run(MATRIX, SERVER).to_pandas()
    assert list(table["t_itr_us"]) == sorted(table["t_itr_us"])
    assert list(table["chosen"]) == [True] + [False] * (len(table) - 1)
    assert not any(math.isnan(value) for value in table["watts"])
