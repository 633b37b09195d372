"""Learners that processes run in the tests of averaging."""

from __future__ import annotations

import time

import numpy as np

from pearl.actors.report import Report
from pearl.errors import QueueClosedError
from pearl.local_sgd.shared_memory import Link, SharedMemoryAverager


def count_up(link: Link, report: Report, step_s: float = 0.0) -> None:
    """Add 1 to every parameter, and average; the report has the last version and its first parameter."""
    averager = SharedMemoryAverager(link, link.layout)
    parameters = averager.join().parameters.copy()
    report.ready()
    try:
        while True:
            time.sleep(step_s)
            averager.beat()
            report.beat()
            found = averager.average(parameters + 1, np.zeros(1))
            parameters = found.parameters.copy()
            report.deliver([found.version, float(parameters[0])])
    except QueueClosedError:
        return


def stop_beating(link: Link, report: Report) -> None:
    """Take part, and then hang."""
    SharedMemoryAverager(link, link.layout).join()
    report.ready()
    time.sleep(1000.0)


def raise_error(trainer: object) -> None:
    """A Learner that cannot be made."""
    raise RuntimeError("no learner here")
