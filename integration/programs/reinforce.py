"""REINFORCE: an item() for each step of the environment, episodes of other lengths."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import nn


class CartPole:
    """The pole on a cart, in plain Python."""

    def __init__(self, seed: int) -> None:
        self.g = torch.Generator().manual_seed(seed)

    def reset(self) -> list[float]:
        self.state = (torch.rand(4, generator=self.g) * 0.1 - 0.05).tolist()
        return self.state

    def step(self, action: int) -> tuple[list[float], bool]:
        x, v, angle, spin = self.state
        force = 10.0 if action else -10.0
        push = (force + 0.05 * spin**2 * math.sin(angle)) / 1.1
        turn = (9.8 * math.sin(angle) - math.cos(angle) * push) / (
            0.5 * (4 / 3 - 0.1 * math.cos(angle) ** 2 / 1.1)
        )
        speed = push - 0.05 * turn * math.cos(angle) / 1.1
        dt = 0.02
        self.state = [x + dt * v, v + dt * speed, angle + dt * spin, spin + dt * turn]
        return self.state, abs(self.state[0]) > 2.4 or abs(self.state[2]) > 0.2095


def run(device: str) -> Iterator[float]:
    torch.manual_seed(0)
    policy = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 2)).to(device)
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    environment, draws = CartPole(1), torch.Generator().manual_seed(2)
    while True:
        state, ended, log_probs, rewards = environment.reset(), False, [], []
        while not ended and len(rewards) < 100:
            logits = policy(torch.tensor(state, device=device))
            log_p = torch.log_softmax(logits, dim=-1)
            action = int(torch.rand(1, generator=draws).item() < log_p[1].exp().item())
            log_probs.append(log_p[action])
            state, ended = environment.step(action)
            rewards.append(1.0)
        returns, total = [], 0.0
        for reward in reversed(rewards):
            total = reward + 0.99 * total
            returns.insert(0, total)
        target = torch.tensor(returns, device=device)
        target = (target - target.mean()) / (target.std() + 1e-6)
        loss = -(torch.stack(log_probs) * target).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield len(rewards) + loss.item()
