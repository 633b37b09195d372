"""The parts of a generated program: queues, workers, session.

The names are loaded when they are asked for: a process that needs only the queues, such as an Actor whose policy runs
natively, does not load torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pearl.ipc.queues import Bell, ColumnQueue, WeightSyncQueue
    from pearl.runtime.beginning import begin_program
    from pearl.runtime.collection import CollectionBuffer
    from pearl.runtime.entry import run_program
    from pearl.runtime.host_iteration import HostIteration
    from pearl.runtime.launch import run_generated
    from pearl.runtime.learner_processes import LearnerProcesses
    from pearl.runtime.learners_session import LearnersSession
    from pearl.runtime.options import Options, parse_options
    from pearl.runtime.power import PoweredDevice, PowerPlan
    from pearl.runtime.queues import DataCollectionQueue
    from pearl.runtime.recomposition import ComposerInputs
    from pearl.runtime.reporting import Program
    from pearl.runtime.rollout_session import (
        RolloutAssignmentQueue,
        RolloutDoneQueue,
        RolloutSession,
        RolloutWorker,
    )
    from pearl.runtime.session import Session
    from pearl.runtime.trainer_import import import_class, import_object
    from pearl.runtime.workers import (
        AssignmentQueue,
        DoneQueue,
        GrantQueue,
        LearnerWorker,
        ProgressQueue,
        TrainingLoop,
    )

__all__ = [
    "AssignmentQueue",
    "Bell",
    "CollectionBuffer",
    "ColumnQueue",
    "ComposerInputs",
    "DataCollectionQueue",
    "DoneQueue",
    "GrantQueue",
    "HostIteration",
    "LearnerProcesses",
    "LearnerWorker",
    "LearnersSession",
    "Options",
    "PowerPlan",
    "PoweredDevice",
    "Program",
    "ProgressQueue",
    "RolloutAssignmentQueue",
    "RolloutDoneQueue",
    "RolloutSession",
    "RolloutWorker",
    "Session",
    "TrainingLoop",
    "WeightSyncQueue",
    "begin_program",
    "import_class",
    "import_object",
    "parse_options",
    "run_generated",
    "run_program",
]

_MODULES = {
    "collection": ("CollectionBuffer",),
    "beginning": ("begin_program",),
    "entry": ("run_program",),
    "host_iteration": ("HostIteration",),
    "launch": ("run_generated",),
    "learner_processes": ("LearnerProcesses",),
    "learners_session": ("LearnersSession",),
    "options": ("Options", "parse_options"),
    "power": ("PowerPlan", "PoweredDevice"),
    "queues": ("DataCollectionQueue",),
    "recomposition": ("ComposerInputs",),
    "reporting": ("Program",),
    "rollout_session": ("RolloutAssignmentQueue", "RolloutDoneQueue", "RolloutSession", "RolloutWorker"),
    "session": ("Session",),
    "trainer_import": ("import_class", "import_object"),
    "workers": ("AssignmentQueue", "DoneQueue", "GrantQueue", "LearnerWorker", "ProgressQueue", "TrainingLoop"),
}
_MODULE_OF = {name: f"pearl.runtime.{module}" for module, names in _MODULES.items() for name in names}
_MODULE_OF |= dict.fromkeys(("Bell", "ColumnQueue", "WeightSyncQueue"), "pearl.ipc.queues")


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'pearl.runtime' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
