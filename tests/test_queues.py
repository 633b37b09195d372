"""Queues of arrays in shared memory, between threads and between real processes."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pearl.errors import QueueClosedError, QueueError
from pearl.ipc.queues import Bell, ColumnQueue, WeightSyncQueue
from pearl.ipc.shared_buffer import SharedBuffer
from pearl.runtime.queues import DataCollectionQueue, batch_fields
from pearl.spec import FieldSpec, TransitionSpec

FIELDS = [
    FieldSpec("obs", (7, 3), "float32"),
    FieldSpec("flag", (5,), "uint8"),
    FieldSpec("action", (7,), "int64"),
    FieldSpec("scalar", (), "float64"),
]
TRANSITION = TransitionSpec((FieldSpec("obs", (3,), "float32"), FieldSpec("action", (), "int64")))
SPAWN = multiprocessing.get_context("spawn")

Start = Callable[..., BaseProcess]


@pytest.fixture
def spawn() -> Iterator[Start]:
    processes: list[BaseProcess] = []

    def start(target: Callable[..., None], *arguments: Any) -> BaseProcess:
        processes.append(SPAWN.Process(target=target, args=arguments, daemon=True))
        processes[-1].start()
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.join(30)


def fill(message: dict[str, np.ndarray], number: int) -> None:
    """Every element of every field tells the message's number and its own place."""
    for place, column in enumerate(message.values()):
        column[...] = ((np.arange(column.size) + 31 * place + 7 * number) % 251).reshape(column.shape)


def assert_filled(message: dict[str, np.ndarray], number: int) -> None:
    for place, (name, column) in enumerate(message.items()):
        expected = ((np.arange(column.size) + 31 * place + 7 * number) % 251).reshape(column.shape)
        np.testing.assert_array_equal(column, expected, err_msg=f"{name} of message {number}")


def produce(queue: ColumnQueue, first: int, count: int) -> None:
    for number in range(first, first + count):
        message = queue.reserve(60.0)
        assert message is not None
        fill(message, number)
        queue.publish(number)


def produce_and_close(queue: ColumnQueue, first: int, count: int) -> None:
    produce(queue, first, count)
    queue.close()


def produce_and_hang(queue: ColumnQueue, count: int) -> None:
    produce(queue, 0, count)
    message = queue.reserve(60.0)
    assert message is not None
    message["obs"].fill(-1)
    os.kill(os.getpid(), signal.SIGKILL)


def echo(requests: ColumnQueue, answers: ColumnQueue) -> None:
    """Consume until closed, answering each message with its columns doubled; the exit code tells how it ended."""
    try:
        while True:
            found = requests.peek(60.0)
            assert found is not None
            answer = answers.reserve(60.0)
            assert answer is not None
            for name, column in found[0].items():
                answer[name][...] = column * 2
            answers.publish(found[1])
            requests.release()
    except QueueClosedError:
        os._exit(7)


def blocked_producer(queue: ColumnQueue) -> None:
    queue.publish(1) if queue.reserve(60.0) is not None else None
    try:
        queue.reserve(60.0)
    except QueueClosedError:
        os._exit(7)


# --- within a process -------------------------------------------------------------------------------------------------


def test_messages_come_whole_and_in_order_however_often_the_ring_turns() -> None:
    queue = ColumnQueue(FIELDS, 3)
    producer = threading.Thread(target=produce_and_close, args=(queue, 0, 100))
    producer.start()
    for number in range(100):
        found = queue.peek(30.0)
        assert found is not None
        message, rows = found
        assert rows == number
        assert {n: (c.shape, str(c.dtype)) for n, c in message.items()} == {f.name: (f.shape, f.dtype) for f in FIELDS}
        assert_filled(message, number)
        queue.release()
    with pytest.raises(QueueClosedError):
        queue.peek(30.0)
    producer.join(30)
    assert not producer.is_alive()


def test_a_full_queue_holds_the_producer_back() -> None:
    queue = ColumnQueue(FIELDS, 2)
    assert len(queue) == 0
    assert queue.peek() is None
    produce(queue, 0, 2)
    assert len(queue) == 2
    assert queue.reserve() is None
    assert queue.reserve(0.05) is None
    with pytest.raises(QueueError, match="full"):
        queue.publish()
    found = queue.peek()
    assert found is not None
    assert found[1] == 0
    assert queue.reserve() is None, "the slot is the consumer's until it is released"
    queue.release()
    produce(queue, 2, 1)
    for number in (1, 2):
        found = queue.peek()
        assert found is not None
        assert_filled(found[0], number)
        queue.release()
    with pytest.raises(QueueError, match="empty"):
        queue.release()


def test_a_slot_belongs_to_the_producer_until_it_is_published() -> None:
    queue = ColumnQueue(FIELDS, 4)
    message = queue.reserve()
    assert message is not None
    fill(message, 1)
    assert queue.peek() is None
    again = queue.reserve()
    assert again is not None
    assert_filled(again, 1)
    queue.publish(5)
    found = queue.peek()
    assert found is not None
    assert found[1] == 5


def test_fields_do_not_overlap() -> None:
    queue = ColumnQueue(FIELDS, 2)
    message = queue.reserve()
    assert message is not None
    for name in message:
        for column in message.values():
            column.fill(0)
        message[name].fill(1)
        assert {n for n, c in message.items() if c.any()} == {name}


@pytest.mark.parametrize("side", ["producer", "consumer"])
def test_closing_wakes_a_waiting_thread(side: str) -> None:
    queue = ColumnQueue(FIELDS, 1)
    if side == "producer":
        produce(queue, 0, 1)
    raised: list[BaseException] = []

    def wait() -> None:
        try:
            queue.reserve(120.0) if side == "producer" else queue.peek(120.0)
        except QueueClosedError as error:
            raised.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    time.sleep(0.2)  # most likely asleep by now; if not, it finds the queue closed
    queue.close()
    waiter.join(30)
    assert not waiter.is_alive()
    assert len(raised) == 1


def test_leaving_the_block_closes_and_what_was_published_is_still_read() -> None:
    with ColumnQueue(FIELDS, 2) as queue:
        produce(queue, 3, 1)
    with pytest.raises(QueueClosedError):
        queue.reserve()
    found = queue.peek()
    assert found is not None
    assert_filled(found[0], 3)
    queue.release()
    with pytest.raises(QueueClosedError):
        queue.peek()


# --- the bell ---------------------------------------------------------------------------------------------------------


def test_publications_and_closing_ring_the_bell() -> None:
    bell = Bell()
    first, second = ColumnQueue(FIELDS, 2, bell), ColumnQueue(FIELDS, 2, bell)
    seen = bell.value()
    assert not bell.wait(seen, 0.01)
    for action in (first.publish, second.publish, first.close):
        action()
        assert bell.wait(seen, 0.0)
        assert bell.value() != seen
        seen = bell.value()
    first_again = ColumnQueue(FIELDS, 2)
    first_again.publish()
    assert not bell.wait(seen, 0.0), "a queue without a bell is silent"


def test_a_ring_between_looking_and_sleeping_is_not_lost() -> None:
    bell = Bell()
    seen = bell.value()
    bell.ring()
    assert bell.wait(seen, 60.0)


def test_a_sleeping_host_wakes_for_another_processs_message(spawn: Start) -> None:
    bell = Bell()
    queues = [ColumnQueue(FIELDS, 2, bell) for _ in range(2)]
    for first, queue in enumerate(queues):
        spawn(produce_and_close, queue, 1000 * first, 20)
    received: list[list[int]] = [[], []]
    open_queues = {0, 1}
    while open_queues:
        seen = bell.value()
        progressed = False
        for index in sorted(open_queues):
            try:
                found = queues[index].peek()
            except QueueClosedError:
                open_queues.remove(index)
                progressed = True
                continue
            if found is not None:
                assert_filled(found[0], found[1])
                received[index].append(found[1])
                queues[index].release()
                progressed = True
        if not progressed:
            assert bell.wait(seen, 60.0), "no message and no bell"
    assert received == [list(range(20)), list(range(1000, 1020))]


# --- across processes -------------------------------------------------------------------------------------------------


def test_a_process_answers_through_a_second_queue_and_ends_when_the_first_closes(spawn: Start) -> None:
    requests, answers = ColumnQueue(FIELDS, 2), ColumnQueue(FIELDS, 3)
    process = spawn(echo, requests, answers)
    rng = np.random.default_rng(0)
    for number in range(30):
        message = requests.reserve(60.0)
        assert message is not None
        sent = {name: rng.integers(0, 100, c.shape).astype(c.dtype) for name, c in message.items()}
        for name, column in sent.items():
            message[name][...] = column
        requests.publish(number)
        found = answers.peek(60.0)
        assert found is not None
        assert found[1] == number
        for name, column in sent.items():
            np.testing.assert_array_equal(found[0][name], column * 2)
        answers.release()
    requests.close()
    process.join(60)
    assert process.exitcode == 7


def test_closing_wakes_a_producer_in_another_process(spawn: Start) -> None:
    queue = ColumnQueue(FIELDS, 1)
    process = spawn(blocked_producer, queue)
    assert queue.peek(60.0) is not None
    queue.close()
    process.join(60)
    assert process.exitcode == 7


def test_a_new_producer_goes_on_after_a_killed_one(spawn: Start) -> None:
    queue = ColumnQueue(FIELDS, 4)
    victim = spawn(produce_and_hang, queue, 2)
    victim.join(60)
    assert victim.exitcode == -signal.SIGKILL
    spawn(produce_and_close, queue, 2, 10)
    for number in range(12):  # only what was being written is lost
        found = queue.peek(60.0)
        assert found is not None
        assert found[1] == number
        assert_filled(*found)
        queue.release()
    with pytest.raises(QueueClosedError):
        queue.peek(60.0)


# --- DCQ and LAQ ------------------------------------------------------------------------------------------------------


def test_a_dcq_message_holds_rows_of_transitions_and_the_episodes_that_ended() -> None:
    queue = DataCollectionQueue(TRANSITION, rows=6, slots=1)
    message = queue.reserve()
    assert message is not None
    assert {name: (c.shape, str(c.dtype)) for name, c in message.items()} == {
        "obs": ((6, 3), "float32"),
        "action": ((6,), "int64"),
        "episode_return": ((6,), "float64"),
        "episode_length": ((6,), "int64"),
        "counts": ((3,), "int64"),
    }


def test_an_assignment_may_leave_the_transitions_out() -> None:
    sampled = {"indices": "int64", "weights": "float32", "generations": "uint32"}
    assert {f.name: f.dtype for f in batch_fields(4, None)} == sampled
    fields = {f.name: f for f in batch_fields(4, TRANSITION)}
    assert list(fields) == [*sampled, "obs", "action"]
    assert fields["obs"].shape == (4, 3)


def report_rows(queue: DataCollectionQueue) -> None:
    os._exit(queue.rows)


def test_a_dcq_arrives_in_a_process_as_it_was(spawn: Start) -> None:
    process = spawn(report_rows, DataCollectionQueue(TRANSITION, rows=6, slots=1, bell=Bell()))
    process.join(60)
    assert process.exitcode == 6


# --- WSQ --------------------------------------------------------------------------------------------------------------


def test_a_reader_gets_the_newest_weights_once() -> None:
    wsq = WeightSyncQueue(5)
    assert wsq.poll() is None
    assert wsq.write(np.full(5, 1, np.float32)) == 1
    assert wsq.write(np.full(5, 2, np.float32)) == 2
    found = wsq.poll()
    assert found is not None
    assert found.dtype == np.float32
    assert found.tolist() == [2] * 5
    assert wsq.version == 2
    assert wsq.poll() is None


def test_each_reader_sees_every_version_for_itself() -> None:
    wsq = WeightSyncQueue(3)
    readers = [wsq.reader(), wsq.reader()]
    for version in (1, 2):
        wsq.write(np.full(3, version, np.float32))
        for reader in readers:
            found = reader.poll()
            assert found is not None
            assert found.tolist() == [version] * 3
            assert reader.poll() is None
    late = wsq.reader().poll()
    assert late is not None
    assert late.tolist() == [2] * 3


WEIGHTS, VERSIONS = 20_001, 3000


def read_until_last(wsq: WeightSyncQueue, ready: ColumnQueue) -> None:
    """Exit code 7 if every snapshot was of one version, versions rose, and the last one was seen."""
    ready.publish()
    newest = 0.0
    while newest < VERSIONS:
        weights = wsq.poll()
        if weights is None:
            continue
        if weights.min() != weights.max() or weights[0] <= newest:
            os._exit(1)
        newest = float(weights[0])
    os._exit(7)


def test_readers_in_other_processes_never_see_torn_weights(spawn: Start) -> None:
    wsq = WeightSyncQueue(WEIGHTS)
    ready = [ColumnQueue(FIELDS[:1], 1) for _ in range(2)]
    readers = [spawn(read_until_last, wsq, queue) for queue in ready]
    for queue in ready:
        assert queue.peek(60.0) is not None
    weights = np.empty(WEIGHTS, np.float32)
    for version in range(1, VERSIONS + 1):
        weights.fill(version)
        assert wsq.write(weights) == version
    for reader in readers:
        reader.join(60)
        assert reader.exitcode == 7


# --- memory -----------------------------------------------------------------------------------------------------------


def test_memory_is_zeroed_and_writeable() -> None:
    buffer = SharedBuffer(1000)
    assert len(buffer.memory) == buffer.nbytes == 1000
    assert buffer.memory[:] == bytes(1000)
    buffer.memory[999] = 7
    assert buffer.memory[999] == 7


@pytest.mark.parametrize(
    "make",
    [
        lambda: SharedBuffer(64),
        Bell,
        lambda: ColumnQueue(FIELDS, 2),
        lambda: DataCollectionQueue(TRANSITION, 4, 2),
        lambda: WeightSyncQueue(4),
    ],
    ids=["buffer", "bell", "queue", "dcq", "wsq"],
)
def test_what_is_shared_is_not_pickled_but_passed_to_a_process_being_spawned(make: Callable[[], object]) -> None:
    with pytest.raises(TypeError, match="can only be passed to a process that is being spawned"):
        pickle.dumps(make())


def shared_kib() -> int:
    """Shared memory that this process has mapped and touched."""
    found = re.search(r"RssShmem:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1])


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="/proc tells what is mapped")
def test_memory_and_descriptors_are_freed_with_the_last_user() -> None:
    gc.collect()
    kib, descriptors = shared_kib(), open_descriptors()
    queue = ColumnQueue([FieldSpec("block", (1 << 20,), "float64")], 4)
    for _ in range(4):
        message = queue.reserve()
        assert message is not None
        message["block"].fill(1.0)
        queue.publish()
    assert shared_kib() - kib >= 32 * 1024
    kept = queue.peek()
    assert kept is not None
    del queue, message
    gc.collect()
    assert float(kept[0]["block"].sum()) == 1 << 20, "a view keeps the memory alive"
    del kept
    gc.collect()
    assert shared_kib() - kib < 1024
    assert open_descriptors() == descriptors
