"""The queues' contract, for every class alike: between threads, between processes, and when a side closes or dies."""

from __future__ import annotations

import gc
import mmap
import multiprocessing
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
from queue_processes import (
    CLOSED,
    answer_all,
    assert_filled,
    consume,
    exit_with_rows,
    fill,
    produce,
    produce_and_close,
    produce_and_die,
    produce_until_closed,
    read_until,
)
from test_replay_manager import assert_same, assert_same_state, filled

from pearl import _native
from pearl.actors.served_policy import InferenceQueue
from pearl.backends.cpu.replay import NativeReplayManager
from pearl.errors import (
    ConfigurationError,
    PearlError,
    PriorityError,
    QueueClosedError,
    QueueError,
    QueueTimeoutError,
    ReplayError,
)
from pearl.ipc.queues import Bell, ColumnQueue, WeightSyncQueue
from pearl.ipc.shared_buffer import SharedBuffer
from pearl.local_sgd.local_learner import transition_queue
from pearl.replay import ReplayRequestQueue
from pearl.replay.protocol import Sample
from pearl.replay.reference import ReferenceReplayManager
from pearl.runtime.queues import DataCollectionQueue, batch_fields
from pearl.runtime.rollout_session import RolloutAssignmentQueue, RolloutDoneQueue
from pearl.runtime.workers import AssignmentQueue, DoneQueue, GrantQueue, ProgressQueue
from pearl.spec import FieldSpec, TransitionSpec

FIELDS = [
    FieldSpec("obs", (7, 3), "float32"),
    FieldSpec("flag", (5,), "uint8"),
    FieldSpec("action", (7,), "int64"),
    FieldSpec("scalar", (), "float64"),
]
TRANSITION = TransitionSpec((FieldSpec("obs", (3,), "float32"), FieldSpec("action", (), "int64")))
SPAWN = multiprocessing.get_context("spawn")

# Each makes a queue of so many slots that rings the bell.
WITH_BELL: dict[str, Callable[[int, Bell], ColumnQueue]] = {
    "columns": lambda slots, bell: ColumnQueue(FIELDS, slots, bell),
    "DCQ": lambda slots, bell: DataCollectionQueue(TRANSITION, 6, slots, bell),
    "done": lambda slots, bell: DoneQueue(4, slots, bell),
    "inference": lambda slots, bell: InferenceQueue(TRANSITION, 6, bell, slots),
    "progress": lambda slots, bell: ProgressQueue(slots, bell),
    "rollout done": lambda slots, bell: RolloutDoneQueue(bell, slots),
}
SILENT: dict[str, Callable[[int], ColumnQueue]] = {
    "without bell": lambda slots: ColumnQueue(FIELDS, slots),
    "assignments": lambda slots: AssignmentQueue(4, TRANSITION, slots),
    "assignments without data": lambda slots: AssignmentQueue(4, None, slots),
    "grants": lambda slots: GrantQueue(slots),
    "transitions": lambda slots: transition_queue(TRANSITION, 6, slots),
    "rollout assignments": lambda slots: RolloutAssignmentQueue(slots),
}
QUEUES = [*WITH_BELL, *SILENT]
each_queue = pytest.mark.parametrize("name", QUEUES)

Start = Callable[..., BaseProcess]


def queue_of(name: str, slots: int) -> ColumnQueue:
    return SILENT[name](slots) if name in SILENT else WITH_BELL[name](slots, Bell())


def started(target: Callable[..., None], *arguments: Any) -> BaseProcess:
    process = SPAWN.Process(target=target, args=arguments, daemon=True)
    process.start()
    return process


@pytest.fixture
def spawn() -> Iterator[Start]:
    processes: list[BaseProcess] = []

    def start(target: Callable[..., None], *arguments: Any) -> BaseProcess:
        processes.append(started(target, *arguments))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.join(30)


def test_every_class_is_held_to_the_contract() -> None:
    assert {type(queue_of(name, 1)) for name in QUEUES} == {ColumnQueue, *ColumnQueue.__subclasses__()}


# --- within a process -------------------------------------------------------------------------------------------------


@each_queue
def test_messages_come_whole_and_in_order_however_often_the_ring_turns(name: str) -> None:
    queue = queue_of(name, 3)
    producer = threading.Thread(target=produce_and_close, args=(queue, 0, 100))
    producer.start()
    assert [consume(queue) for _ in range(100)] == list(range(100))
    with pytest.raises(QueueClosedError):
        queue.peek(30.0)
    producer.join(30)
    assert not producer.is_alive()


@each_queue
def test_a_full_queue_holds_the_producer_back(name: str) -> None:
    queue = queue_of(name, 2)
    assert len(queue) == 0
    assert queue.peek() is None
    produce(queue, 0, 2)
    assert len(queue) == 2
    assert queue.reserve() is None
    start = time.monotonic()
    assert queue.reserve(0.05) is None
    assert 0.04 < time.monotonic() - start < 5.0
    with pytest.raises(QueueError, match="full"):
        queue.publish()
    assert queue.peek() is not None
    assert queue.reserve() is None, "the slot is the consumer's until it is released"
    assert consume(queue) == 0
    produce(queue, 2, 1)
    assert [consume(queue), consume(queue)] == [1, 2]
    with pytest.raises(QueueError, match="empty"):
        queue.release()


@each_queue
def test_a_slot_belongs_to_the_producer_until_it_is_published(name: str) -> None:
    queue = queue_of(name, 4)
    message = queue.reserve()
    assert message is not None
    fill(message, 5)
    assert queue.peek() is None
    again = queue.reserve()
    assert again is not None
    assert_filled(again, 5)
    queue.publish(5)
    assert consume(queue) == 5


@each_queue
def test_fields_do_not_overlap(name: str) -> None:
    message = queue_of(name, 2).reserve()
    assert message is not None
    for field in message:
        for column in message.values():
            column.fill(0)
        message[field].fill(1)
        assert {n for n, c in message.items() if c.any()} == {field}


@each_queue
def test_closing_wakes_both_sides(name: str) -> None:
    full, empty = queue_of(name, 1), queue_of(name, 1)
    produce(full, 0, 1)
    raised: list[BaseException] = []

    def wait(call: Callable[[float], object]) -> None:
        try:
            call(120.0)
        except QueueClosedError as error:
            raised.append(error)

    waiters = [threading.Thread(target=wait, args=(call,)) for call in (full.reserve, empty.peek)]
    for waiter in waiters:
        waiter.start()
    time.sleep(0.05)  # most likely asleep by now; if not, it finds the queue closed
    for queue in (full, empty):
        queue.close()
    for waiter in waiters:
        waiter.join(30)
        assert not waiter.is_alive()
    assert len(raised) == 2


@each_queue
def test_leaving_the_block_closes_and_what_was_published_is_still_read(name: str) -> None:
    with queue_of(name, 2) as queue:
        produce(queue, 3, 1)
    assert queue.native.closed
    with pytest.raises(QueueClosedError, match="closed"):
        queue.reserve()
    assert consume(queue) == 3
    with pytest.raises(QueueClosedError):
        queue.peek(10.0)


@each_queue
def test_native_code_and_python_may_be_the_two_sides(name: str) -> None:
    queue = queue_of(name, 3)
    for number in range(5):
        slot = queue.native.reserve()
        assert slot == 2 * number % 3
        assert queue.native.offset(slot) % 64 == 0
        fill(queue._views[slot], number)
        queue.native.publish(number)
        assert consume(queue) == number
        produce(queue, number, 1)
        assert queue.native.peek() == (slot + 1) % 3
        assert queue.native.count((slot + 1) % 3) == number
        queue.native.release()
    assert queue.native.peek() == -1


# --- the bell ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WITH_BELL)
def test_publications_and_closing_ring_the_bell(name: str) -> None:
    bell = Bell()
    first, second = (WITH_BELL[name](2, bell) for _ in range(2))
    seen = bell.value()
    assert not bell.wait(seen, 0.01)
    for action in (first.publish, second.publish, first.close):
        action()
        assert bell.wait(seen, 0.0)
        assert bell.value() != seen
        seen = bell.value()
    queue_of("without bell", 2).publish()
    assert not bell.wait(seen, 0.0), "a queue without a bell is silent"


def test_a_bell_wakes_a_waiting_thread() -> None:
    bell = Bell()
    seen = bell.value()
    woken: list[bool] = []
    waiter = threading.Thread(target=lambda: woken.append(bell.wait(seen, 30.0)))
    waiter.start()
    time.sleep(0.05)
    bell.ring()
    waiter.join(10)
    assert woken == [True]
    assert bell.wait(seen, 60.0), "a ring between looking and sleeping is not lost"


def test_interrupts_are_seen_while_waiting() -> None:
    # Whoever runs the tests in the background has SIGINT ignored.
    earlier = signal.signal(signal.SIGINT, signal.default_int_handler)
    bell = Bell()
    timer = threading.Timer(0.2, signal.raise_signal, (signal.SIGINT,))
    timer.start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        bell.wait(bell.value(), 30.0)
    signal.signal(signal.SIGINT, earlier)
    assert time.monotonic() - start < 10


# --- across processes -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def answered() -> Iterator[dict[str, tuple[ColumnQueue, ColumnQueue]]]:
    """Of each class a queue of requests, and the queue in which one process answers them."""
    pairs = {name: (queue_of(name, 2), queue_of(name, 3)) for name in QUEUES}
    process = started(answer_all, list(pairs.values()))
    yield pairs
    process.kill()
    process.join(30)


@each_queue
def test_a_process_answers_and_sees_that_its_requests_are_closed(
    name: str, answered: dict[str, tuple[ColumnQueue, ColumnQueue]]
) -> None:
    requests, answers = answered[name]
    for number in range(200):
        produce(requests, number, 1)
        assert consume(answers) == number + 1
    requests.close()
    with pytest.raises(QueueClosedError):
        answers.peek(60.0)


def test_closing_wakes_a_producer_in_another_process(spawn: Start) -> None:
    queue = queue_of("columns", 1)
    process = spawn(produce_until_closed, queue)
    assert queue.peek(60.0) is not None
    queue.close()
    process.join(60)
    assert process.exitcode == CLOSED


def test_a_new_producer_goes_on_after_a_killed_one(spawn: Start) -> None:
    queue = queue_of("columns", 4)
    victim = spawn(produce_and_die, queue, 2)
    victim.join(60)
    assert victim.exitcode == -signal.SIGKILL
    assert len(queue) == 2, "only what was being written is lost"
    spawn(produce_and_close, queue, 2, 10)
    assert [consume(queue) for _ in range(12)] == list(range(12))
    with pytest.raises(QueueClosedError):
        queue.peek(60.0)


def test_a_sleeping_host_wakes_for_another_processs_message(spawn: Start) -> None:
    bell = Bell()
    queues = [ColumnQueue(FIELDS, 2, bell) for _ in range(2)]
    for first, queue in enumerate(queues):
        spawn(produce_and_close, queue, 1000 * first, 500)
    received: list[list[int]] = [[], []]
    open_queues = {0, 1}
    while open_queues:
        seen = bell.value()
        progressed = False
        for index in sorted(open_queues):
            try:
                if queues[index].peek() is None:
                    continue
            except QueueClosedError:
                open_queues.remove(index)
            else:
                received[index].append(consume(queues[index]))
            progressed = True
        if not progressed:
            assert bell.wait(seen, 60.0), "no message and no bell"
    assert received == [list(range(500)), list(range(1000, 1500))]


# --- what messages hold -----------------------------------------------------------------------------------------------


def test_a_dcq_message_holds_rows_of_transitions_and_the_episodes_that_ended(spawn: Start) -> None:
    queue = DataCollectionQueue(TRANSITION, rows=6, slots=1)
    message = queue.reserve()
    assert message is not None
    assert {name: (c.shape, str(c.dtype)) for name, c in message.items()} == {
        "obs": ((6, 3), "float32"),
        "action": ((6,), "int64"),
        "episode_return": ((6,), "float64"),
        "episode_length": ((6,), "int64"),
        "counts": ((4,), "int64"),
        "span": ((2,), "float64"),
    }
    process = spawn(exit_with_rows, queue)
    process.join(60)
    assert process.exitcode == 6


def test_an_assignment_may_leave_the_transitions_out() -> None:
    sampled = {"batch": "int64", "indices": "int64", "weights": "float32", "generations": "uint32"}
    assert {f.name: f.dtype for f in batch_fields(4, None)} == sampled
    fields = {f.name: f for f in batch_fields(4, TRANSITION)}
    assert list(fields) == [*sampled, "obs", "action"]
    assert fields["obs"].shape == (4, 3)


def test_a_reader_that_no_longer_reads_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ColumnQueue, "reserve", lambda queue, timeout_s: None)  # nothing was free for that long
    sample = Sample(np.zeros(4, np.int64), np.zeros(4, np.float32), np.zeros(4, np.uint32))
    with pytest.raises(PearlError, match="Learner did not take its next batch for 60 s"):
        AssignmentQueue(4, None, 1).assign(sample)
    with pytest.raises(PearlError, match="training loop did not take its next grant for 60 s"):
        GrantQueue(1).grant(1, 0.4)


# --- WSQ --------------------------------------------------------------------------------------------------------------


def test_each_reader_gets_the_newest_weights_once() -> None:
    wsq = WeightSyncQueue(3)
    readers = [wsq, wsq.reader()]
    assert [reader.poll() for reader in readers] == [None, None]
    for version in (1, 2):
        assert wsq.write(np.full(3, version, np.float32)) == version
        for reader in readers:
            found = reader.poll()
            assert found is not None
            assert found.dtype == np.float32
            assert found.tolist() == [version] * 3
            assert reader.version == version
            assert reader.poll() is None
    wsq.write(np.full(3, 3, np.float32))
    wsq.write(np.full(3, 4, np.float32))
    for reader in (*readers, wsq.reader()):
        newest = reader.poll()
        assert newest is not None
        assert newest.tolist() == [4] * 3


def test_readers_in_other_processes_never_see_torn_weights(spawn: Start) -> None:
    count, versions = 20_001, 3000
    wsq = WeightSyncQueue(count)
    ready = [ColumnQueue(FIELDS[:1], 1) for _ in range(2)]
    readers = [spawn(read_until, wsq, queue, versions) for queue in ready]
    for queue in ready:
        assert queue.peek(60.0) is not None
    weights = np.empty(count, np.float32)
    for version in range(1, versions + 1):
        weights.fill(version)
        assert wsq.write(weights) == version
    for reader in readers:
        reader.join(60)
        assert reader.exitcode == 0


def test_snapshots_take_and_give_whole_payloads() -> None:
    wsq = WeightSyncQueue(3)
    with pytest.raises(QueueError, match="must have 12 bytes; found 8"):
        wsq.write(np.zeros(2, np.float32))
    assert wsq.write(np.array([1, 2, 3], np.float32)) == wsq.native.version == 1
    out = np.zeros(3, np.float32)
    assert wsq.native.read(out, 0) == 1
    assert out.tolist() == [1, 2, 3]
    out[:] = 0
    assert wsq.native.read(out, 1) == 1
    assert out.tolist() == [0, 0, 0], "nothing newer is nothing to copy"


# --- memory -----------------------------------------------------------------------------------------------------------


def test_memory_is_zeroed_and_writeable() -> None:
    buffer = SharedBuffer(1000)
    assert len(buffer.memory) == buffer.nbytes == 1000
    assert buffer.memory[:] == bytes(1000)
    buffer.memory[999] = 7
    assert buffer.memory[999] == 7


@pytest.mark.parametrize("name", ["buffer", "bell", "wsq", *QUEUES])
def test_what_is_shared_can_only_be_passed_to_a_process_being_spawned(name: str) -> None:
    others: dict[str, Callable[[], object]] = {
        "buffer": lambda: SharedBuffer(64), "bell": Bell, "wsq": lambda: WeightSyncQueue(4),
    }  # fmt: skip
    shared = others[name]() if name in others else queue_of(name, 2)
    with pytest.raises(TypeError, match="can only be passed to a process that is being spawned"):
        pickle.dumps(shared)


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


def test_a_ring_checks_the_memory_that_it_is_given() -> None:
    memory = bytearray(_native.SlotQueue.nbytes(4, 64))
    with pytest.raises(QueueError, match="was not created in this buffer"):
        _native.SlotQueue(memory, 4, 64, False)
    queue = _native.SlotQueue(memory, 4, 64, True)
    with pytest.raises(QueueError, match=r"Slot must lie in \[0, 4\); found 4"):
        queue.offset(4)
    with pytest.raises(QueueError, match="expected 2, found 4"):
        _native.SlotQueue(memory, 2, 64, False)
    with pytest.raises(QueueError, match=r"needs a buffer of \d+ bytes; found 10"):
        _native.SlotQueue(bytearray(10), 4, 64, True)
    with pytest.raises(QueueError, match="needs zeroed memory"):
        _native.Doorbell(memory)
    with pytest.raises(BufferError):
        _native.SlotQueue(bytes(memory), 4, 64, False)


def test_a_ring_keeps_its_memory_alive() -> None:
    memory = mmap.mmap(-1, _native.SlotQueue.nbytes(2, 64))
    queue = _native.SlotQueue(memory, 2, 64, True)
    with pytest.raises(BufferError):
        memory.close()
    del queue
    memory.close()


# --- RRQ --------------------------------------------------------------------------------------------------------------


@pytest.fixture(params=[(NativeReplayManager, "autorun"), (ReferenceReplayManager, "autorun"),
                        (NativeReplayManager, "inline")], ids=["native", "thread", "inline"])  # fmt: skip
def make_queue(request):
    manager, executor = request.param
    queues = []

    def make(replay=None, **options):
        queues.append(ReplayRequestQueue(replay or filled(manager, seed=6), executor=executor, **options))
        return queues[-1]

    make.manager, make.executor = manager, executor
    yield make
    for queue in queues:
        queue.close()


def test_requests_give_what_direct_calls_give(make_queue):
    direct, queue = filled(NativeReplayManager, seed=6), make_queue(max_batch=16)
    for i in range(50):
        queue.write_sample(16, beta=0.5)
        queue.drain()
        sample = queue.poll()
        assert_same(sample, direct.sample(16, beta=0.5))
        values = np.linspace(0, i, 16, dtype=np.float32)
        queue.write_update(sample.indices, values, sample.generations)
        values[:] = np.nan  # arrays were copied
        direct.update(sample.indices, np.linspace(0, i, 16, dtype=np.float32), sample.generations)
        if i % 5 == 0:
            queue.write_insert(np.arange(i, i + 40))
            direct.insert(np.arange(i, i + 40))
    queue.drain()
    assert queue.poll() is None
    assert queue.pending() == 0
    assert_same_state(queue.manager, direct)


def test_unpolled_samples_are_bounded(make_queue):
    queue = make_queue(depth=3)
    for _ in range(3):
        queue.write_sample(4)
    with pytest.raises(QueueTimeoutError, match="3 samples wait to be polled"):
        queue.write_sample(4)
    queue.drain()
    assert queue.poll() is not None
    queue.write_sample(4)


def test_wrong_requests_raise_where_they_are_written_or_polled(make_queue):
    queue = make_queue(replay=make_queue.manager(10))
    if make_queue.executor == "inline":
        with pytest.raises(ReplayError, match="empty"):
            queue.write_sample(4)
        return
    queue.write_sample(4)
    queue.drain()
    with pytest.raises(ReplayError, match="empty"):
        queue.poll()
    assert queue.poll() is None
    queue.write_insert([1, 2])
    queue.write_sample(4)
    queue.drain()
    assert set(queue.poll().indices.tolist()) == {1, 2}


def test_wrong_arrays_raise_where_they_are_written(make_queue):
    queue = make_queue()
    with pytest.raises(PriorityError, match="at position 1"):
        queue.write_update([0, 1], [1.0, np.nan])
    with pytest.raises(PriorityError, match="at position 0"):
        queue.write_insert([0, 1], [-1.0, 1.0])
    with pytest.raises(ReplayError, match=r"must lie in \[0, 100\); found 100"):
        queue.write_insert([100])
    with pytest.raises(ReplayError, match="batch_size must be at least 1"):
        queue.write_sample(0)
    assert queue.pending() == 0


def test_closing_finishes_what_is_queued(make_queue):
    with make_queue() as queue:
        queue.write_update([0], [50.0])
        queue.write_sample(4)
    assert queue.manager.retrieve([0])[0] == 50.0
    assert len(queue.poll().indices) == 4
    with pytest.raises(QueueClosedError):
        queue.write_sample(4)


def test_each_response_rings_the_bell(make_queue):
    from pearl import _native

    bell = _native.Doorbell(bytearray(_native.Doorbell.nbytes))
    queue = make_queue()
    queue.attach_bell(bell)
    seen = bell.value()
    queue.write_sample(4)
    assert bell.wait(seen, 10.0)
    assert queue.poll() is not None


def test_unknown_executors_are_refused():
    with pytest.raises(ConfigurationError, match="'fast'"):
        ReplayRequestQueue(ReferenceReplayManager(4), executor="fast")
