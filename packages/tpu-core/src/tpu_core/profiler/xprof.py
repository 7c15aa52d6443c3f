"""Tools of the package ``xprof``, where it is installed."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any


def tool_names(folder: str | os.PathLike[str]) -> list[str]:
    """Names of the tools that a profile has data for, such as ``"roofline_model"``.

    Args:
        folder: As given to `trace`; its newest profile is read.

    Raises:
        ModuleNotFoundError: ``xprof`` is not installed.
        FileNotFoundError: No profile is in the folder.
    """
    return list(_converter().xspace_to_tool_names(_files(folder)))


def tool(folder: str | os.PathLike[str], name: str, **options: Any) -> str | bytes:
    """Data of one of XProf's tools, as its page in XProf shows it: JSON for most.

    Args:
        folder: As given to `trace`; its newest profile is read.
        name: Of the tool: ``"roofline_model"``, ``"memory_profile"``, ``"memory_viewer"``,
            ``"op_profile"``, ``"framework_op_stats"``.
        options: Of the tool.

    Raises:
        ModuleNotFoundError: ``xprof`` is not installed.
        FileNotFoundError: No profile is in the folder.
        ValueError: The profile has nothing for the tool.

    Example:
        >>> table = json.loads(torch.tpu.profiler.tool("profiles", "roofline_model"))
    """
    files = _files(folder)
    if name == "memory_profile":  # of one host at a time
        files = files[:1]
    data, _ = _converter().xspace_to_tool_data(files, name, options)
    if data is None:
        raise ValueError(f"The profile in {folder} has no data for XProf's tool '{name}'.")
    found: str | bytes = data
    return found


def _files(folder: str | os.PathLike[str]) -> list[str]:
    runs = sorted(Path(folder).glob("plugins/profile/*"), key=lambda run: run.stat().st_mtime)
    files = sorted(map(str, runs[-1].glob("*.xplane.pb"))) if runs else []
    if not files:
        raise FileNotFoundError(
            f"No profile is in {folder}: torch.tpu.profiler.trace(folder) writes one."
        )
    return files


def _converter() -> Any:
    try:
        raw_to_tool_data = importlib.import_module("xprof.convert.raw_to_tool_data")
    except ImportError as error:
        raise ModuleNotFoundError(
            "XProf's tools need package 'xprof': pip install xprof"
        ) from error
    return raw_to_tool_data
