"""The process between a run and Ray: it is Ray's driver, so that the run outlives whatever happens to Ray.

The host sends it what is to run elsewhere, with the queues of this machine that stand for it. A thread for each passes
messages on between the two, so that to the rest of the run an Actor or Learner elsewhere is as one of this machine.
"""

from __future__ import annotations

import abc
import math
import os
import socket
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from pearl.actors.report import Report, shortened
from pearl.errors import ConfigurationError, QueueClosedError
from pearl.extras import import_extra
from pearl.ipc.passing import ObjectReceiver
from pearl.ipc.shared_buffer import SharedBuffer
from pearl.remote.node import versions
from pearl.remote.placing import check_nodes
from pearl.spec import Nodes

POLL_S = 0.1
PLACED_S = 60.0  # until a node must have taken an actor, and its process must have begun

_CONNECT_S = 10.0
_PATIENCE_S = 60.0  # for a cluster that listens; Ray would try on
_PARTING_S = 5.0
_FULL = ("ObjectStoreFullError", "OutOfDiskError")
_QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "configure_logging": False}

LOCAL = "local"


class RemoteWords:
    """Words of one remote process in shared memory: the host writes commands, the bridge writes the state."""

    WANTED, ENV_STEPS, RESTARTS, KILLED, ENDED, PID = range(6)

    def __init__(self) -> None:
        self._attach(SharedBuffer(8 * 6))

    def _attach(self, buffer: SharedBuffer) -> None:
        self._buffer = buffer
        self._words = np.frombuffer(buffer.memory, np.int64, 6)

    def __getstate__(self) -> SharedBuffer:
        return self._buffer

    def __setstate__(self, buffer: SharedBuffer) -> None:
        self._attach(buffer)

    def __getitem__(self, word: int) -> int:
        return int(self._words[word])

    def __setitem__(self, word: int, value: int) -> None:
        self._words[word] = value


@dataclass(frozen=True)
class Needs:
    """The parts of a run to place on nodes: an Actor takes one CPU, a Learner one for each of its threads.

    `actor_nodes` and `learner_nodes` say where, as in `ActorSpec` and `LearnersSpec`; empty: anywhere.
    """

    actors: int = 0
    learners: int = 0
    threads: int = 1
    actor_nodes: Nodes = ()
    learner_nodes: Nodes = ()

    @property
    def cpus(self) -> int:
        """CPUs of the cluster."""
        return self.actors + self.learners * self.threads

    @property
    def by_node(self) -> Mapping[str, Needs]:
        """The parts of the run that each node is to take."""
        actors, learners = dict(self.actor_nodes), dict(self.learner_nodes)
        return {
            node: Needs(actors.get(node, 0), learners.get(node, 0), self.threads)
            for node in dict.fromkeys((*learners, *actors))
        }

    def __str__(self) -> str:
        parties = [f"{count} {name}" for count, name in ((self.learners, "Learners"), (self.actors, "Actors")) if count]
        return " and ".join(parties)


class Work(Protocol):
    """A message from the host: something to run elsewhere."""

    def relays(self, bridge: Bridge) -> Sequence[Relay]:
        """The relays that serve it here, each in a thread of its own."""


def run_bridge(address: str, needs: Needs, receiver: ObjectReceiver, report: Report) -> None:
    """Main function of the bridge's process: until the host closes the sender."""
    try:
        Bridge(connected_in_time(address, needs, report), report).run(receiver)
    except BaseException as error:
        report.fail(_explained(error))
        end = threading.Timer(_PARTING_S, os._exit, (1,))  # in case Ray does not let the process end
        end.daemon = True
        end.start()
        raise SystemExit(1) from None


def _explained(error: BaseException) -> str:
    """The host's message for an error that ends the bridge."""
    if isinstance(error, ConfigurationError):
        return str(error)
    if type(error).__name__ in _FULL:
        return (
            f"Ray's object store of this machine is full, and so is the disk to which it spills ({type(error).__name__}"
            "). Free disk space or what others hold (`ray memory` shows it), or start the node with more "
            "(ray start --object-store-memory)."
        )
    return traceback.format_exc(limit=-8)


def connected_in_time(address: str, needs: Needs, report: Report) -> Any:
    """The same as `connected`, but a cluster that listens and does not let this process in ends it, with a report."""
    watchdog = threading.Timer(_PATIENCE_S, _give_up, (address, report))
    watchdog.daemon = True
    if address != LOCAL:
        watchdog.start()
    ray = connected(address, needs)
    watchdog.cancel()
    return ray


def _give_up(address: str, report: Report) -> None:
    report.fail(no_cluster(address, f"it did not let this process in within {_PATIENCE_S:g} s"))
    os._exit(1)  # the thread that connects cannot be ended


def connected(address: str, needs: Needs) -> Any:
    """The module `ray`, connected with the cluster at `address` ("local": a new one here) that can take all of `needs`.

    ConfigurationError says what is wrong with the address, the cluster or its nodes.
    """
    # Once its cluster is gone, a thread's next call would otherwise take this process into any other cluster.
    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"
    ray = import_extra("ray", "ray", "--ray")
    if address == LOCAL:
        os.environ.setdefault("RAY_worker_niceness", "0")  # by default 15: the host would starve them
        ray.init(address="local", num_cpus=needs.cpus, include_dashboard=False, **_QUIET)
    else:
        try:
            answers(_found_address() if address == "auto" else address)
            ray.init(address=address, **_QUIET)
        except ConfigurationError:
            raise
        except Exception as error:
            if "Version mismatch" in str(error):
                raise ConfigurationError(
                    f"--ray {address}: this machine and the cluster have different versions of Ray or Python. Install "
                    f"the same on all nodes. Ray says: {shortened(str(error), 400)}"
                ) from None
            raise ConfigurationError(no_cluster(address, f"{type(error).__name__}: {error}")) from None
    cpus = float(ray.cluster_resources().get("CPU", 0.0))
    if cpus < needs.cpus:
        each = "one each" if needs.threads == 1 else f"one for each Actor, {needs.threads} for each Learner"
        raise ConfigurationError(
            f"{needs} need {needs.cpus} CPUs in the Ray cluster, {each}; found {cpus:g}. Add nodes, or compose with "
            "fewer."
        )
    check_nodes(ray, {node: (str(wanted), wanted.cpus) for node, wanted in needs.by_node.items()})
    return ray


def _found_address() -> str:
    """The address that "auto" stands for; Ray's note of a killed cluster may be left."""
    from ray._private.services import get_ray_address_from_environment

    return str(get_ray_address_from_environment("auto", None))


def answers(address: str) -> None:
    """Raise ConfigurationError if nobody listens at an address "host:port", where Ray would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
    except OSError as error:
        raise ConfigurationError(no_cluster(address, str(error))) from None


def no_cluster(address: str, reason: str) -> str:
    """The message that no cluster is at `address`."""
    return (
        f"--ray {address}: no Ray cluster answers there ({shortened(reason, 400)}). Start one with `ray start --head`, "
        "give the address that it prints, or leave the address out for a cluster of this machine alone."
    )


class Bridge:
    """The threads of the bridge's process. `failure` ends it, and with it the run."""

    def __init__(self, ray: Any, report: Report) -> None:
        self.ray, self._report = ray, report
        self.failure: BaseException | None = None
        self.is_closed = False

    @property
    def is_over(self) -> bool:
        """Whether the bridge is to end."""
        return self.is_closed or self.failure is not None

    def run(self, receiver: ObjectReceiver) -> None:
        """Serve what is received, until the sender is closed or something fails."""
        threads: list[threading.Thread] = []
        self._report.ready()
        while self.failure is None:
            try:
                work: Work | None = receiver.receive(POLL_S)
            except EOFError:
                break
            relays = [] if work is None else work.relays(self)
            threads = [thread for thread in threads if thread.is_alive()]
            for relay in relays:
                threads.append(threading.Thread(target=relay.run, name=relay.name, daemon=True))
                threads[-1].start()
        self.is_closed = True
        if self.failure is not None:
            raise self.failure
        deadline = time.monotonic() + _PARTING_S
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self.ray.shutdown()


class EndedError(Exception):
    """The Ray actor is gone."""


class Relay(abc.ABC):
    """Connects Ray actors with their queues in the host; `run` is the main function of its thread."""

    def __init__(self, bridge: Bridge, name: str, words: RemoteWords) -> None:
        self.bridge, self.ray, self.name, self.words = bridge, bridge.ray, name, words

    @abc.abstractmethod
    def run(self) -> None:
        """Serve it until the run ends. An error that the run cannot survive becomes the bridge's `failure`."""

    @property
    @abc.abstractmethod
    def is_over(self) -> bool:
        """Whether the run needs it no longer."""

    def say_ended(self, number: int) -> None:
        """Tell the host that the `number`th process has ended; where the bridge ends, its own end says more."""
        if self.bridge.failure is None:
            self.words[RemoteWords.ENDED] = number

    def get(self, reference: Any, number: int, longest_s: float = math.inf) -> Any:
        """The result of a call of the `number`th process.

        EndedError if that is gone or is to end, QueueClosedError at the run's end.
        """
        errors = self.ray.exceptions
        deadline = time.monotonic() + longest_s
        while True:
            if self.is_over:
                raise QueueClosedError("The run is over.")
            if self.words[RemoteWords.KILLED] >= number:
                raise EndedError("It was ended, since it hung.")
            try:
                return self.ray.get(reference, timeout=POLL_S)
            except errors.GetTimeoutError:
                if time.monotonic() > deadline:
                    raise EndedError(
                        f"No node of the Ray cluster started it within {longest_s:g} s: `ray status` shows what the "
                        "cluster has and what waits."
                    ) from None
            except (errors.RayActorError, errors.RayTaskError, errors.ObjectLostError) as error:
                raise EndedError(shortened(str(error), 2000)) from None

    def check_node(self, about: Mapping[str, str]) -> None:
        """Note the process of a Ray actor; ConfigurationError if its node has other versions than this one."""
        self.words[RemoteWords.PID] = int(about["pid"])
        for what, here in versions().items():
            if about[what] != here:
                raise ConfigurationError(
                    f"Node {about['node']} has {what} {about[what]}; the run needs {here}, as it has itself. Install "
                    "the same version on all nodes."
                )
