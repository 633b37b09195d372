"""Learning rates that fall over a run."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from programs import make_program, run
from test_native_loop import Gradual, Setup, Soft
from torch import nn
from trainers import FallingDQN

from pearl.algorithms import DDPG, DQN, PPO, SAC, TD3
from pearl.algorithms.trainer import Trainer, make_trainer
from pearl.errors import TrainerError

OBS = spaces.Box(-1.0, 1.0, (3,), np.float32)
RATES = {"optimizer": 1e-3, "critic_optimizer": 1e-3, "actor_optimizer": 2e-3, "temperature_optimizer": 4e-3}


@pytest.mark.parametrize("in_torch", [False, True], ids=["arrays", "torch"])
@pytest.mark.parametrize(
    ("trainer_class", "optimizers"),
    [
        (DQN, {"optimizer"}),
        (PPO, {"optimizer"}),
        (DDPG, {"critic_optimizer", "actor_optimizer"}),
        (TD3, {"critic_optimizer", "actor_optimizer"}),
        (SAC, {"critic_optimizer", "actor_optimizer", "temperature_optimizer"}),
    ],
)
def test_all_learning_rates_fall(trainer_class: type[Trainer], optimizers: set[str], in_torch: bool) -> None:
    settings: dict[str, Any] = {"learning_rate": 1e-3, "hidden_sizes": (8,)}
    if "actor_optimizer" in optimizers:
        settings["actor_learning_rate"] = 2e-3
    if "temperature_optimizer" in optimizers:
        settings["temperature_learning_rate"] = 4e-3
    space = spaces.Discrete(2) if trainer_class in (DQN, PPO) else spaces.Box(-1.0, 1.0, (2,), np.float32)
    for schedule, shares in (("constant", (1.0, 1.0, 1.0)), ("linear", (1.0, 0.75, 0.0))):
        trainer = trainer_class(OBS, space, learning_rate_schedule=schedule, **settings)
        if in_torch:
            trainer.in_torch()
        for progress, share in zip((0.0, 0.25, 1.5), shares, strict=True):
            trainer.set_progress(progress)
            for name in optimizers:
                (group,) = getattr(trainer.parts, name).param_groups
                assert group["lr"] == pytest.approx(share * RATES[name]), name


class OwnOptimizers(DQN):
    """Two groups with rates of their own, and an optimizer of another name."""

    hidden_sizes = (8,)

    def build(self) -> None:
        super().build()
        first, *others = self.q.parameters()
        groups = [{"params": [first], "lr": 1e-4}, {"params": others}]
        self.optimizer = torch.optim.RMSprop(groups, lr=1e-3)  # type: ignore[assignment]
        self.heads = nn.Linear(8, 3)
        self.heads_optimizer = torch.optim.Adam(self.heads.parameters(), lr=5e-3)


def test_a_schedule_is_a_factor_of_the_rates_that_optimizers_were_made_with() -> None:
    trainer = OwnOptimizers(OBS, spaces.Discrete(2), learning_rate_schedule="linear", learning_rate=2e-3)
    for progress, share in ((0.25, 0.75), (0.5, 0.5), (0.0, 1.0)):
        trainer.set_progress(progress)
        groups = (*trainer.optimizer.param_groups, *trainer.heads_optimizer.param_groups)
        assert [group["lr"] for group in groups] == pytest.approx([share * 1e-4, share * 1e-3, share * 5e-3])


class WithScheduler(DQN):
    def build(self) -> None:
        super().build()
        self.schedules = [torch.optim.lr_scheduler.StepLR(self.optimizer, 10)]


def test_a_scheduler_beside_a_schedule_is_refused() -> None:
    found = r'WithScheduler.schedules.0 is a StepLR, but learning_rate_schedule=.linear. .* Set .* = "constant"'
    with pytest.raises(TrainerError, match=found):
        make_trainer(WithScheduler, OBS, spaces.Discrete(2))
    make_trainer(WithScheduler, OBS, spaces.Discrete(2), settings={"learning_rate_schedule": "constant"})


@pytest.mark.parametrize("trainer_class", [Gradual, Soft])
def test_the_loop_in_cpp_takes_the_rate_of_the_moment(trainer_class: type[Trainer]) -> None:
    setup = Setup(type("Falling", (trainer_class,), {"learning_rate_schedule": "linear"}), native=True)
    setup.run(3)
    setup.trainer.set_progress(1.0)
    before = setup.policy().copy()
    setup.loop.refresh()
    setup.run(3)
    np.testing.assert_array_equal(setup.policy(), before)
    setup.trainer.set_progress(0.5)
    setup.loop.refresh()
    setup.run(3)
    assert np.any(setup.policy() != before)


def test_the_rate_falls_with_the_steps_of_the_run(tmp_path: Path, quick_profiles: None) -> None:
    program = make_program(tmp_path, trainer=FallingDQN)  # test_setting_schedules has both settings
    results = tmp_path / "results"
    code, output = run(program, "--serial", "--timesteps", "2000", "--eval-episodes", "1", "--run-dir", str(results))
    assert code == 0, output
    with (results / "progress.csv").open(newline="", encoding="utf-8") as file:
        last = list(csv.DictReader(file))[-1]
    assert 0.0 <= float(last["learning_rate"]) < 0.05 * FallingDQN.learning_rate
