"""Checks of arguments and results against the shapes and dtypes in the library's signatures.

The modules must not be imported before: jaxtyping decorates their functions on import.
"""

from __future__ import annotations

from jaxtyping import install_import_hook

OPS = (
    *("attention", "cross_entropy", "grouped_mm", "int4_mm"),
    *("paged_attention", "ragged_paged_attention"),
)
# An int is a float, as type checkers have it.
CHECKER = "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))"


def install() -> None:
    install_import_hook([f"tpu_kernels.ops.{op}" for op in OPS], CHECKER)
