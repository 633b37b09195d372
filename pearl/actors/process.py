"""Actor processes: started, watched, restarted."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import multiprocessing
import multiprocessing.connection
import multiprocessing.resource_tracker
import os
import signal
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import gymnasium as gym
import numpy as np

from pearl.actors.actor import Actor, ActorSetup
from pearl.actors.standalone import program_hidden, standalone
from pearl.errors import ActorError, QueueClosedError
from pearl.standard_streams import keep_standard_streams

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

    from gymnasium.envs.registration import EnvSpec

    from pearl.runtime.queues import DataCollectionQueue, WeightSyncQueue

logger = logging.getLogger("pearl.actors")

_CONTEXT = multiprocessing.get_context("spawn")
_CHECK_INTERVAL_S = 0.1
_HOSTS_SIGNALS = (signal.SIGINT, signal.SIGHUP)  # that a terminal sends to every process


def run_actor(
    setup: ActorSetup,
    dcq: DataCollectionQueue,
    wsq: WeightSyncQueue,
    report: Connection,
    environment: EnvSpec | None = None,
) -> None:
    """Main function of an actor process: until its queue closes or its parent is gone.

    `environment` is registered first: an actor that starts without the program may not know it.
    """
    for number in _HOSTS_SIGNALS:  # environments may unblock them
        signal.signal(number, signal.SIG_IGN)
    keep_standard_streams()
    host = multiprocessing.parent_process()
    parent = host.pid if host is not None else os.getppid()  # it may be gone by now
    torch_settled = setup.policy is None and settle_torch(setup)
    try:
        if environment is not None:
            gym.registry[environment.id] = environment
        actor = Actor(setup)
        if not torch_settled and "torch" in sys.modules:  # the environment's, or the program's
            settle_torch(setup)
        with contextlib.suppress(QueueClosedError):
            while os.getppid() == parent:
                message = dcq.reserve(timeout_s=0.5)
                if message is None:
                    continue
                # After the wait for room, which the replay ratio may make long: the newest weights.
                if (weights := wsq.poll()) is not None:
                    actor.load_weights(weights)
                dcq.publish(actor.collect(message))
        actor.close()
    except BaseException:
        report.send_bytes(traceback.format_exc(limit=-8).encode())
        raise SystemExit(1) from None


def settle_torch(setup: ActorSetup) -> bool:
    """One thread, and random numbers that the actor's seed and index decide."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(int(np.random.SeedSequence((setup.seed, setup.index, setup.restarts)).generate_state(1)[0]))
    return True


def start_process(
    target: Callable[..., None], args: tuple[object, ...], name: str, *, without_program: bool
) -> BaseProcess:
    """Start `target(*args)` in a spawned process that ends with this one; it begins with SIGINT and SIGHUP blocked.

    `without_program`: it does not import the program, of which it needs nothing.
    """
    process = _CONTEXT.Process(target=target, args=args, name=name, daemon=True)
    # Ctrl-C reaches every process of the terminal, and so does its closing. The process inherits that both are
    # blocked: it would end before it could say that they are the host's to handle.
    # (The resource tracker would unblock it when it starts.)
    multiprocessing.resource_tracker.ensure_running()
    allowed = signal.pthread_sigmask(signal.SIG_BLOCK, _HOSTS_SIGNALS)
    try:
        with program_hidden() if without_program else contextlib.nullcontext():
            process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, allowed)
    return process


def cause_of_death(process: BaseProcess) -> str:
    """How a process that has ended did: "signal SIGSEGV", "exit code 1"."""
    code = process.exitcode or 0
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


@dataclass
class _Running:
    process: BaseProcess
    report: Connection
    setup: ActorSetup


class ActorGroup:
    """The running actors. `check` names a dead one, restarts it, and gives up after `most_deaths` within `window_s`."""

    def __init__(
        self,
        setups: Sequence[ActorSetup],
        dcqs: Sequence[DataCollectionQueue],
        wsq: WeightSyncQueue,
        *,
        most_deaths: int = 3,
        window_s: float = 60.0,
    ) -> None:
        self._dcqs, self._wsq = list(dcqs), wsq
        self._most_deaths, self._window_s = most_deaths, window_s
        self._deaths: deque[float] = deque()
        self._next_check = 0.0
        self.restarts = 0
        self._running = [self._start(setup, dcq) for setup, dcq in zip(setups, self._dcqs, strict=True)]

    def _start(self, setup: ActorSetup, dcq: DataCollectionQueue) -> _Running:
        receive, send = _CONTEXT.Pipe(duplex=False)
        alone = standalone(setup)
        sent, environment = alone if alone is not None else (setup, None)
        process = start_process(
            run_actor,
            (sent, dcq, self._wsq, send, environment),
            f"actor-{setup.index}",
            without_program=alone is not None,
        )
        send.close()
        return _Running(process, receive, setup)

    @property
    def pids(self) -> list[int]:
        """Process ids, by actor index."""
        return [r.process.pid or 0 for r in self._running]

    def check(self, env_steps: int) -> None:
        """Restart dead actors (at most ten looks a second). ActorError when they die too often."""
        now = time.monotonic()
        if now < self._next_check:
            return
        self._next_check = now + _CHECK_INTERVAL_S
        dead = set(multiprocessing.connection.wait([r.process.sentinel for r in self._running], timeout=0))
        for index, running in enumerate(self._running):
            if running.process.sentinel in dead:
                self._replace(index, running, env_steps, now)

    def _replace(self, index: int, running: _Running, env_steps: int, now: float) -> None:
        running.process.join()
        cause = cause_of_death(running.process)
        detail = ""
        with contextlib.suppress(EOFError, OSError):
            if running.report.poll():
                detail = "\n" + running.report.recv_bytes().decode(errors="replace").rstrip()
        running.report.close()
        self._deaths.append(now)
        while self._deaths and now - self._deaths[0] > self._window_s:
            self._deaths.popleft()
        name = running.process.name
        if len(self._deaths) >= self._most_deaths:
            raise ActorError(
                f"Actors died {len(self._deaths)} times within {self._window_s:.0f} s; the last was {name} ({cause}). "
                f"The run stops here; its checkpoint can be resumed with --resume once the cause is mended.{detail}"
            )
        logger.warning("%s died (%s) and is restarted.%s", name, cause, detail)
        self.restarts += 1
        setup = dataclasses.replace(running.setup, env_steps=env_steps, restarts=running.setup.restarts + 1)
        self._running[index] = self._start(setup, self._dcqs[index])

    def stop(self, timeout_s: float = 5.0) -> None:
        """Close the queues, wait for the processes, and end those that do not stop."""
        for dcq in self._dcqs:
            dcq.close()
        deadline = time.monotonic() + timeout_s
        for running in self._running:
            running.process.join(max(0.0, deadline - time.monotonic()))
            if running.process.is_alive():
                logger.warning("%s did not stop in %.0f s and is killed.", running.process.name, timeout_s)
                running.process.kill()
                running.process.join()
            running.report.close()
