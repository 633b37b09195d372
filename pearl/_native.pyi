"""CPU kernels of PEARL; their contracts stand in kernels/include/pearl/."""

import mmap
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

import numpy as np

from pearl.rollout.quantization import Codes

Buffer: TypeAlias = mmap.mmap | bytearray | memoryview | np.ndarray

# Classes with an underscore exist in these stubs alone: what several kernels have in common.
class _ReplayKernel:
    @property
    def filled(self) -> int: ...
    @property
    def total(self) -> int: ...
    @property
    def scale(self) -> int: ...
    @property
    def alpha(self) -> float: ...
    @property
    def max_priority(self) -> float: ...
    def insert(self, indices: np.ndarray, priorities: np.ndarray | None) -> None: ...
    def sample(self, batch_size: int, beta: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]: ...
    def sample_into(self, beta: float, indices: np.ndarray, weights: np.ndarray, generations: np.ndarray) -> None: ...
    def update(self, indices: Any, priorities: Any, generations: Any) -> int: ...  # TypeError unless in kernel form
    def retrieve(self, indices: np.ndarray) -> np.ndarray: ...
    def set_alpha(self, alpha: float) -> None: ...
    def statistics(self) -> dict[str, Any]: ...
    def save(self) -> dict[str, Any]: ...
    def load(self, state: Mapping[str, Any]) -> None: ...
    def close(self) -> None: ...

class _GrantedLoop:
    def run_once(self, timeout_s: float) -> bool: ...
    def restart(self) -> None: ...
    def open_window(self) -> None: ...
    def close_window(self) -> None: ...
    def last_batch(self) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]: ...
    def seconds(self) -> dict[str, float]: ...
    def keep_events(self, most: int) -> None: ...
    def events(self) -> list[tuple[str, float, float]]: ...
    def events_ahead(self) -> list[tuple[str, float, float]]: ...

class SumTree(_ReplayKernel):
    INITIAL_MAX: ClassVar[float]
    INITIAL_MEAN: ClassVar[float]
    def __init__(
        self,
        capacity: int,
        fanout: int,
        mode: str,
        alpha: float,
        seed: int,
        stratified: bool = True,
        replacement: bool = True,
        max_times_sampled: int = 0,
        initial_priority: float = 0.0,
        priority_epsilon: float = 0.0,
        workers: int = 1,
    ) -> None: ...
    def sample_indices(self, batch_size: int) -> np.ndarray: ...
    def find(self, targets: np.ndarray) -> np.ndarray: ...

class ReplayAutorun:
    def __init__(self, sum_tree: SumTree, max_batch: int, depth: int = 8) -> None: ...
    def write_sample(self, batch_size: int, beta: float, timeout_s: float = 0.0) -> bool: ...
    def write_update(
        self,
        indices: np.ndarray,
        priorities: np.ndarray,
        generations: np.ndarray | None,
        timeout_s: float = 0.0,
    ) -> bool: ...
    def write_insert(self, indices: np.ndarray, priorities: np.ndarray | None, timeout_s: float = 0.0) -> bool: ...
    def poll(self) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None: ...
    def pending(self) -> int: ...
    def drain(self, timeout_s: float) -> bool: ...
    def stop(self) -> None: ...
    def attach_bell(self, bell: Doorbell) -> None: ...
    def seconds(self) -> dict[str, float]: ...
    def keep_events(self, most: int) -> None: ...
    def events(self) -> list[tuple[str, float, float]]: ...

class ColumnStore:
    def __init__(self, columns: dict[str, np.ndarray]) -> None: ...
    # Both return None, and do nothing, where the arrays do not fit the columns; TypeError for indices not int64.
    def insert(self, start: int, count: int, sources: dict[str, np.ndarray]) -> np.ndarray | None: ...
    def gather(self, indices: Any, size: int, out: dict[str, np.ndarray] | None) -> dict[str, np.ndarray] | None: ...

class EpisodeLinks:
    def __init__(
        self,
        arrays: Mapping[str, np.ndarray],
        slice: int,
        obs: np.ndarray | None,
        next_obs: np.ndarray | None,
        kept_obs: np.ndarray | None,
    ) -> None: ...
    def insert(
        self,
        start: int,
        filled: int,
        streams: np.ndarray,
        endings: np.ndarray,
        positions: np.ndarray | None,
        obs: np.ndarray | None,
        next_obs: np.ndarray | None,
        columns: ColumnStore | None,
        sources: dict[str, np.ndarray] | None,
    ) -> None: ...
    def damage(self, size: int, cursor: int) -> str: ...
    def remaining(self, indices: np.ndarray, size: int) -> np.ndarray: ...
    def walk(self, indices: np.ndarray, size: int, length: int, back: bool) -> tuple[np.ndarray, np.ndarray]: ...
    def gather_steps(
        self,
        columns: ColumnStore,
        indices: np.ndarray,
        size: int,
        back: bool,
        repeat: bool,
        slots: np.ndarray,
        mask: np.ndarray,
        targets: dict[str, np.ndarray],
        next_target: np.ndarray | None,
    ) -> np.ndarray: ...
    def endings(self, indices: np.ndarray, size: int) -> np.ndarray: ...
    def n_step(
        self, indices: np.ndarray, size: int, reward: np.ndarray, discounts: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]: ...
    def draw(self, random: np.ndarray) -> np.ndarray: ...
    def gather_next(self, indices: np.ndarray, size: int, target: np.ndarray) -> None: ...

class Doorbell:
    nbytes: ClassVar[int]
    def __init__(self, buffer: Buffer) -> None: ...
    def value(self) -> int: ...
    def ring(self) -> None: ...
    def wait(self, seen: int, timeout_s: float) -> bool: ...

class SlotQueue:
    def __init__(self, buffer: Buffer, slots: int, slot_bytes: int, create: bool) -> None: ...
    @staticmethod
    def nbytes(slots: int, slot_bytes: int) -> int: ...
    @property
    def closed(self) -> bool: ...
    @property
    def slots(self) -> int: ...
    def offset(self, slot: int) -> int: ...
    def reserve(self, timeout_s: float = 0.0) -> int: ...
    def publish(self, count: int) -> None: ...
    def peek(self, timeout_s: float = 0.0) -> int: ...
    def count(self, slot: int) -> int: ...
    def release(self) -> None: ...
    def close(self) -> None: ...
    def size(self) -> int: ...
    def attach_bell(self, bell: Doorbell) -> None: ...

class Snapshot:
    def __init__(self, buffer: Buffer, payload_bytes: int, create: bool) -> None: ...
    @staticmethod
    def nbytes(payload_bytes: int) -> int: ...
    @property
    def version(self) -> int: ...
    def write(self, payload: Buffer | bytes) -> int: ...
    def read(self, out: Buffer, seen_version: int) -> int: ...

# Of the kernels that the Replay Manager's hot loops use: replay_kernels.hpp.
def kernel_variants() -> list[str]: ...
def selected_kernels() -> str: ...
def select_kernels(name: str) -> None: ...
def quantise(priorities: np.ndarray, alpha: float, scale: int) -> np.ndarray: ...
def importance_weights(leaves: np.ndarray, beta: float) -> np.ndarray: ...
def stratified_targets(seed: int, call: int, count: int, total: int) -> np.ndarray: ...
def copy_bandwidth(nbytes: int, repeats: int) -> float: ...
def random_access_ns(nbytes: int, steps: int) -> float: ...

# Generalized advantage estimation: gae.hpp.
class _Gae:
    def estimate(self, rewards: np.ndarray, values: np.ndarray, last_values: np.ndarray, ends: np.ndarray) -> None: ...
    def estimate_codes(
        self,
        rewards: Codes,
        values: Codes,
        bonus: np.ndarray | None,
        last_values: np.ndarray,
        ends: np.ndarray,
        advantages: np.ndarray,
        returns: np.ndarray,
    ) -> None: ...

class Gae(_Gae):
    def __init__(self, gamma: float, gae_lambda: float) -> None: ...

def gae_kernel_variants() -> list[str]: ...
def selected_gae_kernels() -> str: ...
def select_gae_kernels(name: str) -> None: ...

# The native learner: kernels/include/pearl/learner/.
_Op: TypeAlias = tuple[str, int, int, int, int, int, float]  # kind, inputs, outputs, weight, bias, eps
_WindowOp: TypeAlias = tuple[str, int, int, int, int, tuple[int, ...]]  # kind, input, outputs, weight, bias, window

def learner_kernel_variants() -> list[str]: ...
def selected_learner_kernels() -> str: ...
def select_learner_kernels(name: str) -> None: ...
def has_amx() -> bool: ...
def allow_amx(allowed: bool) -> None: ...
def gemm(
    a: np.ndarray,
    b: np.ndarray,
    c: np.ndarray,
    bias: np.ndarray | None = None,
    gate: np.ndarray | None = None,
    relu: bool = False,
    accumulate: bool = False,
) -> None: ...
def keep_freed_memory() -> None: ...
def end_with_parent(parent: int) -> None: ...
def chosen_critics(seed: int, step: int, critics: int, chosen: int) -> np.ndarray: ...
def dropout_mask(seed: int, step: int, draw: int, first: int, rows: int, width: int, rate: float) -> np.ndarray: ...
def normal_noise(seed: int, step: int, draw: int, rows: int, size: int) -> np.ndarray: ...

class Network:
    def __init__(
        self, inputs: int, ops: Sequence[_Op | _WindowOp], parameters: int, of_bytes: bool = False
    ) -> None: ...
    @property
    def takes_bytes(self) -> bool: ...
    @property
    def inputs(self) -> int: ...
    @property
    def outputs(self) -> int: ...
    @property
    def parameters(self) -> int: ...
    def forward(self, parameters: np.ndarray, inputs: np.ndarray) -> np.ndarray: ...
    def gradients(
        self, parameters: np.ndarray, inputs: np.ndarray, slopes: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray | None]: ...

class Evaluator:
    def __init__(self, network: Network) -> None: ...
    def forward(self, parameters: np.ndarray, inputs: np.ndarray) -> np.ndarray: ...

class Optimizer:
    def __init__(self) -> None: ...
    def set_adam(
        self,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        decoupled: bool,
        first: np.ndarray,
        second: np.ndarray,
        max_second: np.ndarray | None,
        steps: np.ndarray,
    ) -> None: ...
    def set_sgd(
        self,
        parameters: int,
        lr: float,
        momentum: float,
        dampening: float,
        weight_decay: float,
        nesterov: bool,
        buffer: np.ndarray | None,
        first: bool,
    ) -> None: ...

class DqnLearner:
    def __init__(self, network: Network, online: np.ndarray, target: np.ndarray, threads: int) -> None: ...
    def set(self, double_q: bool, loss: str, max_grad_norm: float, tau: float, target_update_interval: int) -> None: ...
    def algorithm(self, optimizer: Optimizer, steps: np.ndarray, masked: bool = False) -> Algorithm: ...
    def step(
        self,
        obs: np.ndarray,
        actions: np.ndarray,
        rewards: np.ndarray,
        next_obs: np.ndarray,
        discounts: np.ndarray,
        weights: np.ndarray,
        number: int,
        optimizer: Optimizer,
        next_masks: np.ndarray | None = None,
    ) -> tuple[np.ndarray, float, float, float]: ...

def shuffled(count: int, seed: int, call: int) -> np.ndarray: ...

class PpoLearner:
    def __init__(
        self,
        policy: Network,
        value: Network,
        weights: np.ndarray,
        sizes: Sequence[int],
        size: int,
        log_std: int | None,
        threads: int,
    ) -> None: ...
    def set(
        self,
        *,
        clip_range: float,
        value_clip_range: float,
        value_coefficient: float,
        entropy_coefficient: float,
        max_grad_norm: float,
        target_kl: float,
        normalize_advantages: float,
    ) -> None: ...
    def train(
        self,
        obs: np.ndarray,
        actions: np.ndarray,
        log_probs: np.ndarray,
        advantages: np.ndarray,
        returns: np.ndarray,
        rows: np.ndarray | None,
        epochs: int,
        batch_size: int,
        seed: int,
        optimizer: Optimizer,
        steps: np.ndarray,
        masks: np.ndarray | None = None,
    ) -> dict[str, float]: ...

class RolloutPolicy:
    def __init__(
        self,
        policy: Network,
        value: Network,
        sizes: Sequence[int],
        size: int,
        log_std: int | None,
        normalization: tuple[int, int] | None,
    ) -> None: ...
    def explore(
        self,
        weights: np.ndarray,
        obs: np.ndarray,
        noise: np.ndarray,
        actions: np.ndarray,
        log_probs: np.ndarray,
        values: np.ndarray,
    ) -> None: ...
    def values(self, weights: np.ndarray, obs: np.ndarray) -> np.ndarray: ...

class ActorCriticLearner:
    def __init__(
        self,
        actor: Network,
        critics: Sequence[Network],
        actor_weights: np.ndarray,
        target_actor_weights: np.ndarray | None,
        critic_weights: np.ndarray,
        target_critic_weights: np.ndarray,
        obs_center: np.ndarray,
        obs_half_range: np.ndarray,
        action_center: np.ndarray,
        action_half_range: np.ndarray,
        threads: int,
    ) -> None: ...
    def set(
        self,
        stochastic: bool,
        saturation_penalty: float,
        target_noise: float,
        noise_clip: float,
        log_std_low: float,
        log_std_high: float,
        target_entropy: float,
        tau: float,
        max_grad_norm: float,
        target_critics: int = 0,
    ) -> None: ...
    def algorithm(
        self,
        critic: Optimizer,
        actor: Optimizer,
        temperature: Optimizer | None,
        log_alpha: np.ndarray | None,
        noise_seed: np.ndarray | None,
        policy_delay: int,
        steps: np.ndarray,
    ) -> Algorithm: ...
    def step(
        self,
        obs: np.ndarray,
        actions: np.ndarray,
        rewards: np.ndarray,
        next_obs: np.ndarray,
        discounts: np.ndarray,
        weights: np.ndarray,
        next_noise: np.ndarray | None,
        noise: np.ndarray | None,
        moves_policy: bool,
        moves_targets: bool,
        critic: Optimizer,
        actor: Optimizer,
        temperature: Optimizer | None,
        log_alpha: np.ndarray | None,
        seed: int = 0,
        number: int = 0,
    ) -> tuple[np.ndarray, float, float, float, float]: ...

class Algorithm:
    """One algorithm's training step, for a native loop."""

class TrainingLoop(_GrantedLoop):
    def __init__(
        self,
        replay: SumTree,
        columns: list[np.ndarray],
        algorithm: Algorithm,
        batch_size: int,
        grants: SlotQueue,
        done: SlotQueue,
        snapshot: Snapshot,
        policy: list[np.ndarray],
        interval: int,
        prefetch: bool = False,
    ) -> None: ...
    def run(self) -> None: ...
