"""The Composer (paper, Listing 1): turns a short description into a runtime program for this machine."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from composer.calibration import CalibrationStore
from composer.description import ACTOR_FIELDS, Description, own_containers, path_of
from composer.program_defaults import ProgramDefaults
from pearl.actors.waiting import ending_waiting, start_waiting
from pearl.atomic_file import write_text
from pearl.backends import AUTO
from pearl.errors import ConfigurationError, GenerationError
from pearl.garbage import no_collection
from pearl.runtime.launch import run_command, shown
from pearl.runtime.options import check_count
from pearl.spec import NetworkSpec

if TYPE_CHECKING:
    from composer.composing import Composing, Profiled
    from composer.placement import Placement
    from composer.platform import Platform
    from composer.suggestion.suggestion import Suggestion

_T = TypeVar("_T")


class Composer(Description):
    """Describe the machine and the problem with `set_*`, then call `run` and `runtime_gen`.

    `progress` prints a line for each measurement. `calibration` is the file that keeps measurements between runs
    (default: a file in the user's cache folder); with `remeasure`, it measures again what is kept there.
    """

    def __init__(
        self, *, progress: bool = True, calibration: str | Path | None = None, remeasure: bool = False
    ) -> None:
        super().__init__(progress=progress, calibration=calibration, remeasure=remeasure)
        self._composed: Composing | None = None

    # --- the steps --------------------------------------------------------------------------------------------------

    def run(self, *, timesteps: int | None = None, budget_s: float | None = None) -> tuple[Any, Any]:
        """Check the problem, read the machine, profile, place. Returns the two primitives' configurations.

        Afterwards `matrix`, `placement` and `networks` are set. `timesteps`, if known, are the environment steps of
        the program: too few for any training are refused at once. The most promising placements are tried as
        programs, a few seconds each, and the fastest is placed. `budget_s` seconds are for that: up to 60 if they are
        not given, or the variable PEARL_BUDGET_S; 0: the measurements of the primitives alone decide. For a trainer
        that learns from rollouts, the two are those of GAE (`AdvantagesConfig`) and of the Learner
        (`RolloutLearnerConfig`). Raises ConfigurationError that names what is missing or wrong, and GenerationError
        for a problem without a program, both before anything is measured.
        """
        if timesteps is not None:
            check_count("timesteps", timesteps)
        if timesteps != self.timesteps:  # settings that are chosen follow the length of the run
            self.timesteps, self.suggested = timesteps, None
        with self._measuring() as composing:
            return composing.run(budget_s, timesteps)

    def check(self) -> None:
        """Check the problem as `run` does, before devices are read and anything is measured.

        Makes one environment and the trainer. Settings that are left to the composer are not chosen. Raises
        ConfigurationError that names what is missing or wrong.
        """
        self._composing(self._store()).check()

    def profile(self, *, watch: Callable[[str], None] | None = None, budget_s: float | None = None) -> Profiled:
        """Run, with the same `budget_s`, and return how much was measured for it; later runs measure nothing.

        `watch` gets a line of text before each measurement that is made. An error that it raises ends profiling;
        everything measured so far is kept. Raises as `run` does.
        """
        with self._measuring() as composing:
            return composing.profile(watch, budget_s)

    def missing_measurements(self, *, budget_s: float | None = None) -> frozenset[str]:
        """Roughly the measurements that `profile` would make, as digests of their keys; measures nothing.

        Some may turn out not to be needed, and others may be needed. Raises as `run` does.
        """
        self._refuse_rollouts()
        from composer.replay_composing import ReplayComposing

        composing = self._composing(self._store())
        assert isinstance(composing, ReplayComposing), "trainers that learn from rollouts are refused"
        missing = composing.missing_measurements(budget_s)
        self._keep_found(composing)
        return missing

    def resized(
        self, *, batch_size: int | None = None, capacity: int | None = None, fanout: int | str | None = None
    ) -> Composer:
        """A composer of the same problem with another batch size, capacity of the replay, or fanout.

        Raises ConfigurationError for a size that `set_training` or `set_replay` would refuse, or before `set_replay`.
        """
        self._refuse_rollouts()
        sizes = {"capacity": capacity, "fanout": fanout}
        changed: dict[str, Any] = {name: value for name, value in sizes.items() if value is not None}
        if self.replay is None and (changed or not self.chooses_settings):
            raise ConfigurationError("Composer.resized() needs set_replay(size) to be called first.")
        other = copy.copy(self)
        other._composed = None
        if batch_size is not None:
            auto = {name: AUTO for name in self.auto if name not in ACTOR_FIELDS}
            other.set_training(**{**self.training, **auto, "batch_size": batch_size})
        if self.replay is not None:
            other.replay = dataclasses.replace(self.replay, **changed)
        return other

    def _refuse_rollouts(self) -> None:
        if self.learns_from_rollouts:
            raise ConfigurationError(
                f"{_made(self.trainer_class, 'trainer').__name__} learns from rollouts. Its measurements cannot be "
                "made in advance for a family of sizes: compose it (`pearl compose`, or run()), which makes them."
            )

    def runtime_gen(
        self,
        replay: Any = None,
        learner: Any = None,
        path: str | Path = "runtime_program.py",
        *,
        placement: Placement | None = None,
        timesteps: int = 100_000,
        run_dir: str | Path | None = None,
        until_return: float | Literal["none"] | None = None,
        seed: int | None = None,
        eval_episodes: int | None = None,
        eval_interval: int | None = None,
        checkpoint_interval: int | None = None,
    ) -> Path:
        """Write the runtime program to `path`, print how to run it, and return the path.

        `replay` and `learner` are the results of `run`, which may be edited: another pair of devices, or another
        implementation of the Learner, is taken from the placement's alternatives. An edited `placement` replaces the
        composer's own for this program; `set_placement` says what can be edited. The other arguments are the defaults
        of the program's options. None keeps the default of the option; for `until_return` that is the environment's
        registered reward threshold ("none" or infinity: no early stop).

        The devices, the matrix and the placement in effect go to PROGRAM.composition.json next to the program. Each run
        keeps a copy in its folder, from which `pearl report` draws them.

        The program names paths relative to its own file, so that all can be moved together. Without `run_dir` the run
        goes to the folder `runs/<name of the program>` next to it. A relative `run_dir` counts from the current folder,
        as `path` does; an absolute one outside of the program's folder stays absolute.

        Raises ConfigurationError if a `set_*` was called since `run` with other values, for a configuration that `run`
        does not return, for a default that its option would refuse, or for too few `timesteps` for any training;
        PlacementError for a pair, or an implementation on it, that the placement does not have, and for a `placement`
        with other numbers than were composed; GenerationError for a program that cannot be written.
        """
        path = path_of("runtime_gen", path)
        counts = {
            "seed": seed,
            "eval_episodes": eval_episodes,
            "eval_interval": eval_interval,
            "checkpoint_interval": checkpoint_interval,
        }
        check_count("timesteps", timesteps)
        composed = _made(self._composed, "placement")
        defaults = ProgramDefaults(
            timesteps=timesteps,
            run_dir=None if run_dir is None else path_of("run_dir of runtime_gen", run_dir),
            until_return=until_return,
            options={name: check_count(name, value) for name, value in counts.items() if value is not None},
        )
        if changed := self.changed_since(composed.description):
            raise ConfigurationError(
                f"Called with other values since run() composed: {', '.join(changed)}. The program would have the "
                "earlier values. Call run() again, which measures only what is new, then runtime_gen()."
            )
        composed.write(replay, learner, placement, path, defaults)
        if self.progress:
            print(f"Program:   {shown(path)}\nRun it:    {run_command(path)}", flush=True)
        return path

    RuntimeGen = runtime_gen  # the paper's spelling

    def save(self, folder: str | Path) -> Path:
        """Write the results of `run` to `folder`: devices.csv, connections.csv, matrix.json, placement.json."""
        from pearl.devices.discovery import write_csv

        folder = path_of("save", folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            nodes = self.platform.nodes
            devices = (*self.platform.devices, *(node.device for node in nodes))
            links = (*self.platform.connections, *(node.link for node in nodes if node.link is not None))
            write_csv(devices, links, folder / "devices.csv", folder / "connections.csv")
            write_text(folder / "matrix.json", self.matrix.to_json() + "\n")
            write_text(folder / "placement.json", self.placement.to_json() + "\n")
        except OSError as error:
            raise GenerationError(f"The composition cannot be written to {folder}: {error}.") from error
        return folder

    # --- the results ------------------------------------------------------------------------------------------------

    @property
    def platform(self) -> Platform:
        """Devices and connections."""
        return _made(self._composed, "platform").platform

    @property
    def matrix(self) -> Any:
        """The primitive-device assignment matrix: an AssignmentMatrix, or a RolloutMatrix for on-policy training."""
        return _made(self._composed, "matrix").matrix

    @property
    def placement(self) -> Any:
        """The placement, with every alternative and its cost: a Placement, or a RolloutPlacement."""
        return _made(self._composed, "placement").placement

    @property
    def suggestion(self) -> Suggestion:
        """The settings that `run` chose, with reasons: those of a class set with `settings="auto"`."""
        return _made(None if self._composed is None else self._composed.description.suggested, "suggestion")

    @property
    def networks(self) -> tuple[NetworkSpec, ...]:
        """The networks read from the trainer, which needs torch."""
        return () if self._composed is None else self._composed.networks()

    # --- composing --------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _measuring(self) -> Iterator[Composing]:
        """Composing that measures; its results are the composer's if nothing fails.

        Unless an Actor in this environment was measured before, the interpreter of the Actor to profile starts first,
        so that both processes import at the same time.
        """
        with ending_waiting():
            store = self._store()
            if self.actors is not None and not store.has_actor(self.actors.env_name):
                with contextlib.suppress(OSError):  # a limit of processes
                    start_waiting(1)
            composing = self._composing(store)
            yield composing
        self._composed = composing
        self._keep_found(composing)

    def _keep_found(self, composing: Composing) -> None:
        """Keep the results that later runs of the same description need not find again."""
        self.suggested, self.cluster_nodes = composing.description.suggested, composing.description.cluster_nodes

    def _composing(self, store: CalibrationStore) -> Composing:
        """The steps for this kind of trainer, imported only now: that takes longer than all imports here.

        They work on a copy of the description, so that later changes do not alter their results, not even changes
        in a list or dictionary that was given.
        """
        said = copy.copy(self)
        said._composed = None
        said.settings, said.training, said.rollout = map(own_containers, (self.settings, self.training, self.rollout))
        if self.actors is not None:
            said.wrappers = own_containers(self.wrappers)
            said.actors = dataclasses.replace(
                self.actors,
                env_kwargs=own_containers(self.actors.env_kwargs),
                eval_env_kwargs=own_containers(self.actors.eval_env_kwargs),
                wrappers=own_containers(self.actors.wrappers),
            )
        with no_collection():
            if self.learns_from_rollouts:
                from composer.on_policy.composing import RolloutComposing

                return RolloutComposing(said, store)
            from composer.replay_composing import ReplayComposing

            return ReplayComposing(said, store)

    def _store(self) -> CalibrationStore:
        return CalibrationStore(self.store_path, remeasure=self.remeasure)


def _made(value: _T | None, name: str) -> _T:
    if value is None:
        raise ConfigurationError(f"Composer.{name} exists after Composer.run(); call that first.")
    return value
