"""Values that describe a run: transitions, networks, and the settings of replay, actors and training.

All are frozen and checked at construction.
"""

from __future__ import annotations

import keyword
import math
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, cast, get_args

import numpy as np

from pearl.errors import ConfigurationError

if TYPE_CHECKING:
    import gymnasium as gym

ReplayMode: TypeAlias = Literal["prioritized", "uniform", "fifo", "lifo", "top_k"]
InitialPriority: TypeAlias = 'Literal["max", "mean"] | float'
StorageKind: TypeAlias = Literal["ram", "memmap", "shared"]
RewardStandardization: TypeAlias = Literal["none", "returns", "dynamic", "block", "block_restored"]
ValueStandardization: TypeAlias = Literal["none", "block"]
MomentsRule: TypeAlias = Literal["keep", "average", "reset"]  # of optimizers, when an average is loaded
Correction: TypeAlias = Literal["clip", "vtrace"]
Exponent: TypeAlias = "float | Callable[[int], float]"
Scalar: TypeAlias = bool | int | float | str
VectorizationName: TypeAlias = Literal["sync", "async", "vector_entry_point", "envpool", "atari"]
Nodes: TypeAlias = tuple[tuple[str, int], ...]  # names of nodes of a cluster, each with a number of parties
Wrapper: TypeAlias = "Callable[..., Any] | tuple[Callable[..., Any], Mapping[str, Scalar]]"

# Names of the columns of every transition, in storage order.
OBS, ACTION, REWARD, NEXT_OBS, DISCOUNT = "obs", "action", "reward", "next_obs", "discount"

# Further columns of sequences (`TransitionSpec.sequences`).
STEPS, STATE, POSITION = "steps", "state", "position"

# Further columns of algorithms with action masks: of rollouts, and of transitions.
ACTION_MASK, NEXT_ACTION_MASK = "action_mask", "next_action_mask"

# Names of other columns in queues and batches.
RESERVED = (
    *("indices", "weights", "generations", "episode_return", "episode_length", "counts"),
    *("terminated", "rows", "count", "index", "batch", "priority"),
    *("observation_statistics", "return_statistics"),
)

# Statistics that normalise stored transitions: groups of checkpoints, and fields of actors' messages (`pearl.moments`).
OBSERVATION_STATISTICS, RETURN_STATISTICS = "observation_statistics", "return_statistics"

EPSILON_MIN = 1e-30  # of priorities: far above subnormal floats, which some devices treat as zero
_LATE = 10**15  # a step after the end of every schedule
_TORCH_DEVICE = re.compile(r"[a-z]+(:[0-9]{1,3})?")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigurationError(message)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_one_of(kind: object, value: object) -> bool:
    """Whether `value` is one of the texts of a Literal."""
    return isinstance(value, str) and value in get_args(kind)


def _maps_names(value: object) -> bool:
    return isinstance(value, Mapping) and all(isinstance(name, str) for name in value)


def _require_whole(name: str, value: object, least: int) -> None:
    whole = isinstance(value, int) and not isinstance(value, bool) and value >= least
    _require(whole, f"{name} must be a whole number of at least {least}; found {value!r}.")


def _require_importable(what: str, made_by: object) -> None:
    """Require a class or function that another process can import by its module and name."""
    name = getattr(made_by, "__qualname__", None)
    known = sys.modules.get(getattr(made_by, "__module__", None) or "")
    _require(
        isinstance(name, str) and "." not in name and "<" not in name and getattr(known, name, made_by) is made_by,
        f"{what} must be a class or function at the top level of a module, which actor processes and the generated "
        f"program import by its name; found {made_by!r}. Write it as `def make_env(**kwargs): ...` in your module, "
        "with the arguments in env_kwargs (of a wrapper: as (wrapper, {...})).",
    )


@dataclass(frozen=True)
class FieldSpec:
    """One column of the Data Storage: `shape` of one item and NumPy `dtype` name."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes of one item."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


class ActorStep(NamedTuple):
    """One step of all environments of an actor, from which it makes the columns that an algorithm declares.

    All arrays are `(envs, ...)`. `obs` is the input of `policy` (`pearl.actors.actor.Policy`). If an episode ended,
    `next_obs` is its last observation, never the first of the next. If not `real`, the step belongs to no episode.
    Where the trainer uses action masks, `next_action_mask` `(envs, choices)` bool is that of `next_obs`.
    """

    obs: np.ndarray
    action: np.ndarray
    reward: np.ndarray
    next_obs: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    real: np.ndarray
    policy: object
    next_action_mask: np.ndarray | None = None


@dataclass(frozen=True)
class Column(FieldSpec):
    """A column that an algorithm adds to its transitions; the actor makes it, and batches contain it unchanged.

    `make` returns `(envs, *shape)` for one step. It must be a module's function, since actors are processes. `n_step`
    says whether an n-step transition takes the value of its first or its last step. The composer measures without
    actors and fills the column with `typical`.
    """

    make: Callable[[ActorStep], np.ndarray]
    n_step: Literal["first", "last"] = "first"
    typical: float = 0.0

    def __post_init__(self) -> None:
        _require(
            self.n_step in ("first", "last"),
            f'n_step of column {self.name!r} must be "first" or "last"; found {self.n_step!r}.',
        )
        _require(
            self.name.isidentifier() and not keyword.iskeyword(self.name) and not self.name.startswith("_"),
            f"A column's name must be a Python name without a leading underscore; found {self.name!r}.",
        )
        _require(self.name not in RESERVED, f"The runtime has columns of its own named {self.name!r}; choose another.")


@dataclass(frozen=True)
class SequenceSpec:
    """Sequences of `length` steps of one episode. Each begins with the last `overlap` steps of the previous one.

    The last one of an episode may be shorter.
    """

    length: int
    overlap: int

    def __post_init__(self) -> None:
        _require_whole("sequence_length", self.length, 1)
        _require_whole("sequence_overlap", self.overlap, 0)
        _require(
            self.overlap < self.length,
            f"sequence_overlap must be smaller than sequence_length, {self.length}; found {self.overlap}.",
        )

    @property
    def stride(self) -> int:
        """Steps from the beginning of one sequence to that of the next."""
        return self.length - self.overlap


@dataclass(frozen=True)
class RolloutSequences:
    """Rollouts of a recurrent policy, as its Learner trains on them: in sequences of `length` steps of an environment.

    Actors record the recurrent state `(state_size,)` float32 before the first step of each sequence. A sequence may
    hold the ends of episodes; the state begins again after each.
    """

    length: int
    state_size: int

    def __post_init__(self) -> None:
        _require_whole("sequence_length", self.length, 1)
        _require_whole("state_size", self.state_size, 1)

    def check(self, rollout: RolloutSpec, train: TrainSpec) -> None:
        """Raise ConfigurationError unless the sequences divide the rollout's steps and its minibatches."""
        for name, steps in (("horizon", rollout.horizon), ("batch_size", train.batch_size)):
            nearest = max(1, round(steps / self.length)) * self.length
            _require(
                steps % self.length == 0,
                f"{name} must be a multiple of sequence_length, {self.length}, to be divided into sequences; found "
                f"{steps}. Set {name} to {nearest}, or change sequence_length.",
            )


@dataclass(frozen=True)
class TransitionSpec:
    """The columns of one transition ("experience"), in storage order, in the Data Storage, queues and batches.

    `obs`, `action`, `reward` (sum of the n discounted rewards), `next_obs` (n steps later) and `discount`
    (`gamma**m` after m steps, 0 where the episode terminated): a bootstrap target is always
    `reward + discount * value(next_obs)`, and truncation keeps its bootstrap.

    With `priority`, actors give each new transition its first priority (CF'22 Sec. 2.1.1): a module's function of the
    finished columns `(n, *shape)` and the actor's policy, which returns `(n,)` numbers of at least 0.

    With `statistics`, actors normalise by the run's: they are fields of each message, `OBSERVATION_STATISTICS` where
    observations are normalised, `RETURN_STATISTICS` where rewards are.

    With `sequence`, a row is not one step but a sequence of them: see `sequences`.

    With `rollout_sequences`, the rows are steps of rollouts of a recurrent policy, whose states messages hold too.
    """

    fields: tuple[FieldSpec, ...]
    priority: Callable[[Mapping[str, np.ndarray], Any], np.ndarray] | None = None
    statistics: tuple[FieldSpec, ...] = ()
    sequence: SequenceSpec | None = None
    rollout_sequences: RolloutSequences | None = None

    def __post_init__(self) -> None:
        names = [f.name for f in self.fields]
        _require(len(set(names)) == len(names), f"A transition's columns must differ in name; found {names}.")

    @classmethod
    def from_spaces(cls, observation_space: gym.Space[Any], action_space: gym.Space[Any]) -> TransitionSpec:
        """Build the spec for one environment's (unbatched) spaces; actions are int64 or float32."""
        obs_shape, obs_dtype = observation_space.shape, observation_space.dtype
        action_shape, action_dtype = action_space.shape, action_space.dtype
        if obs_shape is None or obs_dtype is None or action_shape is None or action_dtype is None:
            what, found = ("observations", observation_space) if obs_dtype is None else ("actions", action_space)
            kind = "Observation" if obs_dtype is None else "Action"
            raise ConfigurationError(
                f"Transitions need {what} that are arrays: Box, Discrete, MultiDiscrete or MultiBinary; found {found}. "
                f"Offer one of these by a gymnasium.{kind}Wrapper, in set_wrappers([...])."
            )
        obs_name = "uint8" if obs_dtype == np.uint8 else "float32"
        action_name = "int64" if np.issubdtype(action_dtype, np.integer) else "float32"
        return cls(
            (
                FieldSpec(OBS, tuple(obs_shape), obs_name),
                FieldSpec(ACTION, tuple(action_shape), action_name),
                FieldSpec(REWARD, (), "float32"),
                FieldSpec(NEXT_OBS, tuple(obs_shape), obs_name),
                FieldSpec(DISCOUNT, (), "float32"),
            )
        )

    def with_columns(self, *columns: Column) -> TransitionSpec:
        """A spec with `columns` appended."""
        return replace(self, fields=(*self.fields, *columns))

    def with_priority(self, make: Callable[[Mapping[str, np.ndarray], Any], np.ndarray]) -> TransitionSpec:
        """The same spec, with `make` for the first priorities."""
        return replace(self, priority=make)

    def sequences(self, length: int, overlap: int, state_size: int) -> TransitionSpec:
        """The spec of sequences of such steps, as Kapturowski et al. 2019 (R2D2, Sec. 2.3) store them.

        `obs` `(length + 1, *obs)` also holds the observation after the last step, so there is no `next_obs`. `action`,
        `reward` and `discount` `(length, ...)` are those of each step, n-step returns like a transition's, but not
        beyond the sequence. `steps` `(length,)` int64 is how many steps each return spans: step t bootstraps from
        `obs[t + steps[t]]`. It is 0, and all columns are 0, after the end of an episode. `state` `(state_size,)`
        float32 is the policy's recurrent state before the first step, and `position` int64 the number of that step in
        its episode. Raises ConfigurationError for lengths that do not fit, and for columns that an algorithm added.
        """
        made = SequenceSpec(length, overlap)
        _require(
            not self.further,
            "Sequences hold observations, actions, rewards and discounts only; found further columns: "
            f"{', '.join(f.name for f in self.further)}. Leave them out of transition().",
        )
        rows = {OBS: length + 1, ACTION: length, REWARD: length, DISCOUNT: length}
        return replace(
            self,
            fields=(
                *(replace(f, shape=(rows[f.name], *f.shape)) for f in self.fields if f.name in rows),
                FieldSpec(STEPS, (length,), "int64"),
                FieldSpec(STATE, (state_size,), "float32"),
                FieldSpec(POSITION, (), "int64"),
            ),
            sequence=made,
        )

    @property
    def observation_shape(self) -> tuple[int, ...]:
        """The shape of one observation."""
        shape = next(f.shape for f in self.fields if f.name == OBS)
        return shape if self.sequence is None else shape[1:]

    @property
    def steps_per_row(self) -> int:
        """New environment steps that a row brings: 1, of sequences their stride (those of short episodes: fewer)."""
        return 1 if self.sequence is None else self.sequence.stride

    def normalized(self, *, observations: bool, rewards: bool) -> TransitionSpec:
        """The same spec, of transitions whose observations, or rewards, are normalised by running statistics."""
        size = math.prod(next(f.shape for f in self.fields if f.name == OBS))
        counted = ((OBSERVATION_STATISTICS, size, observations), (RETURN_STATISTICS, 1, rewards))
        return replace(
            self, statistics=tuple(FieldSpec(name, (1 + 2 * n,), "float64") for name, n, wanted in counted if wanted)
        )

    @property
    def further(self) -> tuple[Column, ...]:
        """The columns that the algorithm added."""
        return tuple(f for f in self.fields if isinstance(f, Column))

    @property
    def nbytes(self) -> int:
        """Bytes of one transition (E in the paper's Algorithm 1)."""
        return sum(f.nbytes for f in self.fields)

    def empty(self, rows: int) -> dict[str, np.ndarray]:
        """Return uninitialised columns of shape `(rows, *shape)`, in storage order."""
        return {f.name: np.empty((rows, *f.shape), f.dtype) for f in self.fields}


@dataclass(frozen=True)
class LayerSpec:
    """One operation of a network, in execution order.

    `inputs` are indices of earlier layers, -1 for the network's input; `macs` counts multiply-accumulates of one
    forward pass of one item; `options` holds what the kind needs (kernel_size, stride, ...), as plain scalars.
    """

    name: str
    kind: str
    in_shape: tuple[int, ...]
    out_shape: tuple[int, ...]
    inputs: tuple[int, ...]
    parameters: int = 0
    macs: int = 0
    options: Mapping[str, Scalar | tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class NetworkSpec:
    """A network as Learners need it; extracted from torch modules, not written by users."""

    name: str
    input_shape: tuple[int, ...]
    output_shape: tuple[int, ...]
    layers: tuple[LayerSpec, ...]

    @property
    def parameters(self) -> int:
        """Count of trainable scalars."""
        return sum(layer.parameters for layer in self.layers)

    @property
    def macs(self) -> int:
        """Multiply-accumulates of one forward pass of one item."""
        return sum(layer.macs for layer in self.layers)

    @property
    def signature(self) -> str:
        """A short text equal for equal structures: part of calibration keys."""
        # With the parameter counts, since shapes alone do not show kernel sizes or the layers of untraced networks.
        parts = (
            f"{layer.kind}{'x'.join(map(str, layer.out_shape))}" + (f"/{layer.parameters}" if layer.parameters else "")
            for layer in self.layers
        )
        return f"{'x'.join(map(str, self.input_shape))}:" + "-".join(parts)


@dataclass(frozen=True)
class ReplaySpec:
    """Replay buffer: `capacity` slots; `fanout` of the sum tree, a power of two in [2, 256], or "auto".

    `mode` draws ("prioritized", "uniform") or takes in order ("fifo": oldest written first, "lifo": newest first,
    "top_k": highest priority first). `stratified` and `replacement` say how batches are drawn (see
    docs/replay_features.md). `max_times_sampled` (0: no limit) is how often an item may be sampled until its slot is
    overwritten. `initial_priority` is the priority of items that are inserted without one: the running maximum, the
    mean of the stored priorities, or a number. `priority_epsilon` is added to every given priority, so that an item
    with a TD error of zero is sampled again (Schaul et al. 2016); with 0, a priority of zero means "never sample".

    `alpha` and `beta` are numbers in [0, 4] or schedules (`pearl.replay.schedules`: called with environment steps). If
    alpha is a number, it is constant; if beta is, it changes linearly to `beta_final` over the run.

    `storage` says where the transitions are: this process's memory ("ram"), a file in the run folder ("memmap"), or
    shared memory ("shared"). `share_next_obs` stores next observations only if no stored observation is the same, which
    nearly halves the memory of image observations. `share_frames`, for observations that are stacks of k frames
    `(k, *frame)`, stores each frame once: nearly 1 / (2 k) of the memory; it needs "ram".
    """

    capacity: int
    mode: ReplayMode = "prioritized"
    fanout: int | Literal["auto"] = 16
    alpha: Exponent = 0.6
    beta: Exponent = 0.4
    beta_final: float = 1.0
    stratified: bool = True
    replacement: bool = True
    max_times_sampled: int = 0
    initial_priority: InitialPriority = "max"
    priority_epsilon: float = 1e-6
    storage: StorageKind = "ram"
    share_next_obs: bool = False
    share_frames: bool = False

    def __post_init__(self) -> None:
        _require(
            isinstance(self.capacity, int) and not isinstance(self.capacity, bool) and self.capacity >= 1,
            f"Replay capacity must be a whole number of at least 1; found {self.capacity!r}.",
        )
        _require(
            _is_one_of(ReplayMode, self.mode),
            'Replay mode must draw ("prioritized" or "uniform") or take in order ("fifo", "lifo" or "top_k"); '
            f"found {self.mode!r}.",
        )
        if not isinstance(self.fanout, str) or self.fanout != "auto":
            power = isinstance(self.fanout, int) and 2 <= self.fanout <= 256 and self.fanout & (self.fanout - 1) == 0
            _require(
                power,
                f'Fanout must be a power of two from 2 to 256, or "auto"; found {self.fanout!r}. '
                f"The sum tree addresses children by bit fields: try 16.",
            )
        for name in ("alpha", "beta", "beta_final"):
            _check_exponent(name, getattr(self, name), schedules=name != "beta_final")
        _require(
            not callable(self.beta) or self.beta_final == ReplaySpec.beta_final,
            f"beta_final is where a number beta goes; a schedule says so itself. Found beta_final={self.beta_final!r} "
            f"with beta={self.beta!r}: leave one out.",
        )
        for name in ("stratified", "replacement", "share_next_obs", "share_frames"):
            value = getattr(self, name)
            _require(isinstance(value, bool), f"{name} must be True or False; found {value!r}.")
        limit = self.max_times_sampled
        _require(
            isinstance(limit, int) and not isinstance(limit, bool) and 0 <= limit < 2**16,
            f"max_times_sampled must be a whole number in [0, 2**16), 0 for no limit; found {limit!r}.",
        )
        initial = self.initial_priority
        _require(
            (isinstance(initial, str) and initial in ("max", "mean"))
            or (_is_number(initial) and 0 < cast(float, initial) < math.inf),
            f'initial_priority must be "max", "mean" or a number above 0; found {initial!r}.',
        )
        epsilon = self.priority_epsilon
        _require(
            _is_number(epsilon) and (epsilon == 0 or EPSILON_MIN <= epsilon <= 1),
            f"priority_epsilon must be 0, or a number in [{EPSILON_MIN}, 1]; found {epsilon!r}.",
        )
        _require(
            _is_one_of(StorageKind, self.storage),
            f'The replay\'s storage must be "ram", "memmap" or "shared"; found {self.storage!r}.',
        )

        _require(
            not self.share_frames or (self.storage == "ram" and not self.share_next_obs),
            "share_frames shares next observations too, in this process's memory: leave share_next_obs and storage "
            f"out; found share_next_obs={self.share_next_obs} and storage={self.storage!r}.",
        )

    @property
    def shares(self) -> bool:
        """Whether data that several observations share is stored once, apart from the columns."""
        return self.share_next_obs or self.share_frames

    @property
    def first_alpha(self) -> float:
        """Alpha at the beginning of a run."""
        return float(self.alpha(0)) if callable(self.alpha) else self.alpha

    @property
    def first_beta(self) -> float:
        """Beta at the beginning of a run."""
        return float(self.beta(0)) if callable(self.beta) else self.beta


def _check_exponent(name: str, value: Exponent, *, schedules: bool) -> None:
    if callable(value) and schedules:
        for step in (0, _LATE):
            found = value(step)
            advice = f"{name} must lie in [0, 4] at every step; the schedule gives {found!r} at {step}."
            _require(_is_number(found) and 0.0 <= found <= 4.0, advice)
        return
    also = " or a schedule" if schedules else ""
    fits = _is_number(value) and 0.0 <= cast(float, value) <= 4.0
    _require(fits, f"{name} must lie in [0, 4]; found {value!r}. Give a number{also}.")


def _check_nodes(what: str, nodes: Nodes, count: int) -> None:
    """Raise ConfigurationError unless `nodes` is empty, or gives each of `count` parties a node."""
    listed = isinstance(nodes, list | tuple) and all(isinstance(one, list | tuple) and len(one) == 2 for one in nodes)
    pairs = listed and all(isinstance(n, str) and type(c) is int and c > 0 for n, c in nodes)
    _require(
        (listed and not nodes) or (pairs and len(dict(nodes)) == len(nodes) and sum(dict(nodes).values()) == count),
        f"nodes must be pairs of a node's name and a number of {what}, each name once, with {count} {what} in all; "
        f"found {nodes!r}.",
    )


def _node_of(nodes: Nodes, index: int) -> str | None:
    for node, count in nodes:
        if index < count:
            return node
        index -= count
    return None


@dataclass(frozen=True)
class ActorSpec:
    """Actors: `count` processes, each stepping `envs_per_actor` copies of environment `env`.

    `env` is a name that is registered with Gymnasium, or a class or function of a module that makes an environment.
    `env_kwargs` are passed to `gymnasium.make` or to what `env` is. `wrappers` are applied to each environment in turn,
    in evaluations too: classes (or functions of one environment), or pairs of one and its keyword arguments.

    `vectorization` is "sync" (any environment), "async" (a process for each environment), "vector_entry_point" (the
    environment's own vector implementation, where it has one), "atari" (ale-py's, with Mnih's preprocessing) or
    "envpool" (EnvPool's environment of that name). For the last three, `env_kwargs` go to the vector.

    An actor that hangs for `timeout_s` seconds, in a step or while it makes its environments, is restarted; 0 or
    `inf`: never.

    Evaluations use the same environment, or `eval_env` (of the same kinds as `env`) with `eval_env_kwargs`, whose
    spaces must be the same. If only `eval_env_kwargs` are given, they replace `env_kwargs` in evaluations.

    `nodes` are names of nodes of a Ray cluster with the number of Actors for each, together `count`; the name "" is the
    node on which the run is. They count where the run uses Ray. Empty: Ray spreads the Actors.

    `policy_server` is torch's device, such as "cuda:0" or "cpu", on which one process chooses the actions of all Actors
    in batches; "none": each Actor runs the policy itself, on the CPU.
    """

    env: str | Callable[..., gym.Env[Any, Any]]
    count: int = 1
    envs_per_actor: int = 8
    env_kwargs: Mapping[str, Scalar] = field(default_factory=dict)
    wrappers: tuple[Wrapper, ...] = ()
    vectorization: VectorizationName = "sync"
    timeout_s: float = 300.0
    eval_env: str | Callable[..., gym.Env[Any, Any]] | None = None
    eval_env_kwargs: Mapping[str, Scalar] | None = None
    nodes: Nodes = ()
    policy_server: str = "none"

    def __post_init__(self) -> None:
        _require(
            callable(self.env) or (isinstance(self.env, str) and bool(self.env)),
            "The environment must be named by its Gymnasium id, such as 'CartPole-v1', or be a class or function that "
            f"makes one; found {self.env!r}.",
        )
        if not isinstance(self.env, str):
            _require_importable("The environment", self.env)
        _require(
            _maps_names(self.env_kwargs),
            f"env_kwargs must map names to values, such as {{'length': 8}}; found {self.env_kwargs!r}.",
        )
        _require(
            isinstance(self.wrappers, list | tuple),
            f"wrappers must be a tuple of wrappers, such as (A, (B, {{...}})); found {self.wrappers!r}.",
        )
        for wrapper in self.wrappers:
            pair = isinstance(wrapper, tuple) and len(wrapper) == 2 and _maps_names(wrapper[1])
            _require(
                pair or callable(wrapper),
                f"A wrapper must be a class, or a pair of one and its keyword arguments; found {wrapper!r}.",
            )
        for made_by, _ in self.wrapped:
            _require_importable("A wrapper", made_by)
        _require(
            self.eval_env is None
            or callable(self.eval_env)
            or (isinstance(self.eval_env, str) and bool(self.eval_env)),
            "eval_env must be the Gymnasium id of the environment of evaluations, a class or function that makes it, "
            f"or None for that of the training; found {self.eval_env!r}.",
        )
        if callable(self.eval_env):
            _require_importable("eval_env", self.eval_env)
        _require(
            self.eval_env_kwargs is None or _maps_names(self.eval_env_kwargs),
            f"eval_env_kwargs must map names to values, or be None; found {self.eval_env_kwargs!r}.",
        )
        for name in ("count", "envs_per_actor"):
            _require_whole(f"{name} of actors", getattr(self, name), 1)
        kinds = get_args(VectorizationName)
        _require(
            _is_one_of(VectorizationName, self.vectorization),
            f'vectorization must be one of {", ".join(kinds)}, or "auto" for the composer to choose; found '
            f"{self.vectorization!r}.",
        )
        _require(
            _is_number(self.timeout_s) and self.timeout_s >= 0,
            f"timeout_s of actors must be a number of at least 0, in seconds, or inf; found {self.timeout_s!r}.",
        )
        _check_nodes("actors", self.nodes, self.count)
        _require(
            isinstance(self.policy_server, str) and bool(_TORCH_DEVICE.fullmatch(self.policy_server)),
            'policy_server of actors must be "none", a device such as "cuda:0" or "cpu", or "auto" for the composer to '
            f"choose; found {self.policy_server!r}.",
        )

    @property
    def is_served(self) -> bool:
        """Whether a policy server chooses the actions."""
        return self.policy_server != "none"

    @property
    def env_name(self) -> str:
        """The registered name, or `module.name` of a class or function."""
        return self.env if isinstance(self.env, str) else f"{self.env.__module__}.{self.env.__qualname__}"

    @property
    def wrapped(self) -> tuple[tuple[Callable[..., Any], Mapping[str, Scalar]], ...]:
        """The wrappers, each with its keyword arguments."""
        return tuple(one if isinstance(one, tuple) else (one, {}) for one in self.wrappers)

    @property
    def wrappers_text(self) -> str:
        """The wrappers by name, with their arguments."""
        return ", ".join(f"{one.__module__}.{one.__qualname__}{dict(options) or ''}" for one, options in self.wrapped)

    @property
    def training(self) -> ActorSpec:
        """The same, without the environment of evaluations, which Actors need not import."""
        return replace(self, eval_env=None, eval_env_kwargs=None)

    @property
    def evaluation(self) -> ActorSpec:
        """The same, with the environment of evaluations."""
        if self.eval_env is None and self.eval_env_kwargs is None:
            return self
        kwargs = self.env_kwargs if self.eval_env is None else {}
        return replace(
            self.training,
            env=self.env if self.eval_env is None else self.eval_env,
            env_kwargs=kwargs if self.eval_env_kwargs is None else self.eval_env_kwargs,
        )

    @property
    def here(self) -> int:
        """The actors on the machine of the host: all, unless `nodes` says otherwise."""
        return dict(self.nodes).get("", 0) if self.nodes else self.count

    def node_of(self, index: int) -> str | None:
        """The name of the node of actor `index`; None: any node."""
        return _node_of(self.nodes, index)

    @property
    def env_count(self) -> int:
        """Environments over all actors."""
        return self.count * self.envs_per_actor


@dataclass(frozen=True)
class TrainSpec:
    """One training run's schedule.

    `replay_ratio` is samples trained per transition inserted (`inf`: train as fast as the Learner can).
    `priority_update_delay` (thesis 4.3.1) is how many priority updates may still be missing when setting 1 samples;
    setting 2 samples after the last update. `insertion_rows` is how many collected transitions wait in the host's
    buffer until they are inserted (none waits longer than 50 ms); 0: 128, or 16 steps of all environments if those are
    fewer. `hindsight_goals` is how many further transitions each step brings, with goals that its episode reached later
    (`pearl.actors.hindsight`); for `replay_ratio` and `learning_starts`, `rows_per_step` transitions count as one.
    """

    batch_size: int = 64
    replay_ratio: float = 8.0
    learning_starts: int = 1000
    priority_update_delay: int = 1
    gamma: float = 0.99
    n_step: int = 1
    weight_sync_interval: int = 8
    insertion_rows: int = 0
    hindsight_goals: int = 0

    def __post_init__(self) -> None:
        for name in ("batch_size", "n_step", "weight_sync_interval"):
            _require_whole(name, getattr(self, name), 1)
        for name in ("learning_starts", "priority_update_delay", "insertion_rows", "hindsight_goals"):
            _require_whole(name, getattr(self, name), 0)
        _require(
            _is_number(self.replay_ratio) and (0 < self.replay_ratio <= 1e6 or self.replay_ratio == math.inf),
            f"replay_ratio must be a number above 0, at most 1e6, or inf; found {self.replay_ratio!r}.",
        )
        gamma = self.gamma
        _require(_is_number(gamma) and 0.0 <= gamma <= 1.0, f"gamma must be a number in [0, 1]; found {gamma!r}.")

    @property
    def rows_per_step(self) -> int:
        """Transitions that a step of an environment brings in all."""
        return 1 + self.hindsight_goals


def check_overlap(overlap: int, average_every: int) -> None:
    """Raise ConfigurationError unless Learners can make `overlap` steps while an average of every H-th step is made."""
    _require_whole("overlap", overlap, 0)
    _require(
        overlap <= average_every,
        f"overlap must be at most average_every, {average_every}, since a Learner awaits one average at a time; found "
        f"{overlap}.",
    )


@dataclass(frozen=True)
class LearnersSpec:
    """Several Learners that average their parameters: local SGD (thesis, chapter 5; docs/local_sgd.md).

    Each of `count` Learners has a bank of the replay, and trains on its part of every batch. After every
    `average_every` gradient steps of each (H) their parameters are averaged. `moments` says what becomes of the
    optimizers' states at an average: "keep" (each Learner keeps its own), "average" or "reset". While an average is
    made, each Learner makes `overlap` further steps, at most H; with 0 it waits.

    `nodes` are names of nodes of a Ray cluster with the number of Learners for each, together `count`, in the order of
    the Learners' ranks. The name "" is the machine of the run, whose Learners are processes there. They count where the
    run uses Ray. Empty: Ray spreads the Learners.
    """

    count: int = 1
    average_every: int = 8
    moments: MomentsRule = "keep"
    overlap: int = 0
    nodes: Nodes = ()

    def __post_init__(self) -> None:
        _require_whole("count of Learners", self.count, 1)
        _require_whole("average_every", self.average_every, 1)
        _require(
            _is_one_of(MomentsRule, self.moments),
            f"moments must be one of {', '.join(map(repr, get_args(MomentsRule)))}; found {self.moments!r}.",
        )
        check_overlap(self.overlap, self.average_every)
        _check_nodes("Learners", self.nodes, self.count)

    def node_of(self, rank: int) -> str | None:
        """The name of the node of Learner `rank`; None: any node."""
        return _node_of(self.nodes, rank)

    @property
    def elsewhere(self) -> Nodes:
        """The nodes of Learners that are not on the machine of the run."""
        return tuple((node, count) for node, count in self.nodes if node)


ONE_LEARNER = LearnersSpec()


@dataclass(frozen=True)
class RolloutSpec:
    """On-policy data: `horizon` steps of every environment are collected, trained on `epochs` times, and dropped.

    `gae_lambda` is the exponential weight of generalized advantage estimation (Schulman et al. 2016); its discount is
    the `gamma` of the TrainSpec, whose `batch_size` is that of a minibatch.

    `policy_lag` is how many updates the policy that collects may be behind the one that is trained: 0 collects and
    trains in turn; 1 collects the next rollout while the Learner trains on the last one. What a policy that is one
    update old collected is corrected by the clipped ratio to that policy ("clip"), or by V-trace ("vtrace",
    Espeholt et al. 2018).

    The last three are HEPPO-GAE's (Sec. II). `reward_standardization`: "dynamic", by mean and deviation of all rewards
    so far (Eq. 6 to 9); "block", by those of the rollout; "block_restored", the same, undone after quantisation.
    ("returns", which others have, divides rewards by the deviation of all discounted returns so far, and clips them to
    10.)
    `value_standardization` "block" is undone after quantisation. With `quantization_bits` (2 to 16; 0: none), rewards
    and values are kept as numbers of that many bits until their advantages are estimated; it needs both
    standardisations.
    """

    horizon: int = 256
    epochs: int = 10
    gae_lambda: float = 0.95
    policy_lag: int = 0
    correction: Correction = "clip"
    reward_standardization: RewardStandardization = "none"
    value_standardization: ValueStandardization = "none"
    quantization_bits: int = 0

    def __post_init__(self) -> None:
        for name in ("horizon", "epochs"):
            _require_whole(name, getattr(self, name), 1)
        _require(
            _is_number(self.gae_lambda) and 0.0 <= self.gae_lambda <= 1.0,
            f"gae_lambda must lie in [0, 1]; found {self.gae_lambda!r}.",
        )
        _require(
            type(self.policy_lag) is int and self.policy_lag in (0, 1),
            f"policy_lag must be 0 (collect and train in turn) or 1 (at the same time); found {self.policy_lag!r}.",
        )
        for name, kind in (
            ("correction", Correction),
            ("reward_standardization", RewardStandardization),
            ("value_standardization", ValueStandardization),
        ):
            value, known = getattr(self, name), ", ".join(get_args(kind))
            _require(_is_one_of(kind, value), f"{name} must be one of {known}; found {value!r}.")
        bits = self.quantization_bits
        _require(
            isinstance(bits, int) and not isinstance(bits, bool) and (bits == 0 or 2 <= bits <= 16),
            f"quantization_bits must be a whole number from 2 to 16, or 0 for none; found {bits!r}.",
        )
        _require(
            not bits or "none" not in (self.reward_standardization, self.value_standardization),
            f"quantization_bits={bits} needs numbers of a known range: set reward_standardization (such as "
            '"dynamic") and value_standardization="block".',
        )
        _require(
            self.correction == "clip" or (self.policy_lag == 1 and self.value_standardization == "none"),
            f'correction "vtrace" is for policy_lag=1 and values as they are; found policy_lag={self.policy_lag} and '
            f"value_standardization={self.value_standardization!r}.",
        )


def check_minibatches(rollout: RolloutSpec, actors: ActorSpec, train: TrainSpec) -> int:
    """How many minibatches an epoch has; ConfigurationError if they do not divide the rollout.

    The message names the nearest batch sizes that do.
    """
    rows = rollout.horizon * actors.env_count
    if rows % train.batch_size == 0:
        return rows // train.batch_size
    fitting = [size for size in range(1, rows + 1) if rows % size == 0]
    below = [size for size in fitting if size < train.batch_size]
    above = [size for size in fitting if size > train.batch_size]
    near = " or ".join(str(size) for size in (*below[-1:], *above[:1]))
    raise ConfigurationError(
        f"A rollout of {rollout.horizon} steps x {actors.env_count} environments = {rows} transitions cannot be "
        f"divided into minibatches of {train.batch_size}. Set batch_size to {near}, or change the horizon."
    )


def check_batch_fits(replay: ReplaySpec, train: TrainSpec) -> None:
    """Raise ConfigurationError if a batch is larger than the replay buffer."""
    _require(
        train.batch_size <= replay.capacity,
        f"A batch of {train.batch_size} cannot be drawn from a replay of {replay.capacity} slots. "
        "Lower batch_size or raise the size given to set_replay.",
    )
