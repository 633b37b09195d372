"""Environments that are given as classes and functions, wrappers, and observations that are no arrays."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.wrappers import RescaleAction, TimeAwareObservation
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import ONE_CPU, run, write_csv_pair
from test_actor import collect, joined, setup_of

from composer import Composer
from composer.calibration import CalibrationStore
from composer.platform import Platform
from composer.profiling.context import ProfilingContext
from composer.replay_composing import ReplayComposing
from pearl.actors.environment import make_single_envs, make_vector_env, probe
from pearl.actors.observations import preparation, prepare, prepare_batch, prepared_space, stored_dtype
from pearl.algorithms import DQN
from pearl.algorithms.networks import ObservationParts
from pearl.errors import ConfigurationError, EnvError, GenerationError
from pearl.spec import ActorSpec, VectorizationName

MODULE = '''
import gymnasium as gym
import numpy as np
from gymnasium import spaces

LEVELS = {LEVELS}


class Corridor(gym.Env):
    """Observations of several parts; walking right ends it."""

    def __init__(self, length=4):
        self.length = length
        self.observation_space = spaces.Dict(
            where=spaces.Discrete(length + 1), view=spaces.Box(-1, 1, (2,), np.float64)
        )
        self.action_space = spaces.Discrete(2)

    def _obs(self):
        return dict(where=np.int64(self.at), view=np.full(2, self.at / self.length))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at = 0
        return self._obs(), {{}}

    def step(self, action):
        self.at = max(0, self.at + (1 if action == 1 else -1))
        return self._obs(), 1.0 if self.at == self.length else -0.1, self.at == self.length, False, {{}}


def make_corridor(**kwargs):
    return gym.wrappers.TimeLimit(Corridor(**kwargs), 20)


class Doubled(gym.RewardWrapper):
    def __init__(self, env, factor=2.0):
        super().__init__(env)
        self.factor = factor

    def reward(self, reward):
        return self.factor * reward
'''


@pytest.fixture
def corridor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module of the user, in a folder that is not on the path of the program."""
    name = f"corridor_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(MODULE.format(LEVELS=3), encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield __import__(name)
    sys.modules.pop(name, None)


# --- classes and functions ---


@pytest.mark.parametrize("kind", ["Corridor", "make_corridor"])
def test_a_class_or_function_makes_the_environment(corridor: Any, kind: str) -> None:
    spec = ActorSpec(getattr(corridor, kind), envs_per_actor=2, env_kwargs={"length": 3})
    assert spec.env_name == f"{corridor.__name__}.{kind}"
    envs = make_vector_env(spec)
    obs, _ = envs.reset(seed=1)
    assert obs.tolist() == [[1, 0, 0, 0, 0, 0]] * 2
    obs, _, _, _, _ = envs.step(np.ones(2, np.int64))
    np.testing.assert_allclose(obs, [[0, 1, 0, 0, 1 / 3, 1 / 3]] * 2)
    envs.close()


@pytest.mark.parametrize(
    "env",
    [
        lambda: gym.make("CartPole-v1"),
        functools.partial(gym.make, "CartPole-v1"),
        gym.make,  # of the module gymnasium.envs.registration, but no environment without a name
    ],
)
def test_what_no_other_process_can_import_is_refused(env: Any) -> None:
    if env is gym.make:
        with pytest.raises(EnvError, match=r"registration\.make' failed in its constructor.*missing 1 required"):
            probe(ActorSpec(env))
        return
    with pytest.raises(ConfigurationError, match=r"class or function at the top level of a module.*def make_env\("):
        ActorSpec(env)


def wandering_pole(folder: str) -> gym.Env[Any, Any]:
    os.chdir(folder)
    return gym.make("CartPole-v1")


def test_looking_at_an_environment_that_changes_the_working_directory_leaves_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("here", "elsewhere"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    probe(ActorSpec(wandering_pole, env_kwargs={"folder": str(tmp_path / "elsewhere")}))
    assert Path.cwd() == tmp_path / "here"  # where `pearl compose --output program.py` then writes


def test_local_functions_and_classes_are_refused() -> None:
    def make() -> gym.Env[Any, Any]:
        return gym.make("CartPole-v1")

    class Local(gym.Wrapper[Any, Any, Any, Any]):
        pass

    with pytest.raises(ConfigurationError, match=r"The environment must be a class or function at the top level"):
        ActorSpec(make)
    with pytest.raises(ConfigurationError, match=r"A wrapper must be a class or function at the top level"):
        ActorSpec("CartPole-v1", wrappers=(Local,))


@pytest.mark.parametrize("env", [None, 7, "", ["CartPole-v1"]])
def test_what_is_no_environment_is_refused(env: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"by its Gymnasium id, such as 'CartPole-v1', or be a class"):
        ActorSpec(env)


@pytest.mark.parametrize("wrapper", ["TimeLimit", (TimeAwareObservation,), (TimeAwareObservation, 3), None])
def test_what_is_no_wrapper_is_refused(wrapper: Any) -> None:
    composer = Composer(progress=False)
    composer.set_actors(1, env="CartPole-v1")
    with pytest.raises(ConfigurationError, match=r"A wrapper must be a class, or a pair of one and its keyword"):
        composer.set_wrappers([wrapper])


def test_wrappers_are_a_list() -> None:
    with pytest.raises(ConfigurationError, match=r"set_wrappers takes a list of wrappers.*found <class"):
        Composer(progress=False).set_wrappers(TimeAwareObservation)  # type: ignore[arg-type]


# --- wrappers ---


def test_wrappers_are_applied_in_order_in_actors_and_in_evaluations() -> None:
    wrappers = ((RescaleAction, {"min_action": -1.0, "max_action": 1.0}), TimeAwareObservation)
    spec = ActorSpec("Pendulum-v1", envs_per_actor=2, wrappers=wrappers)
    found = probe(spec)
    assert found.observation_space.shape == (4,)
    assert found.action_space == spaces.Box(-1.0, 1.0, (1,), np.float32)
    (single,) = make_single_envs(spec, 1)
    wrapped: Any = single.env  # type: ignore[attr-defined]
    assert isinstance(wrapped, TimeAwareObservation)
    assert isinstance(wrapped.env, RescaleAction)
    expected = r"The wrapper gymnasium\.wrappers\.\S*RescaleAction of Pendulum-v1 failed: TypeError.*argument 'low'"
    for kind in ("sync", "async"):
        with pytest.raises(EnvError, match=expected):
            probe(ActorSpec("Pendulum-v1", wrappers=((RescaleAction, {"low": 1}),), vectorization=kind))  # type: ignore[arg-type]


@pytest.mark.parametrize("first", [True, False])
def test_set_wrappers_may_be_called_before_and_after_set_actors(first: bool) -> None:
    composer = Composer(progress=False)
    if first:
        composer.set_wrappers([TimeAwareObservation])
    composer.set_actors(1, env="CartPole-v1")
    if not first:
        composer.set_wrappers([TimeAwareObservation])
    assert composer.actors is not None
    assert composer.actors.wrappers == (TimeAwareObservation,)


def test_wrappers_are_part_of_the_keys_of_measurements(tmp_path: Path) -> None:
    found = []
    for wrappers in ((), (TimeAwareObservation,), ((TimeAwareObservation, {"flatten": True}),)):
        composer = Composer(progress=False)
        composer.set_actors(1, env="CartPole-v1")
        composer.set_wrappers(wrappers)
        composer.set_train_function(DQN)
        composer.set_replay(1000)
        devices, connections = write_csv_pair(tmp_path, ONE_CPU)
        platform = Platform.from_files(devices, connections)
        store = CalibrationStore(tmp_path / "calibration.json")
        found.append(
            ProfilingContext(platform, ReplayComposing(composer, store).checked_problem(), store).actor_parameters[
                "wrappers"
            ]
        )
    name = "gymnasium.wrappers.stateful_observation.TimeAwareObservation"
    assert found == ["", name, f"{name}{{'flatten': True}}"]


# --- programs ---


def composed(corridor: Any, folder: Path, *, wrappers: Any = (), env: str = "make_corridor") -> tuple[Composer, Path]:
    composer = Composer(progress=False)
    devices, connections = write_csv_pair(folder, ONE_CPU)
    composer.set_device_file(devices)
    composer.set_connection_file(connections)
    composer.set_actors(1, env=getattr(corridor, env), envs_per_actor=4, env_kwargs={"length": 3})
    composer.set_wrappers(wrappers)
    composer.set_train_function(DQN, hidden_sizes=(16,), learning_starts=50)
    composer.set_replay(1000)
    composer.run(budget_s=0)
    (folder / "programs").mkdir()
    return composer, composer.runtime_gen(path=folder / "programs" / "p.py", timesteps=400, until_return=5.0)


def test_a_program_imports_the_function_and_the_wrappers_by_name(
    corridor: Any, tmp_path: Path, quick_profiles: None
) -> None:
    composer, program = composed(
        corridor, tmp_path, wrappers=[(corridor.Doubled, {"factor": 10.0}), TimeAwareObservation]
    )
    text = program.read_text()
    name = corridor.__name__
    for line in (
        f'make_corridor = import_object(\n    "{name}",\n    "make_corridor",\n    folder="..",',
        f'Doubled = import_object(\n    "{name}",\n    "Doubled",',
        "from gymnasium.wrappers import TimeAwareObservation\n",
        "    env=make_corridor,\n",
        '    wrappers=(\n        (Doubled, {"factor": 10.0}),\n        TimeAwareObservation,\n    ),\n',
    ):
        assert line in text, line
    code, output = run(program, "--eval-episodes", "2", "--run-dir", str(tmp_path / "run"))
    assert code == 0, output
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["environment"] == f"{name}.make_corridor"
    assert summary["gradient_steps"] > 0
    assert summary["last"]["mean"] <= 8.0 + 1e-6  # ten times 1 - 2 * 0.1, of three steps at least
    log = (tmp_path / "run" / "run.log").read_text()
    assert log.count("Observations of float64 are converted to float32 once") == 1  # TimeAwareObservation has flattened
    assert composer.networks[0].input_shape == (7,)
    played = subprocess.run(
        [sys.executable, "-m", "pearl", "evaluate", str(tmp_path / "run"), "--episodes", "2", "--json"],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert played.returncode == 0, played.stderr
    found = json.loads(played.stdout)
    assert found["mean"] <= 8.0 + 1e-6
    assert f"{name}.Doubled{{'factor': 10.0}}, gymnasium" in found["wrappers"]


def test_two_of_one_name_are_refused(corridor: Any, tmp_path: Path, quick_profiles: None) -> None:
    corridor.PROGRAM = type(
        "PROGRAM", (corridor.Doubled,), {"__module__": corridor.__name__, "__qualname__": "PROGRAM"}
    )
    with pytest.raises(GenerationError, match=r"cannot have a wrapper named 'PROGRAM'\. Give the wrapper another name"):
        composed(corridor, tmp_path, wrappers=[corridor.PROGRAM])


# --- observations ---

NESTED = spaces.Dict(
    a=spaces.Tuple((spaces.Discrete(3, start=1), spaces.Box(0, 1, (2, 2), np.float64))),
    b=spaces.MultiDiscrete([2, 3]),
    c=spaces.MultiBinary(2),
)


@pytest.mark.parametrize(
    ("space", "obs", "expected", "said"),
    [
        (spaces.Discrete(3, start=2), np.int64(3), [0, 1, 0], "encoded as one-hot vectors: 3 numbers"),
        (spaces.MultiDiscrete([2, 3]), np.array([1, 0]), [0, 1, 1, 0, 0], "encoded as one-hot vectors: 5 numbers"),
        (
            NESTED,
            {"a": (np.int64(1), np.full((2, 2), 0.25)), "b": np.array([0, 2]), "c": np.array([1, 0], np.int8)},
            [1, 0, 0, 0.25, 0.25, 0.25, 0.25, 1, 0, 0, 0, 1, 1, 0],
            r"flattened (numbers of Discrete parts as one-hot vectors): 14 numbers",
        ),
        (spaces.Box(0, 9, (2,), np.int16), np.array([3, 4], np.int16), [3, 4], "int16 are converted to float32 once"),
        (spaces.Box(0, 9, (2,), np.float64), np.array([0.1, 4.0]), [0.1, 4.0], "float64 are converted to float32 once"),
        (spaces.Box(0, 9, (2,), np.float32), np.array([0.5, 4.0], np.float32), [0.5, 4.0], ""),
        (spaces.Box(0, 9, (2,), np.uint8), np.array([5, 4], np.uint8), [5, 4], ""),
        (
            spaces.Tuple((spaces.Box(np.array([[0], [1]]), 9, dtype=np.int64), spaces.MultiDiscrete([[2], [1]]))),
            (np.array([[3], [4]]), np.array([[1], [0]])),
            [3, 4, 0, 1, 1],
            "Observations Tuple(Box of shape (2, 1), int64, MultiDiscrete([[2] [1]])) are flattened",
        ),
        (spaces.MultiBinary(3), np.array([1, 0, 1], np.int8), [1, 0, 1], "are flattened: 3 numbers in a row"),
    ],
)
def test_observations_are_prepared_as_arrays(space: Any, obs: Any, expected: list[float], said: str) -> None:
    prepared = prepare(space, obs)
    assert prepared.shape == prepared_space(space).shape
    assert prepared.dtype == stored_dtype(prepared_space(space))
    np.testing.assert_allclose(prepared, expected, rtol=1e-6)
    assert said in preparation(space)
    assert "\n" not in preparation(space)
    assert bool(said) == bool(preparation(space))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"a": (0, np.zeros((2, 2)))}, r"part a/0 of an observation .* a number of Discrete\(3, start=1\), found 0"),
        ({"a": (4, np.zeros((2, 2)))}, "part a/0"),
        ({"a": (1, np.zeros((2, 3)))}, r"part a/1 .* an array of shape \(2, 2\), found shape \(2, 3\)"),
        ({"a": (1,)}, "part a .* a tuple of 2 parts"),
        ({"b": np.array([2, 0])}, r"part b .* numbers of MultiDiscrete\(\[2 3\]\)"),
        ({"b": np.array([0, -1])}, "part b"),
        ({"c": None}, "part c"),
        ({"a": (1.0, np.zeros((2, 2)))}, "part a/0"),
        ({"b": np.array([1.0, 2.0])}, "part b"),
        ({"c": np.array([0.7, 1.0])}, r"part c .* numbers of MultiBinary\(2\), found array\(\[0\.7, 1"),
    ],
)
def test_observations_that_are_not_of_their_space_are_refused(change: dict[str, Any], message: str) -> None:
    sound = {"a": (np.int64(1), np.zeros((2, 2))), "b": np.array([1, 2]), "c": np.array([1, 0], np.int8)}
    prepare(NESTED, sound)
    with pytest.raises(EnvError, match=message):
        prepare(NESTED, {**sound, **change})
    with pytest.raises(EnvError, match=r"expected a dictionary with the parts a, b, c, found a, b\."):
        prepare(NESTED, {"a": sound["a"], "b": sound["b"]})


@pytest.mark.parametrize(("numbers", "is_held"), [([3.0, 255.0], True), ([0.7, 1], False), ([256, 0], False)])
def test_numbers_that_bytes_cannot_hold_are_refused(numbers: list[float], is_held: bool) -> None:
    pixels = spaces.Box(0, 255, (2,), np.uint8)
    for space, obs in ((pixels, np.array(numbers)), (spaces.Dict(p=pixels), {"p": np.array(numbers)})):
        ways: list[Any] = [prepare] if space is pixels else [prepare, lambda *given: prepare_batch(*given)[0][0]]
        for way in ways:
            if is_held:
                assert way(space, obs).tolist() == numbers
            else:
                with pytest.raises(EnvError, match=r"numbers of Box\(0, 255, \(2,\), uint8\)"):
                    way(space, obs)


class Parts(gym.Env[Any, Any]):
    """The same numbers in several shapes of observations; episodes of three steps."""

    def __init__(self, kind: str = "dict") -> None:
        count = spaces.Discrete(4)
        self.kind = kind
        self.observation_space: gym.Space[Any] = {
            "dict": spaces.Dict(t=count, x=spaces.Box(-9, 9, (1,), np.float64)),
            "tuple": spaces.Tuple((count, spaces.Box(-9, 9, (1,), np.float64))),
            "discrete": count,
            "several": spaces.MultiDiscrete([4, 2]),
        }[kind]
        self.action_space = spaces.Discrete(3)

    def _obs(self) -> Any:
        t, x = np.int64(self.t), np.array([self.t / 2])
        return {"dict": {"t": t, "x": x}, "tuple": (t, x), "discrete": t, "several": np.array([self.t, self.t % 2])}[
            self.kind
        ]

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t = 0
        return self._obs(), {}

    def step(self, _: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        return self._obs(), float(self.t), self.t == 3, False, {}


def of_parts(mode: str, **kwargs: Any) -> Any:
    def make(num_envs: int = 1, **more: Any) -> Any:
        return gym.vector.SyncVectorEnv([lambda: Parts(**more)] * num_envs, autoreset_mode=mode)

    return make


gym.register("Parts-v0", Parts)
for _mode in ("SameStep", "NextStep", "Disabled"):
    gym.register(f"Parts{_mode}-v0", vector_entry_point=of_parts(_mode))


@pytest.mark.parametrize("kind", ["dict", "tuple", "discrete", "several"])
@pytest.mark.parametrize("env", ["Parts-v0", "PartsSameStep-v0", "PartsNextStep-v0", "PartsDisabled-v0"])
def test_actors_collect_prepared_observations_up_to_the_last(env: str, kind: str) -> None:
    how = "sync" if env == "Parts-v0" else "vector_entry_point"
    found = joined(collect(setup_of(env, DQN, vectorization=how, env_kwargs={"kind": kind}, envs_per_actor=2), 4))
    first = np.eye(4, dtype=np.float32)
    order = {
        "dict": lambda t: [*first[t], t / 2],
        "tuple": lambda t: [*first[t], t / 2],
        "discrete": lambda t: first[t],
    }
    order["several"] = lambda t: [*first[t], 1 - t % 2, t % 2]
    assert found["obs"].dtype == np.float32
    for i, reward in enumerate(found["reward"]):
        t = int(reward)
        np.testing.assert_array_equal(found["obs"][i], order[kind](t - 1))
        np.testing.assert_array_equal(found["next_obs"][i], order[kind](t))
        assert (found["discount"][i] == 0) == (t == 3)
    assert (found["reward"] == 3).sum() >= 6


class Masked(Parts):
    """Says which actions are allowed."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        obs, _ = super().reset(seed=seed)
        return obs, {"action_mask": np.array([1, 1, 0], np.int8)}


gym.register("Masked-v0", Masked)


def test_action_masks_that_a_trainer_does_not_use_are_named() -> None:
    with pytest.warns(
        UserWarning, match=r"Masked-v0 gives action masks \(info.*trainer does not use.*action_masks=True"
    ):
        collect(setup_of("Masked-v0", DQN, envs_per_actor=2), 1)


@pytest.mark.parametrize("kind", [spaces.Sequence(spaces.Discrete(3)), spaces.Text(5)])
def test_observations_that_are_no_numbers_are_named(kind: gym.Space[Any]) -> None:
    class Words(gym.Env[Any, Any]):
        observation_space: gym.Space[Any] = spaces.Dict(words=spaces.Tuple((spaces.Discrete(2), kind)))
        action_space = spaces.Discrete(2)

    gym.register("Words-v0", Words)
    name = re.escape(str(kind))
    with pytest.raises(EnvError, match=rf"may be Box, MultiBinary,.* found {name} in Dict\(.*set_wrappers"):
        probe(ActorSpec("Words-v0"))


# --- networks for the parts of observations ---

_LEAVES = st.one_of(
    st.integers(1, 4).map(spaces.Discrete),
    st.integers(1, 4).map(spaces.MultiBinary),
    st.lists(st.integers(1, 3), min_size=1, max_size=3).map(spaces.MultiDiscrete),
    st.lists(st.integers(1, 3), max_size=3).map(lambda shape: spaces.Box(-1, 1, tuple(shape))),
)


def _nested(inside: st.SearchStrategy[gym.Space[Any]]) -> st.SearchStrategy[gym.Space[Any]]:
    return st.one_of(
        st.dictionaries(st.sampled_from("abcd"), inside, min_size=1, max_size=3).map(spaces.Dict),
        st.lists(inside, min_size=1, max_size=3).map(spaces.Tuple),
    )


_SPACES = _nested(st.recursive(_LEAVES, _nested, max_leaves=6))


def _same_parts(space: gym.Space[Any], found: Any, obs: Any) -> None:
    """Compare the first row of `found` with one observation of `space`."""
    if isinstance(space, spaces.Dict):
        assert list(found) == list(space.spaces)
        for name, part in space.spaces.items():
            _same_parts(part, found[name], obs[name])
    elif isinstance(space, spaces.Tuple):
        assert type(found) is tuple
        for part, values, one in zip(space.spaces, found, obs, strict=True):
            _same_parts(part, values, one)
    else:
        one_hot = isinstance(space, spaces.Discrete | spaces.MultiDiscrete)
        expected = spaces.flatten(space, obs) if one_hot else np.asarray(obs)
        np.testing.assert_array_equal(found[0].numpy(), expected.astype(np.float32))


@settings(deadline=None, max_examples=60)
@given(_SPACES, st.integers(0, 1_000))
def test_parts_of_rows_are_what_the_environment_observed(space: gym.Space[Any], seed: int) -> None:
    space.seed(seed)
    obs = space.sample()
    rows = torch.from_numpy(np.stack([prepare(space, obs), prepare(space, space.sample())]))
    _same_parts(space, ObservationParts(space)(rows.float()), obs)


def test_rows_of_another_space_and_spaces_without_a_size_are_refused() -> None:
    with pytest.raises(ValueError, match=r"takes rows \(batch, 3\); found \(2, 4\)"):
        ObservationParts(spaces.Dict(a=spaces.Discrete(3)))(torch.zeros(2, 4))
    with pytest.raises(TypeError, match="fixed size"):
        ObservationParts(spaces.Sequence(spaces.Discrete(3)))


# --- the documentation ---

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "environments.md").read_text(encoding="utf-8")


def test_the_documentation_lists_every_kind_of_vector() -> None:
    for kind in get_args(VectorizationName):
        assert f'| `"{kind}"`' in PAGE


def test_snippets_of_the_documentation_run(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == 12
    for block in blocks:
        name = re.match(r"# (\w+\.py)\n", block)
        (tmp_path / (name[1] if name else "prepared.py")).write_text(block, encoding="utf-8")
    for script in ("compose_breakout.py", "prepared.py"):
        done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_documented_environment_is_composed_and_learnt_on(tmp_path: Path) -> None:
    test_snippets_of_the_documentation_run(tmp_path)
    for script in ("compose_doors.py", "doors_runtime.py"):
        done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=250)
        assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "runs" / "doors_runtime" / "summary.json").read_text())
    assert summary["environment"] == "doors.Doors"
    assert summary["last"]["mean"] > 5  # by chance, 0 of 15


@pytest.mark.slow
def test_documented_networks_of_parts_learn_and_are_exported(tmp_path: Path) -> None:
    test_snippets_of_the_documentation_run(tmp_path)
    export = ("-m", "pearl", "export", "runs/door_networks_runtime", "--format")
    scripts = ("door_features.py",), ("door_networks.py",), ("door_networks_runtime.py",)
    for command in (*scripts, (*export, "torchscript"), (*export, "onnx")):
        done = subprocess.run([sys.executable, *command], cwd=tmp_path, capture_output=True, text=True, timeout=250)
        assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "runs" / "door_networks_runtime" / "summary.json").read_text())
    assert summary["last"]["mean"] > 14  # by chance, 7 of 20
