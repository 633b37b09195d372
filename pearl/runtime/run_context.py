"""A run as its callbacks see it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pearl.algorithms.trainer import TrainerLike, make_trainer
from pearl.errors import ConfigurationError
from pearl.policy.environment import environment_text
from pearl.runtime.outcome import flat_tensors
from pearl.runtime.run_log import PROGRESS_COLUMNS
from pearl.runtime.trainer_state import load_networks, module_tensors, policy_groups

if TYPE_CHECKING:
    from pearl.policy.saved import SavedPolicy
    from pearl.runtime.run import Run


class Context:
    """`RunContext` of a `Run`."""

    def __init__(self, run: Run) -> None:
        self._run = run

    @property
    def run_dir(self) -> Path:
        """The folder of the run."""
        return self._run.options.run_dir

    @property
    def env_steps(self) -> int:
        """Environment steps so far."""
        return self._run.counters.env_steps

    @property
    def gradient_steps(self) -> int:
        """Gradient steps so far."""
        return self._run.counters.gradient_steps

    @property
    def episodes(self) -> int:
        """Training episodes that have ended."""
        return self._run.counters.episodes

    @property
    def mean_return(self) -> float:
        """Mean return of the last 100 training episodes."""
        return self._run.counters.mean_return

    @property
    def wall_s(self) -> float:
        """Seconds that the run has taken."""
        return self._run.report.wall_s()

    @property
    def config(self) -> Mapping[str, Any]:
        """What was run, as plain values."""
        run, options = self._run, self._run.options
        description = run.describe_policy()
        settings = {n: _plain(run.schedule.get(n, value)) for n, value in (description.settings or {}).items()}
        return {
            "program": run.program.name,
            "environment": run.actors.env_name,
            "evaluated_in": environment_text(run.actors.evaluation),
            "trainer": description.trainer.name,
            "seed": options.seed,
            "timesteps": options.timesteps,
            "environments": run.actors.env_count,
            **settings,
        }

    @property
    def trainer(self) -> TrainerLike:
        """The trainer."""
        return self._run.trainer

    @property
    def stopped(self) -> str:
        """Why the run has stopped."""
        return self._run.stop_reason

    @property
    def error(self) -> str:
        """What ended the run, if it failed."""
        return self._run.error

    def scalars(self) -> Mapping[str, float]:
        """The numbers of `progress.csv`."""
        return self._run.report.scalars()

    def log(self, name: str, value: float) -> None:
        """Keep a number of the user's."""
        report = self._run.report
        if name not in report.further and (
            not isinstance(name, str) or not name or name in PROGRESS_COLUMNS or name in report.scalars()
        ):
            raise ConfigurationError(
                "A number of a callback needs a name other than those of the run, such as "
                f"{', '.join(PROGRESS_COLUMNS)}; found {name!r}."
            )
        report.further[name] = float(value)

    @property
    def env_attributes(self) -> Mapping[str, Any]:
        """What `set_env_attributes` has set."""
        return self._run.env_attributes.values

    def set_env_attributes(self, **values: Any) -> None:
        """Set attributes of the Actors' environments."""
        attributes = self._run.env_attributes
        before = attributes.values
        attributes.set(values)
        changed = {
            name: value for name, value in attributes.values.items() if name not in before or value != before[name]
        }
        if changed:
            self._run.report.say(
                f"From step {self.env_steps:,} on, the environments of the Actors have "
                f"{', '.join(f'{name}={value!r:.100}' for name, value in changed.items())}."
            )

    def policy(self) -> SavedPolicy:
        """A copy of the present policy."""
        from pearl.policy.loading import acting_of
        from pearl.policy.saved import SavedPolicy, WeightsOrigin

        run = self._run
        copy = make_trainer(type(run.trainer), run.observation_space, run.action_space, settings=run.settings)
        load_networks(copy, flat_tensors(module_tensors(run.trainer), policy_groups(run.trainer)))
        origin = WeightsOrigin("present", str(self.run_dir), str(self.run_dir), self.env_steps)
        return SavedPolicy(run.describe_policy(), copy, acting_of(copy), origin)

    def stop(self, reason: str) -> None:
        """End the run."""
        if not (text := str(reason).strip()):
            raise ConfigurationError(f"stop needs the reason, a text that is not empty; found {reason!r}.")
        self._run.stop(text)


def _plain(value: object) -> object:
    return value if isinstance(value, bool | int | float | str) else repr(value)
