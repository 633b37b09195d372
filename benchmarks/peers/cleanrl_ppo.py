"""PPO as a single script in the manner of CleanRL: torch, a vector of Gymnasium, a Python loop for GAE."""

from __future__ import annotations

from benchmarks.peers.training import Case, Train, serve


def make(case: Case) -> tuple[str, Train]:
    """Rollouts of Gymnasium's vector of environments, trained on with the published defaults."""
    import gymnasium as gym
    import numpy as np
    import torch
    from torch import nn
    from torch.distributions import Categorical, Normal

    torch.set_num_threads(case.threads)
    torch.manual_seed(1)
    mode = "vector_entry_point" if case.vector else "sync"
    envs = gym.make_vec(case.environment, num_envs=case.envs, vectorization_mode=mode)
    actions, size = envs.single_action_space, int(np.prod(envs.single_observation_space.shape))
    discrete = isinstance(actions, gym.spaces.Discrete)
    outputs = int(actions.n) if discrete else int(np.prod(actions.shape))
    horizon = case.slots // case.envs

    def layer(inputs: int, width: int, gain: float = 2**0.5) -> nn.Linear:
        made = nn.Linear(inputs, width)
        nn.init.orthogonal_(made.weight, gain)
        nn.init.zeros_(made.bias)
        return made

    def network(width: int, gain: float) -> nn.Sequential:
        layers: list[nn.Module] = []
        inputs = size
        for hidden in case.hidden:
            layers += [layer(inputs, hidden), nn.Tanh()]
            inputs = hidden
        return nn.Sequential(*layers, layer(inputs, width, gain))

    policy, critic = network(outputs, 0.01), network(1, 1.0)
    log_std = nn.Parameter(torch.zeros(outputs))
    parameters = [*policy.parameters(), *critic.parameters(), *([] if discrete else [log_std])]
    optimizer = torch.optim.Adam(parameters, lr=2.5e-4, eps=1e-5)

    def distribution(obs: torch.Tensor) -> Categorical | Normal:
        found = policy(obs)
        return Categorical(logits=found) if discrete else Normal(found, log_std.exp())

    def log_prob(of: Categorical | Normal, action: torch.Tensor) -> torch.Tensor:
        found = of.log_prob(action)
        return found if discrete else found.sum(1)

    state = {"obs": torch.as_tensor(envs.reset(seed=1)[0], dtype=torch.float32), "done": torch.zeros(case.envs)}
    low, high = (None, None) if discrete else (actions.low, actions.high)

    def rollout() -> None:
        observations = torch.zeros(horizon, case.envs, size)
        taken = torch.zeros((horizon, case.envs) if discrete else (horizon, case.envs, outputs))
        log_probs, rewards, dones, values = torch.zeros(4, horizon, case.envs)
        obs, done = state["obs"], state["done"]
        for t in range(horizon):
            observations[t], dones[t] = obs, done
            with torch.no_grad():
                of = distribution(obs)
                action = of.sample()
                values[t] = critic(obs).squeeze(1)
            taken[t], log_probs[t] = action, log_prob(of, action)
            given = action.numpy() if discrete else np.clip(action.numpy(), low, high)
            following, reward, terminated, truncated, _ = envs.step(given)
            rewards[t] = torch.as_tensor(reward)
            obs = torch.as_tensor(following, dtype=torch.float32)
            done = torch.as_tensor(np.logical_or(terminated, truncated), dtype=torch.float32)
        state["obs"], state["done"] = obs, done
        with torch.no_grad():
            next_value, running = critic(obs).squeeze(1), torch.zeros(case.envs)
        advantages = torch.zeros(horizon, case.envs)
        for t in reversed(range(horizon)):
            goes_on = 1.0 - (done if t == horizon - 1 else dones[t + 1])
            following_value = next_value if t == horizon - 1 else values[t + 1]
            delta = rewards[t] + 0.99 * following_value * goes_on - values[t]
            running = delta + 0.99 * 0.95 * goes_on * running
            advantages[t] = running
        train(observations, taken, log_probs, advantages, advantages + values)

    def train(*columns: torch.Tensor) -> None:
        obs, action, old, advantage, target = (column.flatten(0, 1) for column in columns)
        for _ in range(case.epochs):
            for rows in torch.randperm(case.slots).split(case.batch):
                of = distribution(obs[rows])
                ratio = (log_prob(of, action[rows]) - old[rows]).exp()
                scaled = (advantage[rows] - advantage[rows].mean()) / (advantage[rows].std() + 1e-8)
                clipped = torch.maximum(-scaled * ratio, -scaled * ratio.clamp(0.8, 1.2)).mean()
                error = 0.5 * (critic(obs[rows]).squeeze(1) - target[rows]).square().mean()
                loss = clipped - 0.0 * of.entropy().mean() + 0.5 * error
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(parameters, 0.5)
                optimizer.step()

    def run(rollouts: int) -> None:
        for _ in range(rollouts):
            rollout()

    return f"as CleanRL does it, {case.threads} thread(s)", run


if __name__ == "__main__":
    serve(make)
