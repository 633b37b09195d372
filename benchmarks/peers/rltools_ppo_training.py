"""rltools' PPO with MKL's matrix products, in its own loop over its own Pendulum in C++.

A step of the loop is a rollout and the epochs on it. Two processes, one of them with one epoch, tell what minibatches
take: collecting and GAE are in both.
"""

from __future__ import annotations

from benchmarks.peers.rltools_ppo import loop_of
from benchmarks.peers.rltools_training import PENDULUM
from benchmarks.peers.training import Case, Train, serve


def make(case: Case) -> tuple[str, Train]:
    """A compiled loop."""
    if case.algorithm != "ppo" or case.environment != "Pendulum-v1":
        raise NotImplementedError("only its PPO on its Pendulum is compared")
    return loop_of(case, PENDULUM)


if __name__ == "__main__":
    serve(make)
