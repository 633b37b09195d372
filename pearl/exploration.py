"""Exploration noise on top of a greedy policy, for a vector of environments."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias

import numpy as np
from gymnasium import spaces

from pearl.errors import ConfigurationError
from pearl.schedules import Schedule, check_followed, factor_at, names_code, plain_schedule


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _require(condition: bool, setting: object, message: str) -> None:
    if not condition:
        raise ConfigurationError(f"{type(setting).__name__}: {message}; found {setting}.")


@dataclass(frozen=True)
class EpsilonGreedy:
    """Random discrete actions; their probability falls from `start` to `end` in `steps` environment steps.

    `schedule` (pearl.schedules) is how: its factor is 1 at `start` and 0 at `end`.
    """

    start: float = 1.0
    end: float = 0.05
    steps: int = 10_000
    schedule: Schedule = "linear"

    def __post_init__(self) -> None:
        shares = all(_is_number(share) and 0 <= share <= 1 for share in (self.start, self.end))
        _require(shares, self, "start and end must be numbers in [0, 1]")
        _require(_is_number(self.steps) and self.steps >= 0, self, "steps must be a number of at least 0")
        object.__setattr__(self, "schedule", plain_schedule(self.schedule, "EpsilonGreedy.schedule"))

    def epsilon(self, env_steps: int) -> float:
        """Probability of a random action after `env_steps` steps of all environments together."""
        factor = factor_at(self.schedule, env_steps / self.steps if env_steps < self.steps else 1.0)
        return min(1.0, max(0.0, self.start + (1.0 - factor) * (self.end - self.start)))


def _require_random_steps(setting: GaussianNoise | OrnsteinUhlenbeck | PolicySampling) -> None:
    steps = setting.random_steps
    whole = isinstance(steps, int) and not isinstance(steps, bool) and steps >= 0
    _require(steps is None or whole, setting, "random_steps must be a whole number of at least 0, or None")


def _check_noise(setting: GaussianNoise | OrnsteinUhlenbeck) -> None:
    finite = _is_number(setting.sigma) and 0 <= setting.sigma < math.inf
    _require(finite, setting, "sigma must be a number of at least 0, and finite")
    _require_random_steps(setting)
    plain = plain_schedule(setting.schedule, f"{type(setting).__name__}.schedule")
    object.__setattr__(setting, "schedule", plain)
    steps = setting.steps
    whole = isinstance(steps, int) and not isinstance(steps, bool) and steps >= 1
    _require(
        whole if plain != "constant" else steps is None,
        setting,
        "steps must be the environment steps, at least 1, in which sigma follows its schedule; None with "
        'schedule="constant"',
    )


def _sigma_at(setting: GaussianNoise | OrnsteinUhlenbeck, env_steps: int) -> float:
    if setting.steps is None:
        return setting.sigma
    return setting.sigma * factor_at(setting.schedule, env_steps / setting.steps)


@dataclass(frozen=True)
class GaussianNoise:
    """Independent normal noise of `sigma` (in units of half the action range).

    Actions are uniform for the first `random_steps` steps of all environments; None: for the run's `learning_starts`.
    `schedule` (pearl.schedules) is the factor of `sigma` over the first `steps` environment steps, and then as at their
    end.
    """

    sigma: float = 0.1
    random_steps: int | None = None
    schedule: Schedule = "constant"
    steps: int | None = None

    def __post_init__(self) -> None:
        _check_noise(self)

    def sigma_at(self, env_steps: int) -> float:
        """The deviation after `env_steps` steps of all environments together."""
        return _sigma_at(self, env_steps)


@dataclass(frozen=True)
class OrnsteinUhlenbeck:
    """Correlated noise (Lillicrap et al. 2016): `x += theta * -x * dt + sigma * sqrt(dt) * normal`, reset per episode.

    `sigma` is in units of half the action range. Each environment has a noise of its own. Actions are uniform for the
    first `random_steps` steps of all environments; None: for the run's `learning_starts`. `schedule` (pearl.schedules)
    is the factor of `sigma` over the first `steps` environment steps, and then as at their end; the noise follows it
    within about `1 / theta` units of time.
    """

    sigma: float = 0.2
    theta: float = 0.15
    dt: float = 1.0
    random_steps: int | None = None
    schedule: Schedule = "constant"
    steps: int | None = None

    def __post_init__(self) -> None:
        _check_noise(self)
        numbers = _is_number(self.dt) and _is_number(self.theta)
        steady = numbers and self.dt > 0 and 0 <= self.theta * self.dt <= 1
        _require(steady, self, "dt must be a number above 0, and theta * dt lie in [0, 1]")

    def sigma_at(self, env_steps: int) -> float:
        """The sigma after `env_steps` steps of all environments together."""
        return _sigma_at(self, env_steps)


@dataclass(frozen=True)
class PolicySampling:
    """Actions drawn from the policy's own distribution, by the trainer's `sample_action(obs, noise)`.

    Actions are uniform for the first `random_steps` steps of all environments; None: for the run's `learning_starts`.
    """

    random_steps: int | None = None

    def __post_init__(self) -> None:
        _require_random_steps(self)


Exploration: TypeAlias = "EpsilonGreedy | GaussianNoise | OrnsteinUhlenbeck | PolicySampling"
_KINDS = (EpsilonGreedy, GaussianNoise, OrnsteinUhlenbeck, PolicySampling)


def schedule_of(setting: object) -> Schedule | None:
    """The schedule of a setting; None if it has none."""
    return setting.schedule if isinstance(setting, EpsilonGreedy | GaussianNoise | OrnsteinUhlenbeck) else None


def without_code(setting: object) -> object:
    """The same setting without names of code, which a file must not have: such a schedule becomes its final value."""
    if not names_code(schedule_of(setting)):
        return setting
    if isinstance(setting, EpsilonGreedy):
        last = setting.epsilon(setting.steps)
        return EpsilonGreedy(last, last, setting.steps)
    assert isinstance(setting, GaussianNoise | OrnsteinUhlenbeck)
    return replace(setting, sigma=setting.sigma_at(setting.steps or 0), schedule="constant", steps=None)


def scheduled_values(setting: object, env_steps: int) -> dict[str, float]:
    """For the log: what changes by a schedule, after `env_steps` steps of all environments, by name."""
    if isinstance(setting, EpsilonGreedy):
        return {"epsilon": setting.epsilon(env_steps)}
    if isinstance(setting, GaussianNoise | OrnsteinUhlenbeck) and setting.steps is not None:
        return {"noise_sigma": setting.sigma_at(env_steps)}
    return {}


class Explorer(Protocol):
    """Exploration of one vector of environments."""

    def apply(self, actions: np.ndarray, env_steps: int, masks: np.ndarray | None = None) -> np.ndarray:
        """Return explored actions `(envs, *action)` for greedy ones, after `env_steps` steps of all environments.

        With `masks` `(envs, choices)` bool, allowed ones.
        """

    def end_episodes(self, done: np.ndarray) -> None:
        """Note the environments `(envs,)` bool that ended an episode."""


class _Greedy:
    def apply(self, actions: np.ndarray, env_steps: int, masks: np.ndarray | None = None) -> np.ndarray:
        return actions

    def end_episodes(self, done: np.ndarray) -> None:
        return


class _EpsilonGreedy(_Greedy):
    def __init__(self, setting: EpsilonGreedy, actions: int, rng: np.random.Generator) -> None:
        self._setting, self._actions, self._rng = setting, actions, rng
        self._last = setting.epsilon(setting.steps)

    def _epsilon(self, env_steps: int) -> float:
        return self._last if env_steps >= self._setting.steps else self._setting.epsilon(env_steps)

    def apply(self, actions: np.ndarray, env_steps: int, masks: np.ndarray | None = None) -> np.ndarray:
        draw = self._rng.random(len(actions)) < self._epsilon(env_steps)
        if masks is None:
            return np.where(draw, self._rng.integers(self._actions, size=len(actions)), actions)
        order = self._rng.random(masks.shape)
        return np.where(draw, np.where(masks, order, -1.0).argmax(axis=1), actions)


class _Sigma:
    """The sigma of a noise; after the schedule's end, without asking it."""

    def __init__(self, setting: GaussianNoise | OrnsteinUhlenbeck) -> None:
        self._setting, self._steps = setting, setting.steps or 0
        self._last = setting.sigma_at(self._steps)

    def at(self, env_steps: int) -> float:
        return self._last if env_steps >= self._steps else self._setting.sigma_at(env_steps)


class _BoxNoise(_Greedy):
    """No noise (the trainer has sampled the actions), but uniform actions at first; subclasses add noise."""

    def __init__(self, box: spaces.Box, random_steps: int, rng: np.random.Generator) -> None:
        self._low, self._high, self._random_steps, self._rng = box.low, box.high, random_steps, rng
        self._half = (box.high - box.low) / 2

    def _noise(self, shape: tuple[int, ...], env_steps: int) -> np.ndarray:
        return np.zeros(shape, np.float32)

    def apply(self, actions: np.ndarray, env_steps: int, masks: np.ndarray | None = None) -> np.ndarray:
        noise = self._noise(actions.shape, env_steps)
        if env_steps < self._random_steps:
            explored = self._rng.uniform(self._low, self._high, actions.shape)
        else:
            explored = np.clip(actions + self._half * noise, self._low, self._high)
        return explored.astype(np.float32)


class _Gaussian(_BoxNoise):
    def __init__(self, setting: GaussianNoise, *common: Any) -> None:
        super().__init__(*common)
        self._sigma = _Sigma(setting)

    def _noise(self, shape: tuple[int, ...], env_steps: int) -> np.ndarray:
        return self._rng.normal(0.0, self._sigma.at(env_steps), shape)


class _OrnsteinUhlenbeck(_BoxNoise):
    def __init__(self, setting: OrnsteinUhlenbeck, envs: int, box: spaces.Box, *common: Any) -> None:
        super().__init__(box, *common)
        self._decay = setting.theta * setting.dt
        self._sigma, self._root = _Sigma(setting), setting.dt**0.5
        self._state = np.zeros((envs, *box.shape))

    def _noise(self, shape: tuple[int, ...], env_steps: int) -> np.ndarray:
        scale = self._sigma.at(env_steps) * self._root
        self._state += -self._decay * self._state + scale * self._rng.normal(size=shape)
        return self._state

    def end_episodes(self, done: np.ndarray) -> None:
        self._state[done] = 0.0


def make_explorer(
    setting: Exploration | None,
    action_space: spaces.Space[Any],
    envs: int,
    rng: np.random.Generator,
    learning_starts: int = 0,
) -> Explorer:
    """The explorer of `setting` for `envs` environments; ConfigurationError if it does not suit the action space.

    If `setting.random_steps` is None, actions are random for `learning_starts` steps: the policy has learned nothing
    before.
    """
    if setting is None:
        return _Greedy()
    if not isinstance(setting, _KINDS):
        known = ", ".join(f"{kind.__name__}()" for kind in _KINDS)
        raise ConfigurationError(
            f"The trainer's `exploration` must be one of {known} of pearl.exploration, or None; found {setting!r}."
        )
    if isinstance(setting, EpsilonGreedy):
        if isinstance(action_space, spaces.Discrete):
            check_followed(setting.schedule)
            return _EpsilonGreedy(setting, int(action_space.n), rng)
    elif isinstance(action_space, spaces.Box):
        random_steps = learning_starts if setting.random_steps is None else setting.random_steps
        check_followed(schedule_of(setting) or "constant")
        if isinstance(setting, GaussianNoise):
            return _Gaussian(setting, action_space, random_steps, rng)
        if isinstance(setting, OrnsteinUhlenbeck):
            return _OrnsteinUhlenbeck(setting, envs, action_space, random_steps, rng)
        return _BoxNoise(action_space, random_steps, rng)
    wanted = "a Discrete" if isinstance(setting, EpsilonGreedy) else "a Box"
    raise ConfigurationError(
        f"{type(setting).__name__} exploration needs {wanted} action space; the environment has {action_space}. "
        "Set the trainer's `exploration` to one that fits, or to None if get_action explores by itself."
    )
