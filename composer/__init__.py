"""Composes deep reinforcement learning systems: profile, matrix, placement, code."""

from composer.composer import Composer
from composer.matrix import AssignmentMatrix
from composer.placement import LearnerConfig, Placement, ReplayConfig

__all__ = ["AssignmentMatrix", "Composer", "LearnerConfig", "Placement", "ReplayConfig"]
