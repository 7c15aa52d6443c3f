"""A variational autoencoder with a KL term that is warmed up, and samples now and then."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

PIXELS, LATENT, BATCH = 784, 20, 64


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(PIXELS, 200)
        self.mean, self.log_variance = nn.Linear(200, LATENT), nn.Linear(200, LATENT)
        self.decoder = nn.Sequential(nn.Linear(LATENT, 200), nn.ReLU(), nn.Linear(200, PIXELS))

    def forward(self, x: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = F.relu(self.into(x))
        mean, log_variance = self.mean(h), self.log_variance(h)
        return self.decoder(mean + noise * torch.exp(0.5 * log_variance)), mean, log_variance


def run(device: str) -> Iterator[torch.Tensor]:
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(1)
    model = VAE().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    patterns = torch.rand(10, PIXELS, generator=g)
    step = 0
    while True:
        chosen = patterns[torch.randint(10, (BATCH,), generator=g)]
        x = torch.bernoulli(chosen, generator=g).to(device)
        logits, mean, log_variance = model(x, torch.randn(BATCH, LATENT, generator=g).to(device))
        of_pixels = F.binary_cross_entropy_with_logits(logits, x, reduction="sum") / BATCH
        kl = -0.5 * (1 + log_variance - mean.pow(2) - log_variance.exp()).sum() / BATCH
        loss = of_pixels + min(1.0, step / 100) * kl
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if step % 5 == 0:
            with torch.no_grad():
                z = torch.randn(16, LATENT, generator=g).to(device)
                loss = loss + (model.decoder(z).sigmoid() > 0.5).float().mean()
        yield loss.detach()
