"""Settings of RL Zoo become those of a composition, and what has no counterpart is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import composer.composing
from composer import Composer
from composer.zoo import _DEFAULTS, ZooSettings, _parsed, zoo_settings
from pearl.algorithms import A2C, DDPG, DQN, PPO, QRDQN, SAC, TD3, TQC, RecurrentPPO
from pearl.algorithms.update_frequency import frequency_of
from pearl.cli.app import app
from pearl.errors import ConfigurationError
from pearl.exploration import EpsilonGreedy, GaussianNoise, OrnsteinUhlenbeck

DOCS = Path(__file__).resolve().parent.parent / "docs" / "rl_zoo.md"

# In the form of RL Zoo: YAML 1.1 with tags, anchors, texts of Python, and numbers that YAML takes for texts.
FILES = {
    "dqn": """
atari:
  env_wrapper:
    - stable_baselines3.common.atari_wrappers.AtariWrapper
  frame_stack: 4
  policy: 'CnnPolicy'
  n_timesteps: !!float 1e7
  buffer_size: 100000
CartPole-v1:
  n_timesteps: !!float 5e4
  policy: 'MlpPolicy'
  learning_rate: !!float 2.3e-3
  batch_size: 64
  buffer_size: 100000
  learning_starts: 1000
  gamma: 0.99
  target_update_interval: 10
  train_freq: 256
  gradient_steps: 128
  exploration_fraction: 0.16
  exploration_final_eps: 0.04
  policy_kwargs: "dict(net_arch=[256, 256])"
LunarLander-v2:
  n_timesteps: !!float 1e5
  policy: 'MlpPolicy'
  learning_rate: lin_6.3e-4
  gradient_steps: -1
  target_update_interval: 250
  n_envs: 4
  optimize_memory_usage: True
  replay_buffer_kwargs: "dict(handle_timeout_termination=True)"
MountainCar-v0:
  n_timesteps: 1e5
  learning_rate: 4e-3
  tau: 0.005
  target_update_interval: 1
  train_freq: [1, "step"]
  env_wrapper:
    - gymnasium.wrappers.RescaleObservation:
        min_obs: -1.0
        max_obs: 1.0
""",
    "ppo": """
CartPole-v1:
  n_envs: 8
  n_timesteps: !!float 1e5
  policy: 'MlpPolicy'
  n_steps: 32
  batch_size: 256
  gae_lambda: 0.8
  gamma: 0.98
  n_epochs: 20
  ent_coef: 0.0
  learning_rate: lin_0.001
  clip_range: lin_0.2
HalfCheetah-v4:
  normalize: true
  n_envs: 1
  policy: 'MlpPolicy'
  n_timesteps: !!float 1e6
  batch_size: 64
  n_steps: 512
  gamma: 0.98
  learning_rate: 2.0633e-05
  ent_coef: 0.000401762
  clip_range: 0.1
  n_epochs: 20
  gae_lambda: 0.92
  max_grad_norm: 0.8
  vf_coef: 0.58096
  policy_kwargs: "dict(
                    log_std_init=-2,
                    ortho_init=False,
                    activation_fn=nn.ReLU,
                    net_arch=[dict(pi=[256, 256], vf=[256, 256])]
                  )"
Swimmer-v4: &mujoco-defaults
  normalize: "{'norm_obs': True, 'norm_reward': False}"
  n_timesteps: !!float 1e6
  policy: 'MlpPolicy'
Hopper-v4:
  <<: *mujoco-defaults
  gamma: 0.9999
  clip_range_vf: 0.3
  target_kl: 0.02
Pendulum-v1:
  n_envs: 4
  n_timesteps: !!float 1e5
  policy: 'MlpPolicy'
  use_sde: True
  sde_sample_freq: 4
  env_wrapper: rl_zoo3.wrappers.HistoryWrapper
  learning_rat: 0.1
  policy_kwargs: "dict(net_arch=dict(pi=[64], vf=[32]), optimizer_class=RMSpropTFLike)"
""",
    "sac": """
HalfCheetah-v4: &mujoco-defaults
  n_timesteps: !!float 1e6
  policy: 'MlpPolicy'
  learning_starts: 10000
Swimmer-v4:
  <<: *mujoco-defaults
  gamma: 0.9999
  ent_coef: 'auto_0.1'
LunarLanderContinuous-v3:
  n_timesteps: !!float 5e5
  policy: 'MlpPolicy'
  batch_size: 256
  learning_rate: lin_7.3e-4
  ent_coef: 0.005
  tau: 0.01
  train_freq: 1
  gradient_steps: 1
  policy_kwargs: "dict(net_arch=[400, 300])"
BipedalWalker-v3:
  n_timesteps: !!float 5e5
  policy: 'MlpPolicy'
  train_freq: 64
  gradient_steps: 64
  use_sde: True
  policy_kwargs: "dict(log_std_init=-3, net_arch=[400, 300])"

Walker2d-v4:
  n_timesteps: !!float 5e5
  target_entropy: low
""",
    "td3": """
Pendulum-v1:
  n_timesteps: 20000
  policy: 'MlpPolicy'
  gamma: 0.98
  buffer_size: 200000
  learning_starts: 10000
  noise_type: 'normal'
  noise_std: 0.1
  gradient_steps: 1
  train_freq: 1
  learning_rate: !!float 1e-3
  policy_kwargs: "dict(net_arch=[400, 300])"
Ant-v4:
  n_timesteps: !!float 1e6
  policy: 'MlpPolicy'
  train_freq: [1, "episode"]
""",
    "ddpg": """
MountainCarContinuous-v0:
  n_timesteps: 300000
  policy: 'MlpPolicy'
  noise_type: 'ornstein-uhlenbeck'
  noise_std: 0.5
Pendulum-v1:
  n_timesteps: 20000
  policy: 'MlpPolicy'
  normalize: true
""",
    "a2c": """
Acrobot-v1:
  normalize: true
  n_envs: 16
  n_timesteps: !!float 5e5
  policy: 'MlpPolicy'
  ent_coef: .0
LunarLander-v3:
  n_envs: 8
  n_timesteps: !!float 2e5
  gamma: 0.995
  n_steps: 5
  learning_rate: lin_0.00083
  ent_coef: 1e-5
  use_rms_prop: False
""",
    "qrdqn": """
CartPole-v1:
  n_timesteps: !!float 5e4
  policy: 'MlpPolicy'
  batch_size: 64
  policy_kwargs: "dict(net_arch=[256, 256], n_quantiles=10)"
Acrobot-v1:
  n_timesteps: 1e5
  max_grad_norm: 2
MountainCar-v0:
  n_timesteps: 1e5
  max_grad_norm: null
Other-v1:
  n_timesteps: 1e5
  policy_kwargs: "dict(n_critics=2, n_quantiles=2.5)"
""",
    "tqc": """
Pendulum-v1:
  n_timesteps: 20000
  learning_rate: !!float 1e-3
Hopper-v4:
  n_timesteps: 1e6
  learning_rate: lin_7.3e-4
  top_quantiles_to_drop_per_net: 5
  policy_kwargs: "dict(net_arch=[64, 64], n_critics=1, n_quantiles=30)"
""",
    "ppo_lstm": """
CartPoleNoVel-v1:
  n_envs: 8
  n_timesteps: !!float 1e5
  policy: 'MlpLstmPolicy'
  n_steps: 32
  batch_size: 256
  n_epochs: 20
  clip_range: lin_0.2
Acrobot-v1:
  n_timesteps: 1e6
  n_steps: 48
  policy_kwargs: "dict(lstm_hidden_size=128, shared_lstm=True, enable_critic_lstm=False, net_arch=[32])"
Hardcore-v3:
  n_timesteps: 1e6
  policy: 'MlpPolicy'
  policy_kwargs: "dict(enable_critic_lstm=False, lstm_hidden_size=256.5, n_lstm_layers=2)"
""",
}


@pytest.fixture
def zoo(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / f"{name}.yml").write_text(text, encoding="utf-8")
    return tmp_path


def holds(found: Any, **expected: Any) -> None:
    assert {name: found[name] for name in expected} == expected


def test_dqn(zoo: Path) -> None:
    found = zoo_settings(zoo / "dqn.yml", "CartPole-v1")
    assert (found.algorithm, found.env, found.timesteps) == (DQN, "CartPole-v1", 50_000)
    exploration = EpsilonGreedy(1.0, 0.04, 8000)
    holds(found.trainer, learning_rate=2.3e-3, learning_rate_schedule="constant", exploration=exploration, tau=1.0)
    # Plain DQN, which PEARL's defaults are not; targets are copied once a burst of training.
    holds(found.trainer, double=False, n_step=1, hidden_sizes=(256, 256), target_update_interval=128)
    assert found.replay == {"size": 100_000, "mode": "uniform"}
    assert found.training == {"gamma": 0.99, "batch_size": 64, "learning_starts": 1000}
    assert frequency_of(DQN, found.trainer).replay_ratio(64) == 32.0  # type: ignore[union-attr]
    assert found.notes == ("target_update_interval: 10 environment steps are 128 gradient steps",)


@pytest.mark.parametrize(("algorithm", "returns"), [("dqn", 3), ("sac", 1)])
def test_returns_of_several_steps(algorithm: str, returns: int, tmp_path: Path) -> None:
    stated = f"\n  n_steps: {returns}" if returns > 1 else ""
    (tmp_path / f"{algorithm}.yml").write_text(f"Any-v0:\n  n_timesteps: 1e5{stated}\n", encoding="utf-8")
    holds(zoo_settings(tmp_path / f"{algorithm}.yml", "Any-v0").trainer, n_step=returns)


def test_an_entry_of_another_version_and_the_defaults_of_stable_baselines3(zoo: Path) -> None:
    found = zoo_settings(zoo / "dqn.yml", "LunarLander-v3")
    assert found.notes[0] == "the settings are those of LunarLander-v2"
    holds(found.trainer, learning_rate=6.3e-4, learning_rate_schedule="linear", hidden_sizes=(64, 64))
    holds(found.trainer, train_freq=16, gradient_steps=-1)  # 4 steps of 4 environments
    holds(found.trainer, exploration=EpsilonGreedy(1.0, 0.05, 10_000), target_update_interval=250)
    assert found.actors["envs_per_actor"] == 4
    assert found.replay == {"size": 1_000_000, "mode": "uniform", "share_next_obs": True}
    assert found.training == {"gamma": 0.99, "batch_size": 32, "learning_starts": 100}
    soft = zoo_settings(zoo / "dqn.yml", "MountainCar-v0")
    holds(soft.trainer, learning_rate=4e-3, tau=0.005, target_update_interval=1)
    assert soft.wrappers == ((gym.wrappers.RescaleObservation, {"min_obs": -1.0, "max_obs": 1.0}),)


def test_ppo(zoo: Path) -> None:
    found = zoo_settings(zoo / "ppo.yml", "CartPole-v1")
    assert (found.algorithm, found.timesteps, found.actors["envs_per_actor"]) == (PPO, 100_000, 8)
    assert found.rollout == {"horizon": 32, "epochs": 20, "gae_lambda": 0.8}
    holds(found.trainer, learning_rate=0.001, learning_rate_schedule="linear", clip_range=0.2)
    holds(found.trainer, clip_range_schedule="linear", entropy_coefficient=0.0, normalize_advantages=True)
    assert found.training == {"gamma": 0.98, "batch_size": 256}
    assert found.replay == {}
    mujoco = zoo_settings(zoo / "ppo.yml", "HalfCheetah-v4")
    holds(mujoco.trainer, hidden_sizes=(256, 256), activation="relu", orthogonal=False, initial_log_std=-2.0)
    holds(mujoco.trainer, max_grad_norm=0.8, value_coefficient=0.58096, normalize_observations=True, target_kl=None)
    holds(mujoco.rollout, reward_standardization="returns")
    merged = zoo_settings(zoo / "ppo.yml", "Hopper-v4")
    holds(merged.trainer, normalize_observations=True, value_clip_range=0.3, target_kl=0.02)
    holds(merged.rollout, reward_standardization="none", horizon=2048)
    assert merged.training["gamma"] == 0.9999
    assert mujoco.notes == ()
    assert merged.notes[0].startswith("clip_range_vf: the larger error of the value and of the clipped one counts here")


def test_sac_td3_ddpg_and_a2c(zoo: Path) -> None:
    learned = zoo_settings(zoo / "sac.yml", "Swimmer-v4")
    assert (learned.algorithm, learned.training["learning_starts"]) == (SAC, 10_000)
    holds(learned.trainer, temperature=None, initial_temperature=0.1, target_entropy=None, tau=0.005)
    fixed = zoo_settings(zoo / "sac.yml", "LunarLanderContinuous-v3")
    holds(fixed.trainer, temperature=0.005, tau=0.01, hidden_sizes=(400, 300), learning_rate_schedule="linear")
    holds(fixed.trainer, learning_rate=7.3e-4, actor_learning_rate=7.3e-4, temperature_learning_rate=7.3e-4)
    td3 = zoo_settings(zoo / "td3.yml", "Pendulum-v1")
    assert (td3.algorithm, td3.trainer["exploration"]) == (TD3, GaussianNoise(0.1))
    holds(td3.trainer, policy_delay=2, target_noise=0.2, noise_clip=0.5, actor_learning_rate=1e-3)
    ddpg = zoo_settings(zoo / "ddpg.yml", "MountainCarContinuous-v0")
    assert (ddpg.algorithm, ddpg.trainer["exploration"]) == (DDPG, OrnsteinUhlenbeck(0.5, dt=0.01))
    holds(ddpg.trainer, saturation_penalty=0.0, hidden_sizes=(400, 300))
    ddpg = zoo_settings(zoo / "ddpg.yml", "Pendulum-v1").trainer
    holds(ddpg, exploration=GaussianNoise(0.0), normalize_observations=True, reward_standardization="returns")
    a2c = zoo_settings(zoo / "a2c.yml", "Acrobot-v1")
    assert (a2c.algorithm, a2c.training, a2c.rollout["horizon"]) == (A2C, {"gamma": 0.99}, 5)
    assert a2c.notes == ("Adam in place of RMSProp, the default of Stable-Baselines3's A2C",)
    adam = zoo_settings(zoo / "a2c.yml", "LunarLander-v3")
    assert (adam.notes, adam.trainer["entropy_coefficient"]) == ((), 1e-5)


def test_qrdqn_and_tqc(zoo: Path) -> None:
    found = zoo_settings(zoo / "qrdqn.yml", "CartPole-v1")
    assert found.algorithm is QRDQN
    holds(found.trainer, num_quantiles=10, double=False, n_step=1, max_grad_norm=0.0, learning_rate=5e-5)
    holds(found.trainer, hidden_sizes=(256, 256), exploration=EpsilonGreedy(1.0, 0.01, 250))
    assert "Adam's eps is 1e-8 here, and 0.01 / batch_size in sb3-contrib's QRDQN" in found.notes
    holds(zoo_settings(zoo / "qrdqn.yml", "Acrobot-v1").trainer, num_quantiles=200, max_grad_norm=2)
    holds(zoo_settings(zoo / "qrdqn.yml", "MountainCar-v0").trainer, max_grad_norm=0.0)  # null: any
    found = zoo_settings(zoo / "tqc.yml", "Pendulum-v1")
    assert (found.algorithm, found.notes) == (TQC, ())
    holds(found.trainer, num_quantiles=25, num_critics=2, dropped_quantiles=2, temperature_learning_rate=1e-3)
    found = zoo_settings(zoo / "tqc.yml", "Hopper-v4")
    holds(found.trainer, num_quantiles=30, num_critics=1, dropped_quantiles=5, learning_rate_schedule="linear")


@pytest.mark.parametrize(
    ("kwargs", "goals"),
    [("\"dict(goal_selection_strategy='future', n_sampled_goal=6)\"", 6), ("{handle_timeout_termination: true}", 4)],
)
def test_hindsight(tmp_path: Path, kwargs: str, goals: int) -> None:
    file = tmp_path / "sac.yml"
    file.write_text(
        "FetchReach-v4: {n_timesteps: 2e4, policy: MultiInputPolicy, replay_buffer_class: HerReplayBuffer, "
        f"buffer_size: 7000, replay_buffer_kwargs: {kwargs}" + "}\n"
    )
    found = zoo_settings(file, "FetchReach-v4")
    assert (found.training["hindsight_goals"], found.replay["size"]) == (goals, 7000)
    (note,) = (note for note in found.notes if "n_sampled_goal" in note)
    assert f"7,000 transitions are those of {7000 // (1 + goals):,} steps" in note


def test_a_recurrent_ppo(zoo: Path) -> None:
    found = zoo_settings(zoo / "ppo_lstm.yml", "CartPoleNoVel-v1")
    assert (found.algorithm, found.timesteps) == (RecurrentPPO, 100_000)
    holds(found.trainer, cell="lstm", recurrent_size=256, sequence_length=32, shared_layers=False)
    holds(found.trainer, hidden_sizes=(64, 64), learning_rate=3e-4, clip_range=0.2, clip_range_schedule="linear")
    assert found.rollout == {"horizon": 32, "epochs": 20, "gae_lambda": 0.95}
    assert found.training == {"gamma": 0.99, "batch_size": 256}
    assert len(found.notes) == 2
    shared = zoo_settings(zoo / "ppo_lstm.yml", "Acrobot-v1")
    holds(shared.trainer, recurrent_size=128, shared_layers=True, hidden_sizes=(32,))
    holds(shared.trainer, sequence_length=16)  # the longest that divides 48 steps and a batch of 128
    assert shared.notes[1].startswith("shared_lstm: the loss of the values trains the LSTM too")
    assert shared.notes[2].startswith("gradients go through 16 steps")


@pytest.mark.parametrize(
    ("name", "env", "refused"),
    [
        (
            "qrdqn",
            "Other-v1",
            [
                "policy_kwargs.n_quantiles: 2.5 (expected a whole number",
                "policy_kwargs.n_critics: 2 (the networks of QRDQN have no such part",
            ],
        ),
        (
            "ppo_lstm",
            "Hardcore-v3",
            [
                "policy: MlpPolicy (the networks are those of MlpLstmPolicy, and for images of CnnLstmPolicy",
                "policy_kwargs.lstm_hidden_size: 256.5 (expected a whole number",
                "policy_kwargs.n_lstm_layers: 2 (policies have one recurrent layer here",
                "policy_kwargs.enable_critic_lstm: False (both networks have a recurrent layer here",
            ],
        ),
        ("dqn", "atari", ["env_wrapper: stable_baselines3.common.atari_wrappers.AtariWrapper", "frame_stack: 4"]),
        (
            "ppo",
            "Pendulum-v1",
            [
                "use_sde: True (PEARL has no state-dependent exploration",
                "sde_sample_freq: 4 (it belongs to use_sde)",
                "env_wrapper: rl_zoo3.wrappers.HistoryWrapper (only those of gymnasium.wrappers",
                "learning_rat: 0.1 (PPO has no counterpart; did you mean learning_rate?)",
                "policy_kwargs.net_arch: {'pi': [64], 'vf': [32]} (expected the same list",
                "policy_kwargs.optimizer_class: RMSpropTFLike",
            ],
        ),
        ("sac", "BipedalWalker-v3", ["use_sde: True", "policy_kwargs.log_std_init: -3"]),
        ("sac", "Walker2d-v4", ['target_entropy: low (expected a number, or "auto")']),
        ("td3", "Ant-v4", ["train_freq: (1, 'episode') (expected steps"]),
    ],
)
def test_all_that_has_no_counterpart_is_listed_at_once(zoo: Path, name: str, env: str, refused: list[str]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        zoo_settings(zoo / f"{name}.yml", env)
    message = str(caught.value)
    assert message.startswith(f"{zoo / name}.yml, {env}: {len(refused)} of its settings cannot be taken over:\n")
    for line in refused:
        assert f"  - {line}" in message
    assert "leave_out (--leave-out)" in message


def test_settings_are_left_out_on_request(zoo: Path) -> None:
    found = zoo_settings(zoo / "sac.yml", "BipedalWalker-v3", leave_out=("use_sde", "policy_kwargs"))
    holds(found.trainer, hidden_sizes=(256, 256), train_freq=64)
    parts = zoo_settings(zoo / "sac.yml", "BipedalWalker-v3", leave_out=["use_sde", "policy_kwargs.log_std_init"])
    holds(parts.trainer, hidden_sizes=(400, 300))
    with pytest.raises(ConfigurationError, match="has no use_sd to leave out; it has n_timesteps, policy, "):
        zoo_settings(zoo / "sac.yml", "BipedalWalker-v3", leave_out=("use_sd",))
    with pytest.raises(ConfigurationError, match=r"leave_out must be a list of names.*found 'use_sde'"):
        zoo_settings(zoo / "sac.yml", "BipedalWalker-v3", leave_out="use_sde")
    with pytest.raises(ConfigurationError, match="file must be a file of RL Zoo"):
        zoo_settings(3, "CartPole-v1")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("CartPole-v1: [1, 2]", "must map names of environments to their settings"),
        ("CartPole-v1: {gamma: 0.9}\nAcrobot-v1:", "hyperparams/dqn.yml of RL Zoo; found {'Acrobot-v1': None}."),
        ("- CartPole-v1", "must map names of environments to their settings"),
        ("CartPole-v1: {n_timesteps: !!python/object/apply:os.getcwd []}", "is no YAML that can be read safely"),
        ("CartPole-v1: {", "is no YAML that can be read safely"),
        ("CartPol-v1: {n_timesteps: 10}", "has no settings for 'CartPole-v1'. Did you mean 'CartPol-v1'?"),
        ("CartPole-v1: {gamma: 0.9}", "n_timesteps is missing"),
        ("CartPole-v1: {n_timesteps: many}", "n_timesteps: many (expected a number)"),
        ("CartPole-v1: {n_timesteps: 1.5}", "n_timesteps: 1.5 (expected a whole number)"),
        ("CartPole-v1: {n_timesteps: 10, learning_rate: exp_0.1}", "learning_rate: exp_0.1 (expected a number)"),
        ("CartPole-v1: {n_timesteps: 10, policy: MultiInputPolicy}", "policy: MultiInputPolicy ("),
        ("CartPole-v1: {n_timesteps: 10, tau: 0.5}", "tau: 0.5 (below 1, targets move in each gradient step"),
        (
            "CartPole-v1: {n_timesteps: 10, policy_kwargs: \"dict(net_arch=[__import__('os').getpid()])\"}",
            "policy_kwargs: dict(net_arch=[__import__('os').getpid()]) (expected plain values",
        ),
        (
            "CartPole-v1: {n_timesteps: 10, replay_buffer_class: mine.Buffer}",
            "replay_buffer_class: mine.Buffer (of these classes, only HerReplayBuffer has a counterpart here)",
        ),
        (
            "CartPole-v1: {n_timesteps: 10, replay_buffer_class: HerReplayBuffer, replay_buffer_kwargs: "
            "\"dict(goal_selection_strategy='final')\"}",
            "(goals are those of later steps here, one or more of each)",
        ),
        ("CartPole-v1: {n_timesteps: 10, env_kwargs: [1]}", "env_kwargs: "),
    ],
)
def test_files_and_entries_that_cannot_be_read_are_named(tmp_path: Path, text: str, reason: str) -> None:
    file = tmp_path / "dqn.yml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigurationError) as caught:
        zoo_settings(file, "CartPole-v1")
    assert reason in str(caught.value)
    assert str(file) in str(caught.value)


def test_the_algorithm_is_the_files_or_named(zoo: Path) -> None:
    other = (zoo / "ppo.yml").rename(zoo / "tuned.yaml")
    assert zoo_settings(other, "CartPole-v1", "PPO").algorithm is PPO
    with pytest.raises(ConfigurationError, match=r"sac, tqc, ppo, ppo_lstm, a2c; found 'tuned'\. Name the"):
        zoo_settings(other, "CartPole-v1")
    with pytest.raises(ConfigurationError, match="found 'trpo'"):
        zoo_settings(other, "CartPole-v1", "trpo")
    for named in ("ppo", None):  # a name that was mistyped is not taken for the algorithm's
        with pytest.raises(ConfigurationError, match="There is no file"):
            zoo_settings(zoo / "trpo.yml", "CartPole-v1", named)


def test_every_algorithm_is_named_where_one_is_asked_for() -> None:
    *names, last = _DEFAULTS
    page = Path(__file__).parents[1] / "docs" / "cli.md"
    for text in (page.read_text(), Composer.set_zoo.__doc__, zoo_settings.__doc__):
        assert text
        assert f"{', '.join(names)} or {last}" in " ".join(text.split())


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(plain)
def test_texts_of_plain_values_are_parsed(value: Any) -> None:
    assert isinstance(value, str) or _parsed(repr(value)) == value


@given(st.text())
def test_what_is_no_plain_value_stays_a_text(text: str) -> None:
    found = _parsed(text)
    assert found == text or isinstance(found, str) or _parsed(repr(found)) == found


def test_calls_in_texts_are_not_made(tmp_path: Path) -> None:
    trap = tmp_path / "made"
    for text in (f"open({str(trap)!r}, 'w')", f"__import__('pathlib').Path({str(trap)!r}).touch()", "dict(a=exit())"):
        assert _parsed(text) == text
    assert not trap.exists()


# --- composing --------------------------------------------------------------------------------------------------------


class Reached(Exception):
    """Composing got as far as looking at the machine: all settings were accepted."""


@pytest.fixture
def no_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    def reached(*arguments: object, **options: object) -> None:
        raise Reached

    monkeypatch.setattr(composer.composing, "discover", reached)


@pytest.mark.usefixtures("no_machine")
@pytest.mark.parametrize(
    ("name", "env"),
    [
        *(("dqn", "CartPole-v1"), ("dqn", "MountainCar-v0"), ("ppo", "CartPole-v1"), ("sac", "Pendulum-v1")),
        *(("qrdqn", "CartPole-v1"), ("tqc", "Pendulum-v1")),
        *(("td3", "Pendulum-v1"), ("ddpg", "MountainCarContinuous-v0"), ("a2c", "Acrobot-v1")),
    ],
)
def test_a_composer_takes_the_settings(zoo: Path, name: str, env: str, capsys: pytest.CaptureFixture[str]) -> None:
    if name == "sac":  # an environment without MuJoCo
        (zoo / "sac.yml").write_text("Pendulum-v1: {n_timesteps: 20000, learning_rate: 1e-3}\n", encoding="utf-8")
    composer = Composer(progress=True)
    found = composer.set_zoo(zoo / f"{name}.yml", env)
    assert isinstance(found, ZooSettings)
    assert all(note in capsys.readouterr().out for note in found.notes[:1])
    with pytest.raises(Reached):
        composer.run(timesteps=found.timesteps)


@pytest.mark.usefixtures("no_machine")
def test_the_command_line_takes_the_settings(zoo: Path, tmp_path: Path) -> None:
    def compose(*arguments: object) -> Any:
        return CliRunner().invoke(app, ["compose", *map(str, arguments)])

    file = zoo / "ppo.yml"
    assert isinstance(compose("--zoo", file, "--env", "CartPole-v1", "--output", tmp_path / "p.py").exception, Reached)
    for arguments, message in (
        (("--zoo", file), "--zoo needs --env"),
        ((), "Name a composition file, or --zoo FILE with --env"),
        ((file, "--zoo", file, "--env", "CartPole-v1"), "a composition file, or --zoo FILE"),
        (("--env", "CartPole-v1", file), "--env, --algo and --leave-out belong to --zoo"),
        (("--zoo", file, "--env", "Pendulum-v1"), "use_sde: True"),
    ):
        found = compose(*arguments)
        assert found.exit_code == 1
        assert message in found.output


@pytest.mark.usefixtures("no_machine")
def test_the_snippet_composes(zoo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(zoo)
    block = DOCS.read_text(encoding="utf-8").split("```python\n")[2].split("```")[0]
    with pytest.raises(Reached):
        exec(compile(block, "compose_zoo.py", "exec"), {"__name__": "snippet"})
