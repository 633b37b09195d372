"""The common part of composing for trainers that learn from a replay and from rollouts."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import logging
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import gymnasium as gym

from composer.calibrated_machine import discovered_before, machine_of
from composer.calibration import CalibrationStore
from composer.codegen.python_source import literal
from composer.composition import ChosenSetting, Composition, RolloutComposition
from composer.description import Description
from composer.nodes import NodeShare, spread
from composer.platform import Platform, usable, with_cores_of_host
from composer.policy_server import fastest_place
from composer.problem import TrainingProblem
from composer.profiling.context import unwatched
from composer.program_defaults import ProgramDefaults
from composer.suggestion.suggestion import Suggestion, suggest_settings
from composer.tunables import REPLAY_RATIO
from composer.vectorization import fastest
from pearl.actors.environment import probe
from pearl.algorithms.trainer import make_trainer
from pearl.algorithms.update_frequency import frequency_of
from pearl.atomic_file import write_text
from pearl.backends import backend_of
from pearl.devices.description import Device
from pearl.devices.discovery import discover
from pearl.errors import ConfigurationError, GenerationError
from pearl.replay.memory import free_memory
from pearl.runtime.composition_file import composition_file
from pearl.runtime.interruption import ending_in_order
from pearl.spec import ONE_LEARNER, ActorSpec, LearnersSpec, NetworkSpec, TrainSpec

logger = logging.getLogger("pearl.composer")

TRIAL_STEPS = 2**40  # a trial ends by time

_Problem = TypeVar("_Problem", bound=TrainingProblem)


@dataclass(frozen=True)
class Profiled:
    """How many measurements were made, and how many were known."""

    measured: int
    known: int


class Composing(abc.ABC):
    """Composes a description: the steps of `Composer.run`, and their results.

    `actors` and `training` are the description's, with the values found for settings left to the composer. Afterwards
    `platform`, `matrix` and `placement` are set. Raises ConfigurationError that names a missing part of the
    description.
    """

    platform: Platform
    problem: Any
    matrix: Any
    placement: Any

    def __init__(self, description: Description, store: CalibrationStore) -> None:
        stated: dict[str, object] = {
            "set_actors(num_actors, env=...)": description.actors,
            "set_train_function(learner=...)": description.trainer_class,
        }
        if not (description.learns_from_rollouts or description.chooses_settings):
            stated["set_replay(size)"] = description.replay
        if missing := [call for call, value in stated.items() if value is None]:
            raise ConfigurationError(f"A Composer needs {' and '.join(missing)} to be called first.")
        assert description.actors is not None
        assert description.trainer_class is not None
        self.description, self.store = description, store
        self.actors, self.trainer_class = description.actors, description.trainer_class
        self.training = dict(description.training)
        self.watch: Callable[[str], None] = unwatched  # see MeasuringContext
        self.timesteps: int | None = None  # of the program: must be enough to train
        self.nodes: tuple[NodeShare, ...] = ()
        self.networks: Callable[[], tuple[NetworkSpec, ...]] = tuple

    def check(self) -> None:
        """See `Composer.check`."""
        if self.description.chooses_settings:
            probed = probe(self.actors)
            spaces = probed.observation_space, probed.action_space
            make_trainer(self.trainer_class, *spaces, settings=dict(self.description.settings))
        else:
            self._check_stated()

    @abc.abstractmethod
    def _check_stated(self) -> None:
        """Check a problem whose settings are all stated."""

    @abc.abstractmethod
    def run(self, budget_s: float | None, timesteps: int | None) -> tuple[Any, Any]:
        """Compose; the configurations of the two primitives. See `Composer.run`."""

    @abc.abstractmethod
    def profile(self, watch: Callable[[str], None] | None, budget_s: float | None) -> Profiled:
        """The same with thorough measurements. See `Composer.profile`."""

    @abc.abstractmethod
    def write(self, first: Any, learner: Any, placement: Any, path: Path, defaults: ProgramDefaults) -> None:
        """Write the program of a placement to `path`, and the composition next to it.

        `first` and `learner` are the configurations that `run` returned, if the user may have edited them, and
        `placement` an edited one.
        """

    @property
    def say(self) -> Callable[[str], None]:
        """Prints a line, if progress is to be seen."""
        return self.description.say

    # --- the machine ------------------------------------------------------------------------------------------------

    def stated_platform(self) -> Platform | None:
        """The platform of the user's files; None without them."""
        devices, connections = self.description.device_file, self.description.connection_file
        if devices is None and connections is None:
            return None
        if devices is None or connections is None:
            given, missing = ("device", "connection") if connections is None else ("connection", "device")
            raise ConfigurationError(
                f"A {given} file is set but no {missing} file: call set_{missing}_file too. "
                "`pearl devices` writes both for this machine."
            )
        platform, warnings = with_cores_of_host(Platform.from_files(devices, connections))
        for line in warnings:
            logger.warning("%s", line)
        for unused in platform.unused_connections:
            logger.warning(
                "The connection from %s to %s does not count: programs send messages between them through %s.",
                *(unused.source, unused.target, platform.host.name),
            )
        return platform

    def _discover(self, *, thorough: bool) -> Platform:
        """Devices and connections of this machine; bandwidths that an earlier run measured are not measured again.

        Unless `thorough`, the memory of a machine with a single device is not measured either.
        """
        edited = self.description.edited
        if edited is not None and edited.evidence is not None:
            return edited.evidence.platform
        self.say("no device file given: discovering this machine")
        found: list[str] = []
        devices, _ = discover(measure=False, progress=found.append, own_silicon=True)
        if (known := discovered_before(devices, self.store)) is not None:
            self.say("the links and memory of this machine are known from an earlier run")
            return known
        if len(devices) == 1 and not thorough:
            for line in found:
                self.say(line)
            self.say("its memory is not measured: with a single device, no choice depends on it")
            return Platform(tuple(devices), ())
        measured, connections = discover(progress=self.say, own_silicon=True)
        return Platform(tuple(measured), tuple(connections))

    def _with_cluster(self, platform: Platform) -> Platform:
        """The platform with the nodes of the user's cluster, whose connections are measured once."""
        said = self.description
        if said.cluster is None:
            return platform
        if said.cluster_nodes is None:
            from composer.cluster import with_cluster

            said.cluster_nodes = with_cluster(platform, *said.cluster, self.say).nodes
        return dataclasses.replace(platform, nodes=said.cluster_nodes)

    def _keep_machine(self, platform: Platform) -> None:
        """Keep the machine in the store; one that was discovered has connections only if these were measured."""
        discovered = self.description.device_file is None and bool(platform.connections)
        if (machine := machine_of(platform, discovered=discovered)) is not None:
            self.store.record(machine)

    # --- the problem ------------------------------------------------------------------------------------------------

    def _vectorized(self, problem: _Problem, profiler: Callable[[_Problem], Any], host: Device) -> _Problem:
        """The problem with the fastest kind of vector, if that is left to the composer."""
        if not self.description.any_vectorization or host.absent:
            return problem

        def with_actors(actors: ActorSpec) -> _Problem:
            return dataclasses.replace(problem, actors=actors)

        self.actors = fastest(problem.actors, lambda actors: profiler(with_actors(actors)).collection_us, self.say)
        return with_actors(self.actors)

    def _with_policy_server(
        self,
        problem: _Problem,
        profiler: Callable[[_Problem], Any],
        platform: Platform,
        why_not: Callable[[], str | None],
    ) -> _Problem:
        """The problem with the policy of the Actors where it is fastest, if that is left to the composer.

        `why_not` says what a policy server does not support. Raises ConfigurationError for a stated server of Actors on
        other nodes.
        """
        if not self.description.any_policy_server:
            if platform.nodes and problem.actors.is_served:
                raise ConfigurationError(
                    f"policy_server={problem.actors.policy_server!r} is for Actors on this machine; the platform has "
                    'other nodes. Leave it out, or set it to "none".'
                )
            return problem
        here = () if platform.nodes or platform.host.absent else usable(platform)[0]
        found = [backend_of(device).policy_device(device) for device in here if not device.absent]
        devices = list(dict.fromkeys(place for place in found if place is not None))

        def with_actors(actors: ActorSpec) -> _Problem:
            return dataclasses.replace(problem, actors=actors)

        if not devices or (reason := why_not()) is not None:
            if devices:
                self.say(f"policy server: none, as it does not support {reason}")
            self.actors = dataclasses.replace(problem.actors, policy_server="none")
        else:
            self.actors = fastest_place(problem.actors, devices, lambda one: profiler(with_actors(one)), self.say)
        return with_actors(self.actors)

    def _spread(
        self,
        problem: _Problem,
        platform: Platform,
        transition_us: float,
        threads: int = 1,
        learners: LearnersSpec | None = ONE_LEARNER,
    ) -> _Problem:
        """The problem with its Actors on the nodes of the platform; see `spread`."""
        self.nodes = spread(problem, platform, transition_us, threads, learners)
        for found in self.nodes:
            others = f"{found.learners} Learner(s) and " if learners is not None and learners.count > 1 else ""
            self.say(f"{others}{found.actors} Actor(s) on {found.node or 'this machine'}: {found.why}")
        nodes = tuple((found.node, found.actors) for found in self.nodes if found.actors)
        return dataclasses.replace(problem, actors=dataclasses.replace(problem.actors, nodes=nodes))

    def _chosen(
        self, platform: Platform | None, observation_space: gym.Space[Any], action_space: gym.Space[Any]
    ) -> Suggestion:
        """The settings that are left to the composer, chosen once."""
        said = self.description
        if said.suggested is None:
            paced = _paced_settings(self.trainer_class, {**said.settings, **self.training})
            stated = {} if said.timesteps is None else {"timesteps": said.timesteps}
            # A replay that stores observations once takes no other goals (`check_hindsight`): choose none for it.
            without = {"hindsight_goals": 0} if said.replay is not None and said.replay.shares else {}
            said.suggested = suggest_settings(
                self.trainer_class,
                self.actors,
                observation_space,
                action_space,
                {**without, **said.settings, **paced, **self.training, **said.rollout, **stated},
                host=None if platform is None else platform.host,
                store=self.store,
                report=self.say,
            )
            if said.replay is not None:  # the user's
                said.suggested = dataclasses.replace(said.suggested, replay=())
            for setting in self._chosen_settings:
                self.say(f"{setting.name} = {setting.value}: {setting.reason}")
        return said.suggested

    @property
    def _chosen_settings(self) -> tuple[ChosenSetting, ...]:
        """The choices of `Composer.suggestion` in words; none without `settings="auto"`."""
        suggested = self.description.suggested
        if suggested is None:
            return ()
        named = ((suggested.algorithm.value, suggested.trainer), ("replay", suggested.replay))
        choices = ((who, choice) for who, found in named for choice in found)
        return tuple(ChosenSetting(f"{who}.{c.name}", literal(c.value), c.reason) for who, c in choices)

    # --- the program ------------------------------------------------------------------------------------------------

    @staticmethod
    def _write_composition(made: Composition | RolloutComposition, program: Path) -> None:
        try:
            write_text(composition_file(program), made.to_json() + "\n")
        except OSError as error:
            raise GenerationError(f"The composition of {program} cannot be written next to it: {error}.") from error


def memory_of_host(platform: Platform | None) -> int:
    """Bytes that are free here; for an absent host all of its memory."""
    if platform is None or not any(device.absent for device in platform.devices) or not platform.host.absent:
        return free_memory()
    return sys.maxsize if platform.host.memory_gb is None else int(platform.host.memory_gb * 1e9)


def check_configurations(found: Sequence[object], kinds: Sequence[type]) -> None:
    """Raise ConfigurationError unless each configuration given to `runtime_gen` is None, or of its kind on a device."""
    for value, kind in zip(found, kinds, strict=True):
        if value is None:
            continue
        if not isinstance(value, kind):
            raise ConfigurationError(
                f"runtime_gen takes what run() returned, in this order: {' and '.join(k.__name__ for k in kinds)}, or "
                f"None; found {type(value).__name__} in the place of {kind.__name__}. Write "
                "runtime_gen(*composer.run(), path=...)."
            )
        if not isinstance(device := getattr(value, "device", None), str):
            raise ConfigurationError(f"The device of a {kind.__name__} must be a name of one; found {device!r}.")


@contextlib.contextmanager
def trial_folder() -> Iterator[Path]:
    """A temporary folder for programs to try; GenerationError if there can be none.

    SIGTERM ends the program that is tried, removes the folder, and ends this process.
    """
    try:
        folder = tempfile.TemporaryDirectory(prefix="pearl-trials-")
    except OSError as error:
        raise GenerationError(
            f"Programs cannot be tried, as they have no temporary folder: {error}. Set TMPDIR to a folder that can "
            "be written to, or try none: --budget 0, or run(budget_s=0)."
        ) from error
    with ending_in_order(), folder:
        yield Path(folder.name)


def _paced_settings(trainer_class: type, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that `train_freq` and `gradient_steps` determine; none without these."""
    frequency = frequency_of(trainer_class, settings)
    if frequency is None:
        return {}
    batch = int(settings.get("batch_size", getattr(trainer_class, "batch_size", TrainSpec.batch_size)))
    return {"batch_size": batch, REPLAY_RATIO: frequency.replay_ratio(batch)}
