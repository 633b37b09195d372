"""Steps that the torch Learner records in CUDA graphs and replays: here by an emulation of graphs on the CPU."""

from __future__ import annotations

import contextlib
import gc
import logging
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import test_recurrent as recurrent
import torch
from emulated_cuda_graphs import EmulatedGraphs, instead_of_cuda
from gymnasium import spaces
from torch import nn

from pearl.algorithms import DDPG, DQN, QRDQN, REDQ, SAC, TD3, TQC, Batch, CrossQ, DroQ, RecurrentDQN, Trainer
from pearl.algorithms.trainer import Phase
from pearl.backends.cuda import graphs as cuda_graphs
from pearl.backends.cuda import sub_batches as parts_on_streams
from pearl.backends.cuda import torch_steps
from pearl.backends.cuda.capturable_optimizers import CapturableOptimizers
from pearl.backends.cuda.graphs import CudaGraphs
from pearl.backends.cuda.torch_steps import TorchSteps
from pearl.backends.cuda.trainer_parts import TrainerParts
from pearl.learner.protocol import StepResult
from pearl.learner.torch_learner import TorchLearner
from pearl.runtime.trainer_state import load_module_tensors, module_tensors

OBS = spaces.Box(-5.0, 5.0, (6,), np.float32)
DISCRETE, BOX = spaces.Discrete(3), spaces.Box(-2.0, 2.0, (2,), np.float32)
STEPS = 20  # enough to replay what comes in every fourth step, after three as written
RATE = 2.0**-10  # a float32, as recorded steps read it
RATES = {"learning_rate": RATE, "actor_learning_rate": RATE}
ALL_RATES = {**RATES, "temperature_learning_rate": RATE}
SMALL = {"hidden_sizes": (16, 16)}

Settings = dict[str, Any]
# Algorithm, settings, kinds of steps.
CASES: dict[str, tuple[type[Trainer], Settings, int]] = {
    "dqn": (DQN, {"learning_rate": RATE, "double": False, "target_update_interval": 4, **SMALL}, 2),
    "double dqn": (DQN, {"learning_rate": RATE, "target_update_interval": 3, "max_grad_norm": 0.5, **SMALL}, 2),
    "dueling, soft targets": (DQN, {"learning_rate": RATE, "dueling": True, "tau": 0.25, **SMALL}, 1),
    "ddpg": (DDPG, {**RATES, **SMALL}, 1),
    "ddpg, clipped": (DDPG, {**RATES, "max_grad_norm": 0.01, **SMALL}, 1),
    "td3, delay 2": (TD3, {**RATES, **SMALL}, 2),
    "td3, delay 3": (TD3, {**RATES, "policy_delay": 3, **SMALL}, 2),
    "sac": (SAC, {**ALL_RATES, **SMALL}, 1),
    "sac, clipped": (SAC, {**ALL_RATES, "max_grad_norm": 0.5, **SMALL}, 1),
    "sac, fixed temperature": (SAC, {**RATES, "temperature": 0.25, **SMALL}, 1),
    "redq, all critics": (REDQ, {**ALL_RATES, "num_critics": 2, "policy_delay": 3, **SMALL}, 2),
    "qrdqn": (QRDQN, {"learning_rate": RATE, "num_quantiles": 7, "target_update_interval": 3, **SMALL}, 2),
    "tqc": (TQC, {**ALL_RATES, "num_critics": 2, "num_quantiles": 5, **SMALL}, 1),
    "droq, no dropout": (DroQ, {**ALL_RATES, "dropout": 0.0, "policy_delay": 3, **SMALL}, 2),
}
WHOLE = {"crossq": (CrossQ, {**ALL_RATES, "critic_hidden_sizes": (24,), **SMALL}, 2)}


@pytest.fixture(autouse=True)
def graphs(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[list[EmulatedGraphs]]:
    """What Learners on "cuda" get; none in tests for a GPU."""
    if request.node.get_closest_marker("cuda"):
        yield []
        return
    made = instead_of_cuda(monkeypatch)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield made
    torch.set_num_threads(threads)


def space_of(algorithm: type[Trainer]) -> spaces.Space[Any]:
    return DISCRETE if issubclass(algorithm, DQN) else BOX


def batch_of(algorithm: type[Trainer], seed: int, rows: int = 50) -> tuple[dict[str, np.ndarray], np.ndarray]:
    rng = np.random.default_rng(seed)
    discrete = issubclass(algorithm, DQN)
    columns = {
        "obs": rng.normal(size=(rows, 6)).astype(np.float32),
        "action": rng.integers(0, 3, rows) if discrete else rng.uniform(-2, 2, (rows, 2)).astype(np.float32),
        "reward": rng.normal(size=rows).astype(np.float32),
        "next_obs": rng.normal(size=(rows, 6)).astype(np.float32),
        "discount": np.where(rng.random(rows) < 0.2, 0, 0.99).astype(np.float32),
    }
    return columns, rng.uniform(0.1, 1.0, rows).astype(np.float32)


def made(algorithm: type[Trainer], settings: Settings, **options: Any) -> tuple[Any, Any, TorchLearner, TorchLearner]:
    """Two equal trainers, a Learner that records the first one's steps, and one on the CPU for the second."""
    trainers = [algorithm(OBS, space_of(algorithm), seed=3, **settings) for _ in range(2)]
    recorded = TorchLearner(trainers[0], device="cuda", **options)
    if isinstance(trainers[0], SAC | TD3):
        assert recorded._device_steps is not None
        emulated: Any = recorded._device_steps._graphs
        emulated.on_host.add(trainers[0].noise_seed.untyped_storage()._cdata)
    options.pop("capture", None)
    return *trainers, recorded, TorchLearner(trainers[1], **options)


def taken(result: StepResult) -> tuple[np.ndarray, float, Mapping[str, float]]:
    """A copy: on the CPU, the priorities are in memory that the next replay overwrites."""
    return result.priorities.copy(), result.td_error, dict(result.metrics)


def assert_equal(found: StepResult, expected: StepResult) -> None:
    (a, a_error, a_metrics), (b, b_error, b_metrics) = taken(found), taken(expected)
    np.testing.assert_array_equal(a, b)
    assert (a_error, a_metrics) == (b_error, b_metrics)


def assert_same_state(found: object, expected: object, tolerance: float = 0.0) -> None:
    """The networks and optimizers of both, with the optimizers' settings."""
    ours, theirs = module_tensors(found), module_tensors(expected)
    assert ours.keys() == theirs.keys()
    for group, tensors in theirs.items():
        assert ours[group].keys() == tensors.keys()
        for name, tensor in tensors.items():
            a, b = torch.as_tensor(ours[group][name]), torch.as_tensor(tensor)
            assert a.dtype == b.dtype, (group, name)
            if a.is_floating_point():
                torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, msg=lambda m: f"{group}.{name}: {m}")  # noqa: B023
            else:
                assert torch.equal(a, b), (group, name)


def train_both(
    learners: tuple[TorchLearner, TorchLearner],
    algorithm: type[Trainer],
    steps: range = range(STEPS),
    before: Callable[[Trainer, int], None] = lambda trainer, step: None,
    rows: Callable[[int], int] = lambda step: 50,
) -> None:
    for step in steps:
        results = []
        for learner in learners:
            before(learner.trainer, step)  # type: ignore[arg-type]
            results.append(learner.step(*batch_of(algorithm, step, rows(step))))
        assert_equal(*results)


# --- equal to steps that run as they are written ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "sub_batches", [1, pytest.param(2, marks=pytest.mark.slow), 3, pytest.param(4, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("case", CASES)
def test_replayed_steps_train_bit_for_bit_as_those_as_written(
    case: str, sub_batches: int, graphs: list[EmulatedGraphs]
) -> None:
    algorithm, settings, kinds = CASES[case]
    ours, theirs, *learners = made(algorithm, settings, sub_batches=sub_batches)
    train_both((learners[0], learners[1]), algorithm)
    assert_same_state(ours, theirs)
    assert ours.gradient_steps == theirs.gradient_steps == STEPS
    assert graphs[0].captures == kinds
    assert graphs[0].replays == STEPS - 3 * kinds
    assert graphs[0].races == []


@pytest.mark.parametrize("case", WHOLE)
def test_batches_that_are_normalised_as_a_whole(case: str, graphs: list[EmulatedGraphs]) -> None:
    algorithm, settings, kinds = WHOLE[case]
    ours, theirs, *learners = made(algorithm, settings)
    train_both((learners[0], learners[1]), algorithm)
    assert_same_state(ours, theirs)
    assert (graphs[0].captures, graphs[0].replays) == (kinds, STEPS - 3 * kinds)


def test_a_recurrent_algorithm(graphs: list[EmulatedGraphs]) -> None:
    trainers = [
        RecurrentDQN(recurrent.SEEN, recurrent.TWO, seed=3, learning_rate=RATE, **recurrent.SMALL) for _ in "ab"
    ]
    learners = [TorchLearner(trainers[n], device=device) for n, device in enumerate(("cuda", "cpu"))]
    for step in range(STEPS):
        columns, weights = recurrent.batch_of(trainers[1], 20, seed=step)
        batch = {n: c.float() if c.is_floating_point() else c for n, c in columns._asdict().items()}
        assert_equal(*(learner.step(batch, weights.float()) for learner in learners))
    assert_same_state(*trainers)
    assert graphs[0].replays == STEPS - 3


@pytest.mark.parametrize("case", ["double dqn", "td3, delay 2", "sac"])
def test_learning_rates_follow_their_schedule(case: str, graphs: list[EmulatedGraphs]) -> None:
    algorithm, settings, kinds = CASES[case]
    ours, theirs, *learners = made(algorithm, {**settings, "learning_rate_schedule": "linear"})

    def progress(trainer: Trainer, step: int) -> None:
        trainer.set_progress(step / 32)  # all rates are float32 numbers

    train_both((learners[0], learners[1]), algorithm, before=progress)
    assert_same_state(ours, theirs)
    assert ours.scheduled_values(0) == theirs.scheduled_values(0)
    assert ours.scheduled_values(0)["learning_rate"] == RATE * (1 - (STEPS - 1) / 32)
    assert graphs[0].captures == kinds


@pytest.mark.parametrize("algorithm", [DQN, TD3, SAC])
def test_any_learning_rate_is_rounded_to_float32_only(algorithm: type[Trainer]) -> None:
    ours, theirs, *learners = made(algorithm, {"learning_rate": 1e-3, "learning_rate_schedule": "cosine", **SMALL})
    for step in range(STEPS):
        for learner in learners:
            learner.trainer.set_progress(step / STEPS)  # type: ignore[attr-defined]
            learner.step(*batch_of(algorithm, step))
    # A rate rounded to float32 moves a step of Adam, at most 1e-3, by 6e-8 of itself; sums of gradients add to that.
    assert_same_state(ours, theirs, tolerance=2e-5)


def test_noise_differs_from_replay_to_replay(graphs: list[EmulatedGraphs]) -> None:
    ours, _, learner, _ = made(SAC, {**ALL_RATES, **SMALL})
    drawn = []
    for _ in range(8):
        learner.step(*batch_of(SAC, 0))
        steps = learner._device_steps
        assert steps is not None
        drawn.append(next(memory.inputs._tensors[1].clone() for memory in steps._memory.values()))
    assert graphs[0].replays == 5
    assert all(not torch.equal(a, b) for n, a in enumerate(drawn) for b in drawn[:n])
    ours.gradient_steps -= 1
    assert torch.equal(drawn[-1], ours.draw_noise(50, 1))


@pytest.mark.parametrize("sub_batches", [1, 3])
def test_batches_of_changing_size(sub_batches: int, graphs: list[EmulatedGraphs]) -> None:
    ours, theirs, *learners = made(TD3, {**RATES, **SMALL}, sub_batches=sub_batches)
    train_both((learners[0], learners[1]), TD3, rows=lambda step: (50, 50, 2, 31)[step % 4], steps=range(60))
    assert_same_state(ours, theirs)
    assert graphs[0].captures == 4  # each size comes in steps of one kind, but for 50, in which both kinds come
    assert graphs[0].races == []


def test_no_more_sizes_are_kept_than_a_few(graphs: list[EmulatedGraphs]) -> None:
    ours, theirs, *learners = made(DQN, {"learning_rate": RATE, **SMALL})
    train_both((learners[0], learners[1]), DQN, rows=lambda step: 1 + step // 5, steps=range(100))
    assert_same_state(ours, theirs)
    steps = learners[0]._device_steps
    assert steps is not None
    assert len(steps._memory) <= 16
    assert graphs[0].captures == 20


@pytest.mark.parametrize("sub_batches", [1, 2])
@pytest.mark.parametrize("capture", [True, False])
def test_columns_on_the_device_stay_there(capture: bool, sub_batches: int, graphs: list[EmulatedGraphs]) -> None:
    """As a storage on the device gives them; weights come from the host."""
    ours, theirs, *learners = made(TD3, {**RATES, **SMALL}, sub_batches=sub_batches, capture=capture)
    for step in range(12):
        columns, weights = batch_of(TD3, step)
        tensors = {name: torch.from_numpy(column.copy()) for name, column in columns.items()}
        graphs[0].on_device |= {tensor.untyped_storage()._cdata for tensor in tensors.values()}
        assert_equal(learners[0].step(tensors, weights), learners[1].step(columns, weights))
        steps = learners[0]._device_steps
        assert steps is not None
        (memory,) = steps._memory.values()
        assert [list(staging._pinned_views) for staging in memory.parts] == [[5]] * sub_batches
    assert_same_state(ours, theirs)
    assert graphs[0].captures == (2 if capture else 0)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU that torch can use")
@pytest.mark.parametrize("sub_batches", [1, 3])
@pytest.mark.parametrize("case", CASES | WHOLE)
def test_on_a_gpu(case: str, sub_batches: int, caplog: pytest.LogCaptureFixture) -> None:
    algorithm, settings, kinds = (CASES | WHOLE)[case]
    sub_batches = sub_batches if case in CASES else 1
    trainers = [algorithm(OBS, space_of(algorithm), seed=3, device="cuda", **settings) for _ in range(2)]
    recorded, as_written = (
        TorchLearner(trainer, device="cuda", sub_batches=sub_batches, capture=capture)
        for trainer, capture in zip(trainers, (True, False), strict=True)
    )
    for step in range(STEPS):
        found, expected = (learner.step(*batch_of(algorithm, step)) for learner in (recorded, as_written))
        np.testing.assert_allclose(found.priorities, expected.priorities, rtol=1e-3, atol=1e-4)
    assert_same_state(*trainers, tolerance=1e-4)  # kernels may add in another order from run to run
    assert recorded._device_steps is not None
    assert len(recorded._device_steps._recordings) == kinds
    assert not caplog.records


# --- what changes between steps ---------------------------------------------------------------------------------------


def change_of(name: str, value: object) -> Callable[[Any], None]:
    return lambda trainer: setattr(trainer, name, value)


def new_betas(trainer: Any) -> None:
    trainer.critic_optimizer.param_groups[0]["betas"] = (0.5, 0.75)


def new_optimizer(trainer: Any) -> None:
    trainer.optimizer = torch.optim.AdamW([trainer._q_flat.parameter], lr=2 * RATE, weight_decay=0.5, fused=True)


def new_bounds(trainer: Any) -> None:
    trainer.actor._log_std_bounds = (-1.0, -0.5)


CHANGES: dict[str, tuple[str, Callable[[Any], None]]] = {
    "tau": ("dueling, soft targets", change_of("tau", 0.5)),
    "target_update_interval": ("dqn", change_of("target_update_interval", 2)),
    "double": ("dqn", change_of("double", True)),
    "max_grad_norm": ("ddpg, clipped", change_of("max_grad_norm", 0.002)),
    "saturation_penalty": ("ddpg", change_of("saturation_penalty", 4.0)),
    "policy_delay": ("td3, delay 2", change_of("policy_delay", 4)),
    "noise_clip": ("td3, delay 2", change_of("noise_clip", 0.01)),
    "_target_entropy": ("sac", change_of("_target_entropy", 5.0)),
    "log_alpha": ("sac, fixed temperature", change_of("log_alpha", torch.tensor(2.0))),
    "betas": ("sac", new_betas),
    "optimizer": ("double dqn", new_optimizer),
    "actor._log_std_bounds": ("sac", new_bounds),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_setting_counts_from_the_next_step(
    change: str, graphs: list[EmulatedGraphs], caplog: pytest.LogCaptureFixture
) -> None:
    case, apply = CHANGES[change]
    algorithm, settings, kinds = CASES[case]
    ours, theirs, *learners = made(algorithm, settings)

    def at_15(trainer: Trainer, step: int) -> None:
        if step == 15:
            apply(trainer)

    with caplog.at_level(logging.INFO):
        train_both((learners[0], learners[1]), algorithm, before=at_15, steps=range(40))
    assert_same_state(ours, theirs)
    (record,) = caplog.records
    named = "an optimizer" if change == "betas" else change
    assert record.message == f"{algorithm.__name__}: {named} changed, so that steps are recorded in new CUDA graphs."
    assert graphs[0].captures > kinds


def test_settings_that_keep_changing_are_trained_as_written(graphs: list[EmulatedGraphs]) -> None:
    ours, theirs, *learners = made(DDPG, {**RATES, **SMALL})

    def every_fifth(trainer: Any, step: int) -> None:
        trainer.tau = 1 / (2 + step // 5)

    train_both((learners[0], learners[1]), DDPG, before=every_fifth, steps=range(100))
    assert_same_state(ours, theirs)
    assert graphs[0].captures == 4  # in step 3, and 6, 12 and 24 steps after a change; the next is 48 after one


@pytest.mark.parametrize("case", ["double dqn", "td3, delay 3", "sac"])
def test_checkpoints_go_to_the_cpu_and_back(case: str, graphs: list[EmulatedGraphs]) -> None:
    algorithm, settings, _ = CASES[case]
    ours, theirs, *learners = made(algorithm, settings)
    train_both((learners[0], learners[1]), algorithm, steps=range(15))
    saved = module_tensors(ours)
    # On a CPU, in a new trainer.
    resumed = algorithm(OBS, space_of(algorithm), seed=9, **settings)
    load_module_tensors(resumed, saved)
    resumed.gradient_steps = 15
    for step in range(15, 30):
        assert_equal(
            TorchLearner(resumed).step(*batch_of(algorithm, step)), learners[1].step(*batch_of(algorithm, step))
        )
    assert_same_state(resumed, theirs)
    # Into the recorded trainer, whose optimizers get other memory; and from a CPU into one that has not trained yet.
    fresh, _, new_learner, _ = made(algorithm, settings)
    for trainer, learner in ((ours, learners[0]), (fresh, new_learner)):
        load_module_tensors(trainer, saved)
        trainer.gradient_steps = 15
        for step in range(15, 30):
            learner.step(*batch_of(algorithm, step))
        assert_same_state(trainer, theirs)
    assert graphs[0].replays > 12


def test_snapshots_are_taken_and_loaded_between_replays() -> None:
    ours, theirs, *learners = made(DQN, {"learning_rate": RATE, **SMALL})
    train_both((learners[0], learners[1]), DQN, steps=range(10))
    snapshots = np.zeros((2, learners[0].weight_count), np.float32)
    for learner, snapshot in zip(learners, snapshots, strict=True):
        learner.write_weights(snapshot)
        learner.load_weights(snapshot / 2)
    np.testing.assert_array_equal(*snapshots)
    train_both((learners[0], learners[1]), DQN, steps=range(10, 20))
    assert_same_state(ours, theirs)


# --- what cannot be recorded ------------------------------------------------------------------------------------------


class OwnClass:
    """Knows nothing of `Trainer`."""

    def __init__(self, *args: object, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.policy = nn.Linear(6, 3)
        self.optimizer = torch.optim.SGD(self.policy.parameters(), lr=0.125)
        self.updates = 0

    def get_action(self, obs: torch.Tensor) -> torch.Tensor:
        values: torch.Tensor = self.policy(obs)
        return values.argmax(1)

    def update_policy(self, batch: Batch, weights: torch.Tensor) -> torch.Tensor:
        self.updates += 1
        values = self.policy(batch.obs).gather(1, batch.action.unsqueeze(1)).squeeze(1)
        errors: torch.Tensor = batch.reward - values
        self.optimizer.zero_grad()
        ((errors * errors * weights).mean() / self.updates).backward()
        self.optimizer.step()
        return errors.detach().abs()


class OwnLoss(DQN):
    def _compute(self, batch: Batch, weights: torch.Tensor, batch_size: int) -> torch.Tensor:
        return super()._compute(batch, weights * (1.0 + self.gradient_steps), batch_size)


class Declared(DQN):
    """Says that its steps are alike."""

    def step_kind(self) -> tuple[object, ...] | str:
        return ()


class Waiting(Declared):
    """Waits for a number of the device."""

    def _compute(self, batch: Batch, weights: torch.Tensor, batch_size: int) -> torch.Tensor:
        return super()._compute(batch, weights * float(batch.reward.abs().max()), batch_size)


class WaitingNetwork(DQN):
    """So does its network."""

    def build_q_network(self) -> nn.Module:
        class Scaled(nn.Linear):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return super().forward(x) / (1.0 + float(x.detach().abs().max()))

        return nn.Sequential(Scaled(6, 16), nn.ReLU(), nn.Linear(16, 3))


class FailingLate(Declared):
    """Fails while it is recorded, in the middle of its changes."""

    def finish_step(self) -> None:
        super().finish_step()
        self.note = "late"
        self.q.train(False)
        if self.gradient_steps >= 4 and self.q[0].weight.isnan().any():
            raise ValueError("NaN")  # which asks for a number of the device
        self.q.train(True)


class Counting(Declared):
    """Counts in Python."""

    updates: int = 0

    def _compute(self, batch: Batch, weights: torch.Tensor, batch_size: int) -> torch.Tensor:
        self.updates += 1
        return super()._compute(batch, weights / self.updates, batch_size)


class CountingNetwork(DQN):
    def build_q_network(self) -> nn.Module:
        class Counted(nn.Linear):
            passes = 0

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                self.passes += 1
                return super().forward(x) / self.passes

        return nn.Sequential(Counted(6, 16), nn.ReLU(), nn.Linear(16, 3))


class OtherOptimizer(DQN):
    def build(self) -> None:
        super().build()
        self.optimizer = torch.optim.Adagrad([self._q_flat.parameter], lr=RATE)


REFUSED: list[tuple[Any, Settings, str]] = [
    (OwnClass, {}, "it does not derive from pearl.algorithms.Trainer"),
    (OwnLoss, {}, "OwnLoss overrides _compute, but not step_kind"),
    (Waiting, {}, "a step cannot be recorded: RuntimeError: CUDA error: operation not permitted"),
    (WaitingNetwork, {}, "a step cannot be recorded: RuntimeError: CUDA error: operation not permitted"),
    (FailingLate, {}, "a step cannot be recorded: RuntimeError: CUDA error: operation not permitted"),
    (Counting, {}, "its steps change updates, which replays would not do"),
    (CountingNetwork, {}, "its steps change q.0.passes, target_q.0.passes, which"),
    (OtherOptimizer, {}, "optimizer 'optimizer' is a Adagrad, which has no option `capturable`"),
    (REDQ, {"num_critics": 3, "policy_delay": 2, **SMALL}, "REDQ draws the critics that judge targets on the host"),
    (DroQ, {"dropout": 0.25, "policy_delay": 2, **SMALL}, "DroQ draws the masks of dropout on the host"),
]


@pytest.mark.parametrize(("algorithm", "settings", "reason"), REFUSED, ids=[case[0].__name__ for case in REFUSED])
def test_a_trainer_that_cannot_be_recorded_trains_as_written(
    algorithm: Any,
    settings: Settings,
    reason: str,
    graphs: list[EmulatedGraphs],
    caplog: pytest.LogCaptureFixture,
) -> None:
    kind = algorithm if issubclass(algorithm, Trainer) else DQN
    rates = {"learning_rate": RATE} if issubclass(algorithm, Trainer) else {}
    trainers = [algorithm(OBS, space_of(kind), seed=3, **rates, **settings) for _ in range(2)]
    learners = TorchLearner(trainers[0], device="cuda"), TorchLearner(trainers[1])
    train_both(learners, kind, steps=range(12))
    assert_same_state(*trainers)
    if issubclass(algorithm, Trainer):
        assert trainers[0].gradient_steps == 12
        assert vars(trainers[0]).get("note") == vars(trainers[1]).get("note")
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert re.fullmatch(rf"{algorithm.__name__} trains without CUDA graphs: {reason}.*", record.message, re.DOTALL)
    assert graphs[0].replays == 0


def test_two_learners_say_the_same_reason_once(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        TorchLearner(OwnClass(), device="cuda")
    assert len(caplog.records) == 1


class FailingPart(SAC):
    """Its second part fails while it is recorded."""

    fails: bool = False

    def step_kind(self) -> tuple[object, ...] | str:
        return ()

    def _compute_actor(self, batch: Batch, weights: torch.Tensor, batch_size: int) -> None:
        super()._compute_actor(batch, weights, batch_size)
        if self.fails and self._first_row > 0:
            float(self.log_alpha.detach())


def test_a_failed_recording_leaves_gradients_noise_and_optimizers_as_they_were(graphs: list[EmulatedGraphs]) -> None:
    ours, theirs, *learners = made(FailingPart, {**ALL_RATES, "fails": True, **SMALL}, sub_batches=3)
    train_both((learners[0], learners[1]), FailingPart, steps=range(10))
    assert (graphs[0].captures, graphs[0].replays) == (1, 0)
    assert_same_state(ours, theirs)
    assert ours._undealt is None
    assert ours._inputs is None
    group = ours.critic_optimizer.param_groups[0]
    assert (group["lr"], group["capturable"], group["fused"], group["foreach"]) == (RATE, False, True, None)
    assert ours.log_alpha.grad is not None
    assert all(p.grad is not None for p in ours.critic.parameters())


def test_no_garbage_is_collected_while_a_step_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    class Dropped:
        def __init__(self) -> None:
            self.cycle = self

        def __del__(self) -> None:
            ended.append(recording)

    ended: list[bool] = []
    recording = False
    cuda = SimpleNamespace(
        current_device=lambda: 0,
        current_stream=lambda device: None,
        default_generators=[SimpleNamespace(clone_state=lambda: None)],
        graph=lambda *_, **__: contextlib.nullcontext(),
        graph_pool_handle=lambda: None,
        set_stream=lambda stream: None,
        CUDAGraph=object,
        Stream=lambda device: None,
    )
    monkeypatch.setattr(cuda_graphs, "torch", SimpleNamespace(cuda=cuda, device=torch.device))

    def step() -> None:
        nonlocal recording
        Dropped()
        recording = True
        kept = [[number] for number in range(20_000)]  # enough for several collections
        recording = len(kept) == 0

    CudaGraphs(torch.device("cuda", 0)).capture(step)
    assert ended in ([], [False])
    assert gc.isenabled()


def test_without_capture_nothing_is_recorded(graphs: list[EmulatedGraphs], caplog: pytest.LogCaptureFixture) -> None:
    for options in ({"capture": False, "sub_batches": 2}, {"keep_gradients": True}):
        ours, theirs, *learners = made(SAC, {**ALL_RATES, **SMALL}, **options)
        for step in range(8):
            found, expected = (learner.step(*batch_of(SAC, step)) for learner in learners)
            assert_equal(found, expected)
            if found.gradients is not None:
                assert expected.gradients is not None
                np.testing.assert_array_equal(found.gradients, expected.gradients)
        assert_same_state(ours, theirs)
        assert (graphs[-1].captures, graphs[-1].races) == (0, [])
    assert not caplog.records


# --- trainers of the user ---------------------------------------------------------------------------------------------


class TwoLosses(Trainer):
    """A user's algorithm: its own phases, plain Adam, gradients set to None, and losses for the log."""

    def check_spaces(self) -> None:
        pass

    def build(self) -> None:
        self.nets = [nn.Linear(6, 3), nn.Linear(6, 3)]
        self.optimizer = torch.optim.Adam([p for net in self.nets for p in net.parameters()], lr=RATE)
        self.loss: torch.Tensor | None = None
        self.second_loss = torch.zeros(())

    @property
    def policy(self) -> nn.Module:
        return self.nets[0]

    @property
    def phases(self) -> tuple[Phase, ...]:
        first, second = (Phase(f"loss {n}", getattr(self, f"compute_{n}"), self.apply) for n in (1, 2))
        return (first, second) if self._second_moves() else (first,)

    def _second_moves(self) -> bool:
        return (self.gradient_steps + 1) % 3 == 0

    def step_kind(self) -> tuple[object, ...] | str:
        return (self._second_moves(),)

    def get_action(self, obs: torch.Tensor) -> torch.Tensor:
        values: torch.Tensor = self.nets[0](obs)
        return values.argmax(1)

    def _errors(self, net: nn.Module, batch: Batch) -> torch.Tensor:
        errors: torch.Tensor = batch.reward - net(batch.obs).gather(1, batch.action.unsqueeze(1)).squeeze(1)
        return errors

    def compute_1(self, batch: Batch, weights: torch.Tensor, batch_size: int) -> torch.Tensor:
        errors = self._errors(self.nets[0], batch)
        self.loss = (errors.square() * weights).sum() / batch_size
        self.loss.backward()
        self.loss = self.loss.detach()
        return errors.detach().abs()

    def compute_2(self, batch: Batch, weights: torch.Tensor, batch_size: int) -> None:
        loss = self._errors(self.nets[1], batch).abs().sum() / batch_size
        loss.backward()
        self.second_loss = loss.detach()

    def apply(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def metrics(self) -> Mapping[str, float]:
        assert self.loss is not None
        return {"loss": float(self.loss), "second": float(self.second_loss)}


class WithSGD(TwoLosses):
    def build(self) -> None:
        super().build()
        self.optimizer = torch.optim.SGD(  # type: ignore[assignment]
            [p for net in self.nets for p in net.parameters()], lr=RATE, momentum=0.5
        )


@pytest.mark.parametrize("sub_batches", [1, 2])
@pytest.mark.parametrize("algorithm", [TwoLosses, WithSGD])
def test_metrics_are_those_of_the_replayed_step(
    algorithm: type[TwoLosses], sub_batches: int, graphs: list[EmulatedGraphs]
) -> None:
    trainers = [algorithm(OBS, DISCRETE, seed=3) for _ in range(2)]
    for trainer in trainers:  # the fused form, which recorded steps take, rounds in another way
        trainer.optimizer.param_groups[0]["fused"] = True
    learners = [TorchLearner(trainers[n], device=d, sub_batches=sub_batches) for n, d in enumerate(("cuda", "cpu"))]
    for step in range(STEPS):
        assert_equal(*(learner.step(*batch_of(DQN, step)) for learner in learners))
    assert_same_state(*trainers)
    assert (graphs[0].captures, graphs[0].replays, graphs[0].races) == (2, STEPS - 6, [])


def test_a_plain_adam_is_fused_while_recorded_only(graphs: list[EmulatedGraphs]) -> None:
    trainers = [TwoLosses(OBS, DISCRETE, seed=3) for _ in range(2)]
    learners = [TorchLearner(trainers[n], device=d) for n, d in enumerate(("cuda", "cpu"))]
    for step in range(STEPS):
        for learner in learners:
            learner.step(*batch_of(DQN, step))
    assert_same_state(*trainers, tolerance=1e-5)  # and the same settings in the optimizers' states
    assert graphs[0].replays == STEPS - 6


class OwnNoise(SAC):
    """Draws noise itself, on the device."""

    def draw_noise(self, rows: int, draw: int) -> torch.Tensor:
        noise = torch.arange(rows * self.action_size) * (1 + self.gradient_steps) + draw
        return noise.sin().reshape(rows, self.action_size)


def test_noise_of_the_users_own(graphs: list[EmulatedGraphs]) -> None:
    ours, theirs, *learners = made(OwnNoise, {**ALL_RATES, **SMALL}, sub_batches=2)
    train_both((learners[0], learners[1]), OwnNoise)
    assert_same_state(ours, theirs)
    assert graphs[0].replays == STEPS - 3


class WithRMSprop(TwoLosses):
    def build(self) -> None:
        super().build()
        parameters = [p for net in self.nets for p in net.parameters()]
        self.optimizer = torch.optim.RMSprop(parameters, lr=RATE, foreach=True)  # type: ignore[assignment]


def test_an_optimizer_without_a_fused_form(graphs: list[EmulatedGraphs], monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules[torch.optim.RMSprop.__module__]
    monkeypatch.setattr(module, "_get_capturable_supported_devices", lambda: ["cpu"])
    trainers = [WithRMSprop(OBS, DISCRETE, seed=3) for _ in range(2)]
    learners = [TorchLearner(trainers[n], device=d) for n, d in enumerate(("cuda", "cpu"))]
    for step in range(STEPS):
        for learner, trainer in zip(learners, trainers, strict=True):
            trainer.set_progress(step / 32)
            trainer.optimizer.param_groups[0]["lr"] = RATE * (1 - step / 32)
            learner.step(*batch_of(DQN, step))
    assert_same_state(*trainers, tolerance=1e-6)
    assert graphs[0].replays == STEPS - 6


# --- streams ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("capture", [True, False])
def test_no_part_waits_for_another_before_the_gradients_are_added(capture: bool, graphs: list[EmulatedGraphs]) -> None:
    *_, learner, _ = made(SAC, {**ALL_RATES, **SMALL}, sub_batches=3, capture=capture)
    learner.step(*batch_of(SAC, 0))
    parts = [f"part {n}" for n in range(3)]
    waits = graphs[0].waits
    phase = [*((part, "main") for part in parts), *(("main", part) for part in parts)]
    uploads = phase if capture else phase[:3]
    assert waits == [*uploads, *phase, *phase]
    assert graphs[0].races == []


def test_pinned_memory_is_filled_again_only_when_it_is_copied(graphs: list[EmulatedGraphs]) -> None:
    *_, learner, _ = made(SAC, {**ALL_RATES, **SMALL}, sub_batches=2)
    for step in range(6):
        learner.step(*batch_of(SAC, step))
    waited = [event.waited for event in graphs[0].events]
    assert waited == [True] * 15 + [False] * 3  # for the noise and each part


# --- the emulation finds faults ---------------------------------------------------------------------------------------


def share_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts_on_streams, "_give_own_gradients", lambda parts, shared: None)
    monkeypatch.setattr(parts_on_streams, "_add_gradients", lambda leaves, found: None)


def forget_to_join(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EmulatedGraphs, "join", lambda graphs, parts: None)


@pytest.mark.parametrize("fault", [share_gradients, forget_to_join])
def test_a_missing_wait_is_found(
    fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch, graphs: list[EmulatedGraphs]
) -> None:
    *_, learner, _ = made(SAC, {**ALL_RATES, **SMALL}, sub_batches=2)
    fault(monkeypatch)
    learner.step(*batch_of(SAC, 0))
    assert graphs[0].races


def bake_in_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    fill = CapturableOptimizers.fill_rates
    monkeypatch.setattr(CapturableOptimizers, "fill_rates", lambda self: None if self._rates else fill(self))


def keep_rates_as_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CapturableOptimizers, "fill_rates", lambda self: None)


def count_no_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    record = TorchSteps._record

    def miscounting(self: TorchSteps, uploaded: Any) -> Any:
        found = record(self, uploaded)
        assert found is not None
        return torch_steps._Recording(found.graph, found.priorities, 0, found.left)

    monkeypatch.setattr(TorchSteps, "_record", miscounting)


def bake_in_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TD3, "give_inputs", lambda self, inputs: None)
    monkeypatch.setattr(TD3, "draw_noise", lambda self, rows, draw: torch.from_numpy(self._noise(rows, draw)))


def watch_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_steps.BakedValues, "changed", lambda self: [])


def know_one_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TD3, "step_kind", lambda self: ())


FAULTS = [bake_in_rates, keep_rates_as_numbers, count_no_steps, bake_in_noise, watch_nothing, know_one_kind]


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_baked_in_shows_as_another_result(
    fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    *_, ours, theirs = made(TD3, {**RATES, "learning_rate_schedule": "linear", "noise_clip": 0.25, **SMALL})

    def vary(trainer: Any, step: int) -> None:
        trainer.set_progress(step / 32)
        trainer.noise_clip = 0.25 if step < 15 else 0.125

    with pytest.raises(AssertionError):
        train_both((ours, theirs), TD3, before=vary)


def test_recording_computes_nothing_and_replays_compute_again() -> None:
    graphs = EmulatedGraphs()
    x, factor = torch.ones(3), 2.0

    def step() -> torch.Tensor:
        x.mul_(factor)
        return x + 1

    with graphs.main():
        graph, y = graphs.capture(step)
        assert x.tolist() == [1, 1, 1]
        assert y.isnan().all()
        factor = 5.0
        for expected in (2.0, 4.0):
            graph.replay()
            assert (x.tolist(), y.tolist()) == ([expected] * 3, [expected + 1] * 3)
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        graphs.capture(lambda: x.mul_(3).sum().item())
    assert x.tolist() == [4, 4, 4]


def test_parts_of_a_trainer_are_found_in_lists_too() -> None:
    parts = TrainerParts(TwoLosses(OBS, DISCRETE))
    assert set(parts.modules) == {"nets.0", "nets.1"}
    assert len(parts.learned) == 4
    assert parts.single == []
    sac = TrainerParts(SAC(OBS, BOX, **SMALL))
    assert [tensor.shape for tensor in sac.single] == [()]
