"""Setting 2 with the torch Learner on a CUDA device: the kernels of the replay around torch's step, on the emulator."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import numpy as np
import pytest
import torch
from emulated_cuda_graphs import EmulatedGraphs, instead_of_cuda
from test_device_loop import PLACES, OnDevice, assert_same_replay
from test_native_loop import (
    BATCH,
    BOX,
    CAPACITY,
    DISCRETE,
    OBS,
    Deterministic,
    Dueling,
    Soft,
    Twin,
    assert_same_state,
    rows_of,
)

from pearl.algorithms import DQN, Trainer
from pearl.backends.cuda.device import EMULATOR
from pearl.backends.cuda.storage import CudaDataStorage
from pearl.backends.cuda.torch_iteration import TorchIteration
from pearl.backends.cuda.torch_steps import TorchSteps
from pearl.errors import TrainerError
from pearl.learner.torch_learner import TorchLearner
from pearl.replay import make_replay_manager
from pearl.spec import ReplaySpec, TransitionSpec

Mode = Literal["prioritized", "uniform"]


@pytest.fixture(autouse=True)
def graphs(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> list[EmulatedGraphs]:
    """What Learners on "cuda" get; none in tests for a GPU."""
    return [] if request.node.get_closest_marker("cuda") else instead_of_cuda(monkeypatch)


class OnEmulator(OnDevice):
    """The replay on the emulator, and torch's step on the host, whose memory the emulator's is."""

    place = PLACES["cuda"]

    def __init__(
        self, trainer_class: type[Trainer], *, joined: bool, mode: Mode = "prioritized", **options: Any
    ) -> None:
        class Learner(TorchLearner):
            def fused_iteration(self, replay: Any, storage: Any, batch_size: int) -> TorchIteration | None:
                fields = self._batch._fields
                return TorchIteration(self.step_on_device, fields, replay, storage, batch_size) if joined else None

        self._mode = mode
        self.place = self.place._replace(learner=partial(Learner, device="cuda", capture=joined, **options))
        super().__init__(trainer_class)

    def make_replay(self) -> Any:
        return make_replay_manager(ReplaySpec(CAPACITY, self._mode), seed=5, **self.place.replay)


on_emulator = pytest.mark.skipif(PLACES["cuda"].replay["device"] != EMULATOR, reason="with the emulator only")


def with_exact_rates(trainer_class: type[Trainer]) -> type[Trainer]:
    """With learning rates that are float32, as recordings read them."""
    rates = {name: 2.0**-10 for name in dir(trainer_class) if name.endswith("learning_rate")}
    return type(trainer_class.__name__, (trainer_class,), rates)


def assert_joined_is_apart(trainer_class: type[Trainer], mode: Mode = "prioritized", **options: Any) -> None:
    """Iterations on the device give what those over the host do, also where rows and slots change on the way."""
    exact = with_exact_rates(trainer_class)
    joined, apart = (OnEmulator(exact, joined=joined, mode=mode, **options) for joined in (True, False))
    assert type(joined.loop.kernel._iteration).__name__ == "_FusedIteration"
    answers = []
    for setup in (joined, apart):
        found = []
        for iterations in (1, 7, 14):
            setup.laq.grant(iterations, 0.4 + iterations / 100)
            assert setup.loop.run_once()
            found.append(setup.answer())
            with setup.loop.insertion_window():
                setup.replay.insert(setup.storage.insert({name: rows[200:210] for name, rows in setup.rows.items()}))
        answers.append(found)
    assert_same_state(joined.trainer, apart.trainer)
    assert_same_replay(joined, apart)
    np.testing.assert_allclose(answers[0], answers[1], rtol=1e-6)


@on_emulator
@pytest.mark.parametrize("sub_batches", [1, 3])
@pytest.mark.parametrize("trainer_class", [Dueling, Deterministic, Twin, Soft])
def test_iterations_on_the_device_are_those_over_the_host(
    trainer_class: type[Trainer], sub_batches: int, graphs: list[EmulatedGraphs]
) -> None:
    assert_joined_is_apart(trainer_class, sub_batches=sub_batches)
    recorded, _ = graphs
    assert recorded.replays >= 22 - 3 * recorded.captures > 12  # all but the first three of each kind
    assert recorded.races == []


@on_emulator
def test_uniform_draws_count_their_updates() -> None:
    assert_joined_is_apart(Dueling, "uniform")


@on_emulator
def test_iterations_of_steps_that_cannot_be_recorded_are_the_same(graphs: list[EmulatedGraphs]) -> None:
    class Waiting(Dueling):
        def update_policy(self, batch: Any, weights: torch.Tensor) -> torch.Tensor:
            priorities = super().update_policy(batch, weights)
            return priorities if priorities.sum().item() >= 0 else -priorities

        def step_kind(self) -> tuple[object, ...] | str:
            return ((self.gradient_steps + 1) % self.target_update_interval == 0,)

    assert_joined_is_apart(Waiting)
    assert (graphs[0].captures, graphs[0].replays) == (1, 0)


@on_emulator
def test_a_draw_that_is_not_recorded_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: kernels that run while torch records, and in no replay."""
    monkeypatch.setattr(EmulatedGraphs, "launch", lambda self, queue, work: work())
    with pytest.raises(AssertionError):
        assert_joined_is_apart(Dueling)


@on_emulator
@pytest.mark.parametrize("before", [2, 20])
def test_what_diverges_stops_it_with_its_batch(before: int, graphs: list[EmulatedGraphs]) -> None:
    setup = OnEmulator(Dueling, joined=True)
    setup.run(before)
    assert (graphs[0].replays > 0) == (before > 3)
    rows = {name: column[: setup.replay.capacity].copy() for name, column in setup.rows.items()}
    rows["reward"][:] = np.nan
    setup.replay.insert(setup.storage.insert(rows))
    host = make_replay_manager(ReplaySpec(CAPACITY), seed=5)
    host.load_state_dict(setup.replay.state_dict())
    setup.laq.grant(5, 0.4)
    with pytest.raises(TrainerError, match=f"diverged: {BATCH} of {BATCH} priorities"):
        setup.loop.run_once()
    batch = setup.loop.last_batch()
    assert np.isnan(batch["reward"]).all()
    np.testing.assert_array_equal(batch["indices"], host.sample(BATCH, 0.4).indices)


@on_emulator
def test_priorities_of_another_shape_are_refused() -> None:
    class Wrong(Dueling):
        def update_policy(self, batch: Any, weights: torch.Tensor) -> torch.Tensor:
            return super().update_policy(batch, weights)[:, None]

    setup = OnEmulator(Wrong, joined=True)
    setup.laq.grant(1, 0.4)
    with pytest.raises(TrainerError, match=rf"must return a tensor of shape \({BATCH},\)"):
        setup.loop.run_once()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU that torch can use")
@pytest.mark.parametrize("sub_batches", [1, 3])
@pytest.mark.parametrize("trainer_class", [Dueling, Deterministic, Twin, Soft])
def test_on_a_gpu_the_host_reads_what_iterations_over_the_host_give(
    trainer_class: type[Trainer], sub_batches: int
) -> None:
    space = DISCRETE if issubclass(trainer_class, DQN) else BOX
    spec = TransitionSpec.from_spaces(OBS, space)
    rows = rows_of(spec, CAPACITY)
    found = []
    for joined in (True, False):
        trainer = trainer_class(OBS, space, seed=3, device="cuda:0")
        learner = TorchLearner(trainer, device="cuda:0", sub_batches=sub_batches, capture=joined)
        replay = make_replay_manager(ReplaySpec(CAPACITY), seed=5, backend="cuda", device="cuda:0")
        storage = CudaDataStorage(spec, CAPACITY, "cuda:0")
        replay.insert(storage.insert(rows))
        fused = learner.fused_iteration(replay, storage, BATCH)
        assert fused is not None
        weights, td_error = [], 0.0
        for iteration in range(30):
            beta = 0.4 + iteration / 100
            if joined:
                fused.train(beta)
            else:
                sample = replay.sample(BATCH, beta)
                result = learner.step(storage.gather(sample.indices), sample.weights)
                replay.update(sample.indices, result.priorities, sample.generations)
                td_error += result.td_error
            if iteration % 10 == 9:  # as a publication, after one that the host has read by itself
                td_error += fused.finish() if joined else 0.0
                weights.append(np.empty(learner.weight_count, np.float32))
                learner.write_weights(weights[-1])
        steps = learner._device_steps
        assert isinstance(steps, TorchSteps)
        assert bool(steps._recordings) == joined  # what cannot be recorded would be as the other
        found.append((np.stack(weights), td_error, replay.state_dict()))
    np.testing.assert_allclose(found[0][0], found[1][0], rtol=1e-3, atol=1e-4)
    assert found[0][1] == pytest.approx(found[1][1], rel=1e-4)
    np.testing.assert_allclose(found[0][2]["priorities"], found[1][2]["priorities"], rtol=1e-3, atol=1e-4)
