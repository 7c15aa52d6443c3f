"""Stand-in for the extension's build for the installed torch."""

from pathlib import Path

from tpu_core.cpp_extension import Extension

Extension("tpu_distributed", Path(__file__).parent).load()
