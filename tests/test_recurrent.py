"""Recurrent policies: sequences in the replay, states from step to step, and RecurrentDQN."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_environments import RememberCue
from policies import command, run_folder, watch_policy_without_a_screen
from programs import make_program, run
from torch.nn import functional

import pearl
from pearl.actors.actor import Actor, ActorSetup
from pearl.actors.sequence_window import SequenceWindow
from pearl.algorithms import DQN, RecurrentDQN
from pearl.algorithms.batch import Batch
from pearl.algorithms.trainer import batch_type_of, make_trainer, transition_of
from pearl.backends import learners
from pearl.errors import ConfigurationError, PolicyError, TrainerError
from pearl.exploration import EpsilonGreedy, Exploration
from pearl.learner.torch_learner import TorchLearner
from pearl.policy import evaluate_policy, export_policy
from pearl.replay.frames import check_shared
from pearl.replay.synthetic import random_transitions
from pearl.runtime.evaluation import evaluate
from pearl.spec import ActorSpec, ActorStep, Column, ReplaySpec, TrainSpec, TransitionSpec

SEEN, TWO = spaces.Box(-1.0, 1.0, (2,), np.float32), spaces.Discrete(2)
CASE = RecurrentDQN, SEEN, TWO
SMALL = {"recurrent_size": 5, "hidden_sizes": (6,), "sequence_length": 6, "sequence_overlap": 3, "burn_in": 2}


class SmallRecurrentDQN(RecurrentDQN):
    recurrent_size = 8
    hidden_sizes = (8,)
    sequence_length = 6
    sequence_overlap = 3
    burn_in = 3


class Greedy(SmallRecurrentDQN):
    sequence_length = 4
    sequence_overlap = 2
    burn_in = 2
    exploration: Exploration | None = None


# --- sequences --------------------------------------------------------------------------------------------------------


def expected_sequences(
    episode: dict[str, np.ndarray], terminated: bool, length: int, overlap: int, n: int, gamma: float
) -> list[dict[str, Any]]:
    """The sequences of one episode of `count` steps, with `count + 1` observations, written out step by step."""
    count = len(episode["reward"])
    found = []
    for start in range(0, count, length - overlap):
        if start and start + overlap >= count:
            break  # all its steps are in the sequence before
        end = min(start + length, count)
        rows: dict[str, Any] = {
            "obs": np.zeros(length + 1, np.float32),
            "action": np.zeros(length, np.int64),
            "reward": np.zeros(length),
            "discount": np.zeros(length),
            "steps": np.zeros(length, np.int64),
            "state": episode["state"][start],
            "position": start,
        }
        rows["obs"][: end - start + 1] = episode["obs"][start : end + 1]
        for t in range(start, end):
            last = min(t + n, end)
            rows["action"][t - start] = episode["action"][t]
            rows["reward"][t - start] = sum(gamma ** (k - t) * episode["reward"][k] for k in range(t, last))
            rows["discount"][t - start] = 0 if terminated and last == count else gamma ** (last - t)
            rows["steps"][t - start] = last - t
        found.append(rows)
    return found


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 7).flatmap(lambda length: st.tuples(st.just(length), st.integers(0, length - 1))),
    st.integers(1, 4),
    st.lists(st.tuples(st.integers(1, 20), st.booleans()), min_size=1, max_size=5),
    st.integers(0, 2**31),
)
def test_sequences_are_those_of_a_plain_loop_over_episodes(
    lengths: tuple[int, int], n: int, episodes: list[tuple[int, bool]], seed: int
) -> None:
    (length, overlap), rng, gamma = lengths, np.random.default_rng(seed), 0.9
    spec = TransitionSpec.from_spaces(spaces.Box(-1, 1, (), np.float32), TWO).sequences(length, overlap, 3)
    window = SequenceWindow(spec, 2, n, gamma)
    out, row, wanted = spec.empty(200), 0, []
    for column in out.values():
        column.fill(99)
    for count, terminated in episodes:
        episode = {
            "obs": rng.standard_normal(count + 1).astype(np.float32),
            "action": rng.integers(2, size=count),
            "reward": rng.standard_normal(count),
            "state": rng.standard_normal((count, 3)).astype(np.float32),
        }
        wanted += expected_sequences(episode, terminated, length, overlap, n, gamma)
        for t in range(count):
            # Only the second environment steps: in the first one, this step belongs to no episode.
            both = {name: np.stack([values[t], values[t]]) for name, values in episode.items()}
            next_obs = np.repeat(episode["obs"][t + 1], 2)
            ends = np.array([True, t == count - 1])
            real = np.array([False, True])
            step = both["obs"], both["action"], both["reward"], next_obs, ends & terminated, ends, real
            row = window.push(*step, both["state"], out, row)
    assert row == len(wanted)
    for found, rows in enumerate(wanted):
        for name, values in rows.items():
            np.testing.assert_allclose(out[name][found], values, rtol=1e-5, atol=1e-6, err_msg=f"{name} of row {found}")


def test_a_row_is_described_by_its_columns() -> None:
    spec = transition_of(RecurrentDQN, SEEN, TWO, SMALL)
    assert {f.name: (f.shape, f.dtype) for f in spec.fields} == {
        "obs": ((7, 2), "float32"),
        "action": ((6,), "int64"),
        "reward": ((6,), "float32"),
        "discount": ((6,), "float32"),
        "steps": ((6,), "int64"),
        "state": ((10,), "float32"),
        "position": ((), "int64"),
    }
    assert transition_of(RecurrentDQN, SEEN, TWO, {**SMALL, "cell": "gru"}).fields[5].shape == (5,)
    assert (spec.observation_shape, spec.steps_per_row) == ((2,), 3)


def _zeros(step: ActorStep) -> np.ndarray:
    return np.zeros(len(step.reward), np.float32)


def test_what_sequences_do_not_go_with_is_named() -> None:
    common = TransitionSpec.from_spaces(SEEN, TWO)
    with pytest.raises(ConfigurationError, match="smaller than sequence_length, 4; found 4"):
        common.sequences(4, 4, 1)
    with pytest.raises(ConfigurationError, match="found further columns: extra"):
        common.with_columns(Column("extra", (), "float32", make=_zeros)).sequences(4, 2, 1)
    for shared in ({"share_next_obs": True}, {"share_frames": True}):
        with pytest.raises(ConfigurationError, match="this algorithm stores sequences"):
            check_shared(common.sequences(4, 2, 1), ReplaySpec(100, **shared))  # type: ignore[arg-type]


# --- the loss ---------------------------------------------------------------------------------------------------------


def batch_of(trainer: RecurrentDQN, rows: int, seed: int = 0) -> tuple[Batch, torch.Tensor]:
    """Sequences from windows over random episodes, and importance weights, in float64."""
    rng = np.random.default_rng(seed)
    spec = transition_of(
        type(trainer), SEEN, TWO, {name: getattr(trainer, name) for name in SMALL} | {"cell": trainer.cell}
    )
    window = SequenceWindow(spec, 3, 2, 0.9)
    out, row = spec.empty(rows + 3), 0
    while row < rows:
        done = rng.random(3) < 0.12
        terminated = done & (rng.random(3) < 0.5)
        obs, next_obs = rng.standard_normal((2, 3, 2))
        state = 0.5 * rng.standard_normal((3, trainer.q.state_size))
        step = obs, rng.integers(2, size=3), rng.standard_normal(3), next_obs, terminated, done, np.ones(3, bool)
        row = window.push(*step, state, out, row)
    names = batch_type_of(trainer)._fields
    columns = [torch.from_numpy(out[name][:rows]) for name in names]
    batch = batch_type_of(trainer)(*(c.double() if c.is_floating_point() else c for c in columns))
    return batch, torch.from_numpy(rng.uniform(0.2, 1.0, rows))


def outputs_step_by_step(
    network: torch.nn.Module, cell: str, obs: torch.Tensor, state: torch.Tensor, cut: int | None
) -> list[torch.Tensor]:
    """Values `(actions,)` of one sequence by the formulas of the LSTM and the GRU; no gradient passes step `cut`."""
    weights = dict(network.named_parameters())
    w_in, w_rec, b_in, b_rec = (weights[f"cell.{n}_l0"] for n in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"))
    h, c = state.chunk(2) if cell == "lstm" else (state, state)
    found = []
    for t in range(len(obs)):
        if t == cut:
            h, c = h.detach(), c.detach()
        x = functional.relu(weights["encoder.0.weight"] @ obs[t] + weights["encoder.0.bias"])
        from_x, from_h = w_in @ x + b_in, w_rec @ h + b_rec
        if cell == "lstm":
            i, f, g, o = (from_x + from_h).chunk(4)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
        else:
            (xr, xz, xn), (hr, hz, hn) = from_x.chunk(3), from_h.chunk(3)
            z = (xz + hz).sigmoid()
            h = (1 - z) * (xn + (xr + hr).sigmoid() * hn).tanh() + z * h
        found.append(weights["head.weight"] @ h + weights["head.bias"])
    return found


@pytest.mark.parametrize("cell", ["lstm", "gru"])
@pytest.mark.parametrize("options", [{}, {"double": False}, {"burn_in": 0}, {"burn_in": 3, "priority_eta": 0.25}])
def test_loss_and_priorities_are_those_of_a_loop_in_float64(cell: str, options: dict[str, Any]) -> None:
    trainer = RecurrentDQN(SEEN, TWO, seed=3, cell=cell, **{**SMALL, **options})
    with torch.no_grad():
        for parameter in trainer.target_q.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    trainer.q.double()
    trainer.target_q.double()
    batch, weights = batch_of(trainer, 24)
    assert {0} < set(batch.position.tolist())  # type: ignore[attr-defined]
    assert (batch.steps == 0).any()  # type: ignore[attr-defined]

    total, priorities = torch.zeros((), dtype=torch.float64), []
    for b in range(24):
        begins = int(batch.position[b]) == 0  # type: ignore[attr-defined]
        cut = None if begins else trainer.burn_in
        obs, state, steps = batch.obs[b], batch.state[b], batch.steps[b].tolist()  # type: ignore[attr-defined]
        values = outputs_step_by_step(trainer.q, cell, obs, state, cut)
        with torch.no_grad():
            targets = outputs_step_by_step(trainer.target_q, cell, obs, state, None)
        errors = []
        for t in range(0 if begins else trainer.burn_in, trainer.sequence_length):
            if not steps[t]:
                continue
            place = t + steps[t]
            best = int((values[place] if trainer.double else targets[place]).argmax())
            target = batch.reward[b, t] + batch.discount[b, t] * targets[place][best]
            value = values[t][int(batch.action[b, t])]
            total = total + weights[b] * functional.smooth_l1_loss(value, target)
            errors.append(abs(float(value.detach() - target)))
        eta = trainer.priority_eta
        priorities.append(eta * max(errors) + (1 - eta) * sum(errors) / len(errors))
    parameters = list(trainer.q.parameters())
    wanted = torch.autograd.grad(total / (24 * trainer.sequence_length), parameters)

    for parameter in parameters:
        parameter.grad = None
    found = trainer._compute(batch, weights, 24)
    np.testing.assert_allclose(found.numpy(), priorities, rtol=1e-10)
    for parameter, gradient in zip(parameters, wanted, strict=True):
        assert parameter.grad is not None
        np.testing.assert_allclose(parameter.grad.numpy(), gradient.numpy(), rtol=1e-8, atol=1e-12)


def test_a_batch_in_parts_gives_the_same_step() -> None:
    columns: dict[str, np.ndarray] = {}
    weights = []
    for parts in (1, 3):
        trainer = RecurrentDQN(SEEN, TWO, seed=3, **SMALL)
        batch, importance = batch_of(trainer, 24)
        columns = {
            name: (c.float() if c.is_floating_point() else c).numpy()
            for name, c in zip(batch._fields, batch, strict=True)
        }
        learner = TorchLearner(trainer, sub_batches=parts)
        for _ in range(3):
            priorities = learner.step(columns, importance.float().numpy()).priorities
        weights.append((priorities, np.concatenate(learner.policy_memory())))
    for whole, in_parts in zip(*weights, strict=True):
        np.testing.assert_allclose(whole, in_parts, rtol=1e-4, atol=1e-5)


def test_the_columns_that_the_composer_measures_with_can_be_trained_on() -> None:
    trainer = RecurrentDQN(spaces.Box(0, 255, (4, 36, 36), np.uint8), spaces.Discrete(3, start=2), **SMALL)
    spec = transition_of(RecurrentDQN, trainer.observation_space, trainer.action_space, SMALL)
    made = random_transitions(spec, trainer.action_space, TrainSpec(), 4, np.random.default_rng(0))
    assert set(np.unique(made["action"])) <= {0, 1, 2}
    assert TorchLearner(trainer).step(made, np.ones(4, np.float32)).td_error > 0


# --- acting -----------------------------------------------------------------------------------------------------------


def collected(vectorization: str, trainer: type, messages: int = 12) -> tuple[dict[str, np.ndarray], RecurrentDQN]:
    spec = ActorSpec("PearlCue-v0", envs_per_actor=2, env_kwargs={"delay": 6}, vectorization=vectorization)  # type: ignore[arg-type]
    transition = transition_of(trainer, SEEN, TWO)
    setup = ActorSetup(trainer, {}, spec, TrainSpec(), 0, transition=transition)
    actor, taken = Actor(setup), []
    columns = transition.empty(setup.message_rows())
    columns |= {"counts": np.zeros(4, np.int64), "episode_return": np.zeros(99), "episode_length": np.zeros(99)}
    for _ in range(messages):
        rows = actor.collect(columns)
        taken.append({f.name: columns[f.name][:rows].copy() for f in transition.fields})
    actor.close()
    assert isinstance(actor.trainer, RecurrentDQN)
    return {name: np.concatenate([part[name] for part in taken]) for name in taken[0]}, actor.trainer


@pytest.mark.parametrize("vectorization", ["sync", "vector_entry_point"])
def test_actors_carry_the_state_and_clear_it_where_episodes_begin(vectorization: str) -> None:
    found, trainer = collected(vectorization, Greedy)
    begins = found["position"] == 0
    assert begins.sum() >= 10
    assert (~begins).sum() >= 10
    assert not found["state"][begins].any()
    assert found["state"][~begins].any(axis=1).all()
    with torch.inference_mode():
        for row in range(len(begins)):
            obs, state = torch.from_numpy(found["obs"][row : row + 1]), torch.from_numpy(found["state"][row : row + 1])
            valid = int((found["steps"][row] > 0).sum())
            for t in range(valid):
                if t == Greedy.sequence_overlap:
                    later = np.all(np.isclose(found["state"], state.numpy(), atol=1e-6), axis=1)
                    assert valid < Greedy.sequence_length or later.any()  # where the next sequence begins
                action, state = trainer.get_action_from(obs[:, t], state)
                assert int(action) == found["action"][row, t]


def test_evaluations_carry_the_state() -> None:
    trainer = solver()
    found = evaluate(trainer, ActorSpec(RememberCue, env_kwargs={"delay": 6}), 130, 0)
    assert found is not None
    assert found.returns.tolist() == [1.0] * 130
    assert found.lengths.tolist() == [7] * 130


def solver() -> RecurrentDQN:
    """A trainer whose weights solve RememberCue: the hidden state moves far with the cue, and stays."""
    trainer = RecurrentDQN(SEEN, TWO, seed=1, cell="gru", recurrent_size=2, hidden_sizes=(2,))
    with torch.no_grad():
        for parameter in trainer.q.parameters():
            parameter.zero_()
        weights = dict(trainer.q.named_parameters())
        weights["encoder.0.weight"][:, 0] = torch.tensor([1.0, -1.0])  # the two signs of the cue
        weights["cell.weight_ih_l0"][4:] = 9.0 * torch.eye(2)  # new content
        weights["cell.weight_ih_l0"][2:4] = -20.0  # with a cue, it is taken
        weights["cell.bias_ih_l0"][2:4] = 10.0  # else the old one is kept
        weights["head.weight"][:] = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    return trainer


# --- saved policies ---------------------------------------------------------------------------------------------------


def test_a_saved_policy_acts_as_the_trainer(tmp_path: Path) -> None:
    trainer = make_trainer(*CASE, seed=4, settings={"cell": "lstm", "recurrent_size": 12})
    assert isinstance(trainer, RecurrentDQN)
    policy = pearl.load_policy(run_folder(tmp_path / "run", CASE, trainer, env="PearlCue-v0"))
    observations = np.random.default_rng(0).uniform(-1, 1, (9, 5, 2)).astype(np.float32)
    expected, state = trainer.initial_state(5), None
    kept: Any = None
    for t, obs in enumerate(observations):
        starts = np.array([t == 4, False, False, t == 6, False])
        expected = torch.where(torch.from_numpy(starts)[:, None], 0.0, expected)
        with torch.inference_mode():
            wanted, expected = trainer.get_action_from(torch.from_numpy(obs), expected)
        actions, state = policy.predict_with_state(obs, state, starts)
        assert actions.tolist() == wanted.tolist()
        np.testing.assert_allclose(state, expected.numpy(), atol=1e-6)
        one, kept = policy.predict_with_state(obs[1], kept, episode_start=t == 0)
        assert one == actions[1]
        np.testing.assert_allclose(kept, state[1], atol=1e-6)


def test_a_recurrent_policy_says_how_it_is_used(tmp_path: Path) -> None:
    policy = pearl.load_policy(run_folder(tmp_path / "run", CASE, solver(), env="PearlCue-v0"))
    assert policy.is_recurrent
    obs = np.zeros((3, 2), np.float32)
    with pytest.raises(PolicyError, match="predict_with_state"):
        policy.predict(obs)
    with pytest.raises(PolicyError, match=r"state of shape \(3, 2\) for these observations; found \(2,\)"):
        policy.predict_with_state(obs, np.zeros(2))
    with pytest.raises(PolicyError, match=r"episode_start must have shape \(3,\)"):
        policy.predict_with_state(obs, None, [True, False])
    again = pearl.load_policy(export_policy(policy, tmp_path / "policy.safetensors", "safetensors"))
    assert again.initial_state(1).shape == (1, 2)
    plain = pearl.load_policy(run_folder(tmp_path / "plain", (DQN, SEEN, TWO)))
    with pytest.raises(PolicyError, match="has no state from step to step: call predict"):
        plain.predict_with_state(obs)


def test_a_saved_policy_plays_with_its_memory(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", CASE, solver(), env="PearlCue-v0")
    policy = pearl.load_policy(folder)
    assert evaluate_policy(policy, RememberCue, episodes=30).returns.tolist() == [1.0] * 30
    said = command("evaluate", folder, "--episodes", "20", "--import", "memory_environments")
    assert said.exit_code == 0, said.output
    assert "1.00" in said.output
    explored = evaluate_policy(policy, RememberCue, episodes=200, deterministic=False)
    assert 0.5 < explored.mean < 1.0  # epsilon ends at a few per cent


def test_a_policy_is_shown_with_its_memory(tmp_path: Path) -> None:
    env = gym.make("CartPole-v1")
    case = RecurrentDQN, env.observation_space, env.action_space
    trainer = RecurrentDQN(*case[1:], seed=2, recurrent_size=8)
    with torch.no_grad():
        trainer.q.head.bias[:] = 0.0  # so that actions depend on what was seen
    policy = pearl.load_policy(run_folder(tmp_path / "run", case, trainer, env="CartPole-v1"))
    shown = watch_policy_without_a_screen(policy, episodes=3, seed=5)
    lengths = []
    for episode in range(3):
        obs, _ = env.reset(seed=40_401 if episode == 0 else None)
        state, done = None, False
        lengths.append(0)
        while not done:
            action, state = policy.predict_with_state(obs, state)
            obs, _, terminated, truncated, _ = env.step(action)
            done = terminated or truncated
            lengths[-1] += 1
    assert [episode.length for episode in shown] == lengths


# --- settings and refusals --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"cell": "rnn"}, 'cell must be "lstm" or "gru"; found \'rnn\''),
        ({"recurrent_size": 0}, "recurrent_size must be a whole number of at least 1; found 0"),
        ({"sequence_overlap": 20}, "sequence_overlap must be smaller than sequence_length, 20; found 20"),
        ({"burn_in": 11}, "burn_in must be at most sequence_overlap, 10"),
        ({"priority_eta": 1.5}, r"priority_eta must be a number in \[0, 1\]; found 1.5"),
        ({"action_masks": True}, "action_masks must be False, or True for one of DQN, QRDQN, PPO, A2C"),
    ],
)
def test_a_wrong_setting_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(TrainerError, match=message):
        make_trainer(RecurrentDQN, SEEN, TWO, settings=wrong)


def test_a_dueling_head_after_the_recurrent_layer_needs_no_hidden_layer() -> None:
    trainer = make_trainer(RecurrentDQN, SEEN, TWO, settings={"dueling": True, "hidden_sizes": ()})
    assert trainer.q(torch.zeros(3, *SEEN.shape)).shape == (3, 2)


def test_a_recurrent_size_is_checked_before_sequences_are_made_of_it() -> None:
    with pytest.raises(TrainerError, match="recurrent_size must be a whole number of at least 1; found '64'"):
        transition_of(RecurrentDQN, SEEN, TWO, {"recurrent_size": "64"})


def test_a_network_without_a_state_is_refused() -> None:
    class Plain(RecurrentDQN):
        build_q_network = DQN.build_q_network  # type: ignore[assignment]

    with pytest.raises(TrainerError, match=r"must make a pearl.algorithms.recurrent_networks.RecurrentNetwork"):
        make_trainer(Plain, SEEN, TWO)


def test_other_learners_refuse_by_name() -> None:
    trainer = RecurrentDQN(SEEN, TWO)
    others = {name: made.supports(trainer) for name, made in learners().items() if name != "torch"}
    assert others
    assert all(reason is not None and "recurrent networks" in reason for reason in others.values()), others


def test_sequences_need_a_policy_with_a_state() -> None:
    class Forgetful(DQN):
        @classmethod
        def transition_with(cls, transition: TransitionSpec, settings: Any, action_space: Any) -> TransitionSpec:
            return super().transition_with(transition, settings, action_space).sequences(4, 2, 1)

    transition = transition_of(Forgetful, SEEN, TWO)
    setup = ActorSetup(Forgetful, {}, ActorSpec("PearlCue-v0"), TrainSpec(), 0, transition=transition)
    with pytest.raises(TrainerError, match=r"Forgetful declares sequences, .* but has no initial_state"):
        Actor(setup)


# --- programs ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("setting", "cell"), [(1, "gru"), (2, "lstm")])
def test_a_program_trains_saves_and_resumes(tmp_path: Path, quick_profiles: None, setting: int, cell: str) -> None:
    program = make_program(
        tmp_path,
        setting=setting,
        trainer=SmallRecurrentDQN,
        env=RememberCue,  # type: ignore[arg-type]
        settings={"cell": cell},
        training={"learning_starts": 20, "batch_size": 8},
    )
    arguments = "--eval-episodes", "4", "--run-dir", str(tmp_path / "run")
    for arguments_now in (("--timesteps", "600", *arguments), ("--timesteps", "900", "--resume", *arguments)):
        code, output = run(program, *arguments_now)
        assert code == 0, output
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["env_steps"] >= 900
    assert summary["gradient_steps"] > 20
    text, changed = program.read_text(), "lstm" if cell == "gru" else "gru"
    other = text.replace(f'"cell": "{cell}"', f'"cell": "{changed}"')
    assert other != text
    (tmp_path / "other.py").write_text(other)
    code, output = run(tmp_path / "other.py", "--serial", "--timesteps", "1200", "--resume", *arguments)
    assert code != 0
    assert "recurrent layer" in output
    policy = pearl.load_policy(tmp_path / "run", "last")
    found = evaluate_policy(policy, RememberCue, episodes=4)
    assert (policy.is_recurrent, found.lengths.tolist()) == (True, [5] * 4)


@pytest.mark.slow
@pytest.mark.parametrize(("trainer", "cell"), [(RecurrentDQN, "lstm"), (RecurrentDQN, "gru"), (DQN, "")])
def test_only_a_policy_with_memory_learns_to_remember(
    tmp_path: Path, quick_profiles: None, trainer: type, cell: str
) -> None:
    recurrent = {"recurrent_size": 16, "sequence_length": 8, "sequence_overlap": 4, "burn_in": 4, "cell": cell}
    own = recurrent if trainer is RecurrentDQN else {}
    program = make_program(
        tmp_path,
        trainer=trainer,
        env=RememberCue,  # type: ignore[arg-type]
        env_kwargs={"delay": 6},
        settings={**own, "hidden_sizes": (16,), "exploration": EpsilonGreedy(1.0, 0.05, 3000)},
        training={"learning_starts": 100, "batch_size": 32, "replay_ratio": 32.0},
        capacity=5000,
    )
    arguments = "--timesteps", "12000", "--eval-episodes", "100", "--run-dir", str(tmp_path / "run")
    code, output = run(program, *arguments)
    assert code == 0, output
    mean = json.loads((tmp_path / "run" / "summary.json").read_text())["last"]["mean"]
    assert mean > 0.9 if trainer is RecurrentDQN else abs(mean) < 0.5, output
