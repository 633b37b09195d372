"""Primitives on CUDA devices and on the emulator of their kernels; see kernels/cuda/."""

from pearl._device import ColumnStore as ColumnStore
from pearl._device import DeviceQueue as DeviceQueue
from pearl._device import Learner as Learner
from pearl._device import SumTree as SumTree
from pearl._device import TrainingLoop as TrainingLoop

SOURCES_HASH: str  # of the kernels' texts

class Queue(DeviceQueue):
    def __init__(self, index: int, compiler: str, cache: str) -> None: ...
    def write_out_of_bounds(self) -> None: ...

class EmulatedQueue(DeviceQueue):
    def __init__(self, most_lanes: int = 64, order: str = "ascending", seed: int = 0) -> None: ...
    def control(self, kernel: str) -> list[int]: ...

def binary(stem: str, major: int, minor: int, options: list[str], compiler: str) -> bytes: ...
def compiler_version(compiler: str) -> str: ...
