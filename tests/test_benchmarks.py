"""The machinery of the benchmarks: what their rows say, and how peers that are missing are told."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # benchmarks are not installed

from benchmarks import (  # noqa: E402
    eps,
    gae,
    peers,
    pixels,
    quiet,
    reaching,
    record,
    replay,
    report,
    returns,
    scale,
    solve_time,
    stability,
    zoo,
)
from benchmarks.peers import solving, training, zoo_settings  # noqa: E402
from composer import spec_file  # noqa: E402
from pearl.local_sgd.simulation import Phases  # noqa: E402
from pearl.rollout import NumpyGae  # noqa: E402

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


def test_exact_numbers_by_the_hundred_are_summed_up_by_their_ratios(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "RESULTS", tmp_path)

    def exact(case, ours, theirs, unit="cycles"):
        return record.Row(case, ours, unit, "lower", (ours, ours), 1, "Eq. 4", theirs)

    rows = [exact("sampling K=2", 4.0, 2.0), exact("sampling K=4", 1.0, 3.0), exact("sampling K=8", 1.0, 1.0)]
    path = record.write("rtl", "make bench-rtl", 1, [*rows, exact("K=2", 0.0, 0.0, "DSP")], runs=[{"DP": 1}])
    text = report.section(json.loads(path.read_text()))
    assert "| sampling | Eq. 4 | cycles | 3 | 0.5 | 1 | 3 |" in text
    assert "| cells | Eq. 4 | DSP | 1 | 1 | 1 | 1 |" in text, "none where none are needed"
    assert "K=4" not in text
    assert "DP" not in text


def test_every_committed_result_has_its_question():
    for path in record.RESULTS.glob("*.json"):
        assert report.question(path.stem)
    assert report.question("learner_avx512").startswith("The same as [learner](#learner)")
    assert not report.question("nothing_avx512")


def test_a_peer_that_does_not_load_is_told_with_its_reason(monkeypatch):
    monkeypatch.setitem(sys.modules, "reverb", None)  # as if not installed
    sys.modules.pop("benchmarks.peers.reverb", None)
    peer = peers.load("reverb")
    assert peer.module is None
    assert "NumPy below 2" in peer.reason
    timings = list(replay.measure_peers("tree", replay.TREE_KINDS, 2_000, TINY, [peer], TINY.batches))
    assert [t.kind for t in timings] == list(replay.TREE_KINDS)
    assert all(t.row.theirs is None and t.row.reason == peer.reason and t.row.ours > 0 for t in timings)


def test_a_kind_that_a_peer_lacks_is_told_with_its_reason():
    peer = peers.Peer("a peer 1.0", sys)
    (timing,) = replay.measure_peers("tree", ("tree sample",), 2_000, TINY, [peer], TINY.batches)
    assert timing.row.theirs is None
    assert "has no tree" in timing.row.reason


def test_each_kind_is_measured_against_a_peer(filled):
    columns, priorities = filled
    twin, ours = Twin(columns, priorities), replay.our_replay(columns, priorities)
    for kind in replay.REPLAY_KINDS:
        row = replay.compare(kind, replay.Workload(2_000, 8), ours, TINY, "twin", twin).row
        assert row.theirs is not None
        assert row.spread[0] <= row.ours <= row.spread[1]
        assert row.case == f"{kind} B=8 N=2000"


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
    with pytest.raises(replay.DifferenceError, match="does not gather the rows"):
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
    with pytest.raises(replay.DifferenceError, match="does not hold the inserted rows"):
        replay.check_insertion("twin", forgetful, 2_000, 500)


def test_the_same_targets_find_the_same_leaves():
    replay.check_lookups([], size=3_000, batch=500)


def test_updates_never_bring_the_priorities_that_are_there():
    last: dict[bytes, bytes] = {}
    for indices, priorities in islice(replay.Workload(100, 8).updates, 500):
        assert last.get(indices.tobytes()) != priorities.tobytes()
        last[indices.tobytes()] = priorities.tobytes()
    assert len(last) < 500  # indices were repeated


def test_functions_take_turns():
    calls = []
    values = replay.alternate([lambda: calls.append("ours"), lambda: calls.append("theirs")], TINY)
    assert values.shape == (2, TINY.repeats)
    assert (values > 0).all()
    assert {"ours", "theirs"} == set(calls)


def test_plots_are_drawn_from_what_was_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(replay, "ASSETS", tmp_path)
    timings = [replay.Timing("tree sample", 2_048, size, row("lower", 10.0, 40.0)) for size in (1_000, 10_000)]
    (drawn,) = replay.plot(timings)
    assert drawn["file"] == "replay_tree_sample.png"
    assert (tmp_path / drawn["file"]).stat().st_size > 1_000


@pytest.mark.parametrize("setting", ["setting1", "setting2"])
def test_only_the_actors_are_taken_out_of_a_program(tmp_path, setting):
    whole = tmp_path / "program.py"
    shutil.copyfile(ROOT / "tests" / "golden" / f"{setting}.py", whole)
    composed = eps.split(whole)
    before, after = whole.read_text().splitlines(), composed.alone.read_text().splitlines()
    differing = [(old, new) for old, new in zip(before, after, strict=True) if old != new]
    assert len(differing) == 1
    assert "launch_actors" in differing[0][0]
    assert "launch_actors" not in composed.alone.read_text()
    compile(composed.alone.read_text(), "alone", "exec")
    assert composed.learner in ("torch", "native")


def test_a_program_that_starts_no_actors_is_not_measured(tmp_path):
    whole = tmp_path / "program.py"
    whole.write_text("learner = TorchLearner()\n")
    with pytest.raises(RuntimeError, match="launch_actors"):
        eps.split(whole)


def test_rows_take_medians_and_tell_reasons():
    found = record.Row.of("a case", "EPS", "higher", [300.0, 100.0, 200.0], "a peer", [10.0, 30.0, 20.0])
    assert (found.ours, found.theirs, found.ratio, found.spread) == (200.0, 20.0, 10.0, (100.0, 300.0))
    many = record.Row.of("a case", "us", "lower", np.arange(101.0))
    assert (many.ours, many.theirs, many.spread, many.n) == (50.0, None, (20.0, 80.0), 101)
    lost = record.Row.of("a case", "EPS", "higher", [300.0], "a peer", [], "cannot train")
    assert (lost.theirs, lost.ratio, lost.reason) == (None, None, "cannot train")


def test_rate_counts_the_experiences_of_the_time_that_passed():
    now, calls = [0.0], []

    def train(steps):
        calls.append(steps)
        now[0] += steps * 1e-3

    assert training.rate(train, batch=32, seconds=1.0, clock=lambda: now[0]) == pytest.approx(32_000)
    assert calls[0] == 1
    assert max(calls) == pytest.approx(training.CHUNK_S / 1e-3, abs=1)  # few calls, and not far beyond the time asked


def serving(make):
    """What a peer that is made by the code `make` answers to one request."""
    code = f"from benchmarks.peers.training import serve\ndef make(case):\n    {make}\nserve(make)"
    case = json.dumps({"algorithm": "dqn", "environment": "CartPole-v1", "hidden": [64], "batch": 32, "slots": 9})
    done = subprocess.run(
        [sys.executable, "-c", code, case],
        input="0.01\n",
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_peer_answers_in_json_whatever_its_framework_prints():
    ready, trained = serving(
        "import time; print('hello'); return f'peer of {case.batch}', lambda n: print('training', time.sleep(n / 1e3))"
    )
    assert ready == {"name": "peer of 32"}
    assert trained["eps"] > 0


def test_a_peer_that_cannot_train_says_why():
    (answer,) = serving("raise ImportError('No module named ray')")
    assert answer == {"reason": "cannot train: ImportError: No module named ray"}


def test_a_side_tells_what_its_peer_lacks():
    case = training.Case("ddpg", "MountainCarContinuous-v0", (256, 128), 32, 1_000)
    with training.Side("rllib_training", case, "RLlib") as side:
        assert "only its DQN" in side.reason
        with pytest.raises(RuntimeError, match="RLlib"):
            side.train(0.01)


def solving_run(tmp_path, code, limit_s=60.0):
    return solve_time.run([sys.executable, "-c", code], tmp_path, limit_s)


def test_a_run_is_timed_to_the_line_that_says_it_is_solved(tmp_path):
    code = f"import time; print('{solving.SOLVED} at last'); time.sleep(1.5)"
    outcome = solving_run(tmp_path, code)
    assert outcome.solved
    assert not outcome.reason
    assert outcome.seconds > 0
    assert outcome.memory_mb > 1


def test_a_peer_that_compiles_also_counts_from_the_end_of_its_compilation(tmp_path):
    code = f"import time; time.sleep(0.5); print('{solving.COMPILED} 0.500 s'); print('{solving.SOLVED} at last')"
    outcome = solving_run(tmp_path, code)
    assert outcome.compiled.solved
    assert outcome.seconds - outcome.compiled.seconds == pytest.approx(0.5)
    assert solving_run(tmp_path, f"print('{solving.SOLVED}')").compiled is None


def test_runs_that_do_not_solve_are_told_from_those_that_fail(tmp_path):
    ended = solving_run(tmp_path, "print('not yet')")
    assert not ended.solved
    assert not ended.reason
    failed = solving_run(tmp_path, "raise ImportError('no such framework')")
    assert not failed.solved
    assert "no such framework" in failed.reason
    late = solving_run(tmp_path, "import time; time.sleep(60)", limit_s=0.5)
    assert not late.solved
    assert not late.reason
    assert late.seconds < 50


def test_rows_of_solving_say_how_many_seeds_did():
    task = solve_time.Task("CartPole-v1", 475.0, 3, (), ())
    ours = {"ours": [solve_time.Outcome(s, 100.0, True) for s in (1.0, 3.0, 2.0)]}
    theirs = {
        "slow": [solve_time.Outcome(s, 400.0, s < 60) for s in (10.0, 60.0, 20.0)],
        "absent": [solve_time.Outcome(0.1, 0.0, False, "ended with code 1: ImportError")],
    }
    rows = {(r.unit, r.peer.partition(" ")[0]): r for r in solve_time.rows_of(task, ours, theirs)}
    assert rows["s", "slow"].ratio == 10.0
    assert rows["s", "slow"].spread == (1.0, 3.0)
    assert "2 of 3 seeds" in rows["s", "slow"].peer
    assert "seeds" not in rows["s", "slow"].case
    assert rows["MB", "slow"].ratio == 4.0
    assert rows["s", "absent"].theirs is None
    assert "ImportError" in rows["s", "absent"].reason


def test_tasks_of_stability_are_the_examples_for_five_times_their_steps():
    names = {task.name: (task.environment, task.steps) for task in stability.TASKS}
    assert names["DQN CartPole-v1"] == ("CartPole-v1", 250_000)
    assert names["DQN LunarLander-v3"] == ("LunarLander-v3", 500_000)
    assert set(names) >= {"SAC Pendulum-v1", "TD3 Pendulum-v1"}


def test_curves_of_pixels_are_read_until_a_run_solved_its_task(tmp_path):
    """A mean of 18 that other episodes do not confirm is no solution; the peer's pace goes on after its last step."""
    (tmp_path / "evaluations.csv").write_text(
        "env_steps,wall_s,kind,weights_step,mean_return,std_return,episodes\n"
        "25000,50.0,progress,25000,-20.0,1.0,5\n"
        "50000,110.0,progress,50000,18.2,1.0,5\n"
        "50000,111.0,solved check,50000,17.0,1.0,5\n"
        "75000,170.0,progress,75000,19.0,1.0,5\n"
        "75000,171.0,solved check,75000,18.4,1.0,5\n"
        "75000,175.0,last and best,75000,19.0,1.0,5\n"
    )
    curve = reaching.read_curve(tmp_path, 11, 18.0, "abc")
    assert (curve.solved, curve.returns.tolist()) == (2, [-20.0, 18.2, 19.0])
    points = [{"steps": 25_000, "seconds": 40.0, "return": -21.0}, {"steps": 50_000, "seconds": 140.0, "return": -21.0}]
    assert pixels.their_seconds(points, 75_000) == 240.0
    assert pixels.their_seconds(points, 37_500) == 90.0
    steps, seconds = pixels.rows_of([curve], points)
    assert (steps.ours, seconds.ours, seconds.theirs) == (75_000, 170.0, 240.0)
    assert "1 of 1 seeds solved it" in seconds.case
    assert "best return when it was stopped: -21" in seconds.peer
    assert next(row for row in pixels.rows_of([curve], ()) if row.unit == "s").reason


def test_returns_are_compared_until_ours_reach_the_median_of_the_peer(tmp_path):
    """A run that did not reach the goal counts with the time it took; composing is added to each."""
    theirs = [
        [{"steps": 5e4, "seconds": 400.0, "return": 1.0}, {"steps": 1e5, "seconds": s, "return": r}]
        for s, r in ((900.0, 300.0), (1_000.0, 500.0), (1_100.0, 900.0))
    ]
    hopper = next(case for case in returns.CASES if case.environment == "Hopper-v5")
    assert returns.goal_of(hopper, theirs) == 500.0
    assert returns.goal_of(dataclasses.replace(hopper, goal=285.0), theirs) == 285.0
    steps, seconds, values = np.array([1e4, 2e4, 3e4]), np.array([20.0, 40.0, 60.0]), np.array([0.0, 510.0, 520.0])
    curves = [
        reaching.Curve(1, steps, seconds, values, 1, "abc"),
        reaching.Curve(2, steps, seconds, values, None, "abc"),
    ]
    of_steps, of_seconds = returns.rows_of(hopper, curves, 4.0, theirs)
    assert (of_steps.spread, of_steps.theirs) == ((2e4, 3e4), 1e5)
    assert (of_seconds.spread, of_seconds.theirs) == ((44.0, 64.0), 1_000.0)
    assert "until 500 (1 of 2 seeds" in of_seconds.case
    assert "with a return of 300 to 900" in of_seconds.peer
    for case in returns.CASES:
        assert f"sac-{case.environment}" in zoo.names()


def test_learners_beyond_this_machine_are_simulated_with_the_limit_named():
    rows = list(scale.beyond(scale.CASES[0], Phases(np.random.default_rng(0).exponential(200.0, 500))))
    assert "limit: averaging" in next(row.case for row in rows if "server" in row.case and "1024" in row.case)
    assert all(0 < row.ours < 1 for row in rows)
    setup = scale.CASES[0].setup(4, 8)
    assert (setup.share, setup.spec.learners) == (32, 4)


@pytest.mark.slow
def test_phases_are_measured_of_all_learners_at_the_same_time():
    """On one core, two Learners' steps take no longer than on two: their time there counts."""
    shared, own = (scale.step_times(scale.CASES[0].setup(2, 1), cores, 0.3)[0] for cores in (1, 2))
    for step_us in (shared, own):
        assert len(step_us) >= 2 * scale.PART
        np.testing.assert_array_equal(step_us.reshape(-1, scale.PART).std(axis=1), 0)
    assert 0.2 < np.median(shared) / np.median(own) < 1.5
    assert scale.phases_of(scale.CASES[0].setup, 2, 2, 0.3).average_us > 0


def test_tasks_of_solving_are_compositions_of_the_zoo_with_settings_of_the_peers():
    for task in solve_time.TASKS:
        for name in task.zoo:
            composition = spec_file.tomllib.loads((record.ROOT / "examples" / "zoo" / f"{name}.toml").read_text())
            assert composition["actors"]["env"] == task.environment
        for peer in task.peers:
            if peer.module == "sb3_solve":
                assert zoo_settings.settings_of(peer.options[-1], task.environment)[1] >= 20_000


def test_the_page_of_the_zoo_has_medians_and_worst_seeds_beside_what_is_published():
    def run(seed, last):
        numbers = {"steps": 100_000, "last": last, "best": 260.0, "train_s": 31.6}
        return {"composition": "dqn-LunarLander-v3", "seed": seed, **numbers, "commit": "abc", "machine": "a CPU"}

    page = zoo.page([run(4001, 240.0), run(4002, 250.0), run(4003, -20.0)])
    assert "seeds 4001 to 4003" in page
    assert ".toml) | 100,000 | 240.0 | -20.0 | 260.0 | 32 s | 154.4 +- 79.2 | 100k |" in page
    assert page.count("examples/zoo/dqn-LunarLander-v3.toml)") == 1
    assert "Not run yet: a2c-CartPole-v1, " in page
    assert "Runs on a CPU, commit `abc`." in page
    assert set(zoo.names()) <= set(zoo.PUBLISHED)


def test_a_task_that_is_measured_again_replaces_its_rows_in_the_record(tmp_path, monkeypatch):
    def rows_of(env, seconds):
        outcomes = {"ours": [solve_time.Outcome(seconds, 100.0, True)]}
        return solve_time.rows_of(solve_time.Task(env, 0.0, 1, (), ()), outcomes, {"a peer": outcomes["ours"]})

    monkeypatch.setattr(record, "RESULTS", tmp_path)
    monkeypatch.setattr(record, "commit", lambda: "new")
    here = {"commit": "new", "machine": record.machine()["cpu"]}
    first = [{"environment": "CartPole-v1", "seed": 2}]
    names = ("CartPole-v1", "Acrobot-v1", "Pendulum-v1")
    assert record.with_others("times", ["CartPole-v1"], names, [], first, "environment") == (
        [],
        first,
        {"origins": {"CartPole-v1": here}},
    ), "there is no record yet"
    known = {name: rows_of(name, seconds) for name, seconds in (("CartPole-v1", 9.0), ("Acrobot-v1", 5.0))}
    known |= {"Pendulum-v1": rows_of("Pendulum-v1", 1.0), "Gone-v1": rows_of("Gone-v1", 1.0)}
    old = [{"environment": name, "seed": 1} for name in known]
    all_rows = [row for of_one in known.values() for row in of_one]
    record.write("times", "a command", 1, all_rows, runs=old, origins={"Pendulum-v1": here})
    document = json.loads((tmp_path / "times.json").read_text())
    (tmp_path / "times.json").write_text(json.dumps({**document, "commit": "old", "machine": {"cpu": "CPU A"}}))
    new = rows_of("CartPole-v1", 3.0)
    rows, runs, more = record.with_others("times", ["CartPole-v1"], names, new, first, "environment")
    assert rows == [*known["Acrobot-v1"], *known["Pendulum-v1"], *new]
    assert runs == [*old[1:3], *first]
    assert more == {
        "origins": {
            "CartPole-v1": here,
            "Acrobot-v1": {"commit": "old", "machine": "CPU A"},
            "Pendulum-v1": here,
        },
        "note": "The rows of Acrobot-v1 are of commit `old` on CPU A.",
    }


def test_a_peer_passes_by_its_greedy_returns(capsys):
    examiner = solving.Examiner("CartPole-v1", goal=100.0, seed=1)
    assert not examiner.passes(lambda obs: np.zeros(len(obs), np.int64))  # falls over at once
    assert solving.SOLVED not in capsys.readouterr().out
    assert examiner.passes(lambda obs: (obs[:, 2] + 0.5 * obs[:, 3] > 0).astype(np.int64))
    assert solving.SOLVED in capsys.readouterr().out


# --- advantages -------------------------------------------------------------------------------------------------------


class OwnAdvantages:
    """A peer that is this project's reference, off by `error`."""

    VERSION = "1.0"
    error = 0.0

    def __init__(self, rollout, gamma, gae_lambda):
        self.given, self.estimator = rollout, NumpyGae(gamma, gae_lambda)
        self()

    def __call__(self):
        self.arrays = {name: array.copy() for name, array in self.given.items()}
        self.estimator.estimate(**self.arrays)

    def advantages(self):
        return self.arrays["rewards"] + self.error

    @classmethod
    def peer(cls):
        return peers.Peer("a peer 1.0", SimpleNamespace(make_advantages=cls))


def test_advantages_of_libraries_are_checked_and_those_without_any_are_told():
    plan = gae.Plan(repeats=3, their_repeat_s=1e-5)
    found = [OwnAdvantages.peer(), peers.Peer("none", None, "is not installed"), peers.Peer("less", SimpleNamespace())]
    compared, absent, lacking = gae.against_libraries((6, 5), found, plan)
    assert compared.ratio == pytest.approx(compared.ours / compared.theirs)
    assert compared.better == "higher"
    assert (absent.theirs, absent.reason) == (None, "is not installed")
    assert (lacking.theirs, lacking.reason) == (None, "has no advantages by itself")

    class Wrong(OwnAdvantages):
        error = 0.01

    with pytest.raises(gae.DifferenceError, match=r"T=6 N=5: a peer 1.0 gives other advantages, by up to 0.01"):
        list(gae.against_libraries((6, 5), [Wrong.peer()], plan))


def test_advantages_of_codes_and_of_copies_are_compared_with_our_own():
    rows = list(gae.against_ourselves((6, 5), gae.Plan(repeats=3, their_repeat_s=1e-5)))
    assert [(row.case, row.peer) for row in rows] == [("T=6 N=5 codes", "float32"), ("T=6 N=5 floor", "copy")]
    assert all(row.ours > 0 and row.theirs > 0 for row in rows)


class Turns:
    """A probe whose times are given, and a clock that only sleeping moves."""

    def __init__(self, monkeypatch, *probe_us):
        self.now, self.taken, times = 0.0, 0, iter(probe_us)
        monkeypatch.setattr(quiet, "microseconds", lambda probe, calls: next(times))

    def sleep(self, seconds):
        self.now += seconds

    def take(self):
        self.taken += 1
        self.sleep(0.5)
        return self.taken

    def quiet(self, limit_s):
        return quiet.Quiet(lambda: None, limit_s, 0.0, clock=lambda: self.now, sleep=self.sleep)


def test_a_turn_that_ends_disturbed_is_repeated_when_it_is_quiet(monkeypatch):
    turns = Turns(monkeypatch, 10.0, 10.0, 30.0, 30.0, 13.0, 12.0)
    waiting = turns.quiet(60.0)
    assert waiting.turn(turns.take) == turns.taken == 2
    assert (waiting.turns, waiting.disturbed, waiting.repeated_s) == (1, 0, pytest.approx(0.5 + quiet.PAUSE_S))


def test_turns_beyond_the_limit_count_as_they_are(monkeypatch, capsys):
    turns = Turns(monkeypatch, 10.0, 10.0, *[30.0] * 10_000)
    waiting = turns.quiet(20.0)
    assert [waiting.turn(turns.take) for _ in range(3)] == [2, 3, 4]
    assert (waiting.turns, waiting.disturbed) == (3, 3)
    assert 20.0 <= waiting.repeated_s < 20.1
    assert "waiting: the probe takes 30.0 us, at least 10.0" in capsys.readouterr().err


@pytest.mark.skipif(len(quiet.own_cores()) < 2, reason="needs two cores of which it can choose")
def test_a_process_and_its_children_move_to_a_core_and_back():
    cores = quiet.own_cores()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:

        def both():
            assert os.sched_getaffinity(0) == os.sched_getaffinity(child.pid)
            return os.sched_getaffinity(0)

        waiting = quiet.Quiet(lambda: None, 0.0, 0.0, cores)
        try:
            assert both() == {cores[0]}
            quiet.move(cores[1])
            assert both() == {cores[1]}
        finally:
            waiting.end()
        assert both() == set(cores)
