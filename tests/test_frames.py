"""Frames stored once: the same rows to the bit, in a quarter of the memory of Stable-Baselines3's smallest buffer."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer.replay_composing import memory_line
from pearl.actors.n_step import NStepWindow
from pearl.errors import CapacityError, ConfigurationError, ReplayError
from pearl.replay import DataStorage
from pearl.replay.frames import FRAMES, FrameStorage, frames_nbytes
from pearl.runtime.data_storage import make_storage, stored_nbytes
from pearl.spec import ActorSpec, FieldSpec, ReplaySpec, TrainSpec, TransitionSpec


def transitions_of(stack: int, frame: tuple[int, ...], dtype: str = "uint8") -> TransitionSpec:
    return TransitionSpec(
        (
            FieldSpec("obs", (stack, *frame), dtype),
            FieldSpec("action", (), "int64"),
            FieldSpec("reward", (), "float32"),
            FieldSpec("next_obs", (stack, *frame), dtype),
            FieldSpec("discount", (), "float32"),
        )
    )


class Games:
    """Environments that show stacks of random frames; episodes of random lengths, in n-step transitions."""

    def __init__(self, spec: TransitionSpec, envs: int, n: int, seed: int, longest: int = 12) -> None:
        self.spec, self.rng, self.longest = spec, np.random.default_rng(seed), longest
        self.stack, self.frame = spec.fields[0].shape[0], spec.fields[0].shape[1:]
        self.window = NStepWindow(spec, envs, n, 0.9)
        self.stacks = [self._begin() for _ in range(envs)]
        self.left = [self._length() for _ in range(envs)]

    def _length(self) -> int:
        return int(self.rng.integers(1, self.longest))

    def _frame(self) -> np.ndarray:
        return self.rng.integers(0, 256, self.frame).astype(self.spec.fields[0].dtype)

    def _begin(self) -> deque[np.ndarray]:
        first = self._frame()
        return deque([first] * self.stack, self.stack)

    def step(self) -> dict[str, np.ndarray]:
        envs = len(self.stacks)
        out = self.spec.empty(envs * 8)
        obs = np.stack([np.stack(list(stack)) for stack in self.stacks])
        done = np.zeros(envs, bool)
        for env, stack in enumerate(self.stacks):
            stack.append(self._frame())
            self.left[env] -= 1
            done[env] = self.left[env] == 0
        next_obs = np.stack([np.stack(list(stack)) for stack in self.stacks])
        action, reward = self.rng.integers(0, 4, envs), self.rng.standard_normal(envs).astype(np.float32)
        everywhere = np.ones(envs, bool)
        terminated = done & (self.rng.random(envs) < 0.5)
        rows = self.window.push(obs, action, reward, next_obs, terminated, done, everywhere, out, 0)
        for env in np.flatnonzero(done):
            self.stacks[env], self.left[env] = self._begin(), self._length()
        return {name: column[:rows] for name, column in out.items()}


def same(one: Any, other: Any, slots: np.ndarray) -> None:
    found, wanted = one.gather(slots), other.gather(slots)
    for name, column in wanted.items():
        np.testing.assert_array_equal(found[name], column, name)


@settings(max_examples=25, deadline=None)
@given(
    capacity=st.integers(8, 60),
    envs=st.integers(1, 4),
    n=st.integers(1, 3),
    stack=st.integers(2, 4),
    dtype=st.sampled_from(["uint8", "float32"]),
    seed=st.integers(0, 2**16),
)
def test_rows_are_those_of_a_storage_that_stores_all(
    capacity: int, envs: int, n: int, stack: int, dtype: str, seed: int
) -> None:
    spec = transitions_of(stack, (3, 5), dtype)
    games = Games(spec, envs, n, seed)
    once, whole = FrameStorage(spec, capacity, streams=envs * n), DataStorage(spec, capacity)
    rng = np.random.default_rng(seed)
    for _ in range(60):
        rows = games.step()
        count = min(len(rows["reward"]), capacity)
        assert np.array_equal(once.insert(rows, count), whole.insert(rows, count))
        if once.size:
            same(once, whole, rng.integers(0, once.size, 7))
    assert (once.size, once.cursor, once.inserted) == (whole.size, whole.cursor, whole.inserted)
    stored = whole.columns
    shown = np.concatenate([stored[name][: whole.size].reshape(-1, 15) for name in ("obs", "next_obs")])
    assert once.frames == len(np.unique(shown, axis=0)), "a frame that no row shows is dropped"


def filled(capacity: int, rows: int, *, longest: int = 200) -> FrameStorage:
    spec = transitions_of(4, (84, 84))
    storage, games = FrameStorage(spec, capacity, streams=2), Games(spec, 2, 1, 0, longest)
    while storage.inserted < rows:
        storage.insert(games.step())
    return storage


def test_a_replay_of_atari_needs_a_quarter_of_the_memory_of_the_smallest_of_stable_baselines3() -> None:
    """Bytes of its buffer: the arrays of `ReplayBuffer.__init__` in stable_baselines3/common/buffers.py, 2.9.2."""
    stack = 4 * 84 * 84
    actions_rewards_dones_timeouts = 8 + 4 + 4 + 4
    sb3 = 2 * stack + actions_rewards_dones_timeouts
    sb3_optimized = stack + 8 + 4 + 4  # optimize_memory_usage, which forbids handle_timeout_termination
    storage = filled(600, 1000)
    ours = storage.nbytes / storage.capacity
    assert ours < 1.04 * frames_nbytes(storage.spec), "episodes of 100 steps have one frame more"
    assert ours < 0.27 * sb3_optimized
    assert ours < 0.135 * sb3
    whole = ReplaySpec(1_000_000, share_frames=True)
    line = memory_line(whole, storage.spec)
    assert line == ("Data Storage: 7.3 GB for 1,000,000 transitions, each frame once; stored as they are: 56.5 GB")


def test_the_file_of_a_checkpoint_holds_each_frame_once_and_is_restored() -> None:
    storage = filled(100, 250)
    saved = {name: column.copy() for name, column in storage.columns.items()}
    assert saved[FRAMES].shape[1:] == (84, 84)
    assert len(saved[FRAMES]) == storage.frames < 130
    place = {"size": storage.size, "cursor": storage.cursor, "inserted": storage.inserted}
    other = FrameStorage(storage.spec, 100, streams=2)
    other.insert({name: np.zeros((3, *f.shape), f.dtype) for name, f in ((f.name, f) for f in storage.spec.fields)})
    other.restore(saved, **place)
    same(other, storage, np.arange(100))
    assert other.frames == storage.frames
    games = Games(storage.spec, 2, 1, 9)
    for _ in range(60):  # and goes on
        rows = games.step()
        assert np.array_equal(storage.insert(rows), other.insert(rows))
    same(other, storage, np.arange(100))
    assert other.frames == storage.frames


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda saved: saved.pop(FRAMES), "'frames' must hold frames of shape"),
        (lambda saved: saved.update({FRAMES: saved[FRAMES].astype(np.float32)}), "'frames' must hold .*float32"),
        (lambda saved: saved["obs"].__setitem__((0, 0), 10_000), "'obs' must hold places of .* frames"),
        (lambda saved: saved["next_obs"].__setitem__((0, 0), -1), "'next_obs' must hold places"),
        (lambda saved: saved.update({FRAMES: np.zeros((999, 84, 84), np.uint8)}), "999 frames do not fit"),
    ],
)
def test_saved_frames_that_are_damaged_are_refused(damage: Any, expected: str) -> None:
    storage = filled(20, 30)
    saved = {name: column.copy() for name, column in storage.columns.items()}
    damage(saved)
    with pytest.raises(ReplayError, match=expected):
        storage.restore(saved, size=20, cursor=0, inserted=20)


def test_observations_that_are_no_stacks_are_named() -> None:
    flat = transitions_of(4, ())
    with pytest.raises(ConfigurationError, match=r"share_frames stores each frame.*found observations of shape \(4,\)"):
        FrameStorage(flat, 10)
    with pytest.raises(ConfigurationError, match="leave share_frames out"):
        stored_nbytes(flat, ReplaySpec(10, share_frames=True))
    spec, rng = transitions_of(4, (8, 8)), np.random.default_rng(0)
    storage = FrameStorage(spec, 100)
    rows = spec.empty(30)  # eight new frames a row
    for name in rows:
        rows[name][...] = rng.integers(0, 256, rows[name].shape)
    storage.insert(rows, 15)
    with pytest.raises(CapacityError, match=r"are no stacks that share their frames: .* Leave share_frames out"):
        storage.insert({name: column[15:] for name, column in rows.items()})
    assert (storage.frames, storage.inserted) == (120, 15), "nothing changed"


def test_a_full_storage_takes_as_many_rows_at_once_as_it_has() -> None:
    spec = transitions_of(4, (3, 5))
    games, once, whole = Games(spec, 1, 1, 0, 100), FrameStorage(spec, 60), DataStorage(spec, 60)
    for count in (60, 60, 45, 60):
        steps = [games.step() for _ in range(count)]
        rows = {name: np.concatenate([step[name] for step in steps]) for name in steps[0]}
        assert np.array_equal(once.insert(rows), whole.insert(rows))
        same(once, whole, np.arange(60))
        numbers, before = np.random.default_rng(count), once.frames
        with pytest.raises(CapacityError, match="are no stacks"):
            once.insert({name: numbers.integers(0, 99, c.shape).astype(c.dtype) for name, c in rows.items()})
        assert once.frames == before
    same(once, whole, np.arange(60))


def test_the_replay_of_a_program_is_made_with_the_setting() -> None:
    spec, actors, train = transitions_of(4, (8, 8)), ActorSpec("CartPole-v1"), TrainSpec()
    made = make_storage(spec, ReplaySpec(100, share_frames=True), actors, train, None)  # type: ignore[arg-type]
    assert isinstance(made, FrameStorage)
    assert stored_nbytes(spec, ReplaySpec(100)) == spec.nbytes
    assert stored_nbytes(spec, ReplaySpec(100, share_next_obs=True)) == spec.nbytes - 256
    assert memory_line(ReplaySpec(100), spec) == ""
    for more in ({"share_next_obs": True}, {"storage": "memmap"}):
        with pytest.raises(ConfigurationError, match=r"share_frames shares next observations too.*leave"):
            ReplaySpec(100, share_frames=True, **more)  # type: ignore[arg-type]
