"""The Learner's loops, the collection buffer, collisions, and the replay ratio."""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from pearl.algorithms import DQN, Batch
from pearl.algorithms.trainer import policy_tensors
from pearl.backends.cuda.storage import TorchDataStorage
from pearl.errors import ConfigurationError, PearlError, QueueClosedError, TrainerError
from pearl.ipc.queues import Bell, WeightSyncQueue
from pearl.learner.torch_learner import TorchLearner
from pearl.replay import DataStorage, ReplayManager, Sample, make_replay_manager
from pearl.runtime.collection import CollectionBuffer, collides
from pearl.runtime.queues import DataCollectionQueue
from pearl.runtime.rate import StepRate
from pearl.runtime.replay_ratio import ReplayRatio
from pearl.runtime.run_state import Counters
from pearl.runtime.supervision import Supervisor
from pearl.runtime.workers import (
    AssignmentQueue,
    DoneQueue,
    GrantQueue,
    LearnerWorker,
    ProgressQueue,
    TrainingLoop,
    Worker,
)
from pearl.spec import ReplaySpec, TrainSpec, TransitionSpec

OBS, ACTIONS = spaces.Box(-1.0, 1.0, (4,), np.float32), spaces.Discrete(2)
SPEC = TransitionSpec.from_spaces(OBS, ACTIONS)
BATCH, CAPACITY = 8, 64


class Tiny(DQN):
    hidden_sizes = (8,)


class Broken(Tiny):
    def update_policy(self, batch: Batch, weights: torch.Tensor) -> torch.Tensor:
        if self.gradient_steps == 2:
            raise ZeroDivisionError("the third step")
        return super().update_policy(batch, weights)


class Misconfigured(Tiny):
    def update_policy(self, batch: Batch, weights: torch.Tensor) -> torch.Tensor:
        raise ConfigurationError("not like this")


class Diverging(Tiny):
    def update_policy(self, batch: Batch, weights: torch.Tensor) -> torch.Tensor:
        raise TrainerError("It diverged.")


class Miscounting(Tiny):
    """One priority for the whole batch, which every slot would get."""

    def update_policy(self, batch: Batch, weights: torch.Tensor) -> torch.Tensor:
        return super().update_policy(batch, weights).mean(0, keepdim=True)


class Forgetful(Tiny):
    def update_policy(self, batch: Batch, weights: torch.Tensor) -> torch.Tensor:
        super().update_policy(batch, weights)
        return None  # type: ignore[return-value]


def rows_of(start: int, count: int) -> dict[str, np.ndarray]:
    """Transitions whose every value tells their number."""
    columns = SPEC.empty(count)
    numbers = np.arange(start, start + count)
    for name in ("obs", "next_obs"):
        columns[name][...] = (numbers / CAPACITY)[:, None] * np.array([1, -1, 0.5, 2])
    columns["action"][...] = numbers % 2
    columns["reward"][...] = numbers
    columns["discount"][...] = np.where(numbers % 5, 0.9, 0.0)
    return columns


def filled() -> tuple[DataStorage, ReplayManager]:
    storage = DataStorage(SPEC, CAPACITY)
    replay = make_replay_manager(ReplaySpec(CAPACITY), seed=3)
    replay.insert(storage.insert(rows_of(0, CAPACITY)))
    return storage, replay


class Setting1(NamedTuple):
    laq: AssignmentQueue
    ldq: DoneQueue
    wsq: WeightSyncQueue
    bell: Bell
    trainer: Tiny
    worker: LearnerWorker


def setting1(trainer_class: type[Tiny] = Tiny, *, storage: DataStorage | None = None, interval: int = 2) -> Setting1:
    """`storage`: where the transitions stay with the Learner."""
    bell, trainer = Bell(), trainer_class(OBS, ACTIONS, seed=1)
    learner = TorchLearner(trainer)
    laq = AssignmentQueue(BATCH, None if storage is not None else SPEC, 2)
    ldq, wsq = DoneQueue(BATCH, 2, bell), WeightSyncQueue(learner.weight_count)
    worker = LearnerWorker(laq, ldq, wsq, bell, target=learner, weight_sync_interval=interval, storage=storage)
    return Setting1(laq, ldq, wsq, bell, trainer, worker)


@pytest.fixture
def launched() -> Iterator[Callable[[Worker], None]]:
    workers: list[Worker] = []

    def launch(worker: Worker) -> None:
        workers.append(worker)
        worker.launch()

    yield launch
    for worker in workers:
        worker.stop()


def weights_of(trainer: object) -> np.ndarray:
    return torch.cat([t.reshape(-1) for t in policy_tensors(trainer)]).numpy().copy()


def batches(count: int) -> list[Sample]:
    rng = np.random.default_rng(0)
    return [
        Sample(
            rng.integers(0, CAPACITY, BATCH),
            rng.uniform(0.2, 1, BATCH).astype(np.float32),
            rng.integers(0, 9, BATCH).astype(np.uint32),
        )
        for _ in range(count)
    ]


def train_directly(samples: list[Sample]) -> tuple[Tiny, list[np.ndarray], list[np.ndarray]]:
    """What the Learner should come to: weights and priorities after each batch, without queues."""
    trainer, storage = Tiny(OBS, ACTIONS, seed=1), filled()[0]
    weights, priorities = [weights_of(trainer)], []
    for sample in samples:
        gathered = storage.gather(sample.indices)
        batch = Batch(*(torch.from_numpy(gathered[name]) for name in Batch._fields))
        priorities.append(trainer.update_policy(batch, torch.from_numpy(sample.weights)).numpy())
        weights.append(weights_of(trainer))
    return trainer, weights, priorities


# --- setting 1 --------------------------------------------------------------------------------------------------------


def test_an_assignment_carries_the_sampled_rows() -> None:
    storage, _ = filled()
    laq = AssignmentQueue(BATCH, SPEC, 1)
    sample = batches(1)[0]
    laq.assign(sample, storage)
    found = laq.peek()
    assert found is not None
    message = found[0]
    expected = rows_of(0, CAPACITY)
    for name, column in expected.items():
        np.testing.assert_array_equal(message[name], column[sample.indices], err_msg=name)
    for name, values in zip(Sample._fields, sample, strict=True):
        np.testing.assert_array_equal(message[name], values, err_msg=name)


def test_an_assignment_of_indices_only() -> None:
    laq = AssignmentQueue(BATCH, None, 1)
    laq.assign(batches(1)[0], filled()[0])
    found = laq.peek()
    assert found is not None
    assert list(found[0]) == ["batch", "indices", "weights", "generations"]


@pytest.mark.parametrize("threaded", [False, True], ids=["inline", "thread"])
@pytest.mark.parametrize("learner_has_storage", [False, True])
def test_the_learner_trains_each_batch_and_answers(
    threaded: bool, learner_has_storage: bool, launched: Callable[[Worker], None]
) -> None:
    storage, _ = filled()
    s = setting1(storage=storage if learner_has_storage else None, interval=2)
    samples = batches(6)
    _, weights, priorities = train_directly(samples)
    first = s.wsq.poll()
    assert first is not None
    np.testing.assert_array_equal(first, weights[0], err_msg="actors start with the learner's own weights")
    if threaded:
        launched(s.worker)
    else:
        assert not s.worker.run_once(), "nothing to do yet"
    for number, sample in enumerate(samples):
        s.laq.assign(sample, storage)
        if not threaded:
            assert s.worker.run_once()
        found = s.ldq.peek(60.0)
        assert found is not None
        done = found[0]
        np.testing.assert_array_equal(done["indices"], sample.indices)
        np.testing.assert_array_equal(done["generations"], sample.generations)
        np.testing.assert_allclose(done["priorities"], priorities[number], rtol=1e-5)
        assert done["td_error"][0] == pytest.approx(priorities[number].mean(), rel=1e-5)
        s.ldq.release()
        snapshot = s.wsq.poll()
        # Weights are published before the answer: after every second batch the newest are there.
        assert (snapshot is not None) == (number % 2 == 1)
        if snapshot is not None:
            np.testing.assert_allclose(snapshot, weights[number + 1], atol=1e-6)
    s.worker.check()
    assert s.trainer.gradient_steps == 6


@pytest.mark.parametrize(
    ("trainer", "kind", "message", "cause"),
    [
        (Broken, PearlError, r"The Learner stopped: ZeroDivisionError: the third step", ZeroDivisionError),
        (Misconfigured, ConfigurationError, r"^not like this$", type(None)),
    ],
)
def test_an_error_of_the_trainer_reaches_the_host(
    trainer: type[Tiny], kind: type[PearlError], message: str, cause: type, launched: Callable[[Worker], None]
) -> None:
    storage, _ = filled()
    s = setting1(trainer)
    launched(s.worker)
    s.worker.check()
    seen = s.bell.value()
    answered = 0
    for sample in batches(3):
        s.laq.assign(sample, storage)
        assert s.bell.wait(seen, 60.0), "neither an answer nor an error woke the host"
        seen = s.bell.value()
        if s.ldq.peek() is None:
            break
        answered += 1
        s.ldq.release()
    assert answered == (2 if trainer is Broken else 0)
    with pytest.raises(kind, match=message) as error:
        s.worker.check()
    assert isinstance(error.value.__cause__, cause)


@pytest.mark.parametrize("kept", [None, DataStorage, partial(TorchDataStorage, device="cpu")])
def test_the_batch_of_a_step_that_failed_is_saved_with_its_transitions(tmp_path: Path, kept: Any) -> None:
    """Also where the transitions are with the Learner, so that messages carry indices only."""
    storage = filled()[0] if kept is None else kept(SPEC, CAPACITY)
    if kept is not None:
        storage.insert(rows_of(0, CAPACITY))
    s, sample, path = (
        setting1(Diverging, storage=storage if kept else None),
        batches(1)[0],
        tmp_path / "failed_batch.npz",
    )
    with Supervisor(tmp_path, serial=True, say=print) as supervisor:
        supervisor.launch(s.worker)
        s.laq.assign(sample, storage)
        supervisor.run_inline("CartPole-v1", collect=False)
        with pytest.raises(TrainerError, match=r"^It diverged\. The batch was saved as .*failed_batch\.npz"):
            supervisor.check_workers()
        found = dict(np.load(path))
        expected = {name: column[sample.indices] for name, column in rows_of(0, CAPACITY).items()} | sample._asdict()
        assert found.keys() == expected.keys()
        for name, column in expected.items():
            np.testing.assert_array_equal(found[name], column, err_msg=name)
        path.unlink()
        path.mkdir()
        with pytest.raises(TrainerError, match=r"^It diverged\. The batch could not be saved as .*: .*Is a directory"):
            supervisor.check_workers()


def test_an_error_in_serial_mode_reads_like_one_of_a_thread() -> None:
    storage, _ = filled()
    s = setting1(Broken)
    for sample in batches(2):
        s.laq.assign(sample, storage)
        assert s.worker.run_inline()
        s.ldq.release()
    s.laq.assign(batches(1)[0], storage)
    assert s.worker.run_inline()
    with pytest.raises(PearlError, match="The Learner stopped: ZeroDivisionError: the third step") as error:
        s.worker.check()
    assert isinstance(error.value.__cause__, ZeroDivisionError)


def test_stopping_ends_the_thread_even_when_the_host_has_not_read_the_answers(
    launched: Callable[[Worker], None],
) -> None:
    storage, _ = filled()
    s = setting1()
    before = threading.active_count()
    launched(s.worker)
    assert threading.active_count() == before + 1
    s.laq.assign(batches(1)[0], storage)
    s.worker.stop()
    assert threading.active_count() == before
    s.worker.check()
    with pytest.raises(QueueClosedError):
        s.laq.assign(batches(1)[0], storage)
    s.worker.stop()  # may be repeated


def test_a_worker_whose_thread_was_refused_can_be_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    worker = setting1().worker
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="can't start"):
        worker.launch()
    worker.stop()


def test_a_learner_prepares_once_in_the_thread_that_trains(launched: Callable[[Worker], None]) -> None:
    calls: list[int] = []

    class Noting(TorchLearner):
        def prepare(self) -> None:
            calls.append(threading.get_ident())

        def step(self, batch: Any, weights: Any) -> Any:
            assert calls == [threading.get_ident()]
            return super().step(batch, weights)

    bell, learner = Bell(), Noting(Tiny(OBS, ACTIONS))
    laq, ldq = AssignmentQueue(BATCH, SPEC, 2), DoneQueue(BATCH, 2, bell)
    wsq = WeightSyncQueue(learner.weight_count)
    worker = LearnerWorker(laq, ldq, wsq, bell, target=learner, weight_sync_interval=1)
    launched(worker)
    for sample in batches(2):
        laq.assign(sample, filled()[0])
        assert ldq.peek(60.0) is not None
        ldq.release()
    worker.check()
    assert calls != [threading.get_ident()]


# --- setting 2 --------------------------------------------------------------------------------------------------------


def loop_of(trainer_class: type[Tiny] = Tiny, *, interval: int = 3) -> tuple[Any, ...]:
    storage, replay = filled()
    bell, trainer = Bell(), trainer_class(OBS, ACTIONS, seed=1)
    learner = TorchLearner(trainer)
    laq, ldq, wsq = GrantQueue(2), ProgressQueue(2, bell), WeightSyncQueue(learner.weight_count)
    loop = TrainingLoop(
        laq,
        ldq,
        wsq,
        bell,
        replay=replay,
        storage=storage,
        learner=learner,
        batch_size=BATCH,
        transition=SPEC,
        weight_sync_interval=interval,
    )
    return loop, laq, ldq, wsq, bell, trainer, replay, storage


@pytest.mark.parametrize("threaded", [False, True], ids=["inline", "thread"])
def test_the_training_loop_runs_what_it_was_granted(threaded: bool, launched: Callable[[Worker], None]) -> None:
    loop, laq, ldq, wsq, _, trainer, replay, _storage = loop_of()
    # The same by hand, on a replay of the same seed.
    storage2, replay2 = filled()
    twin, td_errors = Tiny(OBS, ACTIONS, seed=1), []
    grants = [(2, 0.4), (1, 0.7), (4, 1.0)]
    for iterations, beta in grants:
        errors = []
        for _ in range(iterations):
            sample = replay2.sample(BATCH, beta)
            gathered = storage2.gather(sample.indices)
            batch = Batch(*(torch.from_numpy(gathered[name]) for name in Batch._fields))
            priorities = twin.update_policy(batch, torch.from_numpy(sample.weights)).numpy()
            replay2.update(sample.indices, priorities, sample.generations)
            errors.append(float(priorities.mean()))
        td_errors.append(np.mean(errors))
    if threaded:
        launched(loop)
    for (iterations, beta), td_error in zip(grants, td_errors, strict=True):
        laq.grant(iterations, beta)
        if not threaded:
            assert loop.run_once()
        found = ldq.peek(60.0)
        assert found is not None
        assert int(found[0]["iterations"][0]) == iterations
        assert found[0]["td_error"][0] == pytest.approx(td_error, rel=1e-4)
        ldq.release()
    loop.check()
    assert trainer.gradient_steps == 7
    np.testing.assert_allclose(weights_of(trainer), weights_of(twin), atol=1e-5)
    np.testing.assert_allclose(replay.retrieve(np.arange(CAPACITY)), replay2.retrieve(np.arange(CAPACITY)), rtol=1e-4)
    assert replay.statistics().updates == 7 * BATCH
    assert wsq.poll() is not None
    assert wsq.version == 1 + 7 // 3


def test_nothing_is_sampled_while_the_host_inserts(launched: Callable[[Worker], None]) -> None:
    loop, laq, ldq, _, _, _, replay, storage = loop_of()
    launched(loop)
    with loop.insertion_window():
        laq.grant(3, 0.4)
        assert ldq.peek(0.3) is None
        assert replay.statistics().samples == 0
        replay.insert(storage.insert(rows_of(100, 10)))
    assert ldq.peek(60.0) is not None
    assert replay.statistics().samples == 3 * BATCH


def test_an_error_in_the_training_loop_reaches_the_host(launched: Callable[[Worker], None]) -> None:
    loop, laq, _, _, bell, *_ = loop_of(Broken)
    seen = bell.value()
    launched(loop)
    laq.grant(5, 0.4)
    assert bell.wait(seen, 60.0)
    with pytest.raises(PearlError, match="The training loop stopped: ZeroDivisionError: the third step") as error:
        loop.check()
    assert isinstance(error.value.__cause__, ZeroDivisionError)
    with loop.insertion_window():
        pass  # a failed loop holds no lock


@pytest.mark.parametrize("setting", [1, 2])
@pytest.mark.parametrize(("trainer", "found"), [(Miscounting, r"shape \(1,\)"), (Forgetful, "a NoneType")])
def test_priorities_that_are_not_one_for_each_transition_are_refused(
    trainer: type[Tiny], found: str, setting: int
) -> None:
    if setting == 1:
        s = setting1(trainer)
        s.laq.assign(batches(1)[0], filled()[0])
        worker: Worker = s.worker
    else:
        worker, laq, *_, replay, _storage = loop_of(trainer)
        laq.grant(1, 0.4)
        before = replay.retrieve(np.arange(CAPACITY))
    message = rf"{trainer.__name__}\.update_policy\(\) must return .* shape \({BATCH},\), .*; found {found}"
    worker.run_inline()
    with pytest.raises(TrainerError, match=message):
        worker.check()
    if setting == 2:
        np.testing.assert_array_equal(replay.retrieve(np.arange(CAPACITY)), before)


# --- collection -------------------------------------------------------------------------------------------------------


def send(dcq: DataCollectionQueue, start: int, rows: int, episodes: int = 0, actor: int = 0) -> None:
    message = dcq.reserve()
    assert message is not None
    for name, column in rows_of(start, rows).items():
        message[name][:rows] = column
    message["episode_return"][:episodes] = np.arange(episodes) + start
    message["episode_length"][:episodes] = np.arange(episodes) + 1
    message["counts"][:] = (episodes, 4 * rows, actor, 9)
    message["span"][:] = (start, start + 0.5)
    dcq.publish(rows)


def test_the_collection_buffer_keeps_rows_in_order_and_counts() -> None:
    dcq = DataCollectionQueue(SPEC, rows=10, slots=2)
    buffer = CollectionBuffer(SPEC, rows=16, message_rows=10)
    assert buffer.take(dcq) is None
    for start, rows in ((0, 10), (10, 0), (10, 5)):
        assert not buffer.full
        send(dcq, start, rows, episodes=2, actor=3)
        summary = buffer.take(dcq)
        assert summary is not None
        assert {name: values.tolist() for name, values in summary.items()} == {
            "episode_return": [start, start + 1.0],
            "episode_length": [1, 2],
            "env_steps": [4 * rows],
            "actor": [3],
            "policy_version": [9],
            "rows": [rows],
            "span": [start, start + 0.5],
        }
        assert len(dcq) == 0
    assert buffer.count == 15
    send(dcq, 15, 10)
    assert buffer.take(dcq) is not None
    assert buffer.full
    taken = buffer.take_all()
    for name, column in rows_of(0, 25).items():
        np.testing.assert_array_equal(taken[name], column, err_msg=name)
    assert buffer.count == 0
    assert not buffer.full
    assert len(buffer.take_all()["obs"]) == 0


def test_a_summary_outlives_the_message() -> None:
    dcq = DataCollectionQueue(SPEC, rows=4, slots=1)
    buffer = CollectionBuffer(SPEC, rows=16, message_rows=4)
    send(dcq, 7, 4, episodes=1)
    summary = buffer.take(dcq)
    send(dcq, 50, 4, episodes=1)
    assert summary is not None
    assert summary["episode_return"].tolist() == [7.0]


class Ring(NamedTuple):
    capacity: int
    cursor: int


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_collisions_are_those_that_counting_finds(data: st.DataObject) -> None:
    capacity = data.draw(st.integers(1, 20))
    ring = Ring(capacity, data.draw(st.integers(0, capacity - 1)))
    rows = data.draw(st.integers(0, capacity))
    slots = st.lists(st.integers(0, capacity - 1), max_size=4)
    in_flight = data.draw(st.lists(slots, max_size=3))
    overwritten = {(ring.cursor + i) % capacity for i in range(rows)}
    expected = any(slot in overwritten for batch in in_flight for slot in batch)
    assert collides(ring, rows, [np.array(batch, np.int64) for batch in in_flight]) == expected


def test_collisions_agree_with_the_storage() -> None:
    storage, _ = filled()
    storage.insert(rows_of(100, CAPACITY - 3))
    taken = storage.next_indices(6)
    assert taken.tolist() == [61, 62, 63, 0, 1, 2]
    assert [slot for slot in range(CAPACITY) if collides(storage, 6, [np.array([slot])])] == sorted(taken)


# --- replay ratio -----------------------------------------------------------------------------------------------------

ratios = st.one_of(st.floats(0.05, 64), st.sampled_from([1.0, 0.25, 8.0]))


class Host:
    """A run's counters, moved as a session does: messages into a buffer, insertions when it is full, batches."""

    def __init__(self, train: TrainSpec, insertion_rows: int, message_rows: int) -> None:
        self.train, self.insertion_rows, self.message_rows = train, insertion_rows, message_rows
        self.counters = Counters()
        self.ratio = ReplayRatio(train, self.counters, insertion_rows + message_rows)

    def collect(self, rows: int) -> None:
        self.counters.collected += rows
        if self.counters.collected - self.counters.stored >= self.insertion_rows:
            self.counters.stored = self.counters.collected

    def train_batch(self) -> None:
        self.counters.samples += self.train.batch_size


@settings(max_examples=300, deadline=None)
@given(
    ratio=ratios,
    batch=st.integers(1, 512),
    starts=st.integers(0, 500),
    insertion_rows=st.integers(1, 300),
    message_rows=st.integers(1, 64),
    seed=st.integers(0, 2**32),
)
def test_training_or_collection_can_always_go_on(
    ratio: float, batch: int, starts: int, insertion_rows: int, message_rows: int, seed: int
) -> None:
    train = TrainSpec(batch_size=batch, replay_ratio=ratio, learning_starts=starts)
    host, rng = Host(train, insertion_rows, message_rows), random.Random(seed)
    counters = host.counters
    prefers_training = rng.random()
    for _ in range(600):
        may_train, may_collect = host.ratio.batches_allowed() > 0, host.ratio.collection_allowed()
        assert may_train or may_collect, f"deadlock at {counters}"
        if may_train and (not may_collect or rng.random() < prefers_training):
            host.train_batch()
        else:
            host.collect(rng.randint(1, message_rows))
        trained = counters.samples / ratio
        begin = max(starts, batch)
        # Never ahead of the data, and data never more than the documented lead ahead of training.
        assert trained <= max(0, counters.stored - begin) + 1e-6
        lead = insertion_rows + message_rows + math.ceil(batch / ratio)
        assert counters.collected - begin - trained <= lead + message_rows + 1e-6


@pytest.mark.parametrize("ratio", [0.125, 1.0, 8.0])
@pytest.mark.parametrize("eager", ["training", "collection"])
def test_the_achieved_ratio_is_the_one_asked_for(ratio: float, eager: str) -> None:
    host = Host(TrainSpec(batch_size=64, replay_ratio=ratio, learning_starts=1000), 128, 40)
    while host.counters.collected < 200_000:
        may_train = host.ratio.batches_allowed() > 0
        if may_train and (eager == "training" or not host.ratio.collection_allowed()):
            host.train_batch()
        else:
            host.collect(40)
    lead = 128 + 40 + 64 / ratio + 40
    assert host.ratio.achieved <= ratio
    assert host.ratio.achieved == pytest.approx(ratio, rel=lead / (200_000 - 1000))


def test_nothing_is_trained_before_learning_starts() -> None:
    host = Host(TrainSpec(batch_size=64, replay_ratio=4.0, learning_starts=100), 1, 10)
    host.collect(99)
    assert host.ratio.batches_allowed() == 0
    assert host.ratio.collection_allowed()
    # The transitions before learning starts are not owed any training: 16 more make the first batch.
    host.collect(16)
    assert host.ratio.batches_allowed() == 0
    host.collect(1)
    assert host.ratio.batches_allowed() == 1


def test_a_batch_must_be_stored_even_if_learning_starts_at_once() -> None:
    host = Host(TrainSpec(batch_size=64, replay_ratio=math.inf, learning_starts=0), 1, 10)
    host.collect(63)
    assert host.ratio.batches_allowed() == 0
    host.collect(1)
    assert host.ratio.batches_allowed() > 1000


def test_an_infinite_ratio_lets_both_run_free() -> None:
    host = Host(TrainSpec(batch_size=4, replay_ratio=math.inf, learning_starts=0), 1, 10)
    host.collect(10)
    for _ in range(1000):
        host.train_batch()
    assert host.ratio.batches_allowed() > 1000
    for _ in range(1000):
        host.collect(10)
    assert host.ratio.collection_allowed()


# --- rate -------------------------------------------------------------------------------------------------------------


def test_rates_leave_out_what_they_say(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("pearl.runtime.rate.time.monotonic", lambda: now[0])
    rate = StepRate()
    assert (rate.recent, rate.overall, rate.busy, rate.total_s) == (0.0, 0.0, 0.0, 0.0)
    rate.started()
    rate.trained(0, idle=False)
    assert (rate.recent, rate.overall) == (0.0, 0.0), "no time has passed"
    now[0] += 1.0
    rate.trained(10, idle=True)
    now[0] += 3.0  # waiting for data
    rate.started()
    rate.started()  # a second batch under way changes nothing
    now[0] += 1.0
    rate.trained(5, idle=False)
    now[0] += 1.0
    rate.trained(5, idle=True)
    assert rate.steps == 20
    assert rate.total_s == pytest.approx(6.0)
    assert rate.overall == pytest.approx(20 / 6)
    assert rate.busy == pytest.approx(20 / 3)
    assert rate.recent == pytest.approx(5.0)


def test_learners_may_count_the_seconds_of_their_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("pearl.runtime.rate.time.monotonic", lambda: now[0])
    rate = StepRate()
    rate.started()
    for _ in range(2):
        now[0] += 3.0
        rate.trained(10, idle=False, busy_s=1.0)
    assert (rate.steps, rate.timed_steps, rate.busy_s) == (20, 20, 2.0)
    assert rate.busy == 10.0
    assert rate.overall == pytest.approx(20 / 6)
    assert rate.recent == pytest.approx(10 / 3), "the last two steps are seconds apart"


def test_an_iteration_whose_beginning_was_not_seen_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("pearl.runtime.rate.time.monotonic", lambda: now[0])
    rate = StepRate()
    rate.started(whole=False)
    now[0] += 0.1
    rate.trained(1, idle=True)
    assert rate.busy == rate.overall == pytest.approx(10.0), "none was timed"
    rate.started(whole=False)
    now[0] += 0.1
    rate.trained(1, idle=False)
    for _ in range(2):
        now[0] += 0.9
        rate.started(whole=False)  # the clock runs: it saw the beginning
        now[0] += 0.1
        rate.trained(1, idle=False)
    assert (rate.steps, rate.timed_steps) == (4, 2)
    assert rate.busy == pytest.approx(1.0)
