"""Connects the Ray actor that runs a Learner with the run's queues, its link and its report (`ProcessSetup`).

Three threads for each Learner: news come in, averages and transitions go out.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from pearl.atomic_file import replace_file
from pearl.errors import QueueClosedError
from pearl.local_sgd.averaging import Average
from pearl.local_sgd.local_learner import BETA, PROGRESS, LearnerSetup, ProcessSetup, TransitionQueue
from pearl.remote.bridge import PLACED_S, POLL_S, Bridge, EndedError, Relay, RemoteWords
from pearl.remote.learner_worker import (
    PIECE_BYTES,
    SAVED,
    LearnerReply,
    LearnerWork,
    Orders,
    RemoteLearner,
    Transitions,
)
from pearl.remote.placing import on_node

_AHEAD = 2  # calls for news under way: one waits on the node while the answer of the other travels
_MOST_BYTES = 1 << 20  # of transitions in a message, about
_LONGEST_S = 0.05  # of the wait for more transitions
_QUEUE_BYTES, _FEWEST_MESSAGES = 16 << 20, 4  # of transitions that wait on the node
_UNJOINED_S = 0.05  # between averages for a Learner that takes no part yet
_PARTING_S = 1.0  # for a Learner to remove its files
_GROUPS = {"news": 1, "averages": 1, "transitions": 1}
_NUMBER = 1  # a line has one process: its replacement gets a line of its own


@dataclass(frozen=True)
class LearnerLine:
    """The connection of one Learner's process with the host.

    It takes `cpus` CPUs of its node. `node` is where it is to run; None: any node.
    """

    name: str
    work: LearnerWork
    shared: ProcessSetup
    words: RemoteWords
    cpus: int
    node: str | None = None

    def relays(self, bridge: Bridge) -> Sequence[Relay]:
        """See `Work`."""
        return [_LearnerRelay(bridge, self)]


def messages_ahead(setup: LearnerSetup, queue: TransitionQueue) -> int:
    """Most messages of transitions on the way to a Learner or waiting there: those that it takes between two averages.

    More would only be trained on later. With few Actors, messages are not full.
    """
    rows = setup.spec.average_every * setup.share / setup.replay_ratio
    wanted = math.ceil(setup.spec.learners * rows / queue.rows) + 2
    return int(np.clip(wanted, _FEWEST_MESSAGES, max(_FEWEST_MESSAGES, _QUEUE_BYTES // queue.message_bytes)))


class _LearnerRelay(Relay):
    def __init__(self, bridge: Bridge, line: LearnerLine) -> None:
        super().__init__(bridge, line.name, line.words)
        self._line, self._shared = line, line.shared
        self._beats = -1
        self._saved = 0
        self._sent = self._taken = 0  # messages of transitions
        self._room = threading.Event()
        self._is_served = True
        self._is_open = True
        self._end: EndedError | None = None  # as a thread that sends found it
        # The node has further room, for the transitions that wait here when the run ends.
        self._ahead = line.work.slots - line.shared.transitions.slots

    def run(self) -> None:
        report = self._shared.report
        try:
            self._serve()
        except EndedError as end:
            report.fail(str(end))
        except QueueClosedError:
            pass
        except BaseException as error:
            self.bridge.failure = error
        self.say_ended(_NUMBER)
        self._shared.bell.ring()

    @property
    def is_over(self) -> bool:
        return not self._is_served or bool(self._shared.link.messages.native.closed) or self.bridge.is_over

    def _serve(self) -> None:
        make = self.ray.remote(
            num_cpus=self._line.cpus,
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy="SPREAD",
            concurrency_groups=_GROUPS,
        )(RemoteLearner)
        self._actor = on_node(self.ray, make, self._line.node).remote()
        threads = [
            threading.Thread(target=self._guarded, args=(run,), name=f"{self.name}-{run.__name__}", daemon=True)
            for run in (self._send_averages, self._send_transitions)
        ]
        try:
            self.check_node(self.get(self._actor.about.remote(), _NUMBER, PLACED_S))
            self._send_initial_state()
            self._version = -1
            self._call("start", self._line.work, self._newest_average())
            for thread in threads:
                thread.start()
            self._hear()
        finally:
            self._is_served = False
            self._room.set()
            self._shared.link.averages.bell.ring()
            for thread in threads:
                if thread.ident is not None:
                    thread.join()
            with contextlib.suppress(self.ray.exceptions.RayError):
                self.ray.get(self._actor.clean_up.remote(), timeout=_PARTING_S)
            self.ray.kill(self._actor, no_restart=True)

    def _guarded(self, run: Callable[[], None]) -> None:
        try:
            run()
        except EndedError as end:
            self._end = end  # the Learner itself may live, but would wait for what was not sent
        except QueueClosedError:
            pass
        except BaseException as error:
            self.bridge.failure = error

    def _call(self, method: str, *arguments: Any, group: str | None = None) -> Any:
        call = getattr(self._actor, method)
        return self.get((call if group is None else call.options(concurrency_group=group)).remote(*arguments), _NUMBER)

    # --- news -------------------------------------------------------------------------------------------------------

    def _hear(self) -> None:
        """Pass on the Learner's news until it ends; EndedError with its error if it fails."""
        take = self._actor.take.options(concurrency_group="news")
        under_way: deque[Any] = deque()
        while True:
            while len(under_way) < _AHEAD:
                under_way.append(take.remote())
            reply: LearnerReply = self.get(under_way.popleft(), _NUMBER)
            self._pass_on(reply)
            if self._end is not None and not reply.has_ended:
                raise self._end
            if reply.has_ended:
                if reply.has_failed:
                    raise EndedError(reply.failure or "It failed.")
                return

    def _pass_on(self, reply: LearnerReply) -> None:
        shared = self._shared
        if len(reply.words):
            shared.link.words[:] = reply.words
        if reply.handed_in is not None:
            self._hand_in(reply.handed_in)
        if reply.taken != self._taken:
            self._taken = reply.taken
            self._room.set()
        if reply.beats != self._beats:
            self._beats = reply.beats
            shared.report.beat()
        if reply.is_ready and not shared.report.is_ready:
            shared.report.ready()
            shared.bell.ring()
        if reply.numbers is not None:
            self._deliver(list(reply.numbers), reply.failure)

    def _hand_in(self, handed_in: Any) -> None:
        messages = self._shared.link.messages
        while (message := messages.reserve(POLL_S)) is None:  # one that came too late is not taken yet
            if self.is_over:
                raise QueueClosedError("The run is over.")
        for name, array in handed_in.items():
            message[name][...] = array
        messages.publish()

    def _deliver(self, numbers: list[float], failure: str | None) -> None:
        """Tell the host the Learner's progress, once a state that it has written is here."""
        report, saved = self._shared.report, int(numbers[SAVED])
        if saved != self._saved:
            self._saved = saved
            if saved > 0:
                failure = self._fetch_state()
            if failure is not None:
                report.fail(failure)
                self._saved = -abs(saved)
        numbers[SAVED] = self._saved
        report.deliver(numbers)
        self._shared.bell.ring()

    # --- averages and transitions -----------------------------------------------------------------------------------

    def _newest_average(self) -> Average:
        average = self._shared.link.averages.copied()
        self._version = average.version
        return average

    def _send_averages(self) -> None:
        averages = self._shared.link.averages
        while self._is_served:
            seen = averages.bell.value()
            before = self._version
            average = self._newest_average()
            if average.version == before:
                if self.is_over:
                    return
                averages.bell.wait(seen, POLL_S)
                continue
            self._call("load_average", average, group="averages")
            if not self._shared.link.has_joined:
                time.sleep(_UNJOINED_S)

    def _send_transitions(self) -> None:
        sent = Orders()
        while self._is_served and not sent.is_last:
            # Read the orders before the queue, since they concern all that is there by then.
            orders = self._orders()
            transitions = self._collected(all_of_it=orders.save != sent.save or orders.stops)
            if not self._is_open:
                orders = replace(self._orders(), is_last=True)  # the host closes the queue after its last orders
            if transitions is not None or orders != sent:
                self._call("give", transitions, orders, group="transitions")
                sent = orders

    def _orders(self) -> Orders:
        commands = self._shared.commands
        stops = commands.stops  # before `save`, which the host writes first
        return Orders(commands.save, stops)

    def _collected(self, *, all_of_it: bool) -> Transitions | None:
        """The transitions that wait here, up to a megabyte or for 50 ms; without a limit if `all_of_it`."""
        queue, names = self._shared.transitions, None
        limit = time.monotonic() + _LONGEST_S
        found: list[tuple[dict[str, np.ndarray], int]] = []
        size = 0
        while self._is_open and (all_of_it or (size < _MOST_BYTES and time.monotonic() < limit)):
            if not all_of_it and not self._has_room():
                if found:
                    break
                self._room.wait(max(0.0, limit - time.monotonic()))
                continue
            try:
                peeked = queue.peek(0.0 if all_of_it else max(0.0, limit - time.monotonic()))
            except QueueClosedError:
                self._is_open = False
                break
            if peeked is None:
                break
            message, rows = peeked
            names = [name for name in message if name not in (BETA, PROGRESS)]
            copied = {name: np.array(message[name][:rows]) for name in names}
            copied |= {name: np.array(message[name]) for name in (BETA, PROGRESS)}
            found.append((copied, rows))
            queue.release()
            self._shared.bell.ring()
            self._sent += 1
            size += sum(array.nbytes for array in copied.values())
        if names is None:
            return None
        return Transitions(
            np.array([rows for _, rows in found], np.int64),
            {name: np.concatenate([message[name] for message, _ in found]) for name in names},
            *(np.concatenate([message[name] for message, _ in found]) for name in (BETA, PROGRESS)),
        )

    def _has_room(self) -> bool:
        """Whether the node has room for another message."""
        self._room.clear()
        return self._sent - self._taken < self._ahead

    # --- states -----------------------------------------------------------------------------------------------------

    def _send_initial_state(self) -> None:
        folder = self._shared.initial_state
        if folder is None or not folder.is_dir():
            return
        for file in sorted(path for path in folder.rglob("*") if path.is_file()):
            with file.open("rb") as stream:
                while piece := stream.read(PIECE_BYTES):
                    self._call("put_piece", file.relative_to(folder).as_posix(), piece)
                    self._shared.report.beat()

    def _fetch_state(self) -> str | None:
        """Copy the state that the Learner has written to where the host looks for it; why that failed, if it did."""
        assert self._shared.states is not None
        folder = self._shared.states / str(self._shared.rank)
        try:
            for name, size in self._call("state_files"):
                self._fetch_file(folder, name, size)
        except OSError as error:
            return str(error)
        self._call("drop_state")
        return None

    def _fetch_file(self, folder: Path, name: str, size: int) -> None:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise EndedError(f"It sent a file with the name {name!r}, which is no file of a state.")
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        # In one move: if the node dies meanwhile, the host must not find a part of the last file, and take it for all.
        with replace_file(folder / name, durable=False) as stream:
            while (offset := stream.tell()) < size:
                if not (piece := self._call("state_piece", name, offset)):
                    raise OSError(f"The file {name} of {self.name} ended after {offset} of {size} bytes.")
                stream.write(piece)
                self._shared.report.beat()
