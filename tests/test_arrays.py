"""Built-in algorithms in arrays: the same as in torch, which comes only when something needs it."""

from __future__ import annotations

import copy
import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from programs import ONE_CPU, described, write_csv_pair
from test_native_learner import random_masks
from torch import nn
from trainers import TinyDQN, TinyPPO, TinySAC

from composer import Composer
from pearl.action_masks import mask_parts
from pearl.actors.native_policy import NativePolicy
from pearl.actors.policy_plan import read_policy
from pearl.algorithms import A2C, DDPG, DQN, PPO, QRDQN, REDQ, SAC, TD3, TQC, DroQ, Trainer
from pearl.algorithms.arrays import ArrayAdam, ArrayModule, TorchRandom
from pearl.algorithms.trainer import make_trainer, policy_snapshot, uses_masks
from pearl.backends.cpu.learner import NativeLearner
from pearl.backends.cpu.rollout_learner import NativeRolloutLearner
from pearl.errors import CheckpointError, TrainerError
from pearl.learner.extract import extract_networks, structure_of
from pearl.learner.torch_learner import TorchLearner
from pearl.runtime.outcome import save_weights
from pearl.runtime.trainer_state import check_module_tensors, load_module_tensors, module_tensors
from pearl.spec import ACTION_MASK, NEXT_ACTION_MASK

SEED = 11


def box(*shape: int) -> spaces.Box:
    return spaces.Box(np.full(shape, -2, np.float32), np.full(shape, 3, np.float32))


def pixels(*shape: int) -> spaces.Box:
    return spaces.Box(0, 255, shape, np.uint8)


Case = tuple[type[Trainer], gym.Space[Any], gym.Space[Any], dict[str, Any]]
CASES: list[Case] = [
    (DQN, box(4), spaces.Discrete(3), {}),
    (DQN, box(2, 3), spaces.Discrete(3), {"dueling": True}),
    (DQN, box(4), spaces.Discrete(2), {"dueling": True, "hidden_sizes": (7,), "tau": 0.01}),
    (DQN, box(2, 3), spaces.Discrete(3), {"layer_norm": True, "hidden_sizes": (7, 5)}),
    (DQN, box(4), spaces.Discrete(2), {"layer_norm": True, "dueling": True, "hidden_sizes": (7, 5)}),
    (DQN, box(4), spaces.Discrete(2, start=5), {"hidden_sizes": ()}),
    (DQN, pixels(2, 36, 40), spaces.Discrete(3), {"dueling": True, "hidden_sizes": (8,)}),
    (DQN, pixels(3, 12, 9), spaces.Discrete(2), {"cnn": "impala"}),
    (DQN, pixels(3, 4), spaces.Discrete(2), {}),
    (DQN, box(4), spaces.Discrete(3), {"action_masks": True}),
    (QRDQN, box(4), spaces.Discrete(3), {"action_masks": True, "num_quantiles": 6, "hidden_sizes": (7,)}),
    (QRDQN, pixels(2, 36, 40), spaces.Discrete(3), {"num_quantiles": 5, "double": True}),
    (DDPG, box(4), box(2), {"scale_observations": True}),
    (DQN, box(2, 3), spaces.Discrete(3), {"normalize_observations": True, "reward_standardization": "returns"}),
    (TD3, box(3), box(1), {}),
    (SAC, box(3), box(2), {}),
    (SAC, box(2, 2), box(2), {"temperature": 0.2}),
    (REDQ, box(3), box(2), {"num_critics": 4, "policy_delay": 2}),
    (TQC, box(3), box(2), {"num_critics": 3, "num_quantiles": 5, "dropped_quantiles": 1, "hidden_sizes": (9, 7)}),
    (DroQ, box(3), box(2), {"hidden_sizes": (9, 7), "policy_delay": 2, "dropout": 0.2}),
    (PPO, box(4), spaces.Discrete(2), {}),
    (PPO, box(4), box(2), {"shared_layers": True, "normalize_observations": True, "activation": "relu"}),
    (PPO, box(2, 3), spaces.MultiDiscrete([2, 3]), {"hidden_sizes": (8,), "orthogonal": False}),
    (PPO, box(4), spaces.MultiBinary(3), {"hidden_sizes": (8,)}),
    (PPO, box(4), spaces.MultiDiscrete([2, 3]), {"hidden_sizes": (8,), "action_masks": True}),
    (A2C, box(4), box(3), {"learning_rate_schedule": "linear"}),
]
IDS = [f"{number}-{case[0].__name__}" for number, case in enumerate(CASES)]
every_case = pytest.mark.parametrize("case", CASES, ids=IDS)
_REPLAYED = [(case, name) for case, name in zip(CASES, IDS, strict=True) if case[0].data_flow() == "replay"]
replay_case = pytest.mark.parametrize("case", [case for case, _ in _REPLAYED], ids=[name for _, name in _REPLAYED])


def in_arrays(case: Case) -> Trainer:
    kind, observations, actions, settings = case
    trainer = make_trainer(kind, observations, actions, seed=SEED, settings=settings)
    assert isinstance(trainer, Trainer)
    assert trainer.arrays is not None
    return trainer


def in_torch(case: Case) -> Trainer:
    """The same of a class with code of its own, for which torch draws and makes everything."""
    kind, observations, actions, settings = case
    own = type("Own", (kind,), {"own_method": lambda self: 1})
    trainer = make_trainer(own, observations, actions, seed=SEED, settings=settings)
    assert isinstance(trainer, Trainer)
    assert trainer.arrays is None
    return trainer


def seen(trainer: Trainer, rows: int, random: np.random.Generator) -> np.ndarray:
    """Observations."""
    shape = (rows, *trainer.input_shape)
    if trainer.observation_space.dtype == np.uint8:
        return random.integers(0, 256, shape, np.uint8)
    return random.standard_normal(shape).astype(np.float32)


def batch_of(trainer: Trainer, seed: int, rows: int = 32) -> tuple[dict[str, np.ndarray], np.ndarray]:
    random = np.random.default_rng(seed)
    actions = np.stack([trainer.action_space.sample() for _ in range(rows)])
    if isinstance(trainer.action_space, spaces.Discrete):
        actions = actions - trainer.action_space.start
    batch = {
        "obs": seen(trainer, rows, random),
        "action": actions,
        "reward": random.standard_normal(rows).astype(np.float32),
        "next_obs": seen(trainer, rows, random),
        "discount": np.where(random.random(rows) < 0.1, 0.0, 0.99).astype(np.float32),
    }
    if uses_masks(trainer):
        batch[NEXT_ACTION_MASK] = random_masks(random, rows, mask_parts(trainer.action_space))
    return batch, random.random(rows).astype(np.float32)


def rollout_of(trainer: Trainer, seed: int, rows: int = 64) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    actions = np.stack([trainer.action_space.sample() for _ in range(rows)])
    if actions.dtype.kind == "i":
        actions = actions.astype(np.int64)  # as they are stored, also those of MultiBinary
    numbers = {name: random.standard_normal(rows).astype(np.float32) for name in ("advantage", "ret", "log_prob")}
    masks = {ACTION_MASK: random_masks(random, rows, mask_parts(trainer.action_space))} if uses_masks(trainer) else {}
    return {
        "obs": random.standard_normal((rows, *trainer.input_shape)).astype(np.float32),
        "action": actions,
        **numbers,
        **masks,
    }


def trained(trainer: Trainer, steps: int = 3, learner: Any = None) -> Any:
    """Trained natively for a few steps, on the same data for all trainers of a case."""
    trainer.action_space.seed(3)
    if isinstance(trainer, PPO):
        learner = learner or NativeRolloutLearner(trainer, epochs=2, batch_size=16)
        for step in range(steps):
            rollout = rollout_of(trainer, step)
            trainer.set_progress(step / 10)
            learner.train(rollout)
            trainer.take_in(rollout["obs"])
        return learner
    learner = learner or NativeLearner(trainer)
    for step in range(steps):
        learner.step(*batch_of(trainer, step))
    return learner


def assert_same(found: Any, expected: Any, tolerance: float) -> None:
    """Groups of tensors or arrays, by their names, shapes, dtypes and values."""
    assert found.keys() == expected.keys()
    for group, tensors in expected.items():
        assert found[group].keys() == tensors.keys()
        for name, tensor in tensors.items():
            ours, theirs = np.asarray(found[group][name]), np.asarray(tensor)
            assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype), (group, name)
            np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=tolerance, err_msg=f"{group}.{name}")


@every_case
def test_arrays_begin_as_torch_begins(case: Case) -> None:
    # torch's orthogonal weights come from another LAPACK; all others are the same to the bit.
    tolerance = 1e-5 if getattr(in_arrays(case), "orthogonal", False) else 0.0
    assert_same(module_tensors(in_arrays(case)), module_tensors(in_torch(case)), tolerance)
    assert_same(module_tensors(in_arrays(case).in_torch()), module_tensors(in_arrays(case)), 0.0)


@every_case
def test_policies_and_learners_do_the_same_in_arrays_and_in_torch(case: Case) -> None:
    ours, theirs = in_arrays(case), in_torch(case)
    with torch.no_grad():  # the same weights, to the bit
        load_module_tensors(theirs, module_tensors(ours))
    plans = [read_policy(trainer) for trainer in (ours, theirs)]
    obs = seen(ours, 9, np.random.default_rng(1))
    acted = [NativePolicy(plan).act(obs) for plan in plans]
    np.testing.assert_array_equal(*acted)
    learners = trained(ours), trained(theirs)
    assert ours.arrays is not None, "training natively needs no torch"
    assert_same(
        module_tensors(ours), module_tensors(theirs), 0.0 if not ours.__dict__.get("normalize_observations") else 1e-6
    )
    snapshots = [np.zeros(learner.weight_count, np.float32) for learner in learners]
    for learner, snapshot in zip(learners, snapshots, strict=True):
        learner.write_weights(snapshot)
    np.testing.assert_allclose(*snapshots, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(snapshots[0], policy_snapshot(ours))


@every_case
def test_torch_comes_to_the_memory_that_the_learner_trains(case: Case) -> None:
    trainer, other = in_arrays(case), in_arrays(case)
    learner, apart = trained(trainer), trained(other)
    before = module_tensors(trainer)
    trainer.in_torch()
    assert_same(module_tensors(trainer), before, 0.0)
    trained(trainer, learner=learner)
    trained(other, learner=apart)
    assert_same(module_tensors(trainer), module_tensors(other), 1e-6)


@replay_case
def test_a_torch_learner_goes_on_where_the_native_one_ended(case: Case) -> None:
    trainer, other = in_arrays(case), in_arrays(case)
    trained(trainer)
    trained(trainer, learner=TorchLearner(trainer, device="cpu"))
    trained(other, learner=trained(other))
    assert trainer.gradient_steps == other.gradient_steps == 6
    assert_same(module_tensors(trainer), module_tensors(other), 2e-4)


@every_case
def test_a_state_goes_into_arrays_and_into_torch(case: Case) -> None:
    trained(trainer := in_arrays(case))
    state = module_tensors(trainer)
    trained(trainer)
    load_module_tensors(trainer, state)
    assert_same(module_tensors(trainer), state, 0.0)
    assert trainer.arrays is not None
    load_module_tensors(other := in_arrays(case).in_torch(), state)
    assert_same(module_tensors(other), state, 0.0)
    tensors = {group: {k: torch.as_tensor(v) for k, v in content.items()} for group, content in state.items()}
    load_module_tensors(third := in_arrays(case), tensors)
    assert_same(module_tensors(third), state, 0.0)


@pytest.mark.parametrize(
    "damage",
    [
        lambda group: group.update({"state/0/exp_avg": group["state/0/exp_avg"][:1]}),
        lambda group: group.update({"state/0/step": np.array(np.nan, np.float32)}),
        lambda group: group.pop("state/0/exp_avg_sq"),
    ],
    ids=["a shape", "a count of steps", "a missing array"],
)
def test_a_damaged_state_of_an_optimizer_is_refused_and_nothing_is_loaded(damage: Callable[[Any], object]) -> None:
    trained(trainer := in_arrays(CASES[0]))
    state = module_tensors(trainer)
    (name,) = (group for group, tensors in state.items() if "state/0/exp_avg" in tensors)
    damage(state[name])
    for refusing in (check_module_tensors, load_module_tensors):
        before = module_tensors(other := in_arrays(CASES[0]))
        with pytest.raises(CheckpointError, match=name):
            refusing(other, state)
        assert_same(module_tensors(other), before, 0.0)


@every_case
def test_weights_are_written_alike(case: Case, tmp_path: Path) -> None:
    trainer = in_arrays(case)
    save_weights(trainer, tmp_path / "arrays")
    save_weights(trainer.in_torch(), tmp_path / "torch")
    assert (tmp_path / "arrays").read_bytes() == (tmp_path / "torch").read_bytes()


def test_a_learner_notices_when_torch_gives_the_weights_other_memory() -> None:
    trainer = in_arrays(CASES[0])
    learner = trained(trainer)
    trainer.q.double()
    with pytest.raises(TrainerError, match="were given other memory"):
        learner.step(*batch_of(trainer, 0))


def test_a_replaced_network_needs_torch_first() -> None:
    trainer = in_arrays(CASES[0])
    network = nn.Linear(4, 3)
    trainer.q = network
    assert trainer.arrays is None
    assert trainer.q is network
    assert isinstance(trainer.target_q, nn.Module)


def test_an_optimizers_settings_count_once_torch_is_there() -> None:
    trainer, other = in_arrays(CASES[0]), in_arrays(CASES[0])
    learner, apart = trained(trainer), trained(other)
    for group in trainer.optimizer.param_groups:
        group["lr"] = 0.0
    trained(trainer, learner=learner)
    trained(other, learner=apart)
    q = trainer.q.state_dict()
    assert all(bool((q[name] == tensor).all()) for name, tensor in trained_copy(CASES[0]).items())
    assert not all(bool((q[name] == tensor).all()) for name, tensor in other.q.state_dict().items())


def trained_copy(case: Case) -> dict[str, torch.Tensor]:
    trained(trainer := in_arrays(case))
    state: dict[str, torch.Tensor] = trainer.q.state_dict()
    return state


def test_a_copy_has_weights_of_its_own() -> None:
    trainer = in_arrays(CASES[0])
    other = copy.deepcopy(trainer)
    before = module_tensors(trainer)
    trained(other)
    assert_same(module_tensors(trainer), before, 0.0)
    assert not np.array_equal(policy_snapshot(trainer), policy_snapshot(other))


class Settings(DQN):
    """Changes settings only."""

    hidden_sizes = (16,)
    own_number = 3


class OverridesAMethod(DQN):
    def finish_step(self) -> None:
        pass


class HasAProperty(DQN):
    @property
    def number(self) -> int:
        return 1


class HasAConstructor(DQN):
    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)


@pytest.mark.parametrize(
    ("kind", "expected"), [(Settings, True), (OverridesAMethod, False), (HasAProperty, False), (HasAConstructor, False)]
)
def test_only_settings_may_differ_in_arrays(kind: type[DQN], expected: bool) -> None:
    trainer = kind(box(4), spaces.Discrete(2))
    assert (trainer.arrays is not None) == expected
    assert isinstance(trainer.q, nn.Module)


def test_images_and_bytes_of_other_algorithms_need_torch() -> None:
    assert SAC(pixels(7), box(1)).arrays is None
    assert PPO(pixels(1, 36, 36), spaces.Discrete(2)).arrays is None


@pytest.mark.parametrize("seed", [0, 1, 2**40 + 7, -3])
def test_random_numbers_are_those_of_torch(seed: int) -> None:
    torch.manual_seed(seed)
    ours = TorchRandom(seed)
    for inputs, outputs in ((4, 64), (3, 7), (17, 5)):
        layer = nn.Linear(inputs, outputs)
        weight, bias = ours.linear(inputs, outputs)
        np.testing.assert_allclose(weight, layer.weight.detach().numpy(), rtol=2e-7, atol=1e-8)
        np.testing.assert_allclose(bias, layer.bias.detach().numpy(), rtol=2e-7, atol=1e-8)
    assert ours.integer(2**62) == int(torch.randint(2**62, ()))
    for shape in ((3,), (5,), (16,), (4, 10), (7,)):
        np.testing.assert_allclose(ours.normal(shape), torch.empty(shape).normal_().numpy(), rtol=1e-5, atol=1e-6)
    for shape in ((5, 3), (3, 5), (8, 8)):
        expected = nn.init.orthogonal_(torch.empty(shape), 0.5).numpy()
        np.testing.assert_allclose(ours.orthogonal(shape, 0.5), expected, rtol=1e-4, atol=1e-5)
    assert ours.integer(2**62) == int(torch.randint(2**62, ()))


def test_an_optimizers_state_is_torchs() -> None:
    parameter = nn.Parameter(torch.zeros(5))
    expected = torch.optim.Adam([parameter], lr=0.1, eps=1e-5, fused=True).state_dict()
    found = ArrayAdam((5,), 0.1, eps=1e-5)
    assert found.state_dict() == expected
    assert list(found.param_groups[0]) == list(expected["param_groups"][0])


def test_the_structure_of_arrays_tells_networks_apart_without_torch() -> None:
    spaces_of = gym.make("CartPole-v1")
    made = [
        make_trainer(DQN, spaces_of.observation_space, spaces_of.action_space, settings=settings)
        for settings in ({"hidden_sizes": (64, 64)}, {"hidden_sizes": (64, 32)}, {"dueling": True})
    ]
    texts = {structure_of(trainer) for trainer in made}
    assert len(texts) == 3
    assert all(trainer.arrays is not None for trainer in made)
    assert "q:0.weight64x4 q:0.bias64" in structure_of(made[0])
    assert structure_of(made[0].in_torch()) == extract_networks(made[0])[0].signature


def test_composing_needs_no_torch_where_the_native_learner_is_far_faster(tmp_path: Path) -> None:
    devices, connections = write_csv_pair(tmp_path, ONE_CPU)
    text = f"""
import sys
from composer import Composer
from pearl.algorithms import SAC
composer = Composer(calibration={str(tmp_path / "calibration.json")!r})
composer.set_device_file({str(devices)!r})
composer.set_connection_file({str(connections)!r})
composer.set_actors(1, env="Pendulum-v1", envs_per_actor=1)
composer.set_train_function(learner=SAC, hidden_sizes=(8, 8), batch_size=4)
composer.set_replay(1000)
composer.run()
composer.runtime_gen(path={str(tmp_path / "program.py")!r})
assert "torch" not in sys.modules
assert composer.networks[0].parameters > 0
"""
    environment = {name: value for name, value in os.environ.items() if name != "PEARL_BUDGET_S"}
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, env=environment, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "the torch Learner is left out (not measured: " in done.stdout


def test_modules_name_what_they_lack() -> None:
    with pytest.raises(AttributeError, match="ArrayModule has no 'absent'"):
        ArrayModule().absent  # noqa: B018


IMPORTING_NOTHING = """
import sys
absent = {"torch", "jinja2", "pandas", "matplotlib", "tensorboard", "rich"}
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name in absent:
            raise ImportError(f"{name} is not to be imported here")
sys.meta_path.insert(0, Absent())
import runpy
from pearl.runtime.flow_control import FlowControl
trained = FlowControl.trained
def first(self, *args, **kwargs):
    print("first training step without", *sorted(absent))
    absent.difference_update({"pandas", "matplotlib", "tensorboard", "rich"})
    FlowControl.trained = trained
    return trained(self, *args, **kwargs)
FlowControl.trained = first
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
USERS_SCRIPT = """
import numpy as np
from gymnasium.envs.classic_control import CartPoleEnv
from composer import Composer
from pearl.algorithms import {algorithm}

class Mine({algorithm}):
    {settings}

# Where the pole leans far to one side, only the push to that side is allowed.
class MaskedPole(CartPoleEnv):
    def action_masks(self):
        angle = self.state[2]
        return np.array([angle < 0.1, angle > -0.1])

    def step(self, action):
        assert self.action_masks()[action]
        return super().step(action)

if __name__ == "__main__":
    composer = Composer()
"""


@pytest.mark.parametrize(
    ("tiny", "masked"),
    [
        (TinySAC, False),
        (TinyDQN, True),
        pytest.param(TinyPPO, True, marks=pytest.mark.slow),
        pytest.param(TinyDQN, False, marks=pytest.mark.slow),
        pytest.param(TinyPPO, False, marks=pytest.mark.slow),
    ],
)
def test_a_program_trains_evaluates_and_saves_without_torch(
    tiny: type[Trainer], masked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    algorithm = tiny.__bases__[0].__name__
    settings = {name: value for name, value in vars(tiny).items() if name[0] != "_" and name != "exploration"}
    settings |= {"action_masks": True} if masked else {}
    script = tmp_path / "users_script.py"
    lines = "\n    ".join(f"{name} = {value!r}" for name, value in settings.items())
    script.write_text(USERS_SCRIPT.format(algorithm=algorithm, settings=lines), encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module("users_script")
    mine, env = module.Mine, "Pendulum-v1" if tiny is TinySAC else "CartPole-v1"
    env = module.MaskedPole if masked else env
    files = write_csv_pair(tmp_path, ONE_CPU)
    if tiny is TinyPPO:
        composer = Composer(progress=False)
        composer.set_device_file(files[0])
        composer.set_connection_file(files[1])
        composer.set_actors(1, env=env, envs_per_actor=4)
        composer.set_train_function(learner=mine)
        composer.set_rollout()
    else:
        composer = described(files, trainer=mine, env=env)
    program = composer.runtime_gen(*composer.run(budget_s=0), tmp_path / "program.py", timesteps=600)
    sys.modules.pop("users_script")
    out = tmp_path / "run"
    common = ("--eval-interval", "300", "--eval-episodes", "2", "--run-dir", str(out))

    def trained(*options: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", IMPORTING_NOTHING, str(program), *common, *options],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "first training step without jinja2 matplotlib pandas rich tensorboard torch" in done.stdout
        return done.stdout

    trained()
    assert {path.name for path in out.iterdir()} >= {"weights.safetensors", "best_weights.safetensors", "summary.json"}
    assert "Resumed" in trained("--resume", "--timesteps", "900")
