"""What a generated program is made of: queues, workers, session."""

from pearl.runtime.collection import CollectionBuffer
from pearl.runtime.options import Options, parse_options
from pearl.runtime.queues import Bell, ColumnQueue, DataCollectionQueue, WeightSyncQueue
from pearl.runtime.session import Program, Session, import_class, run_program
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
    "DataCollectionQueue",
    "DoneQueue",
    "GrantQueue",
    "LearnerWorker",
    "Options",
    "Program",
    "ProgressQueue",
    "Session",
    "TrainingLoop",
    "WeightSyncQueue",
    "import_class",
    "parse_options",
    "run_program",
]
