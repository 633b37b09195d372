"""Policies that are loaded from a run folder act as they did in the run, or are refused in words."""

from __future__ import annotations

import importlib
import json
import logging
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from policies import (
    BOUNDED,
    CASES,
    IMAGE,
    VECTOR,
    Case,
    MaskedDQN,
    NormalizedPPO,
    WideDQN,
    observations,
    run_folder,
    trained,
)
from safetensors.numpy import load_file, save_file
from trainers import OwnTrainer

import pearl
from pearl.actors.observations import prepare
from pearl.algorithms import DQN, RecurrentPPO
from pearl.algorithms.trainer import storing
from pearl.backends.cpu.replay import NativeReplayManager
from pearl.errors import CheckpointError, PolicyError
from pearl.exploration import EpsilonGreedy
from pearl.policy import export_policy
from pearl.policy.description import PolicyDescription, checkpoints_of, read_description, write_description
from pearl.policy.plain_values import space_from_json, space_to_json, value_from_json, value_to_json
from pearl.replay.storage import DataStorage
from pearl.runtime.experience import ReplayExperience
from pearl.runtime.run_state import Best, Counters, RunState
from pearl.runtime.trainer_state import module_tensors
from pearl.spec import TransitionSpec

every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def greedy(trainer: Any, obs: np.ndarray, case: Case) -> np.ndarray:
    """What the trainer does in torch, in the environment's units."""
    inputs = storing(trainer)(obs if obs.dtype == np.uint8 else obs.astype(np.float32))
    with torch.no_grad():
        found: np.ndarray = trainer.get_action(torch.from_numpy(inputs)).numpy()
    start = getattr(case[2], "start", 0)
    return (found + start).astype(case[2].dtype)


@every_case
def test_a_loaded_policy_acts_as_its_trainer(tmp_path: Path, case: Case) -> None:
    trainer = trained(case)
    policy = pearl.load_policy(run_folder(tmp_path, case, trainer))
    obs = observations(case[1], 33)
    expected = greedy(trainer, obs, case)
    actions = policy.predict(obs)
    assert actions.dtype == case[2].dtype
    assert actions.shape == (33, *(case[2].shape or ()))
    np.testing.assert_allclose(actions, expected, rtol=1e-4, atol=1e-5)
    one = policy.predict(obs[7])
    assert one.shape == (case[2].shape or ())
    assert one.dtype == case[2].dtype
    np.testing.assert_allclose(one, expected[7], rtol=1e-4, atol=1e-5)
    assert all(case[2].contains(action) for action in actions)
    assert len(np.unique(actions, axis=0)) > 1


@every_case
def test_stochastic_actions_follow_the_seed(tmp_path: Path, case: Case) -> None:
    trainer = trained(case)
    if isinstance(trainer, OwnTrainer):
        policy = pearl.load_policy(run_folder(tmp_path, case, trainer))
        with pytest.raises(PolicyError, match=r"OwnTrainer has no distribution.*deterministic=True"):
            policy.predict(observations(VECTOR, 1), deterministic=False)
        return
    if isinstance(trainer, DQN):
        trainer.exploration = EpsilonGreedy(1.0, 0.5, 100)
    policy = pearl.load_policy(run_folder(tmp_path, case, trainer), seed=3)
    obs = np.repeat(observations(case[1], 1), 200, axis=0)
    first = policy.predict(obs, deterministic=False)
    assert len(np.unique(first, axis=0)) > 1
    assert all(case[2].contains(action) for action in first)
    assert not np.array_equal(policy.predict(obs, deterministic=False), first)
    policy.seed(3)
    np.testing.assert_array_equal(policy.predict(obs, deterministic=False), first)
    another = pickle.loads(pickle.dumps(policy))
    for deterministic in (True, False):  # its random numbers go on, apart from those of the first
        np.testing.assert_array_equal(another.predict(obs, deterministic), policy.predict(obs, deterministic))


def test_an_epsilon_greedy_policy_explores_by_the_last_epsilon(tmp_path: Path) -> None:
    trainer = trained(case := CASES["DQN"])
    assert isinstance(trainer, DQN)
    trainer.exploration = EpsilonGreedy(1.0, 0.25, 1000)
    policy = pearl.load_policy(run_folder(tmp_path, case, trainer))
    obs = np.repeat(observations(case[1], 1), 20_000, axis=0)
    differing = np.mean(policy.predict(obs, deterministic=False) != policy.predict(obs[0]))
    assert 0.25 * 5 / 6 - 0.015 < differing < 0.25 * 5 / 6 + 0.015


def test_a_normalised_policy_keeps_its_statistics(tmp_path: Path) -> None:
    trainer = trained(case := CASES["continuous PPO"])
    policy = pearl.load_policy(run_folder(tmp_path, case, trainer))
    obs = observations(case[1], 8)
    moved = {**load_file(tmp_path / "weights.safetensors")}
    moved["networks.observation_mean"] = moved["networks.observation_mean"] + 1
    save_file(moved, tmp_path / "weights.safetensors")
    assert not np.allclose(pearl.load_policy(tmp_path).predict(obs), policy.predict(obs))


# --- which weights ----------------------------------------------------------------------------------------------------


def test_best_and_last_are_loaded_by_name(tmp_path: Path) -> None:
    case = CASES["DDPG"]
    run_folder(tmp_path, case, trained(case, 1), best=trained(case, 2))
    obs = observations(case[1], 5)
    best, last = (pearl.load_policy(tmp_path, which) for which in ("best", "last"))  # type: ignore[arg-type]
    np.testing.assert_allclose(best.predict(obs), greedy(trained(case, 2), obs, case), rtol=1e-4)
    np.testing.assert_allclose(last.predict(obs), greedy(trained(case, 1), obs, case), rtol=1e-4)
    assert (best.origin.step, best.origin.mean_return, best.origin.episodes) == (100, 2.5, 7)
    assert (last.origin.step, last.origin.mean_return) == (200, 1.5)
    assert pearl.load_policy(tmp_path).origin.which == "best"
    (tmp_path / "best_weights.safetensors").unlink()
    assert pearl.load_policy(tmp_path).origin.which == "last"
    with pytest.raises(PolicyError, match=r'no best weights.*which="last"'):
        pearl.load_policy(tmp_path, "best")
    with pytest.raises(PolicyError, match=r'"best", "last" or None.*found \'newest\''):
        pearl.load_policy(tmp_path, "newest")  # type: ignore[arg-type]


def test_weights_without_a_summary_have_no_step(tmp_path: Path) -> None:
    run_folder(tmp_path, CASES["DQN"])
    for text in ("", "[]", '{"last": {"step": "many"}}'):
        (tmp_path / "summary.json").write_text(text)
        assert pearl.load_policy(tmp_path).origin.step is None


# --- observations -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "wrong", "found"),
    [
        ("DQN", np.zeros(4, np.float32), r"found shape \(4,\) with dtype float32"),
        ("DQN", np.zeros((2, 2, 5), np.float32), r"found shape \(2, 2, 5\)"),
        ("DQN", 1.0, r"found shape \(\)"),
        ("DQN", np.array(["left"] * 5), r"found shape \(5,\) with dtype <U4"),
        ("DQN", np.zeros(5, complex), "with dtype complex128"),
        ("DQN", [[1.0] * 5, [1.0] * 4], "not an array"),
        ("DQN of images", np.zeros((4, 36, 36), np.float32), r"\(4, 36, 36\).*dtype uint8; found.*dtype float32"),
        ("DQN", torch.zeros(5, requires_grad=True), r"not an array: .*detach"),
        ("DQN", torch.zeros(5, dtype=torch.bfloat16), "not an array: .*BFloat16"),
        ("DQN of images", np.full((4, 36, 36), 300, np.uint16), "from 0 to 255; found 300, in uint16"),
        ("DQN of images", np.zeros((36, 36, 4), np.uint8), r"found shape \(36, 36, 4\) with dtype uint8"),
    ],
)
def test_a_wrong_observation_is_refused(tmp_path: Path, name: str, wrong: Any, found: str) -> None:
    policy = pearl.load_policy(run_folder(tmp_path, CASES[name]))
    with pytest.raises(PolicyError, match=found):
        policy.predict(wrong)


UNPREPARED = [
    spaces.Discrete(6),
    spaces.Discrete(6, start=-2),
    spaces.MultiDiscrete([[3, 4], [2, 2]], start=[[0, 1], [0, 5]]),
    spaces.MultiBinary([2, 3]),
    spaces.Dict(b=spaces.Discrete(4, start=2), a=spaces.Box(-1, 1, (2,), np.float64), c=spaces.MultiBinary(3)),
    spaces.Dict(x=spaces.Tuple((spaces.Discrete(3), spaces.Box(0, 255, (2, 2), np.uint8))), y=spaces.Box(0, 9, ())),
    spaces.Tuple((spaces.Box(0, 255, (3,), np.uint8), spaces.Box(0, 255, (2,), np.uint8))),
]


@pytest.mark.parametrize("space", UNPREPARED, ids=str)
def test_an_environments_own_observations_are_prepared(tmp_path: Path, space: Any) -> None:
    case = WideDQN, spaces.flatten_space(space), spaces.Discrete(6)
    policy = pearl.load_policy(run_folder(tmp_path / "run", case, unprepared_space=space))
    batched = gym.vector.utils.batch_space(space, 6)  # as many as Discrete has numbers
    batched.seed(1)
    batch = batched.sample()
    singles = list(gym.vector.utils.iterate(batched, batch))
    rows = np.stack([prepare(space, single) for single in singles])
    expected = policy.predict(rows).tolist()  # prepared observations are taken, too
    assert policy.predict(batch).tolist() == expected
    assert [policy.predict(single) for single in singles] == expected
    assert policy.predict(none_of(batch)).shape == (0,)


def none_of(batch: Any) -> Any:
    """The batch without rows."""
    if isinstance(batch, dict):
        return {name: none_of(part) for name, part in batch.items()}
    return tuple(map(none_of, batch)) if isinstance(batch, tuple) else batch[:0]


@pytest.mark.parametrize(
    ("space", "wrong", "found"),
    [
        (
            UNPREPARED[0],
            6,
            r"of Discrete\(6\). Expected whole numbers of Discrete\(6\) as the observation; found array\(6\)",
        ),
        (UNPREPARED[0], 1.5, r"takes observations of Discrete\(6\), or prepared ones of shape \(6,\)"),
        (UNPREPARED[4], {"a": [0.0, 1.0]}, "a dictionary with the parts b, a, c as the observation; found the parts a"),
        (UNPREPARED[4], {"a": [0], "b": 2, "c": [0] * 3}, r"as part 'a' of the observation; found shape \(1,\)"),
        (UNPREPARED[4], {"a": np.zeros((2, 2)), "b": 2, "c": [0] * 3}, "found 1 observation, a batch of 2"),
        (UNPREPARED[5], {"x": (1,), "y": 1.0}, "a tuple of 2 parts as part 'x' of the observation"),
    ],
)
def test_a_wrong_part_of_an_observation_is_named(tmp_path: Path, space: Any, wrong: Any, found: str) -> None:
    case = WideDQN, spaces.flatten_space(space), spaces.Discrete(6)
    policy = pearl.load_policy(run_folder(tmp_path / "run", case, unprepared_space=space))
    with pytest.raises(PolicyError, match=found):
        policy.predict(wrong)


@pytest.mark.parametrize(("run", "seed", "message"), [(3, 0, "run must be the folder"), ("x", "x", "seed must be")])
def test_arguments_of_another_type_are_refused(run: Any, seed: Any, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        pearl.load_policy(run, seed=seed)


@pytest.mark.parametrize("seed", [-1, 1.5, "x", None])
def test_what_is_no_seed_is_refused(tmp_path: Path, seed: Any) -> None:
    policy = pearl.load_policy(run_folder(tmp_path, CASES["DQN"]))
    with pytest.raises(PolicyError, match="seed must be a whole number of at least 0; found"):
        policy.seed(seed)


def test_lists_float64_and_empty_batches_are_taken(tmp_path: Path) -> None:
    policy = pearl.load_policy(run_folder(tmp_path, CASES["DQN"]))
    obs = observations(VECTOR, 3)
    expected = policy.predict(obs)
    assert policy.predict(obs.tolist()).tolist() == expected.tolist()
    assert policy.predict(obs.astype(np.float64)).tolist() == expected.tolist()
    assert policy.predict(obs[:0]).shape == (0,)
    kept = obs.copy()
    policy.predict(obs)
    np.testing.assert_array_equal(obs, kept)


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e39])
def test_an_observation_that_is_not_finite_is_refused(tmp_path: Path, value: float) -> None:
    policy = pearl.load_policy(run_folder(tmp_path, CASES["DQN"]))
    with pytest.raises(PolicyError, match=r"NaN or infinity.*beyond 3\.4e38 are infinite in float32"):
        policy.predict(np.full(5, value))


# --- what is refused --------------------------------------------------------------------------------------------------


def set_in(*path: str, to: Any) -> Any:
    def edit(content: dict[str, Any]) -> None:
        for key in path[:-1]:
            content = content[key]
        content[path[-1]] = to

    return edit


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            set_in("format_version", to=1),
            r"format version 1 \(written by PEARL '[\d.]+'\); this PEARL, .*, reads version 2",
        ),
        (set_in("format_version", to=True), "format version True"),
        (set_in("format", to="other"), "describes no policy"),
        (
            set_in("trainer", "algorithm", to="os.system"),
            r"the algorithm 'os.system'; there are DQN, QRDQN, RecurrentDQN, DDPG",
        ),
        (set_in("trainer", to={"name": "DQN"}), "damaged"),
        (set_in("observation_space", "kind", to="Graph"), "unknown kind"),
        (set_in("observation_space", "shape", to=[-1]), "malformed"),
        (set_in("action_space", "n", to=0), "malformed"),
        (set_in("settings", "exploration", to={"exploration": "Popen", "args": "ls"}), "malformed"),
        (set_in("settings", "hidden_sizes", to={"tuple": 3}), "malformed"),
        (set_in("settings", "hidden_sizes", to={"tuple": [7, 7]}), r"not those of DQN.*has shape \(7, 5\)"),
        (set_in("settings", "hidden_sizes", to="wide"), r"cannot be made again.*hidden_sizes must be"),
        (set_in("settings", "unheard_of", to=1), "no setting 'unheard_of'"),
        (set_in("made", "vectorization", to="os.system"), r"the vectorization 'os.system'; there are sync"),
        (set_in("made", "maker", to={"module": 3, "name": "x", "file": ""}), "module, name and file are texts"),
        (set_in("made", "wrappers", to=[{"module": "os", "name": "system", "file": ""}]), "damaged.*'arguments'"),
        (set_in("unshared_normalization", to=["NormalizeObservation"]), "NormalizeObservation normalised by running"),
    ],
)
def test_a_changed_description_is_refused(tmp_path: Path, edit: Any, message: str) -> None:
    run_folder(tmp_path, CASES["DQN"], edit=edit)
    with pytest.raises(PolicyError, match=message):
        pearl.load_policy(tmp_path)


def test_a_policy_without_its_normalisation_is_refused(tmp_path: Path) -> None:
    run_folder(tmp_path, CASES["PPO"])
    kept = {k: v for k, v in load_file(tmp_path / "weights.safetensors").items() if "observation_scale" not in k}
    save_file(kept, tmp_path / "weights.safetensors")
    with pytest.raises(PolicyError, match=r"NormalizedPPO|PPO normalises observations.*lacks observation_scale"):
        pearl.load_policy(tmp_path)


def test_weights_of_something_else_are_refused(tmp_path: Path) -> None:
    run_folder(tmp_path, CASES["DQN"])
    (tmp_path / "weights.safetensors").write_bytes(b"no weights")
    with pytest.raises(PolicyError, match="not a safetensors file"):
        pearl.load_policy(tmp_path)
    save_file({"q.0.weight": np.zeros((1, 1), np.float32)}, tmp_path / "weights.safetensors")
    with pytest.raises(PolicyError, match=r"not those of DQN as it is now: .*lacks \['0.bias'"):
        pearl.load_policy(tmp_path)
    (tmp_path / "weights.safetensors").unlink()
    with pytest.raises(PolicyError, match=r"neither weights.safetensors nor a checkpoint"):
        pearl.load_policy(tmp_path)
    (tmp_path / "policy.json").unlink()
    with pytest.raises(PolicyError, match=r"no policy.json in .*no folder of a run"):
        pearl.load_policy(tmp_path)
    with pytest.raises(PolicyError, match="There is no run at"):
        pearl.load_policy(tmp_path / "absent")


# --- classes with code of their own -----------------------------------------------------------------------------------

CODE = """
import torch
from torch import nn
from pearl.algorithms import DQN

class Mine(DQN):
    hidden_sizes = (8,)

    def build_q_network(self):
        return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> type:
    """The class of `CODE`, imported from a file of `tmp_path`."""
    (tmp_path / "mine_of_policy.py").write_text(CODE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "mine_of_policy", raising=False)
    found: type = importlib.import_module("mine_of_policy").Mine
    return found


def loaded_elsewhere(run: Path, before: str = "", further: str = "") -> subprocess.CompletedProcess[str]:
    """What another process says that loads the policy."""
    code = f"import pearl\n{before}\np = pearl.load_policy({str(run)!r}{further})\nprint(p.predict([0.5] * 5))"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)


def test_a_class_with_code_is_imported_from_where_it_was(tmp_path: Path, mine: type) -> None:
    run = run_folder(tmp_path / "run", (mine, VECTOR, spaces.Discrete(3)))
    expected = pearl.load_policy(run, trainer=mine).predict([0.5] * 5)
    done = loaded_elsewhere(run)
    assert done.stdout.strip() == str(expected), done.stderr
    assert f"Importing {tmp_path / 'mine_of_policy.py'} for the trainer class Mine" in done.stderr
    (tmp_path / "mine_of_policy.py").rename(tmp_path / "moved.py")
    done = loaded_elsewhere(run)
    assert "mine_of_policy.py, which is not there. Pass the class: load_policy(run, trainer=Mine), or" in done.stderr
    before = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from moved import Mine"
    assert loaded_elsewhere(run, before, ", trainer=Mine").stdout.strip() == str(expected)


def test_code_in_a_run_folder_is_not_executed(tmp_path: Path, mine: type) -> None:
    run = run_folder(tmp_path, (mine, VECTOR, spaces.Discrete(3)))
    (tmp_path / "mine_of_policy.py").write_text("print('executed')")
    done = loaded_elsewhere(run)
    assert "Code that comes with a run is not executed" in done.stderr
    assert "executed" not in done.stdout


@pytest.mark.parametrize(
    ("module", "file", "message"),
    [
        ("json", "{stdlib}", "here 'json' is"),
        ("antigravity", "/nowhere/antigravity.py", "which is not there"),
        ("antigravity", "antigravity.py", "which is not there"),
        ("antigravity", "{code}", "which has another name"),
    ],
)
def test_a_description_cannot_name_other_code(tmp_path: Path, mine: type, module: str, file: str, message: str) -> None:
    code = tmp_path / "mine_of_policy.py"

    def edit(content: dict[str, Any]) -> None:
        content["trainer"] |= {"module": module, "file": file.format(stdlib="/elsewhere/json.py", code=code)}

    run = run_folder(tmp_path / "run", (mine, VECTOR, spaces.Discrete(3)), edit=edit)
    with pytest.raises(PolicyError, match=message):
        pearl.load_policy(run)
    assert "antigravity" not in sys.modules


def test_another_class_is_refused(tmp_path: Path) -> None:
    run = run_folder(tmp_path, CASES["DQN"])
    with pytest.raises(PolicyError, match="cannot be made again"):
        pearl.load_policy(run, trainer=NormalizedPPO)
    with pytest.raises(PolicyError, match="must be the run's trainer class, WideDQN"):
        pearl.load_policy(run, trainer=trained(CASES["DQN"]))  # type: ignore[arg-type]


class Ensemble(OwnTrainer):
    """Networks in a list, and a learned tensor."""

    def __init__(self, observation_space: spaces.Box, action_space: spaces.Discrete) -> None:
        super().__init__(observation_space, action_space)
        self.members = [torch.nn.Linear(5, int(action_space.n)) for _ in range(2)]
        self.bias = torch.zeros(int(action_space.n), requires_grad=True)

    def get_action(self, obs: torch.Tensor) -> torch.Tensor:
        values: torch.Tensor = self.network(obs) + self.bias + sum(member(obs) for member in self.members)
        return values.argmax(dim=1)


class Module(torch.nn.Module, OwnTrainer):  # type: ignore[misc]
    """A trainer that is a module itself, with a parameter of its own."""

    def __init__(self, observation_space: spaces.Box, action_space: spaces.Discrete) -> None:
        torch.nn.Module.__init__(self)
        OwnTrainer.__init__(self, observation_space, action_space)
        self.scale = torch.nn.Parameter(torch.randn(int(action_space.n)))

    def get_action(self, obs: torch.Tensor) -> torch.Tensor:
        values: torch.Tensor = self.network(obs) * self.scale
        return values.argmax(dim=1)


@pytest.mark.parametrize("trainer_class", [Ensemble, Module])
def test_weights_hold_all_that_acting_needs(tmp_path: Path, trainer_class: type) -> None:
    trainer = trained(case := (trainer_class, VECTOR, spaces.Discrete(5)))
    if isinstance(trainer, Ensemble):
        trainer.bias.data[2] = 0.7
    obs = observations(VECTOR, 50)
    policy = pearl.load_policy(run_folder(tmp_path, case, trainer))
    expected = greedy(trainer, obs, case).tolist()
    assert policy.predict(obs).tolist() == expected
    exported = torch.jit.load(export_policy(policy, tmp_path / "policy.pt", "torchscript"))  # type: ignore[no-untyped-call]
    assert exported(torch.from_numpy(obs)).tolist() == expected


# --- the cost and the files -------------------------------------------------------------------------------------------


def test_loading_needs_little(tmp_path: Path) -> None:
    run = run_folder(tmp_path, CASES["PPO"])
    code = (
        "import sys\n"
        "for name in ('composer', 'pandas', 'matplotlib', 'tensorboard', 'jinja2', 'rich', 'typer', 'markupsafe'):\n"
        "    sys.modules[name] = None\n"
        f"import pearl\np = pearl.load_policy({str(run)!r})\nprint(p.predict([0.5] * 5), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert re.fullmatch(r"\d False\n", done.stdout), done.stderr


@pytest.mark.parametrize(
    "space", [VECTOR, BOUNDED, IMAGE, *(case[2] for case in CASES.values()), spaces.MultiBinary(3), *UNPREPARED]
)
def test_spaces_come_back(space: Any) -> None:
    assert space_from_json(json.loads(json.dumps(space_to_json(space), allow_nan=False))) == space


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        3,
        0.1,
        float("inf"),
        "text",
        (1, (2.0, "x")),
        [1, [2]],
        {"a": (1,), 2: None},
        EpsilonGreedy(1, 0.1, 7),
    ],
)
def test_settings_come_back(value: object) -> None:
    assert value_from_json(json.loads(json.dumps(value_to_json(value), allow_nan=False))) == value


def test_a_policy_that_cannot_be_described_is_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = trained(case := CASES["DQN"])
    description = PolicyDescription.of(
        *(trainer, {}), environment="A-v0", env_kwargs={}, observation_space=case[1], action_space=spaces.Text(3)
    )
    with caplog.at_level(logging.WARNING):
        write_description(description, tmp_path)
    assert "policy.json cannot be written: The space Text" in caplog.text
    assert "pearl.load_policy will not load this run" in caplog.text
    assert not list(tmp_path.iterdir())


SHOWN = {
    "use_policy.py": "<SavedPolicy of WideDQN on CartPole-v1: last weights, step 200>\n",
    "play_policy.py": "videos/CartPole-v1-last-episode-1.mp4\n",
    "play_elsewhere.py": "20 True\n",
    "use_onnx.py": "True\n",
    "use_masked_onnx.py": "True\n",
    "use_recurrent_policy.py": "",
    "use_recurrent_onnx.py": "(1, 128)\n",
}


@pytest.mark.parametrize("name", SHOWN)
def test_what_the_documentation_shows_runs(tmp_path: Path, name: str) -> None:
    for module in ("moviepy",) if name == "play_policy.py" else ("onnx", "onnxruntime") if "onnx" in name else ():
        pytest.importorskip(module)
    page = (Path(__file__).parent.parent / "docs" / "policy.md").read_text(encoding="utf-8")
    (block,) = [b for b in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if b.startswith(f"# {name}\n")]
    env = gym.make("CartPole-v1")
    (tmp_path / "runs").mkdir()
    runs = {"cartpole": WideDQN, "masked": MaskedDQN, "remember": RecurrentPPO}
    for folder, trainer in runs.items():
        case = trainer, env.observation_space, env.action_space
        run_folder(tmp_path / "runs" / folder, case, env="CartPole-v1")
    (tmp_path / name).write_text(block, encoding="utf-8")
    done = subprocess.run([sys.executable, name], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert SHOWN[name] in done.stdout


def test_a_resumed_run_under_way_is_loaded_from_its_checkpoint(tmp_path: Path) -> None:
    case = CASES["DDPG"]
    run = run_folder(tmp_path, case, trained(case, 1), best=trained(case, 2))  # it had ended at step 200
    resumed = trained(case, 3)
    storage = DataStorage(TransitionSpec.from_spaces(case[1], case[2]), 8)
    state = RunState({}, resumed, ReplayExperience(NativeReplayManager(8, seed=1), storage))
    for step, weights, origin in ((200, trained(case, 2), ("best", 100)), (230, resumed, ("last", 230))):
        state.save(run / "checkpoints", Counters(env_steps=step, gradient_steps=20))
        found, obs = pearl.load_policy(run), observations(case[1], 5)
        assert (found.origin.which, found.origin.step) == origin
        np.testing.assert_allclose(found.predict(obs), greedy(weights, obs, case), rtol=1e-4)


def test_an_ended_run_needs_no_checkpoint(tmp_path: Path) -> None:
    case = CASES["DDPG"]
    ended = trained(case, 1)
    run = run_folder(tmp_path, case, ended)  # at step 200
    storage = DataStorage(TransitionSpec.from_spaces(case[1], case[2]), 8)
    state = RunState({}, trained(case, 2), ReplayExperience(NativeReplayManager(8, seed=1), storage))
    damaged = state.save(run / "checkpoints", Counters(env_steps=200, gradient_steps=20)) / "manifest.json"
    damaged.write_text("{")
    found, obs = pearl.load_policy(run), observations(case[1], 5)
    assert (found.origin.which, found.origin.step) == ("last", 200)
    np.testing.assert_allclose(found.predict(obs), greedy(ended, obs, case), rtol=1e-4)


def test_checkpoints_elsewhere_are_loaded_if_they_are_the_runs_own(tmp_path: Path) -> None:
    case = CASES["DDPG"]
    mine, other = trained(case, 1), trained(case, 2)
    run, elsewhere = run_folder(tmp_path / "run", case, mine), tmp_path / "elsewhere"
    (run / "weights.safetensors").unlink()
    write_description(read_description(run / "policy.json"), run, elsewhere)
    storage = DataStorage(TransitionSpec.from_spaces(case[1], case[2]), 8)
    experience = ReplayExperience(NativeReplayManager(8, seed=1), storage)

    def save(trainer: Any, folder: Path, step: int, owner: Path | None) -> None:
        state = RunState({}, trainer, experience, run_folder="" if owner is None else str(owner))
        state.save(folder, Counters(env_steps=step, gradient_steps=20))

    save(other, run / "checkpoints", 90, None)  # of an earlier run
    with pytest.raises(PolicyError, match=r"nor a checkpoint of its own in .*elsewhere: the run has saved nothing yet"):
        pearl.load_policy(run)
    save(mine, elsewhere, 70, run)
    found, obs = pearl.load_policy(run), observations(case[1], 5)
    assert (found.origin.which, found.origin.step) == ("last", 70)
    np.testing.assert_allclose(found.predict(obs), greedy(mine, obs, case), rtol=1e-4)
    (tmp_path / "another").mkdir()
    save(other, elsewhere, 80, tmp_path / "another")
    with pytest.raises(PolicyError, match="nor a checkpoint of its own"):
        pearl.load_policy(run)
    (tmp_path / "link").symlink_to(run)
    write_description(read_description(run / "policy.json"), run, tmp_path / "link" / "checkpoints")
    assert checkpoints_of(run) == run / "checkpoints", "its own, spelled otherwise: it may be moved"
    save(mine, run / "checkpoints", 95, None)
    assert pearl.load_policy(run).origin.step == 95
    save(other, run / "checkpoints", 99, tmp_path / "another")  # which went on from them
    with pytest.raises(PolicyError, match="nor a checkpoint of its own"):
        pearl.load_policy(run)


def test_a_moved_run_with_checkpoints_elsewhere_says_where_it_was(tmp_path: Path) -> None:
    case = CASES["DDPG"]
    run = run_folder(tmp_path / "run", case, trainer := trained(case, 1))
    (run / "weights.safetensors").unlink()
    write_description(read_description(run / "policy.json"), run, tmp_path / "elsewhere")
    storage = DataStorage(TransitionSpec.from_spaces(case[1], case[2]), 8)
    state = RunState({}, trainer, ReplayExperience(NativeReplayManager(8, seed=1), storage), run_folder=str(run))
    state.save(tmp_path / "elsewhere", Counters(env_steps=70, gradient_steps=20))
    run.rename(tmp_path / "moved")
    with pytest.raises(PolicyError, match=r"moved has no .*elsewhere are of a run in .*run, .* move its folder back"):
        pearl.load_policy(tmp_path / "moved")
    (tmp_path / "moved").rename(run)
    assert pearl.load_policy(run).origin.step == 70


def test_a_run_that_has_ended_is_loaded_where_its_checkpoints_elsewhere_cannot_be_read(tmp_path: Path) -> None:
    run, unreadable = run_folder(tmp_path / "run", CASES["DDPG"]), tmp_path / ("x" * 300)  # as another user's folder
    write_description(read_description(run / "policy.json"), run, unreadable)
    assert pearl.load_policy(run).origin.step == 200
    (run / "weights.safetensors").unlink()
    with pytest.raises(PolicyError, match=r"nor a checkpoint of its own in .*or that folder cannot be read"):
        pearl.load_policy(run)


def test_a_run_under_way_is_loaded_from_its_checkpoint(tmp_path: Path) -> None:
    case = CASES["DDPG"]
    trainer, best = trained(case, 1), trained(case, 2)
    run_folder(tmp_path, case, trainer)
    (tmp_path / "weights.safetensors").unlink()
    storage = DataStorage(TransitionSpec.from_spaces(case[1], case[2]), 8)
    state = RunState({}, trainer, ReplayExperience(NativeReplayManager(8, seed=1), storage))
    counters = Counters(env_steps=70, gradient_steps=20)
    state.save(tmp_path / "checkpoints", counters)
    obs = observations(case[1], 5)
    np.testing.assert_allclose(pearl.load_policy(tmp_path).predict(obs), greedy(trainer, obs, case), rtol=1e-4)
    with pytest.raises(PolicyError, match="no best weights"):
        pearl.load_policy(tmp_path, "best")
    state.save(tmp_path / "checkpoints", counters, Best(1.0, 3, 50, 10, module_tensors(best)))
    found = pearl.load_policy(tmp_path)
    assert (found.origin.which, found.origin.step) == ("best", 50)
    np.testing.assert_allclose(found.predict(obs), greedy(best, obs, case), rtol=1e-4)
    last = pearl.load_policy(tmp_path, "last")
    assert (last.origin.which, last.origin.step) == ("last", 70)
    np.testing.assert_allclose(last.predict(obs), greedy(trainer, obs, case), rtol=1e-4)
    (weights,) = tmp_path.glob("checkpoints/*-r2/tensors/best-actor.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    with pytest.raises(CheckpointError, match=r"best-actor.*CRC-32"):
        pearl.load_policy(tmp_path)
