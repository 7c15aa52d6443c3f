"""Dumps of compiled programs.

``TPU_DUMP`` writes files, ``TORCH_LOGS="stablehlo"`` prints, and ``TORCH_TRACE`` records artifacts
that tlparse shows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from torch._logging import getArtifactLogger, trace_structured
from torch._logging._internal import register_artifact

from tpu_core.config import config
from tpu_core.pjrt import client as pjrt


def artifact_logger(name: str, description: str) -> logging.Logger:
    """A logger that is on where ``TORCH_LOGS`` lists its name."""
    register_artifact(name, description, visible=True)
    # Below "torch", whose loggers TORCH_LOGS sets up.
    return getArtifactLogger("torch.tpu", name)


logger = artifact_logger("stablehlo", "StableHLO of each program compiled for device tpu.")


def lowered(key: str, module: bytes, contents: Iterable[tuple[str, str]]) -> None:
    """Show a program that is about to be compiled.

    Args:
        key: Its key in the cache.
        module: StableHLO bytecode.
        contents: The user's line and the op of each of its parts, which the text begins with.
    """

    def text() -> str:
        ops = "".join(f"// {op}  {line}\n" for line, op in contents)
        return ops + pjrt.module_text(module)

    write(f"{key[:16]}.stablehlo.mlir", text)
    if logger.isEnabledFor(logging.DEBUG):
        logger.debug("%s\n%s", key[:16], text())
    trace(f"tpu_stablehlo_{key[:16]}", text)


def compiled(key: str, executable: Any) -> None:
    """Show what XLA made of a program."""
    write(f"{key[:16]}.optimized.hlo.txt", lambda: pjrt.optimized_text(executable))


def write(name: str, text: Callable[[], str]) -> None:
    """Write a file into ``TPU_DUMP``, if that is set."""
    folder = config().dump_dir
    if folder is not None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / name).write_text(text())


def trace(name: str, text: Callable[[], str]) -> None:
    """Record an artifact in PyTorch's structured trace, if ``TORCH_TRACE`` is set."""
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": "string"},
        payload_fn=text,
        expect_trace_id=False,
    )
