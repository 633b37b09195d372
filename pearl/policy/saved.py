"""A trained policy: actions for observations, in the environment's units."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from numpy.typing import ArrayLike

from pearl.action_masks import MaskReader
from pearl.actors.actions import EnvironmentActions
from pearl.actors.actor import Policy, RecurrentPolicy, RecurrentRolloutPolicy
from pearl.actors.observations import are_unprepared, prepare_batch, stored_dtype
from pearl.algorithms.on_policy import OnPolicyTrainer
from pearl.algorithms.trainer import TrainerLike, storing, uses_masks
from pearl.errors import EnvError, PolicyError
from pearl.exploration import Exploration, PolicySampling, make_explorer
from pearl.policy.description import PolicyDescription

_TRAINED = 2**62  # environment steps after which every exploration schedule is at its end


def check_seed(seed: object) -> None:
    """Raise PolicyError unless `seed` is a whole number of at least 0."""
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or seed < 0:
        raise PolicyError(f"seed must be a whole number of at least 0; found {seed!r}.")


@dataclass(frozen=True)
class WeightsOrigin:
    """Where weights come from: "last" or "best", their environment step, and the score that did not select them.

    `mean_return` is over `episodes` greedy episodes at the end of the run; None where it made none, or has not ended.
    `file` is the weights file or the checkpoint, and `run` the folder of the run, or that of an exported file.
    """

    which: str
    file: str
    run: str
    step: int | None = None
    mean_return: float | None = None
    episodes: int | None = None


class SavedPolicy:
    """A policy that `load_policy` read.

    It acts as the run's evaluations did: in C++ where the native engine knows its layers, else in torch. Its random
    numbers begin with `seed`. Instances are independent, also copied and pickled ones, which other processes may be
    given; one is not to be used by two threads at once.
    """

    def __init__(
        self, description: PolicyDescription, trainer: TrainerLike, acting: Policy, origin: WeightsOrigin, seed: int = 0
    ) -> None:
        self.description, self.origin = description, origin
        self._trainer, self._acting = trainer, acting
        self._taken = EnvironmentActions(self.action_space)
        self._exploration: Exploration | None = getattr(trainer, "exploration", None)
        self._stored = storing(trainer)
        self.seed(seed)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_acting", "_stored")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        from pearl.policy.loading import acting_of  # which imports this module

        vars(self).update(state)
        self._acting, self._stored = acting_of(self._trainer), storing(self._trainer)

    @property
    def observation_space(self) -> gym.Space[Any]:
        """The space of one observation."""
        return self.description.observation_space

    @property
    def observation_dtype(self) -> np.dtype[Any]:
        """The dtype of the arrays that the policy takes: the environment's, or of prepared observations `prepare`'s."""
        space = self.observation_space
        return np.dtype(space.dtype) if self.description.unprepared_space is None else stored_dtype(space)

    @property
    def action_space(self) -> gym.Space[Any]:
        """The space of one action."""
        return self.description.action_space

    @property
    def env(self) -> str:
        """The Gymnasium name of the environment that it was trained in."""
        return self.description.environment

    @property
    def trainer(self) -> TrainerLike:
        """The trainer that holds the weights, with only those loaded that acting needs."""
        return self._trainer

    def __repr__(self) -> str:
        step = "" if self.origin.step is None else f", step {self.origin.step:,}"
        return f"<SavedPolicy of {self.description.trainer.name} on {self.env}: {self.origin.which} weights{step}>"

    def seed(self, seed: int) -> None:
        """Begin the random numbers of `predict(deterministic=False)` again with `seed`, a whole number from 0."""
        check_seed(seed)
        self._rng = np.random.default_rng(seed)

    def predict(
        self, observation: Any, deterministic: bool = True, *, action_masks: ArrayLike | None = None
    ) -> np.ndarray:
        """Actions for one observation, or for a batch of them: `(*obs,)` gives `(*action,)`, `(batch, *obs)` a batch.

        Observations are as the environment returns them, unnormalised: of Dict and Tuple observations with all parts,
        in a batch as a vector of environments returns them. Prepared ones (`pearl.actors.observations`) are taken too.
        Actions are in the environment's units, bounds and dtype: for Discrete a NumPy integer, or `(batch,)`.
        Deterministic actions are the likeliest, or the greedy ones. Others are drawn from the policy's distribution
        (PPO, A2C, SAC), or explore as at the end of the training (the last epsilon of DQN, the noise of DDPG and TD3,
        without correlation in time).

        A policy that was trained with action masks needs those of the observations, `(choices,)` or
        `(batch, choices)`, as the environment gives them in `info["action_mask"]`; it takes allowed actions only.

        Raises PolicyError for a wrong shape or dtype, for NaN or infinity, for masks that are absent, malformed or
        allow nothing, for `deterministic=False` where the policy has neither a distribution nor an exploration, and for
        a recurrent policy, which needs `predict_with_state`.
        """
        if self.is_recurrent:
            raise PolicyError(
                f"The policy of {self.env} is recurrent: its actions depend on a state that you carry from step to "
                "step. Call actions, state = policy.predict_with_state(obs, state, episode_start)."
            )
        batch, single = self._batch_of(observation)
        actions = self.act(batch, deterministic, self._masks_of(action_masks, len(batch), single))
        found = self._taken(actions)
        return found[0] if single else found

    @property
    def is_recurrent(self) -> bool:
        """Whether its actions depend on a state from step to step."""
        return isinstance(self._acting, RecurrentPolicy)

    def initial_state(self, count: int) -> np.ndarray:
        """The states `(count, size)` float32 at the beginning of an episode; PolicyError unless it is recurrent."""
        return self._recurrent.initial_state(count)

    def predict_with_state(
        self,
        observation: Any,
        state: ArrayLike | None = None,
        episode_start: ArrayLike | None = None,
        deterministic: bool = True,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Actions of a recurrent policy as `predict` gives them, and its states for the next call.

        Pass the returned state with the next observation. `state` is `(size,)` for one observation, `(batch, size)`
        for a batch; None: an episode begins. Where `episode_start`, bool or `(batch,)`, is True, an episode begins with
        the observation, and the state passed counts for nothing. The arguments and results are those of the `predict`
        of Stable-Baselines3's RecurrentPPO, but for the form of the state.

        Raises PolicyError as `predict` does, for a policy without states, and for shapes that do not fit.
        """
        initial, (batch, single) = self.initial_state(1), self._batch_of(observation)
        states = np.repeat(initial, len(batch), axis=0)
        if state is not None:
            given = self._array(state, "states of numbers", np.float32)
            shape = initial.shape[1:] if single else states.shape
            if given.shape != shape:
                raise PolicyError(
                    f"The recurrent policy of {self.env} needs a state of shape {shape} for these observations; found "
                    f"{given.shape}. Pass the state of the last call, or None where episodes begin."
                )
            states = given.reshape(states.shape)
        if episode_start is not None:
            starts, wanted = np.asarray(episode_start, bool), () if single else (len(batch),)
            if starts.shape not in {wanted, (len(batch),)}:
                raise PolicyError(
                    f"episode_start must have shape {wanted} for these observations, True where an episode begins; "
                    f"found shape {starts.shape}."
                )
            states = np.where(starts.reshape(-1, 1), initial, states)
        actions, states = self.act_from(batch, states, deterministic)
        found = self._taken(actions)
        return (found[0], states[0]) if single else (found, states)

    def act_from(
        self, observations: np.ndarray, state: np.ndarray, deterministic: bool = True
    ) -> tuple[np.ndarray, np.ndarray]:
        """As `act`, of a recurrent policy in `state` `(batch, size)`; also returns the next states."""
        if not len(observations):
            return np.empty((0, *(self.action_space.shape or ())), np.int64), state
        if not deterministic and isinstance(self._acting, RecurrentRolloutPolicy):
            assert isinstance(self._trainer, OnPolicyTrainer)
            noise = self._noise(self._trainer, len(observations))
            actions, after = self._acting.sample_from(observations, noise, state)
            return self._within_bounds(actions), after
        actions, after = self._recurrent.act_from(self._stored(observations), state)
        if not deterministic:
            explorer = make_explorer(self._require_exploration(), self.action_space, len(observations), self._rng)
            actions = explorer.apply(actions, _TRAINED)
        return self._within_bounds(actions), after

    @property
    def _recurrent(self) -> RecurrentPolicy:
        if not isinstance(self._acting, RecurrentPolicy):
            raise PolicyError(f"The policy of {self.env} has no state from step to step: call predict.")
        return self._acting

    @property
    def uses_masks(self) -> bool:
        """Whether it chooses among the actions that a mask allows."""
        return uses_masks(self._trainer)

    def _masks_of(self, given: ArrayLike | None, rows: int, single: bool) -> np.ndarray | None:
        """Checked masks `(rows, choices)` bool; None where the policy uses none."""
        if given is None and not self.uses_masks:
            return None
        if given is None or not self.uses_masks:
            what = "with action masks: pass action_masks" if given is None else "without: leave action_masks out"
            raise PolicyError(f"The policy of {self.env} was trained {what}.")
        reader, found = MaskReader(self.action_space, self.env), np.asarray(given)
        shape = (reader.choices,) if single else (rows, reader.choices)
        if found.shape != shape:
            raise PolicyError(
                f"The policy of {self.env} needs action_masks of shape {shape} for these observations; found shape "
                f"{found.shape}. Pass them as the environment's info has them."
            )
        try:
            masks = [reader.checked(mask) for mask in (found[None] if single else found)]
        except EnvError as error:
            raise PolicyError(str(error)) from error
        return np.array(masks, bool).reshape(rows, reader.choices)

    def act(self, observations: np.ndarray, deterministic: bool = True, masks: np.ndarray | None = None) -> np.ndarray:
        """Actions of contiguous observations `(batch, *obs)` float32 or uint8, Discrete ones counted from 0.

        For callers that have checked the observations and the masks `(batch, choices)` bool, and whose observations may
        change; all others call `predict`.
        """
        if not len(observations):
            return np.empty((0, *(self.action_space.shape or ())), np.float32)
        seen = self._stored(observations)
        acts = self._acting.act(seen, masks) if deterministic else self._explored(seen, masks)
        return self._within_bounds(acts)

    def _batch_of(self, observation: Any) -> tuple[np.ndarray, bool]:
        """The observations as the networks take them, `(batch, *obs)`, and whether it was a single one."""
        own, dtype = self.description.unprepared_space, self.observation_dtype
        shape = tuple(self.observation_space.shape or ())
        if own is not None and are_unprepared(own, observation):
            try:
                rows, single = prepare_batch(own, observation)
            except EnvError as error:
                raise PolicyError(f"The policy of {self.env} takes observations of {own}. {error}") from error
            self._check_finite(rows)
            return rows, single
        found = self._array(observation, f"observations of shape {shape} with dtype {dtype}, or a batch of them")
        single = found.shape == shape
        fits = np.can_cast(found.dtype, dtype, "same_kind") or (
            found.size == 0 and not isinstance(observation, np.ndarray)
        )
        if not (single or (found.shape[1:] == shape and found.ndim == len(shape) + 1)) or not fits:
            prepared = "" if own is None else f"of {own}, or prepared ones "
            raise PolicyError(
                f"The policy of {self.env} takes observations {prepared}of shape {shape}, or a batch of them of shape "
                f"{('batch', *shape)}, with dtype {dtype}; found shape {found.shape} with dtype {found.dtype}. "
                "Pass them as the environment returns them."
            )
        batch = found[None] if single else found
        if dtype == np.uint8:
            if found.dtype != np.uint8 and (found > np.iinfo(np.uint8).max).any():
                raise PolicyError(
                    f"The policy of {self.env} takes observations of unsigned bytes, from 0 to 255; found "
                    f"{found.max()}, in {found.dtype}. Scale them as the environment does."
                )
            return np.ascontiguousarray(batch, np.uint8), single
        with np.errstate(over="ignore"):
            made = np.array(batch, np.float32, order="C")  # a copy: policies may normalise in place
        self._check_finite(made)
        return made, single

    def _array(self, given: object, wanted: str, dtype: type | None = None) -> np.ndarray:
        try:
            return np.asarray(given, dtype)
        except (ValueError, TypeError, RuntimeError) as error:  # torch's tensors raise the last two
            raise PolicyError(
                f"The policy of {self.env} takes {wanted}; what was passed is not an array: {error}"
            ) from error

    def _check_finite(self, observations: np.ndarray) -> None:
        if not np.isfinite(observations).all():
            raise PolicyError(
                f"An observation for the policy of {self.env} holds NaN or infinity, which no policy was trained on "
                "(numbers beyond 3.4e38 are infinite in float32). Correct the environment or the sensor that it comes "
                "from."
            )

    def _explored(self, observations: np.ndarray, masks: np.ndarray | None) -> np.ndarray:
        if isinstance(self._trainer, OnPolicyTrainer):
            return self._drawn(self._trainer, observations, masks)
        setting, count = self._require_exploration(), len(observations)
        if isinstance(setting, PolicySampling):
            noise = self._rng.standard_normal((count, *(self.action_space.shape or ())), np.float32)
            return self._acting.sample(observations, noise)
        explorer = make_explorer(setting, self.action_space, count, self._rng)
        return explorer.apply(self._acting.act(observations, masks), _TRAINED, masks)

    def _require_exploration(self) -> Exploration:
        if self._exploration is None:
            raise PolicyError(
                f"{self.description.trainer.name} has no distribution of actions and no `exploration`: its policy is "
                "deterministic. Call predict with deterministic=True, or train with an exploration of "
                "pearl.exploration."
            )
        return self._exploration

    def _drawn(self, trainer: OnPolicyTrainer, observations: np.ndarray, masks: np.ndarray | None) -> np.ndarray:
        count = len(observations)
        noise = self._noise(trainer, count)
        actions = np.empty(
            (count, *(self.action_space.shape or ())), np.int64 if trainer.distribution.sizes else np.float32
        )
        log_probs, values = np.empty(count, np.float32), np.empty(count, np.float32)
        self._acting.explore_into(observations, noise, actions, log_probs, values, masks)
        return actions

    def _noise(self, trainer: OnPolicyTrainer, count: int) -> np.ndarray:
        """The noise by which the distribution draws `count` actions."""
        size = (count, trainer.distribution.size)
        return (self._rng.random if trainer.distribution.sizes else self._rng.standard_normal)(size, np.float32)

    def _within_bounds(self, actions: np.ndarray) -> np.ndarray:
        space = self.action_space
        return np.clip(actions, space.low, space.high) if isinstance(space, spaces.Box) else actions


def check_policy(policy: object) -> None:
    """Raise PolicyError unless `policy` is one that `load_policy` read."""
    if not isinstance(policy, SavedPolicy):
        raise PolicyError(f"Expected a policy, as pearl.load_policy(RUN) returns it; found {policy!r}.")
