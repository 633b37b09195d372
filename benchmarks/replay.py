"""How fast are the Replay Manager and the Data Storage, beside other replay buffers? One thread each, one process.

Ours and theirs take turns, so that whatever disturbs the machine disturbs both. `--quick` is a look (under a minute,
writes nothing); without it, benchmarks/results/replay.json and the plots in docs/assets are written.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any, Literal

import numpy as np

from benchmarks import peers
from benchmarks.record import Row, write
from pearl.backends.sycl.device import sycl_availability
from pearl.backends.sycl.replay import DEFAULT_DEVICE
from pearl.replay import DataStorage, ReplayManager, make_replay_manager
from pearl.replay.memory import free_memory
from pearl.replay.reference import mulhi64, stratified
from pearl.spec import FieldSpec, ReplaySpec, TransitionSpec

Kind = Literal["tree sample", "tree update", "sample", "insert", "uniform sample", "uniform insert"]
TREE_KINDS: tuple[Kind, ...] = ("tree sample", "tree update")
REPLAY_KINDS: tuple[Kind, ...] = ("sample", "insert")
UNIFORM_KINDS: tuple[Kind, ...] = ("uniform sample", "uniform insert")
ALPHA, BETA, SEED = 0.6, 0.4, 1
SLOW_INSERTERS = {"tianshou": 256}  # loops over its rows in Python: the largest batch that is worth the wait
ASSETS = Path(__file__).resolve().parent.parent / "docs" / "assets"
ONE_THREAD = {
    **dict.fromkeys(
        ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS", "NUMEXPR_NUM_THREADS"), "1"
    ),
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
    "JAX_PLATFORMS": "cpu",
    "RL_LOGGING_LEVEL": "WARNING",
    "PYTHONWARNINGS": "ignore",
}

CARTPOLE = TransitionSpec(
    (
        FieldSpec("obs", (4,), "float32"),
        FieldSpec("action", (), "int64"),
        FieldSpec("reward", (), "float32"),
        FieldSpec("next_obs", (4,), "float32"),
        FieldSpec("discount", (), "float32"),
    )
)
ATARI = TransitionSpec(
    tuple(FieldSpec(f.name, (4, 84, 84) if f.shape else (), "uint8" if f.shape else f.dtype) for f in CARTPOLE.fields)
)


@dataclass(frozen=True)
class Plan:
    """What is measured."""

    sizes: tuple[int, ...] = (100_000, 1_000_000, 10_000_000)
    batches: tuple[int, ...] = (32, 256, 2_048, 16_384)
    fanouts: tuple[int, ...] = (4, 8, 16, 32, 64, 128)
    curve: tuple[int, ...] = (1_000, 10_000)  # further sizes, for the plot alone
    uniform_size: int = 1_000_000
    atari_rows: int = 50_000
    repeats: int = 50
    repeat_s: float = 1e-3

    @classmethod
    def quick(cls) -> Plan:
        """A look."""
        return cls(
            sizes=(100_000,),
            batches=(32, 2_048),
            fanouts=(4, 16, 64),
            curve=(),
            uniform_size=100_000,
            atari_rows=4_000,
            repeats=30,
            repeat_s=2e-4,
        )


@dataclass(frozen=True)
class Timing:
    """One comparison in microseconds a call: median, 20th and 80th percentile of ours; median of theirs."""

    kind: str
    batch: int
    size: int
    ours: float
    spread: tuple[float, float]
    n: int
    peer: str = ""
    theirs: float | None = None
    reason: str = ""

    def row(self) -> Row:
        """As the results file has it."""
        case = f"{self.kind} B={self.batch} N={self.size}"
        return Row(case, self.ours, "us", "lower", self.spread, self.n, self.peer, self.theirs, self.reason)


@dataclass
class Ours:
    """The Replay Manager of this project, through its public methods."""

    manager: ReplayManager
    storage: DataStorage | None = None

    def __post_init__(self) -> None:
        # Without weights where the manager can: that is what a tree alone does.
        self.draw: Callable[[int], Any] = getattr(self.manager, "sample_indices", self.manager.sample)

    def call(self, kind: str, data: Workload) -> Callable[[], object]:
        """One call of `kind`, as a function."""
        manager, storage, batch = self.manager, self.storage, data.batch
        if kind == "tree sample":
            return lambda: self.draw(batch)
        if kind == "tree update":
            return lambda: manager.update(*next(data.updates))
        assert storage is not None
        if kind.endswith("sample"):
            return lambda: self.sample(batch)
        return lambda: manager.insert(storage.insert(next(data.rows)))

    def sample(self, batch: int) -> tuple[Any, dict[str, np.ndarray]]:
        """Indices, weights and transitions, in new arrays as the peers return them."""
        assert self.storage is not None
        drawn = self.manager.sample(batch, BETA)
        return drawn, self.storage.gather(drawn.indices)


def their_call(kind: str, theirs: Any, data: Workload) -> Callable[[], object]:
    """One call of `kind` on a peer, as a function; raises NotImplementedError if it has none."""
    method = kind.rsplit(maxsplit=1)[-1]
    function = getattr(theirs, method, None)
    if function is None:
        raise NotImplementedError(f"has no {kind} by itself")
    if method == "sample":
        return lambda: function(data.batch)
    if method == "update":
        return lambda: function(*next(data.updates))
    return lambda: function(next(data.rows))


@dataclass
class Workload:
    """The arrays that both sides are given, in turn.

    Updates go through about a million indices before any comes again, so that no tree is found in the caches because
    of the last call; and each that comes again brings another priority, so that no tree may stop early.
    """

    size: int
    batch: int
    updates: Iterator[tuple[np.ndarray, np.ndarray]] = field(init=False)
    rows: Iterator[dict[str, np.ndarray]] = field(init=False)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(SEED)
        sets = max(min(2**20, 4 * self.size) // self.batch, 8)
        indices = rng.integers(0, self.size, (sets, self.batch))
        priorities = priorities_of((sets - 1) * self.batch, rng).reshape(sets - 1, self.batch)
        self.updates = zip(cycle(indices), cycle(priorities), strict=False)  # sets and sets - 1 share no factor
        self.rows = cycle([transitions(CARTPOLE, self.batch, rng) for _ in range(8)])


def priorities_of(count: int, rng: np.random.Generator) -> np.ndarray:
    """Return priorities `(count,)` float32 as temporal-difference errors have them: many small, few large."""
    return rng.lognormal(-1.0, 1.0, count).astype(np.float32)


def transitions(spec: TransitionSpec, count: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Return random rows `(count, *shape)`."""
    rows = spec.empty(count)
    for name, column in rows.items():
        if name == "discount":
            column[:] = 0.99 * (rng.random(count) > 0.05)
        elif column.dtype.kind == "f":
            rng.standard_normal(column.shape, np.float32, out=column)
        else:
            column[:] = rng.integers(0, 2 if name == "action" else 256, column.shape, column.dtype)
    return rows


def our_tree(priorities: np.ndarray, fanout: int | Literal["auto"] = "auto") -> Ours:
    """A Replay Manager full of `priorities`."""
    manager = make_replay_manager(ReplaySpec(len(priorities), fanout=fanout, alpha=ALPHA), seed=SEED)
    manager.insert(np.arange(len(priorities)), priorities)
    return Ours(manager)


def our_replay(columns: Mapping[str, np.ndarray], priorities: np.ndarray | None, workers: int = 1) -> Ours:
    """A full Replay Manager (uniform if `priorities` is None) with its Data Storage."""
    size = len(columns["reward"])
    mode: Literal["uniform", "prioritized"] = "uniform" if priorities is None else "prioritized"
    spec = ReplaySpec(size, mode=mode, fanout="auto", alpha=ALPHA)
    manager = make_replay_manager(spec, seed=SEED, workers=workers)
    storage = DataStorage(CARTPOLE, size)
    manager.insert(storage.insert(columns), priorities)
    return Ours(manager, storage)


# Measuring


def timed(function: Callable[[], object], calls: int) -> float:
    """Microseconds a call."""
    start = time.perf_counter_ns()
    for _ in range(calls):
        function()
    return (time.perf_counter_ns() - start) / calls / 1e3


def alternate(functions: Sequence[Callable[[], object]], plan: Plan) -> np.ndarray:
    """Return microseconds a call `(functions, repeats)`; the functions take turns, the first in each turn as well."""
    calls = []
    for function in functions:
        function()  # allocates, compiles
        once = min(timed(function, 1) for _ in range(3))
        calls.append(max(1, min(1_000, round(plan.repeat_s * 1e6 / once))))
    values = np.empty((len(functions), plan.repeats))
    gc.collect()
    gc.disable()
    try:
        for repeat in range(plan.repeats):
            for turn in range(len(functions)):
                which = (turn + repeat) % len(functions)
                values[which, repeat] = timed(functions[which], calls[which])
    finally:
        gc.enable()
    return values


def compare(
    kind: str, data: Workload, ours: Ours, plan: Plan, peer: str = "", theirs: Any = None, reason: str = ""
) -> Timing:
    """Measure one case; without `theirs`, ours alone."""
    functions = [ours.call(kind, data)]
    if theirs is not None:
        try:
            functions.append(their_call(kind, theirs, data))
            check_batch(kind, peer, theirs, data.batch)
        except NotImplementedError as error:
            reason = str(error)
    values = alternate(functions, plan)
    low, middle, high = np.percentile(values[0], (20, 50, 80))
    their_median = float(np.median(values[1])) if len(functions) > 1 else None
    found = Timing(
        kind, data.batch, data.size, float(middle), (float(low), float(high)), plan.repeats, peer, their_median, reason
    )
    beside = f"{their_median:10.1f}  {their_median / middle:6.1f}x" if their_median is not None else f"  {reason}"
    print(f"{kind:15} N={data.size:<9} B={data.batch:<6} {middle:10.1f} us   {peer:24} {beside}", flush=True)
    return found


# Checks: both sides do the same work


class DifferenceError(Exception):
    """A peer and this project do not compute the same thing: comparing their speed would mean nothing."""


def check_lookups(found: Sequence[peers.Peer], size: int = 100_000, batch: int = 4_096) -> None:
    """Equal targets give equal indices: ours, the peers' trees of the same leaves, and a plain search.

    Targets are whole numbers; a half is added for trees in float64, that look for the first prefix sum not below.
    """
    tree = our_tree(priorities_of(size, np.random.default_rng(SEED)))
    leaves = np.asarray(tree.manager.state_dict()["leaves"])
    prefix = np.cumsum(leaves, dtype=np.uint64)
    targets = mulhi64(stratified(SEED, 0, batch), tree.manager.total)
    expected = np.searchsorted(prefix, targets, side="right")
    if not np.array_equal(tree.manager.sample(batch).indices, expected):
        raise DifferenceError("The Replay Manager and a plain search of the prefix sums disagree.")
    for peer in found:
        if peer.name.startswith("torchrl"):
            theirs = peer.make("tree", leaves, 1.0, True)
        elif peer.name.startswith("tianshou"):
            theirs = peer.make("tree", leaves, 1.0)
        else:
            continue
        if not np.array_equal(np.asarray(theirs.lookup(targets.astype(np.float64) + 0.5)), expected):
            raise DifferenceError(f"{peer.name} finds other leaves for the same targets.")
        print(f"checked: {peer.name} finds the same {batch} leaves for the same targets")


def excess(observed: np.ndarray, expected: np.ndarray) -> float:
    """Return how many standard deviations chi-square lies above its mean (Wilson and Hilferty)."""
    freedom = len(expected) - 1
    chi_square = float(((observed - expected) ** 2 / expected).sum())
    return ((chi_square / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))


def check_draws(name: str, draw: Callable[[int], Any], weights: np.ndarray, draws: int = 400_000) -> None:
    """Draws follow `weights` `(n,)`: chi-square over 256 ranges of slots, wrong once in a million if all is well."""
    drawn = np.concatenate([np.asarray(draw(10_000)).ravel() for _ in range(draws // 10_000)])
    edges = np.linspace(0, len(weights), 257).astype(np.int64)
    share = np.add.reduceat(weights.astype(np.float64), edges[:-1]) / weights.sum(dtype=np.float64)
    found = excess(np.histogram(drawn, edges)[0], share * len(drawn))
    if found > 4.75:
        raise DifferenceError(
            f"{name} does not sample by priority: chi-square is {found:.1f} standard deviations too large."
        )
    print(f"checked: {name} samples by priority (chi-square {found:+.1f} standard deviations)")


def check_batch(kind: str, name: str, theirs: Any, batch: int) -> None:
    """The sample is as large as was asked for."""
    if not kind.endswith("sample"):
        return
    drawn = theirs.sample(batch) if kind == "tree sample" else theirs.unpack(theirs.sample(batch))[0]
    if len(drawn) != batch:
        raise DifferenceError(f"{name} samples {len(drawn)} items instead of {batch}.")


def check_insertion(name: str, theirs: Any, size: int, batch: int) -> None:
    """After as many insertions as fit, nothing but rows inserted is found."""
    rng = np.random.default_rng(SEED + 1)
    rows = transitions(CARTPOLE, batch, rng)
    for _ in range(-(-size // batch)):
        theirs.insert(rows)
    found = theirs.inserted() if hasattr(theirs, "inserted") else theirs.unpack(theirs.sample(batch))[0]
    found = np.asarray(found).reshape(-1, 4)
    if not len(found) or not np.isin(found[:, 0], rows["obs"][:, 0]).all():
        raise DifferenceError(f"{name} holds other rows than those inserted.")
    print(f"checked: {name} holds the rows inserted")


def check_complete(name: str, unpacked: tuple[Any, Any, Any], columns: Mapping[str, np.ndarray], p: np.ndarray) -> None:
    """Rows are those of the indices, weights are p**(-alpha * beta) up to one factor."""
    observations, indices, weights = unpacked
    if indices is None:
        return
    indices = np.asarray(indices).ravel()
    if not np.array_equal(np.asarray(observations).reshape(len(indices), -1), columns["obs"][indices]):
        raise DifferenceError(f"{name} gathers other rows than those it sampled.")
    if weights is not None:
        factor = np.asarray(weights, np.float64).ravel() * p[indices].astype(np.float64) ** (ALPHA * BETA)
        if not np.allclose(factor, factor[0], rtol=1e-3):
            raise DifferenceError(f"{name} has other importance weights.")
    print(f"checked: {name} gathers the rows it sampled{'' if weights is None else ', same weights up to a factor'}")


def check(found: Sequence[peers.Peer], size: int = 100_000) -> None:
    """Raise DifferenceError unless ours and each peer compute the same."""
    rng = np.random.default_rng(SEED)
    priorities, columns = priorities_of(size, rng), transitions(CARTPOLE, size, rng)
    check_lookups([peer for peer in found if peer.module], size)
    wanted = priorities.astype(np.float64) ** ALPHA
    drawn = our_tree(priorities)

    def draw_ours(batch: int) -> np.ndarray:
        result = drawn.draw(batch)
        return np.asarray(getattr(result, "indices", result))

    # Trees of plain values are given p**alpha, this project's takes p.
    changed = rng.integers(0, size // 2, size // 4)
    after = wanted.astype(np.float32)
    after[changed] *= 3
    check_draws("pearl", draw_ours, wanted)
    drawn.manager.update(changed, (after[changed].astype(np.float64) ** (1 / ALPHA)).astype(np.float32))
    check_draws("pearl (after an update)", draw_ours, after)
    ours = our_replay(columns, priorities)
    sample, gathered = ours.sample(1_000)
    check_complete("pearl", (gathered["obs"], sample.indices, sample.weights), columns, priorities)
    for peer in found:
        for kind, arguments in (
            ("tree", (priorities, ALPHA)),
            ("replay", (columns, priorities, ALPHA, BETA, 1_000)),
            ("uniform", (columns, 1_000)),
        ):
            try:
                theirs = peer.make(kind, *arguments)
            except NotImplementedError:
                continue
            if kind == "tree":
                if hasattr(theirs, "sample"):
                    check_draws(peer.name, theirs.sample, wanted)
                    theirs.update(changed, after[changed])
                    check_draws(f"{peer.name} (after an update)", theirs.sample, after)
                continue
            check_complete(f"{peer.name} ({kind})", theirs.unpack(theirs.sample(1_000)), columns, priorities)
            check_insertion(f"{peer.name} ({kind})", theirs, size, 1_000)


# Suites


def measure_peers(
    what: str, kinds: Sequence[Kind], size: int, plan: Plan, found: Sequence[peers.Peer], batches: Sequence[int]
) -> Iterator[Timing]:
    """Each kind and batch at one size against each peer; `what` names the peers' maker."""
    rng = np.random.default_rng(SEED)
    priorities = priorities_of(size, rng)
    columns = transitions(CARTPOLE, size, rng) if what != "tree" else {}
    ours = our_tree(priorities) if what == "tree" else our_replay(columns, priorities if what == "replay" else None)
    loads = [Workload(size, batch) for batch in batches if batch <= size]
    per_batch = what == "uniform"
    for peer in found:
        theirs, reason = None, peer.reason
        for data in loads:
            if peer.module and (theirs is None or per_batch) and not reason:
                arguments = {
                    "tree": (priorities, ALPHA),
                    "replay": (columns, priorities, ALPHA, BETA, data.batch),
                    "uniform": (columns, data.batch),
                }[what]
                try:
                    theirs = None  # one at a time in memory
                    theirs = peer.make(what, *arguments)
                except NotImplementedError as error:
                    reason = str(error)
            for kind in kinds:
                if reason:  # said once
                    if data is loads[0]:
                        yield compare(kind, data, ours, plan, peer.name, None, reason)
                    continue
                limit = SLOW_INSERTERS.get(peer.name.split()[0])
                if kind.endswith("insert") and limit is not None and data.batch > limit:
                    continue
                timing = compare(kind, data, ours, plan, peer.name, theirs)
                if timing.theirs is not None or data is loads[0]:
                    yield timing


def measure_fanouts(size: int, plan: Plan) -> Iterator[Timing]:
    """Every fanout beside the one that "auto" takes."""
    priorities = priorities_of(size, np.random.default_rng(SEED))
    automatic = our_tree(priorities)
    data = Workload(size, 2_048)
    for fanout in plan.fanouts:
        tree = our_tree(priorities, fanout)
        for kind in TREE_KINDS:
            values = alternate([tree.call(kind, data), automatic.call(kind, data)], plan)
            low, middle, high = map(float, np.percentile(values[0], (20, 50, 80)))
            theirs = float(np.median(values[1]))
            peer = f"auto (K={automatic.manager.fanout})"
            print(f"{kind:15} N={size:<9} K={fanout:<6} {middle:10.1f} us   {peer:24} {theirs:10.1f}", flush=True)
            yield Timing(f"{kind} K={fanout}", data.batch, size, middle, (low, high), plan.repeats, peer, theirs)


def measure_curve(plan: Plan) -> Iterator[Timing]:
    """Ours alone at further sizes, for the plots."""
    for size in plan.curve:
        ours = our_tree(priorities_of(size, np.random.default_rng(SEED)))
        for kind in TREE_KINDS:
            yield compare(kind, Workload(size, 2_048), ours, plan)


def measure_gather(plan: Plan) -> Iterator[Row]:
    """Gathering Atari frames beside memcpy of as many contiguous bytes of the same columns to the same place."""
    rows = min(plan.atari_rows, int(0.25 * (free_memory() or 16e9)) // ATARI.nbytes)
    rng = np.random.default_rng(SEED)
    storage = DataStorage(ATARI, rows)
    chunk = transitions(ATARI, min(500, rows), rng)
    while storage.inserted < rows:
        storage.insert(chunk, min(len(chunk["reward"]), rows - storage.inserted))
    columns = storage.columns
    for batch in (b for b in plan.batches if b <= min(2_048, rows)):
        out = ATARI.empty(batch)
        draws = cycle([rng.integers(0, rows, batch) for _ in range(199)])
        starts = cycle(rng.integers(0, rows - batch + 1, 199).tolist())

        def gather(out: dict[str, np.ndarray] = out, draws: Iterator[np.ndarray] = draws) -> None:
            storage.gather(next(draws), out)

        def memcpy(out: dict[str, np.ndarray] = out, starts: Iterator[int] = starts) -> None:
            start = next(starts)
            for name, column in out.items():
                np.copyto(column, columns[name][start : start + len(column)])

        gather()
        check_rows = next(draws)
        storage.gather(check_rows, out)
        if not all(np.array_equal(out[name], columns[name][check_rows]) for name in out):
            raise DifferenceError("The Data Storage gathers other rows than NumPy does.")
        rates = batch * ATARI.nbytes / 1e3 / alternate([gather, memcpy], plan)
        low, middle, high = map(float, np.percentile(rates[0], (20, 50, 80)))
        theirs = float(np.median(rates[1]))
        row = Row(
            f"gather 84x84x4 uint8 B={batch} N={rows}",
            middle,
            "GB/s",
            "higher",
            (low, high),
            plan.repeats,
            "memcpy",
            theirs,
        )
        print(f"{row.case:40} {middle:6.2f} GB/s   memcpy {theirs:6.2f}  {middle / theirs:.2f}", flush=True)
        yield row


def measure_native(plan: Plan, program: Path) -> Iterator[Row]:
    """The kernels without Python, in C++, beside the floor that kernels/cpu/bench/replay_bench.cpp explains."""
    command = [str(program), "--fanout=16", *map(str, plan.sizes)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    print(printed, flush=True)
    lines = [line.split() for line in printed.splitlines()]
    header = next(line for line in lines if line and line[0] == "slots")
    for size in map(str, plan.sizes):
        fastest = [dict(zip(header, line, strict=True)) for line in lines if line[:2] == [size, "16"]][-1]
        for kind in ("sample", "update"):
            floor = next(line for line in lines if line[:3] == [size, "floor", kind])
            value = float(fastest[kind])
            peer = f"floor, {floor[5]} lines under way"
            yield Row(f"C++ {kind}, an item, N={size}", value, "ns", "lower", (value, value), 9, peer, float(floor[3]))


def measure_workers(plan: Plan) -> Iterator[Row]:
    """Large batches shared by two workers beside one, on two cores."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    rng = np.random.default_rng(SEED)
    priorities, columns = priorities_of(plan.uniform_size, rng), transitions(CARTPOLE, plan.uniform_size, rng)
    sides = []
    for workers in (2, 1):
        ours = our_replay(columns, priorities, workers)
        sides.append(ours)
    for batch in (2_048, 16_384, 65_536):
        data = Workload(plan.uniform_size, batch)
        for kind in ("tree sample", "tree update", "sample"):
            values = alternate([side.call(kind, data) for side in sides], plan)
            low, middle, high = map(float, np.percentile(values[0], (20, 50, 80)))
            alone = float(np.median(values[1]))
            case = f"{kind} W=2 B={batch} N={plan.uniform_size}"
            print(f"{case:40} {middle:10.1f} us   W=1 {alone:10.1f}  {alone / middle:.2f}x", flush=True)
            yield Row(case, middle, "us", "lower", (low, high), plan.repeats, "W=1", alone)


def measure_sycl(plan: Plan) -> Iterator[Row]:
    """The CPU as a SYCL device beside the same CPU without: where batches are small, the launch is what is seen."""
    available = sycl_availability(DEFAULT_DEVICE)
    if not available.ok:
        print(f"left out: SYCL: {available.reason}", file=sys.stderr)
        return
    rng = np.random.default_rng(SEED)
    priorities = priorities_of(plan.uniform_size, rng)
    spec = ReplaySpec(plan.uniform_size, alpha=ALPHA)
    sides = [make_replay_manager(spec, seed=SEED, backend=backend) for backend in ("sycl", "native")]
    for side in sides:
        side.insert(np.arange(plan.uniform_size), priorities)
    for batch in plan.batches:
        sample, values = sides[0].sample(batch, BETA), cycle([priorities_of(batch, rng) for _ in range(7)])
        if not all(map(np.array_equal, sample, sides[1].sample(batch, BETA))):
            raise DifferenceError("The SYCL device draws otherwise than the CPU does.")
        calls: dict[str, Callable[[ReplayManager], object]] = {
            "sample": lambda side, batch=batch: side.sample(batch, BETA),  # type: ignore[misc]
            "update": lambda side, sample=sample, values=values: side.update(  # type: ignore[misc]
                sample.indices, next(values), sample.generations
            ),
        }
        for kind, call in calls.items():
            taken = alternate([partial(call, side) for side in sides], plan)
            low, middle, high = map(float, np.percentile(taken[0], (20, 50, 80)))
            native = float(np.median(taken[1]))
            case = f"tree {kind} on sycl:cpu B={batch} N={plan.uniform_size}"
            print(f"{case:45} {middle:10.1f} us   native {native:10.1f}  {native / middle:.2f}x", flush=True)
            yield Row(case, middle, "us", "lower", (low, high), plan.repeats, "native", native)
        # Random draws have gone another number of calls on each side by now.
        sides[1].load_state_dict(sides[0].state_dict())


def measure_together(plan: Plan) -> Iterator[Row]:
    """Sampling in one thread while another inserts, beside sampling alone."""
    rng = np.random.default_rng(SEED)
    ours = our_replay(transitions(CARTPOLE, plan.uniform_size, rng), priorities_of(plan.uniform_size, rng))
    rows = cycle([transitions(CARTPOLE, 64, rng) for _ in range(8)])
    assert ours.storage is not None
    storage, stop, inserted = ours.storage, threading.Event(), 0

    def insert() -> None:
        nonlocal inserted
        while not stop.is_set():
            ours.manager.insert(storage.insert(next(rows)))
            inserted += 64
            time.sleep(64 / 200_000)  # at most 200,000 transitions a second: more than actors collect

    for batch in (256, 2_048):
        alone = alternate([lambda batch=batch: ours.sample(batch)], plan)[0]  # type: ignore[misc]
        stop.clear()
        thread = threading.Thread(target=insert)
        before, start = inserted, time.monotonic()
        thread.start()
        beside = alternate([lambda batch=batch: ours.sample(batch)], plan)[0]  # type: ignore[misc]
        stop.set()
        thread.join()
        rate = (inserted - before) / (time.monotonic() - start)
        low, middle, high = map(float, np.percentile(beside, (20, 50, 80)))
        case = f"sample beside {rate:,.0f} inserts/s B={batch} N={plan.uniform_size}"
        print(f"{case:50} {middle:10.1f} us   alone {np.median(alone):10.1f}", flush=True)
        yield Row(case, middle, "us", "lower", (low, high), plan.repeats, "alone", float(np.median(alone)))


# Showing


def show(rows: Sequence[Row]) -> None:
    """Print the table."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Replay, one thread")
    for name in ("case", "ours", "p20 to p80", "peer", "theirs", "times better"):
        table.add_column(name, justify="left" if name in ("case", "peer") else "right", no_wrap=True)
    for row in rows:
        theirs = f"{row.theirs:,.1f}" if row.theirs is not None else row.reason[:40]
        ratio = f"{row.ratio:.2f}" if row.ratio is not None else ""
        spread = f"{row.spread[0]:,.1f} to {row.spread[1]:,.1f}"
        table.add_row(row.case, f"{row.ours:,.1f} {row.unit}", spread, row.peer, theirs, ratio)
    Console(width=None if sys.stdout.isatty() else 150).print(table)


def plot(timings: Sequence[Timing], batch: int = 2_048) -> list[dict[str, str]]:
    """Draw cost against size, one file a kind; return file names and titles."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    ASSETS.mkdir(parents=True, exist_ok=True)
    drawn = []
    for kind in (*TREE_KINDS, *REPLAY_KINDS):
        of_kind = [t for t in timings if t.kind == kind and t.batch == batch]
        if not of_kind:
            continue
        figure, axes = plt.subplots(figsize=(6.4, 4.0), layout="constrained")
        for name in sorted({t.peer for t in of_kind if t.theirs is not None}):
            points = sorted((t.size, t.theirs) for t in of_kind if t.peer == name and t.theirs is not None)
            axes.plot(*zip(*((size, us * 1e3 / batch) for size, us in points), strict=True), marker="o", label=name)
        sizes = sorted({t.size for t in of_kind})
        ours = [np.median([t.ours for t in of_kind if t.size == size]) * 1e3 / batch for size in sizes]
        axes.plot(sizes, ours, marker="o", color="black", linewidth=2, label="pearl")
        title = f"{kind.capitalize()}, batches of {batch:,}, one thread"
        axes.set(xscale="log", yscale="log", xlabel="slots", ylabel="nanoseconds per item", title=title)
        axes.grid(visible=True, which="major", alpha=0.3)
        axes.legend()
        path = ASSETS / f"replay_{kind.replace(' ', '_')}.png"
        figure.savefig(path, dpi=110)
        plt.close(figure)
        drawn.append({"file": path.name, "title": title})
    return drawn


def one_thread() -> None:
    """Start over on one core with every library told so, unless that has been done."""
    if all(os.environ.get(name) == value for name, value in ONE_THREAD.items()):
        return
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    arguments = [sys.executable, "-m", "benchmarks.replay", *sys.argv[1:]]
    os.execve(sys.executable, arguments, {**os.environ, **ONE_THREAD})


def measure(plan: Plan, found: Sequence[peers.Peer], native: Path | None) -> tuple[list[Timing], list[Row]]:
    """Everything, in the order of the table."""
    timings = [t for size in plan.sizes for t in measure_peers("tree", TREE_KINDS, size, plan, found, plan.batches)]
    timings += [
        t for size in plan.sizes for t in measure_peers("replay", REPLAY_KINDS, size, plan, found, plan.batches)
    ]
    timings += measure_peers("uniform", UNIFORM_KINDS, plan.uniform_size, plan, found, plan.batches)
    timings += [t for size in plan.sizes for t in measure_fanouts(size, plan)]
    timings += measure_curve(plan)
    rows = [timing.row() for timing in timings]
    rows += measure_gather(plan)
    if native is not None:
        rows += measure_native(plan, native)
    rows += measure_sycl(plan)
    rows += measure_workers(plan)
    rows += measure_together(plan)
    return timings, rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one size, two batches; writes nothing")
    parser.add_argument("--peers", nargs="*", default=list(peers.MODULES), choices=peers.MODULES, metavar="NAME")
    parser.add_argument("--native", type=Path, metavar="PROGRAM", help="replay_bench, built from kernels/cpu/bench")
    arguments = parser.parse_args()
    one_thread()
    plan = Plan.quick() if arguments.quick else Plan()
    found = [peers.load(module) for module in arguments.peers]
    for peer in found:
        if peer.module is None:
            print(f"left out: {peer.name}: {peer.reason}", file=sys.stderr)
    try:
        check(found)
        timings, rows = measure(plan, found, arguments.native)
    except DifferenceError as error:
        sys.exit(f"Not measured: {error}")
    show(rows)
    if not arguments.quick and len(arguments.peers) == len(peers.MODULES):
        write("replay", "make bench-replay", threads=1, rows=rows, plots=plot(timings))


if __name__ == "__main__":
    main()
