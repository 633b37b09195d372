"""Starts and stops the actors and the Learner, and ends a run: signals, failures, reasons to stop."""

from __future__ import annotations

import contextlib
import gc
import math
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np

from pearl.actors.actor import ActorSetup
from pearl.actors.notices import Notices
from pearl.actors.process import ActorGroup
from pearl.actors.shared_warnings import SharedWarnings
from pearl.atomic_file import replace_file
from pearl.errors import ActorError, ClusterError, EnvError, LearnerError, PearlError, PolicyServerError, TrainerError
from pearl.ipc.queues import WeightSyncQueue
from pearl.replay.requests import ReplayRequestQueue
from pearl.runtime.entry import run_log_file
from pearl.runtime.interruption import Interruption
from pearl.runtime.policy_server import PolicyServerProcess
from pearl.runtime.queues import DataCollectionQueue
from pearl.runtime.serial import InlineActor
from pearl.runtime.workers import LearnerSide

if TYPE_CHECKING:
    from pearl.remote.group import RayBridge

_AT_ONCE_S = 0.5
_STOPS_HERE = "The run stops here; its checkpoint can be resumed with --resume once the cause is fixed."


class Supervisor:
    """Starts, watches and stops the Learner's loop, the actors, what they need, and the RRQ; handles signals.

    `stop_reason` is empty while the run continues; `failure` is the error that `finish` has to raise. `say` prints to
    the user.
    """

    def __init__(self, run_dir: Path, *, serial: bool, say: Callable[[str], None]) -> None:
        self._run_dir, self._serial, self._say = run_dir, serial, say
        self._interruption = Interruption()
        self._interruption_told = False
        self.stop_reason = ""
        self.failure: PearlError | None = None
        self.actor_restarts = 0
        self._workers: list[LearnerSide] = []
        self._inline: list[InlineActor] = []
        self._group: ActorGroup | None = None
        self._rrq: ReplayRequestQueue | None = None
        self._server: PolicyServerProcess | None = None
        self._bridge: RayBridge | None = None
        _collect_earlier_run()

    def __enter__(self) -> Supervisor:
        self._interruption.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._interruption.__exit__(kind, error, traceback)
        _release_objects()

    # --- parties ----------------------------------------------------------------------------------------------------

    def launch(self, worker: LearnerSide) -> None:
        """Start the Learner's loop in its thread; in a serial run `run_inline` calls it."""
        self._workers.append(worker)
        _freeze_objects()
        if not self._serial:
            worker.launch()

    def launch_actors(
        self,
        setups: Sequence[ActorSetup],
        dcqs: Sequence[DataCollectionQueue],
        wsq: WeightSyncQueue,
        *,
        timeout_s: float,
        shared_warnings: SharedWarnings,
        notices: Notices,
        ray: str | RayBridge | None = None,
    ) -> None:
        """Start an actor for each queue: a spawned process, or in serial mode an inline one.

        With `ray`, the address of a cluster or the connection with it, they run on its nodes.
        """
        if self._serial:
            self._inline = [InlineActor(s, q, wsq, notices) for s, q in zip(setups, dcqs, strict=True)]
        else:
            processes, most_deaths = None, 3
            if ray is not None:
                from pearl.remote.group import RemoteProcesses, most_remote_deaths

                most_deaths = most_remote_deaths(len(setups))
                processes = RemoteProcesses(ray, setups, dcqs, wsq, notices)
            self._group = ActorGroup(
                setups,
                dcqs,
                wsq,
                timeout_s=timeout_s or math.inf,
                most_deaths=most_deaths,
                shared_warnings=shared_warnings,
                notices=notices,
                processes=processes,
            )

    def close_last(self, bridge: RayBridge) -> None:
        """Close the connection with a cluster when all else has stopped."""
        self._bridge = bridge

    def watch_server(self, server: PolicyServerProcess) -> None:
        """Watch the policy server, and stop it with the Actors."""
        self._server = server

    def watch(self, rrq: ReplayRequestQueue) -> None:
        """Count the RRQ's requests as unfinished work, and close the RRQ at the end."""
        self._rrq = rrq

    def pending_requests(self) -> int:
        """Requests that the Replay Manager has not answered yet."""
        return self._rrq.pending() if self._rrq is not None else 0

    def stop_parties(self, *, at_once: bool = False) -> bool:
        """Stop all, even if one of them fails to stop. `at_once` waits for none that is slow; False if one goes on.

        A thread whose training step hangs ends with the process.
        """
        try:
            self._stop_parties(*((_AT_ONCE_S,) if at_once else ()))
        except PearlError:
            if not at_once:
                raise
            return False
        return True

    def _stop_parties(self, *patience: float) -> None:
        with contextlib.ExitStack() as stack:
            if self._bridge is not None:
                stack.callback(self._bridge.close)
            for worker in self._workers:
                stack.callback(worker.stop, *patience)
            for actor in self._inline:
                stack.callback(actor.close)
            if self._group is not None:
                self.actor_restarts = self._group.restarts
                stack.callback(self._group.stop, *patience)
            if self._server is not None:  # before the Actors, which may wait for its answers
                stack.callback(self._server.stop)
            if self._rrq is not None:
                stack.callback(self._rrq.close)
        self._workers, self._inline, self._group = [], [], None
        self._rrq, self._server, self._bridge = None, None, None

    def run_inline(self, env: str, *, collect: bool) -> None:
        """Serial mode: run one step of the Learner's loop, else (with `collect`) one message of each actor."""
        if any([worker.run_inline() for worker in self._workers]) or not collect:  # noqa: C419 (all run)
            return
        for actor in self._inline:
            try:
                actor.run_once()
            except EnvError as error:
                failure: PearlError = EnvError(f"{error} {_STOPS_HERE}")
                self.fail(failure, "actors failed")
                return
            except PearlError:
                raise
            except (Exception, SystemExit) as error:
                detail = "".join(traceback.format_exception(error, limit=-8)).rstrip()
                failure = ActorError(f"The environment {env} or the policy failed in an actor. {_STOPS_HERE}\n{detail}")
                self.fail(failure, "actors failed")
                return

    def restart_inline(self, env_steps: int) -> None:
        """Serial mode, after a checkpoint at `env_steps`: restart all, so that a resumed run has the same bits."""
        for worker in self._workers:
            worker.restarted()
        self._inline = [actor.restarted(env_steps) for actor in self._inline]

    # --- what ends a run --------------------------------------------------------------------------------------------

    @property
    def exit_code(self) -> int:
        """Exit code of the program."""
        return self._interruption.exit_code

    @property
    def signalled(self) -> bool:
        """Whether a signal asked the run to stop."""
        return self._interruption.signal is not None

    def interrupted(self) -> bool:
        """Whether a signal asked the run to stop; tells the user once."""
        if self._interruption.signal is None:
            return False
        name = self._interruption.signal.name
        if not self.stop_reason:
            self.stop(f"{name} received")
        elif not self._interruption_told:
            self._say(f"{name} received: what is left of the run is skipped.")
        self._interruption_told = True
        return True

    def stop(self, reason: str) -> None:
        """End the run; later reasons are ignored."""
        if not self.stop_reason:
            self.stop_reason = reason
            self._say(f"Stopping: {reason}.")

    def fail(self, failure: PearlError, reason: str) -> None:
        """End the run with an error."""
        self.failure = failure
        self.stop(reason)

    def check_workers(self) -> None:
        """Raise the error of the Learner's loop, if there is one; end the run where several Learners failed."""
        for worker in self._workers:
            try:
                self._check_worker(worker)
            except (ClusterError, LearnerError) as error:  # what is left can be saved
                self.fail(error, "Learners failed")

    def _check_worker(self, worker: LearnerSide) -> None:
        """Raise the worker's error, if any; save the batch of a failed training step in the run folder."""
        try:
            worker.check()
        except TrainerError as error:
            path = self._run_dir / "failed_batch.npz"
            try:
                with replace_file(path) as stream:
                    np.savez(stream, **worker.last_batch())  # type: ignore[arg-type]
            except OSError as failure:
                raise TrainerError(f"{error} The batch could not be saved as {path}: {failure}.") from error
            raise TrainerError(f"{error} The batch was saved as {path}: numpy.load() shows it.") from error
        except PearlError as error:
            raise type(error)(f"{error} The full traceback is in {run_log_file()}.") from error

    def check_actors(self, env_steps: int) -> None:
        """Restart actors that died, or end the run."""
        # Once the run stops, dead actors are expected: the same signal may have ended them.
        if self._group is None or self.stop_reason or self.signalled:
            return
        try:
            if self._server is not None:
                self._server.check()
            self._group.check(env_steps)
        except PolicyServerError as error:
            self.fail(error, "the policy server failed")
        except ActorError as error:
            self.fail(error, "actors failed")


_has_frozen = False  # whether an earlier run in this process froze objects; its queues and replay are now garbage


def _freeze_objects() -> None:
    """Freeze live objects: torch steps trigger frequent garbage collections."""
    global _has_frozen
    gc.freeze()
    _has_frozen = True


def _release_objects() -> None:
    """At a run's end: unfreeze, since frozen objects are never collected."""
    if _has_frozen:
        gc.unfreeze()


def _collect_earlier_run() -> None:
    """Before a run: free the memory and descriptors of an earlier one, which Python would collect only much later."""
    global _has_frozen
    if _has_frozen:
        _has_frozen = False
        gc.collect()
