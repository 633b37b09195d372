"""Setting 2 with the torch Learner on a CUDA device: the kernels of the replay around torch's step, on the emulator."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from test_device_loop import PLACES, OnDevice, assert_same_replay
from test_native_loop import BATCH, Deterministic, Dueling, assert_same_state

from pearl.algorithms import Trainer
from pearl.backends.cuda.device import EMULATOR
from pearl.backends.cuda.torch_iteration import TorchIteration
from pearl.errors import TrainerError
from pearl.learner.torch_learner import TorchLearner


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


pytestmark = pytest.mark.skipif(PLACES["cuda"].replay["device"] != EMULATOR, reason="with the emulator only")


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


def test_what_diverges_stops_it() -> None:
    setup = OnEmulator(Dueling, joined=True)
    setup.run(2)
    rows = {name: column[: setup.replay.capacity].copy() for name, column in setup.rows.items()}
    rows["reward"][:] = np.nan
    setup.replay.insert(setup.storage.insert(rows))
    setup.laq.grant(5, 0.4)
    with pytest.raises(TrainerError, match=f"diverged: {BATCH} of {BATCH} priorities"):
        setup.loop.run_once()
    batch = setup.loop.last_batch()
    assert np.isnan(batch["reward"]).all()


def test_priorities_of_another_shape_are_refused() -> None:
    class Wrong(Dueling):
        def update_policy(self, batch: Any, weights: torch.Tensor) -> torch.Tensor:
            return super().update_policy(batch, weights)[:, None]

    setup = OnEmulator(Wrong, joined=True)
    setup.laq.grant(1, 0.4)
    with pytest.raises(TrainerError, match=rf"must return a tensor of shape \({BATCH},\)"):
        setup.loop.run_once()
