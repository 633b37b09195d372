"""Learning from pixels: environments that are wrapped, the layout of images, and the Pong example."""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import json
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation
from programs import ONE_CPU, described, run, write_csv_pair
from torch import nn
from torch.nn import functional
from trainers import PixelDQN, TinyDQN

from composer import Composer
from composer.vectorization import fastest
from pearl.actors.actor import Actor, ActorSetup
from pearl.actors.environment import make_single_envs, make_vector_env
from pearl.actors.vectorization import autoreset_mode
from pearl.algorithms.networks import NatureCNN, ScaleBytes
from pearl.errors import EnvError
from pearl.replay.frames import FrameStorage, frames_nbytes
from pearl.runtime import DataCollectionQueue
from pearl.runtime.data_storage import make_storage
from pearl.spec import ActorSpec, ReplaySpec, TrainSpec, TransitionSpec

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "dqn_pong.py"


class Idle(TinyDQN):
    """Serves the ball and never moves."""

    exploration = None

    def get_action(self, obs: torch.Tensor) -> torch.Tensor:
        return torch.ones(len(obs), dtype=torch.long)


needs_atari = pytest.mark.skipif(
    importlib.util.find_spec("ale_py") is None or importlib.util.find_spec("cv2") is None,
    reason="needs pearl-toolkit[atari]",
)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """More would only wait for each other on images this small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# --- the layout of images -------------------------------------------------------------------------------------------


class InOrder(nn.Module):
    """What ScaleBytes does, without its layout."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.float() / 255.0


def test_scaling_keeps_every_value_and_puts_the_channels_of_a_pixel_side_by_side() -> None:
    images = torch.randint(0, 256, (3, 4, 20, 30), dtype=torch.uint8)
    scaled = ScaleBytes()(images)
    assert torch.equal(scaled, images.float() / 255.0)
    assert scaled.is_contiguous(memory_format=torch.channels_last)
    floats = torch.rand(3, 4, 20, 30)
    assert torch.equal(ScaleBytes()(floats), floats)
    rows = torch.randint(0, 256, (3, 7), dtype=torch.uint8)
    assert torch.equal(ScaleBytes()(rows), rows.float() / 255.0)


def test_scaling_leaves_the_batch_as_it_was() -> None:
    images = torch.randint(0, 256, (2, 1, 8, 8), dtype=torch.uint8)
    floats = images.float()
    kept, kept_floats = images.clone(), floats.clone()
    ScaleBytes()(images)
    ScaleBytes()(floats)
    assert torch.equal(images, kept)
    assert torch.equal(floats, kept_floats)


def test_the_layout_changes_no_gradient() -> None:
    torch.manual_seed(0)
    layers = NatureCNN((4, 36, 36), features=64)
    plain = nn.Sequential(InOrder(), *copy.deepcopy(list(layers)[1:]))
    images, wanted = torch.randint(0, 256, (4, 4, 36, 36), dtype=torch.uint8), torch.randn(4, 64)
    for network in (layers, plain):
        functional.mse_loss(network(images), wanted).backward()
    for ours, theirs in zip(layers.parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert theirs.grad.abs().max() > 1e-4
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)


def test_the_nature_network_sees_floats_and_bytes_alike() -> None:
    torch.manual_seed(0)
    network = NatureCNN((4, 36, 36), features=16)
    images = torch.randint(0, 256, (5, 4, 36, 36), dtype=torch.uint8)
    torch.testing.assert_close(network(images), network(images.float() / 255.0))


# --- a wrapped environment ------------------------------------------------------------------------------------------


def test_a_program_trains_on_an_environment_registered_with_its_wrappers(tmp_path: Path, quick_profiles: None) -> None:
    files = write_csv_pair(tmp_path, ONE_CPU)
    composer = described(files, trainer=PixelDQN, env="FlashFrames-v0", env_kwargs={"frames": 2})
    composer.set_replay(200, share_frames=True)
    replay, learner = composer.run()
    program = composer.runtime_gen(replay, learner, tmp_path / "program.py", timesteps=200)
    assert "FlashFrames-v0" in program.read_text()
    assert "native" in str(composer.matrix)
    code, output = run(program, "--eval-episodes", "2", "--run-dir", str(tmp_path / "run"))
    assert code == 0, output
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["env_steps"] >= 200
    assert summary["gradient_steps"] > 0
    assert 0 <= summary["last"]["mean"] <= 8
    logged = "".join(path.read_text(errors="replace") for path in (tmp_path / "run").glob("*.log"))
    assert "The policy runs in torch" not in logged


def test_a_serial_program_trains_natively_from_pixels_to_the_same_bits(tmp_path: Path, quick_profiles: None) -> None:
    files = write_csv_pair(tmp_path, ONE_CPU)
    composer = described(files, trainer=PixelDQN, env="FlashFrames-v0", env_kwargs={"frames": 2})
    replay, learner = composer.run()
    native = dataclasses.replace(learner, implementation="native", threads=1)
    program = composer.runtime_gen(replay, native, tmp_path / "program.py", timesteps=150)
    weights = []
    for number in range(2):
        folder = tmp_path / str(number)
        code, output = run(program, "--serial", "--eval-episodes", "0", "--run-dir", str(folder))
        assert code == 0, output
        weights.append((folder / "weights.safetensors").read_bytes())
    assert weights[0] == weights[1]


# --- ale-py's vector ------------------------------------------------------------------------------------------------


def games(**options: Any) -> ActorSpec:
    return ActorSpec("ALE/Breakout-v5", envs_per_actor=2, vectorization="atari", env_kwargs=options)


@needs_atari
def test_the_vector_shows_the_frames_that_gymnasiums_wrappers_show() -> None:
    """To the byte, once the stack is full: ale-py fills it with black frames, the wrapper with the first one."""
    import ale_py

    gym.register_envs(ale_py)
    plain = gym.make("ALE/Breakout-v5", frameskip=1, repeat_action_probability=0.0)
    wrapped = FrameStackObservation(AtariPreprocessing(plain, noop_max=0), 4)
    vector = make_vector_env(games(noop_max=0, repeat_action_probability=0.0))
    ours, theirs = vector.reset(seed=1)[0], wrapped.reset(seed=1)[0]
    assert np.array_equal(ours[0, -1], theirs[-1])
    assert not ours[:, :3].any()
    rng = np.random.default_rng(0)
    for step in range(250):
        action = int(rng.integers(4))
        ours, reward, terminated, _, info = vector.step(np.full(2, action))
        theirs, their_reward, their_end, _, _ = wrapped.step(action)
        last = info["final_obs"][0] if terminated[0] else ours[0]
        if step >= 2:
            assert np.array_equal(last, theirs)
        assert (reward[0], terminated[0]) == (their_reward, their_end)
        if their_end:
            break
    assert their_end
    vector.close()


@needs_atari
@pytest.mark.parametrize("mode", ["SameStep", "NextStep"])
def test_transitions_of_games_end_with_their_last_frame(mode: str) -> None:
    """With episodic_life, an episode is one of five lives: their number falls with each."""
    options = {"autoreset_mode": mode, "episodic_life": True, "reward_clipping": True, "noop_max": 0}
    setup = ActorSetup(Idle, {}, games(**options), TrainSpec(), 0, steps_per_message=60)
    actor = Actor(setup)
    assert autoreset_mode(actor.envs).value == mode
    queue = DataCollectionQueue(actor.transition, setup.message_rows(), 1)
    message = queue.reserve()
    assert message is not None
    rows = actor.collect(message)
    obs, next_obs, discount = message["obs"][:rows], message["next_obs"][:rows], message["discount"][:rows]
    assert np.array_equal(next_obs[:, :3], obs[:, 1:]), "every next observation is one frame further"
    assert (discount == 0).sum() == message["counts"][0] >= 2
    assert int(message["counts"][1]) == rows
    assert rows == 120 if mode == "SameStep" else rows < 120
    actor.close()


@needs_atari
def test_evaluations_play_whole_games_with_the_scores_of_the_game() -> None:
    spec = games(episodic_life=True, reward_clipping=True)
    (game,) = make_single_envs(spec, 1)
    vector = game._vector.unwrapped  # type: ignore[attr-defined]
    game.reset(seed=3)
    steps, ended = 0, False
    while not ended and steps < 2000:
        _, _, ended, _, info = game.step(steps % 4)
        steps += 1
    assert ended
    assert info["lives"][0] in (0, 5)  # 5: of the next game, which has begun
    assert vector.num_envs == 1
    game.close()


@needs_atari
def test_a_name_that_is_no_game() -> None:
    with pytest.raises(EnvError, match=r"steps Atari games.*found 'ALE/Pung-v5'\. Did you mean 'ALE/Pong-v5'\?"):
        make_vector_env(ActorSpec("ALE/Pung-v5", vectorization="atari"))
    with pytest.raises(EnvError, match=r"unexpected keyword argument 'frame_skip'"):
        make_vector_env(games(frame_skip=2))


@needs_atari
def test_a_game_is_stepped_by_ale_py_if_that_is_left_to_the_composer() -> None:
    composer = Composer(progress=False)
    composer.set_actors(1, env="ALE/Pong-v5", vectorization="auto")
    assert composer.actors is not None
    assert composer.actors.vectorization == "atari"
    said: list[str] = []
    assert fastest(composer.actors, lambda _: 1 / 0, said.append) == composer.actors
    assert said == ["vectorization: atari, ale-py's vector with its preprocessing of frames"]
    composer.set_wrappers([FrameStackObservation])  # which that vector does not take
    assert composer.actors.vectorization == "sync"


@pytest.mark.slow
@needs_atari
def test_a_game_is_composed_without_a_module_that_registers_it(tmp_path: Path, quick_profiles: None) -> None:
    files = write_csv_pair(tmp_path, ONE_CPU)
    composer = described(files, trainer=PixelDQN)
    composer.set_actors(1, env="ALE/Pong-v5", envs_per_actor=2, vectorization="auto")
    composer.set_replay(500, share_frames=True)
    replay, learner = composer.run(budget_s=0)
    program = composer.runtime_gen(replay, learner, tmp_path / "program.py", timesteps=200)
    assert 'vectorization="atari"' in program.read_text()
    code, output = run(program, "--eval-episodes", "0", "--run-dir", str(tmp_path / "run"))
    assert code == 0, output
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["environment"] == "ALE/Pong-v5"
    assert summary["gradient_steps"] > 0


# --- the example ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    pytest.importorskip("ale_py", reason="needs pearl-toolkit[atari]")
    pytest.importorskip("cv2", reason="needs pearl-toolkit[atari]")
    return runpy.run_path(str(EXAMPLE), run_name="dqn_pong")


def test_pong_shows_the_last_four_frames(example: dict[str, Any]) -> None:
    env = gym.make(example["ENV"])
    assert env.observation_space == spaces.Box(0, 255, (4, 84, 84), np.uint8)
    assert env.action_space == spaces.Discrete(6)
    assert gym.spec(example["ENV"]).reward_threshold == 18.0
    obs, _ = env.reset(seed=1)
    env.action_space.seed(1)
    rewards = []
    for _ in range(80):
        next_obs, reward, terminated, truncated, _ = env.step(env.action_space.sample())
        assert np.array_equal(next_obs[:3], obs[1:])
        assert not terminated
        assert not truncated
        rewards.append(reward)
        obs = next_obs
    assert set(rewards) == {0.0, -1.0}
    env.close()


def test_frames_of_pong_are_stored_once(example: dict[str, Any]) -> None:
    env = gym.make(example["ENV"])
    spec = TransitionSpec.from_spaces(env.observation_space, env.action_space)
    actors, train = ActorSpec(example["ENV"], envs_per_actor=1), TrainSpec()
    frames, once, twice = (
        make_storage(spec, ReplaySpec(2000, **share), actors, train, Path())
        for share in ({"share_frames": True}, {"share_next_obs": True}, {})
    )
    rows = spec.empty(60)
    rows["obs"][0], _ = env.reset(seed=1)
    for row in range(60):
        next_obs, rows["reward"][row], *_ = env.step(0)
        rows["action"][row], rows["discount"][row], rows["next_obs"][row] = 0, 0.99, next_obs
        if row < 59:
            rows["obs"][row + 1] = next_obs
    env.close()
    for storage in (frames, once, twice):
        found = storage.gather(storage.insert(rows), spec.empty(60))
        for name, column in rows.items():
            assert np.array_equal(found[name], column), name
    assert isinstance(frames, FrameStorage)
    assert frames.frames <= 61  # a serve shows some frames twice
    assert once.nbytes < 0.55 * twice.nbytes
    assert 2000 * frames_nbytes(spec) < 0.27 * once.nbytes


@pytest.mark.slow
def test_the_pong_example_composes_and_trains(example: dict[str, Any], tmp_path: Path) -> None:
    text = EXAMPLE.read_text(encoding="utf-8")
    for setting in ("set_replay(100_000", "learning_starts = 5_000"):
        assert text.count(setting) == 1
    script = tmp_path / EXAMPLE.name
    text = text.replace("set_replay(100_000", "set_replay(4_000")
    script.write_text(text.replace("learning_starts = 5_000", "learning_starts = 1_000"), encoding="utf-8")
    options = ("--timesteps", "1200", "--eval-episodes", "0", "--until-return", "none")
    code, output = run(script, *options, "--run-dir", str(tmp_path / "run"))
    assert code == 0, output
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["environment"] == example["ENV"]
    assert summary["gradient_steps"] > 0
    assert (tmp_path / "run" / "weights.safetensors").exists()
