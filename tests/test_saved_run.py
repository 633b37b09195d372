"""A run's checkpoint that was changed, checksums and all, comes back as it says, or is refused by CheckpointError."""

from __future__ import annotations

import dataclasses
import json
import shutil
import zlib
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from fuzz.json_changes import change_json
from gymnasium import spaces
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save

from pearl.algorithms import DQN, TD3
from pearl.backends.cpu.learner import NativeLearner
from pearl.backends.cpu.replay import NativeReplayManager
from pearl.callbacks import RunContext, StopAtReturn
from pearl.errors import CheckpointError, PearlError
from pearl.policy.environment import environment_text
from pearl.replay.storage import DataStorage
from pearl.runtime.callback_calls import CallbackCalls
from pearl.runtime.checkpoint import CheckpointState, load_checkpoint
from pearl.runtime.checkpoint_files import manifest_crc32
from pearl.runtime.env_attributes import EnvAttributes
from pearl.runtime.experience import ReplayExperience
from pearl.runtime.run_state import Best, Counters, RunState
from pearl.runtime.trainer_state import RANDOM_GROUP, module_tensors
from pearl.spec import ActorSpec, TransitionSpec

OBS, ACTIONS = spaces.Box(-1.0, 1.0, (3,), np.float32), spaces.Discrete(2)
TRANSITION = TransitionSpec.from_spaces(OBS, ACTIONS)
CAPACITY, ROWS, BATCH = 8, 6, 4
IDENTITY = {"trainer": "Small"}

pytestmark = pytest.mark.filterwarnings("ignore:Detected call of:UserWarning")  # torch does not see native steps


class Small(DQN):
    hidden_sizes = (5,)

    def build(self) -> None:
        super().build()
        self.schedule = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [5, 9])


def rows() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {f.name: rng.integers(0, 2, (ROWS, *f.shape)).astype(f.dtype) for f in TRANSITION.fields}


def run_of(mode: Any) -> RunState:
    storage = DataStorage(TRANSITION, CAPACITY, streams=2)
    replay = NativeReplayManager(CAPACITY, mode=mode, seed=1)
    return RunState(IDENTITY, Small(OBS, ACTIONS), ReplayExperience(replay, storage))


def test_an_episode_whose_rows_are_all_overwritten_continues(tmp_path: Path) -> None:
    """A checkpoint says for each stream where it continues, which is no row of the replay."""
    first, second = (run_of("prioritized") for _ in range(2))
    for stream in (1, 0, 0):
        streams = np.full(ROWS, stream)
        first.experience.replay.insert(first.experience.storage.insert(rows(), streams=streams))  # type: ignore[attr-defined]
    assert first.experience.storage.columns["episode/resumed"].shape == (1, 2)
    first.save(tmp_path, Counters(stored=3 * ROWS, collected=3 * ROWS))
    second.load(tmp_path)
    for run in (first, second):
        run.experience.storage.insert(rows(), streams=np.ones(ROWS, int))  # type: ignore[attr-defined]
    for name, column in first.experience.storage.columns.items():
        np.testing.assert_array_equal(column, second.experience.storage.columns[name], err_msg=name)


@pytest.mark.parametrize("lowered", [1.0, 0.5])
def test_a_resumed_run_has_the_learning_rates_of_its_settings(tmp_path: Path, lowered: float) -> None:
    """In proportion, where code has changed them: this class has a scheduler of its own."""
    first, second = run_of("fifo"), run_of("fifo")
    first.trainer.optimizer.param_groups[0]["lr"] = 0.1 * Small.learning_rate  # type: ignore[attr-defined]
    folder = first.save(tmp_path, Counters())
    second.trainer.learning_rate *= lowered  # type: ignore[attr-defined]
    second.load(tmp_path)
    found = second.trainer.optimizer.param_groups[0]["lr"]  # type: ignore[attr-defined]
    assert found == pytest.approx(0.1 * lowered * Small.learning_rate)
    counter("stated-learning_rate", 0)(folder)
    with pytest.raises(CheckpointError, match=r"stated-learning_rate .* must be a number above 0; found 0"):
        second.load(tmp_path)


def test_attributes_of_environments_are_set_again_or_named_where_they_cannot_be(tmp_path: Path) -> None:
    first, second, other = (
        dataclasses.replace(run_of("fifo"), env_attributes=EnvAttributes(ActorSpec(env)))
        for env in ("CartPole-v1", "CartPole-v1", "Pendulum-v1")
    )
    assert first.env_attributes is not None
    first.env_attributes.set({"gravity": 5.0, "length": 0.25})
    folder = first.save(tmp_path, Counters())
    second.load(tmp_path)
    assert second.env_attributes is not None
    assert second.env_attributes.values == {"gravity": 5.0, "length": 0.25}
    with pytest.raises(CheckpointError, match=r"cannot be set in these: Pendulum-v1 has no attribute 'gravity'"):
        other.load(tmp_path)
    counter("env_attributes", "[1]")(folder)
    with pytest.raises(CheckpointError, match=r"env_attributes .* must be a JSON object; found '\[1\]'"):
        second.load(tmp_path)


@pytest.mark.parametrize("length", [8, 16])
def test_best_weights_of_another_environment_do_not_count(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, length: int
) -> None:
    def run(**env_kwargs: int) -> RunState:
        actors = ActorSpec("CartPole-v1", eval_env="Corridor-v0", eval_env_kwargs=env_kwargs)
        evaluated_in = environment_text(actors.evaluation)
        return dataclasses.replace(run_of("fifo"), evaluated_in=evaluated_in, trained_in=f"Train({env_kwargs})")

    before, after = run(length=8), run(length=length)
    before.save(tmp_path, Counters(), Best(5.0, 2, 0, 0, module_tensors(before.trainer)))
    _, best = after.load(tmp_path)
    assert (best is None) == (length != 8)
    warned = (
        "evaluated in Corridor-v0(length=8), and this run evaluates in Corridor-v0(length=16): their mean return of 5"
    )
    assert (warned in caplog.text) == (best is None)
    warned = "run trained in Train({'length': 8}), and this run trains in Train({'length': 16}): the weights and"
    assert (warned in caplog.text) == (length != 8)


@pytest.mark.parametrize("native", [False, True])
def test_a_checkpoint_of_other_bounds_is_refused(tmp_path: Path, native: bool) -> None:
    def run(obs: float, action: float) -> RunState:
        seen, done = (spaces.Box(-1.0, high, (1,), np.float32) for high in (obs, action))
        trainer = TD3(seen, done, hidden_sizes=(2,), scale_observations=True)
        experience = ReplayExperience(
            NativeReplayManager(CAPACITY, seed=1), DataStorage(TransitionSpec.from_spaces(seen, done), CAPACITY)
        )
        return RunState(IDENTITY, trainer if native else trainer.in_torch(), experience)

    run(1.0, 1.0).save(tmp_path, Counters())
    run(1.0, 1.0).load(tmp_path)
    message = r"scale {} from bounds of \[-1.\] and \[1.\]; here they are Box\(-1.0, 3"
    with pytest.raises(CheckpointError, match=message.format("actions")):
        run(1.0, 3.0).load(tmp_path)
    with pytest.raises(CheckpointError, match=message.format("observations")):
        run(3.0, 1.0).load(tmp_path)


def test_callbacks_get_their_states_again(tmp_path: Path) -> None:
    def with_callback(reached: int) -> tuple[RunState, StopAtReturn]:
        stop = StopAtReturn(1.0, 5)
        stop.load_state_dict({"reached": reached})
        calls = CallbackCalls((), [stop], cast(RunContext, None), lambda error, reason: None)
        return dataclasses.replace(run_of("fifo"), callbacks=calls), stop

    folder = with_callback(3)[0].save(tmp_path, Counters())
    for text, message in (
        (None, ""),
        ("[]", "JSON with the state of each callback"),
        ('{"a": 1}', "JSON with the state"),
    ):
        if text is not None:
            counter("callbacks", text)(folder)
        run, stop = with_callback(0)
        with pytest.raises(CheckpointError, match=message) if message else nullcontext():
            run.load(tmp_path)
        assert stop.state_dict() == {"reached": 0 if message else 3}
    run_of("fifo").save(tmp_path / "before", Counters())
    run, stop = with_callback(0)
    run.load(tmp_path / "before")
    assert stop.state_dict() == {"reached": 0}


def used(mode: Any) -> RunState:
    run: Any = run_of(mode)
    run.experience.replay.insert(run.experience.storage.insert(rows(), streams=np.arange(ROWS) % 2))
    learner = NativeLearner(run.trainer)
    for _ in range(3):
        sample = run.experience.replay.sample(BATCH)
        result = learner.step(run.experience.storage.gather(sample.indices), sample.weights)
        run.experience.replay.update(sample.indices, result.priorities, sample.generations)
        run.trainer.schedule.step()
    return run


COUNTERS = Counters(env_steps=ROWS, gradient_steps=3, episodes=2, collected=ROWS, stored=ROWS, samples=3 * BATCH)
COUNTERS.returns.extend((1.0, float("nan")))


def save_run(run: RunState, directory: Path) -> Path:
    return run.save(directory, COUNTERS, Best(4.0, 5, ROWS, 3, module_tensors(run.trainer)))


@pytest.fixture(scope="module", params=["prioritized", "fifo"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    return request.param, save_run(used(request.param), tmp_path_factory.mktemp(request.param))


def copied(saved: tuple[str, Path], directory: Path) -> Path:
    shutil.rmtree(directory, ignore_errors=True)
    return Path(shutil.copytree(saved[1], directory / saved[1].name))


def sign(folder: Path, change: Callable[[dict[str, Any]], object] = lambda manifest: None) -> None:
    """Change the manifest, and make its checksums fit the files."""
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    for name in manifest["files"]:
        content = (folder / name).read_bytes()
        manifest["files"][name] = {"bytes": len(content), "crc32": f"{zlib.crc32(content):08x}"}
    change(manifest)
    manifest["crc32"] = manifest_crc32(manifest)
    path.write_text(json.dumps(manifest))


def change_array(folder: Path, name: str, change: Callable[[np.ndarray], np.ndarray]) -> None:
    path = folder / "arrays" / f"{name}.npy"
    array = change(np.load(path))
    with path.open("wb") as stream:
        np.lib.format.write_array(stream, np.ascontiguousarray(array), version=(2, 0))
    sign(folder)


def change_tensors(folder: Path, group: str, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    path = folder / "tensors" / f"{group}.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors)
    path.write_bytes(save({name: tensor.clone().contiguous() for name, tensor in tensors.items()}))
    sign(folder)


def change_scalars(folder: Path, group: str, change: Callable[[Any], object]) -> None:
    """Change what a group holds beside its tensors."""

    def changed(tensors: dict[str, torch.Tensor]) -> None:
        content = json.loads(tensors["scalars.json"].numpy().tobytes())
        change(content)
        tensors["scalars.json"] = torch.frombuffer(bytearray(json.dumps(content).encode()), dtype=torch.uint8)

    change_tensors(folder, group, changed)


def of_state_dict(content: Any, *keys: Any) -> tuple[list[Any], int]:
    """Where a state dict that was flattened holds what is at `keys`: a list, and the place in it."""
    found: tuple[Any, Any] = (content, "state_dict")
    for key in keys:
        value = found[0][found[1]]
        if isinstance(value, dict):
            (value,) = value.values()
            pair = next(pair for pair in value if pair[0] == key) if not isinstance(key, tuple) else None
            found = (pair, 1) if pair is not None else (value, key[0])
        else:
            found = (value, key)
    return found


def set_option(name: str, value: Any) -> Callable[[Any], None]:
    def change(content: Any) -> None:
        holder, at = of_state_dict(content, "param_groups", 0, name)
        holder[at] = value

    return change


def counter(name: str, value: Any) -> Callable[[Path], None]:
    return lambda folder: sign(folder, lambda m: m["counters"].__setitem__(name, value))


def array(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Path], None]:
    return lambda folder: change_array(folder, name, change)


def tensors(group: str, change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    return lambda folder: change_tensors(folder, group, change)


def scalars(group: str, change: Callable[[Any], object]) -> Callable[[Path], None]:
    return lambda folder: change_scalars(folder, group, change)


MOMENT = "state/0/exp_avg"
CHANGES: dict[str, Callable[[Path], None]] = {
    "version": lambda folder: sign(folder, lambda m: m.update(format_version=True)),
    "step": lambda folder: sign(folder, lambda m: m.update(step=ROWS + 1)),
    "counter below 0": counter("gradient_steps", -1),
    "counter NaN": counter("episodes", float("nan")),
    "counter boolean": counter("samples", True),
    "counter as text": counter("stored", str(ROWS)),
    "counter unknown": counter("more", 1),
    "counter lost": lambda folder: sign(folder, lambda m: m["counters"].pop("ratio_stored")),
    "more stored than collected": counter("stored", ROWS + 1),
    "time below 0": counter("wall_s", -1.0),
    "time NaN": counter("wall_s", float("nan")),
    "returns are no list": counter("returns", '{"a": 1}'),
    "returns are no numbers": counter("returns", '[1.0, "2"]'),
    "returns are too few": counter("returns", "[1.0]"),
    "returns are too many": counter("returns", "[1.0, 2.0, 3.0]"),
    "best is NaN": counter("best-mean", float("nan")),
    "best is a text": counter("best-mean", "4.0"),
    "best is of a later step": counter("best-env_steps", ROWS + 1),
    "replay's mode boolean": counter("replay/max_times_sampled", False),
    "replay's inserts below 0": counter("replay/inserts", -1),
    "replay's inserts too few": counter("replay/inserts", ROWS - 1),
    "replay's samples too few": counter("replay/samples", 1),
    "replay's alpha NaN": counter("replay/alpha", float("nan")),
    "replay's fanout a text": counter("replay/fanout", "16"),
    "storage's size a number with a point": counter("storage/size", float(ROWS)),
    "storage's size": counter("storage/size", ROWS - 1),
    "storage's cursor": counter("storage/cursor", ROWS + 1),
    "storage's rows cut": array("storage/reward", lambda a: a[:-1]),
    "storage's rows repeated": array("storage/reward", lambda a: np.concatenate([a, a])),
    "storage's stream": array("storage/episode/stream", lambda a: a + 1),
    "storage's ending": array("storage/episode/ending", lambda a: a + 3),
    "storage's position": array("storage/episode/position", lambda a: a - 2),
    "another slot written": array("replay/generations", lambda a: np.roll(a, 1)),
    "a slot lost": array("replay/generations", lambda a: np.where(np.arange(len(a)) == ROWS - 1, 0, a).astype(a.dtype)),
    "equal generations": array("replay/generations", lambda a: np.minimum(a, 3)),
    "generations too large": array("replay/generations", lambda a: np.where(a > 0, a + 10, 0).astype(a.dtype)),
    "moments cut": tensors("optimizer", lambda t: t.__setitem__(MOMENT, t[MOMENT][:1])),
    "moments of other numbers": tensors("optimizer", lambda t: t.__setitem__(MOMENT, t[MOMENT].double())),
    "moments left over": tensors("optimizer", lambda t: t.__setitem__("state/1/exp_avg", t[MOMENT])),
    "steps below 0": tensors("optimizer", lambda t: t["state/0/step"].neg_()),
    "steps NaN": tensors("optimizer", lambda t: t["state/0/step"].fill_(float("nan"))),
    "learning rate below 0": scalars("optimizer", set_option("lr", -1.0)),
    "learning rate NaN": scalars("optimizer", set_option("lr", float("nan"))),
    "learning rate a text": scalars("optimizer", set_option("lr", "0.1")),
    "betas of three": scalars("optimizer", set_option("betas", {"tuple": [0.1, 0.2, 0.3]})),
    "betas beyond 1": scalars("optimizer", set_option("betas", {"tuple": [1.5, 0.2]})),
    "parameters of another": scalars("optimizer", set_option("params", [1])),
    "scheduler's method": scalars("schedule", lambda c: c["state_dict"]["mapping"].append(["step", 5])),
    "scheduler's epoch": scalars("schedule", lambda c: c["state_dict"]["mapping"].__setitem__(1, ["last_epoch", -3])),
    "best weights of another shape": tensors("best-q", lambda t: t.__setitem__("0.bias", t["0.bias"][:2])),
    "random state of another device": tensors("random", lambda t: t.__setitem__("tpu", t["cpu"])),
    "random state lost": tensors("random", lambda t: t.__setitem__("cuda.0", t.pop("cpu"))),
}


@pytest.mark.parametrize("saved", ["prioritized"], indirect=True)
@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_run_is_refused(saved: tuple[str, Path], name: str, tmp_path: Path) -> None:
    folder = copied(saved, tmp_path / "run")
    CHANGES[name](folder)
    with pytest.raises(CheckpointError):
        run_of(saved[0]).load(folder)


def test_an_order_that_was_cut_or_turned_is_refused(saved: tuple[str, Path], tmp_path: Path) -> None:
    for change in (lambda a: a[1:], lambda a: a[::-1], lambda a: np.append(a, 0)):
        folder = copied(saved, tmp_path / "run")
        change_array(folder, "replay/order", change)
        if saved[0] == "prioritized" and not np.load(folder / "arrays/replay/order.npy").size:
            continue  # there is none to cut
        with pytest.raises(CheckpointError, match="order"):
            run_of(saved[0]).load(folder)


@pytest.mark.parametrize("name", ["manifest.json", "tensors", "arrays/replay", "arrays/storage/reward.npy"])
def test_no_link_inside_a_checkpoint_is_followed(saved: tuple[str, Path], name: str, tmp_path: Path) -> None:
    folder = copied(saved, tmp_path / "run")
    (folder / name).rename(tmp_path / "elsewhere")
    (folder / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=f"{name.removesuffix('.npy')}.* is not a plain f"):
        run_of(saved[0]).load(folder)


def test_a_key_that_stands_twice_is_refused(saved: tuple[str, Path], tmp_path: Path) -> None:
    folder = copied(saved, tmp_path / "run")
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace('"step": ', '"step": 1, "step": ', 1))
    with pytest.raises(CheckpointError, match="stands twice"):
        run_of(saved[0]).load(folder)


# --- any change -------------------------------------------------------------------------------------------------------


def changed_values(data: st.DataObject, array: np.ndarray) -> np.ndarray:
    array = np.array(array)
    action = data.draw(st.sampled_from(["item", "item", "cut", "double", "dtype", "shape"]))
    if action == "item" and array.size:
        raw = bytearray(array.tobytes())
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
        return np.frombuffer(bytes(raw), array.dtype).reshape(array.shape)
    if action == "cut":
        return array[:-1] if array.ndim else array
    if action == "double":
        return np.concatenate([array, array]) if array.ndim else np.stack([array, array])
    if action == "dtype":
        with np.errstate(invalid="ignore", over="ignore"):
            return array.astype(data.draw(st.sampled_from(["int32", "uint16", "float32", "float64", "bool", "uint8"])))
    return array.reshape(1, *array.shape)


def mutate(data: st.DataObject, folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    target = data.draw(st.sampled_from(["manifest.json", *manifest["files"]]))
    if target == "manifest.json":
        sign(folder, lambda m: change_json(data, {k: v for k, v in m.items() if k != "files"}))
        sign(folder, lambda m: change_json(data, m))
    elif target.startswith("arrays/"):
        name = target.removeprefix("arrays/").removesuffix(".npy")
        change_array(folder, name, lambda array: changed_values(data, array))
    else:
        group = target.removeprefix("tensors/").removesuffix(".safetensors")
        names = sorted(load_file(folder / target))
        if "scalars.json" in names and data.draw(st.booleans()):
            change_scalars(folder, group, lambda content: change_json(data, content))
            return
        name = data.draw(st.sampled_from(names))

        def change(found: dict[str, torch.Tensor]) -> None:
            if data.draw(st.integers(0, 5)) == 0:
                found[data.draw(st.sampled_from(["more", "state/1/step", *names]))] = found.pop(name)
            else:
                found[name] = torch.from_numpy(np.array(changed_values(data, found[name].numpy()), order="C"))

        change_tensors(folder, group, change)


def content_of(state: CheckpointState) -> tuple[Any, ...]:
    """All of it, such that equal ones compare equal, NaN included."""
    counters = {name: repr(float(v)) if type(v) in (int, float) else v for name, v in state.counters.items()}
    counters.pop("replay/fanout", None)  # a setting: whoever loads it keeps its own
    counters["returns"] = repr([float(value) for value in json.loads(str(counters["returns"]))])
    arrays = {name: (a.dtype.str, a.shape, a.tobytes()) for name, a in state.arrays.items()}
    tensors: dict[str, Any] = {}
    for group, found in state.tensors.items():
        if group == RANDOM_GROUP:  # torch leaves out what of a random state means nothing to it
            continue
        for name, tensor in found.items():
            array = np.asarray(tensor)
            raw = array.tobytes()
            if name == "scalars.json":
                raw = repr(sorted(json.loads(raw, parse_int=float).items())).encode()
            tensors[f"{group}:{name}"] = (str(array.dtype), array.shape[: name != "scalars.json"], raw)
    return state.step, dict(state.identity), counters, arrays, tensors


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_change_comes_back_as_it_was_written_or_is_refused(
    saved: tuple[str, Path], data: st.DataObject, tmp_path: Path
) -> None:
    folder = copied(saved, tmp_path / "run")
    mutate(data, folder)
    run: Any = run_of(saved[0])
    try:
        counters, best = run.load(folder)
    except CheckpointError:
        return
    shutil.rmtree(tmp_path / "again", ignore_errors=True)
    again = run.save(tmp_path / "again", counters, best)
    assert content_of(load_checkpoint(again)) == content_of(load_checkpoint(folder))
    try:  # nor does what goes on with it break
        sample = run.experience.replay.sample(BATCH)
        result = NativeLearner(run.trainer).step(run.experience.storage.gather(sample.indices), sample.weights)
        run.experience.replay.update(sample.indices, result.priorities, sample.generations)
        run.trainer.schedule.step()
    except PearlError:
        pass
