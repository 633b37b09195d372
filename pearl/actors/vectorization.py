"""The kinds of vectors of environments: how each value of `vectorization` makes one, and what it needs.

Every vector made here resets an environment whose episode ended in the same step, with the last observation in
`info["final_obs"]`, or in the next step (`autoreset_mode`). Those are the two ways that Actors know.
"""

from __future__ import annotations

import abc
import copy
import dataclasses
import difflib
import functools
import importlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode, VectorEnv

from pearl.action_masks import mask_env
from pearl.actors.atari_wrappers import Preprocessing, check_counterpart, make_game
from pearl.actors.observations import (
    AnyVectorWrapper,
    check_env,
    check_whole_numbers,
    name_of,
    one_of,
    prepare_env,
    prepare_vector,
    require_shape,
)
from pearl.errors import EnvError
from pearl.spec import ACTION_MASK, ActorSpec, Scalar

AnyVector = VectorEnv[Any, Any, Any]

_ATARI_ENTRY = "ale_py.env:AtariEnv"
# As Gymnasium's AtariPreprocessing does it; `env_kwargs` may say otherwise.
_ATARI_PREPROCESSING = {"reward_clipping": False, "episodic_life": False, "use_fire_reset": False}
_WHOLE_GAMES = {"reward_clipping": False, "episodic_life": False}
# Options of the registered Atari games that ale-py's vector accepts; it skips frames in its own way.
_ATARI_REGISTERED = ("repeat_action_probability", "full_action_space", "max_num_frames_per_episode")
_ATARI_FRAMES = {
    "height": "img_height",
    "width": "img_width",
    "frame_skip": "frameskip",
    "stack": "stack_num",
    "noop_max": "noop_max",
    "grayscale": "grayscale",
    "fire_reset": "use_fire_reset",
}
_MOST_SEED = 2**31
_NUMBERS = (float, int, np.number)  # rewards of these types need no further check


class Vectorization(abc.ABC):
    """A way to step several environments at once."""

    steps_singles: ClassVar[bool] = False  # made by `gymnasium.make`, so that wrappers and callables apply
    prepares: ClassVar[bool] = False  # observations and rewards, in ways that `env_kwargs` say

    def find(self, spec: ActorSpec) -> EnvSpec | None:
        """Gymnasium's description of the environment; None where it has none."""
        return environment_of(spec)

    @abc.abstractmethod
    def make(self, spec: ActorSpec, count: int) -> AnyVector:
        """A vector of `count` environments. May raise anything; `make_vector_env` says where it happened."""

    def make_single(self, spec: ActorSpec, count: int) -> list[gym.Env[Any, Any]]:
        """`count` environments to step one by one, for evaluations."""
        return [SingleEnv(_actors_vector(self.make(spec, 1))) for _ in range(count)]

    def make_rendered(self, spec: ActorSpec, render_mode: str) -> gym.Env[Any, Any]:
        """One of these environments with pictures, in `render_mode` "human" or "rgb_array"."""
        options: dict[str, Any] = {**spec.env_kwargs, "render_mode": render_mode}
        env: gym.Env[Any, Any] = gym.make(_named(spec), **options)
        for wrapper, arguments in spec.wrapped:
            env = wrapper(env, **arguments)
        return prepare_env(mask_env(env))


class _ForVector(gym.Wrapper[Any, Any, Any, Any]):
    """An environment whose info is its action mask alone, and whose last observations are copies.

    Gymnasium's vectors fail where infos have different shapes, and hold an episode's last observation while they reset
    the environment, which may change it then.
    """

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset."""
        obs, info = self.env.reset(seed=seed, options=options)
        return obs, _only_mask(info)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step."""
        found = self.env.step(action)
        obs, reward, terminated, truncated, info = found
        if not isinstance(reward, _NUMBERS):
            self._check_reward(reward)
        if not (terminated or truncated or info):
            return found  # as most are
        if terminated or truncated:
            obs = copy.deepcopy(obs)
        return obs, reward, terminated, truncated, _only_mask(info)

    def _check_reward(self, reward: Any) -> None:
        """Raise EnvError unless it is one number: NumPy would name neither the reward nor the environment."""
        if np.ndim(reward) or not hasattr(reward, "__float__"):
            found = f"an array of shape {np.shape(reward)}" if np.ndim(reward) else repr(reward)
            raise EnvError(
                f"{name_of(self.unwrapped.spec)} returned {found:.80} as the reward of a step, which must be one "
                "number. Return a float, such as float(reward[0])."
            )


def _only_mask(info: dict[str, Any]) -> dict[str, Any]:
    return {ACTION_MASK: info[ACTION_MASK]} if ACTION_MASK in info else {}


class _InTurn(gym.vector.SyncVectorEnv):
    """Gymnasium's vector that steps one environment after the other, with less work of its own in a step.

    Gymnasium writes each number into an array, looks at each info, and copies all arrays: of the 9.4 us that a step of
    CartPole takes in it, 2.9. Observations are prepared, so that those of all are one array.
    """

    def __init__(self, makes: Sequence[Callable[[], gym.Env[Any, Any]]]) -> None:
        super().__init__(makes, autoreset_mode=AutoresetMode.SAME_STEP)
        self.spec = self.envs[0].spec
        space = self.single_observation_space
        self._shape, self._dtype = (len(makes), *(space.shape or ())), space.dtype

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        observations, rewards, terminations, truncations = [], [], [], []
        infos: dict[str, Any] = {}
        for index, (env, action) in enumerate(zip(self.envs, actions, strict=True)):
            obs, reward, terminated, truncated, info = env.step(action)
            if terminated or truncated:
                infos = self._add_info(infos, {"final_obs": obs, "final_info": info}, index)
                obs, info = env.reset()
            if info:
                infos = self._add_info(infos, info, index)
            observations.append(obs)
            rewards.append(reward)
            terminations.append(bool(terminated))
            truncations.append(bool(truncated))
        return (
            self._together(observations),
            np.array(rewards, np.float64),
            np.array(terminations, np.bool_),
            np.array(truncations, np.bool_),
            infos,
        )

    def _together(self, observations: list[Any]) -> np.ndarray:
        """The observations as one array; EnvError for one of another shape, TypeError for what is no number."""
        try:
            found = np.array(observations)
        except ValueError:  # of several shapes
            found = np.empty(0)
        if found.shape != self._shape:
            for obs in observations:
                require_shape(obs, self._shape[1:], name_of(self.spec))
        return found.astype(self._dtype, casting="same_kind", copy=False)


class _OfSingles(Vectorization):
    """Vectors of environments that are each made by `gymnasium.make`."""

    steps_singles = True

    def _wrappers(self, spec: ActorSpec, check: Callable[[gym.Env[Any, Any]], gym.Env[Any, Any]]) -> list[Any]:
        given: list[Any] = [functools.partial(_applied, *wrapped) for wrapped in spec.wrapped]
        return [*given, mask_env, _ForVector, prepare_env, check]

    def _named_single(self, spec: ActorSpec) -> str | EnvSpec:
        known = self.find(spec)
        if known is not None and known.entry_point is None:
            raise EnvError(
                f"{spec.env_name} can be made only as a vector, not as single environments: take "
                'vectorization="vector_entry_point".'
            )
        return _named(spec)

    def make_single(self, spec: ActorSpec, count: int) -> list[gym.Env[Any, Any]]:
        return [make() for make in self._makes(spec, count)]

    def _makes(self, spec: ActorSpec, count: int) -> list[Callable[[], gym.Env[Any, Any]]]:
        named = self._named_single(spec)
        found = environment_of(spec) or named  # Gymnasium says each time that a name is of an old version
        return [functools.partial(self._one, spec, found if index else named) for index in range(count)]

    def _one(self, spec: ActorSpec, named: str | EnvSpec) -> gym.Env[Any, Any]:
        options: dict[str, Any] = dict(spec.env_kwargs)
        env: gym.Env[Any, Any] = gym.make(named, **options)
        for wrap in self._wrappers(spec, check_whole_numbers):
            env = wrap(env)
        return env


class _Sync(_OfSingles):
    """One after the other."""

    def make(self, spec: ActorSpec, count: int) -> AnyVector:
        return _InTurn(self._makes(spec, count))


class _Async(_OfSingles):
    """Each in a process."""

    def make(self, spec: ActorSpec, count: int) -> AnyVector:
        options: dict[str, Any] = dict(spec.env_kwargs)
        # "spawn": the process may have threads, which a fork would leave in any state. Actors copy observations
        # themselves.
        return gym.make_vec(
            self._named_single(spec),
            num_envs=count,
            vectorization_mode="async",
            vector_kwargs={"autoreset_mode": AutoresetMode.SAME_STEP, "context": "spawn", "copy": False},
            wrappers=self._wrappers(spec, check_env),
            **options,
        )


def _applied(wrapper: Callable[..., Any], options: Mapping[str, Scalar], env: gym.Env[Any, Any]) -> Any:
    """The wrapped environment. Raises EnvError, which names the wrapper, if that fails."""
    try:
        return wrapper(env, **options)
    except (EnvError, gym.error.Error):
        raise
    except Exception as error:
        raise EnvError(
            f"The wrapper {wrapper.__module__}.{wrapper.__qualname__} of {name_of(env.unwrapped.spec)} failed: "
            f"{type(error).__name__}: {error} Give it other arguments with set_wrappers([...]), or leave it out."
        ) from error


class _Own(Vectorization):
    """The environment's own vector, registered as its `vector_entry_point`."""

    def make(self, spec: ActorSpec, count: int) -> AnyVector:
        known = self.find(spec)
        if known is not None and known.vector_entry_point is None:
            raise EnvError(
                f'{spec.env_name} has no vector of its own, which vectorization="vector_entry_point" takes. Leave it '
                'out, or take "async".'
            )
        options: dict[str, Any] = dict(spec.env_kwargs)
        return gym.make_vec(_named(spec), num_envs=count, vectorization_mode="vector_entry_point", **options)

    def make_single(self, spec: ActorSpec, count: int) -> list[gym.Env[Any, Any]]:
        known = self.find(spec)
        if known is not None and known.entry_point is None:  # it exists as a vector only
            return super().make_single(spec, count)
        return _SYNC.make_single(spec, count)


class _Atari(Vectorization):
    """ale-py's AtariVectorEnv: threads that step, skip, stack and scale frames in C++."""

    prepares = True

    def find(self, spec: ActorSpec) -> EnvSpec | None:
        _imported("ale_py", "atari")
        return super().find(spec)

    def make(self, spec: ActorSpec, count: int) -> AnyVector:
        known, vectors = self.find(spec), _imported("ale_py.vector_env", "atari")
        if known is None or not is_game(known):
            games = [name for name, one in gym.registry.items() if name.startswith("ALE/") and is_game(one)]
            raise EnvError(
                f"vectorization=\"atari\" steps Atari games by their registered names, such as 'ALE/Pong-v5'; found "
                f"{spec.env_name!r}.{_nearest(spec.env_name, games)}"
            )
        options: dict[str, Any] = {name: known.kwargs[name] for name in _ATARI_REGISTERED if name in known.kwargs}
        options |= {"autoreset_mode": AutoresetMode.SAME_STEP, **_ATARI_PREPROCESSING, **spec.env_kwargs}
        if count == 1:
            options.setdefault("num_threads", 1)
        made: AnyVector = vectors.AtariVectorEnv(known.kwargs["game"], count, **options)
        # A copy: ale-py writes the mode into the metadata of the class, where the next vector changes it.
        made.metadata = {**made.metadata, "autoreset_mode": AutoresetMode(options["autoreset_mode"])}
        return _SmallSeeds(made)

    def make_single(self, spec: ActorSpec, count: int) -> list[gym.Env[Any, Any]]:
        """Whole games with the rewards of the game, whatever the Actors' `env_kwargs` make of lives and rewards."""
        return super().make_single(dataclasses.replace(spec, env_kwargs={**spec.env_kwargs, **_WHOLE_GAMES}), count)

    def make_rendered(self, spec: ActorSpec, render_mode: str) -> gym.Env[Any, Any]:
        """A whole game by Gymnasium's wrappers, with the vector's preprocessing: the vector has no pictures."""
        self.find(spec)
        options: dict[str, Any] = {**_ATARI_PREPROCESSING, **spec.env_kwargs}
        for name, value in (("maxpool", True), ("continuous", False)):
            check_counterpart(options, name, value)
        given = {ours: options[theirs] for ours, theirs in _ATARI_FRAMES.items() if theirs in options}
        game = {name: options[name] for name in _ATARI_REGISTERED if name in options}
        return make_game(spec.env_name, game, Preprocessing(**given), render_mode)


class _EnvPool(Vectorization):
    """EnvPool: environments written in C++, stepped by threads."""

    prepares = True

    def make(self, spec: ActorSpec, count: int) -> AnyVector:
        pools = _imported("envpool", "envpool")
        name, names = spec.env_name.removeprefix("ALE/"), pools.list_all_envs()
        if name not in names:
            raise EnvError(f"EnvPool has no environment {spec.env_name!r}.{_nearest(name, names)}")
        return _Pool(pools, name, count, spec.env_kwargs)

    def make_rendered(self, spec: ActorSpec, render_mode: str) -> gym.Env[Any, Any]:
        """A pool of one, which draws its pictures itself."""
        drawing = dataclasses.replace(spec, env_kwargs={**spec.env_kwargs, "render_mode": "rgb_array"})
        shown = _RenderedPool(_actors_vector(self.make(drawing, 1)))
        return gym.wrappers.HumanRendering(shown) if render_mode == "human" else shown


class _Pool(VectorEnv[Any, Any, Any]):
    """A pool that is made when it is reset with a seed: EnvPool takes seeds at construction only."""

    metadata: dict[str, Any] = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012

    def __init__(self, pools: Any, name: str, count: int, options: Mapping[str, Any]) -> None:
        self._pools, self._name, self.num_envs, self._options = pools, name, count, dict(options)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of bounds that are not representable in float32
            described = pools.make_spec(name, num_envs=count, **self._options)
            self.single_observation_space = described.gymnasium_observation_space
            self.single_action_space = described.gymnasium_action_space
        self.observation_space = gym.vector.utils.batch_space(self.single_observation_space, count)
        self.action_space = gym.vector.utils.batch_space(self.single_action_space, count)
        self._pool: Any = None

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of bounds, as above
            if self._pool is None or seed is not None:
                seeded = {} if seed is None else {"seed": int(seed) % (_MOST_SEED - self.num_envs)}
                options_of_pool = {**seeded, **self._options}
                self._pool = self._pools.make_gymnasium(self._name, num_envs=self.num_envs, **options_of_pool)
            obs, info = self._pool.reset()
        return obs, dict(info)

    def step(self, actions: Any) -> Any:
        return self._pool.step(actions)

    def render(self) -> Any:
        return None if self._pool is None else self._pool.render()

    def close_extras(self, **_: Any) -> None:
        self._pool = None


class _SmallSeeds(AnyVectorWrapper):
    """Seeds that the vector's 32-bit integers hold, also for the last environment."""

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> Any:
        seed = None if seed is None else int(seed) % (_MOST_SEED - self.num_envs)
        return self.env.reset(seed=seed, options=options)


class SingleEnv(gym.Env[Any, Any]):
    """A vector of one environment with the interface of a single one, without autoreset."""

    def __init__(self, vector: AnyVector) -> None:
        self._vector = vector
        self._same_step = autoreset_mode(vector) is AutoresetMode.SAME_STEP
        self.observation_space, self.action_space = vector.single_observation_space, vector.single_action_space
        self.spec = vector.spec

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start an episode; info is the vector's."""
        obs, info = self._vector.reset(seed=seed, options=options)
        return one_of(obs, 0), _single_mask(info)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """One step; the observation is the episode's last where it ended."""
        actions = np.asarray(action, self.action_space.dtype)[None]
        obs, reward, terminated, truncated, info = self._vector.step(actions)
        ended = bool(terminated[0] or truncated[0])
        last = one_of(info["final_obs"], 0) if ended and self._same_step else one_of(obs, 0)
        return last, float(reward[0]), bool(terminated[0]), bool(truncated[0]), _single_mask(info)

    def close(self) -> None:
        """Close the vector."""
        self._vector.close()


class _RenderedPool(SingleEnv):
    """A pool of one environment that draws its pictures."""

    metadata: dict[str, Any] = {"render_modes": ["rgb_array", "human"], "render_fps": 30}  # noqa: RUF012

    def __init__(self, vector: AnyVector) -> None:
        super().__init__(vector)
        self.render_mode = "rgb_array"

    def render(self) -> Any:
        """The picture `(height, width, 3)`."""
        pictures: Any = self._vector.render()
        return np.asarray(pictures)[0]


def _single_mask(info: dict[str, Any]) -> dict[str, Any]:
    """The info of a vector of one environment, with the mask of that environment."""
    return {**info, ACTION_MASK: info[ACTION_MASK][0]} if ACTION_MASK in info else info


class ResetInStep(AnyVectorWrapper):
    """Resets in the same step the environments of a vector that leaves resetting to its user (`DISABLED`)."""

    def __init__(self, vector: AnyVector) -> None:
        super().__init__(vector)
        self.metadata = {**vector.metadata, "autoreset_mode": AutoresetMode.SAME_STEP}

    def step(self, actions: Any) -> Any:
        """Step, and start new episodes where any ended; `final_obs` has the last observations."""
        obs, reward, terminated, truncated, info = self.env.step(actions)
        done = np.asarray(terminated | truncated, bool)
        if done.any():
            final = copy.deepcopy(obs)
            reward, terminated, truncated = (np.array(column) for column in (reward, terminated, truncated))
            obs, begun = self.env.reset(options={"reset_mask": done})
            if (masks := info.get(ACTION_MASK)) is not None:
                info = {**info, "final_info": {ACTION_MASK: masks}}
                if (first := begun.get(ACTION_MASK)) is not None:
                    info[ACTION_MASK] = np.where(done[:, None], first, masks)
            info = {**info, "final_obs": final, "_final_obs": done}
        return obs, reward, terminated, truncated, info


_SYNC = _Sync()
VECTORIZATIONS: Mapping[str, Vectorization] = {
    "sync": _SYNC,
    "async": _Async(),
    "vector_entry_point": _Own(),
    "envpool": _EnvPool(),
    "atari": _Atari(),
}


def check_singles(spec: ActorSpec) -> None:
    """Raise EnvError if wrappers or a callable need single environments, which the kind of vector does not have."""
    if not VECTORIZATIONS[spec.vectorization].steps_singles and (spec.wrappers or not isinstance(spec.env, str)):
        what = "Wrappers (set_wrappers) wrap" if spec.wrappers else "An environment given as a callable makes"
        raise EnvError(
            f'{what} single environments; vectorization="{spec.vectorization}" has none. Take "sync" or "async".'
        )


def make_vector(spec: ActorSpec, count: int) -> AnyVector:
    """`count` environments as Actors step them. May raise anything."""
    return _actors_vector(VECTORIZATIONS[spec.vectorization].make(spec, count))


def make_single_envs(spec: ActorSpec, count: int) -> list[gym.Env[Any, Any]]:
    """The same environments one by one, to be reset by whoever steps them. May raise anything."""
    return VECTORIZATIONS[spec.vectorization].make_single(spec, count)


def make_rendered_env(spec: ActorSpec, render_mode: str) -> gym.Env[Any, Any]:
    """One environment with pictures and prepared observations. May raise anything."""
    return VECTORIZATIONS[spec.vectorization].make_rendered(spec, render_mode)


def _actors_vector(made: AnyVector) -> AnyVector:
    if autoreset_mode(made) is AutoresetMode.DISABLED:
        made = ResetInStep(made)
    return prepare_vector(made)


def environment_of(spec: ActorSpec) -> EnvSpec | None:
    """Gymnasium's description of the environment; None for a name that is not registered."""
    if isinstance(spec.env, str):
        return gym.registry.get(spec.env)
    return EnvSpec(spec.env_name, entry_point=spec.env)


def _named(spec: ActorSpec) -> str | EnvSpec:
    return spec.env if isinstance(spec.env, str) else EnvSpec(spec.env_name, entry_point=spec.env)


def autoreset_mode(vector: AnyVector) -> AutoresetMode:
    """How the vector resets environments whose episode ended."""
    return AutoresetMode(vector.metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP))


def _imported(module: str, kind: str) -> Any:
    """A module of the package that a kind needs."""
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except Exception as error:  # a wheel that does not load may raise anything
        absent = isinstance(error, ModuleNotFoundError) and error.name == package
        why = "is not installed" if absent else f"does not load here ({type(error).__name__}: {error})"
        raise EnvError(
            f'vectorization="{kind}" needs the package {package}, which {why}. Install it with pip install '
            f"'pearl-toolkit[{kind}]', or leave vectorization out."
        ) from error


def _nearest(name: str, names: list[str]) -> str:
    near = difflib.get_close_matches(name, names, n=1) or difflib.get_close_matches(f"ALE/{name}", names, n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


def is_game(known: EnvSpec) -> bool:
    """Whether it is an Atari game that shows its screen, not its memory."""
    return known.entry_point == _ATARI_ENTRY and known.kwargs.get("obs_type", "rgb") != "ram"
