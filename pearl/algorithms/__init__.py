"""Trainer classes: derive from one, or bring any class with `get_action` and `update_policy`."""

from pearl.algorithms.batch import Batch
from pearl.algorithms.ddpg import DDPG
from pearl.algorithms.dqn import DQN
from pearl.algorithms.trainer import Phase, Trainer, TrainerLike, make_trainer

__all__ = ["DDPG", "DQN", "Batch", "Phase", "Trainer", "TrainerLike", "make_trainer"]
