"""All exceptions of PEARL. Every message says what was expected, what was found, where, and what to do."""

from __future__ import annotations


class PearlError(Exception):
    """Base of everything PEARL raises on purpose."""


class ConfigurationError(PearlError, ValueError):
    """The user's request cannot be carried out as written."""


class DeviceFileError(ConfigurationError):
    """A device or connection CSV is missing, unreadable, or has a wrong cell (file, row and column are named)."""


class FolderHeldError(ConfigurationError):
    """Another run is writing to the folder."""


class EnvError(ConfigurationError):
    """An environment is unknown, cannot be made, or has spaces that the trainer cannot handle."""


class TrainerError(ConfigurationError):
    """A trainer class lacks a required member, or disagrees with the environment."""


class MissingExtraError(ConfigurationError):
    """An optional dependency is not installed; the message has the command that installs it."""


class VendorReportError(ConfigurationError):
    """A vendor's FPGA report is missing, truncated, of another version, or on another design."""


class PlacementError(ConfigurationError):
    """No device, or no pair of devices, can take the primitives."""


class CapacityError(ConfigurationError):
    """Something does not fit into the free memory."""


class DeviceError(PearlError):
    """A device failed or is gone, a kernel does not compile or cannot run there, or device memory is short."""


class ReplayError(PearlError):
    """A Replay Manager or Data Storage was asked for something it cannot do (empty, closed, out of range)."""


class PriorityError(ReplayError, ValueError):
    """Priorities that are NaN or negative; the message names the positions."""


class QueueError(PearlError):
    """Base of all errors of queues."""


class QueueClosedError(QueueError):
    """The other side closed the queue."""


class QueueTimeoutError(QueueError, TimeoutError):
    """Nothing arrived, or no slot became free, within the timeout."""


class ActorError(PearlError):
    """An actor failed too often; the message contains the environment's traceback."""


class PolicyServerError(ActorError):
    """The policy server, which infers for all actors, died, failed or hung; the message contains its error."""


class ClusterError(ActorError):
    """The connection to the Ray cluster on which Actors or Learners run cannot be made, or is lost."""


class LearnerError(PearlError):
    """Learners' processes failed too often; the message contains the error of the last."""


class CheckpointError(PearlError):
    """A checkpoint is missing, truncated, corrupt, of another version, or of another program."""


class CheckpointWriteError(CheckpointError):
    """A checkpoint could not be written; a later attempt may succeed (a full disk, a lock of another process)."""


class CheckpointReadError(CheckpointError):
    """A file of a checkpoint could not be read now; that does not say that it is damaged."""


class CallbackError(PearlError):
    """A callback of the user raised; the message names it, and the error."""


class PolicyError(PearlError, ValueError):
    """A saved policy is missing, damaged, of another version, or cannot do what is asked."""


class GenerationError(PearlError):
    """The runtime program could not be written."""
