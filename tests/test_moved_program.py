"""A program is its user's to keep: it moves with its trainer, and shares nothing with the program beside it."""

from __future__ import annotations

import importlib
import shutil
import sys
from pathlib import Path

import pytest
from gymnasium.envs.registration import EnvSpec, registry
from programs import ONE_CPU, described, run, summary, write_csv_pair
from typer.testing import CliRunner

from pearl.algorithms import DQN
from pearl.cli import app
from pearl.errors import GenerationError
from pearl.runtime.trainer_import import import_class

# It registers an environment, and has its trainer class from elsewhere: the program must import this very module.
KEPT = """
import gymnasium as gym
from gymnasium.envs.classic_control import CartPoleEnv

from pearl.algorithms import DQN as Renamed


class Cart(CartPoleEnv):
    pass


gym.register("KeptCart-v0", Cart, max_episode_steps=50, reward_threshold=400.0)
"""

SPEC = """
[platform]
devices = "devices.csv"
connections = "connections.csv"
[actors]
env = "KeptCart-v0"
envs_per_actor = 4
[trainer]
class = "{module}:Renamed"
hidden_sizes = [8]
[replay]
size = 1000
[training]
learning_starts = 100
batch_size = 16
"""

SHORT = ("--timesteps", "400", "--eval-episodes", "1", "--until-return", "none")


def compose(spec: Path, *options: str | Path) -> None:
    result = CliRunner().invoke(app, ["compose", str(spec), *map(str, options)], catch_exceptions=False)
    assert result.exit_code == 0, result.output


def files(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file() and "__pycache__" not in p.parts}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory, quick_profiles: None) -> Path:
    """A folder with a trainer and three programs that import it: two side by side, one where a composition puts it."""
    folder = tmp_path_factory.mktemp("original")
    (folder / "kept_trainer.py").write_text(KEPT)
    write_csv_pair(folder, ONE_CPU)
    for name, module in (("kept", "kept_trainer.py"), ("by_module", "kept_trainer")):
        (folder / f"{name}.toml").write_text(SPEC.replace("{module}", module))
    compose(folder / "kept.toml")
    compose(folder / "kept.toml", "--output", folder / "programs" / "one.py")
    compose(folder / "by_module.toml", "--output", folder / "programs" / "two.py")
    return folder


def test_two_programs_in_one_folder_share_nothing(original: Path) -> None:
    ends = (".py", ".matrix.json", ".placement.json", ".composition.json")
    named = {f"{name}{end}" for name in ("one", "two") for end in ends}
    assert files(original / "programs") == named
    texts = {name: (original / "programs" / f"{name}.py").read_text() for name in ("one", "two")}
    for name, text in texts.items():
        assert f'run_dir="runs/{name}"' in text
        assert str(original) not in text
    assert 'run_dir="."' in (original / "runs" / "kept" / "program.py").read_text()


def test_a_copy_with_its_trainer_runs_where_it_is_and_leaves_the_original_alone(original: Path, tmp_path: Path) -> None:
    before = files(original)
    copy = shutil.copytree(original, tmp_path / "a copy")
    # Actors in processes of their own know the environment of the module that the composition names.
    code, output = run(copy / "programs" / "one.py", *SHORT)
    assert code == 0, output
    run_dir = copy / "programs" / "runs" / "one"
    assert summary(run_dir)["env_steps"] >= 400
    assert (run_dir / "weights.safetensors").exists()
    assert files(original) == before
    assert not (copy / "programs" / "runs" / "two").exists()


def test_a_program_without_its_trainer_is_one_message(original: Path, tmp_path: Path) -> None:
    program = Path(shutil.copy(original / "programs" / "two.py", tmp_path))
    code, output = run(program, "--help")
    assert code == 1
    assert "Traceback" not in output
    for said in ("no module 'kept_trainer'", f"in {tmp_path.parent} or {tmp_path}", 'folder=".."', str(program)):
        assert said in output


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("class Mine:\n    pass\n", ""),
        ("\noops = {}['oops']\n", "KeyError: 'oops' ({file}, line 2)"),
        ("import absent_package\n", "No module named 'absent_package' ({file}, line 1)"),
        ("class Mine(:\n", "invalid syntax ({file}, line 1)"),
        ("Other = 1\n", "{file} has no trainer class Mine"),
        ("Mine = 1\n", "Mine of the module"),
    ],
)
def test_a_trainer_beside_the_program_is_found_and_its_faults_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str, said: str
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "beside", raising=False)
    file = tmp_path / "beside.py"
    file.write_text(text)
    if not said:
        assert import_class("beside", "Mine", folder="../gone", program=str(tmp_path / "p.py")).__name__ == "Mine"
        assert str(tmp_path.parent / "gone") not in sys.path
        return
    with pytest.raises(SystemExit):
        import_class("beside", "Mine", folder="../gone", program=str(tmp_path / "p.py"))
    error = capsys.readouterr().err
    assert said.format(file=file) in error
    assert error.startswith("Error: ")
    assert error.count("\n") == 1


@pytest.mark.usefixtures("quick_profiles")
def test_a_stated_run_folder_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    composer = described(write_csv_pair(tmp_path, ONE_CPU))
    composer.run()
    for stated, written in (
        ("programs", "."),  # counts from the current folder, as the program's path does
        ("logs", "../logs"),
        (tmp_path / "programs" / "in", "in"),
        ("/elsewhere", "/elsewhere"),
        (None, "runs/p"),
    ):
        assert f'run_dir="{written}",' in composer.runtime_gen(path="programs/p.py", run_dir=stated).read_text()


def test_an_environment_that_the_program_would_not_know_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("composer.replay_composing.Profiler", None)  # nothing is measured
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "only_registers.py").write_text(KEPT.replace("KeptCart", "LostCart"))
    importlib.import_module("only_registers")
    composer = described(write_csv_pair(tmp_path, ONE_CPU), trainer=DQN, env="LostCart-v0")
    with pytest.raises(GenerationError, match=r"know the environment 'LostCart-v0', made by only_registers"):
        composer.run()


def test_a_class_of_gymnasium_under_a_name_of_the_users_is_not_known_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("composer.replay_composing.Profiler", None)
    own = EnvSpec("OwnPole-v0", entry_point="gymnasium.envs.classic_control.cartpole:CartPoleEnv")
    monkeypatch.setitem(registry, own.id, own)
    composer = described(write_csv_pair(tmp_path, ONE_CPU), trainer=DQN, env="OwnPole-v0")
    with pytest.raises(GenerationError, match=r"'OwnPole-v0', made by gymnasium.envs.classic_control.cartpole"):
        composer.run()
