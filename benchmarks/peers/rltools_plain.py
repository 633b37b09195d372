"""rltools' SAC and TD3 as in `rltools_training`, compiled without a BLAS: its matrix products are loops of its own."""

from __future__ import annotations

from functools import partial

from benchmarks.peers.rltools_training import make
from benchmarks.peers.training import serve_measure

if __name__ == "__main__":
    serve_measure(partial(make, mkl=False))
