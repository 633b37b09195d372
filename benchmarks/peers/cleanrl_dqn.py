"""DQN as a single script, with the hyperparameters that CleanRL publishes for CartPole-v1, until it is solved."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import torch
from torch import nn
from torch.nn import functional

from benchmarks.peers.solving import Examiner, parse

STEPS = 500_000
LEARNING_RATE = 2.5e-4
SLOTS = 10_000
BATCH = 128
GAMMA = 0.99
LEARNING_STARTS = 10_000
TRAIN_INTERVAL = 10
TARGET_INTERVAL = 500
EPSILON, FINAL_EPSILON, EXPLORATION_STEPS = 1.0, 0.05, 250_000
HIDDEN = (120, 84)


def main() -> None:
    options = parse(__doc__)
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    rng = np.random.default_rng(options.seed)
    examiner = Examiner(options.environment, options.goal, options.seed, options.interval)
    env = gym.make(options.environment)
    size, actions = env.observation_space.shape[0], int(env.action_space.n)

    def network() -> nn.Sequential:
        first, second = HIDDEN
        return nn.Sequential(
            nn.Linear(size, first), nn.ReLU(), nn.Linear(first, second), nn.ReLU(), nn.Linear(second, actions)
        )

    q, target_q = network(), network()
    target_q.load_state_dict(q.state_dict())
    optimizer = torch.optim.Adam(q.parameters(), lr=LEARNING_RATE)

    observations, next_observations = np.zeros((2, SLOTS, size), np.float32)
    taken, rewards, ends = np.zeros(SLOTS, np.int64), np.zeros(SLOTS, np.float32), np.zeros(SLOTS, np.float32)

    def act(obs: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return q(torch.from_numpy(np.atleast_2d(obs))).argmax(dim=1).numpy()

    obs, _ = env.reset(seed=options.seed)
    for step in range(STEPS):
        epsilon = max(FINAL_EPSILON, EPSILON + (FINAL_EPSILON - EPSILON) * step / EXPLORATION_STEPS)
        action = int(rng.integers(actions)) if rng.random() < epsilon else int(act(obs)[0])
        following, reward, terminated, truncated, _ = env.step(action)
        slot = step % SLOTS
        observations[slot], next_observations[slot] = obs, following
        taken[slot], rewards[slot], ends[slot] = action, reward, terminated
        obs = env.reset()[0] if terminated or truncated else following
        if step > LEARNING_STARTS and step % TRAIN_INTERVAL == 0:
            drawn = rng.integers(min(step + 1, SLOTS), size=BATCH)
            with torch.no_grad():
                best = target_q(torch.from_numpy(next_observations[drawn])).amax(dim=1)
                goal = torch.from_numpy(rewards[drawn]) + GAMMA * best * (1 - torch.from_numpy(ends[drawn]))
            values = q(torch.from_numpy(observations[drawn])).gather(1, torch.from_numpy(taken[drawn])[:, None])
            loss = functional.mse_loss(values[:, 0], goal)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if step > LEARNING_STARTS and step % TARGET_INTERVAL == 0:
            target_q.load_state_dict(q.state_dict())
        if (step + 1) % options.interval == 0 and examiner.passes(act):
            return


if __name__ == "__main__":
    main()
