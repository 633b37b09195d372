"""Which devices can hold the Data Storage of a generated program; Algorithm 1's Step 2 chooses among them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pearl.backends import backend_of
from pearl.devices.description import Device
from pearl.spec import ReplaySpec

STAYS = "storage=, share_next_obs= and share_frames= of the replay need the host"
_BYTES_PER_GB = 1e9


def storage_stays_on_host(replay: ReplaySpec) -> bool:
    """Whether the replay's settings require the Data Storage in the host's memory or on its disk."""
    return replay.storage != "ram" or replay.shares


@dataclass(frozen=True)
class StorageRule:
    """Which of `devices` can hold the Data Storage of `replay`, with transitions of `transition_bytes`.

    The host always can. An accelerator holds it in its own memory, or in the host's if it reads that, for its own
    Learner only, with whole rows.
    """

    devices: Mapping[str, Device]
    host: str
    replay: ReplaySpec
    transition_bytes: int

    def refusal(self, name: str, learner: str) -> str | None:
        """Why the device `name` cannot hold it while the Learner is on `learner`; None if it can."""
        device = self.devices[name]
        backend = backend_of(device)
        if name == self.host:
            return None
        if not backend.keeps_storage(device, with_learner=name == learner):
            return "it has no Data Storage" if name == learner else "it keeps one for no Learner but its own"
        if backend.storage(device) is None:
            return None  # the device uses the host's memory, or is not here
        if storage_stays_on_host(self.replay):
            return STAYS
        needed = self.replay.capacity * self.transition_bytes
        lacks = device.memory_gb is not None and needed > device.memory_gb * _BYTES_PER_GB
        if lacks and not backend.reads_host_memory(device):
            return f"it has {device.memory_gb:g} GB of memory, {needed / _BYTES_PER_GB:.1f} are needed"
        return None
