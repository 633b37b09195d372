"""The policy server: actors get the actions of their own policy, in batches, whatever dies on the way."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from emulated_cuda_graphs import EmulatedGraphs
from gymnasium import spaces
from policies import BOUNDED, IMAGE, TORQUES, VECTOR, MaskedDQN, MaskedPPO, NormalizedPPO, ScaledSAC, WideDQN
from references import needs_cuda

from pearl.actors.served_policy import InferenceQueue, PolicyService, ServedPolicy
from pearl.actors.torch_policy import TorchPolicy
from pearl.algorithms import DDPG, DQN, PPO, TD3
from pearl.algorithms.on_policy import rollout_transition
from pearl.algorithms.trainer import make_trainer, policy_snapshot, transition_of
from pearl.errors import TrainerError
from pearl.ipc.queues import Bell, WeightSyncQueue
from pearl.runtime.policy_inference import PolicyInference
from pearl.runtime.policy_server import PolicyServer
from pearl.spec import TransitionSpec

ROWS = (3, 5, 2)  # environments of each actor
EACH_DEVICE = ["cpu", "emulated", pytest.param("cuda", marks=[pytest.mark.cuda, needs_cuda])]
POLICIES: list[tuple[type, gym.Space[Any], gym.Space[Any]]] = [
    (WideDQN, VECTOR, spaces.Discrete(4)),
    (DQN, IMAGE, spaces.Discrete(3)),
    (DDPG, VECTOR, TORQUES),
    (TD3, BOUNDED, TORQUES),
    (ScaledSAC, BOUNDED, TORQUES),
    (NormalizedPPO, VECTOR, TORQUES),
    (PPO, VECTOR, spaces.MultiDiscrete([3, 2])),
]
each_policy = pytest.mark.parametrize(("trainer", "observations", "actions"), POLICIES, ids=lambda v: str(v)[:30])


def transition(trainer: type, observations: gym.Space[Any], actions: gym.Space[Any]) -> TransitionSpec:
    columns = rollout_transition if issubclass(trainer, PPO) else transition_of
    return columns(trainer, observations, actions, {})


def observed(space: gym.Space[Any], rows: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    shape = (rows, *(space.shape or ()))
    if space.dtype == np.uint8:
        return rng.integers(0, 256, shape, np.uint8)
    return rng.uniform(-1.0, 1.0, shape).astype(np.float32)


class Served:
    """A server in a thread of this process, and the policies of its actors."""

    def __init__(
        self,
        trainer: type,
        observations: gym.Space[Any],
        actions: gym.Space[Any],
        device: str = "cpu",
        rows: Sequence[int] = ROWS,
    ) -> None:
        spec, bell = transition(trainer, observations, actions), Bell()
        self.queues = [InferenceQueue(spec, count, bell) for count in rows]
        self.own = make_trainer(trainer, observations, actions, seed=1)
        self.wsq = WeightSyncQueue(len(policy_snapshot(self.own)))
        self.wsq.write(policy_snapshot(self.own))
        self.graphs: Any = EmulatedGraphs() if device == "emulated" else None
        place = torch.device("cpu" if device == "emulated" else device)
        there = make_trainer(trainer, observations, actions, seed=2, device=str(place))
        self.inference = PolicyInference(there, place, self.queues[0].fields, sum(rows), self.graphs)
        self.server = PolicyServer(self.inference, self.queues, self.wsq.reader(), bell)
        self.policies = [ServedPolicy(PolicyService(queue, None)) for queue in self.queues]
        self.local = TorchPolicy(self.own)
        self._thread = threading.Thread(target=self.server.serve, daemon=True)

    def together(self, ask: Callable[[int], Any]) -> list[Any]:
        """What `ask(index)` returns for each actor, all of which wait before the server looks."""
        found: dict[int, Any] = {}
        threads = [
            threading.Thread(target=lambda i=i: found.update({i: ask(i)}), daemon=True) for i in range(len(self.queues))
        ]
        for thread in threads:
            thread.start()
        while any(len(queue) == 0 for queue in self.queues):
            pass
        assert self.server.answer() == len(self.queues)
        for thread in threads:
            thread.join(30)
        return [found[index] for index in range(len(threads))]

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        for queue in self.queues:
            queue.close()
        if self._thread.ident is not None:
            self._thread.join(30)
            assert not self._thread.is_alive()


@pytest.fixture
def served() -> Iterator[Callable[..., Served]]:
    made: list[Served] = []

    def make(*arguments: Any, **further: Any) -> Served:
        made.append(Served(*arguments, **further))
        return made[-1]

    yield make
    for one in made:
        one.stop()


def assert_alike(found: np.ndarray, expected: np.ndarray) -> None:
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("device", EACH_DEVICE)
@each_policy
def test_actors_get_their_own_policys_actions_from_one_batch(
    served: Callable[..., Served], trainer: type, observations: Any, actions: Any, device: str
) -> None:
    found = served(trainer, observations, actions, device)
    obs = [observed(observations, rows, seed) for seed, rows in enumerate(ROWS)]
    for number in range(1, 4):  # as written, recorded, replayed
        actual = found.together(lambda i: found.policies[i].act(obs[i]))
        assert (found.server.batches, found.server.requests) == (number, 3 * number)
        for own, there in zip(obs, actual, strict=True):
            assert_alike(there, found.local.act(own).reshape(there.shape))
    assert [policy.version for policy in found.policies] == [1, 1, 1]


@pytest.mark.parametrize("device", EACH_DEVICE)
def test_actions_are_drawn_by_the_actors_own_noise(served: Callable[..., Served], device: str) -> None:
    found = served(ScaledSAC, BOUNDED, TORQUES, device)
    obs = [observed(BOUNDED, rows) for rows in ROWS]
    noise = [np.random.default_rng(rows).standard_normal((rows, 2), np.float32) for rows in ROWS]
    for _ in range(3):
        actual = found.together(lambda i: found.policies[i].sample(obs[i], noise[i]))
        for own, drawn, there in zip(obs, noise, actual, strict=True):
            assert_alike(there, found.local.sample(own, drawn))


@pytest.mark.parametrize("device", EACH_DEVICE)
@pytest.mark.parametrize(
    ("trainer", "actions"), [(NormalizedPPO, TORQUES), (PPO, spaces.Discrete(3)), (MaskedPPO, spaces.Discrete(3))]
)
def test_rollouts_get_log_probabilities_and_values(
    served: Callable[..., Served], trainer: type, actions: Any, device: str
) -> None:
    found = served(trainer, VECTOR, actions, device)
    size, rng = int(np.prod(actions.shape or ())), np.random.default_rng(0)
    like = found.queues[0].arrays(0)["action"]
    masks = np.array([True, False, True]) if trainer is MaskedPPO else None

    def explore(policy: Any, index: int) -> list[np.ndarray]:
        rows = ROWS[index]
        results = [np.empty((rows, *like.shape[1:]), like.dtype), *np.empty((2, rows), np.float32)]
        allowed = None if masks is None else np.tile(masks, (rows, 1))
        policy.explore_into(observed(VECTOR, rows), noise[index], *results, allowed)
        return results

    for _ in range(3):
        noise = [rng.random((rows, size), np.float32) for rows in ROWS]
        for index, actual in enumerate(found.together(lambda i: explore(found.policies[i], i))):
            for there, own in zip(actual, explore(found.local, index), strict=True):
                assert_alike(there, own)
            assert masks is None or 1 not in actual[0]
        for index, values in enumerate(found.together(lambda i: found.policies[i].value(observed(VECTOR, ROWS[i])))):
            assert_alike(values, found.local.value(observed(VECTOR, ROWS[index])))


@pytest.mark.parametrize("device", EACH_DEVICE)
def test_masked_actions_are_not_chosen(served: Callable[..., Served], device: str) -> None:
    found = served(MaskedDQN, VECTOR, spaces.Discrete(4), device)
    masks = [np.random.default_rng(rows).random((rows, 4)) < 0.5 for rows in ROWS]
    for mask in masks:
        mask[:, 0] = True
    actual = found.together(lambda i: found.policies[i].act(observed(VECTOR, ROWS[i]), masks[i]))
    for index, there in enumerate(actual):
        assert_alike(there, found.local.act(observed(VECTOR, ROWS[index]), masks[index]))
        assert masks[index][np.arange(ROWS[index]), there].all()


def test_different_requests_that_wait_together_are_answered_apart(served: Callable[..., Served]) -> None:
    found = served(NormalizedPPO, VECTOR, TORQUES)
    obs = [observed(VECTOR, rows) for rows in ROWS]
    asks = [found.policies[0].act, found.policies[1].value, found.policies[2].act]
    actual = found.together(lambda i: asks[i](obs[i]))
    assert (found.server.batches, found.server.requests) == (2, 3)
    assert_alike(actual[0], found.local.act(obs[0]))
    assert_alike(actual[1], found.local.value(obs[1]))
    assert_alike(actual[2], found.local.act(obs[2]))


@pytest.mark.parametrize("device", EACH_DEVICE)
def test_the_newest_weights_act(served: Callable[..., Served], device: str) -> None:
    found = served(DDPG, VECTOR, TORQUES, device)
    for version in range(1, 5):
        if version > 1:
            found.wsq.write(weights := policy_snapshot(found.own) * np.float32(0.5))
            found.local.load_weights(weights)
        actual = found.together(lambda i: found.policies[i].act(observed(VECTOR, ROWS[i])))
        assert_alike(actual[1], found.local.act(observed(VECTOR, ROWS[1])))
        assert [policy.version for policy in found.policies] == [version] * 3


def test_more_rows_than_a_slot_holds_come_in_parts(served: Callable[..., Served]) -> None:
    found = served(DDPG, VECTOR, TORQUES)
    found.start()
    obs = observed(VECTOR, 8)
    assert_alike(found.policies[0].act(obs), found.local.act(obs))


def test_a_slot_that_a_dead_actor_left_full_goes_to_the_next_one(served: Callable[..., Served]) -> None:
    found = served(DDPG, VECTOR, TORQUES)
    slot = found.queues[0].reserve()
    assert slot is not None
    slot["obs"][:] = 100.0
    found.queues[0].publish(3)  # and then it dies
    successor = ServedPolicy(PolicyService(found.queues[0], None))
    found.start()
    obs = observed(VECTOR, 3)
    assert_alike(successor.act(obs), found.local.act(obs))


def test_an_actor_gives_signs_of_life_while_it_waits(
    served: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pearl.actors.served_policy._WAIT_S", 0.01)
    found = served(DDPG, VECTOR, TORQUES)
    signs: list[None] = []

    def waiting() -> None:
        signs.append(None)
        if len(signs) == 3:
            found.start()

    policy = ServedPolicy(PolicyService(found.queues[0], None), waiting)
    assert policy.act(observed(VECTOR, 3)).shape == (3, 2)
    assert len(signs) >= 3


# --- recording --------------------------------------------------------------------------------------------------------


class OwnAct(WideDQN):
    def get_action(self, obs: torch.Tensor, action_masks: torch.Tensor | None = None) -> torch.Tensor:
        return super().get_action(obs, action_masks)


class WaitingDQN(WideDQN):
    """The network waits for a number of the GPU, which a recording cannot."""

    def build_q_network(self) -> torch.nn.Module:
        class Waits(torch.nn.Module):
            def forward(self, obs: torch.Tensor) -> torch.Tensor:
                return obs * float(obs.abs().max() >= 0)

        return torch.nn.Sequential(Waits(), torch.nn.Linear(5, 4))


def acted(found: Served, rows: Sequence[int], times: int = 3) -> None:
    for _ in range(times):
        for policy, count in zip(found.policies, rows, strict=True):
            obs = observed(VECTOR, count, count)
            assert_alike(policy.act(obs), found.local.act(obs))


def test_each_size_of_batch_is_recorded_once_as_are_weights(served: Callable[..., Served]) -> None:
    found = served(WideDQN, VECTOR, spaces.Discrete(4), "emulated", rows=(7,))
    found.start()
    for count in range(1, 8):  # batches of 1, 2, 4 and 7
        acted(found, [count])
    for _ in range(3):
        found.wsq.write(policy_snapshot(found.own))
        acted(found, [1])
    assert found.graphs.captures == 4 + 1
    assert found.graphs.replays == 7 * 3 - 4 + 3 * 3 + 3


@pytest.mark.parametrize(
    ("trainer", "why"),
    [(OwnAct, "its get_action is its own"), (WaitingDQN, "operation not permitted when stream is capturing")],
)
def test_what_cannot_be_recorded_runs_as_it_is_written(
    served: Callable[..., Served], caplog: pytest.LogCaptureFixture, trainer: type, why: str
) -> None:
    found = served(trainer, VECTOR, spaces.Discrete(4), "emulated")
    found.start()
    acted(found, ROWS)
    assert found.graphs.replays == 0
    (told,) = caplog.messages
    assert f"The policy of {trainer.__name__} is served without CUDA graphs: " in told
    assert why in told


class OnTheHost(WideDQN):
    def __init__(self, observation_space: Any, action_space: Any, seed: int = 0, device: str = "cpu") -> None:
        super().__init__(observation_space, action_space, seed=seed, device="cpu")


def test_a_trainer_that_stays_on_the_host_is_refused() -> None:
    found = make_trainer(OnTheHost, VECTOR, spaces.Discrete(4), device="cuda:0")
    with pytest.raises(TrainerError, match=r"on cuda:0 needs the policy's modules there; OnTheHost.* has some on cpu"):
        PolicyInference(found, torch.device("cuda:0"), (), 4)
