"""rltools' SAC or TD3 with MKL and its own settings on its own Pendulum in C++, until Pendulum-v1 is solved.

Evaluations step Gymnasium's Pendulum-v1. Prints how long the compilation of the loop took.
"""

from __future__ import annotations

import numpy as np

from benchmarks.peers.rltools_build import compile_loop
from benchmarks.peers.rltools_training import PENDULUM
from benchmarks.peers.solving import COMPILED, Examiner, parse

STEPS = 20_000  # at most
TORQUE = 2.0  # of an action of 1


def main() -> None:
    options = parse(__doc__, algorithm=("sac", "td3"))
    if options.environment != "Pendulum-v1":
        raise SystemExit(f"only Pendulum-v1 is compiled here, not {options.environment}")
    loop, compile_s = compile_loop(
        options.algorithm, PENDULUM, mkl=True, EPISODE_STEP_LIMIT=200, REPLAY_BUFFER_CAP=STEPS, STEP_LIMIT=2**40
    )
    print(f"{COMPILED} {compile_s:.3f} s", flush=True)
    examiner = Examiner(options.environment, options.goal, options.seed, options.interval)
    state = loop.State(options.seed)

    def act(obs: np.ndarray) -> np.ndarray:
        return TORQUE * np.stack([state.action(one) for one in obs]).reshape(len(obs), 1)

    for _ in range(STEPS // options.interval):
        for _ in range(options.interval):
            state.step()
        if examiner.passes(act):
            return


if __name__ == "__main__":
    main()
