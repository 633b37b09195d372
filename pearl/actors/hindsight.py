"""Hindsight experience replay (Andrychowicz et al. 2017): transitions once more, with goals that were reached later.

An Actor keeps the steps of each episode. When it ends, each step gets further transitions whose goal is what some later
step of the episode achieved ("future" in the paper's Sec. 4.5), with the reward that the environment gives for it. They
go into the replay as all transitions do, so that every Replay Manager, Data Storage and Learner takes them.
"""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from pearl.actors.environment import close_envs, make_single_envs
from pearl.actors.observations import own_space, space_text
from pearl.actors.vectorization import SingleEnv
from pearl.errors import ConfigurationError, EnvError
from pearl.spec import ACTION, DISCOUNT, NEXT_OBS, OBS, REWARD, ActorSpec, ReplaySpec, TrainSpec, TransitionSpec

ACHIEVED, DESIRED = "achieved_goal", "desired_goal"
_LONGEST = 10_000  # steps: a longer episode is treated as if it ended there, so that what is kept stays bounded
_COMPARED = 32  # rows on which functions of batches are compared with calls one by one
_MOST_WRONG = 0.05  # of an episode's rewards that may differ from compute_reward, by rounding, without a warning


@dataclass(frozen=True)
class Goals:
    """Where an observation in a row has its two goals; `space` is that of one goal."""

    achieved: slice
    desired: slice
    space: gym.Space[Any]

    @classmethod
    def of(cls, space: gym.Space[Any] | None, env: str) -> Goals:
        """Those of `env`, whose own observations are of `space`; EnvError if it has no goals."""
        if not isinstance(space, spaces.Dict) or not {ACHIEVED, DESIRED} <= set(space):
            found = "arrays" if space is None else space_text(space)
            raise EnvError(
                f"hindsight_goals needs an environment with goals: observations that are a Dict with the parts "
                f"{ACHIEVED!r} and {DESIRED!r}, and a method compute_reward(achieved_goal, desired_goal, info), as in "
                f"Gymnasium-Robotics. {env} has observations of {found}. Set hindsight_goals to 0 for it."
            )
        if not _alike(space[ACHIEVED], space[DESIRED]):
            raise EnvError(
                f"hindsight_goals puts achieved goals in the place of desired ones, so both need the same space; {env} "
                f"has {space[ACHIEVED]} and {space[DESIRED]}."
            )
        places, start = {}, 0
        for name, part in space.items():
            places[name] = slice(start, start := start + spaces.flatdim(part))
        return cls(places[ACHIEVED], places[DESIRED], space[DESIRED])

    def values(self, rows: np.ndarray) -> list[Any] | np.ndarray:
        """Goals `(n, size)`, as observations hold them, as values of their space: a batch `(n, *shape)` if possible."""
        if isinstance(self.space, spaces.Box | spaces.MultiBinary):
            return rows.reshape(len(rows), *self.space.shape).astype(self.space.dtype)
        return [spaces.unflatten(self.space, row) for row in rows]


def check_hindsight(
    train: TrainSpec, transition: TransitionSpec, replay: ReplaySpec, space: gym.Space[Any] | None, env: str
) -> None:
    """Raise ConfigurationError or EnvError if `train.hindsight_goals` cannot be had; `space` is the environment's own.

    `space` is None where observations are arrays already.
    """
    if not train.hindsight_goals:
        return
    Goals.of(space, env)
    shared = [f"{name} of the replay" for name in ("share_next_obs", "share_frames") if getattr(replay, name)]
    obstacles = {
        "sequences of a recurrent policy": transition.sequence is not None,
        f"the further columns {', '.join(f.name for f in transition.further)}": bool(transition.further),
        "normalize_observations and reward_standardization": bool(transition.statistics),
        **dict.fromkeys(shared, True),
    }
    for what, is_there in obstacles.items():
        if is_there:
            raise ConfigurationError(
                f"hindsight_goals = {train.hindsight_goals} does not go together with {what}: leave one of them out."
            )


def has_goals(actors: ActorSpec, envs: gym.vector.VectorEnv[Any, Any, Any]) -> bool:
    """Whether these environments of `actors` have goals and their rewards.

    A further one is made and closed if they are in processes, or are stepped as one.
    """
    inner = getattr(envs, "envs", None)
    asked = inner[0] if inner else make_single_envs(actors, 1)[0]
    try:
        Goals.of(own_space(asked), "")
    except EnvError:
        return False
    finally:
        if not inner:
            close_envs(actors.env_name, asked)
    return _function(asked, "compute_reward") is not None


class Hindsight:
    """The episodes of one Actor's environments under way, and the transitions with other goals that are still to come.

    Each step of an environment brings `train.hindsight_goals` of these, once an episode has ended: as many as an ended
    episode brings in all, so that few wait. `envs` are the Actor's; a further one is made if they are in processes, or
    are stepped as one. `on_call` is called after each call of its functions.
    """

    def __init__(
        self,
        train: TrainSpec,
        transition: TransitionSpec,
        actors: ActorSpec,
        envs: gym.vector.VectorEnv[Any, Any, Any],
        rng: np.random.Generator,
        *,
        on_call: Callable[[], None] = lambda: None,
    ) -> None:
        self._goals, self._count, self._rng = train.hindsight_goals, actors.envs_per_actor, rng
        self._n, self._discounts = train.n_step, train.gamma ** np.arange(train.n_step + 1)
        self._env, self._on_call = actors.env_name, on_call
        inner: Any = getattr(envs, "envs", None)
        self._own: gym.Env[Any, Any] | None = None if inner else make_single_envs(actors, 1)[0]
        try:
            self._ask(inner[0] if self._own is None else self._own)
        except BaseException:
            self.close()
            raise
        self._in_batches: dict[str, bool] = {}
        self._has_compared = False
        self._everywhere = np.arange(self._count)
        self._length = np.zeros(self._count, np.int64)
        columns = {f.name: f for f in transition.fields}
        self._fields = {name: columns[name] for name in (OBS, ACTION, REWARD)}
        self._room = 0
        self._kept: dict[str, np.ndarray] = {}
        self._make_room(64)
        self._waiting: deque[_Relabelled] = deque()

    def _ask(self, env: gym.Env[Any, Any]) -> None:
        """Take the goals of `env`, and its functions of them. Raises EnvError where it lacks them."""
        if env is self._own:
            if isinstance(env.unwrapped, SingleEnv):
                raise EnvError(
                    f"hindsight_goals asks a single environment for the rewards of other goals, and {self._env} can be "
                    "made only as a vector. Register it with an entry_point, too, or set hindsight_goals to 0."
                )
            env.reset(seed=int(self._rng.integers(1 << 31)))  # what its methods use may begin there
        self._places = Goals.of(own_space(env), self._env)
        self._reward = _function(env, "compute_reward")
        if self._reward is None:
            raise EnvError(
                f"hindsight_goals needs a method compute_reward(achieved_goal, desired_goal, info) of {self._env}, "
                "which it does not have: it says what reward another goal would have brought. Define it, or set "
                "hindsight_goals to 0."
            )
        self._terminated = _function(env, "compute_terminated")

    def clear(self) -> None:
        """Forget the episodes under way, and what waits."""
        self._length[:] = 0
        self._waiting.clear()

    def close(self) -> None:
        """Close the further environment, if there is one."""
        if self._own is not None:
            close_envs(self._env, self._own)

    def push(
        self,
        obs: np.ndarray,
        action: np.ndarray,
        reward: np.ndarray,
        next_obs: np.ndarray,
        terminated: np.ndarray,
        done: np.ndarray,
        real: np.ndarray,
        out: Mapping[str, np.ndarray],
        row: int,
    ) -> int:
        """Keep one step of every environment where `real`; write what waits to `out` from `row` on.

        The arguments are those of `NStepWindow.push`. Returns the next free row.
        """
        envs = self._everywhere if real.all() else np.flatnonzero(real)
        if not len(envs):
            return row
        at = self._length[envs]
        if at.max() >= self._room:
            self._make_room(2 * self._room)
        kept, begins = self._kept, envs[at == 0]
        kept[OBS][begins, 0] = obs[begins]
        kept[OBS][envs, at + 1] = next_obs[envs]
        kept[ACTION][envs, at] = action[envs]
        kept[REWARD][envs, at] = reward[envs]
        self._length[envs] += 1
        for env in np.flatnonzero(real & (done | (self._length >= _LONGEST))).tolist():
            self._end(env, bool(terminated[env]))
        return self._write(out, row, self._goals * len(envs))

    def _make_room(self, room: int) -> None:
        earlier, self._kept, self._room = self._kept, {}, room
        for name, field in self._fields.items():
            self._kept[name] = np.empty((self._count, room + (name == OBS), *field.shape), field.dtype)
            if name in earlier:
                self._kept[name][:, : earlier[name].shape[1]] = earlier[name]

    def _end(self, env: int, terminated: bool) -> None:
        """The episode of `env` ended: choose its goals, and what they bring."""
        steps = int(self._length[env])
        self._length[env] = 0
        obs, action = self._kept[OBS][env, : steps + 1].copy(), self._kept[ACTION][env, :steps].copy()
        achieved = obs[1:, self._places.achieved]
        if not self._has_compared:
            self._has_compared = True
            self._compare(achieved, obs[1:, self._places.desired], self._kept[REWARD][env, :steps])
        first = np.repeat(np.arange(steps), self._goals)
        goal = achieved[self._rng.integers(first, steps)]  # achieved by this step, or a later one
        ends_anyway = terminated  # whatever the goal was, unless its own goal explains the end
        if terminated and self._terminated is not None:
            own = obs[-1:, self._places.desired]
            ends_anyway = not self._ends(achieved[-1:], own, np.zeros(1, bool))[0]
        reward, last = np.zeros(len(first)), first.copy()
        ends = np.zeros(len(first), bool)
        for k in range(self._n):
            going = np.flatnonzero(~ends & (first + k < steps))
            if not len(going):
                break
            at = last[going] = first[going] + k
            reward[going] += self._discounts[k] * self._rewards(achieved[at], goal[going])
            ends[going] = self._ends(achieved[at], goal[going], ends_anyway & (at == steps - 1))
        discount = np.where(ends, 0.0, self._discounts[last - first + 1])
        self._waiting.append(_Relabelled(obs, action, first, last + 1, goal, reward, discount))

    def _write(self, out: Mapping[str, np.ndarray], row: int, most: int) -> int:
        while most > 0 and self._waiting:
            oldest = self._waiting[0]
            end = row + oldest.write(out, row, most, self._places.desired)
            most, row = most - (end - row), end
            if oldest.is_written:
                self._waiting.popleft()
        return row

    # --- what the environment says ----------------------------------------------------------------------------------

    def _rewards(self, achieved: np.ndarray, desired: np.ndarray) -> np.ndarray:
        assert self._reward is not None
        found = self._called("compute_reward", self._reward, achieved, desired)
        with np.errstate(over="ignore"):
            infinite = ~np.isfinite(found.astype(np.float32))  # as it is stored
        if infinite.any():
            raise EnvError(
                f"{self._returned('compute_reward', found, achieved, desired, infinite)} Training on it would destroy "
                "the weights: have it return a number, of less than 3.4e38."
            )
        return found

    def _ends(self, achieved: np.ndarray, desired: np.ndarray, otherwise: np.ndarray) -> np.ndarray:
        """Whether these steps end an episode with these goals, or `otherwise`."""
        if self._terminated is None:
            return otherwise
        found = self._called("compute_terminated", self._terminated, achieved, desired)
        if (unknown := np.isnan(found)).any():
            said = self._returned("compute_terminated", found, achieved, desired, unknown)
            raise EnvError(f"{said} Have it return True or False; None counts as NaN.")
        return np.asarray((found != 0) | otherwise)

    def _returned(
        self, name: str, found: np.ndarray, achieved: np.ndarray, desired: np.ndarray, wrong: np.ndarray
    ) -> str:
        at = int(np.flatnonzero(wrong)[0])
        return (
            f"{name} of {self._env} returned {found[at]} for the achieved goal {achieved[at]} and the desired goal "
            f"{desired[at]}."
        )

    def _called(self, name: str, function: Callable[..., Any], achieved: np.ndarray, desired: np.ndarray) -> np.ndarray:
        """What the environment's `function` returns for each row `(n, size)`, at once if it takes batches."""
        pair, row, among = (self._places.values(achieved), self._places.values(desired)), 0, ""
        try:
            if name not in self._in_batches:
                takes = self._takes_batches(function, *pair)
                if takes is not None:
                    self._in_batches[name] = takes
            if self._in_batches.get(name, False):
                among = f", the first of {len(achieved)} pairs at once," if len(achieved) > 1 else ""
                found = np.asarray(function(*pair, {}), np.float64)
                self._on_call()
                if found.size != len(achieved):
                    raise ValueError(f"it returned {found.size} numbers for {len(achieved)} pairs of goals")
                return found.reshape(-1)
            found = np.empty(len(achieved))
            for row in range(len(achieved)):
                found[row] = _one(function(pair[0][row], pair[1][row], {}))
                self._on_call()
            return found
        except Exception as error:
            raise EnvError(
                f"{name}(achieved_goal, desired_goal, info) of {self._env} failed with goals {pair[0][row]} and "
                f"{pair[1][row]}{among} and an empty info: {type(error).__name__}: {error}. It must return one number."
            ) from error

    def _takes_batches(self, function: Callable[..., Any], achieved: Any, desired: Any) -> bool | None:
        """Whether the function takes batches; None if so few rows do not tell."""
        if not isinstance(achieved, np.ndarray):
            return False
        count = min(_COMPARED, len(achieved))
        while count in achieved.shape[1:]:  # a sum over the wrong axis would have as many numbers
            count -= 1
        if count < 2:
            return None
        pair = achieved[:count], desired[:count]
        try:  # with copies: the function may write to its arguments
            at_once = np.asarray(function(pair[0].copy(), pair[1].copy(), {}), np.float64)
        except Exception:
            return False
        if at_once.shape != (count,):
            return False
        one_by_one = zip(pair[0].copy(), pair[1].copy(), strict=True)
        return np.allclose(at_once, [_one(function(*one, {})) for one in one_by_one])

    def _compare(self, achieved: np.ndarray, desired: np.ndarray, reward: np.ndarray) -> None:
        """Warn if the rewards of an episode are not those that `compute_reward` says for the goals that it had."""
        said = self._rewards(achieved, desired)
        wrong = np.flatnonzero(~np.isclose(said, reward, rtol=1e-3, atol=1e-3))
        if len(wrong) > _MOST_WRONG * len(reward):
            at = int(wrong[0])
            warnings.warn(
                f"compute_reward of {self._env} says {said[at]:g} where a step brought {reward[at]:g}, and differs in "
                f"{len(wrong)} of {len(reward)} steps of an episode: transitions of hindsight_goals have other rewards "
                "than the rest. If a wrapper changes rewards or goals, have it define compute_reward, too.",
                stacklevel=2,
            )


class _Relabelled:
    """The transitions of one episode with other goals; those before `done` are written."""

    def __init__(
        self,
        obs: np.ndarray,
        action: np.ndarray,
        first: np.ndarray,
        last: np.ndarray,
        goal: np.ndarray,
        reward: np.ndarray,
        discount: np.ndarray,
    ) -> None:
        self._obs, self._action, self._first, self._last, self._goal = obs, action, first, last, goal
        self._reward, self._discount, self._done = reward, discount, 0

    @property
    def is_written(self) -> bool:
        """Whether nothing is left."""
        return self._done == len(self._first)

    def write(self, out: Mapping[str, np.ndarray], row: int, most: int, desired: slice) -> int:
        """Write at most so many to `out` from `row` on; return how many."""
        here = slice(self._done, min(self._done + most, len(self._first)))
        rows = slice(row, row + here.stop - here.start)
        for name, at in ((OBS, self._first), (NEXT_OBS, self._last)):
            out[name][rows] = self._obs[at[here]]
            out[name][rows, desired] = self._goal[here]
        out[ACTION][rows] = self._action[self._first[here]]
        out[REWARD][rows] = self._reward[here]
        out[DISCOUNT][rows] = self._discount[here]
        self._done = here.stop
        return here.stop - here.start


def _alike(one: gym.Space[Any], other: gym.Space[Any]) -> bool:
    """Whether values of `one` are also values of `other`, but for the bounds and the precision of arrays."""
    if isinstance(one, spaces.Box) and isinstance(other, spaces.Box):
        kinds = {np.dtype(space.dtype).kind for space in (one, other)}
        return one.shape == other.shape and len(kinds) == 1
    if isinstance(one, spaces.Dict) and isinstance(other, spaces.Dict):
        return list(one) == list(other) and all(_alike(part, other[name]) for name, part in one.items())
    if isinstance(one, spaces.Tuple) and isinstance(other, spaces.Tuple):
        return len(one) == len(other) and all(map(_alike, one, other))
    return bool(one == other)


def _function(env: gym.Env[Any, Any], name: str) -> Callable[..., Any] | None:
    """A method of the environment or of its outermost wrapper that has it."""
    try:
        found: Callable[..., Any] = env.get_wrapper_attr(name)
    except AttributeError:
        return None
    return found if callable(found) else None


def _one(value: Any) -> float:
    found = np.asarray(value, np.float64)
    if found.size != 1:
        raise ValueError(f"it returned {math.prod(found.shape)} numbers for one pair of goals")
    return float(found.reshape(-1)[0])
