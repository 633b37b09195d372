"""What a finished run leaves: evaluation, weights, learning curve, summary."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pearl.actors.native_policy import NativePolicy
from pearl.algorithms.trainer import TrainerLike
from pearl.atomic_file import write_bytes, write_text
from pearl.runtime.evaluation import Evaluation, evaluate
from pearl.runtime.options import Options
from pearl.runtime.run_state import Best
from pearl.runtime.trainer_state import load_module_tensors, module_tensors
from pearl.spec import ActorSpec

_QUICK_EPISODES = 20


@dataclass
class Judge:
    """Evaluates the policy on the way and at the end, and remembers the best weights.

    `record` is told every evaluation; `should_stop` is asked at every step, and ends an evaluation without a result.
    With a `policy` that one acts, by the trainer's weights.
    """

    trainer: TrainerLike
    actors: ActorSpec
    options: Options
    record: Callable[[Evaluation], None]
    should_stop: Callable[[], bool] = lambda: False
    policy: NativePolicy | None = None
    best: Best | None = field(default=None, repr=False)
    solved: Evaluation | None = None

    def _play(self, episodes: int, seed: int) -> Evaluation | None:
        seed += self.options.seed
        found = evaluate(self.trainer, self.actors, episodes, seed, self.should_stop, self.policy)
        if found is not None:
            self.record(found)
        return found

    def look(self) -> Evaluation | None:
        """A short evaluation; the full one if it reaches the goal, which it returns if that reaches it too."""
        episodes = min(_QUICK_EPISODES, self.options.eval_episodes)
        if not episodes:
            return None
        found = self._play(episodes, seed=10_000)
        if found is None:
            return None
        if self.best is None or found.mean > self.best.mean:
            self.best = Best(found.mean, module_tensors(self.trainer))
        goal = self.options.until_return
        if goal is None or found.mean < goal:
            return None
        full = self._play(self.options.eval_episodes, seed=20_000)
        if full is None or full.mean < goal:
            return None
        self.solved = full
        return full

    def final(self) -> Evaluation | None:
        """The full evaluation, on episodes that decided nothing: neither when to stop nor which weights to keep."""
        if self.solved is None:
            self._keep_the_better_weights()
        return self._play(self.options.eval_episodes, seed=30_000)

    def _keep_the_better_weights(self) -> None:
        """Put the best weights on the way into the trainer, where they beat the last ones on the same episodes."""
        if self.best is None:
            return
        last = self._play(self.options.eval_episodes, seed=20_000)
        if last is None or self.best.mean <= last.mean:
            return
        weights = module_tensors(self.trainer)
        load_module_tensors(self.trainer, self.best.tensors)
        again = self._play(self.options.eval_episodes, seed=20_000)
        if again is None or again.mean <= last.mean:
            load_module_tensors(self.trainer, weights)


def save_weights(trainer: TrainerLike, path: Path) -> None:
    """The trainer's modules as `attribute.parameter` in one safetensors file; optimizers are left to checkpoints."""
    from safetensors.torch import save

    from pearl.algorithms.trainer import modules_of

    modules = modules_of(trainer)
    flat = {
        f"{group}.{name}": tensor.contiguous()
        for group, tensors in module_tensors(trainer).items()
        if group in modules
        for name, tensor in tensors.items()
    }
    write_bytes(path, save(flat))


def write_summary(path: Path, summary: Mapping[str, object]) -> None:
    """JSON for people and programs."""
    write_text(path, json.dumps(summary, indent=2) + "\n")


def evaluation_summary(found: Evaluation) -> dict[str, float | int]:
    """An evaluation in numbers."""
    return {
        "episodes": len(found.returns),
        "mean": found.mean,
        "std": found.std,
        "min": float(found.returns.min()),
        "max": float(found.returns.max()),
    }
