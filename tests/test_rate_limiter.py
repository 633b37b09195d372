"""The rate limiter, against the inequality that it is to keep."""

from __future__ import annotations

import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pearl.errors import ConfigurationError, PearlError, QueueClosedError, QueueTimeoutError
from pearl.replay.rate_limiter import RateLimiter


@settings(max_examples=200, deadline=None)
@given(
    ratio=st.sampled_from([0.25, 1.0, 1.5, 8.0]),
    min_size=st.integers(1, 20),
    buffer=st.floats(8, 100),
    requests=st.lists(st.tuples(st.sampled_from(["insert", "sample"]), st.integers(0, 12)), max_size=60),
)
def test_what_is_let_through_keeps_the_bounds(ratio, min_size, buffer, requests):
    limiter = RateLimiter(ratio, min_size, buffer)
    inserted = sampled = timeouts = 0
    low, high = ratio * min_size - buffer, ratio * min_size + buffer
    assert limiter.bounds == (low, high)
    for side, count in requests:
        if side == "insert":
            allowed = inserted + count <= min_size or (inserted + count) * ratio - sampled <= high
            assert limiter.can_insert(count) == allowed
            wait = limiter.await_insert
        else:
            allowed = inserted >= min_size and inserted * ratio - sampled - count >= low
            assert limiter.can_sample(count) == allowed
            wait = limiter.await_sample
        if allowed:
            wait(count, timeout_s=0.0)
            inserted, sampled = inserted + count * (side == "insert"), sampled + count * (side == "sample")
        else:
            timeouts += 1
            with pytest.raises(QueueTimeoutError):
                wait(count, timeout_s=0.0)
        found = limiter.statistics()
        assert (found.inserted, found.sampled, found.diff) == (inserted, sampled, inserted * ratio - sampled)
        assert found.insert_timeouts + found.sample_timeouts == timeouts


@settings(max_examples=100, deadline=None)
@given(ratio=st.floats(0.01, 100), min_size=st.integers(1, 50))
def test_single_items_never_block_both_sides(ratio, min_size):
    limiter = RateLimiter(ratio, min_size, max(1.0, ratio))
    for _ in range(500):
        if limiter.can_sample():
            limiter.await_sample()
        else:
            assert limiter.can_insert()
            limiter.await_insert()


def test_a_timeout_says_who_waits_for_what():
    limiter = RateLimiter(2.0, 10, 5.0)
    with pytest.raises(
        QueueTimeoutError,
        match=r"Sampling 4 items waited 0 s for insertion: 10 items must be inserted first; found 0",
    ):
        limiter.await_sample(4, 0.0)
    limiter.await_insert(10)
    with pytest.raises(
        QueueTimeoutError,
        match=r"Inserting 3 items waited 0.01 s for sampling to catch up: with 10 items inserted and 0 sampled, "
        r"2 samples per insert, the difference would rise to 26, above 25\. Is sampling still running\?",
    ):
        limiter.await_insert(3, 0.01)
    with pytest.raises(QueueTimeoutError, match="the difference would fall to 14, below 15"):
        limiter.await_sample(6, 0.0)
    assert limiter.statistics().insert_waited_s >= 0.01


def test_threads_share_the_work_in_the_ratio():
    limiter = RateLimiter(4.0, 100, 64.0)
    worst = [math.inf, -math.inf]
    stop = threading.Event()

    def watch():
        while not stop.is_set():
            statistics = limiter.statistics()
            if statistics.inserted >= 100:
                worst[:] = min(worst[0], statistics.diff), max(worst[1], statistics.diff)

    def insert():
        for _ in range(200):
            limiter.await_insert(5, 30.0)

    def sample():
        for _ in range(95):
            limiter.await_sample(16, 30.0)

    with ThreadPoolExecutor(8) as pool:
        watcher = pool.submit(watch)
        work = [pool.submit(insert), pool.submit(insert), *(pool.submit(sample) for _ in range(5))]
        try:
            for future in work:
                future.result(60)
        finally:
            stop.set()
            watcher.result(10)
    assert (limiter.statistics().inserted, limiter.statistics().sampled) == (2000, 7600)
    low, high = limiter.bounds
    assert low <= worst[0] <= worst[1] <= high


def test_a_waiting_side_goes_on_when_the_other_has_caught_up():
    limiter = RateLimiter(1.0, 5, 5.0)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(limiter.await_sample, 3, 30.0)
        time.sleep(0.02)
        assert not waiting.done()
        limiter.await_insert(5)
        assert waiting.result(30) is None
    assert limiter.statistics().sampled == 3
    assert (limiter.statistics().sample_waits, limiter.statistics().insert_waits) == (1, 0)


def test_a_new_configuration_frees_whoever_waits():
    limiter = RateLimiter(1.0, 1000, 5.0)
    limiter.await_insert(10)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(limiter.await_sample, 8, 30.0)
        time.sleep(0.02)
        assert not waiting.done()
        limiter.reconfigure(min_size=10)
        assert not waiting.done()  # the bounds moved along: 10 - 5 is the least
        limiter.reconfigure(error_buffer=20.0)
        assert waiting.result(30) is None
    assert (limiter.samples_per_insert, limiter.min_size, limiter.bounds) == (1.0, 10, (-10.0, 30.0))
    limiter.reconfigure(samples_per_insert=3.0)
    assert limiter.bounds == (10.0, 50.0)
    with pytest.raises(ConfigurationError):
        limiter.reconfigure(min_size=20, error_buffer=0.0)
    assert limiter.min_size == 10


def test_closing_wakes_whoever_waits():
    limiter = RateLimiter(1.0, 5, 5.0)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(limiter.await_sample, 1, 30.0)
        time.sleep(0.02)
        limiter.close()
        limiter.close()
        with pytest.raises(QueueClosedError, match="closed while Sampling waited"):
            waiting.result(30)
    with pytest.raises(QueueClosedError):
        limiter.await_insert()


def test_the_default_only_waits_for_the_first_items():
    limiter = RateLimiter(1.0, 3)
    assert not limiter.can_sample()
    limiter.await_insert(3)
    assert limiter.can_sample(10**9)
    assert limiter.can_insert(10**9)
    limiter.restore(inserted=2, sampled=0)
    assert not limiter.can_sample()


def test_a_pair_bounds_both_sides_apart():
    assert RateLimiter(2.0, 10, (4.0, 30.0)).bounds == (16.0, 50.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0.0,), "samples_per_insert must be a number above 0"),
        ((math.nan,), "samples_per_insert"),
        ((math.inf,), "samples_per_insert"),
        ((1.0, 0), "min_size must be a whole number of at least 1; found 0"),
        ((1.0, 1.5), "min_size"),
        ((1.0, True), "min_size"),
        ((4.0, 1, 3.9), "error_buffer must be at least 4"),
        ((1.0, 1, math.nan), "error_buffer"),
        ((1.0, 1, (-1.0, 9.0)), "error_buffer"),
    ],
)
def test_values_that_cannot_work_are_refused(arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        RateLimiter(*arguments)


@pytest.mark.parametrize("count", [-1, 1.5, True])
def test_counts_are_whole_numbers(count):
    limiter = RateLimiter(1.0)
    for ask in (limiter.can_insert, limiter.can_sample, limiter.await_insert, limiter.await_sample):
        with pytest.raises(PearlError, match="count of items"):
            ask(count)
