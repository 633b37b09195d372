"""How fast is one training step of the native learner, beside torch's? One thread each, one process, by turns.

Peers: this project's own torch learner (flat parameters, fused Adam), and a plain torch script with fused Adam, as
users write it. All three compute the same step: double DQN, Huber loss, clipped gradients. `--quick` is a look (a few
cases, writes nothing); without it, benchmarks/results/learner.json is written.
"""

from __future__ import annotations

import argparse
import copy
import gc
import itertools
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
os.environ.update(ONE_THREAD)  # before torch and NumPy are loaded

import numpy as np  # noqa: E402
import torch  # noqa: E402
from gymnasium import spaces  # noqa: E402
from torch import nn  # noqa: E402

from benchmarks.record import Row, write  # noqa: E402
from pearl import _native  # noqa: E402
from pearl.algorithms import DQN  # noqa: E402
from pearl.learner.native_learner import NativeLearner  # noqa: E402
from pearl.learner.torch_learner import TorchLearner  # noqa: E402

OBS_SIZE, ACTIONS = 4, 2  # CartPole's
GOALS = {((64, 64), 32): 10.0, ((256, 256), 32): 3.0, ((256, 256), 512): 1.15}
Columns = dict[str, np.ndarray]


@dataclass(frozen=True)
class Case:
    """One network and batch size."""

    hidden: tuple[int, ...]
    batch: int

    @property
    def name(self) -> str:
        """As tables show it."""
        return f"{'x'.join(map(str, self.hidden))} B={self.batch}"

    @property
    def flop(self) -> float:
        """Of the matrix products of one double-DQN step: three forward passes, and two backward but for the input's."""
        widths = (OBS_SIZE, *self.hidden, ACTIONS)
        macs = [a * b for a, b in itertools.pairwise(widths)]
        return 2.0 * self.batch * (5 * sum(macs) - macs[0])


def cases(quick: bool) -> list[Case]:
    """The goals' cases first, then the sweep."""
    found = [Case(hidden, batch) for hidden, batch in GOALS]
    widths, batches, depths = (
        ((64, 256), (32,), (2,)) if quick else ((32, 64, 128, 256, 512), (16, 64, 256, 1024), (1, 2, 3))
    )
    found += [Case((width,) * depth, batch) for depth in depths for width in widths for batch in batches]
    return list(dict.fromkeys(found))


def batch_of(rows: int) -> tuple[Columns, np.ndarray]:
    rng = np.random.default_rng(0)
    columns = {
        "obs": rng.normal(size=(rows, OBS_SIZE)).astype(np.float32),
        "action": rng.integers(0, ACTIONS, rows),
        "reward": rng.normal(size=rows).astype(np.float32),
        "next_obs": rng.normal(size=(rows, OBS_SIZE)).astype(np.float32),
        "discount": np.where(rng.random(rows) < 0.1, 0, 0.99).astype(np.float32),
    }
    return columns, rng.uniform(0.1, 1.0, rows).astype(np.float32)


def trainer_of(case: Case) -> DQN:
    box = spaces.Box(-5.0, 5.0, (OBS_SIZE,), np.float32)
    return DQN(box, spaces.Discrete(ACTIONS), hidden_sizes=case.hidden)


class PlainScript:
    """Double DQN as it is commonly written in torch."""

    def __init__(self, trainer: DQN) -> None:
        self.q = nn.Sequential(*(copy.deepcopy(layer) for layer in trainer.q))
        for parameter in self.q.parameters():
            parameter.data, parameter.grad = parameter.data.clone(), None
        self.target = copy.deepcopy(self.q)
        self.optimizer = torch.optim.Adam(self.q.parameters(), lr=trainer.learning_rate, fused=True)
        self.steps, self.interval, self.max_norm = 0, trainer.target_update_interval, trainer.max_grad_norm

    def step(self, columns: Columns, weights: np.ndarray) -> torch.Tensor:
        """One step; returns |TD error|."""
        obs, action, reward, next_obs, discount = (torch.from_numpy(column) for column in columns.values())
        with torch.no_grad():
            best = self.q(next_obs).argmax(dim=1, keepdim=True)
            target = reward + discount * self.target(next_obs).gather(1, best).squeeze(1)
        value = self.q(obs).gather(1, action.unsqueeze(1)).squeeze(1)
        loss = (nn.functional.smooth_l1_loss(value, target, reduction="none") * torch.from_numpy(weights)).mean()
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.q.parameters(), self.max_norm)
        self.optimizer.step()
        self.steps += 1
        if self.steps % self.interval == 0:
            self.target.load_state_dict(self.q.state_dict())
        return (value.detach() - target).abs()


class DifferenceError(Exception):
    """Two contenders do not compute the same: comparing their speed would mean nothing."""


def check(case: Case) -> None:
    """All three have the same weights after ten steps."""
    ours, theirs = trainer_of(case), trainer_of(case)
    script = PlainScript(ours)
    learner, reference = NativeLearner(ours), TorchLearner(theirs)
    columns, weights = batch_of(case.batch)
    for _ in range(10):
        learner.step(columns, weights)
        reference.step(columns, weights)
        script.step(columns, weights)
    # As a whole: Adam makes a full step of any gradient, of one that is mere rounding too.
    mine, flat, plain = (
        torch.cat([p.detach().flatten() for p in q.parameters()]) for q in (ours.q, theirs.q, script.q)
    )
    for name, other in (("the torch learner", flat), ("the plain script", plain)):
        if float((mine - other).norm() / other.norm()) > 1e-3:
            raise DifferenceError(f"{case.name}: after ten steps the weights differ from those of {name}.")


def timed(step: Callable[[], object], calls: int) -> float:
    """Microseconds of one call."""
    start = time.perf_counter()
    for _ in range(calls):
        step()
    return (time.perf_counter() - start) / calls * 1e6


def alternate(steps: Sequence[Callable[[], object]], repeats: int, repeat_s: float) -> np.ndarray:
    """Microseconds `(contenders, repeats)`, the contenders by turns."""
    calls = [max(1, min(2_000, round(repeat_s * 1e6 / timed(step, 3)))) for step in steps]
    values = np.empty((len(steps), repeats))
    gc.collect()
    gc.disable()
    try:
        for repeat in range(repeats):
            for turn in range(len(steps)):
                which = (turn + repeat) % len(steps)
                values[which, repeat] = timed(steps[which], calls[which])
    finally:
        gc.enable()
    return values


def peak_gflops() -> tuple[float, float]:
    """The best single-thread SGEMM of 256 x 256 by 512 found here: by these kernels, and by torch."""
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(256, 256)).astype(np.float32), rng.normal(size=(256, 512)).astype(np.float32)
    panels = [np.ascontiguousarray(b[:, k : k + 32]) for k in range(0, 512, 32)]
    outs = [np.empty((256, 32), np.float32) for _ in panels]
    left, right, out = torch.from_numpy(a), torch.from_numpy(b), torch.empty(256, 512)

    def ours() -> None:
        for panel, result in zip(panels, outs, strict=True):
            _native.gemm(a, panel, result)

    def theirs() -> None:
        torch.mm(left, right, out=out)

    flop = 2.0 * 256 * 256 * 512
    best = alternate([ours, theirs], 30, 5e-3).min(axis=1)
    return flop / best[0] / 1e3, flop / best[1] / 1e3


def measure(case: Case, repeats: int, repeat_s: float, peak: float) -> list[Row]:
    """One row for each peer, and one of GFLOP/s."""
    check(case)
    ours, theirs = NativeLearner(trainer_of(case)), TorchLearner(trainer_of(case))
    script = PlainScript(trainer_of(case))
    columns, weights = batch_of(case.batch)
    steps = [lambda: ours.step(columns, weights), lambda: theirs.step(columns, weights)]
    values = alternate([*steps, lambda: script.step(columns, weights)], repeats, repeat_s)
    low, middle, high = (float(v) for v in np.percentile(values[0], (20, 50, 80)))
    rows = [
        Row(f"DQN step {case.name}", middle, "us", "lower", (low, high), repeats, peer, float(np.median(found)))
        for peer, found in zip(("pearl on torch, eager", "plain torch script"), values[1:], strict=True)
    ]
    rates = case.flop / values[0] / 1e3
    rates_low, rate, rates_high = (float(v) for v in np.percentile(rates, (20, 50, 80)))
    rows.append(
        Row(f"rate {case.name}", rate, "GFLOP/s", "higher", (rates_low, rates_high), repeats, "SGEMM here", peak)
    )
    goal = GOALS.get((case.hidden, case.batch))
    print(
        f"{case.name:22} {middle:9.1f} us  torch {np.median(values[1]):9.1f} ({np.median(values[1]) / middle:5.1f}x)  "
        f"script {np.median(values[2]):9.1f} ({np.median(values[2]) / middle:5.1f}x)  {rate:6.1f} GFLOP/s"
        + (f"  goal {goal}x" if goal else ""),
        flush=True,
    )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a look: a few cases, nothing written")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    ours, theirs = peak_gflops()
    print(f"kernels: {_native.selected_learner_kernels()}; SGEMM 256x256x512: {ours:.1f} GFLOP/s, torch {theirs:.1f}")
    rows = [
        Row("SGEMM 256x256x512", ours, "GFLOP/s", "higher", (ours, ours), 30, "torch", theirs),
    ]
    repeats, repeat_s = (5, 0.01) if quick else (15, 0.02)
    for case in cases(quick):
        rows += measure(case, repeats, repeat_s, max(ours, theirs))
    if not quick:
        write("learner", "make bench-learner", 1, rows, kernels=_native.selected_learner_kernels())


if __name__ == "__main__":
    main()
