"""Stand-in for the extension's build for the installed torch."""

from tpu_core.cpp_extension import CORE

CORE.load_build()
