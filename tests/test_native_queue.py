"""Shared-memory primitives, across real processes."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pearl import _native
from pearl.errors import QueueClosedError, QueueError

SLOTS, SLOT_BYTES = 4, 1000
SNAPSHOT_BYTES = 100_003
SPAWN = multiprocessing.get_context("spawn")


def share(path: Path, nbytes: int) -> mmap.mmap:
    with path.open("r+b" if path.exists() else "w+b") as file:
        file.truncate(nbytes)
        return mmap.mmap(file.fileno(), nbytes)


def open_queue(path: Path, *, create: bool = False) -> tuple[_native.SlotQueue, list[np.ndarray]]:
    memory = share(path, _native.SlotQueue.nbytes(SLOTS, SLOT_BYTES))
    queue = _native.SlotQueue(memory, SLOTS, SLOT_BYTES, create)
    return queue, [np.frombuffer(memory, np.uint8, SLOT_BYTES, queue.offset(slot)) for slot in range(SLOTS)]


def open_bell(path: Path) -> _native.Doorbell:
    return _native.Doorbell(share(path, _native.Doorbell.nbytes))


def open_snapshot(path: Path, *, create: bool = False) -> _native.Snapshot:
    return _native.Snapshot(share(path, _native.Snapshot.nbytes(SNAPSHOT_BYTES)), SNAPSHOT_BYTES, create)


def received(queue: _native.SlotQueue, views: list[np.ndarray], bell: _native.Doorbell) -> Iterator[int]:
    """Counts of all messages until the queue is closed, their payloads checked."""
    while True:
        seen = bell.value()
        try:
            slot = queue.peek(0.0)
        except QueueClosedError:
            return
        if slot < 0:
            assert bell.wait(seen, 30.0)
            continue
        count = queue.count(slot)
        assert np.all(views[slot] == count % 256)
        yield count
        queue.release()


def produce(path: Path, bell_path: Path, first: int, count: int, close: bool) -> None:
    queue, views = open_queue(path)
    queue.attach_bell(open_bell(bell_path))
    for number in range(first, first + count):
        slot = queue.reserve(30.0)
        views[slot][:] = number % 256
        queue.publish(number)
    if close:
        queue.close()


def reserve_and_hang(path: Path, first: int) -> None:
    queue, views = open_queue(path)
    queue.reserve(30.0)
    queue.publish(first)
    views[queue.reserve(30.0)][:] = 99
    time.sleep(600)


def write_snapshots(path: Path, versions: int) -> None:
    snapshot = open_snapshot(path)
    payload = np.empty(SNAPSHOT_BYTES, np.uint8)
    for version in range(1, versions + 1):
        payload[:] = version % 256
        snapshot.write(payload)


def wait_for_close(path: Path, side: str) -> None:
    queue, _ = open_queue(path)
    try:
        while True:
            queue.reserve(60.0) if side == "producer" else queue.peek(60.0)
            if side == "producer":
                queue.publish(0)
    except QueueClosedError:
        os._exit(7)


@pytest.fixture
def spawn():
    processes = []

    def start(target, *args):
        processes.append(SPAWN.Process(target=target, args=args, daemon=True))
        processes[-1].start()
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.join(10)


def test_messages_cross_processes_in_order_and_whole(tmp_path, spawn):
    queue, views = open_queue(tmp_path / "queue", create=True)
    bell = open_bell(tmp_path / "bell")
    spawn(produce, tmp_path / "queue", tmp_path / "bell", 0, 2000, True)
    assert list(received(queue, views, bell)) == list(range(2000))
    assert queue.closed


def test_a_killed_producer_loses_only_its_unpublished_slot(tmp_path, spawn):
    queue, views = open_queue(tmp_path / "queue", create=True)
    bell = open_bell(tmp_path / "bell")
    victim = spawn(reserve_and_hang, tmp_path / "queue", 1)
    assert queue.peek(30.0) == 0
    deadline = time.monotonic() + 30
    while views[1][0] != 99 and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(victim.pid, signal.SIGKILL)
    victim.join(10)
    assert queue.size() == 1
    queue.release()
    assert queue.peek(0.0) == -1
    spawn(produce, tmp_path / "queue", tmp_path / "bell", 2, 20, True)
    assert list(received(queue, views, bell)) == list(range(2, 22))


@pytest.mark.parametrize("side", ["producer", "consumer"])
def test_closing_wakes_the_other_process(tmp_path, spawn, side):
    queue, _ = open_queue(tmp_path / "queue", create=True)
    waiter = spawn(wait_for_close, tmp_path / "queue", side)
    time.sleep(1.0)
    queue.close()
    waiter.join(20)
    assert waiter.exitcode == 7


def test_a_full_queue_times_out_and_an_empty_one_too(tmp_path):
    queue, _ = open_queue(tmp_path / "queue", create=True)
    for number in range(SLOTS):
        assert queue.reserve() == number
        queue.publish(number)
    start = time.monotonic()
    assert queue.reserve(0.25) == -1
    assert 0.2 < time.monotonic() - start < 5.0
    with pytest.raises(QueueError, match="the queue is full"):
        queue.publish(0)
    assert queue.size() == SLOTS
    for number in range(SLOTS):
        assert queue.peek() == number
        queue.release()
    assert queue.peek() == -1
    with pytest.raises(QueueError, match="the queue is empty"):
        queue.release()


def test_closing_lets_the_consumer_drain(tmp_path):
    queue, _ = open_queue(tmp_path / "queue", create=True)
    queue.reserve()
    queue.publish(5)
    queue.close()
    with pytest.raises(QueueClosedError, match="nothing more can be put in"):
        queue.reserve()
    assert queue.count(queue.peek()) == 5
    queue.release()
    with pytest.raises(QueueClosedError):
        queue.peek(10.0)


def test_payloads_are_aligned():
    queue = _native.SlotQueue(bytearray(_native.SlotQueue.nbytes(3, 10)), 3, 10, True)
    assert [queue.offset(slot) % 64 for slot in range(3)] == [0, 0, 0]
    with pytest.raises(QueueError, match=r"Slot must lie in \[0, 3\); found 3"):
        queue.offset(3)


def test_attaching_checks_what_is_there():
    memory = bytearray(_native.SlotQueue.nbytes(4, 64))
    with pytest.raises(QueueError, match="was not created in this buffer"):
        _native.SlotQueue(memory, 4, 64, False)
    _native.SlotQueue(memory, 4, 64, True)
    with pytest.raises(QueueError, match="expected 2, found 4"):
        _native.SlotQueue(memory, 2, 64, False)
    with pytest.raises(QueueError, match=r"needs a buffer of \d+ bytes; found 10"):
        _native.SlotQueue(bytearray(10), 4, 64, True)
    with pytest.raises(QueueError, match="needs zeroed memory"):
        _native.Doorbell(memory)
    with pytest.raises(BufferError):
        _native.SlotQueue(bytes(memory), 4, 64, False)


def test_the_buffer_outlives_its_name():
    queue = _native.SlotQueue(mmap.mmap(-1, _native.SlotQueue.nbytes(2, 64)), 2, 64, True)
    assert queue.reserve() == 0
    memory = mmap.mmap(-1, _native.SlotQueue.nbytes(2, 64))
    queue = _native.SlotQueue(memory, 2, 64, True)
    with pytest.raises(BufferError):
        memory.close()
    del queue
    memory.close()


def test_readers_never_see_torn_weights(tmp_path, spawn):
    versions = 3000
    snapshot = open_snapshot(tmp_path / "snapshot", create=True)
    payload = np.zeros(SNAPSHOT_BYTES, np.uint8)
    assert snapshot.read(payload, 0) == 0
    writer = spawn(write_snapshots, tmp_path / "snapshot", versions)
    seen, reads = 0, 0
    deadline = time.monotonic() + 60
    while seen < versions and time.monotonic() < deadline:
        version = snapshot.read(payload, seen)
        if version != seen:
            assert version > seen
            assert np.all(payload == version % 256)
            seen, reads = version, reads + 1
    assert seen == versions
    assert reads > 1
    writer.join(10)


def test_snapshots_take_and_give_whole_payloads():
    snapshot = _native.Snapshot(bytearray(_native.Snapshot.nbytes(12)), 12, True)
    with pytest.raises(QueueError, match="must have 12 bytes; found 8"):
        snapshot.write(np.zeros(2, np.float32))
    assert snapshot.write(np.array([1, 2, 3], np.float32)) == snapshot.version == 1
    out = np.zeros(3, np.float32)
    assert snapshot.read(out, 0) == 1
    assert out.tolist() == [1, 2, 3]
    out[:] = 0
    assert snapshot.read(out, 1) == 1
    assert out.tolist() == [0, 0, 0]


def test_a_doorbell_wakes_a_waiting_thread():
    bell = _native.Doorbell(bytearray(_native.Doorbell.nbytes))
    seen = bell.value()
    assert not bell.wait(seen, 0.0)
    woken = []
    waiter = threading.Thread(target=lambda: woken.append(bell.wait(seen, 30.0)))
    waiter.start()
    time.sleep(0.05)
    bell.ring()
    waiter.join(10)
    assert woken == [True]
    assert bell.wait(seen, 0.0)


def test_interrupts_are_seen_while_waiting():
    # Whoever runs the tests in the background has SIGINT ignored.
    earlier = signal.signal(signal.SIGINT, signal.default_int_handler)
    bell = _native.Doorbell(bytearray(_native.Doorbell.nbytes))
    timer = threading.Timer(0.2, signal.raise_signal, (signal.SIGINT,))
    timer.start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        bell.wait(bell.value(), 30.0)
    signal.signal(signal.SIGINT, earlier)
    assert time.monotonic() - start < 10


def test_probes_measure_something():
    assert _native.copy_bandwidth(1 << 22, 3) > 0.1
    assert 0.1 < _native.random_access_ns(1 << 20, 100_000) < 10_000
    assert all(isinstance(feature, str) for feature in _native.cpu_features())
