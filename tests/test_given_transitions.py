"""A run may start with the steps of a data set, or with the replay of another run."""

from __future__ import annotations

import dataclasses
import json
import math
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import make_program, run, running
from trainers import TinyDQN

from pearl.actors.actions import EnvironmentActions
from pearl.actors.n_step import NStepWindow
from pearl.algorithms import PPO
from pearl.errors import CheckpointError, ConfigurationError
from pearl.replay.frames import FrameStorage
from pearl.replay.native import NativeReplayManager
from pearl.replay.storage import DataStorage
from pearl.runtime.checkpoint import load_checkpoint
from pearl.runtime.data_flow import OffPolicy, OnPolicy
from pearl.runtime.data_storage import ChainedStorage
from pearl.runtime.experience import ReplayExperience
from pearl.runtime.given_transitions import Given, Steps, given_transitions, n_step_transitions
from pearl.runtime.learners_session import LearnersSession
from pearl.runtime.options import parse_options
from pearl.runtime.reporting import Program
from pearl.runtime.rollout_session import RolloutSession
from pearl.runtime.run_state import Counters, RunState
from pearl.runtime.session import Session
from pearl.spec import ActorSpec, Column, LearnersSpec, ReplaySpec, RolloutSpec, TrainSpec, TransitionSpec

OBS, CHOICES = spaces.Box(-1e6, 1e6, (2,), np.float32), spaces.Discrete(3, start=5)
TORQUE = spaces.Box(np.float32([-2, 0]), np.float32([2, 1]))
TRANSITION = TransitionSpec.from_spaces(OBS, CHOICES)


def columns_of(found: Given) -> dict[str, np.ndarray]:
    chunks = list(found.chunks)
    together = {name: np.concatenate([chunk[name] for chunk in chunks]) for name in chunks[0]}
    assert len(together["obs"]) == found.rows
    return together


def arrays(steps: int = 6, actions: spaces.Space[Any] = CHOICES) -> dict[str, np.ndarray]:
    """Two episodes: the first terminates after two steps, the second is cut after two more; then some of a third."""
    rng = np.random.default_rng(0)
    ends = np.zeros((2, steps), bool)
    ends[0, 1] = ends[1, 3] = True
    actions.seed(0)
    return {
        "observations": rng.normal(size=(steps, 2)),
        "actions": np.array([actions.sample() for _ in range(steps)]),
        "rewards": rng.normal(size=steps),
        "terminations": ends[0],
        "truncations": ends[1],
    }


def read(
    folder: Path, *, transition: TransitionSpec = TRANSITION, space: spaces.Space[Any] = CHOICES, **changed: Any
) -> Given:
    path = folder / "steps.npz"
    kept = {name: array for name, array in (arrays(actions=space) | changed).items() if array is not None}
    np.savez(path, **kept)
    return given_transitions(path, transition, space, 1, 0.9, 1000)


# --- steps ------------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    ends=st.lists(st.sampled_from(["", "", "", "terminated", "truncated", "both"]), min_size=1, max_size=20),
    n=st.integers(1, 4),
    known=st.booleans(),
)
def test_they_become_the_transitions_that_an_actor_makes_of_them(ends: list[str], n: int, known: bool) -> None:
    count = len(ends)
    rng = np.random.default_rng(count)
    terminated = np.array([end in ("terminated", "both") for end in ends])
    truncated = np.array([end in ("truncated", "both") for end in ends])
    obs = np.arange(2 * count, dtype=np.float32).reshape(count, 2)
    after = obs + 0.5
    for t in range(count - 1):
        if not (terminated[t] or truncated[t]):
            after[t] = obs[t + 1]
    action, reward = rng.integers(0, 3, count), rng.normal(size=count).astype(np.float32)
    window, out, row = NStepWindow(TRANSITION, 1, n, 0.9), TRANSITION.empty(count * n), 0
    done = terminated | truncated
    dropped = np.zeros(count, bool) if known else ~terminated & (done | (np.arange(count) == count - 1))
    for t in np.flatnonzero(~dropped):
        last = done[t] or t == count - 1 or dropped[t + 1]
        step = (obs[t], action[t], reward[t], after[t], terminated[t], last, True)
        row = window.push(*(np.array([value]) for value in step), out, row)
    expected = {name: column[:row] for name, column in out.items()}
    order = np.argsort(expected["obs"][:, 0])
    steps = Steps(obs, action, reward, terminated, truncated, after if known else None)
    found = n_step_transitions(steps, TRANSITION, n, 0.9, 1000)
    assert found.rows == row
    if row:
        for name, column in columns_of(found).items():
            wanted = expected[name][order]
            if name == "next_obs" and not known:  # after a termination, nothing bootstraps from it
                column, wanted = (values[expected["discount"][order] > 0] for values in (column, wanted))
            np.testing.assert_array_equal(column, wanted, err_msg=name)


def test_the_newest_are_taken_and_steps_without_an_end_are_left_out(tmp_path: Path) -> None:
    steps = arrays(10_000)
    np.savez(tmp_path / "steps.npz", **steps)
    found = given_transitions(tmp_path / "steps.npz", TRANSITION, CHOICES, 1, 0.9, 9000)
    assert found.rows == 9000
    assert found.note == "the newest 9,000 of 9,998; without 2 steps before an observation that is not known"
    obs = columns_of(found)["obs"]
    np.testing.assert_array_equal(obs, steps["observations"][999:9999].astype(np.float32))


def test_names_of_d4rl_and_actions_as_policies_number_them(tmp_path: Path) -> None:
    ends = {"terminals": arrays()["terminations"], "timeouts": None, "terminations": None, "truncations": None}
    found = columns_of(read(tmp_path, **ends))
    np.testing.assert_array_equal(found["action"], arrays()["actions"][:5] - 5)
    np.testing.assert_array_equal(found["discount"], np.float32([0.9, 0, 0.9, 0.9, 0.9]))


def test_actions_beyond_their_bounds_by_rounding_alone_are_taken(tmp_path: Path) -> None:
    transition = TransitionSpec.from_spaces(OBS, TORQUE)
    actions = np.tile([2.0001, -0.00005], (6, 1))
    found = columns_of(read(tmp_path, transition=transition, space=TORQUE, actions=actions))
    np.testing.assert_array_equal(found["action"], np.tile(np.float32([2, 0]), (4, 1)))
    actions[2:] = 2.1, 0.0
    with pytest.raises(ConfigurationError, match=r"within Box.*step 2 has \[2\.1 *0\. *\], one of 4 outside"):
        read(tmp_path, transition=transition, space=TORQUE, actions=actions)


@pytest.mark.parametrize(
    ("space", "found"),
    [
        (spaces.Discrete(200, start=-100), np.full(6, 90, np.int8)),
        (spaces.Discrete(200, start=-100), np.full(6, 90, np.uint8)),
        (spaces.MultiDiscrete([3, 2], start=[4, 0]), np.tile(np.int64([6, 1]), (6, 1))),
        (spaces.MultiBinary(2), np.tile(np.int8([1, 0]), (6, 1))),
        (spaces.Box(0, 5, (2,), np.int32), np.tile(np.int32([5, 1]), (6, 1))),
    ],
)
def test_whole_numbers_of_any_type_and_space_are_those_of_policies(
    tmp_path: Path, space: spaces.Space[Any], found: np.ndarray
) -> None:
    transition = TransitionSpec.from_spaces(OBS, space)
    given = columns_of(read(tmp_path, transition=transition, space=space, actions=found))["action"]
    assert given.dtype == np.int64
    np.testing.assert_array_equal(EnvironmentActions(space)(given), found[:4])


@pytest.mark.parametrize("action", [5.0, -math.inf, -1e300])
def test_a_bound_that_is_infinite_lets_no_others_pass(tmp_path: Path, action: float) -> None:
    space = spaces.Box(-math.inf, 1, (1,), np.float32)
    transition = TransitionSpec.from_spaces(OBS, space)
    with pytest.raises(ConfigurationError, match=r"must be within Box.*one of 6 outside"):
        read(tmp_path, transition=transition, space=space, actions=np.full((6, 1), action))


IMAGES = TransitionSpec.from_spaces(spaces.Box(0, 255, (4, 8, 8), np.uint8), CHOICES)


@pytest.mark.parametrize(
    ("transition", "changed", "message"),
    [
        (TRANSITION, {"rewards": None}, "has no rewards; it has observations, .*Expected are observations"),
        (TRANSITION, {"terminations": None}, "has no terminations or terminals"),
        (TRANSITION, {"observations": np.zeros((6, 3))}, r"numbers of shape \('steps', 2\).*found float64 of"),
        (TRANSITION, {"observations": np.full((6, 2), "a")}, "observations .* must be numbers"),
        (TRANSITION, {"observations": np.zeros((0, 2))}, "must have a row for each of the 0 steps"),
        (TRANSITION, {"observations": np.float32(1)}, r"observations .* a row for each .* found the shape \(\)"),
        (TRANSITION, {"rewards": np.zeros(5)}, r"rewards .* a row for each of the 6 steps; found the shape \(5,\)"),
        (TRANSITION, {"rewards": np.array([0, 0, math.nan, 0, 0, 0])}, "rewards .* must be finite as float32; step 2 "),
        (TRANSITION, {"rewards": np.full(6, 1e39)}, "rewards .* must be finite as float32; step 0 "),
        (TRANSITION, {"actions": np.full(6, 8)}, r"actions .* within Discrete\(3, start=5\); step 0 has 8, one of 6"),
        (TRANSITION, {"actions": np.full((6, 1), 6)}, "actions .* must be actions of Discrete.* found int64 of shape"),
        (TRANSITION, {"actions": np.full(6, 6.0)}, "actions .* must be actions of Discrete.* found float64"),
        (TRANSITION, {"terminations": np.full(6, 2)}, "terminations .* must be 0 or 1"),
        (TRANSITION, {"terminations": np.zeros(6, "V2")}, "terminations .* must be 0 or 1 .*found [|]V2"),
        (IMAGES, {"observations": np.zeros((6, 4, 8, 8))}, r"bytes \(uint8\) of shape \('steps', 4, 8, 8\)"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(tmp_path: Path, transition: TransitionSpec, changed: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        read(tmp_path, transition=transition, **changed)


def test_files_that_are_none_are_named_and_nothing_is_unpickled(tmp_path: Path) -> None:
    path = tmp_path / "steps.npz"
    with pytest.raises(ConfigurationError, match="there is no file and no folder of a run at"):
        given_transitions(path, TRANSITION, CHOICES, 1, 0.9, 10)
    for content in (b"", b"PK\x03\x04 cut", b"no archive"):
        path.write_bytes(content)
        with pytest.raises(ConfigurationError, match=r"cannot be read as an \.npz file"):
            given_transitions(path, TRANSITION, CHOICES, 1, 0.9, 10)
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read(tmp_path, rewards=np.array([None] * 6))
    np.save(tmp_path / "one.npy", np.zeros(3))
    with pytest.raises(ConfigurationError, match="is one array"):
        given_transitions(tmp_path / "one.npy", TRANSITION, CHOICES, 1, 0.9, 10)


def test_members_that_are_damaged_or_no_arrays_are_named(tmp_path: Path) -> None:
    path = tmp_path / "steps.npz"
    np.savez_compressed(path, **{**arrays(), "observations": np.random.default_rng(0).normal(size=(6, 2))})
    with zipfile.ZipFile(path) as archive:
        member = archive.getinfo("observations.npy")
    damaged = bytearray(path.read_bytes())
    begin = member.header_offset + 30 + sum(struct.unpack_from("<HH", damaged, member.header_offset + 26))
    damaged[begin : begin + member.compress_size] = bytes([0xFF]) * member.compress_size
    path.write_bytes(damaged)
    with pytest.raises(ConfigurationError, match=r"cannot be read as an \.npz file: .*decompressing"):
        given_transitions(path, TRANSITION, CHOICES, 1, 0.9, 10)
    with zipfile.ZipFile(path, "w") as archive:
        for name in arrays():
            archive.writestr(name, b"no array")
    with pytest.raises(ConfigurationError, match=r"cannot be read .*: observations is not an array of NumPy"):
        given_transitions(path, TRANSITION, CHOICES, 1, 0.9, 10)


def test_further_arrays_of_a_data_set_are_not_read(tmp_path: Path) -> None:
    assert read(tmp_path, infos=np.array([{"seed": 1}], object), seeds=np.zeros(3)).rows == 4


def test_what_steps_do_not_have_is_named(tmp_path: Path) -> None:
    further = TRANSITION.with_columns(Column("mask", (3,), "bool", make=lambda step: np.ones(3)))
    with pytest.raises(ConfigurationError, match=r"also stores mask\. Name the folder of a run"):
        read(tmp_path, transition=further)
    with pytest.raises(ConfigurationError, match="does not give normalised observations or rewards"):
        read(tmp_path, transition=TRANSITION.normalized(observations=True, rewards=False))


# --- the replay of another run ----------------------------------------------------------------------------------------


def saved_run(folder: Path, rows: int, storage: DataStorage | None = None, **identity: str) -> dict[str, np.ndarray]:
    storage = storage or DataStorage(TRANSITION, 8)
    replay = NativeReplayManager(8, seed=1)
    steps = n_step_transitions(
        Steps(
            np.arange(2 * rows, dtype=np.float32).reshape(rows, 2),
            np.arange(rows) % 3,
            np.arange(rows, dtype=np.float32),
            np.arange(rows) % 5 == 4,
            np.zeros(rows, bool),
            np.arange(2 * rows, dtype=np.float32).reshape(rows, 2) + 2,
        ),
        *(TRANSITION, 1, 0.9, rows),
    )
    (columns,) = steps.chunks
    for row in range(rows):
        one = {name: column[row : row + 1] for name, column in columns.items()}
        replay.insert(storage.insert(one))
    identity = {"environment": "Stairs", **identity}
    state = RunState(identity, TinyDQN(OBS, spaces.Discrete(3)), ReplayExperience(replay, storage))
    state.save(folder / "checkpoints", Counters(env_steps=rows, stored=rows, collected=rows))
    return dict(columns)


@pytest.mark.parametrize(("rows", "most"), [(5, 8), (8, 8), (11, 8), (11, 3)])
def test_the_rows_of_a_run_are_given_oldest_first(
    tmp_path: Path, rows: int, most: int, caplog: pytest.LogCaptureFixture
) -> None:
    expected = saved_run(tmp_path, rows)
    found = given_transitions(tmp_path, TRANSITION, spaces.Discrete(3), 1, 0.9, most)
    kept = min(rows, most)
    assert found.note == ("in Stairs" if most == 8 else "in Stairs; the newest 3 of 8")
    for name, column in columns_of(found).items():
        np.testing.assert_array_equal(column, expected[name][rows - kept :], err_msg=name)
    assert not caplog.messages
    given_transitions(tmp_path, TRANSITION, spaces.Discrete(3), 3, 0.99, most)
    assert "discounted by 0.9, among others; this program discounts its own by gamma = 0.99" in caplog.text
    caplog.clear()
    given_transitions(tmp_path, TRANSITION, spaces.Discrete(3), 3, 0.9, most)
    assert "this program discounts its own by gamma = 0.9, with returns of up to 3 steps" in caplog.text


def test_observations_may_be_stored_once_on_both_sides(tmp_path: Path) -> None:
    expected = saved_run(tmp_path, 11, ChainedStorage(TRANSITION, 8, chains=2, gamma=0.9))
    found = given_transitions(tmp_path, TRANSITION, spaces.Discrete(3), 1, 0.9, 8)
    storage = ChainedStorage(TRANSITION, 8, chains=2, gamma=0.9)
    for columns in found.chunks:
        storage.insert(columns)
    for name, column in storage.columns.items():
        if name in expected:
            np.testing.assert_array_equal(column, expected[name][3:], err_msg=name)


@pytest.mark.parametrize("n", [1, 3])
def test_stacks_of_frames_may_be_stored_once(n: int) -> None:
    rng, count = np.random.default_rng(0), 600
    frames = rng.integers(0, 256, (count + 4, 3, 3), np.uint8)
    obs, next_obs = (np.stack([frames[t + k : t + k + 4] for t in range(count)]) for k in (0, 1))
    transition = TransitionSpec.from_spaces(spaces.Box(0, 255, (4, 3, 3), np.uint8), CHOICES)
    ends = rng.random((2, count)) < 0.02
    steps = Steps(obs, rng.integers(0, 3, count), rng.normal(size=count).astype(np.float32), *ends, next_obs)
    storage = FrameStorage(transition, count, streams=4 * n)
    (columns,) = n_step_transitions(steps, transition, n, 0.9, count).chunks
    slots = storage.insert(columns)
    for name, column in columns.items():
        np.testing.assert_array_equal(storage.gather_column(name, slots), column, err_msg=name)


def test_runs_without_such_rows_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="There is no checkpoint of a run"):
        given_transitions(tmp_path, TRANSITION, CHOICES, 1, 0.9, 10)
    saved_run(tmp_path / "b", 5, normalization="observation_statistics")
    with pytest.raises(ConfigurationError, match=r"run in .*b stored normalised observations or rewards"):
        given_transitions(tmp_path / "b", TRANSITION, CHOICES, 1, 0.9, 10)
    saved_run(tmp_path / "a", 5)
    wide = TransitionSpec.from_spaces(spaces.Box(-1, 1, (3,), np.float32), CHOICES)
    with pytest.raises(ConfigurationError, match=r"obs must be float32 of shape \(3,\); found float32 of shape \(2,\)"):
        given_transitions(tmp_path / "a", wide, CHOICES, 1, 0.9, 10)
    with pytest.raises(
        ConfigurationError, match=r"actions that Discrete\(2, start=5\) lacks: .* from 0 to 1; found 0 to 2"
    ):
        given_transitions(tmp_path / "a", TRANSITION, spaces.Discrete(2, start=5), 1, 0.9, 10)
    (checkpoint,) = (tmp_path / "a/checkpoints").glob("checkpoint-*")
    (checkpoint / "arrays/storage/reward.npy").write_bytes(b"cut")
    with pytest.raises(CheckpointError, match=r"reward\.npy"):
        given_transitions(tmp_path / "a", TRANSITION, CHOICES, 1, 0.9, 10)


# --- pretraining ------------------------------------------------------------------------------------------------------


def pretraining_flow(counters: Counters, batches: int) -> OffPolicy:
    """A flow that trains `batches` of 4 first, then each transition eight times."""
    flow = OffPolicy(
        ReplaySpec(1000), ActorSpec("CartPole-v1"), TrainSpec(batch_size=4, replay_ratio=8.0, learning_starts=0)
    )
    flow.begin(counters)
    flow.pretrain(batches)
    return flow


def test_pretraining_comes_first_and_does_not_count() -> None:
    counters = Counters()
    counters.filled(100)
    flow = pretraining_flow(counters, 3)
    for left in (3, 2, 1):
        assert (flow.batches_allowed(), flow.collection_allowed()) == (left, False)
        counters.samples += 4
        counters.leave_out(12)
    assert (flow.batches_allowed(), flow.collection_allowed()) == (0, True)
    counters.collected += 10
    counters.stored += 10
    assert flow.batches_allowed() == 20
    counters.samples += 80
    counters.leave_out(12)
    assert (flow.batches_allowed(), flow.achieved_ratio) == (0, 8.0)
    with pytest.raises(ConfigurationError, match="nothing to pretrain on"):
        OnPolicy(8, 1).pretrain(1)


def test_checkpoints_of_earlier_versions_were_given_nothing() -> None:
    scalars = Counters(collected=7, stored=7).to_scalars()
    del scalars["given"]
    assert Counters.from_scalars(scalars, Path("checkpoint")).given == 0


def test_pretraining_goes_on_where_it_was() -> None:
    counters = Counters(stored=100, collected=100, ratio_stored=100, samples=8, ratio_samples=8)
    flow = pretraining_flow(counters, 3)
    assert (flow.batches_allowed(), flow.collection_allowed()) == (1, False)


def test_pretraining_that_is_interrupted_does_not_count_either() -> None:
    counters = Counters()
    counters.filled(100)
    counters.samples = 200
    counters.leave_out(4000)
    restored = Counters.from_scalars(counters.to_scalars(), Path("checkpoint"))
    flow = pretraining_flow(restored, 0)
    restored.collected += 10
    restored.stored += 10
    assert flow.batches_allowed() == 20, "training goes on at once, without --pretrain too"


# --- programs ---------------------------------------------------------------------------------------------------------


def test_a_program_starts_with_them_and_resume_goes_on_from_its_own(tmp_path: Path, quick_profiles: None) -> None:
    program = make_program(tmp_path, training={"learning_starts": 100, "batch_size": 16})
    rng = np.random.default_rng(0)
    steps = {"observations": rng.normal(size=(500, 4)), "actions": rng.integers(0, 2, 500), "rewards": np.ones(500)}
    np.savez(tmp_path / "steps.npz", **steps, terminations=np.arange(500) % 10 == 9)
    command = ("--serial", "--eval-episodes", "0", "--run-dir", str(tmp_path / "run"))
    given = ("--transitions-from", str(tmp_path / "steps.npz"))
    code, said = run(program, *command, *given, "--pretrain", "30", "--timesteps", "40")
    assert code == 0, said
    assert f"Starting with 500 transitions of {tmp_path / 'steps.npz'}." in said
    assert "Training 30 batches of them before the Actors collect." in said
    assert json.loads((tmp_path / "run/summary.json").read_text())["gradient_steps"] > 30
    code, said = run(program, *command, *given, "--resume", "--timesteps", "80")
    assert code == 0, said
    assert "Starting with" not in said
    code, said = run(program, *command[:-1], str(tmp_path / "next"), "--transitions-from", str(tmp_path / "run"))
    assert code == 0, said
    assert f"transitions of {tmp_path / 'run'} (in CartPole-v1)." in said
    code, said = run(program, *command, "--transitions-from", str(tmp_path / "absent"), "--plain")
    assert code == 1
    assert f"no file and no folder of a run at {tmp_path / 'absent'}" in said
    assert "Traceback" not in said


def test_a_run_may_take_the_place_of_the_one_that_gives_and_leaves_it_alone_if_it_fails(
    tmp_path: Path, quick_profiles: None
) -> None:
    program = make_program(tmp_path, training={"learning_starts": 100, "batch_size": 16})
    folder = tmp_path / "run"
    command = ("--serial", "--eval-episodes", "0", "--run-dir", str(folder), "--timesteps", "60")
    code, said = run(program, *command)
    assert code == 0, said
    code, said = run(program, *command, "--transitions-from", str(tmp_path / "absent"))
    assert code == 1, said
    code, said = run(program, *command, "--transitions-from", str(folder))
    assert code == 0, said
    assert f"transitions of {folder} (in CartPole-v1)." in said
    assert (folder / "checkpoints/earlier-001").is_dir()
    assert not (folder / "checkpoints/earlier-002").exists()


@pytest.mark.parametrize(("given", "random_steps"), [(0, 100), (30, 70), (500, 0)])
def test_given_transitions_take_the_place_of_random_steps(tmp_path: Path, given: int, random_steps: int) -> None:
    session = Session(
        *(Program("p", 0.0), parse_options(None, timesteps=900, run_dir=tmp_path, arguments=[])),
        trainer_class=TinyDQN,
        settings={},
        actors=ActorSpec("CartPole-v1"),
        replay=ReplaySpec(1000),
        train=TrainSpec(learning_starts=100),
    )
    session.make_trainer("cpu")
    session.counters.filled(given)
    # Actors that were restarted lost the first steps of their last returns, and the run goes on from a checkpoint.
    saved = dataclasses.replace(session.counters, env_steps=50, collected=given + 42).to_scalars()
    session.counters = Counters.from_scalars(saved, tmp_path)
    assert [setup.train.learning_starts for setup in session._actor_setups(2)] == [random_steps] * 2
    session.report.close(None, None, None)


def test_training_on_data_alone_is_evaluated_and_goes_on(tmp_path: Path, quick_profiles: None) -> None:
    program = make_program(tmp_path, training={"batch_size": 16})
    rng = np.random.default_rng(0)
    steps = {"observations": rng.normal(size=(60, 4)), "actions": rng.integers(0, 2, 60), "rewards": np.ones(60)}
    np.savez(tmp_path / "steps.npz", **steps, terminations=np.arange(60) % 10 == 9)
    command = ("--timesteps", "0", "--eval-episodes", "2", "--run-dir", str(tmp_path / "run"))
    command = (*command, "--transitions-from", str(tmp_path / "steps.npz"), "--pretrain")
    for batches, further in ((30, ()), (50, ("--resume",))):
        code, said = run(program, *command, str(batches), *further)
        assert code == 0, said
        assert "nothing is trained" not in said
        assert "will not train" not in said
        summary = json.loads((tmp_path / "run/summary.json").read_text())
        assert (summary["gradient_steps"], summary["env_steps"]) == (batches, 0)
    kinds = [line.split(",")[2] for line in (tmp_path / "run/evaluations.csv").read_text().splitlines()]
    assert kinds.count("progress") == 2  # one when each pretraining ended
    code, said = run(program, *command, "50", "--resume")
    assert "has done: nothing is trained" in said
    with running(program, *command, "100_000") as killed:
        killed.until(lambda: "of 100,000 batches before the Actors collect." in killed.output)
        killed.until(lambda: list((tmp_path / "run/checkpoints").glob("checkpoint-*")))
        killed.process.kill()
        killed.process.wait()
    counters = load_checkpoint(tmp_path / "run/checkpoints").counters
    assert counters["ratio_samples"] == counters["samples"] > 0
    code, said = run(program, *command, "100_000", "--resume")
    assert code == 0, said
    assert "Trained 10,000 of" not in said
    assert json.loads((tmp_path / "run/summary.json").read_text())["gradient_steps"] == 100_000


def test_programs_without_a_replay_of_their_own_refuse_them(tmp_path: Path) -> None:
    arguments = ("--transitions-from", "steps.npz", "--run-dir", str(tmp_path))
    options = parse_options(None, timesteps=100, run_dir="run", arguments=arguments)
    common: dict[str, Any] = {"settings": {}, "actors": ActorSpec("CartPole-v1"), "train": TrainSpec()}
    with pytest.raises(ConfigurationError, match="PPO learns from rollouts of its present policy and has none"):
        RolloutSession(Program("p", 0.0), options, trainer_class=PPO, rollout=RolloutSpec(), **common)
    with pytest.raises(ConfigurationError, match="--transitions-from is for programs of one Learner"):
        LearnersSession(
            *(Program("p", 0.0), options),
            trainer_class=TinyDQN,
            replay=ReplaySpec(100),
            learners=LearnersSpec(2),
            **common,
        )
