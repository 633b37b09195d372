from __future__ import annotations

import contextlib
import csv
import json
import math
import os
import re
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from programs import Running, is_alive, make_program, run, running
from safetensors.torch import load_file
from trainers import Collapsing, Guessing, OwnTrainer, Sluggish, TinyDDPG
from typer.testing import CliRunner

import pearl
from pearl.actors.actor import ActorSetup
from pearl.actors.process import run_actor
from pearl.actors.report import Report
from pearl.algorithms import DQN
from pearl.cli import app
from pearl.ipc.queues import WeightSyncQueue
from pearl.runtime.outcome import BEST_WEIGHTS, LAST_WEIGHTS
from pearl.runtime.queues import DataCollectionQueue
from pearl.runtime.scores import decimals
from pearl.runtime.telemetry import PARTS
from pearl.spec import ActorSpec, TrainSpec, TransitionSpec

SETTINGS = pytest.mark.parametrize("setting", [1, 2])


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory, quick_profiles: None) -> dict[int, Path]:
    """The same problem in both settings."""
    folder = tmp_path_factory.mktemp("programs")
    return {setting: make_program(folder, setting=setting, name=f"setting{setting}") for setting in (1, 2)}


def checkpoints(folder: Path) -> list[Path]:
    return sorted(folder.glob("checkpoint-*"))


def summary(run_dir: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
    return found


def returns(run_dir: Path) -> list[float]:
    """Of the training episodes."""
    with (run_dir / "episodes.csv").open() as file:
        return [float(row["return"]) for row in csv.DictReader(file)]


def edit(program: Path, old: str, new: str) -> None:
    """Programs may be edited freely."""
    text = program.read_text()
    assert text.count(old) == 1
    program.write_text(text.replace(old, new))


def has_episodes(run_dir: Path) -> bool:
    """Training is under way: transitions arrive."""
    episodes = run_dir / "episodes.csv"
    return episodes.exists() and episodes.read_text().count("\n") > 5


# --- a whole run ----------------------------------------------------------------------------------------------------


@SETTINGS
def test_program_runs_and_leaves_its_results(programs: dict[int, Path], tmp_path: Path, setting: int) -> None:
    assert ("setting 1" in programs[setting].read_text()) == (setting == 1)
    results = tmp_path / "run"
    arguments = ("--timesteps", "2000", "--eval-episodes", "3", "--plot", "--run-dir", str(results))
    code, output = run(programs[setting], *arguments)
    assert code == 0, output
    assert (results / "weights.safetensors").stat().st_size > 0
    assert (results / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    assert list((results / "tensorboard").glob("events.*"))
    assert checkpoints(results / "checkpoints")
    found = summary(results)
    assert found["env_steps"] >= 2000
    assert found["gradient_steps"] > 100
    assert found["measured_eps"] > 0
    assert found["priority_update_delay"] == (1 if setting == 1 else 0), "what is in effect"
    assert found["last"]["episodes"] == found["best"]["episodes"] == 3
    assert found["last"]["step"] == found["env_steps"]
    for which in ("last", "best"):
        policy = pearl.load_policy(results, which)
        assert (policy.origin.step, policy.origin.mean_return) == (found[which]["step"], found[which]["mean"])
        assert policy.action_space.contains(policy.predict(np.zeros(4)))
    # 2 samples are trained per transition collected, give or take what may be under way.
    assert found["replay_ratio"] == pytest.approx(2.0, rel=0.25)
    with (results / "progress.csv").open() as file:
        assert {"env_steps", "eps", "gps", "replay_ratio"} <= set(next(csv.reader(file)))
    for named in ("weights.safetensors", "learning_curve.png", "tensorboard", "Last weights:", "Best weights:"):
        assert named in output
    assert re.search(
        r"while a batch was under way at a replay ratio of 2, \d\.\d\d of the [\d,]+ EPS that the composer predicted;",
        output,
    )
    assert re.search(r"replay ratio \S+  greedy \d+\S* at [12],\d\d\d", output), "the display shows greedy evaluations"
    assert f"\n{found['env_steps']:,}/2,000 steps 100%" in output, "the last counts"
    if setting == 2:
        less = ("--timesteps", "1000", "--eval-episodes", "0", "--no-plot", "--run-dir", str(results), "--resume")
        code, output = run(programs[setting], *less)
        assert code == 0, output
        assert "Learning curve: none, by --no-plot" in output
        assert "--timesteps 1,000 counts the steps of the whole run" in output
        assert "nothing is trained" in output
        assert "No training step was done" not in output, "that was said already"
        assert "1,000 steps 100%" in output


def test_a_program_of_an_earlier_version_runs(programs: dict[int, Path], tmp_path: Path) -> None:
    program = tmp_path / "earlier.py"
    program.write_text(re.sub(r"    (predicted_us|devices)=\{.*?\},\n", "", programs[2].read_text(), flags=re.DOTALL))
    assert "predicted_us" not in program.read_text()
    code, output = run(program, "--bench", "--bench-seconds", "0.5", "--timesteps", "0", "--run-dir", str(tmp_path))
    assert code == 0, output
    assert "Nothing is left to train" not in output
    assert json.loads((tmp_path / "bench.json").read_text())["iteration"]["predicted_us"] == {}


def test_help_names_every_option(programs: dict[int, Path]) -> None:
    code, output = run(programs[2], "--help")
    assert code == 0
    for option in ("--timesteps", "--seed", "--checkpoint-dir", "--resume", "--serial", "--bench", "--eval-episodes"):
        assert option in output
    assert "CartPole-v1" in output


@SETTINGS
def test_bench_measures_at_the_replay_ratio_and_without_waiting(
    programs: dict[int, Path], tmp_path: Path, setting: int
) -> None:
    arguments = ("--bench", "--bench-both", "--bench-seconds", "0.6", "--run-dir", str(tmp_path))
    code, output = run(programs[setting], *arguments)
    assert code == 0, output
    assert "Filling the replay" in output
    found = json.loads((tmp_path / "bench.json").read_text())
    paced, free = found["measurements"]
    assert paced["paced_at"] > 0
    assert free["paced_at"] is None
    assert {name: value for name, value in found.items() if name in free} == free, "the last one stands alone too"
    for measured in (paced, free):
        samples = measured["iteration_samples_us"]
        assert len(samples) >= 2
        assert min(samples) > 0
        assert measured["measured_eps"] > 0
    assert paced["overall_eps"] < 1.01 * paced["measured_eps"], "it waited for data"
    # Measured next to predicted.
    text, iteration = programs[setting].read_text(), found["iteration"]
    assert f"predicted_free_eps={found['predicted_eps']}," in text
    if setting == 1:
        assert set(iteration["measured_us"]) == set(PARTS), "in setting 1, each part is measured"
    for name, value in iteration["predicted_us"].items():
        assert f'"{name}": {value}' in text
    # The busy rate, from the same clock: the median of few intervals, and the mean.
    assert 0.2 < iteration["measured_us"]["iteration"] * found["measured_eps"] / 16e6 < 5
    assert not (tmp_path / "weights.safetensors").exists()


@pytest.mark.parametrize(
    ("capacity", "batch_size", "replay_ratio"),
    [
        pytest.param(600, 16, 2.0, id="wrapped"),
        # Two batches in flight nearly always hold a slot that the next insertion needs.
        pytest.param(1000, 64, math.inf, id="free-running"),
    ],
)
def test_a_small_replay_turns_over_without_touching_what_is_trained_on(
    tmp_path: Path, quick_profiles: None, capacity: int, batch_size: int, replay_ratio: float
) -> None:
    training = {"batch_size": batch_size, "replay_ratio": replay_ratio}
    program = make_program(tmp_path, setting=1, capacity=capacity, training=training)
    results = tmp_path / "results"
    with running(program, "--timesteps", "5000", "--eval-episodes", "0", "--run-dir", str(results)) as started:
        assert started.wait(60) == 0, started.output
    found = summary(results)
    assert found["env_steps"] >= 5000
    assert found["gradient_steps"] > 100
    assert found["stale_updates"] == 0


def test_goal_reached_stops_the_run(programs: dict[int, Path], tmp_path: Path) -> None:
    # Any CartPole policy gets more than a return of 5.
    arguments = ("--timesteps", "50000", "--eval-interval", "300", "--eval-episodes", "5", "--until-return", "5")
    code, output = run(programs[2], "--serial", *arguments, "--run-dir", str(tmp_path))
    assert code == 0, output
    found = summary(tmp_path)
    assert found["env_steps"] < 5000
    # The weights that solved it are the last and the best: played once.
    assert found["best"]["step"] == found["last"]["step"] == found["env_steps"]
    assert found["best"]["mean"] == found["last"]["mean"]
    with (tmp_path / "evaluations.csv").open() as file:
        assert [row["kind"] for row in csv.DictReader(file)][-3:] == ["progress", "solved check", "last and best"]
    assert "solved" in str(summary(tmp_path)["stopped"])


def test_a_run_that_collapses_reports_its_last_and_its_best_weights_apart(tmp_path: Path, quick_profiles: None) -> None:
    training = {"batch_size": 16, "learning_starts": 100, "replay_ratio": 8.0}
    program = make_program(tmp_path, trainer=Collapsing, env="Counting-v0", training=training)
    results = tmp_path / "results"
    arguments = ("--serial", "--eval-interval", "100", "--eval-episodes", "3", "--run-dir", str(results))
    code, output = run(program, *arguments, "--timesteps", "1250")  # no evaluation is due at the end
    assert code == 0, output
    found = summary(results)
    last, best = found["last"], found["best"]
    assert last["mean"] == 0.0
    assert last["step"] == found["env_steps"]
    assert best["mean"] == best["selected_mean"] > 8.0
    assert 300 < best["step"] < 900
    assert f"step {last['step']:,}, mean return 0.0" in output
    best_score = f"step {best['step']:,}, mean return {best['mean']:.{decimals(best['mean'])}f}"
    assert best_score in output
    skills = [load_file(results / name)["skill.weight"].item() for name in (LAST_WEIGHTS, BEST_WEIGHTS)]
    assert skills[0] == 0.0
    assert skills[1] > 8.0
    with (results / "evaluations.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["kind"] for row in rows] == ["progress"] * (len(rows) - 2) + ["last", "best"]
    assert [int(row["weights_step"]) for row in rows[-3:]] == [last["step"], last["step"], best["step"]]
    assert [float(row["mean_return"]) for row in rows[-3:]] == [0.0, 0.0, best["mean"]]

    # What was best stays best where the run goes on.
    code, output = run(program, *arguments, "--timesteps", "1500", "--resume")
    assert code == 0, output
    resumed = summary(results)
    assert resumed["best"] == best
    assert resumed["last"]["step"] >= 1500
    assert load_file(results / BEST_WEIGHTS)["skill.weight"].item() == skills[1]
    report = CliRunner().invoke(app, ["report", str(results)]).stdout
    assert f"step {resumed['last']['step']:,}, mean return 0.0" in report
    assert best_score in report


@pytest.mark.parametrize(
    "problem",
    [
        pytest.param({"trainer": OwnTrainer, "env": "Counting-v0", "training": {"batch_size": 16}}, id="own-trainer"),
        pytest.param({"mode": "uniform", "training": {"n_step": 3}}, id="uniform-n-step"),
        pytest.param({"trainer": TinyDDPG, "env": "Pendulum-v1"}, id="ddpg"),
    ],
)
def test_kinds_of_problem_train(tmp_path: Path, quick_profiles: None, problem: dict[str, Any]) -> None:
    program = make_program(tmp_path, **problem)
    results = tmp_path / "results"
    arguments = ("--timesteps", "1500", "--eval-episodes", "2", "--run-dir", str(results))
    code, output = run(program, "--serial", *arguments)
    assert code == 0, output
    assert summary(results)["gradient_steps"] > 20
    assert (results / "weights.safetensors").stat().st_size > 0


# --- determinism and resuming ---------------------------------------------------------------------------------------


@SETTINGS
def test_serial_runs_repeat_and_resume_to_the_bit(tmp_path: Path, quick_profiles: None, setting: int) -> None:
    # The checkpoint falls on an insertion, when many batches are due; weights are rarely sent to the actors.
    program = make_program(tmp_path, setting=setting, training={"replay_ratio": 16.0, "weight_sync_interval": 900})
    common: tuple[str, ...] = ("--serial", "--timesteps", "2000", "--checkpoint-interval", "1024")
    # Evaluations on the way: the best weights so far are part of a run.
    common += ("--eval-interval", "512", "--eval-episodes", "2")

    def started(name: str, *arguments: str) -> contextlib.AbstractContextManager[Running]:
        return running(program, *common, "--run-dir", str(tmp_path / name), *arguments)

    def weights(name: str, program: Running) -> bytes:
        assert program.wait() == 0, program.output
        return (tmp_path / name / "weights.safetensors").read_bytes()

    with started("whole", "--seed", "7") as one:
        whole = weights("whole", one)
    if setting == 1:  # in setting 2, a policy of chance repeats
        with started("again", "--seed", "7") as two, started("other", "--seed", "8") as other:
            assert weights("again", two) == whole
            assert weights("other", other) != whole

    # The other half of the run, from the checkpoint that the whole run left behind half way.
    half, end = checkpoints(tmp_path / "whole" / "checkpoints")
    (tmp_path / "half").mkdir()
    shutil.copytree(half, tmp_path / "half" / half.name)
    resume = ("--seed", "7", "--resume", "--checkpoint-dir", str(tmp_path / "half"))
    with started("resumed", *resume) as resumed:
        assert weights("resumed", resumed) == whole
    assert checkpoints(tmp_path / "half")[-1].name == end.name
    first, last = summary(tmp_path / "whole"), summary(tmp_path / "resumed")
    for same in ("env_steps", "gradient_steps", "episodes", "replay_ratio", "last", "best"):
        assert last[same] == first[same]
    (tmp_path / "resumed" / "weights.safetensors").unlink()
    origin = pearl.load_policy(tmp_path / "resumed", "last").origin
    assert origin.file == str(checkpoints(tmp_path / "half")[-1]), "where --checkpoint-dir says"


@pytest.mark.parametrize(("interval", "warns"), [("8", True), ("320", False)])
def test_a_serial_run_whose_checkpoints_leave_no_episode_says_so(
    programs: dict[int, Path], tmp_path: Path, interval: str, warns: bool
) -> None:
    arguments = ("--serial", "--timesteps", "640", "--checkpoint-interval", interval, "--eval-episodes", "0")
    code, output = run(programs[2], *arguments, "--run-dir", str(tmp_path / "run"))
    assert code == 0, output
    assert output.count("No episode has ended so far, and in serial mode") == warns
    assert (f"the {interval} steps of all environments" in output) == warns
    assert (summary(tmp_path / "run")["episodes"] == 0) == warns


def test_an_evaluation_that_waits_for_training_is_made_after_a_resumption(
    programs: dict[int, Path], tmp_path: Path
) -> None:
    common = ("--serial", "--timesteps", "200", "--checkpoint-interval", "105", "--eval-interval", "100", "--no-plot")
    common += ("--eval-episodes", "2", "--run-dir")
    code, output = run(programs[2], *common, str(tmp_path / "whole"))
    assert code == 0, output
    early, _ = checkpoints(tmp_path / "whole" / "checkpoints")  # of a step between the interval and the training
    shutil.copytree(early, tmp_path / "resumed" / "checkpoints" / early.name)
    code, output = run(programs[2], *common, str(tmp_path / "resumed"), "--resume")
    assert code == 0, output
    found = []
    for name in ("whole", "resumed"):
        with (tmp_path / name / "evaluations.csv").open() as file:
            found.append([(row["kind"], row["weights_step"], row["mean_return"]) for row in csv.DictReader(file)])
    assert found[0] == found[1]
    assert 105 < int(found[0][0][1]) < 200


def test_runs_one_after_the_other_in_a_process_leave_it_nothing(tmp_path: Path, quick_profiles: None) -> None:
    again = tmp_path / "again.py"
    make_program(tmp_path, trainer=DQN)
    again.write_text("""
import os, program
counts = []
for _ in range(3):
    assert program.main() == 0
    counts.append(len(os.listdir("/proc/self/fd")))
assert counts[0] == counts[1] == counts[2], counts
""")
    code, output = run(again, "--serial", "--timesteps", "100", "--eval-episodes", "0", "--no-plot")
    assert code == 0, output


def test_data_of_few_or_slow_environments_are_trained_on_at_once(tmp_path: Path, quick_profiles: None) -> None:
    training = {"batch_size": 8, "learning_starts": 16}
    program = make_program(tmp_path, env="Counting-v0", env_kwargs={"pause_s": 0.0}, training=training)
    common = ("--eval-episodes", "0", "--run-dir")
    code, output = run(program, "--serial", "--timesteps", "100", *common, str(tmp_path / "few"))
    assert code == 0, output
    assert summary(tmp_path / "few")["gradient_steps"] > 0
    edit(program, '"pause_s": 0.0', '"pause_s": 0.05')  # ten steps of four environments
    code, output = run(program, "--timesteps", "40", *common, str(tmp_path / "slow"))
    assert code == 0, output
    assert summary(tmp_path / "slow")["gradient_steps"] > 0


def test_environments_say_once_what_they_say_and_need_not_end(tmp_path: Path, quick_profiles: None) -> None:
    program = make_program(tmp_path, env="Grumbling-v0", actors=2)
    arguments = ("--timesteps", "1000", "--eval-interval", "200", "--eval-episodes", "3", "--eval-max-steps", "50")
    code, output = run(program, *arguments, "--run-dir", str(tmp_path / "run"))
    assert code == 0, output
    said = [f"UserWarning: this gearbox {what}" for what in ("is old", "needs oil", "squeaks")]
    for words in (*said, "Grumbling-v0 did not end within 50 steps"):
        assert output.count(words) == 1, output
    assert (tmp_path / "run" / "evaluations.csv").read_text().count("\n") > 3


@pytest.mark.slow
def test_a_policy_of_chance_repeats_with_the_seed(tmp_path: Path, quick_profiles: None) -> None:
    # Nothing but torch's random numbers decides what happens in this environment.
    program = make_program(tmp_path, trainer=Guessing, env="Counting-v0", training={"batch_size": 16})
    common = ("--serial", "--timesteps", "1200", "--eval-episodes", "0")
    with contextlib.ExitStack() as stack:
        for started in [
            stack.enter_context(running(program, *common, "--seed", seed, "--run-dir", str(tmp_path / name)))
            for name, seed in (("one", "7"), ("two", "7"), ("other", "8"))
        ]:
            assert started.wait() == 0, started.output
    weights = {name: (tmp_path / name / "weights.safetensors").read_bytes() for name in ("one", "two", "other")}
    assert summary(tmp_path / "one")["gradient_steps"] > 0
    assert weights["one"] == weights["two"]
    assert weights["one"] != weights["other"]
    assert returns(tmp_path / "one") == returns(tmp_path / "two")
    assert returns(tmp_path / "one") != returns(tmp_path / "other")


def test_an_actors_seed_and_index_decide_its_random_numbers() -> None:
    spec, train = ActorSpec("Counting-v0", count=2, envs_per_actor=4), TrainSpec(batch_size=16)
    transition = TransitionSpec.from_spaces(spaces.Box(0.0, 1.0, (3,), np.float32), spaces.Discrete(2))

    def actions(index: int) -> list[int]:
        """The first ones of an actor, in a thread, as its process has nothing else to do."""
        setup = ActorSetup(Guessing, {}, spec, train, seed=7, index=index)
        taken: list[int] = []
        with ThreadPoolExecutor(1) as thread, DataCollectionQueue(transition, setup.message_rows(), 2) as queue:
            ended = thread.submit(run_actor, setup, queue, WeightSyncQueue(1), Report())
            while len(taken) < 16:  # where time is short, in messages of fewer steps
                found = queue.peek(60.0)
                assert found is not None
                message, rows = found
                taken += message["action"][:rows].tolist()
                queue.release()
        ended.result()
        return taken[:16]

    first = actions(0)
    assert actions(0) == first
    assert actions(1) != first


def test_ctrl_c_leaves_a_checkpoint_and_a_trace_and_the_run_goes_on(programs: dict[int, Path], tmp_path: Path) -> None:
    arguments = ("--eval-episodes", "0", "--run-dir", str(tmp_path))
    trace = tmp_path / "trace.json"
    with running(programs[2], "--timesteps", "500000", "--trace", str(trace), *arguments) as program:
        program.until(lambda: has_episodes(tmp_path))
        pids = program.actor_pids()
        assert pids
        program.interrupt()
        assert program.wait(30) == 130, program.output
        assert "Traceback" not in program.output
    assert not [pid for pid in pids if is_alive(pid)]
    stopped = summary(tmp_path)
    assert "SIGINT" in str(stopped["stopped"])
    assert checkpoints(tmp_path / "checkpoints")
    events = json.loads(trace.read_text())["traceEvents"]
    assert {"sampling", "gather", "training", "update", "collection"} <= {e["name"] for e in events if e["ph"] == "X"}
    threads = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert threads == {"Host Runtime", "training loop", "Actor 0"}

    code, output = run(programs[2], "--resume", "--timesteps", str(stopped["env_steps"] + 500), "--plot", *arguments)
    assert code == 0, output
    assert (tmp_path / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    assert f"at step {stopped['env_steps']:,}" in output
    resumed = summary(tmp_path)
    assert resumed["env_steps"] >= stopped["env_steps"] + 500
    assert resumed["gradient_steps"] > stopped["gradient_steps"]
    assert resumed["episodes"] > stopped["episodes"]


def test_a_signal_to_the_whole_group_ends_the_run_in_good_order(tmp_path: Path, quick_profiles: None) -> None:
    # What is under way takes its time: meanwhile the actors, which the signal ended, are no accident.
    program = make_program(tmp_path, trainer=Sluggish, settings={"pause_s": 0.0}, actors=3)
    edit(program, '"pause_s": 0.0', '"pause_s": 0.5')
    results = tmp_path / "results"
    with running(program, "--timesteps", "500000", "--eval-episodes", "0", "--run-dir", str(results)) as started:
        started.until(lambda: has_episodes(results))
        os.killpg(started.process.pid, signal.SIGTERM)
        assert started.wait(30) == 143, started.output
        assert "SIGTERM received" in started.output
        for wrong in ("died", "Error", "Traceback"):
            assert wrong not in started.output
    assert "SIGTERM" in summary(results)["stopped"]
    assert summary(results)["actor_restarts"] == 0
    assert checkpoints(results / "checkpoints")
    assert (results / "weights.safetensors").stat().st_size > 0


def test_ctrl_c_in_the_final_evaluation_keeps_what_was_trained(tmp_path: Path, quick_profiles: None) -> None:
    program = make_program(tmp_path, env="Counting-v0", env_kwargs={"pause_s": 0.001})
    results = tmp_path / "results"
    arguments = ("--timesteps", "400", "--eval-interval", "100000", "--eval-episodes", "20000", "--plot")
    with running(program, *arguments, "--run-dir", str(results)) as started:
        started.until((results / "summary.json").exists)  # written before the evaluation
        started.interrupt()
        assert started.wait(30) == 130, started.output
        assert "SIGINT received: what is left of the run is skipped" in started.output
        assert "Traceback" not in started.output
        assert "learning_curve.png" in started.output
    assert summary(results)["stopped"] == "all steps done"
    assert summary(results)["last"] == {"step": summary(results)["env_steps"]}
    assert summary(results)["best"] is None
    assert (results / "weights.safetensors").stat().st_size > 0
    assert (results / "learning_curve.png").read_bytes().startswith(b"\x89PNG")


def test_a_learning_curve_that_matplotlib_cannot_draw_does_not_fail_the_run(
    programs: dict[int, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MPLBACKEND", "no_backend")  # a notebook sets a name like this for what it starts
    code, output = run(
        programs[1], "--timesteps", "200", "--eval-episodes", "0", "--plot", "--run-dir", str(tmp_path / "results")
    )
    assert code == 0, output
    assert re.search(r"Learning curve: none: ValueError: Key backend: .no_backend.", output)
    assert "Logs:" in output


def test_ctrl_c_while_actors_start_is_quiet(programs: dict[int, Path], tmp_path: Path) -> None:
    with running(programs[1], "--timesteps", "500000", "--run-dir", str(tmp_path)) as program:
        pids = program.until(program.actor_pids)
        program.interrupt()
        assert program.wait(30) == 130, program.output
        assert "Traceback" not in program.output
        deadline = time.monotonic() + 10.0  # an interpreter that has just begun notices the end a little later
        while any(is_alive(pid) for pid in pids):
            assert time.monotonic() < deadline, pids
            time.sleep(0.01)


def test_checkpoints_beside_other_files_are_moved_alone(programs: dict[int, Path], tmp_path: Path) -> None:
    # The checkpoints' folder is the run's, and the one that the user stands in.
    program = Path(shutil.copy(programs[2], tmp_path))
    arguments = ("--serial", "--timesteps", "300", "--eval-episodes", "0", "--run-dir", ".", "--checkpoint-dir", ".")
    (tmp_path / "notes.txt").write_text("mine")
    assert run(program, *arguments)[0] == 0
    written = [path.name for path in checkpoints(tmp_path)]
    assert written
    code, output = run(program, *arguments)
    assert code == 0, output
    earlier = tmp_path / "earlier-001"
    assert sorted(path.name for path in earlier.iterdir()) == written
    assert f"moved to {earlier}" in output
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_resume_refuses_a_corrupt_checkpoint_and_that_of_another_program(
    programs: dict[int, Path], tmp_path: Path, quick_profiles: None
) -> None:
    common = ("--serial", "--timesteps", "300", "--eval-episodes", "0")
    arguments = (*common, "--run-dir", str(tmp_path / "cartpole"))
    saved = tmp_path / "cartpole" / "checkpoints"
    assert run(programs[2], *arguments)[0] == 0
    other = make_program(tmp_path, env="Counting-v0")
    foreign = ("--run-dir", str(tmp_path / "counting"), "--checkpoint-dir", str(saved))
    code, output = run(other, "--resume", *common, *foreign)
    assert code == 1
    assert "CartPole-v1" in output
    assert "Counting-v0" in output
    assert "Traceback" not in output

    for folder in checkpoints(saved):
        largest = max((f for f in folder.rglob("*") if f.is_file()), key=lambda f: f.stat().st_size)
        data = bytearray(largest.read_bytes())
        data[len(data) // 2] ^= 0xFF
        largest.write_bytes(bytes(data))
    code, output = run(programs[2], "--resume", *arguments)
    assert code == 1
    assert "Error:" in output
    assert "Traceback" not in output
    assert largest.name in output


# --- what goes wrong ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def slow_program(tmp_path_factory: pytest.TempPathFactory, quick_profiles: None) -> Path:
    """Two actors whose environments take their time, so that a run lasts until it is disturbed."""
    folder = tmp_path_factory.mktemp("slow")
    return make_program(folder, setting=1, env="Counting-v0", env_kwargs={"pause_s": 0.001}, actors=2)


def test_a_killed_actor_is_restarted(slow_program: Path, tmp_path: Path) -> None:
    with running(slow_program, "--timesteps", "6000", "--eval-episodes", "0", "--run-dir", str(tmp_path)) as program:
        program.until(lambda: has_episodes(tmp_path))
        os.kill(program.actor_pids()[0], signal.SIGKILL)
        assert program.wait() == 0, program.output
        assert "SIGKILL" in program.output
        assert "restarted" in program.output
    assert summary(tmp_path)["actor_restarts"] == 1
    assert summary(tmp_path)["env_steps"] >= 6000


def test_three_deaths_within_a_minute_stop_the_run(slow_program: Path, tmp_path: Path) -> None:
    killed: set[int] = set()
    with running(slow_program, "--timesteps", "500000", "--run-dir", str(tmp_path)) as program:
        program.until(lambda: has_episodes(tmp_path))
        while len(killed) < 3:
            victim = program.until(lambda: [pid for pid in program.actor_pids() if pid not in killed])[0]
            os.kill(victim, signal.SIGKILL)
            killed.add(victim)
        assert program.wait(60) == 1, program.output
        assert "Error: Actors died 3 times" in program.output
        assert "SIGKILL" in program.output
        assert "Traceback" not in program.output
        assert not program.actor_pids()
    assert checkpoints(tmp_path / "checkpoints")


@pytest.mark.parametrize("stage", ["starting", "training"])
def test_actors_do_not_outlive_a_killed_program(slow_program: Path, tmp_path: Path, stage: str) -> None:
    with running(slow_program, "--timesteps", "500000", "--run-dir", str(tmp_path)) as program:
        if stage == "training":
            program.until(lambda: has_episodes(tmp_path))
        pids = program.until(lambda: program.actor_pids() if len(program.actor_pids()) == 2 else [])
        program.process.kill()
        program.process.wait()
        wait_until_gone(pids, 20.0)  # starting actors first import torch


def wait_until_gone(pids: list[int], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while any(map(is_alive, pids)):
        assert time.monotonic() < deadline, f"{[pid for pid in pids if is_alive(pid)]} live on"
        time.sleep(0.05)


@pytest.mark.parametrize("mode", ["serial", "parallel"])
def test_an_environment_that_raises_is_shown(tmp_path: Path, quick_profiles: None, mode: str) -> None:
    program = make_program(tmp_path, env="Breaking-v0", env_kwargs={"steps": 1_000_000})
    edit(program, '"steps": 1000000', '"steps": 200')
    arguments = ("--timesteps", "50000", "--run-dir", str(tmp_path / "run"), *(("--serial",) * (mode == "serial")))
    code, output = run(program, *arguments)
    assert code == 1
    assert "Error:" in output
    assert "RuntimeError: the gearbox of this environment fell off" in output
    assert "in _break_down" in output  # the environment's own traceback
    assert checkpoints(tmp_path / "run" / "checkpoints")


@pytest.mark.parametrize("mode", ["serial", "parallel"])
def test_an_environment_that_returns_nan_is_named_in_a_line(tmp_path: Path, quick_profiles: None, mode: str) -> None:
    program = make_program(tmp_path, env="Vanishing-v0", env_kwargs={"steps": 1_000_000})
    edit(program, '"steps": 1000000', '"steps": 195')
    arguments = ("--timesteps", "50000", "--run-dir", str(tmp_path / "run"), *(("--serial",) * (mode == "serial")))
    code, output = run(program, *arguments)
    assert code == 1, output
    assert "Traceback" not in output
    named = "Vanishing-v0 returned an observation that is NaN or infinite, in environment 0 of actor 0: [nan nan nan]."
    (error,) = [line for line in output.splitlines() if line.startswith("Error: ")]
    assert named in error
    assert "can be resumed with --resume" in error
    if mode == "parallel":
        assert output.count(f"actor-0 died (exit code 1) and is restarted. {named}") == 2
    assert checkpoints(tmp_path / "run" / "checkpoints")


@pytest.mark.parametrize("stage", ["on the way", "at the end"])
def test_an_evaluation_that_fails_is_shown(tmp_path: Path, quick_profiles: None, stage: str) -> None:
    program = make_program(tmp_path, env="BreakingInHost-v0", env_kwargs={"steps": 1_000_000})
    edit(program, '"steps": 1000000', '"steps": 5')
    results = tmp_path / "results"
    interval = "500" if stage == "on the way" else "100000"
    arguments = ("--timesteps", "1000", "--checkpoint-interval", "100000", "--eval-interval", interval)
    code, output = run(program, *arguments, "--eval-episodes", "3", "--run-dir", str(results))
    assert code == 1
    assert "Error: The environment BreakingInHost-v0 or the policy failed in the evaluation." in output
    assert "RuntimeError: the gearbox of this environment fell off" in output
    assert "in _break_down" in output  # the environment's own traceback
    assert "run_program" not in output, "the program's own"
    assert len(checkpoints(results / "checkpoints")) == 1
    assert (results / "weights.safetensors").exists() == (stage == "at the end")


@SETTINGS
def test_a_step_that_diverges_stops_the_run_and_leaves_its_batch(
    programs: dict[int, Path], tmp_path: Path, setting: int
) -> None:
    program = tmp_path / "diverging.py"
    shutil.copy(programs[setting], program)
    edit(program, "\n\n\ndef main() -> int:", '\nSETTINGS["learning_rate"] = 1e30\n\n\ndef main() -> int:')
    code, output = run(program, "--run-dir", str(tmp_path / "run"))
    assert code == 1
    assert "diverged" in output
    assert "Traceback" not in output
    batch = np.load(tmp_path / "run" / "failed_batch.npz")
    assert set(batch) >= {"indices", "weights", "obs", "action", "reward", "next_obs", "discount"}
    assert len(batch["indices"]) == len(batch["obs"]) > 0
    assert np.isfinite(batch["obs"]).all()


def test_a_failed_bench_reports_no_rates(tmp_path: Path, quick_profiles: None) -> None:
    program = make_program(tmp_path, env="Breaking-v0", env_kwargs={"steps": 1_000_000})
    edit(program, '"steps": 1000000', '"steps": 10')
    measuring = ("--bench", "--bench-paced", "--serial", "--bench-seconds", "30")
    code, output = run(program, *measuring, "--run-dir", str(tmp_path / "run"))
    assert code == 1
    assert "RuntimeError: the gearbox of this environment fell off" in output
    assert not (tmp_path / "run" / "bench.json").exists()


def test_unwritable_run_folder_is_refused(programs: dict[int, Path], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, output = run(programs[2], "--run-dir", str(tmp_path / "file" / "run"))
    assert code == 1
    assert str(tmp_path / "file" / "run") in output
    assert "--run-dir" in output
    assert "Traceback" not in output


def test_wrong_options_are_refused(programs: dict[int, Path]) -> None:
    code, output = run(programs[2], "--timesteps", "-5")  # the others are in test_options
    assert code == 2
    assert "--timesteps" in output
    assert "'-5'" in output
