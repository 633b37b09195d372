"""JSON documents that are read back: any change to one is refused by ConfigurationError, or read as it was written."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ForwardRef, Literal, get_args, get_origin

import pytest
from fuzz.json_changes import change_json
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_calibration import VALUES, key
from test_matrix import example
from test_placement import MATRIX, SERVER, run

from composer.calibration import CalibrationStore, _Document
from composer.composition import Composition, RolloutComposition
from composer.fpga.model import ReplayTree
from composer.fpga.reported_learner import LearnerBuild, ReportedLearner
from composer.fpga.reported_replay import ReportedReplay
from composer.matrix import NOT_MEASURED, AssignmentMatrix
from composer.measurement import Measurement
from composer.on_policy.matrix import RolloutMatrix
from composer.on_policy.placement import RolloutPlacement
from composer.placement import Placement
from pearl.errors import ConfigurationError


def imported(text: str, folder: Path) -> str:
    """What a calibration store holds after importing a file."""
    (folder / "theirs.json").write_text(text)
    (folder / "mine.json").unlink(missing_ok=True)
    CalibrationStore(folder / "mine.json").import_file(folder / "theirs.json")
    return (folder / "mine.json").read_text()


def kept(folder: Path) -> str:
    (folder / "kept.json").unlink(missing_ok=True)
    store = CalibrationStore(folder / "kept.json")
    store.put(key(), VALUES)
    store.put(key("learner"), {"step": Measurement.from_samples([4.0, 5.0])})
    return store.path.read_text()


READERS: dict[str, tuple[Callable[[Path], str], Callable[[str, Path], str]]] = {
    "matrix": (lambda _: example().to_json(), lambda text, _: AssignmentMatrix.from_json(text).to_json()),
    "placement": (lambda _: run(MATRIX, SERVER).to_json(), lambda text, _: Placement.from_json(text).to_json()),
    "calibration": (kept, imported),
}


DOCUMENTS = (_Document, AssignmentMatrix, Placement, RolloutMatrix, RolloutPlacement, Composition, RolloutComposition)


def contained(kind: Any) -> Iterator[Any]:
    """A type and those of its arguments and, in a dataclass, of its fields, as Python 3.10 evaluates annotations."""
    yield kind
    if get_origin(kind) is not Literal:
        for one in get_args(kind):
            yield from contained(one)
    if dataclasses.is_dataclass(kind):
        names = vars(sys.modules[kind.__module__])
        for field in dataclasses.fields(kind):
            found = eval(str(field.type), names)
            yield from contained(eval(found, names) if isinstance(found, str) else found)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_types_of_documents_are_known_to_python_3_10(document: type) -> None:
    texts = [kind for kind in contained(document) if isinstance(kind, str | ForwardRef)]
    assert not texts, "an alias that is a text is not evaluated inside tuple[...]"


def plain(value: Any) -> Any:
    """Numbers as floats, the order of lists of records as it is, sources and defaults left out."""
    if isinstance(value, dict):
        defaults = (None, [], 0, 0.0, 1, False, "", "torch", {"reason": NOT_MEASURED.reason})
        return {k: plain(v) for k, v in value.items() if v not in defaults and k != "source"}
    if isinstance(value, list):
        return [plain(item) for item in value]
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


@pytest.mark.parametrize("name", READERS)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_changed_document_is_read_as_written_or_refused(name: str, data: st.DataObject, tmp_path: Path) -> None:
    write, read = READERS[name]
    document = json.loads(write(tmp_path))
    change_json(data, document)
    try:
        found = json.loads(read(json.dumps(document), tmp_path))
    except ConfigurationError:
        return
    if name == "calibration":  # its entries are in the order of their digests, parameters in that of their names
        for each in (found, document):
            for entry in each["entries"]:
                entry["key"]["parameters"].sort()
            each["entries"].sort(key=lambda entry: json.dumps(entry["key"], sort_keys=True))
    assert plain(found) == plain(document)


def change_first(path: tuple[Any, ...], value: Any) -> Callable[[Any], None]:
    def change(document: Any) -> None:
        *parents, last = path
        for part in parents:
            document = document[part]
        document[last] = value

    return change


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("placement", change_first(("candidates", 0, "t_itr_us"), 1.0)),
        ("placement", change_first(("candidates", 0, "eps"), 1.0)),
        ("placement", change_first(("candidates", 0, "terms", "learner_us"), -1.0)),
        ("placement", change_first(("candidates", 0, "storage", 0, "traffic_us"), -1.0)),
        ("placement", change_first(("batch_size",), 0)),
        ("placement", lambda d: d["candidates"].append(d["candidates"][0])),
        ("matrix", change_first(("rows", 0, "replay", "fanout"), -16)),
        ("matrix", change_first(("rows", 0, "learner", "threads"), 0)),
        ("calibration", change_first(("entries", 0, "measurements", 0, 1, "samples"), [-1.0, 2.0, 3.0])),
        ("calibration", lambda d: d["entries"].append(d["entries"][0])),
        ("calibration", change_first(("more",), 1)),
    ],
)
def test_values_that_contradict_each_other_are_refused(
    name: str, change: Callable[[Any], object], tmp_path: Path
) -> None:
    write, read = READERS[name]
    document = json.loads(write(tmp_path))
    if name == "calibration":
        document["entries"].sort(key=lambda entry: entry["measurements"][0][0])
    change(document)
    with pytest.raises(ConfigurationError):
        read(json.dumps(document), tmp_path)


@pytest.mark.parametrize("name", READERS)
def test_a_key_that_stands_twice_is_refused(name: str, tmp_path: Path) -> None:
    write, read = READERS[name]
    with pytest.raises(ConfigurationError, match="each key once"):
        read(re.sub(r'("version": \d+)', r"\1, \1", write(tmp_path), count=1), tmp_path)


@pytest.mark.parametrize("cycle_us", [0.0, 5e-324, 1e300])
def test_imported_times_without_a_clock_are_left_out(cycle_us: float) -> None:
    times = (f"{operation}_{part}" for operation in ("sample", "update") for part in ("interval", "level", "head"))
    value = {name: Measurement(1e300, 1e300, 1e300, 0, "imported") for name in ("learner_step", *times)}
    value["cycle"] = Measurement(cycle_us, cycle_us, cycle_us, 0, "imported")
    assert ReportedLearner.from_measurements(LearnerBuild("dqn", (4, 2), 8), value) is None
    assert ReportedReplay.from_measurements(ReplayTree(64, 4), value) is None
