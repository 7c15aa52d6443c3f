"""Programs of `torch.export` as StableHLO that JAX runs without PyTorch.

Example:
    >>> program = torch.export.export(model, (x,))
    >>> tpu_compile.export.save(program, "model")
    >>> run = tpu_compile.export.load("model")
    >>> run(x.to("tpu"))

Without PyTorch: ``tpu_compile.export.with_jax.load("model")`` needs jax and numpy alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tpu_compile.export.callable import load as load
    from tpu_compile.export.writer import save as save

__all__ = ["load", "save"]


def __getattr__(name: str) -> Any:
    # Neither is imported with the package: its module `with_jax` does without torch.
    if name == "save":
        from tpu_compile.export.writer import save

        return save
    if name == "load":
        from tpu_compile.export.callable import load

        return load
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
