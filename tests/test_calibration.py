"""The calibration store: what it keeps, for which keys, and what it survives."""

from __future__ import annotations

import dataclasses
import json
import logging
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from composer import calibration
from composer.calibration import CalibrationKey, CalibrationStore, Imported, Machine, default_path
from composer.measurement import Measurement
from pearl import __version__
from pearl.devices.description import Connection, Device
from pearl.errors import ConfigurationError

VALUES = {"sample": Measurement.from_samples([1.0, 2.0, 3.0]), "update": Measurement.modelled(7.25)}


def key(primitive: str = "replay", **changes: object) -> CalibrationKey:
    base = CalibrationKey(
        primitive,
        "0123456789abcdef",
        (("workers", 2), ("fanout", 16)),
        "B=64 N=1000",
        "float32",
        __version__,
        "2.9",
        "k1",
    )
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


def test_measurements_are_there_in_the_next_process(tmp_path: Path) -> None:
    store = CalibrationStore(tmp_path / "new" / "folders" / "calibration.json")
    assert store.get(key()) is None
    store.put(key(), VALUES)
    assert CalibrationStore(store.path).get(key()) == VALUES
    assert [path.name for path in sorted(store.path.parent.iterdir())] == ["calibration.json", "calibration.json.lock"]


def test_every_part_of_the_key_counts_but_not_the_order_of_parameters(tmp_path: Path) -> None:
    store = CalibrationStore(tmp_path / "c.json")
    store.put(key(), VALUES)
    assert store.get(key(parameters=(("fanout", 16), ("workers", 2)))) == VALUES
    for field in dataclasses.fields(CalibrationKey):
        other: object = (("fanout", 32),) if field.name == "parameters" else "other"
        assert store.get(key(**{field.name: other})) is None


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[]", b'{"format": "pearl-calibration", "version": "9"}'])
def test_a_corrupt_file_is_set_aside_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    path = tmp_path / "c.json"
    path.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        store = CalibrationStore(path)
    (aside,) = tmp_path.glob("c.json.corrupt-*")
    assert aside.read_bytes() == content
    assert str(aside) in caplog.text
    assert len(store) == 0
    store.put(key(), VALUES)
    assert CalibrationStore(path).get(key()) == VALUES


def test_versions_of_the_format_share_a_cache(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PEARL_CACHE_DIR", str(tmp_path))
    CalibrationStore().put(key(), VALUES)
    with monkeypatch.context() as newer:
        newer.setattr(calibration, "VERSION", calibration.VERSION + 1)
        assert CalibrationStore().get(key()) is None
        CalibrationStore().put(key("learner"), VALUES)
    assert CalibrationStore().get(key()) == VALUES, "both keep what they measured, run after run"
    assert caplog.text == ""
    assert not list(tmp_path.glob("*corrupt*"))


@pytest.mark.parametrize("version", [1, 99])
def test_a_file_of_another_version_is_set_aside_named_and_rebuilt(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, version: int
) -> None:
    path = tmp_path / "c.json"
    path.write_text(f'{{"format": "pearl-calibration", "version": {version}, "entries": []}}')
    content = path.read_bytes()
    store = CalibrationStore(path)
    store.put(key(), VALUES)
    (aside,) = tmp_path.glob(f"c.json.version-{version}-*")
    assert aside.read_bytes() == content
    assert str(aside) in caplog.text
    assert CalibrationStore(path).get(key()) == VALUES


def test_a_file_that_another_process_replaces_by_a_newer_one_is_set_aside_and_nothing_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    store = CalibrationStore(path)
    store.put(key(), VALUES)
    path.write_text('{"format": "pearl-calibration", "version": 99, "entries": []}')
    store.put(key("learner"), VALUES)
    assert list(tmp_path.glob("c.json.version-99-*"))
    assert len(CalibrationStore(path)) == 2


def test_only_the_process_that_finds_the_corrupt_file_sets_it_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "c.json"
    path.write_text("{")
    lock = CalibrationStore._lock

    def repaired_meanwhile(store: CalibrationStore) -> Any:
        monkeypatch.setattr(CalibrationStore, "_lock", lock)
        path.unlink(missing_ok=True)
        CalibrationStore(path).put(key(), VALUES)
        return lock(store)

    monkeypatch.setattr(CalibrationStore, "_lock", repaired_meanwhile)
    assert CalibrationStore(path).get(key()) == VALUES
    assert not list(tmp_path.glob("*corrupt*"))


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(position=st.floats(0, 1, exclude_max=True), junk=st.binary(max_size=3))
def test_a_damaged_file_never_stops_the_store(tmp_path: Path, position: float, junk: bytes) -> None:
    path = tmp_path / "c.json"
    path.unlink(missing_ok=True)
    CalibrationStore(path).put(key(), VALUES)
    data = path.read_bytes()
    cut = int(position * len(data))
    path.write_bytes(data[:cut] + junk)
    store = CalibrationStore(path)
    assert store.get(key()) in (None, VALUES)
    store.put(key("learner"), VALUES)
    assert CalibrationStore(path).get(key("learner")) == VALUES


def test_an_unwritable_file_leaves_the_store_in_memory_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("not a folder")
    with caplog.at_level(logging.WARNING):
        store = CalibrationStore(tmp_path / "file" / "c.json")
        store.put(key(), VALUES)
        store.put(key("learner"), VALUES)
    assert store.get(key()) == VALUES
    assert caplog.text.count("calibration file") == 1


def test_a_corrupt_file_that_cannot_be_set_aside_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "c.json").write_text("{")
    (tmp_path / "c.json.lock").mkdir()
    store = CalibrationStore(tmp_path / "c.json")
    store.put(key(), VALUES)
    assert "cannot be renamed (Is a directory), but is corrupt" in caplog.text
    assert caplog.text.count("calibration file") == 1
    assert store.get(key()) == VALUES
    assert (tmp_path / "c.json").read_text() == "{"


def test_a_lock_that_stays_taken_is_waited_for_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "LOCK_TIMEOUT_S", 0.05)
    store, other = CalibrationStore(tmp_path / "c.json"), CalibrationStore(tmp_path / "c.json")
    with other._lock(), caplog.at_level(logging.WARNING):
        store.put(key(), VALUES)
    assert "its lock was not free within 0.05 s" in caplog.text
    assert store.get(key()) == VALUES
    store.put(key("learner"), VALUES)
    assert CalibrationStore(store.path).get(key()) == VALUES


def _put_many(path: Path, first: int) -> None:
    store = CalibrationStore(path)
    for number in range(first, first + 10):
        store.put(key(f"primitive {number}"), VALUES)


def test_concurrent_writers_lose_nothing(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_put_many, args=(tmp_path / "c.json", 10 * n)) for n in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(timeout=120)
        assert writer.exitcode == 0
    assert len(CalibrationStore(tmp_path / "c.json")) == 30


def test_imported_measurements_say_so_and_give_way_to_measured_ones(tmp_path: Path) -> None:
    theirs = CalibrationStore(tmp_path / "theirs.json")
    theirs.put(key(), VALUES)
    theirs.put(key("learner"), VALUES)
    theirs.put(key(pearl_version="of another time"), VALUES)
    ours = CalibrationStore(tmp_path / "ours.json")
    ours.put(key(), VALUES)
    assert ours.import_file(theirs.path) == Imported(new=2, total=3, other_versions=1)
    assert ours.get(key()) == VALUES
    imported = CalibrationStore(ours.path).get(key("learner"))
    assert imported is not None
    assert {measurement.source for measurement in imported.values()} == {"imported"}
    ours.put(key("learner"), VALUES)
    assert ours.get(key("learner")) == VALUES


def test_what_another_machine_measured_serves_only_devices_like_its_own(tmp_path: Path) -> None:
    theirs = CalibrationStore(tmp_path / "theirs.json")
    theirs.put(key(device_fingerprint="like-mine"), VALUES)
    theirs.put(key("learner", device_fingerprint="unlike-mine"), VALUES)
    ours = CalibrationStore(tmp_path / "ours.json")
    assert ours.import_file(theirs.path).new == 2
    assert ours.get(key(device_fingerprint="like-mine")) is not None
    assert ours.get(key("learner", device_fingerprint="like-mine")) is None


def test_a_file_that_is_no_calibration_is_not_imported(tmp_path: Path) -> None:
    store = CalibrationStore(tmp_path / "c.json")
    (tmp_path / "other.json").write_text(json.dumps({"format": "other"}))
    with pytest.raises(ConfigurationError, match="found 'other'"):
        store.import_file(tmp_path / "other.json")
    with pytest.raises(ConfigurationError, match=r"cannot be read: \S.*\. `pearl calibrate --export FILE`"):
        store.import_file(tmp_path / "absent.json")
    (tmp_path / "other.json").write_text('{"format": "pearl-calibration", "version": 2, "entries": [{"key": 1}]}')
    with pytest.raises(ConfigurationError, match=r"other\.json is no calibration file.*entries\[0\]"):
        store.import_file(tmp_path / "other.json")


def test_an_import_that_cannot_be_kept_is_an_error(tmp_path: Path) -> None:
    theirs = CalibrationStore(tmp_path / "theirs.json")
    theirs.put(key(), VALUES)
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(ConfigurationError, match=r"c\.json cannot be written.*PEARL_CACHE_DIR"):
        CalibrationStore(tmp_path / "file" / "c.json").import_file(theirs.path)


def machine(calibration: str = "0123456789abcdef", **changes: object) -> Machine:
    row = Device("cpu0", "cpu", "cpu", cores=2, calibration=calibration)
    base = Machine((row,), (Connection("cpu0", "cpu0", 0.1, 10.0),), __version__)
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


def test_the_newest_record_of_a_machine_is_kept(tmp_path: Path) -> None:
    store = CalibrationStore(tmp_path / "c.json")
    store.record(machine())
    store.record(machine("fedcba9876543210"))
    newer = machine(connections=())
    store.record(newer)
    assert CalibrationStore(store.path).machines == (machine("fedcba9876543210"), newer)


def test_an_export_holds_what_was_measured_here_and_the_reports_of_compilers(tmp_path: Path) -> None:
    store = CalibrationStore(tmp_path / "c.json")
    with pytest.raises(ConfigurationError, match="no measurements of this machine to export"):
        store.export()
    theirs = CalibrationStore(tmp_path / "theirs.json")
    theirs.put(key("pair"), VALUES)
    theirs.record(machine("fedcba9876543210"))
    store.import_file(theirs.path)
    store.put(key(), VALUES)
    report = {"sample": dataclasses.replace(VALUES["sample"], source="imported")}
    store.put(key(calibration.VENDOR_REPORT), report)
    store.record(machine())
    text, count = store.export()
    (tmp_path / "export.json").write_text(text)
    exported = CalibrationStore(tmp_path / "export.json")
    assert count == len(exported) == 2
    assert exported.get(key()) == VALUES
    assert exported.get(key(calibration.VENDOR_REPORT)) == report
    assert exported.machines == (machine(),)
    assert [found.imported for found in store.machines] == [True, False]


def test_a_store_of_many_samples_is_written_and_read_whole(tmp_path: Path) -> None:
    store = CalibrationStore(tmp_path / "c.json")
    values = {"sample": Measurement.from_samples([0.5 + k for k in range(2000)])}
    for number in range(20):
        store.put(key(f"primitive {number}"), values)
    assert len(found := CalibrationStore(store.path)) == 20
    assert found.get(key("primitive 7")) == values


@pytest.mark.parametrize("sample", ["1e301", "-1", '"1"', "true", "null", "1e999"])
def test_a_sample_that_is_no_latency_makes_a_file_unusable(tmp_path: Path, sample: str) -> None:
    store = CalibrationStore(tmp_path / "c.json")
    store.put(key(), {"sample": Measurement.from_samples([1.0, 2.0, 3.0])})
    text = store.path.read_text()
    store.path.write_text(text.replace("[1.0, 2.0, 3.0]", f"[1.0, {sample}, 3.0]"))
    assert len(CalibrationStore(store.path)) == 0
    assert list(tmp_path.glob("c.json.corrupt-*"))


def test_default_path_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("PEARL_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert default_path() == Path("/home/someone/.cache/pearl/calibration-2.json")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert default_path() == Path("/xdg/pearl/calibration-2.json")
    monkeypatch.setenv("PEARL_CACHE_DIR", "/here")
    assert default_path() == Path("/here/calibration-2.json")
