"""Short evaluations in a process of their own, while training goes on."""

from __future__ import annotations

import csv
import os
import signal
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from programs import Running, make_program, run, running, summary
from trainers import TinyDQN, TinyPPO

from pearl.actors.actor import ActorSetup
from pearl.actors.policy_plan import read_policy
from pearl.algorithms.trainer import Trainer, make_trainer
from pearl.errors import EnvError
from pearl.runtime.evaluation import Evaluation, EvaluationEnvs, evaluate
from pearl.runtime.evaluation_process import EvaluationProcess, EvaluationProcessError, idle_cores
from pearl.runtime.options import parse_options
from pearl.runtime.outcome import Evaluator
from pearl.runtime.run_state import Counters
from pearl.spec import ActorSpec, TrainSpec


def trainer_of(env: str, trainer_class: type, settings: dict[str, Any], seed: int = 0) -> Trainer:
    made = gym.make(env)
    trainer = make_trainer(trainer_class, made.observation_space, made.action_space, seed=seed, settings=settings)
    made.close()
    assert isinstance(trainer, Trainer)
    return trainer


def setup_of(trainer: Trainer, spec: ActorSpec) -> ActorSetup:
    return ActorSetup(type(trainer), {}, spec, TrainSpec(), 0, policy=read_policy(trainer))


@contextmanager
def beside(trainer: Trainer, spec: ActorSpec) -> Iterator[EvaluationProcess]:
    with closing(EvaluationProcess(setup_of(trainer, spec), trainer, EvaluationEnvs(spec))) as process:
        yield process


def answer(process: EvaluationProcess) -> Evaluation:
    deadline = time.monotonic() + 60
    while (found := process.answer(0.1)) is None:
        assert time.monotonic() < deadline
    return found


def progress(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return [row for row in csv.DictReader(file) if row["kind"] == "progress"]


@pytest.mark.parametrize(
    ("env", "trainer_class", "settings"),
    [
        ("CartPole-v1", TinyDQN, {}),
        ("CartPole-v1", TinyDQN, {"normalize_observations": True}),
        ("CartPole-v1", TinyPPO, {"normalize_observations": True}),
        ("Gated-v0", TinyDQN, {"action_masks": True}),
    ],
    ids=["vectors", "statistics", "rollouts", "masks"],
)
def test_it_plays_as_the_program_would(env: str, trainer_class: type, settings: dict[str, Any]) -> None:
    """With the weights that it was given, whatever the trainer has become meanwhile."""
    spec, found, expected = ActorSpec(env), [], []
    first, second = (trainer_of(env, trainer_class, settings, seed) for seed in (1, 2))
    for trainer, shift in ((first, 0.5), (second, -1.0)):
        if (moments := trainer.observation_moments) is not None:
            moments.add(np.random.default_rng(0).normal(shift, 2.0, (50, *moments.mean.shape)))
    with beside(first, spec) as process:
        for trainer in (first, second):
            process.take(trainer)
            process.ask(5, 77)
            played = answer(process)
            found.append((played.returns.tolist(), played.lengths.tolist()))
            here = evaluate(trainer, spec, 5, 77)
            assert here is not None
            expected.append((here.returns.tolist(), here.lengths.tolist()))
    assert found == expected


def test_weights_that_reach_the_goal_twice_are_kept_although_training_went_on() -> None:
    trainer = trainer_of("CartPole-v1", TinyDQN, {})
    spec, counters, recorded = ActorSpec("CartPole-v1"), Counters(env_steps=100, gradient_steps=10), []
    options = parse_options(
        None, timesteps=1000, run_dir=Path("unused"), arguments=["--eval-episodes", "3", "--until-return", "8"]
    )
    with beside(trainer, spec) as process:
        evaluator = Evaluator(
            trainer, spec, options, counters, lambda *found: recorded.append(found[:2]), process=process
        )
        evaluator.begin_progress()
        kept = {name: value.clone() for name, value in trainer.q.state_dict().items()}
        counters.env_steps, counters.gradient_steps = 900, 90
        for parameter in trainer.q.parameters():
            parameter.data.zero_()
        deadline = time.monotonic() + 60
        while (solved := evaluator.hear_progress(0.05)) is None:
            assert evaluator.is_pending
            assert time.monotonic() < deadline
    assert solved.mean >= 8  # no policy falls before 8 steps
    assert recorded == [("progress", 100), ("solved check", 100)]
    best = evaluator.best
    assert best is not None
    assert (best.env_steps, best.gradient_steps, best.episodes) == (100, 10, 3)
    for name, value in kept.items():
        np.testing.assert_array_equal(np.asarray(best.tensors["q"][name]), value.numpy())
    assert not evaluator.is_pending
    assert not evaluator.last_is_best


def test_an_environment_that_fails_there_is_named_with_its_traceback() -> None:
    trainer = trainer_of("Counting-v0", TinyDQN, {})
    with beside(trainer, ActorSpec("Breaking-v0", env_kwargs={"steps": 5})) as process:
        process.take(trainer)
        process.ask(2, 1)
        with pytest.raises(EnvError, match=r"(?s)Breaking-v0 or the policy failed.*the gearbox"):
            answer(process)


def test_a_killed_process_is_told_and_costs_only_its_evaluation() -> None:
    trainer = trainer_of("CartPole-v1", TinyDQN, {})
    with beside(trainer, ActorSpec("CartPole-v1")) as process:
        process.take(trainer)
        process.ask(100, 1)
        assert process._process is not None
        os.kill(process._process.pid, signal.SIGKILL)
        with pytest.raises(EvaluationProcessError, match="signal SIGKILL"):
            answer(process)
        with pytest.raises(EvaluationProcessError):
            process.ask(1, 1)


def test_a_process_that_hangs_is_ended() -> None:
    trainer = trainer_of("CartPole-v1", TinyDQN, {})
    with beside(trainer, ActorSpec("CartPole-v1")) as process:
        process.take(trainer)
        process.ask(2, 0)
        answer(process)
        assert process._process is not None
        os.kill(process._process.pid, signal.SIGSTOP)
        process._timeout_s = 0.5
        process.ask(2, 0)
        with pytest.raises(EvaluationProcessError, match=r"hung for \d s and was ended \(--actor-timeout\)"):
            answer(process)
        assert process._process.cause_of_death == "signal SIGKILL"


def evaluator_of(program: Running) -> int | None:
    """The process of the evaluations, which is the younger of the program's two children; None before it has begun."""
    found = program.actor_pids()
    return max(found) if len(found) == 2 else None


@pytest.mark.parametrize("setting", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_trains_on_meanwhile(tmp_path: Path, quick_profiles: None, setting: int) -> None:
    program = make_program(tmp_path, setting=setting, timesteps=6_000)
    options = ("--eval-beside", "--eval-interval", "500", "--eval-episodes", "20", "--until-return", "none")
    code, output = run(program, *options, "--run-dir", str(tmp_path / "run"))
    assert code == 0, output
    rows = progress(tmp_path / "run" / "evaluations.csv")
    assert len(rows) >= 2
    assert any(int(row["env_steps"]) > int(row["weights_step"]) for row in rows)
    found = summary(tmp_path / "run")
    assert found["best"]["selected_mean"] == max(float(row["mean_return"]) for row in rows)
    assert found["last"]["episodes"] == 20


def test_a_run_whose_evaluations_are_killed_goes_on_without_them(tmp_path: Path, quick_profiles: None) -> None:
    program = make_program(tmp_path, timesteps=30_000)
    options = ("--eval-beside", "--eval-interval", "200", "--eval-episodes", "5", "--until-return", "none", "--plain")
    with running(program, *options, "--run-dir", str(tmp_path / "run")) as started:
        os.kill(started.until(lambda: evaluator_of(started)), signal.SIGKILL)
        code = started.wait()
        output = started.output
    assert code == 0, output
    assert "The process of the evaluations died (signal SIGKILL)" in output
    rows = progress(tmp_path / "run" / "evaluations.csv")
    assert int(rows[-1]["weights_step"]) >= 29_000


def test_a_solved_environment_ends_the_run(tmp_path: Path, quick_profiles: None) -> None:
    program = make_program(tmp_path, timesteps=100_000)
    options = ("--eval-beside", "--eval-interval", "300", "--eval-episodes", "5", "--until-return", "8")
    code, output = run(program, *options, "--run-dir", str(tmp_path / "run"))
    assert code == 0, output
    found = summary(tmp_path / "run")
    assert found["stopped"].startswith("solved after")
    assert found["best"]["step"] <= found["last"]["step"] < 100_000


def test_interrupting_a_run_ends_its_evaluations(tmp_path: Path, quick_profiles: None) -> None:
    program = make_program(tmp_path, timesteps=10_000_000)
    options = ("--eval-beside", "--eval-interval", "200", "--eval-episodes", "100", "--until-return", "none")
    with running(program, *options, "--run-dir", str(tmp_path / "run")) as started:
        started.until(lambda: evaluator_of(started))
        started.interrupt()
        started.wait()
        assert started.actor_pids() == []
        assert "Checkpoint:" in started.output


def test_a_callback_may_read_the_weights_that_played(tmp_path: Path, quick_profiles: None) -> None:
    """So the training waits for evaluations."""
    program = make_program(tmp_path, timesteps=2_000)
    text = program.read_text().replace(
        "        train=TRAIN,\n", "        train=TRAIN,\n        callbacks=[KeepBest()],\n"
    )
    program.write_text(text.replace("\nPROGRAM = ", "\nfrom pearl.callbacks import KeepBest\nPROGRAM = ", 1))
    options = ("--eval-beside", "--eval-interval", "500", "--eval-episodes", "3", "--until-return", "none")
    code, output = run(program, *options, "--run-dir", str(tmp_path / "run"))
    assert code == 0, output
    assert "--eval-beside has no effect: a callback is told of evaluations" in output
    rows = progress(tmp_path / "run" / "evaluations.csv")
    assert len(rows) == 4
    assert all(row["env_steps"] == row["weights_step"] for row in rows)


@pytest.mark.parametrize("other", ["--serial", "--bench"])
def test_it_is_refused_where_it_has_no_use(other: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_options(None, timesteps=1, run_dir=Path("unused"), arguments=["--eval-beside", other])
    assert "--eval-beside has no use with" in capsys.readouterr().err


def test_idle_cores_are_those_that_the_process_may_use() -> None:
    assert idle_cores(0) == len(os.sched_getaffinity(0))
    assert idle_cores(float("inf")) < 0
