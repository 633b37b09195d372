"""Torch's compiler stays out of a process until something is compiled."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
import numpy as np, torch
from gymnasium import spaces
from pearl.algorithms import DQN
from pearl.algorithms.trainer import make_trainer

trainer = make_trainer(DQN, spaces.Box(-1, 1, (3,), np.float32), spaces.Discrete(2))
optimizer = trainer.optimizer
kept = optimizer.state_dict()
optimizer.zero_grad()
optimizer.load_state_dict(kept)
optimizer.add_param_group({"params": [torch.zeros(2, requires_grad=True)]})
print("torch._dynamo" in sys.modules, len(optimizer.param_groups))

compiled = []

def note(graph, inputs):
    compiled.append([str(node.target) for node in graph.graph.nodes if node.op.startswith("call")])
    return graph

@torch.compile(backend=note)
def double(x):
    optimizer.zero_grad()
    return 2.0 * x

weight = optimizer.param_groups[0]["params"][0]
weight.grad = torch.ones_like(weight)
result = double(torch.ones(2)).tolist()
print(result, weight.grad, len(compiled), any("zero" in name for names in compiled for name in names))
optimizer.state_dict()
"""


def test_an_optimizer_is_made_without_it_and_what_is_compiled_later_leaves_optimizers_alone() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first == "False 2"
    assert second == "[2.0, 2.0] None 1 False"
