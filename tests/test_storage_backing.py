"""A Data Storage in a file, and in memory that other processes see."""

from __future__ import annotations

import math
import multiprocessing
import os
import pickle
import signal
import time

import numpy as np
import pytest

from pearl.errors import CapacityError, ConfigurationError, ReplayError
from pearl.replay import backing as backings
from pearl.replay.backing import Place
from pearl.replay.sequences import gather_slices
from pearl.replay.storage import DataStorage
from pearl.spec import FieldSpec, TransitionSpec

SPEC = TransitionSpec(
    (FieldSpec("obs", (300,), "int64"), FieldSpec("reward", (), "float32"), FieldSpec("next_obs", (300,), "int64"))
)
SPAWN = multiprocessing.get_context("spawn")


def rows(start, count):
    """Steps of one endless episode; every value tells the step's number."""
    numbers = np.arange(start, start + count + 1)
    obs = np.repeat(numbers[:, None], 300, axis=1)
    return {"obs": obs[:-1], "reward": numbers[:-1].astype(np.float32), "next_obs": obs[1:]}


def assert_holds(storage, numbers):
    found = storage.gather(np.asarray(numbers) % storage.capacity)
    expected = np.asarray(numbers)
    assert np.array_equal(found["obs"], np.repeat(expected[:, None], 300, axis=1))
    assert np.array_equal(found["reward"], expected.astype(np.float32))
    assert np.array_equal(found["next_obs"], np.repeat(expected[:, None] + 1, 300, axis=1))


@pytest.fixture(params=["ram", "memmap", "shared"])
def make(request, tmp_path):
    path = {"path": tmp_path / "replay"} if request.param == "memmap" else {}

    def make(capacity=10, **options):
        return DataStorage(SPEC, capacity, backing=request.param, **path, **options)

    return make


@pytest.mark.parametrize("options", [{}, {"streams": 1}, {"share_next_obs": True}])
def test_every_backing_holds_the_newest_rows(make, options):
    storage = make(10, **options)
    for start, count in ((0, 7), (7, 10), (17, 5)):
        storage.insert(rows(start, count))
        newest = min(start + count, 10)
        assert (storage.size, storage.inserted) == (newest, start + count)
        assert_holds(storage, np.arange(start + count - newest, start + count))
    storage.close()
    storage.close()
    for use in (lambda: storage.gather([0]), lambda: storage.insert(rows(0, 1)), lambda: storage.columns):
        with pytest.raises(ReplayError, match="closed"):
            use()
    assert storage.size == 10


@pytest.mark.parametrize("capacity", [1, 2])
def test_the_smallest_rings_work(make, capacity):
    storage = make(capacity, share_next_obs=True, slice_length=1)
    for number in range(5):
        storage.insert(rows(number, 1))
        assert_holds(storage, [number])
    with pytest.raises(ReplayError, match=f"0 to {capacity} rows"):
        storage.insert(rows(0, capacity + 1))


@pytest.mark.parametrize("capacity", [0, -1, 1.5, "many"])
def test_no_ring_without_whole_slots(capacity):
    with pytest.raises(ReplayError, match="capacity of a Data Storage must be"):
        DataStorage(SPEC, capacity)


@pytest.mark.parametrize("options", [{}, {"share_next_obs": True, "slice_length": 3}])
def test_a_reopened_file_goes_on_where_it_was(tmp_path, options):
    path = tmp_path / "replay"
    storage = DataStorage(SPEC, 10, "memmap", path, **options)
    storage.insert(rows(0, 10))
    storage.insert(rows(10, 3))
    storage.flush()
    storage.close()
    again = DataStorage(SPEC, 10, "memmap", path, **options)
    assert (again.size, again.cursor, again.inserted) == (10, 3, 13)
    assert_holds(again, np.arange(3, 13))
    again.insert(rows(13, 4))
    assert_holds(again, np.arange(7, 17))
    if options:
        assert again.breaks == 0
        assert gather_slices(again, [7], 10).mask.all()
        assert set(again.draw_starts(500, np.random.default_rng(0)).tolist()) == {n % 10 for n in range(7, 15)}


def test_a_file_is_sparse(tmp_path):
    storage = DataStorage(SPEC, 20_000, "memmap", tmp_path / "replay")
    storage.insert(rows(0, 10))
    storage.flush()
    status = (tmp_path / "replay").stat()
    assert status.st_size > 20_000 * SPEC.nbytes
    assert status.st_blocks * 512 < status.st_size // 10


def test_foreign_and_damaged_files_are_refused_and_left_alone(tmp_path):
    path = tmp_path / "replay"
    DataStorage(SPEC, 10, "memmap", path).close()
    whole = path.read_bytes()

    def refuse(content, message, capacity=10, spec=SPEC, **options):
        path.write_bytes(content)
        with pytest.raises(ReplayError, match=message):
            DataStorage(spec, capacity, "memmap", path, **options)
        assert path.read_bytes() == content

    refuse(b"", "is not a Data Storage")
    refuse(b"a picture" * 1000, "is not a Data Storage")
    refuse(whole[:100], "damaged or truncated")
    refuse(whole[:-1], "truncated: a Data Storage of .* bytes; found")
    refuse(whole + b"x", "truncated")
    refuse(whole[:16] + b"\xff" + whole[17:], "damaged")
    refuse(whole.replace(b'"format": 1', b'"format": 9'), "format 9; this version of PEARL reads format 1")
    refuse(whole, r"another Data Storage: 'obs' must be .*\[11, 300\].*\[10, 300\]", capacity=11)
    other = TransitionSpec((*SPEC.fields[:1], FieldSpec("reward", (), "float64"), *SPEC.fields[2:]))
    refuse(whole, "'reward' must be .*<f8.*<f4", spec=other)
    refuse(whole, "another Data Storage: 'next_obs'|another Data Storage: 'episode/next'", streams=1)
    refuse(whole, r"it also has \['next_obs'\]", spec=TransitionSpec(SPEC.fields[:2]))
    path.write_bytes(whole)
    assert DataStorage(SPEC, 10, "memmap", path).size == 0


def test_a_file_has_one_writer(tmp_path):
    path = tmp_path / "replay"
    storage = DataStorage(SPEC, 10, "memmap", path)
    with pytest.raises(ReplayError, match="being written by another Data Storage"):
        DataStorage(SPEC, 10, "memmap", path)
    storage.close()
    DataStorage(SPEC, 10, "memmap", path).close()


def test_paths_and_kinds_are_checked(tmp_path, monkeypatch):
    with pytest.raises(ConfigurationError, match="'ram', 'memmap', 'shared'; found 'disk'"):
        DataStorage(SPEC, 10, "disk")
    with pytest.raises(ConfigurationError, match="needs the `path`"):
        DataStorage(SPEC, 10, "memmap")
    with pytest.raises(ConfigurationError, match='`path` is for backing="memmap"'):
        DataStorage(SPEC, 10, path=tmp_path / "replay")
    with pytest.raises(ReplayError, match='make it with backing="shared"'):
        pickle.dumps(DataStorage(SPEC, 10))
    monkeypatch.setattr(backings.os, "statvfs", lambda path: os.statvfs_result((4096, 4096, 9, 1, 1, 9, 9, 9, 0, 255)))
    with pytest.raises(CapacityError, match=r"does not fit the disk of .*: 4\.1 KB are free"):
        DataStorage(SPEC, 10, "memmap", tmp_path / "replay")
    assert list(tmp_path.iterdir()) == []


def interrupted(path, **options):
    """A file whose writer announced the rows 10 to 14 and ended."""
    storage = DataStorage(SPEC, 10, "memmap", path, **options)
    storage.insert(rows(0, 10))
    storage.insert(rows(10, 2))
    storage._backing.publish(Place(10, 2, 12, 15))
    storage.close()


def test_rows_of_an_interrupted_insertion_are_refused_until_overwritten(tmp_path):
    interrupted(tmp_path / "replay")
    for _ in range(2):  # reopening does not forget it
        storage = DataStorage(SPEC, 10, "memmap", tmp_path / "replay")
        assert storage.unfinished.tolist() == [2, 3, 4]
        with pytest.raises(ReplayError, match="Slot 3, at position 1, may have been damaged"):
            storage.gather([1, 3])
        assert_holds(storage, [5, 6, 7, 8, 9, 10, 11])
        storage.close()
    storage = DataStorage(SPEC, 10, "memmap", tmp_path / "replay")
    storage.insert(rows(12, 2))
    assert storage.unfinished.tolist() == [4]
    storage.insert(rows(14, 1))
    assert storage.unfinished.tolist() == []
    assert_holds(storage, np.arange(5, 15))


def test_links_that_an_interruption_may_have_damaged_are_not_trusted(tmp_path):
    interrupted(tmp_path / "replay", streams=1)
    with pytest.raises(ReplayError, match=r"interrupted while it inserted.*Remove the file"):
        DataStorage(SPEC, 10, "memmap", tmp_path / "replay", streams=1)


def write_until_killed(path, started):
    storage = DataStorage(SPEC, 50, "memmap", path)
    for number in range(0, 10**9, 7):
        storage.insert(rows(number, 7))
        if number > 200:
            started.set()


def test_a_killed_writers_file_is_whole_but_for_what_it_was_writing(tmp_path):
    path, started = tmp_path / "replay", SPAWN.Event()
    writer = SPAWN.Process(target=write_until_killed, args=(path, started))
    writer.start()
    try:
        assert started.wait(60)
    finally:
        os.kill(writer.pid, signal.SIGKILL)
        writer.join()
    storage = DataStorage(SPEC, 50, "memmap", path)
    numbers = np.arange(storage.inserted - 50, storage.inserted)
    assert storage.inserted > 200
    assert len(storage.unfinished) in (0, 7)
    assert_holds(storage, numbers[~np.isin(numbers % 50, storage.unfinished)])


def read_beside(storage, results, reading, stop, share):
    """Gather random rows until told to stop; report whether each was whole and how far the ring was."""
    rng, counts = np.random.default_rng(0), [0, 0]
    while not stop.is_set():
        size, inserted = storage.size, storage.inserted
        if not size:
            continue
        found = storage.gather(rng.integers(0, size, 8))
        whole = (found["obs"] == found["obs"][:, :1]).all() and (found["next_obs"] == found["next_obs"][:, :1]).all()
        follows = (found["next_obs"][:, 0] == found["obs"][:, 0] + 1).all()
        fits = (found["reward"] == found["obs"][:, 0]).all()
        ordered = inserted <= storage.inserted and (storage.cursor, storage.size) != (0, 0)
        counts[0] += 1
        reading.set()
        counts[1] += not (whole and follows and fits and ordered)
    refusals = []
    for refused in (
        lambda: storage.insert(rows(0, 1)),
        lambda: storage.restore(rows(0, 1), size=1, cursor=1, inserted=1),
    ):
        try:
            refused()
        except ReplayError as error:
            refusals.append(str(error))
    lengths = storage.remaining([storage.cursor - 2]).tolist() if share else None
    results.put((counts, storage.inserted, refusals, lengths))


@pytest.mark.parametrize("kind", ["shared", "memmap"])
@pytest.mark.parametrize("share", [False, True], ids=["columns", "share_next_obs"])
def test_another_process_reads_whole_rows_while_this_one_inserts(kind, share, tmp_path):
    path = tmp_path / "replay" if kind == "memmap" else None
    storage = DataStorage(SPEC, 16, kind, path, share_next_obs=share)
    storage.insert(rows(0, 16))
    results, reading, stop = SPAWN.Queue(), SPAWN.Event(), SPAWN.Event()
    reader = SPAWN.Process(target=read_beside, args=(storage, results, reading, stop, share))
    reader.start()
    try:
        number, until = 16, math.inf
        while time.monotonic() < until:
            if until == math.inf and reading.is_set():
                until = time.monotonic() + 1.0
            assert reader.is_alive()
            storage.insert(rows(number, 3))
            number += 3
            time.sleep(1e-4)
        if storage.cursor < 2:
            storage.insert(rows(number, 3))
            number += 3
        stop.set()
        (read, wrong), inserted, refusals, lengths = results.get(timeout=60)
    finally:
        stop.set()
        reader.join(60)
    assert read > 0
    assert wrong == 0
    assert inserted == number
    assert len(refusals) == 2
    assert all("Only the process that made the Data Storage inserts" in text for text in refusals)
    assert lengths == ([2] if share else None)


def test_a_reader_gives_up_on_rows_that_are_never_finished(tmp_path, monkeypatch):
    monkeypatch.setattr("pearl.replay.storage._RETRY_S", 0.05)
    storage = DataStorage(SPEC, 10, "memmap", tmp_path / "replay")
    storage.insert(rows(0, 10))
    reader = pickle.loads(pickle.dumps(storage))
    storage._backing.publish(Place(10, 0, 10, 12))
    with pytest.raises(ReplayError, match="being overwritten for"):
        reader.gather([1])
    assert_holds(reader, [2, 9])
    storage._backing.publish(Place(10, 0, 10, 10))
    assert_holds(reader, [1])
