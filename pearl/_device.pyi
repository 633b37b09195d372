"""The classes that `pearl._sycl` and `pearl._cuda` both have; their contracts stand in kernels/include/pearl/device/.

There is no module of this name.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from pearl import _native

class DeviceView:
    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...

class DeviceQueue:
    @property
    def name(self) -> str: ...
    @property
    def launches(self) -> int: ...
    def wait(self) -> None: ...
    def shared_floats(self, count: int) -> np.ndarray: ...
    def device_floats(self, count: int) -> DeviceView: ...
    def launch_times_us(self, launches: int, repeats: int) -> list[float]: ...
    def memory_times_us(self, nbytes: int, repeats: int) -> list[float]: ...
    def copy_times_us(self, nbytes: int, to_device: bool, repeats: int, pinned: bool = False) -> list[float]: ...

class AnyLearner:
    def set(
        self,
        *,
        double_q: bool = False,
        stochastic: bool = False,
        saturation_penalty: float = 0.0,
        target_noise: float = 0.0,
        noise_clip: float = 0.0,
        log_std_low: float = -20.0,
        log_std_high: float = 2.0,
        target_entropy: float = 0.0,
        max_grad_norm: float = 0.0,
        tau: float = 1.0,
        target_interval: int = 1,
        policy_delay: int = 1,
        noise_seed: int = 0,
    ) -> None: ...
    def set_adam(
        self,
        which: int,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        decay: float,
        decoupled: bool,
        first: np.ndarray,
        second: np.ndarray,
        max_second: np.ndarray | None,
        steps: np.ndarray,
    ) -> None: ...
    def set_sgd(
        self,
        which: int,
        lr: float,
        momentum: float,
        dampening: float,
        decay: float,
        nesterov: bool,
        buffer: np.ndarray | None,
        fresh: bool,
    ) -> None: ...
    def step(
        self, columns: Sequence[np.ndarray], weights: np.ndarray, number: int
    ) -> tuple[np.ndarray, dict[str, float]]: ...

class Learner(AnyLearner):
    def __init__(
        self,
        queue: DeviceQueue,
        actor_critic: bool,
        networks: Sequence[tuple[int, Sequence[tuple[str, int, int, int, int, int, float]]]],
        parameters: Sequence[np.ndarray | None],
        scales: np.ndarray,
        observation_size: int,
        action_size: int,
        log_alpha: np.ndarray | None,
        *,
        slices: int = 0,  # 0: what suits the device
        columns_per_tile: int = 0,
        block_bytes: int = -1,  # of their own memory, that blocks may use; -1: all
        branches: bool = True,  # passes that do not wait for each other run side by side
    ) -> None: ...
    @property
    def branches(self) -> int: ...

class ColumnStore:
    def __init__(
        self,
        queue: DeviceQueue,
        capacity: int,
        columns: list[tuple[np.dtype[Any], tuple[int, ...]]],
        pinned: bool = False,
    ) -> None: ...
    def insert(self, start: int, count: int, columns: list[np.ndarray]) -> None: ...
    def gather(self, indices: np.ndarray) -> list[np.ndarray]: ...
    def gather_there(self, indices: np.ndarray) -> list[DeviceView]: ...
    def batch_there(self, count: int) -> list[DeviceView]: ...
    def read(self, column: int, count: int) -> np.ndarray: ...
    def read_batch(self, count: int) -> list[np.ndarray]: ...
    def close(self) -> None: ...

class Gae(_native._Gae):
    def __init__(self, queue: DeviceQueue, gamma: float, gae_lambda: float) -> None: ...

class SumTree(_native._ReplayKernel):
    INITIAL_MAX: ClassVar[float]
    def __init__(
        self,
        queue: DeviceQueue,
        capacity: int,
        fanout: int,
        mode: str,
        alpha: float,
        seed: int,
        stratified: bool = True,
        initial_priority: float = 0.0,
        priority_epsilon: float = 0.0,
    ) -> None: ...
    def prepare_iteration(self, batch_size: int, beta: float) -> None: ...
    def launch_draw(self, columns: ColumnStore | None = None) -> None: ...
    def launch_update(self, priorities: np.ndarray) -> None: ...
    def launch_update_there(self, priorities: DeviceView) -> None: ...
    def draw_there(self) -> tuple[DeviceView, DeviceView]: ...
    def times_us(self, batch_size: int, priorities: np.ndarray | None, launches: int, repeats: int) -> list[float]: ...
    def read_batch(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]: ...
    def start_autorun(self, max_batch: int, depth: int) -> _native.ReplayAutorun: ...
    def check(self) -> None: ...

class TrainingLoop(_native._GrantedLoop):
    def __init__(
        self,
        learner: Learner,
        replay: SumTree,
        storage: ColumnStore,
        batch_size: int,
        grants: _native.SlotQueue,
        done: _native.SlotQueue,
        snapshot: _native.Snapshot,
        policy: Sequence[np.ndarray],
        interval: int,
        steps: np.ndarray,
    ) -> None: ...
    def time_parts(self, wanted: bool) -> None: ...
