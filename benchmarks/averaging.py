"""Milliseconds of one average between two Learner processes: shared memory, and all_reduce of gloo.

`python -m benchmarks.averaging` prints the table of docs/local_sgd.md. Both run in processes of their own, one after
the other for each size, and hand back the averages in the array that was averaged.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable

import numpy as np

from pearl.actors.child_process import ChildProcess
from pearl.actors.report import Report
from pearl.local_sgd.averaging import AveragingSpec
from pearl.local_sgd.parameters import ParameterLayout
from pearl.local_sgd.shared_memory import AveragingServer, Link, SharedMemoryAverager

SIZES = {100_000: 200, 5_000_000: 30}  # floats, and averages of so many
LEARNERS = 2
DROPPED = 3  # the first, which touch the memory
LONGEST_S = 300.0


def timed(average: Callable[[], None], repeats: int, report: Report) -> None:
    """Deliver the seconds of each of `repeats` calls."""
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        average()
        seconds.append(time.perf_counter() - start)
    report.deliver(seconds)


def in_shared_memory(link: Link, repeats: int, report: Report) -> None:
    """Main function of a Learner's process."""
    averager = SharedMemoryAverager(link, link.layout)
    averager.join()
    parameters = np.ones(link.layout.count, np.float32)

    def average() -> None:
        parameters[...] = averager.average(parameters, np.zeros(1)).parameters

    timed(average, repeats, report)
    averager.leave()


def in_gloo(rank: int, port: int, count: int, repeats: int, report: Report) -> None:
    """The same with torch.distributed."""
    import torch

    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.distributed.init_process_group("gloo", rank=rank, world_size=LEARNERS)
    parameters = torch.ones(count)

    def average() -> None:
        torch.distributed.all_reduce(parameters)
        parameters.div_(LEARNERS)

    timed(average, repeats, report)
    torch.distributed.destroy_process_group()


def milliseconds(start: Callable[[int, Report], ChildProcess], repeats: int) -> np.ndarray:
    """The times of the first Learner `(repeats - DROPPED,)`."""
    reports = [Report(repeats) for _ in range(LEARNERS)]
    processes = [start(rank, report) for rank, report in enumerate(reports)]
    for process in processes:
        if not process.wait(LONGEST_S) or process.exit_code != 0:
            raise RuntimeError(f"{process.name} did not end well: {process.cause_of_death}.")
    result = reports[0].result
    assert result is not None
    return np.array(result[DROPPED:]) * 1e3


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def main() -> None:
    """Measure and print."""
    print(f"{'floats':>10}  {'':13}  {'p20':>7}  {'p50':>7}  {'p80':>7}    n   (ms)")
    for count, repeats in SIZES.items():
        layout = ParameterLayout((("parameters", (count,)),))
        server = AveragingServer(AveragingSpec(LEARNERS, timeout_s=60.0), layout, np.zeros(count, np.float32))
        links = [server.link(rank) for rank in range(LEARNERS)]
        server.launch()

        def start_shared(rank: int, report: Report, links: list[Link] = links, repeats: int = repeats) -> ChildProcess:
            return ChildProcess(in_shared_memory, (links[rank], repeats, report), f"shared-{rank}")

        port = free_port()

        def start_gloo(
            rank: int, report: Report, port: int = port, count: int = count, repeats: int = repeats
        ) -> ChildProcess:
            return ChildProcess(in_gloo, (rank, port, count, repeats, report), f"gloo-{rank}")

        shared = milliseconds(start_shared, repeats)
        server.close()
        for name, found in (("shared memory", shared), ("gloo", milliseconds(start_gloo, repeats))):
            low, middle, high = np.percentile(found, (20, 50, 80))
            print(f"{count:>10,}  {name:13}  {low:7.2f}  {middle:7.2f}  {high:7.2f}  {len(found):3}")


if __name__ == "__main__":
    main()
