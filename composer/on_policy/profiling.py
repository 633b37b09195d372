"""Measures the primitives of on-policy training: collecting, GAE, and training on a rollout."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from composer.matrix import LearnerCell, MissingCell, UnavailableDevice, UnsupportedLearner
from composer.measurement import Measurement
from composer.on_policy.matrix import AdvantagesCell, AdvantagesColumn, LearnerColumn, RolloutMatrix, RolloutRow
from composer.on_policy.problem import RolloutProblem
from composer.platform import usable
from composer.profiling.actors import measure_actor
from composer.profiling.context import MeasuringContext
from composer.profiling.measuring import measure, on_own_thread
from composer.report import left_out_line
from pearl.actors.native_policy import NativePolicy
from pearl.algorithms.on_policy import OnPolicyTrainer, present_policy
from pearl.backends import AUTO, backend_of, backends
from pearl.backends.protocol import RolloutLearnerImplementation, powers_of_two
from pearl.devices.description import Device
from pearl.errors import CapacityError, DeviceError, PearlError
from pearl.rollout.columns import LOG_PROB
from pearl.rollout.preparation import RolloutPreparation
from pearl.spec import ACTION, OBS, RolloutSpec

logger = logging.getLogger("pearl.composer")


class RolloutProfiler(MeasuringContext[RolloutProblem]):
    """Fills the matrix, a row per usable device."""

    def matrix(self) -> RolloutMatrix:
        """Profile every usable device."""
        devices, unavailable = usable(self.platform)
        for learner in self._unsupported:
            self.report(left_out_line(learner))
        rows = tuple(self._row(device) for device in devices)
        left_out = tuple(UnavailableDevice(d.name, reason) for d, reason in unavailable)
        left_out_learners = (*self._unsupported, *self.slow)
        return RolloutMatrix(rows, self._collection(), self.problem.rows, left_out, left_out_learners)

    def _row(self, device: Device) -> RolloutRow:
        if backend_of(device).estimator(device) is not None:
            from composer.on_policy.estimates import estimated_advantages

            self.report(f"{device.name} is modelled, not measured")
            return RolloutRow(
                device.name, estimated_advantages(device, self.platform, self.problem), (self._no_learner(device),)
            )
        self.report(f"profiling {device.name}")
        advantages = self._advantages(device)
        wanted = self._implementations(device)
        steps = self.problem.rollout.epochs * self.problem.rows / self.problem.train.batch_size
        bounds = {name: steps * made.least_step_us(self.probe) for name, made in wanted.items()}
        cells: list[LearnerColumn] = []
        for name in sorted(wanted, key=bounds.__getitem__):
            fastest_us = min((cell.step.least_us for cell in cells if isinstance(cell, LearnerCell)), default=math.inf)
            if not self.too_slow(name, device, bounds[name], fastest_us):
                cells += self._learner(device, name, wanted[name], fastest_us)
        if not cells:
            cells = [self._no_learner(device)]
        cells.sort(key=lambda cell: cell.step.value_us if isinstance(cell, LearnerCell) else float("inf"))
        return RolloutRow(device.name, advantages, tuple(cells))

    @staticmethod
    def _no_learner(device: Device) -> MissingCell:
        able = dict.fromkeys(backend.csv_name for backend in backends() if backend.rollout_learners)
        kernels = f"the kernels for {backend_of(device).name} devices do not train on rollouts"
        return MissingCell(f"{kernels}; {' and '.join(able)} devices do")

    # --- collecting -------------------------------------------------------------------------------------------------

    @property
    def actors_rollout(self) -> RolloutSpec:
        """The rollout."""
        return self.problem.rollout

    @property
    def collection_us(self) -> float:
        """Microseconds in which all Actors together collect one transition."""
        return self._collection().value_us / self.problem.rows

    @property
    def transition_us(self) -> float:
        """Microseconds in which an Actor with a core of its own collects a transition."""
        return self._one_rollout().value_us / (self.problem.rows / self.problem.actors.count)

    def _collection(self) -> Measurement:
        """Microseconds until all actors have collected a rollout, side by side on the host's cores."""
        if self.problem.actors.is_served:
            one, waves = self.together, float(self.problem.rows)
        else:
            one = self._one_rollout()
            waves = max(1.0, self.problem.actors.count / (self.platform.host.cores or 1))
        samples = None if one.samples is None else tuple(s * waves for s in one.samples)
        return Measurement(one.value_us * waves, one.p20_us * waves, one.p80_us * waves, one.n, one.source, samples)

    def _one_rollout(self) -> Measurement:
        """Microseconds of one Actor's part of a rollout."""
        p, host = self.problem, self.platform.host
        parameters = {**self.actor_parameters, "horizon": p.rollout.horizon}
        self.begin(f"{host.name}: an Actor's rollout")
        key = self.key("rollout actor", host, parameters)
        return self.known(key, ("rollout",), self._measure_actor, host)["rollout"]

    def _measure_actor(self) -> dict[str, list[float]]:
        return {"rollout": measure_actor(self.actor_setup(self.problem.rollout), self.budget_s / 2)}

    # --- GAE --------------------------------------------------------------------------------------------------------

    def _advantages(self, device: Device) -> AdvantagesColumn:
        if backend_of(device).advantages(device) is None:
            return MissingCell(f"no GAE for {device.backend} in this version")
        spec = self.problem.rollout
        parameters = {
            "horizon": spec.horizon,
            "reward_standardization": spec.reward_standardization,
            "value_standardization": spec.value_standardization,
            "quantization_bits": spec.quantization_bits,
        }
        self.begin(f"{device.name}: GAE of {self.problem.rows:,} transitions")
        try:
            found = self.known(
                self.key("advantages", device, parameters), ("estimate",), lambda: self._measure_gae(device), device
            )
        except (CapacityError, DeviceError) as error:
            return self._failed(device, error)
        return AdvantagesCell(found["estimate"])

    def _measure_gae(self, device: Device) -> dict[str, list[float]]:
        p = self.problem
        factory = backend_of(device).advantages(device)
        assert factory is not None
        estimator = factory.make_advantages(p.train.gamma, p.rollout.gae_lambda)
        preparation = RolloutPreparation(p.rollout, p.actors.env_count, p.train.gamma)
        rng, shape = np.random.default_rng(0), (p.rollout.horizon, p.actors.env_count)
        fresh = rng.standard_normal((2, *shape), np.float32)
        rewards, values, bonus = np.empty(shape, np.float32), np.empty(shape, np.float32), np.zeros(shape, np.float32)
        last = rng.standard_normal(shape[1], np.float32)
        ends = (rng.random(shape) < 0.01).astype(np.uint8)

        def renew() -> None:
            rewards[:], values[:] = fresh

        def estimate() -> None:
            preparation.estimate(estimator, rewards, values, bonus, last, ends)

        return {"estimate": measure(estimate, self.budget_s, renew)}

    # --- the Learner ------------------------------------------------------------------------------------------------

    @functools.cached_property
    def _known_implementations(self) -> dict[str, RolloutLearnerImplementation]:
        forced = self.problem.implementation
        found: dict[str, RolloutLearnerImplementation] = {}
        for device in usable(self.platform)[0]:
            found |= backend_of(device).rollout_learners
        return {name: made for name, made in found.items() if forced in (AUTO, name)}

    @functools.cached_property
    def _unsupported(self) -> tuple[UnsupportedLearner, ...]:
        found = ((name, made.supports(self.probe)) for name, made in self._known_implementations.items())
        return tuple(UnsupportedLearner(name, reason) for name, reason in found if reason is not None)

    def _implementations(self, device: Device) -> dict[str, RolloutLearnerImplementation]:
        unsupported = {learner.implementation for learner in self._unsupported}
        here = backend_of(device).rollout_learners
        return {
            name: made for name, made in here.items() if name in self._known_implementations and name not in unsupported
        }

    def _learner(
        self, device: Device, name: str, made: RolloutLearnerImplementation, fastest_us: float
    ) -> list[LearnerColumn]:
        """A cell for each number of threads: only a program shows which is the fastest while Actors run.

        `fastest_us` is the least time so far, of any implementation: next to it, slow ones need few samples.
        """
        p = self.problem
        cells: list[LearnerColumn] = []
        alone_us = math.nan
        for threads in powers_of_two(self._most_threads(device)):
            if cells and self.too_slow(name, device, alone_us / threads, fastest_us, threads=threads):
                continue
            parameters: dict[str, Any] = {
                "implementation": name,
                "threads": threads,
                "rows": p.rows,
                "epochs": p.rollout.epochs,
                "minibatch": p.train.batch_size,
            }
            self.begin(f"{device.name}: {name} Learner on a rollout, {threads} thread(s)")
            key = self.key("rollout learner", device, parameters)
            try:
                worth_us = self.worth_us(fastest_us)
                found = self.known(
                    key, ("step",), functools.partial(self._measure_learner, made, device, threads, worth_us), device
                )
            except (CapacityError, DeviceError) as error:
                return [self._failed(device, error)]
            cells.append(LearnerCell(found["step"], threads, implementation=name))
            fastest_us = min(fastest_us, found["step"].least_us)
            if threads == 1:
                alone_us = found["step"].least_us
        return cells

    def _most_threads(self, device: Device) -> int:
        """All cores while the actors wait; else those without an actor."""
        if backend_of(device).host_cores != "threads":
            return 1
        cores = device.cores or 1
        return cores if self.problem.rollout.policy_lag == 0 else max(1, cores - self.problem.actors.count)

    def _measure_learner(
        self, made: RolloutLearnerImplementation, device: Device, threads: int, worth_us: float
    ) -> Mapping[str, list[float]]:
        p = self.problem

        @on_own_thread
        def timed() -> list[float]:
            trainer = self._trainer(backend_of(device).torch_device(device))
            learner = made.make(
                trainer,
                epochs=p.rollout.epochs,
                batch_size=p.train.batch_size,
                threads=threads,
                device=backend_of(device).device_string(device),
            )
            learner.prepare()
            columns = p.random_rollout(np.random.default_rng(0))
            self._act_in(trainer, columns)  # other actions would make steps that no run makes
            return measure(lambda: learner.train(columns), self.budget_s, worth_us=worth_us)

        return {"step": timed()}

    def _act_in(self, trainer: OnPolicyTrainer, columns: dict[str, np.ndarray]) -> None:
        """Give each row the log probability of its action; in C++, without torch, of a newly drawn action."""
        plan = self._native_policy
        if plan is None:
            columns[LOG_PROB] = present_policy(trainer, columns)[0]
            return
        rng, size = np.random.default_rng(0), (self.problem.rows, math.prod(plan.action_shape))
        normal = plan.head == "normal"
        noise = rng.standard_normal(size, np.float32) if normal else rng.random(size, np.float32)
        obs = np.ascontiguousarray(columns[OBS], np.float32)
        columns[ACTION], columns[LOG_PROB], _ = NativePolicy(plan).explore(obs, noise)

    def _failed(self, device: Device, error: PearlError) -> MissingCell:
        if device == self.platform.host:
            raise error
        logger.warning("A measurement failed on %s, which is left out of it: %s", device.name, error)
        return MissingCell(str(error).partition("\n")[0])
