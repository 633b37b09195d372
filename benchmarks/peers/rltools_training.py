"""rltools' SAC and TD3 with MKL's matrix products, in its own loop over its own Pendulum in C++.

Its Python package trains only within a step of the whole loop: one step of the environment with the policy, its
insertion into the replay, then uniform sampling and training. Here the loop is compiled to train in every other step.
The steps between them only act: their time, taken off that of the others, leaves the training. Its package has no DDPG.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.peers.training import Case, Measure, serve_measure

PENDULUM = {"path": str(Path(__file__).parent / "rltools_pendulum"), "action_dim": 1, "observation_dim": 3}
EVERY = {
    "sac": {"CRITIC_TRAINING_INTERVAL": 2, "ACTOR_TRAINING_INTERVAL": 2, "CRITIC_TARGET_UPDATE_INTERVAL": 2},
    "td3": {
        "CRITIC_TRAINING_INTERVAL": 2,
        "ACTOR_TRAINING_INTERVAL": 4,
        "CRITIC_TARGET_UPDATE_INTERVAL": 4,
        "ACTOR_TARGET_UPDATE_INTERVAL": 4,
    },
}
CYCLE = 4  # steps after which the loop repeats itself; the even ones train
TD3_WARMUP = 200  # its TD3 trains from step 100 on, whatever its settings: filling the replay would take minutes


def make(case: Case, *, mkl: bool = True) -> tuple[str, Measure]:
    """A compiled loop whose replay is full (TD3's is almost empty, which makes it no slower)."""
    if case.algorithm not in EVERY or case.environment != "Pendulum-v1":
        raise NotImplementedError("only its SAC and TD3 on its Pendulum are compared")
    from benchmarks.peers.rltools_build import compile_loop, version

    (width,) = set(case.hidden)
    layers = len(case.hidden) + 1
    warmup = case.slots if case.algorithm == "sac" else TD3_WARMUP
    loop, compile_s = compile_loop(
        case.algorithm,
        PENDULUM,
        mkl=mkl,
        ACTOR_BATCH_SIZE=case.batch,
        CRITIC_BATCH_SIZE=case.batch,
        ACTOR_HIDDEN_DIM=width,
        ACTOR_NUM_LAYERS=layers,
        CRITIC_HIDDEN_DIM=width,
        CRITIC_NUM_LAYERS=layers,
        N_WARMUP_STEPS=max(warmup, case.batch),
        REPLAY_BUFFER_CAP=case.slots,
        STEP_LIMIT=2**40,
        **EVERY[case.algorithm],
    )
    state = loop.State(1)
    for _ in range(-(-max(warmup, case.batch) // CYCLE) * CYCLE):
        state.step()

    def measure(seconds: float) -> dict[str, float]:
        whole: list[int] = []
        acting: list[int] = []
        end = time.perf_counter() + seconds
        while not whole or time.perf_counter() < end:
            for number in range(CYCLE):
                start = time.perf_counter_ns()
                state.step()
                (acting if number % 2 else whole).append(time.perf_counter_ns() - start)
        whole_us, acting_us = _mean_us(whole), _mean_us(acting)
        return {
            "eps": case.batch * 1e6 / (whole_us - acting_us),
            "whole_us": whole_us,
            "acting_us": acting_us,
            "compile_s": compile_s,
        }

    return f"{version()}, {'MKL' if mkl else 'without a BLAS'}", measure


def _mean_us(times_ns: Sequence[int]) -> float:
    return sum(times_ns) / len(times_ns) / 1e3


if __name__ == "__main__":
    serve_measure(make)
