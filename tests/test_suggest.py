"""`pearl suggest`, and settings="auto" of a composition."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from trainers import Walk
from typer.testing import CliRunner, Result

from composer import Composer
from composer.codegen.python_source import literal
from composer.composition import read_composition
from composer.html_report.page import report_page
from composer.spec_file import load_spec
from composer.suggestion.random_steps import try_randomly
from composer.suggestion.suggestion import stated_by, suggest, suggest_settings
from pearl.actors.environment import probe
from pearl.algorithms import DQN, PPO, SAC
from pearl.cli import app
from pearl.errors import ConfigurationError, EnvError, TrainerError
from pearl.exploration import EpsilonGreedy
from pearl.runtime.composition_file import composition_file
from pearl.spec import ActorSpec

if TYPE_CHECKING:
    from programs import CsvPair  # brings torch, which the processes that step environments do without

pytestmark = pytest.mark.usefixtures("quick_profiles")

ONE_CPU = ("cpu0,cpu,cpu,,2,60",)
DOCS = Path(__file__).resolve().parents[1] / "docs" / "choosing_settings.md"


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["suggest", *map(str, arguments)])


@pytest.fixture
def walk() -> Iterator[str]:
    """The name of `Walk`, which takes its arguments as defaults of the registration."""
    gym.register("SuggestedWalk-v0", Walk, max_episode_steps=50)
    yield "SuggestedWalk-v0"
    del gym.registry["SuggestedWalk-v0"]


def registered(**kwargs: Any) -> str:
    gym.registry["SuggestedWalk-v0"].kwargs.update(kwargs)
    return "SuggestedWalk-v0"


def test_random_steps_see_episodes_and_rewards(walk: str) -> None:
    actors = ActorSpec(walk, envs_per_actor=2)
    tried = try_randomly(actors, probe(actors).observation_space, seed=3)
    assert tried.mean_length == 7
    assert tried.terminated == tried.episodes == 2 * (tried.steps // 2 // 7)
    assert tried.signal == "action"
    assert 0.2 < tried.reward_size < 0.45
    assert len(tried.deviations) == 3
    assert np.allclose(tried.deviations, 3**-0.5, atol=0.1)


@pytest.mark.parametrize("method", ["reset", "step"])
def test_an_environment_that_fails_is_named_with_the_method(walk: str, method: str) -> None:
    registered(fails=method)
    with pytest.raises(EnvError, match=rf"{walk} failed in {method}\(\).*RuntimeError: (no map|the robot)"):
        suggest(walk)


def test_bounds_of_actions_that_count_as_none_are_not_drawn_from(walk: str) -> None:
    largest = float(np.finfo(np.float64).max)
    registered(actions=spaces.Box(-largest, largest, (2,), np.float64))
    assert suggest(walk).algorithm.value == "PPO"


def test_unsupported_spaces_are_named_with_what_is_supported(walk: str) -> None:
    registered(actions=spaces.Tuple((spaces.Discrete(2), spaces.Discrete(2))))
    with pytest.raises(EnvError, match=r"takes the actions Tuple.*they take Discrete, Box, MultiDiscrete"):
        suggest(walk)
    registered(actions=spaces.Discrete(2), observations=spaces.Sequence(spaces.Discrete(2)))
    with pytest.raises(EnvError, match=r"Observations may be Box.*; found Sequence"):
        suggest(walk)
    registered(observations=spaces.Box(0, 255, (84, 84, 3), np.uint8))
    with pytest.raises(TrainerError, match="height, width, channels"):
        suggest(walk)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("CartPol-v1",), "Did you mean: `CartPole`"),
        (("CartPole",), "Did you mean 'CartPole-v1'"),
        (("os:CartPole-v1",), "takes a registered name; found 'os:CartPole-v1'"),
        (("CartPole-v1", "--algorithm", "dqnn"), "no built-in algorithm 'DQNN'. Did you mean 'DQN'"),
        (("CartPole-v1", "--algorithm", "SAC"), "needs a Box action space"),
        (("CartPole-v1", "--module", "nowhere.py"), "no file nowhere.py"),
        (("CartPole-v1", "--write", "settings.py"), "ends in .toml"),
    ],
)
def test_a_wrong_request_says_what_to_do(arguments: tuple[str, ...], expected: str) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 1
    assert expected in result.stderr


class Frames(gym.Env[Any, Any]):
    """Frames of noise, or the same one again and again; ten steps."""

    action_space = spaces.Discrete(2)
    observation_space = spaces.Box(0, 255, (40, 40), np.uint8)

    def __init__(self, still: bool = False) -> None:
        self._still = still

    def _frame(self) -> np.ndarray:
        return np.zeros((40, 40), np.uint8) if self._still else self.np_random.integers(0, 256, (40, 40), np.uint8)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._steps = 0
        return self._frame(), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._steps += 1
        return self._frame(), float(self.np_random.random()), self._steps == 10, False, {}


def colours(**kwargs: Any) -> gym.Env[Any, Any]:
    """Three channels that have nothing to do with those of the step before."""
    space = spaces.Box(0, 255, (3, 40, 40), np.uint8)
    return gym.wrappers.TransformObservation(
        Frames(**kwargs), lambda frame: np.stack([frame, 255 - frame, frame]), space
    )


def stacked(**kwargs: Any) -> gym.Env[Any, Any]:
    return gym.wrappers.FrameStackObservation(Frames(**kwargs), 4)


@pytest.mark.parametrize(
    ("make", "still", "stored", "row_nbytes"),
    [
        (stacked, False, ("share_frames", True), 1600 + 600),
        (stacked, True, ("share_next_obs", True), 4 * 1600 + 100),  # nothing moved: no stack was seen
        (colours, False, ("share_next_obs", True), 3 * 1600 + 100),
    ],
)
def test_frames_of_stacks_are_stored_once(
    make: Any, still: bool, stored: tuple[str, bool], row_nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("composer.suggestion.suggestion.free_memory", lambda: 400_000_000)
    try:
        gym.register("SuggestedFrames-v0", make, kwargs={"still": still})
        found = suggest("SuggestedFrames-v0", algorithm="DQN")
    finally:
        gym.registry.pop("SuggestedFrames-v0")
    chosen = {choice.name: choice.value for choice in found.replay}
    assert stored in chosen.items()
    assert len({"share_frames", "share_next_obs"} & set(chosen)) == 1
    assert 100_000_000 / row_nbytes <= chosen["size"] <= 100_000_000 / (row_nbytes - 600)  # of what is stored


def test_images_of_continuous_control_get_environments_enough_for_a_rollout(walk: str) -> None:
    registered(observations=spaces.Box(0, 255, (3, 40, 40), np.uint8), actions=spaces.Box(-1.0, 1.0, (2,)))
    found = suggest(walk)
    assert found.algorithm.value == "PPO"
    assert found.alternatives == ("A2C", "RecurrentPPO")
    assert f"Suggested for {walk}" in str(found)
    assert "continuous actions from images" in str(found)
    actors = {choice.name: choice.value for choice in found.actors}
    assert actors["count"] * actors["envs_per_actor"] >= 8


def test_json_has_every_choice_with_its_reason() -> None:
    result = invoke("Pendulum-v1", "--json", "--algorithm", "TD3", "--seed", "1000")
    document = json.loads(result.stdout)
    assert document["algorithm"]["value"] == "TD3"
    found = {entry["name"]: entry for entry in document["settings"]}
    assert all(entry["reason"] for entry in found.values())
    assert found["exploration"]["value"] == {"kind": "GaussianNoise", "sigma": 0.1, "schedule": "constant"}
    assert {found[name]["table"] for name in ("size", "batch_size", "hidden_sizes", "timesteps", "count")} == {
        *("replay", "training", "trainer", "program", "actors"),
    }
    assert "us" in found["batch_size"]["reason"], "a measured time"


def test_what_is_written_composes_and_trains(
    csv_pair: CsvPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = invoke("CartPole-v1", "--write", "cart")
    assert result.exit_code == 0, result.stderr
    composition, trainer = tmp_path / "cart/cartpole_v1.toml", tmp_path / "cart/cartpole_v1_trainer.py"
    assert "class CartPoleDQN(DQN):" in trainer.read_text()
    refused = invoke("CartPole-v1", "--write", "cart")
    assert refused.exit_code == 1
    assert "would be overwritten" in refused.stderr
    composer, options = load_spec(composition, progress=False, implementation="native")
    assert composer.training["batch_size"] * 0.25 <= composer.training["replay_ratio"]
    for name, place in zip(("device", "connection"), csv_pair(*ONE_CPU), strict=True):
        getattr(composer, f"set_{name}_file")(place)
    composer.run(timesteps=options.timesteps)
    program = composer.runtime_gen(path=tmp_path / "program.py", timesteps=1500)
    done = subprocess.run(
        [sys.executable, str(program), "--seed", "1000", "--eval-episodes", "0"],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_module_of_the_users_own_is_imported_by_the_trainer_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, env, target = "own_walk", "OwnWalk-v0", "far off/away.toml"
    (tmp_path / f"{name}.py").write_text(
        "import gymnasium as gym\nfrom gymnasium.envs.classic_control.pendulum import PendulumEnv\n"
        f"gym.register({env!r}, PendulumEnv, max_episode_steps=20)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))  # undone after the test
    result = invoke(env, "--module", f"{name}.py", "--write", target)
    assert result.exit_code == 0, result.stderr
    assert f"pearl compose '{target}'" in result.stdout
    script = (
        "from composer.spec_file import load_spec\n"
        f"composer, _ = load_spec({target!r}, progress=False)\n"
        "from pearl.actors.environment import probe\n"
        "print(probe(composer.actors).action_space, composer.trainer_class.hidden_sizes)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert "Box(-2.0, 2.0" in done.stdout, done.stderr


# --- settings="auto" --------------------------------------------------------------------------------------------------


class OwnWidth(DQN):
    hidden_sizes = (24, 24)
    gamma = 0.9


def composed(files: tuple[Path, Path], kind: type = DQN, env: str = "CartPole-v1", **values: Any) -> Composer:
    composer = Composer(progress=False)
    composer.set_device_file(files[0])
    composer.set_connection_file(files[1])
    composer.set_actors(1, env=env, envs_per_actor=4)
    composer.set_train_function(learner=kind, settings="auto", **values)
    return composer


def test_a_built_in_class_gets_its_settings_and_the_program_states_them(
    csv_pair: CsvPair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    composer = composed(csv_pair(*ONE_CPU), implementation="native")
    composer.progress = True
    composer.set_training(learning_starts=300)
    composer.run(timesteps=2000)
    chosen = {choice.name: choice for choice in composer.suggestion.trainer}
    assert "learning_starts" not in chosen
    said = capsys.readouterr().out
    assert all(f"DQN.{name} = " in said and choice.reason in said for name, choice in chosen.items())
    program = composer.runtime_gen(path=tmp_path / "program.py", timesteps=2000)
    text = program.read_text()
    assert "from pearl.algorithms import DQN" in text
    assert "learning_starts=300" in text
    assert 'settings="auto"' not in text
    for choice in composer.suggestion.training:
        assert f"{choice.name}={choice.value!r}," in text
    for choice in composer.suggestion.settings:
        assert f'"{choice.name}": {literal(choice.value)},' in text
    assert f"capacity={composer.suggestion.replay[0].value}," in text
    made = read_composition(composition_file(program).read_text())
    assert [setting.name for setting in made.settings] == [
        *(f"DQN.{name}" for name in chosen),
        *("replay.size", "replay.mode"),
    ]
    options = ["--seed", "1000", "--until-return", "none", "--eval-episodes", "2"]
    done = subprocess.run([sys.executable, str(program), *options], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    page = report_page(tmp_path / "runs" / "program")
    assert "Settings that the composer chose" in page
    assert "DQN.replay_ratio" in page


def test_what_was_chosen_is_chosen_again_for_a_run_of_another_length(csv_pair: CsvPair) -> None:
    composer = composed(csv_pair(*ONE_CPU), implementation="native")
    for timesteps in (2000, 20_000):
        composer.run(timesteps=timesteps)
        assert composer.replay is None
        (size,) = (choice.value for choice in composer.suggestion.replay if choice.name == "size")
        assert composer._composed is not None
        assert composer._composed.problem.replay.capacity == size
    composer.set_replay(500)
    composer.run(timesteps=20_000)
    assert composer.suggestion.replay == ()


def test_what_is_described_or_fails_after_a_run_changes_none_of_its_results(csv_pair: CsvPair, tmp_path: Path) -> None:
    composer = composed(csv_pair(*ONE_CPU), implementation="native")
    composer.run(timesteps=2000)
    chosen = composer.suggestion
    with pytest.raises(ConfigurationError):
        composer.run(timesteps=1)
    composer.set_replay(500)
    assert composer.suggestion is chosen
    with pytest.raises(ConfigurationError, match=r"since run\(\) composed: set_replay\."):
        composer.runtime_gen(path=tmp_path / "program.py", timesteps=2000)
    composer.replay = None
    text = composer.runtime_gen(path=tmp_path / "program.py", timesteps=2000).read_text()
    assert f"capacity={chosen.replay[0].value}," in text
    made = read_composition(composition_file(tmp_path / "program.py").read_text())
    assert ("replay.size", str(chosen.replay[0].value)) in [(setting.name, setting.value) for setting in made.settings]
    with pytest.raises(ConfigurationError, match="exists after"):
        composer.resized(batch_size=32).runtime_gen(path=tmp_path / "resized.py")


def test_a_subclass_keeps_what_it_sets_itself() -> None:
    class OwnNetwork(OwnWidth):
        batch_size = 48

        def build_q_network(self) -> Any:
            raise NotImplementedError

    assert stated_by(OwnWidth) == {"hidden_sizes": (24, 24), "gamma": 0.9}
    assert stated_by(OwnNetwork) == {"hidden_sizes": (24, 24), "gamma": 0.9, "batch_size": 48}
    assert stated_by(DQN) == {}
    actors = ActorSpec("CartPole-v1", envs_per_actor=4)
    spaces = probe(actors)
    found = suggest_settings(OwnWidth, actors, spaces.observation_space, spaces.action_space, {"n_step": 2})
    names = {choice.name for choice in found.trainer}
    assert names >= {"batch_size", "learning_rate", "tau"}
    assert not names & {"hidden_sizes", "gamma", "n_step"}
    rate = next(choice for choice in found.trainer if choice.name == "learning_rate")
    assert rate.reason.startswith("width 24"), "the others follow what the class sets"


def test_rollouts_get_settings_that_divide_them(csv_pair: CsvPair) -> None:
    composer = composed(csv_pair(*ONE_CPU), PPO, "Pendulum-v1", implementation="native")
    composer.set_rollout(horizon=50)
    composer.run()
    problem = composer._composed.problem  # type: ignore[union-attr]
    assert problem.rollout.horizon == 50
    assert problem.rollout.reward_standardization == "returns"
    assert 200 % problem.train.batch_size == 0


def test_a_composition_file_may_leave_settings_and_replay_to_the_composer(tmp_path: Path) -> None:
    file = tmp_path / "auto.toml"
    file.write_text(
        '[actors]\nenv = "CartPole-v1"\n[trainer]\nclass = "pearl.algorithms:DQN"\nsettings = "auto"\n'
        'exploration = { kind = "EpsilonGreedy", steps = 500 }\n'
    )
    composer, _ = load_spec(file, progress=False)
    assert composer.chooses_settings
    assert composer.settings == {"exploration": EpsilonGreedy(steps=500)}
    assert composer.resized(batch_size=16).training == {"batch_size": 16}
    with pytest.raises(ConfigurationError, match="set_replay"):
        composer.resized(capacity=1000)
    file.write_text(file.read_text().replace('"auto"', '"best"'))
    with pytest.raises(ConfigurationError, match=r"auto.toml, \[trainer\]: settings must be \"auto\".*'best'"):
        load_spec(file, progress=False)


def test_a_class_in_place_of_a_name_is_led_to_its_module() -> None:
    result = invoke("corridor.py:Corridor")
    assert result.exit_code == 1
    assert "takes a registered name; found 'corridor.py:Corridor'" in " ".join(result.output.split())


def test_a_class_without_rules_is_refused_at_once() -> None:
    class Independent:
        def get_action(self, obs: Any) -> Any: ...

        def update_policy(self, batch: Any, weights: Any) -> Any: ...

    with pytest.raises(TrainerError, match=r'settings="auto" is for the classes of pearl.algorithms.*Independent'):
        Composer().set_train_function(learner=Independent, settings="auto")


def test_settings_follow_the_actions_that_the_class_cannot_take(csv_pair: CsvPair) -> None:
    with pytest.raises(EnvError, match="SAC is a SAC and needs a Box action space"):
        composed(csv_pair(*ONE_CPU), SAC).run()
    with pytest.raises(ConfigurationError, match=r"suggestion exists after Composer.run"):
        _ = composed(csv_pair(*ONE_CPU)).suggestion


@pytest.mark.slow
def test_the_documented_program_composes(tmp_path: Path) -> None:
    block = re.findall(r"```python\n(# compose_auto.py\n.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    assert len(block) == 1
    (tmp_path / "compose_auto.py").write_text(block[0], encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "compose_auto.py"], cwd=tmp_path, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "acrobot.py").exists()
    assert "DQN.n_step = 5: " in done.stdout


def test_the_documented_commands_are_those_of_the_help() -> None:
    commands = re.findall(r"^pearl suggest (.*?)(?:\s+#.*)?$", DOCS.read_text(encoding="utf-8"), re.MULTILINE)
    help_text = invoke("--help").stdout
    assert commands
    for command in commands:
        for option in re.findall(r"--\w+", command):
            assert option in help_text
