"""Send a run's numbers to Weights & Biases or MLflow."""

from __future__ import annotations

import abc
import contextlib
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pearl.callbacks.protocol import Callback, RunContext
from pearl.callbacks.ready import check_text
from pearl.errors import ConfigurationError
from pearl.extras import import_extra

if TYPE_CHECKING:
    from pearl.runtime.evaluation import Evaluation


@dataclass(kw_only=True)
class _Logger(Callback, abc.ABC):
    """Sends the numbers of `progress.csv` every `every_s` seconds and at the end, and each evaluation."""

    every_s: float = 5.0
    _next: float = field(default=0.0, init=False, repr=False)
    _to: Any = field(default=None, init=False, repr=False)  # what sends to the run that is under way there

    def __post_init__(self) -> None:
        if isinstance(self.every_s, bool) or not isinstance(self.every_s, int | float) or not self.every_s >= 0:
            raise ConfigurationError(
                f"{type(self).__name__}.every_s must be seconds, at least 0; found {self.every_s!r}."
            )

    @abc.abstractmethod
    def _send(self, run: RunContext, values: Mapping[str, float], step: int) -> None:
        """Send these numbers of environment step `step`."""

    @abc.abstractmethod
    def _finish(self, stopped: str, *, failed: bool) -> None:
        """End the run there; `stopped` says why."""

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """End the run there as failed where sending fails: a callback that raised is not called at the end."""
        try:
            yield
        except Exception as error:
            with contextlib.suppress(Exception):
                self._end(f"{type(self).__name__} failed: {type(error).__name__}: {error}", failed=True)
            raise

    def _end(self, stopped: str, *, failed: bool) -> None:
        try:
            self._finish(stopped, failed=failed)
        finally:
            self._to = None  # a next run of the process may end before `on_start`

    def _send_numbers(self, run: RunContext) -> None:
        with self._failing():
            self._send(run, _finite(run.scalars()), run.env_steps)

    def on_step(self, run: RunContext) -> None:
        """Send the run's numbers if that is due."""
        if (now := time.monotonic()) >= self._next:
            self._next = now + self.every_s
            self._send_numbers(run)

    def on_evaluation(self, run: RunContext, kind: str, evaluation: Evaluation) -> None:
        """Send mean and deviation of the returns, under the kind of the evaluation."""
        name = kind.replace(" ", "_")
        values = {f"evaluation/{name}": evaluation.mean, f"evaluation/{name}_std": evaluation.std}
        with self._failing():
            self._send(run, _finite({**run.scalars(), **values}), run.env_steps)

    def on_end(self, run: RunContext) -> None:
        """Send the last numbers, and finish the run there: as failed if an error ended it."""
        if self._to is not None:
            self._send_numbers(run)
            self._end(run.error or run.stopped, failed=bool(run.error))


def _finite(values: Mapping[str, float]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items() if value is not None and math.isfinite(value)}


@dataclass(kw_only=True)
class WandbLogger(_Logger):
    """Logs to Weights & Biases (extra `wandb`): `wandb.init(project=..., name=..., config=..., **init)`.

    `name` is the run folder's by default; `init` are further arguments, such as {"mode": "offline"}.
    """

    project: str = "pearl"
    name: str | None = None
    init: Mapping[str, Any] = field(default_factory=dict)
    _id: str = field(default="", init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_text("WandbLogger.project", self.project, "the name of a project")
        if not isinstance(self.init, Mapping):
            raise ConfigurationError(
                f'WandbLogger.init must be arguments of wandb.init by name, such as {{"mode": "offline"}}; found '
                f"{self.init!r}."
            )

    def on_start(self, run: RunContext) -> None:
        """Begin a run there, or go on with it; never with that of an earlier run of the process."""
        wandb: Any = import_extra("wandb", "wandb", "WandbLogger")
        if not run.env_steps:
            self._id = ""
        again = {"id": self._id, "resume": "allow"} if self._id else {}
        self._to = wandb.init(
            project=self.project,
            name=self.name or run.run_dir.name,
            config=dict(run.config),
            **{"dir": str(run.run_dir), **again, **self.init},
        )
        self._id = str(self._to.id)

    def _send(self, run: RunContext, values: Mapping[str, float], step: int) -> None:
        self._to.log({**values, "env_steps": step})

    def _finish(self, stopped: str, *, failed: bool) -> None:
        self._to.summary["stopped"] = stopped
        self._to.finish(exit_code=1 if failed else 0)

    def state_dict(self) -> dict[str, Any]:
        """The run's id there."""
        return {"id": self._id}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with that run."""
        self._id = str(state["id"])


@dataclass(kw_only=True)
class MLflowLogger(_Logger):
    """Logs to MLflow (extra `mlflow`), at `tracking_uri` or where MLFLOW_TRACKING_URI says."""

    experiment: str = "pearl"
    name: str | None = None
    tracking_uri: str | None = None
    _run_id: str = field(default="", init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_text("MLflowLogger.experiment", self.experiment, "the name of an experiment")
        if self.tracking_uri is not None:
            check_text("MLflowLogger.tracking_uri", self.tracking_uri, "an address")

    def on_start(self, run: RunContext) -> None:
        """Begin a run there, or go on with it; never with that of an earlier run of the process."""
        mlflow: Any = import_extra("mlflow", "mlflow", "MLflowLogger")
        if not run.env_steps:
            self._run_id = ""
        self._to = mlflow.MlflowClient(tracking_uri=self.tracking_uri)
        if self._run_id:
            self._to.update_run(self._run_id, status="RUNNING")
            return
        found = self._to.get_experiment_by_name(self.experiment)
        number = self._to.create_experiment(self.experiment) if found is None else found.experiment_id
        self._run_id = self._to.create_run(number, run_name=self.name or run.run_dir.name).info.run_id
        with self._failing():
            for name, value in run.config.items():
                self._to.log_param(self._run_id, name, str(value)[:500])

    def _send(self, run: RunContext, values: Mapping[str, float], step: int) -> None:
        mlflow: Any = import_extra("mlflow", "mlflow", "MLflowLogger")
        now = int(time.time() * 1000)
        metrics = [mlflow.entities.Metric(name, value, now, step) for name, value in values.items()]
        self._to.log_batch(self._run_id, metrics=metrics)

    def _finish(self, stopped: str, *, failed: bool) -> None:
        self._to.set_terminated(self._run_id, "FAILED" if failed else "FINISHED")
        self._to.set_tag(self._run_id, "stopped", stopped)

    def state_dict(self) -> dict[str, Any]:
        """The run's id there."""
        return {"run_id": self._run_id}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with that run."""
        self._run_id = str(state["run_id"])
