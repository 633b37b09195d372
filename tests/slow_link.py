"""A cable of Ethernet that is slow and narrow: two TAP devices, and a process that carries frames between them.

Kernels without netem can delay nothing, but nearly all have TAP devices. Needs root.
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
import subprocess
import sys
import time
from collections import deque

_TUNSETIFF, _IFF_TAP_WITHOUT_HEADER = 0x400454CA, 0x1002
_FRAME = 65536
_MOST_WAITING = 1 << 20  # bytes; what comes on top is lost, as in a switch


class SlowLink:
    """Devices `ends` that are connected: frames take `latency_s`, and each direction carries `bytes_per_s`."""

    def __init__(self, ends: tuple[str, str], latency_s: float, bytes_per_s: float) -> None:
        descriptors = [_tap(name) for name in ends]
        arguments = [*map(str, descriptors), str(latency_s), str(bytes_per_s)]
        self._process = subprocess.Popen([sys.executable, __file__, *arguments], pass_fds=descriptors)
        for descriptor in descriptors:
            os.close(descriptor)

    def close(self) -> None:
        """Remove the devices."""
        self._process.kill()
        self._process.wait()


def _tap(name: str) -> int:
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH14x", name.encode(), _IFF_TAP_WITHOUT_HEADER))
    return descriptor


class _Direction:
    def __init__(self, source: int, target: int, latency_s: float, bytes_per_s: float) -> None:
        self.source, self._target, self._latency_s, self._bytes_per_s = source, target, latency_s, bytes_per_s
        self._waiting: deque[tuple[float, bytes]] = deque()
        self._bytes, self._free_at = 0, 0.0

    def take(self, now: float) -> None:
        while True:
            try:
                frame = os.read(self.source, _FRAME)
            except OSError:  # there is nothing, or this end is down
                return
            if self._bytes + len(frame) > _MOST_WAITING:
                continue
            self._free_at = max(now, self._free_at) + len(frame) / self._bytes_per_s
            self._waiting.append((self._free_at + self._latency_s, frame))
            self._bytes += len(frame)

    def give(self, now: float) -> float:
        """Pass on what is due; seconds until more is."""
        while self._waiting and self._waiting[0][0] <= now:
            _, frame = self._waiting.popleft()
            self._bytes -= len(frame)
            try:
                os.write(self._target, frame)
            except OSError:  # the other end is down
                continue
        return self._waiting[0][0] - now if self._waiting else 1.0


def _carry(first: int, second: int, latency_s: float, bytes_per_s: float) -> None:
    ways = [_Direction(*ends, latency_s, bytes_per_s) for ends in ((first, second), (second, first))]
    poll = select.epoll()
    for way in ways:
        poll.register(way.source, select.EPOLLIN)
    wait_s = 1.0
    while True:
        poll.poll(max(0.0, wait_s))
        now = time.monotonic()
        for way in ways:
            way.take(now)
        wait_s = min(way.give(now) for way in ways)


if __name__ == "__main__":
    _carry(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4]))
