"""What settings of other libraries are called here, for the error that finds one; docs/coming_from.md has all.

The names are those of Stable-Baselines3 and sb3-contrib, of CleanRL's scripts, and of RLlib.
"""

from __future__ import annotations

from collections.abc import Collection

_EPSILON = "exploration=EpsilonGreedy(start=..., end=..., steps=...)"
_NOISE = "exploration=GaussianNoise(sigma=...) of pearl.exploration"
_LOGS = "nothing, as every run shows its progress and logs into its folder"
# Other names and our settings for them; a class has one of these. `_ELSEWHERE`: where other names are set.
_SETTINGS = {
    "actor_lr": ("actor_learning_rate",),
    "alpha": ("temperature",),
    "alpha_lr": ("temperature_learning_rate",),
    "anneal_lr": ("learning_rate_schedule",),
    "autotune": ("temperature",),
    "clip_coef": ("clip_range",),
    "clip_param": ("clip_range",),
    "clip_range_vf": ("value_clip_range",),
    "clip_vloss": ("value_clip_range",),
    "critic_lr": ("learning_rate",),
    "double_q": ("double",),
    "ent_coef": ("entropy_coefficient", "temperature"),
    "entropy_coeff": ("entropy_coefficient",),
    "fcnet_hiddens": ("hidden_sizes",),
    "grad_clip": ("max_grad_norm",),
    "initial_alpha": ("initial_temperature",),
    "lambda_": ("gae_lambda",),
    "lr": ("learning_rate",),
    "lstm_hidden_size": ("recurrent_size",),
    "max_seq_len": ("sequence_length",),
    "minibatch_size": ("batch_size",),
    "model_config": ("hidden_sizes",),
    "n_critics": ("num_critics",),
    "n_epochs": ("epochs",),
    "n_quantiles": ("num_quantiles",),
    "n_sampled_goal": ("hindsight_goals",),
    "n_steps": ("horizon", "n_step"),
    "net_arch": ("hidden_sizes",),
    "norm_adv": ("normalize_advantages",),
    "normalize_advantage": ("normalize_advantages",),
    "num_epochs": ("epochs",),
    "num_steps": ("horizon",),
    "num_steps_sampled_before_learning_starts": ("learning_starts",),
    "policy_frequency": ("policy_delay",),
    "policy_kwargs": ("hidden_sizes",),
    "policy_lr": ("actor_learning_rate",),
    "policy_noise": ("target_noise",),
    "q_lr": ("learning_rate",),
    "rollout_fragment_length": ("horizon",),
    "target_network_frequency": ("target_update_interval",),
    "target_network_update_freq": ("target_update_interval",),
    "target_noise_clip": ("noise_clip",),
    "target_policy_noise": ("target_noise",),
    "top_quantiles_to_drop_per_net": ("dropped_quantiles",),
    "train_frequency": ("train_freq",),
    "training_intensity": ("replay_ratio",),
    "update_epochs": ("epochs",),
    "vf_clip_param": ("value_clip_range",),
    "vf_coef": ("value_coefficient",),
    "vf_loss_coeff": ("value_coefficient",),
}
# What another unit or another form of the value is worth saying.
_FORMS = {
    "learning_rate_schedule": ", as docs/schedules.md shows",
    "target_update_interval": ", in gradient steps",
    "temperature": ", where None is for one that adapts itself",
}
_ELSEWHERE = {
    "action_noise": _NOISE,
    "buffer_size": "the first argument of set_replay",
    "end_e": _EPSILON,
    "env_config": "env_kwargs of set_actors",
    "exploration_final_eps": _EPSILON,
    "exploration_fraction": _EPSILON,
    "exploration_initial_eps": _EPSILON,
    "exploration_noise": _NOISE,
    "n_envs": "envs_per_actor of set_actors",
    "num_env_runners": "the first argument of set_actors",
    "num_envs": "envs_per_actor of set_actors",
    "num_envs_per_env_runner": "envs_per_actor of set_actors",
    "replay_buffer_class": "set_replay; of HerReplayBuffer, hindsight_goals",
    "replay_buffer_config": "set_replay",
    "replay_buffer_kwargs": "set_replay; of HerReplayBuffer, hindsight_goals",
    "start_e": _EPSILON,
    "tensorboard_log": _LOGS,
    "timesteps": "timesteps of runtime_gen",
    "total_timesteps": "timesteps of runtime_gen",
    "verbose": _LOGS,
}


def counterpart(name: str, known: Collection[str]) -> str:
    """What a class with the settings `known` has in place of another library's `name`; "" for an unknown name."""
    for one in _SETTINGS.get(name, ()):
        if one in known:
            return one + _FORMS.get(one, "")
    return _ELSEWHERE.get(name, "")
