"""Selectors of SYCL devices, including FPGAs and their emulator, and the filter strings of dpctl that they mean."""

from __future__ import annotations

import re

from pearl.devices.description import DeviceKind
from pearl.errors import ConfigurationError

# dpctl's filter strings, and the obvious short forms.
_SYCL_SELECTOR = re.compile(r"(?:(opencl|level_zero|sycl):)?(cpu|gpu|accelerator|fpga)(?::([0-9]{1,3}))?")
_SYCL_TYPES: dict[str, tuple[DeviceKind, str]] = {  # -> kind, and the backend and type of dpctl's filter
    "cpu": ("cpu", "opencl:cpu"),
    "gpu": ("gpu", "level_zero:gpu"),
    "accelerator": ("fpga", "opencl:accelerator"),
    "fpga": ("fpga", "opencl:accelerator"),
}
EMULATOR_SELECTOR = "fpga_emu"


def sycl_filter(selector: str, kind: DeviceKind | None = None) -> str:
    """The filter string of dpctl that `selector` means, or `fpga_emu` for the FPGA emulator.

    `opencl:cpu:0`, `level_zero:gpu:1` and `opencl:accelerator:0` are filter strings already. `cpu`, `sycl:cpu` and
    `sycl:cpu:0` mean the first CPU device, likewise for gpu and fpga. An empty selector means the first device of
    `kind`. Raises ConfigurationError for any other text, and for a device of another kind.
    """
    if selector in (EMULATOR_SELECTOR, f"sycl:{EMULATOR_SELECTOR}") and kind in (None, "fpga"):
        return EMULATOR_SELECTOR
    match = _SYCL_SELECTOR.fullmatch(selector or kind or "")
    if match:
        of_kind, target = _SYCL_TYPES[match[2]]
        if kind in (None, of_kind):
            backend = target.partition(":")[0] if match[1] in (None, "sycl") else match[1]
            return f"{backend}:{target.partition(':')[2]}:{int(match[3] or 0)}"
    of = f" of kind {kind}" if kind else ""
    raise ConfigurationError(
        f"A sycl selector{of} must be one of dpctl's filter strings, such as 'opencl:cpu:0', 'level_zero:gpu:0' or "
        f"'opencl:accelerator:0', or '{EMULATOR_SELECTOR}'; found {selector!r}."
    )
