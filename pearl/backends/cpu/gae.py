"""Generalized advantage estimation on the CPU, in C++."""

from __future__ import annotations

from pearl import _native


class NativeGae(_native.Gae):
    """AdvantageEstimator on one thread, in AVX-512, AVX2 or plain C++, whichever the machine has.

    Results have the bits of `NumpyGae`. Raises ConfigurationError unless `gamma` and `gae_lambda` lie in [0, 1]. The
    methods are C++'s own; they release the GIL for rollouts of 65,536 transitions or more.
    """

    backend = "native"
