"""Everything that can be wrong with what a user says: the error tells where, what was expected, what was found."""

from __future__ import annotations

import copy
import functools
import math
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import trainers
from programs import CONNECTION_HEADER, DEVICE_HEADER, ONE_CPU, described, write_csv_pair

from composer import Composer, replay_composing
from composer.on_policy import composition as rollout_composition
from pearl.actors.actor import Actor, ActorSetup, check_messages_fit
from pearl.actors.environment import make_vector_env
from pearl.algorithms import DDPG, DQN, PPO, SAC, TD3, CrossQ, Trainer
from pearl.algorithms.trainer import make_trainer
from pearl.backends.cpu.replay import NativeReplayManager
from pearl.backends.on_device.replay import check_fits
from pearl.errors import (
    CapacityError,
    ConfigurationError,
    DeviceFileError,
    EnvError,
    GenerationError,
    PearlError,
    PlacementError,
    TrainerError,
)
from pearl.exploration import EpsilonGreedy, GaussianNoise, OrnsteinUhlenbeck
from pearl.replay import Linear, memory
from pearl.replay.arguments import Selection
from pearl.runtime.queues import DataCollectionQueue
from pearl.spec import ActorSpec, ReplayMode, ReplaySpec, TrainSpec, TransitionSpec

pytestmark = pytest.mark.usefixtures("quick_profiles")


def message_of(kind: type[PearlError], work: Callable[[], object]) -> str:
    with pytest.raises(kind) as caught:
        work()
    assert caught.type is kind
    return str(caught.value)


def assert_says(message: str, *words: str) -> None:
    for word in words:
        assert word in message, f"{word!r} is missing in: {message}"


# --- files ----------------------------------------------------------------------------------------------------------

CPU = "cpu0,cpu,cpu,,2,60"


@pytest.mark.parametrize("path", [3, "", None, b"devices.csv"])
def test_what_is_no_path_is_refused(path: Any) -> None:
    composer = Composer(progress=False)
    for name in ("set_device_file", "set_connection_file", "save", "runtime_gen"):
        before = (None, None) if name == "runtime_gen" else ()
        message = message_of(ConfigurationError, functools.partial(getattr(composer, name), *before, path))
        assert message == f'{name} takes a path, a text such as "devices.csv" or a Path; found {path!r}.'


@pytest.mark.parametrize(
    ("devices", "words"),
    [
        pytest.param(None, ["devices.csv", "cannot be read", "No such file", "pearl devices"], id="missing"),
        pytest.param(b"", ["devices.csv", "empty", "header line"], id="empty"),
        pytest.param(b"\n\n  \n", ["devices.csv", "empty"], id="blank"),
        pytest.param(
            b"name,kind,backend\ncpu\xe9,cpu,cpu\n", ["devices.csv, line 2", "UTF-8", "0xe9", "Save"], id="latin-1"
        ),
        pytest.param(b"name,kind\ncpu0,cpu\n", ["line 1", "'backend'", "Add it to the header"], id="missing-column"),
        pytest.param(b"name,kind,backend\n", ["line 2", "one row per device", "header alone"], id="no-rows"),
        pytest.param(
            b"name,kind,backend\ncpu0,cpu,cpu\ncpu0,cpu,cpu\n",
            ["line 3", "'name'", "each name once", "'cpu0'", "Line 2", "rename"],
            id="duplicate-device",
        ),
        pytest.param(
            b"name,kind,backend\ncpu0,tpu,cpu\n", ["line 2", "'kind'", "cpu, gpu, fpga", "'tpu'"], id="unknown-kind"
        ),
        pytest.param(
            b"name,kind,backend\ncpu0,cpu,cuba\n",
            ["line 2", "'backend'", "'cuba'", "Did you mean 'cuda'?"],
            id="unknown-backend",
        ),
        pytest.param(
            b"name,kind,backend,memory_gb\ncpu0,cpu,cpu,-8\n",
            ["line 2", "'memory_gb'", "above 0", "'-8'"],
            id="negative",
        ),
        pytest.param(
            b"name,kind,backend,cores\ncpu0,cpu,cpu,four\n",
            ["line 2", "'cores'", "whole number", "'four'"],
            id="non-numeric",
        ),
        pytest.param(
            b"name,kind,backend,memory\ncpu0,cpu,cpu,8\n",
            ["line 1", "'memory'", "with its unit", "memory_gb", "memory_mb"],
            id="unitless-header",
        ),
        pytest.param(
            b"name,kind,backend,memory_gb\ncpu0,cpu,cpu,8 GB\n",
            ["line 2", "'memory_gb'", "plain number", "the unit belongs in the header", "'8 GB'"],
            id="unit-in-cell",
        ),
    ],
)
def test_device_file(tmp_path: Path, devices: bytes | None, words: Sequence[str]) -> None:
    files = write_csv_pair(tmp_path, ONE_CPU)
    files[0].unlink()
    if devices is not None:
        files[0].write_bytes(devices)
    assert_says(message_of(DeviceFileError, described(files).run), str(files[0]), *words)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        pytest.param(["cpu0,gpu7,1,10"], ["line 2", "'target'", "cpu0", "'gpu7'"], id="unknown-device"),
        pytest.param(["cpu9,cpu0,1,10"], ["line 2", "'source'", "Did you mean 'cpu0'?"], id="unknown-source"),
        pytest.param(["cpu0,cpu0,-1,10"], ["line 2", "'latency_us'", "at least 0", "'-1'"], id="negative"),
        pytest.param(["cpu0,cpu0,1,0"], ["line 2", "'bandwidth_gbps'", "above 0", "'0'"], id="no-bandwidth"),
        pytest.param(["cpu0,cpu0,1,fast"], ["line 2", "'bandwidth_gbps'", "'fast'"], id="non-numeric"),
        pytest.param(["cpu0,cpu0,1,"], ["line 2", "'bandwidth_gbps'", "a number", "''"], id="empty-cell"),
        pytest.param(["cpu0,cpu0,1,1", "cpu0,cpu0,2,2"], ["line 3", "each connection once"], id="duplicate"),
    ],
)
def test_connection_file(tmp_path: Path, rows: list[str], words: Sequence[str]) -> None:
    files = write_csv_pair(tmp_path, ONE_CPU, rows)
    assert_says(message_of(DeviceFileError, described(files).run), str(files[1]), *words)


def test_connection_file_without_units(tmp_path: Path) -> None:
    files = write_csv_pair(tmp_path, ONE_CPU)
    files[1].write_text("source,target,latency,bandwidth\ncpu0,cpu0,1,10\n")
    message = message_of(DeviceFileError, described(files).run)
    assert_says(message, "2 errors", "'latency'", "latency_us", "latency_ms", "'bandwidth'", "bandwidth_gbps")


def test_every_fault_of_a_file_is_told_at_once(tmp_path: Path) -> None:
    files = write_csv_pair(tmp_path, ["cpu0,cpu,cpu,,zero,", "cpu1,cpu,cuda,,2,"])
    assert_says(message_of(DeviceFileError, described(files).run), "line 2", "'cores'", "line 3", "'backend'")


def test_no_usable_device(tmp_path: Path) -> None:
    files = write_csv_pair(tmp_path, ["agilex,fpga,sycl,,,"])
    assert_says(message_of(PlacementError, described(files).run), "agilex", "cpu")


def test_only_a_cpu_without_backend(tmp_path: Path) -> None:
    files = write_csv_pair(tmp_path, ["cpu0,cpu,sycl,opencl:cpu:9,,"])
    message = message_of(PlacementError, described(files).run)
    assert_says(message, "devices.csv", "cpu0", "SYCL", "Add a cpu row")


def test_device_without_a_route(tmp_path: Path) -> None:
    null = "gpu0,gpu,null,sample_us=1;insert_us=1;update_us=1;learner_us=1,,"
    composer = described(write_csv_pair(tmp_path, [*ONE_CPU, null]))
    replay, learner = composer.run()
    assert replay.device == learner.device == "cpu0"
    assert_says(" ".join(str(composer.placement).split()), "not possible", "No route")


# --- the problem ----------------------------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    return write_csv_pair(tmp_path, ONE_CPU)


@pytest.mark.parametrize("metric", ["speed", "", "throughput; import os", 7])
def test_unknown_metric(metric: Any) -> None:
    message = message_of(ConfigurationError, lambda: Composer().set_opt_metric(metric))
    assert_says(message, "'throughput'", "'power_efficiency'", repr(metric))


@pytest.mark.parametrize(
    ("env", "words"),
    [
        pytest.param("CartPole-v99", ["'CartPole-v99'", "pprint_registry"], id="unknown-version"),
        pytest.param("CartPoll-v1", ["'CartPoll-v1'", "CartPole"], id="near-match"),
        pytest.param("no name", ["'no name'", "such as 'CartPole-v1'"], id="no-name"),
        pytest.param("os:Thing-v0", ["'os:Thing-v0'", "module to import", "bare name"], id="module"),
    ],
)
def test_unknown_environment(files: tuple[Path, Path], env: str, words: Sequence[str]) -> None:
    assert_says(message_of(EnvError, described(files, env=env).run), *words)


@pytest.mark.parametrize("env", ["", None, 5])
def test_environment_that_is_no_text(env: Any) -> None:
    message = message_of(ConfigurationError, lambda: Composer().set_actors(1, env=env))
    assert_says(message, "Gymnasium id", "'CartPole-v1'", repr(env))


@pytest.mark.parametrize("count", [0, -1, 1.5, "4", True])
def test_count_of_actors(count: Any) -> None:
    message = message_of(ConfigurationError, lambda: Composer().set_actors(count, env="CartPole-v1"))
    assert_says(message, "count", "whole number", repr(count))


@pytest.mark.parametrize("timeout_s", [-1, math.nan, "long", True])
def test_timeout_of_actors(timeout_s: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"timeout_s of actors must be a number of at least 0.*found"):
        Composer().set_actors(1, env="CartPole-v1", timeout_s=timeout_s)


def test_environment_whose_constructor_fails(files: tuple[Path, Path]) -> None:
    composer = described(files, env="CartPole-v1", env_kwargs={"wheels": 4})
    assert_says(message_of(EnvError, composer.run), "'CartPole-v1'", "wheels")


def test_environment_that_fails_in_step(files: tuple[Path, Path]) -> None:
    composer = described(files, env="Breaking-v0", env_kwargs={"steps": 5})
    assert_says(message_of(EnvError, composer.run), "Breaking-v0", "RuntimeError", "gearbox")


@pytest.mark.parametrize(
    ("trainer", "env", "kind", "words"),
    [
        pytest.param(DQN, "Pendulum-v1", EnvError, ["Discrete", "Box(-2.0, 2.0", "DDPG"], id="dqn-continuous"),
        pytest.param(DDPG, "CartPole-v1", EnvError, ["Box action", "Discrete(2)", "DQN"], id="ddpg-discrete"),
        pytest.param(DQN, "Telling-v0", EnvError, ["Sequence(", "Tuple of these", "set_wrappers"], id="sequences"),
        pytest.param(
            trainers.WithoutUpdate, "CartPole-v1", TrainerError, ["WithoutUpdate", "update_policy()"], id="no-update"
        ),
        pytest.param(object, "CartPole-v1", TrainerError, ["get_action() and update_policy()"], id="no-members"),
        pytest.param(
            trainers.WrongInput, "CartPole-v1", TrainerError, ["input_shape", "(7,)", "(4,)"], id="input-shape"
        ),
        pytest.param(
            trainers.WrongNetwork, "CartPole-v1", TrainerError, ["get_action()", "(4,)", "shapes"], id="network"
        ),
        pytest.param(
            trainers.UnnamedColumn,
            "CartPole-v1",
            TrainerError,
            ["UnnamedColumn.transition()", "the column 'speed'", "<lambda>", "top level of the module"],
            id="lambda",
        ),
    ],
)
def test_trainer_that_does_not_fit(
    files: tuple[Path, Path], trainer: type, env: str, kind: type[PearlError], words: Sequence[str]
) -> None:
    assert_says(message_of(kind, lambda: described(files, trainer=trainer, env=env).run()), *words)


def test_a_trainer_whose_columns_have_another_shape(files: tuple[Path, Path]) -> None:
    composer = described(files, trainer=trainers.WrongColumn)
    assert message_of(EnvError, composer.run).startswith("Column 'all' must be made with shape (4, 2), one value")


def test_trainer_that_is_no_class() -> None:
    message = message_of(TrainerError, lambda: Composer().set_train_function(learner=trainers.TinyDQN.__init__))  # type: ignore[arg-type]
    assert_says(message, "trainer class", "without parentheses")


@pytest.mark.parametrize(
    ("exploration", "words"),
    [
        (GaussianNoise(), ["GaussianNoise", "Discrete(2)", "`exploration`"]),
        ("greedy", ["`exploration`", "EpsilonGreedy()", "or None", "'greedy'"]),
    ],
)
def test_exploration_that_does_not_fit(files: tuple[Path, Path], exploration: object, words: Sequence[str]) -> None:
    for _ in range(2):  # known measurements must not hide it
        message = message_of(ConfigurationError, described(files, settings={"exploration": exploration}).run)
        assert_says(message, *words)


def test_misspelt_setting(files: tuple[Path, Path]) -> None:
    message = message_of(TrainerError, described(files, settings={"learning_rat": 0.1}).run)
    assert_says(message, "TinyDQN", "'learning_rat'", "Did you mean 'learning_rate'?")


def test_misspelt_schedule() -> None:
    message = message_of(ConfigurationError, lambda: Composer().set_training(batchsize=4))
    assert_says(message, "batch_size", "batchsize")


# --- replay ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("timesteps", ["2000", 2000.0, -1, True, math.nan, math.inf])
def test_timesteps(timesteps: Any) -> None:
    composer = Composer(progress=False)
    for taker in (composer.run, composer.runtime_gen):
        message = message_of(ConfigurationError, functools.partial(taker, timesteps=timesteps))
        assert message == f"timesteps must be a whole number of at least 0; found {timesteps!r}."


ARRAY = np.array([1, 2])  # whose comparison has no truth value
WRONG_TYPES: dict[str, Callable[[Composer], object]] = {
    "calibration of a Composer takes a path": lambda _: Composer(calibration=3),  # type: ignore[arg-type]
    "nodes of set_cluster must be a list of names; found 3": lambda c: c.set_cluster("auto", 3),  # type: ignore[arg-type]
    "nodes of set_cluster must be a list of names; found <generator": lambda c: c.set_cluster(
        "auto",
        (node for node in ["a", "b"]),  # type: ignore[arg-type]
    ),
    "count of actors must be a whole number": lambda c: c.set_actors(ARRAY, "CartPole-v1"),  # type: ignore[arg-type]
    "env_kwargs must map names to values": lambda c: c.set_actors(1, "CartPole-v1", env_kwargs=[]),  # type: ignore[arg-type]
    "eval_env_kwargs must map names to values": lambda c: c.set_actors(
        2,
        "CartPole-v1",
        eval_env_kwargs={1: 2},  # type: ignore[dict-item]
    ),
    "vectorization must be one of": lambda c: c.set_actors(2, "CartPole-v1", vectorization=ARRAY),  # type: ignore[arg-type]
    "A wrapper must be a class, or a pair": lambda c: c.set_wrappers([(gym.wrappers.ClipReward, {1: 2})]),  # type: ignore[dict-item]
    "settings must be": lambda c: c.set_train_function(SAC, settings=ARRAY),  # type: ignore[arg-type]
    "imported_from must be the name of a module": lambda c: c.set_train_function(SAC, imported_from=[]),  # type: ignore[arg-type]
    "implementation must be one of": lambda c: c.set_train_function(SAC, implementation="nativ"),
    "A schedule|learning_rate_schedule must be": lambda c: c.set_train_function(SAC, learning_rate_schedule="x"),
    "Replay capacity must be a whole number": lambda c: c.set_replay(True),
    "Fanout must be a power of two": lambda c: c.set_replay(64, fanout=ARRAY),  # type: ignore[arg-type]
    "Replay mode must": lambda c: c.set_replay(64, ARRAY),  # type: ignore[arg-type]
    "batch_size must be a whole number": lambda c: c.set_training(batch_size=ARRAY),
    "average_every": lambda c: c.set_learners("auto", average_every=0),
    "policy_lag must be 0": lambda c: c.set_rollout(policy_lag=1.0),
    "correction must be one of": lambda c: c.set_rollout(correction=ARRAY),
}


@pytest.mark.parametrize("message", WRONG_TYPES)
def test_what_is_refused_changes_nothing(message: str) -> None:
    composer = Composer(progress=False)
    composer.set_actors(1, "CartPole-v1")
    composer.set_train_function(DQN, learning_rate=1e-4)
    before = copy.copy(composer)
    with pytest.raises(ConfigurationError, match=message):
        WRONG_TYPES[message](composer)
    assert composer.changed_since(before) == []


def test_batch_larger_than_replay(files: tuple[Path, Path]) -> None:
    message = message_of(ConfigurationError, described(files, capacity=100, training={"batch_size": 101}).run)
    assert_says(message, "batch of 101", "replay of 100", "batch_size", "set_replay")


def test_replay_larger_than_memory(files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay_composing, "make_trainer", lambda *_, **__: pytest.fail("weights were made"))
    message = message_of(CapacityError, described(files, capacity=10**13).run)
    # Per transition: twice four numbers, an action of eight bytes, reward and discount.
    assert_says(message, "10,000,000,000,000", "48 B", "480.0 TB", "are free", "Lower `size`")


def test_rollout_larger_than_memory(files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_composition, "make_trainer", lambda *_, **__: pytest.fail("weights were made"))
    composer = Composer(progress=False)
    composer.set_device_file(files[0])
    composer.set_connection_file(files[1])
    composer.set_actors(2, env="CartPole-v1", envs_per_actor=4)
    composer.set_train_function(PPO, horizon=10**9)
    message = message_of(CapacityError, composer.run)
    # Twice eight environments, each with four numbers of four bytes.
    assert_says(message, "1000000000 steps x 8 environments", "16 B", "256.0 GB", "are free", "Lower horizon")


@pytest.mark.parametrize(
    ("options", "needed"),
    [
        ({"fanout": 16}, "14.5 GB"),
        ({"fanout": 2}, "22.0 GB"),
        ({"mode": "uniform"}, "10.0 GB"),
        ({"mode": "uniform", "replacement": False, "fanout": 2}, "22.0 GB"),
        ({"mode": "fifo"}, "26.0 GB"),
        ({"mode": "top_k", "fanout": 2}, "26.3 GB"),
    ],
)
def test_priorities_larger_than_memory(options: dict[str, Any], needed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_machine_free", lambda: 9_900_000_000)
    monkeypatch.setattr(memory, "group_memory", lambda: None)
    message = message_of(CapacityError, lambda: NativeReplayManager(10**9, **options))
    assert_says(message, "1,000,000,000 slots", f"needs {needed}", "9.9 GB of memory are free", "Lower `size`")


@pytest.mark.parametrize(("mode", "needed"), [("prioritized", "20.5 GB"), ("uniform", "16.0 GB")])
def test_priorities_larger_than_a_devices_memory(mode: ReplayMode, needed: str) -> None:
    message = message_of(CapacityError, lambda: check_fits(10**9, Selection(mode=mode), 15_900_000_000, "the device"))
    assert_says(message, f"needs {needed}", "15.9 GB of memory are free on the device", "Lower `size`")


def test_priorities_larger_than_any_memory_allocate_nothing() -> None:
    def mapped() -> int:
        return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")

    before = mapped()
    for _ in range(3):
        assert_says(message_of(CapacityError, lambda: NativeReplayManager(2**36)), "68,719,476,736 slots")
    assert mapped() - before < 100_000_000


@pytest.mark.parametrize("fanout", [0, 1, 3, 24, 512, -16, 16.0, "16", "automatic"])
def test_fanout(fanout: Any) -> None:
    message = message_of(ConfigurationError, lambda: Composer().set_replay(1000, fanout=fanout))
    assert_says(message, "power of two", "256", '"auto"', repr(fanout))


@pytest.mark.parametrize("size", [0, -5, 1e6, "many"])
def test_replay_size(size: Any) -> None:
    message = message_of(ConfigurationError, lambda: Composer().set_replay(size))
    assert_says(message, "capacity", "whole number", repr(size))


def test_replay_mode() -> None:
    message = message_of(ConfigurationError, lambda: Composer().set_replay(1000, mode="prioritised"))  # type: ignore[arg-type]
    assert_says(message, '"prioritized"', '"uniform"', "'prioritised'")


# --- Python code where values belong --------------------------------------------------------------------------------

CODE = "__import__('pathlib').Path('{proof}').touch()"


@pytest.fixture
def proof(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that the code would make, wherever a path with slashes is not possible in the current folder."""
    monkeypatch.chdir(tmp_path)
    return Path("proof")


@pytest.mark.parametrize("column", DEVICE_HEADER.split(","))
def test_code_in_a_device_cell_never_runs(files: tuple[Path, Path], proof: Path, column: str) -> None:
    for code in (CODE.format(proof=proof), "=cmd|'touch proof'!A1", "@__import__('os').system('touch proof')"):
        cells = dict(zip(DEVICE_HEADER.split(","), CPU.split(","), strict=True)) | {column: f'"{code}"'}
        files[0].write_text(f"{DEVICE_HEADER}\n{','.join(cells.values())}\n")
        assert_says(message_of(DeviceFileError, described(files).run), "line 2", f"'{column}'", code[:15])
        assert not proof.exists()


@pytest.mark.parametrize("column", CONNECTION_HEADER.split(","))
def test_code_in_a_connection_cell_never_runs(files: tuple[Path, Path], proof: Path, column: str) -> None:
    code = CODE.format(proof=proof)
    cells = dict.fromkeys(("source", "target"), "cpu0") | {"latency_us": "1", "bandwidth_gbps": "1"} | {column: code}
    files[1].write_text(f"{CONNECTION_HEADER}\n{','.join(cells.values())}\n")
    assert_says(message_of(DeviceFileError, described(files).run), "line 2", f"'{column}'", code[:15])
    assert not proof.exists()


@pytest.mark.parametrize("env", [CODE, "proof:CartPole-v1", "CartPole-v1'); open('proof', 'w'); ('", "{{{{7*7}}}}-v1"])
def test_code_in_an_environment_name_never_runs(files: tuple[Path, Path], proof: Path, env: str) -> None:
    proof.with_suffix(".py").write_text("open('proof', 'w')\n")  # what importing the module `proof` would run
    name = env.format(proof=proof)
    assert_says(message_of(EnvError, described(files, env=name).run), name[:15])
    assert not proof.exists()


def test_code_in_a_registered_name_never_runs(files: tuple[Path, Path], proof: Path, tmp_path: Path) -> None:
    """Even where somebody registers an environment under such a name."""
    name = "x'''+open('proof','w')+'''-v0"
    spec = gym.spec("Counting-v0")
    gym.registry[name] = spec
    try:
        composer = described(files, env=name)
        with pytest.raises(EnvError):
            composer.run()
    finally:
        del gym.registry[name]
    assert not proof.exists()


# --- output ---------------------------------------------------------------------------------------------------------


def test_unwritable_program(files: tuple[Path, Path], tmp_path: Path) -> None:
    composer = described(files)
    composer.run()
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "program.py"
    message = message_of(GenerationError, lambda: composer.runtime_gen(path=path))
    assert_says(message, str(path), "cannot be written", "Choose another path")


def test_setting_that_cannot_be_written(files: tuple[Path, Path]) -> None:
    composer = described(files, settings={"hidden_sizes": np.array([16])})
    assert_says(message_of(GenerationError, composer.run), "array([16])", "ndarray", "plain values")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("CartPole", r"named without its version\. Did you mean 'CartPole-v1'\?"),
        ("cartpole", r"cannot be made: .*`cartpole` doesn't exist\. Did you mean: `CartPole`\?"),
    ],
)
def test_an_environment_named_without_its_version(name: str, message: str) -> None:
    with pytest.raises(EnvError, match=message):
        make_vector_env(ActorSpec(name), 1)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            lambda: EpsilonGreedy(start=2.0),
            r"start and end must be numbers in \[0, 1\]; found EpsilonGreedy\(start=2.0",
        ),
        (lambda: EpsilonGreedy(steps=-5), "steps must be a number of at least 0"),
        (lambda: EpsilonGreedy(end="low"), "start and end must be numbers in"),  # type: ignore[arg-type]
        (lambda: EpsilonGreedy(steps="many"), "steps must be a number of at least 0"),  # type: ignore[arg-type]
        (lambda: GaussianNoise(sigma=-1.0), "sigma must be a number of at least 0"),
        (lambda: GaussianNoise(sigma=math.inf), "sigma must be a number of at least 0, and finite"),
        (lambda: Linear("0.4", 1.0, 10), "start of a linear schedule must be a number; found '0.4'"),  # type: ignore[arg-type]
        (lambda: Linear(0.4, 1.0, 1e5), "a whole number of steps, at least 1 step; found 100000.0"),  # type: ignore[arg-type]
        (lambda: ActorSpec("CartPole-v1", nodes=(("a",),)), "nodes must be pairs"),  # type: ignore[arg-type]
        (lambda: ActorSpec("CartPole-v1", wrappers=None), "wrappers must be a tuple of wrappers"),  # type: ignore[arg-type]
        (lambda: GaussianNoise(sigma=None), "sigma must be a number of at least 0"),  # type: ignore[arg-type]
        (lambda: OrnsteinUhlenbeck(theta=3.0), r"theta \* dt lie in \[0, 1\]"),
        (lambda: OrnsteinUhlenbeck(dt="long"), "dt must be a number above 0"),  # type: ignore[arg-type]
        (lambda: TrainSpec(gamma="most"), r"gamma must be a number in \[0, 1\]; found 'most'"),  # type: ignore[arg-type]
        (lambda: ActorSpec("CartPole-v1", env_kwargs=5), "env_kwargs must map names"),  # type: ignore[arg-type]
    ],
)
def test_a_setting_that_cannot_be(setting: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        setting()


VECTOR, TORQUE = gym.spaces.Box(-1, 1, (3,)), gym.spaces.Box(-1, 1, (1,))


@pytest.mark.parametrize(
    ("algorithm", "settings", "wanted"),
    [
        (DQN, {"double": 1}, "True or False"),
        (DQN, {"dueling": "yes"}, "True or False"),
        (DQN, {"max_grad_norm": None}, "a number of at least 0; 0 is for any norm"),
        (SAC, {"temperature": "auto"}, "a finite number of at least 0, or None for a learned one"),
        (SAC, {"temperature": math.inf}, "a finite number of at least 0, or None for a learned one"),
        (SAC, {"target_entropy": "auto"}, "a finite number, or None for minus the size of an action"),
        (SAC, {"target_entropy": math.nan}, "a finite number, or None for minus the size of an action"),
        (SAC, {"log_std_bounds": 3}, "a pair of numbers, smaller bound first"),
        (SAC, {"temperature_learning_rate": -1}, "a number above 0, and finite"),
        (SAC, {"actor_learning_rate": math.inf}, "a number above 0, and finite"),
        (TD3, {"target_noise": "x"}, "a number of at least 0"),
        (DDPG, {"saturation_penalty": "x"}, "a number of at least 0, and finite"),
        (DDPG, {"saturation_penalty": math.nan}, "a number of at least 0, and finite"),
        (DDPG, {"saturation_penalty": -0.1}, "a number of at least 0, and finite"),
        (PPO, {"orthogonal": "yes"}, "True or False"),
        (PPO, {"entropy_coefficient": math.inf}, "a number of at least 0, and finite"),
        (PPO, {"initial_log_std": "x"}, "a number, and not NaN"),
        # What has no effect is not taken silently.
        (PPO, {"n_step": 3}, r"left as it is \(1\): it has no effect on an algorithm that learns from rollouts"),
        (CrossQ, {"tau": 0.01}, r"left as it is \(0\.005\): it has no effect without target networks"),
        (PPO, {"exploration": EpsilonGreedy()}, r"left as it is \(None\)"),
        (PPO, {"gradient_steps": 4}, "None, as it learns from rollouts: horizon and epochs say how often it trains"),
    ],
)
def test_a_setting_of_a_trainer_says_what_is_supported(
    algorithm: type[Trainer], settings: dict[str, Any], wanted: str
) -> None:
    actions = gym.spaces.Discrete(2) if algorithm in (DQN, PPO) else TORQUE
    ((name, value),) = settings.items()
    message = rf"{algorithm.__name__}\.{name} must be {wanted}; found {re.escape(repr(value))}"
    if "left as" in wanted:
        message = message.partition("; found")[0]
    with pytest.raises(TrainerError, match=message):
        make_trainer(algorithm, VECTOR, actions, settings=settings)


def test_callbacks_of_a_trainer_are_checked_when_it_is_composed() -> None:
    with pytest.raises(ConfigurationError, match=r"^3 in callbacks is no callback"):
        make_trainer(DQN, VECTOR, gym.spaces.Discrete(2), settings={"callbacks": (3,)})


@pytest.mark.parametrize(
    ("environments", "train", "found"),
    [
        (100, TrainSpec(), "500 transitions from 100 environments"),
        (
            1,
            TrainSpec(n_step=900, hindsight_goals=4),
            "from 1 environments, with n_step 900 and hindsight_goals 4: raise",
        ),
    ],
)
def test_a_replay_that_cannot_take_one_message_is_refused_before_profiling(
    environments: int, train: TrainSpec, found: str
) -> None:
    with pytest.raises(ConfigurationError, match=f"cannot take a message of .*{found}"):
        check_messages_fit(ReplaySpec(500), ActorSpec("CartPole-v1", envs_per_actor=environments), train)


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
@pytest.mark.parametrize("value", [np.nan, 1e300])  # the latter is infinite as float32
@pytest.mark.parametrize("what", ["a reward", "an observation", "a last observation"])
def test_an_environment_that_returns_nan_is_named(what: str, value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = ActorSpec("Counting-v0", envs_per_actor=2)
    setup = ActorSetup(trainers.TinyDQN, {}, spec, TrainSpec(), seed=0)
    actor = Actor(setup)
    step = actor.envs.step

    def broken(actions: np.ndarray) -> tuple[Any, ...]:
        obs, reward, terminated, truncated, info = step(actions)
        obs = np.array(obs, np.float64)
        if what == "a last observation":
            terminated[1] = True
            last = obs.copy()
            last[1] = value
            info = {**info, "final_obs": last, "_final_obs": terminated}
        else:
            (reward if what == "a reward" else obs)[1] = value
        return obs, reward, terminated, truncated, info

    monkeypatch.setattr(actor.envs, "step", broken)
    transition = TransitionSpec.from_spaces(actor.envs.single_observation_space, actor.envs.single_action_space)
    message = DataCollectionQueue(transition, setup.message_rows(), 1).reserve()
    assert message is not None
    named = what.replace("a last", "an")
    with pytest.raises(
        EnvError, match=rf"Counting-v0 returned {named} that is NaN or infinite, in environment 1"
    ) as caught:
        actor.collect(message)
    # The environment itself returned a finite number.
    assert ("beyond 3.4e38 are infinite in float32" in str(caught.value)) == (value == 1e300)
    actor.close()
