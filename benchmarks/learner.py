"""Time of one training step of the native learner and of torch: one thread each, in one process, taking turns.

Double DQN (Huber loss, clipped gradients), DDPG, TD3 and SAC, with Adam; DQN also from images of bytes `(4, 84, 84)`
with a Nature CNN. The peers are this project's own torch learner
(flat parameters, fused Adam) and a plain torch script with fused Adam, as users write it. Before the measurement, a
check confirms that all three train the same weights. GFLOP/s count matrix products only; the peer is the SGEMM peak
measured at the beginning.

Each turn consists of slices of a few milliseconds, and the fastest counts, on all sides: what else runs on the cores of
a shared machine only adds time. So each turn is a selected number, and medians and spreads are those of turns; records
of before 2026-11-27 have means of whole turns instead. A neighbour on the same core slows ours, whose products use it
fully, more than peers that wait for other things: while there is one, ratios are lower. So all sides run on one core
and move to another when a neighbour stays for long. A turn of all sides is repeated if, before or after it, a product
of the kernels took 1.4 times its least time, for up to 20 minutes of a run.

"With sampling" are steps that sample and gather their batch themselves, uniformly from a full replay of 10,000
transitions of Pendulum-v1's shapes (DQN: of CartPole-v1's, by priority). Ours is setting 2's loop in C++ with the
native learner. The peers take turns with it, each in a process of its own. rltools trains only within a step of its
loop, which also acts in its own Pendulum in C++. Its "training" is such a step less the time of steps that only act;
the whole step has a row of its own. rltools is compiled for each problem, with MKL and without a BLAS; its rows of
seconds are that compilation (0: ours compiles nothing for a problem). Without AMX, our products leave out what a ReLU
has made zero, so a step takes less time the more zeros there are: here, with new networks and random data, about half
of the numbers. A row per case has its matrix products alone, at
the SGEMM peak. rlox trains with torch, and its DQN has a squared loss. Neither has DDPG. Where the processor has AMX,
rows "of 16 bits" are the same steps with PEARL_MATMUL=high; all others are in float32.

A "PPO minibatch" is the time of eleven epochs on a rollout less that of one epoch, divided by the minibatches of ten
epochs. So the other work of rltools' loop, collecting in its own Pendulum in C++, does not count. All use ReLU and do
not clip gradients, which is rltools' default.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from benchmarks import workload
from benchmarks.peers import training
from benchmarks.peers.torch_scripts import ActorCriticScript, Columns, DqnScript, Script
from benchmarks.quiet import Quiet, own_cores
from benchmarks.record import Row, by_kernels, shown, write
from benchmarks.timing import DifferenceError, alternate_calls, fastest, microseconds, one_thread, options
from benchmarks.workload import Filled, Loop
from pearl import _native
from pearl.algorithms import DDPG, DQN, PPO, SAC, TD3
from pearl.backends.cpu.learner import NativeLearner
from pearl.backends.cpu.rollout_learner import NativeRolloutLearner
from pearl.learner.torch_learner import TorchLearner
from pearl.replay import DataStorage, make_replay_manager
from pearl.spec import ReplayMode, ReplaySpec, TransitionSpec

GOALS: dict[tuple[tuple[int, ...], int], float] = {((64, 64), 32): 10.0, ((256, 256), 32): 3.0, ((256, 256), 512): 1.15}
PEERS = {
    "rltools_training": "rltools, MKL",
    "rltools_plain": "rltools, without a BLAS",
    "rltools_ppo_training": "rltools, MKL",
    "rlox_training": "rlox",
}
FLOOR = "the step's matrix products alone, at the rate of SGEMM here"
SLOTS = 10_000
PUBLICATION_INTERVAL = 100
SLICES = 10  # of a turn, of steps alone
SLICE_S = 5e-3  # of other turns
QUIET_S, FIRST_S = 1_200.0, 30.0  # spent at most on disturbed turns, and on a first look at the core
CONTINUOUS = (((64, 64), 32), ((256, 128), 32), ((256, 128), 512), ((256, 256), 256))


@dataclass(frozen=True)
class Case(workload.Case):
    """A case with its goal and its cost."""

    @property
    def goal(self) -> float | None:
        """How many times faster than torch the native learner should be."""
        return GOALS.get((self.hidden, self.batch)) if self.algorithm == "DQN" else None

    @property
    def flop(self) -> float:
        """Floating-point operations of the matrix products of one step, on average."""
        if self.algorithm == "DQN":  # three forward passes, and a backward pass without the input's gradient
            q, first = _products(self.floats, self.hidden, self.actions)
            return 2.0 * self.batch * (5 * q - first)
        stochastic, critics = self.algorithm == "SAC", 1 if self.algorithm == "DDPG" else 2
        actor, actor_first = _products(self.floats, self.hidden, self.actions * (2 if stochastic else 1))
        critic, critic_first = _products(self.floats + self.actions, self.hidden, 1)
        targets_and_critics = actor + critics * (4 * critic - critic_first)
        # The policy's own passes, and the critics' forward and input-gradient passes for it.
        policy = 3 * actor - actor_first + 2 * critic * (critics if stochastic else 1)
        return 2.0 * self.batch * (targets_and_critics + policy / (2 if self.algorithm == "TD3" else 1))


@dataclass(frozen=True)
class PixelCase(Case):
    """DQN from images, with the network of Mnih et al. 2015."""

    actions: int = 6

    @property
    def shape(self) -> str:
        """The network and the batch size, as tables show them."""
        return f"Nature CNN B={self.batch}"

    @property
    def goal(self) -> float | None:
        """None is set."""
        return None

    @property
    def flop(self) -> float:
        """The same of convolutions and linear layers."""
        first = 20 * 20 * 32 * 8 * 8 * 4
        rest = 9 * 9 * 64 * 4 * 4 * 32 + 7 * 7 * 64 * 3 * 3 * 64 + 7 * 7 * 64 * 512 + 512 * self.actions
        return 2.0 * self.batch * (5 * (first + rest) - first)

    def trainer(self, **settings: object) -> Any:
        """A trainer of images."""
        images = spaces.Box(0, 255, (4, 84, 84), np.uint8)
        return DQN(images, spaces.Discrete(self.actions), seed=0, **settings)


PIXEL_CASES = (PixelCase("DQN", (), 32), PixelCase("DQN", (), 256))


@dataclass(frozen=True)
class SamplingCase(Case):
    """A case that samples its batches, with an environment's shapes."""

    environment: str = "Pendulum-v1"
    floats: int = 3
    actions: int = 1

    def loop(self) -> Loop:
        """Setting 2's loop in C++, with the native learner and a full replay."""
        mode: ReplayMode = "prioritized" if self.algorithm == "DQN" else "uniform"

        def make(spec: TransitionSpec, slots: int) -> tuple[Any, Any]:
            return make_replay_manager(ReplaySpec(slots, mode=mode), seed=0), DataStorage(spec, slots)

        trainer = self.trainer()
        return Loop(NativeLearner(trainer), Filled.of(trainer, SLOTS, make), self.batch, PUBLICATION_INTERVAL)

    def of_peers(self) -> training.Case:
        """The same case, as peers read it."""
        algorithm: Any = self.algorithm.lower()
        return training.Case(algorithm, self.environment, self.hidden, self.batch, SLOTS, double=True)


SAMPLING_CASES = (
    SamplingCase("SAC", (64, 64), 100),
    SamplingCase("TD3", (64, 64), 100),
    SamplingCase("SAC", (256, 256), 256),
    SamplingCase("TD3", (256, 256), 256),
    SamplingCase("DQN", (64, 64), 32, "CartPole-v1", 4, 2),
)

PPO_CASES = (
    training.Case("ppo", "Pendulum-v1", (64, 64), 100, 1000, envs=8, epochs=11, activation="relu"),
    training.Case("ppo", "Pendulum-v1", (256, 256), 256, 2048, envs=8, epochs=11, activation="relu"),
)


def _products(inputs: int, hidden: tuple[int, ...], outputs: int) -> tuple[int, int]:
    """Multiplications of one forward pass for one transition: of all layers, and of the first."""
    widths = (inputs, *hidden, outputs)
    layers = [a * b for a, b in itertools.pairwise(widths)]
    return sum(layers), layers[0]


def cases(quick: bool) -> list[Case]:
    """Cases with a goal, then those of the other algorithms, then the sweep."""
    found = [Case("DQN", hidden, batch) for hidden, batch in GOALS]
    shapes = CONTINUOUS[:1] if quick else CONTINUOUS
    found += [Case(algorithm, *shape) for algorithm in ("DDPG", "TD3", "SAC") for shape in shapes]
    widths, batches, depths = (
        ((64, 256), (32,), (2,)) if quick else ((32, 64, 128, 256, 512), (16, 64, 256, 1024), (1, 2, 3))
    )
    found += [Case("DQN", (width,) * depth, batch) for depth in depths for width in widths for batch in batches]
    return list(dict.fromkeys(found))


def batch_of(case: Case) -> tuple[Columns, np.ndarray]:
    rng, trainer = np.random.default_rng(0), case.trainer()
    spec = TransitionSpec.from_spaces(trainer.observation_space, trainer.action_space)
    return workload.transitions(spec, case.batch, rng), rng.uniform(0.1, 1.0, case.batch).astype(np.float32)


def trainer_of(case: Case) -> DQN | DDPG | TD3 | SAC:
    found: DQN | DDPG | TD3 | SAC = case.trainer(**({"saturation_penalty": 0.0} if case.algorithm == "DDPG" else {}))
    return found


def script_of(trainer: DQN | DDPG | TD3 | SAC, *, same_noise: bool = False) -> Script:
    """A plain script with the trainer's networks; with `same_noise`, it uses the noise that the trainer draws."""
    if isinstance(trainer, DQN):
        return DqnScript(trainer)
    return ActorCriticScript(trainer, trainer.draw_noise if same_noise and not isinstance(trainer, DDPG) else None)


def trained(trainer: DQN | DDPG | TD3 | SAC) -> Iterable[torch.Tensor]:
    """The trained parameters, in the order of the scripts."""
    networks = (trainer.q,) if isinstance(trainer, DQN) else (trainer.actor, trainer.critic)
    return itertools.chain.from_iterable(network.parameters() for network in networks)


def check(case: Case) -> None:
    """All three have the same weights after three steps. Later, rounding may lead to different greedy actions."""
    ours, theirs, base = trainer_of(case), trainer_of(case), trainer_of(case)
    script = script_of(base, same_noise=True)
    learner, reference = NativeLearner(ours), TorchLearner(theirs)
    columns, weights = batch_of(case)
    for number in range(3):
        learner.step(columns, weights)
        reference.step(columns, weights)
        base.gradient_steps = number
        script.step(columns, weights)
    # Compared as a whole: Adam turns even a gradient of mere rounding errors into a full step. Images give rectifiers
    # so many inputs that one is 0 to rounding: it passes in one learner and not in the other, and the gradients of the
    # layers before it differ by a thousandth. Wrong gradients would change whole steps, which is 0.05 and more.
    tolerance = 1e-2 if isinstance(case, PixelCase) else 1e-4
    mine, flat, script_weights = (
        torch.cat([p.detach().flatten() for p in parameters])
        for parameters in (trained(ours), trained(theirs), script.parameters())
    )
    for name, other in (("the torch learner", flat), ("the plain script", script_weights)):
        if float((mine - other).norm() / other.norm()) > tolerance:
            raise DifferenceError(f"{case.name}: after three steps the weights differ from those of {name}.")


def peak_gflops() -> tuple[float, float]:
    """The fastest single-thread SGEMM of 256 x 256 by 512, of these kernels and of torch."""
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(256, 256)).astype(np.float32), rng.normal(size=(256, 512)).astype(np.float32)
    result, out = np.empty((256, 512), np.float32), torch.empty(256, 512)
    left, right = torch.from_numpy(a), torch.from_numpy(b)

    def ours() -> None:
        _native.gemm(a, b, result)

    def theirs() -> None:
        torch.mm(left, right, out=out)

    flop = 2.0 * 256 * 256 * 512
    best = alternate_calls([ours, theirs], 30, 5e-3).min(axis=1)
    return flop / best[0] / 1e3, flop / best[1] / 1e3


def quiet_of(limit_s: float, first_s: float) -> Quiet:
    """With products as the probe: small ones of 64 x 64 by 512, and for as long one that needs the L2 cache."""
    rng = np.random.default_rng(0)

    def product(size: int) -> Callable[[], None]:
        a, b = (rng.normal(size=(size, columns)).astype(np.float32) for columns in (size, 512))
        return partial(_native.gemm, a, b, np.empty((size, 512), np.float32))

    small, large = product(64), product(256)

    def probe() -> None:
        for _ in range(8):
            small()
        large()

    return Quiet(probe, limit_s, first_s, own_cores())


def measure(case: Case, repeats: int, slice_s: float, peak: float, quiet: Quiet) -> list[Row]:
    """One row per peer, and one of GFLOP/s."""
    check(case)
    contenders = NativeLearner(trainer_of(case)), TorchLearner(trainer_of(case)), script_of(trainer_of(case))
    batch = batch_of(case)
    values = alternate_calls([partial(each.step, *batch) for each in contenders], repeats, slice_s, SLICES, quiet.turn)
    step = f"{case.algorithm} step {case.shape}"
    rows = (
        Row.of(step, "us", "lower", values[0], "pearl on torch, eager", values[1]),
        Row.of(step, "us", "lower", values[0], "plain torch script", values[2]),
        Row.of(f"rate {case.name}", "GFLOP/s", "higher", case.flop / values[0] / 1e3, "SGEMM here", peak),
    )
    if case.goal:
        print(f"goal of the next row: {case.goal}x")
    return shown(rows)


def measure_sampling(
    case: SamplingCase, peers: Sequence[str], repeats: int, turn_s: float, peak: float, quiet: Quiet
) -> Iterator[Row]:
    """Steps that sample their batches, of ours and of each peer, in turn; and the matrix products alone."""
    loops = {"": case.loop()}
    if _native.selected_learner_kernels() == "amx":
        _native.select_matmul_precision("high")
        loops[", of 16 bits"] = case.loop()
        _native.select_matmul_precision("highest")
    count = max(1, round(SLICE_S * 1e6 / max(loops[""].run(20), 1.0)))
    with ExitStack() as stack:
        theirs_case = case.of_peers()
        compared = training.compared(peers, theirs_case)
        sides = [stack.enter_context(training.Side(peer, theirs_case, PEERS[peer])) for peer in compared]

        def turn() -> tuple[dict[str, float], dict[str, dict[str, float]]]:
            ours = {of: fastest(partial(loop.run, count), turn_s) for of, loop in loops.items()}
            theirs = {}
            for side in sides:
                if side.reason:
                    continue
                try:
                    theirs[side.module] = fastest_of(side, turn_s)
                except RuntimeError as error:
                    side.reason = str(error)
            return ours, theirs

        turns = [quiet.turn(turn) for _ in range(repeats)]
    floor_us = case.flop / peak / 1e3
    step = f"{case.algorithm} step with sampling {case.shape}"
    ours = {of: [mine[of] for mine, _ in turns] for of in loops}
    yield Row.of(step, "us", "lower", ours[""], FLOOR, floor_us)
    for side in sides:
        found = [] if side.reason else [theirs[side.module] for _, theirs in turns]
        for of, times in ours.items():
            yield from sampling_rows(case, step + of, times, side, found)


def fastest_of(side: training.Side, seconds: float) -> dict[str, float]:
    """What a peer measures in a turn's slices: the highest rate, and the least of each time."""
    end, found = time.perf_counter() + seconds, side.measure(SLICE_S)
    while time.perf_counter() < end:
        for name, value in side.measure(SLICE_S).items():
            found[name] = (max if name == "eps" else min)(found[name], value)
    return found


def sampling_rows(
    case: SamplingCase, step: str, ours: Sequence[float], side: training.Side, found: Sequence[dict[str, float]]
) -> Iterator[Row]:
    """A peer's training; where it was measured within a loop, also the loop's whole step and its compilation."""
    if not found or "whole_us" not in found[0]:
        training_us = [case.batch * 1e6 / each["eps"] for each in found]
        yield Row.of(step, "us", "lower", ours, side.name, training_us, side.reason)
        return
    # Not of the rate, which is highest where the acting between was disturbed.
    training_us = [each["whole_us"] - each["acting_us"] for each in found]
    acting_us = float(np.median([each["acting_us"] for each in found]))
    whole = f"{side.name}: whole step of its loop, with {acting_us:.1f} us of acting and environment"
    yield Row.of(step, "us", "lower", ours, f"{side.name}: training", training_us)
    yield Row.of(step, "us", "lower", ours, whole, [each["whole_us"] for each in found])
    if step.endswith("of 16 bits"):
        return
    compile_s = [each["compile_s"] for each in found[:1]]
    yield Row.of(f"compilation for {case.name}", "s", "lower", [0.0], side.name, compile_s)


def measure_ppo(case: training.Case, peers: Sequence[str], repeats: int, turn_s: float, quiet: Quiet) -> Iterator[Row]:
    """Minibatches of ours and of each peer, in turns: the extra time of a training with more epochs."""
    one_epoch = replace(case, epochs=1)
    minibatches = (case.epochs - 1) * (case.slots // case.batch)
    trainings = []
    for each in (case, one_epoch):
        train = partial(ppo_learner(each).train, rollout_of(case))
        train()
        trainings.append((train, max(1, round(SLICE_S * 1e6 / microseconds(train, 3)))))
    with ExitStack() as stack:
        sides = [
            [stack.enter_context(training.Side(peer, each, PEERS[peer])) for each in (case, one_epoch)]
            for peer in training.compared(peers, case)
        ]

        def turn() -> tuple[float, list[float]]:
            several, one = (fastest(partial(microseconds, train, count), turn_s) for train, count in trainings)
            ours, theirs = (several - one) / minibatches, []
            for pair in sides:
                found = float("nan")  # where there is a reason
                if not any(side.reason for side in pair):
                    try:
                        several, one = (case.slots * 1e6 / fastest_of(side, turn_s)["eps"] for side in pair)
                    except RuntimeError as error:
                        pair[0].reason = str(error)
                    else:
                        found = (several - one) / minibatches
                theirs.append(found)
            return ours, theirs

        turns = [quiet.turn(turn) for _ in range(repeats)]
    name = f"PPO minibatch {'x'.join(map(str, case.hidden))} B={case.batch}"
    ours = [mine for mine, _ in turns]
    for (side, one_side), found in zip(sides, zip(*(theirs for _, theirs in turns), strict=True), strict=True):
        reason = side.reason or one_side.reason
        yield Row.of(name, "us", "lower", ours, f"{side.name}: training", [] if reason else found, reason)


def ppo_learner(case: training.Case) -> NativeRolloutLearner:
    """A native learner with the settings of the peers."""
    pendulum = spaces.Box(-8.0, 8.0, (3,), np.float32), spaces.Box(-2.0, 2.0, (1,), np.float32)
    trainer = PPO(*pendulum, hidden_sizes=case.hidden, activation=case.activation, max_grad_norm=0.0, seed=0)
    return NativeRolloutLearner(trainer, epochs=case.epochs, batch_size=case.batch)


def rollout_of(case: training.Case) -> dict[str, np.ndarray]:
    """A rollout of random numbers."""
    rng = np.random.default_rng(0)
    columns = {"obs": (case.slots, 3), "action": (case.slots, 1), "advantage": (case.slots,), "ret": (case.slots,)}
    rollout = {name: rng.normal(size=shape).astype(np.float32) for name, shape in columns.items()}
    return rollout | {"log_prob": np.full(case.slots, -1.4, np.float32)}


def main() -> None:
    parser = options(__doc__, "a few cases")
    parser.add_argument("--peers", nargs="*", default=list(PEERS), choices=PEERS, metavar="NAME", help=", ".join(PEERS))
    arguments = parser.parse_args()
    quick, peers = arguments.quick, arguments.peers
    one_thread("benchmarks.learner", pinned=False)
    torch.set_num_threads(1)
    quiet = quiet_of(0.0, 0.0) if quick else quiet_of(QUIET_S, FIRST_S)
    ours, theirs = quiet.turn(peak_gflops)
    print(f"kernels: {_native.selected_learner_kernels()}; SGEMM 256x256x512: {ours:.1f} GFLOP/s, torch {theirs:.1f}")
    rows = [Row("SGEMM 256x256x512", ours, "GFLOP/s", "higher", (ours, ours), 30, "torch", theirs)]
    repeats, slice_s, turn_s = (5, 1e-3, 0.1) if quick else (15, 2e-3, 0.2)
    for sampling_case in SAMPLING_CASES[:1] if quick else SAMPLING_CASES:
        rows += shown(measure_sampling(sampling_case, peers, repeats, turn_s, max(ours, theirs), quiet))
    for ppo_case in PPO_CASES[:1] if quick else PPO_CASES:
        rows += shown(measure_ppo(ppo_case, peers, repeats, turn_s, quiet))
    for case in [*cases(quick), *(PIXEL_CASES[:1] if quick else PIXEL_CASES)]:
        rows += measure(case, repeats, slice_s, max(ours, theirs), quiet)
    quiet.end()  # a record counts the cores that can be used
    print(quiet)
    if not quick and len(peers) == len(PEERS) and (name := by_kernels("learner")):
        write(name, "make bench-learner", 1, rows, kernels=_native.selected_learner_kernels(), note=str(quiet))


if __name__ == "__main__":
    main()
