"""Data flows: the order in which a run collects, trains and saves is one object, and the Session takes any."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from trainers import Counting, OwnTrainer

from pearl.actors.actor import message_rows
from pearl.algorithms import Batch
from pearl.algorithms.trainer import transition_of
from pearl.errors import ConfigurationError, DeviceError
from pearl.learner.torch_learner import TorchLearner
from pearl.replay import ReplayRequestQueue, make_replay_manager
from pearl.replay.storage import DataStorage
from pearl.runtime import (
    AssignmentQueue,
    CollectionBuffer,
    DataCollectionQueue,
    DoneQueue,
    HostIteration,
    LearnerWorker,
    Options,
    Program,
    Session,
    WeightSyncQueue,
    data_flow,
)
from pearl.runtime.data_flow import DataFlow, OffPolicy
from pearl.runtime.flow_control import FlowControl
from pearl.runtime.rate import StepRate
from pearl.runtime.run_state import Counters
from pearl.spec import ActorSpec, ReplaySpec, TrainSpec

HORIZON, BATCH = 32, 8
ACTORS = ActorSpec(env="Numbered-v0", envs_per_actor=1)
TRAIN = TrainSpec(batch_size=BATCH, learning_starts=0, priority_update_delay=0)
# The newest transitions, each once: what earlier rollouts left over is never reached.
REPLAY = ReplaySpec(capacity=2 * HORIZON, mode="lifo", max_times_sampled=1)


class Numbered(Counting):
    """The reward of a step is its number, over all episodes and environments of the process."""

    number = 0

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        obs, _, terminated, truncated, info = super().step(action)
        Numbered.number += 1
        return obs, float(Numbered.number), terminated, truncated, info


gym.register("Numbered-v0", Numbered)


class Recording(OwnTrainer):
    """Keeps the numbers of the steps that it trained on, by batch."""

    def __init__(self, observation_space: gym.spaces.Box, action_space: gym.spaces.Discrete) -> None:
        super().__init__(observation_space, action_space)
        self.trained: list[list[int]] = []

    def update_policy(self, batch: Batch, weights: torch.Tensor) -> torch.Tensor:
        self.trained.append([int(number) for number in batch.reward])
        return super().update_policy(batch, weights)


class OnPolicy:
    """Collects HORIZON transitions, hands them over once, drops them; what fills no batch is dropped unused."""

    insertion_rows = HORIZON

    def __init__(self, _replay: ReplaySpec, _actors: ActorSpec, train: TrainSpec) -> None:
        self._batch_size = train.batch_size
        self.versions: list[int] = []  # of the policy that collected each transition

    def begin(self, counters: Counters) -> None:
        self._counters = counters
        self._drop()

    def _drop(self) -> None:
        self._stored, self._samples = self._counters.stored, self._counters.samples

    def collected(self, rows: int, policy_version: int) -> None:
        self.versions += [policy_version] * rows

    def collection_allowed(self) -> bool:
        self.batches_allowed()
        return self._counters.collected - self._stored < HORIZON

    def insertion_wanted(self, rows: int, _age_s: float) -> bool:
        return self._counters.stored - self._stored + rows >= HORIZON

    def batches_allowed(self) -> int:
        rows = self._counters.stored - self._stored
        if rows < HORIZON:
            return 0
        left = (rows - (self._counters.samples - self._samples)) // self._batch_size
        if not left:
            self._drop()
        return left

    def checkpoint_allowed(self) -> bool:
        self.batches_allowed()
        return self._counters.collected == self._stored

    def set_replay_ratio(self, _ratio: float) -> None:
        raise ConfigurationError("On-policy training has no replay ratio.")

    @property
    def achieved_ratio(self) -> float:
        return self._counters.samples / max(1, self._counters.stored)

    def training_absent(self, _timesteps: int) -> str:
        return ""

    def why_no_training(self) -> str:
        return ""


def options(folder: Path, timesteps: int) -> Options:
    return Options(timesteps, 1, folder, folder / "checkpoints", 64, False, True, False, 1.0, 0, timesteps, None)


def run_setting_1(session: Session) -> Recording:
    """What a generated program does, after its constants."""
    with session:
        trainer = session.make_trainer("cpu")
        assert isinstance(trainer, Recording)
        learner = TorchLearner(trainer, device="cpu")
        replay, storage = make_replay_manager(REPLAY, seed=1), session.make_storage()
        session.attach(replay, storage)
        wsq = WeightSyncQueue(learner.weight_count)
        dcq = DataCollectionQueue(session.transition, session.message_rows, 2, session.bell)
        buffer = CollectionBuffer(session.transition, session.insertion_rows, session.message_rows)
        laq, ldq = AssignmentQueue(BATCH, session.transition, 1), DoneQueue(BATCH, 1, session.bell)
        rrq = ReplayRequestQueue(replay, max_batch=session.insertion_rows + session.message_rows, executor="inline")
        session.watch(rrq)
        session.launch(LearnerWorker(laq, ldq, wsq, session.bell, target=learner, weight_sync_interval=1))
        session.launch_actors([dcq], wsq)
        iteration = HostIteration(rrq, laq, ldq, BATCH, storage)
        while session.running():
            if session.wants_data(buffer) and (message := buffer.take(dcq)):
                session.collected(message)
            iteration.advance(session)
            if session.insertion_due(buffer):
                rrq.write_insert(storage.insert(buffer.take_all()))
                session.inserted()
            session.wait()
        assert session.finish() == 0
        return trainer


def on_policy_session(folder: Path) -> Session:
    return Session(
        Program("on-policy", 0.0),
        options(folder, 300),
        trainer_class=Recording,
        settings={},
        actors=ACTORS,
        replay=REPLAY,
        train=TRAIN,
        data_flow=OnPolicy,
    )


def test_a_device_that_is_not_there_is_named(tmp_path: Path) -> None:
    session = on_policy_session(tmp_path)
    with pytest.raises(DeviceError, match=r"trains on cuda:99, which cannot be used here: .+\. Compose it again"):
        session.make_trainer("cuda:99")


def test_a_session_takes_an_on_policy_flow(tmp_path: Path) -> None:
    """Each rollout is trained on once, whole batches of it, before the next is collected."""
    session = on_policy_session(tmp_path)
    batches = run_setting_1(session).trained
    per_rollout = HORIZON // BATCH
    assert len(batches) >= 8 * per_rollout
    assert len(batches) % per_rollout == 0
    rollouts = np.array(batches).reshape(-1, HORIZON)
    newest = 0
    for rollout in rollouts:
        assert len(np.unique(rollout)) == HORIZON  # each transition once
        assert rollout.min() > newest  # none of an earlier rollout
        newest = rollout.max()
    with pytest.raises(ConfigurationError, match="no replay ratio"):
        session.set_replay_ratio(2.0)
    assert len(list((tmp_path / "checkpoints").glob("checkpoint-*"))) >= 1


def test_off_policy_goes_by_replay_ratio_and_learning_starts() -> None:
    train = TrainSpec(batch_size=10, replay_ratio=2.0, learning_starts=100)
    flow: DataFlow = OffPolicy(ReplaySpec(capacity=1000), ACTORS, train)
    counters = Counters()
    flow.begin(counters)
    assert flow.collection_allowed()
    assert not flow.batches_allowed()
    assert "will not train" in flow.training_absent(50)
    assert not flow.training_absent(500)
    counters.collected = counters.stored = 110
    assert flow.batches_allowed() == 2  # 2 samples for each of 10 transitions
    counters.samples = 20
    assert not flow.batches_allowed()
    assert flow.achieved_ratio == 2.0
    counters.collected += flow.insertion_rows + message_rows(ACTORS, train) + math.ceil(10 / 2.0) + 1
    assert not flow.collection_allowed()  # it waits for training
    flow.set_replay_ratio(4.0)
    assert flow.checkpoint_allowed()


def test_rollouts_are_handed_over_as_a_whole_and_have_the_ratio_that_was_trained() -> None:
    flow: DataFlow = data_flow.OnPolicy(HORIZON, epochs=4)
    counters = Counters()
    flow.begin(counters)
    assert flow.achieved_ratio == 0.0
    assert not flow.insertion_wanted(HORIZON - 1, 1.0)
    assert flow.insertion_wanted(HORIZON, 0.0)
    assert "will not train: a rollout has 32 steps" in flow.training_absent(HORIZON - 1)
    assert not flow.training_absent(HORIZON)
    counters.env_steps = counters.stored = 2 * HORIZON
    counters.samples = 3 * counters.stored  # a target_kl ended some epochs
    assert flow.achieved_ratio == 3.0
    assert not flow.training_absent(counters.env_steps + 1)
    flow.set_replay_ratio(4.0)
    with pytest.raises(ConfigurationError, match=r"trains 4 times \(epochs\).*found 2"):
        flow.set_replay_ratio(2.0)


def test_off_policy_inserts_a_full_buffer_or_waiting_data() -> None:
    flow = OffPolicy(ReplaySpec(capacity=1000), ACTORS, TrainSpec(batch_size=10))
    assert flow.insertion_wanted(flow.insertion_rows, 0.0)
    assert not flow.insertion_wanted(flow.insertion_rows - 1, 0.0)
    assert flow.insertion_wanted(1, 1.0)


# --- the rules that every flow must respect ---------------------------------------------------------------------------


class Fixed(OffPolicy):
    """Allows what it is told to; notes what was collected."""

    def __init__(self) -> None:
        self.batches, self.collects, self.wants = 0, True, True
        self.noted: list[tuple[int, int]] = []

    def batches_allowed(self) -> int:
        return self.batches

    def collection_allowed(self) -> bool:
        return self.collects

    def insertion_wanted(self, rows: int, age_s: float) -> bool:
        return self.wants

    def collected(self, rows: int, policy_version: int) -> None:
        self.noted.append((rows, policy_version))


class Flow:
    """A FlowControl on a storage of 100 slots, of which 0 is the next; a clock that stands still; an empty buffer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, delay: int = 0, serial: bool = False) -> None:
        self.now = 100.0
        monkeypatch.setattr("pearl.runtime.rate.time.monotonic", lambda: self.now)
        self.counters, self.rate, self.rules = Counters(), StepRate(), Fixed()
        transition = transition_of(Recording, spaces.Box(0, 1, (1,)), spaces.Discrete(2))
        storage = DataStorage(transition, 100)
        self.buffer = CollectionBuffer(transition, 8, 8)
        self.control = FlowControl(
            self.counters, self.rules, storage, self.rate, batch_size=4, update_delay=delay, serial=serial
        )

    def sample(self, batch: int, *slots: int) -> None:
        self.control.sampling()
        self.control.sampled(batch, np.array(slots))


def test_sampling_runs_ahead_by_the_delay_one_request_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    flow = Flow(monkeypatch, delay=1)
    control, rules = flow.control, flow.rules
    assert not control.may_sample(), "the flow allows no batch"
    rules.batches = 1
    assert control.may_sample()
    control.sampling()
    rules.batches = 9
    assert not control.may_sample(), "a request is under way"
    control.sampled(0, np.array([50]))
    rules.batches = 1
    assert not control.may_sample(), "those that are allowed include those in flight"
    rules.batches = 2
    assert control.may_sample()
    flow.sample(1, 60)
    rules.batches = 9
    assert not control.may_sample(), "one batch, and one ahead of it"
    control.trained(1, 0)
    assert control.may_sample()
    for name in ("draining", "held"):
        setattr(control, name, True)
        assert not control.may_sample()
        setattr(control, name, False)
    assert (flow.counters.gradient_steps, flow.counters.samples) == (1, 4)


def test_an_insertion_waits_for_batches_of_its_slots_and_sampling_then_for_a_full_buffer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flow = Flow(monkeypatch, delay=3)
    control, buffer = flow.control, flow.buffer
    flow.rules.batches = 9
    assert not control.insertion_due(buffer), "there is nothing"
    buffer.count = 7
    control.sampling()
    assert not control.insertion_due(buffer), "a sampling under way may return any slot"
    control.sampled(0, np.array([7]))
    assert control.insertion_due(buffer), "slots 0 to 6"
    buffer.count = 8
    assert not control.insertion_due(buffer)
    assert not control.may_sample(), "more batches could delay a full buffer forever"
    control.trained(1, 0)
    assert control.insertion_due(buffer)
    assert control.may_sample()
    flow.rules.wants = False
    assert not control.insertion_due(buffer)
    control.draining = True
    assert control.insertion_due(buffer)


def test_messages_are_taken_where_the_flow_allows_and_the_buffer_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    flow = Flow(monkeypatch)
    control, buffer = flow.control, flow.buffer
    assert control.wants_data(buffer)
    flow.rules.collects = False
    assert not control.wants_data(buffer)
    control.held = True
    assert control.wants_data(buffer), "while training is held"
    buffer.count = 8
    assert not control.wants_data(buffer)
    buffer.count, control.draining = 0, True
    assert not control.wants_data(buffer)
    assert not control.has_progressed()
    control.collected(5, 6, 3)
    assert control.has_progressed()
    assert not control.has_progressed()
    assert flow.rules.noted == [(5, 3)]
    assert (flow.counters.collected, flow.counters.env_steps, flow.counters.stored) == (5, 6, 0)
    assert not control.idle
    control.inserted()
    assert control.idle
    assert flow.counters.stored == 5


def test_whatever_happens_is_progress_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without progress, the host's loop waits."""
    control = Flow(monkeypatch).control
    for happens in (
        lambda: control.collected(1, 1, 0),
        control.inserted,
        control.sampling,
        lambda: control.sampled(0, np.array([1])),
        lambda: control.trained(1, 0),
        lambda: control.granted(1),
        lambda: control.trained(1),
    ):
        assert not control.has_progressed()
        happens()
        assert control.has_progressed()


def test_setting_2_is_granted_what_the_flow_allows_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    flow = Flow(monkeypatch)
    control = flow.control
    assert control.iterations_to_grant() == 0
    flow.rules.batches = 9
    assert control.iterations_to_grant() == 1, "their speed is not known yet"
    control.granted(1)
    assert control.iterations_to_grant() == 0, "one is under way"
    flow.now += 0.005
    control.trained(1)
    assert control.iterations_to_grant() == 4, "20 ms"
    flow.rules.batches = 3
    assert control.iterations_to_grant() == 3
    for name in ("draining", "held"):
        setattr(control, name, True)
        assert control.iterations_to_grant() == 0
        setattr(control, name, False)
    control.granted(3)
    control.trained(3, gradient_steps=7, samples=5)
    assert (flow.counters.gradient_steps, flow.counters.samples) == (8, 9)
    serial = Flow(monkeypatch, serial=True)
    serial.rules.batches = 9
    serial.rate.started()
    serial.now += 0.005
    serial.rate.trained(1, idle=True)
    assert serial.control.iterations_to_grant() == 1


def test_the_clock_of_training_stops_while_nothing_is_under_way_and_nothing_may_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flow = Flow(monkeypatch, delay=1)
    control, rate = flow.control, flow.rate

    def train(batch: int) -> float:
        flow.now += 1.0
        control.trained(1, batch)
        flow.now += 10.0  # until the next batch
        return rate.busy_s

    flow.sample(0, 1)
    flow.sample(1, 2)
    assert train(0) == 1.0
    assert train(1) == 12.0, "the second batch was under way"
    flow.sample(2, 1)
    assert train(2) == 13.0, "it waited for data"
    flow.rules.batches = 1
    flow.sample(3, 1)
    assert train(3) == 14.0
    flow.sample(4, 1)
    assert train(4) == 25.0, "it could have been sampled at once"
    control.draining = True
    flow.sample(5, 1)
    assert train(5) == 36.0
    flow.sample(6, 1)
    assert train(6) == 37.0, "while the run drains, nothing may begin"


def test_the_iteration_of_setting_1_is_written_once() -> None:
    """Programs run, and the profiler times, the same lines."""
    root = Path(__file__).parents[1]
    sources = [f for folder in ("pearl", "composer", "runtime_templates") for f in (root / folder).rglob("*.[pj]*")]
    found = {f.name for f in sources if f.suffix in (".py", ".j2") and "rrq.write_sample(" in f.read_text()}
    assert found == {"host_iteration.py"}
    users = {f.name for f in sources if f.suffix in (".py", ".j2") and "HostIteration(rrq" in f.read_text()}
    assert users == {"setting1.py.j2", "messages.py"}
