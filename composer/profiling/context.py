"""Shared by all columns of the matrix: known measurements, and the trainer, replay and Actors to profile."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np

from composer.absent import NotCalibratedError, imported_times, not_calibrated
from composer.calibration import CalibrationKey, CalibrationStore
from composer.contention import CoreSharing
from composer.matrix import UnsupportedLearner
from composer.measurement import Measurement
from composer.platform import Platform, usable
from composer.problem import Problem, TrainingProblem
from composer.profiling.actors import measure_actor
from composer.profiling.full_replay import (
    AnyStorage,
    FullReplay,
    fill,
    host_storage,
    replay_parameters,
    steps,
)
from composer.profiling.keys import calibration_key
from composer.profiling.measuring import measure, on_own_thread
from composer.profiling.together import measure_together
from composer.report import left_out_line
from composer.storage_rule import storage_stays_on_host
from pearl.actors.actor import ActorSetup
from pearl.actors.native_policy import NativePolicy, PolicyPlan
from pearl.actors.policy_plan import read_policy
from pearl.algorithms.trainer import make_trainer
from pearl.backends import backend_of, learners
from pearl.devices.description import Device
from pearl.error_place import described
from pearl.errors import PearlError, TrainerError
from pearl.lazy_torch import torch
from pearl.learner.extract import structure_of
from pearl.learner.native_plan import UnsupportedError
from pearl.learner.protocol import Learner
from pearl.replay.arguments import TIME_MODES
from pearl.replay.synthetic import as_steps, filling_rows
from pearl.runtime.data_storage import HostDataStorage
from pearl.runtime.policy_server import ServerSetup
from pearl.spec import RolloutSpec

logger = logging.getLogger("pearl.composer")

BUDGET_S = 1.0  # of one measurement
QUICK_BUDGET_S = 0.15  # of one that need not be thorough
# Factors of another Learner's least time: a Learner whose step takes longer by a low bound is not measured, and one
# whose warm-up took longer is measured no further.
_SLOW_BY_BOUND, _SLOW_BY_WARM_UP = 1.2, 2.0

_FANOUTS = (4, 8, 16, 32, 64)
_WITH_LEARNER = ("learner", "pair", "learners", "rollout learner")  # primitives that run the Learner

_Storage = TypeVar("_Storage", bound=AnyStorage)

Work: TypeAlias = Callable[[], Mapping[str, Sequence[float] | Measurement]]
"""Measures: samples in microseconds by name, or measurements where these are not medians of samples."""


def unwatched(_: str) -> None:
    """Let all measurements be made."""


_Problem = TypeVar("_Problem", bound=TrainingProblem)


@dataclass
class MeasuringContext(Generic[_Problem]):
    """The problem to profile on a platform. `report` gets a line for each measurement, of about `budget_s` seconds.

    `watch` gets the line too, but only before a measurement that is made; what it raises ends profiling. Unless
    `thorough`, measurements are shorter, and a Learner that cannot be the fastest gets few samples, or none: where its
    calls alone take far longer than another one, or more threads could not make up for it.
    """

    platform: Platform
    problem: _Problem
    store: CalibrationStore
    report: Callable[[str], None] = print
    budget_s: float = BUDGET_S
    watch: Callable[[str], None] = unwatched
    thorough: bool = True
    hits: int = field(default=0, init=False)
    misses: int = field(default=0, init=False)
    imports: int = field(default=0, init=False)
    slow: list[UnsupportedLearner] = field(default_factory=list, init=False)
    _fingerprints: dict[Device, str] = field(default_factory=dict, init=False, repr=False)
    _begun: str = field(default="", init=False, repr=False)

    def __post_init__(self) -> None:
        if not self.thorough:
            self.budget_s = min(self.budget_s, QUICK_BUDGET_S)

    # --- what is known ----------------------------------------------------------------------------------------------

    def known(self, key: CalibrationKey, names: tuple[str, ...], work: Work, device: Device) -> dict[str, Measurement]:
        """The measurements `names` under the `key` of `device`, from the store or by `work`, which returns samples.

        Nothing is measured on an absent device: NotCalibratedError if its times are not known. Raises TrainerError if
        the user's trainer fails meanwhile.
        """
        if device.absent:
            return self._imported(key, names, device)
        found = self.store.get(key)
        if found is not None and set(names) <= set(found):
            self.hits += 1
            return found
        self.watch(self._begun)
        self.misses += 1
        try:
            found_now = work().items()
            measured = {n: f if isinstance(f, Measurement) else Measurement.from_samples(f) for n, f in found_now}
        except Exception as error:
            if isinstance(error, PearlError) or key.primitive not in _WITH_LEARNER:
                raise
            raise TrainerError(
                f"{self.problem.trainer_class.__name__} failed while its training step was profiled: "
                f"{described(error)}. The batch held random transitions of the environment's spaces."
            ) from error
        self.store.put(key, measured)
        return measured

    def is_known(self, key: CalibrationKey, names: tuple[str, ...], device: Device) -> bool:
        """Whether `known` would not measure."""
        found = imported_times(self.store, key, names) if device.absent else self.store.get(key)
        return found is not None and set(names) <= set(found)

    def _imported(self, key: CalibrationKey, names: tuple[str, ...], device: Device) -> dict[str, Measurement]:
        found = imported_times(self.store, key, names)
        if found is None:
            raise not_calibrated(self.store, device, f"the primitive {key.primitive!r} for this problem")
        self.imports += 1
        for note in filter(None, dict.fromkeys(measurement.note for measurement in found.values())):
            line = f"{device.name}: imported times of the primitive {key.primitive!r}: {note}"
            if "extrapolated" in note:
                logger.warning("%s", line)
            else:
                self.report(line)
        return found

    def where_calibrated(self, device: Device) -> AbstractContextManager[None]:
        """Skips a measurement that an absent device lacks: others, of other parameters, may be known."""
        return contextlib.suppress(NotCalibratedError) if device.absent else contextlib.nullcontext()

    def too_slow(
        self, implementation: str, device: Device, least_us: float, fastest_us: float, *, threads: int = 0
    ) -> bool:
        """Whether a Learner that takes `least_us` at least need not be measured, which is reported and kept.

        `fastest_us` is the least time of the fastest that was measured on the device. With `threads`, `least_us`
        is what so many threads would take that share the work of one perfectly; else what the calls alone take.
        """
        if self.thorough or least_us < _SLOW_BY_BOUND * fastest_us:
            return False
        whole = f"shared by {threads} threads its step takes" if threads else "its calls alone take"
        reason = f"on {device.name} {whole} {least_us:,.0f} us at least, another one's step {fastest_us:,.0f} us"
        self.slow.append(UnsupportedLearner(implementation, reason, slow=True, threads=threads))
        self.report(left_out_line(self.slow[-1]))
        return True

    def worth_us(self, fastest_us: float) -> float:
        """Microseconds of a call in a warm-up above which a Learner cannot be the best, next to one of `fastest_us`."""
        return math.inf if self.thorough else _SLOW_BY_WARM_UP * fastest_us

    def begin(self, line: str) -> None:
        """Announce a measurement, which may be known already."""
        self._begun = line
        self.report(line)

    def key(
        self, primitive: str, device: Device, parameters: Mapping[str, Any], implementation: str | None = None
    ) -> CalibrationKey:
        """The key of a measurement on `device`; with `implementation` the Learner takes part in it."""
        return calibration_key(
            self.problem,
            primitive,
            device,
            self.fingerprint(device),
            parameters,
            lambda: self._probed[1],
            implementation,
        )

    def fingerprint(self, device: Device) -> str:
        """The device's fingerprint, read from the hardware once."""
        if device not in self._fingerprints:
            self._fingerprints[device] = device.fingerprint()
        return self._fingerprints[device]

    # --- the Actors -------------------------------------------------------------------------------------------------

    def actor_setup(self, rollout: RolloutSpec | None = None) -> ActorSetup:
        """An Actor as a run has it; with `rollout`, it collects parts of rollouts."""
        p, policy = self.problem, self._native_policy
        return ActorSetup(
            p.trainer_class,
            p.settings,
            p.actors.training,
            p.train,
            seed=0,
            policy=policy,
            transition=p.transition,
            rollout=rollout,
        )

    @property
    def actor_parameters(self) -> dict[str, Any]:
        """Everything of an Actor that every measurement of one depends on, for its key."""
        actors = self.problem.actors
        return {
            "env": actors.env_name,
            "envs": actors.envs_per_actor,
            "env_kwargs": repr(dict(actors.env_kwargs)),
            "wrappers": actors.wrappers_text,
            "policy": "torch" if self._native_policy is None else "native",
        }

    @property
    def actors_rollout(self) -> RolloutSpec | None:
        """The rollout that a message of an Actor is a part of."""
        return None

    @functools.cached_property
    def together(self) -> Measurement:
        """Microseconds of an environment step of all Actors side by side, with their policy server if they have one."""
        actors, host = self.problem.actors, self.platform.host
        parameters = {
            **self.actor_parameters,
            "count": actors.count,
            "policy_server": actors.policy_server,
            "server_device": " ".join(self._server_fingerprints),
        }
        if (rollout := self.actors_rollout) is not None:
            parameters["horizon"] = rollout.horizon
        where = f", policy on {actors.policy_server}" if actors.is_served else ""
        self.begin(f"{host.name}: {actors.count} Actor(s) side by side{where}")
        key = self.key("actors together", host, parameters)
        return self.known(key, ("step",), self._measure_together, host)["step"]

    @property
    def _server_fingerprints(self) -> list[str]:
        found = [d for d in usable(self.platform)[0] if not d.absent]
        name = self.problem.actors.policy_server
        return [self.fingerprint(d) for d in found if backend_of(d).policy_device(d) == name]

    def _measure_together(self) -> dict[str, list[float]]:
        p, server = self.problem, None
        if p.actors.is_served:
            spaces = p.observation_space, p.action_space
            server = ServerSetup(p.trainer_class, p.settings, *spaces, seed=0, device=p.actors.policy_server)
        exploration = getattr(self.probe, "exploration", None)
        setup = self.actor_setup(self.actors_rollout)
        return {"step": measure_together(setup, server, exploration, self.budget_s)}

    @property
    def policy_us(self) -> float:
        """Microseconds in which an Actor chooses the actions of its environments, when it runs the policy itself."""
        host = self.platform.host
        self.begin(f"{host.name}: an Actor's policy")
        found = self.known(self.key("policy", host, self.actor_parameters), ("act",), self._measure_policy, host)
        return found["act"].value_us

    @on_own_thread
    def _measure_policy(self) -> dict[str, list[float]]:
        plan, field = self._native_policy, self.problem.transition.fields[0]
        shape, rng = (self.problem.actors.envs_per_actor, *field.shape), np.random.default_rng(0)
        obs = rng.integers(0, 256, shape, np.uint8) if field.dtype == "uint8" else rng.random(shape, np.float32)
        if plan is not None:
            native = NativePolicy(plan)
            return {"act": measure(lambda: native.act(obs), QUICK_BUDGET_S)}
        from pearl.actors.torch_policy import TorchPolicy

        torch.set_num_threads(1)  # as in Actors
        policy = TorchPolicy(self._trainer("cpu"))
        return {"act": measure(lambda: policy.act(obs), QUICK_BUDGET_S)}

    # --- the trainer ------------------------------------------------------------------------------------------------

    @property
    def probe(self) -> Any:
        """A trainer for inspection; it never trains."""
        return self._probed[0]

    @functools.cached_property
    def _probed(self) -> tuple[Any, str]:
        """The probe, and the structure of its networks, which is read before anything may move them to torch."""
        trainer = self._trainer("cpu")
        return trainer, structure_of(trainer, self.problem.observation_space.shape)

    def _trainer(self, device: str) -> Any:
        p = self.problem
        return make_trainer(
            p.trainer_class, p.observation_space, p.action_space, device=device, settings=dict(p.settings)
        )

    @functools.cached_property
    def _native_policy(self) -> PolicyPlan | None:
        """The policy in C++ of the Actors of a run; None where they use the trainer itself."""
        try:
            return read_policy(self.probe)
        except UnsupportedError as error:
            logger.info("Actors run the policy in torch: the native engine does not support %s.", error)
            return None


@dataclass
class ProfilingContext(MeasuringContext[Problem]):
    """The problem with a replay to profile on a platform."""

    def make_learner(
        self, implementation: str, device: Device, threads: int, sub_batches: int = 1, *, prefetch: bool = False
    ) -> Learner:
        """A new Learner, with a trainer of its own."""
        made = learners()[implementation]
        home, place = made.places(device, backend_of(device))
        return made.make(self._trainer(home), device=place, threads=threads, sub_batches=sub_batches, prefetch=prefetch)

    # --- the replay -------------------------------------------------------------------------------------------------

    def fanouts(self) -> tuple[int, ...]:
        """The fanouts to try."""
        spec = self.problem.replay
        if spec.fanout != "auto":
            return (int(spec.fanout),)
        plain = spec.mode in ("uniform", *TIME_MODES) and spec.replacement and spec.max_times_sampled == 0
        return (16,) if plain else _FANOUTS  # without a tree the fanout has no effect

    def replay_parameters(self, fanout: int, workers: int = 1) -> dict[str, Any]:
        """Everything of the replay that a measurement depends on, for its key."""
        return replay_parameters(self.problem.replay, fanout, self.problem.train.n_step, workers)

    def full_replay(self, device: Device, fanout: int, workers: int = 1) -> FullReplay:
        """A new Replay Manager on `device`, full."""
        made = backend_of(device).replay(device)
        assert made is not None, "a device without a Replay Manager has no cell of one"
        return FullReplay(self.problem.replay, fanout, made, workers)

    @functools.cached_property
    def full_storage(self) -> HostDataStorage:
        """A full storage on the host, as in most of a run; made only once, because it may be large."""
        p = self.problem
        return self.filled(host_storage(p.transition, p.replay, p.actors, p.train))

    def forget_storage(self) -> None:
        """Let go of the full storage: a program that is tried makes its own."""
        self.__dict__.pop("full_storage", None)

    def filled(self, storage: _Storage) -> _Storage:
        """`storage` with a synthetic transition in every slot."""
        envs = self.problem.actors.env_count
        fill(storage, self._rows(filling_rows(envs, storage.capacity), np.random.default_rng(0)))
        return storage

    def own_storage(self, device: Device) -> bool:
        """Whether a program whose Learner is on `device` keeps the Data Storage in the device's own memory."""
        return backend_of(device).storage(device) is not None and not storage_stays_on_host(self.problem.replay)

    def storage_on(self, device: Device) -> tuple[AnyStorage, bool]:
        """The full storage of a program whose Learner is on `device`, and whether it is in the device's own memory."""
        if not self.own_storage(device):
            return self.full_storage, False
        return self.filled(self.device_storage(device, self.problem.replay.capacity)), True

    def device_storage(self, device: Device, capacity: int) -> AnyStorage:
        """An empty storage in the memory of a device that has one."""
        made, backend = backend_of(device).storage(device), backend_of(device)
        assert made is not None, "a device without a Data Storage uses the host's"
        storage: AnyStorage = made.make_storage(self.problem.transition, capacity, backend.device_string(device))
        return storage

    def batch_on(self, device: Device) -> Mapping[str, Any]:
        """A batch as a Learner on the device gets it: from its own storage, or from the host's memory."""
        columns = self.problem.random_columns(self.problem.train.batch_size, np.random.default_rng(0))
        if not self.own_storage(device):
            return columns
        rows = self.problem.train.batch_size
        storage = self.device_storage(device, rows)
        storage.insert(columns, rows)
        return storage.gather(np.arange(rows))

    def arriving(self, rng: np.random.Generator) -> Iterator[dict[str, np.ndarray]]:
        """The transitions of one iteration after another, `insertions` each, without end."""
        return steps(self._rows(2 * self.problem.insertions, rng), self.problem.insertions)

    def _rows(self, count: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Synthetic transitions of all environments in turn, as consecutive steps where the replay needs them."""
        columns = self.problem.random_columns(count, rng)
        return as_steps(columns, self.problem.replay, self.problem.actors.env_count)

    # --- the Actors -------------------------------------------------------------------------------------------------

    @property
    def actor_parameters(self) -> dict[str, Any]:
        """Also the steps of a transition and its further columns."""
        parameters = {**super().actor_parameters, "n_step": self.problem.train.n_step}
        if further := self.problem.transition.further:
            parameters["columns"] = " ".join(f"{c.name}{list(c.shape)}{c.dtype}" for c in further)
        if sequence := self.problem.transition.sequence:
            parameters["sequence"] = f"{sequence.length} steps, {sequence.overlap} of the previous"
        return parameters

    @functools.cached_property
    def collection_us(self) -> float:
        """Microseconds in which all Actors together produce one transition."""
        actors, host = self.problem.actors, self.platform.host
        if actors.is_served:
            return self.together.value_us * self.problem.transition.steps_per_row
        at_once = float(min(actors.here, host.cores or 1))
        speeds = {node.device.node: node.speed for node in self.platform.nodes}
        at_once += sum(speeds.get(node, 1.0) * count for node, count in actors.nodes if node)
        return self.transition_us / at_once

    @functools.cached_property
    def transition_us(self) -> float:
        """Microseconds in which one Actor on the host produces one transition."""
        key = self.key("actor", self.platform.host, self.actor_parameters)
        self._begun = f"{self.platform.host.name}: an Actor"
        found = self.known(key, ("transition",), self._measure_actor, self.platform.host)
        return found["transition"].value_us

    def _measure_actor(self) -> dict[str, list[float]]:
        setup = self.actor_setup()
        steps = self.problem.actors.envs_per_actor * setup.steps_per_message
        rows = steps / self.problem.transition.steps_per_row
        return {"transition": [s / rows for s in measure_actor(setup, self.budget_s / 2)]}

    def sharing_on(self, device: Device) -> CoreSharing:
        """How a Learner on this CPU shares cores with the Actors, which run on the host."""
        train = self.problem.train
        # Of each transition collected, replay_ratio samples are trained.
        free = math.isinf(train.replay_ratio)
        learners = self.problem.learners.count  # each trains on a batch of this problem in an iteration
        collect_us = math.inf if free else self.collection_us * learners * train.batch_size / train.replay_ratio
        on_host = self.platform.shared_silicon(device.name, self.platform.host.name)
        actors = self.problem.actors.here if on_host else 0
        return CoreSharing(device.cores or 1, actors, collect_us, learners, self.problem.most_threads)
