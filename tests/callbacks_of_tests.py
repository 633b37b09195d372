"""Callbacks that generated programs of the tests import."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pearl.callbacks import Callback, RunContext
from pearl.runtime.evaluation import Evaluation


class Noting(Callback):
    """Writes what it was told, and what it saw, into the run folder."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.seen: dict[str, Any] = {}

    def on_start(self, run: RunContext) -> None:
        assert run.run_dir.is_dir()
        self.calls["start"] += 1

    def on_step(self, run: RunContext) -> None:
        self.calls["step"] += 1

    def on_rollout(self, run: RunContext) -> None:
        self.calls["rollout"] += 1

    def on_evaluation(self, run: RunContext, kind: str, evaluation: Evaluation) -> None:
        self.calls[kind] += 1
        obs = np.random.default_rng(0).normal(size=(20, 4)).astype(np.float32)
        with torch.no_grad():
            theirs = run.trainer.get_action(torch.from_numpy(obs)).numpy()
        self.seen["same actions"] = bool((run.policy().predict(obs) == theirs).all())
        run.log("mine", float(run.env_steps))
        self.seen["config"] = dict(run.config)

    def on_checkpoint(self, run: RunContext, path: Path) -> None:
        assert (path / "manifest.json").exists()
        self.calls["checkpoint"] += 1

    def on_end(self, run: RunContext) -> None:
        self.calls["end"] += 1
        self.seen |= {"stopped": run.stopped, "error": run.error, "steps": run.env_steps}
        run.log("at the end", 7.0)
        self.seen["weights"] = (run.run_dir / "policy.json").exists()
        (run.run_dir / "noted.json").write_text(json.dumps({"calls": self.calls, "seen": self.seen}))


class Raising(Callback):
    def __init__(self, hook: str) -> None:
        setattr(self, hook, self.fail)

    def fail(self, *arguments: object) -> None:
        raise RuntimeError("this is mine")


class StopsAtOnce:
    """Derives from nothing."""

    def on_step(self, run: RunContext) -> None:
        if run.env_steps >= 50:
            run.stop("enough")


def gradient_steps(run: RunContext) -> float:
    return run.gradient_steps
