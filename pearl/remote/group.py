"""The host's side of remote processes: they are watched, named and replaced like processes of this machine."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence

from pearl.actors.actor import ActorSetup
from pearl.actors.child_process import ChildProcess, Process
from pearl.actors.notices import NO_NOTICES, Notices
from pearl.actors.report import Report
from pearl.actors.standalone import names_program, standalone
from pearl.errors import ClusterError
from pearl.extras import require_extra
from pearl.ipc.passing import ObjectSender
from pearl.ipc.queues import WeightSyncQueue
from pearl.local_sgd.group import start_here
from pearl.local_sgd.local_learner import LearnerSetup, ProcessSetup
from pearl.remote.actor_relay import ActorLine, ActorLines
from pearl.remote.actor_worker import ActorWork
from pearl.remote.bridge import Needs, RemoteWords, run_bridge
from pearl.remote.learner_relay import LearnerLine, messages_ahead
from pearl.remote.learner_worker import LearnerWork
from pearl.remote.node import Package
from pearl.runtime.queues import DataCollectionQueue

_POLL_S = 0.02
_PARTING_S = 10.0
_AT_ONCE = 64  # Actors in a message to the bridge, with three descriptors each


def most_remote_deaths(count: int) -> int:
    """Deaths within a minute at which a run with `count` processes on nodes stops: more than one node can have."""
    return count + 2


class RayBridge:
    """The process that is Ray's driver, and the connection with it: to the cluster at `address`, which must have room.

    Raises MissingExtraError without Ray. Everything that is wrong with the cluster is found by `check`.
    """

    def __init__(self, address: str, needs: Needs) -> None:
        require_extra("ray", "ray", "--ray")
        self._sender, self._report = ObjectSender(), Report()
        arguments = (address, needs, self._sender.receiver, self._report)
        self._process = ChildProcess(run_bridge, arguments, "ray-bridge", without_program=True)
        self._sender.receiver.close()

    def send(self, work: object) -> None:
        """Have it serve `work`; if it has ended, `check` says so."""
        with contextlib.suppress(BrokenPipeError, ConnectionError):
            self._sender.send(work)

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended."""
        return self._process.exit_code is not None

    def check(self) -> None:
        """ClusterError if the process has ended, and with it the connection to Ray."""
        if not self.has_ended:
            return
        reason = self._report.failure
        if reason is not None and not self._report.is_ready:
            raise ClusterError(f"There is no connection to Ray, and the run stops here.\n{reason.rstrip()}")
        raise ClusterError(
            f"The connection to Ray is lost ({self._process.cause_of_death} of its process): the run stops here; its "
            "checkpoint can be resumed with --resume, with the address of a cluster that runs, or without --ray."
            + ("" if reason is None else f"\n{reason.rstrip()}")
        )

    def close(self) -> None:
        """End what it still serves, and the process. May be repeated."""
        self._sender.close()
        if not self._process.wait(_PARTING_S):
            self._process.kill()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid


class RemoteProcess:
    """A process elsewhere, as the bridge's thread for it reports it."""

    def __init__(self, bridge: RayBridge, name: str, words: RemoteWords, number: int) -> None:
        self._bridge, self._words, self._number = bridge, words, number
        self.name = name

    @property
    def pid(self) -> int:
        """Process id on its node; 0 before a node has taken it."""
        return self._words[RemoteWords.PID]

    @property
    def exit_code(self) -> int | None:
        """None while it runs. ClusterError if the connection to Ray is lost."""
        if self._words[RemoteWords.ENDED] >= self._number:
            return 1
        self._bridge.check()
        return None

    @property
    def cause_of_death(self) -> str:
        """Where it ran; its report says more."""
        return "its Ray actor ended"

    def kill(self) -> None:
        """End it at once."""
        self._words[RemoteWords.KILLED] = self._number

    def wait(self, timeout_s: float) -> bool:
        """Wait until it has ended; False if it has not in time."""
        deadline = time.monotonic() + timeout_s
        while self._words[RemoteWords.ENDED] < self._number and not self._bridge.has_ended:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_S)
        return True


class RemoteProcesses:
    """Actors on the nodes of a Ray cluster, one for each setup; see `pearl.actors.process`.

    `bridge` is the connection, or an address to make one for these Actors alone.
    """

    def __init__(
        self,
        bridge: RayBridge | str,
        setups: Sequence[ActorSetup],
        dcqs: Sequence[DataCollectionQueue],
        wsq: WeightSyncQueue,
        notices: Notices = NO_NOTICES,
    ) -> None:
        require_extra("ray", "ray", "--ray")
        self._owns_bridge = isinstance(bridge, str)
        nodes = setups[0].spec.nodes if setups else ()
        needs = Needs(actors=len(setups), actor_nodes=nodes)
        self.bridge = RayBridge(bridge, needs) if isinstance(bridge, str) else bridge
        self._lines = [
            ActorLine(
                f"actor-{setup.index}",
                _actor_work(setup, dcq, wsq.weight_count, notices),
                dcq,
                RemoteWords(),
                Report(),
                setup.spec.node_of(setup.index),
            )
            for setup, dcq in zip(setups, dcqs, strict=True)
        ]
        for first in range(0, len(self._lines), _AT_ONCE):
            self.bridge.send(ActorLines(self._lines[first : first + _AT_ONCE], wsq, notices))

    def start(self, setup: ActorSetup, dcq: DataCollectionQueue) -> tuple[Process, Report]:
        """See `ActorProcesses`."""
        line = self._lines[setup.index]
        line.report.clear()
        words = line.words
        words[RemoteWords.PID] = 0
        words[RemoteWords.ENV_STEPS], words[RemoteWords.RESTARTS] = setup.env_steps, setup.restarts
        words[RemoteWords.WANTED] += 1
        return RemoteProcess(self.bridge, line.name, words, words[RemoteWords.WANTED]), line.report

    def close(self) -> None:
        """End the bridge, if it is for these Actors alone."""
        if self._owns_bridge:
            self.bridge.close()


class RemoteLearners:
    """Starts Learners on the nodes of a Ray cluster, on `threads` CPUs each; see `LearnerGroup`.

    `node_of` gives the node of each by its rank: None: any; "": this machine, where it is a process as without Ray.
    """

    def __init__(
        self, bridge: RayBridge, threads: int = 1, node_of: Callable[[int], str | None] = lambda rank: None
    ) -> None:
        self._bridge, self._threads, self._node_of = bridge, threads, node_of
        self._package: Package | None = None

    def __call__(self, setup: LearnerSetup, shared: ProcessSetup) -> Process:
        """Start the Learner that `shared` stands for on this machine."""
        if (node := self._node_of(shared.rank)) == "":
            return start_here(setup, shared)
        name, words = f"learner-{shared.rank}", RemoteWords()
        words[RemoteWords.WANTED] = 1
        queue = shared.transitions
        work = LearnerWork(
            self._packed(setup),
            shared.rank,
            shared.link.layout,
            shared.link.facts,
            queue.rows,
            messages_ahead(setup, queue) + queue.slots,
        )
        self._bridge.send(LearnerLine(name, work, shared, words, self._threads, node))
        return RemoteProcess(self._bridge, name, words, 1)

    def _packed(self, setup: LearnerSetup) -> Package:
        if self._package is None:
            package = Package.of(setup, with_program=False)
            self._package = Package.of(setup, with_program=True) if names_program(package.pickled) else package
        return self._package


def _actor_work(setup: ActorSetup, dcq: DataCollectionQueue, weight_count: int, notices: Notices) -> ActorWork:
    alone = standalone(setup)
    content = alone if alone is not None else (setup, None)
    package = Package.of(content, with_program=alone is None)
    return ActorWork(package, dcq.fields, dcq.by_row, setup.rollout is not None, weight_count, notices.counts)
