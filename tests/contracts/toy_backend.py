"""A backend that PEARL does not have, whole: its answers, a slow Replay Manager, a Data Storage, a Learner.

Register it with one line: `pearl.backends.TABLE["toy"] = "toy_backend"`. Programs that use it import this module.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
import torch

from pearl.algorithms.trainer import Trainer, batch_type_of
from pearl.backends.protocol import Backend, Factory, LearnerImplementation
from pearl.devices import Device
from pearl.devices.description import DeviceKind
from pearl.errors import ConfigurationError, DeviceError
from pearl.learner.protocol import StepResult
from pearl.learner.trainer_learner import TrainerLearner
from pearl.replay.memory import check_fits
from pearl.replay.protocol import Sample
from pearl.replay.reference import ReferenceReplayManager
from pearl.replay.storage import StorageOnDevice, matching_rows
from pearl.spec import ReplaySpec, TransitionSpec

LAUNCH_S = 1e-4  # what every request to the device takes


class ToyReplayManager(ReferenceReplayManager):
    """The reference, on a device that answers slowly."""

    def sample(self, batch_size: int, beta: float = 0.4, out: Sample | None = None) -> Sample:
        """Wait for the device, and draw."""
        time.sleep(LAUNCH_S)
        return super().sample(batch_size, beta, out)


def make_toy_replay(spec: ReplaySpec, *, seed: int, selector: str) -> ToyReplayManager:
    """The Replay Manager of the whole `spec`; DeviceError on a device that is broken."""
    if selector == "broken":
        raise DeviceError("the toy is broken")
    fanout = 16 if spec.fanout == "auto" else spec.fanout
    names = ("mode", "stratified", "replacement", "max_times_sampled", "initial_priority", "priority_epsilon")
    options = {name: getattr(spec, name) for name in names}
    return ToyReplayManager(spec.capacity, fanout=fanout, alpha=spec.first_alpha, seed=seed, **options)


class ToyStorage(StorageOnDevice):
    """Columns in the device's memory."""

    def __init__(self, spec: TransitionSpec, capacity: int, device: str) -> None:
        super().__init__(spec, capacity)
        self.device = device
        check_fits(capacity, spec.nbytes)
        self._columns = spec.empty(capacity)

    @property
    def columns(self) -> Mapping[str, np.ndarray]:
        """Copies, for checkpoints."""
        return MappingProxyType({name: column.copy() for name, column in self._columns.items()})

    def gather(self, indices: np.ndarray, out: Mapping[str, np.ndarray] | None = None) -> Mapping[str, np.ndarray]:
        """The rows at `indices`, in `out` if given."""
        self._require_open()
        slots = self._checked_slots(indices)
        time.sleep(LAUNCH_S)
        found = self.spec.empty(len(slots)) if out is None else out
        targets = matching_rows(self.spec, found, len(slots), exact=True)
        for target, column in zip(targets, self._columns.values(), strict=True):
            target[:] = column[slots]
        return found

    def _rows(self, columns: Mapping[str, np.ndarray], count: int) -> list[np.ndarray]:
        return matching_rows(self.spec, columns, count)

    def _write(self, start: int, count: int, rows: list[np.ndarray]) -> None:
        slots = (start + np.arange(count)) % self.capacity
        for column, source in zip(self._columns.values(), rows, strict=True):
            column[slots] = source

    def _free(self) -> None:
        """Nothing to free."""


class ToyLearner(TrainerLearner[Trainer]):
    """Trains whole batches with the trainer's own step."""

    backend = "toy"

    def __init__(self, trainer: Trainer, *, device: str) -> None:
        super().__init__(trainer)
        self.device = device

    def step(self, batch: Mapping[str, np.ndarray], weights: np.ndarray) -> StepResult:
        """One step."""
        kind = batch_type_of(self.trainer)
        columns = kind(*(torch.from_numpy(batch[name]) for name in kind._fields))
        priorities = self.trainer.update_policy(columns, torch.from_numpy(weights)).detach().numpy()
        td_error = float(priorities.mean())
        return StepResult(priorities, td_error, {"td_error": td_error})


class ToyBackend(Backend):
    """Drives toys: devices of kind gpu whose selector is empty, or "broken"."""

    name = csv_name = "toy"
    kinds = ("gpu",)
    kernels = __name__
    factory_names = ("make_toy_replay", "ToyStorage")

    def __init__(self) -> None:
        self.learners = {"toy": LearnerImplementation(__name__, "ToyLearner", ("device",))}

    def check_selector(self, kind: DeviceKind, selector: str) -> None:
        """Empty, or broken."""
        if selector not in ("", "broken"):
            raise ConfigurationError(f"A toy's selector is empty or 'broken'; found {selector!r}.")

    def device_string(self, device: Device) -> str:
        """All toys are alike."""
        return "toy"

    def replay(self, device: Device) -> Factory:
        """A slow one."""
        return Factory(__name__, "make_toy_replay", {"selector": device.selector})

    def storage(self, device: Device) -> Factory:
        """One of its own."""
        return Factory(__name__, "ToyStorage")


BACKEND = ToyBackend()
