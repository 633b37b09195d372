"""What several learners need of each other: each gives its weights, takes them back, and tells its TD error."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from trainers import TinyDQN

from pearl.algorithms.trainer import make_trainer
from pearl.backends import learners
from pearl.errors import TrainerError

DEVICES = {
    "torch": pytest.param("torch", "cpu"),
    "native": pytest.param("native", "cpu"),
    "sycl": pytest.param("sycl", "opencl:cpu", marks=pytest.mark.sycl),
    "fpga": pytest.param("fpga", "fpga_emu", marks=pytest.mark.fpga),
}
each_learner = pytest.mark.parametrize(("name", "device"), DEVICES.values())


def trainer_of(seed: int) -> Any:
    return make_trainer(TinyDQN, spaces.Box(-1.0, 1.0, (4,), np.float32), spaces.Discrete(2), seed=seed)


def batch_of(rows: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    obs, next_obs = rng.standard_normal((2, rows, 4), np.float32)
    reward, discount = rng.standard_normal(rows, np.float32), np.full(rows, 0.9, np.float32)
    action = rng.integers(0, 2, rows)
    return {"obs": obs, "action": action, "reward": reward, "next_obs": next_obs, "discount": discount}


def test_every_implementation_is_tested_here() -> None:
    assert set(DEVICES) == set(learners())


@each_learner
def test_weights_travel_from_one_learner_to_another(name: str, device: str) -> None:
    """After that both train alike, whatever the second was before."""
    first, second = (learners()[name].make(trainer_of(seed), device=device) for seed in (1, 2))
    weights = np.zeros((2, first.weight_count), np.float32)
    first.write_weights(weights[0])
    second.write_weights(weights[1])
    assert not np.array_equal(*weights)
    second.load_weights(weights[0])
    second.write_weights(weights[1])
    np.testing.assert_array_equal(*weights)
    with pytest.raises(TrainerError, match="found"):
        second.load_weights(weights[0, 1:])


@each_learner
def test_a_step_tells_its_mean_absolute_td_error(name: str, device: str) -> None:
    """It trains with the weights that were loaded."""
    first, second = (learners()[name].make(trainer_of(seed), device=device) for seed in (1, 2))
    weights = np.zeros(first.weight_count, np.float32)
    first.write_weights(weights)
    second.load_weights(weights)
    for target, source in zip(
        second.trainer.target_q.parameters(),  # type: ignore[attr-defined]
        first.trainer.target_q.parameters(),  # type: ignore[attr-defined]
        strict=True,
    ):
        target.data.copy_(source.data)
    for learner in (first, second):
        learner.prepare()
    results = [learner.step(batch_of(16), np.ones(16, np.float32)) for learner in (first, second)]
    np.testing.assert_array_equal(results[0].priorities, results[1].priorities)
    assert results[0].td_error == results[1].td_error == pytest.approx(results[0].priorities.mean(), rel=1e-4)
