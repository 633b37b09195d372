"""Speed of the Replay Manager and the Data Storage, compared with other replay buffers.

One process pinned to one core, one thread each; ours and theirs take turns. Times are medians of a whole call from
Python with arrays, of batches B at N slots, all filled. Before the measurement, checks confirm that both sides do the
same work: equal targets find equal leaves, draws follow the priorities (chi-square) before and after an update, samples
hold the rows of their indices and the same importance weights up to a factor, and inserted rows are found again.

- `tree sample`: indices by priority, including random numbers.
- `tree update`: priorities by index. Ours and cpprb's also raise them to alpha; the other trees get plain values.
- `sample`: indices, importance weights and gathered CartPole-v1 transitions, in new arrays.
- `insert`: transitions, at the largest priority so far.
- `uniform`: the same without priorities.
- `gather`: Atari frames (84x84x4 uint8, two per transition), compared with memcpy of as many contiguous bytes of the
  same columns to the same place.
- `K=`: fanouts of the sum tree, compared with the fanout that "auto" chooses.
- `C++`: nanoseconds per item without Python, at batches of 2,048. The peer is the floor: touching the cache lines that
  an item needs (its leaf and slot, the leaf's parent or the count of samples) as early as possible, and nothing else.
  "Lines under way" is the time of these accesses one after the other, divided by this floor.
- `W=2`: two workers compared with one, on two cores.

TorchRL's wheels do not load with the CPU build of torch used here: its extension is built from the sources in its
wheel.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, cycle
from pathlib import Path
from typing import Any, Literal

import numpy as np

from benchmarks import peers
from benchmarks.record import ASSETS, Row, shown, write
from benchmarks.timing import DifferenceError, alternate_calls, one_thread, options
from benchmarks.workload import transitions
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
SLOW_INSERTERS = {"tianshou": 256}  # it loops over rows in Python: the largest batch to measure

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
    curve: tuple[int, ...] = (1_000, 10_000)  # further sizes, for the plots only
    uniform_size: int = 1_000_000
    atari_rows: int = 50_000
    repeats: int = 50
    repeat_s: float = 1e-3


QUICK = Plan(
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
    """A row, and what it is about."""

    kind: str
    batch: int
    size: int
    row: Row


@dataclass
class Ours:
    """The Replay Manager of this project, through its public methods."""

    manager: ReplayManager
    storage: DataStorage | None = None

    def __post_init__(self) -> None:
        # Without weights where the manager supports it, as a tree alone has none.
        self.draw: Callable[[int], Any] = getattr(self.manager, "sample_indices", self.manager.sample)

    def call(self, kind: str, data: Workload) -> Callable[[], object]:
        """A function that makes one call of `kind`."""
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
    """A function that makes one call of `kind` on a peer; raises NotImplementedError if the peer has none."""
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

    Updates go through about a million indices before they repeat one, so that the last call leaves no useful part of a
    tree in the caches. A repeated index gets another priority, so that no tree can stop early.
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
    """Priorities `(count,)` float32, distributed like temporal-difference errors: many small, few large."""
    return rng.lognormal(-1.0, 1.0, count).astype(np.float32)


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


def alternate(functions: Sequence[Callable[[], object]], plan: Plan) -> np.ndarray:
    """Microseconds of a call `(functions, repeats)`, measured in turn."""
    return alternate_calls(functions, plan.repeats, plan.repeat_s)


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
    theirs_us = values[1] if len(functions) > 1 else None
    case = f"{kind} B={data.batch} N={data.size}"
    found = Row.of(case, "us", "lower", values[0], peer, theirs_us, reason)
    found.show()
    return Timing(kind, data.batch, data.size, found)


# Checks: both sides do the same work


def check_lookups(found: Sequence[peers.Peer], size: int = 100_000, batch: int = 4_096) -> None:
    """Equal targets give equal indices: ours, the peers' trees of the same leaves, and a plain search.

    Targets are whole numbers. Trees in float64 get half a unit more, as they find the first prefix sum not below.
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
    """How many standard deviations chi-square lies above its mean (Wilson and Hilferty)."""
    freedom = len(expected) - 1
    chi_square = float(((observed - expected) ** 2 / expected).sum())
    return ((chi_square / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))


def check_draws(name: str, draw: Callable[[int], Any], weights: np.ndarray, draws: int = 400_000) -> None:
    """Draws follow `weights` `(n,)`: chi-square over 256 ranges of slots, with one false alarm in a million."""
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
    """The sample is as large as requested."""
    if not kind.endswith("sample"):
        return
    drawn = theirs.sample(batch) if kind == "tree sample" else theirs.unpack(theirs.sample(batch))[0]
    if len(drawn) != batch:
        raise DifferenceError(f"{name} samples {len(drawn)} items instead of {batch}.")


def check_insertion(name: str, theirs: Any, size: int, batch: int) -> None:
    """After insertions into every slot, samples hold inserted rows only."""
    rng = np.random.default_rng(SEED + 1)
    rows = transitions(CARTPOLE, batch, rng)
    for _ in range(-(-size // batch)):
        theirs.insert(rows)
    found = theirs.inserted() if hasattr(theirs, "inserted") else theirs.unpack(theirs.sample(batch))[0]
    found = np.asarray(found).reshape(-1, 4)
    if not len(found) or not np.isin(found[:, 0], rows["obs"][:, 0]).all():
        raise DifferenceError(f"{name} does not hold the inserted rows.")
    print(f"checked: {name} holds the rows inserted")


def check_complete(name: str, unpacked: tuple[Any, Any, Any], columns: Mapping[str, np.ndarray], p: np.ndarray) -> None:
    """Rows are those at the sampled indices; weights are p**(-alpha * beta) up to one factor."""
    observations, indices, weights = unpacked
    if indices is None:
        return
    indices = np.asarray(indices).ravel()
    if not np.array_equal(np.asarray(observations).reshape(len(indices), -1), columns["obs"][indices]):
        raise DifferenceError(f"{name} does not gather the rows it sampled.")
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

    # Trees of plain values are given p**alpha; this project's tree takes p.
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
                if reason:  # reported once
                    if data is loads[0]:
                        yield compare(kind, data, ours, plan, peer.name, None, reason)
                    continue
                limit = SLOW_INSERTERS.get(peer.name.split()[0])
                if kind.endswith("insert") and limit is not None and data.batch > limit:
                    continue
                timing = compare(kind, data, ours, plan, peer.name, theirs)
                if timing.row.theirs is not None or data is loads[0]:
                    yield timing


def measure_fanouts(size: int, plan: Plan) -> Iterator[Row]:
    """Every fanout compared with the one that "auto" chooses."""
    priorities = priorities_of(size, np.random.default_rng(SEED))
    automatic = our_tree(priorities)
    data = Workload(size, 2_048)
    for fanout in plan.fanouts:
        tree = our_tree(priorities, fanout)
        for kind in TREE_KINDS:
            values = alternate([tree.call(kind, data), automatic.call(kind, data)], plan)
            case, peer = f"{kind} K={fanout} B={data.batch} N={size}", f"auto (K={automatic.manager.fanout})"
            yield Row.of(case, "us", "lower", values[0], peer, values[1])


def measure_curve(plan: Plan) -> Iterator[Timing]:
    """Ours alone at further sizes, for the plots."""
    for size in plan.curve:
        ours = our_tree(priorities_of(size, np.random.default_rng(SEED)))
        for kind in TREE_KINDS:
            yield compare(kind, Workload(size, 2_048), ours, plan)


def measure_gather(plan: Plan) -> Iterator[Row]:
    """Gathering Atari frames compared with memcpy of as many contiguous bytes of the same columns to the same place."""
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
            raise DifferenceError("The Data Storage and NumPy gather different rows.")
        rates = batch * ATARI.nbytes / 1e3 / alternate([gather, memcpy], plan)
        yield Row.of(f"gather 84x84x4 uint8 B={batch} N={rows}", "GB/s", "higher", rates[0], "memcpy", rates[1])


def measure_native(plan: Plan, program: Path) -> Iterator[Row]:
    """The kernels in C++, without Python, compared with the floor that kernels/cpu/bench/replay_bench.cpp explains."""
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
    """Large batches by two workers compared with one, on two cores."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    rng = np.random.default_rng(SEED)
    priorities, columns = priorities_of(plan.uniform_size, rng), transitions(CARTPOLE, plan.uniform_size, rng)
    sides = [our_replay(columns, priorities, workers) for workers in (2, 1)]
    for batch in (2_048, 16_384, 65_536):
        data = Workload(plan.uniform_size, batch)
        for kind in ("tree sample", "tree update", "sample"):
            values = alternate([side.call(kind, data) for side in sides], plan)
            case = f"{kind} W=2 B={batch} N={plan.uniform_size}"
            yield Row.of(case, "us", "lower", values[0], "W=1", values[1])


def measure_sycl(plan: Plan) -> Iterator[Row]:
    """The CPU as a SYCL device compared with the native kernels: launches dominate small batches."""
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
            raise DifferenceError("The SYCL device and the CPU draw different samples.")
        calls: dict[str, Callable[[ReplayManager], object]] = {
            "sample": lambda side, batch=batch: side.sample(batch, BETA),  # type: ignore[misc]
            "update": lambda side, sample=sample, values=values: side.update(  # type: ignore[misc]
                sample.indices, next(values), sample.generations
            ),
        }
        for kind, call in calls.items():
            taken = alternate([partial(call, side) for side in sides], plan)
            case = f"tree {kind} on sycl:cpu B={batch} N={plan.uniform_size}"
            yield Row.of(case, "us", "lower", taken[0], "native", taken[1])
        # The sides have made different numbers of random draws by now.
        sides[1].load_state_dict(sides[0].state_dict())


def measure_together(plan: Plan) -> Iterator[Row]:
    """Sampling while another thread inserts, compared with sampling alone."""
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
        contended = alternate([lambda batch=batch: ours.sample(batch)], plan)[0]  # type: ignore[misc]
        stop.set()
        thread.join()
        rate = (inserted - before) / (time.monotonic() - start)
        case = f"sample beside {rate:,.0f} inserts/s B={batch} N={plan.uniform_size}"
        yield Row.of(case, "us", "lower", contended, "alone", alone)


def plot(timings: Sequence[Timing], batch: int = 2_048) -> list[dict[str, str]]:
    """Draw cost against size, one file per kind; return file names and titles."""
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
        for name in sorted({t.row.peer for t in of_kind if t.row.theirs is not None}):
            points = sorted((t.size, t.row.theirs) for t in of_kind if t.row.peer == name and t.row.theirs is not None)
            axes.plot(*zip(*((size, us * 1e3 / batch) for size, us in points), strict=True), marker="o", label=name)
        sizes = sorted({t.size for t in of_kind})
        ours = [np.median([t.row.ours for t in of_kind if t.size == size]) * 1e3 / batch for size in sizes]
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


def measure(plan: Plan, found: Sequence[peers.Peer], native: Path | None) -> tuple[list[Timing], list[Row]]:
    """All that a peer or a plot is compared by, then the other rows."""
    timings = [
        timing
        for what, kinds in (("tree", TREE_KINDS), ("replay", REPLAY_KINDS))
        for size in plan.sizes
        for timing in measure_peers(what, kinds, size, plan, found, plan.batches)
    ]
    timings += measure_peers("uniform", UNIFORM_KINDS, plan.uniform_size, plan, found, plan.batches)
    timings += measure_curve(plan)
    others: Iterable[Row] = chain(
        chain.from_iterable(measure_fanouts(size, plan) for size in plan.sizes),
        measure_gather(plan),
        () if native is None else measure_native(plan, native),
        measure_sycl(plan),
        measure_workers(plan),
        measure_together(plan),
    )
    return timings, [timing.row for timing in timings] + shown(others)


def main() -> None:
    parser = options(__doc__, "one size, two batches")
    parser.add_argument("--peers", nargs="*", default=list(peers.MODULES), choices=peers.MODULES, metavar="NAME")
    parser.add_argument("--native", type=Path, metavar="PROGRAM", help="replay_bench, built from kernels/cpu/bench")
    arguments = parser.parse_args()
    one_thread("benchmarks.replay")
    plan = QUICK if arguments.quick else Plan()
    found = [peers.load(module) for module in arguments.peers]
    for peer in found:
        if peer.module is None:
            print(f"left out: {peer.name}: {peer.reason}", file=sys.stderr)
    try:
        check(found)
        timings, rows = measure(plan, found, arguments.native)
    except DifferenceError as error:
        sys.exit(f"Not measured: {error}")
    if not arguments.quick and len(arguments.peers) == len(peers.MODULES):
        write("replay", "make bench-replay", threads=1, rows=rows, plots=plot(timings))


if __name__ == "__main__":
    main()
