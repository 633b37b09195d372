"""Exported policies act as `predict` does, for every algorithm and any size of a batch."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from policies import (
    BOUNDED,
    CASES,
    IMAGE,
    TORQUES,
    VECTOR,
    Case,
    MaskedDQN,
    MaskedPPO,
    NormedDQN,
    observations,
    run_folder,
    trained,
)
from safetensors import safe_open
from trainers import OwnTrainer
from typer.testing import CliRunner

import pearl
from pearl.action_masks import mask_parts
from pearl.actors.observations import prepare
from pearl.algorithms import DQN, PPO, RecurrentDQN, RecurrentPPO
from pearl.cli import app
from pearl.errors import MissingExtraError, PolicyError
from pearl.policy import SavedPolicy, export_policy

every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def agree(policy: SavedPolicy, case: Case, act: Any) -> None:
    for count in (1, 5, 300) if case[1] != IMAGE else (1, 33):
        obs = observations(case[1], count, seed=count)
        expected, found = policy.predict(obs), act(obs)
        assert found.shape == expected.shape
        assert found.dtype == expected.dtype
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@every_case
def test_onnx_acts_as_the_policy(tmp_path: Path, case: Case) -> None:
    pytest.importorskip("onnx")
    runtime = pytest.importorskip("onnxruntime")
    policy = pearl.load_policy(run_folder(tmp_path, case))
    file = export_policy(policy, tmp_path / "out" / "policy.onnx", "onnx")
    session = runtime.InferenceSession(file, providers=["CPUExecutionProvider"])
    (given,), (made,) = session.get_inputs(), session.get_outputs()
    assert (given.name, made.name) == ("observation", "action")
    assert given.shape == ["batch", *(case[1].shape or ())]
    agree(policy, case, lambda obs: session.run(None, {"observation": obs})[0])


@every_case
def test_torchscript_acts_as_the_policy(tmp_path: Path, case: Case) -> None:
    policy = pearl.load_policy(run_folder(tmp_path, case))
    module = torch.jit.load(export_policy(policy, tmp_path / "policy.pt", "torchscript"))
    agree(policy, case, lambda obs: module(torch.from_numpy(obs)).numpy())


@every_case
def test_a_safetensors_file_is_a_policy_of_its_own(tmp_path: Path, case: Case) -> None:
    run = run_folder(tmp_path / "run", case, trained(case, 1), best=trained(case, 2))
    policy = pearl.load_policy(run)
    file = export_policy(policy, tmp_path / "policy.safetensors", "safetensors")
    loaded = pearl.load_policy(file, trainer=OwnTrainer if case[0] is OwnTrainer else None)
    agree(policy, case, loaded.predict)
    assert (loaded.origin.which, loaded.origin.step, loaded.origin.mean_return) == ("best", 100, 2.5)
    with safe_open(file, "numpy") as content:
        names = set(content.keys())
    assert not any("target" in name or "critic" in name or "optimizer" in name for name in names)
    with pytest.raises(PolicyError, match="one set of weights"):
        pearl.load_policy(file, "best")


@pytest.mark.parametrize(
    "space",
    [
        spaces.Discrete(4),
        spaces.Dict(a=spaces.Box(-1, 1, (2,), np.float64), b=spaces.MultiBinary(3)),
        spaces.Tuple((spaces.Box(0, 255, (2,), np.uint8), spaces.Box(0, 255, (3,), np.uint8))),
    ],
    ids=lambda space: type(space).__name__,
)
def test_onnx_takes_prepared_observations(tmp_path: Path, space: Any) -> None:
    pytest.importorskip("onnx")
    runtime = pytest.importorskip("onnxruntime")
    case = DQN, spaces.flatten_space(space), spaces.Discrete(5)
    policy = pearl.load_policy(run_folder(tmp_path / "run", case, unprepared_space=space))
    session = runtime.InferenceSession(export_policy(policy, tmp_path / "policy.onnx", "onnx"))
    space.seed(1)
    own = [space.sample() for _ in range(5)]
    (found,) = session.run(None, {"observation": np.stack([prepare(space, one) for one in own])})
    assert found.tolist() == [policy.predict(one) for one in own]


# --- masks and states -------------------------------------------------------------------------------------------------

MASKED: dict[str, Case] = {
    "DQN": (MaskedDQN, VECTOR, spaces.Discrete(6, start=3)),
    "PPO": (MaskedPPO, VECTOR, spaces.Discrete(6)),
    "PPO of several": (MaskedPPO, VECTOR, spaces.MultiDiscrete([3, 5], start=[0, 2])),
}


class SmallRecurrentDQN(RecurrentDQN):
    hidden_sizes = (12,)
    recurrent_size = 9


class SmallRecurrentPPO(RecurrentPPO):
    cell = "gru"
    recurrent_size = 9
    normalize_observations = True


class OwnRecurrent(OwnTrainer):
    """Counts down from 1 what it has not seen yet; its initial state is not 0."""

    def initial_state(self, count: int) -> torch.Tensor:
        return torch.ones(count, 5)

    def get_action(self, obs: torch.Tensor) -> torch.Tensor:
        return self.get_action_from(obs, self.initial_state(len(obs)))[0]

    def get_action_from(self, obs: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        after = 0.9 * state - 0.1 * obs.abs()
        values: torch.Tensor = self.network(obs) + after
        return values.argmax(dim=1), after


class Resetting(OwnRecurrent):
    """Decides in Python what its next state is."""

    def get_action_from(self, obs: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        action, after = super().get_action_from(obs, state)
        return action, after if float(obs.sum()) > 0 else -after


RECURRENT: dict[str, Case] = {
    "RecurrentDQN": (SmallRecurrentDQN, VECTOR, spaces.Discrete(6, start=3)),
    "RecurrentPPO": (SmallRecurrentPPO, BOUNDED, TORQUES),
    "own trainer": (OwnRecurrent, VECTOR, spaces.Discrete(5)),
}
each_format = pytest.mark.parametrize("form", ["onnx", "torchscript"])


def session_of(policy: SavedPolicy, folder: Path, form: Any) -> tuple[dict[str, list[Any]], Any]:
    """Shapes of what an exported file takes and gives, by name (of ONNX), and a function of the inputs, in order."""
    if form == "onnx":
        pytest.importorskip("onnx")
        runtime = pytest.importorskip("onnxruntime")
        session = runtime.InferenceSession(export_policy(policy, folder / "file", form))
        shapes = {each.name: each.shape for each in (*session.get_inputs(), *session.get_outputs())}
        names = [each.name for each in session.get_inputs()]
        return shapes, lambda *given: session.run(None, dict(zip(names, given, strict=True)))
    module = torch.jit.load(export_policy(policy, folder / "file", form))

    def act(*given: np.ndarray) -> list[np.ndarray]:
        found = module(*map(torch.from_numpy, given))
        return [part.numpy() for part in (found if isinstance(found, tuple) else (found,))]

    return {}, act


@pytest.mark.parametrize("case", MASKED.values(), ids=MASKED)
@each_format
def test_an_exported_policy_takes_masks(tmp_path: Path, case: Case, form: str) -> None:
    policy = pearl.load_policy(run_folder(tmp_path / "run", case))
    shapes, act = session_of(policy, tmp_path, form)
    parts = mask_parts(case[2])
    if form == "onnx":
        assert list(shapes) == ["observation", "action_mask", "action"]
        assert shapes["action_mask"] == ["batch", sum(parts)]
    rng = np.random.default_rng(0)
    for count in (1, 5, 200):
        obs = observations(VECTOR, count)
        allowed = [np.eye(n)[rng.integers(n, size=count)] + (rng.random((count, n)) < 0.3) > 0 for n in parts]
        masks = np.concatenate(allowed, axis=1)
        (found,) = act(obs, masks)
        expected = policy.predict(obs, action_masks=masks)
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)
    first = np.ravel(getattr(case[2], "start", 0))
    chosen = found.reshape(count, -1) - first
    starts = np.cumsum([0, *parts[:-1]])
    assert all(masks[row, starts + choice].all() for row, choice in enumerate(chosen)), "allowed actions only"


@pytest.mark.parametrize("case", RECURRENT.values(), ids=RECURRENT)
@each_format
def test_an_exported_policy_carries_its_state(tmp_path: Path, case: Case, form: str) -> None:
    policy = pearl.load_policy(
        run_folder(tmp_path / "run", case), trainer=OwnRecurrent if case[0] is OwnRecurrent else None
    )
    shapes, act = session_of(policy, tmp_path, form)
    size = policy.initial_state(1).shape[1]
    if form == "onnx":
        assert list(shapes) == ["observation", "state", "episode_start", "action", "next_state"]
        assert shapes["state"] == shapes["next_state"] == ["batch", size]
    for count in (1, 30):
        wanted: Any = None
        state, starts = np.full((count, size), 9.0, np.float32), np.ones(count, bool)
        for t in range(6):
            obs = observations(case[1], count, seed=10 * count + t)
            expected, wanted = policy.predict_with_state(obs, wanted, starts)
            action, state = act(obs, state, starts)
            assert action.dtype == expected.dtype
            np.testing.assert_allclose(action, expected, rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(state, wanted, rtol=1e-4, atol=1e-5)
            starts = np.arange(count) % 3 == t % 3


@each_format
def test_a_state_that_a_trace_does_not_follow_is_refused(tmp_path: Path, form: Any) -> None:
    if form == "onnx":
        pytest.importorskip("onnx")
    case = Resetting, VECTOR, spaces.Discrete(5)
    policy = pearl.load_policy(run_folder(tmp_path / "run", case), trainer=Resetting)
    with pytest.raises(PolicyError, match="its get_action_from has decisions in Python"):
        export_policy(policy, tmp_path / "file", form)


@pytest.mark.parametrize("form", ["torchscript", "onnx"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_bounds_of_observations_may_be_the_largest_numbers(tmp_path: Path, dtype: Any, form: Any) -> None:
    if form == "onnx":
        pytest.importorskip("onnx")
    largest = np.finfo(dtype).max
    case = NormedDQN, spaces.Box(-largest, largest, (5,), dtype), spaces.Discrete(5)
    policy = pearl.load_policy(run_folder(tmp_path / "run", case))
    assert export_policy(policy, tmp_path / "file", form).stat().st_size > 0  # it compares what it has written


def test_actions_with_the_largest_numbers_as_bounds_are_compared_without_a_warning(tmp_path: Path) -> None:
    largest = np.finfo(np.float32).max
    policy = pearl.load_policy(run_folder(tmp_path / "run", (PPO, VECTOR, spaces.Box(-largest, largest, (2,)))))
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        assert export_policy(policy, tmp_path / "file", "torchscript").stat().st_size > 0


# --- files ------------------------------------------------------------------------------------------------------------


def test_exporting_leaves_the_policy_as_it_was(tmp_path: Path) -> None:
    policy = pearl.load_policy(run_folder(tmp_path, CASES["PPO"]))
    obs = observations(VECTOR, 20)
    expected = policy.predict(obs)
    first = [export_policy(policy, tmp_path / f"{n}.safetensors", "safetensors").read_bytes() for n in "ab"]
    assert first[0] == first[1]
    export_policy(policy, tmp_path / "policy.pt", "torchscript")
    np.testing.assert_array_equal(policy.predict(obs), expected)


def test_weights_without_a_description_are_no_policy(tmp_path: Path) -> None:
    run_folder(tmp_path, CASES["DQN"])
    with pytest.raises(PolicyError, match=r"does not describe their policy.*--format safetensors"):
        pearl.load_policy(tmp_path / "weights.safetensors")
    (tmp_path / "text").write_text("text")
    with pytest.raises(PolicyError, match="is not a safetensors file"):
        pearl.load_policy(tmp_path / "text")


class Deciding(OwnTrainer):
    """Decides in Python, which a trace does not follow."""

    def get_action(self, obs: torch.Tensor) -> torch.Tensor:
        values: torch.Tensor = self.network(obs)
        return values.argmax(dim=1) if float(obs.sum()) > 0 else values.argmin(dim=1)


class Failing(OwnTrainer):
    """Cannot be traced at all."""

    def get_action(self, obs: torch.Tensor) -> torch.Tensor:
        if torch.jit.is_tracing():
            raise RuntimeError("no trace of this\nand more")
        return super().get_action(obs)


class Fixed(OwnTrainer):
    """Its trace takes batches of one size only."""

    def get_action(self, obs: torch.Tensor) -> torch.Tensor:
        return self.network(obs).reshape(len(obs), -1).argmax(dim=1)


@pytest.mark.parametrize(
    ("trainer_class", "message"),
    [
        (
            Deciding,
            r"acts otherwise than the policy on \d+ random observations: its get_action has decisions in Python",
        ),
        (Failing, r"cannot be traced by torch: no trace of this\. get_action must be made of torch operations"),
        (Fixed, r"does not take a batch of 1: .*get_action must not depend on the number of observations"),
    ],
)
def test_a_policy_that_a_trace_does_not_follow_is_refused(tmp_path: Path, trainer_class: type, message: str) -> None:
    policy = pearl.load_policy(run_folder(tmp_path, (trainer_class, VECTOR, spaces.Discrete(5))))
    with pytest.raises(PolicyError, match=message):
        export_policy(policy, tmp_path / "policy.pt", "torchscript")
    assert not (tmp_path / "policy.pt").exists()


def test_a_format_that_is_none_is_refused(tmp_path: Path) -> None:
    policy = pearl.load_policy(run_folder(tmp_path, CASES["DQN"]))
    with pytest.raises(PolicyError, match="must be 'onnx', 'torchscript', 'safetensors'; found 'pickle'"):
        export_policy(policy, tmp_path / "policy.pkl", "pickle")  # type: ignore[arg-type]
    with pytest.raises(PolicyError, match="cannot be written"):
        export_policy(policy, tmp_path / "policy.json" / "file", "safetensors")


def test_a_missing_extra_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = pearl.load_policy(run_folder(tmp_path, CASES["DQN"]))
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(MissingExtraError, match=r"onnx is not installed.*pip install 'pearl-toolkit\[export\]'"):
        export_policy(policy, tmp_path / "policy.onnx", "onnx")


def test_the_command_exports(tmp_path: Path) -> None:
    run_folder(tmp_path, CASES["DQN"])
    done = CliRunner().invoke(app, ["export", str(tmp_path), "--format", "torchscript"])
    assert done.exit_code == 0, done.output
    assert f"{tmp_path / 'policy.pt'}: torchscript, last weights of step 200" in done.output
    assert (tmp_path / "policy.pt").exists()
    done = CliRunner().invoke(
        app, ["export", str(tmp_path), "--format", "safetensors", "--output", str(tmp_path / "x")]
    )
    assert done.exit_code == 0, done.output
    with safe_open(tmp_path / "x", "numpy") as content:
        assert json.loads(content.metadata()["pearl.policy"])["trainer"]["algorithm"] == "DQN"
