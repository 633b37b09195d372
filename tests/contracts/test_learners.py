"""The Learner's contract, for every implementation alike."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_native_learner import ACTIONS, OBS, Small, batch_of, one_torch_thread

from pearl.backends import learners
from pearl.backends.sycl.selector import EMULATOR_SELECTOR
from pearl.errors import TrainerError
from pearl.learner.protocol import Learner
from pearl.learner.torch_learner import load_policy_weights

pytestmark = pytest.mark.usefixtures(one_torch_thread.__name__)
DEVICES = {"sycl": "opencl:cpu", "fpga": EMULATOR_SELECTOR}
MARKS = {"sycl": (pytest.mark.sycl,), "fpga": (pytest.mark.fpga, pytest.mark.slow)}
each_learner = pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS.get(name, ())) for name in learners()])
each_on_kernels = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=MARKS.get(name, ())) for name, entry in learners().items() if entry.compiled]
)


def learner_of(name: str, trainer: Small) -> Learner:
    learner = learners()[name].make(trainer, device=DEVICES.get(name, "cpu"))
    learner.prepare()
    return learner


@each_learner
def test_the_snapshot_is_the_policy(name: str) -> None:
    trainer, other = Small(OBS, ACTIONS), Small(OBS, ACTIONS, seed=5)
    learner = learner_of(name, trainer)
    learner.step(*batch_of(0))
    snapshot = np.zeros(learner.weight_count, np.float32)
    learner.write_weights(snapshot)
    load_policy_weights(other, snapshot)
    obs = torch.randn(20, 6)
    assert torch.equal(other.q(obs), trainer.q(obs))


@each_learner
def test_a_step_gives_a_priority_for_each_row_and_leaves_the_batch_as_it_is(name: str) -> None:
    learner = learner_of(name, Small(OBS, ACTIONS))
    (batch, weights), (kept, _) = batch_of(0), batch_of(0)
    priorities, td_error, metrics = learner.step(batch, weights)
    assert (priorities.shape, priorities.dtype) == ((50,), np.float32)
    assert (priorities >= 0).all()
    assert td_error == metrics["td_error"] == pytest.approx(np.abs(priorities).mean(), rel=1e-4)
    assert all(np.array_equal(batch[column], kept[column]) for column in kept)


@each_on_kernels
def test_columns_of_another_dtype_are_refused(name: str) -> None:
    learner = learner_of(name, Small(OBS, ACTIONS))
    batch, weights = batch_of(0)
    for column, dtype, wanted in (("obs", np.float64, "float32"), ("action", np.float32, "int64")):
        found = np.dtype(dtype)
        with pytest.raises(TrainerError, match=f"Column '{column}' must have dtype {wanted}; found {found}"):
            learner.step({**batch, column: batch[column].astype(dtype)}, weights)
