"""Times all Actors of a run side by side, with the policy server if they have one: the run's own processes and queues.

The parts are not profiled alone: where Actors wait for answers, neither one Actor nor one batch shows their speed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pickle
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from composer.profiling.actors import pickled_setup, program_is_guarded
from pearl.actors.actor import ActorSetup
from pearl.actors.child_process import ChildProcess
from pearl.actors.environment import known_environment
from pearl.actors.process import run_actor
from pearl.actors.report import Report, Silence
from pearl.actors.standalone import names_program, without_trainer
from pearl.errors import EnvError, PolicyServerError
from pearl.ipc.queues import Bell, WeightSyncQueue
from pearl.runtime.policy_server import PolicyServerProcess, ServerSetup
from pearl.runtime.queues import DataCollectionQueue

if TYPE_CHECKING:
    from pearl.exploration import Exploration

_SILENCE_S = 60.0
_WAIT_S = 0.05
_FIRST_MESSAGES = 3  # of each Actor, before the first sample
_SAMPLES = 10


def measure_together(
    setup: ActorSetup, server: ServerSetup | None, exploration: Exploration | None, budget_s: float
) -> list[float]:
    """Microseconds in which all Actors of `setup` together make one environment step, by a `server` or not.

    With a server, they explore by `exploration`. Raises EnvError if an Actor cannot have its own process, fails or is
    silent for 60 s, PolicyServerError if the server fails.
    """
    with contextlib.ExitStack() as stack:
        together = _Together(setup, server, exploration, stack)
        together.run(lambda: together.fewest_messages >= _FIRST_MESSAGES)
        return [together.step_us(budget_s / _SAMPLES) for _ in range(_SAMPLES)]


class _Together:
    """The processes, which `stack` ends, and the host's queues and reports."""

    def __init__(
        self,
        setup: ActorSetup,
        server: ServerSetup | None,
        exploration: Exploration | None,
        stack: contextlib.ExitStack,
    ) -> None:
        pickled = pickled_setup(setup if server is None else without_trainer(setup))
        needs_program = server is not None and names_program(pickle.dumps(server))
        if pickled is None or (needs_program and not program_is_guarded()):
            raise EnvError(
                "Actors that are measured together need processes of their own, which import the program, which "
                'composes when it is imported. Put the composing under `if __name__ == "__main__":`.'
            )
        assert setup.transition is not None
        count, self._bell, self._name = setup.spec.count, Bell(), setup.spec.env_name
        wsq = WeightSyncQueue(1)  # nothing is published: the first weights act
        self._server: PolicyServerProcess | None = None
        setups = [dataclasses.replace(setup, index=index) for index in range(count)]
        if server is not None:
            self._server = PolicyServerProcess(
                server,
                setup.transition,
                [setup.spec.envs_per_actor] * count,
                wsq,
                exploration=exploration,
                without_program=not needs_program,
            )
            stack.callback(self._server.stop)
            services = self._server.services
            setups = [dataclasses.replace(s, service=one) for s, one in zip(setups, services, strict=True)]
        self._queues = [
            DataCollectionQueue(setup.transition, s.message_rows(), 2, self._bell, s.further_fields) for s in setups
        ]
        self._messages, self.steps = [0] * count, 0
        self._processes: list[tuple[ChildProcess, Report]] = []
        without_program = not names_program(pickled)
        for one, queue in zip(setups, self._queues, strict=True):
            self._processes.append(started(one, queue, wsq, without_program=without_program))
            stack.callback(self._processes[-1][0].kill)

    @property
    def beats(self) -> int:
        """The steps that were taken, as signs of life."""
        return self.steps

    @property
    def fewest_messages(self) -> int:
        """Messages of the Actor that has sent the fewest."""
        return min(self._messages)

    def step_us(self, seconds: float) -> float:
        """Microseconds of a step, measured for `seconds`, or longer until a message has come."""
        before, start = self.steps, time.perf_counter()
        self.run(lambda: time.perf_counter() >= start + seconds and self.steps > before)
        return (time.perf_counter() - start) * 1e6 / (self.steps - before)

    def run(self, until: Callable[[], bool]) -> None:
        """Take messages until `until()`."""
        silence = Silence(self)
        while not until():
            seen = self._bell.value()
            if self._take():
                continue
            self._check()
            if silence.look() > _SILENCE_S:
                raise EnvError(f"Actors in {self._name} sent nothing for {_SILENCE_S:g} s while they were profiled.")
            self._bell.wait(seen, _WAIT_S)

    def _take(self) -> bool:
        before = self.steps
        for index, queue in enumerate(self._queues):
            while (found := queue.peek()) is not None:
                self.steps += int(found[0]["counts"][1])
                self._messages[index] += 1
                queue.release()
        return self.steps > before

    def _check(self) -> None:
        if self._server is not None and (failure := self._server.failure) is not None:
            raise PolicyServerError(f"The policy server failed while Actors were profiled with it: {failure}")
        for process, report in self._processes:
            if process.exit_code is not None:
                cause = report.failure or f"{process.name} died ({process.cause_of_death})."
                raise EnvError(f"An actor in {self._name} failed while it was profiled: {cause.rstrip()}")


def started(
    setup: ActorSetup, queue: DataCollectionQueue, wsq: WeightSyncQueue, *, without_program: bool
) -> tuple[ChildProcess, Report]:
    """An Actor's process, and what it tells."""
    report = Report()
    sent = setup if setup.needs_torch else without_trainer(setup)
    environment = known_environment(setup.spec) if isinstance(setup.spec.env, str) else None
    arguments = (sent, queue, wsq, report, environment)
    process = ChildProcess(run_actor, arguments, f"profiled-actor-{setup.index}", without_program=without_program)
    return process, report
