"""Trainer classes: derive from one, or bring any class with `get_action` and `update_policy`."""

from pearl.algorithms.batch import Batch
from pearl.algorithms.ddpg import DDPG
from pearl.algorithms.dqn import DQN
from pearl.algorithms.sac import SAC
from pearl.algorithms.td3 import TD3
from pearl.algorithms.trainer import Phase, Trainer, TrainerLike, make_trainer

__all__ = ["DDPG", "DQN", "SAC", "TD3", "Batch", "Phase", "Trainer", "TrainerLike", "make_trainer"]
