"""Modelled devices: hardware of another machine, whose times are computed by equations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pearl.backends import fpga
from pearl.backends.protocol import Backend, NoProgram
from pearl.devices.description import Device, DeviceKind
from pearl.errors import ConfigurationError

if TYPE_CHECKING:
    from pearl.spec import ReplaySpec

ESTIMATOR = "roofline"  # of CPUs and GPUs


class ModelBackend(Backend):
    """A device of another machine, described by its row and by the parameters in its selector."""

    name = csv_name = "model"
    kinds = ("cpu", "gpu", "fpga")
    is_here = False

    def check_selector(self, kind: DeviceKind, selector: str) -> None:
        """Parameters that replace the kind's defaults."""
        from pearl.backends.model.device import model_parameters

        model_parameters(kind, selector)

    def estimator(self, device: Device) -> str:
        """The model of pipelines for FPGAs, the roofline for CPUs and GPUs."""
        return fpga.ESTIMATOR if device.kind == "fpga" else ESTIMATOR

    def estimator_parameters(self, device: Device) -> str:
        """The selector is the list of parameters."""
        return device.selector

    def messages_us(self, device: Device) -> float:
        """A parameter of the processor."""
        from pearl.backends.model.device import ProcessorParameters, model_parameters

        parameters = model_parameters(device.kind, device.selector)
        return parameters.messages_us if isinstance(parameters, ProcessorParameters) else 0.0

    def no_program(self, device: Device) -> NoProgram:
        """Programs cannot run on another machine's hardware."""
        return NoProgram("a device that is not here: its times are modelled", "modelled devices")

    def replay_lacks(self, device: Device, spec: ReplaySpec) -> str | None:
        """For FPGAs, the options that no design supports."""
        if device.kind != "fpga":
            return None
        from pearl.backends.fpga.replay import check_design

        try:
            check_design(spec)
        except ConfigurationError as error:
            return str(error)
        return None

    def keeps_storage(self, device: Device, *, with_learner: bool) -> bool:
        """Algorithm 1 may put the Data Storage here."""
        return True


BACKEND = ModelBackend()
