"""The former place of `NativeLearner`, from which older programs and scripts import."""

from pearl.backends.cpu.learner import NativeLearner as NativeLearner
