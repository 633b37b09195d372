"""The host's side of remote actors: they are watched, named and restarted as those of this machine are."""

from __future__ import annotations

import multiprocessing.spawn
import pickle
import sys
import time
from collections.abc import Sequence

from pearl.actors.actor import ActorSetup
from pearl.actors.child_process import ChildProcess
from pearl.actors.process import ActorProcess
from pearl.actors.report import Report
from pearl.actors.standalone import standalone
from pearl.errors import ActorError, ConfigurationError
from pearl.extras import require_extra
from pearl.ipc.queues import WeightSyncQueue
from pearl.remote.bridge import ActorWords, Line, run_bridge
from pearl.remote.worker import Work
from pearl.runtime.queues import DataCollectionQueue

_POLL_S = 0.02
_PARTING_S = 10.0
_PROGRAM = ("init_main_from_name", "init_main_from_path")


class RemoteProcesses:
    """Actors on the nodes of the Ray cluster at `address`, one for each setup; see `pearl.actors.process`."""

    def __init__(
        self,
        address: str,
        setups: Sequence[ActorSetup],
        dcqs: Sequence[DataCollectionQueue],
        wsq: WeightSyncQueue,
        statistics: WeightSyncQueue | None = None,
    ) -> None:
        require_extra("ray", "ray", "--ray")
        if any(setup.rollout is not None for setup in setups):
            raise ConfigurationError(
                "--ray: remote Actors collect for a replay, and this program trains on rollouts, which must be by the "
                "newest policy. Run it without --ray."
            )
        count = 0 if statistics is None else statistics.weight_count
        self._lines = [
            Line(f"actor-{setup.index}", _work(setup, wsq.weight_count, count), dcq, ActorWords(), Report())
            for setup, dcq in zip(setups, dcqs, strict=True)
        ]
        self._report = Report()
        arguments = (address, self._lines, wsq, statistics, self._report)
        self._bridge = ChildProcess(run_bridge, arguments, "ray-bridge", without_program=True)

    def start(self, setup: ActorSetup, dcq: DataCollectionQueue) -> tuple[ActorProcess, Report]:
        """See `ActorProcesses`."""
        line = self._lines[setup.index]
        line.report.clear()
        words = line.words
        words[ActorWords.PID] = 0
        words[ActorWords.ENV_STEPS], words[ActorWords.RESTARTS] = setup.env_steps, setup.restarts
        words[ActorWords.WANTED] += 1
        return _RemoteProcess(self, line, words[ActorWords.WANTED]), line.report

    def check(self) -> None:
        """ActorError if the bridge has ended, and with it the connection to Ray."""
        if self._bridge.exit_code is None:
            return
        reason = self._report.failure
        raise ActorError(
            f"The connection to Ray is lost ({self._bridge.cause_of_death} of its process): the run stops here; its "
            "checkpoint can be resumed with --resume, with the address of a cluster that runs, or without --ray."
            + ("" if reason is None else f"\n{reason.rstrip()}")
        )

    def close(self) -> None:
        """Wait for the bridge, which ends when the queues are closed."""
        if not self._bridge.wait(_PARTING_S):
            self._bridge.kill()

    @property
    def bridge_pid(self) -> int:
        """Process id of the bridge."""
        return self._bridge.pid


class _RemoteProcess:
    """A remote actor as a process: what the bridge's thread for it says."""

    def __init__(self, processes: RemoteProcesses, line: Line, number: int) -> None:
        self._processes, self._line, self._number = processes, line, number
        self.name = line.name

    @property
    def pid(self) -> int:
        """Process id on its node; 0 before a node has taken it."""
        return self._line.words[ActorWords.PID]

    @property
    def exit_code(self) -> int | None:
        """None while it runs. ActorError if the connection to Ray is lost."""
        if self._line.words[ActorWords.ENDED] >= self._number:
            return 1
        self._processes.check()
        return None

    @property
    def cause_of_death(self) -> str:
        """Where it ran; its report says more."""
        return "its Ray actor ended"

    def kill(self) -> None:
        """End it at once."""
        self._line.words[ActorWords.KILLED] = self._number

    def wait(self, timeout_s: float) -> bool:
        """Wait until it has ended; False if it has not in time."""
        deadline = time.monotonic() + timeout_s
        while self._line.words[ActorWords.ENDED] < self._number and self._processes._bridge.exit_code is None:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_S)
        return True


def _work(setup: ActorSetup, weight_count: int, statistics_count: int) -> Work:
    alone = standalone(setup)
    sent, environment = alone if alone is not None else (setup, None)
    preparation = multiprocessing.spawn.get_preparation_data(f"actor-{setup.index}")
    program = {} if alone is not None else {name: preparation[name] for name in _PROGRAM if name in preparation}
    return Work(
        pickle.dumps((sent, environment)),
        program,
        tuple(path for path in sys.path if path),
        weight_count,
        statistics_count,
    )
