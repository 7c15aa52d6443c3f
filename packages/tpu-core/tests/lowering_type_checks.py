"""Checks of arguments and results against the shapes and dtypes in signatures of lowerings.

The modules must not be imported before: jaxtyping decorates their functions on import.
"""

from __future__ import annotations

from jaxtyping import install_import_hook

CHECKED = (
    *("attention", "convolution", "convolution_forms", "convolution_taps"),
    *("convolution_weight_gradient", "ctc", "distance", "embedding", "grid_sampler", "grouped_mm"),
    *("int4", "linalg", "lu", "matmul", "rnn"),
)
# An int is a float, as type checkers have it.
CHECKER = "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))"


def install() -> None:
    install_import_hook([f"tpu_core.lowering.{name}" for name in CHECKED], CHECKER)
