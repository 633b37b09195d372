"""FPGAs of any vendor, and Intel's FPGA emulator: autorun kernels, by SYCL. Their times are modelled."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pearl.backends.protocol import Factory, LearnerImplementation, NoProgram, ReplayImplementation
from pearl.backends.sycl import SyclDevices
from pearl.backends.sycl.selector import EMULATOR_SELECTOR
from pearl.devices.description import Device
from pearl.errors import CapacityError, ConfigurationError

if TYPE_CHECKING:
    from pearl.spec import ReplaySpec

ESTIMATOR = "fpga"  # the composer's model of pipelines


class FpgaBackend(SyclDevices):
    """Pipelines: they run on the emulator, and are modelled for the board that the device's row describes.

    The row also makes the device's fingerprint. The sycl backend discovers FPGAs, since its runtime lists them.
    """

    name = "fpga"
    kinds = ("fpga",)
    factory_names = (*SyclDevices.factory_names, "FpgaGae")

    def __init__(self) -> None:
        self.learners = {
            "fpga": LearnerImplementation(
                "pearl.backends.fpga.learner",
                "FpgaLearner",
                ("device", "sub_batches", "unroll"),
                compiled="pearl._sycl",
                own_memory=True,
            )
        }
        self.replay_managers = {
            "fpga": ReplayImplementation("pearl.backends.fpga.replay", "FpgaReplayManager", ("device",))
        }

    def emulated(self, device: Device) -> bool:
        """Whether the selector is the emulator's."""
        return self.device_string(device) == EMULATOR_SELECTOR

    def estimator(self, device: Device) -> str:
        """The model of pipelines, also for the emulator."""
        return ESTIMATOR

    def no_program(self, device: Device) -> NoProgram | None:
        """Boards need programs that are compiled ahead of time, which this version cannot make."""
        if self.emulated(device):
            return None
        return NoProgram("an FPGA board: this version runs programs on the FPGA emulator alone", "FPGA boards")

    def note(self, device: Device) -> str:
        """Predictions are for the board, not for the emulator."""
        return f"{device.name} is the FPGA emulator: the prediction is for the board that its row states."

    def replay_lacks(self, device: Device, spec: ReplaySpec) -> str | None:
        """The options that no design supports, or why the tree does not fit."""
        from pearl.backends.fpga.replay import check_design, check_tree

        try:
            check_design(spec)
            check_tree(spec.capacity, 256 if spec.fanout == "auto" else spec.fanout)  # the largest has fewest levels
        except (CapacityError, ConfigurationError) as error:
            return str(error)
        return None

    def advantages(self, device: Device) -> Factory:
        """HEPPO-GAE's pipeline."""
        return Factory("pearl.backends.fpga.gae", "FpgaGae", {"device": self.device_string(device)})


BACKEND = FpgaBackend()
