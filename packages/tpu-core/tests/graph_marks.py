"""Marks of the tests of captured graphs."""

from __future__ import annotations

import pytest
import torch

# Older releases have no such class: there is nothing that a test could call.
CAPTURES = pytest.mark.skipif(
    not hasattr(torch.accelerator, "Graph"), reason="torch.accelerator.Graph is of torch 2.13"
)
