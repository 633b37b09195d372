"""Selectors of SYCL devices, FPGAs and their emulator included: what the device CSV may say, and dpctl's own form."""

from __future__ import annotations

import re

from pearl.devices.description import DeviceKind
from pearl.errors import ConfigurationError

# dpctl's filter strings, and what one would write without knowing them.
_SYCL_SELECTOR = re.compile(r"(?:(opencl|level_zero|sycl):)?(cpu|gpu|accelerator|fpga)(?::([0-9]{1,3}))?")
_SYCL_TYPES: dict[str, tuple[DeviceKind, str]] = {  # -> kind, and the backend and type of dpctl's filter
    "cpu": ("cpu", "opencl:cpu"),
    "gpu": ("gpu", "level_zero:gpu"),
    "accelerator": ("fpga", "opencl:accelerator"),
    "fpga": ("fpga", "opencl:accelerator"),
}
EMULATOR_SELECTOR = "fpga_emu"


def sycl_filter(selector: str, kind: DeviceKind | None = None) -> str:
    """The filter string of dpctl that `selector` means, or `fpga_emu`, the FPGA emulator wherever it is listed.

    `opencl:cpu:0`, `level_zero:gpu:1` and `opencl:accelerator:0` are themselves; `cpu`, `sycl:cpu` and `sycl:cpu:0` are
    the first, and so for gpu and fpga; nothing is the first device of `kind`. ConfigurationError otherwise, and for a
    device of another kind.
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
