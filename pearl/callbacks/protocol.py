"""The methods that a callback may define, and the view of the run that it gets."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from pearl.algorithms.trainer import TrainerLike
    from pearl.policy.saved import SavedPolicy
    from pearl.runtime.evaluation import Evaluation


class RunContext(Protocol):
    """A run, as callbacks see it. Change it only through its methods."""

    @property
    def run_dir(self) -> Path:
        """The folder of the run."""

    @property
    def env_steps(self) -> int:
        """Environment steps so far, those before a resumption included."""

    @property
    def gradient_steps(self) -> int:
        """Gradient steps so far."""

    @property
    def episodes(self) -> int:
        """Training episodes that have ended."""

    @property
    def mean_return(self) -> float:
        """Mean return of the last 100 training episodes, exploration included; NaN before the first."""

    @property
    def wall_s(self) -> float:
        """Seconds that the run has taken."""

    @property
    def config(self) -> Mapping[str, Any]:
        """What was run: program, environment, trainer class, its settings, seed and steps, as plain values."""

    @property
    def trainer(self) -> TrainerLike:
        """The trainer. Its weights change meanwhile, except in `on_evaluation`, `on_checkpoint` and `on_end`."""

    @property
    def stopped(self) -> str:
        """Why the run has stopped or is about to; "" while it goes on."""

    @property
    def error(self) -> str:
        """In `on_end`: kind and message of the error that ended the run; "" if it did not fail."""

    def scalars(self) -> Mapping[str, float]:
        """The numbers of `progress.csv`, as they are now."""

    def log(self, name: str, value: float) -> None:
        """Log a number of the user's: it becomes a column of `progress.csv` and a curve in TensorBoard."""

    @property
    def env_attributes(self) -> Mapping[str, Any]:
        """What `set_env_attributes` has set so far, in the parts of the run that it was resumed from too."""

    def set_env_attributes(self, **values: Any) -> None:
        """Set attributes of the Actors' environments, as Gymnasium's `set_wrapper_attr` does: JSON values by name.

        Each Actor does so before its next message, in the midst of episodes; one that is restarted, and a resumed run,
        begin with them. Environments of evaluations keep their own. EnvError if the environment has no such attribute
        or refuses the value; ConfigurationError for other values, and for vectors whose environments are out of reach.
        """

    def policy(self) -> SavedPolicy:
        """A copy of the present policy. Not for `on_step` and `on_rollout`, during which the weights may change."""

    def stop(self, reason: str) -> None:
        """End the run as soon as nothing is under way, with a checkpoint, an evaluation and exit code 0.

        `reason` is shown, and is `stopped` of `summary.json`. ConfigurationError if it is empty.
        """


class Callback:  # no Protocol: type checkers take its empty methods for abstract ones
    """Derive from this, and override what is needed; methods that are not overridden cost nothing.

    A callback that raises is named, and the run stops with its checkpoint saved. --bench calls no callbacks.
    """

    def on_start(self, run: RunContext) -> None:
        """The run is about to begin, or to go on after --resume. One that raises here ends it at once."""

    def on_step(self, run: RunContext) -> None:
        """The host took a message with environment steps of an Actor: a few steps of its environments."""

    def on_rollout(self, run: RunContext) -> None:
        """On-policy: a rollout was trained on. With a replay: collected transitions were inserted."""

    def on_evaluation(self, run: RunContext, kind: str, evaluation: Evaluation) -> None:
        """The policy was evaluated, with a `kind` as in `evaluations.csv`; nothing is under way."""

    def on_checkpoint(self, run: RunContext, path: Path) -> None:
        """A checkpoint was written into the folder `path`; nothing is under way."""

    def on_end(self, run: RunContext) -> None:
        """The run is over: last evaluations were made and files written, unless it failed. Called once."""

    def state_dict(self) -> dict[str, Any]:
        """The state of this callback for a checkpoint: JSON values by name."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """With --resume, before `on_start`: take what `state_dict` returned when the checkpoint was written."""
