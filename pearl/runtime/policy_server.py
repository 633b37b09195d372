"""The policy server: a process that infers for all actors at once, on a device of torch.

A process of its own, not a thread of the host: its Python does not wait for the host's and the Learner's, and its GPU
work cannot disturb graphs that the Learner records. A GPU takes turns between the work of two processes.
"""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pearl.actors.child_process import ChildProcess
from pearl.actors.report import Report, Silence
from pearl.actors.served_policy import RESULTS, Inference, InferenceQueue, PolicyService, inputs_of
from pearl.actors.shared_warnings import SharedWarnings
from pearl.backends import support_for_torch
from pearl.errors import ConfigurationError, PearlError, PolicyServerError, QueueClosedError
from pearl.ipc.queues import Bell, WeightSyncQueue
from pearl.lazy_torch import torch
from pearl.spec import ActorSpec, RolloutSpec, TransitionSpec

if TYPE_CHECKING:
    import gymnasium as gym

    from pearl.runtime.policy_inference import PolicyInference

_WAIT_S = 0.5


@dataclass(frozen=True)
class ServerSetup:
    """The trainer whose policy is served, and torch's `device` for it."""

    trainer_class: type
    settings: Mapping[str, Any]
    observation_space: gym.Space[Any]
    action_space: gym.Space[Any]
    seed: int
    device: str


def why_not_served(trainer: object, rollout: RolloutSpec | None = None) -> str | None:
    """What of this trainer and its rollouts a policy server cannot do; None if it can serve them."""
    from pearl.algorithms.trainer import RecurrentTrainer

    name = type(trainer).__name__
    if isinstance(trainer, RecurrentTrainer):
        return f"recurrent policies, as that of {name}, whose states stay with the actors"
    if rollout is not None and rollout.policy_lag:
        return f"policy_lag={rollout.policy_lag}, with which the weights would change within a rollout"
    return None


def check_served(actors: ActorSpec, trainer: object, rollout: RolloutSpec | None = None) -> None:
    """Raise ConfigurationError if `actors` want a policy server on no known device, or it cannot serve the trainer."""
    kind = actors.policy_server.partition(":")[0]
    if actors.is_served and kind != "cpu" and support_for_torch(kind) is None:
        raise ConfigurationError(
            'policy_server of actors must be "none", "cpu", or a device that a backend knows, such as "cuda:0"; found '
            f"{actors.policy_server!r}."
        )
    if actors.is_served and (reason := why_not_served(trainer, rollout)) is not None:
        raise ConfigurationError(
            f"policy_server={actors.policy_server!r} does not support {reason}. Leave it out, or set it to "
            '"none": each actor then runs the policy itself.'
        )


class PolicyServer:
    """Answers all requests that wait, in one batch, then those that came meanwhile.

    It takes the newest weights of `wsq`, a reader of its own, before each batch. Actors ring `bell`. One thread calls
    all methods.
    """

    def __init__(
        self, inference: PolicyInference, queues: Sequence[InferenceQueue], wsq: WeightSyncQueue, bell: Bell
    ) -> None:
        self._inference, self._queues, self._wsq, self._bell = inference, list(queues), wsq, bell
        self.batches = self.requests = 0

    def serve(self, beat: Callable[[], None] = lambda: None) -> None:
        """Answer until a queue closes; `beat` is called twice a second at least."""
        try:
            while True:
                beat()
                seen = self._bell.value()
                if not self.answer():
                    self._bell.wait(seen, _WAIT_S)
        except QueueClosedError:
            return

    def answer(self) -> int:
        """Answer the requests that wait now; their number."""
        waiting: dict[tuple[int, ...], list[tuple[InferenceQueue, Mapping[str, Any], int]]] = {}
        for queue in self._queues:
            if (found := queue.peek()) is not None:
                slot, rows = found
                waiting.setdefault(tuple(slot["request"].tolist()), []).append((queue, slot, rows))
        if not waiting:
            return 0
        if (weights := self._wsq.poll()) is not None:
            self._inference.load_weights(weights)
        for (inference, masked), requests in waiting.items():
            self._answer_alike(Inference(inference), requests, masked=bool(masked))
        return sum(map(len, waiting.values()))

    def _answer_alike(
        self,
        inference: Inference,
        requests: Sequence[tuple[InferenceQueue, Mapping[str, Any], int]],
        *,
        masked: bool,
    ) -> None:
        arrays = self._inference.arrays
        ends = list(itertools.accumulate(rows for _, _, rows in requests))
        parts = [slice(end - rows, end) for end, (_, _, rows) in zip(ends, requests, strict=True)]
        inputs = inputs_of(inference, masked=masked)
        for part, (_, slot, rows) in zip(parts, requests, strict=True):
            for name in inputs:
                arrays[name][part] = slot[name][:rows]
        self._inference.run(inference, ends[-1], masked=masked)
        for part, (queue, slot, rows) in zip(parts, requests, strict=True):
            for name in RESULTS[inference]:
                slot[name][:rows] = arrays[name][part]
            slot["version"][0] = self._wsq.version
            queue.release()
        self.batches += 1
        self.requests += len(requests)


def make_server(setup: ServerSetup, queues: Sequence[InferenceQueue], wsq: WeightSyncQueue, bell: Bell) -> PolicyServer:
    """The server in this process; PearlError if its device or trainer cannot be had."""
    from pearl.algorithms.trainer import make_trainer
    from pearl.runtime.policy_inference import PolicyInference

    device = _checked_device(setup.device)
    trainer = make_trainer(
        setup.trainer_class,
        setup.observation_space,
        setup.action_space,
        seed=setup.seed,
        device=str(device),
        settings=dict(setup.settings),
    )
    rows = sum(queue.rows for queue in queues)
    return PolicyServer(PolicyInference(trainer, device, queues[0].fields, rows), queues, wsq, bell)


def _checked_device(name: str) -> torch.device:
    device = torch.device(name)
    support = support_for_torch(device.type)
    if support is not None and (reason := support.why_not(device)) is not None:
        raise ConfigurationError(f"policy_server={name!r} cannot be used here: {reason}.")
    return device


def run_policy_server(
    setup: ServerSetup,
    queues: Sequence[InferenceQueue],
    wsq: WeightSyncQueue,
    bell: Bell,
    report: Report,
    shared_warnings: SharedWarnings | None = None,
) -> None:
    """Main function of the server's process: until a queue closes."""
    if shared_warnings is not None:
        shared_warnings.install()
    try:
        torch.set_num_threads(1)  # as in actors
        torch.manual_seed(setup.seed)
        server = make_server(setup, queues, wsq, bell)
        report.ready()
        server.serve(report.beat)
    except BaseException as error:
        says_all = isinstance(error, PearlError) and error.__cause__ is None
        report.fail(str(error) if says_all else traceback.format_exc(limit=-8))
        raise SystemExit(1) from None


class PolicyServerProcess:
    """The server's process, which starts at once, as the host sees it.

    Actors with so many environments each (`rows`) get `services`, with their own `exploration`. The process is silent
    for at most `timeout_s`; 0: for ever. `without_program`: it need not import the program.
    """

    def __init__(
        self,
        setup: ServerSetup,
        transition: TransitionSpec,
        rows: Sequence[int],
        wsq: WeightSyncQueue,
        *,
        exploration: Any = None,
        timeout_s: float = 0.0,
        shared_warnings: SharedWarnings | None = None,
        without_program: bool = False,
    ) -> None:
        bell, self._report = Bell(), Report()
        self._queues = [InferenceQueue(transition, count, bell) for count in rows]
        self.services = [PolicyService(queue, exploration) for queue in self._queues]
        self._device, self._timeout_s = setup.device, timeout_s
        self._process = ChildProcess(
            run_policy_server,
            (setup, self._queues, wsq, bell, self._report, shared_warnings),
            "policy-server",
            without_program=without_program,
        )
        self._silence = Silence(self._report)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def is_ready(self) -> bool:
        """Whether it answers requests."""
        return self._report.is_ready

    @property
    def failure(self) -> str | None:
        """Why it ended; None while it runs."""
        if self._process.exit_code is None:
            return None
        return (self._report.failure or f"died ({self._process.cause_of_death})").rstrip()

    def check(self) -> None:
        """Raise PolicyServerError if it has died, failed or hung."""
        if self._process.exit_code is not None:
            failure = self._report.failure
            detail = "" if failure is None else ("\n" if "\n" in failure else " ") + failure.rstrip()
            raise PolicyServerError(self._ended(f"died ({self._process.cause_of_death})") + detail)
        silent_s = self._silence.look()
        if self._timeout_s and silent_s > self._timeout_s:
            doing = "inferred" if self.is_ready else "started"
            self._process.kill()
            raise PolicyServerError(
                self._ended(f"hung for {silent_s:.0f} s while it {doing}, and was ended (--actor-timeout)")
            )

    def _ended(self, how: str) -> str:
        return (
            f"The policy server (process {self.pid}, on {self._device}), which infers for all actors, {how}. The run "
            'stops here; its checkpoint can be resumed with --resume, also with policy_server="none" in ACTORS.'
        )

    def stop(self) -> None:
        """Close the queues, which ends actors that wait for an answer, and end the process: it has nothing to save."""
        for queue in self._queues:
            queue.close()
        self._process.kill()
