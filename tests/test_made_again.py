"""Environments that code of the user made or wrapped, or that vectors prepared, are made again for a policy."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium.wrappers import ClipReward, TimeAwareObservation, TransformReward
from policies import WideDQN, command, run_folder, watch_policy_without_a_screen
from trainers import TinyDQN

import pearl
from pearl.actors.environment import make_single_envs, probe
from pearl.actors.vectorization import make_rendered_env
from pearl.errors import EnvError, PolicyError
from pearl.policy import SavedPolicy, evaluate_policy, watch_policy
from pearl.policy.environment import EnvironmentSource
from pearl.spec import ActorSpec

MODULE = '''
import gymnasium as gym
import numpy as np


class Corridor(gym.Env):
    """Five steps of reward 1, whatever is done."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}
    observation_space = gym.spaces.Box(-1, 9, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, length=5, render_mode=None):
        self.length, self.render_mode = length, render_mode

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at = 0
        return self._obs(), {}

    def step(self, action):
        self.at += 1
        return self._obs(), 1.0, self.at == self.length, False, {}

    def render(self):
        return np.full((32, 32, 3), 20 * self.at, np.uint8)

    def _obs(self):
        return np.array([self.at, 0], np.float32)


def make_corridor(**kwargs):
    return Corridor(**kwargs)


class Times(gym.RewardWrapper):
    def __init__(self, env, factor=2.0):
        super().__init__(env)
        self.factor = factor

    def reward(self, reward):
        return self.factor * reward


def halved(env):
    return Times(env, 0.5)
'''


@pytest.fixture
def corridor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A module of the user, whose folder is on the path only while it is imported first."""
    name = f"corridor_again_{tmp_path.name.replace('-', '_')}"
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / f"{name}.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "code"), *sys.path])
    importlib.invalidate_caches()
    yield importlib.import_module(name)
    sys.modules.pop(name, None)


def run_of(folder: Path, actors: ActorSpec, *, edit: Any = None, trainer: Any = WideDQN) -> Path:
    """The run folder of Actors with this ActorSpec."""
    found = probe(actors)
    case = (trainer, found.observation_space, found.action_space)
    made = EnvironmentSource.of(actors)

    def write(content: dict[str, Any]) -> None:
        content["env_kwargs"] = dict(actors.env_kwargs)
        if edit is not None:
            edit(content["made"])

    return run_folder(folder, case, env=actors.env_name, made=made, edit=write)


def as_new(corridor: Any) -> None:
    """As in a process that has not imported the module, and does not find it."""
    sys.modules.pop(corridor.__name__)
    sys.path.remove(str(Path(corridor.__file__).parent))


@pytest.mark.parametrize("maker", ["Corridor", "make_corridor"])
def test_what_made_and_wrapped_the_environments_is_imported(
    corridor: Any, tmp_path: Path, maker: str, caplog: pytest.LogCaptureFixture
) -> None:
    wrappers = ((corridor.Times, {"factor": 10.0}), corridor.halved, (ClipReward, {"max_reward": 100.0}))
    run = run_of(tmp_path / "run", ActorSpec(getattr(corridor, maker), env_kwargs={"length": 4}, wrappers=wrappers))
    as_new(corridor)
    done = command("evaluate", run, "--episodes", 3, "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert (found["returns"], found["lengths"]) == ([20.0] * 3, [4] * 3)  # 4 steps, times 10, halved
    assert found["wrappers"].startswith(f"{corridor.__name__}.Times{{'factor': 10.0}}, {corridor.__name__}.halved, gym")
    assert f"Importing {corridor.__file__} for the environment {maker}, as the program of the run did." in caplog.text
    shown = command("evaluate", run, "--episodes", 1, "--env-kwarg", "length=7")
    assert "7.0 steps" in shown.output
    assert "as in the run" in shown.output


def test_an_episode_of_such_an_environment_is_watched(corridor: Any, tmp_path: Path) -> None:
    policy = pearl.load_policy(run_of(tmp_path / "run", ActorSpec(corridor.Corridor, wrappers=(corridor.Times,))))
    (episode,) = watch_policy_without_a_screen(policy, episodes=1)
    assert (episode.ret, episode.length) == (10.0, 5)


def test_another_environment_keeps_the_wrappers_unless_they_are_left_out(
    corridor: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(tmp_path / "run", ActorSpec(corridor.Corridor, wrappers=((corridor.Times, {"factor": 3.0}),)))
    monkeypatch.chdir(tmp_path / "code")
    other = f"{corridor.__name__}:make_corridor"
    done = command("evaluate", run, "--env", other, "--env-kwarg", "length=2", "--episodes", 1, "--json")
    assert json.loads(done.stdout)["returns"] == [6.0], done.output
    done = command(
        "evaluate", run, "--env", other, "--env-kwarg", "length=2", "--episodes", 1, "--json", "--no-wrappers"
    )
    assert json.loads(done.stdout)["returns"] == [2.0], done.output
    assert "wrappers" not in json.loads(done.stdout)
    policy = pearl.load_policy(run)
    assert evaluate_policy(policy, corridor.make_corridor, episodes=1).mean == 15.0
    assert evaluate_policy(policy, episodes=1, wrappers=False).mean == 5.0
    assert "has no class or function Absent" in command("evaluate", run, "--env", f"{corridor.__name__}:Absent").output


def set_source(**values: str) -> Any:
    return lambda made: made["maker"].update(values)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (set_source(name="Absent"), r"has no environment Absent any more\. Name what makes.*--env MODULE:NAME"),
        (set_source(file="/nowhere/gone.py", module="gone"), r"was in /nowhere/gone\.py, which is not there\."),
        (set_source(module="gone", file=""), r"'gone' of the environment Corridor cannot be imported.*--env"),
        (set_source(module="os", name="system", file=""), r"names os\.system as its environment.*any function"),
        (set_source(module="subprocess", name="Popen", file=""), r"names subprocess\.Popen as its environment"),
        (set_source(module="pearl.policy", name="load_policy", file=""), r"names pearl\.policy\.load_policy as"),
        (
            lambda made: made["wrappers"].append({"module": "os", "name": "system", "file": "", "arguments": {}}),
            r"names os\.system as its wrapper.*derived from gymnasium\.Wrapper.*--no-wrappers",
        ),
    ],
)
def test_what_cannot_be_imported_or_trusted_is_refused(
    corridor: Any, tmp_path: Path, edit: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[object] = []
    monkeypatch.setattr("os.system", called.append)
    policy = pearl.load_policy(run_of(tmp_path / "run", ActorSpec(corridor.Corridor), edit=edit))
    for play in (evaluate_policy, watch_policy):
        with pytest.raises(PolicyError, match=message):
            play(policy)
    assert not called


def test_a_function_that_a_module_only_imports_is_not_called(corridor: Any, tmp_path: Path) -> None:
    """The file of the module says `from subprocess import getoutput`, and the run names that."""
    policy = pearl.load_policy(
        run_of(tmp_path / "run", ActorSpec(corridor.Corridor), edit=set_source(name="getoutput"))
    )
    with Path(corridor.__file__).open("a") as file:
        file.write("\nfrom subprocess import getoutput\n")
    as_new(corridor)
    with pytest.raises(PolicyError, match=r"and of other modules what they define"):
        evaluate_policy(policy)


def test_code_in_the_folder_of_the_run_is_not_executed(corridor: Any, tmp_path: Path) -> None:
    policy = pearl.load_policy(run_of(tmp_path, ActorSpec(corridor.Corridor)))
    as_new(corridor)
    with pytest.raises(PolicyError, match="Code that comes with a run is not executed"):
        evaluate_policy(policy)


def test_a_description_keeps_names_and_plain_arguments(corridor: Any) -> None:
    actors = ActorSpec(
        corridor.make_corridor,
        wrappers=((corridor.Times, {"factor": 3.0}), TimeAwareObservation),
        vectorization="async",
    )
    made = EnvironmentSource.of(actors)
    written = made.to_json()
    assert EnvironmentSource.from_json(json.loads(json.dumps(written))) == made
    assert written == {
        "maker": {"module": corridor.__name__, "name": "make_corridor", "file": corridor.__file__},
        "wrappers": [
            {"module": corridor.__name__, "name": "Times", "file": corridor.__file__, "arguments": {"factor": 3.0}},
            {
                "module": "gymnasium.wrappers.stateful_observation",
                "name": "TimeAwareObservation",
                "file": "",
                "arguments": {},
            },
        ],
        "vectorization": "async",
    }
    assert "TransformReward" in EnvironmentSource.of(ActorSpec("CartPole-v1", wrappers=(TransformReward,))).kept_text


# --- vectors that prepare frames --------------------------------------------------------------------------------------


class PixelDQN(TinyDQN):
    """The Nature CNN, small."""


needs_atari = pytest.mark.skipif(
    importlib.util.find_spec("ale_py") is None or importlib.util.find_spec("cv2") is None,
    reason="needs pearl-toolkit[atari]",
)


def of_frames(folder: Path, env: str, kind: Any, **options: Any) -> SavedPolicy:
    actors = ActorSpec(env, vectorization=kind, env_kwargs=options)
    return pearl.load_policy(run_of(folder, actors, trainer=PixelDQN))


@needs_atari
def test_games_are_prepared_as_the_vector_prepared_them(tmp_path: Path) -> None:
    options = {"stack_num": 3, "img_height": 42, "img_width": 48, "frameskip": 3, "noop_max": 0}
    policy = of_frames(tmp_path, "ALE/Pong-v5", "atari", repeat_action_probability=0.0, **options)
    assert policy.observation_space.shape == (3, 42, 48)
    assert evaluate_policy(policy, episodes=1, max_steps=20).lengths.tolist() == [20]
    assert len(evaluate_policy(policy, "ALE/SpaceInvaders-v5", episodes=1, max_steps=2).returns) == 1
    with pytest.raises(PolicyError, match=r"takes observations of Box\(0, 255, \(3, 42, 48\).*\(210, 160, 3\)"):
        evaluate_policy(policy, wrappers=False)
    (episode,) = watch_policy_without_a_screen(policy, episodes=1, max_steps=20)
    assert episode.length == 20


@needs_atari
@pytest.mark.parametrize("grayscale", [True, False])
def test_a_game_that_is_watched_shows_the_frames_of_the_vector(grayscale: bool) -> None:
    """To the byte, from the first, stack and steps included."""
    options = {"stack_num": 2, "img_height": 60, "noop_max": 0, "repeat_action_probability": 0.0}
    spec = ActorSpec("ALE/Breakout-v5", vectorization="atari", env_kwargs={**options, "grayscale": grayscale})
    (ours,), theirs = make_single_envs(spec, 1), make_rendered_env(spec, "rgb_array")
    assert ours.observation_space == theirs.observation_space
    seen = [env.reset(seed=1)[0] for env in (ours, theirs)]
    for action in (1, 0, 2, 3, 1, 2):
        assert np.array_equal(*seen)
        seen = [env.step(action)[0] for env in (ours, theirs)]
    assert theirs.render().shape == (210, 160, 3)  # type: ignore[union-attr]
    spec = dataclasses.replace(spec, env_kwargs={"maxpool": False})
    with pytest.raises(EnvError, match=r"prepared with maxpool=False.*no counterpart.*pearl evaluate"):
        make_rendered_env(spec, "rgb_array")


@needs_atari
def test_games_that_begin_with_a_button_begin_so_on_the_screen() -> None:
    options = {"use_fire_reset": True, "noop_max": 0, "repeat_action_probability": 0.0}
    env = make_rendered_env(ActorSpec("ALE/Breakout-v5", vectorization="atari", env_kwargs=options), "rgb_array")
    pressed: list[int] = []
    step = env.unwrapped.step
    env.unwrapped.step = lambda action: pressed.append(action) or step(action)  # type: ignore[func-returns-value,method-assign]
    env.reset(seed=1)
    assert pressed == [1]


def test_a_pool_of_envpool_is_stepped_and_drawn(tmp_path: Path) -> None:
    pytest.importorskip("envpool", reason="needs pearl-toolkit[envpool]")
    actors = ActorSpec("CartPole-v1", vectorization="envpool", env_kwargs={"max_episode_steps": 5})
    policy = pearl.load_policy(run_of(tmp_path, actors))
    assert evaluate_policy(policy, episodes=2).lengths.tolist() == [5, 5]
    (episode,) = watch_policy_without_a_screen(policy, episodes=1)
    assert episode.length == 5
    picture: Any = make_rendered_env(actors, "rgb_array")
    picture.reset(seed=1)
    assert picture.render().ndim == 3
