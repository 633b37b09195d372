"""The machinery of the benchmarks: what their rows say, and how peers that are missing are told."""

from __future__ import annotations

import json
import sys
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # benchmarks are not installed

from benchmarks import peers, record, replay, report  # noqa: E402

TINY = replay.Plan(sizes=(2_000,), batches=(8,), fanouts=(4, 16), curve=(), repeats=3, repeat_s=1e-5)


def row(better, ours, theirs, **more):
    return record.Row("a case", ours, "us", better, (ours, ours), 30, "a peer 1.0", theirs, **more)


class Twin:
    """A peer that is this project itself."""

    VERSION = "1.0"

    def __init__(self, columns, priorities):
        self.ours = replay.our_replay(columns, priorities)

    def sample(self, batch):
        return self.ours.sample(batch)

    def insert(self, rows):
        self.ours.manager.insert(self.ours.storage.insert(rows))

    def unpack(self, sample):
        drawn, gathered = sample
        return gathered["obs"], drawn.indices, drawn.weights


@pytest.fixture
def filled():
    rng = np.random.default_rng(0)
    return replay.transitions(replay.CARTPOLE, 2_000, rng), replay.priorities_of(2_000, rng)


def test_ratio_says_how_many_times_better_ours_is_whatever_the_unit():
    assert row("lower", 2.0, 8.0).ratio == 4.0
    assert row("higher", 8.0, 2.0).ratio == 4.0
    assert row("lower", 8.0, 2.0).ratio == 0.25


def test_no_ratio_without_a_peer():
    assert row("lower", 2.0, None, reason="cannot be loaded").ratio is None


def test_results_file_and_its_table(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    rows = [row("lower", 2.0, 8.0), row("lower", 2.0, None, reason="needs another NumPy")]
    path = record.write(
        "trial", "make bench-trial", threads=1, rows=rows, plots=[{"file": "a.png", "title": "A curve"}]
    )
    result = json.loads(path.read_text())
    assert result["rows"][0]["ratio"] == 4.0
    assert result["rows"][1]["theirs"] is None
    assert result["rows"][1]["ratio"] is None
    assert result["rows"][1]["reason"] == "needs another NumPy"
    assert {"command", "commit", "date", "machine", "load", "threads"} <= result.keys()
    table = report.section(result).splitlines()
    assert "| a case | 2 | a peer 1.0 | 8 | us | 4 | 2 to 2 | 30 |" in table
    assert "| a case | 2 | a peer 1.0 | needs another NumPy | us |  | 2 to 2 | 30 |" in table
    assert "![A curve](assets/a.png)" in table


def test_every_committed_result_has_its_question():
    for path in record.RESULTS.glob("*.json"):
        assert path.stem in report.QUESTIONS


def test_a_peer_that_does_not_load_is_told_with_its_reason(monkeypatch):
    monkeypatch.setitem(sys.modules, "reverb", None)  # as if not installed
    sys.modules.pop("benchmarks.peers.reverb", None)
    peer = peers.load("reverb")
    assert peer.module is None
    assert "NumPy below 2" in peer.reason
    timings = list(replay.measure_peers("tree", replay.TREE_KINDS, 2_000, TINY, [peer], TINY.batches))
    assert [t.kind for t in timings] == list(replay.TREE_KINDS)
    assert all(t.theirs is None and t.reason == peer.reason and t.ours > 0 for t in timings)


def test_a_kind_that_a_peer_lacks_is_told_with_its_reason():
    peer = peers.Peer("a peer 1.0", sys)
    (timing,) = replay.measure_peers("tree", ("tree sample",), 2_000, TINY, [peer], TINY.batches)
    assert timing.theirs is None
    assert "has no tree" in timing.reason


def test_each_kind_is_measured_against_a_peer(filled):
    columns, priorities = filled
    twin, ours = Twin(columns, priorities), replay.our_replay(columns, priorities)
    for kind in replay.REPLAY_KINDS:
        timing = replay.compare(kind, replay.Workload(2_000, 8), ours, TINY, "twin", twin)
        assert timing.theirs is not None
        assert timing.spread[0] <= timing.ours <= timing.spread[1]
        assert timing.row().case == f"{kind} B=8 N=2000"


def test_a_peer_that_draws_another_count_is_not_measured(filled):
    twin = Twin(*filled)
    twin.sample = lambda batch: twin.ours.sample(batch - 1)
    with pytest.raises(replay.DifferenceError, match="7 items instead of 8"):
        replay.compare("sample", replay.Workload(2_000, 8), twin.ours, TINY, "twin", twin)


def test_checks_tell_who_does_other_work(filled):
    columns, priorities = filled
    twin = Twin(columns, priorities)
    observations, indices, weights = twin.unpack(twin.sample(100))
    replay.check_complete("twin", (observations, indices, weights), columns, priorities)
    with pytest.raises(replay.DifferenceError, match="other rows"):
        replay.check_complete("twin", (observations, indices[::-1], weights), columns, priorities)
    with pytest.raises(replay.DifferenceError, match="other importance weights"):
        replay.check_complete("twin", (observations, indices, weights**2), columns, priorities)


def test_draws_that_ignore_priorities_are_found(filled):
    _, priorities = filled
    tree, weights = replay.our_tree(priorities), priorities.astype(np.float64) ** replay.ALPHA
    rng = np.random.default_rng(0)
    replay.check_draws("ours", lambda batch: tree.manager.sample(batch).indices, weights, 100_000)
    replay.check_draws(
        "independent", lambda batch: rng.choice(2_000, batch, p=weights / weights.sum()), weights, 100_000
    )
    with pytest.raises(replay.DifferenceError, match="by priority"):
        replay.check_draws("uniform", lambda batch: rng.integers(0, 2_000, batch), weights, 100_000)


def test_insertions_are_looked_for(filled):
    replay.check_insertion("twin", Twin(*filled), 2_000, 500)
    forgetful = Twin(*filled)
    forgetful.insert = lambda rows: None
    with pytest.raises(replay.DifferenceError, match="other rows than those inserted"):
        replay.check_insertion("twin", forgetful, 2_000, 500)


def test_the_same_targets_find_the_same_leaves():
    replay.check_lookups([], size=3_000, batch=500)


def test_updates_never_bring_the_priorities_that_are_there():
    last: dict[bytes, bytes] = {}
    for indices, priorities in islice(replay.Workload(100, 8).updates, 500):
        assert last.get(indices.tobytes()) != priorities.tobytes()
        last[indices.tobytes()] = priorities.tobytes()
    assert len(last) < 500  # indices came again


def test_functions_take_turns():
    calls = []
    values = replay.alternate([lambda: calls.append("ours"), lambda: calls.append("theirs")], TINY)
    assert values.shape == (2, TINY.repeats)
    assert (values > 0).all()
    assert {"ours", "theirs"} == set(calls)


def test_plots_are_drawn_from_what_was_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(replay, "ASSETS", tmp_path)
    timings = [
        replay.Timing("tree sample", 2_048, size, 10.0, (9.0, 11.0), 30, "a peer 1.0", 40.0) for size in (1_000, 10_000)
    ]
    (drawn,) = replay.plot(timings)
    assert drawn["file"] == "replay_tree_sample.png"
    assert (tmp_path / drawn["file"]).stat().st_size > 1_000
