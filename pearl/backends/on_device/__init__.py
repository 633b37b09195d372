"""Primitives on the queue of a parallel device, in its memory; SYCL and CUDA share them.

Their kernels are in kernels/include/pearl/device/.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any

    from pearl import _device


class OpenDevice(NamedTuple):
    """A device's queue, and the module of compiled host code that it belongs to (such as `pearl._sycl`)."""

    queue: _device.DeviceQueue
    module: ModuleType | Any
