"""``torch.tpu.profiler``: profiles of the device for XProf, TensorBoard and Perfetto.

`torch.profiler` shows rows of the device without this module; it adds files for XLA's own tools.
"""

from __future__ import annotations

from tpu_core.profiler.annotations import annotate, step
from tpu_core.profiler.files import Trace, trace
from tpu_core.profiler.xprof import tool, tool_names

__all__ = ["Trace", "annotate", "step", "tool", "tool_names", "trace"]
