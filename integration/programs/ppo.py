"""PPO with parallel environments on the device, several epochs of shuffled minibatches."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

ENVIRONMENTS, HORIZON, EPOCHS, BATCH = 16, 12, 2, 64


class Agent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        self.mean, self.value = nn.Linear(64, 1), nn.Linear(64, 1)
        self.log_std = nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> tuple[torch.distributions.Normal, torch.Tensor]:
        h = self.body(x)
        return torch.distributions.Normal(self.mean(h), self.log_std.exp()), self.value(h)[:, 0]


def pendulum(angle: torch.Tensor, spin: torch.Tensor, torque: torch.Tensor) -> tuple:
    cost = torch.remainder(angle + torch.pi, 2 * torch.pi).sub(torch.pi) ** 2 + 0.1 * spin**2
    spin = (spin + 0.05 * (15 * angle.sin() + 3 * torque.clamp(-2, 2))).clamp(-8, 8)
    return angle + 0.05 * spin, spin, -cost


def run(device: str) -> Iterator[float]:
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(1)
    agent = Agent().to(device)
    optimizer = torch.optim.Adam(agent.parameters(), lr=3e-4, eps=1e-5)
    angle = (torch.rand(ENVIRONMENTS, generator=g) * 6 - 3).to(device)
    spin = torch.zeros(ENVIRONMENTS, device=device)
    while True:
        rows = []
        with torch.no_grad():
            for _ in range(HORIZON):
                state = torch.stack([angle.cos(), angle.sin(), spin / 8], 1)
                policy, value = agent(state)
                noise = torch.randn(ENVIRONMENTS, 1, generator=g).to(device)
                action = policy.mean + policy.stddev * noise
                angle, spin, reward = pendulum(angle, spin, action[:, 0])
                rows.append((state, action, policy.log_prob(action)[:, 0], value, reward / 10))
            last = agent(torch.stack([angle.cos(), angle.sin(), spin / 8], 1))[1]
            states, actions, log_p, values, rewards = (torch.stack(r) for r in zip(*rows))
            advantages, ahead, following = torch.zeros_like(rewards), 0.0, last
            for t in reversed(range(HORIZON)):
                ahead = rewards[t] + 0.99 * following - values[t] + 0.99 * 0.95 * ahead
                advantages[t], following = ahead, values[t]
        flat = [x.flatten(0, 1) for x in (states, actions, log_p, advantages, advantages + values)]
        for _ in range(EPOCHS):
            for index in torch.randperm(ENVIRONMENTS * HORIZON, generator=g).split(BATCH):
                s, a, old, advantage, wanted = (x[index.to(device)] for x in flat)
                advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
                policy, value = agent(s)
                ratio = (policy.log_prob(a)[:, 0] - old).exp()
                gain = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
                loss = 0.5 * (value - wanted).square().mean() - gain
                loss = loss - 0.01 * policy.entropy().mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                optimizer.step()
        yield loss.item() + rewards.mean().item()
