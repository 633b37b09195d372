"""Evaluations in a process of their own, so that training goes on meanwhile."""

from __future__ import annotations

import json
import logging
import math
import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

import numpy as np

from pearl.actors.actor import ActorSetup
from pearl.actors.child_process import ChildProcess
from pearl.actors.environment import register
from pearl.actors.native_policy import NativePolicy
from pearl.actors.report import Report, Silence
from pearl.actors.shared_warnings import SharedWarnings
from pearl.actors.standalone import standalone
from pearl.algorithms.trainer import Trainer, TrainerLike, policy_snapshot, uses_masks
from pearl.errors import EnvError
from pearl.ipc.queues import WeightSyncQueue
from pearl.moments import normalized
from pearl.runtime.evaluation import Evaluation, EvaluationEnvs, play

if TYPE_CHECKING:
    from gymnasium.envs.registration import EnvSpec

logger = logging.getLogger("pearl.runtime")

_LONGEST_END_S = 1.0


def idle_cores(busy: float) -> float:
    """Cores that this process may use beyond `busy` ones."""
    return len(os.sched_getaffinity(0)) - busy


class EvaluationProcess:
    """Plays greedy episodes with snapshots of a policy, in a process that starts with the first ones.

    `setup` is that of an actor with a native policy in the environment of the evaluations. The process has environments
    like `envs`, and `envs` warns for it of an episode that is too long. With `shared_warnings`, it shows only warnings
    that no process has shown. It is ended if it makes no step for `timeout_s` while it plays. One evaluation at a time:
    `ask`, then `answer` until it gives one.
    """

    def __init__(
        self,
        setup: ActorSetup,
        trainer: TrainerLike,
        envs: EvaluationEnvs,
        shared_warnings: SharedWarnings | None = None,
        timeout_s: float = math.inf,
    ) -> None:
        assert setup.policy is not None
        self._setup, self._envs, self._shared_warnings = setup, envs, shared_warnings
        self._report, self._timeout_s = Report(), timeout_s
        self._silence = Silence(self._report)
        self._masked = uses_masks(trainer)
        self._weights = WeightSyncQueue(len(_snapshot(trainer)))
        self._process: ChildProcess | None = None
        self._connection: Connection | None = None

    def take(self, trainer: TrainerLike) -> None:
        """Use the trainer's present policy in the next evaluations."""
        self._weights.write(_snapshot(trainer))

    def ask(self, episodes: int, seed: int) -> None:
        """Begin to play `episodes` episodes. Raises EvaluationProcessError if the process has died."""
        if self._process is None:
            self._start()
        assert self._connection is not None
        self._silence.begin()
        try:
            self._connection.send_bytes(json.dumps({"episodes": episodes, "seed": seed}).encode())
        except OSError as error:
            raise self._death() from error

    def answer(self, timeout_s: float = 0.0) -> Evaluation | None:
        """The evaluation that was asked for; None while it is being played.

        Raises EnvError with the environment's traceback if it fails, EvaluationProcessError if the process has died or
        hangs.
        """
        assert self._connection is not None
        try:
            if not self._connection.poll(timeout_s):
                self._check_silence()
                return None
            found = json.loads(self._connection.recv_bytes())
        except (EOFError, OSError) as error:
            raise self._death() from error
        if found["too_long"]:
            self._envs.warn_of_length()
        if "error" in found:
            raise EnvError(found["error"])
        return Evaluation(np.array(found["returns"], np.float64), np.array(found["lengths"], np.int64))

    def _start(self) -> None:
        self._connection, theirs = multiprocessing.Pipe()
        alone = standalone(self._setup)
        setup, environment = alone if alone is not None else (self._setup, None)
        self._process = ChildProcess(
            _evaluate_for_ever,
            (
                *(setup, environment, self._envs.most_steps, self._masked, self._weights, theirs, self._report),
                self._shared_warnings,
            ),
            "evaluations",
            without_program=alone is not None,
        )
        theirs.close()

    def _check_silence(self) -> None:
        """Raise EvaluationProcessError, and end the process, if it has made no step for too long."""
        silent_s = self._silence.look()
        if silent_s > self._timeout_s:
            assert self._process is not None
            self._process.kill()
            raise EvaluationProcessError(
                f"The process of the evaluations hung for {silent_s:.0f} s and was ended (--actor-timeout)"
            )

    def _death(self) -> EvaluationProcessError:
        assert self._process is not None
        self._process.wait(_LONGEST_END_S)
        self._process.kill()
        return EvaluationProcessError(f"The process of the evaluations died ({self._process.cause_of_death})")

    def close(self) -> None:
        """End the process; what it was playing is lost."""
        process, self._process = self._process, None
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
        if process is not None:
            process.kill()


class EvaluationProcessError(Exception):
    """The process of the evaluations has died or hung; only its evaluation is lost."""


def _evaluate_for_ever(
    setup: ActorSetup,
    environment: EnvSpec | None,
    most_steps: int,
    masked: bool,
    weights: WeightSyncQueue,
    requests: Connection,
    report: Report,
    shared_warnings: SharedWarnings | None,
) -> None:
    """Main function of the process: until the other end closes."""
    if shared_warnings is not None:
        shared_warnings.install()
    if environment is not None:
        register(environment)
    assert setup.policy is not None
    policy, envs = NativePolicy(setup.policy), EvaluationEnvs(setup.spec, most_steps)
    logger.disabled = True  # the program gives the warnings of `envs`
    act: Callable[..., np.ndarray] = policy.act

    def goes_on() -> bool:
        report.beat()
        return False

    while True:
        try:
            request = json.loads(requests.recv_bytes())
        except (EOFError, OSError):
            return
        if (flat := weights.poll()) is not None:
            act = _acting(policy, len(setup.policy.weights), flat)
        try:
            found = play(act, envs, request["episodes"], request["seed"], goes_on, masked=masked)
        except EnvError as error:
            envs.close()
            reply: dict[str, object] = {"error": str(error)}
        else:
            assert found is not None
            reply = {"returns": found.returns.tolist(), "lengths": found.lengths.tolist()}
        requests.send_bytes(json.dumps({"too_long": envs.has_warned, **reply}).encode())


def _snapshot(trainer: TrainerLike) -> np.ndarray:
    """The policy's weights, then mean and scale of observations if the trainer normalises them: float32 in a row."""
    parts = [policy_snapshot(trainer)]
    moments = trainer.observation_moments if isinstance(trainer, Trainer) else None
    if moments is not None:
        parts += [moments.mean.reshape(-1), moments.scale.reshape(-1)]
    return np.concatenate(parts).astype(np.float32, copy=False)


def _acting(policy: NativePolicy, weights: int, flat: np.ndarray) -> Callable[..., np.ndarray]:
    """Greedy actions by the `weights` numbers of the policy, and the statistics of observations after them, if any."""
    policy.load_weights(flat[:weights])
    if len(flat) == weights:
        return policy.act
    statistics = flat[weights:].copy()

    def act(obs: np.ndarray, *masks: np.ndarray) -> np.ndarray:
        mean, scale = statistics.reshape(2, *obs.shape[1:])
        return policy.act(normalized(obs, mean, scale), *masks)

    return act
