"""Fills the assignment matrix: measures every primitive on every device, at the user's shapes and batch size."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import itertools
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

import pearl
from composer.calibration import CalibrationKey, CalibrationStore
from composer.contention import CoreSharing
from composer.fpga.learner_pipeline import LearnerPipeline, pipeline_of
from composer.matrix import (
    AssignmentMatrix,
    Candidacy,
    LearnerCell,
    LearnerOption,
    MatrixRow,
    Measurement,
    MissingCell,
    PairCell,
    ReplayCell,
    UnavailableDevice,
    UnsupportedLearner,
)
from composer.modelled_rows import ESTIMATORS, ModelledWork
from composer.platform import Platform, usable
from composer.problem import Problem
from composer.profiling.actors import measure_actor
from composer.profiling.full_replay import (
    AnyStorage,
    FullReplay,
    chained,
    fill,
    fill_rows,
    host_storage,
    replay_parameters,
    steps,
)
from composer.profiling.measuring import WARM_UP, measure, on_own_thread
from composer.profiling.messages import ITERATIONS, busy_processes, measure_messages, measure_pipeline
from composer.report import left_out_line
from composer.storage_rule import storage_stays_on_host
from pearl.actors.actor import ActorSetup
from pearl.actors.native_policy import PolicyPlan
from pearl.actors.policy_plan import read_policy
from pearl.algorithms.trainer import Trainer, make_trainer
from pearl.backends import AUTO, backend_of, learners, runs_on
from pearl.backends.protocol import compiled_kernels
from pearl.devices.description import Device
from pearl.error_place import described
from pearl.errors import CapacityError, DeviceError, PearlError, TrainerError
from pearl.ipc.queues import Bell, WeightSyncQueue
from pearl.learner.extract import extract_networks
from pearl.learner.native_plan import UnsupportedError
from pearl.learner.protocol import Learner
from pearl.replay import DataStorage
from pearl.replay.arguments import TIME_MODES
from pearl.replay.protocol import Sample
from pearl.runtime.workers import GrantQueue, ProgressQueue, TrainingLoop

logger = logging.getLogger("pearl.composer")

_FANOUTS = (4, 8, 16, 32, 64)
# One sample of the native training loop is the mean over as many iterations as fit this time. It is long enough to hide
# Python's work between samples, and so far below a scheduler's time slice that few samples are interrupted.
_GRANT_US = 500.0
_WORTH_A_CORE = 1.05  # the least speedup for which prefetching may take a core
_TIMED_ITERATIONS = 100  # of a device's loop that waits after each part, to time the parts

_WITH_LEARNER = ("learner", "pair", "pipeline")  # primitives that run the Learner

_Storage = TypeVar("_Storage", bound=AnyStorage)
_Cell = TypeVar("_Cell")

# PEARL's Python files that run in a measurement, without those that an implementation of the Learner lists.
_METHOD = sorted(Path(__file__).parent.glob("*.py"))
_HOST_LOOP = ("runtime/host_iteration.py", "runtime/queues.py", "runtime/workers.py")
_SOURCES = {
    "actor": ("actors/*.py", "algorithms/*.py", "exploration.py"),
    "replay": ("replay/*.py", "backends/**/*.py"),
    "learner": (),
    "messages": ("replay/requests.py", "ipc/*.py", *_HOST_LOOP),
    "pipeline": ("replay/*.py", "backends/**/*.py", "ipc/*.py", *_HOST_LOOP),
    "pair": ("replay/*.py", "backends/**/*.py", "ipc/*.py", "runtime/queues.py", "runtime/workers.py"),
}


@functools.cache
def kernel_hash(implementation: str | None = None, module: str = "pearl._native") -> str:
    """A hash of the compiled kernels; with an `implementation` of the Learner, of its sources instead."""
    return _file_hash([compiled_kernels(module)] if implementation is None else learners()[implementation].sources)


@functools.cache
def source_hash(primitive: str) -> str:
    """A hash of the Python files that measure the primitive or run in it, without the Learner's own."""
    package = Path(pearl.__file__).parent
    sources = (file for pattern in _SOURCES[primitive] for file in sorted(package.glob(pattern)))
    return _file_hash([*_METHOD, *sources])


def _file_hash(files: Iterable[Path]) -> str:
    found = hashlib.sha256()
    for file in files:
        found.update(hashlib.sha256(file.read_bytes()).digest())
    return found.hexdigest()[:16]


@dataclass
class Profiler:
    """Fills the matrix; known results come from `store`, and `report` gets a line for each measurement."""

    platform: Platform
    problem: Problem
    store: CalibrationStore
    report: Callable[[str], None] = print
    budget_s: float = 1.0
    hits: int = field(default=0, init=False)
    misses: int = field(default=0, init=False)
    _fingerprints: dict[Device, str] = field(default_factory=dict, init=False, repr=False)
    _pipelines_us: dict[str, float] = field(default_factory=dict, init=False, repr=False)  # by digest of the key

    def matrix(self) -> AssignmentMatrix:
        """Profile every usable device."""
        devices, unavailable = usable(self.platform)
        for learner in self._unsupported:
            line = left_out_line(learner)
            logger.info("%s.", line)
            self.report(line)
        rows = tuple(self._row(device) for device in devices)
        left_out = tuple(UnavailableDevice(d.name, reason) for d, reason in unavailable)
        return AssignmentMatrix(rows, left_out, self._unsupported)

    @functools.cached_property
    def _unsupported(self) -> tuple[UnsupportedLearner, ...]:
        """The implementations that cannot train the trainer."""
        found = ((name, learners()[name].supports(self._probe)) for name in self._wanted)
        return tuple(UnsupportedLearner(name, reason) for name, reason in found if reason is not None)

    @functools.cached_property
    def _wanted(self) -> tuple[str, ...]:
        """The implementations to try: the forced one, or all that run on a usable device."""
        forced = self.problem.implementation
        if forced != AUTO:
            return (forced,)
        devices = usable(self.platform)[0]
        return tuple(name for name in learners() if any(runs_on(name, device) for device in devices))

    def _implementations(self, device: Device) -> list[str]:
        """The implementations of the Learner that run on the device and can train the trainer."""
        unsupported = {learner.implementation for learner in self._unsupported}
        return [name for name in self._wanted if name not in unsupported and runs_on(name, device)]

    @functools.cached_property
    def collection_us(self) -> float:
        """Microseconds in which all Actors together produce one transition."""
        actors = self.problem.actors
        parameters = {
            "env": actors.env,
            "envs": actors.envs_per_actor,
            "env_kwargs": repr(dict(actors.env_kwargs)),
            "policy": "torch" if self._native_policy is None else "native",
            "n_step": self.problem.train.n_step,
        }
        if further := self.problem.transition.further:
            parameters["columns"] = " ".join(f"{c.name}{list(c.shape)}{c.dtype}" for c in further)
        key = self._key("actor", self.platform.host, parameters)
        transition = self._known(key, ("transition",), self._measure_actor)["transition"]
        return transition.value_us / min(actors.count, self.platform.host.cores or 1)

    @property
    def messages_us(self) -> float:
        """Microseconds of the host's messages per iteration of setting 1; 0 where only the host is usable."""
        host = self.platform.host
        if not any(backend_of(device).needs_messages for device in usable(self.platform)[0] if device != host):
            return 0.0
        if (stated := backend_of(host).messages_us(host)) is not None:
            return stated
        delay = self.problem.train.priority_update_delay
        self.report("messages through the host")
        mode = self.problem.replay.mode
        key = self._key("messages", host, {"priority_update_delay": delay, "mode": mode})
        work = functools.partial(measure_messages, self.problem.train.batch_size, delay, mode)
        return self._known(key, ("iteration",), lambda: {"iteration": work()})["iteration"].value_us

    def pipelines(self, matrix: AssignmentMatrix) -> dict[Candidacy, float]:
        """Microseconds of whole iterations on devices that are the host's silicon, measured next to busy processes.

        There the devices, the host's messages and the Actors slow each other down, which the sum of their separate
        times does not show. The keys are the devices of Replay Manager and Learner and the latter's implementation.
        """
        found: dict[Candidacy, float] = {}
        for of, work in self._whole_iterations(matrix):
            try:
                found[of] = work()
            except (CapacityError, DeviceError) as error:
                logger.warning("%s and %s were not measured together: %s", of[0], of[1], error)
        return found

    def _whole_iterations(self, matrix: AssignmentMatrix) -> Iterator[tuple[Candidacy, Callable[[], float]]]:
        """The candidates that `pipelines` measures, each with its measurement.

        Setting 2 counts on devices whose own runtime takes all of the host's cores, even while the Actors need them.
        """
        host = self.platform.host.name
        on_host = [
            (row, device)
            for row in matrix.rows
            if self.platform.shared_silicon(row.device, host)
            and backend_of(device := self.platform.device(row.device)).estimator(device) is None
        ]
        for (i, on_i), (j, on_j) in itertools.product(on_host, repeat=2):
            for option in j.learners:
                if i is j:
                    if backend_of(on_j).host_cores == "all" and isinstance(pair := option.pair, PairCell):
                        of = (i.device, j.device, pair.learner.implementation)
                        yield of, functools.partial(self._shared_pair_us, on_j, pair)
                elif isinstance(i.replay, ReplayCell) and isinstance(learner := option.learner, LearnerCell):
                    of = (i.device, j.device, learner.implementation)
                    yield of, functools.partial(self._pipeline_us, on_i, i.replay, on_j, learner)

    def _shared_pair_us(self, device: Device, pair: PairCell) -> float:
        name, fanout, threads = pair.learner.implementation, pair.replay.fanout, pair.learner.threads
        self.report(f"{device.name}: Replay Manager and {name} Learner together, while Actors run")

        def work() -> dict[str, list[float]]:
            with busy_processes(self._busy):
                parts = self._measure_pair(name, device, fanout=fanout, threads=threads)
            # The mean, not the median: waits for a core are rare but long.
            return {"iteration": [sum(float(np.mean(parts[part])) for part in ("sample", "step", "update"))]}

        key = self._key("pair", device, {**self._pair_parameters(pair.replay, pair.learner), "busy": self._busy}, name)
        return self._known(key, ("iteration",), work)["iteration"].value_us

    @property
    def _busy(self) -> int:
        """The number of busy processes that stand in for the Actors."""
        return min(self.problem.actors.count, self.platform.host.cores or 1)

    def _pipeline_us(self, on_i: Device, replay: ReplayCell, on_j: Device, learner: LearnerCell) -> float:
        delay = self.problem.train.priority_update_delay
        parameters = {
            **self._replay_parameters(replay.fanout),
            "replay_device": self._fingerprint(on_i),
            "replay_kernels": kernel_hash(module=backend_of(on_i).kernels),
            "threads": learner.threads,
            "priority_update_delay": delay,
            "weight_sync_interval": self.problem.train.weight_sync_interval,
            "busy": self._busy,
        }

        @on_own_thread
        def work() -> dict[str, list[float]]:
            full = self._full_replay(on_i, replay.fanout)
            made = self._make_learner(learner.implementation, on_j, learner.threads, learner.sub_batches)
            spec, batch = self.problem.transition, self.problem.train.batch_size
            samples = measure_pipeline(
                full.manager,
                self._full_storage,
                made,
                spec,
                batch,
                delay,
                self._busy,
                beta=full.beta,
                weight_sync_interval=self.problem.train.weight_sync_interval,
                iterations=full.batches(batch, ITERATIONS),
                renew=full.renew,
            )
            return {"iteration": samples}

        key = self._key("pipeline", on_j, parameters, learner.implementation)
        if key.digest not in self._pipelines_us:  # the key is the same for rows that differ in name only
            self.report(
                f"{on_i.name}, {on_j.name}: Replay Manager and {learner.implementation} Learner, while Actors run"
            )
            self._pipelines_us[key.digest] = self._known(key, ("iteration",), work)["iteration"].value_us
        return self._pipelines_us[key.digest]

    # --- one device -------------------------------------------------------------------------------------------------

    def _row(self, device: Device) -> MatrixRow:
        if (estimator := backend_of(device).estimator(device)) is not None:
            return self._estimated_row(device, estimator)
        self.report(f"profiling {device.name}")
        replay = self._tried(device, lambda: self._replay_cell(device))
        tried = [
            self._tried(device, functools.partial(self._learner_cell, device, name))
            for name in self._implementations(device)
        ]
        cells = [cell for cell in tried if isinstance(cell, LearnerCell)]
        if not cells:
            failed = [cell for cell in tried if isinstance(cell, MissingCell)]
            missing = failed[0] if failed else MissingCell(self._why_no_learner(device))
            return MatrixRow(device.name, replay, missing, missing)
        cells.sort(key=lambda cell: cell.step.value_us)
        first, *others = (
            LearnerOption(cell, self._tried(device, functools.partial(self._pair_cell, device, replay, cell)))
            for cell in cells
        )
        return MatrixRow(device.name, replay, first.learner, first.pair, tuple(others))

    def _tried(self, device: Device, work: Callable[[], _Cell]) -> _Cell | MissingCell:
        """The cell, or the reason where another device than the host failed; no program runs without the host."""
        try:
            return work()
        except Exception as error:
            cause = error.__cause__ if isinstance(error, TrainerError) else error
            by_backend = isinstance(cause, Exception) and backend_of(device).is_failure(cause)
            failed = by_backend or isinstance(error, (CapacityError, DeviceError))
            if not failed or device == self.platform.host:
                raise
            reason = f"{device.name} failed: {described(cause)}" if by_backend and cause is not None else str(error)
            logger.warning("A measurement failed on %s, which is left out of it: %s", device.name, reason)
            return MissingCell(reason.partition("\n")[0])

    def _why_no_learner(self, device: Device) -> str:
        here = [u for u in self._unsupported if runs_on(u.implementation, device)]
        if here:
            return "; ".join(left_out_line(learner) for learner in here)
        forced = self.problem.implementation
        return f"no {'' if forced == AUTO else f'{forced} '}Learner for {device.backend} in this version"

    def _estimated_row(self, device: Device, estimator: str) -> MatrixRow:
        """The row of a device on which nothing is measured."""
        backend, spec = backend_of(device), self.problem.replay
        no_learner = None
        if backend.learners and not self._implementations(device):
            no_learner = self._why_no_learner(device)
        work = dataclasses.replace(
            self._work,
            no_replay=backend.replay_lacks(device, dataclasses.replace(spec, fanout=max(self._fanouts()))),
            no_learner=no_learner,
        )
        found = ESTIMATORS[estimator](device, work)
        if found.modelled:
            self.report(f"{device.name} is modelled, not measured")
        for design in found.designs:
            self.report(f"{device.name}: {design}")
        return found.row

    @functools.cached_property
    def _work(self) -> ModelledWork:
        problem = self.problem
        pipeline: LearnerPipeline | str
        try:
            pipeline = pipeline_of(self._probe)
        except TrainerError as error:
            pipeline = str(error)
        return ModelledWork(
            problem.train.batch_size,
            min(problem.actors.env_count, problem.replay.capacity),
            problem.transition.nbytes,
            problem.replay.capacity,
            self._fanouts(),
            pipeline,
            implementation=problem.implementation,
        )

    def _fanouts(self) -> tuple[int, ...]:
        spec = self.problem.replay
        if spec.fanout != "auto":
            return (int(spec.fanout),)
        plain = spec.mode in ("uniform", *TIME_MODES) and spec.replacement and spec.max_times_sampled == 0
        return (16,) if plain else _FANOUTS  # without a tree the fanout has no effect

    def _replay_cell(self, device: Device) -> ReplayCell | MissingCell:
        if (lacking := backend_of(device).replay_lacks(device, self.problem.replay)) is not None:
            return MissingCell(lacking)
        cells = []
        for fanout in self._fanouts():
            self.report(f"{device.name}: Replay Manager, fanout {fanout}")
            key = self._key("replay", device, self._replay_parameters(fanout))
            found = self._known(
                key, ("sample", "insert", "update"), functools.partial(self._measure_replay, device, fanout=fanout)
            )
            cells.append(ReplayCell(found["sample"], found["insert"], found["update"], fanout))
        return min(cells, key=lambda c: c.sample.value_us + c.update.value_us)

    def _learner_cell(self, device: Device, implementation: str) -> LearnerCell:
        backend = backend_of(device)
        sharing = self._sharing(device) if backend.host_cores == "threads" else None
        candidates = backend.learner_parameters(
            device,
            most_threads=1 if sharing is None else sharing.most_threads,
            most_sub_batches=self.problem.train.batch_size if issubclass(self.problem.trainer_class, Trainer) else 1,
        )
        cells = []
        for candidate in candidates:
            threads, parts = candidate.threads, candidate.sub_batches
            self.report(f"{device.name}: {implementation} Learner, {threads} thread(s), {parts} sub-batch(es)")
            key = self._key("learner", device, {"threads": threads, "sub_batches": parts}, implementation)
            found = self._known(
                key,
                ("step",),
                functools.partial(self._measure_learner, implementation, device, threads=threads, parts=parts),
            )
            cells.append(LearnerCell(found["step"], threads, parts, candidate.streams, implementation))
            if sharing is not None and sharing.keeps_up(cells[-1].step.value_us, threads):
                break  # the paper's rule: the fewest threads that keep up with the Actors
        if sharing is not None:
            return min(cells, key=lambda c: sharing.rank(c.step.value_us, c.threads))
        return min(cells, key=lambda c: c.step.value_us)

    def _pair_cell(
        self, device: Device, replay: ReplayCell | MissingCell, learner: LearnerCell
    ) -> PairCell | MissingCell:
        if isinstance(replay, MissingCell):
            return replay
        plain = self._measured_pair(device, replay, learner, prefetch=False)
        if not self._may_prefetch(device, learner):
            return plain
        ahead = self._measured_pair(device, replay, learner, prefetch=True)
        return ahead if _iteration_us(ahead) * _WORTH_A_CORE <= _iteration_us(plain) else plain

    def _measured_pair(self, device: Device, replay: ReplayCell, learner: LearnerCell, *, prefetch: bool) -> PairCell:
        name, threads = learner.implementation, learner.threads
        ahead = ", prefetching" if prefetch else ""
        self.report(f"{device.name}: Replay Manager and {name} Learner together{ahead}")
        found = self._known(
            self._key("pair", device, {**self._pair_parameters(replay, learner), "prefetch": prefetch}, name),
            ("sample", "insert", "update", "step"),
            functools.partial(self._measure_pair, name, device, replay.fanout, threads, prefetch=prefetch),
        )
        return PairCell(
            ReplayCell(found["sample"], found["insert"], found["update"], replay.fanout),
            LearnerCell(found["step"], threads, implementation=name, prefetch=prefetch),
        )

    def _may_prefetch(self, device: Device, learner: LearnerCell) -> bool:
        """Whether a core is free to draw the next batch, and the Actors wait for the Learner."""
        arguments = learners()[learner.implementation].arguments
        if backend_of(device).host_cores != "threads" or "prefetch" not in arguments:
            return False
        sharing = self._sharing(device)
        if self.problem.replay.share_next_obs or not sharing.has_idle_core(learner.threads):
            return False
        if sharing.keeps_up(learner.step.value_us, learner.threads):
            return False
        # A loop in Python draws nothing ahead, so a difference would be noise.
        made: Any = self._make_learner(learner.implementation, device, learner.threads)
        return bool(made.loops_natively)

    @property
    def sharing(self) -> CoreSharing | None:
        """How Learner and Actors share the host; None where no measured Learner runs on the host."""
        host = self.platform.host
        return self._sharing(host) if backend_of(host).host_cores == "threads" else None

    def _sharing(self, device: Device) -> CoreSharing:
        """How a Learner on this CPU shares cores with the Actors, which run on the host."""
        train = self.problem.train
        # Of each transition collected, replay_ratio samples are trained.
        free = math.isinf(train.replay_ratio)
        collect_us = math.inf if free else self.collection_us * train.batch_size / train.replay_ratio
        on_host = self.platform.shared_silicon(device.name, self.platform.host.name)
        actors = self.problem.actors.count if on_host else 0
        return CoreSharing(device.cores or 1, actors, collect_us)

    def _pair_parameters(self, replay: ReplayCell, learner: LearnerCell) -> dict[str, Any]:
        return {
            **self._replay_parameters(replay.fanout),
            "threads": learner.threads,
            "weight_sync_interval": self.problem.train.weight_sync_interval,
        }

    # --- calibration ------------------------------------------------------------------------------------------------

    def _replay_parameters(self, fanout: int) -> dict[str, Any]:
        return replay_parameters(self.problem.replay, fanout, self.problem.train.n_step)

    def _key(
        self, primitive: str, device: Device, parameters: Mapping[str, Any], implementation: str | None = None
    ) -> CalibrationKey:
        """Everything that a measurement depends on; with `implementation` the Learner takes part in it."""
        import torch

        shapes = " ".join(f"{f.name}{list(f.shape)}{f.dtype}" for f in self.problem.transition.fields)
        everything = {
            **parameters,
            "batch_size": self.problem.train.batch_size,
            "env_count": self.problem.actors.env_count,
            "vectorization": self.problem.actors.vectorization,
        }
        if primitive != "replay":
            everything |= {
                "trainer": self.problem.trainer_class.__qualname__,
                "trainer_source": _source_hash(self.problem.trainer_class),
                "settings": repr(sorted(self.problem.settings.items())),
                "networks": self._networks,
            }
        module = backend_of(device).kernels
        hashes = [kernel_hash(implementation, module), source_hash(primitive)]
        if implementation is not None:
            everything["implementation"] = implementation
            if primitive == "pair":
                hashes.append(kernel_hash(module=module))
        return CalibrationKey(
            primitive,
            self._fingerprint(device),
            tuple(everything.items()),
            shapes,
            "float32",
            pearl.__version__,
            torch.__version__,
            "-".join(hashes),
        )

    def _fingerprint(self, device: Device) -> str:
        """The device's fingerprint, read from the hardware once."""
        if device not in self._fingerprints:
            self._fingerprints[device] = device.fingerprint()
        return self._fingerprints[device]

    @functools.cached_property
    def _networks(self) -> str:
        shape = self.problem.observation_space.shape
        return " ".join(spec.signature for spec in extract_networks(self._probe, shape))

    @functools.cached_property
    def _probe(self) -> Any:
        """A trainer for inspection; it never trains."""
        return self._trainer("cpu")

    @functools.cached_property
    def _native_policy(self) -> PolicyPlan | None:
        """The policy in C++ of the Actors of a run; None where they use the trainer itself."""
        try:
            return read_policy(self._probe)
        except UnsupportedError as error:
            logger.info("Actors run the policy in torch: the native engine does not support %s.", error)
            return None

    def _known(
        self, key: CalibrationKey, names: tuple[str, ...], work: Callable[[], dict[str, list[float]]]
    ) -> dict[str, Measurement]:
        found = self.store.get(key)
        if found is not None and set(names) <= set(found):
            self.hits += 1
            return found
        self.misses += 1
        try:
            measured = {name: Measurement.from_samples(samples) for name, samples in work().items()}
        except Exception as error:
            if isinstance(error, PearlError) or key.primitive not in _WITH_LEARNER:
                raise
            raise TrainerError(
                f"{self.problem.trainer_class.__name__} failed while its training step was profiled: "
                f"{described(error)}. The batch held random transitions of the environment's spaces."
            ) from error
        self.store.put(key, measured)
        return measured

    # --- the measurements -------------------------------------------------------------------------------------------

    def _trainer(self, device: str) -> Any:
        p = self.problem
        return make_trainer(
            p.trainer_class, p.observation_space, p.action_space, device=device, settings=dict(p.settings)
        )

    @functools.cached_property
    def _full_storage(self) -> DataStorage:
        """A full storage, as in most of a run; made only once, because it may be large."""
        p = self.problem
        return self._filled(host_storage(p.transition, p.replay, p.actors, p.train))

    def _filled(self, storage: _Storage) -> _Storage:
        envs = self.problem.actors.env_count
        fill(storage, self._rows(fill_rows(envs, storage.capacity), np.random.default_rng(0)))
        return storage

    def _rows(self, count: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Synthetic transitions of all environments in turn, as consecutive steps where the replay needs them."""
        columns = self.problem.random_columns(count, rng)
        return chained(columns, self.problem.actors.env_count) if self.problem.replay.share_next_obs else columns

    def _full_replay(self, device: Device, fanout: int) -> FullReplay:
        made = backend_of(device).replay(device)
        assert made is not None, "a device without a Replay Manager has no cell of one"
        return FullReplay(self.problem.replay, fanout, made)

    @on_own_thread
    def _measure_replay(self, device: Device, fanout: int) -> dict[str, list[float]]:
        full, storage = self._full_replay(device, fanout), self._full_storage
        replay, batch = full.manager, self.problem.train.batch_size
        out = self.problem.transition.empty(batch)
        priorities = full.rng.random(batch, np.float32) + 0.01
        sample: Sample = replay.sample(batch, full.beta)

        def sampling() -> None:
            nonlocal sample
            sample = replay.sample(batch, full.beta)
            storage.gather(sample.indices, out)

        return {
            "sample": measure(sampling, self.budget_s / 3, before=lambda: full.renew(batch)),
            "update": measure(lambda: replay.update(sample.indices, priorities, sample.generations), self.budget_s / 3),
            "insert": measure(self._insertion(full, storage), self.budget_s / 3),
        }

    def _insertion(self, full: FullReplay, storage: AnyStorage) -> Callable[[], None]:
        """A function that inserts the transitions of one iteration: one per environment."""
        count = min(self.problem.actors.env_count, self.problem.replay.capacity)
        arriving = steps(self._rows(2 * count, full.rng), count)

        def insert() -> None:
            full.manager.insert(storage.insert(next(arriving), count))

        return insert

    @on_own_thread
    def _measure_learner(self, implementation: str, device: Device, threads: int, parts: int) -> dict[str, list[float]]:
        learner = self._make_learner(implementation, device, threads, parts)
        learner.prepare()
        batch = self.problem.train.batch_size
        columns = self.problem.random_columns(batch, np.random.default_rng(0))
        weights = np.ones(batch, np.float32)
        return {"step": measure(lambda: learner.step(columns, weights), self.budget_s)}

    @on_own_thread
    def _measure_pair(
        self, implementation: str, device: Device, fanout: int, threads: int, *, prefetch: bool = False
    ) -> dict[str, list[float]]:
        """Samples of whole iterations of setting 2, in the same loop as in a run."""
        full = self._full_replay(device, fanout)
        learner = self._make_learner(implementation, device, threads, prefetch=prefetch)
        storage: AnyStorage = self._full_storage
        backend = backend_of(device)
        on_device = backend.storage(device)
        if on_device is not None and not storage_stays_on_host(self.problem.replay):
            spec, capacity = self.problem.transition, self.problem.replay.capacity
            storage = self._filled(on_device.make_storage(spec, capacity, backend.device_string(device)))
        insertion = self._insertion(full, storage)
        bell = Bell()
        laq, ldq, wsq = GrantQueue(1), ProgressQueue(1, bell), WeightSyncQueue(learner.weight_count)
        loop = TrainingLoop(
            laq,
            ldq,
            wsq,
            bell,
            replay=full.manager,
            storage=storage,
            learner=learner,
            batch_size=self.problem.train.batch_size,
            transition=self.problem.transition,
            weight_sync_interval=self.problem.train.weight_sync_interval,
        )
        learner.prepare()

        def insert() -> None:
            with loop.insertion_window():
                insertion()

        return self._measure_loop(loop.kernel, laq, ldq, insert, full, apart=backend.times_parts_apart)

    def _make_learner(
        self, implementation: str, device: Device, threads: int, parts: int = 1, *, prefetch: bool = False
    ) -> Learner:
        backend = backend_of(device)
        trainer, place = self._trainer(backend.torch_device(device)), backend.device_string(device)
        made = learners()[implementation].make
        return made(trainer, device=place, threads=threads, sub_batches=parts, prefetch=prefetch)

    def _measure_loop(
        self,
        loop: Any,
        laq: GrantQueue,
        ldq: ProgressQueue,
        insertion: Callable[[], None],
        full: FullReplay,
        *,
        apart: bool,
    ) -> dict[str, list[float]]:
        """Grant iterations in groups and insert between the groups; a sample is the mean of a group."""
        parts: dict[str, list[float]] = {"sample": [], "step": [], "update": [], "insert": []}
        batch = self.problem.train.batch_size

        def grant(iterations: int) -> dict[str, float]:
            """Microseconds of each part of an iteration."""
            full.renew(iterations * batch)
            before = loop.seconds()
            laq.grant(iterations, full.beta)
            loop.run_once(0.0)
            ldq.peek()
            ldq.release()
            return {name: (end - before[name]) * 1e6 / iterations for name, end in loop.seconds().items()}

        usual = float(np.median([sum(grant(1).values()) for _ in range(WARM_UP)]))
        iterations = full.batches(batch, max(1, round(_GRANT_US / usual)))
        published: list[float] = []
        # A device runs all parts without the host. Their shares are measured once, by waiting after each part.
        shares: dict[str, float] = {}
        if apart:
            loop.time_parts(True)
            alone = grant(max(iterations, _TIMED_ITERATIONS))
            loop.time_parts(False)
            iterations = max(iterations, self.problem.train.weight_sync_interval)
            shares = {name: part / sum(alone.values()) for name, part in alone.items()}

        def iterate() -> None:
            spent = grant(iterations)
            if shares:
                whole = sum(spent.values())
                spent = {name: whole * share for name, share in shares.items()}
            start = time.perf_counter_ns()
            insertion()
            parts["insert"].append((time.perf_counter_ns() - start) / 1e3)
            parts["sample"].append(spent["sample"] + spent["gather"])
            parts["step"].append(spent["train"])
            parts["update"].append(spent["update"])
            published.append(spent["publish"])

        measure(iterate, self.budget_s)
        # Weights are published after some steps only; their cost is spread over all steps.
        share = sum(published) / len(published)
        parts["step"] = [step + share for step in parts["step"]]
        return {name: samples[WARM_UP:] for name, samples in parts.items()}

    def _measure_actor(self) -> dict[str, list[float]]:
        p = self.problem
        setup = ActorSetup(
            p.trainer_class,
            p.settings,
            p.actors,
            p.train,
            seed=0,
            policy=self._native_policy,
            transition=p.transition,
        )
        steps = p.actors.envs_per_actor * setup.steps_per_message
        return {"transition": [s / steps for s in measure_actor(setup, self.budget_s / 2)]}


def _iteration_us(pair: PairCell) -> float:
    """Microseconds of an iteration of the loop in C++, which overlaps insertions."""
    return pair.replay.sample.value_us + pair.learner.step.value_us + pair.replay.update.value_us


def _source_hash(trainer_class: type) -> str:
    """A hash of the file that defines the class: an edit of the file makes measurements invalid."""
    try:
        source = Path(inspect.getfile(trainer_class)).read_bytes()
    except (OSError, TypeError):
        return ""
    return hashlib.sha256(source).hexdigest()[:16]
