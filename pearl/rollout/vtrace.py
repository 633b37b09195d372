"""V-trace (Espeholt et al. 2018): advantages for the present policy, from data of an older one.

    rho_t = min(1, pi(a_t | s_t) / mu(a_t | s_t))          c_t = lambda rho_t
    delta_t = rho_t (r_t + gamma V(s_{t+1}) - V(s_t))
    v_t = V(s_t) + delta_t + gamma c_t (v_{t+1} - V(s_{t+1}))                                              (Remark 1)
    advantage_t = rho_t (r_t + gamma v_{t+1} - V(s_t))                                                     (Sec. 4.2)

pi is the present policy, mu the one that acted. With lambda 1 and equal policies, v_t is the return of the episode as
far as the rollout goes. An episode that ends has no v_{t+1} and no V(s_{t+1}).
"""

from __future__ import annotations

import numpy as np


def vtrace(
    rewards: np.ndarray,
    values: np.ndarray,
    last_values: np.ndarray,
    ends: np.ndarray,
    log_ratios: np.ndarray,
    gamma: float,
    gae_lambda: float,
) -> None:
    """Overwrite `rewards` by advantages and `values`, the present policy's, by v; `(horizon, envs)` float32 each.

    `log_ratios` `(horizon, envs)` are log pi - log mu of the actions; the other arguments are those of GAE.
    """
    rho = np.exp(np.minimum(log_ratios, 0.0)).astype(np.float32)
    next_value = next_target = last_values.astype(np.float32)
    for t in range(len(rewards) - 1, -1, -1):
        goes_on = (ends[t] == 0).astype(np.float32)
        value, reward = values[t].copy(), rewards[t].copy()
        delta = rho[t] * (reward + np.float32(gamma) * goes_on * next_value - value)
        trace = np.float32(gamma * gae_lambda) * goes_on * rho[t] * (next_target - next_value)
        rewards[t] = rho[t] * (reward + np.float32(gamma) * goes_on * next_target - value)
        values[t] = next_target = value + delta + trace
        next_value = value
