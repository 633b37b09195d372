"""Speed of generalized advantage estimation on the CPU, compared with other libraries.

One process pinned to one core, one thread each; ours and theirs take turns. A row is a rollout of T steps of N
environments, where one step in a hundred ends an episode; its numbers are billions of transitions estimated per second,
in whole calls from Python. Each library gets its own layout and types, made before the measurement, and returns
included where its call computes them. Before the measurement, a check confirms that both give the same advantages.

- `T=.. N=..`: float32 rewards and values, in place.
- `codes`: the same of codes of 8 bits, into other arrays; the peer is our own estimate in float32.
- `floor`: the peer copies as many bytes as an estimate reads and writes of rewards and values, and nothing else.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from benchmarks import peers, timing
from benchmarks.record import Row, shown, write
from benchmarks.timing import DifferenceError, microseconds, one_thread, options
from pearl import _native
from pearl.backends.cpu.gae import NativeGae
from pearl.rollout import quantized

GAMMA, LAMBDA = 0.99, 0.95
SIZES = ((128, 8), (2048, 8), (1024, 64), (128, 1024))
MOST_CALLS = 16  # of ours on the same arrays: more would overflow, since it overwrites what it reads
TOLERANCE = 1e-3


@dataclass(frozen=True)
class Plan:
    """How much is measured."""

    repeats: int = 200
    their_repeat_s: float = 2e-3


QUICK = Plan(repeats=40, their_repeat_s=5e-4)


def rollout(horizon: int, envs: int) -> dict[str, np.ndarray]:
    """The arguments of `AdvantageEstimator.estimate`, by name."""
    rng = np.random.default_rng((horizon, envs))
    rewards, values = rng.normal(size=(2, horizon, envs)).astype(np.float32)
    last_values = rng.normal(size=envs).astype(np.float32)
    ends = (rng.random((horizon, envs)) < 0.01).astype(np.uint8)
    return {"rewards": rewards, "values": values, "last_values": last_values, "ends": ends}


class Ours:
    """Our estimator on arrays of its own, which every repeat fills again."""

    def __init__(self, given: dict[str, np.ndarray]) -> None:
        self.given = given
        self.arrays = {name: array.copy() for name, array in given.items()}
        self.estimate = NativeGae(GAMMA, LAMBDA).estimate

    def fill(self) -> None:
        """Overwrite the results of earlier calls."""
        for name in ("rewards", "values"):
            np.copyto(self.arrays[name], self.given[name])

    def time_us(self, calls: int) -> float:
        """Microseconds of a call, the mean of `calls`."""
        self.fill()
        return microseconds(partial(self.estimate, *self.arrays.values()), calls)

    def advantages(self) -> np.ndarray:
        """Those of the rollout."""
        self.fill()
        self.estimate(**self.arrays)
        return self.arrays["rewards"]


def of_calls(function: Callable[[], object], repeat_s: float) -> tuple[Callable[[int], float], int]:
    """A contender for `timing.alternate`, and how many calls take about `repeat_s`."""
    function()  # compiles
    once = min(microseconds(function, 1) for _ in range(3))
    return partial(microseconds, function), max(1, round(repeat_s * 1e6 / once))


def rates(samples_us: np.ndarray, count: int) -> np.ndarray:
    """Billions of transitions in a second."""
    return count / samples_us / 1e3


def compare(
    case: str, count: int, ours: Callable[[int], float], peer: str, theirs: Callable[[], object], plan: Plan
) -> Row:
    """One row; `ours` is called up to MOST_CALLS times in a repeat."""
    their_time, their_calls = of_calls(theirs, plan.their_repeat_s)
    times = timing.alternate([ours, their_time], [MOST_CALLS, their_calls], plan.repeats)
    return Row.of(case, "G/s", "higher", rates(times[0], count), peer, rates(times[1], count))


def against_libraries(size: tuple[int, int], found: Sequence[peers.Peer], plan: Plan) -> Iterator[Row]:
    """Rows of one size, a peer each."""
    given = rollout(*size)
    ours, count = Ours(given), given["rewards"].size
    case = "T={} N={}".format(*size)
    for peer in found:
        try:
            if peer.module is None:
                raise NotImplementedError(peer.reason)
            theirs = peer.make("advantages", given, GAMMA, LAMBDA)
        except NotImplementedError as error:
            alone = timing.alternate([ours.time_us], [MOST_CALLS], plan.repeats)
            yield Row.of(case, "G/s", "higher", rates(alone[0], count), peer.name, reason=str(error))
            continue
        theirs()
        expected = theirs.advantages()
        if not np.allclose(ours.advantages(), expected, rtol=TOLERANCE, atol=TOLERANCE):
            worst = float(np.abs(ours.advantages() - expected).max())
            raise DifferenceError(f"{case}: {peer.name} gives other advantages, by up to {worst:.3g}.")
        yield compare(case, count, ours.time_us, peer.name, theirs, plan)


def against_ourselves(size: tuple[int, int], plan: Plan) -> Iterator[Row]:
    """Codes against float32, and float32 against copying the same bytes."""
    given = rollout(*size)
    ours, count = Ours(given), given["rewards"].size
    codes = [quantized(given[name], 8, 0.0, 1.0, restored=True) for name in ("rewards", "values")]
    outputs = [np.empty_like(given["rewards"]) for _ in range(2)]
    estimate = NativeGae(GAMMA, LAMBDA).estimate_codes
    of_codes = partial(estimate, *codes, None, given["last_values"], given["ends"], *outputs)

    sources = [given["rewards"].copy(), given["values"].copy()]

    def copy() -> None:
        for source, output in zip(sources, outputs, strict=True):
            np.copyto(output, source)

    case = "T={} N={}".format(*size)
    calls = [MOST_CALLS, MOST_CALLS]
    times = timing.alternate([partial(microseconds, of_codes), ours.time_us], calls, plan.repeats)
    yield Row.of(f"{case} codes", "G/s", "higher", rates(times[0], count), "float32", rates(times[1], count))
    yield compare(f"{case} floor", count, ours.time_us, "copy", copy, plan)


def main() -> None:
    """Measure, and write the results unless `--quick`."""
    parser = options(__doc__, "fewer repeats")
    parser.add_argument(
        "--peers", nargs="*", default=list(peers.ADVANTAGE_MODULES), choices=peers.ADVANTAGE_MODULES, metavar="NAME"
    )
    arguments = parser.parse_args()
    one_thread("benchmarks.gae")
    plan = QUICK if arguments.quick else Plan()
    found = [peers.load(module) for module in arguments.peers]
    gc.freeze()
    rows: list[Row] = []
    try:
        for size in SIZES:
            rows += shown(against_libraries(size, found, plan))
            rows += shown(against_ourselves(size, plan))
    except DifferenceError as error:
        sys.exit(f"Not measured: {error}")
    if not arguments.quick and len(arguments.peers) == len(peers.ADVANTAGE_MODULES):
        write("gae", "make bench-gae", threads=1, rows=rows, kernels=_native.selected_gae_kernels())


if __name__ == "__main__":
    main()
