"""The results of a run: evaluations, weights, summary."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from pearl.actors.native_policy import NativePolicy
from pearl.algorithms.trainer import TrainerLike
from pearl.atomic_file import write_bytes, write_text
from pearl.runtime.backup import put_aside
from pearl.runtime.checkpoint_files import Stored, Tensors, safetensors_of
from pearl.runtime.evaluation import Evaluation, EvaluationEnvs, evaluate
from pearl.runtime.evaluation_process import EvaluationProcess
from pearl.runtime.options import Options
from pearl.runtime.run_log import EvaluationKind
from pearl.runtime.run_state import Best, Counters
from pearl.runtime.trainer_state import load_module_tensors, module_tensors, network_groups
from pearl.spec import ActorSpec

logger = logging.getLogger("pearl.runtime")

LAST_WEIGHTS = "weights.safetensors"
BEST_WEIGHTS = "best_weights.safetensors"

_QUICK_EPISODES = 20
_SILENT_S = 5.0  # a full evaluation that takes longer is announced
# First seeds of the episodes. Each kind of evaluation has its own, so that no episode decides two things.
_PROGRESS_SEED = 10_000
_SOLVED_SEED = 20_000
_FINAL_SEED = 30_000
_SEEDS_OF_A_RUN = 50_000


def _first_seed(kind: int, run: int) -> int:
    """The seed of the first environment, each further one of which has the next: runs of other seeds share none."""
    return (kind + 1 + _SEEDS_OF_A_RUN * (run - 1)) % 2**30  # ale-py takes no longer ones


@dataclass(frozen=True)
class _Pending:
    """An evaluation that is being played: of which weights, and if it is the full one, the `short` one before it."""

    weights: Best
    short: Evaluation | None = None

    @property
    def kind(self) -> EvaluationKind:
        """Of the evaluation."""
        return "progress" if self.short is None else "solved check"


@dataclass
class Evaluator:
    """Evaluates the policy while it trains and at the end, and remembers the best weights.

    Short evaluations select the best weights. At the end, `finish` plays the last and the best weights on the same new
    episodes, which selected neither: `last` and `best_again` hold the results.

    `record` is called with each evaluation, its kind and the environment step of its weights. `should_stop` is called
    at every step; True ends the evaluation without a result. A `policy`, if given, acts with the trainer's weights;
    `envs`, if given, are the environments to act in. A `process`, if given, may play the short evaluations:
    `begin_progress` and `hear_progress` do what `check_progress` does, while the trainer trains on. `say` is told of a
    full evaluation that takes long.
    """

    trainer: TrainerLike
    actors: ActorSpec
    options: Options
    counters: Counters
    record: Callable[[EvaluationKind, int, Evaluation], None]
    should_stop: Callable[[], bool] = lambda: False
    policy: NativePolicy | None = None
    envs: EvaluationEnvs | None = None
    process: EvaluationProcess | None = None
    best: Best | None = field(default=None, repr=False)
    last: Evaluation | None = None
    best_again: Evaluation | None = None
    say: Callable[[str], None] = lambda text: None
    _pending: _Pending | None = field(default=None, repr=False)

    def _play(self, kind: EvaluationKind, step: int, episodes: int, seed: int) -> Evaluation | None:
        seed = _first_seed(seed, self.options.seed)
        should_stop = self.should_stop if kind == "progress" else self._announcing(kind, episodes)
        found = evaluate(self.trainer, self.actors, episodes, seed, should_stop, self.policy, self.envs)
        if found is not None:
            self.record(kind, step, found)
        return found

    def _announcing(self, kind: EvaluationKind, episodes: int) -> Callable[[], bool]:
        """`should_stop`, which also tells the user once what a long evaluation is about."""
        due: float | None = time.monotonic() + _SILENT_S
        what = "present" if kind == "solved check" else kind

        def should_stop() -> bool:
            nonlocal due
            if due is not None and time.monotonic() >= due:
                due = None
                self.say(f"Evaluating:     {episodes} greedy episodes of the {what} weights; Ctrl-C leaves them out")
            return self.should_stop()

        return should_stop

    def check_progress(self) -> Evaluation | None:
        """Play a short evaluation, and a full one if that reaches the goal; return the full one if it does too."""
        step = self.counters.env_steps
        if not self._quick_episodes:
            return None
        found = self._play("progress", step, self._quick_episodes, _PROGRESS_SEED)
        if found is None:
            return None
        if self._is_best(found):
            self.best = self._present(found)
        if not self._reaches_goal(found):
            return None
        full = self._play("solved check", step, self.options.eval_episodes, _SOLVED_SEED)
        if full is None or not self._reaches_goal(full):
            return None
        self.best = self._present(found)  # it reached the goal twice, which counts for more than an earlier lucky mean
        return full

    @property
    def _quick_episodes(self) -> int:
        return min(_QUICK_EPISODES, self.options.eval_episodes)

    def _is_best(self, found: Evaluation) -> bool:
        return self.best is None or _is_better(found.mean, self.best.mean)

    def _reaches_goal(self, found: Evaluation) -> bool:
        goal = self.options.until_return
        return goal is not None and found.mean >= goal

    def _present(self, found: Evaluation | None = None) -> Best:
        """The trainer's present weights, with the result of `found`."""
        mean, episodes = (math.nan, 0) if found is None else (found.mean, len(found.returns))
        now = self.counters
        return Best(mean, episodes, now.env_steps, now.gradient_steps, module_tensors(self.trainer))

    # --- the same in a process, while training goes on ---

    @property
    def is_pending(self) -> bool:
        """Whether an evaluation in the process has begun and not ended."""
        return self._pending is not None

    def begin_progress(self) -> None:
        """Begin the short evaluation of the present weights in the process; call it while nothing trains.

        Raises EvaluationProcessError if the process has died.
        """
        assert self.process is not None
        if self._quick_episodes:
            self.process.take(self.trainer)
            self.process.ask(self._quick_episodes, _first_seed(_PROGRESS_SEED, self.options.seed))
            self._pending = _Pending(self._present())

    def hear_progress(self, timeout_s: float = 0.0) -> Evaluation | None:
        """Take what has been played of the evaluation that was begun; return the full one if both reached the goal.

        Raises EnvError and EvaluationProcessError as `EvaluationProcess.answer`; then nothing is pending any more.
        """
        pending, process = self._pending, self.process
        if pending is None or process is None:
            return None
        self._pending = None
        found = process.answer(timeout_s)
        if found is None:
            self._pending = pending
            return None
        self.record(pending.kind, pending.weights.env_steps, found)
        short = pending.short or found
        judged = pending.weights._replace(mean=short.mean, episodes=len(short.returns))
        if pending.short is not None:
            if not self._reaches_goal(found):
                return None
            self.best = judged
            return found
        if self._is_best(found):
            self.best = judged
        if self._reaches_goal(found):
            process.ask(self.options.eval_episodes, _first_seed(_SOLVED_SEED, self.options.seed))
            self._pending = _Pending(pending.weights, found)
        return None

    def end_process(self) -> None:
        """End the process, if there is one; what it was playing is lost."""
        process, self.process, self._pending = self.process, None, None
        if process is not None:
            process.close()

    # --- the end ---

    @property
    def last_is_best(self) -> bool:
        """Whether the current weights are the best."""
        return self.best is not None and self.best.gradient_steps == self.counters.gradient_steps

    @property
    def last_may_be_best(self) -> bool:
        """Whether there are best weights, and the current ones were not compared with them."""
        return self.best is not None and not self.last_is_best

    def finish(self) -> None:
        """Evaluate the last and the best weights; the trainer keeps the last."""
        episodes, step = self.options.eval_episodes, self.counters.env_steps
        if self.last_is_best:
            self.last = self.best_again = self._play("last and best", step, episodes, _FINAL_SEED)
            return
        self.last = self._play("last", step, episodes, _FINAL_SEED)
        if self.last is None or self.best is None:
            return
        weights = module_tensors(self.trainer)
        load_module_tensors(self.trainer, self.best.tensors)
        try:
            self.best_again = self._play("best", self.best.env_steps, episodes, _FINAL_SEED)
        finally:
            load_module_tensors(self.trainer, weights)

    def summary(self) -> dict[str, object]:
        """`last` and `best` for summary.json: the step of the weights, and numbers where they were evaluated."""
        last = {"step": self.counters.env_steps, **_numbers(self.last)}
        if self.best is None:
            return {"last": last, "best": None}
        selected = {"selected_mean": self.best.mean, "selected_episodes": self.best.episodes}
        return {"last": last, "best": {"step": self.best.env_steps, **_numbers(self.best_again), **selected}}

    def save(self, directory: Path) -> None:
        """Write the current weights into `directory`, and the best ones if an evaluation selected some.

        Otherwise best weights that are there are renamed: of before a resumption that evaluates elsewhere.
        """
        save_weights(self.trainer, directory / LAST_WEIGHTS)
        best = directory / BEST_WEIGHTS
        if self.best is not None:
            save_weights(self.trainer, best, self.best.tensors)
        elif best.exists():
            logger.warning("%s is not of this run's evaluations; it was renamed to %s.", best, put_aside(best).name)


def _is_better(mean: float, other: float) -> bool:
    return mean > other or (math.isnan(other) and not math.isnan(mean))


def save_weights(trainer: TrainerLike, path: Path, tensors: Tensors | None = None) -> None:
    """Write the trainer's networks as `attribute.parameter` to one safetensors file, without optimizers.

    `tensors` are groups as `module_tensors` returns them; by default the current ones.
    """
    found, groups = module_tensors(trainer) if tensors is None else tensors, network_groups(trainer)
    write_bytes(path, safetensors_of(flat_tensors(found, groups)))


def flat_tensors(tensors: Tensors, groups: Collection[str]) -> dict[str, Stored]:
    """The tensors of some `groups` by `group.name`, as weights files have them."""
    return {
        f"{group}.{name}": tensor if isinstance(tensor, np.ndarray) else tensor.contiguous()
        for group, content in tensors.items()
        if group in groups
        for name, tensor in content.items()
    }


def write_summary(path: Path, summary: Mapping[str, object]) -> None:
    """Write `summary` as JSON."""
    write_text(path, json.dumps(summary, indent=2) + "\n")


def _numbers(found: Evaluation | None) -> dict[str, float | int]:
    """The statistics of an evaluation; empty for None."""
    if found is None:
        return {}
    return {
        "episodes": len(found.returns),
        "mean": found.mean,
        "std": found.std,
        "min": float(found.returns.min()),
        "max": float(found.returns.max()),
    }
