"""Torch's compiler is loaded by those who compile, and then does what it does without PEARL."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

MADE = """
import sys
import numpy as np
import torch
from gymnasium import spaces
from trainers import TinyDQN
from pearl.algorithms.trainer import make_trainer
trainer = make_trainer(TinyDQN, spaces.Box(-1.0, 1.0, (3,), np.float32), spaces.Discrete(2))
"""

NATIVE = """
from pearl.backends.cpu.learner import NativeLearner
from pearl.runtime.trainer_state import load_module_tensors, module_tensors
from pearl.spec import TransitionSpec
batch = TransitionSpec.from_spaces(trainer.observation_space, trainer.action_space).empty(4)
for column in batch.values():
    column[:] = 0
NativeLearner(trainer).step(batch, np.ones(4, np.float32))
trainer.optimizer.zero_grad()
trainer.optimizer.load_state_dict(trainer.optimizer.state_dict())
load_module_tensors(trainer, module_tensors(trainer))
print("torch._dynamo" in sys.modules)
"""

COMPILED = """
from trainers import OwnTrainer
make_trainer(OwnTrainer, trainer.observation_space, trainer.action_space)  # in torch from the start

def trained(compiled):
    torch.manual_seed(0)
    model, inputs = torch.nn.Linear(3, 1), torch.randn(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()

    if compiled:
        step = torch.compile(step, backend="eager")
    for _ in range(3):
        step()
    return model.weight.detach()

loaded = "torch._dynamo" in sys.modules
eager = trained(False)
assert ("torch._dynamo" in sys.modules) == loaded
assert torch.equal(trained(True), eager)
assert "torch._dynamo" in sys.modules
assert torch.equal(trained(False), eager)
marked = torch.optim.Optimizer.zero_grad.__wrapped__.__dynamo_disable
print(marked.__module__)
"""


def said(script: str) -> str:
    tests = Path(__file__).parent
    done = subprocess.run([sys.executable, "-c", MADE + script], cwd=tests, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_trainer_that_no_torch_optimizer_steps_loads_no_compiler() -> None:
    assert said(NATIVE) == "False"


def test_what_is_compiled_after_a_trainer_was_made_trains_as_without_it() -> None:
    assert said(COMPILED) == "torch._dynamo.eval_frame"


@pytest.mark.slow
def test_methods_first_called_with_the_compiler_there_are_marked_by_it() -> None:
    assert said("import torch._dynamo\n" + COMPILED) == "torch._dynamo.eval_frame"
