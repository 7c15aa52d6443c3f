"""Models that tests and benchmarks train: plain PyTorch that knows no device.

Every model has ``loss(*batch)``, and every file a function ``random_batch`` that makes its batches
on the CPU from a generator.
"""
