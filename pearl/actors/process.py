"""Starts, watches and restarts actor processes."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from pearl.actors.actor import ActorSetup
from pearl.actors.child_process import ChildProcess, DeathCount, Process
from pearl.actors.environment import register
from pearl.actors.notices import NO_NOTICES, Notices
from pearl.actors.report import Report, Silence
from pearl.actors.rollout_actor import make_actor
from pearl.actors.shared_warnings import SharedWarnings
from pearl.actors.standalone import standalone
from pearl.actors.waiting import end_waiting
from pearl.errors import ActorError, PearlError, QueueClosedError

if TYPE_CHECKING:
    from gymnasium.envs.registration import EnvSpec

    from pearl.ipc.queues import ColumnQueue, WeightSyncQueue
    from pearl.runtime.queues import DataCollectionQueue

logger = logging.getLogger("pearl.actors")

_CHECK_INTERVAL_S = 0.1
_SILENCE_S = 60.0  # until a warning
_WAIT_S = 0.5
_MESSAGE_S = 0.05  # a message that takes longer than this is sent before it is full


def run_actor(
    setup: ActorSetup,
    dcq: ColumnQueue,
    wsq: WeightSyncQueue,
    report: Report,
    environment: EnvSpec | None = None,
    shared_warnings: SharedWarnings | None = None,
    notices: Notices = NO_NOTICES,
) -> None:
    """Main function of an actor process: until its queue, which has the columns of a DataCollectionQueue, closes.

    `environment` is registered first: an actor that starts without the program may not know it.
    """
    if shared_warnings is not None:
        shared_warnings.install()
    torch_settled = setup.needs_torch and settle_torch(setup)
    try:
        if environment is not None:
            register(environment)
        setup = dataclasses.replace(setup, env_attributes=notices.newest_attributes())
        actor = make_actor(setup, on_step=report.beat)
        if not torch_settled and "torch" in sys.modules:  # the environment's, or the program's
            settle_torch(setup)
        report.ready()
        with contextlib.suppress(QueueClosedError):
            while True:
                report.beat()
                message = dcq.reserve(_WAIT_S)
                if message is None:
                    continue
                # Poll after the wait for room: the replay ratio may make it long. A policy server polls for itself.
                if setup.service is None and (weights := wsq.poll()) is not None:
                    actor.load_weights(weights, wsq.version)
                notices.tell(actor)
                start = time.perf_counter()
                rows = actor.collect(message, longest_s=_MESSAGE_S)
                message["span"][:] = start, time.perf_counter()
                dcq.publish(rows)
        actor.close()
    except BaseException as error:
        says_all = isinstance(error, PearlError) and error.__cause__ is None
        report.fail(str(error) if says_all else traceback.format_exc(limit=-8))
        raise SystemExit(1) from None


def settle_torch(setup: ActorSetup) -> bool:
    """Use one thread, and seed torch from the actor's seed and index."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(int(np.random.SeedSequence((setup.seed, setup.index, setup.restarts)).generate_state(1)[0]))
    return True


class ActorProcesses(Protocol):
    """Where the processes of a group of actors run."""

    def start(self, setup: ActorSetup, dcq: DataCollectionQueue) -> tuple[Process, Report]:
        """Start the actor of `setup`, which fills `dcq`; return its process and its report."""

    def close(self) -> None:
        """End what is left, when all actors have stopped."""


class LocalProcesses:
    """Processes of this machine. With `shared_warnings`, actors show each warning only once in all."""

    def __init__(
        self,
        wsq: WeightSyncQueue,
        notices: Notices = NO_NOTICES,
        shared_warnings: SharedWarnings | None = None,
    ) -> None:
        self._wsq, self._notices, self._shared_warnings = wsq, notices, shared_warnings

    def start(self, setup: ActorSetup, dcq: DataCollectionQueue) -> tuple[Process, Report]:
        """See `ActorProcesses`."""
        report = Report()
        alone = standalone(setup)
        sent, environment = alone if alone is not None else (setup, None)
        process = ChildProcess(
            run_actor,
            (sent, dcq, self._wsq, report, environment, self._shared_warnings, self._notices),
            f"actor-{setup.index}",
            without_program=alone is not None,
        )
        return process, report

    def close(self) -> None:
        """Do nothing: nothing is left."""


@dataclass
class _Running:
    process: Process
    report: Report
    setup: ActorSetup
    hangs: int = 0  # in a row, of this actor, while it made its environments
    is_named: bool = False  # as silent

    def __post_init__(self) -> None:
        self.silence = Silence(self.report)

    @property
    def place(self) -> str:
        """What the actor was doing, for messages."""
        return "while it stepped its environments" if self.report.is_ready else "while it made its environments"


class ActorGroup:
    """The running actors.

    `check` names a dead one, restarts it, and gives up after `most_deaths` within `window_s`. An actor is silent while
    neither a step of its environments ends nor it waits for room in its queue. `check` names a silent one after a
    minute, and kills it after `timeout_s` (`inf`: never). Actors run in `processes`, by default on this machine. With
    `shared_warnings`, they show each warning only once in all. `notices` are what the run tells them beside the
    weights.
    """

    def __init__(
        self,
        setups: Sequence[ActorSetup],
        dcqs: Sequence[DataCollectionQueue],
        wsq: WeightSyncQueue,
        *,
        timeout_s: float = math.inf,
        most_deaths: int = 3,
        window_s: float = 60.0,
        shared_warnings: SharedWarnings | None = None,
        notices: Notices = NO_NOTICES,
        processes: ActorProcesses | None = None,
    ) -> None:
        self._processes = processes or LocalProcesses(wsq, notices, shared_warnings)
        self._dcqs = list(dcqs)
        self._timeout_s, self._most_deaths, self._window_s = timeout_s, most_deaths, window_s
        self._deaths = DeathCount(window_s)
        self._checked_at = time.monotonic()
        self.restarts = 0
        self._running: list[_Running] = []
        for setup, dcq in zip(setups, self._dcqs, strict=True):
            self._running.append(self._start(setup, dcq))
        end_waiting()  # started for actors that this program does not have

    def _start(self, setup: ActorSetup, dcq: DataCollectionQueue) -> _Running:
        return _Running(*self._processes.start(setup, dcq), setup)

    @property
    def pids(self) -> list[int]:
        """Process ids, by actor index."""
        return [r.process.pid for r in self._running]

    def check(self, env_steps: int) -> None:
        """Restart dead and hung actors (at most ten looks a second). ActorError when they die too often."""
        now = time.monotonic()
        if now - self._checked_at < _CHECK_INTERVAL_S:
            return
        self._checked_at = now
        for index, running in enumerate(self._running):
            if running.process.exit_code is not None:
                self._replace(index, running, running.process.cause_of_death, env_steps, hangs=0)
                continue
            silent_s = running.silence.look()
            if silent_s > self._timeout_s:
                self._end_hung(index, running, env_steps)
            elif silent_s > _SILENCE_S and not running.is_named:
                self._name_silent(running)
            running.is_named = silent_s > _SILENCE_S

    def _name_silent(self, running: _Running) -> None:
        then = "" if math.isinf(self._timeout_s) else f" It is restarted after {self._timeout_s:g} s (--actor-timeout)."
        logger.warning(
            "%s (process %d) has given no sign of life for %.0f s, %s: an environment may hang.%s Ctrl-C saves and "
            "stops.",
            *(running.process.name, running.process.pid, running.silence.seconds, running.place, then),
        )

    def _end_hung(self, index: int, running: _Running, env_steps: int) -> None:
        running.process.kill()
        cause = f"process {running.process.pid} hung for {running.silence.seconds:.0f} s {running.place}"
        hangs = 0 if running.report.is_ready else running.hangs + 1
        if hangs >= self._most_deaths:
            raise ActorError(
                f"{running.process.name} hung {hangs} times in a row ({cause}). The run stops here; its checkpoint can "
                "be resumed with --resume once the environment's constructor and reset return. If they are that slow, "
                "give --actor-timeout more seconds."
            )
        self._replace(index, running, cause, env_steps, hangs=hangs)

    def _replace(self, index: int, running: _Running, cause: str, env_steps: int, *, hangs: int) -> None:
        failure = running.report.failure
        detail = "" if failure is None else ("\n" if "\n" in failure else " ") + failure.rstrip()
        name, deaths = running.process.name, self._deaths.one_more()
        if deaths >= self._most_deaths:
            raise ActorError(
                f"Actors died {deaths} times within {self._window_s:.0f} s; the last was {name} ({cause}). "
                f"The run stops here; its checkpoint can be resumed with --resume once the cause is fixed.{detail}"
            )
        logger.warning("%s died (%s) and is restarted.%s", name, cause, detail)
        self.restarts += 1
        setup = dataclasses.replace(running.setup, env_steps=env_steps, restarts=running.setup.restarts + 1)
        self._running[index] = dataclasses.replace(self._start(setup, self._dcqs[index]), hangs=hangs)

    def stop(self, timeout_s: float = 5.0) -> None:
        """Close the queues, wait for the processes, and end those that do not stop."""
        for dcq in self._dcqs:
            dcq.close()
        # An actor that is not ready has nothing to close.
        for running in self._running:
            if not running.report.is_ready:
                running.process.kill()
        deadline = time.monotonic() + timeout_s
        for running in self._running:
            if not running.process.wait(max(0.0, deadline - time.monotonic())):
                logger.warning("%s did not stop in %.0f s and is killed.", running.process.name, timeout_s)
                running.process.kill()
        self._processes.close()
