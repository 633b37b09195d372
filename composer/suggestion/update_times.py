"""Times gradient steps of a trainer class at several sizes, as the profiler does for the column of Learners."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium as gym

from composer.calibration import CalibrationStore
from composer.platform import Platform
from composer.problem import Problem
from composer.profiling.context import ProfilingContext
from composer.profiling.learner_column import measure_learner
from pearl.algorithms.trainer import Trainer, transition_of
from pearl.backends import learners, runs_on
from pearl.devices.description import Device
from pearl.spec import ActorSpec, ReplaySpec, TrainSpec


class UpdateTimes:
    """Microseconds of a gradient step on `host`, on one thread, of the implementation with the lowest bound.

    Nothing is measured for a host that is absent, or for an algorithm that learns from rollouts.
    """

    def __init__(
        self,
        trainer_class: type[Trainer],
        settings: Mapping[str, Any],
        observation_space: gym.Space[Any],
        action_space: gym.Space[Any],
        actors: ActorSpec,
        host: Device,
        store: CalibrationStore,
        report: Callable[[str], None],
    ) -> None:
        self._class, self._settings, self._spaces = trainer_class, dict(settings), (observation_space, action_space)
        self._actors, self._host, self._store, self._report = actors, host, store, report
        self._known: dict[tuple[tuple[int, ...], int], float | None] = {}

    def __call__(self, hidden_sizes: tuple[int, ...], batch_size: int) -> float | None:
        """Of the trainer with such networks and batches."""
        if self._host.absent or self._class.data_flow() != "replay":
            return None
        key = (tuple(hidden_sizes), batch_size)
        if key not in self._known:
            self._known[key] = self._measured(*key)
        return self._known[key]

    def _measured(self, hidden_sizes: tuple[int, ...], batch_size: int) -> float | None:
        observation_space, action_space = self._spaces
        problem = Problem(
            trainer_class=self._class,
            settings={**self._settings, "hidden_sizes": hidden_sizes},
            observation_space=observation_space,
            action_space=action_space,
            transition=transition_of(self._class, observation_space, action_space, self._settings),
            replay=ReplaySpec(batch_size),
            train=TrainSpec(batch_size=batch_size, replay_ratio=math.inf),
            actors=self._actors,
        )
        context = ProfilingContext(Platform((self._host,), ()), problem, self._store, self._report)
        here = [name for name in learners() if runs_on(name, self._host)]
        able = [name for name in here if learners()[name].supports(context.probe) is None]
        if not able:
            return None
        implementation = min(able, key=lambda name: learners()[name].least_step_us(context.probe))
        context.begin(f"{implementation} Learner, hidden sizes {hidden_sizes}, batch {batch_size}")
        parameters = {"threads": 1, "sub_batches": 1, "own_storage": False}
        found = context.known(
            context.key("learner", self._host, parameters, implementation),
            ("step",),
            functools.partial(measure_learner, context, self._host, implementation, 1, 1),
            self._host,
        )
        return found["step"].value_us
