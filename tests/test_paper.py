"""docs/paper.md: its tables and pictures, and the measurements behind them."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import re
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # benchmarks are not installed

from benchmarks import paper, paper_learning, paper_plots, paper_primitives, paper_results, paper_runs  # noqa: E402
from benchmarks import paper_systems as systems  # noqa: E402
from benchmarks.fpga_model import PEARL_CARTPOLE, PONG  # noqa: E402
from benchmarks.wide_car import ENV, WideCarDDPG  # noqa: E402
from composer.portability import phi  # noqa: E402

CARTPOLE = systems.Case("server_cgf", PEARL_CARTPOLE, 32, 100_000, 16)


def results(rows, **document):
    facts = {"command": "make x", "commit": "abc", "date": "2026-01-01", "machine": {"cpu": "a CPU"}}
    return paper_results.Results({**facts, "rows": [], **document}, rows)


def curve(seed, returns, task="CartPole DQN", side="PEARL"):
    steps = [1_000 * (k + 1) for k in range(len(returns))]
    return {
        "task": task,
        "side": side,
        "seed": seed,
        "steps": steps,
        "seconds": [s / 500 for s in steps],
        "returns": returns,
    }


# --- the page --------------------------------------------------------------------------------------------------------


def test_the_page_is_that_of_the_current_model_results_and_examples():
    assert paper.render() == paper.TARGET.read_text(encoding="utf-8"), "write it again: make paper"


def test_every_picture_of_the_page_is_drawn_and_every_drawn_one_is_shown():
    page = paper.TARGET.read_text(encoding="utf-8")
    shown = set(re.findall(r"\(assets/(\S+)\)", page))
    assert shown == set(paper.PICTURES)
    assert all((paper.ASSETS / name).exists() for name in shown)


def test_the_page_has_every_experiment_and_says_where_values_come_from():
    page = paper.TARGET.read_text(encoding="utf-8")
    figures = ("Table III", "Table IV", "Table V", "PEARL Fig. 8", "PEARL Fig. 9", "PEARL Fig. 10", "PEARL Fig. 11")
    others = ("CF'22 Fig. 7", "CF'22 Fig. 8", "CF'22 Fig. 9", "CF'22 Fig. 10", "LunarLander")
    thesis = tuple(f"hesis Fig. 4.{number}" for number in (8, 9, 10, 11))
    headings = "\n".join(line for line in page.splitlines() if line.startswith("## "))
    assert all(name in headings for name in (*figures, *others, *thesis))
    for value in ("7.8K, 90.3K", "46.3, 406.2", "2.9K, 4.6K", "2.9K, 46.8K", "17.24, 227", "~75", "~0.04"):
        assert value in page
    for source in ("**paper**", "**measured here**", "**modelled**", "**computed**"):
        assert source in page


def test_pictures_depend_on_their_numbers_only(tmp_path):
    first, second, other = (tmp_path / f"{name}.svg" for name in "abc")
    for path, y in ((first, [2.0, 3.0]), (second, [2.0, 3.0]), (other, [2.0, 4.0])):
        panel = paper_plots.Panel("t", "x", "y", [paper_plots.Line("a line", [1, 2], y, [1, 2], [4, 5])])
        paper_plots.draw_lines(path, [panel], 1)
    assert first.read_bytes() == second.read_bytes() != other.read_bytes()
    assert "a line" in first.read_text()


def test_grids_and_bars_may_have_gaps(tmp_path):
    values = np.array([[1.0, math.nan], [2.0, 3.0]])
    paper_plots.draw_grids(tmp_path / "g.svg", [paper_plots.Grid("t", ("A", "B"), values, [["1", "-"], ["2", "3"]])], 1)
    paper_plots.draw_bars(tmp_path / "b.svg", {"g": {"s": [1.0, math.nan]}}, {"g": ["32", "64"]}, "GPS")
    assert ">-<" in (tmp_path / "g.svg").read_text()
    assert ">GPS<" in (tmp_path / "b.svg").read_text()


# --- modelled values -------------------------------------------------------------------------------------------------


def test_table_iii_has_the_weights_of_its_networks():
    page = paper_primitives.table_iii()
    assert f"| Q: 4-64-2 | {(4 + 1) * 64 + (64 + 1) * 2} |" in page
    trainer = WideCarDDPG(*paper_runs.PROBLEMS[1].spaces(), seed=0)
    weights = sum(p.numel() for network in (trainer.actor, trainer.critic) for p in network.parameters())
    assert f"| {weights:,} |" in page


def test_a_grid_has_every_pair_of_devices_with_its_fastest_program():
    found = systems.fastest(CARTPOLE)
    assert set(found) == {(replay, learner) for replay in systems.KINDS for learner in systems.KINDS}
    best = max(found, key=lambda pair: found[pair].eps)
    assert found[best].eps == systems.placement(CARTPOLE).eps
    assert f"**{paper_results.rate(found[best].eps)}**" in systems.grids()


def test_pairs_that_cannot_run_are_told():
    case = dataclasses.replace(CARTPOLE, workload=PONG)
    assert ("FPGA", "FPGA") not in systems.fastest(case)
    row = next(line for line in systems.grids().splitlines() if "Pong DQN | 32 | FPGA" in line)
    assert row.endswith("| cannot run |")


def test_a_mapping_is_named_learner_first():
    (case,) = [c for c in systems.CF22_CASES if c.workload.name == "CartPole DQN" and c.batch == 32]
    candidate = systems.fastest(case)["CPU", "FPGA"]  # Replay Manager first
    assert systems._gps(case, "FPGA", "CPU") == candidate.eps / 32


def test_the_exploration_marks_the_best_design_that_fits():
    cells, best = paper_primitives.exploration()
    assert cells[1, min(units for _, units in cells)][0] == 1.0
    assert (best.dp, max(best.multipliers)) == (2, 32)  # CF'22 Table 2
    fitting = [value for value, fits in cells.values() if fits]
    assert min(fitting) < 1 < len([fits for _, fits in cells.values() if not fits])
    assert f"**{min(fitting):.3f}**" in paper_primitives.design_space()


# --- measured values -------------------------------------------------------------------------------------------------


def test_measured_choices_are_read_and_an_absent_one_makes_phi_zero():
    rows = {
        "CartPole DQN batch 32: RM on cpu0, Learner on cpu0 (native)": 100.0,
        "CartPole DQN batch 32: RM on cpu0, Learner on sycl:cpu0 (sycl)": 50.0,
        "CartPole DQN batch 32: RM on sycl:cpu0, Learner on cpu0 (native)": 50.0,
        "CartPole DQN batch 32: gradient step": 7.0,
    }
    found = paper.measured_choices(PEARL_CARTPOLE, results(rows))
    assert found == {"EPS": (100.0, None), "Phi(D)": (0.0, None)}
    rows["CartPole DQN batch 32: RM on sycl:cpu0, Learner on sycl:cpu0 (sycl)"] = 25.0
    found = paper.measured_choices(PEARL_CARTPOLE, results(rows))
    assert found["Phi(D)"][0] == pytest.approx(phi([100.0, 50.0, 50.0, 25.0]))


def test_a_small_part_is_told_as_such():
    assert "--quick" not in results({}).provenance
    assert "a small part only (`--quick`)" in results({}, quick=True).provenance


def test_curves_say_how_many_seeds_reach_the_goal(monkeypatch):
    both = results({}, curves=[curve(1, [10.0, 480.0]), curve(2, [490.0, 20.0])])
    monkeypatch.setattr(paper_results.Results, "load", lambda name: both)
    assert (
        "| CartPole DQN | PEARL | 2 | 2,000 | 4 | 485 (480 to 490) | 475 | 2/2 | 3 | 1,500 |" in paper_learning.curves()
    )
    one = results({}, curves=[curve(1, [10.0, 480.0]), curve(2, [10.0, 20.0])])
    monkeypatch.setattr(paper_results.Results, "load", lambda name: one)
    assert "| 1/2 | - | - |" in paper_learning.curves()


def test_a_band_spans_the_points_that_all_seeds_have():
    line = paper_learning._line("x", [curve(1, [0.0, 10.0, 20.0]), curve(2, [10.0, 10.0])], "steps")
    assert (line.x[0], line.x[-1]) == (1_000, 2_000)
    assert (line.low[0], line.y[0], line.high[0]) == (0.0, 5.0, 10.0)
    assert line.low[-1] == line.high[-1] == 10.0
    assert paper_learning._line("x", [curve(1, [3.0]), curve(2, [5.0])], "steps").y == [4.0]


def test_the_wide_car_has_the_sizes_of_table_iii():
    env = gym.make(ENV)
    try:
        obs, _ = env.reset(seed=1)
        assert (obs.shape, env.action_space.shape) == ((8,), (4,))
        assert np.array_equal(obs[:2], obs[6:])
        plain = gym.make("MountainCarContinuous-v0")
        plain.reset(seed=1)
        expected, *_ = plain.step(np.array([0.25], np.float32))
        stepped, *_ = env.step(np.array([1.0, 0.0, 0.0, 0.0], np.float32))
        assert np.array_equal(stepped[:2], expected)
    finally:
        env.close()


def test_steps_are_measured_for_each_problem():
    plan = dataclasses.replace(paper_runs.QUICK, step_batches=(32,), step_repeats=1)
    rows = list(paper_runs.measure_steps(plan, Path()))
    assert [row.case for row in rows] == [f"{p.name} batch 32: gradient step" for p in paper_runs.PROBLEMS]
    assert all(row.ours > 0 and row.unit == "us" for row in rows)


def test_only_evaluations_during_training_make_a_curve(tmp_path, monkeypatch):
    def run(program, *options, **_):
        folder = options[options.index("--run-dir") + 1]
        folder.mkdir()
        with (folder / "evaluations.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(("env_steps", "wall_s", "kind", "weights_step", "mean_return"))
            writer.writerows([(1_016, 1.5, "progress", 1_000, -3.0), (2_000, 2.5, "last", 2_000, 9.0)])

    monkeypatch.setattr(paper_runs, "run_program", run)
    found = paper_runs.our_curve(paper_runs.TASKS[0], tmp_path / "p.py", 3, tmp_path)
    assert found == paper_runs.Curve("CartPole DQN", "PEARL", 3, [1_000], [1.5], [-3.0])


def peer(tmp_path, code):
    """A "Python" that runs `code` whatever module it is asked for."""
    program = tmp_path / "peer"
    program.write_text(f"#!{sys.executable}\n{code}\n")
    program.chmod(0o755)
    return str(program)


def test_the_curve_of_a_peer_is_what_it_prints(tmp_path):
    lines = [json.dumps({"steps": 500, "seconds": 0.5, "return": 7.0}), "a warning"]
    found, reason = paper_runs.their_curve(
        paper_runs.TASKS[0], peer(tmp_path, f"print({chr(10).join(lines)!r})"), 1, 1.0
    )
    assert (found.steps, found.seconds, found.returns, reason) == ([500], [0.5], [7.0], "")


def test_a_peer_that_fails_says_why(tmp_path):
    found, reason = paper_runs.their_curve(
        paper_runs.TASKS[0], peer(tmp_path, "raise ImportError('no such framework')"), 1, 1.0
    )
    assert not found.returns
    assert reason == "ended with code 1: ImportError: no such framework"


def test_a_peer_that_is_too_slow_is_told(tmp_path):
    found, reason = paper_runs.their_curve(paper_runs.TASKS[0], peer(tmp_path, "pass"), 1, 2.5)
    assert (found.returns, reason) == ([], "no evaluation within 2.5 s")
