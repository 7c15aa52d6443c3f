"""Optimizers of the fuzzer ``programs``: names and options."""

from __future__ import annotations

import random
from typing import Any


def draw_optimizer(r: random.Random) -> dict[str, Any]:
    decay = r.choice([0, 0, 0.01, 0.1])
    # Adam's own 1e-8 turns gradients that are 0 but for rounding into steps of full length.
    eps = r.choice([1e-8, 1e-4, 1e-3])
    betas = r.choice([(0.9, 0.999), (0.8, 0.9), (0.5, 0.99)])
    drawn: dict[str, dict[str, Any]] = {
        "SGD": {
            **{"lr": r.choice([0.1, 0.01]), "momentum": r.choice([0, 0.9]), "weight_decay": decay},
            "maximize": r.random() < 0.1,
        },
        "Adam": {"lr": 0.01, "betas": betas, "eps": eps, "amsgrad": r.random() < 0.3},
        "AdamW": {"lr": 0.01, "betas": betas, "eps": eps, "weight_decay": decay},
        "RMSprop": {
            **{"lr": 0.01, "alpha": r.choice([0.9, 0.99]), "eps": eps},
            **{"centered": r.random() < 0.3, "momentum": r.choice([0, 0.9])},
        },
        "Adagrad": {"lr": 0.05, "lr_decay": r.choice([0, 0.01]), "weight_decay": decay},
        "Adadelta": {"lr": 1.0, "rho": r.choice([0.9, 0.95])},
        "Adamax": {"lr": 0.01, "betas": betas, "eps": eps},
        "NAdam": {"lr": 0.01, "betas": betas, "eps": eps},
        "RAdam": {"lr": 0.01, "betas": betas, "eps": eps},
        "ASGD": {"lr": 0.01, "t0": r.choice([3, 1e6])},
        "Adafactor": {"lr": 0.01},
    }
    name = r.choice(["SGD", "SGD", "Adam", "AdamW", *drawn])
    options = {k: list(v) if isinstance(v, tuple) else v for k, v in drawn[name].items()}
    if name == "SGD" and options["momentum"]:
        options["nesterov"] = r.random() < 0.4
        if not options["nesterov"]:
            options["dampening"] = r.choice([0, 0.5])
    if name != "Adafactor":
        # By default only CPU tensors go one by one, where gradients are left as they are.
        options["foreach"] = r.choice([True, False])
    return {"name": name, **options}
