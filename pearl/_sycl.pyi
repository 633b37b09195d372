"""Primitives on SYCL devices; their contracts stand in kernels/sycl/. Loaded by pearl.backends.sycl.runtime alone."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from pearl import _native
from pearl._device import AnyLearner as _AnyLearner
from pearl._device import ColumnStore as ColumnStore
from pearl._device import DeviceQueue as DeviceQueue
from pearl._device import Gae as Gae
from pearl._device import Learner as Learner
from pearl._device import SumTree as SumTree
from pearl._device import TrainingLoop as TrainingLoop

SYCL_VERSION: str
SOURCES_HASH: str  # of the kernels' texts

class Queue(DeviceQueue):
    def __init__(self, queue: Any, kernels_at_once: int = 0) -> None: ...  # an in-order dpctl.SyclQueue
    def compile(self, name: str, text: str, kernels: list[str]) -> None: ...

# Classes with an underscore exist in these stubs alone.
class _Stages:
    @property
    def stage_launches(self) -> int: ...
    @property
    def bridge_launches(self) -> int: ...

class FpgaSumTree(_native._ReplayKernel, _Stages):
    def __init__(
        self,
        queue: Queue,
        capacity: int,
        fanout: int,
        alpha: float,
        seed: int,
        stratified: bool,
        initial_priority: float,
        priority_epsilon: float,
        timeout_s: float,
    ) -> None: ...
    @property
    def level_bits(self) -> list[int]: ...
    def last_batch(self) -> tuple[np.ndarray, np.ndarray]: ...
    @property
    def level_nodes(self) -> list[int]: ...

def fpga_replay_source(capacity: int, fanout: int, pipe_items: int = 1024) -> str: ...

class Autorun(_Stages):
    def __init__(
        self, queue: Queue, name: str, text: str, stages: list[str], bridges: list[str], timeout_s: float
    ) -> None: ...
    def run(self, words: Sequence[int]) -> list[int]: ...
    def join(self) -> None: ...

class FpgaGae(_native._Gae, _Stages):
    def __init__(
        self, queue: Queue, gamma: float, gae_lambda: float, lookahead: int, rows: int, timeout_s: float
    ) -> None: ...
    def close(self) -> None: ...

def fpga_gae_source(lookahead: int, rows: int, pipe_items: int = 1024) -> str: ...

class FpgaLearner(_AnyLearner, _Stages):
    def __init__(
        self,
        queue: Queue,
        actor_critic: bool,
        networks: Sequence[tuple[int, Sequence[tuple[str, int, int, int, int, int, float]]]],
        parameters: Sequence[np.ndarray | None],
        scales: np.ndarray,
        observation_size: int,
        action_size: int,
        log_alpha: np.ndarray | None,
        *,
        copies: int = 0,
        unroll: Sequence[Sequence[int]] = ((16,),),
        timeout_s: float = 120.0,
    ) -> None: ...
    def join(self, replay: FpgaSumTree, storage: ColumnStore, batch_size: int) -> None: ...
    def train(self, number: int, beta: float) -> dict[str, float]: ...
    def close(self) -> None: ...
    def source(self, rows: int) -> str: ...
    @property
    def copies(self) -> int: ...
