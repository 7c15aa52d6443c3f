"""DQN: a replay buffer on the device, actions read in each step, a target network."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

SIDE, ACTIONS, CAPACITY, BATCH = 6, 4, 1000, 32


class Maze:
    """A walk from a corner to the other, in plain Python."""

    def reset(self) -> torch.Tensor:
        self.row = self.column = self.age = 0
        return self.observe()

    def observe(self) -> torch.Tensor:
        return F.one_hot(torch.tensor([self.row, self.column]), SIDE).flatten().float()

    def step(self, action: int) -> tuple[torch.Tensor, float, bool]:
        down, right = ((1, 0), (-1, 0), (0, 1), (0, -1))[action]
        self.row = min(max(self.row + down, 0), SIDE - 1)
        self.column = min(max(self.column + right, 0), SIDE - 1)
        self.age += 1
        done = self.row == self.column == SIDE - 1
        return self.observe(), 1.0 if done else -0.01, done or self.age == 50


class Replay:
    def __init__(self, device: str) -> None:
        self.states = torch.zeros(CAPACITY, 2, 2 * SIDE, device=device)
        self.actions = torch.zeros(CAPACITY, dtype=torch.long, device=device)
        self.rewards = torch.zeros(CAPACITY, device=device)
        self.ended = torch.zeros(CAPACITY, dtype=torch.bool, device=device)
        self.count = 0

    def add(self, pair: tuple[torch.Tensor, ...], a: int, r: float, end: bool) -> None:
        i, self.count = self.count % CAPACITY, self.count + 1
        self.states[i, 0], self.states[i, 1] = pair
        self.actions[i], self.rewards[i], self.ended[i] = a, r, end


def run(device: str) -> Iterator[float]:
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(1)
    net = nn.Sequential(nn.Linear(2 * SIDE, 64), nn.ReLU(), nn.Linear(64, ACTIONS)).to(device)
    target = copy.deepcopy(net)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    maze, replay, total = Maze(), Replay(device), 0.0
    state = maze.reset().to(device)
    while True:
        for _ in range(4):
            if torch.rand((), generator=g) < max(0.1, 1 - replay.count / 2000):
                action = int(torch.randint(ACTIONS, (), generator=g))
            else:
                with torch.no_grad():
                    action = int(net(state[None]).argmax())
            after, reward, ended = maze.step(action)
            replay.add((state, after.to(device)), action, reward, ended)
            state = (maze.reset() if ended else after).to(device)
            total += reward
        i = torch.randint(min(replay.count, CAPACITY), (BATCH,), generator=g).to(device)
        before, later = replay.states[i].unbind(1)
        q = net(before).gather(1, replay.actions[i, None]).squeeze(1)
        with torch.no_grad():
            best = target(later).amax(1) * ~replay.ended[i]
        loss = F.smooth_l1_loss(q, replay.rewards[i] + 0.99 * best)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_(net.parameters(), 10)
        optimizer.step()
        if replay.count % 100 == 0:
            target.load_state_dict(net.state_dict())
        yield loss.item() + total
