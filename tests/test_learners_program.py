"""Programs with several Learners: what is composed, how they run, and what happens when a Learner or the host ends."""

from __future__ import annotations

import contextlib
import csv
import functools
import json
import os
import re
import signal
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from programs import ONE_CPU, described, is_alive, make_program, run, running, write_csv_pair
from trainers import TinyDQN, TinyPPO

from composer import Composer
from composer.learners import ON_HOST_ONLY
from composer.spec_file import load_spec
from pearl.algorithms import DQN, SAC, RecurrentDQN
from pearl.algorithms.trainer import transition_of
from pearl.backends.cpu.learner import NativeLearner
from pearl.errors import CheckpointError, CheckpointReadError, CheckpointWriteError, ConfigurationError, PearlError
from pearl.exploration import EpsilonGreedy
from pearl.ipc.queues import Bell
from pearl.local_sgd.averaging import AveragingSpec
from pearl.local_sgd.local_learner import LearnerProgress, LearnerSetup, LocalLearner
from pearl.replay.schedules import Linear
from pearl.runtime.learner_processes import LearnerProcesses, LearnersExperience
from pearl.runtime.learners_session import LearnersSession
from pearl.runtime.options import parse_options
from pearl.runtime.reporting import Program
from pearl.spec import ActorSpec, LearnersSpec, ReplaySpec, TrainSpec, TransitionSpec

TINY = {"hidden_sizes": (16,), "n_step": 1, "exploration": EpsilonGreedy(steps=1000)}
TRAINING = {"batch_size": 16, "replay_ratio": 2.0, "learning_starts": 100}
QUIET = ("--eval-episodes", "0", "--plain")
TWO = {"count": 2, "average_every": 4}


class Prioritizing(DQN):
    """Its Actors give transitions their first priorities."""

    @classmethod
    def transition(cls, observation_space: gym.Space[Any], action_space: gym.Space[Any]) -> TransitionSpec:
        return super().transition(observation_space, action_space).with_priority(first_priorities)


def first_priorities(columns: Mapping[str, np.ndarray], policy: Any) -> np.ndarray:
    return np.ones(len(columns["reward"]), np.float32)


def learners_program(folder: Path, **problem: Any) -> Path:
    problem = {"trainer": DQN, "settings": TINY, "training": TRAINING, "learners": TWO, **problem}
    return make_program(folder, name="learners", **problem)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory, quick_profiles: None) -> Path:
    return learners_program(tmp_path_factory.mktemp("programs"))


@pytest.fixture(scope="module")
def overlapped(program: Path) -> Path:
    """The same with overlap."""
    changed = program.with_name("overlapped.py")
    changed.write_text(program.read_text().replace("overlap=0", "overlap=2"))
    return changed


def summary(run_dir: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
    return found


def gradient_steps(run_dir: Path) -> float:
    """Gradient steps in the newest row of the progress; 0 before the first."""
    progress = run_dir / "progress.csv"
    with contextlib.suppress(OSError, KeyError, ValueError, TypeError), progress.open() as file:
        return max((float(row["gradient_steps"]) for row in csv.DictReader(file)), default=0.0)
    return 0.0


def has_trained(run_dir: Path) -> bool:
    """Learners have averaged: their steps are counted."""
    return gradient_steps(run_dir) > 0


def learner_pids(run_dir: Path) -> list[int]:
    """The processes of the Learners that were started, in the order of their start."""
    log = (run_dir / "run.log").read_text() if (run_dir / "run.log").exists() else ""
    return [int(pid) for pid in re.findall(r"learner-\d is process (\d+)\.", log)]


# --- composing ------------------------------------------------------------------------------------------------------


def test_one_learner_is_the_program_without_the_setting(tmp_path: Path, quick_profiles: None) -> None:
    files = write_csv_pair(tmp_path, ONE_CPU)
    texts = []
    for learners in (None, {"count": 1}, {"count": 1, "average_every": 64, "moments": "reset"}):
        composer = described(files, trainer=DQN, settings=TINY, training=TRAINING, learners=learners)
        composer.run()
        texts.append(composer.runtime_gen(path=tmp_path / "program.py", timesteps=1100).read_text())
    assert texts[0] == texts[1] == texts[2]
    assert "LEARNERS" not in texts[0]


def test_the_placement_shows_each_learner_and_the_share_of_an_average(tmp_path: Path, quick_profiles: None) -> None:
    files = write_csv_pair(tmp_path, (*ONE_CPU, "cpu1,cpu,cpu,,2,60"), ["cpu0,cpu1,1,10"])
    found = {}
    for every in (1, 4):
        composer = described(
            files, trainer=DQN, settings=TINY, training=TRAINING, learners={"count": 2, "average_every": every}
        )
        composer.run()
        found[every] = composer.placement
    placement = found[4]
    assert (placement.learner_count, placement.average_every, len(placement.learners)) == (2, 4, 2)
    assert placement.terms.average_us > 0
    assert found[1].terms.waiting_us >= 0 <= placement.terms.waiting_us
    assert placement.learners_choice is None
    assert found[1].terms.average_us == pytest.approx(4 * placement.terms.average_us), "the same measurement"
    assert "averaging" in placement.terms.stages()[0]
    assert placement.eps == pytest.approx(16 / placement.t_itr_us * 1e6), "an iteration trains on the whole batch"
    assert "2 x native, batch 8 each" in str(placement)
    assert "averaged every 4" in str(placement)
    assert {(c.replay.device, c.learner.device) for c in placement.candidates} == {("cpu0", "cpu0")}
    assert {pair.reason for pair in placement.impossible} == {ON_HOST_ONLY}
    assert type(placement).from_json(placement.to_json()) == placement


def test_a_composition_file_and_its_overrides_set_the_learners(tmp_path: Path) -> None:
    file = tmp_path / "spec.toml"
    file.write_text(
        '[actors]\nenv = "CartPole-v1"\n[trainer]\nclass = "DQN"\n[replay]\nsize = 2000\n'
        '[learners]\ncount = 4\naverage_every = 32\nmoments = "average"\noverlap = 16\n'
    )
    composer, _ = load_spec(file, progress=False, overrides={"learners.count": 3})
    with pytest.raises(PearlError, match=r"3 Learners .*batch of 64 cannot be divided among 3"):
        composer.check()
    with pytest.raises(ConfigurationError, match=r"spec\.toml, \[learners\]: average_every must be .* at least 1"):
        load_spec(file, progress=False, overrides={"learners.average_every": 0})
    with pytest.raises(
        ConfigurationError, match=r"\[learners\]: overlap must be at most average_every, 8, .* found 16"
    ):
        load_spec(file, progress=False, overrides={"learners.average_every": 8})
    with pytest.raises(ConfigurationError, match=r"\[learners\]: count .* whole number, or \"auto\"; found 'many'"):
        load_spec(file, progress=False, overrides={"learners.count": "many"})


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"count": 0}, "count of Learners must be a whole number of at least 1; found 0"),
        ({"count": True}, "found True"),
        ({"count": 2, "average_every": 0}, "average_every must be a whole number of at least 1; found 0"),
        ({"count": 2, "overlap": -1}, "overlap must be a whole number of at least 0; found -1"),
        ({"count": 2, "average_every": 4, "overlap": 5}, "overlap must be at most average_every, 4, since"),
        ({"count": 2, "moments": "forget"}, "moments must be one of 'keep', 'average', 'reset'; found 'forget'"),
    ],
)
def test_bad_values_are_refused_at_once(values: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(named)):
        Composer(progress=False).set_learners(**values)


def composer_of(trainer: type = DQN, **replay: Any) -> Composer:
    composer = Composer(progress=False)
    composer.set_actors(1, "CartPole-v1", envs_per_actor=4)
    composer.set_train_function(trainer)
    if trainer is not TinyPPO:
        composer.set_replay(**{"size": 2000, **replay})
    composer.set_learners(2)
    return composer


@pytest.mark.parametrize(
    ("composer", "training", "named"),
    [
        (lambda: composer_of(), {"batch_size": 15}, "batch of 15 cannot be divided among 2 banks. Set batch_size to"),
        (lambda: composer_of(), {"batch_size": 1}, "use fewer banks"),
        (lambda: composer_of(size=2001), {}, "replay of 2001 slots cannot be divided among 2 banks. Set its size"),
        (lambda: composer_of(size=100), {"batch_size": 16}, "Raise the replay's size to"),
        (lambda: composer_of(alpha=Linear(0.6, 0.0, 100)), {}, "alpha of Learners' banks must be a number"),
        (lambda: composer_of(mode="fifo"), {}, "mode must be"),
        (lambda: composer_of(replacement=False), {}, "replacement must be True"),
        (lambda: composer_of(storage="shared"), {}, "leave out share_next_obs, share_frames and storage"),
        (lambda: composer_of(share_next_obs=True), {}, "leave out share_next_obs, share_frames and storage"),
        (lambda: composer_of(Prioritizing), {}, "Use one Learner, or an algorithm without first priorities"),
        (lambda: composer_of(RecurrentDQN), {}, "trains on sequences, which banks do not hold"),
        (lambda: composer_of(TinyPPO), {}, "TinyPPO learns from rollouts, and only algorithms with a replay"),
        (lambda: composer_of(), {"insertion_rows": "auto"}, 'insertion_rows cannot be "auto"'),
        (lambda: composer_of(), {"replay_ratio": "auto"}, 'replay_ratio cannot be "auto"'),
    ],
)
def test_what_several_learners_cannot_do_is_refused_by_name(
    composer: Any, training: dict[str, Any], named: str
) -> None:
    made = composer()
    made.set_training(**training)
    with pytest.raises(PearlError, match=re.escape(named)):
        made.check()


def test_a_learner_of_another_device_is_refused(tmp_path: Path) -> None:
    composer = composer_of()
    composer.set_train_function(DQN, implementation="fpga")
    files = write_csv_pair(tmp_path, ONE_CPU)
    composer.set_device_file(files[0])
    composer.set_connection_file(files[1])
    with pytest.raises(ConfigurationError, match=f"{ON_HOST_ONLY}; the fpga Learner runs on"):
        composer.run()


# --- running --------------------------------------------------------------------------------------------------------


def test_a_program_runs_and_leaves_its_results(program: Path, tmp_path: Path) -> None:
    arguments = ("--timesteps", "3000", "--eval-episodes", "2", "--run-dir", str(tmp_path), "--plain")
    code, output = run(program, *arguments)
    assert code == 0, output
    found = summary(tmp_path)
    assert found["env_steps"] >= 3000
    assert found["replay_ratio"] == pytest.approx(2.0, rel=0.25)
    learners = found["learners"]
    assert (learners["count"], learners["average_every"], learners["replaced"]) == (2, 4, 0)
    assert learners["averages"] >= found["gradient_steps"] / 4 - 1
    # A step of the run is one of each Learner, on its half of the batch.
    assert found["gradient_steps"] == sum(learners["gradient_steps"]) // 2 > 100
    assert sum(learners["transitions"]) == found["env_steps"]
    assert min(learners["transitions"]) > 0.3 * found["env_steps"]
    assert found["last"]["episodes"] == found["best"]["episodes"] == 2
    assert re.search(r"EPS while a batch was under way at a replay ratio of 2", output)
    assert not list(tmp_path.glob(".learners*")), "states on the way are removed"
    assert not [pid for pid in learner_pids(tmp_path) if is_alive(pid)]


@pytest.mark.parametrize("option", ["--serial", "--bench", "--recompose"])
def test_options_of_one_learner_are_refused(tmp_path: Path, option: str) -> None:
    options = parse_options("", timesteps=1000, run_dir=tmp_path, arguments=[option])
    with pytest.raises(ConfigurationError, match=f"{option} is for programs of one Learner; this one has 2"):
        LearnersSession(
            Program("two", 0.0),
            options,
            trainer_class=DQN,
            settings={},
            actors=ActorSpec("CartPole-v1"),
            replay=ReplaySpec(2000),
            train=TrainSpec(),
            learners=LearnersSpec(2),
        )


def test_a_killed_learner_is_replaced_and_the_run_goes_on(overlapped: Path, tmp_path: Path) -> None:
    with running(overlapped, "--timesteps", "5000000", *QUIET, "--run-dir", str(tmp_path)) as started:
        started.until(lambda: has_trained(tmp_path))
        os.kill(learner_pids(tmp_path)[1], signal.SIGKILL)
        started.until(lambda: len(learner_pids(tmp_path)) == 3)
        steps = gradient_steps(tmp_path)
        started.until(lambda: gradient_steps(tmp_path) > 2 * steps)
        started.interrupt()
        assert started.wait(60) == 130, started.output
        assert "learner-1 died (signal SIGKILL) and is replaced" in started.output
    found = summary(tmp_path)
    assert (found["learners"]["replaced"], found["learners"]["overlap"]) == (1, 2)
    assert found["gradient_steps"] == sum(found["learners"]["gradient_steps"]) // 2, "those of the dead one count"


def test_the_td_error_stays_while_all_learners_are_new() -> None:
    found = [LearnerProgress(steps=4), LearnerProgress(steps=4)]
    session = MagicMock(learners_spec=LearnersSpec(2), _steps=0, _busy_s=0.0)
    session.report.td_error = 0.5
    LearnersSession._count_steps(session, MagicMock(**{"progress.return_value": found}))
    assert session.report.td_error == 0.5
    found[1] = LearnerProgress(steps=8, td_error=0.25)
    LearnersSession._count_steps(session, MagicMock(**{"progress.return_value": found}))
    assert session.report.td_error == 0.25


def test_ctrl_c_while_the_learners_start_ends_the_run(program: Path, tmp_path: Path) -> None:
    with running(program, *QUIET, "--run-dir", str(tmp_path)) as started:
        started.until(lambda: len(learner_pids(tmp_path)) == 2)
        started.interrupt()
        assert started.wait(60) == 130, started.output
        assert "Traceback" not in started.output
    assert not [pid for pid in learner_pids(tmp_path) if is_alive(pid)]


def stored(run_dir: Path) -> dict[str, Any]:
    """What the newest checkpoint says of the run and its Learners."""
    newest = sorted((run_dir / "checkpoints").glob("checkpoint-*"))[-1]
    found: dict[str, Any] = json.loads((newest / "manifest.json").read_text())
    return found


def test_ctrl_c_saves_the_banks_and_resume_goes_on(program: Path, tmp_path: Path) -> None:
    with running(program, "--timesteps", "500000", *QUIET, "--run-dir", str(tmp_path)) as started:
        started.until(lambda: has_trained(tmp_path))
        started.interrupt()
        assert started.wait(60) == 130, started.output
        assert "Traceback" not in started.output
    assert not [pid for pid in learner_pids(tmp_path) if is_alive(pid)]
    counters, files = stored(tmp_path)["counters"], stored(tmp_path)["files"]
    rows = [counters[f"learner-{rank}/storage/inserted"] for rank in range(2)]
    assert sum(rows) == counters["stored"] == counters["env_steps"]
    assert {"arrays/learner-1/storage/obs.npy", "arrays/learner-0/trainer/optimizer.npy"} <= set(files)

    stopped = summary(tmp_path)
    code, output = run(
        program, "--resume", "--timesteps", str(counters["env_steps"] + 800), *QUIET, "--run-dir", str(tmp_path)
    )
    assert code == 0, output
    assert f"at step {counters['env_steps']:,}" in output
    resumed = stored(tmp_path)["counters"]
    assert resumed["gradient_steps"] > stopped["gradient_steps"] > 0
    assert all(resumed[f"learner-{rank}/storage/inserted"] > rows[rank] for rank in range(2))
    steps = [resumed[f"learner-{rank}/steps"] for rank in range(2)]
    assert resumed["gradient_steps"] == pytest.approx(sum(steps) / 2, abs=1)

    other = program.with_name("other.py")
    other.write_text(program.read_text().replace("count=2,\n    average_every", "count=4,\n    average_every"))
    code, output = run(other, "--resume", *QUIET, "--run-dir", str(tmp_path))
    assert code == 1
    assert "learners: this program has 4, each with a bank; the checkpoint has 2, each with a bank" in output


def test_learners_that_cannot_write_their_banks_cost_these_only(program: Path, tmp_path: Path) -> None:
    (tmp_path / ".learners").touch()  # no folder can be made there, as on a full disk
    code, output = run(program, *QUIET, "--run-dir", str(tmp_path))
    assert code == 0, output
    assert "has the newest average, and without Learner 0, 1" in output
    assert (tmp_path / "weights.safetensors").exists()
    found = stored(tmp_path)
    assert found["counters"]["gradient_steps"] > 0
    assert not [name for name in found["counters"] if name.startswith("learner-")]


@pytest.mark.slow
def test_a_killed_program_resumes_from_a_checkpoint_of_the_running_learners(overlapped: Path, tmp_path: Path) -> None:
    program = overlapped
    arguments = (*QUIET, "--run-dir", str(tmp_path))
    with running(program, "--timesteps", "500000", "--checkpoint-interval", "700", *arguments) as started:
        started.until(lambda: len(list((tmp_path / "checkpoints").glob("checkpoint-*"))) == 2)
        pids = learner_pids(tmp_path)
        started.process.kill()
        started.process.wait()
    saved = stored(tmp_path)["counters"]
    assert sum(saved[f"learner-{rank}/storage/inserted"] for rank in range(2)) == saved["stored"]
    code, output = run(program, "--resume", "--timesteps", str(saved["env_steps"] + 500), *arguments)
    assert code == 0, output
    assert not [pid for pid in pids if is_alive(pid)]
    assert stored(tmp_path)["counters"]["gradient_steps"] > saved["gradient_steps"] > 0


def saved_experience(folder: Path) -> tuple[LearnersExperience, dict[str, Any], dict[str, Any]]:
    """What two Learners train on, and what a checkpoint of it holds, in which the second had just died."""
    space = spaces.Box(-1.0, 1.0, (4,), np.float32), spaces.Discrete(2)
    setup = LearnerSetup(
        AveragingSpec(2), functools.partial(DQN, *space), NativeLearner, transition_of(DQN, *space), ReplaySpec(100), 16
    )
    local = LocalLearner(setup, 0, lambda layout: None)  # type: ignore[arg-type,return-value]
    local.insert({field.name: np.zeros((7, *field.shape), field.dtype) for field in setup.transition.fields}, 7, 0.4)
    arrays, scalars = local.state()
    processes = LearnerProcesses(
        setup,
        setup.make_trainer(),
        bell=Bell(),
        message_rows=8,
        run_dir=folder,
        threads=1,
        ended=lambda: None,
        interrupted=lambda: False,
    )
    return (
        LearnersExperience(processes, lambda: 0.4),
        {f"learner-0/{name}": array for name, array in arrays.items()},
        {f"learner-0/{name}": value for name, value in scalars.items()},
    )


def test_a_checkpoint_says_what_each_learner_had(tmp_path: Path) -> None:
    experience, arrays, scalars = saved_experience(tmp_path)
    experience.check(arrays, scalars, tmp_path)
    assert all(experience.knows("arrays", name) for name in arrays)
    assert all(experience.knows("counters", name) for name in scalars)
    for kind, name in (
        ("arrays", "learner-2/storage/obs"),
        ("arrays", "learner-0/other"),
        ("counters", "learner-0/secret"),
        ("counters", "env_steps"),
    ):
        assert not experience.knows(kind, name)
    experience.load(arrays, scalars, tmp_path)
    assert [path.name for path in (tmp_path / ".learners" / "initial").iterdir()] == ["0"], "the other begins anew"


def test_a_state_that_cannot_be_read_now_is_saved_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(folder: Path) -> None:
        raise CheckpointReadError("arrays/obs.npy cannot be read (Too many open files).")

    experience, _, _ = saved_experience(tmp_path)
    processes = experience._learners
    group = SimpleNamespace(progress=[LearnerProgress()] * 2, save=lambda: tmp_path, kill=lambda: None)
    monkeypatch.setattr(processes, "_group", group)
    monkeypatch.setattr("pearl.runtime.learner_processes.read_state", fail)
    with pytest.raises(CheckpointWriteError, match="cannot be read"):
        experience.state()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"learner-0/inserted": 8}, "learner-0/inserted"),
        ({"learner-0/steps": -1}, "learner-0/steps"),
        ({"learner-0/storage/size": 6}, "7, 4"),
        ({"learner-0/storage/inserted": "seven"}, "storage/inserted"),
    ],
)
def test_contradictory_states_of_learners_are_refused(tmp_path: Path, change: dict[str, Any], named: str) -> None:
    experience, arrays, scalars = saved_experience(tmp_path)
    with pytest.raises(CheckpointError, match=re.escape(named)):
        experience.check(arrays, {**scalars, **change}, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["native", "torch"])
def test_an_actor_critic_trains_with_schedules_and_normalised_observations(
    tmp_path: Path, quick_profiles: None, implementation: str
) -> None:
    settings = {"hidden_sizes": (16, 16), "normalize_observations": True, "learning_rate_schedule": "linear"}
    program = learners_program(
        tmp_path,
        trainer=SAC,
        settings={**settings, "implementation": implementation},
        env="Pendulum-v1",
        mode="uniform",
        learners={"count": 2, "average_every": 8, "moments": "average", "overlap": 8},
    )
    arguments = ("--timesteps", "1500", "--eval-episodes", "1", "--plain", "--run-dir", str(tmp_path / "run"))
    code, output = run(program, *arguments)
    assert code == 0, output
    assert summary(tmp_path / "run")["gradient_steps"] > 100


@pytest.mark.slow
def test_forbidden_actions_stay_forbidden(tmp_path: Path, quick_profiles: None) -> None:
    program = learners_program(tmp_path, trainer=TinyDQN, settings={"action_masks": True}, env="Gated-v0")
    code, output = run(program, "--timesteps", "1500", *QUIET, "--run-dir", str(tmp_path / "run"))
    assert code == 0, output
    assert summary(tmp_path / "run")["gradient_steps"] > 50


@pytest.mark.slow
def test_two_learners_learn_to_balance(tmp_path: Path, quick_profiles: None) -> None:
    program = learners_program(
        tmp_path,
        settings={"hidden_sizes": (64, 64)},
        capacity=20_000,
        training={"batch_size": 64, "replay_ratio": 16.0, "learning_starts": 1000},
        learners={"count": 2, "average_every": 8},
        timesteps=40_000,
    )
    arguments = ("--until-return", "200", "--plain", "--run-dir", str(tmp_path / "run"))
    code, output = run(program, *arguments)
    assert code == 0, output
    assert summary(tmp_path / "run")["best"]["mean"] >= 150, output
