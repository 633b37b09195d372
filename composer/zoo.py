"""Settings of RL Zoo (rl-baselines3-zoo) for an algorithm and an environment, as those of a composition.

Settings that an entry leaves out have the defaults of Stable-Baselines3 2, not those of PEARL: the point is to train
what the entry describes. A setting without a counterpart is refused by name. The file is read by PyYAML's safe loader;
texts such as "dict(net_arch=[256, 256])" are parsed, and nothing is evaluated.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from composer.wording import did_you_mean, shortened
from pearl.algorithms import ALGORITHMS, Trainer
from pearl.errors import ConfigurationError
from pearl.exploration import EpsilonGreedy, GaussianNoise, OrnsteinUhlenbeck

_MLP_DEFAULTS: dict[str, Any] = {"policy": "MlpPolicy", "n_envs": 1, "gamma": 0.99}
_REPLAY_DEFAULTS: dict[str, Any] = {
    **_MLP_DEFAULTS,
    "buffer_size": 1_000_000,
    "learning_starts": 100,
    "train_freq": 1,
    "gradient_steps": 1,
}
_CRITIC_DEFAULTS: dict[str, Any] = {**_REPLAY_DEFAULTS, "batch_size": 256, "tau": 0.005}
_SAC_DEFAULTS: dict[str, Any] = {
    **_CRITIC_DEFAULTS,
    "learning_rate": 3e-4,
    "net_arch": (256, 256),
    "ent_coef": "auto",
    "target_entropy": "auto",
}
_ROLLOUT_DEFAULTS: dict[str, Any] = {**_MLP_DEFAULTS, "ent_coef": 0.0, "vf_coef": 0.5, "max_grad_norm": 0.5}
_PPO_DEFAULTS: dict[str, Any] = {
    **_ROLLOUT_DEFAULTS,
    "learning_rate": 3e-4,
    "n_steps": 2048,
    "batch_size": 64,
    "n_epochs": 10,
    "gae_lambda": 0.95,
    "clip_range": 0.2,
    "clip_range_vf": None,
    "normalize_advantage": True,
    "target_kl": None,
    "net_arch": (64, 64),
}
# Of Stable-Baselines3 2.7 and its sb3-contrib, by the name of a file of RL Zoo.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "dqn": {
        **_REPLAY_DEFAULTS,
        "learning_rate": 1e-4,
        "batch_size": 32,
        "tau": 1.0,
        "train_freq": 4,
        "target_update_interval": 10_000,
        "exploration_fraction": 0.1,
        "exploration_initial_eps": 1.0,
        "exploration_final_eps": 0.05,
        "max_grad_norm": 10.0,
        "net_arch": (64, 64),
    },
    "qrdqn": {
        **_REPLAY_DEFAULTS,
        "learning_rate": 5e-5,
        "batch_size": 32,
        "tau": 1.0,
        "train_freq": 4,
        "target_update_interval": 10_000,
        "exploration_fraction": 0.005,
        "exploration_initial_eps": 1.0,
        "exploration_final_eps": 0.01,
        "max_grad_norm": None,
        "net_arch": (64, 64),
        "n_quantiles": 200,
    },
    "ddpg": {**_CRITIC_DEFAULTS, "learning_rate": 1e-3, "net_arch": (400, 300)},
    "td3": {
        **_CRITIC_DEFAULTS,
        "learning_rate": 1e-3,
        "net_arch": (400, 300),
        "policy_delay": 2,
        "target_policy_noise": 0.2,
        "target_noise_clip": 0.5,
    },
    "sac": _SAC_DEFAULTS,
    "tqc": {**_SAC_DEFAULTS, "top_quantiles_to_drop_per_net": 2, "n_critics": 2, "n_quantiles": 25},
    "ppo": _PPO_DEFAULTS,
    "ppo_lstm": {**_PPO_DEFAULTS, "policy": "MlpLstmPolicy", "n_steps": 128, "batch_size": 128},
    "a2c": {
        **_ROLLOUT_DEFAULTS,
        "learning_rate": 7e-4,
        "n_steps": 5,
        "gae_lambda": 1.0,
        "normalize_advantage": False,
        "net_arch": (64, 64),
    },
}
_CLASSES = {"ppo_lstm": "RecurrentPPO"}  # where it is not the name of the file
# The parts of an LSTM in policy_kwargs, with sb3-contrib's defaults.
_LSTM = {"lstm_hidden_size": 256, "n_lstm_layers": 1, "shared_lstm": False, "enable_critic_lstm": True}
_LONGEST_SEQUENCE = 32
_COUNTS = {"n_critics": "num_critics", "n_quantiles": "num_quantiles"}  # in policy_kwargs, where they have a default
_NOTES = {"qrdqn": ("Adam's eps is 1e-8 here, and 0.01 / batch_size in sb3-contrib's QRDQN",)}
_OF_PLAIN_ALGORITHMS = {"n_step": 1, "double": False, "saturation_penalty": 0.0}  # that Stable-Baselines3 lacks
_RENAMED = {  # settings whose values mean the same
    "gae_lambda": "gae_lambda",
    "max_grad_norm": "max_grad_norm",
    "n_epochs": "epochs",
    "n_steps": "horizon",
    "policy_delay": "policy_delay",
    "target_noise_clip": "noise_clip",
    "target_policy_noise": "target_noise",
    "top_quantiles_to_drop_per_net": "dropped_quantiles",
    "tau": "tau",
    "vf_coef": "value_coefficient",
}
_BOUNDS = {"clip_range_vf", "max_grad_norm"}  # null: none, which is 0 here
_WHOLE = {"n_epochs", "n_steps", "policy_delay", "top_quantiles_to_drop_per_net"}
_RATES = ("learning_rate", "actor_learning_rate", "temperature_learning_rate")
_ACTIVATIONS = {"nn.ReLU": "relu", "nn.Tanh": "tanh", "th.nn.ReLU": "relu", "th.nn.Tanh": "tanh"}
_TELLS_NOTHING = {  # values that change nothing
    "use_sde": (False,),
    "frame_stack": (None, 1),
    "n_eval_envs": (1,),
    "optimize_memory_usage": (False,),
    "env_wrapper": (None, ()),
    "vec_env_wrapper": (None, ()),
    "callback": (None, ()),
    "use_rms_prop": (False,),
    "sde_sample_freq": (-1,),
    "noise_type": (None,),
}
_ADVICE = {
    "use_sde": "PEARL has no state-dependent exploration; without it, actions are drawn at each step",
    "sde_sample_freq": "it belongs to use_sde",
    "use_sde_at_warmup": "it belongs to use_sde",
    "frame_stack": "wrap the environment, with Composer.set_wrappers and gymnasium.wrappers.FrameStackObservation",
    "use_rms_prop": "A2C trains with Adam here; the learning rate may need another value",
    "rms_prop_eps": "A2C trains with Adam here",
    "callback": "write a callback of PEARL (docs/callbacks.md)",
    "vec_env_wrapper": "wrap the single environment, with Composer.set_wrappers",
    "replay_buffer_class": "of these classes, only HerReplayBuffer has a counterpart here",
    "replay_buffer_kwargs": "transitions cut by a time limit always keep their bootstrap here",
    "noise_std_final": "leave it out, and give the noise a schedule yourself (docs/schedules.md)",
}
_TEXT_OF_RATE = re.compile(r"lin_(?P<start>[0-9.eE+-]+)")


@dataclass(frozen=True)
class ZooSettings:
    """An entry of RL Zoo as arguments of the `set_*` calls of a Composer, and the `timesteps` of the program.

    `source` names the entry and its file; `notes` name differences from Stable-Baselines3.
    """

    source: str
    env: str
    algorithm: type[Trainer]
    timesteps: int
    actors: Mapping[str, Any]
    wrappers: tuple[Any, ...]
    trainer: Mapping[str, Any]
    replay: Mapping[str, Any]
    rollout: Mapping[str, Any]
    training: Mapping[str, Any]
    notes: tuple[str, ...]


def zoo_settings(
    file: str | Path, env: str, algorithm: str | None = None, *, leave_out: Sequence[str] = ()
) -> ZooSettings:
    """The settings of the environment `env` in a file of RL Zoo, such as its hyperparams/dqn.yml.

    `algorithm` is dqn, qrdqn, ddpg, td3, sac, tqc, ppo, ppo_lstm or a2c; by default the file's name. An environment
    that the file has in another version takes the settings of that one. `leave_out` names settings of the entry to do
    without. Raises ConfigurationError for a file or an entry that is not there, and one error that lists all settings
    without a counterpart.
    """
    if not isinstance(leave_out, list | tuple | set):
        raise ConfigurationError(f'leave_out must be a list of names, such as ["use_sde"]; found {leave_out!r}.')
    if not isinstance(file, str | os.PathLike):
        raise ConfigurationError(f"file must be a file of RL Zoo, such as hyperparams/dqn.yml; found {file!r}.")
    if not isinstance(env, str):
        raise ConfigurationError(f"env must be the name of an environment, such as 'CartPole-v1'; found {env!r}.")
    path = Path(file)
    entries = _read(path)
    name = str(algorithm or path.stem).lower()
    if name not in _DEFAULTS:
        raise ConfigurationError(
            f"Settings of RL Zoo can be taken over for {', '.join(_DEFAULTS)}; found {name!r}"
            + (". Name the algorithm." if algorithm is None else ".")
        )
    found, note = _entry_of(entries, env, path)
    source = f"{path}, {found}"
    entry = dict(entries[found])
    kwargs = _parsed(entry.get("policy_kwargs"))
    parts = {f"policy_kwargs.{part}": part for part in kwargs} if isinstance(kwargs, dict) else {}
    if unknown := [one for one in leave_out if one not in entry and one not in parts]:
        raise ConfigurationError(f"{source} has no {', '.join(unknown)} to leave out; it has {', '.join(entry)}.")
    if parts:
        entry["policy_kwargs"] = {parts[name]: kwargs[parts[name]] for name in parts if name not in leave_out}
    stated = {key: value for key, value in entry.items() if key not in leave_out}
    class_name = _CLASSES.get(name) or next(known for known in ALGORITHMS if known.lower() == name)
    defaults = _DEFAULTS[name]
    notes = [*([note] if note else []), *_NOTES.get(name, ())]
    mapping = _Mapping(ALGORITHMS[class_name], defaults, {**defaults, **stated}, notes)
    return mapping.mapped(source, env)


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ConfigurationError(f"There is no file {path}. RL Zoo keeps its settings in hyperparams/*.yml.") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}.") from error
    try:
        found = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ConfigurationError(f"{path} is no YAML that can be read safely: {error}.") from error
    is_mapping = isinstance(found, dict)
    wrong = {name: entry for name, entry in found.items() if not isinstance(entry, dict)} if is_mapping else found
    if wrong or not is_mapping:
        raise ConfigurationError(
            f"{path} must map names of environments to their settings, as hyperparams/dqn.yml of RL Zoo; found "
            f"{shortened(repr(wrong))}."
        )
    return {str(name): entry for name, entry in found.items()}


def _entry_of(entries: Mapping[str, Any], env: str, path: Path) -> tuple[str, str]:
    """The name of the entry for `env`, and a note if it is of another version."""
    if env in entries:
        return env, ""
    bare = re.sub(r"-v\d+$", "", env)
    same = sorted((name for name in entries if re.sub(r"-v\d+$", "", name) == bare), key=_version)
    if same:
        return same[-1], f"the settings are those of {same[-1]}"
    atari = " Its entry atari needs wrappers of Stable-Baselines3; for Atari games here see docs/environments.md#atari."
    raise ConfigurationError(
        f"{path} has no settings for {env!r}.{did_you_mean(env, entries)} It has {_some(entries)}."
        f"{atari if 'atari' in entries else ''}"
    )


def _version(name: str) -> int:
    match = re.search(r"-v(\d+)$", name)
    return int(match[1]) if match else 0


def _some(entries: Mapping[str, Any]) -> str:
    names = list(entries)
    return ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")


@dataclass
class _Mapping:
    """Takes the settings of an entry out of `left`, one after the other; those that remain have no counterpart."""

    algorithm: type[Trainer]
    defaults: Mapping[str, Any]
    left: dict[str, Any]
    notes: list[str]
    problems: list[str] = field(default_factory=list)
    actors: dict[str, Any] = field(default_factory=dict)
    wrappers: list[Any] = field(default_factory=list)
    trainer: dict[str, Any] = field(default_factory=dict)
    replay: dict[str, Any] = field(default_factory=dict)
    rollout: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)

    def mapped(self, source: str, env: str) -> ZooSettings:
        """All settings; ConfigurationError lists those that cannot be taken over."""
        timesteps = self._environment()
        self._networks()
        self._rates()
        self._normalization()
        if self.algorithm.data_flow() == "rollout":
            self._rollouts()
        else:
            self._replays(timesteps)
        for name, ours in _RENAMED.items():
            if name in self.left and hasattr(self.algorithm, ours):
                table = self.rollout if name in ("n_steps", "n_epochs", "gae_lambda") else self.trainer
                table[ours] = self._whole(name) if name in _WHOLE else self._number(name)
        self._refuse_the_rest()
        if self.problems:
            raise ConfigurationError(
                f"{source}: {len(self.problems)} of its settings cannot be taken over:\n"
                + "".join(f"  - {problem}.\n" for problem in self.problems)
                + "Change them in a copy of the file, or name those to do without in leave_out (--leave-out)."
            )
        return ZooSettings(
            *(source, env, self.algorithm, timesteps, self.actors, tuple(self.wrappers)),
            *(self.trainer, self.replay, self.rollout, self.training, tuple(self.notes)),
        )

    # --- values -----------------------------------------------------------------------------------------------------

    def _refuse(self, name: str, value: object, why: str) -> None:
        self.problems.append(f"{name}: {shortened(str(value))} ({why})")

    def _take(self, name: str, default: object = None) -> Any:
        value = self.left.pop(name, default)
        return tuple(value) if isinstance(value, list) else value

    def _number(self, name: str) -> float:
        """A number; YAML reads 1e-3, without a point, as text."""
        value = self._take(name)
        number = 0.0 if value is None and name in _BOUNDS else _as_number(value)
        if number is None:
            self._refuse(name, value, "expected a number")
            return 1.0
        return number

    def _whole(self, name: str) -> int:
        value = self._number(name)
        if value != int(value):
            self._refuse(name, value, "expected a whole number")
        return int(value)

    def _scheduled(self, name: str) -> tuple[float, str]:
        """A number and its schedule: "lin_x" falls from x to 0."""
        value = self.left[name]
        match = _TEXT_OF_RATE.fullmatch(value) if isinstance(value, str) else None
        if match is None:
            return self._number(name), "constant"
        self.left[name] = match["start"]
        return self._number(name), "linear"

    # --- parts ------------------------------------------------------------------------------------------------------

    def _environment(self) -> int:
        if "n_timesteps" not in self.left:
            self.problems.append("n_timesteps is missing (the steps of the run)")
        timesteps = self._whole("n_timesteps") if "n_timesteps" in self.left else 1
        self.actors["envs_per_actor"] = self._whole("n_envs")
        kwargs = _parsed(self._take("env_kwargs", {}))
        if isinstance(kwargs, dict) and all(type(value) in (bool, int, float, str) for value in kwargs.values()):
            self.actors["env_kwargs"] = kwargs
        else:
            self._refuse("env_kwargs", kwargs, "expected numbers, texts and booleans by name")
        policy = self._take("policy")
        kind = self.defaults["policy"].removeprefix("Mlp")
        # That of goals is one of observations in a row, as here.
        if policy not in (f"Mlp{kind}", f"Cnn{kind}", *([f"MultiInput{kind}"] if self._has_hindsight else [])):
            self._refuse("policy", policy, f"the networks are those of Mlp{kind}, and for images of Cnn{kind}")
        self._wrap(self._take("env_wrapper"))
        return timesteps

    def _wrap(self, stated: object) -> None:
        """Wrappers of Gymnasium itself; others are code that the entry only names."""
        for item in stated if isinstance(stated, tuple) else () if stated is None else (stated,):
            name, options = next(iter(item.items())) if isinstance(item, dict) and len(item) == 1 else (item, None)
            module, _, attribute = str(name).rpartition(".")
            is_gymnasiums = module == "gymnasium.wrappers" and hasattr(importlib.import_module(module), attribute)
            if not is_gymnasiums or not isinstance(options, dict | None):
                self._refuse(
                    "env_wrapper",
                    name,
                    "only those of gymnasium.wrappers are taken over; pass the class itself to Composer.set_wrappers",
                )
                continue
            found = getattr(importlib.import_module(module), attribute)
            self.wrappers.append((found, options) if options else found)

    def _networks(self) -> None:
        kwargs = _parsed(self._take("policy_kwargs", {}))
        sizes: object = self._take("net_arch")
        if not isinstance(kwargs, dict):
            self._refuse("policy_kwargs", kwargs, 'expected plain values, such as "dict(net_arch=[64, 64])"')
            kwargs = {}
        sizes = kwargs.pop("net_arch", sizes)
        if (hidden := _sizes(sizes)) is None:
            self._refuse("policy_kwargs.net_arch", sizes, "expected the same list of sizes for policy and values")
        else:
            self.trainer["hidden_sizes"] = hidden
        activation = _ACTIVATIONS.get(str(kwargs.get("activation_fn")))
        if "activation_fn" in kwargs:
            if hasattr(self.algorithm, "activation") and activation:
                self.trainer["activation"] = activation
                kwargs.pop("activation_fn")
            elif activation == "relu":
                kwargs.pop("activation_fn")
        for theirs, ours, kind in (("ortho_init", "orthogonal", bool), ("log_std_init", "initial_log_std", float)):
            if theirs in kwargs and hasattr(self.algorithm, ours) and _as_number(kwargs[theirs]) is not None:
                self.trainer[ours] = kind(kwargs.pop(theirs))
        if hasattr(self.algorithm, "recurrent_size"):
            self._recurrent(kwargs)
        for theirs in (name for name in _COUNTS if name in self.left):
            count = kwargs.pop(theirs, self._take(theirs))
            if type(count) is not int:
                self._refuse(f"policy_kwargs.{theirs}", count, "expected a whole number")
            self.trainer[_COUNTS[theirs]] = count
        for name, value in kwargs.items():
            self._refuse(f"policy_kwargs.{name}", value, f"the networks of {self.algorithm.__name__} have no such part")

    def _recurrent(self, kwargs: dict[str, Any]) -> None:
        """The size of the LSTM, and the length of the sequences in a minibatch."""
        size, layers, shared, both = (kwargs.pop(name, default) for name, default in _LSTM.items())
        if type(size) is int and size >= 1:
            self.trainer["recurrent_size"] = size
        else:
            self._refuse("policy_kwargs.lstm_hidden_size", size, "expected a whole number of at least 1")
        if layers != 1:
            self._refuse("policy_kwargs.n_lstm_layers", layers, "policies have one recurrent layer here")
        if not shared and not both:
            why = "both networks have a recurrent layer here, or share it"
            self._refuse("policy_kwargs.enable_critic_lstm", both, why)
        self.trainer |= {"cell": "lstm", "shared_layers": bool(shared)}
        self.notes.append("the hidden layers come before the LSTM, and those of Stable-Baselines3 after it")
        if shared:
            self.notes.append(
                "shared_lstm: the loss of the values trains the LSTM too; in Stable-Baselines3 only the policy's does"
            )
        sizes = [_as_number(self.left[name]) for name in ("n_steps", "batch_size")]
        whole = [int(size) for size in sizes if size is not None and size >= 1 and size == int(size)]
        if len(whole) == len(sizes):
            common = math.gcd(*whole)
            length = max(part for part in range(1, min(common, _LONGEST_SEQUENCE) + 1) if common % part == 0)
            self.trainer["sequence_length"] = length
            self.notes.append(f"gradients go through {length} steps, those of Stable-Baselines3 through whole episodes")

    def _rates(self) -> None:
        rate, schedule = self._scheduled("learning_rate")
        self.trainer |= {name: rate for name in _RATES if hasattr(self.algorithm, name)}
        self.trainer["learning_rate_schedule"] = schedule
        self.training["gamma"] = self._number("gamma")
        if "batch_size" in self.left and not self._trains_whole_rollouts:
            self.training["batch_size"] = self._whole("batch_size")

    @property
    def _trains_whole_rollouts(self) -> bool:
        return self.algorithm.data_flow() == "rollout" and "batch_size" not in self.defaults

    def _normalization(self) -> None:
        normalize = _parsed(self._take("normalize", False))
        if normalize is True:
            normalize = {"norm_obs": True, "norm_reward": True}
        if isinstance(normalize, dict) and set(normalize) <= {"norm_obs", "norm_reward"}:
            self.trainer["normalize_observations"] = bool(normalize.get("norm_obs", True))
            table = self.rollout if self.algorithm.data_flow() == "rollout" else self.trainer
            table["reward_standardization"] = "returns" if normalize.get("norm_reward", True) else "none"
        elif normalize is not False:
            self._refuse("normalize", normalize, "expected true, or norm_obs and norm_reward")

    def _rollouts(self) -> None:
        self.trainer["entropy_coefficient"] = self._number("ent_coef")
        normalize = self._take("normalize_advantage")
        self.trainer["normalize_advantages"] = normalize is True
        if not isinstance(normalize, bool):
            self._refuse("normalize_advantage", normalize, "expected true or false")
        if "clip_range" in self.left and not self._trains_whole_rollouts:
            self.trainer["clip_range"], self.trainer["clip_range_schedule"] = self._scheduled("clip_range")
            self.trainer["value_clip_range"] = self._number("clip_range_vf")
            if self.trainer["value_clip_range"]:
                self.notes.append(
                    "clip_range_vf: the larger error of the value and of the clipped one counts here, as in OpenAI "
                    "Baselines; that of the clipped one in Stable-Baselines3"
                )
            self.trainer["target_kl"] = None if self.left["target_kl"] is None else self._number("target_kl")
            self.left.pop("target_kl", None)
        if self._trains_whole_rollouts and "use_rms_prop" not in self.left:
            self.notes.append("Adam in place of RMSProp, the default of Stable-Baselines3's A2C")

    def _replays(self, timesteps: int) -> None:
        self.trainer |= {name: value for name, value in _OF_PLAIN_ALGORITHMS.items() if hasattr(self.algorithm, name)}
        if "n_steps" in self.left:
            self.trainer["n_step"] = self._whole("n_steps")
        self.replay |= {"size": self._whole("buffer_size"), "mode": "uniform"}
        self.training["learning_starts"] = self._whole("learning_starts")
        if self.left.get("optimize_memory_usage") is True:
            self.left.pop("optimize_memory_usage")
            self.replay["share_next_obs"] = True
        self._replay_buffer()
        every = self._frequency()
        if hasattr(self.algorithm, "target_update_interval"):
            self._target_updates(every)
        elif self.left.get("target_update_interval") == 1:
            self.left.pop("target_update_interval")
        self._exploration(timesteps)
        if hasattr(self.algorithm, "temperature"):
            self._temperature()

    def _replay_buffer(self) -> None:
        stated = _parsed(self.left.get("replay_buffer_kwargs", {}))
        kwargs = {**stated} if isinstance(stated, dict) else {"": stated}
        if self._has_hindsight:
            self.left.pop("replay_buffer_class")
            strategy, goals = kwargs.pop("goal_selection_strategy", "future"), kwargs.pop("n_sampled_goal", 4)
            if strategy != "future" or type(goals) is not int or goals < 1:
                self._refuse("replay_buffer_kwargs", stated, "goals are those of later steps here, one or more of each")
                goals = 0
            self.training["hindsight_goals"] = goals
            self.notes.append(
                f"n_sampled_goal: transitions with other goals are stored here, so that {self.replay['size']:,} "
                f"transitions are those of {self.replay['size'] // (1 + goals):,} steps"
            )
        if kwargs in ({}, {"handle_timeout_termination": True}):
            self.left.pop("replay_buffer_kwargs", None)

    @property
    def _has_hindsight(self) -> bool:
        stated = self.left.get("replay_buffer_class")
        return isinstance(stated, str) and stated.rpartition(".")[2] == "HerReplayBuffer"

    def _frequency(self) -> tuple[int, int]:
        """Transitions from one training to the next, and the gradient steps then."""
        stated = _parsed(self._take("train_freq"))
        if isinstance(stated, list | tuple) and len(stated) == 2 and stated[1] == "step":
            stated = stated[0]
        number = _as_number(stated)
        if number is None or number < 1 or number != int(number):
            self._refuse(
                "train_freq", stated, "expected steps; give the usual length of an episode in place of episodes"
            )
            number = 1
        transitions, steps = int(number) * self.actors["envs_per_actor"], self._whole("gradient_steps")
        self.trainer |= {"train_freq": transitions, "gradient_steps": steps}
        return transitions, transitions if steps == -1 else steps

    def _target_updates(self, every: tuple[int, int]) -> None:
        """Stable-Baselines3 counts environment steps, and trains in bursts; PEARL counts gradient steps."""
        transitions, steps = every
        interval = self._whole("target_update_interval")
        ours = max(1, steps, round(interval * steps / transitions))
        self.trainer["target_update_interval"] = ours
        self.notes.append(f"target_update_interval: {interval:,} environment steps are {ours:,} gradient steps")
        if _as_number(self.left["tau"]) not in (None, 1.0) and ours > 1:
            self._refuse("tau", self.left["tau"], "below 1, targets move in each gradient step, not every interval")

    def _exploration(self, timesteps: int) -> None:
        if "exploration_fraction" in self.left:
            begin, end = self._number("exploration_initial_eps"), self._number("exploration_final_eps")
            steps = round(self._number("exploration_fraction") * timesteps)
            self.trainer["exploration"] = EpsilonGreedy(begin, end, steps)
        elif not hasattr(self.algorithm, "temperature"):
            kind, sigma = self._take("noise_type"), 0.0
            if "noise_std" in self.left:
                sigma = self._number("noise_std")
            if kind in (None, "normal"):
                self.trainer["exploration"] = GaussianNoise(sigma if kind else 0.0)
            elif kind == "ornstein-uhlenbeck":
                self.trainer["exploration"] = OrnsteinUhlenbeck(sigma, dt=0.01)
            else:
                self._refuse("noise_type", kind, "expected normal or ornstein-uhlenbeck")

    def _temperature(self) -> None:
        stated, entropy = self._take("ent_coef"), self._take("target_entropy")
        fixed = _as_number(stated)
        match = re.fullmatch(r"auto(_(?P<start>[0-9.eE+-]+))?", str(stated))
        if fixed is not None:
            self.trainer["temperature"] = fixed
        elif match and _as_number(match["start"] or 1.0) is not None:
            self.trainer |= {"temperature": None, "initial_temperature": _as_number(match["start"] or 1.0)}
        else:
            self._refuse("ent_coef", stated, 'expected a number, "auto", or "auto_" and where it starts')
        self.trainer["target_entropy"] = target = None if entropy == "auto" else _as_number(entropy)
        if target is None and entropy != "auto":
            self._refuse("target_entropy", entropy, 'expected a number, or "auto"')

    def _refuse_the_rest(self) -> None:
        known = {*self.defaults, *_ADVICE, *_RENAMED}
        for name, value in self.left.items():
            plain = tuple(value) if isinstance(value, list) else value
            if plain in _TELLS_NOTHING.get(name, ()):
                continue
            close = difflib.get_close_matches(name, known, n=1)
            unknown = f"{self.algorithm.__name__} has no counterpart" + (f"; did you mean {close[0]}?" if close else "")
            self._refuse(name, value, _ADVICE.get(name, unknown))


def _as_number(value: object) -> float | None:
    """A finite number, also as text; None for anything else."""
    if isinstance(value, bool):
        return float(value)
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None
    if not math.isfinite(number):
        return None
    return int(number) if isinstance(value, int) else number


def _sizes(found: object) -> tuple[int, ...] | None:
    """Hidden layers; None unless policy and values, if named apart, have the same."""
    if isinstance(found, list | tuple) and len(found) == 1 and isinstance(found[0], dict):
        found = found[0]  # as Stable-Baselines3 1 wrote it
    if isinstance(found, dict):
        networks = list(found.values())
        if set(found) not in ({"pi", "vf"}, {"pi", "qf"}) or networks[0] != networks[1]:
            return None
        found = networks[0]
    if not isinstance(found, list | tuple) or not all(type(size) is int and size >= 1 for size in found):
        return None
    return tuple(found)


def _parsed(value: object) -> Any:
    """The plain value of a text such as "dict(net_arch=[64], activation_fn=nn.ReLU)"; names stay texts."""
    if not isinstance(value, str):
        return value
    try:
        return _plain(ast.parse(value.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return value


def _plain(node: ast.expr) -> Any:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "dict" and not node.args:
        return {str(keyword.arg): _plain(keyword.value) for keyword in node.keywords if keyword.arg is not None}
    if isinstance(node, ast.Dict) and all(node.keys):
        return {ast.literal_eval(key): _plain(value) for key, value in zip(node.keys, node.values, strict=True) if key}
    if isinstance(node, ast.List | ast.Tuple):
        return [_plain(item) for item in node.elts]
    if isinstance(node, ast.Name | ast.Attribute):
        return ast.unparse(node)
    return ast.literal_eval(node)
