"""What the PyTorch workloads and their JAX twins have in common: sizes, rates and the loop's shape.

Imports neither torch nor jax, so that a process of one framework does not pay for the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Job:
    """One workload, ready to run in this process.

    Attributes:
        step: ``step(i)`` does the i-th step and returns what `float` waits for: the loss, or a sum
            of what was computed.
        memory: Bytes of device memory a step needs, asked for after the last step; None where the
            framework does not say.
    """

    step: Callable[[int], Any]
    memory: Callable[[], int | None] = lambda: None


@dataclass(frozen=True)
class Spec:
    """How a workload is timed.

    Attributes:
        units: Timed units of steps, each ended by reading the result.
        steps: Steps in a unit; more than one where the loop itself reads only now and then.
        tolerance: How far apart the results of two frameworks may be, relative.
        compared: First steps whose results are compared: training amplifies differences in
            rounding, batch norm most.
    """

    units: int
    steps: int = 1
    tolerance: float = 1e-4
    compared: int = 3


SPECS = {
    "mlp": Spec(60),
    "small_ops": Spec(200),
    "gpt": Spec(20),
    "resnet18": Spec(20, tolerance=5e-3, compared=2),
    "rnn_dynamic": Spec(3),  # a step is a sweep of 40 sequences
    "decode_static": Spec(5),  # a step is 64 tokens
    "decode_growing": Spec(5),
    "accum": Spec(20, steps=10),
    "resnet50": Spec(12, tolerance=1e-3),
    "mobilenet_v2": Spec(20, tolerance=1e-3),
    "bert": Spec(12, tolerance=1e-3),
}
INFERENCE = ("resnet50", "mobilenet_v2", "bert")  # of whole models, whose results are read

LENGTHS = [16 + (i * 97) % 241 for i in range(40)]  # 40 distinct lengths in 16..256
PROMPT, TOKENS = 16, 64

MLP = {"features": 784, "hidden": 1024, "classes": 10}
GPT = {"vocab": 4096, "length": 256, "layers": 4, "dim": 256, "heads": 2}
DECODER = {**GPT, "length": 128}
SMALL_GPT = {"vocab": 256, "length": 64, "layers": 2, "dim": 64, "heads": 2}
RESNET = {"widths": (64, 128, 256, 512)}
IMAGES = (4, 3, 224, 224)
BERT = {"layers": 12, "heads": 12, "dim": 768, "vocab": 30522}
TEXTS = (2, 128)  # batch, tokens of BERT

ADAM_RATE = 1e-3
ADAMW_RATE, WEIGHT_DECAY = 3e-4, 0.1
SGD_RATE, MOMENTUM = 0.05, 0.9
MICRO_BATCHES, LARGEST_NORM, SCHEDULE_STEPS, LOG_EVERY = 4, 1.0, 1000, 10
BATCHES = 64  # different batches of `accum`, used again in turn


def cosine_rate(step: int) -> float:
    """Learning rate of `accum` at a step, as ``CosineAnnealingLR`` has it."""
    return 0.5 * ADAMW_RATE * (1 + math.cos(math.pi * step / SCHEDULE_STEPS))
