"""The Learner's contract, for every implementation alike.

Gradients are compared with those of float64 in the file of each implementation. The FPGA's Learner trains by another
rule where there is a critic, and each network is a compiled program: tests/test_fpga_learner.py has the rest of it.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from references import CUDA, without_biases
from test_native_actor_critic import ACTIONS as BOX
from test_native_actor_critic import assert_alike, small
from test_native_actor_critic import batch_of as actions_batch
from test_native_learner import ACTIONS, OBS, SETTINGS, Small, WithLayerNorm, batch_of, one_torch_thread

from pearl.algorithms import ALGORITHMS, DDPG, DQN, SAC, TD3, Trainer
from pearl.backends import learners
from pearl.backends.sycl.selector import EMULATOR_SELECTOR
from pearl.errors import TrainerError
from pearl.ipc.queues import Bell, WeightSyncQueue
from pearl.learner.protocol import StepResult
from pearl.learner.torch_learner import TorchLearner, load_policy_weights
from pearl.replay.reference import ReferenceReplayManager
from pearl.replay.storage import DataStorage
from pearl.runtime.trainer_state import load_module_tensors, module_tensors
from pearl.runtime.workers import GrantQueue, ProgressQueue
from pearl.spec import TransitionSpec

pytestmark = pytest.mark.usefixtures(one_torch_thread.__name__)

# Implementations, some with more threads, and what they are made with.
LEARNERS: dict[str, dict[str, Any]] = {
    "torch": {},
    "native": {},
    "native, 3 threads": {"threads": 3},
    "sycl": {"device": "opencl:cpu"},
    "cuda": {"device": CUDA},
    "fpga": {"device": EMULATOR_SELECTOR},
}
ON_HOST_CORES = ("native", "native, 3 threads", "sycl", "cuda")  # train by the trainer's own rule

ON_DEVICES = ("sycl", "cuda")


def each(*names: str, fpga: tuple[Any, ...] = (pytest.mark.fpga, pytest.mark.slow)) -> pytest.MarkDecorator:
    marks = {"sycl": (pytest.mark.sycl,), "fpga": fpga}
    return pytest.mark.parametrize("name", [pytest.param(name, marks=marks.get(name, ())) for name in names])


each_learner = each(*LEARNERS)
each_learner_untrained = each(*LEARNERS, fpga=(pytest.mark.fpga,))  # nothing is compiled
each_on_kernels = each(*ON_HOST_CORES, "fpga")
each_on_host_cores = each(*ON_HOST_CORES)

Make = Callable[[str, Any], Any]


@pytest.fixture
def made() -> Iterator[Make]:
    """`made("native", trainer)`: a Learner, prepared."""
    found: list[Any] = []

    def make(name: str, trainer: object) -> Any:
        found.append(learners()[name.partition(",")[0]].make(trainer, **LEARNERS[name]))
        found[-1].prepare()
        torch.set_num_threads(1)
        return found[-1]

    yield make
    for learner in found:
        getattr(learner, "close", lambda: None)()


def trainer_of(case: str, seed: int = 0, **settings: Any) -> Any:
    """`case` is an algorithm, or a class of DQN with one of `SETTINGS`: "Small, AMSGrad"."""
    kind, _, named = case.partition(", ")
    if kind in ALGORITHMS:
        return small(ALGORITHMS[kind], seed=seed, **settings)
    dqn = {"Small": Small, "WithLayerNorm": WithLayerNorm}[kind]
    return dqn(OBS, ACTIONS, seed=seed, **{**SETTINGS[named or "default"], **settings})


def batch_for(case: str, seed: int, rows: int = 40) -> tuple[dict[str, np.ndarray], np.ndarray]:
    return actions_batch(seed, rows) if case in ALGORITHMS else batch_of(seed, rows)


def assert_same_optimizers(ours: object, theirs: object) -> None:
    for name, value in vars(theirs).items():
        if isinstance(value, torch.optim.Optimizer):
            for found, expected in zip(getattr(ours, name).state.values(), value.state.values(), strict=True):
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_every_implementation_is_held_to_the_contract() -> None:
    assert {name.partition(",")[0] for name in LEARNERS} == set(learners())


# --- weights ----------------------------------------------------------------------------------------------------------


@each_learner_untrained
def test_weights_travel_from_one_learner_to_another(name: str, made: Make) -> None:
    first, second = (made(name, Small(OBS, ACTIONS, seed=seed)) for seed in (1, 2))
    weights = np.zeros((2, first.weight_count), np.float32)
    first.write_weights(weights[0])
    second.write_weights(weights[1])
    assert not np.array_equal(*weights)
    second.load_weights(weights[0])
    second.write_weights(weights[1])
    np.testing.assert_array_equal(*weights)
    for wrong in (weights[0, 1:], np.zeros(0, np.float32), weights):
        with pytest.raises(TrainerError, match="found"):
            second.load_weights(wrong)


@each_learner
def test_the_snapshot_is_the_policy(name: str, made: Make) -> None:
    trainer, other = Small(OBS, ACTIONS), Small(OBS, ACTIONS, seed=5)
    learner = made(name, trainer)
    snapshots = np.zeros((2, learner.weight_count), np.float32)
    learner.write_weights(snapshots[0])
    learner.step(*batch_of(0))
    learner.write_weights(snapshots[1])
    assert not np.array_equal(*snapshots)
    load_policy_weights(other, snapshots[1])
    obs = torch.randn(20, 6)
    assert torch.equal(other.q(obs), trainer.q(obs))


@each_learner
def test_a_step_takes_the_rate_that_a_schedule_set(name: str, made: Make) -> None:
    trainer = Small(OBS, ACTIONS, learning_rate_schedule=((0.0, 1.0), (0.5, 0.0), (1.0, 0.5)))
    learner = made(name, trainer)
    snapshots = np.zeros((4, learner.weight_count), np.float32)
    learner.write_weights(snapshots[0])
    for number, progress in enumerate((0.1, 0.5, 0.9), start=1):
        trainer.set_progress(progress)
        learner.step(*batch_of(number))
        learner.write_weights(snapshots[number])
    moved = [not np.array_equal(before, after) for before, after in itertools.pairwise(snapshots)]
    assert moved == [True, False, True]


# --- a step -----------------------------------------------------------------------------------------------------------


@each_learner
def test_a_step_gives_a_priority_for_each_row_and_leaves_the_batch_as_it_is(name: str, made: Make) -> None:
    learner = made(name, Small(OBS, ACTIONS))
    (batch, weights), (kept, _) = batch_of(0), batch_of(0)
    result = learner.step(batch, weights)
    assert isinstance(result, StepResult)
    priorities, td_error, metrics, gradients = result
    assert gradients is None  # unless the Learner is made to keep them
    assert (priorities.shape, priorities.dtype) == ((50,), np.float32)
    assert (priorities >= 0).all()
    assert isinstance(td_error, float)
    assert td_error == metrics["td_error"] == pytest.approx(np.abs(priorities).mean(), rel=1e-4)
    assert all(np.array_equal(batch[column], kept[column]) for column in kept)
    before = priorities.copy()
    for column in batch.values():
        column.fill(0)
    learner.step(*batch_of(1))
    assert np.array_equal(priorities, before), "a later step must not write to them"


@each_learner
def test_equal_runs_have_equal_bits(name: str, made: Make) -> None:
    def weights() -> torch.Tensor:
        trainer = Small(OBS, ACTIONS, seed=3, dueling=name != "fpga")  # whose pipeline has no such heads
        learner = made(name, trainer)
        for seed in range(20):
            learner.step(*batch_of(seed, rows=93 - 40 * (seed % 3)))  # nothing of a larger batch remains
        return trainer._q_flat.parameter.detach()

    assert torch.equal(weights(), weights())


@each_on_kernels
def test_batches_may_change_in_size(name: str, made: Make) -> None:
    ours, theirs = (Small(OBS, ACTIONS) for _ in range(2))
    learner, reference = made(name, ours), TorchLearner(theirs)
    for rows in (100, 3) if name == "fpga" else (1, 15, 16, 17, 100, 3):
        found, expected = (each.step(*batch_of(rows, rows)) for each in (learner, reference))
        np.testing.assert_allclose(found.priorities, expected.priorities, rtol=1e-4, atol=1e-5)
    assert_alike(ours, theirs, 1e-4)


@each_on_host_cores
@pytest.mark.parametrize("case", ["Small, dueling, Polyak", "TD3", "SAC"])
def test_what_a_larger_batch_left_does_not_count(name: str, case: str, made: Make) -> None:
    ours, theirs = (trainer_of(case) for _ in range(2))
    learner, reference = made(name, ours), TorchLearner(theirs)
    for rows in (300, 5):
        for each in (learner, reference):
            each.step(*batch_for(case, rows, rows))
    assert_alike(ours, theirs, 1e-4)


# --- training as torch does -------------------------------------------------------------------------------------------


@each_on_host_cores
@pytest.mark.parametrize("case", ["Small", "Small, AMSGrad", "Small, SGD, Nesterov", "DDPG", "TD3", "SAC"])
def test_steps_may_take_turns_with_torchs(name: str, case: str, made: Make) -> None:
    ours, theirs = (trainer_of(case) for _ in range(2))
    both, reference = (made(name, ours), TorchLearner(ours)), TorchLearner(theirs)
    for step in range(15):
        both[step // 3 % 2].step(*batch_for(case, step))
        reference.step(*batch_for(case, step))
    assert_alike(ours, theirs, 1e-4 if name in ON_DEVICES else 1e-5)
    assert ours.gradient_steps == 15
    assert_same_optimizers(ours, theirs)


@each_on_host_cores
@pytest.mark.parametrize("case", ["Small", "DDPG", "TD3", "SAC"])
def test_a_checkpoint_resumes_to_the_same_bits(name: str, case: str, made: Make) -> None:
    # `resumed` has stepped before the state is loaded, which replaces the optimizer's tensors.
    straight, saved, resumed = (trainer_of(case, seed) for seed in (1, 1, 2))
    whole, first, second = (made(name, trainer) for trainer in (straight, saved, resumed))
    second.step(*batch_for(case, 99))
    for seed in range(10):
        whole.step(*batch_for(case, seed))
        (first if seed < 5 else second).step(*batch_for(case, seed))
        if seed == 4:
            load_module_tensors(resumed, module_tensors(saved))
            resumed.gradient_steps = saved.gradient_steps
    assert_alike(resumed, straight, 0.0)


@each_on_host_cores
@pytest.mark.parametrize(
    ("algorithm", "changed"),
    [
        ("DDPG", {"saturation_penalty": 3.0, "max_grad_norm": 0.1, "tau": 0.6}),
        ("TD3", {"policy_delay": 3, "target_noise": 1.0, "noise_clip": 0.3}),
        ("TD3", {"policy_delay": 1, "target_noise": 0.0}),
        ("SAC", {"temperature": 0.3}),
        ("SAC", {"temperature": 0.0}),
        ("SAC", {"target_entropy": 1.0, "log_std_bounds": (-1.0, 0.1), "max_grad_norm": 0.2}),
    ],
)
def test_settings_are_those_of_the_trainer(name: str, algorithm: str, changed: dict[str, Any], made: Make) -> None:
    ours, theirs = (trainer_of(algorithm, **changed) for _ in range(2))
    learner, reference = made(name, ours), TorchLearner(theirs)
    for seed in range(12):  # TD3's actor moves in every third
        found, expected = (each.step(*actions_batch(seed)) for each in (learner, reference))
        np.testing.assert_allclose(found.priorities, expected.priorities, rtol=1e-3, atol=1e-3)
        for metric, value in expected.metrics.items():
            assert found.metrics[metric] == pytest.approx(value, rel=1e-3)
    assert_alike(ours, theirs, 1e-3 if name in ON_DEVICES else 1e-4)


@each_on_host_cores
def test_settings_may_change_between_steps(name: str, made: Make) -> None:
    ours, theirs = (trainer_of("Small, SGD") for _ in range(2))
    for trainer in (ours, theirs):
        with torch.no_grad():  # so that the target network chooses other actions
            list(trainer.target_q.parameters())[-1][0] += 1.0
    learner, reference = made(name, ours), TorchLearner(theirs)
    for step in range(8):
        for trainer in (ours, theirs):
            trainer.max_grad_norm = 0.05 if step >= 5 else 0.0
            trainer.double = step % 4 < 2
        found, expected = (each.step(*batch_of(step)) for each in (learner, reference))
        np.testing.assert_allclose(found.priorities, expected.priorities, rtol=1e-4, atol=1e-5)
    assert_alike(ours, theirs, 1e-5)


@each_on_host_cores
@pytest.mark.parametrize("max_grad_norm", [0.0, 0.05])
@pytest.mark.parametrize("bare", [(0, 1), (1,)])
@pytest.mark.parametrize("algorithm", [DQN, DDPG, TD3, SAC])
def test_layers_without_biases_train_as_in_torch(
    name: str, algorithm: type[Trainer], bare: tuple[int, ...], max_grad_norm: float, made: Make
) -> None:
    kind, actions = without_biases(algorithm, bare), ACTIONS if algorithm is DQN else BOX
    ours, theirs = (kind(OBS, actions, hidden_sizes=(9,), max_grad_norm=max_grad_norm) for _ in range(2))
    for trainer in (ours, theirs):
        for attribute, value in vars(trainer).items():
            if attribute.endswith("optimizer"):
                setattr(trainer, attribute, torch.optim.SGD(value.param_groups[0]["params"], lr=0.1))
    learner, reference = made(name, ours), TorchLearner(theirs)
    for seed in range(6):
        for trained in (learner, reference):
            trained.step(*batch_for("Small" if algorithm is DQN else "DDPG", seed))
    assert_alike(ours, theirs, 2e-5)


# --- what goes wrong --------------------------------------------------------------------------------------------------


@each_on_host_cores
@pytest.mark.parametrize("max_grad_norm", [0.0, 10.0])
@pytest.mark.parametrize("case", ["Small", "DDPG", "TD3", "SAC"])
def test_a_step_that_diverges_raises_and_changes_nothing(
    name: str, case: str, max_grad_norm: float, made: Make
) -> None:
    trainer = trainer_of(case, tau=0.5, max_grad_norm=max_grad_norm)
    learner = made(name, trainer)
    for seed in range(2):  # TD3's actor moves in the second
        learner.step(*batch_for(case, seed))
    before = copy.deepcopy(module_tensors(trainer))
    said = r"diverged: the .*loss is -?(nan|inf).*weights were left as they were"
    said = "diverged on" if name in ON_DEVICES else said
    for column, value in (("reward", np.nan), ("obs", np.inf), ("next_obs", np.nan), ("weights", np.nan)):
        batch, weights = batch_for(case, 2)
        (weights if column == "weights" else batch[column])[17] = value
        with pytest.raises(TrainerError, match=said):
            learner.step(batch, weights)
        assert trainer.gradient_steps == 2
        for group, tensors in module_tensors(trainer).items():
            assert all(torch.equal(before[group][key], tensor) for key, tensor in tensors.items()), (column, group)
    if max_grad_norm:  # a finite loss, whose gradients are too large for their norm
        batch, weights = batch_for(case, 2)
        weights[17] = 1e25
        with pytest.raises(TrainerError, match="diverged"):
            learner.step(batch, weights)
        assert all(torch.equal(before[g][k], t) for g, ts in module_tensors(trainer).items() for k, t in ts.items())
    assert np.isfinite(learner.step(*batch_for(case, 2)).priorities).all()


@each_on_kernels
def test_batches_that_do_not_fit_are_refused(name: str, made: Make) -> None:
    trainer = Small(OBS, ACTIONS)
    learner = made(name, trainer)
    before = trainer._q_flat.parameter.detach().clone()
    batch, weights = batch_of(0)
    wrong_action = batch["action"].copy()
    wrong_action[5] = 3
    for change, message in (
        ({"action": wrong_action}, r"must lie in \[0, 3\);.* at position 5"),
        ({"action": np.full(50, -1)}, r"must lie in \[0, 3\);.* at position \d+"),
        ({"action": batch["action"].astype(np.float32)}, "Column 'action' must have dtype int64; found float32"),
        ({"obs": batch["obs"].astype(np.float64)}, "Column 'obs' must have dtype float32; found float64"),
        ({"obs": np.zeros((50, 7), np.float32)}, 'obs"? must hold 50 rows'),
        ({"next_obs": np.zeros((49, 6), np.float32)}, 'next_obs"? must hold 50 rows'),
        ({"discount": np.zeros(3, np.float32)}, 'discount"? must hold 50 rows'),
    ):
        with pytest.raises(TrainerError, match=message):
            learner.step({**batch, **change}, weights)
    assert torch.equal(trainer._q_flat.parameter, before)
    assert trainer.gradient_steps == 0


@each_learner_untrained
def test_batches_without_rows_or_columns_are_refused(name: str, made: Make) -> None:
    trainer = Small(OBS, ACTIONS)
    learner = made(name, trainer)
    before = trainer._q_flat.parameter.detach().clone()
    batch, weights = batch_of(0)
    lacking = {key: column for key, column in batch.items() if key not in ("next_obs", "discount")}
    with pytest.raises(TrainerError, match=r"Small trains on .*obs, action.*; missing: next_obs, discount\."):
        learner.step(lacking, weights)
    with pytest.raises(TrainerError, match="A batch needs at least one transition"):
        learner.step({key: column[:0] for key, column in batch.items()}, weights[:0])
    assert torch.equal(trainer._q_flat.parameter, before)


@each_learner_untrained
def test_parts_of_another_device_are_not_fused(name: str, made: Make) -> None:
    learner = made(name, Small(OBS, ACTIONS))
    laq, ldq, wsq = GrantQueue(1), ProgressQueue(1, Bell()), WeightSyncQueue(learner.weight_count)
    spec = TransitionSpec.from_spaces(OBS, ACTIONS)
    for replay, storage in ((object(), object()), (ReferenceReplayManager(16), DataStorage(spec, 16))):
        assert learner.fused_loop(replay, storage, 16, (laq.native, ldq.native, wsq.native), 4) is None
        assert learner.fused_iteration(replay, storage, 16) is None


# --- long runs as torch does ------------------------------------------------------------------------------------------

# Steps and tolerance. One thread is enough of the native Learner.
LONG = {"native": (100, 2e-4), "sycl": (50, 2e-4), "cuda": (20, 2e-4)}
LONG_CASES = [*(f"Small, {named}" for named in SETTINGS), "WithLayerNorm, default", "DDPG", "TD3", "SAC"]
FURTHER_CASES = [f"WithLayerNorm, {named}" for named in SETTINGS if named != "default"]


@each(*LONG)
@pytest.mark.parametrize("case", [*LONG_CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in FURTHER_CASES)])
def test_many_steps_train_as_torchs_do(name: str, case: str, made: Make) -> None:
    # With this seed no input of an actor-critic's rectifier is 0 to rounding, where its derivative may be 0 for one
    # learner, 1 for the other, and their paths part.
    ours, theirs = (trainer_of(case, int(case in ALGORITHMS)) for _ in range(2))
    learner, reference = made(name, ours), TorchLearner(theirs)
    batches = [batch_for(case, seed) for seed in range(50)]
    steps, tolerance = LONG[name]
    for step in range(steps):
        found, expected = (each.step(*batches[step % 50]) for each in (learner, reference))
        np.testing.assert_allclose(found.priorities, expected.priorities, rtol=1e-3, atol=2e-3)
        assert found.td_error == pytest.approx(expected.td_error, rel=1e-3)
    assert ours.gradient_steps == theirs.gradient_steps == steps
    assert_alike(ours, theirs, tolerance)
