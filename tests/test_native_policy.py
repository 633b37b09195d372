"""The policy in C++ acts as torch's does, and actors that run it start without torch."""

from __future__ import annotations

import dataclasses
import math
import os
import pickle
import signal
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.envs.registration import WrapperSpec
from programs import make_program, run
from torch import nn
from trainers import OwnTrainer

from pearl.actors.actor import Actor, ActorSetup
from pearl.actors.native_policy import NativePolicy
from pearl.actors.policy_plan import read_policy
from pearl.actors.process import ActorGroup
from pearl.actors.standalone import standalone
from pearl.algorithms import DDPG, DQN, SAC, TD3, Trainer
from pearl.algorithms.trainer import make_trainer, policy_tensors
from pearl.exploration import EpsilonGreedy, GaussianNoise
from pearl.ipc.queues import WeightSyncQueue
from pearl.learner.native_plan import UnsupportedError
from pearl.learner.torch_learner import TorchLearner
from pearl.runtime.queues import DataCollectionQueue
from pearl.spec import ActorSpec, TrainSpec, TransitionSpec

OBS = spaces.Box(np.array([-3.0, -np.inf, 0.0], np.float32), np.array([5.0, np.inf, 0.5], np.float32))
GRID = spaces.Box(-1.0, 1.0, (2, 3), np.float32)
CHOICE = spaces.Discrete(5)
BOX = spaces.Box(np.array([-2.0, 0.0], np.float32), np.array([2.0, 1.0], np.float32))
TABLE = spaces.Box(-1.0, 3.0, (2, 2), np.float32)


class Normed(DQN):
    """A network of the user's own."""

    def build_q_network(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(3, 33), nn.LayerNorm(33), nn.Tanh(), nn.Linear(33, 20), nn.ReLU(), nn.Linear(20, 5)
        )


class OneLayer(DQN):
    def build_q_network(self) -> nn.Module:
        return nn.Linear(3, 5)


class NormedActor(TD3):
    def build_actor(self) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 24), nn.LayerNorm(24), nn.ReLU(), nn.Linear(24, 2, bias=False))


POLICIES: dict[str, tuple[type[Trainer], spaces.Box, spaces.Space[Any], dict[str, Any]]] = {
    "DQN": (DQN, OBS, CHOICE, {}),
    "dueling": (DQN, OBS, CHOICE, {"dueling": True, "hidden_sizes": (40, 24)}),
    "DQN on a table": (DQN, GRID, CHOICE, {"hidden_sizes": (17,)}),
    "DQN with a layer norm": (Normed, OBS, CHOICE, {}),
    "DQN of one layer": (OneLayer, OBS, CHOICE, {}),
    "DDPG": (DDPG, OBS, BOX, {"scale_observations": True}),
    "DDPG of tables": (DDPG, GRID, TABLE, {"hidden_sizes": (12,)}),
    "TD3": (TD3, OBS, BOX, {}),
    "TD3 with a layer norm": (NormedActor, OBS, BOX, {}),
    "SAC": (SAC, OBS, BOX, {"scale_observations": True}),
    "SAC of tables, narrow": (SAC, GRID, TABLE, {"log_std_bounds": (-0.5, 0.1), "hidden_sizes": (16,)}),
}


def made(name: str, **settings: Any) -> Trainer:
    kind, observations, actions, more = POLICIES[name]
    trainer = make_trainer(kind, observations, actions, seed=3, settings={**more, **settings})
    assert isinstance(trainer, Trainer)
    return trainer


def drawn(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def check_equal(policy: NativePolicy, trainer: Trainer) -> None:
    """For vectors of every size: one environment, more than a panel of the kernels, and in between."""
    for envs in (1, 7, 300):
        obs = drawn((envs, *trainer.input_shape), envs) * 2
        with torch.no_grad():
            wanted = trainer.get_action(obs).numpy()
            found = policy.act(obs.numpy())
            assert found.dtype == wanted.dtype
            assert found.shape == wanted.shape
            if isinstance(trainer, DQN):
                # One of two equal values may be larger by a rounding.
                values = trainer.q(obs).numpy()
                rows = np.arange(envs)
                np.testing.assert_allclose(values[rows, found], values[rows, wanted], atol=1e-6, rtol=1e-6)
                assert (found == wanted).mean() > 0.99
            else:
                np.testing.assert_allclose(found, wanted, atol=1e-5)
            if isinstance(trainer, SAC):
                noise = drawn(wanted.shape, 7)
                sampled = trainer.sample_action(obs, noise).numpy()
                np.testing.assert_allclose(policy.sample(obs.numpy(), noise.numpy()), sampled, atol=1e-5)
                assert np.abs(sampled - wanted).mean() > 0.05


@pytest.mark.parametrize("name", POLICIES)
def test_actions_are_those_of_torch_with_first_and_with_later_weights(name: str) -> None:
    trainer = made(name)
    policy = NativePolicy(pickle.loads(pickle.dumps(read_policy(trainer))))
    check_equal(policy, trainer)
    with torch.no_grad():
        for k, tensor in enumerate(policy_tensors(trainer)):
            # Scales too: they travel with the weights.
            tensor.mul_(1 + 0.3 * drawn(tuple(tensor.shape), k).tanh())
    snapshot = np.empty(TorchLearner(trainer).weight_count, np.float32)
    TorchLearner(trainer).write_weights(snapshot)
    policy.load_weights(snapshot)
    check_equal(policy, trainer)


def test_loaded_weights_are_a_copy() -> None:
    plan = read_policy(made("DQN"))
    policy = NativePolicy(plan)
    obs = drawn((8, 3)).numpy()
    before = policy.values(obs)
    weights = plan.weights.copy()
    policy.load_weights(weights)
    weights[:] = math.nan
    assert np.array_equal(policy.values(obs), before)


def test_reading_leaves_the_trainer_as_it_was() -> None:
    trainer = made("SAC")
    trainer.policy.train()
    before = {name: tensor.clone() for name, tensor in trainer.policy.state_dict().items()}
    exploration = read_policy(trainer).exploration
    assert exploration is trainer.exploration
    assert all(module.training for module in trainer.policy.modules())
    assert all(p.requires_grad for p in trainer.policy.parameters())
    assert all(torch.equal(before[name], tensor) for name, tensor in trainer.policy.state_dict().items())


# --- what cannot be native ------------------------------------------------------------------------------------------


class Cautious(DQN):
    def get_action(self, obs: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(obs), dtype=torch.int64)


class Dropping(DQN):
    def build_q_network(self) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 5))


class Counted(DQN):
    """Its network holds a number that training moves."""

    def build_q_network(self) -> nn.Module:
        network = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 5))
        network.register_buffer("count", torch.zeros(()))
        return network


class Doubling(TD3):
    """The policy acts otherwise than its layers say."""

    def build(self) -> None:
        super().build()
        self.actor.register_forward_hook(lambda module, inputs, output: output / 2)


class Temperate(SAC):
    def sample_action(self, obs: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        return super().sample_action(obs, noise / 2)


IMAGE = spaces.Box(0, 255, (4, 40, 40), np.uint8)


@pytest.mark.parametrize(
    ("kind", "observations", "actions", "message"),
    [
        (Cautious, OBS, CHOICE, "^Cautious overrides get_action$"),
        (Temperate, OBS, BOX, "^Temperate overrides sample_action$"),
        (Dropping, OBS, CHOICE, "layer '1' of kind 'dropout'"),
        (Counted, OBS, CHOICE, "network 'q' has a buffer 'count'"),
        (Doubling, OBS, BOX, "the policy of Doubling, which acts otherwise than its layers say"),
        (SAC, IMAGE, BOX, "observations of unsigned bytes"),
        (OwnTrainer, OBS, CHOICE, "the policy of OwnTrainer, which is none of the built-in algorithms"),
    ],
)
def test_what_is_unsupported_is_named(
    kind: type, observations: spaces.Box, actions: spaces.Space[Any], message: str
) -> None:
    with pytest.raises(UnsupportedError, match=message):
        read_policy(make_trainer(kind, observations, actions))


def test_a_run_in_torch_says_why(tmp_path: Path, quick_profiles: None) -> None:
    program = make_program(tmp_path, trainer=OwnTrainer)
    arguments = ("--serial", "--timesteps", "300", "--eval-episodes", "0", "--run-dir", str(tmp_path / "run"))
    code, output = run(program, *arguments)
    assert code == 0, output
    logged = "".join(path.read_text(errors="replace") for path in (tmp_path / "run").glob("*.log"))
    assert logged.count("The policy runs in torch: the native engine does not support") == 1
    assert "the policy of OwnTrainer, which is none of the built-in algorithms" in logged


# --- actors -----------------------------------------------------------------------------------------------------------


def setup_of(env: str, kind: type[Trainer], *, native: bool = True, envs: int = 4, **options: Any) -> ActorSetup:
    spec = ActorSpec(env, envs_per_actor=envs, vectorization=options.pop("vectorization", "sync"))
    setup = ActorSetup(kind, options.pop("settings", {}), spec, options.pop("train", TrainSpec()), seed=5, **options)
    if not native:
        return setup
    known = gym.make(env)
    trainer = make_trainer(
        kind, known.observation_space, known.action_space, seed=setup.seed, settings=dict(setup.settings)
    )
    return dataclasses.replace(setup, policy=read_policy(trainer))


def transition_of(setup: ActorSetup) -> TransitionSpec:
    known = gym.make(setup.spec.env)
    return TransitionSpec.from_spaces(known.observation_space, known.action_space)


def collected(setup: ActorSetup, messages: int) -> list[dict[str, np.ndarray]]:
    actor = Actor(setup)
    queue = DataCollectionQueue(transition_of(setup), setup.message_rows(), slots=1)
    message = queue.reserve()
    assert message is not None
    found = []
    for _ in range(messages):
        rows = actor.collect(message)
        found.append({f.name: message[f.name][:rows].copy() for f in transition_of(setup).fields})
    actor.close()
    return found


@pytest.mark.parametrize("n_step", [1, 3])
@pytest.mark.parametrize("vectorization", ["sync", "vector_entry_point"])
def test_an_actor_collects_what_it_would_collect_with_torch(vectorization: str, n_step: int) -> None:
    options: dict[str, Any] = {
        "vectorization": vectorization,
        "settings": {"exploration": EpsilonGreedy(0.2, 0.2, 1)},
        "train": TrainSpec(n_step=n_step),
    }
    native, in_torch = (collected(setup_of("CartPole-v1", DQN, native=n, **options), 25) for n in (True, False))
    for ours, theirs in zip(native, in_torch, strict=True):
        assert all(np.array_equal(ours[name], theirs[name]) for name in ours)
    assert {0.0} < set(np.concatenate([m["discount"] for m in native]).tolist())


@pytest.mark.parametrize("kind", [DDPG, TD3, SAC])
def test_continuous_actions_too(kind: type[Trainer]) -> None:
    # Pendulum swings chaotically: a rounding would be another path after a few hundred steps.
    exploration = {} if kind is SAC else {"exploration": GaussianNoise(0.1, 0)}
    settings = {"hidden_sizes": (32, 32), **exploration}
    native, in_torch = (collected(setup_of("Pendulum-v1", kind, native=n, settings=settings), 5) for n in (True, False))
    for ours, theirs in zip(native, in_torch, strict=True):
        for name in ours:
            np.testing.assert_allclose(ours[name], theirs[name], atol=1e-3)


def first_rows(queue: DataCollectionQueue) -> int:
    found = queue.peek(60.0)
    assert found is not None, "the actor sent nothing"
    _, rows = found
    queue.release()
    return rows


def has_torch(pid: int) -> bool:
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_an_actor_with_a_native_policy_starts_without_torch() -> None:
    setup = setup_of("CartPole-v1", DQN)
    queue = DataCollectionQueue(transition_of(setup), setup.message_rows(), 2)
    assert setup.policy is not None
    group = ActorGroup([setup], [queue], WeightSyncQueue(len(setup.policy.weights)))
    try:
        assert first_rows(queue)
        assert not has_torch(group.pids[0])
        assert has_torch(os.getpid()), "what is looked for is what torch loads"
    finally:
        group.stop()


@pytest.mark.parametrize("needed", [False, True])
def test_an_actor_that_needs_nothing_of_the_program_does_not_run_it(
    needed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = types.ModuleType("__main__")
    program.__file__ = str(tmp_path / "program.py")
    Path(program.__file__).write_text("from pathlib import Path\nPath(__file__).with_name('was run').touch()\n")
    monkeypatch.setitem(sys.modules, "__main__", program)
    if needed:
        monkeypatch.setattr("pearl.actors.process.standalone", lambda setup: None)
    setup = setup_of("CartPole-v1", DQN)
    assert setup.policy is not None
    queue = DataCollectionQueue(transition_of(setup), setup.message_rows(), 2)
    group = ActorGroup([setup], [queue], WeightSyncQueue(len(setup.policy.weights)))
    try:
        assert sys.modules["__main__"] is program
        assert first_rows(queue)
        assert (tmp_path / "was run").exists() == needed
    finally:
        group.stop()


def test_a_killed_actor_with_a_native_policy_is_named_and_comes_back(caplog: pytest.LogCaptureFixture) -> None:
    setup = setup_of("CartPole-v1", DQN)
    assert setup.policy is not None
    queue = DataCollectionQueue(transition_of(setup), setup.message_rows(), 2)
    group = ActorGroup([setup], [queue], WeightSyncQueue(len(setup.policy.weights)))
    try:
        first_rows(queue)
        killed = group.pids[0]
        os.kill(killed, signal.SIGKILL)
        wait_until(lambda: (group.check(1000), group.restarts)[1] == 1)
        assert group.pids != [killed]
        for _ in range(4):  # more than the killed one can have left behind
            first_rows(queue)
        assert "actor-0 died (signal SIGKILL) and is restarted." in caplog.text
    finally:
        group.stop()


def wait_until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_new_weights_reach_an_actor_without_torch() -> None:
    setup = setup_of("CartPole-v1", DQN, settings={"exploration": None})
    assert setup.policy is not None
    queue = DataCollectionQueue(transition_of(setup), setup.message_rows(), 1)
    weights = np.zeros_like(setup.policy.weights)
    wsq = WeightSyncQueue(len(weights))
    group = ActorGroup([setup], [queue], wsq)

    def only(action: int) -> bool:
        found = queue.peek(60.0)
        assert found is not None
        message, rows = found
        same = bool((message["action"][:rows] == action).all())
        queue.release()
        return same

    try:
        for action in (1, 0, 1):
            weights[-2:] = np.eye(2)[action]  # the biases of both values
            wsq.write(weights)
            wait_until(lambda action=action: only(action))  # type: ignore[misc]
    finally:
        group.stop()


# --- which actors need the program ------------------------------------------------------------------------------------


class OwnEnvironment(gym.Env[np.ndarray, np.int64]):
    """Of the user's own module."""


class EnvironmentInProgram(gym.Env[np.ndarray, np.int64]):
    """Written into the program itself."""

    __module__ = "__main__"


def test_an_installed_environment_needs_nothing_of_the_program() -> None:
    setup = setup_of("CartPole-v1", DQN, settings={"hidden_sizes": (8,)})
    found = standalone(setup)
    assert found is not None
    bare, spec = found
    assert spec.id == "CartPole-v1"
    assert bare.trainer_class is None
    assert b"torch" not in pickle.dumps(found)
    assert b"algorithms" not in pickle.dumps(found)
    assert bare.policy is setup.policy


def test_what_needs_the_program_gets_it() -> None:
    setup = setup_of("CartPole-v1", DQN)
    assert standalone(dataclasses.replace(setup, policy=None)) is None

    def with_options(**options: object) -> ActorSetup:
        return dataclasses.replace(setup, spec=dataclasses.replace(setup.spec, env_kwargs=options))

    assert standalone(with_options(sutton_barto_reward=True)) is not None
    assert standalone(with_options(callback=lambda: None)) is None
    cartpole = "gymnasium.envs.classic_control.cartpole:CartPoleEnv"
    wrapper = WrapperSpec("Mine", f"{__name__}:Mine", None)
    entries: list[tuple[Any, dict[str, Any], bool]] = [
        (cartpole, {}, True),
        (cartpole, {"kwargs": {"callback": lambda: None}}, False),
        (cartpole, {"additional_wrappers": (wrapper,)}, False),
        (OwnEnvironment, {}, False),
        (EnvironmentInProgram, {}, False),
        ("__main__:EnvironmentInProgram", {}, False),
        (lambda: OwnEnvironment(), {}, False),
    ]
    asked = dataclasses.replace(setup, spec=dataclasses.replace(setup.spec, env="PearlOwn-v0"))
    try:
        for entry, options, alone in entries:
            gym.register("PearlOwn-v0", entry, **options)
            assert (standalone(asked) is not None) == alone, entry
            del gym.registry["PearlOwn-v0"]
    finally:
        gym.registry.pop("PearlOwn-v0", None)


def test_an_environment_registered_by_the_program_is_known_to_actors_that_start_without_it() -> None:
    gym.register("PearlShort-v0", "gymnasium.envs.classic_control.cartpole:CartPoleEnv", max_episode_steps=3)
    setup = setup_of("PearlShort-v0", DQN, steps_per_message=8)
    assert setup.policy is not None
    queue = DataCollectionQueue(transition_of(setup), setup.message_rows(), 1)
    group = ActorGroup([setup], [queue], WeightSyncQueue(len(setup.policy.weights)))
    try:
        found = queue.peek(60.0)
        assert found is not None
        message, _ = found
        assert message["episode_length"][: message["counts"][0]].tolist() == [3] * 8
    finally:
        group.stop()
        del gym.registry["PearlShort-v0"]
