"""The module ``torch.tpu.profiler``, see `tpu_core.profiler`."""

from tpu_core.profiler import Trace, annotate, step, tool, tool_names, trace

__all__ = ["Trace", "annotate", "step", "tool", "tool_names", "trace"]
