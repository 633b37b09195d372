"""FPGAs, of whatever vendor, and Intel's FPGA emulator: autorun kernels, by SYCL. Their times are modelled."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pearl.backends.protocol import LearnerImplementation, NoProgram, ReplayImplementation
from pearl.backends.sycl import SyclDevices
from pearl.backends.sycl.selector import EMULATOR_SELECTOR
from pearl.devices.description import Device
from pearl.errors import CapacityError, ConfigurationError

if TYPE_CHECKING:
    from pearl.spec import ReplaySpec

ESTIMATOR = "fpga"  # the composer's model of pipelines


class FpgaBackend(SyclDevices):
    """Pipelines: they run on the emulator, and are modelled for the board that its row states.

    What the device CSV says of an FPGA is what is modelled, and makes its fingerprint. The sycl backend, whose runtime
    lists FPGAs, discovers them.
    """

    name = "fpga"
    kinds = ("fpga",)

    def __init__(self) -> None:
        self.learners = {
            "fpga": LearnerImplementation(
                "pearl.backends.fpga.learner", "FpgaLearner", ("device", "sub_batches"), compiled="pearl._sycl"
            )
        }
        self.replay_managers = {
            "fpga": ReplayImplementation("pearl.backends.fpga.replay", "FpgaReplayManager", ("device",))
        }

    def emulated(self, device: Device) -> bool:
        """The emulator has a selector of its own."""
        return self.device_string(device) == EMULATOR_SELECTOR

    def estimator(self, device: Device) -> str:
        """The model, of the emulator too."""
        return ESTIMATOR

    def no_program(self, device: Device) -> NoProgram | None:
        """A board takes programs that were compiled ahead of time."""
        if self.emulated(device):
            return None
        return NoProgram("an FPGA board: this version runs programs on the FPGA emulator alone", "FPGA boards")

    def note(self, device: Device) -> str:
        """That the prediction is another device's."""
        return f"{device.name} is the FPGA emulator: the prediction is for the board that its row states."

    def replay_lacks(self, device: Device, spec: ReplaySpec) -> str | None:
        """The options that no design supports, or why the tree does not fit."""
        from pearl.backends.fpga.replay import check_design, check_tree

        try:
            check_design(spec)
            check_tree(spec.capacity, int(spec.fanout))
        except (CapacityError, ConfigurationError) as error:
            return str(error)
        return None


BACKEND = FpgaBackend()
