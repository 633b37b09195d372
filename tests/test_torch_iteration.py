"""Setting 2 with the torch Learner on a CUDA device: the kernels of the replay around torch's step, on the emulator."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from test_device_loop import PLACES, OnDevice, assert_same_replay
from test_native_loop import BATCH, BOX, CAPACITY, DISCRETE, OBS, Deterministic, Dueling, assert_same_state, rows_of

from pearl.algorithms import Trainer
from pearl.backends.cuda.device import EMULATOR
from pearl.backends.cuda.storage import CudaDataStorage
from pearl.backends.cuda.torch_iteration import TorchIteration
from pearl.errors import TrainerError
from pearl.learner.torch_learner import TorchLearner
from pearl.replay import make_replay_manager
from pearl.spec import ReplaySpec, TransitionSpec


class OnEmulator(OnDevice):
    """The replay on the emulator, and torch's step on the host, whose memory the emulator's is."""

    place = PLACES["cuda"]

    def __init__(self, trainer_class: type[Trainer], *, joined: bool) -> None:
        class Learner(TorchLearner):
            def fused_iteration(self, replay: Any, storage: Any, batch_size: int) -> TorchIteration | None:
                fields = self._batch._fields
                return TorchIteration(self.step_on_device, fields, replay, storage, batch_size) if joined else None

        self.place = self.place._replace(learner=Learner)
        super().__init__(trainer_class)


on_emulator = pytest.mark.skipif(PLACES["cuda"].replay["device"] != EMULATOR, reason="with the emulator only")


@on_emulator
@pytest.mark.parametrize("trainer_class", [Dueling, Deterministic])
def test_iterations_on_the_device_are_those_over_the_host(trainer_class: type[Trainer]) -> None:
    joined, apart = OnEmulator(trainer_class, joined=True), OnEmulator(trainer_class, joined=False)
    assert type(joined.loop.kernel._iteration).__name__ == "_FusedIteration"
    answers = []
    for setup in (joined, apart):
        found = []
        for iterations in (1, 7, 30):
            setup.laq.grant(iterations, 0.4)
            assert setup.loop.run_once()
            found.append(setup.answer())
            with setup.loop.insertion_window():
                setup.replay.insert(setup.storage.insert({name: rows[200:210] for name, rows in setup.rows.items()}))
        answers.append(found)
    assert_same_state(joined.trainer, apart.trainer)
    assert_same_replay(joined, apart)
    np.testing.assert_allclose(answers[0], answers[1], rtol=1e-6)


@on_emulator
def test_what_diverges_stops_it_with_its_batch() -> None:
    setup = OnEmulator(Dueling, joined=True)
    setup.run(2)
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
@pytest.mark.parametrize("trainer_class", [Dueling, Deterministic])
def test_on_a_gpu_the_host_reads_what_iterations_over_the_host_give(trainer_class: type[Trainer]) -> None:
    space = DISCRETE if trainer_class is Dueling else BOX
    spec = TransitionSpec.from_spaces(OBS, space)
    rows = rows_of(spec, CAPACITY)
    found = []
    for joined in (True, False):
        trainer = trainer_class(OBS, space, seed=3, device="cuda:0")
        learner = TorchLearner(trainer, device="cuda:0", capture=joined)
        replay = make_replay_manager(ReplaySpec(CAPACITY), seed=5, backend="cuda", device="cuda:0")
        storage = CudaDataStorage(spec, CAPACITY, "cuda:0")
        replay.insert(storage.insert(rows))
        fused = learner.fused_iteration(replay, storage, BATCH)
        assert fused is not None
        weights, td_error = [], 0.0
        for iteration in range(30):
            if joined:
                fused.train(0.4)
            else:
                sample = replay.sample(BATCH, 0.4)
                result = learner.step(storage.gather(sample.indices), sample.weights)
                replay.update(sample.indices, result.priorities, sample.generations)
                td_error += result.td_error
            if iteration % 3 == 2:  # as a publication
                td_error += fused.finish() if joined else 0.0
                weights.append(np.empty(learner.weight_count, np.float32))
                learner.write_weights(weights[-1])
        found.append((np.stack(weights), td_error, replay.state_dict()))
    np.testing.assert_allclose(found[0][0], found[1][0], rtol=1e-4, atol=1e-5)
    assert found[0][1] == pytest.approx(found[1][1], rel=1e-4)
    np.testing.assert_allclose(found[0][2]["priorities"], found[1][2]["priorities"], rtol=1e-3, atol=1e-4)
