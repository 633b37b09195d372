"""The calibration store: what it keeps, for which keys, and what it survives."""

from __future__ import annotations

import dataclasses
import json
import logging
import multiprocessing
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from composer import calibration
from composer.calibration import CalibrationKey, CalibrationStore, Imported, default_path
from composer.matrix import Measurement
from pearl import __version__
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


def test_a_named_file_of_another_version_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "c.json"
    path.write_text('{"format": "pearl-calibration", "version": 99, "entries": []}')
    content = path.read_bytes()
    store = CalibrationStore(path)
    store.put(key(), VALUES)
    assert store.get(key()) == VALUES
    assert path.read_bytes() == content
    assert not list(tmp_path.glob("*corrupt*"))
    assert caplog.text.count("version 99") == 1
    path.unlink()
    other = CalibrationStore(path)
    path.write_bytes(content)  # a newer PEARL writes it meanwhile
    other.put(key(), VALUES)
    assert path.read_bytes() == content


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
    with pytest.raises(ConfigurationError, match="cannot be read"):
        store.import_file(tmp_path / "absent.json")
    (tmp_path / "other.json").write_text('{"format": "pearl-calibration", "version": 1, "entries": [{"key": 1}]}')
    with pytest.raises(ConfigurationError, match=r"other\.json is no calibration file.*entries\[0\]"):
        store.import_file(tmp_path / "other.json")


def test_an_import_that_cannot_be_kept_is_an_error(tmp_path: Path) -> None:
    theirs = CalibrationStore(tmp_path / "theirs.json")
    theirs.put(key(), VALUES)
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(ConfigurationError, match=r"c\.json cannot be written.*PEARL_CACHE_DIR"):
        CalibrationStore(tmp_path / "file" / "c.json").import_file(theirs.path)
    other = '{"format": "pearl-calibration", "version": 99, "entries": []}'
    (tmp_path / "other.json").write_text(other)
    with pytest.raises(ConfigurationError, match=r"other\.json is of version 99.*Choose another file"):
        CalibrationStore(tmp_path / "other.json").import_file(theirs.path)
    assert (tmp_path / "other.json").read_text() == other


def test_default_path_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("PEARL_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert default_path() == Path("/home/someone/.cache/pearl/calibration-1.json")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert default_path() == Path("/xdg/pearl/calibration-1.json")
    monkeypatch.setenv("PEARL_CACHE_DIR", "/here")
    assert default_path() == Path("/here/calibration-1.json")
