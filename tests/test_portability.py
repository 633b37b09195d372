"""Portability (PEARL Eq. 8), code divergence, and the command."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_cli import invoke
from test_placement import BATCH, CPU, FPGA, GPU, MATRIX, SERVER, modelled_row, run

from composer.evidence import Evidence
from composer.matrix import AssignmentMatrix, MatrixRow, MissingCell, PairCell, StorageCell
from composer.measurement import Measurement
from composer.placement import Placement
from composer.platform import Platform
from composer.portability import (
    Portability,
    code_divergence,
    of_matrix,
    of_placement,
    peers_run,
    phi,
    user_lines,
)
from pearl.devices import Connection, Device
from pearl.errors import ConfigurationError

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # benchmarks are not installed

from benchmarks import paper  # noqa: E402


def known(placement: Placement, platform: Platform = SERVER) -> Placement:
    """The placement with its devices."""
    return dataclasses.replace(placement, evidence=Evidence(platform.devices, platform.connections, 1000, (), ()))


# --- Eq. 8 -----------------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(1e-3, 1e9), min_size=1, max_size=20))
def test_phi_is_the_harmonic_mean(eps: list[float]) -> None:
    assert phi(eps) == pytest.approx(statistics.harmonic_mean(eps))


def test_phi_is_zero_if_one_cannot_run() -> None:
    assert phi([100.0, 0.0, 50.0]) == 0.0


@pytest.mark.parametrize("eps", [[], [-1.0], [math.nan], [math.inf]])
def test_phi_of_nothing_or_of_no_rate_is_refused(eps: list[float]) -> None:
    with pytest.raises(ConfigurationError, match="Portability needs EPS"):
        phi(eps)


def test_phi_over_devices_takes_the_best_implementation_of_each_pair_and_counts_impossible_pairs_as_zero() -> None:
    found = of_placement("server", run(MATRIX, SERVER))
    assert len(found.choices) == 9
    assert found.phi_devices == 0.0
    assert found.phi_running == pytest.approx(
        statistics.harmonic_mean([choice.eps for choice in found.choices if choice.eps])
    )
    both = of_placement("both", run(AssignmentMatrix(MATRIX.rows[:2]), SERVER))
    assert both.phi_devices == pytest.approx(statistics.harmonic_mean([choice.eps for choice in both.choices]))
    assert both.best_eps == max(choice.eps for choice in both.choices)


def test_phi_over_machines_is_of_the_best_choice_of_each() -> None:
    slow = AssignmentMatrix((modelled_row("cpu0", (5, 4, 4, 9000)),))
    placements = run(MATRIX, SERVER), run(slow, Platform((CPU,)))
    found = Portability(tuple(of_placement(str(n), placement) for n, placement in enumerate(placements)))
    assert found.phi_platforms == pytest.approx(statistics.harmonic_mean([p.eps for p in placements]))
    assert "over 2 machines" in str(found)


def test_machines_with_other_problems_are_not_compared() -> None:
    placement = run(MATRIX, SERVER)
    document = json.loads(placement.to_json())
    document["transition_bytes"] += 1
    with pytest.raises(ConfigurationError, match=r"compares one problem.*bytes of a transition 53"):
        Portability((of_placement("a", placement), of_placement("b", Placement.from_json(json.dumps(document)))))


def test_a_matrix_counts_its_devices_with_both_primitives() -> None:
    found = of_matrix("m", MATRIX, BATCH)
    assert [(choice.learner, choice.eps) for choice in found.choices] == [
        ("cpu0", pytest.approx(BATCH / (6 + 1080 + 4) * 1e6)),
        ("gpu0", pytest.approx(BATCH / (24 + 240 + 12) * 1e6)),
        ("fpga0", 0.0),
    ]
    assert "SRAM too small" in found.choices[2].reason
    assert found.phi_devices == 0.0
    with pytest.raises(ConfigurationError, match="at least 1"):
        of_matrix("m", MATRIX, 0)
    with pytest.raises(ConfigurationError, match="no rows"):
        of_matrix("m", AssignmentMatrix(()), 1)


@pytest.mark.parametrize("gather", [None, 70.0])
@pytest.mark.parametrize("joined", [False, True])
def test_a_matrix_prices_a_device_as_the_composer_does_where_transfers_are_free(
    gather: float | None, joined: bool
) -> None:
    storage = StorageCell(Measurement.modelled(50.0), Measurement.modelled(2000.0))
    row = modelled_row("cpu0", (6, 4, 4, 1080), storage=storage)
    assert isinstance(row.pair, PairCell)
    pair = dataclasses.replace(row.pair, gather=gather and Measurement.modelled(gather), joined=joined)
    matrix = AssignmentMatrix((dataclasses.replace(row, pair=pair),), batch_size=BATCH)
    placed = run(matrix, Platform((CPU,), (Connection("cpu0", "cpu0", 0.0, 1e12),)))
    t_itr_us = 6 + (gather or 50) + (2000 + 4 + 1080 + 4 if joined else 2000 + 4)
    assert placed.t_itr_us == pytest.approx(t_itr_us)
    (choice,) = of_matrix("m", matrix).choices
    assert choice.eps == pytest.approx(placed.eps)


def test_a_matrix_and_the_given_batch_size_must_agree() -> None:
    stated = dataclasses.replace(MATRIX, batch_size=BATCH)
    assert of_matrix("m", stated) == of_matrix("m", stated, BATCH) == of_matrix("m", MATRIX, BATCH)
    with pytest.raises(ConfigurationError, match=f"batch size {BATCH}; found a batch size of {BATCH + 1}"):
        of_matrix("m", stated, BATCH + 1)
    with pytest.raises(ConfigurationError, match="states no batch size"):
        of_matrix("m", MATRIX)


def test_a_machine_on_which_nothing_runs_has_no_portability() -> None:
    none = MissingCell("too small")
    found = of_matrix("m", AssignmentMatrix((MatrixRow("a", none, none, none),)), 32)
    assert (found.best_eps, found.phi_devices, found.phi_running) == (0.0, 0.0, 0.0)
    assert Portability((found,)).phi_platforms == 0.0


# --- other frameworks ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "said"),
    [
        (CPU, "replay and Learner"),
        (GPU, "Learner"),
        (FPGA, "nothing"),
        (Device("s", "cpu", "sycl"), "nothing"),
        (Device("s", "gpu", "sycl"), "nothing"),
        (Device("m", "gpu", "model"), "Learner, if it is a CUDA GPU"),
        (Device("m", "fpga", "model"), "nothing"),
    ],
)
def test_what_other_frameworks_run_on_a_device(device: Device, said: str) -> None:
    assert peers_run(device) == said


def test_other_frameworks_have_a_phi_over_devices_of_zero_where_a_choice_is_beyond_them() -> None:
    both = AssignmentMatrix(MATRIX.rows[:2])
    text = str(Portability((of_placement("server", known(run(both, SERVER))),)))
    assert "no: no replay on gpu0" in text
    assert "Phi(D) of Stable-Baselines3 and RLlib: 0, as they run 2 of the 4 choices at most" in text
    alone = AssignmentMatrix(MATRIX.rows[:1])
    assert "RLlib: 0" not in str(Portability((of_placement("cpu", known(run(alone, SERVER))),)))
    assert "not known" in str(Portability((of_placement("old", run(alone, SERVER)),)))


# --- code divergence -------------------------------------------------------------------------------------------------


def test_code_divergence_is_one_minus_common_lines_over_all_lines() -> None:
    first = "a = 1\nb = 2\n\n# a comment\nread('x.csv')\n"
    second = "# another\na = 1\n  b = 2\nread('y.csv')\n"
    assert code_divergence(first, second) == pytest.approx(1 - 2 / 4)
    assert code_divergence(first, first) == 0.0
    assert code_divergence("a", "b") == 1.0
    assert user_lines("a\na\n") == {"a": 2}
    assert code_divergence("a\na\n", "a\n") == pytest.approx(0.5)
    with pytest.raises(ConfigurationError, match="needs lines"):
        code_divergence("# nothing\n", "\n")


@given(st.lists(st.sampled_from("abcd")), st.lists(st.sampled_from("abcd"), min_size=1))
def test_code_divergence_is_symmetric_and_between_0_and_1(first: list[str], second: list[str]) -> None:
    a, b = "\n".join(first), "\n".join(second)
    assert 0 <= code_divergence(a, b) == code_divergence(b, a) <= 1


def test_an_example_for_two_machines_differs_in_the_names_of_the_csv_files_only() -> None:
    for file, *_ in paper.TABLE_V.values():
        source = (ROOT / "examples" / file).read_text()
        first, second = (paper.with_files(source, platform) for platform in paper.PLATFORMS)
        changed = (user_lines(first) - user_lines(second)) + (user_lines(second) - user_lines(first))
        assert len(changed) == 4
        assert all(".csv" in line for line in changed)
        compile(first, file, "exec")
        lines = user_lines(source).total()
        assert code_divergence(first, second) == pytest.approx(4 / (lines + 4))


# --- command ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    placement, matrix = tmp_path / "a.placement.json", tmp_path / "a.matrix.json"
    placement.write_text(known(run(AssignmentMatrix(MATRIX.rows[:2]), SERVER)).to_json())
    matrix.write_text(MATRIX.to_json())
    return placement, matrix


def test_the_command_reads_placements_and_matrices(files: tuple[Path, Path]) -> None:
    placement, matrix = files
    shown = invoke("portability", placement, placement.parent)
    assert shown.exit_code == 0, shown.output
    assert "Phi(P), harmonic mean of the best EPS over 2 machines" in shown.output
    shown = invoke("portability", matrix)
    assert (shown.exit_code, "Give --batch-size" in shown.output) == (1, True)
    shown = invoke("portability", matrix, "--batch-size", BATCH)
    assert shown.exit_code == 0, shown.output
    assert "cannot run" in shown.output


def test_the_command_computes_code_divergence(tmp_path: Path) -> None:
    first, second = tmp_path / "a.py", tmp_path / "b.py"
    first.write_text("a\nb\n")
    second.write_text("a\nc\n")
    assert "0.667 (2 and 2 lines" in invoke("portability", "--code", first, "--code", second).output


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read"),
        ("", "not JSON"),
        ("[]", "found 'list'"),
        ('{"format": "pearl-calibration", "version": 1}', "is a calibration file"),
        ('{"format": "pearl-assignment-matrix", "version": 1}', "found 1"),
        ('{"format": "pearl-placement", "version": 99}', f"version {Placement.VERSION}; found 99"),
        ('{"format": "something"}', "found 'something'"),
    ],
)
def test_the_command_refuses_other_files_by_name(tmp_path: Path, content: str | None, said: str) -> None:
    file = tmp_path / "x.json"
    if content is not None:
        file.write_text(content)
    shown = invoke("portability", file)
    assert shown.exit_code == 1
    assert said in shown.output
    assert "x.json" in shown.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [([], "needs files"), (["--code", "a.py"], "found 1"), (["--code", "no.py", "--code", "no.py"], "cannot be read")],
)
def test_the_command_says_what_it_needs(arguments: list[str], said: str) -> None:
    shown = invoke("portability", *arguments)
    assert shown.exit_code == 1
    assert said in shown.output
