"""Generalized advantage estimation on an FPGA: autorun kernels joined by pipes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pearl.backends.fpga.replay import TIMEOUT_S, check_fpga, stop_at_exit
from pearl.backends.on_device.gae import GaeOnDevice
from pearl.backends.sycl.replay import open_sycl
from pearl.backends.sycl.selector import EMULATOR_SELECTOR

if TYPE_CHECKING:
    from pearl import _sycl


LOOKAHEAD, ROWS = 2, 2  # of the array that programs instantiate


class FpgaGae(GaeOnDevice):
    """AdvantageEstimator as HEPPO-GAE's pipeline (Sec. III): `rows` processing elements with k-step `lookahead`.

    Each element takes every `rows`-th environment. With `lookahead` 1 results have the bits of `NumpyGae`. With 2 or 3
    (Eq. 10, 11), which let an element work in every cycle, sums have another order, and results other last bits.

    The kernels are generated, compiled (seconds; kept on disk), launched once, and run until `close` or the end of the
    interpreter. Raises ConfigurationError unless `gamma` and `gae_lambda` lie in [0, 1], `lookahead` in [1, 3] and
    `rows` in [1, 8]; DeviceError if the device cannot be used or the pipeline does not answer within `timeout_s`
    seconds (plus 1 ms for each transition), and at all later calls.
    """

    backend = "fpga"
    _kernel: _sycl.FpgaGae

    def __init__(
        self,
        gamma: float,
        gae_lambda: float,
        device: str = EMULATOR_SELECTOR,
        *,
        lookahead: int = LOOKAHEAD,
        rows: int = ROWS,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        check_fpga(device, "advantage estimation", timeout_s)
        self.lookahead = lookahead
        opened = open_sycl(device)
        kernel = opened.module.FpgaGae(opened.queue, gamma, gae_lambda, lookahead, rows, timeout_s)
        super().__init__(kernel)
        self._stop = stop_at_exit(self, self._kernel)

    @property
    def kernel(self) -> _sycl.FpgaGae:
        """The pipeline itself."""
        return self._kernel

    def close(self) -> None:
        """Stop the elements. May be repeated."""
        self._kernel.close()
