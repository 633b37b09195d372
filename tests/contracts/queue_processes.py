"""What the other processes of test_queue.py run. It imports little, so that they start quickly."""

from __future__ import annotations

import os
import signal
import threading

import numpy as np

from pearl.errors import QueueClosedError
from pearl.ipc.queues import ColumnQueue, WeightSyncQueue

CLOSED = 7  # exit code of a process that a closed queue ended


def content(column: np.ndarray, place: int, number: int) -> np.ndarray:
    return ((np.arange(column.size) + 31 * place + 7 * number) % 251).reshape(column.shape)


def fill(message: dict[str, np.ndarray], number: int) -> None:
    """Write values that depend on the message's number, the field and the place in it."""
    for place, column in enumerate(message.values()):
        column[...] = content(column, place, number)


def assert_filled(message: dict[str, np.ndarray], number: int) -> None:
    for place, (name, column) in enumerate(message.items()):
        np.testing.assert_array_equal(column, content(column, place, number), err_msg=f"{name} of message {number}")


def produce(queue: ColumnQueue, first: int, count: int) -> None:
    for number in range(first, first + count):
        message = queue.reserve(60.0)
        assert message is not None
        fill(message, number)
        queue.publish(number)


def produce_and_close(queue: ColumnQueue, first: int, count: int) -> None:
    produce(queue, first, count)
    queue.close()


def produce_and_die(queue: ColumnQueue, count: int) -> None:
    """Die while writing the message after the last."""
    produce(queue, 0, count)
    message = queue.reserve(60.0)
    assert message is not None
    next(iter(message.values())).fill(255)
    os.kill(os.getpid(), signal.SIGKILL)


def produce_until_closed(queue: ColumnQueue) -> None:
    try:
        produce(queue, 0, 1000)
    except QueueClosedError:
        os._exit(CLOSED)


def consume(queue: ColumnQueue) -> int:
    """Check and release the next message; its number."""
    found = queue.peek(60.0)
    assert found is not None
    assert_filled(*found)
    queue.release()
    return found[1]


def answer(requests: ColumnQueue, answers: ColumnQueue) -> None:
    """Answer message n with message n + 1 until `requests` is closed, then close `answers`."""
    with answers:
        try:
            while True:
                produce(answers, consume(requests) + 1, 1)
        except QueueClosedError:
            return


def answer_all(pairs: list[tuple[ColumnQueue, ColumnQueue]]) -> None:
    threads = [threading.Thread(target=answer, args=pair) for pair in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def exit_with_rows(queue: ColumnQueue) -> None:
    os._exit(queue.rows)  # type: ignore[attr-defined]


def read_until(wsq: WeightSyncQueue, ready: ColumnQueue, last: int) -> None:
    """Exit with 0 if every snapshot was of one version, versions rose, and version `last` was seen."""
    ready.publish()
    newest = 0.0
    while newest < last:
        weights = wsq.poll()
        if weights is None:
            continue
        if weights.min() != weights.max() or weights[0] <= newest:
            os._exit(1)
        newest = float(weights[0])
    os._exit(0)
