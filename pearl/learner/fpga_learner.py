"""The former place of `FpgaLearner`, from which older programs and scripts import."""

from pearl.backends.fpga.learner import FpgaLearner as FpgaLearner
