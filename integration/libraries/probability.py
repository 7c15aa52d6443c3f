"""GPyTorch, Pyro and torchdiffeq: processes, inference, differential equations."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn


def gaussian_process(device: str) -> Iterator[tuple[str, Tensor]]:
    import gpytorch
    from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel
    from gpytorch.likelihoods import GaussianLikelihood

    class Process(gpytorch.models.ExactGP):
        def __init__(self, x: Tensor, y: Tensor, likelihood: GaussianLikelihood) -> None:
            super().__init__(x, y, likelihood)
            self.mean = gpytorch.means.ConstantMean()
            self.covariance = ScaleKernel(RBFKernel() + MaternKernel(nu=2.5))

        def forward(self, x: Tensor) -> gpytorch.distributions.MultivariateNormal:
            return gpytorch.distributions.MultivariateNormal(self.mean(x), self.covariance(x))

    for dtype in (torch.float32, torch.float64):
        x = torch.linspace(0, 1, 30, dtype=dtype, device=device)
        y = torch.sin(6 * x)
        likelihood = GaussianLikelihood().to(device, dtype)
        model = Process(x, y, likelihood).to(device, dtype)
        optimizer = torch.optim.Adam(model.parameters(), 0.1)
        evidence = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
        for step in range(8):
            optimizer.zero_grad()
            loss = -evidence(model(x), y)
            loss.backward()
            optimizer.step()
            yield f"{dtype}, step {step}", loss.detach()
        model.eval(), likelihood.eval()
        with torch.no_grad(), gpytorch.settings.fast_pred_var():
            found = likelihood(model(torch.linspace(0, 1, 11, dtype=dtype, device=device)))
            yield f"{dtype}, mean", found.mean
            yield f"{dtype}, variance", found.variance


def mixture(device: str) -> Iterator[tuple[str, Tensor]]:
    """Variational inference with the discrete variable summed out."""
    import pyro
    import pyro.distributions as dist
    from pyro.infer import SVI, TraceEnum_ELBO, config_enumerate

    noise = torch.randn(40, generator=torch.Generator().manual_seed(0))
    data = torch.cat([noise[:20] - 3, noise[20:] + 3]).to(device)

    @config_enumerate
    def model(data: Tensor) -> None:
        share = torch.ones(2, device=device) / 2
        weights = pyro.param("weights", share, constraint=dist.constraints.simplex)
        places = pyro.param("places", torch.tensor([-1.0, 1.0], device=device))
        with pyro.plate("data", len(data)):
            kind = pyro.sample("kind", dist.Categorical(weights))
            pyro.sample("seen", dist.Normal(places[kind], 1.0), obs=data)

    pyro.clear_param_store()
    loss = TraceEnum_ELBO(max_plate_nesting=1)
    inference = SVI(model, lambda data: None, pyro.optim.Adam({"lr": 0.05}), loss)
    for step in range(12):
        yield f"step {step}", torch.tensor(inference.step(data))
    for name in ("weights", "places"):
        yield name, pyro.param(name).detach()


def equations(device: str) -> Iterator[tuple[str, Tensor]]:
    from torchdiffeq import odeint, odeint_adjoint

    class Field(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2))

        def forward(self, time: Tensor, state: Tensor) -> Tensor:
            return self.body(state)

    torch.manual_seed(0)
    field = Field().to(device)
    start = torch.tensor([[1.0, 0.0], [0.5, 0.5]], device=device)
    times = torch.linspace(0, 1, 5, device=device)
    for method in ("dopri5", "rk4", "bosh3", "implicit_adams"):
        for solve in (odeint, odeint_adjoint):
            field.zero_grad()
            path = solve(field, start, times, method=method)
            path.square().sum().backward()
            yield f"{solve.__name__}, {method}", path.detach()
            gradient = field.body[0].weight.grad
            yield f"gradient of {solve.__name__}, {method}", gradient
