"""Training by other frameworks, one process each: the protocol between the process and the benchmark.

A peer's module is run as `python -m benchmarks.peers.NAME CASE`, with the case as JSON. It answers one line of JSON:
its name and version, or the reason why it cannot take part. Then it reads lines with a number of seconds; for each it
trains that long and answers how many experiences it trained per second, and what else it measures.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from benchmarks.record import ROOT

Algorithm = Literal["dqn", "qrdqn", "ddpg", "td3", "sac", "tqc", "ppo"]
Train = Callable[[int], object]
Measure = Callable[[float], dict[str, float]]  # trains for seconds; returns "eps", and what else it measures
SOME: dict[str, tuple[Algorithm, ...]] = {  # peers of which benchmarks show only what they can train
    "rltools_training": ("sac", "td3"),
    "rltools_plain": ("sac", "td3"),
    "rltools_ppo_training": ("ppo",),
    "rlox_training": ("dqn", "sac", "td3"),
}
CHUNK_S = 0.1  # about how long one call of `train` may take
END_S = 30.0  # time for a framework to end its own processes


@dataclass(frozen=True)
class Case:
    """A training: the same networks, batch size and count of slots, all filled, on every side."""

    algorithm: Algorithm
    environment: str
    hidden: tuple[int, ...]  # hidden layers of every network; empty for the convolutional one of Mnih et al. 2015
    batch: int
    slots: int  # of a replay, or the transitions of a rollout
    envs: int = 1
    epochs: int = 0  # on each rollout
    vector: bool = False  # the environment's own vector instead of one after the other
    threads: int = 1
    double: bool = False  # double DQN
    critics: int = 2  # of TQC
    quantiles: int = 0  # of QRDQN and TQC, for each critic
    learners: int = 0  # in processes of their own, which share each batch
    activation: Literal["tanh", "relu"] = "tanh"  # of PPO's networks; those of the others have ReLU

    @property
    def title(self) -> str:
        """The name in rows of the results."""
        network = "x".join(map(str, self.hidden)) or "Nature CNN"
        title = f"{self.algorithm.upper()} {self.environment} {network}, batch {self.batch}"
        if not self.epochs:
            return title
        how = "own vector" if self.vector else "one by one"
        return f"{title}, {self.envs} environments {how} x {self.slots // self.envs} steps, {self.epochs} epochs"

    @property
    def experiences(self) -> int:
        """Transitions of one call of `train`: a batch, or a rollout that is collected and trained on."""
        return self.slots if self.epochs else self.batch


def compared(peers: Iterable[str], case: Case) -> list[str]:
    """Those of the peers that have a row for the case."""
    return [peer for peer in peers if peer not in SOME or (case.hidden and case.algorithm in SOME[peer])]


@dataclass
class Side:
    """A peer's process, as a context manager, which ends it. `reason` says why the peer cannot train."""

    module: str
    case: Case
    name: str  # without the version, until the process has answered
    reason: str = ""

    def __enter__(self) -> Side:
        command = [sys.executable, "-m", f"benchmarks.peers.{self.module}", json.dumps(asdict(self.case))]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=ROOT,
        )
        answer = self._read()
        self.name, self.reason = answer.get("name", self.name), answer.get("reason", "")
        return self

    def __exit__(self, *exception: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def train(self, seconds: float) -> float:
        """Experiences trained per second, over about `seconds`."""
        return self.measure(seconds)["eps"]

    def measure(self, seconds: float) -> dict[str, float]:
        """Experiences trained per second ("eps"), over about `seconds`, and what else the peer measures."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{seconds}\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise RuntimeError(f"{self.name} ended") from None
        answer = self._read()
        if "eps" not in answer:
            raise RuntimeError(f"{self.name}: {answer.get('reason', 'no answer')}")
        return {name: float(value) for name, value in answer.items()}

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        found = json.loads(line) if line else {"reason": f"its process ended with code {self._process.wait()}"}
        assert isinstance(found, dict)
        return found


def rate(train: Train, batch: int, seconds: float, clock: Callable[[], float] = time.perf_counter) -> float:
    """Experiences per second of `train(steps)`, called until `seconds` have passed."""
    steps, chunk, start = 0, 1, clock()
    while True:
        train(chunk)
        steps += chunk
        elapsed = clock() - start
        if elapsed >= seconds:
            return steps * batch / elapsed
        chunk = max(1, min(2 * chunk, int(steps / elapsed * CHUNK_S)))


def first_line(error: BaseException) -> str:
    """The type of an exception and the first line of its message."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:160]}"


def serve(make: Callable[[Case], tuple[str, Train]]) -> None:
    """A peer's whole program: make the training function, warm it up, then train for each request."""

    def measured(case: Case) -> tuple[str, Measure]:
        name, train = make(case)
        train(1 if case.epochs else 3)
        return name, lambda seconds: {"eps": rate(train, case.experiences, seconds)}

    serve_measure(measured)


def serve_measure(make: Callable[[Case], tuple[str, Measure]]) -> None:
    """The whole program of a peer that measures by itself."""
    (text,) = sys.argv[1:]
    said = json.loads(text)
    case = Case(**{**said, "hidden": tuple(said["hidden"])})
    # The framework's own output goes to stderr, so that stdout has answers only.
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)

        def answer(**found: object) -> None:
            answers.write(json.dumps(found) + "\n")
            answers.flush()

        try:
            name, measure = make(case)
        except NotImplementedError as error:
            answer(reason=str(error))
            return
        except Exception as error:  # a framework may raise anything
            answer(reason=f"cannot train: {first_line(error)}")
            return
        answer(name=name)
        for line in sys.stdin:
            answer(**measure(float(line)))
