"""RecurrentPPO: states of rollouts, training on sequences, saved policies, and a game that needs memory."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import memory_environments  # noqa: F401  (registers PearlCue-v0)
import numpy as np
import pytest
import torch
from gymnasium import spaces
from memory_environments import RememberCue
from policies import TORQUES, command, run_folder
from programs import ONE_CPU, run, summary, write_csv_pair

import pearl
from composer import Composer
from pearl.actors.actor import ActorSetup
from pearl.actors.rollout_actor import RolloutActor
from pearl.algorithms import PPO, RecurrentPPO, make_trainer
from pearl.algorithms.on_policy import Minibatch, OnPolicyTrainer, present_policy, rollout_transition
from pearl.algorithms.recurrent_networks import RecurrentNetwork, recurrent_layer
from pearl.backends import learners
from pearl.backends.cpu.rollout_learner import NativeRolloutLearner
from pearl.errors import ConfigurationError, PolicyError, TrainerError
from pearl.learner.torch_rollout_learner import TorchRolloutLearner
from pearl.policy import evaluate_policy
from pearl.rollout import NumpyGae
from pearl.rollout.buffer import RolloutBuffer
from pearl.rollout.columns import ENDED, GOES_ON, NO_STEP
from pearl.rollout.preparation import RolloutPreparation
from pearl.runtime import DataCollectionQueue
from pearl.spec import ActorSpec, RolloutSequences, RolloutSpec, TrainSpec

SEEN, TWO = spaces.Box(-1.0, 1.0, (2,), np.float32), spaces.Discrete(2)
CASE = RecurrentPPO, SEEN, TWO
SMALL = {"recurrent_size": 5, "hidden_sizes": (6,), "sequence_length": 4}
SHORT_PENDULUM = "ShortPendulum-v0"
gym.register(SHORT_PENDULUM, "gymnasium.envs.classic_control.pendulum:PendulumEnv", max_episode_steps=7)

each_cell = pytest.mark.parametrize("cell", ["lstm", "gru"])
each_sharing = pytest.mark.parametrize("shared", [False, True])


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As a Learner of one thread has torch: more of them would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class SmallRecurrentPPO(RecurrentPPO):
    recurrent_size = 5
    hidden_sizes = (6,)
    sequence_length = 4
    horizon = 16
    batch_size = 32
    epochs = 2


def stirred(trainer: Any, seed: int = 0) -> Any:
    """The trainer with weights that make it act on what it sees."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in trainer.networks.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.8)
    return trainer


# --- networks, written out --------------------------------------------------------------------------------------------


class ByHand:
    """A network of a trainer by the formulas of the LSTM and the GRU, a step of one environment at a time."""

    def __init__(self, trainer: Any, name: str) -> None:
        prefix = f"{name}."
        found = dict(trainer.networks.named_parameters(remove_duplicate=False))
        self.weights = {key.removeprefix(prefix): value for key, value in found.items() if key.startswith(prefix)}
        self.cell = trainer.cell

    def start(self, numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h, c = numbers.chunk(2) if self.cell == "lstm" else (numbers, numbers)
        return h, c

    def step(
        self, obs: torch.Tensor, memory: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        w, (h, c) = self.weights, memory
        x = (w["encoder.0.weight"] @ obs + w["encoder.0.bias"]).tanh()
        from_x = w["cell.weight_ih_l0"] @ x + w["cell.bias_ih_l0"]
        from_h = w["cell.weight_hh_l0"] @ h + w["cell.bias_hh_l0"]
        if self.cell == "lstm":
            i, f, g, o = (from_x + from_h).chunk(4)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
        else:
            (xr, xz, xn), (hr, hz, hn) = from_x.chunk(3), from_h.chunk(3)
            z = (xz + hz).sigmoid()
            h = (1 - z) * (xn + (xr + hr).sigmoid() * hn).tanh() + z * h
        return w["head.weight"] @ h + w["head.bias"], (h, c)


def spoken(trainer: Any, outputs: torch.Tensor, action: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Log probability and entropy of one action, by torch's own distributions."""
    if trainer.distribution.sizes:
        drawn = torch.distributions.Categorical(logits=outputs)
        return drawn.log_prob(action), drawn.entropy()
    normal = torch.distributions.Normal(outputs, trainer.networks.log_std.exp())
    return normal.log_prob(action).sum(), normal.entropy().sum()


def parts_of_state(trainer: Any, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Those of policy and value network."""
    size = trainer.networks.policy.state_size
    return state[:size], state if trainer.networks.is_shared else state[size:]


@each_cell
def test_parts_of_episodes_are_those_of_single_steps(cell: str) -> None:
    generator = torch.Generator().manual_seed(1)
    network = RecurrentNetwork(torch.nn.Identity(), recurrent_layer(cell, 3, 4), torch.nn.Identity()).double()
    for rate in (0.0, 0.1, 0.6, 1.0):
        obs, state = (
            torch.randn(shape, generator=generator).double() for shape in ((5, 9, 3), (5, network.state_size))
        )
        begins = torch.rand((5, 9), generator=generator) < rate
        found, now = network.remember_episodes(obs, state, begins), state
        for t in range(9):
            now = torch.where(begins[:, t, None], 0.0, now)
            output, now = network.remember(obs[:, t : t + 1], now)
            torch.testing.assert_close(found[:, t], output[:, 0])


# --- acting -----------------------------------------------------------------------------------------------------------


class Collected:
    """An Actor of `trainer_class` with the trainer's weights, and the buffer of its messages."""

    def __init__(
        self, env: str, horizon: int, settings: dict[str, Any], *, envs: int = 3, kind: Any = "sync", gamma: float = 0.9
    ) -> None:
        kwargs = {"delay": 4} if env == "PearlCue-v0" else {}
        made = gym.make(env, **kwargs)
        spaces_of = made.observation_space, made.action_space
        self.trainer: Any = stirred(make_trainer(RecurrentPPO, *spaces_of, settings=settings))
        actors = ActorSpec(env, envs_per_actor=envs, env_kwargs=kwargs, vectorization=kind)
        transition = rollout_transition(RecurrentPPO, *spaces_of, settings)
        self.rollout, train = RolloutSpec(horizon=horizon), TrainSpec(gamma=gamma)
        setup = ActorSetup(RecurrentPPO, settings, actors, train, 5, transition=transition, rollout=self.rollout)
        self.actor = RolloutActor(setup, stirred(make_trainer(RecurrentPPO, *spaces_of, settings=settings)))
        self._queue = DataCollectionQueue(transition, setup.message_rows(), 1, further=setup.further_fields)
        message = self._queue.reserve()
        assert message is not None
        self.message = message
        self.buffer = RolloutBuffer(transition, self.rollout, actors)

    def next(self) -> RolloutBuffer:
        self.actor.collect(self.message)
        self.buffer.take([self.message])
        return self.buffer


KINDS = [("PearlCue-v0", "sync"), ("PearlCue-v0", "vector_entry_point"), (SHORT_PENDULUM, "sync")]


@pytest.mark.parametrize(("env", "kind"), KINDS)
@each_cell
@each_sharing
def test_rollouts_hold_what_a_loop_over_steps_says(env: str, kind: str, cell: str, shared: bool) -> None:
    """Log probabilities, values and states, across the ends of episodes and from one rollout to the next."""
    horizon, envs = 12, 3
    collected = Collected(env, horizon, {**SMALL, "cell": cell, "shared_layers": shared}, kind=kind)
    trainer = collected.trainer
    policy, value = ByHand(trainer, "policy"), ByHand(trainer, "value")
    zeros = trainer.initial_rollout_state(1)[0]
    memories = [[by_hand.start(part) for by_hand, part in
                 zip((policy, value), parts_of_state(trainer, zeros), strict=True)] for _ in range(envs)]  # fmt: skip
    fresh = list(memories[0])
    ends = set()
    for _ in range(2):
        finals = watch_last_observations(collected.actor)
        buffer = collected.next()
        columns = {name: torch.from_numpy(column) for name, column in buffer.columns.items()}
        assert buffer.states is not None
        states = torch.from_numpy(buffer.states)
        ends |= set(np.unique(buffer.ends).tolist())
        with torch.no_grad():
            for env_number in range(envs):
                memory = memories[env_number]
                for t in range(horizon):
                    if t % 4 == 0:
                        stored = parts_of_state(trainer, states[t // 4, env_number])
                        for by_hand, now, kept in zip((policy, value), memory, stored, strict=True):
                            both = torch.cat(now) if cell == "lstm" else now[0]
                            torch.testing.assert_close(kept, both, atol=1e-5, rtol=1e-4)
                            assert by_hand.cell == cell
                    obs, action = columns["obs"][t, env_number], columns["action"][t, env_number]
                    (outputs, memory[0]), (estimate, memory[1]) = (
                        policy.step(obs, memory[0]),
                        value.step(obs, memory[1]),
                    )
                    end = int(buffer.ends[t, env_number])
                    if end != NO_STEP:
                        said = spoken(trainer, outputs, action)[0]
                        torch.testing.assert_close(columns["log_prob"][t, env_number], said, atol=1e-5, rtol=1e-4)
                        torch.testing.assert_close(columns["value"][t, env_number], estimate[0], atol=1e-5, rtol=1e-4)
                    if end == ENDED and env == SHORT_PENDULUM:  # by its time limit
                        last = torch.as_tensor(finals[t, env_number], dtype=torch.float32)
                        beyond = 0.9 * value.step(last, memory[1])[0][0]
                        torch.testing.assert_close(columns["bonus"][t, env_number], beyond, atol=1e-5, rtol=1e-4)
                    if end != GOES_ON:
                        memory[:] = fresh
                seen = torch.from_numpy(collected.actor._obs[env_number])
                after = value.step(seen, memory[1])[0][0]
                assert float(buffer.last_values[env_number]) == pytest.approx(float(after), rel=1e-4, abs=1e-5)
    assert ends == {GOES_ON, ENDED, NO_STEP} if kind == "vector_entry_point" else {GOES_ON, ENDED}


def watch_last_observations(actor: Any) -> dict[tuple[int, int], np.ndarray]:
    """The last observations of episodes in the next rollout, by step and environment."""
    found: dict[tuple[int, int], np.ndarray] = {}
    step, count = type(actor.envs).step, iter(range(10**6))

    def watched(action: Any) -> Any:
        results, t = step(actor.envs, action), next(count)
        for env in np.flatnonzero(results[2] | results[3]):
            if "final_obs" in results[4]:
                found[t, int(env)] = results[4]["final_obs"][env]
        return results

    actor.envs.step = watched
    return found


@pytest.mark.parametrize(("env", "kind"), KINDS)
@each_sharing
def test_sequences_say_the_same_as_the_steps_that_were_acted(env: str, kind: str, shared: bool) -> None:
    """So the ratio of new to old probability is 1 in the first step of the training on a rollout."""
    collected = Collected(env, 16, {**SMALL, "shared_layers": shared, "normalize_observations": True}, kind=kind)
    for _ in range(2):
        buffer = collected.next()
        log_prob, values = present_policy(collected.trainer, buffer.flat())
        real = (buffer.ends != NO_STEP).reshape(-1)
        np.testing.assert_allclose(log_prob[real], buffer.log_probs.reshape(-1)[real], atol=1e-5)
        np.testing.assert_allclose(values[real], buffer.values.reshape(-1)[real], atol=1e-5)
    assert np.ptp(values) > 0.01
    flat, rows = buffer.flat(), buffer.rows()
    first = TorchRolloutLearner(collected.trainer, epochs=1, batch_size=16 * 3).train(flat, rows)
    assert first["approximate_kl"] == pytest.approx(0.0, abs=1e-6)
    assert first["clip_fraction"] == 0.0
    again = TorchRolloutLearner(collected.trainer, epochs=1, batch_size=16 * 3).train(flat, rows)
    assert again["approximate_kl"] > 0.0


# --- training ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("actions", "cell", "shared"), [(TWO, "lstm", False), (TWO, "gru", True), (TORQUES, "gru", False)]
)
def test_the_gradient_is_that_of_a_loop_in_float64(actions: Any, cell: str, shared: bool) -> None:
    """Of PPO's loss, with new episodes within sequences, and a step in place of which an environment was reset."""
    settings = {**SMALL, "cell": cell, "shared_layers": shared, "entropy_coefficient": 0.02, "value_clip_range": 0.3}
    trainer: Any = stirred(make_trainer(RecurrentPPO, SEEN, actions, settings=settings))
    trainer.networks.double()
    rng, sequences, steps = np.random.default_rng(3), 6, 4
    rows = sequences * steps

    def numbers(*shape: int) -> torch.Tensor:
        return torch.from_numpy(rng.standard_normal(shape))

    size = trainer.networks.state_size
    begins = torch.from_numpy(rng.random(rows) < 0.2)
    real = torch.from_numpy(rng.random(rows) < 0.85)
    assert begins.any()
    assert not real.all()
    discrete = actions is TWO
    action = torch.from_numpy(rng.integers(2, size=rows)) if discrete else numbers(rows, 2)
    minibatch = Minibatch(
        numbers(rows, 2), action, -1.0 + 0.5 * numbers(rows), *numbers(3, rows), begins=begins, real=real,
        state=0.5 * numbers(sequences, size),
    )  # fmt: skip
    policy, value = ByHand(trainer, "policy"), ByHand(trainer, "value")
    said: dict[str, list[torch.Tensor]] = {"log_prob": [], "entropy": [], "value": []}
    assert minibatch.state is not None
    for number in range(sequences):
        parts = parts_of_state(trainer, minibatch.state[number])
        memories = [network.start(part) for network, part in zip((policy, value), parts, strict=True)]
        for row in range(number * steps, (number + 1) * steps):
            if begins[row]:
                zeros = parts_of_state(trainer, torch.zeros(size).double())
                memories = [network.start(part) for network, part in zip((policy, value), zeros, strict=True)]
            outputs, memories[0] = policy.step(minibatch.obs[row], memories[0])
            estimate, memories[1] = value.step(minibatch.obs[row], memories[1])
            log_prob, entropy = spoken(trainer, outputs, action[row])
            for name, part in (("log_prob", log_prob), ("entropy", entropy), ("value", estimate[0])):
                said[name].append(part)
    log_prob, entropy, values = (torch.stack(part)[real] for part in said.values())
    kept = minibatch.rows(real)
    advantage = (kept.advantage - kept.advantage.mean()) / (kept.advantage.std() + 1e-8)
    ratio = (log_prob - kept.log_prob).exp()
    gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
    near = kept.value + (values - kept.value).clamp(-0.3, 0.3)
    squared = torch.maximum((values - kept.ret) ** 2, (near - kept.ret) ** 2).mean()
    wanted_loss = -gain + 0.5 * squared - 0.02 * entropy.mean()
    parameters = list(trainer.networks.parameters())
    wanted = torch.autograd.grad(wanted_loss, parameters)

    loss, _ = trainer.loss(minibatch)
    torch.testing.assert_close(loss, wanted_loss)
    for found, expected in zip(torch.autograd.grad(loss, parameters), wanted, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-10, rtol=1e-7)


class Watched(SmallRecurrentPPO):
    """Keeps its minibatches, and trains on none."""

    seen: Any = ()

    def update_minibatch(self, minibatch: Minibatch) -> tuple[dict[str, float], bool]:
        self.seen = (*self.seen, minibatch)
        self.gradient_steps += 1
        return {"own": 1.0}, True


def test_minibatches_hold_whole_sequences_each_once_in_an_epoch() -> None:
    horizon, envs, length = 12, 5, 4
    trainer: Any = make_trainer(Watched, SEEN, TWO)
    count, size = horizon * envs, trainer.networks.state_size
    row = np.arange(count, dtype=np.float32)
    sequences = (horizon // length, envs)
    rollout = {
        "obs": np.stack([row, row], axis=1),
        "action": np.zeros(count, np.int64),
        **dict.fromkeys(("log_prob", "advantage", "ret"), row),
        "begins": row % 7 == 0,
        "state": np.arange(math.prod(sequences), dtype=np.float32).repeat(size).reshape(*sequences, size),
    }
    resets = np.array([0, 5, 10, 15, 21])  # all of the first sequence of environment 0; a step of environment 1
    rows = np.setdiff1d(np.arange(count), resets)
    learner = TorchRolloutLearner(trainer, epochs=2, batch_size=8)
    learner.train(rollout, rows)
    assert len(trainer.seen) == 2 * 7
    for first in (0, 7):
        minibatches = trainer.seen[first : first + 7]
        numbers = np.concatenate([m.state[:, 0].numpy() for m in minibatches]).astype(int)
        assert sorted(numbers.tolist()) == list(range(1, 15)), "the sequence of resets alone is left out"
        assert numbers.tolist() != sorted(numbers.tolist())
        for minibatch in minibatches:
            for place, number in enumerate(minibatch.state[:, 0].int().tolist()):
                piece, env = divmod(number, envs)
                wanted = [(piece * length + t) * envs + env for t in range(length)]
                mine = slice(place * length, (place + 1) * length)
                assert minibatch.obs[mine, 0].int().tolist() == wanted
                assert minibatch.begins[mine].tolist() == [one % 7 == 0 for one in wanted]
                assert minibatch.real[mine].tolist() == [one not in resets for one in wanted]
                assert minibatch.ret[mine].int().tolist() == wanted


def test_a_buffer_says_where_episodes_begin() -> None:
    transition = rollout_transition(SmallRecurrentPPO, SEEN, TWO, {})
    buffer = RolloutBuffer(transition, RolloutSpec(horizon=4), ActorSpec("PearlCue-v0", envs_per_actor=2))
    for column in buffer.columns.values():
        column.fill(0)
    buffer.ends[:] = [[GOES_ON, ENDED], [ENDED, NO_STEP], [GOES_ON, GOES_ON], [ENDED, GOES_ON]]
    begins = buffer.flat()["begins"].reshape(4, 2)
    assert begins.tolist() == [[False, False], [False, True], [True, True], [False, False]]


# --- saved policies ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("actions", [TWO, spaces.Discrete(3, start=2), TORQUES, spaces.MultiDiscrete([3, 2])], ids=str)
@each_cell
def test_a_saved_policy_acts_as_the_trainer(tmp_path: Path, actions: Any, cell: str) -> None:
    case = RecurrentPPO, SEEN, actions
    trainer: Any = make_trainer(*case, settings={"cell": cell, "recurrent_size": 7, "normalize_observations": True})
    observations = np.random.default_rng(0).uniform(-1, 1, (9, 5, 2)).astype(np.float32)
    stirred(trainer).take_in(observations.reshape(-1, 2))
    policy = pearl.load_policy(run_folder(tmp_path / "run", case, trainer, env="PearlCue-v0"))
    assert policy.is_recurrent
    first = getattr(actions, "start", 0)
    expected, state = trainer.initial_state(5), None
    drawn = []
    for t, obs in enumerate(observations):
        starts = np.array([t == 4, False, False, t == 6, False])
        expected = torch.where(torch.from_numpy(starts)[:, None], 0.0, expected)
        with torch.inference_mode():
            wanted, expected = trainer.get_action_from(torch.from_numpy(obs), expected)
        drawn.append(policy.predict_with_state(obs, state, starts, deterministic=False)[0] - first)
        found, state = policy.predict_with_state(obs, state, starts)
        np.testing.assert_allclose(found, wanted.numpy() + first, atol=1e-6)
        assert all(actions.contains(action) for action in found)
        np.testing.assert_allclose(state, expected.numpy(), atol=1e-6)
        drawn[-1] = np.any(drawn[-1] != wanted.numpy())
    assert any(drawn), "draws differ from the likeliest actions"
    assert policy.initial_state(1).shape == ((1, 14) if cell == "lstm" else (1, 7)), "the value network's is not needed"
    with pytest.raises(PolicyError, match="predict_with_state"):
        policy.predict(observations[0])


# --- settings and refusals --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"cell": "rnn"}, 'cell must be "lstm" or "gru"; found \'rnn\''),
        ({"recurrent_size": 0}, "recurrent_size must be a whole number of at least 1; found 0"),
        ({"sequence_length": 2.0}, "sequence_length must be a whole number of at least 1; found 2.0"),
        ({"action_masks": True}, "action_masks must be False, or True for one of DQN, QRDQN, PPO, A2C; found True"),
    ],
)
def test_a_wrong_setting_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(TrainerError, match=message):
        make_trainer(RecurrentPPO, SEEN, TWO, settings=wrong)


@pytest.mark.parametrize(
    ("horizon", "batch", "message"),
    [
        (18, 36, "horizon must be a multiple of sequence_length, 4, .* found 18. Set horizon to 16"),
        (12, 6, "batch_size must be a multiple of sequence_length, 4, .* found 6. Set batch_size to 8"),
    ],
)
def test_sequences_that_do_not_fit_are_refused(tmp_path: Path, horizon: int, batch: int, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        RolloutSequences(4, 1).check(RolloutSpec(horizon=horizon), TrainSpec(batch_size=batch))
    composer = composer_of(tmp_path, {"horizon": horizon, "batch_size": batch})
    with pytest.raises(ConfigurationError, match=message):
        composer.run()


def test_the_learner_refuses_parts_of_sequences() -> None:
    collected = Collected("PearlCue-v0", 8, SMALL)
    buffer = collected.next()
    with pytest.raises(ConfigurationError, match=r"batch_size must be a multiple of 4 \(sequence_length\); found 6"):
        TorchRolloutLearner(collected.trainer, epochs=1, batch_size=6).train(buffer.flat())
    learner = TorchRolloutLearner(collected.trainer, epochs=1, batch_size=8)
    for wrong in ({"begins": np.zeros(7, bool)}, {"state": np.zeros((5, 3, 20), np.float32)}):
        with pytest.raises(TrainerError, match=r"rows divide into sequences of equal length; found \(\d+,\) and \("):
            learner.train({**buffer.flat(), **wrong})


def test_other_engines_refuse_by_name() -> None:
    trainer = make_trainer(RecurrentPPO, SEEN, TWO)
    reasons = [NativeRolloutLearner.supports(trainer)]
    reasons += [made.supports(trainer) for name, made in learners().items() if name != "torch"]
    assert len(reasons) > 1
    assert all(
        reason is not None and "recurrent networks, which train and act in torch" in reason for reason in reasons
    )


def test_what_needs_sequences_says_so() -> None:
    trainer: Any = make_trainer(RecurrentPPO, SEEN, TWO)
    assert trainer.checkpoint_identity() == {"recurrent layer": "lstm of 64"}, "of which a resumed run must be"
    with pytest.raises(TrainerError, match=r"in sequences\. Call evaluate_sequences"):
        trainer.evaluate_actions(torch.zeros(3, 2), torch.zeros(3).long())
    with pytest.raises(TrainerError, match="a Minibatch needs `begins` and `state`"):
        trainer.update_policy(Minibatch(torch.zeros(3, 2), *torch.zeros(5, 3)), torch.ones(3))


class PlainNetwork(RecurrentPPO):
    build_policy = PPO.build_policy  # type: ignore[assignment]


class Undeclared(RecurrentPPO):
    rollout_sequences = PPO.rollout_sequences


def test_a_class_that_lacks_a_part_is_refused() -> None:
    with pytest.raises(TrainerError, match=r"PlainNetwork.build_policy\(\) must make a .*RecurrentNetwork whose state"):
        make_trainer(PlainNetwork, SEEN, TWO)
    transition = rollout_transition(Undeclared, SEEN, TWO, {})
    for made, columns in ((Undeclared, transition), (PPO, rollout_transition(RecurrentPPO, SEEN, TWO, {}))):
        setup = ActorSetup(
            made, {}, ActorSpec("PearlCue-v0"), TrainSpec(), 0, transition=columns, rollout=RolloutSpec(horizon=8)
        )
        with pytest.raises(TrainerError, match=f"{made.__name__} must declare rollout_sequences and have the methods"):
            RolloutActor(setup)


# --- programs ---------------------------------------------------------------------------------------------------------


def composer_of(folder: Path, settings: dict[str, Any], env: Any = RememberCue, **rollout: Any) -> Composer:
    composer = Composer(progress=False)
    devices, connections = write_csv_pair(folder, ONE_CPU)
    composer.set_device_file(devices)
    composer.set_connection_file(connections)
    composer.set_actors(1, env=env, envs_per_actor=4)
    composer.set_train_function(learner=SmallRecurrentPPO, **settings)
    composer.set_rollout(**rollout)
    return composer


def test_a_program_trains_saves_and_resumes(tmp_path: Path, quick_profiles: None) -> None:
    composer = composer_of(tmp_path, {"cell": "gru"})
    composer.run()
    assert "recurrent networks" in str(composer.matrix), "why the native Learner is left out"
    program = composer.runtime_gen(path=tmp_path / "program.py", timesteps=400)
    arguments = "--eval-episodes", "4", "--run-dir", str(tmp_path / "run")
    for now in (("--timesteps", "400"), ("--serial", "--timesteps", "800", "--resume")):
        code, output = run(program, *now, *arguments)
        assert code == 0, output
    found = summary(tmp_path / "run")
    assert found["env_steps"] >= 800
    assert found["gradient_steps"] == 2 * 2 * 13  # 13 rollouts of 64 steps, 2 epochs of 2 minibatches
    policy = pearl.load_policy(tmp_path / "run", "last")
    assert evaluate_policy(policy, RememberCue, episodes=4).lengths.tolist() == [5] * 4
    assert evaluate_policy(policy, RememberCue, episodes=4, deterministic=False).lengths.tolist() == [5] * 4
    said = command("evaluate", tmp_path / "run", "--episodes", "3", "--json")
    assert said.exit_code == 0, said.output
    assert len(json.loads(said.stdout)["returns"]) == 3


@pytest.mark.slow
@pytest.mark.parametrize("correction", ["clip", "vtrace"])
def test_a_program_collects_while_it_trains(tmp_path: Path, quick_profiles: None, correction: str) -> None:
    composer = composer_of(tmp_path, {}, "Pendulum-v1", policy_lag=1, correction=correction)
    composer.run()
    program = composer.runtime_gen(path=tmp_path / "program.py", timesteps=2000)
    code, output = run(program, "--eval-episodes", "2", "--run-dir", str(tmp_path / "run"))
    assert code == 0, output
    assert math.isfinite(summary(tmp_path / "run")["last"]["mean"])
    text = program.read_text().replace("horizon=16", "horizon=18").replace("batch_size=32", "batch_size=36")
    (tmp_path / "odd.py").write_text(text)
    code, output = run(tmp_path / "odd.py", "--serial", "--run-dir", str(tmp_path / "odd"))
    assert code != 0
    assert "horizon must be a multiple of sequence_length, 4" in output


# --- memory -----------------------------------------------------------------------------------------------------------


def learned(trainer_class: type[OnPolicyTrainer], settings: dict[str, Any], rollouts: int, delay: int) -> float:
    """The mean return in RememberCue of the last two of `rollouts` rollouts of 8 x 64 steps."""
    transition = rollout_transition(trainer_class, SEEN, TWO, settings)
    actors = ActorSpec("PearlCue-v0", envs_per_actor=8, env_kwargs={"delay": delay})
    rollout, train = RolloutSpec(horizon=64, epochs=10), TrainSpec(batch_size=256)
    setup = ActorSetup(trainer_class, settings, actors, train, 5, transition=transition, rollout=rollout)
    trainer, acting = (make_trainer(trainer_class, SEEN, TWO, seed=1, settings=settings) for _ in range(2))
    assert isinstance(trainer, OnPolicyTrainer)
    actor, buffer = RolloutActor(setup, acting), RolloutBuffer(transition, rollout, actors)
    queue = DataCollectionQueue(transition, setup.message_rows(), 1, further=setup.further_fields)
    message = queue.reserve()
    assert message is not None
    preparation, gae = RolloutPreparation(rollout, 8, train.gamma), NumpyGae(train.gamma, rollout.gae_lambda)
    learner = TorchRolloutLearner(trainer, epochs=rollout.epochs, batch_size=train.batch_size)
    weights, returns = np.zeros(learner.weight_count, np.float32), []
    for _ in range(rollouts):
        learner.write_weights(weights)
        actor.load_weights(weights)
        actor.collect(message)
        returns.append(message["episode_return"][: message["counts"][0]].tolist())
        buffer.take([message])
        known = buffer.bonus, buffer.last_values, buffer.ends
        preparation.estimate(gae, buffer.rewards, buffer.values, *known)
        learner.train(buffer.flat(), buffer.rows())
    return float(np.mean(returns[-2] + returns[-1]))


MEMORY = {"recurrent_size": 16, "sequence_length": 16, "hidden_sizes": (16,), "learning_rate": 3e-3}


def test_only_a_policy_with_memory_learns_to_remember() -> None:
    assert learned(RecurrentPPO, MEMORY, 18, delay=4) > 0.8
    assert abs(learned(PPO, {"hidden_sizes": (16,), "learning_rate": 3e-3}, 18, delay=4)) < 0.5


@pytest.mark.slow
@pytest.mark.parametrize("cell", ["lstm", "gru", ""])
def test_a_program_learns_to_remember_a_game_of_seven_steps(tmp_path: Path, quick_profiles: None, cell: str) -> None:
    composer = composer_of(tmp_path, {}, horizon=64, epochs=10)
    composer.set_actors(1, env=RememberCue, envs_per_actor=8, env_kwargs={"delay": 6})
    own = {**MEMORY, "cell": cell} if cell else {"hidden_sizes": (16,), "learning_rate": 3e-3}
    composer.set_train_function(RecurrentPPO if cell else PPO, batch_size=256, target_kl=0.03, **own)
    composer.run()
    program = composer.runtime_gen(path=tmp_path / "program.py", timesteps=20_000)
    code, output = run(program, "--serial", "--eval-episodes", "100", "--run-dir", str(tmp_path / "run"))
    assert code == 0, output
    mean = summary(tmp_path / "run")["last"]["mean"]
    assert mean > 0.9 if cell else abs(mean) < 0.5, output
