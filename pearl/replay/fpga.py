"""The former place of `FpgaReplayManager`, from which older programs and scripts import."""

from pearl.backends.fpga.replay import FpgaReplayManager as FpgaReplayManager
