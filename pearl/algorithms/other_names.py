"""What settings of Stable-Baselines3 are called here, for the error that finds one; docs/coming_from.md has all."""

from __future__ import annotations

from collections.abc import Collection

_EPSILON = "exploration=EpsilonGreedy(start=..., end=..., steps=...)"
_LOGS = "nothing, as every run shows its progress and logs into its folder"
# Other names and our settings for them; a class has one of these. `_ELSEWHERE`: where other names are set.
_SETTINGS = {
    "clip_range_vf": ("value_clip_range",),
    "ent_coef": ("entropy_coefficient", "temperature"),
    "lstm_hidden_size": ("recurrent_size",),
    "n_epochs": ("epochs",),
    "n_sampled_goal": ("hindsight_goals",),
    "n_steps": ("horizon", "n_step"),
    "net_arch": ("hidden_sizes",),
    "normalize_advantage": ("normalize_advantages",),
    "policy_kwargs": ("hidden_sizes",),
    "target_noise_clip": ("noise_clip",),
    "target_policy_noise": ("target_noise",),
    "vf_coef": ("value_coefficient",),
}
_ELSEWHERE = {
    "action_noise": "exploration=GaussianNoise(sigma=...) of pearl.exploration",
    "buffer_size": "the first argument of set_replay",
    "exploration_final_eps": _EPSILON,
    "exploration_fraction": _EPSILON,
    "exploration_initial_eps": _EPSILON,
    "n_envs": "envs_per_actor of set_actors",
    "replay_buffer_class": "set_replay; of HerReplayBuffer, hindsight_goals",
    "replay_buffer_kwargs": "set_replay; of HerReplayBuffer, hindsight_goals",
    "tensorboard_log": _LOGS,
    "timesteps": "timesteps of runtime_gen",
    "total_timesteps": "timesteps of runtime_gen",
    "verbose": _LOGS,
}


def counterpart(name: str, known: Collection[str]) -> str:
    """What a class with the settings `known` has in place of Stable-Baselines3's `name`; "" for an unknown name."""
    return next((one for one in _SETTINGS.get(name, ()) if one in known), _ELSEWHERE.get(name, ""))
