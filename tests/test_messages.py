"""What messages say beyond their data: the policy's version, the actors' first priorities, the id of a batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn
from trainers import OwnTrainer, Prioritizing, TinyDQN, by_position

from pearl.actors.actor import Actor, ActorSetup
from pearl.algorithms.trainer import transition_of
from pearl.errors import TrainerError
from pearl.ipc.queues import Bell, WeightSyncQueue
from pearl.learner.protocol import StepResult
from pearl.learner.torch_learner import TorchLearner
from pearl.replay import ReplayRequestQueue, Sample, make_replay_manager
from pearl.replay.storage import DataStorage
from pearl.runtime.checkpoint import load_checkpoint
from pearl.runtime.collection import CollectionBuffer
from pearl.runtime.data_flow import OffPolicy
from pearl.runtime.flow_control import FlowControl
from pearl.runtime.host_iteration import HostIteration
from pearl.runtime.queues import DataCollectionQueue
from pearl.runtime.rate import StepRate
from pearl.runtime.run_state import Counters
from pearl.runtime.serial import InlineActor
from pearl.runtime.workers import AssignmentQueue, DoneQueue
from pearl.spec import ActorSpec, ReplaySpec, TrainSpec, TransitionSpec

OBS, ACTIONS = spaces.Box(-5, 5, (4,), np.float32), spaces.Discrete(2)
ACTORS = ActorSpec("CartPole-v1", envs_per_actor=2)


@pytest.mark.parametrize(
    ("setting", "n_step", "options"), [(1, 3, ()), pytest.param(2, 1, ("--serial",), marks=pytest.mark.slow)]
)
def test_first_priorities_come_from_the_actor_to_the_replay(
    tmp_path: Path, quick_profiles: None, setting: int, n_step: int, options: tuple[str, ...]
) -> None:
    from programs import make_program, run

    program = make_program(tmp_path, setting=setting, trainer=Prioritizing, training={"n_step": n_step})
    arguments = ("--timesteps", "400", "--eval-episodes", "0", "--run-dir", str(tmp_path / "run"))
    code, output = run(program, *options, *arguments, "--checkpoint-dir", str(tmp_path / "saved"))
    assert code == 0, output
    arrays = load_checkpoint(tmp_path / "saved").arrays
    stored = len(arrays["storage/obs"])
    assert stored >= 390
    expected = by_position({"obs": arrays["storage/obs"]}, None)
    # The Replay Manager adds its epsilon of 1e-6.
    np.testing.assert_allclose(arrays["replay/priorities"][:stored], expected, rtol=0, atol=2e-6)
    assert len(np.unique(expected)) > 50


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda _columns, _policy: np.ones(1), r"must have the shape \(8,\).*found \(1,\)"),
        (lambda columns, _policy: np.full(len(columns["obs"]), np.nan), "at least 0; found nan"),
        (lambda columns, _policy: -np.ones(len(columns["obs"])), r"at least 0; found -1"),
    ],
)
def test_a_first_priority_that_is_none_is_named(make: Callable[..., np.ndarray], message: str) -> None:
    transition = transition_of(TinyDQN, OBS, ACTIONS).with_priority(make)
    actor = Actor(ActorSetup(TinyDQN, {}, ACTORS, TrainSpec(), seed=0, transition=transition))
    dcq = DataCollectionQueue(transition, 10, 1)
    space = dcq.reserve()
    assert space is not None
    try:
        with pytest.raises(TrainerError, match=message):
            actor.collect(space)
    finally:
        actor.close()


def test_messages_tell_the_version_of_the_policy_that_acted() -> None:
    transition = transition_of(TinyDQN, OBS, ACTIONS)
    setup = ActorSetup(TinyDQN, {}, ACTORS, TrainSpec(), seed=0, transition=transition)
    dcq = DataCollectionQueue(transition, setup.message_rows(), 2)
    trainer = TinyDQN(OBS, ACTIONS)
    learner = TorchLearner(trainer)
    wsq, weights = WeightSyncQueue(learner.weight_count), np.zeros(learner.weight_count, np.float32)
    actor, buffer = InlineActor(setup, dcq, wsq), CollectionBuffer(transition, 64, setup.message_rows())
    versions = []
    for publishes in (0, 1, 0, 3):
        for _ in range(publishes):
            wsq.write(weights)
        assert actor.run_once()
        message = buffer.take(dcq)
        assert message is not None
        versions.append(int(message["policy_version"][0]))
    actor.close()
    assert versions == [0, 1, 1, 4]


def test_what_is_collected_outlives_its_slot_of_the_queue_and_is_as_old_as_its_first_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr("pearl.runtime.collection.time.monotonic", lambda: now)
    settings = {"normalize_observations": True, "reward_standardization": "returns"}
    transition = transition_of(TinyDQN, OBS, ACTIONS, settings).with_priority(by_position)
    dcq, buffer = DataCollectionQueue(transition, 4, slots=1), CollectionBuffer(transition, 8, 4)
    assert buffer.take(dcq) is None
    summaries = []
    for number in (1, 2):  # the second message is written into the arrays of the first
        message = dcq.reserve()
        assert message is not None
        for column in message.values():
            column[:] = number
        dcq.publish(rows=number + 1)
        summaries.append(buffer.take(dcq))
        now += 5.0
    assert buffer.age_s == 10.0
    for number, summary in enumerate(summaries, 1):
        assert summary is not None
        assert summary.pop("rows") == [number + 1]
        assert {"episode_return", "episode_length", *(f.name for f in transition.statistics)} < set(summary)
        for name, values in summary.items():
            np.testing.assert_array_equal(values, np.full_like(values, number), name)
    columns = buffer.take_all()
    assert buffer.priorities is not None
    for column in (*columns.values(), buffer.priorities):
        np.testing.assert_array_equal(column.reshape(5, -1)[:, 0], [1, 1, 2, 2, 2])
    assert (buffer.count, buffer.age_s) == (0, 0.0)


def test_a_batch_that_comes_back_first_may_be_overwritten_first() -> None:
    """Batches are known by their ids, whatever the order in which they come back."""
    replay, train, counters = ReplaySpec(capacity=100), TrainSpec(batch_size=4, learning_starts=0), Counters()
    data_flow, rate = OffPolicy(replay, ACTORS, train), StepRate()
    data_flow.begin(counters)
    transition = TransitionSpec.from_spaces(OBS, ACTIONS)
    storage = DataStorage(transition, 100)
    options: dict[str, Any] = {"batch_size": 4, "update_delay": 3, "serial": True}
    flow = FlowControl(counters, data_flow, storage, rate, **options)
    buffer = CollectionBuffer(transition, 8, 8)
    buffer.count = 8  # the next insertion takes slots 0 to 7
    flow.draining = True  # so that whatever waits is to be inserted
    for batch, slot in ((0, 50), (1, 3), (2, 60)):
        flow.sampling()
        flow.sampled(batch, np.array([slot]))
    assert not flow.insertion_due(buffer)
    flow.trained(1, 2)
    assert not flow.insertion_due(buffer)
    flow.trained(1, 1)
    assert flow.insertion_due(buffer)
    with pytest.raises(KeyError):
        flow.trained(1, 1)
    flow.trained(1, 0)
    assert counters.gradient_steps == 3


class Eager:
    """Samples three batches as soon as it can; notes what it is told."""

    beta = 0.4

    def __init__(self) -> None:
        self.requested = 0
        self.assigned: dict[int, np.ndarray] = {}
        self.trained_batches: list[int] = []

    def may_sample(self) -> bool:
        return self.requested < 3 and self.requested == len(self.assigned)

    def sampling(self) -> None:
        self.requested += 1

    def sampled(self, batch: int, indices: np.ndarray) -> None:
        self.assigned[batch] = indices.copy()

    def trained(self, td_error: float, *, batch: int) -> None:
        self.trained_batches.append(batch)


def test_a_learner_may_answer_in_any_order() -> None:
    transition, bell, pace = TransitionSpec.from_spaces(OBS, ACTIONS), Bell(), Eager()
    replay, storage = make_replay_manager(ReplaySpec(capacity=64, alpha=1.0), seed=0), DataStorage(transition, 64)
    replay.insert(storage.insert({f.name: np.zeros((64, *f.shape), f.dtype) for f in transition.fields}))
    laq, ldq = AssignmentQueue(4, transition, 3), DoneQueue(4, 3, bell)
    with ReplayRequestQueue(replay, max_batch=64, executor="inline") as rrq:
        iteration = HostIteration(rrq, laq, ldq, 4, storage)
        for _ in range(6):
            iteration.advance(pace)
        assert list(pace.assigned) == [0, 1, 2]
        taken = []
        while (found := laq.peek()) is not None:
            taken.append({name: column.copy() for name, column in found[0].items()})
            laq.release()
        for message in reversed(taken):
            done = ldq.reserve()
            assert done is not None
            for name in ("batch", "indices", "generations"):
                done[name][:] = message[name]
            done["priorities"][:] = 10.0 + message["batch"][0]
            ldq.publish()
        for _ in range(3):
            iteration.advance(pace)
    assert pace.trained_batches == [2, 1, 0]
    for batch, indices in pace.assigned.items():
        later = np.concatenate([[-1], *(other for name, other in pace.assigned.items() if name < batch)])
        own = indices[~np.isin(indices, later)]  # what no batch that came back after it has set again
        np.testing.assert_allclose(replay.retrieve(own), 10.0 + batch, atol=1e-5)


def test_a_learner_keeps_gradients_when_asked() -> None:
    """They are what plain autograd finds, and what the optimizer then takes."""
    torch.manual_seed(0)
    trainer = OwnTrainer(OBS, ACTIONS)
    twin = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
    twin.load_state_dict(trainer.network.state_dict())
    rng = np.random.default_rng(0)
    obs, next_obs = rng.standard_normal((2, 8, 4), np.float32)
    reward, discount, weights = rng.standard_normal(8, np.float32), np.full(8, 0.9, np.float32), np.ones(8, np.float32)
    batch = {"obs": obs, "action": np.arange(8) % 2, "reward": reward, "next_obs": next_obs, "discount": discount}
    with torch.no_grad():
        target = torch.from_numpy(reward) + 0.9 * twin(torch.from_numpy(next_obs)).amax(dim=1)
    values = twin(torch.from_numpy(obs))[torch.arange(8), torch.arange(8) % 2]
    torch.autograd.backward((values - target).square().mean())
    expected = torch.cat([p.grad.reshape(-1) for p in twin.parameters() if p.grad is not None])
    plain: StepResult = TorchLearner(OwnTrainer(OBS, ACTIONS)).step(batch, weights)
    assert plain.gradients is None
    learner = TorchLearner(trainer, keep_gradients=True)
    before = torch.cat([p.detach().reshape(-1).clone() for p in trainer.network.parameters()])
    found = learner.step(batch, weights).gradients
    assert found is not None
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-5, atol=1e-7)
    after = torch.cat([p.detach().reshape(-1) for p in trainer.network.parameters()])
    torch.testing.assert_close(before - 1e-2 * torch.from_numpy(found), after)
    again = learner.step(batch, weights).gradients
    assert again is not None
    assert not np.array_equal(found, again)


def test_a_sample_has_no_id_of_its_own() -> None:
    """Whoever assigns a batch by hand need not number it."""
    laq = AssignmentQueue(2, None, 1)
    laq.assign(Sample(np.arange(2), np.ones(2, np.float32), np.ones(2, np.uint32)))
    found = laq.peek()
    assert found is not None
    assert found[0]["batch"].tolist() == [0]


def test_an_assignment_queue_keeps_its_columns_in_another_process() -> None:
    transition = TransitionSpec.from_spaces(OBS, ACTIONS)
    storage, laq = DataStorage(transition, 8), AssignmentQueue(2, transition, 1)
    storage.insert({f.name: np.ones((8, *f.shape), f.dtype) for f in transition.fields})
    other = AssignmentQueue.__new__(AssignmentQueue)
    other.__setstate__(laq.__getstate__())
    other.assign(Sample(np.arange(2), np.ones(2, np.float32), np.ones(2, np.uint32)), storage)
    found = laq.peek()
    assert found is not None
    assert (found[0]["obs"] == 1).all()
