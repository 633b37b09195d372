"""Rules that choose settings from facts about an environment and a machine, each choice with its reason.

The rules are pure functions of `Facts`. Their numbers come from the publications that the reasons name, from the sizes
of the spaces, from what random actions saw, and from measured times. They were not tuned on the seeds of
`benchmarks/` (docs/choosing_settings.md says how they were checked).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from pearl.algorithms.inputs import scaled_observations, takes_cnn, unit_scale
from pearl.algorithms.spaces import is_bounded

Signal: TypeAlias = Literal["state", "action", "constant"]

UpdateTime: TypeAlias = Callable[[tuple[int, ...], int], "float | None"]
"""Microseconds of a gradient step with these hidden sizes at this batch size; None where it was not measured."""

PATIENCE = 4.0  # training may take so many times as long as stepping: each is on a core of its own
_NARROW, _MIDDLE, _WIDE = 64, 128, 256  # widths; numbers that enter and leave a network of the first two are at most:
_FEW, _SEVERAL = 8, 32
_WIDE_RATE, _HIGHEST_RATE = 3e-4, 1e-3
_IMAGE_RATE = 1e-4
_LEAST_DEVIATION = 1e-6
_ENOUGH_STEPS = 1000  # random steps needed before "they found nothing" is a safe conclusion
_BY_ACTION = 0.999  # if actions explain a larger share of the rewards' variance, rewards say nothing of states


def _not_measured(hidden_sizes: tuple[int, ...], batch_size: int) -> float | None:
    return None


@dataclass(frozen=True)
class Choice:
    """A setting, its value, and the fact that it follows from, in one line."""

    name: str
    value: Any
    reason: str


@dataclass(frozen=True, kw_only=True)
class RandomSteps:
    """What `steps` steps with random actions saw of an environment.

    `step_us` is the median time of a step. Of the `episodes` that ended, `terminated` ended by the task, not by a time
    limit; `mean_length` is their mean length (0: none ended). `reward_size` is the mean absolute reward. `signal` says
    what the rewards of steps that ended no episode depend on: "state", the "action" alone, or nothing ("constant").
    `deviations` are those of each element of the observations; () for images. `stack` is the number of frames in an
    observation `(stack, *frame)`: each step drops the oldest and appends one. It is 0 for other observations. `goals`
    says whether the environment has goals for hindsight (`pearl.actors.hindsight`).
    """

    steps: int
    step_us: float
    episodes: int = 0
    terminated: int = 0
    mean_length: float = 0.0
    reward_size: float = 1.0
    signal: Signal = "state"
    deviations: tuple[float, ...] = ()
    stack: int = 0
    goals: bool = False


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What settings are chosen from.

    `time_limit` is `max_episode_steps` in steps. `cores` and `free_bytes` are those of the machine; `env_count` is how
    many environments are stepped at a time. `fixed` has settings that are chosen already: the rules follow them.
    """

    observation_space: gym.Space[Any]
    action_space: gym.Space[Any]
    tried: RandomSteps
    time_limit: int | None = None
    cores: int = 2
    free_bytes: int = 2**33
    env_count: int = 8
    fixed: Mapping[str, Any] = field(default_factory=dict)
    update_us: UpdateTime = _not_measured

    @property
    def images(self) -> bool:
        """Whether observations are images for the Nature CNN; TrainerError if their channels are last."""
        return takes_cnn(tuple(self.observation_space.shape or ()))

    @property
    def bounded_vectors(self) -> bool:
        """Whether actions are a bounded Box and observations no images."""
        space = self.action_space
        return isinstance(space, spaces.Box) and is_bounded(space) and not self.images

    @property
    def inputs(self) -> int:
        """Numbers of an observation."""
        return math.prod(self.observation_space.shape or ())

    @property
    def outputs(self) -> int:
        """Actions to choose from, or numbers of an action."""
        space = self.action_space
        if isinstance(space, spaces.Discrete):
            return int(space.n)
        if isinstance(space, spaces.MultiDiscrete):
            return int(np.sum(space.nvec))
        if isinstance(space, spaces.MultiBinary):
            return 2 * math.prod(space.shape)
        return math.prod(space.shape or ())

    @property
    def silent(self) -> bool:
        """Whether random actions saw nothing to learn from: rewards independent of states, and no termination.

        With goals, what they reach is something to learn from.
        """
        enough = self.tried.steps >= _ENOUGH_STEPS and not self.hindsight
        return enough and self.tried.signal != "state" and not self.tried.terminated

    @property
    def hindsight(self) -> bool:
        """Whether transitions with other goals can be made, beside what is fixed."""
        obstacles = {"normalize_observations": False, "reward_standardization": "none", "action_masks": False}
        free = all(self.fixed.get(name, value) == value for name, value in obstacles.items())
        return self.tried.goals and free and self.fixed.get("hindsight_goals") != 0

    @property
    def silence(self) -> str:
        """Why `silent`, in words."""
        what = "constant" if self.tried.signal == "constant" else "of the action alone"
        return f"{self.tried.steps:,} random steps found no signal (reward {what}, no termination)"

    @property
    def episode(self) -> float:
        """Steps of a random episode; the time limit, or what was tried, where none ended."""
        return self.tried.mean_length or self.time_limit or float(self.tried.steps)

    @property
    def described_spaces(self) -> str:
        """The sizes of both spaces, in words."""
        discrete = isinstance(self.action_space, spaces.Discrete)
        taken = f"{self.outputs} actions" if discrete else f"actions of {_numbers(self.outputs)}"
        return f"observations of {_numbers(self.inputs)}, {taken}"

    @property
    def timesteps(self) -> int:
        """Environment steps of the run."""
        return int(choose_timesteps(self).value)


def _numbers(count: int) -> str:
    return f"{count:,} number{'' if count == 1 else 's'}"


def choose_timesteps(facts: Facts) -> Choice:
    """How many environment steps a run has."""
    if (stated := facts.fixed.get("timesteps")) is not None:
        return Choice("timesteps", stated, "as stated")
    numbers = facts.inputs + facts.outputs
    if facts.images:
        return Choice("timesteps", 1_000_000, "images: a first look; Mnih et al. 2015 train for 12.5 million")
    steps = 100_000 if numbers <= _FEW else 300_000 if numbers <= _SEVERAL else 1_000_000
    return Choice(
        "timesteps", steps, f"{facts.described_spaces}; an evaluation that reaches the goal ends the run before"
    )


@dataclass(frozen=True)
class Sizing:
    """Hidden sizes, batch size and gradient steps per environment step, chosen together."""

    hidden_sizes: tuple[int, ...]
    batch_size: int
    updates: float
    choices: tuple[Choice, ...]


def choose_sizes(facts: Facts, *, batches: tuple[int, ...], updates: tuple[float, ...]) -> Sizing:
    """Choose among batch sizes (largest first) and gradient steps per environment step (fewest first).

    The network is as wide as the spaces need, and twice that where the environment is slower than training. The batch
    is the largest one, and then the gradient steps are the most, with which training takes at most `PATIENCE` times as
    long as stepping. What is in `facts.fixed` stays. Where nothing was measured, the middle ones are taken.
    """
    sizes, why_sizes = _network(facts)
    allowed_us = PATIENCE * facts.tried.step_us
    batch, why_batch = _batch(facts, sizes, batches, allowed_us)
    step_us = facts.update_us(sizes, batch)
    ratio = facts.fixed.get("replay_ratio")
    if ratio is not None:
        count = ratio / batch
    elif step_us is None:
        count = min(updates, key=lambda n: abs(n - 1.0))
    else:
        count = max((n for n in updates if n * step_us <= allowed_us), default=updates[0])
    if "hidden_sizes" not in facts.fixed and math.isfinite(count) and max(sizes) < _WIDE:
        wider = tuple(2 * size for size in sizes)
        wider_us = facts.update_us(wider, batch)
        if wider_us is not None and count * wider_us <= facts.tried.step_us:
            why_sizes += f"; twice as wide, as {wider_us:,.0f} us a step are less than the environment takes"
            sizes, step_us = wider, wider_us
    choices = (
        Choice("hidden_sizes", sizes, why_sizes),
        Choice("batch_size", batch, why_batch),
        Choice("replay_ratio", count * batch, _why_updates(facts, count, batch, step_us)),
    )
    return Sizing(sizes, batch, count, choices)


def _network(facts: Facts) -> tuple[tuple[int, ...], str]:
    if (stated := facts.fixed.get("hidden_sizes")) is not None:
        return tuple(stated), "as stated"
    numbers = facts.inputs + facts.outputs
    for most, width, source in (
        (_FEW, _NARROW, "2 x 64 of Schulman et al. 2017"),
        (_SEVERAL, _MIDDLE, "between 2 x 64 and 2 x 256"),
    ):
        if numbers <= most:
            return (width, width), f"{facts.described_spaces}, at most {most}: {source}"
    return (_WIDE, _WIDE), f"{facts.described_spaces}, more than {_SEVERAL}: 2 x 256 of Haarnoja et al. 2018"


def _batch(facts: Facts, sizes: tuple[int, ...], batches: tuple[int, ...], allowed_us: float) -> tuple[int, str]:
    if (stated := facts.fixed.get("batch_size")) is not None:
        return int(stated), "as stated"
    timed = [(batch, facts.update_us(sizes, batch)) for batch in batches]
    known = [(batch, us) for batch, us in timed if us is not None]
    if not known:
        middle = batches[len(batches) // 2]
        return middle, f"usual: the middle of {', '.join(map(str, batches))}, as no step was measured"
    stepping = f"{facts.tried.step_us:,.0f} us of an environment step"
    for batch, us in known:
        if us <= allowed_us:
            return batch, f"a gradient step takes {us:,.0f} us, within {PATIENCE:g} x the {stepping}"
    batch, us = known[-1]
    return batch, f"the smallest: a gradient step takes {us:,.0f} us, beyond {PATIENCE:g} x the {stepping}"


def _why_updates(facts: Facts, count: float, batch: int, step_us: float | None) -> str:
    steps = f"{count:g} gradient step{'s' if count > 1 else ''} of {batch} per environment step"
    if step_us is None:
        return steps
    share = count * step_us / facts.tried.step_us
    return f"{steps}: training takes {share:.2g} x the time of stepping, {facts.tried.step_us:,.0f} us"


def choose_learning_rate(facts: Facts, sizes: tuple[int, ...], name: str = "learning_rate") -> Choice:
    """Adam's: 3e-4 at a width of 256, inversely proportional to the width."""
    width = max(sizes, default=_WIDE)
    rate = min(_HIGHEST_RATE, float(f"{_WIDE_RATE * _WIDE / width:.1g}"))
    source = "3e-4 at 256 (Haarnoja et al. 2018), by 1/width for Adam (Yang et al. 2021), at most 1e-3"
    return Choice(name, rate, f"width {width}: {source}")


def choose_image_learning_rate() -> Choice:
    """Adam's, for the Nature CNN."""
    return Choice("learning_rate", _IMAGE_RATE, "images: between Rainbow's 6.25e-5 (Hessel et al. 2018) and 2.5e-4")


def choose_gamma(facts: Facts) -> Choice:
    """The discount: its horizon 1 / (1 - gamma) follows the length of episodes."""
    limit = facts.time_limit
    if limit is not None and limit < 100:
        value = round(1 - 1 / max(limit, 10), 3)
        return Choice("gamma", value, f"episodes end after {limit} steps: a horizon of as many")
    if facts.silent and limit is not None and limit > 200:
        value = round(1 - 1 / min(limit / 2, 500), 3)
        return Choice("gamma", value, f"{facts.silence}: a horizon of half an episode ({limit} steps)")
    why = "no time limit" if limit is None else f"episodes of up to {limit} steps"
    return Choice("gamma", 0.99, f"usual (Mnih et al. 2015; Haarnoja et al. 2018), a horizon of 100 steps; {why}")


def choose_n_step(facts: Facts, usual: int, source: str) -> Choice:
    """The length of returns: longer ones carry a rare reward back faster."""
    if facts.hindsight:
        return Choice("n_step", 1, "with goals in hindsight, rewards are near: no need for longer returns")
    if facts.silent:
        return Choice("n_step", 5, f"{facts.silence}: longer returns carry a rare reward back faster")
    return Choice("n_step", usual, source)


def choose_hindsight(facts: Facts) -> tuple[Choice, ...]:
    """Goals of later steps, where the environment has goals."""
    if not facts.hindsight:
        return ()
    return (Choice("hindsight_goals", 4, "the environment has goals: usual (Andrychowicz et al. 2017, Sec. 4.5)"),)


def choose_learning_starts(facts: Facts) -> Choice:
    """Transitions before the first gradient step: several episodes."""
    if facts.images:
        value = min(20_000, facts.timesteps // 2)
        return Choice("learning_starts", value, "images: Rainbow's 80,000 frames, 4 a step (Hessel et al. 2018)")
    episodes = 10 if facts.silent else 5
    wanted = round(episodes * facts.episode / 500) * 500
    most, least = min(10_000, facts.timesteps // 10), min(1000, facts.timesteps // 2)
    value = max(least, min(most, wanted))
    bound = "" if value == wanted else f", but {'at least' if value > wanted else 'at most'} {value:,}"
    reason = f"{episodes} random episodes of about {facts.episode:,.0f} steps{bound}"
    return Choice("learning_starts", value, f"{reason}: {facts.silence}" if facts.silent else reason)


def choose_scaling(facts: Facts) -> Choice | None:
    """Whether to scale observations by their bounds: where that brings what was seen closer to a deviation of 1."""
    space, seen = facts.observation_space, np.asarray(facts.tried.deviations)
    if not isinstance(space, spaces.Box) or seen.size != facts.inputs:
        return None
    elements = scaled_observations(space, asked=True)
    if not elements.any():
        return None
    scale = unit_scale(space, elements)[1]
    as_is, scaled = (_distance(seen), _distance(seen / scale))
    value = scaled < as_is / 2
    reason = (
        f"deviations of random observations are {_shown(seen)}; scaled by their bounds {_shown(seen / scale)}: "
        f"{'much closer' if value else 'not much closer'} to 1 (LeCun et al. 1998)"
    )
    return Choice("scale_observations", value, reason)


def choose_normalization(facts: Facts) -> Choice | None:
    """Whether to scale observations by their deviations: where some are far from 1."""
    seen = np.asarray(facts.tried.deviations)
    if not seen.size:
        return None
    value = bool(_distance(seen) > 4)
    return Choice(
        "normalize_observations",
        value,
        f"deviations of random observations are {_shown(seen)}: {'far from' if value else 'within a factor of 4 of'} 1",
    )


def _distance(deviations: np.ndarray) -> float:
    """The largest factor between a deviation and 1, of elements that change at all."""
    changing = deviations[deviations > _LEAST_DEVIATION]
    return float(np.exp(np.abs(np.log(changing)).max())) if changing.size else 1.0


def _shown(deviations: np.ndarray) -> str:
    low, high = f"{deviations.min():.2g}", f"{deviations.max():.2g}"
    return low if low == high else f"{low} to {high}"


def return_size(facts: Facts, discount: float) -> float:
    """About the size of a discounted return under random actions."""
    return facts.tried.reward_size * min(facts.episode, 1 / max(1e-6, 1 - discount))


def signal_of(rewards: np.ndarray, actions: np.ndarray, action_space: gym.Space[Any]) -> Signal:
    """What rewards `(steps,)` of random actions `(steps, *action)` depend on."""
    spread = float(np.var(rewards)) if len(rewards) else 0.0
    if spread <= 1e-12 * max(1e-12, float(np.mean(np.square(rewards)) if len(rewards) else 0.0)):
        return "constant"
    if isinstance(action_space, spaces.Box):
        flat = actions.reshape(len(rewards), -1).astype(np.float64)
        columns = [np.ones((len(rewards), 1)), flat, flat * flat]
    else:
        flat = actions.reshape(len(rewards), -1).astype(np.int64)
        columns = [(column[:, None] == np.unique(column)).astype(np.float64) for column in flat.T]
    design = np.concatenate(columns, axis=1)
    if len(rewards) < 4 * design.shape[1]:
        return "state"  # too few to tell
    fitted = design @ np.linalg.lstsq(design, rewards, rcond=None)[0]
    return "action" if float(np.var(rewards - fitted)) <= (1 - _BY_ACTION) * spread else "state"
