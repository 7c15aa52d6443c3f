"""A GAN with a gradient penalty: double backward, two optimizers, several critic steps."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

LATENT, PIXELS, CRITIC_STEPS, BATCH = 16, 144, 3, 64


def network(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in zip(sizes, sizes[1:]):
        layers += [nn.Linear(a, b), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers[:-1])


def penalty(critic: nn.Module, real: torch.Tensor, fake: torch.Tensor, share: torch.Tensor):
    mixed = (share * real + (1 - share) * fake).requires_grad_()
    (gradient,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
    return ((gradient.norm(2, dim=1) - 1) ** 2).mean()


def run(device: str) -> Iterator[torch.Tensor]:
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(1)
    generator = network(LATENT, 128, 128, PIXELS).to(device)
    critic = network(PIXELS, 128, 128, 1).to(device)
    of_generator = torch.optim.Adam(generator.parameters(), lr=1e-4, betas=(0.0, 0.9))
    of_critic = torch.optim.Adam(critic.parameters(), lr=1e-4, betas=(0.0, 0.9))
    while True:
        for _ in range(CRITIC_STEPS):
            real = torch.randn(BATCH, PIXELS, generator=g).cumsum(1).tanh().to(device)
            with torch.no_grad():
                fake = generator(torch.randn(BATCH, LATENT, generator=g).to(device))
            share = torch.rand(BATCH, 1, generator=g).to(device)
            critic_loss = critic(fake).mean() - critic(real).mean()
            critic_loss = critic_loss + 10 * penalty(critic, real, fake, share)
            of_critic.zero_grad(set_to_none=True)
            critic_loss.backward()
            of_critic.step()
        critic.requires_grad_(False)
        loss = -critic(generator(torch.randn(BATCH, LATENT, generator=g).to(device))).mean()
        of_generator.zero_grad(set_to_none=True)
        loss.backward()
        of_generator.step()
        critic.requires_grad_(True)
        yield critic_loss.detach() + loss.detach()
