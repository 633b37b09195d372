"""A Data Storage in a file, and in memory that other processes see."""

from __future__ import annotations

import errno
import math
import multiprocessing
import os
import pickle
import resource
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

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


def blocks_nbytes(path):
    return path.stat().st_blocks * 512


def test_a_file_takes_its_room_at_once_and_what_is_kept_apart_as_it_is_needed(tmp_path):
    """A sparse file on a disk that fills up ends the process by SIGBUS."""
    DataStorage(SPEC, 2_000, "memmap", tmp_path / "whole").close()
    assert blocks_nbytes(tmp_path / "whole") >= 2_000 * SPEC.nbytes
    storage = DataStorage(SPEC, 20_000, "memmap", tmp_path / "shared", share_next_obs=True)
    first, whole = blocks_nbytes(tmp_path / "shared"), (tmp_path / "shared").stat().st_size
    assert 20_000 * 2400 < first < whole - 20_000 * 2400 + (32 << 20)
    kept = dict(rows(0, 9_000), next_obs=rows(50_000, 9_000)["obs"])  # no row follows another
    storage.insert(kept)
    assert blocks_nbytes(tmp_path / "shared") >= first + 2_000 * 2400
    assert np.array_equal(storage.gather([8_999])["next_obs"], kept["next_obs"][-1:])


def test_a_disk_that_is_too_full_is_told_before_anything_is_written(tmp_path, monkeypatch):
    taken, room = os.posix_fallocate, 100_000

    def allocate(descriptor, offset, nbytes):
        if offset + nbytes > room:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken(descriptor, offset, nbytes)

    with monkeypatch.context() as full:
        full.setattr(os, "posix_fallocate", allocate)
        with pytest.raises(CapacityError, match=r"needs 9\d\.\d MB does not fit the disk of .*: .* are free"):
            DataStorage(SPEC, 20_000, "memmap", tmp_path / "replay")
    assert list(tmp_path.iterdir()) == []
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, hard))
    try:
        with pytest.raises(CapacityError, match=r"larger than a file at .* may be .*ulimit -f"):
            DataStorage(SPEC, 20_000, "memmap", tmp_path / "replay")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []
    storage = DataStorage(SPEC, 20_000, "memmap", tmp_path / "replay", share_next_obs=True)
    storage.insert(rows(0, 10))
    with monkeypatch.context() as full:
        full.setattr(os, "posix_fallocate", allocate)
        with pytest.raises(CapacityError, match="does not fit the disk"):
            storage.insert(rows(100, 15_000))
    assert (storage.inserted, storage.unfinished.tolist()) == (10, [])
    storage.insert(rows(10, 10))
    assert_holds(storage, np.arange(20))


FILL = """
import sys, numpy as np
from pearl.replay.storage import DataStorage
from pearl.spec import FieldSpec, TransitionSpec
spec = TransitionSpec((FieldSpec("obs", (1000,), "uint8"),))
storage = DataStorage(spec, 500, "memmap", sys.argv[1] + "/replay")
try:
    with open(sys.argv[1] + "/other", "wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
except OSError:
    pass
for _ in range(10):
    storage.insert({"obs": np.ones((100, 1000), np.uint8)})
print("alive", storage.inserted)
"""


def test_a_disk_that_fills_up_later_does_not_end_the_process(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("a small disk cannot be mounted here")
    try:
        shown = subprocess.run([sys.executable, "-c", FILL, str(disk)], capture_output=True, text=True, timeout=120)
    finally:
        subprocess.run(["umount", str(disk)], check=True)
    assert shown.stdout == "alive 1000\n", (shown.returncode, shown.stderr)


@pytest.mark.parametrize("umask", [0, 0o077])
def test_a_file_is_its_owners_alone(tmp_path, umask):
    before = os.umask(umask)
    try:
        DataStorage(SPEC, 10, "memmap", tmp_path / "replay").close()
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "replay").stat().st_mode) == 0o600


def own_files(folder, barrier, rounds, results):
    """In each round, all try at once to have the same new file; the one that has it keeps it until the round ends."""
    for number in range(rounds):
        barrier.wait(60)
        storage, said = None, ""
        try:
            storage = DataStorage(SPEC, 10, "memmap", folder / str(number))
        except ReplayError as error:
            said = str(error)
        results.put((number, storage is not None, said))
        barrier.wait(60)
        if storage is not None:
            storage.close()


def test_a_new_file_has_one_owner_however_many_processes_make_it(tmp_path):
    count, rounds = 3, 12
    barrier, results = SPAWN.Barrier(count), SPAWN.Queue()
    processes = [SPAWN.Process(target=own_files, args=(tmp_path, barrier, rounds, results)) for _ in range(count)]
    for process in processes:
        process.start()
    try:
        found = [results.get(timeout=90) for _ in range(count * rounds)]
    finally:
        for process in processes:
            process.join(60)
    for number in range(rounds):
        assert [owns for at, owns, _ in found if at == number].count(True) == 1
    assert all("being written by another Data Storage" in said for _, owns, said in found if not owns)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(map(str, range(rounds))), "nothing is left over"


def test_what_a_killed_start_left_behind_is_removed(tmp_path):
    left = tmp_path / "replay.abc.partial"
    left.write_bytes(bytes(1000))
    storage = DataStorage(SPEC, 10, "memmap", tmp_path / "replay")
    assert [path.name for path in tmp_path.iterdir()] == ["replay"]
    storage.close()
    with pytest.raises(ConfigurationError, match="cannot be made: No such file"):
        DataStorage(SPEC, 10, "memmap", tmp_path / "absent" / "replay")
    with pytest.raises(ReplayError, match="cannot be opened: Is a directory"):
        DataStorage(SPEC, 10, "memmap", tmp_path)


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
    refuse(whole.replace(b'"format": 2', b'"format": 9'), "format 9; this version of PEARL reads format 2")
    refuse(whole.replace(b'"format": 2', b'"format": true').replace(b"}  ", b"} "), "damaged|format True")
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


def test_a_file_in_use_when_the_system_ended_is_not_relied_on(tmp_path, monkeypatch):
    path = tmp_path / "replay"
    storage = DataStorage(SPEC, 10, "memmap", path, streams=1)
    storage.insert(rows(0, 10))
    content = path.read_bytes()
    storage.close()
    (tmp_path / "boot").write_text("another run of the system")
    with monkeypatch.context() as rebooted:
        rebooted.setattr(backings, "_BOOT_ID", tmp_path / "boot")
        again = DataStorage(SPEC, 10, "memmap", path, streams=1)  # it was closed: all of it is on the disk
        assert_holds(again, np.arange(10))
        again.close()
        path.write_bytes(content)
        with pytest.raises(ReplayError, match=r"in use when the system ended.*Remove the file"):
            DataStorage(SPEC, 10, "memmap", path, streams=1)
    assert path.read_bytes() == content
    again = DataStorage(SPEC, 10, "memmap", path, streams=1)  # of a writer that was killed while the system went on
    assert_holds(again, np.arange(10))


# Damages copies of a file, opens and uses each, and prints how it went; a crash ends it.
USE_DAMAGED = """
import sys
import numpy as np
from pathlib import Path
from pearl.errors import PearlError
from pearl.replay.sequences import gather_slices
from pearl.replay.storage import DataStorage
sys.path.insert(0, sys.argv[1])
from test_storage_backing import DAMAGED, DAMAGED_CAPACITY, damaged_files, few_rows

whole, path = Path(sys.argv[2]), Path(sys.argv[3])
options = DAMAGED[int(sys.argv[4])]
count, tried, opened = DAMAGED_CAPACITY, 0, 0
for content in damaged_files(whole.read_bytes(), int(sys.argv[5])):
    tried += 1
    path.write_bytes(content)
    try:
        storage = DataStorage(few_rows.spec, count, "memmap", path, **options)
    except PearlError as error:
        assert str(path) in str(error), error
        assert path.read_bytes() == content
        continue
    opened += 1
    stored = np.setdiff1d(np.arange(storage.size), storage.unfinished)
    try:
        storage.gather(stored)
        for use in (storage.remaining, storage.positions, storage.terminated):
            use(stored)
        for slots, found in (storage.steps_after(stored, 9), storage.steps_before(stored, 9)):
            assert ((slots >= 0) & (slots < count)).all() and ((found >= 1) & (found <= 9)).all()
        if storage.slice_length and storage.size:
            gather_slices(storage, storage.draw_starts(20, np.random.default_rng(0)), 3)
    except PearlError:  # no slice, or no streams
        pass
    for start in range(1000, 1000 + 3 * count, 3):  # until nothing of before is left
        streams = dict(streams=[0, 1, 0], terminated=[start % 4 == 0, False, False]) if options else {}
        storage.insert(few_rows(start, 3), **streams)
    numbers = np.arange(1000 + 2 * count, 1000 + 3 * count)
    slots = (storage.cursor + np.arange(count)) % count
    found = storage.gather(slots)
    assert np.array_equal(found["obs"][:, 0], numbers) and np.array_equal(found["next_obs"][:, 0], numbers + 1)
    if options:
        assert (storage.remaining(slots) >= 1).all()
        assert storage._links.damage(storage.size, storage.cursor) == ""
    storage.close()
print("tried", tried, "opened", opened)
"""
DAMAGED = ({}, {"streams": 2}, {"streams": 2, "share_next_obs": True, "slice_length": 3})
DAMAGED_CAPACITY = 12


def few_rows(start, count):
    numbers = np.arange(start, start + count + 1)[:, None]
    return {"obs": numbers[:-1], "reward": numbers[:-1, 0].astype(np.float32), "next_obs": numbers[1:]}


few_rows.spec = TransitionSpec(
    (FieldSpec("obs", (1,), "int64"), FieldSpec("reward", (), "float32"), FieldSpec("next_obs", (1,), "int64"))
)


def damaged_files(whole, seed):
    """The file itself, then copies with a number or a byte changed, most of them where something is written."""
    yield whole
    rng = np.random.default_rng(seed)
    content = np.frombuffer(whole, np.uint8)
    written = np.flatnonzero(content)
    words = np.arange(1 << 16, len(content), 4096)[:, None] + np.arange(0, 128, 8)  # the place, and the arrays' starts
    for _ in range(250):
        damaged = content.copy()
        kind = rng.integers(4)
        if kind == 0:  # a byte anywhere that is used
            damaged[rng.choice(written)] = rng.integers(256)
        elif kind == 1:  # a number: often one that could be right
            at = rng.choice(words.ravel())
            damaged[at : at + 8].view(np.int64)[0] = rng.choice(
                [rng.integers(-2, 14), rng.integers(-(2**63), 2**63 - 1)]
            )
        elif kind == 2:  # a page that was not written out
            at = 4096 * rng.integers(len(content) // 4096)
            damaged[at : at + 4096] = 0
        else:
            damaged[rng.integers(len(content))] ^= 1 << rng.integers(8)
        yield damaged.tobytes()


@pytest.mark.parametrize("which", range(len(DAMAGED)))
def test_a_damaged_file_is_refused_or_used_as_it_is_but_never_ends_the_process(tmp_path, which):
    options = DAMAGED[which]
    storage = DataStorage(few_rows.spec, DAMAGED_CAPACITY, "memmap", tmp_path / "whole", **options)
    for start in range(0, 20, 2):
        streams = {"streams": [0, 1], "truncated": [start == 14, False]} if options else {}
        storage.insert(few_rows(start, 2), **streams)
    storage.close()
    arguments = [Path(__file__).parent, tmp_path / "whole", tmp_path / "damaged", which, 7]
    command = [sys.executable, "-X", "faulthandler", "-c", USE_DAMAGED, *map(str, arguments)]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert shown.returncode == 0, shown.stderr[-3000:]
    tried, opened = (int(word) for word in shown.stdout.split()[1::2])
    assert tried == 251
    assert 20 <= opened < tried, "what is harmless is not refused, and what is not is"


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
