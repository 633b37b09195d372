"""The column "Data Storage": gathering a batch, and storing the transitions that arrived, in a full storage."""

from __future__ import annotations

import itertools

import numpy as np

from composer.matrix import MissingCell, StorageCell
from composer.profiling.context import ProfilingContext
from composer.profiling.measuring import measure, on_own_thread
from composer.storage_rule import STAYS
from pearl.backends import backend_of
from pearl.devices.description import Device

_BATCHES = 64  # different ones, so that rows come from memory as in a run
# The parameters of a replay that its storage depends on.
_SETTINGS = ("capacity", "storage", "share_next_obs", "share_frames", "n_step")


def storage_cell(context: ProfilingContext, device: Device) -> StorageCell | MissingCell:
    """The cell of the Data Storage that a program keeps on the device, in its own memory or in the host's."""
    made = backend_of(device).storage(device)
    if made is None and not backend_of(device).keeps_storage(device, with_learner=True):
        return MissingCell("it has no Data Storage")
    if made is not None and not context.own_storage(device):
        return MissingCell(STAYS)
    context.begin(f"{device.name}: Data Storage")
    everything = context.replay_parameters(context.fanouts()[0])
    parameters = {name: everything[name] for name in _SETTINGS}
    key = context.key("storage", device, parameters)
    found = context.known(key, ("gather", "store"), lambda: measure_storage(context, device), device)
    return StorageCell(found["gather"], found["store"])


@on_own_thread
def measure_storage(context: ProfilingContext, device: Device) -> dict[str, list[float]]:
    """Samples, in microseconds, of "gather" and "store"."""
    storage, own = context.storage_on(device)
    rng, batch = np.random.default_rng(0), context.problem.train.batch_size
    indices = itertools.cycle(rng.integers(storage.capacity, size=(_BATCHES, batch)))
    out = None if own else context.problem.transition.empty(batch)  # a device's own returns new columns
    arriving, count = context.arriving(rng), context.problem.insertions
    return {
        "gather": measure(lambda: storage.gather(next(indices), out), context.budget_s / 4),
        "store": measure(lambda: storage.insert(next(arriving), count), context.budget_s / 4),
    }
