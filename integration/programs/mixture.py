"""A mixture of Gaussians by expectation maximisation: Cholesky, triangular solves, logsumexp."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

POINTS, DIM, PARTS = 500, 4, 5


def log_density(x: torch.Tensor, means: torch.Tensor, covariances: torch.Tensor) -> torch.Tensor:
    """Of each point under each part, ``[points, parts]``."""
    factors = torch.linalg.cholesky(covariances)
    difference = (x[:, None] - means).permute(1, 2, 0)
    z = torch.linalg.solve_triangular(factors, difference, upper=False)
    log_det = factors.diagonal(dim1=1, dim2=2).log().sum(1)
    return (-0.5 * (z.square().sum(1) + DIM * math.log(2 * math.pi)) - log_det[:, None]).T


def run(device: str) -> Iterator[float]:
    g = torch.Generator().manual_seed(1)
    own = torch.randint(PARTS, (POINTS,), generator=g)
    true = 3 * torch.randn(PARTS, DIM, generator=g)
    spread = torch.randn(PARTS, DIM, DIM, generator=g) / 2
    noise = torch.randn(POINTS, DIM, 1, generator=g)
    x = (true[own] + (spread[own] @ noise)[..., 0]).to(device)
    means = x[torch.randperm(POINTS, generator=g)[:PARTS].to(device)]
    covariances = torch.eye(DIM, device=device).repeat(PARTS, 1, 1)
    weights = torch.full((PARTS,), 1 / PARTS, device=device)
    while True:
        joint = log_density(x, means, covariances) + weights.log()
        total = joint.logsumexp(1, keepdim=True)
        p = (joint - total).exp()
        mass = p.sum(0)
        weights = mass / POINTS
        means = p.T @ x / mass[:, None]
        difference = x[:, None] - means
        covariances = torch.einsum("np,npi,npj->pij", p, difference, difference)
        covariances = covariances / mass[:, None, None] + 1e-3 * torch.eye(DIM, device=device)
        yield total.mean().item()
