"""How fast is one training step of the native learner, beside torch's? One thread each, one process, by turns.

Peers: this project's own torch learner (flat parameters, fused Adam), and a plain torch script with fused Adam, as
users write it. All three compute the same step: of double DQN (Huber loss, clipped gradients), DDPG, TD3 or SAC.
`--quick` is a look (a few cases, writes nothing); without it, benchmarks/results/learner.json is written.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
os.environ.update(ONE_THREAD)  # before torch and NumPy are loaded

import numpy as np  # noqa: E402
import torch  # noqa: E402
from gymnasium import spaces  # noqa: E402

from benchmarks.peers.torch_scripts import ActorCriticScript, Columns, DqnScript, Script  # noqa: E402
from benchmarks.record import Row, write  # noqa: E402
from pearl import _native  # noqa: E402
from pearl.algorithms import DDPG, DQN, SAC, TD3  # noqa: E402
from pearl.backends.cpu.learner import NativeLearner  # noqa: E402
from pearl.learner.torch_learner import TorchLearner  # noqa: E402

OBS_SIZE, ACTIONS = 4, 2  # CartPole's; of the actor-critics, the size of an action
GOALS: dict[tuple[tuple[int, ...], int], float] = {((64, 64), 32): 10.0, ((256, 256), 32): 3.0, ((256, 256), 512): 1.15}
CONTINUOUS = (((64, 64), 32), ((256, 128), 32), ((256, 128), 512), ((256, 256), 256))


@dataclass(frozen=True)
class Case:
    """One algorithm, network and batch size."""

    hidden: tuple[int, ...]
    batch: int
    algorithm: str = "DQN"

    @property
    def name(self) -> str:
        """As tables show it."""
        return f"{self.algorithm} {self.shape}"

    @property
    def shape(self) -> str:
        """Of the network and the batch."""
        return f"{'x'.join(map(str, self.hidden))} B={self.batch}"

    @property
    def goal(self) -> float | None:
        """How many times faster than torch it ought to be."""
        return GOALS.get((self.hidden, self.batch)) if self.algorithm == "DQN" else None

    @property
    def flop(self) -> float:
        """Of the matrix products of one step, on average."""
        if self.algorithm == "DQN":  # three forward passes, and two backward but for the input's
            q, first = _products(OBS_SIZE, self.hidden, ACTIONS)
            return 2.0 * self.batch * (5 * q - first)
        stochastic, critics = self.algorithm == "SAC", 1 if self.algorithm == "DDPG" else 2
        actor, actor_first = _products(OBS_SIZE, self.hidden, ACTIONS * (2 if stochastic else 1))
        critic, critic_first = _products(OBS_SIZE + ACTIONS, self.hidden, 1)
        targets_and_critics = actor + critics * (4 * critic - critic_first)
        # The policy's passes, and its critics' forward and by their inputs.
        policy = 3 * actor - actor_first + 2 * critic * (critics if stochastic else 1)
        return 2.0 * self.batch * (targets_and_critics + policy / (2 if self.algorithm == "TD3" else 1))


def _products(inputs: int, hidden: tuple[int, ...], outputs: int) -> tuple[int, int]:
    """Multiplications of one forward pass for one transition: of all layers, and of the first."""
    widths = (inputs, *hidden, outputs)
    layers = [a * b for a, b in itertools.pairwise(widths)]
    return sum(layers), layers[0]


def cases(quick: bool) -> list[Case]:
    """The goals' cases first, then the other algorithms', then the sweep."""
    found = [Case(hidden, batch) for hidden, batch in GOALS]
    shapes = CONTINUOUS[:1] if quick else CONTINUOUS
    found += [Case(*shape, algorithm) for algorithm in ("DDPG", "TD3", "SAC") for shape in shapes]
    widths, batches, depths = (
        ((64, 256), (32,), (2,)) if quick else ((32, 64, 128, 256, 512), (16, 64, 256, 1024), (1, 2, 3))
    )
    found += [Case((width,) * depth, batch) for depth in depths for width in widths for batch in batches]
    return list(dict.fromkeys(found))


def batch_of(case: Case) -> tuple[Columns, np.ndarray]:
    rng = np.random.default_rng(0)
    rows = case.batch
    actions = rng.uniform(-1, 1, (rows, ACTIONS)).astype(np.float32)
    columns = {
        "obs": rng.normal(size=(rows, OBS_SIZE)).astype(np.float32),
        "action": rng.integers(0, ACTIONS, rows) if case.algorithm == "DQN" else actions,
        "reward": rng.normal(size=rows).astype(np.float32),
        "next_obs": rng.normal(size=(rows, OBS_SIZE)).astype(np.float32),
        "discount": np.where(rng.random(rows) < 0.1, 0, 0.99).astype(np.float32),
    }
    return columns, rng.uniform(0.1, 1.0, rows).astype(np.float32)


def trainer_of(case: Case) -> DQN | DDPG | TD3 | SAC:
    # Bounds of 1, so that the plain scripts need no scaling.
    obs, box = spaces.Box(-1.0, 1.0, (OBS_SIZE,), np.float32), spaces.Box(-1.0, 1.0, (ACTIONS,), np.float32)
    if case.algorithm == "DQN":
        return DQN(obs, spaces.Discrete(ACTIONS), hidden_sizes=case.hidden)
    if case.algorithm == "DDPG":
        return DDPG(obs, box, hidden_sizes=case.hidden, saturation_penalty=0.0)
    return (TD3 if case.algorithm == "TD3" else SAC)(obs, box, hidden_sizes=case.hidden)


def script_of(trainer: DQN | DDPG | TD3 | SAC, *, same_noise: bool = False) -> Script:
    """A plain script from the trainer's networks; with `same_noise`, on the noise that the trainer draws."""
    if isinstance(trainer, DQN):
        return DqnScript(trainer)
    return ActorCriticScript(trainer, trainer.draw_noise if same_noise and not isinstance(trainer, DDPG) else None)


def trained(trainer: DQN | DDPG | TD3 | SAC) -> Iterable[torch.Tensor]:
    """The parameters that it trains, in the scripts' order."""
    networks = (trainer.q,) if isinstance(trainer, DQN) else (trainer.actor, trainer.critic)
    return itertools.chain.from_iterable(network.parameters() for network in networks)


class DifferenceError(Exception):
    """Two contenders do not compute the same: comparing their speed would mean nothing."""


def check(case: Case) -> None:
    """All three have the same weights after three steps; later, one rounding may choose another next action."""
    ours, theirs, base = trainer_of(case), trainer_of(case), trainer_of(case)
    script = script_of(base, same_noise=True)
    learner, reference = NativeLearner(ours), TorchLearner(theirs)
    columns, weights = batch_of(case)
    for number in range(3):
        learner.step(columns, weights)
        reference.step(columns, weights)
        base.gradient_steps = number
        script.step(columns, weights)
    # As a whole: Adam makes a full step of any gradient, of one that is mere rounding too.
    mine, flat, script_weights = (
        torch.cat([p.detach().flatten() for p in parameters])
        for parameters in (trained(ours), trained(theirs), script.parameters())
    )
    for name, other in (("the torch learner", flat), ("the plain script", script_weights)):
        if float((mine - other).norm() / other.norm()) > 1e-4:
            raise DifferenceError(f"{case.name}: after three steps the weights differ from those of {name}.")


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
    script = script_of(trainer_of(case))
    columns, weights = batch_of(case)
    steps = [lambda: ours.step(columns, weights), lambda: theirs.step(columns, weights)]
    values = alternate([*steps, lambda: script.step(columns, weights)], repeats, repeat_s)
    low, middle, high = (float(v) for v in np.percentile(values[0], (20, 50, 80)))
    step = f"{case.algorithm} step {case.shape}"
    rows = [
        Row(step, middle, "us", "lower", (low, high), repeats, peer, float(np.median(found)))
        for peer, found in zip(("pearl on torch, eager", "plain torch script"), values[1:], strict=True)
    ]
    rates = case.flop / values[0] / 1e3
    rates_low, rate, rates_high = (float(v) for v in np.percentile(rates, (20, 50, 80)))
    rows.append(
        Row(f"rate {case.name}", rate, "GFLOP/s", "higher", (rates_low, rates_high), repeats, "SGEMM here", peak)
    )
    print(
        f"{case.name:22} {middle:9.1f} us  torch {np.median(values[1]):9.1f} ({np.median(values[1]) / middle:5.1f}x)  "
        f"script {np.median(values[2]):9.1f} ({np.median(values[2]) / middle:5.1f}x)  {rate:6.1f} GFLOP/s"
        + (f"  goal {case.goal}x" if case.goal else ""),
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
