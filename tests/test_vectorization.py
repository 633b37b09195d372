"""Vectors of environments: every kind, each way of resetting, and the choice that "auto" makes."""

from __future__ import annotations

import functools
import importlib
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from programs import ONE_CPU, CsvPair, described
from test_actor import GAMMA, CountEnv, collect, joined, setup_of, sorted_rows

from composer.vectorization import fastest
from pearl.actors.actor import ActorSetup
from pearl.actors.environment import make_single_envs, make_vector_env, probe
from pearl.actors.observations import check_env
from pearl.actors.rollout_actor import RolloutActor
from pearl.actors.vectorization import autoreset_mode
from pearl.algorithms import DQN, PPO, make_trainer
from pearl.errors import ConfigurationError, EnvError
from pearl.rollout.columns import ENDED, NO_STEP, last_value_field, rollout_columns
from pearl.runtime import DataCollectionQueue
from pearl.spec import ActorSpec, RolloutSpec, TrainSpec

MODES = tuple(AutoresetMode)


def counting(**kwargs: Any) -> CountEnv:
    return CountEnv(**kwargs)


def in_mode(mode: AutoresetMode, vector: Any) -> Any:
    """What makes a vector of CountEnv that resets in this way."""
    more = {"context": "fork"} if vector is AsyncVectorEnv else {}

    def make(num_envs: int = 1, **kwargs: Any) -> Any:
        return vector([lambda: CountEnv(**kwargs)] * num_envs, autoreset_mode=mode, **more)

    return make


for _mode in MODES:
    for _vector in (SyncVectorEnv, AsyncVectorEnv):
        gym.register(f"Count{_vector.__name__}{_mode.value}-v0", vector_entry_point=in_mode(_mode, _vector))

OWN = [(f"Count{vector.__name__}{mode.value}-v0", mode) for vector in (SyncVectorEnv, AsyncVectorEnv) for mode in MODES]


# --- off-policy ---


@pytest.mark.parametrize(("env", "mode"), OWN)
def test_no_transition_crosses_a_reset(env: str, mode: AutoresetMode) -> None:
    """Episodes of three steps: terminated and truncated in turn; a reset that takes a step belongs to none."""
    messages = collect(setup_of(env, vectorization="vector_entry_point", envs_per_actor=1), 6)
    found = joined(messages)
    episodes = 6 if mode is AutoresetMode.NEXT_STEP else 8
    assert found["episode_length"].tolist() == [3] * episodes
    assert found["episode_return"].tolist() == [30.0 * episode + 3 for episode in range(episodes)]
    assert sum(int(m["counts"][1]) for m in messages) == 3 * episodes == len(found["reward"])
    for i in range(3 * episodes):
        episode, step = divmod(i, 3)
        assert found["obs"][i, :2].tolist() == [episode, step]
        assert found["next_obs"][i, :2].tolist() == [episode, step + 1]
        assert found["action"][i] == found["next_obs"][i, 2] == step % 3
        assert found["reward"][i] == 10 * episode + step
        assert found["discount"][i] == (0.0 if step == 2 and episode % 2 == 0 else GAMMA)


@pytest.mark.parametrize("n", [1, 3])
def test_every_kind_of_vector_and_of_reset_collects_the_same(n: int) -> None:
    options: dict[str, Any] = {"envs_per_actor": 3, "env_kwargs": {"shortest": 1, "longest": 7}, "seed": 3, "n_step": n}
    made = [("PearlCount-v0", "sync"), *((env, "vector_entry_point") for env, _ in OWN)]
    tables = []
    for env, vectorization in made:
        found = joined(collect(setup_of(env, vectorization=vectorization, **options), 30))
        whole = found["obs"][:, 0] < 12  # episodes that all have finished
        assert found["obs"][:, 0].max() > 13
        tables.append(sorted_rows({k: v[whole] for k, v in found.items() if not k.startswith("episode_")}))
    assert len(tables[0]) > 3 * 12
    for table in tables[1:]:
        assert np.array_equal(table, tables[0])


def test_an_asynchronous_vector_starts_its_processes_without_fork() -> None:
    envs = make_vector_env(ActorSpec("CartPole-v1", envs_per_actor=2, vectorization="async"))
    assert isinstance(envs, AsyncVectorEnv)
    assert envs.context == "spawn"
    assert autoreset_mode(envs) is AutoresetMode.SAME_STEP
    envs.close()
    tables = []
    for vectorization in ("sync", "async"):
        setup = setup_of("CartPole-v1", DQN, vectorization=vectorization, n_step=2, seed=4)
        tables.append(sorted_rows(joined(collect(setup, 15))))
    assert np.array_equal(tables[0], tables[1])


PIXELS = """
import gymnasium as gym
import numpy as np
from gymnasium import spaces


class Pixels(gym.Env):
    observation_space, action_space = spaces.Box(0, 255, (2, 3), np.uint8), spaces.Discrete(2)

    def __init__(self, last=255, shape=(2, 3)):
        self._shown = np.linspace(0, last, 6).reshape(shape)

    def reset(self, seed=None, options=None):
        return self._shown, {}
"""


def test_observations_that_shared_memory_would_change_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pixels.py").write_text(PIXELS)
    monkeypatch.syspath_prepend(tmp_path)
    pixels = importlib.import_module("pixels").Pixels
    envs = make_vector_env(ActorSpec(pixels, vectorization="async", env_kwargs={"last": 1}), 1)
    try:
        with pytest.raises(EnvError, match=r"Pixels returned .* expected numbers of Box\(0, 255, \(2, 3\), uint8"):
            envs.reset()
    finally:
        envs.close()
    assert check_env(pixels()).reset()[0].shape == (2, 3)
    with pytest.raises(EnvError, match=r"an observation of shape \(3, 2\); its observation space says \(2, 3\)"):
        check_env(pixels(shape=(3, 2))).reset()


class Ragged(gym.Env[Any, Any]):
    """Episodes of random lengths, terminated or truncated, with masks of random actions, and observations of parts."""

    def __init__(self) -> None:
        self.observation_space = spaces.Dict(number=spaces.Discrete(3), values=spaces.Box(0, 255, (2, 2), np.uint8))
        self.action_space = spaces.Discrete(4)

    def _seen(self) -> tuple[Any, dict[str, Any]]:
        rng = self.np_random
        values = rng.integers(0, 256, (2, 2), np.uint8)
        return {"number": int(rng.integers(3)), "values": values}, {"action_mask": rng.random(4) < 0.8, "more": 1}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return self._seen()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        obs, info = self._seen()
        return obs, float(self.np_random.random()), bool(self.np_random.random() < 0.1), action == 3, info


@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1", Ragged])
def test_environments_in_turn_do_what_gymnasiums_vector_does(env: Any) -> None:
    spec = ActorSpec(env, envs_per_actor=3)
    ours = make_vector_env(spec)
    theirs = SyncVectorEnv([functools.partial(one_of_singles, spec)] * 3, autoreset_mode=AutoresetMode.SAME_STEP)
    assert type(ours).step is not SyncVectorEnv.step
    try:
        ours.action_space.seed(0)
        first = [vector.reset(seed=5) for vector in (ours, theirs)]
        steps = [ours.action_space.sample() for _ in range(300)]
        for found in (first, *([vector.step(action) for vector in (ours, theirs)] for action in steps)):
            assert_same(*found)
    finally:
        ours.close()
        theirs.close()


def one_of_singles(spec: ActorSpec) -> gym.Env[Any, Any]:
    (env,) = make_single_envs(spec, 1)
    return env


def assert_same(ours: Any, theirs: Any) -> None:
    """Alike to the bit, with the same types."""
    assert type(ours) is type(theirs)
    if isinstance(ours, dict):
        assert ours.keys() == theirs.keys()
        for name in ours:
            assert_same(ours[name], theirs[name])
    elif isinstance(ours, tuple) or (isinstance(ours, np.ndarray) and ours.dtype == object):
        for pair in zip(ours, theirs, strict=True):
            assert_same(*pair)
    else:
        np.testing.assert_array_equal(ours, theirs)
        assert np.asarray(ours).dtype == np.asarray(theirs).dtype


GROWING = """
import gymnasium as gym
import numpy as np
from gymnasium import spaces


class Growing(gym.Env):
    observation_space, action_space = spaces.Box(-1, 1, (2,), np.float32), spaces.Discrete(2)
    made = 0

    def __init__(self, sizes):
        self.size = int(sizes[type(self).made % 2])
        type(self).made += 1

    def reset(self, seed=None, options=None):
        return np.zeros(2, np.float32), {}

    def step(self, action):
        zeros = np.zeros(self.size or 2, np.float32)
        return zeros if self.size else zeros.astype(str), 0.0, False, False, {}
"""


def test_an_observation_of_another_shape_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "growing.py").write_text(GROWING)
    monkeypatch.syspath_prepend(tmp_path)
    growing = importlib.import_module("growing").Growing
    for sizes in ("23", "33"):  # one of the environments, or all
        envs = make_vector_env(ActorSpec(growing, env_kwargs={"sizes": sizes}), 2)
        try:
            envs.reset()
            with pytest.raises(EnvError, match=r"Growing.* of shape \(3,\); its observation space says \(2,\)"):
                envs.step(np.zeros(2, np.int64))
        finally:
            envs.close()
    envs = make_vector_env(ActorSpec(growing, env_kwargs={"sizes": "00"}), 2)
    envs.reset()
    with pytest.raises(TypeError, match="Cannot cast"):  # texts are no numbers, even if they show some
        envs.step(np.zeros(2, np.int64))
    envs.close()


# --- on-policy ---


def rollout_of(env: str, vectorization: str, horizon: int) -> tuple[dict[str, np.ndarray], Any]:
    spec = ActorSpec(env, envs_per_actor=2, vectorization=vectorization)  # type: ignore[arg-type]
    probed = probe(spec)
    observations, actions = probed.observation_space, probed.action_space
    transition = rollout_columns(observations, actions)
    rollout = RolloutSpec(horizon=horizon)
    setup = ActorSetup(PPO, {}, spec, TrainSpec(gamma=GAMMA), 5, transition=transition, rollout=rollout)
    trainer = make_trainer(PPO, observations, actions, seed=3)
    actor = RolloutActor(setup, trainer)
    queue = DataCollectionQueue(transition, setup.message_rows(), 1, further=(last_value_field(2),))
    message = queue.reserve()
    assert message is not None
    rows = actor.collect(message)
    found = {f.name: message[f.name][:rows].reshape(horizon, 2, *f.shape).copy() for f in transition.fields}
    found["counts"] = message["counts"].copy()
    found["lengths"] = message["episode_length"][: int(message["counts"][0])].copy()
    actor.close()
    return found, trainer


@pytest.mark.parametrize(("env", "mode"), OWN)
def test_rollouts_end_episodes_where_they_end(env: str, mode: AutoresetMode) -> None:
    """Rewards are those of the steps, ends are marked, and a time limit is worth the value of the last observation."""
    horizon = 16
    found, trainer = rollout_of(env, "vector_entry_point", horizon)
    step = 0
    for t in range(horizon):
        at = t % 4 if mode is AutoresetMode.NEXT_STEP else t % 3
        episode = t // (4 if mode is AutoresetMode.NEXT_STEP else 3)
        if at == 3:
            assert (found["end"][t] == NO_STEP).all()
            assert (found["reward"][t] == 0).all()
            continue
        step += 1
        assert found["obs"][t, :, :2].tolist() == [[episode, at]] * 2
        assert (found["reward"][t] == 10 * episode + at).all()
        assert ((found["end"][t] == ENDED) == (at == 2)).all()
        if at == 2 and episode % 2:  # truncated
            last = [[episode, 3, float(found["action"][t, env]), 3] for env in range(2)]
            with torch.no_grad():
                value = trainer.networks.value(torch.tensor(last)).squeeze(1).numpy()
            np.testing.assert_allclose(found["bonus"][t], GAMMA * value, rtol=1e-4, atol=1e-6)
        else:
            assert (found["bonus"][t] == 0).all()
    assert found["counts"][1] == 2 * step
    assert (found["lengths"] == 3).all()


# --- EnvPool ---


def test_envpool_steps_its_own_environments_and_resets_in_the_next_step() -> None:
    pytest.importorskip("envpool", reason="needs pearl-toolkit[envpool]")
    spec = ActorSpec("Pendulum-v1", envs_per_actor=3, vectorization="envpool")
    envs = make_vector_env(spec)
    assert autoreset_mode(envs) is AutoresetMode.NEXT_STEP
    first, again, other = (envs.reset(seed=seed)[0] for seed in (1, 1, 2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    assert len(np.unique(first[:, 0])) == 3
    envs.close()
    found, _ = rollout_of("Pendulum-v1", "envpool", 402)
    assert [int(t) for t in np.flatnonzero(found["end"][:, 0] == ENDED)] == [199, 400]
    assert [int(t) for t in np.flatnonzero(found["end"][:, 0] == NO_STEP)] == [200, 401]
    assert (found["bonus"][[199, 400]] != 0).all()  # a time limit, which is no termination
    single = make_single_envs(spec, 1)[0]
    obs, _ = single.reset(seed=1)
    ends = []
    for _ in range(201):
        obs, _, terminated, truncated, _ = single.step(np.zeros(1, np.float32))
        ends.append(terminated or truncated)
    assert obs.shape == (3,)
    assert ends.index(True) == 199
    single.close()


def test_an_environment_that_envpool_does_not_have() -> None:
    pytest.importorskip("envpool", reason="needs pearl-toolkit[envpool]")
    with pytest.raises(EnvError, match=r"EnvPool has no environment 'CartPole-v9'\. Did you mean 'CartPole-v1'\?"):
        make_vector_env(ActorSpec("CartPole-v9", vectorization="envpool"))


@pytest.mark.parametrize("kind", ["envpool", "atari"])
@pytest.mark.parametrize("fault", ["absent", "broken"])
def test_a_package_that_is_absent_or_does_not_load_is_named(
    kind: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = {"envpool": "envpool", "atari": "ale_py"}[kind]
    real = importlib.import_module

    def imported(name: str, package: str | None = None) -> Any:
        if name.partition(".")[0] != module:
            return real(name, package)
        raise (
            ModuleNotFoundError(f"No module named {module!r}", name=module)
            if fault == "absent"
            else ImportError("libgone.so: cannot open shared object file")
        )

    monkeypatch.setattr(importlib, "import_module", imported)
    why = "is not installed" if fault == "absent" else r"does not load here \(ImportError: libgone\.so"
    with pytest.raises(EnvError, match=rf"needs the package {module}, which {why}.*pip install 'pearl-toolkit\[{kind}"):
        make_vector_env(ActorSpec("ALE/Pong-v5", vectorization=kind))  # type: ignore[arg-type]


# --- choices ---


def test_what_wraps_single_environments_needs_single_environments() -> None:
    for kind in ("vector_entry_point", "envpool", "atari"):
        with pytest.raises(EnvError, match=r'Wrappers .*single environments; vectorization="'):
            make_vector_env(ActorSpec("CartPole-v1", wrappers=(gym.wrappers.TimeAwareObservation,), vectorization=kind))  # type: ignore[arg-type]
        with pytest.raises(EnvError, match="An environment given as a callable makes single"):
            make_vector_env(ActorSpec(counting, vectorization=kind))  # type: ignore[arg-type]


def test_an_environment_that_cannot_be_made_in_the_way_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, entry in (("PearlSingle-v0", "entry_point"), ("PearlVector-v0", "vector_entry_point")):
        spec = EnvSpec(name, **{"entry_point": None, entry: counting})  # type: ignore[arg-type]
        monkeypatch.setitem(gym.registry, name, spec)
    with pytest.raises(EnvError, match=r"^PearlSingle-v0 has no vector of its own.*Leave it out"):
        make_vector_env(ActorSpec("PearlSingle-v0", vectorization="vector_entry_point"))
    for make in (lambda spec: make_vector_env(spec), lambda spec: make_single_envs(spec, 1), probe):
        with pytest.raises(EnvError, match=r"^PearlVector-v0 can be made only as a vector.*vector_entry_point"):
            make(ActorSpec("PearlVector-v0"))


def test_the_fastest_of_the_same_environment_is_taken() -> None:
    said: list[str] = []
    times = {"sync": 20.0, "async": 40.0, "vector_entry_point": 4.0, "envpool": 10.0}
    first = ActorSpec("CartPole-v1")
    assert fastest(first, lambda spec: times[spec.vectorization], said.append).vectorization == "vector_entry_point"
    assert "vector_entry_point, by microseconds per transition" in said[0]
    times["vector_entry_point"], times["envpool"] = 19.9, 30.0
    assert fastest(first, lambda spec: times[spec.vectorization], said.append).vectorization == "sync"

    def fails(spec: ActorSpec) -> float:
        if spec.vectorization == "async":
            raise EnvError("no more processes. More")
        return times[spec.vectorization]

    fastest(first, fails, said.append)
    assert "vectorization: not async: no more processes" in said


@pytest.mark.slow
def test_the_composer_measures_the_kinds_when_asked(
    csv_pair: CsvPair, capsys: pytest.CaptureFixture[str], quick_profiles: None
) -> None:
    composer = described(csv_pair(*ONE_CPU), progress=True)
    composer.set_actors(1, env="CartPole-v1", envs_per_actor=2, vectorization="auto")
    lines: list[str] = []
    composer.profile(watch=lines.append, budget_s=0)
    assert lines.count("cpu0: an Actor") >= 3, "each kind is announced"
    output = capsys.readouterr().out
    assert "by microseconds per transition of the Actors alone" in output
    for kind in ("sync", "async", "vector_entry_point"):
        assert f"{kind} " in output.split("Actors alone (")[1].splitlines()[0]
    assert composer._composed is not None
    assert f"vectorization: {composer._composed.actors.vectorization}, by" in output


def test_a_kind_that_does_not_exist() -> None:
    with pytest.raises(ConfigurationError, match=r"must be one of sync, async, .*; found 'threads'"):
        ActorSpec("CartPole-v1", vectorization="threads")  # type: ignore[arg-type]


def test_older_gymnasium_will_do() -> None:
    """Before 1.4, VectorWrapper is not generic; before 1.3, Discrete takes no dtype."""
    script = """
        import gymnasium as gym
        from typing import Any

        class VectorWrapper(gym.vector.VectorWrapper[Any, Any, Any, Any, Any]): ...

        class Discrete(gym.spaces.Discrete):
            def __init__(self, n, seed=None, start=0):
                super().__init__(n, seed, start)

        gym.vector.VectorWrapper, gym.spaces.Discrete = VectorWrapper, Discrete
        from pearl.actors.environment import make_vector_env
        from pearl.policy.plain_values import space_from_json, space_to_json
        from pearl.spec import ActorSpec

        make_vector_env(ActorSpec("CartPole-v1")).close()
        space = Discrete(3, start=2)
        assert space_from_json(space_to_json(space)) == space
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, timeout=120)
