"""The former place of `NativeReplayManager`, from which older programs and scripts import."""

from pearl.backends.cpu.replay import NativeReplayManager as NativeReplayManager
