"""Objects that hold shared memory, on their way to a process that runs already: their descriptors go along."""

from __future__ import annotations

import io
import pickle
import socket
import threading
from multiprocessing import reduction
from multiprocessing.context import get_spawning_popen, set_spawning_popen
from typing import Any

from pearl.ipc.shared_buffer import SharedBuffer

_MOST_DESCRIPTORS = 250  # that one message may carry
_LENGTH_BYTES = 32
_received = threading.local()


class ObjectReceiver:
    """The other end of an `ObjectSender`: pass it to a process as it is spawned."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end

    def __reduce__(self) -> tuple[Any, ...]:
        if get_spawning_popen() is None:
            raise TypeError("An ObjectReceiver can only be passed to a process that is being spawned.")
        return _attach, (reduction.DupFd(self._socket.fileno()),)

    def receive(self, timeout_s: float) -> Any:
        """The next object; None if none comes in time. Raises EOFError when the sender is closed."""
        self._socket.settimeout(timeout_s)
        try:
            message, descriptors, _, _ = socket.recv_fds(self._socket, _LENGTH_BYTES, _MOST_DESCRIPTORS)
        except TimeoutError:
            return None
        if not message:
            raise EOFError("The sender is closed.")
        payload = SharedBuffer(int(message), _fd=descriptors[0])
        _received.descriptors = descriptors
        try:
            return pickle.loads(payload.memory)
        finally:
            del _received.descriptors

    def close(self) -> None:
        """Close this process's copy of the end."""
        self._socket.close()


class ObjectSender:
    """Sends objects, such as queues, to the one process that was given `receiver`. One thread sends."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.receiver = ObjectReceiver(theirs)

    def send(self, value: object) -> None:
        """Send `value`; OSError if the process is gone, or the objects hold too many descriptors."""
        parcel = _Parcel()
        pickled = parcel.pickled(value)
        payload = SharedBuffer(len(pickled))  # a message of the socket would be limited
        payload.memory[:] = pickled
        socket.send_fds(self._socket, [str(len(pickled)).encode()], [payload.descriptor, *parcel.descriptors])

    def close(self) -> None:
        """Let the receiver know that nothing more comes."""
        self._socket.close()


def _attach(descriptor: Any) -> ObjectReceiver:
    return ObjectReceiver(socket.socket(fileno=descriptor.detach()))


class _Parcel:
    """Collects the descriptors of what is pickled; asked as `multiprocessing` asks what spawns a process."""

    def __init__(self) -> None:
        self.descriptors: list[int] = []

    def pickled(self, value: object) -> bytes:
        file = io.BytesIO()
        set_spawning_popen(self)  # type: ignore[arg-type]
        try:
            reduction.dump(value, file)
        finally:
            set_spawning_popen(None)
        return file.getvalue()

    def duplicate_for_child(self, descriptor: int) -> int:
        """Asked by `reduction.DupFd`."""
        self.descriptors.append(descriptor)
        return len(self.descriptors)

    def DupFd(self, number: int) -> _Received:  # noqa: N802  (multiprocessing's name)
        """Asked by `reduction.DupFd`, with what `duplicate_for_child` returned."""
        return _Received(number)


class _Received:
    """A descriptor by its position in the message."""

    def __init__(self, number: int) -> None:
        self._number = number

    def detach(self) -> int:
        """The descriptor; the caller now owns it."""
        found: int = _received.descriptors[self._number]
        return found
