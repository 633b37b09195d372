"""The assignment matrix: its measurements, its cells, how it prints, and its JSON document."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer.matrix import (
    COLUMNS,
    AssignmentMatrix,
    LearnerCell,
    LearnerOption,
    MatrixRow,
    MissingCell,
    PairCell,
    ReplayCell,
    StorageCell,
    UnavailableDevice,
    UnsupportedLearner,
)
from composer.measurement import Measurement
from pearl.errors import ConfigurationError

latencies = st.floats(0, 1e9)


@st.composite
def measurements(draw: st.DrawFn) -> Measurement:
    if draw(st.booleans()):
        return Measurement.modelled(draw(latencies))
    samples = draw(st.lists(latencies, min_size=1, max_size=5))
    measurement = Measurement.from_samples(samples, draw(st.sampled_from(["measured", "imported"])))
    if draw(st.booleans()):
        return measurement
    spread = (measurement.p20_us, measurement.p80_us)
    return Measurement(measurement.value_us, *spread, measurement.n, measurement.source)


counts = st.integers(1, 256)
missing = st.builds(MissingCell, st.text(min_size=1, max_size=30))
replay_cells = st.builds(ReplayCell, measurements(), measurements(), measurements(), counts, counts)
learner_cells = st.builds(LearnerCell, measurements(), counts, counts, st.sampled_from(["torch", "native", "null"]))
pair_cells = st.builds(PairCell, replay_cells, learner_cells, st.none() | measurements())
storage_cells = st.builds(StorageCell, measurements(), measurements())
options = st.builds(LearnerOption, learner_cells | missing, pair_cells | missing)
names = st.text("abcdefghij0123456789_.:-", min_size=1, max_size=12)


@st.composite
def matrices(draw: st.DrawFn) -> AssignmentMatrix:
    rows = [
        MatrixRow(
            name,
            draw(replay_cells | missing),
            draw(learner_cells | missing),
            draw(pair_cells | missing),
            tuple(draw(st.lists(options, max_size=2))),
            draw(storage_cells | missing),
        )
        for name in draw(st.lists(names, unique=True, max_size=3))
    ]
    unavailable = draw(st.lists(st.builds(UnavailableDevice, names, st.text(max_size=20)), max_size=2))
    unsupported = draw(st.lists(st.builds(UnsupportedLearner, names, st.text(max_size=20)), max_size=2))
    return AssignmentMatrix(tuple(rows), tuple(unavailable), tuple(unsupported))


def example() -> AssignmentMatrix:
    measured = Measurement.from_samples([2.0, 1.0, 3.0, 4.0, 5.0])
    replay = ReplayCell(measured, measured, Measurement.modelled(1234.5), fanout=16, workers=2)
    learner = LearnerCell(measured, threads=4)
    rows = (
        MatrixRow(
            "cpu0", replay, learner, PairCell(replay, learner, measured), storage=StorageCell(measured, measured)
        ),
        MatrixRow("fpga0", replay, MissingCell("its SRAM is too small"), MissingCell("its SRAM is too small")),
    )
    return AssignmentMatrix(rows, (UnavailableDevice("gpu0", "torch finds no CUDA device"),))


def test_a_measurement_keeps_its_samples_and_their_percentiles() -> None:
    measurement = Measurement.from_samples([2.0, 1.0, 3.0, 4.0, 5.0])
    assert (measurement.p20_us, measurement.value_us, measurement.p80_us) == pytest.approx((1.8, 3.0, 4.2))
    assert (measurement.n, measurement.samples) == (5, (2.0, 1.0, 3.0, 4.0, 5.0))
    assert measurement.spread == pytest.approx(0.8)


@pytest.mark.parametrize(
    "values",
    [(1, 2, 3, 0, "modelled"), (-1, -1, -1, 0, "modelled"), (1, 1, 1, 0, "guessed"), (1, 1, 1, -1, "measured")],
)
def test_a_measurement_checks_its_values(values: tuple[float, float, float, int, str]) -> None:
    with pytest.raises(ConfigurationError):
        Measurement(*values)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="at least one sample"):
        Measurement.from_samples([])
    with pytest.raises(ConfigurationError, match="finite"):
        Measurement.from_samples([float("nan")])


def test_an_iteration_of_a_pair_leaves_the_insertion_out() -> None:
    sample, insert, update, step, gather = map(Measurement.modelled, (1.0, 20.0, 300.0, 4000.0, 50000.0))
    replay, learner = ReplayCell(sample, insert, update, fanout=16), LearnerCell(step)
    assert PairCell(replay, learner).iteration_us == 4301.0
    assert PairCell(replay, learner, gather).iteration_us == 54301.0


def test_cells_are_found_by_device_and_column() -> None:
    matrix = example()
    assert [matrix.cell("cpu0", column) for column in COLUMNS] == [
        matrix["cpu0"].replay,
        matrix["cpu0"].learner,
        matrix["cpu0"].pair,
        matrix["cpu0"].storage,
    ]
    with pytest.raises(ConfigurationError, match="no row 'gpu0'; it has cpu0, fpga0"):
        matrix["gpu0"]
    with pytest.raises(ConfigurationError, match="one row per device"):
        AssignmentMatrix((matrix.rows[0], matrix.rows[0]))


def test_printed_matrix_shows_sources_reasons_and_what_is_left_out() -> None:
    text = str(example())
    for expected in ("RM & Learner", "3.00", "n=5 +-40%", "1,234", "modelled", "not possible: its SRAM", "fanout 16"):
        assert expected in text
    assert "gpu0 is left out: torch finds no CUDA device" in text
    assert all(len(line) <= 120 for line in text.splitlines())
    assert "\x1b" not in text


def test_table_has_a_line_per_latency_and_per_missing_cell() -> None:
    table = example().to_pandas()
    assert len(table) == (3 + 1 + 5 + 2) + (3 + 1 + 1 + 1)
    assert set(table["source"].dropna()) == {"measured", "modelled"}
    replay = table[(table["device"] == "cpu0") & (table["column"] == "RM only")].set_index("latency")
    measured = Measurement.from_samples([1.0, 2.0, 3.0, 4.0, 5.0])
    assert list(replay.index) == ["sample", "insert", "update"]
    assert replay.loc["sample", ["p50_us", "p20_us", "p80_us", "n"]].tolist() == [
        *(3.0, measured.p20_us, measured.p80_us, 5),
    ]
    assert replay.loc["update", "p50_us"] == 1234.5


def test_eps_of_a_cell_overlap_collecting_and_training_where_the_batch_size_is_known() -> None:
    sample, insert, update, step, gather, store = map(Measurement.modelled, (1.0, 20.0, 30.0, 400.0, 2.0, 500.0))
    replay, learner = ReplayCell(sample, insert, update, fanout=16), LearnerCell(step)
    pair, storage = PairCell(replay, learner, gather), StorageCell(gather, store)
    matrix = AssignmentMatrix((MatrixRow("cpu0", replay, learner, pair, storage=storage),), batch_size=64)
    for cell, t_itr_us in ((replay, 1 + 30), (learner, 400), (pair, 1 + 2 + 400 + 30), (storage, 2 + 500)):
        assert matrix.eps(cell) == 64 / t_itr_us * 1e6
        assert dataclasses.replace(matrix, batch_size=0).eps(cell) is AssignmentMatrix(matrix.rows).eps(cell) is None
    assert matrix.eps(MissingCell("too small")) is None


@given(matrices())
def test_json_round_trip_is_exact(matrix: AssignmentMatrix) -> None:
    assert AssignmentMatrix.from_json(matrix.to_json()) == matrix
    str(matrix)


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (lambda text: text[:-5], "not JSON"),
        (lambda _: "[]", "found 'list'"),
        (lambda _: "[" * 100_000, "not JSON"),
        (lambda text: text.replace("1234.5", "9" * 5000), "not JSON"),
        (lambda text: text.replace("pearl-assignment-matrix", "other"), "found 'other'"),
        (lambda text: text.replace('"version": 2', '"version": 3'), "version 2; found 3"),
        (lambda text: text.replace('"version": 2', '"version": true'), "version 2; found True"),
        (lambda text: text.replace("1234.5", "NaN"), "finite numbers only; found NaN"),
        (lambda text: text.replace("1234.5", "1e999"), "value_us: expected a finite number"),
        (lambda text: text.replace("1234.5", '"fast"', 1), r"rows\[0\]\.replay\.update\.value_us: expected float"),
        (lambda text: text.replace("1234.5", "9.5", 1), r"rows\[0\]\.replay\.update: A latency must be finite"),
        (lambda text: text.replace('"modelled"', '"dreamt"', 1), "expected one of 'measured', 'modelled', 'imported'"),
        (lambda text: text.replace('"fanout": 16', '"fanout": 16.5', 1), "fanout: expected int; found 16.5"),
        (lambda text: text.replace('"fanout"', '"fan_out"', 1), "found 'fan_out'. Did you mean 'fanout'"),
        (lambda text: text.replace('"device": "fpga0",', "", 1), r"rows\[1\]: .* device missing"),
    ],
)
def test_a_document_that_departs_from_the_format_is_refused_with_its_place(edit, expected: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigurationError, match=expected):
        AssignmentMatrix.from_json(edit(example().to_json()))


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=3),
        lambda inner: (
            st.lists(inner) | st.dictionaries(st.sampled_from(["rows", "device", "replay", "reason", "sample"]), inner)
        ),
    )
)
def test_any_other_json_is_refused_or_read(data: object) -> None:
    document = {"format": AssignmentMatrix.FORMAT, "version": AssignmentMatrix.VERSION, "rows": data}
    try:
        AssignmentMatrix.from_json(json.dumps(document))
    except ConfigurationError:
        return
    assert data == []
