"""The former place of `SyclReplayManager`, from which older programs and scripts import."""

from pearl.backends.sycl.replay import SyclReplayManager as SyclReplayManager
