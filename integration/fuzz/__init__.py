"""Fuzzers of the device against PyTorch's CPU: ``python -m fuzz calls --seconds 60 --seed 7``."""
