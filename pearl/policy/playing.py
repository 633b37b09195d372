"""Lets a saved policy play: evaluations, episodes on the screen, and videos."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import gymnasium as gym
import numpy as np

from pearl.actors.environment import check_env_name, close_envs
from pearl.actors.observations import space_text, stored_dtype
from pearl.actors.vectorization import VECTORIZATIONS, check_singles, make_rendered_env
from pearl.error_place import described
from pearl.errors import ConfigurationError, EnvError, PolicyError
from pearl.extras import import_extra
from pearl.policy.loading import import_module_of
from pearl.policy.saved import SavedPolicy, check_policy
from pearl.runtime.evaluation import MOST_ENVS, Evaluation, EvaluationEnvs, play
from pearl.runtime.options import Options
from pearl.spec import ACTION_MASK, ActorSpec, VectorizationName

AnyEnv: TypeAlias = "str | Callable[..., gym.Env[Any, Any]]"

_FIRST_SEED = 40_000  # of the environments' seeds: the run's own evaluations begin with other numbers


class Episode(NamedTuple):
    """One episode that was watched: its undiscounted return, its length, and the video of it if one was recorded."""

    ret: float
    length: int
    video: Path | None


def evaluate_policy(
    policy: SavedPolicy,
    env: AnyEnv | None = None,
    *,
    env_kwargs: Mapping[str, Any] | None = None,
    wrappers: bool = True,
    episodes: int = 100,
    seed: int = 1,
    deterministic: bool = True,
    max_steps: int = Options.eval_max_steps,
) -> Evaluation:
    """Returns and lengths of `episodes` episodes in `env`, by default in the environment of the run.

    Up to a hundred environments play at once. Where the environment has no time limit, an episode ends after
    `max_steps` steps (0: never).

    `env` is a registered name, or a class or function at the top level of a module that makes an environment: no lambda
    or local function. With `wrappers`, the environment is prepared as the run's were: by the wrappers of
    `set_wrappers`, which are imported by their names, and by the frame preprocessing of the vector that the Actors
    stepped ("atari", "envpool"). What made the run's environments is imported by its name, too; nothing is unpickled.
    `env_kwargs` take the place of all the run's.

    Raises PolicyError if the spaces of `env` are not those of the policy, or what made or wrapped the run's
    environments cannot be imported, EnvError if `env` is unknown or fails.
    """
    _check_whole("episodes", episodes, 1)
    _check_whole("seed", seed, 0)
    _check_whole("max_steps", max_steps, 0)
    spec = _chosen(policy, env, env_kwargs, wrappers)
    envs = EvaluationEnvs(spec, max_steps)
    try:
        (first,) = envs.first(1)
        _check_spaces(policy, spec.env_name, first)
        game = envs, episodes, _first_seed(seed)
        if policy.is_recurrent:
            found = play(
                lambda obs, state: policy.act_from(obs, state, deterministic),
                *game,
                initial_state=policy.initial_state,
            )
        else:
            found = play(lambda obs, masks=None: policy.act(obs, deterministic, masks), *game, masked=policy.uses_masks)
    finally:
        envs.close()
    assert found is not None
    return found


def watch_policy(
    policy: SavedPolicy,
    env: AnyEnv | None = None,
    *,
    env_kwargs: Mapping[str, Any] | None = None,
    wrappers: bool = True,
    episodes: int = 3,
    seed: int = 1,
    deterministic: bool = True,
    video: str | Path | None = None,
    max_steps: int = Options.eval_max_steps,
) -> Iterator[Episode]:
    """Play episodes one after another, each as it is asked for: on the screen, or with `video` into MP4 files there.

    Raises as `evaluate_policy` does, and MissingExtraError where `video` lacks moviepy.
    """
    _check_whole("episodes", episodes, 1)
    _check_whole("seed", seed, 0)
    _check_whole("max_steps", max_steps, 0)
    spec = _chosen(policy, env, env_kwargs, wrappers)
    name = spec.env_name
    if video is not None:
        import_extra("moviepy", "video", "Recording a video")
        video = Path(video).absolute()  # an environment may change the working directory
    shown = _make_shown(spec, "human" if video is None else "rgb_array")
    if video is not None:
        shown = _recorded(name, shown, video, f"{name.replace('/', '-')}-{policy.origin.which}")
    return _watched(policy, name, shown, episodes, _first_seed(seed), deterministic, video, max_steps)


def check_pictures(policy: SavedPolicy) -> None:
    """Raise EnvError unless the environment of the run can be recorded: one is made, and draws a picture."""
    spec = _chosen(policy, None, None, wrappers=True)
    env = _make_shown(spec, "rgb_array")
    try:
        env.reset(seed=_FIRST_SEED)
        env.render()
    except Exception as error:
        raise EnvError(f"The environment {spec.env_name} cannot be recorded: {described(error)}.") from error
    finally:
        close_envs(spec.env_name, env)


def _first_seed(seed: int) -> int:
    """The seed of the first environment; each further one has the next, so that seeds share no episodes."""
    return (_FIRST_SEED + 1 + MOST_ENVS * (seed - 1)) % 2**30  # ale-py takes no longer ones


def _watched(
    policy: SavedPolicy,
    name: str,
    env: gym.Env[Any, Any],
    episodes: int,
    seed: int,
    deterministic: bool,
    video: str | Path | None,
    max_steps: int,
) -> Iterator[Episode]:
    try:
        _check_spaces(policy, name, env)
        # Prepared ones as floats, since one-hot vectors of integers might be a batch of numbers.
        dtype = None if policy.description.unprepared_space is None else stored_dtype(env.observation_space)
        for number in range(episodes):
            obs, info = env.reset(seed=seed if number == 0 else None)
            total, state = 0.0, None
            for length in itertools.count(1):
                if policy.is_recurrent:
                    action, state = policy.predict_with_state(
                        np.asarray(obs, dtype), state, deterministic=deterministic
                    )
                else:
                    masks = info.get(ACTION_MASK) if policy.uses_masks else None
                    action = policy.predict(np.asarray(obs, dtype), deterministic, action_masks=masks)
                obs, reward, terminated, truncated, info = env.step(action)
                total += float(reward)
                if terminated or truncated or length == max_steps:
                    break
            yield Episode(total, length, _video_file(env, video))
    except (PolicyError, GeneratorExit):
        raise
    except Exception as error:
        hint = "" if video is not None else " Without a screen, record a video instead (--video FOLDER)."
        raise EnvError(f"The environment {name} failed while it was shown: {described(error)}.{hint}") from error
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            close_envs(name, env)


def _video_file(env: gym.Env[Any, Any], video: str | Path | None) -> Path | None:
    """Write the episode's frames now; the path of the file."""
    if video is None:
        return None
    assert isinstance(env, gym.wrappers.RecordVideo)
    file = Path(env.video_folder) / f"{env._video_name}.mp4"
    if env.recording:
        env.stop_recording()  # type: ignore[no-untyped-call]
    return file


def _make_shown(spec: ActorSpec, mode: str) -> gym.Env[Any, Any]:
    name = spec.env_name
    if isinstance(spec.env, str):
        check_env_name(name)
    check_singles(spec)
    try:
        env = make_rendered_env(spec, mode)
    except EnvError:
        raise
    except gym.error.UnregisteredEnv as error:
        raise EnvError(
            f"Environment {name!r} cannot be made: {error} Import the module that registers it first (on the command "
            "line with --import MODULE)."
        ) from error
    except gym.error.DependencyNotInstalled as error:
        raise EnvError(f"Environment {name!r} needs a package that is not installed: {error}") from error
    except Exception as error:
        raise EnvError(
            f'Environment {name!r} cannot be made with render_mode="{mode}": {error}. One that is shown must take that '
            "argument; `pearl evaluate` needs no pictures."
        ) from error
    modes = env.metadata.get("render_modes", [])
    if env.render_mode != mode or mode not in [*modes, "human"]:
        close_envs(name, env)
        raise EnvError(
            f'{"Showing" if mode == "human" else "Recording"} needs render_mode="{mode}"; {name} has '
            f"{', '.join(map(repr, modes)) or 'no render modes'}. Choose another environment, or evaluate without a "
            "picture (pearl evaluate)."
        )
    return env


def _recorded(name: str, env: gym.Env[Any, Any], video: str | Path, prefix: str) -> gym.Env[Any, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # files of earlier videos are replaced, as the file names say
        try:
            return gym.wrappers.RecordVideo(
                env, str(video), episode_trigger=lambda episode: True, name_prefix=prefix, disable_logger=True
            )
        except OSError as error:
            close_envs(name, env)
            raise PolicyError(
                f"Videos cannot be written into {video}: {error.strerror or error}. Name another folder."
            ) from error


def _chosen(policy: SavedPolicy, env: AnyEnv | None, env_kwargs: Mapping[str, Any] | None, wrappers: bool) -> ActorSpec:
    """The environments to play in; the module of the trainer class is imported if it must register them."""
    check_policy(policy)
    made, run = policy.description.made, Path(policy.origin.run)
    own = env is None or env == policy.env
    makes: AnyEnv = policy.env if env is None else env
    if own and (maker := made.load_maker(run)) is not None:
        makes = maker
    kind = _vectorization(policy, makes, wrappers)
    if env_kwargs is None:
        env_kwargs = kwargs_of_run(policy, env, wrappers)
    module = policy.description.trainer.module
    is_named = isinstance(makes, str) and not VECTORIZATIONS[kind].prepares
    if own and is_named and makes not in gym.registry:
        advice = f"Import the module that registers {makes} first (on the command line with --import MODULE)."
        if module.partition(".")[0] != "pearl":
            import_module_of(policy.description, run, advice)
        if makes not in gym.registry:
            raise EnvError(f"Environment {makes!r}, that of the run, is not registered here. {advice}")
    wrapped = made.load_wrappers(run) if wrappers else ()
    return ActorSpec(makes, env_kwargs=dict(env_kwargs), wrappers=wrapped, vectorization=kind)


def _vectorization(policy: SavedPolicy, makes: AnyEnv, wrappers: bool) -> VectorizationName:
    kind = policy.description.made.vectorization if wrappers else "sync"
    return kind if isinstance(makes, str) or VECTORIZATIONS[kind].steps_singles else "sync"


def kwargs_of_run(policy: SavedPolicy, env: AnyEnv | None, wrappers: bool) -> Mapping[str, Any]:
    """The run's arguments of the environment, as far as they are ones of `env`."""
    # Of a vector that prepares observations, the arguments say how; by itself, the environment does not know them.
    if VECTORIZATIONS[policy.description.made.vectorization].prepares:
        kept = VECTORIZATIONS[_vectorization(policy, policy.env if env is None else env, wrappers)].prepares
    else:
        kept = env is None or env == policy.env
    return policy.description.env_kwargs if kept else {}


def _check_spaces(policy: SavedPolicy, name: str, env: gym.Env[Any, Any]) -> None:
    """Raise PolicyError unless observations have the policy's shape and dtype, and actions are of its space."""
    expected, found = policy.observation_space, env.observation_space
    if (expected.shape, expected.dtype) != (found.shape, found.dtype):
        raise PolicyError(
            f"The policy of {policy.env} takes observations of {space_text(expected)}{_flattened(policy)}; those of "
            f"{name} are of {space_text(found)}. Choose an environment with observations of that shape and dtype."
        )
    if env.action_space != policy.action_space:
        raise PolicyError(
            f"The policy of {policy.env} takes actions of {policy.action_space}; those of {name} are of "
            f"{env.action_space}. Choose an environment with the same actions."
        )


def _flattened(policy: SavedPolicy) -> str:
    own = policy.description.unprepared_space
    return "" if own is None else f" (flattened from {own})"


def _check_whole(name: str, value: object, least: int) -> None:
    if (type(value) is not int and not isinstance(value, np.integer)) or value < least:
        raise ConfigurationError(f"{name} must be a whole number of at least {least}; found {value!r}.")
