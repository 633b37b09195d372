"""Links between the items of each stream: shared next observations, n-step returns, slices and stacks of frames."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pearl.actors.n_step import NStepWindow
from pearl.errors import ReplayError
from pearl.replay.sequences import Slices, gather_slices, gather_stacks, n_step_returns
from pearl.replay.storage import DataStorage
from pearl.spec import FieldSpec, TransitionSpec

SPEC = TransitionSpec(
    (
        FieldSpec("obs", (2,), "float32"),
        FieldSpec("action", (), "int64"),
        FieldSpec("reward", (), "float32"),
        FieldSpec("next_obs", (2,), "float32"),
        FieldSpec("discount", (), "float32"),
    )
)
NO_NEXT = TransitionSpec(tuple(f for f in SPEC.fields if f.name != "next_obs"))


@dataclass
class Step:
    number: int
    stream: int
    obs: float
    next_obs: float
    reward: float
    terminated: bool
    truncated: bool
    episode: int
    position: int


class World:
    """Streams of steps, and the obvious reference: the list of all steps ever inserted."""

    def __init__(self, capacity: int, streams: int, seed: int, **options: object) -> None:
        self.rng = np.random.default_rng(seed)
        self.capacity, self.streams = capacity, streams
        self.steps: list[Step] = []
        self._obs = self.rng.random(streams).astype(np.float32)
        self._episode = list(range(streams))
        self._position = [0] * streams
        self._episodes = streams
        self.storage = DataStorage(SPEC, capacity, streams=streams, **options)  # type: ignore[arg-type]

    def step(self, stream: int, end_rate: float, gap_rate: float) -> Step:
        gap = self.rng.random() < gap_rate
        if gap:  # a step of the environment that is never inserted
            self._obs[stream] = np.float32(self.rng.random())
        if gap and self._position[stream]:
            self._begin(stream)
        next_obs = np.float32(self.rng.random())
        ended = self.rng.random() < end_rate
        terminated = bool(ended and self.rng.random() < 0.5)
        reward = float(np.float32(self.rng.normal()))
        made = Step(
            len(self.steps), stream, float(self._obs[stream]), float(next_obs), reward, terminated,
            bool(ended and not terminated), self._episode[stream], self._position[stream],
        )  # fmt: skip
        self.steps.append(made)
        self._position[stream] += 1
        self._obs[stream] = np.float32(self.rng.random()) if ended else next_obs
        if ended:
            self._begin(stream)
        return made

    def _begin(self, stream: int) -> None:
        self._episode[stream], self._position[stream] = self._episodes, 0
        self._episodes += 1

    def insert(self, count: int, end_rate: float, gap_rate: float = 0.0) -> None:
        batch = [self.step(int(self.rng.integers(self.streams)), end_rate, gap_rate) for _ in range(count)]
        columns = SPEC.empty(count)
        for row, step in enumerate(batch):
            columns["obs"][row], columns["next_obs"][row] = step.obs, step.next_obs
            columns["action"][row], columns["reward"][row] = step.number, step.reward
            columns["discount"][row] = 0
        self.storage.insert(
            columns,
            streams=np.array([s.stream for s in batch], np.int64),
            terminated=np.array([s.terminated for s in batch], bool),
            truncated=np.array([s.truncated for s in batch], bool),
        )

    @property
    def stored(self) -> list[Step]:
        return self.steps[-self.capacity :]

    def slot(self, step: Step) -> int:
        return step.number % self.capacity

    def episode(self, step: Step) -> list[Step]:
        return [s for s in self.stored if s.episode == step.episode]

    def after(self, step: Step) -> list[Step]:
        return [s for s in self.episode(step) if s.number >= step.number]

    def before(self, step: Step) -> list[Step]:
        return [s for s in self.episode(step) if s.number <= step.number]


def check(world: World, length: int, n: int, gamma: float) -> None:
    storage, stored = world.storage, world.stored
    slots = np.array([world.slot(s) for s in stored])
    found = storage.gather(slots)
    assert found["action"].tolist() == [s.number for s in stored]
    assert np.array_equal(found["obs"][:, 0], np.float32([s.obs for s in stored]))
    assert np.array_equal(found["next_obs"], np.float32([[s.next_obs] * 2 for s in stored]))
    assert storage.remaining(slots).tolist() == [len(world.after(s)) for s in stored]
    assert storage.positions(slots).tolist() == [s.position for s in stored]
    assert storage.terminated(slots).tolist() == [s.terminated for s in stored]
    assert storage.truncated(slots).tolist() == [s.truncated for s in stored]
    slices = gather_slices(storage, slots, length)
    stacks = {padding: gather_stacks(storage, slots, length, padding) for padding in ("zero", "repeat")}
    returns = n_step_returns(storage, slots, n, gamma)
    for i, step in enumerate(stored):
        after = world.after(step)[:length]
        assert slices.mask[i].tolist() == [True] * len(after) + [False] * (length - len(after))
        numbers = [s.number for s in after] + [0] * (length - len(after))
        assert slices.columns["action"][i].tolist() == numbers
        nexts = [s.next_obs for s in after] + [0.0] * (length - len(after))
        assert slices.columns["next_obs"][i, :, 0].tolist() == nexts

        before = world.before(step)[-length:]
        missing = length - len(before)
        for padding, pad in (("zero", 0.0), ("repeat", before[0].obs)):
            frames = [pad] * missing + [s.obs for s in before]
            assert stacks[padding].obs[i, :, 1].tolist() == frames
            assert stacks[padding].next_obs[i, :, 1].tolist() == [*frames[1:], step.next_obs]
            assert stacks[padding].complete[i] == (missing == 0 or before[0].position == 0)

        part = world.after(step)[:n]
        total = 0.0
        for k, s in enumerate(part):
            total += gamma**k * s.reward
        assert returns.reward[i] == np.float32(total)
        assert returns.steps[i] == len(part)
        assert returns.last[i] == world.slot(part[-1])
        assert returns.discount[i] == np.float32(0.0 if part[-1].terminated else gamma ** len(part))


worlds = given(
    capacity=st.integers(1, 24),
    streams=st.integers(1, 4),
    counts=st.lists(st.integers(0, 30), min_size=1, max_size=6),
    end_rate=st.sampled_from([0.0, 0.1, 0.3, 1.0]),
    gap_rate=st.sampled_from([0.0, 0.2]),
    length=st.integers(1, 5),
    seed=st.integers(0, 2**32),
    share=st.booleans(),
)


@settings(max_examples=150, deadline=None)
@worlds
def test_steps_of_interleaved_streams_are_found(capacity, streams, counts, end_rate, gap_rate, length, seed, share):
    world = World(capacity, streams, seed, share_next_obs=share)
    for count in counts:
        world.insert(min(count, capacity), end_rate, gap_rate)
        if world.steps:
            check(world, length, n=length, gamma=0.9)


@settings(max_examples=60, deadline=None)
@worlds
def test_a_restored_storage_knows_the_same_steps(capacity, streams, counts, end_rate, gap_rate, length, seed, share):
    world = World(capacity, streams, seed, share_next_obs=share)
    for count in counts:
        world.insert(min(count, capacity), end_rate, gap_rate)
    old = world.storage
    saved = {name: column[: old.size].copy() for name, column in old.columns.items()}
    # Whether next observations are shared makes no difference to what is saved.
    world.storage = DataStorage(SPEC, capacity, streams=streams, share_next_obs=not share)
    world.storage.insert({name: column[: min(capacity, 3)] for name, column in SPEC.empty(9).items()},
                         streams=np.zeros(min(capacity, 3), np.int64))  # fmt: skip
    world.storage.restore(saved, size=old.size, cursor=old.cursor, inserted=old.inserted)
    if world.steps:
        check(world, length, n=length, gamma=0.9)
    world.insert(capacity // 2, end_rate, gap_rate)
    if world.steps:
        check(world, length, n=length, gamma=0.9)


@settings(max_examples=80, deadline=None)
@worlds
def test_every_start_of_a_whole_slice_is_drawn_and_no_other(
    capacity, streams, counts, end_rate, gap_rate, length, seed, share
):
    world = World(capacity, streams, seed, share_next_obs=share, slice_length=length)
    for count in counts:
        world.insert(min(count, capacity), end_rate, gap_rate)
        starts = {world.slot(s) for s in world.stored if len(world.after(s)) >= length}
        rng = np.random.default_rng(seed)
        if not starts:
            with pytest.raises(ReplayError, match=f"No episode stored holds {length} steps"):
                world.storage.draw_starts(1, rng)
            continue
        # A start is missed by one draw in at most e**-40.
        assert set(world.storage.draw_starts(40 * len(starts), rng).tolist()) == starts


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("shape", [(3,), (8, 84, 4)])
def test_slices_are_gathered_into_the_callers_arrays(shape, share):
    spec = TransitionSpec(tuple(FieldSpec(f.name, shape, "uint8") if "obs" in f.name else f for f in SPEC.fields))
    storage = DataStorage(spec, 50, streams=1, share_next_obs=share)
    rng = np.random.default_rng(0)
    for start in (0, 30, 60):  # the last ones wrap around
        columns = spec.empty(30)
        columns["obs"][:] = rng.integers(0, 256, columns["obs"].shape)
        columns["next_obs"][:-1], columns["next_obs"][-1] = columns["obs"][1:], 7
        columns["action"][:] = np.arange(start, start + 30)
        columns["reward"][:] = columns["discount"][:] = 1
        storage.insert(columns, terminated=np.arange(30) % 11 == 9)
    starts = np.random.default_rng(1).permutation(50)
    expected = gather_slices(storage, starts, 7)
    out = Slices(
        {f.name: np.full((50, 7, *f.shape), 9, f.dtype) for f in spec.fields},
        np.ones((50, 7), bool),
        np.full((50, 7), -1),
    )
    assert gather_slices(storage, starts, 7, out) is out
    rows = storage.gather(expected.indices.reshape(-1))
    assert 0 < expected.mask.sum() < expected.mask.size
    for name, column in out.columns.items():
        assert np.array_equal(column, expected.columns[name])
        whole = rows[name].reshape(column.shape)
        assert np.array_equal(column[out.mask], whole[out.mask])
        assert not column[~out.mask].any()
    assert np.array_equal(out.mask, expected.mask)
    assert np.array_equal(out.indices, expected.indices)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda out: out.columns.pop("reward"), "columns of `out` must be"),
        (
            lambda out: out.columns.update(reward=np.zeros((2, 3))),
            r"'reward' of `out` must be .*found float64 \(2, 3\)",
        ),
        (
            lambda out: out.columns.update(obs=out.columns["obs"].transpose(1, 0, 2)),
            r"'obs' .*found float32 \(3, 2, 2\)",
        ),
        (lambda out: out.mask.setflags(write=False), "'mask' of `out` must be contiguous, writeable"),
    ],
)
def test_arrays_that_slices_do_not_fit_are_named(change, message):
    storage = DataStorage(SPEC, 10, streams=1)
    storage.insert(SPEC.empty(4))
    out = gather_slices(storage, [0, 1], 3)
    change(out)
    with pytest.raises(ReplayError, match=message):
        gather_slices(storage, [0, 1], 3, out)


@pytest.mark.parametrize("share", [False, True])
def test_slices_gathered_beside_an_insertion_are_whole(share):
    storage = DataStorage(SPEC, 256, streams=1, share_next_obs=share)

    def insert(first: int) -> None:
        numbers = np.arange(first, first + 16)
        columns = {"obs": numbers, "action": numbers, "reward": numbers, "next_obs": numbers + 1, "discount": numbers}
        storage.insert(
            {
                f.name: np.broadcast_to(columns[f.name].reshape(-1, *[1] * len(f.shape)), (16, *f.shape)).astype(
                    f.dtype
                )
                for f in SPEC.fields
            }
        )

    for first in range(0, 256, 16):
        insert(first)
    writer = threading.Thread(target=lambda: [insert(first) for first in range(256, 16_000, 16)])
    writer.start()
    starts = np.arange(0, 256, 4)
    while True:
        running = writer.is_alive()
        slices = gather_slices(storage, starts, 4)
        numbers = slices.columns["action"]
        assert np.array_equal(numbers, np.where(slices.mask, numbers[:, :1] + np.arange(4), 0))
        assert np.array_equal(slices.columns["next_obs"][..., 0], np.where(slices.mask, numbers + 1, 0))
        assert np.array_equal(slices.columns["obs"][..., 1], np.where(slices.mask, numbers, 0))
        if not running:
            break
    writer.join()


def test_starts_are_drawn_alike():
    world = World(64, 3, seed=5, slice_length=4)
    world.insert(64, 0.05)
    world.insert(40, 0.05)
    starts, counts = np.unique(world.storage.draw_starts(100_000, np.random.default_rng(0)), return_counts=True)
    expected = 100_000 / len(starts)
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    freedom = len(starts) - 1
    assert chi_square < freedom + 5 * np.sqrt(2 * freedom)


@pytest.mark.parametrize("n", [1, 2, 5])
def test_n_step_returns_equal_those_of_the_actors_window(n):
    envs, steps, gamma = 3, 60, 0.97
    rng = np.random.default_rng(n)
    window = NStepWindow(SPEC, envs, n, gamma)
    storage = DataStorage(SPEC, envs * steps, streams=envs, share_next_obs=True)
    out, row = SPEC.empty(window.most_rows * steps), 0
    obs = rng.random((envs, 2)).astype(np.float32)
    for t in range(steps):
        next_obs = rng.random((envs, 2)).astype(np.float32)
        terminated, truncated = rng.random(envs) < 0.1, rng.random(envs) < 0.1
        reward, action = rng.normal(size=envs).astype(np.float32), t * envs + np.arange(envs)
        done = terminated | truncated
        row = window.push(obs, action, reward, next_obs, terminated, done, np.ones(envs, bool), out, row)
        columns = {"obs": obs, "action": action, "reward": reward, "next_obs": next_obs, "discount": reward}
        storage.insert(columns, streams=np.arange(envs), terminated=terminated, truncated=truncated)
        obs = np.where(done[:, None], rng.random((envs, 2)), next_obs).astype(np.float32)
    made = {name: column[:row] for name, column in out.items()}
    slots = made["action"]  # the number of a step is its slot
    assert row > envs * (steps - n)
    returns = n_step_returns(storage, slots, n, gamma)
    assert np.array_equal(returns.reward, made["reward"])
    assert np.array_equal(returns.discount, made["discount"])
    assert np.array_equal(storage.gather(returns.last)["next_obs"], made["next_obs"])
    assert np.array_equal(storage.gather(slots)["obs"], made["obs"])


def test_next_observations_take_room_only_at_ends():
    frames = TransitionSpec((FieldSpec("obs", (1000,), "uint8"), FieldSpec("next_obs", (1000,), "uint8")))
    storage = DataStorage(frames, 100, share_next_obs=True)
    assert storage.nbytes == 100 * 1000
    rng = np.random.default_rng(0)
    for _ in range(30):  # three times around the ring
        episode = rng.integers(0, 256, (11, 1000), np.uint8)
        ends = np.arange(10) == 9
        slots = storage.insert({"obs": episode[:-1], "next_obs": episode[1:]}, terminated=ends)
        assert np.array_equal(storage.gather(slots)["next_obs"], episode[1:])
    assert storage.breaks == 0
    kept = storage._backing.arrays["kept/next_obs"]
    assert kept.any(axis=1).sum() <= 11  # of ten episodes, and of the step being inserted


def test_rows_that_do_not_follow_are_counted_and_kept_whole():
    storage = DataStorage(SPEC, 10, share_next_obs=True)
    rng = np.random.default_rng(0)
    columns = {f.name: rng.random((6, *f.shape)).astype(f.dtype) for f in SPEC.fields}
    storage.insert(columns)
    assert storage.breaks == 5
    assert np.array_equal(storage.gather(np.arange(6))["next_obs"], columns["next_obs"])
    assert storage.remaining(np.arange(6)).tolist() == [1] * 6


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("follows", [False, True])
def test_a_missing_step_is_counted_after_all_of_its_episode_was_overwritten(share, follows):
    odd = TransitionSpec((FieldSpec("obs", (3,), "float32"), FieldSpec("next_obs", (3,), "float32")))  # not whole words
    storage = DataStorage(odd, 2, streams=2, share_next_obs=share)
    rows = {name: np.zeros((4, 3), np.float32) for name in ("obs", "next_obs")}
    rows["obs"][:, 2] = [0.0, 5.0, 6.0, 1.0 if follows else 2.0]
    rows["next_obs"][:, 2] = [1.0, 6.0, 7.0, 3.0]
    for row, stream in enumerate([0, 1, 1, 0]):  # the second row of stream 1 overwrites the only one of stream 0
        storage.insert({name: column[row : row + 1] for name, column in rows.items()}, streams=[stream])
    assert storage.breaks == (0 if follows else 1)


def test_without_next_observations_the_flags_alone_tell_episodes():
    storage = DataStorage(NO_NEXT, 10, streams=2)
    streams = np.array([0, 1, 0, 1, 0, 0, 1])
    terminated, truncated = np.arange(7) == 2, np.arange(7) == 3
    storage.insert(NO_NEXT.empty(7), streams=streams, terminated=terminated, truncated=truncated)
    assert storage.remaining(np.arange(7)).tolist() == [2, 2, 1, 1, 2, 1, 1]
    assert storage.breaks == 0
    assert gather_stacks(storage, [5], 3).next_obs is None
    with pytest.raises(ReplayError, match="no column 'colour'"):
        storage.gather_column("colour", [0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "Rows of 2 streams need `streams`"),
        ({"streams": [0, 2]}, r"position 1 must lie in \[0, 2\); found 2"),
        ({"streams": [0, -1]}, "found -1"),
        ({"streams": [0]}, r"one item per row \(2\); found 1"),
        ({"streams": [0.0, 1.0]}, "streams must be whole numbers"),
        ({"streams": [0, 1], "terminated": [1, 0]}, r"terminated must be bool of shape \(2,\); found int64"),
        ({"streams": [0, 1], "truncated": [True]}, r"truncated must be bool of shape \(2,\)"),
    ],
)
def test_wrong_streams_and_flags_change_nothing(arguments, message):
    storage = DataStorage(SPEC, 10, streams=2)
    with pytest.raises(ReplayError, match=message):
        storage.insert(SPEC.empty(2), **arguments)
    assert storage.inserted == 0


def test_wrong_requests_are_refused():
    plain, tracked = DataStorage(SPEC, 10), DataStorage(SPEC, 10, streams=1)
    for storage in (plain, tracked):
        storage.insert(SPEC.empty(4))
    with pytest.raises(ReplayError, match="make it with `streams`"):
        plain.remaining([0])
    with pytest.raises(ReplayError, match="make it with `streams`"):
        plain.insert(SPEC.empty(1), terminated=[True])
    with pytest.raises(ReplayError, match="slice_length"):
        tracked.draw_starts(1, np.random.default_rng(0))
    for ask in (tracked.remaining, tracked.terminated, tracked.begins_episode):
        with pytest.raises(ReplayError, match=r"position 1 must lie in \[0, 4\), the rows stored; found 4"):
            ask([0, 4])
    with pytest.raises(ReplayError, match="length must be at least 1"):
        tracked.steps_after([0], 0)
    with pytest.raises(ReplayError, match="n must be at least 1; found 0"):
        n_step_returns(tracked, [0], 0, 0.9)
    with pytest.raises(ReplayError, match='"zero" or "repeat"'):
        gather_stacks(tracked, [0], 2, "edge")
    with pytest.raises(ReplayError, match="lack 'episode/stream'"):
        tracked.restore(SPEC.empty(4), size=4, cursor=4, inserted=4)
    for options in ({"streams": 0}, {"slice_length": 0}, {"streams": 1.5}):
        with pytest.raises(ReplayError, match="whole number of at least 1"):
            DataStorage(SPEC, 10, **options)
    with pytest.raises(ReplayError, match="share_next_obs needs columns"):
        DataStorage(NO_NEXT, 10, share_next_obs=True)
    tracked.close()
    with pytest.raises(ReplayError, match="closed"):
        tracked.remaining([0])
