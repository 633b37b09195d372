"""Action masks: forbidden actions are taken nowhere, neither in exploration, evaluations, policies nor targets."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from programs import ONE_CPU, make_program, run, write_csv_pair
from trainers import TinyDQN, TinyPPO

import pearl
from composer import Composer
from pearl.action_masks import MaskReader
from pearl.actors.actor import ActorSetup
from pearl.actors.native_policy import NativePolicy
from pearl.actors.policy_plan import read_policy
from pearl.actors.rollout_actor import make_actor
from pearl.algorithms import A2C, DQN, PPO, SAC
from pearl.algorithms.trainer import batch_type_of, make_trainer, transition_of
from pearl.backends.cpu.learner import NativeLearner
from pearl.backends.cpu.rollout_learner import NativeRolloutLearner
from pearl.backends.cuda.learner import CudaLearner
from pearl.backends.fpga.learner import FpgaLearner
from pearl.backends.sycl.learner import SyclLearner
from pearl.errors import EnvError, PolicyError, TrainerError
from pearl.exploration import EpsilonGreedy, make_explorer
from pearl.policy import evaluate_policy, export_policy
from pearl.rollout.columns import last_value_field, rollout_columns
from pearl.runtime.evaluation import evaluate
from pearl.runtime.queues import DataCollectionQueue
from pearl.spec import ActorSpec, ActorStep, RolloutSpec, TrainSpec

MASKED = {"action_masks": True}
SEEN = spaces.Box(0, 1, (5,), np.float32)
FOUR, SEVERAL = spaces.Discrete(4, start=2), spaces.MultiDiscrete([3, 2])


class Calm(TinyDQN):
    action_masks = True
    exploration = EpsilonGreedy(0.7, 0.7, 1)


def message_of(trainer_class: type, env: str, *, native: bool, kwargs: dict[str, Any], n_step: int = 1) -> Any:
    """What an actor of three environments sends; the environment raises at a forbidden action."""
    spec = ActorSpec(env, envs_per_actor=3, env_kwargs=kwargs)
    made = gym.make(env, **kwargs)
    observed, acts = made.observation_space, made.action_space
    trainer = make_trainer(trainer_class, observed, acts, settings=MASKED)
    on_policy = issubclass(trainer_class, PPO)
    columns = rollout_columns(observed, acts, masked=True)
    transition = columns if on_policy else transition_of(trainer_class, observed, acts, MASKED)
    rollout = RolloutSpec(horizon=50) if on_policy else None
    plan = read_policy(trainer) if native else None
    train = TrainSpec(n_step=n_step)
    common = {"policy": plan, "transition": transition, "rollout": rollout, "steps_per_message": 50}
    setup = ActorSetup(trainer_class, MASKED, spec, train, 0, **common)  # type: ignore[arg-type]
    actor = make_actor(setup, None if native else trainer)
    further = (last_value_field(3),) if on_policy else ()
    queue = DataCollectionQueue(transition, setup.message_rows(), 1, further=further)
    message = queue.reserve()
    assert message is not None
    rows = actor.collect(message)
    actor.close()
    return {f.name: message[f.name][:rows] for f in transition.fields}


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("by", ["info", "method"])
@pytest.mark.parametrize("n_step", [1, 3])
def test_transitions_hold_the_mask_of_the_next_observation(native: bool, by: str, n_step: int) -> None:
    found = message_of(Calm, "Gated-v0", native=native, kwargs={"by": by}, n_step=n_step)
    assert len(found["reward"]) > 100
    ended = found["discount"] == 0
    assert ended.any()
    # The observation shows its mask; where the task ended, nothing is allowed, and nothing is asked.
    np.testing.assert_array_equal(found["next_action_mask"][~ended], found["next_obs"][~ended, :4])
    assert (found["next_action_mask"][ended] == 1).all()
    taken = found["obs"][np.arange(len(ended)), found["action"]]
    assert (taken == 1).all()
    assert len(np.unique(found["action"])) == 4


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("several", [False, True])
def test_rollouts_hold_the_masks_that_their_actions_obeyed(native: bool, several: bool) -> None:
    found = message_of(TinyPPO, "Gated-v0", native=native, kwargs={"several": several})
    masks, obs, real = found["action_mask"], found["obs"], found["end"] != 2
    np.testing.assert_array_equal(masks[real], obs[real, :-1])
    parts = np.split(masks, [3], axis=1) if several else [masks]
    for part, action in zip(parts, found["action"].reshape(len(masks), -1).T, strict=True):
        assert (part[np.arange(len(part)), action] == 1).all()
    assert (found["log_prob"] <= 1e-6).all()


@pytest.mark.parametrize("reset", [mode.value for mode in gym.vector.AutoresetMode])
def test_all_ways_of_resetting_give_the_same_masks(reset: str) -> None:
    kwargs = {"reset": reset}
    spec = ActorSpec("GatedVector-v0", envs_per_actor=2, vectorization="vector_entry_point", env_kwargs=kwargs)
    trainer = make_trainer(Calm, SEEN, FOUR)
    transition = transition_of(Calm, SEEN, FOUR)
    setup = ActorSetup(Calm, {}, spec, TrainSpec(), 0, transition=transition, steps_per_message=60)
    actor = make_actor(setup, trainer)
    message = DataCollectionQueue(transition, setup.message_rows(), 1).reserve()
    assert message is not None
    rows = actor.collect(message)
    ended = message["discount"][:rows] == 0
    assert ended.any()
    next_obs, masks = message["next_obs"][:rows], message["next_action_mask"][:rows]
    np.testing.assert_array_equal(masks[~ended], next_obs[~ended, :4])
    actor.close()


@pytest.mark.parametrize("double", [False, True])
def test_targets_take_the_largest_allowed_value(double: bool) -> None:
    trainer = make_trainer(DQN, SEEN, FOUR, seed=3, settings={**MASKED, "double": double, "tau": 1.0})
    assert isinstance(trainer, DQN)
    rng, rows = np.random.default_rng(0), 16
    obs, next_obs = (torch.from_numpy(rng.random((rows, 5), np.float32)) for _ in range(2))
    masks = rng.integers(2, size=(rows, 4)).astype(np.uint8)
    masks[np.arange(rows), rng.integers(4, size=rows)] = 1
    action = torch.from_numpy(rng.integers(4, size=rows))
    reward, discount = torch.ones(rows), torch.full((rows,), 0.9)
    with torch.no_grad():
        trainer.in_torch()
        for parameter in trainer.target_q.parameters():
            parameter.mul_(1.5)
        allowed = torch.from_numpy(masks) == 1
        judged, online = trainer.target_q(next_obs), trainer.q(next_obs)
        best = torch.stack([(online if double else judged)[i].masked_fill(~allowed[i], -9e9) for i in range(rows)])
        expected = reward + discount * judged[torch.arange(rows), best.argmax(dim=1)]
        value = trainer.q(obs)[torch.arange(rows), action]
    batch = batch_type_of(trainer)(obs, action, reward, next_obs, discount, torch.from_numpy(masks))  # type: ignore[call-arg]
    priorities = trainer.update_policy(batch, torch.ones(rows))
    torch.testing.assert_close(priorities, (value - expected).abs(), rtol=1e-5, atol=1e-6)


def test_masked_distributions_are_those_of_what_is_allowed() -> None:
    trainer = make_trainer(PPO, SEEN, SEVERAL, seed=1, settings=MASKED)
    assert isinstance(trainer, PPO)
    rng, rows = np.random.default_rng(0), 500
    obs = rng.random((rows, 5), np.float32)
    masks = rng.integers(2, size=(rows, 5)).astype(bool)
    masks[:, [1, 4]] = True
    noise = rng.random((rows, 2), np.float32)
    noise[:50] = np.nextafter(np.float32(1), np.float32(0))  # beyond all rounded sums
    native = NativePolicy(read_policy(trainer))
    actions, log_probs = np.empty((rows, 2), np.int64), np.empty(rows, np.float32)
    values = np.empty(rows, np.float32)
    native.explore_into(obs, noise, actions, log_probs, values, masks)
    inputs = torch.from_numpy(obs), torch.from_numpy(noise), torch.from_numpy(masks)
    with torch.no_grad():
        drawn, log_prob, value = trainer.explore(*inputs)
        again, entropy, _ = trainer.evaluate_actions(inputs[0], drawn, inputs[2])
        outputs = trainer.networks(inputs[0])[0]
        greedy = trainer.get_action(inputs[0], inputs[2])
    np.testing.assert_array_equal(actions, drawn)
    np.testing.assert_array_equal(native.act(obs, masks), greedy)
    for found in (log_prob, again):
        np.testing.assert_allclose(log_probs, found, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(values, value, rtol=1e-4, atol=1e-5)
    expected = torch.zeros(rows)
    for part, logits, allowed in zip(drawn.T, outputs.split([3, 2], 1), inputs[2].split([3, 2], 1), strict=True):
        assert allowed.gather(1, part[:, None]).all()
        odds = logits.exp() * allowed
        expected += (odds.gather(1, part[:, None]).squeeze(1) / odds.sum(dim=1)).log()
    torch.testing.assert_close(log_prob, expected, rtol=1e-4, atol=1e-5)
    alone = masks.sum(axis=1) == 2
    assert alone.any()
    np.testing.assert_allclose(entropy[torch.from_numpy(alone)], 0.0, atol=1e-5)


def test_exploration_draws_allowed_actions_alike() -> None:
    explorer = make_explorer(EpsilonGreedy(1.0, 1.0, 1), FOUR, 3, np.random.default_rng(0))
    masks = np.tile(np.array([1, 0, 1, 1], bool), (9_000, 1))
    counts = np.bincount(explorer.apply(np.zeros(9_000, np.int64), 5, masks), minlength=4)
    assert counts[1] == 0
    assert (abs(counts[[0, 2, 3]] - 3000) < 250).all()


# --- programs and policies ---


def check_policy(run_dir: Path) -> None:
    policy = pearl.load_policy(run_dir)
    found = evaluate_policy(policy, episodes=3)  # the environment raises at a forbidden action
    assert found.lengths.sum() > 3
    assert evaluate_policy(policy, episodes=2, deterministic=False).mean is not None
    obs, masks = np.zeros((40, 5), np.float32), np.tile(np.array([0, 1, 0, 0]), (40, 1))
    for deterministic in (True, False):
        actions = policy.predict(obs, deterministic, action_masks=masks)
        assert actions.tolist() == [3] * 40, "counted from 2"
    assert policy.predict(obs[0], action_masks=[False, False, False, True]) == 5
    with pytest.raises(PolicyError, match="was trained with action masks: pass action_masks"):
        policy.predict(obs)
    with pytest.raises(PolicyError, match=r"needs action_masks of shape \(40, 4\).*found shape \(4,\)"):
        policy.predict(obs, action_masks=masks[0])
    with pytest.raises(PolicyError, match=r"allows no action: \[0, 0, 0, 0\]"):
        policy.predict(obs[0], action_masks=[0, 0, 0, 0])
    graph = torch.jit.load(export_policy(policy, run_dir / "policy.pt", "torchscript"))
    assert graph(torch.from_numpy(obs), torch.from_numpy(masks == 1)).tolist() == [3] * 40
    file = export_policy(policy, run_dir / "policy.safetensors", "safetensors")
    assert pearl.load_policy(file).predict(obs[0], action_masks=masks[0]) == 3


@pytest.mark.parametrize(
    ("implementation", "setting"), [("native", 2), pytest.param("torch", 1, marks=pytest.mark.slow)]
)
def test_a_dqn_program_never_takes_a_forbidden_action(
    tmp_path: Path, quick_profiles: None, implementation: str, setting: int
) -> None:
    settings = {**MASKED, "implementation": implementation}
    program = make_program(tmp_path, env="Gated-v0", settings=settings, setting=setting)
    assert f'implementation="{implementation}"' in program.read_text(encoding="utf-8")
    code, output = run(program, "--serial", "--timesteps", "400", "--eval-episodes", "3", "--run-dir", "run")
    assert code == 0, output
    check_policy(tmp_path / "run")


@pytest.mark.parametrize(
    ("implementation", "options"), [("native", ()), pytest.param("torch", ("--serial",), marks=pytest.mark.slow)]
)
def test_a_ppo_program_never_takes_a_forbidden_action(
    tmp_path: Path, quick_profiles: None, implementation: str, options: tuple[str, ...]
) -> None:
    composer = Composer(progress=False)
    devices, connections = write_csv_pair(tmp_path, ONE_CPU)
    composer.set_device_file(devices)
    composer.set_connection_file(connections)
    composer.set_actors(1, env="Gated-v0", envs_per_actor=4)
    composer.set_train_function(TinyPPO, implementation=implementation, **MASKED)
    composer.run()
    program = composer.runtime_gen(path=tmp_path / "program.py", timesteps=400)
    assert f'implementation="{implementation}"' in program.read_text(encoding="utf-8")
    code, output = run(program, *options, "--eval-episodes", "3", "--run-dir", "run")
    assert code == 0, output
    check_policy(tmp_path / "run")


def test_learners_and_algorithms_without_masks_say_so() -> None:
    trainer = make_trainer(DQN, SEEN, FOUR, settings=MASKED)
    assert NativeLearner.supports(trainer) is None
    for learner in (SyclLearner, CudaLearner, FpgaLearner):
        assert learner.supports(make_trainer(DQN, SEEN, FOUR)) is None
        assert str(learner.supports(trainer)).startswith("action masks, which this Learner does not take")
    for algorithm, space in itertools.product((PPO, A2C), (FOUR, SEVERAL, spaces.MultiBinary(3))):
        assert NativeRolloutLearner.supports(make_trainer(algorithm, SEEN, space, settings=MASKED)) is None
    arm = spaces.Box(-1, 1, (2,), np.float32)
    with pytest.raises(TrainerError, match="SAC has no setting 'action_masks'"):
        make_trainer(SAC, SEEN, arm, settings=MASKED)
    masked_sac = type("MaskedSAC", (SAC,), {"action_masks": True})
    with pytest.raises(
        TrainerError, match="action_masks must be False, or True for one of DQN, QRDQN, PPO, A2C; found True"
    ):
        make_trainer(masked_sac, SEEN, arm)
    with pytest.raises(EnvError, match="action_masks=True needs Discrete, MultiDiscrete or MultiBinary actions"):
        make_trainer(PPO, SEEN, arm, settings=MASKED)


@pytest.mark.parametrize(
    ("space", "info", "said"),
    [
        (FOUR, {}, r"gives no action mask.*its info has nothing.*define action_masks\(\)"),
        (FOUR, {"lives": 3}, "gives no action mask.*its info has lives"),
        (FOUR, {"action_mask": np.ones(5)}, r"must have shape \(4,\).*found shape \(5,\) of float64"),
        (FOUR, {"action_mask": np.array(["a", "b", "c", "d"])}, "a number or bool for each choice; found"),
        (FOUR, {"action_mask": np.zeros(4, np.int8)}, r"allows no action: \[0, 0, 0, 0\]"),
        (SEVERAL, {"action_mask": [1, 1, 1, 0, 0]}, r"allows no action for number 1 of the action"),
    ],
)
def test_wrong_masks_are_named(space: Any, info: dict[str, Any], said: str) -> None:
    with pytest.raises(EnvError, match=said):
        MaskReader(space, "Mine-v0").one(info)
    batch = {name: [value] for name, value in info.items()}
    with pytest.raises(EnvError, match=said):
        MaskReader(space, "Mine-v0").batch(batch, np.zeros(1, bool))


def test_an_environment_without_masks_is_refused(tmp_path: Path) -> None:
    trainer = make_trainer(DQN, spaces.Box(-1, 1, (4,), np.float32), spaces.Discrete(2), settings=MASKED)
    with pytest.raises(EnvError, match="CartPole-v1 gives no action mask"):
        evaluate(trainer, ActorSpec("CartPole-v1"), 1, 0)


def test_a_truncated_episode_needs_the_mask_of_its_last_observation() -> None:
    reader, done = MaskReader(FOUR, "Mine-v0"), np.array([True, False])
    masks, final = np.ones((2, 4), bool), np.array([[0, 1, 0, 0], [0, 0, 0, 0]])
    found = reader.last({"final_info": {"action_mask": final}}, masks, done, np.zeros(2, bool))
    assert found.tolist() == [[False, True, False, False], [True] * 4]
    with pytest.raises(EnvError, match="gives no action mask"):
        reader.last({}, masks, done, np.zeros(2, bool))
    assert reader.last({}, masks, done, done).all()
    assert ActorStep(*[np.zeros(1)] * 7, None).next_action_mask is None


def test_the_guide_trains(tmp_path: Path, quick_profiles: None, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parent.parent / "docs" / "environments.md").read_text(encoding="utf-8")
    texts = [s for s in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "action_mask" in s]
    names = [re.match(r"# (\w+\.py)\n", text)[1] for text in texts]  # type: ignore[index]
    assert names == ["queue_game.py", "compose_queue_game.py", "use_queue_game.py"]
    for name, text in zip(names, texts, strict=True):
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    code, output = run(tmp_path / names[1])
    assert code == 0, output
    arguments = ("--timesteps", "300", "--eval-episodes", "2")
    code, output = run(tmp_path / "queue_game_runtime.py", *arguments)
    assert code == 0, output
    code, output = run(tmp_path / names[2])
    assert code == 0, output
